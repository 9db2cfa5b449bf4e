"""Decoding of many rows on GPUs in one kernel, or two.

One program serves all branches of a (query token, key/value head) pair: it attends to the compressed blocks, makes the
list from their scores, and attends to the listed blocks and to the window. No program waits for another kernel's list.
Where a batch has too few pairs to fill a GPU, several programs share one. One attends to the compressed blocks and some
to the window. The others each make the list and read a part of its blocks. A second kernel adds up their results. That
is for short rows, whose scores stay in registers; pair_long.py has the program for long ones, which shares its pair
with none.

Lists are those of step.py and short.py.

The programs that make a pair's list do so from probabilities that they have written and read themselves, with the same
numbers and the same instructions: which part a program has decides only over which blocks it attends afterwards, and
its partial results are its own.
"""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
from jax import lax
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
    partials,
    per_pair,
    read_part,
    visible_range,
    window_tiles,
    write_gated_sum,
)
from nsa_jax.ops.kernels.softmax import LOG2E
from nsa_jax.ops.kernels.triton import barrier, pieces


def _tile(ref, begin: int, keys: int):
    """Rows [begin, begin + keys) of ref in `pieces` of its columns; behind the last one, that one."""
    slots = jnp.minimum(begin + iota(keys), ref.shape[0] - 1)
    return [ref[slots, pl.ds(at, size)] for at, size in pieces(ref.shape[1])]


def load_keys(key_ref, keys: int):
    """All compressed keys, in tiles of `keys` rows."""
    return [_tile(key_ref, begin, keys) for begin in range(0, key_ref.shape[0], keys)]


def load_keys_again(tiles, key_ref, changed):
    """What `load_keys` gives now, if `changed`; otherwise the tiles that it gave before."""
    keys = tiles[0][0].shape[0]

    def once_more(tile, piece):
        return lambda: _tile(key_ref, tile * keys, keys)[piece]

    # One condition for each array: Triton cannot compile one that gives several.
    return [
        [lax.cond(changed, once_more(i, j), lambda x=x: x) for j, x in enumerate(tile)] for i, tile in enumerate(tiles)
    ]


def _columns(tile):
    """A function of (offset, width) that gives the pieces of a tile, as `PartSoftmax.add` calls it."""
    offsets = itertools.accumulate((x.shape[1] for x in tile[:-1]), initial=0)
    found = dict(zip(offsets, tile, strict=True))
    return lambda at, _: found[at]


def _write_probabilities(softmax: PartSoftmax, tiles, peak, total, sum_ref, group: int):
    """Probabilities [C + padding], summed over the group, of `tiles`: which blocks are visible, and their scores."""
    lse = peak + jnp.log2(jnp.where(total > 0, total, 1.0))
    heads = (iota(softmax.rows) < group)[:, None]
    for tile, (visible, scores) in enumerate(tiles):
        probs = jnp.where(visible[None, :] & heads, jnp.exp2(scores - lse[:, None]), 0.0)
        sum_ref[pl.ds(tile * softmax.keys, softmax.keys)] = probs.sum(0)


def _attend_compressed(softmax: PartSoftmax, k_ref, v_ref, sum_ref, low, high, group: int):
    """Attention to the compressed blocks [low, high); their probabilities, summed over the group, go to sum_ref."""
    keys, carry, scored = softmax.keys, softmax.init(), []
    for begin in range(0, k_ref.shape[0], keys):
        index = begin + iota(keys)
        visible = (index >= low) & (index < high)
        # Both are loaded before the first product, so that their latencies overlap.
        key, value = (_tile(ref, begin, keys) for ref in (k_ref, v_ref))
        carry, scores, _ = softmax.add(carry, _columns(key), _columns(value), v_ref.dtype, visible)
        scored.append((visible, scores))
    _, peak, total = carry
    _write_probabilities(softmax, scored, peak, total.sum(1), sum_ref, group)
    return carry


def _score_compressed(softmax: PartSoftmax, tiles, sum_ref, low, high, group: int):
    """What `_attend_compressed` puts into sum_ref, from `load_keys`."""
    scored = []
    for number, tile in enumerate(tiles):
        index = number * softmax.keys + iota(softmax.keys)
        visible = (index >= low) & (index < high)
        scored.append((visible, softmax.scores(_columns(tile), visible)))
    peak = functools.reduce(jnp.maximum, [scores.max(1) for _, scores in scored])
    weights = [jnp.where(visible[None, :], jnp.exp2(scores - peak[:, None]), 0.0) for visible, scores in scored]
    _write_probabilities(softmax, scored, peak, functools.reduce(jnp.add, weights).sum(1), sum_ref, group)


def _attend(query, gate_of, caches, outs, t, start, *, group, keys, widths, num_cmp, scale, config):
    """A pair that one program serves.

    Args:
      query: that of `PartSoftmax`.
      gate_of: (heads [rows], branch) -> gates [rows].
      caches: references to compressed key [C, H] and value [C, V], key [S, H], value [S, V], window key [W, H] and
        value [W, V].
      outs: references to list [n], probabilities [C + padding] and output [G, V].
      t, start: position of the query and of its document.
    """
    kc_ref, vc_ref, _, _, kw_ref, vw_ref = caches
    list_ref, sum_ref, out_ref = outs
    softmax = PartSoftmax(query, group=group, keys=keys, v_dim=vw_ref.shape[-1], scale=scale)
    low, high = visible_range(t, start, num_cmp, config)
    compressed = _attend_compressed(softmax, kc_ref, vc_ref, sum_ref, low, high, group)
    selected = _attend_selected(softmax, caches, list_ref, sum_ref, 0, 1, t, start, widths, num_cmp, config)
    window = attend_window(softmax, kw_ref, vw_ref, 0, window_tiles(t, start, keys, config), t, start, config)
    write_gated_sum(out_ref, softmax, (compressed, selected, window), gate_of)


