"""Reads the directory of a run in any state: finished, stopped, killed in the middle of a line, or still training.

Everything on the page passes through this module. Curves are reduced to `POINTS` points that keep the smallest and
largest value of every bucket. Heat maps are reduced to `COLUMNS` columns that keep the worst value, for figures with a
bad direction. Characters that cannot be printed are removed. It is an error only if there is no directory or no record
at all. If a file is damaged, the report is made of the rest and contains a note.
"""

from __future__ import annotations

import dataclasses
import json
import math
import shlex
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from nsa_jax.config import NSAConfig, default_config
from nsa_jax.inspect.statistics import CANDIDATE, block_kinds
from nsa_jax.ops import blocks
from nsa_jax.report.files import (
    LARGEST_STEP,
    as_finite,
    as_number,
    as_whole,
    clean,
    last_object,
    read_object,
    read_rows,
)
from nsa_jax.train.goodput import CAUSES

POINTS = 1500  # of a curve
COLUMNS = 240  # of a heat map
_SMOOTHED = ("train/", "norm/", "perf/")
SAMPLES = 60  # texts of a run: first, last and evenly spread ones
SAMPLE_CHARACTERS = 8000
_TABLES = ("metrics", "health", "layers", "validation", "alarms", "samples")
_MOST_LAYERS = 2048
_ALIVE_BEATS = 6  # without a new heartbeat for so many, a run is not alive
_BEAT_SECONDS = 30.0  # unless the config says otherwise
# How the values of several steps in one column are combined: by the worst value, for figures that have one.
_WORST = {"gate_entropy": np.fmin, "gate_collapsed": np.fmax, "gate_share_max": np.fmax, "key_mismatches": np.fmax}
_WORST |= {f"{name}_largest": np.fmax for name in ("weights", "gradients", "updates")}
_POSITION_STEPS = 8  # validations whose loss by position is drawn
_SELECTION_STEPS = 60  # validations whose block lists are drawn; fewer, if they are long:
_SELECTION_LISTS = 20_000


class ReportError(Exception):
    """No report can be made of a directory; the message says why."""


