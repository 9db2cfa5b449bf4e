"""Steps that spike are left out, inside the compiled step; runs that go wrong return to their last checkpoint."""

import json
import shutil
import signal

import chex
import jax
import numpy as np
import pytest

from nsa_jax.config import ConfigError
from nsa_jax.train import TrainingError, spikes
from nsa_jax.train.metrics import last_rows
from nsa_jax.train.state import batch_sharding, to_device
from nsa_jax.train.watch.guards import Guards

from .test_faults_in_runs import with_batches
from .test_resume import stop_before
from .tiny import losses, make_run, rows, tiny_config

SMALL = dict(model__attention="dense", model__num_layers=1, train__steps=8, train__save_every=100)
SKIPPING = dict(SMALL, guards__skip_spikes=2, train__ema_decay=0.9)


@pytest.fixture
def window(monkeypatch):
    monkeypatch.setattr(spikes, "WINDOW", 3)


def spiking(made, *bad):
    """Batches of these numbers have a loss of 384 tokens, every other of which counts negatively, over one token."""
    signs = np.where(np.arange(48) % 2, 1, -1).astype(np.float32)
    return with_batches(
        made, lambda step, batch: {**batch, "loss_mask": batch["loss_mask"] * (signs if step in bad else 1)}
    )


def test_limits_are_medians_of_the_last_steps_and_infinite_before(window):
    guards = tiny_config(guards__spike=0.5, guards__spike_norm=4.0).guards
    recent = spikes.none_yet()
    for count, (loss, norm) in enumerate([(3.0, 1.0), (9.0, 5.0), (2.0, 2.0), (1.0, 8.0)]):
        found = jax.device_get(spikes.limits(recent, guards))
        assert (found["loss"], found["grad_norm"]) == ((np.inf, np.inf) if count < 3 else (3.5, 8.0))
        recent = spikes.with_step(recent, loss=loss, grad_norm=norm)
    found = jax.device_get(spikes.limits(recent, guards))  # of the last three
    assert (found["loss"], found["grad_norm"]) == (2.5, 20.0)
    off = jax.device_get(spikes.limits(recent, tiny_config(guards__spike=0.0, guards__spike_norm=0.0).guards))
    assert off == {"loss": np.inf, "grad_norm": np.inf}


def test_a_spike_is_left_out_and_logged_and_later_data_are_the_same(window, tmp_path, monkeypatch):
    whole = spiking(make_run(tmp_path / "whole", **SKIPPING), 5)
    assert whole.run()["alarms"]["spike_skipped"] == 1  # a busy machine may raise data_wait too
    (alarm,) = (json.loads(line) for line in (tmp_path / "whole" / "alarms.jsonl").read_text().splitlines())
    found = rows(tmp_path / "whole")
    assert alarm["step"] == 5 and f"gradient norm {found[5]['norm/grad']:.3g} (limit " in alarm["message"]
    assert found[5]["norm/grad"] > 5 * found[4]["norm/grad"]

    # The same batches and learning rates as of a run that was never trained on that batch.
    made = make_run(tmp_path / "without", **SKIPPING)
    state, pipeline = made.setup.init(), made.pipeline.train()
    with jax.set_mesh(made.setup.mesh):
        for step in range(1, 9):
            batch = to_device(next(pipeline), batch_sharding(made.setup.mesh))
            if step == 5:
                kept = jax.tree.map(np.asarray, state)
                signs = np.where(np.arange(48) % 2, 1, -1).astype(np.float32)
                state, _ = made.train_step(state, {**batch, "loss_mask": batch["loss_mask"] * signs})
                for name in ("params", "ema", "recent"):
                    chex.assert_trees_all_equal(state[name], kept[name])
                chex.assert_trees_all_equal(
                    jax.tree.leaves(state["opt_state"])[:-1], jax.tree.leaves(kept["opt_state"])[:-1]
                )
                assert state["step"] == 5 and jax.tree.leaves(state["opt_state"])[-1] == 5  # of the schedule
                continue
            state, values = made.train_step(state, batch)
            assert (float(values["loss"]), float(values["learning_rate"])) == (
                found[step]["train/loss"],
                found[step]["learning_rate"],
            )
    chex.assert_trees_all_equal(whole._live[1]["params"], state["params"])

    for stop in (2, 5):  # before there is a median, and right after the spike
        workdir = tmp_path / f"stopped{stop}"
        with monkeypatch.context() as patch:
            stop_before(patch, stop, (workdir.mkdir() or workdir / "HALT").touch)
            assert spiking(make_run(workdir, **SKIPPING), 5).run()["step"] == stop
        again = spiking(make_run(workdir, **SKIPPING), 5)
        assert again.run()["alarms"]["spike_skipped"] == 1
        assert losses(workdir) == losses(tmp_path / "whole")
        chex.assert_trees_all_equal(again._live[1], whole._live[1])


