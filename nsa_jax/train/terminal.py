"""What a run shows: lines that stay and, on a terminal, below them one line that says what the run is doing.

A stream that is no terminal gets the lines alone.
"""

from __future__ import annotations

import logging
import os
import shlex
import shutil
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from ml_collections import ConfigDict
from rich.console import Console
from rich.live import Live
from rich.text import Text

from nsa_jax.command_line import forgive, silence
from nsa_jax.data import Pipeline
from nsa_jax.fields import source_configs
from nsa_jax.train.state import Setup

TRAINING = "training"  # the one thing to do whose end can be foretold
_REDRAWS = 4  # per second
_FULL, _EMPTY, _ASCII = "━", "─", ("#", "-")


def duration(seconds: float) -> str:
    """Hours, minutes and seconds: 0:05, 12:30, 26:03:00."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def train_line(step: int, total: int, row: Mapping[str, float], width: int | None = None) -> str:
    """A training row as one line.

    Args:
      step: of the row.
      total: steps of the run.
      row: metrics under their logged names.
      width: columns of the terminal: the least important figures are left out until the rest fits, and step numbers
        are aligned. None: everything, for files and pipes.
    """
    parts = {
        "step": f"step {step:{len(str(total)) if width else ''}}/{total}",
        "loss": f"loss {row.get('train/loss_mean', row['train/loss']):.4f}",
        "bits": f"bits/byte {row.get('train/bits_per_byte_mean', row['train/bits_per_byte']):.3f}",
        "grad": f"grad {row['norm/grad']:.3f}",
        "lr": f"lr {row['learning_rate']:.2e}",
    }
    if "perf/tokens_per_second" in row:
        parts["speed"] = f"{row['perf/tokens_per_second']:,.0f} tokens/s"
    for name in ("lr", "grad", "bits", "speed"):
        if width is None or len("  ".join(parts.values())) <= width:
            break
        parts.pop(name, None)
    return "  ".join(parts.values())


def run_line(config: ConfigDict, setup: Setup) -> str:
    """What a run trains, for how long, and on what."""
    return (
        f"{config.name}: {setup.num_parameters():,} parameters ({', '.join(setup.model_config.kinds)}), "
        f"{config.train.batch_size} x {config.data.seq_len} tokens per step, {config.train.steps:,} steps, "
        f"{setup.mesh.size} x {setup.mesh.devices.flat[0].device_kind}"
    )


def data_line(config: ConfigDict, pipeline: Pipeline) -> str:
    """What a run is trained on, such as `data: stdlib, 1,740 documents, 31.3M tokens, byte`.

    Of several sources each is named with its share, as in `data: web 0.7 (hf x, 900 documents, 2M tokens), ...`.

    Args:
      config: the training config.
      pipeline: of the run.
    """
    told = []
    for name, alone in source_configs(config).items():
        part, data = pipeline.parts[name], alone.data
        words = [{"hf": f"hf {data.hf_path}", "synthetic": f"synthetic {data.synthetic}"}.get(data.source, data.source)]
        if stats := part.pipeline.stats["train"]:
            words += [f"{stats.documents:,} documents", f"{_short(stats.tokens)} tokens"]
        elif part.pipeline.streamed:
            words.append("streamed")
        told.append(f"{name} {part.share:.3g} ({', '.join(words)})" if name else ", ".join(words))
    if pipeline.tokenizer.name != "synthetic":
        kind = config.data.tokenizer
        told.append(kind if kind == "byte" else f"{kind} of {pipeline.tokenizer.vocab_size:,} tokens")
    return f"data: {', '.join(told)}"


def validation_line(step: int, row: dict[str, float], pipeline: Pipeline) -> str:
    """What a validation found, whole and by part; `row` is of metrics.jsonl."""
    each = ", ".join(f"{n} {row[f'val/loss/{n}']:.4f}" for n in pipeline.parts if n)
    return (
        f"step {step}: validation loss {row['val/loss']:.4f}{f' ({each})' if each else ''}, "
        f"{row['val/bits_per_byte']:.3f} bits/byte"
    )


def _short(count: int) -> str:
    """A number with three digits: 940, 31.3M, 2B."""
    rounded = float(f"{count:.3g}")
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if rounded >= size:
            return f"{rounded / size:g}{letter}"
    return str(count)


def status_line(
    doing: str,
    seconds: float,
    width: int,
    steps: tuple[int, int] | None = None,
    left: float | None = None,
    *,
    ascii_only: bool = False,
) -> str:
    """The last line of a terminal: steps done of all, a bar, and what the run is doing for how long.

    Args:
      doing: such as "compiling".
      seconds: for which it has been doing that.
      width: columns of the terminal; the line is at most as long.
      steps: finished steps and all; None before training.
      left: seconds to the end of the run, where that is known.
      ascii_only: draw the bar without box characters.
    """
    if doing == TRAINING:
        said = f"training, {duration(left)} left" if left is not None else "training"
    else:
        said = f"{doing} ({seconds:.0f} s)"
    if steps is None:
        return said[:width]
    done, total = steps
    count = f"{done:{len(str(total))}}/{total}"
    room = min(width - len(count) - len(said) - 3, 60)
    if room < 5:
        return f"{count} {said}"[:width]
    full, empty = _ASCII if ascii_only else (_FULL, _EMPTY)
    filled = room * done // max(total, 1)
    return f"{count} {full * filled}{empty * (room - filled)}  {said}"


def ending(summary: Mapping[str, Any], program: str = "nsa-jax ", workdir: str = "") -> list[str]:
    """The last lines of a run: what happened, where it is, and what to do next.

    Args:
      summary: as summary.json holds it.
      program: what the names of commands are put behind: "nsa-jax " or "python -m nsa_jax.".
      workdir: how to name the run's directory; empty: as in the summary.
    """
    workdir = shlex.quote(workdir or summary["workdir"])
    by = {"SIGINT": "Ctrl-C"}.get(summary["stopped_by"], summary["stopped_by"])
    head = f"stopped by {by} after step" if by else "done:"
    lines = [
        f"{head} {summary['step']:,} of {summary['steps']:,}{'' if by else ' steps'}, "
        f"this start took {duration(summary['goodput']['start']['wall_seconds'])}"
    ]
    validation, best = summary["validation"], summary["best_checkpoint"]
    if validation:
        lines.append(
            f"  validation   loss {validation['val/loss']:.4f}, {validation['val/bits_per_byte']:.3f} bits/byte "
            f"at step {validation['step']:,}"
        )
    if best and validation and best["step"] != validation["step"]:
        lines.append(f"  best         loss {best['val/loss']:.4f} at step {best['step']:,}")
    if summary["alarms"]:
        lines.append(f"  alarms       {sum(summary['alarms'].values())}, in alarms.jsonl")
    lines.append(f"  run          {workdir}")
    if not summary["saved"]:
        lines.append("  checkpoint   none of this step: config.train.save_every is 0")
    lines.append("next")
    if not summary["finished"]:
        lines.append(f"  the same command {_again(summary)}")
    if summary["saved"] or best:
        lines.append(f"  {program}generate {workdir} --interactive")
        lines.append(f"  {program}evaluate {workdir}")
    lines.append(f"  {program}report {workdir}")
    return lines


def _again(summary: Mapping[str, Any]) -> str:
    """What the same command does after a run that has not finished."""
    if summary["stopped_by"].startswith("early stopping"):
        return "ends at once: to go on, raise config.guards.early_stop"
    # What saves nothing leaves the checkpoint that it began with, if there was one, as the last.
    step = summary["step"] if summary["saved"] else summary["start_step"]
    return f"goes on after step {step:,}" if step or summary["saved"] else "begins again"


def program_and_place(workdir: Path) -> tuple[str, str]:
    """How commands are called here, and the shortest name of a directory: the last two arguments of `ending`."""
    program = "nsa-jax " if shutil.which("nsa-jax") else "python -m nsa_jax."
    relative = os.path.relpath(workdir)
    return program, str(workdir) if relative.startswith("..") else relative


class Terminal:
    """Where a run writes its lines.

    Args:
      stream: where lines go; if it is a terminal, the status line is drawn below them.
      active: False on all processes but the first: nothing is written.

    Attributes:
      live: whether there is a status line.
    """

    def __init__(self, stream: TextIO | None = None, *, active: bool = True):
        self._stream = stream or sys.stdout or open(os.devnull, "w")  # a closed one is None
        forgive(self._stream)  # samples are of any language
        self._active = active
        self.live = active and self._stream.isatty()
        self._console = Console(file=self._stream, highlight=False)
        self._drawn: Live | None = None
        self._doing, self._since = "", time.monotonic()
        self._training = TRAINING
        self._steps: tuple[int, int] | None = None
        self._first: tuple[int, float] | None = None  # a finished step and when, since which the pace is taken
        self._last = (0, 0.0)
        self._lock = threading.RLock()

    @property
    def width(self) -> int | None:
        """Columns that a line may have; None if it is no terminal."""
        return self._console.width if self.live else None

    def say(self, line: str, *, wrap: bool = True) -> None:
        """One line that stays; without `wrap` a terminal may break it within words, but copies it whole.

        The run goes on in silence where a line cannot be written: a log collector ended, or the disk is full.
        """
        try:
            if self.live:
                self._console.print(line, markup=False, soft_wrap=not wrap)
            elif self._active:
                print(line, file=self._stream, flush=True)
        except OSError as error:
            self._active = self.live = False
            silence(self._stream)
            message = "standard output cannot be written (%s): the run goes on without it"
            logging.getLogger("nsa_jax").warning(message, error)

    def doing(self, what: str) -> None:
        """What the run does from now on."""
        if not self.live:
            return
        with self._lock:
            if what != self._doing:
                self._doing, self._since = what, time.monotonic()
            if self._drawn is None:
                # What is written to stderr would tear the line; what goes to a file stays there.
                self._drawn = Live(
                    console=self._console,
                    get_renderable=self._render,
                    refresh_per_second=_REDRAWS,
                    transient=True,
                    redirect_stderr=sys.stderr.isatty(),
                )
                self._drawn.start()
                self._console.show_cursor(True)  # a killed run could not bring it back

    def stopping(self, what: str) -> None:
        """Training is about to end: this is said instead."""
        if what != self._training:
            self._training = what
            if self._doing == TRAINING:
                self._since = time.monotonic()

    def steps(self, done: int, total: int) -> None:
        """The run has so many steps, of which some are done: from now on there is a bar."""
        self._steps, self._first = (done, total), None

    def advance(self, step: int) -> None:
        """The device has finished a step."""
        if self._steps is not None:
            self._last = step, time.monotonic()
            self._first = self._first or self._last
            self._steps = step, self._steps[1]

    def _left(self) -> float | None:
        if self._steps is None or self._first is None or self._last[0] <= self._first[0]:
            return None
        pace = (self._last[1] - self._first[1]) / (self._last[0] - self._first[0])
        return pace * (self._steps[1] - self._last[0])

    def _render(self) -> Text:
        doing = self._training if self._doing == TRAINING else self._doing
        line = status_line(
            doing,
            time.monotonic() - self._since,
            self._console.width - len("^C") - 1,  # the echo of Ctrl-C must not break the line
            self._steps,
            self._left(),
            ascii_only=not self._console.encoding.startswith("utf"),
        )
        return Text(line, no_wrap=True)

    def close(self) -> None:
        """Removes the status line; `doing` brings it back."""
        with self._lock:
            drawn, self._drawn = self._drawn, None
        if drawn is not None:
            drawn.stop()
