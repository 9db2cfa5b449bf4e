"""Tokens that lie in the user's own files: arrays of integers, and columns of Arrow files.

They are read where they are. A view of them holds the documents of one split, each followed by EOS, without a copy.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from nsa_jax.data.errors import DataError
from nsa_jax.data.token_file import TokenFile

_FIX = "restore the file, or start again: documents are looked up anew in files that have changed"


@dataclasses.dataclass(frozen=True)
class Part:
    """One file of tokens.

    Attributes:
      path: absolute.
      tokens: number of tokens.
      dtype: of an array; of a column, Arrow knows it.
      first: numbers of this dtype before the first token.
      column: name in an Arrow file; empty: the file is an array.
      bytes: size of the file.
      mtime_ns: time of its last change.
    """

    path: str
    tokens: int
    dtype: str = ""
    first: int = 0
    column: str = ""
    bytes: int = 0
    mtime_ns: int = 0

    def stamped(self) -> Part:
        """The same with the size and time that the file has now."""
        found = os.stat(self.path)
        return dataclasses.replace(self, bytes=found.st_size, mtime_ns=found.st_mtime_ns)


class _ArrayPart(TokenFile):
    def __init__(self, part: Part):
        super().__init__(part.path, part.dtype, checked=False)
        self._first = part.first

    def __getitem__(self, span: slice) -> np.ndarray:
        return super().__getitem__(slice(span.start + self._first, span.stop + self._first))

    def _damaged(self, what: str) -> DataError:
        return DataError(self.path, what, _FIX)


def arrow_lists(path: str, column: str) -> list[tuple[np.ndarray, np.ndarray]]:
    """The lists of a column of an Arrow file, memory mapped.

    Args:
      path: file in Arrow's stream format, as `datasets` writes it.
      column: holds lists of integers.

    Returns:
      For each batch, the values of all lists, and int64 [rows + 1], where each list begins and the last one ends.

    Raises:
      DataError: the file cannot be read, or the column holds something else.
    """
    import pyarrow

    try:
        with pyarrow.memory_map(path) as file:
            chunks = pyarrow.ipc.open_stream(file).read_all().column(column).chunks
        found = []
        for chunk in chunks:
            if pyarrow.types.is_fixed_size_list(chunk.type):
                values, offsets = chunk.flatten(), np.arange(len(chunk) + 1) * chunk.type.list_size
            else:
                values, offsets = chunk.values, chunk.offsets.to_numpy()
            if chunk.null_count or not pyarrow.types.is_integer(values.type):
                raise TypeError(f"the type is {chunk.type}, with {chunk.null_count} rows missing")
            found.append((values.to_numpy(zero_copy_only=True), offsets.astype(np.int64)))
    except (OSError, KeyError, AttributeError, TypeError, pyarrow.ArrowException) as error:
        raise DataError(
            path, f"column {column!r} cannot be read as lists of token ids ({error})", "name such a column"
        ) from error
    return found


class _ArrowPart:
    def __init__(self, part: Part):
        self._values = [values[offsets[0] : offsets[-1]] for values, offsets in arrow_lists(part.path, part.column)]
        self._begins = np.cumsum([0, *map(len, self._values)])

    def __getitem__(self, span: slice) -> np.ndarray:
        return _gather(self._values, self._begins, span.start, span.stop)


def _gather(parts: Sequence[Any], begins: np.ndarray, start: int, stop: int) -> np.ndarray:
    """Tokens [start, stop) of parts that follow each other; the first token of each part is at its `begins`."""
    found, index = [], int(np.searchsorted(begins, start, side="right")) - 1
    while start < stop:
        end = min(stop, int(begins[index + 1]))
        if start < end:
            found.append(parts[index][start - int(begins[index]) : end - int(begins[index])])
        start, index = end, index + 1
    return found[0] if len(found) == 1 else np.concatenate(found or [np.empty(0, np.int32)])


class PartedTokens:
    """The tokens of several files, one after the other. They are pickled as their paths.

    Args:
      parts: the files.
    """

    def __init__(self, parts: Sequence[Part]):
        self.parts = tuple(parts)
        self._begins = np.cumsum([0, *(part.tokens for part in parts)])
        self._readers: list[Any] = []

    def __len__(self) -> int:
        return int(self._begins[-1])

    def __getitem__(self, span: slice) -> np.ndarray:
        start, stop, _ = span.indices(len(self))
        if not self._readers:
            self._readers = [_ArrowPart(part) if part.column else _ArrayPart(part) for part in self.parts]
        return _gather(self._readers, self._begins, start, stop)

    def where(self, position: int) -> str:
        """Names a position for messages."""
        index = int(np.searchsorted(self._begins, position, side="right")) - 1
        return f"{self.parts[index].path}, token {position - int(self._begins[index]):,}"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_readers": []}


class TokenView:
    """The token stream of one split: the content of its documents, each followed by EOS.

    Args:
      tokens: where the documents lie.
      starts: file of int64 [documents], position in `tokens` of each document.
      offsets: file of int64 [documents + 1], position in this stream of each document, and the stream's length.
      eos_id: follows every document.
      vocab_size: ids are below it.
    """

    def __init__(self, tokens: PartedTokens, starts: TokenFile, offsets: TokenFile, *, eos_id: int, vocab_size: int):
        self._tokens = tokens
        self._starts = starts
        self._offsets = offsets
        self._eos_id = eos_id
        self._vocab_size = vocab_size

    def __len__(self) -> int:
        return int(self._offsets[len(self._offsets) - 1 :][0])

    @property
    def array(self) -> np.ndarray:
        """A copy of the whole stream."""
        return self[:]

    def __getitem__(self, part: slice) -> np.ndarray:
        """A copy of consecutive tokens, int32.

        Raises:
          DataError: a file does not hold what it held when its documents were looked up.
        """
        first, last, _ = part.indices(len(self))
        out = np.full(max(last - first, 0), self._eos_id, np.int32)
        if not len(out):
            return out
        offsets = self._offsets.array
        begin, end = np.searchsorted(offsets, first, side="right") - 1, np.searchsorted(offsets, last)
        offsets, starts = np.asarray(offsets[begin : end + 1]), np.asarray(self._starts.array[begin:end])
        shifts = starts - offsets[:-1]
        # Documents with the same shift follow each other in the file, with one EOS between them.
        runs = np.flatnonzero(np.diff(shifts, prepend=shifts[0] - 1))
        for run, next_run in zip(runs, [*runs[1:], len(shifts)], strict=True):
            low, high = max(int(offsets[run]), first), min(int(offsets[next_run]) - 1, last)
            if low < high:
                shift = int(shifts[run])
                out[low - first : high - first] = self._tokens[low + shift : high + shift]
        ends = offsets[1:] - 1  # the file may have a document of one token there, of the other split
        out[ends[ends < last] - first] = self._eos_id
        if out.min() < 0 or out.max() >= self._vocab_size:
            path = Path(self._tokens.parts[0].path).parent
            raise DataError(str(path), f"a file now holds ids outside [0, {self._vocab_size})", _FIX)
        return out
