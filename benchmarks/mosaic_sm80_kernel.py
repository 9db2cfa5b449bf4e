"""Compressed attention's forward in Mosaic GPU from instructions of compute capability 8.0: the kernel.

A program has a tile of query rows, (token, head) pairs of one key/value head, and visits the key blocks that any of
them sees. `cp.async` copies queries, keys and values to shared memory, `ldmatrix` takes them from there to registers in
the order of `mma.sync`, and `mgpu.mma` multiplies. Scores, weights and the output's sums stay in registers.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from benchmarks import mosaic_sm80_parts as parts
from benchmarks import mosaic_sm80_tiles as tiles
from benchmarks.mosaic_sm80_layouts import ACC, PARAMETERS, ROW
from benchmarks.mosaic_sm80_parts import DIM
from benchmarks.mosaic_sm80_tiles import SCALAR, Problem, Variant
from nsa_jax.config import NSAConfig
from nsa_jax.ops.kernels.softmax import LN2, LOG2E, MINUS_INFINITY


def _softmax(scores: Any, acc: Any, peak: Any, total: Any, high, first_key: ir.Value, scale: float, variant: Variant):
    """One step of the running softmax: the weights as pairs of bfloat16, and the scaled acc, peak and total.

    Args:
      scores: [own rows, keys], not scaled.
      acc, peak, total: as before the step; each thread has its own part of the total.
      high: for each of a thread's rows, the keys it sees, or None where it sees all of the block.
      first_key: the block's.
    """
    tiles, columns = variant.row_tiles, variant.keys // 8
    numbers = np.array([parts.unpair(x) for x in scores.registers.flat], object).reshape(tiles, columns, 2, 2)
    sums = np.array([parts.unpair(x) for x in acc.registers.flat], object).reshape(tiles, DIM // 8, 2, 2)
    peaks = np.array([parts.first_of(x) for x in peak.registers.flat], object).reshape(tiles, 2)
    totals = np.array([parts.first_of(x) for x in total.registers.flat], object).reshape(tiles, 2)
    own_key = arith.addi(first_key, parts.times(arith.remui(mgpu.thread_idx(), parts.constant(4)), 2))
    for tile, half in np.ndindex(tiles, 2):
        of_row = numbers[tile, :, half]
        if high is not None:
            for n, i in np.ndindex(columns, 2):
                seen = arith.cmpi(arith.CmpIPredicate.slt, parts.plus(own_key, n * 8 + i), high[tile, half])
                of_row[n, i] = arith.select(seen, of_row[n, i], parts.real(-math.inf))
        highest = functools.reduce(functools.partial(parts.f32, "max.f32"), of_row.flat)
        before = peaks[tile, half]
        now = parts.f32("max.f32", before, arith.mulf(parts.across("max.f32", highest), parts.real(scale)))
        alpha = parts.f32("ex2.approx.ftz.f32", arith.subf(before, now))
        minus = arith.negf(now)
        for n, i in np.ndindex(columns, 2):
            of_row[n, i] = parts.f32(
                "ex2.approx.ftz.f32", parts.f32("fma.rn.f32", of_row[n, i], parts.real(scale), minus)
            )
        share = functools.reduce(arith.addf, of_row.flat)
        peaks[tile, half], totals[tile, half] = now, parts.f32("fma.rn.f32", totals[tile, half], alpha, share)
        for n, i in np.ndindex(DIM // 8, 2):
            sums[tile, n, half, i] = arith.mulf(sums[tile, n, half, i], alpha)
    weights = [parts.narrow(*both) for both in numbers.reshape(-1, 2)]
    acc = parts.array([parts.pair(*both) for both in sums.reshape(-1, 2)], acc.shape, acc.layout)
    return weights, acc, parts.row_numbers(peaks, peak.layout), parts.row_numbers(totals, total.layout)


def _begin(variant: Variant):
    """The running softmax before any key: acc, peak and total."""
    rows = variant.own_rows
    kinds = [((rows, DIM), ACC, 0.0), ((rows,), ROW, MINUS_INFINITY), ((rows,), ROW, 0.0)]

    @plgpu.inline_mgpu(return_type=tuple(plgpu.ShapeDtypeStruct(x, jnp.float32, layout=y) for x, y, _ in kinds))
    def make(_):
        return tuple(mgpu.FragmentedArray.splat(parts.real(z), x, y.to_mgpu()) for x, y, z in kinds)

    return make()


def _scores(problem: Problem, query_smem, key_smem, slot):
    """The scores of a block of keys, not scaled."""
    variant = problem.variant
    assert isinstance(variant, Variant)
    shape = variant.own_rows, variant.keys

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), plgpu.RefType(), SCALAR),
        return_type=plgpu.ShapeDtypeStruct(shape, jnp.float32, layout=ACC),
    )
    def multiply(_, query, key, slot):
        left = parts.left_rows(parts.shared(query), variant.row_tiles)
        buffer = tiles.slot_of(key, parts.scalar(slot), variant.keys)
        return parts.row_products(left, buffer, variant.row_tiles, variant.keys)

    return multiply(query_smem, key_smem, slot)


def _add(problem: Problem, exact: bool, scores, carry, value_smem, slot, block, tile):
    """The running softmax after a block of keys."""
    variant = problem.variant
    assert isinstance(variant, Variant)
    rows, scale = variant.own_rows, LOG2E / math.sqrt(DIM)
    shapes = ((rows, DIM), ACC), ((rows,), ROW), ((rows,), ROW)

    @plgpu.inline_mgpu(
        arg_types=(ACC, (ACC, ROW, ROW), plgpu.RefType(), SCALAR, SCALAR, SCALAR),
        return_type=tuple(plgpu.ShapeDtypeStruct(x, jnp.float32, layout=y) for x, y in shapes),
    )
    def add(_, scores, carry, value, slot, block, tile):
        high = None if exact else problem.high(parts.scalar(tile))
        first_key = parts.times(parts.scalar(block), variant.keys)
        weights, acc, peak, total = _softmax(scores, *carry, high, first_key, scale, variant)
        buffer = tiles.slot_of(value, parts.scalar(slot), variant.keys)
        return parts.add_products(acc, weights, buffer, variant.keys), peak, total

    return add(scores, carry, value_smem, slot, block, tile)


def _store(problem: Problem, carry, smem, out_ref, lse_ref, tile, place) -> None:
    """Stores the output and its log-sum-exp; the output passes through the queries' place in shared memory."""
    variant = problem.variant
    assert isinstance(variant, Variant)

    @plgpu.inline_mgpu(arg_types=((ACC, ROW, ROW), (plgpu.RefType(),) * 3, SCALAR, (SCALAR,) * 2))
    def store(_, carry, refs, tile, place):
        acc, peak, total = carry
        smem, out, lse = refs
        where = [parts.scalar(x) for x in (tile, *place)]
        column = arith.remui(mgpu.thread_idx(), parts.constant(4))
        sums = acc.registers.reshape(variant.row_tiles, DIM // 8, 2)
        words = np.empty(sums.shape, object)
        peaks, totals = (x.registers.reshape(variant.row_tiles, 2) for x in (peak, total))
        for i, half in np.ndindex(variant.row_tiles, 2):
            whole = parts.across("add.f32", parts.first_of(totals[i, half]))
            some = arith.cmpf(arith.CmpFPredicate.OGT, whole, parts.real(0.0))
            safe = arith.select(some, whole, parts.real(1.0))
            inverse = arith.divf(parts.real(1.0), safe)
            for n in range(DIM // 8):
                both = [arith.mulf(x, inverse) for x in parts.unpair(sums[i, n, half])]
                words[i, n, half] = parts.narrow(*both)
            log = arith.addf(parts.first_of(peaks[i, half]), parts.f32("lg2.approx.ftz.f32", safe))
            log = arith.select(some, arith.mulf(log, parts.real(LN2)), parts.real(-math.inf))
            at = parts.plus(tiles.thread_row(variant.own_rows), i * parts.TILE + half * 8)
            pointer = parts.in_global(lse, problem.query_row(at, *where), 4)
            text = "{ .reg .pred p; setp.eq.u32 p, $2, 0; @p st.global.b32 [$0], $1; }"
            parts.asm(parts.void(), [pointer, log, column], text, "l,f,r,~{memory}", effects=True)
        tiles.store_rows(problem, words, smem, out, where)

    store(carry, (smem, out_ref, lse_ref), tile, place)


def _kernel(problem: Problem, query_ref, key_ref, value_ref, out_ref, lse_ref, query_smem, key_smem, value_smem):
    variant = problem.variant
    assert isinstance(variant, Variant)
    # Late queries see most: they go first, so that the end is short.
    tile = problem.tiles - 1 - lax.axis_index("tile")
    place = lax.axis_index("kv_head"), lax.axis_index("batch")
    keys = tiles.KeyBlocks(problem, ((key_ref, key_smem), (value_ref, value_smem)), tile, place)

    def scores(slot):
        return _scores(problem, query_smem, key_smem, slot)

    def add(exact, scores, carry, slot, block):
        return _add(problem, exact, scores, carry, value_smem, slot, block, tile)

    tiles.start_queries(problem, query_ref, query_smem, jnp.int32(0), tile, place)
    keys.begin()
    carry = keys.visit(_begin(variant), scores, add)
    _store(problem, carry, query_smem, out_ref, lse_ref, tile, place)


def compressed_forward(query, key, value, *, config: NSAConfig, variant: Variant) -> tuple[jax.Array, jax.Array]:
    """As `nsa_jax.compressed_attention` of rows of one document each.

    Args:
      query: bfloat16 [B, T, N, 128], where T * N / K is a multiple of the variant's rows.
      key, value: bfloat16 [B, M, K, 128].
      config: of the blocks.
      variant: tile sizes.

    Raises:
      ValueError: the arrays have other sizes.
    """
    problem = Problem.of(query, key, value, config, variant)

    def nsa_mosaic_sm80(*refs):
        pl.run_scoped(
            lambda *scoped: _kernel(problem, *refs, *scoped),
            plgpu.SMEM((variant.rows, DIM), query.dtype),
            plgpu.SMEM((variant.stages, variant.keys, DIM), query.dtype),
            plgpu.SMEM((variant.stages, variant.keys, DIM), query.dtype),
            collective_axes="wg",
        )

    return plgpu.kernel(
        nsa_mosaic_sm80,
        out_type=[
            jax.ShapeDtypeStruct(query.shape, query.dtype),
            jax.ShapeDtypeStruct(query.shape[:3], jnp.float32),
        ],
        grid=(problem.tiles, problem.kv_heads, query.shape[0]),
        grid_names=("tile", "kv_head", "batch"),
        num_threads=variant.warpgroups,
        thread_name="wg",
        compiler_params=PARAMETERS,
    )(query, key, value)
