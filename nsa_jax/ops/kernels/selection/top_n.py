"""The n highest scores of every row, as ascending block lists (paper eq. 11 and 12).

The threshold of a row is its n-th largest score, found by bisection on the float32 bits (`blocks.rank_bits`). Blocks
above it are compacted in ascending order; of those that equal it, the ones with the lowest indices are taken.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from nsa_jax.ops import blocks
from nsa_jax.ops import tiles as tuning
from nsa_jax.ops.blocks import NSAConfig
from nsa_jax.ops.kernels.triton import pieces, triton_call


class _Counts(NamedTuple):
    """Entries of each row's list by kind, int32 [rows]; a list has them in this order, then padding."""

    initial: jax.Array
    ranked: jax.Array  # chosen by score
    local: jax.Array
    free: jax.Array  # candidates between the initial and the local ones, of which `ranked` are chosen


def _count_entries(first, last, config: NSAConfig) -> _Counts:
    candidates = last - first + 1
    initial = jnp.minimum(candidates, config.num_initial)
    local = jnp.minimum(candidates - initial, config.num_local)
    free = candidates - initial - local
    return _Counts(initial, jnp.minimum(free, config.num_selected - initial - local), local, free)


def _write_forced(out_ref, first, last, counts: _Counts, num_blocks: int, n: int) -> None:
    """Writes the initial blocks, the local ones and the padding, for which scores do not matter."""
    rows = first.shape[0]
    groups = pl.next_power_of_2(n)
    row = lax.broadcasted_iota(jnp.int32, (rows, groups), 0)
    slot = lax.broadcasted_iota(jnp.int32, (rows, groups), 1)
    behind = slot - (counts.initial + counts.ranked)[:, None]
    entry = jnp.where(behind < counts.local[:, None], (last - counts.local + 1)[:, None] + behind, num_blocks)
    entry = jnp.where(slot < counts.initial[:, None], first[:, None] + slot, entry)
    forced = ((slot < counts.initial[:, None]) | (behind >= 0)) & (slot < n)
    pltriton.store(out_ref.at[row, jnp.where(forced, slot, n)], entry, mask=forced)


def _load_bits(s_ref, first, counts: _Counts, columns, parts) -> list[jax.Array]:
    """Scores as integers of the same order, in parts of a row; -1 where a block cannot be chosen by score."""

    def bits_of(j, at, size):
        scores = s_ref[0, :, pl.ds(at, size)]
        if s_ref.shape[0] > 1:
            scores += s_ref[1, :, pl.ds(at + 1, size)]
        from_first = j - (first + counts.initial)[:, None]
        free = from_first.astype(jnp.uint32) < counts.free[:, None].astype(jnp.uint32)  # 0 <= from_first < free
        return jnp.where(free, blocks.rank_bits(scores), -1)

    return [bits_of(j, *part) for j, part in zip(columns, parts, strict=True)]


def _at_least(bits, threshold):
    """How many of each row's bits are at least its threshold, int32 [rows].

    Bits below the threshold are counted by the sign of the difference. It cannot overflow, and takes one instruction
    less than a comparison.
    """
    below = sum(jnp.sum((part - threshold[:, None]) >> 31, axis=1) for part in bits)
    return below + sum(part.shape[1] for part in bits)


