"""What selection of a trained NSA model misses: its lists against dense attention, and what better choices are worth.

    python benchmarks/selection.py runs/nsa --dense runs/dense --json selection.json

prints and writes, by layer, the share of dense attention's mass that the listed blocks hold, beside the oracle's and
that of random lists, for queries that have more blocks than they select. Dense attention is that of the layer's own
queries and keys of the selected branch, and with --dense that of another model, layer by layer. Then, by position, the
losses of the model with a branch computed otherwise (`nsa_jax.inspect.substituted_losses`).
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
from typing import Any

import numpy as np

from nsa_jax import inspect, load
from nsa_jax.command_line import number, run_program
from nsa_jax.evaluate.scoring import held_out_documents, position_bins


def held_out_rows(config: Any, tokenizer: Any, length: int, count: int, files: list[str]) -> np.ndarray:
    """Rows of held-out documents: int32 [up to count, length]."""
    documents = held_out_documents(config, files, tokenizer, 4 * count * length, length).documents
    rows = [d[i : i + length] for d in documents for i in range(0, len(d) - length + 1, length)][:count]
    if not rows:
        raise ValueError(f"no held-out document has {length} tokens: lower --context, or name longer --files")
    return np.stack(rows)


def quality(model: Any, rows: np.ndarray, queries: int, dense: Any, seed: int) -> list[dict[str, Any]]:
    """Means over rows, queries and groups, by layer."""
    rng = np.random.default_rng(seed)
    choosing = np.flatnonzero(inspect.choosing_queries(model.config.nsa, np.zeros((1, rows.shape[1]), int))[0])
    if not len(choosing):
        raise ValueError(f"rows of {rows.shape[1]} tokens leave no choice to selection: raise --context")
    parts: dict[str, list[np.ndarray]] = {}
    for row in rows:
        positions = np.sort(rng.choice(choosing, min(queries, len(choosing)), replace=False))
        for name, values in inspect.selection_quality(model, row[None], positions, dense=dense).items():
            parts.setdefault(name, []).append(values.mean((1, 2, 3)))
    means = {name: np.mean(values, axis=0) for name, values in parts.items()}
    layers = model.config.layers_of("nsa")
    return [
        {"layer": int(layer), **{name: round(float(values[i]), 5) for name, values in means.items()}}
        for i, layer in enumerate(layers)
    ]


def substitutes(model: Any, rows: np.ndarray, which: list[str]) -> list[dict[str, Any]]:
    """Losses by position of each substitute."""
    found: dict[tuple[int, int], dict[str, Any]] = {}
    for substitute in which:
        nats = np.concatenate([inspect.substituted_losses(model, row[None], substitute) for row in rows])
        for part in position_bins(nats.sum(0, dtype=np.float64), np.full(nats.shape[1], len(nats))):
            at = found.setdefault((part["from"], part["to"]), {"from": part["from"], "to": part["to"]})
            at[substitute] = part["loss"]
    return list(found.values())


def show(title: str, rows: list[dict[str, Any]]) -> None:
    """A table in Markdown."""
    names = list(rows[0])
    print(f"\n{title}\n\n| " + " | ".join(names) + " |\n" + "|---" * len(names) + "|")
    for row in rows:
        print("| " + " | ".join(f"{v:.4f}" if isinstance(v, float) else f"{v:,}" for v in row.values()) + " |")


def measure(options: argparse.Namespace) -> None:
    """Measures, prints and writes.

    Raises:
      ValueError: a model is of the wrong kind, or is not there.
    """
    model, tokenizer, config = load(options.run)
    if "nsa" not in model.config.kinds:
        raise ValueError(f"{options.run}: has no NSA layers, only {', '.join(model.config.kinds)}")
    dense, of_dense, _ = load(options.dense) if options.dense else (None, tokenizer, None)
    if dense is not None and (dense.config.kinds, dense.config.num_layers) != (("dense",), model.config.num_layers):
        raise ValueError(
            f"--dense={options.dense}: must have dense attention in all of {model.config.num_layers} layers"
        )
    if of_dense.fingerprint != tokenizer.fingerprint:
        raise ValueError(f"--dense={options.dense}: its tokenizer is not that of {options.run}")
    rows = held_out_rows(config, tokenizer, options.context or config.data.seq_len, options.rows, options.files)
    found: dict[str, Any] = {"rows": len(rows), "context": rows.shape[1], "queries": options.queries}
    found["own"] = quality(model, rows, options.queries, None, 0)
    show("share of the layer's own dense attention", found["own"])
    if dense is not None:
        found["dense"] = quality(model, rows, options.queries, dense, 0)
        show(f"share of the attention of {options.dense}", found["dense"])
    if options.substitutes:
        found["substitutes"] = substitutes(model, rows, options.substitutes)
        show("nats per token with a branch computed otherwise", found["substitutes"])
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


def main() -> int:
    """Reads flags and measures; the status is 0, or 2 if the models or flags are at fault."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="an NSA model: a run's workdir or an export")
    parser.add_argument("--dense", help="a dense model with as many layers, trained on the same")
    parser.add_argument("--context", type=number(int, 2), help="tokens of a row; default: the training length")
    parser.add_argument("--rows", type=number(int, 1), default=8)
    parser.add_argument("--queries", type=number(int, 1), default=64, help="of each row, at random")
    parser.add_argument("--files", nargs="+", default=[], help="text files instead of held-out documents")
    parser.add_argument(
        "--substitutes", nargs="*", default=["none", "oracle", "all"], choices=inspect.SUBSTITUTES, metavar="NAME"
    )
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args()
    return run_program(lambda: measure(options))


if __name__ == "__main__":
    sys.exit(main())
