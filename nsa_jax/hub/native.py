"""Models as folders that transformers loads, NSA models with the PyTorch code that they need: `export_native`."""

from __future__ import annotations

import functools
import json
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx
from ml_collections import ConfigDict

from nsa_jax.data import Tokenizer
from nsa_jax.data.tokenizers import ByteTokenizer, HuggingFaceTokenizer
from nsa_jax.hub.export import check_dtype
from nsa_jax.hub.export_files import NSA_TYPE, LaterArray, LoadError, write_arrays
from nsa_jax.hub.families import layer_shapes, model_shapes
from nsa_jax.hub.generation import FILE, generation_fields, token_ids, tokenizer_settings
from nsa_jax.hub.native_nsa import ARCHITECTURE, SOURCES, copy_sources, nsa_fields, nsa_layer_arrays, nsa_layer_shapes
from nsa_jax.hub.output import CARD, whole_export
from nsa_jax.nn import ModelConfig, Transformer, count_parameters
from nsa_jax.nn.transformer import layer_stacks

logger = logging.getLogger("nsa_jax")

_QWEN2 = "Qwen2ForCausalLM"
# How the tokenizer of Qwen2 splits a text into words, numbers and rest.
_QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SHARD_BYTES = 5 * 2**30
_SETTINGS = "tokenizer_config.json"


def _without_counterpart(config: ModelConfig) -> list[str]:
    """What of a model with dense or window attention no family of transformers has."""
    found = []
    if config.value_head_dim != config.head_dim:
        found.append(f"value_head_dim={config.value_head_dim} beside head_dim={config.head_dim}")
    if config.rotary_dim not in (0, config.head_dim):
        found.append(f"rotary_dim={config.rotary_dim}")
    if config.logit_soft_cap:
        found.append(f"logit_soft_cap={config.logit_soft_cap}")
    if config.out_bias and not config.qkv_bias:
        found.append("out_bias without qkv_bias")
    if config.qk_norm and config.qkv_bias != config.out_bias:
        found.append("qk_norm with qkv_bias alone")
    if config.mlp_bias and (config.qk_norm or config.qkv_bias != config.out_bias):
        found.append("mlp_bias beside qk_norm or qkv_bias alone")
    return found


def family_of(config: ModelConfig) -> tuple[str, str]:
    """The model_type and the class of transformers that compute what a model with dense or window attention computes.

    Raises:
      LoadError: there are none.
    """
    window, mixed = "window" in config.kinds, len(config.kinds) > 1
    uneven = config.dim % config.num_heads != 0  # refused by LlamaConfig; a Mistral without a window is the same model
    found = _without_counterpart(config)
    if window and not found and not config.qk_norm and (config.out_bias or config.mlp_bias):
        found = ["window attention beside out_bias or mlp_bias"]
    if uneven and not found and not config.qk_norm and (config.out_bias or config.mlp_bias):
        found = [f"dim={config.dim}, no multiple of num_heads={config.num_heads}, beside out_bias or mlp_bias"]
    if mixed and not found and not config.qk_norm and not config.qkv_bias:
        found = ["window attention in some layers, but neither qk_norm nor qkv_bias"]
    if found:
        raise LoadError(
            f"transformers has no counterpart of a model with {', '.join(found)}. Fix: leave out "
            "--format=transformers, and read the export with nsa_jax.load"
        )
    if config.qk_norm:
        return "qwen3", "Qwen3ForCausalLM"
    if config.qkv_bias and not config.out_bias:
        return "qwen2", _QWEN2
    return ("mistral", "MistralForCausalLM") if window or uneven else ("llama", "LlamaForCausalLM")


