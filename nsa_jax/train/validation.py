"""Validation: the loss over the held-out batches, and a text sample."""

from __future__ import annotations

import math

import jax
import numpy as np

from nsa_jax.data import Pipeline
from nsa_jax.train import metrics
from nsa_jax.train.state import Setup, to_device
from nsa_jax.train.step import make_sampler


def validation_sums(eval_step, params, batches, sharding) -> dict[str, float]:
    """Nats, tokens and bytes of text of the fixed validation batches."""
    parts = [eval_step(params, to_device(batch, sharding)) for batch in batches]
    return {name: math.fsum(float(part[name]) for part in jax.device_get(parts)) for name in parts[0]}


def evaluate(eval_step, params, batches, sharding) -> dict[str, float]:
    """Validation metrics over the fixed validation batches."""
    sums = validation_sums(eval_step, params, batches, sharding)
    return metrics.validation_row(sums["nats"], sums["tokens"], sums["bytes"])


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
