r"""Exports a trained model as safetensors, and imports dense Llama-style checkpoints.

    python -m nsa_jax.export runs/quickstart exported/quickstart
    python -m nsa_jax.export --import-from=TinyLlama-1.1B --attention=nsa imported/tinyllama-nsa --text notes.txt

An export is a directory in the Hugging Face layout: model.safetensors (in shards if large), config.json and the
tokenizer's files. `nsa_jax.load` reads it back bit-equal; generate and evaluate take it in place of a workdir.

The import reads safetensors checkpoints (also sharded) with grouped-query attention, RoPE, RMSNorm and SwiGLU (Llama,
and Mistral or Qwen models without biases, norms of queries and keys, or scaled RoPE) and writes an export. With
--attention=nsa, each branch's keys and values begin as the dense ones, compression as the mean, and gates give every
branch a third; the model then needs continued training. --text reports the loss before that, on files.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx, traverse_util
from ml_collections import ConfigDict
from safetensors import safe_open
from safetensors.flax import save_file

from nsa_jax.config import default_config
from nsa_jax.data import DataError, Tokenizer, load_tokenizer
from nsa_jax.data.tokenizers import ByteTokenizer
from nsa_jax.devices import choose_platform
from nsa_jax.loading import LoadError, abstract_model, config_from_dict, load
from nsa_jax.nn import ModelConfig, Transformer

EXIT_USAGE = 2
MODEL_TYPE = "nsa_jax"
_INDEX = "model.safetensors.index.json"
_SHARD_BYTES = 5 * 2**30


def _flat(params: dict[str, Any]) -> dict[str, Any]:
    return {".".join(path): leaf for path, leaf in traverse_util.flatten_dict(params).items()}


def _nested(flat: dict[str, Any]) -> dict[str, Any]:
    return traverse_util.unflatten_dict({tuple(name.split(".")): leaf for name, leaf in flat.items()})


def _write_arrays(directory: Path, arrays: dict[str, jax.Array], shard_bytes: int) -> None:
    """Writes model.safetensors, or shards of at most `shard_bytes` (or one array) and their index."""
    shards: list[dict[str, jax.Array]] = [{}]
    size = 0
    for name, array in arrays.items():
        if shards[-1] and size + array.nbytes > shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = array
        size += array.nbytes
    for stale in directory.glob("model*.safetensors*"):
        stale.unlink()
    if len(shards) == 1:
        save_file(shards[0], directory / "model.safetensors", metadata={"format": "flax"})
        return
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, directory / name, metadata={"format": "flax"})
        weight_map |= dict.fromkeys(shard, name)
    total = sum(array.nbytes for array in arrays.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / _INDEX).write_text(json.dumps(index, indent=1) + "\n")


class _Arrays:
    """The arrays of a safetensors checkpoint, whole or sharded, read one at a time."""

    def __init__(self, directory: Path):
        self._directory = directory
        if (directory / _INDEX).is_file():
            self.files: dict[str, str] = json.loads((directory / _INDEX).read_text())["weight_map"]
        elif (directory / "model.safetensors").is_file():
            with safe_open(directory / "model.safetensors", framework="flax") as file:
                self.files = dict.fromkeys(file.keys(), "model.safetensors")
        else:
            raise LoadError(f"{directory} holds no model.safetensors and no {_INDEX}")
        self.read: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return name in self.files

    def __getitem__(self, name: str) -> jax.Array:
        if name not in self.files:
            raise LoadError(f"{self._directory}: no array {name!r}")
        self.read.add(name)
        path = self._directory / self.files[name]
        if not path.is_file():
            raise LoadError(f"{path} is missing, though {_INDEX} names it")
        with safe_open(path, framework="flax") as file:
            return file.get_tensor(name)

    def unread(self) -> list[str]:
        """Names that nobody asked for."""
        return sorted(set(self.files) - self.read)


def export(
    model: Transformer,
    tokenizer: Tokenizer,
    config: ConfigDict,
    directory: str | os.PathLike,
    *,
    shard_bytes: int = _SHARD_BYTES,
) -> None:
    """Writes a model in the Hugging Face layout.

    Args:
      model: the Transformer.
      tokenizer: its tokenizer.
      config: the training config.
      directory: created if needed; an export that is there is replaced.
      shard_bytes: size at which another safetensors file is begun.
    """
    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    _write_arrays(path, _flat(nnx.to_pure_dict(nnx.state(model, nnx.Param))), shard_bytes)
    described = {
        "model_type": MODEL_TYPE,
        "architectures": ["Transformer"],
        "vocab_size": model.config.vocab_size,
        "torch_dtype": model.config.param_dtype,
        "eos_token_id": int(tokenizer.eos_id),
        "config": json.loads(config.to_json()),
    }
    (path / "config.json").write_text(json.dumps(described, indent=1) + "\n")
    tokenizer.save(path)


def load_exported(directory: str | os.PathLike) -> tuple[Transformer, Tokenizer, ConfigDict]:
    """Reads what `export` wrote.

    Raises:
      LoadError: an array is missing, or does not have the shape that the config gives.
    """
    path = Path(directory)
    described = json.loads((path / "config.json").read_text())
    config = config_from_dict(described["config"])
    tokenizer = Tokenizer.load(path)
    graphdef, abstract = abstract_model(ModelConfig.from_config(config, described["vocab_size"]))
    arrays, loaded = _Arrays(path), {}
    for name, leaf in _flat(abstract).items():
        array = arrays[name]
        if array.shape != leaf.shape or array.dtype != leaf.dtype:
            raise LoadError(f"{path}: {name} is {array.shape} {array.dtype}, must be {leaf.shape} {leaf.dtype}")
        loaded[name] = array
    return nnx.merge(graphdef, _nested(loaded)), tokenizer, config


def _refuse_what_is_not_supported(described: dict[str, Any], arrays: _Arrays, directory: Path) -> None:
    found = []
    scaling = described.get("rope_scaling") or described.get("rope_parameters") or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind != "default":
        found.append(f"RoPE scaling of type {kind!r}")
    if described.get("hidden_act", "silu") != "silu":
        found.append(f"activation {described['hidden_act']!r}")
    if described.get("use_sliding_window") or (
        described.get("sliding_window") and described.get("model_type") == "mistral"
    ):
        found.append("sliding-window attention")
    for what, part in (("biases", ".bias"), ("norms of queries and keys", "self_attn.q_norm"), ("experts", "experts.")):
        if any(part in name for name in arrays.files):
            found.append(what)
    if found:
        raise LoadError(f"{directory}: cannot import {', '.join(found)}; the dense model here has none")


def imported_config(described: dict[str, Any], attention: str) -> ConfigDict:
    """The training config of a Llama-style config.json; data and training fields keep their defaults."""
    config = default_config()
    m = config.model
    m.attention = attention
    m.dim, m.num_layers = described["hidden_size"], described["num_hidden_layers"]
    m.num_heads = described["num_attention_heads"]
    m.num_kv_heads = described.get("num_key_value_heads") or m.num_heads
    m.head_dim = described.get("head_dim") or m.dim // m.num_heads
    m.mlp_dim, m.vocab_size = described["intermediate_size"], described["vocab_size"]
    parameters = described.get("rope_parameters") or {}
    m.rope_theta = float(described.get("rope_theta") or parameters.get("rope_theta") or 10_000.0)
    m.norm_eps = float(described.get("rms_norm_eps", 1e-6))
    m.tie_embeddings = bool(described.get("tie_word_embeddings", False))
    config.data.seq_len = int(described.get("max_position_embeddings", config.data.seq_len))
    return config


def _layer_params(arrays: _Arrays, index: int, config: ModelConfig, fresh: dict[str, Any]) -> dict[str, Any]:
    """Parameters of one block, float32; `fresh` holds what a new model would begin with."""
    prefix = f"model.layers.{index}."

    def weight(name: str) -> jax.Array:  # [in, out]; the checkpoint holds [out, in]
        return arrays[f"{prefix}{name}.weight"].astype(jnp.float32).T

    query, key, value = (weight(f"self_attn.{name}_proj") for name in "qkv")
    if config.attention == "nsa":
        gates = jnp.zeros((config.dim, 3 * config.num_heads), jnp.float32)
        attention = dict(fresh["attention"])
        attention["w_in"] = jnp.concatenate([query, *(key, value) * 3, gates], axis=1)
        # Each gate a third: on rows shorter than window and selection, two of the branches are dense attention.
        attention["gate_bias"] = jnp.full((config.num_heads, 3), -math.log(2.0), jnp.float32)
        for name in ("compress_key", "compress_value"):
            if "w_2" in attention.get(name, {}):  # the MLP begins as the mean of the block
                attention[name] = attention[name] | {"w_2": jnp.zeros_like(attention[name]["w_2"])}
    else:
        attention = {"w_in": jnp.concatenate([query, key, value], axis=1)}
    attention["w_out"] = weight("self_attn.o_proj")
    gate, up = weight("mlp.gate_proj"), weight("mlp.up_proj")
    return {
        "attention": attention,
        "mlp": {"w_in": jnp.concatenate([gate, up], axis=1), "w_out": weight("mlp.down_proj")},
        "norm_attention": {"scale": arrays[f"{prefix}input_layernorm.weight"].astype(jnp.float32)},
        "norm_mlp": {"scale": arrays[f"{prefix}post_attention_layernorm.weight"].astype(jnp.float32)},
    }


def import_dense(
    directory: str | os.PathLike,
    *,
    attention: str = "dense",
    edit: Callable[[ConfigDict], None] | None = None,
) -> tuple[Transformer, ConfigDict]:
    """Reads a dense Llama-style checkpoint.

    Args:
      directory: config.json and safetensors.
      attention: "dense" for the same function, "nsa" for a model to continue training.
      edit: changes the config before the model is made, for example its NSA geometry or compute dtype.

    Returns:
      The model and a training config for it.

    Raises:
      LoadError: the checkpoint has parts that this model has not, or lacks some.
    """
    path = Path(directory)
    if not (path / "config.json").is_file():
        raise LoadError(f"{path} holds no config.json")
    described = json.loads((path / "config.json").read_text())
    arrays = _Arrays(path)
    _refuse_what_is_not_supported(described, arrays, path)
    config = imported_config(described, attention)
    if edit is not None:
        edit(config)
    model_config = ModelConfig.from_config(config, config.model.vocab_size)
    graphdef, state = nnx.split(Transformer(model_config, rngs=nnx.Rngs(config.seed)))
    fresh = nnx.to_pure_dict(state)
    layers = [
        _layer_params(arrays, i, model_config, jax.tree.map(lambda leaf, i=i: leaf[i], fresh["blocks"]))
        for i in range(model_config.num_layers)
    ]
    params: dict[str, Any] = {
        "embedding": arrays["model.embed_tokens.weight"].astype(jnp.float32),
        "blocks": jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers),
        "norm": {"scale": arrays["model.norm.weight"].astype(jnp.float32)},
    }
    if not model_config.tie_embeddings:
        params["head"] = arrays["lm_head.weight"].astype(jnp.float32).T
    unused = [name for name in arrays.unread() if name != "lm_head.weight" and not name.endswith("rotary_emb.inv_freq")]
    if unused:
        raise LoadError(f"{path}: {len(unused)} arrays have no place in this model: {', '.join(unused[:5])}")
    for name, leaf in _flat(fresh).items():
        got = _flat(params).get(name)
        if got is None or got.shape != leaf.shape:
            shape = None if got is None else got.shape
            raise LoadError(
                f"{path}: {name} would be {shape}, must be {leaf.shape}; config.json does not fit the arrays"
            )
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.dtype(model_config.param_dtype)), params)
    return nnx.merge(graphdef, params), config


def _import(args: argparse.Namespace) -> None:
    source, target = Path(args.import_from), Path(args.path)
    model, config = import_dense(source, attention=args.attention)
    given = args.tokenizer or (source / "tokenizer.json")
    if str(given) == "byte":
        tokenizer: Tokenizer = ByteTokenizer()
    else:
        if not Path(given).is_file():
            raise LoadError(f"{given} is no file; name a tokenizer.json with --tokenizer, or --tokenizer=byte")
        config.data.tokenizer, config.data.tokenizer_path = "hf", str(Path(given).absolute())
        tokenizer = load_tokenizer(config)
    export(model, tokenizer, config, target)
    print(f"imported {source} as {args.attention} model into {target}")
    if args.text:
        models = {"dense": import_dense(source)[0], args.attention: model}
        for name, loss in step_zero_losses(models, tokenizer, args.text, min(config.data.seq_len, 4096)).items():
            print(f"loss at step 0, {name}: {loss:.4f} nats per token")


def step_zero_losses(
    models: dict[str, Transformer], tokenizer: Tokenizer, files: Sequence[str], context: int
) -> dict[str, float]:
    """Nats per token of several models on text files, in windows of `context` tokens."""
    from nsa_jax.data.sources import TextSource
    from nsa_jax.evaluate import Scorer, score_documents

    documents = [tokenizer.encode(text) for text in TextSource(tuple(files)).documents()]
    documents = [document[: 64 * context] for document in documents if len(document)]
    token_bytes = np.asarray(tokenizer.token_bytes)
    return {
        name: score_documents(
            Scorer(model), documents, token_bytes, tokenizer.eos_id, context=context, stride=context, batch_size=1
        )["loss"]
        for name, model in models.items()
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m nsa_jax.export", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "path", help="what to export: a workdir (WORKDIR@STEP, WORKDIR@best); with --import-from: OUTPUT"
    )
    parser.add_argument("output", nargs="?", help="directory to write")
    parser.add_argument("--import-from", help="directory of a dense Llama-style checkpoint")
    parser.add_argument("--attention", choices=("dense", "nsa"), default="nsa", help="of the imported model")
    parser.add_argument("--tokenizer", help="import: a tokenizer.json, or byte; default: the checkpoint's")
    parser.add_argument("--text", nargs="+", default=[], help="import: report the loss before training on these files")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """The command line tool; returns the exit status."""
    args = _parser().parse_args(argv)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    logging.getLogger("absl").setLevel(logging.ERROR)
    choose_platform()
    try:
        if args.import_from:
            _import(args)
            return 0
        if not args.output:
            raise LoadError("name the directory to write: python -m nsa_jax.export WORKDIR OUTPUT")
        model, tokenizer, config = load(args.path)
        export(model, tokenizer, config, args.output)
        print(f"exported {args.path} to {args.output}")
    except (LoadError, DataError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USAGE
    return 0


if __name__ == "__main__":
    sys.exit(main())
