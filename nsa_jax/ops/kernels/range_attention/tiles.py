"""Tiles of range attention: what its forward and backward kernels share.

The query rows of one key/value head are (token, head) pairs in that order: row r is token `r // G`, head `r % G`. A
query tile is a run of rows, so any G fills it. Past the last row it repeats that row: the same values are computed and
stored.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from nsa_jax.ops import tiles as tuning
from nsa_jax.ops.kernels.softmax import NO_WEIGHT
from nsa_jax.ops.kernels.triton import dot

# Elements up to which an array that is known while tracing is written out for every batch entry.
_MOST_KNOWN = 2**16


class KnownRanges(NamedTuple):
    """Ranges of the queries of every batch entry that are known while tracing. What tiles visit follows.

    Attributes:
      low, high: int32 [T], without descents but for queries that see nothing, which come first and have (S, 0).
      num_keys: S.
    """

    low: np.ndarray
    high: np.ndarray
    num_keys: int


class Window(NamedTuple):
    """A second attention of the same queries over the same keys and values: the end of every range.

    Attributes:
      low: int32 [B, T]; the query at t sees keys low[t] <= p < high[t], where `high` is that of the first attention.
      known: these ranges, if tracing knows them, and then those of the first attention too.
      statistics: in a backward pass (lse, delta), as those of the first attention, whose cotangents it has too, and
        then those of both together, see `joint_statistics`.
    """

    low: jax.Array
    known: KnownRanges | None
    statistics: tuple[jax.Array, ...] = ()


class GatedSum(NamedTuple):
    """The sum of all branches of NSA, which the kernel of the last one stores (paper eq. 5).

    Attributes:
      gates: [B, T, N, 3], of `outs` and then of the kernel's own attentions.
      outs: [B, T, N, V], outputs of the branches before.
      kv_heads: how many key/value heads of a batch entry have become batch entries; the sum is [B, T, N, V] of
        B / kv_heads batch entries and N * kv_heads heads.
      keep: the kernel stores its own attentions' outputs and log-sum-exps too: a backward pass will need them.
    """

    gates: jax.Array
    outs: tuple[jax.Array, ...]
    kv_heads: int
    keep: bool


# The loops of Hopper's kernels, one after the other between ascending limits: whether every row sees whole blocks, and
# how many attentions there are. The second list is for where a `Window` reaches.
PHASES: tuple[tuple[bool, int], ...] = ((False, 1), (True, 1), (False, 1))
WINDOW_PHASES: tuple[tuple[bool, int], ...] = ((False, 2), (True, 2), (False, 2))


def joint_statistics(lse, delta, window_lse, window_delta) -> tuple[jax.Array, jax.Array]:
    """(lse, delta) of one attention whose weights and score gradients are the sums of those of two.

    Weights are exp2(score - lse), gradients weights * (gradient of a weight - delta). Of a key that both see, kernels
    take one exponential for both.
    """
    # A gate of 0 has made a log-sum-exp infinite. The difference of two such is no number.
    lse, window_lse = jnp.minimum(lse, NO_WEIGHT), jnp.minimum(window_lse, NO_WEIGHT)
    lowest = jnp.minimum(lse, window_lse)
    parts = jnp.exp2(lowest - lse), jnp.exp2(lowest - window_lse)
    total = parts[0] + parts[1]
    return lowest - jnp.log2(total), (parts[0] * delta + parts[1] * window_delta) / total


def row_vectors(
    rows, low, high, statistics, window: Window | None, num_keys: int, known: KnownRanges | None
) -> tuple[jax.Array, list[jax.Array]]:
    """What Hopper's kernels take for each query row.

    Args:
      rows: `sm90_rows.RowTiles`.
      low, high: int32 [B, T] ranges.
      statistics: (lse, delta) float32 [B, T, N] of a backward pass, or nothing.
      window: the second attention, if there is one.
      num_keys: S.
      known: the ranges, if tracing knows them.

    Returns:
      low, high and the window's low for each row, int32 [2 or 3, 1 or B, rows], one entry if all are known; the
      statistics and the window's for each row, float32 [B, K, rows].
    """
    ranges: list = [low, high]
    constants = [] if known is None else [known.low, known.high]
    if window is not None:
        ranges.append(window.low)
        statistics = (*statistics, *window.statistics)
        if window.known is not None:
            constants.append(window.known.low)
    if len(constants) == len(ranges):
        few = len(ranges) * rows.tiles * rows.tile <= _MOST_KNOWN
        ranges = [x[None] for x in constants] if few else [x[:1] for x in ranges]
    bounds = [rows.per_token(x, 0 if i == 1 else num_keys) for i, x in enumerate(ranges)]
    stacked = jnp.asarray(numpy_of(bounds[0]).stack(bounds), jnp.int32)
    return stacked, [rows.per_row(x, 0.0 if i % 2 else NO_WEIGHT) for i, x in enumerate(statistics)]


def known_ranges(low: np.ndarray, high: np.ndarray, num_keys: int) -> KnownRanges | None:
    """Clipped ranges [T] as `KnownRanges`; None if they descend, or if queries after the first see nothing."""
    seeing = np.flatnonzero(high > low)
    begin = seeing[0] if len(seeing) else len(low)
    ascend = all((np.diff(x[begin:]) >= 0).all() for x in (low, high))
    return KnownRanges(low, high, num_keys) if ascend and len(seeing) == len(low) - begin else None


def for_batch(x: np.ndarray | jax.Array, batch: int) -> jax.Array:
    """The same [1, ...] for every batch entry, int32; a known one of moderate size is a constant of the program."""
    shape = (batch, *x.shape[1:])
    if isinstance(x, np.ndarray) and batch * x.size <= _MOST_KNOWN:
        return jnp.asarray(np.broadcast_to(x, shape), jnp.int32)
    return jnp.broadcast_to(jnp.asarray(x, jnp.int32), shape)


def numpy_of(x) -> ModuleType | Any:
    """NumPy for what is known while tracing, else JAX's."""
    return np if isinstance(x, np.ndarray) else jnp


