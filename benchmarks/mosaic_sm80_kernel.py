"""Compressed attention's forward in Mosaic GPU from instructions of compute capability 8.0: the kernel.

A program has a tile of query rows, (token, head) pairs of one key/value head, and visits the key blocks that any of
them sees. `cp.async` copies queries, keys and values to shared memory, `ldmatrix` takes them from there to registers in
the order of `mma.sync`, and `mgpu.mma` multiplies. Scores, weights and the output's sums stay in registers.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from benchmarks import mosaic_sm80_parts as parts
from benchmarks.mosaic_sm80_parts import DIM, Variant
from nsa_jax.config import NSAConfig
from nsa_jax.ops.kernels.softmax import LN2, LOG2E, MINUS_INFINITY

ACC = plgpu.Layout.MMA_ACC(jnp.bfloat16)
ROW = ACC.reduce(1)
SCALAR = plgpu.Layout.WG_SPLAT(())


@dataclasses.dataclass(frozen=True)
class _Problem:
    """Sizes, which the parts of the kernel share."""

    length: int
    heads: int
    kv_heads: int
    num_keys: int
    config: NSAConfig
    variant: Variant

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    @property
    def threads(self) -> int:
        return self.variant.warpgroups * parts.THREADS

    def query_row(self, row: ir.Value, tile: ir.Value, kv_head: ir.Value, batch: ir.Value) -> ir.Value:
        """Of a row of a tile, its number in the array [B * T * N, H]."""
        token, head = parts.split(arith.addi(row, parts.times(tile, self.variant.rows)), self.group)
        token = arith.addi(token, parts.times(batch, self.length))
        return arith.addi(arith.addi(parts.times(token, self.heads), parts.times(kv_head, self.group)), head)

    def key_row(self, row: ir.Value, block: ir.Value, kv_head: ir.Value, batch: ir.Value) -> ir.Value:
        """Of a row of a block of keys, its number in the array [B * M * K, H]; past the end it is the last key's."""
        key = arith.minui(arith.addi(row, parts.times(block, self.variant.keys)), parts.constant(self.num_keys - 1))
        key = arith.addi(key, parts.times(batch, self.num_keys))
        return arith.addi(parts.times(key, self.kv_heads), kv_head)

    def high(self, tile: ir.Value) -> np.ndarray:
        """Of each of a thread's rows, the keys it sees, [row tiles, 2]."""
        lane = arith.divui(arith.remui(mgpu.thread_idx(), parts.constant(32)), parts.constant(4))
        first = arith.addi(arith.addi(parts.own_row(), lane), parts.times(parts.warpgroup(), self.variant.own_rows))
        first = arith.addi(first, parts.times(tile, self.variant.rows))
        highs = np.empty((self.variant.row_tiles, 2), object)
        c = self.config
        for i, half in np.ndindex(highs.shape):
            token = arith.divui(parts.plus(first, i * parts.TILE + half * 8), parts.constant(self.group))
            token = parts.plus(token, 1 - c.compress_block + c.compress_stride)
            highs[i, half] = arith.divui(arith.maxsi(token, parts.constant(0)), parts.constant(c.compress_stride))
        return highs


def _start_copies(problem: _Problem, refs, slot, block, place, names: str) -> None:
    """Starts the copy of a block of keys ("k"), of values ("v") or of both, one group each."""
    sources = {"k": refs[:2], "v": refs[2:]}
    keys = problem.variant.keys

    @plgpu.inline_mgpu(arg_types=((plgpu.RefType(),) * 4, SCALAR, SCALAR, (SCALAR,) * 2))
    def start(_, refs, slot, block, place):
        key, key_smem, value, value_smem = refs
        block, where = parts.scalar(block), [parts.scalar(x) for x in place]
        for name, ref, smem in (("k", key, key_smem), ("v", value, value_smem)):
            if name in names:
                buffer = arith.addi(parts.shared(smem), parts.times(parts.scalar(slot), keys * parts.ROW_BYTES))
                parts.copy_rows(buffer, ref, lambda row: problem.key_row(row, block, *where), keys, problem.threads)

    start((*sources["k"], *sources["v"]), slot, block, place)


def _wait_copies(groups: int) -> None:
    @plgpu.inline_mgpu()
    def wait(_):
        parts.wait(groups)

    wait()


def _start_queries(problem: _Problem, query_ref, query_smem, tile, place) -> None:
    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), SCALAR, (SCALAR,) * 2))
    def start(_, query, smem, tile, place):
        where = [parts.scalar(x) for x in (tile, *place)]
        rows = problem.variant.rows
        parts.copy_rows(parts.shared(smem), query, lambda row: problem.query_row(row, *where), rows, problem.threads)

    start(query_ref, query_smem, tile, place)


