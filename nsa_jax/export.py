r"""Exports a trained model as safetensors, and imports dense Llama-style checkpoints.

    python -m nsa_jax.export runs/quickstart exported/quickstart
    python -m nsa_jax.export --import-from=TinyLlama-1.1B --attention=nsa imported/tinyllama-nsa --text notes.txt

An export is a directory in the Hugging Face layout: model.safetensors (in shards if large), config.json and the
tokenizer's files. `nsa_jax.load` reads it back bit-equal; generate and evaluate take it in place of a workdir. The
metadata of the safetensors files hold a checksum of each array, which is verified when the array is read.

The import reads safetensors checkpoints (also sharded) with grouped-query attention, RoPE, RMSNorm and SwiGLU (Llama,
and Mistral or Qwen models without biases, norms of queries and keys, or scaled RoPE) and writes an export. With
--attention=nsa, each branch's keys and values begin as the dense ones, compression as the mean, and gates give every
branch a third; the model then needs continued training. --text reports the loss before that, on files.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import math
import os
import reprlib
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx, traverse_util
from ml_collections import ConfigDict

from nsa_jax.config import default_config, validate
from nsa_jax.data import DataError, Tokenizer, load_tokenizer
from nsa_jax.data.tokenizers import ByteTokenizer
from nsa_jax.devices import choose_platform
from nsa_jax.export_files import Arrays, file_in, load_errors, read_json, write_arrays
from nsa_jax.loading import LoadError, abstract_model, config_from_dict, load
from nsa_jax.nn import ModelConfig, Transformer

EXIT_USAGE = 2
MODEL_TYPE = "nsa_jax"
_SHARD_BYTES = 5 * 2**30
_MODEL_RULES = ("R001", "R002", "R003", "R004", "R005")  # of config.validate: values and geometry, not training
_DIMENSIONS = "dim num_layers num_heads num_kv_heads head_dim value_head_dim mlp_dim vocab_size".split()


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
    # config.json goes first and comes last: an export that is cut short cannot be taken for a whole one.
    (path / "config.json").unlink(missing_ok=True)
    write_arrays(path, _flat(nnx.to_pure_dict(nnx.state(model, nnx.Param))), shard_bytes)
    tokenizer.save(path)
    described = {
        "model_type": MODEL_TYPE,
        "architectures": ["Transformer"],
        "vocab_size": model.config.vocab_size,
        "torch_dtype": model.config.param_dtype,
        "eos_token_id": int(tokenizer.eos_id),
        "config": json.loads(config.to_json()),
    }
    (path / "config.json").write_text(json.dumps(described, indent=1) + "\n")


def _model_config(config: ConfigDict, vocab_size: int, arrays: Arrays, path: Path) -> ModelConfig:
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
    if model.attention == "nsa" and model.compressor == "mlp":
        limits["nsa.compress_block"] = arrays.largest
    for name, value in values.items():
        if not 1 <= value <= limits[name]:
            raise LoadError(
                f"{path / 'config.json'}: config.model.{name}={value}: must be in [1, {limits[name]}], since the "
                f"largest array has {arrays.largest} elements. Fix: restore the config that was saved"
            )
    return model


def load_exported(directory: str | os.PathLike) -> tuple[Transformer, Tokenizer, ConfigDict]:
    """Reads what `export` wrote.

    Raises:
      LoadError: a file is missing or damaged, or the arrays are not those that the config describes.
    """
    path = Path(directory)
    described = read_json(path, "config.json")
    config = config_from_dict(described.get("config"))
    vocab_size = _whole(described, "vocab_size", path)
    arrays, loaded = Arrays(path), {}
    graphdef, abstract = abstract_model(_model_config(config, vocab_size, arrays, path))
    expected = _flat(abstract)
    for name, leaf in expected.items():
        arrays.expect(name, leaf.shape, str(leaf.dtype))
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


_MISSING = object()


def _whole(described: dict[str, Any], name: str, path: Path, default: Any = _MISSING) -> int:
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


def _positive(value: Any, name: str, path: Path) -> float:
    """A positive finite number in a config.json."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e300:
        raise LoadError(f"{path / 'config.json'}: {name}={reprlib.repr(value)}: must be a positive number")
    return float(value)


def _rope_parameters(described: dict[str, Any], path: Path) -> dict[str, Any]:
    found = described.get("rope_scaling") or described.get("rope_parameters") or {}
    if not isinstance(found, dict):
        raise LoadError(f"{path / 'config.json'}: rope_scaling={reprlib.repr(found)}: must be an object or null")
    return found


