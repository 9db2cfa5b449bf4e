"""Checkpoints under damage, changed optimizers, errors of the machine, and many saves."""

import json
import logging
import os
import shutil
import threading
from types import SimpleNamespace

import numpy as np
import optax
import pytest
from orbax.checkpoint import v1 as ocp

from nsa_jax import load
from nsa_jax.hub import digests
from nsa_jax.loading import LoadError
from nsa_jax.train import CheckpointError, preflight
from nsa_jax.train import checkpoint as checkpoint_lib
from nsa_jax.train.checkpoint import parse_resume
from tests.tools.runs import small_config, write_run

from . import stored
from .stored import (
    open_run,
    position_at,
    same,
    state_at,
    target_of,
    write_steps,
    write_steps_without_digests,
)
from .tiny import losses, make_run, tiny_config


def restored(directory, config=None, step=None, fresh_optimizer=None, **options):
    """Step, state and data position that a start from this directory finds."""
    checkpoints = open_run(directory, config, **options)
    data = position_at(0)
    try:
        found = checkpoints.restore(target_of(config), data, step, fresh_optimizer)
    finally:
        checkpoints.close()
    return found if found is None else (*found, next(data))


def flip(path, bit=None):
    content = bytearray(path.read_bytes())
    where = len(content) // 2 if bit is None else bit // 8
    content[where] ^= 1 if bit is None else 1 << bit % 8
    path.write_bytes(content)


def weights_of(directory):
    """The file that holds most of the state."""
    return max((path for path in (directory / "state").rglob("*") if path.is_file()), key=lambda p: p.stat().st_size)


def test_a_step_is_restored_with_its_position_and_every_bit(tmp_path):
    write_steps(tmp_path, {3: None, 5: 1.5})
    step, state, following = restored(tmp_path)
    assert step == 5 and following == 5 and same(state, state_at(5))
    assert open_run(tmp_path).best() == (5, 1.5)


def test_a_flipped_bit_in_the_weights_falls_back_and_is_not_met_again(tmp_path, caplog):
    write_steps(tmp_path, {1: 3.0, 2: 2.0, 3: 1.0})
    file = weights_of(tmp_path / "3")
    flip(file)
    with caplog.at_level(logging.WARNING, logger="nsa_jax"):
        step, state, following = restored(tmp_path)
    assert step == 2 and following == 2 and same(state, state_at(2))
    text = "\n".join(record.getMessage() for record in caplog.records)
    assert "skipping checkpoint 3" in text and file.name in text and "3.damaged" in text
    assert not (tmp_path / "3").exists() and (tmp_path / "3.damaged" / "info.json").is_file()
    checkpoints = open_run(tmp_path)
    assert checkpoints.steps() == [1, 2] and checkpoints.best() == (2, 2.0)
    checkpoints.save(3, state_at(3), position_at(3), 1.0)
    checkpoints.close()
    assert restored(tmp_path)[0] == 3


def test_the_shares_of_several_processes_cover_every_file(tmp_path):
    write_steps(tmp_path, {1: None})
    files = [path for path in (tmp_path / "1").rglob("*") if path.is_file() and path.stat().st_size]
    for path in files:
        content = path.read_bytes()
        flip(path)
        seen = 0
        for index in range(3):
            try:
                digests.verify(tmp_path / "1", index, 3)
            except digests.Damage:
                seen += 1
        # Every process reads SHA256SUMS itself.
        assert seen == (3 if path.name == digests.SUMS else 1), path
        path.write_bytes(content)
    digests.verify(tmp_path / "1")


def test_what_another_process_finds_damaged_is_passed_over_here_too(tmp_path, monkeypatch, caplog):
    write_steps(tmp_path, {1: None, 2: None})
    answers = iter([False, True, True])
    monkeypatch.setattr(checkpoint_lib.processes, "all_agree", lambda mine: mine and next(answers))
    with caplog.at_level(logging.WARNING, logger="nsa_jax"):
        assert restored(tmp_path)[0] == 1
    assert "another process found it damaged" in caplog.text and (tmp_path / "2.damaged").is_dir()


def test_a_directory_that_cannot_be_written_is_told_before_a_save_begins(tmp_path):
    write_steps(tmp_path / "run", {1: None})
    checkpoints = open_run(tmp_path / "run")
    (tmp_path / "run").rename(tmp_path / "moved")
    (tmp_path / "run").write_text("")
    with pytest.raises(OSError, match="exists"):
        checkpoints.save(2, state_at(2), position_at(2))
    (tmp_path / "run").unlink()  # one that is gone is made again
    checkpoints.save(3, state_at(3), position_at(3))
    checkpoints.close()
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["3"]


