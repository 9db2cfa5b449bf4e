"""Whether a model answers what only far tokens tell, and which of its branches does."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from ml_collections import ConfigDict

from nsa_jax.config import NSAConfig
from nsa_jax.data import Tokenizer
from nsa_jax.data.long_tasks import TASKS, Answer, Row, parse_tasks
from nsa_jax.data.synthetic import row_generator
from nsa_jax.fields import source_configs
from nsa_jax.inspect.capture import read_weights, token_strings
from nsa_jax.inspect.figures import draw_reading
from nsa_jax.inspect.probe import Probe, Scored, score_rows
from nsa_jax.inspect.terminal import describe_reading
from nsa_jax.ops import blocks


@dataclasses.dataclass(frozen=True)
class FarTask:
    """Held-out rows of the tasks that a run trains on.

    Attributes:
      weights: of the tasks, by name; a row's task is drawn by them.
      seq_len: T, tokens of a row.
      reach: a question is far if the answer's source lies further back than so many tokens.
      seed: of the run.
      tokenizer: of the run.
    """

    weights: dict[str, float]
    seq_len: int
    reach: int
    seed: int
    tokenizer: Tokenizer

    def rows(self, count: int) -> list[tuple[str, Row]]:
        """The first rows, each with its task's name; training draws its rows from other generators."""
        names, shares = list(self.weights), np.array(list(self.weights.values()))
        found = []
        for index in range(count):
            rng = row_generator(self.seed, "validation", index)
            name = names[rng.choice(len(names), p=shares / shares.sum())]
            found.append((name, TASKS[name].row(rng, self.seq_len, self.tokenizer)))
        return found

    def is_far(self, answer: Answer) -> bool:
        return answer.distance > self.reach


def far_task(config: ConfigDict, tokenizer: Tokenizer) -> FarTask | None:
    """The tasks of the first source of tasks by name; None if the run has none.

    The windows of all layers together do not reach from a far question to the source of its answer.
    """
    for part in source_configs(config).values():
        if part.data.source == "task":
            reach = config.model.num_layers * (config.model.nsa.window - 1)
            return FarTask(parse_tasks(part.data.tasks), config.data.seq_len, reach, config.seed, tokenizer)
    return None


def score_far_task(
    probe: Probe, task: FarTask, *, rows: int = 64, batch_size: int = 16
) -> tuple[dict[str, Any], Verdict | None]:
    """Answers to far questions on held-out rows, by the whole model and with branches switched off.

    A branch is switched off by shutting its gates in all layers, without any training.

    Args:
      probe: of the model.
      task: of the run.
      rows: held-out rows to ask.
      batch_size: rows at once.

    Returns:
      Shares of right answers: `accuracy`, of the whole model; `chance`. With NSA also `without_selected` and
      `window_only` (without both far branches). Then `questions`; `least_distance` from an answer to its source,
      tokens; `window`. With NSA `selection_mean` and `selection_best`, the share of the queries' lists that hold the
      block of the source, over all layers and head groups and in the best one; `selection_chance`, of lists drawn at
      random; `selection_unlike_chance`, as `Verdict` has it. And the verdict. Empty, and None, if no question is far.
    """
    probes = {"accuracy": probe}
    if "nsa" in probe.config.kinds:
        window = probe.config.branches.index("window")  # the last; those before it read beyond the window
        probes |= {"without_selected": probe.without(window - 1), "window_only": probe.without(*range(window))}
    held_out = task.rows(rows)
    scored = {
        name: [found for found in score_rows(probed, held_out, batch_size) if task.is_far(found.answer)]
        for name, probed in probes.items()
    }
    whole = scored["accuracy"]
    if not whole:
        return {}, None
    result: dict[str, Any] = {name: float(np.mean([s.right for s in part])) for name, part in scored.items()}
    result |= {"chance": float(np.mean([s.answer.chance for s in whole])), "questions": len(whole)}
    result |= {"least_distance": min(s.answer.distance for s in whole), "window": probe.config.nsa.window}
    if whole[0].listed is None:
        return result, None
    verdict = judge_selection(whole, probe.config.nsa)
    result |= {"selection_mean": float(verdict.share.mean()), "selection_best": float(verdict.share.max())}
    result |= {"selection_chance": verdict.chance, "selection_unlike_chance": verdict.unlike_chance}
    return result, verdict


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Whether queries list the blocks that they need more often than lists drawn at random would.

    Attributes:
      share: float [L, K], of the questions, those whose list holds the block of the answer's source.
      chance: the same share of lists that hold the forced blocks and others at random.
      error: float [L, K], standard error of `share`, from the differences between questions; at least that of `chance`.
    """

    share: np.ndarray
    chance: float
    error: np.ndarray

    @property
    def unlike_chance(self) -> bool:
        """Whether the best head group lists the answer's block at least 1.5 times as often as chance, by 5 errors."""
        best = np.unravel_index(self.share.argmax(), self.share.shape)
        return bool(self.share[best] > max(1.5 * self.chance, self.chance + 5 * self.error[best]))

    def __str__(self) -> str:
        layer, group = np.unravel_index(self.share.argmax(), self.share.shape)
        best = f"{self.share.max():.0%} in NSA layer {layer}, group {group}, {self.share.mean():.0%} on average"
        what = f"lists hold the answer's block in {best}, lists drawn at random in {self.chance:.0%}"
        return f"selection is {'clearly unlike' if self.unlike_chance else 'at'} chance: {what}"


