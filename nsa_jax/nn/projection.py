"""The fused projection of an attention layer: one matrix product, cut into queries, keys, values and gates."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

from nsa_jax.nn.config import ModelConfig
from nsa_jax.nn.layers import product
from nsa_jax.nn.sharding import TENSOR, constrain_tensor, constrain_tokens, on_shards, tensor_size, token_spec
from nsa_jax.ops import checks
from nsa_jax.ops.target import current_target

# A matrix product whose width is no multiple of this misses the fast tensor-core kernels.
WIDTH_MULTIPLE = 16


def _cut(x: jax.Array, widths: Iterable[int]) -> list[jax.Array]:
    """Pieces of the given widths along the last axis; what is beyond them is dropped.

    `lax.split` is differentiated as one concatenation, slices as a sum of padded arrays, which took four times as long.
    """
    widths = list(widths)
    rest = x.shape[-1] - sum(widths)
    return list(jax.lax.split(x, [*widths, rest] if rest else widths, axis=-1))[: len(widths)]


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _cut_activations(x: jax.Array, widths: tuple[int, ...], total: int) -> list[jax.Array]:
    """As `_cut` of x [..., total]; each piece's gradient is computed by itself before they are put together.

    Without this XLA fuses the producers of all pieces (sums of branches, RoPE backwards) into one kernel that selects
    per element: 0.8 ms where the memory traffic needs 0.3. Writing the pieces into a padded first one took as long.
    """
    return _cut(x, widths)


def _cut_fwd(x, widths, total):
    return _cut(x, widths), None


def _cut_bwd(widths, total, _, gradients):
    pieces = lax.optimization_barrier(gradients)
    missing = total - sum(piece.shape[-1] for piece in pieces)
    whole = jnp.concatenate([*pieces, jnp.zeros((*pieces[0].shape[:-1], missing), pieces[0].dtype)], axis=-1)
    # Without this constraint XLA picks a feature-major layout for the weight gradient and copies the activation. The
    # constraint is a custom call that XLA does not partition: outside `on_shards` each device would gather the batch.
    row_major = Layout(tuple(range(whole.ndim)))
    tokens = token_spec(*whole.shape[:2])
    return (on_shards(lambda x: with_layout_constraint(x, row_major), (whole,), (tokens,), tokens),)


_cut_activations.defvjp(_cut_fwd, _cut_bwd)


class Projected(NamedTuple):
    """The projection of one token per row, made beforehand: of `batch` rows, of which `array` [rows, F] may have more.

    It takes the place of the normed input where a layer is given its tokens one by one.
    """

    array: jax.Array
    batch: int


def _padded_bias(bias: nnx.Param, dtype: jnp.dtype, width: int) -> jax.Array:
    return jnp.pad(bias[...].astype(dtype), (0, width - bias.shape[0]))


def add_padded_bias(x: jax.Array, bias: nnx.Param | None) -> jax.Array:
    """x [..., F] plus a bias that may be shorter, in x's dtype; x itself without one."""
    return x if bias is None else x + _padded_bias(bias, x.dtype, x.shape[-1])


def fused_product(x: jax.Array, kernel: nnx.Param, bias: nnx.Param | None, config: ModelConfig) -> jax.Array:
    """x @ kernel + bias, with zeros behind it up to a multiple of `WIDTH_MULTIPLE`; the bias may be shorter.

    In float8, the columns of NSA's gates are a product of their own in the compute dtype.
    """
    weights = jnp.pad(kernel[...].astype(config.dtype), ((0, 0), (0, -kernel.shape[1] % WIDTH_MULTIPLE)))
    if config.matmul_dtype and config.attention == "nsa":
        *others, width = projection_widths(config, "nsa")
        gates = slice(sum(others), sum(others) + width)
        out = product(x, weights.at[:, gates].set(0), config)
        out = out.at[..., gates].set(x @ weights[:, gates])
    else:
        out = product(x, weights, config)
    return add_padded_bias(out, bias)


