"""Compressed and window attention on GPUs: every query sees one contiguous range of keys (paper eq. 5, 3.3.1, 3.3.3).

Both branches are the same flash attention: the query at t sees the keys [low(t), high(t)). `low` and `high` carry all
there is to know about causality, blocks, packing and `query_offset`. A query tile's loop runs over the keys that any
of its queries sees, and it needs no mask where all of them see a whole key block.

A plan chooses the kernels: Triton's anywhere, Mosaic GPU's on Hopper (`sm90_*`) and on an A100 (`sm80_*`), and cuDNN's
forward for windows of unpacked rows that Hopper's kernels do not serve. The backward pass is always ours, because
cuDNN's adds dq with atomics, so that two runs differ.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from nsa_jax.ops import blocks
from nsa_jax.ops.blocks import NSAConfig
from nsa_jax.ops.choices import RangePlan, Shape
from nsa_jax.ops.kernels.range_attention import (
    sm90_forward,
    sm90_grad_key_value,
    sm90_grad_query,
    triton_backward,
    triton_forward,
    window_cudnn,
)
from nsa_jax.ops.kernels.range_attention.tiles import GatedSum, KnownRanges, known_ranges, numpy_of
from nsa_jax.ops.kernels.softmax import base_2
from nsa_jax.ops.kernels.triton import first_derivative, row_delta


def compressed_attention(query, key_cmp, value_cmp, *, config: NSAConfig, segment_start, query_offset, plan: RangePlan):
    """See `nsa_jax.compressed_attention`."""
    low, high = compressed_ranges(query, segment_start, query_offset, config)
    return ranged_attention(query, key_cmp, value_cmp, low, high, plan)


def window_attention(query, key, value, *, window: int, segment_start, query_offset, plan: RangePlan):
    """See `nsa_jax.window_attention`."""
    low, high = window_ranges(query, segment_start, query_offset, window)
    return ranged_attention(query, key, value, low, high, plan, window)[0]


def compressed_ranges(query, segment_start, query_offset, config: NSAConfig) -> tuple[jax.Array, jax.Array]:
    """(low, high), int32 [B, T]: the compressed blocks that each query sees."""
    t, start = blocks.query_positions(query, segment_start, query_offset)
    return blocks.compressed_range(t, start, config)


def window_ranges(query, segment_start, query_offset, window: int) -> tuple[jax.Array, jax.Array]:
    """(low, high), int32 [B, T]: the tokens of each query's window."""
    t, start = blocks.query_positions(query, segment_start, query_offset)
    return jnp.maximum(start, t - window + 1), t + 1


def known_compressed_ranges(length: int, offset: int, num_keys: int, config: NSAConfig) -> KnownRanges | None:
    """`compressed_ranges` of rows that hold one document, clipped, where tracing knows their offset."""
    t = np.arange(length, dtype=np.int32) + offset
    low, high = blocks.compressed_range(t, np.zeros_like(t), config)
    low, high = clip_ranges(low, high, num_keys)
    return known_ranges(low, high, num_keys)


def known_window_ranges(length: int, offset: int, num_keys: int, window: int, row_begin: int = 0) -> KnownRanges | None:
    """`window_ranges` of rows that hold one document, clipped.

    Args:
      length: T.
      offset: the first query's place in the keys.
      num_keys: S.
      window: w.
      row_begin: the place in the keys of the row's first token; keys before it are never read.
    """
    t = np.arange(length, dtype=np.int32) + offset
    low, high = clip_ranges(np.maximum(t - window + 1, row_begin), t + 1, num_keys)
    return known_ranges(low, high, num_keys)


def ranged_attention(
    query, key, value, low, high, plan: RangePlan, window: int | None = None
) -> tuple[jax.Array, jax.Array]:
    """Attention of every query over its own contiguous range of keys.

    Args:
      query: [B, T, N, H], float32 or bfloat16. Scores are scaled by 1/sqrt(H).
      key: [B, S, K, H].
      value: [B, S, K, V].
      low: int32 [B, T]; the query at t sees keys low[t] <= p < high[t] with 0 <= p < S, none where high <= low.
      high: int32 [B, T].
      plan: the kernels.
      window: w, where the ranges are a causal window.

    Returns:
      The output [B, T, N, V], exactly 0 for a query that sees nothing, and the natural-log log-sum-exp of the scaled
      scores, float32 [B, T, N], -inf there. The log-sum-exp has no gradient.
    """
    batch, length, heads, _ = query.shape
    num_keys, v_dim = key.shape[1], value.shape[-1]
    if num_keys == 0:
        out = jnp.zeros((batch, length, heads, v_dim), query.dtype)
        return out, jnp.full((batch, length, heads), -jnp.inf, jnp.float32)
    return _ranged(query, key, value, *clip_ranges(low, high, num_keys), plan, window)


