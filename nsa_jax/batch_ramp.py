"""Batches that grow during a run: `config.train.batch_ramp`.

The micro-batch stays, and their number (`grad_accum`) grows. Data are read in pieces of `unit` rows, in the same order
for any ramp of this unit: a step takes the next pieces.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict


@dataclasses.dataclass(frozen=True)
class BatchRamp:
    """Rows of each step; steps count from 1.

    Attributes:
      stages: (last step, rows), ascending; the rows of later steps are `final`.
      final: `config.train.batch_size`.
    """

    stages: tuple[tuple[int, int], ...]
    final: int

    @classmethod
    def of(cls, train: Mapping[str, Any]) -> BatchRamp:
        """The ramp of `config.train`.

        Raises:
          ValueError: what is wrong with `batch_ramp`.
        """
        stages = []
        micro = train["batch_size"] // max(train["grad_accum"], 1)
        for text in train.get("batch_ramp", ()):  # configs of earlier versions have none
            last, _, rows = text.partition(":")
            if not (last.isdecimal() and rows.isdecimal()):
                raise ValueError(f"{text!r} is not LAST_STEP:ROWS, such as '1000:64'")
            stages.append((int(last), int(rows)))
            if int(rows) < 1 or int(rows) % max(micro, 1):
                raise ValueError(
                    f"{text!r}: rows must be a multiple of the micro-batch, batch_size / grad_accum = {micro}"
                )
        steps = [last for last, _ in stages]
        if steps != sorted(set(steps)) or 0 in steps:
            raise ValueError("last steps must be positive and ascend")
        return cls(tuple(stages), train["batch_size"])

    @property
    def unit(self) -> int:
        """Rows of a piece of data: the largest of which every batch is a multiple."""
        return math.gcd(self.final, *(rows for _, rows in self.stages))

    def rows(self, step: int) -> int:
        """Rows of a step."""
        return next((rows for last, rows in self.stages if step <= last), self.final)

    def rows_before(self, steps: int) -> int:
        """Rows of the first `steps` steps together."""
        total = begin = 0
        for last, rows in (*self.stages, (steps, self.final)):
            total += max(min(last, steps) - begin, 0) * rows
            begin = max(begin, last)
        return total

    def data_config(self, config: ConfigDict) -> ConfigDict:
        """The config of a pipeline whose batches are the pieces; it validates on as many rows."""
        if not self.stages:
            return config
        pieces, config = self.final // self.unit, copy.deepcopy(config)
        config.train.batch_size = self.unit
        config.train.eval_batches *= pieces
        config.data.prefetch *= pieces
        return config


@dataclasses.dataclass(frozen=True)
class Taken:
    """What a run has taken of its data by a step: what the ramp gives, and what it does not tell.

    Attributes:
      ramp: of the run.
      seq_len: tokens of a row.
      more_pieces: pieces that were left out, or taken under another ramp before.
      more_tokens: tokens that were trained on under another ramp before.
    """

    ramp: BatchRamp
    seq_len: int
    more_pieces: int = 0
    more_tokens: int = 0

    def after(self, step: int, pieces: int, tokens: int | None) -> Taken:
        """With so many pieces taken and so many tokens trained on by a step; None: as many as the ramp gives."""
        planned = Taken(self.ramp, self.seq_len)
        more_tokens = 0 if tokens is None else tokens - planned.tokens(step)
        return Taken(self.ramp, self.seq_len, pieces - sum(planned.pieces(step)), more_tokens)

    def tokens(self, step: int) -> int:
        """Trained on up to a step."""
        return self.ramp.rows_before(step) * self.seq_len + self.more_tokens

    def pieces(self, step: int) -> tuple[int, int]:
        """Where the batch of a step begins in the data, and how many pieces it has."""
        before = self.ramp.rows_before(step - 1) // self.ramp.unit
        return self.more_pieces + before, (self.ramp.rows_before(step) // self.ramp.unit) - before
