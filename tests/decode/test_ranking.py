"""Which blocks a decode step chooses by their scores."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nsa_jax.ops.kernels.decode import ranking


@pytest.mark.parametrize("largest", [ranking._largest_by_pairs, ranking._largest_by_narrowing])
@pytest.mark.parametrize("width", [16, 64, 128])
def test_the_largest_are_chosen_and_of_equal_ones_the_first(width, largest):
    """Few different values, so that many are equal; at least one element is negative, as a forced block is."""
    rng = np.random.default_rng(width)
    choose = jax.jit(largest)
    for values in (1, 2, 5, 2**31 - 2**23):
        bits = rng.integers(-1, values, width).astype(np.int32)
        bits[rng.integers(width)] = -1
        order = np.argsort(-bits.astype(np.int64), kind="stable")
        for want in {0, 1, width // 3, int((bits >= 0).sum())}:
            if want > (bits >= 0).sum():
                continue
            expected = np.zeros(width, bool)
            expected[order[:want]] = True
            np.testing.assert_array_equal(choose(jnp.asarray(bits), jnp.int32(want)), expected)