def _rope_scaling(config: ModelConfig) -> dict[str, Any] | None:
    scaling = config.rope_scaling
    if scaling.kind == "none":
        return None
    found: dict[str, Any] = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind in ("llama3", "yarn"):
        found["original_max_position_embeddings"] = scaling.original_length
    if scaling.kind == "llama3":
        found |= {"low_freq_factor": scaling.low_freq_factor, "high_freq_factor": scaling.high_freq_factor}
    if scaling.kind == "yarn":
        found |= {"beta_fast": scaling.beta_fast, "beta_slow": scaling.beta_slow}
        if scaling.attention_factor:
            found["attention_factor"] = scaling.attention_factor
    return found


def _dense_fields(config: ModelConfig, kind: str) -> dict[str, Any]:
    """The fields of config.json that say what a model of a dense family computes."""
    # The names of version 4 of transformers, which version 5 reads too.
    found: dict[str, Any] = {
        "hidden_act": "silu",
        "rope_theta": config.rope_theta,
        "rope_scaling": _rope_scaling(config),
    }
    if config.rope_scaling.kind == "dynamic":  # frequencies of this kind begin to change beyond this length
        found["max_position_embeddings"] = config.rope_scaling.original_length
    if kind == "llama":
        found |= {"attention_bias": config.qkv_bias, "mlp_bias": config.mlp_bias}
    elif kind == "qwen3":
        found |= {"attention_bias": config.qkv_bias}
    window = "window" in config.kinds
    if kind.startswith("qwen"):
        found["use_sliding_window"] = window
    if window or kind == "mistral":
        found["sliding_window"] = config.nsa.window if window else None
    if window and kind.startswith("qwen"):
        # Layers before this one attend to the whole row, where nothing else is said of each.
        found["max_window_layers"] = config.layers_of("window")[0]
    if config.layer_pattern:
        names = {"dense": "full_attention", "window": "sliding_attention"}
        found["layer_types"] = [names[config.of_layer(index).attention] for index in range(config.num_layers)]
    return found


def native_config(config: ModelConfig, seq_len: int) -> dict[str, Any]:
    """The config.json that transformers reads, without the tokens of the tokenizer.

    Args:
      config: the model's.
      seq_len: tokens of the rows that it was trained on.

    Raises:
      LoadError: transformers has no such model.
    """
    if "nsa" in config.kinds:
        kind, architecture, fields = NSA_TYPE, ARCHITECTURE, nsa_fields(config)
    else:
        kind, architecture = family_of(config)
        fields = _dense_fields(config, kind)
    return {
        "architectures": [architecture],
        "model_type": kind,
        "vocab_size": config.vocab_size,
        "hidden_size": config.dim,
        "intermediate_size": config.mlp_dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": seq_len,
        "initializer_range": config.init_std,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "torch_dtype": config.param_dtype,
        "use_cache": True,
        **fields,
    }


def _cut(stacked: Any, index: int, first: int = 0, end: int | None = None) -> np.ndarray:
    """Columns of one layer's array; of a matrix [in, out] they become rows."""
    return np.asarray(stacked[index][..., first:end]).T


def _layer_arrays(block: Mapping[str, Any], index: int, config: ModelConfig) -> dict[str, Callable[[], np.ndarray]]:
    """What makes each array of a layer in transformers' layout, by its name without the layer's prefix."""
    attention, mlp = block["attention"], block["mlp"]
    query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    value = config.num_kv_heads * config.value_head_dim
    ends = {"q": (0, query), "k": (query, query + key), "v": (query + key, query + key + value)}
    halves = {"gate": (0, config.mlp_dim), "up": (config.mlp_dim, 2 * config.mlp_dim)}
    columns = {f"self_attn.{name}": (attention, at) for name, at in ends.items()}
    columns |= {f"mlp.{name}": (mlp, at) for name, at in halves.items()}
    found: dict[str, Callable[[], np.ndarray]] = {}
    for name, (part, (first, end)) in columns.items():
        found[f"{name}_proj.weight"] = functools.partial(_cut, part["w_in"], index, first, end)
        if "b_in" in part:
            found[f"{name}_proj.bias"] = functools.partial(_cut, part["b_in"], index, first, end)
    for name, part in (("self_attn.o_proj", attention), ("mlp.down_proj", mlp)):
        found[f"{name}.weight"] = functools.partial(_cut, part["w_out"], index)
        if "b_out" in part:
            found[f"{name}.bias"] = functools.partial(_cut, part["b_out"], index)
    norms = {"input_layernorm": block["norm_attention"], "post_attention_layernorm": block["norm_mlp"]}
    if config.qk_norm:
        norms |= {"self_attn.q_norm": attention["q_norm"], "self_attn.k_norm": attention["k_norm"]}
    for name, part in norms.items():
        found[f"{name}.weight"] = functools.partial(_cut, part["scale"], index)
    return found


