"""Averaged weights: what they are, what is validated and loaded, and how a run begins or ends to have them."""

import chex
import jax
import numpy as np
import pytest

import nsa_jax
from nsa_jax.train import loop
from nsa_jax.train.loop import Run

from .test_resume import stop_before
from .tiny import losses, make_run, one_device, random_batch, rows, steps, tiny_config

SMALL = dict(model__attention="dense", model__num_layers=1, train__steps=4, train__save_every=2)
SMALL["optim__schedule"] = "constant"
AVERAGED = dict(SMALL, train__ema_decay=0.5)


def test_the_average_is_that_of_the_formula_and_changes_no_step():
    config = tiny_config(**SMALL, train__ema_decay=0.2)
    batches = [random_batch(config, seed) for seed in range(2)]
    _, start = steps(config, [])
    want = jax.tree.map(np.asarray, start["ema"])
    chex.assert_trees_all_equal(want, jax.tree.map(np.asarray, start["params"]))
    for count in (1, 2):
        _, state = steps(config, batches[:count])
        decay = min(0.2, count / (9 + count))
        want = jax.tree.map(lambda old, new, d=decay: d * old + (1 - d) * np.asarray(new), want, state["params"])
        chex.assert_trees_all_close(state["ema"], want, rtol=1e-5, atol=1e-6)
    _, plain = steps(tiny_config(**SMALL), batches)
    chex.assert_trees_all_equal(plain["params"], state["params"])


def test_averaged_weights_are_validated_loaded_and_resumed_bit_by_bit(tmp_path, monkeypatch):
    settings = dict(AVERAGED, train__eval_every=2, train__eval_batches=1)
    whole = make_run(tmp_path / "whole", **settings)
    summary = whole.run()
    step, state, _ = whole._live
    sharding = loop.batch_sharding(whole.setup.mesh)
    with jax.set_mesh(whole.setup.mesh):
        averaged, last = (
            loop.evaluate(whole.eval_step, state[name], whole.pipeline, sharding)[0] for name in ("ema", "params")
        )
    assert summary["validation"]["val/loss"] == averaged["val/loss"] != last["val/loss"]
    model, _, _ = nsa_jax.load(str(tmp_path / "whole"))
    chex.assert_trees_all_equal(model.embedding[...], state["ema"]["embedding"])

    stopped = tmp_path / "stopped"
    with monkeypatch.context() as patch:
        stop_before(patch, 3, (stopped.mkdir() or stopped / "HALT").touch)
        assert make_run(stopped, **settings).run()["step"] == 3
    again = make_run(stopped, **settings)
    assert again.run()["start_step"] == 3 and again._live[0] == step
    chex.assert_trees_all_equal(again._live[1], state)


def test_a_run_may_begin_to_average_or_cease_to(tmp_path, caplog):
    before = make_run(tmp_path, **SMALL)
    before.run()
    weights = jax.tree.map(np.asarray, before._live[1]["params"])
    more = {**AVERAGED, "train__steps": 5}
    begun = make_run(tmp_path, **more)
    begun.run()
    assert any("the average begins with those of step 4" in record.getMessage() for record in caplog.records)
    state = begun._live[1]
    decay = min(0.5, 5 / 14)
    want = jax.tree.map(lambda old, new: decay * old + (1 - decay) * np.asarray(new), weights, state["params"])
    chex.assert_trees_all_close(state["ema"], want, rtol=1e-5, atol=1e-6)

    ceased = make_run(tmp_path, **{**SMALL, "train__steps": 6})
    assert ceased.run()["start_step"] == 5 and "ema" not in ceased._live[1]
    never = make_run(tmp_path.with_name("never"), **{**SMALL, "train__steps": 6})
    never.run()
    assert losses(tmp_path) == losses(tmp_path.with_name("never"))
    stage = Run(tiny_config(**AVERAGED), tmp_path / "stage", f"{tmp_path}@5", one_device(), stage=True)
    stage.run()
    assert rows(tmp_path / "stage")[1]["train/loss"] == pytest.approx(losses(tmp_path)[6], rel=0.2)
