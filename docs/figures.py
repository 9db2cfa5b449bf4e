"""Writes the measured figures of README.md and of pages in docs/ from benchmarks/results: python docs/figures.py

Rows of tables are found by their first cell. Three significant digits, all of those before the point.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGES = (ROOT / "README.md", ROOT / "docs" / "performance.md", ROOT / "docs" / "parallel.md")

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


def thousands(value: float) -> str:
    """Tokens per second."""
    return f"{round(value, -3):,.0f}"


def training_rows() -> dict[str, list[str]]:
    """As `attention_rows`, of whole training steps; of cases that were timed twice, the newest."""
    measured = json.loads((RESULTS / "train_speed_h200.json").read_text())["rows"]

    def found(attention: str, length: int, remat: str = "block", devices: int = 1, layout: str = "data") -> dict:
        case = dict(attention=attention, length=length, remat=remat, devices=devices, layout=layout, layers="scanned")
        return [row for row in measured if case.items() <= row.items() and "error" not in row][-1]

    cases = [[found(kind, length) for length in LENGTHS[:4]] for kind in ("nsa", "dense")]
    speeds = [[row["tokens_per_second"] for row in rows] for rows in cases]
    sizes = [[f"{row['parameters'] / 1e6:.0f}M" for row in rows] for rows in cases]
    remat = [found("nsa", 2048, policy) for policy in ("none", "attention_saved", "block")]
    four = [found("nsa", 2048, devices=4, layout=layout) for layout in ("data", "fsdp")]
    context = json.loads((RESULTS / "context_h200.json").read_text())
    split = [row for row in (*context["same"], *context["long"]) if row["attention"] == "nsa"]
    return {
        "model with NSA, tokens/s": [thousands(speed) for speed in speeds[0]],
        "model with dense attention, tokens/s": [thousands(speed) for speed in speeds[1]],
        "NSA over dense": [f"{nsa / dense:.1f}x" for nsa, dense in zip(*speeds, strict=True)],
        "parameters, NSA / dense": [" / ".join(pair) for pair in zip(*sizes, strict=True)],
        "speed, tokens/s": [thousands(row["tokens_per_second"]) for row in remat],
        "memory, GiB": [digits(row["planned_gib"]) for row in remat],
        "four GPUs, tokens/s": [thousands(row["tokens_per_second"]) for row in four],
        "share of four times one GPU": [f"{row['scaling']:.1%}".replace("%", " %") for row in four],
        "row split over GPUs, tokens/s": [thousands(row["tokens_per_second"]) for row in split],
        "row split over GPUs, peak GiB": [digits(row["peak_gib_so_far"]) for row in split],
    }


def all_rows() -> dict[str, list[str]]:
    """Cells of all rows with figures."""
    return attention_rows() | training_rows()


def page(text: str) -> str:
    """A page's text with the figures of the results."""
    rows = all_rows()

    def fill(match: re.Match[str]) -> str:
        name = match[1].strip()
        return f"| {' | '.join([name, *rows[name]])} |".replace("|  |", "| |") if name in rows else match[0]

    return re.sub(r"^\| ([^|\n]+) \|.*\|$", fill, text, flags=re.MULTILINE)


if __name__ == "__main__":
    for path in PAGES:
        path.write_text(page(path.read_text()))
