"""What one query read, as lines of text."""

from __future__ import annotations

import numpy as np

from nsa_jax.inspect.capture import Reading
from nsa_jax.nn.observe import BRANCHES
from nsa_jax.ops import blocks

_TOP = 5
_CELLS = 64  # marks of a map, which fits a terminal of 80 columns


def describe_reading(
    reading: Reading, strings: list[str], lists: np.ndarray, source: int, *, row: int = 0, query: int = 0
) -> str:
    """A map of the blocks that a query lists, and the tokens that it reads most, in the head that reads `source` most.

    Args:
      reading: as `read_weights` returns it.
      strings: the row's tokens as text, as `token_strings` returns them.
      lists: int32 [L, B, P, K, n], the queries' block lists.
      source: position of the token that the query should read.
      row: of the batch.
      query: which of the row's P positions.
    """
    weights = reading.branches()[:, row, query]  # [L, N, S, 3]
    layer, head = np.unravel_index(weights[:, :, source].sum(-1).argmax(), weights.shape[:2])
    weight, config, at = weights[layer, head], reading.config, int(reading.positions[row, query])
    group = head * lists.shape[3] // weights.shape[1]
    total = blocks.num_selection_blocks(weight.shape[0], config.select_block)
    listed, home = set(lists[layer, row, query, group].tolist()), source // config.select_block
    marks = ["." for _ in range(total)]
    for block in listed - {total}:
        marks[block] = "o"
    marks[home] = "#" if home in listed else "x"
    each = -(-total // _CELLS)  # blocks that share a mark: that of the rarest kind
    line = "".join(max(marks[at : at + each], key=".ox#".index) for at in range(0, total, each))
    share = weight.sum(0) / max(weight.sum(), 1e-12)
    top = np.argsort(-weight.sum(-1))[:_TOP]
    tokens = ", ".join(f"{strings[i]!r} at {i} {weight[i].sum() / max(weight.sum(), 1e-12):.0%}" for i in top)
    near = "is listed" if home in listed else "is not listed"
    return "\n".join(
        [
            f"the query {strings[at]!r} at {at} should read {strings[source]!r} at {source}, {at - source} back; "
            f"layer {reading.layers[layer]}, head {head} does most:",
            f"  [{line}]",
            f"  {len(listed - {total})} of {total} blocks listed (o), the one with the answer {near} "
            f"({'#' if home in listed else 'x'})",
            f"  read by {', '.join(f'{name} {part:.0%}' for name, part in zip(BRANCHES, share, strict=True))}",
            f"  most: {tokens}",
        ]
    )
