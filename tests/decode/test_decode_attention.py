"""nsa_jax.decode_attention: every implementation against the full forward pass and the reference."""

from __future__ import annotations

import dataclasses
import functools
import re
from unittest import mock

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

import nsa_jax
from nsa_jax import aot
from nsa_jax.ops import blocks, plan, reference
from nsa_jax.ops import decode_tiles as tuning
from nsa_jax.ops.decode import slot_positions
from nsa_jax.ops.kernels.decode import pair, short, step
from nsa_jax.ops.target import Target

# Interpreted kernels are compiled for much longer than they run.
pytestmark = pytest.mark.usefixtures("quick_compilation")

HOPPER = Target("gpu", (9, 0))
SMALL = nsa_jax.NSAConfig(compress_block=8, compress_stride=4, select_block=16, num_selected=4, window=12)
PAPER = nsa_jax.NSAConfig()


def filled_cache(config, lengths, *, num_kv=2, group=2, h_dim=16, v_dim=16, tokens=1, capacity=None, slots=None,
                 dtype=jnp.float32, seed=0):  # fmt: skip
    """Arguments of decode_attention for rows of random tokens, and the same rows unrolled for nsa_attention.

    Everything of the cache that is not in use holds large numbers, which must not show.
    """
    rng = np.random.default_rng(seed)
    lengths = np.asarray(lengths, np.int32)
    batch, longest = len(lengths), int(lengths.max())
    capacity = capacity or -(-longest // config.select_block) * config.select_block + config.select_block
    slots = slots or config.window + tokens - 1

    def draw(length, heads, dim):
        return rng.normal(size=(batch, length, heads, dim)).astype(np.float32)

    dims = (h_dim, v_dim)
    query = draw(longest, num_kv * group, h_dim)
    gates = rng.uniform(0.2, 1.0, (batch, longest, num_kv * group, 3)).astype(np.float32)
    cmp = [draw(blocks.num_compressed(capacity, config), num_kv, dim) for dim in dims]
    slc = [draw(capacity, num_kv, dim) for dim in dims]
    win = [draw(capacity, num_kv, dim) for dim in dims]
    cached = [np.full_like(x, 50.0) for x in (*cmp, *slc)]
    ring = [np.full((batch, slots, num_kv, dim), 50.0, np.float32) for dim in dims]
    for b, length in enumerate(lengths):
        used = blocks.num_compressed(int(length), config)
        for to, source, end in zip(cached, (*cmp, *slc), (used, used, length, length), strict=True):
            to[b, :end] = source[b, :end]
        for p in range(max(0, length - slots), length):
            for to, source in zip(ring, win, strict=True):
                to[b, p % slots] = source[b, p]
    last = np.stack([np.arange(length - tokens, length) for length in lengths])
    new = [np.take_along_axis(x, last[..., None, None], axis=1) for x in (query, gates)]
    arrays = (new[0], *cached, *ring, new[1])
    full = (query, *cmp, *slc, *win, gates)
    cast = lambda xs: [jnp.asarray(x, dtype) for x in xs]  # noqa: E731
    return (*cast(arrays), jnp.asarray(lengths)), cast(full), last


@functools.partial(jax.jit, static_argnames="config")
def _forward(full, start, config):
    length = full[0].shape[1]
    count = blocks.num_compressed(length, config)
    query, key_cmp, value_cmp, *keys_values, gates = full
    return nsa_jax.nsa_attention(
        query,
        key_cmp[:, :count],
        value_cmp[:, :count],
        *(x[:, :length] for x in keys_values),
        gates,
        config=config,
        segment_start=start,
        implementation="reference",
        return_block_indices=True,
    )


def full_forward(full, last, config, segment_start=None):
    """nsa_attention over the whole rows (what follows a row's last tokens cannot matter), at the last tokens."""
    shape = full[0].shape[:2]
    start = jnp.zeros(shape, jnp.int32) if segment_start is None else jnp.broadcast_to(segment_start[:, -1:], shape)
    out, lists = _forward(full, start, config)
    return tuple(np.stack([np.asarray(x)[b, t] for b, t in enumerate(last)]) for x in (out, lists))


# The last four: the kernels of few and of many blocks in many rows, of few blocks, and of any number.
SERVING = ["reference", "xla", "pair", "long_pair", "short", "step"]
NEVER = dict(DECODE_PAIRS=1 << 30, DECODE_LONG_PAIRS=1 << 30)
LIMITS = {  # bytes that are read before lists are known, and pairs from which on a program has one
    "pair": dict(DECODE_READ_BYTES=0, DECODE_PAIRS=0, DECODE_LONG_PAIRS=1 << 30),
    "long_pair": dict(DECODE_READ_BYTES=0, DECODE_FEW_COMPRESSED=0, DECODE_LONG_PAIRS=0),
    "short": dict(DECODE_READ_BYTES=1 << 30, **NEVER),
    "step": dict(DECODE_READ_BYTES=0, **NEVER),
}


@functools.partial(jax.jit, static_argnames=("config", "serving"))
def decode(arrays, start=None, *, config, serving):
    with mock.patch.multiple(tuning, **LIMITS.get(serving, LIMITS["step"])):
        return nsa_jax.decode_attention(
            *arrays,
            config=config,
            segment_start=start,
            implementation="pallas" if serving in LIMITS else serving,
            return_info=True,
        )


def same_blocks(got, want, lengths, config):
    """Lists equal up to their padding, which depends on the capacity."""
    for b, length in enumerate(np.asarray(lengths)):
        real = blocks.num_selection_blocks(int(length), config.select_block)
        got_b, want_b = np.asarray(got[b]), want[b]
        np.testing.assert_array_equal(np.where(got_b < real, got_b, -1), np.where(want_b < real, want_b, -1))


LENGTHS = (3, 8, 61, 150)
CASES = {
    "group_1_linear_window": dict(group=1, num_kv=3, capacity=192, slots=192),
    "group_4_larger_ring": dict(group=4, slots=37),
    "group_6_value_dim_few_tokens": dict(group=6, num_kv=1, v_dim=32, tokens=3),
    "group_16_large_capacity": dict(group=16, num_kv=1, capacity=1024),
    "key_dim_192": dict(h_dim=192, v_dim=128, num_kv=1),
}


# Shapes of several tests, which are served by the same programs; four rows of any lengths up to the capacity.
FOUR_ROWS = dict(group=6, num_kv=1, capacity=160, slots=37)


@pytest.mark.parametrize("serving", SERVING)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore:.*interpret mode")
def test_equals_the_full_forward_at_the_last_tokens(case, serving):
    """Rows of different lengths, odd ones, and one shorter than a compressed block."""
    arrays, full, last = filled_cache(SMALL, LENGTHS, **CASES[case])
    out, info = decode(arrays, config=SMALL, serving=serving)
    want, lists = full_forward(full, last, SMALL)
    chex.assert_trees_all_close(np.asarray(out), want, atol=1e-5, rtol=1e-5)
    same_blocks(info.block_indices, lists, LENGTHS, SMALL)


@pytest.mark.parametrize(("parts", "chunks"), [(1, 0), (2, 0), (2, 1000), (5, 1000)])
@pytest.mark.filterwarnings("ignore:.*interpret mode")
def test_how_the_keys_are_split_changes_nothing(parts, chunks, monkeypatch):
    """Several programs for every branch, and scores in several chunks, with a kernel of their own and without."""
    lengths = (319, 200, 250, 150)  # many blocks to choose from, late ones too
    arrays, full, last = filled_cache(SMALL, lengths, group=6, num_kv=1, capacity=320)
    split = tuning.DecodeConfig(16, parts, parts, 4, 2, parts, 16, 16, 4, chunks)
    monkeypatch.setattr(tuning, "decode_config", lambda *args, **kwargs: split)
    attend = functools.partial(nsa_jax.decode_attention, config=SMALL, implementation="pallas", return_info=True)
    out, info = jax.jit(lambda arrays: attend(*arrays))(arrays)
    want, lists = full_forward(full, last, SMALL)
    chex.assert_trees_all_close(np.asarray(out), want, atol=1e-5, rtol=1e-5)
    same_blocks(info.block_indices, lists, lengths, SMALL)


@pytest.mark.parametrize("serving", ["xla", "pair", "long_pair", "short", "step"])
@pytest.mark.filterwarnings("ignore:.*interpret mode")
def test_nan_in_a_block_that_is_not_listed_does_not_spread(serving):
    """Although the kernels of few blocks read it."""
    arrays, _, _ = filled_cache(SMALL, (150, 90, 40, 3), **FOUR_ROWS)
    out, info = decode(arrays, config=SMALL, serving=serving)
    block = int(np.setdiff1d(np.arange(10), info.block_indices[0])[0])
    for index in (3, 4):  # key_slc, value_slc
        poisoned = list(arrays)
        poisoned[index] = arrays[index].at[0, block * 16 + 5].set(np.nan)
        got, _ = decode(tuple(poisoned), config=SMALL, serving=serving)
        np.testing.assert_array_equal(got, out)


@pytest.mark.parametrize("serving", ["pair", "long_pair", "short", "step"])
@pytest.mark.filterwarnings("ignore:.*interpret mode")
def test_nan_in_blocks_behind_a_row_does_not_spread(serving):
    """Its list is padded: no entry of it stands for the cache's last block."""
    arrays, _, _ = filled_cache(SMALL, (40, 35, 20, 3), **FOUR_ROWS)
    out, info = decode(arrays, config=SMALL, serving=serving)
    assert (np.asarray(info.block_indices) >= 10).any(axis=(1, 2, 3)).all()
    for index in (3, 4):  # key_slc, value_slc
        poisoned = list(arrays)
        poisoned[index] = arrays[index].at[:, 48:].set(np.nan)
        got, _ = decode(tuple(poisoned), config=SMALL, serving=serving)
        np.testing.assert_array_equal(got, out)


@pytest.mark.parametrize("serving", SERVING)
@pytest.mark.filterwarnings("ignore:.*interpret mode")
def test_documents(serving):
    """Only the query's own document counts, also where it starts inside a block or nothing precedes it."""
    arrays, full, last = filled_cache(SMALL, (5, 70, 100, 140))
    start = jnp.asarray([[0], [69], [41], [96]], jnp.int32)
    out, info = decode(arrays, start, config=SMALL, serving=serving)
    want, lists = full_forward(full, last, SMALL, start)
    chex.assert_trees_all_close(np.asarray(out), want, atol=1e-5, rtol=1e-5)
    same_blocks(info.block_indices, lists, (5, 70, 100, 140), SMALL)
    assert not np.allclose(out[2], decode(arrays, config=SMALL, serving="xla")[0][2], atol=1e-2)


@pytest.mark.parametrize("serving", ["pair", "short", "step"])
@pytest.mark.filterwarnings("ignore:.*interpret mode")
def test_documents_that_begin_behind_tiles_of_compressed_blocks(serving):
    config = dataclasses.replace(SMALL, num_selected=12)
    arrays, full, last = filled_cache(config, (600, 700, 720), capacity=768)
    start = jnp.asarray([[300], [560], [0]], jnp.int32)
    out, info = decode(arrays, start, config=config, serving=serving)
    want, lists = full_forward(full, last, config, start)
    chex.assert_trees_all_close(np.asarray(out), want, atol=1e-5, rtol=1e-5)
    same_blocks(info.block_indices, lists, (600, 700, 720), config)


@pytest.mark.parametrize(("dtype", "implementation"), [(np.uint8, "xla"), (np.int8, "pallas")])
@pytest.mark.filterwarnings("ignore:.*interpret mode")
def test_lengths_are_integers_of_any_type(dtype, implementation):
    """The capacity is more than they can hold. Caches may be NumPy's."""
    arrays, _, _ = filled_cache(SMALL, (20, 90), capacity=320)
    want, info = decode(arrays, config=SMALL, serving="short" if implementation == "pallas" else implementation)
    given = (*map(np.asarray, arrays[:-1]), np.asarray([20, 90], dtype))
    got, same = nsa_jax.decode_attention(*given, config=SMALL, implementation=implementation, return_info=True)
    chex.assert_trees_all_close((got, same), (want, info), atol=1e-6)


def test_lengths_beyond_32_bits_are_the_capacity():
    arrays, _, _ = filled_cache(SMALL, (20, 320), capacity=320)
    want, got = (
        nsa_jax.decode_attention(*arrays[:-1], np.asarray([20, length]), config=SMALL, implementation="xla")
        for length in (320, 2**32)
    )
    chex.assert_trees_all_equal(got, want)


@pytest.mark.parametrize("serving", SERVING)
@pytest.mark.filterwarnings("ignore:.*interpret mode")
def test_an_empty_row_gives_zero(serving):
    arrays, _, _ = filled_cache(SMALL, (40, 90, 160, 3), **FOUR_ROWS)
    lengths = jnp.asarray([0, 90, 160, 3], jnp.int32)
    out, info = decode((*arrays[:-1], lengths), config=SMALL, serving=serving)
    assert np.all(np.asarray(out[0]) == 0) and np.all(np.asarray(info.keys_read[0]) == 0)
    assert np.isfinite(np.asarray(out[1:])).all() and np.abs(np.asarray(out[1:])).max(axis=(1, 2, 3)).min() > 0.1


@pytest.mark.parametrize("serving", SERVING)
@pytest.mark.filterwarnings("ignore:.*interpret mode")
def test_a_row_longer_than_the_cache_reads_nothing_outside_it(serving):
    """Such a row counts as full, and its list is written and names blocks of the cache; the others do not change.

    The interpreter bounds every index, a GPU does not: the lists, which kernels read through, must be right themselves.
    """
    capacity = FOUR_ROWS["capacity"]
    arrays, _, _ = filled_cache(SMALL, (160, 90, 160, 160), **FOUR_ROWS)
    full, info = decode(arrays, config=SMALL, serving=serving)
    lengths = jnp.asarray([161, 90, 2 * capacity + 37, 100_000], jnp.int32)
    out, longer = decode((*arrays[:-1], lengths), config=SMALL, serving=serving)
    lists = np.asarray(longer.block_indices)
    assert lists.min() >= 0 and lists.max() < capacity // SMALL.select_block
    chex.assert_trees_all_equal((out, longer), (full, info))


@pytest.mark.filterwarnings("ignore:.*interpret mode")
def test_bfloat16_kernels_are_as_exact_as_their_inputs():
    arrays, full, last = filled_cache(SMALL, LENGTHS, group=4, dtype=jnp.bfloat16)
    out, _ = decode(arrays, config=SMALL, serving="short")
    want, _ = full_forward([x.astype(jnp.float32) for x in full], last, SMALL)
    error = np.linalg.norm(np.asarray(out, np.float32) - want) / np.linalg.norm(want)
    assert out.dtype == jnp.bfloat16 and error < 4e-3, error


@pytest.mark.parametrize(("length", "paper"), [(8192, 2047), (16384, 2559), (32768, 3583), (65536, 5631)])
def test_key_positions_read_are_those_of_the_paper(length, paper):
    """Table 4 of the paper, counted from the lists that the operator used."""
    arrays, _, _ = filled_cache(PAPER, (length,), num_kv=1, group=2, h_dim=2, v_dim=2)
    _, info = decode(arrays, config=PAPER, serving="xla")
    chex.assert_shape(info.keys_read, (1, 1, 1))
    assert abs(int(info.keys_read[0, 0, 0]) - paper) <= 1


def test_key_positions_read_are_counted_from_the_lists():
    """Brute force over the positions, also where blocks are partial and cut by the document's start."""
    lengths = (5, 70, 100, 140)
    arrays, _, _ = filled_cache(SMALL, lengths)
    start = jnp.asarray([[0], [69], [41], [96]], jnp.int32)
    _, info = decode(arrays, start, config=SMALL, serving="xla")
    for b, length in enumerate(lengths):
        t, first = length - 1, int(start[b, 0])
        low, high = blocks.compressed_range(t, first, SMALL)
        for k, listed in enumerate(np.asarray(info.block_indices[b, 0])):
            tokens = {j * 16 + i for j in listed for i in range(16)} & set(range(first, length))
            window = min(SMALL.window, t + 1 - first)
            assert int(info.keys_read[b, 0, k]) == max(high - low, 0) + len(tokens) + window


def test_one_compilation_serves_every_length():
    arrays, _, _ = filled_cache(SMALL, (20, 90))
    step = jax.jit(lambda *xs: nsa_jax.decode_attention(*xs, config=SMALL))
    for lengths in ([1, 2], [20, 90], [21, 91]):
        step(*arrays[:-1], jnp.asarray(lengths, jnp.int32))
    assert step._cache_size() == 1


def test_mistakes_are_named():
    arrays, _, _ = filled_cache(SMALL, (20, 90))
    few = [np.concatenate([arrays[i]] * 2, axis=1) for i in (0, 7)]
    for change, words in (
        ({3: arrays[3][:, :-1], 4: arrays[4][:, :-1]}, "multiple of select_block"),
        ({1: arrays[1][:, :-1], 2: arrays[2][:, :-1]}, "key_cmp has length"),
        ({0: few[0], 7: few[1]}, "key_win has length"),
        ({8: arrays[8][:1]}, "lengths has shape"),
        ({8: arrays[8].astype(jnp.float32)}, "lengths has dtype"),
        ({7: arrays[7][..., :2]}, "gates has shape"),
    ):
        given = [change.get(i, x) for i, x in enumerate(arrays)]
        with pytest.raises(ValueError, match=words):
            nsa_jax.decode_attention(*given, config=SMALL)


def decode_shapes(batch, capacity, config=PAPER, num_heads=64, num_kv=4, dim=128):
    """Shapes of decode_attention's arrays at benchmark size."""
    struct = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)  # noqa: E731
    cmp = struct(batch, blocks.num_compressed(capacity, config), num_kv, dim)
    slc, win = struct(batch, capacity, num_kv, dim), struct(batch, config.window, num_kv, dim)
    query, gates = struct(batch, 1, num_heads, dim), struct(batch, 1, num_heads, 3)
    return query, cmp, cmp, slc, slc, win, win, gates, jax.ShapeDtypeStruct((batch,), jnp.int32)


