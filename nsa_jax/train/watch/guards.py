"""Guards: what stops a run that is being wasted, and what raises an alarm.

A guard that stops raises `TrainingError`, whose message names the step, the guard, the likely causes and what to do. An
alarm is one line in the terminal and in alarms.jsonl, counts in the metrics (`alarm/<name>`) and ends up in
summary.json; the same alarm is repeated at most every `_REPEAT` reports. What is decided by the loss is in loss.py, by
speed and memory in machine.py.

  stop   non_finite, divergence, spike (of which too many in a row were left out), loss_floor, generalisation_gap,
         frozen_loader, recompilation, early stopping, key_count, implementation, disk_full, checkpoint_write, upload,
         callback, peer
  alarm  spike, spike_skipped, skipped, plateau, throughput, data_wait, memory_slope, gate_entropy, gate_share,
         gate_collapse, selection
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import json
import logging
import math
import time
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from nsa_jax.data import Pipeline
from nsa_jax.train.batches import joined
from nsa_jax.train.errors import TrainingError
from nsa_jax.train.watch.loss import REMEMBERED, LossGuards
from nsa_jax.train.watch.machine import MachineGuards
from nsa_jax.train.watch.memory_use import memory_points

logger = logging.getLogger("nsa_jax")

SELECTION_REPORTS = 5  # over which selection is judged: each looks at a few queries of a single row
_REPEAT = 20  # reports between repetitions of an alarm
_RECENT = 256  # batches that a new one is compared with
_OWN = ("data_wait", "memory_slope")  # alarms about one process; all others are the same on every process


@dataclasses.dataclass(frozen=True)
class Alarm:
    """Something is wrong that does not have to end the run."""

    name: str
    step: int
    message: str


class Guards:
    """All guards of one run; the loop tells them what happens.

    Args:
      config: the training config.
      workdir: alarms and dumps are written there; None: nothing is written.
      bigram_entropy: nats per token of the training data, from preflight; None turns the loss floor off.
      say: where alarms are told, such as `MetricsWriter.say`.
      active: False on all processes but the first: stops still happen, nothing is written, and only alarms about this
        process are told.
    """

    def __init__(
        self,
        config: ConfigDict,
        workdir: Path | None = None,
        *,
        bigram_entropy: float | None = None,
        say: Callable[[str], None] | None = None,
        active: bool = True,
    ):
        self._workdir = workdir if active else None
        self._active = active
        self._say = say or (lambda line: logger.warning("%s", line))
        self.alarms: list[Alarm] = []
        self._before: collections.Counter[str] = collections.Counter()  # alarms before the run was interrupted
        self._fresh: list[str] = []  # alarms since the last report
        self._reports = 0
        self._told: dict[str, int] = {}
        self.selection: collections.deque[list[float]] = collections.deque(maxlen=SELECTION_REPORTS)  # see health.py
        self._recent: collections.OrderedDict[str, int] = collections.OrderedDict()  # steps of batches of this pass
        self._passes: dict[str, int] = {}
        self._in_a_row = ("", 0)  # the last batch, and how often it has come
        self._loss = LossGuards(config, bigram_entropy, self.alarm)
        self._machine = MachineGuards(config.train.steps, self.alarm)

    # What the loop calls.

    def tell(self, say: Callable[[str], None]) -> None:
        """From now on alarms are told to `say`."""
        self._say = say

    def begin_trained(self) -> None:
        """The run begins with a stage's or an exported model's weights."""
        self._loss.trained = 1

    def on_batch(
        self, step: int, batch: dict[str, np.ndarray], passes: Mapping[str, int] = types.MappingProxyType({})
    ) -> None:
        """A batch that step `step` is about to be trained on.

        Args:
          step: counts from 1.
          batch: of this process.
          passes: how often each source has been passed. A batch may come again in another pass, but not three
            times in a row.

        Raises:
          TrainingError: it is one of the last batches again.
        """
        tokens = batch["inputs"]
        stride = max(tokens.size // (1 << 17), 1)  # a part of a large batch tells it apart as well
        sampled = np.ascontiguousarray(tokens.reshape(-1)[::stride])
        # 64 bits: 32 would call different batches equal in one of six long runs of many processes.
        key = hashlib.blake2b(sampled.tobytes(), digest_size=8).hexdigest()
        if dict(passes) != self._passes:
            self._recent.clear()
        self._passes = dict(passes)
        self._in_a_row = (key, self._in_a_row[1] + 1) if key == self._in_a_row[0] else (key, 1)
        if key in self._recent or self._in_a_row[1] > 2:
            raise TrainingError(
                f"step {step}, guard frozen_loader: the batch equals that of step {self._recent.get(key, step - 1)}. "
                "The loader stands still or the corpus is a few rows long; look at config.data and at what the loader "
                "yields",
                guard="frozen_loader",
                step=step,
            )
        self._recent[key] = step
        if len(self._recent) > _RECENT:
            self._recent.popitem(last=False)

    def on_steps(self, first_step: int, rows: list[dict[str, float]]) -> None:
        """Metrics of consecutive steps, as the train step returns them.

        Raises:
          TrainingError: loss or gradient is not finite, or the loss has risen for long or is too good to be true.
        """
        self._loss.on_steps(first_step, rows)

    def on_report(
        self,
        step: int,
        *,
        tokens_per_second: float | None,
        seconds: float,
        waits: list[float],
        idle: float,
        programs: int | None = None,
        memory: dict[str, tuple[int, int]] | None = None,
    ) -> dict[str, float]:
        """The end of a log interval.

        Args:
          step: last step of the interval.
          tokens_per_second: over the interval; None: no step of it was timed.
          seconds: of the interval.
          waits: seconds that the loop waited for each batch.
          idle: seconds of these waits for which the device had nothing to do.
          programs: compiled versions of the train step so far.
          memory: (in use, limit) by name; None: measured now.

        Returns:
          Metrics to log beside the others.

        Raises:
          TrainingError: the train step was compiled again.
        """
        self._reports += 1
        self._machine.check_programs(step, programs)
        if tokens_per_second is not None:
            self._machine.check_speed(step, tokens_per_second, seconds)
        self._machine.check_waits(step, seconds, len(waits), idle)
        self._loss.check_plateau(step)
        for name, (used, limit) in (memory_points() if memory is None else memory).items():
            self._machine.check_memory(step, name, used, limit)
        share = sum(waits) / max(seconds, 1e-9)
        row = {"perf/data_wait_share": share, "alarm/total": float(sum(self.summary().values()))}
        row.update({f"alarm/{name}": 1.0 for name in self._fresh})
        self._fresh = []
        return row

    def on_validation(self, step: int, val_loss: float, train_loss: float | None) -> str | None:
        """A validation.

        Args:
          step: at which it was made.
          val_loss: nats per token.
          train_loss: recent training loss; None if there is none yet (the moving average is used if there is one).

        Returns:
          Why the run should stop early, or None.

        Raises:
          TrainingError: validation loss is beyond training loss by more than the limit, the training loss has risen,
            or validation loss is not finite.
        """
        return self._loss.on_validation(step, val_loss, train_loss)

    def early_stop(self) -> str | None:
        """Why the run should stop early, by the validations so far, or None."""
        return self._loss.early_stop()

    # What a checkpoint keeps, so that a resumed run raises the same alarms at the same steps.

    def state(self) -> dict[str, Any]:
        """What the guards remember of the steps so far, as JSON values.

        What was measured in seconds or bytes is left out: the run may continue on other devices.
        """
        values = {name: value for name in REMEMBERED if _is_finite(value := getattr(self._loss, name))}
        return {
            "values": {**values, "_reports": self._reports},
            "told": dict(self._told),
            "recent": dict(self._recent),
            "passes": self._passes,
            "selection": list(self.selection),
            "alarms": self.summary(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continues with what `state` of the interrupted run returned."""
        values = state.get("values", {})
        for name in REMEMBERED:
            setattr(self._loss, name, values.get(name, getattr(self._loss, name)))
        self._reports = values.get("_reports", 0)
        self._told = dict(state.get("told", {}))
        recent = sorted(state.get("recent", {}).items(), key=lambda entry: entry[1])
        self._recent = collections.OrderedDict(recent)
        self._passes = dict(state.get("passes", {}))
        self._before = collections.Counter(state.get("alarms", {}))
        self.selection.extend(state.get("selection", []))

    def alarm(self, name: str, step: int, message: str, *, repeat: bool = False) -> None:
        """Raises an alarm, unless the same one was told a moment ago and `repeat` is False."""
        last = self._told.get(name)
        if last is not None and self._reports - last < _REPEAT and not repeat:
            return
        self._told[name] = self._reports
        self.alarms.append(Alarm(name, step, message))
        self._fresh.append(name)
        if self._active or name in _OWN:
            self._say(f"ALARM {name} at step {step}: {message}")
        if self._workdir is not None:
            with (self._workdir / "alarms.jsonl").open("a") as file:
                row = {"step": step, "alarm": name, "message": message, "time": round(time.time(), 3)}
                file.write(json.dumps(row) + "\n")

    def summary(self) -> dict[str, int]:
        """How often each alarm was raised, before the run was interrupted too."""
        return dict(self._before + collections.Counter(alarm.name for alarm in self.alarms))


