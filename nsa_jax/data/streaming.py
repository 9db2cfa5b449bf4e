"""Training batches from a streamed Hugging Face dataset.

The stream is read in lanes (`config.data.stream_lanes`). Lane l of L is every L-th file of the dataset if L divides
their number, else every L-th document. It fills rows [l B / L, (l + 1) B / L) of every batch with its documents, packed
in the lane's order. A process reads the lanes of which it has rows, so batches do not depend on the number of
processes; with one lane every process reads and tokenises the whole stream.

The position of a lane consists of the dataset's state before the window of documents in which the next row begins, the
documents of that window that are used up, and the used tokens of the group of documents that is tokenised. Reading
continues from it with exactly the next token. Documents are shuffled within windows (`config.data.shuffle_buffer`), so
that a window can be read again instead of being saved.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from typing import Any

import grain
import numpy as np

from nsa_jax.data import cache
from nsa_jax.data.documents import bounded, digest
from nsa_jax.data.errors import DataError
from nsa_jax.data.huggingface import HuggingFaceSource
from nsa_jax.data.packing import Batch, check_batch, pack_rows
from nsa_jax.data.sources import LimitedSource
from nsa_jax.data.tokenizers import Tokenizer

_GROUP_DOCUMENTS = 32  # tokenised together, because the tokenizer spreads documents over threads
# Held-out documents are found by reading the stream from its start. This bounds the time that it takes.
_SCAN_DOCUMENTS = 100_000

logger = logging.getLogger(__name__)


def _unwrap(source: Any) -> tuple[HuggingFaceSource, int]:
    """The streamed source, and how many documents of it to use (0: all)."""
    if isinstance(source, LimitedSource):
        return source.source, source.limit  # type: ignore[return-value]
    return source, 0


class HeldOutSource:
    """The first held-out documents of a stream, as many as validation needs.

    Args:
      source: the stream.
      tokenizer: to count tokens.
      val_fraction: share of documents held out.
      tokens: stop when this many are found.

    Raises:
      DataError: (while reading) none was found.
    """

    def __init__(self, source: Any, tokenizer: Tokenizer, *, val_fraction: float, tokens: int):
        self.name = f"held-out documents of {source.name}"
        self._source = source
        self._tokenizer = tokenizer
        self._val_fraction = val_fraction
        self._tokens = tokens

    def fingerprint(self) -> str:
        """Hash of the stream, the split and the amount."""
        return digest("held-out", self._source.fingerprint(), self._val_fraction, self._tokens, _SCAN_DOCUMENTS)

    def documents(self) -> Iterator[str]:
        """Yields held-out documents in stream order."""
        found = scanned = 0
        for text in self._source.documents():
            scanned += 1
            if not _is_blank(text) and _is_held_out(text, self._val_fraction):
                found += len(self._tokenizer.encode_documents([text])[0]) + 1
                yield text
            if found >= self._tokens or scanned >= _SCAN_DOCUMENTS:
                break
        if not found:
            raise DataError(
                "validation split",
                f"none of the first {scanned:,} documents of the stream is held out",
                "raise config.data.val_fraction, or turn validation off with config.train.eval_batches=0",
            )
        if found < self._tokens:
            logger.info("validation: %s of %s tokens found in %s documents", found, self._tokens, scanned)

    def size_bytes(self) -> int | None:
        """Unknown."""
        return None


def _is_blank(text: str) -> bool:
    return not text or text.isspace()


def _is_held_out(text: str, val_fraction: float) -> bool:
    return cache.is_validation(cache.content_hash(text.encode("utf-8", "replace")), val_fraction)


class _DocumentStream:
    """Groups of training documents of one lane over endless epochs, and the position before each group."""

    def __init__(self, batches: StreamBatches, lane: int):
        self._source, limit = _unwrap(batches.source)
        self._val_fraction = batches.val_fraction
        self._shuffle_buffer = batches.shuffle_buffer
        self._seed = batches.seed
        self._lane, self._lanes = lane, batches.lanes
        self._limit = -(-(limit - lane) // self._lanes) if limit else None  # documents of an epoch
        self._step = 1  # rows of the dataset from one of this lane to the next
        self._dataset: Any = None
        self._initial: Any = None
        self._rows: Iterator[dict[str, Any]] | None = None
        # The dataset's `state_dict()` after the rows read so far. It is kept here because after `load_state_dict` the
        # dataset reports its old state until the first row is read.
        self._state: Any = None
        self._epoch = 0
        self._read = 0  # documents of this lane and epoch
        self._used = 0  # of these, documents that are trained on
        self._before: dict[str, Any] = {}  # position before the window
        self._window: list[str] = []
        self._taken = 0  # documents of the window

    def _open(self) -> None:
        if self._dataset is None:
            dataset = self._source.load()
            if self._lanes > 1 and dataset.num_shards % self._lanes == 0:
                dataset = dataset.shard(num_shards=self._lanes, index=self._lane, contiguous=False)
            else:
                self._step = self._lanes
            self._dataset = dataset
            self._initial = self._state = dataset.state_dict()

    def position(self) -> dict[str, Any]:
        self._open()
        if self._taken < len(self._window):
            return {**self._before, "taken": self._taken}
        return {"epoch": self._epoch, "read": self._read, "used": self._used, "dataset": self._state, "taken": 0}

    def seek(self, position: dict[str, Any]) -> None:
        self._open()
        self._epoch, self._read, self._used = position["epoch"], position["read"], position["used"]
        self._state = position["dataset"]
        self._rows, self._window, self._taken = None, [], 0
        if taken := position.get("taken", 0):
            self._read_window()
            self._taken = taken

    def next_group(self) -> list[str]:
        """Up to `_GROUP_DOCUMENTS` documents. The group is empty at the end of an epoch; then the next epoch begins."""
        if self._taken == len(self._window):
            self._read_window()
            if not self._window:
                self._next_epoch()
                return []
        group = self._window[self._taken : self._taken + _GROUP_DOCUMENTS]
        self._taken += len(group)
        return group

    def _read_window(self) -> None:
        """Reads the documents that are shuffled together; none at the end of an epoch."""
        self._window, self._taken = [], 0
        self._before = self.position()
        if self._rows is None:
            self._dataset.load_state_dict(self._state)
            self._rows = iter(self._dataset)
        while len(self._window) < max(self._shuffle_buffer, _GROUP_DOCUMENTS):
            row = self._next_row()
            if row is None:
                break
            for text in bounded(self._source.text(row)):
                if not _is_blank(text) and not _is_held_out(text, self._val_fraction):
                    self._window.append(text)
                    self._used += 1
        self._state = self._dataset.state_dict()
        if self._window and self._shuffle_buffer:
            rng = np.random.default_rng([self._seed, self._lane, self._epoch, self._before["read"]])
            self._window = [self._window[i] for i in rng.permutation(len(self._window))]

    def _next_row(self) -> dict[str, Any] | None:
        assert self._rows is not None
        if self._limit is not None and self._read >= self._limit:
            return None
        # Before its first row, a lane of every L-th document skips those of the lanes before it.
        skipped = self._lane if self._step > 1 and not self._read else self._step - 1
        try:
            row = next(itertools.islice(self._rows, skipped, None), None)
        except Exception as error:
            raise self._source.explain(error) from error
        self._read += row is not None
        return row

    def _next_epoch(self) -> None:
        if not self._used:
            raise DataError(
                f"stream {self._source}",
                f"holds no training document ({self._read:,} documents read)",
                "use another dataset, lower config.data.val_fraction, or use fewer config.data.stream_lanes",
            )
        self._epoch += 1
        self._read = self._used = 0
        self._state = self._initial
        self._rows = None


class StreamBatches(grain.IterDataset):
    """A grain dataset of the batches of one process.

    Args:
      source: a streaming `HuggingFaceSource`, or `LimitedSource` of one.
      tokenizer: of the run.
      seq_len: T.
      packing: whether rows keep documents apart.
      val_fraction: share of documents that are held out and skipped here.
      batch_size: B, rows of the global batch.
      first_row: first row that this process takes of each batch.
      num_rows: how many it takes.
      lanes: L, parts in which the stream is read.
      shuffle_buffer: documents that are shuffled together; 0: the dataset's order.
      seed: of the shuffle.

    Raises:
      DataError: the lanes cannot share a batch evenly.
    """

    def __init__(
        self,
        source: Any,
        tokenizer: Tokenizer,
        *,
        seq_len: int,
        packing: bool,
        val_fraction: float,
        batch_size: int,
        first_row: int,
        num_rows: int,
        lanes: int = 1,
        shuffle_buffer: int = 0,
        seed: int = 0,
    ):
        super().__init__()
        if lanes < 1 or batch_size % lanes:
            raise DataError(
                f"config.data.stream_lanes={lanes}",
                f"cannot share a batch of {batch_size} rows evenly",
                "use a divisor of config.train.batch_size",
            )
        self.source = source
        self.tokenizer = tokenizer
        self.seq_len = seq_len
        self.packing = packing
        self.val_fraction = val_fraction
        self.batch_size = batch_size
        self.first_row = first_row
        self.num_rows = num_rows
        self.lanes = lanes
        self.shuffle_buffer = shuffle_buffer
        self.seed = seed

    def __iter__(self) -> StreamIterator:
        return StreamIterator(self)


class _Lane:
    """Rows of one lane: consecutive windows of its token stream that share one token."""

    def __init__(self, batches: StreamBatches, lane: int):
        self._batches = batches
        self._stream = _DocumentStream(batches, lane)
        self._position: dict[str, Any] | None = None  # of the stream before the current group; None: not begun
        self._group = np.empty(0, np.int32)
        self._offset = 0  # tokens of the group that are used up
        self._carry: int | None = None  # last token of the previous batch, first of the next

    def _load_group(self) -> None:
        tokenizer = self._batches.tokenizer
        self._position = self._stream.position()
        documents = self._stream.next_group()
        parts: list[np.ndarray] = []
        eos = np.array([tokenizer.eos_id], np.int32)
        for encoded in tokenizer.encode_documents(documents) if documents else []:
            parts += [encoded.astype(np.int32), eos]
        self._group = np.concatenate(parts) if parts else np.empty(0, np.int32)
        self._offset = 0

    def _take(self, count: int) -> np.ndarray:
        out = np.empty(count, np.int32)
        filled = 0
        while filled < count:
            if self._offset == len(self._group):
                self._load_group()
            part = self._group[self._offset : self._offset + count - filled]
            out[filled : filled + len(part)] = part
            filled += len(part)
            self._offset += len(part)
        return out

    def rows(self, count: int, length: int) -> np.ndarray:
        """The next rows: int32 [count, length + 1]."""
        tokens = self._take(count * length + (self._carry is None))
        if self._carry is not None:
            tokens = np.concatenate([np.array([self._carry], np.int32), tokens])
        self._carry = int(tokens[-1])
        return tokens[np.arange(count)[:, None] * length + np.arange(length + 1)]

    def get_state(self) -> dict[str, Any]:
        return {"position": self._position, "offset": self._offset, "carry": self._carry}

    def set_state(self, state: dict[str, Any]) -> None:
        if state["position"] is not None:
            self._stream.seek(state["position"])
            self._load_group()
        self._offset = state["offset"]
        self._carry = state["carry"]


class StreamIterator(grain.DatasetIterator):
    """Iterator of `StreamBatches`.

    Args:
      batches: what to iterate over.
    """

    def __init__(self, batches: StreamBatches):
        super().__init__()
        self._batches = batches
        self._rows_per_lane = batches.batch_size // batches.lanes
        self._start()

    def _start(self) -> None:
        b = self._batches
        lanes = range(b.first_row // self._rows_per_lane, (b.first_row + b.num_rows - 1) // self._rows_per_lane + 1)
        self._lanes = {lane: _Lane(b, lane) for lane in lanes}

    def __next__(self) -> Batch:
        b = self._batches
        rows = np.concatenate([lane.rows(self._rows_per_lane, b.seq_len) for lane in self._lanes.values()])
        first = b.first_row - min(self._lanes) * self._rows_per_lane
        rows = rows[first : first + b.num_rows]
        return check_batch(pack_rows(rows, b.tokenizer.eos_id, packing=b.packing))

    def get_state(self) -> dict[str, Any]:
        """JSON-serialisable positions of the lanes that this process reads, by number."""
        return {"lanes": {str(number): lane.get_state() for number, lane in self._lanes.items()}}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continues at a position that `get_state` returned, or `merge_states` of those of all processes.

        Raises:
          DataError: the position of a lane that this process reads is missing.
        """
        lanes = state.get("lanes", {"0": state})  # versions without lanes saved the position of the only one
        if missing := [number for number in self._lanes if str(number) not in lanes]:
            raise DataError(
                f"saved data position of lanes {', '.join(lanes)}",
                f"lacks lane {missing[0]}, which this process reads",
                "use a complete checkpoint, which holds the positions of all processes",
            )
        self._start()
        for number, lane in self._lanes.items():
            lane.set_state(lanes[str(number)])


def merge_states(states: list[dict[str, Any]]) -> dict[str, Any]:
    """The position of all lanes, from those that the processes of a run saved.

    Args:
      states: what `StreamIterator.get_state` returned in each process.

    Returns:
      A state for `StreamIterator.set_state` of any process, whatever their number.
    """
    lanes: dict[str, Any] = {}
    for state in states:
        lanes |= state.get("lanes", {"0": state})
    return {"lanes": lanes}
