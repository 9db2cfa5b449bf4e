"""The parts that attention and transformer share: RMSNorm, SwiGLU, dropout and the compressor phi."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from nsa_jax.config import NSAConfig
from nsa_jax.nn import float8
from nsa_jax.nn.config import ModelConfig
from nsa_jax.nn.sharding import (
    TENSOR,
    Pieces,
    constrain_tensor,
    constrain_tokens,
    fetch,
    fsdp_dimension,
    give_back,
    on_shards,
    parameter_spec,
    tensor_size,
    token_spec,
)
from nsa_jax.ops import blocks, checks
from nsa_jax.ops.nsa import mean_compress
from nsa_jax.ops.pallas import layer_kernels_serve
from nsa_jax.ops.target import current_target

# SwiGLU's hidden values, as remat policies name them.
HIDDEN = "swiglu_hidden"


def init_normal(rngs: nnx.Rngs, shape: tuple[int, ...], std: float, config: ModelConfig) -> nnx.Param:
    """A parameter drawn from a normal distribution with standard deviation `std`."""
    return nnx.Param(std * jax.random.normal(rngs.params(), shape, jnp.dtype(config.param_dtype)))


def init_bias(features: int, config: ModelConfig) -> nnx.Param:
    """A bias of zeros."""
    return nnx.Param(jnp.zeros((features,), jnp.dtype(config.param_dtype)))


def product(x: jax.Array, w: jax.Array, config: ModelConfig) -> jax.Array:
    """x [..., D] times w [D, F], in float8 if the config says so."""
    if config.matmul_dtype == "float8":
        return float8.product(x, w)
    if x.size == x.shape[-1] and current_target().is_gpu:
        # XLA rewrites the product of one row as D * F numbers, rounded and written to memory, and their sum.
        return (jnp.broadcast_to(x.reshape(1, -1), (2, x.size)) @ w)[0].reshape(*x.shape[:-1], -1)
    return x @ w


def add_bias(x: jax.Array, bias: nnx.Param | None) -> jax.Array:
    """x [..., F] plus a bias [F], in x's dtype; x itself without one."""
    return x if bias is None else x + bias[...].astype(x.dtype)


def soft_cap(logits: jax.Array, cap: float) -> jax.Array:
    """cap * tanh(logits / cap), which lies within (-cap, cap) (arXiv 2408.00118, section 2); 0 changes nothing."""
    return cap * jnp.tanh(logits / cap) if cap else logits


def dropout(x: jax.Array, rate: float, key: jax.Array | None) -> jax.Array:
    """Sets a share `rate` of x to zero and scales the rest up; does nothing without a key."""
    if key is None or rate == 0.0:
        return x
    keep = jax.random.bernoulli(key, 1.0 - rate, x.shape)
    return jnp.where(keep, x / (1.0 - rate), jnp.zeros_like(x))


