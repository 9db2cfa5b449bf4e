"""Gradients of keys and values of range attention for Hopper: each consumer warpgroup has 64 keys, a producer loads the
rows that see them through TMA."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from nsa_jax.ops import tiles as tuning
from nsa_jax.ops.kernels.range_attention.tiles import (
    PHASES,
    WINDOW_PHASES,
    KnownRanges,
    Window,
    known_tile_ranges,
    query_tile_ranges,
    row_vectors,
    splits_for,
    warpgroup_ranges,
)
from nsa_jax.ops.kernels.softmax import LOG2E, NO_WEIGHT
from nsa_jax.ops.tiles import ROWS


def grad_key_value(
    query, key, value, grad_out, lse, delta, low, high, config: tuning.RangedHopperKeysConfig,
    known: KnownRanges | None = None,
):  # fmt: skip
    """dk [B, S, K, H] and dv [B, S, K, V]; arguments as `grad_query`."""
    from nsa_jax.ops.kernels.range_attention import sm90_visibility

    arrays = query, key, value, grad_out, lse, delta, low, high
    return _grad_key_value(*arrays, config, sm90_visibility.KeyBlockRange(), known)


def block_masked_grad_key_value(
    query, key, value, grad_out, lse, delta, low, high, config: tuning.RangedHopperKeysConfig, known, listed,
    window: Window | None = None,
):  # fmt: skip
    """`grad_key_value` of `sm90_forward.block_masked_forward`, whose blocks have 64 keys; with a window, of the sum of
    both attentions."""
    from nsa_jax.ops.kernels.range_attention import sm90_visibility

    arrays = query, key, value, grad_out, lse, delta, low, high
    return _grad_key_value(*arrays, config, sm90_visibility.KeyBlockMask(config.warpgroups, listed), known, window)


def _joint_ranges(ranges, window) -> jax.Array:
    """Limits of `WINDOW_PHASES` and then `PHASES`, int32 [1 or B, 7, blocks].

    Args:
      ranges, window: tiles (first, whole_begin, whole_end, last) of two attentions, [1 or B, 4, blocks]. The second
        sees the end of every row's range.
    """
    ranges, window = jnp.broadcast_arrays(ranges, window)
    first, whole_begin, whole_end, last = jnp.moveaxis(ranges, 1, 0)
    _, window_begin, window_end, window_last = jnp.moveaxis(window, 1, 0)
    window_last = jnp.clip(window_last, first, last)
    limits = [jnp.clip(x, first, window_last) for x in (window_begin, window_end)]
    limits += [window_last, *(jnp.clip(x, window_last, last) for x in (whole_begin, whole_end))]
    return jnp.stack([first, *limits, last], axis=1)


def _grad_key_value(
    query, key, value, grad_out, lse, delta, low, high, config: tuning.RangedHopperKeysConfig, visibility,
    known: KnownRanges | None, window: Window | None = None,
):  # fmt: skip
    """The kernel; `visibility` is one of `sm90_visibility`'s classes for blocks of keys."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from nsa_jax.ops.kernels import mosaic, sm90, sm90_gather, sm90_products, sm90_rows
    from nsa_jax.ops.kernels.range_attention import sm90_visibility

    stages, warpgroups = config.stages, config.warpgroups
    batch, length, heads, h_dim = query.shape
    num_keys, kv_heads, v_dim = value.shape[1:]
    group = heads // kv_heads
    rows = sm90_rows.RowTiles(length, group, kv_heads, warpgroups=1, width=max(h_dim, v_dim))
    keys = warpgroups * ROWS  # 64 keys per warpgroup
    blocks = pl.cdiv(num_keys, keys)

    def tile_ranges(low, known) -> Any:
        """(tiles of each warpgroup's keys, tiles of each program)."""
        if known is None:
            return warpgroup_ranges(query_tile_ranges(low, high, group, ROWS, ROWS, num_keys), warpgroups)
        return warpgroup_ranges(known_tile_ranges(known, group, ROWS, ROWS), warpgroups)

    own_ranges, ranges = tile_ranges(low, known)
    splits = config.splits or splits_for(key, value, length * group, keys=keys, rows=ROWS, ranges=ranges)
    query, grad_out = rows.arrange(query), rows.arrange(grad_out)
    bounds, statistics = row_vectors(rows, low, high, (lse, delta), window, num_keys, known)
    phases = PHASES if window is None else (*WINDOW_PHASES, *PHASES)
    most_attentions = max(attentions for _, attentions in phases)
    if window is not None:
        own_ranges = _joint_ranges(own_ranges, tile_ranges(window.low, window.known)[0])
    ranges, own_ranges = (jnp.asarray(x, jnp.int32) for x in (ranges, own_ranges))
    key, value = sm90.whole_tiles(key), sm90.whole_tiles(value)
    tensors, masks, num_words = (query, grad_out, key, value), visibility.mask_arrays(rows), visibility.num_words
    scale = 1.0 / math.sqrt(h_dim)
    column_layout, shape = plgpu.Layout.WGMMA.reduce(0), (ROWS, ROWS)

    def kernel(ranges_ref, own_ref, row_bounds_ref, *refs):
        *arrays, dk_ref, dv_ref, buffers, vectors, words_smem, loaded, freed = refs
        statistic_refs, tensor_refs, mask_refs = sm90.divided(arrays, statistics, tensors, masks)
        query_ref, grad_ref, key_ref, value_ref = tensor_refs
        key_smem2, value_smem2 = buffers[:2]
        (query_smem, query_boxes), (grad_smem, grad_boxes) = map(rows.views, buffers[2:])
        keys_loaded, query_loaded, grad_loaded = loaded
        query_freed, grad_freed = freed
        bounds_smem, statistics_smem = sm90.divided(vectors, range(len(bounds)), statistics)
        b, kv_head, wg = lax.axis_index("batch"), lax.axis_index("kv_head"), lax.axis_index("wg")
        program = lax.axis_index("block")
        block, split = lax.div(program, jnp.int32(splits)), lax.rem(program, jnp.int32(splits))
        entry = sm90_rows.entry_of(ranges_ref, b)
        first, last = (ranges_ref[entry, i, block] for i in range(2))
        per_split = lax.div(last - first + splits - 1, jnp.int32(splits))
        begin = jnp.minimum(first + split * per_split, last)
        end = jnp.minimum(begin + per_split, last)
        own_block = block * warpgroups + wg
        first_word = visibility.first_word(block * warpgroups)

        def own_tiles():
            """The warpgroup's keys and values in shared memory."""
            here = sm90_gather.computed_here(wg)  # else every operand's place stays in registers
            return key_smem2.at[here], value_smem2.at[here]

        def prologue():
            """Loads the warpgroup's keys and values: the first key, and their index in key and value."""
            base = block * keys + wg * ROWS
            index = (b, pl.ds(base, ROWS), kv_head)
            for ref, smem in zip((key_ref, value_ref), own_tiles(), strict=True):
                plgpu.copy_gmem_to_smem(ref.at[index], smem, keys_loaded.at[wg])
            plgpu.barrier_wait(keys_loaded.at[wg])
            return base, index

        def own_limits():
            """The tiles between which the phases of the warpgroup's keys lie, as far as they are the program's."""
            entry = sm90_rows.entry_of(own_ref, b)
            return [jnp.clip(own_ref[entry, i, own_block], begin, end) for i in range(len(phases) + 1)]

        def skip(tile, _):
            """Frees a tile that only the keys of other warpgroups see, once it is there: its barriers count it too."""
            slot = lax.rem(tile - begin, jnp.int32(stages))
            for loaded, freed in ((query_loaded, query_freed), (grad_loaded, grad_freed)):
                plgpu.barrier_wait(loaded.at[slot])
                plgpu.barrier_arrive(freed.at[slot])

        def own(index, slot):
            """A statistic of the rows of a tile."""
            return sm90.load(statistics_smem[index].at[slot], column_layout)

        def position_of(base):
            return sm90_visibility.positions(base, shape)

        def statistic(which, exact, attentions, slot, base):
            """What is subtracted of a tile: 0 is the log-sum-exp, 1 delta. In the window, those of both attentions."""

            def seen(numbers, otherwise):
                return visibility.where_seen(numbers, otherwise, words_smem, slot, own_block, first_word, column_layout)

            def far():
                first = own(which, slot)
                return lax.broadcast_in_dim(first if which else seen(first, NO_WEIGHT), shape, [1])

            if attentions == 1:
                return far()
            near = lax.broadcast_in_dim(seen(own(4 + which, slot), own(2 + which, slot)), shape, [1])
            if exact:
                return near
            # Compared in two types: the assembler would keep the results of one comparison for both, in registers that
            # there are not. There are at most 64 * `selected_tiles.MOST_MASKED_BLOCKS` keys.
            number = jnp.float32 if which else jnp.int32
            low = sm90.load(bounds_smem[-1].at[slot], column_layout).astype(number)
            inside = position_of(base).astype(number) >= lax.broadcast_in_dim(low, shape, [1])
            return jnp.where(inside, near, far())

        def weights_of(exact, attentions, slot, scores, base):
            """Weights [keys, rows] of a tile, summed over the attentions."""
            weights = jnp.exp2(scores * (scale * LOG2E) - statistic(0, exact, attentions, slot, base))
            if exact:
                return weights
            low, high = bounds_smem[0].at[slot], bounds_smem[1].at[slot]
            return sm90_visibility.hide_in_columns(weights, 0.0, position_of(base), low, high)

        def gradient_of(exact, attentions, slot, weights, d_weights, base):
            """Gradient of a tile's scores, summed over the attentions."""
            return weights * (d_weights - statistic(1, exact, attentions, slot, base))

        def slot_of(tile):
            return lax.rem(tile - begin, jnp.int32(stages))

        def products(exact, attentions, base, tile):
            """Weights and gradients of scores of a tile, rounded.

            `exact` if its rows see all of the keys, or all of what their bits allow.
            """
            slot = slot_of(tile)
            key_smem, value_smem = own_tiles()

            plgpu.barrier_wait(query_loaded.at[slot])

            def multiply_scores(acc_ref):
                plgpu.wgmma(acc_ref, key_smem, sm90.transpose(query_smem.at[slot]))
                plgpu.barrier_wait(grad_loaded.at[slot])

            def multiply_gradients(acc_ref):
                plgpu.wgmma(acc_ref, value_smem, sm90.transpose(grad_smem.at[slot]))

            def weights_now(scores):
                return weights_of(exact, attentions, slot, scores, base)

            weights, d_weights = sm90_products.two_products(ROWS, multiply_scores, multiply_gradients, weights_now)
            d_scores = gradient_of(exact, attentions, slot, weights, d_weights, base)
            return weights.astype(query_ref.dtype), d_scores.astype(query_ref.dtype)

        def accumulate(tile, dk, dv, half, d_half):
            """dk and dv with the products of a tile added, which is freed."""
            slot = slot_of(tile)

            def multiply(refs):
                dk_acc, dv_acc = refs
                plgpu.wgmma(dv_acc, half, grad_smem.at[slot])
                plgpu.wgmma(dk_acc, d_half, query_smem.at[slot])

            dk, dv = pl.run_state(multiply)((plgpu.ACC.init(dk), plgpu.ACC.init(dv)))
            plgpu.barrier_arrive(grad_freed.at[slot])
            plgpu.barrier_arrive(query_freed.at[slot])
            return dk, dv

        def overlapping_step(base, exact, attentions, tile, carry):
            """`products` of a tile, and what `accumulate` does for the tile before.

            The scores are multiplied together with the weights and gradients of the output of the tile before, whose
            product goes on while this tile's exponentials are taken; the gradients of weights together with the
            gradients of scores and queries of the tile before.
            """
            dk, dv, half, d_half = carry
            slot, before = slot_of(tile), slot_of(tile - 1)
            key_smem, value_smem = own_tiles()
            plgpu.barrier_wait(query_loaded.at[slot])

            def take_weights(refs):
                scores_ref, dv_acc, half_ref, weights_ref = refs
                plgpu.wgmma(scores_ref, key_smem, sm90.transpose(query_smem.at[slot]))
                plgpu.wgmma(dv_acc, half_ref[...], grad_smem.at[before])
                scores = plgpu.wgmma_accumulator_load(scores_ref, wait_n=1)
                weights = weights_of(exact, attentions, slot, scores, base)
                weights_ref[...] = sm90.before_wait(weights, bounds_smem[1][slot, 0] < 0)

            init = sm90_products.begin(ROWS), plgpu.ACC.init(dv), half, sm90.zeros(shape)
            _, dv, _, weights = pl.run_state(take_weights)(init)
            plgpu.barrier_arrive(grad_freed.at[before])
            plgpu.barrier_wait(grad_loaded.at[slot])

            def take_gradient(refs):
                d_weights_ref, dk_acc, d_half_ref, d_scores_ref = refs
                plgpu.wgmma(d_weights_ref, value_smem, sm90.transpose(grad_smem.at[slot]))
                plgpu.wgmma(dk_acc, d_half_ref[...], query_smem.at[before])
                d_weights = plgpu.wgmma_accumulator_load(d_weights_ref, wait_n=1)
                d_scores_ref[...] = gradient_of(exact, attentions, slot, weights, d_weights, base)

            init = sm90_products.begin(ROWS), plgpu.ACC.init(dk), d_half, sm90.zeros(shape)
            _, dk, _, d_scores = pl.run_state(take_gradient)(init)
            plgpu.barrier_arrive(query_freed.at[before])
            # Not before: the products of the tile before take theirs from the same registers.
            return dk, dv, weights.astype(query_ref.dtype), d_scores.astype(query_ref.dtype)

        def over_tiles(limits, step, carry):
            """The loops of all phases: `step(exact, attentions, tile, carry)`."""
            for phase, first, last in zip(phases, limits[:-1], limits[1:], strict=True):
                carry = lax.fori_loop(first, last, functools.partial(step, *phase), carry)
            return carry

        def each_alone(base, limits):
            """(dk, dv) of the warpgroup's keys, not scaled."""

            def step(exact, attentions, tile, carry):
                return accumulate(tile, *carry, *products(exact, attentions, base, tile))

            return over_tiles(limits, step, no_gradients())

        def overlapping(base, limits):
            """`each_alone` where some tile sees the keys, with the products of each tile during the next one's
            exponentials."""
            carry = (*no_gradients(), *products(False, most_attentions, base, limits[0]))
            rest = [jnp.maximum(x, limits[0] + 1) for x in limits]
            return accumulate(limits[-1] - 1, *over_tiles(rest, functools.partial(overlapping_step, base), carry))

        def no_gradients():
            return sm90.zeros((ROWS, h_dim)), sm90.zeros((ROWS, v_dim))

        def load(tile, _):
            count = tile - begin
            slot = lax.rem(count, jnp.int32(stages))
            base = tile * ROWS
            pl.when(count >= stages)(lambda: plgpu.barrier_wait(query_freed.at[slot]))
            barrier = query_loaded.at[slot]
            rows.load(query_ref, query_boxes.at[slot], barrier, b, kv_head, base)
            own_rows = pl.ds(base, ROWS)
            for ref, smem in zip(statistic_refs[::2], statistics_smem[::2], strict=True):
                plgpu.copy_gmem_to_smem(ref.at[b, kv_head, own_rows], smem.at[slot], barrier)
            for i, smem in enumerate(bounds_smem):
                own_bounds = row_bounds_ref.at[i, sm90_rows.entry_of(row_bounds_ref, b, axis=1), own_rows]
                plgpu.copy_gmem_to_smem(own_bounds, smem.at[slot], barrier)
            visibility.load(mask_refs, words_smem, slot, barrier, b, kv_head, first_word, base)
            pl.when(count >= stages)(lambda: plgpu.barrier_wait(grad_freed.at[slot]))
            barrier = grad_loaded.at[slot]
            rows.load(grad_ref, grad_boxes.at[slot], barrier, b, kv_head, base)
            for ref, smem in zip(statistic_refs[1::2], statistics_smem[1::2], strict=True):
                plgpu.copy_gmem_to_smem(ref.at[b, kv_head, own_rows], smem.at[slot], barrier)

        def consume():
            base, index = prologue()
            limits = own_limits()
            lax.fori_loop(begin, limits[0], skip, None)
            if config.overlap:
                visited = limits[0] < limits[-1]
                dk, dv = lax.cond(visited, functools.partial(overlapping, base, limits), no_gradients)
            else:
                dk, dv = each_alone(base, limits)
            lax.fori_loop(limits[-1], end, skip, None)
            key_smem, value_smem = own_tiles()
            key_smem[...] = (dk * scale).astype(dk_ref.dtype)
            value_smem[...] = dv.astype(dv_ref.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(key_smem, dk_ref.at[(split, *index)])
            plgpu.copy_smem_to_gmem(value_smem, dv_ref.at[(split, *index)])
            plgpu.wait_smem_to_gmem(0)

        sm90.divide_roles(wg, warpgroups, consume, lambda: lax.fori_loop(begin, end, load, None))

    def nsa_ranged_dkv(*refs):
        tiled = functools.partial(sm90.tiled, dtype=query.dtype)
        vector = lambda dtype: plgpu.SMEM((stages, ROWS), dtype)  # noqa: E731
        barriers = lambda arrivals: plgpu.Barrier(num_barriers=stages, num_arrivals=arrivals)  # noqa: E731
        pl.run_scoped(
            lambda *scoped: kernel(*refs, *scoped),
            (
                tiled(warpgroups, ROWS, h_dim),
                tiled(warpgroups, ROWS, v_dim),
                rows.buffer(stages, h_dim, query.dtype),
                rows.buffer(stages, v_dim, query.dtype),
            ),
            (*(vector(jnp.int32) for _ in range(len(bounds))), *(vector(jnp.float32) for _ in statistics)),
            plgpu.SMEM((stages, num_words, ROWS), jnp.int32) if num_words else None,
            (
                plgpu.Barrier(num_barriers=warpgroups, num_arrivals=2),
                barriers(rows.copies + len(bounds) + len(statistics) // 2 + num_words),
                barriers(rows.copies + len(statistics) // 2),
            ),
            (barriers(warpgroups), barriers(warpgroups)),
            collective_axes="wg",
        )

    dk, dv = mosaic.call(
        nsa_ranged_dkv,
        (blocks * splits, kv_heads, batch),
        ("block", "kv_head", "batch"),
        [jax.ShapeDtypeStruct((splits, *x.shape), x.dtype) for x in (key, value)],
        *(ranges, own_ranges, bounds, *statistics, *tensors, *masks),
        warpgroups=warpgroups + 1,
    )

    def total(x):
        x = x[:, :, :num_keys]
        return x[0] if splits == 1 else x.astype(jnp.float32).sum(0).astype(x.dtype)

    return total(dk), total(dv)