def _is_finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def programs(step: Callable, sizes: int = 1) -> int | None:
    """How many versions of a jitted function were compiled per size of batch; None if it does not tell.

    Args:
      step: the function.
      sizes: of batches that it was called with; all but the first need one version.
    """
    count = getattr(step, "_cache_size", None)
    return None if count is None else count() - sizes + 1


def check_implementations(asked: str, served: dict[str, str]) -> None:
    """Stops the run if an op was served by another implementation than the config names.

    Raises:
      TrainingError: which op, by what.
    """
    wrong = {op: by for op, by in served.items() if asked != "auto" and by != asked}
    if wrong:
        found = ", ".join(f"{op} by {by!r}" for op, by in sorted(wrong.items()))
        raise TrainingError(
            f"guard implementation: config.model.implementation={asked!r}, but {found} was used", guard="implementation"
        )


def dump(
    workdir: Path, step: int, pipeline: Pipeline, rows: list[dict[str, float]], position: int, pieces: int = 1
) -> Path:
    """Writes the batch and the metrics of a step that went wrong, for looking at later.

    The batch is made again from its position in the data, except from a stream, which would have to be read again.
    """
    arrays = {f"metrics/{name}": np.array([row[name] for row in rows]) for name in rows[0]}
    if not pipeline.streamed:
        again = pipeline.train(position)
        batch = joined([next(again) for _ in range(pieces)])
        arrays.update({f"batch/{name}": np.asarray(value) for name, value in batch.items()})
        again.close()
    path = workdir / f"bad_step_{step}.npz"
    np.savez_compressed(path, **arrays)  # type: ignore[arg-type]
    return path
