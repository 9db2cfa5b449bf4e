"""Decoding of many rows on GPUs in one kernel, or two.

One program serves all branches of a (query token, key/value head) pair: it attends to the compressed blocks, makes the
list from their scores, and attends to the listed blocks and to the window. No program waits for another kernel's list.
Where a batch has too few pairs to fill a GPU, several programs share one. Each of them makes the list and reads a part
of its blocks and of the window, and a second kernel adds up their results. That is for short rows, whose scores stay in
registers; pair_long.py has the program for long ones, which shares its pair with none.

Lists are those of step.py and short.py.

Programs that share a pair all make its list, from probabilities that they have written and read themselves, with the
same numbers and the same instructions: which part a program has decides only over which keys it attends afterwards,
and its partial results are its own.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from nsa_jax.ops import blocks
from nsa_jax.ops.blocks import NSAConfig
from nsa_jax.ops.decode_tiles import DecodeConfig
from nsa_jax.ops.kernels.decode import pair_long
from nsa_jax.ops.kernels.decode.ranking import rank, ranking_widths
from nsa_jax.ops.kernels.decode.softmax_parts import (
    PartSoftmax,
    Positions,
    attend_listed,
    attend_window,
    candidate_range,
    combine,
    iota,
    part_of,
    per_pair,
    visible_range,
    window_tiles,
    write_gated_sum,
)
from nsa_jax.ops.kernels.softmax import LOG2E
from nsa_jax.ops.kernels.triton import barrier, pieces


def _attend_compressed(softmax: PartSoftmax, k_ref, v_ref, sum_ref, low, high, group: int, num_cmp: int):
    """Attention to the compressed blocks [low, high); their probabilities, summed over the group, go to sum_ref."""
    keys, carry, scored = softmax.keys, softmax.init(), []
    for begin in range(0, sum_ref.shape[0], keys):
        index = begin + iota(keys)
        slots, visible = jnp.minimum(index, num_cmp - 1), (index >= low) & (index < high)
        # Both are loaded before the first product, so that their latencies overlap.
        key, value = ({at: ref[slots, pl.ds(at, size)] for at, size in pieces(ref.shape[-1])} for ref in (k_ref, v_ref))
        load_key, load_value = (lambda at, _, loaded=loaded: loaded[at] for loaded in (key, value))
        carry, scores, _ = softmax.add(carry, load_key, load_value, v_ref.dtype, visible)
        scored.append((visible, scores))
    _, peak, total = carry
    total = total.sum(1)
    lse = peak + jnp.log2(jnp.where(total > 0, total, 1.0))
    heads = (iota(softmax.rows) < group)[:, None]
    for tile, (visible, scores) in enumerate(scored):
        probs = jnp.where(visible[None, :] & heads, jnp.exp2(scores - lse[:, None]), 0.0)
        sum_ref[pl.ds(tile * keys, keys)] = probs.sum(0)
    return carry


def _attend(q_ref, gate_of, caches, outs, t, start, *, group, rows, keys, widths, num_cmp, parts, scale, config):
    """One part of a pair.

    Args:
      q_ref: query [G, H].
      gate_of: (heads [rows], branch) -> gates [rows].
      caches: references to compressed key [C, H] and value [C, V], key [S, H], value [S, V], window key [W, H] and
        value [W, V].
      outs: references to list [n], probabilities [C + padding], then the output [G, V], or with several parts partial
        outputs [3, G, V] and stats [3, 2, G] of the branches.
      t, start: position of the query and of its document.
    """
    kc_ref, vc_ref, ks_ref, vs_ref, kw_ref, vw_ref = caches
    list_ref, sum_ref, *out_refs = outs
    part, capacity = pl.program_id(0), ks_ref.shape[0]
    softmax = PartSoftmax(q_ref, rows=rows, group=group, keys=keys, v_dim=vs_ref.shape[-1], scale=scale)
    low, high = visible_range(t, start, num_cmp, config)
    compressed = _attend_compressed(softmax, kc_ref, vc_ref, sum_ref, low, high, group, num_cmp)
    barrier()
    rank(sum_ref, list_ref, t, start, True, widths=widths, num_cmp=num_cmp, capacity=capacity, config=config)
    barrier()
    first, last = candidate_range(t, start, config)
    entry, entries = part_of(jnp.minimum(last - first + 1, config.num_selected), parts, part)
    selected = attend_listed(softmax, ks_ref, vs_ref, list_ref, entry, entries, t, start, config)
    begin, end = part_of(window_tiles(t, start, keys, config), parts, part)
    window = attend_window(softmax, kw_ref, vw_ref, begin, end, t, start, config)
    branches = compressed, selected, window
    if parts > 1:
        acc_ref, stats_ref = out_refs
        for branch, (acc, peak, total) in enumerate(branches):
            for piece, (at, size) in zip(acc, pieces(softmax.v_dim), strict=True):
                acc_ref[branch, softmax.head, pl.ds(at, size)] = piece
            stats_ref[branch, 0, softmax.head] = peak
            stats_ref[branch, 1, softmax.head] = total.sum(1)
        return
    write_gated_sum(out_refs[0], softmax, branches, gate_of)


class Launch:
    """The kernel, and the sum of parts where there are several; see launch.py."""

    name = "nsa_decode_pair"

    def __init__(self, rows, num_kv, group, num_cmp, capacity, dims, dtype, config: NSAConfig, tile: DecodeConfig):
        """The arguments are sizes: `rows` is B * T, num_cmp is C, capacity is S, and dims are (H, V)."""
        h_dim, v_dim = dims
        parts, keys, n = tile.pair_parts, tile.pair_keys, config.num_selected
        widths = ranking_widths(blocks.num_selection_blocks(capacity, config.select_block), n)
        sizes = dict(group=group, rows=max(16, pl.next_power_of_2(group)), keys=keys, num_cmp=num_cmp, config=config)
        sizes |= dict(scale=LOG2E * h_dim**-0.5)
        self.grid, self.dtype = (parts, num_kv, rows), dtype
        self.options = dict(num_warps=tile.num_warps, num_stages=tile.pair_stages)
        shapes: list[tuple[tuple[int, ...], Any]] = [((n,), jnp.int32)]
        if tile.pair_tiles:
            self.attend = functools.partial(pair_long.attend, tiles=tile.pair_tiles, widths=widths, **sizes)
            shapes += [(shape, jnp.float32) for shape in pair_long.scratch_shapes(group, num_cmp, keys)]
        else:
            self.attend = functools.partial(_attend, parts=parts, widths=widths[-1:], **sizes)
            shapes.append(((pl.cdiv(num_cmp, keys) * keys,), jnp.float32))
        if parts == 1:
            shapes.append(((group, v_dim), dtype))
        self.out_specs = [per_pair(*shape) for shape, _ in shapes]
        for shape in ((group, v_dim), (2, group)) if parts > 1 else ():
            self.out_specs.append(pl.BlockSpec((None, None, 3, None, *shape), lambda s, k, r: (r, k, 0, s, 0, 0)))
            shapes.append(((3, parts, *shape), jnp.float32))
        self.out_shape = [jax.ShapeDtypeStruct((rows, num_kv, *shape), kind) for shape, kind in shapes]

    def finish(self, outs, query, gates, caches, where: Positions):
        """Output [rows, N, V] and lists [rows, K, n] from what the kernel put out and gates [rows, N, 3]."""
        del query, caches, where
        parts, num_kv, rows = self.grid
        if parts == 1:
            return outs[-1], outs[0]
        acc, stats = (x.reshape(rows, num_kv, 3 * parts, *x.shape[4:]) for x in outs[-2:])
        # Every part has the whole of the compressed branch.
        branches = (0, 0, 1), (0, parts, 2 * parts), (0, 2 * parts, 3 * parts)
        return combine(gates, (acc, stats), branches, self.dtype), outs[0]
