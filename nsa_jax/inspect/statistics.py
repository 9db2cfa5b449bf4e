"""Statistics of attention and selection from plain arrays, for any model that calls the operator.

B batch, T query tokens, S key tokens, N query heads, K key/value heads, C compressed blocks, J selection blocks,
n blocks per list. "..." stands for any leading axes, such as layers.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from nsa_jax.config import NSAConfig
from nsa_jax.ops import blocks
from nsa_jax.ops.block_mass import probabilities

_HIGHEST = jax.lax.Precision.HIGHEST
# Of a selection block to a query: of the future or another document, a candidate, always listed, or listed because the
# list has room for every candidate.
KINDS = ("unreadable", "candidate", "forced", "free")
UNREADABLE, CANDIDATE, FORCED, FREE = range(len(KINDS))
# Elements of the largest array of probabilities, float32.
_CHUNK_ELEMENTS = 2**24


def branch_probabilities(
    query: jax.Array,
    key_cmp: jax.Array,
    key_slc: jax.Array,
    key_win: jax.Array,
    lists: jax.Array,
    *,
    config: NSAConfig,
    segment_start: jax.Array | None = None,
    positions: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Attention probabilities of the three branches, recomputed with dense masks.

    Args:
      query: [B, P, N, H], of the queries at `positions`.
      key_cmp: [B, C, K, H].
      key_slc: [B, S, K, H].
      key_win: [B, S, K, H].
      lists: int32 [B, P, K, n], the queries' block lists.
      config: the operator's.
      segment_start: int [B, P] or None.
      positions: int [B, P]; None means that the queries are all of the row's tokens.

    Returns:
      float32 probabilities over compressed blocks [B, P, N, C], and over tokens [B, P, N, S] in the selected and the
      window branch. Each row sums to 1, or to 0 where the branch sees nothing.
    """
    t, start = blocks.query_positions(query, segment_start, 0)
    t = t if positions is None else positions
    low, high = blocks.compressed_range(t, start, config)
    index = jnp.arange(key_cmp.shape[1], dtype=jnp.int32)
    sees_block = (index >= low[..., None]) & (index < high[..., None])
    token = jnp.arange(key_slc.shape[1], dtype=jnp.int32)
    usable = (token >= start[..., None]) & (token <= t[..., None])  # [B, P, S]
    num_blocks = blocks.num_selection_blocks(key_slc.shape[1], config.select_block)
    listed = jnp.repeat(blocks.listed_blocks(lists, num_blocks), config.select_block, axis=-1)[..., : key_slc.shape[1]]
    near = usable & (token > t[..., None] - config.window)
    return (
        probabilities(query, key_cmp, sees_block[:, :, None]),
        probabilities(query, key_slc, listed & usable[:, :, None]),
        probabilities(query, key_win, near[:, :, None]),
    )


def spread_over_tokens(compressed, num_keys: int, config: NSAConfig):
    """Weights of compressed blocks, spread evenly over their tokens: [..., C] -> [..., S].

    This is exact for the mean compressor, whose keys and values are means of l tokens. For a learned compressor it says
    which tokens a block was made of, but not which of them mattered.
    """
    xp: Any = jnp if isinstance(compressed, jax.Array) else np
    stride, overlap = config.compress_stride, config.compress_block // config.compress_stride
    share, leading = compressed / config.compress_block, [(0, 0)] * (compressed.ndim - 1)
    # Run r of d tokens is in blocks r - l/d + 1 to r. A matrix [C, S] would be quadratic in the row.
    runs = sum(xp.pad(share, [*leading, (shift, overlap - 1 - shift)]) for shift in range(overlap))
    tokens = xp.repeat(runs, stride, axis=-1)[..., :num_keys]
    return xp.pad(tokens, [*leading, (0, num_keys - tokens.shape[-1])])


def attention_statistics(
    query: jax.Array,
    key_cmp: jax.Array,
    key_slc: jax.Array,
    key_win: jax.Array,
    lists: jax.Array,
    *,
    config: NSAConfig,
    segment_start: jax.Array | None = None,
) -> dict[str, jax.Array]:
    """How each branch spreads its attention.

    Args:
      query: [B, T, N, H]; the other arguments are `branch_probabilities`'.

    Returns:
      float32 [B, T, N, 3] each, in the order compressed, selected, window; 0 where the branch sees nothing:
      entropy: of the branch's probabilities, nats.
      largest: the highest of them.
      distance: mean distance in tokens from the query to what it reads, for a compressed block to its middle.
      beyond_window: share that is read from keys which the window does not reach.
    """
    token = jnp.arange(key_slc.shape[1], dtype=jnp.float32)
    middle = jnp.arange(key_cmp.shape[1]) * config.compress_stride + (config.compress_block - 1) / 2

    def summarise(probs, t):
        found: dict[str, list[jax.Array]] = {"entropy": [], "largest": [], "distance": [], "beyond_window": []}
        for p, where in zip(probs, (middle, token, token), strict=True):
            away = t[:, :, None, None] - where
            found["entropy"].append(-(p * jnp.log(jnp.where(p > 0, p, 1.0))).sum(-1))
            found["largest"].append(p.max(-1, initial=0.0))
            found["distance"].append((p * away).sum(-1))
            found["beyond_window"].append((p * (away >= config.window)).sum(-1))
        return {name: jnp.stack(parts, -1) for name, parts in found.items()}

    keys = (key_cmp, key_slc, key_win)
    return _map_queries(summarise, query, keys, lists, config, segment_start)


