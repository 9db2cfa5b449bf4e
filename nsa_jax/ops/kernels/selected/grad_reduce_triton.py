"""Sums of the selected branch's backward: work items of a block into dk and dv, list slots of a query into dq."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from nsa_jax.ops.kernels.selected.grad_layout import Layout
from nsa_jax.ops.kernels.triton import load_rows, pieces, store_rows, write_over

_PIECE = 16  # key rows per program of the key and value reduction
_AT_ONCE = 4  # work items whose loads are in flight together


def _reduce_items_kernel(
    step_ref, offset_ref, d_key_items_ref, d_value_items_ref, _k, _v, d_key_ref, d_value_ref, *, layout: Layout
):
    """Adds a block's work items, in order, to dk and dv [B*J*columns*K, H or V], or begins with range 0.

    They are float32, unless all items belong to one range, whose sum is rounded here.
    """
    block, part, local_pair = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    pair = step_ref[0] + local_pair
    row = pair * layout.ranges + step_ref[1]
    first, last = offset_ref[row, block], offset_ref[row, block + 1]
    begins = step_ref[1] == 0
    column = part // 2 * _PIECE + lax.iota(jnp.int32, _PIECE)
    batch, head = pair // layout.num_kv, pair % layout.num_kv
    out_row = ((batch * layout.num_blocks + block) * layout.columns + column) * layout.num_kv + head

    def reduce(items_ref, out_ref, dim: int):
        def add(step, total):
            items = [first + step * _AT_ONCE + i for i in range(_AT_ONCE)]
            rows = [
                (local_pair * layout.items + jnp.minimum(item, last - 1)) * layout.columns + column for item in items
            ]
            for item, parts in zip(items, [load_rows(items_ref, row, dim) for row in rows], strict=True):
                total = tuple(acc + jnp.where(item < last, x, 0.0) for acc, x in zip(total, parts, strict=True))
            return total

        zeros = lambda: tuple(jnp.zeros((_PIECE, size), jnp.float32) for _, size in pieces(dim))  # noqa: E731
        before = zeros()
        if layout.ranges > 1:
            before = lax.cond(begins, zeros, lambda: load_rows(out_ref, out_row, dim))
        store_rows(out_ref, out_row, lax.fori_loop(0, pl.cdiv(last - first, _AT_ONCE), add, before))

    for i, (items_ref, out_ref, dim) in enumerate((
        (d_key_items_ref, d_key_ref, layout.head_dim),
        (d_value_items_ref, d_value_ref, layout.value_dim),
    )):  # fmt: skip
        pl.when((begins | (first < last)) & (part % 2 == i))(functools.partial(reduce, items_ref, out_ref, dim))


def _reduce_slots_kernel(
    step_ref, count_ref, partials_ref, _dq, d_query_ref, *, layout: Layout, tokens: int, width: int
):
    """Sums a query's slots, in order: partials [pairs*E + 1, G*H] to dq [B*T, N*H]."""
    local, part, local_pair = pl.program_id(0) * tokens, pl.program_id(1), pl.program_id(2)
    pair = step_ref[0] + local_pair
    token = step_ref[1] * layout.range_length + local

    @pl.when(token < layout.length)
    def _():
        batch, head = pair // layout.num_kv, pair % layout.num_kv
        inside = lax.iota(jnp.int32, tokens)
        count = count_ref[pair, pl.ds(token, tokens)]

        def add(slot, total):
            entry = local_pair * layout.entries + (local + inside) * layout.slots + slot
            piece = partials_ref[entry, pl.ds(part * width, width)].astype(jnp.float32)
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


def add_items(step, offset, d_key_items, d_value_items, d_key, d_value, layout: Layout):
    """Adds one step's work items into d_key and d_value [B*J*columns*K, H or V], in place.

    Args:
      step: int32 [3], first pair, range index, query_offset.
      offset: `InvertedLists.offset`.
      d_key_items, d_value_items: what the pass by block returned.
      d_key, d_value: gradients so far, undefined before the first range; or their shapes, see `write_over`.
      layout: static sizes.
    """
    return write_over(
        functools.partial(_reduce_items_kernel, layout=layout),
        *(step, offset, d_key_items, d_value_items),
        outs=[d_key, d_value],
        grid=(layout.num_blocks, 2 * layout.columns // _PIECE, layout.pairs),
        num_warps=4,
        num_stages=2,
        name="nsa_selected_backward_reduce_items",
    )


def add_slots(step, counts, partials, d_query, layout: Layout):
    """Adds up the partials of dq into the rows of d_query [B*T*N, H] that this step owns."""
    span = layout.group * layout.head_dim
    width = min(span & -span, 1024)
    tokens = 1
    while tokens * width < 2048 and layout.length % (2 * tokens) == 0 and layout.range_length % (2 * tokens) == 0:
        tokens *= 2
    shape = (layout.batch * layout.length, layout.num_heads * layout.head_dim)
    by_token = d_query.reshape(shape) if isinstance(d_query, jax.Array) else jax.ShapeDtypeStruct(shape, d_query.dtype)
    (total,) = write_over(
        functools.partial(_reduce_slots_kernel, layout=layout, tokens=tokens, width=width),
        *(step, counts, partials.reshape(-1, span)),
        outs=[by_token],
        grid=(layout.range_length // tokens, span // width, layout.pairs),
        num_warps=4,
        num_stages=1,
        name="nsa_selected_backward_reduce_slots",
    )
    return total.reshape(d_query.shape)
