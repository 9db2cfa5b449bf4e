"""Decoding on GPUs: one query token per program row, its keys split over many programs (split-KV flash decoding).

One token's attention is bound by reading the cache, and a small batch has too few (row, key/value head) pairs to fill a
GPU. So the keys of every branch are split, and four kernels follow each other:
  partial: shares of the visible compressed blocks and of the window: running-softmax partial results, and the
    compressed scores, which are kept (in L2, mostly) so that selection need not read the keys again;
  fold: importance of the selection blocks from those scores;
  selected: every program finds the token's block list for itself (they all write the same list), then attends to its
    share of it;
  combine: the branches' partial results, in a fixed order, and the gates.
How a branch is cut depends on shapes and the row's length, and sums have a fixed order: results are bit-reproducible.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from nsa_jax.config import NSAConfig
from nsa_jax.ops import blocks
from nsa_jax.ops.pallas import tuning
from nsa_jax.ops.pallas.common import LOG2E, interpreted, triton_call

# Stands for minus infinity inside kernels: finite, so that differences of two of them are 0 and never NaN.
_NEG = -1e30
_INF_BITS = 0x7F800000


def _next_power_of_2(x: int) -> int:
    return 1 << max(x - 1, 0).bit_length()


def _pieces(dim: int) -> list[tuple[int, int]]:
    """Splits a head dim into (offset, size) with power-of-two sizes, which is all that Triton tiles can have."""
    out, offset = [], 0
    while offset < dim:
        size = 1 << ((dim - offset).bit_length() - 1)
        out.append((offset, size))
        offset += size
    return out


def _dot(a: jax.Array, b: jax.Array, contract: tuple[int, int]) -> jax.Array:
    """Matrix product accumulated in float32; float32 operands are not rounded (to within 2^-21)."""
    precision = None
    if a.dtype == jnp.float32:
        precision = lax.Precision.HIGHEST if interpreted() else lax.DotAlgorithmPreset.TF32_TF32_F32_X3
    dims = (((contract[0],), (contract[1],)), ((), ()))
    return lax.dot_general(a, b, dims, precision=precision, preferred_element_type=jnp.float32)


def _iota(size: int) -> jax.Array:
    return lax.broadcasted_iota(jnp.int32, (size,), 0)


def _where(lengths_ref, start_refs, num_queries: int):
    """Position and segment start of this program's query; the last grid axis runs over B * T."""
    t = lengths_ref[0] - num_queries + pl.program_id(2) % num_queries
    return t, start_refs[0][0] if start_refs else jnp.int32(0)


def _share(count, parts, part):
    """[begin, end) of the part-th of `parts` nearly equal shares of `count` steps."""
    each = pl.cdiv(count, parts)
    begin = jnp.minimum(part * each, count)
    return begin, jnp.minimum(begin + each, count)


class _Softmax:
    """A running softmax over tiles of keys for the G query heads of one group, padded to `rows`."""

    def __init__(self, q_ref, *, rows: int, group: int, v_dim: int, scale: float):
        self.head = jnp.minimum(_iota(rows), group - 1)
        self.q = [q_ref[self.head, pl.ds(at, size)] for at, size in _pieces(q_ref.shape[-1])]
        self.v_dim, self.rows, self.scale = v_dim, rows, scale

    def init(self):
        acc = tuple(jnp.zeros((self.rows, size), jnp.float32) for _, size in _pieces(self.v_dim))
        return acc, jnp.full((self.rows,), _NEG, jnp.float32), jnp.zeros((self.rows,), jnp.float32)

    def step(self, carry, k_ref, v_ref, slots, visible):
        """Adds the keys at rows `slots` of which `visible` count; returns the carry and base-2 scores [rows, keys]."""
        acc, peak, total = carry
        scores: Any = None
        at = 0
        for piece in self.q:
            part = _dot(piece, k_ref[slots, pl.ds(at, piece.shape[1])], (1, 1))
            scores = part if scores is None else scores + part
            at += piece.shape[1]
        scores = jnp.where(visible[None, :], scores * self.scale, _NEG)
        new_peak = jnp.maximum(peak, scores.max(1))
        alpha = jnp.exp2(peak - new_peak)
        weights = jnp.where(visible[None, :], jnp.exp2(scores - new_peak[:, None]), 0.0)
        total = total * alpha + weights.sum(1)
        weights = weights.astype(v_ref.dtype)
        acc = tuple(
            a * alpha[:, None] + _dot(weights, v_ref[slots, pl.ds(at, size)], (1, 0))
            for a, (at, size) in zip(acc, _pieces(self.v_dim), strict=True)
        )
        return (acc, new_peak, total), scores

    def store(self, carry, acc_ref, stats_ref):
        """Into acc_ref [G, V] the unnormalised output, into stats_ref [2, G] peak and sum (padding repeats a row)."""
        acc, peak, total = carry
        for a, (at, size) in zip(acc, _pieces(self.v_dim), strict=True):
            acc_ref[self.head, pl.ds(at, size)] = a
        stats_ref[0, self.head] = peak
        stats_ref[1, self.head] = total


