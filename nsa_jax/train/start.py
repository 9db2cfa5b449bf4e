"""The state of a run that has no checkpoint of its own: from another run, an exported model, or the initialisation."""

from __future__ import annotations

import contextlib
import json
import logging
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from ml_collections import ConfigDict

from nsa_jax.batch_ramp import BatchRamp
from nsa_jax.config import ConfigError, Problem
from nsa_jax.data import Pipeline
from nsa_jax.hub.checkpoint_files import find_steps, read_info
from nsa_jax.hub.export import check_kind, load_exported
from nsa_jax.hub.load import split_step
from nsa_jax.train import processes
from nsa_jax.train.checkpoint import CheckpointError, Checkpoints, describe, differences, parse_resume
from nsa_jax.train.env import corpus_sizes, plain_config
from nsa_jax.train.errors import newest_checkpoint
from nsa_jax.train.optimizer import learning_rate
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
      tokens: trained on so far; None: as many as the config gives for the steps.
      trained: the weights of step 0 were those of a stage before or of an exported model.
    """

    step: int
    state: State
    source: str | None = None
    said: str | None = None
    stages: Sequence[dict[str, Any]] = ()
    tokens: int | None = None
    trained: bool = False

    @classmethod
    def after(
        cls, step: int, state: State, source: Path, config: ConfigDict, stages: Sequence[dict[str, Any]] = ()
    ) -> Start:
        """Training goes on after a step of a run: of `source`, its workdir or its directory of checkpoints."""
        directory = source / "checkpoints" if (source / "checkpoints").is_dir() else source
        info = read_info(directory / str(step))
        said = f"resuming after step {step} of {source}{_other_learning_rate(info.get('config', {}), step, config)}"
        trained = bool(info.get("guards", {}).get("values", {}).get("trained"))
        return cls(step, state, str(source), said, stages, info.get("tokens"), trained)


def _other_learning_rate(saved: dict[str, Any], step: int, config: ConfigDict) -> str:
    """What another number of steps than in a saved config makes of the learning rate; empty if it is as it was."""
    there, now = saved.get("train", {}).get("steps"), config.train.steps
    if there is None or there == now:
        return ""
    old = config.copy_and_resolve_references()
    with old.unlocked(), old.ignore_type():
        old.train.steps = there
        old.optim.update(saved.get("optim", {}))
    before, after = (float(learning_rate(c)(jnp.asarray(step))) for c in (old, config))
    if math.isclose(before, after, rel_tol=1e-6):
        return ""
    change = " and config.optim has changed" if old.optim != config.optim else ""
    why = f"since config.train.steps is {now:,}, not {there:,}{change}"
    return f"; its learning rate goes from {before:.2e} to {after:.2e}, {why}"


def other_run(workdir: Path, resume: str | None, stage: bool, steps: int) -> tuple[Path, int | None] | None:
    """What a run begins with if it has no checkpoint of its own, as far as names of files tell: no data have been read.

    Args:
      workdir: of the run; one with checkpoints of its own needs no other run, which may be gone.
      resume: "DIR[@STEP]" of --resume, or None.
      stage: this is another stage of the other run.
      steps: of the run.

    Returns:
      Directory and step of the other run, on all processes; None if there is none, or it is not needed.

    Raises:
      ConfigError: the other run has no checkpoint, or none before the last step, or not the one that is named; `stage`
        has no other run or model, or is to go on from `workdir`; a model is named with a step.
      CheckpointError: as `parse_resume`.
      LoadError: the model is of another library.
    """
    if stage and resume:
        named = Path(split_step(resume)[0]).expanduser().resolve()
        if named in (workdir.resolve(), (workdir / "checkpoints").resolve()):
            fix = "give the stage a workdir of its own, or leave out --stage to go on with the run"
            raise ConfigError(
                [Problem("R022", "error", f"--resume={resume}: --stage goes on from the workdir itself", fix)]
            )
    own = json.loads(processes.from_first(lambda: json.dumps(newest_checkpoint(workdir))))
    other = parse_resume(resume) if resume and own is None else None
    _check_other(workdir, other, stage, steps)
    return other


def _check_other(workdir: Path, other: tuple[Path, int | None] | None, stage: bool, steps: int) -> None:
    if any((workdir / "checkpoints").glob("*")):
        return
    if other is None:
        if stage:
            raise _nothing_to_go_on_from()
    elif is_export(other[0]):
        if other[1] is not None:
            message = f"--resume={other[0]}@{other[1]}: an exported model has no steps"
            fix = f"leave out @{other[1]}, or name the run that it was exported from"
            raise ConfigError([Problem("R022", "error", message, fix)])
        check_kind(other[0])
    elif not any(other[0].glob("[0-9]*")):
        raise _no_checkpoint(other[0])
    elif other[1] is not None and not (other[0] / str(other[1])).exists():
        message = f"--resume={other[0]}@{other[1]}: no checkpoint of this step there"
        fix = f"give one of {', '.join(map(str, find_steps(other[0])[0]))}, or no step for the newest"
        raise ConfigError([Problem("R022", "error", message, fix)])
    elif not stage:
        _check_steps_left(other[0], max(find_steps(other[0])[0], default=0) if other[1] is None else other[1], steps)


def _check_steps_left(directory: Path, step: int, steps: int) -> None:
    if step >= steps:
        message = f"--resume={directory}: its step {step:,} leaves none of config.train.steps={steps:,} to train"
        fix = "raise config.train.steps, or add --stage, whose steps count from 0"
        raise ConfigError([Problem("R022", "error", message, fix)])


def is_export(directory: Path) -> bool:
    """Whether --resume names an exported model, not a run."""
    return (directory / "config.json").is_file()


def begins_anew(workdir: Path, other: tuple[Path, int | None] | None) -> bool:
    """Whether a run begins with parameters or averages that no checkpoint has, as `first_state` then makes them."""
    return newest_checkpoint(workdir) is None and (other is None or is_export(other[0]))


def set_aside_ends(workdir: Path) -> None:
    """Training goes on: what tells of an earlier end is renamed, such as stopped.json to stopped_STEP.json."""
    for name in ("stopped", "summary"):
        path = workdir / f"{name}.json"
        step = _json_object(path).get("step")
        with contextlib.suppress(FileNotFoundError):
            path.replace(workdir / f"{name}_{step if isinstance(step, int) else 'unknown'}.json")


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
      ConfigError: as `other_run`.
      CheckpointError: what is there does not fit the config.
    """
    may_change = STAGE_MAY_CHANGE if stage else ()
    if other is None:
        if stage:
            raise _nothing_to_go_on_from()
        return Start(0, setup.init())
    directory, wanted = other
    if is_export(directory):
        state, stages = _from_export(setup, directory, info, may_change), [{"run": str(directory)}] if stage else []
        said = f"beginning with the weights of {directory}"
        return Start(0, state, str(directory), said, stages, trained=True)
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
        _check_steps_left(directory, step, setup.config.train.steps)
        return Start.after(step, state, directory, setup.config, recorded_stages(directory.parent))
    source = f"{directory}@{step}"
    stages = _stages_up_to(directory, step)
    return Start(0, setup.another_stage(state), source, f"another stage of {source}", stages, trained=True)


