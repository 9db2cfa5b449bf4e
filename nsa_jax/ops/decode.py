"""Decoding: attention of one or a few new tokens per row to a KV cache, reading only what NSA reads.

The cache holds fixed-size arrays of which the first `lengths[b]` tokens of row b are in use, so one compiled step
serves every context length up to the capacity:
  compressed keys and values: block i at index i;
  selected-branch keys and values: position p at index p;
  window-branch keys and values: position p at index p % W, a ring buffer (or a linear one, if W is the capacity).
"""

from __future__ import annotations

import functools
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from nsa_jax.ops import blocks, checks, reference, xla
from nsa_jax.ops.blocks import NSAConfig
from nsa_jax.ops.implementations import choose
from nsa_jax.ops.plan import Shape


class DecodeInfo(NamedTuple):
    """What a decode step read.

    Attributes:
      block_indices: int32 [B, T, K, n], the lists that the selected branch read; padded with J = capacity / l'.
      keys_read: int32 [B, T, K], key positions read: visible compressed blocks, tokens of the listed blocks that the
        query may use, and tokens of the window.
    """

    block_indices: jax.Array
    keys_read: jax.Array


def positions(lengths: jax.Array, num_queries: int, segment_start: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Positions and segment starts of the last `num_queries` tokens of each row, int32 [B, T] each."""
    t = lengths.astype(jnp.int32)[:, None] - num_queries + jnp.arange(num_queries, dtype=jnp.int32)
    return t, jnp.zeros_like(t) if segment_start is None else segment_start.astype(jnp.int32)


def slot_positions(lengths: jax.Array, num_slots: int) -> jax.Array:
    """The position each slot of a ring buffer holds, int32 [B, W]: the latest p < length with p % W == slot.

    Negative where the slot has not been written yet.
    """
    last = lengths.astype(jnp.int32)[:, None] - 1
    return last - (last - jnp.arange(num_slots, dtype=jnp.int32)) % num_slots


def count_keys_read(block_indices: jax.Array, t: jax.Array, start: jax.Array, config: NSAConfig) -> jax.Array:
    """Key positions read, counted from the lists.

    Args:
      block_indices: int32 [B, T, K, n].
      t: int32 [B, T], query positions.
      start: int32 [B, T], segment starts.
      config: block geometry.

    Returns:
      int32 [B, T, K].
    """
    low, high = blocks.compressed_range(t, start, config)
    window = jnp.minimum(config.window, jnp.maximum(t + 1 - start, 0))
    listed = blocks.counted_keys(block_indices, t[..., None], start[..., None], config.select_block)
    return listed + (jnp.maximum(high - low, 0) + window)[..., None]


def gated_sum(gates, branches, dtype):
    """Sum of the branches [B, T, N, V], each times its gate of gates [B, T, N, branches], in float32."""
    gate = gates.astype(jnp.float32)
    weighted = [gate[..., i, None] * branch.astype(jnp.float32) for i, branch in enumerate(branches)]
    return functools.reduce(operator.add, weighted).astype(dtype)


def _reference(query, key_cmp, value_cmp, key_slc, value_slc, key_win, value_win, gates, lengths, config, start):
    t, start = positions(lengths, query.shape[1], start)
    where = dict(segment_start=start, query_offset=t[:, :1])
    out_cmp, lse = reference.compressed_attention(query, key_cmp, value_cmp, config=config, **where)
    lists = reference.select_blocks(query, key_cmp, lse, config=config, num_keys=key_slc.shape[1], **where)
    out_slc = reference.selected_attention(query, key_slc, value_slc, lists, select_block=config.select_block, **where)
    held = slot_positions(lengths, key_win.shape[1])[:, None]  # [B, 1, W]
    low = jnp.maximum(jnp.maximum(start, t - config.window + 1), 0)[..., None]
    mask = (held >= low) & (held <= t[..., None])
    out_win, _ = reference._attend(query, key_win, value_win, mask[:, :, None, :])
    return gated_sum(gates, (out_cmp, out_slc, out_win), query.dtype), lists


def masked_attention(query, key, value, mask, keys: str):
    """Softmax attention of grouped queries [B, T, K, G, H] to keys laid out as einsum subscripts `keys` (+ h or v)."""
    scores = xla._dot(f"bqkgh,{keys}h->bqkgl", query, key) * query.shape[-1] ** -0.5
    scores = jnp.where(mask, scores, -jnp.inf)
    peak = scores.max(-1, keepdims=True)
    weights = jnp.exp(scores - jnp.where(peak == -jnp.inf, 0.0, peak))
    total = weights.sum(-1)[..., None]
    out = xla._dot(f"bqkgl,{keys}v->bqkgv", weights.astype(value.dtype), value)
    return xla._ungroup((out / jnp.where(total > 0, total, 1.0)).astype(query.dtype))


def _xla(query, key_cmp, value_cmp, key_slc, value_slc, key_win, value_win, gates, lengths, config, start):
    t, start = positions(lengths, query.shape[1], start)
    where = dict(segment_start=start, query_offset=t[:, :1])
    out_cmp, lse = xla.compressed_attention(query, key_cmp, value_cmp, config=config, **where)
    lists = xla.select_blocks(query, key_cmp, lse, config=config, num_keys=key_slc.shape[1], **where)
    arrays = (query, key_slc, value_slc, key_win, value_win, lists)
    outs = (out_cmp, *selected_and_window(*arrays, lengths, t, start, config))
    return gated_sum(gates, outs, query.dtype), lists


def selected_and_window(query, key_slc, value_slc, key_win, value_win, lists, lengths, t, start, config):
    """Outputs [B, T, N, V] of the selected branch, which reads `lists`, and of the window, by plain operations.

    The arrays are `decode_attention`'s; t and start are those of `positions`.
    """
    batch, num_kv, block = query.shape[0], key_slc.shape[2], config.select_block
    grouped = xla._group(query, num_kv)

    rows = jnp.arange(batch, dtype=jnp.int32)[:, None, None, None]
    heads = jnp.arange(num_kv, dtype=jnp.int32)[:, None]

    def listed(cache):  # the cache in place, cut into blocks: [B, T, K, n * l', H]
        cut = cache.reshape(batch, -1, block, num_kv, cache.shape[-1])
        picked = cut.at[rows, lists, :, heads].get(mode="clip")  # padding is masked below
        return picked.reshape(*picked.shape[:3], -1, picked.shape[-1])

    position = (lists[..., None] * block + jnp.arange(block, dtype=jnp.int32)).reshape(*lists.shape[:3], -1)
    low = jnp.maximum(start, 0)[..., None, None]
    mask = (position >= low) & (position <= t[..., None, None])
    out_slc = masked_attention(grouped, listed(key_slc), listed(value_slc), mask[:, :, :, None], "bqkl")

    low = jnp.maximum(jnp.maximum(start, t - config.window + 1), 0)[..., None]  # [B, T, 1]
    num_slots = key_win.shape[1]
    if num_slots < 2 * config.window:
        held, keys = slot_positions(lengths, num_slots)[:, None], "blk"
    else:
        held, keys = t[..., None] - jnp.arange(config.window, dtype=jnp.int32), "bqlk"  # [B, T, w]
        key_win, value_win = (x[rows[..., 0], held % num_slots] for x in (key_win, value_win))
    mask = (held >= low) & (held <= t[..., None])
    return out_slc, masked_attention(grouped, key_win, value_win, mask[:, :, None, None], keys)


def check_cache(
    sizes, query, key_slc, value_slc, key_win, value_win, gates, lengths, segment_start, config, compressed="key_cmp",
    num_gates=3,
) -> None:  # fmt: skip
    """Checks what `decode_attention` reads beside the query and the compressed keys, of which `sizes` has C already."""
    checks.key_value(("key_slc", "value_slc"), key_slc, value_slc, query, sizes, "S")
    checks.key_value(("key_win", "value_win"), key_win, value_win, query, sizes, "W")
    checks.array("gates", gates, f"BTN{num_gates}", {**sizes, str(num_gates): num_gates})
    checks.floating("gates", gates)
    checks.array("lengths", lengths, "B", sizes)
    checks.require(jnp.issubdtype(lengths.dtype, jnp.integer), f"lengths has dtype {lengths.dtype}: must be an integer")
    checks.segments(segment_start, sizes)
    capacity, num_cmp, slots = sizes["S"], sizes["C"], sizes["W"]
    checks.require(
        capacity % config.select_block == 0,
        f"key_slc has length {capacity}: must be a multiple of select_block={config.select_block}",
    )
    need = blocks.num_compressed(capacity, config)
    message = f"{compressed} has length {num_cmp}: must be at least {need} for a capacity of {capacity}"
    checks.require(num_cmp >= need, message)
    need = min(config.window + sizes["T"] - 1, capacity)
    message = f"key_win has length {slots}: must be at least {need} for {sizes['T']} queries per row"
    checks.require(slots >= need, message)


def decode_attention(
    query: Float[Array, "B T N H"],
    key_cmp: Float[Array, "B C K H"],
    value_cmp: Float[Array, "B C K V"],
    key_slc: Float[Array, "B S K H"],
    value_slc: Float[Array, "B S K V"],
    key_win: Float[Array, "B W K H"],
    value_win: Float[Array, "B W K V"],
    gates: Float[Array, "B T N 3"],
    lengths: Int[Array, B],
    *,
    config: NSAConfig,
    segment_start: Int[Array, "B T"] | None = None,
    implementation: str | None = None,
    return_info: bool = False,
):
    """Native Sparse Attention of the newest T tokens of each row to a KV cache that already holds them.

    The result is that of `nsa_attention` at positions lengths[b] - T to lengths[b] - 1 of row b. T is meant to be small
    (1 when generating); longer prompts are cheaper through `nsa_attention` with a query_offset.

    Args:
      query: [B, T, N, H], float32 or bfloat16. Scores are scaled by 1/sqrt(H).
      key_cmp: [B, C, K, H] compressed keys, of which (lengths - l) // d + 1 are in use; C is at least what the
        capacity S gives.
      value_cmp: [B, C, K, V] compressed values.
      key_slc: [B, S, K, H] keys of the selected branch, position p at index p; S is a multiple of `select_block`.
      value_slc: [B, S, K, V] values of the selected branch.
      key_win: [B, W, K, H] keys of the window branch, position p at index p % W; W is at least window + T - 1, or S.
      value_win: [B, W, K, V] values of the window branch.
      gates: [B, T, N, 3] weights of the branches in the order compressed, selected, window.
      lengths: int [B], tokens of each row in the cache, the T queries included. Rows may differ. A query before
        position 0 sees nothing and gets 0. A length above S counts as S: a row of a batch that has outgrown the cache
        gets numbers without meaning, and nothing outside the cache is read.
      config: block geometry.
      segment_start: int [B, T], first position of each query's document; None means 0 everywhere.
      implementation: "reference", "xla", "pallas" or None for the best that supports the inputs on this device.
      return_info: also return the block lists and the number of key positions read.

    Returns:
      [B, T, N, V] in query's dtype; with `return_info`, a pair with `DecodeInfo`.

    Raises:
      ValueError: an argument has the wrong shape, dtype or value.
      NotImplementedError: the named implementation cannot serve these inputs.
    """
    checks.nsa_config(config)
    sizes = checks.query(query)
    checks.key_value(("key_cmp", "value_cmp"), key_cmp, value_cmp, query, sizes, "C")
    check_cache(sizes, query, key_slc, value_slc, key_win, value_win, gates, lengths, segment_start, config)
    capacity = sizes["S"]
    serving = choose("decode_attention", implementation, Shape.of(query, key_slc, value_slc))
    arrays = map(jnp.asarray, (query, key_cmp, value_cmp, key_slc, value_slc, key_win, value_win, gates))
    bounded = checks.at_most(lengths, capacity)
    # The kernels bound int32 lengths themselves, which spares the step one more launch.
    kernel_lengths, lengths = lengths if lengths.dtype == jnp.int32 else bounded, bounded
    serve: Any = {reference: _reference, xla: _xla}.get(serving)
    if serve is None:
        serve, lengths = serving.decode_attention, kernel_lengths
    segment_start = checks.clip_segments(segment_start)
    out, lists = serve(*arrays, lengths, config, segment_start)
    if not return_info:
        return out
    t, start = positions(bounded, sizes["T"], segment_start)
    return out, DecodeInfo(lists, count_keys_read(lists, t, start, config))
