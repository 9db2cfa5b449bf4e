"""The reference against a float64 oracle, and every other implementation against the reference."""

from __future__ import annotations

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nsa_jax
from tests.ops import oracle
from tests.ops.cases import ARGUMENTS, BY_NAME, CASES, ON_GPU, TESTED, Case, reference, relative_error, run

pytestmark = pytest.mark.usefixtures("quick_compilation")

ORACLE_CASES = [BY_NAME[name] for name in (
    "one_token",
    "shorter_than_a_block",
    "group_2_packed",
    "group_3_wide_values",
    "offset_packed",
    "blind_rows",
    "equal_blocks",
)]  # fmt: skip


def _oracle(case, arrays, lists=None):
    segment_start = case.segment_start()
    segment_start = None if segment_start is None else np.asarray(segment_start)
    return oracle.nsa(arrays, case.config, segment_start, case.offset, lists)


@pytest.mark.parametrize("case", ORACLE_CASES, ids=str)
def test_reference_agrees_with_token_by_token_float64(case):
    values, lists, gradients = reference(case)
    expected = _oracle(case, case.inputs())
    np.testing.assert_array_equal(lists, expected["lists"])
    np.testing.assert_array_equal(np.isneginf(values["lse"]), np.isneginf(expected["lse"]))
    seen = ~np.isneginf(expected["lse"])
    assert relative_error(values["lse"][seen], expected["lse"][seen]) <= 2e-5
    for name in ("out", "compressed", "selected", "window"):
        assert relative_error(values[name], expected[name]) <= 2e-5, name


@pytest.mark.parametrize("case", [BY_NAME["group_2_packed"], BY_NAME["offset_packed"], BY_NAME["blind_rows"]], ids=str)
def test_reference_gradients_agree_with_finite_differences(case):
    _, lists, gradients = reference(case)
    arrays = {name: np.asarray(array, np.float64) for name, array in case.inputs().items()}
    rng = np.random.default_rng(3)

    def loss(arrays):
        return (_oracle(case, arrays, lists)["out"] * case.cotangent()).sum()

    for name in ARGUMENTS:
        direction = rng.normal(size=arrays[name].shape)
        step = 1e-4 * direction
        plus, minus = loss({**arrays, name: arrays[name] + step}), loss({**arrays, name: arrays[name] - step})
        slope, predicted = (plus - minus) / 2e-4, float((gradients[name] * direction).sum())
        assert abs(slope - predicted) <= 1e-5 * np.linalg.norm(gradients[name]) * np.linalg.norm(direction), name
        assert abs(slope) > 1e-3, name


@pytest.mark.parametrize("tested,case", [(t, c) for t in TESTED for c in t.cases], ids=lambda x: str(x))
def test_implementation_agrees_with_reference(tested, case, monkeypatch):
    for name, value in tested.patches:
        monkeypatch.setattr(name, value)
    values, lists, gradients = run(case, tested.implementation, **dict(tested.options))
    expected, expected_lists, expected_gradients = reference(case)
    wide = case.dtype == jnp.float32
    value_bar, gradient_bar = (tested.values, tested.gradients) if wide else (tested.values_bf16, tested.gradients_bf16)
    np.testing.assert_array_equal(lists, expected_lists)
    np.testing.assert_array_equal(np.isneginf(values["lse"]), np.isneginf(expected["lse"]))
    seen = ~np.isneginf(expected["lse"])
    assert relative_error(values["lse"][seen], expected["lse"][seen]) <= value_bar
    for name in ("out", "compressed", "selected", "window"):
        assert values[name].dtype == case.dtype
        assert relative_error(values[name].astype(np.float32), expected[name]) <= value_bar, name
    chex.assert_tree_all_finite(gradients)
    for name in ARGUMENTS:
        error = relative_error(gradients[name].astype(np.float32), expected_gradients[name])
        assert error <= gradient_bar, (name, error)


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_rows_that_see_nothing_are_exactly_zero(implementation):
    case = BY_NAME["blind_rows"]
    values, lists, gradients = run(case, implementation)
    blind = np.asarray(case.segment_start()) > np.arange(case.T)
    assert blind.sum() >= 10
    for name in ("out", "compressed", "selected", "window"):
        assert (values[name][blind] == 0).all(), name
    assert (lists[blind] == -(-case.S // case.config.select_block)).all()
    assert (gradients["query"][blind] == 0).all() and (gradients["query"][~blind] != 0).any()


def test_gates_of_any_sign_and_of_zero():
    """Negative gates are right without the promise of none, and loud with it; a gate of 0 is right either way."""
    case = dataclasses.replace(BY_NAME["blind_rows"], T=20, B=1)
    arrays = case.inputs()
    arrays["gates"] = arrays["gates"].at[:, :, 0, 1].set(0.0)
    token = int(np.flatnonzero(np.asarray(case.segment_start()) <= np.arange(case.T))[-1])
    signed = {**arrays, "gates": arrays["gates"].at[:, token, 1, 2].set(-0.3)}
    for inputs, options in ((arrays, dict(nonnegative_gates=True)), (signed, {})):
        gradients, expected = run(case, "pallas", inputs, **options)[2], run(case, "reference", inputs)[2]
        for name in ARGUMENTS:
            assert relative_error(gradients[name], expected[name]) <= (1e-3 if ON_GPU else 1e-4), name
    gradient = run(case, "pallas", signed, nonnegative_gates=True)[2]["query"]
    assert np.isnan(gradient[:, token, 1]).all() and np.isfinite(np.delete(gradient, token, axis=1)).all()


@pytest.mark.parametrize("implementation", ["pallas", "xla"])
def test_window_keys_before_the_row_are_never_read(implementation):
    """A window that begins before position 0 and reaches over all of these keys: no tile of them is whole."""
    length, dtype = (512, jnp.bfloat16) if ON_GPU else (64, jnp.float32)
    dim = 64 if ON_GPU else 16
    case = Case("before", T=length, N=2, K=1, H=dim, V=dim, B=1)
    config = dataclasses.replace(case.config, window=2 * length)
    arrays = {name: x.astype(dtype) for name, x in case.inputs().items()}
    before = {
        name: jnp.concatenate([jnp.ones_like(arrays[name]), arrays[name]], axis=1) for name in ("key_win", "value_win")
    }

    def loss(keys, implementation):
        out = nsa_jax.nsa_attention(
            **arrays | keys, config=config, query_offset=0, window_start=-length, implementation=implementation
        )
        return jnp.sum(out.astype(jnp.float32) ** 2), out

    (_, out), gradients = jax.value_and_grad(loss, has_aux=True)(before, implementation)
    (_, want), expected = jax.value_and_grad(loss, has_aux=True)(before, "reference")
    tolerance = 1e-2 if ON_GPU else 1e-5
    assert relative_error(out, want) <= tolerance
    for name, gradient in gradients.items():
        assert (gradient[:, :length] == 0).all(), name
        assert relative_error(gradient, expected[name]) <= tolerance, name


def test_every_group_size_and_edge_is_covered():
    assert {case.N // case.K for case in CASES} >= {1, 2, 3, 6, 16}
    assert any(case.T < case.config.compress_block for case in CASES) and any(case.T == 1 for case in CASES)
    assert any(case.H < case.V for case in CASES) and any(case.H > case.V for case in CASES)
