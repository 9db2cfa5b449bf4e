"""Validation: the loss over the held-out batches, what a few held-out queries select, and a text sample."""

from __future__ import annotations

import collections
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from nsa_jax.data import Pipeline
from nsa_jax.train import metrics
from nsa_jax.train.env import json_line
from nsa_jax.train.state import Setup, to_device
from nsa_jax.train.step import make_sampler
from nsa_jax.train.watch.health import Health


def evaluate(
    eval_step, params, pipeline: Pipeline, sharding, finished: Callable[[], None] = lambda: None
) -> tuple[dict[str, float], dict[str, Any]]:
    """The fixed validation batches of every source; `finished` is called after each.

    Returns:
      The metrics, and nats, tokens and bytes of text of all batches together; `nats_at` and `tokens_at` by position.
    """
    sums: dict[str, tuple[float, float, float]] = {}
    by_position = np.zeros((2, 1))
    for name, part in pipeline.parts.items():
        found: list[dict[str, Any]] = []
        running: collections.deque = collections.deque()
        batches = iter(part.pipeline.validation())
        while (batch := next(batches, None)) is not None or running:
            if batch is not None:
                running.append(eval_step(params, to_device(batch, sharding)))
            if batch is None or len(running) > 1:  # one runs while the next is read
                found.append(jax.device_get(running.popleft()))
                finished()
        nats, tokens, size = (math.fsum(float(batch[key]) for batch in found) for key in ("nats", "tokens", "bytes"))
        sums[name] = nats, tokens, size
        by_position = by_position + sum(np.array([b["nats_at"], b["tokens_at"]], np.float64) for b in found)
    total: dict[str, Any] = dict(
        zip(("nats", "tokens", "bytes"), map(math.fsum, zip(*sums.values(), strict=True)), strict=True)
    )
    total |= {"nats_at": by_position[0], "tokens_at": by_position[1]}
    if set(sums) == {""}:
        return metrics.validation_row(*sums[""]), total
    return metrics.mixed_validation_row(sums, pipeline.loss_shares), total


def record_validation(
    workdir: Path,
    step: int,
    sums: dict[str, Any],
    health: Health | None,
    params: Any,
    pipeline: Pipeline,
    sharding,
) -> None:
    """Appends loss by position, and the block lists of a few held-out queries, to validation.jsonl.

    Args:
      workdir: of the run.
      step: of the validation.
      sums: as `evaluate` returns them.
      health: computes the lists; None leaves them out.
      params: that were validated.
      pipeline: whose first validation batch holds the queries.
      sharding: of batches.
    """
    row: dict[str, Any] = {"step": step, "position": []}
    batch = next(iter(next(iter(pipeline.parts.values())).pipeline.validation()))
    length = batch["inputs"].shape[1]
    for number, (nats, tokens) in enumerate(zip(sums["nats_at"], sums["tokens_at"], strict=True)):
        if tokens > 0:
            first = 2 ** (number - 1) if number else 0
            end, loss = min(max(2 * first, 1), length), float(f"{nats / tokens:.6g}")
            row["position"].append({"from": first, "to": end, "loss": loss, "tokens": int(tokens)})
    if health is not None:
        row["selection"] = health.sampled_lists(params, to_device(batch, sharding), pipeline.tokenizer)
    if jax.process_index() == 0:
        with (workdir / "validation.jsonl").open("a") as file:
            file.write(json_line(row))


class Sampler:
    """Writes a text sample with the current parameters."""

    def __init__(self, setup: Setup, pipeline: Pipeline):
        train, tokenizer = setup.config.train, pipeline.tokenizer
        # As a document begins in training, where no token sees the end of the document before it, and none is trained
        # to predict a document's first token: an empty prompt is a line break.
        prompt = np.asarray(tokenizer.encode(train.sample_prompt or "\n"), np.int32)
        if not prompt.size:  # a tokenizer that leaves white space out
            prompt = np.array([tokenizer.eos_id], np.int32)
        # The row must not be longer than training's: the model has seen no later position.
        self._prompt = prompt[: max(setup.config.data.seq_len - 1, 1)]
        length = min(len(self._prompt) + train.sample_tokens, setup.config.data.seq_len)
        self._tokens = np.zeros((1, length), np.int32)
        self._tokens[0, : len(self._prompt)] = self._prompt
        self._sample = make_sampler(setup, length, tokenizer.vocab_size)
        self._key = jax.random.key(setup.config.seed)
        self._tokenizer = tokenizer

    def __call__(self, params, step: int) -> str:
        key = jax.random.fold_in(self._key, step)
        row = np.asarray(self._sample(params, self._tokens, len(self._prompt), key))[0]
        (ends,) = np.nonzero(row[len(self._prompt) :] == self._tokenizer.eos_id)
        return self._tokenizer.decode(row[: len(self._prompt) + ends[0]] if ends.size else row)
