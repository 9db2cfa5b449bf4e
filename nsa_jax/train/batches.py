"""The batches of the train loop, and how long it waits for them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future

import jax
import numpy as np

from nsa_jax.batch_ramp import BatchRamp
from nsa_jax.train.state import Setup, batch_sharding, to_device


def idle_seconds(start: float, end: float, last_step: Future[float] | None) -> float:
    """For how long the device had nothing to do while the loop waited for a batch.

    Args:
      start: when the wait began, on the clock of `time.perf_counter`.
      end: when it ended.
      last_step: when the device finished what it was given before; None if that was nothing.
    """
    if last_step is None or not last_step.done():
        return 0.0
    return max(end - max(start, last_step.result()), 0.0)


def joined(pieces: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """One batch of the rows of several."""
    if len(pieces) == 1:
        return pieces[0]
    return {name: np.concatenate([piece[name] for piece in pieces]) for name in pieces[0]}


class Batches:
    """Batches of the global array type, and how long the loop waited for each."""

    def __init__(self, iterator: Iterator, setup: Setup, start_step: int, on_batch: Callable, ramp: BatchRamp):
        self._iterator = iterator
        self._ramp = ramp
        self._step = start_step
        self._on_batch = on_batch
        self._sharding = batch_sharding(setup.mesh)
        self.waits: list[float] = []
        self.idle = 0.0
        self.last_step: Future[float] | None = None  # when the device finishes the step that was dispatched last

    def __next__(self) -> dict[str, jax.Array]:
        start = time.perf_counter()
        pieces = [next(self._iterator) for _ in range(self._ramp.rows(self._step + 1) // self._ramp.unit)]
        batch = joined(pieces)
        end = time.perf_counter()
        self.waits.append(end - start)
        self.idle += idle_seconds(start, end, self.last_step)
        self._step += 1
        self._on_batch(self._step, batch)
        return to_device(batch, self._sharding)

    def take_waits(self) -> tuple[list[float], float]:
        """Seconds waited per batch since the last call, and those of them for which the device was idle."""
        waits, idle, self.waits, self.idle = self.waits, self.idle, [], 0.0
        return waits, idle
