"""The kernels of RMSNorm's and SwiGLU's gradients against float64 formulas."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nsa_jax.ops.kernels.layer import norm_swiglu
from tests.ops.cases import relative_error

EPS = 1e-3  # large enough to matter for the small rows below


def _random(rng, dtype, *shape):
    return jnp.asarray(rng.normal(size=shape), dtype)


def _norm_case(rows, dim, dtype):
    rng = np.random.default_rng(rows * dim)
    x, grad, passed = (_random(rng, dtype, rows, dim) for _ in range(3))
    x = x.at[0].set(0.0).at[rows // 2].multiply(0.01)
    scale = jnp.asarray(rng.uniform(0.5, 2.0, dim), jnp.float32)
    exact = [np.asarray(a, np.float64) for a in (x, scale, grad, passed)]
    inverse = 1 / np.sqrt((exact[0] ** 2).mean(1, keepdims=True) + EPS)
    normed, scaled = exact[0] * inverse, exact[2] * exact[1]
    d_x = inverse * (scaled - normed * (normed * scaled).mean(1, keepdims=True))
    return (x, scale, grad, passed), (d_x, exact[3], (normed * exact[2]).sum(0))


def _check_norm(rows, dim, dtype, bound):
    (x, scale, grad, passed), (d_x, exact_passed, d_scale) = _norm_case(rows, dim, dtype)
    for given in (passed, jnp.zeros_like(passed)):
        got, shares = jax.jit(norm_swiglu.rms_norm_gradients, static_argnums=4)(x, scale, grad, given, EPS)
        assert got.dtype == x.dtype and got.shape == x.shape and shares.dtype == jnp.float32
        expected = d_x + (exact_passed if given is passed else 0)
        row_error = np.linalg.norm(np.asarray(got, np.float64) - expected, axis=1) / np.linalg.norm(expected, axis=1)
        assert np.all(row_error <= bound)
        # Terms of both signs: the error of a float32 sum is measured against the size of what is summed.
        assert relative_error(shares.sum(0), d_scale) <= 1e-5


@pytest.mark.parametrize(("rows", "dim"), [(1, 64), (7, 192), (2100, 64), (33, 768), (5, 2048)])
@pytest.mark.parametrize(("dtype", "bound"), [(jnp.float32, 2e-6), (jnp.bfloat16, 4e-3)], ids=["float32", "bfloat16"])
def test_norm(rows, dim, dtype, bound):
    _check_norm(rows, dim, dtype, bound)


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "dim"), [(1, 64), (4099, 768), (70_000, 2048), (1000, 4096), (300, 8192)])
def test_norm_compiled(rows, dim):
    _check_norm(rows, dim, jnp.bfloat16, 4e-3)
    _check_norm(rows, dim, jnp.float32, 1e-5)


def _check_swiglu(rows, width, dtype, bound):
    rng = np.random.default_rng(rows + width)
    both, grad = 3 * _random(rng, dtype, rows, 2 * width), _random(rng, dtype, rows, width)
    both = both.at[0, 0].set(-100.0).at[0, 1].set(100.0)
    gate, up = np.split(np.asarray(both, np.float64), 2, axis=1)
    exact_grad = np.asarray(grad, np.float64)
    sigmoid = 1 / (1 + np.exp(-gate))
    d_gate = exact_grad * up * sigmoid * (1 + gate * (1 - sigmoid))
    (alone,) = jax.jit(norm_swiglu.swiglu_gradients, static_argnums=2)(both, grad, False)
    d_both, hidden = jax.jit(norm_swiglu.swiglu_gradients, static_argnums=2)(both, grad, True)
    np.testing.assert_array_equal(alone, d_both)
    assert hidden.dtype == dtype and d_both.dtype == dtype
    assert relative_error(hidden.astype(jnp.float32), gate * sigmoid * up) <= bound
    for got, expected in zip(
        np.split(np.asarray(d_both, np.float64), 2, axis=1), (d_gate, exact_grad * gate * sigmoid), strict=True
    ):
        assert relative_error(got, expected) <= bound


# 128 rows are whole tiles: the gradient takes the place of gate and up.
@pytest.mark.parametrize(("rows", "width"), [(1, 64), (37, 192), (9, 512), (70, 704), (128, 192)])
@pytest.mark.parametrize(("dtype", "bound"), [(jnp.float32, 1e-6), (jnp.bfloat16, 4e-3)], ids=["float32", "bfloat16"])
def test_swiglu(rows, width, dtype, bound):
    _check_swiglu(rows, width, dtype, bound)


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "width"), [(1, 64), (5001, 2048), (4097, 2752), (8192, 2048)])
def test_swiglu_compiled(rows, width):
    _check_swiglu(rows, width, jnp.bfloat16, 4e-3)
    _check_swiglu(rows, width, jnp.float32, 1e-5)
