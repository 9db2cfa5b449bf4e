"""Backward of range attention for Hopper: consumer warpgroups compute, a producer loads through TMA.

The counterparts of the two Triton kernels in `triton_backward`, with the same arguments and results.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from nsa_jax.ops import tiles as tuning
from nsa_jax.ops.kernels.range_attention.tiles import (
    KnownRanges,
    for_batch,
    known_tile_ranges,
    query_tile_ranges,
    splits_for,
    warpgroup_ranges,
)
from nsa_jax.ops.kernels.softmax import LOG2E, NO_WEIGHT
from nsa_jax.ops.tiles import ROWS


def grad_query(
    query, key, value, grad_out, lse, delta, low, high, config: tuning.RangedHopperConfig,
    known: KnownRanges | None = None, onto: jax.Array | None = None,
):  # fmt: skip
    """dq [B, T, N, H].

    Args:
      query, key, value, low, high: as `triton_forward.ranged_forward` took them.
      grad_out: [B, T, N, V].
      lse: float32 [B, T, N], base 2, `NO_WEIGHT` where a query sees nothing.
      delta: float32 [B, T, N], the sums over V of out * grad_out.
      config: tiles.
      known: the ranges, if tracing knows them.
      onto: another gradient of the query; the result is the sum of both, rounded once.
    """
    from nsa_jax.ops.kernels.range_attention import sm90_visibility

    arrays = query, key, value, grad_out, lse, delta, low, high
    return _grad_query(*arrays, config, functools.partial(sm90_visibility.KeyRange, known=known), onto)


def block_masked_grad_query(
    query, key, value, grad_out, lse, delta, low, high, config: tuning.RangedHopperConfig, known, listed
):  # fmt: skip
    """`grad_query` of `sm90_forward.block_masked_forward`."""
    from nsa_jax.ops.kernels.range_attention import sm90_visibility

    arrays = query, key, value, grad_out, lse, delta, low, high
    visibility = functools.partial(sm90_visibility.BlockMask, known=known, listed=listed)
    return _grad_query(*arrays, config, visibility)


class _Tile(NamedTuple):
    """What the steps of one query tile share in a computing warpgroup."""

    begin: jax.Array  # its steps
    end: jax.Array
    before: jax.Array  # steps of the tiles before
    buffer: jax.Array  # of its rows
    at: jax.Array  # the warpgroup's part of that buffer
    lse: jax.Array  # of the warpgroup's rows
    delta: jax.Array


def _grad_query(
    query, key, value, grad_out, lse, delta, low, high, config: tuning.RangedHopperConfig, make_visibility,
    onto: jax.Array | None = None,
):  # fmt: skip
    """The kernel; `make_visibility` makes one of `sm90_visibility`'s classes from (rows, low, high, keys)."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from nsa_jax.ops.kernels import mosaic, sm90
    from nsa_jax.ops.kernels.range_attention import sm90_visibility

    keys, stages, warpgroups, query_buffers = config.keys, config.stages, config.warpgroups, config.query_buffers
    batch, length, heads, h_dim = query.shape
    num_keys, kv_heads, v_dim = value.shape[1:]
    rows = sm90.RowTiles(length, heads // kv_heads, kv_heads, warpgroups)
    row_low, row_high = rows.per_token(low, num_keys), rows.per_token(high, 0)
    visibility = make_visibility(rows, row_low, row_high, keys)
    query, grad_out = rows.arrange(query), rows.arrange(grad_out)
    lse, delta = rows.per_row(lse, NO_WEIGHT), rows.per_row(delta, 0.0)
    key, value = sm90.whole_tiles(key), sm90.whole_tiles(value)
    masks, num_words = visibility.mask_arrays(), visibility.num_words
    others = () if onto is None else (rows.arrange(onto),)
    scale = 1.0 / math.sqrt(h_dim)
    total = rows.tiles * kv_heads * batch
    per_program = config.tiles or tuning.ranged_hopper_tiles_per_program(total, config.most_tiles)
    shape = (ROWS, keys)

    def kernel(bounds_ref, low_ref, high_ref, lse_ref, delta_ref, query_ref, grad_ref, key_ref, value_ref, *refs):
        *mask_refs, dq_ref, buffers, vectors, words_smem2, loaded, freed, others_loaded = refs
        mask_refs, other_refs = mask_refs[: len(masks)], mask_refs[len(masks) :]
        query_smem2, grad_smem2, out_smem2, key_smem, value_smem = buffers
        low_smem2, high_smem2, lse_smem2, delta_smem2 = (ref.at[i] for ref in vectors for i in range(2))
        rows_loaded, key_loaded, value_loaded = loaded
        rows_freed, key_freed, value_freed = freed
        b, kv_head, wg = lax.axis_index("batch"), lax.axis_index("kv_head"), lax.axis_index("wg")
        # Late queries see most: they go first.
        last = rows.tiles - 1 - lax.axis_index("program") * per_program
        num_tiles = jnp.minimum(last + 1, per_program)

        def tile_range(n):
            tile = last - n
            return tile, *visibility.tile_range(bounds_ref, tile, b, kv_head)

        def multiply(tile, slot):
            """(scores, gradient of the weights) of the warpgroup's rows and a block's keys, neither scaled."""

            def multiply_both(scores_ref, d_weights_ref):
                plgpu.barrier_wait(key_loaded.at[slot])
                plgpu.wgmma(scores_ref, query_smem2.at[tile.at], sm90.transpose(key_smem.at[slot]))
                plgpu.barrier_wait(value_loaded.at[slot])
                plgpu.wgmma(d_weights_ref, grad_smem2.at[tile.at], sm90.transpose(value_smem.at[slot]))
                return scores_ref[...], d_weights_ref[...]

            products = pl.run_scoped(multiply_both, plgpu.ACC(shape, jnp.float32), plgpu.ACC(shape, jnp.float32))
            plgpu.barrier_arrive(value_freed.at[slot])
            return products

        def step(exact, tile, i, dq):
            """One key block: `exact` if every row sees all of it, or all of what its bits allow."""
            slot = lax.rem(tile.before + i - tile.begin, jnp.int32(stages))
            scores, d_weights = multiply(tile, slot)
            subtract = visibility.hidden_lse(tile.lse, words_smem2, tile.at, i)
            weights = jnp.exp2(scores * (scale * LOG2E) - lax.broadcast_in_dim(subtract, shape, [0]))
            if not exact:
                position = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA) + i * keys
                weights = sm90_visibility.hide(
                    weights, 0.0, position, low_smem2.at[tile.at], high_smem2.at[tile.at], axis=0
                )
            pl.when(i + 1 == tile.end)(lambda: plgpu.barrier_arrive(rows_freed.at[tile.buffer]))
            d_scores = weights * (d_weights - lax.broadcast_in_dim(tile.delta, shape, [0]))
            d_scores = d_scores.astype(query_ref.dtype)

            def accumulate(dq_acc):
                plgpu.wgmma(dq_acc, d_scores, key_smem.at[slot])

            dq = pl.run_state(accumulate)(plgpu.ACC.init(dq))
            plgpu.barrier_arrive(key_freed.at[slot])
            return dq

        def compute_tile(n, before, index, begin, exact_begin, exact_end, end):
            buffer = lax.rem(n, jnp.int32(query_buffers))
            at, base = buffer * warpgroups + wg, index * rows.tile + wg * ROWS
            out_smem = out_smem2.at[wg]
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the copies of the tile before
            for ref in other_refs:
                rows.load(ref, out_smem, others_loaded.at[wg], b, kv_head, base)
            plgpu.barrier_wait(rows_loaded.at[at])
            statistics = (sm90.load(x.at[at], sm90_visibility.ROW_LAYOUT) for x in (lse_smem2, delta_smem2))
            tile = _Tile(begin, end, before, buffer, at, *statistics)
            masked, whole = (functools.partial(step, exact, tile) for exact in (False, True))
            dq = sm90.zeros((ROWS, h_dim))
            dq = lax.fori_loop(begin, exact_begin, masked, dq)
            dq = lax.fori_loop(exact_begin, exact_end, whole, dq)
            dq = lax.fori_loop(exact_end, end, masked, dq)
            pl.when(end == begin)(lambda: plgpu.barrier_arrive(rows_freed.at[buffer]))
            dq *= scale
            if other_refs:
                plgpu.barrier_wait(others_loaded.at[wg])
                dq += sm90.load(out_smem, plgpu.Layout.WGMMA).astype(jnp.float32)
                plgpu.commit_smem()  # all have read
            out_smem[...] = dq.astype(dq_ref.dtype)
            plgpu.commit_smem()
            rows.store(out_smem, dq_ref, b, kv_head, base)

        def load_tile(n, before, tile, begin, exact_begin, exact_end, end):
            streams = (key_ref, key_smem, key_loaded, key_freed), (value_ref, value_smem, value_loaded, value_freed)
            rows.load_tile(
                n, tile, b, kv_head, rows_loaded, rows_freed,
                tiles=[(query_ref, query_smem2), (grad_ref, grad_smem2)],
                per_token=[(low_ref, low_smem2), (high_ref, high_smem2)],
                per_row=[(lse_ref, lse_smem2), (delta_ref, delta_smem2)],
                words=visibility.words(mask_refs, words_smem2),
            )  # fmt: skip
            sm90.load_blocks(begin, end, before, keys, streams, (b, kv_head))

        @pl.when(wg < warpgroups)
        def _consumer():
            plgpu.set_max_registers(sm90.registers(warpgroups)[0], action="increase")
            sm90.for_each_tile(num_tiles, tile_range, compute_tile)
            plgpu.wait_smem_to_gmem(0)

        @pl.when(wg == warpgroups)
        def _producer():
            plgpu.set_max_registers(sm90.registers(warpgroups)[1], action="decrease")
            sm90.for_each_tile(num_tiles, tile_range, load_tile)

    def nsa_ranged_dq(*refs):
        tiled = functools.partial(sm90.tiled, dtype=query.dtype)
        in_flight = query_buffers * warpgroups
        filled = plgpu.Barrier(num_barriers=stages)
        freed = plgpu.Barrier(num_barriers=stages, num_arrivals=warpgroups)
        rows_filled = plgpu.Barrier(num_barriers=in_flight, num_arrivals=rows.arrivals(2, 4 + num_words))
        pl.run_scoped(
            lambda *scoped: kernel(*refs, *scoped),
            (
                tiled(in_flight, ROWS, h_dim),
                tiled(in_flight, ROWS, v_dim),
                tiled(warpgroups, ROWS, h_dim),
                tiled(stages, keys, h_dim),
                tiled(stages, keys, v_dim),
            ),
            # Two vectors each: every buffer takes a multiple of 1 KiB, and there is none to spare.
            tuple(plgpu.SMEM((2, in_flight, ROWS), dtype) for dtype in (jnp.int32, jnp.float32)),
            plgpu.SMEM((in_flight, num_words, ROWS), jnp.int32) if num_words else None,
            (rows_filled, filled, filled),
            (plgpu.Barrier(num_barriers=query_buffers, num_arrivals=warpgroups), freed, freed),
            plgpu.Barrier(num_barriers=warpgroups, num_arrivals=rows.copies) if others else None,
            collective_axes="wg",
        )

    dq = mosaic.call(
        nsa_ranged_dq,
        (pl.cdiv(rows.tiles, per_program), kv_heads, batch),
        ("program", "kv_head", "batch"),
        jax.ShapeDtypeStruct(query.shape, query.dtype),
        *(visibility.bounds, row_low, row_high, lse, delta, query, grad_out, key, value, *masks, *others),
        warpgroups=warpgroups + 1,
    )
    return rows.restore(dq)


