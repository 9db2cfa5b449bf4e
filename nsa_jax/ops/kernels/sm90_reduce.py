"""Reductions of matrix products in registers: within a thread, over the 4 threads of a row, over a warp.

Numbers of rows are arrays [64] in `sm90_mlir.LAYOUT`, of which a thread has two.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from nsa_jax.ops.kernels.sm90_mlir import LAYOUT, array, asm, constant, i32
from nsa_jax.ops.tiles import ROWS


def max_in_thread(values):
    """The highest of float32 [64, D] in a product's layout among the columns that a thread has: [64] in `LAYOUT`."""
    return _in_thread(values, arith.maxnumf)


def sum_in_thread(values):
    """Sums of float32 [64, D] in a product's layout over the columns that a thread has: [64] in `LAYOUT`.

    The 4 threads of a row have different sums: `sum_of_row` adds them up, once for many sums in threads.
    """
    return _in_thread(values, arith.addf)


def _in_thread(values, join):
    @plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WGMMA,), return_type=plgpu.ShapeDtypeStruct((ROWS,), jnp.float32, layout=LAYOUT)
    )
    def reduce(_, values):
        reduced = []
        for half in range(2):
            own = values.registers.flat[half::2]
            parts = [llvm.extractelement(x, constant(i)) for x in own for i in range(2)]
            while len(parts) > 1:
                parts = [join(*parts[i : i + 2]) for i in range(0, len(parts), 2)]
            reduced.append(vector.broadcast(ir.VectorType.get((1,), ir.F32Type.get()), parts[0]))
        return array(reduced, (ROWS,), LAYOUT)

    return reduce(values)


def max_of_row(numbers):
    """The highest of the numbers that a row's threads have, of float32 [64] in `LAYOUT`."""
    return _over_row(numbers, arith.maxnumf)


def sum_of_row(numbers):
    """The sums of the numbers that a row's threads have, of float32 [64] in `LAYOUT`."""
    return _over_row(numbers, arith.addf)


def _over_row(numbers, join):
    @plgpu.inline_mgpu(arg_types=(LAYOUT,), return_type=plgpu.ShapeDtypeStruct((ROWS,), jnp.float32, layout=LAYOUT))
    def reduce(_, numbers):
        reduced = []
        for register in numbers.registers.flat:
            number = llvm.extractelement(register, constant(0))
            for distance in (1, 2):
                text = f"shfl.sync.bfly.b32 $0, $1, {distance}, 0x1f, 0xffffffff;"
                number = join(number, asm(ir.F32Type.get(), [number], text, "=f,f"))
            reduced.append(vector.broadcast(register.type, number))
        return array(reduced, (ROWS,), LAYOUT)

    return reduce(numbers)


def any_in_warp(numbers):
    """Whether any of the rows of a warp has a number, of int32 [64] in `LAYOUT`, other than 0: its threads agree."""
    text = "{ .reg .pred p; setp.ne.b32 p, $1, 0; vote.sync.any.pred p, p, 0xffffffff; selp.b32 $0, 1, 0, p; }"
    return _over_warp(numbers, arith.ori, text) != 0


def max_in_warp(numbers):
    """The highest of the rows of a warp, of int32 [64] in `LAYOUT`: its threads agree."""
    return _over_warp(numbers, arith.maxsi, "redux.sync.max.s32 $0, $1, 0xffffffff;")


def _over_warp(numbers, join, text: str):
    """An int32 of the numbers of a warp: `join` joins those of a thread, `text` makes $0 of every thread's $1."""

    @plgpu.inline_mgpu(
        arg_types=(LAYOUT,),
        return_type=plgpu.ShapeDtypeStruct((), jnp.int32, layout=plgpu.Layout.WG_SPLAT(())),
    )
    def vote(_, numbers):
        word = functools.reduce(join, (llvm.extractelement(x, constant(0)) for x in numbers.registers.flat))
        return mgpu.FragmentedArray.splat(asm(i32(), [word], text, "=r,r"), (), is_signed=True)

    return vote(numbers)
