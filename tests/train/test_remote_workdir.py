"""Runs whose workdir is in an object store, against a local S3 server: what is copied, fetched, refused and retried.

Most tests make checkpoints of two small files, since what they hold is of no interest to the copies. One run is killed
and resumed, and one trains with two processes.
"""

import json
import os
import shutil
import subprocess
import sys
import threading
import time
import types

import jax
import numpy as np
import pytest
from flax import nnx

import nsa_jax
from nsa_jax.command_line import workdir_problems
from nsa_jax.config import ConfigError
from nsa_jax.hub import digests, remote_run
from nsa_jax.hub.checkpoint_files import find_steps
from nsa_jax.hub.export_files import LoadError
from nsa_jax.object_store import Folder, StoreError
from nsa_jax.report import __main__ as report
from nsa_jax.train import CheckpointError, TrainingError, WorkdirInUse, lock, mirror, run
from nsa_jax.train.checkpoint import parse_resume
from nsa_jax.train.mirror import local_directory, mirroring
from nsa_jax.train.rollback import Rollbacks
from tests.s3 import bucket, s3, s3fs  # noqa: F401

from . import remote_run as killed
from .test_distributed import QUICK, ROOT, Processes
from .tiny import losses, one_device, tiny_config


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """No waiting: an upload begins at once, and packages try again twice instead of for many seconds."""
    monkeypatch.setattr(mirror, "_POLL_SECONDS", 0.05)
    monkeypatch.setattr(mirror, "_BEAT_SECONDS", 0.1)
    monkeypatch.setattr(mirror, "_SILENT_SECONDS", 0.6)
    monkeypatch.setattr(mirror, "_SETTLE_SECONDS", 0.0)
    monkeypatch.setattr(mirror, "_RETRY_SECONDS", 0.1)
    monkeypatch.setattr(mirror, "_LAST_SECONDS", 0.0)
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "2")
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 2)
    s3fs.S3FileSystem.clear_instance_cache()


@pytest.fixture
def place(bucket):  # noqa: F811
    return f"s3://{bucket}/run"


def write_step(workdir, step, loss=None, content="weights"):
    """A finished checkpoint of two files, as small as one can be."""
    writing = workdir / "checkpoints" / f"{step}.writing"
    (writing / "state").mkdir(parents=True)
    (writing / "info.json").write_text(json.dumps({"val_loss": loss}))
    (writing / "state" / "array").write_text(f"{content} {step}")
    digests.write(writing)
    writing.rename(workdir / "checkpoints" / str(step))


def until(condition, seconds=20.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def whole(place):
    return remote_run.whole_steps(Folder(place))


def taken_over(s3, bucket, running, other):  # noqa: F811
    """Another run takes the address: it writes its lock again where a beat that had begun wrote over it."""

    def is_lost() -> bool:
        if s3.get(bucket, "run/lock.json") != other:
            s3.put(bucket, "run/lock.json", other)
        return bool(running._lost)

    until(is_lost)


def test_steps_and_small_files_are_copied_and_fetched(place, s3, bucket, tmp_path, monkeypatch):  # noqa: F811
    config = tiny_config(train__keep_last=2, train__keep_best=True, train__keep_every=0)
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    with mirroring(place, first, config):
        for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0), (40, None), (50, None)):
            write_step(first, step, loss)
            until(lambda step=step: step in whole(place))
        (first / "metrics.jsonl").write_text("rows\n")
        (first / "tensorboard").mkdir()
        (first / "tensorboard" / "events").write_bytes(b"\1")
    names = s3.names(bucket)
    assert {name for name in names if "checkpoints" not in name} == {"run/metrics.jsonl", "run/tensorboard/events"}
    # The two last and the best, as in a workdir; all of their files and no others.
    assert whole(place) == {2: 1.0, 40: None, 50: None} and len([n for n in names if "checkpoints" in n]) == 3 * 3
    second.mkdir()
    with mirroring(place, second, config):
        assert find_steps(second / "checkpoints") == ({2: 1.0, 50: None}, {})
        assert (second / "metrics.jsonl").read_text() == "rows\n"
        assert (second / "checkpoints/50/state/array").read_text() == "weights 50"
        write_step(second, 60, 0.5)
    assert whole(place) == {50: None, 60: 0.5}
    # A machine that has older steps gets the newest; one that has newer ones uploads them.
    with mirroring(place, first, config):
        assert sorted(find_steps(first / "checkpoints")[0]) == [1, 2, 3, 40, 50, 60]
        write_step(first, 70)
    assert sorted(whole(place)) == [60, 70]
    monkeypatch.setenv("NSA_JAX_CACHE", str(tmp_path / "cache"))
    assert parse_resume(f"{place}@best")[1] == 60 and parse_resume(place)[1] == 70


