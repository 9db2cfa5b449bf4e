"""Healthy runs raise no alarm and are not stopped: 300 steps first, then 5,000 in each attempt."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from .harness import Outcome
from .kills import TIMED_ALARMS
from .runs import Runs

QUICK = 1


def attack(rng: np.random.Generator, folder: Path) -> Iterator[Outcome]:
    """Text of the standard library by bytes, with another seed each time; all guards at their defaults."""
    with Runs(folder) as runs:
        for number in range(1 << 30):
            workdir, steps = folder / str(number), 5000 if number else 300
            flags = [
                *(f"--config.train.steps={steps}", f"--config.seed={int(rng.integers(1 << 30))}"),
                *("--config.data.source=stdlib", "--config.data.tokenizer=byte", "--config.data.max_documents=300"),
                *("--config.guards.health=True", "--config.data.val_fraction=0.1", "--config.train.keep_last=3"),
                *("--config.guards.plateau_steps=2000", "--config.guards.max_gap=1.5", "--config.train.log_every=10"),
                '--config.preflight.ignore=("R015", "R016")',  # a toy, for so many steps
                *("--config.train.eval_every=250", "--config.train.save_every=500"),
            ]
            run = runs.finish(workdir, *flags, seconds=3600)
            broken = run.complaint()
            alarms = {} if broken else json.loads((workdir / "summary.json").read_text())["alarms"]
            timed = sorted(set(alarms) & set(TIMED_ALARMS))
            if set(alarms) - set(timed):
                broken = f"{alarms}: {(workdir / 'alarms.jsonl').read_text()[:300]}"
            busy = f", the machine was busy ({', '.join(timed)})" if timed else ""
            yield Outcome(f"{steps:,} healthy steps{busy}", broken)
