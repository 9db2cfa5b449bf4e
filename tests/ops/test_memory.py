"""The xla implementation's memory is linear in T."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import nsa_jax
from nsa_jax import NSAConfig
from nsa_jax.ops import blocks


def _temporary_bytes(length: int, implementation: str, heads: int = 4, dim: int = 32) -> int:
    config = NSAConfig()
    num_cmp = blocks.num_compressed(length, config)

    def array(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    shapes = (array(1, length, heads, dim), *[array(1, num_cmp, 1, dim)] * 2, *[array(1, length, 1, dim)] * 4)

    def loss(*arrays):
        return nsa_jax.nsa_attention(*arrays, config=config, implementation=implementation).sum()

    step = jax.jit(jax.grad(loss, argnums=tuple(range(8))))
    return step.lower(*shapes, array(1, length, heads, 3)).compile().memory_analysis().temp_size_in_bytes


def test_forward_and_backward_memory_is_linear_in_length():
    half, whole = _temporary_bytes(8192, "xla"), _temporary_bytes(16384, "xla")
    assert 0 < whole <= 2.3 * half, (half, whole)
    assert whole < 16384 * 16384, "less than one byte per pair of tokens"


def test_the_measurement_sees_quadratic_memory():
    with pytest.raises(AssertionError):
        half, whole = _temporary_bytes(1024, "reference"), _temporary_bytes(2048, "reference")
        assert whole <= 2.3 * half
