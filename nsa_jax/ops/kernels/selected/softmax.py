"""What the selected branch's forward kernels share: one step of the running softmax over a key block."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from nsa_jax.ops.kernels.softmax import LN2, MINUS_INFINITY, accumulate, score_products
from nsa_jax.ops.kernels.triton import interpreted


def key_rows(ref, at, start, size: int, num_keys: int, offset: int, width: int, exact: bool) -> jax.Array:
    """Loads rows [start, start + size) and columns [offset, offset + width); rows past the end repeat the last one.

    Args:
      ref: [S, H], or [B, S, K, H] with `at` = (batch row, kv head).
    """
    rows: Any
    if exact:
        rows = pl.ds(pl.multiple_of(start, size), size)
    else:
        rows = jnp.minimum(start + lax.broadcasted_iota(jnp.int32, (size,), 0), num_keys - 1)
    columns = pl.ds(offset, width)
    return ref[rows, columns] if at is None else ref[at[0], rows, at[1], columns]


def attend_block(state, q, k_ref, v_ref, start, low, high, *, size, scale, num_keys, v_dim, exact, at=None):
    """One step of the running softmax over keys [start, start + size): those with low <= key - start <= high.

    Args:
      state: accumulator pieces [R, v], running maximum [R] (of unscaled scores) and sum [R].
      q: query pieces [R, h].
      low, high: int32 [R] bounds inside the block, or None where nothing bounds it.
    """
    acc, peak, total = state

    def load(ref):
        return lambda offset, width: key_rows(ref, at, start, size, num_keys, offset, width, exact)

    scores = score_products(q, load(k_ref))
    column = lax.broadcasted_iota(jnp.int32, scores.shape, 1)
    if high is not None:
        visible = column <= high[:, None]
        if low is not None:
            visible &= column >= low[:, None]
        scores = jnp.where(visible, scores, MINUS_INFINITY)
    new_peak = jnp.maximum(peak, scores.max(1))
    alpha = jnp.exp2((peak - new_peak) * scale)
    if interpreted():
        # Where all scores are masked, their difference from the maximum must be 0. A CPU's fused multiply-add would
        # make it the rounding error of a product, 1e22.
        weights = jnp.exp2((scores - new_peak[:, None]) * scale)
    else:
        weights = jnp.exp2(scores * scale - (new_peak * scale)[:, None])
    total = total * alpha + weights.sum(1)
    weights = weights.astype(v_ref.dtype)
    return accumulate(acc, alpha, weights, load(v_ref), v_dim), new_peak, total


def finish(state, scale: float, dtype):
    """Output pieces and natural-log lse; rows that met no key get 0 and -inf."""
    acc, peak, total = state
    some = peak > 0.5 * MINUS_INFINITY
    total = jnp.where(some, total, 1.0)
    inverse = jnp.where(some, 1.0 / total, 0.0)
    lse = jnp.where(some, (peak * scale + jnp.log2(total)) * LN2, -jnp.inf)
    return tuple((a * inverse[:, None]).astype(dtype) for a in acc), lse


def load_once(ref, index: tuple) -> jax.Array:
    """Loads `ref[index]`, which no other program needs: it should not push keys and values out of the L2 cache."""
    if interpreted():  # the interpreter lacks pltriton.load with an index array and a slice
        return ref[index]
    return pltriton.load(ref.at[index], eviction_policy="evict_first")


def store_once(ref, index: tuple, value: jax.Array) -> None:
    """Stores to `ref[index]` what this kernel does not read again; see `load_once`."""
    if interpreted():
        ref[index] = value
    else:
        pltriton.store(ref.at[index], value, eviction_policy="evict_first")