def test_spikes_in_a_row_stop_the_run_also_after_an_interruption():
    config = tiny_config(guards__skip_spikes=2)
    row = {"loss": 9.0, "grad_norm": 1.0, "learning_rate": 1e-3, "loss_limit": 3.0, "grad_norm_limit": 5.0}
    spike, good = {**row, "spike": 1.0}, {**row, "loss": 2.0, "spike": 0.0}
    guards = Guards(config, say=lambda line: None)
    guards.on_steps(1, [spike, spike, good, spike])
    assert [alarm.step for alarm in guards.alarms] == [1, 2, 4]  # each of them
    restarted = Guards(config, say=lambda line: None)
    restarted.restore(json.loads(json.dumps(guards.state())))
    restarted.on_steps(5, [spike])
    with pytest.raises(TrainingError, match=r"loss 9\.000 \(limit 3\.000\).* 3 times in a row") as stopped:
        restarted.on_steps(6, [spike])
    assert (stopped.value.guard, stopped.value.step) == ("spike", 6)


ROLLING = dict(SMALL, train__steps=9, train__save_every=2, guards__roll_back=2)


def poison(made, *bad):
    """Batches of these numbers give a loss that is not finite."""
    return with_batches(
        made, lambda step, batch: {**batch, "loss_mask": batch["loss_mask"] * (np.nan if step in bad else 1)}
    )