def row_products(a, b) -> jax.Array:
    """Products of the rows of `a` [R, D] with those of `b` [M, D], both in pieces of a head dim: float32 [R, M]."""
    total = dot(a[0], b[0], (1, 1))
    for x, y in zip(a[1:], b[1:], strict=True):
        total += dot(x, y, (1, 1))
    return total


def rows_spec(rows: int, dim: int | None = None) -> pl.BlockSpec:
    """One batch entry of an array [B, rows] or [B, rows, dim]; the batch is the grid's last dimension."""
    if dim is None:
        return pl.BlockSpec((None, rows), lambda *g: (g[-1], 0))
    return pl.BlockSpec((None, rows, dim), lambda *g: (g[-1], 0, 0))


def query_rows(tile, rows: int, group: int, heads: int, kv_head, length: int):
    """Token of each row of a query tile and its index into the [T * N] view, both int32 [rows]."""
    r = tile * rows + lax.broadcasted_iota(jnp.int32, (rows,), 0)
    if length * group % rows:
        r = jnp.minimum(r, length * group - 1)
    token = lax.div(r, jnp.int32(group))
    return token, token * heads + kv_head * group + lax.rem(r, jnp.int32(group))


def key_block(i, size: int, num_keys: int, exact: bool):
    """Index of the i-th block of keys; an `exact` one lies within the keys, others repeat the last key past the end."""
    if (exact and num_keys >= size) or num_keys % size == 0:
        return pl.ds(pl.multiple_of(i * size, size), size)
    return jnp.minimum(i * size + lax.broadcasted_iota(jnp.int32, (size,), 0), num_keys - 1)


def key_loops(step, low, high, size: int, carry):
    """Runs step(exact, i, carry) over the key blocks that a query tile sees.

    Args:
      step: `exact` is True where every row sees the whole block, so that nothing needs a mask.
      low, high: int32 [rows] ranges; rows that see nothing have low = S and high = 0.
      size: keys per block.
      carry: the loop's state.
    """
    size = jnp.int32(size)
    begin = lax.div(low.min(), size)
    end = jnp.maximum(lax.div(high.max() + size - 1, size), begin)
    exact_begin = jnp.clip(lax.div(low.max() + size - 1, size), begin, end)
    exact_end = jnp.clip(lax.div(high.min(), size), exact_begin, end)
    carry = lax.fori_loop(begin, exact_begin, lambda i, c: step(False, i, c), carry)
    carry = lax.fori_loop(exact_begin, exact_end, lambda i, c: step(True, i, c), carry)
    return lax.fori_loop(exact_end, end, lambda i, c: step(False, i, c), carry)


