"""The forward of compressed attention in Mosaic GPU with what an A100 has, timed against the library's Triton kernel.

    python benchmarks/mosaic_sm80.py --compile-only     compiles every variant for an A100 and an H100 without a GPU
    python benchmarks/mosaic_sm80.py --json mosaic_sm80.json

The second command checks each variant against the float32 reference and times it on the GPU at hand, in turns with the
kernel that the library chooses for an A100. On Hopper that kernel is timed as Triton compiles it for an A100, with
mma.sync, and with wgmma as well. The kernel is in `mosaic_sm80_kernel.py`. A variant that does not compile
or is wrong is printed and left out. Both need JAX 0.11.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import pathlib
import subprocess
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import nsa_jax  # noqa: E402
from benchmarks.mosaic_sm80_tiles import Variant  # noqa: E402
from benchmarks.timing import environment, measure  # noqa: E402
from nsa_jax.ops import reference  # noqa: E402
from nsa_jax.ops.gpus import GPUS  # noqa: E402
from nsa_jax.ops.target import Target, compile_for  # noqa: E402

CONFIG = nsa_jax.NSAConfig()
HEADS, KV_HEADS, DIM = 64, 4, 128
LENGTHS = (8192, 32768, 65536)
CHECKED_LENGTH = 2048
LARGEST_ERROR = 4e-3
VARIANTS = (
    Variant(row_tiles=2, warpgroups=1, keys=64, stages=1),
    Variant(row_tiles=2, warpgroups=1, keys=64, stages=2),
    Variant(row_tiles=2, warpgroups=2, keys=64, stages=2),
    Variant(row_tiles=1, warpgroups=2, keys=64, stages=2),
    Variant(row_tiles=1, warpgroups=1, keys=64, stages=1),
    Variant(row_tiles=2, warpgroups=1, keys=32, stages=2),
)


def shapes(length: int) -> list[jax.ShapeDtypeStruct]:
    """Query, compressed keys and compressed values of one row of `length` tokens."""
    blocks = (length - CONFIG.compress_block) // CONFIG.compress_stride + 1
    sizes = [(1, length, HEADS, DIM), (1, blocks, KV_HEADS, DIM), (1, blocks, KV_HEADS, DIM)]
    return [jax.ShapeDtypeStruct(size, jnp.bfloat16) for size in sizes]


def inputs(length: int, seed: int) -> tuple[jax.Array, ...]:
    """Random numbers of `shapes`."""
    keys = jax.random.split(jax.random.key(seed), 3)
    return tuple(jax.random.normal(k, x.shape, x.dtype) for k, x in zip(keys, shapes(length), strict=True))


def with_triton(query: jax.Array, key: jax.Array, value: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The library's kernel."""
    return nsa_jax.compressed_attention(query, key, value, config=CONFIG, implementation="pallas")


def compiled_triton(arguments: tuple[jax.Array, ...], warpgroup_products: bool) -> Any:
    """The library's kernel with the tiles that it chooses for an A100, compiled for the GPU at hand.

    Args:
      arguments: arrays of the shapes to compile for.
      warpgroup_products: on Hopper, whether Triton may use wgmma, which an A100 does not have. Without it Triton makes
        the same instructions as for an A100: mma.sync, ldmatrix and cp.async.
    """
    os.environ["DISABLE_MMA_V3"] = str(int(not warpgroup_products))  # Triton reads it whenever it compiles
    try:
        with compile_for(Target("gpu", (8, 0))):
            return jax.jit(lambda *arrays: with_triton(*arrays)).trace(*arguments).lower().compile()
    finally:
        del os.environ["DISABLE_MMA_V3"]


def prototype(variant: Variant):
    """A variant as a function of query, keys and values; it needs JAX 0.11."""
    from benchmarks.mosaic_sm80_kernel import compressed_forward

    return functools.partial(compressed_forward, config=CONFIG, variant=variant)


def error(got: jax.Array, want: jax.Array) -> float:
    """The largest difference as a share of the largest value."""
    got, want = got.astype(jnp.float32), want.astype(jnp.float32)
    return float(jnp.abs(got - want).max() / jnp.abs(want).max())


