"""Ctrl-C at any moment of train.py: one line at once, and a status that says what happened."""

import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import jax
import pytest

from nsa_jax.train import stopping

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("module", ["jax._src.core", "nsa_jax.train.stopping"])
def test_while_modules_are_imported(module, tmp_path):
    command = [sys.executable, "-X", "importtime", "train.py", "--config=configs/quickstart.py"]
    command.append(f"--workdir={tmp_path / 'run'}")
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    with subprocess.Popen(command, cwd=ROOT, env=env, **pipes) as process:
        for line in process.stdout:
            if line.startswith("import time:") and line.split("|")[-1].strip() == module:
                break
        if module.startswith("nsa_jax"):  # the program has begun
            process.send_signal(signal.SIGUSR1)
            while not (line := process.stdout.readline()).startswith("Current thread"):
                assert line, "SIGUSR1 ended the process"
            while process.stdout.readline().startswith("  File"):
                pass
        process.send_signal(signal.SIGINT)
        rest = process.stdout.read().splitlines()
    lines = [line for line in rest if "import time:" not in line and "cuda" not in line and "absl::" not in line]
    assert process.returncode == 130
    assert len(lines) == 1 and lines[0].startswith("interrupted before training began")
    assert not (tmp_path / "run").exists()


BUSY = """
import hashlib, sys
from pathlib import Path
import jax
from nsa_jax.train import stopping
mesh = jax.make_mesh((1,), ("data",))
stopping._ONE_REQUEST = float(sys.argv[3])

with stopping.StopRequest(Path(sys.argv[1]), mesh, stopping=lambda: "stopping after step 1, then saving") as stop:
    print("busy", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", int(sys.argv[2]))  # no handler of Python's runs until it returns
    print(stop.reason(), flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_are_answered_while_the_main_thread_compiles(number, tmp_path):
    command = [sys.executable, "-c", BUSY, str(tmp_path), str((1 << 31) - 1), "5"]  # many minutes
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    with subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "busy\n"
        time.sleep(0.5)  # until it is
        process.send_signal(number)
        said = process.stdout.readline()
        assert said == f"{number.name}: stopping after step 1, then saving; {number.name} again kills, unsaved\n"
        if number == signal.SIGTERM:  # as GNU timeout sends it, twice
            process.send_signal(number)
            time.sleep(5.1)
            assert process.poll() is None
        process.send_signal(number)
        assert process.stdout.readline().startswith(f"{number.name} again: killed, unsaved")
        assert process.wait(120) == 128 + number


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_one_signal_is_a_request(number, tmp_path):
    patience = "60"  # seconds, however long this machine pauses between two signals
    command = [sys.executable, "-c", BUSY, str(tmp_path), str(1 << 22), patience]
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    with subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "busy\n"
        for _ in range(2 if number == signal.SIGTERM else 1):  # GNU timeout sends it twice
            process.send_signal(number)
            time.sleep(0.05)
        assert process.stdout.read().splitlines()[-1] == number.name
        assert process.wait(120) == 0


def test_a_second_sigterm_is_told_from_a_repeated_one(tmp_path, monkeypatch):
    """Without the thread that listens, and with handlers that Python has run."""
    statuses, passed_on = [], []
    monkeypatch.setattr(stopping.os, "_exit", statuses.append)
    previous = signal.signal(signal.SIGTERM, lambda number, _: passed_on.append(number))
    with stopping.StopRequest(tmp_path, jax.make_mesh((1,), ("data",))) as stop:
        for _ in range(2):
            signal.raise_signal(signal.SIGTERM)
        time.sleep(0.2)
        assert stop.reason() == "SIGTERM" and not statuses
        monkeypatch.setattr(stopping, "_ONE_REQUEST", 0.1)
        signal.raise_signal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, previous)
    assert set(statuses) == {128 + signal.SIGTERM} and passed_on == [signal.SIGTERM]


@pytest.mark.parametrize("asked", ["HALT", "SIGINT"])
def test_who_asked_first_is_not_overruled_by_a_scheduler(asked, tmp_path):
    """The status said that the machine was taken, and a supervisor started again what a person had stopped."""
    previous = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGINT, signal.SIGTERM)}
    with stopping.StopRequest(tmp_path, jax.make_mesh((1,), ("data",))) as stop:
        (tmp_path / "HALT").touch() if asked == "HALT" else signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
        assert stop.reason() == asked and not stop.terminated
    for number, handler in previous.items():
        signal.signal(number, handler)


def test_among_processes_a_person_outranks_schedulers(tmp_path, monkeypatch):
    """The request of the highest process counted, whoever had made it."""
    mesh, count = jax.make_mesh((1,), ("data",)), 3
    monkeypatch.setattr(jax, "process_count", lambda: count)

    def stop_of(index, asked):
        stop = stopping.StopRequest(tmp_path, mesh)
        stop._signal, votes = asked, []
        monkeypatch.setattr(jax, "process_index", lambda: index)
        stop._vote = lambda mine: votes.append(mine) or 0
        assert stop.reason() is None
        return stop, votes[0]

    stops, votes = zip(*(stop_of(i, asked) for i, asked in enumerate(("SIGINT", None, "SIGTERM"))), strict=True)
    found = []
    for index, stop in enumerate(stops):
        monkeypatch.setattr(jax, "process_index", lambda index=index: index)
        stop._vote = lambda mine: max(votes)
        found.append((stop.reason(), stop.terminated))
    assert found == [("SIGINT", False), ("process 0", False), ("process 0", False)]
    stops[2]._vote = lambda mine: votes[2]
    assert stops[2].reason() == "SIGTERM" and stops[2].terminated


def test_listeners_nest_and_leave_nothing_behind():
    heard = []
    with stopping.listening(lambda number: heard.append(("outer", number))):
        previous = signal.signal(signal.SIGUSR2, lambda *_: None)
        with stopping.listening(lambda number: heard.append(("inner", number))):
            _raise_and_wait(heard, 1)
        _raise_and_wait(heard, 2)
        signal.signal(signal.SIGUSR2, previous)
    assert heard == [("inner", signal.SIGUSR2), ("outer", signal.SIGUSR2)]
    assert signal.set_wakeup_fd(-1) == -1


def test_a_signal_whose_handler_raises_is_told_before_its_listener_leaves():
    """Ctrl-C in Python code ended without a word: the listener had gone before the thread could run."""
    heard = []

    def interrupt(*_):
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGUSR2, interrupt)
    with pytest.raises(KeyboardInterrupt), stopping.listening(heard.append):
        signal.raise_signal(signal.SIGUSR2)
    signal.signal(signal.SIGUSR2, previous)
    assert heard == [signal.SIGUSR2]


def _raise_and_wait(heard, count):
    signal.raise_signal(signal.SIGUSR2)
    end = time.monotonic() + 60
    while len(heard) < count and time.monotonic() < end:
        time.sleep(0.01)


ENDLESS = """
from tests.train.tiny import tiny_config

