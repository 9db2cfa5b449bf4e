"""What preflight found, and how it is shown."""

from __future__ import annotations

import dataclasses
from typing import Any

from ml_collections import ConfigDict
from rich.console import Console
from rich.table import Table
from rich.text import Text

from nsa_jax import config as config_lib
from nsa_jax.config import Problem
from nsa_jax.ops.explain import Explanation
from nsa_jax.train.preflight import cost as cost_lib
from nsa_jax.train.preflight import data_check
from nsa_jax.train.preflight import memory as memory_lib
from nsa_jax.train.preflight.data_check import NOT_CHECKED


@dataclasses.dataclass
class Report:
    """What preflight found.

    Attributes:
      problems: errors, warnings, and errors that the config ignores.
      facts: sections of (name, value) lines for the reader.
      memory: of the train step on one device; None if it could not be set up.
      compiled: what the compiled steps say; None for an estimate.
      micro_batch: the largest that fits; None if it was not searched or nothing fits.
      cost: of the run.
      data: what the run will read; None if it was not looked at.
      seconds: that each part took; the data and the self-test have a thread each.
      took: seconds in all.
    """

    problems: list[Problem] = dataclasses.field(default_factory=list)
    facts: dict[str, list[tuple[str, str]]] = dataclasses.field(default_factory=dict)
    memory: memory_lib.Memory | None = None
    compiled: memory_lib.Compiled | None = None
    micro_batch: memory_lib.MicroBatch | None = None
    cost: cost_lib.Cost | None = None
    data: data_check.DataReport | None = None
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)
    took: float = 0.0

    @property
    def exit_code(self) -> int:
        """0, or 2 if an error remains."""
        return 2 if any(problem.severity == "error" for problem in self.problems) else 0

    def record(self) -> dict[str, Any]:
        """What env.json keeps."""
        return {
            "ignored": [str(problem) for problem in self.problems if problem.severity == "ignored"],
            "warnings": [str(problem) for problem in self.problems if problem.severity == "warning"],
            "bigram_entropy": self.data.bigram_entropy if self.data else None,
            "unigram_entropy": self.data.unigram_entropy if self.data else None,
            "choice_share": self.data.choice_share if self.data else None,
            "seconds": {name: round(seconds, 2) for name, seconds in self.seconds.items()},
        }

    def settle(self, config: ConfigDict) -> None:
        """Marks the errors that the config ignores and sorts the findings, errors first."""
        accepted = config_lib.accept(self.problems, tuple(config.preflight.ignore))
        self.problems = sorted(accepted, key=lambda problem: (problem.severity != "error", problem.rule))


def gib(size: float) -> str:
    return f"{size / 2**30:,.2f} GiB" if abs(size) >= 2**27 else f"{size / 2**20:,.1f} MiB"


def cost_facts(cost: cost_lib.Cost, devices: int, kind: str) -> list[tuple[str, str]]:
    whole = sum(cost.parts.values())
    lines = [
        ("operations per token, forward", f"{whole / 1e6:,.1f} MFLOP"),
        *((f"  {name}", f"{value / 1e6:,.1f} MFLOP  {value / whole:.1%}") for name, value in cost.parts.items()),
        ("counted in", "the documents of sampled rows" if cost.packed else "rows of one document"),
        ("keys per query", ", ".join(f"{name} {value:,.0f}" for name, value in cost.keys.items())),
        ("operations per trained token", f"{cost.train_flops / 1e6:,.1f} MFLOP"),
        ("  with dense attention instead", f"{cost.dense_flops / 1e6:,.1f} MFLOP, "
         f"{cost.dense_flops / cost.train_flops:.2f} times as many"),
        ("tokens", f"{cost.tokens:,}"),
    ]  # fmt: skip
    if cost.tokens_per_second is None or cost.hours is None or cost.step_seconds is None:
        return [*lines, ("time", f"not estimated: the peak of {kind} is not known")]
    return [
        *lines,
        (f"tokens/s at {cost.utilisation:.0%} of the peak", f"{cost.tokens_per_second:,.0f} on {devices} x {kind}"),
        ("time of the run, so estimated", f"{cost.hours:,.1f} hours, {cost.hours * devices:,.1f} device hours"),
    ]


