"""Forward of ranged attention for Hopper: warpgroups compute, one more feeds them keys and values through TMA.

The Triton kernel leaves the matrix units idle while it takes exponentials. Here two warpgroups of 64 query rows take
turns: one multiplies while the other does its softmax, so that both units stay busy. Narrow heads leave registers for a
third warpgroup; three keep them busy without turns.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from nsa_jax.ops import tiles as tuning
from nsa_jax.ops.kernels.softmax import LN2, LOG2E, MINUS_INFINITY, NO_WEIGHT
from nsa_jax.ops.tiles import ROWS


def tile_bounds(low, high, rows: int, keys: int) -> jax.Array:
    """Key blocks that each query tile walks: int32 [B, tiles, 4], (begin, exact_begin, exact_end, end).

    Blocks [exact_begin, exact_end) are seen whole by every row, the others need a mask. `low` and `high` are int32
    [B, a multiple of `rows`]; rows that see nothing have high = 0 and a low that is at least any other row's high.
    """
    batch = low.shape[0]
    low, high = (x.reshape(batch, -1, rows) for x in (low, high))
    begin = low.min(-1) // keys
    end = jnp.maximum(-(-high.max(-1) // keys), begin)
    exact_begin = jnp.clip(-(-low.max(-1) // keys), begin, end)
    exact_end = jnp.clip(high.min(-1) // keys, exact_begin, end)
    return jnp.stack([begin, exact_begin, exact_end, end], -1).astype(jnp.int32)


def ranged_forward(query, key, value, low, high, config: tuning.RangedHopperConfig, listed=None, walks=None):
    """As `range_attention.ranged_forward`, of some key blocks alone if `listed` or `walks` is given.

    Args:
      query, key, value, low, high: see there.
      config: tiles.
      listed: int32 [B, T, K, W], bit j % 32 of word j // 32: whether the query sees keys of block j, config.keys each.
      walks: the blocks that each query tile walks and which of its tokens see them, as (block, bits, num_shared) of a
        `neighbours.Split` by tiles of as many tokens.
    """
    # A jaxlib without GPU support cannot import Mosaic GPU, and must still import the library.
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from nsa_jax.ops.kernels import sm90

    keys, stages, warpgroups, query_buffers = config.keys, config.stages, config.warpgroups, config.query_buffers
    batch, length, heads, h_dim = query.shape
    num_keys, kv_heads, v_dim = value.shape[1:]
    rows = sm90.RowTiles(length, heads // kv_heads, kv_heads, warpgroups)
    row_low, row_high = rows.per_token(low, num_keys), rows.per_token(high, 0)
    query = rows.arrange(query)
    key, value = sm90.whole_tiles(key), sm90.whole_tiles(value)
    if walks is None:
        bounds, masks = tile_bounds(row_low, row_high, rows.tile, keys), () if listed is None else (rows.words(listed),)
    else:
        *masks, bounds = walks
    num_words = 0 if listed is None else listed.shape[-1]
    scale = LOG2E / math.sqrt(h_dim)
    total = rows.tiles * kv_heads * batch
    per_program = config.tiles or tuning.ranged_hopper_tiles_per_program(total, config.most_tiles)

    def kernel(bounds_ref, low_ref, high_ref, query_ref, key_ref, value_ref, *refs):
        *mask_refs, out_ref, lse_ref, buffers, vectors, words_smem2, loaded, freed, turn = refs
        low_smem2, high_smem2, lse_smem2 = vectors
        query_smem2, out_smem2, key_smem, value_smem = buffers
        query_loaded, key_loaded, value_loaded = loaded
        query_freed, key_freed, value_freed = freed
        b, kv_head, wg = lax.axis_index("batch"), lax.axis_index("kv_head"), lax.axis_index("wg")
        # Late queries see most: they go first.
        last = rows.tiles - 1 - lax.axis_index("program") * per_program
        num_tiles = jnp.minimum(last + 1, per_program)

        def tile_range(n):
            tile = last - n
            if walks is not None:
                count, whole = (bounds_ref[b, kv_head, tile, i] for i in range(2))
                return tile, jnp.int32(0), jnp.int32(0), whole, count
            return tile, *(bounds_ref[b, tile, i] for i in range(4))

        def look_up(tile, i):
            """Of step i of a tile's walk: the block, and the tokens that see it."""
            return mask_refs[0][b, kv_head, tile, i], mask_refs[1][b, kv_head, tile, i]

        def arrive():
            if warpgroups == 2:
                plgpu.barrier_arrive(turn)

        def wait():
            if warpgroups == 2:
                plgpu.barrier_wait(turn)

        def take_turns():
            arrive()
            wait()

        @pl.when(wg < warpgroups)
        def _compute():
            plgpu.set_max_registers(sm90.registers(warpgroups)[0], action="increase")
            out_smem, lse_smem = out_smem2.at[wg], lse_smem2.at[wg]
            layout, shape = plgpu.Layout.WGMMA.reduce(1), (ROWS, keys)

            def serve_tile(n, before, tile, begin, exact_begin, exact_end, end):
                first_masked = () if walks is None else look_up(tile, exact_end)
                buffer = lax.rem(n, jnp.int32(query_buffers))
                at = buffer * warpgroups + wg
                query_smem, low_smem, high_smem = (x.at[at] for x in (query_smem2, low_smem2, high_smem2))
                base = tile * rows.tile + wg * ROWS
                slot_of = lambda i: lax.rem(before + i - begin, jnp.int32(stages))  # noqa: E731
                plgpu.barrier_wait(query_loaded.at[at])
                pl.when(end > begin)(lambda: plgpu.barrier_wait(key_loaded.at[slot_of(begin)]))
                pl.when(wg == 1)(take_turns)

                def step(exact, i, carry):
                    acc, peak, total, *seen_at = carry
                    block, bits = seen_at or (i, 0)
                    following = look_up(tile, jnp.minimum(i + 1, end - 1)) if seen_at else ()
                    slot = slot_of(i)

                    def multiply(acc_ref):
                        plgpu.wgmma(acc_ref, query_smem, sm90.transpose(key_smem.at[slot]))
                        take_turns()
                        return acc_ref[...]

                    scores = pl.run_scoped(multiply, plgpu.ACC(shape, jnp.float32))
                    plgpu.barrier_arrive(key_freed.at[slot])
                    if not exact:
                        position = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA) + block * keys
                        visible = position >= lax.broadcast_in_dim(sm90.load(low_smem, layout), shape, [0])
                        visible &= position < lax.broadcast_in_dim(sm90.load(high_smem, layout), shape, [0])
                        scores = jnp.where(visible, scores, -jnp.inf)
                    new_peak = subtract = jnp.maximum(peak, scores.max(axis=1) * scale)
                    seen = None
                    if num_words:  # a tile's keys are one block, so that the mask is one bit per row
                        words = sm90.load(words_smem2.at[at, lax.div(i, jnp.int32(32))], layout)
                        seen = sm90.has_bit(words, i)
                    elif seen_at:
                        row = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=layout) + wg * ROWS
                        seen = sm90.has_bit(jnp.broadcast_to(bits, row.shape), lax.div(row, jnp.int32(rows.group)))
                    if seen is not None:
                        subtract = jnp.where(seen, new_peak, NO_WEIGHT)
                        new_peak = jnp.where(seen, new_peak, peak)
                    pl.when(i + 1 == end)(lambda: plgpu.barrier_arrive(query_freed.at[buffer]))
                    alpha = jnp.exp2(peak - new_peak)
                    weights = jnp.exp2(scores * scale - lax.broadcast_in_dim(subtract, shape, [0]))
                    acc *= lax.broadcast_in_dim(alpha, acc.shape, [0])
                    half = weights.astype(query_ref.dtype)
                    total = total * alpha + weights.sum(axis=1)
                    acc, total, new_peak, half = lax.optimization_barrier((acc, total, new_peak, half))
                    arrive()  # done with the softmax
                    plgpu.barrier_wait(value_loaded.at[slot])
                    wait()  # until the other warpgroup has issued its product

                    def accumulate(acc_ref):
                        plgpu.wgmma(acc_ref, half, value_smem.at[slot])
                        pl.when(i + 1 < end)(lambda: plgpu.barrier_wait(key_loaded.at[slot_of(i + 1)]))

                    acc = pl.run_state(accumulate)(plgpu.ACC.init(acc))
                    plgpu.barrier_arrive(value_freed.at[slot])
                    return acc, new_peak, total, *following

                # The first peak is finite: a row that has seen nothing yet gets weights exp2(-inf - peak) = 0 and not
                # NaN.
                carry = (
                    sm90.zeros((ROWS, v_dim)),
                    sm90.zeros((ROWS,), MINUS_INFINITY, layout),
                    sm90.zeros((ROWS,), 0.0, layout),
                )
                if walks is None:
                    carry = lax.fori_loop(begin, exact_begin, functools.partial(step, False), carry)
                carry = lax.fori_loop(exact_begin, exact_end, functools.partial(step, True), carry)
                carry = (*carry, *first_masked)
                acc, peak, total, *_ = lax.fori_loop(exact_end, end, functools.partial(step, False), carry)
                pl.when(wg == 0)(take_turns)
                pl.when(end == begin)(lambda: plgpu.barrier_arrive(query_freed.at[buffer]))
                found = total > 0
                safe = jnp.where(found, total, 1.0)
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the copies of the tile before
                out_smem[...] = (acc / lax.broadcast_in_dim(safe, acc.shape, [0])).astype(out_ref.dtype)
                lse_smem[...] = jnp.where(found, peak * LN2 + jnp.log(safe), -jnp.inf)
                plgpu.commit_smem()
                rows.store(out_smem, out_ref, b, kv_head, base)
                plgpu.copy_smem_to_gmem(lse_smem, lse_ref.at[b, kv_head, pl.ds(base, ROWS)])

            sm90.serve_tiles(num_tiles, tile_range, serve_tile)
            plgpu.wait_smem_to_gmem(0)

        @pl.when(wg == warpgroups)
        def _feed():
            plgpu.set_max_registers(sm90.registers(warpgroups)[1], action="decrease")
            streams = (key_ref, key_smem, key_loaded, key_freed), (value_ref, value_smem, value_loaded, value_freed)

            def feed_tile(n, before, tile, begin, exact_begin, exact_end, end):
                block_of = (lambda i: i) if walks is None else (lambda i: mask_refs[0][b, kv_head, tile, i])
                rows.load_tile(
                    n, tile, b, kv_head, query_loaded, query_freed,
                    tiles=[(query_ref, query_smem2)],
                    per_token=[(low_ref, low_smem2), (high_ref, high_smem2)],
                    words=[(mask_refs[0], words_smem2)] if num_words else (),
                )  # fmt: skip
                sm90.feed_blocks(begin, end, before, keys, streams, (b, kv_head), block_of)

            sm90.serve_tiles(num_tiles, tile_range, feed_tile)

    def nsa_ranged_forward(*refs):
        buffer = functools.partial(sm90.tiled, dtype=query.dtype)
        filled = plgpu.Barrier(num_barriers=stages)
        freed = plgpu.Barrier(num_barriers=stages, num_arrivals=warpgroups)
        vector = plgpu.SMEM((query_buffers * warpgroups, ROWS), jnp.int32)
        query_filled = plgpu.Barrier(
            num_barriers=query_buffers * warpgroups, num_arrivals=rows.arrivals(1, 2 + num_words)
        )
        pl.run_scoped(
            lambda *scoped: kernel(*refs, *scoped),
            (
                buffer(query_buffers * warpgroups, ROWS, h_dim),
                buffer(warpgroups, ROWS, v_dim),
                buffer(stages, keys, h_dim),
                buffer(stages, keys, v_dim),
            ),
            (vector, vector, plgpu.SMEM((warpgroups, ROWS), jnp.float32)),
            plgpu.SMEM((query_buffers * warpgroups, num_words, ROWS), jnp.int32) if num_words else None,
            (query_filled, filled, filled),
            (plgpu.Barrier(num_barriers=query_buffers, num_arrivals=warpgroups), freed, freed),
            plgpu.Barrier(num_arrivals=warpgroups),
            collective_axes="wg",
        )

    out, lse = sm90.call(
        nsa_ranged_forward,
        (pl.cdiv(rows.tiles, per_program), kv_heads, batch),
        ("program", "kv_head", "batch"),
        [
            jax.ShapeDtypeStruct((*query.shape[:3], v_dim), query.dtype),
            jax.ShapeDtypeStruct((batch, kv_heads, rows.tiles * rows.tile), jnp.float32),
        ],
        *(bounds, row_low, row_high, query, key, value, *masks),
        warpgroups=warpgroups,
    )
    return rows.restore(out), rows.from_rows(lse)