def project(
    x: jax.Array | Projected,
    kernel: nnx.Param,
    bias: nnx.Param | None,
    config: ModelConfig,
    widths: tuple[int, ...],
) -> list[jax.Array]:
    """x @ kernel + bias in one product, cut along the last axis into pieces of the given widths.

    A bias that is shorter than the widths ends with one of the pieces.
    """
    if isinstance(x, Projected):
        return _cut(x.array[: x.batch, None], widths)
    dtype, num_kv_heads = config.dtype, config.num_kv_heads
    if tensor_size() > 1 and num_kv_heads % tensor_size() == 0:
        pieces = _project_by_group(x, kernel[...].astype(dtype), widths, num_kv_heads)
        if bias is None:
            return pieces
        biases = _cut(_padded_bias(bias, dtype, sum(widths)), widths)
        return [piece + part for piece, part in zip(pieces, biases, strict=True)]
    out = fused_product(x, kernel, bias, config)
    # Elsewhere it would gain nothing, and a custom gradient has no forward mode.
    return _cut_activations(out, widths, out.shape[-1]) if current_target().is_gpu else _cut(out, widths)


def _project_by_group(x: jax.Array, kernel: jax.Array, widths: tuple[int, ...], num_kv_heads: int) -> list[jax.Array]:
    """The same with the product split over the tensor axis.

    Columns are put in the order of the key/value heads, each with its query heads and gates, so that a device's share
    of them is whole heads. Every piece of the stored matrix is cut by itself: its columns are ordered by head already.
    """
    rows = kernel.shape[0]
    grouped = [piece.reshape(rows, num_kv_heads, -1) for piece in _cut(kernel, widths)]  # [D, K, width / K]
    shares = [piece.shape[-1] for piece in grouped]
    padding = -sum(shares) % (WIDTH_MULTIPLE // math.gcd(WIDTH_MULTIPLE, num_kv_heads // tensor_size()))
    fused = jnp.pad(jnp.concatenate(grouped, axis=-1), ((0, 0), (0, 0), (0, padding)))
    out = jnp.einsum("btd,dkf->btkf", x, constrain_tensor(fused, 1))
    pieces = _cut(constrain_tokens(out, TENSOR), shares)
    return [piece.reshape(*piece.shape[:2], -1) for piece in pieces]


def split_heads(x: jax.Array, count: int) -> jax.Array:
    """[B, T, count * F] -> [B, T, count, F]."""
    return x.reshape(*x.shape[:2], count, -1)


def row_positions(x: jax.Array, positions: jax.Array | None) -> jax.Array:
    """The positions given, or 0..T-1.

    Raises:
      ValueError: they are not integers [T] or [B, T].
    """
    if positions is None:
        return jnp.arange(x.shape[1], dtype=jnp.int32)
    positions = jnp.asarray(positions)
    sizes = {"B": x.shape[0], "T": x.shape[1]}
    checks.integers("positions", positions, "T" if positions.ndim < 2 else "BT", sizes, "x")
    return positions


def check_input(x: jax.Array, segment_start: jax.Array | None, config: ModelConfig) -> None:
    """Raises ValueError if x is not [B, T, D] in the compute dtype, or `segment_start` not integers [B, T]."""
    sizes = {"D": config.dim}
    checks.array("x", x, "BTD", sizes, "config.dim")
    checks.require(min(x.shape) >= 1, f"x has shape {tuple(x.shape)}: every size must be >= 1")
    message = f"x has dtype {x.dtype}: must be {config.dtype}; cast it, or set config.compute_dtype"
    checks.require(x.dtype == config.dtype, message)
    checks.segments(segment_start, sizes, "x")


def projection_widths(config: ModelConfig, attention: str) -> tuple[int, ...]:
    """Columns of the matrices that a layer's `w_in` consists of: queries, keys and values by turns, and NSA's gates."""
    n, k, h, v = config.num_heads, config.num_kv_heads, config.head_dim, config.value_head_dim
    if attention != "nsa":
        return (n * h, k * h, k * v)
    branches = len(config.branches)
    return (n * h, *(k * h, k * v) * (1 if config.shared_kv else branches), branches * n)
