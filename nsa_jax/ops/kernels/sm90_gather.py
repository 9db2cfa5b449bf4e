"""Rows that lie scattered in memory, straight between global memory and the registers of Hopper's matrix products.

A tile of 64 gathered rows that passes through shared memory costs one TMA copy for each run of rows, fences and
barriers. But a product takes its left operand from registers, where 4 threads hold a row, so each thread can load its
part of the row itself: this needs no shared memory and no barriers.

`copy_rows` copies rows that other products need as well, or as their right operand, to shared memory; each thread
copies its part. `read_tile` reads a tile of shared memory as `load_rows` reads rows of global memory.

Threads fetch 16 bytes at a time, 8 neighbouring columns, where a product gives them 2 of every 8. So columns arrive in
another order, the same for all rows, and `store_rows` puts them back. In a product of rows from `load_rows` the right
operand must come from it too, and so must the one whose columns a result for `store_rows` has.
"""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from nsa_jax.ops.kernels.sm90_mlir import LAYOUT, array, asm, constant, i32
from nsa_jax.ops.tiles import ROWS

_BYTES = 16  # of one load or store
_THREADS = 4  # that share a row
_SWIZZLE = 128  # bytes of a row of a swizzled tile
_SWIZZLE_ROWS = 8  # after which its pattern repeats
_GLOBAL = 1  # LLVM's number of the address space


def _pointers(ref, index, size: int):
    """Where the elements of `size` bytes that a thread's registers of `index` name begin in global memory."""
    base = mgpu.utils.memref_ptr(ref)
    base = llvm.addrspacecast(llvm.PointerType.get(_GLOBAL), base)
    i64 = ir.IntegerType.get_signless(64)
    element = ir.Type.parse(f"!llvm.array<{size} x i8>")
    for register in index.registers.flat:
        number = llvm.extractelement(register, constant(0))
        yield mgpu.utils.getelementptr(base, [arith.extui(i64, number)], element)


def _pieces(pointer, width: int, size: int = _BYTES):
    """Pointers to a thread's pieces of `size` bytes of a row of `width` bytes: each of 4 threads has one of four."""
    thread = arith.remui(mgpu.thread_idx(), constant(_THREADS))
    piece = ir.Type.parse(f"!llvm.array<{size} x i8>")
    for first in range(0, width // size, _THREADS):
        at = arith.addi(thread, constant(first)) if first else thread
        yield mgpu.utils.getelementptr(pointer, [at], piece)


def load_rows(ref, rows):
    """Rows of an array [R, D] in global memory, of 16-bit elements: [64, D], columns in the order of products.

    Args:
      ref: the whole array; D is a multiple of 32.
      rows: int32 [64] in `LAYOUT`.
    """
    columns = ref.shape[1]
    shape = ROWS, columns
    layout = plgpu.Layout.WGMMA
    whole = ".L2::256B" if columns * 2 % 256 == 0 else ""  # brings the rest of the row to the L2 cache
    text = f"ld.global.nc{whole}.v4.b32 {{$0, $1, $2, $3}}, [$4];"

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), LAYOUT), return_type=plgpu.ShapeDtypeStruct(shape, ref.dtype, layout=layout)
    )
    def load(_, ref, rows):
        pair = ir.VectorType.get((2,), ir.MemRefType(ref.type).element_type)
        words = llvm.StructType.get_literal([i32()] * 4)
        by_row: list[list[Any]] = []
        for pointer in _pointers(ref, rows, columns * 2):
            by_row.append([])
            for piece in _pieces(pointer, columns * 2):
                got = asm(words, [piece], text, "=r,=r,=r,=r,l")
                by_row[-1] += [mgpu.utils.bitcast(llvm.extractvalue(i32(), got, [i]), pair) for i in range(4)]
        return array([x for both in zip(*by_row, strict=True) for x in both], shape, layout)

    return load(ref, rows)


def prefetch_rows(ref, rows) -> None:
    """Brings what `load_rows` would load to the L2 cache."""
    width = ref.shape[1] * 2
    size = 64 if width % 256 == 0 else 32

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), LAYOUT))
    def prefetch(_, ref, rows):
        for pointer in _pointers(ref, rows, width):
            for piece in _pieces(pointer, width, size):
                asm(ir.Type.parse("!llvm.void"), [piece], "prefetch.global.L2 [$0];", "l")

    prefetch(ref, rows)


