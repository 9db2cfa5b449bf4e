"""Gradient of an embedding lookup without atomics: places are grouped by token, and rows of each are added in order.

XLA's scatter adds with atomics on a GPU, in an order that differs from run to run, and its deterministic form is a sort
followed by a scan over all rows, several times slower than the step can bear.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from nsa_jax.ops.kernels.readers import invert
from nsa_jax.ops.kernels.triton import triton_call

# A work item adds up to this many rows, so that a frequent token does not keep one program busy for long.
_CHUNK = 256
_ROWS = 16  # rows loaded at a time
_WIDTH = 256  # the most features that one program serves


def _sum_rows(count, load, width: int) -> jax.Array:
    """float32 [width]: the sum of rows 0 to count - 1; `load(places [_ROWS])` gives [_ROWS, width] of them."""
    place = lax.broadcasted_iota(jnp.int32, (_ROWS,), 0)

    def step(i, total):
        inside = i * _ROWS + place < count
        rows = load(jnp.where(inside, i * _ROWS + place, 0))
        return total + jnp.sum(jnp.where(inside[:, None], rows.astype(jnp.float32), 0.0), axis=0)

    return lax.fori_loop(0, (count + _ROWS - 1) // _ROWS, step, jnp.zeros((width,), jnp.float32))


def _items_kernel(order_ref, begin_ref, end_ref, grad_ref, out_ref, *, width):
    """order_ref [N], begin_ref, end_ref [W], grad_ref [N, D]; out_ref [W, D]: the sum of each work item's rows."""
    item, columns = pl.program_id(0), pl.ds(pl.program_id(1) * width, width)
    begin = begin_ref[item]

    def load(place):
        return grad_ref[order_ref[begin + place], columns]

    out_ref[item, columns] = _sum_rows(end_ref[item] - begin, load, width)


def _tokens_kernel(offset_ref, sums_ref, out_ref, *, width):
    """offset_ref [vocab + 1], sums_ref [W, D]; out_ref [vocab, D]: the sum of each token's work items."""
    token, columns = pl.program_id(0), pl.ds(pl.program_id(1) * width, width)
    first = offset_ref[token]

    def load(place):
        return sums_ref[first + place, columns]

    out_ref[token, columns] = _sum_rows(offset_ref[token + 1] - first, load, width).astype(out_ref.dtype)


def lookup_gradient(tokens: jax.Array, grad: jax.Array, vocab: int) -> jax.Array:
    """For every token the sum of the gradients at its places, added in float32 and in one order.

    Args:
      tokens: int32 [N]; those outside [0, vocab) are left out.
      grad: [N, D], D a multiple of 64.
      vocab: number of rows of the embedding.

    Returns:
      float32 [vocab, D].
    """
    width = math.gcd(grad.shape[1], _WIDTH)
    entries = jnp.where((tokens >= 0) & (tokens < vocab), tokens, vocab)
    lists = invert(entries[None], vocab, _CHUNK)
    order, begin, end, offset = lists.order[0], lists.begin[0], lists.end[0], lists.offset[0]
    columns = grad.shape[1] // width
    call = functools.partial(triton_call, num_warps=4, num_stages=1)
    sums = call(
        functools.partial(_items_kernel, width=width),
        out_shape=jax.ShapeDtypeStruct((begin.size, grad.shape[1]), jnp.float32),
        grid=(begin.size, columns),
        name="embedding_gradient_items",
    )(order, begin, end, grad)
    return call(
        functools.partial(_tokens_kernel, width=width),
        out_shape=jax.ShapeDtypeStruct((vocab, grad.shape[1]), jnp.float32),
        grid=(vocab, columns),
        name="embedding_gradient",
    )(offset, sums)
