"""Compiled programs that later starts load without tracing the functions they were made of.

JAX's compilation cache finds a program by its text. Tracing a function and lowering its kernels to that text is Python,
and takes most of a start whose programs are all compiled already. A program is found here by what its text follows
from: the config and the other values that the function closes over, its arguments, devices, versions, options and
environment, and the contents of every Python file that was loaded when it was traced. If one of these differs, or a
file is loaded that was not, the function is traced, and JAX's cache still serves what it can.
"""

from __future__ import annotations

import contextlib
import copyreg
import dataclasses
import functools
import hashlib
import importlib.machinery
import json
import logging
import os
import pickle
import sys
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import zstandard
from jax.experimental import serialize_executable
from jax.experimental.layout import Layout
from jax.sharding import Mesh
from ml_collections import ConfigDict

from nsa_jax.devices import processor
from nsa_jax.ops import implementations
from nsa_jax.ops.kernels.range_attention import window_cudnn
from nsa_jax.ops.target import current_target
from nsa_jax.train.timing import process_start

logger = logging.getLogger("nsa_jax")

_DIGEST = 16  # bytes
_MOST_FILES = 64  # eight starts of a run that tests itself and measures health
_VARIABLES = ("XLA_", "JAX_", "NSA_JAX_", "TF_", "MOSAIC_", "TRITON_", "LD_LIBRARY_PATH")
# JAX sets these when it traces the first kernel for Hopper, to where its packages are. XLA needs them to load kernels.
_SET_BY_JAX = ("MOSAIC_GPU_CUDA_ROOT", "MOSAIC_GPU_RUNTIME_LIB_PATH", "MOSAIC_GPU_NVSHMEM_")
_EXTENSIONS = tuple(importlib.machinery.EXTENSION_SUFFIXES)
_STARTED = time.time() - (time.perf_counter() - process_start())  # seconds since 1970
_events = threading.local()  # heard: what JAX has told of while this thread compiles, or None


def _hear(event: str, *_: Any, **__: Any) -> None:
    """Listens to JAX, which reports an event in the thread that causes it."""
    if (heard := getattr(_events, "heard", None)) is not None:
        heard.add(event)


# From JAX 0.11 on, the types of arrays refer to this object, and are equal only if it is the same one. A pickle must
# not copy it: functions that take what a loaded program returns would be traced and compiled again.
copyreg.pickle(type(Layout.AUTO), lambda _: (getattr, (Layout, "AUTO")))

jax.monitoring.register_event_listener(_hear)
jax.monitoring.register_event_duration_secs_listener(_hear)


def compile_and_tell(lowered: Any) -> tuple[Any, bool]:
    """The compiled program, and whether it can be serialised.

    On CPUs, a program that JAX's cache loaded fails when it has been serialised again.
    """
    heard: set[str] = set()
    _events.heard = heard
    try:
        compiled = lowered.compile()
    finally:
        _events.heard = None
    passed_on = "/jax/core/compile/backend_compile_duration" in heard  # otherwise this process had the program
    just_now = passed_on and "/jax/compilation_cache/cache_hits" not in heard
    return compiled, just_now or current_target().is_gpu


class Program:
    """A jitted function, or what stands for it once `loaded` is set: the program for arguments of one layout."""

    def __init__(self, function: Any):
        self._function = function
        self.loaded: Callable | None = None
        # What JAX raises for arguments of other shapes or layouts, before anything runs. ValueError is for layouts in
        # the first call, and later also for failures of the device.
        self._misfit: tuple[type[Exception], ...] = (TypeError, ValueError)

    def __call__(self, *arguments: Any) -> Any:
        if self.loaded is not None:
            try:
                result = self.loaded(*arguments)
                self._misfit = (TypeError,)
                return result
            except self._misfit as error:
                logger.info("a program is traced again, since the stored one is for other arguments: %s", error)
                self.loaded = None
        return self._function(*arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._function, name)

    def _cache_size(self) -> int:
        return self._function._cache_size() + (self.loaded is not None)


