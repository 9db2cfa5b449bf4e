"""What evaluation tasks ask of a model: log-likelihoods of continuations, batched by length, and generations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from nsa_jax.evaluate.scoring import Scorer
from nsa_jax.sampling import Sampling

_SHORTEST = 32  # rows are padded at least to this length, so that few programs are compiled
DEFAULT_NEW_TOKENS = 256  # where a task does not say how many: as in lm-evaluation-harness
_NEW_TOKENS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")  # the first given counts
_DRAWING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
_NEUTRAL = {
    "num_beams": 1,
    "num_return_sequences": 1,
    "use_cache": True,
    "early_stopping": False,
    "length_penalty": 1.0,
}


def padded_length(tokens: int, context: int) -> int:
    """The length that a row of this many tokens is padded to: a power of two, or the context if that is less."""
    return min(max(_SHORTEST, 1 << max(tokens - 1, 0).bit_length()), context)


def log_likelihoods(
    scorer: Scorer,
    pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
    *,
    context: int,
    batch_size: int,
    advance: Callable[[int], object] = lambda rows: None,
) -> list[tuple[float, bool]]:
    """The log-likelihood of each continuation after its context, and whether greedy decoding would produce it.

    A pair of more than `context` + 1 tokens loses tokens at the beginning of its context. Pairs are sorted by length,
    so that rows of a batch need little padding.

    Args:
      scorer: of the model.
      pairs: token ids of the context (at least one) and of the continuation.
      context: input tokens of a row at most.
      batch_size: rows at once.
      advance: called with the number of rows of each batch when it is done.

    Returns:
      For each pair nats (at most 0) and a truth value; (0.0, True) for an empty continuation.

    Raises:
      ValueError: a context is empty, or a continuation does not fit a row.
    """
    for before, after in pairs:
        if not len(before):
            raise ValueError("a context has no tokens: give at least one, such as the end-of-document token")
        if len(after) > context:
            raise ValueError(
                f"a continuation has {len(after):,} tokens, and rows have {context:,}: raise --context (beyond the "
                "training length, quality may suffer)"
            )
    rows = [np.asarray([*before, *after], np.int32)[-context - 1 :] for before, after in pairs]
    found: list[tuple[float, bool]] = [(0.0, True)] * len(rows)
    order = sorted(range(len(rows)), key=lambda index: -len(rows[index]))
    for at in range(0, len(order), batch_size):
        part = order[at : at + batch_size]
        inputs, targets = np.zeros((2, batch_size, padded_length(len(rows[part[0]]) - 1, context)), np.int32)
        for row, index in enumerate(part):
            length = len(rows[index]) - 1
            inputs[row, :length], targets[row, :length] = rows[index][:-1], rows[index][1:]
        losses, greedy = scorer.score(inputs, targets)
        for row, index in enumerate(part):
            end = len(rows[index]) - 1
            scored = slice(end - len(pairs[index][1]), end)
            found[index] = (-float(losses[row, scored].sum(dtype=np.float64)), bool(greedy[row, scored].all()))
        advance(len(part))
    return found


def generation_settings(given: dict[str, Any], seed: int = 0) -> tuple[list[str], int, Sampling]:
    """What a task's generation_kwargs ask for.

    Args:
      given: of the task. Without a positive temperature, or with do_sample=False, decoding is greedy.
      seed: of drawing.

    Returns:
      Stop strings, the largest number of new tokens, and how tokens are drawn.

    Raises:
      ValueError: a field is not supported, or has a value that is not possible.
    """
    rest = dict(given)
    until = rest.pop("until", None) or []
    stop = [until] if isinstance(until, str) else list(until)
    limits = [rest.pop(name, None) for name in _NEW_TOKENS]
    new_tokens = int(next((limit for limit in limits if limit is not None), DEFAULT_NEW_TOKENS))
    drawn = {name: rest.pop(name) for name in _DRAWING if rest.get(name) is not None}
    temperature = float(drawn.pop("temperature", 0.0))
    draws = rest.pop("do_sample", None)
    if draws and not temperature:
        raise ValueError("generation_kwargs: do_sample is set without a temperature; set one above 0")
    temperature = 0.0 if draws is False else temperature
    unknown = {name: value for name, value in rest.items() if value is not None and _NEUTRAL.get(name) != value}
    if unknown:
        raise ValueError(
            f"generation_kwargs {unknown}: not supported; leave them out of the task, or use {', '.join(_DRAWING)}"
        )
    if temperature == 0:
        drawn = {name: value for name, value in drawn.items() if name == "repetition_penalty"}
    return [text for text in stop if text], new_tokens, Sampling(temperature=temperature, seed=seed, **drawn)
