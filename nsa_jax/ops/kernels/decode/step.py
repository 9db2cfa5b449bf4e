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
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from nsa_jax.ops import blocks
from nsa_jax.ops.blocks import NSAConfig
from nsa_jax.ops.choices import Choice
from nsa_jax.ops.kernels.decode.softmax_parts import PartSoftmax, combine, iota, part_of, partials, query_position
from nsa_jax.ops.kernels.softmax import LOG2E, MINUS_INFINITY
from nsa_jax.ops.kernels.triton import interpreted, triton_call


def _visible_range(t, start, num_cmp: int, config: NSAConfig):
    """The compressed blocks that a query sees and the cache holds, [low, high)."""
    low, high = blocks.compressed_range(t, start, config)
    return jnp.maximum(low, 0), jnp.minimum(high, num_cmp)


def _candidates(t, start, config: NSAConfig):
    """First and last candidate of the selected branch, 0 and -1 if there is none."""
    first, last = blocks.candidate_range(jnp.maximum(t, 0), start, config.select_block)
    some = (start <= t) & (t >= 0)
    return jnp.where(some, first, 0), jnp.where(some, last, -1)


def _compressed_kernel(*refs, num_starts, num_queries, capacity, group, rows, keys, num_cmp, scale, config: NSAConfig):
    """One part of the compressed blocks.

    refs: lengths [1], segment_start [1] if packed, query [G, H], key [C, H], value [C, V];
    out: partial output [G, V], stats [2, G], base-2 scores [G, C + padding], zero [1] for the next kernel to count in.
    """
    lengths_ref, start_refs = refs[0], refs[1 : 1 + num_starts]
    q_ref, k_ref, v_ref, acc_ref, stats_ref, s_ref, count_ref = refs[1 + num_starts :]
    count_ref[0] = jnp.int32(0)
    t, start = query_position(lengths_ref, start_refs, num_queries, capacity)
    softmax = PartSoftmax(q_ref, rows=rows, group=group, keys=keys, v_dim=v_ref.shape[-1], scale=scale)
    low, high = _visible_range(t, start, num_cmp, config)
    first = low // keys  # tiles begin at multiples of their size, so that scores are stored aligned
    count = jnp.where(high > low, pl.cdiv(high, keys) - first, 0)
    begin, end = part_of(count, pl.num_programs(0), pl.program_id(0))

    def body(i, carry):
        at = i * keys
        index = at + iota(keys)
        visible = (index >= low) & (index < high)
        carry, scores = softmax.step(carry, k_ref, v_ref, jnp.minimum(index, num_cmp - 1), visible)
        s_ref[softmax.head, pl.ds(at, keys)] = scores
        return carry

    softmax.store(lax.fori_loop(first + begin, first + end, body, softmax.init()), acc_ref, stats_ref)


def _column_probabilities(stats_ref, s_ref, sum_ref, chunk, low, high, group: int, columns: int):
    """Softmax probabilities of one chunk of the compressed blocks, summed over the group, into sum_ref [C + padding].

    Blocks outside [low, high) get 0.
    """
    row = iota(pl.next_power_of_2(group))
    head = jnp.minimum(row, group - 1)
    scores = s_ref[head, pl.ds(chunk * columns, columns)]  # on its way while the statistics are summed up
    parts = stats_ref.shape[0]
    part = iota(pl.next_power_of_2(parts))[:, None]
    index = jnp.minimum(part, parts - 1)
    peaks = jnp.where(part < parts, stats_ref[index, 0, head[None, :]], MINUS_INFINITY)
    sums = jnp.where(part < parts, stats_ref[index, 1, head[None, :]], 0.0)
    peak = peaks.max(0)
    total = (sums * jnp.exp2(peaks - peak[None, :])).sum(0)
    lse = peak + jnp.log2(jnp.where(total > 0, total, 1.0))
    column = chunk * columns + iota(columns)
    visible = ((column >= low) & (column < high))[None, :] & (row < group)[:, None]
    probs = jnp.where(visible, jnp.exp2(jnp.where(visible, scores, MINUS_INFINITY) - lse[:, None]), 0.0)
    sum_ref[pl.ds(chunk * columns, columns)] = probs.sum(0)


def _last_to_arrive(count_ref, programs: int):
    """Whether the other programs of this pair have all been here before; what they wrote can then be read."""
    if interpreted():  # one program after the other
        before = count_ref[0]
        count_ref[0] = before + 1
        return before == programs - 1
    pltriton.debug_barrier()  # all threads of this program have written
    return programs == 1 or pltriton.atomic_add(count_ref, 0, jnp.int32(1)) == programs - 1


