"""Pass by block of the selected branch's backward for Hopper, for partials of dq: the counterpart of
`grad_by_block_triton` for small groups of heads, also those that no tile of 64 rows holds a whole number of.

A warpgroup has a work item of its own and visits the rows, (query, head) pairs, of its list entries, 64 at a time, as
the forward's does in `by_block_sm90`. Each thread copies its part of the rows of queries and of the output's
cotangents to shared memory, where three products need them, and stores its part of the partials of dq from registers
(`sm90_gather`). So warpgroups do not wait for each other, and several on a multiprocessor hide each other's latency.
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


def _division(layout: Layout) -> tuple[int, int]:
    """(warpgroups, slots for tiles of queries of each): as many as there are shared memory and registers for.

    With one slot, the copy of the next tile begins after all products of a tile, with two after the first of them.
    """
    return (3, 2) if max(layout.head_dim, layout.value_dim) <= ROWS else (2, 1)


def prepare(inverted: readers.InvertedLists, block_indices, segment_start, query_offset, layout: Layout):
    """What all steps share: whether rows are packed, the list entries, and `readers.longest_first`.

    Arguments as `grad_scores_sm90.prepare`.
    """
    del block_indices, query_offset
    # Queries of one document see whole blocks from the block's end on.
    packed = (segment_start > 0).any().astype(jnp.int32).reshape(1)
    items = readers.longest_first(inverted, layout.config.chunk, _division(layout)[0])
    return packed, inverted.order.reshape(-1), *items


def by_block(step, prepared, tensors, layout: Layout):
    """One step of the pass; `prepared` is `prepare`'s result, the rest as in `grad_scores_sm90.by_block`."""
    # A jaxlib without GPU support cannot import Mosaic GPU, and must still import the library.
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from nsa_jax.ops.kernels import sm90, sm90_gather, sm90_products, sm90_reduce

    query, key, value, d_out, lse, delta, start = tensors
    group, num_kv, scale = layout.group, layout.num_kv, layout.scale
    h_dim, v_dim = layout.head_dim, layout.value_dim
    warpgroups, slots = _division(layout)
    packed, *work = prepared
    step = jnp.concatenate([step, packed])
    spare_row = layout.pairs * layout.entries * group

    shape = (ROWS, ROWS)

    def nsa_selected_backward_key_major(*refs):
        step_ref, order_ref, item_ref, block_ref, begin_ref, end_ref, start_ref, lse_ref, delta_ref, *arrays = refs
        query_ref, grad_ref, key_ref, value_ref, buffer_ref, dk_ref, dv_ref, *buffers = arrays
        wg = lax.axis_index("wg")
        local_pair, position = lax.axis_index("pair"), lax.axis_index("item") * warpgroups + wg
        pair = step_ref[0] + local_pair
        batch, kv_head = lax.div(pair, jnp.int32(num_kv)), lax.rem(pair, jnp.int32(num_kv))
        work_row = pair * layout.ranges + step_ref[1]
        begin, end, item = begin_ref[work_row, position], end_ref[work_row, position], item_ref[work_row, position]
        first_key = block_ref[work_row, position] * ROWS
        # Of the range's first query, among those of all batch rows and in the keys' row.
        first_query = batch * layout.length + step_ref[1] * layout.range_length
        first_position = step_ref[1] * layout.range_length + step_ref[2]
        last = jnp.minimum(layout.num_keys - 1 - first_key, ROWS - 1)
        rows = (end - begin) * group

        def rows_of(tile):
            return sm90_gather.rows_of_tile(tile, rows, group)

        def entries_of(tile):
            return sm90_gather.load_numbers(order_ref, rows_of(tile)[1] + (work_row * layout.entries + begin))

        def local_token(entry):
            return lax.div(entry, jnp.int32(layout.slots))

        def query_rows(tile, entry):
            """Where a tile's rows are among those of all queries."""
            _, _, head = rows_of(tile)
            return local_token(entry) * layout.num_heads + (first_query * layout.num_heads + kv_head * group) + head

        def load_statistics(tile, at):
            """Base-2 lse and delta of the rows."""
            row_lse, row_delta = (sm90_gather.load_numbers(x, at) for x in (lse_ref, delta_ref))
            # A row that must not count has no probability anywhere.
            return jnp.where(rows_of(tile)[0], row_lse, jnp.inf), row_delta

        def tiles_of(tile, wg):
            """Where the queries of a tile and their output's cotangents lie in shared memory."""
            slot = wg * slots + lax.rem(tile, jnp.int32(slots))
            return tuple(x.at[slot] for x in buffers[5:])

        def copy_tile(tile, at, wg):
            for ref, rows_tile in zip((query_ref, grad_ref), tiles_of(tile, wg), strict=True):
                sm90_gather.copy_rows(ref, at, rows_tile)

        def count_tiles():
            """(tiles that need a mask, all tiles) of the work item."""

            def sees_whole(number):
                """Whether the query of an entry, and so those after it, see all that follow up to the block's end."""
                entry = order_ref[work_row * layout.entries + jnp.minimum(begin + number, end - 1)]
                return local_token(entry) + first_position - first_key >= ROWS - 1

            # The queries of the block itself, which see a part of it, come first; lists may also name later blocks.
            num_tiles = lax.div(rows + ROWS - 1, jnp.int32(ROWS))
            num_masked = jnp.where(
                sees_whole(ROWS - 1), jnp.minimum(num_tiles, pl.cdiv((ROWS - 1) * group, ROWS)), num_tiles
            )
            num_masked = jnp.where(sees_whole(0), 0, num_masked)
            return jnp.where((step_ref[3] != 0) | (last < ROWS - 1), num_tiles, num_masked), num_tiles

        def prologue(entry):
            """Loads the block's keys and values and the first tile's rows: the statistics of those."""
            key_row = sm90_gather.rows_of_block(first_key, layout.num_keys, batch, kv_head, num_kv)
            sm90_gather.copy_rows(key_ref, key_row, buffers[0].at[wg])
            sm90_gather.copy_rows(value_ref, key_row, buffers[1].at[wg])
            at = query_rows(0, entry)
            copy_tile(0, at, wg)
            statistics = load_statistics(0, at)
            # The columns of these keys are in the order of the partials.
            buffers[2].at[wg][...] = sm90_gather.load_rows(key_ref, key_row)
            return statistics

        def key_bounds(entry):
            """The keys of the block that a tile's rows see, [low, high]."""
            token = local_token(entry)
            low = sm90_gather.load_numbers(start_ref, token + first_query) - first_key
            return low, jnp.minimum(token + (first_position - first_key), last)

        def mask_if_partial(weights, low, high):
            def mask(weights):
                return jnp.where(sm90_gather.visible(low, high), weights, 0.0)

            any_hidden = sm90_reduce.any_in_warp(jnp.maximum(low, 0) | (ROWS - 1 - high))
            return lax.cond(any_hidden, mask, lambda x: x, weights)

        def compute_tile(masked, tile, carry):
            dk, dv, entry, row_lse, row_delta, following = carry
            own = sm90_gather.computed_here(wg)
            keys, values, dq_keys, probs_tile, scores_tile = (x.at[own] for x in buffers[:5])
            queries, grads = tiles_of(tile, own)
            bounds = key_bounds(entry) if masked else ()
            # Behind this all threads' copies have arrived, and all products of the tile before are done: its
            # queries' memory is free for those of the next tile, its probabilities' for new ones.
            sm90_gather.wait_copies()
            plgpu.commit_smem()
            at = query_rows(tile + 1, following)

            def multiply_scores(acc_ref):
                plgpu.wgmma(acc_ref, queries, sm90.transpose(keys))

            def multiply_gradients(acc_ref):
                plgpu.wgmma(acc_ref, grads, sm90.transpose(values))
                if slots > 1:
                    copy_tile(tile + 1, at, own)

            def weights_of(scores):
                weights = jnp.exp2(scores * (scale * LOG2E) - lax.broadcast_in_dim(row_lse, shape, [0]))
                return mask_if_partial(weights, *bounds) if masked else weights

            weights, d_weights = sm90_products.two_products(ROWS, multiply_scores, multiply_gradients, weights_of)
            d_weights -= lax.broadcast_in_dim(row_delta, shape, [0])
            sm90_gather.store_tile(probs_tile, weights.astype(query_ref.dtype))
            d_scores = (weights * d_weights).astype(query_ref.dtype)
            sm90_gather.store_tile(scores_tile, d_scores)
            plgpu.commit_smem()
            # Here, where registers are free: what the next tile needs, and the queries after those.
            next_statistics = load_statistics(tile + 1, query_rows(tile + 1, following))
            after = entries_of(tile + 2)

            def accumulate(refs):
                plgpu.wgmma(refs[0], d_scores, dq_keys)
                plgpu.wgmma(refs[1], sm90.transpose(scores_tile), queries)
                plgpu.wgmma(refs[2], sm90.transpose(probs_tile), grads)

            init = sm90_products.begin(h_dim), plgpu.ACC.init(dk), plgpu.ACC.init(dv)
            partial, dk, dv = pl.run_state(accumulate)(init)
            if slots == 1:
                # Each warp waits for its own products, and all of them read the whole tile.
                plgpu.commit_smem()
                copy_tile(tile + 1, query_rows(tile + 1, following), own)
            counts, _, head = rows_of(tile)
            place = jnp.where(counts, (entry + local_pair * layout.entries) * group + head, spare_row)
            sm90_gather.store_rows(buffer_ref, place, partial.astype(buffer_ref.dtype))
            return dk, dv, following, *next_statistics, after

        @pl.when(end > begin)
        def _compute():
            entry, following = entries_of(0), entries_of(1)
            num_masked, num_tiles = count_tiles()
            statistics = prologue(entry)
            carry = sm90.zeros((ROWS, h_dim)), sm90.zeros((ROWS, v_dim)), entry, *statistics, following
            carry = lax.fori_loop(0, num_masked, functools.partial(compute_tile, True), carry)
            dk, dv, *_ = lax.fori_loop(num_masked, num_tiles, functools.partial(compute_tile, False), carry)
            sm90_gather.wait_copies()  # of the tile behind the last one
            sm90.store(dk_ref.at[local_pair, item], dk * scale)
            sm90.store(dv_ref.at[local_pair, item], dv)

    def tiles(width, count=1):
        return sm90.tiled(warpgroups * count, ROWS, width, dtype=query.dtype)

    buffer, dk, dv = plgpu.kernel(
        nsa_selected_backward_key_major,
        out_type=[
            jax.ShapeDtypeStruct((spare_row + group, h_dim), query.dtype),
            *(jax.ShapeDtypeStruct((layout.pairs, layout.items, ROWS, dim), jnp.float32) for dim in (h_dim, v_dim)),
        ],
        # Keys, values, keys with their columns in the order of the partials; probabilities, score gradients; queries,
        # cotangents.
        scratch_types=[
            *(tiles(h_dim), tiles(v_dim), tiles(h_dim)),
            *(tiles(ROWS), tiles(ROWS)),
            *(tiles(h_dim, slots), tiles(v_dim, slots)),
        ],
        # The last axis runs fastest, so that programs in flight read the queries of few pairs.
        grid=(layout.pairs, pl.cdiv(layout.items, warpgroups)),
        grid_names=("pair", "item"),
        num_threads=warpgroups,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
    )(step, *work, start, lse, delta, query, d_out, key, value)
    return tuple(x.reshape(-1, x.shape[-1]) for x in (buffer, dk, dv))