def _partial_kernel(*refs, num_starts, num_queries, group, rows, keys, parts, num_cmp, scale, config: NSAConfig):
    """One share of the compressed blocks or of the window.

    refs: lengths [1], segment_start [1] if packed, query [G, H], compressed key [C, H] and value [C, V], window key
    [W, H] and value [W, V]; out: partial output [G, V], stats [2, G], base-2 compressed scores [G, C + padding].
    """
    lengths_ref, start_refs = refs[0], refs[1 : 1 + num_starts]
    q_ref, kc_ref, vc_ref, kw_ref, vw_ref, acc_ref, stats_ref, s_ref = refs[1 + num_starts :]
    t, start = _where(lengths_ref, start_refs, num_queries)
    part = pl.program_id(0)
    softmax = _Softmax(q_ref, rows=rows, group=group, v_dim=vc_ref.shape[-1], scale=scale)

    @pl.when(part < parts)
    def _compressed():
        low, high = blocks.compressed_range(t, start, config)
        high = jnp.minimum(high, num_cmp)
        begin, end = _share(pl.cdiv(jnp.maximum(high - low, 0), keys), parts, part)

        def body(i, carry):
            at = low + i * keys
            index = at + _iota(keys)
            carry, scores = softmax.step(carry, kc_ref, vc_ref, jnp.minimum(index, num_cmp - 1), index < high)
            s_ref[softmax.head, pl.ds(at, keys)] = scores
            return carry

        softmax.store(lax.fori_loop(begin, end, body, softmax.init()), acc_ref, stats_ref)

    @pl.when(part >= parts)
    def _window():
        num_slots = kw_ref.shape[0]
        low = jnp.maximum(jnp.maximum(start, t - config.window + 1), 0)
        count = pl.cdiv(jnp.maximum(t + 1 - low, 0), keys)
        begin, end = _share(count, pl.num_programs(0) - parts, part - parts)

        def body(i, carry):
            position = low + i * keys + _iota(keys)
            carry, _ = softmax.step(carry, kw_ref, vw_ref, position % num_slots, position <= t)
            return carry

        softmax.store(lax.fori_loop(begin, end, body, softmax.init()), acc_ref, stats_ref)


def _fold_kernel(*refs, num_starts, num_queries, group, tile, num_cmp, parts, config: NSAConfig):
    """Importance of `tile` selection blocks, summed over the group.

    refs: lengths [1], segment_start [1] if packed, stats of the compressed shares [parts, 2, G],
    scores [G, C + padding]; out: importance [J + padding].
    """
    lengths_ref, start_refs = refs[0], refs[1 : 1 + num_starts]
    stats_ref, s_ref, out_ref = refs[1 + num_starts :]
    t, start = _where(lengths_ref, start_refs, num_queries)
    per_block = config.select_block // config.compress_stride
    overlap = config.compress_block // config.compress_stride
    begin = pl.program_id(0) * tile

    @pl.when(begin * config.select_block <= t)
    def _():
        row = _iota(_next_power_of_2(group))
        head = jnp.minimum(row, group - 1)
        share = _iota(_next_power_of_2(parts))[:, None]
        peaks = jnp.where(share < parts, stats_ref[jnp.minimum(share, parts - 1), 0, head[None, :]], _NEG)
        sums = jnp.where(share < parts, stats_ref[jnp.minimum(share, parts - 1), 1, head[None, :]], 0.0)
        peak = peaks.max(0)
        total = (sums * jnp.exp2(peaks - peak[None, :])).sum(0)
        lse = peak + jnp.log2(jnp.where(total > 0, total, 1.0))
        low, high = blocks.compressed_range(t, start, config)
        low, high = jnp.maximum(low, 0), jnp.minimum(high, num_cmp)
        block = begin + _iota(tile)
        importance = jnp.zeros((tile,), jnp.float32)
        for tap, weight in enumerate(blocks.fold_weights(config).tolist()):
            column = block * per_block - (overlap - 1) + tap
            visible = ((column >= low) & (column < high))[None, :] & (row < group)[:, None]
            scores = s_ref[head[:, None], jnp.clip(column, 0, num_cmp - 1)[None, :]]
            probs = jnp.where(visible, jnp.exp2(jnp.where(visible, scores, _NEG) - lse[:, None]), 0.0)
            importance += weight * probs.sum(0)
        out_ref[pl.ds(begin, tile)] = importance


