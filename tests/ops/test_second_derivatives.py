"""Second derivatives: `xla` has them, and the kernels say that they have not."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import nsa_jax
from tests.ops.cases import BY_NAME, CHUNKED, relative_error

# Rows that see nothing: where second derivatives divide by zero, these are NaN.
CASE = dataclasses.replace(BY_NAME["blind_rows"], T=40, B=1)
ARRAYS = CASE.inputs()


def _loss(implementation):
    def loss(arrays):
        out = nsa_jax.nsa_attention(**arrays, **CASE.kwargs(), implementation=implementation)
        return (out * jnp.asarray(CASE.cotangent())).sum()

    return loss


def _reverse_over_reverse(loss):
    directions = jax.tree.map(lambda x: jnp.cos(3 * x), ARRAYS)
    slopes = lambda arrays: sum(jax.tree.leaves(jax.tree.map(jnp.vdot, jax.grad(loss)(arrays), directions)))  # noqa: E731
    return jax.jit(jax.grad(slopes))(ARRAYS)


def _forward_over_reverse(loss):
    directions = jax.tree.map(lambda x: jnp.cos(3 * x), ARRAYS)
    return jax.jit(lambda arrays: jax.jvp(jax.grad(loss), (arrays,), (directions,))[1])(ARRAYS)


ORDERS = [_reverse_over_reverse, _forward_over_reverse]


def test_second_derivatives_of_xla_are_those_of_the_reference(monkeypatch):
    want, whole = (_reverse_over_reverse(_loss(name)) for name in ("reference", "xla"))
    for name, value in CHUNKED:
        monkeypatch.setattr(name, value)
    chunked = _reverse_over_reverse(_loss("xla"))
    for name in ARRAYS:
        assert relative_error(whole[name], want[name]) <= 1e-5, name
        assert relative_error(chunked[name], want[name]) <= 1e-5, name


OPS = {
    "window": lambda q, k, v: nsa_jax.window_attention(q, k, v, window=8, implementation="pallas"),
    "selected": lambda q, k, v: nsa_jax.selected_attention(
        q, k, v, jnp.zeros((1, 40, 2, 1), jnp.int32), select_block=16, implementation="pallas"
    ),
}


@pytest.mark.filterwarnings("ignore:.*interpret mode")
@pytest.mark.parametrize("order", ORDERS)
def test_kernels_refuse_second_derivatives(order):
    with pytest.raises(NotImplementedError, match="first ones only. Fix: .* implementation='xla'"):
        order(_loss("pallas"))


@pytest.mark.filterwarnings("ignore:.*interpret mode")
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("over", ["inputs", "cotangent"])
def test_single_ops_refuse_second_derivatives(op, over):
    tensors = ARRAYS["query"], ARRAYS["key_slc"], ARRAYS["value_slc"]

    def slope(query, cotangent):
        return jax.vjp(lambda query: OPS[op](query, *tensors[1:]), query)[1](cotangent)[0].sum()

    with pytest.raises(NotImplementedError, match="second derivatives: the GPU kernels"):
        jax.grad(slope, argnums=int(over == "cotangent"))(tensors[0], tensors[2][:, :, [0, 0, 1, 1]])
