"""Dense attention's mass in selection blocks, what lists hold of it, and a loss that teaches scores to rank blocks so.

Dense attention is the softmax of a query over all tokens that it may use. Its mass in a selection block is the sum over
the block's tokens, averaged over the heads that share a list. B batch, P queries, N query heads, K key/value heads, S
tokens, C compressed blocks, J selection blocks.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from nsa_jax.ops import blocks
from nsa_jax.ops.blocks import NSAConfig

_HIGHEST = jax.lax.Precision.HIGHEST
# Below this a block's score counts as this, so that the logarithm and its gradient stay finite.
_LEAST = 1e-20


def probabilities(query: jax.Array, key: jax.Array, mask: jax.Array) -> jax.Array:
    """Softmax of query [B, P, N, H] over key [B, S, K, H] under mask [B, P, K or 1, S]; 0 if all keys are masked.

    Products are accumulated in float32, also those of bfloat16 arrays.
    """
    batch, length, num_heads, head_dim = query.shape
    grouped = query.reshape(batch, length, key.shape[2], -1, head_dim)
    exact = {"precision": _HIGHEST, "preferred_element_type": jnp.float32}
    scores = jnp.einsum("bpkgh,bskh->bpkgs", grouped, key, **exact) * head_dim**-0.5
    mask = mask[:, :, :, None, :]
    probs = jnp.where(mask, jax.nn.softmax(jnp.where(mask, scores, -1e30), axis=-1), 0.0)
    return probs.reshape(batch, length, num_heads, key.shape[1])


def block_mass(query, key, config: NSAConfig, segment_start=None, positions=None, at_once: int = 0) -> jax.Array:
    """Dense attention's mass in every selection block.

    Args:
      query: [B, P, N, H], of the queries at `positions`.
      key: [B, S, K, H], of all tokens.
      config: the operator's, for the size of the blocks.
      segment_start: int [B, P] or None.
      positions: int [B, P]; None means that the queries are all of the row's tokens.
      at_once: queries whose probabilities are in memory at once; 0: all.

    Returns:
      float32 [B, P, K, J], averaged over the N / K heads of a key/value head; sums to 1 over J.
    """
    t, start = blocks.query_positions(query, segment_start, 0)
    t = t if positions is None else positions
    if not at_once:
        return _block_mass(query, key, config, start, t)
    by_query = jax.tree.map(lambda part: jnp.moveaxis(part, 1, 0)[:, :, None], (query, start, t))
    found = jax.lax.map(lambda one: _block_mass(one[0], key, config, *one[1:])[:, 0], by_query, batch_size=at_once)
    return jnp.moveaxis(found, 0, 1)


def _block_mass(query, key, config: NSAConfig, start, t) -> jax.Array:
    token = jnp.arange(key.shape[1])
    usable = (token >= start[..., None]) & (token <= t[..., None])
    probs = probabilities(query, key, usable[:, :, None])  # [B, P, N, S]
    size = config.select_block
    count = blocks.num_selection_blocks(key.shape[1], size)
    probs = jnp.pad(probs, [(0, 0)] * 3 + [(0, count * size - key.shape[1])])
    mass = probs.reshape(*probs.shape[:2], key.shape[2], -1, count, size).sum(-1)
    return mass.mean(3)


def held_mass(mass, lists):
    """The share of the mass [..., J] that the blocks of lists int32 [..., n] hold: [...]."""
    return (mass * blocks.listed_blocks(lists, mass.shape[-1])).sum(-1)


def oracle_lists(mass: jax.Array, config: NSAConfig, positions: jax.Array, segment_start: jax.Array) -> jax.Array:
    """The lists that hold the most mass, with the blocks that every list must hold.

    Args:
      mass: float32 [B, P, K, J].
      config: the operator's.
      positions: int [B, P] of the queries.
      segment_start: int [B, P] of the queries.

    Returns:
      int32 [B, P, K, n].
    """
    t, start = (jnp.broadcast_to(x[..., None], mass.shape[:-1]) for x in (positions, segment_start))
    return blocks.select_from_importance(mass, t, start, config)


def random_mass(mass, config: NSAConfig, positions, segment_start):
    """The share of the mass that lists hold on average if all but the blocks that every list must hold are random.

    Args:
      mass: float [B, P, K, J].
      config: the operator's.
      positions: int [B, P].
      segment_start: int [B, P].

    Returns:
      float [B, P, K].
    """
    j = jnp.arange(mass.shape[-1])
    first, last = blocks.candidate_range(
        positions[..., None, None], segment_start[..., None, None], config.select_block
    )
    candidate = (j >= first) & (j <= last)
    forced = blocks.forced_blocks(j, first, last, config)
    free = (candidate & ~forced).sum(-1)
    chance = ((config.num_selected - forced.sum(-1)) / jnp.maximum(free, 1)).clip(0, 1)
    return (mass * forced).sum(-1) + chance * (mass * (candidate & ~forced)).sum(-1)


def importance(query, key_cmp, num_blocks: int, config: NSAConfig, segment_start, positions) -> jax.Array:
    """The scores that blocks are selected by (paper eq. 8 to 10), of queries at any positions.

    Args:
      query: [B, P, N, H].
      key_cmp: [B, C, K, H].
      num_blocks: J.
      config: the operator's.
      segment_start: int [B, P].
      positions: int [B, P].

    Returns:
      float32 [B, P, K, J].
    """
    low, high = blocks.compressed_range(positions, segment_start, config)
    block = jnp.arange(key_cmp.shape[1])
    visible = (block >= low[..., None]) & (block < high[..., None])
    probs = probabilities(query, key_cmp, visible[:, :, None])
    probs = probs.reshape(*probs.shape[:2], key_cmp.shape[2], -1, probs.shape[-1]).sum(3)
    return blocks.fold_importance(probs, num_blocks, config)


def ranking_loss(mass, scores, config: NSAConfig, segment_start, positions) -> tuple[jax.Array, jax.Array]:
    """KL divergence from dense attention's mass to the scores, over the blocks that selection may choose or leave.

    Blocks that every list holds are left out. Mass and scores are divided by their sum over the others.

    Args:
      mass: float32 [B, P, K, J], what to learn; no gradient flows to it.
      scores: float32 [B, P, K, J], not negative.
      config: the operator's.
      segment_start: int [B, P].
      positions: int [B, P] of the queries.

    Returns:
      Two float32 [B, P]: the divergence in nats, averaged over the key/value heads, and 1 where the query has a choice.
      The divergence is 0 elsewhere.
    """
    t, start = positions[..., None, None], segment_start[..., None, None]
    j = jnp.arange(mass.shape[-1])
    first, last = blocks.candidate_range(t, start, config.select_block)
    free = (j >= first) & (j <= last) & ~blocks.forced_blocks(j, first, last, config)

    def logarithms(x):
        x = jnp.maximum(jnp.where(free, x, 0.0), _LEAST)
        return jnp.log(x) - jnp.log(x.sum(-1, keepdims=True))

    wanted = logarithms(jax.lax.stop_gradient(mass))
    divergence = jnp.where(free, jnp.exp(wanted) * (wanted - logarithms(scores)), 0.0).sum(-1).mean(-1)
    choice = blocks.has_choice(positions, segment_start, config).astype(jnp.float32)
    return divergence * choice, choice
