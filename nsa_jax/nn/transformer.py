"""The language model: pre-norm blocks of attention and SwiGLU, stacked, scanned and rematerialised by config."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import chex
import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from nsa_jax.nn.attention import DenseAttention, NSAttention
from nsa_jax.nn.config import ModelConfig
from nsa_jax.nn.layers import HIDDEN, RMSNorm, SwiGLU, dropout, embed, init_normal, soft_cap
from nsa_jax.nn.sharding import constrain_tokens

# Named by the ops; saved under every policy, since choosing blocks again could choose differently and costs time.
_INDICES = "nsa_block_indices"
# What attention's backward pass needs from its forward pass; kernels give these names to their residuals.
_ATTENTION = ("attention_out", "nsa_attention_residuals")
# The query as attention's kernels take it, rotated and rearranged; where a kernel cuts the projection, all its parts.
_PROJECTED = ("nsa_query", "nsa_projection")
# What a norm returns, and the sum of a block's input and its attention's output, which the second norm takes.
_NORMED, _STREAM = "norm_out", "residual_stream"
# Primitives of attention's forward pass: Pallas kernels, cuDNN, and an op whose forward rule calls the op itself.
_KERNELS = ("pallas_call", "dot_product_attention_fwd_wrapper", "custom_vjp_call")
# The kernel that only cuts and rotates the projection: what it writes is as large as its input, and quickly made again.
_SPLIT = "nsa_split_projection"


def _attention_saveable(prim, *args, **params) -> bool:
    """Saves what kernels and cuDNN return, and whatever carries a name of attention's."""
    if prim.name in _KERNELS:
        return params.get("name") != _SPLIT
    return bool(jax.checkpoint_policies.save_only_these_names(_INDICES, *_ATTENTION)(prim, *args, **params))


def _dots_saveable(prim, *args, **params) -> bool:
    """Saves what `_attention_saveable` does, the query, results of norms, SwiGLU and products with parameters.

    Products of attention have batch dimensions. With both ends of a norm kept, its backward pass is one kernel and
    nothing of it is computed again; the product whose result is added to make one end need not be kept then.
    Of a projection that a kernel cuts the parts are kept, by their names. The kernel must be saved as well: JAX never
    drops one from what is recomputed, and this one would keep the projection for its own sake.
    """
    named = jax.checkpoint_policies.save_only_these_names(*_PROJECTED, _NORMED, _STREAM, HIDDEN)
    dots = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    saves = (_attention_saveable, named, dots)
    return prim.name in _KERNELS or any(bool(policy(prim, *args, **params)) for policy in saves)


_SAVEABLE = {"attention_saved": _attention_saveable, "dots_saved": _dots_saveable}


def remat(fn: Callable, policy: str, *, scanned: bool) -> Callable:
    """`fn` with what its backward pass recomputes decided by a policy's name; see `Transformer`.

    Outside a scan the compiler would find that the recomputation equals the first pass and merge the two again, which
    `prevent_cse` forbids; inside a scan it costs time for nothing.
    """
    if policy == "none":
        return fn
    saveable = _SAVEABLE.get(policy, jax.checkpoint_policies.save_only_these_names(_INDICES))
    return jax.checkpoint(fn, policy=saveable, prevent_cse=not scanned)


