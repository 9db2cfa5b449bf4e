"""Block lists, gates and attention of a model as NumPy arrays."""

from __future__ import annotations

import dataclasses
import functools
import unicodedata
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from nsa_jax.config import NSAConfig
from nsa_jax.data import Tokenizer
from nsa_jax.inspect.statistics import attention_statistics, branch_probabilities, spread_over_tokens
from nsa_jax.nn import NSAttention, Transformer
from nsa_jax.nn.observe import NSAArrays, run_attention, run_branches, walk_layers
from nsa_jax.ops import blocks


@dataclasses.dataclass(frozen=True)
class Capture:
    """What every NSA layer selected and how it attended. L layers, branches in the order compressed, selected, window.

    Attributes:
      config: the operator's.
      lists: int32 [L, B, T, K, n], the block lists: ascending, padded with J.
      gates: float32 [L, B, T, N, 3].
      sizes: float32 [L, B, T, N, 3], Euclidean norm of gate * branch output: what each branch adds.
      entropy: float32 [L, B, T, N, 3], of the branch's probabilities, nats.
      largest: float32 [L, B, T, N, 3], the highest probability.
      distance: float32 [L, B, T, N, 3], mean distance to what is read, tokens.
      beyond_window: float32 [L, B, T, N, 3], share read from keys that the window does not reach.
      segment_start: int32 [B, T], first position of each token's document.
      layers: indices of the L layers in the model, which may have others between them.
    """

    config: NSAConfig
    lists: np.ndarray
    gates: np.ndarray
    sizes: np.ndarray
    entropy: np.ndarray
    largest: np.ndarray
    distance: np.ndarray
    beyond_window: np.ndarray
    segment_start: np.ndarray
    layers: tuple[int, ...]

    @property
    def num_layers(self) -> int:
        """L."""
        return self.lists.shape[0]

    @property
    def num_blocks(self) -> int:
        """J, selection blocks of the row."""
        return blocks.num_selection_blocks(self.lists.shape[2], self.config.select_block)


@dataclasses.dataclass(frozen=True)
class Reading:
    """What a few queries read: gate * probability of each branch. P queries per row.

    The sum over the last axis is the gate, or 0 where a branch sees nothing. The weights times the values, summed over
    the branches, are the layer's attention output.

    Attributes:
      config: the operator's.
      positions: int32 [B, P], the queries.
      compressed: float32 [L, B, P, N, C], over compressed blocks.
      selected: float32 [L, B, P, N, S], over tokens.
      window: float32 [L, B, P, N, S], over tokens.
      layers: indices of the L layers in the model.
    """

    config: NSAConfig
    positions: np.ndarray
    compressed: np.ndarray
    selected: np.ndarray
    window: np.ndarray
    layers: tuple[int, ...]

    def tokens(self) -> np.ndarray:
        """Sum of the branches over source tokens, float32 [L, B, P, N, S]; blocks' weights are spread over tokens."""
        spread = spread_over_tokens(self.compressed, self.selected.shape[-1], self.config)
        return spread + self.selected + self.window

    def branches(self) -> np.ndarray:
        """Each branch over source tokens: float32 [L, B, P, N, S, 3]."""
        spread = spread_over_tokens(self.compressed, self.selected.shape[-1], self.config)
        return np.stack([spread, self.selected, self.window], axis=-1)


def _look(arrays: NSAArrays, config: NSAConfig, segment_start) -> dict[str, jax.Array]:
    """The arrays of a `Capture`, of one layer."""
    sizes = [
        jnp.linalg.norm(arrays.gates[..., i, None] * out.astype(jnp.float32), axis=-1)
        for i, out in enumerate(arrays.outputs)
    ]
    keys = (arrays.key_cmp, arrays.key_slc, arrays.key_win)
    statistics = attention_statistics(arrays.query, *keys, arrays.lists, config=config, segment_start=segment_start)
    return {"lists": arrays.lists, "gates": arrays.gates, "sizes": jnp.stack(sizes, -1), **statistics}


