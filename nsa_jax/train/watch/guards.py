"""Guards: what stops a run that is being wasted, and what raises an alarm.

A guard that stops raises `TrainingError`, whose message names the step, the guard, the likely causes and what to do. An
alarm is one line in the terminal and in alarms.jsonl, counts in the metrics (`alarm/<name>`) and ends up in
summary.json; the same alarm is repeated at most every `_REPEAT` reports.

  stop   non_finite, divergence, loss_floor, generalisation_gap, frozen_loader, recompilation, early stopping,
         key_count, implementation, disk_full, checkpoint_write
  alarm  spike, plateau, throughput, data_wait, memory_slope, gate_entropy, gate_share, gate_collapse
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import json
import logging
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from nsa_jax.data import Pipeline
from nsa_jax.train.errors import TrainingError
from nsa_jax.train.watch.memory_use import memory_points

logger = logging.getLogger("nsa_jax")

_REPEAT = 20  # reports between repetitions of an alarm
_IN_A_ROW = 3  # intervals that must be slow
_SLOW_FOR = 3.0  # seconds that they must last: a toy's intervals are shorter than a hiccup of the machine
_SHORT_WAIT = 0.005  # seconds; only toys' steps are so short that waiting this long for a batch matters
_RECENT = 256  # batches that a new one is compared with
_MEMORY_POINTS = 12  # reports that a slope needs
_OWN = ("data_wait", "memory_slope")  # alarms about one process; all others are the same on every process
_REMEMBERED = (  # attributes that a checkpoint keeps
    *("_average", "_previous", "_jitter", "_seen", "_best_average", "_best_step"),
    *("_best_validation", "_without_improvement", "_reports"),
)


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
        self._config, self._guards = config, config.guards
        self._workdir = workdir if active else None
        self._active = active
        self._floor = bigram_entropy
        self._say = say or (lambda line: logger.warning("%s", line))
        self.alarms: list[Alarm] = []
        self._before: collections.Counter[str] = collections.Counter()  # alarms before the run was interrupted
        self._fresh: list[str] = []  # alarms since the last report
        self._reports = 0
        self._told: dict[str, int] = {}
        self._recent: collections.OrderedDict[str, int] = collections.OrderedDict()
        self._average: float | None = None  # of the loss, over about 50 steps
        self._previous = 0.0
        self._jitter = 0.0  # average difference between the losses of neighbouring steps
        self._seen = 0
        self._best_average = math.inf
        self._best_step = 0
        self._speeds: collections.deque[float] = collections.deque(maxlen=101)
        self._slow = self._waiting = 0
        self._slow_seconds = 0.0
        self._memory: dict[str, collections.deque] = collections.defaultdict(lambda: collections.deque(maxlen=200))
        self._programs: int | None = None
        self._best_validation = math.inf
        self._without_improvement = 0

    # What the loop calls.

    def tell(self, say: Callable[[str], None]) -> None:
        """From now on alarms are told to `say`."""
        self._say = say

    def on_batch(self, step: int, batch: dict[str, np.ndarray]) -> None:
        """A batch that step `step` is about to be trained on.

        Raises:
          TrainingError: it is one of the last batches again.
        """
        tokens = batch["inputs"]
        stride = max(tokens.size // (1 << 17), 1)  # a part of a large batch tells it apart as well
        sampled = np.ascontiguousarray(tokens.reshape(-1)[::stride])
        # 64 bits: 32 would call different batches equal in one of six long runs of many processes.
        key = hashlib.blake2b(sampled.tobytes(), digest_size=8).hexdigest()
        if key in self._recent:
            raise TrainingError(
                f"step {step}, guard frozen_loader: the batch equals that of step {self._recent[key]}. The loader "
                "stands still or the corpus is a few rows long; look at config.data and at what the loader yields",
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
        for step, row in enumerate(rows, first_step):
            if not (math.isfinite(row["loss"]) and math.isfinite(row["grad_norm"])):
                raise TrainingError(
                    f"step {step}: loss {row['loss']}, gradient norm {row['grad_norm']}, "
                    f"learning rate {row['learning_rate']:.3g}: not finite. Lower "
                    "config.optim.learning_rate or set config.optim.clip, and start again",
                    guard="non_finite",
                    step=step,
                )
            self._check_floor(step, row["loss"])
            self._check_spike(step, row["loss"])
            limit = self._guards.divergence
            if limit and self._seen > 50 and self._average is not None and self._average - self._best_average > limit:
                raise self._divergence(step, f"limit config.guards.divergence={limit}")

    def on_report(
        self,
        step: int,
        *,
        tokens_per_second: float,
        seconds: float,
        waits: list[float],
        programs: int | None = None,
        memory: dict[str, tuple[int, int]] | None = None,
    ) -> dict[str, float]:
        """The end of a log interval.

        Args:
          step: last step of the interval.
          tokens_per_second: over the interval.
          seconds: of the interval.
          waits: seconds that the loop waited for each batch.
          programs: compiled versions of the train step so far.
          memory: (in use, limit) by name; None: measured now.

        Returns:
          Metrics to log beside the others.

        Raises:
          TrainingError: the train step was compiled again.
        """
        self._reports += 1
        self._check_programs(step, programs)
        self._check_speed(step, tokens_per_second, seconds)
        share = sum(waits) / max(seconds, 1e-9)
        waits_long = sum(waits) > _SHORT_WAIT * max(len(waits), 1)
        self._waiting = self._waiting + 1 if share > 0.2 and waits_long else 0
        if self._waiting >= _IN_A_ROW:
            message = f"{share:.0%} of the time is spent waiting for data; more config.data.num_workers, a faster disk"
            self.alarm("data_wait", step, message)
        self._check_plateau(step)
        for name, (used, limit) in (memory_points() if memory is None else memory).items():
            self._check_memory(step, name, used, limit)
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
        if not math.isfinite(val_loss):
            message = f"step {step}: validation loss {val_loss}: not finite. Lower config.optim.learning_rate"
            raise TrainingError(message, guard="non_finite", step=step)
        if self._average is not None:  # whichever is higher: validation is no worse than a spike that it falls into
            train_loss = max(self._average, self._previous)
        limit = self._guards.max_gap
        if limit and step and train_loss is not None and val_loss - train_loss > limit:
            if train_loss - self._best_average > limit / 2:  # who memorises has a training loss that falls
                raise self._divergence(step, f"validation loss {val_loss:.3f}")
            raise TrainingError(
                f"step {step}, guard generalisation_gap: validation loss {val_loss:.3f} is {val_loss - train_loss:.2f} "
                f"nats above training loss {train_loss:.3f} (limit config.guards.max_gap={limit}). Likely causes: the "
                "model memorises a small or repeated corpus; training labels leak into its inputs; validation is of "
                "another kind of text",
                guard="generalisation_gap",
                step=step,
                save=True,
            )
        if val_loss < self._best_validation - self._guards.early_stop_delta:
            self._best_validation, self._without_improvement = val_loss, 0
            return None
        self._without_improvement += 1
        return self.early_stop()

    def early_stop(self) -> str | None:
        """Why the run should stop early, by the validations so far, or None."""
        patience = self._guards.early_stop
        if patience and self._without_improvement >= patience:
            return f"early stopping: {patience} validations without improvement on {self._best_validation:.4f}"
        return None

    # What a checkpoint keeps, so that a resumed run raises the same alarms at the same steps.

    def state(self) -> dict[str, Any]:
        """What the guards remember of the steps so far, as JSON values.

        What was measured in seconds or bytes is left out: the run may continue on other devices.
        """
        return {
            "values": {name: value for name in _REMEMBERED if _is_finite(value := getattr(self, name))},
            "told": dict(self._told),
            "recent": dict(self._recent),
            "alarms": self.summary(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continues with what `state` of the interrupted run returned."""
        for name, value in state.get("values", {}).items():
            if name in _REMEMBERED:
                setattr(self, name, value)
        self._told = dict(state.get("told", {}))
        recent = sorted(state.get("recent", {}).items(), key=lambda entry: entry[1])
        self._recent = collections.OrderedDict(recent)
        self._before = collections.Counter(state.get("alarms", {}))

    def alarm(self, name: str, step: int, message: str) -> None:
        """Raises an alarm, unless the same one was told a moment ago."""
        last = self._told.get(name)
        if last is not None and self._reports - last < _REPEAT:
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

    # How it is decided.

    def _check_floor(self, step: int, loss: float) -> None:
        g, floor = self._guards, self._floor
        if floor is None or floor < 0.5:  # text that nearly predicts itself has no floor to speak of
            return
        early = step <= g.floor_steps and loss < g.floor_ratio * floor
        if early or loss < g.late_floor_ratio * floor:
            ratio = g.floor_ratio if early else g.late_floor_ratio
            raise TrainingError(
                f"step {step}, guard loss_floor: training loss {loss:.4f} is under {ratio:g} x {floor:.3f}, the "
                "entropy of a token given the one before it, which no honest model reaches so early. Likely causes: "
                "labels are not shifted; attention sees the token it predicts; the corpus is a few repeated rows "
                "(config.guards.floor_ratio, floor_steps, late_floor_ratio)",
                guard="loss_floor",
                step=step,
                save=True,
            )

    def _check_spike(self, step: int, loss: float) -> None:
        limit = self._guards.spike
        if self._average is None:
            self._average = self._previous = loss
        over = loss - self._average
        if limit and self._seen > 50 and over > max(limit, 6 * self._jitter):
            message = f"loss {loss:.3f} after an average of {self._average:.3f}; if it stays, resume from a checkpoint"
            self.alarm("spike", step, f"{message} with a lower config.optim.learning_rate")
        self._seen += 1
        rate = max(1 / self._seen, 0.02)
        self._average += rate * over
        self._jitter += rate * (abs(loss - self._previous) - self._jitter)
        self._previous = loss
        if self._average < self._best_average - 1e-3:
            self._best_average, self._best_step = self._average, step

    def _divergence(self, step: int, noticed: str) -> TrainingError:
        return TrainingError(
            f"step {step}, guard divergence: the training loss has risen to {self._previous:.3f}, on "
            f"average {self._average:.3f}, after {self._best_average:.3f} at step {self._best_step} ({noticed}). "
            f"Likely causes: the learning rate is too high (config.optim.learning_rate="
            f"{self._config.optim.learning_rate:g}), the warm-up too short, gradients are not clipped. Lower "
            "config.optim.learning_rate, and resume from a checkpoint of before the rise or start anew",
            guard="divergence",
            step=step,
        )

    def _check_plateau(self, step: int) -> None:
        patience = self._guards.plateau_steps
        if patience and step - self._best_step >= patience and self._seen >= patience:
            message = (
                f"the average loss {self._average:.4f} has not fallen since step {self._best_step}, when it was "
                f"{self._best_average:.4f}; learning rate, data or capacity limit it"
            )
            self.alarm("plateau", step, message)

    def _check_speed(self, step: int, tokens_per_second: float, seconds: float) -> None:
        usual = statistics.median(self._speeds) if len(self._speeds) >= _IN_A_ROW else None
        slow = usual is not None and tokens_per_second < usual / 2
        self._slow = self._slow + 1 if slow else 0
        self._slow_seconds = self._slow_seconds + seconds if slow else 0.0
        if self._slow >= _IN_A_ROW and self._slow_seconds >= _SLOW_FOR:
            message = (
                f"{tokens_per_second:,.0f} tokens/s, {_IN_A_ROW} intervals in a row under half the usual {usual:,.0f}"
            )
            self.alarm("throughput", step, f"{message}; look for another process, throttling, or slow data")
        self._speeds.append(tokens_per_second)

    def _check_programs(self, step: int, programs: int | None) -> None:
        if programs is None or step < 2:
            return
        if self._programs is None:
            self._programs = programs
        elif programs > self._programs:
            raise TrainingError(
                f"step {step}, guard recompilation: the train step was compiled again after step 2 ({programs} "
                "versions). A shape, dtype or sharding of the batch changes between steps; each costs a compilation",
                guard="recompilation",
                step=step,
                save=True,
            )

    def _check_memory(self, step: int, name: str, used: int, limit: int) -> None:
        points = self._memory[name]
        points.append((step, used))
        if len(points) < _MEMORY_POINTS + 3 or not limit:
            return
        steps, values = np.array(list(points)[3:], float).T  # the first reports are of the warm-up
        if steps[-1] == steps[0] or values.std() == 0:
            return
        slope = np.polyfit(steps, values, 1)[0]
        growth = slope * (steps[-1] - steps[0])
        steady = np.corrcoef(steps, values)[0, 1] > 0.9
        end = used + slope * (self._config.train.steps - step)
        if steady and growth > 0.02 * limit and end > limit:
            message = (
                f"{name} memory grows by {slope * 1000 / 2**20:,.0f} MiB per 1,000 steps, is {used / 2**30:.2f} GiB "
                f"and will pass {limit / 2**30:.2f} GiB before the run ends: something is kept that should not be"
            )
            self.alarm("memory_slope", step, message)


def _is_finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def programs(step: Callable) -> int | None:
    """How many versions of a jitted function have been compiled; None if it does not tell."""
    count = getattr(step, "_cache_size", None)
    return None if count is None else count()


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


def dump(workdir: Path, step: int, pipeline: Pipeline, rows: list[dict[str, float]]) -> Path:
    """Writes the batch and the metrics of a step that went wrong, for looking at later.

    The batch is made again from its step number, except from a stream, which would have to be read again.
    """
    arrays = {f"metrics/{name}": np.array([row[name] for row in rows]) for name in rows[0]}
    if not pipeline.streamed:
        again = pipeline.train(step - 1)
        arrays.update({f"batch/{name}": np.asarray(value) for name, value in next(again).items()})
        again.close()
    path = workdir / f"bad_step_{step}.npz"
    np.savez_compressed(path, **arrays)  # type: ignore[arg-type]
    return path
