"""Range attention's gradients of keys and values in Mosaic GPU with Ampere instructions.

A program has 64 keys and visits its share of the query tiles that see any of them. The products are those of keys with
queries, [keys, rows], so that weights and the scores' gradient are in registers as the left matrices of both sums. Of
several programs each writes a float32 share of the sums, and the shares are added in a fixed order.
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

from nsa_jax.ops.kernels import mosaic, sm80
from nsa_jax.ops.kernels.range_attention import sm80_tiles as tiles
from nsa_jax.ops.kernels.range_attention.sm80_tiles import Problem
from nsa_jax.ops.kernels.range_attention.tiles import (
    KnownRanges,
    for_batch,
    known_tile_ranges,
    query_tile_ranges,
    splits_for,
)
from nsa_jax.ops.kernels.sm80 import ACC, SCALAR
from nsa_jax.ops.kernels.softmax import LOG2E
from nsa_jax.ops.tiles import RangedSm80KeysConfig

_PAIR_BYTES = 8  # of two numbers of a row


def _weights(scores: Any, products: Any, pairs: ir.Value, ranges: ir.Value | None, key: ir.Value, scale: float):
    """Weights and the scores' gradient, without the factor of the scores, as pairs of bfloat16.

    Args:
      scores: of keys and query rows, [64, rows], not scaled.
      products: of values and the output's gradient, [64, rows].
      pairs: where minus the log-sum-exp and delta of the rows begin in shared memory.
      ranges: where the first key that a row sees and how many begin, or None where all see all keys.
      key: the thread's first; the second is 8 further.
      scale: of the scores.
    """
    shape = scores.shape[1] // 8, 2, 2
    score, product = (
        np.array([sm80.unpair(x) for x in y.registers.flat], object).reshape(shape) for y in (scores, products)
    )
    of_thread = sm80.times(sm80.thread_column(), _PAIR_BYTES)
    pairs = arith.addi(pairs, of_thread)
    seen_at = None if ranges is None else arith.addi(ranges, of_thread)
    for n in range(shape[0]):
        rows = sm80.load_four(pairs, n * 8 * _PAIR_BYTES, ir.F32Type.get())
        sees = None if seen_at is None else sm80.load_four(seen_at, n * 8 * _PAIR_BYTES, sm80.i32())
        for half, i in np.ndindex(2, 2):
            number = score[n, half, i]
            if sees is not None:
                seen = sm80.sees(sm80.plus(key, half * 8), *sees[2 * i : 2 * i + 2])
                number = arith.select(seen, number, sm80.real(-math.inf))
            minus_lse, delta = rows[2 * i : 2 * i + 2]
            weight = sm80.f32("ex2.approx.ftz.f32", sm80.f32("fma.rn.f32", number, sm80.real(scale), minus_lse))
            score[n, half, i] = weight
            product[n, half, i] = arith.mulf(weight, arith.subf(product[n, half, i], delta))
    weights, gradients = ([sm80.narrow(*both) for both in x.reshape(-1, 2)] for x in (score, product))
    return weights, gradients


def _start_vectors(problem: Problem, refs, smem, slot, tile, place) -> None:
    """Starts the copies of a tile's `row_pairs` and `row_ranges`, in the next group that closes."""

    @plgpu.inline_mgpu(arg_types=((plgpu.RefType(),) * 2, (plgpu.RefType(),) * 2, SCALAR, SCALAR, (SCALAR,) * 2))
    def start(_, arrays, buffers, slot, tile, place):
        slot, tile, kv_head, batch = (sm80.scalar(x) for x in (slot, tile, *place))
        zero = sm80.constant(0)
        firsts = problem.pair_row(zero, tile, kv_head, batch), problem.range_row(zero, tile, batch)
        for array, buffer, first in zip(arrays, buffers, firsts, strict=True):
            sm80.copy_pairs(tiles.slot_of(buffer, slot, problem.rows * _PAIR_BYTES), array, first, problem.rows)

    start(refs, smem, slot, tile, place)