def test_few_blocks_are_read_before_the_lists_are_known():
    """Where rows have at most four times as many blocks as they list, eight times if those are little to read, and few
    in all; one kernel serves many rows."""

    def planned(batch, capacity, dim=64, target=HOPPER):
        query, key_cmp, *_, key_slc, value_slc = decode_shapes(batch, capacity, num_heads=12, num_kv=2, dim=dim)[:5]
        return plan.plan_decode(plan.Shape.of(query, key_slc, value_slc), key_cmp.shape[1], PAPER, target)

    for capacity, kernels in (
        (2048, ["short"] * 3 + ["pair"] * 3),
        (4096, ["short"] * 2 + ["pair"] * 4),
        (8192, ["short"] + ["step"] * 4 + ["pair"]),
        (16384, ["step"] * 5 + ["pair"]),
    ):
        assert [planned(batch, capacity).kernel for batch in (1, 3, 4, 8, 16, 64)] == [f"decode.{k}" for k in kernels]
    assert planned(64, 8192, target=Target("gpu", (8, 6))).kernel == "decode.step"  # has less shared memory
    splits = {batch: planned(batch, 2048).tiles for batch in (4, 8, 16, 32, 48, 64, 100)}
    assert {batch: split.pair_parts for batch, split in splits.items()} == {
        4: 8,
        8: 4,
        16: 4,
        32: 2,
        48: 2,
        64: 1,
        100: 1,
    }
    assert {(x.pair_keys, x.num_warps, x.pair_stages) for x in splits.values()} == {(128, 4, 3)}
    assert [planned(64, 2048, dim).tiles.pair_keys for dim in (128, 192)] == [64, 32]  # what shared memory has room for
    groups = [plan.Shape(64, 1, 2048, 2 * group, 2, 64, 64, "bfloat16") for group in (16, 17)]
    assert [plan.plan_decode(shape, 127, PAPER, HOPPER).kernel for shape in groups] == ["decode.pair", "decode.step"]


