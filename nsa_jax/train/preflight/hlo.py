"""What a compiled program does besides arithmetic: collectives by kind, and operations whose results differ by run."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator

_ITEM_BYTES = {"pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4}
_ITEM_BYTES.update({"s64": 8, "u64": 8, "f64": 8, "c64": 8, "c128": 16})
_ITEM_BYTES.update({"f8e4m3fn": 1, "f8e5m2": 1})
_KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", "collective-broadcast")

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
_SHAPE = re.compile(r"(\w+)\[([\d,]*)\]")
_OPERATION = re.compile(r" = (.*?) ([a-z][a-z\-]*)\(")
_CALLED = re.compile(
    r"(?:body|condition|calls|to_apply)=%?([\w.\-]+)|(?:branch_computations|called_computations)=\{([^}]*)\}"
)
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')


@dataclasses.dataclass(frozen=True)
class Collective:
    """All collectives of one kind and element type in one run of a program.

    Attributes:
      kind: such as "all-reduce".
      dtype: element type.
      count: how many are run, loops counted.
      bytes: of their results on one device, in all. The result of a reduce-scatter is one device's part of the sum.
    """

    kind: str
    dtype: str
    count: int
    bytes: int


def _computations(text: str) -> tuple[dict[str, list[str]], str]:
    """Lines of each computation by name, and the entry's name."""
    found: dict[str, list[str]] = {}
    entry, current = "", None
    for line in text.splitlines():
        if current is None or not line.startswith(" "):
            match = _COMPUTATION.match(line)
            if match:
                current = match.group(2)
                found[current] = []
                entry = current if match.group(1) else entry
                continue
        if current is not None:
            found[current].append(line)
    return found, entry


def _runs(computations: dict[str, list[str]], entry: str) -> dict[str, int]:
    """How often each computation is run; loops whose trip count the compiler does not know count once."""
    times: dict[str, int] = {}

    def visit(name: str, count: int) -> None:
        times[name] = times.get(name, 0) + count
        for line in computations.get(name, ()):
            trips = _TRIPS.search(line)
            inner = count * int(trips.group(1)) if trips and " while(" in line else count
            for one, several in _CALLED.findall(line):
                for called in (one or several).replace("%", "").split(","):
                    if called.strip() in computations:
                        visit(called.strip(), inner)

    visit(entry, 1)
    return times


def _parts(shape: str) -> list[str]:
    """The elements at the top level of a tuple shape."""
    depth, parts = 0, [""]
    for char in shape[1:-1]:
        depth += (char in "([{") - (char in ")]}")
        if char == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += char
    return parts


def instructions(text: str) -> Iterator[tuple[str, int, list[tuple[str, tuple[int, ...]]]]]:
    """Each collective of a compiled program: its kind, how often it is run, and dtype and shape of its results.

    The compiler combines collectives, so that one may have several results. An asynchronous one is its start.

    Args:
      text: `compiled.as_text()`.
    """
    computations, entry = _computations(text)
    times = _runs(computations, entry)
    for name, lines in computations.items():
        for line in lines if times.get(name) else ():
            match = _OPERATION.search(line)
            if not match:
                continue
            shape, operation = match.groups()
            kind = operation.removesuffix("-start")
            if kind not in _KINDS:
                continue
            # A start returns (operands, results, and for some kinds its own state). That of an all-reduce returns its
            # results alone before JAX 0.12, and since then ((operands), results).
            if operation.endswith("-start") and (shape.startswith("((") or kind != "all-reduce" and shape[0] == "("):
                shape = _parts(shape)[1]
            found = _SHAPE.findall(shape)
            yield kind, times[name], [(dtype, tuple(int(d) for d in dims.split(",") if d)) for dtype, dims in found]


def collectives(text: str) -> list[Collective]:
    """Collectives of a compiled program, largest first.

    Args:
      text: `compiled.as_text()`.
    """
    counts: dict[tuple[str, str], int] = {}
    sizes: dict[tuple[str, str], int] = {}
    for kind, times, results in instructions(text):
        for dtype, shape in results:
            size = math.prod(shape) * _ITEM_BYTES.get(dtype, 4)
            sizes[kind, dtype] = sizes.get((kind, dtype), 0) + times * size
        for dtype in {dtype for dtype, _ in results}:
            counts[kind, dtype] = counts.get((kind, dtype), 0) + times
    found = [Collective(*key, counts[key], size) for key, size in sizes.items()]
    return sorted(found, key=lambda c: -c.bytes)


def nondeterministic(text: str) -> list[str]:
    """Instructions of a program compiled for GPUs whose result depends on the order in which threads come to add.

    Those are scatters that may meet an element twice, and cuDNN's attention backward. This package's kernels have no
    atomics.

    Args:
      text: `compiled.as_text()`.
    """
    found = []
    for line in text.splitlines():
        scatters = re.search(r" (scatter|select-and-scatter)\(", line) and "unique_indices=true" not in line
        if scatters or re.search(r'custom_call_target="__cudnn\$fmha\w*Backward', line):
            found.append(line.strip())
    return found
