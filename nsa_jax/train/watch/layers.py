"""Weights, gradients and updates of every layer: norm, largest entry and share of zeros, kept in layers.jsonl.

The train step computes them beside its global norms, because gradients and updates exist nowhere else. They are written
at log steps, for runs with `config.guards.health`. Parameters outside the layers (embedding, head, last norm) are left
out.

  weights_*    after the step; gradients_* before clipping; updates_* as they were added
  *_norm       square root of the sum of squares
  *_largest    largest absolute value
  *_zeros      share of the entries that are exactly 0
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from nsa_jax.nn import ModelConfig
from nsa_jax.nn.transformer import layer_stacks
from nsa_jax.train.env import json_line


def layer_figures(config: ModelConfig, **trees: Any) -> dict[str, jax.Array]:
    """The figures of each layer.

    Args:
      config: the model's.
      **trees: nested dicts shaped as the parameters, such as `gradients`, which name the figures.

    Returns:
      {"NAME_norm", "NAME_largest", "NAME_zeros": float32 [layers]} for each tree.
    """
    found = {}
    for name, tree in trees.items():
        stacks = [_stack_figures(stack) for stack in layer_stacks(tree["blocks"], config)]
        for figure in ("norm", "largest", "zeros"):  # layer i is row i // P of stack i % P
            found[f"{name}_{figure}"] = jnp.stack([stack[figure] for stack in stacks], 1).reshape(-1)
    return found


def _stack_figures(stack: Any) -> dict[str, jax.Array]:
    """The figures of parameters that are stacked along their first axis."""
    leaves = [leaf.astype(jnp.float32) for leaf in jax.tree.leaves(stack)]
    inner = [tuple(range(1, leaf.ndim)) for leaf in leaves]
    pairs = list(zip(leaves, inner, strict=True))
    squares = sum(jnp.square(leaf).sum(axes) for leaf, axes in pairs)
    # Counts are sums of float32: exact to 2**24 per array, and to seven digits beyond.
    zeros = sum((leaf == 0).astype(jnp.float32).sum(axes) for leaf, axes in pairs)
    return {
        "norm": jnp.sqrt(squares),
        "largest": jnp.stack([jnp.abs(leaf).max(axes) for leaf, axes in pairs]).max(0),
        "zeros": zeros / sum(leaf[0].size for leaf in leaves),
    }


def write_layers(workdir: Path, step: int, figures: Mapping[str, jax.Array] | None) -> None:
    """Appends the figures of a step to layers.jsonl, on process 0; None does nothing."""
    if figures is None or jax.process_index():
        return
    row = {name: [float(f"{v:.5g}") for v in np.asarray(x)] for name, x in jax.device_get(dict(figures)).items()}
    with (workdir / "layers.jsonl").open("a") as file:
        file.write(json_line({"step": step, **row}))
