"""What `mosaic_sm80_kernel` is made of: instructions of compute capability 8.0 and what one step does with them.

Shared memory holds rows of 256 bytes, 16 pieces of 16 bytes. Piece c of row r lies where c ^ (r % 8) would, so that
neither the 8 rows that `ldmatrix` reads at once nor the copies meet in a bank.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

DIM = 128  # columns of queries, keys and values
ROW_BYTES = DIM * 2  # bytes
PIECE = 16  # bytes of one copy
PIECES = ROW_BYTES // PIECE
TILE = 64  # rows that the four warps of a warpgroup multiply at once
THREADS = 128  # of a warpgroup
_PAIR = 16  # columns that one ldmatrix of four matrices covers


@dataclasses.dataclass(frozen=True)
class Variant:
    """Tile sizes.

    Attributes:
      row_tiles: groups of 64 query rows of a warpgroup.
      warpgroups: of a program.
      keys: keys per block.
      stages: blocks of keys and values in shared memory. With one, keys and values are copied in turns.
    """

    row_tiles: int
    warpgroups: int
    keys: int
    stages: int

    @property
    def name(self) -> str:
        return f"rows{self.rows}_wg{self.warpgroups}_keys{self.keys}_stages{self.stages}"

    @property
    def own_rows(self) -> int:
        """Query rows of a warpgroup."""
        return self.row_tiles * TILE

    @property
    def rows(self) -> int:
        """Query rows of a program."""
        return self.own_rows * self.warpgroups


def i32() -> ir.Type:
    return ir.IntegerType.get_signless(32)


def constant(number: int) -> ir.Value:
    return mgpu.c(number, i32())


def plus(a: ir.Value, number: int) -> ir.Value:
    return arith.addi(a, constant(number)) if number else a


def times(a: ir.Value, number: int) -> ir.Value:
    return arith.muli(a, constant(number))


def split(a: ir.Value, number: int) -> tuple[ir.Value, ir.Value]:
    """Quotient and remainder by a constant."""
    return arith.divui(a, constant(number)), arith.remui(a, constant(number))


def asm(result, operands, text: str, constraints: str, effects: bool = False):
    return llvm.inline_asm(result, operands, text, constraints, has_side_effects=effects, asm_dialect=0)


def void() -> ir.Type:
    return ir.Type.parse("!llvm.void")


def f32(text: str, *operands: ir.Value) -> ir.Value:
    """A float32 instruction."""
    places = ", ".join(f"${i}" for i in range(len(operands) + 1))
    return asm(ir.F32Type.get(), list(operands), f"{text} {places};", ",".join(["=f"] + ["f"] * len(operands)))


def real(number: float) -> ir.Value:
    return mgpu.c(number, ir.F32Type.get())


def scalar(number) -> ir.Value:
    """The register of a number that all threads share."""
    return number.registers.item()


def _array(registers, shape: tuple[int, ...], layout: Any) -> Any:
    """A register array of a thread's registers in the layout's order."""
    shaped = np.empty(layout.registers_shape(shape), object)
    shaped.flat[:] = registers
    return mgpu.FragmentedArray(_registers=shaped, _layout=layout, _is_signed=None)


def _pair(first: ir.Value, second: ir.Value) -> ir.Value:
    """Two float32 numbers as one vector register."""
    both = llvm.mlir_undef(ir.VectorType.get((2,), ir.F32Type.get()))
    both = llvm.insertelement(both, first, position=constant(0))
    return llvm.insertelement(both, second, position=constant(1))


def unpair(both: ir.Value) -> list[ir.Value]:
    return [llvm.extractelement(both, constant(i)) for i in range(2)]


def shared(ref) -> ir.Value:
    """Where a buffer begins in shared memory."""
    return llvm.ptrtoint(i32(), mgpu.utils.memref_ptr(ref))


def in_global(ref, element: ir.Value, size: int) -> ir.Value:
    """Pointer to an element, by its number and size in bytes, of an array in global memory."""
    base = llvm.addrspacecast(llvm.PointerType.get(1), mgpu.utils.memref_ptr(ref))
    offset = arith.extui(ir.IntegerType.get_signless(64), element)
    return mgpu.utils.getelementptr(base, [offset], ir.Type.parse(f"!llvm.array<{size} x i8>"))


def place_of(row: ir.Value, piece: ir.Value) -> ir.Value:
    """Offset in bytes of a piece of a row in shared memory."""
    return arith.addi(times(row, ROW_BYTES), times(arith.xori(piece, arith.remui(row, constant(8))), PIECE))


def copy_rows(buffer: ir.Value, ref, row_of, rows: int, threads: int) -> None:
    """Starts copies of rows of 128 columns to shared memory, each thread its pieces, and closes the group.

    Args:
      buffer: where the first row goes.
      ref: an array in global memory.
      row_of: row of the buffer -> row of the array, whose last dimension is the columns.
      rows: how many.
      threads: of the program.
    """
    at_once = threads // PIECES
    row, piece = split(mgpu.thread_idx(), PIECES)
    place = arith.addi(buffer, place_of(row, piece))
    for first in range(0, rows, at_once):
        number = arith.addi(times(row_of(plus(row, first)), PIECES), piece)
        source = in_global(ref, number, PIECE)
        text = f"cp.async.cg.shared.global [$0 + {first * ROW_BYTES}], [$1], {PIECE};"
        asm(void(), [place, source], text, "r,l,~{memory}", effects=True)
    asm(void(), [], "cp.async.commit_group;", "~{memory}", effects=True)


def wait(groups: int) -> None:
    """Waits for all but the last groups of copies of every thread of the program."""
    asm(void(), [], f"cp.async.wait_group {groups}; bar.sync 0;", "~{memory}", effects=True)


def _ldmatrix(address: ir.Value, offset: int, transposed: bool) -> list[ir.Value]:
    """Four matrices of 8 by 8; each thread names a row of one of them."""
    words = llvm.StructType.get_literal([i32()] * 4)
    kind = ".trans" if transposed else ""
    text = f"ldmatrix.sync.aligned.m8n8.x4{kind}.shared.b16 {{$0, $1, $2, $3}}, [$4 + {offset}];"
    got = asm(words, [address], text, "=r,=r,=r,=r,r,~{memory}", effects=True)
    return [llvm.extractvalue(i32(), got, [i]) for i in range(4)]


def _lane() -> tuple[ir.Value, ir.Value, ir.Value]:
    """(row in a matrix, bit 0 and bit 1 of the number of the matrix) that a thread names to `_ldmatrix`."""
    lane = arith.remui(mgpu.thread_idx(), constant(32))
    matrix, row = split(lane, 8)
    second, first = split(matrix, 2)
    return row, first, second


def _addresses(base: ir.Value, row: ir.Value, bit: ir.Value, within: ir.Value) -> list[ir.Value]:
    """Of each pair of pieces, the piece `bit` of it in a row whose number in its 8 rows is `within`."""
    offset = arith.addi(times(row, ROW_BYTES), times(arith.xori(bit, within), PIECE))
    return [
        arith.addi(base, arith.xori(offset, constant(pair * 2 * PIECE)) if pair else offset)
        for pair in range(PIECES // 2)
    ]


def _halves(words: list[ir.Value]) -> list[ir.Value]:
    """Words as pairs of bfloat16."""
    return [mgpu.utils.bitcast(word, ir.VectorType.get((2,), ir.BF16Type.get())) for word in words]


def own_row() -> ir.Value:
    """The first row of a warp in its warpgroup's 64."""
    return times(arith.remui(arith.divui(mgpu.thread_idx(), constant(32)), constant(4)), 16)