def test_damaged_steps_are_no_room_for_those_to_come(tmp_path, monkeypatch):
    for name in ("5", "5.damaged"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
        (tmp_path / "checkpoints" / name / "state").write_bytes(bytes(1000))
    # Five at a time: the last three, the best, and one being written.
    config = tiny_config(train__save_every=1, train__eval_batches=1)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=3500))
    (problem,) = preflight.check_disk(config, tmp_path, 1000)
    assert problem.rule == "R024"


def test_another_runs_damaged_step_is_passed_over_but_stays(tmp_path):
    write_steps(tmp_path, {1: None, 2: None})
    flip(weights_of(tmp_path / "2"))
    assert restored(tmp_path, read_only=True)[0] == 1
    assert (tmp_path / "2").is_dir() and not (tmp_path / "2.damaged").exists()


def test_a_damaged_step_that_is_named_is_refused(tmp_path):
    write_steps(tmp_path, {1: None, 2: None})
    flip(weights_of(tmp_path / "2"))
    with pytest.raises(CheckpointError, match=r"step 2: state/.*SHA-256 differs"):
        restored(tmp_path, step=2, read_only=True)


@pytest.mark.parametrize("name", ["info.json", "SHA256SUMS", "data/process_0-of-1.json", "state/_METADATA"])
@pytest.mark.parametrize("how", ["missing", "flipped", "empty", "a directory"])
def test_small_files_count_as_much_as_weights(tmp_path, name, how):
    write_steps(tmp_path, {1: 2.0, 2: 1.0})
    path = tmp_path / "2" / name
    if how == "flipped":
        flip(path)
    elif how == "empty":
        path.write_bytes(b"")
    else:
        path.unlink()
        if how == "a directory":
            path.mkdir()
    assert restored(tmp_path)[0] == 1
    assert open_run(tmp_path).best() == (1, 2.0)


def test_sums_cut_off_at_the_end_of_a_line_are_damage(tmp_path):
    write_steps(tmp_path, {1: None, 2: None})
    path = tmp_path / "2" / "SHA256SUMS"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-2]))
    assert restored(tmp_path)[0] == 1


def test_damage_in_an_old_step_is_set_aside_and_does_not_displace_good_ones(tmp_path):
    write_steps(tmp_path, {1: None, 2: None, 3: None})
    (tmp_path / "2" / "info.json").unlink()
    checkpoints = open_run(tmp_path)
    assert checkpoints.steps() == [1, 3]
    checkpoints.restore(target_of(), position_at(0))
    checkpoints.save(4, state_at(4), position_at(4))
    checkpoints.close()
    assert open_run(tmp_path).steps() == [1, 3, 4] and (tmp_path / "2.damaged").is_dir()


def test_without_an_undamaged_step_nothing_is_renamed_and_the_files_are_named(tmp_path):
    write_steps(tmp_path, {1: None, 2: None})
    flip(weights_of(tmp_path / "2"))
    (tmp_path / "1" / "data" / "process_0-of-1.json").unlink()
    for _ in range(2):
        with pytest.raises(CheckpointError) as error:
            restored(tmp_path)
        assert "no checkpoint" in str(error.value) and "data/process_0-of-1.json: is missing" in str(error.value)
        assert "step 2: state/" in str(error.value) and "Fix:" in str(error.value)


def test_a_directory_of_damaged_steps_alone_is_no_fresh_start(tmp_path):
    write_steps(tmp_path, {1: None, 2: None})
    flip(weights_of(tmp_path / "2"))
    restored(tmp_path)
    shutil.rmtree(tmp_path / "1")
    with pytest.raises(CheckpointError, match=r"nothing but damaged checkpoints: 2\.damaged"):
        restored(tmp_path)


