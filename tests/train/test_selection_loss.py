"""The loss by which compressed keys learn to choose: its value by hand, whom it trains, and steps split in any way."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from nsa_jax import rules
from nsa_jax.nn import ModelConfig, NSAttention, Transformer
from nsa_jax.nn.selection_loss import selection_loss, selection_queries
from nsa_jax.ops import blocks
from nsa_jax.ops.blocks import NSAConfig
from nsa_jax.train import metrics
from nsa_jax.train.loss import weighted_loss
from nsa_jax.train.state import setup
from tests.nn.test_model_options import OPTIONS, fill

from .test_mesh import CHANGES, packed_batch
from .tiny import VOCAB, one_device, random_batch, steps, tiny_config

pytestmark = pytest.mark.usefixtures("quick_compilation")

NSA = NSAConfig(compress_block=8, compress_stride=4, select_block=8, num_selected=3, num_local=1, window=10)
LENGTH = 60
WITH = dict(train__selection_loss=20.0, train__selection_queries=6)


def layer(**options):
    config = ModelConfig(
        dim=24, num_heads=4, num_kv_heads=2, head_dim=16, value_head_dim=8, vocab_size=50, mlp_dim=24, nsa=NSA,
        init_std=0.4, compute_dtype="float32", implementation="xla", remat="none", **options,
    )  # fmt: skip
    return fill(NSAttention(config, rngs=nnx.Rngs(0)))


def softmax(scores, visible):
    weights = np.where(visible, np.exp(scores - scores[visible].max()), 0.0)
    return weights / weights.sum()


def by_hand(attention, x, start, queries):
    """The divergence of one row, query by query and block by block, in float64."""
    config = attention.config
    positions = jnp.arange(LENGTH, dtype=jnp.int32)
    p = attention.project(x[None], positions, LENGTH)
    key_cmp, _ = attention.compress(p.key_raw, p.value_raw, positions[:1], LENGTH)
    query, key, key_cmp = (np.asarray(a[0], np.float64) for a in (p.query, p.key_slc, key_cmp))
    group, size, found = config.num_heads // config.num_kv_heads, NSA.select_block, []
    for t in queries:
        first, last = start[t] // size, t // size
        if last - first + 1 <= NSA.num_selected:
            continue
        free = [j for j in range(first + NSA.num_initial, last - NSA.num_local + 1)]
        for head in range(config.num_kv_heads):
            mass, scores = np.zeros(8), np.zeros(8)
            for n in range(head * group, (head + 1) * group):
                seen = (np.arange(LENGTH) >= start[t]) & (np.arange(LENGTH) <= t)
                probs = softmax(key[:, head] @ query[t, n] / 4, seen)
                for token in range(LENGTH):
                    mass[token // size] += probs[token]
                index = np.arange(len(key_cmp))
                seen = (index * 4 >= start[t]) & (index * 4 + 7 <= t)
                probs = softmax(key_cmp[:, head] @ query[t, n] / 4, seen)
                for i in index:  # each stride of a compressed block counts where it lies
                    for part in (i, i + 1):
                        scores[part // 2] += probs[i]
            want, got = mass[free] / mass[free].sum(), scores[free] / scores[free].sum()
            found.append((want * np.log(want / got)).sum())
    return np.mean(found) if found else 0.0


@pytest.mark.parametrize("options", [{}, OPTIONS, {"shared_kv": True}], ids=["plain", "norms_and_biases", "shared_kv"])
def test_the_loss_is_the_divergence_by_hand(options):
    attention = layer(**options)
    x = jax.random.normal(jax.random.key(1), (3, LENGTH, 24))
    start = np.stack([np.zeros(LENGTH), np.where(np.arange(LENGTH) >= 13, 13, 0), np.arange(LENGTH)]).astype(np.int32)
    queries = np.asarray([20, 30, 47, 59])
    got = jax.jit(lambda x: selection_loss(attention, x, jnp.asarray(start), jnp.asarray(queries)))(x)
    want = [by_hand(attention, row, begins, queries) for row, begins in zip(x, start, strict=True)]
    np.testing.assert_allclose(got, want, rtol=2e-4, atol=1e-7)
    assert 0.05 < min(want[:2]) and want[2] == 0


def test_a_segment_start_before_the_row_means_0():
    attention, queries = layer(), jnp.asarray([30, 47])
    x = jax.random.normal(jax.random.key(1), (1, LENGTH, 24))
    before, at_0 = (jnp.full((1, LENGTH), start, jnp.int32) for start in (-20, 0))
    want = selection_loss(attention, x, at_0, queries)
    np.testing.assert_array_equal(selection_loss(attention, x, before, queries), want)
    assert want > 0.01


@pytest.mark.parametrize("options", [OPTIONS, {"shared_kv": True, **OPTIONS}], ids=["own_keys", "shared_kv"])
def test_it_trains_the_compressed_keys_and_their_compressor_alone(options):
    graphdef, params = nnx.split(layer(**options))
    x = jax.random.normal(jax.random.key(1), (2, LENGTH, 24))

    def loss(params, x):
        return selection_loss(nnx.merge(graphdef, params), x, None, jnp.asarray([30, 59])).sum()

    grads, to_input = jax.jit(jax.grad(loss, (0, 1)))(params, x)
    assert not np.asarray(to_input).any()
    grads = {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(grads)}
    trained = {name for name, leaf in grads.items() if leaf.any()}
    compressor = {name for name in grads if "compress_key" in name}
    raw = slice(64, 96)  # of the columns of w_in: 64 of queries, 32 of the keys that are compressed
    if options.get("shared_kv"):
        assert trained == compressor
        return
    assert trained - compressor == {name for name in grads if "w_in" in name or "b_in" in name} and len(trained) > 3
    for name in trained - compressor:
        assert grads[name][..., raw].any() and not np.delete(grads[name], np.arange(64, 96), axis=-1).any()


def test_queries_are_spread_over_the_tokens_that_choose():
    chosen = np.stack([selection_queries(LENGTH, 5, NSA, jax.random.key(seed)) for seed in range(200)])
    assert chosen.min() == 24 and chosen.max() == 59
    assert blocks.has_choice(chosen, 0, NSA).all()
    assert (np.diff(chosen, axis=1) >= 7).all() and (np.diff(chosen, axis=1) <= 8).all()
    with pytest.raises(ValueError, match="above num_selected"):
        selection_queries(24, 5, NSA, jax.random.key(0))


def test_the_last_query_lies_in_the_row_where_rounding_would_put_it_behind(monkeypatch):
    largest = np.float32(1 - 2**-23)  # that jax.random.uniform draws: 63 and this are 64 in float32
    monkeypatch.setattr(jax.random, "uniform", lambda key: jnp.float32(largest))
    assert np.asarray(selection_queries(LENGTH, 64, NSA, jax.random.key(0))).max() == LENGTH - 1


@pytest.mark.parametrize(
    "changes",
    [
        dict(),
        dict(model__scan_layers=False),
        dict(model__remat="dots_saved"),
        dict(model__remat="full", model__num_layers=4),
        dict(model__layer_pattern=("window", "nsa")),
    ],
    ids=lambda changes: "-".join(map(str, changes.values())) or "scanned",
)
def test_the_step_minimises_the_sum_and_reports_the_parts(changes):
    config = tiny_config(**WITH, **changes)
    batch = packed_batch(config, 0)
    (plain,), _ = steps(tiny_config(**changes), [batch])
    (got,), _ = steps(config, [batch])
    assert got["loss"] == pytest.approx(plain["loss"], rel=1e-6)
    assert "selection_loss" not in plain and got["selection_loss"] > 1e-3
    assert metrics.train_row(got)["train/selection_loss"] == pytest.approx(float(got["selection_loss"]))

    made = setup(config, VOCAB, one_device())
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(config.seed), 0), 2**31 - 1)
    queries = selection_queries(48, 6, made.model_config.nsa, key)

    def objective(params):
        model = made.model(params)
        hidden, divergence = model.hidden(
            batch["inputs"], jnp.asarray(batch["segment_start"]), selection_queries=queries
        )
        weights = jnp.asarray(batch["loss_mask"]) / batch["loss_mask"].sum()
        return weighted_loss(model, hidden, jnp.asarray(batch["targets"]), weights)[0] + 20 * divergence.mean()

    grads = jax.jit(jax.grad(objective))(made.init()["params"])
    norm = np.sqrt(sum(float(jnp.square(leaf).sum()) for leaf in jax.tree.leaves(grads)))
    assert got["grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert abs(got["grad_norm"] - plain["grad_norm"]) > 1e-4 * norm


@pytest.mark.parametrize("mesh", [dict(data=4), dict(data=2, fsdp=2), dict(data=2, tensor=2)], ids=str)
def test_micro_batches_and_meshes_change_nothing(mesh, monkeypatch):
    monkeypatch.setattr("nsa_jax.nn.sharding._REPLICATE_BELOW", 1)
    changes = CHANGES | WITH | dict(train__steps=4)
    batches = [packed_batch(tiny_config(**changes), seed) for seed in range(4)]
    want, _ = steps(tiny_config(**changes | dict(train__grad_accum=1)), batches)
    on_mesh = tiny_config(**{f"mesh__{axis}": size for axis, size in mesh.items()}, **changes)
    got, _ = steps(on_mesh, batches, jax.devices()[:4])
    for one, many in zip(want, got, strict=True):
        for name in ("loss", "selection_loss"):
            assert abs(one[name] - many[name]) < 1e-5, name


def test_lists_come_to_hold_more_of_the_attention():
    """This loss alone trains the model: the lists come to hold nearly what the best ones would."""
    from nsa_jax.inspect.selection import selection_quality

    config = tiny_config(model__num_layers=1, model__init_std=0.3)
    made = setup(config, VOCAB, one_device())
    graphdef, params = nnx.split(made.model(made.init()["params"]))
    tokens = jnp.asarray(random_batch(config)["inputs"])

    @jax.jit
    def improve(params, seed):
        queries = selection_queries(48, 8, made.model_config.nsa, jax.random.key(seed))

        def loss(params):
            return nnx.merge(graphdef, params).hidden(tokens, selection_queries=queries)[1].mean()

        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 1.0 * g, params, grads), value

    def listed(params):
        found = selection_quality(nnx.merge(graphdef, params), tokens, np.arange(40, 48))
        return found["listed"].mean(), found["oracle"].mean()

    before, oracle = listed(params)
    first = improve(params, 0)[1]
    for seed in range(150):
        params, last = improve(params, seed)
    after, same_oracle = listed(params)
    assert last < 0.1 * first
    assert same_oracle == pytest.approx(oracle) and oracle - before > 0.1
    assert after - before > 0.9 * (oracle - before)


def test_what_it_cannot_serve_is_refused():
    def found(**changes):
        return [(p.rule, p.severity) for p in rules.broken_rules(tiny_config(**WITH, **changes)) if p.rule == "R062"]

    assert not found()
    error = [("R062", "error")]
    assert found(model__attention="dense") == error
    assert found(model__nsa__selector="mean_key") == error
    assert found(data__seq_len=32, allow_dense_regime=True) == error
    assert found(mesh__context=2) == error
    assert not found(model__nsa__shared_kv=True) and not found(model__compressor="mean")
    assert found(model__nsa__shared_kv=True, model__compressor="mean") == error
    dense = Transformer(ModelConfig(dim=8, num_heads=1, num_kv_heads=1, head_dim=8, num_layers=1, vocab_size=8,
                                    attention="dense", mlp_dim=8), rngs=nnx.Rngs(0))  # fmt: skip
    with pytest.raises(ValueError, match="must be 'nsa'"):
        dense.hidden(jnp.zeros((1, 16), jnp.int32), selection_queries=jnp.asarray([3]))


def test_mistakes_in_its_arguments_are_named():
    fields = dict(dim=8, num_heads=1, num_kv_heads=1, head_dim=8, num_layers=1, vocab_size=8, mlp_dim=8, nsa=NSA)
    model, mean_key = (
        nnx.eval_shape(lambda s=selector: Transformer(ModelConfig(selector=s, **fields), rngs=nnx.Rngs(0)))
        for selector in ("compressed", "mean_key")
    )
    tokens = jnp.zeros((1, LENGTH), jnp.int32)
    for wrong, words in (
        (jnp.asarray([3.0]), "selection_queries has dtype float32: must be an integer type"),
        (jnp.asarray([[3]]), r"selection_queries has shape \(1, 1\): must have 1 dimensions"),
        (3, "selection_queries=3: must be an array"),
    ):
        with pytest.raises(ValueError, match=words):
            model.hidden(tokens, selection_queries=wrong)
    with pytest.raises(ValueError, match="selector='mean_key': must be 'compressed' to have a selection loss"):
        mean_key.hidden(tokens, selection_queries=jnp.asarray([3]))
