"""The compiled step: what it computes, that it is one program, and that it is the same on any mesh."""

import functools
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from nsa_jax.nn import ModelConfig, Transformer, count_parameters
from nsa_jax.train import loss as loss_lib
from nsa_jax.train.loss import token_losses, weighted_loss
from nsa_jax.train.optimizer import decays, learning_rate, make_optimizer
from nsa_jax.train.state import make_mesh, mesh_problems, partition_spec, setup
from nsa_jax.train.step import (
    host_transfers,
    make_eval_step,
    make_sampler,
    make_train_step,
)
from nsa_jax.train.watch.layers import layer_figures

from .tiny import VOCAB, one_device, random_batch, steps, tiny_config

# What does not depend on the kind of attention is tested with the one that compiles fastest.
DENSE = dict(model__attention="dense", model__num_layers=1)


def uneven_mask(config):
    mask = np.ones((config.train.batch_size, config.data.seq_len), np.float32)
    mask[::2, 5:] = 0
    mask[3] = 0
    return mask


def plain_loss(made, params, batch):
    """Cross-entropy in float64 from the model's logits."""
    apply = jax.jit(lambda params: made.model(params)(batch["inputs"], batch["segment_start"]))
    logits = np.asarray(apply(params), np.float64)
    logits = logits - logits.max(-1, keepdims=True)
    logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    nats = -np.take_along_axis(logp, batch["targets"][..., None], -1)[..., 0]
    return (nats * batch["loss_mask"]).sum(), nats


def test_loss_and_bits_per_byte_are_means_over_the_masked_tokens():
    config = tiny_config(**DENSE)
    batch = random_batch(config, mask=uneven_mask(config))
    token_bytes = np.arange(VOCAB, dtype=np.int32) % 4
    made = setup(config, VOCAB, one_device())
    nats, _ = plain_loss(made, made.init()["params"], batch)
    (metrics,), _ = steps(config, [batch], token_bytes=token_bytes)
    assert metrics["loss"] == pytest.approx(nats / batch["loss_mask"].sum(), rel=1e-5)
    text_bytes = (token_bytes[batch["targets"]] * batch["loss_mask"]).sum()
    assert metrics["bits_per_byte"] == pytest.approx(nats / math.log(2) / text_bytes, rel=1e-5)
    assert metrics["tokens"] == batch["loss_mask"].sum()


