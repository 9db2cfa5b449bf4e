"""Selected attention on GPUs: every query reads the tokens of its own list of key blocks (paper section 3.3.2).

Short rows on Hopper are read whole, under a mask of blocks. Otherwise lists are split first: a tile of neighbouring
tokens shares blocks, always the forced ones and often more, and these are read once for the whole tile. What is left of
each list is then read token by token or, for small groups of heads, block by block, and continues from that result. On
Hopper one kernel does both, token by token.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from nsa_jax.ops.choices import Choice, SelectedForwardPlan, SelectedPlan
from nsa_jax.ops.kernels.range_attention import sm90_forward
from nsa_jax.ops.kernels.selected import (
    by_block_triton,
    by_token_sm90,
    by_token_triton,
    inversion,
    neighbours_sm90,
    neighbours_triton,
    whole_row_sm90,
)
from nsa_jax.ops.kernels.selected.backward import selected_backward
from nsa_jax.ops.kernels.selected.neighbours import split_lists
from nsa_jax.ops.kernels.triton import first_derivative, row_delta


def selected_forward(
    query, key, value, block_indices, segment_start, query_offset, select_block: int, packed: bool,
    plan: SelectedForwardPlan,
):  # fmt: skip
    """Output [B, T, N, V] and natural-log lse float32 [B, T, N]; query_offset is an int, or a traced scalar."""
    if plan.lists is None:
        return whole_row_sm90.forward(
            query, key, value, block_indices, segment_start, query_offset, plan.rest.tiles, packed
        )
    batch, length, num_heads, h_dim = query.shape
    num_keys, num_kv, v_dim = value.shape[1:]
    num_listed = block_indices.shape[-1]
    grouped = query.reshape(batch, length, num_kv, num_heads // num_kv, h_dim)
    query_offset = jnp.asarray(query_offset, jnp.int32).reshape(1)
    blocks: dict[str, Any] = dict(select_block=select_block, packed=packed)
    if plan.rest.kernel == "selected.by_token_sm90":
        return by_token_sm90.forward(
            query, key, value, block_indices, segment_start, query_offset, plan.lists, plan.rest.tiles, **blocks
        )
    split, lists, state, tile = None, block_indices, (), plan.lists.tile
    by_token = plan.rest.kernel == "selected.by_token_triton"
    if plan.neighbours is not None:
        split = split_lists(
            block_indices, segment_start, query_offset, tile=tile, share=plan.lists.share, num_keys=num_keys,
            words=not by_token and inversion.fits(batch, length, num_kv, tile, pl.cdiv(num_keys, select_block)),
            **blocks,
        )  # fmt: skip
        neighbours = split.block, split.bits, split.num_shared
        arrays = query, grouped, key, value, neighbours, segment_start, query_offset
        state = _shared_blocks(*arrays, plan.neighbours, tile=tile, **blocks)
        lists = split.rest
    if by_token:
        out, lse = by_token_triton.forward(
            grouped, key, value, lists, segment_start, query_offset, state,
            num_listed=num_listed, config=plan.rest.tiles, **blocks,
        )  # fmt: skip
    else:
        assert split is not None
        out, lse = by_block_triton.continue_by_key_block(
            grouped, key, value, block_indices, split, segment_start, query_offset, *state, plan=plan, **blocks
        )
    return out.reshape(batch, length, num_heads, v_dim), lse.reshape(batch, length, num_heads)


def _shared_blocks(
    query, grouped, key, value, neighbours, segment_start, query_offset, chosen: Choice,
    *, tile: int, select_block: int, packed: bool,
):  # fmt: skip
    """What the blocks that tiles share give: output [B, T, K, G, V] and lse [B, T, K, G]; `grouped` is the query so."""
    if chosen.kernel == "range_attention.sm90_forward":
        low, high = whole_row_sm90.visible_ranges(query, key, segment_start, query_offset)
        out, lse = sm90_forward.neighbours_forward(query, key, value, low, high, chosen.tiles, neighbours)
        return out.reshape(*grouped.shape[:-1], value.shape[-1]), lse.reshape(grouped.shape[:-1])
    if chosen.kernel == "selected.neighbours_sm90":
        return neighbours_sm90.forward(
            query, key, value, neighbours, segment_start, query_offset,
            tile=tile, packed=packed, config=chosen.tiles,
        )  # fmt: skip
    return neighbours_triton.forward(
        grouped, key, value, neighbours, segment_start, query_offset,
        select_block=select_block, packed=packed, config=chosen.tiles,
    )  # fmt: skip


@functools.partial(jax.custom_vjp, nondiff_argnums=(6, 7, 8))
def _selected(query, key, value, block_indices, segment_start, query_offset, select_block, packed, plan):
    static = select_block, packed, plan.forward
    return selected_forward(query, key, value, block_indices, segment_start, query_offset, *static)[0]


def _selected_fwd(query, key, value, block_indices, segment_start, query_offset, select_block, packed, plan):
    query, key, value = first_derivative(query, key, value)
    static = select_block, packed, plan.forward
    out, lse = selected_forward(query, key, value, block_indices, segment_start, query_offset, *static)
    return out, (query, key, value, block_indices, segment_start, query_offset, out, lse)


def _selected_bwd(select_block, packed, plan, residuals, d_out):
    query, key, value, block_indices, segment_start, query_offset, out, lse = residuals
    (d_out,) = first_derivative(d_out)
    d_query, d_key, d_value = selected_backward(
        query, key, value, block_indices, row_delta(out, d_out), lse, d_out,
        select_block=select_block, segment_start=segment_start, query_offset=query_offset, packed=packed,
        plan=plan.backward,
    )  # fmt: skip
    return d_query, d_key, d_value, None, None, None


_selected.defvjp(_selected_fwd, _selected_bwd)


def selected_attention(
    query, key, value, block_indices, *, select_block: int, segment_start, query_offset, plan: SelectedPlan
):
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
        plan,
    )