def _importance(sum_ref, width: int, low, high, num_cmp: int, config: NSAConfig):
    """Importance of the first `width` selection blocks (paper eq. 9) from the probabilities summed over the group."""
    per_block = config.select_block // config.compress_stride
    overlap = config.compress_block // config.compress_stride
    out = jnp.zeros((width,), jnp.float32)
    for tap, weight in enumerate(blocks.fold_weights(config).tolist()):
        column = iota(width) * per_block - (overlap - 1) + tap
        probs = sum_ref[jnp.clip(column, 0, num_cmp - 1)]
        out += weight * jnp.where((column >= low) & (column < high), probs, 0.0)
    return out


def _write_list(importance, list_ref, first, last, num_blocks: int, config: NSAConfig):
    """Writes the ascending list of one query, whose candidates [first, last] all lie within `importance` [width].

    The n-th largest score is found by narrowing a range of float32 bits, see `blocks.rank_bits`.
    """
    n, width = config.num_selected, importance.shape[0]
    j = iota(width)
    forced = blocks.forced_blocks(j, first, last, config)
    free = (j >= first) & (j <= last) & ~forced
    candidates = last - first + 1
    taken = jnp.minimum(candidates, n)
    want = taken - jnp.minimum(candidates, config.num_initial + config.num_local)  # how many are chosen by score
    bits = jnp.where(free, blocks.rank_bits(importance), -1)

    # Several thresholds at a time, their counts in the fields of one integer: a step takes as long as its one sum.
    field = width.bit_length() - 1  # forced blocks are not counted, so a count is less than `width`
    ways = min(31 // max(field, 1), 4)

    def unresolved(carry):
        low, high, count = carry
        return (count > want) & (high - low > 1)

    def narrow(carry):  # keeps at_least(low) >= want > at_least(high)
        low, high, count = carry
        step = (high - low + ways) // (ways + 1)
        packed = sum((bits >= low + step * (i + 1)).astype(jnp.int32) << (field * i) for i in range(ways))
        counts = jnp.sum(packed)
        reached = jnp.int32(0)
        for i in range(ways):
            at_least = (counts >> (field * i)) & (width - 1)
            reached += (at_least >= want).astype(jnp.int32)
            count = jnp.where(at_least >= want, at_least, count)
        return low + step * reached, jnp.minimum(high, low + step * (reached + 1)), count

    low = jnp.int32(0)
    high = jnp.where(want > 0, jnp.max(bits) + 1, 0)
    low, _, _ = lax.while_loop(unresolved, narrow, (low, high, jnp.sum((bits >= low).astype(jnp.int32))))
    low = jnp.where(want > 0, low, blocks.INFINITY_BITS)
    sure = forced | (bits > low)
    tied = bits == low
    ties = taken - jnp.sum(sure.astype(jnp.int32))  # this many of the tied, the lowest indices
    tied_rank = lax.cumsum(tied.astype(jnp.int32), axis=0)
    chosen = sure | (tied & (tied_rank <= ties))
    slot = lax.cumsum(sure.astype(jnp.int32), axis=0) + jnp.minimum(tied_rank, ties) - 1
    pltriton.store(list_ref.at[jnp.where(chosen, slot, n)], j, mask=chosen)
    column = iota(pl.next_power_of_2(n))
    padding = (column >= taken) & (column < n)
    fill = jnp.full(column.shape, num_blocks, jnp.int32)
    pltriton.store(list_ref.at[jnp.where(padding, column, n)], fill, mask=padding)


def _widths(num_blocks: int, n: int) -> list[int]:
    """Widths the ranking is specialised for, ascending; the last one covers every block."""
    top = max(pl.next_power_of_2(num_blocks), pl.next_power_of_2(n), 16)
    return [w for w in (top // 8, top // 4, top // 2) if w >= 128] + [top]


def _rank(sum_ref, list_ref, t, start, finished, *, widths, num_cmp, capacity, config: NSAConfig):
    """Writes a query's list from the probabilities in sum_ref, if `finished`."""
    low, high = _visible_range(t, start, num_cmp, config)
    first, last = _candidates(t, start, config)
    last = jnp.where(finished, last, -2)
    num_blocks = blocks.num_selection_blocks(capacity, config.select_block)
    below = -1  # a query without candidates may have last = -1
    for width in widths:  # short contexts have few candidates: rank no more than the next power of two

        @pl.when((last >= below) & (last < width))
        def _(width=width):
            importance = _importance(sum_ref, width, low, high, num_cmp, config)
            _write_list(importance, list_ref, first, last, num_blocks, config)

        below = width


def _window(refs, part, parts, t, start, *, group, rows, keys, scale, config: NSAConfig):
    """The part-th part of the window; refs: query [G, H], key [W, H], value [W, V], partial output, stats."""
    q_ref, k_ref, v_ref, acc_ref, stats_ref = refs
    softmax = PartSoftmax(q_ref, rows=rows, group=group, keys=keys, v_dim=v_ref.shape[-1], scale=scale)
    low = jnp.maximum(start, t - config.window + 1)
    begin, end = part_of(pl.cdiv(jnp.maximum(t + 1 - low, 0), keys), parts, part)

    def body(i, carry):
        position = low + i * keys + iota(keys)
        return softmax.step(carry, k_ref, v_ref, position % k_ref.shape[0], position <= t)[0]

    softmax.store(lax.fori_loop(begin, end, body, softmax.init()), acc_ref, stats_ref)


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
        low, high = _visible_range(t, start, num_cmp, config)

        @pl.when((chunk * columns < high) & (chunk * columns + columns > low))
        def _chunk():
            _column_probabilities(stats_ref, s_ref, sum_ref, chunk, low, high, group, columns)

        finished = _last_to_arrive(count_ref, chunks)
        _rank(sum_ref, list_ref, t, start, finished, widths=widths, num_cmp=num_cmp, capacity=capacity, config=config)

    @pl.when(chunk >= chunks)
    def _attend():
        sizes = dict(group=group, rows=rows, keys=keys, scale=scale, config=config)
        _window((*attended, *partial), chunk - chunks, parts, t, start, **sizes)


def _fold_kernel(*refs, num_starts, num_queries, capacity, group, columns, num_cmp, config: NSAConfig):
    """One chunk of the scores. refs: lengths [1], segment_start [1] if packed, stats of the compressed parts
    [parts, 2, G], scores [G, C + padding]; out: probabilities [C + padding]."""
    t, start = query_position(refs[0], refs[1 : 1 + num_starts], num_queries, capacity)
    stats_ref, s_ref, sum_ref = refs[1 + num_starts :]
    low, high = _visible_range(t, start, num_cmp, config)
    chunk = pl.program_id(0)

    @pl.when((chunk * columns < high) & (chunk * columns + columns > low))
    def _():
        _column_probabilities(stats_ref, s_ref, sum_ref, chunk, low, high, group, columns)


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
        _rank(sum_ref, list_ref, t, start, True, widths=widths, num_cmp=num_cmp, capacity=capacity, config=config)

    @pl.when(part >= 0)
    def _attend():
        sizes = dict(group=group, rows=rows, keys=keys, scale=scale, config=config)
        _window((*attended, acc_ref, stats_ref), part, parts, t, start, **sizes)


def _selected_kernel(*refs, num_starts, num_queries, capacity, group, rows, keys, scale, config: NSAConfig):
    """One part of the listed blocks.

    refs: lengths [1], segment_start [1] if packed, list [n], query [G, H], key [S, H], value [S, V];
    out: partial output [G, V], stats [2, G].
    """
    lengths_ref, start_refs = refs[0], refs[1 : 1 + num_starts]
    list_ref, q_ref, k_ref, v_ref, acc_ref, stats_ref = refs[1 + num_starts :]
    t, start = query_position(lengths_ref, start_refs, num_queries, capacity)
    first, last = _candidates(t, start, config)
    steps = pl.cdiv(config.select_block, keys)
    taken = jnp.minimum(last - first + 1, config.num_selected)
    begin, end = part_of(taken, pl.num_programs(0), pl.program_id(0))
    softmax = PartSoftmax(q_ref, rows=rows, group=group, keys=keys, v_dim=v_ref.shape[-1], scale=scale)

    def body(i, carry):
        offset = (i % steps) * keys + iota(keys)
        position = list_ref[i // steps] * config.select_block + offset
        visible = (offset < config.select_block) & (position >= start) & (position <= t)
        return softmax.step(carry, k_ref, v_ref, jnp.clip(position, 0, capacity - 1), visible)[0]

    softmax.store(lax.fori_loop(begin * steps, end * steps, body, softmax.init()), acc_ref, stats_ref)


def decode_attention(
    query, key_cmp, value_cmp, key_slc, value_slc, key_win, value_win, gates, lengths, config: NSAConfig, segment_start,
    plan: Choice,
):  # fmt: skip
    """See `nsa_jax.decode_attention`; returns the output [B, T, N, V] and the block lists int32 [B, T, K, n]."""
    batch, num_queries, num_heads, h_dim = query.shape
    num_cmp, num_kv, v_dim = value_cmp.shape[1:]
    capacity, num_slots = key_slc.shape[1], key_win.shape[1]
    if num_cmp == 0:  # a cache too small for one compressed block still needs something to point at
        num_cmp = 1
        key_cmp, value_cmp = (jnp.zeros((batch, 1, num_kv, dim), query.dtype) for dim in (h_dim, v_dim))
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
    ranking = dict(widths=_widths(blocks.num_selection_blocks(capacity, config.select_block), n), num_cmp=num_cmp)
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
