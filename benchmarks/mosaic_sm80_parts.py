"""What the kernels in `mosaic_sm80_*.py` are made of: instructions of compute capability 8.0, copies and products.

Shared memory holds rows of 256 bytes, 16 pieces of 16 bytes. Piece c of row r lies where c ^ (r % 8) would, so that
neither the 8 rows that `ldmatrix` reads at once nor the copies meet in a bank.
"""

from __future__ import annotations

from collections.abc import Callable
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


def array(registers, shape: tuple[int, ...], layout: Any) -> Any:
    """A register array of a thread's registers in the layout's order."""
    shaped = np.empty(layout.registers_shape(shape), object)
    shaped.flat[:] = registers
    return mgpu.FragmentedArray(_registers=shaped, _layout=layout, _is_signed=None)


def pair(first: ir.Value, second: ir.Value) -> ir.Value:
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


def _addresses(base: ir.Value, row: ir.Value, bit: ir.Value, within: ir.Value) -> Callable[[int], ir.Value]:
    """Where the piece `bit` of a pair of pieces of a row lies, by the number of the pair.

    Each is computed where it is used: kept over the loop, those of all matrices take too many registers.

    Args:
      base: where the buffer begins, a multiple of 256.
      row: of the buffer.
      bit: 0 or 1.
      within: number of the row in its 8 rows.
    """
    first = arith.addi(base, arith.addi(times(row, ROW_BYTES), times(arith.xori(bit, within), PIECE)))

    def place(pair: int) -> ir.Value:
        text = f"xor.b32 $0, $1, {pair * 2 * PIECE};"
        return asm(i32(), [first], text, "=r,r", effects=True) if pair else first

    return place


def _halves(words: list[ir.Value]) -> list[ir.Value]:
    """Words as pairs of bfloat16."""
    return [mgpu.utils.bitcast(word, ir.VectorType.get((2,), ir.BF16Type.get())) for word in words]


def own_row() -> ir.Value:
    """The first row of a warp in its warpgroup's 64."""
    return times(arith.remui(arith.divui(mgpu.thread_idx(), constant(32)), constant(4)), 16)


def warpgroup() -> ir.Value:
    return arith.divui(mgpu.thread_idx(), constant(THREADS))


def left_rows(address: ir.Value, row_tiles: int) -> Callable[[int], Any]:
    """Takes rows of the left matrix from shared memory: k -> the warpgroup's rows of columns 16 k to 16 k + 15.

    Args:
      address: where the program's rows begin; each warpgroup has its own `row_tiles` times 64 of them.
      row_tiles: of a warpgroup.
    """
    rows = row_tiles * TILE
    row, first, second = _lane()
    own = arith.addi(own_row(), arith.addi(times(first, 8), row))
    places = _addresses(address, arith.addi(own, times(warpgroup(), rows)), second, row)

    def load(k: int) -> Any:
        words = [_ldmatrix(places(k), tile * TILE * ROW_BYTES, False) for tile in range(row_tiles)]
        layout = mgpu.MMALayouts(ir.BF16Type.get()).lhs
        return array(_halves([x for part in words for x in part]), (rows, _PAIR), layout)

    return load