def tile_bounds(low, high, rows: int, keys: int):
    """Key blocks that each query tile visits: int32 [B, tiles, 4], (begin, exact_begin, exact_end, end).

    Blocks [exact_begin, exact_end) are seen whole by every row, the others need a mask. `low` and `high` are int32
    [B, a multiple of `rows`], of NumPy or JAX as the result; rows that see nothing have high = 0 and a low that is at
    least any other row's high.
    """
    xp = numpy_of(low)
    batch = low.shape[0]
    low, high = (x.reshape(batch, -1, rows) for x in (low, high))
    begin = low.min(-1) // keys
    end = xp.maximum(-(-high.max(-1) // keys), begin)
    exact_begin = xp.clip(-(-low.max(-1) // keys), begin, end)
    exact_end = xp.clip(high.min(-1) // keys, exact_begin, end)
    return xp.stack([begin, exact_begin, exact_end, end], -1).astype(np.int32)


def known_tile_ranges(known: KnownRanges, group: int, rows: int, keys: int) -> np.ndarray:
    """`query_tile_ranges` of one batch entry, [1, 4, blocks], by searching: ranges and what tiles see only ascend."""
    low, high = np.repeat(known.low, group), np.repeat(known.high, group)
    tiles = -(-len(low) // rows)
    pad, empty = (0, tiles * rows - len(low)), high <= low

    def per_tile(x, fill, reduce):
        return reduce(np.pad(x, pad, constant_values=fill).reshape(tiles, rows), axis=1)

    lowest, highest = per_tile(low, known.num_keys, np.min), per_tile(high, 0, np.max)
    low_max = per_tile(np.where(empty, 0, low), 0, np.max)
    high_min = per_tile(np.where(empty, known.num_keys, high), known.num_keys, np.min)
    begin = np.arange(0, known.num_keys, keys)
    end = np.minimum(begin + keys, known.num_keys)
    blind = int(np.count_nonzero(highest == 0))  # tiles whose rows see nothing: the first ones
    first = blind + np.searchsorted(highest[blind:], begin, side="right")
    last = blind + np.searchsorted(lowest[blind:], end, side="left")
    first, last = (np.where(first < last, x, 0) for x in (first, last))
    whole_begin = np.maximum(blind + np.searchsorted(high_min[blind:], end, side="left"), first)
    whole_end = np.minimum(blind + np.searchsorted(low_max[blind:], begin, side="right"), last)
    whole_begin, whole_end = (np.where(whole_begin < whole_end, x, last) for x in (whole_begin, whole_end))
    return np.stack([first, whole_begin, whole_end, last])[None].astype(np.int32)


def query_tile_ranges(low, high, group: int, rows: int, keys: int, num_keys: int) -> jax.Array:
    """Which query tiles each key block must visit, for any `low` and `high`, monotone or not.

    Args:
      low, high: int32 [B, T] ranges; queries that see nothing have low = S and high = 0.
      group: G.
      rows: rows per query tile.
      keys: keys per block.
      num_keys: S.

    Returns:
      int32 [B, 4, number of key blocks] tile indices (first, whole_begin, whole_end, last): every tile that sees
      anything of the block is in [first, last), and all rows of the tiles in [whole_begin, whole_end) see all of it or
      nothing of any key.
    """
    low, high = jnp.repeat(low, group, axis=1), jnp.repeat(high, group, axis=1)
    batch, num_rows = low.shape
    tiles = pl.cdiv(num_rows, rows)
    pad = ((0, 0), (0, tiles * rows - num_rows))

    def per_tile(x, fill, reduce):
        return reduce(jnp.pad(x, pad, constant_values=fill).reshape(batch, tiles, rows), axis=2)[:, :, None]

    empty = high <= low
    lowest, highest = per_tile(low, num_keys, jnp.min), per_tile(high, 0, jnp.max)
    # A row without keys has weights 0 whatever the mask says, so it does not keep a tile from being whole.
    low_max = per_tile(jnp.where(empty, 0, low), 0, jnp.max)
    high_min = per_tile(jnp.where(empty, num_keys, high), num_keys, jnp.min)
    begin = jnp.arange(0, num_keys, keys, dtype=jnp.int32)
    end = jnp.minimum(begin + keys, num_keys)
    tile = jnp.arange(tiles, dtype=jnp.int32)[:, None]
    seen = (lowest < end) & (highest > begin)
    whole = (low_max <= begin) & (high_min >= end)
    last = jnp.max(jnp.where(seen, tile + 1, 0), axis=1)
    first = jnp.minimum(jnp.min(jnp.where(seen, tile, tiles), axis=1), last)
    inside = (tile >= first[:, None]) & (tile < last[:, None])
    whole_begin = jnp.min(jnp.where(inside & whole, tile, last[:, None]), axis=1)
    after = inside & ~whole & (tile >= whole_begin[:, None])
    whole_end = jnp.min(jnp.where(after, tile, last[:, None]), axis=1)
    return jnp.stack([first, whole_begin, whole_end, last], axis=1)


def warpgroup_ranges(ranges, warpgroups: int):
    """Query tiles of each warpgroup's 64 keys and of each program, [B, 4, blocks * warpgroups] and [B, 2, blocks].

    Args:
      ranges: `query_tile_ranges` or `known_tile_ranges` of blocks of 64 keys.
      warpgroups: how many of them a program has.
    """
    xp = numpy_of(ranges)
    ranges = xp.pad(ranges, ((0, 0), (0, 0), (0, -ranges.shape[2] % warpgroups)))
    first, _, _, last = xp.moveaxis(ranges.reshape(*ranges.shape[:2], -1, warpgroups), 1, 0)
    program_last = last.max(-1)
    program_first = xp.where(first < last, first, program_last[..., None]).min(-1)
    return ranges, xp.stack([program_first, program_last], axis=1)


def splits_for(key, value, num_rows: int, *, keys: int, rows: int, ranges=None) -> int:
    """Programs per block of `keys` keys in the dk, dv kernel, for `num_rows` query rows per key/value head.

    `ranges` [1, 2, blocks] are the query tiles [first, last) that blocks visit; they count where tracing knows them.
    """
    seen = int(np.mean(ranges[:, 1] - ranges[:, 0])) if isinstance(ranges, np.ndarray) else None
    batch, num_keys, kv_heads, h_dim = key.shape
    partial_bytes = batch * num_keys * kv_heads * (h_dim + value.shape[-1]) * 4
    programs = pl.cdiv(num_keys, keys) * kv_heads * batch
    return tuning.ranged_splits(programs, pl.cdiv(num_rows, rows), partial_bytes, seen)
