"""Programs that later starts load without tracing: the same ones, only where nothing that decides them has changed."""

import dataclasses
import functools
import importlib
import json
import logging
import os
import shutil
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from numpy.testing import assert_array_equal

from nsa_jax.exit_status import EXIT_AGAIN
from nsa_jax.ops import implementations
from nsa_jax.train import program_store
from nsa_jax.train.compile_ahead import CompileAhead
from nsa_jax.train.loop import Run
from nsa_jax.train.program_store import Program, ProgramStore

from .test_compile_ahead import PROGRAMS, compilations  # noqa: F401
from .tiny import rows, tiny_config

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def nothing_compiled_before():
    """What JAX's compilation cache has is not stored."""
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_enable_compilation_cache", True)
    compilation_cache.reset_cache()


@pytest.fixture(autouse=True)
def modules_of_files_that_are_there(monkeypatch):
    """Without what earlier tests loaded from files of their own: nothing is stored beside that."""
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__dict__", {}).get("__file__")
        if file and not program_store._digest(os.path.abspath(file)):
            monkeypatch.delitem(sys.modules, name)


@pytest.fixture
def store(tmp_path):
    return ProgramStore(tmp_path / "programs", ["values"], tuple(jax.devices()[:1]))


class _Traced:
    """A jitted function that counts how often it is traced."""

    def __init__(self, factor=2.0):
        self.count = 0

        def scaled(tree, x):
            self.count += 1
            return {"sum": tree["a"] + factor * x}, x.sum()

        self.program = Program(jax.jit(scaled, donate_argnums=0))

    def ahead(self, store, *arguments, name="scaled"):
        ahead = CompileAhead({name: (self.program, arguments)}, store=store)
        ahead.wait(name)
        for thread in ahead._threads._threads:
            thread.join(60)  # until it is written
        return self


def _arguments(size=4, dtype=jnp.float32):
    return {"a": jnp.ones(size, dtype)}, jnp.arange(size, dtype=dtype)


def test_a_later_start_traces_nothing_and_computes_the_same(store):
    first = _Traced().ahead(store, *_arguments())
    assert first.count == 1 and first.program.loaded is None and len(list(store.directory.iterdir())) == 1
    later = _Traced().ahead(store, *_arguments())
    assert later.count == 0 and later.program.loaded is not None and later.program._cache_size() == 1
    arguments = _arguments()
    outputs = jax.tree.map(np.asarray, (first.program(*_arguments()), later.program(*arguments)))
    jax.tree.map(assert_array_equal, *outputs)
    assert later.count == 0
    assert arguments[0]["a"].is_deleted() and not arguments[1].is_deleted()  # donated as the function says


def test_functions_take_its_results_as_those_of_the_traced_one(store):
    """What has been compiled for them is not traced again: with JAX 0.11 and later their types could differ."""
    first, later = (_Traced().ahead(store, *_arguments()) for _ in range(2))
    assert later.program.loaded is not None
    traced = []

    @jax.jit
    def after(tree, x):
        traced.append(x)
        return tree["sum"] + x

    after.lower(*first.program(*_arguments())).compile()
    assert_array_equal(after(*later.program(*_arguments())), 1 + 2 * np.arange(4.0) + 6)
    assert len(traced) == 1


