"""Heartbeats, and stacks of every thread when a run stands still.

A thread writes heartbeat_{process}.jsonl at regular times: the last finished step, how long ago that was, and memory.
When no step has finished for too long, all Python stacks go to stacks_{process}.txt; so they do on SIGUSR1. Should the
interpreter itself be stuck, a timer of faulthandler, which needs no interpreter, writes them.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import logging
import os
import threading
import time
from pathlib import Path

from nsa_jax.exit_status import EXIT_AGAIN
from nsa_jax.stacks import stacks_on_signal
from nsa_jax.train.watch.memory_use import memory_points

logger = logging.getLogger("nsa_jax")

_FIRST_STEP_SECONDS = 3600.0  # compiling and restoring may take long


class Watchdog:
    """Notices that no step finishes.

    Args:
      workdir: of the run.
      process: index of this process.
      stall_seconds: without a beat, unless the train step is compiled, for which there is an hour; 0: heartbeats only.
      heartbeat_seconds: between lines of the heartbeat file.
      exit_on_stall: end the process with status 75 when it stalls.
    """

    def __init__(
        self,
        workdir: Path,
        *,
        process: int = 0,
        stall_seconds: float = 600.0,
        heartbeat_seconds: float = 30.0,
        exit_on_stall: bool = False,
    ):
        self._path = workdir / f"heartbeat_{process}.jsonl"
        self._stacks_path = workdir / f"stacks_{process}.txt"
        self._stall, self._interval, self._exit = stall_seconds, heartbeat_seconds, exit_on_stall
        self._step: int | None = None
        self._doing = "starting"
        self._mark = time.monotonic()
        self._finished_step = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="nsa_jax watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        self._stacks = self._stacks_path.open("a")
        self._on_signal = stacks_on_signal(self._stacks)
        self._on_signal.__enter__()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(timeout=10)
        faulthandler.cancel_dump_traceback_later()
        self._on_signal.__exit__(None, None, None)
        self.write("stopped")
        empty = not os.fstat(self._stacks.fileno()).st_size
        self._stacks.close()
        if empty:
            self._stacks_path.unlink(missing_ok=True)  # somebody may have cleared empty files away

    def beat(self, step: int, doing: str = "training", *, finished: bool = True, compiles: bool = False) -> None:
        """Something got done.

        Args:
          step: last finished step.
          doing: what begins now.
          finished: whether a step has been finished, so that the compilation before it is over.
          compiles: whether a step is compiled now, as the first is, and one of a ramp whose batch grows.
        """
        self._step, self._doing, self._mark = step, doing, time.monotonic()
        self._finished_step = finished or (self._finished_step and not compiles)

    def alive(self) -> None:
        """The device has finished a step that no beat has told of yet, or a batch of validation."""
        self._mark = time.monotonic()

    def doing(self) -> str:
        """What the run is doing."""
        return f"{self._doing} after step {self._step or 0}"

    def write(self, event: str) -> None:
        """One line of the heartbeat file."""
        row = {
            "time": round(time.time(), 3),
            "event": event,
            "pid": os.getpid(),
            "step": self._step,
            "doing": self._doing,
            "seconds_since_progress": round(time.monotonic() - self._mark, 3),
        }
        for name, (used, limit) in memory_points().items():
            for label, size in ((name, used), (f"{name}_limit", limit)):
                row[f"{label}_mib"] = round(size / 2**20, 1)
                row[f"{label}_gib"] = round(size / 2**30, 3)
        with contextlib.suppress(OSError), self._path.open("a") as file:  # a full disk must not end the watch
            file.write(json.dumps(row) + "\n")

    def _watch(self) -> None:
        told: float | None = None
        tick = min(self._interval, self._stall / 4 if self._stall else self._interval)
        next_line = time.monotonic()
        while True:
            if self._stall:
                limit = self._stall if self._finished_step else max(self._stall, _FIRST_STEP_SECONDS)
                faulthandler.dump_traceback_later(limit + 2 * tick, exit=self._exit, file=self._stacks)
                silent = time.monotonic() - self._mark
                if silent > limit and told != self._mark:
                    told = self._mark
                    self._report(silent)
            if time.monotonic() >= next_line:
                self.write("alive")
                next_line = time.monotonic() + self._interval
            if self._stop.wait(tick):
                return

    def _report(self, silent: float) -> None:
        print(f"no step for {silent:.0f} s after step {self._step}, {self._doing}:", file=self._stacks, flush=True)
        faulthandler.dump_traceback(file=self._stacks, all_threads=True)
        self._stacks.flush()
        self.write("stalled")
        logger.error(
            "ALARM stall: no step for %.0f s after step %s (%s); the stacks of all threads are in %s",
            *(silent, self._step, self._doing, self._stacks_path),
        )
        if self._exit:
            logger.error("ending with status %s; start the run again to resume from its last checkpoint", EXIT_AGAIN)
            os._exit(EXIT_AGAIN)
