"""A dense model trained on short rows, extended to long ones with NSA and with dense attention: loss and speed.

    python benchmarks/corpus.py corpus
    python benchmarks/extend.py base
    python benchmarks/extend.py nsa
    python benchmarks/extend.py dense
    python benchmarks/extend.py report --json extend.json --plot extend.png

"base" trains a dense model (configs/a100_prod.py with bytes as tokens) at 2,048 tokens and exports it for transformers.
The next ones convert that folder, train the model on at 32,768 tokens by configs/extend.py and evaluate it: "nsa",
"dense", and variants of NSA: "shared" keys and values, these with blocks compressed to their means ("shared_mean"), and
with a gate of the compressed branch that begins open ("shared_mean_open"), such a gate alone ("open") or one that
begins at a tenth ("gate10"), blocks chosen by "mean_key", twice or four times as many selected blocks ("more",
"more64"), more but smaller ones ("block32"), a window of the base model's rows ("window2k"), every fourth layer dense
("mixed"), the one, two or three layers dense that need to read far most, with shared keys and means in the others
("far1", "far2", "far3"), NSA in the next few alone and a window in the rest ("far2_nsa3": two layers dense, three
NSA), scores that learn from dense attention which blocks to choose ("selection_loss";
"selection_loss_fast": the compressor learns ten times as fast as old weights). Their commands are printed as they run;
"report" compares what is there, with selection.json of a workdir if benchmarks/selection.py wrote it. With --short a
fifth of the tokens are in short documents, which corpus.py --short writes, and attention does not cross documents;
--seed changes the order of the data. Workdirs are then called such as "dense_short_seed1". Flags after -- are passed on
to train.py.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import shutil
import statistics
import subprocess
import sys
from typing import Any

from matplotlib.figure import Figure

ROOT = pathlib.Path(__file__).resolve().parents[1]
SHARED_MEAN = ["--shared_kv", "--config.model.compressor=mean"]
CONVERSIONS = {
    "nsa": ["--attention=nsa"],
    "shared": ["--attention=nsa", "--shared_kv"],
    "shared_mean": ["--attention=nsa", *SHARED_MEAN],
    "shared_mean_open": ["--attention=nsa", *SHARED_MEAN, "--gate=0.333"],
    "open": ["--attention=nsa", "--gate=0.333"],
    "gate10": ["--attention=nsa", "--gate=0.1"],
    "mean_key": ["--attention=nsa", "--config.model.nsa.selector=mean_key"],
    "more": ["--attention=nsa", "--config.model.nsa.num_selected=32"],
    "more64": ["--attention=nsa", "--config.model.nsa.num_selected=64"],
    "open_more": ["--attention=nsa", "--gate=0.333", "--config.model.nsa.num_selected=32"],
    "block32": ["--attention=nsa", "--config.model.nsa.select_block=32", "--config.model.nsa.num_selected=32"],
    "window2k": ["--attention=nsa", "--config.model.nsa.window=2048"],
    "window2k_more": ["--attention=nsa", "--config.model.nsa.window=2048", "--config.model.nsa.num_selected=32"],
    "mixed": ["--layer-pattern=nsa,nsa,nsa,dense"],
    **{f"far{n}": [f"--dense-layers={n}", *SHARED_MEAN] for n in (1, 2, 3)},
    **{
        f"far{n}_nsa{m}": [f"--dense-layers={n}", f"--nsa-layers={m}", *SHARED_MEAN]
        for n, m in ((2, 1), (2, 2), (2, 3), (2, 5), (3, 2))
    },
    "far2_nsa0": ["--dense-layers=2", "--nsa-layers=0"],
    "selection_loss": ["--attention=nsa"],
    "selection_loss_fast": ["--attention=nsa"],
    "dense": ["--attention=dense"],
}
FIRST = 128  # tokens of a row, whose losses are measured in rows of this length
# What differs in training.
TRAINING = {
    "selection_loss": ["--config.train.selection_loss=0.1", "--config.train.selection_queries=256"],
    "selection_loss_fast": [
        "--config.train.selection_loss=1.0",
        "--config.train.selection_queries=256",
        "--config.optim.learning_rate_factor.compressor=10.0",
    ],
}
# The same for all, so that documents are the same; no packing and no exclusion of cuDNN's dense attention, which is the
# fastest opponent. Source text holds copies, which the guards against leaking targets would take for a leak.
COMMON = [
    "--config.data.source=text",
    "--config.data.tokenizer=byte",
    "--config.data.packing=False",
    "--config.data.val_fraction=0.02",
    "--config.train.deterministic=False",
    "--config.guards.floor_ratio=0",
    "--config.guards.late_floor_ratio=0",
    "--config.train.sample_tokens=0",
    "--config.model.scan_layers=False",
    "--config.model.remat=dots_saved",
]
# Long documents and short ones.
SOURCES = [
    "--config.data.packing=True",
    "--config.data.sources.long.weight=0.8",
    "--config.data.sources.long.source=text",
    "--config.data.sources.short.weight=0.2",
    "--config.data.sources.short.source=text",
]


def command(*arguments: object) -> None:
    """Runs a program of this repository and prints how."""
    shown = [str(argument) for argument in arguments]
    print("+ python", " ".join(shown), flush=True)
    subprocess.run([sys.executable, *shown], cwd=ROOT, check=True)


def train(options: argparse.Namespace, config: str, workdir: pathlib.Path, *flags: str) -> None:
    """One training run."""
    files = f"--config.data.files=('{options.corpus}/*.txt',)"
    command("train.py", f"--config={config}", f"--workdir={workdir}", files, *COMMON, *flags, *options.flags)


def base(options: argparse.Namespace) -> None:
    """The dense model at short rows, as transformers has it."""
    folder = options.folder
    shutil.rmtree(folder / "converted", ignore_errors=True)  # from another base
    train(
        options, options.base_config, folder / "base", "--config.model.attention=dense", "--config.model.mlp_dim=0",
        f"--config.train.steps={options.base_steps}", "--config.train.batch_size=64", "--config.train.grad_accum=1",
        "--config.train.save_every=100000", "--config.train.eval_every=500", "--config.optim.warmup_steps=100",
    )  # fmt: skip
    command("-m", "nsa_jax.export", folder / "base", folder / "base_hf", "--format=transformers")


def extend(options: argparse.Namespace, name: str) -> None:
    """One model, converted, trained on at long rows and evaluated."""
    run, flags = name, list(TRAINING.get(name, []))
    if options.short:
        run += "_short"
        flags += [*SOURCES, f"--config.data.sources.short.files=('{options.short}/*.txt',)"]
    if options.seed:
        run += f"_seed{options.seed}"
        flags.append(f"--config.seed={options.seed}")
    model, workdir = options.folder / "converted" / name, options.folder / run
    if not (model / "config.json").exists():  # the same for all orders of the data
        what = [*CONVERSIONS[name], "--dtype=float32", "--tokenizer=byte"]
        if name.startswith("far"):
            files = sorted(options.corpus.glob("*.txt"))
            what += ["--text", *files[:: max(len(files) // 16, 1)][:16]]
        command("-m", "nsa_jax.convert", options.folder / "base_hf", model, *what)
    config = f"{ROOT / 'configs' / 'extend.py'}:{model},{options.length}"
    train(
        options, config, workdir, f"--resume={model}", "--stage", "--config.train.log_every=5",
        f"--config.train.steps={options.steps}", "--config.train.eval_batches=16", "--config.train.save_every=100000",
        f"--config.train.eval_every={max(options.steps // 4, 1)}", *flags,
    )  # fmt: skip
    # Long windows have few first tokens: those are measured in short ones.
    for context, batch_size, output in ((options.length, 4, "evaluation"), (FIRST, 256, "evaluation_first")):
        command(
            "-m", "nsa_jax.evaluate", workdir, "--tasks=position", f"--context={context}", f"--stride={context}",
            f"--max-tokens={options.max_tokens}", f"--batch-size={batch_size}", f"--output={workdir / output}",
        )  # fmt: skip


def read(workdir: pathlib.Path) -> dict[str, Any]:
    """What is known of one extension."""
    env = json.loads((workdir / "env.json").read_text())
    rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "perf/step_seconds" in row][2:]
    seconds = statistics.median(row["perf/step_seconds"] for row in steps)
    config = env["config"]
    tokens = config["train"]["batch_size"] * config["data"]["seq_len"]
    places = [workdir / name / "evaluation.json" for name in ("evaluation_first", "evaluation")]
    *first, bins = (json.loads(path.read_text())["tasks"]["position"]["bins"] for path in places if path.exists())
    if first:
        bins = first[0] + [row for row in bins if row["from"] >= FIRST]
    selection = workdir / "selection.json"
    return {
        "parameters": env["parameters"],
        "tokens_per_step": tokens,
        "step_seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "validation": [{"step": row["step"], "loss": row["val/loss"]} for row in rows if "val/loss" in row],
        "by_position": bins,
        "device": env["devices"],
        "versions": env["versions"],
        "git": env["git"],
        **({"selection": json.loads(selection.read_text())} if selection.exists() else {}),
    }


def draw(runs: dict[str, dict[str, Any]]) -> Figure:
    """Validation loss over tokens, and loss by position at the end."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for (name, run), marker in zip(runs.items(), "os^DvP*Xd<>h" * 2, strict=False):
        label = f"{name}: {run['tokens_per_second'] / 1000:,.0f}k tokens/s"
        points = run["validation"]
        left.plot([p["step"] * run["tokens_per_step"] / 1e6 for p in points], [p["loss"] for p in points], f"{marker}-")
        bins = [row for row in run["by_position"] if row["to"] >= 128]
        right.plot([row["to"] for row in bins], [row["loss"] for row in bins], f"{marker}-", label=label)
    left.set_xlabel("million tokens after conversion")
    left.set_ylabel("validation loss (nats per byte)")
    left.set_yscale("log")
    right.set_xscale("log", base=2)
    right.set_xlabel("position in the row, up to")
    right.set_ylabel("loss at the end (nats per byte)")
    right.legend()
    for axes in (left, right):
        axes.grid(True, alpha=0.3)
    return figure


