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

from nsa_jax.nn.attention import NSAttention
from nsa_jax.nn.config import ModelConfig
from nsa_jax.nn.dense import DenseAttention
from nsa_jax.nn.layers import HIDDEN, RMSNorm, SwiGLU, dropout, embed, init_normal, soft_cap
from nsa_jax.nn.selection_loss import selection_loss
from nsa_jax.nn.sharding import constrain_tokens
from nsa_jax.ops import checks

# Named by the ops; saved under every policy, since choosing blocks again could choose differently and costs time.
_INDICES = "nsa_block_indices"
# What attention's backward pass needs from its forward pass; kernels give these names to their residuals.
_ATTENTION = ("attention_out", "nsa_attention_residuals")
# The query as attention's kernels take it, rotated and rearranged; where a kernel cuts the projection, all its parts.
_PROJECTED = ("nsa_query", "nsa_projection")
# The sum of the branches, where the kernel of the window stores it.
_SUM = "nsa_gated_sum"
# What a norm returns, and the sum of a block's input and its attention's output, which the second norm takes.
_NORMED, _STREAM = "norm_out", "residual_stream"
# What a block is given: all that its backward pass needs to compute the rest again.
_INPUT = "block_input"
# Primitives of attention's forward pass: Pallas kernels, cuDNN, and an op whose forward rule calls the op itself.
_KERNELS = ("pallas_call", "dot_product_attention_fwd_wrapper", "custom_vjp_call")
# Kernels whose results are quickly made again from what is kept: the cut and rotated projection, the branches' sum.
_CHEAP = ("nsa_split_projection", "nsa_gated_sum")


def _attention_saveable(prim, *args, **params) -> bool:
    """Saves what kernels and cuDNN return, and whatever carries a name of attention's."""
    if prim.name in _KERNELS:
        return params.get("name") not in _CHEAP
    return bool(jax.checkpoint_policies.save_only_these_names(_INDICES, *_ATTENTION)(prim, *args, **params))


def _dots_saveable(prim, *args, **params) -> bool:
    """Saves what `_attention_saveable` does, the query, results of norms, SwiGLU and products with parameters.

    Products of attention have batch dimensions. With both ends of a norm kept, its backward pass is one kernel and
    nothing of it is computed again; the product whose result is added to make one end need not be kept then.
    Of a projection that a kernel cuts the parts are kept, by their names. The kernel must be saved as well: JAX never
    drops one from what is recomputed, and this one would keep the projection for its own sake.
    """
    named = jax.checkpoint_policies.save_only_these_names(*_PROJECTED, _SUM, _NORMED, _STREAM, HIDDEN)
    dots = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    saves = (_attention_saveable, named, dots)
    return prim.name in _KERNELS or any(bool(policy(prim, *args, **params)) for policy in saves)


_SAVEABLE = {
    "attention_saved": _attention_saveable,
    "dots_saved": _dots_saveable,
    "offload": jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[_INDICES],
        names_which_can_be_offloaded=[_INPUT],
        offload_src="device",
        offload_dst="pinned_host",
    ),
}


def remat(fn: Callable, policy: str, *, scanned: bool) -> Callable:
    """`fn` with what its backward pass recomputes decided by a policy's name; see `Transformer`.

    Outside a scan the compiler would find that the recomputation equals the first pass and merge the two again, which
    `prevent_cse` forbids; inside a scan it costs time for nothing.
    """
    if policy == "none":
        return fn
    saveable = _SAVEABLE.get(policy, jax.checkpoint_policies.save_only_these_names(_INDICES))
    return jax.checkpoint(fn, policy=saveable, prevent_cse=not scanned)


@jax.custom_jvp
def _row(stacked: jax.Array, index: int | jax.Array, piece: jax.Array) -> jax.Array:
    """Row `index` of `stacked`; its gradient is that of `piece`, the same row with an axis before it.

    What is kept for a layer's backward pass is then `stacked`, which is there anyway. `piece` itself is never read, so
    XLA does not make it.
    """
    return jax.lax.dynamic_index_in_dim(stacked, index, keepdims=False)


