"""What all kernel families share: how a Pallas Triton kernel is called, on a GPU, ahead of time or interpreted."""

from __future__ import annotations

import warnings
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from nsa_jax.ops.target import current_target

LOG2E = 1.4426950408889634
LN2 = 0.6931471805599453


def interpreted() -> bool:
    """True where kernels cannot be compiled for the device at hand and run in Pallas's interpreter instead."""
    return not current_target().is_gpu


# JAX announces the end of this backend each time such a kernel is lowered; kernels live in this folder alone so that
# it can be replaced, and users can do nothing about it.
warnings.filterwarnings(
    "ignore", message="The Pallas Triton backend is deprecated", category=DeprecationWarning, module="jax"
)


def triton_call(kernel, *, num_warps: int, num_stages: int, **kwargs: Any):
    """`pl.pallas_call` through the Triton backend: always with explicit compiler parameters, since the default
    backend of `pallas_call` differs between JAX versions."""
    return pl.pallas_call(
        kernel,
        compiler_params=pltriton.CompilerParams(num_warps=num_warps, num_stages=num_stages),
        interpret=interpreted(),
        **kwargs,
    )


def row_delta(out: jax.Array, d_out: jax.Array) -> jax.Array:
    """What softmax's backward subtracts from every row: sum over V of out * d_out, float32 [B, T, N]."""
    return jnp.sum(out.astype(jnp.float32) * d_out.astype(jnp.float32), axis=-1)
