"""Two processes of two devices each, over gloo, with the real train.py: the same losses as one process and one device.

One story, since starting processes is slow: a run of two processes loses process 0; another, which continues a run of a
single process, loses process 1, is started again and is asked to stop; a single process continues the first.
"""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from nsa_jax.exit_status import EXIT_AGAIN, EXIT_GUARD
from nsa_jax.train.loop import Run

from .distributed_config import get_config
from .tiny import losses, one_device

ROOT = Path(__file__).parents[2]
LAST = 20  # steps of the run to compare with


# What the first run shows is left out of the others: it is compiled for nothing.
QUICK = ["--config.guards.health=False", "--config.train.sample_tokens=0", "--config.train.eval_batches=0"]
QUICK += ["--config.train.eval_every=0"]


class Processes:
    """Processes of one run, and what they print; on the CPU, or with a GPU each."""

    def __init__(
        self,
        workdir: Path,
        *flags: str,
        count: int = 2,
        own: dict[int, str] | None = None,
        gpus: bool = False,
        config: str = "distributed_config",
    ):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        env = {
            **os.environ,
            "JAX_PLATFORMS": "cuda,cpu" if gpus else "cpu",
            "XLA_FLAGS": "" if gpus else re.sub(r"(device_count=)\d+", r"\g<1>2", os.environ["XLA_FLAGS"]),
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",  # the tests' own process holds memory of the same GPUs
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
            "JAX_COMPILATION_CACHE_DIR": jax.config.jax_compilation_cache_dir,
            "JAX_DISABLE_MOST_OPTIMIZATIONS": str(not gpus),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }
        self.workdir = workdir
        self.outputs = [workdir.with_name(f"{workdir.name}_{index}.txt") for index in range(count)]
        self.all = []
        for index, output in enumerate(self.outputs):
            command = [sys.executable, "train.py", f"--config=tests/train/{config}.py", f"--workdir={workdir}"]
            command += [f"--coordinator=127.0.0.1:{port}", f"--num_processes={count}", f"--process_id={index}", *flags]
            command += [own[index]] if own and index in own else []
            mine = env | {"CUDA_VISIBLE_DEVICES": str(index)} if gpus else env
            with output.open("w") as file:
                self.all.append(subprocess.Popen(command, cwd=ROOT, env=mine, stdout=file, stderr=subprocess.STDOUT))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.all:
            process.kill()
            process.wait()

    def text(self, index: int) -> str:
        return self.outputs[index].read_text()

    def until(self, path: Path, seconds: float = 240.0) -> None:
        """Waits for a file of the run."""
        end = time.monotonic() + seconds
        while not path.exists():
            ended = [index for index, process in enumerate(self.all) if process.poll() is not None]
            assert not ended and time.monotonic() < end, f"no {path}; {ended} ended:\n" + self.text((*ended, 0)[0])
            time.sleep(0.1)

    def wait(self, index: int, seconds: float = 240.0) -> int:
        return self.all[index].wait(timeout=seconds)


def config_flags(root: Path) -> list[str]:
    return [f"--config.data.files=('{root}/text/*.txt',)", f"--config.data.cache_dir={root / 'cache'}"]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    root = tmp_path_factory.mktemp("corpus")
    rng = np.random.default_rng(0)
    (root / "text").mkdir()
    for index in range(60):
        (root / "text" / f"{index}.txt").write_text("".join(rng.choice(list("abcdefgh "), 300)))
    return root


def run_alone(corpus: Path, workdir: Path, steps: int, resume: str | None = None) -> dict:
    """The same run in this process, on one device."""
    config = get_config().copy_and_resolve_references()
    with config.unlocked():
        config.data.files, config.data.cache_dir = (f"{corpus}/text/*.txt",), str(corpus / "cache_alone")
        config.train.steps = steps
    return Run(config, workdir, resume, one_device()).run()


@pytest.fixture(scope="module")
def alone(corpus):
    """Losses of one process with one device."""
    run_alone(corpus, corpus / "alone", LAST)
    return losses(corpus / "alone")


@pytest.fixture(scope="module")
def first_lost(corpus, alone):
    """A run of two processes whose process 0 is killed after step 8: workdir, and what process 1 said and returned."""
    flags = ["--config.train.steps=4000", "--config.mesh.fsdp=4", *config_flags(corpus)]
    with Processes(corpus / "two", *flags) as run:
        run.until(run.workdir / "checkpoints" / "8")
        run.all[0].send_signal(signal.SIGKILL)
        start = time.monotonic()
        status = run.wait(1)
        return run.workdir, run.text(0), run.text(1), status, time.monotonic() - start


