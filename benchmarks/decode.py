"""Attention per token when decoding: NSA's cache reads against dense decoding, in one process.

    python benchmarks/decode.py --json benchmarks/results/decode_h200.json --plot benchmarks/results/decode_h200.png

Every layer of a model reads another cache, so calls rotate among caches that together are larger than the L2 cache; a
sample is one compiled loop over them, each call's output being the next call's query, so that neither dispatch nor
overlap shows. Dense decoding is the faster of cuDNN and XLA (no mask: the cache is full), and nsa_jax's own split
kernel is listed beside them. Bandwidth counts the key positions read, from the block lists that were used.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import pathlib
import sys

import jax
import jax.numpy as jnp

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import nsa_jax  # noqa: E402
from benchmarks.timing import environment, measure  # noqa: E402
from nsa_jax import aot  # noqa: E402
from nsa_jax.ops import blocks  # noqa: E402

CONTEXTS = (8192, 16384, 32768, 65536, 131072)
DENSE = ("cudnn", "xla", "split")
# Caches that one sample reads hold at least this much of what NSA reads, several times the L2 cache of any GPU here.
_ROTATED_BYTES = 192 * 2**20
_MOST_ROTATED = 16
_MEMORY_BYTES = 48 * 2**30


def random_cache(key, batch, context, num_kv, dim, config):
    """One layer's cache: compressed, selected and window keys and values of full rows."""
    sizes = (blocks.num_compressed(context, config), context, config.window)
    keys = jax.random.split(key, 6)
    shapes = [(batch, size, num_kv, dim) for size in sizes for _ in range(2)]
    return tuple(jax.random.normal(k, shape, jnp.bfloat16) for k, shape in zip(keys, shapes, strict=True))


def nsa_step(query, cache, *, gates, lengths, config):
    return nsa_jax.decode_attention(query, *cache, gates, lengths, config=config)


def dense_step(query, cache, *, lengths, implementation):
    if implementation == "split":
        from nsa_jax.ops.pallas import dense_decode_attention

        return dense_decode_attention(query, cache[2], cache[3], lengths)
    return jax.nn.dot_product_attention(query, cache[2], cache[3], implementation=implementation)


