"""Forward of range attention in Mosaic GPU with Ampere instructions (mma.sync, cp.async, ldmatrix).

A program has a tile of query rows and visits the key blocks that any of them sees. Scores, weights and the output's
sums stay in registers.
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
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from nsa_jax.ops.kernels import mosaic, sm80
from nsa_jax.ops.kernels.range_attention import sm80_tiles as tiles
from nsa_jax.ops.kernels.range_attention.sm80_tiles import Problem
from nsa_jax.ops.kernels.range_attention.tiles import KnownRanges
from nsa_jax.ops.kernels.sm80 import ACC, ROW, SCALAR
from nsa_jax.ops.kernels.softmax import LN2, LOG2E, MINUS_INFINITY
from nsa_jax.ops.tiles import RangedSm80Config


def _softmax(scores: Any, acc: Any, peak: Any, total: Any, ranges, first_key: ir.Value, scale: float):
    """One step of the running softmax: the weights as pairs of bfloat16, and the scaled acc, peak and total.

    Args:
      scores: [rows, keys], not scaled.
      acc, peak, total: as before the step; each thread has its own part of the total.
      ranges: for each of a thread's rows, the first key it sees and how many, or None where it sees all of the block.
      first_key: the block's.
      scale: of the scores.
    """
    row_tiles: int = scores.shape[0] // sm80.TILE
    columns, dim = scores.shape[1] // 8, acc.shape[1]
    numbers: Any = np.array([sm80.unpair(x) for x in scores.registers.flat], object).reshape(row_tiles, columns, 2, 2)
    sums: Any = np.array([sm80.unpair(x) for x in acc.registers.flat], object).reshape(row_tiles, dim // 8, 2, 2)
    peaks: Any = np.array([sm80.first_of(x) for x in peak.registers.flat], object).reshape(row_tiles, 2)
    totals: Any = np.array([sm80.first_of(x) for x in total.registers.flat], object).reshape(row_tiles, 2)
    own_key = arith.addi(first_key, sm80.thread_column())
    for tile, half in np.ndindex(row_tiles, 2):
        of_row = numbers[tile, :, half]
        if ranges is not None:
            for n, i in np.ndindex(columns, 2):
                seen = sm80.sees(sm80.plus(own_key, n * 8 + i), *ranges[tile, half])
                of_row[n, i] = arith.select(seen, of_row[n, i], sm80.real(-math.inf))
        highest = functools.reduce(functools.partial(sm80.f32, "max.f32"), of_row.flat)
        before = peaks[tile, half]
        now = sm80.f32("max.f32", before, arith.mulf(sm80.across("max.f32", highest), sm80.real(scale)))
        alpha = sm80.f32("ex2.approx.ftz.f32", arith.subf(before, now))
        minus = arith.negf(now)
        for n, i in np.ndindex(columns, 2):
            power = sm80.f32("fma.rn.f32", of_row[n, i], sm80.real(scale), minus)
            of_row[n, i] = sm80.f32("ex2.approx.ftz.f32", power)
        share = functools.reduce(arith.addf, of_row.flat)
        peaks[tile, half], totals[tile, half] = now, sm80.f32("fma.rn.f32", totals[tile, half], alpha, share)
        for n, i in np.ndindex(dim // 8, 2):
            sums[tile, n, half, i] = arith.mulf(sums[tile, n, half, i], alpha)
    weights = [sm80.narrow(*both) for both in numbers.reshape(-1, 2)]
    acc = sm80.array([sm80.pair(*both) for both in sums.reshape(-1, 2)], acc.shape, acc.layout)
    return weights, acc, sm80.row_numbers(peaks, peak.layout), sm80.row_numbers(totals, total.layout)


def _carry_types(problem: Problem):
    """Of the running softmax: acc, peak and total."""
    shapes = ((problem.rows, problem.dim), ACC), ((problem.rows,), ROW), ((problem.rows,), ROW)
    return tuple(plgpu.ShapeDtypeStruct(shape, jnp.float32, layout=layout) for shape, layout in shapes)


def _add(problem: Problem, exact: bool, scores, carry, value_smem, ranges_ref, block, tile, batch):
    """The running softmax after a block of keys."""
    scale = LOG2E / math.sqrt(problem.dim)

    @plgpu.inline_mgpu(
        arg_types=(ACC, (ACC, ROW, ROW), plgpu.RefType(), plgpu.RefType(), (SCALAR,) * 3),
        return_type=_carry_types(problem),
    )
    def add(_, scores, carry, value, ranges, numbers):
        block, tile, batch = (sm80.scalar(x) for x in numbers)
        seen = None if exact else tiles.ranges_of_rows(problem, ranges, tile, batch)
        first_key = sm80.times(block, problem.keys)
        acc, peak, total = carry
        weights, acc, peak, total = _softmax(scores, acc, peak, total, seen, first_key, scale)
        return sm80.add_products(acc, weights, sm80.shared(value), problem.keys), peak, total

    return add(scores, carry, value_smem, ranges_ref, (block, tile, batch))


def _store(problem: Problem, carry, smem, out_ref, lse_ref, tile, place) -> None:
    """Stores the output and its log-sum-exp; the output passes through the queries' place in shared memory."""

    @plgpu.inline_mgpu(arg_types=((ACC, ROW, ROW), (plgpu.RefType(),) * 3, SCALAR, (SCALAR,) * 2))
    def store(_, carry, refs, tile, place):
        acc, peak, total = carry
        smem, out, lse = refs
        where = [sm80.scalar(x) for x in (tile, *place)]
        first = arith.cmpi(arith.CmpIPredicate.eq, sm80.thread_column(), sm80.constant(0))
        sums = acc.registers.reshape(problem.row_tiles, problem.dim // 8, 2)
        words: Any = np.empty(sums.shape, object)
        peaks, totals = (x.registers.reshape(problem.row_tiles, 2) for x in (peak, total))
        for i, half in np.ndindex(problem.row_tiles, 2):
            whole = sm80.across("add.f32", sm80.first_of(totals[i, half]))
            some = arith.cmpf(arith.CmpFPredicate.OGT, whole, sm80.real(0.0))
            safe = arith.select(some, whole, sm80.real(1.0))
            inverse = arith.divf(sm80.real(1.0), safe)
            for n in range(problem.dim // 8):
                both = [arith.mulf(x, inverse) for x in sm80.unpair(sums[i, n, half])]
                words[i, n, half] = sm80.narrow(*both)
            log = arith.addf(sm80.first_of(peaks[i, half]), sm80.f32("lg2.approx.ftz.f32", safe))
            log = arith.select(some, arith.mulf(log, sm80.real(LN2)), sm80.real(-math.inf))
            at = sm80.plus(sm80.thread_row(), i * sm80.TILE + half * 8)
            stores = arith.andi(first, problem.is_row(at, where[0])) if problem.ragged else first
            pointer = sm80.in_global(lse, problem.query_row(at, *where), 4)
            text = "{ .reg .pred p; setp.ne.u32 p, $2, 0; @p st.global.b32 [$0], $1; }"
            operands = [pointer, log, arith.extui(sm80.i32(), stores)]
            sm80.asm(sm80.void(), operands, text, "l,f,r,~{memory}", effects=True)
        tiles.store_rows(problem, words, smem, out, where)

    store(carry, (smem, out_ref, lse_ref), tile, place)


def _kernel(problem: Problem, bounds_ref, ranges_ref, query_ref, key_ref, value_ref, out_ref, lse_ref, *smem):
    query_smem, key_smem, value_smem = smem
    # Late queries see most: they go first, so that the end is short.
    tile = problem.tiles - 1 - lax.axis_index("tile")
    place = lax.axis_index("kv_head"), lax.axis_index("batch")
    bounds = tuple(bounds_ref[place[1], tile, i] for i in range(4))
    keys = tiles.KeyBlocks(problem, ((key_ref, key_smem), (value_ref, value_smem)), bounds, place)

    def scores():
        return tiles.block_products(problem, query_smem, key_smem)

    def add(exact, scores, carry, block):
        return _add(problem, exact, scores, carry, value_smem, ranges_ref, block, tile, place[1])

    tiles.start_queries(problem, query_ref, query_smem, jnp.int32(0), tile, place)
    keys.begin()
    begin = ((problem.rows, problem.dim), ACC, 0.0), ((problem.rows,), ROW, MINUS_INFINITY), ((problem.rows,), ROW, 0.0)
    carry = keys.visit(sm80.filled(*begin), scores, add)
    _store(problem, carry, query_smem, out_ref, lse_ref, tile, place)


def ranged_forward(query, key, value, low, high, config: RangedSm80Config, known: KnownRanges | None = None):
    """As `triton_forward.ranged_forward`, for bfloat16 and H = V of 64 or 128; `known` are the ranges, if known."""
    problem = Problem.of(query, key, config.rows, config.keys)

    def nsa_ranged_forward_sm80(*refs):
        pl.run_scoped(
            lambda *scoped: _kernel(problem, *refs, *scoped),
            plgpu.SMEM((problem.rows, problem.dim), query.dtype),
            *[plgpu.SMEM((problem.keys, problem.dim), query.dtype)] * 2,
            collective_axes="wg",
        )

    return mosaic.call(
        nsa_ranged_forward_sm80,
        (problem.tiles, problem.kv_heads, query.shape[0]),
        ("tile", "kv_head", "batch"),
        [jax.ShapeDtypeStruct(query.shape, query.dtype), jax.ShapeDtypeStruct(query.shape[:3], jnp.float32)],
        problem.bounds(low, high, known),
        problem.row_ranges(low, high),
        query,
        key,
        value,
        warpgroups=1,
    )
