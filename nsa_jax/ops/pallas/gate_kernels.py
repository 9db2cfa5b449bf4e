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

from nsa_jax.ops.pallas.common import pieces, triton_call


def _rows(rows: int, total: int):
    """The program's rows, int32 [rows]; past the end they repeat the last one."""
    return jnp.minimum(pl.program_id(0) * rows + lax.broadcasted_iota(jnp.int32, (rows,), 0), total - 1)


def _sum_kernel(gate_ref, *refs, rows: int, total: int):
    """gate_ref [R, 3], three branches [R, V]; out: their sum [R, V]."""
    *branch_refs, out_ref = refs
    row = _rows(rows, total)
    gates = [gate_ref[row, i].astype(jnp.float32) for i in range(len(branch_refs))]
    for at, size in pieces(out_ref.shape[1]):
        column = pl.ds(at, size)
        parts = [g[:, None] * ref[row, column].astype(jnp.float32) for g, ref in zip(gates, branch_refs, strict=True)]
        out_ref[row, column] = sum(parts[1:], parts[0]).astype(out_ref.dtype)


def _gradient_kernel(grad_ref, *refs, rows: int, total: int):
    """grad_ref and three branches [R, V]; out: the gates' gradients [3, R]."""
    *branch_refs, d_gate_ref = refs
    row = _rows(rows, total)
    sums = [jnp.zeros((rows,), jnp.float32) for _ in branch_refs]
    for at, size in pieces(grad_ref.shape[1]):
        column = pl.ds(at, size)
        grad = grad_ref[row, column].astype(jnp.float32)
        sums = [
            s + jnp.sum(grad * ref[row, column].astype(jnp.float32), axis=1)
            for s, ref in zip(sums, branch_refs, strict=True)
        ]
    for i, value in enumerate(sums):
        d_gate_ref[i, row] = value


def _call(kernel, name: str, out_shape, *arrays):
    total, v_dim = arrays[-1].shape
    rows = 1 << (max(16, min(64, 4096 // v_dim)).bit_length() - 1)
    return triton_call(
        functools.partial(kernel, rows=rows, total=total),
        num_warps=4,
        num_stages=1,
        grid=(pl.cdiv(total, rows),),
        out_shape=out_shape,
        name=name,
    )(*arrays)


def gated_sum(gates: jax.Array, branches) -> jax.Array:
    """Sum of the branches [B, T, N, V], each times its gate of `gates` [B, T, N, 3], added in float32."""
    shape, dtype = branches[0].shape, branches[0].dtype
    arrays = [x.reshape(-1, x.shape[-1]) for x in (gates, *branches)]
    out_shape = jax.ShapeDtypeStruct(arrays[1].shape, dtype)
    return _call(_sum_kernel, "nsa_gated_sum", out_shape, *arrays).reshape(shape)


def gate_gradients(branches, d_out: jax.Array) -> jax.Array:
    """Gradients of the gates, float32 [B, T, N, 3], from three outputs and their sum's cotangent [B, T, N, V]."""
    arrays = [x.reshape(-1, x.shape[-1]) for x in (d_out, *branches)]
    out_shape = jax.ShapeDtypeStruct((len(branches), arrays[0].shape[0]), jnp.float32)
    d_gates = _call(_gradient_kernel, "nsa_gate_gradients", out_shape, *arrays)
    return jnp.moveaxis(d_gates.reshape(-1, *d_out.shape[:3]), 0, -1)
