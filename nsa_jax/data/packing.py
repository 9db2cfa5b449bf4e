"""Turns rows of tokens into the arrays of a training step, without loops over tokens or documents."""

from __future__ import annotations

import bisect

import numpy as np

from nsa_jax.data.errors import DataError

Batch = dict[str, np.ndarray]


def pack_rows(rows: np.ndarray, eos_id: int, *, packing: bool = True, begins: np.ndarray | None = None) -> Batch:
    """Splits rows of T+1 stream tokens into inputs, targets and document structure.

    In the stream every document ends with `eos_id`, which belongs to that document. If a document began before the row,
    its start is taken as the row's start.

    Args:
      rows: [b, T+1] token ids.
      eos_id: end-of-document token.
      packing: if False, attention may cross documents (`segment_start` is 0 everywhere); the loss mask is the same.
      begins: bool [b, T], where another document begins although none has ended before it, because it was cut.

    Returns:
      inputs int32 [b, T]; targets int32 [b, T], the token after each input; segment_start int32 [b, T], row position of
      the first token of the input's document; loss_mask float32 [b, T], 0 where the target belongs to another document
      than the input (after an end-of-document token) and so cannot be predicted.
    """
    rows = np.ascontiguousarray(rows, dtype=np.int32)
    inputs, targets = rows[:, :-1], rows[:, 1:]
    ends = inputs == eos_id
    if begins is not None:
        ends[:, :-1] |= begins[:, 1:]
    segment_start = np.zeros(inputs.shape, np.int32)
    if packing:
        positions = np.arange(1, inputs.shape[1], dtype=np.int32)
        np.maximum.accumulate(np.where(ends[:, :-1], positions, 0), axis=1, out=segment_start[:, 1:])
    return {
        "inputs": inputs,
        "targets": targets,
        "segment_start": segment_start,
        "loss_mask": 1.0 - ends.astype(np.float32),
    }


def best_fit(lengths: np.ndarray, rows: int, seq_len: int) -> list[list[tuple[int, int, int]]]:
    """Places documents into rows that they fill, with as few cut as a simple rule can do (arXiv 2404.10830).

    From the longest to the shortest, each goes into the row that has the least room left of those that have enough. A
    document that is longer than a row fills rows first. What fits nowhere whole is cut to fill what is left.

    Args:
      lengths: int [n], tokens of each document; they add up to rows * seq_len.
      rows: how many there are.
      seq_len: T.

    Returns:
      For each row the pieces in it: the document, the position in it at which the piece begins, and its tokens.
    """
    placed: list[list[tuple[int, int, int]]] = [[] for _ in range(rows)]
    room = [(seq_len, row) for row in range(rows)]  # ascending
    lengths = np.asarray(lengths)
    begin = lengths // seq_len * seq_len  # what comes before fills rows of its own
    for document in np.flatnonzero(begin).tolist():
        for start in range(0, int(begin[document]), seq_len):
            placed[room.pop()[1]].append((document, start, seq_len))
    left = []
    for document in np.argsort(begin - lengths, kind="stable").tolist():
        start, size = int(begin[document]), int(lengths[document] - begin[document])
        index = bisect.bisect_left(room, (size, -1))
        if index == len(room):
            left.append((document, start, size))
        elif size:
            free, row = room.pop(index)
            placed[row].append((document, start, size))
            if free > size:
                bisect.insort(room, (free - size, row))
    for document, start, size in left:
        while size:
            free, row = room.pop()
            piece = min(free, size)
            placed[row].append((document, start, piece))
            if free > piece:
                bisect.insort(room, (free - piece, row))
            start, size = start + piece, size - piece
    return placed


def check_batch(batch: Batch) -> Batch:
    """Checks that `targets[t] == inputs[t + 1]`, and that every document starts at or before t.

    A model trained on labels that are not shifted learns to copy its input, with a loss near zero.

    Args:
      batch: what `pack_rows` returns.

    Returns:
      The same batch.

    Raises:
      DataError: naming the first row and position that violates it.
    """
    inputs, targets, segment_start = batch["inputs"], batch["targets"], batch["segment_start"]
    wrong = targets[:, :-1] != inputs[:, 1:]
    if wrong.any():
        row, t = (int(i) for i in np.argwhere(wrong)[0])
        hint = ""
        if np.array_equal(targets, inputs):
            hint = "; targets equal inputs: the labels are not shifted, and the model would learn to copy its input"
        raise DataError(
            f"batch row {row}, position {t}",
            f"target {int(targets[row, t])} is not the next input {int(inputs[row, t + 1])}{hint}",
            "targets must be the inputs shifted by one, targets[t] == inputs[t + 1]",
        )
    wrong = (segment_start < 0) | (segment_start > np.arange(inputs.shape[1]))
    if wrong.any():
        row, t = (int(i) for i in np.argwhere(wrong)[0])
        raise DataError(
            f"batch row {row}, position {t}",
            f"segment_start {int(segment_start[row, t])} is not in [0, {t}]",
            "segment_start is the row position of the first token of the input's own document",
        )
    return batch
