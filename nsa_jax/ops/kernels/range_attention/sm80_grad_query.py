"""Range attention's gradient of the queries in Mosaic GPU with Ampere instructions.

A program has a tile of query rows and visits the key blocks that any of them sees, as in the forward. It computes the
scores and weights of every block again, and the products of the output's gradient with the values.
"""

from __future__ import annotations

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
from nsa_jax.ops.kernels.softmax import LOG2E
from nsa_jax.ops.tiles import RangedSm80Config


def _score_gradients(scores: Any, products: Any, minus_lse: Any, delta: Any, ranges, first_key: ir.Value, scale: float):
    """The scores' gradient as pairs of bfloat16, without the factor of the scores.

    Args:
      scores: [rows, keys], not scaled.
      products: of the output's gradient with the values, [rows, keys].
      minus_lse, delta: [rows].
      ranges: for each of a thread's rows, the first key it sees and how many, or None where it sees all of the block.
      first_key: the block's.
      scale: of the scores.
    """
    shape = scores.shape[0] // sm80.TILE, scores.shape[1] // 8, 2, 2
    score: Any
    product: Any
    lses: Any
    deltas: Any
    score, product = (
        np.array([sm80.unpair(x) for x in y.registers.flat], object).reshape(shape) for y in (scores, products)
    )
    lses, deltas = (
        np.array([sm80.first_of(x) for x in y.registers.flat], object).reshape(shape[0], 2) for y in (minus_lse, delta)
    )
    own_key = arith.addi(first_key, sm80.thread_column())
    for tile, n, half, i in np.ndindex(shape):
        number = score[tile, n, half, i]
        if ranges is not None:
            seen = sm80.sees(sm80.plus(own_key, n * 8 + i), *ranges[tile, half])
            number = arith.select(seen, number, sm80.real(-math.inf))
        power = sm80.f32("fma.rn.f32", number, sm80.real(scale), lses[tile, half])
        weight = sm80.f32("ex2.approx.ftz.f32", power)
        difference = arith.subf(product[tile, n, half, i], deltas[tile, half])
        score[tile, n, half, i] = arith.mulf(weight, difference)
    return [sm80.narrow(*both) for both in score.reshape(-1, 2)]


def _load_pairs(problem: Problem, pairs_ref, tile, place):
    """Minus the log-sum-exp and delta of the tile's rows."""
    kind = plgpu.ShapeDtypeStruct((problem.rows,), jnp.float32, layout=ROW)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SCALAR, (SCALAR,) * 2), return_type=(kind, kind))
    def load(_, pairs, tile, place):
        where = [sm80.scalar(x) for x in (tile, *place)]
        got = np.empty((2, problem.row_tiles, 2), object)
        for i, half in np.ndindex(got.shape[1:]):
            row = sm80.plus(sm80.thread_row(), i * sm80.TILE + half * 8)
            pointer = sm80.in_global(pairs, problem.pair_row(row, *where), 8)
            got[:, i, half] = sm80.load_pair(pointer, ir.F32Type.get())
        return tuple(sm80.row_numbers(x, ROW.to_mgpu()) for x in got)

    return load(pairs_ref, tile, place)


def _add(problem: Problem, exact: bool, products, acc, rows, buffers, ranges_ref, block, tile, batch):
    """`acc` plus a block of keys."""
    scale = LOG2E / math.sqrt(problem.dim)

    @plgpu.inline_mgpu(
        arg_types=(ACC, ACC, (ROW, ROW), (plgpu.RefType(),) * 3, (SCALAR,) * 3),
        return_type=plgpu.ShapeDtypeStruct((problem.rows, problem.dim), jnp.float32, layout=ACC),
    )
    def add(_, products, acc, rows, refs, numbers):
        query, key, ranges = refs
        block, tile, batch = (sm80.scalar(x) for x in numbers)
        seen = None if exact else tiles.ranges_of_rows(problem, ranges, tile, batch)
        left = sm80.left_rows(sm80.shared(query), problem.row_tiles, problem.dim)
        scores = sm80.row_products(left, sm80.shared(key), problem.row_tiles, problem.keys, problem.dim)
        minus_lse, delta = rows
        first_key = sm80.times(block, problem.keys)
        words = _score_gradients(scores, products, minus_lse, delta, seen, first_key, scale)
        return sm80.add_products(acc, words, sm80.shared(key), problem.keys)

    return add(products, acc, rows, (*buffers, ranges_ref), (block, tile, batch))


