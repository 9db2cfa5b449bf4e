"""Importance scores for Hopper: consumer warpgroups compute, a producer loads queries through TMA.

A program keeps compressed keys in shared memory, 128 for each consumer, and streams the queries of its tiles past them,
one head after the other. Two consumers alternate: one multiplies while the other takes exponentials, which takes about
as long. Narrow heads leave registers for a third consumer, and three need no schedule.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from nsa_jax.ops import blocks
from nsa_jax.ops import tiles as tuning
from nsa_jax.ops.blocks import NSAConfig
from nsa_jax.ops.kernels.range_attention.tiles import for_batch
from nsa_jax.ops.kernels.softmax import LOG2E
from nsa_jax.ops.tiles import SCORE_KEYS

# Query tokens of one tile (the rows of a warpgroup's matrix product) and compressed keys of one warpgroup.
QUERIES, _KEYS = 64, SCORE_KEYS


def _warpgroups(h_dim: int) -> int:
    return 3 if h_dim <= 64 else 2


def blocks_per_tile(fold, h_dim: int) -> int:
    """Selection blocks of one program's keys."""
    return _warpgroups(h_dim) * _KEYS // fold.padded


def arrange_keys(key_cmp, fold, num_scored: int) -> jax.Array:
    """[B, C, K, H] -> [B, tiles * keys of a program, K, H]: a warpgroup's 128 keys ordered by (group member, block).

    A group's members are then the same column of equally wide slices, which are added without leaving a thread.
    """
    width, h_dim = _KEYS // fold.padded, key_cmp.shape[-1]
    num_tiles = pl.cdiv(num_scored, blocks_per_tile(fold, h_dim))
    row = jnp.arange(num_tiles * _warpgroups(h_dim) * _KEYS, dtype=jnp.int32)
    block = row // _KEYS * width + row % width
    return key_cmp[:, jnp.clip(_column(row, block, fold), 0, key_cmp.shape[1] - 1)]


def _column(row, block, fold):
    """Compressed block that row `row` of the arranged keys holds, from its selection block."""
    member = row % _KEYS // (_KEYS // fold.padded)
    return block * fold.per_block + member - fold.reach


def prepare(query, key_cmp, lse2, start, query_offset, fold, *, rows, width, config, num_blocks):
    """A function from where [2] to scores [B * K, planes, rows, width], with what all query ranges share prepared."""
    batch, length, *_ = query.shape
    num_scored = fold.num_scored(num_blocks, config)
    keys = arrange_keys(key_cmp, fold, num_scored)
    if length % 8:  # TMA copies swizzled tiles of 8 rows
        query = jnp.pad(query, ((0, 0), (0, -length % 8), (0, 0), (0, 0)))
    pad = ((0, 0), (0, -length % QUERIES))
    lse2 = jnp.pad(lse2, ((0, 0), *pad), constant_values=jnp.inf)

    def ranges(xp, position, start):
        low, high = blocks.compressed_range(position, xp.zeros_like(position) if start is None else start, config)
        return tuple(xp.pad(xp.clip(x, 0, key_cmp.shape[1]), pad) for x in (low, high))

    position = jnp.arange(length, dtype=jnp.int32)[None] + query_offset
    low, high = of_rows = ranges(jnp, jnp.broadcast_to(position, (batch, length)), start)
    if start is None and isinstance(query_offset, int):  # what tiles see is then a constant of the program
        of_rows = ranges(np, np.arange(length, dtype=np.int32)[None] + query_offset, None)
    seen = tuple(for_batch(x, batch) for x in _seen_by_all(*of_rows))
    first = None
    if start is not None:
        first = jnp.pad(start, pad, mode="edge").reshape(batch, -1, QUERIES).min(-1)
        first = first // config.select_block + config.num_initial
    shapes = dict(fold=fold, config=config, rows=rows, width=width, num_scored=num_scored)
    return lambda where: scores(query, keys, lse2, low, high, seen, where, first, **shapes)


def _seen_by_all(low, high):
    """What all queries of a tile see, [B, tiles] each, from [B, T rounded up]."""
    return low.reshape(len(low), -1, QUERIES).max(-1), high.reshape(len(high), -1, QUERIES).min(-1)


