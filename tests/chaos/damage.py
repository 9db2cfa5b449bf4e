"""Damages files of kept checkpoints: a restart goes on from the newest undamaged step, with every bit, and says so."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from nsa_jax import load
from nsa_jax.loading import LoadError
from nsa_jax.train import CheckpointError
from tests.tools.runs import small_config, write_run
from tests.train.stored import open_run, position_at, same, state_at, target_of, write_steps

from .harness import Outcome

QUICK = 60

_LOSSES: dict[int, float | None] = {2: 2.5, 4: 1.5, 6: 2.0, 8: None, 9: 1.75}


def _damage(rng: np.random.Generator, path: Path, how: str, other: Path) -> bool:
    """Damages one file; False if `how` would leave it as it was."""
    content = path.read_bytes()
    size = len(content)
    if how == "bit flip":
        if not size:
            return False
        changed = bytearray(content)
        changed[int(rng.integers(size))] ^= 1 << int(rng.integers(8))
    elif how == "cut off":
        changed = content[: int(rng.integers(max(size, 1)))]
    elif how == "emptied":
        changed = b""
    elif how == "block of zeros":
        start, length = int(rng.integers(max(size, 1))), int(rng.integers(1, 4096))
        changed = content[:start] + bytes(min(length, size - start)) + content[start + length :]
    elif how == "grown":
        changed = content + rng.bytes(int(rng.integers(1, 600)))
    elif how == "another step's file":
        changed = other.read_bytes() if other.is_file() else content
    else:
        path.unlink()
        if how == "a directory in its place":
            path.mkdir()
        return True
    path.write_bytes(changed)
    return bytes(changed) != content


_KINDS = (
    *("bit flip", "cut off", "emptied", "block of zeros", "grown", "another step's file"),
    *("deleted", "a directory in its place"),
)


class _Messages(logging.Handler):
    """Warnings while an attempt runs."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def _restart(root: Path, damaged: set[int], messages: list[str]) -> str:
    """What is wrong with a restart from `root`; empty if nothing is."""
    good = sorted(set(_LOSSES) - damaged)
    checkpoints = open_run(root)
    data = position_at(0)
    try:
        found = checkpoints.restore(target_of(), data)
    except CheckpointError as error:
        if good:
            return f"refused though step {good[-1]} is undamaged: {error}"
        missing = [step for step in damaged if f"step {step}: " not in str(error)]
        return f"the refusal does not name steps {missing}" if missing else ""
    finally:
        checkpoints.close()
    if found is None:
        return "damaged checkpoints were taken for an empty directory"
    step, state = found
    if step in damaged:
        return f"step {step} was accepted though it is damaged"
    if step != good[-1]:
        return f"step {step} was taken instead of {good[-1]}"
    if not same(state, state_at(step)) or next(data) != step:
        return f"step {step} was restored with other values"
    newer = [number for number in damaged if number > step]
    silent = [n for n in newer if not any(f"skipping checkpoint {n} " in text for text in messages)]
    if silent:
        return f"steps {silent} were passed over without a word"
    again = open_run(root)
    met = [number for number in newer if number in again.steps() or not (root / f"{number}.damaged").is_dir()]
    lost = [number for number in good if number not in again.steps()]
    again.close()
    return f"still there: {met}, lost: {lost}" if met or lost else ""


def _loaded(run: Path, damaged: set[int], first: np.ndarray) -> str:
    """What is wrong with `nsa_jax.load` of a run with steps 1 and 2; empty if nothing is."""
    good = sorted({1, 2} - damaged)
    try:
        model, _, _ = load(run)
    except LoadError as error:
        return f"refused though step {good[-1]} is undamaged: {error}" if good else ""
    if not good:
        return "a damaged step was loaded"
    wanted = first if good[-1] == 1 else first * np.float32(1.5)
    return "" if np.array_equal(model.embedding[...], wanted) else f"other weights than step {good[-1]}'s"


def attack(rng: np.random.Generator, folder: Path) -> Iterator[Outcome]:
    """One attempt: 1 to 3 damages in 1 to all steps of a copy, then a restart (or a load, one time in eight)."""
    write_steps(folder / "steps", _LOSSES, keep_last=len(_LOSSES))
    params = write_run(folder / "run", small_config())
    embedding = np.asarray(params["embedding"])
    handler = _Messages()
    logger = logging.getLogger("nsa_jax")
    while True:
        loads = rng.random() < 1 / 8
        copy = folder / "copy"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(folder / ("run" if loads else "steps"), copy)
        root = copy / "checkpoints" if loads else copy
        steps = [1, 2] if loads else list(_LOSSES)
        count = int(rng.choice([1, 1, 1, 2, 3, len(steps)]))
        # The newest is the one that a restart reads.
        chosen = {steps[-1], *rng.choice(steps, min(count, len(steps)), replace=False).tolist()}
        kind = str(rng.choice(_KINDS))
        damaged = set()
        for step in sorted(chosen):
            files = sorted(path for path in (root / str(step)).rglob("*") if path.is_file())
            for index in rng.choice(len(files), int(rng.integers(1, 4)), replace=False):
                other = root / str(rng.choice(steps)) / files[index].relative_to(root / str(step))
                if _damage(rng, files[index], kind, other):
                    damaged.add(step)
        if not damaged:  # such as a flip in an empty file, or a file that is the same in both steps
            continue
        handler.texts.clear()
        logger.addHandler(handler)
        propagate, logger.propagate = logger.propagate, False
        try:
            problem = _loaded(copy, damaged, embedding) if loads else _restart(copy, damaged, handler.texts)
        except Exception as error:  # a traceback instead of a message is a broken promise, too
            problem = f"{type(error).__name__}: {error}"
        finally:
            logger.removeHandler(handler)
            logger.propagate = propagate
        yield Outcome(f"{'load' if loads else 'restart'}, {kind}", problem and f"steps {sorted(damaged)}: {problem}")
