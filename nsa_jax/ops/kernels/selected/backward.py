"""Backward pass of selected attention: one key-major pass that computes every score once.

A program owns one key block and a chunk of the queries that listed it (`readers.invert`). It recomputes their
probabilities and accumulates dk and dv in registers; a small kernel adds a block's work items. What dq needs goes to a
buffer indexed by (query, list slot), in one of two forms:

- shares: the program multiplies by its keys and stores each query's share of dq, [G, H] per entry; a kernel sums a
  query's slots. Least work where G is small.
- scores: it stores the gradient of the scores, [G, select_block] per entry; a query-major kernel multiplies them by the
  keys of the listed blocks. Half the traffic at H = 128 and registers left for dk and dv: better from G = 8.

Hopper has a kernel of its own for either form, `grad_partials_sm90` and `grad_scores_sm90`.

Every sum has a fixed order and no atomics are used, so results are bit-reproducible. The buffer is bounded: the pass
runs over (batch, key/value head) pairs and ranges of queries one after the other, see
`SelectedBackwardConfig.buffer_bytes`.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from nsa_jax.ops import blocks
from nsa_jax.ops import tiles as tuning
from nsa_jax.ops.kernels import readers
from nsa_jax.ops.kernels.selected import grad_partials_sm90, grad_query, grad_scores_sm90, whole_row_sm90
from nsa_jax.ops.kernels.selected.grad_layout import Layout, make_layout
from nsa_jax.ops.kernels.softmax import LOG2E
from nsa_jax.ops.kernels.triton import dot, load_rows, pieces, store_rows, triton_call
from nsa_jax.ops.target import current_target
from nsa_jax.ops.tiles import SelectedBackwardConfig


def _sum_of_products(left, right, contract: tuple[int, int]):
    return functools.reduce(jnp.add, [dot(a, b, contract) for a, b in zip(left, right, strict=True)])


def _key_major_kernel(
    step_ref,  # int32 [3]: first pair, range index, query_offset
    order_ref,  # int32 [B*K*ranges, E]
    block_ref,  # int32 [B*K*ranges, W], also begin and end
    begin_ref,
    end_ref,
    query_ref,  # [B*T*N, H]
    key_ref,  # [B*S*K, H]
    value_ref,  # [B*S*K, V]
    d_out_ref,  # [B*T*N, V]
    lse_ref,  # float32 [B*T*N], base 2
    delta_ref,  # float32 [B*T*N]
    start_ref,  # int32 [B*T]
    buffer_ref,  # [(pairs*E + 1) * G, buffer_width], by (query, slot); the last G rows take what nobody reads
    d_key_ref,  # float32 [pairs*W*columns, H]
    d_value_ref,  # float32 [pairs*W*columns, V]
    *,
    layout: Layout,
):
    item, local_pair = pl.program_id(0), pl.program_id(1)
    pair = step_ref[0] + local_pair
    batch, head = pair // layout.num_kv, pair % layout.num_kv
    row = pair * layout.ranges + step_ref[1]
    first_query = step_ref[1] * layout.range_length
    begin, end = begin_ref[row, item], end_ref[row, item]
    config, rows, group, columns = layout.config, layout.config.rows, layout.group, layout.tile_columns
    skip = pl.program_id(2) * columns
    dtype = query_ref.dtype

    @pl.when(begin < end)
    def _():
        key_row, first_key, last_key = layout.key_rows(batch, head, block_ref[row, item], skip, columns)
        key = load_rows(key_ref, key_row, layout.head_dim)
        value = load_rows(value_ref, key_row, layout.value_dim)

        def entries_at(index):
            """Of list entries from `begin` on: (place in the lists, query token), past the end those of the last."""
            flat = order_ref[row, jnp.minimum(begin + index, end - 1)]
            return flat, first_query + lax.div(flat, layout.slots)

        def tile(i, carry, masked):
            d_key, d_value = carry
            # Rows are the item's (entry, head of the group) pairs; a tile may begin and end inside a group.
            pair_row = i * rows + lax.iota(jnp.int32, rows)
            entry, member = lax.div(pair_row, group), lax.rem(pair_row, group)
            valid = begin + entry < end
            flat, token = entries_at(entry)
            query_row = (batch * layout.length + token) * layout.num_heads + head * group + member
            query = load_rows(query_ref, query_row, layout.head_dim)
            d_out = load_rows(d_out_ref, query_row, layout.value_dim)
            # A row that must not count has no probability anywhere.
            lse, delta = jnp.where(valid, lse_ref[query_row], jnp.inf), delta_ref[query_row]

            scores = _sum_of_products(query, key, (1, 1)) * (layout.scale * LOG2E)  # [rows, columns]
            probs = jnp.exp2(scores - lse[:, None])
            if masked:
                low = start_ref[batch * layout.length + token]
                high = jnp.minimum(token + step_ref[2], last_key)
                position = first_key + lax.broadcasted_iota(jnp.int32, (rows, columns), 1)
                probs = jnp.where((position <= high[:, None]) & (position >= low[:, None]), probs, 0.0)
            probs = probs.astype(dtype)
            d_value = [acc + dot(piece, probs, (0, 0)) for acc, piece in zip(d_value, d_out, strict=True)]
            d_probs = _sum_of_products(d_out, value, (1, 1))
            # From the rounded probabilities: the gradient is rounded too, and float32 ones would cost registers.
            d_scores = (probs.astype(jnp.float32) * (d_probs - delta[:, None])).astype(dtype)
            d_key = [acc + dot(piece, d_scores, (0, 0)) for acc, piece in zip(d_key, query, strict=True)]
            share = jnp.where(valid, local_pair * layout.entries + flat, layout.pairs * layout.entries)
            buffer_row = share * group + member
            if config.keep_scores:
                buffer_ref[buffer_row, pl.ds(skip, columns)] = d_scores
            else:
                store_rows(buffer_ref, buffer_row, [dot(d_scores, piece, (1, 0)) for piece in key])
            return d_key, d_value

        # Transposed sums, [dim, columns]: both operands of their products then come from shared memory as they lie
        # there, which leaves registers free; with [columns, dim] Hopper's products were serialised for want of them.
        zeros = lambda dim: [jnp.zeros((size, columns), jnp.float32) for _, size in pieces(dim)]  # noqa: E731
        sums = zeros(layout.head_dim), zeros(layout.value_dim)
        # Queries ascend, so those that see a part of the block only come first, unless rows are packed. Masks for all
        # would cost a tenth of the time at head dim 128.
        index = lax.iota(jnp.int32, pl.next_power_of_2(config.chunk))
        _, token = entries_at(index)
        whole = (token + step_ref[2] >= first_key + columns - 1) & (
            start_ref[batch * layout.length + token] <= first_key
        )
        whole &= last_key == first_key + columns - 1
        partial = jnp.max(jnp.where(whole | (begin + index >= end), 0, index + 1))
        tiles_of = lambda entries: (entries * group + rows - 1) // rows  # noqa: E731
        sums = lax.fori_loop(0, tiles_of(partial), functools.partial(tile, masked=True), sums)
        sums = lax.fori_loop(tiles_of(partial), tiles_of(end - begin), functools.partial(tile, masked=False), sums)
        d_key, d_value = sums
        out_row = (local_pair * layout.items + item) * layout.columns + skip + lax.iota(jnp.int32, columns)
        store_rows(d_key_ref, out_row, [piece.T * layout.scale for piece in d_key])
        store_rows(d_value_ref, out_row, [piece.T for piece in d_value])


_PIECE = 16  # key rows per program of the key and value reduction


def _reduce_items_kernel(
    step_ref, offset_ref, d_key_items_ref, d_value_items_ref, _k, _v, d_key_ref, d_value_ref, *, layout: Layout
):
    """Adds a block's work items, in order, to dk and dv [B*J*columns*K, H or V], or begins with range 0.

    They are float32, unless all items belong to one range, whose sum is rounded here.
    """
    block, piece, local_pair = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    pair = step_ref[0] + local_pair
    row = pair * layout.ranges + step_ref[1]
    first, last = offset_ref[row, block], offset_ref[row, block + 1]
    begins = step_ref[1] == 0

    @pl.when(begins | (first < last))
    def _():
        column = piece * _PIECE + lax.iota(jnp.int32, _PIECE)
        batch, head = pair // layout.num_kv, pair % layout.num_kv
        out_row = ((batch * layout.num_blocks + block) * layout.columns + column) * layout.num_kv + head
        for items_ref, out_ref, dim in (
            (d_key_items_ref, d_key_ref, layout.head_dim),
            (d_value_items_ref, d_value_ref, layout.value_dim),
        ):

            def add(item, total, items_ref=items_ref, dim=dim):
                item_row = (local_pair * layout.items + item) * layout.columns + column
                return tuple(acc + part for acc, part in zip(total, load_rows(items_ref, item_row, dim), strict=True))

            zeros = lambda dim=dim: tuple(jnp.zeros((_PIECE, size), jnp.float32) for _, size in pieces(dim))  # noqa: E731
            before = zeros()
            if layout.ranges > 1:
                before = lax.cond(begins, zeros, lambda ref=out_ref, dim=dim: load_rows(ref, out_row, dim))
            total = lax.fori_loop(first, last, add, before)
            store_rows(out_ref, out_row, total)


def _reduce_slots_kernel(step_ref, count_ref, shares_ref, _dq, d_query_ref, *, layout: Layout, tokens: int, width: int):
    """Sums a query's slots, in order: shares [pairs*E + 1, G*H] to dq [B*T, N*H]."""
    local, part, local_pair = pl.program_id(0) * tokens, pl.program_id(1), pl.program_id(2)
    pair = step_ref[0] + local_pair
    token = step_ref[1] * layout.range_length + local

    @pl.when(token < layout.length)
    def _():
        batch, head = pair // layout.num_kv, pair % layout.num_kv
        inside = lax.iota(jnp.int32, tokens)
        count = count_ref[pair, pl.ds(token, tokens)]

        def add(slot, total):
            share = local_pair * layout.entries + (local + inside) * layout.slots + slot
            piece = shares_ref[share, pl.ds(part * width, width)].astype(jnp.float32)
            # Slots past a list's end were never written.
            return total + jnp.where((slot < count)[:, None], piece, 0.0)

        total = jnp.zeros((tokens, width), jnp.float32)
        if layout.slots <= 32:
            for slot in range(layout.slots):  # unrolled: all loads in flight
                total = add(slot, total)
        else:
            total = lax.fori_loop(0, layout.slots, add, total)
        at = head * (layout.group * layout.head_dim) + part * width
        total = total * layout.scale
        d_query_ref[batch * layout.length + token + inside, pl.ds(at, width)] = total.astype(d_query_ref.dtype)


