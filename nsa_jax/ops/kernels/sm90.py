"""Query tiles of range attention's Hopper kernels: how rows lie in memory and how TMA copies them.

As in `range_attention.tiles`, row r of a key/value head is token `r // G`, head `r % G`. TMA copies rectangles, in
swizzled tiles of 8 rows. Where G is a multiple of 8, a token's heads go straight between [B, T, N, H] and a tile. Other
groups pass through a copy [B, K, T * G, H], in which any run of rows is contiguous.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from nsa_jax.ops.tiles import DIRECT_GROUPS, ROWS


@dataclasses.dataclass(frozen=True)
class RowTiles:
    """The rows of T tokens with G heads per key/value head, cut into tiles of `warpgroups` times 64 rows."""

    length: int
    group: int
    kv_heads: int
    warpgroups: int

    @property
    def direct(self) -> bool:
        return self.group in DIRECT_GROUPS

    @property
    def copies(self) -> int:
        """TMA copies that load one warpgroup's rows."""
        return ROWS // self.group if self.direct else 1

    @property
    def tile(self) -> int:
        return self.warpgroups * ROWS

    @property
    def tiles(self) -> int:
        return pl.cdiv(self.length * self.group, self.tile)

    @property
    def pad(self) -> int:
        return self.tiles * self.tile - self.length * self.group

    def per_token(self, x, fill):
        """[B, T] of JAX or NumPy repeated for every head of a group: [B, rows], with `fill` in rows past the end."""
        xp = np if isinstance(x, np.ndarray) else jnp
        return xp.pad(xp.repeat(x, self.group, axis=1), ((0, 0), (0, self.pad)), constant_values=fill)

    def per_row(self, x: jax.Array, fill) -> jax.Array:
        """[B, T, N] as [B, K, rows], with `fill` in rows past the end."""
        x = x.reshape(x.shape[0], self.length, self.kv_heads, self.group).swapaxes(1, 2)
        x = x.reshape(x.shape[0], self.kv_heads, -1)
        return jnp.pad(x, ((0, 0), (0, 0), (0, self.pad)), constant_values=fill)

    def words(self, x: jax.Array) -> jax.Array:
        """[B, T, K, W] repeated for every head of a group: [B, K, W, rows], with 0 in rows past the end."""
        x = jnp.repeat(x.transpose(0, 2, 3, 1), self.group, axis=3)
        return jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, self.pad)))

    def from_rows(self, x: jax.Array) -> jax.Array:
        """The inverse of `per_row`."""
        x = x[..., : self.length * self.group].reshape(x.shape[0], self.kv_heads, self.length, self.group)
        return x.swapaxes(1, 2).reshape(x.shape[0], self.length, -1)

    def arrange(self, x: jax.Array) -> jax.Array:
        """[B, T, N, D] as the kernels' copies index it: unchanged, or [B, K, rows, D]."""
        if self.direct:
            return x
        x = x.reshape(x.shape[0], self.length, self.kv_heads, self.group, -1).swapaxes(1, 2)
        x = x.reshape(x.shape[0], self.kv_heads, self.length * self.group, -1)
        # TMA fills rows beyond the array with zeros and does not store them, but needs whole tiles of 8 rows.
        return jnp.pad(x, ((0, 0), (0, 0), (0, -x.shape[2] % 8), (0, 0))) if x.shape[2] % 8 else x

    def restore(self, x: jax.Array) -> jax.Array:
        """The inverse of `arrange`."""
        if self.direct:
            return x
        x = x[:, :, : self.length * self.group].reshape(x.shape[0], self.kv_heads, self.length, self.group, -1)
        return x.swapaxes(1, 2).reshape(x.shape[0], self.length, self.kv_heads * self.group, -1)

    def _pieces(self, batch, kv_head, base):
        """(rows of the tile, index into `arrange`'s result, first token) of each copy of 64 rows from row `base`."""
        if not self.direct:
            yield pl.ds(0, ROWS), (batch, kv_head, pl.ds(base, ROWS)), None
            return
        for i in range(self.copies):
            token = lax.div(base, jnp.int32(self.group)) + i
            yield pl.ds(i * self.group, self.group), (batch, token, pl.ds(kv_head * self.group, self.group)), token

    def load(self, ref, smem, barrier, batch, kv_head, base) -> None:
        """Copies 64 rows of `arrange`'s result to shared memory: `copies` arrivals at `barrier`."""
        for rows, index, token in self._pieces(batch, kv_head, base):
            if token is not None:  # past the end any rows will do, but they must exist
                index = (index[0], jnp.minimum(token, self.length - 1), index[2])
            plgpu.copy_gmem_to_smem(ref.at[index], smem.at[rows], barrier)

    def store(self, smem, ref, batch, kv_head, base) -> None:
        """Copies 64 rows from shared memory to where `load` reads them; the caller waits."""
        for rows, index, token in self._pieces(batch, kv_head, base):
            copy = functools.partial(plgpu.copy_smem_to_gmem, smem.at[rows], ref.at[index])
            if token is None or self.length % self.copies == 0:
                copy()
            else:
                pl.when(token < self.length)(copy)

    def load_tile(self, n, tile, batch, kv_head, loaded, freed, tiles, per_token, per_row=(), words=()) -> None:
        """Copies all that a tile needs to buffers that the consumers free again.

        Args:
          n: how many tiles the program loaded before.
          tile, batch, kv_head: which one.
          loaded: for each buffer of each warpgroup, the barrier where `arrivals` copies arrive.
          freed: one barrier for each buffer.
          tiles: (array, buffers [in flight, 64, D]) of `arrange`'s results, for as many tiles times warpgroups.
          per_token: (array, buffers [in flight, 64]) of `per_token`'s results.
          per_row: the same of `per_row`'s results.
          words: (array, buffers [in flight, W, 64]) of `words`' results.
        """
        buffers = tiles[0][1].shape[0] // self.warpgroups
        buffer = lax.rem(n, jnp.int32(buffers))
        pl.when(n >= buffers)(lambda: plgpu.barrier_wait(freed.at[buffer]))
        for wg in range(self.warpgroups):
            at, base = buffer * self.warpgroups + wg, tile * self.tile + wg * ROWS
            barrier, own_rows = loaded.at[at], pl.ds(base, ROWS)
            for ref, smem in tiles:
                self.load(ref, smem.at[at], barrier, batch, kv_head, base)
            for ref, smem in per_token:
                plgpu.copy_gmem_to_smem(ref.at[batch, own_rows], smem.at[at], barrier)
            for ref, smem in per_row:
                plgpu.copy_gmem_to_smem(ref.at[batch, kv_head, own_rows], smem.at[at], barrier)
            for ref, smem in words:
                for word in range(smem.shape[1]):
                    plgpu.copy_gmem_to_smem(ref.at[batch, kv_head, word, own_rows], smem.at[at, word], barrier)

    def arrivals(self, tiles: int, vectors: int) -> int:
        """Copies that `load_tile` makes for a warpgroup of as many tiles and vectors, each word one."""
        return tiles * self.copies + vectors


