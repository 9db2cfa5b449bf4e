"""dq of selected attention from the score gradients that the key-major pass left in a buffer.

A query's dq is the sum over its list of score gradients times keys. As in the forward, blocks that several tokens of a
tile list are read once for the whole tile, and the rest of each list token by token, on top of that sum.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from nsa_jax.ops.pallas.common import dot, load_rows, pieces, store_rows, triton_call
from nsa_jax.ops.pallas.selected_split import Split, can_have_slots, slot_of, split_lists

if TYPE_CHECKING:
    from nsa_jax.ops.pallas.selected_backward import Plan


def split_for(block_indices, segment_start, query_offset, plan: Plan) -> Split | None:
    """The lists split by tiles, or None where every token goes by itself."""
    config = plan.config
    if not config.keep_scores or config.tile == 1 or not can_have_slots(config.tile, plan.slots):
        return None
    return split_lists(
        block_indices, segment_start, query_offset, tile=config.tile, share=config.share,
        select_block=plan.select_block, num_keys=plan.num_keys, packed=True, with_slots=True,
    )  # fmt: skip


def _token_kernel(step_ref, *refs, plan: Plan, rows: int, resume: bool):
    """dq [B*T*N, H] of one query and key/value head: its score gradients times the keys of its blocks.

    refs: what tells the list (with `resume` `Split.rest`, else the entries of every range and how many each query has),
    d_scores [(pairs*E + 1) * G, columns], key [B*S*K, H], dq so far, dq.
    """
    *list_refs, d_scores_ref, key_ref, before_ref, d_query_ref = refs
    local, local_pair = pl.program_id(0), pl.program_id(1)
    pair = step_ref[0] + local_pair
    token = step_ref[1] * plan.range_length + local
    batch, head = pair // plan.num_kv, pair % plan.num_kv

    @pl.when(token < plan.length)
    def _():
        if resume:
            tile, padded = plan.config.tile, pl.next_power_of_2(plan.slots)
            at = batch, token // tile, token % tile, head
            listed = list_refs[0][(*at, jnp.minimum(lax.iota(jnp.int32, padded), plan.slots))]
            real = (lax.iota(jnp.int32, padded) < plan.slots) & (listed < plan.num_blocks * padded)
            count = jnp.sum(real.astype(jnp.int32))
        else:
            count = list_refs[0][pair, token]
        member = jnp.minimum(lax.iota(jnp.int32, rows), plan.group - 1)  # surplus rows repeat the last head
        out_row = (batch * plan.length + token) * plan.num_heads + head * plan.group + member

        def entry(i):
            """(block, slot) of the i-th entry."""
            if resume:
                value = list_refs[0][(*at, i)]
                return value // padded, value % padded
            return list_refs[1][pair * plan.ranges + step_ref[1], local * plan.slots + i], i

        def add(i, carry):
            total, (block, slot) = carry
            following = entry(jnp.minimum(i + 1, plan.slots - 1))
            key = load_rows(key_ref, plan.key_rows(batch, head, block, 0, plan.columns)[0], plan.head_dim)
            share = local_pair * plan.entries + local * plan.slots + slot
            d_scores = d_scores_ref[share * plan.group + member, :]
            total = [acc + dot(d_scores, piece, (1, 0)) for acc, piece in zip(total, key, strict=True)]
            return total, following

        def run():
            if resume:
                before = load_rows(before_ref, out_row, plan.head_dim)
                total = [piece.astype(jnp.float32) * (1.0 / plan.scale) for piece in before]
            else:
                total = [jnp.zeros((rows, size), jnp.float32) for _, size in pieces(plan.head_dim)]
            total, _ = lax.fori_loop(0, count, add, (total, entry(0)))
            store_rows(d_query_ref, out_row, [piece * plan.scale for piece in total])

        if resume:
            pl.when(count > 0)(run)
        else:
            run()


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
    plan: Plan,
    rows: int,
):
    """dq [B*T*N, H] of a tile of tokens over the blocks that they share.

    block_ref, bits_ref, slots_ref [B, K, tiles, U + 1] and count_ref [B, K, tiles, 2] as in `Split`.
    """
    tile, slots = plan.config.tile, plan.slots
    local, local_pair = pl.program_id(0) * tile, pl.program_id(1)
    pair = step_ref[0] + local_pair
    batch, head = pair // plan.num_kv, pair % plan.num_kv
    first = step_ref[1] * plan.range_length + local

    @pl.when(first < plan.length)
    def _():
        at = batch, head, first // tile
        # Rows past the last token or head repeat the last one and write the same values to the same place.
        row = jnp.minimum(lax.iota(jnp.int32, rows), tile * plan.group - 1)
        last = jnp.minimum(tile, plan.length - first) - 1
        inside, member = jnp.minimum(row // plan.group, last), row % plan.group

        def add(u, total):
            block, bits = block_ref[(*at, u)], bits_ref[(*at, u)]
            share = local_pair * plan.entries + (local + inside) * slots + slot_of(slots_ref[(*at, u)], inside)
            mine = ((bits >> inside) & 1) == 1
            share = jnp.where(mine, share, plan.pairs * plan.entries)
            d_scores = d_scores_ref[share * plan.group + member, :]
            d_scores = jnp.where(mine[:, None], d_scores, jnp.zeros_like(d_scores))
            key = load_rows(key_ref, plan.key_rows(batch, head, block, 0, plan.columns)[0], plan.head_dim)
            return [acc + dot(d_scores, piece, (1, 0)) for acc, piece in zip(total, key, strict=True)]

        total = [jnp.zeros((rows, size), jnp.float32) for _, size in pieces(plan.head_dim)]
        total = lax.fori_loop(0, count_ref[(*at, 0)], add, total)
        out_row = (batch * plan.length + first + inside) * plan.num_heads + head * plan.group + member
        store_rows(d_query_ref, out_row, [piece * plan.scale for piece in total])


def finish_query(step, split: Split | None, counts, entries, buffer, key, d_query, plan: Plan):
    """Adds one step's score gradients into the rows of d_query [B*T*N, H] that the step owns.

    Args:
      step: int32 [3], first pair, range index, query_offset.
      split: `split_for`'s result.
      counts: int32 [B*K, at least T], entries of every query.
      entries: int32 [B*K*ranges, E], block lists.
      buffer: score gradients [(pairs*E + 1) * G, columns].
      key: [B*S*K, H].
      d_query: [B*T*N, H].
      plan: static sizes.
    """
    out_shape = jax.ShapeDtypeStruct(d_query.shape, d_query.dtype)
    config = plan.config
    lists: tuple[jax.Array, ...] = (counts, entries)
    if split is not None:
        lists = (split.rest,)
        d_query = triton_call(
            functools.partial(_tile_kernel, plan=plan, rows=max(16, pl.next_power_of_2(config.tile * plan.group))),
            grid=(pl.cdiv(plan.range_length, config.tile), plan.pairs),
            out_shape=out_shape,
            input_output_aliases={7: 0},
            num_warps=config.tile_warps,
            num_stages=3,
            name="selected_backward_query_tiles",
        )(step, split.block, split.bits, split.slots, split.num_shared, buffer, key, d_query)
    rows = max(16, pl.next_power_of_2(plan.group))
    return triton_call(
        functools.partial(_token_kernel, plan=plan, rows=rows, resume=split is not None),
        grid=(plan.range_length, plan.pairs),
        out_shape=out_shape,
        input_output_aliases={3 + len(lists): 0},
        num_warps=2 if rows * plan.head_dim <= 2048 else 4,
        num_stages=3 if d_query.dtype == jnp.bfloat16 else 1,
        name="selected_backward_query_major",
    )(step, *lists, buffer, key, d_query)
