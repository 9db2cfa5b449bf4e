"""How good selection is: what the listed blocks hold of dense attention, and what better choices would be worth.

Dense attention and its mass in a block are those of `nsa_jax.ops.block_mass`. The oracle lists the blocks with the
highest mass.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from nsa_jax.config import NSAConfig
from nsa_jax.inspect.statistics import chosen_by_score, in_chunks
from nsa_jax.nn import NSAttention, Transformer
from nsa_jax.nn.observe import run_attention, walk_blocks, walk_layers
from nsa_jax.ops import blocks
from nsa_jax.ops.block_mass import block_mass, held_mass, oracle_lists, probabilities, random_mass
from nsa_jax.ops.nsa import selected_attention, window_attention

SUBSTITUTES = ("none", "oracle", "all", "exact")


def _measure(mass, lists, config: NSAConfig, positions, start) -> dict[str, jax.Array]:
    """The figures of `selection_quality` of one layer."""
    mass = jnp.broadcast_to(mass, (*lists.shape[:-1], mass.shape[-1]))
    best = oracle_lists(mass, config, positions, start)
    by_score = chosen_by_score(lists, config, start, positions)
    same = blocks.also_listed(lists, best, mass.shape[-1]) & by_score
    return {
        "listed": held_mass(mass, lists),
        "oracle": held_mass(mass, best),
        "random": random_mass(mass, config, positions, start),
        "overlap": same.sum(-1) / jnp.maximum(by_score.sum(-1), 1),
    }


def _queries(tokens, positions, segment_start):
    positions = jnp.asarray(np.broadcast_to(np.asarray(positions, np.int32), (len(tokens), np.shape(positions)[-1])))
    start = jnp.zeros(tokens.shape, jnp.int32) if segment_start is None else jnp.asarray(segment_start, jnp.int32)
    rows = jnp.arange(len(tokens))[:, None]
    return positions, start, start[rows, positions], rows


def dense_mass(model: Transformer, tokens, positions, config: NSAConfig, segment_start=None) -> np.ndarray:
    """`block_mass` of a dense model's layers, averaged over all heads: float32 [layers, B, P, J].

    Args:
      model: a Transformer whose layers are dense.
      tokens: int [B, T].
      positions: int [P] or [B, P] of queries.
      config: of an NSA model, for the size of the blocks.
      segment_start: int [B, T] or None.

    Raises:
      ValueError: a layer is not dense.
    """
    if model.config.kinds != ("dense",):
        raise ValueError(f"model.config.attention={'/'.join(model.config.kinds)!r}: must be 'dense'")
    tokens = jnp.asarray(tokens, jnp.int32)
    graphdef, params = nnx.split(model)

    @jax.jit
    def run(params, tokens, positions, start, query_start, rows):
        def attend(attention, normed):
            query, key, _ = attention.project(normed, jnp.arange(normed.shape[1]), normed.shape[1])
            mass = block_mass(query[rows, positions], key, config, query_start, positions)
            return attention(normed, start), mass.mean(2)

        return walk_blocks(nnx.merge(graphdef, params), tokens, attend)[1]

    return np.asarray(run(params, tokens, *_queries(tokens, positions, segment_start)))


def selection_quality(
    model: Transformer, tokens, positions, segment_start=None, dense: Transformer | None = None
) -> dict[str, np.ndarray]:
    """What the lists of an NSA model's layers hold of dense attention, at a few queries.

    Args:
      model: a Transformer with NSA layers.
      tokens: int [B, T].
      positions: int [P] or [B, P] of queries; those with a choice (`choosing_queries`) tell something.
      segment_start: int [B, T] or None.
      dense: a dense model with as many layers, whose attention is the measure, averaged over the heads of a layer;
        None: dense attention with the layer's own queries and the keys of its selected branch.

    Returns:
      float [L, B, P, K] each: listed, oracle and random, the shares of the mass that the layer's lists hold, that the
      best lists would, and that random ones would on average; overlap, the share of the blocks chosen by score that the
      oracle lists too.

    Raises:
      ValueError: there are no NSA layers, or the dense model has another number of layers.
    """
    tokens = jnp.asarray(tokens, jnp.int32)
    config = model.config.nsa
    positions, start, query_start, rows = _queries(tokens, positions, segment_start)
    given: jax.Array | None = None
    if dense is not None:
        if dense.config.num_layers != model.config.num_layers:
            layers = dense.config.num_layers, model.config.num_layers
            raise ValueError("dense.config.num_layers={}: must be the {} of the model".format(*layers))
        mass = dense_mass(dense, tokens, positions, config, segment_start)
        given = jnp.asarray(mass[list(model.config.layers_of("nsa"))])
    graphdef, params = nnx.split(model)

    @jax.jit
    def run(params, tokens, start, given):
        def look(arrays):
            mass = None
            if given is None:
                mass = block_mass(arrays.query[rows, positions], arrays.key_slc, config, query_start, positions)
            return arrays.lists[rows, positions], mass

        lists, mass = walk_layers(nnx.merge(graphdef, params), tokens, start, look)[1]
        mass = given[:, :, :, None] if given is not None else mass
        return jax.lax.map(lambda layer: _measure(layer[0], layer[1], config, positions, query_start), (mass, lists))

    return {name: np.asarray(values) for name, values in run(params, tokens, start, given).items()}


def _exact_compressed(attention: NSAttention, h, start) -> jax.Array:
    """Attention over the tokens of all visible compressed blocks, with the keys and values that are compressed."""
    config = attention.config
    positions = jnp.arange(h.shape[1], dtype=jnp.int32)
    p = attention.project(h, positions, h.shape[1])
    assert p.value_raw is not None
    key, value = config.rope(p.key_raw, positions, h.shape[1]), p.value_raw
    value = jnp.repeat(value.astype(jnp.float32), config.num_heads // config.num_kv_heads, axis=2)
    t = jnp.broadcast_to(positions, start.shape)

    def chunk(query, t, start):
        low, high = blocks.compressed_range(t, start, config.nsa)
        end = jnp.where(high > low, blocks.compressed_last_position(high - 1, config.nsa), -1)
        inside = (positions >= low[..., None] * config.nsa.compress_stride) & (positions <= end[..., None])
        return jnp.einsum("bpns,bsnv->bpnv", probabilities(query, key, inside[:, :, None]), value)

    return in_chunks(chunk, (p.query, t, start), h.shape[0] * config.num_heads * h.shape[1])


def _substituted(attention: NSAttention, h, start, substitute: str) -> jax.Array:
    """A layer's output with one branch computed otherwise."""
    config = attention.config
    arrays = run_attention(attention, h, start)
    outputs = list(arrays.outputs)
    common: dict[str, Any] = {"segment_start": start, "implementation": config.implementation}
    if substitute == "oracle":
        t = jnp.broadcast_to(jnp.arange(h.shape[1], dtype=jnp.int32), start.shape)

        def chunk(query, t, start):
            mass = block_mass(query, arrays.key_slc, config.nsa, start, t)
            return oracle_lists(mass, config.nsa, t, start)

        lists = in_chunks(chunk, (arrays.query, t, start), h.shape[0] * config.num_heads * h.shape[1])
        keys_values = arrays.query, arrays.key_slc, arrays.value_slc
        outputs[1] = selected_attention(*keys_values, lists, select_block=config.nsa.select_block, **common)
    elif substitute == "all":
        keys_values = arrays.query, arrays.key_slc, arrays.value_slc
        outputs[1] = window_attention(*keys_values, window=h.shape[1], **common)
    elif substitute == "exact":
        outputs[0] = _exact_compressed(attention, h, start)
    compressed, selected, window = outputs
    attended = arrays._replace(outputs=(compressed, selected, window)).attended()
    return attention.output(attended)


