"""`nsa_self_attention` is `nsa_attention` with shared keys and values; its config needs no static_argnames."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nsa_jax
from nsa_jax import NSAConfig
from tests.ops.cases import SMALL

B, T, N, K, H, V = 2, 40, 4, 2, 16, 8


@pytest.fixture(scope="module")
def inputs():
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = ((B, T, N, H), (B, T, K, H), (B, T, K, V), (B, T, N, 3))
    return [jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True)]


def explicit(query, key, value, gates, **options):
    compressed = [nsa_jax.mean_compress(x, config=SMALL) for x in (key, value)]
    return nsa_jax.nsa_attention(query, *compressed, key, value, key, value, gates, config=SMALL, **options)


def test_output_and_gradients_have_the_bits_of_the_explicit_call(inputs):
    start = jnp.where(jnp.arange(T) < 16, 0, 16) * jnp.ones((B, 1), jnp.int32)

    def both(function, **options):
        def loss(*arrays):
            out = function(*arrays, segment_start=start, implementation="xla", **options)
            return (out**2).sum(), out

        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2, 3), has_aux=True))(*inputs)

    leaves = map(jax.tree.leaves, (both(nsa_jax.nsa_self_attention, config=SMALL), both(explicit)))
    for found, wanted in zip(*leaves, strict=True):
        np.testing.assert_array_equal(found, wanted)
        assert np.abs(found).max() > 0


def test_keys_compressed_by_the_caller_are_used(inputs):
    query, key, value, gates = inputs
    given = 2 * nsa_jax.mean_compress(key, config=SMALL)
    found = nsa_jax.nsa_self_attention(*inputs, config=SMALL, key_cmp=given)
    compressed = given, nsa_jax.mean_compress(value, config=SMALL)
    wanted = nsa_jax.nsa_attention(query, *compressed, key, value, key, value, gates, config=SMALL)
    np.testing.assert_array_equal(found, wanted)
    with pytest.raises(ValueError, match=r"key_cmp has shape \(2, 40, 2, 16\): dimension 1 \(C\) must be 9"):
        nsa_jax.nsa_self_attention(*inputs, config=SMALL, key_cmp=key)


def test_mistakes_name_the_arguments_of_this_function(inputs):
    query, key, value, gates = inputs
    with pytest.raises(ValueError, match=r"key has length 39: must be 40"):
        nsa_jax.nsa_self_attention(query, key[:, 1:], value[:, 1:], gates, config=SMALL)
    with pytest.raises(ValueError, match=r"^value has shape"):
        nsa_jax.nsa_self_attention(query, key, value[:, 1:], gates, config=SMALL)


def test_the_config_goes_through_jit_as_an_argument_and_another_one_is_traced_anew(inputs):
    query, key, value, gates = inputs
    traces = []

    @jax.jit
    def window(query, key, value, config):
        traces.append(config)
        return nsa_jax.window_attention(query, key, value, window=config.window)

    configs = [NSAConfig(**{**vars(SMALL), "window": w}) for w in (8, 8, 12)]
    outs = [window(query, key, value, config) for config in configs]
    assert traces == [configs[0], configs[2]]
    assert jax.tree.leaves(configs[0]) == [] and jax.tree.map(lambda x: x, configs[0]) == configs[0]
    np.testing.assert_array_equal(outs[0], outs[1])
    assert np.abs(outs[0] - outs[2]).max() > 1e-3


def test_the_operator_is_jitted_without_static_argnames(inputs):
    found = jax.jit(nsa_jax.nsa_self_attention)(*inputs, config=SMALL)
    np.testing.assert_allclose(found, explicit(*inputs, implementation="reference"), atol=2e-6)
