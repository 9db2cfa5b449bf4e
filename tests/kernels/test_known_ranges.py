"""What tiles visit, where tracing knows it: equal to what a program computes, and less of a program."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

import nsa_jax
from nsa_jax import aot
from nsa_jax.ops.blocks import NSAConfig
from nsa_jax.ops.kernels import sm90_rows
from nsa_jax.ops.kernels.range_attention import attention, tiles
from nsa_jax.ops.kernels.softmax import NO_WEIGHT

CONFIG = NSAConfig(compress_block=32, compress_stride=16, select_block=64, window=100)
# Tokens, where the first lies, groups: tiles that see nothing, hold several tokens or a part of one, end past the row.
CASES = ((1, 0, 3), (31, 0, 1), (31, 300, 16), (64, 5, 3), (200, 0, 16), (200, 300, 1), (517, 0, 3), (517, 5, 16))


def computed(length, offset, num_keys, config, window):
    """(low, high) as a program has them, [1, T]."""
    query = jax.ShapeDtypeStruct((1, length, 1, 1), jnp.float32)
    if window is None:
        low, high = attention.compressed_ranges(query, None, offset, config)
    else:
        low, high = attention.window_ranges(query, None, offset, window)
    return attention.clip_ranges(low, high, num_keys)


def cases():
    for length, offset, group in CASES:
        blocks = max((length + offset - CONFIG.compress_block) // CONFIG.compress_stride + 1, 1)
        yield group, attention.known_compressed_ranges(length, offset, blocks, CONFIG), (length, offset, blocks, None)
        for window in (100, 1 << 30):
            keys = length + offset
            known = attention.known_window_ranges(length, offset, keys, window)
            yield group, known, (length, offset, keys, window)


TILES = ((64, 64), (32, 128))  # rows, keys


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3, 4))
def by_program(length, num_keys, window, group, rows, offset):
    """Ranges, bounds of query tiles, and ranges of key blocks by tile sizes and by warpgroups, of a program."""
    low, high = computed(length, offset, num_keys, CONFIG, window)
    bounds = tiles.tile_bounds(rows.per_token(low, num_keys), rows.per_token(high, 0), rows.tile, 64)
    by_block = [tiles.query_tile_ranges(low, high, group, size, keys, num_keys) for size, keys in TILES]
    return (low, high), bounds, by_block, [tiles.warpgroup_ranges(ranges, 3) for ranges in by_block]


@pytest.mark.usefixtures("quick_compilation")
def test_known_ranges_and_what_tiles_visit_are_those_of_a_program():
    """Ranges, bounds of query tiles and ranges of key blocks agree in every entry, for all shapes."""
    for group, known, (length, offset, num_keys, window) in cases():
        assert known is not None
        rows = sm90_rows.RowTiles(length, group, 1, 2, 64)
        want = by_program(length, num_keys, window, group, rows, offset)
        low, high = known.low[None], known.high[None]
        bounds = tiles.tile_bounds(rows.per_token(low, num_keys), rows.per_token(high, 0), rows.tile, 64)
        by_block = [tiles.known_tile_ranges(known, group, size, keys) for size, keys in TILES]
        found = (low, high), bounds, by_block, [tiles.warpgroup_ranges(ranges, 3) for ranges in by_block]
        assert all(isinstance(mine, np.ndarray) for mine in jax.tree.leaves(found))
        jax.tree.map(functools.partial(np.testing.assert_array_equal, err_msg=f"{rows} {offset} {window}"), found, want)


@pytest.mark.parametrize("most", [0, tiles._MOST_KNOWN])
def test_known_rows_have_one_entry_for_a_batch(most, monkeypatch):
    """Of both attentions: as constants, or too many for that, computed for one entry. Otherwise one for each."""
    monkeypatch.setattr(tiles, "_MOST_KNOWN", most)
    length, batch = 70, 3
    rows = sm90_rows.RowTiles(length, 3, 2, 2, 64)
    known = attention.known_window_ranges(length, 5, 90, 1 << 30)
    near = attention.known_window_ranges(length, 5, 90, 20)
    low, high, window_low = (
        jnp.asarray(np.broadcast_to(x, (batch, length))) for x in (known.low, known.high, near.low)
    )

    def bounds(known, near):
        return tiles.row_vectors(rows, low, high, (), tiles.Window(window_low, near), 90, known)[0]

    one, each = bounds(known, near), bounds(None, None)
    assert one.shape == (3, 1, rows.tiles * rows.tile) and each.shape == (3, batch, rows.tiles * rows.tile)
    np.testing.assert_array_equal(np.broadcast_to(one, each.shape), each)
    np.testing.assert_array_equal(bounds(known, None), each)
    constants = jax.make_jaxpr(lambda: bounds(known, near))().eqns == []
    assert constants == bool(most)


class Whole:
    """An array of which `at[index]` is the index."""

    class at:
        def __class_getitem__(cls, index):
            return index


@pytest.mark.parametrize(("length", "group", "warpgroups"), [(500, 16, 3), (500, 16, 2), (1, 64, 3), (8, 8, 2)])
def test_no_row_past_the_end_is_stored(length, group, warpgroups, monkeypatch):
    """It may be another batch entry's: JAX folds dimensions into one where TMA has too few of them."""
    stored = []
    monkeypatch.setattr(sm90_rows.plgpu, "copy_smem_to_gmem", lambda part, place: stored.append(int(place[1])))
    monkeypatch.setattr(sm90_rows.pl, "when", lambda condition: lambda store: store() if bool(condition) else None)
    rows = sm90_rows.RowTiles(length, group, 1, warpgroups, 128)
    for base in range(0, rows.tiles * rows.tile, 64):
        rows.store(Whole, Whole, 0, 0, jnp.int32(base))
    assert sorted(stored) == list(range(length))