def test_a_run_returns_to_its_last_checkpoint_and_leaves_out_the_data_since(tmp_path, monkeypatch):
    whole = poison(make_run(tmp_path / "whole", **ROLLING), 6, 8)
    summary = whole.run()
    assert summary["rollbacks"] == 2 and summary["step"] == 9 and not (tmp_path / "whole" / "stopped.json").exists()
    done = json.loads((tmp_path / "whole" / "rollbacks.json").read_text())
    assert [[r[name] for name in ("guard", "step", "checkpoint", "position", "next_batch")] for r in done] == [
        ["non_finite", 6, 4, 4, 6],
        ["non_finite", 6, 4, 4, 8],  # batch 7 was step 5 after the first return, batch 8 step 6
    ]
    assert len((tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()) == 9

    # The same as a run whose data lack batches 5 to 8.
    made = make_run(tmp_path / "without", **ROLLING)
    state, pipeline = made.setup.init(), made.pipeline.train()
    batches = [next(pipeline) for _ in range(13)]
    with jax.set_mesh(made.setup.mesh):
        for step, batch in enumerate([*batches[:4], *batches[8:]], 1):
            state, values = made.train_step(state, to_device(batch, batch_sharding(made.setup.mesh)))
            assert float(values["loss"]) == losses(tmp_path / "whole")[step]

    stopped = tmp_path / "stopped"
    with monkeypatch.context() as patch:  # after the second return, before the next checkpoint
        stop_before(patch, 9 + 1, lambda: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            poison(make_run(stopped, **ROLLING), 6, 8).run()
    assert poison(make_run(stopped, **ROLLING), 6, 8).run()["start_step"] == 4
    assert losses(stopped) == losses(tmp_path / "whole")


def test_a_run_without_a_checkpoint_says_that_it_cannot_return(tmp_path, capfd):
    """It stopped as if roll_back had not been set."""
    made = poison(make_run(tmp_path, **{**ROLLING, "train__save_every": 8}), 3)
    with pytest.raises(TrainingError, match="step 3") as stopped:
        made.run()
    assert stopped.value.guard == "non_finite" and "there is no checkpoint to return to" in capfd.readouterr().out


def test_a_return_forgets_neither_alarms_nor_where_the_start_began(tmp_path, monkeypatch):
    """Batch 5 raises an alarm, and batch 6 sends the run back to step 4."""
    rolling = {**ROLLING, "guards__skip_steps": 1}
    make_run(tmp_path / "whole", **{**rolling, "train__steps": 2, "optim__warmup_steps": 1}).run()
    shutil.copytree(tmp_path / "whole", tmp_path / "stopped")
    summary = poison(make_run(tmp_path / "whole", **rolling), 5, 6).run()
    assert (summary["start_step"], summary["rollbacks"], summary["alarms"]["skipped"]) == (2, 1, 1)

    with monkeypatch.context() as patch:  # after the return, before the next checkpoint
        stop_before(patch, 4 + 1, lambda: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            poison(make_run(tmp_path / "stopped", **rolling), 5, 6).run()
    summary = poison(make_run(tmp_path / "stopped", **rolling), 5, 6).run()
    assert (summary["start_step"], summary["rollbacks"], summary["alarms"]["skipped"]) == (4, 1, 1)


def test_a_run_that_begins_anew_leaves_out_nothing(tmp_path):
    """As R023 advises where checkpoints are gone. The records of the dead run's returns are not this run's."""
    rolling = ROLLING | {"optim__schedule": "constant"}
    poison(make_run(tmp_path / "run", **rolling), 6, 8).run()
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    (tmp_path / "run" / "metrics.jsonl").unlink()
    make_run(tmp_path / "run", **rolling | {"train__steps": 4}).run()
    summary = make_run(tmp_path / "run", **rolling).run()
    assert (summary["start_step"], summary["rollbacks"]) == (4, 0)
    kept = [json.loads((tmp_path / "run" / f"rollbacks{name}.json").read_text()) for name in ("", "_before")]
    assert [len(records) for records in kept] == [0, 2]
    make_run(tmp_path / "whole", **rolling).run()
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")


@pytest.mark.parametrize("request_", ["HALT", "SIGTERM", "SIGINT"])
def test_a_request_to_stop_outlives_a_return(tmp_path, request_):
    """It comes after the batch that is not finite, and before anyone has seen the loss of that."""

    def change(step, batch):
        if step == 7:
            (tmp_path / "HALT").touch() if request_ == "HALT" else signal.raise_signal(signal.Signals[request_])
        return {**batch, "loss_mask": batch["loss_mask"] * (np.nan if step == 6 else 1)}

    changes = {**ROLLING, "train__save_every": 4, "train__log_every": 100, "data__prefetch": 0}
    summary = with_batches(make_run(tmp_path, **changes), change).run()
    assert (summary["rollbacks"], summary["step"], summary["stopped_by"]) == (1, 4, request_)
    assert not (tmp_path / "HALT").exists()


def test_a_damaged_record_is_named(tmp_path):
    for content in (bytes(100), b"null", b"[1]", b'[{"step": 1}]', b"\xff"):
        (tmp_path / "rollbacks.json").write_bytes(content)
        with pytest.raises(ConfigError, match="R023.*rollbacks.json: is damaged.*Fix: restore it"):
            make_run(tmp_path, **ROLLING)


def test_rows_are_json_where_a_loss_is_not_finite(tmp_path):
    """Null stands for it, in the summary too; a resumed run reads it as it was."""
    skipping = {**ROLLING, "guards__roll_back": 0, "guards__skip_steps": 1, "train__steps": 4, "train__log_every": 1}
    poison(make_run(tmp_path, **skipping), 4).run()

    def refuse(name):
        raise AssertionError(f"{name} is no JSON")

    rows = [json.loads(line, parse_constant=refuse) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if row["train/loss"] is None] == [4] and rows[3]["train/perplexity"] is None
    assert json.loads((tmp_path / "summary.json").read_text(), parse_constant=refuse)["last"]["train/loss"] is None
    assert np.isnan(last_rows(tmp_path, 4)[0]["train/loss"])
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b"\xff\xfe\n[1, 2]\n")  # as a disk leaves it that lost power
    assert make_run(tmp_path, **{**skipping, "train__steps": 5}).run()["step"] == 5


def test_returns_are_bounded(tmp_path):
    with pytest.raises(TrainingError, match="not finite") as stopped:
        poison(make_run(tmp_path, **ROLLING), 6, 8, 10).run()
    assert stopped.value.step == 6 and len(json.loads((tmp_path / "rollbacks.json").read_text())) == 2
    assert json.loads((tmp_path / "stopped.json").read_text())["guard"] == "non_finite"
