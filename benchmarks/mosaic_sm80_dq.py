"""Compressed attention's gradient of the queries in Mosaic GPU from instructions of compute capability 8.0.

A program has a tile of query rows and visits the key blocks that any of them sees, as in the forward. Of every block it
computes scores and weights again, and the products of the output's gradient with the values.
"""

from __future__ import annotations

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
from nsa_jax.ops.kernels.softmax import LOG2E


def _score_gradients(scores: Any, products: Any, minus_lse: Any, delta: Any, high, first_key: ir.Value, scale: float):
    """The scores' gradient as pairs of bfloat16, without the factor of the scores.

    Args:
      scores: [own rows, keys], not scaled.
      products: of the output's gradient with the values, [own rows, keys].
      minus_lse, delta: [own rows].
      high: for each of a thread's rows, the keys it sees, or None where it sees all of them.
      first_key: number of the first.
      scale: of the scores.
    """
    shape = scores.shape[0] // parts.TILE, scores.shape[1] // 8, 2, 2
    score, product = (
        np.array([parts.unpair(x) for x in y.registers.flat], object).reshape(shape) for y in (scores, products)
    )
    lses, deltas = (
        np.array([parts.first_of(x) for x in y.registers.flat], object).reshape(shape[0], 2) for y in (minus_lse, delta)
    )
    own_key = arith.addi(first_key, tiles.thread_column())
    for tile, n, half, i in np.ndindex(shape):
        number = score[tile, n, half, i]
        if high is not None:
            seen = arith.cmpi(arith.CmpIPredicate.slt, parts.plus(own_key, n * 8 + i), high[tile, half])
            number = arith.select(seen, number, parts.real(-math.inf))
        power = parts.f32("fma.rn.f32", number, parts.real(scale), lses[tile, half])
        weight = parts.f32("ex2.approx.ftz.f32", power)
        difference = arith.subf(product[tile, n, half, i], deltas[tile, half])
        score[tile, n, half, i] = arith.mulf(weight, difference)
    return [parts.narrow(*both) for both in score.reshape(-1, 2)]


def _load_pairs(problem: Problem, pairs_ref, tile, place):
    """Minus the log-sum-exp and delta of the warpgroup's rows."""
    variant = problem.variant
    assert isinstance(variant, Variant)
    kind = plgpu.ShapeDtypeStruct((variant.own_rows,), jnp.float32, layout=ROW)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SCALAR, (SCALAR,) * 2), return_type=(kind, kind))
    def load(_, pairs, tile, place):
        where = [parts.scalar(x) for x in (tile, *place)]
        got = np.empty((2, variant.row_tiles, 2), object)
        for i, half in np.ndindex(got.shape[1:]):
            row = parts.plus(tiles.thread_row(variant.own_rows), i * parts.TILE + half * 8)
            got[:, i, half] = parts.load_pair(parts.in_global(pairs, problem.pair_row(row, *where), 8))
        return tuple(parts.row_numbers(x, ROW.to_mgpu()) for x in got)

    return load(pairs_ref, tile, place)


def _zeros(variant: Variant):
    kind = plgpu.ShapeDtypeStruct((variant.own_rows, DIM), jnp.float32, layout=ACC)

    @plgpu.inline_mgpu(return_type=kind)
    def make(_):
        return mgpu.FragmentedArray.splat(parts.real(0.0), kind.shape, ACC.to_mgpu())

    return make()


def _value_products(problem: Problem, grad_smem, value_smem):
    """Products of the output's gradient with the one block of values in shared memory, [own rows, keys]."""
    variant = problem.variant
    assert isinstance(variant, Variant)
    kind = plgpu.ShapeDtypeStruct((variant.own_rows, variant.keys), jnp.float32, layout=ACC)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * 2, return_type=kind)
    def multiply(_, grad, value):
        left = parts.left_rows(parts.shared(grad), variant.row_tiles)
        return parts.row_products(left, parts.shared(value), variant.row_tiles, variant.keys)

    return multiply(grad_smem, value_smem)


