"""Backward pass of selected attention: one pass by key block that computes every score once.

A program owns one key block and a chunk of the queries that listed it (`readers.invert`). It recomputes their
probabilities and accumulates dk and dv in registers; a small kernel adds a block's work items. What dq needs goes to a
buffer indexed by (query, list slot), in one of two forms:

- partials: the program multiplies by its keys and stores each query's partial sum of dq, [G, H] per entry; a kernel
  sums a query's slots. This is the least work where G is small.
- scores: the program stores the gradient of the scores, [G, select_block] per entry; a kernel by query (`grad_query`)
  multiplies them by the keys of the listed blocks. This halves the traffic at H = 128 and leaves registers for dk and
  dv: better from G = 8.

Hopper has a kernel of its own for either form, `grad_partials_sm90` and `grad_scores_sm90`.

Every sum has a fixed order and no atomics are used, so results are bit-reproducible. The buffer is bounded: the pass
runs over (batch, key/value head) pairs and ranges of queries one after the other, see
`SelectedBackwardConfig.buffer_bytes`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from nsa_jax.ops.choices import SelectedBackwardPlan
from nsa_jax.ops.kernels import readers
from nsa_jax.ops.kernels.selected import (
    grad_by_block_triton,
    grad_partials_sm90,
    grad_query,
    grad_reduce_triton,
    grad_scores_sm90,
    inversion,
    whole_row_sm90,
)
from nsa_jax.ops.kernels.selected.grad_layout import Layout, make_layout
from nsa_jax.ops.kernels.softmax import LOG2E
from nsa_jax.ops.kernels.triton import empty


def _by_block_module(layout: Layout):
    """The module whose `by_block` serves the pass by block."""
    if not layout.hopper:
        return grad_by_block_triton
    return grad_scores_sm90 if layout.config.keep_scores else grad_partials_sm90


def _step(carry, step, prepared, inverted: readers.InvertedLists, finish_query, tensors, layout: Layout):
    """One (group of pairs, range of queries): updates d_query, d_key and d_value in place."""
    d_query, d_key, d_value = carry
    buffer, d_key_items, d_value_items = _by_block_module(layout).by_block(step, prepared, tensors, layout)
    d_key, d_value = grad_reduce_triton.add_items(
        step, inverted.offset, d_key_items, d_value_items, d_key, d_value, layout
    )
    return finish_query(step, buffer, d_query), d_key, d_value


def _entries_by_range(block_indices: jax.Array, layout: Layout) -> jax.Array:
    """Block lists [B, T, K, n] as [B*K*ranges, range_length*n], padded with J."""
    padded_length = layout.ranges * layout.range_length
    entries = jnp.minimum(block_indices, layout.num_blocks).transpose(0, 2, 1, 3)
    pad = ((0, 0), (0, 0), (0, padded_length - layout.length), (0, 0))
    entries = jnp.pad(entries, pad, constant_values=layout.num_blocks)
    return entries.reshape(layout.batch * layout.num_kv * layout.ranges, layout.entries)


def _inverted_lists(block_indices: jax.Array, layout: Layout, needs_entries: bool):
    """(entries by range or, if they need not be there, None; inverted lists; entries of each token).

    The latter are int32 [B*K, at least T].
    """
    pairs, tile = layout.batch * layout.num_kv, inversion.WORD_BITS
    fits = inversion.fits(layout.batch, layout.length, layout.num_kv, tile, layout.num_blocks)
    if fits and not needs_entries:
        inverted, counts = inversion.invert(
            inversion.mark_lists(block_indices, layout.num_blocks, tile), block_indices, layout.num_blocks,
            layout.config.chunk, tile=tile, tiles_per_row=pl.cdiv(layout.range_length, tile), entries=layout.entries,
        )  # fmt: skip
        return None, inverted, counts.reshape(pairs, -1)
    entries = _entries_by_range(block_indices, layout)
    inverted = readers.invert(entries, layout.num_blocks, layout.config.chunk)
    counts = (entries < layout.num_blocks).reshape(pairs, -1, layout.slots).sum(-1, dtype=jnp.int32)
    return entries, inverted, counts


def selected_backward(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    block_indices: jax.Array,
    delta: jax.Array,
    lse: jax.Array,
    d_out: jax.Array,
    *,
    select_block: int,
    segment_start: jax.Array,
    query_offset: jax.Array | int,
    plan: SelectedBackwardPlan,
    packed: bool = True,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of selected attention.

    Args:
      query: [B, T, N, H].
      key: [B, S, K, H].
      value: [B, S, K, V].
      block_indices: int32 [B, T, K, n], ascending without repeats, padded with J or more.
      delta: float32 [B, T, N], `row_delta` of the forward result and d_out.
      lse: float32 [B, T, N], log-sum-exp (natural log) of the forward pass; -inf for rows that see nothing, whose
        gradients are 0.
      d_out: [B, T, N, V], cotangent of the forward result.
      select_block: block size.
      segment_start: int32 [B, T].
      query_offset: int, or int32 scalar; position of the first query in the keys' row.
      plan: the kernels.
      packed: False if rows hold one document each.

    Returns:
      (d_query, d_key, d_value), like query, key and value.
    """
    batch, length, num_heads, head_dim = query.shape
    num_kv, value_dim, slots = key.shape[2], value.shape[-1], block_indices.shape[-1]
    config = plan.lists
    if config is None:
        return whole_row_sm90.backward(
            query, key, value, block_indices, delta, lse, d_out, segment_start, query_offset, plan, packed
        )
    hopper = plan.by_block.kernel.endswith("_sm90")
    layout = make_layout(query, key, value, slots, select_block, config, hopper)
    if max(batch * length * num_heads, batch * key.shape[1] * num_kv) >= 2**31:
        raise NotImplementedError("selected_attention: more than 2^31 query or key rows (B*T*N, B*S*K) in the backward")

    offset = jnp.asarray(query_offset, jnp.int32)
    split = grad_query.split_for(block_indices, segment_start, offset, layout)
    by_token = config.keep_scores and split is None
    entries, inverted, counts = _inverted_lists(block_indices, layout, needs_entries=by_token)
    lse = jnp.where(jnp.isneginf(lse), 0.0, lse * LOG2E)
    tensors = (
        query.reshape(-1, head_dim),
        key.reshape(-1, head_dim),
        value.reshape(-1, value_dim),
        d_out.astype(query.dtype).reshape(-1, value_dim),
        lse.reshape(-1),
        delta.reshape(-1),
        segment_start.astype(jnp.int32).reshape(-1),
    )
    prepared: Any = inverted
    if layout.hopper:
        lists = inverted, block_indices, segment_start.astype(jnp.int32)
        prepared = _by_block_module(layout).prepare(*lists, offset, layout)

    def finish_query(step, buffer, d_query):
        if not config.keep_scores:
            return grad_reduce_triton.add_slots(step, counts, buffer, d_query, layout)
        return grad_query.finish_query(step, split, counts, entries, buffer, tensors[1], d_query, layout)

    def body(i, carry):
        i = jnp.asarray(i, jnp.int32)
        step = jnp.stack([i // layout.ranges * layout.pairs, i % layout.ranges, offset])
        return _step(carry, step, prepared, inverted, finish_query, tensors, layout)

    key_rows = batch * layout.num_blocks * layout.columns * num_kv
    # Every row of dq is written by exactly one step. The first range writes every row of dk and dv, later ones add.
    unwritten = [
        jax.ShapeDtypeStruct((batch * length * num_heads, head_dim), query.dtype),
        *[
            jax.ShapeDtypeStruct((key_rows, x.shape[-1]), jnp.float32 if layout.ranges > 1 else x.dtype)
            for x in (key, value)
        ],
    ]
    if layout.steps == 1:
        d_query, d_key, d_value = body(0, unwritten)
    else:
        carry = tuple(empty(x.shape, x.dtype, delta) for x in unwritten)
        d_query, d_key, d_value = lax.fori_loop(0, layout.steps, body, carry)

    def finish(x, like):
        x = x.reshape(batch, layout.num_blocks, layout.columns, num_kv, -1)[:, :, :select_block]
        return x.reshape(batch, -1, num_kv, x.shape[-1])[:, : layout.num_keys].astype(like.dtype)

    return d_query.reshape(query.shape), finish(d_key, key), finish(d_value, value)
