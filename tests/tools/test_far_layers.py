"""The layers of a dense model that need to read far: found by measuring, kept dense by the command line."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from nsa_jax import NSAConfig, nn
from nsa_jax.evaluate.far_layers import FarLayers, _hidden, far_layers

LENGTH = 48


def make_model(**changes) -> nn.Transformer:
    fields = dict(dim=24, num_heads=4, num_kv_heads=2, head_dim=8, vocab_size=20, num_layers=3, mlp_dim=32)
    fields |= dict(attention="dense", compute_dtype="float32", init_std=0.3, qk_norm=True, qkv_bias=True) | changes
    return nn.Transformer(nn.ModelConfig(**fields), rngs=nnx.Rngs(0))


def with_pattern(model: nn.Transformer, kinds, window: int) -> nn.Transformer:
    """The same parameters under another pattern of layers."""
    config = dataclasses.replace(model.config, layer_pattern=kinds, nsa=NSAConfig(window=window))
    other = nn.Transformer(config, rngs=nnx.Rngs(1))
    params = nnx.to_pure_dict(nnx.state(model))
    layers = {f"layer_{i}": jax.tree.map(lambda a, i=i: a[i : i + 1], params["blocks"]) for i in range(len(kinds))}
    nnx.update(other, params | {"blocks": layers})
    return other


def test_layers_that_see_what_is_near_are_window_layers():
    model = make_model()
    tokens = jax.random.randint(jax.random.key(0), (2, LENGTH), 0, 20)
    want = with_pattern(model, ("window", "dense", "window"), 7)(tokens)
    got = model.logits(_hidden(model, tokens, jnp.asarray([7, LENGTH, 7]), 0))
    np.testing.assert_allclose(got, want, atol=2e-5)
    whole = model.logits(_hidden(model, tokens, jnp.full(3, LENGTH), 0))
    np.testing.assert_allclose(whole, model(tokens), atol=2e-5)
    assert float(jnp.abs(whole - got).max()) > 0.1


def test_all_layers_see_the_first_tokens_but_no_future_ones():
    model = make_model(num_layers=1)
    tokens = jax.random.randint(jax.random.key(0), (1, LENGTH), 0, 20)
    hidden = jax.jit(lambda tokens: _hidden(model, tokens, jnp.asarray([4]), 5))
    changed = {at: np.abs(hidden(tokens.at[0, at].add(1) % 20) - hidden(tokens)).max((0, 2)) > 1e-5 for at in (4, 5)}
    assert changed[4][4:].all() and not changed[4][:4].any()
    assert changed[5][5:9].all() and not changed[5][9:].any() and not changed[5][:5].any()


def test_the_layer_that_reads_far_is_found():
    """Attention of the first layer gives nothing, that of the last one little."""
    model = make_model()
    w_out = model.blocks.attention.w_out
    w_out[...] = w_out[...] * jnp.asarray([0.0, 1.0, 0.05])[:, None, None]
    rows = np.random.default_rng(0).integers(0, 20, (6, LENGTH + 1))
    rows[:, LENGTH // 2 :] = np.asarray(jnp.argmax(model(jnp.asarray(rows[:, :-1])), -1))[:, LENGTH // 2 - 1 :]
    told = []
    found = far_layers(model, rows, 3, near=4, first=0, batch_size=4, on_found=told.append)
    assert [len(early.layers) for early in told] == [1, 2, 3] and told[-1] == found
    assert (told[0].layers, told[0].losses) == (found.layers[:1], found.losses[:1])
    assert found.layers[0] == 1 and sorted(found.layers) == [0, 1, 2]
    assert found.alone[1] == found.losses[0] < min(found.alone[0], found.alone[2])
    assert found.alone[0] == pytest.approx(found.near, abs=1e-6)
    assert found.losses[-1] == pytest.approx(found.full, abs=1e-6) and found.share(2) == pytest.approx(1, abs=1e-4)
    assert 0.9 < found.share(0) < 1.1 and found.clear


@pytest.mark.parametrize(
    ("full", "alone", "clear"),
    [
        (3.83, (4.001, 3.87, 3.95), True),  # as in trained models
        (3.88, (4.001, 3.87, 3.95), True),  # one layer is enough, and a little better alone
        (3.92, (4.001, 3.87, 3.95), False),  # 163 % of the way
        (3.98, (4.050, 3.99, 3.99), False),  # a layer's view harms more than all of them gain
        (4.00, (4.000, 4.00, 4.00), False),
        (4.01, (4.000, 3.99, 3.98), False),
    ],
)
def test_gains_are_clear_that_exceed_what_single_layers_change(full, alone, clear):
    assert FarLayers((), (), near=4.0, full=full, alone=alone).clear == clear


@pytest.mark.parametrize(
    ("changes", "arguments", "words"),
    [
        ({"attention": "window"}, {}, "model has window layers"),
        ({"value_head_dim": 16}, {}, "keys of 8 and values of 16 features"),
        ({}, {"count": 4}, "count=4: must be from 1 to the model's 3 layers"),
        ({}, {"near": 20}, "near=20, first=4 with rows of shape .2, 49.: must be less than half of a row"),
    ],
)
def test_what_cannot_be_measured_is_refused(changes, arguments, words):
    with pytest.raises(ValueError, match=words):
        far_layers(
            make_model(**changes),
            **{"rows": np.zeros((2, LENGTH + 1), int), "count": 1, "near": 4, "first": 4} | arguments,
        )


def test_losses_that_are_not_finite_are_refused():
    model = make_model()
    model.norm.scale[...] = jnp.full_like(model.norm.scale[...], jnp.nan)
    with pytest.raises(ValueError, match="the model's loss is nan in these rows"):
        far_layers(model, np.zeros((2, LENGTH + 1), int), 1, near=4, first=4)
