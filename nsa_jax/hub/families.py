"""Dense model families of Hugging Face transformers: what a config.json describes, as a training config.

Llama 2 and 3, SmolLM2 (which is a Llama), Mistral, Qwen2, Qwen2.5 and Qwen3 differ in the fields below. What a family
has and the models here do not is collected, so that a checkpoint is refused before any of its arrays is read.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from nsa_jax.config import default_config
from nsa_jax.hub.export_files import LoadError
from nsa_jax.hub.saved_config import positive, whole
from nsa_jax.nn import ModelConfig
from nsa_jax.rules import attention_kinds, shortest_pattern

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")

# Fields of a config.json that change what a model computes, with the values that change nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "quantization_config": (),
    "partial_rotary_factor": (1, 1.0),
    "num_local_experts": (0,),
    "num_experts": (0,),
    "is_encoder_decoder": (False,),
    "is_causal": (True,),  # models of embeddings have the type of the language model that they came from
}
_SLIDING_WINDOW = 4096  # where a config.json does not name the field: transformers' default
_LAYER_TYPES = {"full_attention": "dense", "sliding_attention": "window"}
_WORDS = {
    "hidden_act": "the activation",
    "quantization_config": "quantized weights",
    "is_causal": "attention to later tokens, is_causal",
}


def _json_error(path: Path, name: str, value: Any, wanted: str) -> LoadError:
    return LoadError(f"{path / 'config.json'}: {name}={reprlib.repr(value)}: must be {wanted}")


def _flag(described: dict[str, Any], name: str, path: Path) -> bool:
    value = described.get(name)
    if value is not None and not isinstance(value, bool):
        raise _json_error(path, name, value, "true or false")
    return bool(value)


def rope_parameters(described: dict[str, Any], path: Path) -> dict[str, Any]:
    """What a config.json says about RoPE's frequencies, by the name of version 4 or of version 5 of transformers.

    Raises:
      LoadError: it is no object.
    """
    for name in ("rope_scaling", "rope_parameters"):
        if found := described.get(name):
            if not isinstance(found, dict):
                raise _json_error(path, name, found, "an object or null")
            return found
    return {}


def unsupported(described: dict[str, Any], path: Path) -> list[str]:
    """What the model of a config.json has and the models here have not; sliding windows are `sliding_window`'s."""
    kind = described.get("model_type")
    if kind not in FAMILIES:
        return [f"a model of type {reprlib.repr(kind)} (known types are {', '.join(FAMILIES)})"]
    found = []
    for name, neutral in _NEUTRAL.items():
        if (value := described.get(name)) is not None and value not in neutral:
            found.append(f"{_WORDS.get(name, name)} {reprlib.repr(value)}")
    rope = rope_parameters(described, path)
    if any(isinstance(value, dict) for value in rope.values()):
        return [*found, "RoPE that differs between layers"]
    scaling = rope.get("rope_type", rope.get("type")) or "default"
    if scaling not in ("default", "linear", "dynamic", "llama3", "yarn"):
        found.append(f"RoPE scaling of type {reprlib.repr(scaling)}")
    if rope.get("partial_rotary_factor", 1) not in (1, None):
        found.append(f"partial_rotary_factor {reprlib.repr(rope['partial_rotary_factor'])}")
    if scaling == "yarn" and rope.get("truncate") is False:
        found.append("YaRN whose range is not rounded (truncate=false)")
    return found


def sliding_window(described: dict[str, Any], path: Path) -> tuple[int, tuple[str, ...]]:
    """The window of a family whose layers may attend to a sliding window alone.

    Returns:
      Tokens that a query of these layers reads, its own included (0: no such layers), and the kind of attention of each
      layer, "window" or "dense", as the shortest pattern.

    Raises:
      LoadError: a field is not what it must be.
    """
    kind, layers = described.get("model_type"), whole(described, "num_hidden_layers", path)
    uses = kind == "mistral" or (str(kind).startswith("qwen") and _flag(described, "use_sliding_window", path))
    if not uses or described.get("sliding_window", _SLIDING_WINDOW) is None:
        return 0, ("dense",)
    window = whole(described, "sliding_window", path, _SLIDING_WINDOW)
    types = described.get("layer_types")
    if isinstance(types, list):
        if len(types) != layers or not all(isinstance(name, str) and name in _LAYER_TYPES for name in types):
            wanted = f"{layers} times one of {', '.join(_LAYER_TYPES)}"
            raise _json_error(path, "layer_types", types, wanted)
        kinds = tuple(_LAYER_TYPES[name] for name in types)
    elif kind == "mistral":
        kinds = ("window",)
    else:
        first = described.get("max_window_layers", 28)  # transformers' default
        if not isinstance(first, int):
            raise _json_error(path, "max_window_layers", first, "a whole number")
        layers = min(layers, 1 << 20)  # more are refused when the model is described
        full = min(max(first, 0), layers)
        kinds = ("dense",) * full + ("window",) * (layers - full)
    return (window, shortest_pattern(kinds)) if "window" in kinds else (0, ("dense",))


def _number(fields: dict[str, Any], name: str, default: float | None, path: Path) -> float:
    """A positive number of a config.json; null and what is not there stand for the default."""
    value = fields.get(name)
    value = default if value is None else value
    if value is None:
        raise _json_error(path, name, None, "a positive number, which this RoPE scaling needs")
    return positive(value, name, path)


