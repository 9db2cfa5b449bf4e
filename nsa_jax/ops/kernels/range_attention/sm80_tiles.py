"""What the kernels `sm80_*` of range attention share: where rows are, what they see, and copies of tiles.

Query rows are (token, head) pairs of one key/value head, in that order, in whole tiles: rows past the last one see
nothing and are not stored.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from nsa_jax.ops.kernels import sm80
from nsa_jax.ops.kernels.range_attention.tiles import KnownRanges, for_batch, numpy_of, tile_bounds
from nsa_jax.ops.kernels.sm80 import ACC, SCALAR
from nsa_jax.ops.kernels.softmax import NO_WEIGHT


@dataclasses.dataclass(frozen=True)
class Problem:
    """Sizes, which the parts of a kernel share.

    Attributes:
      length: T.
      heads, kv_heads: N and K.
      num_keys: S.
      dim: of queries, keys and values.
      rows: of a query tile, a multiple of 64, or in the kernel of dk and dv fewer.
      keys: per block.
    """

    length: int
    heads: int
    kv_heads: int
    num_keys: int
    dim: int
    rows: int
    keys: int

    @classmethod
    def of(cls, query, key, rows: int, keys: int) -> Problem:
        """Of query [B, T, N, H] and key [B, S, K, H]."""
        _, length, heads, dim = query.shape
        return cls(length, heads, key.shape[2], key.shape[1], dim, rows, keys)

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    @property
    def row_tiles(self) -> int:
        """Groups of 64 rows of a query tile."""
        return self.rows // sm80.TILE

    @property
    def tiles(self) -> int:
        """Query tiles of a key/value head."""
        return pl.cdiv(self.length * self.group, self.rows)

    @property
    def ragged(self) -> bool:
        """Whether the last tile has rows past the last one."""
        return self.length * self.group % self.rows != 0

    @property
    def pad(self) -> int:
        return self.tiles * self.rows - self.length * self.group

    def row_in_head(self, row: ir.Value, tile: ir.Value) -> ir.Value:
        """Index of a tile's row among those of its key/value head."""
        return arith.addi(row, sm80.times(tile, self.rows))

    def is_row(self, row: ir.Value, tile: ir.Value) -> ir.Value:
        """Whether a row of a tile is not past the last one."""
        last = sm80.constant(self.length * self.group)
        return arith.cmpi(arith.CmpIPredicate.ult, self.row_in_head(row, tile), last)

    def query_row(self, row: ir.Value, tile: ir.Value, kv_head: ir.Value, batch: ir.Value) -> ir.Value:
        """Index of a tile's row in the array [B * T * N, H]; past the end it is the last row's."""
        number = self.row_in_head(row, tile)
        if self.ragged:
            number = arith.minui(number, sm80.constant(self.length * self.group - 1))
        token, head = sm80.split(number, self.group)
        token = arith.addi(token, sm80.times(batch, self.length))
        return arith.addi(arith.addi(sm80.times(token, self.heads), sm80.times(kv_head, self.group)), head)

    def pair_row(self, row: ir.Value, tile: ir.Value, kv_head: ir.Value, batch: ir.Value) -> ir.Value:
        """Index of a tile's row in `row_pairs`."""
        head = arith.addi(sm80.times(batch, self.kv_heads), kv_head)
        return arith.addi(sm80.times(head, self.tiles * self.rows), self.row_in_head(row, tile))

    def range_row(self, row: ir.Value, tile: ir.Value, batch: ir.Value) -> ir.Value:
        """Index of a tile's row in `row_ranges`."""
        return arith.addi(sm80.times(batch, self.tiles * self.rows), self.row_in_head(row, tile))

    def key_row(self, row: ir.Value, block: ir.Value, kv_head: ir.Value, batch: ir.Value) -> ir.Value:
        """Index of a block's key in the array [B * S * K, H]; past the end it is the last key's."""
        key = arith.minui(arith.addi(row, sm80.times(block, self.keys)), sm80.constant(self.num_keys - 1))
        key = arith.addi(key, sm80.times(batch, self.num_keys))
        return arith.addi(sm80.times(key, self.kv_heads), kv_head)

    def _per_row(self, x, fill: int):
        """[B, T] of JAX or NumPy for every row, [B, tiles * rows]."""
        xp = numpy_of(x)
        return xp.pad(xp.repeat(x, self.group, axis=1), ((0, 0), (0, self.pad)), constant_values=fill)

    def row_ranges(self, low: jax.Array, high: jax.Array) -> jax.Array:
        """What rows see, as the first key and how many: int32 [B, tiles * rows, 2]."""
        width = jnp.maximum(high - low, 0)
        return jnp.stack([self._per_row(low, 0), self._per_row(width, 0)], -1).astype(jnp.int32)

    def bounds(self, low, high, known: KnownRanges | None) -> jax.Array:
        """`tile_bounds` of the tiles."""
        batch = low.shape[0]
        if known is not None:
            low, high = known.low[None], known.high[None]
        low, high = self._per_row(low, self.num_keys), self._per_row(high, 0)
        return for_batch(tile_bounds(low, high, self.rows, self.keys), batch)

    def row_pairs(self, lse: jax.Array, delta: jax.Array) -> jax.Array:
        """What the backward needs of every row besides: float32 [B, K, tiles * rows, 2].

        Args:
          lse: float32 [B, T, N], in base 2, or `NO_WEIGHT` for a row that sees nothing.
          delta: float32 [B, T, N].
        """
        # XLA would fuse delta into the loop that stores it in another order, with one thread to a row.
        lse, delta = lax.optimization_barrier((lse, delta))
        pairs = jnp.stack([-lse, delta], -1).reshape(-1, self.length, self.kv_heads, self.group, 2)
        pairs = pairs.swapaxes(1, 2).reshape(-1, self.kv_heads, self.length * self.group, 2)
        if self.ragged:
            pairs = jnp.pad(pairs, ((0, 0), (0, 0), (0, self.pad), (0, 0)))
            past = jnp.arange(pairs.shape[2]) >= self.length * self.group
            pairs = jnp.where(past[:, None] & (jnp.arange(2) == 0), -NO_WEIGHT, pairs)
        return pairs.astype(jnp.float32)


