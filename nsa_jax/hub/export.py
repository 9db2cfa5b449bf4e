"""Exports: a model as safetensors and config.json in the Hugging Face layout, written and read back bit-equal."""

from __future__ import annotations

import dataclasses
import json
import os
import reprlib
from pathlib import Path
from typing import Any

import jax
from flax import nnx, traverse_util
from ml_collections import ConfigDict

from nsa_jax.data import Tokenizer
from nsa_jax.hub.export_files import (
    MODEL_TYPE,
    NSA_TYPE,
    Arrays,
    LoadError,
    file_in,
    load_errors,
    not_read_back,
    read_json,
    write_arrays,
)
from nsa_jax.hub.output import whole_export
from nsa_jax.hub.saved_config import abstract_model, checked_model_config, config_from_dict, whole
from nsa_jax.nn import ModelConfig, Transformer

_SHARD_BYTES = 5 * 2**30

# Fields of a ModelConfig that say how parameters begin and are computed with, not what they compute.
_HOW_COMPUTED = (
    "implementation compute_dtype matmul_dtype scan_layers remat deterministic dropout init_std gate_bias".split()
)


def _flat(params: dict[str, Any]) -> dict[str, Any]:
    return {".".join(path): leaf for path, leaf in traverse_util.flatten_dict(params).items()}


def _nested(flat: dict[str, Any]) -> dict[str, Any]:
    return traverse_util.unflatten_dict({tuple(name.split(".")): leaf for name, leaf in flat.items()})


def export(
    model: Transformer,
    tokenizer: Tokenizer,
    config: ConfigDict,
    directory: str | os.PathLike,
    *,
    shard_bytes: int = _SHARD_BYTES,
    overwrite: bool = False,
) -> None:
    """Writes a model in the Hugging Face layout.

    Args:
      model: the Transformer.
      tokenizer: its tokenizer.
      config: the training config.
      directory: created if needed; an export that is there is replaced when the new one is whole.
      shard_bytes: size at which another safetensors file is begun.
      overwrite: write into a directory that holds something else, too, unless that is a run.

    Raises:
      LoadError: the directory cannot be written, or holds something else; the parameters have another dtype than the
        model's config says, or `config` describes another function than the model's own.
    """
    described = {
        "model_type": MODEL_TYPE,
        "architectures": ["Transformer"],
        "vocab_size": model.config.vocab_size,
        "torch_dtype": model.config.param_dtype,
        "eos_token_id": int(tokenizer.eos_id),
        "config": json.loads(config.to_json()),
    }
    check_dtype(model)
    _check_config(model, config)
    with whole_export(directory, overwrite) as path:
        write_arrays(path, _flat(nnx.to_pure_dict(nnx.state(model, nnx.Param))), shard_bytes)
        tokenizer.save(path)
        (path / "config.json").write_text(json.dumps(described, indent=1) + "\n")


def check_dtype(model: Transformer) -> None:
    """The parameters have the dtype of the config, which is how they are read back.

    Raises:
      LoadError: some have another.
    """
    wanted = model.config.param_dtype
    found = {str(leaf.dtype) for leaf in jax.tree.leaves(nnx.to_pure_dict(nnx.state(model, nnx.Param)))}
    if found - {wanted}:
        raise LoadError(
            f"the model's parameters are {', '.join(sorted(found))}, and its config has param_dtype={wanted!r}: cast "
            "them back; python -m nsa_jax.convert --dtype sets both"
        )


def _check_config(model: Transformer, config: ConfigDict) -> None:
    """A config that was changed after its model was made would be read back as another function."""
    own, given = model.config, ModelConfig.from_config(config, model.config.vocab_size)
    fields = [field.name for field in dataclasses.fields(own) if field.name not in _HOW_COMPUTED]
    names = [name for name in fields if getattr(own, name) != getattr(given, name)]
    if names:
        raise LoadError(
            f"config.model and the model's own config differ in {', '.join(names)}: give the config that the model was "
            "made from"
        )


def exported_config(directory: str | os.PathLike) -> ConfigDict:
    """The training config of what `export` wrote; no array is read.

    Raises:
      LoadError: there is no export, or its config is damaged.
    """
    check_kind(Path(directory))
    config = config_from_dict(read_json(Path(directory), "config.json").get("config"))
    if config.data.tokenizer == "hf":  # where it was when the model was converted may hold another by now
        config.data.tokenizer_path = str(Path(directory).absolute() / "tokenizer.json")
    return config


def check_kind(directory: Path) -> None:
    """The config.json is that of an exported model.

    Raises:
      LoadError: it cannot be read, or is that of another library's model.
    """
    kind = read_json(directory, "config.json").get("model_type")
    if kind == NSA_TYPE:
        raise not_read_back(directory)
    if kind != MODEL_TYPE:
        raise LoadError(
            f"{directory} holds a model of type {reprlib.repr(kind)}; import it first: "
            f"python -m nsa_jax.convert {directory} OUTPUT"
        )


def load_exported(directory: str | os.PathLike) -> tuple[Transformer, Tokenizer, ConfigDict]:
    """Reads what `export` wrote.

    Raises:
      LoadError: a file is missing or damaged, or the arrays are not those that the config describes.
    """
    path = Path(directory)
    config = exported_config(path)
    described = read_json(path, "config.json")
    vocab_size = whole(described, "vocab_size", path)
    arrays, loaded = Arrays(path), {}
    graphdef, abstract = abstract_model(checked_model_config(config, vocab_size, arrays, path))
    expected = _flat(abstract)
    for name, leaf in expected.items():
        arrays.expect(name, leaf.shape, str(leaf.dtype))
    arrays.expect_no_others(expected)
    tokenizer = _exported_tokenizer(path)
    for name in expected:
        loaded[name] = arrays[name]
    return nnx.merge(graphdef, _nested(loaded)), tokenizer, config


def _exported_tokenizer(path: Path) -> Tokenizer:
    for name in ("tokenizer_config.json", "tokenizer.json"):
        if name == "tokenizer_config.json" or os.path.lexists(path / name):
            file_in(path, name)
    with load_errors(path):
        return Tokenizer.load(path)
