"""Block lists grouped by the block that they name, from words of bits: `readers.invert` without a sort.

Tokens come in tiles of at most 32. A tile has a word for every block. Bit u of it says that token u lists the block. A
list entry's place among all entries of its block is the number of bits before its own: those in the words of earlier
tiles, which a running sum counts, and the lower ones of its own word. This takes 4 kernels. A radix sort and what
prepares and follows it take about 25.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from nsa_jax.ops.kernels import readers
from nsa_jax.ops.kernels.readers import InvertedLists
from nsa_jax.ops.kernels.triton import interpreted, pieces, triton_call

# Words and their running sum grow with the square of a row's length. Beyond this size lists are sorted instead. The
# buffer of partial results, which is allocated after them, has up to 2 GiB.
MOST_BYTES = 512 * 2**20

WORD_BITS = 32  # the most tokens of a tile
_AT_ONCE = 8  # tokens whose lists are read together
_COLUMNS, _STEP = 8, 256  # blocks of a program of the running sum, and its tiles at a time


def words_of_tile(num_blocks: int) -> int:
    """Words of a tile: one for each block, then at least one for what is no block, in whole lines of memory."""
    return -(-(num_blocks + 1) // 32) * 32


def fits(batch: int, length: int, num_kv: int, tile: int, num_blocks: int) -> bool:
    """Whether the words of tiles of `tile` tokens, and the running sum over them, are within `MOST_BYTES`."""
    return 8 * batch * num_kv * pl.cdiv(length, tile) * words_of_tile(num_blocks) <= MOST_BYTES


def mark_tokens(words_ref, list_ref, count, is_listed) -> None:
    """Sets bit u in the words of the blocks that token u of a tile lists, and clears all other bits.

    Args:
      words_ref: [J'], whose last word takes what is no block.
      list_ref: [Q, n].
      count: how many tokens the tile has.
      is_listed: tells of (token, its entries [n]) which of them count; those differ.
    """
    for at, size in pieces(words_ref.shape[0]):
        words_ref[pl.ds(at, size)] = jnp.zeros((size,), jnp.int32)
    wait_for_stores()
    num_listed, spare = list_ref.shape[1], words_ref.shape[0] - 1
    slot = jnp.minimum(lax.iota(jnp.int32, pl.next_power_of_2(num_listed)), num_listed - 1)

    def mark(i, carry):
        tokens = [jnp.minimum(i * _AT_ONCE + u, count - 1) for u in range(_AT_ONCE)]
        entries = [list_ref[token, slot] for token in tokens]  # all on their way before the first is needed
        for token, entry in zip(tokens, entries, strict=True):
            block = jnp.where(is_listed(token, entry), entry, spare)
            words_ref[block] = words_ref[block] | (1 << token)
            wait_for_stores()
        return carry

    lax.fori_loop(0, pl.cdiv(count, _AT_ONCE), mark, 0)


def wait_for_stores() -> None:
    """Lets the threads of a program see what the others have stored."""
    if not interpreted():
        pltriton.debug_barrier()


def _mark_kernel(list_ref, words_ref, *, length, num_blocks):
    """Marks every entry of a tile's lists: list_ref [Q, n], words_ref [J']."""
    tile = list_ref.shape[0]
    count = jnp.minimum(tile, length - pl.program_id(0) * tile)
    mark_tokens(words_ref, list_ref, count, lambda token, entry: (entry >= 0) & (entry < num_blocks))


def mark_lists(block_indices: jax.Array, num_blocks: int, tile: int) -> jax.Array:
    """The words of all entries of lists int32 [B, T, K, n]: int32 [B, K, tiles, J']."""
    batch, length, num_kv, num_listed = block_indices.shape
    tiles, width = pl.cdiv(length, tile), words_of_tile(num_blocks)
    return triton_call(
        functools.partial(_mark_kernel, length=length, num_blocks=num_blocks),
        num_warps=1,
        num_stages=1,
        grid=(tiles, num_kv, batch),
        in_specs=[pl.BlockSpec((None, tile, None, num_listed), lambda i, k, b: (b, i, k, 0))],
        out_specs=pl.BlockSpec((None, None, None, width), lambda i, k, b: (b, k, i, 0)),
        out_shape=jax.ShapeDtypeStruct((batch, num_kv, tiles, width), jnp.int32),
        name="nsa_selected_mark",
    )(block_indices)


def _running_sum_kernel(words_ref, before_ref, total_ref, *, tiles_per_row, num_rows):
    """Bits of every word's column in earlier tiles of the row: words_ref and before_ref [tiles, C], total_ref [C]."""
    tiles, columns = words_ref.shape
    first = pl.program_id(1) % num_rows * tiles_per_row
    last = jnp.minimum(first + tiles_per_row, tiles)
    column = lax.broadcasted_iota(jnp.int32, (_STEP, columns), 1)

    def add(i, before):
        tile = first + i * _STEP + lax.broadcasted_iota(jnp.int32, (_STEP, columns), 0)
        inside = tile < last
        words = words_ref[jnp.minimum(tile, last - 1), column]
        count = jnp.where(inside, lax.population_count(words), 0)
        running = before[None, :] + jnp.cumsum(count, axis=0) - count
        pltriton.store(before_ref.at[jnp.where(inside, tile, tiles), column], running, mask=inside)
        return before + jnp.sum(count, axis=0)

    total_ref[...] = lax.fori_loop(0, pl.cdiv(last - first, _STEP), add, jnp.zeros((columns,), jnp.int32))


def _work_items_kernel(
    total_ref, start_ref, offset_ref, block_ref, begin_ref, end_ref, named_ref, *, num_blocks, chunk, even
):  # fmt: skip
    """Work items of a row: total_ref and start_ref [J'], offset_ref [J + 1]; block_ref, begin_ref, end_ref [W].

    named_ref [J'] is for this kernel alone: the blocks that have entries, in order.
    """
    width, items = total_ref.shape[0], block_ref.shape[0]
    block = lax.iota(jnp.int32, pl.next_power_of_2(width))
    total = jnp.where(block < num_blocks, total_ref[jnp.minimum(block, width - 1)], 0)
    start = jnp.cumsum(total, axis=0) - total
    count, _ = readers.divide_block(total, chunk, even)
    offset = jnp.cumsum(count, axis=0) - count
    some = count > 0
    pltriton.store(start_ref.at[block], start, mask=block < width)
    pltriton.store(offset_ref.at[block], offset, mask=block <= num_blocks)
    number = jnp.cumsum(some.astype(jnp.int32), axis=0) - 1
    pltriton.store(named_ref.at[jnp.where(some, number, width)], block, mask=some)

    # The first item of every block is marked. How many marks there are up to an item tells the item's block.
    for at, size in pieces(items):
        block_ref[pl.ds(at, size)] = jnp.zeros((size,), jnp.int32)
    wait_for_stores()
    pltriton.store(block_ref.at[jnp.where(some, offset, items)], some.astype(jnp.int32), mask=some)
    wait_for_stores()
    item = lax.iota(jnp.int32, pl.next_power_of_2(items))
    inside = jnp.minimum(item, items - 1)
    number = jnp.cumsum(jnp.where(item < items, block_ref[inside], 0), axis=0) - 1
    needed = item < jnp.sum(count)
    own = jnp.where(needed, named_ref[jnp.where(needed, number, 0)], num_blocks - 1)
    total = total_ref[own]
    _, most = readers.divide_block(total, chunk, even)
    begin = start_ref[own] + (item - offset_ref[own]) * most
    end = jnp.minimum(begin + most, start_ref[own] + total)
    wait_for_stores()
    for ref, value in (
        (block_ref, own),
        (begin_ref, jnp.where(needed, begin, 0)),
        (end_ref, jnp.where(needed, end, 0)),
    ):
        pltriton.store(ref.at[item], value, mask=item < items)


def _place_kernel(
    list_ref, words_ref, before_ref, start_ref, order_ref, count_ref, *, length, tiles_per_row, num_blocks
):  # fmt: skip
    """Places the entries of a tile: list_ref [Q, n]; words_ref, before_ref, start_ref [J']; order_ref [E].

    An entry is the token's number in the row times n, and its rank among those of the token whose bits are set.
    count_ref [Q] takes how many these are.
    """
    tile, num_listed = list_ref.shape
    shape = pl.next_power_of_2(tile), pl.next_power_of_2(num_listed)
    token, slot = (lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))
    inside = (token < jnp.minimum(tile, length - pl.program_id(0) * tile)) & (slot < num_listed)
    listed = list_ref[jnp.where(inside, token, 0), jnp.minimum(slot, num_listed - 1)]
    block = jnp.where(inside & (listed >= 0) & (listed < num_blocks), listed, num_blocks)
    words = words_ref[block]
    marked = (block < num_blocks) & (((words >> token) & 1) == 1)
    place = start_ref[block] + before_ref[block] + lax.population_count(words & ((1 << token) - 1))
    flags = marked.astype(jnp.int32)
    first = pl.program_id(0) % tiles_per_row * tile
    entry = (first + token) * num_listed + jnp.cumsum(flags, axis=1) - 1
    pltriton.store(order_ref.at[jnp.where(marked, place, order_ref.shape[0])], entry, mask=marked)
    row = lax.iota(jnp.int32, shape[0])
    pltriton.store(count_ref.at[row], jnp.sum(flags, axis=1), mask=row < tile)


