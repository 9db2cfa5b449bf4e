"""Backward of ranged attention without atomics: one kernel for dq, one for dk and dv, each recomputing the weights.

These are the Triton kernels; `sm90_grad_query` and `sm90_grad_key_value` are Hopper's.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from nsa_jax.ops.kernels.range_attention.tiles import (
    KnownRanges,
    for_batch,
    key_block,
    key_loops,
    known_tile_ranges,
    query_rows,
    query_tile_ranges,
    row_products,
    rows_spec,
    splits_for,
)
from nsa_jax.ops.kernels.softmax import LOG2E, NO_WEIGHT
from nsa_jax.ops.kernels.triton import dot, load_rows, pieces, store_rows, triton_call
from nsa_jax.ops.tiles import RangedConfig


def gradients(
    query, key, value, grad_out, lse, delta, low, high, query_config: RangedConfig, key_config: RangedConfig,
    known: KnownRanges | None = None,
):  # fmt: skip
    """Gradients of query, key and value; arguments as those of `sm90_grad_query` and `sm90_grad_key_value`."""
    batch, length, heads, v_dim = grad_out.shape
    rows, h_dim = (batch, length * heads), query.shape[-1]
    flat_query, flat_grad = query.reshape(*rows, h_dim), grad_out.reshape(*rows, v_dim)
    vectors = lse.reshape(rows), delta.reshape(rows), low, high
    grad_query = grad_query_kernel(flat_query, key, value, flat_grad, *vectors, query_config)
    grad_key, grad_value = grad_key_value_kernel(flat_query, key, value, flat_grad, *vectors, key_config, known)
    return grad_query.reshape(query.shape), grad_key, grad_value


def _dq_kernel(
    query_ref,
    key_ref,
    value_ref,
    grad_ref,
    lse_ref,
    delta_ref,
    low_ref,
    high_ref,
    dq_ref,
    *,
    config,
    group,
    heads,
    length,
    num_keys,
):
    h_dim, v_dim = query_ref.shape[-1], value_ref.shape[-1]
    tile = pl.num_programs(0) - 1 - pl.program_id(0)
    token, row = query_rows(tile, config.rows, group, heads, pl.program_id(1), length)
    low, high = low_ref[token], high_ref[token]
    query, grad = load_rows(query_ref, row, h_dim), load_rows(grad_ref, row, v_dim)
    lse, delta = lse_ref[row], delta_ref[row]
    scale = 1.0 / math.sqrt(h_dim)

    def step(exact, i, acc):
        index = key_block(i, config.keys, num_keys, exact)
        key = tuple(key_ref[index, pl.ds(offset, size)] for offset, size in pieces(h_dim))
        value = tuple(value_ref[index, pl.ds(offset, size)] for offset, size in pieces(v_dim))
        weights = jnp.exp2(row_products(query, key) * (scale * LOG2E) - lse[:, None])
        if not exact:
            position = i * config.keys + lax.broadcasted_iota(jnp.int32, weights.shape, 1)
            weights = jnp.where((position >= low[:, None]) & (position < high[:, None]), weights, 0.0)
        d_scores = weights * (row_products(grad, value) - delta[:, None])
        d_scores = d_scores.astype(key_ref.dtype)
        return tuple(a + dot(d_scores, k, (1, 0)) for a, k in zip(acc, key, strict=True))

    acc = tuple(jnp.zeros((config.rows, size), jnp.float32) for _, size in pieces(h_dim))
    acc = key_loops(step, low, high, config.keys, acc)
    store_rows(dq_ref, row, tuple(a * scale for a in acc))


def grad_query_kernel(query, key, value, grad_out, lse, delta, low, high, config: RangedConfig):
    """dq [B, T * N, H]; query and grad_out are [B, T * N, H or V], lse (base 2) and delta [B, T * N]."""
    batch, num_rows, h_dim = query.shape
    num_keys, kv_heads, v_dim = value.shape[1:]
    length = low.shape[1]
    heads = num_rows // length
    group = heads // kv_heads
    kernel = functools.partial(_dq_kernel, config=config, group=group, heads=heads, length=length, num_keys=num_keys)
    per_head = lambda dim: pl.BlockSpec((None, num_keys, None, dim), lambda i, h, b: (b, 0, h, 0))  # noqa: E731
    return triton_call(
        kernel,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        grid=(pl.cdiv(length * group, config.rows), kv_heads, batch),
        in_specs=[
            rows_spec(num_rows, h_dim),
            per_head(h_dim),
            per_head(v_dim),
            rows_spec(num_rows, v_dim),
            rows_spec(num_rows),
            rows_spec(num_rows),
            rows_spec(length),
            rows_spec(length),
        ],
        out_specs=rows_spec(num_rows, h_dim),
        out_shape=jax.ShapeDtypeStruct(query.shape, query.dtype),
        name="nsa_ranged_dq",
    )(query, key, value, grad_out, lse, delta, low, high)


def _dkv_kernel(
    query_ref,
    key_ref,
    value_ref,
    grad_ref,
    lse_ref,
    delta_ref,
    low_ref,
    high_ref,
    ranges_ref,
    dk_ref,
    dv_ref,
    *,
    config,
    group,
    heads,
    length,
    num_keys,
    splits,
):
    h_dim, v_dim = query_ref.shape[-1], value_ref.shape[-1]
    block, split = lax.div(pl.program_id(0), splits), lax.rem(pl.program_id(0), splits)
    kv_head = pl.program_id(1)
    position = jnp.minimum(block * config.keys + lax.broadcasted_iota(jnp.int32, (config.keys,), 0), num_keys - 1)
    key, value = load_rows(key_ref, position, h_dim), load_rows(value_ref, position, v_dim)
    scale = 1.0 / math.sqrt(h_dim)
    ragged = length * group % config.rows != 0

    def step(exact, tile, carry):
        dk, dv = carry
        token, row = query_rows(tile, config.rows, group, heads, kv_head, length)
        query, grad = load_rows(query_ref, row, h_dim), load_rows(grad_ref, row, v_dim)
        lse, delta = lse_ref[row], delta_ref[row]
        if ragged:  # rows that repeat the last one must not be counted
            own = tile * config.rows + lax.broadcasted_iota(jnp.int32, (config.rows,), 0) < length * group
            lse = jnp.where(own, lse, NO_WEIGHT)
        weights = jnp.exp2(row_products(key, query) * (scale * LOG2E) - lse[None, :])  # [keys, rows]
        if not exact:
            low, high = low_ref[token], high_ref[token]
            visible = (position[:, None] >= low[None, :]) & (position[:, None] < high[None, :])
            weights = jnp.where(visible, weights, 0.0)
        half = weights.astype(grad_ref.dtype)
        dv = tuple(a + dot(half, g, (1, 0)) for a, g in zip(dv, grad, strict=True))
        d_scores = weights * (row_products(value, grad) - delta[None, :])
        d_scores = d_scores.astype(query_ref.dtype)
        dk = tuple(a + dot(d_scores, q, (1, 0)) for a, q in zip(dk, query, strict=True))
        return dk, dv

    first, whole_begin, whole_end, last = (ranges_ref[i, block] for i in range(4))
    per_split = lax.div(last - first + splits - 1, splits)
    begin = jnp.minimum(first + split * per_split, last)
    end = jnp.minimum(begin + per_split, last)
    whole_begin = jnp.clip(whole_begin, begin, end)
    whole_end = jnp.clip(whole_end, whole_begin, end)
    carry = tuple(
        tuple(jnp.zeros((config.keys, size), jnp.float32) for _, size in pieces(dim)) for dim in (h_dim, v_dim)
    )
    carry = lax.fori_loop(begin, whole_begin, lambda i, c: step(False, i, c), carry)
    carry = lax.fori_loop(whole_begin, whole_end, lambda i, c: step(True, i, c), carry)
    dk, dv = lax.fori_loop(whole_end, end, lambda i, c: step(False, i, c), carry)
    # Past the last key every row repeats it and stores the same values, as in query tiles.
    store_rows(dk_ref, position, tuple(a * scale for a in dk))
    store_rows(dv_ref, position, dv)


def grad_key_value_kernel(
    query, key, value, grad_out, lse, delta, low, high, config: RangedConfig, known: KnownRanges | None = None
):
    """dk [B, S, K, H] and dv [B, S, K, V]; arguments as `grad_query_kernel`.

    Few keys (the compressed branch) leave few programs with very long loops, so a key block's queries are split over
    several programs; each writes its own float32 partial and these are added in a fixed order.
    """
    batch, num_rows, h_dim = query.shape
    num_keys, kv_heads, v_dim = value.shape[1:]
    length = low.shape[1]
    heads = num_rows // length
    group = heads // kv_heads
    num_blocks = pl.cdiv(num_keys, config.keys)
    splits = config.splits or splits_for(key, value, length * group, keys=config.keys, rows=config.rows)
    kernel = functools.partial(
        _dkv_kernel,
        config=config,
        group=group,
        heads=heads,
        length=length,
        num_keys=num_keys,
        splits=splits,
    )
    if known is None:
        ranges = query_tile_ranges(low, high, group, config.rows, config.keys, num_keys)
    else:
        ranges = for_batch(known_tile_ranges(known, group, config.rows, config.keys), batch)
    per_head = lambda dim: pl.BlockSpec((None, num_keys, None, dim), lambda i, h, b: (b, 0, h, 0))  # noqa: E731
    per_split = lambda dim: pl.BlockSpec(  # noqa: E731
        (None, None, num_keys, None, dim), lambda i, h, b: (lax.rem(i, jnp.int32(splits)), b, 0, h, 0)
    )
    dtype = query.dtype if splits == 1 else jnp.float32
    dk, dv = triton_call(
        kernel,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        grid=(num_blocks * splits, kv_heads, batch),
        in_specs=[
            rows_spec(num_rows, h_dim),
            per_head(h_dim),
            per_head(v_dim),
            rows_spec(num_rows, v_dim),
            rows_spec(num_rows),
            rows_spec(num_rows),
            rows_spec(length),
            rows_spec(length),
            rows_spec(4, num_blocks),
        ],
        out_specs=[per_split(h_dim), per_split(v_dim)],
        out_shape=[jax.ShapeDtypeStruct((splits, *x.shape), dtype) for x in (key, value)],
        name="nsa_ranged_dkv",
    )(query, key, value, grad_out, lse, delta, low, high, ranges)
    if splits == 1:
        return dk[0], dv[0]
    return dk.sum(0).astype(key.dtype), dv.sum(0).astype(value.dtype)
