"""Tiles of the selected branch's kernels, as those of the others in `tiles`."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from nsa_jax.ops.target import Target
from nsa_jax.ops.tiles import ROWS, RangedHopperConfig, ranged_hopper_config

# Rows of at most this many blocks per list entry are served by causal kernels under a mask of blocks: at 2 a mask hides
# at most a quarter of the causal scores.
MASKED_BLOCKS_PER_SLOT = 2
# And of at most so many: the bits of more blocks, with the window beside them, leave too little shared memory at head
# dim 128.
MOST_MASKED_BLOCKS = 640


@dataclasses.dataclass(frozen=True)
class SelectedConfig:
    """Tiles of the selected branch's forward kernels.

    Attributes:
      keys: keys per step of all loops but the plain one; a selection block is walked in steps of this size.
      plain_keys: keys per step of the plain loop.
      plain_warps: warps of one program of the plain loop (one query token and key/value head).
      plain_stages: software pipeline depth of the plain loop.
      tile: neighbouring tokens whose shared blocks are read once, at most 32; 1 means the plain loop alone.
      share: how many tokens of a tile must list a block for it to count as shared.
      tile_warps: warps of one program of the tile loop.
      tile_stages: software pipeline depth of the tile loop.
      key_major: whether what is left of the lists is served by key block instead of the plain loop.
      gather_rows: rows of a tile of gathered queries, all their heads counted.
      gather_warps: warps of one program that gathers queries.
      gather_stages: software pipeline depth of its loop over queries.
      chunk: the most list entries of a work item.
      row_tokens: the most tokens, but for the last of a tile, whose list entries are inverted together: their queries
        should stay in the L2 cache.
      buffer_bytes: bound on the buffer of shares, likewise; token ranges and heads are served one after the other to
        stay in it.
    """

    keys: int
    plain_keys: int
    plain_warps: int
    plain_stages: int
    tile: int
    share: int
    tile_warps: int
    tile_stages: int
    key_major: bool
    gather_rows: int = 64
    gather_warps: int = 4
    gather_stages: int = 2
    chunk: int = 128
    row_tokens: int = 1 << 30
    buffer_bytes: int = 512 * 2**20


def selected_config(group: int, h_dim: int, v_dim: int, select_block: int, dtype, target: Target) -> SelectedConfig:
    """Picks the tiles of the selected branch's forward pass.

    A program of the plain loop is one warp where its state fits. A tile of neighbours has 128 rows, or 64 where the
    kernel by key block follows or heads are wide, so that its state stays in the registers of 4 warps; a block counts
    as shared if half of the tile's tokens list it. Groups of at most 8 heads are served by key block. float32 takes the
    plain loop alone, because its tiles do not fit an A100's shared memory.
    """
    narrow = h_dim + v_dim <= 256 and jnp.dtype(dtype).itemsize == 2
    key_major = group <= 8 and select_block <= 64 and jnp.dtype(dtype).itemsize == 2
    tile = (128 if narrow and not key_major else 64) // group if jnp.dtype(dtype).itemsize == 2 else 1
    tile = max(1, min(32, tile))
    keys = max(16, min(1 << (select_block - 1).bit_length(), 64))
    single = narrow and group <= 16
    exact, wide = jnp.dtype(dtype).itemsize > 2, max(h_dim, v_dim) > 128
    return SelectedConfig(
        keys=keys,
        plain_keys=min(keys, 32) if single else keys,
        plain_warps=1 if single else 4,
        plain_stages=3 if single else 1 if exact and wide and target.is_small else 2,
        tile=tile,
        share=max(min(2, tile), tile // 2),
        tile_warps=4 if narrow else 8,
        tile_stages=2,
        key_major=key_major and tile > 1,
        gather_stages=3 if narrow else 1 if target.is_small else 2,
    )


@dataclasses.dataclass(frozen=True)
class SelectedGatherConfig:
    """Tiles of the Hopper kernel that serves lists by key block.

    Attributes:
      chunk, row_tokens, buffer_bytes: see `SelectedConfig`.
      warpgroups: work items of a program, with a warpgroup each; 4 leave 128 registers to a thread, 3 leave 168.
      ahead: tiles of queries on their way while one is served, 1 or 2.
    """

    chunk: int
    row_tokens: int
    warpgroups: int
    ahead: int
    buffer_bytes: int = 2048 * 2**20


def selected_gather_config(group: int, h_dim: int, v_dim: int) -> SelectedGatherConfig:
    """Picks the gathering kernel's tiles: a row's queries, at most 12 MiB where they can, stay in the L2 cache.

    A work item has about 1,536 rows: enough that its keys and values cost little, and few enough that multiprocessors
    finish at about the same time. At head dim 128 a tile of queries and its partials take twice the registers: three
    warpgroups with one tile on its way need no spills, which four warpgroups or two tiles do.
    """
    row_tokens = 16384 if 16384 * group * h_dim * 2 <= 12 * 2**20 else 8192
    chunk, narrow = 16 * (96 // group), max(h_dim, v_dim) <= 64
    ahead = 2 if narrow and group > 4 else 1
    return SelectedGatherConfig(chunk=chunk, row_tokens=row_tokens, warpgroups=4 if narrow else 3, ahead=ahead)


def selected_hopper_config(h_dim: int, v_dim: int) -> RangedHopperConfig:
    """Picks the tiles of Hopper's kernel for the blocks that a tile of queries shares: one block at a time."""
    return RangedHopperConfig(64, 3, query_buffers=2) if max(h_dim, v_dim) <= 128 else RangedHopperConfig(64, 2)