def invert(
    words: jax.Array, block_indices: jax.Array, num_blocks: int, chunk: int, *, tile: int, tiles_per_row: int,
    entries: int, even: bool = False,
) -> tuple[InvertedLists, jax.Array]:  # fmt: skip
    """Groups the entries whose bits are set by the block that they name.

    A row is a (batch row, key/value head, range of `tiles_per_row` tiles), in this order.

    Args:
      words: int32 [B, K, tiles, J'], see `mark_lists`.
      block_indices: int32 [B, T, K, n], lists whose blocks differ.
      num_blocks: J.
      chunk: the most entries that a work item may have.
      tile: tokens of a tile.
      tiles_per_row: tiles of a row; the last row of a batch row and head may have fewer.
      entries: E, elements of a row in the result, at least tokens times n.
      even: the items of a block have about equally many.

    Returns:
      The inverted lists, as `readers.invert` gives them for lists of the marked entries alone: `order` has a token's
      number times n and the entry's rank among the token's marked ones. What lies in it behind the last work item is
      undefined. And how many entries of each token are marked, int32 [rows, tiles_per_row * tile], undefined where
      there is no token.
    """
    batch, length, num_kv, num_listed = block_indices.shape
    tiles, width = words.shape[2:]
    num_rows = pl.cdiv(tiles, tiles_per_row)  # of a batch row and a head
    rows, items = batch * num_kv * num_rows, readers.num_work_items(entries, num_blocks, chunk)
    words = words.reshape(-1, tiles, width)

    def of_row(size):
        return jax.ShapeDtypeStruct((rows, size), jnp.int32)

    by_column = pl.BlockSpec((None, tiles, _COLUMNS), lambda j, r: (r // num_rows, 0, j))
    before, total = triton_call(
        functools.partial(_running_sum_kernel, tiles_per_row=tiles_per_row, num_rows=num_rows),
        num_warps=4,
        num_stages=1,
        grid=(width // _COLUMNS, rows),
        in_specs=[by_column],
        out_specs=[by_column, pl.BlockSpec((None, _COLUMNS), lambda j, r: (r, j))],
        out_shape=[jax.ShapeDtypeStruct(words.shape, jnp.int32), of_row(width)],
        name="nsa_selected_running_sum",
    )(words)

    sizes = width, num_blocks + 1, items, items, items, width
    start, offset, block, begin, end, _ = triton_call(
        functools.partial(_work_items_kernel, num_blocks=num_blocks, chunk=chunk, even=even),
        num_warps=4,
        num_stages=1,
        grid=(rows,),
        in_specs=[pl.BlockSpec((None, width), lambda r: (r, 0))],
        out_specs=[pl.BlockSpec((None, size), lambda r: (r, 0)) for size in sizes],
        out_shape=[of_row(size) for size in sizes],
        name="nsa_selected_work_items",
    )(total)

    of_tile = pl.BlockSpec((None, None, width), lambda i, k, b: (b * num_kv + k, i, 0))

    def spec(size):
        return pl.BlockSpec((None, size), lambda i, k, b: ((b * num_kv + k) * num_rows + i // tiles_per_row, 0))

    order, count = triton_call(
        functools.partial(_place_kernel, length=length, tiles_per_row=tiles_per_row, num_blocks=num_blocks),
        num_warps=1 if tile * num_listed <= 512 else 4,
        num_stages=1,
        grid=(tiles, num_kv, batch),
        in_specs=[
            pl.BlockSpec((None, tile, None, num_listed), lambda i, k, b: (b, i, k, 0)),
            of_tile,
            of_tile,
            spec(width),
        ],
        out_specs=[
            spec(entries),
            pl.BlockSpec(
                (None, None, tile),
                lambda i, k, b: ((b * num_kv + k) * num_rows + i // tiles_per_row, i % tiles_per_row, 0),
            ),
        ],
        out_shape=[of_row(entries), jax.ShapeDtypeStruct((rows, tiles_per_row, tile), jnp.int32)],
        name="nsa_selected_place",
    )(block_indices, words, before, start)
    return InvertedLists(order, block, begin, end, offset), count.reshape(rows, -1)
