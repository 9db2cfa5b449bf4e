"""What `pip install` gives: a small operator, extras that are named where they are missing, and the command nsa-jax."""

import functools
import importlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from nsa_jax import cli, trainer
from nsa_jax.extras import hidden

ROOT = Path(__file__).parents[1]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

# A process in which only the operator's packages, and what those need, can be imported.
OPERATOR_ALONE = """
import importlib.abc, sys

class Blocker(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in BLOCKED:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocker())
"""
BLOCKED = (
    "absl chex datasets filelock flax grain huggingface_hub matplotlib ml_collections optax orbax plotly rich "
    "safetensors tensorboardX tokenizers zstandard"
).split()


def run(*arguments, cwd=None, path=ROOT, **environment):
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(path), **environment}
    return subprocess.run([str(a) for a in arguments], cwd=cwd, env=env, capture_output=True, text=True, timeout=300)


def alone(code):
    return run(sys.executable, "-c", f"BLOCKED = {BLOCKED!r}\n{OPERATOR_ALONE}\n{code}")


def packages(requirements):
    return {re.split(r"[^\w.-]", text, maxsplit=1)[0] for text in requirements}


def test_the_operator_needs_three_packages_and_runs_without_the_extras():
    assert packages(SETTINGS["dependencies"]) == {"jax", "jaxtyping", "numpy"}
    others = packages(SETTINGS["optional-dependencies"]["train"] + SETTINGS["optional-dependencies"]["nn"])
    imported = {"absl-py": "absl", "orbax-checkpoint": "orbax"}
    assert {imported.get(name, name) for name in others} - {"nsa_jax"} == set(BLOCKED) - {"plotly"}
    done = alone("""
import jax, jax.numpy as jnp, nsa_jax
from nsa_jax.ops.rope import rope
config = nsa_jax.NSAConfig(8, 4, 8, 3, 1, 2, 16)
query, key = jnp.ones((1, 64, 4, 8)), jnp.ones((1, 64, 2, 8))
compressed = nsa_jax.mean_compress(key, config=config)
query = rope(query, jnp.arange(64), 1e4)
out = nsa_jax.nsa_attention(query, compressed, compressed, key, key, key, key, jnp.ones((1, 64, 4, 3)), config=config)
print(out.shape, nsa_jax.__version__)
""")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("(1, 64, 4, 8) ")


@pytest.mark.parametrize(
    ("code", "extra"),
    [
        ("import nsa_jax.nn", "nn"),
        ("import nsa_jax; nsa_jax.load('x')", "train"),
        ("import nsa_jax.train", "train"),
        ("import nsa_jax.data", "train"),
        ("from nsa_jax import inspect", "train"),
    ],
)
def test_what_is_missing_is_named_with_its_extra(code, extra):
    done = alone(code)
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1 and f'is not installed: pip install "nsa_jax[{extra}]"' in last, done.stderr
    assert any(f"the package {name} " in last for name in BLOCKED)


@pytest.mark.parametrize("command", ["train quickstart", "generate runs/a", "report runs/a"])
def test_a_command_without_its_extra_is_one_line(command):
    done = alone(f"from nsa_jax import cli; sys.exit(cli.main({command.split()!r}))")
    extra = "report" if command.startswith("report") else "train"
    lines = [line for line in done.stderr.splitlines() if "cuda" not in line and "absl::" not in line]
    assert done.returncode == 2 and len(lines) == 1 and f"nsa_jax[{extra}]" in lines[0], done.stderr


