"""Guards over the loss: not finite, too good to be true, rising, standing still, apart from validation."""

from __future__ import annotations

import math
from collections.abc import Callable

from ml_collections import ConfigDict

from nsa_jax.train.errors import TrainingError

REMEMBERED = (  # attributes that a checkpoint keeps
    *("_average", "_previous", "_jitter", "_seen", "_best_average", "_best_step"),
    *("_best_validation", "_without_improvement", "_skipped", "_spikes", "trained"),
)


class LossGuards:
    """What the losses of a run say.

    Args:
      config: the training config.
      bigram_entropy: nats per token of the training data, from preflight; None turns the loss floor off.
      alarm: called with name, step and message.
    """

    def __init__(self, config: ConfigDict, bigram_entropy: float | None, alarm: Callable[..., None]):
        self._config, self._guards = config, config.guards
        self._floor = bigram_entropy
        self._alarm = alarm
        self._average: float | None = None  # of the loss, over about 50 steps
        self._previous = 0.0
        self._jitter = 0.0  # average difference between the losses of neighbouring steps
        self._seen = 0
        self.trained = 0  # 1: the run began with weights that had been trained, so that a low loss is not early
        self._best_average = math.inf
        self._best_step = 0
        self._best_validation = math.inf
        self._without_improvement = 0
        self._skipped = 0  # steps in a row that were not finite
        self._spikes = 0  # steps in a row that were left out as spikes

    def on_steps(self, first_step: int, rows: list[dict[str, float]]) -> None:
        """Metrics of consecutive steps, as the train step returns them.

        Raises:
          TrainingError: loss or gradient is not finite more often in a row than `config.guards.skip_steps` allows, or
            the loss has risen for long or is too good to be true.
        """
        for step, row in enumerate(rows, first_step):
            if not (math.isfinite(row["loss"]) and math.isfinite(row["grad_norm"])):
                self._not_finite(step, row)
                continue
            self._skipped = 0
            if row.get("spike"):
                self._left_out(step, row)
                continue
            self._spikes = 0
            self._check_floor(step, row["loss"])
            self._check_spike(step, row["loss"])
            limit = self._guards.divergence
            if limit and self._seen > 50 and self._average is not None and self._average - self._best_average > limit:
                raise self._divergence(step, f"limit config.guards.divergence={limit}")

    def _not_finite(self, step: int, row: dict[str, float]) -> None:
        """A step without a finite loss or gradient: it has changed nothing where such steps are skipped."""
        limit = self._guards.skip_steps
        self._skipped += 1
        what = f"loss {row['loss']}, gradient norm {row['grad_norm']}, learning rate {row['learning_rate']:.3g}"
        if self._skipped <= limit:
            self._alarm("skipped", step, f"{what}: not finite, so this step's update is left out")
            return
        often = f" {self._skipped} times in a row (config.guards.skip_steps={limit})" if limit else ""
        raise TrainingError(
            f"step {step}: {what}: not finite{often}. Lower config.optim.learning_rate or set config.optim.clip, and "
            "start again",
            guard="non_finite",
            step=step,
        )

    def _left_out(self, step: int, row: dict[str, float]) -> None:
        """A spike, which the compiled step has left out."""
        limit = self._guards.skip_spikes
        self._spikes += 1
        found = (
            f"loss {row['loss']:.3f} (limit {row['loss_limit']:.3f}), gradient norm {row['grad_norm']:.3g} (limit "
            f"{row['grad_norm_limit']:.3g})"
        )
        if self._spikes <= limit:
            self._alarm("spike_skipped", step, f"{found}: a spike, so this step's update is left out", repeat=True)
            return
        raise TrainingError(
            f"step {step}, guard spike: {found}: a spike {self._spikes} times in a row (config.guards.skip_spikes="
            f"{limit}), none of which was trained on. Likely causes: the data have changed; the learning rate is too "
            "high. Look at the data of these steps; raise config.guards.spike or spike_norm if they are as they should "
            "be; or set config.guards.roll_back",
            guard="spike",
            step=step,
        )

    def on_validation(self, step: int, val_loss: float, train_loss: float | None) -> str | None:
        """See `Guards.on_validation`."""
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

    def check_plateau(self, step: int) -> None:
        """Raises the alarm `plateau` if the average loss has not fallen for long."""
        patience = self._guards.plateau_steps
        if patience and step - self._best_step >= patience and self._seen >= patience:
            message = (
                f"the average loss {self._average:.4f} has not fallen since step {self._best_step}, when it was "
                f"{self._best_average:.4f}; learning rate, data or capacity limit it"
            )
            self._alarm("plateau", step, message)

    def _check_floor(self, step: int, loss: float) -> None:
        g, floor = self._guards, self._floor
        if floor is None or floor < 0.5:  # text that nearly predicts itself has no floor to speak of
            return
        early = not self.trained and step <= g.floor_steps and loss < g.floor_ratio * floor
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
            self._alarm("spike", step, f"{message} with a lower config.optim.learning_rate")
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
