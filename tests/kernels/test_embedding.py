"""The gradient of an embedding lookup: against float64, for any distribution of tokens, the same bits in every run."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nsa_jax.ops.kernels.layer.embedding import _CHUNK, lookup_gradient, lookup_sums, summed_rows

# name: vocabulary, tokens, features, how tokens are drawn
CASES = {
    "zipf": (300, 1000, 64, lambda rng, v, n: np.minimum(rng.zipf(1.3, n) - 1, v - 1)),
    "odd": (37, 333, 192, lambda rng, v, n: rng.integers(0, v, n)),
    "one_token": (5, 2 * _CHUNK + 17, 128, lambda rng, v, n: np.full(n, 3)),
    "whole_chunks": (4, 2 * _CHUNK, 64, lambda rng, v, n: np.repeat([1, 2], _CHUNK)),
    "one_place": (9, 1, 64, lambda rng, v, n: np.array([8])),
    "outside": (50, 400, 64, lambda rng, v, n: rng.integers(-60, 110, n)),
    "large_vocabulary": (70_000, 200, 64, lambda rng, v, n: rng.integers(0, v, n)),
}


def _expected(tokens, grad, vocab):
    inside = (tokens >= 0) & (tokens < vocab)
    total = np.zeros((vocab, grad.shape[1]))
    np.add.at(total, tokens[inside], np.asarray(grad, np.float64)[inside])
    return total


# The interpreter of JAX 0.12 copies the whole output for each of the 70,000 programs.
_SLOW = {"large_vocabulary": pytest.mark.slow}
_CASES = [pytest.param(name, jnp.float32, marks=_SLOW.get(name, ())) for name in CASES]


@pytest.mark.parametrize("name,dtype", [*_CASES, ("zipf", jnp.bfloat16)])
def test_rows_of_equal_tokens_are_added(name, dtype):
    vocab, count, features, draw = CASES[name]
    rng = np.random.default_rng(0)
    tokens = draw(rng, vocab, count).astype(np.int32)
    grad = jnp.asarray(rng.normal(size=(count, features)), dtype)
    got = jax.jit(lookup_gradient, static_argnums=2)(jnp.asarray(tokens), grad, vocab)
    assert got.dtype == jnp.float32 and got.shape == (vocab, features)
    np.testing.assert_allclose(got, _expected(tokens, grad, vocab), rtol=1e-5, atol=2e-5)


def test_not_a_number_stays_with_its_token():
    grad = jnp.ones((40, 64)).at[7].set(jnp.nan)
    got = np.asarray(lookup_gradient(jnp.arange(40, dtype=jnp.int32) % 20, grad, 20))
    assert np.isnan(got[7]).all() and (np.delete(got, 7, axis=0) == 2).all()


def test_rows_of_some_tokens_are_those_of_all():
    tokens = jnp.asarray(np.random.default_rng(0).zipf(1.2, 1500) - 2, jnp.int32)  # -1 and numbers of 37 and more
    grad = jax.random.normal(jax.random.key(0), (1500, 64))
    sums = lookup_sums(tokens, grad, 37)
    parts = [jax.jit(summed_rows, static_argnums=2)(sums, first, 10 if first < 30 else 7) for first in range(0, 37, 10)]
    np.testing.assert_array_equal(np.concatenate(parts), lookup_gradient(tokens, grad, 37))


@pytest.mark.gpu
@pytest.mark.parametrize("vocab,count,features", [(32_768, 131_072, 768), (257, 65_536, 2048)])
def test_bits_do_not_depend_on_the_run(vocab, count, features):
    rng = np.random.default_rng(0)
    tokens = np.minimum(rng.zipf(1.2, count) - 1, vocab - 1).astype(np.int32)
    grad = jax.random.normal(jax.random.key(0), (count, features), jnp.bfloat16)
    run = jax.jit(lookup_gradient, static_argnums=2)
    first = np.asarray(run(tokens, grad, vocab))
    for _ in range(5):
        np.testing.assert_array_equal(run(tokens, grad, vocab), first)
    expected = _expected(tokens, grad, vocab)
    assert np.linalg.norm(first - expected) <= 1e-6 * np.linalg.norm(expected)
