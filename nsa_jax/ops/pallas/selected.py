"""Selected attention on GPUs: every query reads the tokens of its own list of key blocks (paper section 3.3.2).

The plain loop runs one program per (query token, key/value head): the G query heads of the group are the rows of the
matrix products and the program walks its list with a running softmax.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from nsa_jax.ops.pallas import tuning
from nsa_jax.ops.pallas.common import LN2, LOG2E, interpreted, triton_call

# Stands for minus infinity inside kernels: finite, so that differences of two of them are 0 and never NaN.
_NEG = -1e30


def _pieces(dim: int) -> list[tuple[int, int]]:
    """Splits a head dim into (offset, size) with power-of-two sizes, which is all that Triton tiles can have."""
    out, offset = [], 0
    while offset < dim:
        size = 1 << int(math.log2(dim - offset))
        out.append((offset, size))
        offset += size
    return out


def _dot(a: jax.Array, b: jax.Array, contract: tuple[int, int]) -> jax.Array:
    """Matrix product in the operands' precision with float32 accumulation."""
    precision = None
    if a.dtype == jnp.float32:
        precision = lax.Precision.HIGHEST if interpreted() else lax.DotAlgorithmPreset.TF32_TF32_F32_X3
    dims = (((contract[0],), (contract[1],)), ((), ()))
    return lax.dot_general(a, b, dims, precision=precision, preferred_element_type=jnp.float32)


def _key_rows(ref, start, size: int, num_keys: int, offset: int, width: int, exact: bool) -> jax.Array:
    """Loads rows [start, start + size) and columns [offset, offset + width); rows past the end repeat the last one."""
    if exact:
        return ref[pl.ds(pl.multiple_of(start, size), size), pl.ds(offset, width)]
    rows = jnp.minimum(start + lax.broadcasted_iota(jnp.int32, (size,), 0), num_keys - 1)
    return ref[rows, pl.ds(offset, width)]


def _attend_block(carry, q, k_ref, v_ref, start, low, high, *, size, scale, num_keys, v_dim, exact):
    """One step of the running softmax over keys [start, start + size): those with low <= key - start <= high.

    Args:
      carry: accumulator pieces [R, v], running maximum [R] (of unscaled scores) and sum [R].
      q: query pieces [R, h].
      low, high: int32 [R] bounds inside the block, or None for low where nothing bounds it from below.
    """
    acc, peak, total = carry
    scores, offset = None, 0
    for piece in q:
        part = _dot(piece, _key_rows(k_ref, start, size, num_keys, offset, piece.shape[1], exact), (1, 1))
        scores = part if scores is None else scores + part
        offset += piece.shape[1]
    column = lax.broadcasted_iota(jnp.int32, scores.shape, 1)
    visible = column <= high[:, None]
    if low is not None:
        visible &= column >= low[:, None]
    scores = jnp.where(visible, scores, _NEG)
    new_peak = jnp.maximum(peak, scores.max(1))
    alpha = jnp.exp2((peak - new_peak) * scale)
    weights = jnp.exp2(scores * scale - (new_peak * scale)[:, None])
    total = total * alpha + weights.sum(1)
    weights = weights.astype(v_ref.dtype)
    acc = tuple(
        a * alpha[:, None] + _dot(weights, _key_rows(v_ref, start, size, num_keys, offset, width, exact), (1, 0))
        for a, (offset, width) in zip(acc, _pieces(v_dim), strict=True)
    )
    return acc, new_peak, total


