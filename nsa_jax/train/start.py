"""The state of a run that has no checkpoint of its own: from another run, an exported model, or the initialisation."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx

from nsa_jax.batch_ramp import BatchRamp
from nsa_jax.config import ConfigError, Problem
from nsa_jax.hub.export import check_kind, load_exported
from nsa_jax.train.checkpoint import CheckpointError, Checkpoints, describe, differences
from nsa_jax.train.env import plain_config
from nsa_jax.train.state import Setup, State

logger = logging.getLogger("nsa_jax")

# What another stage may change of the function: longer rows may want another RoPE.
STAGE_MAY_CHANGE = ("config.model.rope_",)


class Start(NamedTuple):
    """What a run begins with.

    Attributes:
      step: the last finished one.
      state: the training state after it.
      source: where it was found; None for the initialisation.
      said: one line about it for the terminal; None for the initialisation.
      stages: the stages before this run's, as env.json holds them: run, step at which the next stage took over, tokens
        trained on in it, seq_len and batch_size; of an exported model its directory alone, as run.
    """

    step: int
    state: State
    source: str | None = None
    said: str | None = None
    stages: Sequence[dict[str, Any]] = ()

    @classmethod
    def after(cls, step: int, state: State, source: Path, stages: Sequence[dict[str, Any]] = ()) -> Start:
        """Training goes on after a step of a run."""
        return cls(step, state, str(source), f"resuming after step {step} of {source}", stages)


def check_source(workdir: Path, other: tuple[Path, int | None] | None, stage: bool) -> None:
    """What a run may begin with is there, as far as names of files tell: for when no data have been read yet.

    Args:
      workdir: of the run; one with checkpoints of its own needs no other run.
      other: directory and step that --resume names.
      stage: this is another stage of the other run.

    Raises:
      ConfigError: the other run has no checkpoint, or `stage` has no other run or model.
      LoadError: the model is of another library.
    """
    if any((workdir / "checkpoints").glob("*")):
        return
    if other is None:
        if stage:
            raise _nothing_to_go_on_from()
    elif (other[0] / "config.json").is_file():
        check_kind(other[0])
    elif not any(other[0].glob("[0-9]*")):
        raise _no_checkpoint(other[0])


def _nothing_to_go_on_from() -> ConfigError:
    fix = "name a run with --resume=DIR[@STEP], or an exported model"
    return ConfigError([Problem("R022", "error", "--stage: there is nothing to go on from", fix)])


def _no_checkpoint(directory: Path) -> ConfigError:
    return ConfigError([Problem("R022", "error", f"--resume={directory}: no checkpoint there", "give another run")])


def first_state(
    setup: Setup, other: tuple[Path, int | None] | None, info: dict[str, Any], data: Any, stage: bool = False
) -> Start:
    """What a run without a checkpoint of its own begins with.

    Another stage keeps the other run's weights and optimizer averages (an exported model has weights alone). Its data,
    steps, schedule and guards begin anew, and rows, batches and RoPE may differ.

    Args:
      setup: of the run.
      other: directory and step that --resume names; a directory with a config.json is an exported model.
      info: what the run's checkpoints say about themselves.
      data: the batches, which go on where the other run's checkpoint left them, unless this is another stage.
      stage: this is another stage of the other run.

    Raises:
      ConfigError: as `check_source`.
      CheckpointError: what is there does not fit the config.
    """
    may_change = STAGE_MAY_CHANGE if stage else ()
    if other is None:
        if stage:
            raise _nothing_to_go_on_from()
        return Start(0, setup.init())
    directory, wanted = other
    if (directory / "config.json").is_file():
        state, stages = _from_export(setup, directory, info, may_change), [{"run": str(directory)}] if stage else []
        return Start(0, state, str(directory), f"beginning with the weights of {directory}", stages)
    checkpoints = Checkpoints(directory, info, read_only=True)
    try:
        found = checkpoints.restore(
            setup.target(),
            None if stage else data,
            wanted,
            optimizer_to_reset(setup),
            may_change=may_change,
        )
    finally:
        checkpoints.close()
    if found is None:
        raise _no_checkpoint(directory)
    step, state = found[0], setup.completed(found[1])
    if not stage:
        return Start.after(step, state, directory)
    source = f"{directory}@{step}"
    return Start(0, setup.another_stage(state), source, f"another stage of {source}", _stages_up_to(directory, step))


def recorded_stages(workdir: Path) -> list[dict[str, Any]]:
    """The stages before a run's, as its env.json holds them."""
    return list(_environment(workdir).get("stages", []))


def _environment(workdir: Path) -> dict[str, Any]:
    try:
        return dict(json.loads((workdir / "env.json").read_text()))
    except (OSError, ValueError, TypeError):
        return {}


def _stages_up_to(directory: Path, step: int) -> list[dict[str, Any]]:
    """The stages before that of a run, given by its checkpoints, and this one up to a step."""
    workdir = directory.parent
    last: dict[str, Any] = {"run": str(workdir), "step": step}
    config = _environment(workdir).get("config", {})
    if {"data", "train"} <= config.keys():
        seq_len, batch_size = config["data"]["seq_len"], config["train"]["batch_size"]
        tokens = BatchRamp.of(config["train"]).rows_before(step) * seq_len
        last |= {"tokens": tokens, "seq_len": seq_len, "batch_size": batch_size}
    return [*recorded_stages(workdir), last]


def optimizer_to_reset(setup: Setup) -> Callable | None:
    """What makes the optimizer's state anew if the config asks for that; None keeps the checkpoint's."""
    return setup.fresh_optimizer if setup.config.train.reset_optimizer else None


def _from_export(setup: Setup, directory: Path, info: dict[str, Any], may_change: tuple[str, ...]) -> State:
    """A fresh state with the weights of an exported (or imported) model."""
    model, tokenizer, config = load_exported(directory)
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    saved = {
        "parameters": describe({"params": params}),
        "tokenizer": tokenizer.fingerprint,
        "config": plain_config(config),
    }
    if lines := differences(saved, info, may_change):
        shown = "\n  ".join(lines[:20])
        raise CheckpointError(
            f"the config does not fit the exported model {directory}:\n  {shown}\n"
            f"Fix: set the fields as in {directory / 'config.json'}, or give another model"
        )
    state = {name: part for name, part in setup.init().items() if name in ("step", "opt_state")}
    return setup.completed({**state, "params": jax.tree.map(_put, params, setup.sharding["params"])})


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