def test_what_jax_sets_when_it_traces_a_kernel_is_set_before_a_program_is_loaded(store, monkeypatch):
    """XLA looks there for what kernels of Mosaic GPU call. Unset, as at the start, it leads to the same program."""
    for name in [name for name in os.environ if name.startswith("MOSAIC_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("MOSAIC_GPU_RUNTIME_LIB_PATH", "where it is")
    _Traced().ahead(store, *_arguments())
    monkeypatch.delenv("MOSAIC_GPU_RUNTIME_LIB_PATH")
    assert _Traced().ahead(store, *_arguments()).count == 0
    assert os.environ["MOSAIC_GPU_RUNTIME_LIB_PATH"] == "where it is"
    monkeypatch.setenv("MOSAIC_GPU_RUNTIME_LIB_PATH", "elsewhere")
    assert _Traced().ahead(store, *_arguments()).count == 0
    assert os.environ["MOSAIC_GPU_RUNTIME_LIB_PATH"] == "elsewhere"
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", "somewhere")
    assert _Traced().ahead(store, *_arguments()).count == 1


def test_arguments_that_the_program_is_not_for_are_served_by_the_function(store):
    _Traced().ahead(store, *_arguments())
    later = _Traced().ahead(store, *_arguments())
    assert_array_equal(later.program(*_arguments(6))[0]["sum"], 1 + 2 * np.arange(6.0))
    assert later.count == 1
    assert_array_equal(later.program(*_arguments(4))[0]["sum"], 1 + 2 * np.arange(4.0))


@pytest.mark.parametrize("what", ["nothing", "name", "values", "size", "dtype", "tree", "device", "variable", "option"])
def test_a_program_is_found_by_all_that_decides_it(store, monkeypatch, what):
    _Traced().ahead(store, *_arguments())
    other, arguments, name = store, _arguments(), "scaled"
    if what == "name":
        name = "other"
    elif what == "values":
        other = dataclasses.replace(store, values=["other"])
    elif what == "size":
        arguments = _arguments(5)
    elif what == "dtype":
        arguments = _arguments(dtype=jnp.bfloat16)
    elif what == "tree":
        arguments = {"a": arguments[0]["a"], "b": arguments[1]}, arguments[1]
    elif what == "device":
        if len(jax.devices()) < 2:
            pytest.skip("needs two devices")
        other = dataclasses.replace(store, devices=tuple(jax.devices()[1:2]))
    elif what == "variable":
        monkeypatch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", "") + " ")
    elif what == "option":
        jax.config.update("jax_default_matmul_precision", "highest")
    try:
        found = other.find(name, arguments)
    finally:
        jax.config.update("jax_default_matmul_precision", None)
    assert (found is not None) == (what == "nothing")


def test_what_a_device_raises_is_raised(store):
    """Not taken for arguments of other shapes, for which the function would be traced in the middle of a run."""
    later, failure = _Traced(), ValueError("RESOURCE_EXHAUSTED: no memory")

    def loaded(tree, x):
        if not tree:
            raise failure
        return "done"

    later.program.loaded = loaded
    assert later.program({"a": 1}, 2) == "done"
    with pytest.raises(ValueError, match="RESOURCE_EXHAUSTED"):
        later.program({}, 2)
    assert later.count == 0 and later.program.loaded is loaded


def test_a_program_that_cannot_be_written_leaves_nothing(store, monkeypatch, caplog):
    def fail(*_):
        raise OSError("no room")

    caplog.set_level(logging.INFO, "nsa_jax")
    monkeypatch.setattr(program_store.os, "replace", fail)
    _Traced().ahead(store, *_arguments())
    assert "no room" in caplog.text and not list(store.directory.iterdir())


def test_layouts_of_arguments_decide_too(store):
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:2]), ("data",))
    both = dataclasses.replace(store, devices=tuple(mesh.devices.flat))

    def arguments(spec):
        shape = jax.ShapeDtypeStruct((4,), jnp.float32, sharding=NamedSharding(mesh, spec))
        return {"a": shape}, shape

    _Traced().ahead(both, *arguments(P("data")))
    assert both.find("scaled", arguments(P("data"))) is not None
    assert both.find("scaled", arguments(P())) is None
    later = _Traced().ahead(both, *arguments(P("data")))
    value = jax.device_put(np.arange(4.0, dtype=np.float32), NamedSharding(mesh, P("data")))
    result = later.program({"a": value + 0}, value)[0]["sum"]
    assert later.count == 0 and result.sharding == value.sharding
    assert_array_equal(result, 3 * np.arange(4.0))


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A module of a user's, as it was before this process began."""
    path = tmp_path / "some_module_of_a_user.py"
    path.write_text("FACTOR = 2.0\n")
    monkeypatch.setattr(program_store, "_STARTED", time.time() + 3600)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module(path.stem)
    yield path
    del sys.modules[path.stem]
    program_store._digest.cache_clear()


def test_a_changed_file_of_any_module_has_the_function_traced(store, module):
    program_store._digest.cache_clear()
    _Traced().ahead(store, *_arguments())
    assert store.find("scaled", _arguments()) is not None
    before = module.stat()
    module.write_text("FACTOR = 3.0\n")
    os.utime(module, ns=(before.st_atime_ns, before.st_mtime_ns))  # as long, and of the same time
    program_store._digest.cache_clear()  # another process
    assert store.find("scaled", _arguments()) is None
    _Traced().ahead(store, *_arguments())  # writes the program anew
    assert store.find("scaled", _arguments()) is not None


