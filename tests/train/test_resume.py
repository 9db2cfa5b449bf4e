"""Stopping and starting again: bit-exact, whatever stopped the run; and what a checkpoint refuses."""

import dataclasses
import json
import logging
import math
import shutil
import signal

import chex
import jax
import numpy as np
import pytest

from nsa_jax import train
from nsa_jax.config import ConfigError
from nsa_jax.data import DataError
from nsa_jax.report.reading import read_run
from nsa_jax.train import CheckpointError, TrainingError, loop
from nsa_jax.train.checkpoint import Checkpoints, differences, parse_resume
from nsa_jax.train.loop import HALT, Run

from .tiny import losses, make_run, one_device, rows, tiny_config

# Dropout and accumulation on: both must continue exactly, too.
FULL = dict(train__steps=10, train__save_every=4, train__grad_accum=2, model__dropout=0.2)
DENSE = dict(model__attention="dense", model__num_layers=1, train__steps=4, train__save_every=1)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("uninterrupted")
    make_run(workdir, **FULL).run()
    return workdir


def final_state(workdir):
    run = make_run(workdir, **FULL)
    info = {"parameters": {}, "tokenizer": ""}
    checkpoints = Checkpoints(workdir / "checkpoints", info, read_only=True)
    checkpoints._check_fits = lambda *_: None
    found = checkpoints.restore(run.setup.target(), run.pipeline.train(), 10)
    checkpoints.close()
    return found[1]


def stop_before(monkeypatch, step, act):
    """Calls `act` when the loop asks for the batch of the step after `step`."""
    original = loop.Batches.__next__
    count = {"taken": 0}

    def taking(self):
        count["taken"] += 1
        if count["taken"] == step:
            act()
        return original(self)

    monkeypatch.setattr(loop.Batches, "__next__", taking)


@pytest.mark.parametrize(
    ("step", "how"), [(1, "HALT"), (3, "SIGTERM"), (4, "SIGINT"), (6, "HALT")], ids=lambda value: str(value)
)
def test_a_stopped_run_continues_bit_exactly(step, how, uninterrupted, tmp_path, monkeypatch):
    def act():
        if how == "HALT":
            (tmp_path / HALT).touch()
        else:
            signal.raise_signal(getattr(signal, how))

    before = signal.getsignal(signal.SIGTERM)
    with monkeypatch.context() as patch:
        stop_before(patch, step, act)
        summary = make_run(tmp_path, **FULL).run()
    assert summary["stopped_by"] == how and summary["step"] == step and not summary["finished"]
    assert signal.getsignal(signal.SIGTERM) is before and not (tmp_path / HALT).exists()
    assert (tmp_path / "checkpoints" / str(step)).is_dir()
    summary = make_run(tmp_path, **FULL).run()
    assert summary["start_step"] == step and summary["finished"]
    assert losses(tmp_path) == losses(uninterrupted)
    assert len(losses(tmp_path)) == 10
    chex.assert_trees_all_equal(final_state(tmp_path), final_state(uninterrupted))


def test_a_killed_run_continues_from_its_last_checkpoint(uninterrupted, tmp_path, monkeypatch):
    def die():
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        stop_before(patch, 7, die)
        with pytest.raises(KeyboardInterrupt):
            make_run(tmp_path, **FULL).run()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 9, "train/lo')  # a line cut off by the kill
    alarm = '{"step": 9, "alarm": "spike", "message": "", "time": 1.0}\n'
    (tmp_path / "alarms.jsonl").write_text(alarm + '{"step": 9, "ala')
    assert make_run(tmp_path, **FULL).run()["start_step"] == 4
    assert losses(tmp_path) == losses(uninterrupted)
    assert [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()].count(5) == 1
    assert (tmp_path / "alarms.jsonl").read_text() == alarm  # an alarm of lost steps is kept, half a line is not


def test_resume_from_another_run_at_a_step(uninterrupted, tmp_path):
    run = make_run(tmp_path, resume=f"{uninterrupted}@4", **FULL)
    assert run.run()["start_step"] == 4
    got, want = losses(tmp_path), losses(uninterrupted)
    assert got == {step: loss for step, loss in want.items() if step > 4}
    env = json.loads((tmp_path / "env.json").read_text())
    assert env["start_step"] == 4 and env["resumed_from"] == str(uninterrupted / "checkpoints")


def test_changing_the_dropout_seed_changes_the_losses(uninterrupted, tmp_path):
    # The bit-exactness above means something only if dropout is really drawn per step from the seed.
    make_run(tmp_path, **{**FULL, "train__steps": 3, "train__save_every": 0, "model__dropout": 0.0}).run()
    got = losses(tmp_path)
    assert all(got[step] != losses(uninterrupted)[step] for step in got)


