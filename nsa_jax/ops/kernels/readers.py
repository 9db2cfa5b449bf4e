"""Inverted block lists: for each key block, the queries that listed it, cut into work items of bounded size.

A backward pass over keys needs, per key block, the (query, slot) pairs that listed the block. One sort gives them in a
compact form, linear in the number of list entries: never a [T, J] map.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class InvertedLists(NamedTuple):
    """List entries grouped by block; every row is inverted on its own.

    Attributes:
      order: int32 [rows, E], positions of entries in the input row, grouped by block and ascending within each. Entries
        that were left out have no position.
      block: int32 [rows, W], the key block of each work item.
      begin: int32 [rows, W], first entry of each work item in `order`.
      end: int32 [rows, W], one past its last entry; begin == end for items that are not needed.
      offset: int32 [rows, J + 1]: block j's work items are offset[j] .. offset[j + 1] - 1.
    """

    order: jax.Array
    block: jax.Array
    begin: jax.Array
    end: jax.Array
    offset: jax.Array


def num_work_items(num_entries: int, num_blocks: int, chunk: int) -> int:
    """How many work items of at most `chunk` entries any lists of `num_entries` entries can need."""
    return num_entries // chunk + min(num_blocks, num_entries)


def divide_block(entries, chunk: int, even: bool):
    """(items of a block, the most entries of one), int32, for blocks of that many entries.

    All items of a block but the last have `chunk` entries. With `even` they have about as many entries as the last one
    has: a multiple of 16, so that they fill whole tiles of rows for most groups of heads, and at most `chunk`.
    """
    items = (entries + (chunk - 1)) // chunk
    if not even:
        return items, chunk
    sixteens = jnp.maximum(items, 1) * 16
    return items, jnp.minimum((entries + sixteens - 1) // sixteens * 16, chunk)


def longest_first(inverted: InvertedLists, longest: int, together: int) -> list[jax.Array]:
    """Work items by falling length: [which, its block, begin, end], int32 [rows, W rounded up to `together`].

    The warpgroups of a program, `together`, then take about as long as each other, and what takes long starts first.

    Args:
      inverted: what names the items.
      longest: the most entries of an item.
      together: work items of a program.
    """
    pad = ((0, 0), (0, -inverted.begin.shape[1] % together))
    block, begin, end = (jnp.pad(x, pad) for x in (inverted.block, inverted.begin, inverted.end))
    _, item = sort_entries(longest - (end - begin), longest + 1)
    return [item, *(jnp.take_along_axis(x, item, axis=1) for x in (block, begin, end))]


def _first_at_least(ascending: jax.Array, bounds: jax.Array) -> jax.Array:
    """Per row, the first index whose value is >= each bound; unrolled, so that it is one fused GPU kernel."""
    search = jax.vmap(lambda row, bound: jnp.searchsorted(row, bound, method="scan_unrolled"))
    return search(ascending, bounds).astype(jnp.int32)


def sort_entries(entries: jax.Array, bound: int) -> tuple[jax.Array, jax.Array]:
    """Sorts every row of entries int32 [rows, E], all below `bound`; equal ones stay in order: (entries, places).

    As many rows together as fit 16 bits are sorted as one, by the whole GPU, with their places as values: 4.2 million
    entries took 0.11 ms on an H200, 0.20 with entry and place in one key of 32 bits, 0.48 to 0.58 as 4 to 32 rows of
    their own.
    """
    rows, count = entries.shape
    place = jnp.broadcast_to(jnp.arange(count, dtype=jnp.int32), entries.shape)
    together = min(rows, 2**16 // bound)
    if rows > 8 * together:  # as many sorts to compile, or none possible
        ordered, place = jax.lax.sort((entries, place), dimension=1, num_keys=1, is_stable=True)
        return ordered, place
    first = jnp.arange(together, dtype=jnp.int32)[:, None] * bound
    ordered_parts, place_parts = [], []
    for begin in range(0, rows, together):
        part = slice(begin, begin + together)
        shift = first[: min(together, rows - begin)]
        keys = (entries[part] + shift).astype(jnp.uint16).reshape(-1)
        keys, places = jax.lax.sort((keys, place[part].reshape(-1)), num_keys=1, is_stable=True)
        ordered_parts.append(keys.reshape(-1, count).astype(jnp.int32) - shift)
        place_parts.append(places.reshape(-1, count))
    return jnp.concatenate(ordered_parts), jnp.concatenate(place_parts)


def invert(entries: jax.Array, num_blocks: int, chunk: int, even: bool = False) -> InvertedLists:
    """Groups list entries by the block that they name.

    Args:
      entries: int32 [rows, E], block indices; `num_blocks` and above are padding.
      num_blocks: J.
      chunk: the most entries that a work item may have.
      even: the items of a block have about equally many.
    """
    rows, count = entries.shape
    entry_block, order = sort_entries(jnp.minimum(entries, num_blocks), num_blocks + 1)
    bounds = jnp.arange(num_blocks + 1, dtype=jnp.int32)
    starts = _first_at_least(entry_block, jnp.broadcast_to(bounds, (rows, num_blocks + 1)))  # [rows, J + 1]

    items, most = divide_block(starts[:, 1:] - starts[:, :-1], chunk, even)
    offset = jnp.pad(jnp.cumsum(items, axis=1, dtype=jnp.int32), ((0, 0), (1, 0)))
    item = jnp.arange(num_work_items(count, num_blocks, chunk), dtype=jnp.int32)
    block = _first_at_least(offset, jnp.broadcast_to(item + 1, (rows, item.size))) - 1
    block = jnp.minimum(block, num_blocks - 1)
    most = jnp.take_along_axis(most, block, axis=1) if even else chunk
    begin = jnp.take_along_axis(starts, block, axis=1) + (item - jnp.take_along_axis(offset, block, axis=1)) * most
    end = jnp.minimum(begin + most, jnp.take_along_axis(starts, block + 1, axis=1))
    needed = item < offset[:, -1:]
    begin = jnp.where(needed, begin, 0)
    return InvertedLists(order, block, begin, jnp.where(needed, end, begin), offset)