def slot_of(smem, slot: ir.Value, size: int) -> ir.Value:
    """Where one of several buffers of `size` bytes begins."""
    return arith.addi(sm80.shared(smem), sm80.times(slot, size))


def _start_copy(ref, smem, slot, number, place, rows: int, dim: int, row_of: Callable) -> None:
    """Starts the copy of a tile to a slot; row r of the tile is row `row_of(r, number, *place)` of the array."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), SCALAR, SCALAR, (SCALAR,) * 2))
    def start(_, array, smem, slot, number, place):
        where = [sm80.scalar(x) for x in (number, *place)]
        buffer = slot_of(smem, sm80.scalar(slot), rows * sm80.row_bytes(dim))
        sm80.copy_rows(buffer, array, lambda row: row_of(row, *where), rows, dim)

    start(ref, smem, slot, number, place)


def start_queries(problem: Problem, query_ref, query_smem, slot, tile, place) -> None:
    """Starts the copy of a tile of query rows to a slot."""
    _start_copy(query_ref, query_smem, slot, tile, place, problem.rows, problem.dim, problem.query_row)


def start_keys(problem: Problem, key_ref, key_smem, block, place) -> None:
    """Starts the copy of a block of keys, or of values."""
    _start_copy(key_ref, key_smem, jnp.int32(0), block, place, problem.keys, problem.dim, problem.key_row)


def wait_copies(groups: int) -> None:
    """Waits for all but the last groups of copies of every thread of the program."""

    @plgpu.inline_mgpu()
    def wait(_):
        sm80.wait(groups)

    wait()


def block_products(problem: Problem, rows_smem, keys_smem):
    """Products of a tile's query rows with a block of keys, or of its gradients with values: float32 [rows, keys]."""
    kind = plgpu.ShapeDtypeStruct((problem.rows, problem.keys), jnp.float32, layout=ACC)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * 2, return_type=kind)
    def multiply(_, rows, keys):
        left = sm80.left_rows(sm80.shared(rows), problem.row_tiles, problem.dim)
        return sm80.row_products(left, sm80.shared(keys), problem.row_tiles, problem.keys, problem.dim)

    return multiply(rows_smem, keys_smem)


def ranges_of_rows(problem: Problem, ranges: Any, tile: ir.Value, batch: ir.Value) -> np.ndarray:
    """Of each of a thread's query rows, the first key it sees and how many: [row tiles, 2, 2].

    They are read where they are needed, because kept over the loop they take too many registers.
    """
    found = np.empty((problem.row_tiles, 2, 2), object)
    for i, half in np.ndindex(found.shape[:2]):
        row = sm80.plus(sm80.thread_row(), i * sm80.TILE + half * 8)
        pointer = sm80.in_global(ranges, problem.range_row(row, tile, batch), 8)
        found[i, half] = sm80.load_pair(pointer, sm80.i32())
    return found