def test_a_module_that_was_not_loaded_before_has_the_function_traced(store, module, tmp_path):
    """It may have changed what the others hold."""
    program_store._digest.cache_clear()
    _Traced().ahead(store, *_arguments())
    assert store.find("scaled", _arguments()) is not None
    (tmp_path / "another_module_of_a_user.py").write_text("import some_module_of_a_user as m\nm.FACTOR = 5.0\n")
    importlib.import_module("another_module_of_a_user")
    assert store.find("scaled", _arguments()) is None
    del sys.modules["another_module_of_a_user"]
    assert store.find("scaled", _arguments()) is not None


def test_a_changed_script_that_is_no_module_has_the_function_traced(store, monkeypatch, tmp_path):
    """Such as one that `python -m cProfile` runs, whose main module is cProfile's before Python 3.12."""
    script = tmp_path / "script.py"
    script.write_text("FACTOR = 2.0\n")
    monkeypatch.setattr(program_store, "_STARTED", time.time() + 3600)
    monkeypatch.setattr(sys, "argv", [str(script), "--an-option"])
    program_store._digest.cache_clear()
    _Traced().ahead(store, *_arguments())
    assert store.find("scaled", _arguments()) is not None
    script.write_text("FACTOR = 3.0\n")
    program_store._digest.cache_clear()  # another process
    assert store.find("scaled", _arguments()) is None
    program_store._digest.cache_clear()


def test_what_changed_since_the_process_began_is_neither_kept_nor_loaded(store, module, monkeypatch):
    """What the process has loaded may be older than the file."""
    program_store._digest.cache_clear()
    monkeypatch.setattr(program_store, "_STARTED", module.stat().st_ctime - 0.001)
    _Traced().ahead(store, *_arguments())
    assert not store.directory.exists()
    program_store._digest.cache_clear()
    monkeypatch.setattr(program_store, "_STARTED", time.time() + 3600)
    _Traced().ahead(store, *_arguments())
    assert store.find("scaled", _arguments()) is not None
    program_store._digest.cache_clear()
    monkeypatch.setattr(program_store, "_STARTED", module.stat().st_ctime - 0.001)
    assert store.find("scaled", _arguments()) is None


def test_a_program_is_serialised_before_it_can_be_called(store, monkeypatch):
    """A CPU's program with a sort cannot be serialised once it has run."""
    waited, early, serialise = threading.Event(), [], ProgramStore.serialise

    def slowly(self, name, compiled):
        early.append(not waited.wait(0.5))
        return serialise(self, name, compiled)

    monkeypatch.setattr(ProgramStore, "serialise", slowly)
    ahead = CompileAhead({"scaled": (_Traced().program, _arguments())}, store=store)
    ahead.wait("scaled")
    waited.set()
    assert early == [True]


def test_what_jax_has_kept_is_not_written_again(store, tmp_path):
    """A program that XLA loaded, written out by it again, fails on CPUs when it is called."""
    jax.config.update("jax_enable_compilation_cache", True)
    names = "jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs"
    before = {name: jax.config.values[name] for name in names}
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "jax"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    compilation_cache.reset_cache()
    try:
        _Traced().ahead(store, *_arguments())
        (path,) = store.directory.iterdir()
        path.unlink()
        again = _Traced().ahead(store, *_arguments())
        assert again.count == 1 and not path.exists()
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


@pytest.mark.parametrize("damage", ["empty", "cut", "flipped", "header", "another program"])
def test_a_damaged_file_is_compiled_again(store, damage, caplog):
    _Traced().ahead(store, *_arguments())
    (path,) = store.directory.iterdir()
    data = bytearray(path.read_bytes())
    start = 24 + int.from_bytes(data[16:24])
    if damage == "empty":
        data = b""
    elif damage == "cut":
        del data[-100:]
    elif damage == "flipped":
        data[start + 50] ^= 1
    elif damage == "header":
        data[40] ^= 1
    else:  # whole, and loads as something else
        rest = data[16:start] + program_store.zstandard.compress(b"not a pickled program")
        data = program_store.hashlib.blake2b(rest, digest_size=16).digest() + rest
    path.write_bytes(data)
    caplog.set_level(logging.INFO, "nsa_jax")
    again = _Traced().ahead(store, *_arguments())
    assert again.count == 1 and "scaled" in caplog.text
    assert_array_equal(again.program(*_arguments())[0]["sum"], 1 + 2 * np.arange(4.0))
    assert _Traced().ahead(store, *_arguments()).count == 0  # it was written again