def selected_token_config(h_dim: int, v_dim: int) -> RangedHopperConfig:
    """Picks the tiles of Hopper's kernel that serves whole lists: as many blocks on their way as there is room for."""
    return RangedHopperConfig(64, 5 if max(h_dim, v_dim) > 64 else 10, query_buffers=2)


@dataclasses.dataclass(frozen=True)
class SelectedHopperTilesConfig:
    """Tiles of the Hopper kernel for the blocks that a tile of tokens shares, one warpgroup per tile.

    Attributes:
      stages: blocks of keys and values in flight for each of three warpgroups.
      programs: programs that divide all tiles, strided, so that those in flight walk keys that are in the L2 cache.
      query_buffers: tiles of queries in flight for each warpgroup.
    """

    stages: int
    programs: int
    query_buffers: int


def selected_hopper_tiles_config(tiles: int, h_dim: int) -> SelectedHopperTilesConfig:
    """Picks how that kernel divides `tiles` tiles, those of all rows and key/value heads.

    A few programs for each of 132 multiprocessors level out walks of different lengths, and longer ones hide their
    beginnings. Heads of 128 leave shared memory for one of everything.
    """
    stages, buffers = (3, 2) if h_dim <= 64 else (1, 1)
    return SelectedHopperTilesConfig(stages, 132 * max(1, min(4, tiles // (3 * 132 * 8))), buffers)


@dataclasses.dataclass(frozen=True)
class SelectedBackwardConfig:
    """Tiles of the selected branch's backward.

    Attributes:
      rows: rows of a tile, (query, head of the group) pairs; a power of two of at least 16.
      chunk: the most queries that one work item takes from a key block's list.
      num_warps: warps per program.
      num_stages: software pipeline depth of the loop over queries.
      keep_scores: the buffer holds score gradients rather than shares of dq.
      keys: keys per program, a power of two of at least 16; larger blocks are divided. Only with `keep_scores`.
      buffer_bytes: bound on the buffer between the passes; query ranges and heads are processed one after the other to
        stay within it.
      tile: with `keep_scores`, neighbouring tokens whose shared blocks dq reads once, a power of two of at most 8; 1
        means that every token goes by itself.
      share: how many tokens of a tile must list a block for it to count as shared.
      tile_warps: warps of a program that serves a tile.
    """

    rows: int
    chunk: int
    num_warps: int
    num_stages: int
    keep_scores: bool = False
    keys: int = 64
    buffer_bytes: int = 1024 * 2**20
    tile: int = 1
    share: int = 1
    tile_warps: int = 4


def selected_backward_config(
    group: int, h_dim: int, v_dim: int, dtype, select_block: int, blocks: int, target: Target
) -> SelectedBackwardConfig:
    """Picks the tiles of the selected branch's backward pass.

    64 rows, 4 warps and 2 stages leave room for two programs on a multiprocessor; head dim 64 has room for 128 rows,
    head dim 192 for one stage. From 8 heads per group on, score gradients cost less to keep than partial sums of dq.
    Work items are long where there are many key blocks, and short where few of them have to fill the GPU. A larger
    buffer means fewer passes, each of which ends with idle multiprocessors; beside the smaller arrays of groups of
    fewer than 8 heads there is room for 2 GiB.

    Args:
      group: G.
      h_dim: H.
      v_dim: V.
      dtype: of queries, keys and values.
      select_block: l'.
      blocks: key blocks of the batch and of all key/value heads, B * K * J.
      target: the device.
    """
    wide, exact = max(h_dim, v_dim), jnp.dtype(dtype).itemsize > 2
    chunk = 1 << max(blocks // 2, 1).bit_length() - 1
    # float32 tiles must fit the shared memory, 163 KiB on an A100; a share of dq is needed from whole blocks.
    large = exact and (wide > 64 or target.is_small)
    divided = large or select_block > 64
    tile = 1 if exact or select_block > 64 else 1 << (min(128 // group, 8).bit_length() - 1)
    rows = 128 if wide <= 64 and group < 8 and not exact else 32 if wide > 128 and target.is_small else 64
    keys = 64
    if large:
        tiny = target.is_small and wide > 128
        rows, keys = 16 if tiny else 32, 16 if tiny and min(h_dim, v_dim) > 128 else 32
    return SelectedBackwardConfig(
        rows=rows,
        chunk=min(max(chunk, 64), max(16384 >> group.bit_length(), 64), 2048),
        num_warps=8 if exact else 4,
        num_stages=1 if exact or wide > 128 else 2,
        keep_scores=divided or (group >= 8 and h_dim >= select_block),
        keys=keys,
        buffer_bytes=(2048 if group < 8 else 1024) * 2**20,
        tile=tile,
        share=max(tile // 2, min(2, tile)),
        tile_warps=4 if h_dim <= 128 else 8,
    )


def selected_masked_config(h_dim: int, v_dim: int, joint: bool = False) -> RangedHopperConfig:
    """Picks the tiles of selected attention under a mask of blocks: those of short ranges, 64 keys or one block.

    `joint` kernels serve the window too. Their second accumulator takes the registers of a warpgroup.
    """
    if not joint:
        return ranged_hopper_config(h_dim, v_dim, ROWS, ROWS)
    if max(h_dim, v_dim) <= 64:
        return RangedHopperConfig(64, 3, warpgroups=3, query_buffers=2)
    return selected_hopper_config(h_dim, v_dim)
