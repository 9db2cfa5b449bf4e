"""Training batches from a streamed Hugging Face dataset, packed in the order of the stream.

The position consists of the dataset's state before the group of documents in which the next row begins, and the number
of the group's tokens that are used up. Reading continues from it with exactly the next token. Every process reads the
whole stream and keeps its own rows, so batches and positions do not depend on the number of processes. The cost is
that each process tokenises the global batch.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import grain
import numpy as np

from nsa_jax.data import cache
from nsa_jax.data.errors import DataError
from nsa_jax.data.packing import Batch, check_batch, pack_rows
from nsa_jax.data.sources import HuggingFaceSource, LimitedSource, bounded, digest
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
                found += len(self._tokenizer.encode(text)) + 1
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
    """Groups of training documents over endless epochs, and the position before each group."""

    def __init__(self, source: Any, val_fraction: float):
        self._source, self._limit = _unwrap(source)
        self._val_fraction = val_fraction
        self._dataset: Any = None
        self._initial: Any = None
        self._rows: Iterator[dict[str, Any]] | None = None
        # The dataset's `state_dict()` after the rows read so far. It is kept here because after `load_state_dict` the
        # dataset reports its old state until the first row is read.
        self._state: Any = None
        self._epoch = 0
        self._read = 0  # documents of this epoch
        self._used = 0  # documents of this epoch that are trained on

    def _open(self) -> None:
        if self._dataset is None:
            self._dataset = self._source.load()
            self._initial = self._state = self._dataset.state_dict()

    def position(self) -> dict[str, Any]:
        self._open()
        return {"epoch": self._epoch, "read": self._read, "used": self._used, "dataset": self._state}

    def seek(self, position: dict[str, Any]) -> None:
        self._open()
        self._epoch, self._read, self._used = position["epoch"], position["read"], position["used"]
        self._state = position["dataset"]
        self._rows = None

    def next_group(self) -> list[str]:
        """Up to `_GROUP_DOCUMENTS` documents. The group is empty at the end of an epoch; then the next epoch begins."""
        self._open()
        if self._rows is None:
            self._dataset.load_state_dict(self._state)
            self._rows = iter(self._dataset)
        group: list[str] = []
        while len(group) < _GROUP_DOCUMENTS:
            row = self._next_row()
            if row is None:
                if group:
                    break
                self._next_epoch()
                return []
            self._read += 1
            for text in bounded(self._source.text(row)):
                if not _is_blank(text) and not _is_held_out(text, self._val_fraction):
                    group.append(text)
                    self._used += 1
        self._state = self._dataset.state_dict()
        return group

    def _next_row(self) -> dict[str, Any] | None:
        assert self._rows is not None
        if self._limit and self._read >= self._limit:
            return None
        try:
            return next(self._rows, None)
        except Exception as error:
            raise self._source.explain(error) from error

    def _next_epoch(self) -> None:
        if not self._used:
            raise DataError(
                f"stream {self._source}",
                f"holds no training document ({self._read:,} documents read)",
                "use another dataset, or lower config.data.val_fraction",
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
    ):
        super().__init__()
        self.source = source
        self.tokenizer = tokenizer
        self.seq_len = seq_len
        self.packing = packing
        self.val_fraction = val_fraction
        self.batch_size = batch_size
        self.first_row = first_row
        self.num_rows = num_rows

    def __iter__(self) -> StreamIterator:
        return StreamIterator(self)


class StreamIterator(grain.DatasetIterator):
    """Iterator of `StreamBatches`. Rows are consecutive windows of the token stream that share one token.

    Args:
      batches: what to iterate over.
    """

    def __init__(self, batches: StreamBatches):
        super().__init__()
        self._batches = batches
        self._stream = _DocumentStream(batches.source, batches.val_fraction)
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
        for encoded in tokenizer.encode_batch(documents) if documents else []:
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

    def __next__(self) -> Batch:
        b = self._batches
        count = b.batch_size * b.seq_len
        if self._carry is None:
            tokens = self._take(count + 1)
        else:
            tokens = np.concatenate([np.array([self._carry], np.int32), self._take(count)])
        self._carry = int(tokens[-1])
        starts = np.arange(b.first_row, b.first_row + b.num_rows) * b.seq_len
        rows = tokens[starts[:, None] + np.arange(b.seq_len + 1)]
        return check_batch(pack_rows(rows, b.tokenizer.eos_id, packing=b.packing))

    def get_state(self) -> dict[str, Any]:
        """JSON-serialisable position."""
        return {"position": self._position, "offset": self._offset, "carry": self._carry}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continues at a position that `get_state` returned."""
        if state["position"] is None:
            self._stream = _DocumentStream(self._batches.source, self._batches.val_fraction)
            self._position, self._group = None, np.empty(0, np.int32)
        else:
            self._stream.seek(state["position"])
            self._load_group()
        self._offset = state["offset"]
        self._carry = state["carry"]
