"""NSA models in the layout of the PyTorch classes in `transformers_nsa`, which travel with the folder."""

from __future__ import annotations

import dataclasses
import functools
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from nsa_jax.nn import ModelConfig

ARCHITECTURE = "NSAForCausalLM"
SOURCES = ("configuration_nsa.py", "attention_nsa.py", "modeling_nsa.py")


def copy_sources(path: Path) -> None:
    """Puts the PyTorch classes into a folder."""
    for name in SOURCES:
        shutil.copyfile(Path(__file__).parent / "transformers_nsa" / name, path / name)


def nsa_fields(config: ModelConfig) -> dict[str, Any]:
    """The fields of config.json that only an NSA model has."""
    return {
        "auto_map": {
            "AutoConfig": "configuration_nsa.NSAConfig",
            "AutoModel": "modeling_nsa.NSAModel",
            "AutoModelForCausalLM": f"modeling_nsa.{ARCHITECTURE}",
        },
        "value_head_dim": config.value_head_dim,
        **dataclasses.asdict(config.nsa),
        "selector": config.selector,
        "shared_kv": config.shared_kv,
        "layer_pattern": list(config.layer_pattern),
        "compressor": config.compressor,
        "qk_norm": config.qk_norm,
        "qkv_bias": config.qkv_bias,
        "out_bias": config.out_bias,
        "mlp_bias": config.mlp_bias,
        "logit_soft_cap": config.logit_soft_cap,
        "rope_options": {
            "theta": config.rope_theta,
            "rotary_dim": config.rotary_dim,
            **dataclasses.asdict(config.rope_scaling),
        },
    }


def _widths(config: ModelConfig) -> dict[str, int]:
    """Rows of each projection of attention, in the order in which the columns of w_in hold them."""
    query = config.num_heads * config.head_dim
    key, value = config.num_kv_heads * config.head_dim, config.num_kv_heads * config.value_head_dim
    found = {"q": query}
    for branch in ("",) if config.shared_kv else ("_cmp", "_slc", "_win")[-len(config.branches) :]:
        found |= {f"k{branch}": key, f"v{branch}": value}
    return found | {"gate": len(config.branches) * config.num_heads}


def _learned(config: ModelConfig) -> bool:
    """Whether there are compressors with parameters."""
    return config.selector == "compressed" and config.compressor == "mlp"


def nsa_layer_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shape of each array of a layer with NSA, by its name without the layer's prefix."""
    dim, block = config.dim, config.nsa.compress_block
    shapes: dict[str, tuple[int, ...]] = {"input_layernorm.weight": (dim,), "post_attention_layernorm.weight": (dim,)}
    linear = {f"self_attn.{name}_proj": (width, dim, config.qkv_bias) for name, width in _widths(config).items()}
    linear["self_attn.gate_proj"] = (len(config.branches) * config.num_heads, dim, False)
    linear["self_attn.o_proj"] = (dim, config.num_heads * config.value_head_dim, config.out_bias)
    linear |= {f"mlp.{name}_proj": (config.mlp_dim, dim, config.mlp_bias) for name in ("gate", "up")}
    linear["mlp.down_proj"] = (dim, config.mlp_dim, config.mlp_bias)
    if _learned(config):
        for name, features in (("key", config.head_dim), ("value", config.value_head_dim)):
            shapes[f"self_attn.compress_{name}.position"] = (block, features)
            linear[f"self_attn.compress_{name}.in_proj"] = (2 * features, block * features, True)
            linear[f"self_attn.compress_{name}.out_proj"] = (features, 2 * features, False)
    for name, (rows, columns, biased) in linear.items():
        shapes[f"{name}.weight"] = (rows, columns)
        if biased:
            shapes[f"{name}.bias"] = (rows,)
    shapes["self_attn.gate_bias"] = (config.num_heads, len(config.branches))
    if config.qk_norm:
        shapes |= {f"self_attn.{name}_norm.weight": (config.head_dim,) for name in "qk"}
    return shapes


def _piece(stacked: Any, index: int, first: int = 0, end: int | None = None) -> np.ndarray:
    """Columns of one layer's matrix [in, out] as rows, or a part of its vector."""
    return np.asarray(stacked[index][..., first:end]).T


def _rows_joined(stacked: Any, index: int) -> np.ndarray:
    """One layer's W_1 [l, F, hidden] as [hidden, l * F]."""
    array = np.asarray(stacked[index])
    return array.reshape(-1, array.shape[-1]).T


def _whole(stacked: Any, index: int) -> np.ndarray:
    return np.asarray(stacked[index])


def nsa_layer_arrays(block: Mapping[str, Any], index: int, config: ModelConfig) -> dict[str, Callable[[], np.ndarray]]:
    """What makes each array of an NSA layer, by its name without the layer's prefix.

    Args:
      block: parameters of stacked layers.
      index: which of them.
      config: of an NSA model.
    """
    attention, mlp = block["attention"], block["mlp"]
    found: dict[str, Callable[[], np.ndarray]] = {}

    def linear(name: str, part: Mapping[str, Any], side: str, first: int = 0, end: int | None = None) -> None:
        found[f"{name}.weight"] = functools.partial(_piece, part[f"w_{side}"], index, first, end)
        if f"b_{side}" in part and not name.endswith("attn.gate_proj"):
            found[f"{name}.bias"] = functools.partial(_piece, part[f"b_{side}"], index, first, end)

    first = 0
    for name, width in _widths(config).items():
        linear(f"self_attn.{name}_proj", attention, "in", first, first + width)
        first += width
    linear("self_attn.o_proj", attention, "out")
    linear("mlp.gate_proj", mlp, "in", 0, config.mlp_dim)
    linear("mlp.up_proj", mlp, "in", config.mlp_dim, 2 * config.mlp_dim)
    linear("mlp.down_proj", mlp, "out")
    found["self_attn.gate_bias"] = functools.partial(_whole, attention["gate_bias"], index)
    if _learned(config):
        for kind in ("key", "value"):
            phi, name = attention[f"compress_{kind}"], f"self_attn.compress_{kind}"
            found[f"{name}.position"] = functools.partial(_whole, phi["position"], index)
            found[f"{name}.in_proj.weight"] = functools.partial(_rows_joined, phi["w_1"], index)
            found[f"{name}.in_proj.bias"] = functools.partial(_whole, phi["b_1"], index)
            found[f"{name}.out_proj.weight"] = functools.partial(_piece, phi["w_2"], index)
    norms = {"input_layernorm": block["norm_attention"], "post_attention_layernorm": block["norm_mlp"]}
    if config.qk_norm:
        norms |= {"self_attn.q_norm": attention["q_norm"], "self_attn.k_norm": attention["k_norm"]}
    for name, part in norms.items():
        found[f"{name}.weight"] = functools.partial(_whole, part["scale"], index)
    return found
