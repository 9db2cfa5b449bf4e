"""Muon: which matrices it updates, that each is orthogonalised by itself, on any mesh, and how runs change to it."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from nsa_jax.nn import ModelConfig
from nsa_jax.train import CheckpointError
from nsa_jax.train.loop import Run
from nsa_jax.train.muon import is_matrix, matrix_widths, newton_schulz
from nsa_jax.train.optimizer import make_optimizer, names_of
from nsa_jax.train.state import setup

from .test_resume import stop_before
from .tiny import VOCAB, losses, make_run, one_device, random_batch, rows, steps, tiny_config

MUON = dict(optim__name="muon", optim__weight_decay=0.0, optim__clip=0.0, optim__warmup_steps=0)
MUON["optim__schedule"] = "constant"


def random_like(params, seed=0):
    """Arrays of the shapes of a tree."""
    leaves, structure = jax.tree.flatten(params)
    random = np.random.default_rng(seed)
    return jax.tree.unflatten(structure, [jnp.asarray(random.normal(size=x.shape), jnp.float32) for x in leaves])


def by_path(tree):
    return {tuple(names_of(path)): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def orthogonal(x):
    """What optax makes of one matrix."""
    muon = optax.contrib.scale_by_muon(weight_dimension_numbers={"w": optax.contrib.MuonDimensionNumbers()})
    update, _ = muon.update({"w": x}, muon.init({"w": x}))
    return update["w"]


@pytest.mark.parametrize("shape", [(24, 16), (8, 32)])
def test_newton_schulz_is_that_of_optax(shape):
    x = jax.random.normal(jax.random.key(0), shape)
    got = newton_schulz(jnp.stack([x, 3e-6 * x]))
    np.testing.assert_allclose(got[0], orthogonal(x), atol=2e-5)
    np.testing.assert_allclose(got[1], got[0], atol=2e-4)  # whatever its norm
    values = np.linalg.svd(np.asarray(got[0]), compute_uv=False)
    assert 0.5 < values.min() and values.max() < 1.3


def test_each_matrix_of_each_layer_is_orthogonalised_by_itself_and_adam_updates_the_rest():
    config = tiny_config(**MUON)
    made = setup(config, VOCAB, one_device())
    params = random_like(made.abstract_state["params"], 1)
    grads = random_like(params)
    muon = make_optimizer(config, made.model_config)
    got, state = jax.jit(muon.update)(grads, muon.init(params), params)
    adam = make_optimizer(tiny_config(**{**MUON, "optim__name": "adamw"}))
    want, _ = jax.jit(adam.update)(grads, adam.init(params), params)
    rate = config.optim.learning_rate
    heads = (32, 16, 16, 16, 16, 16, 16)  # query, and keys and values of three branches; then 12 gates
    pieces = {("attention", "w_in"): heads, ("attention", "w_out"): (32,), ("mlp", "w_in"): (48, 48)}
    matrices = 0
    for path, update in by_path(got).items():
        other, gradient = by_path(want)[path], by_path(grads)[path]
        if path[0] == "blocks" and path[1] in ("attention", "mlp") and path[2] in ("w_in", "w_out"):
            start = 0
            for width in pieces.get(path[1:], (32,)):
                for layer in range(2):
                    part = np.s_[layer, :, start : start + width]
                    scale = -rate * 0.2 * max(gradient[part].shape) ** 0.5
                    np.testing.assert_allclose(update[part], scale * orthogonal(gradient[part]), atol=1e-6)
                    assert np.sqrt(np.mean(update[part] ** 2)) == pytest.approx(0.2 * rate, rel=0.3)
                    matrices += 1
                start += width
            update, other = update[..., start:], other[..., start:]
            assert update.shape[-1] == (12 if path[1:] == ("attention", "w_in") else 0)
        np.testing.assert_allclose(update, other, rtol=1e-6)
    assert matrices == 2 * (7 + 1 + 2 + 1)
    kept = by_path(state)  # no array of Adam is as large as a matrix
    assert sum(path[-1] == "w_in" for path in kept) == 4
    assert all(leaf.shape[-1] == 12 for path, leaf in kept.items() if "adam" in path and path[-1] == "w_in")


def test_momentum_is_nesterovs():
    config = tiny_config(**MUON)
    made = setup(config, VOCAB, one_device())
    params = random_like(made.abstract_state["params"], 1)
    first, second = random_like(params, 2), random_like(params, 3)
    muon = make_optimizer(config, made.model_config)
    update = jax.jit(muon.update)
    _, state = update(first, muon.init(params), params)
    got, _ = update(second, state, params)
    a, b = (by_path(x)["blocks", "mlp", "w_out"][1] for x in (first, second))
    rate = config.optim.learning_rate * 0.2 * 48**0.5
    direction = b + 0.95 * (b + 0.95 * a)
    want = -rate * newton_schulz(direction)
    np.testing.assert_allclose(by_path(got)["blocks", "mlp", "w_out"][1], want, atol=1e-6)


@pytest.mark.parametrize(
    "changes",
    [dict(attention="dense"), dict(layer_pattern=("nsa", "window")), dict(value_head_dim=16)],
    ids=["dense", "pattern", "values"],
)
def test_the_widths_of_matrices_are_those_of_the_model(changes):
    config = tiny_config(**MUON, **{f"model__{name}": value for name, value in changes.items()})
    made = setup(config, VOCAB, one_device())
    assert isinstance(made.model_config, ModelConfig)
    found = {path: leaf for path, leaf in by_path(made.abstract_state["params"]).items() if is_matrix(path)}
    assert len(found) == 4 * (len(config.model.layer_pattern) or 1)
    for path, leaf in found.items():
        widths, gates = matrix_widths(path, leaf.shape, made.model_config)
        assert sum(widths) + gates == leaf.shape[-1], path
        sparse = config.model.attention == "nsa" and path[1] != "layer_1"
        assert bool(gates) == (sparse and path[-2:] == ("attention", "w_in"))


@pytest.mark.parametrize(
    "mesh", [dict(data=2, fsdp=2, tensor=2), dict(data=8, shard_optimizer=True)], ids=["sharded", "data"]
)
def test_every_mesh_gives_the_updates_of_one_device(mesh, monkeypatch):
    monkeypatch.setattr("nsa_jax.nn.sharding._REPLICATE_BELOW", 1)
    changes = dict(optim__name="muon", model__implementation="xla", train__batch_size=8)
    batches = [random_batch(tiny_config(**changes), seed) for seed in range(3)]
    want, one = steps(tiny_config(**changes), batches)
    axes = {f"mesh__{axis}": size for axis, size in mesh.items()}
    many, state = steps(tiny_config(**changes, **axes), batches, jax.devices()[:8])
    for step in range(3):
        assert many[step]["loss"] == pytest.approx(want[step]["loss"], abs=1e-5)
        assert many[step]["update_norm"] == pytest.approx(want[step]["update_norm"], rel=1e-3)
    chex.assert_trees_all_close(state["opt_state"], one["opt_state"], atol=1e-4)


def test_a_stopped_run_continues_bit_exactly(tmp_path, monkeypatch):
    settings = dict(model__attention="dense", train__steps=4, train__save_every=100, optim__name="muon")
    whole = make_run(tmp_path / "whole", **settings)
    whole.run()
    stopped = tmp_path / "stopped"
    with monkeypatch.context() as patch:
        stop_before(patch, 2, (stopped.mkdir() or stopped / "HALT").touch)
        assert make_run(stopped, **settings).run()["step"] == 2
    again = make_run(stopped, **settings)
    assert again.run()["start_step"] == 2 and losses(stopped) == losses(tmp_path / "whole")
    chex.assert_trees_all_equal(again._live[1], whole._live[1])


def test_a_run_changes_its_optimizer_only_if_the_loss_of_averages_is_accepted(tmp_path):
    small = dict(model__attention="dense", model__num_layers=1, train__steps=2, train__save_every=1)
    make_run(tmp_path / "a", **small).run()
    muon = {**small, "optim__name": "muon", "train__steps": 3}
    for stage in (False, True):
        config = tiny_config(**muon)
        run = Run(config, tmp_path / f"refused{stage}", str(tmp_path / "a"), one_device(), stage=stage)
        with pytest.raises(CheckpointError, match=r"config\.optim\.name: 'adamw' there, 'muon' now") as refused:
            run.run()
        assert "config.train.reset_optimizer=True" in str(refused.value)
    summary = make_run(tmp_path / "b", str(tmp_path / "a"), **muon, train__reset_optimizer=True).run()
    assert (summary["start_step"], summary["step"]) == (2, 3)
    make_run(tmp_path / "c", str(tmp_path / "a"), **{**small, "train__steps": 3}).run()
    # The weights and the batch are those of the other run, and so is the place in the schedule.
    assert losses(tmp_path / "b") == losses(tmp_path / "c")
    assert rows(tmp_path / "b")[3]["learning_rate"] == rows(tmp_path / "c")[3]["learning_rate"]
    assert rows(tmp_path / "b")[3]["norm/update"] != rows(tmp_path / "c")[3]["norm/update"]
