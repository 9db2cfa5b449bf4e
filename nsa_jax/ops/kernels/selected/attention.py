"""Selected attention on GPUs: every query reads the tokens of its own list of key blocks (paper section 3.3.2).

The plain loop runs one program per (query token, key/value head): the G query heads of the group are the rows of the
matrix products and the program walks its list with a running softmax. Every step brings K and V of one block from L2
to a multiprocessor for G rows only, and that traffic is its limit.

So lists are split first. A tile of neighbouring tokens shares blocks: always the forced ones, often more. What at least
`share` tokens of a tile list is read once for the whole tile (`_tile_kernel`, with one bit per token and block, or on
Hopper the kernel of ranged attention or `neighbours_sm90`); the plain loop then continues from that result over
what is left of each token's list.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from nsa_jax.ops import tiles as tuning
from nsa_jax.ops.kernels.range_attention import sm90_forward
from nsa_jax.ops.kernels.selected import neighbours_sm90, whole_row_sm90
from nsa_jax.ops.kernels.selected.backward import selected_backward
from nsa_jax.ops.kernels.selected.by_block_triton import continue_by_key_block
from nsa_jax.ops.kernels.selected.neighbours import split_lists
from nsa_jax.ops.kernels.selected.softmax import attend_block, finish, load_once, store_once
from nsa_jax.ops.kernels.softmax import LOG2E, MINUS_INFINITY, empty_state
from nsa_jax.ops.kernels.triton import first_derivative, pieces, row_delta, triton_call
from nsa_jax.ops.target import current_target


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


def _tile_kernel(
    offset_ref, block_ref, bits_ref, count_ref, start_ref, q_ref, k_ref, v_ref, o_ref, lse_ref,
    *, rows, group, length, select_block, size, scale, num_keys, packed, exact,
):  # fmt: skip
    """The shared blocks of a tile of tokens: block_ref and bits_ref [U], start_ref [Q], q_ref [Q, G, H]."""
    tile = q_ref.shape[0]
    v_dim = v_ref.shape[-1]
    begin = pl.program_id(0) * tile
    row = jnp.minimum(lax.broadcasted_iota(jnp.int32, (rows,), 0), tile * group - 1)
    # Rows past the last token repeat the last token's, bits included, and write the same values to the same place.
    token = jnp.minimum(row // group, length - 1 - begin)
    head = row % group
    t = jnp.minimum(begin + token + offset_ref[0], num_keys - 1)
    q = [load_once(q_ref, (token, head, pl.ds(offset, width))) for offset, width in pieces(q_ref.shape[-1])]
    parts = pl.cdiv(select_block, size)

    def step(i, state, masked):
        part = lax.rem(i, parts) * size if parts > 1 else 0
        which = lax.div(i, parts) if parts > 1 else i
        start = block_ref[which] * select_block + part
        low = high = None
        if masked:
            listed = ((bits_ref[which] >> token) & 1) == 1
            high = jnp.where(listed, jnp.minimum(t - start, select_block - 1 - part), -1)
            low = start_ref[token] - start if packed else None
        elif select_block % size:
            high = jnp.full((rows,), select_block - 1 - part, jnp.int32)
        return attend_block(
            state, q, k_ref, v_ref, start, low, high,
            size=size, scale=scale, num_keys=num_keys, v_dim=v_dim, exact=exact,
        )  # fmt: skip

    state, full = empty_state(rows, v_dim), 0
    if not packed:
        full = count_ref[1] * parts
        state = lax.fori_loop(0, full, functools.partial(step, masked=False), state)
    state = lax.fori_loop(full, count_ref[0] * parts, functools.partial(step, masked=True), state)
    out, lse = finish(state, scale, o_ref.dtype)
    for piece, (offset, width) in zip(out, pieces(v_dim), strict=True):
        store_once(o_ref, (token, head, pl.ds(offset, width)), piece)
    lse_ref[token, head] = lse


def _hopper_serves_tiles(query, value, select_block: int, config: tuning.SelectedConfig) -> bool:
    """Whether Hopper's kernel serves the blocks that tiles share: its tiles have 128 rows, whole tokens of them."""
    group = query.shape[2] // value.shape[2]
    return (
        select_block == whole_row_sm90.BLOCK
        and config.tile * group == 2 * whole_row_sm90.BLOCK
        and group in sm90_forward.DIRECT_GROUPS
        and sm90_forward.serves(query, value, current_target(), None)
    )


