"""Writes the measured figures of README.md and docs/performance.md from benchmarks/results: python docs/figures.py

Rows of tables are found by their first cell. Three significant digits, all of those before the point.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGES = (ROOT / "README.md", ROOT / "docs" / "performance.md")

LENGTHS = (2048, 8192, 32768, 65536, 131072)
BRANCHES = {
    "compressed attention": ("compressed", ""),
    "block selection (scores and top-n)": ("select", ""),
    "selected attention, independent random lists": ("selected", "random"),
    "selected attention, lists shared by 64 neighbours": ("selected", "shared"),
    "window of 512": ("window", ""),
    "dense causal attention, cuDNN": ("dense", ""),
}


def digits(value: float | None) -> str:
    """Three significant digits; nothing for what has no figure."""
    if value is None:
        return ""
    return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f}"


def attention_rows() -> dict[str, list[str]]:
    """Cells of the tables' rows by their first cell."""
    measured = json.loads((RESULTS / "attention_h200.json").read_text())["rows"]
    by_case = {(row["op"], row["pass"], row["T"], row["lists"]): row for row in measured}

    def ms(op: str, kind: str, length: int, lists: str = "") -> float | None:
        return by_case.get((op, kind, length, "selection" if op == "nsa" else lists), {}).get("ms")

    rows: dict[str, list[str]] = {"speed-up": []}
    for length in LENGTHS:
        pairs = [(ms("dense", kind, length), ms("nsa", kind, length)) for kind in ("fwd", "fwd_bwd")]
        rows["speed-up"].append(" / ".join(f"{dense / nsa:.1f}x" for dense, nsa in pairs if dense and nsa))
    for op, front, guide in (("dense", "dense causal, cuDNN", "dense"), ("nsa", "NSA, this library", "NSA")):
        both = [[digits(ms(op, kind, length)) for length in LENGTHS] for kind in ("fwd", "fwd_bwd")]
        rows[f"{front}: forward / forward + backward, ms"] = [" / ".join(pair) for pair in zip(*both, strict=True)]
        rows[f"{guide} forward"], rows[f"{guide} forward + backward"] = both
        lists = "selection" if op == "nsa" else ""
        temporaries = [by_case[op, "fwd_bwd", length, lists]["temp_gib"] for length in LENGTHS]
        rows[f"{guide}, GiB"] = [digits(value) for value in temporaries]
    for name, (op, lists) in BRANCHES.items():
        rows[name] = [digits(ms(op, kind, 65536, lists)) for kind in ("fwd", "bwd")]
    return rows


def page(text: str) -> str:
    """A page's text with the figures of the results."""
    rows = attention_rows()

    def fill(match: re.Match[str]) -> str:
        name = match[1].strip()
        return f"| {' | '.join([name, *rows[name]])} |".replace("|  |", "| |") if name in rows else match[0]

    return re.sub(r"^\| ([^|\n]+) \|.*\|$", fill, text, flags=re.MULTILINE)


if __name__ == "__main__":
    for path in PAGES:
        path.write_text(page(path.read_text()))
