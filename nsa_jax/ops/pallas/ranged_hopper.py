"""Forward of ranged attention for Hopper: two warpgroups compute, a third feeds them keys and values through TMA.

The Triton kernel leaves the matrix units idle while it takes exponentials. Here two warpgroups of 64 query rows take
turns: one multiplies while the other does its softmax, so that both units stay busy.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from nsa_jax.ops.pallas import tuning
from nsa_jax.ops.pallas.common import LN2, LOG2E
from nsa_jax.ops.target import Target

# Two warpgroups of 64 rows, the height of a warpgroup's matrix product.
_WARPGROUPS, _ROWS = 2, 64
_TILE_ROWS = _WARPGROUPS * _ROWS


def serves(query, value, target: Target) -> bool:
    """Whether this kernel can serve these inputs on `target`."""
    dims = (query.shape[-1], value.shape[-1])
    return target.is_hopper and query.dtype == jnp.bfloat16 and all(d in (64, 128, 192) for d in dims)


def tile_bounds(low, high, tokens_per_tile: int, keys: int) -> jax.Array:
    """Key blocks that each query tile walks: int32 [B, tiles, 4], (begin, exact_begin, exact_end, end).

    Blocks [exact_begin, exact_end) are seen whole by every row, the others need a mask. `low` and `high` are int32
    [B, rows] with a multiple of `tokens_per_tile` rows; rows that see nothing have high = 0 and a low that is at least
    any other row's high.
    """
    batch = low.shape[0]
    low, high = (x.reshape(batch, -1, tokens_per_tile) for x in (low, high))
    begin = low.min(-1) // keys
    end = jnp.maximum(-(-high.max(-1) // keys), begin)
    exact_begin = jnp.clip(-(-low.max(-1) // keys), begin, end)
    exact_end = jnp.clip(high.min(-1) // keys, exact_begin, end)
    return jnp.stack([begin, exact_begin, exact_end, end], -1).astype(jnp.int32)


def _transpose(ref):
    """A transposed view of a 2D ref."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    return ref.transpose((1, 0)) if hasattr(ref, "transpose") else plgpu.transpose_ref(ref, (1, 0))


