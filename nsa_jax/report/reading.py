"""Reading a run's directory, as it was left: finished, stopped, killed in the middle of a line, or still training.

Everything that ends up on the page passes through here. Curves are cut down to `POINTS` points that keep every
bucket's smallest and largest value; heat maps to `COLUMNS` columns that keep the worst value where a figure has a bad
direction; texts lose what cannot be printed. Only what a run lacks altogether (a directory, any record) is an error.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from nsa_jax.config import default_config
from nsa_jax.train.metrics import printable

POINTS = 1500  # of a curve
COLUMNS = 240  # of a heat map
SAMPLES = 60  # texts of a run: first, last and evenly spread ones
SAMPLE_CHARACTERS = 8000
_LARGEST_STEP = 2**53  # what JavaScript counts exactly
_ALIVE_SECONDS = 180.0  # a heartbeat comes every 30 s unless the config says otherwise
# What a health figure's column becomes when several steps share it: the worst of them where there is one.
_WORST = {"gate_entropy": np.fmin, "gate_collapsed": np.fmax, "gate_share_max": np.fmax, "key_mismatches": np.fmax}


class ReportError(Exception):
    """A directory that no report can be made of; the message says why."""


def clean(value: Any) -> Any:
    """A JSON value whose texts hold nothing that cannot be shown (control characters, halves of surrogate pairs)."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, dict):
        return {printable(str(key)): clean(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [clean(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def read_rows(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Objects of a JSON Lines file with an integer `step`, and how many lines were not such (a last one cut off)."""
    rows: list[dict[str, Any]] = []
    skipped = 0
    if not path.is_file():
        return rows, skipped
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            row["step"] = int(row["step"])
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            skipped += 1
            continue
        if abs(row["step"]) < _LARGEST_STEP:
            rows.append(row)
        else:
            skipped += 1
    return rows, skipped


def _read_object(path: Path, notes: list[str]) -> dict[str, Any]:
    """A JSON object, or an empty one, with a note if the file is there and cannot be read."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        notes.append(f"{path.name} could not be read and is left out")
        return {}
    return value


def _last_object(path: Path) -> dict[str, Any]:
    """The last whole JSON object of a JSON Lines file, or an empty one."""
    for line in reversed(path.read_text(encoding="utf-8", errors="replace").split("\n")) if path.is_file() else ():
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict):
            return value
    return {}


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf


def thin(steps: np.ndarray, values: np.ndarray, points: int = POINTS) -> np.ndarray:
    """Indices of the points to keep: the smallest and largest value of each of `points` / 2 buckets, first and last.

    Args:
      steps: [n], ascending.
      values: [n]; those that are not finite are kept only where their bucket has no other, as a gap.
      points: how many to keep, about.

    Returns:
      Ascending indices into the arrays; all of them if there are no more than `points`.
    """
    if len(steps) <= points:
        return np.arange(len(steps))
    keep = {0, len(steps) - 1}
    for bucket in np.array_split(np.arange(len(steps)), points // 2):
        finite = bucket[np.isfinite(values[bucket])]
        if len(finite):
            keep.update((int(finite[np.argmin(values[finite])]), int(finite[np.argmax(values[finite])])))
        else:
            keep.add(int(bucket[0]))
    return np.array(sorted(keep))


def _plain(values: Iterable[float]) -> list[float | None]:
    """Numbers of six significant digits for JSON; None for what is not finite."""
    return [float(f"{value:.6g}") if math.isfinite(value) else None for value in values]


def curves(rows: list[dict[str, Any]]) -> tuple[dict[str, dict[str, Any]], list[dict[str, Any]]]:
    """Curves of all metrics, and where they were not finite.

    Rows of a step that was run again after a resume replace the earlier ones.

    Returns:
      {name: {"x": steps, "y": values, "n": points before thinning}}, and events {"step", "kind", "name", "message"}.
    """
    by_name: dict[str, dict[int, float]] = {}
    for row in rows:
        for name, value in row.items():
            number = _number(value)
            if name not in ("step", "time") and number is not None:
                by_name.setdefault(name, {})[row["step"]] = number
    found, events = {}, []
    for name, points in sorted(by_name.items()):
        steps = np.array(sorted(points))
        values = np.array([points[step] for step in steps])
        bad = steps[~np.isfinite(values)]
        if len(bad):
            what = f"{name} is not finite at {len(bad)} of {len(steps)} points, first at step {bad[0]:,}"
            events.append({"step": int(bad[0]), "kind": "alarm", "name": "not_finite", "message": what})
        keep = thin(steps, values)
        found[name] = {"x": steps[keep].tolist(), "y": _plain(values[keep]), "n": len(steps)}
    return found, events


def _clock(rows: list[dict[str, Any]]) -> dict[str, list]:
    """Seconds since the first row, by step."""
    by_step = {row["step"]: stamp for row in rows if (stamp := _number(row.get("time"))) is not None}
    if not by_step:
        return {"x": [], "s": []}
    steps = np.array(sorted(by_step))
    seconds = np.maximum.accumulate(np.array([by_step[step] for step in steps]) - by_step[steps[0]])
    keep = np.unique(np.linspace(0, len(steps) - 1, min(len(steps), POINTS)).astype(int))
    return {"x": steps[keep].tolist(), "s": [round(float(value), 2) for value in seconds[keep]]}


def health_maps(rows: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Figures by layer and step for heat maps: {"x": steps, "layers": L, "n": rows, "z": {name: [L][columns]}}."""
    by_step = {row["step"]: row for row in rows}
    layers = max((len(v) for row in by_step.values() for v in row.values() if isinstance(v, list)), default=0)
    if not layers:
        return None
    steps = np.array(sorted(by_step))
    names = sorted({name for row in by_step.values() for name, value in row.items() if isinstance(value, list)})
    buckets = np.array_split(np.arange(len(steps)), min(len(steps), COLUMNS))
    maps = {}
    for name in names:
        grid = np.full((layers, len(steps)), np.nan)
        for column, step in enumerate(steps):
            value = by_step[step].get(name)
            numbers = [_number(v) for v in value] if isinstance(value, list) else []
            grid[: len(numbers), column] = [np.nan if v is None else v for v in numbers]
        if name in _WORST:
            parts = [_WORST[name].reduce(grid[:, b], axis=1) for b in buckets]
        else:
            finite = np.isfinite(grid)
            sums = np.where(finite, grid, 0.0)
            counts = [finite[:, b].sum(1) for b in buckets]
            parts = [
                np.where(c > 0, sums[:, b].sum(1) / np.maximum(c, 1), np.nan)
                for b, c in zip(buckets, counts, strict=True)
            ]
        maps[name] = [_plain(line) for line in np.stack(parts, axis=1)]
    middle = [int(steps[bucket[len(bucket) // 2]]) for bucket in buckets]
    return {"x": middle, "layers": layers, "n": len(steps), "z": maps}


def _alarms(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Alarms as events; one that was raised again by steps that were run again counts once."""
    found = {(row["step"], str(row.get("alarm"))): str(row.get("message", "")) for row in rows}
    return [
        {"step": step, "kind": "alarm", "name": name, "message": message}
        for (step, name), message in sorted(found.items())
    ]


def _samples(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    by_step = {(row["step"], str(row.get("name", "sample"))): str(row.get("text", "")) for row in rows}
    found = [
        {"step": step, "name": name, "text": text[:SAMPLE_CHARACTERS]} for (step, name), text in sorted(by_step.items())
    ]
    return [found[i] for i in np.unique(np.linspace(0, len(found) - 1, min(len(found), SAMPLES)).astype(int))]


def outcome(
    steps: int | None, rows: list[dict[str, Any]], summary: dict, stopped: dict, heartbeat: dict, now: float
) -> dict[str, Any]:
    """How the run ended, from the youngest evidence: a resumed run leaves older files behind.

    Returns:
      {"state": finished | stopped | requested | running | interrupted | empty, "title", "message", "step", "steps"}.
    """
    last = max((row["step"] for row in rows), default=0)
    latest = max((stamp for row in rows if (stamp := _number(row.get("time"))) is not None), default=0.0)
    beat = _number(heartbeat.get("time")) or 0.0
    alive = heartbeat.get("event") == "alive" and now - beat < _ALIVE_SECONDS
    where = {"step": last, "steps": steps}
    stamp = _number(stopped.get("time"))
    if stopped and not alive and (stamp is None or stamp >= latest - 1):
        guard = str(stopped.get("guard") or "unnamed")
        kept = _number(stopped.get("last_checkpoint"))
        saved = "no checkpoint was kept" if kept is None else f"the newest checkpoint is of step {kept:,.0f}"
        return {
            **where,
            "state": "stopped",
            "step": int(_number(stopped.get("step")) or last),
            "title": f"Stopped by the guard {guard}",
            "message": f"{stopped.get('message', '')} ({saved})",
        }
    if summary and (_number(summary.get("step")) or 0) >= last and not alive:
        at = int(_number(summary.get("step")) or 0)
        if summary.get("finished"):
            return {**where, "state": "finished", "step": at, "title": "Finished", "message": f"all {at:,} steps"}
        reason = str(summary.get("stopped_by") or "a request")
        message = "the state was saved; the same command resumes" if not reason.startswith("early") else reason
        title = "Stopped early" if reason.startswith("early") else f"Stopped by {reason}"
        return {**where, "state": "requested", "step": at, "title": title, "message": message}
    if alive:
        message = (
            f"{heartbeat.get('doing', 'training')}, last sign of life {max(now - beat, 0):.0f} s before this report"
        )
        return {**where, "state": "running", "title": "Still running", "message": message}
    message = "neither summary.json nor stopped.json tells of an end: killed, crashed, or still in its first steps"
    if heartbeat.get("event") == "stalled":
        message = f"no step for a long time while {heartbeat.get('doing', 'training')}; see the stacks_*.txt of the run"
    elif heartbeat.get("event") == "stopped":
        message = f"an error ended the process while {heartbeat.get('doing', 'training')}; the terminal's output tells"
    return {**where, "state": "interrupted" if rows else "empty", "title": "Interrupted", "message": message}


def flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """A nested object as {"a.b": leaf}; lists and empty objects are leaves."""
    if not isinstance(value, dict) or not value:
        return {prefix: value}
    found: dict[str, Any] = {}
    for key, item in value.items():
        found.update(flatten(item, f"{prefix}.{key}" if prefix else str(key)))
    return found


def _defaults() -> dict[str, Any]:
    return flatten(json.loads(default_config().to_json()))


def _evaluation(workdir: Path, notes: list[str]) -> dict[str, Any]:
    """What `python -m nsa_jax.evaluate` found: loss by position, needles, totals."""
    found = _read_object(workdir / "evaluation" / "evaluation.json", notes)
    tasks = found.get("tasks")
    if not isinstance(tasks, dict):
        return {}

    def table(task: str, key: str, needed: tuple[str, ...]) -> list[dict[str, float | None]]:
        rows = tasks[task].get(key) if isinstance(tasks.get(task), dict) else None
        rows = [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
        numbers = [{name: _number(value) for name, value in row.items()} for row in rows]
        return [row for row in numbers if all(row.get(name) is not None for name in needed)]

    needles = {task: table(task, "cells", ("length", "depth", "exact_match")) for task in ("needle", "needle-multi")}
    totals = tasks.get("perplexity")
    return {
        "context": _number(found.get("context")),
        "position": table("position", "bins", ("from", "to", "loss", "tokens")),
        "needles": {task: cells for task, cells in needles.items() if cells},
        "totals": {k: _number(v) for k, v in totals.items() if _number(v) is not None}
        if isinstance(totals, dict)
        else {},
    }


def _checkpoints(workdir: Path) -> list[dict[str, Any]]:
    directory = workdir / "checkpoints"
    steps = sorted(int(p.name) for p in directory.iterdir() if p.name.isdecimal()) if directory.is_dir() else []
    return [
        {"step": step, "kind": "note", "name": "checkpoint", "message": f"checkpoint of step {step:,} is kept"}
        for step in steps
    ]


def read_run(workdir: Path, now: float | None = None) -> dict[str, Any]:
    """Everything that the page shows of a run, as JSON values whose texts can be shown.

    Args:
      workdir: of the run.
      now: seconds since the epoch, to tell a live run from a dead one; None: the clock's.

    Raises:
      ReportError: no directory, or nothing in it was written by the trainer.
    """
    if not workdir.is_dir():
        raise ReportError(f"{workdir}: no such directory")
    if not any((workdir / name).is_file() for name in ("metrics.jsonl", "env.json", "stopped.json")):
        raise ReportError(f"{workdir}: not a run: it has neither metrics.jsonl nor env.json, which train.py writes")
    notes: list[str] = []
    tables = {}
    for name in ("metrics", "health", "alarms", "samples"):
        try:
            tables[name], skipped = read_rows(workdir / f"{name}.jsonl")
        except OSError as error:
            raise ReportError(f"{workdir}: {name}.jsonl cannot be read: {error.strerror}") from error
        if skipped:
            what = "line" if skipped == 1 else "lines"
            notes.append(f"{name}.jsonl: {skipped:,} {what} cut off or not a JSON object with a step, left out")
    summary, stopped, env = (_read_object(workdir / f"{n}.json", notes) for n in ("summary", "stopped", "env"))
    config = env.get("config") if isinstance(env.get("config"), dict) else {}
    flat = flatten(config) if config else {}
    defaults = _defaults()
    steps = _number(flat.get("train.steps"))
    rows = tables["metrics"]
    series, not_finite = curves(rows)
    result = outcome(
        None if steps is None else int(steps),
        rows,
        summary,
        stopped,
        _last_object(workdir / "heartbeat_0.jsonl"),
        time.time() if now is None else now,
    )
    events = _alarms(tables["alarms"]) + not_finite + _checkpoints(workdir)
    if env.get("resumed_from") is not None:
        message = f"resumed after step {env.get('start_step')} of {env['resumed_from']}"
        events.append(
            {"step": int(_number(env.get("start_step")) or 0), "kind": "note", "name": "resume", "message": message}
        )
    if result["state"] == "stopped":
        events.append({"step": int(result["step"]), "kind": "stop", "name": "stopped", "message": result["message"]})
    batch, length = _number(flat.get("train.batch_size")), _number(flat.get("data.seq_len"))
    found = {
        "name": workdir.resolve().name,
        "path": str(workdir.resolve()),
        "outcome": result,
        "series": series,
        "clock": _clock(rows),
        "tokens_per_step": int(batch * length) if batch and length else None,
        "health": health_maps(tables["health"]),
        "events": sorted(events, key=lambda event: event["step"]),
        "samples": _samples(tables["samples"]),
        "evaluation": _evaluation(workdir, notes),
        "environment": {k: v for k, v in env.items() if k not in ("config", "preflight")},
        "preflight": env.get("preflight") if isinstance(env.get("preflight"), dict) else {},
        "config": flat,
        "changed": sorted(name for name, value in flat.items() if name not in defaults or defaults[name] != value),
        "best": summary.get("best_checkpoint"),
        "notes": notes,
    }
    return clean(found)