@dataclasses.dataclass(frozen=True)
class Stored:
    """A stored program that has been found: `compile` loads it, as a lowered function is compiled."""

    path: Path
    header: dict[str, Any]
    data: bytes
    devices: tuple

    def compile(self) -> Callable:
        for name, value in self.header["environment"].items():
            os.environ.setdefault(name, value)
        program, in_tree, out_tree = pickle.loads(zstandard.decompress(self.data))
        client = self.devices[0].client
        return serialize_executable.deserialize_and_load(program, in_tree, out_tree, client, self.devices)

    def recall(self) -> None:
        """Records what tracing the function recorded."""
        implementations.recall(self.header["implementations"])

    def forget(self, error: Exception) -> None:
        """Deletes the file, which could not be loaded."""
        logger.info("the stored program of %s is compiled again: %s", self.header["name"], error)
        with contextlib.suppress(OSError):
            self.path.unlink()


@dataclasses.dataclass(frozen=True)
class ProgramStore:
    """Programs of functions that are decided by values and files alone, in files of a directory.

    Attributes:
      directory: of the files; it is made when the first one is written. Whoever can write it decides what is executed.
      values: whatever else the functions close over, as JSON values.
      devices: that the programs run on, all of this process.
    """

    directory: Path
    values: Any
    devices: tuple

    @classmethod
    def of_run(cls, config: ConfigDict, mesh: Mesh, closed_over: bytes) -> ProgramStore | None:
        """The store of a run beside JAX's compilation cache.

        None without that cache, or if it is no local directory; where the main module has no file that could change, as
        in a notebook; where JAX looks for NaN or writes out programs, for which it traces; where the calling thread has
        options of its own (a context such as `jax.default_matmul_precision`), which the threads that compile do not
        see; and for a run of several processes: XLA may have all of them measure the parts of a program together, so
        that each must compile it.

        Args:
          config: of the run.
          mesh: of its devices.
          closed_over: what its functions close over beside the config.
        """
        options = jax.config.values
        directory = options["jax_compilation_cache_dir"]
        enabled = options["jax_enable_compilation_cache"] and directory and "://" not in directory
        traces = any(options[f"jax_{name}"] for name in ("debug_nans", "debug_infs", "dump_ir_to"))
        if not enabled or traces or not hasattr(sys.modules["__main__"], "__file__") or jax.process_count() > 1:
            return None
        if options != _options_elsewhere():
            return None
        values = [config.to_json_best_effort(sort_keys=True), hashlib.blake2b(closed_over).hexdigest()]
        return cls(Path(directory) / "programs", values, tuple(mesh.devices.flat))

    def find(self, name: str, arguments: tuple) -> Stored | None:
        """The program of a function; None if there is none, or the code has changed since.

        Args:
          name: of the function.
          arguments: like those of its calls: arrays, or shapes with shardings.
        """
        path = self._path(name, arguments)
        try:
            content = path.read_bytes()
            digest, rest = content[:_DIGEST], content[_DIGEST:]
            if hashlib.blake2b(rest, digest_size=_DIGEST).digest() != digest:
                raise ValueError("its bytes are not those that were written")
            with contextlib.suppress(OSError):  # another account may have filled the directory
                os.utime(path)  # the files that are used last are kept
            length = int.from_bytes(rest[:8])
            header, data = json.loads(rest[8 : 8 + length]), rest[8 + length :]
            known = header["sources"]
            if not _sources().items() <= known.items() or any(_digest(path) != known[path] for path in known):
                return None
        except FileNotFoundError:
            return None
        except Exception as error:
            self._cannot("load", name, error)
            return None
        return Stored(path, header, data, self.devices)

    def serialise(self, name: str, compiled: Any) -> Any:
        """What `add` writes of a compiled program; None if it cannot be serialised.

        It must be serialised before its first call: on CPUs, a program with a sort cannot be afterwards.
        """
        try:
            return serialize_executable.serialize(compiled), implementations.remembered()
        except Exception as error:
            self._cannot("keep", name, error)
            return None

    def add(self, name: str, arguments: tuple, program: Any) -> None:
        """Writes what `serialise` has returned; what cannot be written is not kept."""
        try:
            sources = _sources()
            if not all(sources.values()):  # what this process has loaded may be older than the file
                return
            told = {"name": name, "sources": sources, "implementations": program[1]}
            header = json.dumps({**told, "environment": _variables(_SET_BY_JAX)}).encode()
            rest = len(header).to_bytes(8) + header + zstandard.compress(pickle.dumps(program[0]), 1)
            self.directory.mkdir(parents=True, exist_ok=True)
            self._leave_room()
            part = self.directory / f"{uuid.uuid4().hex}.part"
            try:
                part.write_bytes(hashlib.blake2b(rest, digest_size=_DIGEST).digest() + rest)
                os.replace(part, self._path(name, arguments))
            finally:
                part.unlink(missing_ok=True)
        except Exception as error:
            self._cannot("keep", name, error)

    def _leave_room(self) -> None:
        """Deletes files until another one is not too many, beginning with what was not used for longest."""
        used: dict[Path, float] = {}
        for path in self.directory.iterdir():
            with contextlib.suppress(FileNotFoundError):  # another thread or run has moved it
                used[path] = path.stat().st_mtime
        for path in sorted(used, key=lambda path: used[path])[: max(len(used) + 1 - _MOST_FILES, 0)]:
            path.unlink(missing_ok=True)

    def _cannot(self, what: str, name: str, error: Exception) -> None:
        logger.info("cannot %s the compiled program of %s in %s: %s", what, name, self.directory, error)

    def _path(self, name: str, arguments: tuple) -> Path:
        leaves, tree = jax.tree.flatten(arguments)
        told = [name, self.values, str(tree), [_layout(leaf) for leaf in leaves], _surroundings(self.devices)]
        text = json.dumps(told, sort_keys=True, default=str)
        return self.directory / hashlib.blake2b(text.encode(), digest_size=_DIGEST).hexdigest()


