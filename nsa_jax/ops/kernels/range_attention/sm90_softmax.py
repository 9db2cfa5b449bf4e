"""The softmax of a block of scores in the Hopper forward of range attention: of one attention, or of two at once.

All numbers are in registers, [64, keys] of a warpgroup's query rows and [64] of each of these rows.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

from nsa_jax.ops.kernels import sm90, sm90_columns, sm90_reduce
from nsa_jax.ops.kernels.range_attention.sm90_visibility import ROW_LAYOUT, hide
from nsa_jax.ops.kernels.softmax import NO_WEIGHT

# Added to a number and subtracted again, it leaves a whole number.
_ROUNDS = 1.5 * 2**23


def attend(scores, running, first, ranges, seen, *, exact, scale: float, whole: bool):
    """A block's scores in the softmax of one attention.

    Args:
      scores: products of queries and keys, not scaled.
      running: (what rows subtract, each thread's part of the normalizers) so far.
      first: position of the first key.
      ranges: int32 [64] in shared memory, where the keys begin and end that a row sees.
      seen: which rows see the block, or None if all do as far as ranges allow.
      exact: whether the ranges hide nothing, known to tracing or not.
      scale: of scores, with log2(e).
      whole: whether rows subtract whole numbers, see `attend_both`.

    Returns:
      (what rows subtract, each thread's part of the normalizers, weights of the block, and (factor, raised) for what
      was summed before: `sm90.raise_peak`).
    """
    peak, total = running

    def hidden(scores):
        return hide(scores, -jnp.inf, first, ranges[0], ranges[1])

    if isinstance(exact, bool):
        scores = scores if exact else hidden(scores)
    else:
        scores = lax.cond(exact, lambda scores: scores, hidden, scores)
    highest = _highest(scores, scale, whole)
    if seen is not None:
        highest = jnp.where(seen, highest, peak)
    peak, total, factor, raised = sm90.raise_peak(peak, total, highest)
    subtract = peak if seen is None else jnp.where(seen, peak, NO_WEIGHT)
    weights = jnp.exp2(scores * scale - lax.broadcast_in_dim(subtract, scores.shape, [0]))
    total += sm90_reduce.sum_in_thread(weights)
    return peak, total, weights, factor, raised


def _highest(scores, scale: float, whole: bool = True):
    """The highest of a block's scores among those that a thread has, as a whole number unless `whole` is False."""
    highest = sm90_reduce.max_in_thread(scores) * scale
    return (highest + _ROUNDS) - _ROUNDS if whole else highest


def attend_both(scores, running, first, ranges, seen, *, exact: bool, near: bool, scale: float):
    """`attend` of two attentions, the second over a window at the end of a row's range whether or not it is `seen`.

    Every key has one exponential. What both see is no higher than the maximum of either, so that the one with the lower
    maximum tells what to subtract, however far they lie apart. The weights of the other are so many times lower: whole
    powers of two, which change no bit of a rounded weight.

    Args:
      running: of both attentions.
      ranges: and where the window begins.
      near: whether what a row sees of the block lies in its window.

    Returns:
      Of both attentions what `attend` does and the factor of its weights, for `of_both`. Unless `near`, the weights of
      keys before the window are negative.
    """
    (peak, total), (window_peak, window_total) = running
    shape = scores.shape
    if not exact:
        scores = hide(scores, -jnp.inf, first, ranges[0], ranges[1])
    highest = window_highest = _highest(scores, scale)
    if not near:
        inside = sm90_columns.own_columns(sm90.load(ranges[2], ROW_LAYOUT), None, first, shape[1])
        window_highest = _highest(sm90_columns.where_columns(inside, scores, -jnp.inf), scale)
    peak, total, *change = sm90.raise_peak(peak, total, jnp.where(seen, highest, peak))
    window_peak, window_total, *window_change = sm90.raise_peak(window_peak, window_total, window_highest)
    lower = jnp.where(seen, jnp.minimum(peak, window_peak), window_peak)
    factor, window_factor = jnp.where(seen, jnp.exp2(lower - peak), 0.0), jnp.exp2(lower - window_peak)
    subtract = lax.broadcast_in_dim(lower, shape, [0])
    if near:
        weights = jnp.exp2(scores * scale - subtract)
        added = sm90_reduce.sum_in_thread(weights)
    else:
        far = lax.broadcast_in_dim(jnp.where(seen, peak, NO_WEIGHT), shape, [0])
        weights = jnp.exp2(scores * scale - sm90_columns.where_columns(inside, subtract, far))
        weights = sm90_columns.where_columns(inside, weights, -weights)
        added = sm90_reduce.sum_in_thread(jnp.maximum(weights, 0.0))
        total += sm90_reduce.sum_in_thread(jnp.maximum(-weights, 0.0))
    total += added * factor
    window_total += added * window_factor
    own = peak, total, weights, *change, factor
    return own, (window_peak, window_total, weights, *window_change, window_factor)


def of_both(half, factors, near: bool):
    """The weights that each of two attentions gives to a block's values.

    Args:
      half: the weights of `attend_both`, rounded.
      factors: its factors.
      near: as it was called.
    """
    factor, window_factor = (lax.broadcast_in_dim(x.astype(half.dtype), half.shape, [0]) for x in factors)
    if near:
        return half * factor, half * window_factor
    inside = jnp.maximum(half, 0)
    return inside * factor + jnp.maximum(-half, 0), inside * window_factor
