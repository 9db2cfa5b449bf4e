"""What long context is good for: long tasks by length and distance, and losses with the context cut short."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from nsa_jax.data import Tokenizer
from nsa_jax.data.long_tasks import TASKS, Row
from nsa_jax.evaluate.scoring import Scorer, position_bins, windows
from nsa_jax.inspect.probe import Probe, Scored, score_rows
from nsa_jax.ops import blocks

_WINDOWS = (8, 16, 32, 64)  # distances of the task recall


def _rows(name: str, length: int, tokenizer: Tokenizer, samples: int, seed: int, window: int) -> list[Row]:
    task, index = TASKS[name], list(TASKS).index(name)
    rng = np.random.default_rng([seed, length, index])
    room = length - task.least(tokenizer)
    distances = [m * window for m in _WINDOWS if m * window <= room] if task.together else []
    return [
        task.row(rng, length, tokenizer, distance=distances[i % len(distances)] if distances else None)
        for i in range(samples)
    ]


def _summary(scored: list[Scored]) -> dict[str, Any]:
    """Figures of a group of answers."""
    result = {
        "questions": len(scored),
        "exact_match": float(np.mean([s.right for s in scored])),
        "chance": float(np.mean([s.answer.chance for s in scored])),
    }
    if all(s.listed is not None for s in scored):
        listed = np.stack([s.listed for s in scored if s.listed is not None])  # [questions, layers, K]
        result |= {"selection_any": float(listed.any(axis=(1, 2)).mean()), "selection_mean": float(listed.mean())}
    return result


def task_grid(
    probe: Probe,
    tokenizer: Tokenizer,
    *,
    names: Sequence[str] = tuple(TASKS),
    lengths: Sequence[int],
    samples: int = 8,
    seed: int = 0,
    batch_size: int = 8,
    on_length: Callable[[list[dict[str, Any]]], None] | None = None,
) -> dict[str, list[dict[str, Any]]]:
    """Exact match of the tasks of `data.long_tasks`, from one forward pass over each row with its answers.

    An answer is right if every one of its tokens is the most likely one after those before it, which is what greedy
    decoding would write. Rows of the task recall have distances of 8, 16, 32 and 64 windows, as far as they fit.

    Args:
      probe: of the model.
      tokenizer: the model's.
      names: of tasks; a task whose statements may not fit into a length is left out there.
      lengths: tokens of rows.
      samples: rows of each task and length, each with several questions.
      seed: of the rows.
      batch_size: rows at once.
      on_length: called with the cells of each length.

    Returns:
      cells: a row per task and length, of questions that were not answered before in their row (keypad asks again what
      it asked): questions, exact_match, chance, and with selection selection_any and selection_mean (shares of
      questions, and of heads and layers, whose lists hold the block of the answer's first token in its statement) and
      selection_chance. distances: the same figures of all questions, by task and by tokens from the source (a statement
      or an earlier answer) to the answer, in ranges that double.
    """
    cells, everything = [], []
    select_block, n = probe.config.nsa.select_block, probe.config.nsa.num_selected
    for length in lengths:
        fitting = [name for name in names if TASKS[name].least(tokenizer) <= length]
        settings = (length, tokenizer, samples, seed, probe.config.nsa.window)
        rows = [(name, row) for name in fitting for row in _rows(name, *settings)]
        scored = score_rows(probe, rows, batch_size) if rows else []
        everything += scored
        stated = list(itertools.compress(scored, itertools.chain(*(row.asked_first for _, row in rows))))
        here = []
        for name in fitting:
            cell = {"task": name, "length": length, **_summary([s for s in stated if s.task == name])}
            if "selection_any" in cell:
                cell["selection_chance"] = min(1.0, n / blocks.num_selection_blocks(length, select_block))
            here.append(cell)
        cells += here
        if on_length:
            on_length(here)
    distances = []
    for name in names:
        of_task = [s for s in everything if s.task == name]
        for octave in sorted({s.answer.distance.bit_length() for s in of_task}):
            part = [s for s in of_task if s.answer.distance.bit_length() == octave]
            distances.append({"task": name, "from": 1 << (octave - 1), "to": 1 << octave, **_summary(part)})
    return {"cells": cells, "distances": distances}


def context_losses(scorer: Scorer, rows: np.ndarray, context: int, stride: int, *, batch_size: int) -> np.ndarray:
    """Losses of rows with the context cut: a model sees the last tokens before each target as if a text began there.

    A window of attention is something else: it hands information on from layer to layer beyond its reach.

    Args:
      scorer: of the model.
      rows: int [R, T + 1].
      context: w. Targets after the first w have at least w - stride tokens before them and at most w.
      stride: how far the pieces of w tokens advance: a smaller one is more exact, and costs w / stride passes.
      batch_size: pieces at once.

    Returns:
      nats float32 [R, T]; with w >= T those of whole rows.
    """
    rows = np.asarray(rows, np.int32)
    length = rows.shape[1] - 1
    context = min(context, length)
    jobs = [(r, *window) for r in range(len(rows)) for window in windows(length, context, stride)]
    nats = np.zeros((len(rows), length), np.float32)
    for at in range(0, len(jobs), batch_size):
        part = jobs[at : at + batch_size]
        inputs, targets = np.zeros((2, batch_size, context), np.int32)
        for i, (r, first, end, _) in enumerate(part):
            inputs[i, : end - first], targets[i, : end - first] = rows[r, first:end], rows[r, first + 1 : end + 1]
        losses = scorer(inputs, targets)
        for i, (r, first, end, counted) in enumerate(part):
            nats[r, counted:end] = losses[i, counted - first : end - first]
    return nats


def context_table(whole: np.ndarray, cut: dict[int, np.ndarray]) -> list[dict[str, Any]]:
    """By ranges of positions that double, what the tokens further away than each cut are worth.

    Args:
      whole: nats [R, T] of whole rows.
      cut: nats [R, T] by the context that was left.

    Returns:
      Rows of from, to, loss (nats per token of whole rows), and beyond_W: how much higher the loss is without what lies
      further away than W tokens, for ranges of which all positions have more than W tokens before them.
    """
    counts = np.full(whole.shape[1], len(whole))
    rows = []
    for row in position_bins(whole.sum(0, dtype=np.float64), counts):
        part = slice(int(row["from"]), int(row["to"]))
        gains = {
            f"beyond_{context}": float((nats[:, part] - whole[:, part]).mean(dtype=np.float64))
            if row["from"] >= context
            else None
            for context, nats in sorted(cut.items())
        }
        rows.append({"from": row["from"], "to": row["to"], "loss": row["loss"], **gains})
    return rows


def plot_tasks(runs: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """Exact match of each task over the length, a line per run, with chance as a dotted line.

    Args:
      runs: the cells of `task_grid` by the run's name.
      path: of the picture.
    """
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(cell["task"] for cells in runs.values() for cell in cells))
    columns = min(len(names), 5)
    figure = Figure(figsize=(2.6 * columns + 1.5, 2.4 * -(-len(names) // columns)), layout="constrained")
    grid = figure.subplots(-(-len(names) // columns), columns, squeeze=False, sharex=True, sharey=True).ravel()
    for axis, name in zip(grid, names, strict=False):
        for run, cells in runs.items():
            part = [cell for cell in cells if cell["task"] == name]
            lengths = [cell["length"] for cell in part]
            axis.plot(lengths, [cell["exact_match"] for cell in part], "o-", markersize=4, label=run)
            axis.plot(lengths, [cell["chance"] for cell in part], ":", color="tab:grey")
        axis.set(title=name, ylim=(-0.05, 1.05))
        axis.set_xscale("log", base=2)
        axis.grid(alpha=0.3)
    figure.supxlabel("tokens of the row")
    figure.supylabel("exact match (dotted: chance)")
    figure.legend(*grid[0].get_legend_handles_labels(), loc="outside right upper")
    figure.savefig(path, dpi=130)


def plot_context(rows: list[dict[str, Any]], title: str, path: Path) -> None:
    """What far tokens are worth over the position, a line per cut."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axis = figure.subplots()
    for name in rows[-1]:
        if name.startswith("beyond_"):
            part = [row for row in rows if row[name] is not None]
            if part:
                label = f"further than {int(name[7:]):,} tokens"
                axis.plot([row["to"] for row in part], [row[name] for row in part], "o-", label=label)
    axis.axhline(0, color="tab:grey", linewidth=0.8)
    axis.set_xscale("log", base=2)
    axis.set(xlabel="position in the row, up to", ylabel="nats per token lost without it", title=title)
    axis.grid(alpha=0.3)
    axis.legend()
    figure.savefig(path, dpi=130)
