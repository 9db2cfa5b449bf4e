"""Shared set-up: eight virtual CPU devices, or the GPU if there is one; a compilation cache; parsed absl flags."""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import tempfile
from importlib.metadata import version
from pathlib import Path

# Everything here must happen before jax is imported.
HAS_GPU = shutil.which("nvidia-smi") is not None and os.environ.get("JAX_PLATFORMS", "") != "cpu"
if not HAS_GPU:
    os.environ["JAX_PLATFORMS"] = "cpu"
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()
# Programs of the tests are compiled for much longer than they run. JAX 0.12 has no flag for its fusion emitters; under
# JAX 0.10 they are half of the time of a compilation, and runs in processes of their own meet them.
# XLA's default scheduler leaves independent collectives unordered. On few cores the devices enter them in different
# orders, wait for each other, and the process is aborted: a sharded step of Muon in 11 of 15 runs, without it in none.
for _flag, _here in (
    ("--xla_cpu_enable_concurrency_optimized_scheduler=false", True),
    ("--xla_cpu_parallel_codegen_split_count=1", True),
    ("--xla_cpu_use_fusion_emitters=false", version("jax").startswith("0.10.")),
):
    if _here and _flag.partition("=")[0] not in os.environ["XLA_FLAGS"]:
        os.environ["XLA_FLAGS"] += f" {_flag}"
# By default XLA has one thread per core. A device that waits in a collective occupies one.
os.environ.setdefault("PJRT_NPROC", "32")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import jax  # noqa: E402
import pytest  # noqa: E402
from absl import flags  # noqa: E402

# Tracing makes so many small objects that Python would look for garbage every few milliseconds.
gc.set_threshold(50_000, 20, 20)

# One folder per jax version: entries of another version are never read, only kept.
jax.config.update(
    "jax_compilation_cache_dir",
    os.path.join(tempfile.gettempdir(), f"nsa_jax_test_cache_{os.getuid()}_{jax.__version__}"),
)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)

# grain's worker processes refuse to start while absl's flags are unparsed.
if not flags.FLAGS.is_parsed():
    flags.FLAGS(["pytest"], known_only=True)


# Folders whose modules are compiled quickly as a whole, and those of them that read programs for GPUs, take times, or
# look at the memory or the last bits of what an optimized program computes.
QUICK_FOLDERS = ("chaos", "hf", "nn", "ops", "tools", "train")
AS_USUAL = (
    "test_deterministic", "test_memory", "test_mesh_traffic", "test_preflight", "test_scaling", "test_self_attention",
)  # fmt: skip


@contextlib.contextmanager
def _few_optimizations(few=not HAS_GPU):
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", few)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture
def quick_compilation():
    """XLA leaves most optimizations out: an interpreted kernel is compiled for much longer than it runs."""
    with _few_optimizations():
        yield


@pytest.fixture
def usual_compilation():
    """In a folder that is compiled quickly: a test that reads a program for GPUs, or needs what users would get."""
    with _few_optimizations(False):
        yield


@pytest.fixture(autouse=True, scope="module")
def quick_compilation_of_folders(request):
    """The same for models that take a few steps: a fully optimized step is compiled for four times as long."""
    if request.path.parent.name not in QUICK_FOLDERS or request.path.stem in AS_USUAL:
        yield
        return
    with _few_optimizations():
        yield


@pytest.fixture(autouse=True, scope="module")
def few_mapped_areas():
    """Drops compiled programs before they take the 65,530 areas of memory that Linux lets a process map.

    Each program on a CPU takes several; the program that gets none ends the process with a fatal error.
    """
    yield
    if os.path.exists("/proc/self/maps"):
        with open("/proc/self/maps") as areas:
            mapped = sum(1 for _ in areas)
        if mapped > 12_000:
            gc.unfreeze()
            jax.clear_caches()


@pytest.fixture(autouse=True, scope="module")
def quick_collections():
    """Leaves what earlier modules left out of garbage collections, which would look at a million objects each time."""
    yield
    gc.collect()
    gc.freeze()


# Files that take longest begin first: one that began last would leave the other processes without work.
LONG = (
    "test_offload", "test_aot", "test_cache", "test_decode_attention", "test_projection", "test_faults_in_runs",
    "test_mesh_traffic", "test_compile_ahead", "test_chaos", "test_distributed",
)  # fmt: skip


# What `make test` leaves to `make test-slow` beside tests that are marked: how their node ids begin.
_SLOW_FILE = Path(__file__).with_name("slow.txt")
SLOW = tuple(line for line in _SLOW_FILE.read_text().splitlines() if line and not line.startswith("#"))


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their marks
def pytest_collection_modifyitems(config, items):
    for item in items:
        if item.nodeid.startswith(SLOW):
            item.add_marker(pytest.mark.slow)
    if config.args == config.getini("testpaths"):  # all of them
        gone = [line for line in SLOW if not any(item.nodeid.startswith(line) for item in items)]
        if gone:
            raise pytest.UsageError(f"{_SLOW_FILE} names tests that are not there: {gone}")
    items.sort(key=lambda item: LONG.index(item.path.stem) if item.path.stem in LONG else len(LONG))
    if any(device.platform == "gpu" for device in jax.devices()):
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))
