"""Block selection on GPUs: importance of selection blocks from the log-sum-exp, then the top n (paper eq. 8 to 12).

The scores are a [T, J] buffer, so query ranges are processed one after the other within a bounded buffer.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from nsa_jax.ops import blocks
from nsa_jax.ops.blocks import NSAConfig
from nsa_jax.ops.choices import SelectionPlan
from nsa_jax.ops.kernels.selection import scores_sm90, scores_triton
from nsa_jax.ops.kernels.selection.fold import Fold
from nsa_jax.ops.kernels.selection.top_n import block_lists, row_widths
from nsa_jax.ops.kernels.softmax import LOG2E, in_rows


def select_blocks(
    query, key_cmp, lse, *, config: NSAConfig, num_keys: int, segment_start, query_offset, plan: SelectionPlan
):
    """See `nsa_jax.select_blocks`; `num_keys` is S."""
    batch, length, _, head_dim = query.shape
    num_kv = key_cmp.shape[2]
    num_blocks = blocks.num_selection_blocks(num_keys, config.select_block)
    fold = Fold.of(config)
    hopper = plan.scores is not None and plan.scores.kernel == "selection.scores_sm90"
    tile = plan.tiles
    per_tile = scores_sm90.blocks_per_tile(fold, head_dim) if hopper else tile.keys // fold.padded
    tile_queries = scores_sm90.QUERIES if hopper else tile.queries
    # The top-n kernel reads one block past a row's width from the second plane; TMA writes tiles of 32 columns.
    width = row_widths(num_blocks, config.num_selected)[-1] + (32 if hopper else 8)
    width = max(pl.cdiv(num_blocks, per_tile) * per_tile, width)

    # Rows of one buffer: a multiple of both kernels' tiles (the scores tile is at least as tall).
    most = max(tile.chunk_bytes // (batch * num_kv * fold.planes * width * 4) // tile_queries, 1)
    needed = pl.cdiv(length, tile_queries)
    chunks = pl.cdiv(needed, most)
    rows = pl.cdiv(needed, chunks) * tile_queries

    start = None if segment_start is None else segment_start.astype(jnp.int32)
    lse2 = in_rows(lambda lse: jnp.where(lse == -jnp.inf, jnp.inf, lse.astype(jnp.float32) * LOG2E), lse)
    lse2 = lse2.swapaxes(1, 2)  # [B, N, T]
    call = dict(config=config, num_blocks=num_blocks)
    if hopper:
        call_scores = scores_sm90.prepare(
            query, key_cmp, lse2, start, query_offset, fold, rows=rows, width=width, **call
        )
    elif plan.scores is not None:

        def call_scores(where):
            return scores_triton.scores(tile, where, query, key_cmp, lse2, start, rows=rows, width=width, **call)
    else:

        def call_scores(where):
            return jnp.zeros((batch * num_kv, fold.planes, rows, width), jnp.float32)

    def chunk(index):
        where = jnp.stack([jnp.asarray(query_offset, jnp.int32), index * rows])
        return block_lists(where, call_scores(where), start, batch=batch, num_kv=num_kv, length=length, **call)

    if chunks == 1:
        return chunk(jnp.int32(0))[:, :length]
    lists = lax.map(chunk, jnp.arange(chunks, dtype=jnp.int32))  # [chunks, B, rows, K, n]
    lists = jnp.moveaxis(lists, 0, 1).reshape(batch, chunks * rows, num_kv, config.num_selected)
    return lists[:, :length]
