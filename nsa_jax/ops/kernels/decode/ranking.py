"""Selection in decoding: from the scores of compressed blocks to the list of one query, inside of a kernel."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from nsa_jax.ops import blocks
from nsa_jax.ops.blocks import NSAConfig
from nsa_jax.ops.kernels.decode.softmax_parts import candidate_range, iota, visible_range
from nsa_jax.ops.kernels.softmax import MINUS_INFINITY


def column_probabilities(stats_ref, s_ref, sum_ref, chunk, low, high, group: int, columns: int, parts: int):
    """Softmax probabilities of one chunk of the compressed blocks, summed over the group, into sum_ref [C + padding].

    Blocks outside [low, high) get 0. The first `parts` of stats_ref are those of the compressed blocks.
    """
    row = iota(pl.next_power_of_2(group))
    head = jnp.minimum(row, group - 1)
    scores = s_ref[head, pl.ds(chunk * columns, columns)]  # on its way while the statistics are summed up
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


def block_importance(sum_ref, width: int, low, high, num_cmp: int, config: NSAConfig):
    """Importance of the first `width` selection blocks (paper eq. 9) from the probabilities summed over the group."""
    per_block = config.select_block // config.compress_stride
    overlap = config.compress_block // config.compress_stride
    out = jnp.zeros((width,), jnp.float32)
    for tap, weight in enumerate(blocks.fold_weights(config).tolist()):
        column = iota(width) * per_block - (overlap - 1) + tap
        probs = sum_ref[jnp.clip(column, 0, num_cmp - 1)]
        out += weight * jnp.where((column >= low) & (column < high), probs, 0.0)
    return out


def write_list(importance, list_ref, first, last, num_blocks: int, config: NSAConfig):
    """Writes the ascending list of one query, whose candidates [first, last] all lie within `importance` [width].

    Returns which blocks it holds, bool [width]. The n-th largest score is found by narrowing a range of float32 bits,
    see `blocks.rank_bits`.
    """
    n, width = config.num_selected, importance.shape[0]
    j = iota(width)
    forced = blocks.forced_blocks(j, first, last, config)
    free = (j >= first) & (j <= last) & ~forced
    candidates = last - first + 1
    taken = jnp.minimum(candidates, n)
    num_forced = jnp.minimum(candidates, config.num_initial + config.num_local)
    want = taken - num_forced  # how many are chosen by score
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
    low, _, _ = lax.while_loop(unresolved, narrow, (low, high, candidates - num_forced))
    low = jnp.where(want > 0, low, blocks.INFINITY_BITS)
    sure = forced | (bits > low)
    tied = bits == low
    ties = taken - jnp.sum(sure.astype(jnp.int32))  # this many of the tied, the lowest indices
    # One running sum for both ranks, whose warps wait for each other once: at most n are sure, at most `width` tied.
    shift = width.bit_length()
    ranks = lax.cumsum((sure.astype(jnp.int32) << shift) + tied.astype(jnp.int32), axis=0)
    tied_rank = ranks & ((1 << shift) - 1)
    chosen = sure | (tied & (tied_rank <= ties))
    slot = (ranks >> shift) + jnp.minimum(tied_rank, ties) - 1
    pltriton.store(list_ref.at[jnp.where(chosen, slot, n)], j, mask=chosen)
    column = iota(pl.next_power_of_2(n))
    padding = (column >= taken) & (column < n)
    fill = jnp.full(column.shape, num_blocks, jnp.int32)
    pltriton.store(list_ref.at[jnp.where(padding, column, n)], fill, mask=padding)
    return chosen


def rank(sum_ref, list_ref, t, start, *, widths, num_cmp: int, capacity: int, config: NSAConfig):
    """Writes a query's list from the probabilities of compressed blocks, summed over the group."""
    low, high = visible_range(t, start, num_cmp, config)
    first, last = candidate_range(t, start, config)
    num_blocks = blocks.num_selection_blocks(capacity, config.select_block)
    below = -1  # a query without candidates has last = -1
    for width in widths:  # short contexts have few candidates: rank no more than the next power of two

        @pl.when((last >= below) & (last < width))
        def _(width=width):
            importance = block_importance(sum_ref, width, low, high, num_cmp, config)
            write_list(importance, list_ref, first, last, num_blocks, config)

        below = width


def ranking_widths(num_blocks: int, n: int) -> list[int]:
    """Widths the ranking is specialised for, ascending; the last one covers every block."""
    top = max(pl.next_power_of_2(num_blocks), pl.next_power_of_2(n), 16)
    return [w for w in (top // 8, top // 4, top // 2) if w >= 128] + [top]
