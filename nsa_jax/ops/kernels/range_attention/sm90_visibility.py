"""Which keys the rows of a query tile see, for the Hopper kernels of range attention: one class for each answer.

Every row sees a range of keys, `KeyRange`. Others restrict it to some blocks, of `keys` keys each: `BlockMask` by one
bit per row and block, `Neighbours` by a list of blocks for each tile. `BlockMaskAndWindow` is of two attentions.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from nsa_jax.ops.kernels import sm90, sm90_columns, sm90_rows
from nsa_jax.ops.kernels.range_attention.tiles import PHASES, WINDOW_PHASES, KnownRanges, tile_bounds
from nsa_jax.ops.tiles import ROWS

# One number per row of a matrix product.
ROW_LAYOUT = plgpu.Layout.WGMMA.reduce(1)


# A position behind any key.
_BEHIND = 2**30


def joint_limits(bounds, window) -> jax.Array:
    """Limits of the phases of `BlockMaskAndWindow` from `tile_bounds` of its two attentions: int32 [B, tiles, 7]."""
    bounds, window = jnp.broadcast_arrays(bounds, window)
    begin, exact_begin, exact_end, end = jnp.moveaxis(bounds, -1, 0)
    window_begin = jnp.clip(window[..., 0], begin, end)
    limits = [begin, jnp.minimum(exact_begin, window_begin), jnp.minimum(exact_end, window_begin), window_begin]
    limits += [jnp.clip(window[..., i], window_begin, end) for i in (1, 2)]
    return jnp.stack([*limits, end], axis=-1)


class KeyRange:
    """Each row sees the keys of its range.

    Attributes:
      bounds: int32, which blocks a tile visits: `tile_bounds` [1 or B, tiles, 4], or [B, K, tiles, 2] of `Neighbours`.
      num_words: words of bits that are loaded with every row.
      phases: of the steps between a tile's limits: whether every row sees whole blocks, and how many attentions there
        are.
      by_warp: whether there is one more limit, of steps that each warp serves or leaves out.
    """

    num_words = 0
    phases: tuple[tuple[bool, int], ...] = PHASES
    by_warp = False

    def __init__(self, rows: sm90_rows.RowTiles, row_low, row_high, keys: int, known: KnownRanges | None = None):
        self.rows = rows
        if known is not None:
            row_low, row_high = rows.per_token(known.low[None], known.num_keys), rows.per_token(known.high[None], 0)
        self.bounds = jnp.asarray(tile_bounds(row_low, row_high, rows.tile, keys), jnp.int32)

    def grid(self, programs: int, kv_heads: int, batch: int) -> tuple[tuple[int, int, int], tuple[str, str, str]]:
        """The grid and the names of its axes, the last of which runs fastest: late tiles, which see most, go first."""
        return (programs, kv_heads, batch), ("program", "kv_head", "batch")

    def mask_arrays(self) -> tuple[jax.Array, ...]:
        """What kernels take besides `bounds`."""
        return ()

    def tile_range(self, bounds_ref, tile, batch, kv_head):
        """A tile's limits, between which `phases` lie: (begin, exact_begin, exact_end, end) of its steps."""
        entry = sm90_rows.entry_of(bounds_ref, batch)
        return tuple(bounds_ref[entry, tile, i] for i in range(len(self.phases) + 1))

    def look_up(self, mask_refs, tile, batch, kv_head, i) -> tuple:
        """What step i needs from global memory, read one step ahead: (block, bits), or nothing."""
        return ()

    def block_of(self, mask_refs, tile, batch, kv_head):
        """A function from a step to its block."""
        return lambda i: i

    def words(self, mask_refs, words_smem) -> list:
        """(array, buffers) of the words of bits, for `RowTiles.load_tile`."""
        return []

    def seen(self, words_smem, at, i, bits, wg):
        """Which rows see the block of step i, or None if all do as far as ranges allow."""
        return None

    def where_seen(self, numbers, otherwise, words_smem, at, i):
        """Numbers of rows, `otherwise` where a row does not see the block of step i."""
        seen = self.seen(words_smem, at, i, None, None)
        return numbers if seen is None else jnp.where(seen, numbers, otherwise)


class BlockMask(KeyRange):
    """Each row sees what its range holds of the blocks that its bits name.

    Args:
      listed: int32 [B, T, K, W], bit j % 32 of word j // 32: whether the query sees keys of block j.
    """

    def __init__(self, rows: sm90_rows.RowTiles, row_low, row_high, keys: int, known: KnownRanges | None, listed):
        super().__init__(rows, row_low, row_high, keys, known)
        self.listed, self.num_words = listed, listed.shape[-1]

    def mask_arrays(self) -> tuple[jax.Array, ...]:
        return (self.rows.words(self.listed),)

    def words(self, mask_refs, words_smem) -> list:
        return [(mask_refs[0], words_smem)]

    def seen(self, words_smem, at, i, bits, wg):
        words = sm90.load(words_smem.at[at, lax.div(i, jnp.int32(32))], ROW_LAYOUT)
        return sm90.has_bit(words, i)


class BlockMaskAndWindow(BlockMask):
    """`BlockMask`, and beside it a second attention that sees the end of every row's range, whatever its bits say.

    Args:
      window: a `tiles.Window`.
    """

    phases = (*PHASES, *WINDOW_PHASES)

    def __init__(
        self, rows: sm90_rows.RowTiles, row_low, row_high, keys: int, known: KnownRanges | None, listed, window
    ):
        super().__init__(rows, row_low, row_high, keys, known, listed)
        low, high = window.low, row_high
        if window.known is not None:
            low, high = window.known.low[None], rows.per_token(window.known.high[None], 0)
        bounds = tile_bounds(rows.per_token(low, _BEHIND), high, rows.tile, keys)
        self.bounds = joint_limits(self.bounds, jnp.asarray(bounds, jnp.int32))