def _store(problem: Problem, acc, smem, out_ref, tile, place) -> None:
    """Stores the gradient through the queries' place in shared memory."""

    @plgpu.inline_mgpu(arg_types=(ACC, (plgpu.RefType(),) * 2, SCALAR, (SCALAR,) * 2))
    def store(_, acc, refs, tile, place):
        smem, out = refs
        where = [sm80.scalar(x) for x in (tile, *place)]
        sums = acc.registers.reshape(problem.row_tiles, problem.dim // 8, 2)
        words, scale = np.empty(sums.shape, object), 1 / math.sqrt(problem.dim)
        for index in np.ndindex(sums.shape):
            both = [arith.mulf(x, sm80.real(scale)) for x in sm80.unpair(sums[index])]
            words[index] = sm80.narrow(*both)
        tiles.store_rows(problem, words, smem, out, where)

    store(acc, (smem, out_ref), tile, place)


def _kernel(problem: Problem, bounds_ref, ranges_ref, query_ref, key_ref, value_ref, grad_ref, pairs_ref, *rest):
    out_ref, query_smem, grad_smem, key_smem, value_smem = rest
    # Late queries see most: they go first, so that the end is short.
    tile = problem.tiles - 1 - lax.axis_index("tile")
    place = lax.axis_index("kv_head"), lax.axis_index("batch")
    bounds = tuple(bounds_ref[place[1], tile, i] for i in range(4))
    keys = tiles.KeyBlocks(problem, ((value_ref, value_smem), (key_ref, key_smem)), bounds, place)

    def products():
        return tiles.block_products(problem, grad_smem, value_smem)

    def add(exact, products, acc, block):
        buffers = query_smem, key_smem
        return _add(problem, exact, products, acc, rows, buffers, ranges_ref, block, tile, place[1])

    for ref, smem in ((query_ref, query_smem), (grad_ref, grad_smem)):
        tiles.start_queries(problem, ref, smem, jnp.int32(0), tile, place)
    keys.begin()
    rows = _load_pairs(problem, pairs_ref, tile, place)
    (acc,) = sm80.filled(((problem.rows, problem.dim), ACC, 0.0))
    acc = keys.visit(acc, products, add)
    _store(problem, acc, query_smem, out_ref, tile, place)


def grad_query(
    query, key, value, grad_out, lse, delta, low, high, config: RangedSm80Config, known: KnownRanges | None = None
) -> jax.Array:
    """As `sm90_grad_query.grad_query`, for bfloat16 and H = V of 64 or 128."""
    problem = Problem.of(query, key, config.rows, config.keys)

    def nsa_ranged_dq_sm80(*refs):
        pl.run_scoped(
            lambda *scoped: _kernel(problem, *refs, *scoped),
            *[plgpu.SMEM((problem.rows, problem.dim), query.dtype)] * 2,
            *[plgpu.SMEM((problem.keys, problem.dim), query.dtype)] * 2,
            collective_axes="wg",
        )

    return mosaic.call(
        nsa_ranged_dq_sm80,
        (problem.tiles, problem.kv_heads, query.shape[0]),
        ("tile", "kv_head", "batch"),
        jax.ShapeDtypeStruct(query.shape, query.dtype),
        problem.bounds(low, high, known),
        problem.row_ranges(low, high),
        query,
        key,
        value,
        grad_out,
        problem.row_pairs(lse, delta),
        warpgroups=1,
    )