def _write_list(importance, list_ref, first, last, num_blocks: int, config: NSAConfig):
    """Writes the ascending list of one query, whose candidates [first, last] all lie within `importance` [width].

    The n-th largest score is found by bisection on the float32 bits: scores are never negative, so their bits order
    like their values.
    """
    n, width = config.num_selected, importance.shape[0]
    j = _iota(width)
    forced = blocks.forced_blocks(j, first, last, config)
    free = (j >= first) & (j <= last) & ~forced
    candidates = last - first + 1
    taken = jnp.minimum(candidates, n)
    want = taken - jnp.minimum(candidates, config.num_initial + config.num_local)  # how many are chosen by score
    bits = jnp.where(free, lax.bitcast_convert_type(importance, jnp.int32), -1)

    def unresolved(carry):
        low, high, count = carry
        return (count > want) & (high - low > 1)

    def halve(carry):  # keeps at_least(low) >= want > at_least(high)
        low, high, count = carry
        middle = low + (high - low) // 2
        above = jnp.sum((bits >= middle).astype(jnp.int32))
        keep = above >= want
        return jnp.where(keep, middle, low), jnp.where(keep, high, middle), jnp.where(keep, above, count)

    low = jnp.int32(0)
    high = jnp.where(want > 0, jnp.max(bits) + 1, 0)
    low, _, _ = lax.while_loop(unresolved, halve, (low, high, jnp.sum((bits >= low).astype(jnp.int32))))
    low = jnp.where(want > 0, low, _INF_BITS)
    sure = forced | (bits > low)
    tied = bits == low
    ties = taken - jnp.sum(sure.astype(jnp.int32))  # this many of the tied, the lowest indices
    tied_rank = lax.cumsum(tied.astype(jnp.int32), axis=0)
    chosen = sure | (tied & (tied_rank <= ties))
    slot = lax.cumsum(sure.astype(jnp.int32), axis=0) + jnp.minimum(tied_rank, ties) - 1
    pltriton.store(list_ref.at[jnp.where(chosen, slot, n)], j, mask=chosen)
    column = _iota(_next_power_of_2(n))
    padding = (column >= taken) & (column < n)
    fill = jnp.full(column.shape, num_blocks, jnp.int32)
    pltriton.store(list_ref.at[jnp.where(padding, column, n)], fill, mask=padding)