def _add(problem: Problem, exact: bool, acc, rows, products, buffers, slot, block, tile):
    """`acc` plus a block of keys; `products` is None, or what `_value_products` returned for the whole block."""
    variant = problem.variant
    assert isinstance(variant, Variant)
    scale = LOG2E / math.sqrt(DIM)
    at_once = variant.at_once or variant.keys
    given = (ACC,) if products is not None else ()

    @plgpu.inline_mgpu(
        arg_types=(ACC, (ROW, ROW), given, (plgpu.RefType(),) * 4, SCALAR, SCALAR, SCALAR),
        return_type=plgpu.ShapeDtypeStruct((variant.own_rows, DIM), jnp.float32, layout=ACC),
    )
    def add(_, acc, rows, products, buffers, slot, block, tile):
        query, grad, key, value = buffers
        high = None if exact else problem.high(parts.scalar(tile))
        left, left_grad = (parts.left_rows(parts.shared(x), variant.row_tiles) for x in (query, grad))
        keys, values = (tiles.slot_of(x, parts.scalar(slot), variant.keys) for x in (key, value))
        for first in range(0, variant.keys, at_once):
            first_key = parts.plus(parts.times(parts.scalar(block), variant.keys), first)
            right = parts.plus(keys, first * parts.ROW_BYTES)
            scores = parts.row_products(left, right, variant.row_tiles, at_once)
            if products:
                (product,) = products
            else:
                right_value = parts.plus(values, first * parts.ROW_BYTES)
                product = parts.row_products(left_grad, right_value, variant.row_tiles, at_once)
            words = _score_gradients(scores, product, *rows, high, first_key, scale)
            acc = parts.add_products(acc, words, right, at_once)
        return acc

    return add(acc, rows, () if products is None else (products,), buffers, slot, block, tile)


def _store(problem: Problem, acc, smem, out_ref, tile, place) -> None:
    """Stores the gradient through the queries' place in shared memory."""
    variant = problem.variant
    assert isinstance(variant, Variant)

    @plgpu.inline_mgpu(arg_types=(ACC, (plgpu.RefType(),) * 2, SCALAR, (SCALAR,) * 2))
    def store(_, acc, refs, tile, place):
        where = [parts.scalar(x) for x in (tile, *place)]
        sums = acc.registers.reshape(variant.row_tiles, DIM // 8, 2)
        words = np.empty(sums.shape, object)
        for index in np.ndindex(sums.shape):
            both = [arith.mulf(x, parts.real(1 / math.sqrt(DIM))) for x in parts.unpair(sums[index])]
            words[index] = parts.narrow(*both)
        tiles.store_rows(problem, words, *refs, where)

    store(acc, (smem, out_ref), tile, place)


def _kernel(problem: Problem, query_ref, key_ref, value_ref, grad_ref, pairs_ref, out_ref, *buffers):
    variant = problem.variant
    assert isinstance(variant, Variant)
    query_smem, grad_smem, key_smem, value_smem = buffers
    # Late queries see most: they go first, so that the end is short.
    tile = problem.tiles - 1 - lax.axis_index("tile")
    place = lax.axis_index("kv_head"), lax.axis_index("batch")
    keys = tiles.KeyBlocks(problem, ((value_ref, value_smem), (key_ref, key_smem)), tile, place)

    def products(slot):
        # In a ring keys and values are there together, and `_add` takes fewer of both at once.
        return _value_products(problem, grad_smem, value_smem) if variant.stages == 1 else None

    def add(exact, products, acc, slot, block):
        return _add(problem, exact, acc, rows, products, buffers, slot, block, tile)

    for ref, smem in ((query_ref, query_smem), (grad_ref, grad_smem)):
        tiles.start_queries(problem, ref, smem, jnp.int32(0), tile, place)
    keys.begin()
    rows = _load_pairs(problem, pairs_ref, tile, place)
    acc = keys.visit(_zeros(variant), products, add)
    _store(problem, acc, query_smem, out_ref, tile, place)


def query_gradient(query, key, value, lse, delta, grad_out, *, config: NSAConfig, variant: Variant) -> jax.Array:
    """The gradient of the queries of `nsa_jax.compressed_attention`, of rows of one document each: bfloat16 like query.

    Args:
      query: bfloat16 [B, T, N, 128], where T * N / K is a multiple of the variant's rows.
      key, value: bfloat16 [B, M, K, 128].
      lse: float32 [B, T, N], in base 2, or `NO_WEIGHT` for a row that sees nothing.
      delta: sum of the output times its gradient, float32 [B, T, N].
      grad_out: bfloat16 [B, T, N, 128].
      config: of the blocks.
      variant: tile sizes.

    Raises:
      ValueError: the arrays have other sizes.
    """
    problem = Problem.of(query, key, value, config, variant)

    def nsa_mosaic_sm80_dq(*refs):
        pl.run_scoped(
            lambda *scoped: _kernel(problem, *refs, *scoped),
            *[plgpu.SMEM((variant.rows, DIM), query.dtype)] * 2,
            *[plgpu.SMEM((variant.stages, variant.keys, DIM), query.dtype)] * 2,
            collective_axes="wg",
        )

    return plgpu.kernel(
        nsa_mosaic_sm80_dq,
        out_type=jax.ShapeDtypeStruct(query.shape, query.dtype),
        grid=(problem.tiles, problem.kv_heads, query.shape[0]),
        grid_names=("tile", "kv_head", "batch"),
        num_threads=variant.warpgroups,
        thread_name="wg",
        compiler_params=PARAMETERS,
    )(query, key, value, grad_out, tiles.row_pairs(lse, delta, problem.kv_heads))