def test_a_directory_that_cannot_be_written_costs_a_line(store, caplog):
    store.directory.write_text("a file in its place")
    caplog.set_level(logging.INFO, "nsa_jax")
    first = _Traced().ahead(store, *_arguments())
    assert first.count == 1 and "cannot keep the compiled program of scaled" in caplog.text
    assert_array_equal(first.program(*_arguments())[0]["sum"], 1 + 2 * np.arange(4.0))


def test_the_files_used_last_stay(store, monkeypatch):
    monkeypatch.setattr(program_store, "_MOST_FILES", 2)
    sizes = {}
    for age, size in enumerate((3, 4, 5)):
        _Traced().ahead(store, *_arguments(size))
        sizes[size] = store._path("scaled", _arguments(size))
        if size < 5:
            os.utime(sizes[size], (age, age))
        if size == 4:
            assert store.find("scaled", _arguments(3)) is not None  # used after the other
    assert [size for size, path in sizes.items() if path.exists()] == [3, 5]


def test_what_tracing_records_is_recorded_when_a_program_is_loaded(store, monkeypatch):
    monkeypatch.setattr(implementations, "_SERVED", {"window_attention": "pallas"})
    monkeypatch.setattr(implementations, "_WARNED", {"selected_attention runs as 'xla' on this GPU"})
    _Traced().ahead(store, *_arguments())
    monkeypatch.setattr(implementations, "_SERVED", {})
    monkeypatch.setattr(implementations, "_WARNED", set())
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        _Traced().ahead(store, *_arguments())
    assert implementations.implementations_served() == {"window_attention": "pallas"}
    assert [str(warning.message) for warning in given] == ["selected_attention runs as 'xla' on this GPU"]


def test_there_is_a_store_only_where_compiled_programs_are_kept(monkeypatch, tmp_path):
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:1]), ("data",))
    values = jax.config.values | {"jax_enable_compilation_cache": True}

    monkeypatch.setattr(sys.modules["__main__"], "__file__", "train.py", raising=False)

    def made(**changes):
        monkeypatch.setattr(type(jax.config), "values", values | changes)
        return ProgramStore.of_run(tiny_config(), mesh, b"")

    assert made(jax_compilation_cache_dir=str(tmp_path)).directory == tmp_path / "programs"
    assert made(jax_compilation_cache_dir=None) is None
    assert made(jax_compilation_cache_dir="gs://bucket/programs") is None
    assert made(jax_compilation_cache_dir=str(tmp_path), jax_enable_compilation_cache=False) is None
    assert made(jax_compilation_cache_dir=str(tmp_path), jax_debug_nans=True) is None  # its errors name operations
    with monkeypatch.context() as several:
        several.setattr(jax, "process_count", lambda: 2)
        assert made(jax_compilation_cache_dir=str(tmp_path)) is None
    monkeypatch.delattr(sys.modules["__main__"], "__file__")  # as in a notebook
    assert made(jax_compilation_cache_dir=str(tmp_path)) is None


def test_options_of_the_calling_thread_alone_are_those_of_every_start(tmp_path, monkeypatch):
    """The threads that compile do not see them: a stored program would be one of other options."""
    monkeypatch.setattr(sys.modules["__main__"], "__file__", "train.py", raising=False)
    values = jax.config.values
    monkeypatch.setattr(
        type(jax.config),
        "values",
        property(
            lambda self: (
                {name: holder.value for name, holder in self._value_holders.items()}
                | {"jax_enable_compilation_cache": True, "jax_compilation_cache_dir": str(tmp_path)}
            )
        ),
    )
    assert values.keys() == jax.config.values.keys()
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:1]), ("data",))
    assert ProgramStore.of_run(tiny_config(), mesh, b"") is not None
    for context in (jax.default_matmul_precision("highest"), jax.threefry_partitionable(False)):
        with context:
            assert ProgramStore.of_run(tiny_config(), mesh, b"") is None
    assert ProgramStore.of_run(tiny_config(), mesh, b"") is not None


def _train(workdir, programs, devices, **changes):
    settings = dict(train__steps=3, train__eval_every=2, train__eval_batches=1, train__save_every=2, train__log_every=1)
    config = tiny_config(guards__health=True, **settings | changes)
    run = Run(config, workdir, None, jax.devices()[:devices])
    run._store = ProgramStore(programs, [config.to_json()], tuple(jax.devices()[:devices]))
    run.examine()
    run.run()
    ignored = ("time", "perf/", "memory/", "goodput/")
    return [
        {name: value for name, value in json.loads(line).items() if not name.startswith(ignored)}
        for name in ("metrics.jsonl", "health.jsonl")
        for line in (workdir / name).read_text().splitlines()
    ]


