"""Products of Hopper's warpgroups that begin at zero, alone or two at once.

The assembler leaves the zeros out that a product would add to where it finds them in the same basic block, ahead of
whatever else the warpgroup waits for in order to multiply. Elsewhere it writes them to registers first: up to a sixth
of all instructions of the backward pass.
"""

from __future__ import annotations

import jax
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


def issue(columns: int, first, others, states):
    """Runs functions that issue products, with a first and a second one [64, columns] that begin at zero.

    Args:
      columns: of both.
      first: function of the first accumulator that issues its product, and waits for what the second needs. What the
        first needs must be there: a wait is a loop, and so the end of a basic block.
      others: function of both accumulators and of references to `states`, which issues the second product and others.
      states: as `pl.run_state` takes them: arrays in registers, and `plgpu.ACC.init` of accumulators.

    Returns:
      The states in the end.
    """
    accumulator = plgpu.ACC((ROWS, columns), jnp.float32)
    if jax.__version_info__ < (0, 11):  # knows no `run_state` that takes a reference from around it

        def with_states(refs):
            def with_both(first_ref, second_ref):
                first(first_ref)
                others(first_ref, second_ref, *refs)

            pl.run_scoped(with_both, accumulator, accumulator)

        return pl.run_state(with_states)(states)

    def with_first(first_ref):
        first(first_ref)
        # The second one's zeros come behind the first product.
        return pl.run_state(lambda refs: others(first_ref, *refs))((begin(columns), *states))[1:]

    return pl.run_scoped(with_first, accumulator)


def two_products(columns: int, first, second, between):
    """Two products issued together.

    Args:
      columns: of both.
      first, second: functions of an accumulator that issue a product, the first as `issue` has it.
      between: function of the first product, computed while the other goes on.

    Returns:
      What `between` returns, float32 [64, columns], and the second product.
    """

    def others(first_ref, second_ref, result_ref, product_ref):
        second(second_ref)
        result_ref[...] = between(plgpu.wgmma_accumulator_load(first_ref, wait_n=1))
        product_ref[...] = second_ref[...]

    nothing = sm90.zeros((ROWS, columns))  # written, never read
    return issue(columns, first, others, (nothing, nothing))
