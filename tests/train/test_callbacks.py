"""Callbacks see every step once and in order; an error in one stops the run and is explained."""

import errno
import itertools
import json

import jax
import jax.numpy as jnp
import pytest

from nsa_jax.train import Callback, TrainingError, run
from nsa_jax.train.checkpoint import Checkpoints
from nsa_jax.train.loop import Run

from .tiny import losses, one_device, tiny_config


class Recorder(Callback):
    """Keeps what it is told; raises an error where it is asked to."""

    def __init__(self, fail: str = "", at: int = 0):
        self.seen: list[tuple] = []
        self._fail = (fail, at)

    def _note(self, what: str, step: int, *more) -> None:
        self.seen.append((what, step, *more))
        if (what, step) == self._fail:
            raise KeyError("out of ideas")

    def on_start(self, run, step):
        assert run.setup.num_parameters() > 0
        self._note("start", step)

    def on_step(self, step, metrics):
        self._note("step", step, metrics["train/loss"])

    def on_end(self, summary):
        self._note("end", summary["step"])


def train(workdir, *callbacks, steps=7):
    config = tiny_config(train__steps=steps, train__log_every=3, train__save_every=7, preflight__selftest=False)
    return run(config, workdir, devices=one_device(), callbacks=callbacks)


def test_every_step_is_told_once_with_the_metrics_that_are_logged(tmp_path):
    first, second = Recorder(), Recorder()
    train(tmp_path, first, second)
    assert [entry[:2] for entry in first.seen] == [("start", 0), *(("step", i) for i in range(1, 8)), ("end", 7)]
    assert first.seen == second.seen
    told = {step: loss[0] for what, step, *loss in first.seen if what == "step"}
    logged = losses(tmp_path)
    assert logged and all(told[step] == pytest.approx(loss, rel=1e-6) for step, loss in logged.items())
    again = Recorder()
    train(tmp_path, again, steps=9)
    assert [entry[:2] for entry in again.seen] == [("start", 7), ("step", 8), ("step", 9), ("end", 9)]


@pytest.mark.parametrize(("fail", "at", "saved"), [("start", 0, None), ("step", 2, 6), ("end", 7, 7)])
def test_an_error_stops_the_run_and_names_the_callback(fail, at, saved, tmp_path):
    with pytest.raises(TrainingError, match=f"step {at}: callback Recorder raised KeyError: 'out of ideas'") as caught:
        train(tmp_path, Recorder(fail, at))
    assert isinstance(caught.value.__cause__, KeyError)
    stopped = json.loads((tmp_path / "stopped.json").read_text())
    assert stopped["guard"] == "callback" and stopped["step"] == at
    assert stopped["last_checkpoint"] == saved  # step 2 is reported when step 6 has been dispatched


def test_a_full_quota_at_the_last_save_does_not_hide_the_error(tmp_path, monkeypatch):
    """`disk_usage` knows no quotas, so the room that was looked for was there."""

    def full(*_, **__):
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr(Checkpoints, "save", full)
    with pytest.raises(TrainingError, match="step 2: callback Recorder raised KeyError"):
        train(tmp_path, Recorder("step", 2))
    assert json.loads((tmp_path / "stopped.json").read_text())["guard"] == "callback"


def test_a_stop_does_not_save_what_is_not_finite(tmp_path):
    """Step 2 is reported when step 6 has been dispatched; the parameters are no numbers from step 5 on."""
    config = tiny_config(train__steps=7, train__log_every=3, train__save_every=7, preflight__selftest=False)
    made = Run(config, tmp_path, None, one_device(), callbacks=[Recorder("step", 2)])
    train_step, count = made.train_step, itertools.count(1)

    def poisoned(state, batch):
        if next(count) == 5:
            state = {**state, "params": jax.tree.map(lambda p: p * jnp.nan, state["params"])}
        return train_step(state, batch)

    made.train_step = poisoned
    with pytest.raises(TrainingError, match="step 2: callback Recorder"):
        made.run()
    assert json.loads((tmp_path / "stopped.json").read_text())["last_checkpoint"] is None
