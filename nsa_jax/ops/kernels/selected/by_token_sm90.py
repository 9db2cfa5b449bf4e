"""Selected attention token by token on Hopper, where `by_token_triton` continues from what tiles share.

A tile of neighbouring tokens reads each block that one of them lists once, in one kernel: first the blocks that most of
them list, by products of the whole tile, then the others, each by the warps of the tokens that list it. A block that
three of eight tokens list comes out of the L2 cache once, not three times, and that traffic is the limit.
"""

from __future__ import annotations

from nsa_jax.ops.kernels.range_attention import sm90_forward
from nsa_jax.ops.kernels.selected.neighbours import split_lists
from nsa_jax.ops.kernels.selected.whole_row_sm90 import visible_ranges
from nsa_jax.ops.selected_tiles import SelectedConfig
from nsa_jax.ops.tiles import RangedHopperConfig


def forward(
    query, key, value, block_indices, segment_start, query_offset, lists: SelectedConfig, config: RangedHopperConfig,
    *, select_block: int, packed: bool,
):  # fmt: skip
    """Output [B, T, N, V] and natural-log lse float32 [B, T, N].

    Args:
      query, key, value, block_indices, segment_start: as `attention.selected_forward` takes them.
      query_offset: int32 [1].
      lists: how tiles share blocks.
      config: tiles of the kernel.
      select_block: l'.
      packed: whether segment_start matters.
    """
    split = split_lists(
        block_indices, segment_start, query_offset, tile=lists.tile, share=lists.share, select_block=select_block,
        num_keys=key.shape[1], packed=packed, everything=True,
    )  # fmt: skip
    low, high = visible_ranges(query, key, segment_start, query_offset)
    neighbours = split.block, split.bits, split.num_shared
    return sm90_forward.neighbours_forward(query, key, value, low, high, config, neighbours, by_warp=True)
