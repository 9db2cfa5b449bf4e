"""A workdir belongs to one run at a time, whatever the other one left behind."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from nsa_jax.train import lock
from nsa_jax.train.lock import WorkdirInUse, holding

HOLD = """
import sys, time
from pathlib import Path
from nsa_jax.train.lock import holding
with holding(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path):
    """Another process that holds the workdir."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, tmp_path], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()


def test_a_second_run_is_refused_and_told_of_the_first(tmp_path, holder):
    before = (tmp_path / "lock.json").read_text()
    with pytest.raises(WorkdirInUse, match=rf"in use by process {holder.pid} on host .*; nothing was touched. Fix: "):
        with holding(tmp_path):
            raise AssertionError
    assert (tmp_path / "lock.json").read_text() == before and holder.poll() is None
    holder.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, holder.pid, os.WEXITED | os.WNOWAIT)  # dead, but still listed
    with holding(tmp_path):
        assert json.loads((tmp_path / "lock.json").read_text())["pid"] == os.getpid()
    assert not (tmp_path / "lock.json").exists()


def test_the_lock_holds_within_a_process_too(tmp_path):
    with holding(tmp_path):
        with pytest.raises(WorkdirInUse, match=f"process {os.getpid()} "), holding(tmp_path):
            raise AssertionError


def test_who_shares_the_directory_may_take_over_a_lock(tmp_path):
    """As all else that a run writes, the file follows the umask."""
    mask = os.umask(0o002)
    try:
        with holding(tmp_path):
            assert (tmp_path / "lock.json").stat().st_mode & 0o777 == 0o664
    finally:
        os.umask(mask)


def leave(workdir, **changes):
    """A lock file that no system lock protects: its process was killed, or works on a host that shares none."""
    (workdir / "lock.json").write_text(json.dumps({**lock.me(), **changes}))


@pytest.mark.parametrize("changes", [{"pid": 2**22 + 1}, {"process_start": "1"}], ids=["dead", "another of its id"])
def test_what_a_dead_process_left_is_taken_over_at_once(tmp_path, caplog, monkeypatch, changes):
    def waits(_):
        raise AssertionError("it waits")

    leave(tmp_path, **changes)
    monkeypatch.setattr(lock.time, "sleep", waits)
    with holding(tmp_path):
        pass
    assert "taking over" in caplog.text and "which is gone" in caplog.text


def test_a_living_process_is_believed_without_a_system_lock(tmp_path):
    leave(tmp_path)
    with pytest.raises(WorkdirInUse), holding(tmp_path):
        raise AssertionError
    assert (tmp_path / "lock.json").exists()


def test_another_host_is_believed_while_it_gives_signs_of_life(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(lock, "_SILENT_SECONDS", 60.0)
    leave(tmp_path, host="elsewhere", machine="elsewhere")
    stop = threading.Event()

    def beat():
        while not stop.wait(0.1):
            os.utime(tmp_path / "lock.json")

    thread = threading.Thread(target=beat)
    thread.start()
    with pytest.raises(WorkdirInUse, match="on host elsewhere"), holding(tmp_path):
        raise AssertionError
    stop.set()
    thread.join()
    monkeypatch.setattr(lock, "_SILENT_SECONDS", 1.0)
    with holding(tmp_path):
        assert "waiting 1 s for a sign of life" in caplog.text


def test_a_holder_on_another_host_may_end_while_its_silence_is_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "_SILENT_SECONDS", 60.0)
    leave(tmp_path, host="elsewhere", machine="elsewhere")
    threading.Timer(0.5, (tmp_path / "lock.json").unlink).start()
    with holding(tmp_path):
        assert json.loads((tmp_path / "lock.json").read_text())["pid"] == os.getpid()


@pytest.mark.parametrize("replaced", [False, True], ids=["written over", "deleted and made anew"])
def test_a_holder_leaves_the_lock_of_who_has_taken_over(tmp_path, replaced):
    """It was cut off for longer than another host waits: a third start must find the second one's lock."""
    with holding(tmp_path):
        if replaced:
            (tmp_path / "lock.json").unlink()
        leave(tmp_path, host="elsewhere", machine="elsewhere", pid=1)
    assert json.loads((tmp_path / "lock.json").read_text())["host"] == "elsewhere"


def test_the_holder_gives_signs_of_life(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "_BEAT_SECONDS", 0.05)
    with holding(tmp_path):
        os.utime(tmp_path / "lock.json", (1, 1))
        end = time.monotonic() + 60
        while (tmp_path / "lock.json").stat().st_mtime < 1e9:
            assert time.monotonic() < end
            time.sleep(0.05)


def test_file_systems_without_locks_are_served(tmp_path, monkeypatch, caplog):
    def unsupported(*_):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    with holding(tmp_path):
        with pytest.raises(WorkdirInUse), holding(tmp_path):
            raise AssertionError
    assert "cannot be locked here (No locks available)" in caplog.text
