"""Selected attention by key block for Hopper: shares of the output for groups of 6 heads, the counterpart of
`by_block_triton._share_kernel`.

A warpgroup holds one key block and walks the rows, (query, head) pairs, of the list entries that name it, 64 at a time.
Rows come from global memory straight to the registers of the products and their shares go back the same way
(`sm90_gather`), so that warpgroups wait for nobody and several of them on a multiprocessor hide each other's latency.
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


def shares(
    query_offset, first_row, inverted: InvertedLists, segment_start, query, key, value,
    *, at_once: int, chunk_tokens: int, num_listed: int, packed: bool, config: SelectedGatherConfig,
):  # fmt: skip
    """The attention of every list entry over its block, for `at_once` rows of the inverted lists.

    Args:
      query_offset: int32 [1].
      first_row: int32 [1], the first of those rows, each of which is a (batch row, kv head, range of tokens).
      inverted: the inverted lists of all rows.
      segment_start: int32 [B, T].
      query: [B, T, K, G, H].
      key: [B, S, K, H].
      value: [B, S, K, V].
      at_once, chunk_tokens, num_listed: rows of this call, tokens of a row, list entries of a token.
      packed: whether segment_start matters.
      config: tile sizes.

    Returns:
      Shares [at_once, E, G, V] and their log-sum-exp in base 2, float32 [at_once, E, G], at the places of their list
      entries; what no list entry names is undefined.
    """
    # A jaxlib without GPU support cannot import Mosaic GPU, and must still import the library.
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from nsa_jax.ops.kernels import sm90, sm90_gather

    _, length, num_kv, group, _ = query.shape
    num_keys, scale = value.shape[1], LOG2E / math.sqrt(query.shape[-1])
    warpgroups, ahead = config.warpgroups, config.ahead
    entries, (rows, items) = chunk_tokens * num_listed, inverted.block.shape
    num_chunks = rows // (query.shape[0] * num_kv)

    def nsa_selected_forward_shares(*refs):
        offset_ref, row_ref, order_ref, block_ref, begin_ref, end_ref, start_ref, *arrays = refs
        query_ref, key_ref, value_ref, share_ref, lse_ref, key_smem, value_smem = arrays
        wg = lax.axis_index("wg")
        here, item = lax.axis_index("row"), lax.axis_index("item") * warpgroups + wg
        line = row_ref[0] + here
        pair, chunk = lax.div(line, jnp.int32(num_chunks)), lax.rem(line, jnp.int32(num_chunks))
        batch, kv_head = lax.div(pair, jnp.int32(num_kv)), lax.rem(pair, jnp.int32(num_kv))
        inside = jnp.minimum(item, items - 1)
        begin, first_key = begin_ref[line, inside], block_ref[line, inside] * ROWS
        end = jnp.where(item < items, end_ref[line, inside], begin)
        offset = offset_ref[0]
        shape = (ROWS, ROWS)
        last = jnp.minimum(num_keys - 1 - first_key, ROWS - 1)

        def entries_of(tile):
            """Of a tile's rows: the list entry's place and the head; past the item's end the last row repeats."""
            _, which, head = sm90_gather.rows_of_tile(tile, (end - begin) * group, group)
            return sm90_gather.load_numbers(order_ref, which + (line * entries + begin)), head

        def queries_of(entry, head):
            token = lax.div(entry, jnp.int32(num_listed)) + (batch * length + chunk * chunk_tokens)
            low = sm90_gather.load_numbers(start_ref, token) if packed else ()
            rows = sm90_gather.load_rows(query_ref, (token * num_kv + kv_head) * group + head)
            return rows, low

        @pl.when(end > begin)
        def _attend():
            tiles = [entries_of(i) for i in range(ahead + 1)]
            row = sm90_gather.rows_of_block(first_key, num_keys, batch, kv_head, num_kv)
            own_keys, own_values = key_smem.at[wg], value_smem.at[wg]
            own_keys[...] = sm90_gather.load_rows(key_ref, row)
            own_values[...] = sm90_gather.load_rows(value_ref, row)
            plgpu.commit_smem()

            def mask(scores, low, high):
                return jnp.where(sm90_gather.visible(low, high), scores, MINUS_INFINITY)

            def multiply(left, right):
                def product(acc_ref):
                    plgpu.wgmma(acc_ref, left, right)

                return pl.run_state(product)(plgpu.ACC.init(sm90_gather.zeros(ROWS)))

            def body(masked, tile, carry):
                (entry, head, queries, low), *loaded, following = carry
                after = entries_of(tile + ahead + 1)  # a look-up takes long, and the queries wait for it
                scores = multiply(queries, sm90.transpose(own_keys))
                loaded.append((*following, *queries_of(*following)))
                if masked:
                    token = lax.div(entry, jnp.int32(num_listed)) + (chunk * chunk_tokens + offset)
                    high = jnp.minimum(token - first_key, last)
                    if packed:
                        low = low - first_key
                        hidden = jnp.maximum(low, 0) | (ROWS - 1 - high)
                        any_hidden = sm90_gather.any_in_warp(hidden)
                        scores = lax.cond(any_hidden, lambda x: mask(x, low, high), lambda x: x, scores)
                    else:
                        scores = mask(scores, None, high)
                peak = scores.max(axis=1) * scale
                weights = jnp.exp2(scores * scale - lax.broadcast_in_dim(peak, shape, [0]))
                total = weights.sum(axis=1)
                share = multiply(weights.astype(query_ref.dtype), own_values)
                share *= lax.broadcast_in_dim(1.0 / total, shape, [0])
                place = (entry + here * entries) * group + head
                sm90_gather.store_rows(share_ref, place, share.astype(share_ref.dtype))
                sm90_gather.store_numbers(lse_ref, place, peak + jnp.log(total) * LOG2E)
                return *loaded, after

            num_tiles = lax.div((end - begin) * group + ROWS - 1, jnp.int32(ROWS))
            num_masked = num_tiles
            if not packed:
                # Queries ascend: those of the block itself, which see a part of it, come first.
                first = lax.div(order_ref[line * entries + begin], jnp.int32(num_listed)) + chunk * chunk_tokens
                partial = jnp.minimum(num_tiles, pl.cdiv((ROWS - 1) * group, ROWS))
                num_masked = jnp.where(first + offset - first_key < ROWS - 1, partial, 0)
                num_masked = jnp.where(last < ROWS - 1, num_tiles, num_masked)
            carry = *((*x, *queries_of(*x)) for x in tiles[:-1]), tiles[-1]
            carry = lax.fori_loop(0, num_masked, functools.partial(body, True), carry)
            if not packed:
                lax.fori_loop(num_masked, num_tiles, functools.partial(body, False), carry)

    tile = functools.partial(sm90.tiled, warpgroups, ROWS, ROWS, dtype=query.dtype)
    share, lse = plgpu.kernel(
        nsa_selected_forward_shares,
        out_type=[
            jax.ShapeDtypeStruct((at_once * entries * group, ROWS), query.dtype),
            jax.ShapeDtypeStruct((at_once * entries * group,), jnp.float32),
        ],
        scratch_types=[tile(), tile()],
        grid=(at_once, -(-items // warpgroups)),  # the last runs fastest
        grid_names=("row", "item"),
        num_threads=warpgroups,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
    )(
        query_offset, first_row, inverted.order.reshape(-1), inverted.block, inverted.begin, inverted.end,
        segment_start.reshape(-1), *(x.reshape(-1, ROWS) for x in (query, key, value)),
    )  # fmt: skip
    return share.reshape(at_once, entries, group, ROWS), lse.reshape(at_once, entries, group)
