"""Faults injected into real (tiny) runs: each is caught by the guard that is named for it, and a healthy run is not."""

import errno
import faulthandler
import json
import os
import re
import resource
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tensorboardX.event_file_writer import EventsWriter

from nsa_jax.config import ConfigError
from nsa_jax.data.batches import TrainIterator
from nsa_jax.exit_status import EXIT_AGAIN
from nsa_jax.ops import nsa
from nsa_jax.stacks import stacks_on_signal
from nsa_jax.train import prepared, run
from nsa_jax.train.checkpoint import Checkpoints
from nsa_jax.train.errors import TrainingError
from nsa_jax.train.loop import Run
from nsa_jax.train.metrics import MetricsWriter, last_rows
from nsa_jax.train.optimizer import schedule_at
from nsa_jax.train.preflight.checks import check_disk
from nsa_jax.train.state import batch_sharding, to_device
from nsa_jax.train.watch.guards import Guards
from nsa_jax.train.watch.watchdog import Watchdog

from .tiny import make_run, one_device, rows, tiny_config

ROOT = Path(__file__).parents[2]
# For faults that no attention has to do with: the step is compiled in half of the time.
SMALL = dict(model__attention="dense", model__num_layers=1)


def stopped(made, guard):
    """Runs until a guard stops the run; returns what stopped.json says."""
    with pytest.raises(TrainingError) as caught:
        made.run()
    assert caught.value.guard == guard
    record = json.loads((made.workdir / "stopped.json").read_text())
    assert record["guard"] == guard and record["message"] == str(caught.value)
    return record


def with_batches(made, change):
    """Makes the loader of a run yield change(step, batch); steps count from 1."""
    original = made.pipeline.train

    class Changed(TrainIterator):
        def __next__(self):
            batch = super().__next__()
            return change(self._step, batch)

    def train(start_step=0):
        iterator = original(start_step)
        iterator.__class__ = Changed
        return iterator

    made.pipeline.train = train
    return made


@pytest.mark.slow
def test_healthy_500_steps_raise_no_alarm(tmp_path):
    """Of those about time, a busy machine raises some rightly; test_guards.py gives them times of its own."""
    config = tiny_config(train__steps=500, train__log_every=10, train__eval_every=100, train__eval_batches=2)
    config.train.save_every = 250
    config.guards.health = True
    summary = run(config, tmp_path, devices=one_device())
    assert summary["finished"] and not (tmp_path / "stopped.json").exists()
    told = tmp_path / "alarms.jsonl"
    alarms = {json.loads(line)["alarm"] for line in told.read_text().splitlines()} if told.exists() else set()
    assert alarms == set(summary["alarms"]) and alarms <= {"throughput", "data_wait"}
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    last = [row for row in rows if "train/loss" in row][-1]
    assert last["health/keys_counted"] == last["health/keys_predicted"] > 0
    assert last["alarm/total"] == sum(summary["alarms"].values())
    health = [json.loads(line) for line in (tmp_path / "health.jsonl").read_text().splitlines()]
    assert len(health) == 50 and len(health[0]["gate_entropy"]) == config.model.num_layers
    preflight = json.loads((tmp_path / "env.json").read_text())["preflight"]
    assert preflight["ignored"] == [] and preflight["bigram_entropy"] > 1
    beats = [json.loads(line) for line in (tmp_path / "heartbeat_0.jsonl").read_text().splitlines()]
    assert beats[-1]["event"] == "stopped" and beats[-1]["step"] == 500
    assert beats[-1]["host_mib"] == pytest.approx(beats[-1]["host_gib"] * 1024, rel=0.01)


def test_unshifted_labels_stop_at_the_loss_floor(tmp_path):
    made = make_run(tmp_path, **SMALL, train__steps=300, data__synthetic="random", train__save_every=1000)
    made.guards = Guards(made.config, tmp_path, bigram_entropy=float(np.log(32)))
    with_batches(made, lambda step, batch: {**batch, "targets": batch["inputs"]})
    record = stopped(made, "loss_floor")
    assert record["step"] <= 150 and "not shifted" in record["message"]
    assert max(rows(tmp_path)) == record["step"]
    assert record["last_checkpoint"] is not None  # the state is kept for looking at


