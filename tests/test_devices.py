"""What JAX is told before it is used: the platform, and where compiled programs are kept."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import jax
import pytest

from nsa_jax import command_line, devices, export, generate
from nsa_jax.evaluate import command as evaluate

ROOT = Path(__file__).parents[1]


@pytest.fixture
def told(monkeypatch):
    """What `jax.config.update` was called with; nothing is changed."""
    found = {}
    monkeypatch.setattr(jax.config, "update", lambda name, value: found.__setitem__(name, value))
    return found


def test_where_compiled_programs_are_kept(told, monkeypatch, tmp_path):
    monkeypatch.setenv("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "7")  # somebody has chosen
    assert devices.keep_compiled_programs() == Path(jax.config.jax_compilation_cache_dir) and not told
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "5")
    assert devices.keep_compiled_programs(str(tmp_path / "mine")) and list(told) == ["jax_compilation_cache_dir"]
    monkeypatch.delenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS")
    keeps_from = jax.config.jax_persistent_cache_min_compile_time_secs
    monkeypatch.setattr(devices, "_JAX_KEEPS_FROM", keeps_from + 1)  # a program has chosen another than JAX's default
    assert devices.keep_compiled_programs(str(tmp_path / "mine")) and list(told) == ["jax_compilation_cache_dir"]
    monkeypatch.setattr(devices, "_JAX_KEEPS_FROM", keeps_from)
    given = devices.keep_compiled_programs(str(tmp_path / "mine"))
    assert given.parent == tmp_path / "mine" and given.is_dir() and told["jax_compilation_cache_dir"] == str(given)
    assert told["jax_persistent_cache_min_compile_time_secs"] == 0.1
    (tmp_path / "file").touch()
    assert devices.keep_compiled_programs(str(tmp_path / "file")) is None
    assert "jax_enable_compilation_cache" not in told
    assert devices.keep_compiled_programs("off") is None and told["jax_enable_compilation_cache"] is False


def test_programs_have_lines_of_code_if_a_profiler_is_to_show_them(told, monkeypatch, tmp_path):
    monkeypatch.delenv("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", raising=False)
    devices.keep_compiled_programs(str(tmp_path))
    assert told.pop("jax_traceback_in_locations_limit") == 0
    devices.keep_compiled_programs(str(tmp_path), lines=True)
    assert told.pop("jax_traceback_in_locations_limit") == 100  # JAX's default
    monkeypatch.setenv("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "7")
    devices.keep_compiled_programs(str(tmp_path))
    assert "jax_traceback_in_locations_limit" not in told


def test_processors_have_folders_of_their_own(monkeypatch):
    here = devices.processor()
    assert here == devices.processor()
    monkeypatch.setattr(Path, "read_text", lambda self, *_: "flags : fpu sse\nflags : fpu sse\n")
    assert devices.processor() != here


@pytest.mark.parametrize("tool", [generate, evaluate, export])
def test_tools_choose_the_platform_before_anything_else(tool, monkeypatch):
    class Chosen(Exception):
        pass

    def choose():
        raise Chosen

    monkeypatch.setattr(command_line, "choose_platform", choose)
    with pytest.raises(Chosen):
        tool.main(["nowhere"])


def test_devices_are_woken_in_a_thread_and_leave_their_errors_to_who_uses_them(monkeypatch):
    woken, told = [], []

    def put(arrays, on):
        woken.append((threading.current_thread().name, list(on)))
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

    monkeypatch.setattr(jax, "device_put", put)
    monkeypatch.setattr(threading, "excepthook", told.append)
    devices.wake()
    devices.wake(jax.devices()[:1])
    for thread in threading.enumerate():
        if thread.name == "wake devices":
            thread.join()
    names, used = zip(*woken, strict=True)
    assert set(names) == {"wake devices"} and sorted(used, key=len) == [jax.devices()[:1], jax.devices()]
    assert told == []


def test_a_second_run_compiles_nothing_and_has_the_same_losses(tmp_path):
    """train.py with its default cache; the guard against recompilation is on."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_COMP", "JAX_PERS"))}
    env |= {
        "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=1", "PYTHONPATH": str(ROOT),
        "NSA_JAX_CACHE": str(tmp_path / "cache"), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }  # fmt: skip
    flags = ["--config.data.source=synthetic", "--config.model.attention=dense", "--config.train.steps=5"]
    flags += ["--config.train.eval_batches=0", "--config.train.eval_every=0", "--config.train.sample_tokens=0"]
    flags += ["--config.train.save_every=0", "--profile=2:4"]

    def run(name):
        command = [
            sys.executable,
            "train.py",
            "--config=tests/train/distributed_config.py",
            f"--workdir={tmp_path / name}",
        ]
        done = subprocess.run([*command, *flags], cwd=ROOT, env=env, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr
        rows = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        programs = {path.name for path in (tmp_path / "cache" / "compiled").rglob("*-cache")}
        return [row["train/loss"] for row in rows], programs

    losses, programs = run("first")
    assert len(losses) == 5 and any(name.startswith("jit_step") for name in programs)
    assert run("second") == (losses, programs)
    assert list((tmp_path / "second" / "profile").rglob("perfetto_trace.json.gz"))
