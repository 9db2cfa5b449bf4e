"""RoPE, RMSNorm, compressor: the parts, each against an independent formulation."""

import dataclasses
import functools
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from nsa_jax import NSAConfig
from nsa_jax.config import default_config, validate
from nsa_jax.nn import ModelConfig, NSAttention, projection
from nsa_jax.nn.layers import MLPCompressor, RMSNorm, dropout
from nsa_jax.ops.rope import rope

NSA = NSAConfig(
    compress_block=8, compress_stride=4, select_block=8, num_selected=4, num_initial=1, num_local=2, window=16
)
CONFIG = ModelConfig(
    dim=32, num_heads=4, num_kv_heads=2, head_dim=8, nsa=NSA, compute_dtype="float32", implementation="reference"
)


def test_rope_is_a_rotation_of_pairs_of_each_head():
    x = jax.random.normal(jax.random.key(0), (2, 5, 3, 8))
    positions = jnp.asarray([0, 1, 7, 100, 1000])
    got = rope(x, positions, 10_000.0)
    pairs = np.asarray(x[..., :4] + 1j * x[..., 4:], np.complex128)
    angle = np.asarray(positions)[:, None] * 10_000.0 ** (-np.arange(4) / 4)
    want = pairs * np.exp(1j * angle)[None, :, None, :]
    chex.assert_trees_all_close(got, np.concatenate([want.real, want.imag], -1), atol=1e-4)
    chex.assert_trees_all_equal(got[:, 0], x[:, 0])


@pytest.mark.parametrize("heads", [1, 3])
def test_scores_do_not_change_when_all_positions_are_shifted(heads):
    # Per head: turning concatenated heads as one vector would fail for heads > 1.
    query, key = jax.random.normal(jax.random.key(1), (2, 1, 20, heads, 16))
    positions = jnp.arange(20)

    def scores(shift):
        return jnp.einsum(
            "btnh,bsnh->bnts", rope(query, positions + shift, 10_000.0), rope(key, positions + shift, 10_000.0)
        )

    chex.assert_trees_all_close(scores(0), scores(777), atol=5e-4)
    per_head = [rope(query[:, :, n : n + 1], positions, 10_000.0) for n in range(heads)]
    chex.assert_trees_all_equal(rope(query, positions, 10_000.0), jnp.concatenate(per_head, 2))


def test_shifting_positions_leaves_the_attention_layer_unchanged():
    graphdef, params = nnx.split(NSAttention(CONFIG, rngs=nnx.Rngs(0)))
    layer = jax.jit(lambda x, positions=None: nnx.merge(graphdef, params)(x, positions=positions))
    x = jax.random.normal(jax.random.key(2), (2, 40, 32))
    moved = layer(x, positions=jnp.arange(40) + 512)
    chex.assert_trees_all_close(layer(x), moved, atol=1e-5)
    per_row = layer(x, positions=jnp.broadcast_to(jnp.arange(40) + 512, (2, 40)))
    chex.assert_trees_all_close(moved, per_row, atol=1e-6)
    other = layer(x, positions=2 * jnp.arange(40))
    assert float(jnp.abs(other - moved).max()) > 1e-4


def test_gates_begin_at_the_sigmoid_of_their_bias():
    layer = NSAttention(dataclasses.replace(CONFIG, gate_bias=2.0, init_std=1e-6), rngs=nnx.Rngs(0))
    gates = layer.project(jnp.ones((1, 3, 32)), jnp.arange(3)).gates
    chex.assert_trees_all_close(gates, jnp.full((1, 3, 4, 3), 1 / (1 + np.exp(-2.0))), atol=1e-3)
    config = default_config()
    config.model.nsa.gate_bias = -1.5
    assert ModelConfig.from_config(config, 8).gate_bias == -1.5
    config.model.nsa.gate_bias = 99.0
    assert [problem.rule for problem in validate(config)] == ["R003"]


def test_rms_norm_statistics_are_float32():
    config = ModelConfig(dim=64, num_heads=4, num_kv_heads=2, head_dim=8)
    norm = RMSNorm(config)
    x = 1e3 + jax.random.normal(jax.random.key(0), (2, 3, 64))
    want = x / np.sqrt(np.mean(np.square(np.asarray(x, np.float64)), -1, keepdims=True) + 1e-6)
    got = norm(x)
    assert got.dtype == jnp.bfloat16
    chex.assert_trees_all_close(got.astype(jnp.float32), want.astype(jnp.float32), rtol=4e-3)


