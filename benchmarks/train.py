"""Training speed: tokens per second, MFU and memory of NSA and dense models, by row length and by number of GPUs.

    python benchmarks/train.py --remat attention_saved --json out.json
    python benchmarks/train.py --lengths 2048 --tokens 131072,262144 --remat none,attention_saved,block
    python benchmarks/train.py --attention nsa --lengths 2048 --devices 1,2,4 --layouts data,fsdp
    python benchmarks/train.py --attention nsa --lengths 8192 --matmul compute,float8 --losses 200
    JAX_PLATFORMS=cpu python benchmarks/train.py --attention nsa --lengths 2048 --devices 8 --target h200

times the compiled training step of a config (configs/a100_prod.py) on random tokens of a byte vocabulary: forward,
backward, optimizer. Models see the same tokens per step and have the same number of parameters: the MLP of those
without NSA's extra projections is wider (`--same_mlp` leaves it). Dense attention is cuDNN's, so rows are unpacked, and
not deterministic. NSA's steps are, as by default, unless `--deterministic ''` is given: then XLA times which matrix
product is fastest for both. Of several sizes and remat policies the fastest is kept for the table. Memory is the
compiler's plan for one device: arguments and temporaries. Steps with NSA are compiled side by side, so
`compile_seconds` depends on how many there are. `--profile` lists the kernels that took most. With `--losses N`, a
model first trains N steps on the source code of Python's library, the same bytes in every case: `loss` is the mean of
its last tenth. With `--target`, no GPU is needed: rows have the memory that one device needs and what its collectives
result in.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import math
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from benchmarks.timing import environment, kernel_times  # noqa: E402
from nsa_jax import aot  # noqa: E402
from nsa_jax.command_line import load_config  # noqa: E402
from nsa_jax.data.sources import StdlibSource  # noqa: E402
from nsa_jax.train import flops  # noqa: E402
from nsa_jax.train.preflight import hlo  # noqa: E402
from nsa_jax.train.state import batch_sharding, setup  # noqa: E402
from nsa_jax.train.step import make_train_step  # noqa: E402

VOCAB = 257  # bytes and the end of a document
GIB = 2**30


def row_shares(layout: str, devices: int) -> int:
    """Devices that a row is split over."""
    axis, _, share = layout.partition("=")
    return int(share or devices) if axis == "context" else 1


def make_config(options: argparse.Namespace, case: dict[str, Any]) -> Any:
    """The config file's, changed to what is timed."""
    config = load_config(options.config)
    config.model.attention, config.model.remat = case["attention"], case["remat"]
    config.data.tokenizer, config.data.packing, config.data.seq_len = "byte", False, case["length"]
    shares = row_shares(case["layout"], case["devices"])
    config.train.batch_size = case["tokens"] * shares // case["length"] * (case["devices"] // shares)
    config.train.grad_accum = 1
    config.train.deterministic = case["deterministic"]
    config.model.scan_layers = case["layers"] == "scanned"
    config.model.matmul_dtype = "" if case["matmul"] == "compute" else case["matmul"]
    config.train.offload_optimizer = case["averages"] == "host"
    axis, _, share = case["layout"].partition("=")
    if axis != "data":
        config.mesh[axis] = int(share or case["devices"])
    if axis == "tensor":
        config.model.vocab_size = -(-VOCAB // (64 * config.mesh.tensor)) * 64 * config.mesh.tensor
    if options.tiny:
        config.model.dim, config.model.num_layers, config.model.num_heads, config.model.head_dim = 32, 2, 4, 16
    return config


def widen_mlp(config: Any, devices: list) -> None:
    """Gives the model the number of parameters that it would have with NSA."""
    changed = config.copy_and_resolve_references()
    changed.model.attention = "nsa"
    match_parameters(config, setup(changed, VOCAB, devices).num_parameters(), devices)


def match_parameters(config: Any, total: int, devices: list) -> None:
    """Widens or narrows the MLP until the model has `total` parameters, to the next 64 hidden features."""
    made = setup(config, VOCAB, devices)
    missing = round((total - made.num_parameters()) / (3 * config.model.dim * config.model.num_layers) / 64) * 64
    config.model.mlp_dim = made.model_config.mlp_dim + missing


def on_device(tokens: np.ndarray, sharding: Any) -> dict[str, jax.Array]:
    """A batch of rows of int32 tokens, each with the one that follows its last."""
    shape = (tokens.shape[0], tokens.shape[1] - 1)
    arrays = {
        "inputs": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "segment_start": np.zeros(shape, np.int32),
        "loss_mask": np.ones(shape, np.float32),
    }
    return jax.device_put(arrays, sharding)


def random_batches(config: Any, sharding: Any, count: int) -> list[dict[str, jax.Array]]:
    """Batches on the device, of fresh random tokens."""
    shape = (config.train.batch_size, config.data.seq_len + 1)
    draw = [np.random.default_rng(seed).integers(0, VOCAB, shape, dtype=np.int32) for seed in range(count)]
    return [on_device(tokens, sharding) for tokens in draw]


def text_batches(config: Any, sharding: Any, count: int) -> Iterator[dict[str, jax.Array]]:
    """Batches of the bytes of Python's library; rows begin anywhere."""
    text = np.frombuffer("".join(StdlibSource().documents()).encode(), np.uint8)
    length = config.data.seq_len + 1
    for seed in range(count):
        starts = np.random.default_rng(seed).integers(0, len(text) - length, config.train.batch_size)
        yield on_device(np.stack([text[start : start + length] for start in starts]).astype(np.int32), sharding)


def train_on_text(options: argparse.Namespace, made: Any, step: Any, state: Any) -> tuple[Any, dict[str, float]]:
    """The state after `--losses` steps, and what they reached."""
    found = []
    for batch in text_batches(made.config, batch_sharding(made.mesh), options.losses):
        state, metrics = step(state, batch)
        found.append(metrics["loss"])
    if not found:
        return state, {}
    return state, {"loss": round(float(np.mean(jax.device_get(found)[-max(len(found) // 10, 1) :])), 5)}


def prepare(options: argparse.Namespace, case: dict[str, Any]) -> Any:
    """The setup of a case."""
    config = make_config(options, case)
    devices = aot.devices(options.target, case["devices"]) if options.target else jax.devices()[: case["devices"]]
    if not options.same_mlp:
        widen_mlp(config, devices)
    return setup(config, VOCAB, devices)


def compile_step(options: argparse.Namespace, made: Any) -> tuple[Any, float]:
    """The compiled train step, and the seconds that took."""
    start = time.perf_counter()
    step = make_train_step(made, np.ones(made.model_config.vocab_size, np.int32))
    with aot.tracing_for(options.target, made.mesh) if options.target else jax.set_mesh(made.mesh):
        traced = step.trace(made.target(), made.abstract_batch())
        lowered = traced.lower(lowering_platforms=("cuda",) if options.target else None)
    return lowered.compile(), time.perf_counter() - start


def planned_gib(step: Any) -> float:
    """What the compiler plans to hold on one device."""
    plan = step.memory_analysis()
    return round((plan.argument_size_in_bytes + plan.temp_size_in_bytes) / GIB, 2)


def count(case: dict[str, Any], made: Any, step: Any, seconds: float) -> dict[str, Any]:
    """A case with what its compiled step holds and sends on each device."""
    return {
        **case,
        "batch_size": made.config.train.batch_size,
        "parameters": made.num_parameters(),
        "planned_gib": planned_gib(step),
        "collectives": [dataclasses.asdict(found) for found in hlo.collectives(step.as_text())],
        "compile_seconds": round(seconds, 1),
    }


def run(options: argparse.Namespace, case: dict[str, Any], made: Any, step: Any, seconds: float) -> dict[str, Any]:
    """Times one case, whose step was compiled in so many seconds; returns the case with its figures."""
    compile_seconds, config = seconds, made.config
    with jax.set_mesh(made.mesh):
        state = made.init()
        batches = random_batches(config, batch_sharding(made.mesh), 3)
        state, reached = train_on_text(options, made, step, state)
        for batch in batches[:2]:
            state, metrics = step(state, batch)
        jax.block_until_ready(state)
        start = time.perf_counter()
        state, metrics = step(state, batches[2])
        jax.block_until_ready(state)
        steps = options.steps or math.ceil(options.seconds / (time.perf_counter() - start))
        seconds = []
        for _ in range(options.repeats):
            start = time.perf_counter()
            for index in range(steps):
                state, metrics = step(state, batches[index % len(batches)])
            jax.block_until_ready(state)
            seconds.append((time.perf_counter() - start) / steps)
        loss = float(metrics["loss"])
        if not np.isfinite(loss):
            raise RuntimeError(f"loss {loss}: nothing to time")
        if options.profile:
            one_step = functools.partial(step, state, batches[0])
            totals = {name: sum(us) / 1e3 for name, us in kernel_times(one_step).items()}
            busy = sum(totals.values())
            print(f"  kernels {busy:.1f} ms of {statistics.median(seconds) * 1e3:.1f} ms; the longest:")
            for name, ms in list(totals.items())[: options.profile]:
                print(f"  {ms:9.3f} ms  {ms / busy:6.1%}  {name[:100]}")
    second = statistics.median(seconds)
    tokens = config.train.batch_size * config.data.seq_len
    peak = flops.peak_flops(jax.devices()[0].device_kind)
    useful = flops.train_flops_per_token(made.model_config, case["length"]) * tokens / second / case["devices"]
    return {
        **case,
        "batch_size": config.train.batch_size,
        "parameters": made.num_parameters(),
        "steps": steps,
        "step_ms": round(second * 1e3, 2),
        "tokens_per_second": round(tokens / second),
        "tokens_per_second_per_device": round(tokens / second / case["devices"]),
        "mfu": round(useful / peak, 4) if peak else None,
        **reached,
        "planned_gib": planned_gib(step),
        "compile_seconds": round(compile_seconds, 1),
    }


def show(rows: list[dict[str, Any]]) -> None:
    """The fastest of each attention, length, number of devices and layout."""
    best: dict[tuple, dict[str, Any]] = {}
    for row in rows:
        key = (row["length"], row["devices"], row["layout"], row["attention"], row["matmul"], row["averages"])
        if "error" not in row and row["tokens_per_second"] > best.get(key, {}).get("tokens_per_second", 0):
            best[key] = row
    print("  length devices layout attention     batch  remat            tokens/s    MFU    GiB  over dense, 1 device")
    for key, row in sorted(best.items()):
        length, devices, layout, attention, matmul, averages = key
        dense = best.get((length, devices, layout, "dense", matmul, averages))
        one = next((best[k] for k in best if k[0] == length and k[1] == 1 and k[3:] == key[3:]), None)
        plain = best.get((length, devices, layout, attention, "compute", "device"))
        notes = []
        if plain and plain is not row:
            row["over_plain"] = round(row["tokens_per_second"] / plain["tokens_per_second"], 3)
            notes.append(f"products {matmul}, averages on {averages}: {row['over_plain']:.3f}x without")
            if "loss" in row and "loss" in plain:
                notes.append(f"loss {row['loss']:.4f}, {row['loss'] - plain['loss']:+.4f}")
        if dense and attention != "dense":
            row["over_dense"] = round(row["tokens_per_second"] / dense["tokens_per_second"], 3)
            notes.append(f"{row['over_dense']:.2f}x dense")
        if one and devices > 1:
            row["scaling"] = round(row["tokens_per_second_per_device"] / one["tokens_per_second"], 4)
            notes.append(f"{row['scaling']:.1%} of one device")
        mfu = f"{row['mfu']:.1%}" if row["mfu"] else "-"
        print(
            f"{length:>8} {devices:>7} {layout:<6} {attention:<10} {row['batch_size']:>8}  {row['remat']:<15} "
            f"{row['tokens_per_second']:>10,} {mfu:>6} {row['planned_gib']:>6}   {', '.join(notes)}"
        )


def write(options: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    """Puts the rows, and what they depend on, into `--json`."""
    if options.json:
        text = json.dumps({**environment(options.commit), "rows": rows}, indent=1)
        pathlib.Path(options.json).write_text(text + "\n")


def cases(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Every combination of the flags that means something."""
    names = ("lengths", "devices", "layouts", "attention", "tokens", "remat", "layers", "matmul", "averages")
    lists = [getattr(options, name).split(",") for name in names]
    for length, devices, layout, attention, tokens, remat, layers, matmul, averages in itertools.product(*lists):
        case = dict(attention=attention, length=int(length), tokens=int(tokens), devices=int(devices))
        case |= dict(layout=layout, remat=remat, layers=layers, matmul=matmul, averages=averages)
        case["deterministic"] = attention in options.deterministic.split(",")
        if case["devices"] == 1 and layout != lists[2][0]:
            continue  # one device has one layout
        if case["tokens"] * row_shares(layout, case["devices"]) < case["length"]:
            print(f"left out: --tokens {tokens} is less than a device's share of a row of {length}")
            continue
        yield case


def _fail(error: Exception) -> Any:
    raise error


def start_compiling(
    options: argparse.Namespace, case: dict[str, Any], threads: ThreadPoolExecutor
) -> Callable[[], tuple[Any, Any, float]]:
    """What returns a case's setup, its compiled step and the seconds that took; what failed is raised then.

    All steps are compiled at once.
    """
    try:
        made = prepare(options, case)
    except Exception as error:
        return functools.partial(_fail, error)
    future = threads.submit(compile_step, options, made)
    return lambda: (made, *future.result())


def main() -> None:
    """Reads flags, times every case, prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default=str(pathlib.Path(__file__).parents[1] / "configs" / "a100_prod.py"))
    parser.add_argument("--attention", default="nsa,dense")
    parser.add_argument("--lengths", default="2048,8192,32768,65536", help="tokens in a row")
    parser.add_argument("--tokens", default="131072", help="per device and step")
    parser.add_argument("--remat", default="block", help="policies to try: none,attention_saved,block,offload,full")
    parser.add_argument("--layers", default="scanned", help="scanned (compiled once), unrolled")
    parser.add_argument("--matmul", default="compute", help="compute (in bfloat16), float8")
    parser.add_argument("--averages", default="device", help="where the optimizer's are between steps: device, host")
    parser.add_argument("--losses", type=int, default=0, help="steps on text before the timing")
    parser.add_argument("--devices", default="1", help="numbers of devices; every device gets --tokens")
    parser.add_argument("--layouts", default="data", help="data, fsdp, tensor, context; tensor=2: the rest is data")
    parser.add_argument("--target", default="", help="time nothing: compile for this GPU, such as h200, and count")
    parser.add_argument("--deterministic", default="nsa,window", help="attention with deterministic steps; '': none")
    parser.add_argument("--same_mlp", action="store_true", help="do not give dense models NSA's number of parameters")
    parser.add_argument("--seconds", type=float, default=8, help="of one sample; its start takes up to 26 ms of them")
    parser.add_argument("--steps", type=int, default=0, help="of one sample, instead of --seconds")
    parser.add_argument("--repeats", type=int, default=3, help="samples of which the median is taken")
    parser.add_argument("--profile", type=int, default=0, help="also list this many kernels of one step")
    parser.add_argument("--json", default="")
    parser.add_argument("--commit", default=None)
    parser.add_argument("--tiny", action="store_true", help="a model for trying this out on a CPU")
    options = parser.parse_args()
    load_config(options.config)  # a file that is not there is no row of the table
    found = list(cases(options))
    rows: list[dict[str, Any]] = []
    with ThreadPoolExecutor(1 if options.target else 8) as threads:
        compiling = [start_compiling(options, case, threads) for case in found]
        for case, compiled in zip(found, compiling, strict=True):
            try:
                row = count(case, *compiled()) if options.target else run(options, case, *compiled())
            except Exception as error:  # out of memory, mostly: the other cases are still worth having
                row = {**case, "error": f"{type(error).__name__}: {error}".splitlines()[0][:300]}
            print(" ".join(f"{name}={value}" for name, value in row.items()), flush=True)
            rows.append(row)
            write(options, rows)  # a later case may take the process down
    if not options.target:
        show(rows)
    write(options, rows)
    if all("error" in row for row in rows):
        sys.exit("no case was timed: the rows above say why")


if __name__ == "__main__":
    main()