def _flags(inside) -> list:
    """The type of an argument of `inline_mgpu` that need not be there."""
    return [] if inside is None else [LAYOUT]


def _store(operands, text: str, inside, half: int) -> None:
    """A store of operands (pointer, words), unless `inside`, an array or none, has 0 for the thread's row `half`."""
    flag = [llvm.extractelement(x.registers.flat[half], constant(0)) for x in inside]
    if flag:
        text = f"{{ .reg .pred p; setp.ne.b32 p, ${len(operands)}, 0; @p {text} }}"
    kinds = ["l"] + ["f" if isinstance(x.type, ir.F32Type) else "r" for x in operands[1:]] + ["r"] * len(flag)
    asm(ir.Type.parse("!llvm.void"), [*operands, *flag], text, ",".join(kinds))


def store_rows(ref, rows, values, inside=None) -> None:
    """Stores what `load_rows` would load; rows that occur twice must have the same values.

    Args:
      ref, rows: as `load_rows` takes them.
      values: [64, D], columns in its order.
      inside: int32 [64] in `LAYOUT`, 0 for rows that are not stored; None stores all.
    """
    columns = ref.shape[1]

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), LAYOUT, plgpu.Layout.WGMMA, *_flags(inside)))
    def store(_, ref, rows, values, *inside):
        registers = list(values.registers.flat)
        for half, pointer in enumerate(_pointers(ref, rows, columns * 2)):
            own = registers[half::2]
            for i, piece in enumerate(_pieces(pointer, columns * 2)):
                words = [mgpu.utils.bitcast(x, i32()) for x in own[i * 4 : i * 4 + 4]]
                _store([piece, *words], "st.global.cs.v4.b32 [$0], {$1, $2, $3, $4};", inside, half)

    store(ref, rows, values, *([] if inside is None else [inside]))


def _tile_places(tile, width: int):
    """Addresses in a swizzled tile [64, width / 2] of a thread's pieces of rows, for both of its rows.

    8 rows of 128 bytes lie together, then the same rows' next 128 bytes. Piece c of row r lies where c ^ (r % 8) would.
    """
    thread = mgpu.thread_idx()
    of_row = arith.remui(thread, constant(_THREADS))
    row = arith.remui(arith.divui(thread, constant(_THREADS)), constant(_SWIZZLE_ROWS))  # and the one 8 further
    warp = arith.remui(arith.divui(thread, constant(32)), constant(4))
    at = arith.muli(warp, constant(2 * _SWIZZLE_ROWS * width))
    at = arith.addi(at, arith.muli(row, constant(_SWIZZLE)))
    at = arith.addi(at, arith.muli(arith.xori(of_row, row), constant(_BYTES)))
    base = llvm.ptrtoint(i32(), mgpu.utils.memref_ptr(tile))
    for half in range(2):
        places = []
        for first in range(0, width, _THREADS * _BYTES):
            column, within = divmod(first, _SWIZZLE)
            place = arith.addi(base, arith.xori(at, constant(within)))
            places.append((place, (half * width + column * _SWIZZLE) * _SWIZZLE_ROWS))
        yield places


# Of tiles that are read and written by `_tile_places`.
_TILE: Any = (plgpu.TilingTransform((8, ROWS)), plgpu.SwizzleTransform(_SWIZZLE))  # type: ignore[abstract]


def read_tile(tile):
    """A tile [64, D] of `sm90.tiled`, of 16-bit elements, as `load_rows` returns rows.

    A warp reads the rows that it has in a product; if it wrote them, no barrier of the whole warpgroup is needed.
    """
    shape, dtype, layout = tile.shape, tile.dtype, plgpu.Layout.WGMMA

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(_TILE),), return_type=plgpu.ShapeDtypeStruct(shape, dtype, layout=layout)
    )
    def read(_, tile):
        pair = ir.VectorType.get((2,), ir.MemRefType(tile.type).element_type)
        words = llvm.StructType.get_literal([i32()] * 4)
        by_row: list[list[Any]] = []
        for places in _tile_places(tile, shape[1] * 2):
            by_row.append([])
            for place, behind in places:
                text = f"ld.shared.v4.b32 {{$0, $1, $2, $3}}, [$4 + {behind}];"
                got = asm(words, [place], text, "=r,=r,=r,=r,r,~{memory}")
                by_row[-1] += [mgpu.utils.bitcast(llvm.extractvalue(i32(), got, [i]), pair) for i in range(4)]
        return array([x for both in zip(*by_row, strict=True) for x in both], shape, layout)

    return read(tile)


