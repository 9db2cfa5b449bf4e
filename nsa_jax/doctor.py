"""What this machine has and what will serve the operator: one screen, to paste into an issue.

    nsa-jax doctor
    python -m nsa_jax.doctor

It needs no extra. The exit status is 0, or 1 if something is wrong.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp

from nsa_jax.devices import choose_platform, has_accelerator
from nsa_jax.extras import installed_version
from nsa_jax.ops.implementations import forget_implementations_served, implementations_served
from nsa_jax.ops.self_attention import nsa_self_attention
from nsa_jax.ops.target import current_target

_PACKAGES = ("jax", "jaxlib", "numpy", "flax", "optax", "orbax-checkpoint", "grain")
_PLUGIN = re.compile(r"(jax-(cuda|rocm)\d*-(plugin|pjrt)|nvidia-(cuda-runtime|cudnn|nccl|cuda-nvcc)(-cu\d+)?)$")
_EXTRAS = ("nn", "train", "report", "eval", "remote", "wandb", "mlflow", "aot")
_VARIABLES = (
    *("JAX_PLATFORMS", "XLA_FLAGS", "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"),
    *("CUDA_VISIBLE_DEVICES", "NSA_JAX_CACHE"),
)
_TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2}  # of the output; matmuls of float32 on a GPU may use TF32

Lines = list[tuple[str, str]]


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _named(packages: Sequence[str]) -> str:
    return ", ".join(f"{name} {version}" for name in packages if (version := _version(name)))


def _plugins() -> list[str]:
    # What an interrupted installation leaves behind has no name.
    found = [name for dist in importlib.metadata.distributions() if (name := dist.metadata["Name"])]
    return sorted(name for name in {name.lower().replace("_", "-") for name in found} if _PLUGIN.match(name))


def missing_of(extra: str) -> list[str] | None:
    """The packages of an extra that are not installed; None if the library itself is not, or does not tell."""
    try:
        required = importlib.metadata.requires("nsa_jax") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    names = [re.match(r"[\w.-]+", line) for line in required if re.search(rf"extra == ['\"]{extra}['\"]", line)]
    found = {name.group() for name in names if name}
    if not found:
        return None
    return sorted(name for name in found if name.replace("-", "_") != "nsa_jax" and _version(name) is None)


def _extras() -> str:
    parts = []
    for name in _EXTRAS:
        missing = missing_of(name)
        if missing is not None:
            parts.append(f"{name} without {', '.join(missing)}" if missing else name)
    return "; ".join(parts) or "unknown: nsa_jax is run from its sources"


def _gpus() -> Lines:
    """What the driver says, without JAX."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version,compute_cap", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20)
        plain = subprocess.run(query[:1], capture_output=True, text=True, timeout=20).stdout
    except FileNotFoundError:
        return [("GPU", "no nvidia-smi" + ("" if has_accelerator() else ", and no device or driver of a GPU"))]
    except (OSError, subprocess.SubprocessError) as error:
        return [("GPU", f"nvidia-smi does not answer ({type(error).__name__})")]
    if done.returncode:
        said = (done.stdout + done.stderr).strip() or f"status {done.returncode}"
        return [("GPU", f"nvidia-smi: {said.splitlines()[0]}")]
    cuda = re.search(r"CUDA Version: *([\d.]+)", plain)
    cards = [line.strip() for line in done.stdout.splitlines() if line.strip()]
    lines = [("GPU", f"{cards.count(card)} x {card}") for card in dict.fromkeys(cards)]
    return [*lines, ("driver's CUDA", cuda.group(1) if cuda else "unknown")]


def _disk(path: str) -> str:
    try:
        whole = Path(path).expanduser().absolute()
        existing = next(parent for parent in (whole, *whole.parents) if parent.exists())
        usage = shutil.disk_usage(existing)
    except (OSError, RuntimeError) as error:  # no permission, no such user, or the directory has been removed
        return f"{path}: {getattr(error, 'strerror', None) or error}"
    return f"{whole}: {usage.free / 2**30:,.1f} GiB free of {usage.total / 2**30:,.1f}"


