"""Callbacks: what a user adds to the training loop."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from nsa_jax.train import disk
from nsa_jax.train.errors import TrainingError


class Callback:
    """What the loop calls; override any of the methods. They are called on every process.

    An error in a method stops the run as a guard does: the state is saved, if all processes met the error, and
    stopped.json names the callback.
    """

    def on_start(self, run: Any, step: int) -> None:
        """Training begins.

        Args:
          run: the `nsa_jax.train.loop.Run`, for its config, workdir, setup and pipeline.
          step: last finished step; 0 unless the run is resumed.
        """

    def on_step(self, step: int, metrics: dict[str, float]) -> None:
        """A step has finished. The loop reads metrics at the end of a log interval, so that no step waits for them.

        Args:
          step: its number, from 1; every step is reported once, in order. After a rollback (`on_start` is called again)
            steps are counted from the restored checkpoint. Steps that had run when a callback raised are saved and not
            reported again.
          metrics: `train/loss` and the other metrics of a step, under the names of metrics.jsonl.
        """

    def on_end(self, summary: dict[str, Any]) -> None:
        """Training has ended, and everything is saved.

        Args:
          summary: what summary.json holds.
        """


class Callbacks:
    """Calls several callbacks in their order, and explains their errors."""

    def __init__(self, callbacks: Sequence[Callback]):
        self._callbacks = tuple(callbacks)

    def on_start(self, run: Any, step: int) -> None:
        """See `Callback`."""
        for callback in self._callbacks:
            with _explained(callback, step):
                callback.on_start(run, step)

    def on_step(self, step: int, metrics: dict[str, float]) -> None:
        """See `Callback`."""
        for callback in self._callbacks:
            with _explained(callback, step):
                callback.on_step(step, metrics)

    def on_end(self, summary: dict[str, Any]) -> None:
        """See `Callback`."""
        for callback in self._callbacks:
            with _explained(callback, summary["step"]):
                callback.on_end(summary)


@contextlib.contextmanager
def _explained(callback: Callback, step: int) -> Iterator[None]:
    """Turns an error of a callback into a TrainingError; `workdir.run` explains a full disk."""
    try:
        yield
    except TrainingError:
        raise
    except Exception as error:
        if disk.is_full(error):
            raise
        message = f"step {step}: callback {type(callback).__name__} raised {type(error).__name__}: {error}"
        raise TrainingError(message, guard="callback", step=step, save=True) from error
