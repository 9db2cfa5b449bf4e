"""`load`: a model, its tokenizer and its config from a run's workdir or an exported directory."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from pathlib import Path

import jax
from flax import nnx
from ml_collections import ConfigDict

from nsa_jax.data import DataError, Tokenizer
from nsa_jax.data.cache import cache_root
from nsa_jax.hub.checkpoint_files import find_steps, finite, load_part, read_info, verify
from nsa_jax.hub.digests import Damage
from nsa_jax.hub.export import load_exported
from nsa_jax.hub.export_files import LoadError
from nsa_jax.hub.remote_run import local_copy
from nsa_jax.hub.saved_config import abstract_model, config_from_dict
from nsa_jax.nn import ModelConfig, Transformer
from nsa_jax.object_store import scheme_of

logger = logging.getLogger("nsa_jax")


def split_step(path: str) -> tuple[str, str]:
    """PATH[@STEP]: STEP is a number, "best" or "" for the newest. A file or directory with the whole name is PATH."""
    name, at, step = path.rpartition("@")
    asks = at and (step == "best" or step.isdecimal()) and not Path(path).exists()
    return (name, step) if asks else (path, "")


def _find(path: str | os.PathLike) -> tuple[Path, str]:
    """The directory and the step that a path for `load` names; an export has none. A run in a store is fetched."""
    name, step = split_step(os.fspath(path))
    if scheme_of(name):
        try:
            workdir, found = local_copy(name, step, cache_root())
        except Damage as error:
            raise LoadError(str(error)) from error
        return workdir, str(found)
    directory = Path(name)
    if step and os.path.lexists(directory / "config.json") and not (directory / "checkpoints").is_dir():
        fix = f"leave out @{step}, or name the run that it was exported from"
        raise LoadError(f"{name}@{step}: an exported model has no steps. Fix: {fix}")
    return directory, step


def local_directory(path: str | os.PathLike) -> Path | None:
    """The directory that a path for `load` names, without a step; None for one in an object store."""
    return None if scheme_of(os.fspath(path)) else Path(split_step(os.fspath(path))[0])


def _choose_step(workdir: Path, step: str) -> int:
    """The step to read: as asked for, and of several the first that is not damaged."""
    losses, damaged = find_steps(workdir / "checkpoints")
    found = sorted({*losses, *damaged})
    if not found:
        raise LoadError(f"{workdir}: its checkpoints directory holds no finished step")
    if step == "best":
        candidates = [chosen for _, chosen in sorted((loss, s) for s, loss in losses.items() if loss is not None)]
        if not candidates:
            raise LoadError(f"{workdir}@best: no checkpoint has a validation loss; leave out @best for the newest")
    else:
        candidates = [int(step)] if step else found[::-1]
        if step and int(step) not in found:
            raise LoadError(f"{workdir}@{step}: no such step; it has {found}")
    for chosen in candidates:
        try:
            if chosen not in damaged:
                verify(workdir / "checkpoints" / str(chosen))
                return chosen
        except Damage as error:
            damaged[chosen] = str(error)
        logger.warning("skipping checkpoint %s of %s, it is damaged: %s", chosen, workdir, damaged[chosen])
    reasons = "; ".join(f"step {chosen}: {damaged[chosen]}" for chosen in candidates)
    others = [s for s in found if s not in damaged]
    fix = f"name another step, one of {others}" if others else "restore the damaged files from a copy"
    raise LoadError(f"{workdir}{'@' if step else ''}{step}: damaged, {reasons}. Fix: {fix}")


def _load_workdir(workdir: Path, step: int) -> tuple[Transformer, Tokenizer, ConfigDict]:
    directory = (workdir / "checkpoints").absolute() / str(step)
    config = config_from_dict(read_info(directory)["config"])
    try:
        tokenizer = Tokenizer.load(workdir / "tokenizer")
    except DataError as error:
        raise LoadError(f"{workdir}: its tokenizer cannot be read: {error}") from error
    model_config = ModelConfig.from_config(config, tokenizer.vocab_size)
    graphdef, params = abstract_model(model_config)
    sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    target = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), params)
    # Only these are loaded: the optimizer's state is twice as large. A run with averaged weights has validated those.
    part = "ema" if "ema" in read_info(directory).get("parts", []) else "params"
    return nnx.merge(graphdef, load_part(directory, {part: target})[part]), tokenizer, config


def checkpoints_of(path: str | os.PathLike) -> list[tuple[int | None, str]]:
    """The kept checkpoints of a run, earliest first, as step and the path that `load` takes.

    Damaged ones are left out with a warning. A path that names a step, and an exported model, have one entry.

    Raises:
      LoadError: there is nothing to load there.
    """
    directory, step = _find(path)
    if not (directory / "checkpoints").is_dir():
        return [(None, str(directory))]
    if step:
        chosen = _choose_step(directory, step)
        return [(chosen, f"{directory}@{chosen}")]
    losses, damaged = find_steps(directory / "checkpoints")
    for at, problem in sorted(damaged.items()):
        logger.warning("skipping checkpoint %s of %s, it is damaged: %s", at, directory, problem)
    if not losses:
        _choose_step(directory, step)  # raises, and says what is there
    return [(at, f"{directory}@{at}") for at in losses]


def _metrics_of(workdir: Path, step: int) -> dict[str, float]:
    """What a workdir says about one of its checkpoints."""
    found: dict[str, float] = {"step": step}
    if (loss := read_info(workdir / "checkpoints" / str(step))["val_loss"]) is not None:
        found["val/loss"] = loss
    for name in ("summary.json", f"summary_{step}.json"):  # of an end after which training went on
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # a run that was not finished has none
            validation = json.loads((workdir / name).read_bytes())["validation"]
            if validation["step"] == step:
                found |= {name: value for name, value in validation.items() if finite(value) is not None}
    return found


def _instead_of(directory: Path) -> str:
    """What to name in place of a directory that is no run: for one within a run, the run."""
    path = directory.absolute()
    if path.name == "checkpoints":
        return f"give the run, {path.parent}"
    if path.parent.name == "checkpoints" and path.name.isdecimal():
        return f"give the run and its step, {path.parent.parent}@{path.name}"
    return "give a run's workdir or an exported model"


def load(path: str | os.PathLike) -> tuple[Transformer, Tokenizer, ConfigDict]:
    """Loads a trained model.

    Args:
      path: a run's workdir (its newest undamaged checkpoint; WORKDIR@STEP or WORKDIR@best for another), also one of
        s3:// or gs://, or a directory that `python -m nsa_jax.export` wrote.

    Returns:
      The `nsa_jax.nn.Transformer`, its tokenizer, and the training config.

    Raises:
      LoadError: there is nothing to load there, or something about it is damaged. An export may hold anything: no file
        outside of its directory is read, and nothing is allocated for arrays that it does not hold.
      StoreError: an object store refuses or does not answer.
    """
    return load_recorded(path)[:3]


def load_recorded(path: str | os.PathLike) -> tuple[Transformer, Tokenizer, ConfigDict, dict[str, float]]:
    """`load`, with what the run recorded about the checkpoint that was read.

    Args:
      path: as `load` takes it.

    Returns:
      What `load` returns, and "step", "val/loss" and what else was measured at this step's validation, as far as it is
      known; nothing of an export.

    Raises:
      LoadError, StoreError: as `load` does.
    """
    directory, step = _find(path)
    if not directory.is_dir():
        raise LoadError(f"{directory} is no directory; give a run's workdir or an exported model")
    if (directory / "checkpoints").is_dir():
        chosen = _choose_step(directory, step)
        metrics = _metrics_of(directory, chosen)  # before the weights: a run that goes on may delete the step
        return *_load_workdir(directory, chosen), metrics
    if os.path.lexists(directory / "config.json"):
        return *load_exported(directory), {}
    raise LoadError(
        f"{directory} holds neither checkpoints/ nor config.json: it is no run and no exported model. Fix: "
        f"{_instead_of(directory)}"
    )
