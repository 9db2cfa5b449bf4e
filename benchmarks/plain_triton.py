r"""Times range attention's forward as a plain Triton kernel, called through jax-triton, beside the library's kernel.

    pip install "jax-triton>=0.4"       # needs Python 3.12, JAX 0.11 and Triton 3.7
    python benchmarks/plain_triton.py --json benchmarks/results/plain_triton_h200.json

The library writes its Triton kernels in Pallas, which jaxlib lowers to Triton. "plain" is the same loop in Triton's own
language, compiled by the `triton` package. Both take the same queries, keys, values and ranges and return the output
and the log-sum-exp. Each is timed with the same tiles; then the fastest of each and the library's own choice are timed
again in turns, and the last lines say how they compare. On a Hopper GPU stands beside them the kernel for Hopper, which
is what the library uses there. Both compilers generate code for the GPU at hand.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import functools
import json
import math
import os
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import jax_triton
import triton
import triton.language as tl

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import nsa_jax  # noqa: E402
from benchmarks.timing import environment, measure  # noqa: E402
from nsa_jax.ops import blocks, reference, tiles  # noqa: E402
from nsa_jax.ops.kernels.range_attention import attention, sm90_forward, triton_forward  # noqa: E402
from nsa_jax.ops.target import Target, compile_for, current_target  # noqa: E402
from nsa_jax.ops.tiles import RangedConfig  # noqa: E402

CONFIG = nsa_jax.NSAConfig()
BRANCHES = ("window", "compressed")
# Rows, keys, warps and stages. An A100 has the shared memory that the plain kernel takes with each (128 KiB at most).
TILES = [
    RangedConfig(128, 64, 8, 3),
    RangedConfig(128, 64, 4, 3),
    RangedConfig(128, 64, 8, 2),
    RangedConfig(64, 64, 4, 3),
    RangedConfig(128, 32, 4, 4),
    RangedConfig(128, 128, 8, 2),
    RangedConfig(128, 64, 8, 4),
]
LIBRARY = Target("gpu", (8, 0), ahead_of_time=True)  # the library's Triton kernels are those of an A100
TOLERANCE = 4e-3

LOG2E = 1.4426950408889634
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _attend_block(
    block,
    acc,
    peak,
    total,
    query,
    low,
    high,
    key_ptr,
    value_ptr,
    num_keys,
    SCALE: tl.constexpr,
    KEY_STRIDE: tl.constexpr,
    DIM: tl.constexpr,
    KEYS: tl.constexpr,
    EXACT: tl.constexpr,
):
    """Adds one block of keys to the running softmax; every row sees all of an EXACT one."""
    position = block * KEYS + tl.arange(0, KEYS)
    place = position[:, None] * KEY_STRIDE + tl.arange(0, DIM)[None, :]
    there = position[:, None] < num_keys
    if EXACT:
        key = tl.load(key_ptr + place)
    else:
        key = tl.load(key_ptr + place, mask=there, other=0.0)
    scores = tl.dot(query, tl.trans(key))
    if not EXACT:
        seen = (position[None, :] >= low[:, None]) & (position[None, :] < high[:, None])
        scores = tl.where(seen, scores, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(scores, 1) * SCALE)
    alpha = tl.exp2(peak - new_peak)
    weights = tl.exp2(scores * SCALE - new_peak[:, None])
    total = total * alpha + tl.sum(weights, 1)
    if EXACT:
        value = tl.load(value_ptr + place)
    else:
        value = tl.load(value_ptr + place, mask=there, other=0.0)
    acc = tl.dot(weights.to(value.dtype), value, acc * alpha[:, None])
    return acc, new_peak, total


@triton.jit
def _forward(
    query_ptr,
    key_ptr,
    value_ptr,
    low_ptr,
    high_ptr,
    length,
    num_keys,
    out_ptr,
    lse_ptr,
    SCALE: tl.constexpr,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """One tile of (token, head) rows of one key/value head."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # late queries see most: they go first
    kv_head, batch = tl.program_id(1), tl.program_id(2)
    flat = tl.minimum(tile * ROWS + tl.arange(0, ROWS), length * GROUP - 1)
    token = batch * length + flat // GROUP
    row = token * (KV_HEADS * GROUP) + kv_head * GROUP + flat % GROUP
    low, high = tl.load(low_ptr + token), tl.load(high_ptr + token)
    place = row[:, None] * DIM + tl.arange(0, DIM)[None, :]
    query = tl.load(query_ptr + place)
    first_key = batch * num_keys * (KV_HEADS * DIM) + kv_head * DIM
    key_ptr += first_key
    value_ptr += first_key

    begin = tl.min(low, 0) // KEYS
    end = tl.maximum((tl.max(high, 0) + KEYS - 1) // KEYS, begin)
    exact_begin = tl.minimum(tl.maximum((tl.max(low, 0) + KEYS - 1) // KEYS, begin), end)
    exact_end = tl.minimum(tl.maximum(tl.min(high, 0) // KEYS, exact_begin), end)

    acc = tl.zeros([ROWS, DIM], tl.float32)
    peak = tl.full([ROWS], -1e30, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    for block in tl.range(begin, exact_begin):
        acc, peak, total = _attend_block(
            block, acc, peak, total, query, low, high, key_ptr, value_ptr, num_keys,
            SCALE, KV_HEADS * DIM, DIM, KEYS, False,
        )  # fmt: skip
    for block in tl.range(exact_begin, exact_end):
        acc, peak, total = _attend_block(
            block, acc, peak, total, query, low, high, key_ptr, value_ptr, num_keys,
            SCALE, KV_HEADS * DIM, DIM, KEYS, True,
        )  # fmt: skip
    for block in tl.range(exact_end, end):
        acc, peak, total = _attend_block(
            block, acc, peak, total, query, low, high, key_ptr, value_ptr, num_keys,
            SCALE, KV_HEADS * DIM, DIM, KEYS, False,
        )  # fmt: skip

    safe = tl.where(total > 0, total, 1.0)
    tl.store(out_ptr + place, (acc / safe[:, None]).to(out_ptr.dtype.element_ty))
    tl.store(lse_ptr + row, tl.where(total > 0, (peak + tl.log2(safe)) * LN2, float("-inf")))


def plain_forward(query, key, value, low, high, config: RangedConfig, capability: int | None = None):
    """What `triton_forward.ranged_forward` computes, for H = V a power of two.

    Args:
      query, key, value, low, high, config: as it takes them.
      capability: compute capability to generate code for, such as 80; None is that of the GPU.
    """
    batch, length, heads, dim = query.shape
    num_keys, kv_heads = key.shape[1:3]
    return jax_triton.triton_call(
        query,
        key,
        value,
        low,
        high,
        length,
        num_keys,
        kernel=_forward,
        out_type=(
            jax.ShapeDtypeStruct(query.shape, query.dtype),
            jax.ShapeDtypeStruct((batch, length, heads), jnp.float32),
        ),
        grid=(triton.cdiv(length * heads // kv_heads, config.rows), kv_heads, batch),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        compute_capability=capability,
        SCALE=LOG2E / math.sqrt(dim),
        GROUP=heads // kv_heads,
        KV_HEADS=kv_heads,
        DIM=dim,
        ROWS=config.rows,
        KEYS=config.keys,
    )


@dataclasses.dataclass(frozen=True)
class Problem:
    """One branch of one layer in bfloat16, with H = V."""

    branch: str
    length: int
    heads: int
    kv_heads: int
    head: int
    batch: int = 1

    @property
    def num_keys(self) -> int:
        return self.length if self.branch == "window" else blocks.num_compressed(self.length, CONFIG)

    def shapes(self) -> list[jax.ShapeDtypeStruct]:
        """Of query, key and value."""
        query = (self.batch, self.length, self.heads, self.head)
        key = (self.batch, self.num_keys, self.kv_heads, self.head)
        return [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in (query, key, key)]

    def arrays(self, seed: int) -> list[jax.Array]:
        keys = jax.random.split(jax.random.key(seed), 3)
        return [jax.random.normal(k, s.shape, s.dtype) for k, s in zip(keys, self.shapes(), strict=True)]

    def ranges(self, query) -> tuple[jax.Array, jax.Array]:
        """The keys that each query sees, as the kernels take them."""
        if self.branch == "window":
            low, high = attention.window_ranges(query, None, 0, CONFIG.window)
        else:
            low, high = attention.compressed_ranges(query, None, 0, CONFIG)
        return attention.clip_ranges(low, high, self.num_keys)

    def tflop(self) -> float:
        """Multiply-adds that the forward needs, in TFLOP."""
        low, high = self.ranges(jnp.zeros((1, self.length, 1, 1)))
        pairs = float(jnp.maximum(high - low, 0).sum(dtype=jnp.float32))
        return 4 * self.batch * pairs * self.heads * self.head / 1e12

    def jitted(self, forward: Callable) -> Callable:
        """`forward` of query, key and value, a function of its own so that JAX traces it afresh."""
        return jax.jit(lambda query, key, value: forward(query, key, value, *self.ranges(query)))


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A kernel with its tiles; None are those that the library chooses for the problem."""

    kernel: str
    config: RangedConfig | None

    def forward(self, problem: Problem, capability: int | None) -> Callable:
        if self.kernel == "plain":
            return functools.partial(plain_forward, config=self.config, capability=capability)
        if self.kernel == "pallas":
            return functools.partial(triton_forward.ranged_forward, config=self.config)
        span = CONFIG.window if problem.branch == "window" else None
        chosen = tiles.ranged_hopper_config(problem.head, problem.head, span, problem.num_keys)
        return functools.partial(sm90_forward.ranged_forward, config=chosen)

    def described(self) -> dict[str, Any]:
        """For the result."""
        return {"kernel": self.kernel, "tiles": self.config and dataclasses.asdict(self.config)}

    def __str__(self) -> str:
        if self.config is None:
            return self.kernel
        rows, keys, warps, stages = dataclasses.astuple(self.config)[:4]
        return f"{self.kernel:6} {rows:3} rows {keys:3} keys {warps} warps {stages} stages"


def candidates(head: int) -> Iterator[Candidate]:
    """All that is timed; the library's own choice comes first."""
    own = tiles.ranged_forward_config(head, head, jnp.bfloat16, LIBRARY)
    for config in [own, *(c for c in TILES if c != own)]:
        yield Candidate("pallas", config)
        yield Candidate("plain", config)
    if current_target().is_hopper:
        yield Candidate("hopper", None)


def compile_one(candidate: Candidate, problems: list[Problem], capability: int | None) -> list[Any]:
    """The candidate's program for each problem; in place of one that cannot be compiled the error."""
    programs: list[Any] = []
    for problem in problems:
        try:
            target = current_target() if candidate.kernel == "hopper" else LIBRARY
            with compile_for(target):
                lowered = problem.jitted(candidate.forward(problem, capability)).lower(*problem.shapes())
            programs.append(lowered.compile())
        except Exception as error:  # one that does not fit must not lose the others
            programs.append(error)
    return programs


def worst_error(got, want) -> float:
    """The largest difference, as a share of the largest value; rows that see no key must agree exactly."""
    got, want = (x.astype(jnp.float32) for x in (got, want))
    nothing = jnp.isneginf(want)
    if not bool(jnp.array_equal(nothing, jnp.isneginf(got))):
        return math.inf
    got, want = jnp.where(nothing, 0.0, got), jnp.where(nothing, 0.0, want)
    return float(jnp.abs(got - want).max() / jnp.abs(want).max())


def expected(problem: Problem, seed: int) -> tuple[jax.Array, jax.Array]:
    """The reference's output and log-sum-exp in float32, on the CPU, where its products compile fast."""

    @jax.jit
    def attend(query, key, value):
        low, high = problem.ranges(query)
        position = jnp.arange(problem.num_keys)
        mask = (position >= low[..., None]) & (position < high[..., None])
        return reference._attend(*(x.astype(jnp.float32) for x in (query, key, value)), mask[:, :, None, :])

    return attend(*on_cpu(problem.arrays(seed)))


def on_cpu(arrays: Any) -> Any:
    return jax.device_put(arrays, jax.devices("cpu")[0])


def check(problem: Problem, programs: dict[Candidate, Any], want: Any, seed: int) -> dict[Candidate, str]:
    """Compares each candidate with the reference: what is wrong with those that cannot be timed."""
    arrays = problem.arrays(seed)
    wrong: dict[Candidate, str] = {}
    for candidate, program in programs.items():
        try:
            if isinstance(program, Exception):
                raise program
            errors = [worst_error(g, w) for g, w in zip(on_cpu(program(*arrays)), want, strict=True)]
            if not max(errors) <= TOLERANCE:
                wrong[candidate] = f"output off by {errors[0]:.1e}, log-sum-exp by {errors[1]:.1e}"
        except Exception as error:
            wrong[candidate] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        worst = wrong.get(candidate) or f"output {errors[0]:.1e}, log-sum-exp {errors[1]:.1e} of scale"
        print(f"{problem.branch:>10} T={problem.length:<6} {candidate!s:45} {worst}", flush=True)
    return wrong


def best_of(times: dict[Candidate, float], kernel: str) -> Candidate | None:
    """The fastest candidate of a kernel."""
    return min((c for c in times if c.kernel == kernel), key=times.__getitem__, default=None)


def time_problem(problem: Problem, programs: dict[Candidate, Any], args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each candidate, and a second one for those that are timed again in turns."""
    arrays, tflop = problem.arrays(args.seed), problem.tflop()
    rows: list[dict[str, Any]] = []

    def add(candidate: Candidate, ms: float, again: bool) -> None:
        row = {"branch": problem.branch, "B": problem.batch, "T": problem.length, "N": problem.heads}
        row |= {"K": problem.kv_heads, "H": problem.head} | candidate.described() | {"final": again, "ms": round(ms, 4)}
        row["tflops"] = round(tflop / ms * 1e3, 1)
        rows.append(row)
        label = f"{problem.branch:>10} T={problem.length:<6} {candidate!s:45}"
        print(f"{label} {ms:8.3f} ms {row['tflops']:6.1f} TFLOP/s{'  again' if again else ''}", flush=True)

    times: dict[Candidate, float] = {}
    for candidate, program in programs.items():
        try:
            if isinstance(program, Exception):
                raise program
            times[candidate] = measure(program, [tuple(arrays)], repeats=5, min_sample_s=0.02)
        except Exception as error:
            print(f"{problem.branch:>10} T={problem.length:<6} {candidate!s:45} {type(error).__name__}: {error}"[:300])
            continue
        add(candidate, times[candidate], False)
    own = next((c for c in times if c.kernel == "pallas"), None)
    finalists = dict.fromkeys(c for c in (own, *(best_of(times, k) for k in ("pallas", "plain", "hopper"))) if c)
    samples: dict[Candidate, list[float]] = {c: [] for c in finalists}
    for _ in range(args.rounds):
        for candidate, kept in samples.items():
            kept.append(measure(programs[candidate], [tuple(arrays)], repeats=3, min_sample_s=0.05))
    for candidate, kept in samples.items():
        add(candidate, statistics.median(kept), True)
    return rows


def summarise(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """How the fastest of each kernel compare, for every problem: the plain kernel's speed with Pallas's as 1."""
    found = []
    for branch, length in dict.fromkeys((r["branch"], r["T"]) for r in rows):
        final = [r for r in rows if (r["branch"], r["T"]) == (branch, length) and r["final"]]
        entry: dict[str, Any] = {"branch": branch, "T": length}
        for row in sorted(final, key=lambda row: row["ms"]):
            entry.setdefault(f"{row['kernel']}_ms", row["ms"])
        if "pallas_ms" in entry and "plain_ms" in entry:
            entry["plain_speed"] = round(entry["pallas_ms"] / entry["plain_ms"], 3)
        found.append(entry)
        print(" ".join(f"{name} {value}" for name, value in entry.items()), flush=True)
    return found


def main() -> None:
    """Reads flags, checks the kernels and times them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", default=[8192, 32768], type=lambda s: [int(x) for x in s.split(",")])
    parser.add_argument("--check-length", default=2048, type=int, help="length at which results are checked")
    parser.add_argument("--shape", default="64,4,128", help="N,K,H")
    parser.add_argument("--capability", type=int, help="generate the plain kernel's code for it, such as 80")
    parser.add_argument("--rounds", default=5, type=int, help="turns in which the fastest are timed again")
    parser.add_argument("--workers", default=min(16, os.cpu_count() or 1), type=int, help="programs compiled at once")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", help="write the rows and the environment here")
    parser.add_argument("--commit", help="commit to record where git is not available")
    args = parser.parse_args()
    heads, kv_heads, head = (int(x) for x in args.shape.split(","))
    start = time.perf_counter()
    versions = {"triton": triton.__version__, "jax_triton": jax_triton.__version__, "capability": args.capability}
    result: dict[str, Any] = {"environment": environment(args.commit) | versions, "rows": []}
    print(result["environment"], flush=True)

    lengths = [args.check_length, *args.lengths]
    problems = {branch: [Problem(branch, length, heads, kv_heads, head) for length in lengths] for branch in BRANCHES}
    cases = [(branch, candidate) for branch in BRANCHES for candidate in candidates(head)]
    with concurrent.futures.ThreadPoolExecutor(args.workers) as pool:
        references = {branch: pool.submit(expected, problems[branch][0], args.seed) for branch in BRANCHES}
        compiled = list(pool.map(lambda case: compile_one(case[1], problems[case[0]], args.capability), cases))
    print(f"compiled {len(cases)} kernels in {time.perf_counter() - start:.1f} s", flush=True)

    for branch in BRANCHES:
        programs = {c: p for (b, c), p in zip(cases, compiled, strict=True) if b == branch}
        wrong = check(
            problems[branch][0], {c: p[0] for c, p in programs.items()}, references[branch].result(), args.seed
        )
        right = {c: p for c, p in programs.items() if c not in wrong}
        result.setdefault("left_out", []).extend(
            {"branch": branch} | c.described() | {"why": why} for c, why in wrong.items()
        )
        for i, problem in enumerate(problems[branch][1:], start=1):
            result["rows"] += time_problem(problem, {c: p[i] for c, p in right.items()}, args)
            if args.json:
                pathlib.Path(args.json).write_text(json.dumps(result, indent=1) + "\n")
    result["summary"] = summarise(result["rows"])
    print(f"{time.perf_counter() - start:.0f} s in all")
    if args.json:
        pathlib.Path(args.json).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
