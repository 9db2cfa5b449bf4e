"""What few rows need in decoding beside attention: products with weights, and the residual stream with its norms.

A decode step multiplies one row per sequence with all weights of the model, which takes as long as reading them and
starting kernels does. The compiler splits such a product along its inner dimension, adds the parts up in a kernel of
its own, and applies SwiGLU in another. Here programs have narrow tiles of columns, so that one product without parts
fills a GPU, and SwiGLU is applied in it. What is narrow and deep is cut into parts still: the kernel that adds the
residual stream and normalises it adds them up.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from nsa_jax.ops.decode_tiles import ProductConfig
from nsa_jax.ops.kernels.decode.softmax_parts import iota, part_of
from nsa_jax.ops.kernels.triton import dot, triton_call


def _product_kernel(x_ref, w_ref, out_ref, *, rows, tile: ProductConfig, gated):
    """One part of a tile of columns. x_ref: [M, D], w_ref [D, F]; out: [M, F], or with `gated` [M, F/2]."""
    (total, dim), width = x_ref.shape, out_ref.shape[1]
    row = jnp.minimum(iota(rows), total - 1)  # rows behind the last one repeat it
    # The last tile may overlap the one before: both write the same numbers.
    first = jnp.minimum(pl.program_id(0) * tile.columns, width - tile.columns)
    tiles = [pl.ds(at, tile.columns) for at in ((first, width + first) if gated else (first,))]
    begin, end = part_of(dim // tile.inner, tile.parts, pl.program_id(1)) if tile.parts > 1 else (0, dim // tile.inner)

    def body(i, sums):
        inner = pl.ds(i * tile.inner, tile.inner)
        x = x_ref[row, inner]
        return tuple(s + dot(x, w_ref[inner, columns], (1, 0)) for s, columns in zip(sums, tiles, strict=True))

    sums = lax.fori_loop(begin, end, body, tuple(jnp.zeros((rows, tile.columns), jnp.float32) for _ in tiles))
    out = sums[0] / (1.0 + jnp.exp(-sums[0])) * sums[1] if gated else sums[0]
    out_ref[row, tiles[0]] = out.astype(out_ref.dtype)


@functools.partial(jax.jit, static_argnames=("gated", "in_parts", "tile"))
def product(x, w, *, gated: bool = False, in_parts: bool = False, tile: ProductConfig):
    """x @ w, accumulated in float32.

    Args:
      x: [M, D] bfloat16.
      w: [D, F] bfloat16.
      gated: SwiGLU: silu(left half of the product) * right half.
      in_parts: what follows adds up parts of the inner dimension.
      tile: how it is divided, from `decode_tiles.product_config`.

    Returns:
      [M, F] in x's dtype, or with `gated` [M, F/2]; with `in_parts` float32 [parts, M, F], whose sum is the product.
    """
    width = w.shape[1] // 2 if gated else w.shape[1]
    rows = max(16, pl.next_power_of_2(len(x)))
    out = jax.ShapeDtypeStruct((tile.parts, len(x), width), jnp.float32 if in_parts else x.dtype)
    made = triton_call(
        functools.partial(_product_kernel, rows=rows, tile=tile, gated=gated),
        grid=(pl.cdiv(width, tile.columns), tile.parts),
        in_specs=[pl.BlockSpec(array.shape, lambda i, part: (0, 0)) for array in (x, w)],
        out_specs=pl.BlockSpec((None, len(x), width), lambda i, part: (part, 0, 0)),
        out_shape=out,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        name="nsa_decode_product",
    )(x, w)
    return made if in_parts else made[0]


def _add_and_norm_kernel(*refs, names, eps):
    """One row.

    refs: x [M, D], scale [1, D], and of `names` parts [P, M, D] and bias [1, D]; out: sum and its norm [M, D].
    """
    x_ref, scale_ref, *others, sum_ref, normed_ref = refs
    given, row, dim = dict(zip(names, others, strict=True)), pl.program_id(0), x_ref.shape[1]
    column = iota(pl.next_power_of_2(dim))  # one tile, so that there is one sum
    inside = column < dim

    def load(ref, *index):
        return pltriton.load(ref.at[(*index, column)], mask=inside, other=0.0).astype(jnp.float32)

    terms = [load(x_ref, row)]
    if "parts" in given:
        count, rows, _ = given["parts"].shape
        terms += [load(given["parts"], i, row if rows > 1 else 0) for i in range(count)]
    if "bias" in given:
        terms.append(load(given["bias"], 0))
    scale = load(scale_ref, 0)
    total = functools.reduce(jnp.add, terms).astype(sum_ref.dtype)
    pltriton.store(sum_ref.at[row, column], total, mask=inside)
    wide = total.astype(jnp.float32)
    normed = wide * lax.rsqrt(jnp.sum(wide * wide) / dim + eps) * scale
    pltriton.store(normed_ref.at[row, column], normed.astype(normed_ref.dtype), mask=inside)


@functools.partial(jax.jit, static_argnames="eps")
def add_and_norm(x, parts, bias, scale, *, eps: float):
    """The residual stream with what is added to it, and its RMSNorm.

    Args:
      x: [M, D] bfloat16.
      parts: float32 [P, M, D] whose sum is added, or None. With M = 1 it is added to all rows of x.
      bias: [D] that is added, or None.
      scale: [D] of the norm.
      eps: that of the norm.

    Returns:
      Their sum in x's dtype, rounded once, and RMSNorm of what was rounded; [M, D] both.
    """
    given = {"parts": parts, "bias": None if bias is None else bias[None]}
    given = {name: array for name, array in given.items() if array is not None}
    arrays = (x, scale[None], *given.values())
    return triton_call(
        functools.partial(_add_and_norm_kernel, names=tuple(given), eps=eps),
        grid=(len(x),),
        in_specs=[pl.BlockSpec(array.shape, lambda i, ndim=array.ndim: (0,) * ndim) for array in arrays],
        out_specs=[pl.BlockSpec(x.shape, lambda i: (0, 0))] * 2,
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype)] * 2,
        num_warps=4,
        num_stages=1,
        name="nsa_decode_norm",
    )(*arrays)
