"""All of NSA on a GPU against the reference: groups that Hopper's kernels take rearranged or in boxes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nsa_jax
from nsa_jax import NSAConfig
from nsa_jax.ops import blocks
from tests.ops.cases import ARGUMENTS, relative_error

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.mark.gpu
@pytest.mark.parametrize("nonnegative_gates", [True, False])
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("num_selected", [16, 3])  # under a mask, and by lists (of forced blocks: no ties)
@pytest.mark.parametrize(("group", "length"), [(6, 650), (4, 650), (4, 656)])
def test_small_groups_equal_the_reference(group, length, num_selected, packed, nonnegative_gates):
    config = NSAConfig(num_selected=num_selected)
    batch, kv_heads, dim = 2, 2, 64
    heads = kv_heads * group
    rng = np.random.default_rng(num_selected)
    num_cmp = blocks.num_compressed(length, config)
    shapes = [(length, heads), *[(num_cmp, kv_heads)] * 2, *[(length, kv_heads)] * 4]
    arrays = [jnp.asarray(rng.normal(size=(batch, *shape, dim)), jnp.bfloat16) for shape in shapes]
    gates = rng.uniform(0.05, 1, (batch, length, heads, 3))
    gates[:, 600, 0, 1:] = 0.0  # of the two that are attended together
    arrays.append(jnp.asarray(gates, jnp.float32))
    start = jnp.asarray(np.where(np.arange(length) < 301, 0, 301)[None].repeat(batch, 0), jnp.int32) if packed else None
    weight = jnp.asarray(rng.normal(size=(batch, length, heads, dim)), jnp.float32)

    def run(implementation, *arrays, differentiate=True, **options):
        def loss(*arrays):
            out, lists = nsa_jax.nsa_attention(
                *arrays,
                config=config,
                segment_start=start,
                implementation=implementation,
                return_block_indices=True,
                **options,
            )
            return (out.astype(jnp.float32) * weight).sum(), (out, lists)

        if not differentiate:
            return jax.jit(loss)(*arrays)[1]
        return jax.jit(jax.value_and_grad(loss, argnums=tuple(range(8)), has_aux=True))(*arrays)

    (_, (out, lists)), gradients = run("pallas", *arrays, nonnegative_gates=nonnegative_gates)
    alone, lists_alone = run("pallas", *arrays, nonnegative_gates=nonnegative_gates, differentiate=False)
    (_, (expected, expected_lists)), expected_gradients = run("reference", *(x.astype(jnp.float32) for x in arrays))
    np.testing.assert_array_equal(lists, expected_lists)
    np.testing.assert_array_equal(lists_alone, expected_lists)
    for got in (out, alone):  # without gradients another kernel may add up the branches
        assert got.shape == expected.shape and got.dtype == jnp.bfloat16
        assert relative_error(got.astype(jnp.float32), expected) <= 4e-3
    for name, gradient, reference in zip(ARGUMENTS, gradients, expected_gradients, strict=True):
        assert relative_error(gradient.astype(jnp.float32), reference) <= 1e-2, name


@pytest.mark.gpu
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(12, 2, 64), (16, 1, 128), (8, 2, 128)])
def test_branches_that_share_keys_and_values_equal_the_reference(heads, kv_heads, dim, packed):
    """Rows are read whole: on Hopper the selected branch's kernels serve the window too."""
    config = NSAConfig(window=200)
    batch, length = 2, 1100
    rng = np.random.default_rng(heads)
    arrays = [jnp.asarray(rng.normal(size=(batch, length, n, dim)), jnp.bfloat16) for n in (heads, kv_heads, kv_heads)]
    gates = rng.uniform(0.05, 1, (batch, length, heads, 3))
    gates[:, 700, 0, 1:] = 0.0  # of the two that are attended together
    arrays.append(jnp.asarray(gates, jnp.float32))
    start = jnp.asarray(np.where(np.arange(length) < 301, 0, 301)[None].repeat(batch, 0), jnp.int32) if packed else None
    weight = jnp.asarray(rng.normal(size=(batch, length, heads, dim)), jnp.float32)

    def run(implementation, *arrays, differentiate=True):
        def loss(*arrays):
            out = nsa_jax.nsa_self_attention(
                *arrays, config=config, segment_start=start, implementation=implementation, nonnegative_gates=True
            )
            return (out.astype(jnp.float32) * weight).sum(), out

        if not differentiate:
            return jax.jit(loss)(*arrays)[1]
        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2, 3), has_aux=True))(*arrays)

    (_, out), gradients = run("pallas", *arrays)
    (_, expected), expected_gradients = run("reference", *(x.astype(jnp.float32) for x in arrays))
    for got in (out, run("pallas", *arrays, differentiate=False)):
        assert relative_error(got.astype(jnp.float32), expected) <= 4e-3
    for name, gradient, reference in zip(
        ("query", "key", "value", "gates"), gradients, expected_gradients, strict=True
    ):
        assert relative_error(gradient.astype(jnp.float32), reference) <= 1e-2, name
    again = run("pallas", *arrays)[1]
    jax.tree.map(np.testing.assert_array_equal, again, gradients)
