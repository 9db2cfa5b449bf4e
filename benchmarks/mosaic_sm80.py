"""Compressed attention in Mosaic GPU with what an A100 has, forward and backward, timed against the library's Triton.

    python benchmarks/mosaic_sm80.py --compile-only     compiles every variant for an A100 and an H100 without a GPU
    python benchmarks/mosaic_sm80.py --json mosaic_sm80.json

The first command prints registers, spills and shared memory. The second checks each variant against the float32
reference and times it on the GPU at hand, in turns with the kernel that the library chooses for an A100. On Hopper that
kernel is timed as Triton compiles it for an A100, with mma.sync, and the forward with wgmma as well. At the longer
length only the fastest variants are timed. A variant that does not compile or is wrong is printed and left out. The
file is written after every figure. The kernels are in `mosaic_sm80_*.py`. All this needs JAX 0.11.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import functools
import json
import os
import pathlib
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from benchmarks import mosaic_sm80_cases as cases  # noqa: E402
from benchmarks.timing import environment, measure  # noqa: E402
from nsa_jax.ops.gpus import GPUS  # noqa: E402

LENGTHS = (8192, 32768)
CHECKED_LENGTH = 2048
FASTEST = 3  # variants of a kind that are timed at the longer length
A100_SHARED_BYTES = 163 * 1024


def compile_for_absent(gpu: str, kinds: Sequence[str]) -> int:
    """Compiles all variants for a GPU that need not be there; the status is 1 if one does not compile.

    Mosaic GPU keeps the first GPU's settings of ptxas for as long as a process lasts, so each GPU has its own process.
    """
    from jax.experimental.mosaic.gpu import utils as gpu_utils

    from nsa_jax.aot import compile_for_gpu

    # JAX takes every GPU that is not there for a Hopper GPU, whose `elect.sync` LLVM cannot compile for an A100.
    utils: Any = gpu_utils
    utils._infer_arch = lambda: GPUS[gpu].compute_capability
    failed = 0
    for kind in kinds:
        for variant in cases.VARIANTS[kind]:
            start = time.perf_counter()
            try:
                compile_for_gpu(cases.prototype(kind, variant), *cases.shapes(LENGTHS[0], kind), gpu=gpu)
                end = f"{time.perf_counter() - start:.1f} s"
            except Exception as problem:
                failed += 1
                end = f"{type(problem).__name__}: {str(problem)[:2000]}"
            size = cases.shared_bytes(kind, variant)
            over = "" if size <= A100_SHARED_BYTES else ", more than an A100 has"
            print(f"compiled {gpu} {kind} {variant.name}: {size / 1024:.0f} KiB shared{over}, {end}", flush=True)
    return int(failed > 0)


def compile_only(gpus: Sequence[str], kinds: Sequence[str]) -> int:
    """Compiles all variants for each GPU and prints what ptxas says; the status is 1 if one does not compile."""
    settings = {"MOSAIC_GPU_DUMP_PTXAS": "1", "TF_CPP_MIN_LOG_LEVEL": "0", "JAX_ENABLE_COMPILATION_CACHE": "false"}
    status = 0
    for gpu in gpus:
        command = [sys.executable, __file__, "--compile-for", gpu, "--only", *kinds]
        with subprocess.Popen(
            command, env=os.environ | settings, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as child:
            assert child.stdout is not None
            told: list[str] = []
            for line in child.stdout:
                told.append(line)
                if line.startswith("compiled "):
                    said = "".join(told)
                    registers = re.findall(r"Used (\d+) registers", said)
                    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", said)
                    found = f"{registers[-1]} registers, {'/'.join(spills[-1])} bytes spilled" if registers else ""
                    print(line.removeprefix("compiled ").rstrip(), found, sep="; ", flush=True)
                    told = []
        if child.returncode:
            print("".join(told)[-4000:])
        status = max(status, child.returncode)
    return status


def together(jobs: dict[Any, Callable[[], Any]]) -> dict[Any, Any]:
    """What functions return, or the exceptions that they raise, run in threads."""

    def run(job: Callable[[], Any]) -> Any:
        try:
            return job()
        except Exception as problem:
            return problem

    with concurrent.futures.ThreadPoolExecutor(min(12, os.cpu_count() or 1)) as pool:
        return dict(zip(jobs, pool.map(run, jobs.values()), strict=True))


class Run:
    """Checks and times on the GPU at hand, and writes what was found after every figure."""

    def __init__(self, kinds: Sequence[str], path: pathlib.Path | None, deadline: float):
        self.kinds = kinds
        self.deadline = deadline  # of `time.perf_counter`, after which no further figure is begun
        self.result: dict[str, Any] = {"environment": environment(), "variants": {}, "times": []}
        self.functions = {
            (kind, variant.name): cases.prototype(kind, variant) for kind in kinds for variant in cases.VARIANTS[kind]
        }
        self._path = path

    def write(self) -> None:
        """Writes the file."""
        if self._path:
            self._path.write_text(json.dumps(self.result, indent=1) + "\n")

    def _compile(self, length: int, cases_left: Sequence[tuple[str, str]]) -> dict[Any, Any]:
        """Compiled variants by kind and name; those that do not compile are printed, noted and left out."""
        start = time.perf_counter()
        found = together(
            {key: functools.partial(cases.compiled_mosaic, self.functions[key], length, key[0]) for key in cases_left}
        )
        for (kind, name), function in found.items():
            if isinstance(function, Exception):
                problem = f"{type(function).__name__}: {str(function)[:500]}"
                self.result["variants"][f"{kind} {name}"] = {"problem": problem, "right": False}
                print(f"{kind} {name} does not compile: {problem}", flush=True)
        print(f"{length}: compiled {len(found)} in {time.perf_counter() - start:.1f} s", flush=True)
        return {key: function for key, function in found.items() if not isinstance(function, Exception)}

    def check(self) -> list[tuple[str, str]]:
        """The variants, as kind and name, that compile and are right."""
        taken, wanted = cases.wanted(CHECKED_LENGTH)
        for (kind, name), function in self._compile(CHECKED_LENGTH, list(self.functions)).items():
            try:
                got = jax.block_until_ready(function(*taken[kind]))
                errors = [cases.error(x, y) for x, y in zip(got, wanted[kind], strict=True)]
                again = jax.block_until_ready(function(*taken[kind]))
                same = all(bool((x == y).all()) for x, y in zip(got, again, strict=True))
                found: dict[str, Any] = {"errors": errors, "deterministic": same}
                found["right"] = same and max(errors) <= cases.LARGEST_ERROR[kind]
            except Exception as problem:
                found = {"problem": f"{type(problem).__name__}: {str(problem)[:500]}", "right": False}
            self.result["variants"][f"{kind} {name}"] = found
            print(kind, name, found, flush=True)
            self.write()
        return [key for key in self.functions if self.result["variants"][f"{key[0]} {key[1]}"]["right"]]

    def time(self, length: int, right: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
        """Times Triton and the variants at a length; the fastest of each kind.

        Every ratio is of Triton's time with mma.sync, the mean of before and after the variants, to the variant's:
        above 1 the variant is faster.
        """
        names = [*self.kinds, *(["backward"] if {"dq", "dkv"} <= set(self.kinds) else [])]
        with cases.without_wgmma():
            triton = together({kind: functools.partial(cases.compiled_triton, kind, length) for kind in names})
        hopper = cases.compiled_triton("forward", length)
        functions = self._compile(length, right)
        forward = triton["forward"] if "forward" in triton else hopper
        sets: dict[str, list[cases.Arrays]] = {"forward": [], "dq": []}
        for seed in (1, 2):
            *arrays, grad_out = cases.inputs(length, seed)
            sets["forward"].append(tuple(arrays))
            sets["dq"].append((*arrays, *forward(*arrays), grad_out))
        sets["dkv"] = sets["backward"] = sets["dq"]
        fastest: list[tuple[str, str]] = []
        for kind in names:
            mosaic = {name: function for (of, name), function in functions.items() if of == kind}
            if kind == "backward":
                best = [next((x for x in fastest if x[0] == part), None) for part in ("dq", "dkv")]
                if None in best:
                    continue
                variants = [next(v for v in cases.VARIANTS[x[0]] if v.name == x[1]) for x in best if x]
                mosaic = {"fastest dq and dkv": jax.jit(cases.whole_backward(*variants))}  # type: ignore[arg-type]
            if time.perf_counter() > self.deadline:
                print(f"{kind}, {length}: left out, no time", flush=True)
                continue
            row = self._time_kind(kind, length, sets[kind], triton[kind], mosaic)
            if kind == "forward":
                row["triton_wgmma_ms"] = measure(hopper, sets[kind], repeats=5, min_sample_s=0.05)
                self.write()
            ordered = sorted(row["mosaic_ms"], key=row["mosaic_ms"].get)
            fastest += [(kind, name) for name in ordered[:FASTEST]]
        return [key for key in fastest if key[0] != "backward"]

    def _time_kind(self, kind: str, length: int, sets, triton, mosaic: dict[str, Any]) -> dict[str, Any]:
        """Milliseconds of Triton before and after the variants, and of these."""
        timed = functools.partial(measure, arguments=sets, repeats=5, min_sample_s=0.05)
        around: list[float] = []
        row: dict[str, Any] = {
            "kind": kind,
            "length": length,
            "triton_mma_sync_ms": around,
            "mosaic_ms": {},
            "ratio": {},
        }
        self.result["times"].append(row)
        if not isinstance(triton, Exception):
            around.append(timed(triton))
        for name, function in mosaic.items():
            try:
                row["mosaic_ms"][name] = timed(function)
            except Exception as problem:
                print(f"{kind} {name}, {length}: {type(problem).__name__}: {str(problem)[:500]}", flush=True)
            self.write()
        if not isinstance(triton, Exception):
            around.append(timed(triton))
            base = sum(around) / 2
            row["ratio"] = {name: base / took for name, took in row["mosaic_ms"].items()}
        else:
            row["triton_problem"] = str(triton)[:500]
        told = [f"{name} {took:.3f} ({row['ratio'].get(name, 0):.3f}x)" for name, took in row["mosaic_ms"].items()]
        before = " and ".join(f"{x:.3f}" for x in around)
        print(f"{kind}, {length}: triton mma.sync {before} ms; " + "; ".join(told), flush=True)
        self.write()
        return row

    def table(self) -> str:
        """The fastest variant of each kind and length next to Triton, in milliseconds."""
        lines = ["kind      tokens   Triton   Mosaic   ratio  variant"]
        for row in self.result["times"]:
            if row["ratio"]:
                name = max(row["ratio"], key=row["ratio"].get)
                base, took = sum(row["triton_mma_sync_ms"]) / 2, row["mosaic_ms"][name]
                lines.append(
                    f"{row['kind']:9} {row['length']:6} {base:8.3f} {took:8.3f} {row['ratio'][name]:7.3f}  {name}"
                )
        return "\n".join(lines)


def main() -> int:
    """Reads flags, checks, times and writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--compile-only", nargs="*", choices=sorted(GPUS), help="compile ahead of time; default: an A100 and an H100"
    )
    parser.add_argument("--compile-for", choices=sorted(GPUS), help=argparse.SUPPRESS)  # --compile-only's processes
    parser.add_argument("--only", nargs="+", choices=cases.KINDS, default=list(cases.KINDS), help="kinds; default: all")
    parser.add_argument("--seconds", type=float, default=80.0, help="after which no further figure is begun")
    parser.add_argument("--json", type=pathlib.Path, help="where to write what was found")
    options = parser.parse_args()
    if options.compile_for:
        return compile_for_absent(options.compile_for, options.only)
    if options.compile_only is not None:
        return compile_only(options.compile_only or ["a100-80gb", "h100"], options.only)
    start = time.perf_counter()
    run = Run(options.only, options.json, start + options.seconds)
    right = run.check()
    run.result["seconds_checking"] = time.perf_counter() - start
    left = right
    for length in LENGTHS:
        left = run.time(length, left)
    run.result["seconds"] = time.perf_counter() - start
    run.write()
    print(run.table(), flush=True)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
