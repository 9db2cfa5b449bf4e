"""Layouts of registers and the compiler's settings that the kernels in `mosaic_sm80_*.py` share. It needs JAX 0.11."""

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

ACC = plgpu.Layout.MMA_ACC(jnp.bfloat16)
ROW = ACC.reduce(1)
PARAMETERS = plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane)