def _wait_for(programs, count):
    for _ in range(600):
        if sum(not path.name.endswith(".part") for path in programs.glob("*")) >= count:
            return
        time.sleep(0.1)
    raise AssertionError(f"{len(list(programs.glob('*')))} programs, not {count}")


ONE = dict(optim__name="muon", train__ema_decay=0.9, guards__skip_spikes=3, train__offload_optimizer=True)
OPTIONS = {
    "one_device": dict(devices=1, **ONE),
    "fsdp": dict(devices=2, mesh__fsdp=2, train__grad_accum=2, train__selection_loss=1.0),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_a_second_start_compiles_none_of_its_programs_and_trains_alike(tmp_path, compilations, name):  # noqa: F811
    first = _train(tmp_path / "first", tmp_path / "programs", **OPTIONS[name])
    _wait_for(tmp_path / "programs", 1 + sum(PROGRAMS.values()))
    compilations.count.clear()
    second = _train(tmp_path / "second", tmp_path / "programs", **OPTIONS[name])
    assert not {name: count for name, count in compilations.count.items() if name in PROGRAMS}
    assert second == first


@pytest.fixture
def start(tmp_path):
    """Starts `train.py` with a config file in a process of its own; returns which functions it has traced."""

    def start(config, workdir, until=None, **variables):
        """With `until` the run is asked to stop after that step."""
        time.sleep(0.05)  # when a process began is known to 0.01 s
        environment = {
            **os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
            "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "compiled"), "XLA_FLAGS": "", "JAX_LOG_COMPILES": "1",
            **variables,
        }  # fmt: skip
        log = tmp_path / "log"
        command = [sys.executable, "train.py", f"--config={config}", f"--workdir={workdir}"]
        with log.open("w") as file, subprocess.Popen(command, cwd=ROOT, env=environment, stderr=file) as process:
            while until and process.poll() is None:
                if (workdir / "metrics.jsonl").exists() and max(rows(workdir), default=0) >= until:
                    process.terminate()
                    break
                time.sleep(0.1)
        text = log.read_text()
        assert process.returncode == (EXIT_AGAIN if until else 0), text[-2000:]
        names = ("step", "initial_state", "gradient", "lists", "forward", "health")
        return {name for name in names if f"Finished tracing {name} for jit" in text}

    return start


def _write(path, fields):
    path.write_text(
        f"from tests.train.tiny import tiny_config\n\ndef get_config():\n    return tiny_config({fields})\n"
    )
    return path


@pytest.mark.gpu
def test_gpu_later_starts_trace_nothing_and_train_alike(tmp_path, start):
    """Programs that XLA compiled, and then those that JAX's cache has kept."""
    fields = (
        "model__implementation='auto', model__head_dim=64, model__compute_dtype='bfloat16', guards__health=True, "
        "train__steps=3, train__log_every=1, train__eval_every=2, train__eval_batches=1, train__save_every=2"
    )
    config = _write(tmp_path / "config.py", fields)
    programs = tmp_path / "compiled" / "programs"

    def losses(workdir):
        return [rows(tmp_path / workdir)[step]["train/loss"] for step in (1, 2, 3)]

    def trace(workdir):
        return start(config, tmp_path / workdir, XLA_PYTHON_CLIENT_PREALLOCATE="false")

    everything = {"step", "initial_state", "gradient", "lists", "forward", "health"}
    assert trace("first") == everything
    assert trace("second") == set()
    shutil.rmtree(programs)
    assert trace("third") == everything
    assert trace("fourth") == set()
    assert losses("first") == losses("second") == losses("third") == losses("fourth")


@pytest.mark.slow
def test_the_trainer_loads_them_until_its_config_file_changes(tmp_path, start):
    """Of `train.py` itself, stopped and continued: a comment in the config's file is code that has changed."""
    config = _write(tmp_path / "config.py", "preflight__selftest=False, train__steps=300, train__save_every=50")
    trace = functools.partial(start, config, JAX_PLATFORMS="cpu", JAX_DISABLE_MOST_OPTIMIZATIONS="1")
    assert trace(tmp_path / "run", until=20) == {"step", "initial_state"}
    assert trace(tmp_path / "run") == set()
    assert max(rows(tmp_path / "run")) == 300
    assert len(json.loads((tmp_path / "run" / "goodput.json").read_text())["starts"]) == 2
    assert trace(tmp_path / "another") == set()
    config.write_text(config.read_text() + "# a comment\n")
    assert trace(tmp_path / "third") == {"step", "initial_state"}