@pytest.mark.parametrize(("block", "stride", "length"), [(8, 4, 37), (8, 8, 24), (12, 4, 12), (8, 2, 50)])
def test_mlp_compressor_equals_gathering_every_block(block, stride, length):
    nsa = NSAConfig(compress_block=block, compress_stride=stride, select_block=2 * block, num_selected=4, window=16)
    config = ModelConfig(dim=32, num_heads=4, num_kv_heads=2, head_dim=8, nsa=nsa, compute_dtype="float32")
    phi = MLPCompressor(config, 6, rngs=nnx.Rngs(3))
    phi.b_1[...] = jax.random.normal(jax.random.key(5), phi.b_1.shape)
    x = jax.random.normal(jax.random.key(4), (2, length, 2, 6))
    count = (length - block) // stride + 1
    gathered = jnp.stack([x[:, i * stride : i * stride + block] for i in range(count)], 1)  # [B, C, l, K, H]
    inside = jnp.moveaxis(gathered + phi.position[...][:, None, :], 3, 2).reshape(2, count, 2, block * 6)
    hidden = jax.nn.silu(inside @ phi.w_1[...].reshape(block * 6, -1) + phi.b_1[...])
    chex.assert_trees_all_close(phi(x), gathered.mean(2) + hidden @ phi.w_2[...], atol=1e-5)


def test_compressor_of_a_short_row_is_empty():
    chex.assert_shape(MLPCompressor(CONFIG, 8, rngs=nnx.Rngs(0))(jnp.ones((2, 7, 2, 8))), (2, 0, 2, 8))


def test_dropout_keeps_the_mean_and_the_asked_share():
    x = jnp.ones((200, 200))
    y = dropout(x, 0.25, jax.random.key(0))
    assert abs(float((y == 0).mean()) - 0.25) < 0.01
    assert abs(float(y.mean()) - 1.0) < 0.02
    chex.assert_trees_all_equal(dropout(x, 0.25, None), x)


def test_config_mistakes_name_the_field():
    base = dict(dim=32, num_heads=4, num_kv_heads=2, head_dim=8)
    with pytest.raises(ValueError, match="num_kv_heads=3"):
        ModelConfig(**{**base, "num_kv_heads": 3})
    with pytest.raises(ValueError, match="head_dim=7"):
        ModelConfig(**{**base, "head_dim": 7})
    with pytest.raises(ValueError, match="remat='some'"):
        ModelConfig(**base, remat="some")
    for name, value, expected in (
        ("dim", 32.0, "a whole number"),
        ("num_layers", True, "a whole number"),
        ("num_heads", "4", "a whole number"),
        ("vocab_size", -5, "at least 0"),
        ("nsa", {"window": 8}, "an nsa_jax.NSAConfig"),
        ("shared_kv", "no", "True or False"),
        ("gate_bias", float("nan"), "a finite number"),
        ("norm_eps", -1.0, "at least 0"),
        ("rope_theta", 0.0, "positive"),
    ):
        with pytest.raises(ValueError, match=rf"ModelConfig\.{name}=.*: must be {expected}"):
            ModelConfig(**{**base, name: value})


def test_scalars_of_numpy_become_those_of_python():
    config = ModelConfig(
        dim=np.int16(16384), num_heads=np.int64(4), num_kv_heads=2, head_dim=8, init_std=np.float64(0.02)
    )
    assert config.mlp_dim == 43712 and type(config.num_heads) is int and type(config.init_std) is float
    assert type(NSAConfig(window=np.uint16(512)).window) is int


def test_mistakes_in_a_layers_input_are_named():
    layer = NSAttention(CONFIG, rngs=nnx.Rngs(0))
    x = jnp.ones((2, 16, 32))
    for message, call in {
        r"x has shape \(2, 16, 31\): dimension 2 \(D\) must be 32": lambda: layer(x[..., :31]),
        r"x has shape \(0, 16, 32\): every size must be >= 1": lambda: layer(x[:0]),
        "x has dtype bfloat16: must be float32; cast it": lambda: layer(x.astype(jnp.bfloat16)),
        r"segment_start has shape \(2, 15\).*must be 16 to match x": lambda: layer(x, jnp.zeros((2, 15), jnp.int32)),
        r"positions has shape \(1,\): dimension 0 \(T\) must be 16": lambda: layer(
            x, positions=jnp.zeros(1, jnp.int32)
        ),
        "positions has dtype float32: must be an integer": lambda: layer(x, positions=jnp.zeros(16)),
    }.items():
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.parametrize("widths", [(8, 4, 4, 3), (8, 4, 4, 3, 5), (24,)])
def test_cut_with_gradients_written_piece_by_piece_is_a_cut(widths):
    key, x = jax.random.key(0), jax.random.normal(jax.random.key(1), (2, 5, 24))
    weights = [jax.random.normal(jax.random.fold_in(key, i), (2, 5, width)) for i, width in enumerate(widths)]

    def loss(cut, x):
        return sum(jnp.sum(jnp.sin(piece) * weight) for piece, weight in zip(cut(x), weights, strict=True))

    ends = [sum(widths[:i]) for i in range(len(widths) + 1)]
    plain = functools.partial(loss, lambda x: [x[..., a:b] for a, b in itertools.pairwise(ends)])
    written = functools.partial(loss, lambda x: projection._cut_activations(x, widths, 24))
    chex.assert_trees_all_equal(jax.value_and_grad(written)(x), jax.value_and_grad(plain)(x))
    assert float(jnp.abs(jax.grad(plain)(x)).max()) > 0.5
