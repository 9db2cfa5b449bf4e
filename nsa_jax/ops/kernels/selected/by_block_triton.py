"""Selected attention by key block: the queries that listed a block are gathered to it, then each adds up its partials.

For few query heads per key/value head (small G) the per-token loop reads 64 keys and values for G rows. Here a program
holds one key block and visits the queries that listed it, many of them in one matrix product: the traffic per list
entry falls from K and V of a block to one query and one partial output. The partials pass through memory, one per list
entry, in a buffer of bounded size; a second kernel adds them up in list order, so results are bit-reproducible.

On Hopper `by_block_sm90` computes the partials and `sum_partials_sm90` adds them up.
"""

from __future__ import annotations

import functools
import math
import operator

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from nsa_jax.ops.choices import SelectedForwardPlan
from nsa_jax.ops.kernels.readers import InvertedLists, invert
from nsa_jax.ops.kernels.selected import by_block_sm90, inversion, sum_partials_sm90
from nsa_jax.ops.kernels.selected.neighbours import Split
from nsa_jax.ops.kernels.selected.softmax import key_rows, store_once
from nsa_jax.ops.kernels.softmax import LN2, LOG2E, MINUS_INFINITY
from nsa_jax.ops.kernels.triton import dot, pieces, triton_call

# Partials that are in flight together. On an H200 two took 0.85 ms and four 0.89 (4 rows of 65,536, N=6, K=1, H=64, 8
# to 13 partials of every token; without the guard for tokens that have none).
_AT_ONCE = 2