def _begin(variant: Variant):
    """The running softmax before any key: acc, peak and total."""
    rows = variant.own_rows
    kinds = [((rows, DIM), ACC, 0.0), ((rows,), ROW, MINUS_INFINITY), ((rows,), ROW, 0.0)]

    @plgpu.inline_mgpu(return_type=tuple(plgpu.ShapeDtypeStruct(x, jnp.float32, layout=y) for x, y, _ in kinds))
    def make(_):
        return tuple(mgpu.FragmentedArray.splat(parts.real(z), x, y.to_mgpu()) for x, y, z in kinds)

    return make()


def _scores(problem: _Problem, query_smem, key_smem, slot):
    """The scores of a block of keys, not scaled."""
    variant = problem.variant
    shape = variant.own_rows, variant.keys

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), plgpu.RefType(), SCALAR),
        return_type=plgpu.ShapeDtypeStruct(shape, jnp.float32, layout=ACC),
    )
    def multiply(_, query, key, slot):
        buffer = arith.addi(parts.shared(key), parts.times(parts.scalar(slot), variant.keys * parts.ROW_BYTES))
        return parts.score_products(parts.shared(query), buffer, variant)

    return multiply(query_smem, key_smem, slot)


def _add(problem: _Problem, exact: bool, scores, carry, value_smem, slot, block, tile):
    """The running softmax after a block of keys."""
    variant = problem.variant
    rows, scale = variant.own_rows, LOG2E / math.sqrt(DIM)
    shapes = ((rows, DIM), ACC), ((rows,), ROW), ((rows,), ROW)

    @plgpu.inline_mgpu(
        arg_types=(ACC, (ACC, ROW, ROW), plgpu.RefType(), SCALAR, SCALAR, SCALAR),
        return_type=tuple(plgpu.ShapeDtypeStruct(x, jnp.float32, layout=y) for x, y in shapes),
    )
    def add(_, scores, carry, value, slot, block, tile):
        high = None if exact else problem.high(parts.scalar(tile))
        first_key = parts.times(parts.scalar(block), variant.keys)
        weights, acc, peak, total = parts.softmax(scores, *carry, high, first_key, scale, variant)
        buffer = arith.addi(parts.shared(value), parts.times(parts.scalar(slot), variant.keys * parts.ROW_BYTES))
        return parts.value_products(acc, weights, buffer, variant), peak, total

    return add(scores, carry, value_smem, slot, block, tile)


