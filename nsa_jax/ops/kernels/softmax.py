"""What every softmax in the kernels shares: the constants of base-2 arithmetic and parts of the Triton loops.

The Triton kernels keep three running softmaxes, which differ in where the scale enters, how keys are hidden and how
sums are kept: `selected.softmax` (bounds inside a block), `range_attention.attention` (ranges that need a mask at their
ends alone) and `decode.softmax_parts` (one sum per column).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from nsa_jax.ops.kernels.triton import dot, pieces

# GPUs have an instruction for 2**x, so scores and their log-sum-exp are in base 2 inside kernels.
LOG2E = 1.4426950408889634
LN2 = 0.6931471805599453
# Stands for minus infinity: it is finite, so that the difference of two of them is 0 and never NaN.
MINUS_INFINITY = -1e30
# Stands for the log-sum-exp of a row that gets no weight: exp2(score - NO_WEIGHT) is exactly 0.
NO_WEIGHT = 1e30


def in_rows(function, *numbers: jax.Array) -> Any:
    """`function` of numbers [B, T, N] element by element, computed as [B, T * N].

    Kernels take and give rows one after the other. Of three dimensions XLA would choose the order by itself, since
    block scores want heads before tokens, and would transpose all that goes in and comes out.
    """
    shape = numbers[0].shape
    results = function(*(x.reshape(shape[0], -1) for x in numbers))
    return jax.tree.map(lambda x: x.reshape(shape), results)


def base_2(lse: jax.Array) -> jax.Array:
    """A natural-log log-sum-exp [B, T, N] as the backward kernels take it."""
    return in_rows(lambda lse: jnp.where(lse == -jnp.inf, NO_WEIGHT, lse * LOG2E), lse)


def empty_state(rows: int, v_dim: int):
    """The running softmax before any key: accumulator pieces [rows, v], maximum [rows] and sum [rows].

    The maximum is finite: a row that has seen no key gets weights exp2(-inf - maximum) = 0 and not NaN.
    """
    acc = tuple(jnp.zeros((rows, width), jnp.float32) for _, width in pieces(v_dim))
    return acc, jnp.full((rows,), MINUS_INFINITY, jnp.float32), jnp.zeros((rows,), jnp.float32)


def score_products(query, load_key: Callable[[int, int], jax.Array]) -> jax.Array:
    """Query rows, in pieces [R, h] of a head dim, times keys: float32 [R, M].

    Args:
      query: the pieces.
      load_key: (offset, width) -> columns [M, width] of the keys, loaded just before their product.
    """
    scores: Any = None
    offset = 0
    for piece in query:
        part = dot(piece, load_key(offset, piece.shape[1]), (1, 1))
        scores = part if scores is None else scores + part
        offset += piece.shape[1]
    return scores


def accumulate(acc, alpha, weights, load_value: Callable[[int, int], jax.Array], v_dim: int) -> tuple[jax.Array, ...]:
    """The accumulator's pieces [R, v], scaled by alpha [R], plus weights [R, M] times values [M, V].

    Args:
      load_value: (offset, width) -> columns [M, width] of the values.
    """
    return tuple(
        a * alpha[:, None] + dot(weights, load_value(offset, width), (1, 0))
        for a, (offset, width) in zip(acc, pieces(v_dim), strict=True)
    )