@dataclasses.dataclass(frozen=True)
class KeyBlocks:
    """The blocks of keys and values that a query tile visits: one is copied to shared memory while the other is used.

    Attributes:
      problem: sizes.
      arrays: an array and its place in shared memory, of what is used first, and of the other: keys or values.
      bounds: (begin, exact_begin, exact_end, end) of the tile, as `tile_bounds` has them.
      place: key/value head and batch.
    """

    problem: Problem
    arrays: tuple[tuple, tuple]
    bounds: tuple[jax.Array, ...]
    place: tuple[jax.Array, jax.Array]

    def _start(self, which: int, block) -> None:
        begin, _, _, end = self.bounds
        ref, smem = self.arrays[which]
        start_keys(self.problem, ref, smem, jnp.clip(block, begin, jnp.maximum(end - 1, begin)), self.place)

    def begin(self) -> None:
        """Starts the first copy."""
        self._start(0, self.bounds[0])

    def visit(self, carry, first: Callable, rest: Callable):
        """The carry after all blocks.

        Args:
          carry: before the first block.
          first: () -> what is computed from the array that is used first.
          rest: (whether all rows see the whole block, what `first` returned, carry, block) -> carry.
        """

        def step(exact, block, carry):
            wait_copies(0)
            self._start(1, block)
            found = first()
            wait_copies(0)
            self._start(0, block + 1)
            return rest(exact, found, carry, block)

        begin, exact_begin, exact_end, end = self.bounds
        carry = lax.fori_loop(begin, exact_begin, functools.partial(step, False), carry)
        carry = lax.fori_loop(exact_begin, exact_end, functools.partial(step, True), carry)
        carry = lax.fori_loop(exact_end, end, functools.partial(step, False), carry)
        wait_copies(0)
        return carry


def store_rows(problem: Problem, words: Any, smem, out, where: list[ir.Value]) -> None:
    """Stores rows of a query tile through shared memory, in which each warp touches its own rows alone.

    Args:
      problem: sizes.
      words: pairs of bfloat16 in the order of a thread's registers, [row tiles, dim / 8, 2].
      smem: place for the tile.
      out: the array [B, T, N, dim].
      where: tile, key/value head and batch.
    """
    dim, pieces = problem.dim, sm80.row_pieces(problem.dim)
    base, column = sm80.shared(smem), sm80.times(sm80.thread_column(), 2)
    for i, n, half in np.ndindex(words.shape):
        at = sm80.plus(sm80.thread_row(), i * sm80.TILE + half * 8)
        address = arith.addi(base, arith.addi(sm80.place_of(at, sm80.constant(n), dim), column))
        word = mgpu.utils.bitcast(words[i, n, half], sm80.i32())
        sm80.asm(sm80.void(), [address, word], "st.shared.b32 [$0], $1;", "r,r,~{memory}", effects=True)
    sm80.asm(sm80.void(), [], "bar.warp.sync 0xffffffff;", "~{memory}", effects=True)
    row, piece = sm80.split(arith.remui(mgpu.thread_idx(), sm80.constant(32)), pieces)
    own = arith.addi(sm80.own_row(), row)
    at_once = 32 // pieces
    four = llvm.StructType.get_literal([sm80.i32()] * 4)
    for i, step in np.ndindex(problem.row_tiles, 16 // at_once):
        at = sm80.plus(own, i * sm80.TILE + step * at_once)
        address = arith.addi(base, sm80.place_of(at, piece, dim))
        text = "ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];"
        got = sm80.asm(four, [address], text, "=r,=r,=r,=r,r,~{memory}", effects=True)
        got = [llvm.extractvalue(sm80.i32(), got, [j]) for j in range(4)]
        number = arith.addi(sm80.times(problem.query_row(at, *where), pieces), piece)
        operands, text = [sm80.in_global(out, number, sm80.PIECE), *got], "st.global.v4.b32 [$0], {$1, $2, $3, $4};"
        constraints = "l,r,r,r,r,~{memory}"
        if problem.ragged:
            operands.append(arith.extui(sm80.i32(), problem.is_row(at, where[0])))
            text = f"{{ .reg .pred p; setp.ne.u32 p, $5, 0; @p {text} }}"
            constraints = "l,r,r,r,r,r,~{memory}"
        sm80.asm(sm80.void(), operands, text, constraints, effects=True)
