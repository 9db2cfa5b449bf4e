"""Products of Hopper's warpgroups that begin at zero, alone or two at once.

The assembler leaves the zeros out that a product would add to where it finds them in the same basic block, ahead of
whatever else the warpgroup waits for in order to multiply. Elsewhere it writes them to registers first: up to a sixth
of all instructions of the backward pass.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir

from nsa_jax.ops.kernels import sm90
from nsa_jax.ops.kernels.sm90_mlir import asm
from nsa_jax.ops.tiles import ROWS


def zeros(columns: int):
    """float32 zeros [64, columns] for a product to add to.

    LLVM would put a zero that it knows into a register before a loop: of where this one comes from it knows nothing.
    """
    shape, layout = (ROWS, columns), plgpu.Layout.WGMMA

    @plgpu.inline_mgpu(return_type=plgpu.ShapeDtypeStruct(shape, jnp.float32, layout=layout))
    def make(_):
        zero = asm(ir.F32Type.get(), [], "mov.b32 $0, 0;", "=f")
        return mgpu.FragmentedArray.splat(zero, shape, layout.to_mgpu())

    return make()


def begin(columns: int):
    """An accumulator [64, columns] of zeros for `pl.run_state`: the first of those that it is given."""
    return plgpu.ACC.init(zeros(columns))


def product(columns: int, multiply):
    """float32 [64, columns]: what `multiply(accumulator)` has added to zeros."""
    return pl.run_state(multiply)(begin(columns))


def two_products(columns: int, first, second, between):
    """Two products issued together.

    Args:
      columns: of both, which have 64 rows.
      first, second: functions of an accumulator that issue a product. What the first needs must be there, and `first`
        waits for what the second needs: a wait is a loop, and so the end of a basic block.
      between: function of the first product, computed while the other goes on.

    Returns:
      What `between` returns, float32 [64, columns], and the second product.
    """

    nothing = sm90.zeros((ROWS, columns))  # written, never read

    def multiply(refs):
        first_ref, result_ref, other_ref = refs
        first(first_ref)

        def beside(refs):
            second_ref, result_ref = refs
            second(second_ref)
            result_ref[...] = between(plgpu.wgmma_accumulator_load(first_ref, wait_n=1))

        # Its zeros come behind the first product.
        other_ref[...], result_ref[...] = pl.run_state(beside)((begin(columns), nothing))

    _, result, other = pl.run_state(multiply)((begin(columns), nothing, nothing))
    return result, other
