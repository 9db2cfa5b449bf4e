"""The gated sum of the branches and its gradients: one pass over the arrays for each direction.

Left to the compiler, the three gradients of the gates took two passes, and the sum one at two thirds of the memory's
bandwidth.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from nsa_jax.ops.kernels.triton import pieces, triton_call


def _rows(rows: int, total: int):
    """The program's rows, int32 [rows]; past the end they repeat the last one."""
    return jnp.minimum(pl.program_id(0) * rows + lax.broadcasted_iota(jnp.int32, (rows,), 0), total - 1)


def _token_major(row, shape: tuple[int, ...], kv_heads: int):
    """Rows of [B, T, K * G] where `row` counts those of [B * K, T, G], which is `shape`."""
    if kv_heads == 1:
        return row
    length, group = shape[1:3]
    member, token, pair = row % group, row // group % length, row // (group * length)
    return ((pair // kv_heads * length + token) * kv_heads + pair % kv_heads) * group + member


def _sum_kernel(gate_ref, *refs, rows: int, total: int, shape, kv_heads: int):
    """gate_ref [R, 3], three branches [R, V]; out: their sum [R, V], its rows by token."""
    *branch_refs, out_ref = refs
    row = _rows(rows, total)
    out_row = _token_major(row, shape, kv_heads)
    gates = [gate_ref[row, i].astype(jnp.float32) for i in range(len(branch_refs))]
    for at, size in pieces(out_ref.shape[1]):
        column = pl.ds(at, size)
        parts = [g[:, None] * ref[row, column].astype(jnp.float32) for g, ref in zip(gates, branch_refs, strict=True)]
        out_ref[out_row, column] = sum(parts[1:], parts[0]).astype(out_ref.dtype)


def _gradient_kernel(grad_ref, *refs, branches: int, rows: int, total: int, shape, kv_heads: int):
    """grad_ref [R, V], rows by token, and three branches [R, V]; out: the gates' gradients [3, R].

    With several kv_heads also grad_ref's rows in the branches' order.
    """
    branch_refs, (d_gate_ref, *grad_out_ref) = refs[:branches], refs[branches:]
    row = _rows(rows, total)
    grad_row = _token_major(row, shape, kv_heads)
    sums = [jnp.zeros((rows,), jnp.float32) for _ in branch_refs]
    for at, size in pieces(grad_ref.shape[1]):
        column = pl.ds(at, size)
        grad = grad_ref[grad_row, column]
        for ref in grad_out_ref:
            ref[row, column] = grad
        grad = grad.astype(jnp.float32)
        sums = [
            s + jnp.sum(grad * ref[row, column].astype(jnp.float32), axis=1)
            for s, ref in zip(sums, branch_refs, strict=True)
        ]
    for i, value in enumerate(sums):
        d_gate_ref[i, row] = value


def _call(kernel, name: str, out_shape, *arrays, **static):
    total, v_dim = arrays[-1].shape
    rows = 1 << (max(16, min(64, 4096 // v_dim)).bit_length() - 1)
    return triton_call(
        functools.partial(kernel, rows=rows, total=total, **static),
        num_warps=4,
        num_stages=1,
        grid=(pl.cdiv(total, rows),),
        out_shape=out_shape,
        name=name,
    )(*arrays)


def _by_token(shape: tuple[int, ...], kv_heads: int) -> tuple[int, ...]:
    """The shape [B, T, K * G, V] of what is [B * K, T, G, V] by key/value head."""
    return (shape[0] // kv_heads, shape[1], shape[2] * kv_heads, shape[3])


def gated_sum(gates: jax.Array, branches, kv_heads: int = 1) -> jax.Array:
    """Sum of the branches, each times its gate, added in float32.

    Args:
      gates: [B * K, T, G, 3].
      branches: three arrays [B * K, T, G, V].
      kv_heads: K; 1 where the key/value heads are not batch entries.

    Returns:
      [B, T, K * G, V].
    """
    shape = branches[0].shape
    arrays = [x.reshape(-1, x.shape[-1]) for x in (gates, *branches)]
    out_shape = jax.ShapeDtypeStruct(arrays[1].shape, branches[0].dtype)
    out = _call(_sum_kernel, "nsa_gated_sum", out_shape, *arrays, shape=shape, kv_heads=kv_heads)
    return out.reshape(_by_token(shape, kv_heads))


def gate_gradients(branches, d_out: jax.Array, kv_heads: int = 1) -> tuple[jax.Array, jax.Array]:
    """Gradients of the gates.

    Args:
      branches: three arrays [B * K, T, G, V], `gated_sum`'s.
      d_out: [B, T, K * G, V], the cotangent of its result.
      kv_heads: K.

    Returns:
      float32 [3, B * K, T, G], and d_out as [B * K, T, G, V].
    """
    shape = branches[0].shape
    arrays = [x.reshape(-1, x.shape[-1]) for x in (d_out, *branches)]
    out_shape = [jax.ShapeDtypeStruct((len(branches), arrays[0].shape[0]), jnp.float32)]
    if kv_heads > 1:
        out_shape.append(jax.ShapeDtypeStruct(arrays[0].shape, d_out.dtype))
    static = dict(branches=len(branches), shape=shape, kv_heads=kv_heads)
    d_gates, *moved = _call(_gradient_kernel, "nsa_gate_gradients", out_shape, *arrays, **static)
    return d_gates.reshape(-1, *shape[:3]), moved[0].reshape(shape) if moved else d_out