def thin(steps: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Indices of the points to keep: smallest and largest of each of `POINTS` / 2 buckets, and the first and last.

    Args:
      steps: [n], ascending.
      values: [n]. A value that is not finite is kept, as a gap, only if its bucket has no finite one.

    Returns:
      Ascending indices into the arrays; all of them if there are no more than `POINTS`.
    """
    if len(steps) <= POINTS:
        return np.arange(len(steps))
    keep = {0, len(steps) - 1}
    for bucket in np.array_split(np.arange(len(steps)), POINTS // 2):
        finite = bucket[np.isfinite(values[bucket])]
        if len(finite):
            keep.update((int(finite[np.argmin(values[finite])]), int(finite[np.argmax(values[finite])])))
        else:
            keep.add(int(bucket[0]))
    return np.array(sorted(keep))


def stretch_means(values: np.ndarray, keep: np.ndarray) -> np.ndarray:
    """For each point that `thin` kept, the mean of the finite values of its stretch; NaN where the point is."""
    means = np.full(len(values), np.nan)
    for bucket in np.array_split(np.arange(len(values)), POINTS // 2):
        finite = values[bucket][np.isfinite(values[bucket])]
        if len(finite):
            means[bucket] = finite.mean()
    return np.where(np.isfinite(values), means, np.nan)[keep]


def _plain(values: Iterable[float]) -> list[float | None]:
    """Numbers with six significant digits for JSON; None for values that are not finite."""
    return [float(f"{value:.6g}") if math.isfinite(value) else None for value in values]


def curves(rows: list[dict[str, Any]]) -> tuple[dict[str, dict[str, Any]], list[dict[str, Any]]]:
    """Curves of all metrics, and where they were not finite.

    If a step was run again after a resume, its later rows replace the earlier ones.

    Returns:
      {name: {"x": steps, "y": values, "n": points before thinning}}, and events {"step", "kind", "name", "message"}.
      Curves that were thinned and may be smoothed have "mean" too: extremes alone would pull a smoothed line.
    """
    by_name: dict[str, dict[int, float]] = {}
    for row in rows:
        for name, value in row.items():
            number = math.nan if value is None else as_number(value)
            if name not in ("step", "time") and not name.startswith("time/") and number is not None:
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
        if len(keep) < len(steps) and name.startswith(_SMOOTHED):
            found[name]["mean"] = _plain(stretch_means(values, keep))
    return found, events


def medians(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Medians of speeds over all points; of a curve that was thinned only extremes are left."""
    found = {}
    for name in ("perf/tokens_per_second", "perf/mfu"):
        by_step = {row["step"]: value for row in rows if (value := as_finite(row.get(name))) is not None}
        if by_step:
            found[name] = float(np.median(list(by_step.values())))
    return found


def _clock(rows: list[dict[str, Any]]) -> dict[str, list]:
    """Seconds since the first row, by step."""
    by_step = {row["step"]: stamp for row in rows if (stamp := as_finite(row.get("time"))) is not None}
    if not by_step:
        return {"x": [], "s": []}
    steps = np.array(sorted(by_step))
    seconds = np.maximum.accumulate(np.array([by_step[step] for step in steps]) - by_step[steps[0]])
    keep = np.unique(np.linspace(0, len(steps) - 1, min(len(steps), POINTS)).astype(int))
    return {"x": steps[keep].tolist(), "s": [round(float(value), 2) for value in seconds[keep]]}


def health_maps(rows: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Figures by layer and step for heat maps: {"x": steps, "layers": L, "n": rows, "z": {name: [L][columns]}}."""
    by_step = {row["step"]: row for row in rows}
    lengths = (len(v) for row in by_step.values() for v in row.values() if isinstance(v, list))
    layers = max((length for length in lengths if length <= _MOST_LAYERS), default=0)
    if not layers:
        return None
    steps = np.array(sorted(by_step))
    names = sorted({name for row in by_step.values() for name, value in row.items() if isinstance(value, list)})
    buckets = np.array_split(np.arange(len(steps)), min(len(steps), COLUMNS))
    maps = {}
    for name in names:
        grid = np.full((layers, len(steps)), np.nan)
        unknown = np.inf if name.endswith("_largest") else np.nan  # layers.jsonl has no infinity, and it must be seen
        for column, step in enumerate(steps):
            value = by_step[step].get(name)
            numbers = [as_number(v) for v in value] if isinstance(value, list) and len(value) <= layers else []
            grid[: len(numbers), column] = [unknown if v is None else v for v in numbers]
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
    return _spread(found, SAMPLES)


def outcome(
    steps: int | None,
    rows: list[dict[str, Any]],
    summary: dict,
    stopped: dict,
    heartbeat: dict,
    now: float,
    beat_seconds: float = _BEAT_SECONDS,
) -> dict[str, Any]:
    """How the run ended, from the youngest evidence: a resumed run leaves older files behind.

    Returns:
      {"state": finished | stopped | requested | running | interrupted | empty, "title", "message", "step", "steps"}.
    """
    last = max((row["step"] for row in rows), default=0)
    # Of the last row, and not the highest: a clock that ran ahead may have been set back during the run.
    latest = next((stamp for row in reversed(rows) if (stamp := as_finite(row.get("time"))) is not None), 0.0)
    beat = as_finite(heartbeat.get("time")) or 0.0
    alive = heartbeat.get("event") == "alive" and now - beat < _ALIVE_BEATS * max(beat_seconds, _BEAT_SECONDS)
    where = {"step": last, "steps": steps}
    stamp = as_finite(stopped.get("time"))
    if stopped and not alive and (stamp is None or stamp >= latest - 1):
        guard = str(stopped.get("guard") or "unnamed")
        kept = as_whole(stopped.get("last_checkpoint"))
        saved = "no checkpoint was kept" if kept is None else f"the newest checkpoint is of step {kept:,}"
        return {
            **where,
            "state": "stopped",
            "step": as_whole(stopped.get("step")) or last,
            "title": f"Stopped by the guard {guard}",
            "message": f"{stopped.get('message', '')} ({saved})",
        }
    at = as_whole(summary.get("step"))
    if at is not None and at >= last and not alive:
        if summary.get("finished"):
            return {**where, "state": "finished", "step": at, "title": "Finished", "message": f"all {at:,} steps"}
        reason = str(summary.get("stopped_by") or "a request")
        early = reason.startswith("early")
        message = "the state was saved; the same command resumes"
        if summary.get("saved") is False:
            message = "nothing was saved: config.train.save_every is 0"
        message = reason if early else message
        title = "Stopped early" if early else f"Stopped by {reason}"
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
    found = read_object(workdir / "evaluation" / "evaluation.json", notes)
    tasks = found.get("tasks")
    if not isinstance(tasks, dict):
        return {}

    def table(task: str, key: str, needed: tuple[str, ...]) -> list[dict[str, float | None]]:
        rows = tasks[task].get(key) if isinstance(tasks.get(task), dict) else None
        rows = [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
        numbers = [{name: as_finite(value) for name, value in row.items()} for row in rows]
        return [row for row in numbers if all(row.get(name) is not None for name in needed)]

    needles = {task: table(task, "cells", ("length", "depth", "exact_match")) for task in ("needle", "needle-multi")}
    totals = tasks.get("perplexity")
    position = tasks.get("position")
    return {
        "step": as_whole(found.get("step")),
        "context": as_finite((position if isinstance(position, dict) else {}).get("context", found.get("context"))),
        "position": table("position", "bins", ("from", "to", "loss", "tokens")),
        "needles": {task: cells for task, cells in needles.items() if cells},
        "totals": {k: as_finite(v) for k, v in totals.items() if as_finite(v) is not None}
        if isinstance(totals, dict)
        else {},
    }


def _spread(items: list[Any], most: int) -> list[Any]:
    """The first and last of some items, and evenly spread ones between them."""
    return [items[i] for i in np.unique(np.linspace(0, len(items) - 1, min(len(items), most)).astype(int))]


def _validation(rows: list[dict[str, Any]], flat: dict[str, Any], notes: list[str]) -> dict[str, Any]:
    """Loss by position at some validations, and what a few held-out queries chose at them.

    Returns:
      positions: [{"step", "bins": [{"from", "to", "loss", "tokens"}]}]; selection: None, or steps, queries (position
      and text of each), layers (their numbers), groups, kinds [queries][J] (`nsa_jax.inspect.statistics.KINDS`), and
      chosen [steps][layers][queries][groups], the candidates that were listed.
    """
    by_step = [row for _, row in sorted({row["step"]: row for row in rows}.items())]
    positions = []
    for row in by_step:
        bins = row.get("position")
        numbers = [
            {name: as_finite(bin.get(name)) for name in ("from", "to", "loss", "tokens")}
            for bin in (bins if isinstance(bins, list) else [])
            if isinstance(bin, dict)
        ]
        if whole := [bin for bin in numbers if None not in bin.values()]:
            positions.append({"step": row["step"], "bins": whole})
    selection = None
    recorded = [row for row in by_step if "selection" in row]
    needed = {"data.seq_len", *(f"model.nsa.{field.name}" for field in dataclasses.fields(NSAConfig))}
    if recorded and needed <= flat.keys():
        try:
            selection = _selection(recorded, flat)
        except (ValueError, TypeError, KeyError, IndexError, OverflowError):
            notes.append("the block lists of validation.jsonl could not be read and are left out")
    return {"positions": _spread(positions, _POSITION_STEPS), "selection": selection}


def _selection(rows: list[dict[str, Any]], flat: dict[str, Any]) -> dict[str, Any]:
    """See `_validation`; what does not fit together raises one of the errors that are caught there."""
    names = [field.name for field in dataclasses.fields(NSAConfig)]
    config = NSAConfig(**{name: flat[f"model.nsa.{name}"] for name in names})
    num_blocks = blocks.num_selection_blocks(flat["data.seq_len"], config.select_block)
    last = rows[-1]["selection"]
    queries, start = np.asarray(last["queries"], np.int64), int(last["start"])
    shape = np.asarray(last["lists"]).shape  # [layers, queries, groups, n]
    layers = [int(layer) for layer in last["layers"]]
    if len(shape) != 4 or shape[:2] != (len(layers), len(queries)) or not 0 <= start <= queries.min(initial=start):
        raise ValueError("lists of other queries or layers")
    if queries.max(initial=0) >= flat["data.seq_len"] or len(queries) > 64 or num_blocks > 2**16:
        raise ValueError("queries beyond the row, or more than a page can show")
    kinds = block_kinds(config, num_blocks, queries, start)
    kept = [row for row in rows if np.shape(row["selection"]["lists"]) == shape]
    kept = _spread(kept, max(min(_SELECTION_STEPS, _SELECTION_LISTS // max(math.prod(shape[:3]), 1)), 2))
    chosen = []
    for row in kept:
        listed = blocks.listed_blocks(np.asarray(row["selection"]["lists"], np.int64), num_blocks)
        of_step = listed & (kinds == CANDIDATE)[:, None]
        chosen.append([[[np.flatnonzero(x).tolist() for x in q] for q in layer] for layer in of_step])
    return {
        "steps": [row["step"] for row in kept],
        "queries": [
            {"position": int(position), "text": str(text)[-60:]}
            for position, text in zip(queries, last["text"], strict=True)
        ],
        "start": start,
        "layers": layers,
        "groups": shape[2],
        "select_block": config.select_block,
        "num_selected": config.num_selected,
        "kinds": kinds.tolist(),
        "chosen": chosen,
    }


def _commands(run: str, env: dict[str, Any]) -> list[dict[str, str]]:
    """Commands to copy: how the run was started, and what can be done with it."""
    path = shlex.quote(run)
    command = env.get("command")
    words = [str(word) for word in command] if isinstance(command, list) else []
    python = ["python"] if words and words[0].endswith(".py") else []
    started = [("train", shlex.join(python + words))] if words else []
    tools = {
        "explore what it reads": f"inspect {path} --text FILE",
        "generate": f'generate {path} --prompt "def "',
        "evaluate": f"evaluate {path}",
        "this report": f"report {path}",
    }
    rest = [(what, f"python -m nsa_jax.{command}") for what, command in tools.items()]
    return [{"what": what, "command": command} for what, command in started + rest]


def _checkpoints(workdir: Path, notes: list[str]) -> list[dict[str, Any]]:
    directory = workdir / "checkpoints"
    try:
        names = [p.name for p in directory.iterdir()] if directory.is_dir() else []
    except OSError as error:
        notes.append(f"checkpoints could not be listed ({error.strerror or error})")
        names = []
    steps = sorted(int(name) for name in names if name.isdecimal() and int(name) < LARGEST_STEP)
    return [
        {"step": step, "kind": "note", "name": "checkpoint", "message": f"checkpoint of step {step:,} is kept"}
        for step in steps
    ]


def _object(parent: dict[str, Any], name: str, file: str, notes: list[str]) -> dict[str, Any]:
    """A part of a file that must be an object. If it is not, it is removed, with a note."""
    value = parent.get(name)
    if value is not None and not isinstance(value, dict):
        notes.append(f"{name} of {file} is no object and is left out")
        del parent[name]
    return value if isinstance(value, dict) else {}


def _preflight(found: dict[str, Any]) -> dict[str, Any]:
    """The texts and numbers of preflight that the page shows."""
    lists = {name: found.get(name) for name in ("warnings", "ignored")}
    texts = {name: [str(v) for v in value] if isinstance(value, list) else [] for name, value in lists.items()}
    return {**texts, "bigram_entropy": as_finite(found.get("bigram_entropy")), "seconds": found.get("seconds")}


def _goodput(found: dict[str, Any]) -> dict[str, float] | None:
    """Seconds by cause over all starts, with their sum under "wall"; None if nothing was recorded."""
    seconds = {cause: as_finite(found.get(f"{cause}_seconds")) for cause in ("wall", *CAUSES)}
    known = {cause: value for cause, value in seconds.items() if value is not None}
    return known if known.get("wall", 0.0) > 0 else None


def _best(found: dict[str, Any]) -> dict[str, Any] | None:
    step, loss = as_whole(found.get("step")), as_finite(found.get("val/loss"))
    return None if step is None or loss is None else {"step": step, "val/loss": loss}


def _far_task(found: dict[str, Any]) -> dict[str, float] | None:
    """The shares of right answers to questions about far tokens."""
    names = ("accuracy", "without_selected", "window_only", "chance")
    shares = {name: share for name in names if (share := as_finite(found.get(name))) is not None}
    return shares if {"accuracy", "chance"} <= shares.keys() else None


def read_run(workdir: Path, now: float | None = None, *, address: str = "") -> dict[str, Any]:
    """Everything that the page shows of a run, as JSON values with printable texts.

    Args:
      workdir: of the run.
      now: seconds since the epoch, to tell a live run from a dead one; None: the current time.
      address: of the run in an object store, if the workdir is a copy.

    Raises:
      ReportError: there is no directory, or it holds nothing that the trainer wrote.
    """
    if not workdir.is_dir():
        raise ReportError(f"{workdir}: no such directory")
    if not any((workdir / name).is_file() for name in ("metrics.jsonl", "env.json", "stopped.json")):
        raise ReportError(f"{workdir}: not a run: it has neither metrics.jsonl nor env.json, which train.py writes")
    notes: list[str] = []
    tables = {name: read_rows(workdir / f"{name}.jsonl", notes) for name in _TABLES}
    summary, stopped, env = (read_object(workdir / f"{n}.json", notes) for n in ("summary", "stopped", "env"))
    if summary and as_whole(summary.get("step")) is None:
        notes.append("summary.json has no step and is left out")
        summary = {}
    config, preflight = (_object(env, name, "env.json", notes) for name in ("config", "preflight"))
    _object(env, "devices", "env.json", notes)
    parameters = _object(env, "parameters", "env.json", notes)
    if parameters and as_finite(parameters.get("total")) is None:
        notes.append("parameters.total of env.json is no number and is left out")
        parameters.pop("total", None)
    flat = flatten(config) if config else {}
    defaults = _defaults()
    steps = as_whole(flat.get("train.steps"))
    rows = tables["metrics"]
    series, not_finite = curves(rows)
    result = outcome(
        steps,
        rows,
        summary,
        stopped,
        last_object(workdir / "heartbeat_0.jsonl", notes),
        time.time() if now is None else now,
        as_finite(flat.get("guards.heartbeat_seconds")) or _BEAT_SECONDS,
    )
    events = _alarms(tables["alarms"]) + not_finite + _checkpoints(workdir, notes)
    if env.get("resumed_from") is not None:
        start, source = as_whole(env.get("start_step")) or 0, env["resumed_from"]
        # Steps of another stage, and of a run that begins with an exported model, count from 0.
        began = not start and source not in (str(workdir.absolute()), str(workdir.resolve()))
        message = f"began with the weights of {source}" if began else f"resumed after step {start} of {source}"
        events.append({"step": start, "kind": "note", "name": "begin" if began else "resume", "message": message})
    if result["state"] == "stopped":
        events.append({"step": result["step"], "kind": "stop", "name": "stopped", "message": result["message"]})
    batch, length = as_whole(flat.get("train.batch_size")), as_whole(flat.get("data.seq_len"))
    found = {
        "name": address.rpartition("/")[2] or workdir.resolve().name,
        "path": address or str(workdir.resolve()),
        "outcome": result,
        "series": series,
        "medians": medians(rows),
        "clock": _clock(rows),
        "tokens_per_step": batch * length if batch and length else None,
        "health": health_maps(tables["health"]),
        "layers": health_maps(tables["layers"]),
        "validation": _validation(tables["validation"], flat, notes),
        "events": sorted(events, key=lambda event: event["step"]),
        "samples": _samples(tables["samples"]),
        "evaluation": _evaluation(workdir, notes),
        "environment": {k: v for k, v in env.items() if k not in ("config", "preflight")},
        "preflight": _preflight(preflight),
        "config": flat,
        "changed": {name: defaults.get(name) for name, value in sorted(flat.items()) if defaults.get(name) != value},
        "commands": _commands(address or str(workdir), env),
        "best": _best(_object(summary, "best_checkpoint", "summary.json", notes)),
        "far_task": _far_task(_object(summary, "far_task", "summary.json", notes)),
        "goodput": _goodput(_object(read_object(workdir / "goodput.json", notes), "run", "goodput.json", notes)),
        "notes": notes,
    }
    return clean(found)