def _add(problem: Problem, exact: bool, carry, buffers, slot, block):
    """dk and dv plus a tile of query rows."""
    rows, dim, scale = problem.rows, problem.dim, LOG2E / math.sqrt(problem.dim)
    sums = plgpu.ShapeDtypeStruct((sm80.TILE, dim), jnp.float32, layout=ACC)

    @plgpu.inline_mgpu(
        arg_types=((ACC, ACC), (plgpu.RefType(),) * 6, SCALAR, SCALAR),
        return_type=(sums, sums),
    )
    def add(_, carry, buffers, slot, block):
        dk, dv = carry
        key, value, query, grad, pairs, ranges = buffers
        slot, block = (sm80.scalar(x) for x in (slot, block))
        queries, grads = (tiles.slot_of(x, slot, rows * sm80.row_bytes(dim)) for x in (query, grad))
        of_rows, seen = (tiles.slot_of(x, slot, rows * _PAIR_BYTES) for x in (pairs, ranges))
        left_key, left_value = (sm80.left_rows(sm80.shared(x), 1, dim) for x in (key, value))
        own_key = arith.addi(sm80.thread_row(), sm80.times(block, problem.keys))
        scores = sm80.row_products(left_key, queries, 1, rows, dim)
        products = sm80.row_products(left_value, grads, 1, rows, dim)
        weights, gradients = _weights(scores, products, of_rows, None if exact else seen, own_key, scale)
        dv = sm80.add_products(dv, weights, grads, rows)
        dk = sm80.add_products(dk, gradients, queries, rows)
        return dk, dv

    return add(carry, buffers, slot, block)


