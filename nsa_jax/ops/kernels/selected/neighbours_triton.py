"""Selected attention of the blocks that a tile of neighbouring tokens shares: one Triton program for each tile.

A block that several tokens list is read once for all of them, with one bit per token and block for who listed it.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from nsa_jax.ops.kernels.selected.softmax import attend_block, finish, load_once, store_once
from nsa_jax.ops.kernels.softmax import LOG2E, empty_state
from nsa_jax.ops.kernels.triton import pieces, triton_call
from nsa_jax.ops.selected_tiles import SelectedConfig


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


def forward(
    query,
    key,
    value,
    neighbours,
    segment_start,
    query_offset,
    *,
    select_block: int,
    packed: bool,
    config: SelectedConfig,
):
    """Output [B, T, K, G, V] and natural-log lse float32 [B, T, K, G].

    Args:
      query: [B, T, K, G, H].
      key: [B, S, K, H].
      value: [B, S, K, V].
      neighbours: (block, bits, num_shared) of a `neighbours.Split` by tiles of `config.tile` tokens.
      segment_start: int32 [B, T].
      query_offset: int32 [1].
      select_block: l'.
      packed: whether segment_start matters.
      config: tiles.
    """
    batch, length, num_kv, group, h_dim = query.shape
    num_keys, v_dim = value.shape[1], value.shape[-1]
    size, tile, width = config.keys, config.tile, neighbours[0].shape[-1]
    return triton_call(
        functools.partial(
            _tile_kernel,
            rows=max(16, pl.next_power_of_2(tile * group)),
            length=length,
            group=group,
            select_block=select_block,
            scale=LOG2E / math.sqrt(h_dim),
            num_keys=num_keys,
            packed=packed,
            size=size,
            exact=num_keys % select_block == 0 and select_block % size == 0,
        ),
        num_warps=config.tile_warps,
        num_stages=config.tile_stages,
        grid=(pl.cdiv(length, tile), num_kv, batch),
        in_specs=[
            pl.BlockSpec((1,), lambda i, k, b: (0,)),
            pl.BlockSpec((None, None, None, width), lambda i, k, b: (b, k, i, 0)),
            pl.BlockSpec((None, None, None, width), lambda i, k, b: (b, k, i, 0)),
            pl.BlockSpec((None, None, None, 2), lambda i, k, b: (b, k, i, 0)),
            pl.BlockSpec((None, tile), lambda i, k, b: (b, i)),
            pl.BlockSpec((None, tile, None, group, h_dim), lambda i, k, b: (b, i, k, 0, 0)),
            pl.BlockSpec((None, num_keys, None, h_dim), lambda i, k, b: (b, 0, k, 0)),
            pl.BlockSpec((None, num_keys, None, v_dim), lambda i, k, b: (b, 0, k, 0)),
        ],
        out_specs=[
            pl.BlockSpec((None, tile, None, group, v_dim), lambda i, k, b: (b, i, k, 0, 0)),
            pl.BlockSpec((None, tile, None, group), lambda i, k, b: (b, i, k, 0)),
        ],
        out_shape=[
            jax.ShapeDtypeStruct((batch, length, num_kv, group, v_dim), query.dtype),
            jax.ShapeDtypeStruct((batch, length, num_kv, group), jnp.float32),
        ],
        name="nsa_selected_forward_tiles",
    )(query_offset, *neighbours, segment_start, query, key, value)
