"""Rows of a token stream: in a new order in every epoch for training, in the stream's order for validation."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import grain
import numpy as np

from nsa_jax.data.cache import Split
from nsa_jax.data.packing import Batch, best_fit, pack_rows
from nsa_jax.data.token_file import TokenStream

# More rows in a group leave fewer documents cut, and take longer to place.
_GROUP_TOKENS = 1 << 20
_GROUP_ROWS = 64
_POOL_GROUPS = 64


@functools.lru_cache(maxsize=8)
def _epoch_seeds(seed: int, epoch: int) -> tuple[int, int]:
    shuffle, offset = np.random.SeedSequence([seed, epoch]).generate_state(2)
    return int(shuffle), int(offset)


def _shuffled(index: int, count: int, seed: int) -> int:
    """Where an index in [0, count) goes in the shuffled order of a seed."""
    if count < 1 << 16:  # of fewer, grain's function takes milliseconds
        return int(_permutation(count, seed)[index])
    return grain.experimental.index_shuffle(index, max_index=count - 1, seed=seed, rounds=4)


@functools.lru_cache(maxsize=64)
def _permutation(count: int, seed: int) -> np.ndarray:
    return np.argsort(np.random.SeedSequence([seed, count]).generate_state(count, np.uint64), kind="stable")


@dataclasses.dataclass(frozen=True)
class ShuffledWindows:
    """Training rows of a token stream: windows of T+1 tokens, T apart, in a new order in every epoch.

    Each epoch cuts the stream at a different offset, so that documents start at different places in a row. The offsets
    are below T. If the stream holds 2T tokens or more, its last len(tokens) mod T are therefore in no row of any epoch.
    Larger offsets would reach them, but a checkpoint would no longer continue with the same rows.

    Attributes:
      tokens: the stream.
      seq_len: T.
      seed: of the run.
      eos_id: ends every document.
      packing: whether rows keep documents apart.
    """

    tokens: TokenStream
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


@dataclasses.dataclass(frozen=True, eq=False)
class BestFitRows:
    """Training rows in which documents are whole if they fit; see `best_fit`. No row has padding.

    Each epoch cuts the stream into groups of consecutive rows at another offset. Within a group, documents are placed
    anew. Groups are shuffled, and so are the rows of `_POOL_GROUPS` of them together, so that few groups are in use.

    Attributes:
      split: of a corpus; its token stream, and the offsets of its documents.
      seq_len: T.
      seed: of the run.
      eos_id: ends every document.
      packing: whether rows keep documents apart.
    """

    split: Split
    seq_len: int
    seed: int
    eos_id: int
    packing: bool

    @functools.cached_property
    def group_rows(self) -> int:
        """Rows of a group. All groups have as many, so that an epoch leaves out fewer rows than it has groups."""
        rows = (len(self.split.tokens) - 1) // self.seq_len
        return max(rows // max(rows // self._wanted_rows, 1), 1)

    @property
    def _wanted_rows(self) -> int:
        return max(_GROUP_TOKENS // self.seq_len, _GROUP_ROWS)

    @property
    def layout(self) -> str:
        """What a saved position depends on besides the tokens: the size of groups, where versions disagree on it."""
        return "" if self.group_rows == self._wanted_rows else f" in groups of {self.group_rows}"

    @functools.cached_property
    def rows_per_epoch(self) -> int:
        """The rows of all whole groups; which tokens are left over depends on the epoch's offset."""
        return (len(self.split.tokens) - 1) // self.seq_len // self.group_rows * self.group_rows

    def place(self, row: int) -> tuple[int, int, int]:
        """Epoch, group of that epoch's stream, and row of that group of a row of the run."""
        epoch, index = divmod(row, self.rows_per_epoch)
        seed, _ = _epoch_seeds(self.seed, epoch)
        groups, pool_rows = self.rows_per_epoch // self.group_rows, _POOL_GROUPS * self.group_rows
        pool, inside = divmod(index, pool_rows)
        size = min(pool_rows, self.rows_per_epoch - pool * pool_rows)
        turn, inside = divmod(_shuffled(inside, size, (seed + pool) % 2**32), self.group_rows)
        return epoch, _shuffled(pool * _POOL_GROUPS + turn, groups, seed), inside

    @functools.cached_property
    def _group(self):
        return functools.lru_cache(maxsize=2 * _POOL_GROUPS)(self._place_group)

    def _place_group(self, epoch: int, group: int) -> list[list[tuple[int, int]]]:
        """Stream position and tokens of each piece, for each row of a group."""
        tokens, size = len(self.split.tokens), self.group_rows * self.seq_len
        _, offset = _epoch_seeds(self.seed, epoch)
        first = offset % (tokens - self.rows_per_epoch * self.seq_len) + group * size
        offsets = self.split.offsets
        begin = int(np.searchsorted(offsets, first, side="right")) - 1
        end = int(np.searchsorted(offsets, first + size, side="left"))
        edges = np.clip(np.asarray(offsets[begin : end + 1]), first, first + size)
        rows = best_fit(np.diff(edges), self.group_rows, self.seq_len)
        return [[(int(edges[document]) + start, count) for document, start, count in row] for row in rows]

    def __call__(self, rows: np.ndarray) -> Batch:
        out = np.full((len(rows), self.seq_len + 1), self.eos_id, np.int32)
        begins = np.zeros((len(rows), self.seq_len), bool)
        for i, row in enumerate(rows):
            epoch, group, inside = self.place(int(row))
            at = 0
            for start, count in self._group(epoch, group)[inside]:
                # One more token: what follows a document that is cut at the row's end is its last target.
                piece = self.split.tokens[start : start + count + (at + count == self.seq_len)]
                out[i, at : at + len(piece)] = piece
                begins[i, at] = True
                at += count
        return pack_rows(out, self.eos_id, packing=self.packing, begins=begins)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_group"}


@dataclasses.dataclass(frozen=True)
class SequentialWindows:
    """Validation rows: the windows of the held-out stream from its start; the last one is padded with EOS.

    Attributes:
      tokens: the stream.
      seq_len: T.
      eos_id: ends every document, and pads rows.
      packing: whether rows keep documents apart.
    """

    tokens: TokenStream
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
