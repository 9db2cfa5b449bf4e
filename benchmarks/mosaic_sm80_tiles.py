"""What the forward and the backward in `mosaic_sm80_*.py` share: sizes, where rows are, and copies of tiles.

Query rows are (token, head) pairs of one key/value head, in that order.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from benchmarks import mosaic_sm80_parts as parts
from benchmarks.mosaic_sm80_parts import DIM
from nsa_jax.config import NSAConfig

SCALAR = plgpu.Layout.WG_SPLAT(())


@dataclasses.dataclass(frozen=True)
class Variant:
    """Tile sizes of kernels whose programs have query rows and visit blocks of keys: the forward and dq.

    Attributes:
      row_tiles: groups of 64 query rows of a warpgroup.
      warpgroups: of a program.
      keys: keys per block.
      stages: blocks of keys and values in shared memory. With one, keys and values are copied in turns.
      at_once: keys of a block whose scores are in registers at once, in dq with two stages or more; 0 is all.
    """

    row_tiles: int
    warpgroups: int
    keys: int
    stages: int
    at_once: int = 0

    @property
    def name(self) -> str:
        once = f"_once{self.at_once}" if self.at_once else ""
        return f"rows{self.rows}_wg{self.warpgroups}_keys{self.keys}_stages{self.stages}{once}"

    @property
    def own_rows(self) -> int:
        """Query rows of a warpgroup."""
        return self.row_tiles * parts.TILE

    @property
    def rows(self) -> int:
        """Query rows of a program."""
        return self.own_rows * self.warpgroups


@dataclasses.dataclass(frozen=True)
class KeyVariant:
    """Tile sizes of dk and dv, whose programs have 64 keys per warpgroup and visit tiles of query rows.

    Attributes:
      warpgroups: of a program.
      rows: query rows per tile.
      stages: tiles of query rows in shared memory, at least two.
      at_once: query rows of a tile whose scores are in registers at once.
      held: whether keys and values stay in registers, else in shared memory.
      programs: how many there are at least; the query tiles of a block of keys are split over several for that.
    """

    warpgroups: int
    rows: int
    stages: int
    at_once: int
    held: bool = False
    programs: int = 1024

    @property
    def name(self) -> str:
        name = f"keys{self.keys}_wg{self.warpgroups}_rows{self.rows}_stages{self.stages}_once{self.at_once}"
        return f"{name}{'_held' if self.held else ''}_programs{self.programs}"

    @property
    def keys(self) -> int:
        """Keys of a program."""
        return parts.TILE * self.warpgroups


@dataclasses.dataclass(frozen=True)
class Problem:
    """Sizes, which the parts of a kernel share."""

    length: int
    heads: int
    kv_heads: int
    num_keys: int
    config: NSAConfig
    variant: Variant | KeyVariant

    @classmethod
    def of(cls, query, key, value, config: NSAConfig, variant: Variant | KeyVariant) -> Problem:
        """Of query [B, T, N, H] and key and value [B, M, K, H].

        Raises:
          ValueError: H is not 128, or the rows are not in whole tiles.
        """
        problem = cls(*query.shape[1:3], key.shape[2], key.shape[1], config, variant)
        dims = {x.shape[-1] for x in (query, key, value)}
        if dims != {DIM} or problem.length * problem.group % variant.rows:
            raise ValueError(
                f"query={query.shape}, key={key.shape}: {DIM} columns, and rows in whole tiles of {variant}"
            )
        return problem

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    @property
    def threads(self) -> int:
        return self.variant.warpgroups * parts.THREADS

    @property
    def tiles(self) -> int:
        """Query tiles of a key/value head."""
        return self.length * self.group // self.variant.rows

    def query_row(self, row: ir.Value, tile: ir.Value, kv_head: ir.Value, batch: ir.Value) -> ir.Value:
        """Of a row of a tile, its number in the array [B * T * N, H]."""
        token, head = parts.split(arith.addi(row, parts.times(tile, self.variant.rows)), self.group)
        token = arith.addi(token, parts.times(batch, self.length))
        return arith.addi(arith.addi(parts.times(token, self.heads), parts.times(kv_head, self.group)), head)

    def pair_row(self, row: ir.Value, tile: ir.Value, kv_head: ir.Value, batch: ir.Value) -> ir.Value:
        """Of a row of a tile, its number in the array of `row_pairs`."""
        head = arith.addi(parts.times(batch, self.kv_heads), kv_head)
        first = arith.addi(parts.times(head, self.tiles), tile)
        return arith.addi(parts.times(first, self.variant.rows), row)

    def key_row(self, row: ir.Value, block: ir.Value, kv_head: ir.Value, batch: ir.Value) -> ir.Value:
        """Of a row of a block of keys, its number in the array [B * M * K, H]; past the end it is the last key's."""
        key = arith.minui(arith.addi(row, parts.times(block, self.variant.keys)), parts.constant(self.num_keys - 1))
        key = arith.addi(key, parts.times(batch, self.num_keys))
        return arith.addi(parts.times(key, self.kv_heads), kv_head)

    def high(self, tile: ir.Value) -> np.ndarray:
        """Of each of a thread's query rows, the keys it sees, [row tiles, 2]."""
        assert isinstance(self.variant, Variant)
        first = arith.addi(thread_row(self.variant.own_rows), parts.times(tile, self.variant.rows))
        highs = np.empty((self.variant.row_tiles, 2), object)
        c = self.config
        for i, half in np.ndindex(highs.shape):
            token = arith.divui(parts.plus(first, i * parts.TILE + half * 8), parts.constant(self.group))
            token = parts.plus(token, 1 - c.compress_block + c.compress_stride)
            highs[i, half] = arith.divui(arith.maxsi(token, parts.constant(0)), parts.constant(c.compress_stride))
        return highs

    def visible(self, token):
        """Compressed blocks that a token sees."""
        c = self.config
        ends = jnp.maximum(token + (1 - c.compress_block + c.compress_stride), 0)
        return lax.div(ends, jnp.int32(c.compress_stride))

    def visits(self, tile):
        """Of a query tile, how many blocks of keys all of its rows see whole, and how many any of them sees."""
        rows, keys = self.variant.rows, self.variant.keys
        ends = tile * rows, tile * rows + rows - 1
        lowest, highest = (self.visible(lax.div(row, jnp.int32(self.group))) for row in ends)
        return lax.div(lowest, jnp.int32(keys)), lax.div(highest + (keys - 1), jnp.int32(keys))


