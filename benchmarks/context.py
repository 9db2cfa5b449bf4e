r"""Context parallelism on several GPUs: the same losses as one, and rows that one would not be asked to hold.

    python benchmarks/context.py --devices 4 --json benchmarks/results/context_h200.json

trains the model of configs/h200_long.py on bytes of Python's own library:

- same: rows of --length tokens on one device, and the same rows split over all of them; the losses are compared.
- long: rows of --length tokens per device, 262,144 in all on four; tokens per second, memory, and the share of the
  time of one device on its own --length tokens (attention grows with the row, so that this is no scaling efficiency).

--dense adds the same with dense attention. --tiny makes everything so small that it runs on a CPU.
"""

from __future__ import annotations

import argparse
import functools
import json
import pathlib
import sys
import sysconfig
import time
from typing import Any

import jax
import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from benchmarks.timing import environment  # noqa: E402
from configs import h200_long  # noqa: E402
from nsa_jax.train.state import batch_sharding, setup  # noqa: E402
from nsa_jax.train.step import make_train_step  # noqa: E402

VOCAB = 257  # bytes and the end of a document


@functools.cache
def text(count: int) -> np.ndarray:
    """The first `count` bytes of the standard library's modules, one after the other, repeated if there are fewer."""
    folder = pathlib.Path(sysconfig.get_paths()["stdlib"])
    data, size = [], 0
    for path in sorted(folder.glob("*.py")) + sorted(folder.glob("*/*.py")):
        data.append(np.frombuffer(path.read_bytes() + b"\n", np.uint8))
        size += len(data[-1])
        if size >= count:
            break
    return np.resize(np.concatenate(data), count).astype(np.int32)


def batch(step: int, rows: int, length: int) -> dict[str, np.ndarray]:
    """Rows of one step, unpacked."""
    size = rows * length + 1
    tokens = text((step + 1) * size)[step * size :]
    return {
        "inputs": tokens[:-1].reshape(rows, length),
        "targets": tokens[1:].reshape(rows, length),
        "segment_start": np.zeros((rows, length), np.int32),
        "loss_mask": np.ones((rows, length), np.float32),
    }


def train(options: argparse.Namespace, attention: str, length: int, devices: int) -> dict[str, Any]:
    """Trains on rows of `length` tokens split over `devices`; returns losses, seconds per step and memory."""
    config = h200_long.get_config()
    config.model.attention = attention
    config.model.compute_dtype = options.dtype
    config.model.remat = options.remat
    config.data.seq_len, config.data.packing = length, False
    config.train.batch_size, config.train.steps = options.rows, max(options.steps, 20)
    config.optim.warmup_steps = 5
    config.mesh.context = devices
    if options.tiny:
        config.model.dim, config.model.num_layers, config.model.num_heads, config.model.head_dim = 32, 2, 4, 16
    made = setup(config, VOCAB, jax.devices()[:devices])
    step = make_train_step(made, np.ones(VOCAB, np.int32))
    losses, seconds = [], []
    with jax.set_mesh(made.mesh):
        state = made.init()
        for index in range(options.steps):
            rows = jax.device_put(batch(index, options.rows, length), batch_sharding(made.mesh))
            start = time.perf_counter()
            state, metrics = step(state, rows)
            losses.append(float(metrics["loss"]))
            seconds.append(time.perf_counter() - start)
    stats = made.mesh.devices.flat[-1].memory_stats() or {}
    # The first step compiles.
    best = float(np.median(seconds[1:]))
    found = {
        "attention": attention,
        "tokens_per_row": length,
        "rows": options.rows,
        "devices": devices,
        "losses": losses,
        "step_seconds": best,
        "tokens_per_second": options.rows * length / best,
        "first_step_seconds": seconds[0],
        "peak_gib_so_far": stats.get("peak_bytes_in_use", 0) / 2**30,
    }
    print(
        f"{attention} {length:,} tokens on {devices} devices: {1e3 * best:,.1f} ms per step, "
        f"{found['tokens_per_second']:,.0f} tokens/s, {found['peak_gib_so_far']:.2f} GiB, "
        f"loss {losses[0]:.4f} -> {losses[-1]:.4f}",
        flush=True,
    )
    return found


def main() -> None:
    """Parses flags, measures, writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--length", type=int, default=65_536, help="tokens of the row on one device, and per device")
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--remat", default="block")
    parser.add_argument("--dense", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args()
    results: dict[str, Any] = {"environment": environment(), "same": [], "long": []}
    for attention in ("nsa", "dense") if options.dense else ("nsa",):
        one = train(options, attention, options.length, 1)
        split = train(options, attention, options.length, options.devices)
        differences = np.abs(np.subtract(one["losses"], split["losses"]))
        results["same"] += [one, split]
        results[f"largest_loss_difference_{attention}"] = float(differences.max())
        results[f"first_loss_difference_{attention}"] = float(differences[0])
        print(f"largest difference of losses over {options.steps} steps: {differences.max():.2e}", flush=True)
        long = train(options, attention, options.length * options.devices, options.devices)
        long["time_of_one_device_on_its_tokens"] = one["step_seconds"] / long["step_seconds"]
        results["long"].append(long)
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
