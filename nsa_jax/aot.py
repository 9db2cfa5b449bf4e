"""Ahead-of-time compilation for a GPU that need not be present, for preflight and the kernel tests.

It needs the `aot` extra (the CUDA compiler plugin; no CUDA libraries, no driver). `compile_for_gpu` lowers a function
for the named GPU with the kernels chosen for it. It returns the executable, whose `memory_analysis()` and `as_text()`
describe the program. The executable cannot be run.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec, use_abstract_mesh

from nsa_jax.ops.target import Target, compile_for


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
      shared_memory: bytes of shared memory one block may use.
      l2_bytes: size of the L2 cache.
      clock_ghz: boost clock.
    """

    name: str
    device_kind: str
    compute_capability: tuple[int, int]
    cores: int
    memory_bytes: int
    bandwidth: int
    shared_memory: int
    l2_bytes: int
    clock_ghz: float

    @property
    def target(self) -> Target:
        return Target("gpu", self.compute_capability, ahead_of_time=True)

    def target_config(self) -> str:
        """XLA's GpuTargetConfigProto in text form."""
        major, minor = self.compute_capability
        feature = " feature_extension: ACCELERATED_FEATURES" if major == 9 else ""
        minor_text = f" minor: {minor}" if minor else ""
        return f"""gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {self.shared_memory + 1024}
  threads_per_core_limit: 2048
  core_count: {self.cores}
  fpus_per_core: {64 if major == 8 else 128}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {self.bandwidth}
  l2_cache_size: {self.l2_bytes}
  clock_rate_ghz: {self.clock_ghz}
  device_memory_size: {self.memory_bytes}
  shared_memory_per_block_optin: {self.shared_memory}
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
device_description_str: "{self.device_kind}"
"""


_A100_40GB = Gpu(
    name="a100-40gb",
    device_kind="NVIDIA A100-SXM4-40GB",
    compute_capability=(8, 0),
    cores=108,
    memory_bytes=42_297_786_368,
    bandwidth=1_555_200_000_000,
    shared_memory=166_912,
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
    shared_memory=232_448,
    l2_bytes=52_428_800,
    clock_ghz=1.98,
)
_H200 = dataclasses.replace(
    _H100, name="h200", device_kind="NVIDIA H200", memory_bytes=150_754_820_096, bandwidth=4_917_248_000_000
)

GPUS: dict[str, Gpu] = {gpu.name: gpu for gpu in (_A100_40GB, _A100_80GB, _H100, _H200)}


class AheadOfTimeUnavailable(RuntimeError):
    """The `aot` extra is not installed or does not match this JAX."""


def devices(gpu: str, count: int = 1) -> list[Any]:
    """Devices to build a Mesh from: `count` GPUs of the named kind on one host, compile-only.

    Raises:
      ValueError: `gpu` is not in `GPUS`.
      AheadOfTimeUnavailable: the `aot` extra is missing.
    """
    if gpu not in GPUS:
        raise ValueError(f"gpu={gpu!r}: must be one of {sorted(GPUS)}")
    try:
        topology = topologies.get_topology_desc(
            "", "cuda", topology=f"1x1x{count}", target_config=GPUS[gpu].target_config()
        )
    except Exception as error:
        raise AheadOfTimeUnavailable(
            f"cannot compile for {gpu} on this machine ({type(error).__name__}: {str(error)[:200]}); "
            "install the extra (pip install 'nsa_jax[aot]') and, where there is no GPU, set JAX_PLATFORMS=cpu"
        ) from error
    return list(topology.devices)


@contextlib.contextmanager
def tracing_for(gpu: str, mesh: Mesh) -> Iterator[None]:
    """Traces ops for `gpu`: kernels are chosen and lowered for it, and sharding sees `mesh`'s axes."""
    from jax._src.mesh import AbstractDevice  # no public name yet

    spec = GPUS[gpu]
    kind = AbstractDevice(device_kind=spec.device_kind, num_cores=spec.cores, platform="gpu")
    abstract = AbstractMesh(mesh.devices.shape, mesh.axis_names, axis_types=mesh.axis_types, abstract_device=kind)
    with compile_for(spec.target), use_abstract_mesh(abstract):
        yield


def compile_for_gpu(function: Callable, *args: Any, gpu: str, donate_argnums: Sequence[int] = ()) -> Any:
    """Compiles `function` for one GPU that need not be present.

    Args:
      function: a function of arrays (or pytrees of arrays), not yet jitted.
      *args: its arguments as pytrees of anything with shape and dtype.
      gpu: a name in `GPUS`.
      donate_argnums: as in `jax.jit`.

    Returns:
      The compiled program (`memory_analysis()`, `as_text()`).

    Raises:
      ValueError: `gpu` is not in `GPUS`.
      AheadOfTimeUnavailable: the `aot` extra is missing.
    """
    mesh = Mesh(np.array(devices(gpu)), ("device",), axis_types=(AxisType.Auto,))
    sharding = NamedSharding(mesh, PartitionSpec())
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), args)
    with tracing_for(gpu, mesh):
        traced = jax.jit(function, donate_argnums=tuple(donate_argnums)).trace(*shapes)
        return traced.lower(lowering_platforms=("cuda",)).compile()
