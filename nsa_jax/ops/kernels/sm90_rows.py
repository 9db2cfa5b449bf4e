"""Query tiles of range attention's Hopper kernels: how rows lie in memory and how TMA copies them.

As in `range_attention.tiles`, row r of a key/value head is token `r // G`, head `r % G`. TMA copies rectangles, in
swizzled tiles of 8 rows. What `tiles.lies_as_read` names goes straight between [B, T, N, H] and a tile: where G is a
multiple of 8, token by token; where G divides 8, in boxes of 8 / G tokens; where rows are as wide as the swizzle, in
boxes of whole tokens and of parts of those at both ends. Other groups pass through a copy [B, K, T * G, H], in which
any run of rows is contiguous; with one key/value head the array is that copy already.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from nsa_jax.ops.kernels import sm90_gather
from nsa_jax.ops.kernels.sm90 import tiled, transpose
from nsa_jax.ops.tiles import CUT_GROUPS, DIRECT_GROUPS, ROWS, lies_as_read

# Swizzled tiles of 16-bit numbers have 8 rows of 64 columns.
_TILE_ROWS, _BOX_WIDTH = 8, 64


@dataclasses.dataclass(frozen=True)
class RowTiles:
    """The rows of T tokens with G heads per key/value head, cut into tiles of `warpgroups` times 64 rows."""

    length: int
    group: int
    kv_heads: int
    warpgroups: int
    width: int  # columns, of the widest array

    @property
    def by_token(self) -> bool:
        """Whether the heads of a token fill whole tiles of 8 rows."""
        return self.group in DIRECT_GROUPS and self.group % _TILE_ROWS == 0

    @property
    def boxed(self) -> bool:
        """Whether several tokens share a tile of 8 rows, and the key/value heads of a token lie between them."""
        return self.group in DIRECT_GROUPS and self.group < _TILE_ROWS and self.kv_heads > 1

    @property
    def cut(self) -> bool:
        """Whether copies cut tokens at the ends of 64 rows, and the key/value heads of a token lie between them."""
        return self.kv_heads > 1 and self.group in CUT_GROUPS and lies_as_read(self.group, self.width)

    @property
    def even(self) -> bool:
        """Whether 64 rows never hold rows past the end together with others."""
        return self.length * self.group % ROWS == 0

    @property
    def copies(self) -> int:
        """TMA copies that load one warpgroup's rows."""
        if self.boxed:
            return 1 if self.even else ROWS // _TILE_ROWS
        if self.cut:
            tokens, heads = _cut_boxes(self.group)
            return 1 + (ROWS - tokens * self.group) // heads
        return ROWS // self.group if self.by_token else 1

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
        """[B, T, N, D] as the kernels' copies index it.

        Unchanged, or [B, K, rows, D]. For boxes [B, T, N, D / 64, 64], or if rows are even [B * T * G / 8, 8 / G, N,
        D / 64, 64], so that a box of five dimensions, the most that TMA has, covers 64 rows: neither moves any data.
        """
        if self.by_token or self.cut:
            return x
        if self.boxed:
            tokens = (-1, _TILE_ROWS // self.group) if self.even else x.shape[:2]
            return x.reshape(*tokens, x.shape[2], x.shape[3] // _BOX_WIDTH, _BOX_WIDTH)
        x = x.reshape(x.shape[0], self.length, self.kv_heads, self.group, -1).swapaxes(1, 2)
        x = x.reshape(x.shape[0], self.kv_heads, self.length * self.group, -1)
        # TMA fills rows beyond the array with zeros and does not store them, but needs whole tiles of 8 rows.
        return jnp.pad(x, ((0, 0), (0, 0), (0, -x.shape[2] % 8), (0, 0))) if x.shape[2] % 8 else x

    def restore(self, x: jax.Array) -> jax.Array:
        """The inverse of `arrange`."""
        if self.by_token or self.cut:
            return x
        if self.boxed:
            return x.reshape(-1, self.length, x.shape[2], x.shape[3] * x.shape[4])
        x = x[:, :, : self.length * self.group].reshape(x.shape[0], self.kv_heads, self.length, self.group, -1)
        return x.swapaxes(1, 2).reshape(x.shape[0], self.length, self.kv_heads * self.group, -1)

    def arranged(self, batch: int, width: int, dtype) -> jax.ShapeDtypeStruct:
        """What `arrange` makes of [B, T, N, width]."""
        x = jax.ShapeDtypeStruct((batch, self.length, self.kv_heads * self.group, width), dtype)
        return jax.eval_shape(self.arrange, x)

    def places(self, base, batch, kv_head, moved: int):
        """Of 64 rows from row `base`, each int32 [64]: 1 for those before the end, and where they are in flat arrays.

        The first place is of [B, T, N] as `arrange` takes it, the second of the array whose `moved` key/value heads
        have become batch entries. Rows past the end have the places of the last row.
        """
        row = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=sm90_gather.LAYOUT) + base
        group, count = jnp.int32(self.group), self.length * self.group
        last = jnp.minimum(row, count - 1)
        token = lax.div(last, group)
        head = last - token * group

        def place(batch, kv_head, kv_heads):
            return ((token + batch * self.length) * kv_heads + kv_head) * group + head

        own = place(batch, kv_head, self.kv_heads)
        inside = (row < count).astype(jnp.int32)
        if moved == 1:
            return inside, own, own
        entry = lax.div(batch, jnp.int32(moved))
        return inside, own, place(entry, batch - entry * moved, moved)

    def buffer(self, slots: int, width: int, dtype):
        """Shared memory for `slots` tiles of 64 rows; `views` tells how it is used."""
        if self.boxed:
            return row_boxes(slots, width, dtype)
        if self.cut:
            return boxed_tiles(slots, width, dtype)
        return tiled(slots, ROWS, width, dtype=dtype)

    def views(self, buffer):
        """(for matrix products and registers, for `load` and `store`), each with the slot as first index."""
        return (buffer[0], buffer[-1]) if self.boxed or self.cut else (buffer, buffer)

    def _pieces(self, smem, batch, kv_head, base, last=None):
        """(part of the tile, index into `arrange`'s result, first token) of each copy of 64 rows from row `base`.

        The first token is at most `last`, and None where TMA itself ends at the last row.
        """
        if self.cut:
            yield from self._cut_pieces(smem, batch, kv_head, base, last)
            return
        if not (self.by_token or self.boxed):
            yield smem, (batch, kv_head, pl.ds(base, ROWS)), None
            return
        heads, tokens = pl.ds(kv_head * self.group, self.group), _TILE_ROWS // self.group
        for i in range(self.copies):
            token = lax.div(base, jnp.int32(self.group)) + i * (ROWS // self.group // self.copies)
            token = token if last is None else jnp.minimum(token, last)
            if self.by_token:
                yield smem.at[pl.ds(i * self.group, self.group)], (batch, token, heads), token
            elif self.even:
                tile = lax.div(batch * self.length + token, jnp.int32(tokens))
                yield row_box(smem, self.group), (pl.ds(tile, ROWS // _TILE_ROWS), slice(None), heads), token
            else:
                yield row_box(smem, self.group, i), (batch, pl.ds(token, tokens), heads), token

    def _cut_pieces(self, smem, batch, kv_head, base, last):
        """`_pieces` where tokens begin anywhere in 64 rows: one box of whole tokens, the other rows in equal parts."""
        group = jnp.int32(self.group)
        tokens, heads = _cut_boxes(self.group)
        before = lax.rem(group - lax.rem(base, group), group)  # rows of a token that began in the 64 before

        def piece(row, token, head, tokens, heads):
            token = token if last is None else jnp.minimum(token, last)
            part = smem.at[pl.ds(row, tokens * heads)].reshape(tokens, heads, smem.shape[-1])
            return part, (batch, pl.ds(token, tokens), pl.ds(kv_head * self.group + head, heads)), token

        yield piece(before, lax.div(base + before, group), 0, tokens, self.group)
        for i in range(self.copies - 1):
            row = i * heads + jnp.where(i * heads < before, 0, tokens * self.group)
            token = lax.div(base + row, group)
            yield piece(row, token, base + row - token * group, 1, heads)

    def load(self, ref, smem, barrier, batch, kv_head, base) -> None:
        """Copies 64 rows of `arrange`'s result to shared memory: `copies` arrivals at `barrier`."""
        # Past the end any rows will do, but they must exist, and be of this batch entry.
        last = self.length - (ROWS // self.group if self.copies == 1 else 1)
        for part, index, _ in self._pieces(smem, batch, kv_head, base, last):
            plgpu.copy_gmem_to_smem(ref.at[index], part, barrier)

    def store(self, smem, ref, batch, kv_head, base) -> None:
        """Copies 64 rows from shared memory to where `load` reads them; the caller waits."""
        # A store past the end may reach the next batch entry. Boxes of even rows have no dimension that ends there.
        # That of tokens JAX folds into that of batch entries, where TMA has too few, or leaves out (T = 1).
        drops = self.even and not self.pad
        for part, index, token in self._pieces(smem, batch, kv_head, base):
            copy = functools.partial(plgpu.copy_smem_to_gmem, part, ref.at[index])
            if token is None or drops:
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
          tiles: (array, buffers) of `arrange`'s results: the second of `views`, for as many tiles times warpgroups.
          per_token: (`per_token`'s results in one array [n, 1 or B, rows], buffers [in flight, 64] for each).
          per_row: (array, buffers) of `per_row`'s results.
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
            for i, smem in enumerate(per_token[1]):
                entry = entry_of(per_token[0], batch, axis=1)
                plgpu.copy_gmem_to_smem(per_token[0].at[i, entry, own_rows], smem.at[at], barrier)
            for ref, smem in per_row:
                plgpu.copy_gmem_to_smem(ref.at[batch, kv_head, own_rows], smem.at[at], barrier)
            for ref, smem in words:
                for word in range(smem.shape[1]):
                    plgpu.copy_gmem_to_smem(ref.at[batch, kv_head, word, own_rows], smem.at[at, word], barrier)

    def arrivals(self, tiles: int, vectors: int) -> int:
        """Copies that `load_tile` makes for a warpgroup of as many tiles and vectors, each word one."""
        return tiles * self.copies + vectors


def entry_of(ref, batch, axis: int = 0):
    """The index of a batch entry in an array that may have one for all."""
    return batch if ref.shape[axis] > 1 else 0


def _cut_boxes(group: int) -> tuple[int, int]:
    """(whole tokens that every 64 rows hold, heads of the equal parts that the other rows are)."""
    heads = math.gcd(ROWS, group)
    return (ROWS - group + heads) // group, heads


def row_boxes(slots: int, width: int, dtype):
    """Tiles [64, width] as `tiled` makes them, and as `row_box` takes them.

    Swizzling depends on addresses alone: the second view names the dimensions that these tiles have in memory.
    """
    shape = (slots, ROWS // _TILE_ROWS, width // _BOX_WIDTH, _TILE_ROWS, _BOX_WIDTH)
    swizzle = plgpu.SwizzleTransform(_BOX_WIDTH * jnp.dtype(dtype).itemsize)
    boxes = plgpu.SMEM(shape, dtype, transforms=(swizzle,))  # type: ignore[abstract]
    return plgpu.RefUnion(tiled(slots, ROWS, width, dtype=dtype), boxes)


def row_box(tile, group: int, part: int | None = None):
    """A tile of `row_boxes` for TMA: [8, 8 / G, G, width / 64, 64], or of 8 rows of it the last four dimensions."""
    count, columns, rows, width = tile.shape
    if part is None:
        return transpose(tile.reshape(count, columns, rows // group, group, width), (0, 2, 3, 1, 4))
    return transpose(tile.at[part].reshape(columns, rows // group, group, width), (1, 2, 0, 3))


def boxed_tiles(slots: int, width: int, dtype):
    """Tiles of 64 rows that TMA copies as one box of tokens, which may fill fewer rows.

    The two views of them are for `product_rows` and `box_rows`. Swizzling depends on addresses alone, so that a token's
    rows need not begin at a multiple of 8. A row has at most 128 bytes, the widest swizzle.
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
