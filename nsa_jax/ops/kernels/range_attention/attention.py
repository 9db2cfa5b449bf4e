"""Compressed and window attention on GPUs: every query sees one contiguous range of keys (paper eq. 5, 3.3.1, 3.3.3).

Both branches are the same flash attention: the query at t sees the keys [low(t), high(t)). `low` and `high` carry all
there is to know about causality, blocks, packing and `query_offset`. A query tile's loop runs over the keys that any
of its queries sees and is free of masks where all of them see a whole key block.

The forward here is a Triton kernel; on Hopper Mosaic GPU kernels replace it and the backward's (`sm90_forward`), and
elsewhere cuDNN serves the forward of unpacked windows (`window_cudnn`). The backward is always ours
(`triton_backward`): cuDNN's adds dq atomically, so two runs differ.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from nsa_jax.ops import blocks
from nsa_jax.ops import tiles as tuning
from nsa_jax.ops.blocks import NSAConfig
from nsa_jax.ops.kernels.range_attention import sm90_forward, triton_backward, window_cudnn
from nsa_jax.ops.kernels.range_attention.tiles import (
    key_block,
    key_loops,
    query_rows,
    row_products,
    rows_spec,
)
from nsa_jax.ops.kernels.softmax import LN2, LOG2E, accumulate, empty_state
from nsa_jax.ops.kernels.triton import (
    first_derivative,
    load_rows,
    pieces,
    row_delta,
    store_rows,
    triton_call,
)
from nsa_jax.ops.target import current_target


def compressed_attention(query, key_cmp, value_cmp, *, config: NSAConfig, segment_start=None, query_offset=0):
    """See `nsa_jax.compressed_attention`."""
    low, high = compressed_ranges(query, segment_start, query_offset, config)
    return ranged_attention(query, key_cmp, value_cmp, low, high)


def window_attention(query, key, value, *, window: int, segment_start=None, query_offset=0):
    """See `nsa_jax.window_attention`."""
    low, high = window_ranges(query, segment_start, query_offset, window)
    cudnn = segment_start is None and window_cudnn.serves_window(query, key, value, query_offset)
    return ranged_attention(query, key, value, low, high, span=window, cudnn=cudnn)[0]


def compressed_ranges(query, segment_start, query_offset, config: NSAConfig) -> tuple[jax.Array, jax.Array]:
    """(low, high), int32 [B, T]: the compressed blocks that each query sees."""
    t, start = _positions(query, segment_start, query_offset)
    return blocks.compressed_range(t, start, config)


def window_ranges(query, segment_start, query_offset, window: int) -> tuple[jax.Array, jax.Array]:
    """(low, high), int32 [B, T]: the tokens of each query's window."""
    t, start = _positions(query, segment_start, query_offset)
    return jnp.maximum(start, t - window + 1), t + 1


def ranged_attention(
    query, key, value, low, high, *, span: int | None = None, cudnn: bool = False
) -> tuple[jax.Array, jax.Array]:
    """Attention of every query over its own contiguous range of keys.

    Args:
      query: [B, T, N, H], float32 or bfloat16. Scores are scaled by 1/sqrt(H).
      key: [B, S, K, H].
      value: [B, S, K, V].
      low: int32 [B, T]; the query at t sees keys low[t] <= p < high[t] with 0 <= p < S, none where high <= low.
      high: int32 [B, T].
      span: the most keys a query sees, where that is known: tiles are chosen for it.
      cudnn: the ranges are a causal window of `span` keys and cuDNN can serve the forward.

    Returns:
      The output [B, T, N, V], exactly 0 for a query that sees nothing, and the natural-log log-sum-exp of the scaled
      scores, float32 [B, T, N], -inf there. The log-sum-exp has no gradient.
    """
    batch, length, heads, _ = query.shape
    num_keys, v_dim = key.shape[1], value.shape[-1]
    if num_keys == 0:
        out = jnp.zeros((batch, length, heads, v_dim), query.dtype)
        return out, jnp.full((batch, length, heads), -jnp.inf, jnp.float32)
    return _ranged(query, key, value, *clip_ranges(low, high, num_keys), span, cudnn)


def clip_ranges(low, high, num_keys: int) -> tuple[jax.Array, jax.Array]:
    """Ranges within the keys, and (S, 0) for queries that see nothing: what the kernels expect."""
    low, high = jnp.clip(low, 0, num_keys), jnp.clip(high, 0, num_keys)
    empty = high <= low
    return jnp.where(empty, num_keys, low), jnp.where(empty, 0, high)


def _positions(query, segment_start, query_offset) -> tuple[jax.Array, jax.Array]:
    """Query positions and segment starts, both int32 [B, T]."""
    t = jnp.broadcast_to(jnp.arange(query.shape[1], dtype=jnp.int32) + query_offset, query.shape[:2])
    return t, jnp.zeros_like(t) if segment_start is None else segment_start.astype(jnp.int32)