def test_nan_at_a_step_keeps_the_last_good_checkpoint_and_the_batch(tmp_path):
    made = make_run(tmp_path, **SMALL, train__steps=12, train__save_every=5)
    step_function, count = made.train_step, iter(range(1, 100))

    def poisoned(state, batch):
        if next(count) == 8:
            state = {**state, "params": jax.tree.map(lambda p: p * jnp.nan, state["params"])}
        return step_function(state, batch)

    made.train_step = poisoned
    record = stopped(made, "non_finite")
    assert (record["step"], record["last_checkpoint"]) == (8, 5)
    last = rows(tmp_path)
    assert max(last) == 8 and last[8]["train/loss"] is None and last[8]["learning_rate"] > 0
    with np.load(tmp_path / "bad_step_8.npz") as kept:
        expected = next(made.pipeline.train(7))
        np.testing.assert_array_equal(kept["batch/inputs"], expected["inputs"])
        assert np.isnan(kept["metrics/loss"]).any()
    resumed = make_run(tmp_path, **SMALL, train__steps=12, train__save_every=5).run()
    assert resumed["start_step"] == 5 and resumed["finished"]


def test_a_step_that_is_not_finite_can_be_left_out(tmp_path):
    """The run goes on as one that was never trained on that batch, with the same later batches and learning rates."""
    settings = dict(**SMALL, train__steps=6, train__save_every=100, guards__skip_steps=1)
    made = make_run(tmp_path / "skipped", **settings)
    with_batches(made, lambda step, batch: {**batch, "loss_mask": batch["loss_mask"] * (np.nan if step == 3 else 1)})
    made.run()
    found = rows(tmp_path / "skipped")
    assert [step for step, row in found.items() if row["train/loss"] is None] == [3]  # null: not finite
    alarms = json.loads((tmp_path / "skipped" / "summary.json").read_text())["alarms"]
    assert alarms["skipped"] == 1, alarms

    made = make_run(tmp_path / "without", **settings)
    state, pipeline = made.setup.init(), made.pipeline.train()
    losses, rates = {}, {}
    with jax.set_mesh(made.setup.mesh):
        for step in range(1, 7):
            batch = to_device(next(pipeline), batch_sharding(made.setup.mesh))
            if step == 3:
                state = {
                    **state, "step": state["step"] + 1, "opt_state": schedule_at(state["step"] + 1, state["opt_state"]),
                }  # fmt: skip
                continue
            state, metrics = made.train_step(state, batch)
            losses[step], rates[step] = float(metrics["loss"]), float(metrics["learning_rate"])
    for step, loss in losses.items():
        assert found[step]["train/loss"] == loss and found[step]["learning_rate"] == rates[step]


def test_a_loader_that_stands_still_is_caught_at_the_second_batch(tmp_path):
    made = make_run(tmp_path, **SMALL, train__steps=12)
    first = next(made.pipeline.train())
    record = stopped(with_batches(made, lambda step, batch: first), "frozen_loader")
    assert record["step"] == 2 and "stands still" in record["message"]


def test_a_batch_of_another_dtype_is_a_recompilation(tmp_path):
    made = make_run(tmp_path, **SMALL, train__steps=12)

    def widen(step, batch):
        return {**batch, "loss_mask": batch["loss_mask"].astype(np.float32 if step < 5 else np.float16)}

    compiled, made.train_step = made.train_step, None
    versions = []

    class Counting:
        def __call__(self, state, batch):
            versions.append(batch["loss_mask"].dtype.name)
            return compiled(state, {**batch, "loss_mask": batch["loss_mask"].astype(jnp.float32)})

        def _cache_size(self):
            return len(set(versions))

    made.train_step = Counting()
    record = stopped(with_batches(made, widen), "recompilation")
    assert record["step"] <= 7 and "compiled again" in record["message"]


def test_wrong_block_lists_are_counted(tmp_path, monkeypatch):
    real = nsa.select_blocks

    def short(*args, **kwargs):
        lists = real(*args, **kwargs)
        return jnp.where(jnp.arange(lists.shape[-1]) == 1, lists[..., :1], lists)  # one block read twice

    made = make_run(tmp_path, guards__health=True, train__steps=12)
    monkeypatch.setattr(nsa, "select_blocks", short)
    record = stopped(made, "key_count")
    assert record["step"] == 1 and "block lists are wrong" in record["message"]


