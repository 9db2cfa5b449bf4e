"""Forward of range attention: the Triton kernel."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from nsa_jax.ops.kernels.range_attention.tiles import key_block, key_loops, query_rows, row_products, rows_spec
from nsa_jax.ops.kernels.softmax import LN2, LOG2E, accumulate, empty_state
from nsa_jax.ops.kernels.triton import load_rows, pieces, store_rows, triton_call
from nsa_jax.ops.tiles import RangedConfig


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


def ranged_forward(query, key, value, low, high, config: RangedConfig):
    """Output [B, T, N, V] and natural-log lse, float32 [B, T, N].

    Args:
      query, key, value: as `attention.ranged_attention` takes them.
      low, high: the same, with low = S and high = 0 where a query sees nothing.
      config: tiles.
    """
    batch, length, heads, h_dim = query.shape
    num_keys, kv_heads, v_dim = value.shape[1:]
    group = heads // kv_heads
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
