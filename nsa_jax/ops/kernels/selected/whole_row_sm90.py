"""Selected attention of short rows on Hopper: causal attention under a mask of key blocks.

Where lists hold a good part of all blocks, reading them one by one saves little and costs the gathering of rows, the
sorting of lists and sums of partials. Here a tile of queries visits all blocks that causality leaves, as range
attention does on Hopper, with one bit per query and block. A tile's keys are one block, so the mask costs a few
instructions per row and none per score.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from nsa_jax.ops import blocks
from nsa_jax.ops.choices import SelectedBackwardPlan
from nsa_jax.ops.kernels.range_attention import attention as range_attention
from nsa_jax.ops.kernels.range_attention import sm90_forward, sm90_grad_key_value, sm90_grad_query
from nsa_jax.ops.kernels.range_attention.tiles import GatedSum, KnownRanges, Window, joint_statistics
from nsa_jax.ops.kernels.softmax import base_2, in_rows
from nsa_jax.ops.tiles import ROWS, RangedHopperConfig

_WHOLE = 1 << 30  # a window that reaches back to the beginning of any row


def list_words(block_indices: jax.Array, num_blocks: int) -> jax.Array:
    """Lists [B, T, K, n] as bits: int32 [B, T, K, ceil(J / 32)]; entries of J and more are padding."""
    index = block_indices[..., None]
    word = jnp.arange(-(-num_blocks // 32), dtype=jnp.int32)
    bit = jnp.left_shift(jnp.uint32(1), (index % 32).astype(jnp.uint32))
    # A list has no repeats, so that the sum sets each bit once.
    bits = jnp.where((index // 32 == word) & (index < num_blocks), bit, jnp.uint32(0)).sum(-2, dtype=jnp.uint32)
    return jax.lax.bitcast_convert_type(bits, jnp.int32)


def visible_ranges(query, key, segment_start, query_offset) -> tuple[jax.Array, jax.Array]:
    """(low, high), int32 [B, T]: the keys that each query may see at all."""
    low, high = range_attention.window_ranges(query, segment_start, query_offset, _WHOLE)
    return range_attention.clip_ranges(low, high, key.shape[1])


def _known(query, key, query_offset, packed: bool, window: int = _WHOLE) -> KnownRanges | None:
    """`visible_ranges`, or those of a window, where tracing knows them."""
    if packed or not isinstance(query_offset, int):
        return None
    return range_attention.known_window_ranges(query.shape[1], query_offset, key.shape[1], window)


def forward(
    query, key, value, block_indices, segment_start, query_offset, config: RangedHopperConfig, packed: bool = True,
    window: int | None = None, gated: GatedSum | None = None,
):  # fmt: skip
    """Output [B, T, N, V] and natural-log lse, float32 [B, T, N]; arguments as `attention.selected_forward`.

    With packed=False rows hold one document each, whatever segment_start says. With a window, a pair of such pairs: the
    second is of window attention with the same query, key and value. With `gated` see `sm90_forward.ranged_forward`.
    """
    listed = list_words(block_indices, blocks.num_selection_blocks(key.shape[1], ROWS))
    low, high = visible_ranges(query, key, segment_start, query_offset)
    known = _known(query, key, query_offset, packed)
    second = None if window is None else _window(query, key, segment_start, query_offset, packed, window)
    return sm90_forward.block_masked_forward(query, key, value, low, high, config, known, listed, second, gated)


def _window(query, key, segment_start, query_offset, packed: bool, size: int) -> Window:
    """The ranges of window attention over `size` tokens."""
    ranges = range_attention.window_ranges(query, segment_start, query_offset, size)
    low, _ = range_attention.clip_ranges(*ranges, key.shape[1])
    return Window(low, _known(query, key, query_offset, packed, size))


def backward(
    query, key, value, block_indices, delta, lse, d_out, segment_start, query_offset, plan: SelectedBackwardPlan,
    packed: bool = True, window: tuple[jax.Array, jax.Array, int] | None = None,
):  # fmt: skip
    """Gradients of query, key and value; arguments as `backward.selected_backward`.

    Args:
      window: (delta, lse, w) of window attention with the same query, key, value and d_out. The gradients are then
        those of the sum of both: they share their products.
    """
    listed = list_words(block_indices, blocks.num_selection_blocks(key.shape[1], ROWS))
    low, high = visible_ranges(query, key, segment_start, query_offset)
    args = (query, key, value, d_out.astype(query.dtype), base_2(lse), delta, low, high)
    known = _known(query, key, query_offset, packed)
    second = None
    if window is not None:
        delta, lse, size = window
        second = _window(query, key, segment_start, query_offset, packed, size)
        own = base_2(lse), delta
        second = second._replace(statistics=(*own, *in_rows(joint_statistics, *args[4:6], *own)))
    d_query = sm90_grad_query.block_masked_grad_query(*args, plan.grad_query.tiles, known, listed, second)
    d_key, d_value = sm90_grad_key_value.block_masked_grad_key_value(*args, plan.by_block.tiles, known, listed, second)
    return d_query, d_key, d_value
