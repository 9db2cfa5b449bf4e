"""RoPE's frequencies under every kind of scaling, against loops in float64 over the definitions."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
import pytest

from nsa_jax.ops.rope import RopeScaling, rope, rope_turns

DIM, THETA, ORIGINAL, FACTOR = 64, 10_000.0, 128, 8.0


def frequencies(**options):
    """Radians per token, read off the angle at position 1; frequencies are at most 1."""
    cos, sin = rope_turns(jnp.asarray([1]), DIM, THETA, **options)
    return np.arctan2(np.asarray(sin, np.float64), np.asarray(cos, np.float64))[0]


def plain(theta=THETA):
    return np.asarray([theta ** (-2 * i / DIM) for i in range(DIM // 2)])


def test_linear_divides_every_frequency():
    np.testing.assert_allclose(frequencies(scaling=RopeScaling("linear", FACTOR)), plain() / FACTOR, rtol=1e-5)


def test_dynamic_raises_the_base_of_rows_beyond_the_original_length():
    scaling = RopeScaling("dynamic", FACTOR, ORIGINAL)
    np.testing.assert_allclose(frequencies(scaling=scaling, length=ORIGINAL), plain(), rtol=1e-5)
    length = 300
    base = THETA * (FACTOR * length / ORIGINAL - (FACTOR - 1)) ** (DIM / (DIM - 2))
    np.testing.assert_allclose(frequencies(scaling=scaling, length=length), plain(base), rtol=1e-5)


def test_dynamic_leaves_a_single_pair_as_it_is():
    """Its frequency is 1 whatever the base; the base itself would be infinite."""
    cos, sin = rope_turns(jnp.arange(300), 2, THETA, scaling=RopeScaling("dynamic", FACTOR, ORIGINAL), length=300)
    np.testing.assert_allclose(np.arctan2(sin, cos).ravel()[:4], [0, 1, 2, 3], atol=1e-5)


def test_llama3_keeps_high_frequencies_and_divides_low_ones():
    low, high = 1.5, 6.0
    got = frequencies(scaling=RopeScaling("llama3", FACTOR, ORIGINAL, low_freq_factor=low, high_freq_factor=high))
    want, kinds = [], set()
    for frequency in plain():
        wavelength = 2 * math.pi / frequency
        if wavelength < ORIGINAL / high:
            want.append(frequency)
            kinds.add("kept")
        elif wavelength > ORIGINAL / low:
            want.append(frequency / FACTOR)
            kinds.add("divided")
        else:
            smooth = (ORIGINAL / wavelength - low) / (high - low)
            want.append((1 - smooth) * frequency / FACTOR + smooth * frequency)
            kinds.add("between")
    assert kinds == {"kept", "divided", "between"}
    np.testing.assert_allclose(got, want, rtol=1e-5)


@pytest.mark.parametrize("attention_factor", [0.0, 1.25])
def test_yarn_ramps_between_two_numbers_of_turns_and_scales_cosines(attention_factor):
    scaling = RopeScaling("yarn", FACTOR, ORIGINAL, beta_fast=16.0, beta_slow=2.0, attention_factor=attention_factor)
    amplitude = attention_factor or 0.1 * math.log(FACTOR) + 1
    positions = jnp.arange(40)
    cos, sin = rope_turns(positions, DIM, THETA, scaling=scaling)
    np.testing.assert_allclose(np.hypot(cos, sin), amplitude, rtol=1e-5)

    def pair(turns):
        return DIM * math.log(ORIGINAL / (turns * 2 * math.pi)) / (2 * math.log(THETA))

    first, last = max(math.floor(pair(16.0)), 0), math.ceil(pair(2.0))
    assert 0 <= first < last < DIM // 2
    want = []
    for i, frequency in enumerate(plain()):
        stretched = min(max((i - first) / (last - first), 0.0), 1.0)
        want.append(frequency / FACTOR * stretched + frequency * (1 - stretched))
    np.testing.assert_allclose(frequencies(scaling=scaling), want, rtol=1e-5)


def test_features_beyond_rotary_dim_stay_as_they_are():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 5, 2, 16)), jnp.float32)
    positions = jnp.asarray([3, 4, 50, 7, 9])
    got = np.asarray(rope(x, positions, THETA, rotary_dim=8, scaling=RopeScaling("yarn", 2.0, 64)))
    still = [*range(4, 8), *range(12, 16)]
    np.testing.assert_array_equal(got[..., still], x[..., still])
    turned = [*range(4), *range(8, 12)]
    alone = rope(x[..., jnp.asarray(turned)], positions, THETA, scaling=RopeScaling("yarn", 2.0, 64))
    np.testing.assert_allclose(got[..., turned], alone, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(kind="longrope"), "rope_scaling.kind='longrope': must be one of none, linear"),
        (dict(kind="linear", factor=0.5), "rope_scaling.factor=0.5: must be at least 1"),
        (dict(kind="linear", factor="2"), "rope_scaling.factor='2': must be a finite number"),
        (dict(kind="linear", factor=float("inf")), "rope_scaling.factor=inf: must be a finite number"),
        (dict(kind="yarn", original_length=8, attention_factor=-1.0), "attention_factor=-1.0: must not be negative"),
        (dict(kind="yarn", factor=2.0), "rope_scaling.original_length=0: must be the tokens"),
        (dict(kind="llama3", original_length=8, low_freq_factor=4.0), "low_freq_factor=4.0: must be positive and less"),
        (dict(kind="yarn", original_length=8, beta_slow=40.0), "beta_slow=40.0: must be positive and at most"),
    ],
)
def test_scaling_that_means_nothing_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        RopeScaling(**fields)
