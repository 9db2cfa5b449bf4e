"""Preflight: whether a run is sane, fits, and what it will cost, before a device hour is spent.

`examine` looks at everything that can be known without training: the config's rules, the compiled steps, the cost, the
workdir and the data. `python train.py --config=... --preflight` prints what it finds and exits with 0 or 2. Rules of
the config itself are in nsa_jax/config.py; those that need a device, a disk or data are here and in data_check.py:

  R008 vocabulary smaller than the tokenizer's      R025 does not fit into the devices' memory
  R018 the kernels do not serve this model          R026 the compiled step talks to the host
  R023 workdir: unwritable or another run's         R027 not compiled for the target: figures are estimates
  R024 disk too small for the checkpoints           R028 data not looked at
  R029 checkpoints more than an hour of work apart  R03x data: see data_check.py; R04x self-test: see selftest.py
"""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict
from rich.console import Console
from rich.table import Table
from rich.text import Text

from nsa_jax import aot
from nsa_jax import config as config_lib
from nsa_jax.command_line import workdir_problems
from nsa_jax.config import ConfigError, Problem
from nsa_jax.data import Pipeline
from nsa_jax.fields import check_fields
from nsa_jax.ops import plan
from nsa_jax.ops.target import current_target
from nsa_jax.train import cost as cost_lib
from nsa_jax.train import data_check
from nsa_jax.train import memory as memory_lib
from nsa_jax.train import selftest as selftest_lib
from nsa_jax.train.state import Setup

_SEARCH_UNTIL = 150.0  # seconds since the start, after which no further micro-batch is compiled


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
      seconds: that each part took.
    """

    problems: list[Problem] = dataclasses.field(default_factory=list)
    facts: dict[str, list[tuple[str, str]]] = dataclasses.field(default_factory=dict)
    memory: memory_lib.Memory | None = None
    compiled: memory_lib.Compiled | None = None
    micro_batch: memory_lib.MicroBatch | None = None
    cost: cost_lib.Cost | None = None
    data: data_check.DataReport | None = None
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)

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
            "seconds": {name: round(seconds, 2) for name, seconds in self.seconds.items()},
        }

    def settle(self, config: ConfigDict) -> None:
        """Marks the errors that the config ignores and sorts the findings, errors first."""
        accepted = config_lib.accept(self.problems, tuple(config.preflight.ignore))
        self.problems = sorted(accepted, key=lambda problem: (problem.severity != "error", problem.rule))


def _gib(size: float) -> str:
    return f"{size / 2**30:,.2f} GiB" if abs(size) >= 2**27 else f"{size / 2**20:,.1f} MiB"


def checkpoint_bytes(made: Setup) -> int:
    """Size of one checkpoint: the whole state, once."""
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(made.abstract_state))


# Fields that may change between two starts of one run without making it another experiment.
_MAY_CHANGE = (
    *("name", "compilation_cache_dir", "preflight", "guards", "train", "mesh"),
    *("data.num_workers", "data.prefetch", "data.cache_dir"),
)
_MAY_CHANGE_ON_PURPOSE = ("optim.", "model.implementation", "model.remat", "model.scan_layers")


def _changed_fields(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> list[str]:
    found = []
    for key in sorted({*old, *new}):
        name = f"{prefix}{key}"
        if name in _MAY_CHANGE:
            continue
        before, after = old.get(key), new.get(key)
        if isinstance(before, dict) and isinstance(after, dict):
            found += _changed_fields(before, after, f"{name}.")
        elif before != after and key in old and key in new:
            found.append(f"{name}: {before!r} there, {after!r} now")
    return found


def check_workdir(config: ConfigDict, workdir: Path) -> list[Problem]:
    """R023: the workdir can be written, and what it holds is this run."""
    if problems := workdir_problems(workdir):
        return problems
    workdir = workdir.absolute()
    try:
        old = json.loads((workdir / "env.json").read_text())["config"]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError) as error:
        message = f"workdir {workdir}: its env.json cannot be read ({type(error).__name__})"
        return [Problem("R023", "warning", message, "another --workdir, if this is not the run to continue")]
    changed = _changed_fields(old, json.loads(config.to_json()))
    if not changed:
        return []
    on_purpose = all(line.startswith(_MAY_CHANGE_ON_PURPOSE) for line in changed)
    message = f"workdir {workdir} holds a run with another config: {'; '.join(changed[:8])}"
    fix = "choose another --workdir, or restore the config in its env.json"
    return [Problem("R023", "warning" if on_purpose else "error", message, fix)]


def check_disk(config: ConfigDict, workdir: Path, one_checkpoint: int) -> list[Problem]:
    """R024: room for the checkpoints that are kept, and one that is being written."""
    if not config.train.save_every:
        return []
    kept = config.train.keep_last + config.train.keep_best + 1
    parent = workdir
    while not parent.exists():
        parent = parent.parent
    free = shutil.disk_usage(parent).free
    steps = [path for path in (workdir / "checkpoints").glob("*") if path.name.isdecimal()]  # damaged ones stay besides
    present = sum(f.stat().st_size for step in steps for f in step.rglob("*") if f.is_file())
    need = kept * one_checkpoint - present
    if free >= need:
        return []
    message = (
        f"workdir {workdir}: {_gib(free)} free, but {kept} checkpoints of {_gib(one_checkpoint)} each need {_gib(need)}"
    )
    return [Problem("R024", "error", message, "free some space, or lower config.train.keep_last")]


def check_kernels(config: ConfigDict, made: Setup, gpu: str) -> list[Problem]:
    """R018: the GPU kernels serve this model's head dims and groups."""
    m = made.model_config
    live = made.mesh.devices.flat[0].platform
    if m.attention != "nsa" or config.model.implementation in ("xla", "reference") or (not gpu and live != "gpu"):
        return []
    target = aot.GPUS[gpu].target if gpu else current_target()
    length = config.data.seq_len
    dims = m.num_heads, m.num_kv_heads, m.head_dim, m.value_head_dim, jnp.dtype(m.dtype).name
    shape = plan.Shape(1, length, length, *dims)
    found = plan.unsupported("select_blocks", shape, target, select_block=m.nsa.select_block)
    if found is None:
        return []
    severity = "error" if config.model.implementation == "pallas" else "warning"
    message = f"config.model.implementation={config.model.implementation!r}: {found}"
    if severity == "warning":
        message += "; the xla implementation would serve instead, many times slower"
    return [Problem("R018", severity, message, "use head dims and groups that the kernels support, such as 64 or 128")]


