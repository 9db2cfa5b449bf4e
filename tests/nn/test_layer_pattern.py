"""`layer_pattern`: layers of several kinds in one model, however it is run."""

from __future__ import annotations

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from nsa_jax import nn
from nsa_jax.config import default_config, validate
from nsa_jax.nn.cache import memory_report
from nsa_jax.nn.decoder import Decoder
from nsa_jax.nn.transformer import Block, layer_stacks
from nsa_jax.train.flops import forward_flops_per_token, keys_per_query
from nsa_jax.train.watch.health import forward_with_health
from tests.nn.test_cache import SMALL, decode_from_every_split, documents, random_tokens
from tests.nn.test_model_options import fill
from tests.nn.test_parallel import mesh_of

PATTERN = ("nsa", "window", "dense")
CONFIG = nn.ModelConfig(
    dim=16, num_heads=4, num_kv_heads=2, head_dim=8, vocab_size=31, num_layers=12, mlp_dim=24, nsa=SMALL,
    layer_pattern=PATTERN, compute_dtype="float32", implementation="reference", init_std=0.2, remat="none",
    dropout=0.2,
)  # fmt: skip
LENGTH = 90  # more than five selection blocks and seven windows


def make(**changes) -> nn.Transformer:
    model = nn.Transformer(dataclasses.replace(CONFIG, **changes), rngs=nnx.Rngs(0))
    fill(model)
    return model


def by_hand(model: nn.Transformer, tokens, key):
    """Logits of a loop over single layers, each of its own kind and with its own dropout key."""
    config, keys = model.config, jax.random.split(key, model.config.num_layers)
    x = model.embedding[...][tokens]
    for index in range(config.num_layers):
        kind = PATTERN[index % 3]
        single = dataclasses.replace(config, attention=kind, layer_pattern=())
        graphdef = nnx.graphdef(nnx.eval_shape(lambda c=single: Block(c, rngs=nnx.Rngs(0))))
        stack = nnx.state(getattr(model.blocks, f"layer_{index % 3}"))
        block = nnx.merge(graphdef, jax.tree.map(lambda leaf, i=index // 3: leaf[i], stack))
        x = block(x, None, dropout_key=keys[index])
    return model.norm(x) @ model.embedding[...].T


def trained(logits_of, **changes):
    """Loss and gradients of a model, whose logits a function of (model, tokens, key) gives."""
    graphdef, params = nnx.split(make(**changes))

    def loss(params, tokens, key):
        logits = logits_of(nnx.merge(graphdef, params), tokens[:, :-1], key)
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], -1).mean()

    return jax.jit(jax.value_and_grad(loss))(params, random_tokens(2, 50), jax.random.key(7))


@functools.cache
def truth():
    return trained(by_hand)


@pytest.mark.parametrize(
    "changes", [dict(remat="full"), dict(remat="block"), dict(remat="none", scan_layers=False)], ids=str
)
def test_every_way_to_run_gives_what_a_loop_over_the_layers_gives(changes):
    got = trained(lambda model, tokens, key: model(tokens, deterministic=False, rngs=key), **changes)
    chex.assert_trees_all_close(got, truth(), atol=1e-5, rtol=1e-4)


def test_every_parameter_of_every_layer_has_a_gradient():
    for path, gradient in jax.tree_util.tree_leaves_with_path(truth()[1]):
        rows = gradient if "blocks" in jax.tree_util.keystr(path) else gradient[None]
        for row in np.asarray(rows):
            assert np.isfinite(row).all() and row.any(), jax.tree_util.keystr(path)


def test_a_stack_for_each_position_of_the_shortest_pattern():
    model = make(layer_pattern=("nsa", "dense", "nsa", "dense"))
    assert model.config.layer_pattern == ("nsa", "dense") and model.config.layers_of("dense") == (1, 3, 5, 7, 9, 11)
    shapes = [stack.attention.w_in[...].shape for stack in layer_stacks(model.blocks, model.config)]
    assert shapes == [(6, 16, 4 * 8 + 6 * 16 + 12), (6, 16, 4 * 8 + 2 * 16)]


def test_a_pattern_of_one_kind_is_none():
    one, other = make(layer_pattern=("window", "window")), make(attention="window", layer_pattern=())
    assert one.config == other.config and one.config.attention == "window" and one.config.layer_pattern == ()
    chex.assert_trees_all_equal(nnx.state(one), nnx.state(other))


@pytest.mark.parametrize("packed", [False, True])
def test_prefill_and_decode_give_the_full_forward_pass(packed):
    model = make(num_layers=3)
    row = random_tokens(1, LENGTH)[0]
    start = documents(LENGTH) if packed else None
    want = np.asarray(model(jnp.asarray(row)[None], None if start is None else jnp.asarray(start)[None]))[0]
    decoder = Decoder(model, chunk=16)
    got = decode_from_every_split(decoder, row, start, splits=[1, 15, 47, 88])
    for logits in got:
        np.testing.assert_allclose(logits[: LENGTH - 1], want[: LENGTH - 1], atol=2e-4)


