"""More than 2^31 elements in one array: offsets inside the kernels must not wrap."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nsa_jax
from nsa_jax.ops import blocks

CONFIG = nsa_jax.NSAConfig()


@pytest.mark.gpu
@pytest.mark.slow
def test_the_end_of_a_row_of_more_than_2_31_elements_is_right():
    length, heads, kv_heads, dim, tail = 2**18 + 64, 64, 4, 128, 64
    assert length * heads * dim > 2**31
    keys = iter(jax.random.split(jax.random.key(0), 8))

    def normal(*shape):
        return jax.random.normal(next(keys), (1, *shape), jnp.bfloat16)

    num_cmp = blocks.num_compressed(length, CONFIG)
    query, gates = normal(length, heads, dim), jax.nn.sigmoid(normal(length, heads, 3))
    arrays = [normal(size, kv_heads, dim) for size in (num_cmp, num_cmp, length, length, length, length)]

    @jax.jit
    def run(query, arrays, gates):
        out, lists = nsa_jax.nsa_attention(
            query, *arrays, gates, config=CONFIG, implementation="pallas", return_block_indices=True
        )
        return out[:, -tail:], lists[:, -tail:]

    out, lists = run(query, arrays, gates)
    # The reference on the last queries alone, against all keys: few queries, so that it fits.
    expected, expected_lists = jax.jit(
        lambda query, arrays, gates: nsa_jax.nsa_attention(
            query,
            *arrays,
            gates,
            config=CONFIG,
            query_offset=length - tail,
            implementation="reference",
            return_block_indices=True,
        )
    )(query[:, -tail:], arrays, gates[:, -tail:])
    same = np.mean(np.asarray(lists) == np.asarray(expected_lists))
    assert same >= 0.99  # near-ties of bfloat16 scores may fall either way
    rows = np.all(np.asarray(lists) == np.asarray(expected_lists), axis=-1)[..., None]  # [1, tail, K, 1]
    rows = np.repeat(rows, heads // kv_heads, axis=2)
    difference = np.where(rows, np.asarray(out, np.float32) - np.asarray(expected, np.float32), 0.0)
    chex.assert_tree_all_finite(out)
    assert np.linalg.norm(difference) / np.linalg.norm(np.asarray(expected, np.float32)) <= 4e-3
