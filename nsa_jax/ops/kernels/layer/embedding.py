"""Gradient of an embedding lookup without atomics: places are grouped by token, and rows of each are added in order.

XLA's scatter adds with atomics on a GPU, in an order that differs from run to run, and its deterministic form is a sort
followed by a scan over all rows, several times slower than the step can bear.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

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


class LookupSums(NamedTuple):
    """What the gradient of a lookup is added up from.

    Attributes:
      offset: int32 [vocab + 1], where the sums of each token begin.
      sums: float32 [W, D], sums of some of a token's gradients, grouped by token. W is bounded by the places.
    """

    offset: jax.Array
    sums: jax.Array


_call = functools.partial(triton_call, num_warps=4, num_stages=1)


def lookup_sums(tokens: jax.Array, grad: jax.Array, vocab: int) -> LookupSums:
    """The first step of `lookup_gradient`, of which `summed_rows` makes any rows."""
    width = math.gcd(grad.shape[1], _WIDTH)
    entries = jnp.where((tokens >= 0) & (tokens < vocab), tokens, vocab)
    lists = invert(entries[None], vocab, _CHUNK)
    order, begin, end, offset = lists.order[0], lists.begin[0], lists.end[0], lists.offset[0]
    sums = _call(
        functools.partial(_items_kernel, width=width),
        out_shape=jax.ShapeDtypeStruct((begin.size, grad.shape[1]), jnp.float32),
        grid=(begin.size, grad.shape[1] // width),
        name="embedding_gradient_items",
    )(order, begin, end, grad)
    return LookupSums(offset, sums)


def summed_rows(lookup: LookupSums, first: jax.Array | int = 0, count: int | None = None) -> jax.Array:
    """float32 [count, D]: the gradient of `count` tokens from `first` on; all by default."""
    offset, features = lookup.offset, lookup.sums.shape[1]
    if count is not None:
        offset = lax.dynamic_slice_in_dim(offset, first, count + 1)
    width = math.gcd(features, _WIDTH)
    return _call(
        functools.partial(_tokens_kernel, width=width),
        out_shape=jax.ShapeDtypeStruct((offset.size - 1, features), jnp.float32),
        grid=(offset.size - 1, features // width),
        name="embedding_gradient",
    )(offset, lookup.sums)


def lookup_gradient(tokens: jax.Array, grad: jax.Array, vocab: int) -> jax.Array:
    """For every token the sum of the gradients at its places, added in float32 and in one order.

    Args:
      tokens: int32 [N]; those outside [0, vocab) are left out.
      grad: [N, D], D a multiple of 64.
      vocab: number of rows of the embedding.

    Returns:
      float32 [vocab, D].
    """
    return summed_rows(lookup_sums(tokens, grad, vocab))