def get_config():
    return tiny_config(
        train__steps=4_999, train__log_every=20, train__save_every=4_000, model__attention="dense",
        preflight__selftest=False,
    )
"""


def test_ctrl_c_on_a_terminal_is_answered_with_the_last_step_and_the_end_says_what_is_next(tmp_path):
    """train.py on a terminal of 80 columns: no line is longer, and the step that was promised is the last."""
    main, other = pty.openpty()
    fcntl.ioctl(other, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    (tmp_path / "config.py").write_text(ENDLESS)
    command = [sys.executable, "train.py", f"--config={tmp_path / 'config.py'}", f"--workdir={tmp_path / 'run'}"]
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), "TERM": "xterm", "LANG": "C.UTF-8"}
    with subprocess.Popen(command, cwd=ROOT, env=env, stdin=other, stdout=other, stderr=other) as process:
        os.close(other)
        text = _read_until(main, "step   40/4999")
        process.send_signal(signal.SIGINT)
        text += _read_until(main, None)
        assert process.wait(60) == 0
    screen = re.split(r"[\r\n]+", re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text))
    whole = "\n".join(screen)
    assert max(len(line) for line in screen if "0/4999" in line) <= 80
    promised = re.search(r"Ctrl-C: stopping after step (\d+), then saving; Ctrl-C again kills, unsaved", whole)
    assert f"stopped by Ctrl-C after step {int(promised[1]):,} of 4,999" in whole
    assert (tmp_path / "run" / "checkpoints" / promised[1]).is_dir()
    assert any("generate" in line and "--interactive" in line for line in screen[-6:])


def _read_until(terminal, text):
    """What a terminal shows up to a text, or to its end."""
    found = ""
    while text is None or text not in found:
        try:
            found += os.read(terminal, 65536).decode(errors="replace")
        except OSError:  # the other side is closed
            assert text is None, found
            return found
    return found
