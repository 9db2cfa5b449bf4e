"""`load`: a model, its tokenizer and its config from a run's workdir or an exported directory."""

from __future__ import annotations

import logging
import os
import reprlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ml_collections import ConfigDict

from nsa_jax.config import default_config

if TYPE_CHECKING:
    from nsa_jax.data import Tokenizer
    from nsa_jax.nn import ModelConfig, Transformer

logger = logging.getLogger("nsa_jax")


class LoadError(ValueError):
    """A path holds no model that can be loaded; the message says why and what to do."""


def _checked(path: str, value: Any, default: Any) -> Any:
    """A field's value out of JSON in the type of its default.

    Raises:
      LoadError: the value is of another type.
    """
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if isinstance(default, tuple):
        fits, wanted = isinstance(value, (list, tuple)) and all(isinstance(item, str) for item in value), "texts"
    elif isinstance(default, float):
        fits, wanted = number and (isinstance(value, float) or abs(value) < 2**63), "a number"
    elif isinstance(default, int) and not isinstance(default, bool):
        fits, wanted = number and isinstance(value, int), "a whole number"
    else:
        fits, wanted = isinstance(value, type(default)), {bool: "true or false", str: "a text"}[type(default)]
    if not fits:
        raise LoadError(f"{path}={reprlib.repr(value)}: must be {wanted}. Fix: restore the config that was saved")
    return type(default)(value)


def config_from_dict(values: Any) -> ConfigDict:
    """A training config from its JSON form; fields that it lacks keep their defaults.

    Raises:
      LoadError: a field that this version does not know, or a value of another type than the field's.
    """
    config = default_config()

    def fill(target: ConfigDict, source: Any, path: str) -> None:
        if not isinstance(source, dict):
            raise LoadError(f"{path}={reprlib.repr(source)}: must be an object with fields")
        for name, value in source.items():
            if name not in target:
                raise LoadError(f"{path}.{reprlib.repr(name)[1:-1]}: this version of nsa_jax has no such field")
            if isinstance(target[name], ConfigDict):
                fill(target[name], value, f"{path}.{name}")
            else:
                target[name] = _checked(f"{path}.{name}", value, target[name])

    fill(config, values, "config")
    return config


def abstract_model(model_config: ModelConfig) -> tuple[Any, dict[str, Any]]:
    """A Transformer without arrays: its graphdef, and its parameters' shapes as a nested dict."""
    from flax import nnx

    from nsa_jax.nn import Transformer

    model = nnx.eval_shape(lambda: Transformer(model_config, rngs=nnx.Rngs(0)))
    graphdef, state = nnx.split(model)
    return graphdef, nnx.to_pure_dict(state)


def _split_step(path: str) -> tuple[Path, str]:
    """PATH[@STEP]: STEP is a number, "best" or "" for the newest."""
    name, at, step = path.rpartition("@")
    if at and not Path(path).exists() and (step == "best" or step.isdecimal()):
        return Path(name), step
    return Path(path), ""


def _choose_step(workdir: Path, step: str) -> int:
    """The step to read: as asked for, and of several the first that is not damaged."""
    from nsa_jax.train.checkpoint_files import find_steps, verify
    from nsa_jax.train.digests import Damage

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


def _load_workdir(workdir: Path, step: str) -> tuple[Transformer, Tokenizer, ConfigDict]:
    import jax
    from flax import nnx

    from nsa_jax.data import DataError, Tokenizer
    from nsa_jax.nn import ModelConfig
    from nsa_jax.train.checkpoint_files import load_part, read_info

    directory = (workdir / "checkpoints").absolute() / str(_choose_step(workdir, step))
    config = config_from_dict(read_info(directory)["config"])
    try:
        tokenizer = Tokenizer.load(workdir / "tokenizer")
    except DataError as error:
        raise LoadError(f"{workdir}: its tokenizer cannot be read: {error}") from error
    model_config = ModelConfig.from_config(config, tokenizer.vocab_size)
    graphdef, params = abstract_model(model_config)
    sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    target = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), params)
    # Only the parameters are loaded: the optimizer's state is twice as large.
    return nnx.merge(graphdef, load_part(directory, {"params": target})["params"]), tokenizer, config


def load(path: str | os.PathLike) -> tuple[Transformer, Tokenizer, ConfigDict]:
    """Loads a trained model.

    Args:
      path: a run's workdir (its newest undamaged checkpoint; WORKDIR@STEP or WORKDIR@best for another), or a directory
        that `python -m nsa_jax.export` wrote.

    Returns:
      The `nsa_jax.nn.Transformer`, its tokenizer, and the training config.

    Raises:
      LoadError: there is nothing to load there, or something about it is damaged. An export may hold anything: no file
        outside of its directory is read, and nothing is allocated for arrays that it does not hold.
    """
    directory, step = _split_step(os.fspath(path))
    if not directory.is_dir():
        raise LoadError(f"{directory} is no directory; give a run's workdir or an exported model")
    if (directory / "checkpoints").is_dir():
        return _load_workdir(directory, step)
    if os.path.lexists(directory / "config.json"):
        from nsa_jax.export import load_exported
        from nsa_jax.export_files import read_json

        kind = read_json(directory, "config.json").get("model_type")
        if kind != "nsa_jax":
            raise LoadError(
                f"{directory} holds a model of type {reprlib.repr(kind)}; import it first: "
                f"python -m nsa_jax.export --import-from={directory} OUTPUT"
            )
        return load_exported(directory)
    raise LoadError(f"{directory} holds neither checkpoints/ nor config.json: it is no run and no exported model")
