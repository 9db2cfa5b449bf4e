"""When this process began, and how long steps take: intervals between log lines, and the clock they are read by."""

from __future__ import annotations

import os
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax


def process_start() -> float:
    """When this process began, on the clock of `time.perf_counter`; now, where the system does not tell."""
    now = time.perf_counter()
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return now
    return now - max(age, 0.0)


# This thread records when each step ends. Fetching metrics comes too late for that: it happens a log line later, takes
# milliseconds, and the host may have been held back meanwhile.
_watcher = ThreadPoolExecutor(max_workers=1, thread_name_prefix="step-end")


def _end_of(values: Any) -> float:
    """Waits until the device has computed `values`; returns the time."""
    jax.block_until_ready(values)
    return time.perf_counter()


class Interval:
    """Metrics of the steps since the last log line; read only after the next line's steps have been dispatched."""

    def __init__(self, first_step: int):
        self.first_step = first_step
        self.values: list[dict[str, jax.Array]] = []
        self.waits: list[float] = []
        self.idle = 0.0  # seconds of the waits for which the device had nothing to do
        self.held = 0.0  # seconds for which it had nothing to do while a log line was made, such as by callbacks
        self.health: dict[str, jax.Array] | None = None  # of NSA after the last step
        self.layers: dict[str, jax.Array] | None = None  # `layer_figures` of the last step
        self.untimed = 0  # steps before the clock's last restart
        self._end: Future[float] | None = None

    def add(self, values: dict[str, Any]) -> Future[float]:
        """Called when a step has been dispatched; returns when the device finishes it, by `time.perf_counter`."""
        self.layers = values.get("layers")
        self.values.append({name: value for name, value in values.items() if name != "layers"})
        self._end = _watcher.submit(_end_of, self.values[-1])
        return self._end

    def close(self, waits: list[float], idle: float) -> None:
        """Called when the last step has been dispatched."""
        self.waits, self.idle = waits, idle

    def end(self) -> float:
        """When the device finished the last step, on the clock of `time.perf_counter`."""
        assert self._end is not None, "no step was added"
        return self._end.result()

    def read(self) -> list[dict[str, float]]:
        """Waits for the last of the steps."""
        return [{name: float(value) for name, value in row.items()} for row in jax.device_get(self.values)]


class Clock:
    """Seconds that intervals of steps took on the device, without the time of validation and saving."""

    def __init__(self):
        self.restart()

    def restart(self) -> None:
        """The next interval begins now."""
        self.mark = time.perf_counter()  # where the next interval begins, the end of the one before

    def lap(self, interval: Interval) -> tuple[list[dict[str, float]], float]:
        """Waits for the interval; returns its metrics and the seconds from the end of the one before to its own.

        These are more than 0 if any of its steps is timed.
        """
        end = max(interval.end(), self.mark)
        seconds, self.mark = end - self.mark, end
        rows = interval.read()
        return rows, max(seconds, 1e-9) if len(rows) > interval.untimed else seconds
