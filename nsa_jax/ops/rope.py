"""Rotary position embedding (Su et al., arXiv 2104.09864) and the ways of stretching it to longer rows.

Feature i of the first half of a head and feature i of its second half form a pair, which is turned by
position * frequency(i). Scores then depend on differences of positions only.
"""

from __future__ import annotations

import dataclasses
import math
import numbers

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

KINDS = ("none", "linear", "dynamic", "llama3", "yarn")


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """How frequencies change so that a model can read rows longer than those it was trained on.

    The kinds are those of transformers' `rope_scaling`:
      linear: all frequencies are divided by `factor` (arXiv 2306.15595).
      dynamic: the base grows with the row once it is longer than `original_length` ("NTK-aware").
      llama3: low frequencies are divided by `factor`, high ones are kept, those between are interpolated (Llama 3.1).
      yarn: the same by a linear ramp between two numbers of turns, and cosines and sines are scaled by
        `attention_factor` (arXiv 2309.00071).

    Attributes:
      kind: none | linear | dynamic | llama3 | yarn.
      factor: how many times longer rows may be; at least 1.
      original_length: tokens of the rows that the model was trained on; needed by all kinds but none and linear.
      low_freq_factor: llama3: wavelengths beyond original_length / low_freq_factor are stretched by `factor`.
      high_freq_factor: llama3: wavelengths under original_length / high_freq_factor are kept.
      beta_fast: yarn: pairs that make at least so many turns within original_length are kept.
      beta_slow: yarn: pairs that make at most so many turns within original_length are stretched by `factor`.
      attention_factor: yarn: of cosines and sines; 0 means 0.1 ln(factor) + 1.

    Raises:
      ValueError: naming the field.
    """

    kind: str = "none"
    factor: float = 1.0
    original_length: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 0.0

    def __post_init__(self):
        if self.kind not in KINDS:
            raise ValueError(f"rope_scaling.kind={self.kind!r}: must be one of {', '.join(KINDS)}")
        for field in dataclasses.fields(self)[1:]:
            number = getattr(self, field.name)
            if isinstance(number, bool) or not isinstance(number, numbers.Real) or not math.isfinite(number):
                raise ValueError(f"rope_scaling.{field.name}={number!r}: must be a finite number")
        if not self.factor >= 1:
            raise ValueError(f"rope_scaling.factor={self.factor}: must be at least 1")
        if self.attention_factor < 0:
            raise ValueError(f"rope_scaling.attention_factor={self.attention_factor}: must not be negative")
        if self.kind in ("dynamic", "llama3", "yarn") and self.original_length < 1:
            message = "must be the tokens of the rows that the model was trained on"
            raise ValueError(f"rope_scaling.original_length={self.original_length}: {message}")
        if self.kind == "llama3" and not 0 < self.low_freq_factor < self.high_freq_factor:
            message = f"must be positive and less than high_freq_factor={self.high_freq_factor}"
            raise ValueError(f"rope_scaling.low_freq_factor={self.low_freq_factor}: {message}")
        if self.kind == "yarn" and not 0 < self.beta_slow <= self.beta_fast:
            message = f"must be positive and at most beta_fast={self.beta_fast}"
            raise ValueError(f"rope_scaling.beta_slow={self.beta_slow}: {message}")

    @property
    def amplitude(self) -> float:
        """What cosines and sines are multiplied by."""
        if self.kind != "yarn":
            return 1.0
        return self.attention_factor or 0.1 * math.log(self.factor) + 1.0


def _frequencies(dim: int, theta: float, scaling: RopeScaling, length: int) -> jax.Array:
    """Radians per token of each of dim/2 pairs, float32."""
    half, original = dim // 2, scaling.original_length
    if scaling.kind == "dynamic" and length > original and dim > 2:  # a single pair turns by 1 whatever the base
        theta *= (scaling.factor * length / original - (scaling.factor - 1)) ** (dim / (dim - 2))
    index = jnp.arange(half, dtype=jnp.float32)
    frequency = theta ** (-index / half)
    if scaling.kind == "linear":
        return frequency / scaling.factor
    if scaling.kind == "llama3":
        turns = original * frequency / (2 * math.pi)
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        kept = jnp.clip((turns - low) / (high - low), 0.0, 1.0)
    elif scaling.kind == "yarn":

        def pair_with(turns: float) -> float:  # the pair that makes so many turns within the original length
            return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

        low = max(math.floor(pair_with(scaling.beta_fast)), 0)
        high = min(math.ceil(pair_with(scaling.beta_slow)), dim - 1)
        kept = 1.0 - jnp.clip((index - low) / max(high - low, 0.001), 0.0, 1.0)
    else:
        return frequency
    return frequency * kept + frequency / scaling.factor * (1.0 - kept)


def rope_turns(
    positions: jax.Array,
    dim: int,
    theta: float,
    *,
    scaling: RopeScaling = RopeScaling(),
    rotary_dim: int = 0,
    length: int = 0,
) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines of RoPE for heads of size `dim`.

    Args:
      positions: integer [...].
      dim: H, even.
      theta: base of the frequencies.
      scaling: see `RopeScaling`.
      rotary_dim: features that are turned: of each half the first rotary_dim / 2; 0 means all.
      length: tokens of the row; the kind "dynamic" depends on it.

    Returns:
      Two float32 arrays [..., dim/2].
    """
    half, turned = dim // 2, (rotary_dim or dim) // 2
    frequency = _frequencies(2 * turned, theta, scaling, length)
    if turned < half:
        frequency = jnp.pad(frequency, (0, half - turned))
    angle = positions.astype(jnp.float32)[..., None] * frequency
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    if scaling.amplitude == 1.0:
        return cos, sin
    amplitude = jnp.where(jnp.arange(half) < turned, jnp.float32(scaling.amplitude), 1.0)
    return cos * amplitude, sin * amplitude


def rope(
    x: Float[Array, "B T N H"],
    positions: jax.Array,
    theta: float,
    *,
    scaling: RopeScaling = RopeScaling(),
    rotary_dim: int = 0,
    length: int = 0,
) -> Float[Array, "B T N H"]:
    """Rotary position embedding, applied to every head by itself, in float32.

    Args:
      x: [B, T, N, H], H even.
      positions: integer [T] or [B, T].
      theta, scaling, rotary_dim, length: see `rope_turns`.

    Returns:
      [B, T, N, H] in x's dtype.
    """
    turns = rope_turns(positions, x.shape[-1], theta, scaling=scaling, rotary_dim=rotary_dim, length=length)
    cos, sin = (turn[..., None, :] for turn in turns)  # [(B,) T, 1, H/2]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
