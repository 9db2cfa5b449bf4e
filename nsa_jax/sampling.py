"""Selection of the next token: greedy, temperature, top-k, top-p, min-p and repetition penalty, on the device."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

# Of float32, the settings' dtype on the device.
_LEAST, _MOST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)


def _whole(value) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool) and bool(value >= 0)


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. Filters apply in the order of the fields, each to the result of the one before.

    Attributes:
      repetition_penalty: divides positive and multiplies negative logits of tokens that the row already holds; 1: off.
      temperature: divides logits; 0: always the most likely token (greedy).
      top_k: keep this many most likely tokens, and those as likely as the last of them; 0: all.
      top_p: keep the most likely tokens that together have at least this probability, and those as likely as the last
        of them; 1: all.
      min_p: keep tokens with at least this share of the most likely token's probability; 0: all.
      seed: at least 0, of any size; the same seed, prompts and settings give the same texts. A prompt's place in
        the list counts: each row draws numbers of its own.

    Raises:
      ValueError: naming the field.
    """

    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0

    def __post_init__(self):
        for name, value in dataclasses.asdict(self).items():
            if np.ndim(value) or not hasattr(value, "__float__"):
                raise ValueError(f"{name}={value!r}: must be a number")
        for name, good, rule in (
            (
                "repetition_penalty",
                _LEAST <= self.repetition_penalty <= _MOST,
                "must be positive and finite, as float32",
            ),
            (
                "temperature",
                0 <= self.temperature <= _MOST,
                "must be 0 (greedy) or positive, and finite, as float32",
            ),
            ("top_k", _whole(self.top_k) and self.top_k < 2**31, "must be a whole number, 0 (off) or below 2**31"),
            ("top_p", 0 < self.top_p <= 1, "must be in (0, 1]"),
            ("min_p", 0 <= self.min_p < 1, "must be in [0, 1)"),
            ("seed", _whole(self.seed), "must be a whole number of at least 0"),
        ):
            if not good:
                raise ValueError(f"{name}={getattr(self, name)}: {rule}")

    def key(self) -> jax.Array:
        """The PRNG key of the seed, of which every bit counts; up to 32 bits it is `jax.random.key(seed)`."""
        key, rest = jax.random.key(int(self.seed) % 2**32), int(self.seed) >> 32
        while rest:
            key, rest = jax.random.fold_in(key, rest % 2**32), rest >> 32
        return key

    def arrays(self) -> Settings:
        """The settings as arrays, so that other values use the same compiled program."""
        return Settings(
            np.float32(self.repetition_penalty),
            np.float32(self.temperature),
            np.float32(self.top_p),
            np.float32(self.min_p),
            np.int32(self.top_k),
        )


class Settings(NamedTuple):
    """`Sampling` as scalars for a compiled function."""

    repetition_penalty: Any
    temperature: Any
    top_p: Any
    min_p: Any
    top_k: Any


def filtered_logits(logits: jax.Array, seen: jax.Array, settings: Settings, vocab_size: int) -> jax.Array:
    """Logits after penalty, temperature and filters, 0 for the most likely token and -inf where one may not be drawn.

    Args:
      logits: float32 [B, vocab].
      seen: bool [B, vocab], tokens that each row already holds.
      settings: scalars.
      vocab_size: ids from this number on are padding of the model's vocabulary.

    Returns:
      float32 [B, vocab].
    """
    logits = jnp.where(jnp.arange(logits.shape[-1]) < vocab_size, logits, -jnp.inf)
    penalty = jnp.where(logits > 0, 1 / settings.repetition_penalty, settings.repetition_penalty)
    most = jnp.finfo(jnp.float32).max
    # A product may be infinite: the likeliest of tokens that are all so unlikely is still drawn.
    logits = jnp.where(seen & (logits > -jnp.inf), jnp.maximum(logits * penalty, -most), logits)
    logits = jnp.minimum(logits, most)
    logits -= jnp.max(logits, axis=-1, keepdims=True)  # so that the most likely token stays finite
    tiny = jnp.finfo(jnp.float32).tiny  # numbers below count as 0
    logits = logits / jnp.where(settings.temperature > 0, jnp.maximum(settings.temperature, tiny), 1.0)
    ranked = -jnp.sort(-logits, axis=-1)
    vocab_size = min(vocab_size, logits.shape[-1])
    count = jnp.where(settings.top_k > 0, jnp.minimum(settings.top_k, vocab_size), vocab_size)
    threshold = jnp.take_along_axis(ranked, jnp.broadcast_to(count - 1, (logits.shape[0], 1)), axis=-1)
    ranked = jnp.where(ranked >= threshold, ranked, -jnp.inf)
    probs = jax.nn.softmax(ranked, axis=-1)
    before = jnp.cumsum(probs, axis=-1) - probs  # probability of all more likely tokens
    # The sum of all before the last may round to 1, where 1 means all. A top_p of 1e-50 is 0 in float32: one stays.
    kept = ((before < settings.top_p) | (settings.top_p >= 1)) & (probs >= settings.min_p * probs[:, :1]) & (probs > 0)
    kept = kept.at[:, 0].set(True)
    lowest = jnp.min(jnp.where(kept, ranked, jnp.inf), axis=-1, keepdims=True)
    return jnp.where(logits >= lowest, logits, -jnp.inf)


def sample(logits, seen, keys, settings: Settings, vocab_size: int) -> jax.Array:
    """Draws one token per row.

    Args:
      logits: float32 [B, vocab].
      seen: bool [B, vocab].
      keys: PRNG keys [B], one per row, so that a row's draw does not depend on the others.
      settings: scalars.
      vocab_size: ids that may be drawn are below this.

    Returns:
      int32 [B]; -1 for a row whose logits hold a NaN.
    """
    logits = filtered_logits(logits, seen, settings, vocab_size)
    drawn = jax.vmap(jax.random.categorical)(keys, logits)
    drawn = jnp.where(settings.temperature > 0, drawn, jnp.argmax(logits, axis=-1))
    # Among logits that may be drawn one is 0, unless a NaN was compared with all of them.
    return jnp.where(jnp.isneginf(logits).all(axis=-1), -1, drawn).astype(jnp.int32)
