"""The selection loss of a layer: its compressed keys learn to find the blocks that its selected branch would read.

No gradient flows through a block list. The scores that choose the blocks are the compressed branch's attention, and
they learn from that branch's output alone, which need not make them good at choosing: with keys of each branch's own,
the lists of an 85M-parameter model held hardly more of its attention than random ones after 250M tokens in rows of
32,768 (docs/quality.md). This loss teaches them with dense attention of a few queries in each row, as DeepSeek-V3.2
teaches its indexer (arXiv 2512.02556, section 2.1): the KL divergence of the scores from the dense attention of the
selected branch's own queries and keys. It trains the projection of the keys that are compressed, and their compressor,
and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from nsa_jax.nn.attention import NSAttention
from nsa_jax.nn.sharding import TENSOR, constrain_tensor, constrain_tokens, constrain_whole, tensor_size
from nsa_jax.ops import block_mass, blocks, checks
from nsa_jax.ops.blocks import NSAConfig

# Queries whose dense attention is in memory at once.
_CHUNK = 16


def selection_queries(length: int, count: int, config: NSAConfig, key: jax.Array) -> Int[Array, " P"]:
    """Positions at equal distances, with a random beginning, of a row's tokens that have more blocks than they read.

    Args:
      length: tokens of the row.
      count: P.
      config: the operator's.
      key: PRNG key.

    Raises:
      ValueError: no token of the row has a choice.
    """
    first = config.num_selected * config.select_block
    if length <= first:
        raise ValueError(f"length={length}: must be above num_selected * select_block = {first} for a choice of blocks")
    places = (jnp.arange(count) + jax.random.uniform(key)) / count
    # Near its end, the last place may round to 1, which is behind the row.
    return jnp.minimum(first + (places * (length - first)).astype(jnp.int32), length - 1)


def selection_loss(
    attention: NSAttention,
    x: Float[Array, "B T D"],
    segment_start: Int[Array, "B T"] | None,
    queries: Int[Array, " P"],
) -> Float[Array, " B"]:
    """KL divergence of a layer's selection scores from its dense attention, in nats, averaged over some queries.

    Args:
      attention: a layer with the selector "compressed".
      x: [B, T, D], its (normed) input in the compute dtype; no gradient flows to it.
      segment_start: int [B, T], first position of each token's document; None if rows hold one document.
      queries: int [P], positions of the queries.

    Returns:
      float32 [B]: each row's mean over those of the queries that have a choice; 0 if none has.
    """
    config, length = attention.config, x.shape[1]
    batch, count = x.shape[0], queries.shape[0]
    x, w_in = jax.lax.stop_gradient(x), attention.w_in[...]
    everywhere = jnp.arange(length, dtype=jnp.int32)

    def heads(tokens: jax.Array, piece: int, number: int, norm: Any) -> jax.Array:
        """A piece of the projection, as in `Projections`, before RoPE. Weights travel, not activations."""
        first = sum(attention.widths[:piece])
        columns = slice(first, first + attention.widths[piece])
        weights = w_in[:, columns].astype(config.dtype).reshape(x.shape[-1], number, -1)
        weights = constrain_tensor(weights, 1) if tensor_size() > 1 else constrain_whole(weights)
        out = constrain_tokens(jnp.einsum("btd,dnh->btnh", tokens, weights), TENSOR)
        if attention.b_in is not None:
            out += attention.b_in[...][columns].astype(config.dtype).reshape(number, -1)
        return out if norm is None else _with_weights(norm, jax.lax.stop_gradient)(out)

    slc = 1 if config.shared_kv else 3
    query = config.rope(heads(x[:, queries], 0, config.num_heads, attention.q_norm), queries, length)
    key_slc = config.rope(heads(x, slc, config.num_kv_heads, attention.k_norm), everywhere, length)
    key_raw = heads(x, 1, config.num_kv_heads, attention.k_norm)
    query, key_slc = jax.lax.stop_gradient((query, key_slc))
    if config.shared_kv:  # the keys serve all branches
        key_raw = jax.lax.stop_gradient(key_raw)
    assert attention.compress_key is not None
    key_cmp = _with_weights(attention.compress_key, constrain_whole)(key_raw)
    last = blocks.compressed_last_position(jnp.arange(key_cmp.shape[1], dtype=jnp.int32), config.nsa)
    key_cmp = config.rope(key_cmp, last, length)

    t = jnp.broadcast_to(queries, (batch, count))
    start = jnp.zeros_like(t) if segment_start is None else checks.clip_segments(segment_start[:, queries])

    mass = block_mass.block_mass(query, key_slc, config.nsa, start, t, at_once=_CHUNK)
    scores = block_mass.importance(query, key_cmp, mass.shape[-1], config.nsa, start, t)
    divergence, choice = block_mass.ranking_loss(mass, scores, config.nsa, start, t)
    return divergence.sum(1) / jnp.maximum(choice.sum(1), 1.0)


def _with_weights(module: nnx.Module, change: Callable[[jax.Array], jax.Array]) -> Any:
    """The same module with changed parameters."""
    graphdef, state = nnx.split(module)
    return nnx.merge(graphdef, jax.tree.map(change, state))