@pytest.mark.parametrize(
    "error", [MemoryError("RESOURCE_EXHAUSTED"), OSError(110, "Connection timed out"), ValueError("UNAVAILABLE: stale")]
)
@pytest.mark.parametrize("write", [write_steps, write_steps_without_digests])
def test_an_error_of_the_machine_is_raised_and_no_step_is_given_up(tmp_path, monkeypatch, error, write):
    write(tmp_path, {1: None, 2: None})

    def failing(*args, **kwargs):
        raise error

    monkeypatch.setattr(ocp, "load_checkpointables", failing)
    with pytest.raises(type(error), match=str(error.args[-1])):
        restored(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2"]


def test_a_file_that_may_not_be_read_is_no_damage(tmp_path, monkeypatch):
    write_steps(tmp_path, {1: None, 2: None})

    def refused(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(digests, "file_digest", refused)
    with pytest.raises(PermissionError, match="Permission denied"):
        restored(tmp_path)
    assert (tmp_path / "2").is_dir()


def test_steps_of_versions_without_digests_are_read_with_a_warning(tmp_path, caplog):
    write_steps_without_digests(tmp_path, {1: 2.0, 2: 3.0})
    with caplog.at_level(logging.WARNING, logger="nsa_jax"):
        step, state, following = restored(tmp_path)
    assert step == 2 and following == 2 and same(state, state_at(2))
    assert "has no digests" in caplog.text and open_run(tmp_path).best() == (1, 2.0)
    for path in (tmp_path / "2" / "state").rglob("*"):
        if path.is_file() and path.stat().st_size > 500:
            path.write_bytes(path.read_bytes()[:100])
    assert restored(tmp_path)[0] == 1


@pytest.mark.parametrize("name", ["metrics/metrics", "_CHECKPOINT_METADATA", "data/process_0-of-1.json"])
def test_damaged_small_files_of_earlier_versions_do_not_stop_a_run(tmp_path, name):
    write_steps_without_digests(tmp_path, {1: 2.0, 2: 1.0})
    (tmp_path / "2" / name).write_text('{"val_lo')
    # The validation loss is not needed to continue; without the others it is unknown what the state belongs to.
    assert restored(tmp_path)[0] == (2 if name.startswith("metrics") else 1)
    assert open_run(tmp_path).best() == (1, 2.0)


def test_missing_metadata_never_skips_the_check_that_the_config_fits(tmp_path):
    write_steps_without_digests(tmp_path, {1: None})
    metadata = json.loads((tmp_path / "1" / "_CHECKPOINT_METADATA").read_text())
    metadata["custom_metadata"] = {}
    (tmp_path / "1" / "_CHECKPOINT_METADATA").write_text(json.dumps(metadata))
    with pytest.raises(CheckpointError, match="does not say which parameters"):
        restored(tmp_path)


def unclipped_of_earlier_version(step, config):
    """The state of a version that left clipping out of the optimizer's chain when it was off."""
    state = state_at(step, config)
    return {**state, "opt_state": state["opt_state"][1]}


@pytest.mark.parametrize(("before", "after"), [(1.0, 0.0), (0.0, 1.0), (0.0, 0.0)])
def test_clipping_can_be_changed_between_two_starts(tmp_path, before, after):
    old, new = tiny_config(optim__clip=before), tiny_config(optim__clip=after)
    write_steps(tmp_path / "now", {2: None}, old)
    earlier = {} if before else {"state": unclipped_of_earlier_version}
    write_steps_without_digests(tmp_path / "earlier", {2: None}, old, **earlier)
    for name in ("now", "earlier"):
        step, state, _ = restored(tmp_path / name, new)
        assert step == 2 and same(state, state_at(2, new))


def test_a_run_continues_with_clipping_off_and_on(tmp_path):
    changes = dict(model__attention="dense", model__num_layers=1, train__save_every=1)
    make_run(tmp_path, train__steps=2, **changes).run()
    make_run(tmp_path, train__steps=3, **changes, optim__clip=0.0).run()
    summary = make_run(tmp_path, train__steps=4, **changes, optim__clip=0.5, optim__b1=0.8).run()
    assert summary["start_step"] == 3 and sorted(losses(tmp_path)) == [1, 2, 3, 4]


def test_branching_off_with_another_optimizer_setting_warns_once_with_both_values(tmp_path, caplog):
    write_steps(tmp_path, {1: None})
    with caplog.at_level(logging.WARNING, logger="nsa_jax"):
        restored(tmp_path, tiny_config(optim__learning_rate=1e-4, optim__schedule="linear"), read_only=True)
    (message,) = [record.getMessage() for record in caplog.records]
    assert "config.optim.learning_rate: 0.003 there, 0.0001 now" in message
    assert "config.optim.schedule: 'cosine' there, 'linear' now" in message


def test_an_optimizer_of_another_kind_is_refused_unless_its_loss_is_accepted(tmp_path, monkeypatch):
    write_steps(tmp_path, {2: None})
    monkeypatch.setattr(stored, "make_optimizer", lambda config: optax.sgd(0.1, momentum=0.9))
    with pytest.raises(CheckpointError) as error:
        restored(tmp_path)
    message = str(error.value)
    assert "1/0/mu/blocks/w_in: checkpoint (2, 16, 48) float32, config absent" in message
    assert "config.train.reset_optimizer=True" in message
    made = []

    def fresh(params, step):
        made.append(step)
        return optax.sgd(0.1, momentum=0.9).init(params)

    step, state, following = restored(tmp_path, fresh_optimizer=fresh)
    assert step == following == 2 and made == [2]
    assert same(state["params"], state_at(2)["params"]) and int(state["step"]) == 2


def test_a_fresh_optimizer_keeps_the_place_in_the_schedule(tmp_path):
    run = make_run(tmp_path, model__attention="dense", model__num_layers=1)
    params = run.setup.init()["params"]
    fresh = run.setup.fresh_optimizer(params, 7)
    counts = {type(part).__name__: int(part.count) for part in fresh[1] if "count" in getattr(part, "_fields", ())}
    assert counts == {"ScaleByAdamState": 0, "ScaleByScheduleState": 7}


def test_the_best_validation_is_kept_where_no_save_was_due(tmp_path):
    changes = dict(model__attention="dense", model__num_layers=1, train__steps=12, train__keep_last=1)
    changes |= dict(train__save_every=2, train__eval_every=3, train__eval_batches=1)
    run = make_run(tmp_path / "a", **changes)
    values = {0: 9.0, 3: 4.0, 6: 5.0, 9: 3.0, 12: 6.0}
    run._validate = lambda step, state, writer: setattr(run, "_last_validation", (step, {"val/loss": values[step]}))
    summary = run.run()
    kept = sorted(int(path.name) for path in (tmp_path / "a" / "checkpoints").iterdir())
    assert kept == [9, 12] and summary["best_checkpoint"] == {"step": 9, "val/loss": 3.0}
    again = make_run(tmp_path / "b", resume=f"{tmp_path / 'a'}@9", **{**changes, "train__eval_batches": 0})
    again.run()
    first = losses(tmp_path / "a")
    assert losses(tmp_path / "b") == {step: first[step] for step in (10, 11, 12)}


def test_many_saves_leave_descriptors_and_threads_as_they_were(tmp_path):
    checkpoints = open_run(tmp_path)
    counts = []
    for step in range(1, 13):
        checkpoints.save(step, state_at(1), position_at(1))
        if step % 4 == 0:
            checkpoints.wait()
            counts.append((len(os.listdir("/proc/self/fd")), threading.active_count()))
    checkpoints.close()
    assert counts[0] == counts[1] == counts[2]
    assert open_run(tmp_path).steps() == [10, 11, 12]


def test_multiples_of_keep_every_stay_beside_the_last_and_the_best(tmp_path):
    losses = {step: {3: 1.0}.get(step, 2.0) for step in range(1, 10)}
    write_steps(tmp_path, losses, keep_last=1, keep_every=4)
    assert open_run(tmp_path).steps() == [3, 4, 8, 9]


def test_a_failed_save_counts_as_no_step_and_deletes_none(tmp_path, monkeypatch):
    checkpoints = open_run(tmp_path, keep_last=1)
    checkpoints.save(1, state_at(1), position_at(1))
    checkpoints.wait()

    def full(directory):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(digests, "write", full)
    checkpoints.save(2, state_at(2), position_at(2))
    with pytest.raises(OSError, match="No space left"):
        checkpoints.wait()
    assert checkpoints.steps() == [1]
    checkpoints.close()
    monkeypatch.undo()
    assert restored(tmp_path)[0] == 1 and not list(tmp_path.glob("*.writing"))


def test_loading_names_a_damaged_tokenizer(tmp_path):
    write_run(tmp_path, small_config())
    for path in (tmp_path / "tokenizer").iterdir():
        path.write_text("{")
    with pytest.raises(LoadError, match="its tokenizer cannot be read"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("within", "fix"),
    [("checkpoints", "the run, {}"), ("checkpoints/2", "the run and its step, {}@2"), ("tokenizer", "a run's workdir")],
)
def test_loading_from_within_a_run_names_the_run(tmp_path, within, fix):
    for name in ("checkpoints/2", "tokenizer"):
        (tmp_path / name).mkdir(parents=True)
    with pytest.raises(LoadError) as caught:
        load(tmp_path / within)
    assert f"Fix: give {fix.format(tmp_path)}" in str(caught.value)


def test_loading_falls_back_or_names_the_damage(tmp_path, caplog):
    params = write_run(tmp_path, small_config())
    root = tmp_path / "checkpoints"
    (root / "2" / "data").rename(root / "2" / "gone")
    with caplog.at_level(logging.WARNING, logger="nsa_jax"):
        model, _, _ = load(tmp_path)
    assert np.array_equal(model.embedding[...], params["embedding"])
    assert "skipping checkpoint 2" in caplog.text
    with pytest.raises(LoadError, match=r"@2: damaged, .*data/process_0-of-1.json: is missing.*one of \[1\]"):
        load(f"{tmp_path}@2")
    flip(weights_of(root / "1"))
    with pytest.raises(LoadError, match="restore the damaged files from a copy"):
        load(tmp_path)
    assert parse_resume(str(tmp_path))[0] == root
