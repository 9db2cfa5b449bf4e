"""Compressed attention's gradients of keys and values in Mosaic GPU from instructions of compute capability 8.0.

A program has 64 keys per warpgroup and visits its share of the query tiles that see any of them. The products are those
of keys with queries, [keys, rows], so that weights and the scores' gradient are in registers as the left matrices of
both sums. Each program writes a float32 share of the sums, and the shares are added in a fixed order.
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
from benchmarks.mosaic_sm80_layouts import ACC, PARAMETERS
from benchmarks.mosaic_sm80_parts import DIM
from benchmarks.mosaic_sm80_tiles import SCALAR, KeyVariant, Problem
from nsa_jax.config import NSAConfig
from nsa_jax.ops.kernels.softmax import LOG2E

LEFT = plgpu.Layout.MMA_LHS(jnp.bfloat16)


def _splits(problem: Problem, batch: int) -> int:
    """Programs that share the query tiles of a block of keys; each has 8 tiles or more."""
    blocks = pl.cdiv(problem.num_keys, problem.variant.keys) * problem.kv_heads * batch
    assert isinstance(problem.variant, KeyVariant)
    return max(1, min(pl.cdiv(problem.variant.programs, blocks), problem.tiles // 8))


def _first_row(problem: Problem, key):
    """The first query row, (token, head), that sees a key."""
    c = problem.config
    return (key * c.compress_stride + (c.compress_block - 1)) * problem.group


def _weights(scores: Any, products: Any, pairs: ir.Value, begin) -> tuple[list[ir.Value], list[ir.Value]]:
    """Weights and the scores' gradient, without the factor of the scores, as pairs of bfloat16.

    Args:
      scores: of keys and query rows, [64, rows], not scaled.
      products: of values and the output's gradient, [64, rows].
      pairs: where minus the log-sum-exp and delta of the rows begin in shared memory.
      begin: for each of a thread's two keys, the first of the rows, less the thread's first column, that sees it, or
        None where all see all keys.
    """
    shape = scores.shape[1] // 8, 2, 2
    score, product = (
        np.array([parts.unpair(x) for x in y.registers.flat], object).reshape(shape) for y in (scores, products)
    )
    address = arith.addi(pairs, parts.times(tiles.thread_column(), 8))
    for n in range(shape[0]):
        rows = parts.load_four(address, n * 64)
        for half, i in np.ndindex(2, 2):
            number = score[n, half, i]
            if begin is not None:
                seen = arith.cmpi(arith.CmpIPredicate.sle, begin[half], parts.constant(n * 8 + i))
                number = arith.select(seen, number, parts.real(-math.inf))
            minus_lse, delta = rows[2 * i : 2 * i + 2]
            power = parts.f32("fma.rn.f32", number, parts.real(LOG2E / math.sqrt(DIM)), minus_lse)
            weight = parts.f32("ex2.approx.ftz.f32", power)
            score[n, half, i] = weight
            product[n, half, i] = arith.mulf(weight, arith.subf(product[n, half, i], delta))
    weights, gradients = ([parts.narrow(*both) for both in x.reshape(-1, 2)] for x in (score, product))
    return weights, gradients


def _start_pairs(problem: Problem, pairs_ref, pairs_smem, slot, tile, place) -> None:
    """Starts the copy of a tile's minus log-sum-exp and delta, in the next group that closes."""
    rows = problem.variant.rows

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), SCALAR, SCALAR, (SCALAR,) * 2))
    def start(_, pairs, smem, slot, tile, place):
        where = [parts.scalar(x) for x in (tile, *place)]
        piece, size = mgpu.thread_idx(), rows * 8
        place_of = arith.addi(parts.times(parts.scalar(slot), size), parts.times(piece, parts.PIECE))
        row = problem.pair_row(parts.times(piece, parts.PIECE // 8), *where)
        # Threads past the last piece have their address kept in the array and copy nothing.
        source = parts.in_global(pairs, arith.divui(row, parts.constant(parts.PIECE // 8)), parts.PIECE)
        text = (
            f"{{ .reg .pred p; setp.lt.u32 p, $2, {size // parts.PIECE}; "
            f"@p cp.async.cg.shared.global [$0], [$1], {parts.PIECE}; }}"
        )
        operands = [arith.addi(parts.shared(smem), place_of), source, piece]
        parts.asm(parts.void(), operands, text, "r,l,r,~{memory}", effects=True)

    start(pairs_ref, pairs_smem, slot, tile, place)


def _begin(problem: Problem, key_smem, value_smem):
    """dk and dv before any row, and keys and values in registers, if they are held."""
    assert isinstance(problem.variant, KeyVariant)
    held = problem.variant.held
    sums = plgpu.ShapeDtypeStruct((parts.TILE, DIM), jnp.float32, layout=ACC)
    left = plgpu.ShapeDtypeStruct((parts.TILE, DIM), jnp.bfloat16, layout=LEFT)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * 2, return_type=((sums, sums), (left, left) if held else ()))
    def make(_, *buffers):
        zeros = tuple(mgpu.FragmentedArray.splat(parts.real(0.0), sums.shape, ACC.to_mgpu()) for _ in range(2))
        return zeros, tuple(parts.whole_rows(parts.left_rows(parts.shared(x), 1), 1) for x in buffers if held)

    return make(key_smem, value_smem)


def _add(problem: Problem, exact: bool, carry, held, buffers, slot, tile, block):
    """dk and dv plus a tile of query rows."""
    variant = problem.variant
    assert isinstance(variant, KeyVariant)
    sums = plgpu.ShapeDtypeStruct((parts.TILE, DIM), jnp.float32, layout=ACC)

    @plgpu.inline_mgpu(
        arg_types=((ACC, ACC), (LEFT,) * len(held), (plgpu.RefType(),) * 5, SCALAR, SCALAR, SCALAR),
        return_type=(sums, sums),
    )
    def add(_, carry, held, buffers, slot, tile, block):
        dk, dv = carry
        key, value, query, grad, pairs = buffers
        slot, tile, block = (parts.scalar(x) for x in (slot, tile, block))
        queries, grads = (tiles.slot_of(x, slot, variant.rows) for x in (query, grad))
        rows = arith.addi(parts.shared(pairs), parts.times(slot, variant.rows * 8))
        if held:
            left_key, left_value = (parts.held_rows(x) for x in held)
        else:
            left_key, left_value = (parts.left_rows(parts.shared(x), 1) for x in (key, value))
        begin = None
        if not exact:
            own = arith.addi(tiles.thread_row(parts.TILE), parts.times(block, variant.keys))
            c = problem.config
            first = parts.plus(parts.times(own, c.compress_stride), c.compress_block - 1)
            first = parts.times(first, problem.group)
            first = arith.subi(arith.subi(first, parts.times(tile, variant.rows)), tiles.thread_column())
            begin = [parts.plus(first, half * 8 * c.compress_stride * problem.group) for half in range(2)]
        for at in range(0, variant.rows, variant.at_once):
            right, right_grad = (parts.plus(x, at * parts.ROW_BYTES) for x in (queries, grads))
            scores = parts.row_products(left_key, right, 1, variant.at_once)
            products = parts.row_products(left_value, right_grad, 1, variant.at_once)
            begin_at = begin and [parts.plus(x, -at) for x in begin]
            weights, gradients = _weights(scores, products, parts.plus(rows, at * 8), begin_at)
            dv = parts.add_products(dv, weights, right_grad, variant.at_once)
            dk = parts.add_products(dk, gradients, right, variant.at_once)
        return dk, dv

    return add(carry, held, buffers, slot, tile, block)


def _store(problem: Problem, carry, dk_ref, dv_ref, block, split, place, batches: int) -> None:
    """Stores a share of dk and dv."""

    @plgpu.inline_mgpu(arg_types=((ACC, ACC), (plgpu.RefType(),) * 2, SCALAR, SCALAR, (SCALAR,) * 2))
    def store(_, carry, refs, block, split, place):
        block, split, kv_head, batch = (parts.scalar(x) for x in (block, split, *place))
        first = arith.addi(tiles.thread_row(parts.TILE), parts.times(block, problem.variant.keys))
        share = arith.addi(parts.times(split, batches), batch)
        column = arith.remui(mgpu.thread_idx(), parts.constant(4))
        for ref, acc, factor in zip(refs, carry, (1 / math.sqrt(DIM), 1.0), strict=True):
            sums = acc.registers.reshape(DIM // 8, 2)
            for half in range(2):
                key = parts.plus(first, half * 8)
                row = arith.addi(parts.times(share, problem.num_keys), key)
                row = arith.addi(parts.times(row, problem.kv_heads), kv_head)
                for n in range(DIM // 8):
                    pointer = parts.in_global(ref, parts.plus(arith.addi(parts.times(row, DIM // 2), column), n * 4), 8)
                    both = [arith.mulf(x, parts.real(factor)) for x in parts.unpair(sums[n, half])]
                    text = (
                        f"{{ .reg .pred p; setp.lt.u32 p, $3, {problem.num_keys}; "
                        "@p st.global.v2.f32 [$0], {$1, $2}; }"
                    )
                    parts.asm(parts.void(), [pointer, *both, key], text, "l,f,f,r,~{memory}", effects=True)

    store(carry, (dk_ref, dv_ref), block, split, place)


def _kernel(problem: Problem, splits: int, batches: int, key_ref, value_ref, *rest):
    variant = problem.variant
    assert isinstance(variant, KeyVariant)
    query_ref, grad_ref, pairs_ref, dk_ref, dv_ref = rest[:5]
    buffers = rest[5:]
    key_smem, value_smem, query_smem, grad_smem, pairs_smem = buffers
    stages = variant.stages
    program = lax.axis_index("program")
    block, split = lax.div(program, jnp.int32(splits)), lax.rem(program, jnp.int32(splits))
    place = lax.axis_index("kv_head"), lax.axis_index("batch")
    rows, count = jnp.int32(variant.rows), problem.tiles
    first = jnp.minimum(lax.div(_first_row(problem, block * variant.keys), rows), count)
    whole = lax.div(_first_row(problem, (block + 1) * variant.keys - 1) + (variant.rows - 1), rows)
    share = lax.div(count - first + (splits - 1), jnp.int32(splits))
    begin = jnp.minimum(first + split * share, count)
    end = jnp.minimum(begin + share, count)
    whole = jnp.clip(whole, begin, end)
    zero = jnp.int32(0)

    def start(slot, tile):
        tile = jnp.clip(tile, 0, jnp.maximum(end - 1, 0))
        _start_pairs(problem, pairs_ref, pairs_smem, slot, tile, place)
        tiles.start_queries(problem, query_ref, query_smem, slot, tile, place)
        tiles.start_queries(problem, grad_ref, grad_smem, slot, tile, place)

    def step(exact, i, carry):
        tiles.wait_copies(2 * (stages - 2))
        start(lax.rem(i - begin + (stages - 1), jnp.int32(stages)), i + (stages - 1))
        slot = lax.rem(i - begin, jnp.int32(stages))
        return _add(problem, exact, carry, held, buffers, slot, i, block)

    tiles.start_keys(problem, key_ref, key_smem, zero, block, place)
    tiles.start_keys(problem, value_ref, value_smem, zero, block, place)
    if variant.held:
        tiles.wait_copies(0)
        carry, held = _begin(problem, key_smem, value_smem)
        tiles.wait_copies(0)
    for tile in range(stages - 1):
        start(jnp.int32(tile), begin + tile)
    if not variant.held:
        carry, held = _begin(problem, key_smem, value_smem)
    carry = lax.fori_loop(begin, whole, functools.partial(step, False), carry)
    carry = lax.fori_loop(whole, end, functools.partial(step, True), carry)
    tiles.wait_copies(0)
    _store(problem, carry, dk_ref, dv_ref, block, split, place, batches)


def key_value_gradients(
    query, key, value, lse, delta, grad_out, *, config: NSAConfig, variant: KeyVariant
) -> tuple[jax.Array, jax.Array]:
    """The gradients of keys and values, as `mosaic_sm80_dq.query_gradient`: bfloat16 [B, M, K, 128] each."""
    problem = Problem.of(query, key, value, config, variant)
    batches = query.shape[0]
    splits = _splits(problem, batches)
    # Held keys and values are in shared memory only before the first query rows, in the same place if these are enough.
    aliased = variant.held and variant.stages * variant.rows >= variant.keys

    def nsa_mosaic_sm80_dkv(*refs):
        def kernel(*scoped):
            both = scoped[-3:-1] if aliased else scoped[:2]
            _kernel(problem, splits, batches, *refs, *both, *scoped[-3:])

        pl.run_scoped(
            kernel,
            *[plgpu.SMEM((1, variant.keys, DIM), query.dtype)] * (0 if aliased else 2),
            *[plgpu.SMEM((variant.stages, variant.rows, DIM), query.dtype)] * 2,
            plgpu.SMEM((variant.stages, variant.rows, 2), jnp.float32),
            collective_axes="wg",
        )

    shape = jax.ShapeDtypeStruct((splits, *key.shape), jnp.float32)
    dk, dv = plgpu.kernel(
        nsa_mosaic_sm80_dkv,
        out_type=[shape, shape],
        grid=(pl.cdiv(problem.num_keys, variant.keys) * splits, problem.kv_heads, batches),
        grid_names=("program", "kv_head", "batch"),
        num_threads=variant.warpgroups,
        thread_name="wg",
        compiler_params=PARAMETERS,
    )(key, value, query, grad_out, tiles.row_pairs(lse, delta, problem.kv_heads))
    return dk.sum(0).astype(key.dtype), dv.sum(0).astype(value.dtype)