def whole_rows(load: Callable[[int], Any], row_tiles: int) -> Any:
    """All of a warpgroup's rows that `left_rows` takes from shared memory, in registers: [row_tiles * 64, 128]."""
    rows = row_tiles * TILE
    layout = mgpu.MMALayouts(ir.BF16Type.get()).lhs
    pieces = np.stack([load(k).registers for k in range(DIM // _PAIR)], 1)
    return array(list(pieces.flat), (rows, DIM), layout)


def held_rows(whole: Any) -> Callable[[int], Any]:
    """What `left_rows` gives, for rows in registers."""
    return lambda k: whole[:, k * _PAIR : (k + 1) * _PAIR]


def row_products(left: Callable[[int], Any], right: ir.Value, row_tiles: int, columns: int) -> Any:
    """Products of the rows of two matrices of 128 columns: float32 [row_tiles * 64, columns].

    Args:
      left: as `left_rows` gives it.
      right: where the other matrix begins in shared memory.
      row_tiles: of a warpgroup.
      columns: rows of the other matrix.
    """
    layouts = mgpu.MMALayouts(ir.BF16Type.get())
    row, first, second = _lane()
    places = _addresses(right, arith.addi(times(second, 8), row), first, row)
    acc = mgpu.FragmentedArray.splat(real(0.0), (row_tiles * TILE, columns), layouts.acc)
    for k in range(DIM // _PAIR):
        part = left(k)
        words = [_ldmatrix(places(k), n * ROW_BYTES, False) for n in range(0, columns, _PAIR)]
        acc = mgpu.mma(acc, part, array(_halves([x for y in words for x in y]), (_PAIR, columns), layouts.rhs))
    return acc


def add_products(acc: Any, left: list[ir.Value], right: ir.Value, depth: int) -> Any:
    """`acc` [R, 128] plus a matrix [R, depth] in registers times one [depth, 128] in shared memory.

    Args:
      acc: float32.
      left: pairs of bfloat16 in the order of the registers of products [R, depth].
      right: where the other matrix begins.
      depth: its rows.
    """
    layouts = mgpu.MMALayouts(ir.BF16Type.get())
    weights = array(left, (acc.shape[0], depth), layouts.lhs)
    row, first, second = _lane()
    places = _addresses(right, arith.addi(times(first, 8), row), second, row)
    acc = acc.copy()
    for k in range(0, depth, _PAIR):
        for n in range(DIM // _PAIR):
            part = array(_halves(_ldmatrix(places(n), k * ROW_BYTES, True)), (_PAIR, _PAIR), layouts.rhs)
            columns = slice(n * _PAIR, (n + 1) * _PAIR)
            acc[:, columns] = mgpu.mma(acc[:, columns], weights[:, k : k + _PAIR], part)
    return acc


def across(text: str, number: ir.Value) -> ir.Value:
    """Reduces over the four threads that share a row."""
    for distance in (1, 2):
        number = f32(text, number, mgpu.utils.shfl_bfly(number, distance))
    return number


def first_of(register: ir.Value) -> ir.Value:
    """The number of a register of an array with one number per row."""
    return llvm.extractelement(register, constant(0))


def row_numbers(values: np.ndarray, layout: Any) -> Any:
    """An array with one number per row, of those of a thread, [row tiles, 2]."""
    single = ir.VectorType.get((1,), ir.F32Type.get())
    return array([vector.broadcast(single, x) for x in values.flat], (len(values) * TILE,), layout)


def load_four(address: ir.Value, offset: int) -> list[ir.Value]:
    """Four float32 numbers next to each other in shared memory."""
    words = llvm.StructType.get_literal([ir.F32Type.get()] * 4)
    text = f"ld.shared.v4.f32 {{$0, $1, $2, $3}}, [$4 + {offset}];"
    got = asm(words, [address], text, "=f,=f,=f,=f,r,~{memory}", effects=True)
    return [llvm.extractvalue(ir.F32Type.get(), got, [i]) for i in range(4)]


def load_pair(pointer: ir.Value) -> list[ir.Value]:
    """Two float32 numbers next to each other in global memory."""
    words = llvm.StructType.get_literal([ir.F32Type.get()] * 2)
    got = asm(words, [pointer], "ld.global.v2.f32 {$0, $1}, [$2];", "=f,=f,l,~{memory}", effects=True)
    return [llvm.extractvalue(ir.F32Type.get(), got, [i]) for i in range(2)]


def narrow(first: ir.Value, second: ir.Value) -> ir.Value:
    """Two float32 numbers as a pair of bfloat16."""
    word = asm(i32(), [second, first], "cvt.rn.bf16x2.f32 $0, $1, $2;", "=r,f,f")
    return _halves([word])[0]