def warpgroup() -> ir.Value:
    return arith.divui(mgpu.thread_idx(), constant(THREADS))


def score_products(query: ir.Value, key: ir.Value, variant: Variant) -> Any:
    """Products of the warpgroup's query rows with a block of keys, both in shared memory: [own rows, keys]."""
    layouts = mgpu.MMALayouts(ir.BF16Type.get())
    rows, keys = variant.own_rows, variant.keys
    row, first, second = _lane()
    query_row = arith.addi(own_row(), arith.addi(times(first, 8), row))
    query_row = arith.addi(query_row, times(warpgroup(), rows))
    query_at = _addresses(query, query_row, second, row)
    key_at = _addresses(key, arith.addi(times(second, 8), row), first, row)
    scores = mgpu.FragmentedArray.splat(real(0.0), (rows, keys), layouts.acc)
    for k in range(DIM // _PAIR):
        words = [_ldmatrix(query_at[k], tile * TILE * ROW_BYTES, False) for tile in range(variant.row_tiles)]
        left = _array(_halves([x for part in words for x in part]), (rows, _PAIR), layouts.lhs)
        words = [_ldmatrix(key_at[k], n * ROW_BYTES, False) for n in range(0, keys, _PAIR)]
        right = _array(_halves([x for part in words for x in part]), (_PAIR, keys), layouts.rhs)
        scores = mgpu.mma(scores, left, right)
    return scores


def value_products(acc: Any, weights: list[ir.Value], value: ir.Value, variant: Variant) -> Any:
    """`acc` plus weights, pairs of bfloat16 in the order of scores, times a block of values in shared memory."""
    layouts = mgpu.MMALayouts(ir.BF16Type.get())
    rows, keys = variant.own_rows, variant.keys
    left = _array(weights, (rows, keys), layouts.lhs)
    row, first, second = _lane()
    value_at = _addresses(value, arith.addi(times(first, 8), row), second, row)
    acc = acc.copy()
    for k in range(0, keys, _PAIR):
        for n in range(DIM // _PAIR):
            right = _array(_halves(_ldmatrix(value_at[n], k * ROW_BYTES, True)), (_PAIR, _PAIR), layouts.rhs)
            columns = slice(n * _PAIR, (n + 1) * _PAIR)
            acc[:, columns] = mgpu.mma(acc[:, columns], left[:, k : k + _PAIR], right)
    return acc


def across(text: str, number: ir.Value) -> ir.Value:
    """Reduces over the four threads that share a row."""
    for distance in (1, 2):
        number = f32(text, number, mgpu.utils.shfl_bfly(number, distance))
    return number


def softmax(scores: Any, acc: Any, peak: Any, total: Any, high, first_key: ir.Value, scale: float, variant: Variant):
    """One step of the running softmax: the weights as pairs of bfloat16, and the scaled acc, peak and total.

    Args:
      scores: [own rows, keys], not scaled.
      acc, peak, total: as before the step; each thread has its own part of the total.
      high: for each of a thread's rows, the keys it sees, or None where it sees all of the block.
      first_key: the block's.
    """
    tiles, columns = variant.row_tiles, variant.keys // 8
    numbers = np.array([unpair(x) for x in scores.registers.flat], object).reshape(tiles, columns, 2, 2)
    sums = np.array([unpair(x) for x in acc.registers.flat], object).reshape(tiles, DIM // 8, 2, 2)
    peaks = np.array([first_of(x) for x in peak.registers.flat], object).reshape(tiles, 2)
    totals = np.array([first_of(x) for x in total.registers.flat], object).reshape(tiles, 2)
    own_key = arith.addi(first_key, times(arith.remui(mgpu.thread_idx(), constant(4)), 2))
    for tile, half in np.ndindex(tiles, 2):
        of_row = numbers[tile, :, half]
        if high is not None:
            for n, i in np.ndindex(columns, 2):
                seen = arith.cmpi(arith.CmpIPredicate.slt, plus(own_key, n * 8 + i), high[tile, half])
                of_row[n, i] = arith.select(seen, of_row[n, i], real(-math.inf))
        highest = functools.reduce(functools.partial(f32, "max.f32"), of_row.flat)
        before = peaks[tile, half]
        now = f32("max.f32", before, arith.mulf(across("max.f32", highest), real(scale)))
        alpha = f32("ex2.approx.ftz.f32", arith.subf(before, now))
        minus = arith.negf(now)
        for n, i in np.ndindex(columns, 2):
            of_row[n, i] = f32("ex2.approx.ftz.f32", f32("fma.rn.f32", of_row[n, i], real(scale), minus))
        share = functools.reduce(arith.addf, of_row.flat)
        peaks[tile, half], totals[tile, half] = now, f32("fma.rn.f32", totals[tile, half], alpha, share)
        for n, i in np.ndindex(DIM // 8, 2):
            sums[tile, n, half, i] = arith.mulf(sums[tile, n, half, i], alpha)
    weights = [narrow(*both) for both in numbers.reshape(-1, 2)]
    acc = _array([_pair(*both) for both in sums.reshape(-1, 2)], acc.shape, acc.layout)
    return weights, acc, _numbers(peaks, peak), _numbers(totals, total)


def first_of(register: ir.Value) -> ir.Value:
    """The number of a register of an array with one number per row."""
    return llvm.extractelement(register, constant(0))


def _numbers(values, like: Any) -> Any:
    """An array with one number per row."""
    single = ir.VectorType.get((1,), ir.F32Type.get())
    return _array([vector.broadcast(single, x) for x in values.flat], like.shape, like.layout)


def narrow(first: ir.Value, second: ir.Value) -> ir.Value:
    """Two float32 numbers as a pair of bfloat16."""
    word = asm(i32(), [second, first], "cvt.rn.bf16x2.f32 $0, $1, $2;", "=r,f,f")
    return _halves([word])[0]
