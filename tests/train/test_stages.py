"""Another stage of a run: its weights and averages, with data, rows, schedule and RoPE of its own."""

import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

from nsa_jax.command_line import load_config
from nsa_jax.config import ConfigError
from nsa_jax.hub.export import export
from nsa_jax.hub.load import load
from nsa_jax.train import CheckpointError, prepared
from nsa_jax.train.loop import Run
from nsa_jax.train.optimizer import learning_rate
from nsa_jax.trainer import beginning

from .tiny import losses, make_run, one_device, rows, tiny_config

ROOT = Path(__file__).parents[2]
FIRST = dict(train__steps=6, train__save_every=3, optim__schedule="constant")
# Longer rows, other batches, another schedule, another base and more documents per step.
SECOND = dict(
    train__steps=4, train__save_every=1, train__batch_size=4, data__seq_len=64, optim__schedule="linear",
    optim__learning_rate=1e-3, model__rope_theta=500.0, model__rope_scaling__kind="linear",
    model__rope_scaling__factor=2.0,
)  # fmt: skip


def stage(workdir, resume, **changes):
    return Run(tiny_config(**SECOND | changes), workdir, resume, one_device(), stage=True)


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("stages") / "first"
    make_run(workdir, **FIRST).run()
    return workdir


def restored(run, workdir):
    """What a run starts with."""
    from nsa_jax.train.checkpoint import describe
    from nsa_jax.train.start import first_state

    info = {
        "parameters": describe(run.setup.abstract_state),
        "optimizer": describe(run.setup.abstract_state, "opt_state"),
        "tokenizer": run.pipeline.tokenizer.fingerprint,
        "config": run.config.to_dict(),
    }
    return first_state(run.setup, (workdir / "checkpoints", None), info, run.pipeline.train(), run._stage)


def test_weights_and_averages_are_kept_and_steps_and_schedule_begin_again(first, tmp_path):
    before_step, before, *_ = restored(make_run(tmp_path / "same", **FIRST | {"train__steps": 7}), first)
    step, state, source, said, *_ = restored(stage(tmp_path / "second", str(first)), first)
    assert (before_step, step) == (6, 0) and source == f"{first / 'checkpoints'}@6"
    assert said == f"another stage of {source}"
    assert int(before["step"]) == 6 and int(state["step"]) == 0
    jax.tree.map(np.testing.assert_array_equal, state["params"], before["params"])
    adam, schedule = state["opt_state"][1][0], state["opt_state"][1][2]
    assert int(adam.count) == 6 and int(schedule.count) == 0
    jax.tree.map(np.testing.assert_array_equal, adam.mu, before["opt_state"][1][0].mu)
    assert max(float(abs(leaf).max()) for leaf in jax.tree.leaves(adam.mu)) > 0


def test_a_stage_is_a_run_of_its_own_and_env_json_tells_the_chain(first, tmp_path):
    whole, cut, third = (tmp_path / name for name in ("whole", "cut", "third"))
    stage(whole, str(first)).run()
    assert list(losses(whole)) == [1, 2, 3, 4]
    config = tiny_config(**SECOND)
    rates = [row["learning_rate"] for row in rows(whole).values()]
    np.testing.assert_allclose(rates, [float(learning_rate(config)(step)) for step in range(4)], rtol=1e-6)
    scratch = tmp_path / "scratch"
    make_run(scratch, **SECOND).run()
    assert losses(scratch)[1] != losses(whole)[1]  # the same first batch, other weights

    chain = [{"run": str(first), "step": 6, "tokens": 6 * 8 * 48, "seq_len": 48, "batch_size": 8}]
    assert json.loads((whole / "env.json").read_text())["stages"] == chain
    stage(cut, str(first), train__steps=2, optim__schedule="constant").run()
    del chain
    again = stage(cut, str(first), optim__schedule="constant")  # resumes the stage, not the first run
    again.run()
    assert list(losses(cut)) == [1, 2, 3, 4]
    unbroken = tmp_path / "unbroken"
    stage(unbroken, str(first), optim__schedule="constant").run()
    assert losses(unbroken) == losses(cut)
    assert [row["run"] for row in json.loads((cut / "env.json").read_text())["stages"]] == [str(first)]

    stage(third, f"{whole}@3", train__steps=1).run()
    found = json.loads((third / "env.json").read_text())["stages"]
    assert [(row["run"], row["step"], row["tokens"]) for row in found] == [
        (str(first), 6, 6 * 8 * 48), (str(whole), 3, 3 * 4 * 64),
    ]  # fmt: skip