def substituted_losses(model: Transformer, tokens, substitute: str = "none", segment_start=None) -> np.ndarray:
    """Losses of an NSA model whose layers compute one branch otherwise than it was trained to.

    Args:
      model: a Transformer with NSA layers.
      tokens: int [B, T].
      substitute: "none": as it is. "oracle": the selected branch reads the blocks that hold most of the dense attention
        of its own queries and keys: what better selection is worth. "all": it reads all tokens. "exact": the compressed
        branch attends to the tokens of the visible blocks, with the keys and values before compression: what the mean
        compressor loses. A learned compressor's keys and values need not resemble those of the tokens.
      segment_start: int [B, T] or None.

    Returns:
      Nats of each token but the first, float32 [B, T - 1].

    Raises:
      ValueError: there are no NSA layers, `substitute` is none of these, or there is nothing that it replaces.
    """
    if substitute not in SUBSTITUTES:
        raise ValueError(f"substitute={substitute!r}: must be one of {SUBSTITUTES}")
    if "nsa" not in model.config.kinds:
        raise ValueError(f"model.config.attention={'/'.join(model.config.kinds)!r}: must be 'nsa'")
    if substitute == "exact" and model.config.selector != "compressed":
        raise ValueError("substitute='exact': the model has no compressed branch")
    tokens = jnp.asarray(tokens, jnp.int32)
    start = jnp.zeros(tokens.shape, jnp.int32) if segment_start is None else jnp.asarray(segment_start, jnp.int32)
    return np.asarray(_losses(*nnx.split(model), tokens, start, substitute))


@functools.partial(jax.jit, static_argnums=(0, 4))
def _losses(graphdef, params, tokens, start, substitute):
    model: Transformer = nnx.merge(graphdef, params)

    def attend(attention, normed):
        if not isinstance(attention, NSAttention):
            return attention(normed, start), None
        return _substituted(attention, normed, start, substitute), None

    hidden = walk_blocks(model, tokens, attend)[0][:, :-1]
    targets = tokens[:, 1:]

    def loss(pair):
        return -jax.nn.log_softmax(model.logits(pair[0][None, None])[0, 0])[pair[1]]

    flat = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
    return jax.lax.map(loss, flat, batch_size=1024).reshape(targets.shape)
