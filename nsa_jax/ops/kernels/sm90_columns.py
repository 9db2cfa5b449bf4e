"""Masks of the columns of matrix products, one bit for each column that a thread has of a row.

A comparison and a choice for each element take three instructions. A thread has 16 or 32 columns of a row: their bits
fit one word, and the assembler gets seven predicates at a time out of it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from nsa_jax.ops.kernels.sm90_mlir import LAYOUT, array, asm, constant, i32
from nsa_jax.ops.tiles import ROWS

# Of 8 columns each of the 4 threads of a row has two, side by side.
_THREADS, _TOGETHER = 4, 2
_PERIOD = _THREADS * _TOGETHER


def own_columns(begin, end, first, columns: int):
    """Which of its columns of a product [64, `columns`] a thread has in [begin, end): a word for each row.

    Args:
      begin, end: int32 [64] in `LAYOUT`, of each row; `end` None for no end.
      first: the number of the first column, int32.
      columns: at most 128.

    Returns:
      What `where_columns` takes: int32 [64] in `LAYOUT`, bit i of the thread's i-th column.
    """

    @plgpu.inline_mgpu(
        arg_types=tuple([LAYOUT] * (1 if end is None else 2)),
        return_type=plgpu.ShapeDtypeStruct((ROWS,), jnp.int32, layout=LAYOUT),
    )
    def make(_, *bounds):
        of_row = arith.remui(mgpu.thread_idx(), constant(_THREADS))
        before = arith.muli(of_row, constant(_TOGETHER))  # columns of other threads
        words = []
        for registers in zip(*(x.registers.flat for x in bounds), strict=True):
            masks = [_from(llvm.extractelement(x, constant(0)), before, columns) for x in registers]
            word = masks[0] if end is None else arith.andi(masks[0], arith.xori(masks[1], constant(-1)))
            words.append(vector.broadcast(ir.VectorType.get((1,), i32()), word))
        return array(words, (ROWS,), LAYOUT, is_signed=True)

    return make(*(x - first for x in (begin, end) if x is not None))


def _from(bound, before, columns: int):
    """A word with the bits of a thread's columns from column `bound` on."""
    bound = arith.minsi(arith.maxsi(bound, constant(0)), constant(columns))
    # Among the thread's own pairs: those of other threads to the left of it do not count.
    bound = arith.subi(bound, before)
    pairs = arith.muli(arith.shrsi(bound, constant(_PERIOD.bit_length() - 1)), constant(_TOGETHER))
    rest = arith.minsi(arith.andi(bound, constant(_PERIOD - 1)), constant(_TOGETHER))
    # LLVM's shift by 32 would be undefined.
    return asm(i32(), [arith.addi(pairs, rest)], "shl.b32 $0, -1, $1;", "=r,r", effects=False)


def where_columns(words, chosen, otherwise) -> jax.Array:
    """`jnp.where` of float32 [64, D] in a product's layout, by the words of `own_columns`.

    Args:
      words: int32 [64] in `LAYOUT`.
      chosen: where a thread's bit of the column is set.
      otherwise: where it is not; a number or an array as `chosen`.
    """
    fill = otherwise if isinstance(otherwise, float) else None
    others = () if fill is not None else (otherwise,)
    layout = plgpu.Layout.WGMMA

    @plgpu.inline_mgpu(
        arg_types=(LAYOUT, *[layout] * (1 + len(others))),
        return_type=plgpu.ShapeDtypeStruct(chosen.shape, chosen.dtype, layout=layout),
    )
    def select(_, words, chosen, *others):
        f32, pair = ir.F32Type.get(), ir.VectorType.get((_TOGETHER,), ir.F32Type.get())
        own = [llvm.extractelement(x, constant(0)) for x in words.registers.flat]
        registers = []
        for at, register in enumerate(chosen.registers.flat):
            column, half = divmod(at, 2)
            both = llvm.mlir_undef(pair)
            for i in range(_TOGETHER):
                bit = arith.andi(own[half], constant(1 << (_TOGETHER * column + i)))
                is_set = arith.cmpi(arith.CmpIPredicate.ne, bit, constant(0))
                if fill is None:
                    other = llvm.extractelement(others[0].registers.flat[at], constant(i))
                else:
                    other = mgpu.c(fill, f32)
                number = arith.select(is_set, llvm.extractelement(register, constant(i)), other)
                both = llvm.insertelement(both, number, constant(i))
            registers.append(both)
        return array(registers, chosen.shape, layout)

    return select(words, chosen, *others)
