"""The query's gradient of range attention for Hopper: consumer warpgroups compute, a producer loads through TMA."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from nsa_jax.ops import tiles as tuning
from nsa_jax.ops.kernels.range_attention.tiles import KnownRanges, Window, row_vectors
from nsa_jax.ops.kernels.softmax import LOG2E, NO_WEIGHT
from nsa_jax.ops.tiles import ROWS


def grad_query(
    query, key, value, grad_out, lse, delta, low, high, config: tuning.RangedHopperQueryConfig,
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
    return _grad_query(*arrays, config, functools.partial(sm90_visibility.KeyRange, known=known), known, onto)


def block_masked_grad_query(
    query, key, value, grad_out, lse, delta, low, high, config: tuning.RangedHopperQueryConfig, known, listed,
    window: Window | None = None,
):  # fmt: skip
    """`grad_query` of `sm90_forward.block_masked_forward`; with a window, of the sum of both attentions."""
    from nsa_jax.ops.kernels.range_attention import sm90_visibility

    visibility: Callable = functools.partial(sm90_visibility.BlockMask, known=known, listed=listed)
    if window is not None:
        visibility = functools.partial(sm90_visibility.BlockMaskAndWindow, known=known, listed=listed, window=window)
    arrays = query, key, value, grad_out, lse, delta, low, high
    return _grad_query(*arrays, config, visibility, known, window=window)


class _Tile(NamedTuple):
    """What the steps of one query tile share in a computing warpgroup."""

    begin: jax.Array  # its steps
    end: jax.Array
    before: jax.Array  # steps of the tiles before
    at: jax.Array  # the warpgroup's rows among all buffers
    statistics: tuple  # (lse, delta) of the warpgroup's rows, then those of the window and of both
    grad_out: Any  # of the warpgroup's rows, in registers or in shared memory


def _grad_query(
    query, key, value, grad_out, lse, delta, low, high, config: tuning.RangedHopperQueryConfig, make_visibility,
    known: KnownRanges | None, onto: jax.Array | None = None, window: Window | None = None,
):  # fmt: skip
    """The kernel; `make_visibility` makes one of `sm90_visibility`'s classes from (rows, low, high, keys)."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from nsa_jax.ops.kernels import mosaic, sm90, sm90_columns, sm90_products, sm90_rows
    from nsa_jax.ops.kernels.range_attention import sm90_visibility

    keys, stages, warpgroups, query_buffers = config.keys, config.stages, config.warpgroups, config.query_buffers
    batch, length, heads, h_dim = query.shape
    num_keys, kv_heads, v_dim = value.shape[1:]
    rows = sm90_rows.RowTiles(length, heads // kv_heads, kv_heads, warpgroups, max(h_dim, v_dim))
    bounds, statistics = row_vectors(rows, low, high, (lse, delta), window, num_keys, known)
    visibility = make_visibility(rows, *bounds[:2], keys)
    query, grad_out = rows.arrange(query), rows.arrange(grad_out)
    key, value = sm90.whole_tiles(key), sm90.whole_tiles(value)
    most_attentions = max(attentions for _, attentions in visibility.phases)
    tensors, masks, num_words = (query, grad_out, key, value), visibility.mask_arrays(), visibility.num_words
    others = () if onto is None else (rows.arrange(onto),)
    scale = 1.0 / math.sqrt(h_dim)
    total = rows.tiles * kv_heads * batch
    per_program = config.tiles or tuning.ranged_hopper_tiles_per_program(total, config.most_tiles)
    shape = (ROWS, keys)

    def kernel(bounds_ref, row_bounds_ref, *refs):
        *arrays, dq_ref, buffers, vectors, words_smem2, loaded, freed, others_loaded = refs
        statistic_refs, tensor_refs, mask_refs, other_refs = sm90.divided(arrays, statistics, tensors, masks, others)
        query_ref, grad_ref, key_ref, value_ref = tensor_refs
        (query_smem2, query_boxes), (grad_smem2, grad_boxes), (out_smem2, out_boxes) = map(rows.views, buffers[:3])
        key_smem, value_smem = buffers[3:]
        bounds_smem3 = [vectors[0].at[i] for i in range(len(bounds))]
        statistics_smem3 = [vectors[1].at[i] for i in range(len(statistics))]
        rows_loaded, key_loaded, value_loaded = loaded
        rows_freed, key_freed, value_freed = freed
        b, kv_head, wg = lax.axis_index("batch"), lax.axis_index("kv_head"), lax.axis_index("wg")
        # Late queries see most: they go first.
        last = rows.tiles - 1 - lax.axis_index("program") * per_program
        num_tiles = jnp.minimum(last + 1, per_program)

        def tile_range(n):
            tile = last - n
            return tile, *visibility.tile_range(bounds_ref, tile, b, kv_head)

        def statistic(which, exact, attentions, tile, i):
            """What is subtracted of a block: 0 is the log-sum-exp, 1 delta. In the window, those of both attentions."""
            first, *others = tile.statistics[which::2]
            seen = functools.partial(visibility.where_seen, words_smem=words_smem2, at=tile.at, i=i)
            far = lax.broadcast_in_dim(first if which else seen(first, NO_WEIGHT), shape, [0])
            if attentions == 1:
                return far
            window, both = others
            near = lax.broadcast_in_dim(seen(both, window), shape, [0])
            low = sm90.load(bounds_smem3[-1].at[tile.at], sm90_visibility.ROW_LAYOUT)
            if exact:
                return near
            inside = sm90_columns.own_columns(low, None, i * keys, keys)
            return sm90_columns.where_columns(inside, near, far)

        def weights_of(exact, attentions, tile, i, scores):
            """Weights of a block, summed over the attentions."""
            weights = jnp.exp2(scores * (scale * LOG2E) - statistic(0, exact, attentions, tile, i))
            if exact:
                return weights
            low, high = bounds_smem3[0].at[tile.at], bounds_smem3[1].at[tile.at]
            return sm90_visibility.hide(weights, 0.0, i * keys, low, high)

        def slot_of(tile, i):
            return lax.rem(tile.before + i - tile.begin, jnp.int32(stages))

        def gradient(exact, attentions, tile, i):
            """Gradient of a key block's scores, not scaled, summed over the attentions.

            `exact` if every row sees all of it, or all of what its bits allow.
            """
            slot = slot_of(tile, i)

            plgpu.barrier_wait(key_loaded.at[slot])

            def multiply_scores(acc_ref):
                plgpu.wgmma(acc_ref, query_smem2.at[tile.at], sm90.transpose(key_smem.at[slot]))
                plgpu.barrier_wait(value_loaded.at[slot])

            def multiply_gradients(acc_ref):
                plgpu.wgmma(acc_ref, tile.grad_out, sm90.transpose(value_smem.at[slot]))

            def weights_now(scores):
                return weights_of(exact, attentions, tile, i, scores)

            weights, d_weights = sm90_products.two_products(keys, multiply_scores, multiply_gradients, weights_now)
            d_scores = weights * (d_weights - statistic(1, exact, attentions, tile, i))
            plgpu.barrier_arrive(value_freed.at[slot])
            return d_scores.astype(query_ref.dtype)

        def accumulate(tile, i, dq, half):
            """dq with the product of a block's gradient and keys added, which are freed."""
            slot = slot_of(tile, i)

            def multiply(dq_acc):
                plgpu.wgmma(dq_acc, half, key_smem.at[slot])

            dq = pl.run_state(multiply)(plgpu.ACC.init(dq))
            plgpu.barrier_arrive(key_freed.at[slot])
            return dq

        def overlapping_step(tile, exact, attentions, i, carry):
            """`gradient` of a block, and what `accumulate` does for the block before.

            The three products are issued together. The last goes on while this block's exponentials are taken.
            """
            dq, half = carry
            slot, before = slot_of(tile, i), slot_of(tile, i - 1)
            plgpu.barrier_wait(key_loaded.at[slot])

            def multiply_scores(scores_ref):
                plgpu.wgmma(scores_ref, query_smem2.at[tile.at], sm90.transpose(key_smem.at[slot]))
                plgpu.barrier_wait(value_loaded.at[slot])

            def multiply_others(scores_ref, d_weights_ref, dq_acc, half_ref, d_scores_ref):
                plgpu.wgmma(d_weights_ref, tile.grad_out, sm90.transpose(value_smem.at[slot]))
                plgpu.wgmma(dq_acc, half_ref[...], key_smem.at[before])
                scores = plgpu.wgmma_accumulator_load(scores_ref, wait_n=2)
                weights = weights_of(exact, attentions, tile, i, scores)
                weights = sm90.before_wait(weights, bounds_smem3[1][tile.at, 0] < 0)
                d_weights = plgpu.wgmma_accumulator_load(d_weights_ref, wait_n=1)
                d_scores_ref[...] = weights * (d_weights - statistic(1, exact, attentions, tile, i))
                plgpu.barrier_arrive(value_freed.at[slot])

            states = plgpu.ACC.init(dq), half, sm90.zeros(shape)
            dq, _, d_scores = sm90_products.issue(keys, multiply_scores, multiply_others, states)
            plgpu.barrier_arrive(key_freed.at[before])
            # Not before: the product of the block before takes its gradients from the same registers.
            return dq, d_scores.astype(query_ref.dtype)

        def over_blocks(limits, step, carry):
            """The loops of all phases: `step(exact, attentions, block, carry)`."""
            for phase, first, last in zip(visibility.phases, limits[:-1], limits[1:], strict=True):
                carry = lax.fori_loop(first, last, functools.partial(step, *phase), carry)
            return carry

        def each_alone(tile, limits):
            """dq of the warpgroup's rows, not scaled."""

            def step(exact, attentions, i, dq):
                return accumulate(tile, i, dq, gradient(exact, attentions, tile, i))

            return over_blocks(limits, step, no_gradient())

        def overlapping(tile, limits):
            """`each_alone` where the rows see some keys, with the product of each block during the next one's
            exponentials."""
            carry = no_gradient(), gradient(False, most_attentions, tile, tile.begin)
            rest = [jnp.maximum(x, tile.begin + 1) for x in limits]
            return accumulate(tile, tile.end - 1, *over_blocks(rest, functools.partial(overlapping_step, tile), carry))

        def no_gradient():
            return sm90.zeros((ROWS, h_dim))

        def compute_tile(n, before, index, *limits):
            begin, end = limits[0], limits[-1]
            buffer = lax.rem(n, jnp.int32(query_buffers))
            at, base = buffer * warpgroups + wg, index * rows.tile + wg * ROWS
            out_smem, out_box = out_smem2.at[wg], out_boxes.at[wg]
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the copies of the tile before
            for ref in other_refs:
                rows.load(ref, out_box, others_loaded.at[wg], b, kv_head, base)
            plgpu.barrier_wait(rows_loaded.at[at])
            own = tuple(sm90.load(x.at[at], sm90_visibility.ROW_LAYOUT) for x in statistics_smem3)
            grad_out = grad_smem2.at[at]
            if config.overlap:
                # Two products of 64 keys with both operands in shared memory take all of its bandwidth.
                grad_out = sm90.load(grad_out, plgpu.Layout.WGMMA)
            tile = _Tile(begin, end, before, at, own, grad_out)
            if config.overlap:
                dq = lax.cond(end > begin, functools.partial(overlapping, tile, limits), no_gradient)
            else:
                dq = each_alone(tile, limits)
            plgpu.barrier_arrive(rows_freed.at[buffer])
            dq *= scale
            if other_refs:
                plgpu.barrier_wait(others_loaded.at[wg])
                dq += sm90.load(out_smem, plgpu.Layout.WGMMA).astype(jnp.float32)
                plgpu.commit_smem()  # all have read
            out_smem[...] = dq.astype(dq_ref.dtype)
            plgpu.commit_smem()
            rows.store(out_box, dq_ref, b, kv_head, base)

        def load_tile(n, before, tile, *limits):
            streams = (key_ref, key_smem, key_loaded, key_freed), (value_ref, value_smem, value_loaded, value_freed)
            rows.load_tile(
                n, tile, b, kv_head, rows_loaded, rows_freed,
                tiles=[(query_ref, query_boxes), (grad_ref, grad_boxes)],
                per_token=(row_bounds_ref, bounds_smem3),
                per_row=list(zip(statistic_refs, statistics_smem3, strict=True)),
                words=visibility.words(mask_refs, words_smem2),
            )  # fmt: skip
            sm90.load_blocks(limits[0], limits[-1], before, keys, streams, (b, kv_head))

        def consume():
            sm90.for_each_tile(num_tiles, tile_range, compute_tile)
            plgpu.wait_smem_to_gmem(0)

        sm90.divide_roles(wg, warpgroups, consume, lambda: sm90.for_each_tile(num_tiles, tile_range, load_tile))

    def nsa_ranged_dq(*refs):
        tiled = functools.partial(sm90.tiled, dtype=query.dtype)
        in_flight = query_buffers * warpgroups
        filled = plgpu.Barrier(num_barriers=stages)
        freed = plgpu.Barrier(num_barriers=stages, num_arrivals=warpgroups)
        vectors = len(bounds) + len(statistics) + num_words
        rows_filled = plgpu.Barrier(num_barriers=in_flight, num_arrivals=rows.arrivals(2, vectors))
        pl.run_scoped(
            lambda *scoped: kernel(*refs, *scoped),
            (
                rows.buffer(in_flight, h_dim, query.dtype),
                rows.buffer(in_flight, v_dim, query.dtype),
                rows.buffer(warpgroups, h_dim, query.dtype),
                tiled(stages, keys, h_dim),
                tiled(stages, keys, v_dim),
            ),
            # Several vectors each: every buffer takes a multiple of 1 KiB, and there is none to spare.
            (
                plgpu.SMEM((len(bounds), in_flight, ROWS), jnp.int32),
                plgpu.SMEM((len(statistics), in_flight, ROWS), jnp.float32),
            ),
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
        *(visibility.bounds, bounds, *statistics, *tensors, *masks, *others),
        warpgroups=warpgroups + 1,
    )
    return rows.restore(dq)
