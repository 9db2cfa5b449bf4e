"""Decoding on GPUs: one query token per program row, its keys split over many programs (split-KV flash decoding).

One token's attention is bound by reading the cache, and a small batch has too few (row, key/value head) pairs to fill a
GPU. So the keys of every branch are split, and three kernels follow each other:
  read: parts of the visible compressed blocks and of the window: running-softmax partial results, and the scores of
    compressed blocks, which are kept (in L2, mostly) so that selection need not read the keys again;
  selected: the scores become probabilities, summed over the group; they are folded to the importance of the selection
    blocks, which makes the list; and each program attends to its part of the listed blocks. All programs of a pair make
    the same list, since a kernel of its own for it would take longer. Only many scores become probabilities in a kernel
    before it (fold), whose small programs read them faster;
  combine: the branches' partial results, in a fixed order, and the gates.
How a branch is cut depends on shapes and the row's length, and sums have a fixed order: results are bit-reproducible.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from nsa_jax.ops import blocks
from nsa_jax.ops.blocks import NSAConfig
from nsa_jax.ops.decode_tiles import DecodeConfig
from nsa_jax.ops.kernels.decode.ranking import column_probabilities, rank, ranking_widths
from nsa_jax.ops.kernels.decode.softmax_parts import (
    Positions,
    candidate_range,
    combine,
    part_of,
    partials,
    per_pair,
    query_position,
    read_part,
    selected_part,
    visible_range,
)
from nsa_jax.ops.kernels.softmax import LOG2E
from nsa_jax.ops.kernels.triton import barrier, triton_call


def _read(query, gate_of, caches, outs, t, start, *, cut, **sizes):
    """The arguments are those of `pair._attend`; outs are those of `read_part`, with the scores."""
    del gate_of
    read_part(query, caches, outs, pl.program_id(0), cut, t, start, **sizes)


def _fold_kernel(*refs, num_starts, num_queries, capacity, **sizes):
    """One chunk of the scores. refs: lengths [1], segment_start [1] if packed, stats of the parts [parts, 2, G], scores
    [G, C + padding]; out: probabilities [C + padding], summed over the group."""
    t, start = query_position(refs[0], refs[1 : 1 + num_starts], num_queries, capacity)
    _chunk_probabilities(refs[1 + num_starts :], pl.program_id(0), t, start, **sizes)


def _chunk_probabilities(refs, chunk, t, start, *, group, columns, num_cmp, parts, config: NSAConfig):
    """One chunk of `columns` compressed blocks; refs are the last three of `_fold_kernel`."""
    stats_ref, s_ref, sum_ref = refs
    low, high = visible_range(t, start, num_cmp, config)

    @pl.when((chunk * columns < high) & (chunk * columns + columns > low))
    def _():
        column_probabilities(stats_ref, s_ref, sum_ref, chunk, low, high, group, columns, parts)


def _selected_kernel(
    *refs, num_starts, num_queries, capacity, group, keys, columns, parts, widths, num_cmp, scale, config
):
    """The list, and one part of its blocks.

    refs: lengths [1], segment_start [1] if packed, query [G, H], key [S, H], value [S, V], and the probabilities
    [C + padding], or stats of the parts [parts, 2, G] and scores [G, C + padding]; out: partial output [G, V],
    stats [2, G], list [n], and in the latter case the probabilities.
    """
    t, start = query_position(refs[0], refs[1 : 1 + num_starts], num_queries, capacity)
    q_ref, k_ref, v_ref, *scored = refs[1 + num_starts : -4 if columns else -3]
    acc_ref, stats_ref, list_ref, *sum_refs = refs[-4 if columns else -3 :]
    (sum_ref,) = sum_refs or scored
    if columns:
        sizes = dict(group=group, columns=columns, num_cmp=num_cmp, parts=parts, config=config)
        for chunk in range(sum_ref.shape[0] // columns):
            _chunk_probabilities((*scored, sum_ref), chunk, t, start, **sizes)
        barrier()
    rank(sum_ref, list_ref, t, start, widths=widths, num_cmp=num_cmp, capacity=capacity, config=config)
    barrier()
    first, last = candidate_range(t, start, config)
    taken = jnp.minimum(last - first + 1, config.num_selected)
    begin, end = part_of(taken, pl.num_programs(0), pl.program_id(0))
    refs = (k_ref, v_ref, acc_ref, stats_ref)
    sizes = dict(group=group, keys=keys, scale=scale, config=config)
    selected_part(q_ref, refs, lambda i: list_ref[i], begin, end, t, start, **sizes)


class Launch:
    """All kernels; see launch.py."""

    name = "nsa_decode_read"
    early_keys = 0  # see pair.py

    def __init__(self, rows, num_kv, group, num_cmp, capacity, dims, dtype, config: NSAConfig, tile: DecodeConfig):
        """The arguments are sizes: `rows` is B * T, num_cmp is C, capacity is S, and dims are (H, V)."""
        h_dim, self.v_dim = dims
        self.tile, self.dtype, self.config, self.group = tile, dtype, config, group
        self.num_cmp, self.capacity = num_cmp, capacity
        self.scale = LOG2E * h_dim**-0.5
        most = max(16, 32_768 // pl.next_power_of_2(group))  # whose scores fit in registers
        self.columns = min(tile.columns, most, max(pl.next_power_of_2(num_cmp), 16))
        # Of the kernel that makes the list: few warps add up few scores faster.
        self.warps = min(tile.rank_warps, max(4, self.columns * pl.next_power_of_2(group) // 1024))
        step = max(tile.keys, self.columns)
        self.scored = pl.cdiv(num_cmp, step) * step
        self.cut = tile.compressed_parts, tile.window_parts
        self.grid = (sum(self.cut), num_kv, rows)
        self.options = dict(num_warps=tile.num_warps, num_stages=tile.num_stages)
        keys = dict(keys=tile.keys, window_keys=tile.window_keys)
        self.attend = functools.partial(
            _read, cut=self.cut, group=group, num_cmp=num_cmp, config=config, scale=self.scale, **keys
        )
        specs, shapes = partials(rows, num_kv, sum(self.cut), group, self.v_dim)
        self.out_specs = [*specs, per_pair(group, self.scored)]
        self.out_shape = [*shapes, self._shape(group, self.scored)]

    def _shape(self, *shape, dtype=jnp.float32):
        """Of an array [rows, K, *shape]."""
        _, num_kv, rows = self.grid
        return jax.ShapeDtypeStruct((rows, num_kv, *shape), dtype)

    def needs(self, t, start):
        """Whether the program reads the token at position t, and whether it reads compressed blocks."""
        part, (compressed, _) = pl.program_id(0), self.cut
        return part >= compressed, part < compressed

    def finish(self, outs, query, gates, caches, where: Positions):
        """Output [rows, N, V] and lists [rows, K, n] from what the first kernel put out and gates [rows, N, 3]."""
        acc, stats, scores = outs
        _, _, key, value, _, _ = caches
        sizes = dict(num_starts=len(where.starts), num_queries=where.num_queries, capacity=self.capacity)
        sizes |= dict(group=self.group, num_cmp=self.num_cmp, parts=self.cut[0], config=self.config)
        scored, columns = [stats, scores], self.columns
        if self.scored // columns > self.tile.chunks:
            scored, columns = [self._fold(stats, scores, where, columns=columns, **sizes)], 0
        *selected, lists = self._selected(scored, query, key, value, where, columns=columns, **sizes)
        compressed, programs = self.cut[0], self.grid[0]
        branches = (0, 0, compressed), (1, 0, self.tile.selected_parts), (0, compressed, programs)
        return combine(gates, (acc, stats, *selected), branches, self.dtype), lists

    def _scored_specs(self):
        """Of stats of all parts and of scores."""
        return [per_pair(self.grid[0], 2, self.group), per_pair(self.group, self.scored)]

    def _fold(self, stats, scores, where: Positions, **sizes):
        """Probabilities [rows, K, C + padding], summed over the group."""
        return triton_call(
            functools.partial(_fold_kernel, **sizes),
            grid=(self.scored // self.columns, *self.grid[1:]),
            in_specs=[*where.specs(), *self._scored_specs()],
            out_specs=per_pair(self.scored),
            out_shape=self._shape(self.scored),
            num_warps=self.tile.rank_warps,
            num_stages=1,
            name="nsa_decode_fold",
        )(*where.arrays(), stats, scores)

    def _selected(self, scored, query, key, value, where: Positions, **sizes):
        """Partial outputs of the listed blocks, their stats, and lists [rows, K, n]."""
        tile, config, (_, num_kv, rows) = self.tile, self.config, self.grid
        n, count = config.num_selected, where.num_queries

        def cache(array):  # one row's and head's slice
            return pl.BlockSpec((None, array.shape[1], None, array.shape[3]), lambda s, k, r: (r // count, 0, k, 0))

        specs, shapes = partials(rows, num_kv, tile.selected_parts, self.group, self.v_dim)
        specs, shapes = [*specs, per_pair(n)], [*shapes, self._shape(n, dtype=jnp.int32)]
        if len(scored) > 1:
            specs, shapes = [*specs, per_pair(self.scored)], [*shapes, self._shape(self.scored)]
        widths = ranking_widths(blocks.num_selection_blocks(self.capacity, config.select_block), n)
        keys = min(tile.keys, max(16, pl.next_power_of_2(config.select_block)))
        scored_specs = self._scored_specs() if len(scored) > 1 else [per_pair(self.scored)]
        return triton_call(
            functools.partial(_selected_kernel, widths=widths, keys=keys, scale=self.scale, **sizes),
            grid=(tile.selected_parts, num_kv, rows),
            in_specs=[*where.specs(), per_pair(*query.shape[2:]), cache(key), cache(value), *scored_specs],
            out_specs=specs,
            out_shape=shapes,
            num_warps=self.warps,
            num_stages=tile.num_stages,
            name="nsa_decode_selected",
        )(*where.arrays(), query, key, value, *scored)[:3]
