"""Directories of runs for the report's tests: one with everything, awkward texts included, and one that was stopped."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from nsa_jax.config import default_config
from nsa_jax.train import metrics

AWKWARD = "<b>wide & <img src=x onerror='window.hacked=1'>"
SAMPLE = 'def f():\n\treturn "</script><script>window.hacked=1</script>" <!-- \x00\x1b[31m \ud800 \u202e é 文 -->'
LAYERS = 4
SPIKE = (2345, 9.75)  # a step that no other point of its stretch may hide


def lines(path: Path, rows: list[Any], end: str = "") -> None:
    """Writes a JSON Lines file; `end` is the beginning of a line that a killed process left."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + end)


def train_row(step: int, loss: float, **more: float) -> dict[str, Any]:
    """A row of metrics.jsonl after a train step, with the names that the trainer gives."""
    values = {"loss": loss, "bits_per_byte": loss / math.log(2), "grad_norm": 1 / step, "param_norm": 60 + step / 1000}
    row = metrics.train_row({**values, "update_norm": 0.5 / step, "learning_rate": 3e-3 / step})
    speed = {"perf/tokens_per_second": 10_000.0, "perf/data_wait_share": 0.01, "memory/host_peak_rss_gib": 1.5}
    return {"step": step, **row, **metrics.wait_row([0.001, 0.003]), **speed, "time": 1e9 + step / 10, **more}


def health_row(step: int) -> dict[str, Any]:
    """A row of health.jsonl in which layer 2 comes to use the window alone."""
    tilt = [0.0, 0.0, min(step / 5000, 0.6), 0.0]
    row: dict[str, Any] = {"step": step}
    for kind in ("gate", "output"):
        row[f"{kind}_share_window"] = [1 / 3 + t for t in tilt]
        for branch in ("compressed", "selected"):
            row[f"{kind}_share_{branch}"] = [1 / 3 - t / 2 for t in tilt]
    row["gate_entropy"] = [1.09 - t for t in tilt]
    row["gate_collapsed"] = [t / 10 for t in tilt]
    row["blocks_beyond"], row["block_distance"] = [0.4] * LAYERS, [70.0 + step / 100, 71.0, 72.0, 73.0]
    row["block_overlap"], row["blocks_distinct"] = [0.95] * LAYERS, [4.125] * LAYERS
    row["keys_counted"], row["key_mismatches"] = [116.5] * LAYERS, [0.0] * LAYERS
    return row


def layers_row(step: int) -> dict[str, Any]:
    """A row of layers.jsonl in which layer 1 has large gradients, and no entry is 0."""
    parts = ("weights", "gradients", "updates")
    row = {f"{part}_{figure}": [0.1 / step, 5.0, 0.2, 0.3] for part in parts for figure in ("norm", "largest")}
    return {"step": step, **row, **{f"{part}_zeros": [0.0] * LAYERS for part in parts}}


