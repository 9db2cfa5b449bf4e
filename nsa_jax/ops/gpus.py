"""The GPUs that programs can be compiled for without having one. Figures are those of data sheets and of XLA."""

from __future__ import annotations

import dataclasses

from nsa_jax.ops.target import Target


@dataclasses.dataclass(frozen=True)
class Gpu:
    """The properties of a GPU that the compiler and the memory check need.

    Attributes:
      name: the name used on the command line.
      device_kind: as the driver reports it.
      compute_capability: (major, minor).
      cores: streaming multiprocessors.
      memory_bytes: device memory the driver reports.
      bandwidth: bytes per second of device memory.
      l2_bytes: size of the L2 cache.
      clock_ghz: boost clock.
      threads_per_core: that a multiprocessor holds at once.
      traced_as: a kind of the same compute capability, where JAX 0.12 does not know `device_kind`; else empty. The
        devices of `nsa_jax.aot` call themselves so too, because JAX compares the kinds of a program's meshes.
    """

    name: str
    device_kind: str
    compute_capability: tuple[int, int]
    cores: int
    memory_bytes: int
    bandwidth: int
    l2_bytes: int
    clock_ghz: float
    threads_per_core: int = 2048
    traced_as: str = ""

    @property
    def target(self) -> Target:
        return Target("gpu", self.compute_capability, ahead_of_time=True)

    def target_config(self) -> str:
        """XLA's GpuTargetConfigProto in text form."""
        major, minor = self.compute_capability
        feature = " feature_extension: ACCELERATED_FEATURES" if major in (9, 10) else ""
        shared = self.target.shared_memory
        minor_text = f" minor: {minor}" if minor else ""
        return f"""gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {shared + 1024}
  threads_per_core_limit: {self.threads_per_core}
  core_count: {self.cores}
  fpus_per_core: {64 if self.compute_capability == (8, 0) else 128}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {self.bandwidth}
  l2_cache_size: {self.l2_bytes}
  clock_rate_ghz: {self.clock_ghz}
  device_memory_size: {self.memory_bytes}
  shared_memory_per_block_optin: {shared}
  cuda_compute_capability {{ major: {major}{minor_text}{feature} }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  compile_time_toolkit_version: "12.9.0"
  runtime_version: "12.9.0"
  driver_version: "12.9.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "{self.traced_as or self.device_kind}"
"""


_A100_40GB = Gpu(
    name="a100-40gb",
    device_kind="NVIDIA A100-SXM4-40GB",
    compute_capability=(8, 0),
    cores=108,
    memory_bytes=42_297_786_368,
    bandwidth=1_555_200_000_000,
    l2_bytes=41_943_040,
    clock_ghz=1.41,
)
_A100_80GB = dataclasses.replace(
    _A100_40GB,
    name="a100-80gb",
    device_kind="NVIDIA A100-SXM4-80GB",
    memory_bytes=85_100_068_864,
    bandwidth=2_039_040_000_000,
)
_H100 = Gpu(
    name="h100",
    device_kind="NVIDIA H100 80GB HBM3",
    compute_capability=(9, 0),
    cores=132,
    memory_bytes=85_100_068_864,
    bandwidth=3_352_320_000_000,
    l2_bytes=52_428_800,
    clock_ghz=1.98,
)
_H200 = dataclasses.replace(
    _H100, name="h200", device_kind="NVIDIA H200", memory_bytes=150_754_820_096, bandwidth=4_917_248_000_000
)

_A6000 = Gpu(
    name="a6000",
    device_kind="NVIDIA RTX A6000",
    compute_capability=(8, 6),
    cores=84,
    memory_bytes=51_041_271_808,
    bandwidth=768_096_000_000,
    l2_bytes=6_291_456,
    clock_ghz=1.8,
    threads_per_core=1536,
    traced_as="NVIDIA A10",
)
_L40S = Gpu(
    name="l40s",
    device_kind="NVIDIA L40S",
    compute_capability=(8, 9),
    cores=142,
    memory_bytes=48_305_274_880,
    bandwidth=864_000_000_000,
    l2_bytes=100_663_296,
    clock_ghz=2.52,
    threads_per_core=1536,
    traced_as="NVIDIA L40",
)
_B200 = Gpu(
    name="b200",
    device_kind="NVIDIA B200",
    compute_capability=(10, 0),
    cores=148,
    memory_bytes=191_514_411_008,
    bandwidth=7_672_320_000_000,
    l2_bytes=132_644_864,
    clock_ghz=1.965,
)
_RTX_PRO_6000 = Gpu(
    name="rtx-pro-6000",
    device_kind="NVIDIA RTX PRO 6000 Blackwell Workstation Edition",
    compute_capability=(12, 0),
    cores=188,
    memory_bytes=103_079_215_104,
    bandwidth=1_792_000_000_000,
    l2_bytes=134_217_728,
    clock_ghz=2.6,
    threads_per_core=1536,
)

GPUS: dict[str, Gpu] = {
    gpu.name: gpu for gpu in (_A100_40GB, _A100_80GB, _H100, _H200, _B200, _A6000, _L40S, _RTX_PRO_6000)
}