def store_tile(tile, values) -> None:
    """Stores a product [64, 64] of 16-bit elements to a tile of `sm90.tiled`, its columns in order.

    As `tile[...] = values`, but by `stmatrix`, which stores two times 8 columns of a warp's 16 rows at once, and with
    every place computed from the first one where it is used: kept in registers, they are eight for each tile.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(_TILE), plgpu.Layout.WGMMA))
    def store(_, tile, values):
        base = llvm.ptrtoint(i32(), mgpu.utils.memref_ptr(tile))
        words = [mgpu.utils.bitcast(x, i32()) for x in values.registers.flat]
        # Of 32 threads, 8 say where the rows of one matrix lie: rows 0 to 7 and 8 to 15 of 8 columns, then the same of
        # the next 8; see `_tile_places`.
        text = "{ .reg .b32 row, half, place; mov.u32 half, %tid.x; and.b32 row, half, 7;"
        text += f" bfe.u32 place, half, 5, 2; mad.lo.u32 place, place, {2 * _SWIZZLE_ROWS * _SWIZZLE}, $0;"
        text += f" mad.lo.u32 place, row, {_SWIZZLE}, place; bfe.u32 half, half, 4, 1; xor.b32 row, row, half;"
        text += f" mad.lo.u32 place, row, {_BYTES}, place; mov.u32 half, %tid.x; bfe.u32 half, half, 3, 1;"
        text += f" mad.lo.u32 place, half, {_SWIZZLE_ROWS * _SWIZZLE}, place;"
        for i in range(4):
            numbers = ", ".join(f"${4 * i + j + 1}" for j in range(4))
            text += f" xor.b32 row, place, {2 * i * _BYTES};"
            text += f" stmatrix.sync.aligned.m8n8.x4.shared.b16 [row], {{{numbers}}};"
        asm(ir.Type.parse("!llvm.void"), [base, *words], text + " }", ",".join(["r"] * 17))

    store(tile, values)


def weighted_sum(weights, parts):
    """The sum of arrays [64, D] in a product's layout, of 16-bit floats, each times a number per row, in float32.

    One register after the other, so that no array is there in float32.

    Args:
      weights: float32 [64] in `LAYOUT`, one for each array.
      parts: the arrays, of one type.
    """
    shape, dtype, layout = parts[0].shape, parts[0].dtype, plgpu.Layout.WGMMA

    @plgpu.inline_mgpu(
        arg_types=(LAYOUT,) * len(weights) + (layout,) * len(parts),
        return_type=plgpu.ShapeDtypeStruct(shape, dtype, layout=layout),
    )
    def add(_, *arrays):
        factors = [x.registers.flat for x in arrays[: len(weights)]]
        pair = ir.VectorType.get((2,), ir.F32Type.get())
        sums = []
        for i, registers in enumerate(zip(*(x.registers.flat for x in arrays[len(weights) :]), strict=True)):
            products = [
                arith.mulf(
                    vector.broadcast(pair, llvm.extractelement(factor[i % 2], constant(0))),
                    arith.extf(pair, register),
                )
                for factor, register in zip(factors, registers, strict=True)
            ]
            sums.append(arith.truncf(registers[0].type, functools.reduce(arith.addf, products)))
        return array(sums, shape, layout)

    return add(*weights, *parts)


def copy_rows(ref, rows, tile) -> None:
    """Starts to copy rows of an array [R, D] in global memory, of 16-bit elements, to shared memory.

    Every thread copies on its own what `load_rows` would give it; `wait_copies`, then `plgpu.commit_smem`, makes the
    tile whole for products.

    Args:
      ref: the whole array; D is a multiple of 64.
      rows: int32 [64] in `LAYOUT`.
      tile: [64, D] of `sm90.tiled`; its columns keep their order.
    """
    width = ref.shape[1] * 2

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), LAYOUT, plgpu.RefType(_TILE)))
    def copy(_, ref, rows, tile):
        for pointer, places in zip(_pointers(ref, rows, width), _tile_places(tile, width), strict=True):
            for piece, (place, behind) in zip(_pieces(pointer, width), places, strict=True):
                text = f"cp.async.cg.shared.global [$0 + {behind}], [$1], {_BYTES};"
                asm(ir.Type.parse("!llvm.void"), [place, piece], text, "r,l")

    copy(ref, rows, tile)


def wait_copies() -> None:
    """Waits until all that a thread copied with `copy_rows` has arrived."""

    @plgpu.inline_mgpu()
    def wait(_):
        asm(ir.Type.parse("!llvm.void"), [], "cp.async.wait_all;", "~{memory}")

    wait()


def rows_of_tile(tile, total, group: int):
    """Of a tile's rows, (list entry, head) pairs: whether there are that many, entry and head, int32 [64] in `LAYOUT`.

    Rows from `total` on repeat the last one.
    """
    row = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=LAYOUT) + tile * ROWS
    inside = jnp.minimum(row, total - 1)
    entry = lax.div(inside, jnp.int32(group))
    return row < total, entry, inside - entry * group


def rows_of_block(first_key, num_keys: int, batch, kv_head, num_kv: int):
    """Rows in [B*S*K, D] of 64 keys from `first_key` on, int32 in `LAYOUT`; behind the last key it repeats."""
    row = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=LAYOUT) + first_key
    return (jnp.minimum(row, num_keys - 1) + batch * num_keys) * num_kv + kv_head


def visible(low, high):
    """Which of 64 keys each row sees, those from `low`, int32 [64] in `LAYOUT` or None for 0, to `high`."""
    shape = (ROWS, ROWS)
    key = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA)
    seen = key <= lax.broadcast_in_dim(high, shape, [0])
    return seen if low is None else seen & (key >= lax.broadcast_in_dim(low, shape, [0]))


def load_numbers(ref, index):
    """Numbers of an array [n] in global memory: [64] in `LAYOUT`, like `index`; bfloat16 ones as float32."""
    whole, half = jnp.issubdtype(ref.dtype, jnp.integer), ref.dtype == jnp.bfloat16
    dtype = jnp.float32 if half else ref.dtype

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), LAYOUT), return_type=plgpu.ShapeDtypeStruct((ROWS,), dtype, layout=LAYOUT)
    )
    def load(_, ref, index):
        number = ir.F32Type.get() if half else ir.MemRefType(ref.type).element_type
        single = ir.VectorType.get((1,), number)
        text, constraints = "ld.global.nc.b32 $0, [$1];", "=r,l" if whole else "=f,l"
        if half:  # the upper half of a float32
            text = "{ .reg .b16 h, z; mov.b16 z, 0; ld.global.nc.b16 h, [$1]; mov.b32 $0, {z, h}; }"
        got = [asm(number, [x], text, constraints) for x in _pointers(ref, index, 2 if half else 4)]
        return array([vector.broadcast(single, x) for x in got], (ROWS,), LAYOUT, is_signed=True if whole else None)

    return load(ref, index)


def store_numbers(ref, index, values, inside=None) -> None:
    """Stores float32 numbers [64] to an array [n] in global memory; places that occur twice must have the same ones.

    `inside` as in `store_rows`.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), LAYOUT, LAYOUT, *_flags(inside)))
    def store(_, ref, index, values, *inside):
        for half, (pointer, register) in enumerate(zip(_pointers(ref, index, 4), values.registers.flat, strict=True)):
            _store([pointer, llvm.extractelement(register, constant(0))], "st.global.cs.b32 [$0], $1;", inside, half)

    store(ref, index, values, *([] if inside is None else [inside]))


def computed_here(number):
    """An int32 number, such that what depends on it is computed where it is used rather than kept in registers.

    LLVM would compute it once, before a loop, for all iterations, and run out of registers there.
    """
    scalar = plgpu.Layout.WG_SPLAT(())

    @plgpu.inline_mgpu(arg_types=(scalar,), return_type=plgpu.ShapeDtypeStruct((), jnp.int32, layout=scalar))
    def move(_, number):
        moved = asm(i32(), [number.registers.item()], "mov.b32 $0, $1;", "=r,r")
        return mgpu.FragmentedArray.splat(moved, (), is_signed=True)

    return move(number)
