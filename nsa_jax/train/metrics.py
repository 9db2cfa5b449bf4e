"""Metrics: their names, where they are written, and the measurements that are not part of the compiled step.

In metrics.jsonl null stands for a number that is not finite. Names (every row also has `step`, the number of finished
optimizer steps):
  train/loss, train/perplexity, train/bits_per_byte: of the batch of that step, nats per token.
  train/loss_mean, train/bits_per_byte_mean: averages of the finite values of the steps since the last row.
  train/tokens: of all batches up to that step.
  train/z_loss, train/selection_loss: of that step, where config.train has them; the first as it was added, in nats.
  val/loss, val/perplexity, val/bits_per_byte: over the fixed validation batches.
  val/loss/NAME, val/bits_per_byte/NAME: of each of config.data.sources; those above weigh them as training does.
  data/epochs, or data/epochs/NAME of each of config.data.sources: passes over the training documents so far.
  norm/grad (before clipping), norm/param, norm/update, learning_rate.
  perf/tokens_per_second, perf/step_seconds: absent where no step was timed, as in a row of the first step alone.
  perf/data_wait_p50_seconds, perf/data_wait_p95_seconds: that the loop waited for a batch.
  perf/data_wait_share: of the time since the last row; waits may overlap with work of the device.
  perf/mfu: share of the peak that useful operations reach, counted in the documents of rows that preflight sampled.
  perf/goodput, perf/goodput_run: share of the wall time that trained, of this start and of all starts of the run.
  time/wall_seconds, and time/{training,data,startup,validation,saving,other}_seconds, which add up to it: this start.
  health/*, perf/health_seconds: of NSA's layers, in watch/health.py the worst layer or the mean; what a report takes.
  alarm/total: alarms so far. alarm/NAME: 1 where one was raised since the last row; watch/guards.py has the names.
  memory/*_mib, memory/*_gib: both units of each figure, since they have been mistaken for each other.
Bits per byte counts the text bytes of the targets, so that tokenizers can be compared; an end-of-document token has 0.
"""

from __future__ import annotations

import contextlib
import json
import math
import resource
import sys
import time
import unicodedata
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

import jax
import numpy as np

from nsa_jax.train.board import Board, scalar, text
from nsa_jax.train.env import json_line
from nsa_jax.train.terminal import Terminal, train_line
from nsa_jax.train.trackers import Trackers

TRAIN_NAMES = {
    "loss": "train/loss",
    "bits_per_byte": "train/bits_per_byte",
    "grad_norm": "norm/grad",
    "param_norm": "norm/param",
    "update_norm": "norm/update",
    "learning_rate": "learning_rate",
}


def perplexity(loss: float) -> float:
    """exp(loss), infinite where that overflows, nan of nan."""
    return math.inf if loss >= 700 else math.exp(loss)


def finite_mean(losses: list[float]) -> float:
    """The average of the losses that are finite; nan if none is."""
    finite = [loss for loss in losses if math.isfinite(loss)]
    return math.fsum(finite) / len(finite) if finite else math.nan


def printable(text: str) -> str:
    """Text with control characters written as escapes, so that a sample cannot garble a terminal."""
    return "".join(c if _is_shown(c) else c.encode("unicode_escape").decode() for c in text)


def _is_shown(c: str) -> bool:
    # To Python neither spaces of other widths are printable nor the joiners of Persian, Hindi and emoji.
    return c.isprintable() or c in "\n\t\u200c\u200d" or unicodedata.category(c) == "Zs"


def train_row(values: dict[str, float]) -> dict[str, float]:
    """Metrics of the train step under their logged names."""
    row = {logged: float(values[name]) for name, logged in TRAIN_NAMES.items()}
    added = {f"train/{name}": float(values[name]) for name in ("z_loss", "selection_loss") if name in values}
    return {**row, **added, "train/perplexity": perplexity(row["train/loss"])}


def validation_row(nats: float, tokens: float, text_bytes: float) -> dict[str, float]:
    """Metrics of a validation from its sums."""
    loss = nats / max(tokens, 1.0)
    return {
        "val/loss": loss,
        "val/perplexity": perplexity(loss),
        "val/bits_per_byte": nats / math.log(2) / max(text_bytes, 1.0),
    }


def mixed_validation_row(sums: Mapping[str, tuple[float, float, float]], shares: Mapping[str, float]) -> dict:
    """Metrics of a validation of several sources, and of each of them.

    Args:
      sums: nats, tokens and bytes of text of each source, by its name.
      shares: of each source in the loss of training, as which the total weighs it, however much was held out.
    """
    count = math.fsum(tokens for _, tokens, _ in sums.values())
    scales = {name: shares[name] * count / max(tokens, 1.0) for name, (_, tokens, _) in sums.items()}
    row = validation_row(*(math.fsum(sums[name][i] * scales[name] for name in sums) for i in range(3)))
    for name, values in sums.items():
        each = validation_row(*values)
        row |= {f"{metric}/{name}": each[metric] for metric in ("val/loss", "val/bits_per_byte")}
    return row


def epochs_row(epochs: Mapping[str, float]) -> dict[str, float]:
    """Passes over each source under their logged names."""
    return {f"data/epochs/{name}".rstrip("/"): value for name, value in epochs.items()}


