"""What a plan consists of: sizes of a problem, and for each stage and pass the kernel that serves it."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from nsa_jax.ops import selected_tiles, tiles


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of one attention: query [B, T, N, H], key [B, S, K, H], value [B, S, K, V]."""

    batch: int
    num_queries: int
    num_keys: int
    num_heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    dtype: str

    @classmethod
    def of(cls, query, key, value=None) -> Shape:
        """The sizes of arrays; without a value V = H."""
        batch, num_queries, num_heads, head_dim = query.shape
        value_dim = (key if value is None else value).shape[-1]
        dtype = jnp.dtype(query.dtype).name
        return cls(batch, num_queries, key.shape[1], num_heads, key.shape[2], head_dim, value_dim, dtype)

    @property
    def group(self) -> int:
        """G, query heads per key/value head."""
        return self.num_heads // self.kv_heads

    @property
    def is_bfloat16(self) -> bool:
        return self.dtype == "bfloat16"

    @property
    def lies_as_read(self) -> bool:
        """Whether Hopper's kernels take the heads of the query as they lie."""
        return tiles.lies_as_read(self.group, max(self.head_dim, self.value_dim))

    def heads_to_batch(self) -> Shape:
        """The sizes once key/value heads are batch entries."""
        return dataclasses.replace(self, batch=self.batch * self.kv_heads, num_heads=self.group, kv_heads=1)

    def with_keys(self, num_keys: int) -> Shape:
        return dataclasses.replace(self, num_keys=num_keys)


@dataclasses.dataclass(frozen=True)
class Choice:
    """A kernel for one stage and pass.

    Attributes:
      kernel: its module in `nsa_jax.ops.kernels`.
      tiles: its tiles, a record of `nsa_jax.ops.tiles`; None if it has none.
      reason: why it serves.
      otherwise: the kernel that would serve if it did not; empty if none would.
    """

    kernel: str
    tiles: Any
    reason: str
    otherwise: str = ""


@dataclasses.dataclass(frozen=True)
class RangePlan:
    """Attention over one contiguous range of keys per query: the compressed or the window branch."""

    forward: Choice
    grad_query: Choice
    grad_key_value: Choice


@dataclasses.dataclass(frozen=True)
class SelectionPlan:
    """Which blocks each query reads.

    `scores` is None without compressed keys: then nothing is scored. `tiles` bound the buffer of scores either way.
    """

    scores: Choice | None
    top_n: Choice
    tiles: Any


@dataclasses.dataclass(frozen=True)
class SelectedForwardPlan:
    """The selected branch's forward pass: what neighbouring tokens share, if anything is, and then the rest.

    Where one kernel serves both, the two choices are the same. `lists` are the tiles by which lists are divided; None
    if `rest` reads whole rows under a mask.
    """

    neighbours: Choice | None
    rest: Choice
    lists: selected_tiles.SelectedConfig | None


@dataclasses.dataclass(frozen=True)
class SelectedBackwardPlan:
    """The selected branch's backward pass: the whole row under a mask, or block by block and then dq.

    `lists` are the tiles of the pass over blocks; None if the whole row is read, where `by_block` serves dk and dv.
    """

    by_block: Choice
    grad_query: Choice
    lists: selected_tiles.SelectedBackwardConfig | None


@dataclasses.dataclass(frozen=True)
class SelectedPlan:
    """The selected branch."""

    forward: SelectedForwardPlan
    backward: SelectedBackwardPlan

    def with_window(self, shape: Shape) -> SelectedPlan:
        """The plan of kernels that serve the window too; those of the backward pass take no more registers for it."""
        joint = selected_tiles.selected_masked_config(shape.head_dim, shape.value_dim, joint=True)
        forward = dataclasses.replace(self.forward, rest=dataclasses.replace(self.forward.rest, tiles=joint))
        return dataclasses.replace(self, forward=forward)


@dataclasses.dataclass(frozen=True)
class NSAPlan:
    """The whole operator. `compressed` is None if the row is too short for a compressed block."""

    shape: Shape  # of the branches; key/value heads may have become batch entries
    heads_to_batch: Choice | None
    compressed: RangePlan | None
    selection: SelectionPlan
    selected: SelectedPlan
    window: RangePlan

    @property
    def joint_window(self) -> bool:
        """Whether the selected branch's kernels serve the window too."""
        return self.window.forward.kernel == self.selected.forward.rest.kernel

    @property
    def sums_in_kernel(self) -> bool:
        """Whether the kernel that serves the window stores the gated sum of the branches."""
        return self.joint_window or self.window.forward.kernel == "range_attention.sm90_forward"
