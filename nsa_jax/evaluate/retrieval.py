"""Does a model find what lies far back: needles in a haystack, associative recall, and what selection picked."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from nsa_jax.data import Tokenizer
from nsa_jax.data.long_tasks import NEEDLE, assemble, random_words
from nsa_jax.data.synthetic import num_facts, recall_rows
from nsa_jax.inspect.probe import Probe, picked
from nsa_jax.ops import blocks


def needle_tokens(tokenizer: Tokenizer, num_keys: int) -> int:
    """About how many tokens the facts, the question and the answer take."""
    fact, question, answer = (len(tokenizer.encode_within(part.format(key="abcde", value="12345"))) for part in NEEDLE)
    return num_keys * fact + question + answer


def needle_row(
    tokenizer: Tokenizer,
    haystack: np.ndarray,
    length: int,
    depth: float,
    *,
    rng: np.random.Generator,
    num_keys: int = 1,
    template: Sequence[str] = NEEDLE,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """One row: filler with a fact at a depth and a question about it at the end.

    Args:
      tokenizer: of the model.
      haystack: filler tokens, at least `length`.
      length: tokens of the row, the answer included.
      depth: 0 is the beginning of the row, 1 is right before the question.
      rng: draws keys and values, where the filler starts and where the other facts lie.
      num_keys: facts in the row; one of them is asked for.
      template: fact, question and answer, with {key} and {value}; the fact contains the answer.

    Returns:
      Tokens int32 [length]; positions of the queries that predict the answer, int [P]; positions of the answer's tokens
      in the fact, int [P].

    Raises:
      ValueError: the facts and the question do not fit into `length`.
    """
    keys = random_words(rng, num_keys)
    values = [str(rng.integers(10_000, 100_000)) for _ in keys]
    pairs = list(zip(keys, values, strict=True))
    fact, question, answer = (
        [tokenizer.encode_within(part.format(key=key, value=value)) for key, value in pairs] for part in template
    )
    room = length - sum(len(f) for f in fact) - len(question[0]) - len(answer[0])
    if room < 0:
        raise ValueError(f"length={length}: {num_keys} facts and the question need {length - room} tokens")
    begin = int(rng.integers(0, len(haystack) - room + 1))
    filler = haystack[begin : begin + room]
    at = [round(depth * room), *sorted(rng.integers(0, room + 1, num_keys - 1).tolist())]
    head, starts = assemble(filler, fact, at)
    row = np.concatenate([head, question[0], answer[0]]).astype(np.int32)
    # Where the answer's tokens are in the fact, clipped to it: a tokenizer may cut the two differently.
    stated, wanted = (part.format(key=keys[0], value=values[0]) for part in (template[0], template[2]))
    before = len(tokenizer.encode_within(stated[: stated.index(wanted)]))
    span = np.minimum(before + np.arange(len(answer[0])), len(fact[0]) - 1)
    queries = np.arange(length - len(answer[0]) - 1, length - 1)
    return row, queries, starts[0] + span


def needle_grid(
    probe: Probe,
    tokenizer: Tokenizer,
    haystack: np.ndarray,
    *,
    lengths: Sequence[int],
    depths: Sequence[float],
    samples: int = 8,
    num_keys: int = 1,
    seed: int = 0,
    batch_size: int = 8,
) -> list[dict[str, Any]]:
    """Exact-match retrieval over a grid of depths and lengths.

    An answer counts if every one of its tokens is the most likely one after those before it, which is what greedy
    decoding would write.

    Returns:
      A row per cell: length, depth, num_keys, samples, exact_match (share of samples), and with selection
      selection_any (share of answer tokens whose block in the fact was listed by some head of some layer),
      selection_mean (share over heads and layers) and selection_chance (of n blocks out of all, at random).
    """
    cells = []
    for length in lengths:
        for depth in depths:
            rng = np.random.default_rng([seed, length, round(depth * 1000), num_keys])
            rows = [needle_row(tokenizer, haystack, length, depth, rng=rng, num_keys=num_keys) for _ in range(samples)]
            width = max(len(queries) for _, queries, _ in rows)
            right, lists_hit = [], []
            for first in range(0, samples, batch_size):
                part = rows[first : first + batch_size]
                part += [part[-1]] * (batch_size - len(part))  # one compiled shape per length
                count = min(batch_size, samples - first)
                tokens = np.stack([row for row, _, _ in part])
                # Shorter answers repeat their last position.
                queries = np.stack([np.pad(q, (0, width - len(q)), mode="edge") for _, q, _ in part])
                target = np.stack([np.pad(s, (0, width - len(s)), mode="edge") for _, _, s in part])
                most_likely, lists = probe(tokens, queries)
                expected = np.take_along_axis(tokens, queries + 1, axis=1)
                right += (most_likely == expected).all(1)[:count].tolist()
                if lists is not None:
                    lists_hit.append(picked(lists, target, probe.config.nsa.select_block)[:, :count])
            cell: dict[str, Any] = {"length": length, "depth": depth, "num_keys": num_keys, "samples": samples}
            cell["exact_match"] = float(np.mean(right))
            cells.append(cell | _selection(lists_hit, length, probe))
    return cells


def _selection(hits: list[np.ndarray], length: int, probe: Probe) -> dict[str, float]:
    """How often lists hold what is asked for, as `needle_grid` returns it; nothing without lists."""
    if not hits:
        return {}
    hit, nsa = np.concatenate(hits, axis=1), probe.config.nsa
    chance = min(1.0, nsa.num_selected / blocks.num_selection_blocks(length, nsa.select_block))
    shares = {"selection_any": hit.any(axis=(0, 3)).mean(), "selection_mean": hit.mean(), "selection_chance": chance}
    return {name: float(share) for name, share in shares.items()}


def recall_accuracy(
    probe: Probe, *, seq_len: int, vocab_size: int, rows: int = 256, seed: int = 0, batch_size: int = 32
) -> dict[str, Any]:
    """The associative recall task (`data.synthetic.recall_rows`) on held-out rows.

    Returns:
      accuracy over all questions, chance, questions, the window, the least and the mean distance from answer to
      question in windows, and with selection the same figures as `needle_grid`.
    """
    facts = num_facts(seq_len)
    run = functools.partial(recall_rows, seq_len=seq_len, vocab_size=vocab_size, seed=seed, split="validation")
    right, hits, distances = [], [], []
    for first in range(0, rows, batch_size):
        batch = run(np.arange(first, first + batch_size))
        tokens = batch["inputs"]
        queries = np.stack([np.flatnonzero(mask) for mask in batch["loss_mask"]])
        expected = np.take_along_axis(batch["targets"], queries, axis=1)
        asked = np.take_along_axis(tokens, queries, axis=1)
        # The fact of each question: the even position at the start of the row that holds its key.
        where = 2 * np.argmax(tokens[:, None, : 2 * facts : 2] == asked[..., None], axis=-1) + 1
        most_likely, lists = probe(tokens, queries)
        right.append(most_likely == expected)
        distances.append(queries - where)
        if lists is not None:
            hits.append(picked(lists, where, probe.config.nsa.select_block))
    correct, distance = np.concatenate(right), np.concatenate(distances)
    window = probe.config.nsa.window
    return {
        "accuracy": float(correct.mean()),
        "chance": 1 / (vocab_size // 4),
        "questions": int(correct.size),
        "window": window,
        "least_distance_in_windows": float(distance.min() / window),
        "mean_distance_in_windows": float(distance.mean() / window),
        **_selection(hits, seq_len, probe),
    }


def plot_needles(cells: list[dict[str, Any]], title: str, path: Path) -> None:
    """Heat maps over length and depth: exact match and, with selection, how many heads listed the needle's block."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    lengths = sorted({cell["length"] for cell in cells})
    depths = sorted({cell["depth"] for cell in cells})
    fields = [("exact_match", "answer is exact")]
    if "selection_mean" in cells[0]:
        chance = min(cell["selection_chance"] for cell in cells)
        fields.append(("selection_mean", f"heads that listed its block (at random: {chance:.0%} or more)"))
    figure, axes = plt.subplots(1, len(fields), figsize=(5.5 * len(fields), 4), squeeze=False)
    for axis, (field, label) in zip(axes[0], fields, strict=True):
        grid = np.full((len(depths), len(lengths)), np.nan)
        for cell in cells:
            grid[depths.index(cell["depth"]), lengths.index(cell["length"])] = cell[field]
        image = axis.imshow(grid, vmin=0, vmax=1, cmap="RdYlGn", aspect="auto")
        for (y, x), value in np.ndenumerate(grid):
            axis.text(x, y, f"{value:.0%}", ha="center", va="center", fontsize=8)
        axis.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths])
        axis.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths])
        axis.set_xlabel("tokens in the context")
        axis.set_ylabel("depth of the fact")
        axis.set_title(label, fontsize=10)
        figure.colorbar(image, ax=axis)
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)