def test_an_exported_model_may_begin_a_stage_with_the_config_made_for_it(first, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    export(*load(first), tmp_path / "model")
    saved = tiny_config(**FIRST)
    config = load_config(f"{ROOT / 'configs' / 'extend.py'}:model,96")
    assert config.model.to_dict() == {**saved.model.to_dict(), "rope_theta": config.model.rope_theta}
    slowest = lambda theta: theta ** -((saved.model.head_dim - 2) / saved.model.head_dim)  # noqa: E731
    assert slowest(config.model.rope_theta) * 96 == pytest.approx(slowest(saved.model.rope_theta) * 48)
    assert config.data.tokenizer == "byte" and config.train.batch_size * 96 <= 131_072
    config.data.update(saved.data.to_dict() | {"seq_len": 96})
    config.train.update(saved.train.to_dict() | {"steps": 2})
    with pytest.raises(CheckpointError, match="rope_theta"):
        Run(config, tmp_path / "refused", "model", one_device()).run()
    Run(config, tmp_path / "longer", "model", one_device(), stage=True).run()
    assert list(losses(tmp_path / "longer")) == [1, 2]
    assert json.loads((tmp_path / "longer" / "env.json").read_text())["stages"] == [{"run": "model"}]
    with pytest.raises(ConfigError, match="nothing/config.json is missing"):
        load_config(f"{ROOT / 'configs' / 'extend.py'}:nothing")


def test_what_a_stage_may_not_change_is_refused(first, tmp_path):
    with pytest.raises(CheckpointError, match="norm_eps"):
        stage(tmp_path / "a", str(first), model__norm_eps=1e-3).run()
    with pytest.raises(CheckpointError, match="rope_theta"):  # without --stage
        make_run(tmp_path / "b", str(first), **SECOND | {"train__steps": 9}).run()


def test_a_run_that_has_nothing_to_begin_with_is_refused_before_its_data_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(prepared, "make_pipeline", lambda *_, **__: pytest.fail("the data were read"))
    with pytest.raises(ConfigError, match="--stage: there is nothing to go on from"):
        stage(tmp_path / "a", None)
    (tmp_path / "empty" / "checkpoints").mkdir(parents=True)
    with pytest.raises(ConfigError, match="empty/checkpoints: no checkpoint there"):
        stage(tmp_path / "b", str(tmp_path / "empty"))
    with pytest.raises(ConfigError, match="empty/checkpoints: no checkpoint there"):
        make_run(tmp_path / "c", str(tmp_path / "empty"))


def test_a_stage_of_the_workdir_itself_and_steps_that_are_not_there_are_refused(first, tmp_path, monkeypatch):
    monkeypatch.setattr(prepared, "make_pipeline", lambda *_, **__: pytest.fail("the data were read"))
    with pytest.raises(
        ConfigError, match="R022.*--stage goes on from the workdir itself. Fix: give the stage a workdir"
    ):
        stage(first, str(first))
    with pytest.raises(ConfigError, match="R022.*@5: no checkpoint of this step there. Fix: give one of 3, 6, or no"):
        make_run(tmp_path / "a", f"{first}@5")


def test_a_stage_that_is_stopped_before_its_first_step_keeps_its_chain(first, tmp_path):
    (tmp_path / "second").mkdir()
    (tmp_path / "second" / "HALT").touch()
    assert stage(tmp_path / "second", str(first)).run()["step"] == 0
    again = stage(tmp_path / "second", str(first))
    assert again.run()["step"] == 4
    assert again.guards.state()["values"]["trained"] == 1  # a low loss at its first steps is no sign of a leak
    stages = json.loads((tmp_path / "second" / "env.json").read_text())["stages"]
    assert [(row["run"], row["step"]) for row in stages] == [(str(first), 6)]


def test_a_run_goes_on_when_what_it_began_with_is_gone(first, tmp_path):
    shutil.copytree(first, tmp_path / "first")
    gone = str(tmp_path / "first")
    assert stage(tmp_path / "second", gone, train__steps=2).run()["step"] == 2
    assert make_run(tmp_path / "branch", f"{gone}@3", **FIRST | {"train__steps": 5}).run()["step"] == 5
    shutil.rmtree(gone)
    assert stage(tmp_path / "second", gone, train__steps=4).run()["step"] == 4
    assert make_run(tmp_path / "branch", f"{gone}@3", **FIRST | {"train__steps": 6}).run()["step"] == 6
    assert beginning(None, gone, str(tmp_path / "branch")) == gone == beginning(None, gone, "s3://bucket/run")
    with pytest.raises(ConfigError, match="--stage goes on from the workdir itself"):
        stage(tmp_path / "second", str(tmp_path / "second"))


def test_a_branch_of_a_stage_keeps_its_chain(first, tmp_path):
    stage(tmp_path / "second", str(first)).run()
    longer = SECOND | {"train__steps": 6}
    (tmp_path / "branch").mkdir()
    (tmp_path / "branch" / "HALT").touch()  # before its first step
    assert make_run(tmp_path / "branch", str(tmp_path / "second"), **longer).run()["step"] == 4
    assert make_run(tmp_path / "branch", str(tmp_path / "second"), **longer).run()["start_step"] == 4
    stages = json.loads((tmp_path / "branch" / "env.json").read_text())["stages"]
    assert [(row["run"], row["step"]) for row in stages] == [(str(first), 6)]


def test_a_branch_of_a_stage_knows_that_its_weights_were_trained(first, tmp_path):
    """A low loss at its first steps is no sign of a leak, as it is none in the stage itself."""
    stage(tmp_path / "second", str(first)).run()
    changes = SECOND | {"train__steps": 5}
    branch = make_run(tmp_path / "branch", str(tmp_path / "second"), **changes)
    branch.run()
    plain = make_run(tmp_path / "plain", str(first), **FIRST | {"train__steps": 7})
    plain.run()
    assert branch.guards.state()["values"]["trained"] == 1
    assert plain.guards.state()["values"]["trained"] == 0


def test_init_takes_no_run_for_a_model_wherever_the_workdir_is(first):
    """With a workdir in a bucket it went on with the run's optimizer, step and data, as --resume does."""
    for named in (str(first), f"{first}@3", "s3://bucket/other"):
        with pytest.raises(ConfigError, match="no exported model there"):
            beginning(None, named, "s3://bucket/run")


def test_init_names_an_exported_model(first, tmp_path):
    export(*load(first), tmp_path / "export")
    assert beginning(None, str(tmp_path / "export"), str(tmp_path)) == str(tmp_path / "export")
    assert beginning(str(first), None, str(tmp_path)) == str(first) and beginning(None, None, "") is None
    for arguments, words in (
        ((None, str(first)), "no exported model there"),
        ((str(first), str(tmp_path / "export")), "a run has one beginning"),
        (("", None), "--resume is empty"),  # as --resume=$RUN gives where RUN is not set
        ((None, " "), "--init is empty"),
    ):
        with pytest.raises(ConfigError, match=words):
            beginning(*arguments, str(tmp_path))
