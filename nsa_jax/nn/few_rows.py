"""A layer of a decode step whose products are kernels for few rows, in bfloat16 on one GPU.

They do what `Block.forward` leaves to the compiler, in the same order. Sums in float32 are rounded once less: the
output of attention and of the MLP are not rounded before they are added to the residual stream.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from nsa_jax.nn.layers import RMSNorm
from nsa_jax.nn.projection import Projected, add_padded_bias
from nsa_jax.nn.sharding import batch_axes, tensor_size
from nsa_jax.nn.transformer import Block
from nsa_jax.ops import pallas
from nsa_jax.ops.implementations import kernels_wanted

# A single row goes through so many times: a tile of `product` has as many rows, and they are read more quickly.
COPIES = 16


def serves(block: Block, batch: int) -> bool:
    """Whether `forward` does a layer's step for so many rows: on a GPU, or if kernels are asked for by name."""
    attention, mlp, config = block.attention, block.mlp, block.attention.config
    if not kernels_wanted(config.implementation) or config.dtype != jnp.bfloat16:
        return False
    if config.matmul_dtype or config.mlp_bias or batch_axes(batch) or tensor_size() > 1:
        return False
    return pallas.products_serve(batch, (*attention.w_out.shape, *mlp.w_out.shape))


class Stream(NamedTuple):
    """The residual stream between layers: x [B, D], or one row several times, and what is yet to be added to it."""

    x: jax.Array
    parts: jax.Array | None = None  # float32 [P, B, D]
    bias: jax.Array | None = None  # [D]

    def normed(self, norm: RMSNorm) -> tuple[jax.Array, jax.Array]:
        """x with all added, and its norm."""
        return pallas.add_and_norm(self.x, self.parts, self.bias, norm.scale[...], eps=norm.eps)


def forward(block: Block, stream: Stream, batch: int, attend: Callable[[Projected], tuple[jax.Array, Any]]):
    """One layer for one token per row.

    Args:
      block: a layer that `serves`, whose `w_in` of attention is padded to a multiple of `WIDTH_MULTIPLE` columns.
      stream: the layer's input.
      batch: B.
      attend: called with the projection of the normed input; returns the heads' outputs [B, 1, N, V] and anything else.

    Returns:
      The layer's output, and what `attend` returned beside the heads' outputs.
    """
    attention, mlp = block.attention, block.mlp

    def product(x: jax.Array, weights: nnx.Param, **kinds: bool) -> jax.Array:
        return pallas.product(x, weights[...].astype(x.dtype), **kinds)

    x, normed = stream.normed(block.norm_attention)
    attended, extra = attend(Projected(add_padded_bias(product(normed, attention.w_in), attention.b_in), batch))
    parts = product(attended.reshape(batch, -1), attention.w_out, in_parts=True)
    bias = None if attention.b_out is None else attention.b_out[...]
    x, normed = Stream(x, parts, bias).normed(block.norm_mlp)
    hidden = product(normed, mlp.w_in, gated=True)
    return Stream(x, product(hidden, mlp.w_out, in_parts=True)), extra