_row.defjvp(lambda primals, tangents: (_row(*primals), tangents[2][0]))


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
        block_indices: Int[Array, "B T K n"] | None = None,
        return_block_indices: bool = False,
        selection_queries: Int[Array, " P"] | None = None,
    ):
        """One layer.

        Args:
          x: [B, T, D] in the compute dtype.
          segment_start: int [B, T] or None; see `NSAttention`.
          dropout_key: PRNG key of this layer's dropout; None means none.
          block_indices: int32 [B, T, K, n], block lists to read; see `NSAttention`.
          return_block_indices: also return the block lists that were read.
          selection_queries: int [P]; also return the layer's `selection_loss` at these positions.

        Returns:
          [B, T, D] in the compute dtype, or a pair with a dict of what else was asked for: `block_indices`, int32
          [B, T, K, n], and `selection_loss`, float32 [B].
        """

        attention: Any = self.attention  # one without selection takes no lists
        given: dict[str, Any] = {} if block_indices is None else {"block_indices": block_indices}
        given |= {"return_block_indices": True} if return_block_indices else {}

        def attend(normed):
            found, out = {}, attention(normed, segment_start, **given)
            if return_block_indices:
                out, found["block_indices"] = out
            if selection_queries is not None:
                found["selection_loss"] = selection_loss(attention, normed, segment_start, selection_queries)
            return out, found

        x, found = self.forward(x, attend, dropout_key=dropout_key)
        return (x, found) if found else x

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
      attention_saved: keeps each layer's input and what attention's backward pass needs; recomputes the rest. With
        kernels, the sum of NSA's branches is recomputed too.
      block: keeps each layer's input only.
      offload: keeps each layer's input in the host's memory, and nothing else.
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
        block_indices: Int[Array, "layers B T K n"] | None = None,
        return_block_indices: bool = False,
        selection_queries: Int[Array, " P"] | None = None,
    ):
        """The activations that the output head reads, in the compute dtype.

        Args:
          tokens: integer [B, T].
          segment_start: int [B, T], first position of each token's document; None if rows hold one document.
          deterministic: no dropout.
          rngs: where dropout takes its key from: `nnx.Rngs` (stream "dropout") or a PRNG key.
          block_indices: int32 [NSA layers, B, T, K, n], the blocks that each layer's selected branch reads, instead of
            selecting: those of another run of the same parameters or of others, such as a sampler's. Entries outside
            [0, J), such as -1, are padding. Gradients flow as without them, since none flows through selection.
          return_block_indices: also return the block lists that were read, int32 [NSA layers, B, T, K, n], padded
            with J.
          selection_queries: int [P], positions at which the NSA layers' `selection_loss` is computed.

        Returns:
          [B, T, D]; with `return_block_indices` a pair with the block lists; with `selection_queries` a pair with the
          selection losses, float32 [NSA layers, B].

        Raises:
          ValueError: an argument has the wrong shape or dtype; block lists or selection losses of a model without NSA
            layers, or both at once; selection losses with another selector than "compressed".
        """
        config = self.config
        sizes: dict[str, int] = {}
        checks.integers("tokens", tokens, "BT", sizes)
        checks.require(min(tokens.shape) >= 1, f"tokens has shape {tuple(tokens.shape)}: every size must be >= 1")
        checks.segments(segment_start, sizes, "tokens")
        sparse = len(config.layers_of("nsa"))
        if not sparse and (block_indices is not None or return_block_indices or selection_queries is not None):
            raise ValueError(f"model.config.attention={'/'.join(config.kinds)!r}: must be 'nsa' to have block lists")
        if return_block_indices and selection_queries is not None:
            raise ValueError("selection_queries: ask for them or for return_block_indices, not for both")
        if selection_queries is not None:
            selector = config.selector
            message = f"model.config.selector={selector!r}: must be 'compressed' to have a selection loss"
            checks.require(selector == "compressed", message)
            checks.integers("selection_queries", selection_queries, "P", {})
        if block_indices is not None:
            sizes |= {"L": sparse, "K": config.num_kv_heads}
            checks.integers("block_indices", block_indices, "LBTKn", sizes, "tokens and config")
        keys = None
        if not deterministic and config.dropout > 0:
            if rngs is None:
                raise ValueError("rngs=None: must be nnx.Rngs or a PRNG key for dropout > 0 and deterministic=False")
            key = rngs.dropout() if isinstance(rngs, nnx.Rngs) else rngs
            keys = jax.random.split(key, config.num_layers)
        x = constrain_tokens(embed(self.embedding[...], tokens, config.dtype))
        wanted: dict[str, Any] = {"return_block_indices": True} if return_block_indices else {}
        wanted |= {} if selection_queries is None else {"selection_queries": selection_queries}
        x, found = self._run_blocks(x, segment_start, keys, block_indices, wanted)
        return (self.norm(x), *found.values()) if wanted else self.norm(x)

    def _run_blocks(
        self,
        x: jax.Array,
        segment_start: jax.Array | None,
        keys: jax.Array | None,
        block_indices: jax.Array | None,
        wanted: dict[str, Any],
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Activations, and what was asked of the NSA layers by arguments of theirs, stacked."""
        config = self.config
        graphdefs, stacks = zip(*map(nnx.split, layer_stacks(self.blocks, config)), strict=True)
        count = len(stacks)
        periods = config.num_layers // count
        # The compiler makes a loop of one period into plain code.
        scanned = config.scan_layers and (count == 1 or periods > 1)

        def layer(graphdef, kind):
            asked = wanted if kind == "nsa" else {}

            def run(x, inputs):
                params, key, given = inputs
                if not config.scan_layers:
                    rows, index, pieces = params
                    params = jax.tree.map(lambda row, piece: _row(row, index, piece), rows, pieces)
                arguments = dict(dropout_key=key, block_indices=given, **asked)
                out = nnx.merge(graphdef, params)(checkpoint_name(x, _INPUT), segment_start, **arguments)
                out, found = out if asked else (out, {})
                return constrain_tokens(out), found

            return remat(run, config.remat, scanned=scanned)

        layers = [layer(graphdef, kind) for graphdef, kind in zip(graphdefs, config.kinds, strict=True)]

        def period(x, inputs):
            parts = []
            for run, given in zip(layers, inputs, strict=True):
                x, found = run(x, given)
                parts += [found] if found else []
            return x, _stacked(parts)

        sparse = [position for position, kind in enumerate(config.kinds) if kind == "nsa"]
        stacked = []
        for position, params in enumerate(stacks):
            given = None
            if block_indices is not None and position in sparse:
                given = block_indices[sparse.index(position) :: len(sparse)]
            stacked.append((params, None if keys is None else keys[position::count], given))
        if config.scan_layers:
            x, found = _scan(period, x, stacked, periods, config)
        else:
            # Cutting by `split` makes the stacked gradient one concatenation instead of one padded sum for each layer.
            pieces = jax.tree.map(lambda a: jax.lax.split(a, (1,) * periods, axis=0), stacked)
            parts = []
            for index in range(periods):
                cut = jax.tree.map(lambda _, p, i=index: p[i], stacked, pieces)
                inputs = [
                    ((jax.lax.stop_gradient(params), index, piece), *jax.tree.map(lambda a: a[0], rest))
                    for (params, *_), (piece, *rest) in zip(stacked, cut, strict=True)
                ]
                x, one = period(x, inputs)
                parts.append(one)
            found = _stacked(parts)
        # From [periods, NSA layers of a period, ...].
        return x, jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), found)

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
        block_indices: Int[Array, "layers B T K n"] | None = None,
        return_block_indices: bool = False,
    ):
        """float32 logits [B, T, vocab], or a pair with the block lists; the arguments are `hidden`'s."""
        given: dict[str, Any] = dict(block_indices=block_indices, return_block_indices=return_block_indices)
        found = self.hidden(tokens, segment_start, deterministic=deterministic, rngs=rngs, **given)
        hidden, lists = found if return_block_indices else (found, None)
        logits = self.logits(hidden)
        chex.assert_shape(logits, (*tokens.shape, self.config.vocab_size))
        chex.assert_type(logits, jnp.float32)
        return (logits, lists) if return_block_indices else logits


def _stacked(parts: list[dict[str, jax.Array]]) -> dict[str, jax.Array]:
    """Dicts of arrays as one of stacked arrays; {} of none."""
    return jax.tree.map(lambda *arrays: jnp.stack(arrays), *parts) if parts else {}


def _scan(run: Callable, x: jax.Array, stacked, periods: int, config: ModelConfig) -> tuple[jax.Array, Any]:
    """Runs the periods by lax.scan; under remat "full" by a scan over groups that are rematerialised as a whole."""
    group = _group_size(periods)
    if config.remat != "full" or group in (1, periods):
        return jax.lax.scan(run, x, stacked)
    outer = remat(lambda x, inputs: jax.lax.scan(run, x, inputs), config.remat, scanned=True)
    grouped = jax.tree.map(lambda a: a.reshape(-1, group, *a.shape[1:]), stacked)
    x, found = jax.lax.scan(outer, x, grouped)
    return x, jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), found)


def count_parameters(model: nnx.Module) -> int:
    """How many parameters a model has, measured from its arrays (a shared matrix counts once)."""
    return sum(int(leaf.size) for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))