def ranged_forward(query, key, value, low, high, config: tuning.RangedHopperConfig):
    """As `ranged.ranged_forward`."""
    keys, stages = config.keys, config.stages
    from jax.experimental.pallas import mosaic_gpu as plgpu

    batch, length, heads, h_dim = query.shape
    num_keys, kv_heads, v_dim = value.shape[1:]
    group = heads // kv_heads
    # A token's heads lie together in memory: with whole multiples of 8 rows they are copied straight into the tile.
    direct = group % 8 == 0 and _ROWS % group == 0
    num_rows = length * group
    tiles = pl.cdiv(num_rows, _TILE_ROWS)
    pad = tiles * _TILE_ROWS - num_rows
    row_low, row_high = (
        jnp.pad(jnp.repeat(x, group, axis=1), ((0, 0), (0, pad)), constant_values=fill)
        for x, fill in ((low, num_keys), (high, 0))
    )
    bounds = tile_bounds(row_low, row_high, _TILE_ROWS, keys)
    if not direct:  # [B, K, T * G, H]: any group size has contiguous rows
        query = query.reshape(batch, length, kv_heads, group, h_dim).swapaxes(1, 2)
        query = jnp.pad(query.reshape(batch, kv_heads, num_rows, h_dim), ((0, 0), (0, 0), (0, pad), (0, 0)))
    if num_keys % 8:  # TMA copies swizzled tiles of 8 rows
        key, value = (jnp.pad(x, ((0, 0), (0, -num_keys % 8), (0, 0), (0, 0))) for x in (key, value))
    scale = LOG2E / math.sqrt(h_dim)
    tokens = _ROWS // group if direct else 1
    shared_out = h_dim == v_dim  # the query's buffer takes the output

    def kernel(*refs_and_scratch):
        bounds_ref, low_ref, high_ref, query_ref, key_ref, value_ref, out_ref, lse_ref, *scratch = refs_and_scratch
        buffers, loaded, freed, turn = scratch
        query_smem2, out_smem2, key_smem, value_smem, low_smem2, high_smem2, lse_smem2 = buffers
        query_loaded, key_loaded, value_loaded = loaded
        key_freed, value_freed = freed
        batch_index, kv_head = lax.axis_index("batch"), lax.axis_index("kv_head")
        tile = tiles - 1 - lax.axis_index("tile")
        wg = lax.axis_index("wg")
        begin, exact_begin, exact_end, end = (bounds_ref[batch_index, tile, i] for i in range(4))

        def take_turns():
            plgpu.barrier_arrive(turn)
            plgpu.barrier_wait(turn)

        def for_tokens(base, copy):
            """Runs copy(tile rows, index into [B, T, N, ...] or [B, K, rows, ...])."""
            if not direct:
                copy(pl.ds(0, _ROWS), (batch_index, kv_head, pl.ds(base, _ROWS)), None)
                return
            for i in range(tokens):
                token = lax.div(base, jnp.int32(group)) + i
                copy(pl.ds(i * group, group), (batch_index, token, pl.ds(kv_head * group, group)), token)

        @pl.when(wg < _WARPGROUPS)
        def _compute():
            plgpu.set_max_registers(232, action="increase")
            query_smem, low_smem, high_smem = query_smem2.at[wg], low_smem2.at[wg], high_smem2.at[wg]
            out_smem, lse_smem = (query_smem2 if shared_out else out_smem2).at[wg], lse_smem2.at[wg]
            base = tile * _TILE_ROWS + wg * _ROWS

            def load(rows, index, token):
                if token is not None:  # past the end: any rows, their range is empty
                    index = (index[0], jnp.minimum(token, length - 1), index[2])
                plgpu.copy_gmem_to_smem(query_ref.at[index], query_smem.at[rows], query_loaded.at[wg])

            for_tokens(base, load)
            plgpu.copy_gmem_to_smem(low_ref.at[batch_index, pl.ds(base, _ROWS)], low_smem, query_loaded.at[wg])
            plgpu.copy_gmem_to_smem(high_ref.at[batch_index, pl.ds(base, _ROWS)], high_smem, query_loaded.at[wg])
            plgpu.barrier_wait(query_loaded.at[wg])
            row_layout = plgpu.Layout.WGMMA.reduce(1)

            def filled(shape, fill, layout):
                return plgpu.layout_cast(jnp.full(shape, fill, jnp.float32), layout)

            acc = filled((_ROWS, v_dim), 0.0, plgpu.Layout.WGMMA)
            # Finite, so that a row that has seen nothing yet gets weights exp2(-inf - peak) = 0 and not NaN.
            peak = filled((_ROWS,), -1e30, row_layout)
            total = filled((_ROWS,), 0.0, row_layout)
            pl.when(end > begin)(lambda: plgpu.barrier_wait(key_loaded.at[0]))
            pl.when(wg == 1)(take_turns)

            def step(exact, i, carry):
                acc, peak, total = carry
                slot = lax.rem(i - begin, jnp.int32(stages))

                def multiply(acc_ref):
                    plgpu.wgmma(acc_ref, query_smem, _transpose(key_smem.at[slot]))
                    take_turns()
                    return acc_ref[...]

                scores = pl.run_scoped(multiply, plgpu.ACC((_ROWS, keys), jnp.float32))
                plgpu.barrier_arrive(key_freed.at[slot])
                if not exact:
                    row_low = _load(low_smem, row_layout)
                    row_high = _load(high_smem, row_layout)
                    position = plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=plgpu.Layout.WGMMA) + i * keys
                    visible = position >= lax.broadcast_in_dim(row_low, scores.shape, [0])
                    visible &= position < lax.broadcast_in_dim(row_high, scores.shape, [0])
                    scores = jnp.where(visible, scores, -jnp.inf)
                new_peak = jnp.maximum(peak, scores.max(axis=1) * scale)
                alpha = jnp.exp2(peak - new_peak)
                weights = jnp.exp2(scores * scale - lax.broadcast_in_dim(new_peak, scores.shape, [0]))
                acc *= lax.broadcast_in_dim(alpha, acc.shape, [0])
                half = weights.astype(query_ref.dtype)
                total = total * alpha + weights.sum(axis=1)
                acc, total, new_peak, half = lax.optimization_barrier((acc, total, new_peak, half))
                plgpu.barrier_arrive(turn)  # done with the softmax
                plgpu.barrier_wait(value_loaded.at[slot])
                plgpu.barrier_wait(turn)  # until the other warpgroup has issued its product

                def accumulate(acc_ref):
                    plgpu.wgmma(acc_ref, half, value_smem.at[slot])
                    following = lax.rem(i + 1 - begin, jnp.int32(stages))
                    pl.when(i + 1 < end)(lambda: plgpu.barrier_wait(key_loaded.at[following]))

                acc = pl.run_state(accumulate)(plgpu.ACC.init(acc))
                plgpu.barrier_arrive(value_freed.at[slot])
                return acc, new_peak, total

            carry = (acc, peak, total)
            carry = lax.fori_loop(begin, exact_begin, functools.partial(step, False), carry)
            carry = lax.fori_loop(exact_begin, exact_end, functools.partial(step, True), carry)
            acc, peak, total = lax.fori_loop(exact_end, end, functools.partial(step, False), carry)
            pl.when(wg == 0)(take_turns)
            seen = total > 0
            safe = jnp.where(seen, total, 1.0)
            acc /= lax.broadcast_in_dim(safe, acc.shape, [0])
            out_smem[...] = acc.astype(out_ref.dtype)
            lse_smem[...] = jnp.where(seen, peak * LN2 + jnp.log(safe), -jnp.inf)
            plgpu.commit_smem()

            def store(rows, index, token):
                copy = functools.partial(plgpu.copy_smem_to_gmem, out_smem.at[rows], out_ref.at[index])
                if token is None or length % tokens == 0:
                    copy()
                else:
                    pl.when(token < length)(copy)

            for_tokens(base, store)
            plgpu.copy_smem_to_gmem(lse_smem, lse_ref.at[batch_index, kv_head, pl.ds(base, _ROWS)])
            plgpu.wait_smem_to_gmem(0)

        @pl.when(wg == _WARPGROUPS)
        def _feed():
            plgpu.set_max_registers(40, action="decrease")

            def load(i, _):
                step = i - begin
                slot = lax.rem(step, jnp.int32(stages))
                index = (batch_index, pl.ds(i * keys, keys), kv_head)
                pl.when(step >= stages)(lambda: plgpu.barrier_wait(key_freed.at[slot]))
                plgpu.copy_gmem_to_smem(key_ref.at[index], key_smem.at[slot], key_loaded.at[slot])
                pl.when(step >= stages)(lambda: plgpu.barrier_wait(value_freed.at[slot]))
                plgpu.copy_gmem_to_smem(value_ref.at[index], value_smem.at[slot], value_loaded.at[slot])

            lax.fori_loop(begin, end, load, None)

    def _load(ref, layout):
        try:
            return plgpu.load(ref, layout=layout)
        except TypeError:  # JAX before 0.11 takes an index
            return plgpu.load(ref, (), layout=layout)

    def entry(*refs):
        transforms = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))

        def tiled(*shape):
            return plgpu.SMEM(shape, query.dtype, transforms=transforms)

        def barriers(count, arrivals=1):
            return plgpu.Barrier(num_barriers=count, num_arrivals=arrivals)

        pl.run_scoped(
            lambda *scoped: kernel(*refs, *scoped),
            (
                tiled(_WARPGROUPS, _ROWS, h_dim),
                None if shared_out else tiled(_WARPGROUPS, _ROWS, v_dim),
                tiled(stages, keys, h_dim),
                tiled(stages, keys, v_dim),
                plgpu.SMEM((_WARPGROUPS, _ROWS), jnp.int32),
                plgpu.SMEM((_WARPGROUPS, _ROWS), jnp.int32),
                plgpu.SMEM((_WARPGROUPS, _ROWS), jnp.float32),
            ),
            (barriers(_WARPGROUPS, tokens + 2), barriers(stages), barriers(stages)),
            (barriers(stages, _WARPGROUPS), barriers(stages, _WARPGROUPS)),
            plgpu.Barrier(num_arrivals=_WARPGROUPS),
            collective_axes="wg",
        )

    out, lse = plgpu.kernel(
        entry,
        out_type=[
            jax.ShapeDtypeStruct((*query.shape[:3], v_dim), query.dtype),
            jax.ShapeDtypeStruct((batch, kv_heads, tiles * _TILE_ROWS), jnp.float32),
        ],
        grid=(tiles, kv_heads, batch),
        grid_names=("tile", "kv_head", "batch"),
        num_threads=_WARPGROUPS + 1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
    )(bounds, row_low, row_high, query, key, value)
    lse = lse[..., :num_rows].reshape(batch, kv_heads, length, group)
    lse = lse.swapaxes(1, 2).reshape(batch, length, heads)
    if not direct:
        out = out[:, :, :num_rows].reshape(batch, kv_heads, length, group, v_dim)
        out = out.swapaxes(1, 2).reshape(batch, length, heads, v_dim)
    return out, lse
