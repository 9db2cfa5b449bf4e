r"""Searches the kernel configurations of `nsa_jax.ops.tiles` by timing them on the GPU at hand.

    python benchmarks/tune.py --op selected --lists shared --length 65536 --json tuned.json
    python benchmarks/tune.py --op compressed --pass bwd --shape 12,2,64,64 --length 32768
    python benchmarks/tune.py --op selected --pass bwd --shape 32,8,128,128 --length 32768
    python benchmarks/tune.py --op compressed --gpu a100-80gb      # an A100's kernels, also on a Hopper GPU
    python benchmarks/tune.py --op compressed --dry     # only lists what would be timed; needs no GPU

The search starts from the heuristic's choice and changes one field at a time, keeping what is faster: as many timings
as there are values, not as many as there are combinations. Every candidate's result is compared with that of the
heuristic's choice; one that differs, fails to compile or does not fit is reported and never chosen. What wins belongs
into the rule in nsa_jax/ops/tiles.py, and the figures into benchmarks/results/tiles_h200.json; nothing is changed
here.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import pathlib
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import nsa_jax  # noqa: E402
from benchmarks.attention import AbstractBench, Bench, split_passes  # noqa: E402
from benchmarks.timing import environment, measure  # noqa: E402
from nsa_jax.aot import GPUS  # noqa: E402
from nsa_jax.ops import (  # noqa: E402
    selected_tiles,
    tiles,
)
from nsa_jax.ops.target import Target, compile_for, current_target  # noqa: E402

# Rule of nsa_jax/ops/tiles.py -> values to try for each field of the dataclass that it returns.
_Space = dict[str, tuple]
_RANGED: _Space = {"rows": (32, 64, 128), "keys": (32, 64, 128), "num_warps": (4, 8), "num_stages": (1, 2, 3, 4)}
_RANGED_HOPPER: _Space = {
    "keys": (64, 128),
    "stages": (2, 3, 4),
    "warpgroups": (2, 3),
    "query_buffers": (1, 2),
    "tiles": (0, 1, 4, 16),
}
SPACES: dict[str, _Space] = {
    "selected_config": {
        "tile": (1, 4, 8, 16),
        "share": (2, 3, 4, 6),
        "tile_warps": (4, 8),
        "tile_stages": (2, 3),
        "plain_warps": (1, 2, 4),
        "plain_stages": (2, 3, 4),
        "keys": (32, 64),
        "plain_keys": (16, 32, 64),
        "key_major": (False, True),
        "gather_rows": (64, 128),
        "gather_stages": (2, 3),
        "chunk": (64, 128, 256),
    },
    "selected_backward_config": {
        "chunk": (128, 256, 512, 1024, 2048),
        "rows": (32, 64, 128),
        "num_warps": (4, 8),
        "num_stages": (1, 2, 3),
        "keep_scores": (False, True),
        "buffer_bytes": (256 * 2**20, 512 * 2**20, 1024 * 2**20),
        "tile": (1, 4, 8, 16),
        "share": (2, 3, 4, 6),
        "tile_warps": (4, 8),
    },
    "selected_gather_config": {
        "chunk": (128, 256, 512, 1024),
        "row_tokens": (8192, 16384, 32768),
        "warpgroups": (2, 3, 4),
        "ahead": (1, 2),
    },
    "select_config": {"keys": (64, 128, 256), "queries": (16, 32, 64), "num_warps": (4, 8), "num_stages": (1, 2, 3)},
    "select_hopper_config": {"stages": (4, 5, 6), "query_tiles": (1, 2, 4, 8)},
    "ranged_forward_config": _RANGED,
    "ranged_dq_config": _RANGED,
    "ranged_dkv_config": _RANGED | {"splits": (0, 2, 4, 8)},
    "ranged_sm80_forward_config": {"rows": (64, 128, 192), "keys": (32, 64, 128)},
    "ranged_sm80_dq_config": {"rows": (64, 128, 192), "keys": (32, 64)},
    "ranged_sm80_dkv_config": {"rows": (16, 32, 64), "stages": (2, 3), "splits": (0, 1, 2, 4, 8)},
    "ranged_hopper_config": _RANGED_HOPPER,
    "ranged_hopper_dq_config": _RANGED_HOPPER | {"overlap": (False, True)},
    "ranged_hopper_dkv_config": {
        "stages": (2, 3, 4),
        "warpgroups": (2, 3),
        "splits": (0, 1, 2, 4, 8),
        "overlap": (False, True),
    },
}
_RANGED_KERNELS = {"fwd": ("ranged_forward_config",), "bwd": ("ranged_dq_config", "ranged_dkv_config")}
_RANGED_SM80_KERNELS = {
    "fwd": ("ranged_sm80_forward_config",),
    "bwd": ("ranged_sm80_dq_config", "ranged_sm80_dkv_config"),
}
_RANGED_HOPPER_KERNELS = {
    "fwd": ("ranged_hopper_config",),
    "bwd": ("ranged_hopper_dq_config", "ranged_hopper_dkv_config"),
}


def kernels(op: str, which: str, target: Target) -> tuple[str, ...]:
    """The rules of nsa_jax/ops/tiles.py that may choose for this op and pass on this target."""
    if op == "selected":
        return ("selected_config", "selected_gather_config") if which == "fwd" else ("selected_backward_config",)
    if op == "select":
        return ("select_hopper_config",) if target.is_hopper else ("select_config",)
    if target.is_hopper:
        return _RANGED_HOPPER_KERNELS[which]
    return _RANGED_SM80_KERNELS[which] + _RANGED_KERNELS[which]


def neighbours(config: Any, space: _Space) -> Iterator[tuple[str, Any]]:
    """(field, configuration) for everything that differs from `config` in one field."""
    for field, values in space.items():
        for value in values:
            candidate = dataclasses.replace(config, **{field: value})
            if candidate != config:
                yield field, candidate


def differences(config: Any, base: Any) -> dict[str, Any]:
    """The fields in which `config` differs from `base`."""
    pairs = ((f.name, getattr(config, f.name), getattr(base, f.name)) for f in dataclasses.fields(config))
    return {name: value for name, value, was in pairs if value != was}


def rules(name: str) -> types.ModuleType:
    """The module that defines a rule and where its callers look it up; `selected_tiles` imports one from `tiles`."""
    return tiles if hasattr(tiles, name) else selected_tiles


# Makes a function and its arguments. A backward pass takes its plan from the forward pass before it, so both are made
# while a rule is replaced.
_Problem = Callable[[], tuple[Callable, tuple]]


def observe(problem: _Problem, name: str) -> Any:
    """What the rule of that name answers while the problem is made and traced, None if it is never asked."""
    answers = []
    original = getattr(rules(name), name)

    def record(*args, **kwargs):
        answers.append(original(*args, **kwargs))
        return answers[-1]

    jax.clear_caches()  # what was traced before would not ask again
    with mock.patch.object(rules(name), name, record):
        function, arguments = problem()
        jax.eval_shape(lambda *x: function(*x), *arguments)
    return answers[0] if answers else None


def forced(problem: _Problem, name: str, config: Any) -> tuple[Callable, tuple]:
    """The problem, jitted anew, with the rule of that name answering `config` while it is made and traced."""
    answer = functools.partial(mock.patch.object, rules(name), name, lambda *args, **kwargs: config)
    jax.clear_caches()  # parts traced before would keep their configuration
    with answer():
        function, arguments = problem()

    def call(*arguments):
        with answer():
            return function(*arguments)

    return jax.jit(call), arguments


def distance(got: Any, want: Any) -> float:
    """The largest relative error over all arrays of a result."""

    def error(a, b):
        a, b = (jnp.nan_to_num(x.astype(jnp.float32), posinf=1e9, neginf=-1e9) for x in (a, b))
        return jnp.linalg.norm((a - b).ravel()) / jnp.maximum(jnp.linalg.norm(b.ravel()), 1e-30)

    return float(max(jax.tree.leaves(jax.tree.map(error, got, want))))


def search(problem: _Problem, name: str, base: Any, timer: Callable = measure) -> list[dict]:
    """Times the neighbours of the best configuration so far, field by field; rows in the order they were timed."""
    plain, arguments = forced(problem, name, base)
    want = jax.block_until_ready(plain(*arguments))
    rows = [{"kernel": name, "changed": {}, "ms": timer(plain, [arguments]), "error": None}]
    best, best_ms = base, rows[0]["ms"]
    for field, values in SPACES[name].items():
        start = best
        for value in values:
            candidate = dataclasses.replace(start, **{field: value})
            if candidate == start:
                continue
            row: dict[str, Any] = {"kernel": name, "changed": differences(candidate, base), "ms": None, "error": None}
            rows.append(row)
            try:
                compiled, arguments = forced(problem, name, candidate)
                error = distance(compiled(*arguments), want)
                if not error < 1e-2:
                    raise ValueError(f"differs from the heuristic's result by {error:.1e}")
                row["ms"] = timer(compiled, [arguments])
            except Exception as failure:  # a candidate that does not fit is a result, too
                row["error"] = f"{type(failure).__name__}: {str(failure)[:200]}"
                continue
            if row["ms"] < best_ms:
                best, best_ms = candidate, row["ms"]
    for row in rows:
        row["best"] = row["changed"] == differences(best, base)
    return rows


def problem(op: str, which: str, bench: Bench, lists) -> _Problem:
    """One op and pass on random inputs."""
    function, inputs, num_differentiable = bench.inputs(op, lists)
    if which == "fwd":
        return lambda: (function, inputs)
    cotangent = bench.cotangent()

    def backward():
        _, vjp, _, _ = split_passes(function, num_differentiable)
        _, pullback = vjp(*inputs)
        return lambda pullback, cotangent: pullback(cotangent), (pullback, cotangent)

    return backward


def abstract_problem(op: str, which: str, bench: AbstractBench) -> tuple[Callable, tuple]:
    """As `problem`, but with shapes alone: nothing runs."""
    function, inputs, num_differentiable = bench.inputs(op, bench.lists(1))
    if which == "fwd":
        return function, inputs

    def gradient(*inputs):
        rest = inputs[num_differentiable:]
        out, pullback = jax.vjp(lambda *x: function(*x, *rest), *inputs[:num_differentiable])
        return pullback(out)

    return gradient, inputs


def listed(op: str, which: str, bench: AbstractBench, target: Target) -> list[dict]:
    """What a search would time first: the heuristic's choice and its neighbours, without timing or compiling them."""
    rows: list[dict] = []
    with compile_for(target, ahead_of_time=False):
        for name in kernels(op, which, target):
            base = observe(functools.partial(abstract_problem, op, which, bench), name)
            if base is None:
                continue
            rows.append({"kernel": name, "changed": {}, "base": str(base), "ms": None, "error": None})
            for _, candidate in neighbours(base, SPACES[name]):
                changed = differences(candidate, base)
                rows.append({"kernel": name, "changed": changed, "ms": None, "error": None})
    return rows


