"""The state of a run that has no checkpoint of its own: from another run, an exported model, or the initialisation."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from nsa_jax.config import ConfigError, Problem
from nsa_jax.hub.export import load_exported
from nsa_jax.train.checkpoint import CheckpointError, Checkpoints, describe, differences
from nsa_jax.train.env import plain_config
from nsa_jax.train.state import Setup, State

logger = logging.getLogger("nsa_jax")


def first_state(
    setup: Setup, other: tuple[Path, int | None] | None, info: dict[str, Any], data: Any, stage: bool = False
) -> tuple[int, State, str | None]:
    """The state to train on from.

    Another stage keeps the other run's weights and optimizer averages. Its data, steps, schedule and guards begin anew,
    and rows, batches and RoPE may differ.

    Args:
      setup: of the run.
      other: directory and step that --resume names; a directory with a config.json is an exported model.
      info: what the run's checkpoints say about themselves.
      data: the batches, which go on where the other run's checkpoint left them, unless this is another stage.
      stage: this is another stage of the other run.

    Returns:
      The last finished step, the state, and where it was found: None for the initialisation.

    Raises:
      ConfigError: the other run has no checkpoint, or `stage` has no other run.
      CheckpointError: what is there does not fit the config.
    """
    if stage and (other is None or (other[0] / "config.json").is_file()):
        missing = "an exported model has no optimizer's state" if other else "there is nothing to go on from"
        fix = "leave out --stage: the weights alone are used" if other else "name a run with --resume=DIR[@STEP]"
        raise ConfigError([Problem("R022", "error", f"--stage: {missing}", fix)])
    if other is None:
        return 0, setup.init(), None
    directory, step = other
    if (directory / "config.json").is_file():
        return 0, _from_export(setup, directory, info), str(directory)
    checkpoints = Checkpoints(directory, {**info, "stage": stage}, read_only=True)
    try:
        found = checkpoints.restore(setup.target(), None if stage else data, step, optimizer_to_reset(setup))
    finally:
        checkpoints.close()
    if found is None:
        message = f"--resume={directory}: no checkpoint there"
        raise ConfigError([Problem("R022", "error", message, "give another run")])
    if stage:
        return 0, setup.another_stage(found[1]), f"{directory}@{found[0]}"
    return (*found, str(directory))


def stages_before(workdir: Path, source: str | None, stage: bool) -> list[dict[str, Any]]:
    """What env.json holds of the stages that came before a run's own.

    Args:
      workdir: the run's.
      source: where its state was found, as `first_state` says.
      stage: the state is that of another run, of which this run is another stage.

    Returns:
      For each, from the first on: run, step at which the next stage took over, tokens trained on in it, seq_len and
      batch_size.
    """
    directory, step = workdir, ""
    if stage and source is not None:
        name, _, step = source.rpartition("@")
        directory = Path(name).parent
    try:
        found = json.loads((directory / "env.json").read_text())
        before = list(found.get("stages", []))
        if not step:
            return before
        seq_len, batch_size = found["config"]["data"]["seq_len"], found["config"]["train"]["batch_size"]
    except (OSError, ValueError, KeyError, TypeError):
        return [{"run": str(directory), "step": int(step)}] if step else []
    tokens = int(step) * seq_len * batch_size
    return [
        *before,
        {"run": str(directory), "step": int(step), "tokens": tokens, "seq_len": seq_len, "batch_size": batch_size},
    ]


def optimizer_to_reset(setup: Setup) -> Callable | None:
    """What makes the optimizer's state anew if the config asks for that; None keeps the checkpoint's."""
    return setup.fresh_optimizer if setup.config.train.reset_optimizer else None


def _from_export(setup: Setup, directory: Path, info: dict[str, Any]) -> State:
    """A fresh state with the weights of an exported (or imported) model."""
    model, tokenizer, config = load_exported(directory)
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    saved = {
        "parameters": describe({"params": params}),
        "tokenizer": tokenizer.fingerprint,
        "config": plain_config(config),
    }
    if lines := differences(saved, info):
        shown = "\n  ".join(lines[:20])
        raise CheckpointError(
            f"the config does not fit the exported model {directory}:\n  {shown}\n"
            f"Fix: set the fields as in {directory / 'config.json'}, or give another model"
        )
    state = setup.init()
    return {**state, "params": jax.tree.map(_put, params, setup.sharding["params"])}


def _put(value: jax.Array, sharding: jax.sharding.Sharding) -> jax.Array:
    """A value that every process has, laid out over the devices of all."""
    return jax.make_array_from_callback(value.shape, sharding, np.asarray(value).__getitem__)


def finished_before(workdir: Path, start: int) -> dict[str, Any] | None:
    """The summary of the start that finished the run; None if it was interrupted before it wrote one."""
    try:
        summary = json.loads((workdir / "summary.json").read_text())
    except (OSError, ValueError):
        return None
    if not summary.get("finished") or summary.get("step") != start:
        return None
    logger.info("finished already, at step %d of %s: raise config.train.steps to go on", start, workdir)
    return {**summary, "start_step": start}
