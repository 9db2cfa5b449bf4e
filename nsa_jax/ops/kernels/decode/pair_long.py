"""Decoding of many long rows on GPUs in one kernel: one program serves a (query token, key/value head) pair.

Beyond what pair.py does for short rows, the weights of the compressed blocks are stored as they are computed, each tile
with the peak that it is relative to, and become probabilities once all scores are known. That takes one product each.
A step of 64 rows then needs no partial results and three launches less than in step.py.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from nsa_jax.ops.blocks import NSAConfig
from nsa_jax.ops.kernels.decode.ranking import rank
from nsa_jax.ops.kernels.decode.softmax_parts import (
    PartSoftmax,
    attend_listed,
    attend_window,
    candidate_range,
    compressed_step,
    compressed_tiles,
    iota,
    visible_range,
    window_tiles,
    write_gated_sum,
)
from nsa_jax.ops.kernels.triton import barrier


def _attend_compressed(softmax: PartSoftmax, k_ref, v_ref, scratch, first, count, low, high, group: int):
    """Attention to the compressed blocks [low, high), which lie in `count` tiles from the first one on.

    scratch: references to weights [G, C + padding], the peaks [G, tiles] that those are relative to, and log-sum-exps
    [G] in base 2.
    """
    weights_ref, peaks_ref, lse_ref = scratch
    row = iota(softmax.rows)
    inside = row < group  # the rows behind them repeat a head

    def body(i, carry):
        carry, _, weights = compressed_step(softmax, carry, i, k_ref, v_ref, low, high)
        column = (i * softmax.keys + iota(softmax.keys))[None, :]
        pltriton.store(weights_ref.at[row[:, None], column], weights, mask=inside[:, None] & (column >= 0))
        pltriton.store(peaks_ref.at[row, jnp.full_like(row, i)], carry[1], mask=inside)
        return carry

    carry = lax.fori_loop(first, first + count, body, softmax.init())
    _, peak, total = carry
    total = total.sum(1)
    pltriton.store(lse_ref.at[row], peak + jnp.log2(jnp.where(total > 0, total, 1.0)), mask=inside)
    return carry


def _add_heads(scratch, sum_ref, first, count, group: int, keys: int, tiles: int):
    """The probabilities of `count` tiles from the first one on, summed over the group, into sum_ref [C + padding].

    scratch is that of `_attend_compressed`; so many tiles are read at a time.
    """
    weights_ref, peaks_ref, lse_ref = scratch

    def body(i, _):
        tile = first + i * tiles + iota(tiles)
        tile = jnp.minimum(tile, first + count - 1)  # the last one perhaps several times, with the same result
        column = tile[:, None] * keys + iota(keys)[None, :]
        probs = jnp.zeros(column.shape, jnp.float32)
        for head in range(group):
            probs += weights_ref[head, column] * jnp.exp2(peaks_ref[head, tile] - lse_ref[head])[:, None]
        sum_ref[column] = probs

    lax.fori_loop(0, pl.cdiv(count, tiles), body, None)


def attend(
    query, gate_of, caches, outs, t, start, *, group, keys, tiles, widths, num_cmp, scale, config: NSAConfig
):  # fmt: skip
    """One pair. The arguments are those of `pair._attend`; outs are the list [n], `scratch_shapes` and the output."""
    kc_ref, vc_ref, ks_ref, vs_ref, kw_ref, vw_ref = caches
    list_ref, *scratch, sum_ref, out_ref = outs
    softmax = PartSoftmax(query, group=group, keys=keys, v_dim=vs_ref.shape[-1], scale=scale)
    low, high = visible_range(t, start, num_cmp, config)
    first, count = compressed_tiles(low, high, keys)
    compressed = _attend_compressed(softmax, kc_ref, vc_ref, scratch, first, count, low, high, group)
    barrier()
    _add_heads(scratch, sum_ref, first, count, group, keys, tiles)
    barrier()
    capacity = ks_ref.shape[0]
    rank(sum_ref, list_ref, t, start, widths=widths, num_cmp=num_cmp, capacity=capacity, config=config)
    barrier()
    window = attend_window(softmax, kw_ref, vw_ref, 0, window_tiles(t, start, keys, config), t, start, config)
    earliest, last = candidate_range(t, start, config)
    taken = jnp.minimum(last - earliest + 1, config.num_selected)
    selected = attend_listed(softmax, ks_ref, vs_ref, list_ref, jnp.int32(0), taken, t, start, config)
    write_gated_sum(out_ref, softmax, (compressed, selected, window), gate_of)


def scratch_shapes(group: int, num_cmp: int, keys: int) -> list[tuple[int, ...]]:
    """Shapes of the float32 numbers that `attend` keeps in memory for each pair."""
    tiles = pl.cdiv(num_cmp, keys)
    return [(group, tiles * keys), (group, tiles), (group,), (tiles * keys,)]