def lookup(table: jax.Array, index: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """table[index] in `dtype`; 0 where the index is outside."""
    inside = (index >= 0) & (index < len(table))
    return jnp.where(inside[..., None], table[jnp.where(inside, index, 0)].astype(dtype), 0)


# XLA's gradient of a lookup adds with atomics on GPUs: runs differ.
@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _rows(table: jax.Array, index: jax.Array, dtype: jnp.dtype) -> jax.Array:
    return lookup(table, index, dtype)


def _rows_fwd(table, index, dtype):
    return lookup(table, index, dtype), (index, jnp.zeros((len(table), 0), table.dtype))


def _rows_bwd(dtype, residuals, grad):
    from nsa_jax.ops.kernels.layer.embedding import lookup_gradient

    index, like = residuals  # the latter only carries the table's length and dtype
    total = lookup_gradient(index.reshape(-1), grad.reshape(-1, grad.shape[-1]), len(like))
    return total.astype(like.dtype), None


_rows.defvjp(_rows_fwd, _rows_bwd)


def _added_rows(number: jax.Array, grad: jax.Array, first: jax.Array | int, count: int) -> jax.Array:
    """float32 [count, D]: sums of those grad [N, D] whose number [N] is `first`, first + 1 and so on."""
    place = jnp.where(number >= first, number - first, count)  # "drop" leaves out what is not below count
    return jnp.zeros((count, grad.shape[1]), jnp.float32).at[place].add(grad.astype(jnp.float32), mode="drop")


# The gradient of a table that fsdp splits is made in pieces where it is large.
@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _fetched_rows(shard: jax.Array, index: jax.Array, dtype: jnp.dtype, dimension: int) -> jax.Array:
    return lookup(fetch(shard.astype(dtype), dimension), index, dtype)


def _fetched_rows_fwd(shard, index, dtype, dimension):
    return _fetched_rows(shard, index, dtype, dimension), (index, shard)


def _fetched_rows_bwd(dtype, dimension, residuals, grad):
    from nsa_jax.ops.kernels.layer.embedding import lookup_sums, summed_rows

    index, shard = residuals
    pieces = Pieces.of(shard.shape, dimension)
    number, grad = pieces.number(index.reshape(-1)), grad.reshape(-1, grad.shape[-1])
    if layer_kernels_serve(grad.shape[1]):
        rows = functools.partial(summed_rows, lookup_sums(number, grad, pieces.owners * pieces.own))
    else:
        rows = functools.partial(_added_rows, number, grad)

    def piece(_, start, width):
        part = rows(pieces.owners * start, pieces.owners * width)
        return None, give_back(part.astype(shard.dtype), dimension)

    return pieces.over(piece, None)[1], None


_fetched_rows.defvjp(_fetched_rows_fwd, _fetched_rows_bwd)


def embed(table: Float[Array, "vocab D"], tokens: Int[Array, "B T"], dtype: jnp.dtype) -> Float[Array, "B T D"]:
    """Rows of the embedding for tokens in [0, vocab), in `dtype`.

    Every device of a mesh looks up its own tokens. A table that fsdp splits is fetched in `dtype`; where a tensor axis
    splits the vocabulary, devices look up in their own rows, and the results are summed. The gradient of the table is
    added in float32 in an order that is the same in every run. Where fsdp splits the table, it is made in pieces of at
    most `sharding.PIECE_BYTES`, of which each device receives its own part.
    """
    if tokens.dtype != jnp.int32:  # a small type may not hold the vocabulary's size
        tokens = checks.at_most(tokens, 2**31 - 1)
    stored, spec = parameter_spec(table.shape, 0), token_spec(*tokens.shape)
    split = tensor_size() > 1 and len(table) % tensor_size() == 0
    vocab = len(table) // tensor_size() if split else len(table)
    dimension = fsdp_dimension(stored)

    def local(shard, tokens):
        index = tokens - jax.lax.axis_index(TENSOR) * vocab if split else tokens
        if dimension is not None:
            rows = _fetched_rows(shard, index, dtype, dimension)
        else:
            rows = (_rows if layer_kernels_serve(table.shape[1]) else lookup)(shard, index, dtype)
        return rows[None] if split else rows

    if not split:
        return on_shards(local, (table, tokens), (stored, spec), spec)
    # Summed outside: there the gradient of the sum needs no communication, while that of a `psum` is another `psum`.
    shares = on_shards(local, (table, tokens), (stored, spec), P(TENSOR, *spec))
    return jax.lax.reduce_sum(shares, (0,))


def _normed(x: jax.Array, scale: jax.Array, eps: float, dtype: jnp.dtype) -> jax.Array:
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    return (wide * scale.astype(jnp.float32)).astype(dtype)


# The same with a backward pass of one kernel, which also adds the gradient that reaches x past the norm.
@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _pass_and_norm(x: jax.Array, scale: jax.Array, eps: float, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
    return x, _normed(x, scale, eps, dtype)


def _pass_and_norm_fwd(x, scale, eps, dtype):
    return (x, _normed(x, scale, eps, dtype)), (x, scale)


def _pass_and_norm_bwd(eps, dtype, residuals, gradients):
    from nsa_jax.ops.kernels.layer import norm_swiglu

    x, scale = residuals
    passed, grad = gradients

    def local(x, scale, grad, passed):
        flat, flat_grad, flat_passed = (a.reshape(-1, a.shape[-1]) for a in (x, grad, passed))
        scale = scale.astype(jnp.float32)
        d_x, shares = norm_swiglu.rms_norm_gradients(flat, scale, flat_grad, flat_passed, eps)
        return d_x.reshape(x.shape), shares[None, None]

    spec = token_spec(*x.shape[:2])
    d_x, shares = on_shards(local, (x, scale, grad, passed), (spec, P(), spec, spec), (spec, spec))
    return d_x, shares.sum((0, 1, 2)).astype(scale.dtype)


_pass_and_norm.defvjp(_pass_and_norm_fwd, _pass_and_norm_bwd)


class RMSNorm(nnx.Module):
    """Root mean square normalisation of the last axis with a learned scale; statistics in float32.

    Attributes:
      scale: [features], ones at first.
    """

    def __init__(self, config: ModelConfig, features: int = 0):
        """A norm of `features`; 0 means the model's width D."""
        self.scale = nnx.Param(jnp.ones((features or config.dim,), jnp.dtype(config.param_dtype)))
        self.eps = config.norm_eps
        self.dtype = config.dtype

    def __call__(self, x: Float[Array, "... F"]) -> Float[Array, "... F"]:
        """Normalises the last axis; returns the compute dtype."""
        return _normed(x, self.scale[...], self.eps, self.dtype)

    def beside(self, x: Float[Array, "B T D"]) -> tuple[Float[Array, "B T D"], Float[Array, "B T D"]]:
        """x itself and x normalised: for a residual stream, whose two gradients are added by the norm's kernel."""
        if layer_kernels_serve(x.shape[-1]):
            return _pass_and_norm(x, self.scale[...], self.eps, self.dtype)
        return x, self(x)


def _gated(gate: jax.Array, up: jax.Array) -> jax.Array:
    return jax.nn.silu(gate) * up


def _gated_product_plain(both: jax.Array, w_out: jax.Array, config: ModelConfig) -> jax.Array:
    return product(_gated(*jnp.split(both, 2, axis=-1)), w_out, config)


# All that the backward pass needs of gate and up, which are one array [B, T, 2M], is made in one kernel. Left to the
# compiler it is three over the same arrays, and gate and up have a gradient each, from which that of the product before
# is put together: all of it copied, or added up from two products.
@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _gated_product(both: jax.Array, w_out: jax.Array, keep: bool, config: ModelConfig) -> jax.Array:
    """`_gated_product_plain`; with `keep`, hidden values are kept for the backward pass rather than computed again."""
    return _gated_product_plain(both, w_out, config)


def _gated_product_fwd(both, w_out, keep, config):
    hidden = _gated(*jnp.split(both, 2, axis=-1))
    if keep:
        hidden = checkpoint_name(hidden, HIDDEN)
    return product(hidden, w_out, config), (both, hidden if keep else None, w_out)


def _gated_product_bwd(keep, config, residuals, d_out):
    from nsa_jax.ops.kernels.layer import norm_swiglu

    both, hidden, w_out = residuals
    rounded = config.matmul_dtype == "float8"
    d_hidden = float8.input_gradient(d_out, w_out) if rounded else d_out @ w_out.T

    def local(both, d_hidden):
        flat, grad = (a.reshape(-1, a.shape[-1]) for a in (both, d_hidden))
        return tuple(a.reshape(*both.shape[:2], -1) for a in norm_swiglu.swiglu_gradients(flat, grad, not keep))

    spec = token_spec(*both.shape[:2])
    d_both, *again = on_shards(local, (both, d_hidden), (spec, spec), (spec,) * (1 if keep else 2))
    hidden = hidden if keep else again[0]
    d_w = float8.weight_gradient(hidden, d_out) if rounded else jnp.einsum("...m,...d->md", hidden, d_out)
    return d_both, d_w


_gated_product.defvjp(_gated_product_fwd, _gated_product_bwd)


class SwiGLU(nnx.Module):
    """silu(x W_gate) * (x W_up), projected back: the MLP of a block. W_gate and W_up are one matrix.

    Attributes:
      w_in: [D, 2M].
      w_out: [M, D].
      b_in, b_out: [2M] and [D], added to the products; None without `config.mlp_bias`.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.w_in = init_normal(rngs, (config.dim, 2 * config.mlp_dim), config.init_std, config)
        self.w_out = init_normal(rngs, (config.mlp_dim, config.dim), config.residual_std, config)
        self.b_in = init_bias(2 * config.mlp_dim, config) if config.mlp_bias else None
        self.b_out = init_bias(config.dim, config) if config.mlp_bias else None
        self.config, self.dtype = config, config.dtype
        # Where the products before are kept. Where they are not, computing this again takes a pass of its own.
        self.keep = config.keeps_products

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Applies the MLP to each token."""
        return add_bias(self._products(x), self.b_out)

    def _products(self, x: jax.Array) -> jax.Array:
        w_in, w_out = self.w_in[...].astype(self.dtype), self.w_out[...].astype(self.dtype)
        if tensor_size() > 1:  # a device's share of the fused matrix is the same columns of both halves
            halves = constrain_tensor(w_in.reshape(w_in.shape[0], 2, -1), 2)
            hidden = jnp.einsum("btd,dcm->btcm", x, halves)
            if self.b_in is not None:
                hidden = hidden + self.b_in[...].astype(self.dtype).reshape(2, -1)
            hidden = constrain_tokens(hidden, None, TENSOR)
            return _gated(hidden[:, :, 0], hidden[:, :, 1]) @ w_out
        both = add_bias(product(x, w_in, self.config), self.b_in)
        if layer_kernels_serve(w_out.shape[0]):
            return _gated_product(both, w_out, self.keep, self.config)
        return _gated_product_plain(both, w_out, self.config)


class MLPCompressor(nnx.Module):
    """The learned compressor phi: l tokens of a block become one key or value (paper eq. 7).

    phi(block) = mean(block) + W_2 silu(W_1 flatten(block + intra-block position embedding) + b_1), the same for every
    key/value head. The mean is a shortcut that the paper does not have: with W_2 small at first, selection starts from
    mean-pooled keys instead of from noise.
    """

    def __init__(self, config: ModelConfig, features: int, *, rngs: nnx.Rngs):
        length, hidden = config.nsa.compress_block, 2 * features
        self.position = init_normal(rngs, (length, features), config.init_std, config)
        self.w_1 = init_normal(rngs, (length, features, hidden), (length * features) ** -0.5, config)
        self.b_1 = nnx.Param(jnp.zeros((hidden,), jnp.dtype(config.param_dtype)))
        self.w_2 = init_normal(rngs, (hidden, features), config.init_std, config)
        self.nsa = config.nsa
        self.dtype = config.dtype

    def __call__(self, x: Float[Array, "B S K H"]) -> Float[Array, "B C K H"]:
        """Compresses every block of x.

        Neighbouring blocks share l - d tokens. W_1 is cut into l/d pieces of d rows. One product applies all of them to
        every run of d tokens, and a block adds up the results it covers: the overlapping blocks are never gathered, and
        what is cut and shifted is as wide as the hidden layer, not as the runs.
        """
        stride, overlap = self.nsa.compress_stride, self.nsa.compress_block // self.nsa.compress_stride
        batch, length, heads, features = x.shape
        count = blocks.num_compressed(length, self.nsa)
        if count == 0:
            return jnp.zeros((batch, 0, heads, features), x.dtype)
        w_1 = self.w_1[...].astype(self.dtype)
        runs = x[:, : (count + overlap - 1) * stride].reshape(batch, -1, stride, heads, features)
        shift = jnp.einsum("lf,lfm->m", self.position[...].astype(self.dtype), w_1) + self.b_1[...].astype(self.dtype)
        sums = runs.astype(jnp.float32).sum(2)
        pieces = w_1.reshape(overlap, stride, features, -1)
        parts = jnp.einsum("brskf,psfm->brkpm", runs, pieces)
        hidden, total = shift, jnp.zeros((), jnp.float32)
        for piece in range(overlap):
            covered = slice(piece, piece + count)
            hidden = hidden + parts[:, covered, :, piece]
            total = total + sums[:, covered]
        mean = (total / self.nsa.compress_block).astype(x.dtype)
        return mean + jax.nn.silu(hidden) @ self.w_2[...].astype(self.dtype)


class MeanCompressor(nnx.Module):
    """The mean of a block's tokens: a compressor without parameters."""

    def __init__(self, nsa: NSAConfig):
        self.nsa = nsa

    def __call__(self, x: Float[Array, "B S K H"]) -> Float[Array, "B C K H"]:
        """Compresses every block of x."""
        return mean_compress(x, config=self.nsa)


def make_compressor(config: ModelConfig, features: int, *, rngs: nnx.Rngs) -> MLPCompressor | MeanCompressor:
    """The compressor that `config.compressor` names, for keys or values with this many features."""
    if config.compressor == "mean":
        return MeanCompressor(config.nsa)
    return MLPCompressor(config, features, rngs=rngs)