class CutTile:
    """64 rows in shared memory: `at[rows].reshape(tokens, heads, width)` is the first of these rows."""

    shape = (64, 64)

    class at:
        def __class_getitem__(cls, rows):
            assert 0 <= rows.start and rows.start + rows.size <= 64
            return SimpleNamespace(reshape=lambda tokens, heads, width: (int(rows.start), tokens * heads == rows.size))


@pytest.mark.parametrize(("length", "group"), [(500, 6), (128, 6), (45, 3), (333, 12), (77, 24), (1, 12)])
def test_tokens_that_are_cut_are_copied_once(length, group, monkeypatch):
    """Every row of both key/value heads has one place in one tile; boxes that end past the row are cut off there."""
    rows = sm90_rows.RowTiles(length, group, kv_heads=2, warpgroups=2, width=64)
    copied = []

    def copy(part, place):
        first, whole = part
        batch, tokens, heads = place
        assert whole and batch == 1 and heads.start + heads.size <= 2 * group
        for i in range(tokens.size * heads.size):
            token, head = int(tokens.start) + i // heads.size, int(heads.start) + i % heads.size
            if token < length:  # TMA stores no others
                copied.append((token, head, first + i))

    monkeypatch.setattr(sm90_rows.plgpu, "copy_smem_to_gmem", copy)
    monkeypatch.setattr(sm90_rows.pl, "when", lambda condition: lambda store: store() if bool(condition) else None)
    assert rows.cut
    for kv_head in range(2):
        copied.clear()
        for base in range(0, rows.tiles * rows.tile, 64):
            before = len(copied)
            rows.store(CutTile, Whole, 1, kv_head, jnp.int32(base))
            for token, head, row in copied[before:]:
                assert token * group + head - kv_head * group == base + row
        wanted = [(token, kv_head * group + head) for token in range(length) for head in range(group)]
        assert sorted((token, head) for token, head, _ in copied) == wanted


def test_ranges_that_do_not_ascend_are_left_to_the_program():
    """Queries past the last key, whose windows hold nothing again, are no `KnownRanges`."""
    assert attention.known_window_ranges(300, 0, 150, 100) is None
    assert attention.known_window_ranges(300, 0, 250, 100) is not None