def _read(arrays: NSAArrays, config: NSAConfig, segment_start, positions) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The arrays of a `Reading`, of one layer."""
    rows = jnp.arange(positions.shape[0])[:, None]
    query, lists, gates = (x[rows, positions] for x in (arrays.query, arrays.lists, arrays.gates))
    start = None if segment_start is None else segment_start[rows, positions]
    keys = (arrays.key_cmp, arrays.key_slc, arrays.key_win)
    found = branch_probabilities(query, *keys, lists, config=config, segment_start=start, positions=positions)
    weights = [gates[..., i, None].astype(jnp.float32) * probs for i, probs in enumerate(found)]
    return weights[0], weights[1], weights[2]


def _capture(
    found: dict[str, jax.Array],
    config: NSAConfig,
    segment_start,
    shape: tuple[int, ...],
    layers: tuple[int, ...] = (0,),
) -> Capture:
    start = np.zeros(shape, np.int32) if segment_start is None else np.asarray(segment_start, np.int32)
    return Capture(
        config=config, segment_start=start, layers=layers, **{name: np.asarray(x) for name, x in found.items()}
    )


def _int32(x) -> jax.Array | None:
    return None if x is None else jnp.asarray(x, jnp.int32)


def _positions(positions, batch: int) -> jax.Array:
    """int32 [B, P] from an int, [P] or [B, P]."""
    positions = np.atleast_1d(np.asarray(positions, np.int32))
    return jnp.asarray(np.broadcast_to(positions, (batch, positions.shape[-1])))


@functools.partial(jax.jit, static_argnums=0)
def _capture_model(graphdef, params, tokens, segment_start):
    model: Transformer = nnx.merge(graphdef, params)
    look = functools.partial(_look, config=model.config.nsa, segment_start=segment_start)
    return walk_layers(model, tokens, segment_start, look)[1]


@functools.partial(jax.jit, static_argnums=0)
def _read_model(graphdef, params, tokens, segment_start, positions):
    model: Transformer = nnx.merge(graphdef, params)
    look = functools.partial(_read, config=model.config.nsa, segment_start=segment_start, positions=positions)
    return walk_layers(model, tokens, segment_start, look)[1]


def capture(model: Transformer, tokens, segment_start=None) -> Capture:
    """Runs a model and returns what its NSA layers selected and how they attended.

    Args:
      model: a Transformer with NSA layers, scanned or not, such as `nsa_jax.load` returns.
      tokens: int [B, T].
      segment_start: int [B, T], first position of each token's document; None if rows hold one document.

    Raises:
      ValueError: the model has no NSA layers.
    """
    tokens, start = jnp.asarray(tokens, jnp.int32), _int32(segment_start)
    found = _capture_model(*nnx.split(model), tokens, start)
    return _capture(found, model.config.nsa, start, tokens.shape, model.config.layers_of("nsa"))


def capture_layer(attention: NSAttention, h, segment_start=None) -> Capture:
    """As `capture`, for one `NSAttention` module of your own model and its input h [B, T, D]: L = 1."""

    @jax.jit
    def run(params, h, start):
        arrays = run_attention(nnx.merge(graphdef, params), h, start)
        return jax.tree.map(lambda x: x[None], _look(arrays, attention.config.nsa, start))

    graphdef, params = nnx.split(attention)
    start = _int32(segment_start)
    return _capture(run(params, h, start), attention.config.nsa, start, h.shape[:2])


def capture_arrays(
    *arrays: jax.Array, config: NSAConfig, segment_start=None, implementation: str | None = None
) -> Capture:
    """As `capture`, for the operator alone, which may be called from any framework: L = 1.

    Args:
      *arrays: query, key_cmp, value_cmp, key_slc, value_slc, key_win, value_win, gates, as `nsa_jax.nsa_attention`
        takes them.
      config: the operator's.
      segment_start: int [B, T] or None.
      implementation: of the operator.
    """
    start = _int32(segment_start)

    @jax.jit
    def run(arrays, start):
        found = run_branches(*arrays, config=config, segment_start=start, implementation=implementation)
        return jax.tree.map(lambda x: x[None], _look(found, config, start))

    return _capture(run(arrays, start), config, start, arrays[0].shape[:2])


def read_weights(model: Transformer, tokens, positions, segment_start=None) -> Reading:
    """What the model's NSA layers read at a few positions, when it predicts the tokens after them.

    Args:
      model: a Transformer with NSA layers.
      tokens: int [B, T].
      positions: query positions: an int, [P] for all rows, or [B, P].
      segment_start: int [B, T] or None.

    Raises:
      ValueError: the model has no NSA layers.
    """
    tokens, start = jnp.asarray(tokens, jnp.int32), _int32(segment_start)
    positions = _positions(positions, tokens.shape[0])
    found = _read_model(*nnx.split(model), tokens, start, positions)
    compressed, selected, window = map(np.asarray, found)
    layers = model.config.layers_of("nsa")
    return Reading(model.config.nsa, np.asarray(positions), compressed, selected, window, layers)


def read_weights_arrays(
    *arrays: jax.Array, positions, config: NSAConfig, segment_start=None, implementation: str | None = None
) -> Reading:
    """As `read_weights`, for the operator alone: L = 1. `capture_arrays` and `read_weights` explain the arguments."""
    start = _int32(segment_start)
    positions = _positions(positions, arrays[0].shape[0])

    @jax.jit
    def run(arrays, start, positions):
        found = run_branches(*arrays, config=config, segment_start=start, implementation=implementation)
        return jax.tree.map(lambda x: x[None], _read(found, config, start, positions))

    compressed, selected, window = map(np.asarray, run(arrays, start, positions))
    return Reading(config, np.asarray(positions), compressed, selected, window, (0,))


def token_strings(tokenizer: Tokenizer, tokens: Sequence[int] | np.ndarray) -> list[str]:
    """The text of each single token; that of the end-of-document token is empty."""
    return tokenizer.decode_each(tokens)


def token_kinds(strings: Sequence[str]) -> np.ndarray:
    """The kind of each token by its first visible character: letter, digit, space, newline, punctuation or other.

    Args:
      strings: as `token_strings` returns them.

    Returns:
      array of str, one per token.
    """

    def kind(text: str) -> str:
        if not text.strip():
            return "newline" if "\n" in text else "space" if text else "other"
        category: Any = unicodedata.category(text.strip()[0])[0]
        return {"L": "letter", "N": "digit", "P": "punctuation", "S": "punctuation"}.get(category, "other")

    return np.array([kind(text) for text in strings])
