"""Random dense checkpoints of every family, written with safetensors and JSON, and a model of them in NumPy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers
from safetensors.numpy import save_file

from nsa_jax.hub.export_files import Arrays

VOCAB = 64
_BASE = {
    "hidden_act": "silu",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}

# The configs as their makers publish them, but small: fields, spellings and what is left out are theirs.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama2": {"model_type": "llama", "num_key_value_heads": 4, "rope_scaling": None},
    "llama3": {"model_type": "llama", "rope_theta": 500_000.0, "rope_scaling": LLAMA3},
    "llama3, tied": {
        "model_type": "llama",
        "tie_word_embeddings": True,
        "head_dim": 8,
        "rope_theta": None,
        "rope_parameters": LLAMA3 | {"rope_theta": 500_000.0},
    },
    "llama, biased": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "smollm2": {"model_type": "llama", "tie_word_embeddings": True, "rope_theta": 100_000.0},
    "mistral": {"model_type": "mistral", "head_dim": 16, "sliding_window": None, "rope_theta": 1_000_000.0},
    "qwen2": {
        "model_type": "qwen2",
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "sliding_window": 32,
        "max_window_layers": 1,
    },
    "qwen2.5, yarn": {"model_type": "qwen2", "rope_scaling": YARN},
    "qwen3": {"model_type": "qwen3", "head_dim": 16, "attention_bias": False, "tie_word_embeddings": True},
    "qwen3, biased": {"model_type": "qwen3", "head_dim": 16, "attention_bias": True},
}
UNSCALED = [name for name in FAMILIES if not any("scaling" in key and FAMILIES[name][key] for key in FAMILIES[name])]
UNSCALED.remove("llama3, tied")


def describe(family: str, **changes: Any) -> dict[str, Any]:
    """The config.json of a family with changes; None leaves a field out."""
    described = _BASE | FAMILIES[family] | changes
    return {name: value for name, value in described.items() if value is not None or name in ("rope_scaling",)}


def shapes(c: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Shape of every array that transformers writes for a config.json."""
    dim, mlp, kind = c["hidden_size"], c["intermediate_size"], c["model_type"]
    head = c.get("head_dim") or dim // c["num_attention_heads"]
    query, key = head * c["num_attention_heads"], head * c["num_key_value_heads"]
    qkv, out = kind == "qwen2" or c.get("attention_bias"), c.get("attention_bias")
    products = {
        "self_attn.q_proj": (query, dim, qkv),
        "self_attn.k_proj": (key, dim, qkv),
        "self_attn.v_proj": (key, dim, qkv),
        "self_attn.o_proj": (dim, query, out),
        "mlp.gate_proj": (mlp, dim, c.get("mlp_bias")),
        "mlp.up_proj": (mlp, dim, c.get("mlp_bias")),
        "mlp.down_proj": (dim, mlp, c.get("mlp_bias")),
    }
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (c["vocab_size"], dim)}
    for layer in range(c["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        for name, (rows, columns, biased) in products.items():
            found[f"{prefix}{name}.weight"] = (rows, columns)
            if biased:
                found[f"{prefix}{name}.bias"] = (rows,)
        for name in ("input_layernorm", "post_attention_layernorm"):
            found[f"{prefix}{name}.weight"] = (dim,)
        if kind == "qwen3":
            found |= {f"{prefix}self_attn.{name}_norm.weight": (head,) for name in "qk"}
    found["model.norm.weight"] = (dim,)
    if not c["tie_word_embeddings"]:
        found["lm_head.weight"] = (c["vocab_size"], dim)
    return found


def write(
    directory: Path, described: dict[str, Any], *, dtype: Any = np.float32, seed: int = 0, files: int = 1
) -> dict[str, np.ndarray]:
    """Writes a checkpoint with random weights, large enough that attention matters; returns its arrays."""
    rng = np.random.default_rng(seed)
    arrays = {}
    for name, shape in shapes(described).items():
        if "norm" in name:
            array = rng.uniform(0.5, 1.5, shape)
        else:
            array = rng.standard_normal(shape) * (0.5 if name.endswith("bias") else 2.0 * shape[-1] ** -0.5)
        arrays[name] = array.astype(dtype)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(described))
    names = sorted(arrays)
    if files == 1:
        save_file(arrays, directory / "model.safetensors", metadata={"format": "pt"})
        return arrays
    where = {}
    for index in range(files):
        file = f"model-{index + 1:05d}-of-{files:05d}.safetensors"
        part = {name: arrays[name] for name in names[index::files]}
        save_file(part, directory / file, metadata={"format": "pt"})
        where |= dict.fromkeys(part, file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return arrays


def logits(c: dict[str, Any], arrays: dict[str, np.ndarray], tokens: np.ndarray) -> np.ndarray:
    """float64 logits [T, vocab] of tokens [T]: the families' formulas, without scaling of RoPE."""
    weights = {name: array.astype(np.float64) for name, array in arrays.items()}
    heads, groups, eps = c["num_attention_heads"], c["num_key_value_heads"], c["rms_norm_eps"]
    length = len(tokens)

    def norm(x, name):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weights[f"{name}.weight"]

    def linear(x, name):
        return x @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", 0.0)

    def turned(x):  # [T, heads, H] as complex numbers: a pair is a feature of each half
        half = x.shape[-1] // 2
        angle = np.arange(length)[:, None] * c["rope_theta"] ** (-np.arange(half) / half)
        pair = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angle)[:, None]
        return np.concatenate([pair.real, pair.imag], -1)

    x = weights["model.embed_tokens.weight"][tokens]
    for layer in range(c["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        normed = norm(x, f"{prefix}input_layernorm")
        query, key, value = (linear(normed, f"{prefix}self_attn.{name}_proj") for name in "qkv")
        query, key, value = query.reshape(length, heads, -1), key.reshape(length, groups, -1), value
        if c["model_type"] == "qwen3":
            query, key = norm(query, f"{prefix}self_attn.q_norm"), norm(key, f"{prefix}self_attn.k_norm")
        key = np.repeat(turned(key), heads // groups, axis=1)
        value = np.repeat(value.reshape(length, groups, -1), heads // groups, axis=1)
        scores = np.einsum("tnh,snh->nts", turned(query), key) / np.sqrt(query.shape[-1])
        scores = np.where(np.tri(length, dtype=bool), scores, -np.inf)
        chances = np.exp(scores - scores.max(-1, keepdims=True))
        chances /= chances.sum(-1, keepdims=True)
        x = x + linear(np.einsum("nts,snh->tnh", chances, value).reshape(length, -1), f"{prefix}self_attn.o_proj")
        normed = norm(x, f"{prefix}post_attention_layernorm")
        gate = linear(normed, f"{prefix}mlp.gate_proj")
        x = x + linear(gate / (1 + np.exp(-gate)) * linear(normed, f"{prefix}mlp.up_proj"), f"{prefix}mlp.down_proj")
    head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
    return norm(x, "model.norm") @ head.T


# Models of them here


def float32(config) -> None:
    """For `edit` of `import_dense`."""
    config.model.compute_dtype = "float32"


def tokens(length: int, seed: int = 1) -> np.ndarray:
    """A row of random tokens."""
    return np.random.default_rng(seed).integers(0, VOCAB, length)


def run(model, row: np.ndarray) -> np.ndarray:
    """Logits [T, vocabulary] of one row."""
    with jax.default_matmul_precision("highest"):
        return np.asarray(jax.jit(model)(jnp.asarray(row[None], jnp.int32))[0])


def stored(directory: Path) -> dict[str, np.ndarray]:
    """The arrays of a folder of safetensors."""
    arrays = Arrays(directory)
    return {name: np.asarray(arrays[name]) for name in arrays.files}


def letters(path: Path, template: str | None = None, size: int = VOCAB) -> Path:
    """Writes a tokenizer of single characters and its settings, as a checkpoint has them."""
    words = {"</s>": 0, **{chr(48 + i): i for i in range(1, size)}}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="1"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    made.decoder = tokenizers.decoders.Fuse()
    made.save(str(path / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": {"content": "</s>"}, "auto_map": {"x": "y"}}
    settings |= {"chat_template": template} if template else {}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path