def _arrays(model: Transformer) -> dict[str, LaterArray]:
    """Every array in transformers' layout; each is made when it is written."""
    config = model.config
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    made: dict[str, Callable[[], np.ndarray]] = {
        "model.embed_tokens.weight": lambda: np.asarray(params["embedding"]),
        "model.norm.weight": lambda: np.asarray(params["norm"]["scale"]),
        "lm_head.weight": lambda: np.asarray(params["head"]).T,
    }
    stacks = layer_stacks(params["blocks"], config)
    for index in range(config.num_layers):
        row, position = divmod(index, len(stacks))
        sparse = config.of_layer(index).attention == "nsa"
        layer = (nsa_layer_arrays if sparse else _layer_arrays)(stacks[position], row, config)
        made |= {f"model.layers.{index}.{name}": make for name, make in layer.items()}
    dtype = np.dtype(params["embedding"].dtype)
    shapes = [(nsa_layer_shapes if kind == "nsa" else layer_shapes)(config) for kind in config.kinds]
    return {name: LaterArray(shape, dtype, made[name]) for name, shape in model_shapes(config, shapes)}


def _byte_tokenizer() -> str:
    """The text of a tokenizer.json whose ids are `ByteTokenizer`'s: bytes, and the end of a document."""
    import tokenizers

    # Byte-level tokenizers write each byte as a character that can be seen: itself, or one from 256 on.
    seen = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    unseen = [byte for byte in range(256) if byte not in seen]
    characters = {byte: chr(byte) for byte in seen} | {byte: chr(256 + i) for i, byte in enumerate(unseen)}
    made = tokenizers.Tokenizer(tokenizers.models.BPE({text: byte for byte, text in characters.items()}, []))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens(["<|endoftext|>"])
    return made.to_str()


def _save_tokenizer(tokenizer: Tokenizer, path: Path) -> bool:
    """Writes the tokenizer as transformers reads it; returns whether it can be written so."""
    if isinstance(tokenizer, ByteTokenizer):
        tokenizer = HuggingFaceTokenizer(_byte_tokenizer(), eos="<|endoftext|>")
    if not isinstance(tokenizer, HuggingFaceTokenizer):
        return False
    tokenizer.save(path)
    settings = {"clean_up_tokenization_spaces": False, "model_input_names": ["input_ids", "attention_mask"]}
    settings |= {**tokenizer_settings(tokenizer), "eos_token": tokenizer.eos_token}
    # Other classes, such as LlamaTokenizer, replace the normalizer and the special tokens of tokenizer.json.
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    settings["pad_token"] = settings.get("pad_token") or tokenizer.eos_token
    (path / _SETTINGS).write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return True


def _splits_as_qwen2(path: Path) -> bool:
    """Whether tokenizer.json normalizes and splits texts as Qwen2's does."""
    described = json.loads((path / "tokenizer.json").read_text(encoding="utf-8"))
    splits = json.dumps(described.get("pre_tokenizer"))
    return (described.get("normalizer") or {}).get("type") == "NFC" and json.dumps(_QWEN2_WORDS) in splits