def test_collapsed_gates_raise_alarms(tmp_path, capsys):
    made = make_run(tmp_path, guards__health=True, train__steps=12)
    init = made.setup.init

    def collapsed():
        state = init()
        bias = state["params"]["blocks"]["attention"]["gate_bias"]
        state["params"]["blocks"]["attention"]["gate_bias"] = bias + jnp.asarray([-9.0, 9.0, -9.0])
        return state

    object.__setattr__(made.setup, "init", collapsed)
    summary = made.run()
    assert set(summary["alarms"]) == {"gate_entropy", "gate_share", "gate_collapse"}
    assert re.search(r"ALARM gate_share at step 1: layer \d: the selected branch has", capsys.readouterr().out)
    lines = [json.loads(line) for line in (tmp_path / "alarms.jsonl").read_text().splitlines()]
    assert {line["alarm"] for line in lines} == set(summary["alarms"])
    first = rows(tmp_path)[1]
    assert first["alarm/gate_share"] == first["alarm/gate_collapse"] == 1 and first["alarm/total"] == 3


def test_memorisation_shows_as_a_gap_and_stops(tmp_path):
    made = make_run(
        tmp_path, **SMALL, train__steps=300, train__eval_every=20, train__eval_batches=2, data__synthetic="random"
    )
    made.config.guards.max_gap = 0.5
    batches = [next(made.pipeline.train(step)) for step in range(300, 304)]
    made.guards.on_batch = lambda *_: None  # four batches over and over
    record = stopped(with_batches(made, lambda step, batch: batches[step % 4]), "generalisation_gap")
    assert record["step"] <= 300 and "memorises" in record["message"]
    # The curves show what the guard saw, and a start that goes on knows of it.
    step, row = last_rows(tmp_path, 300)[1]
    assert step == record["step"] and f"validation loss {row['val/loss']:.3f}" in record["message"]


def test_a_learning_rate_of_ten_is_divergence(tmp_path):
    made = make_run(
        tmp_path, **SMALL, train__steps=300, train__eval_every=20, train__eval_batches=2, optim__learning_rate=10.0
    )
    record = stopped(made, "divergence")
    assert record["step"] <= 60 and "learning_rate=10" in record["message"]
    assert record["message"].endswith("there is no checkpoint")


@pytest.mark.parametrize("place", ["metrics", "board", "summary", "checkpoint", "background", "tokens"])
def test_a_full_disk_is_explained_wherever_it_is_met(place, tmp_path, monkeypatch):
    full = OSError(errno.ENOSPC, "No space left on device")

    def fail(*_, **__):
        raise full

    def fail_otherwise(*_, **__):  # as libraries do, which keep the text alone
        raise ValueError(f"INTERNAL: write failed: {full.strerror}")

    workdir = tmp_path / "run"
    patched = {
        "metrics": (MetricsWriter, "write", fail),
        "board": (EventsWriter, "write_event", fail),
        "summary": (Run, "_summarise", fail),
        "checkpoint": (Checkpoints, "save", fail_otherwise),
        "background": (Checkpoints, "wait", fail_otherwise),
        "tokens": (prepared, "make_pipeline", fail),
    }
    config = tiny_config(**SMALL, train__save_every=3, train__steps=6, preflight__selftest=False)
    with monkeypatch.context() as patch:
        patch.setattr(*patched[place])
        with pytest.raises(TrainingError, match=r"^the disk of .* is full: .* Fix: free some space .*") as caught:
            run(config, workdir, devices=one_device())
    assert caught.value.guard == "disk_full" and "\n" not in str(caught.value)
    if place != "tokens":
        record = json.loads((workdir / "stopped.json").read_text())
        assert record["guard"] == "disk_full" and record["message"] == str(caught.value)
    assert run(config, workdir, devices=one_device())["finished"] and not (workdir / "lock.json").exists()


def test_a_full_disk_stops_before_the_checkpoint(tmp_path, monkeypatch):
    made = make_run(tmp_path, **SMALL, train__save_every=3, train__steps=12)
    monkeypatch.setattr("shutil.disk_usage", lambda path: Disk(1000, 990, 10))
    record = stopped(made, "disk_full")
    assert record["last_checkpoint"] is None and "free some space" in record["message"]


