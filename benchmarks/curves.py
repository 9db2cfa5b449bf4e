"""Validation curves of several runs on the same data, as a plot and as numbers.

    python benchmarks/curves.py runs/nsa_8k runs/dense_8k --json curves.json --plot curves.png

The runs of benchmarks/results/nsa_dense_h200 and optimizers_h200 are of the paper's form, with these flags too:
--config.model.nsa.shared_kv=False --config.model.compressor=mlp --config.model.mlp_dim=0. The first are started by,
with --config.model.attention=nsa and dense:

    python train.py --config=configs/a100_prod.py --workdir=runs/nsa_8k --config.model.attention=nsa \\
      --config.data.source=text "--config.data.files=('corpus/*',)" --config.data.tokenizer=byte \\
      --config.data.seq_len=8192 --config.data.packing=False --config.data.val_fraction=0.01 \\
      --config.train.batch_size=16 --config.train.grad_accum=1 --config.train.steps=1280 \\
      --config.train.eval_every=128 --config.train.eval_batches=8 --config.optim.warmup_steps=150

and --config.model.mlp_dim=2496 for dense attention: 85.7 million parameters, as many as with NSA (84.9). Those of
benchmarks/results/optimizers_h200 by, with optimizers and schedules that their names tell:

    python benchmarks/corpus.py corpus --megabytes 270
    python train.py --config=configs/a100_prod.py --workdir=runs/muon_cosine \\
      --config.optim.name=muon --config.optim.schedule=cosine --config.optim.warmup_steps=100 \\
      --config.data.source=text "--config.data.files=('corpus/*',)" --config.data.tokenizer=byte \\
      --config.data.packing=False --config.data.val_fraction=0.02 --config.train.batch_size=64 \\
      --config.train.grad_accum=1 --config.train.steps=1000 --config.train.eval_every=100 \\
      --config.train.eval_batches=8 --config.train.save_every=500
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
from typing import Any

from matplotlib.figure import Figure


def read(workdir: pathlib.Path) -> dict[str, Any]:
    """What a run was, the median of its speeds, and its validation rows, by step and by tokens seen."""
    env = json.loads((workdir / "env.json").read_text())
    config = env["config"]
    tokens = config["train"]["batch_size"] * config["data"]["seq_len"]
    rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    points = [
        {"step": row["step"], "tokens": row["step"] * tokens, "bits_per_byte": row["val/bits_per_byte"]}
        for row in rows
        if "val/bits_per_byte" in row
    ]
    if not points:
        raise SystemExit(f"{workdir}: metrics.jsonl has no val/bits_per_byte: train with config.train.eval_every > 0")
    speeds = [row["perf/tokens_per_second"] for row in rows if "perf/tokens_per_second" in row]
    speed = round(statistics.median(speeds)) if speeds else None
    return {"name": workdir.name, "env": env, "tokens_per_second": speed, "validation": points}


def last_common(runs: list[dict[str, Any]]) -> int:
    """The most tokens after which every run was validated."""
    shared = set.intersection(*({point["tokens"] for point in run["validation"]} for run in runs))
    if not max(shared, default=0):
        raise SystemExit("no validation after the same number of tokens: train with the same batches and eval_every")
    return max(shared)


def draw(runs: list[dict[str, Any]]) -> Figure:
    """Bits per byte over tokens seen, without the untrained model's; labels name the last point that all runs have."""
    common = last_common(runs)
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.add_subplot()
    for run, marker in zip(runs, "os^Dv" * len(runs), strict=False):
        points = [point for point in run["validation"] if point["step"] > 0]
        there = next(point for point in points if point["tokens"] == common)["bits_per_byte"]
        axes.plot(
            [point["tokens"] / 1e6 for point in points],
            [point["bits_per_byte"] for point in points],
            marker=marker,
            markersize=4,
            label=f"{run['name']}: {there:.4f} at {common / 1e6:.0f}M tokens",
        )
    axes.set(xlabel="tokens seen, millions", ylabel="validation bits per byte")
    axes.grid(alpha=0.3)
    axes.legend()
    return figure


def main() -> None:
    """Reads flags and runs, prints the last points, writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=pathlib.Path)
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--plot", type=pathlib.Path)
    options = parser.parse_args()
    runs = [read(workdir) for workdir in options.runs]
    for run in runs:
        last = run["validation"][-1]
        print(f"{run['name']}: step {last['step']}, {last['tokens']:,} tokens, {last['bits_per_byte']:.4f} bits/byte")
    if options.json:
        options.json.write_text(json.dumps({"runs": runs}, indent=1) + "\n")
    if options.plot:
        draw(runs).savefig(options.plot, dpi=150)


if __name__ == "__main__":
    main()
