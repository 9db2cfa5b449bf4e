"""Timing and bookkeeping that the benchmarks share."""

from __future__ import annotations

import collections
import datetime
import pathlib
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp


def measure(
    function: Callable,
    arguments: Sequence[tuple],
    *,
    repeats: int = 11,
    min_sample_s: float = 0.1,
    wait: Callable = jax.block_until_ready,
) -> float:
    """Median milliseconds of one call on the device.

    Args:
      function: a compiled (jitted) function.
      arguments: argument sets to rotate among, so that small inputs do not live in the cache.
      repeats: how many samples the median is taken over.
      min_sample_s: calls are queued back to back until one sample lasts about this long: dispatching a call and
        waiting for its end take up to 1 ms beyond its kernels, which a program that runs one step after the other
        does not see. Samples of one or two calls gave 3.26 ms where the kernels took 2.23 (nsa forward, 8k, H200).
      wait: waits until the result that it is given is there, for functions of another framework.
    """
    for args in arguments:
        wait(function(*args))
    start = time.perf_counter()
    wait(function(*arguments[0]))
    once = time.perf_counter() - start
    calls = max(1, min(256, int(min_sample_s / max(once, 1e-6))))
    samples = []
    for repeat in range(repeats):
        start = time.perf_counter()
        result = None
        for call in range(calls):
            result = function(*arguments[(repeat + call) % len(arguments)])
        wait(result)
        samples.append((time.perf_counter() - start) / calls)
        del result
    return statistics.median(samples) * 1e3


def matmul_ceiling(size: int = 8192) -> float:
    """TFLOP/s of a plain bf16 matrix product of random data: the ceiling that shares are given of."""
    a, b = jax.random.normal(jax.random.key(0), (2, size, size), jnp.bfloat16)
    return 2 * size**3 / measure(jax.jit(jnp.matmul), [(a, b)]) / 1e9


def kernel_times(call: Callable[[], Any], calls: int = 1) -> dict[str, list[float]]:
    """Microseconds of each launch of each kernel on the first GPU, the kernel that takes most first; {} without a GPU.

    Args:
      call: launches the kernels, and returns arrays.
      calls: how many calls are traced: each figure is the mean of as many. All calls must launch the same kernels.
    """
    with tempfile.TemporaryDirectory() as directory:
        with jax.profiler.trace(directory):
            for _ in range(calls):
                jax.block_until_ready(call())
        (path,) = pathlib.Path(directory).rglob("*.xplane.pb")
        planes = jax.profiler.ProfileData.from_file(str(path)).planes
        return _by_launch(next((plane for plane in planes if plane.name.startswith("/device:GPU")), None), calls)


def _by_launch(plane: Any, calls: int) -> dict[str, list[float]]:
    """What `kernel_times` returns, from a trace's plane of one device."""
    lines = [line for line in plane.lines if line.name.startswith("Stream")] if plane else []
    found: dict[str, list[float]] = collections.defaultdict(list)
    for event in sorted((event for line in lines for event in line.events), key=lambda event: event.start_ns):
        found[event.name].append(event.duration_ns / 1e3)
    means = {
        name: [statistics.mean(us[i :: len(us) // calls]) for i in range(len(us) // calls)]
        for name, us in found.items()
    }
    return dict(sorted(means.items(), key=lambda item: -sum(item[1])))


def _output(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def commit_of(checkout: pathlib.Path) -> str | None:
    """The checkout's commit, with + if it was changed; None if it is no git repository of its own."""
    top = _output(["git", "-C", str(checkout), "rev-parse", "--show-toplevel"])
    if not top or pathlib.Path(top).resolve() != checkout.resolve():
        return None
    dirty = _output(["git", "-C", str(checkout), "status", "--porcelain", "--untracked-files=no"])
    return _output(["git", "-C", str(checkout), "rev-parse", "--short=12", "HEAD"]) + ("+" if dirty else "")


def environment(commit: str | None = None) -> dict[str, Any]:
    """What a figure depends on: GPU, driver, versions, commit, command and date."""
    device = jax.devices()[0]
    dirty = "+" if _output(["git", "status", "--porcelain", "--untracked-files=no"]) else ""
    return {
        "device": device.device_kind,
        "driver": _output(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "-i", "0"]),
        "jax": jax.__version__,
        "python": platform.python_version(),
        "commit": commit or _output(["git", "rev-parse", "--short=12", "HEAD"]) + dirty,
        "command": " ".join(["python", *sys.argv]),
        "date": datetime.date.today().isoformat(),
    }