def test_few_warps_make_lists_from_few_scores():
    def warps(group, num_cmp):
        tile = tuning.decode_config(4, num_cmp, PAPER, 256)
        return step.Launch(2, 2, group, num_cmp, 16 * (num_cmp + 1), (64, 64), jnp.bfloat16, PAPER, tile).warps

    assert [warps(6, num_cmp) for num_cmp in (511, 1023, 8191)] == [4, 8, 8] and warps(16, 511) == 8


@pytest.mark.parametrize(("t", "start"), [(0, 0), (1023, 0), (2047, 0), (2047, 1900), (700, 690), (1500, 1460)])
def test_programs_that_read_the_new_token_write_it(t, start, monkeypatch):
    """None waits for another, which the interpreter, in which they follow each other, does not show."""
    tile = tuning.decode_config(4, 127, PAPER, 256)
    args = 2, 2, 6, 127, 2048, (64, 64), jnp.bfloat16, PAPER, tile

    def needs(kernel):
        made, found = kernel.Launch(*args), []
        for part in range(made.grid[0]):
            monkeypatch.setattr(pl, "program_id", lambda axis, part=part: (part, 0, 0)[axis])
            found.append([bool(x) for x in made.needs(jnp.int32(t), jnp.int32(start))])
        return made, *np.transpose(found)

    made, token, compressed = needs(short)
    of_window = made.cut[0] + np.arange(made.cut[1])
    assert set(np.flatnonzero(token)) == {*of_window, sum(made.cut) + t // 64}
    assert set(np.flatnonzero(compressed)) == set(range(made.cut[0]))

    made, token, compressed = needs(step)
    assert token.tolist() == [part >= made.cut[0] for part in range(made.grid[0])] == (~compressed).tolist()

    made, token, compressed = needs(pair)
    listed = min(t // 64 - start // 64 + 1, PAPER.num_selected)  # the newest block is the last of them
    parts = made.grid[0] - sum(made.cut)
    each = -(-listed // parts)
    assert set(np.flatnonzero(token)) == {(listed - 1) // each, made.grid[0] - 1} and parts == 8
    assert compressed.tolist() == [True] * (parts + 1) + [False]


@pytest.mark.parametrize(
    ("serving", "keys", "parts", "at_once"),
    [("pair", 8, 2, 0), ("pair", 64, 1, 0), ("pair", 64, 2, 0), ("pair", 32, 4, 0)]
    + [("long_pair", 8, 1, 2), ("long_pair", 64, 1, 1), ("long_pair", 32, 1, 4)],
)
@pytest.mark.filterwarnings("ignore:.*interpret mode")
def test_tiles_of_a_pair_change_nothing(serving, keys, parts, at_once, monkeypatch):
    """A tile is a part of a block or several blocks; parts of a pair have nothing to do where a row has few blocks.

    One row is full, and others are in a later document.
    """
    lengths, start = (320, 199, 33, 2), jnp.asarray([[0], [70], [0], [1]], jnp.int32)
    arrays, full, last = filled_cache(SMALL, lengths, group=6, num_kv=1, capacity=320)
    chosen, fields = tuning.decode_config, dict(pair_keys=keys, pair_parts=parts, pair_tiles=at_once)
    fields |= dict(pair_window_parts=max(1, parts // 2))
    monkeypatch.setattr(tuning, "decode_config", lambda *args: dataclasses.replace(chosen(*args), **fields))
    traced_anew = jax.jit(functools.partial(decode.__wrapped__, config=SMALL, serving=serving))
    out, info = traced_anew(arrays, start)
    want, lists = full_forward(full, last, SMALL, start)
    chex.assert_trees_all_close(np.asarray(out), want, atol=1e-5, rtol=1e-5)
    same_blocks(info.block_indices, lists, lengths, SMALL)


ONE_KV_HEAD = dict(num_heads=16, num_kv=1)


@pytest.mark.parametrize(
    ("gpu", "batch", "capacity", "heads"),
    [("a100-80gb", 16, 131_072, {}), ("h100", 1, 131_072, {}), ("h100", 1, 2048, {}), ("h100", 8, 2048, {})]
    + [
        ("a100-80gb", 64, 2048, {}),
        ("a100-80gb", 64, 32_768, {}),
        ("h100", 24, 8192, {}),
        ("l40s", 1, 8192, ONE_KV_HEAD),
    ],
)
def test_kernels_compile_ahead_of_time(gpu, batch, capacity, heads, usual_compilation):
    """The cache is read in place, so temporary memory stays far below it."""
    shapes = decode_shapes(batch, capacity, **heads)
    try:
        compiled = aot.compile_for_gpu(
            lambda *xs: nsa_jax.decode_attention(*xs, config=PAPER, implementation="pallas"), *shapes, gpu=gpu
        )
    except aot.AheadOfTimeUnavailable as error:
        pytest.skip(str(error))
    assert compiled.memory_analysis().temp_size_in_bytes < 16 * 2**20 * max(batch, 4) / 4
    names = {"read", "selected", "combine"}
    if batch in (24, 64):
        names = {"pair"}
    elif capacity <= 8192:
        names = {1: {"read", "finish"}, 8: {"pair", "combine"}}[batch]
    assert set(re.findall(r"nsa_decode_([a-z]+)", compiled.as_text())) - {"fold"} == names


@pytest.mark.filterwarnings("ignore:.*interpret mode")
def test_dense_decoding_kernel_equals_masked_attention():
    from nsa_jax.ops.pallas import dense_decode_attention

    arrays, _, _ = filled_cache(SMALL, LENGTHS, group=3, v_dim=32, tokens=2)
    query, key, value, lengths = arrays[0], arrays[3], arrays[4], arrays[-1]
    start = jnp.asarray([[0, 2], [0, 0], [17, 17], [149, 149]], jnp.int32)
    t = lengths[:, None] - 2 + jnp.arange(2)
    position = jnp.arange(key.shape[1])
    for packed in (None, start):
        low = jnp.zeros_like(t) if packed is None else packed
        mask = (position >= low[..., None]) & (position <= t[..., None])
        want, _ = reference._attend(query, key, value, mask[:, :, None])
        out = jax.jit(dense_decode_attention)(query, key, value, lengths, packed)
        chex.assert_trees_all_close(np.asarray(out), np.asarray(want), atol=1e-5, rtol=1e-5)


@pytest.mark.filterwarnings("ignore:.*interpret mode")
def test_dense_decoding_kernel_reads_rings():
    """Slots in another order give the same as the last tokens of a whole cache; a row may be longer than the ring."""
    from nsa_jax.ops.pallas import dense_decode_attention

    arrays, _, _ = filled_cache(SMALL, LENGTHS, group=3, v_dim=32)
    query, key, value, lengths = arrays[0], arrays[3], arrays[4], arrays[-1]
    slots = 40
    assert min(LENGTHS) < slots < max(LENGTHS)
    held = np.asarray(slot_positions(lengths, slots))
    ring = [jnp.take_along_axis(x, jnp.maximum(held, 0)[..., None, None], axis=1) for x in (key, value)]
    start = jnp.asarray([[0], [5], [17], [LENGTHS[3] - 15]], jnp.int32)
    for packed in (None, start):
        low = jnp.maximum(lengths[:, None] - slots, 0 if packed is None else packed)
        position = jnp.arange(key.shape[1])
        mask = (position >= low[..., None]) & (position < lengths[:, None, None])
        want, _ = reference._attend(query, key, value, mask[:, :, None])
        out = jax.jit(functools.partial(dense_decode_attention, ring=True))(query, *ring, lengths, packed)
        chex.assert_trees_all_close(np.asarray(out), np.asarray(want), atol=1e-5, rtol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("group", "dim", "num_kv"), [(16, 128, 4), (6, 64, 2), (1, 64, 3)])
def test_gpu_few_blocks(group, dim, num_kv, packed):
    """All ways list the same blocks and differ by rounding; their bits do not change from call to call."""
    lengths = (2048, 1111, 40, 3)
    sizes = dict(num_kv=num_kv, group=group, h_dim=dim, v_dim=dim, capacity=2048, dtype=jnp.bfloat16)
    arrays, _, _ = filled_cache(PAPER, lengths, **sizes)
    start = jnp.asarray([[777], [0], [33], [0]], jnp.int32) if packed else None
    other, same = decode(arrays, start, config=PAPER, serving="step")
    other = np.asarray(other, np.float32)
    for serving in ("short", "pair"):
        out, info = decode(arrays, start, config=PAPER, serving=serving)
        np.testing.assert_array_equal(info.block_indices, same.block_indices)
        out = np.asarray(out, np.float32)
        assert np.linalg.norm(out - other) < 3e-3 * np.linalg.norm(other)
        for _ in range(3):
            again, _ = decode(arrays, start, config=PAPER, serving=serving)
            np.testing.assert_array_equal(np.asarray(again, np.float32), out)


@pytest.mark.gpu
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("group", "dim", "num_kv", "rows"), [(16, 128, 4, 4), (6, 64, 2, 150), (1, 64, 3, 7)])
def test_gpu_many_blocks(group, dim, num_kv, rows, packed):
    """One kernel lists what four do, in rows of all lengths; outputs differ by rounding, not from call to call."""
    capacity = 4096 if rows > 10 else 32_768
    lengths = np.linspace(3, capacity, rows).astype(int)
    sizes = dict(num_kv=num_kv, group=group, h_dim=dim, v_dim=dim, capacity=capacity, dtype=jnp.bfloat16)
    arrays, _, _ = filled_cache(PAPER, lengths, **sizes)
    start = jnp.asarray(lengths // 3, jnp.int32)[:, None] if packed else None
    other, same = decode(arrays, start, config=PAPER, serving="step")
    other = np.asarray(other, np.float32)
    out, info = decode(arrays, start, config=PAPER, serving="long_pair")
    np.testing.assert_array_equal(info.block_indices, same.block_indices)
    out = np.asarray(out, np.float32)
    assert np.linalg.norm(out - other) < 3e-3 * np.linalg.norm(other)
    for _ in range(20):
        again, _ = decode(arrays, start, config=PAPER, serving="long_pair")
        np.testing.assert_array_equal(np.asarray(again, np.float32), out)


@pytest.mark.gpu
def test_gpu_long_context(monkeypatch):
    """bfloat16 at a real shape against the float32 reference; bit-equal with the scores read apart or not."""
    lengths = (32_768, 9_999)
    arrays, _, _ = filled_cache(PAPER, lengths, num_kv=4, group=16, h_dim=128, v_dim=128, dtype=jnp.bfloat16)
    step = jax.jit(lambda *xs: nsa_jax.decode_attention(*xs, config=PAPER, implementation="pallas", return_info=True))
    out, info = step(*arrays)
    wide = [x.astype(jnp.float32) for x in arrays[:-1]]
    want, truth = nsa_jax.decode_attention(
        *wide, arrays[-1], config=PAPER, implementation="reference", return_info=True
    )
    for b, k in np.ndindex(2, 4):  # one swapped near-tie changes an output a little, not the rest
        same = np.intersect1d(info.block_indices[b, 0, k], truth.block_indices[b, 0, k]).size
        assert same >= 14
    error = np.linalg.norm(np.asarray(out, np.float32) - np.asarray(want)) / np.linalg.norm(np.asarray(want))
    assert error < 2e-2
    chosen = tuning.decode_config
    for chunks in (0, 1 << 20):  # the kernel of their own, always and never
        monkeypatch.setattr(
            tuning, "decode_config", lambda *args, n=chunks: dataclasses.replace(chosen(*args), chunks=n)
        )
        jax.clear_caches()
        again, lists = step(*arrays)
        np.testing.assert_array_equal(np.asarray(again, np.float32), np.asarray(out, np.float32))
        np.testing.assert_array_equal(lists.block_indices, info.block_indices)
