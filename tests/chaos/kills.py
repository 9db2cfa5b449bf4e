"""Kills a run at any moment, saving included, and starts it again: every logged value is that of a run left alone."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from .harness import Outcome
from .runs import Runs, rows, wait_until

QUICK = 2

_MEASURED = ("perf/", "memory/", "time")  # seconds and bytes differ from run to run
TIMED_ALARMS = ("throughput", "data_wait", "memory_slope")  # a busy machine raises them rightly


def logged(workdir: Path) -> list[dict]:
    """All rows without what is measured; a step that was logged twice shows."""
    measured = (*_MEASURED, "alarm/total", *(f"alarm/{name}" for name in TIMED_ALARMS))
    return [{name: value for name, value in row.items() if not name.startswith(measured)} for row in rows(workdir)]


def _kill_sometime(rng: np.random.Generator, runs: Runs, workdir: Path, kind: str, start_seconds: float) -> None:
    """Starts a run and kills it while it starts, trains or saves; it may end before."""
    run = runs.start(workdir)
    if kind == "starting":
        time.sleep(rng.uniform(0, start_seconds))
    elif kind == "training":
        runs.until_rows(run, workdir, len(rows(workdir)) + int(rng.integers(1, 20)))
    else:
        for _ in range(int(rng.integers(1, 4))):  # the first save of a start, or a later one
            known = _unfinished(workdir)
            wait_until(lambda known=known: _unfinished(workdir) - known or run.status() is not None, 120, tick=0.001)
        time.sleep(rng.uniform(0, 0.06))
    run.kill()


def _unfinished(workdir: Path) -> set[str]:
    return {path.name for path in (workdir / "checkpoints").glob("*orbax-checkpoint-tmp*")}


def differences(workdir: Path, reference: Path) -> str:
    """How a finished run differs from the one that was left alone."""
    got, want = logged(workdir), logged(reference)
    if got != want:
        first = next(((a, b) for a, b in zip(got, want, strict=False) if a != b), (got[-1:], want[-1:]))
        return f"{workdir}: {len(got)} rows instead of {len(want)}, the first difference is {first}"
    summaries = [json.loads((path / "summary.json").read_text()) for path in (workdir, reference)]
    for name in ("step", "finished", "validation", "best_checkpoint"):
        if summaries[0][name] != summaries[1][name]:
            return f"{workdir}: summary.json has {name}={summaries[0][name]} instead of {summaries[1][name]}"
    alarms = [{k: v for k, v in s["alarms"].items() if k not in TIMED_ALARMS} for s in summaries]
    if alarms[0] != alarms[1]:
        return f"{workdir}: alarms {alarms[0]} instead of {alarms[1]}"
    steps = [sorted(p.name for p in (path / "checkpoints").iterdir()) for path in (workdir, reference)]
    if steps[0] != steps[1]:
        return f"{workdir}: checkpoints {steps[0]} instead of {steps[1]}"
    left = [name for name in ("lock.json", "stopped.json") if (workdir / name).exists()]
    return f"{workdir}: {left} left behind" if left else ""


def attack(rng: np.random.Generator, folder: Path) -> Iterator[Outcome]:
    """Up to three kills of one run, which is then left to finish: an attempt is one kill."""
    with Runs(folder) as runs:
        reference = folder / "reference"
        failure = runs.finish(folder / "compiled").complaint()
        began = time.monotonic()
        failure = failure or runs.finish(reference).complaint()
        start_seconds = (time.monotonic() - began) / 2
        for number in range(1 << 30):
            workdir = folder / str(number)
            kinds = [str(kind) for kind in rng.choice(["starting", "training", "saving"], rng.integers(1, 4))]
            for kind in kinds:
                _kill_sometime(rng, runs, workdir, kind, start_seconds)
            broken = failure or runs.finish(workdir).complaint() or differences(workdir, reference)
            for kind in kinds:
                yield Outcome(f"killed while {kind}", broken)
