"""Synthetic rows: unpredictable uniform random tokens, and two tasks that need long attention."""

from __future__ import annotations

import numpy as np

from nsa_jax.data.packing import Batch

_SPLITS = {"train": 0, "validation": 1}


def row_generator(seed: int, split: str, index: int) -> np.random.Generator:
    """The generator of one row, by the run's seed, the split (train or validation) and the row's number."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, _SPLITS[split], index])))


def _symbols(indices: np.ndarray, count: int, high: int, *, seed: int, split: str) -> np.ndarray:
    """Uniform ids in [0, high): int32 [len(indices), count], each row from its own generator."""
    rows = np.empty((len(indices), count), np.int32)
    for row, index in zip(rows, indices, strict=True):
        row[:] = row_generator(seed, split, int(index)).integers(0, high, count, dtype=np.int32)
    return rows


def _batch(rows: np.ndarray, counted: slice) -> Batch:
    """A batch of rows [b, T + 1], one document each, in whose loss the targets at `counted` count."""
    inputs, targets = rows[:, :-1], rows[:, 1:]
    mask = np.zeros(inputs.shape, np.float32)
    mask[:, counted] = 1
    return {"inputs": inputs, "targets": targets, "segment_start": np.zeros_like(inputs), "loss_mask": mask}


def random_rows(indices: np.ndarray, seq_len: int, vocab_size: int, *, seed: int, split: str) -> Batch:
    """Rows of uniform random tokens.

    Args:
      indices: [b] global row numbers; a row depends on (seed, split, its number) alone.
      seq_len: T.
      vocab_size: ids are uniform in [0, vocab_size).
      seed: of the run.
      split: train or validation.

    Returns:
      A batch as `pack_rows` returns it: one document per row, every target counts.
    """
    rows = _symbols(indices, seq_len + 1, vocab_size, seed=seed, split=split)
    return _batch(rows, slice(None))


def copy_rows(indices: np.ndarray, seq_len: int, vocab_size: int, *, seed: int, split: str) -> Batch:
    """Rows of the copy task: T // 2 random symbols, the separator (id vocab_size - 1), and the same symbols again.

    Args:
      indices: [b] global row numbers.
      seq_len: T; if odd, one more separator fills the row.
      vocab_size: symbols are uniform in [0, vocab_size - 1).
      seed: of the run.
      split: train or validation.

    Returns:
      A batch whose loss mask is 1 only where the target is in the second copy.
    """
    half = seq_len // 2
    separator = vocab_size - 1
    rows = np.full((len(indices), seq_len + 1), separator, np.int32)
    rows[:, :half] = _symbols(indices, half, separator, seed=seed, split=split)
    rows[:, half + 1 : 2 * half + 1] = rows[:, :half]
    return _batch(rows, slice(half, 2 * half))


def num_facts(seq_len: int) -> int:
    """Key-value pairs in a row of the recall task."""
    return max(seq_len // 8, 1)


def recall_rows(indices: np.ndarray, seq_len: int, vocab_size: int, *, seed: int, split: str) -> Batch:
    """Rows of the associative recall task: facts, a long stretch of noise, then questions about every fact.

    A row begins with P = T // 8 facts, each a key and its value; keys are distinct. Noise follows. At the end each key
    is asked once, in another order, followed by its value. At least T // 2 tokens therefore lie between the last fact
    and the first question. Keys are ids below vocab_size // 4, and values are the next vocab_size // 4 ids. The last id
    separates the noise from the questions, and noise uses the other ids.

    Args:
      indices: [b] global row numbers.
      seq_len: T.
      vocab_size: ids; at least 4 P.
      seed: of the run.
      split: train or validation.

    Returns:
      A batch whose loss mask is 1 only where the target is the answer to a question.
    """
    facts, part = num_facts(seq_len), vocab_size // 4
    rows = np.empty((len(indices), seq_len + 1), np.int32)
    for row, index in zip(rows, indices, strict=True):
        rng = row_generator(seed, split, int(index))
        keys = rng.permutation(part)[:facts]
        values = rng.integers(part, 2 * part, facts)
        row[:] = rng.integers(2 * part, vocab_size - 1, seq_len + 1)
        asked = rng.permutation(facts)
        row[0 : 2 * facts : 2], row[1 : 2 * facts : 2] = keys, values
        row[seq_len - 2 * facts] = vocab_size - 1
        questions = row[seq_len + 1 - 2 * facts :]
        questions[::2], questions[1::2] = keys[asked], values[asked]
    return _batch(rows, slice(seq_len - 2 * facts + 1, None, 2))


TASKS = {"random": random_rows, "copy": copy_rows, "recall": recall_rows}
