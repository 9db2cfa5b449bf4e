"""Kernel configurations: small frozen dataclasses, chosen by a heuristic from shape and GPU generation.

Each kernel family adds one dataclass (tile sizes, warps, stages) and one function that picks it.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class SelectedConfig:
    """Tiles of the selected branch's forward kernels.

    Attributes:
      keys: keys per step of every loop; a selection block is walked in steps of this size.
      plain_warps: warps of one program of the plain loop (one query token and key/value head).
      plain_stages: software pipeline depth of the plain loop.
    """

    keys: int
    plain_warps: int
    plain_stages: int


def selected_config(group: int, h_dim: int, v_dim: int, select_block: int, dtype) -> SelectedConfig:
    """Picks the selected forward's tiles.

    The plain loop is limited by the traffic from L2 to the multiprocessors, so one warp per program (many programs in
    flight, no synchronisation) beat 4 and 8 on an H200. A step holds K and V of `keys` tokens in shared memory.
    """
    row_bytes = (h_dim + v_dim) * jnp.dtype(dtype).itemsize
    keys = max(16, min(1 << (select_block - 1).bit_length(), 64))
    return SelectedConfig(keys=keys, plain_warps=1 if row_bytes <= 512 and group <= 16 else 4, plain_stages=2)


@dataclasses.dataclass(frozen=True)
class SelectedBackwardConfig:
    """Tiles of the selected branch's backward.

    Attributes:
      rows: rows of a tile, a power of two of at least G: `rows // G` queries with all their heads.
      chunk: the most queries that one work item takes from a key block's list.
      num_warps: warps per program.
      num_stages: software pipeline depth of the loop over queries.
      buffer_bytes: bound on the buffer of dq shares; query ranges and heads are processed one after the other to
        stay within it.
    """

    rows: int
    chunk: int
    num_warps: int
    num_stages: int
    buffer_bytes: int = 512 * 2**20


def selected_backward_config(group: int, h_dim: int, v_dim: int, dtype, select_block: int) -> SelectedBackwardConfig:
    """Picks the selected backward's tiles.

    A tile of 64 rows keeps dk, dv, the scores and the share of dq in the registers of 4 warps.
    """
    rows = max(64, 1 << (group - 1).bit_length())
    wide = max(h_dim, v_dim) > 128 or jnp.dtype(dtype).itemsize > 2 or select_block > 64
    return SelectedBackwardConfig(rows=rows, chunk=128, num_warps=8 if wide else 4, num_stages=1 if wide else 2)
