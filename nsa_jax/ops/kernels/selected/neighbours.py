"""Block lists split by tiles of neighbouring tokens: what a tile shares and what is left to each token.

A block that several tokens of a tile list is read once for all of them, by a program with many rows; the rest of each
list is read token by token. Forward and the backward's query-major pass work this way. On Hopper one program reads the
rest too: then all blocks are in the tile's list.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from nsa_jax.ops.kernels.selected import inversion
from nsa_jax.ops.kernels.triton import triton_call

# Bits of a word that tell a block's place in one token's list.
_SLOT_BITS = 4


def can_have_slots(tile: int, num_listed: int) -> bool:
    """Whether `Split.slots` can hold the places of a tile's tokens in lists of this length."""
    return tile * _SLOT_BITS <= 32 and num_listed <= 1 << _SLOT_BITS


def slot_of(word, token):
    """The place in the list of token `token` of the tile, from an element of `Split.slots`."""
    return (word >> _SLOT_BITS * token) & ((1 << _SLOT_BITS) - 1)


def _split_kernel(
    offset_ref, list_ref, start_ref, block_ref, bits_ref, count_ref, *refs,
    length, num_listed, num_keys, select_block, share, packed, words, with_slots, everything,
):  # fmt: skip
    """Splits the lists of a tile of tokens: list_ref [Q, n], block_ref and bits_ref [U + 1].

    refs: nothing if `everything`, words [J'] if `words`, else rest [Q', n + 1] and, `with_slots`, slots [U + 1] and
    num_rest [Q'].
    """
    tile = list_ref.shape[0]
    begin = pl.program_id(0) * tile
    shape = (pl.next_power_of_2(tile), pl.next_power_of_2(num_listed))
    token = lax.broadcasted_iota(jnp.int32, shape, 0)
    slot = lax.broadcasted_iota(jnp.int32, shape, 1)
    inside = jnp.minimum(token, jnp.minimum(tile, length - begin) - 1)
    t = jnp.minimum(begin + inside + offset_ref[0], num_keys - 1)
    listed = list_ref[inside, jnp.minimum(slot, num_listed - 1)]
    useful = (token == inside) & (slot < num_listed) & (listed >= 0) & (listed <= t // select_block)
    if packed:
        start = start_ref[inside]
        useful &= (listed >= start // select_block) & (start <= t)
    listed = jnp.where(useful, listed, -1)

    def seen_blocks(u):
        """The blocks [low, high] that token u of the tile sees."""
        t_u = jnp.minimum(begin + u + offset_ref[0], num_keys - 1)
        if not packed:
            return 0, t_u // select_block
        return start_ref[u] // select_block, jnp.where(start_ref[u] <= t_u, t_u // select_block, -1)

    def sees(u, entry):
        low, high = seen_blocks(u)
        return (entry >= low) & (entry <= high)

    def compare(u, carry):
        bits, slots = carry
        # Scalar loads against the whole tile: an all-to-all comparison in one array would spill registers.
        low, high = seen_blocks(u)
        same = jnp.zeros(shape, jnp.bool_)
        place = jnp.zeros(shape, jnp.int32)
        for i in range(num_listed):
            other = list_ref[u, i]
            same_block = listed == jnp.where((other >= low) & (other <= high), other, -2)
            same |= same_block
            if with_slots:
                place = jnp.where(same_block, i, place)
        return bits | jnp.where(same, 1 << u, 0), slots | place << _SLOT_BITS * u

    zero = jnp.zeros(shape, jnp.int32)
    everyone = jnp.minimum(tile, length - begin)
    no_block = pl.cdiv(num_keys, select_block)
    if words:
        inversion.mark_tokens(refs[0], list_ref, everyone, sees)
        bits = jnp.where(useful, refs[0][jnp.where(useful, listed, no_block)], 0)
    else:
        bits, slots = lax.fori_loop(0, everyone, compare, (zero, zero))
    shared = lax.population_count(bits) >= share
    # The first token that lists a shared block enters it into the tile's list; blocks that every token reads whole go
    # first, since they need no mask.
    first = (bits & -bits) == (1 << token)
    leader = first & shared
    full = leader & (listed < jnp.minimum(begin + offset_ref[0], num_keys - 1) // select_block)
    full &= lax.population_count(bits) == everyone
    if packed:
        full &= False

    def ranks(chosen):
        chosen = chosen.astype(jnp.int32)
        per_token = jnp.sum(chosen, axis=1)
        before = jnp.cumsum(per_token, axis=0) - per_token
        return before[:, None] + jnp.cumsum(chosen, axis=1) - chosen, jnp.sum(per_token)

    full_rank, num_full = ranks(full)
    other_rank, num_other = ranks(leader & ~full)
    rank = jnp.where(full, full_rank, num_full + other_rank)
    if everything:
        # Then the others, one of each token in turn: a token that lists many in a row would keep the others waiting.
        alone = (first & ~shared).astype(jnp.int32)
        per_slot = jnp.sum(alone, axis=0)
        alone_rank = (jnp.cumsum(per_slot, axis=0) - per_slot)[None] + jnp.cumsum(alone, axis=0) - alone
        rank, leader = jnp.where(leader, rank, num_full + num_other + alone_rank), first
        count_ref[2] = num_full + num_other + jnp.sum(per_slot)
    rank = jnp.where(leader, rank, block_ref.shape[0] - 1)  # the last element takes what no list has
    block_ref[rank] = listed
    bits_ref[rank] = bits
    count_ref[0] = num_full + num_other
    count_ref[1] = num_full
    if everything:
        return
    if words:
        # The words keep what is left to the tokens. All threads have read their bits by now.
        inversion.wait_for_stores()
        pltriton.store(refs[0].at[jnp.where(shared, listed, no_block)], zero, mask=shared)
        return

    keep = (useful & ~shared).astype(jnp.int32)
    drop = ((slot < num_listed) & ~(useful & ~shared)).astype(jnp.int32)
    num_kept = jnp.sum(keep, axis=1)
    kept = num_kept[:, None]
    place = jnp.where(keep == 1, jnp.cumsum(keep, axis=1) - 1, kept + jnp.cumsum(drop, axis=1) - 1)
    place = jnp.where(slot < num_listed, place, num_listed)  # a column more than the list has takes the padding
    left, padding = listed, no_block
    if with_slots:
        refs[1][rank] = slots
        refs[2][...] = num_kept
        left, padding = listed * shape[1] + slot, padding * shape[1]
    refs[0][token, place] = jnp.where(keep == 1, left, padding)


class Split(NamedTuple):
    """Lists split by tiles of Q tokens: what a tile shares, and what is left to each token.

    Attributes:
      block, bits: int32 [B, K, tiles, U + 1], a shared block and the tokens of the tile that list it; if everything was
        asked for, then the other blocks.
      num_shared: int32 [B, K, tiles, 2], how many shared blocks there are, and how many of them all
        tokens read whole; those come first. If everything was asked for, [B, K, tiles, 3]: then how many blocks.
      rest: int32 [B, tiles, Q', K, n + 1], the other blocks of every token, ascending, padded with J; None if words
        or everything were asked for.
      words: int32 [B, K, tiles, J'], bits of the tokens that list each of the other blocks, see `inversion`; None if
        they were not asked for.
      slots: int32 [B, K, tiles, U + 1], the shared block's place in the list of every token that lists it, 4 bits for
        each token of the tile; None if they were not asked for.
      num_rest: int32 [B, K, tiles, Q'], how many entries of `rest` are blocks; with `slots` alone.
    """

    block: jax.Array
    bits: jax.Array
    num_shared: jax.Array
    rest: jax.Array | None
    words: jax.Array | None = None
    slots: jax.Array | None = None
    num_rest: jax.Array | None = None


def split_lists(
    block_indices, segment_start, query_offset, *, tile, share, select_block, num_keys, packed, with_slots=False,
    words=False, everything=False,
) -> Split:  # fmt: skip
    """Splits lists by tiles of tokens.

    Args:
      block_indices: int32 [B, T, K, n]; the blocks of a list differ.
      segment_start: int32 [B, T].
      query_offset: int32 scalar.
      tile: tokens of a tile, at most 32.
      share: how many tokens of a tile must list a block for it to count as shared.
      select_block: l'.
      num_keys: S.
      packed: whether segment_start matters.
      with_slots: `slots` and `num_rest` are wanted, see `can_have_slots`, and `rest` holds block * n' + slot, where n'
        is n rounded up to a power of two and the slot is the block's place in its token's list; its padding is J * n'.
      words: `words` are wanted, and not `rest`.
      everything: the other blocks are wanted in the tile's list, and not `rest`.
    """
    batch, length, num_kv, num_listed = block_indices.shape
    tiles = pl.cdiv(length, tile)
    width = tile * num_listed // (1 if everything else share) + 1
    tile_shape = jax.ShapeDtypeStruct((batch, num_kv, tiles, width), jnp.int32)
    padded = pl.next_power_of_2(tile)
    if with_slots and not can_have_slots(tile, num_listed):
        raise ValueError(f"tile={tile}, {num_listed} listed blocks: slots have {_SLOT_BITS} bits of 32")
    tile_spec = pl.BlockSpec((None, None, None, width), lambda i, k, b: (b, k, i, 0))
    columns = inversion.words_of_tile(pl.cdiv(num_keys, select_block))
    token_spec = pl.BlockSpec((None, None, None, padded), lambda i, k, b: (b, k, i, 0))
    outputs = [
        (tile_spec, tile_shape),
        (tile_spec, tile_shape),
        (
            pl.BlockSpec((None, None, None, 3 if everything else 2), lambda i, k, b: (b, k, i, 0)),
            jax.ShapeDtypeStruct((batch, num_kv, tiles, 3 if everything else 2), jnp.int32),
        ),
    ]
    if words:
        word_spec = pl.BlockSpec((None, None, None, columns), lambda i, k, b: (b, k, i, 0))
        outputs.append((word_spec, jax.ShapeDtypeStruct((batch, num_kv, tiles, columns), jnp.int32)))
    elif not everything:
        rest_spec = pl.BlockSpec((None, None, padded, None, num_listed + 1), lambda i, k, b: (b, i, 0, k, 0))
        rest_shape = jax.ShapeDtypeStruct((batch, tiles, padded, num_kv, num_listed + 1), jnp.int32)
        outputs.append((rest_spec, rest_shape))
    if with_slots:
        outputs.append((tile_spec, tile_shape))
        outputs.append((token_spec, jax.ShapeDtypeStruct((batch, num_kv, tiles, padded), jnp.int32)))
    out_specs, out_shape = zip(*outputs, strict=True)
    block, bits, num_shared, *others = triton_call(
        functools.partial(
            _split_kernel,
            length=length,
            num_listed=num_listed,
            num_keys=num_keys,
            select_block=select_block,
            share=share,
            packed=packed,
            words=words,
            with_slots=with_slots,
            everything=everything,
        ),
        num_warps=1 if padded * num_listed <= (512 if words else 256) else 4,
        num_stages=1,
        grid=(tiles, num_kv, batch),
        in_specs=[
            pl.BlockSpec((1,), lambda i, k, b: (0,)),
            pl.BlockSpec((None, tile, None, num_listed), lambda i, k, b: (b, i, k, 0)),
            pl.BlockSpec((None, tile), lambda i, k, b: (b, i)),
        ],
        out_specs=list(out_specs),
        out_shape=list(out_shape),
        name="nsa_selected_split",
    )(query_offset.reshape(1), block_indices, segment_start)
    if everything:
        return Split(block, bits, num_shared, None)
    rest, *slots = others
    lists = (None, rest) if words else (rest, None)
    return Split(block, bits, num_shared, *lists, *slots)
