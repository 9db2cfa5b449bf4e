"""Importance scores of selection blocks from the log-sum-exp, the Triton kernel.

A program keeps a tile of compressed keys and walks over the G query heads, whose probabilities it adds up. The mask and
the fold into selection blocks come after that sum, once per tile, as float32 sums.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from nsa_jax.ops import blocks
from nsa_jax.ops.blocks import NSAConfig
from nsa_jax.ops.kernels.selection.fold import Fold
from nsa_jax.ops.kernels.softmax import LOG2E
from nsa_jax.ops.kernels.triton import dot, interpreted, pieces, triton_call


def _exp2(x: jax.Array) -> jax.Array:
    """2**x with results below 2^-126 flushed to 0: one instruction where the exact one needs four."""
    if interpreted():
        return jnp.exp2(x)
    (out,) = pltriton.elementwise_inline_asm(
        "ex2.approx.ftz.f32 $0, $1;",
        args=[x],
        constraints="=f,f",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(x.shape, x.dtype)],
    )
    return out


def _scores_kernel(*refs, tile, config: NSAConfig, num_heads, num_cmp, length, scale, packed):
    """Importance of the selection blocks of one key tile for one query tile.

    refs: where = (position of query 0, first query of this buffer) [2], query [T, G, H], key [C, H], base-2 lse [G, T]
    (+inf for rows that see nothing), segment_start [T] if packed; out: scores [planes, queries of the buffer, width].
    """
    where_ref, q_ref, k_ref, lse_ref, *start_refs, out_ref = refs
    fold = Fold.of(config)
    width = tile.keys // fold.padded
    offset, first_row = where_ref[0], where_ref[1]
    tile_row = pl.program_id(1) * tile.queries
    rows = jnp.minimum(first_row + tile_row + lax.broadcasted_iota(jnp.int32, (tile.queries,), 0), length - 1)
    position = offset + rows
    start = start_refs[0][rows] if packed else jnp.zeros_like(rows)
    block = pl.program_id(0) * width
    # Forced blocks are taken whatever their scores, so tiles that hold nothing else are skipped.
    last_row = jnp.minimum(first_row + tile_row + tile.queries, length) - 1
    last = (offset + last_row) // config.select_block - config.num_local
    needed = block < last + fold.planes
    if packed:
        needed &= block + width > jnp.min(start) // config.select_block + config.num_initial

    @pl.when(needed)
    def _():
        local, member = fold.locate(tile.keys)
        column = (block + local) * fold.per_block + member - fold.reach
        key_rows = jnp.clip(column, 0, num_cmp - 1)
        parts = pieces(k_ref.shape[-1])
        keys = [k_ref[key_rows, pl.ds(at, size)] for at, size in parts]

        def head(g, total):
            scores = None
            for key, (at, size) in zip(keys, parts, strict=True):
                part = dot(key, q_ref[rows, g, pl.ds(at, size)], (1, 1))  # [keys, queries]
                scores = part if scores is None else scores + part
            return total + _exp2(scores * scale - lse_ref[g, rows][None, :])

        total = lax.fori_loop(0, num_heads, head, jnp.zeros((tile.keys, tile.queries), jnp.float32))
        low, high = blocks.compressed_range(position, start, config)
        low, high = jnp.maximum(low, 0), jnp.minimum(high, num_cmp)
        visible = (column[:, None] >= low[None, :]) & (column[:, None] < high[None, :])
        total = jnp.where(visible, total, 0.0)
        for plane in range(fold.planes):
            folded = fold.add_groups(total * fold.member_weights(member, plane)[:, None])  # [width, queries]
            out_ref[plane, pl.ds(tile_row, tile.queries), pl.ds(block, width)] = folded.T


def scores(tile, where, query, key_cmp, lse2, start, *, rows, width, config, num_blocks):
    """Scores [B * K, planes, rows, width] of the queries from row where[1] on."""
    batch, length, num_heads, head_dim = query.shape
    num_cmp, num_kv = key_cmp.shape[1:3]
    group = num_heads // num_kv
    fold = Fold.of(config)
    packed = [] if start is None else [start]
    kernel = functools.partial(
        _scores_kernel,
        tile=tile,
        config=config,
        num_heads=group,
        num_cmp=num_cmp,
        length=length,
        scale=LOG2E * head_dim**-0.5,
        packed=bool(packed),
    )
    return triton_call(
        kernel,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        grid=(
            pl.cdiv(fold.num_scored(num_blocks, config), tile.keys // fold.padded),
            rows // tile.queries,
            batch * num_kv,
        ),
        in_specs=[
            pl.BlockSpec((2,), lambda j, t, b: (0,)),
            pl.BlockSpec((None, length, group, head_dim), lambda j, t, b: (b // num_kv, 0, b % num_kv, 0)),
            pl.BlockSpec((None, num_cmp, None, head_dim), lambda j, t, b: (b // num_kv, 0, b % num_kv, 0)),
            pl.BlockSpec((None, group, length), lambda j, t, b: (b // num_kv, b % num_kv, 0)),
            *(pl.BlockSpec((None, length), lambda j, t, b: (b // num_kv, 0)) for _ in packed),
        ],
        out_specs=pl.BlockSpec((None, fold.planes, rows, width), lambda j, t, b: (b, 0, 0, 0)),
        out_shape=jax.ShapeDtypeStruct((batch * num_kv, fold.planes, rows, width), jnp.float32),
        name="nsa_importance_scores",
    )(where, query, key_cmp, lse2, *packed)
