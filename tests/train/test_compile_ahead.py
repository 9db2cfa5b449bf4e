"""What a run calls first is compiled while its preflight is at work, and compiled once."""

import collections
import gc
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nsa_jax.config import ConfigError
from nsa_jax.nn import ModelConfig
from nsa_jax.ops.target import Target, compile_for
from nsa_jax.train import preflight
from nsa_jax.train.compile_ahead import CompileAhead, while_tracing
from nsa_jax.train.loop import Run
from nsa_jax.train.preflight import selftest

from .tiny import one_device, tiny_config


class _Compilations(logging.Handler):
    """Counts the programs that JAX compiles, by name, with the thread that compiled each."""

    def __init__(self):
        super().__init__()
        self.count = collections.Counter()
        self.threads = collections.defaultdict(set)

    def emit(self, record):
        message = record.getMessage()
        if message.startswith("Finished XLA compilation of "):
            name = message.split()[4]
            self.count[name] += 1
            self.threads[name].add(threading.current_thread().name.split("_")[0])


@pytest.fixture
def compilations(monkeypatch):
    handler, logger = _Compilations(), logging.getLogger("jax")
    logger.addHandler(handler)
    jax.config.update("jax_log_compiles", True)
    yield handler
    jax.config.update("jax_log_compiles", False)
    logger.removeHandler(handler)


PROGRAMS = {
    "jit(step)": 2,  # the train step and the evaluation
    "jit(health)": 1,
    "jit(initial_state)": 1,
    "jit(gradient)": 1,  # of the self-test
    "jit(forward)": 1,
}

OPTIONS = {
    "one_device": dict(devices=1),
    "two_devices": dict(devices=2),
    "fsdp": dict(devices=4, mesh__fsdp=2),
    "zero_1": dict(devices=2, mesh__shard_optimizer=True),
    "micro_batches": dict(devices=1, train__grad_accum=2, train__ema_decay=0.9),
    "averages_on_the_host": dict(devices=1, train__offload_optimizer=True),
    "spikes": dict(devices=1, guards__skip_spikes=3),
    "not_deterministic": dict(devices=1, train__deterministic=False),
    "selection_loss": dict(devices=2, train__selection_loss=1.0),
}


def _run(workdir, devices, **changes):
    settings = dict(train__steps=3, train__eval_every=2, train__eval_batches=1, train__save_every=2) | changes
    config = tiny_config(guards__health=True, **settings)
    run = Run(config, workdir, None, jax.devices()[:devices])
    run.examine()
    run.run()


@pytest.mark.parametrize("name", OPTIONS)
def test_a_run_compiles_its_programs_once_and_in_threads(tmp_path, compilations, name):
    _run(tmp_path / "run", **OPTIONS[name])
    assert {name: compilations.count[name] for name in PROGRAMS} == PROGRAMS
    for program in PROGRAMS:
        assert compilations.threads[program] == {"compile"}


@pytest.mark.gpu
@pytest.mark.parametrize("deterministic", [True, False])
def test_a_run_on_a_gpu_compiles_its_programs_once(tmp_path, compilations, deterministic):
    settings = dict(model__implementation="auto", model__head_dim=16, train__deterministic=deterministic)
    _run(tmp_path / "run", devices=1, **settings)
    # The self-test takes its logits from the program of the gradient.
    assert {name: compilations.count[name] for name in PROGRAMS} == PROGRAMS | {"jit(forward)": 0}


def test_what_the_self_test_asks_of_shared_blocks_is_compiled_beside_the_rest(compilations, monkeypatch):
    """On GPUs whose kernels serve blocks that neighbours share it compares lists, and logits with lists given."""
    assert not selftest._shares_blocks(*selftest.slice_config(tiny_config())[:2])  # on a CPU
    with compile_for(Target("gpu", (9, 0))):
        sizes = dict(dim=768, num_heads=12, num_kv_heads=2, head_dim=64, compute_dtype="bfloat16", vocab_size=8)
        assert selftest._shares_blocks(ModelConfig(**sizes), 32_768)
        assert selftest._shares_blocks(ModelConfig(**sizes | dict(num_heads=32)), 32_768)  # groups of 16
        assert not selftest._shares_blocks(ModelConfig(**sizes), 2048)
        assert not selftest._shares_blocks(ModelConfig(**sizes, attention="dense"), 32_768)
    monkeypatch.setattr(selftest, "_shares_blocks", lambda *_: True)
    model, length, _ = selftest.slice_config(tiny_config(model__num_layers=1, model__nsa__shared_kv=True))
    subject = selftest._Subject(model, length, True, 0)
    base, lists = subject.logits(), subject.lists(subject.tokens)
    np.testing.assert_allclose(subject.logits(lists=lists), base, rtol=1e-4, atol=1e-5)
    subject.gradients()
    assert compilations.count["jit(lists)"] == compilations.count["jit(gradient)"] == 1
    assert compilations.count["jit(forward)"] == 2
    assert compilations.threads["jit(lists)"] == compilations.threads["jit(forward)"] == {"compile"}


def test_a_finished_run_compiles_no_step(tmp_path, compilations):
    _run(tmp_path / "run", devices=1)
    compilations.count.clear()
    _run(tmp_path / "run", devices=1)
    assert compilations.count["jit(step)"] == compilations.count["jit(health)"] == 0


