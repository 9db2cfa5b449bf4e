"""Selected attention's blocks that a tile of tokens shares, for Hopper: the counterpart of the Triton kernel in
`selected.attention` for small groups of heads, most of which do not divide a tile of 64 rows.

Three consumer warpgroups compute. Each has tiles of its own, 10 tokens at 6 heads, and visits their blocks at its own
pace: a tile's few blocks take one warpgroup about as long as they take to arrive, and one's waits overlap the others'
work. Each warp of a producer warpgroup serves one consumer: TMA loads a tile's queries and its blocks, those of the
next tile while the last one is finished where shared memory has room for them.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from nsa_jax.ops.kernels.softmax import LN2, LOG2E, MINUS_INFINITY, NO_WEIGHT
from nsa_jax.ops.selected_tiles import SelectedHopperTilesConfig
from nsa_jax.ops.tiles import ROWS

_WARPGROUPS = 3


def _row_starts(segment_start, tiles: int, tile: int, group: int) -> tuple[jax.Array, jax.Array]:
    """Of the rows of every tile their segments' starts, [B, tiles * 64], and each tile's last start, [B, tiles]."""
    batch, length = segment_start.shape
    start = jnp.pad(segment_start, ((0, 0), (0, tiles * tile - length))).reshape(batch, tiles, tile)
    rows = jnp.pad(jnp.repeat(start, group, axis=2), ((0, 0), (0, 0), (0, ROWS - tile * group)))
    return rows.reshape(batch, -1), start.max(-1)


class _Tile(NamedTuple):
    """What the steps of one tile share in a consumer."""

    at: tuple  # batch entry, key/value head, tile
    before: jax.Array  # blocks of the tiles before
    buffer: jax.Array  # of its queries
    first_position: jax.Array
    start: jax.Array | None  # segment starts of its rows
    latest_start: jax.Array | None


def forward(
    query, key, value, neighbours, segment_start, query_offset, *, tile: int, packed: bool,
    config: SelectedHopperTilesConfig,
):  # fmt: skip
    """What the blocks that tiles share give: output [B, T, K, G, V] and natural-log lse float32 [B, T, K, G].

    Args:
      query: [B, T, N, H] bfloat16.
      key, value: [B, S, K, H] and [B, S, K, V].
      neighbours: (block, bits, num_shared) of a `neighbours.Split` by tiles of `tile` tokens.
      segment_start: int32 [B, T].
      query_offset: int32 [1].
      tile: tokens of a tile.
      packed: whether segment_start matters.
      config: tiles.
    """
    # A jaxlib without GPU support cannot import Mosaic GPU, and must still import the library.
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from nsa_jax.ops.kernels import sm90, sm90_gather, sm90_reduce, sm90_rows

    batch, length, num_heads, h_dim = query.shape
    num_keys, num_kv, v_dim = value.shape[1:]
    group = num_heads // num_kv
    tiles = neighbours[0].shape[2]
    all_tiles = batch * num_kv * tiles
    stages, query_buffers = config.stages, config.query_buffers
    parts = h_dim // ROWS, v_dim // ROWS  # of 64 columns, which TMA copies as one box of tokens
    programs = min(config.programs, pl.cdiv(all_tiles, _WARPGROUPS))
    stride = programs * _WARPGROUPS
    scale = LOG2E / math.sqrt(h_dim)
    key, value = sm90.whole_tiles(key), sm90.whole_tiles(value)
    starts = _row_starts(segment_start, tiles, tile, group) if packed else ()
    layout, shape = plgpu.Layout.WGMMA.reduce(1), (ROWS, ROWS)

    def kernel(offset_ref, block_ref, bits_ref, count_ref, *refs, buffers, barriers):
        *start_refs, query_ref, key_ref, value_ref, out_ref, lse_ref = refs
        query_smem, key_smem, value_smem, out_smem = buffers
        query_loaded, query_freed, key_loaded, key_freed, value_loaded, value_freed = barriers
        wg, program = lax.axis_index("wg"), lax.axis_index("program")

        def own_tiles(which):
            """The first tile of consumer `which`, and how many it has."""
            first = program * _WARPGROUPS + which
            return first, lax.div(jnp.maximum(all_tiles - first + stride - 1, 0), jnp.int32(stride))

        def locate(index):
            """(batch entry, key/value head, tile) of one of all tiles; neighbours in the order share keys."""
            pair = lax.div(index, jnp.int32(tiles))
            b = lax.div(pair, jnp.int32(num_kv))
            return b, pair - b * num_kv, index - pair * tiles

        def for_each_tile(which, look_up, serve):
            """Calls `serve(n, before, at, *look_up(at))` for every tile of a consumer; `before` counts blocks.

            What a tile looks up is read one tile ahead: single numbers from global memory take long.
            """
            first, count = own_tiles(which)

            def body(n, carry):
                before, *current = carry
                following = look_up(locate(jnp.minimum(first + (n + 1) * stride, all_tiles - 1)))
                serve(n, before, locate(first + n * stride), *current)
                return before + current[0], *following

            start = locate(jnp.minimum(first, all_tiles - 1))
            lax.fori_loop(0, count, body, (jnp.int32(0), *look_up(start)))

        def look_up_tile(at):
            first_step = block_ref[*at, 0], bits_ref[*at, 0]
            if packed:
                return count_ref[*at, 0], *first_step, start_refs[1][at[0], at[2]]
            return count_ref[*at, 0], *first_step

        def mask(tile, token, block, scores):
            """Scores with -inf for what causality and documents hide."""
            position = jnp.minimum(token + tile.first_position, num_keys - 1) - block * ROWS
            column = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA)
            visible = column <= lax.broadcast_in_dim(position, shape, [0])
            if packed:
                visible &= column >= lax.broadcast_in_dim(tile.start - block * ROWS, shape, [0])
            return jnp.where(visible, scores, -jnp.inf)

        def mask_if_partial(tile, token, block, scores):
            partial = block * ROWS + (ROWS - 1) > jnp.minimum(tile.first_position, num_keys - 1)
            if packed:
                partial |= block * ROWS < tile.latest_start
            return lax.cond(partial, functools.partial(mask, tile, token, block), lambda scores: scores, scores)

        def step(tile, token, i, carry):
            """One block of the tile's list, of which the rows take part whose token's bit is set."""
            acc, peak, total, block, bits = carry
            following = block_ref[*tile.at, i + 1], bits_ref[*tile.at, i + 1]  # the lists have one element more
            slot = wg * stages + lax.rem(tile.before + i, jnp.int32(stages))
            plgpu.barrier_wait(key_loaded.at[slot])

            def multiply(scores_ref):
                for part in range(parts[0]):
                    query_rows = sm90_rows.product_rows(query_smem, tile.buffer * parts[0] + part)
                    keys = key_smem.at[slot, :, pl.ds(part * ROWS, ROWS)]
                    plgpu.wgmma(scores_ref, query_rows, sm90.transpose(keys))
                return scores_ref[...]

            scores = pl.run_scoped(multiply, plgpu.ACC(shape, jnp.float32))
            plgpu.barrier_arrive(key_freed.at[slot])
            scores = mask_if_partial(tile, token, block, scores)
            seen = ((jnp.broadcast_to(bits, (ROWS,)) >> token) & 1) == 1
            highest = jnp.where(seen, sm90_reduce.max_in_thread(scores) * scale, peak)
            peak, total, factor, raised = sm90.raise_peak(peak, total, highest)
            acc = sm90.scale_rows(acc, factor, raised)
            subtract = jnp.where(seen, peak, NO_WEIGHT)
            weights = jnp.exp2(scores * scale - lax.broadcast_in_dim(subtract, shape, [0]))
            total += sm90_reduce.sum_in_thread(weights)
            half = weights.astype(query_ref.dtype)
            plgpu.barrier_wait(value_loaded.at[slot])

            def accumulate(acc_ref):
                plgpu.wgmma(acc_ref, half, value_smem.at[slot])

            acc = pl.run_state(accumulate)(plgpu.ACC.init(acc))
            plgpu.barrier_arrive(value_freed.at[slot])
            return acc, peak, total, *following

        def epilogue(at, token, acc, peak, total):
            """Stores the tile's output and log-sum-exp; TMA drops what lies behind the last token."""
            b, kv_head, index = at
            total = sm90_reduce.sum_of_row(total)
            some = total > 0
            safe = jnp.where(some, total, 1.0)
            half = (acc * lax.broadcast_in_dim(1.0 / safe, acc.shape, [0])).astype(out_ref.dtype)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the copies of the tile before
            for part in range(parts[1]):
                out_rows = sm90_rows.product_rows(out_smem, wg * parts[1] + part)
                out_rows[...] = half[:, part * ROWS : (part + 1) * ROWS]
            plgpu.commit_smem()
            tokens, heads = pl.ds(index * tile, tile), pl.ds(kv_head * group, group)
            for part in range(parts[1]):
                out_rows = sm90_rows.box_rows(out_smem, wg * parts[1] + part, tile, group)
                plgpu.copy_smem_to_gmem(out_rows, out_ref.at[b, tokens, heads, pl.ds(part * ROWS, ROWS)])
            row = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=layout)
            inside = ((token < tile) & (token + index * tile < length)).astype(jnp.int32)
            position = jnp.minimum(token + index * tile, length - 1) + b * length
            place = (position * num_kv + kv_head) * group + row - token * group
            sm90_gather.store_numbers(lse_ref, place, jnp.where(some, peak * LN2 + jnp.log(safe), -jnp.inf), inside)

        def compute_tile(token, offset, n, before, at, count, block, bits, latest_start=None):
            b, _, index = at
            buffer = wg * query_buffers + lax.rem(n, jnp.int32(query_buffers))
            first_position = index * tile + offset
            own_rows = pl.ds(index * ROWS, ROWS)
            start = sm90.load(start_refs[0].at[b, own_rows], layout, optimized=False) if packed else None
            plgpu.barrier_wait(query_loaded.at[buffer])
            # The first maximum is finite: a row that has seen no key gets weights exp2(-inf - maximum) = 0 and not NaN.
            # Rows behind the last token's may hold anything; no other row reads them and nobody stores them.
            carry = (
                sm90.zeros((ROWS, v_dim)),
                sm90.zeros((ROWS,), MINUS_INFINITY, layout),
                sm90.zeros((ROWS,), 0.0, layout),
                block,
                bits,
            )
            current = _Tile(at, before, buffer, first_position, start, latest_start)
            acc, peak, total, *_ = lax.fori_loop(0, count, functools.partial(step, current, token), carry)
            plgpu.barrier_arrive(query_freed.at[buffer])
            epilogue(at, token, acc, peak, total)

        def load_tile(which, n, before, at, count, block):
            """Loads a tile's queries and the blocks of its list for consumer `which`."""
            b, kv_head, index = at
            buffer = which * query_buffers + lax.rem(n, jnp.int32(query_buffers))
            pl.when(n >= query_buffers)(lambda: plgpu.barrier_wait(query_freed.at[buffer]))
            tokens, heads = pl.ds(index * tile, tile), pl.ds(kv_head * group, group)
            for part in range(parts[0]):
                query_rows = sm90_rows.box_rows(query_smem, buffer * parts[0] + part, tile, group)
                columns = pl.ds(part * ROWS, ROWS)
                plgpu.copy_gmem_to_smem(query_ref.at[b, tokens, heads, columns], query_rows, query_loaded.at[buffer])
            streams = (key_ref, key_smem, key_loaded, key_freed), (value_ref, value_smem, value_loaded, value_freed)

            def load_block(i, block):
                following = block_ref[*at, i + 1]  # on its way while this one waits for its buffer
                done = before + i
                slot = which * stages + lax.rem(done, jnp.int32(stages))
                keys = pl.ds(block * ROWS, ROWS)
                for ref, smem, loaded, freed in streams:
                    pl.when(done >= stages)(functools.partial(plgpu.barrier_wait, freed.at[slot]))
                    plgpu.copy_gmem_to_smem(ref.at[b, keys, kv_head], smem.at[slot], loaded.at[slot])
                return following

            lax.fori_loop(0, count, load_block, block)

        @pl.when(wg < _WARPGROUPS)
        def _consumer():
            plgpu.set_max_registers(sm90.registers(_WARPGROUPS)[0], action="increase")
            token = lax.div(plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=layout), jnp.int32(group))
            for_each_tile(wg, look_up_tile, functools.partial(compute_tile, token, offset_ref[0]))
            plgpu.wait_smem_to_gmem(0)

        @pl.when(wg == _WARPGROUPS)
        def _producer():
            plgpu.set_max_registers(sm90.registers(_WARPGROUPS)[1], action="decrease")

            def serve_consumer(which):
                def look_up(at):
                    return count_ref[*at, 0], block_ref[*at, 0]

                load = functools.partial(load_tile, which)
                pl.when(which < _WARPGROUPS)(lambda: for_each_tile(which, look_up, load))

            plgpu.warp_map(serve_consumer)

    def nsa_selected_forward_tiles(*refs):
        buffer = functools.partial(sm90.tiled, dtype=query.dtype)
        slots, query_slots = _WARPGROUPS * stages, _WARPGROUPS * query_buffers
        barrier = plgpu.Barrier(num_barriers=slots)
        pl.run_scoped(
            lambda buffers, barriers: kernel(*refs, buffers=buffers, barriers=barriers),
            (
                sm90_rows.boxed_tiles(query_slots * parts[0], ROWS, query.dtype),
                buffer(slots, ROWS, h_dim),
                buffer(slots, ROWS, v_dim),
                sm90_rows.boxed_tiles(_WARPGROUPS * parts[1], ROWS, query.dtype),
            ),
            (
                plgpu.Barrier(num_barriers=query_slots, num_arrivals=parts[0]),
                plgpu.Barrier(num_barriers=query_slots),
                *[barrier] * 4,
            ),
            collective_axes="wg",
        )

    out, lse = plgpu.kernel(
        nsa_selected_forward_tiles,
        out_type=[
            jax.ShapeDtypeStruct((batch, length, num_heads, v_dim), query.dtype),
            jax.ShapeDtypeStruct((batch * length * num_heads,), jnp.float32),
        ],
        grid=(programs,),
        grid_names=("program",),
        num_threads=_WARPGROUPS + 1,
        thread_name="wg",
        # Barriers around every access to shared memory are not needed: each warpgroup fences the one it shares, its
        # output.
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
    )(query_offset, *neighbours, *starts, query, key, value)
    return out.reshape(batch, length, num_kv, group, v_dim), lse.reshape(batch, length, num_kv, group)