def same(got: dict[int, float], want: dict[int, float], atol: float = 1e-5) -> list[int]:
    """Checks that the losses of the steps in both are equal within `atol`; returns these steps."""
    steps = sorted(got.keys() & want.keys())
    np.testing.assert_allclose([got[step] for step in steps], [want[step] for step in steps], rtol=0, atol=atol)
    return steps


def test_two_processes_have_the_losses_of_one(first_lost, alone):
    workdir, first, second, _, _ = first_lost
    assert same(losses(workdir), alone)[:8] == list(range(1, 9))
    rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "train/loss" in row].count(5) == 1
    want = [json.loads(line) for line in (workdir.parent / "alone" / "metrics.jsonl").read_text().splitlines()]
    for name in ("val/loss", "health/keys_counted"):
        pairs = [
            (row[name], w[name]) for row in rows for w in want if row["step"] == w["step"] and name in row and name in w
        ]
        assert len(pairs) >= 3
        np.testing.assert_allclose(*zip(*pairs, strict=True), rtol=1e-5)
    for name, field in (("layers", "gradients_norm"), ("validation", "position")):
        found, wanted = (
            {row["step"]: row for row in map(json.loads, (path / f"{name}.jsonl").read_text().splitlines())}
            for path in (workdir, workdir.parent / "alone")
        )
        assert len(found.keys() & wanted.keys()) >= 3
        for step in found.keys() & wanted.keys():
            got, want_here = found[step][field], wanted[step][field]
            if name == "validation":
                assert found[step]["selection"]["text"] == wanted[step]["selection"]["text"]
                got, want_here = ([part["loss"] for part in parts] for parts in (got, want_here))
            np.testing.assert_allclose(got, want_here, rtol=1e-3)
    env = json.loads((workdir / "env.json").read_text())
    assert env["processes"] == 2 and env["mesh"]["fsdp"] == 4 and len(env["hosts"]) == 2


def test_process_0_writes_and_the_data_is_prepared_once_and_each_has_a_heartbeat(first_lost, corpus):
    workdir, first, second, _, _ = first_lost
    for index in (0, 1):
        beats = [json.loads(line) for line in (workdir / f"heartbeat_{index}.jsonl").read_text().splitlines()]
        assert beats[0]["event"] == "alive" and len(beats) >= 2
    assert "tokenised" not in second
    (prepared,) = (path for path in (corpus / "cache").iterdir() if path.suffix != ".lock")
    assert (prepared / "meta.json").exists()
    assert first.count(": sample") >= 3 and len((workdir / "samples.jsonl").read_text().splitlines()) >= 3
    assert "step 5/" in first and "step 5/" not in second and "preflight passed" not in second


def test_a_lost_process_0_is_named_and_ends_the_other(first_lost):
    workdir, _, second, status, seconds = first_lost
    assert status == EXIT_AGAIN and seconds < 120, second
    assert re.search(r"ALARM peer: process 0 \(host \S+, pid \d+\) is gone", second)
    stopped = json.loads((workdir / "stopped.json").read_text())
    assert stopped["guard"] == "peer" and stopped["last_checkpoint"] >= 8 and "process 0" in stopped["message"]


def test_saved_by_two_processes_resumed_by_one(first_lost, alone, corpus):
    workdir = corpus / "continued_alone"
    summary = run_alone(corpus, workdir, 12, resume=f"{first_lost[0]}@4")
    assert summary["start_step"] == 4
    assert same(losses(workdir), alone) == list(range(5, 13))


def last_saved(workdir: Path) -> int:
    return max(int(path.name) for path in (workdir / "checkpoints").iterdir() if path.name.isdigit())


def check_resumes_and_stops(workdir: Path, flags: list[str], gpus: bool = False) -> None:
    """Two processes go on where the run was saved, until process 1 is asked to stop: both do, in good order."""
    saved = last_saved(workdir)
    with Processes(workdir, *flags, gpus=gpus) as run:
        run.until(workdir / "checkpoints" / str(saved + 4))
        run.all[1].send_signal(signal.SIGTERM)
        assert (run.wait(0), run.wait(1)) == (EXIT_AGAIN, EXIT_AGAIN), run.text(0) + run.text(1)
    summary = json.loads((workdir / "summary.json").read_text())
    assert summary["stopped_by"] == "process 1" and summary["start_step"] == saved
    assert (workdir / "checkpoints" / str(summary["step"])).is_dir()
    assert max(losses(workdir)) == summary["step"]


