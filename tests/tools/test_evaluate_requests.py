"""Requests of evaluation tasks: what is scored, how rows are batched and cut, how generation settings are read."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from flax import nnx

from nsa_jax import evaluate, nn
from nsa_jax.evaluate.requests import generation_settings, log_likelihoods, padded_length

from .runs import small_config


def test_log_likelihoods_are_those_of_the_full_logits():
    """Pairs of unlike lengths, one longer than a row, one that is what greedy decoding produces, one empty."""
    model = nn.Transformer(nn.ModelConfig.from_config(small_config(), 257), rngs=nnx.Rngs(0))
    log_probs = jax.jit(lambda tokens: jax.nn.log_softmax(model(tokens)))
    rng, context = np.random.default_rng(0), 64
    pairs = [
        (rng.integers(0, 256, a).tolist(), rng.integers(0, 256, b).tolist()) for a, b in ((1, 1), (9, 30), (90, 7))
    ]
    probe = np.zeros((1, context), np.int32)
    probe[0, :20] = rng.integers(0, 256, 20)
    pairs += [(probe[0, :20].tolist(), [int(np.argmax(log_probs(probe)[0, 19]))]), ([5], [])]
    found = log_likelihoods(evaluate.Scorer(model), pairs, context=context, batch_size=3)
    for (before, after), (nats, greedy) in zip(pairs, found, strict=True):
        kept = [*before, *after][-context - 1 :]
        row = np.zeros((1, context), np.int32)
        row[0, : len(kept) - 1] = kept[:-1]
        scored = np.asarray(log_probs(row))[0, len(kept) - 1 - len(after) : len(kept) - 1]
        assert nats == pytest.approx(scored[np.arange(len(after)), after].sum(), rel=1e-5, abs=1e-6)
        assert greedy == (scored.argmax(-1) == after).all()
    assert [greedy for _, greedy in found] == [False, False, False, True, True]


class Recorder:
    """A scorer that keeps what it was given; a target costs as many nats as its position in the row."""

    def __init__(self):
        self.seen = []

    def score(self, inputs, targets):
        self.seen.append(inputs)
        return np.broadcast_to(np.arange(inputs.shape[1], dtype=np.float32), inputs.shape), targets % 2 == 0


def test_rows_are_sorted_by_length_cut_at_the_left_and_padded_to_few_lengths():
    lengths = [3, 200, 70, 5, 40, 150, 4]
    pairs = [(range(1, n), [1000 + n, 1002 + n]) for n in lengths]
    scorer, done = Recorder(), []
    found = log_likelihoods(scorer, pairs, context=100, batch_size=2, advance=done.append)
    assert [seen.shape for seen in scorer.seen] == [(2, 100), (2, 100), (2, 32), (2, 32)] and done == [2, 2, 2, 1]
    first = [[int(row[0]) for row in seen] for seen in scorer.seen]
    assert first == [[101, 51], [1, 1], [1, 1], [1, 0]]
    for n, (nats, greedy) in zip(lengths, found, strict=True):
        last = min(n, 100) - 1
        assert (nats, greedy) == (-(last + last - 1), n % 2 == 0)
    assert [padded_length(n, 100) for n in (1, 32, 33, 64, 65, 100)] == [32, 32, 64, 64, 100, 100]


def test_pairs_that_cannot_be_scored_are_refused():
    for pair, words in ((([], [1]), "context has no tokens"), (([1], [1] * 9), "9 tokens, and rows have 8.*--context")):
        with pytest.raises(ValueError, match=words):
            log_likelihoods(Recorder(), [pair], context=8, batch_size=1)


def test_generation_settings():
    stop, new_tokens, sampling = generation_settings({"until": ["\n", ""], "max_gen_toks": 7, "do_sample": False})
    assert (stop, new_tokens, sampling.temperature) == (["\n"], 7, 0.0)
    stop, new_tokens, sampling = generation_settings(
        {"until": "END", "temperature": 0.5, "top_k": 3, "num_beams": 1}, 9
    )
    assert (stop, new_tokens) == (["END"], 256) and (sampling.temperature, sampling.top_k, sampling.seed) == (0.5, 3, 9)
    stop, _, sampling = generation_settings({"temperature": 0.7, "top_p": 0.5, "do_sample": False, "max_new_tokens": 2})
    assert stop == [] and (sampling.temperature, sampling.top_p) == (0.0, 1.0)
    with pytest.raises(ValueError, match="do_sample is set without a temperature"):
        generation_settings({"do_sample": True})
    with pytest.raises(ValueError, match="num_beams.*not supported"):
        generation_settings({"num_beams": 4})
