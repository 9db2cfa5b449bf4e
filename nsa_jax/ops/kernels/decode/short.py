"""Decoding of short rows on GPUs in two kernels, where launches take longer than reading does.

  read: every part of every branch at once, the selected branch included: of each of its blocks, listed or not, the
    partial result of a running softmax, because the list is not known yet;
  finish: one program per head makes the list of its group, and adds up the partial results of the compressed blocks,
    of the window and of the listed blocks, in a fixed order.
Lists and outputs are those of step.py, whose four kernels wait for each other and read the listed blocks alone.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from nsa_jax.ops import blocks
from nsa_jax.ops.blocks import NSAConfig
from nsa_jax.ops.choices import Choice
from nsa_jax.ops.kernels.decode.ranking import block_importance, column_probabilities, ranking_widths, write_list
from nsa_jax.ops.kernels.decode.softmax_parts import (
    candidate_range,
    compressed_part,
    partials,
    query_position,
    selected_part,
    visible_range,
    window_part,
    write_sum,
)
from nsa_jax.ops.kernels.softmax import LOG2E
from nsa_jax.ops.kernels.triton import barrier, triton_call


def _read_kernel(
    *refs, num_starts, num_queries, group, rows, keys, block_keys, window_keys, num_cmp, cut, scale, config: NSAConfig
):
    """One part of a branch: the programs of the compressed blocks come first, then those of the window and of blocks.

    refs: lengths [1], segment_start [1] if packed, query [G, H], compressed key [C, H] and value [C, V], window key
    [W, H] and value [W, V], key [S, H], value [S, V]; out: partial output [G, V], stats [2, G], base-2 scores
    [G, C + padding].
    """
    q_ref, kc_ref, vc_ref, kw_ref, vw_ref, ks_ref, vs_ref, acc_ref, stats_ref, s_ref = refs[1 + num_starts :]
    capacity = ks_ref.shape[0]
    t, start = query_position(refs[0], refs[1 : 1 + num_starts], num_queries, capacity)
    compressed_parts, window_parts = cut
    part = pl.program_id(0)
    sizes = dict(group=group, rows=rows, scale=scale, config=config)

    @pl.when(part < compressed_parts)
    def _compressed():
        arrays = (q_ref, kc_ref, vc_ref, acc_ref, stats_ref, s_ref)
        compressed_part(arrays, part, compressed_parts, t, start, keys=keys, num_cmp=num_cmp, **sizes)

    @pl.when((part >= compressed_parts) & (part < compressed_parts + window_parts))
    def _window():
        arrays = (q_ref, kw_ref, vw_ref, acc_ref, stats_ref)
        window_part(arrays, part - compressed_parts, window_parts, t, start, keys=window_keys, **sizes)

    @pl.when(part >= compressed_parts + window_parts)
    def _block():
        block = part - compressed_parts - window_parts
        begin = block * config.select_block
        read = (begin <= t) & (begin + config.select_block > start)
        arrays = (q_ref, ks_ref, vs_ref, acc_ref, stats_ref)
        selected_part(arrays, lambda i: block, jnp.int32(0), read.astype(jnp.int32), t, start, keys=block_keys, **sizes)


def _finish_kernel(*refs, num_starts, num_queries, capacity, group, columns, width, num_cmp, cut, config: NSAConfig):
    """The list of a head's group, and the head's output.

    refs: lengths [1], segment_start [1] if packed, gates [3], stats of the compressed parts [parts, 2, G], scores
    [G, C + padding], partial outputs [parts, V] and stats [parts, 2] of the head; out: output [V], list [n],
    probabilities [C + padding].
    """
    gates_ref, group_stats_ref, s_ref, acc_ref, stats_ref, o_ref, list_ref, sum_ref = refs[1 + num_starts :]
    t, start = query_position(refs[0], refs[1 : 1 + num_starts], num_queries, capacity)
    low, high = visible_range(t, start, num_cmp, config)
    column_probabilities(group_stats_ref, s_ref, sum_ref, 0, low, high, group, columns)
    barrier()
    first, last = candidate_range(t, start, config)
    scores = block_importance(sum_ref, width, low, high, num_cmp, config)
    num_blocks = blocks.num_selection_blocks(capacity, config.select_block)
    chosen = write_list(scores, list_ref, first, last, num_blocks, config)  # the same by every head of the group
    compressed_end, window_end = cut[0], sum(cut)
    gates = [gates_ref[i].astype(jnp.float32) for i in range(3)]
    branches = [  # in the order in which step.py adds them up
        (acc_ref, stats_ref, 0, compressed_end, gates[0]),
        (acc_ref, stats_ref, window_end, window_end + num_blocks, gates[1], chosen),
        (acc_ref, stats_ref, compressed_end, window_end, gates[2]),
    ]
    write_sum(o_ref, branches)


@functools.partial(jax.jit, static_argnames=("config", "plan"))
def decode_attention(
    query, key_cmp, value_cmp, key_slc, value_slc, key_win, value_win, gates, lengths, config: NSAConfig, segment_start,
    plan: Choice,
):  # fmt: skip
    """See `nsa_jax.decode_attention`; returns the output [B, T, N, V] and the block lists int32 [B, T, K, n]."""
    batch, num_queries, num_heads, h_dim = query.shape
    num_cmp, num_kv, v_dim = value_cmp.shape[1:]
    capacity = key_slc.shape[1]
    group, num_rows, n, tile = num_heads // num_kv, batch * num_queries, config.num_selected, plan.tiles
    num_blocks = blocks.num_selection_blocks(capacity, config.select_block)
    (width,) = ranking_widths(num_blocks, n)[-1:]
    cut = tile.compressed_parts, tile.window_parts
    parts = sum(cut) + num_blocks
    columns = max(tile.keys, pl.next_power_of_2(num_cmp), 16)
    # As few as can hold the largest tile in registers: warps that share a tile wait for each other in every sum.
    largest = max(max(width, *cut) * v_dim, group * columns)
    finish_warps = min(pl.next_power_of_2(pl.cdiv(largest, 4096)), 4)
    starts = [] if segment_start is None else [segment_start.astype(jnp.int32).reshape(num_rows, 1)]
    common = dict(num_starts=len(starts), num_queries=num_queries, group=group, num_cmp=num_cmp, cut=cut, config=config)
    where_arrays = (lengths.astype(jnp.int32), *starts)

    where = [
        pl.BlockSpec((1,), lambda s, k, r: (r // num_queries,)),
        *(pl.BlockSpec((None, 1), lambda s, k, r: (r, 0)) for _ in starts),
    ]

    def cache(array):  # one row's and head's slice
        return pl.BlockSpec((None, array.shape[1], None, array.shape[3]), lambda s, k, r: (r // num_queries, 0, k, 0))

    def per_pair(*shape):  # of an array [rows, K, *shape]
        return pl.BlockSpec((None, None, *shape), lambda s, k, r: (r, k, *(0 for _ in shape)))

    specs, shapes = partials(num_rows, num_kv, parts, group, v_dim)
    arrays = (key_cmp[:, :num_cmp], value_cmp[:, :num_cmp], key_win, value_win, key_slc, value_slc)
    acc, stats, scores = triton_call(
        functools.partial(
            _read_kernel,
            rows=max(16, pl.next_power_of_2(group)),
            keys=tile.keys,
            block_keys=min(tile.keys, max(16, pl.next_power_of_2(config.select_block))),
            window_keys=tile.window_keys,
            scale=LOG2E * h_dim**-0.5,
            **common,
        ),
        grid=(parts, num_kv, num_rows),
        in_specs=[*where, per_pair(group, h_dim), *map(cache, arrays)],
        out_specs=[*specs, per_pair(group, columns)],
        out_shape=[*shapes, jax.ShapeDtypeStruct((num_rows, num_kv, group, columns), jnp.float32)],
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        name="nsa_decode_read",
    )(*where_arrays, query.reshape(num_rows, num_kv, group, h_dim), *arrays)

    def of_group(*shape):
        return pl.BlockSpec((None, None, *shape), lambda s, h, r: (r, h // group, *(0 for _ in shape)))

    def of_head(*shape):
        return pl.BlockSpec((None, None, *shape), lambda s, h, r: (r, h, *(0 for _ in shape)))

    out, lists, _ = triton_call(
        functools.partial(_finish_kernel, capacity=capacity, columns=columns, width=width, **common),
        grid=(1, num_heads, num_rows),
        in_specs=[
            *where,
            of_head(3),
            of_group(tile.compressed_parts, 2, group),
            of_group(group, columns),
            pl.BlockSpec((None, None, parts, None, v_dim), lambda s, h, r: (r, h // group, 0, h % group, 0)),
            pl.BlockSpec((None, None, parts, 2, None), lambda s, h, r: (r, h // group, 0, 0, h % group)),
        ],
        out_specs=[of_head(v_dim), of_group(n), of_head(columns)],
        out_shape=[
            jax.ShapeDtypeStruct((num_rows, num_heads, v_dim), query.dtype),
            jax.ShapeDtypeStruct((num_rows, num_kv, n), jnp.int32),
            jax.ShapeDtypeStruct((num_rows, num_heads, columns), jnp.float32),
        ],
        num_warps=finish_warps,
        num_stages=1,
        name="nsa_decode_finish",
    )(*where_arrays, gates.reshape(num_rows, num_heads, 3), stats, scores, acc, stats)
    return out.reshape(batch, num_queries, num_heads, v_dim), lists.reshape(batch, num_queries, num_kv, n)