def _sum_shares(step, counts, buffer, d_query, layout: Layout):
    """Adds up the shares of dq into the rows of d_query [B*T*N, H] that this step owns."""
    span = layout.group * layout.head_dim
    width = min(span & -span, 1024)
    tokens = 1
    while tokens * width < 2048 and layout.length % (2 * tokens) == 0 and layout.range_length % (2 * tokens) == 0:
        tokens *= 2
    shape = (layout.batch * layout.length, layout.num_heads * layout.head_dim)
    return triton_call(
        functools.partial(_reduce_slots_kernel, layout=layout, tokens=tokens, width=width),
        grid=(layout.range_length // tokens, span // width, layout.pairs),
        out_shape=jax.ShapeDtypeStruct(shape, d_query.dtype),
        input_output_aliases={3: 0},
        num_warps=4,
        num_stages=1,
        name="nsa_selected_backward_reduce_slots",
    )(step, counts, buffer.reshape(-1, span), d_query.reshape(shape)).reshape(d_query.shape)


def _hopper_serves(query, value, select_block: int, config: SelectedBackwardConfig) -> bool:
    """Whether Hopper's kernel serves the key-major pass."""
    group, target = query.shape[2] // value.shape[2], current_target()
    if config.keep_scores:
        return grad_scores_sm90.serves(query, value, group, select_block, target)
    return grad_partials_sm90.serves(query, value, group, select_block, config.chunk, target)


def _hopper_kernel(layout: Layout):
    """The module of Hopper's kernel for the layout's buffer."""
    return grad_scores_sm90 if layout.config.keep_scores else grad_partials_sm90


def _key_major(step, prepared, tensors, layout: Layout):
    """(buffer, dk and dv of every work item) of one step; `prepared`: inverted lists, or what Hopper's kernel made."""
    if layout.hopper:
        return _hopper_kernel(layout).key_major(step, prepared, tensors, layout)
    items = layout.pairs * layout.items * layout.columns
    dtype = tensors[0].dtype
    return triton_call(
        functools.partial(_key_major_kernel, layout=layout),
        grid=(layout.items, layout.pairs, layout.columns // layout.tile_columns),
        out_shape=[
            jax.ShapeDtypeStruct(((layout.pairs * layout.entries + 1) * layout.group, layout.buffer_width), dtype),
            *[jax.ShapeDtypeStruct((items, dim), jnp.float32) for dim in (layout.head_dim, layout.value_dim)],
        ],
        num_warps=layout.config.num_warps,
        num_stages=layout.config.num_stages,
        name="nsa_selected_backward_key_major",
    )(step, prepared.order, prepared.block, prepared.begin, prepared.end, *tensors)


def _step(carry, step, prepared, inverted: readers.InvertedLists, finish_query, tensors, layout: Layout):
    """One (group of pairs, range of queries): updates d_query, d_key and d_value in place."""
    d_query, d_key, d_value = carry
    buffer, d_key_items, d_value_items = _key_major(step, prepared, tensors, layout)
    d_key, d_value = triton_call(
        functools.partial(_reduce_items_kernel, layout=layout),
        grid=(layout.num_blocks, layout.columns // _PIECE, layout.pairs),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (d_key, d_value)],
        input_output_aliases={4: 0, 5: 1},
        num_warps=4,
        num_stages=2,
        name="nsa_selected_backward_reduce_items",
    )(step, inverted.offset, d_key_items, d_value_items, d_key, d_value)
    return finish_query(step, buffer, d_query), d_key, d_value


def _entries_by_range(block_indices: jax.Array, layout: Layout) -> jax.Array:
    """Block lists [B, T, K, n] as [B*K*ranges, range_length*n], padded with J."""
    padded_length = layout.ranges * layout.range_length
    entries = jnp.minimum(block_indices, layout.num_blocks).transpose(0, 2, 1, 3)
    pad = ((0, 0), (0, 0), (0, padded_length - layout.length), (0, 0))
    entries = jnp.pad(entries, pad, constant_values=layout.num_blocks)
    return entries.reshape(layout.batch * layout.num_kv * layout.ranges, layout.entries)


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
    query_offset: jax.Array,
    config: SelectedBackwardConfig | None = None,
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
      query_offset: int32 scalar, position of the first query in the keys' row.
      config: tile sizes; None chooses them from the shape.

    Returns:
      (d_query, d_key, d_value), like query, key and value.
    """
    batch, length, num_heads, head_dim = query.shape
    num_kv, value_dim, slots = key.shape[2], value.shape[-1], block_indices.shape[-1]
    if config is None and whole_row_sm90.serves(query, value, slots, select_block):
        return whole_row_sm90.backward(query, key, value, block_indices, delta, lse, d_out, segment_start, query_offset)
    if config is None:
        all_blocks = batch * num_kv * blocks.num_selection_blocks(key.shape[1], select_block)
        group = num_heads // num_kv
        config = tuning.selected_backward_config(group, head_dim, value_dim, query.dtype, select_block, all_blocks)
    layout = make_layout(
        query, key, value, slots, select_block, config, _hopper_serves(query, value, select_block, config)
    )
    if max(batch * length * num_heads, batch * key.shape[1] * num_kv) >= 2**31:
        raise NotImplementedError("selected_attention: more than 2^31 query or key rows (B*T*N, B*S*K) in the backward")

    entries = _entries_by_range(block_indices, layout)
    inverted = readers.invert(entries, layout.num_blocks, config.chunk)
    counts = (entries < layout.num_blocks).reshape(batch * num_kv, -1, slots).sum(-1, dtype=jnp.int32)
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
    offset = jnp.asarray(query_offset, jnp.int32)
    prepared: Any = inverted
    if layout.hopper:
        prepared = _hopper_kernel(layout).prepare(inverted, segment_start.astype(jnp.int32), offset, layout)

    split = grad_query.split_for(block_indices, segment_start, offset, layout)

    def finish_query(step, buffer, d_query):
        if not config.keep_scores:
            return _sum_shares(step, counts, buffer, d_query, layout)
        return grad_query.finish_query(step, split, counts, entries, buffer, tensors[1], d_query, layout)

    def body(i, carry):
        i = jnp.asarray(i, jnp.int32)
        step = jnp.stack([i // layout.ranges * layout.pairs, i % layout.ranges, offset])
        return _step(carry, step, prepared, inverted, finish_query, tensors, layout)

    key_rows = batch * layout.num_blocks * layout.columns * num_kv
    carry = (
        lax.empty((batch * length * num_heads, head_dim), query.dtype),  # every row is written by exactly one step
        # The first range writes every row, later ones add to it.
        *[lax.empty((key_rows, x.shape[-1]), jnp.float32 if layout.ranges > 1 else x.dtype) for x in (key, value)],
    )
    d_query, d_key, d_value = body(0, carry) if layout.steps == 1 else lax.fori_loop(0, layout.steps, body, carry)

    def finish(x, like):
        x = x.reshape(batch, layout.num_blocks, layout.columns, num_kv, -1)[:, :, :select_block]
        return x.reshape(batch, -1, num_kv, x.shape[-1])[:, : layout.num_keys].astype(like.dtype)

    return d_query.reshape(query.shape), finish(d_key, key), finish(d_value, value)