def test_a_run_that_goes_on_compiles_no_initial_state(tmp_path, compilations):
    _run(tmp_path / "run", devices=1)
    compilations.count.clear()
    _run(tmp_path / "run", devices=1, train__steps=4)
    assert compilations.count["jit(step)"] == 2 and compilations.count["jit(initial_state)"] == 0


def test_programs_are_traced_one_after_the_other_and_compiled_side_by_side():
    """The first one is at the compiler before the second one has been traced, which others may precede."""
    begun, traced, together = [], [], threading.Barrier(3, timeout=60)
    asked = threading.Event()

    class Function:
        def __init__(self, name):
            self.name = name

        def lower(self):
            assert len(begun) == len(traced), "another one is being traced"
            begun.append(self.name)
            assert asked.wait(60)
            time.sleep(0.05)
            traced.append(self.name)
            return self

        def compile(self):
            together.wait()

    several = [CompileAhead({name: (Function(name), ()) for name in names}) for names in ("ab", "c")]
    asked.set()
    several[0].wait("a", "b")
    several[1].wait("c")
    assert traced == ["a", "c", "b"]
    assert not together.broken


def test_a_run_that_preflight_refuses_compiles_no_further(tmp_path, monkeypatch):
    compiled, traced, refused = [], threading.Event(), threading.Event()

    class Function:
        def lower(self, *arguments):
            traced.set()
            assert refused.wait(60)
            return self

        def compile(self):
            compiled.append(self)

    def refuse(*arguments):
        assert traced.wait(60)
        raise ConfigError([])

    monkeypatch.setattr(preflight, "before_run", refuse)
    run = Run(tiny_config(), tmp_path / "run", None, one_device())
    run.train_step = run.eval_step = Function()
    with pytest.raises(ConfigError):
        run.examine()
    refused.set()
    for thread in threading.enumerate():
        if thread.name.startswith("compile"):
            thread.join(60)
    assert compiled == []


def test_a_process_that_ends_while_programs_are_traced_does_not_hang():
    script = """
import time
from nsa_jax.train.compile_ahead import CompileAhead, while_tracing

class Function:
    def lower(self):
        time.sleep(1)
        return self
    def compile(self):
        pass

CompileAhead({name: (Function(), ()) for name in "abc"})
"""
    assert subprocess.run([sys.executable, "-c", script], timeout=60).returncode == 0


def test_a_start_that_fails_does_not_wait_for_the_compiler(tmp_path):
    """What is being compiled cannot be stopped, and takes up to a minute on GPUs; a normal exit would wait for it."""
    (tmp_path / "one.txt").write_text("too short")
    script = f"""
import time
from nsa_jax import trainer
from nsa_jax.train import prepared

class Function:
    def lower(self):
        return self
    def compile(self):
        print("compiling", flush=True)
        time.sleep(100)

prepared.first_programs = lambda *_: {{"train step": (Function(), ())}}
trainer.start(["train.py", "--config={tmp_path}/config.py", "--workdir={tmp_path}/run"])
"""
    settings = f"data__source='text', data__files=('{tmp_path}/one.txt',), compilation_cache_dir='{tmp_path}/compiled'"
    (tmp_path / "config.py").write_text(
        "from tests.train.tiny import tiny_config\n\ndef get_config():\n"
        f"    return tiny_config({settings}, data__cache_dir='{tmp_path}/cache', data__tokenizer='byte')\n"
    )
    began = time.monotonic()
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=Path(__file__).parents[2])
    assert done.returncode == 2 and "fewer than one row" in done.stderr and "compiling" in done.stdout, done.stderr
    assert time.monotonic() - began < 90


def test_what_python_is_told_for_tracing_is_taken_back():
    before = sys.getswitchinterval(), gc.isenabled()
    with pytest.raises(ConfigError), while_tracing():
        inside = sys.getswitchinterval(), gc.isenabled()
        raise ConfigError([])
    assert inside == (pytest.approx(5e-4), False) and (sys.getswitchinterval(), gc.isenabled()) == before
    one, two = while_tracing(), while_tracing()
    one.__enter__()
    two.__enter__()
    one.__exit__(None, None, None)  # of another thread, not the last to come
    assert (sys.getswitchinterval(), gc.isenabled()) == inside
    two.__exit__(None, None, None)
    assert (sys.getswitchinterval(), gc.isenabled()) == before


def test_an_error_of_the_compiler_is_that_of_the_call():
    def broken(x):
        raise TypeError("no such program")

    function, argument = jax.jit(broken), jnp.zeros(3)
    ahead = CompileAhead({"broken": (function, (argument,))})
    ahead.wait("broken", "one that was never asked for")
    with pytest.raises(TypeError, match="no such program"):
        function(argument)


def test_a_child_traces_by_itself():
    """It has no threads of its parent."""
    CompileAhead({"one": (jax.jit(jnp.sin), (jnp.zeros(3),))}).wait("one")
    child = os.fork()
    if child == 0:  # no JAX here: it does not survive a fork
        function = types.SimpleNamespace(lower=lambda: types.SimpleNamespace(compile=lambda: None))
        CompileAhead({"two": (function, ())}).wait("two")
        os._exit(0)
    for _ in range(600):
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            break
        time.sleep(0.1)
    else:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        pytest.fail("the child waits for a thread that it does not have")
    assert status == 0
