"""Runs attacks until their time or count is spent, and says how many broke a promise.

An attack is a module of this folder with

    def attack(rng: numpy.random.Generator, folder: Path) -> Iterator[Outcome]

an endless generator: each item is one attempt to break a promise. It draws every choice from `rng` and writes under
`folder` alone. `QUICK` is the number of attempts that the test suite makes.
"""

from __future__ import annotations

import collections
import dataclasses
import importlib
import json
import time
import zlib
from collections.abc import Iterable
from pathlib import Path

import numpy as np

ATTACKS: tuple[str, ...] = (
    "bad_config",
    "damage",
    "disk",
    "healthy",
    "hostile_export",
    "kills",
    "nan",
    "saves",
    "token_cache",
    "tokenising",
    "twice",
)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """One attempt.

    Attributes:
      kind: what was done, in few words; the table counts by it.
      failure: how the promise was broken; empty if it held.
    """

    kind: str
    failure: str = ""


@dataclasses.dataclass
class Tally:
    """All attempts of one kind of one attack."""

    attempts: int = 0
    failures: list[str] = dataclasses.field(default_factory=list)
    seconds: float = 0.0


Tallies = dict[tuple[str, str], Tally]


def run_attack(
    name: str, seed: int, folder: Path, *, count: int | None = None, seconds: float | None = None
) -> Tallies:
    """Attempts of the attack `name`: `count` of them, or as many as fit into `seconds`; at least one.

    A failure that is raised instead of returned, such as a bug of the attack, counts as a failure and ends the attack.
    """
    module = importlib.import_module(f"{__package__}.{name}")
    # The attack's name is part of the seed: leaving one attack out changes none of the others.
    rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
    folder.mkdir(parents=True, exist_ok=True)
    tallies: Tallies = collections.defaultdict(Tally)
    start = time.monotonic()
    attempts = module.attack(rng, folder)
    made = 0
    while (count is None or made < count) and (made == 0 or seconds is None or time.monotonic() - start < seconds):
        began = time.monotonic()
        try:
            outcome = next(attempts)
        except StopIteration:
            break
        except Exception as error:
            outcome = Outcome("error in the attack", f"{type(error).__name__}: {error}")
        made += 1
        tally = tallies[name, outcome.kind]
        tally.attempts += 1
        tally.seconds += time.monotonic() - began
        if outcome.failure:
            tally.failures.append(outcome.failure)
        if outcome.kind == "error in the attack":
            break
    attempts.close()
    return tallies


def table(tallies: Tallies) -> str:
    """Attack, kind, attempts, failures and seconds as aligned text, then each failure."""
    rows = [("attack", "kind", "attempts", "failures", "seconds")]
    rows += [(*key, str(t.attempts), str(len(t.failures)), f"{t.seconds:.0f}") for key, t in sorted(tallies.items())]
    total, failed = sum(t.attempts for t in tallies.values()), sum(len(t.failures) for t in tallies.values())
    rows.append(("all", "", str(total), str(failed), f"{sum(t.seconds for t in tallies.values()):.0f}"))
    widths = [max(len(row[i]) for row in rows) for i in range(5)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines += [f"{name} / {kind}: {text}" for (name, kind), t in sorted(tallies.items()) for text in t.failures]
    return "\n".join(lines)


def failures(tallies: Tallies) -> list[str]:
    """Every failure, with its attack and kind."""
    return [f"{name} / {kind}: {text}" for (name, kind), t in tallies.items() for text in t.failures]


def write_json(path: Path, tallies: Tallies, **about) -> None:
    """The table as JSON, with `about` (seed, command, versions) before it."""
    rows = [{"attack": name, "kind": kind, **dataclasses.asdict(t)} for (name, kind), t in sorted(tallies.items())]
    path.write_text(json.dumps({**about, "attacks": rows}, indent=2) + "\n")


def parse_counts(items: Iterable[str]) -> dict[str, int]:
    """{"kills": 100} of ["kills=100"]."""
    return {name: int(number) for name, _, number in (item.partition("=") for item in items)}