def grad_key_value(
    query, key, value, grad_out, lse, delta, low, high, config: tuning.RangedHopperKeysConfig,
    known: KnownRanges | None = None,
):  # fmt: skip
    """dk [B, S, K, H] and dv [B, S, K, V]; arguments as `grad_query`."""
    from nsa_jax.ops.kernels.range_attention import sm90_visibility

    arrays = query, key, value, grad_out, lse, delta, low, high
    return _grad_key_value(*arrays, config, sm90_visibility.KeyBlockRange(), known)


def block_masked_grad_key_value(
    query, key, value, grad_out, lse, delta, low, high, config: tuning.RangedHopperKeysConfig, known, listed
):  # fmt: skip
    """`grad_key_value` of `sm90_forward.block_masked_forward`, whose blocks have 64 keys."""
    from nsa_jax.ops.kernels.range_attention import sm90_visibility

    arrays = query, key, value, grad_out, lse, delta, low, high
    return _grad_key_value(*arrays, config, sm90_visibility.KeyBlockMask(config.warpgroups, listed), known)


def _grad_key_value(
    query, key, value, grad_out, lse, delta, low, high, config: tuning.RangedHopperKeysConfig, visibility,
    known: KnownRanges | None,
):  # fmt: skip
    """The kernel; `visibility` is one of `sm90_visibility`'s classes for blocks of keys."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from nsa_jax.ops.kernels import mosaic, sm90
    from nsa_jax.ops.kernels.range_attention import sm90_visibility

    stages, warpgroups = config.stages, config.warpgroups
    batch, length, heads, h_dim = query.shape
    num_keys, kv_heads, v_dim = value.shape[1:]
    group = heads // kv_heads
    rows = sm90.RowTiles(length, group, kv_heads, warpgroups=1)
    keys = warpgroups * ROWS  # 64 keys per warpgroup
    blocks = pl.cdiv(num_keys, keys)
    by_block: Any
    if known is None:
        by_block = query_tile_ranges(low, high, group, ROWS, ROWS, num_keys)
    else:
        by_block = known_tile_ranges(known, group, ROWS, ROWS)
    own_ranges, ranges = warpgroup_ranges(by_block, warpgroups)
    splits = config.splits or splits_for(key, value, length * group, keys=keys, rows=ROWS, ranges=ranges)
    own_ranges, ranges = for_batch(own_ranges, batch), for_batch(ranges, batch)
    row_low, row_high = rows.per_token(low, num_keys), rows.per_token(high, 0)
    query, grad_out = rows.arrange(query), rows.arrange(grad_out)
    lse, delta = rows.per_row(lse, NO_WEIGHT), rows.per_row(delta, 0.0)
    key, value = sm90.whole_tiles(key), sm90.whole_tiles(value)
    masks, num_words = visibility.mask_arrays(rows), visibility.num_words
    scale = 1.0 / math.sqrt(h_dim)
    column_layout, shape = plgpu.Layout.WGMMA.reduce(0), (ROWS, ROWS)

    def kernel(ranges_ref, own_ref, low_ref, high_ref, lse_ref, delta_ref, query_ref, grad_ref, *refs):
        key_ref, value_ref, *mask_refs, dk_ref, dv_ref, buffers, words_smem, loaded, freed = refs
        key_smem2, value_smem2, query_smem, grad_smem, vectors = buffers
        keys_loaded, query_loaded, grad_loaded = loaded
        query_freed, grad_freed = freed
        low_smem, high_smem, lse_smem, delta_smem = vectors
        b, kv_head, wg = lax.axis_index("batch"), lax.axis_index("kv_head"), lax.axis_index("wg")
        program = lax.axis_index("block")
        block, split = lax.div(program, jnp.int32(splits)), lax.rem(program, jnp.int32(splits))
        first, last = (ranges_ref[b, i, block] for i in range(2))
        per_split = lax.div(last - first + splits - 1, jnp.int32(splits))
        begin = jnp.minimum(first + split * per_split, last)
        end = jnp.minimum(begin + per_split, last)
        own_block = block * warpgroups + wg
        first_word = visibility.first_word(block * warpgroups)

        def prologue():
            """Loads the warpgroup's keys and values: where they lie, and their index in key and value."""
            key_smem, value_smem = key_smem2.at[wg], value_smem2.at[wg]
            base = block * keys + wg * ROWS
            index = (b, pl.ds(base, ROWS), kv_head)
            plgpu.copy_gmem_to_smem(key_ref.at[index], key_smem, keys_loaded.at[wg])
            plgpu.copy_gmem_to_smem(value_ref.at[index], value_smem, keys_loaded.at[wg])
            plgpu.barrier_wait(keys_loaded.at[wg])
            return key_smem, value_smem, base, index

        def own_tiles():
            """The tiles that see anything of the warpgroup's keys, and within them those that see all of them."""
            own_begin, whole_begin, whole_end, own_end = (own_ref[b, i, own_block] for i in range(4))
            own_begin = jnp.clip(own_begin, begin, end)
            own_end = jnp.clip(own_end, own_begin, end)
            whole_begin = jnp.clip(whole_begin, own_begin, own_end)
            whole_end = jnp.clip(whole_end, whole_begin, own_end)
            return own_begin, whole_begin, whole_end, own_end

        def skip(tile, _):
            """Frees a tile that only the keys of other warpgroups see, once it is there: its barriers count it too."""
            slot = lax.rem(tile - begin, jnp.int32(stages))
            for loaded, freed in ((query_loaded, query_freed), (grad_loaded, grad_freed)):
                plgpu.barrier_wait(loaded.at[slot])
                plgpu.barrier_arrive(freed.at[slot])

        def compute_weights(exact, slot, key_smem, base):
            """Weights [keys, rows] of a tile."""
            plgpu.barrier_wait(query_loaded.at[slot])

            def multiply(scores_ref):
                plgpu.wgmma(scores_ref, key_smem, sm90.transpose(query_smem.at[slot]))
                return scores_ref[...]

            scores = pl.run_scoped(multiply, plgpu.ACC(shape, jnp.float32))
            row_lse = sm90.load(lse_smem.at[slot], column_layout)
            row_lse = visibility.hidden_lse(row_lse, words_smem, slot, own_block, first_word, column_layout)
            weights = jnp.exp2(scores * (scale * LOG2E) - lax.broadcast_in_dim(row_lse, shape, [1]))
            if exact:
                return weights
            position = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=plgpu.Layout.WGMMA) + base
            return sm90_visibility.hide(weights, 0.0, position, low_smem.at[slot], high_smem.at[slot], axis=1)

        def step(exact, key_smem, value_smem, base, tile, carry):
            """One tile of rows: `exact` if they see all of the keys, or all of what their bits allow."""
            dk, dv = carry
            slot = lax.rem(tile - begin, jnp.int32(stages))
            weights = compute_weights(exact, slot, key_smem, base)
            half = weights.astype(query_ref.dtype)
            plgpu.barrier_wait(grad_loaded.at[slot])

            def multiply_grad(refs):
                dv_acc, d_weights_ref = refs
                plgpu.wgmma(dv_acc, half, grad_smem.at[slot])
                plgpu.wgmma(d_weights_ref, value_smem, sm90.transpose(grad_smem.at[slot]))

            accs = plgpu.ACC.init(dv), plgpu.ACC.init(sm90.zeros(shape))
            dv, d_weights = pl.run_state(multiply_grad)(accs)
            row_delta = lax.broadcast_in_dim(sm90.load(delta_smem.at[slot], column_layout), shape, [1])
            plgpu.barrier_arrive(grad_freed.at[slot])
            d_scores = (weights * (d_weights - row_delta)).astype(query_ref.dtype)

            def accumulate(dk_acc):
                plgpu.wgmma(dk_acc, d_scores, query_smem.at[slot])

            dk = pl.run_state(accumulate)(plgpu.ACC.init(dk))
            plgpu.barrier_arrive(query_freed.at[slot])
            return dk, dv

        def load(tile, _):
            count = tile - begin
            slot = lax.rem(count, jnp.int32(stages))
            base = tile * ROWS
            pl.when(count >= stages)(lambda: plgpu.barrier_wait(query_freed.at[slot]))
            barrier = query_loaded.at[slot]
            rows.load(query_ref, query_smem.at[slot], barrier, b, kv_head, base)
            plgpu.copy_gmem_to_smem(lse_ref.at[b, kv_head, pl.ds(base, ROWS)], lse_smem.at[slot], barrier)
            plgpu.copy_gmem_to_smem(low_ref.at[b, pl.ds(base, ROWS)], low_smem.at[slot], barrier)
            plgpu.copy_gmem_to_smem(high_ref.at[b, pl.ds(base, ROWS)], high_smem.at[slot], barrier)
            visibility.load(mask_refs, words_smem, slot, barrier, b, kv_head, first_word, base)
            pl.when(count >= stages)(lambda: plgpu.barrier_wait(grad_freed.at[slot]))
            barrier = grad_loaded.at[slot]
            rows.load(grad_ref, grad_smem.at[slot], barrier, b, kv_head, base)
            plgpu.copy_gmem_to_smem(delta_ref.at[b, kv_head, pl.ds(base, ROWS)], delta_smem.at[slot], barrier)

        @pl.when(wg < warpgroups)
        def _consumer():
            plgpu.set_max_registers(sm90.registers(warpgroups)[0], action="increase")
            key_smem, value_smem, base, index = prologue()
            own_begin, whole_begin, whole_end, own_end = own_tiles()
            masked, whole = (functools.partial(step, exact, key_smem, value_smem, base) for exact in (False, True))
            carry = (sm90.zeros((ROWS, h_dim)), sm90.zeros((ROWS, v_dim)))
            lax.fori_loop(begin, own_begin, skip, None)
            carry = lax.fori_loop(own_begin, whole_begin, masked, carry)
            carry = lax.fori_loop(whole_begin, whole_end, whole, carry)
            dk, dv = lax.fori_loop(whole_end, own_end, masked, carry)
            lax.fori_loop(own_end, end, skip, None)
            key_smem[...] = (dk * scale).astype(dk_ref.dtype)
            value_smem[...] = dv.astype(dv_ref.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(key_smem, dk_ref.at[(split, *index)])
            plgpu.copy_smem_to_gmem(value_smem, dv_ref.at[(split, *index)])
            plgpu.wait_smem_to_gmem(0)

        @pl.when(wg == warpgroups)
        def _producer():
            plgpu.set_max_registers(sm90.registers(warpgroups)[1], action="decrease")
            lax.fori_loop(begin, end, load, None)

    def nsa_ranged_dkv(*refs):
        tiled = functools.partial(sm90.tiled, dtype=query.dtype)
        vector = lambda dtype: plgpu.SMEM((stages, ROWS), dtype)  # noqa: E731
        barriers = lambda arrivals: plgpu.Barrier(num_barriers=stages, num_arrivals=arrivals)  # noqa: E731
        pl.run_scoped(
            lambda *scoped: kernel(*refs, *scoped),
            (
                tiled(warpgroups, ROWS, h_dim),
                tiled(warpgroups, ROWS, v_dim),
                tiled(stages, ROWS, h_dim),
                tiled(stages, ROWS, v_dim),
                (vector(jnp.int32), vector(jnp.int32), vector(jnp.float32), vector(jnp.float32)),
            ),
            plgpu.SMEM((stages, num_words, ROWS), jnp.int32) if num_words else None,
            (
                plgpu.Barrier(num_barriers=warpgroups, num_arrivals=2),
                barriers(rows.copies + 3 + num_words),
                barriers(rows.copies + 1),
            ),
            (barriers(warpgroups), barriers(warpgroups)),
            collective_axes="wg",
        )

    dk, dv = mosaic.call(
        nsa_ranged_dkv,
        (blocks * splits, kv_heads, batch),
        ("block", "kv_head", "batch"),
        [jax.ShapeDtypeStruct((splits, *x.shape), x.dtype) for x in (key, value)],
        *(ranges, own_ranges, row_low, row_high, lse, delta, query, grad_out, key, value, *masks),
        warpgroups=warpgroups + 1,
    )

    def total(x):
        x = x[:, :, :num_keys]
        return x[0] if splits == 1 else x.astype(jnp.float32).sum(0).astype(x.dtype)

    return total(dk), total(dv)
