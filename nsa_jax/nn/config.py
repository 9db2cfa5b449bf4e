"""`ModelConfig`: everything a model's shape and numbers depend on, frozen and hashable."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from nsa_jax.config import CHOICES, NSAConfig, Problem, default_config, nsa_config
from nsa_jax.ops.implementations import IMPLEMENTATIONS
from nsa_jax.ops.rope import RopeScaling, rope, rope_turns
from nsa_jax.rules import attention_kinds, pattern_problem, shortest_pattern
from nsa_jax.rules import geometry as geometry_of


def _default_mlp_dim(dim: int) -> int:
    """SwiGLU width with about the parameters of a 4x MLP: 8/3 of `dim`, rounded up to a multiple of 64."""
    return -(-8 * dim // (3 * 64)) * 64


# What the same parameters compute depends on these and on the block geometry. It does not depend on how they were
# initialised and are trained (init_std, gate_bias, dropout) or computed (dtypes, implementation, scan_layers, remat),
# and other fields show in the parameters' shapes.
_FUNCTION = (
    "num_heads num_kv_heads head_dim rope_theta rotary_dim norm_eps tie_embeddings compressor "
    "qk_norm qkv_bias out_bias mlp_bias logit_soft_cap"
).split()
_GEOMETRY = {
    "nsa": (*(field.name for field in dataclasses.fields(NSAConfig)), "selector", "shared_kv"),
    "window": ("window",),
}
_SCALING: dict[str, tuple[str, ...]] = {  # what `RopeScaling` depends on, by its kind
    "none": (),
    "linear": ("factor",),
    "dynamic": ("factor", "original_length"),
    "llama3": ("factor", "original_length", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor", "original_length", "beta_fast", "beta_slow", "attention_factor"),
}


def function_differences(saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[Problem]:
    """R054: the same parameters would be another function.

    Args:
      saved: `config.model` that the parameters were trained with, as plain values; what it lacks has its default.
      wanted: `config.model` that is to use them.

    Returns:
      An error for each field that differs, with both values.
    """
    default = default_config().model.to_dict()

    saved, wanted = {**default, **saved}, {**default, **wanted}
    kinds = [shortest_pattern(attention_kinds(model)) for model in (saved, wanted)]
    attention = ["layer_pattern" if saved["layer_pattern"] or wanted["layer_pattern"] else "attention"]

    def fields(model: Mapping[str, Any]) -> dict[str, Any]:
        nsa = {**default["nsa"], **model["nsa"]}
        nsa |= geometry_of(nsa)
        geometry = {f"nsa.{name}": nsa[name] for kind in attention_kinds(model) for name in _GEOMETRY.get(kind, ())}
        scaling = {**default["rope_scaling"], **model["rope_scaling"]}
        geometry |= {f"rope_scaling.{name}": scaling[name] for name in ("kind", *_SCALING[scaling["kind"]])}
        if model["rotary_dim"] == model["head_dim"]:
            model = {**model, "rotary_dim": 0}
        values = {name: model[name] for name in (*(attention if kinds[0] != kinds[1] else ()), *_FUNCTION)}
        return values | geometry

    old, new = fields(saved), fields(wanted)
    compresses = old.get("nsa.selector") == "compressed"
    return [
        Problem(
            "R054",
            "error",
            f"config.model.{name}: {old[name]!r} where it was saved, {new[name]!r} here, which is another function",
            f'set {old[name]!r}; config.preflight.ignore=("R054",) accepts it',
        )
        for name in old
        if name in new and old[name] != new[name] and (name != "compressor" or compresses)
    ]


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Shape and numerics of a model; the fields are `config.model`'s (see `nsa_jax.config.default_config`).

    `dataclasses.replace` keeps what was derived from other fields: give it value_head_dim=0 with another head_dim,
    mlp_dim=0 with another dim, layer_pattern=() with another attention, and nsa with another selector.

    Attributes:
      dim: D, model width.
      num_heads: N, query heads.
      num_kv_heads: K, key/value heads; divides `num_heads`.
      head_dim: H, of queries and keys; even, since RoPE turns pairs.
      value_head_dim: V, of values; 0 means `head_dim`.
      vocab_size: rows of the embedding; only `Transformer` needs it.
      num_layers: blocks; also scales the initialisation of residual-writing projections.
      mlp_dim: hidden width of SwiGLU; 0 means 8/3 of `dim`, rounded up to a multiple of 64.
      nsa: block geometry of the sparse attention.
      selector: "compressed", or "mean_key" for blocks chosen by their mean keys without a compressed branch; see
        `nsa_jax.ops.mean_key` (`config.model.nsa.selector`). With "mean_key", compress_block and compress_stride of
        `nsa` are set to its select_block.
      shared_kv: the branches of the sparse attention share one projection of keys and one of values
        (`config.model.nsa.shared_kv`).
      gate_bias: where the biases of the sparse attention's gates begin (`config.model.nsa.gate_bias`).
      attention: "nsa", "dense" or "window" (dense within the sliding window): the kind of every layer.
      layer_pattern: kinds that the layers repeat, instead of `attention`; empty for none. It is kept at its shortest,
        and a pattern of one kind becomes `attention`.
      rope_theta: base of the rotary position embedding.
      rope_scaling: how its frequencies are changed for longer rows.
      rotary_dim: features of a head that it turns; 0 means all. Of each half of a head, the first rotary_dim / 2.
      qk_norm: queries and keys are normalised per head (RMSNorm) before RoPE.
      qkv_bias: queries, keys and values have a bias.
      out_bias: attention's output projection has a bias.
      mlp_bias: the MLP's projections have biases.
      logit_soft_cap: c, of logits c * tanh(logits / c); 0 means none.
      norm_eps: added to the mean square in RMSNorm.
      init_std: standard deviation of all projections at initialisation.
      dropout: share of the outputs of attention and MLP that training sets to zero.
      tie_embeddings: the output head is the embedding matrix.
      compressor: "mlp" or "mean".
      implementation: "reference", "xla", "pallas" or None for the best on this device.
      compute_dtype: of activations and matrix products.
      matmul_dtype: "float8" for the projections of attention and MLP (see `nsa_jax.nn.float8`), or "" for
        `compute_dtype`. A training step's matter: `from_config` leaves it out.
      param_dtype: of parameters.
      scan_layers: run the layers by `jax.lax.scan`; otherwise one after the other. The parameters are the same.
      remat: what the backward pass recomputes; see `nsa_jax.nn.Transformer`.
      deterministic: leave out cuDNN's dense attention, whose backward pass adds in an order that differs from run to
        run on GPUs. NSA, window attention and packed rows never use it. Set from `config.train.deterministic`.

    Raises:
      ValueError: naming the field.
    """

    dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_head_dim: int = 0
    vocab_size: int = 0
    num_layers: int = 1
    mlp_dim: int = 0
    nsa: NSAConfig = NSAConfig()
    selector: str = "compressed"
    shared_kv: bool = False
    gate_bias: float = 0.0
    attention: str = "nsa"
    layer_pattern: tuple[str, ...] = ()
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling = RopeScaling()
    rotary_dim: int = 0
    qk_norm: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    logit_soft_cap: float = 0.0
    norm_eps: float = 1e-6
    init_std: float = 0.02
    dropout: float = 0.0
    tie_embeddings: bool = True
    compressor: str = "mlp"
    implementation: str | None = None
    compute_dtype: str = "bfloat16"
    matmul_dtype: str = ""
    param_dtype: str = "float32"
    scan_layers: bool = True
    remat: str = "block"
    deterministic: bool = False

    def __post_init__(self):
        self._check_types()
        if message := pattern_problem(vars(self))[0]:
            raise ValueError(f"ModelConfig.layer_pattern={self.layer_pattern!r}: {message}")
        if kinds := self.layer_pattern:
            kinds = shortest_pattern(tuple(kinds))
            object.__setattr__(self, "attention", kinds[0] if len(kinds) == 1 else "nsa")
            object.__setattr__(self, "layer_pattern", kinds if len(kinds) > 1 else ())
        if not self.value_head_dim:
            object.__setattr__(self, "value_head_dim", self.head_dim)
        if self.selector == "mean_key":
            block = self.nsa.select_block
            object.__setattr__(self, "nsa", dataclasses.replace(self.nsa, compress_block=block, compress_stride=block))
        if not self.mlp_dim:
            object.__setattr__(self, "mlp_dim", _default_mlp_dim(self.dim))
        for name in ("dim", "num_heads", "num_kv_heads", "head_dim", "value_head_dim", "num_layers", "mlp_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"ModelConfig.{name}={getattr(self, name)}: must be at least 1")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"ModelConfig.num_kv_heads={self.num_kv_heads}: must divide num_heads={self.num_heads}")
        if self.head_dim % 2:
            raise ValueError(f"ModelConfig.head_dim={self.head_dim}: must be even, since RoPE turns pairs")
        if self.rotary_dim % 2 or not 0 <= self.rotary_dim <= self.head_dim:
            message = f"must be even and at most head_dim={self.head_dim}"
            raise ValueError(f"ModelConfig.rotary_dim={self.rotary_dim}: {message}")
        if not 0.0 <= self.logit_soft_cap < float("inf"):
            raise ValueError(f"ModelConfig.logit_soft_cap={self.logit_soft_cap}: must be positive, or 0 for none")
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"ModelConfig.dropout={self.dropout}: must be in [0, 1)")
        same = "attention", "compressor", "compute_dtype", "matmul_dtype", "param_dtype", "remat"
        choices: dict[str, tuple] = {name: CHOICES[f"model.{name}"] for name in same}
        choices["selector"] = CHOICES["model.nsa.selector"]
        choices["implementation"] = (None, *sorted(IMPLEMENTATIONS))
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"ModelConfig.{name}={getattr(self, name)!r}: must be one of {allowed}")

    def _check_types(self) -> None:
        """Raises ValueError for a field of another type than its own, or a number that is not finite or too small.

        Scalars of NumPy become Python's.
        """
        kinds: dict[str, tuple[tuple[type, ...], str]] = {
            "int": ((int, np.integer), "a whole number"),
            "float": ((int, float, np.integer, np.floating), "a finite number"),
            "bool": ((bool, np.bool_), "True or False"),
            "NSAConfig": ((NSAConfig,), "an nsa_jax.NSAConfig"),
            "RopeScaling": ((RopeScaling,), "a RopeScaling"),
        }
        least = {"vocab_size": 0, "mlp_dim": 0, "value_head_dim": 0, "norm_eps": 0.0, "init_std": 0.0}
        for field in dataclasses.fields(self):
            types, expected = kinds.get(str(field.type), ((), ""))
            value = getattr(self, field.name)
            wrong = types and (not isinstance(value, types) or (isinstance(value, bool) and bool not in types))
            if wrong or (field.type == "float" and not math.isfinite(value)):
                raise ValueError(f"ModelConfig.{field.name}={value!r}: must be {expected}")
            if types and isinstance(value, np.generic):
                object.__setattr__(self, field.name, value.item())
            if field.name in least and value < least[field.name]:
                raise ValueError(f"ModelConfig.{field.name}={value!r}: must be at least {least[field.name]}")
        if self.rope_theta <= 0:
            raise ValueError(f"ModelConfig.rope_theta={self.rope_theta}: must be positive")
        scaling = f"RoPE scaling of the kind {self.rope_scaling.kind!r}"
        if self.rope_scaling.kind in ("dynamic", "yarn") and not self.rope_theta > 1:
            raise ValueError(f"ModelConfig.rope_theta={self.rope_theta}: {scaling} needs more than 1")
        turned = self.rotary_dim or self.head_dim
        if self.rope_scaling.kind == "dynamic" and turned < 4:
            raise ValueError(f"ModelConfig.rotary_dim={turned}: {scaling} needs at least 4")

    @property
    def branches(self) -> tuple[str, ...]:
        """The branches of sparse attention, in the order of its gates."""
        return ("selected", "window") if self.selector == "mean_key" else ("compressed", "selected", "window")

    @property
    def dtype(self) -> jnp.dtype:
        """Dtype of activations."""
        return jnp.dtype(self.compute_dtype)

    @property
    def keeps_products(self) -> bool:
        """Whether `remat` keeps results of matrix products, and what they are made of, for the backward pass."""
        return self.remat in ("none", "dots_saved")

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of attention over which the layers repeat: layer i has that of index i modulo their number."""
        return attention_kinds(vars(self))

    def layers_of(self, kind: str) -> tuple[int, ...]:
        """Indices of the layers with a kind of attention."""
        return tuple(i for i in range(self.num_layers) if self.kinds[i % len(self.kinds)] == kind)

    def of_layer(self, index: int) -> ModelConfig:
        """The config of one layer: `attention` is its kind, and there is no pattern."""
        return dataclasses.replace(self, attention=self.kinds[index % len(self.kinds)], layer_pattern=())

    @property
    def residual_std(self) -> float:
        """Initialisation of the 2 * num_layers projections that write to the residual stream."""
        return self.init_std * (2 * self.num_layers) ** -0.5

    def rope(self, x: jax.Array, positions: jax.Array, length: int = 0) -> jax.Array:
        """Queries or keys [B, T, N, H], turned at integer positions [T] or [B, T] of rows of `length` tokens."""
        return rope(x, positions, self.rope_theta, **self._rope(length))

    def rope_turns(self, positions: jax.Array, length: int = 0) -> tuple[jax.Array, jax.Array]:
        """The cosines and sines of `rope`, float32 [..., H/2] each."""
        return rope_turns(positions, self.head_dim, self.rope_theta, **self._rope(length))

    def _rope(self, length: int) -> dict[str, Any]:
        return dict(scaling=self.rope_scaling, rotary_dim=self.rotary_dim, length=length)

    @classmethod
    def from_config(cls, config: ConfigDict, vocab_size: int) -> ModelConfig:
        """The model of a training config.

        Args:
          config: as `nsa_jax.config.default_config` returns it.
          vocab_size: the tokenizer's; used where `config.model.vocab_size` is 0.
        """
        fields = {field.name for field in dataclasses.fields(cls)} - {
            "nsa",
            "selector",
            "shared_kv",
            "gate_bias",
            "rope_scaling",
            "implementation",
            "vocab_size",
            "deterministic",
            "matmul_dtype",
        }
        values = {name: getattr(config.model, name) for name in fields}
        implementation = None if config.model.implementation == "auto" else config.model.implementation
        return cls(
            **values,
            nsa=nsa_config(config),
            selector=config.model.nsa.selector,
            shared_kv=config.model.nsa.shared_kv,
            gate_bias=config.model.nsa.gate_bias,
            rope_scaling=RopeScaling(**config.model.rope_scaling.to_dict()),
            implementation=implementation,
            vocab_size=config.model.vocab_size or vocab_size,
            deterministic=config.train.deterministic,
        )