def test_a_finished_run_is_not_trained_further(uninterrupted):
    before = (uninterrupted / "metrics.jsonl").read_text()
    summary = make_run(uninterrupted, **FULL).run()
    assert summary["start_step"] == summary["step"] == 10 and summary["finished"]
    assert (uninterrupted / "metrics.jsonl").read_text() == before


def test_a_finished_run_keeps_its_summary(tmp_path, caplog):
    config = tiny_config(**DENSE, train__eval_batches=1, preflight__selftest=False)
    train.run(config, tmp_path, devices=one_device())
    before = (tmp_path / "summary.json").read_text()
    with caplog.at_level(logging.INFO, logger="nsa_jax"):
        again = train.run(config, tmp_path, devices=one_device())
    assert (tmp_path / "summary.json").read_text() == before and again["last"] == json.loads(before)["last"] != {}
    assert any("finished already, at step 4" in record.getMessage() for record in caplog.records)
    (tmp_path / "summary.json").unlink()  # killed after the last save
    train.run(config, tmp_path, devices=one_device())
    written, before = json.loads((tmp_path / "summary.json").read_text()), json.loads(before)
    assert written.pop("goodput")["run"]["starts"] == 2 and before.pop("goodput")["run"]["starts"] == 1
    assert {**written, "start_step": 0} == before


def test_the_validation_at_step_0_counts_once(tmp_path):
    """A run that is stopped before its first step has a checkpoint, and validates again when it goes on."""
    patient = dict(DENSE, train__eval_every=9, train__eval_batches=1, guards__early_stop=1)
    (tmp_path / "HALT").touch()
    assert make_run(tmp_path, **patient).run()["step"] == 0
    assert make_run(tmp_path, **patient).run()["step"] == 4


def test_patience_survives_a_kill(tmp_path, monkeypatch):
    patient = dict(DENSE, train__steps=9, train__eval_every=1, train__eval_batches=1, guards__early_stop=4)
    patient["guards__early_stop_delta"] = 100.0  # only the first validation counts as an improvement

    def die():
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        stop_before(patch, 3, die)
        with pytest.raises(KeyboardInterrupt):
            make_run(tmp_path, **patient).run()
    summary = make_run(tmp_path, **patient).run()
    assert summary["start_step"] == 2 and summary["step"] == 4 and "4 validations" in summary["stopped_by"]
    again = make_run(tmp_path, **patient).run()  # its patience is still at an end
    assert again["step"] == 4 and again["last"] == {**again["last"], "train/loss": losses(tmp_path)[4]}


