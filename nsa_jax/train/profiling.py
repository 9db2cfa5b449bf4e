"""A trace of a few training steps: python train.py --config=... --profile=START:STOP.

The trace of steps START to STOP - 1 is written to <workdir>/profile, in the format of xprof (`pip install xprof`, then
`xprof --logdir=<workdir>/profile`, or TensorBoard with its plugin), beside it `perfetto_trace.json.gz` for
https://ui.perfetto.dev. Process 0 writes that of its own devices.
"""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from nsa_jax.config import ConfigError, Problem

logger = logging.getLogger("nsa_jax")

_MOST_STEPS = 100  # a longer trace takes gigabytes and no viewer opens it


@dataclasses.dataclass(frozen=True)
class Window:
    """Steps to trace: the first, and the one after the last."""

    start: int
    stop: int


def parse_window(text: str) -> Window:
    """Reads START:STOP of --profile.

    Raises:
      ConfigError: it is no such window.
    """
    match = re.fullmatch(r"\s*(\d+):(\d+)\s*", text)
    if match is None:
        raise _error(text, "is not START:STOP", "give two step numbers, such as --profile=20:25 for steps 20 to 24")
    window = Window(int(match[1]), int(match[2]))
    if window.start < 2:
        raise _error(text, "step 1 would be traced while it compiles", "start at step 2 or later")
    if window.stop <= window.start:
        raise _error(text, "holds no step", "STOP is the step after the last that is traced")
    if window.stop - window.start > _MOST_STEPS:
        steps = window.stop - window.start
        raise _error(text, f"{steps:,} steps are too many to look at", f"trace up to {_MOST_STEPS} steps")
    return window


def check_window(window: Window, first_step: int, last_step: int, *, goes_on: bool = False) -> Window | None:
    """The steps must be among those that are about to be trained, after the first, which compiles.

    Args:
      window: the steps to trace.
      first_step: that is about to be trained.
      last_step: of the run.
      goes_on: the run was interrupted, or has rolled back, and goes on from its own checkpoint.

    Returns:
      The window; None if a run that goes on has passed its beginning.

    Raises:
      ConfigError: they are not.
    """
    text = f"{window.start}:{window.stop}"
    if window.start <= first_step:
        if goes_on:
            what = "--profile=%s: the run goes on with step %d, which compiles: nothing is traced; use %d or later"
            logger.warning(what, text, first_step, first_step + 1)
            return None
        raise _error(
            text, f"this start begins with step {first_step}, which compiles", f"use {first_step + 1} or later"
        )
    if window.stop - 1 > last_step:
        raise _error(text, f"the run ends with step {last_step}", "trace earlier steps")
    return window


def _error(text: str, wrong: str, fix: str) -> ConfigError:
    return ConfigError([Problem("R053", "error", f"--profile={text}: {wrong}", fix)])


class Profile:
    """Traces a window of steps.

    Args:
      window: the steps; None: nothing is traced.
      workdir: of the run.
      say: where it is told that the trace is there.
    """

    def __init__(self, window: Window | None, workdir: Path, say: Callable[[str], None]):
        self._window, self._directory, self._say = window, workdir / "profile", say
        self._running = False
        self._last = 0  # step that was dispatched

    def before(self, step: int, state: Any) -> None:
        """Before a step is dispatched; at the window's start, waits for the steps before it."""
        if self._window is None or step != self._window.start:
            return
        jax.block_until_ready(state)
        if jax.process_index() == 0:
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = 0  # every Python call: slows the host down, and drowns the rest
            jax.profiler.start_trace(self._directory, create_perfetto_trace=True, profiler_options=options)
            self._running = True

    def after(self, step: int, state: Any) -> bool:
        """After a step was dispatched; at the window's end, waits for it and writes the trace. Whether it did."""
        self._last = step
        if self._window is None or step != self._window.stop - 1:
            return False
        jax.block_until_ready(state)
        self.close()
        return True

    def close(self) -> None:
        """Ends a trace that is running: also if the run stops within the window."""
        if self._running and self._window is not None:
            self._running = False
            jax.profiler.stop_trace()
            self._say(f"profile of steps {self._window.start} to {self._last} in {self._directory}")
