"""Selection by mean keys, as in Mixture of Block Attention (MoBA, arXiv 2502.13189), with NSA's selected and window
branches and no compressed one.

The mean key of selection block j is m[j] = mean of the keys, roped, at positions j l' to j l' + l' - 1. For the query
at t and a key/value head with query heads g = 1..G, block j has MoBA's score, summed over the group,

  s[t, j] = sum over g of q[t, g] . m[j].

The list holds the n candidates of highest score. Candidates, forced blocks, ties and padding are those of
`nsa_jax.select_blocks`: the first `num_initial` and the last `num_local` blocks of [segment_start, t], the query's own
among them, are always taken. A block that is not whole, or that begins in another document, has no mean key; it is the
first or the last candidate, and so always taken. No gradient flows through selection.

Both come from the ops of NSA: with compress_block = compress_stride = select_block, mean keys are compressed keys, and
importance is one block's probability. That of a single query per group, the mean of its heads, softmax over j of
s[t, j] / (G sqrt(H)), has the order of s. Probabilities below float32's smallest number, of blocks 87 below the best,
count as equal.

`config` has these blocks in all functions; shapes are those of `nsa_jax.ops.nsa`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from nsa_jax.ops import blocks, checks, nsa, xla
from nsa_jax.ops.blocks import NSAConfig
from nsa_jax.ops.decode import check_cache, gated_sum, positions, selected_and_window


def _check_blocks(config: NSAConfig) -> None:
    checks.nsa_config(config)
    checks.require(
        config.compress_block == config.compress_stride == config.select_block,
        f"config has compress_block={config.compress_block} and compress_stride={config.compress_stride}: must be "
        f"select_block={config.select_block}, since mean keys are those of selection blocks",
    )


def _check_mean_keys(query, key_mean) -> dict[str, int]:
    """Checks the two and returns their sizes by symbol."""
    sizes = checks.query(query)
    checks.array("key_mean", key_mean, "BCKH", sizes)
    checks.floating("key_mean", key_mean, query)
    checks.heads("key_mean", sizes)
    return sizes


def _mean_query(query: jax.Array, num_kv_heads: int) -> jax.Array:
    """[B, T, N, H] -> [B, T, K, H], the mean of each group."""
    grouped = query.reshape(*query.shape[:2], num_kv_heads, -1, query.shape[-1])
    return grouped.astype(jnp.float32).mean(3).astype(query.dtype)


def mean_keys(key: Float[Array, "B S K H"], *, config: NSAConfig) -> Float[Array, "B C K H"]:
    """Mean keys of the whole selection blocks, C = S // select_block, in key's dtype; means are taken in float32."""
    _check_blocks(config)
    return nsa.mean_compress(key, config=config)


def select_by_mean_key(
    query: Float[Array, "B T N H"],
    key_mean: Float[Array, "B C K H"],
    *,
    config: NSAConfig,
    segment_start: Int[Array, "B T"] | None = None,
    query_offset=None,
    num_keys: int | None = None,
    implementation: str | None = None,
) -> Int[Array, "B T K n"]:
    """The selection blocks each query reads, chosen by the product of its group's queries and the blocks' mean keys.

    Args:
      query: [B, T, N, H], float32 or bfloat16.
      key_mean: [B, C, K, H], as `mean_keys` returns them.
      config: block geometry.
      segment_start, query_offset, num_keys, implementation: as in `nsa_jax.select_blocks`.

    Returns:
      int32 [B, T, K, n], ascending block indices, padded at the end with J = ceil(S / select_block).

    Raises:
      ValueError: an argument has the wrong shape, dtype or value.
      NotImplementedError: the named implementation cannot serve these inputs.
    """
    _check_blocks(config)
    sizes = _check_mean_keys(query, key_mean)
    query_offset = checks.position("query_offset", query_offset)
    whole = blocks.num_compressed(checks.last_position(query_offset, sizes["T"]), config)
    checks.length("key_mean", sizes["C"], query_offset, sizes["T"], whole)
    query, key_mean = jax.lax.stop_gradient((_mean_query(query, key_mean.shape[2]), key_mean))
    common: dict[str, Any] = dict(segment_start=segment_start, query_offset=query_offset, implementation=implementation)
    _, lse = nsa.compressed_attention(query, key_mean, key_mean, config=config, **common)
    return nsa.select_blocks(query, key_mean, lse, config=config, num_keys=num_keys, **common)