def compile_only(gpus: list[str]) -> int:
    """Compiles all variants for each GPU; the status is 1 if one does not compile.

    Mosaic GPU keeps the first GPU's settings of ptxas for as long as a process lasts, so each GPU has its own process.
    """
    if len(gpus) > 1:
        command = [sys.executable, __file__, "--compile-only"]
        return max(subprocess.run([*command, gpu], check=False).returncode != 0 for gpu in gpus)

    from jax.experimental.mosaic.gpu import utils as gpu_utils

    from nsa_jax.aot import compile_for_gpu

    # JAX takes every GPU that is not there for a Hopper GPU, whose `elect.sync` LLVM cannot compile for an A100.
    utils: Any = gpu_utils
    utils._infer_arch = lambda: GPUS[gpus[0]].compute_capability
    failed = 0
    for variant in VARIANTS:
        function = prototype(variant)
        start = time.perf_counter()
        try:
            compile_for_gpu(function, *shapes(LENGTHS[0]), gpu=gpus[0])
            print(f"{gpus[0]} {variant.name}: compiled in {time.perf_counter() - start:.1f} s", flush=True)
        except Exception as problem:
            failed += 1
            print(f"{gpus[0]} {variant.name}: {type(problem).__name__}: {str(problem)[:2000]}", flush=True)
    return int(failed > 0)


def check() -> tuple[list[tuple[Variant, Any]], dict[str, Any]]:
    """The variants that compile and are right, as jitted functions, and what was found for each and for Triton."""
    arrays = inputs(CHECKED_LENGTH, 0)
    want, want_lse = jax.jit(functools.partial(reference.compressed_attention, config=CONFIG))(
        *(x.astype(jnp.float32) for x in arrays)
    )
    seen = want_lse > -jnp.inf

    def compare(function) -> dict[str, Any]:
        try:
            out, lse = jax.block_until_ready(function(*arrays))
        except Exception as problem:
            return {"problem": f"{type(problem).__name__}: {str(problem)[:500]}", "right": False}
        errors = error(out, want), error(jnp.where(seen, lse, 0), jnp.where(seen, want_lse, 0))
        same = bool(((lse > -jnp.inf) == seen).all())
        return {"error": errors[0], "lse_error": errors[1], "right": same and max(errors) <= LARGEST_ERROR}

    functions = [(variant, jax.jit(prototype(variant))) for variant in VARIANTS]
    found = {"triton_mma_sync": compare(compiled_triton(arrays, False))}
    for name, result in found.items():
        print(name, result, flush=True)
    for variant, function in functions:
        found[variant.name] = compare(function)
        print(variant.name, found[variant.name], flush=True)
    return [pair for pair in functions if found[pair[0].name]["right"]], found


def time_all(variants: list[tuple[Variant, Any]], deadline: float) -> list[dict[str, Any]]:
    """Milliseconds of the library's kernel and of each variant at every length, and their ratios.

    Every ratio is of Triton's time with mma.sync, the mean of before and after the variants, to the variant's: above 1
    the variant is faster. A length is not begun after the deadline, of `time.perf_counter`.
    """
    rows: list[dict[str, Any]] = []
    for length in LENGTHS:
        if time.perf_counter() > deadline:
            print(f"{length}: left out, no time", flush=True)
            continue
        arguments = [inputs(length, seed) for seed in (1, 2)]
        timed = functools.partial(measure, arguments=arguments, repeats=5, min_sample_s=0.05)
        triton, hopper = (compiled_triton(arguments[0], on_hopper) for on_hopper in (False, True))
        around = [timed(triton)]
        times = {variant.name: timed(function) for variant, function in variants}
        around.append(timed(triton))
        base = sum(around) / 2
        row: dict[str, Any] = {
            "length": length,
            "triton_mma_sync_ms": around,
            "triton_wgmma_ms": timed(hopper),
            "mosaic_ms": times,
        }
        row["ratio"] = {name: base / took for name, took in times.items()}
        rows.append(row)
        parts = [f"{name} {times[name]:.3f} ({row['ratio'][name]:.3f}x)" for name in times]
        print(
            f"{length}: triton mma.sync {around[0]:.3f} and {around[1]:.3f} ms, wgmma {row['triton_wgmma_ms']:.3f}; "
            + "; ".join(parts),
            flush=True,
        )
    return rows


def main() -> int:
    """Reads flags, checks, times and writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--compile-only", nargs="*", choices=sorted(GPUS), help="compile ahead of time; default: an A100 and an H100"
    )
    parser.add_argument("--seconds", type=float, default=45.0, help="after which no further length is begun")
    parser.add_argument("--json", type=pathlib.Path, help="where to write what was found")
    options = parser.parse_args()
    if options.compile_only is not None:
        return compile_only(options.compile_only or ["a100-80gb", "h100"])
    start = time.perf_counter()
    variants, found = check()
    result = {"environment": environment(), "variants": found, "seconds_checking": time.perf_counter() - start}
    result["times"] = time_all(variants, start + options.seconds)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if variants else 1


if __name__ == "__main__":
    sys.exit(main())
