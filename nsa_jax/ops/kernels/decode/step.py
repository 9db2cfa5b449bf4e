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
from nsa_jax.ops.choices import Choice
from nsa_jax.ops.kernels.decode.ranking import block_importance, column_probabilities, rank, ranking_widths
from nsa_jax.ops.kernels.decode.softmax_parts import (
    candidate_range,
    combine,
    compressed_part,
    part_of,
    partials,
    query_position,
    selected_part,
    visible_range,
    window_part,
)
from nsa_jax.ops.kernels.softmax import LOG2E
from nsa_jax.ops.kernels.triton import barrier, interpreted, triton_call


def _compressed_kernel(*refs, num_starts, num_queries, capacity, group, rows, keys, num_cmp, scale, config: NSAConfig):
    """One part of the compressed blocks.

    refs: lengths [1], segment_start [1] if packed, query [G, H], key [C, H], value [C, V];
    out: partial output [G, V], stats [2, G], base-2 scores [G, C + padding], zero [1] for the next kernel to count in.
    """
    *attended, count_ref = refs[1 + num_starts :]
    count_ref[0] = jnp.int32(0)
    t, start = query_position(refs[0], refs[1 : 1 + num_starts], num_queries, capacity)
    sizes = dict(group=group, rows=rows, keys=keys, num_cmp=num_cmp, scale=scale, config=config)
    compressed_part(attended, pl.program_id(0), pl.num_programs(0), t, start, **sizes)


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
        importance = functools.partial(block_importance, sum_ref, low=low, high=high, num_cmp=num_cmp, config=config)
        rank(importance, list_ref, t, start, finished, widths=widths, capacity=capacity, config=config)

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
        low, high = visible_range(t, start, num_cmp, config)
        importance = functools.partial(block_importance, sum_ref, low=low, high=high, num_cmp=num_cmp, config=config)
        rank(importance, list_ref, t, start, True, widths=widths, capacity=capacity, config=config)

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


