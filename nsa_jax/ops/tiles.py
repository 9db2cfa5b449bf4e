"""Tiles of the kernels: a frozen record for each kernel family, and the rule that picks it from shapes.

A rule's docstring states the rule. What was measured to find it stands in benchmarks/results/tiles_h200.json, under the
rule's name. `plan` applies the rules.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from nsa_jax.ops.blocks import NSAConfig
from nsa_jax.ops.target import Target

# Rows of a Hopper warpgroup's matrix product.
ROWS = 64
# Query heads per key/value head that TMA copies from [B, T, N, H] as they lie: swizzled tiles have 8 rows. Other groups
# of heads need a rearranged copy, see `kernels.sm90`.
DIRECT_GROUPS = (8, 16, 32, 64)
# Compressed keys of a warpgroup in Hopper's scores kernel.
SCORE_KEYS = 128
# List entries of a work item below which Hopper's kernel for partial sums of dq is not used.
SM90_LEAST_CHUNK = 1024


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
      row_tokens: the most tokens whose list entries are inverted together: their queries should stay in the L2 cache.
      buffer_bytes: bound on the buffer of shares; token ranges and heads are served one after the other to stay in it.
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


def selected_config(group: int, h_dim: int, v_dim: int, select_block: int, dtype) -> SelectedConfig:
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
    return SelectedConfig(
        keys=keys,
        plain_keys=min(keys, 32) if single else keys,
        plain_warps=1 if single else 4,
        plain_stages=3 if single else 2,
        tile=tile,
        share=max(min(2, tile), tile // 2),
        tile_warps=4 if narrow else 8,
        tile_stages=2,
        key_major=key_major and tile > 1,
        gather_stages=3 if narrow else 2,
    )


@dataclasses.dataclass(frozen=True)
class SelectedGatherConfig:
    """Tiles of the Hopper kernel that serves lists by key block, at 6 heads per group.

    Attributes:
      chunk, row_tokens, buffer_bytes: see `SelectedConfig`.
      warpgroups: work items of a program, with a warpgroup each; 4 leave 128 registers to a thread.
      ahead: tiles of queries on their way while one is served, 1 or 2.
    """

    chunk: int = 512
    row_tokens: int = 16384
    buffer_bytes: int = 2048 * 2**20
    warpgroups: int = 4
    ahead: int = 2


def selected_gather_config() -> SelectedGatherConfig:
    """Picks the gathering kernel's tiles: a row's queries, 12 MiB, stay in the L2 cache."""
    return SelectedGatherConfig()


def selected_hopper_config(h_dim: int, v_dim: int) -> RangedHopperConfig:
    """Picks the tiles of Hopper's kernel for the blocks that a tile of queries shares: one block at a time."""
    return RangedHopperConfig(64, 3, query_buffers=2) if max(h_dim, v_dim) <= 128 else RangedHopperConfig(64, 2)


@dataclasses.dataclass(frozen=True)
class SelectedHopperTilesConfig:
    """Tiles of the Hopper kernel for the blocks that a tile of tokens shares, one warpgroup per tile.

    Attributes:
      stages: blocks of keys and values in flight for each of three warpgroups.
      programs: programs that divide all tiles, strided, so that those in flight walk keys that are in the L2 cache.
    """

    stages: int
    programs: int


