"""Forward of range attention for Hopper: consumer warpgroups compute, a producer loads keys and values through TMA.

The Triton kernel leaves the matrix units idle while it takes exponentials. Here they stay busy in two ways. Some
consumers, of 64 query rows each, multiply while others do their softmax: there are three or four where registers allow.
And a consumer multiplies the weights of one key block with values while it takes the exponentials of the next.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from nsa_jax.ops import tiles as tuning
from nsa_jax.ops.kernels.range_attention.tiles import GatedSum, KnownRanges, Window, row_vectors
from nsa_jax.ops.kernels.softmax import LN2, LOG2E, MINUS_INFINITY
from nsa_jax.ops.tiles import ROWS


def ranged_forward(
    query, key, value, low, high, config: tuning.RangedHopperConfig, known: KnownRanges | None = None,
    gated: GatedSum | None = None,
):  # fmt: skip
    """As `triton_forward.ranged_forward`, with the Hopper kernel.

    Args:
      known: the ranges, if tracing knows them.
      gated: adds the output to those of other branches. The result is [sum] then, or [(output, log-sum-exp), sum].
    """
    from nsa_jax.ops.kernels.range_attention import sm90_visibility

    visibility = functools.partial(sm90_visibility.KeyRange, known=known)
    results = _forward(query, key, value, low, high, config, visibility, known, gated=gated)
    return results[0] if gated is None else results


def block_masked_forward(
    query, key, value, low, high, config: tuning.RangedHopperConfig, known: KnownRanges | None, listed,
    window: Window | None = None, gated: GatedSum | None = None,
):  # fmt: skip
    """`ranged_forward` over the keys of some blocks, of config.keys keys each.

    Args:
      listed: int32 [B, T, K, W], bit j % 32 of word j // 32: whether the query sees keys of block j.
      window: of a second attention, whose output and log-sum-exp then follow.
      gated: as in `ranged_forward`, of both attentions.
    """
    from nsa_jax.ops.kernels.range_attention import sm90_visibility

    visibility: Callable = functools.partial(sm90_visibility.BlockMask, known=known, listed=listed)
    if window is not None:
        visibility = functools.partial(sm90_visibility.BlockMaskAndWindow, known=known, listed=listed, window=window)
    results = _forward(query, key, value, low, high, config, visibility, known, window, gated)
    return results[0] if window is gated is None else results


def neighbours_forward(
    query, key, value, low, high, config: tuning.RangedHopperConfig, neighbours, by_warp: bool = False
):  # fmt: skip
    """`ranged_forward` over the keys of the blocks that tiles of neighbouring queries list.

    Args:
      neighbours: (block, bits, num_shared) of a `neighbours.Split` by tiles of as many tokens as a query tile has.
      by_warp: whether the split has all blocks of the lists: warps serve those that a tile does not share.
    """
    from nsa_jax.ops.kernels.range_attention import sm90_visibility

    def visibility(rows, row_low, row_high, keys):
        return (sm90_visibility.TileLists if by_warp else sm90_visibility.Neighbours)(rows, *neighbours)

    return _forward(query, key, value, low, high, config, visibility)[0]


_BRANCHES = 3  # of a gated sum


class _Tile(NamedTuple):
    """What the steps of one query tile share in a computing warpgroup."""

    number: jax.Array  # of the program's tiles
    begin: jax.Array  # its steps
    end: jax.Array
    before: jax.Array  # steps of the tiles before
    at: jax.Array  # the warpgroup's queries among all buffers
    first_row: jax.Array  # the warpgroup's


def _forward(
    query, key, value, low, high, config: tuning.RangedHopperConfig, make_visibility, known: KnownRanges | None = None,
    window: Window | None = None, gated: GatedSum | None = None,
):  # fmt: skip
    """The kernel; `make_visibility` makes one of `sm90_visibility`'s classes from (rows, low, high, keys).

    Returns:
      (output, log-sum-exp) of each attention, and behind them, or instead, the gated sum.
    """
    # A jaxlib without GPU support cannot import Mosaic GPU, and must still import the library.
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from nsa_jax.ops.kernels import mosaic, sm90, sm90_gather, sm90_reduce, sm90_rows, sm90_warp
    from nsa_jax.ops.kernels.range_attention import sm90_softmax, sm90_visibility

    keys, stages, warpgroups, query_buffers = config.keys, config.stages, config.warpgroups, config.query_buffers
    batch, length, heads, h_dim = query.shape
    num_keys, kv_heads, v_dim = value.shape[1:]
    rows = sm90_rows.RowTiles(length, heads // kv_heads, kv_heads, warpgroups, max(h_dim, v_dim))
    bounds, _ = row_vectors(rows, low, high, (), window, num_keys, known)
    query = rows.arrange(query)
    key, value = sm90.whole_tiles(key), sm90.whole_tiles(value)
    visibility = make_visibility(rows, *bounds[:2], keys)
    together = visibility.by_warp  # a block's keys and values have one barrier, and are freed together
    tensors, masks, num_words = (query, key, value), visibility.mask_arrays(), visibility.num_words
    attentions = len(bounds) - 1
    scale = LOG2E / math.sqrt(h_dim)
    all_tiles = rows.tiles * kv_heads * batch
    per_program = config.tiles or tuning.ranged_hopper_tiles_per_program(all_tiles, config.most_tiles)
    layout, shape = sm90_visibility.ROW_LAYOUT, (ROWS, keys)
    # A tile's output takes the place of its queries. The other buffer has the next tile's while TMA reads it.
    shared_out = query_buffers > 1 and h_dim == v_dim
    summands: tuple[jax.Array, ...] = ()
    if gated is not None:
        numbers = gated.gates if gated.gates.dtype == jnp.bfloat16 else gated.gates.astype(jnp.float32)
        summands = numbers.reshape(-1), *(x.reshape(-1, v_dim) for x in gated.outs)

    def kernel(bounds_ref, row_bounds_ref, *refs):
        *arrays, buffers, bounds_smem3, words_smem2, loaded, freed = refs
        divided = sm90.divided(arrays, tensors, masks, summands, outputs)
        (query_ref, key_ref, value_ref), mask_refs, summand_refs, out_refs = divided
        query_smem2, query_boxes = rows.views(buffers[0])
        out_smem2, out_boxes = rows.views(buffers[0 if shared_out else 1])
        key_smem, value_smem = buffers[-2:]
        query_loaded, key_loaded, value_loaded = loaded
        query_freed, key_freed, value_freed = freed
        b, kv_head, wg = lax.axis_index("batch"), lax.axis_index("kv_head"), lax.axis_index("wg")
        # Late queries see most: they go first.
        last = rows.tiles - 1 - lax.axis_index("program") * per_program
        num_tiles = jnp.minimum(last + 1, per_program)

        def tile_range(n):
            tile = last - n
            return tile, *visibility.tile_range(bounds_ref, tile, b, kv_head)

        def look_up(tile, i):
            return visibility.look_up(mask_refs, tile, b, kv_head, i)

        def slot_of(tile, i):
            return lax.rem(tile.before + i - tile.begin, jnp.int32(stages))

        def wait_for_key(tile, i):
            plgpu.barrier_wait(key_loaded.at[slot_of(tile, i)])

        def free_key(slot):
            if not together:
                plgpu.barrier_arrive(key_freed.at[slot])

        def wait_for_value(slot):
            if not together:
                plgpu.barrier_wait(value_loaded.at[slot])

        def free_tile_before(tile):
            """Frees the queries' place of the tile before, if its output lies there, once TMA has read that output."""
            if shared_out:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                before = lax.rem(tile.number - 1, jnp.int32(query_buffers))
                pl.when(tile.number > 0)(lambda: plgpu.barrier_arrive(query_freed.at[before]))

        def no_keys():
            """(what rows subtract, normalizer) before the first key.

            The maximum is finite: a row that sees no key gets weights exp2(-inf - maximum) = 0 and not NaN.
            """
            return sm90.zeros((ROWS,), MINUS_INFINITY, layout), sm90.zeros((ROWS,), 0.0, layout)

        def attend(exact, near, served, tile, i, running, scores, block=None, bits=None):
            """One block's scores, not scaled, in the softmax of the first `served` attentions: see `sm90_softmax`."""
            block = i if block is None else block
            seen = visibility.seen(words_smem2, tile.at, i, bits, wg)
            ranges = [ref.at[tile.at] for ref in bounds_smem3]
            if served == 2:
                sizes = dict(exact=exact, near=near, scale=scale)
                return sm90_softmax.attend_both(scores, running, block * keys, ranges, seen, **sizes)
            (own,) = running
            sizes = dict(exact=exact, scale=scale, whole=attentions == 2)
            return (sm90_softmax.attend(scores, own, block * keys, ranges, seen, **sizes),)

        def rounded(near, weights, *factors):
            """The weights that each attention gives to a block's values; of two attentions `factors` has a tuple."""
            half = weights[0].astype(query_ref.dtype)
            return sm90_softmax.of_both(half, factors[0], near) if factors else (half,)

        def first_step(tile, index, limits):
            """The first key block: (accumulator, what rows subtract, normalizer, weights) of each attention."""
            slot, i = slot_of(tile, tile.begin), tile.begin
            phases = zip(visibility.phases, limits[:-1], limits[1:], strict=True)
            exact = functools.reduce(jnp.logical_or, [(a <= i) & (i < b) for phase, a, b in phases if phase[0]])
            block, bits = look_up(index, i) or (i, None)
            wait_for_key(tile, i)

            def multiply(scores_ref):
                plgpu.wgmma(scores_ref, query_smem2.at[tile.at], sm90.transpose(key_smem.at[slot]))
                free_tile_before(tile)
                return scores_ref[...]

            scores = pl.run_scoped(multiply, plgpu.ACC(shape, jnp.float32))
            free_key(slot)
            exact = exact if attentions == 1 else False
            new = attend(exact, False, attentions, tile, i, (no_keys(),) * attentions, scores, block, bits)
            _, _, weights, _, _, *shares = zip(*new, strict=True)
            halves = rounded(False, weights, *shares)
            return tuple((sm90.zeros((ROWS, v_dim)), *x[:2], half) for x, half in zip(new, halves, strict=True))

        def step(exact, near, served, index, tile, i, carry):
            """One key block of the first `served` attentions: `exact` if every row sees all of it, or all of what its
            bits allow, `near` if what it sees of the block lies in its window.

            The step issues two products together: queries and this block's keys, weights and values of the block
            before. The second goes on while the step takes this block's exponentials.
            """
            states, ahead = carry
            block, bits = ahead or (i, None)
            following = look_up(index, jnp.minimum(i + 1, tile.end - 1)) if ahead else ()
            slot, before = slot_of(tile, i), slot_of(tile, i - 1)
            wait_for_key(tile, i)

            def multiply(refs):
                accs, halves, peaks, totals, *_ = refs

                def with_scores(scores_ref):
                    plgpu.wgmma(scores_ref, query_smem2.at[tile.at], sm90.transpose(key_smem.at[slot]))
                    wait_for_value(before)
                    for acc, half in zip(accs, halves, strict=True):
                        plgpu.wgmma(acc, half[...], value_smem.at[before])
                    scores = plgpu.wgmma_accumulator_load(scores_ref, wait_n=served)
                    free_key(slot)
                    running = [(peaks[which][...], totals[which][...]) for which in range(served)]
                    new = attend(exact, near, served, tile, i, running, scores, block, bits)
                    return sm90.before_wait(new, functools.reduce(jnp.bitwise_or, [x[4] for x in new]) != 0)

                new = pl.run_scoped(with_scores, plgpu.ACC(shape, jnp.float32))
                for of_one, results in zip(zip(*refs[2:], strict=True), new, strict=True):
                    for ref, x in zip(of_one, results, strict=True):
                        ref[...] = x

            accs, peaks, totals, halves = zip(*states[:served], strict=True)
            nothing = (sm90.zeros(shape),) * served, totals, (jnp.int32(0),) * served  # written, never read
            shares = [totals] if served == 2 else []
            init = [plgpu.ACC.init(acc) for acc in accs], halves, peaks, totals, *nothing, *shares
            sums, _, peaks, totals, weights, factors, raised, *shares = pl.run_state(multiply)(init)
            plgpu.barrier_arrive(value_freed.at[before])
            scaled = map(sm90.scale_rows, sums, factors, raised)
            # Not before: the product of the block before takes its weights from the same registers.
            halves = rounded(near, weights, *shares)
            return tuple(zip(scaled, peaks, totals, halves, strict=True)) + states[served:], following

        def last_product(tile, states):
            """(accumulator, what rows subtract, normalizer) of each attention with the last block's values."""
            slot = slot_of(tile, tile.end - 1)
            wait_for_value(slot)

            def multiply(acc_refs):
                for acc_ref, (*_, half) in zip(acc_refs, states, strict=True):
                    plgpu.wgmma(acc_ref, half, value_smem.at[slot])

            accs = pl.run_state(multiply)(tuple(plgpu.ACC.init(acc) for acc, *_ in states))
            plgpu.barrier_arrive(value_freed.at[slot])
            return tuple((acc, peak, total) for acc, (_, peak, total, _) in zip(accs, states, strict=True))

        def visit(tile, index, limits):
            """All key blocks of a tile that has some: what `last_product` returns."""
            states, ahead = first_step(tile, index, limits), ()
            # Blocks that a list names come last where they need a mask.
            first_masked = look_up(index, jnp.minimum(jnp.maximum(limits[-2], tile.begin + 1), tile.end - 1))
            for n, ((exact, served), first, last) in enumerate(
                zip(visibility.phases, limits[:-1], limits[1:], strict=True), 1
            ):
                ahead = () if exact else first_masked
                # The last phase begins where every row's window has begun.
                body = functools.partial(step, exact, exact or n == len(visibility.phases), served, index, tile)
                states, _ = lax.fori_loop(jnp.maximum(first, tile.begin + 1), last, body, (states, ahead))
            return last_product(tile, states)

        def visit_by_warp(tile, index, end, state):
            """Continues with the blocks behind those of all phases: a warp serves those that one of its rows sees."""
            queries = sm90.load(query_smem2.at[tile.at], plgpu.Layout.WGMMA)
            low, high = (sm90.load(ref.at[tile.at], layout) for ref in bounds_smem3)

            def step(i, carry):
                state, (block, bits) = carry
                following = look_up(index, jnp.minimum(i + 1, end - 1))
                slot = slot_of(tile, i)
                seen = visibility.seen(words_smem2, tile.at, i, bits, wg)
                wait_for_key(tile, i)

                def serve(acc, peak, total):
                    scores = sm90_warp.row_products(queries, key_smem.at[slot])
                    free_key(slot)
                    partial = seen & ((low > block * keys) | (high < block * keys + keys))
                    exact = jnp.logical_not(sm90_reduce.any_in_warp(partial.astype(jnp.int32)))
                    (state,) = attend(exact, False, 1, tile, i, ((peak, total),), scores, block, bits)
                    peak, total, weights, factor, raised = state
                    acc = sm90.scale_rows(acc, factor, raised)
                    wait_for_value(slot)
                    acc = sm90_warp.add_product(acc, weights.astype(query_ref.dtype), value_smem.at[slot])
                    plgpu.barrier_arrive(value_freed.at[slot])
                    return acc, peak, total

                def leave(*state):
                    free_key(slot)
                    wait_for_value(slot)
                    plgpu.barrier_arrive(value_freed.at[slot])
                    return state

                return lax.cond(sm90_reduce.any_in_warp(seen.astype(jnp.int32)), serve, leave, *state), following

            return lax.fori_loop(tile.end, end, step, (state, look_up(index, jnp.minimum(tile.end, end - 1))))[0]

        def out_slot(tile):
            return tile.at if shared_out else wg

        def normalize(tile, acc, total):
            """Leaves the warpgroup's rows of an output in shared memory."""
            inverse = 1.0 / jnp.where(total > 0, total, 1.0)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the copies before
            out_smem2[out_slot(tile)] = (acc * lax.broadcast_in_dim(inverse, acc.shape, [0])).astype(query.dtype)

        def store(tile, out_ref, lse_ref, acc, peak, total):
            """Stores the warpgroup's rows of an output and their log-sum-exp."""
            normalize(tile, acc, total)
            some = total > 0
            lse = jnp.where(some, peak * LN2 + jnp.log(jnp.where(some, total, 1.0)), -jnp.inf)
            plgpu.commit_smem()
            rows.store(out_boxes.at[out_slot(tile)], out_ref, b, kv_head, tile.first_row)
            first = (b * kv_heads + kv_head) * (rows.tiles * rows.tile) + tile.first_row
            row = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=layout) + first
            sm90_gather.store_numbers(lse_ref, row, lse)

        def store_sum(tile, states):
            """Stores the gated sum of the warpgroup's rows, and what it is of where that is kept."""
            assert gated is not None
            *kept_refs, sum_ref = out_refs
            inside, row, sum_row = rows.places(tile.first_row, b, kv_head, gated.kv_heads)
            gate_ref, *others = summand_refs
            weights = [sm90_gather.load_numbers(gate_ref, row * _BRANCHES + i) for i in range(_BRANCHES)]
            parts = [sm90_gather.load_rows(ref, row) for ref in others]
            for i, state in enumerate(states):
                if kept_refs:
                    store(tile, *kept_refs[2 * i : 2 * i + 2], *state)
                else:
                    normalize(tile, state[0], state[2])
                    plgpu.commit_smem()
                parts.append(sm90_gather.read_tile(out_smem2.at[out_slot(tile)]))
            sm90_gather.store_rows(sum_ref, sum_row, sm90_gather.weighted_sum(weights, parts), inside)

        def compute_tile(n, before, index, *limits):
            everything, limits = limits[-1], limits[: len(visibility.phases) + 1]
            begin, end = limits[0], limits[-1]
            buffer = lax.rem(n, jnp.int32(query_buffers))
            at = buffer * warpgroups + wg
            tile = _Tile(n, begin, end, before, at, index * rows.tile + wg * ROWS)
            plgpu.barrier_wait(query_loaded.at[tile.at])

            def skip():
                free_tile_before(tile)
                return ((sm90.zeros((ROWS, v_dim)), *no_keys()),) * attentions

            states = lax.cond(end > begin, lambda: visit(tile, index, limits), skip)
            if visibility.by_warp:
                states = (visit_by_warp(tile, index, everything, states[0]),)
            states = tuple((acc, peak, sm90_reduce.sum_of_row(total)) for acc, peak, total in states)
            if not shared_out:
                plgpu.barrier_arrive(query_freed.at[buffer])
            if gated is not None:
                store_sum(tile, states)
                return
            for out_ref, lse_ref, state in zip(out_refs[::2], out_refs[1::2], states, strict=True):
                store(tile, out_ref, lse_ref, *state)

        def load_tile(n, before, tile, *limits):
            rows.load_tile(
                n, tile, b, kv_head, query_loaded, query_freed,
                tiles=[(query_ref, query_boxes)],
                per_token=(row_bounds_ref, bounds_smem3),
                words=visibility.words(mask_refs, words_smem2),
            )  # fmt: skip
            if gated is not None:  # the other summands, on their way to the L2 cache
                for i in range(warpgroups):
                    _, row, _ = rows.places(tile * rows.tile + i * ROWS, b, kv_head, 1)
                    for ref in summand_refs[1:]:
                        sm90_gather.prefetch_rows(ref, row)
            block_of = visibility.block_of(mask_refs, tile, b, kv_head)
            of_key, of_value = (key_loaded, key_freed), (value_loaded, value_freed)
            if together:
                of_key, of_value = (key_loaded, value_freed), (key_loaded, None)
            streams = (key_ref, key_smem, *of_key), (value_ref, value_smem, *of_value)
            sm90.load_blocks(limits[0], limits[-1], before, keys, streams, (b, kv_head), block_of)

        def consume():
            sm90.for_each_tile(num_tiles, tile_range, compute_tile)
            plgpu.wait_smem_to_gmem(0)

        sm90.divide_roles(wg, warpgroups, consume, lambda: sm90.for_each_tile(num_tiles, tile_range, load_tile))

    def nsa_ranged_forward(*refs):
        buffer = functools.partial(sm90.tiled, dtype=query.dtype)
        filled = plgpu.Barrier(num_barriers=stages, num_arrivals=2 if together else 1)
        freed = plgpu.Barrier(num_barriers=stages, num_arrivals=warpgroups)
        vector = plgpu.SMEM((query_buffers * warpgroups, ROWS), jnp.int32)
        query_filled = plgpu.Barrier(
            num_barriers=query_buffers * warpgroups, num_arrivals=rows.arrivals(1, len(bounds) + num_words)
        )
        outs = [] if shared_out else [rows.buffer(warpgroups, v_dim, query.dtype)]
        queries = rows.buffer(query_buffers * warpgroups, h_dim, query.dtype)
        pl.run_scoped(
            lambda *scoped: kernel(*refs, *scoped),
            (queries, *outs, buffer(stages, keys, h_dim), buffer(stages, keys, v_dim)),
            (vector,) * len(bounds),
            plgpu.SMEM((query_buffers * warpgroups, num_words, ROWS), jnp.int32) if num_words else None,
            (query_filled, filled, filled),
            (plgpu.Barrier(num_barriers=query_buffers, num_arrivals=warpgroups), freed, freed),
            collective_axes="wg",
        )

    outputs = [
        rows.arranged(batch, v_dim, query.dtype),
        jax.ShapeDtypeStruct((batch * kv_heads * rows.tiles * rows.tile,), jnp.float32),
    ] * attentions
    if gated is not None:
        outputs = outputs if gated.keep else []
        outputs = [*outputs, jax.ShapeDtypeStruct((batch * length * heads, v_dim), query.dtype)]
    results = mosaic.call(
        nsa_ranged_forward,
        *visibility.grid(pl.cdiv(rows.tiles, per_program), kv_heads, batch),
        outputs,
        *(visibility.bounds, bounds, *tensors, *masks, *summands),
        warpgroups=warpgroups + 1,
    )
    *results, total = results if gated is not None else (*results, None)
    lses = (lse.reshape(batch, kv_heads, -1) for lse in results[1::2])
    kept = [(rows.restore(out), rows.from_rows(lse)) for out, lse in zip(results[::2], lses, strict=True)]
    if gated is None:
        return kept
    return [*kept, total.reshape(batch // gated.kv_heads, length, heads * gated.kv_heads, v_dim)]