def _widths(num_blocks: int, n: int) -> list[int]:
    """Widths the ranking is specialised for, ascending; the last one covers every block."""
    top = max(_next_power_of_2(num_blocks), _next_power_of_2(n), 16)
    return [w for w in (top // 8, top // 4, top // 2) if w >= 128] + [top]


def _selected_kernel(*refs, num_starts, num_queries, group, rows, keys, widths, num_blocks, scale, config: NSAConfig):
    """The block list, and attention to one share of it.

    refs: lengths [1], segment_start [1] if packed, importance [J + padding], query [G, H], key [S, H], value [S, V];
    out: list [n], partial output [G, V], stats [2, G].
    """
    lengths_ref, start_refs = refs[0], refs[1 : 1 + num_starts]
    imp_ref, q_ref, k_ref, v_ref, list_ref, acc_ref, stats_ref = refs[1 + num_starts :]
    t, start = _where(lengths_ref, start_refs, num_queries)
    first, last = blocks.candidate_range(jnp.maximum(t, 0), jnp.maximum(start, 0), config.select_block)
    last = jnp.where(start <= t, last, first - 1)
    last = jnp.where(t >= 0, last, first - 1)
    below = 0
    for width in widths:  # short contexts have few candidates: rank no more than the next power of two

        @pl.when(((last >= below) | (below == 0)) & (last < width))
        def _(width=width):
            _write_list(imp_ref[pl.ds(0, width)], list_ref, first, last, num_blocks, config)

        below = width
    if not interpreted():
        pltriton.debug_barrier()  # the list was written by other threads of this program

    steps = pl.cdiv(config.select_block, keys)
    taken = jnp.minimum(last - first + 1, config.num_selected)
    begin, end = _share(taken, pl.num_programs(0), pl.program_id(0))
    softmax = _Softmax(q_ref, rows=rows, group=group, v_dim=v_ref.shape[-1], scale=scale)

    def body(i, carry):
        offset = (i % steps) * keys + _iota(keys)
        position = list_ref[i // steps] * config.select_block + offset
        visible = (offset < config.select_block) & (position >= start) & (position <= t)
        slots = jnp.minimum(position, k_ref.shape[0] - 1) if config.select_block % keys else position
        return softmax.step(carry, k_ref, v_ref, slots, visible)[0]

    softmax.store(lax.fori_loop(begin * steps, end * steps, body, softmax.init()), acc_ref, stats_ref)


def _combine_kernel(*refs, branches, v_dim):
    """The sum of the branches for one head.

    refs: gates [branches] if there are several, then partial outputs [shares, V] and stats [shares, 2] for every group
    of shares; out: [V]. A branch is (group, first share, end).
    """
    gates_ref, groups = (refs[0], refs[1:-1]) if len(branches) > 1 else (None, refs[:-1])
    o_ref = refs[-1]
    outs = [jnp.zeros((size,), jnp.float32) for _, size in _pieces(v_dim)]
    for i, (which, begin, end) in enumerate(branches):
        acc_ref, stats_ref = groups[2 * which : 2 * which + 2]
        index = begin + _iota(_next_power_of_2(end - begin))
        inside = index < end
        index = jnp.minimum(index, end - 1)
        peaks = jnp.where(inside, stats_ref[index, 0], _NEG)
        weight = jnp.where(inside, jnp.exp2(peaks - peaks.max()), 0.0)
        total = (weight * stats_ref[index, 1]).sum()
        gate = 1.0 if gates_ref is None else gates_ref[i].astype(jnp.float32)
        weight = weight * (gate / jnp.where(total > 0, total, 1.0))
        for j, (at, size) in enumerate(_pieces(v_dim)):
            outs[j] += (acc_ref[index, pl.ds(at, size)] * weight[:, None]).sum(0)
    for out, (at, size) in zip(outs, _pieces(v_dim), strict=True):
        o_ref[pl.ds(at, size)] = out.astype(o_ref.dtype)


def _combine(gates, partials, branches, dtype):
    """Output [rows, N, V] from gates [rows, N, branches] or None and partial results, a pair for every group."""
    num_rows, num_kv, _, group, v_dim = partials[0].shape

    specs = []
    for acc in partials[::2]:  # all shares of one head
        shares = acc.shape[2]
        specs.append(pl.BlockSpec((None, None, shares, None, v_dim), lambda h, r: (r, h // group, 0, h % group, 0)))
        specs.append(pl.BlockSpec((None, None, shares, 2, None), lambda h, r: (r, h // group, 0, 0, h % group)))
    arrays = list(partials)
    if gates is not None:
        specs.insert(0, pl.BlockSpec((None, None, len(branches)), lambda h, r: (r, h, 0)))
        arrays.insert(0, gates)
    return triton_call(
        functools.partial(_combine_kernel, branches=branches, v_dim=v_dim),
        grid=(num_kv * group, num_rows),
        in_specs=specs,
        out_specs=pl.BlockSpec((None, None, v_dim), lambda h, r: (r, h, 0)),
        out_shape=jax.ShapeDtypeStruct((num_rows, num_kv * group, v_dim), dtype),
        num_warps=4,
        num_stages=1,
        name="nsa_decode_combine",
    )(*arrays)


def _partials(num_rows, num_kv, shares, group, v_dim):
    """Partial outputs and stats of every share: specs to write one, and shapes."""
    specs = [
        pl.BlockSpec((None, None, None, group, v_dim), lambda s, k, r: (r, k, s, 0, 0)),
        pl.BlockSpec((None, None, None, 2, group), lambda s, k, r: (r, k, s, 0, 0)),
    ]
    shapes = [
        jax.ShapeDtypeStruct((num_rows, num_kv, shares, group, v_dim), jnp.float32),
        jax.ShapeDtypeStruct((num_rows, num_kv, shares, 2, group), jnp.float32),
    ]
    return specs, shapes


def decode_attention(
    query, key_cmp, value_cmp, key_slc, value_slc, key_win, value_win, gates, lengths, config: NSAConfig, segment_start
):
    """See `nsa_jax.decode_attention`; returns the output [B, T, N, V] and the block lists int32 [B, T, K, n]."""
    batch, num_queries, num_heads, h_dim = query.shape
    num_cmp, num_kv, v_dim = value_cmp.shape[1:]
    capacity, num_slots = key_slc.shape[1], key_win.shape[1]
    if num_cmp == 0:  # a cache too small for one compressed block still needs something to point at
        num_cmp = 1
        key_cmp, value_cmp = (jnp.zeros((batch, 1, num_kv, dim), query.dtype) for dim in (h_dim, v_dim))
    group, num_rows, n = num_heads // num_kv, batch * num_queries, config.num_selected
    num_blocks = blocks.num_selection_blocks(capacity, config.select_block)
    tile = tuning.decode_config(
        num_rows * num_kv, num_cmp, config, row_bytes=(h_dim + v_dim) * jnp.dtype(query.dtype).itemsize
    )
    widths = _widths(num_blocks, n)
    fold_tile = min(tile.fold_blocks, widths[0])
    window_parts = tile.window_parts
    starts = [] if segment_start is None else [segment_start.astype(jnp.int32).reshape(num_rows, 1)]
    common = dict(num_starts=len(starts), num_queries=num_queries, group=group, config=config)
    attend = dict(rows=max(16, _next_power_of_2(group)), scale=LOG2E * h_dim**-0.5)
    launch = dict(num_warps=tile.num_warps, num_stages=tile.num_stages)

    def cache(length, dim):  # one row's and head's slice of a cache array
        return pl.BlockSpec((None, length, None, dim), lambda s, k, r: (r // num_queries, 0, k, 0))

    where = [
        pl.BlockSpec((1,), lambda s, k, r: (r // num_queries,)),
        *(pl.BlockSpec((None, 1), lambda s, k, r: (r, 0)) for _ in starts),
    ]
    per_head = pl.BlockSpec((None, None, group, h_dim), lambda s, k, r: (r, k, 0, 0))

    lengths = lengths.astype(jnp.int32)
    rows_query = query.reshape(num_rows, num_kv, group, h_dim)
    scored = pl.cdiv(num_cmp, tile.keys) * tile.keys + tile.keys  # a tile may start anywhere
    scores_spec = pl.BlockSpec((None, None, group, scored), lambda s, k, r: (r, k, 0, 0))
    shares = tile.compressed_parts + window_parts
    specs, shapes = _partials(num_rows, num_kv, shares, group, v_dim)
    part_acc, part_stats, scores = triton_call(
        functools.partial(
            _partial_kernel,
            keys=tile.keys,
            parts=tile.compressed_parts,
            num_cmp=num_cmp,
            **common,
            **attend,
        ),  # fmt: skip
        grid=(shares, num_kv, num_rows),
        in_specs=[
            *where,
            per_head,
            cache(num_cmp, h_dim),
            cache(num_cmp, v_dim),
            cache(num_slots, h_dim),
            cache(num_slots, v_dim),
        ],  # fmt: skip
        out_specs=[*specs, scores_spec],
        out_shape=[*shapes, jax.ShapeDtypeStruct((num_rows, num_kv, group, scored), jnp.float32)],
        name="nsa_decode_partial",
        **launch,
    )(lengths, *starts, rows_query, key_cmp[:, :num_cmp], value_cmp[:, :num_cmp], key_win, value_win)

    importance_spec = pl.BlockSpec((None, None, widths[-1]), lambda s, k, r: (r, k, 0))
    importance = triton_call(
        functools.partial(_fold_kernel, tile=fold_tile, num_cmp=num_cmp, parts=tile.compressed_parts, **common),
        grid=(pl.cdiv(num_blocks, fold_tile), num_kv, num_rows),
        in_specs=[
            *where,
            pl.BlockSpec((None, None, shares, 2, group), lambda s, k, r: (r, k, 0, 0, 0)),
            scores_spec,
        ],
        out_specs=importance_spec,
        out_shape=jax.ShapeDtypeStruct((num_rows, num_kv, widths[-1]), jnp.float32),
        num_warps=4,
        num_stages=1,
        name="nsa_decode_fold",
    )(lengths, *starts, part_stats, scores)

    selected_keys = min(tile.keys, max(16, _next_power_of_2(config.select_block)))
    specs, shapes = _partials(num_rows, num_kv, tile.selected_parts, group, v_dim)
    lists, slc_acc, slc_stats = triton_call(
        functools.partial(
            _selected_kernel, keys=selected_keys, widths=widths, num_blocks=num_blocks, **common, **attend
        ),
        grid=(tile.selected_parts, num_kv, num_rows),
        in_specs=[
            *where,
            importance_spec,
            per_head,
            cache(capacity, h_dim),
            cache(capacity, v_dim),
        ],
        out_specs=[pl.BlockSpec((None, None, n), lambda s, k, r: (r, k, 0)), *specs],
        out_shape=[jax.ShapeDtypeStruct((num_rows, num_kv, n), jnp.int32), *shapes],
        name="nsa_decode_selected",
        **launch,
    )(lengths, *starts, importance, rows_query, key_slc, value_slc)

    cut = tile.compressed_parts
    out = _combine(
        gates.reshape(num_rows, num_heads, 3),
        (part_acc, part_stats, slc_acc, slc_stats),
        ((0, 0, cut), (1, 0, tile.selected_parts), (0, cut, shares)),
        query.dtype,
    )
    return (
        out.reshape(batch, num_queries, num_heads, v_dim),
        lists.reshape(batch, num_queries, num_kv, n),
    )


def _dense_kernel(*refs, num_starts, num_queries, group, rows, keys, scale):
    """One share of all keys. refs: lengths [1], segment_start [1] if packed, query [G, H], key [S, H], value [S, V];
    out: partial output [G, V], stats [2, G]."""
    lengths_ref, start_refs = refs[0], refs[1 : 1 + num_starts]
    q_ref, k_ref, v_ref, acc_ref, stats_ref = refs[1 + num_starts :]
    t, start = _where(lengths_ref, start_refs, num_queries)
    softmax = _Softmax(q_ref, rows=rows, group=group, v_dim=v_ref.shape[-1], scale=scale)
    count = pl.cdiv(jnp.maximum(t + 1 - start, 0), keys)
    begin, end = _share(count, pl.num_programs(0), pl.program_id(0))

    def body(i, carry):
        position = start + i * keys + _iota(keys)
        slots = jnp.minimum(position, k_ref.shape[0] - 1)
        return softmax.step(carry, k_ref, v_ref, slots, position <= t)[0]

    softmax.store(lax.fori_loop(begin, end, body, softmax.init()), acc_ref, stats_ref)


def dense_decode_attention(query, key, value, lengths, segment_start=None):
    """Full attention of the newest T tokens of each row to a cache: the baseline, split like the sparse kernels.

    Args:
      query: [B, T, N, H].
      key: [B, S, K, H], of which lengths[b] tokens are in use, the T queries' own included.
      value: [B, S, K, V].
      lengths: int [B].
      segment_start: int [B, T] or None.

    Returns:
      [B, T, N, V] in query's dtype.
    """
    batch, num_queries, num_heads, h_dim = query.shape
    capacity, num_kv, v_dim = value.shape[1:]
    group, num_rows = num_heads // num_kv, batch * num_queries
    row_bytes = (h_dim + v_dim) * jnp.dtype(query.dtype).itemsize
    tile = tuning.decode_config(num_rows * num_kv, capacity, NSAConfig(), row_bytes)
    starts = [] if segment_start is None else [segment_start.astype(jnp.int32).reshape(num_rows, 1)]
    specs, shapes = _partials(num_rows, num_kv, tile.compressed_parts, group, v_dim)
    acc, stats = triton_call(
        functools.partial(
            _dense_kernel,
            num_starts=len(starts),
            num_queries=num_queries,
            group=group,
            rows=max(16, _next_power_of_2(group)),
            keys=tile.keys,
            scale=LOG2E * h_dim**-0.5,
        ),
        grid=(tile.compressed_parts, num_kv, num_rows),
        in_specs=[
            pl.BlockSpec((1,), lambda s, k, r: (r // num_queries,)),
            *(pl.BlockSpec((None, 1), lambda s, k, r: (r, 0)) for _ in starts),
            pl.BlockSpec((None, None, group, h_dim), lambda s, k, r: (r, k, 0, 0)),
            pl.BlockSpec((None, capacity, None, h_dim), lambda s, k, r: (r // num_queries, 0, k, 0)),
            pl.BlockSpec((None, capacity, None, v_dim), lambda s, k, r: (r // num_queries, 0, k, 0)),
        ],
        out_specs=specs,
        out_shape=shapes,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        name="dense_decode",
    )(lengths.astype(jnp.int32), *starts, query.reshape(num_rows, num_kv, group, h_dim), key, value)
    out = _combine(None, (acc, stats), ((0, 0, tile.compressed_parts),), query.dtype)
    return out.reshape(batch, num_queries, num_heads, v_dim)