def test_checkpoints_that_are_a_link_to_another_disk_need_room_there(tmp_path, monkeypatch):
    (tmp_path / "run").mkdir()
    (tmp_path / "large").mkdir()
    (tmp_path / "run" / "checkpoints").symlink_to(tmp_path / "large")
    full = ["run"]

    def usage(path):
        return Disk(1 << 40, 0, 10 if Path(path).resolve().name in full else 1 << 40)

    monkeypatch.setattr("shutil.disk_usage", usage)
    made = make_run(tmp_path / "run", **SMALL, train__save_every=3, train__steps=3)
    assert check_disk(made.config, made.workdir, 1000) == [] and made.run()["saved"]
    full[:] = ["large"]
    (problem,) = check_disk(made.config, made.workdir, 10**9)
    assert problem.rule == "R024"
    made = make_run(tmp_path / "run", **SMALL, train__save_every=3, train__steps=6)
    assert stopped(made, "disk_full")["last_checkpoint"] == 3


class Disk:
    def __init__(self, total, used, free):
        self.total, self.used, self.free = total, used, free


def test_a_failing_write_is_explained_and_older_checkpoints_survive(tmp_path):
    made = make_run(tmp_path, **SMALL, train__save_every=3, train__steps=12)
    save, limits = made._save, resource.getrlimit(resource.RLIMIT_FSIZE)

    def failing(checkpoints, step, state, data):
        if step == 6:
            checkpoints.wait()
            resource.setrlimit(resource.RLIMIT_FSIZE, (16_000, limits[1]))  # files cannot grow beyond
        save(checkpoints, step, state, data)

    made._save = failing
    try:
        with pytest.raises(TrainingError) as caught:
            made.run()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert caught.value.guard == "checkpoint_write" and "look at the disk" in str(caught.value)
    resumed = make_run(tmp_path, **SMALL, train__save_every=3, train__steps=12).run()
    assert resumed["start_step"] == 3 and resumed["finished"]


def test_steps_and_validations_that_finish_are_no_stall(tmp_path, monkeypatch):
    """Nothing is logged or saved for longer than a step, or a batch of validation, may take."""
    told = []
    real = Watchdog.write
    monkeypatch.setattr(Watchdog, "write", lambda self, event: (told.append(event), real(self, event))[1])

    class Slowly:
        def __init__(self, function):
            self.function = function

        def __call__(self, *arguments):
            result = jax.block_until_ready(self.function(*arguments))
            time.sleep(0.4)
            return result

        def __getattr__(self, name):
            return getattr(self.function, name)

    changes = dict(train__steps=12, train__log_every=6, train__eval_every=12, train__eval_batches=12)
    made = make_run(tmp_path, model__attention="dense", guards__stall_seconds=1.0, **changes)
    made.train_step, made.eval_step = Slowly(made.train_step), Slowly(made.eval_step)
    assert made.run()["finished"]
    assert "stalled" not in told and told[-1] == "stopped"


def test_a_loader_that_hangs_before_the_first_report_is_a_stall(tmp_path, monkeypatch):
    """Until the second interval had been logged it had an hour, as if the step were still being compiled."""
    told = []
    real = Watchdog.write
    monkeypatch.setattr(Watchdog, "write", lambda self, event: (told.append(event), real(self, event))[1])
    made = make_run(tmp_path, **SMALL, guards__stall_seconds=1.0, train__steps=4, train__log_every=10)

    def hangs(step, batch):
        if step == 3:
            time.sleep(2.5)
        return batch

    assert with_batches(made, hangs).run()["finished"]
    assert told.count("stalled") == 1


def test_compiling_for_the_next_batch_of_a_ramp_is_no_stall(tmp_path, monkeypatch):
    told = []
    real = Watchdog.write
    monkeypatch.setattr(Watchdog, "write", lambda self, event: (told.append(event), real(self, event))[1])
    ramp = dict(train__batch_ramp=("2:4",), train__grad_accum=2, train__steps=4, model__attention="dense")
    made = make_run(tmp_path, guards__stall_seconds=1.0, **ramp)
    wait = made._compiling.wait

    def slowly(*names):
        if "train step" in names:
            time.sleep(2.5)
        wait(*names)

    monkeypatch.setattr(made._compiling, "wait", slowly)
    assert made.run()["finished"]
    assert "stalled" not in told and told[-1] == "stopped"


