"""Checkpoints of a small state that need no training: for tests of saving, damage and restoring."""

from __future__ import annotations

from pathlib import Path

import grain
import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict
from orbax.checkpoint import v1 as ocp

from nsa_jax.train.checkpoint import Checkpoints, describe
from nsa_jax.train.optimizer import make_optimizer

from .tiny import tiny_config


def state_at(step: int, config: ConfigDict | None = None) -> dict:
    """A state whose every array depends on the step; with the optimizer state that `config.optim` makes."""
    rng = np.random.default_rng(step)
    shapes = {"embedding": (32, 16), "blocks": {"w_in": (2, 16, 48), "norm": (2, 16)}}
    params = jax.tree.map(lambda s: jnp.asarray(rng.normal(size=s), "float32"), shapes, is_leaf=_is_shape)
    opt_state = make_optimizer(config or tiny_config()).init(params)
    opt_state = jax.tree.map(lambda x: x + jnp.asarray(step, x.dtype), opt_state)
    return {"step": jnp.asarray(step, jnp.int32), "params": params, "opt_state": opt_state}


def _is_shape(value) -> bool:
    return isinstance(value, tuple)


def position_at(step: int):
    """A data iterator that has given `step` elements."""
    iterator = iter(grain.MapDataset.range(1000).to_iter_dataset())
    for _ in range(step):
        next(iterator)
    return iterator


def info_of(config: ConfigDict | None = None) -> dict:
    """What the trainer stores with each step."""
    config = config or tiny_config()
    state = state_at(0, config)
    return {
        "parameters": describe(state),
        "optimizer": describe(state, "opt_state"),
        "tokenizer": "byte-1",
        "config": config.to_dict(),
    }


def open_run(directory: Path, config: ConfigDict | None = None, **options) -> Checkpoints:
    """The checkpoints of a run with this config."""
    return Checkpoints(directory, info_of(config), **options)


def write_steps(directory: Path, losses: dict[int, float | None], config: ConfigDict | None = None, **options) -> None:
    """Saves the state of each step with its validation loss."""
    checkpoints = open_run(directory, config, **options)
    for step, loss in losses.items():
        checkpoints.save(step, state_at(step, config), position_at(step), loss)
    checkpoints.wait()
    checkpoints.close()


def write_steps_without_digests(directory: Path, losses: dict[int, float | None], config=None, state=state_at) -> None:
    """Saves as the version before digests did: metadata and validation loss are Orbax's."""
    info = info_of(config)
    del info["optimizer"]
    with ocp.training.Checkpointer(directory.absolute()) as checkpointer:
        for step, loss in losses.items():
            checkpointer.save_checkpointables(
                step,
                {"state": state(step, config), "data": position_at(step)},
                force=True,
                metrics=None if loss is None else {"val_loss": loss},
                custom_metadata=info,
            )


def target_of(config: ConfigDict | None = None) -> dict:
    """What to restore into."""
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    as_shape = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)  # noqa: E731
    return jax.tree.map(as_shape, state_at(0, config))


def same(first: dict, second: dict) -> bool:
    """Whether two states agree in structure and in every bit."""
    if jax.tree.structure(first) != jax.tree.structure(second):
        return False
    pairs = zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True)
    return all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs)
