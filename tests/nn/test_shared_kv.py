"""One projection of keys and values for all branches: against the ops' reference, and against three equal ones."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from nsa_jax.config import default_config
from nsa_jax.nn import ModelConfig, NSAttention, Transformer, count_parameters, function_differences
from nsa_jax.ops import reference
from nsa_jax.ops.blocks import NSAConfig
from nsa_jax.train.flops import forward_flops_per_token
from tests.nn.test_model_options import OPTIONS, assert_computes, fill

pytestmark = pytest.mark.usefixtures("quick_compilation")

NSA = NSAConfig(compress_block=8, compress_stride=4, select_block=8, num_selected=3, num_local=1, window=10)
CONFIG = ModelConfig(
    dim=24, num_heads=4, num_kv_heads=2, head_dim=16, value_head_dim=8, vocab_size=50, mlp_dim=24, nsa=NSA,
    init_std=0.3, compute_dtype="float32", implementation="xla", shared_kv=True, remat="none", **OPTIONS,
)  # fmt: skip
LENGTH = 44


def inputs():
    starts = np.where(np.arange(LENGTH) >= 21, 21, 0)
    x = jax.random.normal(jax.random.key(1), (2, LENGTH, CONFIG.dim))
    return x, jnp.asarray(np.stack([starts, np.zeros(LENGTH)]), jnp.int32)


def by_hand(attention: NSAttention, x, start):
    """The layer from its parameters and the reference of the ops: keys are compressed unroped, turned for the rest."""
    config, t = attention.config, jnp.arange(LENGTH)
    n, k, h, v = config.num_heads, config.num_kv_heads, config.head_dim, config.value_head_dim
    projected = x @ attention.w_in[...]
    bias = attention.b_in[...]
    query, key, value = jnp.split(projected[..., : len(bias)] + bias, [n * h, n * h + k * h], axis=-1)
    query = attention.q_norm(query.reshape(2, LENGTH, n, h))
    key, value = attention.k_norm(key.reshape(2, LENGTH, k, h)), value.reshape(2, LENGTH, k, v)
    gates = jax.nn.sigmoid(projected[..., len(bias) :].reshape(2, LENGTH, n, 3) + attention.gate_bias[...])
    key_cmp = attention.compress_key(key)
    key_cmp = config.rope(key_cmp, jnp.arange(key_cmp.shape[1]) * 4 + 7)
    query, key = config.rope(query, t), config.rope(key, t)
    common = dict(segment_start=start)
    out_cmp, lse = reference.compressed_attention(query, key_cmp, attention.compress_value(value), config=NSA, **common)
    lists = reference.select_blocks(query, key_cmp, lse, config=NSA, num_keys=LENGTH, **common)
    out_slc = reference.selected_attention(query, key, value, lists, select_block=NSA.select_block, **common)
    out_win = reference.window_attention(query, key, value, window=NSA.window, **common)
    attended = sum(gates[..., i, None] * out for i, out in enumerate((out_cmp, out_slc, out_win)))
    return attended.reshape(2, LENGTH, -1) @ attention.w_out[...] + attention.b_out[...]


def test_layer_and_gradients_are_those_of_the_reference():
    assert_computes(fill(NSAttention(CONFIG, rngs=nnx.Rngs(0))), by_hand, *inputs(), tolerance=3e-5)


def test_three_equal_projections_are_one():
    """The layer is the one with a projection per branch whose keys and values are the same."""
    shared = fill(NSAttention(CONFIG, rngs=nnx.Rngs(0)))
    apart = NSAttention(dataclasses.replace(CONFIG, shared_kv=False), rngs=nnx.Rngs(0))
    n, k, h, v = CONFIG.num_heads, CONFIG.num_kv_heads, CONFIG.head_dim, CONFIG.value_head_dim
    query, pair = n * h, k * (h + v)
    assert shared.w_in.shape == (CONFIG.dim, query + pair + 3 * n) and shared.b_in.shape == (query + pair,)

    def repeated(array):
        return jnp.concatenate(
            [array[..., :query], *[array[..., query : query + pair]] * 3, array[..., query + pair :]], -1
        )

    state = nnx.to_pure_dict(nnx.state(shared))
    nnx.update(apart, state | {name: repeated(state[name]) for name in ("w_in", "b_in")})
    x, start = inputs()
    np.testing.assert_allclose(shared(x, start), apart(x, start), atol=1e-5)


def test_parameters_are_a_dense_layers_with_compressors_and_gates():
    def parameters(**changes):
        return count_parameters(Transformer(dataclasses.replace(CONFIG, **changes), rngs=nnx.Rngs(0)))

    n, k, h, v = CONFIG.num_heads, CONFIG.num_kv_heads, CONFIG.head_dim, CONFIG.value_head_dim
    gates = 3 * n * (CONFIG.dim + 1)
    phi = sum(8 * f + 8 * f * 2 * f + 2 * f + 2 * f * f for f in (h, v))  # position, W_1, b_1, W_2
    assert parameters() == parameters(attention="dense") + gates + phi
    pair = (CONFIG.dim + 1) * k * (h + v)  # with biases
    assert parameters(shared_kv=False) == parameters() + 2 * pair
    flops = [forward_flops_per_token(dataclasses.replace(CONFIG, shared_kv=x), LENGTH) for x in (False, True)]
    assert flops[0]["projections"] - flops[1]["projections"] == 2 * 2 * CONFIG.dim * k * (h + v)
    assert all(flops[0][name] == flops[1][name] for name in flops[0] if name != "projections")


def test_shared_keys_are_another_function():
    saved, wanted = default_config().model.to_dict(), default_config().model.to_dict()
    saved["nsa"].pop("shared_kv")  # as configs were before it existed
    assert not function_differences(saved, wanted)
    wanted["nsa"]["shared_kv"] = True
    (problem,) = function_differences(saved, wanted)
    assert (
        problem.rule == "R054" and "config.model.nsa.shared_kv: False where it was saved, True here" in problem.message
    )
    config = default_config()
    config.model.nsa.shared_kv = True
    assert ModelConfig.from_config(config, 50).shared_kv