def block_weights(
    query: jax.Array,
    key_cmp: jax.Array,
    key_slc: jax.Array,
    key_win: jax.Array,
    lists: jax.Array,
    *,
    config: NSAConfig,
    segment_start: jax.Array | None = None,
) -> jax.Array:
    """Attention probabilities of each branch, summed over the tokens of every selection block.

    Args:
      query: [B, T, N, H]; the other arguments are `branch_probabilities`'.

    Returns:
      float32 [B, T, N, 3, J], in the order compressed, selected, window. What the compressed branch reads is spread
      evenly over the tokens of each compressed block.
    """
    num_keys = key_slc.shape[1]
    num_blocks = blocks.num_selection_blocks(num_keys, config.select_block)
    of_token = (np.arange(num_keys)[:, None] // config.select_block == np.arange(num_blocks)).astype(
        np.float32
    )  # [S, J]
    of_compressed = (
        spread_over_tokens(np.eye(key_cmp.shape[1], dtype=np.float32), num_keys, config) @ of_token
    )  # [C, J]

    def gather(probs, _):
        sums = (of_compressed, of_token, of_token)
        parts = [jnp.einsum("bpns,sj->bpnj", p, x, precision=_HIGHEST) for p, x in zip(probs, sums, strict=True)]
        return jnp.stack(parts, -2)

    keys = (key_cmp, key_slc, key_win)
    return _map_queries(gather, query, keys, lists, config, segment_start)


def _map_queries(function: Any, query, keys, lists, config: NSAConfig, segment_start: jax.Array | None) -> Any:
    """`function(probabilities, t)` over chunks of queries, so that memory is linear in T.

    Args:
      function: takes what `branch_probabilities` returns and positions [B, P]; returns arrays [B, P, ...].
      query: [B, T, N, H].
      keys: key_cmp, key_slc, key_win.
      lists: int32 [B, T, K, n].
      config: the operator's.
      segment_start: int [B, T] or None.

    Returns:
      The arrays of all queries, [B, T, ...].
    """

    key_cmp, key_slc, key_win = keys

    def chunk(query, lists, t, start):
        probs = branch_probabilities(
            query, key_cmp, key_slc, key_win, lists, config=config, segment_start=start, positions=t
        )
        return function(probs, t)

    t, start = blocks.query_positions(query, segment_start, 0)
    batch, _, num_heads, _ = query.shape
    return in_chunks(chunk, (query, lists, t, start), batch * num_heads * key_slc.shape[1])