def memory_row() -> dict[str, float]:
    """Memory of the fullest local device, where the backend reports it, and of this process."""
    unit = 1 if sys.platform == "darwin" else 1024
    figures: dict[str, float] = {"host_peak_rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit}
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    for name, key in (("device_in_use", "bytes_in_use"), ("device_peak", "peak_bytes_in_use")):
        if all(key in s for s in stats):
            figures[name] = max(s[key] for s in stats)
    row = {}
    for name, value in figures.items():
        row[f"memory/{name}_mib"] = value / 2**20
        row[f"memory/{name}_gib"] = value / 2**30
    return row


def wait_row(seconds: list[float]) -> dict[str, float]:
    """Percentiles of the time that the loop waited for batches."""
    p50, p95 = np.percentile(seconds, (50, 95)) if seconds else (0.0, 0.0)
    return {"perf/data_wait_p50_seconds": float(p50), "perf/data_wait_p95_seconds": float(p95)}


def _drop_rows_after(path: Path, step: float) -> None:
    """Removes rows of steps that will be run again, and a last line that was cut off."""
    kept = []
    for line in path.read_text(errors="replace").splitlines():
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line)
        except (ValueError, KeyError, TypeError):
            continue
    temporary = path.with_suffix(".tmp")
    temporary.write_text("".join(line + "\n" for line in kept))
    temporary.replace(path)


def last_rows(workdir: Path, step: int) -> tuple[dict[str, Any], tuple[int, dict[str, Any]] | None]:
    """What metrics.jsonl holds of the steps up to `step`.

    Returns:
      The last training row, and step and row of the last validation or None.
    """
    row: dict[str, Any] = {}
    validation = None
    path = workdir / "metrics.jsonl"
    for line in path.read_text(errors="replace").splitlines() if path.exists() else []:
        try:
            values = json.loads(line)
            at = values.pop("step")
        except (ValueError, KeyError, TypeError, AttributeError):  # cut off
            continue
        values.pop("time", None)
        values = {name: math.nan if value is None else value for name, value in values.items()}
        if at <= step and "train/loss" in values:
            row = values
        elif at <= step and "val/loss" in values:
            validation = (at, values)
    return row, validation


class MetricsWriter:
    """Writes rows to metrics.jsonl, TensorBoard and trackers, texts to samples.jsonl too, and tells the terminal.

    Args:
      workdir: the run's directory.
      start_step: rows of later steps that an interrupted run wrote are dropped.
      total_steps: of the run.
      active: False on all processes but the first: everything does nothing.
      stream: where lines go, if there is no `terminal` yet.
      trackers: get the numbers of every row, and the texts.
      terminal: where lines go.
    """

    def __init__(
        self,
        workdir: Path,
        *,
        start_step: int,
        total_steps: int,
        active: bool = True,
        stream: TextIO | None = None,
        trackers: Trackers | None = None,
        terminal: Terminal | None = None,
    ):
        self._active = active
        self._trackers = trackers or Trackers()
        self._terminal = terminal or Terminal(stream, active=active)
        self._terminal.steps(start_step, total_steps)
        self._total = total_steps
        if not active:
            return
        path = workdir / "metrics.jsonl"
        self._samples = workdir / "samples.jsonl"
        others = (workdir / f"{name}.jsonl" for name in ("health", "layers", "validation"))
        for kept in (path, self._samples, *others):
            if kept.exists():
                # A run that begins again validates at step 0 again.
                _drop_rows_after(kept, start_step or -1)
        if (alarms := workdir / "alarms.jsonl").exists():
            _drop_rows_after(alarms, math.inf)  # all stay, and the next does not continue a line that was cut off
        self._file = path.open("a")
        # Events of steps that are run again are purged, as the rows are.
        self._board = Board(workdir / "tensorboard", start_step + 1 if start_step else 0)

    def write(self, step: int, row: dict[str, Any]) -> None:
        """Appends one row; numbers also go to TensorBoard and the trackers."""
        if not self._active:
            return
        self._file.write(json_line({"step": step, **row, "time": round(time.time(), 3)}))
        self._file.flush()
        numbers = {name: value for name, value in row.items() if isinstance(value, (int, float))}
        self._board.add(step, (scalar(name, value) for name, value in numbers.items() if math.isfinite(value)))
        self._trackers.log(step, numbers)

    def text(self, step: int, name: str, content: str) -> None:
        """A text for samples.jsonl, TensorBoard, the trackers and the terminal."""
        if self._active:
            with self._samples.open("a") as file:
                file.write(
                    json.dumps({"step": step, "name": name, "text": content, "time": round(time.time(), 3)}) + "\n"
                )
            content = printable(content)
            self._board.add(step, [text(name, f"```\n{content}\n```")])
            self._trackers.text(step, name, content)
            self.say(f"step {step}: {name}\n{content}")

    def say(self, line: str) -> None:
        """One line for the terminal."""
        if self._active:
            self._terminal.say(line)

    def progress(self, step: int, row: dict[str, float]) -> None:
        """A line with a training row for the terminal."""
        self.say(train_line(step, self._total, row, self._terminal.width))

    def close(self) -> None:
        """Flushes and closes everything."""
        if not self._active:
            return
        self._active = False
        with contextlib.ExitStack() as stack:  # each is closed, whatever the others meet
            stack.callback(self._file.close)
            stack.callback(self._board.close)
            stack.callback(self._terminal.close)
