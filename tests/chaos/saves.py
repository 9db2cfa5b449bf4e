"""Saves, one after the other, under a low limit of open files: descriptors, threads and disk use must stay flat."""

from __future__ import annotations

import os
import resource
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from nsa_jax.hub.digests import verify
from tests.train.stored import open_run, position_at, same, state_at, target_of, write_steps

from .harness import Outcome

QUICK = 60

_DESCRIPTORS = 256


def _open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def attack(rng: np.random.Generator, folder: Path) -> Iterator[Outcome]:
    """One attempt is one asynchronous save; every so often one is waited for, or the run starts again and restores."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # A test process may hold many descriptors of its own.
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(_DESCRIPTORS, _open_files() + 64)), hard))
    states = [state_at(number) for number in range(4)]
    # The first restore and the first saves open what the process then shares.
    write_steps(folder, {1: None})
    checkpoints = open_run(folder)
    checkpoints.restore(target_of(), position_at(0))
    step, before = 1, None
    try:
        while True:
            step += 1
            problem, kind = "", "saved"
            val_loss = float(rng.random()) if rng.random() < 0.2 else None
            try:
                checkpoints.save(step, states[step % 4], position_at(step % 7), val_loss)
                if step == 8 or rng.random() < 0.05:
                    kind = "saved and waited for"
                    checkpoints.wait()
                    verify(folder / str(step))
                    counts = (_open_files(), threading.active_count())
                    before = before or counts
                    if max(np.subtract(counts, before)) > 0:
                        problem = f"step {step}: descriptors and threads {counts}, after the first saves {before}"
                    elif len(found := [path.name for path in folder.iterdir()]) > 4:
                        problem = f"step {step}: more than 3 steps and the best are kept: {found}"
                elif rng.random() < 0.02:
                    kind = "saved, closed and restored"
                    checkpoints.close()
                    checkpoints = open_run(folder)
                    data = position_at(0)
                    restored = checkpoints.restore(target_of(), data)
                    if restored is None or restored[0] != step or not same(restored[1], states[step % 4]):
                        problem = f"step {step}: restored {restored and restored[0]}"
            except Exception as error:
                problem = f"step {step}: {type(error).__name__}: {error}"
            yield Outcome(kind, problem)
    finally:
        checkpoints.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