def in_chunks(function, arrays: tuple[jax.Array, ...], elements: int):
    """function(*arrays) for arrays [B, T, ...], in chunks of queries of which each takes so many array elements."""
    batch, length = arrays[0].shape[:2]
    size = max(min(_CHUNK_ELEMENTS // elements, length), 1)
    while length % size:
        size -= 1

    def cut(x):
        return jnp.moveaxis(x.reshape(batch, length // size, size, *x.shape[2:]), 1, 0)

    found = jax.lax.map(lambda parts: function(*parts), tuple(map(cut, arrays)))  # [chunks, B, size, ...]
    return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1).reshape(batch, length, *x.shape[3:]), found)


def chosen_by_score(lists, config: NSAConfig, segment_start=None, positions=None):
    """Which listed blocks were selected by importance, that is, not forced as first or last blocks of the document.

    Args:
      lists: int32 [..., B, T, K, n].
      config: the operator's.
      segment_start: int [B, T] or None.
      positions: int [B, T] or [T] of the queries; None means 0..T-1.

    Returns:
      bool [..., B, T, K, n]; False for padding.
    """
    t = np.arange(lists.shape[-3], dtype=np.int32) if positions is None else positions
    t = t[..., None, None]
    start = 0 * t if segment_start is None else segment_start[..., None, None]
    first, last = blocks.candidate_range(t, start, config.select_block)
    candidate = (lists >= first) & (lists <= last)
    return candidate & ~blocks.forced_blocks(lists, first, last, config)


def block_kinds(config: NSAConfig, num_blocks: int, positions, segment_start=0) -> np.ndarray:
    """What each selection block is to a query, whatever the model: an index into `KINDS`.

    Args:
      config: the operator's.
      num_blocks: J.
      positions: int [...] of the queries.
      segment_start: int [...] or 0, of the queries' documents.

    Returns:
      uint8 [..., J]. Of the candidates, a model's scores choose those that it lists.
    """
    t = np.asarray(positions)[..., None]
    first, last = blocks.candidate_range(t, 0 * t + np.asarray(segment_start)[..., None], config.select_block)
    j = np.arange(num_blocks)
    forced = np.where(blocks.forced_blocks(j, first, last, config), FORCED, CANDIDATE)
    readable = np.where(last - first + 1 <= config.num_selected, FREE, forced)
    return np.where((j >= first) & (j <= last), readable, UNREADABLE).astype(np.uint8)


def block_distances(lists, config: NSAConfig, positions=None):
    """Distance from each query's own block to the blocks it lists, in tokens: [..., T, K, n], -1 for padding.

    Args:
      lists: int32 [..., T, K, n].
      config: the operator's.
      positions: int [T] or [..., T] of the queries; None means 0..T-1.
    """
    t = np.arange(lists.shape[-3], dtype=np.int32) if positions is None else positions
    blocks_back = t[..., None, None] // config.select_block - lists
    return np.where(blocks_back >= 0, blocks_back * config.select_block, -1)


def neighbour_overlap(lists, num_blocks: int, lag: int = 1) -> np.ndarray:
    """Share of each query's blocks that the query `lag` tokens earlier also lists.

    Args:
      lists: int32 [..., T, K, n].
      num_blocks: J.
      lag: tokens.

    Returns:
      float [..., T - lag, K]. A kernel that serves neighbouring queries together saves this share of the loads.
    """
    lists = np.asarray(lists)
    same = blocks.also_listed(lists[..., lag:, :, :], lists[..., : lists.shape[-3] - lag, :, :], num_blocks)
    return same.sum(-1) / np.maximum((lists[..., lag:, :, :] < num_blocks).sum(-1), 1)


def choosing_queries(config: NSAConfig, segment_start) -> np.ndarray:
    """Queries with more candidate blocks than a list has room for: bool [B, T] for segment starts int [B, T].

    Other queries list everything that they may read, so their lists say nothing about the model.
    """
    start = np.asarray(segment_start)
    first, last = blocks.candidate_range(np.arange(start.shape[1]), start, config.select_block)
    return last - first + 1 > config.num_selected


def layer_overlap(lists, config: NSAConfig, segment_start=None) -> tuple[np.ndarray, float]:
    """Overlap of the lists of layers and head groups, without the blocks that all of them must list.

    Args:
      lists: int32 [L, B, T, K, n].
      config: the operator's.
      segment_start: int [B, T] or None.

    Returns:
      float [L * K, L * K]: of the blocks that row (layer, group) selected by score, the share that the column also
      selected, over the queries that have a choice; the diagonal is 1. The second value is what random selection would
      give. Both are NaN if no query has a choice.
    """
    lists = np.asarray(lists)
    num_layers, batch, length, num_kv = lists.shape[:4]
    num_blocks = blocks.num_selection_blocks(length, config.select_block)
    start = np.zeros((batch, length), np.int32) if segment_start is None else np.asarray(segment_start)
    choosing = choosing_queries(config, start)
    chosen = chosen_by_score(lists, config, start)
    sets = blocks.listed_blocks(np.where(chosen, lists, num_blocks), num_blocks)[:, choosing]  # [L, Q, K, J]
    sets = np.moveaxis(sets, 2, 1).reshape(num_layers * num_kv, -1).astype(np.float32)
    size = sets.sum(-1, keepdims=True)
    first, last = blocks.candidate_range(np.arange(length), start, config.select_block)
    forced = config.num_initial + config.num_local
    candidates = (last - first + 1)[choosing] - forced
    if not candidates.size:
        return np.full((len(sets), len(sets)), np.nan), float("nan")
    shared = (sets @ sets.T) / np.where(size > 0, size, np.nan)
    return shared, float(((config.num_selected - forced) / candidates).mean())


def mean_by_kind(values, kinds) -> dict[str, np.ndarray]:
    """Means of values [L, B, T, ...] over the tokens of each kind (array of str [B, T]): {kind: float [L, ...]}."""
    values, kinds = np.asarray(values), np.asarray(kinds)
    return {str(kind): values[:, kinds == kind].mean(1) for kind in np.unique(kinds)}
