"""Key-major pass of the selected branch's backward for Hopper, for shares of dq: the counterpart of the Triton kernel
in `selected_backward` for groups of heads that no tile of 64 rows holds a whole number of, 6 heads above all.

A tile has 192 rows, 32 tokens at 6 heads; three warpgroups compute 64 rows each of it against the same 64 keys. The
four warps of one more serve them, each for a quarter of the tile's tokens: TMA copies a token's rows to the tile, and
its share of dq from another one to the buffer.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import lax

from nsa_jax.ops.pallas import lists
from nsa_jax.ops.pallas.common import LOG2E
from nsa_jax.ops.pallas.selected_hopper_backward import (
    MASKED,
    ROWS,
    entry_rows,
    entry_statistics,
    entry_tokens,
    operands,
)
from nsa_jax.ops.target import Target

if TYPE_CHECKING:
    from nsa_jax.ops.pallas.selected_backward import Plan

_WARPGROUPS = 3
_TILE = _WARPGROUPS * ROWS
_STAGES = 3
_OUT_BUFFERS = 2  # for a tile's score gradients, then for its shares of dq
_WARPS = 4  # of the serving warpgroup
_LEAST_CHUNK = 1024
_HIGH_BIT = 7  # in `_seen_keys`: where the second number begins


def serves(query, value, group: int, select_block: int, chunk: int, target: Target) -> bool:
    """Whether this kernel should serve these inputs on `target`; `chunk` is the most list entries of a work item.

    4 rows of 65,536, N=6, K=1, H=64: 2.94 ms, and 0.3 for what is gathered before; the Triton kernel 3.73. Short work
    items, each a program, lose (4 rows of 8,192: 0.57 for 0.47), and so do groups of 4 (1.37 for 1.21 at 32,768).
    """
    return (
        target.is_hopper
        and query.dtype == jnp.bfloat16
        and query.shape[-1] == value.shape[-1] == select_block == ROWS
        and group == 6
        and chunk >= _LEAST_CHUNK
    )


def _seen_keys(block, start, position, num_keys: int) -> jax.Array:
    """The keys [low, high) of its block that each list entry's query sees, as low + (high << `_HIGH_BIT`)."""
    first = block * ROWS
    low = jnp.clip(start - first, 0, ROWS)
    high = jnp.clip(jnp.minimum(position + 1, num_keys) - first, 0, ROWS)
    return low + (high << _HIGH_BIT)


