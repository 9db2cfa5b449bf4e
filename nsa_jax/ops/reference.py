"""The truth: NSA in plain jnp, float32, with dense masks. Quadratic in T; tests compare everything else with it."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from nsa_jax.ops import blocks
from nsa_jax.ops.blocks import NSAConfig

_HIGHEST = jax.lax.Precision.HIGHEST


def _scores(query: jax.Array, key: jax.Array) -> jax.Array:
    """Scaled dot products in float32: query [B, T, N, H], key [B, S, K, H] -> [B, T, K, G, S]."""
    batch, length, num_heads, head_dim = query.shape
    num_kv = key.shape[2]
    grouped = query.astype(jnp.float32).reshape(batch, length, num_kv, num_heads // num_kv, head_dim)
    scores = jnp.einsum("btkgh,bskh->btkgs", grouped, key.astype(jnp.float32), precision=_HIGHEST)
    return scores * head_dim**-0.5


def _masked_softmax(scores: jax.Array, mask: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Softmax over the last axis where `mask`; rows with nothing give exactly 0, lse -inf and zero gradients."""
    any_visible = mask.any(-1, keepdims=True)
    safe = jnp.where(mask, scores, -jnp.inf)
    peak = jax.lax.stop_gradient(jnp.where(any_visible, safe.max(-1, keepdims=True, initial=-jnp.inf), 0.0))
    weights = jnp.where(mask, jnp.exp(jnp.where(mask, scores, peak) - peak), 0.0)
    total = weights.sum(-1, keepdims=True)
    probs = weights / jnp.where(any_visible, total, 1.0)
    lse = jnp.where(any_visible, peak + jnp.log(jnp.where(any_visible, total, 1.0)), -jnp.inf)
    return probs, lse[..., 0]


def _attend(query: jax.Array, key: jax.Array, value: jax.Array, mask: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Softmax attention under mask [B, T, K or 1, S]: ([B, T, N, V] in query's dtype, lse [B, T, N] float32)."""
    batch, length, num_heads, _ = query.shape
    probs, lse = _masked_softmax(_scores(query, key), mask[:, :, :, None, :])
    out = jnp.einsum("btkgs,bskv->btkgv", probs, value.astype(jnp.float32), precision=_HIGHEST)
    out = out.reshape(batch, length, num_heads, value.shape[-1]).astype(query.dtype)
    return out, lse.reshape(batch, length, num_heads)


def _compressed_mask(query, num_cmp: int, config: NSAConfig, segment_start, query_offset) -> jax.Array:
    """[B, T, 1, C]: which compressed blocks each query sees."""
    t, start = blocks.query_positions(query, segment_start, query_offset)
    low, high = blocks.compressed_range(t, start, config)
    index = jnp.arange(num_cmp, dtype=jnp.int32)
    return ((index >= low[..., None]) & (index < high[..., None]))[:, :, None, :]


def compressed_attention(query, key_cmp, value_cmp, *, config: NSAConfig, segment_start=None, query_offset=0):
    """See `nsa_jax.compressed_attention`."""
    mask = _compressed_mask(query, key_cmp.shape[1], config, segment_start, query_offset)
    return _attend(query, key_cmp, value_cmp, mask)


def importance(query, key_cmp, lse, *, config: NSAConfig, num_blocks: int, segment_start=None, query_offset=0):
    """Selection-block importance p_slc summed over each group: float32 [B, T, K, J] (paper eq. 8 to 10)."""
    batch, length, num_heads, _ = query.shape
    num_kv = key_cmp.shape[2]
    mask = _compressed_mask(query, key_cmp.shape[1], config, segment_start, query_offset)[:, :, :, None, :]
    lse = lse.astype(jnp.float32).reshape(batch, length, num_kv, num_heads // num_kv, 1)
    probs = jnp.where(mask, jnp.exp(jnp.where(mask, _scores(query, key_cmp) - lse, -jnp.inf)), 0.0)
    return blocks.fold_importance(probs.sum(3), num_blocks, config)


def select_blocks(query, key_cmp, lse, *, config: NSAConfig, num_keys: int, segment_start=None, query_offset=0):
    """See `nsa_jax.select_blocks`; `num_keys` is S."""
    num_blocks = blocks.num_selection_blocks(num_keys, config.select_block)
    scores = importance(
        query,
        key_cmp,
        lse,
        config=config,
        num_blocks=num_blocks,
        segment_start=segment_start,
        query_offset=query_offset,
    )
    t, start = blocks.query_positions(query, segment_start, query_offset)
    return blocks.select_from_importance(scores, t[:, :, None], start[:, :, None], config)


def selected_attention(query, key, value, block_indices, *, select_block: int, segment_start=None, query_offset=0):
    """See `nsa_jax.selected_attention`."""
    t, start = blocks.query_positions(query, segment_start, query_offset)
    position = jnp.arange(key.shape[1], dtype=jnp.int32)
    num_blocks = blocks.num_selection_blocks(key.shape[1], select_block)
    listed = blocks.listed_blocks(block_indices, num_blocks)  # [B, T, K, J]
    mask = jnp.repeat(listed, select_block, axis=-1)[..., : key.shape[1]]
    visible = (position >= start[..., None]) & (position <= t[..., None])  # [B, T, S]
    return _attend(query, key, value, mask & visible[:, :, None, :])[0]


def window_attention(query, key, value, *, window: int, segment_start=None, query_offset=0):
    """See `nsa_jax.window_attention`."""
    t, start = blocks.query_positions(query, segment_start, query_offset)
    position = jnp.arange(key.shape[1], dtype=jnp.int32)
    low = jnp.maximum(start, t - window + 1)
    mask = (position >= low[..., None]) & (position <= t[..., None])
    return _attend(query, key, value, mask[:, :, None, :])[0]
