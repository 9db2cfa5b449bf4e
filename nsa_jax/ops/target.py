"""The device that ops are traced for: which implementation and which kernels are chosen depends on it.

Normally this is JAX's default device. Compiling ahead of time for a GPU that is not here (preflight, tests) states it:

    with compile_for(Target("gpu", (8, 0))):
        jax.jit(step).trace(...).lower(lowering_platforms=("cuda",)).compile()

The target is part of what JAX caches traces by, so one jitted function can be traced for several devices in turn.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
from jax.sharding import AxisType


@dataclasses.dataclass(frozen=True)
class Target:
    """A device kind to choose kernels for.

    Attributes:
      platform: `"cpu"`, `"gpu"` or `"tpu"`.
      compute_capability: CUDA compute capability as (major, minor); None off the GPU.
      ahead_of_time: the device is not this machine's: kernels must be lowered for it, never interpreted.
    """

    platform: str
    compute_capability: tuple[int, int] | None = None
    ahead_of_time: bool = False

    @property
    def is_gpu(self) -> bool:
        return self.platform == "gpu"

    @property
    def is_hopper(self) -> bool:
        """True on sm90, where wgmma and TMA exist (H100, H200)."""
        return self.compute_capability is not None and self.compute_capability[0] == 9

    @property
    def shared_memory(self) -> int:
        """Bytes of shared memory that a block may use; off the GPU those of an A100."""
        capability = self.compute_capability or (8, 0)
        if capability == (8, 0):
            return 166_912
        return 232_448 if capability[0] in (9, 10) else 101_376

    @property
    def is_small(self) -> bool:
        """True where a block has 99 KiB of shared memory, which takes smaller float32 tiles (RTX GPUs, L40S)."""
        return self.shared_memory < 128 * 1024


# A user context rather than a context variable: JAX retraces where its value differs.
_OVERRIDE = jax.make_user_context(default_value=None)


@contextlib.contextmanager
def compile_for(target: Target, *, ahead_of_time: bool = True) -> Iterator[Target]:
    """Makes ops traced in this context choose for `target` instead of the default device.

    Args:
      target: a device kind.
      ahead_of_time: False where what is traced runs here, as an A100's kernels do on a Hopper GPU.
    """
    with _OVERRIDE(dataclasses.replace(target, ahead_of_time=ahead_of_time)):
        yield target


def current_target() -> Target:
    """The device ops are being traced for: `compile_for`'s if inside one, else JAX's default device."""
    override = _OVERRIDE.value
    if override is not None:
        return override
    default: Any = getattr(jax.config, "jax_default_device", None)
    if isinstance(default, str):  # a platform name is allowed there
        device = jax.devices(default)[0]
    else:
        device = default or jax.devices()[0]
    if device.platform != "gpu":
        return Target(device.platform)
    major, minor = str(getattr(device, "compute_capability", "8.0")).split(".")[:2]
    return Target("gpu", (int(major), int(minor)))


def has_explicit_axes() -> bool:
    """Whether the mesh in context makes layouts a part of types, as `jax.make_mesh` does unless it is asked not to."""
    return AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types
