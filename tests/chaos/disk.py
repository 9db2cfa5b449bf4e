"""Fills the disk under a run: it ends with one line and status 3, and continues exactly when there is room again.

Mounting a small disk needs root; without it the attack says so, and tests/train injects the error instead.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from .harness import Outcome
from .kills import differences
from .runs import Runs, rows

QUICK = 1

_MOST_LINES = 130  # a line for each of 48 steps, and what a start tells
_LATE = 40  # rows of 48: hardly anything would be written after them
_FLAGS = ('--config.preflight.ignore=("R024",)', "--config.train.log_every=1")


def _fill(disk: Path, leave: int) -> None:
    """Leaves at most so many bytes free."""
    size = max(shutil.disk_usage(disk).free - leave, 0)
    # The run writes as well: the last bytes may be gone when they are asked for.
    with contextlib.suppress(OSError), (disk / "hog").open("wb", buffering=0) as file:
        while size > 0:
            size -= file.write(bytes(min(size, 1 << 16)))


def _clear(disk: Path) -> None:
    for path in disk.iterdir():
        shutil.rmtree(path, ignore_errors=True)
        path.unlink(missing_ok=True) if path.is_file() else None


def _check_stop(runs: Runs, run, workdir: Path) -> str:
    """The run has ended as one does that meets a full disk."""
    broken = runs.wait(run).complaint(3)
    if broken:
        return broken
    lines = run.text().splitlines()
    stopped = [line for line in lines if line.startswith("stopped: the disk of ")]
    if len(stopped) != 1 or "Fix: free some space" not in stopped[0]:
        return f"{len(stopped)} lines say that the disk is full: {run.text()[-500:]}"
    if "Traceback" in run.text() or len(lines) > _MOST_LINES:
        return f"{len(lines)} lines of log: {run.text()[-500:]}"
    if (workdir / "stopped.json").exists():
        guard = json.loads((workdir / "stopped.json").read_text())["guard"]
        return "" if guard == "disk_full" else f"stopped.json names {guard}"
    free = shutil.disk_usage(workdir).free
    return f"no stopped.json with {free} bytes free" if free > 1 << 14 else ""


def attack(rng: np.random.Generator, folder: Path) -> Iterator[Outcome]:
    """At a random moment, up to a random rest."""
    disk = folder / "disk"
    disk.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", str(disk)]
    while subprocess.run(mount, capture_output=True, check=False).returncode:
        yield Outcome("not permitted to mount a disk")
    try:
        with Runs(folder) as runs:
            reference = folder / "reference"
            failure = runs.finish(reference, *_FLAGS).complaint()
            for number in range(1 << 30):
                workdir = disk / str(number)
                kind = str(rng.choice(["starting", "training"]))
                rest = int(rng.choice([0, 5_000, 30_000, 100_000, 400_000]))
                if kind == "starting":
                    _fill(disk, rest)
                run = runs.start(workdir, *_FLAGS)
                goal = int(rng.integers(1, 25))
                runs.until_rows(run, workdir, goal)
                if kind == "training":
                    run.kill(signal.SIGSTOP)  # however long this process takes to fill the disk
                    late = run.status() is not None or len(rows(workdir)) > _LATE
                    if not late:
                        _fill(disk, rest)
                    run.kill(signal.SIGCONT)
                    if late:
                        broken = runs.wait(run).complaint()
                        _clear(disk)
                        if broken:
                            yield Outcome("trained before the disk was full", broken)
                        continue
                broken = failure or _check_stop(runs, run, workdir)
                (disk / "hog").unlink()
                broken = broken or runs.finish(workdir, *_FLAGS).complaint()
                (workdir / "stopped.json").unlink(missing_ok=True)
                broken = broken or differences(workdir, reference)
                _clear(disk)
                yield Outcome(f"filled up to {rest:,} bytes while {kind}", broken)
    finally:
        subprocess.run(["umount", "-l", str(disk)], capture_output=True, check=False)
