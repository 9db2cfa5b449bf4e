"""Several sources in one run: which source each row comes from, and documents of all of them.

Each row comes from one source. As all rows hold equally many tokens, the share of a source in the rows is its share in
the tokens that are trained on.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction

import numpy as np

from nsa_jax.data.documents import Source, digest
from nsa_jax.data.packing import Batch


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The source of every row, as a function of the row's number alone.

    The largest source takes floor(n * share) of the first n rows, the next one the same of the rows that are left with
    its share of those, and so on. At every row, each source has had its share of all rows so far up to a row or two, so
    every batch holds all sources in nearly their shares. The last sources get what all before them have rounded off,
    which would be many rows for a large one.

    Attributes:
      shares: of the sources; they add up to 1.
    """

    shares: tuple[Fraction, ...]

    @classmethod
    def of(cls, weights: Mapping[str, float]) -> Schedule:
        """Shares in proportion to positive weights, without rounding."""
        exact = [Fraction(weight) for weight in weights.values()]
        return cls(tuple(weight / sum(exact) for weight in exact))

    def counts(self, rows: int) -> list[int]:
        """How many of the first `rows` rows come from each source."""
        found, left = [0] * len(self.shares), Fraction(1)
        for source in self._order:
            found[source] = rows * self.shares[source] // left if left else 0
            rows -= found[source]
            left -= self.shares[source]
        return found

    @functools.cached_property
    def _order(self) -> list[int]:
        return sorted(range(len(self.shares)), key=lambda source: -self.shares[source])

    @property
    def layout(self) -> list[str]:
        """What a saved position depends on besides the shares: earlier versions went through sources as they come."""
        return [] if self._order == sorted(self._order) else ["largest first"]

    def place(self, row: int) -> tuple[int, int]:
        """The index of a row's source, and the row's number among those of that source."""
        before, after = self.counts(row), self.counts(row + 1)
        source = next(i for i, (low, high) in enumerate(zip(before, after, strict=True)) if low < high)
        return source, before[source]


@dataclasses.dataclass(frozen=True)
class MixedRows:
    """Rows of several sources.

    Attributes:
      sources: make a batch of each source from row numbers of that source.
      schedule: says which source a row is of.
    """

    sources: tuple[Callable[[np.ndarray], Batch], ...]
    schedule: Schedule

    def __call__(self, rows: np.ndarray) -> Batch:
        places = np.array([self.schedule.place(int(row)) for row in rows], np.int64).reshape(-1, 2)
        batch: Batch = {}
        for index, source in enumerate(self.sources):
            (chosen,) = np.nonzero(places[:, 0] == index)
            if not len(chosen):
                continue
            for name, values in source(places[chosen, 1]).items():
                batch.setdefault(name, np.empty((len(rows), *values.shape[1:]), values.dtype))[chosen] = values
        return batch


class MixedDocuments:
    """Documents of several sources by turns, in proportion to their weights; a tokenizer is trained on them.

    Args:
      sources: by name.
      weights: by name.
    """

    def __init__(self, sources: Mapping[str, Source], weights: Mapping[str, float]):
        self.name = ", ".join(source.name for source in sources.values())
        self._sources = sources
        self._weights = weights

    def fingerprint(self) -> str:
        """Hash of the sources and their weights."""
        return digest("mixture", [(n, self._weights[n], source.fingerprint()) for n, source in self._sources.items()])

    def documents(self) -> Iterator[str]:
        """Yields every document once. The next one is of the source that is furthest behind its share of characters."""
        left = {name: source.documents() for name, source in self._sources.items()}
        taken = dict.fromkeys(left, 0.0)
        while left:
            name = min(left, key=taken.__getitem__)
            text = next(left[name], None)
            if text is None:
                del left[name]
                continue
            taken[name] += (len(text) + 1) / self._weights[name]
            yield text

    def size_bytes(self) -> int | None:
        """Bytes of all sources; None if one does not know."""
        sizes = [source.size_bytes() for source in self._sources.values()]
        return sum(size for size in sizes if size is not None) if None not in sizes else None