def test_step_0_is_logged_once_if_the_run_begins_again(tmp_path, monkeypatch):
    changes = dict(DENSE, train__eval_batches=1, train__save_every=0)
    for _ in range(2):
        make_run(tmp_path, **changes).run()
    steps = [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert steps == [0, 1, 2, 3, 4, 4]


def test_keeps_the_last_and_the_best(tmp_path):
    run = make_run(tmp_path, **{**DENSE, "train__steps": 5, "train__keep_last": 2})
    values = iter([3.0, 1.0, 2.0, 1.5, 4.0])
    run._validate = lambda step, state, writer: setattr(
        run, "_last_validation", (step, {"val/loss": 9.0 if step == 0 else next(values)})
    )
    run.config.train.eval_every, run.config.train.eval_batches = 1, 1
    summary = run.run()
    kept = sorted(int(path.name) for path in (tmp_path / "checkpoints").iterdir())
    assert kept == [2, 4, 5]
    assert summary["best_checkpoint"] == {"step": 2, "val/loss": 1.0}


def test_unfinished_and_damaged_steps_are_skipped_with_a_warning(tmp_path, caplog):
    make_run(tmp_path, **DENSE).run()
    root = tmp_path / "checkpoints"
    unfinished = root / "9.writing.orbax-checkpoint-tmp"
    unfinished.mkdir()
    (unfinished / "state").touch()
    for path in (root / "4" / "state").rglob("*"):
        if path.is_file() and path.stat().st_size > 500:
            path.write_bytes(path.read_bytes()[:100])
    with caplog.at_level(logging.WARNING, logger="nsa_jax"):
        summary = make_run(tmp_path, **{**DENSE, "train__steps": 5}).run()
    assert summary["start_step"] == 3 and summary["step"] == 5
    messages = [record.getMessage() for record in caplog.records]
    assert sum(str(unfinished) in text and "never finished" in text for text in messages) == 1
    assert any("skipping checkpoint 4" in text for text in messages)
    assert make_run(tmp_path, **{**DENSE, "train__steps": 5}).run()["start_step"] == 5


def test_all_steps_damaged_is_an_error_and_not_a_fresh_start(tmp_path):
    make_run(tmp_path, **{**DENSE, "train__steps": 3}).run()
    for path in (tmp_path / "checkpoints").rglob("manifest.ocdbt"):
        path.unlink()
    with pytest.raises(CheckpointError, match="no checkpoint .* can be read"):
        make_run(tmp_path, **DENSE).run()


def test_a_config_that_does_not_fit_is_refused_with_the_difference(tmp_path):
    make_run(tmp_path, **{**DENSE, "train__steps": 3}).run()
    with pytest.raises(CheckpointError) as error:
        make_run(tmp_path, **{**DENSE, "model__mlp_dim": 64}).run()
    assert "blocks/mlp/w_in: checkpoint (1, 32, 96) float32, config (1, 32, 128) float32" in str(error.value)
    with pytest.raises(CheckpointError, match="tokenizer: checkpoint .*-copy, config .*-random"):
        make_run(tmp_path, **{**DENSE, "data__synthetic": "random"}).run()
    with pytest.raises(
        DataError, match=r"belongs to other data than the config gives: config.seed: 0 there, 1 now\. Fix"
    ):
        make_run(tmp_path, **{**DENSE, "seed": 1}).run()
    other = make_run(tmp_path.with_name("other"), resume=str(tmp_path), **{**DENSE, "train__batch_size": 4})
    with pytest.raises(DataError, match="other data than the config gives: config.train.batch_size: 8 there, 4 now"):
        other.run()


def test_what_does_not_fit_is_refused_with_what_to_do_where_it_came_from(tmp_path):
    """Another workdir does not help who named another run in the first place."""
    make_run(tmp_path / "a", **{**DENSE, "train__steps": 3}).run()
    wide, rows = {**DENSE, "model__mlp_dim": 64}, {**DENSE, "train__batch_size": 4}
    with pytest.raises(CheckpointError, match=r"Fix: restore the config that wrote it .*, or use another workdir$"):
        make_run(tmp_path / "a", **wide).run()
    with pytest.raises(CheckpointError, match=r"Fix: set these fields as in its env\.json, or name another run$"):
        make_run(tmp_path / "b", str(tmp_path / "a"), **wide).run()
    stage = r"Fix: restore .*, or begin another stage with it: --resume=.*/a@3 --stage, in a workdir of its own"
    for workdir, resume in (("a", None), ("c", str(tmp_path / "a"))):
        with pytest.raises(DataError, match=stage):
            make_run(tmp_path / workdir, resume, **rows).run()


def test_files_that_were_added_are_told_from_a_changed_config(tmp_path, monkeypatch):
    monkeypatch.setenv("NSA_JAX_CACHE", str(tmp_path / "cache"))
    text = dict(DENSE, data__source="text", data__files=(f"{tmp_path}/*.txt",))
    for number in range(4):
        (tmp_path / f"{number}.txt").write_text(f"{number} " * 200)
        if number == 2:
            make_run(tmp_path / "run", **text).run()
            copy = shutil.copytree(tmp_path, tmp_path / "moved", ignore=lambda *_: ["run", "cache", "moved"])
            moved = {**text, "data__files": (f"{copy}/*.txt",), "train__steps": 5}
            assert make_run(tmp_path / "run", **moved).run()["start_step"] == 4
    with pytest.raises(DataError, match="training documents: 3 there, 4 now\n  training tokens: 1203 there, 1604 now"):
        make_run(tmp_path / "run", **{**text, "train__steps": 6}).run()


def test_differences_name_the_tokenizer_and_missing_parameters():
    saved = {"tokenizer": "byte-1", "parameters": {"a": [[2], "float32"], "b": [[3], "float32"]}}
    wanted = {"tokenizer": "bpe-7", "parameters": {"a": [[2], "float32"], "c": [[3], "float32"]}}
    assert differences(saved, saved) == []
    assert differences(saved, wanted) == [
        "tokenizer: checkpoint byte-1, config bpe-7",
        "b: checkpoint (3,) float32, config absent",
        "c: checkpoint absent, config (3,) float32",
    ]


def test_resume_argument(tmp_path):
    (tmp_path / "run@home" / "checkpoints").mkdir(parents=True)
    assert parse_resume(f"{tmp_path}/run@home") == (tmp_path / "run@home" / "checkpoints", None)
    assert parse_resume(f"{tmp_path}/run@home@120") == (tmp_path / "run@home" / "checkpoints", 120)
    with pytest.raises(CheckpointError, match="is no directory"):
        parse_resume(f"{tmp_path}/missing@3")
    (tmp_path / "run@home@120" / "checkpoints").mkdir(parents=True)  # a directory of that name is what is meant
    assert parse_resume(f"{tmp_path}/run@home@120") == (tmp_path / "run@home@120" / "checkpoints", None)
    assert parse_resume(f"{tmp_path}/run@home@120@7") == (tmp_path / "run@home@120" / "checkpoints", 7)
    with pytest.raises(CheckpointError, match="run@home@best: no checkpoint has a validation loss. Fix: name a step"):
        parse_resume(f"{tmp_path}/run@home@best")


def test_resume_from_the_best_checkpoint_of_another_run(tmp_path):
    summary = make_run(tmp_path / "a", **{**DENSE, "train__eval_every": 1, "train__eval_batches": 1}).run()
    best = summary["best_checkpoint"]["step"]
    assert parse_resume(f"{tmp_path}/a@best") == (tmp_path / "a" / "checkpoints", best)
    (tmp_path / "a@best").mkdir()  # a directory of that name is what is meant
    assert parse_resume(f"{tmp_path}/a@best") == (tmp_path / "a@best", None)


@pytest.mark.parametrize("step", ["", "@4"])
def test_resuming_a_run_that_has_had_all_steps_is_refused(step, uninterrupted, tmp_path):
    changes = {**FULL, "train__steps": 4 if step else 10}
    with pytest.raises(ConfigError, match="R022.*of config.train.steps=.* to train. Fix: raise .*, or add --stage"):
        make_run(tmp_path, resume=f"{uninterrupted}{step}", **changes)
    assert list(tmp_path.iterdir()) == []
    Run(tiny_config(**changes), tmp_path, f"{uninterrupted}{step}", one_device(), stage=True)


def test_fewer_steps_than_the_workdir_has_are_refused(tmp_path):
    """A zero that was dropped; a supervisor would take the run for finished."""
    make_run(tmp_path, **DENSE).run()
    (tmp_path / "summary.json").unlink()  # killed behind its last save
    before = (tmp_path / "metrics.jsonl").read_text()
    with pytest.raises(ConfigError, match="R022.*config.train.steps=3: the workdir has a checkpoint of step 4 already"):
        make_run(tmp_path, **{**DENSE, "train__steps": 3}).run()
    assert (tmp_path / "metrics.jsonl").read_text() == before and not (tmp_path / "summary.json").exists()


def test_multiples_of_keep_every_are_saved_whatever_save_every_is(tmp_path):
    changes = {**DENSE, "train__steps": 7, "train__save_every": 5, "train__keep_every": 3, "train__keep_last": 1}
    make_run(tmp_path, **changes).run()
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["3", "6", "7"]


def test_other_steps_on_resume_tell_the_learning_rate_before_and_now(tmp_path, capsys):
    make_run(tmp_path / "a", **DENSE).run()
    assert "its learning rate" not in capsys.readouterr().out
    make_run(tmp_path / "b", resume=f"{tmp_path / 'a'}@3", **{**DENSE, "train__steps": 40}).run()
    said = "its learning rate goes from 3.00e-04 to 3.00e-03, since config.train.steps is 40, not 4"
    assert said in capsys.readouterr().out
    make_run(tmp_path / "a", **{**DENSE, "train__steps": 9, "optim__learning_rate": 1e-3}).run()
    said = capsys.readouterr().out
    assert "from 3.00e-04 to 7." in said
    assert "since config.train.steps is 9, not 4 and config.optim has changed" in said


def test_a_branch_with_fewer_steps_cools_down_from_its_checkpoint_on_the_next_data(tmp_path):
    """As docs/resume.md says of wsd, with a decay over the last half."""
    wsd = {**DENSE, "optim__schedule": "wsd", "optim__decay_fraction": 0.5, "optim__learning_rate": 1e-3}
    make_run(tmp_path / "a", **wsd | {"train__steps": 16, "train__save_every": 4, "train__keep_last": 4}).run()
    make_run(tmp_path / "b", f"{tmp_path / 'a'}@4", **wsd | {"train__steps": 8}).run()
    rates = [row["learning_rate"] for row in rows(tmp_path / "b").values()]
    assert rates == pytest.approx([1e-4 + 9e-4 * share for share in (0.75, 0.5, 0.25, 0.0)])
    assert losses(tmp_path / "b")[5] == losses(tmp_path / "a")[5]
    assert rows(tmp_path / "a")[5]["learning_rate"] == pytest.approx(1e-3)


def test_an_end_is_forgotten_when_training_goes_on(tmp_path, monkeypatch):
    make_run(tmp_path, **DENSE).run()
    (tmp_path / "stopped.json").write_text('{"guard": "spike", "step": 3}')

    def die():
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        stop_before(patch, 2, die)
        with pytest.raises(KeyboardInterrupt):
            make_run(tmp_path, **{**DENSE, "train__steps": 9}).run()
    ends = sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(("stopped", "summary")))
    assert ends == ["stopped_3.json", "summary_4.json"]
    assert json.loads((tmp_path / "summary_4.json").read_text())["finished"]
    assert read_run(tmp_path)["outcome"]["state"] == "interrupted"
    assert make_run(tmp_path, **{**DENSE, "train__steps": 9}).run()["finished"]
    assert json.loads((tmp_path / "summary.json").read_text())["steps"] == 9


