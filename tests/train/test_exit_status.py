"""What a supervisor is told: exit statuses of real processes, and that a run started again after them goes on."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import pytest

from nsa_jax import trainer
from nsa_jax.exit_status import EXIT_AGAIN, EXIT_GUARD, EXIT_TERMINATED
from nsa_jax.train import TrainingError

from .tiny import tiny_config

ROOT = Path(__file__).parents[2]
FLAGS = ["data.source=synthetic", "model.attention=dense", "train.eval_every=0", "train.eval_batches=0"]
FLAGS += ["train.sample_tokens=0", "guards.health=False", "train.save_every=1000", "train.log_every=1"]


def start(workdir: Path, *flags: str) -> subprocess.Popen:
    """train.py on a tiny model."""
    command = [sys.executable, "train.py", "--config=tests/train/distributed_config.py", f"--workdir={workdir}"]
    command += [f"--config.{flag}" for flag in (*FLAGS, *flags)]
    env = {
        **os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), "JAX_DISABLE_MOST_OPTIMIZATIONS": "True",
        "JAX_COMPILATION_CACHE_DIR": str(jax.config.jax_compilation_cache_dir),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }  # fmt: skip
    workdir.mkdir(exist_ok=True)
    with (workdir / "out.txt").open("a") as out:
        return subprocess.Popen(command, cwd=ROOT, env=env, stdout=out, stderr=out)


def status(process: subprocess.Popen, workdir: Path, ask: signal.Signals | None = None) -> int:
    """Waits for the end; asks for it when five steps are logged, with a signal or, without one, by HALT."""
    end = time.monotonic() + 240
    metrics = workdir / "metrics.jsonl"
    while process.poll() is None and not (metrics.exists() and metrics.read_text().count("\n") >= 5):
        assert time.monotonic() < end, (workdir / "out.txt").read_text()
        time.sleep(0.05)
    if ask is not None:
        process.send_signal(ask)
    return process.wait(240)


def test_sigterm_asks_for_another_start_which_goes_on_and_ends_with_0(tmp_path):
    assert status(start(tmp_path, "train.steps=4000"), tmp_path, signal.SIGTERM) == EXIT_AGAIN == 75
    summary = json.loads((tmp_path / "summary.json").read_text())
    saved = summary["step"]
    assert (summary["stopped_by"], summary["saved"], summary["terminated"]) == ("SIGTERM", True, True)
    assert (tmp_path / "checkpoints" / str(saved)).is_dir()
    assert status(start(tmp_path, f"train.steps={saved + 2}"), tmp_path) == 0, (tmp_path / "out.txt").read_text()
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["start_step"], summary["step"], summary["terminated"]) == (saved, saved + 2, False)


@pytest.mark.parametrize(
    ("flags", "ask", "expected"),
    [
        pytest.param(["train.save_every=0"], signal.SIGTERM, EXIT_TERMINATED, marks=pytest.mark.slow),
        ([], signal.SIGINT, 0),
        (["optim.learning_rate=1e30", "optim.warmup_steps=0"], None, EXIT_GUARD),
    ],
    ids=["unsaved", "a person", "guard"],
)
def test_statuses(tmp_path, flags, ask, expected):
    run = start(tmp_path, "train.steps=4000", "train.keep_best=False", *flags)
    assert status(run, tmp_path, ask) == expected, (tmp_path / "out.txt").read_text()
    assert (tmp_path / "stopped.json").exists() == (expected == EXIT_GUARD)


@pytest.mark.parametrize(("guard", "expected"), [("upload", EXIT_AGAIN), ("divergence", EXIT_GUARD)])
def test_an_object_store_that_does_not_answer_asks_for_another_start(monkeypatch, tmp_path, guard, expected):
    def stopped(*args, **keywords):
        raise TrainingError("the store does not answer", guard=guard)

    monkeypatch.setattr("nsa_jax.train.run", stopped)
    assert trainer.train(tiny_config(), str(tmp_path)) == (expected, "the store does not answer")