def key_major(step, order, inverted: lists.InvertedLists, tensors, plan: Plan):
    """One step of the pass; arguments and results as `selected_hopper_backward.key_major`."""
    # A jaxlib without GPU support cannot import Mosaic GPU, and must still import the library.
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from nsa_jax.ops.pallas import ranged_hopper_tiles as hopper

    query, d_out, key, value = operands(tensors, plan)
    lse, delta, start = tensors[4:]
    group, num_kv, items = plan.group, plan.num_kv, plan.items
    per_tile = _TILE // group
    per_warp = per_tile // _WARPS
    scale = plan.scale
    # TMA reads from multiples of 16 bytes only, so a tile's statistics begin at an entry that is a multiple of this.
    whole_entries = 4 // math.gcd(4, group)

    pair, list_row = entry_rows(step, plan)
    # The last tile may reach past the last entry, and TMA wants pairs 16 bytes apart or a multiple of that.
    pad = ((0, 0), (0, per_tile + -plan.entries % 4))
    here, block = (jnp.pad(x[list_row], pad) for x in (order, inverted.entry_block))
    token = entry_tokens(step, here, plan)
    low = start.reshape(plan.batch, plan.length)[pair // num_kv, token]
    seen = jnp.repeat(_seen_keys(block, low, token + step[2], plan.num_keys), group, axis=1)
    lse, delta = (entry_statistics(x, pair, token, plan) for x in (lse, delta))

    def kernel(*refs, buffers, barriers):
        step_ref, order_ref, block_ref, begin_ref, end_ref, seen_ref, lse_ref, delta_ref, *arrays = refs
        query_ref, grad_ref, key_ref, value_ref, buffer_ref, dk_ref, dv_ref = arrays
        key_smem, value_smem, query_smem, grad_smem, out_smem, lse_smem, delta_smem, partial_smem = buffers
        keys_loaded, query_loaded, grad_loaded, query_freed, grad_freed, out_filled, out_freed, finished = barriers
        wg = lax.axis_index("wg")
        local_pair, item = lax.axis_index("pair"), lax.axis_index("item")
        pair = step_ref[0] + local_pair
        batch, head = lax.div(pair, jnp.int32(num_kv)), lax.rem(pair, jnp.int32(num_kv))
        row = pair * plan.ranges + step_ref[1]
        begin, end = begin_ref[row, item], end_ref[row, item]
        # The first tile may begin with entries of the item before.
        base = lax.div(begin, jnp.int32(whole_entries)) * whole_entries
        tiles = jnp.where(end > begin, lax.div(end - base + per_tile - 1, jnp.int32(per_tile)), 0)

        @pl.when((wg < _WARPGROUPS) & (tiles > 0))
        def _compute():
            plgpu.set_max_registers(hopper.registers(_WARPGROUPS)[0], action="increase")

            @pl.when(wg == 0)
            def _load_keys():
                index = (batch, pl.ds(block_ref[row, item] * ROWS, ROWS), head)
                plgpu.copy_gmem_to_smem(key_ref.at[index], key_smem, keys_loaded)
                plgpu.copy_gmem_to_smem(value_ref.at[index], value_smem, keys_loaded)

            plgpu.barrier_wait(keys_loaded)
            layout, shape = plgpu.Layout.WGMMA.reduce(0), (ROWS, ROWS)
            own_rows = pl.ds(wg * ROWS, ROWS)

            def mask(weights, tile):
                """Weights [keys, rows] with what a query does not see and rows of other items set to 0."""
                first = (base + tile * per_tile) * group + wg * ROWS
                seen = hopper.load(seen_ref.at[local_pair, pl.ds(first, ROWS)], layout, optimized=False)
                seen = lax.broadcast_in_dim(seen, shape, [1])
                position = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=plgpu.Layout.WGMMA)
                visible = position >= (seen & ((1 << _HIGH_BIT) - 1))
                visible &= position < lax.shift_right_logical(seen, _HIGH_BIT)
                column = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA)
                visible &= (column + first >= begin * group) & (column + first < end * group)
                return jnp.where(visible, weights, 0.0)

            def body(tile, carry):
                dk, dv = carry
                slot = lax.rem(tile, jnp.int32(_STAGES))
                query_rows = hopper.product_rows(query_smem, slot, wg, _WARPGROUPS)
                grad_rows = hopper.product_rows(grad_smem, slot, wg, _WARPGROUPS)
                plgpu.barrier_wait(query_loaded.at[slot])

                def multiply(scores_ref):
                    plgpu.wgmma(scores_ref, key_smem, hopper.transpose(query_rows))
                    return scores_ref[...]

                scores = pl.run_scoped(multiply, plgpu.ACC(shape, jnp.float32))
                row_lse = lax.broadcast_in_dim(hopper.load(lse_smem.at[slot, own_rows], layout), shape, [1])
                weights = jnp.exp2(scores * (scale * LOG2E) - row_lse)
                partial = functools.reduce(jnp.bitwise_or, [partial_smem[slot * _WARPS + i] for i in range(_WARPS)])
                weights = lax.cond(partial != 0, lambda x: mask(x, tile), lambda x: x, weights)
                half = weights.astype(query_ref.dtype)
                plgpu.barrier_wait(grad_loaded.at[slot])

                def multiply_grad(refs):
                    dv_acc, d_weights_ref = refs
                    plgpu.wgmma(dv_acc, half, grad_rows)
                    plgpu.wgmma(d_weights_ref, value_smem, hopper.transpose(grad_rows))

                dv, d_weights = pl.run_state(multiply_grad)((plgpu.ACC.init(dv), plgpu.ACC.init(hopper.zeros(shape))))
                row_delta = lax.broadcast_in_dim(hopper.load(delta_smem.at[slot, own_rows], layout), shape, [1])
                plgpu.barrier_arrive(grad_freed.at[slot])
                d_scores = (weights * (d_weights - row_delta)).astype(query_ref.dtype)

                out = lax.rem(tile, jnp.int32(_OUT_BUFFERS))
                out_rows = hopper.product_rows(out_smem, out, wg, _WARPGROUPS)
                pl.when(tile >= _OUT_BUFFERS)(lambda: plgpu.barrier_wait(out_freed.at[out]))

                def accumulate(refs):
                    dk_acc, share_ref = refs
                    plgpu.wgmma(dk_acc, d_scores, query_rows)
                    out_rows[...] = d_scores  # [keys, rows]
                    plgpu.commit_smem()
                    plgpu.wgmma(share_ref, hopper.transpose(out_rows), key_smem)

                accs = plgpu.ACC.init(dk), plgpu.ACC.init(hopper.zeros((ROWS, plan.head_dim)))
                dk, share = pl.run_state(accumulate)(accs)
                plgpu.barrier_arrive(query_freed.at[slot])
                plgpu.commit_smem()  # all warps' products are done with the score gradients
                out_rows[...] = share.astype(query_ref.dtype)
                plgpu.commit_smem()
                plgpu.barrier_arrive(out_filled.at[out])
                return dk, dv

            carry = hopper.zeros((ROWS, plan.head_dim)), hopper.zeros((ROWS, plan.value_dim))
            dk, dv = lax.fori_loop(0, tiles, body, carry)
            outputs = dk_ref.at[local_pair, item], dv_ref.at[local_pair, item]
            _add_up(wg, (dk * scale, dv), query_smem[2], finished, outputs)

        @pl.when((wg == _WARPGROUPS) & (tiles > 0))
        def _serve():
            plgpu.set_max_registers(hopper.registers(_WARPGROUPS)[1], action="decrease")
            heads = pl.ds(head * group, group)

            def serve_quarter(warp):
                first = warp * per_warp

                def entries_of(tile):
                    """The warp's list entries of a tile; past the item's end they repeat the last one."""
                    at = base + tile * per_tile + first
                    return tuple(order_ref[row, jnp.minimum(at + i, end - 1)] for i in range(per_warp))

                def load(tile, slot, entries):
                    partial = functools.reduce(jnp.bitwise_or, entries) >= MASKED
                    at = base + tile * per_tile
                    partial |= (at < begin) | (end - at < per_tile)
                    partial_smem[slot * _WARPS + warp] = partial.astype(jnp.int32)
                    plgpu.barrier_arrive(query_loaded.at[slot])
                    rows = pl.ds(at * group, _TILE)
                    for i, (ref, smem, row_ref, row_smem, loaded) in enumerate(
                        (
                            (query_ref, query_smem, lse_ref, lse_smem, query_loaded),
                            (grad_ref, grad_smem, delta_ref, delta_smem, grad_loaded),
                        )
                    ):
                        if i:
                            pl.when(tile >= _STAGES)(lambda: plgpu.barrier_wait(grad_freed.at[slot]))
                        for j, entry in enumerate(entries):
                            local = lax.div(entry & (MASKED - 1), jnp.int32(plan.slots))
                            token = step_ref[1] * plan.range_length + local
                            part = hopper.token_rows(smem, slot, first + j, per_tile)
                            plgpu.copy_gmem_to_smem(ref.at[batch, token, heads], part, loaded.at[slot])

                        @pl.when(warp == i)
                        def _statistics(row_ref=row_ref, row_smem=row_smem, loaded=loaded):
                            plgpu.copy_gmem_to_smem(row_ref.at[local_pair, rows], row_smem.at[slot], loaded.at[slot])

                def store(tile, entries):
                    out = lax.rem(tile, jnp.int32(_OUT_BUFFERS))
                    plgpu.barrier_wait(out_filled.at[out])
                    for i, entry in enumerate(entries):
                        place = local_pair * plan.entries + (entry & (MASKED - 1))
                        # What repeats the last entry must not be written over it, nor other items' entries.
                        at = base + tile * per_tile + first + i
                        inside = (at >= begin) & (at < end)
                        place = jnp.where(inside, place, plan.pairs * plan.entries)
                        part = hopper.token_rows(out_smem, out, first + i, per_tile)
                        plgpu.copy_smem_to_gmem(part, buffer_ref.at[place], commit_group=i == per_warp - 1)
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    plgpu.barrier_arrive(out_freed.at[out])

                def serve(tile, entries):
                    following = entries_of(tile + 1)
                    slot = lax.rem(tile, jnp.int32(_STAGES))
                    pl.when(tile >= _STAGES)(lambda: plgpu.barrier_wait(query_freed.at[slot]))
                    pl.when(tile < tiles)(lambda: load(tile, slot, entries))
                    pl.when(tile >= _STAGES)(lambda: store(tile - _STAGES, entries_of(tile - _STAGES)))
                    return following

                lax.fori_loop(0, tiles + _STAGES, serve, entries_of(0))
                plgpu.wait_smem_to_gmem(0)

            plgpu.warp_map(serve_quarter)

    def _add_up(wg, own, sums, finished, outputs):
        """Adds the warpgroups' sums of dk and dv in a fixed order: the first one dk's, the second one dv's."""
        dk, dv = own
        plgpu.barrier_arrive(finished)
        plgpu.barrier_wait(finished)  # nobody needs the queries any more, in whose memory the sums meet

        @pl.when(wg > 0)
        def _give_dk():
            sums.at[wg - 1][...] = dk

        @pl.when(wg != 1)
        def _give_dv():
            sums.at[2 + lax.div(wg, jnp.int32(2))][...] = dv

        plgpu.barrier_arrive(finished)
        plgpu.barrier_wait(finished)
        taken = lambda i: hopper.load(sums.at[i], plgpu.Layout.WGMMA)  # noqa: E731

        @pl.when(wg == 0)
        def _store_dk():
            hopper.store(outputs[0], dk + taken(0) + taken(1))

        @pl.when(wg == 1)
        def _store_dv():
            hopper.store(outputs[1], dv + taken(2) + taken(3))

    def entry(*refs):
        tiled = functools.partial(hopper.tiled, dtype=query.dtype)
        gathered = functools.partial(hopper.gathered_tiles, rows=_TILE, group=group, width=ROWS, dtype=query.dtype)
        vector = plgpu.SMEM((_STAGES, _TILE), jnp.float32)
        sums = hopper.tiled(4, ROWS, ROWS, dtype=jnp.float32)
        barriers = functools.partial(plgpu.Barrier, num_barriers=_STAGES)
        pl.run_scoped(
            lambda buffers, barriers: kernel(*refs, buffers=buffers, barriers=barriers),
            (
                tiled(ROWS, plan.head_dim),
                tiled(ROWS, plan.value_dim),
                gathered(_STAGES, sums),
                gathered(_STAGES),
                gathered(_OUT_BUFFERS),
                vector,
                vector,
                plgpu.SMEM((_STAGES * _WARPS,), jnp.int32),
            ),
            (
                plgpu.Barrier(num_arrivals=2),
                barriers(num_arrivals=per_tile + 1 + _WARPS),
                barriers(num_arrivals=per_tile + 1),
                barriers(num_arrivals=_WARPGROUPS),
                barriers(num_arrivals=_WARPGROUPS),
                plgpu.Barrier(num_arrivals=_WARPGROUPS, num_barriers=_OUT_BUFFERS),
                plgpu.Barrier(num_arrivals=_WARPS, num_barriers=_OUT_BUFFERS),
                plgpu.Barrier(num_arrivals=_WARPGROUPS),
            ),
            collective_axes="wg",
        )

    buffer, dk, dv = plgpu.kernel(
        entry,
        out_type=[
            jax.ShapeDtypeStruct((plan.pairs * plan.entries + 1, group, plan.head_dim), query.dtype),
            *[jax.ShapeDtypeStruct((plan.pairs, items, ROWS, x.shape[-1]), jnp.float32) for x in (key, value)],
        ],
        grid=(items, plan.pairs),
        grid_names=("item", "pair"),
        num_threads=_WARPGROUPS + 1,
        thread_name="wg",
        # Barriers around every access to shared memory would be six per tile; those of the three fences are enough.
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
    )(step, order, inverted.block, inverted.begin, inverted.end, seen, lse, delta, query, d_out, key, value)
    return tuple(x.reshape(-1, x.shape[-1]) for x in (buffer, dk, dv))
