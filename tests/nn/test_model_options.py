"""Norms of queries and keys, biases, RoPE's scaling and partial RoPE: layers against the definitions in float64."""

from __future__ import annotations

import dataclasses
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from nsa_jax.config import default_config, validate
from nsa_jax.nn import ModelConfig, NSAttention, Transformer, function_differences
from nsa_jax.nn.transformer import Block
from nsa_jax.ops.blocks import NSAConfig
from nsa_jax.ops.rope import RopeScaling, rope_turns

LENGTH = 40
# Every row fits into the window and into the selected blocks: each of the two branches alone is dense attention.
NSA = NSAConfig(
    compress_block=8, compress_stride=4, select_block=8, num_selected=5, num_initial=1, num_local=2, window=LENGTH
)
OPTIONS = dict(
    qk_norm=True, qkv_bias=True, out_bias=True, mlp_bias=True, rotary_dim=8,
    rope_scaling=RopeScaling("yarn", 4.0, 16),
)  # fmt: skip
CONFIG = ModelConfig(
    dim=32, num_heads=4, num_kv_heads=2, head_dim=16, value_head_dim=8, vocab_size=50, mlp_dim=24, nsa=NSA,
    init_std=0.3, compute_dtype="float32", implementation="reference", **OPTIONS,
)  # fmt: skip


def fill(module, seed=0):
    """Gives biases, norms and gates numbers that show."""
    params = nnx.state(module, nnx.Param)

    def drawn(path, leaf):
        names = [str(getattr(key, "key", key)) for key in path]
        if any(name in names for name in ("b_in", "b_out", "scale", "gate_bias")):
            key = jax.random.fold_in(jax.random.key(seed), zlib.crc32("/".join(names).encode()))
            return leaf + jax.random.normal(key, leaf.shape) * 0.5
        return leaf

    nnx.update(module, jax.tree_util.tree_map_with_path(drawn, params))
    return module


def assert_computes(layer, by_hand, x, start, tolerance):
    """A layer and its gradients are a function of the layer, x and start, up to a share of the largest number."""
    graphdef, params = nnx.split(layer)

    def results(call):
        def loss(params, x):
            out = call(nnx.merge(graphdef, params), x, start)
            return jnp.sin(3 * out).sum(), out

        return jax.jit(jax.grad(loss, (0, 1), has_aux=True))(params, x)

    got, want = results(lambda layer, x, start: layer(x, start)), results(by_hand)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert np.abs(b).max() > 1e-3
        np.testing.assert_allclose(a, b, atol=tolerance * np.abs(b).max())