def _refuse_what_is_not_supported(described: dict[str, Any], arrays: Arrays, directory: Path) -> None:
    found = []
    scaling = _rope_parameters(described, directory)
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind != "default":
        found.append(f"RoPE scaling of type {reprlib.repr(kind)}")
    if described.get("hidden_act", "silu") != "silu":
        found.append(f"activation {reprlib.repr(described['hidden_act'])}")
    if described.get("use_sliding_window") or (
        described.get("sliding_window") and described.get("model_type") == "mistral"
    ):
        found.append("sliding-window attention")
    for what, part in (("biases", ".bias"), ("norms of queries and keys", "self_attn.q_norm"), ("experts", "experts.")):
        if any(part in name for name in arrays.files):
            found.append(what)
    if found:
        raise LoadError(f"{directory}: cannot import {', '.join(found)}; the dense model here has none")


def imported_config(described: dict[str, Any], attention: str, path: Path = Path()) -> ConfigDict:
    """The training config of a Llama-style config.json; data and training fields keep their defaults.

    Args:
      described: what config.json holds.
      attention: of the model here, "dense" or "nsa".
      path: directory of config.json, for messages.

    Raises:
      LoadError: a field is missing, or not what it must be.
    """
    config = default_config()
    m = config.model
    m.attention = attention
    m.dim, m.num_layers = (_whole(described, name, path) for name in ("hidden_size", "num_hidden_layers"))
    m.num_heads = _whole(described, "num_attention_heads", path)
    m.num_kv_heads = _whole(described, "num_key_value_heads", path, m.num_heads)
    m.head_dim = _whole(described, "head_dim", path, m.dim // m.num_heads)
    m.mlp_dim, m.vocab_size = (_whole(described, name, path) for name in ("intermediate_size", "vocab_size"))
    parameters = _rope_parameters(described, path)
    theta = described.get("rope_theta") or parameters.get("rope_theta") or 10_000.0
    m.rope_theta = _positive(theta, "rope_theta", path)
    m.norm_eps = _positive(described.get("rms_norm_eps", 1e-6), "rms_norm_eps", path)
    tied = described.get("tie_word_embeddings", False)
    if not isinstance(tied, bool):
        raise LoadError(f"{path / 'config.json'}: tie_word_embeddings={reprlib.repr(tied)}: must be true or false")
    m.tie_embeddings = tied
    config.data.seq_len = _whole(described, "max_position_embeddings", path, config.data.seq_len)
    return config


def _dense_shapes(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every array of a Llama-style checkpoint, one layer after another."""
    dim, query = config.dim, config.num_heads * config.head_dim
    key, value = config.num_kv_heads * config.head_dim, config.num_kv_heads * config.value_head_dim
    yield "model.embed_tokens.weight", (config.vocab_size, dim)
    yield "model.norm.weight", (dim,)
    if not config.tie_embeddings:
        yield "lm_head.weight", (config.vocab_size, dim)
    layer = {
        "self_attn.q_proj": (query, dim),
        "self_attn.k_proj": (key, dim),
        "self_attn.v_proj": (value, dim),
        "self_attn.o_proj": (dim, config.num_heads * config.value_head_dim),
        "mlp.gate_proj": (config.mlp_dim, dim),
        "mlp.up_proj": (config.mlp_dim, dim),
        "mlp.down_proj": (dim, config.mlp_dim),
        "input_layernorm": (dim,),
        "post_attention_layernorm": (dim,),
    }
    for index in range(config.num_layers):
        for name, shape in layer.items():
            yield f"model.layers.{index}.{name}.weight", shape


def _check_dense_arrays(arrays: Arrays, config: ModelConfig, path: Path) -> None:
    """Raises LoadError unless the arrays are exactly those that the config asks for, from their headers alone."""
    expected = set()
    for name, shape in _dense_shapes(config):
        arrays.expect(name, shape)
        expected.add(name)
    unused = sorted(
        name
        for name in set(arrays.files) - expected
        if name != "lm_head.weight" and not name.endswith("rotary_emb.inv_freq")
    )
    if unused:
        raise LoadError(
            f"{path}: {len(unused)} arrays have no place in this model: {', '.join(map(reprlib.repr, unused[:5]))}"
        )


def _layer_params(arrays: Arrays, index: int, config: ModelConfig, fresh: dict[str, Any]) -> dict[str, Any]:
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
    described = read_json(path, "config.json")
    arrays = Arrays(path)
    _refuse_what_is_not_supported(described, arrays, path)
    config = imported_config(described, attention, path)
    if edit is not None:
        edit(config)
    model_config = _model_config(config, config.model.vocab_size, arrays, path)
    _check_dense_arrays(arrays, model_config, path)
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
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.dtype(model_config.param_dtype)), params)
    return nnx.merge(graphdef, params), config


def _import(args: argparse.Namespace) -> None:
    source, target = Path(args.import_from), Path(args.path)
    model, config = import_dense(source, attention=args.attention)
    given = args.tokenizer or (source / "tokenizer.json")
    if not args.tokenizer and os.path.lexists(given):
        file_in(source, "tokenizer.json")
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
