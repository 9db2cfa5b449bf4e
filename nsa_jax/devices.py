"""What JAX is told about the machine before it is used: which devices, and where to keep compiled programs."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import platform
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

logger = logging.getLogger("nsa_jax")

_ACCELERATORS = (
    "/dev/nvidiactl",
    "/dev/nvidia0",
    "/dev/dxg",
    "/proc/driver/nvidia/version",
    "/dev/accel0",
    "/dev/vfio",
)


def has_accelerator() -> bool:
    """Whether the system shows a driver or device of a GPU or TPU; JAX is not asked."""
    return any(Path(device).exists() for device in _ACCELERATORS)


def choose_platform(*, cpu: bool = False) -> None:
    """Tells JAX to use the CPU where there is nothing else.

    Without it, the compiler plugin of the `aot` extra complains at every start that it finds no GPU. Call it before
    anything asks for devices; JAX_PLATFORMS in the environment has the last word.

    Args:
      cpu: use the CPU in any case, as a preflight for another machine's GPUs does.
    """
    if os.environ.get("JAX_PLATFORMS"):
        return
    if cpu or not has_accelerator():
        jax.config.update("jax_platforms", "cpu")


def wake(devices: Sequence[jax.Device] | None = None) -> None:
    """Begins to set up this process's devices in a thread: a GPU's context and memory take one to two seconds.

    Args:
      devices: those that will be used, of any process; None: all.
    """
    here = [device for device in devices or jax.devices() if device.process_index == jax.process_index()]

    def touch() -> None:
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # the first that uses the device is told the same
            jax.device_put([np.zeros((), np.float32)] * len(here), here)

    threading.Thread(target=touch, name="wake devices", daemon=True).start()


# Seconds of compiling from which programs are kept. JAX's default leaves out the many small ones of a start.
_KEPT_FROM, _JAX_KEEPS_FROM = 0.1, 1.0
_JAX_FRAMES = 100  # JAX's default for how many frames of a traceback it writes beside each operation


def keep_compiled_programs(directory: str = "", *, lines: bool = False) -> Path | None:
    """Turns on JAX's persistent compilation cache: a program that was compiled once is loaded by later runs.

    Call it before anything is compiled. Programs for the CPU use the instructions of the machine that compiled them, so
    machines with other processors have folders of their own.

    Args:
      directory: to keep them in; empty: what JAX has been told (such as by JAX_COMPILATION_CACHE_DIR), else
        `compiled` in $NSA_JAX_CACHE or ~/.cache/nsa_jax; "off": nothing is kept.
      lines: name the lines of code that operations come from, for a profiler. JAX finds a program by its text, and the
        text of a kernel for GPUs has the lines of its callers: after an edit that moves them, the program is compiled
        again.

    Returns:
      The directory; None if nothing is kept.
    """
    if directory == "off":
        jax.config.update("jax_enable_compilation_cache", False)
        return None
    options: Any = jax.config
    frames = options.jax_traceback_in_locations_limit
    if "JAX_TRACEBACK_IN_LOCATIONS_LIMIT" not in os.environ and frames in (0, _JAX_FRAMES):
        jax.config.update("jax_traceback_in_locations_limit", _JAX_FRAMES if lines else 0)
    told = options.jax_compilation_cache_dir
    if told and not directory:
        return Path(told)
    root = Path(directory or os.environ.get("NSA_JAX_CACHE") or "~/.cache/nsa_jax").expanduser()
    path = (root if directory else root / "compiled") / processor()
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        logger.warning("compiled programs are not kept: %s cannot be written (%s)", path, error.strerror)
        return None
    jax.config.update("jax_compilation_cache_dir", str(path))
    chosen = "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" in os.environ
    if not chosen and options.jax_persistent_cache_min_compile_time_secs == _JAX_KEEPS_FROM:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", _KEPT_FROM)
    return path


def processor() -> str:
    """A name for the instructions that this machine's processor has."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    features = next((line for line in lines if line.lower().startswith(("flags", "features"))), platform.processor())
    return f"{platform.machine()}-{hashlib.blake2b(features.encode(), digest_size=4).hexdigest()}"
