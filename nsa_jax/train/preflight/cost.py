"""What a run will cost: operations per token by part, tokens per second and hours at a stated utilisation."""

from __future__ import annotations

import dataclasses

import numpy as np

from nsa_jax import aot
from nsa_jax.nn import ModelConfig
from nsa_jax.train.flops import forward_flops_per_token, keys_per_query, peak_flops, train_flops_per_token


@dataclasses.dataclass(frozen=True)
class Cost:
    """Estimated cost of a run.

    Attributes:
      parts: forward operations per token, by part.
      keys: mean keys that a query reads, by branch.
      train_flops: operations per trained token.
      dense_flops: the same with dense attention instead.
      tokens: of the whole run.
      packed: whether documents of sampled rows were counted; otherwise each row counts as one document.
      utilisation: assumed share of the peak; the estimates of time rest on it.
      tokens_per_second: on all devices; None where the device's peak is not known.
      hours: of the whole run; None likewise.
      step_seconds: of one optimizer step; None likewise.
    """

    parts: dict[str, float]
    keys: dict[str, float]
    train_flops: float
    dense_flops: float
    tokens: int
    packed: bool
    utilisation: float
    tokens_per_second: float | None
    hours: float | None
    step_seconds: float | None


def estimate(
    model: ModelConfig,
    *,
    seq_len: int,
    batch_size: int,
    steps: int,
    device_kind: str,
    devices: int,
    utilisation: float,
    segment_start: np.ndarray | None = None,
) -> Cost:
    """The cost of a run.

    Args:
      model: the model's config.
      seq_len: tokens in a row.
      batch_size: rows per optimizer step.
      steps: optimizer steps.
      device_kind: as JAX names it, for the peak.
      devices: how many.
      utilisation: share of the peak that useful operations reach.
      segment_start: int [rows, seq_len] of sampled packed rows; None: each row is one document.
    """
    train = train_flops_per_token(model, seq_len, segment_start)
    peak = peak_flops(device_kind)
    speed = None if peak is None else utilisation * peak * devices / train
    tokens = batch_size * seq_len
    dense = dataclasses.replace(model, attention="dense", layer_pattern=())
    return Cost(
        parts=forward_flops_per_token(model, seq_len, segment_start),
        keys=keys_per_query(model, seq_len, segment_start),
        train_flops=train,
        dense_flops=train_flops_per_token(dense, seq_len, segment_start),
        tokens=tokens * steps,
        packed=segment_start is not None,
        utilisation=utilisation,
        tokens_per_second=speed,
        hours=None if speed is None else tokens * steps / speed / 3600,
        step_seconds=None if speed is None else tokens / speed,
    )


def device_kind(gpu: str) -> str:
    """JAX's name of a GPU in `aot.GPUS`."""
    return aot.GPUS[gpu].device_kind