def _set_rope(m: ConfigDict, described: dict[str, Any], path: Path) -> None:
    """Fills the RoPE fields of `config.model`."""
    rope = rope_parameters(described, path)
    m.rope_theta = _number(rope, "rope_theta", _number(described, "rope_theta", 10_000.0, path), path)
    scaling = rope.get("rope_type", rope.get("type")) or "default"
    if scaling == "default":
        return
    longest = whole(described, "max_position_embeddings", path)
    original = longest
    if scaling in ("llama3", "yarn"):
        # A model's own field goes before that of its RoPE, as in transformers.
        outer = described if described.get("original_max_position_embeddings") is not None else rope
        original = whole(outer, "original_max_position_embeddings", path, longest)
    s = m.rope_scaling
    s.kind, s.original_length = scaling, 0 if scaling == "linear" else original
    s.factor = _number(rope, "factor", longest / original if scaling == "yarn" else None, path)
    if scaling == "llama3":
        for name in ("low_freq_factor", "high_freq_factor"):
            s[name] = _number(rope, name, None, path)
    if scaling == "yarn":
        s.beta_fast = _number(rope, "beta_fast", 32.0, path)
        s.beta_slow = _number(rope, "beta_slow", 1.0, path)
        s.attention_factor = _yarn_attention_factor(rope, s.factor, path)


def _yarn_attention_factor(rope: dict[str, Any], factor: float, path: Path) -> float:
    """What YaRN multiplies cosines and sines by; 0 stands for the formula of `config.model.rope_scaling`."""
    if rope.get("attention_factor") is not None:
        return _number(rope, "attention_factor", None, path)
    if not (rope.get("mscale") and rope.get("mscale_all_dim")):
        return 0.0
    above, below = (
        0.1 * _number(rope, name, None, path) * math.log(factor) + 1 for name in ("mscale", "mscale_all_dim")
    )
    return above / below if factor > 1 else 1.0


def imported_config(
    described: dict[str, Any], attention: str, path: Path = Path(), layer_pattern: Sequence[str] = ()
) -> ConfigDict:
    """The training config of a dense checkpoint's config.json; data and training fields keep their defaults.

    Args:
      described: what config.json holds.
      attention: of the model here, "dense", "nsa" or "window": where some layers of the checkpoint attend to a sliding
        window, "window" makes a layer_pattern of them and of the dense ones.
      path: directory of config.json, for messages.
      layer_pattern: kinds of attention over which the layers repeat, instead of `attention`.

    Raises:
      LoadError: a field is missing, or not what it must be.
    """
    config = default_config()
    m, kind = config.model, described.get("model_type")
    window, kinds = sliding_window(described, path)
    pattern = tuple(layer_pattern) or (kinds if attention == "window" and len(kinds) > 1 else ())
    m.attention, m.layer_pattern = ("nsa" if pattern else attention), pattern
    if window and "window" in attention_kinds(m):
        m.nsa.window = window
    m.dim, m.num_layers = (whole(described, name, path) for name in ("hidden_size", "num_hidden_layers"))
    m.num_heads = whole(described, "num_attention_heads", path)
    m.num_kv_heads = whole(described, "num_key_value_heads", path, m.num_heads)
    m.head_dim = whole(described, "head_dim", path, 128 if kind == "qwen3" else max(m.dim // m.num_heads, 1))
    m.mlp_dim, m.vocab_size = (whole(described, name, path) for name in ("intermediate_size", "vocab_size"))
    m.norm_eps = positive(described.get("rms_norm_eps", 1e-6), "rms_norm_eps", path)
    m.tie_embeddings = _flag(described, "tie_word_embeddings", path)
    biased = kind in ("llama", "qwen3") and _flag(described, "attention_bias", path)
    m.qkv_bias, m.out_bias = biased or kind == "qwen2", biased
    m.mlp_bias = kind == "llama" and _flag(described, "mlp_bias", path)
    m.qk_norm = kind == "qwen3"
    _set_rope(m, described, path)
    config.data.seq_len = whole(described, "max_position_embeddings", path, config.data.seq_len)
    return config


def layer_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shape of each array of a layer with dense attention, by its name in transformers' layout without the prefix."""
    dim, query = config.dim, config.num_heads * config.head_dim
    key, value = config.num_kv_heads * config.head_dim, config.num_kv_heads * config.value_head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj.weight": (query, dim),
        "self_attn.k_proj.weight": (key, dim),
        "self_attn.v_proj.weight": (value, dim),
        "self_attn.o_proj.weight": (dim, config.num_heads * config.value_head_dim),
        "mlp.gate_proj.weight": (config.mlp_dim, dim),
        "mlp.up_proj.weight": (config.mlp_dim, dim),
        "mlp.down_proj.weight": (dim, config.mlp_dim),
        "input_layernorm.weight": (dim,),
        "post_attention_layernorm.weight": (dim,),
    }
    biased = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"] if config.qkv_bias else []
    biased += ["self_attn.o_proj"] if config.out_bias else []
    biased += ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"] if config.mlp_bias else []
    shapes |= {f"{name}.bias": shapes[f"{name}.weight"][:1] for name in biased}
    if config.qk_norm:
        shapes |= {f"self_attn.{name}_norm.weight": (config.head_dim,) for name in "qk"}
    return shapes


def model_shapes(
    config: ModelConfig, layers: Sequence[dict[str, tuple[int, ...]]]
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every array of a model in transformers' layout, one layer after another.

    Args:
      config: the model's.
      layers: shape of each array of a layer, by its name without the layer's prefix, of layers that repeat.
    """
    yield "model.embed_tokens.weight", (config.vocab_size, config.dim)
    for index in range(config.num_layers):
        for name, shape in layers[index % len(layers)].items():
            yield f"model.layers.{index}.{name}", shape
    yield "model.norm.weight", (config.dim,)
    if not config.tie_embeddings:
        yield "lm_head.weight", (config.vocab_size, config.dim)