def _bisect(bits, want, groups: int):
    """A threshold that at least `want` of each row's bits reach, as few as ties allow, and how many do.

    Args:
      bits: parts of a row, int32 [rows, part].
      want: int32 [rows].
      groups: at least as many as any `want`: the least of so many group maxima begins the search.
    """

    def most(values):
        return functools.reduce(jnp.maximum, values)

    # Bisection keeps at_least(low) >= want > at_least(high). The least of at least `want` group maxima is such a low.
    if sum(part.shape[1] for part in bits) > groups and bits[-1].shape[1] >= groups:
        maxima = most(jnp.max(part.reshape(part.shape[0], part.shape[1] // groups, groups), axis=1) for part in bits)
        low = jnp.maximum(jnp.min(maxima, axis=1), 0)
    else:
        low = jnp.zeros_like(want)
    high = most(jnp.max(part, axis=1) for part in bits) + 1
    low = jnp.where(want > 0, low, high)

    def unresolved(carry):
        low, high, count = carry
        return jnp.max(((count > want) & (high - low > 1)).astype(jnp.int32)) > 0

    def halve(carry):
        low, high, count = carry
        middle = low + ((high - low) >> 1)
        above = _at_least(bits, middle)
        keep = above >= want
        return jnp.where(keep, middle, low), jnp.where(keep, high, middle), jnp.where(keep, above, count)

    low, _, count = lax.while_loop(unresolved, halve, (low, high, _at_least(bits, low)))
    return low, count


def _running_count(flags) -> list[jax.Array]:
    """Running count of flags, int32 parts [rows, part], from the first part's first column on."""
    before, counts = jnp.zeros((flags[0].shape[0], 1), jnp.int32), []
    for part in flags:
        counts.append(before + lax.cumsum(part, axis=1))
        before += jnp.sum(part, axis=1)[:, None]
    return counts


def _choose(bits, threshold, count, want):
    """Flags, int32 parts, of the `want` highest; of equal ones those with the lowest indices."""

    def drop_ties():
        room = (want - _at_least(bits, threshold + 1))[:, None]
        tied = [(part == threshold[:, None]).astype(jnp.int32) for part in bits]
        kept = [tie * (number <= room) for tie, number in zip(tied, _running_count(tied), strict=True)]
        return tuple(
            (part > threshold[:, None]).astype(jnp.int32) + keep for part, keep in zip(bits, kept, strict=True)
        )

    def take_all():
        return tuple((part >= threshold[:, None]).astype(jnp.int32) for part in bits)

    return lax.cond(jnp.max(count - want) > 0, drop_ties, take_all)


def _write_lists(s_ref, out_ref, first, last, width: int, num_blocks: int, config: NSAConfig):
    """Writes the lists of a program's rows, whose candidates [first, last] all lie in the first `width` blocks."""
    n, rows = config.num_selected, first.shape[0]
    counts = _count_entries(first, last, config)
    _write_forced(out_ref, first, last, counts, num_blocks, n)
    parts = pieces(width)
    columns = [at + lax.broadcasted_iota(jnp.int32, (rows, size), 1) for at, size in parts]
    bits = _load_bits(s_ref, first, counts, columns, parts)
    threshold, count = _bisect(bits, counts.ranked, pl.next_power_of_2(n))
    chosen = _choose(bits, threshold, count, counts.ranked)
    for j, part, number in zip(columns, chosen, _running_count(chosen), strict=True):
        row = lax.broadcasted_iota(jnp.int32, j.shape, 0)
        slot = number + (counts.initial - 1)[:, None]
        pltriton.store(out_ref.at[row, jnp.where(part > 0, slot, n)], j, mask=part > 0)


def _top_n_kernel(*refs, rows, widths, config: NSAConfig, length, num_blocks, packed):
    """Block lists of `rows` neighbouring queries.

    refs: where [2] as in `scores_triton`, scores [planes, rows, width], segment_start [T] if packed; out: lists
    [rows, n].
    """
    where_ref, s_ref, *start_refs, out_ref = refs
    row = where_ref[1] + pl.program_id(0) * rows + lax.broadcasted_iota(jnp.int32, (rows,), 0)
    row = jnp.minimum(row, length - 1)
    start = start_refs[0][row] if packed else jnp.zeros_like(row)
    first, last = blocks.candidate_range(where_ref[0] + row, start, config.select_block)
    needed = jnp.maximum(jnp.max(last) + 1, 1)  # rows without candidates get a list too
    below = 0
    for width in widths:  # early queries have few candidates: read no more than the next width

        @pl.when((needed > below) & (needed <= width))
        def _(width=width):
            _write_lists(s_ref, out_ref, first, last, width, num_blocks, config)

        below = width


def row_widths(num_blocks: int, n: int) -> list[int]:
    """Row widths the top-n kernel is specialised for, ascending; the last one covers every block."""
    top = max(pl.next_power_of_2(num_blocks), pl.next_power_of_2(n), 16)
    return [w for w in range(top // 8, top, max(top // 8, 1)) if w % 128 == 0] + [top]


def block_lists(where, scores, start, *, batch, num_kv, length, config, num_blocks):
    """Lists [B, rows, K, n] from scores [B * K, planes, rows, width]."""
    planes, rows, width = scores.shape[1:]
    widths = row_widths(num_blocks, config.num_selected)
    per_program, num_warps = tuning.top_n_shape(widths[-1])
    packed = [] if start is None else [start]
    kernel = functools.partial(
        _top_n_kernel,
        rows=per_program,
        widths=widths,
        config=config,
        length=length,
        num_blocks=num_blocks,
        packed=bool(packed),
    )
    n = config.num_selected
    return triton_call(
        kernel,
        num_warps=num_warps,
        num_stages=1,
        grid=(rows // per_program, batch * num_kv),
        in_specs=[
            pl.BlockSpec((2,), lambda t, b: (0,)),
            pl.BlockSpec((None, planes, per_program, width), lambda t, b: (b, 0, t, 0)),
            *(pl.BlockSpec((None, length), lambda t, b: (b // num_kv, 0)) for _ in packed),
        ],
        out_specs=pl.BlockSpec((None, per_program, None, n), lambda t, b: (b // num_kv, t, b % num_kv, 0)),
        out_shape=jax.ShapeDtypeStruct((batch, rows, num_kv, n), jnp.int32),
        name="nsa_top_n",
    )(where, scores, *packed)
