"""How a Mosaic GPU kernel is called."""

from __future__ import annotations

from jax.experimental.pallas import mosaic_gpu as plgpu


def call(entry, grid: tuple[int, int, int], names: tuple[str, str, str], out_type, *args, warpgroups: int):
    """Runs a kernel whose programs have so many warpgroups, each a number of the axis "wg"."""
    return plgpu.kernel(
        entry,
        out_type=out_type,
        grid=grid,
        grid_names=names,
        num_threads=warpgroups,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
    )(*args)
