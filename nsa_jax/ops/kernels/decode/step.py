"""Decoding on GPUs: one query token per program row, its keys split over many programs (split-KV flash decoding).

One token's attention is bound by reading the cache, and a small batch has too few (row, key/value head) pairs to fill a
GPU. So the keys of every branch are split, and four kernels follow each other:
  compressed: parts of the visible compressed blocks: running-softmax partial results, and the scores, which are kept
    (in L2, mostly) so that selection need not read the keys again;
  rank: the scores become probabilities, summed over the group, and the program that finishes a pair's last chunk folds
    them to the importance of the selection blocks and writes the list; that leaves most of the GPU idle, so further
    programs attend to parts of the window. Many scores get a kernel of their own before it (fold), whose small
    programs read them faster;
  selected: parts of the listed blocks;
  combine: the branches' partial results, in a fixed order, and the gates.
How a branch is cut depends on shapes and the row's length, and sums have a fixed order: results are bit-reproducible.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from nsa_jax.ops import blocks
from nsa_jax.ops.blocks import NSAConfig
from nsa_jax.ops.decode_tiles import DecodeConfig
from nsa_jax.ops.kernels.decode.ranking import column_probabilities, rank, ranking_widths
from nsa_jax.ops.kernels.decode.softmax_parts import (
    Positions,
    candidate_range,
    combine,
    compressed_part,
    part_of,
    partials,
    per_pair,
    query_position,
    selected_part,
    visible_range,
    window_part,
)
from nsa_jax.ops.kernels.softmax import LOG2E
from nsa_jax.ops.kernels.triton import barrier, interpreted, triton_call


def _compressed(q_ref, gate_of, caches, outs, t, start, **sizes):
    """One part of the compressed blocks.

    The arguments are those of `pair._attend`; outs are partial output [G, V], stats [2, G], base-2 scores
    [G, C + padding], and zero [1] for the next kernel to count in.
    """
    del gate_of
    *partial, count_ref = outs
    count_ref[0] = jnp.int32(0)
    compressed_part((q_ref, *caches[:2], *partial), pl.program_id(0), pl.num_programs(0), t, start, **sizes)


def _last_to_arrive(count_ref, programs: int):
    """Whether the other programs of this pair have all been here before; what they wrote can then be read."""
    if interpreted():  # one program after the other
        before = count_ref[0]
        count_ref[0] = before + 1
        return before == programs - 1
    barrier()
    return programs == 1 or pltriton.atomic_add(count_ref, 0, jnp.int32(1)) == programs - 1


def _rank_kernel(
    *refs, num_starts, num_queries, capacity, group, rows, keys, columns, widths, num_cmp, scale, config: NSAConfig
):
    """The first programs: one chunk of the scores each, the last one also the list. The others: a part of the window.

    refs: lengths [1], segment_start [1] if packed, stats of the compressed parts [parts, 2, G],
    scores [G, C + padding], count [1] (aliased), query [G, H], window key [W, H] and value [W, V];
    out: list [n], probabilities [C + padding], count [1], partial output [G, V], stats [2, G].
    """
    stats_ref, s_ref, _, *attended = refs[1 + num_starts : -5]
    list_ref, sum_ref, count_ref, *partial = refs[-5:]
    t, start = query_position(refs[0], refs[1 : 1 + num_starts], num_queries, capacity)
    chunks = s_ref.shape[1] // columns
    chunk, parts = pl.program_id(0), pl.num_programs(0) - chunks

    @pl.when(chunk < chunks)
    def _list():
        low, high = visible_range(t, start, num_cmp, config)

        @pl.when((chunk * columns < high) & (chunk * columns + columns > low))
        def _chunk():
            column_probabilities(stats_ref, s_ref, sum_ref, chunk, low, high, group, columns)

        finished = _last_to_arrive(count_ref, chunks)
        sizes = dict(widths=widths, num_cmp=num_cmp, capacity=capacity, config=config)
        rank(sum_ref, list_ref, t, start, finished, **sizes)

    @pl.when(chunk >= chunks)
    def _attend():
        sizes = dict(group=group, rows=rows, keys=keys, scale=scale, config=config)
        window_part((*attended, *partial), chunk - chunks, parts, t, start, **sizes)


def _fold_kernel(*refs, num_starts, num_queries, capacity, group, columns, num_cmp, config: NSAConfig):
    """One chunk of the scores. refs: lengths [1], segment_start [1] if packed, stats of the compressed parts
    [parts, 2, G], scores [G, C + padding]; out: probabilities [C + padding]."""
    t, start = query_position(refs[0], refs[1 : 1 + num_starts], num_queries, capacity)
    stats_ref, s_ref, sum_ref = refs[1 + num_starts :]
    low, high = visible_range(t, start, num_cmp, config)
    chunk = pl.program_id(0)

    @pl.when((chunk * columns < high) & (chunk * columns + columns > low))
    def _():
        column_probabilities(stats_ref, s_ref, sum_ref, chunk, low, high, group, columns)


def _rank_folded_kernel(
    *refs, num_starts, num_queries, capacity, group, rows, keys, widths, num_cmp, scale, config: NSAConfig
):
    """The first program: the list. The others: a part of the window each.

    refs: lengths [1], segment_start [1] if packed, probabilities [C + padding], query [G, H], window key [W, H] and
    value [W, V]; out: list [n], partial output [G, V], stats [2, G].
    """
    sum_ref, *attended, list_ref, acc_ref, stats_ref = refs[1 + num_starts :]
    t, start = query_position(refs[0], refs[1 : 1 + num_starts], num_queries, capacity)
    part, parts = pl.program_id(0) - 1, pl.num_programs(0) - 1

    @pl.when(part < 0)
    def _list():
        rank(sum_ref, list_ref, t, start, True, widths=widths, num_cmp=num_cmp, capacity=capacity, config=config)

    @pl.when(part >= 0)
    def _attend():
        sizes = dict(group=group, rows=rows, keys=keys, scale=scale, config=config)
        window_part((*attended, acc_ref, stats_ref), part, parts, t, start, **sizes)


def _selected_kernel(*refs, num_starts, num_queries, capacity, group, rows, keys, scale, config: NSAConfig):
    """One part of the listed blocks.

    refs: lengths [1], segment_start [1] if packed, list [n], query [G, H], key [S, H], value [S, V];
    out: partial output [G, V], stats [2, G].
    """
    list_ref, *attended = refs[1 + num_starts :]
    t, start = query_position(refs[0], refs[1 : 1 + num_starts], num_queries, capacity)
    first, last = candidate_range(t, start, config)
    taken = jnp.minimum(last - first + 1, config.num_selected)
    begin, end = part_of(taken, pl.num_programs(0), pl.program_id(0))
    sizes = dict(group=group, rows=rows, keys=keys, scale=scale, config=config)
    selected_part(attended, lambda i: list_ref[i], begin, end, t, start, **sizes)


class Launch:
    """All four kernels; see launch.py."""

    name = "nsa_decode_compressed"

    def __init__(self, rows, num_kv, group, num_cmp, capacity, dims, dtype, config: NSAConfig, tile: DecodeConfig):
        """The arguments are sizes: `rows` is B * T, num_cmp is C, capacity is S, and dims are (H, V)."""
        h_dim, self.v_dim = dims
        self.tile, self.dtype, self.config, self.group = tile, dtype, config, group
        self.num_cmp, self.capacity = num_cmp, capacity
        self.softmax = dict(rows=max(16, pl.next_power_of_2(group)), scale=LOG2E * h_dim**-0.5)
        self.columns = min(tile.columns, max(pl.next_power_of_2(num_cmp), 16))
        step = max(tile.keys, self.columns)
        self.scored = pl.cdiv(num_cmp, step) * step
        self.grid = (tile.compressed_parts, num_kv, rows)
        self.options = dict(num_warps=tile.num_warps, num_stages=tile.num_stages)
        sizes = dict(group=group, keys=tile.keys, num_cmp=num_cmp, config=config)
        self.attend = functools.partial(_compressed, **sizes, **self.softmax)
        specs, shapes = partials(rows, num_kv, tile.compressed_parts, group, self.v_dim)
        self.out_specs = [*specs, per_pair(group, self.scored), per_pair(1)]
        self.out_shape = [*shapes, self._shape(group, self.scored), self._shape(1, dtype=jnp.int32)]

    def _shape(self, *shape, dtype=jnp.float32):
        """Of an array [rows, K, *shape]."""
        _, num_kv, rows = self.grid
        return jax.ShapeDtypeStruct((rows, num_kv, *shape), dtype)

    def finish(self, outs, query, gates, caches, where: Positions):
        """Output [rows, N, V] and lists [rows, K, n] from what the first kernel put out and gates [rows, N, 3]."""
        acc, stats, *scored = outs
        _, _, key, value, *window = caches
        sizes = dict(num_starts=len(where.starts), num_queries=where.num_queries, capacity=self.capacity)
        sizes |= dict(group=self.group, config=self.config)
        lists, *windowed = self._rank(stats, scored, query, window, where, sizes)
        selected = self._selected(lists, query, key, value, where, sizes)
        tile = self.tile
        branches = (0, 0, tile.compressed_parts), (1, 0, tile.selected_parts), (2, 0, tile.window_parts)
        return combine(gates, (acc, stats, *selected, *windowed), branches, self.dtype), lists

    def _cache(self, array, where: Positions):
        """One row's and head's slice."""
        count = where.num_queries
        return pl.BlockSpec((None, array.shape[1], None, array.shape[3]), lambda s, k, r: (r // count, 0, k, 0))

    def _rank(self, stats, scored, query, window, where: Positions, sizes):
        """Lists [rows, K, n], and the window's partial outputs and their stats."""
        tile, (_, num_kv, rows) = self.tile, self.grid
        scores, count = scored
        group, config, n = self.group, self.config, self.config.num_selected
        columns, total = self.columns, self.scored
        chunks = total // columns
        widths = ranking_widths(blocks.num_selection_blocks(self.capacity, config.select_block), n)
        ranking = dict(widths=widths, num_cmp=self.num_cmp, keys=tile.window_keys, **sizes, **self.softmax)
        windowed = [per_pair(*query.shape[2:]), *(self._cache(array, where) for array in window)]
        scores_specs = [per_pair(tile.compressed_parts, 2, group), per_pair(group, total)]
        launch: Any = dict(num_warps=tile.rank_warps, num_stages=2, name="nsa_decode_rank")
        list_shape, sum_shape = self._shape(n, dtype=jnp.int32), self._shape(total)
        if chunks * num_kv * rows > tile.fold_programs:
            sums = triton_call(
                functools.partial(_fold_kernel, columns=columns, num_cmp=self.num_cmp, **sizes),
                grid=(chunks, num_kv, rows),
                in_specs=[*where.specs(), *scores_specs],
                out_specs=per_pair(total),
                out_shape=sum_shape,
                num_warps=4,
                num_stages=1,
                name="nsa_decode_fold",
            )(*where.arrays(), stats, scores)
            specs, shapes = partials(rows, num_kv, tile.window_parts, group, self.v_dim, first=1)
            return triton_call(
                functools.partial(_rank_folded_kernel, **ranking),
                grid=(1 + tile.window_parts, num_kv, rows),
                in_specs=[*where.specs(), per_pair(total), *windowed],
                out_specs=[per_pair(n), *specs],
                out_shape=[list_shape, *shapes],
                **launch,
            )(*where.arrays(), sums, query, *window)
        specs, shapes = partials(rows, num_kv, tile.window_parts, group, self.v_dim, first=chunks)
        lists, _, _, *partial = triton_call(
            functools.partial(_rank_kernel, columns=columns, **ranking),
            grid=(chunks + tile.window_parts, num_kv, rows),
            in_specs=[*where.specs(), *scores_specs, per_pair(1), *windowed],
            out_specs=[per_pair(n), per_pair(total), per_pair(1), *specs],
            out_shape=[list_shape, sum_shape, self._shape(1, dtype=jnp.int32), *shapes],
            input_output_aliases={len(where.arrays()) + 2: 2},
            **launch,
        )(*where.arrays(), stats, scores, count, query, *window)
        return lists, *partial

    def _selected(self, lists, query, key, value, where: Positions, sizes):
        """Partial outputs of the listed blocks, and their stats."""
        tile, config, (_, num_kv, rows) = self.tile, self.config, self.grid
        keys = min(tile.keys, max(16, pl.next_power_of_2(config.select_block)))
        specs, shapes = partials(rows, num_kv, tile.selected_parts, self.group, self.v_dim)
        return triton_call(
            functools.partial(_selected_kernel, keys=keys, **sizes, **self.softmax),
            grid=(tile.selected_parts, num_kv, rows),
            in_specs=[
                *where.specs(),
                per_pair(config.num_selected),
                per_pair(*query.shape[2:]),
                *(self._cache(array, where) for array in (key, value)),
            ],
            out_specs=specs,
            out_shape=shapes,
            **self.options,
            name="nsa_decode_selected",
        )(*where.arrays(), lists, query, key, value)