def test_every_command_reaches_its_program_with_its_arguments(monkeypatch):
    called = []
    monkeypatch.setattr(cli.signal, "signal", lambda *_: None)
    monkeypatch.setattr(trainer, "start", lambda argv: called.append(argv) or sys.exit(7))
    for command, expected in (
        (["train", "toy", "--profile=1:2"], ["nsa-jax train", "--config=toy", "--profile=1:2"]),
        (["train", "--config=a.py"], ["nsa-jax train", "--config=a.py"]),
        (["preflight", "toy", "--devices=8"], ["nsa-jax preflight", "--config=toy", "--devices=8", "--preflight"]),
    ):
        with pytest.raises(SystemExit) as status:
            cli.main(command)
        assert status.value.code == 7 and called.pop() == expected
    for name in cli.TOOLS:
        module = importlib.import_module(cli._MODULES.get(name, f"nsa_jax.{name}"))
        monkeypatch.setattr(module, "main", lambda arguments: called.append(arguments) or 5)
        assert cli.main([name, "runs/a", "--x"]) == 5 and called.pop() == ["runs/a", "--x"]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The files of a wheel and an sdist, and a folder in which the wheel is installed."""
    folder = tmp_path_factory.mktemp("built")
    source = folder / "source"
    for name in ("nsa_jax", "configs"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = f"from setuptools import build_meta as b; print(b.build_SDIST({str(folder)!r}))"
    names = []
    for kind in ("sdist", "wheel"):
        done = run(sys.executable, "-c", build.replace("SDIST", kind), cwd=source)
        assert done.returncode == 0, done.stderr
        names.append(folder / done.stdout.split()[-1])
    done = run(
        *(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"),
        *("--disable-pip-version-check", "--target", folder / "installed", names[1]),
    )
    assert done.returncode == 0, done.stderr
    return names[0], names[1], folder / "installed"


def test_wheel_and_sdist_hold_what_is_needed(built):
    sdist, wheel, _ = built
    inside = set(zipfile.ZipFile(wheel).namelist())
    code = {str(path.relative_to(ROOT)) for path in (ROOT / "nsa_jax").rglob("*") if path.is_file()}
    code = {name for name in code if "__pycache__" not in name}
    configs = {f"nsa_jax/configs/{path.name}" for path in (ROOT / "configs").glob("*.py")}
    assert len(configs) >= 6 and "nsa_jax/py.typed" in code
    assert {name for name in inside if ".dist-info/" not in name} == code | configs
    with tarfile.open(sdist) as archive:
        kept = {name.partition("/")[2] for name in archive.getnames()}
    assert {"setup.py", "LICENSE", "configs/quickstart.py"} | code <= kept
    assert wheel.stat().st_size < 2e6


def test_an_installed_package_trains_a_config_by_its_name_outside_of_the_repository(built, tmp_path):
    installed = built[2]
    command = installed / "bin" / "nsa-jax"
    settings = dict(cwd=tmp_path, path=installed, NSA_JAX_CACHE=str(tmp_path / "cache"))
    settings |= dict(JAX_DISABLE_MOST_OPTIMIZATIONS="True")
    small = ["--config.train.steps=2", "--config.train.batch_size=8", "--config.train.eval_every=0"]
    small += [
        "--config.train.log_every=1",
        "--config.optim.warmup_steps=1",
        "--config.model.num_layers=1",
        "--config.preflight.selftest=False",
    ]
    done = run(command, "train", "recall", *small, **settings)
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "runs" / "recall" / "summary.json").is_file()
    done = run(command, "train", "quickstrat", **settings)
    names = "a100_prod, extend, h200_long, nsa_1b, nsa_8b, quickstart, recall, toy"
    assert done.returncode == 2 and f"one of {names}" in done.stderr
    done = run(command, "trian", **settings)
    assert done.returncode == 2 and "choose from train, preflight, generate" in done.stderr
    done = run(command, "--version", **settings)
    assert done.stdout.strip() == SETTINGS["version"]
    done = run(command, "export", "runs/recall", "exported", **settings)
    assert done.returncode == 0 and (tmp_path / "exported" / "config.json").is_file(), done.stderr[-2000:]


def test_a_hidden_package_is_hidden_from_one_thread_alone(tmp_path, monkeypatch):
    (tmp_path / "shy_package.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    load = functools.partial(importlib.import_module, "shy_package")
    with hidden("shy_package"), ThreadPoolExecutor(1) as others:
        with pytest.raises(ModuleNotFoundError, match="shy_package"):
            load()
        module = others.submit(load).result()
        assert load() is module  # it is no longer to be found, but known
    del sys.modules["shy_package"]
    assert load() is not module
