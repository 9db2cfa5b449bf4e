"""Pass by block of the selected branch's backward for Hopper: the counterpart of `grad_by_block_triton`, for score
gradients kept in the buffer and blocks of 64 keys.

Two consumer warpgroups compute, each on a work item of its own, so that one's exponentials overlap the other's
products. Each has a producer of its own: the queries of a work item are G rows of memory each, wherever its list
points, and TMA copies them to a tile of 64 rows. The transposed score gradients leave through shared memory, G rows per
list entry, also by TMA; the producer starts those copies, which cost the consumer a fifth of its time.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

from nsa_jax.ops.kernels import readers
from nsa_jax.ops.kernels.selected.grad_layout import Layout
from nsa_jax.ops.kernels.softmax import LOG2E
from nsa_jax.ops.tiles import ROWS

_WARPGROUPS = 2
# In `order` of `prepare`'s result: the entry's query does not see all of its block.
_MASKED = 1 << 30


def prepare(inverted: readers.InvertedLists, block_indices, segment_start, query_offset, layout: Layout):
    """What all steps share: list entries, marked where a query does not see the whole block, `readers.longest_first`.

    Args:
      inverted: inverted lists.
      block_indices: int32 [B, T, K, n].
      segment_start: int32 [B, T].
      query_offset: int32 scalar.
      layout: static sizes.
    """
    row = jnp.arange(inverted.order.shape[0], dtype=jnp.int32)[:, None]
    batch, head = row // layout.ranges // layout.num_kv, row // layout.ranges % layout.num_kv
    order = jnp.clip(inverted.order, 0, layout.entries - 1)  # what lies behind the last item is undefined
    token = jnp.minimum(row % layout.ranges * layout.range_length + order // layout.slots, layout.length - 1)
    first = block_indices[batch, token, head, order % layout.slots] * ROWS
    whole = (token + query_offset >= first + ROWS - 1) & (segment_start[batch, token] <= first)
    order = jnp.where(whole, order, order | _MASKED)
    return order, *readers.longest_first(inverted, layout.config.chunk, _WARPGROUPS)


def _gather_statistics(step, order, lse, delta, layout: Layout) -> list[jax.Array]:
    """lse and delta of the rows of every list entry of a step, [pairs, E * G]: TMA takes no rows of 4 * G bytes."""
    pair = step[0] + jnp.arange(layout.pairs, dtype=jnp.int32)[:, None]
    entry = order[pair[:, 0] * layout.ranges + step[1]] & (_MASKED - 1)
    token = jnp.minimum(step[1] * layout.range_length + entry // layout.slots, layout.length - 1)
    num_kv, by_head = layout.num_kv, (layout.batch, layout.length, layout.num_kv, layout.group)
    return [x.reshape(by_head)[pair // num_kv, token, pair % num_kv].reshape(layout.pairs, -1) for x in (lse, delta)]


def by_block(step, prepared, tensors, layout: Layout):
    """One step of the pass: (buffer, dk and dv of every work item), as the Triton kernel writes them.

    Args:
      step: int32 [3], first pair, range index, query_offset.
      prepared: `prepare`'s result.
      tensors: query [B*T*N, H], key [B*S*K, H], value [B*S*K, V], d_out [B*T*N, V], base-2 lse and delta float32
        [B*T*N], segment_start int32 [B*T].
      layout: static sizes.
    """
    # A jaxlib without GPU support cannot import Mosaic GPU, and must still import the library.
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from nsa_jax.ops.kernels import sm90, sm90_gather, sm90_products

    query, key, value, d_out, lse, delta, start = tensors
    group, num_kv, scale = layout.group, layout.num_kv, layout.scale
    order, *work = prepared
    rows_of = (layout.batch, layout.length, layout.num_heads)
    query, d_out = query.reshape(*rows_of, -1), d_out.reshape(*rows_of, -1)
    key, value = (sm90.whole_tiles(x.reshape(layout.batch, layout.num_keys, num_kv, -1)) for x in (key, value))
    start = start.reshape(layout.batch, layout.length)
    per_tile = ROWS // group
    stages = 2 if layout.head_dim + layout.value_dim > 128 else 3

    statistics = _gather_statistics(step, order, lse, delta, layout)
    column_layout, shape = plgpu.Layout.WGMMA.reduce(0), (ROWS, ROWS)

    def kernel(*refs, buffers, barriers):
        step_ref, order_ref, item_ref, block_ref, begin_ref, end_ref, start_ref, lse_ref, delta_ref, *arrays = refs
        query_ref, grad_ref, key_ref, value_ref, buffer_ref, dk_ref, dv_ref = arrays
        key_smem, value_smem, query_smem, grad_smem, out_smem, lse_smem, delta_smem, partial_smem = buffers
        keys_loaded, query_loaded, grad_loaded, query_freed, grad_freed, out_freed = barriers
        wg = lax.axis_index("wg")
        consumer = lax.rem(wg, jnp.int32(_WARPGROUPS))  # this warpgroup, or the one that it serves
        local_pair, position = lax.axis_index("pair"), lax.axis_index("item") * _WARPGROUPS + consumer
        pair = step_ref[0] + local_pair
        batch, head = lax.div(pair, jnp.int32(num_kv)), lax.rem(pair, jnp.int32(num_kv))
        row = pair * layout.ranges + step_ref[1]
        first_query, offset = step_ref[1] * layout.range_length, step_ref[2]
        begin, end, item = begin_ref[row, position], end_ref[row, position], item_ref[row, position]
        first_key = block_ref[row, position] * ROWS
        last_key = jnp.minimum(first_key + ROWS, layout.num_keys) - 1
        tiles = lax.div(end - begin + per_tile - 1, jnp.int32(per_tile))
        heads = pl.ds(head * group, group)

        def entries_of(tile):
            """The tile's list entries; past the item's end they repeat the last one."""
            return tuple(order_ref[row, jnp.minimum(begin + tile * per_tile + i, end - 1)] for i in range(per_tile))

        def token_of(entry):
            return first_query + lax.div(entry & (_MASKED - 1), jnp.int32(layout.slots))

        def slot_of(tile):
            return consumer * stages + lax.rem(tile, jnp.int32(stages))

        def load_keys():
            index = (batch, pl.ds(first_key, ROWS), head)
            plgpu.copy_gmem_to_smem(key_ref.at[index], key_smem.at[consumer], keys_loaded.at[consumer])
            plgpu.copy_gmem_to_smem(value_ref.at[index], value_smem.at[consumer], keys_loaded.at[consumer])
            plgpu.barrier_wait(keys_loaded.at[consumer])

        def mask(weights, tile, count):
            """Weights [keys, rows] with what a query does not see, and whole entries from `count` on, set to 0."""
            position = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=plgpu.Layout.WGMMA) + first_key
            which = lax.div(plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA), jnp.int32(group))
            for i, entry in enumerate(entries_of(tile)):
                token = token_of(entry)
                high = jnp.where(i < count, jnp.minimum(token + offset, last_key), -1)
                hidden = (position > high) | (position < start_ref[batch, token])
                weights = jnp.where((which == i) & hidden, 0.0, weights)
            return weights

        def mask_if_partial(weights, tile, slot):
            count = end - begin - tile * per_tile
            return lax.cond(partial_smem[slot] != 0, lambda x: mask(x, tile, count), lambda x: x, weights)

        def compute_tile(tile, carry):
            slot = slot_of(tile)
            own = sm90_gather.computed_here(consumer)
            plgpu.barrier_wait(query_loaded.at[slot])

            def multiply_scores(acc_ref):
                plgpu.wgmma(acc_ref, key_smem.at[own], sm90.transpose(query_smem.at[slot]))
                plgpu.barrier_wait(grad_loaded.at[slot])

            def multiply_gradients(acc_ref):
                plgpu.wgmma(acc_ref, value_smem.at[own], sm90.transpose(grad_smem.at[slot]))

            def weights_of(scores):
                row_lse = lax.broadcast_in_dim(sm90.load(lse_smem.at[slot], column_layout), shape, [1])
                return mask_if_partial(jnp.exp2(scores * (scale * LOG2E) - row_lse), tile, slot)

            weights, d_weights = sm90_products.two_products(ROWS, multiply_scores, multiply_gradients, weights_of)
            d_weights -= lax.broadcast_in_dim(sm90.load(delta_smem.at[slot], column_layout), shape, [1])
            half = weights.astype(query_ref.dtype)
            d_scores = (weights * d_weights).astype(query_ref.dtype)

            def accumulate(refs):
                dk_acc, dv_acc = refs
                plgpu.wgmma(dv_acc, half, grad_smem.at[slot])
                plgpu.wgmma(dk_acc, d_scores, query_smem.at[slot])
                transposed = plgpu.layout_cast(d_scores, plgpu.Layout.WGMMA_TRANSPOSED)
                pl.when(tile > 0)(lambda: plgpu.barrier_wait(out_freed.at[own]))
                sm90.transpose(out_smem.at[own])[...] = transposed
                plgpu.commit_smem()

            carry = pl.run_state(accumulate)(tuple(plgpu.ACC.init(x) for x in carry))
            plgpu.barrier_arrive(grad_freed.at[slot])
            plgpu.barrier_arrive(query_freed.at[slot])
            return carry

        def load_tile(tile, slot, entries):
            count = end - begin - tile * per_tile
            partial = (functools.reduce(jnp.bitwise_or, entries) >= _MASKED) | (count < per_tile)
            partial_smem[slot] = partial.astype(jnp.int32)
            plgpu.barrier_arrive(query_loaded.at[slot])
            rows = pl.ds((begin + tile * per_tile) * group, ROWS)
            for ref, smem, row_ref, row_smem, loaded, freed in (
                (query_ref, query_smem, lse_ref, lse_smem, query_loaded, None),
                (grad_ref, grad_smem, delta_ref, delta_smem, grad_loaded, grad_freed),
            ):
                if freed is not None:
                    pl.when(tile >= stages)(functools.partial(plgpu.barrier_wait, freed.at[slot]))
                for i, entry in enumerate(entries):
                    part = smem.at[slot, pl.ds(i * group, group)]
                    plgpu.copy_gmem_to_smem(ref.at[batch, token_of(entry), heads], part, loaded.at[slot])
                plgpu.copy_gmem_to_smem(row_ref.at[local_pair, rows], row_smem.at[slot], loaded.at[slot])

        def store_tile(tile):
            """Stores the score gradients of a tile; what repeats the last entry goes where nobody reads."""
            count = end - begin - tile * per_tile
            for i, entry in enumerate(entries_of(tile)):
                place = local_pair * layout.entries + (entry & (_MASKED - 1))
                place = jnp.where(i < count, place, layout.pairs * layout.entries)
                part = out_smem.at[consumer, pl.ds(i * group, group)]
                plgpu.copy_smem_to_gmem(part, buffer_ref.at[place], commit_group=i == per_tile - 1)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            plgpu.barrier_arrive(out_freed.at[consumer])

        def transfer_tile(tile, entries):
            """Loads one tile and stores the one `stages` before it."""
            following = entries_of(tile + 1)
            slot = slot_of(tile)
            pl.when(tile >= stages)(lambda: plgpu.barrier_wait(query_freed.at[slot]))
            pl.when(tile < tiles)(lambda: load_tile(tile, slot, entries))
            pl.when(tile >= stages)(lambda: store_tile(tile - stages))
            return following

        @pl.when((wg < _WARPGROUPS) & (tiles > 0))
        def _consumer():
            plgpu.set_max_registers(232, action="increase")
            load_keys()
            carry = sm90.zeros((ROWS, layout.head_dim)), sm90.zeros((ROWS, layout.value_dim))
            dk, dv = lax.fori_loop(0, tiles, compute_tile, carry)
            sm90.store(dk_ref.at[local_pair, item], dk * scale)
            sm90.store(dv_ref.at[local_pair, item], dv)

        @pl.when((wg >= _WARPGROUPS) & (tiles > 0))
        def _producer():
            plgpu.set_max_registers(24, action="decrease")
            lax.fori_loop(0, tiles + stages, transfer_tile, entries_of(0))
            plgpu.wait_smem_to_gmem(0)

    def nsa_selected_backward_key_major(*refs):
        tiled = functools.partial(sm90.tiled, dtype=query.dtype)
        slots = _WARPGROUPS * stages
        vector = plgpu.SMEM((slots, ROWS), jnp.float32)
        loaded = lambda arrivals: plgpu.Barrier(num_barriers=slots, num_arrivals=arrivals)  # noqa: E731
        freed = plgpu.Barrier(num_barriers=slots)
        pl.run_scoped(
            lambda buffers, barriers: kernel(*refs, buffers=buffers, barriers=barriers),
            (
                tiled(_WARPGROUPS, ROWS, layout.head_dim),
                tiled(_WARPGROUPS, ROWS, layout.value_dim),
                tiled(slots, ROWS, layout.head_dim),
                tiled(slots, ROWS, layout.value_dim),
                tiled(_WARPGROUPS, ROWS, ROWS),
                vector,
                vector,
                plgpu.SMEM((slots,), jnp.int32),
            ),
            (
                plgpu.Barrier(num_barriers=_WARPGROUPS, num_arrivals=2),
                loaded(per_tile + 2),
                loaded(per_tile + 1),
                freed,
                freed,
                plgpu.Barrier(num_barriers=_WARPGROUPS),
            ),
            collective_axes="wg",
        )

    buffer, dk, dv = plgpu.kernel(
        nsa_selected_backward_key_major,
        out_type=[
            jax.ShapeDtypeStruct((layout.pairs * layout.entries + 1, group, ROWS), query.dtype),
            *[jax.ShapeDtypeStruct((layout.pairs, layout.items, ROWS, x.shape[-1]), jnp.float32) for x in (key, value)],
        ],
        # The last axis runs fastest, so that programs in flight read the queries of few pairs.
        grid=(layout.pairs, pl.cdiv(layout.items, _WARPGROUPS)),
        grid_names=("pair", "item"),
        num_threads=2 * _WARPGROUPS,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
    )(step, order, *work, start, *statistics, query, d_out, key, value)
    return buffer.reshape(-1, ROWS), *(x.reshape(-1, x.shape[-1]) for x in (dk, dv))