def _plain_kernel(
    offset_ref, list_ref, start_ref, q_ref, k_ref, v_ref, o_ref, lse_ref,
    *, rows, group, num_listed, select_block, size, scale, num_keys, packed, exact,
):  # fmt: skip
    """One (token, kv head): list_ref [n], start_ref [1], q_ref [G, H], k_ref [S, H], v_ref [S, V]."""
    t = jnp.minimum(pl.program_id(0) + offset_ref[0], num_keys - 1)
    v_dim = v_ref.shape[-1]
    head = jnp.minimum(lax.broadcasted_iota(jnp.int32, (rows,), 0), group - 1)
    slot = lax.broadcasted_iota(jnp.int32, (pl.next_power_of_2(num_listed),), 0)
    listed = list_ref[jnp.minimum(slot, num_listed - 1)]
    real = slot < num_listed
    last = jnp.sum((real & (listed <= t // select_block)).astype(jnp.int32))
    first, segment = 0, 0
    if packed:
        segment = start_ref[0]
        first = jnp.sum((real & (listed < segment // select_block)).astype(jnp.int32))
        last = jnp.where(segment <= t, last, first)
    parts = pl.cdiv(select_block, size)
    q = [q_ref[head, pl.ds(offset, width)] for offset, width in _pieces(q_ref.shape[-1])]

    def body(i, carry):
        part = (i % parts) * size if parts > 1 else 0
        start = list_ref[i // parts if parts > 1 else i] * select_block + part
        high = jnp.minimum(t - start, select_block - 1 - part)
        low = jnp.full((rows,), segment - start, jnp.int32) if packed else None
        return _attend_block(
            carry, q, k_ref, v_ref, start, low, jnp.full((rows,), high, jnp.int32),
            size=size, scale=scale, num_keys=num_keys, v_dim=v_dim, exact=exact,
        )  # fmt: skip

    init = (
        tuple(jnp.zeros((rows, width), jnp.float32) for _, width in _pieces(v_dim)),
        jnp.full((rows,), _NEG, jnp.float32),
        jnp.zeros((rows,), jnp.float32),
    )
    acc, peak, total = lax.fori_loop(first * parts, last * parts, body, init)
    # Rows of the padding above G hold copies of row G - 1 and write the same values to the same place.
    some = peak > 0.5 * _NEG
    inverse = jnp.where(some, 1.0 / jnp.where(some, total, 1.0), 0.0)
    for a, (offset, width) in zip(acc, _pieces(v_dim), strict=True):
        o_ref[head, pl.ds(offset, width)] = (a * inverse[:, None]).astype(o_ref.dtype)
    lse_ref[head] = jnp.where(some, (peak * scale + jnp.log2(jnp.where(some, total, 1.0))) * LN2, -jnp.inf)


def _forward(query, key, value, block_indices, segment_start, query_offset, select_block: int, packed: bool):
    """Output [B, T, N, V] and natural-log lse float32 [B, T, N]."""
    batch, length, num_heads, h_dim = query.shape
    num_keys, num_kv, v_dim = value.shape[1:]
    group = num_heads // num_kv
    num_listed = block_indices.shape[-1]
    config = tuning.selected_config(group, h_dim, v_dim, select_block, query.dtype)
    kernel = functools.partial(
        _plain_kernel,
        rows=max(16, pl.next_power_of_2(group)),
        group=group,
        num_listed=num_listed,
        select_block=select_block,
        size=config.keys,
        scale=LOG2E / math.sqrt(h_dim),
        num_keys=num_keys,
        packed=packed,
        exact=num_keys % select_block == 0 and select_block % config.keys == 0,
    )
    # Tokens run fastest: the programs in flight share one head's keys and values, which then stay in the L2 cache.
    out, lse = triton_call(
        kernel,
        num_warps=config.plain_warps,
        num_stages=config.plain_stages,
        grid=(length, num_kv, batch),
        in_specs=[
            pl.BlockSpec((1,), lambda t, k, b: (0,)),
            pl.BlockSpec((None, None, None, num_listed), lambda t, k, b: (b, t, k, 0)),
            pl.BlockSpec((None, 1), lambda t, k, b: (b, t)),
            pl.BlockSpec((None, None, None, group, h_dim), lambda t, k, b: (b, t, k, 0, 0)),
            pl.BlockSpec((None, num_keys, None, h_dim), lambda t, k, b: (b, 0, k, 0)),
            pl.BlockSpec((None, num_keys, None, v_dim), lambda t, k, b: (b, 0, k, 0)),
        ],
        out_specs=[
            pl.BlockSpec((None, None, None, group, v_dim), lambda t, k, b: (b, t, k, 0, 0)),
            pl.BlockSpec((None, None, None, group), lambda t, k, b: (b, t, k, 0)),
        ],
        out_shape=[
            jax.ShapeDtypeStruct((batch, length, num_kv, group, v_dim), query.dtype),
            jax.ShapeDtypeStruct((batch, length, num_kv, group), jnp.float32),
        ],
        name="nsa_selected_forward",
    )(
        query_offset.reshape(1),
        block_indices,
        segment_start,
        query.reshape(batch, length, num_kv, group, h_dim),
        key,
        value,
    )
    return out.reshape(batch, length, num_heads, v_dim), lse.reshape(batch, length, num_heads)


@functools.partial(jax.custom_vjp, nondiff_argnums=(6, 7))
def _selected(query, key, value, block_indices, segment_start, query_offset, select_block, packed):
    return _forward(query, key, value, block_indices, segment_start, query_offset, select_block, packed)[0]


def _selected_fwd(query, key, value, block_indices, segment_start, query_offset, select_block, packed):
    out, lse = _forward(query, key, value, block_indices, segment_start, query_offset, select_block, packed)
    return out, (query, key, value, block_indices, segment_start, query_offset, out, lse)


def _selected_bwd(select_block, packed, residuals, d_out):
    from nsa_jax.ops.pallas.selected_backward import selected_backward

    query, key, value, block_indices, segment_start, query_offset, out, lse = residuals
    d_query, d_key, d_value = selected_backward(
        query, key, value, block_indices, out, lse, d_out,
        select_block=select_block, segment_start=segment_start, query_offset=query_offset,
    )  # fmt: skip
    return d_query, d_key, d_value, None, None, None


_selected.defvjp(_selected_fwd, _selected_bwd)


def selected_attention(query, key, value, block_indices, *, select_block: int, segment_start=None, query_offset=0):
    """See `nsa_jax.selected_attention`."""
    packed = segment_start is not None
    if segment_start is None:
        segment_start = jnp.zeros(query.shape[:2], jnp.int32)
    offset = jnp.asarray(query_offset, jnp.int32)
    return _selected(
        query,
        key,
        value,
        block_indices.astype(jnp.int32),
        segment_start.astype(jnp.int32),
        offset,
        select_block,
        packed,
    )
