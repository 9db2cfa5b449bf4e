"""Products of single warps on Hopper: each of four warps multiplies its 16 rows, or leaves that to the others.

`plgpu.wgmma` multiplies 64 rows, of all four warps, with the same operand. Where a warp's rows have an operand of their
own, these take `mma.sync`, which has half the rate. Arrays are in the layout of `wgmma`'s products, in which a warp has
the same 16 of 64 rows. Neither function waits for other warps, so a warp may call it under a condition of its own.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from nsa_jax.ops.kernels.sm90_mlir import array, asm, constant, i32
from nsa_jax.ops.tiles import ROWS

_LAYOUT = plgpu.Layout.WGMMA
_PIECE = 16  # bytes of a row of one of `ldmatrix`'s matrices
_SWIZZLE = 128  # bytes of a row of a swizzled tile
_TILE_ROWS = 8  # after which its pattern repeats, and rows of a matrix
_DEPTH = 16  # columns of the left operand of one `mma.sync`
_TILE: Any = (plgpu.TilingTransform((_TILE_ROWS, ROWS)), plgpu.SwizzleTransform(_SWIZZLE))  # type: ignore[abstract]


class _Matrices:
    """Where a thread finds its row of four matrices of a swizzled tile, which are 16 rows by 16 columns of it.

    Args:
      tile: [R, D] of `sm90.tiled`, of bfloat16.
      columns: D.
      transposed: whether each matrix is transposed when it is loaded.
    """

    def __init__(self, tile, columns: int, transposed: bool):
        self.bytes, self.kind = columns * 2, ".trans" if transposed else ""
        lane = arith.remui(mgpu.thread_idx(), constant(32))
        matrix, row = arith.divui(lane, constant(_TILE_ROWS)), arith.remui(lane, constant(_TILE_ROWS))
        # Matrices 0 and 1 are the halves of a right operand: below each other, or beside each other in its transpose.
        halves = arith.andi(matrix, constant(1)), arith.shrui(matrix, constant(1))
        down, right = halves if transposed else halves[::-1]
        begin = arith.addi(llvm.ptrtoint(i32(), mgpu.utils.memref_ptr(tile)), arith.muli(row, constant(_SWIZZLE)))
        self.begin = arith.addi(begin, arith.muli(down, constant(_TILE_ROWS * self.bytes)))
        self.piece = arith.muli(arith.xori(right, row), constant(_PIECE))

    def load(self, row: int, column: int) -> list:
        """A word of each of the matrices whose first element is in this row and column, multiples of 16."""
        group, within = divmod(column * 2, _SWIZZLE)
        place = arith.addi(self.begin, arith.xori(self.piece, constant(within)))
        offset = row * self.bytes + group * _SWIZZLE * _TILE_ROWS
        words = llvm.StructType.get_literal([i32()] * 4)
        text = f"ldmatrix.sync.aligned.m8n8.x4{self.kind}.shared.b16 {{$0, $1, $2, $3}}, [$4 + {offset}];"
        got = asm(words, [place], text, "=r,=r,=r,=r,r,~{memory}")
        return [llvm.extractvalue(i32(), got, [i]) for i in range(4)]


def _multiply(acc: list, left: list, right: list) -> list:
    """`acc`, the two pairs that a thread has of a product [16, 8], plus [16, 16] times [16, 8]."""
    numbers = [llvm.extractelement(x, constant(i)) for x in acc for i in range(2)]
    text = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {$0, $1, $2, $3}, "
    text += "{$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
    kinds = ",".join(["=f"] * 4 + ["r"] * 6 + ["f"] * 4)
    four = llvm.StructType.get_literal([ir.F32Type.get()] * 4)
    got = asm(four, [*left, *right, *numbers], text, kinds, effects=False)
    numbers = [llvm.extractvalue(ir.F32Type.get(), got, [i]) for i in range(4)]
    return [_pair(*numbers[i : i + 2]) for i in (0, 2)]


def _pair(first, second):
    both = llvm.mlir_undef(ir.VectorType.get((2,), ir.F32Type.get()))
    return llvm.insertelement(llvm.insertelement(both, first, constant(0)), second, constant(1))


def _add_products(acc: list, left, tile, transposed: bool) -> list:
    """A thread's pairs of float32 [64, N] plus `left` [64, M] times the tile [M, N], or if not transposed [N, M]."""
    words, depth = [mgpu.utils.bitcast(x, i32()) for x in left.registers.flat], left.shape[1]
    matrices = _Matrices(tile, len(acc) // 2 * _TILE_ROWS if transposed else depth, transposed)
    acc = list(acc)
    for k in range(0, depth, _DEPTH):
        for n in range(0, len(acc), 4):
            column = n // 2 * _TILE_ROWS
            right = matrices.load(*((k, column) if transposed else (column, k)))
            for i in range(2):
                own = slice(n + 2 * i, n + 2 * i + 2)
                acc[own] = _multiply(acc[own], words[k // 4 : k // 4 + 4], right[2 * i : 2 * i + 2])
    return acc


def row_products(rows, tile):
    """Products of rows with the rows of a tile: float32 [64, R].

    Args:
      rows: bfloat16 [64, D] in a product's layout, columns in order.
      tile: [R, D] of `sm90.tiled`, D a multiple of 64.
    """
    shape = ROWS, tile.shape[0]

    @plgpu.inline_mgpu(
        arg_types=(_LAYOUT, plgpu.RefType(_TILE)),
        return_type=plgpu.ShapeDtypeStruct(shape, jnp.float32, layout=_LAYOUT),
    )
    def multiply(_, rows, tile):
        zero = vector.broadcast(ir.VectorType.get((2,), ir.F32Type.get()), mgpu.c(0.0, ir.F32Type.get()))
        return array(_add_products([zero] * (shape[1] // 4), rows, tile, transposed=False), shape, _LAYOUT)

    return multiply(rows, tile)


def add_product(acc, left, tile):
    """`acc` plus `left` times a tile: float32 [64, D].

    Args:
      acc: float32 [64, D] in a product's layout.
      left: bfloat16 [64, R] in it.
      tile: [R, D] of `sm90.tiled`, D a multiple of 64.
    """

    @plgpu.inline_mgpu(
        arg_types=(_LAYOUT, _LAYOUT, plgpu.RefType(_TILE)),
        return_type=plgpu.ShapeDtypeStruct(acc.shape, jnp.float32, layout=_LAYOUT),
    )
    def multiply(_, acc, left, tile):
        return array(_add_products(acc.registers.flat, left, tile, transposed=True), acc.shape, _LAYOUT)

    return multiply(acc, left, tile)