def validation_row(step: int, chosen: int) -> dict[str, Any]:
    """A row of validation.jsonl, of a row of 256 tokens: in layer 2 the last query chose block `chosen` by its score.

    Blocks have 16 tokens and lists 4 entries; the first query's list has room for everything.
    """
    bins = [{"from": n // 2, "to": n, "loss": 3 - step / 1e4, "tokens": 100} for n in (1, 2, 4, 8, 64, 256)]
    lists = [[[[0, 1, 2, 16]], [[0, 1 if layer != 2 else chosen, 14, 15]]] for layer in range(LAYERS)]
    text = [AWKWARD, f"{AWKWARD}\n\x1b[31m"]
    selection = {"queries": [40, 255], "start": 0, "text": text, "layers": list(range(LAYERS)), "lists": lists}
    return {"step": step, "position": bins, "selection": selection}


def environment(name: str, **changes: Any) -> dict[str, Any]:
    """env.json, with fields of the default config changed as `model__dim=128`."""
    config = json.loads(default_config().to_json())
    config["name"] = name
    config["model"]["nsa"].update(window=64, select_block=16, compress_block=16, compress_stride=8, num_selected=4)
    for field, value in changes.items():
        part, _, leaf = field.partition("__")
        config[part][leaf] = value
    return {
        "command": ["train.py", f"--config.name={name}"],
        "versions": {"python": "3.11.7", "jax": "0.10.2"},
        "devices": {"kind": "cpu", "platform": "cpu", "count": 1},
        "parameters": {"total": 937_568},
        "start_step": 0,
        "resumed_from": None,
        "preflight": {"warnings": [f"R030 warning: {AWKWARD}"], "ignored": [], "bigram_entropy": 2.4, "seconds": {}},
        "config": config,
    }


def write_full(path: Path, points: int = 5000) -> Path:
    """A run of thousands of log lines, killed in the middle of one, with a figure that was not finite."""
    path.mkdir(parents=True)
    rows = [{"step": 0, **metrics.validation_row(550.0, 100.0, 100.0), "time": 1e9}]
    for step in range(1, points + 1):
        loss = SPIKE[1] if step == SPIKE[0] else 1.5 + 4 / step
        rows.append(train_row(step, loss, **({"norm/update": math.nan} if step == 4000 else {})))
        if step % 500 == 0:
            rows.append({"step": step, **metrics.validation_row(160.0, 100.0, 100.0), "time": 1e9 + step / 10})
    lines(path / "metrics.jsonl", rows, end='{"step": 5001, "train/lo')
    lines(path / "health.jsonl", [health_row(step) for step in range(10, points + 1, 10)])
    alarm = {"step": 3000, "alarm": "gate_entropy", "message": f"layer 2: {AWKWARD}", "time": 1e9}
    lines(path / "alarms.jsonl", [alarm, alarm, {**alarm, "step": SPIKE[0], "alarm": "spike"}])
    samples = [{"step": 500 * i, "name": "sample", "text": f"sample {i}"} for i in range(4)]
    lines(path / "samples.jsonl", [*samples, {"step": 2000, "name": "sample", "text": SAMPLE}])
    lines(path / "layers.jsonl", [layers_row(step) for step in range(10, points + 1, 10)])
    lines(path / "validation.jsonl", [validation_row(step, 3 + step // 500) for step in range(0, points + 1, 500)])
    (path / "env.json").write_text(json.dumps(environment(AWKWARD, train__batch_size=4, data__seq_len=256)))
    (path / "explore.html").write_text("a page")
    spent = {"wall": 520, "training": 400, "data": 20, "startup": 60, "validation": 30, "saving": 6, "other": 4}
    (path / "goodput.json").write_text(json.dumps({"run": {f"{cause}_seconds": s for cause, s in spent.items()}}))
    (path / "checkpoints" / "4500").mkdir(parents=True)
    (path / "evaluation").mkdir()
    bins = [{"from": n // 2, "to": n, "loss": 3 - math.log2(n) / 8, "tokens": 1000} for n in (1, 2, 4, 8, 64, 256)]
    cells = [{"length": n, "depth": d, "exact_match": d} for n in (64, 256) for d in (0.0, 1.0)]
    tasks = {"position": {"bins": bins}, "needle": {"cells": cells, "exact_match": 0.5}}
    (path / "evaluation" / "evaluation.json").write_text(json.dumps({"step": 4500, "context": 256, "tasks": tasks}))
    return path


def write_stopped(path: Path) -> Path:
    """A run without health, validation or samples that a guard stopped at step 30. Its batches grew at step 10."""
    path.mkdir(parents=True)
    tokens = {10: 10 * 512, 20: 10 * 512 + 10 * 2048, 30: 10 * 512 + 20 * 2048}
    rows = [train_row(step, 3.0 - step / 100, **{"train/tokens": seen}) for step, seen in tokens.items()]
    lines(path / "metrics.jsonl", rows)
    stopped = {
        "guard": "loss_floor",
        "step": 30,
        "message": "step 30, guard loss_floor: <i>too</i> good",
        "time": 1e9 + 4,
    }
    (path / "stopped.json").write_text(json.dumps({**stopped, "last_checkpoint": None, "alarms": {}}))
    changes = {"train__batch_size": 8, "data__seq_len": 256, "guards__health": False}
    (path / "env.json").write_text(json.dumps(environment("narrow", **changes)))
    return path