def test_norms_are_nonzero_and_the_gradient_norm_is_taken_before_clipping():
    config = tiny_config(optim__clip=1e-3, **DENSE)
    batch = random_batch(config)
    made = setup(config, VOCAB, one_device())
    params = made.init()["params"]

    def loss(params):
        logits = made.model(params)(batch["inputs"], batch["segment_start"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()

    want = float(optax.tree.norm(jax.jit(jax.grad(loss))(params)))
    (metrics,), state = steps(config, [batch])
    assert want > 100 * config.optim.clip
    assert metrics["grad_norm"] == pytest.approx(want, rel=1e-4)
    assert metrics["param_norm"] == pytest.approx(float(optax.tree.norm(state["params"])), rel=1e-5)
    moved = optax.tree.norm(jax.tree.map(jnp.subtract, state["params"], params))
    assert metrics["update_norm"] == pytest.approx(float(moved), rel=1e-2)
    assert metrics["learning_rate"] == pytest.approx(config.optim.learning_rate / 2)


@pytest.mark.parametrize("accum", [2, 8])
def test_accumulation_gives_the_loss_and_gradient_of_the_whole_batch(accum):
    config = tiny_config(**DENSE)
    batches = [random_batch(config, seed, uneven_mask(config)) for seed in range(3)]
    whole, state = steps(config, batches)
    parts, accumulated = steps(tiny_config(train__grad_accum=accum, **DENSE), batches)
    chex.assert_trees_all_close(whole, parts, rtol=2e-5)
    chex.assert_trees_all_close(state["params"], accumulated["params"], atol=2e-5)


def test_dropout_is_drawn_anew_for_every_step_and_micro_batch():
    config = tiny_config(model__dropout=0.3, optim__learning_rate=1e-12, **DENSE)
    batch = random_batch(config)
    metrics, _ = steps(config, [batch] * 3)
    assert len({float(m["loss"]) for m in metrics}) == 3
    again, _ = steps(config, [batch] * 3)
    chex.assert_trees_all_equal(metrics, again)
    # Row 2i goes to micro-batch 0 and row 2i + 1 to micro-batch 1: with equal rows in both, equal masks would give the
    # loss of one micro-batch alone.
    for name in ("inputs", "targets"):
        batch[name] = np.repeat(batch[name][:4], 2, axis=0)
    half = {name: value[::2] for name, value in batch.items()}
    (both,), _ = steps(tiny_config(train__grad_accum=2, model__dropout=0.3, **DENSE), [batch])
    (one,), _ = steps(tiny_config(train__batch_size=4, model__dropout=0.3, **DENSE), [half])
    assert abs(both["loss"] - one["loss"]) > 1e-4


def test_loss_in_chunks_equals_the_loss_at_once(monkeypatch):
    config = tiny_config(**DENSE)
    made = setup(config, VOCAB, one_device())
    params, batch = made.init()["params"], random_batch(config)

    def loss(params):
        model = made.model(params)
        hidden = model.hidden(batch["inputs"])
        return weighted_loss(model, hidden, batch["targets"], jnp.asarray(uneven_mask(config)))[0]

    whole = jax.jit(jax.value_and_grad(loss))(params)
    monkeypatch.setattr(loss_lib, "_LOGIT_BYTES", 8 * 48 * VOCAB * 4 // 5)
    assert loss_lib._num_chunks(8, 48, VOCAB) == 6
    chex.assert_trees_all_close(jax.jit(jax.value_and_grad(lambda p: loss(p)))(params), whole, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("chunks", [1, 4])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "separate"])
@pytest.mark.parametrize(
    ("vocab", "dtype", "soft_cap", "z_loss"),
    [(50, "float32", 2.0, 0.1), (128, "float32", 0.0, 0.0), (50, "bfloat16", 0.0, 0.0)],
)
def test_losses_and_their_gradients_are_those_of_the_formula(vocab, dtype, soft_cap, z_loss, tied, chunks, monkeypatch):
    """The loss's gradients are written out; here against the compiler's of a plain cross-entropy in float32."""
    heads = dict(num_heads=2, num_kv_heads=1, head_dim=16, num_layers=1)
    sizes = dict(dim=32, vocab_size=vocab, tie_embeddings=tied, compute_dtype=dtype, init_std=0.3)
    model = Transformer(ModelConfig(**heads, **sizes, logit_soft_cap=soft_cap), rngs=nnx.Rngs(0))
    graphdef, params = nnx.split(model)
    hidden = jax.random.normal(jax.random.key(1), (3, 24, 32), dtype)
    targets = jax.random.randint(jax.random.key(2), (3, 24), 0, vocab).at[0, :2].set(jnp.asarray([0, vocab - 1]))
    weight = jax.random.normal(jax.random.key(3), (3, 24))
    monkeypatch.setattr(loss_lib, "_LOGIT_BYTES", 3 * 24 * vocab * 4 // chunks)

    def ours(params, hidden, weight):
        loss, nats = weighted_loss(nnx.merge(graphdef, params), hidden, targets, weight, z_loss)
        return 3 * loss, nats

    def formula(params, hidden):
        model = nnx.merge(graphdef, params)
        equation = "btd,vd->btv" if tied else "btd,dv->btv"
        head = model.output_weight().astype(dtype)
        logits = jnp.einsum(equation, hidden, head, preferred_element_type=jnp.float32)
        if soft_cap:
            logits = soft_cap * jnp.tanh(logits / soft_cap)
        losses = -jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], -1)[..., 0]
        return losses, losses + z_loss * jax.nn.logsumexp(logits, axis=-1) ** 2

    def plain(params, hidden, weight):
        losses, totals = formula(params, hidden)
        return 3 * (totals * weight).sum(), (losses * weight).sum()

    (want, want_grads), (got, grads) = (
        jax.jit(jax.value_and_grad(f, (0, 1, 2), has_aux=True))(params, hidden, weight) for f in (plain, ours)
    )
    np.testing.assert_allclose(got, want, rtol=1e-5)
    np.testing.assert_allclose(jax.jit(ours)(params, hidden, weight), want, rtol=1e-5)
    model_logits = np.asarray(nnx.merge(graphdef, params).logits(hidden))
    if soft_cap:
        assert 0.5 * soft_cap < np.abs(model_logits).max() < soft_cap
    each = jax.jit(lambda params: token_losses(nnx.merge(graphdef, params), hidden, targets))
    np.testing.assert_allclose(each(params), formula(params, hidden)[0], rtol=1e-4, atol=1e-5)
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(want_grads), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.linalg.norm(a - b) <= (1e-5 if dtype == "float32" else 6e-3) * np.linalg.norm(b)


def test_the_loss_that_is_reported_is_cross_entropy_whatever_the_z_loss():
    batches = [random_batch(tiny_config(**DENSE))]
    (plain,), state = steps(tiny_config(train__grad_accum=2, **DENSE), batches)
    (with_z,), other = steps(tiny_config(train__grad_accum=2, train__z_loss=0.01, **DENSE), batches)
    assert with_z["loss"] == pytest.approx(plain["loss"], rel=1e-6)
    assert with_z["bits_per_byte"] == pytest.approx(plain["bits_per_byte"], rel=1e-6)
    assert "z_loss" not in plain and 0.01 < with_z["z_loss"] < 1
    assert with_z["grad_norm"] != plain["grad_norm"]
    moved = jax.tree.map(lambda a, b: float(jnp.abs(a - b).max()), state["params"], other["params"])
    assert max(jax.tree.leaves(moved)) > 0


def test_losses_of_single_tokens_refuse_to_be_differentiated():
    config = tiny_config(**DENSE)
    made, batch = setup(config, VOCAB, one_device()), random_batch(config)
    model = made.model(made.init()["params"])
    hidden = model.hidden(batch["inputs"])
    with pytest.raises(NotImplementedError, match="weighted_loss"):
        jax.grad(lambda hidden: token_losses(model, hidden, batch["targets"]).sum())(hidden)


def test_large_vocabularies_never_have_all_logits_in_memory():
    config = tiny_config(model__vocab_size=65_536, data__seq_len=2048, model__num_layers=1, model__attention="dense")
    made = setup(config, VOCAB, one_device())
    step = make_train_step(made, np.ones(65_536, np.int32))
    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), random_batch(config))
    text = str(jax.make_jaxpr(step)(made.abstract_state, batch))
    assert "f32[8,256,65536]" in text
    assert "f32[8,2048,65536]" not in text and "f32[16384,65536]" not in text