def tiny_step() -> tuple[str, str | None]:
    """Forward and backward pass of the operator on JAX's first device, compared with the reference.

    Returns:
      A line about it with what served, and what is wrong, if something is.
    """
    forget_implementations_served()
    dtype = "bfloat16" if current_target().is_gpu else "float32"
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = ((1, 1024, 4, 64), (1, 1024, 1, 64), (1, 1024, 1, 64), (1, 1024, 4, 3))
    arrays = [jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes, strict=True)]

    def loss(query, key, value, gates):
        out = nsa_self_attention(query, key, value, gates)
        return (out.astype(jnp.float32) ** 2).mean(), out

    step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2, 3), has_aux=True))
    start = time.perf_counter()
    (_, out), gradients = jax.block_until_ready(step(*arrays))
    first = time.perf_counter() - start
    start = time.perf_counter()
    jax.block_until_ready(step(*arrays))
    again = time.perf_counter() - start
    served = ", ".join(sorted(set(implementations_served().values())))
    wanted = nsa_self_attention(*(x.astype(jnp.float32) for x in arrays), implementation="reference")
    error = float(jnp.abs(out.astype(jnp.float32) - wanted).max())
    times = f"{first:.1f} s with compilation, then {1e3 * again:.1f} ms"
    line = f"by {served}, 1,024 tokens, {dtype}: {times}; off by {error:.1e}"
    if not error <= _TOLERANCE[dtype]:
        return line, f"the operator is off by {error:.1e}, more than {_TOLERANCE[dtype]:.0e}: please report it"
    if not all(bool(jnp.isfinite(leaf.astype(jnp.float32)).all()) for leaf in gradients):
        return line, "gradients of the operator are not finite: please report it"
    return line, None


def _checked(work: Callable[[], tuple[str, str | None]], name: str) -> tuple[str, str | None]:
    """Whatever a broken installation raises is a finding, on one line."""
    try:
        return work()
    except Exception as error:
        text = " ".join(str(error).split())[:300]
        return "FAILED", ": ".join(filter(None, (name, type(error).__name__, text)))


def _devices() -> tuple[str, str | None]:
    devices = jax.devices()
    target = current_target()
    capability = f", compute capability {'.'.join(map(str, target.compute_capability or ()))}" if target.is_gpu else ""
    return f"{len(devices)} x {devices[0].device_kind} ({devices[0].platform}){capability}", None


def examine() -> tuple[Lines, list[str]]:
    """The facts, and what is wrong or should be known."""
    lines: Lines = [
        ("nsa_jax", f"{installed_version()}, {Path(__file__).parent}"),
        ("machine", f"{platform.platform()}, {os.cpu_count()} cores, Python {platform.python_version()}"),
        ("packages", _named(_PACKAGES)),
        ("CUDA packages", _named(_plugins()) or "none"),
        ("extras", _extras()),
        *_gpus(),
    ]
    findings = []
    found, wrong = _checked(_devices, "JAX finds no devices")
    lines.append(("JAX's devices", found))
    if wrong is None:
        if has_accelerator() and not current_target().is_gpu:
            said = os.environ.get("JAX_PLATFORMS")
            fix = f"JAX_PLATFORMS={said} asks for that" if said else "pip install 'nsa_jax[cuda12]', or [cuda13]"
            findings.append(f"there is a driver of a GPU, but JAX uses the CPU: {fix}")
        step, wrong = _checked(tiny_step, "one tiny step")
        lines.append(("one tiny step", step))
    findings += [wrong] if wrong else []
    lines.append(("disk", _disk(".")))
    lines.append(("cache", _disk(os.environ.get("NSA_JAX_CACHE") or "~/.cache/nsa_jax")))
    variables = ", ".join(f"{name}={os.environ[name]}" for name in _VARIABLES if os.environ.get(name))
    lines.append(("variables", variables or "none set"))
    return lines, findings


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the screen; returns 0, or 1 if something is wrong."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments:
        print(__doc__)
        return 0 if arguments[0] in ("-h", "--help") else 2
    choose_platform()
    lines, findings = examine()
    width = max(len(name) for name, _ in lines)
    for name, text in lines:
        print(f"{name.ljust(width)}  {text}")
    for finding in findings or ["nothing wrong was found"]:
        print(f"{'=>'.rjust(width)}  {finding}")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