def mean_key_attention(
    query: Float[Array, "B T N H"],
    key_mean: Float[Array, "B C K H"],
    key_slc: Float[Array, "B S K H"],
    value_slc: Float[Array, "B S K V"],
    key_win: Float[Array, "B S K H"],
    value_win: Float[Array, "B S K V"],
    gates: Float[Array, "B T N 2"],
    *,
    config: NSAConfig,
    segment_start: Int[Array, "B T"] | None = None,
    query_offset=None,
    window_start=None,
    block_indices: Int[Array, "B T K n"] | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "B T N V"], Int[Array, "B T K n"]]:
    """The gated sum of selected attention, with blocks chosen by mean keys, and window attention.

    Args:
      query: [B, T, N, H], float32 or bfloat16. Scores are scaled by 1/sqrt(H).
      key_mean: [B, C, K, H], as `mean_keys` returns them.
      key_slc, value_slc, key_win, value_win: as in `nsa_jax.nsa_attention`.
      gates: [B, T, N, 2] weights of the branches in the order selected, window.
      config: block geometry.
      segment_start, query_offset, window_start, block_indices, implementation: as in `nsa_jax.nsa_attention`.

    Returns:
      [B, T, N, V] in query's dtype, and the block lists, int32 [B, T, K, n].

    Raises:
      ValueError: an argument has the wrong shape, dtype or value.
      NotImplementedError: the named implementation cannot serve these inputs.
    """
    _check_blocks(config)
    sizes = checks.query(query)
    checks.key_value(("key_slc", "value_slc"), key_slc, value_slc, query, sizes, "S")
    checks.key_value(("key_win", "value_win"), key_win, value_win, query, sizes, "S" if window_start is None else "W")
    checks.array("gates", gates, "BTN2", {**sizes, "2": 2})
    checks.floating("gates", gates)
    checks.segments(segment_start, sizes)
    query_offset = checks.position("query_offset", query_offset)
    window_start = checks.position("window_start", window_start, least=-(2**31) + 1)
    length = sizes["T"]
    checks.length("key_slc", sizes["S"], query_offset, length, checks.last_position(query_offset, length))
    checks.window_start(window_start, query_offset, config.window, segment_start, length, key_win.shape[1])
    common: dict[str, Any] = dict(segment_start=segment_start, query_offset=query_offset, implementation=implementation)
    if block_indices is None:
        block_indices = select_by_mean_key(query, key_mean, config=config, num_keys=key_slc.shape[1], **common)
    arrays = (query, key_slc, value_slc, key_win, value_win, block_indices)
    *outs, lists = nsa.selected_and_window(*arrays, config=config, window_start=window_start, **common)
    return gated_sum(gates, outs, query.dtype), lists


def decode_mean_key_attention(
    query: Float[Array, "B T N H"],
    key_mean: Float[Array, "B C K H"],
    key_slc: Float[Array, "B S K H"],
    value_slc: Float[Array, "B S K V"],
    key_win: Float[Array, "B W K H"],
    value_win: Float[Array, "B W K V"],
    gates: Float[Array, "B T N 2"],
    lengths: Int[Array, B],  # noqa: F821
    *,
    config: NSAConfig,
    segment_start: Int[Array, "B T"] | None = None,
) -> tuple[Float[Array, "B T N V"], Int[Array, "B T K n"]]:
    """`mean_key_attention` of the newest T tokens of each row to a KV cache, by plain operations.

    Args:
      key_mean: [B, C, K, H] mean keys, of which lengths // select_block are in use; C = S / select_block.
      query, key_slc, value_slc, key_win, value_win, lengths, config, segment_start: as in `nsa_jax.decode_attention`.
      gates: [B, T, N, 2] weights of the branches in the order selected, window.

    Returns:
      [B, T, N, V] in query's dtype, and the block lists, int32 [B, T, K, n].

    Raises:
      ValueError: an argument has the wrong shape, dtype or value.
    """
    _check_blocks(config)
    sizes = _check_mean_keys(query, key_mean)
    arrays = (key_slc, value_slc, key_win, value_win, gates, lengths, segment_start)
    check_cache(sizes, query, *arrays, config, compressed="key_mean", num_gates=2)
    lengths = checks.at_most(lengths, key_slc.shape[1])
    t, start = positions(lengths, query.shape[1], checks.clip_segments(segment_start))
    where: dict[str, Any] = dict(config=config, segment_start=start, query_offset=t[:, :1])
    mean = _mean_query(query, key_mean.shape[2])
    _, lse = xla.compressed_attention(mean, key_mean, key_mean, **where)
    lists = xla.select_blocks(mean, key_mean, lse, num_keys=key_slc.shape[1], **where)
    outs = selected_and_window(query, *arrays[:4], lists, lengths, t, start, config)
    return gated_sum(gates, outs, query.dtype), lists
