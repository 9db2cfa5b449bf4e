"""Ctrl-C at any moment of train.py: one line at once, and a status that says what happened."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nsa_jax.train import stopping

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("module", ["absl.app", "jax._src.core"])
def test_while_modules_are_imported(module, tmp_path):
    command = [sys.executable, "-X", "importtime", "train.py", "--config=configs/quickstart.py"]
    command.append(f"--workdir={tmp_path / 'run'}")
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    with subprocess.Popen(command, cwd=ROOT, env=env, **pipes) as process:
        for line in process.stdout:
            if line.startswith("import time:") and line.split("|")[-1].strip() == module:
                break
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
from nsa_jax.train.stopping import StopRequest
mesh = jax.make_mesh((1,), ("data",))
def say(line):
    print(line, flush=True)

with StopRequest(Path(sys.argv[1]), mesh, say, lambda: "compiling after step 0") as stop:
    say("busy")
    hashlib.pbkdf2_hmac("sha256", b"", b"", int(sys.argv[2]))  # no handler of Python's runs until it returns
    print(stop.reason(), flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_are_answered_while_the_main_thread_compiles(number, tmp_path):
    command = [sys.executable, "-c", BUSY, str(tmp_path), str((1 << 31) - 1)]  # many minutes
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    with subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "busy\n"
        time.sleep(0.5)  # until it is
        process.send_signal(number)
        said = process.stdout.readline()
        assert said.startswith(f"{number.name}: stopping after this step (compiling after step 0)")
        process.send_signal(number)
        assert process.stdout.readline().startswith(f"{number.name} again: ended, not saved")
        assert process.wait(120) == 128 + number


def test_one_signal_is_a_request(tmp_path):
    command = [sys.executable, "-c", BUSY, str(tmp_path), str(1 << 22)]
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    with subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "busy\n"
        process.send_signal(signal.SIGINT)
        assert process.stdout.read().splitlines()[-1] == "SIGINT"
        assert process.wait(120) == 0


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


def _raise_and_wait(heard, count):
    signal.raise_signal(signal.SIGUSR2)
    end = time.monotonic() + 60
    while len(heard) < count and time.monotonic() < end:
        time.sleep(0.01)