def report(options: argparse.Namespace) -> None:
    """Compares what has been run; prints a table and writes the files."""
    done = {path.parents[1].name for path in options.folder.glob("*/evaluation_first/evaluation.json")}
    order = list(CONVERSIONS)
    base_names = {name: name.partition("_seed")[0].removesuffix("_short") for name in done}
    runs = {name: read(options.folder / name) for name in sorted(done, key=lambda n: (order.index(base_names[n]), n))}
    print("| model | step 0 | end | tokens/s |\n|---|---|---|---|")
    for name, run in runs.items():
        first, last = run["validation"][0]["loss"], run["validation"][-1]["loss"]
        print(f"| {name} | {first:.4f} | {last:.4f} | {run['tokens_per_second']:,.0f} |")
    names = list(runs)
    print("\n| position | " + " | ".join(names) + " |\n" + "|---" * (len(names) + 1) + "|")
    for rows in zip(*(run["by_position"] for run in runs.values()), strict=True):
        losses = " | ".join(f"{row['loss']:.4f}" for row in rows)
        print(f"| {rows[0]['from']:,} to {rows[0]['to']:,} | {losses} |")
    if options.json:
        options.json.write_text(json.dumps({"command": sys.argv, "runs": runs}, indent=1) + "\n")
    if options.plot:
        draw(runs).savefig(options.plot, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("base", *CONVERSIONS, "report"))
    parser.add_argument("--folder", type=pathlib.Path, default=ROOT / "runs" / "extension", help="of all runs")
    parser.add_argument("--corpus", type=pathlib.Path, default=ROOT / "corpus")
    parser.add_argument("--short", type=pathlib.Path, help="folder of short documents to train on as well")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--base_config", default="configs/a100_prod.py")
    parser.add_argument("--base_steps", type=int, default=1526, help="of 131,072 tokens: 200 million")
    parser.add_argument("--length", type=int, default=32_768, help="of the new rows")
    parser.add_argument("--steps", type=int, default=380, help="of the extension, 131,072 tokens each: 50 million")
    parser.add_argument("--max_tokens", type=int, default=4_000_000, help="of the evaluation")
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--plot", type=pathlib.Path)
    own, _, flags = " ".join(sys.argv[1:]).partition(" -- ")
    options = parser.parse_args(own.split())
    options.flags = flags.split()
    if options.what == "base":
        base(options)
    elif options.what == "report":
        report(options)
    else:
        extend(options, options.what)


if __name__ == "__main__":
    main()
