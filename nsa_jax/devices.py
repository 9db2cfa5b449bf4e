"""Which of the machine's devices JAX is told to use."""

from __future__ import annotations

import os
from pathlib import Path

import jax

_ACCELERATORS = (
    "/dev/nvidiactl",
    "/dev/nvidia0",
    "/dev/dxg",
    "/proc/driver/nvidia/version",
    "/dev/accel0",
    "/dev/vfio",
)


def choose_platform(*, cpu: bool = False) -> None:
    """Tells JAX to use the CPU where there is nothing else.

    Without it, the compiler plugin of the `aot` extra complains at every start that it finds no GPU. Call it before
    anything asks for devices; JAX_PLATFORMS in the environment has the last word.

    Args:
      cpu: use the CPU in any case, as a preflight for another machine's GPUs does.
    """
    if os.environ.get("JAX_PLATFORMS"):
        return
    if cpu or not any(Path(device).exists() for device in _ACCELERATORS):
        jax.config.update("jax_platforms", "cpu")
