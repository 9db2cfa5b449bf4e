"""Batches of training and validation data.

Batch s of a run holds rows [s * B, (s + 1) * B) of an endless order of rows that depends on the seed alone. Every
process takes its share of each batch. A run can therefore continue exactly from a step number, also with another number
of processes or workers. Only streamed datasets have more state; see streaming.py.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grain
import numpy as np

from nsa_jax.data import streaming
from nsa_jax.data.errors import DataError
from nsa_jax.data.packing import Batch, check_batch


@dataclasses.dataclass(frozen=True)
class Share:
    """Which rows of every global batch this process takes.

    Attributes:
      batch_size: B, rows of the global batch.
      process_index: of this process.
      process_count: of the run.
    """

    batch_size: int
    process_index: int = 0
    process_count: int = 1

    def __post_init__(self):
        if self.batch_size <= 0 or self.batch_size % self.process_count:
            raise DataError(
                f"config.train.batch_size={self.batch_size}",
                f"cannot be shared evenly by {self.process_count} processes",
                "use a positive multiple of the process count",
            )
        if not 0 <= self.process_index < self.process_count:
            raise DataError(
                f"process_index={self.process_index}", f"not in [0, {self.process_count})", "use jax.process_index()"
            )

    @property
    def size(self) -> int:
        """b, rows that this process takes."""
        return self.batch_size // self.process_count

    def rows(self, step: int) -> np.ndarray:
        """Global numbers of this process's rows of batch `step`: int64 [b]."""
        start = step * self.batch_size + self.process_index * self.size
        return np.arange(start, start + self.size, dtype=np.int64)


class StepBatches:
    """The batch of a step. Grain maps it over step numbers, in this process or in workers."""

    def __init__(self, rows: Callable[[np.ndarray], Batch], share: Share):
        self._rows = rows
        self._share = share

    def __call__(self, step: int) -> Batch:
        return check_batch(self._rows(self._share.rows(int(step))))


def end_with(parent: int, *_: int) -> None:
    """Ends this worker soon after its parent, which may have been killed without a chance to stop it."""

    def watch():
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


class TrainIterator(grain.DatasetIterator):
    """Endless training batches of this process.

    The state is a few JSON values: the step, the position in the stream if there is one, and the fingerprint of the
    data, which prevents continuing a checkpoint with other data. What all processes save can be loaded by any number of
    processes and workers. Orbax calls `save` and `load`.

    Args:
      open_at: opens the underlying grain iterator at a step.
      fingerprint: of everything that decides the batches.
      earlier: the fingerprint that earlier versions saved for these batches.
      start_step: first step to yield.
      stream: whether the underlying iterator has a position of its own.
    """

    def __init__(
        self,
        open_at: Callable[[int], grain.DatasetIterator],
        fingerprint: str,
        *,
        earlier: str = "",
        start_step: int = 0,
        stream: bool = False,
    ):
        super().__init__()
        self._open_at = open_at
        self._fingerprint, self._earlier = fingerprint, earlier or fingerprint
        self._stream = stream
        self._step = start_step
        self._inner: grain.DatasetIterator | None = None
        if stream and start_step:
            # A stream can only be read from its start, so this takes as long as loading these batches did in training.
            inner = self._ensure_open()
            for _ in range(start_step):
                next(inner)

    def _ensure_open(self) -> grain.DatasetIterator:
        if self._inner is None:
            self._inner = self._open_at(0 if self._stream else self._step)
        return self._inner

    def __next__(self) -> Batch:
        self._assert_not_closed()
        batch = next(self._ensure_open())
        self._step += 1
        return batch

    def get_state(self) -> dict[str, Any]:
        """JSON-serialisable position after the last batch that was returned; prefetched batches do not count."""
        position = self._ensure_open().get_state() if self._stream else None
        return {"step": self._step, "data": self._fingerprint, "stream": position}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continues after the batch at which `state` was taken.

        Raises:
          DataError: the state belongs to other data, tokenizer, sequence length, batch size or seed.
        """
        if state.get("data") not in (self._fingerprint, self._earlier):
            files = " or its files (path, size or time of a change; touch -d sets a time)" if self._stream else ""
            raise DataError(
                f"saved data position (data {state.get('data')}, step {state.get('step')})",
                f"belongs to other data than the config gives (data {self._fingerprint}): the corpus{files}, the "
                "sources or their weights, the tokenizer, seq_len, packing, packing_method, batch_size, held-out "
                "documents or seed differs, and the run could not continue exactly",
                "restore these settings and documents, or start a new run from the saved weights",
            )
        self._step = int(state["step"])
        if self._stream:
            self._ensure_open().set_state(state["stream"])
        else:
            self._release()

    async def load(self, directory):
        """Reads the states that all processes saved. They differ only in which lanes of a stream they have read."""
        files = sorted(Path(str(directory)).glob("process_*.json"))
        if not files:
            raise DataError(str(directory), "holds no data position", "use a complete checkpoint")

        async def read() -> None:
            states = [json.loads(await asyncio.to_thread(file.read_text)) for file in files]
            if self._stream:
                states[0]["stream"] = streaming.merge_states([state["stream"] for state in states])
            self.set_state(states[0])

        return read()

    def start_prefetch(self) -> None:
        """Starts loading in the background before the first batch is requested."""
        self._ensure_open().start_prefetch()

    def _release(self) -> None:
        if self._inner is not None:
            self._inner.close()
            self._inner = None

    def close(self) -> None:
        """Stops background threads and workers."""
        self._release()
        super().close()


class ValidationBatches:
    """Rows of held-out documents in order; every iteration gives the same batches.

    Args:
      rows: makes a batch from row numbers.
      share: of this process.
      count: number of batches.
    """

    def __init__(self, rows: Callable[[np.ndarray], Batch], share: Share, count: int):
        self._batch = StepBatches(rows, share)
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Batch]:
        return (self._batch(step) for step in range(self._count))