def test_the_step_is_one_program_without_host_transfers():
    config = tiny_config(train__grad_accum=2, model__dropout=0.1)
    made = setup(config, VOCAB, one_device())
    step = make_train_step(made, np.ones(VOCAB, np.int32))
    with jax.set_mesh(made.mesh):
        state = made.init()
        for seed in range(4):
            state, _ = step(state, random_batch(config, seed))
        assert step._cache_size() == 1
        text = step.lower(state, random_batch(config)).compile().as_text()
    assert host_transfers(text) == []

    def talks(x):
        jax.debug.print("{x}", x=x)
        return x + 1

    assert host_transfers(jax.jit(talks).lower(1.0).compile().as_text())


@functools.cache
def twenty_steps(data, fsdp):
    changes = dict(train__batch_size=16, train__grad_accum=2, train__steps=20, model__implementation="xla")
    config = tiny_config(mesh__data=data, mesh__fsdp=fsdp, **changes)
    batches = [random_batch(config, seed, np.repeat(uneven_mask(tiny_config()), 2, 0)) for seed in range(20)]
    return steps(config, batches, jax.devices()[: data * fsdp])


@pytest.mark.parametrize(("data", "fsdp"), [(8, 1), (1, 8), (2, 4)])
def test_eight_devices_give_the_losses_of_one(data, fsdp, monkeypatch):
    monkeypatch.setattr("nsa_jax.nn.sharding._REPLICATE_BELOW", 1)
    want, _ = twenty_steps(1, 1)
    got, state = twenty_steps(data, fsdp)
    for one, eight in zip(want, got, strict=True):
        assert abs(one["loss"] - eight["loss"]) < 1e-5
        assert eight["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-3)
    matrices = [leaf for path, leaf in jax.tree_util.tree_leaves_with_path(state) if decays(path)]
    assert len(matrices) == 3 * 9  # parameters and both moments
    for leaf in matrices:
        assert leaf.addressable_shards[0].data.size == leaf.size // fsdp


def test_kernels_run_on_each_devices_rows(monkeypatch):
    config = tiny_config(train__batch_size=16, model__num_layers=1)
    made = setup(config, VOCAB, jax.devices()[:8])
    step = make_train_step(made, np.ones(VOCAB, np.int32))
    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), random_batch(config))
    with jax.set_mesh(made.mesh):
        text = str(jax.make_jaxpr(step)(made.abstract_state, batch))
    assert "shard_map" in text
    assert "f32[2,48,4,8]" in text  # a query of 16 / 8 rows