def check_memory(report: Report, gpu: str, devices: int) -> list[Problem]:
    """R025: the steps fit into the devices' memory."""
    memory = report.memory
    assert memory is not None
    need = max(memory.total, report.compiled.eval_bytes if report.compiled else 0)
    if need <= memory.limit:
        return []
    where = f"{devices} x {gpu}" if gpu else "this machine"
    message = f"{_gib(need)} per device are needed and {_gib(memory.limit)} can be used on {where}"
    fix = "smaller micro-batches (config.train.grad_accum), config.model.remat='block' or 'full', config.mesh.fsdp"
    fix += ", or config.mesh.context if one row does not fit"
    if report.micro_batch:
        fix += f"; {report.micro_batch.rows} rows per device fit"
    return [Problem("R025", "error" if memory.compiled else "warning", message, fix)]


def check_save_interval(config: ConfigDict, cost: cost_lib.Cost) -> list[Problem]:
    """R029: a crash costs at most an hour of work."""
    if not config.train.save_every or cost.step_seconds is None:
        return []
    hours = min(config.train.save_every, config.train.steps) * cost.step_seconds / 3600
    if hours <= 1.0:
        return []
    message = f"config.train.save_every={config.train.save_every}: about {hours:.1f} hours of work between checkpoints"
    fix = f"save at least every {max(int(3600 / cost.step_seconds), 1):,} steps"
    return [Problem("R029", "error", message, fix)]


