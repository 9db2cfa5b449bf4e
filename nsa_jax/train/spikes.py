"""Spikes of the loss or the gradient's norm: judged inside the compiled step, by the median of the steps before."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

WINDOW = 64  # steps of the median; no step is a spike before there are so many

Recent = dict[str, jax.Array]


def none_yet() -> Recent:
    """The part of a training state that holds the last steps; before the first."""
    zeros = jnp.zeros(WINDOW, jnp.float32)
    return {"loss": zeros, "grad_norm": zeros, "count": jnp.zeros((), jnp.int32)}


def limits(recent: Recent, guards: ConfigDict) -> dict[str, jax.Array]:
    """The largest loss and gradient norm that are no spike; infinite before there are enough steps."""
    full = recent["count"] >= WINDOW
    loss = jnp.median(recent["loss"]) + (guards.spike or jnp.inf)
    norm = jnp.median(recent["grad_norm"]) * (guards.spike_norm or jnp.inf)
    return {"loss": jnp.where(full, loss, jnp.inf), "grad_norm": jnp.where(full, norm, jnp.inf)}


def with_step(recent: Recent, **values: Any) -> Recent:
    """The last steps with one more, which takes the place of the oldest."""
    slot = recent["count"] % WINDOW
    kept = {name: recent[name].at[slot].set(value) for name, value in values.items()}
    return {**kept, "count": recent["count"] + 1}