class Block(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        if config.layer_pattern:
            raise ValueError(f"ModelConfig.layer_pattern={config.layer_pattern}: a Block takes config.of_layer(index)")
        self.norm_attention = RMSNorm(config)
        self.attention = (NSAttention if config.attention == "nsa" else DenseAttention)(config, rngs=rngs)
        self.norm_mlp = RMSNorm(config)
        self.mlp = SwiGLU(config, rngs=rngs)
        self.dropout = config.dropout

    def __call__(
        self,
        x: Float[Array, "B T D"],
        segment_start: Int[Array, "B T"] | None = None,
        *,
        dropout_key: jax.Array | None = None,
    ) -> Float[Array, "B T D"]:
        """One layer.

        Args:
          x: [B, T, D] in the compute dtype.
          segment_start: int [B, T] or None; see `NSAttention`.
          dropout_key: PRNG key of this layer's dropout; None means none.
        """
        return self.forward(x, lambda normed: (self.attention(normed, segment_start), None), dropout_key=dropout_key)[0]

    def forward(
        self,
        x: Float[Array, "B T D"],
        attend: Callable[[jax.Array], tuple[jax.Array, Any]],
        *,
        dropout_key: jax.Array | None = None,
    ) -> tuple[Float[Array, "B T D"], Any]:
        """One layer whose attention the caller computes, for example against a cache.

        Args:
          x: [B, T, D] in the compute dtype.
          attend: called with the normed input [B, T, D]; returns attention's output [B, T, D] and anything else.
          dropout_key: PRNG key of this layer's dropout; None means none.

        Returns:
          The layer's output [B, T, D], and what `attend` returned beside attention's output.
        """
        keys = (None, None) if dropout_key is None else jax.random.split(dropout_key)
        x, normed = self.norm_attention.beside(x)
        attended, extra = attend(checkpoint_name(normed, _NORMED))
        x = x + dropout(attended, self.dropout, keys[0])
        x, normed = self.norm_mlp.beside(checkpoint_name(x, _STREAM))
        return x + dropout(self.mlp(checkpoint_name(normed, _NORMED)), self.dropout, keys[1]), extra


class Period(nnx.Module):
    """The layers of one period of `config.layer_pattern`, in their order: `layer_0`, `layer_1` and so on."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        for index in range(len(config.kinds)):
            setattr(self, f"layer_{index}", Block(config.of_layer(index), rngs=rngs))


def _stack(config: ModelConfig, rngs: nnx.Rngs) -> Block | Period:
    """A Block whose parameters have a leading axis of layers; with a layer_pattern, a Period with one of periods."""

    @nnx.split_rngs(splits=config.num_layers // len(config.kinds))
    @nnx.vmap(in_axes=(0,), out_axes=0)
    def create(rngs: nnx.Rngs) -> Block | Period:
        return (Period if config.layer_pattern else Block)(config, rngs=rngs)

    return create(rngs)


def layer_stacks(blocks: Any, config: ModelConfig) -> list[Any]:
    """The stacked layers of each position of the pattern; layer i is row i // P of stack i % P, of P stacks.

    Args:
      blocks: `Transformer.blocks`, or its parameters as a nested dict.
      config: the model's.
    """
    if not config.layer_pattern:
        return [blocks]
    names = [f"layer_{index}" for index in range(len(config.kinds))]
    return [blocks[name] if isinstance(blocks, Mapping) else getattr(blocks, name) for name in names]


def _group_size(periods: int) -> int:
    """The divisor of a number of periods (layers, without a pattern) nearest to its square root, for remat "full"."""
    divisors = [g for g in range(1, periods + 1) if periods % g == 0]
    return min(divisors, key=lambda g: abs(g - periods**0.5))


class Transformer(nnx.Module):
    """A decoder-only language model.

    Layers are stacked along a leading axis of their parameters whether or not they are scanned, so that a checkpoint
    fits both ways of running them. `config.remat` decides what the backward pass recomputes; block indices are always
    kept:
      none: nothing; every activation is kept.
      dots_saved: keeps what attention_saved does, the results of every matrix product, norm and SwiGLU, and NSA's
        rotated query; recomputes what else is elementwise. Where a kernel cuts NSA's projection (see
        `nsa_jax.ops.projected`), what it is cut into is kept instead of the projection.
      attention_saved: keeps each layer's input and what attention's backward pass needs; recomputes the rest.
      block: keeps each layer's input only.
      full: keeps the input of every sqrt(num_layers)-th layer only; runs the layers between twice more. With a pattern,
        that of every sqrt(periods)-th period.

    Used functionally: `graphdef, params = nnx.split(model)`, then `nnx.merge(graphdef, params)(tokens)` under jit.
    All state is parameters; dropout takes its key as an argument.

    Attributes:
      embedding: [vocab, D].
      blocks: a `Block` with parameters [num_layers, ...]; with `config.layer_pattern`, a `Period` of such blocks, each
        with parameters [num_layers / len(layer_pattern), ...].
      norm: the final RMSNorm.
      head: [D, vocab], absent if embeddings are tied.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        if config.vocab_size < 1:
            raise ValueError(f"ModelConfig.vocab_size={config.vocab_size}: a Transformer needs at least 1")
        self.config = config
        self.embedding = init_normal(rngs, (config.vocab_size, config.dim), config.init_std, config)
        self.blocks = _stack(config, rngs)
        self.norm = RMSNorm(config)
        if not config.tie_embeddings:
            self.head = init_normal(rngs, (config.dim, config.vocab_size), config.init_std, config)

    def hidden(
        self,
        tokens: Int[Array, "B T"],
        segment_start: Int[Array, "B T"] | None = None,
        *,
        deterministic: bool = True,
        rngs: nnx.Rngs | jax.Array | None = None,
    ) -> Float[Array, "B T D"]:
        """The activations that the output head reads, in the compute dtype.

        Args:
          tokens: integer [B, T].
          segment_start: int [B, T], first position of each token's document; None if rows hold one document.
          deterministic: no dropout.
          rngs: where dropout takes its key from: `nnx.Rngs` (stream "dropout") or a PRNG key.
        """
        config = self.config
        chex.assert_rank(tokens, 2)
        chex.assert_type(tokens, int)
        if segment_start is not None:
            chex.assert_equal_shape([tokens, segment_start])
        keys = None
        if not deterministic and config.dropout > 0:
            if rngs is None:
                raise ValueError("rngs=None: must be nnx.Rngs or a PRNG key for dropout > 0 and deterministic=False")
            key = rngs.dropout() if isinstance(rngs, nnx.Rngs) else rngs
            keys = jax.random.split(key, config.num_layers)
        x = constrain_tokens(embed(self.embedding[...], tokens, config.dtype))
        x = self._run_blocks(x, segment_start, keys)
        return self.norm(x)

    def _run_blocks(self, x: jax.Array, segment_start: jax.Array | None, keys: jax.Array | None) -> jax.Array:
        config = self.config
        graphdefs, stacks = zip(*map(nnx.split, layer_stacks(self.blocks, config)), strict=True)
        count = len(stacks)
        periods = config.num_layers // count
        # The compiler makes a loop of one period into plain code.
        scanned = config.scan_layers and (count == 1 or periods > 1)

        def layer(graphdef):
            def run(x, inputs):
                params, key = inputs
                out = nnx.merge(graphdef, params)(x, segment_start, dropout_key=key)
                return constrain_tokens(out)

            return remat(run, config.remat, scanned=scanned)

        layers = [layer(graphdef) for graphdef in graphdefs]

        def period(x, inputs):
            for run, given in zip(layers, inputs, strict=True):
                x = run(x, given)
            return x

        stacked = [(params, keys if keys is None else keys[i::count]) for i, params in enumerate(stacks)]
        if config.scan_layers:
            return _scan(period, x, stacked, periods, config)
        # Cutting by `split` makes the stacked gradient one concatenation instead of one padded sum for each layer.
        pieces = jax.tree.map(lambda a: jax.lax.split(a, (1,) * periods, axis=0), stacked)
        for index in range(periods):
            x = period(x, jax.tree.map(lambda _, p, i=index: p[i][0], stacked, pieces))
        return x

    def output_weight(self) -> Float[Array, "vocab D"] | Float[Array, "D vocab"]:
        """The matrix of the output head: the embedding, or `head` with the vocabulary as second axis."""
        return self.embedding[...] if self.config.tie_embeddings else self.head[...]

    def logits(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T vocab"]:
        """float32 logits of activations from `hidden`."""
        equation = "...d,vd->...v" if self.config.tie_embeddings else "...d,dv->...v"
        weight = self.output_weight().astype(self.config.dtype)
        logits = jnp.einsum(equation, hidden, weight, preferred_element_type=jnp.float32)
        return soft_cap(logits, self.config.logit_soft_cap)

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        segment_start: Int[Array, "B T"] | None = None,
        *,
        deterministic: bool = True,
        rngs: nnx.Rngs | jax.Array | None = None,
    ) -> Float[Array, "B T vocab"]:
        """float32 logits [B, T, vocab]; the arguments are `hidden`'s."""
        logits = self.logits(self.hidden(tokens, segment_start, deterministic=deterministic, rngs=rngs))
        chex.assert_shape(logits, (*tokens.shape, self.config.vocab_size))
        chex.assert_type(logits, jnp.float32)
        return logits


def _scan(run: Callable, x: jax.Array, stacked, periods: int, config: ModelConfig) -> jax.Array:
    """Runs the periods by lax.scan; under remat "full" by a scan over groups that are rematerialised as a whole."""

    def step(x, inputs):
        return run(x, inputs), None

    group = _group_size(periods)
    if config.remat != "full" or group in (1, periods):
        return jax.lax.scan(step, x, stacked)[0]

    def group_step(x, inputs):
        return jax.lax.scan(step, x, inputs)[0]

    outer = remat(group_step, config.remat, scanned=True)
    grouped = jax.tree.map(lambda a: a.reshape(-1, group, *a.shape[1:]), stacked)
    return jax.lax.scan(lambda x, inputs: (outer(x, inputs), None), x, grouped)[0]


def count_parameters(model: nnx.Module) -> int:
    """How many parameters a model has, measured from its arrays (a shared matrix counts once)."""
    return sum(int(leaf.size) for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))