def block_by_hand(block, x, config):
    """One row of a dense block, from the definitions, float64."""
    get = lambda value: np.asarray(value[...], np.float64)  # noqa: E731

    def norm(x, scale):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + config.norm_eps) * scale

    n, k, h, v = config.num_heads, config.num_kv_heads, config.head_dim, config.value_head_dim
    a, t = block.attention, len(x)
    turns = rope_turns(jnp.arange(t), h, config.rope_theta, scaling=config.rope_scaling, rotary_dim=config.rotary_dim)
    cos, sin = (np.asarray(turn, np.float64)[:, None] for turn in turns)

    def turn(x):
        first, second = x[..., : h // 2], x[..., h // 2 :]
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)

    projected = norm(x, get(block.norm_attention.scale)) @ get(a.w_in) + get(a.b_in)
    query, key, value = np.split(projected, np.cumsum([n * h, k * h]), axis=-1)
    query = turn(norm(query.reshape(t, n, h), get(a.q_norm.scale)))
    key = turn(norm(key.reshape(t, k, h), get(a.k_norm.scale)))
    value = value.reshape(t, k, v)
    key, value = (np.repeat(x, n // k, axis=1) for x in (key, value))
    scores = np.einsum("tnh,snh->nts", query, key) / np.sqrt(h)
    scores = np.where(np.tril(np.ones((t, t), bool)), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    out = np.einsum("nts,snv->tnv", weights, value).reshape(t, n * v)
    x = x + out @ get(a.w_out) + get(a.b_out)
    m = block.mlp
    gate, up = np.split(norm(x, get(block.norm_mlp.scale)) @ get(m.w_in) + get(m.b_in), 2, axis=-1)
    return x + (gate / (1 + np.exp(-gate)) * up) @ get(m.w_out) + get(m.b_out)


def test_a_dense_block_with_every_option_is_that_of_the_definitions():
    config = dataclasses.replace(CONFIG, attention="dense")
    block = fill(Block(config, rngs=nnx.Rngs(0)))
    x = jax.random.normal(jax.random.key(1), (1, LENGTH, config.dim))
    want = block_by_hand(block, np.asarray(x[0], np.float64), config)
    np.testing.assert_allclose(block(x)[0], want, atol=2e-5)


@pytest.mark.parametrize("branch", [1, 2], ids=["selected", "window"])
def test_selected_and_window_branches_treat_queries_and_keys_as_dense_attention_does(branch):
    dense = fill(Block(dataclasses.replace(CONFIG, attention="dense"), rngs=nnx.Rngs(0)))
    nsa = NSAttention(CONFIG, rngs=nnx.Rngs(1))
    n, k, h, v = CONFIG.num_heads, CONFIG.num_kv_heads, CONFIG.head_dim, CONFIG.value_head_dim

    def repeated(array):  # query, then key and value of all three branches
        query, key_value = array[..., : n * h], array[..., n * h :]
        return jnp.concatenate([query, *(key_value,) * 3], axis=-1)

    gates = jnp.zeros((CONFIG.dim, 3 * n))
    nsa.w_in[...] = jnp.concatenate([repeated(dense.attention.w_in[...]), gates], axis=-1)
    nsa.b_in[...] = repeated(dense.attention.b_in[...])
    nsa.gate_bias[...] = jnp.full((n, 3), -100.0).at[:, branch].set(100.0)
    for name in ("q_norm", "k_norm"):
        getattr(nsa, name).scale[...] = getattr(dense.attention, name).scale[...]
    nsa.w_out[...], nsa.b_out[...] = dense.attention.w_out[...], dense.attention.b_out[...]
    x = jax.random.normal(jax.random.key(1), (2, LENGTH, CONFIG.dim))
    np.testing.assert_allclose(nsa(x), dense.attention(x), atol=2e-5)
    keys = nsa.project(x, jnp.arange(LENGTH)).key_raw
    raw = (x @ nsa.w_in[...])[..., n * h : n * h + k * h] + nsa.b_in[n * h : n * h + k * h]
    np.testing.assert_allclose(keys, nsa.k_norm(raw.reshape(2, LENGTH, k, h)), atol=1e-5)
    assert v != h


def test_rows_longer_than_the_original_length_turn_all_keys_by_the_row_under_dynamic_scaling():
    """Attention scores of a row depend on its length, compressed keys included, and not on how it is computed."""
    scaled = dataclasses.replace(CONFIG, qk_norm=False, rope_scaling=RopeScaling("dynamic", 4.0, 16))
    theta = CONFIG.rope_theta * (4.0 * LENGTH / 16 - 3) ** (8 / 6)
    for kind, changes in (
        ("yarn", dict(rope_theta=1.0)),
        ("dynamic", dict(rope_theta=0.5)),
        ("dynamic", dict(rotary_dim=2)),
    ):
        with pytest.raises(ValueError, match=f"RoPE scaling of the kind '{kind}' needs"):
            dataclasses.replace(scaled, rope_scaling=RopeScaling(kind, 4.0, 16), **changes)
    plain = dataclasses.replace(scaled, rope_scaling=RopeScaling(), rope_theta=theta)
    x = jax.random.normal(jax.random.key(1), (2, LENGTH, CONFIG.dim))
    outs = [fill(NSAttention(config, rngs=nnx.Rngs(0)))(x) for config in (scaled, plain)]
    np.testing.assert_allclose(*outs, atol=1e-5)
    short = x[:, :16]
    outs = [
        fill(NSAttention(dataclasses.replace(c, rope_theta=CONFIG.rope_theta), rngs=nnx.Rngs(0)))(short)
        for c in (scaled, plain)
    ]
    np.testing.assert_allclose(*outs, atol=1e-6)


def test_every_new_parameter_gets_a_gradient_and_biases_and_norms_do_not_decay():
    from nsa_jax.train.optimizer import decays

    model = fill(Transformer(CONFIG, rngs=nnx.Rngs(0)))
    graphdef, params = nnx.split(model)
    tokens = jax.random.randint(jax.random.key(2), (2, LENGTH), 0, CONFIG.vocab_size)
    grads = jax.grad(lambda p: jnp.sin(nnx.merge(graphdef, p)(tokens)).sum())(params)
    for path, leaf in jax.tree_util.tree_leaves_with_path(nnx.to_pure_dict(grads)):
        name = jax.tree_util.keystr(path)
        assert bool(jnp.isfinite(leaf).all()) and float(jnp.abs(leaf).max()) > 0, name
        matrix = any(part in name for part in ("w_in", "w_out", "w_1", "w_2", "embedding"))
        assert decays(path) == matrix, name


@pytest.mark.parametrize(
    ("changes", "rule", "message"),
    [
        ({"rotary_dim": 7}, "R004", "config.model.rotary_dim=7: odd"),
        ({"rotary_dim": 128}, "R004", "config.model.rotary_dim=128"),
        ({"rope_scaling": {"kind": "longrope"}}, "R001", "config.model.rope_scaling.kind='longrope': no such choice"),
        ({"rope_scaling": {"kind": "yarn", "factor": 4.0}}, "R005", "rope_scaling.original_length=0"),
        ({"rope_scaling": {"factor": 0.5}}, "R003", "config.model.rope_scaling.factor=0.5: out of range"),
    ],
)
def test_options_that_mean_nothing_are_refused(changes, rule, message):
    config = default_config()
    config.model.update(changes)
    found = [problem for problem in validate(config) if problem.severity == "error"]
    assert any(problem.rule == rule and message in problem.message for problem in found), found


def test_another_scaling_is_another_function():
    saved = default_config().model.to_dict()
    saved.pop("rope_scaling")  # as configs were before it existed
    wanted = default_config().model.to_dict()
    assert not function_differences(saved, wanted)
    wanted["rope_scaling"]["factor"] = 4.0  # which nothing reads yet
    assert not function_differences(saved, wanted)
    wanted["rope_scaling"]["kind"] = "linear"
    (problem,) = function_differences(saved, wanted)
    assert "config.model.rope_scaling.kind: 'none' where it was saved, 'linear' here" in problem.message
    saved = {**wanted, "rope_scaling": {**wanted["rope_scaling"], "factor": 2.0}}
    (problem,) = function_differences(saved, wanted)
    assert "config.model.rope_scaling.factor: 2.0 where it was saved, 4.0 here" in problem.message
