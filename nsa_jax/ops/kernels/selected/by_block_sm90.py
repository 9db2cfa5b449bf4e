"""Selected attention by key block for Hopper: partial outputs for small groups of heads, the counterpart of
`by_block_triton._partial_kernel`.

A warpgroup holds one key block and visits the rows, (query, head) pairs, of the list entries that name it, 64 at a
time. Rows come from global memory straight to the registers of the products, and the partials go back the same way
(`sm90_gather`). So warpgroups do not wait for each other, and several on a multiprocessor hide each other's latency.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax

from nsa_jax.ops.kernels.readers import InvertedLists
from nsa_jax.ops.kernels.softmax import LOG2E, MINUS_INFINITY
from nsa_jax.ops.selected_tiles import SelectedGatherConfig
from nsa_jax.ops.tiles import ROWS


def partials(
    query_offset, first_row, inverted: InvertedLists, segment_start, query, key, value,
    *, at_once: int, chunk_tokens: int, num_listed: int, packed: bool, config: SelectedGatherConfig,
):  # fmt: skip
    """The attention of every list entry over its block, for `at_once` rows of the inverted lists.

    Args:
      query_offset: int32 [1].
      first_row: int32 [1], the first of those rows, each of which is a (batch row, kv head, range of tokens).
      inverted: the inverted lists of all rows.
      segment_start: int32 [B, T].
      query: [B, T, K, G, H], H a multiple of 64.
      key: [B, S, K, H].
      value: [B, S, K, V], V a multiple of 64.
      at_once, chunk_tokens, num_listed: rows of this call, tokens of a row, list entries of a token.
      packed: whether segment_start matters.
      config: tile sizes.

    Returns:
      Partials [at_once, E, G, V] and their log-sum-exp in base 2, float32 [at_once, E, G], at the places of their list
      entries; what no list entry names is undefined.
    """
    # A jaxlib without GPU support cannot import Mosaic GPU, and must still import the library.
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from nsa_jax.ops.kernels import sm90, sm90_gather, sm90_products, sm90_reduce

    _, length, num_kv, group, h_dim = query.shape
    num_keys, v_dim, scale = value.shape[1], value.shape[-1], LOG2E / math.sqrt(h_dim)
    warpgroups, ahead = config.warpgroups, config.ahead
    entries, (rows, items) = chunk_tokens * num_listed, inverted.block.shape
    num_chunks = rows // (query.shape[0] * num_kv)

    def nsa_selected_forward_shares(*refs):
        offset_ref, row_ref, order_ref, block_ref, begin_ref, end_ref, start_ref, *arrays = refs
        query_ref, key_ref, value_ref, partial_ref, lse_ref, key_smem, value_smem = arrays
        wg = lax.axis_index("wg")
        local_row, item = lax.axis_index("row"), lax.axis_index("item") * warpgroups + wg
        row = row_ref[0] + local_row
        pair, chunk = lax.div(row, jnp.int32(num_chunks)), lax.rem(row, jnp.int32(num_chunks))
        batch, kv_head = lax.div(pair, jnp.int32(num_kv)), lax.rem(pair, jnp.int32(num_kv))
        inside = jnp.minimum(item, items - 1)
        begin, first_key = begin_ref[row, inside], block_ref[row, inside] * ROWS
        end = jnp.where(item < items, end_ref[row, inside], begin)
        offset = offset_ref[0]
        last = jnp.minimum(num_keys - 1 - first_key, ROWS - 1)

        def entries_of(tile):
            """Of a tile's rows: the list entry's place and the head; past the item's end the last row repeats."""
            _, which, head = sm90_gather.rows_of_tile(tile, (end - begin) * group, group)
            return sm90_gather.load_numbers(order_ref, which + (row * entries + begin)), head

        def load_queries(entry, head):
            """Queries of a tile's rows and, if packed, their segments' starts."""
            token = lax.div(entry, jnp.int32(num_listed)) + (batch * length + chunk * chunk_tokens)
            low = sm90_gather.load_numbers(start_ref, token) if packed else ()
            queries = sm90_gather.load_rows(query_ref, (token * num_kv + kv_head) * group + head)
            return queries, low

        def load_keys():
            """The warpgroup's keys and values, where they lie in shared memory."""
            key_row = sm90_gather.rows_of_block(first_key, num_keys, batch, kv_head, num_kv)
            keys, values = key_smem.at[wg], value_smem.at[wg]
            keys[...] = sm90_gather.load_rows(key_ref, key_row)
            values[...] = sm90_gather.load_rows(value_ref, key_row)
            plgpu.commit_smem()
            return keys, values

        def hide(scores, entry, low):
            """Scores with minus infinity for what causality and documents hide."""

            def mask(scores, low, high):
                return jnp.where(sm90_gather.visible(low, high), scores, MINUS_INFINITY)

            token = lax.div(entry, jnp.int32(num_listed)) + (chunk * chunk_tokens + offset)
            high = jnp.minimum(token - first_key, last)
            if not packed:
                return mask(scores, None, high)
            low = low - first_key
            any_hidden = sm90_reduce.any_in_warp(jnp.maximum(low, 0) | (ROWS - 1 - high))
            return lax.cond(any_hidden, lambda x: mask(x, low, high), lambda x: x, scores)

        def multiply(left, right, columns):
            def product(acc_ref):
                plgpu.wgmma(acc_ref, left, right)

            return sm90_products.product(columns, product)

        def compute_tile(masked, keys, values, tile, carry):
            (entry, head, queries, low), *loaded, following = carry
            after = entries_of(tile + ahead + 1)  # a look-up takes long, and the queries wait for it
            scores = multiply(queries, sm90.transpose(keys), ROWS)
            loaded.append((*following, *load_queries(*following)))
            if masked:
                scores = hide(scores, entry, low)
            peak = scores.max(axis=1) * scale
            weights = jnp.exp2(scores * scale - lax.broadcast_in_dim(peak, (ROWS, ROWS), [0]))
            total = weights.sum(axis=1)
            partial = multiply(weights.astype(query_ref.dtype), values, v_dim)
            partial *= lax.broadcast_in_dim(1.0 / total, (ROWS, v_dim), [0])
            place = (entry + local_row * entries) * group + head
            sm90_gather.store_rows(partial_ref, place, partial.astype(partial_ref.dtype))
            sm90_gather.store_numbers(lse_ref, place, peak + jnp.log(total) * LOG2E)
            return *loaded, after

        def count_tiles():
            """(tiles that need a mask, all tiles) of the work item."""
            num_tiles = lax.div((end - begin) * group + ROWS - 1, jnp.int32(ROWS))
            if packed:
                return num_tiles, num_tiles
            # Queries ascend: those of the block itself, which see a part of it, come first.
            first = lax.div(order_ref[row * entries + begin], jnp.int32(num_listed)) + chunk * chunk_tokens
            partial = jnp.minimum(num_tiles, pl.cdiv((ROWS - 1) * group, ROWS))
            num_masked = jnp.where(first + offset - first_key < ROWS - 1, partial, 0)
            return jnp.where(last < ROWS - 1, num_tiles, num_masked), num_tiles

        @pl.when(end > begin)
        def _compute():
            tiles = [entries_of(i) for i in range(ahead + 1)]
            keys, values = load_keys()
            num_masked, num_tiles = count_tiles()
            carry = *((*x, *load_queries(*x)) for x in tiles[:-1]), tiles[-1]
            carry = lax.fori_loop(0, num_masked, functools.partial(compute_tile, True, keys, values), carry)
            if not packed:
                lax.fori_loop(num_masked, num_tiles, functools.partial(compute_tile, False, keys, values), carry)

    partial, lse = plgpu.kernel(
        nsa_selected_forward_shares,
        out_type=[
            jax.ShapeDtypeStruct((at_once * entries * group, v_dim), query.dtype),
            jax.ShapeDtypeStruct((at_once * entries * group,), jnp.float32),
        ],
        scratch_types=[sm90.tiled(warpgroups, ROWS, dim, dtype=query.dtype) for dim in (h_dim, v_dim)],
        grid=(at_once, -(-items // warpgroups)),  # the last runs fastest
        grid_names=("row", "item"),
        num_threads=warpgroups,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
    )(
        query_offset, first_row, inverted.order.reshape(-1), inverted.block, inverted.begin, inverted.end,
        segment_start.reshape(-1), *(x.reshape(-1, x.shape[-1]) for x in (query, key, value)),
    )  # fmt: skip
    return partial.reshape(at_once, entries, group, v_dim), lse.reshape(at_once, entries, group)