def selected_forward(query, key, value, block_indices, segment_start, query_offset, select_block: int, packed: bool):
    """Output [B, T, N, V] and natural-log lse float32 [B, T, N]."""
    if whole_row_sm90.serves(query, value, block_indices.shape[-1], select_block):
        return whole_row_sm90.forward(query, key, value, block_indices, segment_start, query_offset)
    batch, length, num_heads, h_dim = query.shape
    num_keys, num_kv, v_dim = value.shape[1:]
    group = num_heads // num_kv
    config = tuning.selected_config(group, h_dim, v_dim, select_block, query.dtype)
    return _forward_with(query, key, value, block_indices, segment_start, query_offset, select_block, packed, config)


def _forward_with(query, key, value, block_indices, segment_start, query_offset, select_block, packed, config):
    """`selected_forward` with a given configuration."""
    batch, length, num_heads, h_dim = query.shape
    num_keys, num_kv, v_dim = value.shape[1:]
    group = num_heads // num_kv
    num_listed = block_indices.shape[-1]
    static = dict(
        group=group,
        select_block=select_block,
        scale=LOG2E / math.sqrt(h_dim),
        num_keys=num_keys,
        packed=packed,
    )
    whole_blocks = num_keys % select_block == 0

    def steps_of(size: int) -> dict:
        return dict(size=size, exact=whole_blocks and select_block % size == 0)

    grouped = query.reshape(batch, length, num_kv, group, h_dim)
    query_offset = query_offset.reshape(1)
    # Tokens run fastest: the programs in flight share one head's keys and values, which then stay in the L2 cache.
    key_specs = [
        pl.BlockSpec((None, num_keys, None, h_dim), lambda t, k, b: (b, 0, k, 0)),
        pl.BlockSpec((None, num_keys, None, v_dim), lambda t, k, b: (b, 0, k, 0)),
    ]
    out_shape = [
        jax.ShapeDtypeStruct((batch, length, num_kv, group, v_dim), query.dtype),
        jax.ShapeDtypeStruct((batch, length, num_kv, group), jnp.float32),
    ]
    scalar_spec = pl.BlockSpec((1,), lambda t, k, b: (0,))

    tile = config.tile
    resume = tile > 1 and length > 1
    state = ()
    list_spec = pl.BlockSpec((None, None, None, num_listed), lambda t, k, b: (b, t, k, 0))
    if resume:
        split = split_lists(
            block_indices, segment_start, query_offset,
            tile=tile, share=config.share, select_block=select_block, num_keys=num_keys, packed=packed,
        )  # fmt: skip
        walks = split.block, split.bits, split.num_shared
        if _hopper_serves_tiles(query, value, select_block, config):
            low, high = whole_row_sm90.visible_ranges(query, key, segment_start, query_offset)
            hopper_config = tuning.selected_hopper_config(h_dim, v_dim)
            state = sm90_forward.neighbours_forward(query, key, value, low, high, hopper_config, walks)
            state = tuple(x.reshape(like.shape) for x, like in zip(state, out_shape, strict=True))
        elif config.key_major and neighbours_sm90.serves(query, value, group, select_block, tile, current_target()):
            state = neighbours_sm90.forward(
                query, key, value, walks, segment_start, query_offset, tile=tile, packed=packed
            )
        else:
            width = split.block.shape[-1]
            state = triton_call(
                functools.partial(
                    _tile_kernel,
                    rows=max(16, pl.next_power_of_2(tile * group)),
                    length=length,
                    **static,
                    **steps_of(config.keys),
                ),
                num_warps=config.tile_warps,
                num_stages=config.tile_stages,
                grid=(pl.cdiv(length, tile), num_kv, batch),
                in_specs=[
                    scalar_spec,
                    pl.BlockSpec((None, None, None, width), lambda i, k, b: (b, k, i, 0)),
                    pl.BlockSpec((None, None, None, width), lambda i, k, b: (b, k, i, 0)),
                    pl.BlockSpec((None, None, None, 2), lambda i, k, b: (b, k, i, 0)),
                    pl.BlockSpec((None, tile), lambda i, k, b: (b, i)),
                    pl.BlockSpec((None, tile, None, group, h_dim), lambda i, k, b: (b, i, k, 0, 0)),
                    *key_specs,
                ],
                out_specs=[
                    pl.BlockSpec((None, tile, None, group, v_dim), lambda i, k, b: (b, i, k, 0, 0)),
                    pl.BlockSpec((None, tile, None, group), lambda i, k, b: (b, i, k, 0)),
                ],
                out_shape=out_shape,
                name="nsa_selected_forward_tiles",
            )(query_offset, *walks, segment_start, grouped, key, value)
        if config.key_major:
            rest = split.rest[:, :, :tile, :, :num_listed].reshape(batch, -1, num_kv, num_listed)[:, :length]
            out, lse = continue_by_key_block(
                grouped, key, value, rest, segment_start, query_offset, *state,
                select_block=select_block, packed=packed, config=config,
            )  # fmt: skip
            return out.reshape(batch, length, num_heads, v_dim), lse.reshape(batch, length, num_heads)
        block_indices = split.rest
        list_spec = pl.BlockSpec((None, None, None, None, num_listed), lambda t, k, b: (b, t // tile, t % tile, k, 0))

    out_specs = [
        pl.BlockSpec((None, None, None, group, v_dim), lambda t, k, b: (b, t, k, 0, 0)),
        pl.BlockSpec((None, None, None, group), lambda t, k, b: (b, t, k, 0)),
    ]
    out, lse = triton_call(
        functools.partial(
            _plain_kernel,
            rows=max(16, pl.next_power_of_2(group)),
            num_listed=num_listed,
            resume=resume,
            **static,
            **steps_of(config.plain_keys),
        ),
        num_warps=config.plain_warps,
        num_stages=config.plain_stages,
        grid=(length, num_kv, batch),
        in_specs=[
            scalar_spec,
            list_spec,
            pl.BlockSpec((None, 1), lambda t, k, b: (b, t)),
            pl.BlockSpec((None, None, None, group, h_dim), lambda t, k, b: (b, t, k, 0, 0)),
            *key_specs,
            *(out_specs if resume else ()),
        ],
        out_specs=out_specs,
        out_shape=out_shape,
        input_output_aliases={6: 0, 7: 1} if resume else {},
        name="nsa_selected_forward",
    )(query_offset, block_indices, segment_start, grouped, key, value, *state)
    return out.reshape(batch, length, num_heads, v_dim), lse.reshape(batch, length, num_heads)


@functools.partial(jax.custom_vjp, nondiff_argnums=(6, 7))
def _selected(query, key, value, block_indices, segment_start, query_offset, select_block, packed):
    return selected_forward(query, key, value, block_indices, segment_start, query_offset, select_block, packed)[0]


def _selected_fwd(query, key, value, block_indices, segment_start, query_offset, select_block, packed):
    query, key, value = first_derivative(query, key, value)
    out, lse = selected_forward(query, key, value, block_indices, segment_start, query_offset, select_block, packed)
    return out, (query, key, value, block_indices, segment_start, query_offset, out, lse)


def _selected_bwd(select_block, packed, residuals, d_out):
    query, key, value, block_indices, segment_start, query_offset, out, lse = residuals
    (d_out,) = first_derivative(d_out)
    d_query, d_key, d_value = selected_backward(
        query, key, value, block_indices, row_delta(out, d_out), lse, d_out,
        select_block=select_block, segment_start=segment_start, query_offset=query_offset,
    )  # fmt: skip
    return d_query, d_key, d_value, None, None, None


_selected.defvjp(_selected_fwd, _selected_bwd)


def selected_attention(query, key, value, block_indices, *, select_block: int, segment_start=None, query_offset=0):
    """See `nsa_jax.selected_attention`."""
    packed = segment_start is not None
    if segment_start is None:
        segment_start = jnp.zeros(query.shape[:2], jnp.int32)
    offset = jnp.asarray(query_offset, jnp.int32)
    return _selected(
        query,
        key,
        value,
        block_indices.astype(jnp.int32),
        segment_start.astype(jnp.int32),
        offset,
        select_block,
        packed,
    )