def test_an_upload_that_was_cut_short_is_no_checkpoint(place, s3, bucket, tmp_path):  # noqa: F811
    write_step(tmp_path, 1)
    with mirroring(place, tmp_path, tiny_config()):
        pass
    s3.put(bucket, "run/checkpoints/2/info.json", b"{}")
    s3.put(bucket, "run/checkpoints/2/state/array", b"half")
    assert list(whole(place)) == [1]
    other = tmp_path / "other"
    other.mkdir()
    with mirroring(place, other, tiny_config()):
        assert sorted(find_steps(other / "checkpoints")[0]) == [1]
        assert not [name for name in s3.names(bucket) if "checkpoints/2/" in name]


def test_a_changed_object_is_found_and_the_step_before_is_used(place, s3, bucket, tmp_path, caplog):  # noqa: F811
    for step in (1, 2):
        write_step(tmp_path, step)
    with mirroring(place, tmp_path, tiny_config()):
        pass
    s3.put(bucket, "run/checkpoints/2/state/array", b"weights 3")
    other = tmp_path / "other"
    other.mkdir()
    with mirroring(place, other, tiny_config()):
        assert sorted(find_steps(other / "checkpoints")[0]) == [1]
        assert "skipping checkpoint 2 of s3://" in caplog.text and "state/array: its 9 bytes are not" in caplog.text
        write_step(other, 2)  # the run comes by again
    assert s3.get(bucket, "run/checkpoints/2/state/array") == b"weights 2"
    for step in (1, 2):
        s3.delete(bucket, f"run/checkpoints/{step}/info.json")
    last = tmp_path / "last"
    last.mkdir()
    with pytest.raises(
        CheckpointError, match=r"no checkpoint of s3://.* can be read:\n  step 2: checkpoints/2/info.json: is missing"
    ):
        with mirroring(place, last, tiny_config()):
            raise AssertionError
    assert not s3.names(bucket).count("run/lock.json")


def test_a_denied_write_is_named_and_nothing_is_lost(place, s3, bucket, tmp_path, caplog):  # noqa: F811
    write_step(tmp_path, 1)
    with mirroring(place, tmp_path, tiny_config()):
        pass
    with s3.denying(bucket):
        (problem,) = workdir_problems(place)
        assert problem.rule == "R023" and "access is denied" in problem.message and "credentials" in problem.fix
        with (
            pytest.raises(ConfigError, match="R023 error: --workdir=s3://.*access is denied"),
            mirroring(place, tmp_path, tiny_config()),
        ):
            raise AssertionError
    assert workdir_problems(place) == []
    # The rights are taken away during the run.
    expected = rf"not all in {place}: .*access is denied.*start the same command again"
    with pytest.raises(TrainingError, match=expected) as caught, mirroring(place, tmp_path, tiny_config()) as running:
        denial = s3.denying(bucket)
        denial.__enter__()
        write_step(tmp_path, 2)
        until(lambda: "the run goes on" in caplog.text)
        running.check(2)
        running._limit = 0.01
        time.sleep(0.1)
        with pytest.raises(TrainingError, match=r"step 3: nothing could be uploaded for config.guards.upload_seconds"):
            running.check(3)
    denial.__exit__(None, None, None)
    assert caught.value.guard == "upload" and list(whole(place)) == [1]
    assert s3.get(bucket, "run/checkpoints/1/state/array") == b"weights 1"
    with mirroring(place, tmp_path, tiny_config()):
        pass
    assert sorted(whole(place)) == [1, 2]