def timed(op: str, which: str, bench: Bench, lists) -> list[dict]:
    """The rows of `search` for each rule that chooses for an op and pass."""
    made = problem(op, which, bench, lists)
    rows: list[dict] = []
    for name in kernels(op, which, current_target()):
        base = observe(made, name)
        if base is not None:
            rows += search(made, name, base)
            rows[-1].setdefault("base", str(base))
    return rows


def print_rows(rows: list[dict]) -> None:
    for row in sorted(rows, key=lambda r: (r["kernel"], r["ms"] is None, r["ms"] or 0.0)):
        changed = ", ".join(f"{k}={v}" for k, v in row["changed"].items()) or f"heuristic {row.get('base', '')}"
        ms = f"{row['ms']:9.4f} ms" if row["ms"] is not None else " " * 12
        print(f"{row['kernel']:>26} {ms} {'*' if row.get('best') else ' '} {changed}  {row['error'] or ''}".rstrip())


def main(argv: list[str] | None = None) -> list[dict]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--op", required=True, choices=("selected", "select", "compressed", "window"))
    parser.add_argument("--pass", dest="which", default="fwd", choices=("fwd", "bwd"))
    parser.add_argument("--shape", default="64,4,128,128", help="N,K,H,V")
    parser.add_argument("--length", default=8192, type=int)
    parser.add_argument("--lists", default="random", choices=("random", "shared"), help="for --op selected")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dry", action="store_true", help="list the candidates and stop; runs on any machine")
    parser.add_argument("--gpu", choices=sorted(GPUS), help="whose kernels; default: of the GPU here, or an H100")
    parser.add_argument("--json", help="write the rows and the environment here")
    args = parser.parse_args(argv)
    if args.op == "select" and args.which == "bwd":
        parser.error("--op select has no backward pass")
    heads, kv_heads, head, value_head = (int(x) for x in args.shape.split(","))
    config = nsa_jax.NSAConfig()
    dims = (args.length, heads, kv_heads, head, value_head, config, jnp.dtype(args.dtype), args.seed)
    if not args.dry and not current_target().is_gpu:
        parser.error(f"no GPU here (platform {current_target().platform}): only --dry works")
    if args.gpu and not args.dry and GPUS[args.gpu].target.is_hopper and not current_target().is_hopper:
        parser.error(f"--gpu {args.gpu}: its kernels need a Hopper GPU; list them with --dry")
    if args.dry:
        rows = listed(args.op, args.which, AbstractBench(*dims), GPUS[args.gpu or "h100"].target)
    else:
        target = GPUS[args.gpu].target if args.gpu else current_target()
        with compile_for(target, ahead_of_time=False):
            bench = Bench(*dims)
            lists = bench.lists(64 if args.lists == "shared" else 1) if args.op == "selected" else None
            rows = timed(args.op, args.which, bench, lists)
    print_rows(rows)
    if args.json:
        about = {k: getattr(args, k) for k in ("op", "which", "shape", "length", "lists", "dtype")}
        record = {"environment": environment(), "problem": about, "rows": rows}
        pathlib.Path(args.json).write_text(json.dumps(record, indent=1) + "\n")
    return rows


if __name__ == "__main__":
    main()
