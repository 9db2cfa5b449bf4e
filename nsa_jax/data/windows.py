"""Rows of a token stream: in a new order in every epoch for training, in the stream's order for validation."""

from __future__ import annotations

import dataclasses
import functools

import grain
import numpy as np

from nsa_jax.data.packing import Batch, pack_rows
from nsa_jax.data.token_file import TokenFile


@functools.lru_cache(maxsize=8)
def _epoch_seeds(seed: int, epoch: int) -> tuple[int, int]:
    shuffle, offset = np.random.SeedSequence([seed, epoch]).generate_state(2)
    return int(shuffle), int(offset)


@dataclasses.dataclass(frozen=True)
class ShuffledWindows:
    """Training rows of a token stream: windows of T+1 tokens, T apart, in a new order in every epoch.

    Each epoch cuts the stream at a different offset, so that documents start at different places in a row.

    Attributes:
      tokens: the stream.
      seq_len: T.
      seed: of the run.
      eos_id: ends every document.
      packing: whether rows keep documents apart.
    """

    tokens: TokenFile
    seq_len: int
    seed: int
    eos_id: int
    packing: bool

    @functools.cached_property
    def rows_per_epoch(self) -> int:
        """The number of windows that fit at every offset."""
        return max((len(self.tokens) - self.seq_len) // self.seq_len, 1)

    def starts(self, rows: np.ndarray) -> np.ndarray:
        """Stream position of the first token of each row: int64 [b]."""
        per_epoch = self.rows_per_epoch
        slack = min(self.seq_len, len(self.tokens) - per_epoch * self.seq_len)
        starts = np.empty(len(rows), np.int64)
        for i, row in enumerate(rows):
            epoch, index = divmod(int(row), per_epoch)
            shuffle_seed, offset_seed = _epoch_seeds(self.seed, epoch)
            window = grain.experimental.index_shuffle(index, max_index=per_epoch - 1, seed=shuffle_seed, rounds=4)
            starts[i] = offset_seed % slack + window * self.seq_len
        return starts

    def __call__(self, rows: np.ndarray) -> Batch:
        out = np.empty((len(rows), self.seq_len + 1), np.int32)
        for row, start in zip(out, self.starts(rows), strict=True):
            row[:] = self.tokens[start : start + self.seq_len + 1]
        return pack_rows(out, self.eos_id, packing=self.packing)


@dataclasses.dataclass(frozen=True)
class SequentialWindows:
    """Validation rows: the windows of the held-out stream from its start; the last one is padded with EOS.

    Attributes:
      tokens: the stream.
      seq_len: T.
      eos_id: ends every document, and pads rows.
      packing: whether rows keep documents apart.
    """

    tokens: TokenFile
    seq_len: int
    eos_id: int
    packing: bool

    @property
    def num_rows(self) -> int:
        """Rows with at least one target."""
        return -(-(len(self.tokens) - 1) // self.seq_len)

    def __call__(self, rows: np.ndarray) -> Batch:
        """A batch of rows. Padding holds no targets, because nothing is to be predicted after an EOS."""
        out = np.full((len(rows), self.seq_len + 1), self.eos_id, np.int32)
        for filled, row in zip(out, rows, strict=True):
            window = self.tokens[row * self.seq_len : (row + 1) * self.seq_len + 1]
            filled[: len(window)] = window
        return pack_rows(out, self.eos_id, packing=self.packing)