def _attend_part(
    query, gate_of, caches, outs, t, start, early=None, *, cut, parts, group, keys, widths, num_cmp, scale, config
):
    """One part of a pair: first those of the listed blocks, whose programs take longest, then those of `read_part`.

    The arguments are those of `_attend`; outs are list [n], probabilities [C + padding], partial output [G, V] and
    stats [2, G]. `early` is what `load_keys` gives, if that has been called already.
    """
    del gate_of
    list_ref, sum_ref, *partial = outs
    part, sizes = pl.program_id(0), dict(group=group, keys=keys, scale=scale)

    @pl.when(part < parts)
    def _listed():
        softmax = PartSoftmax(query, v_dim=caches[3].shape[-1], **sizes)
        low, high = visible_range(t, start, num_cmp, config)
        _score_compressed(softmax, early or load_keys(caches[0], keys), sum_ref, low, high, group)
        args = caches, list_ref, sum_ref, part, parts, t, start, widths, num_cmp, config
        softmax.store(_attend_selected(softmax, *args), *partial)

    @pl.when(part >= parts)
    def _others():
        common = dict(window_keys=keys, num_cmp=num_cmp, config=config)
        read_part(query, caches, partial, part - parts, cut, t, start, **common, **sizes)


def _attend_selected(
    softmax: PartSoftmax, caches, list_ref, sum_ref, part, parts, t, start, widths, num_cmp: int, config: NSAConfig
):
    """The list of a pair from its probabilities, and attention to the part-th of `parts` parts of its blocks."""
    _, _, k_ref, v_ref, _, _ = caches
    barrier()
    rank(sum_ref, list_ref, t, start, widths=widths, num_cmp=num_cmp, capacity=k_ref.shape[0], config=config)
    barrier()
    begin, end = _listed_part(t, start, part, parts, config)
    return attend_listed(softmax, k_ref, v_ref, list_ref, begin, end, t, start, config)


def _listed_part(t, start, part, parts, config: NSAConfig):
    """Places [begin, end) of the part-th of `parts` parts of a query's list."""
    first, last = candidate_range(t, start, config)
    return part_of(jnp.minimum(last - first + 1, config.num_selected), parts, part)


class Launch:
    """The kernel, and the sum of parts where there are several; see launch.py."""

    name = "nsa_decode_pair"
    early_keys = 0  # the tile of compressed keys that are loaded before the token is written; 0: none are

    def __init__(self, rows, num_kv, group, num_cmp, capacity, dims, dtype, config: NSAConfig, tile: DecodeConfig):
        """The arguments are sizes: `rows` is B * T, num_cmp is C, capacity is S, and dims are (H, V)."""
        h_dim, v_dim = dims
        keys, n, self.dtype, self.config = tile.pair_keys, config.num_selected, dtype, config
        # Attention to the compressed blocks is a program of its own where several share a pair.
        parts, self.cut = tile.pair_parts, (1, tile.pair_window_parts)
        programs = 1 if parts == 1 else sum(self.cut) + parts
        widths = ranking_widths(blocks.num_selection_blocks(capacity, config.select_block), n)
        sizes = dict(group=group, keys=keys, num_cmp=num_cmp, config=config)
        sizes |= dict(scale=LOG2E * h_dim**-0.5)
        self.grid = (programs, num_kv, rows)
        self.options = dict(num_warps=tile.num_warps, num_stages=tile.pair_stages)
        scratch: list[tuple[int, ...]] = [(pl.cdiv(num_cmp, keys) * keys,)]
        if tile.pair_tiles:
            self.attend = functools.partial(pair_long.attend, tiles=tile.pair_tiles, widths=widths, **sizes)
            scratch = pair_long.scratch_shapes(group, num_cmp, keys)
        elif programs == 1:
            self.attend = functools.partial(_attend, widths=widths[-1:], **sizes)
        else:
            self.early_keys = keys
            self.attend = functools.partial(_attend_part, cut=self.cut, parts=parts, widths=widths[-1:], **sizes)
        written = [((n,), jnp.int32), *((shape, jnp.float32) for shape in scratch)]
        written += [((group, v_dim), dtype)] if programs == 1 else []
        self.out_specs = [per_pair(*shape) for shape, _ in written]
        self.out_shape = [jax.ShapeDtypeStruct((rows, num_kv, *shape), kind) for shape, kind in written]
        if programs > 1:
            specs, shapes = partials(rows, num_kv, programs, group, v_dim)
            self.out_specs, self.out_shape = self.out_specs + specs, self.out_shape + shapes

    def needs(self, t, start):
        """Whether the program reads the token at position t, and whether it reads compressed blocks."""
        part, parts = pl.program_id(0), self.grid[0] - sum(self.cut)
        if self.grid[0] == 1:
            return True, True
        begin, end = _listed_part(t, start, part, parts, self.config)
        _, last = _listed_part(t, start, 0, 1, self.config)
        others = parts + self.cut[0]
        return (part >= others) | ((part < parts) & (begin < end) & (end == last)), part < others

    def finish(self, outs, query, gates, caches, where: Positions):
        """Output [rows, N, V] and lists [rows, K, n] from what the kernel put out and gates [rows, N, 3]."""
        del query, caches, where
        (compressed, _), programs = self.cut, self.grid[0]
        if programs == 1:
            return outs[-1], outs[0]
        parts = programs - sum(self.cut)
        branches = (0, parts, parts + compressed), (0, 0, parts), (0, parts + compressed, programs)
        return combine(gates, outs[-2:], branches, self.dtype), outs[0]
