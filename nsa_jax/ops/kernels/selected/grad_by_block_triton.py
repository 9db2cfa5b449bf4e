"""The Triton kernel of the pass by key block, which recomputes every score once; see `selected.backward`."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from nsa_jax.ops.kernels.selected.grad_layout import Layout
from nsa_jax.ops.kernels.softmax import LOG2E
from nsa_jax.ops.kernels.triton import dot, load_rows, pieces, store_rows, triton_call


def _sum_of_products(left, right, contract: tuple[int, int]):
    return functools.reduce(jnp.add, [dot(a, b, contract) for a, b in zip(left, right, strict=True)])


def _kernel(
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
            buffer_entry = jnp.where(valid, local_pair * layout.entries + flat, layout.pairs * layout.entries)
            buffer_row = buffer_entry * group + member
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


def by_block(step, inverted, tensors, layout: Layout):
    """One step of the pass: (buffer, dk and dv of every work item).

    Args:
      step: int32 [3], first pair, range index, query_offset.
      inverted: the inverted lists.
      tensors: query [B*T*N, H], key [B*S*K, H], value [B*S*K, V], d_out [B*T*N, V], base-2 lse and delta float32
        [B*T*N], segment_start int32 [B*T].
      layout: static sizes.
    """
    items = layout.pairs * layout.items * layout.columns
    dtype = tensors[0].dtype
    return triton_call(
        functools.partial(_kernel, layout=layout),
        grid=(layout.items, layout.pairs, layout.columns // layout.tile_columns),
        out_shape=[
            jax.ShapeDtypeStruct(((layout.pairs * layout.entries + 1) * layout.group, layout.buffer_width), dtype),
            *[jax.ShapeDtypeStruct((items, dim), jnp.float32) for dim in (layout.head_dim, layout.value_dim)],
        ],
        num_warps=layout.config.num_warps,
        num_stages=layout.config.num_stages,
        name="nsa_selected_backward_key_major",
    )(step, inverted.order, inverted.block, inverted.begin, inverted.end, *tensors)