class Neighbours(KeyRange):
    """Each row sees what its range holds of the blocks that its tile lists, if the block's bit of its token is set.

    Args:
      block, bits, num_shared: of a `neighbours.Split` by tiles of as many tokens as a query tile has.
    """

    phases = PHASES[1:]

    def __init__(self, rows: sm90_rows.RowTiles, block, bits, num_shared):
        self.rows, self.lists, self.bounds = rows, (block, bits), num_shared

    def mask_arrays(self) -> tuple[jax.Array, ...]:
        return self.lists

    def tile_range(self, bounds_ref, tile, batch, kv_head):
        count, whole = (bounds_ref[batch, kv_head, tile, i] for i in range(2))
        return jnp.int32(0), whole, count

    def look_up(self, mask_refs, tile, batch, kv_head, i) -> tuple:
        return mask_refs[0][batch, kv_head, tile, i], mask_refs[1][batch, kv_head, tile, i]

    def block_of(self, mask_refs, tile, batch, kv_head):
        return lambda i: mask_refs[0][batch, kv_head, tile, i]

    def seen(self, words_smem, at, i, bits, wg):
        if bits is None:  # every token of the tile lists the block
            return None
        row = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=ROW_LAYOUT) + wg * ROWS
        return sm90.has_bit(jnp.broadcast_to(bits, row.shape), lax.div(row, jnp.int32(self.rows.group)))


class TileLists(Neighbours):
    """`Neighbours` of a split with all blocks of the lists: those that the tile does not share come last."""

    by_warp = True

    def grid(self, programs: int, kv_heads: int, batch: int):
        """One head after the other: tiles have about equally many blocks, and those of one head fit the L2 cache."""
        return (batch, kv_heads, programs), ("batch", "kv_head", "program")

    def tile_range(self, bounds_ref, tile, batch, kv_head):
        return *super().tile_range(bounds_ref, tile, batch, kv_head), bounds_ref[batch, kv_head, tile, 2]


def hide(x, fill: float, first, low_smem, high_smem):
    """A tile of products [rows, keys] with `fill` where the key lies outside the row's range.

    Args:
      first: position of the first key.
      low_smem, high_smem: int32 [64].
    """
    low, high = (sm90.load(smem, ROW_LAYOUT) for smem in (low_smem, high_smem))
    return sm90_columns.where_columns(sm90_columns.own_columns(low, high, first, x.shape[1]), x, fill)


def hide_in_columns(x, fill: float, position, low_smem, high_smem):
    """`hide` of a tile [keys, rows]; `position` is `positions(first, x.shape)`."""
    layout = plgpu.Layout.WGMMA.reduce(0)
    visible = position >= lax.broadcast_in_dim(sm90.load(low_smem, layout), x.shape, [1])
    visible &= position < lax.broadcast_in_dim(sm90.load(high_smem, layout), x.shape, [1])
    return jnp.where(visible, x, fill)


def positions(first, shape: tuple[int, int]):
    """Positions of the keys of a tile [keys, rows] of products, from `first` on."""
    return plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=plgpu.Layout.WGMMA) + first


class KeyBlockRange:
    """The dk, dv kernel's counterpart of `KeyRange`: which rows see the keys of a warpgroup.

    Attributes:
      num_words: words of bits that are loaded with every tile of rows.
    """

    num_words = 0
    mask_words = 0

    def mask_arrays(self, rows: sm90_rows.RowTiles) -> tuple[jax.Array, ...]:
        """What the kernel takes besides ranges."""
        return ()

    def first_word(self, first_block):
        """The first of the words that hold the bits of a program's blocks."""
        return jnp.minimum(lax.div(first_block, jnp.int32(32)), self.mask_words - self.num_words)

    def load(self, mask_refs, words_smem, slot, barrier, batch, kv_head, first_word, base) -> None:
        """Copies the words of 64 rows from row `base` on to words_smem [slots, W, 64]: `num_words` arrivals."""

    def where_seen(self, numbers, otherwise, words_smem, slot, own_block, first_word, layout):
        """Numbers of rows, `otherwise` where a row does not see block `own_block`."""
        return numbers


class KeyBlockMask(KeyBlockRange):
    """The counterpart of `BlockMask`; its blocks have 64 keys, one warpgroup's."""

    def __init__(self, warpgroups: int, listed):
        self.listed, self.mask_words = listed, listed.shape[-1]
        # Blocks of one program lie in one word of bits, or in two where warpgroups are no power of two.
        self.num_words = min(self.mask_words, 1 if 32 % warpgroups == 0 else 2)

    def mask_arrays(self, rows: sm90_rows.RowTiles) -> tuple[jax.Array, ...]:
        return (rows.words(self.listed),)

    def load(self, mask_refs, words_smem, slot, barrier, batch, kv_head, first_word, base) -> None:
        for word in range(self.num_words):
            words = mask_refs[0].at[batch, kv_head, first_word + word, pl.ds(base, ROWS)]
            plgpu.copy_gmem_to_smem(words, words_smem.at[slot, word], barrier)

    def where_seen(self, numbers, otherwise, words_smem, slot, own_block, first_word, layout):
        word = jnp.clip(lax.div(own_block, jnp.int32(32)) - first_word, 0, self.num_words - 1)
        seen = sm90.has_bit(sm90.load(words_smem.at[slot, word], layout), own_block)
        return jnp.where(seen, numbers, otherwise)