def kernel_facts(explained: Explanation) -> list[tuple[str, str]]:
    """A line for each kernel: the stages and passes that it serves, and the reason where Triton serves on Hopper."""
    if explained.unsupported is not None:
        return [("none", f"XLA serves: {explained.unsupported}")]
    served: dict[tuple[str, str], list[str]] = {}
    for row in explained.rows:
        not_sm90 = explained.target.is_hopper and row.choice.kernel.endswith("_triton")
        key = row.choice.kernel, row.choice.reason if not_sm90 else ""
        served.setdefault(key, []).append(f"{row.stage} {row.direction}")
    return [
        (kernel, "; ".join(stages) + (f" ({reason})" if reason else "")) for (kernel, reason), stages in served.items()
    ]


def memory_facts(report: Report, gpu: str) -> list[tuple[str, str]]:
    memory = report.memory
    assert memory is not None
    pool = f", what JAX takes by {memory_lib.pool_variable() or 'default'}" if gpu else ""
    lines = [
        (
            "how it was found",
            "planned by the compiler for this target" if memory.compiled else "ESTIMATE, not compiled",
        ),
        ("parameters", gib(memory.parameters)),
        ("optimizer state", gib(memory.optimizer)),
        ("gradients", gib(memory.gradients)),
        ("activations kept", gib(memory.activations)),
        ("temporaries and batch", gib(memory.temporaries + memory.batch)),
        ("total per device", gib(memory.total)),
        *([("in the host's memory, for each device", gib(memory.host))] if memory.host else []),
        ("can be used per device", f"{gib(memory.limit)}{pool}"),
        ("headroom", f"{gib(memory.headroom)}: {'fits' if memory.fits else 'DOES NOT FIT'}"),
    ]
    if report.compiled:
        lines += [(f"{name}, state included", gib(size)) for name, size in report.compiled.others.items()]
    best = report.micro_batch
    if best:
        how = "compiled" if best.verified else "extrapolated"
        lines.append(("largest micro-batch that fits", f"{best.rows} rows per device ({gib(best.bytes)}, {how})"))
    elif gpu:
        lines.append(("largest micro-batch that fits", "not searched: that takes the compiler, and time"))
    return lines


def program_facts(config: ConfigDict, compiled: memory_lib.Compiled) -> list[tuple[str, str]]:
    lines = [("compiled", ", ".join(f"{name} in {s:.0f} s" for name, s in compiled.seconds.items()))]
    for found in compiled.collectives:
        lines.append((f"{found.kind} {found.dtype}", f"{found.count} per step, {gib(found.bytes)}"))
    if not compiled.collectives:
        lines.append(("collectives", "none"))
    lines.append(("host callbacks", str(len(compiled.host)) if compiled.host else "none"))
    return [*lines, ("deterministic", _determinism(config, compiled))]


def _determinism(config: ConfigDict, compiled: memory_lib.Compiled) -> str:
    """Whether two runs of the step give the same bits on GPUs, and why not."""
    if found := compiled.nondeterministic:
        return f"no: {len(found)} operations add in any order, such as {found[0][:80]}"
    if not config.train.deterministic:
        return "not promised: config.train.deterministic=False lets the compiler choose by measuring"
    return "yes: no operation adds in an order that differs from run to run"


_COLOURS = {"error": "bold red", "warning": "yellow", "ignored": "magenta"}


def show(report: Report, console: Console) -> None:
    """Prints the report: facts in sections, then every problem with its fix, then the verdict."""
    facts = Table(show_header=False, box=None, pad_edge=False)
    facts.add_column(no_wrap=True)
    facts.add_column(overflow="fold")
    for title, lines in report.facts.items():
        facts.add_row(Text(title, style="bold"), "")
        for name, value in lines:
            facts.add_row(Text(f"  {name}"), Text(value))
    console.print(facts)
    if report.problems:
        problems = Table(show_lines=True, title="findings", title_justify="left")
        for column in ("rule", "severity", "what", "fix"):
            problems.add_column(column, overflow="fold")
        for problem in report.problems:
            style = _COLOURS.get(problem.severity, "")
            cells = (problem.rule, problem.severity, problem.message, problem.fix)
            problems.add_row(*(Text(cell, style=style if i == 1 else "") for i, cell in enumerate(cells)))
        console.print(problems)
    errors = sum(problem.severity == "error" for problem in report.problems)
    verdict, style = "no errors: ready to train", "bold green"
    if errors:
        verdict, style = f"{errors} errors: this run must not start", "bold red"
    elif unchecked := [name for name, lines in report.facts.items() if NOT_CHECKED in dict(lines)]:
        verdict, style = f"no errors in what was checked; not checked: {', '.join(unchecked)}", "bold yellow"
    console.print(Text(f"preflight: {verdict} ({report.took:.0f} s)", style=style))
