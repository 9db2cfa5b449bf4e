"""Starts a run in the workdir of another: one of them is refused in one line, and the other never notices."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from .harness import Outcome
from .kills import differences
from .runs import Run, Runs

QUICK = 1


def _check_pair(first: Run, second: Run, workdir: Path, reference: Path) -> str:
    """The second is refused, or the first if it was slower to come to the lock."""
    if first.runs.wait(first).hung or second.runs.wait(second).hung:
        return f"a run hangs: {first.text()[-300:]} {second.text()[-300:]}"
    winner, refused = (second, first) if first.status() == 2 else (first, second)
    broken = winner.complaint() or refused.complaint(2) or differences(workdir, reference)
    said = [line for line in refused.text().splitlines() if "in use by" in line]
    if not broken and (
        len(said) != 1 or f"process {winner.pid} on host" not in said[0] or "Traceback" in refused.text()
    ):
        broken = f"the refusal does not name process {winner.pid} in one line: {refused.text()[-300:]}"
    return broken


def attack(rng: np.random.Generator, folder: Path) -> Iterator[Outcome]:
    """At a random moment of the first run; afterwards the finished run is started once more."""
    with Runs(folder) as runs:
        reference = folder / "reference"
        broken = runs.finish(reference).complaint()
        for number in range(1 << 30):
            workdir = folder / str(number)
            first = runs.start(workdir)
            kind = str(rng.choice(["at once", "starting", "training"]))
            if kind == "starting":
                time.sleep(rng.uniform(0.1, 1.5))
            elif kind == "training":
                goal = int(rng.integers(1, 30))
                runs.until_rows(first, workdir, goal)
            second = runs.start(workdir)
            broken_now = broken or _check_pair(first, second, workdir, reference)
            before = (workdir / "summary.json").read_text()
            again = runs.finish(workdir)
            if "finished already" not in again.text() or (workdir / "summary.json").read_text() != before:
                broken_now = broken_now or f"a finished run was not left alone: {again.text()[-300:]}"
            yield Outcome(
                f"two runs, the second {'at once' if kind == 'at once' else f'while the first is {kind}'}", broken_now
            )
