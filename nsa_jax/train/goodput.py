"""Goodput: the share of the wall time that trains, and what the rest of it goes to.

training: the device computes train steps. It ends a lap when it has finished the steps of a log line.
data: within a lap, the device has nothing to do because the next batch is not there yet.
startup: from the beginning to the end of the first step's compilation: imports, data, preflight, restoring.
validation: validation and text samples, with their compilation.
saving: what the loop waits for a checkpoint, of which most is written in the background.
other: the rest, such as callbacks, profiling, and steps that an error kept from being logged.
repeated: training of earlier starts whose steps were lost and are run again. Only the whole run has it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nsa_jax.train.env import write_json
from nsa_jax.train.errors import newest_checkpoint

logger = logging.getLogger("nsa_jax")

CAUSES = ("training", "data", "startup", "validation", "saving", "other", "repeated")
_SECONDS = ("wall_seconds", *(f"{cause}_seconds" for cause in CAUSES))  # as they are written
_WRITE_SECONDS = 10.0  # between writes of goodput.json; a killed start loses at most so much of its record


class Goodput:
    """Where the time of one start goes, and that of all starts of the run by the records in its workdir.

    Args:
      workdir: of the run; goodput.json is written there.
      began: when this start began, on the clock of `time.perf_counter`; None: now.
      active: False on all processes but the first: nothing is written.
    """

    def __init__(self, workdir: Path, began: float | None = None, *, active: bool = True):
        self._path = workdir / "goodput.json"
        self._active = active
        self._began = time.perf_counter() if began is None else began
        self._date = time.time() - (time.perf_counter() - self._began)
        self._seconds = dict.fromkeys(CAUSES, 0.0)
        self._rest = "startup"  # the cause of what nothing was measured for
        self._earlier: list[dict[str, Any]] = []
        self._first = self._step = 0
        self._written = -math.inf

    def resume(self, step: int) -> None:
        """Reads the records of earlier starts; what they trained after `step` will be repeated."""
        self._first = self._step = step
        try:
            self._earlier = [
                _without_steps_after(step, start) for start in json.loads(self._path.read_text())["starts"]
            ]
        except FileNotFoundError:
            pass
        except (OSError, ValueError, KeyError, TypeError) as error:
            logger.warning("%s cannot be read (%s): goodput is that of this start", self._path, error)

    @contextlib.contextmanager
    def spent_on(self, cause: str) -> Iterator[None]:
        """Around what the loop does between laps."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[cause] += time.perf_counter() - start

    def first_lap(self, now: float) -> None:
        """The first step is compiled: all until now that was not spent on something else was the startup."""
        self._seconds["startup"] = now - self._began - sum(self._seconds.values())
        self._rest = "other"

    def lap(self, step: int, seconds: float, idle: float, end: float, held: float = 0.0) -> dict[str, float]:
        """Adds a lap.

        Args:
          step: the last of the lap.
          seconds: that it took on the device, waits for batches included.
          idle: seconds of it for which the device waited for batches.
          end: when it ended, on the clock of `time.perf_counter`.
          held: seconds of it for which the device waited for other work of the loop, such as callbacks.

        Returns:
          Metrics for the row of that step: seconds of this start by cause, and the goodput of this start and of all.
        """
        idle = min(idle, seconds)
        self._seconds["data"] += idle
        self._seconds["training"] += max(seconds - idle - held, 0.0)
        self._step = step
        if self._active and time.perf_counter() - self._written > _WRITE_SECONDS:
            self._write(end)
        start = self._start(end)
        times = {f"time/{name}": start[name] for name in _SECONDS if name != "repeated_seconds"}
        return {"perf/goodput": start["goodput"], "perf/goodput_run": self._run(end)["goodput"], **times}

    def _start(self, now: float) -> dict[str, float]:
        wall = now - self._began
        seconds = {**self._seconds, self._rest: wall - sum(self._seconds.values())}
        return _with_share(dict(zip(_SECONDS, (wall, *seconds.values()), strict=True)))

    def _run(self, now: float) -> dict[str, float]:
        starts = [*self._earlier, self._start(now)]
        return {"starts": len(starts), **_with_share({name: sum(start[name] for start in starts) for name in _SECONDS})}

    def summary(self) -> dict[str, Any]:
        """What summary.json says: seconds by cause and goodput of this start and of the whole run."""
        now = time.perf_counter()
        return {"start": self._start(now), "run": self._run(now)}

    def _write(self, now: float) -> None:
        """Writes goodput.json: the whole run, and one record for each start."""
        self._written = time.perf_counter()
        steps = {"first_step": self._first, "step": self._step, "checkpoint": newest_checkpoint(self._path.parent)}
        this = {"began": round(self._date, 3), **steps, **self._start(now)}
        write_json(self._path, {"run": self._run(now), "starts": [*self._earlier, this]})

    def close(self) -> None:
        """Writes the record of this start if the disk lets it: an error that ends the run is more important."""
        with contextlib.suppress(OSError):
            if self._active:
                self._write(time.perf_counter())


def _with_share(seconds: dict[str, float]) -> dict[str, float]:
    return {"goodput": seconds["training_seconds"] / max(seconds["wall_seconds"], 1e-9), **seconds}


def _without_steps_after(step: int, start: dict[str, Any]) -> dict[str, Any]:
    """The record of a start of which the steps after `step` were lost."""
    first, last = int(start["first_step"]), int(start["step"])
    seconds = {name: float(start[name]) for name in _SECONDS}
    if last <= step:
        return start
    lost = seconds["training_seconds"] * (last - max(first, step)) / max(last - first, 1)
    seconds["training_seconds"] -= lost
    seconds["repeated_seconds"] += lost
    kept = saved if (saved := start.get("checkpoint")) is not None and saved <= step else None
    return {**start, "step": max(first, step), "checkpoint": kept, **_with_share(seconds)}


def last_saved(workdir: Path) -> int | None:
    """The newest checkpoint that the records of a run tell of; None if it has not saved, or began anew since."""
    saved: list[Any] = []
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        saved += [start.get("checkpoint") for start in json.loads((workdir / "goodput.json").read_text())["starts"]]
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # earlier versions recorded it there alone
        summary = json.loads((workdir / "summary.json").read_text())
        saved += [summary["step"]] if summary["saved"] else []
    return max((step for step in saved if isinstance(step, int)), default=None)