def clip_ranges(low, high, num_keys: int):
    """Ranges, of NumPy or JAX, within the keys, and (S, 0) for queries that see nothing: what the kernels expect."""
    xp = numpy_of(low)
    low, high = xp.clip(low, 0, num_keys), xp.clip(high, 0, num_keys)
    empty = high <= low
    return xp.where(empty, num_keys, low), xp.where(empty, 0, high)


def forward(
    query, key, value, low, high, plan: RangePlan, window: int | None, known: KnownRanges | None = None,
    gated: GatedSum | None = None,
):  # fmt: skip
    """The forward pass: (output, log-sum-exp), or with `gated` what `sm90_forward.ranged_forward` returns.

    Args:
      query, key, value, low, high, plan, window: as `ranged_attention`, with low = S and high = 0 where a query sees
        nothing.
      known: the same ranges, if tracing knows them: what tiles visit is then a constant of the program.
      gated: what Hopper's kernel adds the output to; see `sm90_forward.ranged_forward`.
    """
    chosen = plan.forward
    if chosen.kernel == "range_attention.sm90_forward":
        return sm90_forward.ranged_forward(query, key, value, low, high, chosen.tiles, known, gated)
    assert gated is None
    if chosen.kernel == "range_attention.sm80_forward":
        # A jaxlib without GPU support cannot import Mosaic GPU, and must still import the library.
        from nsa_jax.ops.kernels.range_attention import sm80_forward

        return sm80_forward.ranged_forward(query, key, value, low, high, chosen.tiles, known)
    if chosen.kernel == "range_attention.window_cudnn":
        assert window is not None
        return window_cudnn.window_forward(query, key, value, window)
    return triton_forward.ranged_forward(query, key, value, low, high, chosen.tiles)


def backward(
    query, key, value, low, high, delta, lse, grad_out, plan: RangePlan, known: KnownRanges | None = None,
    onto: jax.Array | None = None,
):  # fmt: skip
    """Gradients of `ranged_attention`'s output for query, key and value.

    Args:
      query, key, value, low, high: as `forward` took them.
      delta: `row_delta` of its output and grad_out, float32 [B, T, N].
      lse: as it returned it.
      grad_out: [B, T, N, V].
      plan: the kernels.
      known: as `forward` took it.
      onto: another gradient of the query. The first result is the sum of both.
    """
    args = (query, key, value, grad_out, base_2(lse), delta, low, high)
    if plan.grad_query.kernel == "range_attention.triton_backward":
        gradients = triton_backward.gradients(*args, plan.grad_query.tiles, plan.grad_key_value.tiles, known)
        grad_query, *others = gradients
    elif plan.grad_query.kernel == "range_attention.sm80_grad_query":
        from nsa_jax.ops.kernels.range_attention import sm80_grad_key_value, sm80_grad_query

        grad_query = sm80_grad_query.grad_query(*args, plan.grad_query.tiles, known)
        others = sm80_grad_key_value.grad_key_value(*args, plan.grad_key_value.tiles, known)
    else:
        # Gradients that are rearranged afterwards, and those of other kernels, are added by XLA; those of one key/value
        # head are not rearranged.
        inside = onto if key.shape[2] == 1 or Shape.of(query, key, value).lies_as_read else None
        grad_query = sm90_grad_query.grad_query(*args, plan.grad_query.tiles, known, inside)
        others = sm90_grad_key_value.grad_key_value(*args, plan.grad_key_value.tiles, known)
        onto = onto if inside is None else None
    if onto is not None:
        grad_query = (grad_query.astype(jnp.float32) + onto.astype(jnp.float32)).astype(query.dtype)
    return grad_query, *others


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def _ranged(query, key, value, low, high, plan, window):
    return forward(query, key, value, low, high, plan, window)


def _ranged_fwd(query, key, value, low, high, plan, window):
    query, key, value = first_derivative(query, key, value)
    out, lse = forward(query, key, value, low, high, plan, window)
    return (out, lse), (query, key, value, low, high, out, lse)


def _ranged_bwd(plan, window, residuals, cotangents):
    del window
    (grad_out,) = first_derivative(cotangents[0])
    query, key, value, low, high, out, lse = residuals
    delta = row_delta(out, grad_out)
    return *backward(query, key, value, low, high, delta, lse, grad_out, plan), None, None


_ranged.defvjp(_ranged_fwd, _ranged_bwd)