def _store(problem: Problem, carry, dk_ref, dv_ref, block, split, place, batches: int) -> None:
    """Stores a share of dk and dv, in float32, or all of it in bfloat16."""
    dim, narrow = problem.dim, dk_ref.dtype == jnp.bfloat16

    @plgpu.inline_mgpu(arg_types=((ACC, ACC), (plgpu.RefType(),) * 2, SCALAR, SCALAR, (SCALAR,) * 2))
    def store(_, carry, refs, block, split, place):
        block, split, kv_head, batch = (sm80.scalar(x) for x in (block, split, *place))
        first = arith.addi(sm80.thread_row(), sm80.times(block, problem.keys))
        share = arith.addi(sm80.times(split, batches), batch)
        column = arith.remui(mgpu.thread_idx(), sm80.constant(4))
        for ref, acc, factor in zip(refs, carry, (1 / math.sqrt(dim), 1.0), strict=True):
            sums = acc.registers.reshape(dim // 8, 2)
            for half in range(2):
                key = sm80.plus(first, half * 8)
                row = arith.addi(sm80.times(share, problem.num_keys), key)
                row = arith.addi(sm80.times(row, problem.kv_heads), kv_head)
                for n in range(dim // 8):
                    number = sm80.plus(arith.addi(sm80.times(row, dim // 2), column), n * 4)
                    both = [arith.mulf(x, sm80.real(factor)) for x in sm80.unpair(sums[n, half])]
                    if narrow:
                        word = mgpu.utils.bitcast(sm80.narrow(*both), sm80.i32())
                        operands, text = [sm80.in_global(ref, number, 4), key, word], "st.global.b32 [$0], $2;"
                        constraints = "l,r,r,~{memory}"
                    else:
                        operands = [sm80.in_global(ref, number, 8), key, *both]
                        text, constraints = "st.global.v2.f32 [$0], {$2, $3};", "l,r,f,f,~{memory}"
                    text = f"{{ .reg .pred p; setp.lt.u32 p, $1, {problem.num_keys}; @p {text} }}"
                    sm80.asm(sm80.void(), operands, text, constraints, effects=True)

    store(carry, (dk_ref, dv_ref), block, split, place)


def _kernel(problem: Problem, stages: int, splits: int, batches: int, seen_ref, *rest):
    key_ref, value_ref, query_ref, grad_ref, *vectors, dk_ref, dv_ref = rest[:8]
    buffers = rest[8:]
    key_smem, value_smem, query_smem, grad_smem, *vectors_smem = buffers
    program = lax.axis_index("program")
    block, split = lax.div(program, jnp.int32(splits)), lax.rem(program, jnp.int32(splits))
    place = lax.axis_index("kv_head"), lax.axis_index("batch")
    first, whole_begin, whole_end, last = (seen_ref[place[1], i, block] for i in range(4))
    share = lax.div(last - first + (splits - 1), jnp.int32(splits))
    begin = jnp.minimum(first + split * share, last)
    end = jnp.minimum(begin + share, last)
    whole_begin = jnp.clip(whole_begin, begin, end)
    whole_end = jnp.clip(whole_end, whole_begin, end)

    def start(slot, tile):
        tile = jnp.clip(tile, 0, jnp.maximum(end - 1, 0))
        _start_vectors(problem, tuple(vectors), tuple(vectors_smem), slot, tile, place)
        tiles.start_queries(problem, query_ref, query_smem, slot, tile, place)
        tiles.start_queries(problem, grad_ref, grad_smem, slot, tile, place)

    def step(exact, i, carry):
        tiles.wait_copies(2 * (stages - 2))
        start(lax.rem(i - begin + (stages - 1), jnp.int32(stages)), i + (stages - 1))
        return _add(problem, exact, carry, buffers, lax.rem(i - begin, jnp.int32(stages)), block)

    tiles.start_keys(problem, key_ref, key_smem, block, place)
    tiles.start_keys(problem, value_ref, value_smem, block, place)
    for tile in range(stages - 1):
        start(jnp.int32(tile), begin + tile)
    carry = sm80.filled(*[((sm80.TILE, problem.dim), ACC, 0.0)] * 2)
    carry = lax.fori_loop(begin, whole_begin, functools.partial(step, False), carry)
    carry = lax.fori_loop(whole_begin, whole_end, functools.partial(step, True), carry)
    carry = lax.fori_loop(whole_end, end, functools.partial(step, False), carry)
    tiles.wait_copies(0)
    _store(problem, carry, dk_ref, dv_ref, block, split, place, batches)


def grad_key_value(
    query, key, value, grad_out, lse, delta, low, high, config: RangedSm80KeysConfig, known: KnownRanges | None = None
) -> tuple[jax.Array, jax.Array]:
    """As `sm90_grad_key_value.grad_key_value`, for bfloat16 and H = V of 64 or 128."""
    rows, stages = config.rows, config.stages
    problem = Problem.of(query, key, rows, sm80.TILE)
    batches, num_rows = query.shape[0], problem.length * problem.group
    splits = config.splits or splits_for(key, value, num_rows, keys=problem.keys, rows=rows)
    if known is None:
        seen = query_tile_ranges(low, high, problem.group, rows, problem.keys, problem.num_keys)
    else:
        seen = for_batch(known_tile_ranges(known, problem.group, rows, problem.keys), batches)

    def nsa_ranged_dkv_sm80(*refs):
        pl.run_scoped(
            lambda *scoped: _kernel(problem, stages, splits, batches, *refs, *scoped),
            *[plgpu.SMEM((problem.keys, problem.dim), query.dtype)] * 2,
            *[plgpu.SMEM((stages, rows, problem.dim), query.dtype)] * 2,
            plgpu.SMEM((stages, rows, 2), jnp.float32),
            plgpu.SMEM((stages, rows, 2), jnp.int32),
            collective_axes="wg",
        )

    share = jax.ShapeDtypeStruct((splits, *key.shape), key.dtype if splits == 1 else jnp.float32)
    dk, dv = mosaic.call(
        nsa_ranged_dkv_sm80,
        (pl.cdiv(problem.num_keys, problem.keys) * splits, problem.kv_heads, batches),
        ("program", "kv_head", "batch"),
        [share, share],
        seen,
        key,
        value,
        query,
        grad_out,
        problem.row_pairs(lse, delta),
        problem.row_ranges(low, high),
        warpgroups=1,
    )
    if splits == 1:
        return dk[0], dv[0]
    return dk.sum(0).astype(key.dtype), dv.sum(0).astype(value.dtype)