def dispatch_forward(query, key, value, low, high, span, cudnn):
    """The forward pass by the best kernel for these inputs; arguments as `ranged_forward`, returns (out, lse)."""
    if sm90_forward.serves(query, value, current_target(), span):
        config = tuning.ranged_hopper_config(query.shape[-1], value.shape[-1], span, key.shape[1])
        return sm90_forward.ranged_forward(query, key, value, low, high, config)
    # On an H200, a window of 512 took cuDNN 0.72 ms and the Hopper kernel 0.62 (128 rows of 2,048, N=6, K=1, H=64).
    if cudnn:
        return window_cudnn.window_forward(query, key, value, span)
    return ranged_forward(query, key, value, low, high)


_ranged = jax.custom_vjp(dispatch_forward, nondiff_argnums=(5, 6))


def _ranged_fwd(query, key, value, low, high, span, cudnn):
    query, key, value = first_derivative(query, key, value)
    out, lse = dispatch_forward(query, key, value, low, high, span, cudnn)
    return (out, lse), (query, key, value, low, high, out, lse)


def _ranged_bwd(span, cudnn, residuals, cotangents):
    del cudnn
    (grad_out,) = first_derivative(cotangents[0])
    query, key, value, low, high, out, lse = residuals
    delta = row_delta(out, grad_out)
    grads = triton_backward.ranged_backward(query, key, value, low, high, delta, lse, grad_out, span)
    return *grads, None, None


_ranged.defvjp(_ranged_fwd, _ranged_bwd)


def _forward_kernel(
    query_ref, key_ref, value_ref, low_ref, high_ref, out_ref, lse_ref, *, config, group, heads, length, num_keys
):
    h_dim, v_dim = query_ref.shape[-1], value_ref.shape[-1]
    tile = pl.num_programs(0) - 1 - pl.program_id(0)  # late queries see most: they go first, so that the end is short
    token, row = query_rows(tile, config.rows, group, heads, pl.program_id(1), length)
    low, high = low_ref[token], high_ref[token]
    query = load_rows(query_ref, row, h_dim)
    scale = LOG2E / math.sqrt(h_dim)

    def step(exact, i, carry):
        acc, peak, total = carry
        index = key_block(i, config.keys, num_keys, exact)
        scores = row_products(query, tuple(key_ref[index, pl.ds(offset, size)] for offset, size in pieces(h_dim)))
        if not exact:
            position = i * config.keys + lax.broadcasted_iota(jnp.int32, scores.shape, 1)
            scores = jnp.where((position >= low[:, None]) & (position < high[:, None]), scores, -jnp.inf)
        new_peak = jnp.maximum(peak, scores.max(1) * scale)
        alpha = jnp.exp2(peak - new_peak)
        weights = jnp.exp2(scores * scale - new_peak[:, None])
        total = total * alpha + weights.sum(1)
        weights = weights.astype(value_ref.dtype)
        acc = accumulate(acc, alpha, weights, lambda offset, size: value_ref[index, pl.ds(offset, size)], v_dim)
        return acc, new_peak, total

    acc, peak, total = key_loops(step, low, high, config.keys, empty_state(config.rows, v_dim))
    safe = jnp.where(total > 0, total, 1.0)
    store_rows(out_ref, row, tuple(a / safe[:, None] for a in acc))
    lse_ref[row] = jnp.where(total > 0, (peak + jnp.log2(safe)) * LN2, -jnp.inf)


def ranged_forward(query, key, value, low, high, config: tuning.RangedConfig | None = None):
    """The forward kernel; arguments as `ranged_attention`, with low = S and high = 0 where a query sees nothing."""
    batch, length, heads, h_dim = query.shape
    num_keys, kv_heads, v_dim = value.shape[1:]
    group = heads // kv_heads
    config = config or tuning.ranged_forward_config(h_dim, v_dim, query.dtype)
    kernel = functools.partial(
        _forward_kernel,
        config=config,
        group=group,
        heads=heads,
        length=length,
        num_keys=num_keys,
    )
    per_head = lambda dim: pl.BlockSpec((None, num_keys, None, dim), lambda i, h, b: (b, 0, h, 0))  # noqa: E731
    out, lse = triton_call(
        kernel,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        grid=(pl.cdiv(length * group, config.rows), kv_heads, batch),
        in_specs=[
            rows_spec(length * heads, h_dim),
            per_head(h_dim),
            per_head(v_dim),
            rows_spec(length),
            rows_spec(length),
        ],
        out_specs=[rows_spec(length * heads, v_dim), rows_spec(length * heads)],
        out_shape=[
            jax.ShapeDtypeStruct((batch, length * heads, v_dim), query.dtype),
            jax.ShapeDtypeStruct((batch, length * heads), jnp.float32),
        ],
        name="nsa_ranged_forward",
    )(query.reshape(batch, length * heads, h_dim), key, value, low, high)
    return out.reshape(batch, length, heads, v_dim), lse.reshape(batch, length, heads)
