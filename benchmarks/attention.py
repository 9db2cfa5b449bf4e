r"""Times NSA and its branches against dense cuDNN attention, in one process on one GPU.

    python benchmarks/attention.py --json benchmarks/results/attention_h200.json \
        --plot benchmarks/results/attention_h200.png
    python benchmarks/attention.py --lengths 2048,8192 --shape 12,2,64,64 --ops nsa,selected --lists random,shared
    python benchmarks/attention.py --lengths 2048 --batch 64 --shape 12,2,64,64 --kernels hopper,a100 --ops nsa
    python benchmarks/attention.py --lengths 32768 --documents 16 --no-dense --ops nsa
    python benchmarks/attention.py --lengths 65536 --alike 64 --ops nsa
    python benchmarks/attention.py --lengths 8192 --ops nsa --passes fwd --profile 8      # kernels, by launch
    python benchmarks/attention.py --merge more.json --json benchmarks/results/attention_h200.json \
        --plot benchmarks/results/attention_h200.png     # rows of another run on the same GPU; then make docs
    python benchmarks/attention.py --merge benchmarks/results/attention_h200.json \
        --json benchmarks/results/attention_h200.json --plot benchmarks/results/attention_h200.png      # draws it again

"nsa" is `nsa_attention` with selection, gates and list building, compressed keys given; its gradients are those of all
eight inputs. "selected" alone reads made-up lists: independent per token ("random") or shared by 64 neighbours
("shared"). Queries are random, the worst case for "nsa"; with `--alike 64` so many neighbours have the same query, and
so nearly the same lists. "nsa_shared", which `--ops` must name, has one key and one value for the selected branch and
the window, as the configs do. `--kernels a100` times on a Hopper GPU the kernels that an A100 would get, `a100_triton`
has Triton for all of range attention, as before JAX 0.11 but without cuDNN for the window. `--no-wgmma` keeps Triton
from Hopper's instructions, as Mosaic GPU is for `a100`. All programs are compiled side by side before the first is
timed.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import functools
import gc
import json
import os
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import nsa_jax  # noqa: E402
from benchmarks.timing import environment, kernel_times, matmul_ceiling, measure  # noqa: E402
from nsa_jax.ops import blocks  # noqa: E402
from nsa_jax.ops.target import Target, compile_for, current_target  # noqa: E402

OPS = ("nsa", "compressed", "select", "selected", "window")
WHOLE = ("nsa", "nsa_shared")  # ops that are the whole operator
PASSES = ("fwd", "bwd", "fwd_bwd")
_TRACED = 5  # calls of which `--profile` shows the mean
CASE = ("op", "pass", "B", "T", "N", "K", "H", "V", "lists", "kernels", "documents")


def make_lists(key: jax.Array, length: int, num_kv: int, config: nsa_jax.NSAConfig, shared_by: int) -> jax.Array:
    """Block lists [1, T, K, n]: the forced blocks and random ones, the same for `shared_by` neighbouring tokens."""
    num_blocks = blocks.num_selection_blocks(length, config.select_block)

    def chunk(args):
        key, t = args  # t [shared_by]: the group's tokens
        noise = jax.random.uniform(key, (num_kv, num_blocks))
        scores = jnp.broadcast_to(noise, (shared_by, num_kv, num_blocks))
        return blocks.select_from_importance(scores, t[:, None], jnp.zeros_like(t)[:, None], config)

    groups = -(-length // shared_by)
    t = jnp.arange(groups * shared_by, dtype=jnp.int32).reshape(groups, shared_by)
    batch = max(1, 4096 // shared_by)
    lists = jax.lax.map(chunk, (jax.random.split(key, groups), t), batch_size=batch)
    return lists.reshape(1, groups * shared_by, num_kv, config.num_selected)[:, :length]


def visible_pairs(op: str, length: int, config: nsa_jax.NSAConfig, lists: jax.Array | None = None) -> float:
    """Query-key pairs per query head that the op must touch."""
    t = np.arange(length, dtype=np.int64)
    if op == "dense":
        return float(np.sum(t + 1))
    if op in ("compressed", "select"):
        low, high = blocks.compressed_range(t, 0, config)
        return float(np.sum(np.maximum(high - low, 0)))
    if op == "window":
        return float(np.sum(np.minimum(t + 1, config.window)))
    assert lists is not None
    tokens = jnp.clip(jnp.arange(length)[None, :, None, None] + 1 - lists * config.select_block, 0, config.select_block)
    return float(tokens.sum(dtype=jnp.float32) / lists.shape[2])


def useful_tflop(op: str, which: str, pairs: dict[str, float], num_heads: int, head: int, value_head: int) -> float:
    """Multiply-adds the pass needs in TFLOP: scores and values forward; five products backward."""
    forward = 2 * (head + value_head)
    backward = 2 * (3 * head + 2 * value_head)
    per_pair = {"fwd": forward, "bwd": backward, "fwd_bwd": forward + backward}[which]
    if op == "select":
        return pairs["select"] * num_heads * 2 * head / 1e12
    if op in WHOLE:
        attention = sum(pairs[o] for o in ("compressed", "selected", "window")) * per_pair
        scores = pairs["select"] * 2 * head if which != "bwd" else 0
        return (attention + scores) * num_heads / 1e12
    return pairs[op] * num_heads * per_pair / 1e12


def split_passes(function, num_differentiable: int):
    """Jitted forward, backward on stored residuals, and both, of `function(*inputs)` -> array."""

    def vjp(*inputs):
        return jax.vjp(lambda *x: function(*x, *inputs[num_differentiable:]), *inputs[:num_differentiable])

    def both(cotangent, *inputs):
        out, pullback = vjp(*inputs)
        return out, pullback(cotangent)

    return jax.jit(function), jax.jit(vjp), jax.jit(lambda pullback, cotangent: pullback(cotangent)), jax.jit(both)


class Bench:
    """All measurements for one (length, shape).

    Args:
      documents: of equal length, that a row packs.
      alike: neighbouring tokens that have the same query.
    """

    def __init__(self, length, heads, kv_heads, head, value_head, config, dtype, seed, batch=1, documents=1, alike=1):
        self.length, self.heads, self.kv_heads = length, heads, kv_heads
        self.head, self.value_head, self.config, self.dtype = head, value_head, config, dtype
        self.batch, self.documents, self.alike, self.seed = batch, documents, alike, seed
        self.keys = iter(jax.random.split(jax.random.key(seed), 64))

    def normal(self, *shape):
        return jax.random.normal(next(self.keys), (self.batch, *shape), self.dtype)

    def query(self):
        different = self.normal(-(-self.length // self.alike), self.heads, self.head)
        return jnp.repeat(different, self.alike, axis=1)[:, : self.length]

    def key_value(self, length):
        return self.normal(length, self.kv_heads, self.head), self.normal(length, self.kv_heads, self.value_head)

    def cotangent(self):
        return self.normal(self.length, self.heads, self.value_head)

    def gates(self):
        return jax.nn.sigmoid(self.normal(self.length, self.heads, 3))

    def log_sum_exp(self, *arrays):
        return jax.jit(lambda q, k, v: nsa_jax.compressed_attention(q, k, v, config=self.config)[1])(*arrays)

    def segments(self):
        """Where each token's document starts."""
        size = -(-self.length // self.documents)
        return jnp.broadcast_to(jnp.arange(self.length, dtype=jnp.int32) // size * size, (self.batch, self.length))

    def lists(self, shared_by):
        """Made-up block lists of every row."""
        keys = jax.random.split(jax.random.key(self.seed + 1), self.batch)
        made = [make_lists(key, self.length, self.kv_heads, self.config, shared_by) for key in keys]
        return jnp.concatenate(made)

    def pairs(self, op, lists=None):
        """Query-key pairs per query head of one row."""
        return self.documents * visible_pairs(op, -(-self.length // self.documents), self.config, lists)

    def inputs(self, op, lists):
        """(function, inputs, how many of them are differentiable)."""
        config = self.config
        num_cmp = blocks.num_compressed(self.length, config)
        if op == "dense":
            dense = functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation="cudnn")
            return dense, (self.query(), *self.key_value(self.length)), 3
        if op == "compressed":
            return (
                lambda q, k, v: nsa_jax.compressed_attention(q, k, v, config=config)[0],
                (self.query(), *self.key_value(num_cmp)),
                3,
            )
        if op == "select":
            query, (key, value) = self.query(), self.key_value(num_cmp)
            select = functools.partial(nsa_jax.select_blocks, config=config)
            return select, (query, key, self.log_sum_exp(query, key, value)), 0
        if op == "window":
            window = functools.partial(nsa_jax.window_attention, window=config.window)
            return window, (self.query(), *self.key_value(self.length)), 3
        if op == "selected":
            selected = functools.partial(nsa_jax.selected_attention, select_block=config.select_block)
            return selected, (self.query(), *self.key_value(self.length), lists), 3
        arrays = self.query(), *self.key_value(num_cmp), *self.key_value(self.length)
        if op == "nsa":
            arrays += self.key_value(self.length)
        count = len(arrays) + 1

        segments = () if self.documents == 1 else (self.segments(),)

        def nsa(*inputs):
            *branches, gates = inputs[:count]
            window = branches[3:5] if op == "nsa_shared" else ()
            start = inputs[count] if segments else None
            arrays = (*branches, *window, gates)
            return nsa_jax.nsa_attention(*arrays, config=config, segment_start=start, nonnegative_gates=True)

        return nsa, (*arrays, self.gates(), *segments), count

    def run(self, op, compiled, lists=None, profile=False):
        """(milliseconds by pass, temporary memory of forward and backward in GiB, `kernel_times` by pass if asked)."""
        _, inputs, _ = self.inputs(op, lists)
        times: dict[str, float] = {}
        kernels: dict[str, dict[str, list[float]]] = {}
        temp = None
        for which in ("fwd", "fwd_bwd", "bwd"):
            if which not in compiled:
                continue
            arguments = inputs if which == "fwd" else (self.cotangent(), *inputs)
            if which == "fwd_bwd":
                temp = compiled[which].memory_analysis().temp_size_in_bytes / 2**30
            if which == "bwd":
                arguments = compiled["vjp"](*inputs)[1], self.cotangent()
            times[which] = measure(compiled[which], [arguments])
            if profile:
                kernels[which] = kernel_times(functools.partial(compiled[which], *arguments), _TRACED)
        return times, temp, kernels


class AbstractBench(Bench):
    """Inputs that are shapes alone."""

    def normal(self, *shape):
        return jax.ShapeDtypeStruct((self.batch, *shape), self.dtype)

    def query(self):
        return self.normal(self.length, self.heads, self.head)

    def gates(self):
        return self.normal(self.length, self.heads, 3)

    def log_sum_exp(self, query, key, value):
        return jax.ShapeDtypeStruct(query.shape[:3], jnp.float32)

    def lists(self, shared_by):
        return jax.ShapeDtypeStruct((self.batch, self.length, self.kv_heads, self.config.num_selected), jnp.int32)

    def lowered(self, op, passes) -> dict[str, Any]:
        """The programs of an op, by what they are of."""
        function, inputs, num_differentiable = self.inputs(op, self.lists(1))
        forward, vjp, backward, both = split_passes(function, num_differentiable)
        made = {"fwd": forward.lower(*inputs)} if "fwd" in passes else {}
        if num_differentiable and "fwd_bwd" in passes:
            made["fwd_bwd"] = both.lower(self.cotangent(), *inputs)
        if num_differentiable and "bwd" in passes:
            _, pullback = jax.eval_shape(vjp, *inputs)
            made |= {"vjp": vjp.lower(*inputs), "bwd": backward.lower(pullback, self.cotangent())}
        return made


def serving(kernels: str) -> contextlib.AbstractContextManager:
    """Ops traced inside choose the kernels of that name."""
    a100 = Target("gpu", (8, 0))
    if kernels == "a100_triton":
        return compile_for(a100)
    other = kernels == "a100" and current_target().is_hopper
    return compile_for(a100, ahead_of_time=False) if other else contextlib.nullcontext()


def cases(args) -> Iterator[tuple[dict[str, Any], tuple]]:
    """What is timed, and the arguments of its `Bench`."""
    config = nsa_jax.NSAConfig()
    chosen = "selection" if args.alike == 1 else "alike"
    for shape, length in ((shape, length) for shape in args.shape for length in args.lengths):
        sizes = tuple(int(x) for x in shape.split(","))
        bench = (length, *sizes, config, jnp.bfloat16, args.seed, args.batch, args.documents, args.alike)
        case = {"B": args.batch, "T": length, **dict(zip("NKHV", sizes, strict=True)), "documents": args.documents}
        if args.dense:
            yield case | {"op": "dense", "lists": "", "kernels": ""}, bench
        for kernels in args.kernels:
            for op in args.ops:
                for lists in args.lists if op == "selected" else [chosen if op in WHOLE else ""]:
                    yield case | {"op": op, "lists": lists, "kernels": kernels}, bench


def compile_all(args) -> list[dict[str, Any] | Exception]:
    """The compiled programs of each case; of one that cannot be compiled the error."""

    def attempt(make, *arguments):
        try:
            return make(*arguments)
        except Exception as error:  # one size that does not fit must not lose the others
            return error

    def compiled(programs):
        return {name: program.compile() for name, program in programs.items()}

    lowered, before = [], None
    for case, sizes in cases(args):
        if case["kernels"] != before:
            jax.clear_caches()  # they do not see which kernels were chosen
        before = case["kernels"]
        with serving(case["kernels"]):
            lowered.append(attempt(AbstractBench(*sizes).lowered, case["op"], args.passes))
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(lambda one: one if isinstance(one, Exception) else attempt(compiled, one), lowered))


def run(args, save) -> list[dict]:
    """All rows; `save(rows)` is called with those so far after each op, so that a run cut short keeps its figures."""
    programs = compile_all(args)
    # Minutes on a CPU, where the benchmark only serves to check itself: use a size that device can do.
    ceiling = matmul_ceiling(8192 if jax.default_backend() == "gpu" else 512)
    print(f"bf16 matrix product ceiling: {ceiling:.3g} TFLOP/s")
    rows: list[dict] = []
    dense: dict[tuple, float] = {}
    for (case, sizes), compiled in zip(cases(args), programs, strict=True):
        bench, op = Bench(*sizes), case["op"]
        pairs = {name: bench.pairs(name) for name in ("dense", "compressed", "select", "window")}
        lists = None
        try:
            if isinstance(compiled, Exception):
                raise compiled
            if op == "selected" or op in WHOLE:
                whole = bench.lists(64 if case["lists"] == "shared" else 1)
                pairs["selected"] = bench.pairs("selected", whole[:1, : -(-bench.length // bench.documents)])
                lists = whole if op == "selected" else None
            with serving(case["kernels"]):
                times, temp, kernels = bench.run(op, compiled, lists, args.profile > 0)
        except Exception as error:
            print(f"{case}: {type(error).__name__}: {str(error)[:300]}", flush=True)
            continue
        finally:
            gc.collect()
        for which, ms in times.items():
            if op == "dense":
                dense[(which, *sizes[:5])] = ms
            tflop = bench.batch * useful_tflop(op, which, pairs, bench.heads, bench.head, bench.value_head)
            beside, rate = dense.get((which, *sizes[:5])), tflop / ms * 1e3
            row = {"op": op, "pass": which} | {name: case[name] for name in CASE[2:]} | {"ms": round(ms, 4)}
            row |= {"dense_ms": round(beside, 4) if beside else None}
            row |= {"tflops": round(rate, 3), "ceiling_share": round(rate / ceiling, 3)}
            if which == "fwd_bwd" and temp is not None:
                row["temp_gib"] = round(temp, 3)
            if which in kernels:
                row["kernels_us"] = {name: [round(x, 1) for x in us] for name, us in kernels[which].items()}
            rows.append(row)
            print_row(row, args.profile)
        save(rows)
    return rows


def print_row(row: dict, num_kernels: int = 0) -> None:
    speedup = f"{row['dense_ms'] / row['ms']:6.2f}x" if row["dense_ms"] else "      -"
    temp = f"  temp {row['temp_gib']:.2f} GiB" if "temp_gib" in row else ""
    print(
        f"{row['op']:>10} {row['lists']:>9} {row['kernels']:>6} {row['pass']:>7}  B={row['B']:<2} T={row['T']:<7} "
        f"N={row['N']:<3} K={row['K']:<2} H={row['H']:<3} {row['ms']:9.3f} ms  {speedup} dense  "
        f"{row['tflops']:6.0f} TFLOP/s ({row['ceiling_share']:.0%}){temp}",
        flush=True,
    )
    for name, us in list(row.get("kernels_us", {}).items())[:num_kernels]:
        launches = f"{len(us)} x" if len(us) > 4 else " + ".join(f"{x:.1f}" for x in us)
        print(f"{sum(us):12.1f} us  {name[:60]}  {launches}", flush=True)


def merge(kept: dict, other: dict) -> dict:
    """`kept` with the rows of another result, which replace those of the same case.

    A row that comes from `other` holds what differs between the two environments (commit, command, date), so that
    every row still says where it comes from.

    Raises:
      ValueError: the two were measured on different GPUs.
    """
    mine, theirs = kept["environment"], other["environment"]
    if mine["device"] != theirs["device"]:
        raise ValueError(f"rows of {theirs['device']} do not belong into a result of {mine['device']}")
    differs = {name: value for name, value in theirs.items() if mine.get(name) != value}
    rows = {tuple(row[name] for name in CASE): row for row in kept["rows"]}
    rows |= {tuple(row[name] for name in CASE): row | differs | row for row in other["rows"]}
    return kept | {"rows": list(rows.values())}


def plot(rows: list[dict], title: str, path: str) -> None:
    """Log-log time over T of dense and NSA attention, forward and forward + backward."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib import ticker

    first = next(row for row in rows if row["op"] == "nsa")
    shape = {key: first[key] for key in ("N", "K", "H", "V", "B", "documents")}
    figure, axis = plt.subplots(figsize=(7, 4.5))
    for which, style, label in (("fwd", "--", "forward"), ("fwd_bwd", "-", "forward + backward")):
        for op, colour in (("dense", "tab:grey"), ("nsa", "tab:blue")):
            points = sorted(
                (row["T"], row["ms"])
                for row in rows
                if row["op"] == op
                and row["pass"] == which
                and all(row[k] == v for k, v in shape.items())
                and all(row[k] in ("", first[k]) for k in ("kernels", "lists"))
            )
            if points:
                name = "dense (cuDNN)" if op == "dense" else "NSA (nsa_jax)"
                axis.loglog(*zip(*points, strict=True), style, marker="o", color=colour, label=f"{name}, {label}")
    lengths = sorted({row["T"] for row in rows if row["op"] == "nsa"})
    axis.set_xticks(lengths, [f"{length // 1024}k" for length in lengths])
    axis.minorticks_off()
    axis.yaxis.set_major_formatter(ticker.FormatStrFormatter("%g"))
    axis.set_xlabel("sequence length T")
    axis.set_ylabel("milliseconds")
    axis.set_title(title + "\n" + ", ".join(f"{k}={shape[k]}" for k in "NKHV"), fontsize=10)
    axis.grid(True, which="both", alpha=0.3)
    axis.legend(handlelength=3.5)
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def main() -> None:
    def words(choices):
        def parse(text):
            values = text.split(",")
            if unknown := set(values) - set(choices):
                raise argparse.ArgumentTypeError(f"unknown {sorted(unknown)}: choose from {choices}")
            return values

        return parse

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", default=[2048, 8192, 32768, 65536], type=lambda s: [int(x) for x in s.split(",")])
    parser.add_argument("--shape", action="append", help="N,K,H,V; repeatable (default 64,4,128,128)")
    parser.add_argument("--ops", default=list(OPS), type=words((*OPS, "nsa_shared")))
    parser.add_argument("--passes", default=list(PASSES), type=words(PASSES))
    parser.add_argument("--lists", default=["random", "shared"], type=words(("random", "shared")))
    parser.add_argument("--no-dense", dest="dense", action="store_false", help="leave the dense baseline out")
    target = current_target()
    own = "hopper" if target.is_hopper else "a100" if target.is_gpu else ""
    choices = "hopper", "a100", "a100_triton"
    parser.add_argument("--kernels", default=[own], type=words(choices), help="a100: those of an A100")
    parser.add_argument("--no-wgmma", action="store_true", help="Triton takes Ampere instructions on a Hopper GPU")
    parser.add_argument("--batch", type=int, default=1, help="rows")
    parser.add_argument("--documents", type=int, default=1, help="packed in a row; --ops nsa alone")
    parser.add_argument("--alike", type=int, default=1, help="neighbours that have the same query; --ops nsa alone")
    parser.add_argument("--profile", type=int, default=0, help="print this many kernels of a call, all into --json")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", help="write the rows and the environment here")
    parser.add_argument("--plot", help="write the log-log plot here")
    parser.add_argument("--merge", help="measure nothing: put the rows of this result into that of --json")
    parser.add_argument("--commit", help="commit to record where git is not available")
    args = parser.parse_args()
    if args.merge and not args.json:
        parser.error("--merge needs --json: the result that the rows are put into")
    if args.documents > 1 and (not set(args.ops) <= set(WHOLE) or args.dense):
        parser.error("--documents needs --ops nsa or nsa_shared and --no-dense: other ops are timed with one document")
    if args.alike > 1 and not set(args.ops) <= set(WHOLE):
        parser.error("--alike needs --ops nsa or nsa_shared: the other ops are timed with random queries")
    if "hopper" in args.kernels and own != "hopper" and not args.merge:
        parser.error("--kernels hopper needs a Hopper GPU")
    args.shape = args.shape or ["64,4,128,128"]
    if args.no_wgmma:
        os.environ["DISABLE_MMA_V3"] = "1"  # Triton reads it whenever it compiles
    result: dict = {} if args.merge else {"environment": environment(args.commit)}

    def save(rows):
        result["rows"] = rows
        if args.json:
            pathlib.Path(args.json).write_text(json.dumps(result, indent=1) + "\n")

    if args.merge:
        result = merge(*(json.loads(pathlib.Path(path).read_text()) for path in (args.json, args.merge)))
        save(result["rows"])
    else:
        run(args, save)
    if args.plot and any(row["op"] == "nsa" for row in result["rows"]):
        plot(result["rows"], f"One attention layer, {result['environment']['device']}, bfloat16", args.plot)


if __name__ == "__main__":
    main()
