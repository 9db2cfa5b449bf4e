"""Reads benchmarks/results for the pages, and writes figures as they have them."""

from __future__ import annotations

import json
from pathlib import Path

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def digits(value: float | None) -> str:
    """Three significant digits; nothing for what has no figure."""
    if value is None:
        return ""
    return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f}"


def results(name: str) -> dict:
    """A file of benchmarks/results."""
    return json.loads((RESULTS / f"{name}.json").read_text())
