"""How compressed blocks fold into selection blocks (paper eq. 9): what both scores kernels and top-n agree on."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from nsa_jax.ops import blocks
from nsa_jax.ops.blocks import NSAConfig


@dataclasses.dataclass(frozen=True)
class Fold:
    """How a tile of compressed blocks folds into selection blocks: constants of the geometry.

    Selection block j gathers the `reach + per_block` compressed blocks from j * per_block - reach on (`reach` is
    l / d - 1). The first per_block of them are group j, the others the head of group j + 1, so one group contributes
    to two selection blocks: the scores are two planes, own[j] and head[j + 1], that the top-n kernel adds.

    Attributes:
      per_block: l' / d.
      reach: l / d - 1; without it there is one plane.
      padded: per_block rounded up to a power of two; a tile row beyond per_block repeats another with weight 0.
    """

    per_block: int
    reach: int
    padded: int
    weights: tuple[int, ...]

    @classmethod
    def of(cls, config: NSAConfig) -> Fold:
        per_block = config.select_block // config.compress_stride
        weights = tuple(int(w) for w in blocks.fold_weights(config))
        return cls(per_block, len(weights) - per_block, pl.next_power_of_2(per_block), weights)

    @property
    def planes(self) -> int:
        return 2 if self.reach else 1

    def split_rows(self, rows: int) -> tuple[int, ...]:
        """Shape (member high bit, block high bits, member low bits, block low bits) of a tile's rows.

        Row 64 * i + 16 * w + 8 * h + r of a matrix product sits in warp w, lane group r of a GPU; i and h are
        registers of one thread. With members (i, h) a group of 4 is summed without leaving its thread.
        """
        if self.padded in (2, 4) and rows >= 16 * self.padded:
            high = self.padded // 2
            return high, rows // (16 * high), 2, 8
        return 1, rows // self.padded, self.padded, 1

    def locate(self, rows: int) -> tuple[jax.Array, jax.Array]:
        """(selection block in the tile, member of its group) of every tile row, both int32 [rows]."""
        high, outer, low, inner = self.split_rows(rows)
        row = lax.broadcasted_iota(jnp.int32, (rows,), 0)
        member = row // (rows // high) * low + row // inner % low
        block = row // (low * inner) % outer * inner + row % inner
        return block, member

    def member_weights(self, member: jax.Array, plane: int) -> jax.Array:
        """Weight of each group member in `own` (plane 0) or `head` (plane 1), as blocks.fold_weights."""
        position = member + plane * self.per_block
        weight = jnp.minimum(jnp.minimum(position + 1, len(self.weights) - position), max(self.weights))
        inside = member < (self.reach if plane else self.per_block)
        return jnp.where(inside, weight, 0).astype(jnp.float32)

    def add_groups(self, total: jax.Array) -> jax.Array:
        """Sums tile rows [rows, queries] over the members of each group: [rows / padded, queries]."""
        rows, queries = total.shape
        high, outer, low, inner = self.split_rows(rows)
        total = total.reshape(high, outer, low, inner, queries).sum(2)
        return total.sum(0).reshape(outer * inner, queries)

    def num_scored(self, num_blocks: int, config: NSAConfig) -> int:
        """How many blocks, from 0 on, can need a column of the scores: the last ones are always local."""
        return max(num_blocks - config.num_local + self.planes - 1, 1)
