"""Going back to the last checkpoint when a guard stops a run, and leaving out the data that it was trained on since.

rollbacks.json in the workdir lists what was done. It is read whenever a checkpoint is restored, so that a run that is
stopped before its next checkpoint leaves out the same batches when it is started again.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax

from nsa_jax.config import ConfigError, Problem
from nsa_jax.train import processes
from nsa_jax.train.env import write_json
from nsa_jax.train.errors import TrainingError

FILE = "rollbacks.json"
GUARDS = ("non_finite", "divergence", "spike")  # of which another order of data may be free


class Rollbacks:
    """The rollbacks of a run.

    Args:
      workdir: of the run.
      limit: how many there may be, over all starts.

    Raises:
      ConfigError: rollbacks.json is damaged.
    """

    def __init__(self, workdir: Path, limit: int):
        self._path, self._limit = workdir / FILE, limit
        try:
            self.done: list[dict[str, Any]] = json.loads(processes.from_first(self._read))
            if not all(record.keys() >= {"checkpoint", "position", "next_batch"} for record in list(self.done)):
                raise ValueError("a record lacks a field")
        except (ValueError, TypeError, AttributeError) as error:
            fix = "restore it; writing [] into it instead has the run train on the batches that it had left out"
            problem = Problem("R023", "error", f"{self._path}: is damaged ({error})", fix)
            raise ConfigError([problem]) from error

    def _read(self) -> str:
        return self._path.read_text(errors="replace") if self._path.exists() else "[]"

    def forget(self) -> None:
        """The run begins anew: records of one before in the same workdir are put aside, and skip nothing."""
        if self.done and jax.process_index() == 0:
            write_json(self._path.with_name("rollbacks_before.json"), self.done)
            write_json(self._path, [])  # not removed: an object store keeps what is removed here
        self.done = []

    def serves(self, error: TrainingError) -> bool:
        """Whether a rollback is the answer to an error."""
        return error.guard in GUARDS and len(self.done) < self._limit

    def add(self, error: TrainingError, checkpoint: int, position: int, next_batch: int, alarms: dict[str, int]) -> str:
        """Notes a rollback.

        Args:
          error: what the guard said.
          checkpoint: step of the checkpoint that is restored next.
          position: of the data in that checkpoint, in batches.
          next_batch: the position after the batch of the bad step.
          alarms: how often each was raised so far.

        Returns:
          One line for the terminal.
        """
        record = {"guard": error.guard, "step": error.step, "checkpoint": checkpoint, "position": position}
        self.done.append({**record, "next_batch": next_batch, "message": str(error), "alarms": alarms})
        if jax.process_index() == 0:
            write_json(self._path, self.done)
        return (
            f"rolling back ({len(self.done)} of {self._limit}): {error}. Going on after step {checkpoint} without the "
            f"{next_batch - position} batches since"
        )

    def _last_to(self, checkpoint: int, position: int) -> dict[str, Any]:
        """The record of the last return to a checkpoint whose data stand at a position; empty if there is none."""
        for record in reversed(self.done):
            if (record["checkpoint"], record["position"]) == (checkpoint, position):
                return record
        return {}

    def batches_to_skip(self, checkpoint: int, position: int) -> int:
        """How many batches to leave out after restoring a checkpoint whose data stand at a position."""
        return self._last_to(checkpoint, position).get("next_batch", position) - position

    def alarms(self, checkpoint: int, position: int) -> dict[str, int] | None:
        """How often each alarm had been raised before the last return to a checkpoint; None: there was no return."""
        return self._last_to(checkpoint, position).get("alarms")
