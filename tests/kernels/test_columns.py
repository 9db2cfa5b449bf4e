"""Masks of columns as bits of words: the PTX of a kernel that has nothing else, emulated, and NumPy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels import ptx

if jax.__version_info__ < (0, 11):
    pytest.skip("the kernel here needs JAX 0.11, whose plgpu.load takes a layout alone", allow_module_level=True)

FIRST = 1000  # position of the first column


def mask(columns: int):
    """A kernel of (low, high, numbers, first) that makes float32 [64, columns] twice: `numbers` within each row's range
    and 0.5 outside, and from where its range begins or else their negatives."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from nsa_jax.ops.kernels import sm90, sm90_columns
    from nsa_jax.ops.kernels.sm90_mlir import LAYOUT

    def kernel(low_ref, high_ref, numbers_ref, first_ref, inside_ref, behind_ref):
        low, high = (sm90.load(ref, LAYOUT, optimized=False) for ref in (low_ref, high_ref))
        x = sm90.load(numbers_ref, plgpu.Layout.WGMMA, optimized=False)
        own, behind = (sm90_columns.own_columns(low, end, first_ref[0], columns) for end in (high, None))
        plgpu.store(inside_ref, sm90_columns.where_columns(own, x, 0.5), optimized=False)
        plgpu.store(behind_ref, sm90_columns.where_columns(behind, x, -x), optimized=False)

    out = [jax.ShapeDtypeStruct((64, columns), jnp.float32)] * 2
    params = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane)
    return plgpu.kernel(kernel, out_type=out, compiler_params=params)


def shapes(columns: int) -> list[jax.ShapeDtypeStruct]:
    kinds = ((64,), jnp.int32), ((64,), jnp.int32), ((64, columns), jnp.float32), ((1,), jnp.int32)
    return [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in kinds]


@pytest.mark.parametrize("columns", [64, 128])
def test_emulated_masks_choose_the_columns_of_a_range(columns, tmp_path):
    text = ptx.compiled(f"test.mask({columns}), *test.shapes({columns})", "test_columns", tmp_path)
    generator = np.random.default_rng(0)
    numbers = generator.normal(size=(64, columns)).astype(np.float32)
    column = np.arange(columns) + FIRST
    edges = np.arange(-3, columns + 4)  # every edge, and some outside
    for shift in range(0, edges.size, 64):
        low, high = (
            (FIRST + np.roll(edges, -shift)[:64]).astype(np.int32),
            (FIRST + generator.permutation(edges)[:64]).astype(np.int32),
        )
        low[-1], high[-1] = 2**30, 0  # a row that sees nothing
        out = np.full((2, 64, columns), np.nan, np.float32)
        inputs = low, high, numbers, np.array([FIRST], np.int32)  # in the order of their first use
        ptx.Emulator(text, (0, 0, 0), [x.reshape(-1).view(np.uint8) for x in (*inputs, *out)], 1024).run()
        inside = (column >= low[:, None]) & (column < high[:, None])
        np.testing.assert_array_equal(out[0], np.where(inside, numbers, np.float32(0.5)))
        np.testing.assert_array_equal(out[1], np.where(column >= low[:, None], numbers, -numbers))
