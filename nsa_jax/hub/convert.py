"""Checkpoints of other programs: the import of dense Llama-style models."""

from __future__ import annotations

import math
import os
import reprlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from ml_collections import ConfigDict

from nsa_jax.config import default_config
from nsa_jax.hub.export_files import Arrays, LoadError, read_json
from nsa_jax.hub.saved_config import checked_model_config, positive, whole
from nsa_jax.nn import ModelConfig, Transformer


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
    m.dim, m.num_layers = (whole(described, name, path) for name in ("hidden_size", "num_hidden_layers"))
    m.num_heads = whole(described, "num_attention_heads", path)
    m.num_kv_heads = whole(described, "num_key_value_heads", path, m.num_heads)
    m.head_dim = whole(described, "head_dim", path, m.dim // m.num_heads)
    m.mlp_dim, m.vocab_size = (whole(described, name, path) for name in ("intermediate_size", "vocab_size"))
    parameters = _rope_parameters(described, path)
    theta = described.get("rope_theta") or parameters.get("rope_theta") or 10_000.0
    m.rope_theta = positive(theta, "rope_theta", path)
    m.norm_eps = positive(described.get("rms_norm_eps", 1e-6), "rms_norm_eps", path)
    tied = described.get("tie_word_embeddings", False)
    if not isinstance(tied, bool):
        raise LoadError(f"{path / 'config.json'}: tie_word_embeddings={reprlib.repr(tied)}: must be true or false")
    m.tie_embeddings = tied
    config.data.seq_len = whole(described, "max_position_embeddings", path, config.data.seq_len)
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
    model_config = checked_model_config(config, config.model.vocab_size, arrays, path)
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
