"""Reads JSON files that a run writes, of which any may be missing, cut off in the middle of a line, or damaged.

What cannot be read is left out, and a note says so. No value of a file raises an error.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from nsa_jax.train.metrics import printable

LARGEST_STEP = 2**53  # JavaScript counts exactly up to here
_DEEPEST = 50  # levels of JSON; the trainer writes no deeper ones


def clean(value: Any) -> Any:
    """A JSON value without characters that cannot be shown (control characters, halves of surrogate pairs)."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, dict):
        return {printable(str(key)): clean(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [clean(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def _parse(text: str) -> Any:
    """A JSON value.

    Raises:
      ValueError: the text is not JSON, or is nested so deeply that recursive functions would fail.
    """
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise ValueError("nested too deep") from error
    level = [value]
    for _ in range(_DEEPEST):
        level = [v for item in level if isinstance(item, (dict, list)) for v in _inner(item)]
        if not level:
            return value
    raise ValueError("nested too deep")


def _inner(value: dict | list) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value


def _text(path: Path, notes: list[str]) -> str:
    """The text of a file; empty, with a note, if the file exists and cannot be read."""
    try:
        if path.is_file():
            return path.read_text(encoding="utf-8", errors="replace")
        if os.path.lexists(path):
            notes.append(f"{path.name} could not be read (no regular file) and is left out")
    except OSError as error:
        notes.append(f"{path.name} could not be read ({error.strerror or error}) and is left out")
    return ""


def read_rows(path: Path, notes: list[str]) -> list[dict[str, Any]]:
    """Objects of a JSON Lines file with an integer `step`; a note counts other lines, such as a truncated last one."""
    rows: list[dict[str, Any]] = []
    skipped = 0
    for line in _text(path, notes).split("\n"):
        if not line.strip():
            continue
        try:
            row = _parse(line)
            row["step"] = int(row["step"])
        except (ValueError, KeyError, TypeError, OverflowError):
            skipped += 1
            continue
        if abs(row["step"]) < LARGEST_STEP:
            rows.append(row)
        else:
            skipped += 1
    if skipped:
        what = "line" if skipped == 1 else "lines"
        notes.append(f"{path.name}: {skipped:,} {what} cut off or not a JSON object with a step, left out")
    return rows


def read_object(path: Path, notes: list[str]) -> dict[str, Any]:
    """A JSON object; an empty one, with a note, if the file exists and cannot be read."""
    before = len(notes)
    text = _text(path, notes)
    if not text and (len(notes) > before or not path.is_file()):
        return {}
    try:
        value = _parse(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        notes.append(f"{path.name} could not be read and is left out")
        return {}
    return value


def last_object(path: Path, notes: list[str]) -> dict[str, Any]:
    """The last complete JSON object of a JSON Lines file, or an empty one."""
    for line in reversed(_text(path, notes).split("\n")):
        try:
            value = _parse(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            return value
    return {}


def as_number(value: Any) -> float | None:
    """A number of JSON as a float, which may be infinite or NaN; None for all other values."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf


def as_finite(value: Any) -> float | None:
    """A finite number; None for all other values."""
    number = as_number(value)
    return number if number is not None and math.isfinite(number) else None


def as_whole(value: Any) -> int | None:
    """An integer that JavaScript represents exactly, such as a step; None for all other values."""
    number = as_finite(value)
    return int(number) if number is not None and abs(number) < LARGEST_STEP else None
