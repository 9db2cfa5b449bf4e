"""Kernel configurations: small frozen dataclasses, chosen by a heuristic from shape and GPU generation.

Each kernel family adds one dataclass (tile sizes, warps, stages) and one function that picks it.
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
    """Picks the selected forward's tiles.

    Measured on an H200 in bfloat16, lists random. In the plain loop one warp per program was as fast as 2, and 32 keys
    in 3 stages took 11.2 ms where 64 in 2 took 11.7 (N=64, K=4, H=128, 64k). A tile of 128 rows (64 where the
    key-major kernels follow, or where heads are wide) keeps its state in the registers of 4 warps; at G = 16 a
    `share` of 3 or 4 of 8 tokens took the same time. Key-major won at G = 4 (N=32, K=8, H=128, 32k: 5.1 against
    11.9 ms) and G = 6 (N=12, K=2, H=64, 32k: 1.3 against 1.8) and lost at G = 16 (64k: 16.8 against 14.1); the
    switch at 8 lies between, unmeasured. float32 takes the plain loop alone: its tiles would not fit an A100's
    shared memory.
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
    """Picks those tiles: a row's queries, 12 MiB, should stay in the L2 cache.

    Measured on an H200 (4 rows of 65,536, N=6, K=1, H=64, lists random, one tile ahead): 1.35 ms with rows of 8,192 or
    16,384 tokens, 1.61 with 32,768 and 1.68 with 65,536; 1.43 with items of 256 entries and 1.32 with 1,024. Two tiles
    ahead took 1.25, which programs of 1 or 2 warpgroups have no registers for (1.61 and 1.81). With what comes before
    and after it, 2.40 with a buffer of 1 GiB, 2.37 with 2 and 2.35 with 4.
    """
    return SelectedGatherConfig()


def selected_hopper_config(h_dim: int, v_dim: int) -> RangedHopperConfig:
    """Picks the Hopper kernel's tiles for the blocks that a tile of queries shares: one block at a time.

    At N=64, K=4, H=128 and 64k, lists random, a second buffer for queries took 1.49 ms where one took 1.51, and the
    Triton kernel 1.78; with lists that 64 tokens share, 4.6 to 4.7 and 5.1.
    """
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

    A few programs per multiprocessor of 132 level out walks of different lengths; longer ones hide their beginnings.
    On an H200 it hardly matters: 0.30 ms with 132 to 528 programs and 0.32 with 1,056, 2 stages as fast as 3 (4 rows of
    65,536, N=6, K=1, H=64).
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
    """Picks the selected backward's tiles; `blocks` is the number of key blocks over batch and key/value heads, B*K*J.

    Measured on an H200. 64 rows, 4 warps and 2 stages leave room for two programs per multiprocessor, at head dim 64
    128 rows do (2.70 for 2.95 ms, N=12, K=2, 64k); head dim 192 has shared memory for one stage. With 8 heads or
    more per group, keeping the score gradients costs less than keeping shares of dq. Long work items save partial
    sums of dk and dv; short sequences need more and shorter ones to fill the GPU (N=32, K=8, H=128, 32k: 6.74 ms
    with up to 2,048 queries, 6.89 with 1,024). Each pass over the buffer ends with multiprocessors that wait for
    the last work items: 1 GiB instead of 512 MiB, half as many passes, took 19.6 instead of 20.9 ms at 64k; for shares
    of groups of fewer than 8 heads, the smaller arrays beside them, 2 GiB 3.81 instead of 3.91 (4 rows of 65,536, N=6,
    K=1, H=64; 4 GiB 3.83). Tiles for dq took 18.0 instead of 20.0 ms in all with lists shared by 64 tokens and 21.4
    instead of 21.0 with random ones.
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
      chunk_bytes: bound on the buffer of scores; query ranges are processed one after the other to stay within it:
        2.23 ms with 1 GiB, 2.44 with 256 MiB (2 rows of 65,536, N=12, K=2, H=64); later 2.04 with 1 GiB, 2.00 with 2
        and 1.91 with 4, which hold them all.
    """

    keys: int
    queries: int
    num_warps: int
    num_stages: int
    chunk_bytes: int


