"""Lists inverted from words of bits: the same work items and order as a stable sort gives."""

from __future__ import annotations

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nsa_jax.ops import plan, reference, selected_tiles
from nsa_jax.ops.kernels import readers
from nsa_jax.ops.kernels.selected import attention, inversion, neighbours
from nsa_jax.ops.target import current_target
from tests.kernels.test_selected import make_inputs, random_lists, relative_error
from tests.kernels.test_selected_backward import _planned_backward

pytestmark = pytest.mark.usefixtures("quick_compilation")


def by_rows(lists, num_blocks: int, tokens: int) -> np.ndarray:
    """Lists [B, T, K, n] by (batch row, key/value head, range of tokens), padded with J: [rows, tokens * n]."""
    pad = ((0, 0), (0, -lists.shape[1] % tokens), (0, 0), (0, 0))
    padded = np.pad(np.asarray(lists), pad, constant_values=num_blocks)
    return padded.swapaxes(1, 2).reshape(-1, tokens * lists.shape[-1])


def check_inverted(got, count, lists, want_of, num_blocks: int, chunk: int, tokens: int, even=False):
    """Compares with the inverted lists of `want_of`, [rows, E], in which a token's entries lie at their places."""
    want = readers.invert(jnp.asarray(want_of), num_blocks, chunk, even)
    for name in ("block", "begin", "end", "offset"):
        np.testing.assert_array_equal(getattr(got, name), getattr(want, name), err_msg=name)
    n, length = lists.shape[-1], lists.shape[1]
    counts = (want_of < num_blocks).reshape(len(want_of), -1, n).sum(-1)
    for row, entries in enumerate(want_of):
        number = int((entries < num_blocks).sum())
        np.testing.assert_array_equal(got.order[row, :number], want.order[row, :number])
        real = min(tokens, length - row % (-(-length // tokens)) * tokens)
        np.testing.assert_array_equal(count[row, :real], counts[row, :real])


@pytest.mark.parametrize(
    ("batch", "length", "num_kv", "num_blocks", "n", "tile", "tiles_per_row", "chunk"),
    [
        (1, 64, 1, 5, 3, 16, 4, 8),
        (2, 77, 2, 6, 4, 32, 2, 16),  # the last tile and the last row are not full
        (1, 300, 2, 40, 7, 10, 9, 5),  # a list and a tile that are no powers of two
        (2, 33, 1, 3, 1, 32, 1, 64),
        (1, 70, 1, 32, 17, 32, 2, 7),  # as many blocks as a line of words has; programs of several warps
        (1, 2100, 1, 33, 2, 32, 66, 40),  # more tiles than one step of the running sum
    ],
)
def test_words_give_the_order_of_a_stable_sort(batch, length, num_kv, num_blocks, n, tile, tiles_per_row, chunk):
    rng = np.random.default_rng(0)
    lists = random_lists(rng, batch, length, num_kv, num_blocks * 16, 16, n)
    lists[:, length // 3] = num_blocks  # a token without a list
    tokens = tile * tiles_per_row
    words = inversion.mark_lists(jnp.asarray(lists), num_blocks, tile)
    sizes = dict(tile=tile, tiles_per_row=tiles_per_row, entries=tokens * n)
    for even in (False, True):
        got, count = inversion.invert(words, jnp.asarray(lists), num_blocks, chunk, **sizes, even=even)
        check_inverted(got, count, lists, by_rows(lists, num_blocks, tokens), num_blocks, chunk, tokens, even)


def test_even_items_cover_their_block_in_as_few_parts():
    total = np.arange(1, 3000)
    for chunk in (7, 16, 100, 512):
        items, most = (np.asarray(x) for x in readers.divide_block(jnp.asarray(total), chunk, True))
        np.testing.assert_array_equal(items, -(-total // chunk))
        last = total - (items - 1) * most
        assert (most <= chunk).all() and (last > 0).all() and (last <= most).all()
        assert ((most % 16 == 0) | (most == chunk)).all()
        assert (most - last)[items > 1].max() < 16 * (items[items > 1].max() + 1)
    items, most = readers.divide_block(jnp.asarray([554]), 512, True)
    assert (int(items[0]), int(most[0])) == (2, 288)


def test_longest_first_takes_every_item_once_by_falling_length():
    entries = np.random.default_rng(0).integers(0, 9, (3, 200), dtype=np.int32) ** 2 // 8  # the last block has most
    inverted = readers.invert(jnp.asarray(entries), 8, 16)
    count = inverted.begin.shape[1]
    item, block, begin, end = (np.asarray(x) for x in readers.longest_first(inverted, 16, 4))
    assert item.shape == (3, -(-count // 4) * 4)
    np.testing.assert_array_equal(np.sort(item, axis=1), np.broadcast_to(np.arange(item.shape[1]), item.shape))
    assert (np.diff(end - begin, axis=1) <= 0).all() and (end - begin).max() == 16
    for got, want in ((block, inverted.block), (begin, inverted.begin), (end, inverted.end)):
        padded = np.pad(want, ((0, 0), (0, item.shape[1] - count)))
        np.testing.assert_array_equal(got, np.take_along_axis(padded, item, axis=1))


@pytest.mark.gpu
def test_words_give_the_order_of_a_stable_sort_on_a_gpu():
    sizes = dict(batch=2, length=8200, num_kv=3, num_blocks=129, n=16, tile=32, tiles_per_row=64, chunk=100)
    for other in (dict(), dict(tile=16), dict(tile=9), dict(n=33), dict(num_blocks=3, n=2)):
        test_words_give_the_order_of_a_stable_sort(**sizes | other)
    for packed in (False, True):
        test_what_tiles_share_is_not_inverted(packed)


@pytest.mark.parametrize("packed", [False, True])
def test_what_tiles_share_is_not_inverted(packed):
    (_, _, _, lists), keywords = make_inputs(length=77, n=4, shared=8, documents=packed, offset=3)
    start = keywords["segment_start"]
    start = jnp.zeros((1, 77), jnp.int32) if start is None else start
    num_blocks, tile, tokens, chunk = 5, 4, 40, 6
    sizes = dict(tile=tile, share=3, select_block=16, num_keys=80, packed=packed)
    split = neighbours.split_lists(lists, start, jnp.full((1,), 3, jnp.int32), **sizes)
    marked = neighbours.split_lists(lists, start, jnp.full((1,), 3, jnp.int32), **sizes, words=True)
    assert marked.rest is None and split.words is None
    np.testing.assert_array_equal(marked.num_shared, split.num_shared)
    for k, i in np.ndindex(2, split.block.shape[2]):
        shared = int(split.num_shared[0, k, i, 0])
        for name in ("block", "bits"):
            got, want = getattr(marked, name)[0, k, i], getattr(split, name)[0, k, i]
            np.testing.assert_array_equal(got[:shared], want[:shared])
    rest = np.asarray(split.rest)[:, :, :tile, :, :4].reshape(1, -1, 2, 4)[:, :77]
    assert 0 < (rest < num_blocks).sum() < (np.asarray(lists) < num_blocks).sum()
    sizes = dict(tile=tile, tiles_per_row=tokens // tile, entries=tokens * 4)
    got, count = inversion.invert(marked.words, lists, num_blocks, chunk, **sizes)
    check_inverted(got, count, rest, by_rows(rest, num_blocks, tokens), num_blocks, chunk, tokens)


@pytest.mark.parametrize(
    ("group", "dtype", "tolerance"),  # the backward pass keeps partial sums, or score gradients
    [(3, jnp.float32, 1e-5), (8, jnp.bfloat16, 1e-2)],
)
def test_rows_of_many_blocks_are_sorted(group, dtype, tolerance, monkeypatch):
    """Where words would take too much memory: the same results, bit for bit."""
    arrays, keywords = make_inputs(length=60, group=group, dtype=dtype)
    query, key, value, lists = arrays
    config = selected_tiles.selected_config(group, 16, 16, 16, query.dtype, current_target())
    config = dataclasses.replace(config, tile=4, share=3, key_major=True, gather_rows=16, chunk=8, row_tokens=24)
    shape = plan.Shape.of(query, key, value)
    made = plan.plan_selected_forward(shape, current_target(), select_block=16, num_selected=3, lists=config)

    def outputs():
        start, offset = jnp.zeros((1, 60), jnp.int32), jnp.zeros((), jnp.int32)
        out, lse = attention.selected_forward(query, key, value, lists, start, offset, 16, False, made)
        statistics = jnp.zeros(lse.shape), lse, jnp.ones_like(out)
        where = dict(select_block=16, segment_start=start, query_offset=0)
        return out, lse, *_planned_backward(query, key, value, lists, *statistics, **where)

    sorts = []
    monkeypatch.setattr(readers, "sort_entries", lambda *x, f=readers.sort_entries: sorts.append(x) or f(*x))
    inverted = outputs()
    assert not sorts
    want = reference.selected_attention(*arrays, **keywords)
    assert relative_error(inverted[0], want) < tolerance
    monkeypatch.setattr(inversion, "MOST_BYTES", 1)
    jax.clear_caches()
    chex.assert_trees_all_equal(outputs(), inverted)
    assert len(sorts) == 2  # the forward pass and the backward pass