@pytest.mark.slow
def test_saved_by_one_resumed_by_two_lost_and_stopped(alone, corpus):
    workdir = corpus / "continued"
    flags = [
        f"--resume={corpus / 'alone'}@4",
        "--config.train.steps=4000",
        "--config.mesh.fsdp=2",
        *config_flags(corpus),
    ]
    flags += QUICK
    with Processes(workdir, *flags) as run:
        run.until(workdir / "checkpoints" / "12")
        run.all[1].send_signal(signal.SIGKILL)
        status, text = run.wait(0), run.text(0)
    assert status == EXIT_AGAIN, text
    assert re.search(
        r"ALARM peer: process 1 \(host \S+, pid \d+\) is gone: no sign of life for \d+ s, last after", text
    ), text
    assert "start the run again" in text
    assert same(losses(workdir), alone)[:8] == list(range(5, 13))
    saved = last_saved(workdir)
    assert saved >= 12

    shutil.rmtree(workdir / "checkpoints" / str(saved)) if saved > 12 else None
    check_resumes_and_stops(workdir, flags)
    assert len(same(losses(workdir), alone)) >= 12


@pytest.mark.slow
def test_processes_started_differently_refuse_to_run(corpus):
    with Processes(corpus / "different", *config_flags(corpus), own={1: "--config.seed=3"}) as run:
        assert run.wait(1) == 2 and run.wait(0) in (2, EXIT_AGAIN)
        assert "R050 error: the run of process 1" in run.text(1) and "config.seed: 3 here, 0 there" in run.text(1)
        assert re.search(r"process 1 \(host \S+, pid \d+\) failed: .*config.seed: 3 here", run.text(0), re.DOTALL)
    assert not (corpus / "different" / "metrics.jsonl").exists()


@pytest.mark.slow
@pytest.mark.parametrize("who", ["all", "first"])
def test_an_error_ends_all_processes_and_costs_no_checkpoint(who, corpus, monkeypatch):
    """Met by all, it is told as it is, and process 0 completes what was saved. Met by one, it waits for nobody."""
    monkeypatch.setenv("ENDING", who)
    flags = ["--config.train.steps=4000", "--config.train.save_every=2000", "--config.mesh.fsdp=4", *QUICK]
    with Processes(corpus / f"ending_{who}", *flags, *config_flags(corpus), config="ending_config") as run:
        statuses = [run.wait(index) for index in (0, 1)]
        stopped = json.loads((run.workdir / "stopped.json").read_text())
        assert stopped["step"] == 6, run.text(0)
        if who == "all":
            assert statuses == [EXIT_GUARD, EXIT_GUARD] and stopped["guard"] == "loss_floor"
            saved = stopped["last_checkpoint"]
            assert saved >= 6 and (run.workdir / "checkpoints" / str(saved) / "SHA256SUMS").exists()
        else:
            assert statuses == [EXIT_GUARD, EXIT_GUARD] and stopped["guard"] == "callback"
            assert stopped["last_checkpoint"] is None


@pytest.mark.gpu
@pytest.mark.skipif(len(jax.devices()) < 2, reason="needs two GPUs")
def test_two_gpus_over_nccl_lost_resumed_and_stopped(corpus):
    """The kernels, parameters split over two processes: a killed one ends the other, which waits in a collective."""
    flags = ["--config.train.steps=4000", "--config.model.implementation=pallas", "--config.model.head_dim=16"]
    flags += [*config_flags(corpus), *QUICK]
    with Processes(corpus / "one_gpu", *flags, "--config.mesh.fsdp=1", count=1, gpus=True) as run:
        run.until(run.workdir / "checkpoints" / "16")
        run.all[0].send_signal(signal.SIGTERM)
        assert run.wait(0) == EXIT_AGAIN, run.text(0)
    alone = losses(corpus / "one_gpu")

    workdir = corpus / "two_gpus"
    flags.append("--config.mesh.fsdp=2")
    with Processes(workdir, *flags, gpus=True) as run:
        run.until(workdir / "checkpoints" / "8")
        run.all[1].send_signal(signal.SIGKILL)
        start = time.monotonic()
        status, text = run.wait(0), run.text(0)
    assert status == EXIT_AGAIN and time.monotonic() - start < 60, text
    assert re.search(r"ALARM peer: process 1 \(host \S+, pid \d+\) is gone", text), text
    assert same(losses(workdir), alone, 1e-4)[:8] == list(range(1, 9))
    env = json.loads((workdir / "env.json").read_text())
    assert env["processes"] == 2 and env["mesh"]["fsdp"] == 2
    check_resumes_and_stops(workdir, flags, gpus=True)