def select_config(num_queries: int, group: int, dtype, hopper: bool = False) -> SelectConfig:
    """Picks the scores tile.

    The running sum over heads and one head's scores are both [keys, queries] in registers, and programs hide each
    other's waits, so a small query tile with a deep pipeline won on an H200: 128 x 32, 4 warps, 3 stages against 128 x
    64, 128 x 128, 256 x 64, 64 x 64 and others.

    Args:
      num_queries: T.
      group: compressed blocks per selection block, rounded up to a power of two.
      dtype: dtype of queries and keys.
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
    """Picks the dq kernel's tiles.

    On an H200 at head dim 128, 128 rows over 8 warps reached 504 TFLOP/s in long loops (480 with 64 rows over 4 warps);
    in a window, where masked blocks weigh more, the smaller tile won (4.75 against 5.3 ms at 64k). At head dim 64,
    128 rows by 32 keys was the fastest in long loops, and 64 keys in a window of 512 (0.83 against 0.86 ms for 64 rows
    of 2,048, N=12). The large tile needs 160 KiB of shared memory, which leaves no room on sm80.
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
    """Picks the dk, dv kernel's tiles.

    On an H200 at head dim 128, 128 keys over 8 warps with three stages reached 480 TFLOP/s; 64 keys over 4 warps, which
    also fits sm80's shared memory, 418. At head dim 64, 32 rows by 128 keys was the fastest in long loops, and 64 by 64
    in a window of 512 (1.12 against 1.23 ms for 64 rows of 2,048, N=12).
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

    128 keys per block reached 526 TFLOP/s at head dim 128 and 64k, 64 keys 450; short ranges (a window of 512) have
    more masked blocks and won with 64, as did the compressed branch of 8,192 tokens (1.61 against 1.66 ms for 32 rows,
    N=16, K=1). Wider heads leave shared memory for 64 keys, narrow ones registers for a third warpgroup: 1.80 against
    2.01 ms for the compressed branch of 4 rows of 65,536, N=6, K=1, H=64. There 64 keys won up to 8,192 tokens (0.237
    and 0.247 ms for 16 rows; 0.252 and 0.301 for 128 rows of 2,048). A second buffer for queries, where shared memory
    has room, then took 1.80 to 1.76, 0.230 to 0.221 and 0.228 to 0.217 ms.
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

    At head dim 128 and 64k, 128 keys took 10.3 ms and 64 keys 10.6; 2.21 and 2.00 for the compressed branch of 32 rows
    of 8,192, N=16, K=1. At head dim 64 three warpgroups took 2.38 ms where two took 2.54 (the shape of
    `ranged_hopper_config`), 0.340 for 0.408 at 2,048. Several query tiles per program, with a second buffer for queries
    where shared memory has room, then took 2.31 to 2.17 and 0.346 to 0.218, and 1.39 to 1.29 under a mask. Of the 8,192
    tiles of 4 rows of 65,536 a program took 16 in 2.06 ms, 12 in 2.15, 7 in 2.24; the forward is slower with more.
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
    """Picks the Hopper dk, dv kernel's tiles; short loops gain nothing from many stages.

    Three warpgroups took 3.27 ms for the compressed branch where two took 3.75, and 1.84 for 1.93 under a mask (the
    shapes of `ranged_hopper_config` and `selected_masked_config`), and 0.53 for 0.56 among 511 keys (32 rows of
    8,192). Among 127 keys too many of the third have none: 0.37 for 0.29 ms. Three stages instead of two then took 3.26
    to 3.18, four 3.33, and for a window of 512 1.23 to 1.21 and 1.24 (4 rows of 65,536, N=6, K=1, H=64). Since each
    warpgroup leaves out tiles that see none of its own keys, that window took 1.04, two warpgroups 1.15.
    """
    if max(h_dim, v_dim) <= 64 and num_keys >= 384:
        return RangedHopperKeysConfig(3, 3)
    return RangedHopperKeysConfig(4 if max(h_dim, v_dim) <= 128 and (span is None or span > 1024) else 2)


# Rows of at most this many blocks per list entry are served by causal kernels under a mask of blocks: at 2 a mask hides
# at most a quarter of the causal scores.
MASKED_BLOCKS_PER_SLOT = 2


def selected_masked_config(h_dim: int, v_dim: int) -> RangedHopperConfig:
    """Picks the tiles of selected attention under a mask: 64 keys, one block.

    Three warpgroups took 1.24 and 1.39 ms forward and for dq where two took 1.35 and 1.61 (128 rows of 2,048, N=6,
    K=1, H=64); a second buffer for the forward's queries 1.16 where one took 1.17.
    """
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
# a second round. At 128k tokens and B=16, twice as many took 84 instead of 74 us.
_DECODE_PROGRAMS = 256


def decode_config(pairs: int, num_cmp: int, config: NSAConfig, row_bytes: int) -> DecodeConfig:
    """Picks how a decode step is split.

    Measured on an H200 at N=64, K=4, H=128 in bfloat16: the compressed branch reads 3.6 TB/s with tiles of 64 keys, 4
    warps and 3 stages, and about as fast with 128 keys or 2 stages. At B=16 a call took 80 us at 64k tokens and 128 to
    132 at 128k, where ranking was 30 of them with the scores read by its own programs; the kernel of their own for many
    scores (`fold_programs`) and ranking by several thresholds at a time came after that and have not been timed.

    Args:
      pairs: (query token, key/value head) pairs in the batch.
      num_cmp: compressed blocks that the cache can hold.
      config: block geometry.
      row_bytes: bytes of one key and one value.
    """
    keys = 64 if row_bytes <= 512 else 32
    wanted = max(1, -(-_DECODE_PROGRAMS // pairs))
    # At B=1, shares of one tile won at 8k tokens (8 tiles, 3.1 against 4.2 us); at 64k summing up 64 of them cost more.
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