def judge_selection(scored: Sequence[Scored], config: NSAConfig) -> Verdict:
    """Compares the block lists of queries that have to read one token each with lists drawn at random.

    Args:
      scored: answers of an NSA model.
      config: the operator's.
    """
    listed = np.stack([s.listed for s in scored if s.listed is not None])  # [Q, L, K]
    queries = np.array([s.answer.first - 1 for s in scored])
    sources = np.array([s.answer.source for s in scored])
    first, last = blocks.candidate_range(queries, 0 * queries, config.select_block)
    free = config.num_selected - config.num_initial - config.num_local
    random = np.minimum(free / np.maximum(last + 1 - config.num_initial - config.num_local, 1), 1.0)
    forced = blocks.forced_blocks(sources // config.select_block, first, last, config)
    chance = float(np.where(forced, 1.0, random).mean())
    # Few questions may agree by chance: then nothing differs between them, and yet there is an error.
    error = np.sqrt(np.maximum(listed.var(0), chance * (1 - chance)) / len(listed))
    return Verdict(listed.mean(0), chance, error)


def show_far_question(probe: Probe, task: FarTask) -> tuple[str, Figure] | None:
    """What one query read, as lines of text and as a figure: of the first held-out row with a far question.

    The question is the first that is answered correctly, or the first of all. None if no question is far.

    Args:
      probe: of a model with NSA layers.
      task: of the run.
    """
    for name, row in task.rows(16):
        scored = [found for found in score_rows(probe, [(name, row)], 1) if task.is_far(found.answer)]
        if scored:
            break
    else:
        return None
    answer = next((found for found in scored if found.right), scored[0]).answer
    query, source = answer.first - 1, answer.source
    tokens = row.tokens[None]
    most_likely, lists = probe(tokens, np.array([[query]]))
    assert lists is not None
    reading = read_weights(probe.model, tokens, query)
    strings = token_strings(task.tokenizer, row.tokens)
    text = describe_reading(reading, strings, lists, source)
    (said,) = task.tokenizer.decode_each(most_likely[0, :1])
    figure = draw_reading(reading)
    title = f"{strings[query]!r} at {query} asks for {strings[source]!r} at {source}, the answer is {said!r}"
    figure.axes[0].set_title(title, fontsize=10)
    for axis in figure.axes:
        axis.axvline(source, color="black", linestyle=":", linewidth=1.0)
    return f"{text}\n  answer: {said!r}", figure