def test_lost_checkpoints_do_not_cost_the_metrics(tmp_path, monkeypatch):
    changes = dict(DENSE, preflight__selftest=False)

    def die():
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:  # killed before its first checkpoint, a run begins again
        stop_before(patch, 3, die)
        with pytest.raises(KeyboardInterrupt):
            make_run(tmp_path, **{**changes, "train__save_every": 4}).run()
    assert list((tmp_path / "checkpoints").iterdir()) == [] and max(rows(tmp_path)) == 1
    train.run(tiny_config(**{**changes, "train__save_every": 2}), tmp_path, devices=one_device())
    before = (tmp_path / "metrics.jsonl").read_text()
    for records in (("goodput.json", "summary.json"), ("summary.json",)):  # earlier versions have the latter alone
        shutil.rmtree(tmp_path / "checkpoints", ignore_errors=True)
        for name in {"goodput.json", "summary.json"} - {*records}:
            (tmp_path / name).unlink()
        with pytest.raises(ConfigError, match=r"R023.*checkpoint of step 4, and checkpoints/ has none. Fix: restore"):
            train.run(tiny_config(**changes), tmp_path, devices=one_device())
        assert (tmp_path / "metrics.jsonl").read_text() == before
    (tmp_path / "metrics.jsonl").unlink()
    with monkeypatch.context() as patch:  # as a new run: one that is killed soon begins again
        stop_before(patch, 3, die)
        with pytest.raises(KeyboardInterrupt):
            train.run(tiny_config(**{**changes, "train__save_every": 4}), tmp_path, devices=one_device())
    train.run(tiny_config(**changes), tmp_path, devices=one_device())
    assert list(rows(tmp_path)) == [1, 2, 3, 4]