def scores(
    query, keys, lse2, low, high, seen, where, first, *, fold, config: NSAConfig, rows: int, width: int, num_scored: int
):
    """Scores [B * K, planes, rows, width] of the queries from row where[1] on.

    Args:
      query: [B, T, N, H] bfloat16.
      keys: `arrange_keys`' result.
      lse2: [B, N, T rounded up to 64] float32 base-2 log-sum-exp, +inf for rows that see nothing.
      low, high: int32 [B, T rounded up to 64]: the compressed blocks each query sees are [low, high).
      seen: `_seen_by_all` of these.
      where: int32 [2], the position of query 0 and the first query of this buffer.
      first: int32 [B, T / 64 rounded up], the first selection block whose score a tile of queries needs; None if all
        rows are one document.
      fold: the geometry's constants.
      config: block geometry.
      rows: queries of the buffer, a multiple of 64.
      width: columns of the buffer, a multiple of `blocks_per_tile`.
      num_scored: how many selection blocks, from 0 on, can need a column of the buffer.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from nsa_jax.ops.kernels import sm90

    batch, length, num_heads, head_dim = query.shape
    num_kv = keys.shape[2]
    group = num_heads // num_kv
    tile_blocks, warpgroups = blocks_per_tile(fold, head_dim), _warpgroups(head_dim)
    key_tiles = pl.cdiv(num_scored, tile_blocks)
    query_tiles = rows // QUERIES
    all_tiles = lse2.shape[2] // QUERIES
    tile = tuning.select_hopper_config(query_tiles * key_tiles * batch * num_kv, head_dim)
    stages, per_program = tile.stages, tile.query_tiles
    programs = pl.cdiv(query_tiles, per_program)
    slice_width = _KEYS // fold.padded
    row_layout = plgpu.Layout.WGMMA.reduce(1)
    scale = LOG2E / math.sqrt(head_dim)
    seen_from, seen_to = seen

    def kernel(where_ref, query_ref, key_ref, lse_ref, low_ref, high_ref, *refs, buffers, barriers):
        seen_from_ref, seen_to_ref, *first_ref, out_ref = refs
        query_smem, key_smem, lse_smem, out_smem = buffers
        key_loaded, query_loaded, query_freed, schedule_barrier = barriers
        program = lax.axis_index("program")
        key_tile = lax.rem(program, jnp.int32(key_tiles))
        begin = lax.rem(lax.div(program, jnp.int32(key_tiles)), jnp.int32(programs)) * per_program
        pair = lax.div(program, jnp.int32(key_tiles * programs))
        batch_index, kv_head = lax.div(pair, jnp.int32(num_kv)), lax.rem(pair, jnp.int32(num_kv))
        wg = lax.axis_index("wg")
        block = key_tile * tile_blocks
        offset, first_row = where_ref[0], where_ref[1]
        tile_of_buffer = lax.div(first_row, jnp.int32(QUERIES))
        end = jnp.minimum(begin + per_program, jnp.minimum(query_tiles, all_tiles - tile_of_buffer))

        def first_tile(block):
            """The query tile of the buffer with the first position that needs a score of this block."""
            position = (block + (config.num_local + 1 - fold.planes)) * config.select_block
            return lax.div(jnp.maximum(position - offset - first_row, 0), jnp.int32(QUERIES))

        begin = jnp.maximum(begin, first_tile(block))

        def heads(tile):
            """How many heads to walk for a query tile: none if all of its documents start after these blocks."""
            if first is None:
                return jnp.int32(group)
            tile_first = first_ref[0][batch_index, tile_of_buffer + tile]
            return jnp.where(block + tile_blocks > tile_first, jnp.int32(group), jnp.int32(0))

        def schedule_switch():
            """Two consumers alternate: while one multiplies, the other takes exponentials."""
            if warpgroups == 2:
                plgpu.barrier_arrive(schedule_barrier)
                plgpu.barrier_wait(schedule_barrier)

        def add_head(slots, g, total):
            """Adds one head's probabilities, before any mask."""
            slot, following = slots(g)

            def multiply(acc_ref):
                plgpu.wgmma(acc_ref, query_smem.at[slot], sm90.transpose(key_smem.at[wg]))
                schedule_switch()  # the other warpgroup may multiply
                return acc_ref[...]

            products = pl.run_scoped(multiply, plgpu.ACC((QUERIES, _KEYS), jnp.float32))
            row_lse = sm90.load(lse_smem.at[slot], row_layout, optimized=False)
            plgpu.barrier_arrive(query_freed.at[slot])
            total += jnp.exp2(products * scale - lax.broadcast_in_dim(row_lse, products.shape, [0]))
            total = lax.optimization_barrier(total)
            # A wait is a loop, across which the assembler does not move exponentials. With the arrival right behind
            # them it did, and both warpgroups did the same thing at the same time.
            plgpu.barrier_wait(query_loaded.at[following])
            schedule_switch()  # the other warpgroup may take exponentials
            return total

        def mask(tile, key, total):
            """Sums of probabilities with 0 where a query does not see the compressed block."""
            rows_index = (batch_index, pl.ds(first_row + tile * QUERIES, QUERIES))
            row_low = sm90.load(low_ref.at[rows_index], row_layout, optimized=False)
            row_high = sm90.load(high_ref.at[rows_index], row_layout, optimized=False)
            column = plgpu.broadcasted_iota(jnp.int32, total.shape, 1, layout=plgpu.Layout.WGMMA)
            position = key + lax.rem(column, jnp.int32(slice_width)) * fold.per_block
            position += lax.div(column, jnp.int32(slice_width))
            visible = position >= lax.broadcast_in_dim(row_low, total.shape, [0])
            visible &= position < lax.broadcast_in_dim(row_high, total.shape, [0])
            return jnp.where(visible, total, 0.0)

        def epilogue(tile, own_block, total):
            """Folds compressed blocks into selection blocks and stores their scores."""
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the copies of the tile before
            for plane in range(fold.planes):
                folded = None
                for member in range(fold.per_block):
                    weight = fold.weights[member + plane * fold.per_block :][:1]
                    if weight:
                        part = total[:, member * slice_width : (member + 1) * slice_width] * float(weight[0])
                        folded = part if folded is None else folded + part
                out_smem[wg, plane] = folded
            plgpu.commit_smem()
            for plane in range(fold.planes):
                place = out_ref.at[pair, plane, pl.ds(tile * QUERIES, QUERIES), pl.ds(own_block, slice_width)]
                plgpu.copy_smem_to_gmem(out_smem.at[wg, plane], place)

        def compute_tile(own_block, own_begin, tile, done):
            """One tile of queries; `done` counts the heads of earlier tiles."""
            count = heads(tile)
            key = own_block * fold.per_block - fold.reach
            at = batch_index, tile_of_buffer + tile
            whole = (key >= seen_from_ref[at]) & (key + slice_width * fold.per_block <= seen_to_ref[at])

            def slots(g):
                return (lax.rem(done + g + i, jnp.int32(stages)) for i in range(2))

            def skip(g, _):
                slot, following = slots(g)
                plgpu.barrier_arrive(query_freed.at[slot])
                plgpu.barrier_wait(query_loaded.at[following])

            def compute():
                total = sm90.zeros((QUERIES, _KEYS))
                total = lax.fori_loop(0, count, functools.partial(add_head, slots), total)
                total = lax.cond(whole, lambda total: total, functools.partial(mask, tile, key), total)
                epilogue(tile, own_block, total)

            own = (count > 0) & (tile >= own_begin)
            pl.when(own)(compute)
            pl.when(~own)(lambda: lax.fori_loop(0, count, skip, None))
            return done + count

        def load_queries(step, tile, g):
            slot = lax.rem(step, jnp.int32(stages))
            at = pl.ds(first_row + tile * QUERIES, QUERIES)
            index = kv_head * group + g
            pl.when(step >= stages)(lambda: plgpu.barrier_wait(query_freed.at[slot]))
            plgpu.copy_gmem_to_smem(query_ref.at[batch_index, at, index], query_smem.at[slot], query_loaded.at[slot])
            plgpu.copy_gmem_to_smem(lse_ref.at[batch_index, index, at], lse_smem.at[slot], query_loaded.at[slot])

        def load_tile(tile, done):
            count = heads(tile)
            lax.fori_loop(0, count, lambda g, _: load_queries(done + g, tile, g), None)
            return done + count

        @pl.when((wg < warpgroups) & (begin < end))
        def _consumer():
            plgpu.set_max_registers(sm90.registers(warpgroups)[0], action="increase")
            own_block = block + wg * slice_width
            own_begin = begin if warpgroups == 2 else first_tile(own_block)
            plgpu.barrier_wait(key_loaded)
            plgpu.barrier_wait(query_loaded.at[0])
            pl.when(wg == 1)(schedule_switch)
            lax.fori_loop(begin, end, functools.partial(compute_tile, own_block, own_begin), jnp.int32(0))
            pl.when(wg == 0)(schedule_switch)
            plgpu.wait_smem_to_gmem(0)

        @pl.when((wg == warpgroups) & (begin < end))
        def _producer():
            plgpu.set_max_registers(sm90.registers(warpgroups)[1], action="decrease")
            for part in range(warpgroups):
                at = pl.ds((key_tile * warpgroups + part) * _KEYS, _KEYS)
                plgpu.copy_gmem_to_smem(key_ref.at[batch_index, at, kv_head], key_smem.at[part], key_loaded)
            # One more than there is work for, because each step ends by waiting for the next.
            load_queries(lax.fori_loop(begin, end, load_tile, jnp.int32(0)), begin, 0)

    def nsa_importance_scores(*refs):
        tiled = functools.partial(sm90.tiled, dtype=query.dtype)
        arrivals = functools.partial(plgpu.Barrier, num_barriers=stages)
        pl.run_scoped(
            lambda buffers, barriers: kernel(*refs, buffers=buffers, barriers=barriers),
            (
                tiled(stages, QUERIES, head_dim),
                tiled(warpgroups, _KEYS, head_dim),
                plgpu.SMEM((stages, QUERIES), jnp.float32),
                sm90.tiled(warpgroups, fold.planes, QUERIES, slice_width, dtype=jnp.float32),
            ),
            (
                plgpu.Barrier(num_arrivals=warpgroups),
                arrivals(num_arrivals=2),
                arrivals(num_arrivals=warpgroups),
                plgpu.Barrier(num_arrivals=warpgroups),
            ),
            collective_axes="wg",
        )

    return plgpu.kernel(
        nsa_importance_scores,
        out_type=jax.ShapeDtypeStruct((batch * num_kv, fold.planes, rows, width), jnp.float32),
        grid=(key_tiles * programs * batch * num_kv,),
        grid_names=("program",),
        num_threads=warpgroups + 1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
    )(where, query, keys, lse2, low, high, seen_from, seen_to, *(() if first is None else (first,)))