def test_a_connection_that_comes_back_loses_nothing(place, s3, tmp_path, monkeypatch):  # noqa: F811
    write_step(tmp_path, 1)
    real, stopped = Folder.upload, []

    def stop_after_first_file(self, local, path):
        real(self, local, path)
        if "checkpoints/2/" in path and not stopped:
            stopped.append(path)
            s3.stop()
            threading.Timer(1.0, s3.start).start()

    monkeypatch.setattr(Folder, "upload", stop_after_first_file)
    with mirroring(place, tmp_path, tiny_config()):
        until(lambda: 1 in whole(place))
        write_step(tmp_path, 2)
        until(lambda: stopped)
        until(lambda: 2 in safely(whole, place))
    assert sorted(whole(place)) == [1, 2]


def safely(read, place):
    try:
        return read(place)
    except StoreError:
        return {}


def test_a_lost_connection_is_named_and_the_next_start_uploads_the_rest(place, s3, tmp_path):  # noqa: F811
    write_step(tmp_path, 1)
    expected = rf"not all in {place}: .*the object store does not answer .*Everything is in {tmp_path}"
    with pytest.raises(TrainingError, match=expected) as caught:
        with mirroring(place, tmp_path, tiny_config()):
            until(lambda: 1 in whole(place))
            write_step(tmp_path, 2)
            s3.stop()
    assert caught.value.guard == "upload"
    with pytest.raises(TrainingError, match="does not answer.*check the network.*nothing was trained"):
        with mirroring(place, tmp_path, tiny_config()):
            raise AssertionError
    s3.start()
    assert set(whole(place)) <= {1, 2} and 1 in whole(place)
    with mirroring(place, tmp_path, tiny_config()):
        pass
    assert sorted(whole(place)) == [1, 2]


def test_one_run_per_address(place, s3, bucket, tmp_path, monkeypatch):  # noqa: F811
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir(), second.mkdir()
    with mirroring(place, first, tiny_config()):
        with pytest.raises(WorkdirInUse, match=r"s3://.*/run is in use by process .*; nothing was touched"):
            with mirroring(place, second, tiny_config()):
                raise AssertionError
        assert list(second.iterdir()) == []
    assert s3.names(bucket) == []
    # A process of this machine that is gone is taken over at once; one of another machine if it is silent.
    for changes in ({"pid": 1 << 22, "process_start": "1"}, {"machine": "another"}):
        s3.put(bucket, "run/lock.json", json.dumps({**lock.me(), "id": "theirs", **changes}).encode())
        with mirroring(place, first, tiny_config()):
            assert json.loads(s3.get(bucket, "run/lock.json"))["id"] != "theirs"
    # Another machine that shows signs of life.
    monkeypatch.setattr(mirror, "_SILENT_SECONDS", 10.0)
    alive = threading.Event()

    def beat():
        for count in range(100):
            content = {**lock.me(), "id": "theirs", "machine": "another", "beat": count}
            s3.put(bucket, "run/lock.json", json.dumps(content).encode())
            if alive.wait(0.2):
                return

    thread = threading.Thread(target=beat)
    thread.start()
    until(lambda: s3.names(bucket))
    with pytest.raises(WorkdirInUse):
        with mirroring(place, first, tiny_config()):
            raise AssertionError
    alive.set()
    thread.join()


