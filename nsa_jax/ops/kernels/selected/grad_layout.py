"""Static sizes of selected attention's backward: how its steps and the buffer between its kernels are laid out."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from nsa_jax.ops import blocks
from nsa_jax.ops.kernels import readers
from nsa_jax.ops.selected_tiles import SelectedBackwardConfig


@dataclasses.dataclass(frozen=True)
class Layout:
    """Static sizes of one backward pass.

    The pass runs over groups of (batch, key/value head) pairs and over ranges of queries, one after the other. The
    buffer of a step has an entry for each of its pairs, queries and list slots.
    """

    batch: int
    length: int  # T
    num_keys: int  # S
    num_heads: int
    num_kv: int
    head_dim: int
    value_dim: int
    select_block: int
    slots: int  # n
    num_blocks: int  # J
    ranges: int  # the queries are processed in so many ranges ...
    range_length: int  # ... of this many
    pairs: int  # (batch, kv head) pairs processed together
    items: int  # work items per pair and range
    config: SelectedBackwardConfig
    hopper: bool = False  # Hopper's kernel serves the pass by block

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv

    @property
    def columns(self) -> int:
        """Width of a score tile: the block size rounded up to what the matrix units take."""
        return _columns(self.select_block)

    @property
    def tile_columns(self) -> int:
        """Keys per program of the pass by block; partials of dq need the whole block in one."""
        return min(self.columns, self.config.keys) if self.config.keep_scores else self.columns

    @property
    def entries(self) -> int:
        return self.range_length * self.slots

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5

    @property
    def buffer_width(self) -> int:
        """Columns of the buffer between the pass by block and dq."""
        return self.columns if self.config.keep_scores else self.head_dim

    @property
    def steps(self) -> int:
        return self.ranges * (self.batch * self.num_kv // self.pairs)

    def key_rows(self, batch, head, block, skip, columns: int):
        """Rows in a [B*S*K, ...] array of a block's tokens from its `skip`-th on; past its end they repeat its last."""
        first = block * self.select_block + skip
        last = jnp.minimum((block + 1) * self.select_block, self.num_keys) - 1
        position = first + lax.iota(jnp.int32, columns)
        if self.num_keys % self.select_block or self.columns > self.select_block:
            position = jnp.minimum(position, last)
        return (batch * self.num_keys + position) * self.num_kv + head, first, last


def _columns(select_block: int) -> int:
    return max(16, pl.next_power_of_2(select_block))


def make_layout(
    query, key, value, slots: int, select_block: int, config: SelectedBackwardConfig, hopper: bool = False
) -> Layout:
    """The layout for tensors of these shapes and lists of `slots` blocks, within the config's bound on the buffer."""
    batch, length, num_heads, head_dim = query.shape
    num_kv = key.shape[2]
    num_blocks = blocks.num_selection_blocks(key.shape[1], select_block)
    width = _columns(select_block) if config.keep_scores else head_dim
    bytes_per_query = slots * (num_heads // num_kv) * width * query.dtype.itemsize
    fits = config.buffer_bytes // bytes_per_query
    range_length, ranges = length, 1
    if fits < length:
        unit = 64
        ranges = -(-length // max(fits // unit * unit, unit))
        range_length = -(-length // (ranges * unit)) * unit
    all_pairs = batch * num_kv
    fitting = max(config.buffer_bytes // (bytes_per_query * range_length), 1) if ranges == 1 else 1
    pairs = max(p for p in range(1, all_pairs + 1) if all_pairs % p == 0 and p <= fitting)
    return Layout(
        batch=batch,
        length=length,
        num_keys=key.shape[1],
        num_heads=num_heads,
        num_kv=num_kv,
        head_dim=head_dim,
        value_dim=value.shape[-1],
        select_block=select_block,
        slots=slots,
        num_blocks=num_blocks,
        ranges=ranges,
        range_length=range_length,
        pairs=pairs,
        items=readers.num_work_items(range_length * slots, num_blocks, config.chunk),
        config=config,
        hopper=hopper,
    )
