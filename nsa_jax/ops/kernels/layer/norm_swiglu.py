"""Gradients of RMSNorm and of SwiGLU's product: one pass over the arrays each.

Left to the compiler, a norm's backward pass reads its inputs twice, first for the sums of its rows, then for what they
are needed for, and the gradients of SwiGLU's two halves are arrays of their own, so that the product before them has a
gradient in two parts.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from nsa_jax.ops.kernels.triton import load_rows, pieces, store_rows, triton_call

# Programs of the norm's kernel: each adds up its rows' gradient of the scale by itself. Eight to sixteen of a warp fit
# a multiprocessor, of which GPUs have 108 (A100) to 132 (H100, H200). Of 131,072 rows of 768 the H200 read and wrote
# 4.09 TB/s with 1,024 programs of two rows at a time, 4.05 with 2,048; 3.8 and 3.5 with one row.
_NORM_PROGRAMS = 1024
_NORM_ROWS, _NORM_ROWS_UP_TO = 2, 768  # so many at a time where they have this many features or fewer, else one
_SWIGLU_TILE = 4096


def _row_sums(parts: Iterable[jax.Array]) -> jax.Array:
    """Sums [rows, 1] of rows in parts [rows, size]."""
    return functools.reduce(jnp.add, [jnp.sum(part, axis=1) for part in parts])[:, None]


def _norm_kernel(x_ref, scale_ref, grad_ref, passed_ref, d_x_ref, d_scale_ref, *, rows, steps, total, eps):
    """x_ref, grad_ref, passed_ref [R, D], scale_ref [1, D]; out: d_x [R, D], d_scale [programs, D]."""
    dim = x_ref.shape[1]
    first = pl.program_id(0) * steps * rows + lax.broadcasted_iota(jnp.int32, (rows,), 0)
    scale = load_rows(scale_ref, 0, dim)

    def load(i):
        row = jnp.minimum(first + i * rows, total - 1)
        return [load_rows(ref, row, dim) for ref in (x_ref, grad_ref, passed_ref)]

    def step(i, carry):
        loaded, d_scale = carry
        following = load(i + 1)  # on their way while these are worked on
        x, grad, passed = [[part.astype(jnp.float32) for part in parts] for parts in loaded]
        row = first + i * rows
        inside = (row < total).astype(jnp.float32)[:, None]
        inverse = lax.rsqrt(_row_sums(a * a for a in x) / dim + eps)
        normed = [a * inverse for a in x]
        scaled = [g * s[None, :] for g, s in zip(grad, scale, strict=True)]
        along = _row_sums(n * g for n, g in zip(normed, scaled, strict=True)) / dim
        d_x = [(g - n * along) * inverse + p for n, g, p in zip(normed, scaled, passed, strict=True)]
        store_rows(d_x_ref, jnp.minimum(row, total - 1), d_x)
        d_scale = [acc + jnp.sum(n * g * inside, axis=0) for acc, n, g in zip(d_scale, normed, grad, strict=True)]
        return following, d_scale

    zeros = [jnp.zeros((size,), jnp.float32) for _, size in pieces(dim)]
    _, d_scale = lax.fori_loop(0, steps, step, (load(0), zeros))
    store_rows(d_scale_ref, pl.program_id(0) + jnp.zeros((1,), jnp.int32), [part[None, :] for part in d_scale])


def rms_norm_gradients(
    x: jax.Array, scale: jax.Array, grad: jax.Array, passed: jax.Array, eps: float
) -> tuple[jax.Array, jax.Array]:
    """Gradients of y = x / sqrt(mean(x^2) + eps) * scale, computed in float32.

    Args:
      x: [R, D].
      scale: float32 [D].
      grad: [R, D], the cotangent of y.
      passed: [R, D], added to the gradient of x before it is rounded.
      eps: added to the mean square.

    Returns:
      The gradient of x [R, D] in x's dtype, and shares of the scale's, float32 [programs, D], to be added up.
    """
    total, dim = x.shape
    rows = _NORM_ROWS if dim <= _NORM_ROWS_UP_TO else 1
    programs = min(pl.cdiv(total, rows), _NORM_PROGRAMS)
    steps = pl.cdiv(total, rows * programs)
    programs = pl.cdiv(total, rows * steps)
    return triton_call(
        functools.partial(_norm_kernel, rows=rows, steps=steps, total=total, eps=eps),
        num_warps=min(max(pl.next_power_of_2(dim) // 1024, 1), 8),
        num_stages=1,
        grid=(programs,),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype), jax.ShapeDtypeStruct((programs, dim), jnp.float32)],
        name="rms_norm_gradients",
    )(x, scale[None], grad, passed)


def _swiglu_kernel(both_ref, grad_ref, d_both_ref, *hidden_ref, rows: int, columns: int, total: int):
    """both_ref [R, 2M], grad_ref [R, M]; out: d_both [R, 2M], perhaps hidden [R, M]."""
    width = grad_ref.shape[1]
    row = jnp.minimum(pl.program_id(1) * rows + lax.broadcasted_iota(jnp.int32, (rows,), 0), total - 1)
    first, second = (pl.ds(pl.program_id(0) * columns + at, columns) for at in (0, width))
    gate, up, grad = (
        ref[row, at].astype(jnp.float32) for ref, at in ((both_ref, first), (both_ref, second), (grad_ref, first))
    )
    sigmoid = jax.nn.sigmoid(gate)
    silu = gate * sigmoid
    d_both_ref[row, first] = (grad * up * (sigmoid + silu * (1.0 - sigmoid))).astype(d_both_ref.dtype)
    d_both_ref[row, second] = (grad * silu).astype(d_both_ref.dtype)
    for ref in hidden_ref:
        ref[row, first] = (silu * up).astype(ref.dtype)


def swiglu_gradients(both: jax.Array, grad: jax.Array, with_product: bool) -> tuple[jax.Array, ...]:
    """Gradients of gate and up in SwiGLU's product silu(gate) * up, computed in float32.

    Args:
      both: [R, 2M], gate and up beside each other.
      grad: [R, M], the cotangent of the product.
      with_product: compute the product again too.

    Returns:
      The gradient [R, 2M] of `both`, in its dtype, and with_product the product [R, M].
    """
    total, width = grad.shape
    columns = min(width & -width, 512)
    rows = _SWIGLU_TILE // columns
    out_shape = [jax.ShapeDtypeStruct(both.shape, both.dtype), jax.ShapeDtypeStruct(grad.shape, both.dtype)]
    return triton_call(
        functools.partial(_swiglu_kernel, rows=rows, columns=columns, total=total),
        num_warps=4,
        num_stages=1,
        grid=(width // columns, pl.cdiv(total, rows)),
        out_shape=out_shape if with_product else out_shape[:1],
        # A program reads an element and then writes it, unless rows past the end repeat the last one.
        input_output_aliases={0: 0} if total % rows == 0 else {},
        name="swiglu_gradients",
    )(both, grad)