def _options_elsewhere() -> dict[str, Any]:
    """JAX's options as threads see them that have none of their own."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(lambda: jax.config.values).result()


def _layout(leaf: Any) -> list[Any]:
    sharding = getattr(leaf, "sharding", None)
    return [list(leaf.shape), str(leaf.dtype), bool(getattr(leaf, "weak_type", False)), str(sharding)]


def _surroundings(devices: tuple) -> Any:
    """What may change a program beside its function, arguments and code, as JSON values."""
    client = devices[0].client
    return [
        [sys.version, processor(), sys.path],
        _installed(tuple(sys.path)),
        [client.platform_version, window_cudnn.version(), str(current_target())],
        [[device.id, device.device_kind, device.process_index] for device in (*devices, *jax.devices())],
        {name: str(value) for name, value in jax.config.values.items()},
        {name: value for name, value in _variables(_VARIABLES).items() if not name.startswith(_SET_BY_JAX)},
    ]


def _variables(prefixes: tuple[str, ...]) -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(prefixes)}


@functools.cache
def _installed(path: tuple[str, ...]) -> list[str]:
    """Names and versions of the packages that are installed, compiled ones too."""
    folders = [Path(folder) for folder in path if os.path.isdir(folder)]
    return sorted(str(found) for folder in folders for found in folder.glob("*-info"))


def _sources() -> dict[str, str]:
    """Digests of the files of all modules that are loaded, and of the script that was started, by path."""
    files = {getattr(module, "__dict__", {}).get("__file__") for module in list(sys.modules.values())}
    if os.path.isfile(sys.argv[0]):  # a script that `python -m cProfile` runs is no module
        files.add(sys.argv[0])
    return {path: _digest(path) for path in sorted(os.path.abspath(file) for file in files if file)}


@functools.cache
def _digest(path: str) -> str:
    """Of a file's contents; of a compiled module its size and time. Empty if it changed since this process began."""
    try:
        found = os.stat(path)
        if max(found.st_mtime, found.st_ctime) > _STARTED:
            return ""
        if path.endswith(_EXTENSIONS):
            return f"{found.st_size} {found.st_mtime_ns}"
        return hashlib.blake2b(Path(path).read_bytes(), digest_size=_DIGEST).hexdigest()
    except OSError:
        return ""