def test_each_layer_has_the_cache_of_its_kind():
    cache, config = nn.init_cache(CONFIG, 2, 256), CONFIG
    names = [type(layer).__name__ for layer in cache.layers]
    assert names == ["NSALayerCache", "WindowLayerCache", "DenseLayerCache"] * 4
    report, size = memory_report(config, 2, 256), sum(x.nbytes for x in jax.tree.leaves(cache.layers))
    assert report["total_mib"] * 2**20 == size
    token = 2 * 16 * 4  # key and value of one token in one layer, bytes
    assert report["dense_bytes_per_token"] == 12 * token and report["bytes_per_token"] == 8 * token + 4 * token / 4
    assert report["fixed_bytes_per_row"] == 4 * token * (12 + 8) + 4 * token * 12


def test_shares_of_tokens_and_heads_give_the_same_loss_and_gradients():
    graphdef, params = nnx.split(make(num_layers=6, implementation="xla"))
    run = jax.jit(jax.value_and_grad(lambda params, tokens: (nnx.merge(graphdef, params)(tokens) ** 2).mean()))
    tokens = random_tokens(2, 48)
    want = run(params, tokens)
    with jax.set_mesh(mesh_of(context=4, tensor=2)):
        got = run(params, tokens)
    for one, other in zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True):
        assert np.linalg.norm(one - other) <= 1e-4 * np.linalg.norm(one)


def test_health_has_figures_of_the_nsa_layers_alone():
    model, tokens = make(num_layers=6), jnp.asarray(random_tokens(1, 48))
    hidden, figures = forward_with_health(model, tokens, None)
    np.testing.assert_allclose(hidden, model.hidden(tokens), atol=1e-5)
    assert {value.shape for value in figures.values()} == {(2,)} and not figures["key_mismatches"].any()
    gates = [jax.nn.sigmoid(model.blocks.layer_0.attention.gate_bias[...][i]).mean() for i in range(2)]
    assert gates[0] != gates[1] and figures["gate_entropy"][0] != figures["gate_entropy"][1]


def test_operations_are_those_of_each_kind():
    total = sum(forward_flops_per_token(CONFIG, 100).values())
    head = 2.0 * 16 * 31
    alone = [dataclasses.replace(CONFIG, attention=kind, layer_pattern=()) for kind in PATTERN]
    assert total - head == pytest.approx(sum(sum(forward_flops_per_token(c, 100).values()) - head for c in alone) / 3)
    assert keys_per_query(CONFIG, 100) == {k: v for c in alone for k, v in keys_per_query(c, 100).items()}


def test_a_single_layer_has_one_kind():
    with pytest.raises(ValueError, match="a Block takes config.of_layer"):
        Block(CONFIG, rngs=nnx.Rngs(0))


BAD = [
    (("nsa", "sparse"), {}, "'sparse' is no kind of attention"),
    (("nsa", "dense", "dense", "dense", "dense"), {}, "5 kinds cannot be repeated over num_layers=12"),
    (("nsa", "window"), {"attention": "dense"}, "has no 'dense', which attention asks for"),
]


@pytest.mark.parametrize(("pattern", "changes", "words"), BAD)
def test_bad_patterns_are_refused(pattern, changes, words):
    with pytest.raises(ValueError, match=f"ModelConfig.layer_pattern=.*{words}"):
        dataclasses.replace(CONFIG, layer_pattern=pattern, **changes)
    config = default_config()
    config.model.layer_pattern = pattern
    config.model.update(changes)
    (problem,) = (p for p in validate(config) if p.severity == "error")
    assert problem.rule == "R004" and words in problem.message


@pytest.mark.parametrize("pattern", [None, "nsa"])
def test_patterns_are_tuples(pattern):
    with pytest.raises(ValueError, match=f"ModelConfig.layer_pattern={pattern!r}: must be a tuple of kinds"):
        dataclasses.replace(CONFIG, layer_pattern=pattern)


def test_the_same_parameters_under_another_pattern_are_another_function():
    saved = default_config().model.to_dict() | {"layer_pattern": ["dense", "window"]}  # as JSON has it
    assert not nn.function_differences(saved, saved | {"layer_pattern": ("dense", "window") * 3})
    (problem,) = nn.function_differences(saved, saved | {"layer_pattern": ("window", "dense")})
    assert problem.rule == "R054" and problem.message.startswith(
        "config.model.layer_pattern: ['dense', 'window'] where"
    )
    changed = saved | {"nsa": saved["nsa"] | {"window": 7, "num_local": 1}}
    assert [p.message[:23] for p in nn.function_differences(saved, changed)] == ["config.model.nsa.window"]
    plain = saved | {"layer_pattern": (), "attention": "window"}
    assert not nn.function_differences(plain, plain | {"layer_pattern": ("window", "window")})
    assert "config.model.attention: 'window'" in nn.function_differences(plain, plain | {"attention": "nsa"})[0].message