def _card(model: Transformer, config: ConfigDict, metrics: Mapping[str, Any], has_tokenizer: bool, kind: str) -> str:
    """The README.md of the folder."""
    rows = {
        "parameters": f"{count_parameters(model):,}",
        "layers, width": f"{model.config.num_layers}, {model.config.dim}",
        "rows in training": f"{config.data.seq_len:,} tokens",
        "training steps": f"{metrics['step']:,}" if "step" in metrics else "not recorded",
    }
    rows |= {name: f"{value:.4f}" for name, value in metrics.items() if name != "step"}
    table = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
    # For AutoTokenizer every model of type qwen2 has Qwen's normalizer and words, whatever its tokenizer.json says.
    reader = "PreTrainedTokenizerFast" if kind == _QWEN2 else "AutoTokenizer"
    load = [f"from transformers import AutoModelForCausalLM, {reader}", ""]
    kinds = " and ".join(sorted(set(model.config.kinds)))
    attention, code, side = f"{kinds} attention in the layout of {kind}", "", ""
    if kind == ARCHITECTURE:
        attention, code = "Native Sparse Attention (arXiv 2502.11089)", ", trust_remote_code=True"
        side = ', padding_side="left"'
        note = f"\nIts code is {' and '.join(SOURCES)}, which transformers runs: read them first.\n"
    else:
        note = ""
    load += [f'model = AutoModelForCausalLM.from_pretrained("DIRECTORY"{code})']
    load += [f'tokenizer = {reader}.from_pretrained("DIRECTORY"{code}{side})'] if has_tokenizer else []
    note += "" if has_tokenizer else "\nIts tokens are synthetic: there is no tokenizer for text.\n"
    return (
        f"{CARD}# {config.name}\n\n"
        f"A language model with {attention}, trained with nsa_jax.\n{note}\n"
        f"| | |\n|---|---|\n{table}\n\n"
        "val/loss is in nats per token, measured on held-out documents by the trainer.\n\n"
        "```python\n" + "\n".join(load) + "\n```\n"
    )


def export_native(
    model: Transformer,
    tokenizer: Tokenizer,
    config: ConfigDict,
    directory: str | os.PathLike,
    *,
    metrics: Mapping[str, Any] | None = None,
    shard_bytes: int = _SHARD_BYTES,
    overwrite: bool = False,
) -> None:
    """Writes a model as a folder that transformers loads.

    It holds config.json, generation_config.json, safetensors, the tokenizer and a README.md. Weights keep their bits.
    `nsa_jax.hub.convert.import_dense` reads the folder of a dense model back. That of an NSA model also holds the
    PyTorch code that computes it, for `trust_remote_code=True`.

    Args:
      model: the Transformer.
      tokenizer: its tokenizer; a synthetic one is left out.
      config: the training config.
      directory: created if needed; an export that is there is replaced when the new one is whole.
      metrics: "step" and what was measured, for the README.md.
      shard_bytes: size at which another safetensors file is begun.
      overwrite: write into a directory that holds something else, too, unless that is a run.

    Raises:
      LoadError: transformers has no such model, or the directory cannot be written or holds something else. Nothing is
        written then.
    """
    check_dtype(model)
    described = native_config(model.config, config.data.seq_len)
    generation = generation_fields(tokenizer)
    with whole_export(directory, overwrite) as path:
        write_arrays(path, _arrays(model), shard_bytes, kind="pt")
        if "nsa" in model.config.kinds:
            copy_sources(path)
        has_tokenizer = _save_tokenizer(tokenizer, path)
        if has_tokenizer and described["architectures"] == [_QWEN2] and not _splits_as_qwen2(path):
            logger.warning(
                "AutoTokenizer of transformers 5 reads the tokenizer of every %s as if it were Qwen's, and then other "
                "ids than the model was trained with: load it with PreTrainedTokenizerFast, as README.md does",
                _QWEN2,
            )
        (path / FILE).write_text(json.dumps(generation, indent=1) + "\n")
        card = _card(model, config, metrics or {}, has_tokenizer, described["architectures"][0])
        (path / "README.md").write_text(card, encoding="utf-8")
        (path / "config.json").write_text(json.dumps(described | token_ids(generation), indent=1) + "\n")