def _partial_kernel(
    offset_ref, row_ref, order_ref, block_ref, begin_ref, end_ref, start_ref, q_ref, k_ref, v_ref, partial_ref, lse_ref,
    *, rows, group, chunk_tokens, num_chunks, num_listed, longest, select_block, size, scale, num_keys, packed, exact,
):  # fmt: skip
    """One work item: a key block and up to `longest` of the list entries that name it.

    order_ref [rows, E]; block_ref, begin_ref, end_ref [rows, W]; start_ref [B, T]; q_ref [B, T, K, G, H];
    k_ref [B, S, K, H]; v_ref [B, S, K, V]; partial_ref [R, E, G, V] and lse_ref [R, E, G] for the R rows of this call.
    """
    item, local_row = pl.program_id(0), pl.program_id(1)
    list_row = row_ref[0] + local_row
    num_kv, v_dim = v_ref.shape[2:]
    batch, kv_head, chunk = list_row // (num_kv * num_chunks), list_row // num_chunks % num_kv, list_row % num_chunks
    begin, end = begin_ref[list_row, item], end_ref[list_row, item]
    start = block_ref[list_row, item] * select_block
    step = rows // group
    row = jnp.minimum(lax.broadcasted_iota(jnp.int32, (rows,), 0), step * group - 1)
    head = row % group
    last = jnp.minimum(num_keys - 1 - start, select_block - 1)

    @pl.when(end > begin)
    def attend():
        # K and V stay on chip for all the queries of the item.
        at = batch, kv_head
        keys = [
            key_rows(k_ref, at, start, size, num_keys, offset, width, exact)
            for offset, width in pieces(k_ref.shape[-1])
        ]
        values = [key_rows(v_ref, at, start, size, num_keys, offset, width, exact) for offset, width in pieces(v_dim)]

        def entries_at(index):
            """Of list entries from `begin` on: (place in the lists, token), past the end those of the last."""
            entry = order_ref[list_row, jnp.minimum(begin + index, end - 1)]
            return entry, chunk * chunk_tokens + entry // num_listed

        def body(i, carry, masked):
            # Rows past the item's end repeat its last entry and write the same values to the same place.
            entry, token = entries_at(i * step + row // group)
            scores = functools.reduce(
                operator.add,
                (
                    dot(q_ref[batch, token, kv_head, head, pl.ds(offset, width)], key, (1, 1))
                    for key, (offset, width) in zip(keys, pieces(q_ref.shape[-1]), strict=True)
                ),
            )
            if masked:
                column = lax.broadcasted_iota(jnp.int32, scores.shape, 1)
                visible = column <= jnp.minimum(token + offset_ref[0] - start, last)[:, None]
                if packed:
                    visible &= column >= (start_ref[batch, token] - start)[:, None]
                scores = jnp.where(visible, scores, MINUS_INFINITY)
            peak = jnp.max(scores, axis=1) * scale
            weights = jnp.exp2(scores * scale - peak[:, None])
            total = jnp.sum(weights, axis=1)
            weights = weights.astype(v_ref.dtype)
            inverse = (1.0 / total)[:, None]
            for value, (offset, width) in zip(values, pieces(v_dim), strict=True):
                partial = (dot(weights, value, (1, 0)) * inverse).astype(partial_ref.dtype)
                store_once(partial_ref, (local_row, entry, head, pl.ds(offset, width)), partial)
            lse_ref[local_row, entry, head] = peak + jnp.log2(total)
            return carry

        # Queries ascend, so those that see a part of the block only come first, unless rows are packed.
        index = lax.broadcasted_iota(jnp.int32, (pl.next_power_of_2(longest),), 0)
        _, token = entries_at(index)
        whole = (token + offset_ref[0] - start >= size - 1) & (last == size - 1)
        if packed:
            whole &= start_ref[batch, token] <= start
        partial = jnp.max(jnp.where(whole | (begin + index >= end), 0, index + 1))
        lax.fori_loop(0, pl.cdiv(partial, step), functools.partial(body, masked=True), 0)
        lax.fori_loop(pl.cdiv(partial, step), pl.cdiv(end - begin, step), functools.partial(body, masked=False), 0)


def _sum_kernel(
    row_ref, count_ref, partial_ref, partial_lse_ref, before_ref, before_lse_ref, o_ref, lse_ref,
    *, rows, group, length, chunk_tokens, num_chunks, num_listed,
):  # fmt: skip
    """Adds the partials of a tile of tokens to what their shared blocks gave.

    count_ref [rows, tokens], how many partials a token has; partial_ref [R, E, G, V]; partial_lse_ref [R, E, G] in
    base 2; before_ref and o_ref [B, T, K, G, V]; before_lse_ref and lse_ref [B, T, K, G], natural.
    """
    local_row = pl.program_id(1)
    list_row = row_ref[0] + local_row
    num_kv, _, v_dim = o_ref.shape[2:]
    batch, kv_head, chunk = list_row // (num_kv * num_chunks), list_row // num_chunks % num_kv, list_row % num_chunks
    step = rows // group
    row = jnp.minimum(lax.broadcasted_iota(jnp.int32, (rows,), 0), step * group - 1)
    head = row % group
    last = jnp.minimum(chunk_tokens, length - chunk * chunk_tokens) - 1
    begin = pl.program_id(0) * step
    inside = jnp.maximum(jnp.minimum(begin + row // group, last), 0)
    count = count_ref[list_row, inside]
    most = jnp.max(count)

    # Tokens are updated in place: no program but the last one's own may repeat it.
    @pl.when((most > 0) & (begin <= last))
    def add():
        token = chunk * chunk_tokens + inside
        before = before_lse_ref[batch, token, kv_head, head] * LOG2E
        some = before > -jnp.inf
        acc = tuple(
            before_ref[batch, token, kv_head, head, pl.ds(at, width)].astype(jnp.float32) for at, width in pieces(v_dim)
        )

        def body(step, state):
            acc, peak, total = state
            # Several partials at a time, so that their loads are in flight together.
            slots = [step * _AT_ONCE + i for i in range(_AT_ONCE)]
            real = [slot < count for slot in slots]
            entries = [inside * num_listed + jnp.minimum(slot, jnp.maximum(count - 1, 0)) for slot in slots]
            # The partials first: what follows waits at barriers for the small loads.
            partials = [
                [partial_ref[local_row, entry, head, pl.ds(at, width)] for at, width in pieces(v_dim)]
                for entry in entries
            ]
            lses = [
                jnp.where(r, partial_lse_ref[local_row, entry, head], MINUS_INFINITY)
                for r, entry in zip(real, entries, strict=True)
            ]
            new_peak = functools.reduce(jnp.maximum, lses, peak)
            alpha = jnp.exp2(peak - new_peak)
            weights = [jnp.where(r, jnp.exp2(x - new_peak), 0.0) for r, x in zip(real, lses, strict=True)]
            sums = [a * alpha[:, None] for a in acc]
            for weight, partial in zip(weights, partials, strict=True):
                sums = [a + x.astype(jnp.float32) * weight[:, None] for a, x in zip(sums, partial, strict=True)]
            return tuple(sums), new_peak, sum(weights, start=total * alpha)

        state = acc, jnp.where(some, before, MINUS_INFINITY), jnp.where(some, 1.0, 0.0)
        sums, peak, total = lax.fori_loop(0, pl.cdiv(most, _AT_ONCE), body, state)
        # Where a token has no partial at all, what was read was never written and may be anything, NaN included.
        acc = tuple(jnp.where((count > 0)[:, None], new, old) for new, old in zip(sums, acc, strict=True))
        some = peak > 0.5 * MINUS_INFINITY
        total = jnp.where(some, total, 1.0)
        inverse = jnp.where(some, 1.0 / total, 0.0)
        for a, (at, width) in zip(acc, pieces(v_dim), strict=True):
            o_ref[batch, token, kv_head, head, pl.ds(at, width)] = (a * inverse[:, None]).astype(o_ref.dtype)
        lse_ref[batch, token, kv_head, head] = jnp.where(some, (peak + jnp.log2(total)) * LN2, -jnp.inf)


def _full(array) -> pl.BlockSpec:
    """The whole array: the kernels index it themselves, since which row they serve is known at run time only."""
    return pl.BlockSpec(array.shape, lambda *_: (0,) * len(array.shape))


def _partials(
    query_offset, first_row, inverted: InvertedLists, segment_start, query, key, value,
    *, select_block: int, at_once: int, chunk_tokens: int, num_listed: int, packed: bool, config,
):  # fmt: skip
    """`_partial_kernel` over `at_once` rows of the inverted lists; see `by_block_sm90.partials`."""
    batch, _, num_kv, group, h_dim = query.shape
    num_keys, v_dim = value.shape[1], value.shape[-1]
    entries, size = chunk_tokens * num_listed, config.keys
    lists = inverted.order, inverted.block, inverted.begin, inverted.end
    args = (query_offset, first_row, *lists, segment_start, query, key, value)
    out_shape = [
        jax.ShapeDtypeStruct((at_once, entries, group, v_dim), query.dtype),
        jax.ShapeDtypeStruct((at_once, entries, group), jnp.float32),
    ]
    return triton_call(
        functools.partial(
            _partial_kernel,
            rows=max(config.gather_rows, pl.next_power_of_2(group)),
            group=group,
            chunk_tokens=chunk_tokens,
            num_chunks=inverted.block.shape[0] // (batch * num_kv),
            num_listed=num_listed,
            longest=config.chunk,
            select_block=select_block,
            size=size,
            scale=LOG2E / math.sqrt(h_dim),
            num_keys=num_keys,
            packed=packed,
            exact=num_keys % size == 0 and select_block == size,
        ),
        num_warps=config.gather_warps,
        num_stages=config.gather_stages,
        grid=(inverted.block.shape[1], at_once),
        in_specs=[_full(x) for x in args],
        out_specs=[_full(x) for x in out_shape],
        out_shape=out_shape,
        name="nsa_selected_forward_shares",
    )(*args)


def _add_partials(first_row, count, chunk_tokens: int, partial, partial_lse, out, lse, *, num_listed: int):
    """`_sum_kernel` over as many rows of the inverted lists as `partial` has: the new (out, lse)."""
    at_once, _, group, v_dim = partial.shape
    batch, length, num_kv = out.shape[:3]
    rows = max(32, pl.next_power_of_2(group))
    args = (first_row, count, partial, partial_lse, out, lse)
    total = triton_call(
        functools.partial(
            _sum_kernel,
            rows=rows,
            group=group,
            length=length,
            chunk_tokens=chunk_tokens,
            num_chunks=count.shape[0] // (batch * num_kv),
            num_listed=num_listed,
        ),
        # On an H200 4 warps of 32 rows of 128 take 0.30 ms where 8 take 0.39, and 1 of 64 columns less than 2 to 8. In
        # groups of 7 heads, whose rows are not whole tiles, the operator took 6.11 ms with 4 and 5.89 with 8.
        num_warps=1 if rows * v_dim <= 2048 else 4 if rows % group == 0 else 8,
        num_stages=2,
        grid=(pl.cdiv(chunk_tokens, rows // group), at_once),
        in_specs=[_full(x) for x in args],
        out_specs=[_full(out), _full(lse)],
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (out, lse)],
        input_output_aliases={4: 0, 5: 1},
        name="nsa_selected_forward_sum",
    )(*args)
    return tuple(total)


def _tokens_of_a_row(length: int, per_token: int, tile: int, limits) -> int:
    """Tokens of a row, what has one buffer of partials and is inverted together: whole tiles where there are more."""
    most_tokens = max(1, min(limits.row_tokens, limits.buffer_bytes // per_token))
    chunk_tokens = pl.cdiv(length, pl.cdiv(length, most_tokens))
    return min(length, pl.cdiv(chunk_tokens, tile) * tile)


def _invert_rest(split: Split, block_indices, num_blocks: int, chunk_tokens: int, tile: int, chunk: int):
    """(inverted lists, entries of each token) of what tiles do not share, by rows of `chunk_tokens` tokens."""
    batch, length, num_kv, num_listed = block_indices.shape
    entries = chunk_tokens * num_listed
    if split.words is not None:
        return inversion.invert(
            split.words, block_indices, num_blocks, chunk,
            tile=tile, tiles_per_row=pl.cdiv(chunk_tokens, tile), entries=entries, even=True,
        )  # fmt: skip
    assert split.rest is not None
    lists = split.rest[:, :, :tile, :, :num_listed].reshape(batch, -1, num_kv, num_listed)[:, :length]
    pad = ((0, 0), (0, -length % chunk_tokens), (0, 0), (0, 0))
    lists = jnp.pad(lists, pad, constant_values=num_blocks).swapaxes(1, 2).reshape(-1, chunk_tokens, num_listed)
    count = (lists < num_blocks).sum(-1, dtype=jnp.int32)
    return invert(lists.reshape(-1, entries), num_blocks, chunk, even=True), count


def continue_by_key_block(
    query, key, value, block_indices, split: Split, segment_start, query_offset, out, lse,
    *, select_block: int, packed: bool, plan: SelectedForwardPlan,
):  # fmt: skip
    """Adds the listed blocks that no tile shares to the attention of every query.

    Args:
      query: [B, T, K, G, H].
      key: [B, S, K, H].
      value: [B, S, K, V].
      block_indices: int32 [B, T, K, n].
      split: the lists split by tiles, with words where these fit.
      segment_start: int32 [B, T].
      query_offset: int32 [1].
      out: [B, T, K, G, V] attention over other blocks so far, exactly 0 where there was none.
      lse: float32 [B, T, K, G], its natural-log log-sum-exp, -inf where there was none.
      select_block: l'.
      packed: whether segment_start matters.
      plan: the kernels.

    Returns:
      The new (out, lse).
    """
    batch, length, num_kv, group, h_dim = query.shape
    num_keys, v_dim = value.shape[1], value.shape[-1]
    num_listed = block_indices.shape[-1]
    hopper = plan.rest.kernel == "selected.by_block_sm90"
    assert plan.lists is not None
    limits, tile = plan.rest.tiles, plan.lists.tile

    per_token = num_listed * group * (v_dim * query.dtype.itemsize + 4)
    chunk_tokens = _tokens_of_a_row(length, per_token, tile, limits)
    num_rows = batch * num_kv * pl.cdiv(length, chunk_tokens)
    num_blocks = pl.cdiv(num_keys, select_block)
    inverted, count = _invert_rest(split, block_indices, num_blocks, chunk_tokens, tile, limits.chunk)

    at_once = max(
        n
        for n in range(1, num_rows + 1)
        if num_rows % n == 0 and (n == 1 or n * chunk_tokens * per_token <= limits.buffer_bytes)
    )
    serve_entries = by_block_sm90.partials if hopper else functools.partial(_partials, select_block=select_block)
    add_partials = sum_partials_sm90.add_partials if hopper else _add_partials
    partials = functools.partial(
        serve_entries,
        at_once=at_once,
        chunk_tokens=chunk_tokens,
        num_listed=num_listed,
        packed=packed,
        config=limits,
    )

    def serve(i, state):
        row = (i * at_once).astype(jnp.int32).reshape(1)
        args = query_offset, row, inverted, segment_start, query, key, value
        return add_partials(row, count, chunk_tokens, *partials(*args), *state, num_listed=num_listed)

    if num_rows == at_once:
        return serve(jnp.zeros((), jnp.int32), (out, lse))
    return lax.fori_loop(0, num_rows // at_once, serve, (out, lse))
