"""Turns rows of tokens into the arrays of a training step, without loops over tokens or documents."""

from __future__ import annotations

import numpy as np

from nsa_jax.data.errors import DataError

Batch = dict[str, np.ndarray]


def pack_rows(rows: np.ndarray, eos_id: int, *, packing: bool = True) -> Batch:
    """Splits rows of T+1 stream tokens into inputs, targets and document structure.

    In the stream every document ends with `eos_id`, which belongs to that document. If a document began before the row,
    its start is taken as the row's start.

    Args:
      rows: [b, T+1] token ids.
      eos_id: end-of-document token.
      packing: if False, attention may cross documents (`segment_start` is 0 everywhere); the loss mask is the same.

    Returns:
      inputs int32 [b, T]; targets int32 [b, T], the token after each input; segment_start int32 [b, T], row position of
      the first token of the input's document; loss_mask float32 [b, T], 0 where the target belongs to another document
      than the input (after an end-of-document token) and so cannot be predicted.
    """
    rows = np.ascontiguousarray(rows, dtype=np.int32)
    inputs, targets = rows[:, :-1], rows[:, 1:]
    ends = inputs == eos_id
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