def recorded_stages(workdir: Path) -> list[dict[str, Any]]:
    """The stages before a run's, as its env.json holds them."""
    return list(_json_object(workdir / "env.json").get("stages", []))


def _json_object(path: Path) -> dict[str, Any]:
    """What a file holds; nothing if it cannot be read."""
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return {}


def _stages_up_to(directory: Path, step: int) -> list[dict[str, Any]]:
    """The stages before that of a run, given by its checkpoints, and this one up to a step."""
    workdir = directory.parent
    last: dict[str, Any] = {"run": str(workdir), "step": step}
    config = _json_object(workdir / "env.json").get("config", {})
    if {"data", "train"} <= config.keys():
        seq_len, batch_size = config["data"]["seq_len"], config["train"]["batch_size"]
        planned = BatchRamp.of(config["train"]).rows_before(step) * seq_len
        tokens = read_info(directory / str(step)).get("tokens", planned)
        last |= {"tokens": tokens, "seq_len": seq_len, "batch_size": batch_size}
    return [*recorded_stages(workdir), last]


def optimizer_to_reset(setup: Setup) -> Callable | None:
    """What makes the optimizer's state anew if the config asks for that; None keeps the checkpoint's."""
    return setup.fresh_optimizer if setup.config.train.reset_optimizer else None


def checkpoint_info(setup: Setup, pipeline: Pipeline) -> dict[str, Any]:
    """What is saved with every checkpoint of a run, and what a checkpoint must fit to begin it: JSON."""
    return {
        "parameters": describe(setup.abstract_state),
        "optimizer": describe(setup.abstract_state, "opt_state"),
        "parts": sorted(set(setup.abstract_state) - {"step", "params", "opt_state"}),
        "tokenizer": pipeline.tokenizer.fingerprint,
        "config": plain_config(setup.config),
        "corpus": corpus_sizes(pipeline),
    }


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
    summary = _json_object(workdir / "summary.json")
    if not summary.get("finished") or summary.get("step") != start:
        return None
    logger.info("finished already, at step %d of %s: raise config.train.steps to go on", start, workdir)
    return {**summary, "start_step": start}
