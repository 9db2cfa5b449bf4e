"""What a model predicts at a few positions, which blocks it lists there, and the same with branches shut."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from nsa_jax.data.long_tasks import Answer, Row
from nsa_jax.nn import NSAttention, Transformer
from nsa_jax.nn.observe import walk_blocks
from nsa_jax.nn.replicas import Replicas
from nsa_jax.nn.transformer import layer_stacks


class Probe:
    """A model's most likely tokens, and the block lists behind them, at a few positions of each row.

    Args:
      model: the Transformer.
      vocab_size: ids from this number on are padding of the model's vocabulary, which nothing predicts; None: none is.
      devices: over which rows are spread, each with the whole model; None means the first.
    """

    def __init__(self, model: Transformer, vocab_size: int | None = None, devices: Sequence[jax.Device] | None = None):
        self.model = model
        self.config = model.config
        self._vocab_size = vocab_size
        self._run = Replicas(self._forward, model, devices or jax.local_devices()[:1], out_axes=(0, 1))

    def of(self, model: Transformer) -> Probe:
        """A probe of a model of the same config with other parameters; it runs the same compiled programs."""
        other = copy.copy(self)
        other.model, other._run = model, self._run.of(model)
        return other

    def without(self, *branches: int) -> Probe:
        """A probe of `without_branch(model, *branches)`."""
        return self.of(without_branch(self.model, *branches))

    def _forward(self, model: Transformer, tokens, positions):
        rows = jnp.arange(tokens.shape[0])[:, None]

        def attend(attention, normed):
            if not isinstance(attention, NSAttention):
                return attention(normed), None
            out, lists = attention(normed, return_block_indices=True)
            return out, lists[rows, positions]  # [B, P, K, n]: all lists of a long row would take much memory

        hidden, lists = walk_blocks(model, tokens, attend)
        logits = model.logits(hidden[rows, positions])
        return jnp.argmax(logits[..., : self._vocab_size], axis=-1), lists

    def __call__(self, tokens: np.ndarray, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        """Runs the forward pass.

        Args:
          tokens: int32 [B, T].
          positions: int32 [B, P], query positions to look at.

        Returns:
          The most likely next tokens int [B, P]; the block lists int32 [NSA layers, B, P, K, n], or None
          without selection.
        """
        return self._run(tokens, positions)


def picked(lists: np.ndarray, target: np.ndarray, select_block: int) -> np.ndarray:
    """Whether each head's list holds the block of a position.

    Args:
      lists: int32 [layers, B, P, K, n].
      target: int [B, P], positions that each query should read.
      select_block: l'.

    Returns:
      bool [layers, B, P, K].
    """
    return (lists == (target // select_block)[None, :, :, None, None]).any(-1)


def without_branch(model: Transformer, *branches: int) -> Transformer:
    """A copy of an NSA model whose gates shut one branch or several, by their places in `config.branches`."""
    model, shut = nnx.clone(model), np.array(branches, int)
    for stack in layer_stacks(model.blocks, model.config):
        if isinstance(stack.attention, NSAttention):
            bias = stack.attention.gate_bias
            bias[...] = bias[...].at[..., shut].set(-1e4)
    return model


@dataclasses.dataclass(frozen=True)
class Scored:
    """An answer of a row of a task, and how it went."""

    task: str
    answer: Answer
    right: bool
    listed: np.ndarray | None  # bool [layers, K]: whether lists of its first token's query hold the source's block


def score_rows(probe: Probe, rows: Sequence[tuple[str, Row]], batch_size: int) -> list[Scored]:
    """Runs rows of tasks, of one length each; all have one compiled shape.

    An answer is right if every one of its tokens is the most likely one after those before it, which is what greedy
    decoding would write.

    Args:
      probe: of a model.
      rows: the tasks' names and their rows.
      batch_size: rows at once.

    Returns:
      The rows' answers in their order.
    """
    positions = [
        np.concatenate([np.arange(a.first, a.end) for a in row.answers]) - 1 for _, row in rows
    ]  # of the queries that predict the answers
    width = max(map(len, positions))
    found = []
    for first in range(0, len(rows), batch_size):
        part = list(rows[first : first + batch_size])
        count = len(part)
        part = part + [part[-1]] * (batch_size - count)
        tokens = np.stack([row.tokens for _, row in part])
        at = [positions[min(first + i, len(rows) - 1)] for i in range(batch_size)]
        queries = np.stack([np.pad(p, (0, width - len(p)), mode="edge") for p in at])
        most_likely, lists = probe(tokens, queries)
        right = most_likely == np.take_along_axis(tokens, queries + 1, axis=1)
        for i, (name, row) in enumerate(part[:count]):
            done = 0
            for answer in row.answers:
                size = answer.end - answer.first
                listed = None
                if lists is not None:
                    of_query = lists[:, i : i + 1, done : done + 1]
                    source = np.array([[answer.source]])
                    listed = picked(of_query, source, probe.config.nsa.select_block)[:, 0, 0]
                found.append(Scored(name, answer, bool(right[i, done : done + size].all()), listed))
                done += size
    return found
