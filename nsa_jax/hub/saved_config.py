"""The configs that saved models hold, checked: anything may stand in a config.json."""

from __future__ import annotations

import dataclasses
import reprlib
from pathlib import Path
from typing import Any

from flax import nnx
from ml_collections import ConfigDict

from nsa_jax.config import default_config, validate
from nsa_jax.fields import default_of, is_source_name, walk
from nsa_jax.hub.export_files import Arrays, LoadError
from nsa_jax.nn import ModelConfig, Transformer

_MODEL_RULES = ("R001", "R002", "R003", "R004", "R005")  # of config.validate: values and geometry, not training
_DIMENSIONS = "dim num_layers num_heads num_kv_heads head_dim value_head_dim mlp_dim vocab_size".split()
_MISSING = object()


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
    defaults = dict(walk(config))

    def fill(target: ConfigDict, source: Any, path: str) -> None:
        if not isinstance(source, dict):
            raise LoadError(f"{path}={reprlib.repr(source)}: must be an object with fields")
        for name, value in source.items():
            if path == "config.data.sources" and is_source_name(name):
                target[name] = ConfigDict()
            default = target[name] if name in target else default_of(f"{path}.{name}".removeprefix("config."), defaults)
            if default is None:
                raise LoadError(f"{path}.{reprlib.repr(name)[1:-1]}: this version of nsa_jax has no such field")
            if isinstance(default, ConfigDict):
                fill(default, value, f"{path}.{name}")
            else:
                target[name] = _checked(f"{path}.{name}", value, default)

    with config.unlocked():  # for the names of sources
        fill(config, values, "config")
    return config


def abstract_model(model_config: ModelConfig) -> tuple[Any, dict[str, Any]]:
    """A Transformer without arrays: its graphdef, and its parameters' shapes as a nested dict."""
    model = nnx.eval_shape(lambda: Transformer(model_config, rngs=nnx.Rngs(0)))
    graphdef, state = nnx.split(model)
    return graphdef, nnx.to_pure_dict(state)


def checked_model_config(config: ConfigDict, vocab_size: int, arrays: Arrays, path: Path) -> ModelConfig:
    """The model that a config describes, if the arrays are large enough for it.

    Raises:
      LoadError: a field is out of range, or a dimension is larger than all arrays, so that the model could not even be
        described within the memory of this machine.
    """
    wrong = [problem for problem in validate(config) if problem.severity == "error" and problem.rule in _MODEL_RULES]
    wrong = [problem for problem in wrong if problem.message.startswith(("config.model.", "config.data.seq_len"))]
    if wrong:
        raise LoadError(f"{path / 'config.json'}: {wrong[0].message}. Fix: {wrong[0].fix}")
    try:
        model = ModelConfig.from_config(config, vocab_size)
    except ValueError as error:
        raise LoadError(f"{path / 'config.json'}: {error}. Fix: restore the config that was saved") from error
    limits = dict.fromkeys(_DIMENSIONS, arrays.largest)
    values = {name: getattr(model, name) for name in _DIMENSIONS}
    for name, value in dataclasses.asdict(model.nsa).items():
        values[f"nsa.{name}"], limits[f"nsa.{name}"] = value, 2**31 - 1
    if "nsa" in model.kinds and model.selector == "compressed" and model.compressor == "mlp":
        limits["nsa.compress_block"] = arrays.largest
    for name, value in values.items():
        if not 1 <= value <= limits[name]:
            raise LoadError(
                f"{path / 'config.json'}: config.model.{name}={value}: must be in [1, {limits[name]}], since the "
                f"largest array has {arrays.largest} elements. Fix: restore the config that was saved"
            )
    return model


def whole(described: dict[str, Any], name: str, path: Path, default: Any = _MISSING) -> int:
    """A size in a config.json.

    Raises:
      LoadError: it is not there and has no default, or is no whole number that an array's dimension may be.
    """
    value = described.get(name, default)
    if value is None and default is not _MISSING:  # null stands for the default
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < 2**31:
        shown = "nothing" if value is _MISSING else reprlib.repr(value)
        raise LoadError(f"{path / 'config.json'}: {name}={shown}: must be a whole number in [1, 2**31)")
    return value


def positive(value: Any, name: str, path: Path) -> float:
    """A positive finite number in a config.json."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e300:
        raise LoadError(f"{path / 'config.json'}: {name}={reprlib.repr(value)}: must be a positive number")
    return float(value)
