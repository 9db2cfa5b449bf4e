"""`NSAConfig` and the block arithmetic of NSA, in one place: every implementation and test takes it from here.

Symbols: T query tokens, S key tokens, C compressed blocks, J selection blocks, l = compress_block,
d = compress_stride, l' = select_block, n = num_selected. `t` is a query's position in the row and `start` is its
`segment_start`; a key position p may be used iff start <= p <= t. Functions of `t` and `start` work on Python ints,
NumPy and JAX arrays alike.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

INFINITY_BITS = 0x7F800000  # of a float32


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class NSAConfig:
    """Block geometry of Native Sparse Attention (arXiv 2502.11089, section 3.3; the defaults are the paper's).

    It is a static pytree: jitted functions take it as an argument without `static_argnames`, and are traced anew for
    another one.

    Attributes:
      compress_block: l, tokens in one compressed block.
      compress_stride: d, tokens between the starts of neighbouring compressed blocks.
      select_block: l', tokens in one selection block.
      num_selected: n, selection blocks that each query reads, the forced ones included.
      num_initial: how many of the first blocks of the document are always read.
      num_local: how many of the blocks up to the query's own are always read.
      window: w, tokens that the sliding-window branch reads, the query's own included.

    Raises:
      ValueError: naming the field, if the geometry is impossible.
    """

    compress_block: int = 32
    compress_stride: int = 16
    select_block: int = 64
    num_selected: int = 16
    num_initial: int = 1
    num_local: int = 2
    window: int = 512

    def __post_init__(self):
        wrong = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, (int, np.integer)) or isinstance(value, bool) or not 0 < value < 2**31:
                wrong.append(f"NSAConfig.{field.name}={value!r}: must be a positive int below 2**31")
            else:
                object.__setattr__(self, field.name, int(value))
        if wrong := wrong or self._impossible():
            raise ValueError("; ".join(wrong))

    def _impossible(self) -> list[str]:
        """How the fields contradict each other."""
        wrong = []
        for name in ("compress_block", "select_block"):
            if getattr(self, name) % self.compress_stride:
                wrong.append(
                    f"NSAConfig.{name}={getattr(self, name)}: must be a multiple of "
                    f"compress_stride={self.compress_stride}"
                )
        if self.compress_block > self.select_block:
            wrong.append(
                f"NSAConfig.compress_block={self.compress_block}: must be at most select_block={self.select_block}"
            )
        if self.num_initial + self.num_local > self.num_selected:
            wrong.append(
                f"NSAConfig.num_selected={self.num_selected}: must be at least num_initial + num_local = "
                f"{self.num_initial + self.num_local}, since forced blocks count towards it"
            )
        return wrong


def query_positions(query, segment_start, query_offset) -> tuple[jax.Array, jax.Array]:
    """Row positions and segment starts of queries [B, T, ...]: both int32 [B, T]."""
    batch, length = query.shape[:2]
    t = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32) + query_offset, (batch, length))
    start = jnp.zeros_like(t) if segment_start is None else segment_start.astype(jnp.int32)
    return t, start


def num_compressed(num_keys: int, config: NSAConfig) -> int:
    """C: how many compressed blocks S keys give. Block i covers tokens [i*d, i*d + l)."""
    if num_keys < config.compress_block:
        return 0
    return (num_keys - config.compress_block) // config.compress_stride + 1


def num_selection_blocks(num_keys: int, select_block: int) -> int:
    """J: how many selection blocks S keys fall into; the last one may be partial."""
    return -(-num_keys // select_block)


def compressed_last_position(index, config: NSAConfig):
    """Position of the last token that compressed block `index` covers (where RoPE places its key)."""
    return index * config.compress_stride + config.compress_block - 1


def compressed_range(t, start, config: NSAConfig):
    """The compressed blocks a query sees, as a half-open range [low, high); empty where high <= low.

    Block i is visible iff i*d >= start and i*d + l - 1 <= t, which is a contiguous range.
    """
    low = (start + config.compress_stride - 1) // config.compress_stride
    high = (t + 1 - config.compress_block) // config.compress_stride + 1  # floor division: <= 0 before the first block
    return low, high


def candidate_range(t, start, select_block: int):
    """The selection blocks that overlap [start, t], as an inclusive range (first, last); last < first if start > t."""
    first, last = start // select_block, t // select_block
    # start > t can happen inside one block, which must not be a candidate then. Booleans count as 0 or 1 everywhere.
    return first, last - (start > t)


def has_choice(t, start, config: NSAConfig):
    """Whether a query has more candidates than it reads; otherwise selection reads all of its document so far."""
    first, last = candidate_range(t, start, config.select_block)
    return last - first + 1 > config.num_selected


def fold_weights(config: NSAConfig) -> np.ndarray:
    """Weights of compressed blocks in a selection block's importance (paper eq. 9).

    p_slc[j] = sum over m in [0, l'/d), r in [0, l/d) of p_cmp[(l'/d) j + m - r]. The index (l'/d) j + m - r runs over
    consecutive blocks; element k of the result weights block (l'/d) j - (l/d - 1) + k.

    Returns:
      int array of length l'/d + l/d - 1; (1, 2, 2, 2, 1) for l=32, d=16, l'=64.
    """
    per_block = config.select_block // config.compress_stride
    overlap = config.compress_block // config.compress_stride
    return np.convolve(np.ones(per_block, np.int32), np.ones(overlap, np.int32))


def fold_importance(p_cmp: jax.Array, num_blocks: int, config: NSAConfig) -> jax.Array:
    """Sums compressed-block probabilities [..., C] into selection-block importance [..., J] (paper eq. 9)."""
    per_block = config.select_block // config.compress_stride
    overlap = config.compress_block // config.compress_stride
    weights = fold_weights(config)
    num_cmp = p_cmp.shape[-1]
    # Left-pad so that index 0 is block -(overlap - 1); right-pad or cut so that every j has its full support.
    need = per_block * (num_blocks - 1) + len(weights)
    right = max(need - (overlap - 1) - num_cmp, 0)
    padded = jnp.pad(p_cmp, [(0, 0)] * (p_cmp.ndim - 1) + [(overlap - 1, right)])
    out = jnp.zeros((*p_cmp.shape[:-1], num_blocks), p_cmp.dtype)
    for k, weight in enumerate(weights):
        out = out + int(weight) * padded[..., k : k + per_block * (num_blocks - 1) + 1 : per_block]
    return out


def forced_blocks(j, first, last, config: NSAConfig):
    """True where selection block j is always taken: the first num_initial and last num_local candidates."""
    inside = (j >= first) & (j <= last)
    return inside & ((j < first + config.num_initial) | (j > last - config.num_local))


def selected_key_count(t, start, config: NSAConfig):
    """How many keys the selected branch reads: of the listed blocks, those in [start, t].

    A list holds min(n, candidates) blocks, the first and the last candidate always among them; all blocks between are
    whole.
    """
    first, last = candidate_range(t, start, config.select_block)
    candidates = last - first + 1
    outside = (start - first * config.select_block) + (last * config.select_block + config.select_block - 1 - t)
    fewer = candidates * (candidates < config.num_selected) + config.num_selected * (candidates >= config.num_selected)
    return (fewer * config.select_block - outside) * (candidates > 0)


def counted_keys(block_indices, t, start, select_block: int):
    """How many keys the blocks of a list hold for a query: block_indices [..., n], t and start [...] -> [...].

    Padding (J) lies beyond t, so it counts 0.
    """
    low = jnp.maximum(block_indices * select_block, start[..., None])
    high = jnp.minimum(block_indices * select_block + select_block - 1, t[..., None])
    return jnp.maximum(high - low + 1, 0).sum(-1, dtype=jnp.int32)


def clean_lists(lists: jax.Array, num_blocks: int) -> jax.Array:
    """Any int32 [..., n] as a list that all implementations read alike: ascending, distinct, padded at the end with J.

    Entries outside [0, J) are padding; an entry that repeats another one is too.
    """
    place = np.arange(lists.shape[-1])
    repeats = ((lists[..., :, None] == lists[..., None, :]) & (place[:, None] > place)).any(-1)
    inside = (lists >= 0) & (lists < num_blocks) & ~repeats
    return jnp.sort(jnp.where(inside, lists, num_blocks), axis=-1)


def listed_blocks(lists, num_blocks: int):
    """Which blocks a list holds: int32 [..., n] -> bool [..., J]. Padding (J) stands for nothing."""
    return (lists[..., None] == np.arange(num_blocks, dtype=np.int32)).any(-2)


def also_listed(lists, others, num_blocks: int):
    """Whether each block of a list is in another list too: int32 [..., n] twice -> bool [..., n], False for padding."""
    return (lists[..., :, None] == others[..., None, :]).any(-1) & (lists < num_blocks)


def rank_bits(scores: jax.Array) -> jax.Array:
    """Float32 scores as int32 in [0, 0x7F7FFFFF] that order like them: what selection ranks blocks by.

    NaN and negative numbers rank as 0 and infinity as the largest finite number, so that any scores give a full list.
    """
    # Integers are compared, because the minimum and maximum of NaN and a number differ between devices.
    bits = jax.lax.bitcast_convert_type(scores, jnp.uint32)  # as unsigned, negative numbers exceed infinity
    return jnp.where(bits <= INFINITY_BITS, jnp.minimum(bits, INFINITY_BITS - 1), 0).astype(jnp.int32)


def select_from_importance(importance: jax.Array, t: jax.Array, start: jax.Array, config: NSAConfig) -> jax.Array:
    """Picks each query's block list from importance scores (paper eq. 11).

    Args:
      importance: [..., J] float32 scores, >= 0; see `rank_bits` for others.
      t: [...] int32 query positions (broadcastable to importance's leading shape).
      start: [...] int32 segment starts, like `t`.
      config: the operator's config.

    Returns:
      int32 [..., n], ascending, padded at the end with J. Forced blocks come first in priority, then the highest
      scores, ties to the lower index.
    """
    num_blocks = importance.shape[-1]
    n = config.num_selected
    j = jnp.arange(num_blocks, dtype=jnp.int32)
    first, last = candidate_range(t[..., None], start[..., None], config.select_block)
    candidate = (j >= first) & (j <= last)
    scores = jax.lax.bitcast_convert_type(rank_bits(importance), jnp.float32)
    priority = jnp.where(candidate, scores, -1.0)
    priority = jnp.where(forced_blocks(j, first, last, config), jnp.inf, priority)
    if num_blocks < n:
        priority = jnp.pad(priority, [(0, 0)] * (priority.ndim - 1) + [(0, n - num_blocks)], constant_values=-1.0)
    value, index = jax.lax.top_k(priority, n)  # equal values: lower index first
    index = jnp.where(value < 0, num_blocks, index)
    return jnp.sort(index, axis=-1).astype(jnp.int32)