def for_each_tile(count, tile_range, serve) -> None:
    """Calls `serve(n, before, *tile_range(n))` for n < count.

    Each range is looked up one tile ahead: what comes from global memory one number at a time has a long latency.

    Args:
      count: how many tiles.
      tile_range: n -> (tile, begin, ..., end), the key blocks [begin, end) that a tile visits.
      serve: its `before` counts the key blocks of all earlier tiles.
    """

    def body(n, carry):
        before, current = carry
        following = tile_range(jnp.minimum(n + 1, count - 1))
        serve(n, before, *current)
        return before + current[-1] - current[1], following

    lax.fori_loop(0, count, body, (jnp.int32(0), tile_range(0)))


def whole_tiles(x: jax.Array) -> jax.Array:
    """Pads keys or values [B, S, K, D] to a multiple of 8, which TMA's swizzled tiles need."""
    return jnp.pad(x, ((0, 0), (0, -x.shape[1] % 8), (0, 0), (0, 0))) if x.shape[1] % 8 else x


def tiled(*shape: int, dtype):
    """A shared memory buffer for operands of matrix products and for what TMA takes out of registers."""
    width = min(128, shape[-1] * jnp.dtype(dtype).itemsize)
    tiling = plgpu.TilingTransform((8, width // jnp.dtype(dtype).itemsize))
    transforms: Any = (tiling, plgpu.SwizzleTransform(width))  # type: ignore[abstract]
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def boxed_tiles(slots: int, width: int, dtype):
    """Tiles of 64 rows that TMA copies as one box of tokens, which may fill fewer rows.

    The two views of them are for `product_rows` and `box_rows`. Swizzling depends on addresses alone, so that a token's
    rows need not begin at a multiple of 8.
    """
    swizzle = plgpu.SwizzleTransform(width * jnp.dtype(dtype).itemsize)
    by_row = plgpu.SMEM((slots, ROWS, width), dtype, transforms=(swizzle,))  # type: ignore[abstract]
    return plgpu.RefUnion(tiled(slots, ROWS, width, dtype=dtype), by_row)


def product_rows(tiles, slot):
    """Tile `slot` of `boxed_tiles`, for matrix products."""
    return tiles[0].at[slot]


def box_rows(tiles, slot, tokens: int, group: int):
    """The first rows of tile `slot` of `boxed_tiles` as [tokens, group, width], for TMA."""
    return tiles[1].at[slot, pl.ds(0, tokens * group)].reshape(tokens, group, tiles[1].shape[-1])


def divided(refs, *arrays) -> list[list]:
    """References in a row, divided as the sequences of arrays that they are of."""
    rest = iter(refs)
    return [[next(rest) for _ in some] for some in arrays]


def load(ref, layout, **options):
    """A part of an array in a register layout; JAX before 0.11 also takes an index."""
    try:
        return plgpu.load(ref, layout=layout, **options)  # type: ignore[call-arg]
    except TypeError:
        return plgpu.load(ref, (), layout=layout, **options)


def store(ref, value):
    """Stores registers in pieces narrower than a cache line, which JAX 0.12 wants to be told is meant."""
    if jax.__version_info__ >= (0, 12):
        plgpu.store(ref, value, optimized=False)  # type: ignore[attr-defined]
    else:
        ref[...] = value


def has_bit(words, index):
    """Whether bit `index % 32`, a number or one for each word, is set in each of `words`, a vector in registers."""
    return (lax.shift_right_logical(words, jnp.broadcast_to(lax.rem(index, jnp.int32(32)), words.shape)) & 1) == 1


def transpose(ref):
    """A transposed view of a 2D ref."""
    return ref.transpose((1, 0)) if hasattr(ref, "transpose") else plgpu.transpose_ref(ref, (1, 0))


def zeros(shape, fill: float = 0.0, layout=plgpu.Layout.WGMMA):
    """A float32 register array of one value."""
    return plgpu.layout_cast(jnp.full(shape, fill, jnp.float32), layout)


def load_blocks(begin, end, before, size: int, streams, index, block_of=lambda i: i):
    """Copies the key blocks of steps [begin, end) to buffers that the consumers free again.

    Args:
      begin, end: steps.
      before: how many blocks went through the buffers for earlier tiles.
      size: keys per block.
      streams: of keys and of values, (array [B, S, K, D], buffers [stages, size, D], loaded, freed) with one barrier
        of each kind per buffer.
      index: batch entry and key/value head.
      block_of: the block number of a step.
    """
    batch, kv_head = index
    stages = streams[0][1].shape[0]

    def load_block(i, block):
        following = block_of(jnp.minimum(i + 1, end - 1))  # on its way while this one waits for its buffer
        count = before + i - begin
        slot = lax.rem(count, jnp.int32(stages))
        for ref, smem, loaded, freed in streams:
            pl.when(count >= stages)(functools.partial(plgpu.barrier_wait, freed.at[slot]))
            plgpu.copy_gmem_to_smem(ref.at[batch, pl.ds(block * size, size), kv_head], smem.at[slot], loaded.at[slot])
        return following

    lax.fori_loop(begin, end, load_block, block_of(begin))


def registers(warpgroups: int) -> tuple[int, int]:
    """Registers per thread of the consumer warpgroups and of the producer; there are 512 to divide."""
    return (240, 24) if warpgroups == 2 else (160, 32)