def _cost_facts(cost: cost_lib.Cost, devices: int, kind: str) -> list[tuple[str, str]]:
    whole = sum(cost.parts.values())
    lines = [
        ("operations per token, forward", f"{whole / 1e6:,.1f} MFLOP"),
        *((f"  {name}", f"{value / 1e6:,.1f} MFLOP  {value / whole:.1%}") for name, value in cost.parts.items()),
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


def _memory_facts(report: Report, gpu: str) -> list[tuple[str, str]]:
    memory = report.memory
    assert memory is not None
    lines = [
        (
            "how it was found",
            "planned by the compiler for this target" if memory.compiled else "ESTIMATE, not compiled",
        ),
        ("parameters", _gib(memory.parameters)),
        ("optimizer state", _gib(memory.optimizer)),
        ("gradients", _gib(memory.gradients)),
        ("activations kept", _gib(memory.activations)),
        ("temporaries and batch", _gib(memory.temporaries + memory.batch)),
        ("total per device", _gib(memory.total)),
        ("can be used per device", f"{_gib(memory.limit)}{', what JAX takes by default' if gpu else ''}"),
        ("headroom", f"{_gib(memory.headroom)}: {'fits' if memory.fits else 'DOES NOT FIT'}"),
    ]
    if report.compiled:
        lines.append(("evaluation, state included", _gib(report.compiled.eval_bytes)))
    best = report.micro_batch
    if best:
        how = "compiled" if best.verified else "extrapolated"
        lines.append(("largest micro-batch that fits", f"{best.rows} rows per device ({_gib(best.bytes)}, {how})"))
    return lines


def _program_facts(config: ConfigDict, compiled: memory_lib.Compiled) -> list[tuple[str, str]]:
    lines = [("compiled", ", ".join(f"{name} step in {s:.0f} s" for name, s in compiled.seconds.items()))]
    for found in compiled.collectives:
        lines.append((f"{found.kind} {found.dtype}", f"{found.count} per step, {_gib(found.bytes)}"))
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


def _compile_part(config: ConfigDict, made: Setup, gpu: str, vocab: int, start: float, report: Report):
    devices = made.mesh.size
    try:
        report.compiled = memory_lib.compile_run(made, gpu)
        report.memory = report.compiled.memory
    except aot.AheadOfTimeUnavailable as error:
        report.problems.append(Problem("R027", "warning", str(error), "install it for exact figures"))
        report.memory = memory_lib.estimate(made, gpu)
    if report.compiled and gpu:
        left = _SEARCH_UNTIL - (time.perf_counter() - start)
        report.micro_batch = memory_lib.largest_micro_batch(config, gpu, devices, report.compiled.memory, vocab, left)
    if report.compiled and report.compiled.host:
        message = f"the compiled step talks to the host: {report.compiled.host[0][:160]}"
        report.problems.append(Problem("R026", "error", message, "remove callbacks and prints from the model"))
    report.problems += check_memory(report, gpu, devices)
    report.facts["memory per device"] = _memory_facts(report, gpu)
    if report.compiled:
        report.facts["compiled program"] = _program_facts(config, report.compiled)


def _runnable(config: ConfigDict) -> bool:
    """Whether a model and batches can be made of the config at all."""
    return not any(p.severity == "error" and p.rule in config_lib.FATAL for p in config_lib.validate(config))


def _data_and_selftest(config: ConfigDict, report: Report, pipeline: Pipeline | None) -> None:
    start = time.perf_counter()
    report.data = data_check.examine(config, pipeline) if pipeline else data_check.examine_local(config)
    report.problems += report.data.problems
    report.facts["data"] = report.data.facts
    report.seconds["data"] = time.perf_counter() - start
    if config.preflight.selftest:
        with jax.default_device(jax.local_devices()[0]):
            tested = selftest_lib.selftest(config)
        report.problems += tested.problems
        report.facts["self-test"] = tested.facts
        report.seconds["self-test"] = tested.seconds


def examine(
    config: ConfigDict, workdir: Path, *, target: str = "", devices: int = 0, program_only: bool = False
) -> Report:
    """Everything that can be known without training; nothing is downloaded or written, save the cache of small text.

    Args:
      config: the training config; it need not be valid.
      workdir: of the run.
      target: a name in `aot.GPUS`; empty: `config.preflight.target`, and if that is empty too, this machine.
      devices: how many; 0: `config.preflight.devices`. Only read with a target.
      program_only: leave out the data and the self-test.

    Returns:
      The report.
    """
    start = time.perf_counter()
    report = Report(problems=config_lib.validate(config))
    if check_fields(config, config_lib.default_config())[1]:
        return report
    report.problems += check_workdir(config, workdir)
    if _runnable(config):
        gpu, count = target or config.preflight.target, devices or config.preflight.devices
        vocab = memory_lib.vocabulary(config)
        before: dict[str, list[tuple[str, str]]] = {}
        if not program_only:
            _data_and_selftest(config, report, None)
            assert report.data is not None
            vocab, before, report.facts = report.data.vocab_size or vocab, report.facts, {}
        _examine_program(config, workdir, gpu, count, vocab, start, report)
        report.facts.update(before)
    report.settle(config)
    report.seconds["program"] = time.perf_counter() - start - sum(report.seconds.values())
    return report


def before_run(config: ConfigDict, workdir: Path, made: Setup, pipeline: Pipeline) -> Report:
    """What every run checks before its first step, on the devices it has.

    Args:
      config: validated.
      workdir: of the run.
      made: its setup.
      pipeline: its data.

    Returns:
      The report, without errors.

    Raises:
      ConfigError: something is wrong; nothing has been trained.
    """
    report = Report(problems=check_workdir(config, workdir))
    start = time.perf_counter()
    kind = made.mesh.devices.flat[0].device_kind
    report.cost = _cost(config, made, made.mesh.size, kind)
    report.problems += check_save_interval(config, report.cost)
    if jax.process_index() == 0:
        report.problems += check_disk(config, workdir, checkpoint_bytes(made))
    report.problems += check_kernels(config, made, "")
    report.seconds["program"] = time.perf_counter() - start
    _data_and_selftest(config, report, pipeline)
    report.problems += [problem for problem in config_lib.validate(config) if problem.severity == "error"]
    report.settle(config)
    if report.exit_code:
        raise ConfigError([problem for problem in report.problems if problem.severity == "error"])
    return report


def _cost(config: ConfigDict, made: Setup, devices: int, kind: str) -> cost_lib.Cost:
    return cost_lib.estimate(
        made.model_config,
        seq_len=config.data.seq_len,
        batch_size=config.train.batch_size,
        steps=config.train.steps,
        device_kind=kind,
        devices=devices,
        utilisation=config.preflight.utilisation,
    )


def _examine_program(
    config: ConfigDict, workdir: Path, gpu: str, count: int, vocab: int, start: float, report: Report
) -> None:
    """Sets the run up for its target and looks at cost, disk and the compiled program."""
    estimated = False
    try:
        made = memory_lib.for_target(config, gpu, count, vocab)
    except aot.AheadOfTimeUnavailable as error:
        report.problems.append(Problem("R027", "warning", str(error), "install it for exact figures"))
        made, estimated = _without_compiler(config, count, vocab), True
    except ConfigError as error:
        report.problems += error.problems
        return
    size = count if gpu else made.mesh.size
    kind = cost_lib.device_kind(gpu) if gpu else made.mesh.devices.flat[0].device_kind
    report.cost = _cost(config, made, size, kind)
    checkpoint = checkpoint_bytes(made)
    report.facts["run"] = [
        ("target", f"{size} x {kind}"),
        ("mesh", ", ".join(f"{axis} {n}" for axis, n in made.mesh.shape.items())),
        ("parameters", f"{made.num_parameters():,} (vocabulary {made.model_config.vocab_size:,})"),
        (
            "batch",
            f"{config.train.batch_size} x {config.data.seq_len:,} tokens, "
            f"{config.train.batch_size // config.train.grad_accum // made.batch_shards} rows of "
            f"{config.data.seq_len * made.batch_shards // made.token_shards:,} tokens per device and micro-batch",
        ),
        ("one checkpoint", _gib(checkpoint)),
    ]
    report.facts["cost"] = _cost_facts(report.cost, size, kind)
    report.problems += check_save_interval(config, report.cost)
    report.problems += check_disk(config, workdir, checkpoint)
    report.problems += check_kernels(config, made, gpu)
    if estimated:
        report.memory = memory_lib.estimate(made, gpu)
        report.problems += check_memory(report, gpu, size)
        report.facts["memory per device"] = _memory_facts(report, gpu)
    else:
        _compile_part(config, made, gpu, vocab, start, report)


def _without_compiler(config: ConfigDict, count: int, vocab: int) -> Setup:
    """The setup of one device's share of the batch on this machine's first device, to estimate from."""
    share = config.copy_and_resolve_references()
    with share.unlocked():
        mesh = config.mesh
        rows = config.train.batch_size * mesh.tensor * mesh.context // count
        share.train.batch_size = max(rows, config.train.grad_accum)
        share.data.seq_len = config.data.seq_len // mesh.context
        share.mesh.data = share.mesh.fsdp = share.mesh.tensor = share.mesh.context = 1
    return memory_lib.setup(share, vocab, jax.devices()[:1])


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
    seconds = sum(report.seconds.values())
    verdict = f"{errors} errors: this run must not start" if errors else "no errors: ready to train"
    console.print(Text(f"preflight: {verdict} ({seconds:.0f} s)", style="bold red" if errors else "bold green"))