def test_eval_step_sums_over_the_batch():
    config = tiny_config(train__grad_accum=2, **DENSE)
    made = setup(config, VOCAB, one_device())
    batch = random_batch(config, mask=uneven_mask(config))
    params = made.init()["params"]
    token_bytes = np.arange(VOCAB, dtype=np.int32)
    sums = make_eval_step(made, token_bytes)(params, batch)
    nats, _ = plain_loss(made, params, batch)
    assert float(sums["nats"]) == pytest.approx(nats, rel=1e-5)
    assert float(sums["tokens"]) == batch["loss_mask"].sum()
    assert float(sums["bytes"]) == (token_bytes[batch["targets"]] * batch["loss_mask"]).sum()
    assert float(sums["nats_at"].sum()) == pytest.approx(nats, rel=1e-5)
    at = np.split(np.asarray(batch["loss_mask"]).sum(0), [1, 2, 4, 8, 16, 32])
    np.testing.assert_array_equal(sums["tokens_at"], [part.sum() for part in at])


@pytest.mark.parametrize("pattern", [(), ("nsa", "dense")])
def test_figures_of_layers_are_those_of_each_layers_arrays(pattern):
    config = ModelConfig(
        dim=8, num_layers=4, num_heads=2, num_kv_heads=1, head_dim=4, vocab_size=8, layer_pattern=pattern
    )
    rng, count = np.random.default_rng(0), 2 if pattern else 4
    stack = {"w": rng.normal(size=(count, 3, 5)), "b": rng.normal(size=(count, 2)) * [[0.0, 1.0]]}
    blocks = {"layer_0": stack, "layer_1": jax.tree.map(lambda x: x * 2, stack)} if pattern else stack
    found = layer_figures(config, updates={"blocks": blocks, "head": rng.normal(size=9)})
    for layer in range(4):
        own, row = (blocks[f"layer_{layer % 2}"], layer // 2) if pattern else (blocks, layer)
        values = np.concatenate([own[name][row].ravel() for name in ("w", "b")])
        assert found["updates_norm"][layer] == pytest.approx(np.linalg.norm(values), rel=1e-5)
        assert found["updates_largest"][layer] == pytest.approx(np.abs(values).max(), rel=1e-6)
        assert found["updates_zeros"][layer] == pytest.approx((values == 0).mean(), rel=1e-6)


def test_sampler_continues_the_prompt_from_the_models_distribution():
    config = tiny_config(**DENSE)
    made = setup(config, VOCAB, one_device())
    params = made.init()["params"]
    prompt = np.zeros((1, 20), np.int32)
    prompt[0, :5] = [3, 1, 4, 1, 5]
    sample = make_sampler(made, 20, 7)
    one = np.asarray(sample(params, prompt, 5, jax.random.key(0)))
    chex.assert_trees_all_equal(one[0, :5], prompt[0, :5])
    assert one.max() < 7 and len(set(one[0, 5:].tolist())) > 1
    chex.assert_trees_all_equal(one, np.asarray(sample(params, prompt, 5, jax.random.key(0))))
    cold = np.asarray(make_sampler(made, 20, VOCAB, temperature=1e-6)(params, prompt, 5, jax.random.key(0)))
    logits = jax.jit(lambda params, tokens: made.model(params)(tokens))(params, cold)
    chex.assert_trees_all_equal(cold[0, 5:], np.asarray(logits[0, 4:-1].argmax(-1)))


def test_learning_rate_schedules():
    config = tiny_config(train__steps=101, optim__warmup_steps=10, optim__learning_rate=1.0, optim__final_fraction=0.1)
    cosine = learning_rate(config)
    assert [float(cosine(s)) for s in (0, 4, 9)] == pytest.approx([0.1, 0.5, 1.0])
    assert float(cosine(55)) == pytest.approx(0.55)
    assert float(cosine(100)) == pytest.approx(0.1)
    config.optim.schedule = "linear"
    assert float(learning_rate(config)(55)) == pytest.approx(0.55)
    assert float(learning_rate(config)(32.5)) == pytest.approx(0.775)
    config.optim.schedule = "constant"
    assert float(learning_rate(config)(100)) == pytest.approx(1.0)
    config.optim.schedule, config.optim.decay_fraction, config.train.steps = "wsd", 0.2, 201
    wsd = learning_rate(config)
    assert [float(wsd(s)) for s in (4, 9, 100, 159)] == pytest.approx([0.5, 1.0, 1.0, 1.0])
    assert float(wsd(200 - 20.1)) == pytest.approx(0.55) and float(wsd(200)) == pytest.approx(0.1)
    config.train.steps = 401
    assert float(learning_rate(config)(180)) == pytest.approx(1.0)


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd"])
@pytest.mark.parametrize(("steps", "warmup"), [(1, 0), (2, 0), (2, 1), (3, 1), (6, 5)])
def test_the_last_step_of_the_shortest_runs_uses_the_final_fraction(schedule, steps, warmup):
    config = tiny_config(train__steps=steps, optim__warmup_steps=warmup, optim__learning_rate=1.0)
    config.optim.schedule, config.optim.final_fraction, config.optim.decay_fraction = schedule, 0.25, 0.1
    rates = [float(learning_rate(config)(step)) for step in range(steps)]
    assert rates[-1] == pytest.approx(0.25)
    assert rates[:warmup] == pytest.approx([(step + 1) / warmup for step in range(warmup)])


def test_weight_decay_is_for_matrices_only():
    made = setup(tiny_config(model__tie_embeddings=False), VOCAB, one_device())
    paths = jax.tree_util.tree_leaves_with_path(made.abstract_state["params"])
    kept = {
        jax.tree_util.keystr(path, simple=True, separator="/").split("/")[-1] for path, _ in paths if not decays(path)
    }
    assert kept == {"scale", "b_1", "gate_bias", "position"}


def test_factors_of_groups_scale_the_updates_of_their_parameters_alone():
    config = tiny_config(model__tie_embeddings=False)
    params = setup(config, VOCAB, one_device()).init()["params"]
    gradients = jax.tree.map(lambda x: jnp.cos(jnp.arange(x.size, dtype=jnp.float32)).reshape(x.shape), params)

    def updates(**factors):
        for name, value in factors.items():
            kind, group = name.split("__")
            config.optim[f"{kind}_factor"][group] = value
        optimizer = make_optimizer(config)
        found = optimizer.update(gradients, optimizer.init(params), params)[0]
        for name in factors:
            kind, group = name.split("__")
            config.optim[f"{kind}_factor"][group] = 1.0
        return found

    usual = updates()
    found = updates(learning_rate__gates=3.0, learning_rate__compressor=0.0, learning_rate__head=2.0)
    attention, before = found["blocks"]["attention"], usual["blocks"]["attention"]
    gates = 3 * config.model.num_heads
    close = functools.partial(np.testing.assert_allclose, rtol=1e-6)
    close(attention["w_in"][..., -gates:], 3 * before["w_in"][..., -gates:])
    np.testing.assert_array_equal(attention["w_in"][..., :-gates], before["w_in"][..., :-gates])
    close(attention["gate_bias"], 3 * before["gate_bias"])
    close(found["head"], 2 * usual["head"])
    np.testing.assert_array_equal(found["embedding"], usual["embedding"])
    assert not any(np.any(leaf) for name in ("compress_key", "compress_value") for leaf in attention[name].values())

    # Without their own decay, gates differ from the usual by decay * learning rate * parameter, and nothing else does.
    found = updates(weight_decay__gates=0.0)
    rate = float(learning_rate(config)(0))
    w_in = params["blocks"]["attention"]["w_in"]
    difference = found["blocks"]["attention"]["w_in"] - before["w_in"]
    expected = (rate * config.optim.weight_decay * w_in).at[..., :-gates].set(0)
    np.testing.assert_allclose(difference, expected, atol=1e-9)
    np.testing.assert_array_equal(found["blocks"]["attention"]["gate_bias"], before["gate_bias"])
    assert float(abs(expected).max()) > 1e-6


def test_parameters_are_counted_from_the_arrays():
    made = setup(tiny_config(), VOCAB, one_device())
    assert made.num_parameters() == count_parameters(Transformer(made.model_config, rngs=nnx.Rngs(0)))


def test_mesh_mistakes_are_named():
    assert mesh_problems(tiny_config(), 8) == []
    assert "data * fsdp" in mesh_problems(tiny_config(mesh__fsdp=3), 8)[0].message
    assert "micro-batches of 4" in mesh_problems(tiny_config(train__grad_accum=2), 8)[0].message
    mesh = make_mesh(tiny_config(mesh__fsdp=4), jax.devices()[:8])
    assert dict(mesh.shape) == {"data": 2, "fsdp": 4, "context": 1, "tensor": 1}
    key = jax.tree_util.DictKey
    assert partition_spec((key("embedding"),), (1000, 64), mesh) == jax.P("fsdp")
    assert partition_spec((key("blocks"), key("w_in")), (8, 64, 256), mesh) == jax.P(None, None, "fsdp")
    assert partition_spec((key("blocks"), key("scale")), (8, 64), mesh) == jax.P()