def selected_hopper_tiles_config(tiles: int) -> SelectedHopperTilesConfig:
    """Picks how that kernel divides `tiles` tiles, those of all rows and key/value heads.

    A few programs for each of 132 multiprocessors level out walks of different lengths, and longer ones hide their
    beginnings.
    """
    return SelectedHopperTilesConfig(stages=3, programs=132 * max(1, min(4, tiles // (3 * 132 * 8))))


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
    group: int, h_dim: int, v_dim: int, dtype, select_block: int, blocks: int
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
    """
    wide, exact = max(h_dim, v_dim), jnp.dtype(dtype).itemsize > 2
    chunk = 1 << max(blocks // 2, 1).bit_length() - 1
    # float32 tiles must fit the shared memory of an A100, 163 KiB; a share of dq is needed from whole blocks.
    divided = exact and wide > 64 or select_block > 64
    tile = 1 if exact or select_block > 64 else 1 << (min(128 // group, 8).bit_length() - 1)
    return SelectedBackwardConfig(
        rows=32 if exact and wide > 64 else 128 if wide <= 64 and group < 8 and not exact else 64,
        chunk=min(max(chunk, 64), max(16384 >> group.bit_length(), 64), 2048),
        num_warps=8 if exact else 4,
        num_stages=1 if exact or wide > 128 else 2,
        keep_scores=divided or (group >= 8 and h_dim >= select_block),
        keys=32 if exact and wide > 64 else 64,
        buffer_bytes=(2048 if group < 8 else 1024) * 2**20,
        tile=tile,
        share=max(tile // 2, min(2, tile)),
        tile_warps=4 if h_dim <= 128 else 8,
    )


@dataclasses.dataclass(frozen=True)
class SelectConfig:
    """Tiles of block selection: the importance scores and the top n of each row.

    Attributes:
      keys: compressed blocks of one scores program; it keeps their keys and meets every head of its query tile.
      queries: query tokens of one scores program.
      num_warps: warps of a scores program.
      num_stages: software pipeline depth of its loop over heads.
      chunk_bytes: bound on the buffer of scores; query ranges are processed one after the other to stay within it.
    """

    keys: int
    queries: int
    num_warps: int
    num_stages: int
    chunk_bytes: int


def select_config(num_queries: int, group: int, dtype, hopper: bool = False) -> SelectConfig:
    """Picks the scores tile.

    The running sum over heads and one head's scores are both [keys, queries] in registers, and programs hide each
    other's waits, so a small query tile with a deep pipeline is fastest.

    Args:
      num_queries: T.
      group: compressed blocks per selection block, rounded up to a power of two.
      dtype: of queries and keys.
      hopper: Hopper's kernel computes the scores, of which this bounds the buffer alone.
    """
    wide = jnp.dtype(dtype).itemsize > 2
    keys = max(64 if wide else 128, group)
    queries = min(32, max(16, 1 << (num_queries - 1).bit_length()))
    large = wide or keys * queries > 128 * 64
    return SelectConfig(
        keys=keys,
        queries=queries,
        num_warps=8 if large else 4,
        num_stages=1 if wide else 3,
        chunk_bytes=(4096 if hopper else 1024) * 2**20,
    )


@dataclasses.dataclass(frozen=True)
class SelectHopperConfig:
    """Tiles of the Hopper scores kernel.

    Attributes:
      stages: query tiles (one head each) in flight.
      query_tiles: the most query tiles of 64 that one program walks with the same keys.
    """

    stages: int
    query_tiles: int


def select_hopper_config(tile_pairs: int, h_dim: int) -> SelectHopperConfig:
    """Picks the Hopper scores kernel's tiles.

    Long programs hide the loading of their keys; there must be enough of them to level out the causal triangle.

    Args:
      tile_pairs: pairs of a query tile and a key tile, over all batches and key/value heads.
      h_dim: H.
    """
    return SelectHopperConfig(stages=6 if h_dim <= 128 else 4, query_tiles=max(1, min(8, tile_pairs // 1024)))


def top_n_shape(width: int) -> tuple[int, int]:
    """Rows per program and warps of the top-n kernel for rows of `width` scores (a power of two).

    A warp keeps up to 2048 scores, 64 registers per thread; narrow rows share a program so that its lanes are full.
    """
    return max(1, min(8, 1024 // width)), max(1, min(16, width // 2048))


@dataclasses.dataclass(frozen=True)
class RangedConfig:
    """Tiles of one kernel of ranged attention (the compressed and window branches).

    Attributes:
      rows: (query, head) rows of a query tile, a power of two.
      keys: keys per block.
      num_warps: warps per program.
      num_stages: software pipeline depth of the loop.
      splits: programs that share the queries of one key block in the dk, dv kernel; 0 picks `ranged_splits`.
    """

    rows: int
    keys: int
    num_warps: int
    num_stages: int
    splits: int = 0


def ranged_forward_config(h_dim: int, v_dim: int, dtype) -> RangedConfig:
    """Picks the Triton forward's tiles: 128 rows keep K and V's traffic low; float32 needs smaller ones."""
    wide = max(h_dim, v_dim) > 128
    if jnp.dtype(dtype).itemsize > 2:
        return RangedConfig(64, 32, 4, 1 if wide else 2)
    if wide:
        return RangedConfig(128, 64, 8, 2)
    return RangedConfig(128, 64, 4 if max(h_dim, v_dim) <= 64 else 8, 3)


def ranged_dq_config(h_dim: int, v_dim: int, dtype, target: Target, span: int | None) -> RangedConfig:
    """Picks the Triton dq kernel's tiles.

    Long loops take 128 rows; a short window, where masked blocks weigh more, takes the smaller tile. The large tile of
    head dim 128 needs 160 KiB of shared memory, which sm80 does not have.
    """
    wide = max(h_dim, v_dim) > 128
    if jnp.dtype(dtype).itemsize > 2:
        return RangedConfig(32 if wide else 64, 32, 4, 1)
    if wide:
        return RangedConfig(64, 32, 4, 2)
    if max(h_dim, v_dim) <= 64:
        short = span is not None and span <= 1024
        return RangedConfig(128, 64, 4, 2) if short else RangedConfig(128, 32, 4, 3)
    if target.is_hopper and (span is None or span > 1024):
        return RangedConfig(128, 64, 8, 3)
    return RangedConfig(64, 64, 4, 2)


def ranged_dkv_config(h_dim: int, v_dim: int, dtype, target: Target, span: int | None) -> RangedConfig:
    """Picks the Triton dk, dv kernel's tiles.

    Hopper has shared memory for 128 keys over 8 warps; sm80 takes 64 over 4. Head dim 64 takes 32 rows by 128 keys in
    long loops and 64 by 64 in a short window.
    """
    wide = max(h_dim, v_dim) > 128
    if jnp.dtype(dtype).itemsize > 2:
        return RangedConfig(32, 32, 4, 1)
    if wide:
        return RangedConfig(32, 64, 8, 1)
    if max(h_dim, v_dim) <= 64:
        short = span is not None and span <= 1024
        return RangedConfig(64, 64, 4, 3) if short else RangedConfig(32, 128, 4, 3)
    if target.is_hopper:
        return RangedConfig(64, 128, 8, 3)
    return RangedConfig(64, 64, 4, 2)


@dataclasses.dataclass(frozen=True)
class RangedHopperConfig:
    """Tiles of the Hopper forward and dq of ranged attention.

    Attributes:
      keys: keys per block.
      stages: blocks of keys and values in flight.
      tiles: query tiles that one program serves; 0 picks `ranged_hopper_tiles_per_program`.
      most_tiles: the most that it picks.
      warpgroups: 2 or 3 that compute, for 64 rows of a query tile each; 3 leave 160 registers to a thread.
      query_buffers: query tiles in flight, 1 or 2.
    """

    keys: int
    stages: int
    tiles: int = 0
    warpgroups: int = 2
    query_buffers: int = 1
    most_tiles: int = 8


def ranged_hopper_config(h_dim: int, v_dim: int, span: int | None, num_keys: int) -> RangedHopperConfig:
    """Picks the Hopper forward's tiles.

    Long loops take 128 keys a block. Short ranges, which have more masked blocks, and few keys take 64. Wide heads
    leave shared memory for 64 keys; narrow ones leave registers for a third warpgroup. Queries have a second buffer
    where shared memory has room.
    """
    wide, few = max(h_dim, v_dim), span is not None and span <= 1024 or num_keys <= 512
    if wide > 128:
        return RangedHopperConfig(64, 2)
    if wide > 64:
        return RangedHopperConfig(64, 3, query_buffers=2) if few else RangedHopperConfig(128, 2)
    keys, stages = (64, 3) if few else (128, 2)
    return RangedHopperConfig(keys, stages, warpgroups=3, query_buffers=2)


def ranged_hopper_tiles_per_program(tiles: int, most: int) -> int:
    """Query tiles that one program serves one after the other, at most `most`; `tiles` counts all of them.

    The next tile's queries and keys are on their way while one is finished; there must be programs enough to level out
    the causal triangle.
    """
    return max(1, min(most, tiles // (8448 // most)))


def ranged_hopper_dq_config(h_dim: int, v_dim: int, span: int | None, num_keys: int) -> RangedHopperConfig:
    """Picks the Hopper dq kernel's tiles; under a mask of blocks `span` is a block, 64.

    Narrow heads take three warpgroups, a second buffer for queries and many query tiles per program. Otherwise long
    loops take 128 keys a block and short ones 64.
    """
    wide = max(h_dim, v_dim)
    if wide <= 64:
        most = 16 if span is None and num_keys > 1024 else 8
        return RangedHopperConfig(64, 3, warpgroups=3, query_buffers=2, most_tiles=most)
    if wide > 128:
        return RangedHopperConfig(64, 2 if v_dim <= 128 else 1)
    if span is not None and span <= 1024:
        return RangedHopperConfig(64, 2)
    return RangedHopperConfig(64, 3) if num_keys <= 1024 else RangedHopperConfig(128, 2)


@dataclasses.dataclass(frozen=True)
class RangedHopperKeysConfig:
    """Tiles of the Hopper dk, dv kernel of ranged attention: 64 query rows against 64 keys of each warpgroup.

    Attributes:
      stages: query tiles in flight.
      warpgroups: 2 or 3 that compute; see `RangedHopperConfig`.
      splits: programs that share the queries of one key block; 0 picks `ranged_splits`.
    """

    stages: int
    warpgroups: int = 2
    splits: int = 0


def ranged_hopper_dkv_config(h_dim: int, v_dim: int, span: int | None, num_keys: int) -> RangedHopperKeysConfig:
    """Picks the Hopper dk, dv kernel's tiles.

    Narrow heads take three warpgroups unless there are so few keys that the third has none. Short loops gain nothing
    from many stages.
    """
    if max(h_dim, v_dim) <= 64 and num_keys >= 384:
        return RangedHopperKeysConfig(3, 3)
    return RangedHopperKeysConfig(4 if max(h_dim, v_dim) <= 128 and (span is None or span > 1024) else 2)


# Rows of at most this many blocks per list entry are served by causal kernels under a mask of blocks: at 2 a mask hides
# at most a quarter of the causal scores.
MASKED_BLOCKS_PER_SLOT = 2


def selected_masked_config(h_dim: int, v_dim: int) -> RangedHopperConfig:
    """Picks the tiles of selected attention under a mask of blocks: 64 keys, one block."""
    if max(h_dim, v_dim) <= 64:
        return RangedHopperConfig(64, 3, warpgroups=3, query_buffers=2)
    return selected_hopper_config(h_dim, v_dim)


def ranged_splits(programs: int, query_tiles: int, share_bytes: int) -> int:
    """Programs per key block of the dk, dv kernel: enough to fill a GPU several times over.

    Args:
      programs: key blocks times key/value heads times batch.
      query_tiles: query tiles of a row.
      share_bytes: bytes of one float32 share of dk and dv; all shares together stay within 256 MiB.
    """
    wanted = -(-1024 // programs)
    return max(1, min(wanted, query_tiles // 16, 256 * 2**20 // share_bytes))


@dataclasses.dataclass(frozen=True)
class DecodeConfig:
    """Tiles and splits of decoding.

    Attributes:
      keys: keys per step of the loops over compressed and listed blocks (dense decoding: over all keys).
      compressed_parts: programs that share the compressed blocks of one (token, key/value head).
      selected_parts: programs that share its listed blocks.
      num_warps: warps of these kernels.
      num_stages: software pipeline depth of their loops.
      window_parts: programs that share its window, in the kernel that ranks.
      window_keys: keys per step of their loop: small, for that kernel's programs should be many at a time.
      columns: compressed blocks whose scores one program reads.
      rank_warps: warps of the ranking kernel.
      fold_programs: if more programs than these read scores, they are a kernel of their own.
    """

    keys: int
    compressed_parts: int
    selected_parts: int
    num_warps: int
    num_stages: int
    window_parts: int
    window_keys: int
    columns: int
    rank_warps: int
    fold_programs: int = 528


# Programs of the attention kernels: as many as an H200 holds at once, two per multiprocessor, so that none waits for
# a second round.
_DECODE_PROGRAMS = 256


def decode_config(pairs: int, num_cmp: int, config: NSAConfig, row_bytes: int) -> DecodeConfig:
    """Picks how a decode step is split.

    Programs are as many as an H200 holds at once. The compressed blocks are cut into at most half as many parts as
    there are tiles, but up to 16, because summing many parts costs more than it saves.

    Args:
      pairs: (query token, key/value head) pairs in the batch.
      num_cmp: compressed blocks that the cache can hold.
      config: block geometry.
      row_bytes: bytes of one key and one value.
    """
    keys = 64 if row_bytes <= 512 else 32
    wanted = max(1, -(-_DECODE_PROGRAMS // pairs))
    tiles = -(-num_cmp // keys)
    return DecodeConfig(
        keys=keys,
        compressed_parts=min(wanted, tiles, max(16, -(-tiles // 2))),
        selected_parts=min(wanted, config.num_selected),
        num_warps=4,
        num_stages=3,
        window_parts=min(wanted, -(-config.window // keys)),
        window_keys=32,
        columns=256,
        rank_warps=4,
    )
