"""dq of selected attention from the score gradients that the pass by block left in a buffer.

A query's dq is the sum over its list of score gradients times keys. As in the forward, blocks that several tokens of a
tile list are read once for the whole tile, and the rest of each list token by token, on top of that sum.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from nsa_jax.ops.kernels.selected.grad_layout import Layout
from nsa_jax.ops.kernels.selected.neighbours import Split, can_have_slots, slot_of, split_lists
from nsa_jax.ops.kernels.triton import dot, load_rows, pieces, store_rows, write_over


def split_for(block_indices, segment_start, query_offset, layout: Layout) -> Split | None:
    """The lists split by tiles, or None where every token goes by itself."""
    config = layout.config
    if not config.keep_scores or config.tile == 1 or not can_have_slots(config.tile, layout.slots):
        return None
    return split_lists(
        block_indices, segment_start, query_offset, tile=config.tile, share=config.share,
        select_block=layout.select_block, num_keys=layout.num_keys, packed=True, with_slots=True,
    )  # fmt: skip


class _Query(NamedTuple):
    """The query and key/value head of a program."""

    local: jax.Array  # the query's number in the range
    local_pair: jax.Array
    pair: jax.Array
    token: jax.Array
    batch: jax.Array
    head: jax.Array


def _locate(step_ref, layout: Layout) -> _Query:
    local, local_pair = pl.program_id(0), pl.program_id(1)
    pair = step_ref[0] + local_pair
    token = step_ref[1] * layout.range_length + local
    return _Query(local, local_pair, pair, token, pair // layout.num_kv, pair % layout.num_kv)


def _rows_of(query: _Query, rows: int, layout: Layout):
    """(head of the group, row in [B*T*N, H]) of each row of a program; surplus rows repeat the last head."""
    member = jnp.minimum(lax.iota(jnp.int32, rows), layout.group - 1)
    return member, (query.batch * layout.length + query.token) * layout.num_heads + query.head * layout.group + member


def _add_entries(total, count, entry, d_scores_ref, key_ref, query: _Query, member, layout: Layout):
    """Adds score gradients times keys of `count` list entries to `total`; entry: i -> (block, slot)."""

    def add(i, carry):
        total, (block, slot) = carry
        following = entry(jnp.minimum(i + 1, layout.slots - 1))
        key_row, _, _ = layout.key_rows(query.batch, query.head, block, 0, layout.columns)
        key = load_rows(key_ref, key_row, layout.head_dim)
        buffer_entry = query.local_pair * layout.entries + query.local * layout.slots + slot
        d_scores = d_scores_ref[buffer_entry * layout.group + member, :]
        total = [acc + dot(d_scores, piece, (1, 0)) for acc, piece in zip(total, key, strict=True)]
        return total, following

    total, _ = lax.fori_loop(0, count, add, (total, entry(0)))
    return total


def _token_kernel(
    step_ref, count_ref, entries_ref, d_scores_ref, key_ref, _dq, d_query_ref, *, layout: Layout, rows: int
):  # fmt: skip
    """dq [B*T*N, H] of one query and key/value head: its score gradients times the keys of its blocks.

    count_ref [B*K, at least T] and entries_ref [B*K*ranges, E], the lists; d_scores_ref [(pairs*E + 1) * G, columns];
    key_ref [B*S*K, H].
    """
    query = _locate(step_ref, layout)

    @pl.when(query.token < layout.length)
    def _():
        count = count_ref[query.pair, query.token]
        member, out_row = _rows_of(query, rows, layout)

        def entry(i):
            return entries_ref[query.pair * layout.ranges + step_ref[1], query.local * layout.slots + i], i

        total = [jnp.zeros((rows, size), jnp.float32) for _, size in pieces(layout.head_dim)]
        total = _add_entries(total, count, entry, d_scores_ref, key_ref, query, member, layout)
        store_rows(d_query_ref, out_row, [piece * layout.scale for piece in total])


def _rest_kernel(
    step_ref, rest_ref, num_rest_ref, d_scores_ref, key_ref, before_ref, d_query_ref, *, layout: Layout, rows: int
):  # fmt: skip
    """As `_token_kernel` of what `_tile_kernel` left of the lists, added to dq so far.

    rest_ref and num_rest_ref: `Split.rest` and `Split.num_rest`.
    """
    query = _locate(step_ref, layout)

    @pl.when(query.token < layout.length)
    def _():
        tile, padded = layout.config.tile, pl.next_power_of_2(layout.slots)
        at = query.batch, query.token // tile, query.token % tile, query.head
        # One element for most programs where neighbours share their lists: there is nothing left to do.
        count = num_rest_ref[query.batch, query.head, query.token // tile, query.token % tile]
        member, out_row = _rows_of(query, rows, layout)

        def entry(i):
            value = rest_ref[(*at, i)]
            return value // padded, value % padded

        @pl.when(count > 0)
        def _():
            before = load_rows(before_ref, out_row, layout.head_dim)
            total = [piece.astype(jnp.float32) * (1.0 / layout.scale) for piece in before]
            total = _add_entries(total, count, entry, d_scores_ref, key_ref, query, member, layout)
            store_rows(d_query_ref, out_row, [piece * layout.scale for piece in total])


def _tile_kernel(
    step_ref,
    block_ref,
    bits_ref,
    slots_ref,
    count_ref,
    d_scores_ref,
    key_ref,
    _dq,
    d_query_ref,
    *,
    layout: Layout,
    rows: int,
):
    """dq [B*T*N, H] of a tile of tokens over the blocks that they share.

    block_ref, bits_ref, slots_ref [B, K, tiles, U + 1] and count_ref [B, K, tiles, 2] as in `Split`.
    """
    tile = layout.config.tile
    local, local_pair = pl.program_id(0) * tile, pl.program_id(1)
    pair = step_ref[0] + local_pair
    batch, head = pair // layout.num_kv, pair % layout.num_kv
    first = step_ref[1] * layout.range_length + local

    @pl.when(first < layout.length)
    def _():
        at = batch, head, first // tile
        # Rows past the last token or head repeat the last one and write the same values to the same place.
        row = jnp.minimum(lax.iota(jnp.int32, rows), tile * layout.group - 1)
        last = jnp.minimum(tile, layout.length - first) - 1
        inside, member = jnp.minimum(row // layout.group, last), row % layout.group
        first_row = (local_pair * layout.entries + (local + inside) * layout.slots) * layout.group + member
        shape = rows, layout.columns
        column = lax.broadcasted_iota(jnp.int32, shape, 1)

        def entry(u):
            return block_ref[(*at, u)], bits_ref[(*at, u)], slots_ref[(*at, u)]

        def add(u, carry):
            total, (block, bits, places) = carry
            # One step ahead in registers: as loads of this step they would take a stage of the pipeline of the tiles.
            following = entry(u + 1)
            buffer_row = lax.broadcast_in_dim(first_row + slot_of(places, inside) * layout.group, shape, (0,))
            listed = lax.broadcast_in_dim(((bits >> inside) & 1) == 1, shape, (0,))
            # The copy to shared memory fills in the zeros, and the product takes both tiles from there: a `where` after
            # the load would take this one through registers and back.
            d_scores = pltriton.load(d_scores_ref.at[buffer_row, column], mask=listed, other=0.0)
            key = load_rows(key_ref, layout.key_rows(batch, head, block, 0, layout.columns)[0], layout.head_dim)
            total = [acc + dot(d_scores, piece, (1, 0)) for acc, piece in zip(total, key, strict=True)]
            return total, following

        total = [jnp.zeros((rows, size), jnp.float32) for _, size in pieces(layout.head_dim)]
        total, _ = lax.fori_loop(0, count_ref[(*at, 0)], add, (total, entry(0)))
        out_row = (batch * layout.length + first + inside) * layout.num_heads + head * layout.group + member
        store_rows(d_query_ref, out_row, [piece * layout.scale for piece in total])


def finish_query(step, split: Split | None, counts, entries, buffer, key, d_query, layout: Layout):
    """Adds one step's score gradients into the rows of d_query [B*T*N, H] that the step owns.

    Args:
      step: int32 [3], first pair, range index, query_offset.
      split: `split_for`'s result.
      counts: int32 [B*K, at least T], entries of every query.
      entries: int32 [B*K*ranges, E], block lists.
      buffer: score gradients [(pairs*E + 1) * G, columns].
      key: [B*S*K, H].
      d_query: [B*T*N, H], or its shape, see `write_over`.
      layout: static sizes.
    """
    config = layout.config
    kernel: Callable = _token_kernel
    lists: tuple[jax.Array, ...] = (counts, entries)
    if split is not None:
        assert split.rest is not None and split.slots is not None and split.num_rest is not None
        kernel, lists = _rest_kernel, (split.rest, split.num_rest)
        (d_query,) = write_over(
            functools.partial(
                _tile_kernel, layout=layout, rows=max(16, pl.next_power_of_2(config.tile * layout.group))
            ),
            *(step, split.block, split.bits, split.slots, split.num_shared, buffer, key),
            outs=[d_query],
            grid=(pl.cdiv(layout.range_length, config.tile), layout.pairs),
            num_warps=config.tile_warps,
            num_stages=3,
            name="nsa_selected_backward_query_tiles",
        )
    rows = max(16, pl.next_power_of_2(layout.group))
    (d_query,) = write_over(
        functools.partial(kernel, layout=layout, rows=rows),
        *(step, *lists, buffer, key),
        outs=[d_query],
        grid=(layout.range_length, layout.pairs),
        num_warps=2 if rows * layout.head_dim <= 2048 else 4,
        num_stages=3 if d_query.dtype == jnp.bfloat16 else 1,
        name="nsa_selected_backward_query_major",
    )
    return d_query
