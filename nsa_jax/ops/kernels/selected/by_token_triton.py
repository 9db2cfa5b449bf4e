"""Selected attention token by token: one Triton program for each query token and key/value head.

The G query heads of the group are the rows of the matrix products, and the program walks its list with a running
softmax. Every step brings K and V of one block from L2 to a multiprocessor for G rows only, and that traffic is its
limit.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from nsa_jax.ops.kernels.selected.softmax import attend_block, finish, load_once, store_once
from nsa_jax.ops.kernels.softmax import LOG2E, MINUS_INFINITY, empty_state
from nsa_jax.ops.kernels.triton import pieces, triton_call
from nsa_jax.ops.selected_tiles import SelectedConfig


def _plain_kernel(
    offset_ref, list_ref, start_ref, q_ref, k_ref, v_ref, *refs,
    rows, group, num_listed, select_block, size, scale, num_keys, packed, exact, resume,
):  # fmt: skip
    """One (token, kv head): list_ref [n], start_ref [1], q_ref [G, H], k_ref [S, H], v_ref [S, V].

    With `resume`, the output and lse hold what the tile kernel made of the token's shared blocks; a token with nothing
    left in its list keeps them.
    """
    o_ref, lse_ref = refs[-2:]
    t = jnp.minimum(pl.program_id(0) + offset_ref[0], num_keys - 1)
    v_dim = v_ref.shape[-1]
    slot = lax.broadcasted_iota(jnp.int32, (pl.next_power_of_2(num_listed),), 0)
    listed = list_ref[jnp.minimum(slot, num_listed - 1)]
    real = slot < num_listed
    last = jnp.sum((real & (listed <= t // select_block)).astype(jnp.int32))
    first: Any = 0
    segment: Any = 0
    if packed:
        segment = start_ref[0]
        first = jnp.sum((real & (listed < segment // select_block)).astype(jnp.int32))
        last = jnp.where(segment <= t, last, first)
    parts = pl.cdiv(select_block, size)

    def attend():
        # Rows of the padding above G hold copies of row G - 1 and write the same values to the same place.
        head = jnp.minimum(lax.broadcasted_iota(jnp.int32, (rows,), 0), group - 1)
        q = [load_once(q_ref, (head, pl.ds(offset, width))) for offset, width in pieces(q_ref.shape[-1])]

        def body(i, state):
            part = lax.rem(i, parts) * size if parts > 1 else 0
            start = list_ref[lax.div(i, parts) if parts > 1 else i] * select_block + part
            high = jnp.full((rows,), jnp.minimum(t - start, select_block - 1 - part), jnp.int32)
            low = jnp.full((rows,), segment - start, jnp.int32) if packed else None
            return attend_block(
                state, q, k_ref, v_ref, start, low, high,
                size=size, scale=scale, num_keys=num_keys, v_dim=v_dim, exact=exact,
            )  # fmt: skip

        state = empty_state(rows, v_dim)
        if resume:
            out_ref, before_ref = refs[:2]
            before = before_ref[head] * LOG2E / scale
            some = before > -jnp.inf
            acc = tuple(load_once(out_ref, (head, pl.ds(at, width))).astype(jnp.float32) for at, width in pieces(v_dim))
            state = acc, jnp.where(some, before, MINUS_INFINITY), jnp.where(some, 1.0, 0.0)
        out, lse = finish(lax.fori_loop(first * parts, last * parts, body, state), scale, o_ref.dtype)
        for piece, (offset, width) in zip(out, pieces(v_dim), strict=True):
            store_once(o_ref, (head, pl.ds(offset, width)), piece)
        lse_ref[head] = lse

    if resume:
        pl.when(last > first)(attend)
    else:
        attend()


def forward(
    query, key, value, lists, segment_start, query_offset, state,
    *, num_listed: int, select_block: int, packed: bool, config: SelectedConfig,
):  # fmt: skip
    """Output [B, T, K, G, V] and natural-log lse float32 [B, T, K, G].

    Args:
      query: [B, T, K, G, H].
      key: [B, S, K, H].
      value: [B, S, K, V].
      lists: int32 [B, T, K, n]; with a state, `neighbours.Split.rest`.
      segment_start: int32 [B, T].
      query_offset: int32 [1].
      state: output and lse over other blocks, to continue from; () if there are none.
      num_listed: n.
      select_block: l'.
      packed: whether segment_start matters.
      config: tiles.
    """
    batch, length, num_kv, group, h_dim = query.shape
    num_keys, v_dim = value.shape[1], value.shape[-1]
    size, tile, resume = config.plain_keys, config.tile, bool(state)
    if resume:
        list_spec = pl.BlockSpec((None, None, None, None, num_listed), lambda t, k, b: (b, t // tile, t % tile, k, 0))
    else:
        list_spec = pl.BlockSpec((None, None, None, num_listed), lambda t, k, b: (b, t, k, 0))
    out_specs = [
        pl.BlockSpec((None, None, None, group, v_dim), lambda t, k, b: (b, t, k, 0, 0)),
        pl.BlockSpec((None, None, None, group), lambda t, k, b: (b, t, k, 0)),
    ]
    # Tokens run fastest: the programs in flight share one head's keys and values, which then stay in the L2 cache.
    return triton_call(
        functools.partial(
            _plain_kernel,
            rows=max(16, pl.next_power_of_2(group)),
            num_listed=num_listed,
            resume=resume,
            group=group,
            select_block=select_block,
            scale=LOG2E / math.sqrt(h_dim),
            num_keys=num_keys,
            packed=packed,
            size=size,
            exact=num_keys % select_block == 0 and select_block % size == 0,
        ),
        num_warps=config.plain_warps,
        num_stages=config.plain_stages,
        grid=(length, num_kv, batch),
        in_specs=[
            pl.BlockSpec((1,), lambda t, k, b: (0,)),
            list_spec,
            pl.BlockSpec((None, 1), lambda t, k, b: (b, t)),
            pl.BlockSpec((None, None, None, group, h_dim), lambda t, k, b: (b, t, k, 0, 0)),
            pl.BlockSpec((None, num_keys, None, h_dim), lambda t, k, b: (b, 0, k, 0)),
            pl.BlockSpec((None, num_keys, None, v_dim), lambda t, k, b: (b, 0, k, 0)),
            *(out_specs if resume else ()),
        ],
        out_specs=out_specs,
        out_shape=[
            jax.ShapeDtypeStruct((batch, length, num_kv, group, v_dim), query.dtype),
            jax.ShapeDtypeStruct((batch, length, num_kv, group), jnp.float32),
        ],
        input_output_aliases={6: 0, 7: 1} if resume else {},
        name="nsa_selected_forward",
    )(query_offset, lists, segment_start, query, key, value, *state)