@functools.partial(jax.jit, static_argnames=("config", "plan"))
def decode_attention(
    query, key_cmp, value_cmp, key_slc, value_slc, key_win, value_win, gates, lengths, config: NSAConfig, segment_start,
    plan: Choice,
):  # fmt: skip
    """See `nsa_jax.decode_attention`; returns the output [B, T, N, V] and the block lists int32 [B, T, K, n]."""
    batch, num_queries, num_heads, h_dim = query.shape
    num_cmp, num_kv, v_dim = value_cmp.shape[1:]
    capacity, num_slots = key_slc.shape[1], key_win.shape[1]
    group, num_rows, n = num_heads // num_kv, batch * num_queries, config.num_selected
    tile = plan.tiles
    starts = [] if segment_start is None else [segment_start.astype(jnp.int32).reshape(num_rows, 1)]
    common = dict(num_starts=len(starts), num_queries=num_queries, capacity=capacity, group=group, config=config)
    attend = dict(rows=max(16, pl.next_power_of_2(group)), scale=LOG2E * h_dim**-0.5)

    def cache(length, dim):  # one row's and head's slice of a cache array
        return pl.BlockSpec((None, length, None, dim), lambda s, k, r: (r // num_queries, 0, k, 0))

    def per_pair(*shape):  # an array [rows, K, *shape]
        return pl.BlockSpec((None, None, *shape), lambda s, k, r: (r, k, *(0 for _ in shape)))

    def pair_shape(*shape, dtype=jnp.float32):
        return jax.ShapeDtypeStruct((num_rows, num_kv, *shape), dtype)

    where = [
        pl.BlockSpec((1,), lambda s, k, r: (r // num_queries,)),
        *(pl.BlockSpec((None, 1), lambda s, k, r: (r, 0)) for _ in starts),
    ]
    where_arrays = (lengths.astype(jnp.int32), *starts)
    rows_query = query.reshape(num_rows, num_kv, group, h_dim)
    columns = min(tile.columns, max(pl.next_power_of_2(num_cmp), 16))
    scored = pl.cdiv(num_cmp, max(tile.keys, columns)) * max(tile.keys, columns)

    specs, shapes = partials(num_rows, num_kv, tile.compressed_parts, group, v_dim)
    cmp_acc, cmp_stats, scores, count = triton_call(
        functools.partial(_compressed_kernel, keys=tile.keys, num_cmp=num_cmp, **common, **attend),
        grid=(tile.compressed_parts, num_kv, num_rows),
        in_specs=[*where, per_pair(group, h_dim), cache(num_cmp, h_dim), cache(num_cmp, v_dim)],
        out_specs=[*specs, per_pair(group, scored), per_pair(1)],
        out_shape=[*shapes, pair_shape(group, scored), pair_shape(1, dtype=jnp.int32)],
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        name="nsa_decode_compressed",
    )(*where_arrays, rows_query, key_cmp[:, :num_cmp], value_cmp[:, :num_cmp])

    chunks = scored // columns
    ranking = dict(
        widths=ranking_widths(blocks.num_selection_blocks(capacity, config.select_block), n), num_cmp=num_cmp
    )
    ranking |= dict(keys=tile.window_keys, **common, **attend)
    windowed = [per_pair(group, h_dim), cache(num_slots, h_dim), cache(num_slots, v_dim)]
    scores_specs = [per_pair(tile.compressed_parts, 2, group), per_pair(group, scored)]
    rank_launch: Any = dict(num_warps=tile.rank_warps, num_stages=2, name="nsa_decode_rank")
    list_shape, sum_shape = pair_shape(n, dtype=jnp.int32), pair_shape(scored)
    if chunks * num_kv * num_rows > tile.fold_programs:
        sums = triton_call(
            functools.partial(_fold_kernel, columns=columns, num_cmp=num_cmp, **common),
            grid=(chunks, num_kv, num_rows),
            in_specs=[*where, *scores_specs],
            out_specs=per_pair(scored),
            out_shape=sum_shape,
            num_warps=4,
            num_stages=1,
            name="nsa_decode_fold",
        )(*where_arrays, cmp_stats, scores)
        specs, shapes = partials(num_rows, num_kv, tile.window_parts, group, v_dim, first=1)
        lists, win_acc, win_stats = triton_call(
            functools.partial(_rank_folded_kernel, **ranking),
            grid=(1 + tile.window_parts, num_kv, num_rows),
            in_specs=[*where, per_pair(scored), *windowed],
            out_specs=[per_pair(n), *specs],
            out_shape=[list_shape, *shapes],
            **rank_launch,
        )(*where_arrays, sums, rows_query, key_win, value_win)
    else:
        specs, shapes = partials(num_rows, num_kv, tile.window_parts, group, v_dim, first=chunks)
        lists, _, _, win_acc, win_stats = triton_call(
            functools.partial(_rank_kernel, columns=columns, **ranking),
            grid=(chunks + tile.window_parts, num_kv, num_rows),
            in_specs=[*where, *scores_specs, per_pair(1), *windowed],
            out_specs=[per_pair(n), per_pair(scored), per_pair(1), *specs],
            out_shape=[list_shape, sum_shape, pair_shape(1, dtype=jnp.int32), *shapes],
            input_output_aliases={3 + len(starts): 2},
            **rank_launch,
        )(*where_arrays, cmp_stats, scores, count, rows_query, key_win, value_win)

    selected_keys = min(tile.keys, max(16, pl.next_power_of_2(config.select_block)))
    specs, shapes = partials(num_rows, num_kv, tile.selected_parts, group, v_dim)
    slc_acc, slc_stats = triton_call(
        functools.partial(_selected_kernel, keys=selected_keys, **common, **attend),
        grid=(tile.selected_parts, num_kv, num_rows),
        in_specs=[*where, per_pair(n), per_pair(group, h_dim), cache(capacity, h_dim), cache(capacity, v_dim)],
        out_specs=specs,
        out_shape=shapes,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        name="nsa_decode_selected",
    )(*where_arrays, lists, rows_query, key_slc, value_slc)

    out = combine(
        gates.reshape(num_rows, num_heads, 3),
        (cmp_acc, cmp_stats, slc_acc, slc_stats, win_acc, win_stats),
        ((0, 0, tile.compressed_parts), (1, 0, tile.selected_parts), (2, 0, tile.window_parts)),
        query.dtype,
    )
    return out.reshape(batch, num_queries, num_heads, v_dim), lists.reshape(batch, num_queries, num_kv, n)