def thread_row(own_rows: int) -> ir.Value:
    """The first row of a thread in its program, whose warpgroups have `own_rows` each; the next is 8 below."""
    lane = arith.divui(arith.remui(mgpu.thread_idx(), parts.constant(32)), parts.constant(4))
    return arith.addi(arith.addi(parts.own_row(), lane), parts.times(parts.warpgroup(), own_rows))


def thread_column() -> ir.Value:
    """The first column of a thread in 8; the second is the next."""
    return parts.times(arith.remui(mgpu.thread_idx(), parts.constant(4)), 2)


def slot_of(smem, slot: ir.Value, rows: int) -> ir.Value:
    """Where one of several buffers of `rows` rows begins."""
    return arith.addi(parts.shared(smem), parts.times(slot, rows * parts.ROW_BYTES))


def _start_copy(problem: Problem, ref, smem, slot, number, place, rows: int, row_of: Callable) -> None:
    """Starts the copy of a tile to a slot; row r of the tile is row `row_of(r, number, *place)` of the array."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), SCALAR, SCALAR, (SCALAR,) * 2))
    def start(_, array, smem, slot, number, place):
        where = [parts.scalar(x) for x in (number, *place)]
        buffer = slot_of(smem, parts.scalar(slot), rows)
        parts.copy_rows(buffer, array, lambda row: row_of(row, *where), rows, problem.threads)

    start(ref, smem, slot, number, place)


def start_queries(problem: Problem, query_ref, query_smem, slot, tile, place) -> None:
    """Starts the copy of a tile of query rows to a slot."""
    _start_copy(problem, query_ref, query_smem, slot, tile, place, problem.variant.rows, problem.query_row)


def start_keys(problem: Problem, key_ref, key_smem, slot, block, place) -> None:
    """Starts the copy of a block of keys, or of values, to a slot."""
    _start_copy(problem, key_ref, key_smem, slot, block, place, problem.variant.keys, problem.key_row)


def wait_copies(groups: int) -> None:
    """Waits for all but the last groups of copies of every thread of the program."""

    @plgpu.inline_mgpu()
    def wait(_):
        parts.wait(groups)

    wait()


@dataclasses.dataclass(frozen=True)
class KeyBlocks:
    """The blocks of keys and values that a query tile sees, copied to shared memory before they are used.

    Attributes:
      problem: of query tiles.
      arrays: an array and its slots in shared memory, of what is used first, and of the other: keys or values.
      tile: the query tile.
      place: key/value head and batch.
    """

    problem: Problem
    arrays: tuple[tuple, tuple]
    tile: jax.Array
    place: tuple[jax.Array, jax.Array]

    def _start(self, slot, block, arrays) -> None:
        _, end = self.problem.visits(self.tile)
        block = jnp.clip(block, 0, jnp.maximum(end - 1, 0))
        for ref, smem in arrays:
            start_keys(self.problem, ref, smem, slot, block, self.place)

    def begin(self) -> None:
        """Starts the first copies."""
        stages, zero = self.problem.variant.stages, jnp.int32(0)
        if stages == 1:
            self._start(zero, zero, self.arrays[:1])
        for block in range(stages - 1):
            self._start(jnp.int32(block), jnp.int32(block), self.arrays)

    def visit(self, carry, first: Callable, rest: Callable):
        """The carry after all blocks.

        With one stage, the two arrays are copied in turns: each while the other is used. With more they are in a ring.

        Args:
          carry: before the first block.
          first: slot -> what is computed from the array that is used first.
          rest: (whether all rows see the whole block, what `first` returned, carry, slot, block) -> carry.
        """
        stages, zero = self.problem.variant.stages, jnp.int32(0)

        def in_turns(exact, block, carry):
            wait_copies(0)
            self._start(zero, block, self.arrays[1:])
            found = first(zero)
            wait_copies(0)
            self._start(zero, block + 1, self.arrays[:1])
            return rest(exact, found, carry, zero, block)

        def in_ring(exact, block, carry):
            wait_copies(2 * (stages - 2))
            ahead = block + stages - 1
            self._start(lax.rem(ahead, jnp.int32(stages)), ahead, self.arrays)
            slot = lax.rem(block, jnp.int32(stages))
            return rest(exact, first(slot), carry, slot, block)

        step = in_turns if stages == 1 else in_ring
        whole, end = self.problem.visits(self.tile)
        carry = lax.fori_loop(0, whole, functools.partial(step, True), carry)
        carry = lax.fori_loop(whole, end, functools.partial(step, False), carry)
        wait_copies(0)
        return carry


def row_pairs(lse: jax.Array, delta: jax.Array, kv_heads: int) -> jax.Array:
    """What the backward needs of every row, row after row of a key/value head: float32 [B, K, T * N / K, 2].

    Args:
      lse: float32 [B, T, N], in base 2, or `NO_WEIGHT` for a row that sees nothing.
      delta: float32 [B, T, N].
      kv_heads: K.
    """
    batch, length, heads = lse.shape
    pairs = jnp.stack([-lse, delta], -1).reshape(batch, length, kv_heads, heads // kv_heads, 2)
    return pairs.swapaxes(1, 2).reshape(batch, kv_heads, -1, 2)


def store_rows(problem: Problem, words: np.ndarray, smem, out, where: list[ir.Value]) -> None:
    """Stores rows of a query tile through shared memory, in which each warp touches its own rows alone.

    Args:
      problem: of query tiles.
      words: pairs of bfloat16 in the order of a thread's registers, [row tiles, 16, 2].
      smem: place for the tile.
      out: the array [B, T, N, 128].
      where: tile, key/value head and batch.
    """
    variant = problem.variant
    assert isinstance(variant, Variant)
    base, column = parts.shared(smem), parts.times(thread_column(), 2)
    for i, n, half in np.ndindex(words.shape):
        at = parts.plus(thread_row(variant.own_rows), i * parts.TILE + half * 8)
        address = arith.addi(base, arith.addi(parts.place_of(at, parts.constant(n)), column))
        word = mgpu.utils.bitcast(words[i, n, half], parts.i32())
        parts.asm(parts.void(), [address, word], "st.shared.b32 [$0], $1;", "r,r,~{memory}", effects=True)
    parts.asm(parts.void(), [], "bar.warp.sync 0xffffffff;", "~{memory}", effects=True)
    row, piece = parts.split(arith.remui(mgpu.thread_idx(), parts.constant(32)), parts.PIECES)
    own = arith.addi(parts.own_row(), parts.times(parts.warpgroup(), variant.own_rows))
    four = llvm.StructType.get_literal([parts.i32()] * 4)
    for i, step in np.ndindex(variant.row_tiles, 8):
        at = parts.plus(arith.addi(own, row), i * parts.TILE + step * 2)
        address = arith.addi(base, parts.place_of(at, piece))
        text = "ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];"
        got = parts.asm(four, [address], text, "=r,=r,=r,=r,r,~{memory}", effects=True)
        got = [llvm.extractvalue(parts.i32(), got, [j]) for j in range(4)]
        number = arith.addi(parts.times(problem.query_row(at, *where), parts.PIECES), piece)
        text = "st.global.v4.b32 [$0], {$1, $2, $3, $4};"
        pointer = parts.in_global(out, number, parts.PIECE)
        parts.asm(parts.void(), [pointer, *got], text, "l,r,r,r,r,~{memory}", effects=True)