@pytest.mark.parametrize("batch", [1, 3])
def test_constants_of_a_batch(batch):
    """Small arrays are constants for all entries, large ones are spread by the program; the values are the same."""
    for size in (5, tiles._MOST_KNOWN):
        x = np.arange(size, dtype=np.int32)[None]
        assert (np.asarray(tiles.for_batch(x, batch)) == x).all() and tiles.for_batch(x, batch).shape == (batch, size)


def reductions(jaxpr):
    """How often a program takes a minimum or maximum, kernels left out."""
    count = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name in ("reduce_min", "reduce_max"):
            count += 1
        elif equation.primitive.name not in ("pallas_call", "core_map", "mpmd_map"):
            count += sum(reductions(inner) for inner in jaxprs_in_params(equation.params))
    return count


@pytest.mark.parametrize("name", ["a100-80gb", "h100"])
def test_programs_are_smaller(name):
    """With a traced offset a program computes what tiles visit; with a known one nothing of it is left."""
    mesh = jax.sharding.Mesh(np.array(aot.devices(name, 1)), ("x",))
    length, heads, kv_heads, dim = 2048, 16, 4, 128
    shape = lambda tokens, heads, last=dim: jax.ShapeDtypeStruct((1, tokens, heads, last), jnp.bfloat16)  # noqa: E731
    blocks = (length - 32) // 16 + 1
    tensors = [shape(length, heads), *[shape(blocks, kv_heads)] * 2, *[shape(length, kv_heads)] * 4]
    tensors.append(shape(length, heads, 3))

    def loss(tensors, offset):
        out = nsa_jax.nsa_attention(*tensors, config=NSAConfig(), query_offset=offset, implementation="pallas")
        return out.astype(jnp.float32).sum()

    with aot.tracing_for(name, mesh):
        known = jax.make_jaxpr(jax.grad(lambda tensors: loss(tensors, 0)))(tensors)
        traced = jax.make_jaxpr(jax.grad(loss))(tensors, jax.ShapeDtypeStruct((), jnp.int32))
    assert reductions(known.jaxpr) == 0 and reductions(traced.jaxpr) >= 8


def test_two_attentions_are_one_with_their_joint_statistics():
    """Weights and score gradients of a key that both see, also where one sees nothing or their sums lie far apart."""
    rng = np.random.default_rng(0)
    scores, cotangent = rng.normal(0, 3, (2, 6, 40))
    lse, window_lse = rng.normal(8, 2, (2, 6))
    delta, window_delta = rng.normal(size=(2, 6))
    lse[0] = window_lse[1] = lse[2] = window_lse[2] = NO_WEIGHT
    delta[0] = window_delta[1] = delta[2] = window_delta[2] = 0.0
    lse[3], window_lse[4] = 300.0, 2000.0
    own = [jnp.asarray(x, jnp.float32) for x in (lse, delta, window_lse, window_delta)]
    both_lse, both_delta = (np.asarray(x, np.float64)[:, None] for x in tiles.joint_statistics(*own))
    want = want_gradient = 0
    for one, its_delta in ((lse, delta), (window_lse, window_delta)):
        weights = np.exp2(scores - one[:, None])
        want, want_gradient = want + weights, want_gradient + weights * (cotangent - its_delta[:, None])
    weights = np.exp2(scores - both_lse)
    np.testing.assert_allclose(weights, want, rtol=3e-6)
    np.testing.assert_allclose(weights * (cotangent - both_delta), want_gradient, rtol=1e-4, atol=1e-6)
    assert (weights[2] == 0).all() and np.isfinite(both_delta).all()
    # Gates of 0 make both log-sum-exps infinite.
    infinite, one = jnp.full(3, jnp.inf), jnp.ones(3)
    lse, delta = tiles.joint_statistics(infinite, one, infinite, one)
    assert (jnp.exp2(5.0 - lse) == 0).all() and jnp.isfinite(delta).all()