def _store(problem: _Problem, carry, smem, out_ref, lse_ref, tile, place) -> None:
    """Stores the output and its log-sum-exp; the output passes through the queries' place in shared memory."""
    variant = problem.variant

    @plgpu.inline_mgpu(arg_types=((ACC, ROW, ROW), (plgpu.RefType(),) * 3, SCALAR, (SCALAR,) * 2))
    def store(_, carry, refs, tile, place):
        acc, peak, total = carry
        smem, out, lse = refs
        where = [parts.scalar(x) for x in (tile, *place)]
        lane = arith.remui(mgpu.thread_idx(), parts.constant(32))
        row, column = parts.split(lane, 4)
        own = arith.addi(parts.own_row(), parts.times(parts.warpgroup(), variant.own_rows))
        first = arith.addi(own, row)
        sums = acc.registers.reshape(variant.row_tiles, DIM // 8, 2)
        peaks, totals = (x.registers.reshape(variant.row_tiles, 2) for x in (peak, total))
        base = parts.shared(smem)
        for i, half in np.ndindex(variant.row_tiles, 2):
            whole = parts.across("add.f32", parts.first_of(totals[i, half]))
            some = arith.cmpf(arith.CmpFPredicate.OGT, whole, parts.real(0.0))
            safe = arith.select(some, whole, parts.real(1.0))
            inverse = arith.divf(parts.real(1.0), safe)
            at = parts.plus(first, i * parts.TILE + half * 8)
            for n in range(DIM // 8):
                both = [arith.mulf(x, inverse) for x in parts.unpair(sums[i, n, half])]
                word = mgpu.utils.bitcast(parts.narrow(*both), parts.i32())
                address = arith.addi(base, arith.addi(parts.place_of(at, parts.constant(n)), parts.times(column, 4)))
                parts.asm(parts.void(), [address, word], "st.shared.b32 [$0], $1;", "r,r,~{memory}", effects=True)
            log = arith.addf(parts.first_of(peaks[i, half]), parts.f32("lg2.approx.ftz.f32", safe))
            log = arith.select(some, arith.mulf(log, parts.real(LN2)), parts.real(-math.inf))
            pointer = parts.in_global(lse, problem.query_row(at, *where), 4)
            text = "{ .reg .pred p; setp.eq.u32 p, $2, 0; @p st.global.b32 [$0], $1; }"
            parts.asm(parts.void(), [pointer, log, column], text, "l,f,r,~{memory}", effects=True)
        parts.asm(parts.void(), [], "bar.warp.sync 0xffffffff;", "~{memory}", effects=True)
        row, piece = parts.split(lane, parts.PIECES)
        words = llvm.StructType.get_literal([parts.i32()] * 4)
        for i in range(variant.row_tiles):
            for step in range(0, 16, 2):
                at = parts.plus(arith.addi(own, row), i * parts.TILE + step)
                text = "ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];"
                address = arith.addi(base, parts.place_of(at, piece))
                got = parts.asm(words, [address], text, "=r,=r,=r,=r,r,~{memory}", effects=True)
                words_got = [llvm.extractvalue(parts.i32(), got, [j]) for j in range(4)]
                number = arith.addi(parts.times(problem.query_row(at, *where), parts.PIECES), piece)
                text = "st.global.v4.b32 [$0], {$1, $2, $3, $4};"
                pointer = parts.in_global(out, number, parts.PIECE)
                parts.asm(parts.void(), [pointer, *words_got], text, "l,r,r,r,r,~{memory}", effects=True)

    store(carry, (smem, out_ref, lse_ref), tile, place)


def _kernel(problem: _Problem, query_ref, key_ref, value_ref, out_ref, lse_ref, query_smem, key_smem, value_smem):
    variant = problem.variant
    stages, keys = variant.stages, variant.keys
    # Late queries see most: they go first, so that the end is short.
    tiles = problem.length * problem.group // variant.rows
    tile = tiles - 1 - lax.axis_index("tile")
    place = lax.axis_index("kv_head"), lax.axis_index("batch")
    first_token = lax.div(tile * variant.rows, jnp.int32(problem.group))
    last_token = lax.div(tile * variant.rows + variant.rows - 1, jnp.int32(problem.group))
    lowest, highest = (_visible(problem, token) for token in (first_token, last_token))
    whole, end = lax.div(lowest, jnp.int32(keys)), lax.div(highest + (keys - 1), jnp.int32(keys))
    refs = key_ref, key_smem, value_ref, value_smem
    zero = jnp.int32(0)

    def start(slot, block, names):
        _start_copies(problem, refs, slot, jnp.clip(block, 0, jnp.maximum(end - 1, 0)), place, names)

    def in_turns(exact, i, carry):
        _wait_copies(0)
        start(zero, i, "v")
        scores = _scores(problem, query_smem, key_smem, zero)
        _wait_copies(0)
        start(zero, i + 1, "k")
        return _add(problem, exact, scores, carry, value_smem, zero, i, tile)

    def in_ring(exact, i, carry):
        _wait_copies(2 * (stages - 2))
        ahead = i + stages - 1
        start(lax.rem(ahead, jnp.int32(stages)), ahead, "kv")
        slot = lax.rem(i, jnp.int32(stages))
        scores = _scores(problem, query_smem, key_smem, slot)
        return _add(problem, exact, scores, carry, value_smem, slot, i, tile)

    _start_queries(problem, query_ref, query_smem, tile, place)
    if stages == 1:
        start(zero, zero, "k")
        step = in_turns
    else:
        for block in range(stages - 1):
            start(jnp.int32(block), jnp.int32(block), "kv")
        step = in_ring
    carry = _begin(variant)
    carry = lax.fori_loop(0, whole, functools.partial(step, True), carry)
    carry = lax.fori_loop(whole, end, functools.partial(step, False), carry)
    _wait_copies(0)
    _store(problem, carry, query_smem, out_ref, lse_ref, tile, place)


def _visible(problem: _Problem, token):
    """Compressed blocks that a token sees."""
    c = problem.config
    return lax.div(jnp.maximum(token + (1 - c.compress_block + c.compress_stride), 0), jnp.int32(c.compress_stride))


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
    batch, length, heads, dim = query.shape
    num_keys, kv_heads = key.shape[1:3]
    problem = _Problem(length, heads, kv_heads, num_keys, config, variant)
    if {dim, key.shape[-1], value.shape[-1]} != {DIM} or length * problem.group % variant.rows:
        raise ValueError(f"query={query.shape}, key={key.shape}: {DIM} columns, and rows in whole tiles of {variant}")

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
        grid=(length * problem.group // variant.rows, kv_heads, batch),
        grid_names=("tile", "kv_head", "batch"),
        num_threads=variant.warpgroups,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
    )(query, key, value)