def test_a_holder_that_was_only_cut_off_keeps_the_address(place, s3, bucket, tmp_path, monkeypatch):  # noqa: F811
    """It was silent, and writes its beat just after another run wrote its own lock there."""
    settle, back = 0.01, []
    monkeypatch.setattr(mirror, "_SETTLE_SECONDS", settle)

    def beat(count):
        content = {**lock.me(), "id": "theirs", "machine": "another", "beat": count}
        s3.put(bucket, "run/lock.json", json.dumps(content).encode())

    def sleep(seconds):
        if back or seconds == settle:
            back.append(seconds)
            beat(len(back))
        time.sleep(seconds)

    beat(0)
    monkeypatch.setattr(mirror, "time", types.SimpleNamespace(monotonic=time.monotonic, time=time.time, sleep=sleep))
    with pytest.raises(WorkdirInUse, match="nothing was touched"):
        with mirroring(place, tmp_path, tiny_config()):
            raise AssertionError
    assert json.loads(s3.get(bucket, "run/lock.json"))["id"] == "theirs"


def test_a_run_that_was_taken_over_uploads_nothing_more(place, s3, bucket, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.setattr(mirror, "_LAST_SECONDS", 60.0)  # of no use here
    began = time.monotonic()
    other = json.dumps({**lock.me(), "id": "theirs"}).encode()
    with pytest.raises(TrainingError, match="has been taken over by process"):
        with mirroring(place, tmp_path, tiny_config()) as running:
            taken_over(s3, bucket, running, other)
            write_step(tmp_path, 1)
            with pytest.raises(TrainingError, match="step 1: .*taken over.*Fix: let that one go on"):
                running.check(1)
    assert s3.names(bucket) == ["run/lock.json"] and s3.get(bucket, "run/lock.json") == other
    assert time.monotonic() - began < 50.0


def test_a_directory_belongs_to_one_address(place, tmp_path):
    with mirroring(place, tmp_path, tiny_config()):
        pass
    with pytest.raises(CheckpointError, match=rf"holds the files of {place}, not of {place}2. Fix: .*local_dir"):
        with mirroring(f"{place}2", tmp_path, tiny_config()):
            raise AssertionError


def test_an_object_halts_the_run(place, s3, bucket, tmp_path):  # noqa: F811
    with mirroring(place, tmp_path, tiny_config()):
        s3.put(bucket, "run/HALT", b"")
        until((tmp_path / "HALT").exists)
        until(lambda: "run/HALT" not in s3.names(bucket))


def test_a_slow_upload_outlives_the_deletion_of_its_step(place, tmp_path, monkeypatch):
    real, begun, go_on = Folder.upload, threading.Event(), threading.Event()

    def slow(self, local, path):
        if "checkpoints/1/" in path:
            begun.set()
            assert go_on.wait(20)
        real(self, local, path)

    monkeypatch.setattr(Folder, "upload", slow)
    with mirroring(place, tmp_path, tiny_config()):
        write_step(tmp_path, 1)
        assert begun.wait(20)
        shutil.rmtree(tmp_path / "checkpoints" / "1")
        go_on.set()
        until(lambda: 1 in whole(place))
    assert not (tmp_path / ".upload").exists()


def test_a_copy_that_fails_is_tried_again(place, tmp_path, monkeypatch):
    """Without hard links a checkpoint is copied before it is uploaded, for which there may be no room for a while."""
    real, calls = shutil.copytree, []

    def copytree(*args, **kwargs):
        calls.append(args)
        if len(calls) <= 2:  # by links, and then by copies
            raise shutil.Error([("a", "b", "No space left on device")])
        return real(*args, **kwargs)

    monkeypatch.setattr(mirror.shutil, "copytree", copytree)
    with mirroring(place, tmp_path, tiny_config()):
        write_step(tmp_path, 1)
        until(lambda: 1 in whole(place))
    assert len(calls) >= 3


def test_what_is_damaged_here_is_fetched(place, tmp_path):
    with mirroring(place, tmp_path, tiny_config()):
        write_step(tmp_path, 1)
        until(lambda: 1 in whole(place))
        write_step(tmp_path, 2)
        until(lambda: 2 in whole(place))
    array = tmp_path / "checkpoints" / "2" / "state" / "array"
    content = array.read_text()
    array.write_text("x" * len(content))
    with mirroring(place, tmp_path, tiny_config()):
        assert array.read_text() == content


def test_what_another_machine_left_out_since_the_newest_checkpoint_is_known(place, s3, bucket, tmp_path):  # noqa: F811
    """It came back to the checkpoint that both have, and was lost before its next one."""
    first, second = tmp_path / "first", tmp_path / "second"
    records = [{"checkpoint": 1, "position": 1, "next_batch": 5}, {"checkpoint": 1, "position": 1, "next_batch": 9}]
    write_step(first, 1)
    with mirroring(place, first, tiny_config()):
        (first / "rollbacks.json").write_text(json.dumps(records[:1]))
    second.mkdir()
    with mirroring(place, second, tiny_config()):
        (second / "rollbacks.json").write_text(json.dumps(records))
    with mirroring(place, first, tiny_config()):
        assert Rollbacks(first, 3).batches_to_skip(1, 1) == 8
        (first / "rollbacks.json").write_text(json.dumps([*records, records[1]]))
    s3.put(bucket, "run/rollbacks.json", b"[")  # no more is known there
    with mirroring(place, first, tiny_config()):
        assert len(Rollbacks(first, 3).done) == 3
    assert len(json.loads(s3.get(bucket, "run/rollbacks.json"))) == 3


def test_the_local_directory_follows_from_the_address(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert local_directory("s3://bucket/a/b/") == tmp_path / "runs/s3/bucket/a/b"
    assert local_directory("gs://bucket/a", f"{tmp_path}/fast") == tmp_path / "fast"
    assert local_directory("runs/a") == tmp_path / "runs/a"


def test_a_killed_run_is_resumed_elsewhere_with_the_same_bits(place, s3, bucket, tmp_path, monkeypatch):  # noqa: F811
    env = {
        **os.environ,
        "JAX_COMPILATION_CACHE_DIR": str(jax.config.jax_compilation_cache_dir),
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "true",
        "PYTHONPATH": str(ROOT),
    }
    command = [sys.executable, "-m", "tests.train.remote_run", place, str(tmp_path / "first")]
    with (tmp_path / "output.txt").open("w") as output:
        process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=output, stderr=subprocess.STDOUT)
    try:
        until(lambda: 4 in whole(place) or process.poll() is not None, 120.0)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == -9, (tmp_path / "output.txt").read_text()
    reached = max(whole(place))
    assert "run/lock.json" in s3.names(bucket) and 4 <= reached < 10

    checked = []
    monkeypatch.setattr(mirror.Mirror, "check", lambda self, step: checked.append(step))
    uninterrupted = run(killed.config(""), tmp_path / "uninterrupted", devices=one_device())
    resumed = run(killed.config(tmp_path / "second"), place, devices=one_device())
    assert resumed["start_step"] == reached and resumed["finished"] and uninterrupted["start_step"] == 0
    assert losses(tmp_path / "second") == losses(tmp_path / "uninterrupted") and len(losses(tmp_path / "second")) == 12
    assert checked == list(range(reached + 2, 13, 2)) and "run/lock.json" not in s3.names(bucket)
    assert json.loads(s3.get(bucket, "run/summary.json"))["finished"]
    assert s3.get(bucket, "run/metrics.jsonl") == (tmp_path / "second" / "metrics.jsonl").read_bytes()

    # Reading. A report shows the address, and the checkpoints without what they hold.
    page = tmp_path / "report.html"
    assert report.main([place, "--out", str(page)]) == 0
    assert place in page.read_text() and "checkpoint of step 12 is kept" in page.read_text()
    assert report.main([f"{place}/nothing", "--out", str(page)]) == 2
    # What was fetched once is used again.
    monkeypatch.setenv("NSA_JAX_CACHE", str(tmp_path / "cache"))
    model, _, _ = nsa_jax.load(f"{place}@12")
    same, _, _ = nsa_jax.load(tmp_path / "uninterrupted")
    for one, other in zip(*(jax.tree.leaves(nnx.state(m, nnx.Param)) for m in (model, same)), strict=True):
        assert np.array_equal(one, other)
    fetched = tmp_path / "cache" / "runs" / "s3" / bucket / "run" / "checkpoints"
    assert [path.name for path in fetched.iterdir()] == ["12"]
    monkeypatch.setattr(remote_run, "fetch_step", None)
    assert parse_resume(place) == (fetched, 12)
    monkeypatch.undo()
    with pytest.raises(LoadError, match=r"run@7: no such finished step. Fix: name another, of \[8, 10, 12\]"):
        nsa_jax.load(f"{place}@7")


def test_a_damaged_copy_is_fetched_again(place, s3, bucket, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.setenv("NSA_JAX_CACHE", str(tmp_path / "cache"))
    for step in (1, 2):
        write_step(tmp_path / "run", step)
    with mirroring(place, tmp_path / "run", tiny_config()):
        pass
    directory, step = parse_resume(place)
    array = directory / str(step) / "state" / "array"
    for damage in (array.unlink, lambda: array.write_text("weights 3")):
        damage()
        assert parse_resume(place) == (directory, 2) and array.read_text() == "weights 2"
    # A run that goes on deletes its old steps, perhaps just when they are asked for.
    monkeypatch.setattr(remote_run, "whole_steps", lambda _: {1: None, 2: None})
    s3.delete(bucket, "run/checkpoints/2/SHA256SUMS")
    assert parse_resume(place) == (directory, 1)


def test_runs_without_what_is_asked_for_say_which_they_lack(place, tmp_path, monkeypatch):
    monkeypatch.setenv("NSA_JAX_CACHE", str(tmp_path / "cache"))
    with pytest.raises(CheckpointError, match="run: holds no finished checkpoint. Fix: give the address of a run that"):
        parse_resume(place)
    write_step(tmp_path / "run", 1)
    with mirroring(place, tmp_path / "run", tiny_config()):
        pass
    with pytest.raises(CheckpointError, match="run@best: no checkpoint has a validation loss. Fix: name another"):
        parse_resume(f"{place}@best")


@pytest.mark.slow
def test_two_processes_save_and_resume_one_run(place, s3, bucket, tmp_path, monkeypatch):  # noqa: F811
    rng = np.random.default_rng(0)
    for index in range(40):
        s3.put(bucket, f"text/{index}.txt", "".join(rng.choice(list("abcdefgh "), 300)).encode())
    flags = [
        f"--workdir={place}",
        f"--config.data.files=('s3://{bucket}/text/*.txt',)",
        "--config.train.steps=8",
        *QUICK,
    ]
    flags.append(f"--config.data.cache_dir=s3://{bucket}/caches")
    results, tokenised = [], []
    for name in ("first", "second"):
        monkeypatch.setenv("NSA_JAX_CACHE", str(tmp_path / f"{name}_cache"))
        with Processes(tmp_path / name, f"--config.train.local_dir={tmp_path / name}", *flags) as both:
            assert (both.wait(0), both.wait(1)) == (0, 0), both.text(0) + both.text(1)
        assert sorted(whole(place)) == [4, 8] and "run/lock.json" not in s3.names(bucket)
        tokenised += [["tokenised" in both.text(index), "fetching s3://" in both.text(index)] for index in (0, 1)]
        results.append((json.loads((tmp_path / name / "summary.json").read_text()), losses(tmp_path / name)))
        if name == "first":  # as if the machine had been lost before it uploaded the last checkpoint
            s3.delete(bucket, "run/checkpoints/8/SHA256SUMS")
    assert [summary["start_step"] for summary, _ in results] == [0, 4]
    assert results[0][1] == results[1][1] and list(results[1][1]) == list(range(1, 9))
    # Process 0 of the first run tokenises, and its machine's process 1 uses that; the second run's machine fetches it.
    assert tokenised == [[True, False], [False, False], [False, True], [False, False]]


def test_the_digests_are_written_last_and_deleted_first(place, tmp_path, monkeypatch):
    done = []
    for name, index in (("upload", 1), ("delete", 0)):
        real = getattr(Folder, name)
        record = lambda self, *args, real=real, name=name, index=index: (  # noqa: E731
            real(self, *args),
            done.append((name, args[index])),
        )
        monkeypatch.setattr(Folder, name, record)
    write_step(tmp_path, 1)
    (tmp_path / "metrics.jsonl").write_text("rows\n")
    with mirroring(place, tmp_path, tiny_config(train__keep_last=1)):
        until(lambda: 1 in whole(place))
        write_step(tmp_path, 2)
    base = "checkpoints/1"
    of_step = [entry for entry in done if entry[1].startswith(base)]
    assert done.index(("upload", "metrics.jsonl")) < done.index(of_step[1])
    # Before and after: what an earlier attempt may have left, and the deletion of the step.
    assert of_step[0] == ("delete", f"{base}/SHA256SUMS") == of_step[4]
    assert {*of_step[1:3]} == {("upload", f"{base}/info.json"), ("upload", f"{base}/state/array")}
    assert of_step[3] == ("upload", f"{base}/SHA256SUMS") and len(of_step) == 7
    assert done[done.index(("upload", "checkpoints/2/SHA256SUMS")) + 1 :][:3] == of_step[4:]


def test_a_run_that_lost_the_store_uploads_nothing_when_the_other_one_has_ended(place, s3, bucket, tmp_path):  # noqa: F811
    with pytest.raises(TrainingError, match="has been taken over"):
        with mirroring(place, tmp_path, tiny_config()) as made:
            (tmp_path / "metrics.jsonl").write_text("rows\n")
            write_step(tmp_path, 1)
            until(lambda: list(whole(place)) == [1])
            taken_over(s3, bucket, made, json.dumps({"id": "another", "host": "elsewhere", "pid": 7}).encode())
            s3.put(bucket, "run/metrics.jsonl", b"rows of the other run\n")
            s3.delete(bucket, "run/lock.json")  # the other run has ended
            (tmp_path / "metrics.jsonl").write_text("rows\nmore rows\n")
            write_step(tmp_path, 2)
            time.sleep(1.0)
            made.check(2)
    assert list(whole(place)) == [1] and s3.get(bucket, "run/metrics.jsonl") == b"rows of the other run\n"
    assert "run/lock.json" not in s3.names(bucket)


def test_a_run_that_was_cut_off_while_another_came_and_went_uploads_nothing(place, s3, bucket, tmp_path, monkeypatch):  # noqa: F811
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir(), second.mkdir()
    monkeypatch.setattr(mirror, "_BEAT_SECONDS", 1000.0)
    monkeypatch.setattr(mirror, "_POLL_SECONDS", 1000.0)  # it reaches the store only at its end
    with pytest.raises(TrainingError, match="may have been taken over"):
        with mirroring(place, first, tiny_config()):
            write_step(first, 1, content="first")
            (first / "metrics.jsonl").write_text("first\n")
            time.sleep(mirror._SILENT_SECONDS)
            s3.delete(bucket, "run/lock.json")  # as a start on another machine does after this time
            with mirroring(place, second, tiny_config()):
                for step in (1, 5):
                    write_step(second, step, content="second")
                (second / "metrics.jsonl").write_text("second\n")
    assert s3.get(bucket, "run/metrics.jsonl") == b"second\n" and list(whole(place)) == [1, 5]
    assert s3.get(bucket, "run/checkpoints/1/state/array") == b"second 1" and "run/lock.json" not in s3.names(bucket)


def test_what_was_left_out_since_a_checkpoint_that_the_store_lacks_is_kept(place, s3, bucket, tmp_path):  # noqa: F811
    write_step(tmp_path, 1)
    with mirroring(place, tmp_path, tiny_config()):
        pass
    write_step(tmp_path, 2)  # this machine was lost before it uploaded it, and another went on from step 1
    here, there = ({"checkpoint": n, "position": n, "next_batch": 9} for n in (2, 1))
    (tmp_path / "rollbacks.json").write_text(json.dumps([here]))
    s3.put(bucket, "run/rollbacks.json", json.dumps([there, there]).encode())
    with mirroring(place, tmp_path, tiny_config()):
        assert Rollbacks(tmp_path, 3).batches_to_skip(2, 2) == 7
