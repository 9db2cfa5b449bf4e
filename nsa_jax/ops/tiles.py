"""Tiles of the kernels: a frozen record for each kernel family, and the rule that picks it from shapes.

A rule's docstring states the rule. What was measured to find it stands in benchmarks/results/tiles_h200.json, under the
rule's name. `plan` applies the rules.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from nsa_jax.ops.target import Target

# Rows of a Hopper warpgroup's matrix product.
ROWS = 64
# Query heads per key/value head that TMA copies from [B, T, N, H] as they lie: they divide a warpgroup's rows, and fill
# or divide the 8 rows of a swizzled tile. Other groups of heads need a rearranged copy, see `kernels.sm90_rows`.
DIRECT_GROUPS = (1, 2, 4, 8, 16, 32, 64)
# Those that it copies so where rows are as wide as its swizzle, 128 bytes: they may then begin anywhere in a tile, and
# the tokens at both ends of 64 rows are cut.
CUT_GROUPS = (3, 6, 12, 24)
# Compressed keys of a warpgroup in Hopper's scores kernel.
SCORE_KEYS = 128


def lies_as_read(group: int, width: int) -> bool:
    """Whether TMA copies groups of heads from [B, T, N, width] as they lie; `width` is the wider of H and V."""
    return group in DIRECT_GROUPS or (group in CUT_GROUPS and width <= ROWS)


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


def select_config(num_queries: int, group: int, dtype, target: Target, hopper: bool = False) -> SelectConfig:
    """Picks the scores tile.

    The running sum over heads and one head's scores are both [keys, queries] in registers, and programs hide each
    other's waits, so a small query tile with a deep pipeline is fastest.

    Args:
      num_queries: T.
      group: compressed blocks per selection block, rounded up to a power of two.
      dtype: of queries and keys.
      target: the device.
      hopper: Hopper's kernel computes the scores, of which this bounds the buffer alone.
    """
    wide = jnp.dtype(dtype).itemsize > 2
    keys = max((32 if target.is_small else 64) if wide else 128, group)
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

    A warp keeps up to 2048 scores, 64 registers per thread; narrow rows share a program so that its lanes are full. On
    an H200, rows of 128 took 20.6 us two by two, 21.6 as four and 24.8 as eight, rows of 512 took 301 two by two and
    321 one by one.
    """
    return 8 if width < 128 else max(1, min(2, 1024 // width)), max(1, min(16, width // 2048))


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


def ranged_forward_config(h_dim: int, v_dim: int, dtype, target: Target) -> RangedConfig:
    """Picks the Triton forward's tiles: 128 rows keep K and V's traffic low; float32 needs smaller ones."""
    wide = max(h_dim, v_dim) > 128
    if jnp.dtype(dtype).itemsize > 2:
        if target.is_small:
            return RangedConfig(32 if wide else 64, 32, 4, 2 if max(h_dim, v_dim) <= 64 else 1)
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
        if target.is_small and max(h_dim, v_dim) > 64:
            return RangedConfig(16 if min(h_dim, v_dim) > 128 else 32, 16 if wide else 32, 4, 1)
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
        if wide and target.is_small:
            return RangedConfig(16, 16 if min(h_dim, v_dim) > 128 else 32, 4, 1)
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
class RangedSm80Config:
    """Tiles of the sm80 forward and dq of ranged attention.

    Attributes:
      rows: (query, head) rows of a query tile, a multiple of 64.
      keys: keys per block, a multiple of 16.
    """

    rows: int
    keys: int


@dataclasses.dataclass(frozen=True)
class RangedSm80KeysConfig:
    """Tiles of its dk, dv kernel, whose programs have 64 keys.

    Attributes:
      rows: query rows per tile, a multiple of 16.
      stages: tiles of query rows in shared memory, at least two.
      splits: programs that share the queries of one key block; 0 picks `ranged_splits`.
    """

    rows: int
    stages: int
    splits: int = 0


def ranged_sm80_forward_config() -> RangedSm80Config:
    """The forward's tiles: 64 KiB of shared memory at head dim 128, so that an A100 has two programs at once."""
    return RangedSm80Config(rows=128, keys=64)


def ranged_sm80_dq_config() -> RangedSm80Config:
    """The dq kernel's tiles: 80 KiB at head dim 128. It holds the products of two matrices, so blocks are smaller."""
    return RangedSm80Config(rows=128, keys=32)


def ranged_sm80_dkv_config() -> RangedSm80KeysConfig:
    """The dk, dv kernel's tiles: 65 KiB at head dim 128, for two programs at once."""
    return RangedSm80KeysConfig(rows=32, stages=2)


@dataclasses.dataclass(frozen=True)
class RangedHopperConfig:
    """Tiles of the Hopper forward and dq of ranged attention.

    Attributes:
      keys: keys per block.
      stages: blocks of keys and values in flight.
      tiles: query tiles that one program serves; 0 picks `ranged_hopper_tiles_per_program`.
      most_tiles: the most that it picks.
      warpgroups: 2 to 4 that compute, for 64 rows of a query tile each; 3 leave 160 registers to a thread, 4 leave 112.
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

    More warpgroups hide each other's waits, as many as registers allow: three at head dim 128, four at 64. There they
    take 64 keys a block, but in long loops at head dim 64, which take 128 keys and three warpgroups. Wide heads leave
    shared memory for two warpgroups and one buffer of queries.
    """
    wide, few = max(h_dim, v_dim), span is not None and span <= 1024 or num_keys <= 2048
    if wide > 128:
        return RangedHopperConfig(64, 2)
    if wide > 64:
        return RangedHopperConfig(64, 3, warpgroups=3, query_buffers=2)
    if few:
        return RangedHopperConfig(64, 3, warpgroups=4, query_buffers=2)
    return RangedHopperConfig(128, 3, warpgroups=3, query_buffers=2)


def ranged_hopper_tiles_per_program(tiles: int, most: int) -> int:
    """Query tiles that one program serves one after the other, at most `most`; `tiles` counts all of them.

    The next tile's queries and keys are on their way while one is finished; there must be programs enough to level out
    the causal triangle.
    """
    return max(1, min(most, tiles // (8448 // most)))


@dataclasses.dataclass(frozen=True)
class RangedHopperQueryConfig(RangedHopperConfig):
    """Tiles of the Hopper dq kernel.

    Attributes:
      overlap: the last product of a block goes on while the exponentials of the next are taken, and the gradient of the
        output stays in registers.
    """

    overlap: bool = False


def ranged_hopper_dq_config(h_dim: int, v_dim: int, span: int | None, num_keys: int) -> RangedHopperQueryConfig:
    """Picks the Hopper dq kernel's tiles; under a mask of blocks `span` is a block, 64.

    Narrow heads take three warpgroups, a second buffer for queries and many query tiles per program. Heads of more than
    64 overlap the blocks of each warpgroup, as long as registers suffice.
    """
    wide = max(h_dim, v_dim)
    if wide <= 64:
        most = 16 if span is None and num_keys > 1024 else 8
        return RangedHopperQueryConfig(64, 3, warpgroups=3, query_buffers=2, most_tiles=most)
    if wide > 128:
        return RangedHopperQueryConfig(64, 2 if v_dim <= 128 else 1)
    return RangedHopperQueryConfig(64, 3, overlap=True)


@dataclasses.dataclass(frozen=True)
class RangedHopperKeysConfig:
    """Tiles of the Hopper dk, dv kernel of ranged attention: 64 query rows against 64 keys of each warpgroup.

    Attributes:
      stages: query tiles in flight.
      warpgroups: 2 or 3 that compute; see `RangedHopperConfig`.
      splits: programs that share the queries of one key block; 0 picks `ranged_splits`.
      overlap: the last products of a tile go on while the exponentials of the next are taken; the rounded weights and
        gradients that they multiply stay in registers until then.
    """

    stages: int
    warpgroups: int = 2
    splits: int = 0
    overlap: bool = False


def ranged_hopper_dkv_config(h_dim: int, v_dim: int, span: int | None, num_keys: int) -> RangedHopperKeysConfig:
    """Picks the Hopper dk, dv kernel's tiles.

    Narrow heads take three warpgroups, whose waits overlap with each other's arithmetic, unless there are so few keys
    that the third has none. Heads of more than 64 overlap the tiles of each warpgroup, as long as registers suffice;
    short loops gain nothing from a fourth stage.
    """
    wide, short = max(h_dim, v_dim), span is not None and span <= 1024
    if wide <= 64:
        return RangedHopperKeysConfig(3, 3) if num_keys >= 384 else RangedHopperKeysConfig(2 if short else 4)
    if wide > 128:
        return RangedHopperKeysConfig(2)
    return RangedHopperKeysConfig(3 if short else 4, overlap=True)


def ranged_splits(programs: int, query_tiles: int, share_bytes: int, seen: int | None = None) -> int:
    """Programs per key block of the dk, dv kernel: enough to fill a GPU several times over.

    Args:
      programs: key blocks times key/value heads times batch.
      query_tiles: query tiles of a row.
      share_bytes: bytes of one float32 share of dk and dv; all shares together stay within 256 MiB.
      seen: query tiles that a key block visits on average, if tracing knows it. A program then gets 35 of them, if that
        leaves programs to fill the GPU twice: each one loads its keys first and writes a share of dk and dv at its end
        (benchmarks/results/splits_h100.json).
    """
    wanted = -(-1024 // programs)
    if seen is not None:
        wanted = min(wanted, max(-(-256 // programs), seen // 35))
    return max(1, min(wanted, query_tiles // 16, 256 * 2**20 // share_bytes))
