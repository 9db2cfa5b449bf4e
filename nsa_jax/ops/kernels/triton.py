"""What all kernel families share: how a Pallas Triton kernel is called, on a GPU, ahead of time or interpreted."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from nsa_jax.ops.target import current_target


def interpreted() -> bool:
    """True where kernels cannot be compiled for the device at hand and run in Pallas's interpreter instead."""
    return not current_target().is_gpu


def barrier() -> None:
    """From here on all threads of this program can read what any of them has written."""
    if not interpreted():
        pltriton.debug_barrier()


# JAX announces the end of this backend each time such a kernel is lowered; kernels live in this folder alone so that
# it can be replaced, and users can do nothing about it.
warnings.filterwarnings(
    "ignore", message="The Pallas Triton backend is deprecated", category=DeprecationWarning, module="jax"
)


def triton_call(kernel, *, num_warps: int, num_stages: int, **kwargs: Any):
    """`pl.pallas_call` through the Triton backend: always with explicit compiler parameters, since the default
    backend of `pallas_call` differs between JAX versions."""
    call = pl.pallas_call(
        kernel,
        compiler_params=pltriton.CompilerParams(num_warps=num_warps, num_stages=num_stages),
        interpret=interpreted(),
        **kwargs,
    )

    def call_in_32_bits(*args):
        # With jax_enable_x64 the Python integers and sums of a kernel would be 64 bits wide, which Triton does not mix.
        with jax.enable_x64(False):
            return call(*args)

    return call_in_32_bits


def write_over(
    kernel, *inputs: jax.Array, outs: Sequence[jax.Array | jax.ShapeDtypeStruct], **kwargs: Any
) -> list[jax.Array]:
    """`triton_call` of a kernel that writes its outputs over its last inputs, `outs`.

    An output that is given as a shape alone is allocated for the kernel, which must write all of it and must not read
    it: another array takes its place among the inputs.
    """
    over = {len(inputs) + i: i for i, x in enumerate(outs) if isinstance(x, jax.Array)}
    call = triton_call(
        kernel,
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in outs],
        input_output_aliases=over,
        **kwargs,
    )
    return call(*inputs, *(x if isinstance(x, jax.Array) else inputs[0] for x in outs))


def _write_nothing(after_ref, out_ref) -> None:
    """Leaves its output as it was allocated."""


def empty(shape: tuple[int, ...], dtype: Any, after: jax.Array) -> jax.Array:
    """An array of any content, for kernels that write it in place, allocated when `after` is there.

    `lax.empty` depends on nothing, so XLA allocates those of all layers when a program begins. For 16 layers of 1B at
    65,536 tokens they held 5.6 GiB throughout the forward and the backward pass.
    """
    out_shape = jax.ShapeDtypeStruct(shape, dtype)
    call = triton_call(_write_nothing, num_warps=1, num_stages=1, grid=(1,), out_shape=out_shape, name="nsa_empty")
    return call(after.reshape(-1)[:1])


@jax.custom_jvp
def first_derivative(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """The arrays as they are, for the forward and backward passes of kernels, which cannot be differentiated again."""
    return arrays


@first_derivative.defjvp
def _refuse_second_derivative(primals, tangents):
    raise NotImplementedError(
        "second derivatives: the GPU kernels have first ones only. Fix: differentiate with implementation='xla', "
        "which has both"
    )


def pieces(dim: int) -> list[tuple[int, int]]:
    """Splits a head dim into (offset, size) with power-of-two sizes, which is all that Triton tiles can have."""
    out, offset = [], 0
    while offset < dim:
        size = 1 << ((dim - offset).bit_length() - 1)
        out.append((offset, size))
        offset += size
    return out


def dot(a: jax.Array, b: jax.Array, contract: tuple[int, int]) -> jax.Array:
    """Matrix product over dimensions (of a, of b), accumulated in float32; float32 operands keep float32 accuracy."""
    precision = None
    if a.dtype == jnp.float32:
        # Plain tf32 has 10 bits of mantissa; the three-pass product keeps float32's accuracy on the matrix units.
        precision = lax.Precision.HIGHEST if interpreted() else lax.DotAlgorithmPreset.TF32_TF32_F32_X3
    dims = (((contract[0],), (contract[1],)), ((), ()))
    return lax.dot_general(a, b, dims, precision=precision, preferred_element_type=jnp.float32)


def load_rows(ref, row, dim: int) -> tuple[jax.Array, ...]:
    """Rows of a [rows, dim] ref, in pieces."""
    return tuple(ref[row, pl.ds(offset, size)] for offset, size in pieces(dim))


def store_rows(ref, row, values) -> None:
    """Stores what `load_rows` loads, in the ref's dtype."""
    offset = 0
    for piece in values:
        ref[row, pl.ds(offset, piece.shape[1])] = piece.astype(ref.dtype)
        offset += piece.shape[1]


def row_delta(out: jax.Array, d_out: jax.Array) -> jax.Array:
    """What softmax's backward subtracts from every row: sum over V of out * d_out, float32 [B, T, N]."""
    return jnp.sum(out.astype(jnp.float32) * d_out.astype(jnp.float32), axis=-1)
