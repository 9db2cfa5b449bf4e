"""What the parts of Hopper's kernels that are written in MLIR share."""

from __future__ import annotations

import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

# Of one number per row, as a product's row sums have it.
LAYOUT = plgpu.Layout.WGMMA.reduce(1)


def i32():
    """The type of 32-bit words."""
    return ir.IntegerType.get_signless(32)


def constant(value: int):
    """A 32-bit word that tracing knows."""
    return mgpu.c(value, i32())


def array(registers, shape, layout, is_signed=None):
    """A register array [shape] of a thread's registers in the order of the layout."""
    shaped = np.empty(layout.to_mgpu().registers_shape(shape), object)
    shaped.flat[:] = registers
    return mgpu.FragmentedArray(_registers=shaped, _layout=layout.to_mgpu(), _is_signed=is_signed)


def asm(result, operands, text: str, constraints: str, effects: bool = True):
    """PTX, with $0, $1, ... for the result and the operands; `constraints` as LLVM's inline assembly takes them.

    Without `effects` LLVM may move it.
    """
    return llvm.inline_asm(result, operands, text, constraints, has_side_effects=effects, asm_dialect=0)
