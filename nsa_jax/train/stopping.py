"""Requests to stop: signals and a file."""

from __future__ import annotations

import contextlib
import signal
from pathlib import Path
from typing import Any

import jax

from nsa_jax.train import distributed

HALT = "HALT"


class StopRequest:
    """SIGTERM, SIGINT or a file named HALT in the workdir ask the run to save and stop.

    The second signal of a kind ends the process as if it were not handled.

    Args:
      workdir: of the run.
      mesh: of all devices: the processes stop at the same step.
    """

    def __init__(self, workdir: Path, mesh: jax.sharding.Mesh):
        self._halt = workdir / HALT
        self._vote = distributed.Vote(mesh) if jax.process_count() > 1 else None
        self._signal: str | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        for number in (signal.SIGTERM, signal.SIGINT):
            # Only the main thread may install handlers; elsewhere (a notebook's thread, a test) HALT still works.
            with contextlib.suppress(ValueError):
                self._previous[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        if jax.process_index() == 0:  # by now it has done its work on all: starting again resumes
            self._halt.unlink(missing_ok=True)

    def _on_signal(self, number: int, _frame: Any) -> None:
        self._signal = signal.Signals(number).name
        signal.signal(number, self._previous[number])

    def reason(self) -> str | None:
        """What asked to stop: on this process or, which all learn at the same step, on another."""
        mine = self._signal or (HALT if self._halt.exists() else None)
        if self._vote is None:
            return mine
        asker = self._vote(mine is not None)
        if asker is None:
            return None
        return mine or f"process {asker}"
