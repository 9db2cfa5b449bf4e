"""A model's forward pass, layer by layer, with what every NSA layer computes in between laid open."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from nsa_jax.config import NSAConfig
from nsa_jax.nn.attention import NSAttention
from nsa_jax.nn.layers import embed
from nsa_jax.nn.transformer import Transformer, layer_stacks
from nsa_jax.ops import nsa
from nsa_jax.ops.decode import gated_sum
from nsa_jax.ops.mean_key import select_by_mean_key

BRANCHES = ("compressed", "selected", "window")  # the order of gates and of every array with a branch axis


class NSAArrays(NamedTuple):
    """The operator's inputs, and what lies between them and its output, for one layer.

    With the selector "mean_key", key_cmp are the mean keys, and gate, values and output of the compressed branch are 0.
    """

    query: jax.Array  # [B, T, N, H]
    key_cmp: jax.Array  # [B, C, K, H]
    value_cmp: jax.Array  # [B, C, K, V]
    key_slc: jax.Array  # [B, T, K, H]
    value_slc: jax.Array  # [B, T, K, V]
    key_win: jax.Array  # [B, T, K, H]
    value_win: jax.Array  # [B, T, K, V]
    gates: jax.Array  # [B, T, N, 3] float32
    lists: jax.Array  # int32 [B, T, K, n], the block lists
    outputs: tuple[jax.Array, jax.Array, jax.Array]  # of the branches, each [B, T, N, V], before the gates

    def attended(self) -> jax.Array:
        """The operator's output, sum of gate * branch: [B, T, N, V] in query's dtype."""
        return gated_sum(self.gates, self.outputs, self.query.dtype)


def run_branches(
    query: jax.Array,
    key_cmp: jax.Array,
    value_cmp: jax.Array,
    key_slc: jax.Array,
    value_slc: jax.Array,
    key_win: jax.Array,
    value_win: jax.Array,
    gates: jax.Array,
    *,
    config: NSAConfig,
    segment_start: jax.Array | None = None,
    implementation: str | None = None,
) -> NSAArrays:
    """What `nsa_jax.nsa_attention` does, with the block lists and the branches' outputs kept; the arguments are its."""
    common: dict[str, Any] = {"segment_start": segment_start, "implementation": implementation}
    compressed, lse = nsa.compressed_attention(query, key_cmp, value_cmp, config=config, **common)
    lists = nsa.select_blocks(query, key_cmp, lse, config=config, **common)
    arrays = (query, key_slc, value_slc, key_win, value_win, lists)
    outputs = (compressed, *nsa.selected_and_window(*arrays, config=config, **common)[:2])
    return NSAArrays(query, key_cmp, value_cmp, key_slc, value_slc, key_win, value_win, gates, lists, outputs)


def run_attention(attention: NSAttention, h: jax.Array, segment_start: jax.Array | None = None) -> NSAArrays:
    """What one layer of attention computes for its input.

    Args:
      attention: the module.
      h: [B, T, D], its (normed) input in the compute dtype.
      segment_start: int [B, T] or None.
    """
    config = attention.config
    positions = jnp.arange(h.shape[1], dtype=jnp.int32)
    p = attention.project(h, positions, h.shape[1])
    key_cmp, value_cmp = attention.compress(p.key_raw, p.value_raw, positions[..., :1], h.shape[1])
    keys_values = (p.key_slc, p.value_slc, p.key_win, p.value_win)
    common: dict[str, Any] = dict(config=config.nsa, segment_start=segment_start, implementation=config.implementation)
    if config.selector == "mean_key":
        lists = select_by_mean_key(p.query, key_cmp, **common)
        pair = nsa.selected_and_window(p.query, *keys_values, lists, **common)[:2]
        gates = jnp.pad(p.gates, [(0, 0)] * 3 + [(1, 0)])
        value_cmp = jnp.zeros((*key_cmp.shape[:3], config.value_head_dim), key_cmp.dtype)
        outputs = (jnp.zeros_like(pair[0]), *pair)
        return NSAArrays(p.query, key_cmp, value_cmp, *keys_values, gates, lists, outputs)
    assert value_cmp is not None
    return run_branches(p.query, key_cmp, value_cmp, *keys_values, p.gates, **common)


def walk_blocks(
    model: Transformer, tokens: jax.Array, attend: Callable[[Any, jax.Array], tuple[jax.Array, Any]]
) -> tuple[jax.Array, Any]:
    """The model's forward pass with attention that the caller computes. Traceable.

    Layers are stacked whether or not the model scans them, so both kinds are walked by one scan.

    Args:
      model: a Transformer.
      tokens: int32 [B, T].
      attend: called with a layer's attention module and its normed input [B, T, D]; returns attention's output
        [B, T, D] and arrays to keep, or None for layers that keep nothing.

    Returns:
      What `model.hidden` returns, and the kept arrays with a leading axis of the layers that kept some, such as
      those of `model.config.layers_of("nsa")`; None if there are none.
    """
    config = model.config
    graphdefs, stacks = zip(*map(nnx.split, layer_stacks(model.blocks, config)), strict=True)

    def period(x, params):
        seen = []
        for graphdef, layer in zip(graphdefs, params, strict=True):
            block: Any = nnx.merge(graphdef, layer)
            x, found = block.forward(x, functools.partial(attend, block.attention))
            seen += [] if found is None else [found]
        return x, jax.tree.map(lambda *parts: jnp.stack(parts), *seen) if seen else None

    x, seen = jax.lax.scan(period, embed(model.embedding[...], tokens, config.dtype), stacks)
    # From [periods, layers of a period that kept some, ...]; arrays may be of size 0.
    return model.norm(x), jax.tree.map(lambda a: a.reshape(a.shape[0] * a.shape[1], *a.shape[2:]), seen)


def walk_layers(
    model: Transformer, tokens: jax.Array, segment_start: jax.Array | None, look: Callable[[NSAArrays], Any]
) -> tuple[jax.Array, Any]:
    """`walk_blocks` with a function applied to what each NSA layer computes. Traceable.

    Args:
      model: a Transformer with NSA layers.
      tokens: int32 [B, T].
      segment_start: int32 [B, T] or None.
      look: `NSAArrays` of a layer -> arrays.

    Returns:
      What `model.hidden` returns, and what `look` returned with a leading axis of the NSA layers.

    Raises:
      ValueError: the model has no NSA layers.
    """
    kinds = model.config.kinds
    if "nsa" not in kinds:
        raise ValueError(f"model.config.attention={'/'.join(kinds)!r}: must be 'nsa' to be looked into")

    def attend(attention, normed):
        if not isinstance(attention, NSAttention):
            return attention(normed, segment_start), None
        arrays = run_attention(attention, normed, segment_start)
        return attention.output(arrays.attended()), look(arrays)

    return walk_blocks(model, tokens, attend)