def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_last_good_checkpoint(tmp_path):
    run = make_run(tmp_path, **{**DENSE, "train__steps": 20, "train__save_every": 2})
    train_step = run.train_step

    def poisoned(state, batch):
        batch = {**batch, "loss_mask": batch["loss_mask"] * np.where(int(state["step"]) == 6, np.nan, 1.0).astype("f4")}
        return train_step(state, batch)

    run.train_step = poisoned
    with pytest.raises(TrainingError, match=r"step 7: loss nan"):
        run.run()
    found = losses(tmp_path)
    assert max(found) == 7 and found.pop(7) is None  # null: not finite
    assert all(math.isfinite(loss) for loss in found.values())
    shutil.copytree(tmp_path, tmp_path.with_name("copy"))
    again = make_run(tmp_path.with_name("copy"), **{**DENSE, "train__steps": 8}).run()
    assert again["start_step"] == 6 and math.isfinite(again["last"]["train/loss"])
    assert all(math.isfinite(loss) for loss in losses(tmp_path.with_name("copy")).values())


def test_sharded_state_resumes_on_another_mesh(tmp_path):
    from nsa_jax.train.loop import Run

    from .tiny import tiny_config

    changes = {**DENSE, "train__steps": 4, "train__save_every": 2}
    Run(tiny_config(mesh__fsdp=4, **changes), tmp_path / "a", None, jax.devices()[:4]).run()
    alone = Run(tiny_config(**changes), tmp_path / "b", f"{tmp_path / 'a'}@2", one_device())
    assert dataclasses.asdict(alone.setup.model_config)["dim"] == 32
    alone.run()
    for step in (3, 4):
        assert losses(tmp_path / "b")[step] == pytest.approx(losses(tmp_path / "a")[step], abs=1e-5)