def milliseconds(step, query, caches) -> float:
    """Median milliseconds of one call of `step`, looping over the caches."""
    rounds = max(1, 16 // len(caches))

    @jax.jit
    def loop(query, caches):
        def body(_, query):
            for cache in caches:
                query = step(query, cache)
            return query

        return jax.lax.fori_loop(0, rounds, body, query)

    return measure(loop, [(query, caches)]) / (rounds * len(caches))


def copy_bandwidth() -> float:
    """Bytes per second, read and written, of adding one to 2 GiB: what the memory gives in practice."""
    x = jnp.zeros(2**30 if jax.default_backend() == "gpu" else 2**22, jnp.bfloat16)
    return 2 * x.nbytes / measure(jax.jit(lambda x: x + 1), [(x,)]) * 1e3


def run(args) -> list[dict]:
    config = nsa_jax.NSAConfig()
    num_heads, num_kv, dim = args.shape
    device = jax.devices()[0].device_kind
    peak = next((gpu.bandwidth for gpu in aot.GPUS.values() if gpu.device_kind == device), None)
    practical = copy_bandwidth()
    named = f"{peak / 1e12:.2f} TB/s" if peak else "unknown"
    print(f"{device}: memory bandwidth {named} by data sheet, {practical / 1e12:.2f} TB/s copying")
    rows = []
    for batch in args.batches:
        for context in args.contexts:
            lengths = jnp.full((batch,), context, jnp.int32)
            keys = jax.random.split(jax.random.key(args.seed), _MOST_ROTATED + 2)
            query = jax.random.normal(keys[0], (batch, 1, num_heads, dim), jnp.bfloat16)
            gates = jax.nn.sigmoid(jax.random.normal(keys[1], (batch, 1, num_heads, 3), jnp.bfloat16))
            make = functools.partial(random_cache, batch=batch, context=context, num_kv=num_kv, dim=dim, config=config)
            caches = [make(keys[2])]
            _, info = nsa_jax.decode_attention(query, *caches[0], gates, lengths, config=config, return_info=True)
            per_key = 2 * dim * 2
            read = int(info.keys_read.sum()) * per_key
            held = sum(x.nbytes for x in caches[0])
            count = min(_MOST_ROTATED, max(2, -(-_ROTATED_BYTES // read)), max(1, _MEMORY_BYTES // held))
            caches += [make(key) for key in keys[3 : 2 + count]]
            row = {"B": batch, "context": context, "N": num_heads, "K": num_kv, "H": dim, "caches": count}
            row["keys_read"] = round(float(info.keys_read.mean()), 1)
            nsa = functools.partial(nsa_step, gates=gates, lengths=lengths, config=config)
            row["nsa_us"] = round(milliseconds(nsa, query, caches) * 1e3, 2)
            for name in args.dense:
                try:
                    ms = milliseconds(
                        functools.partial(dense_step, lengths=lengths, implementation=name), query, caches
                    )
                except Exception as error:  # a baseline that cannot run must not lose the others
                    print(f"dense {name} B={batch} context={context}: {type(error).__name__}: {str(error)[:200]}")
                    continue
                row[f"dense_{name}_us"] = round(ms * 1e3, 2)
            row |= shares(row, read, batch * context * num_kv * per_key, peak, practical)
            rows.append(row)
            print("  ".join(f"{name}={value}" for name, value in row.items()), flush=True)
            del caches
            gc.collect()
    return rows


def shares(row: dict, nsa_bytes: int, dense_bytes: int, peak: float | None, practical: float) -> dict:
    """Speedups over dense decoding and the share of memory bandwidth that each side reaches."""
    out = {}
    named = [row[f"dense_{name}_us"] for name in ("cudnn", "xla") if f"dense_{name}_us" in row]
    if named:
        out["speedup"] = round(min(named) / row["nsa_us"], 2)
    if "dense_split_us" in row:
        out["speedup_over_split"] = round(row["dense_split_us"] / row["nsa_us"], 2)
    speeds = {"nsa": nsa_bytes / row["nsa_us"] * 1e6}
    every = named + ([row["dense_split_us"]] if "dense_split_us" in row else [])
    if every:
        speeds["dense"] = dense_bytes / min(every) * 1e6
    for name, speed in speeds.items():
        out[f"{name}_tb_per_s"] = round(speed / 1e12, 3)
        out[f"{name}_copy_share"] = round(speed / practical, 3)
        if peak:
            out[f"{name}_peak_share"] = round(speed / peak, 3)
    return out


def plot(rows: list[dict], title: str, path: str) -> None:
    """Microseconds per step over the context for every batch size."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib import ticker

    batches = sorted({row["B"] for row in rows})
    figure, axes = plt.subplots(1, len(batches), figsize=(5.5 * len(batches), 4.2), squeeze=False)
    labels = {
        "nsa_us": ("NSA (nsa_jax)", "tab:blue", "o-"),
        "dense_cudnn_us": ("dense (cuDNN)", "tab:grey", "s-"),
        "dense_xla_us": ("dense (XLA)", "tab:grey", "^--"),
        "dense_split_us": ("dense (nsa_jax split)", "black", "x:"),
    }
    for axis, batch in zip(axes[0], batches, strict=True):
        mine = [row for row in rows if row["B"] == batch]
        for field, (label, colour, style) in labels.items():
            points = [(row["context"], row[field]) for row in mine if field in row]
            if points:
                axis.loglog(*zip(*points, strict=True), style, color=colour, label=label)
        contexts = sorted({row["context"] for row in mine})
        axis.set_xticks(contexts, [f"{context // 1024}k" for context in contexts])
        axis.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_major_formatter(ticker.FormatStrFormatter("%g"))
        axis.minorticks_off()
        axis.set_xlabel("tokens in the cache")
        axis.set_ylabel("microseconds per layer and step")
        axis.set_title(f"B={batch}: one new token in {'each of ' * (batch > 1)}{batch} row{'s' * (batch > 1)}")
        axis.grid(True, which="both", alpha=0.3)
        axis.legend(handlelength=3.5)
    figure.suptitle(title, fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def main() -> None:
    def numbers(text):
        return [int(x) for x in text.split(",")]

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", default=[1, 16], type=numbers)
    parser.add_argument("--contexts", default=list(CONTEXTS), type=numbers)
    parser.add_argument("--shape", default=[64, 4, 128], type=numbers, help="N,K,H")
    parser.add_argument("--dense", default=list(DENSE), type=lambda text: [x for x in text.split(",") if x])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", help="write the rows and the environment here")
    parser.add_argument("--plot", help="write the plot here")
    parser.add_argument("--commit", help="commit to record where git is not available")
    args = parser.parse_args()
    rows = run(args)
    env = environment(args.commit)
    if args.json:
        pathlib.Path(args.json).write_text(json.dumps({"environment": env, "rows": rows}, indent=1) + "\n")
    if args.plot:
        shape = ", ".join(f"{name}={size}" for name, size in zip("NKH", args.shape, strict=True))
        plot(rows, f"One decode step, {env['device']}, bfloat16, {shape}", args.plot)


if __name__ == "__main__":
    main()
