"""What ends a run early: the error, and how it is explained."""

from __future__ import annotations

import contextlib
import logging
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nsa_jax.train import disk
from nsa_jax.train.env import write_json
from nsa_jax.train.processes import peers

logger = logging.getLogger("nsa_jax")


class TrainingError(RuntimeError):
    """Training stopped because going on would waste the run; the message says why.

    Attributes:
      guard: name of the guard that stopped it.
      step: at which it noticed.
      save: whether the state is worth a checkpoint.
    """

    def __init__(self, message: str, *, guard: str = "", step: int = 0, save: bool = False):
        super().__init__(message)
        self.guard, self.step, self.save = guard, step, save

    def name_checkpoint(self, step: int | None) -> None:
        """Ends the message with the newest checkpoint."""
        newest = "there is no checkpoint" if step is None else f"the newest checkpoint is step {step}"
        self.args = (f"{self}; {newest}",)


def write_stop(workdir: Path, error: TrainingError, last_checkpoint: int | None, alarms: Any) -> None:
    """Writes stopped.json; the error is more important than a file that cannot be written."""
    stopped = {"guard": error.guard, "step": error.step, "message": str(error), "time": round(time.time(), 3)}
    stopped |= {"last_checkpoint": last_checkpoint, "alarms": alarms}
    try:
        write_json(workdir / "stopped.json", stopped)
    except OSError as failure:
        logger.error("stopped.json cannot be written (%s)", failure.strerror)


def newest_checkpoint(workdir: Path) -> int | None:
    """By the names of the directories: for when Orbax cannot be asked."""
    directory = workdir / "checkpoints"
    found = directory.iterdir() if directory.is_dir() else ()
    return max((int(path.name) for path in found if path.name.isdecimal()), default=None)


def check_room(directory: Path, need: int, step: int = 0) -> None:
    """Stops before a checkpoint is begun that cannot be finished.

    Args:
      directory: of the checkpoints, which may be a link to another disk than the workdir's.
      need: bytes of one.
      step: of the run.

    Raises:
      TrainingError: the disk has less than `need` bytes left.
    """
    directory = disk.fullest(directory)  # one that exists
    if shutil.disk_usage(directory).free < need:
        raise TrainingError(disk.advice(directory, need), guard="disk_full", step=step)


@contextlib.contextmanager
def writing_checkpoint(step: int) -> Iterator[None]:
    """Turns whatever goes wrong while checkpoints are written into an explanation.

    Raises:
      TrainingError: with the cause; a full disk is left for `workdir.run` to explain.
    """
    try:
        yield
    except TrainingError:
        raise
    except Exception as error:  # Orbax reports what failed in the background in many types
        if disk.is_full(error):
            raise
        raise TrainingError(
            f"step {step}, guard checkpoint_write: a checkpoint cannot be written ({type(error).__name__}: {error}). "
            "Fix: look at the disk, and start again",
            guard="checkpoint_write",
            step=step,
        ) from error


def find_cause(error: BaseException) -> None:
    """Collectives and checkpoints fail, in many ways, when a process is gone: gives the watch the time to say so.

    The watch then ends this process. Returns at once if there are no other processes or the error has another cause for
    sure, and after the time that a process takes to be missed if nobody is.
    """
    others = peers()
    if others is None or not isinstance(error, Exception):
        return
    if isinstance(error, TrainingError) and error.guard != "checkpoint_write":
        return
    logger.warning("%s: looking for the cause in the other processes", type(error).__name__)
    others.wait_for_verdict()
