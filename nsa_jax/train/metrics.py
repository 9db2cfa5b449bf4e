"""Metrics: their names, where they are written, and the measurements that are not part of the compiled step.

Names (every row also has `step`, the number of finished optimizer steps):
  train/loss, train/perplexity, train/bits_per_byte: of the batch of that step, nats per token.
  val/loss, val/perplexity, val/bits_per_byte: over the fixed validation batches.
  norm/grad (before clipping), norm/param, norm/update, learning_rate.
  perf/tokens_per_second, perf/step_seconds, perf/data_wait_p50_seconds, perf/data_wait_p95_seconds, perf/mfu.
  memory/*_mib, memory/*_gib: both units of each figure, since they have been mistaken for each other.
Bits per byte counts the text bytes of the targets, so that tokenizers can be compared; an end-of-document token has 0.
"""

from __future__ import annotations

import json
import math
import resource
import sys
import time
from pathlib import Path
from typing import Any, TextIO

import jax
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from tensorboardX import SummaryWriter

TRAIN_NAMES = {
    "loss": "train/loss",
    "bits_per_byte": "train/bits_per_byte",
    "grad_norm": "norm/grad",
    "param_norm": "norm/param",
    "update_norm": "norm/update",
    "learning_rate": "learning_rate",
}


def perplexity(loss: float) -> float:
    """exp(loss), infinite where that overflows."""
    return math.exp(loss) if loss < 700 else math.inf


def printable(text: str) -> str:
    """Text with control characters written as escapes, so that a sample cannot garble a terminal."""
    return "".join(c if c in "\n\t" or c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def train_row(values: dict[str, float]) -> dict[str, float]:
    """Metrics of the train step under their logged names."""
    row = {logged: float(values[name]) for name, logged in TRAIN_NAMES.items()}
    return {**row, "train/perplexity": perplexity(row["train/loss"])}


def validation_row(nats: float, tokens: float, text_bytes: float) -> dict[str, float]:
    """Metrics of a validation from its sums."""
    loss = nats / max(tokens, 1.0)
    return {
        "val/loss": loss,
        "val/perplexity": perplexity(loss),
        "val/bits_per_byte": nats / math.log(2) / max(text_bytes, 1.0),
    }


def memory_row() -> dict[str, float]:
    """Memory of the fullest local device, where the backend reports it, and of this process."""
    figures: dict[str, float] = {"host_peak_rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
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


def _drop_rows_after(path: Path, step: int) -> None:
    """Removes rows of steps that will be run again, and a last line that was cut off."""
    kept = []
    for line in path.read_text().splitlines():
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line)
        except (ValueError, KeyError):
            continue
    temporary = path.with_suffix(".tmp")
    temporary.write_text("".join(line + "\n" for line in kept))
    temporary.replace(path)


class MetricsWriter:
    """Writes rows to metrics.jsonl and TensorBoard, texts to samples.jsonl, and tells the terminal.

    Args:
      workdir: the run's directory.
      start_step: rows of later steps that an interrupted run wrote are dropped.
      total_steps: for the progress bar.
      active: False on all processes but the first: everything does nothing.
      stream: where lines go; a progress bar is drawn if it is a terminal.
    """

    def __init__(
        self, workdir: Path, *, start_step: int, total_steps: int, active: bool = True, stream: TextIO | None = None
    ):
        self._active = active
        self._progress: Progress | None = None
        self._total = total_steps
        if not active:
            return
        path = workdir / "metrics.jsonl"
        self._samples = workdir / "samples.jsonl"
        for kept in (path, self._samples, workdir / "health.jsonl"):
            if kept.exists():
                _drop_rows_after(kept, start_step)
        self._file = path.open("a")
        # Events of steps that are run again are purged, as the rows are.
        purge = start_step + 1 if start_step else None
        self._board = SummaryWriter(str(workdir / "tensorboard"), purge_step=purge)
        self._stream = stream or sys.stdout
        if self._stream.isatty():
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self._progress = Progress(*columns, console=Console(file=self._stream))
            self._task = self._progress.add_task("training", total=total_steps, completed=start_step)
            self._progress.start()

    def write(self, step: int, row: dict[str, Any]) -> None:
        """Appends one row; numbers also go to TensorBoard."""
        if not self._active:
            return
        self._file.write(json.dumps({"step": step, **row, "time": round(time.time(), 3)}) + "\n")
        self._file.flush()
        for name, value in row.items():
            if isinstance(value, (int, float)):
                self._board.add_scalar(name, value, step)

    def text(self, step: int, name: str, text: str) -> None:
        """A text for samples.jsonl, TensorBoard and the terminal."""
        if self._active:
            with self._samples.open("a") as file:
                file.write(json.dumps({"step": step, "name": name, "text": text, "time": round(time.time(), 3)}) + "\n")
            text = printable(text)
            self._board.add_text(name, f"```\n{text}\n```", step)
            self.say(f"step {step}: {name}\n{text}")

    def say(self, line: str) -> None:
        """One line for the terminal."""
        if not self._active:
            return
        if self._progress is not None:
            self._progress.console.print(line, markup=False, highlight=False)
        else:
            print(line, file=self._stream, flush=True)

    def progress(self, step: int, row: dict[str, float]) -> None:
        """Shows a training row: in the progress bar's text, or as a line."""
        if not self._active:
            return
        line = (
            f"loss {row['train/loss']:.4f}  bits/byte {row['train/bits_per_byte']:.3f}  grad {row['norm/grad']:.3f}  "
            f"lr {row['learning_rate']:.2e}  {row.get('perf/tokens_per_second', 0):,.0f} tokens/s"
        )
        if self._progress is not None:
            self._progress.update(self._task, completed=step, description=line)
        else:
            self.say(f"step {step}/{self._total}  {line}")

    def close(self) -> None:
        """Flushes and closes everything."""
        if not self._active:
            return
        if self._progress is not None:
            self._progress.stop()
        self._board.close()
        self._file.close()
        self._active = False