def test_a_run_ends_well_whose_empty_files_were_cleared_away(tmp_path):
    with Watchdog(tmp_path):
        (tmp_path / "stacks_0.txt").unlink()
    assert [path.name for path in tmp_path.iterdir()] == ["heartbeat_0.jsonl"]


def test_sigusr1_writes_stacks_before_and_after_a_run_as_well(tmp_path):
    """It killed a process that had not begun to train."""
    with (tmp_path / "all").open("a+") as file:
        with stacks_on_signal(file):
            os.kill(os.getpid(), signal.SIGUSR1)
            with Watchdog(tmp_path):
                os.kill(os.getpid(), signal.SIGUSR1)
                time.sleep(0.1)
            os.kill(os.getpid(), signal.SIGUSR1)
            time.sleep(0.1)
    assert not faulthandler.unregister(signal.SIGUSR1)  # nothing is left behind
    this = "in test_sigusr1_writes_stacks"
    assert (tmp_path / "all").read_text().count(this) == 2 and (tmp_path / "stacks_0.txt").read_text().count(this) == 1


def test_a_stalled_loader_is_reported_with_all_stacks(tmp_path):
    def stall_here():  # on a busy machine the watchdog waits, too
        end, written = (
            time.monotonic() + 60,
            tmp_path / "heartbeat_0.jsonl",
        )
        while not (written.exists() and "stalled" in written.read_text()) and time.monotonic() < end:
            time.sleep(0.1)

    with Watchdog(tmp_path, stall_seconds=0.4, heartbeat_seconds=0.1) as watchdog:
        watchdog.beat(7)
        stall_here()
        watchdog.beat(8)
        os.kill(os.getpid(), signal.SIGUSR1)  # the same on demand
        time.sleep(0.1)
    text = (tmp_path / "stacks_0.txt").read_text()
    assert "after step 7" in text and text.count("stall_here") >= 1
    assert text.count("test_a_stalled_loader") >= 2
    events = [json.loads(line)["event"] for line in (tmp_path / "heartbeat_0.jsonl").read_text().splitlines()]
    assert "stalled" in events and events[-1] == "stopped"


def _python(code, *args, timeout=120):
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, args)],
        cwd=ROOT,
        env={
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "PYTHONPATH": str(ROOT),
            "JAX_COMPILATION_CACHE_DIR": jax.config.jax_compilation_cache_dir,
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.5",
            "JAX_DISABLE_MOST_OPTIMIZATIONS": "True",
        },
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def test_a_stalled_process_can_be_ended_for_a_supervisor(tmp_path):
    done = _python(
        """
        import sys, time
        from pathlib import Path
        from nsa_jax.train.watch.watchdog import Watchdog
        with Watchdog(Path(sys.argv[1]), stall_seconds=0.3, heartbeat_seconds=0.1, exit_on_stall=True) as watchdog:
            watchdog.beat(3)
            time.sleep(60)
        """,
        tmp_path,
    )
    assert done.returncode == EXIT_AGAIN, done.stderr
    assert "after step 3" in (tmp_path / "stacks_0.txt").read_text()


def test_a_process_killed_during_a_save_resumes(tmp_path):
    done = _python(
        """
        import os, signal, sys
        from tests.train.test_faults_in_runs import SMALL, make_run
        made = make_run(sys.argv[1], **SMALL, train__steps=12, train__save_every=3)
        save = made._save
        def killed(checkpoints, step, state, data):
            save(checkpoints, step, state, data)
            if step == 9:
                os.kill(os.getpid(), signal.SIGKILL)
        made._save = killed
        made.run()
        """,
        tmp_path,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    resumed = make_run(tmp_path, **SMALL, train__steps=12, train__save_every=3).run()
    assert resumed["start_step"] in (6, 9) and resumed["finished"]


def test_a_run_refuses_to_start_when_the_model_sees_the_future(tmp_path, monkeypatch):
    real = nsa.window_attention
    monkeypatch.setattr(nsa, "window_attention", lambda *a, **k: jnp.roll(real(*a, **k), -1, axis=1))
    with pytest.raises(ConfigError) as caught:
        run(tiny_config(), tmp_path, devices=one_device())
    assert {problem.rule for problem in caught.value.problems} >= {"R040"}
    assert "through the window branch" in str(caught.value)
    assert not (tmp_path / "metrics.jsonl").exists()
