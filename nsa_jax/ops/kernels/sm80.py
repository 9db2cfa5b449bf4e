"""What the sm80 kernels share: Ampere instructions in Mosaic GPU for copies, products and registers.

A program has one warpgroup, 128 threads. `cp.async` copies rows to shared memory, `ldmatrix` takes them from there to
registers in the order of `mma.sync`. Shared memory holds rows of 64 or 128 bfloat16, in pieces of 16 bytes. Piece c of
row r lies where c ^ (r % 8) would, so that neither the 8 rows that `ldmatrix` reads at once nor the copies meet in a
bank. All this needs JAX 0.11.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

PIECE = 16  # bytes of one copy
TILE = 64  # rows that the four warps multiply at once
THREADS = 128  # of a program
_PAIR = 16  # columns that one ldmatrix of four matrices covers

ACC = plgpu.Layout.MMA_ACC(jnp.bfloat16)  # type: ignore[attr-defined]  # registers of products
ROW = ACC.reduce(1)  # of one number per row of products
SCALAR = plgpu.Layout.WG_SPLAT(())  # of a number that all threads share


def filled(*kinds: tuple[tuple[int, ...], Any, float]) -> Any:
    """Float32 arrays in registers, of one value each, by (shape, layout, value)."""
    types = tuple(plgpu.ShapeDtypeStruct(shape, jnp.float32, layout=layout) for shape, layout, _ in kinds)

    @plgpu.inline_mgpu(return_type=types)
    def make(_):
        return tuple(mgpu.FragmentedArray.splat(real(value), shape, layout.to_mgpu()) for shape, layout, value in kinds)

    return make()


def row_bytes(dim: int) -> int:
    """Bytes of a row of bfloat16."""
    return dim * 2


def row_pieces(dim: int) -> int:
    """Pieces of a row."""
    return row_bytes(dim) // PIECE


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


def place_of(row: ir.Value, piece: ir.Value, dim: int) -> ir.Value:
    """Offset in bytes of a piece of a row in shared memory."""
    return arith.addi(times(row, row_bytes(dim)), times(arith.xori(piece, arith.remui(row, constant(8))), PIECE))


def copy_rows(buffer: ir.Value, ref, row_of, rows: int, dim: int) -> None:
    """Starts copies of rows to shared memory, each thread its pieces, and closes the group.

    Args:
      buffer: where the first row goes.
      ref: an array in global memory.
      row_of: row of the buffer -> row of the array, whose last dimension is the columns.
      rows: how many.
      dim: columns.
    """
    pieces = row_pieces(dim)
    at_once = THREADS // pieces
    row, piece = split(mgpu.thread_idx(), pieces)
    place = arith.addi(buffer, place_of(row, piece, dim))
    for first in range(0, rows, at_once):
        number = arith.addi(times(row_of(plus(row, first)), pieces), piece)
        source = in_global(ref, number, PIECE)
        text = f"cp.async.cg.shared.global [$0 + {first * row_bytes(dim)}], [$1], {PIECE};"
        asm(void(), [place, source], text, "r,l,~{memory}", effects=True)
    asm(void(), [], "cp.async.commit_group;", "~{memory}", effects=True)


def copy_pairs(buffer: ir.Value, ref, first: ir.Value, rows: int) -> None:
    """Starts the copy of two 32-bit numbers of each row to shared memory, in the next group that closes.

    Args:
      buffer: where those of the first row go.
      ref: an array in global memory whose last dimension is the two numbers.
      first: row of the array, an even number.
      rows: how many, at most 256.
    """
    piece, per_piece = mgpu.thread_idx(), PIECE // 8
    # Threads past the last piece have their address kept in the array and copy nothing.
    own = arith.minui(piece, constant(rows // per_piece - 1))
    source = in_global(ref, arith.addi(arith.divui(first, constant(per_piece)), own), PIECE)
    text = (
        f"{{ .reg .pred p; setp.lt.u32 p, $2, {rows // per_piece}; @p cp.async.cg.shared.global [$0], [$1], {PIECE}; }}"
    )
    place = arith.addi(buffer, times(piece, PIECE))
    asm(void(), [place, source, piece], text, "r,l,r,~{memory}", effects=True)


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


def _addresses(base: ir.Value, row: ir.Value, bit: ir.Value, within: ir.Value, dim: int) -> Callable[[int], ir.Value]:
    """Where the piece `bit` of a pair of pieces of a row lies, by the number of the pair.

    Each is computed where it is used: kept over the loop, those of all matrices take too many registers.

    Args:
      base: where the buffer begins, a multiple of the bytes of a row.
      row: of the buffer.
      bit: 0 or 1.
      within: number of the row in its 8 rows.
      dim: columns of a row.
    """
    first = arith.addi(base, arith.addi(times(row, row_bytes(dim)), times(arith.xori(bit, within), PIECE)))

    def place(pair: int) -> ir.Value:
        text = f"xor.b32 $0, $1, {pair * 2 * PIECE};"
        return asm(i32(), [first], text, "=r,r", effects=True) if pair else first

    return place


def _halves(words: list[ir.Value]) -> list[ir.Value]:
    """Words as pairs of bfloat16."""
    return [mgpu.utils.bitcast(word, ir.VectorType.get((2,), ir.BF16Type.get())) for word in words]


def own_row() -> ir.Value:
    """The first row of a warp in 64."""
    return times(arith.divui(mgpu.thread_idx(), constant(32)), 16)


def thread_row() -> ir.Value:
    """The first row of a thread in 64; the second is 8 below."""
    return arith.addi(own_row(), arith.divui(arith.remui(mgpu.thread_idx(), constant(32)), constant(4)))


def thread_column() -> ir.Value:
    """The first column of a thread in 8; the second is the next."""
    return times(arith.remui(mgpu.thread_idx(), constant(4)), 2)


def left_rows(address: ir.Value, row_tiles: int, dim: int) -> Callable[[int], Any]:
    """Takes rows of the left matrix from shared memory: k -> columns 16 k to 16 k + 15 of all rows.

    Args:
      address: where the rows begin.
      row_tiles: 64 rows each.
      dim: columns.
    """
    row, first, second = _lane()
    own = arith.addi(own_row(), arith.addi(times(first, 8), row))
    places = _addresses(address, own, second, row, dim)

    def load(k: int) -> Any:
        words = [_ldmatrix(places(k), tile * TILE * row_bytes(dim), False) for tile in range(row_tiles)]
        layout = mgpu.MMALayouts(ir.BF16Type.get()).lhs
        return array(_halves([x for part in words for x in part]), (row_tiles * TILE, _PAIR), layout)

    return load


def row_products(left: Callable[[int], Any], right: ir.Value, row_tiles: int, columns: int, dim: int) -> Any:
    """Products of the rows of two matrices: float32 [row_tiles * 64, columns].

    Args:
      left: as `left_rows` gives it.
      right: where the other matrix begins in shared memory.
      row_tiles: of the left matrix.
      columns: rows of the other matrix.
      dim: columns of both.
    """
    layouts = mgpu.MMALayouts(ir.BF16Type.get())
    row, first, second = _lane()
    places = _addresses(right, arith.addi(times(second, 8), row), first, row, dim)
    acc = mgpu.FragmentedArray.splat(real(0.0), (row_tiles * TILE, columns), layouts.acc)
    for k in range(dim // _PAIR):
        part = left(k)
        words = [_ldmatrix(places(k), n * row_bytes(dim), False) for n in range(0, columns, _PAIR)]
        acc = mgpu.mma(acc, part, array(_halves([x for y in words for x in y]), (_PAIR, columns), layouts.rhs))
    return acc


def add_products(acc: Any, left: list[ir.Value], right: ir.Value, depth: int) -> Any:
    """`acc` [R, D] plus a matrix [R, depth] in registers times one [depth, D] in shared memory.

    Args:
      acc: float32.
      left: pairs of bfloat16 in the order of the registers of products [R, depth].
      right: where the other matrix begins.
      depth: its rows.
    """
    rows, dim = acc.shape
    layouts = mgpu.MMALayouts(ir.BF16Type.get())
    weights = array(left, (rows, depth), layouts.lhs)
    row, first, second = _lane()
    places = _addresses(right, arith.addi(times(first, 8), row), second, row, dim)
    acc = acc.copy()
    for k in range(0, depth, _PAIR):
        for n in range(dim // _PAIR):
            part = array(_halves(_ldmatrix(places(n), k * row_bytes(dim), True)), (_PAIR, _PAIR), layouts.rhs)
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


def load_four(address: ir.Value, offset: int, kind: ir.Type) -> list[ir.Value]:
    """Four numbers of 32 bits next to each other in shared memory."""
    letter = "f" if isinstance(kind, ir.F32Type) else "r"
    words = llvm.StructType.get_literal([kind] * 4)
    text = f"ld.shared.v4.b32 {{$0, $1, $2, $3}}, [$4 + {offset}];"
    got = asm(words, [address], text, ",".join([f"={letter}"] * 4) + ",r,~{memory}", effects=True)
    return [llvm.extractvalue(kind, got, [i]) for i in range(4)]


def load_pair(pointer: ir.Value, kind: ir.Type) -> list[ir.Value]:
    """Two numbers of 32 bits next to each other in global memory."""
    letter = "f" if isinstance(kind, ir.F32Type) else "r"
    words = llvm.StructType.get_literal([kind] * 2)
    text = "ld.global.v2.b32 {$0, $1}, [$2];"
    got = asm(words, [pointer], text, f"={letter},={letter},l,~{{memory}}", effects=True)
    return [llvm.extractvalue(kind, got, [i]) for i in range(2)]


def sees(key: ir.Value, low: ir.Value, width: ir.Value) -> ir.Value:
    """Whether low <= key < low + width."""
    return arith.cmpi(arith.CmpIPredicate.ult, arith.subi(key, low), width)


def narrow(first: ir.Value, second: ir.Value) -> ir.Value:
    """Two float32 numbers as a pair of bfloat16."""
    word = asm(i32(), [second, first], "cvt.rn.bf16x2.f32 $0, $1, $2;", "=r,f,f")
    return _halves([word])[0]
