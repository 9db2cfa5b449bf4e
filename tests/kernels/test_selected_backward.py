"""Backward of selected attention against the reference's vjp: interpreted on CPU, and at real shapes on a GPU."""

from __future__ import annotations

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from nsa_jax.ops import blocks, plan, reference, selected_tiles
from nsa_jax.ops.kernels import readers
from nsa_jax.ops.kernels.selected import backward as selected_backward_module
from nsa_jax.ops.kernels.selected import grad_query, grad_scores_sm90
from nsa_jax.ops.kernels.selected.backward import selected_backward
from nsa_jax.ops.kernels.selected.grad_layout import make_layout
from nsa_jax.ops.kernels.triton import row_delta
from nsa_jax.ops.selected_tiles import SelectedBackwardConfig
from nsa_jax.ops.target import current_target

pytestmark = pytest.mark.usefixtures("quick_compilation")


def _random_lists(rng, batch, length, num_kv, slots, num_blocks) -> np.ndarray:
    """Ascending lists of distinct blocks of random lengths (0 included), padded with J; some name future blocks."""
    out = np.full((batch, length, num_kv, slots), num_blocks, np.int32)
    for index in np.ndindex(batch, length, num_kv):
        count = rng.integers(0, min(slots, num_blocks) + 1)
        out[index][:count] = np.sort(rng.permutation(num_blocks)[:count])
    return out


def _inputs(
    seed, *, batch, length, num_keys, num_heads, num_kv, h_dim, v_dim, slots, select_block, dtype, packed, offset
):
    rng = np.random.default_rng(seed)
    queries, keys = (length, num_heads), (num_keys, num_kv)
    shapes = ((*queries, h_dim), (*keys, h_dim), (*keys, v_dim), (*queries, v_dim))
    query, key, value, d_out = (jnp.asarray(rng.normal(size=(batch, *s)), dtype) for s in shapes)
    num_blocks = blocks.num_selection_blocks(num_keys, select_block)
    indices = jnp.asarray(_random_lists(rng, batch, length, num_kv, slots, num_blocks))
    positions = offset + np.arange(length)
    start = np.sort(rng.integers(0, positions + 1, (batch, length)), axis=1) if packed else np.zeros((batch, length))
    return query, key, value, indices, d_out, jnp.asarray(start, jnp.int32)


def _planned_backward(query, key, value, lists, *args, select_block, config=None, **keywords):
    """`selected_backward` with the plan for the current target, or for given tiles."""
    sizes = dict(select_block=select_block, num_selected=lists.shape[-1])
    made = plan.plan_selected_backward(plan.Shape.of(query, key, value), current_target(), **sizes, lists=config)
    return selected_backward(query, key, value, lists, *args, select_block=select_block, plan=made, **keywords)


_backward = jax.jit(_planned_backward, static_argnames=("select_block", "config"))


@functools.partial(jax.jit, static_argnames=("select_block", "offset"))
def _reference(query, key, value, indices, d_out, start, select_block, offset):
    """(out, lse, gradients), all float32 from the reference."""
    query, key, value, d_out = (x.astype(jnp.float32) for x in (query, key, value, d_out))
    t = offset + jnp.arange(query.shape[1])[:, None]
    position = jnp.arange(key.shape[1])
    listed = (indices[..., None, :] == (position // select_block)[:, None]).any(-1)  # [B, T, K, S]
    visible = (position >= start[..., None]) & (position <= t)
    mask = listed & visible[:, :, None, :]
    (out, lse), vjp = jax.vjp(lambda q, k, v: reference._attend(q, k, v, mask), query, key, value)
    return out, lse, vjp((d_out, jnp.zeros_like(lse)))


def _errors(got, want):
    """Relative errors; NaN, which `max` may pass over, counts as infinite."""

    def error(g, w):
        ratio = jnp.linalg.norm(g.astype(jnp.float32) - w) / jnp.maximum(jnp.linalg.norm(w), 1e-30)
        return float(jnp.where(jnp.isnan(ratio), jnp.inf, ratio))

    return [error(g, w) for g, w in zip(got, want, strict=True)]


_CASES = {
    "plain": {},
    "one_head_per_group": dict(num_heads=2, num_kv=2, length=37, num_keys=37),
    "three": dict(num_heads=6, num_kv=2, packed=True),
    "six_packed_batch": dict(batch=2, num_heads=6, num_kv=1, packed=True, length=29, num_keys=29),
    "sixteen": dict(num_heads=16, num_kv=1, length=21, num_keys=21),
    "sixty_four": dict(num_heads=64, num_kv=1, length=9, num_keys=9),
    "wide_values": dict(h_dim=16, v_dim=32),
    "three_part_keys": dict(h_dim=192, v_dim=64, length=20, num_keys=20),
    "odd_block": dict(select_block=12, length=41, num_keys=41),
    "wide_block": dict(select_block=32, length=70, num_keys=70, slots=3),
    "offset": dict(length=11, num_keys=50, offset=30, packed=True),
    "bfloat16": dict(dtype=jnp.bfloat16),
}


@pytest.mark.parametrize("name", _CASES)
def test_gradients_equal_the_references(name):
    case = dict(
        batch=1, length=33, num_keys=33, num_heads=4, num_kv=2, h_dim=16, v_dim=16, slots=4, select_block=8,
        dtype=jnp.float32, packed=False, offset=0,
    ) | _CASES[name]  # fmt: skip
    query, key, value, indices, d_out, start = _inputs(0, **case)
    select_block, offset = case["select_block"], case["offset"]
    out, lse, want = _reference(query, key, value, indices, d_out, start, select_block, offset)
    got = _backward(
        query, key, value, indices, row_delta(out, d_out), lse, d_out,
        select_block=select_block, segment_start=start, query_offset=jnp.int32(offset),
    )  # fmt: skip
    chex.assert_trees_all_equal_shapes_and_dtypes(got, (query, key, value))
    tolerance = 1e-5 if case["dtype"] == jnp.float32 else 1e-2
    assert max(_errors(got, want)) < tolerance, _errors(got, want)
    unseen = jnp.isneginf(lse)
    assert bool(unseen.any())
    assert float(jnp.abs(jnp.where(unseen[..., None], got[0], 0)).max()) == 0.0


def test_ranges_of_queries_change_nothing_but_the_order_of_sums():
    case = dict(
        batch=2, length=150, num_keys=150, num_heads=4, num_kv=2, h_dim=16, v_dim=16, slots=3, select_block=24,
        dtype=jnp.float32, packed=True, offset=0,
    )  # fmt: skip
    query, key, value, indices, d_out, start = _inputs(1, **case)
    out, lse, want = _reference(query, key, value, indices, d_out, start, 24, 0)
    ranges, heads = 64 * 3 * 2 * 16 * 4, 2 * 150 * 3 * 2 * 16 * 4  # 3 ranges of 64 queries; 2 heads at a time
    for buffer_bytes, keep_scores, tile in (
        (ranges, False, 1),
        (ranges, True, 1),
        (ranges, True, 4),
        (heads, False, 1),
    ):
        config = SelectedBackwardConfig(
            16, 8, 4, 1, keep_scores=keep_scores, keys=16, buffer_bytes=buffer_bytes, tile=tile, share=2
        )
        got = _backward(
            query, key, value, indices, row_delta(out, d_out), lse, d_out,
            select_block=24, segment_start=start, query_offset=jnp.int32(0), config=config,
        )  # fmt: skip
        assert max(_errors(got, want)) < 1e-5, _errors(got, want)


def _shared_lists(rng, batch, length, num_kv, num_blocks, run, common, own) -> np.ndarray:
    """Lists of `common` blocks that each `run` neighbouring tokens have in common and `own` ones of each token's."""
    out = np.empty((batch, length, num_kv, common + own), np.int32)
    for b, head in np.ndindex(batch, num_kv):
        for t in range(length):
            if t % run == 0:
                shared = rng.permutation(num_blocks)[:common]
            others = np.setdiff1d(np.arange(num_blocks), shared)
            out[b, t, head] = np.sort(np.concatenate([shared, rng.permutation(others)[:own]]))
    return out


_SHARED_CASES = {
    "whole_lists": dict(run=16, common=3, own=0),
    "whole_lists_packed": dict(run=16, common=3, own=0, batch=2, packed=True),
    "parts_of_lists": dict(run=16, common=2, own=1, packed=True),
    "runs_that_straddle_tiles": dict(run=5, common=2, own=2, tile=4),
    "padded_blocks": dict(run=16, common=2, own=1, select_block=24, num_keys=163),
    "whole_group_in_rows": dict(run=16, common=3, own=0, tile=4, num_heads=8, dtype=jnp.bfloat16),
    "sixteen_slots": dict(run=16, common=14, own=2, select_block=8, packed=True),
}


@pytest.mark.parametrize("name", _SHARED_CASES)
def test_gradients_where_tiles_of_neighbours_share_blocks(name):
    lists_of = dict(tile=8) | _SHARED_CASES[name]
    tile, run, common, own = (lists_of.pop(k) for k in ("tile", "run", "common", "own"))
    # Three ranges of 64 queries, the last one short and its last tile too; three heads leave rows of a tile over.
    case = dict(
        batch=1, length=157, num_keys=176, num_heads=6, num_kv=2, h_dim=16, v_dim=16, slots=common + own,
        select_block=16, dtype=jnp.float32, packed=False, offset=6,
    ) | lists_of  # fmt: skip
    select_block = case["select_block"]
    query, key, value, _, d_out, start = _inputs(5, **case)
    num_blocks = blocks.num_selection_blocks(case["num_keys"], select_block)
    rng = np.random.default_rng(6)
    indices = jnp.asarray(_shared_lists(rng, *query.shape[:2], 2, num_blocks, run, common, own))
    group, columns = case["num_heads"] // 2, max(16, pl.next_power_of_2(select_block))
    config = SelectedBackwardConfig(
        16, 8, 4, 1, keep_scores=True, keys=16, tile=tile, share=tile // 2,
        buffer_bytes=64 * case["slots"] * group * columns * query.dtype.itemsize,
    )  # fmt: skip
    layout = make_layout(query, key, value, case["slots"], select_block, config)
    assert layout.ranges == 3
    split = grad_query.split_for(indices, start, jnp.int32(6), layout)
    sharing = np.asarray(jax.lax.population_count(split.bits))
    sharing = sharing[np.arange(sharing.shape[-1]) < np.asarray(split.num_shared)[..., :1]]
    assert (sharing == tile).any() and (sharing >= tile // 2).all()
    padding = num_blocks * pl.next_power_of_2(case["slots"])
    left = (np.asarray(split.rest)[..., : case["slots"]] < padding).sum(-1)  # [B, tiles, Q', K]
    np.testing.assert_array_equal(np.moveaxis(np.asarray(split.num_rest), 1, 3), left)

    out, lse, want = _reference(query, key, value, indices, d_out, start, select_block, 6)
    got = _backward(
        query, key, value, indices, row_delta(out, d_out), lse, d_out,
        select_block=select_block, segment_start=start, query_offset=jnp.int32(6), config=config,
    )  # fmt: skip
    tolerance = 1e-5 if case["dtype"] == jnp.float32 else 1e-2
    assert max(_errors(got, want)) < tolerance, _errors(got, want)


@pytest.mark.parametrize(("select_block", "num_keys"), [(16, 176), (16, 163), (24, 168), (8, 40), (64, 128)])
def test_key_rows_stay_inside_their_block(select_block, num_keys):
    query, key = (jax.ShapeDtypeStruct((1, n, 1, 16), jnp.float32) for n in (20, num_keys))
    layout = make_layout(query, key, key, 2, select_block, SelectedBackwardConfig(16, 8, 4, 1))
    for block in range(layout.num_blocks):
        rows, first, last = layout.key_rows(0, 0, block, 0, layout.columns)
        assert first == block * select_block and last == min(first + select_block, num_keys) - 1
        np.testing.assert_array_equal(rows, np.minimum(first + np.arange(layout.columns), last))


def test_inverted_lists_hold_every_entry_once_in_bounded_items():
    rng = np.random.default_rng(2)
    num_blocks, chunk = 7, 4
    entries = rng.integers(0, num_blocks + 2, (3, 60)).astype(np.int32)
    entries[1] = 0  # one block takes everything
    entries[2] = num_blocks
    inverted = jax.tree.map(np.asarray, readers.invert(jnp.asarray(entries), num_blocks, chunk))
    for row in range(3):
        seen = {j: [] for j in range(num_blocks)}
        for j in range(num_blocks):
            for item in range(inverted.offset[row, j], inverted.offset[row, j + 1]):
                begin, end = inverted.begin[row, item], inverted.end[row, item]
                assert inverted.block[row, item] == j and 0 < end - begin <= chunk
                seen[j].extend(inverted.order[row, begin:end].tolist())
        assert seen == {j: np.flatnonzero(entries[row] == j).tolist() for j in range(num_blocks)}
        needed = inverted.offset[row, -1]
        assert (inverted.begin[row, needed:] == inverted.end[row, needed:]).all()


@pytest.mark.parametrize("needs_entries", [False, True])
def test_marked_entries_are_those_whose_query_does_not_see_its_whole_block(needs_entries):
    batch, length, num_keys, num_kv, slots, offset = 2, 150, 201, 2, 3, 40
    query = jax.ShapeDtypeStruct((batch, length, 16 * num_kv, 64), jnp.bfloat16)
    key = jax.ShapeDtypeStruct((batch, num_keys, num_kv, 64), jnp.bfloat16)
    config = SelectedBackwardConfig(64, 8, 4, 2, keep_scores=True, buffer_bytes=64 * slots * 16 * 64 * 2)
    layout = make_layout(query, key, key, slots, 64, config)
    assert layout.ranges == 3
    rng = np.random.default_rng(4)
    indices = _random_lists(rng, batch, length, num_kv, slots, layout.num_blocks)
    positions = offset + np.arange(length)
    start = np.where(rng.random((batch, length)) < 0.5, 0, rng.integers(0, positions + 1, (batch, length)))
    entries, inverted, _ = selected_backward_module._inverted_lists(jnp.asarray(indices), layout, needs_entries)
    assert (entries is not None) == needs_entries
    lists = inverted, jnp.asarray(indices), jnp.asarray(start, jnp.int32)
    order, *_ = grad_scores_sm90.prepare(*lists, jnp.int32(offset), layout)
    order, marks = np.asarray(order) & (2**30 - 1), np.asarray(order) >> 30
    assert 0 <= order.min() and order.max() < layout.entries  # also behind the last item
    counts = [0, 0]
    for row in range(order.shape[0]):
        b, head, part = row // layout.ranges // num_kv, row // layout.ranges % num_kv, row % layout.ranges
        first = part * layout.range_length
        own = indices[b, first : first + layout.range_length, head].reshape(-1)
        listed = np.flatnonzero(own < layout.num_blocks)
        assert sorted(order[row, : listed.size]) == listed.tolist()
        for entry, marked in zip(order[row, : listed.size], marks[row], strict=False):
            t, block = first + entry // slots, own[entry]
            keys = range(block * 64, block * 64 + 64)
            sees_all = all(start[b, t] <= p <= offset + t and p < num_keys for p in keys)
            assert marked == (not sees_all), (row, t, block)
            counts[marked] += 1
    assert min(counts) > 50


_GPU_CASES = {
    "long": dict(num_heads=16, num_kv=1, h_dim=128, v_dim=128),
    "ragged": dict(num_heads=32, num_kv=2, h_dim=128, v_dim=64, length=1001, num_keys=1990, offset=989, packed=True),
    "eight_heads": dict(batch=2, num_heads=16, num_kv=2, h_dim=64, v_dim=128, packed=True),
    "all_heads_one_group": dict(num_heads=64, num_kv=1, h_dim=64, v_dim=64, length=700, num_keys=700),
    "prod": dict(batch=2, num_heads=12, num_kv=2, h_dim=64, v_dim=64, packed=True),
    "paper": dict(num_heads=16, num_kv=1, h_dim=192, v_dim=128, length=1500, num_keys=1500),
    "one_head_per_group": dict(num_heads=2, num_kv=2, h_dim=64, v_dim=32, packed=True),
    "sixty_four": dict(num_heads=64, num_kv=1, h_dim=32, v_dim=16, length=512),
    "float32": dict(num_heads=8, num_kv=1, h_dim=192, v_dim=128, dtype=jnp.float32, length=1024, offset=1024),
    "wide_block": dict(num_heads=8, num_kv=2, h_dim=128, v_dim=64, select_block=128, slots=4),
    "one_wide_head_per_group": dict(num_heads=2, num_kv=2, h_dim=64, v_dim=64, packed=True),
    "five_heads": dict(num_heads=5, num_kv=1, h_dim=128, v_dim=64),
    "four_heads": dict(num_heads=8, num_kv=2, h_dim=128, v_dim=128, packed=True),
    "seven_heads": dict(num_heads=7, num_kv=1, h_dim=64, v_dim=128, length=1001, num_keys=1990, offset=989),
}


@pytest.mark.gpu
@pytest.mark.parametrize("path", ["lists", "masked", "hopper_shares"])
@pytest.mark.parametrize("name", _GPU_CASES)
def test_gradients_on_a_gpu_are_close_and_bit_equal_between_runs(name, path, monkeypatch):
    case = dict(
        batch=1, length=2048, num_keys=2048, slots=16, select_block=64, dtype=jnp.bfloat16, packed=False, offset=0
    ) | _GPU_CASES[name]  # fmt: skip
    query, key, value, indices, d_out, start = _inputs(3, **case)
    select_block, offset = case["select_block"], case["offset"]
    monkeypatch.setattr(selected_tiles, "MASKED_BLOCKS_PER_SLOT", 2 if path == "masked" else 0)
    shape, sizes = plan.Shape.of(query, key, value), dict(select_block=select_block, num_selected=indices.shape[-1])
    if path == "masked" and not plan.reads_whole_rows(shape, current_target(), *sizes.values()):
        pytest.skip("not served under a mask")
    if path == "hopper_shares":
        made = plan.plan_selected_backward(shape, current_target(), **sizes)
        if made.by_block.kernel != "selected.grad_partials_sm90":
            pytest.skip("not served by Hopper's kernel for shares of dq")
    out, lse, want = _reference(query, key, value, indices, d_out, start, select_block, offset)

    # A function of its own: jit must not reuse what it traced for the other path.
    backward = functools.partial(_planned_backward, select_block=select_block, query_offset=jnp.int32(offset))
    run = functools.partial(
        jax.jit(lambda *args: backward(*args, segment_start=start)),
        *(query, key, value, indices, row_delta(out, d_out), lse, d_out),
    )
    got = run()
    tolerance = 1e-2 if case["dtype"] == jnp.bfloat16 else 1e-3
    assert max(_errors(got, want)) < tolerance, _errors(got, want)
    chex.assert_trees_all_equal(got, run())


def test_as_many_rows_are_sorted_as_one_as_fit_16_bits():
    for rows, bound in ((3, 1000), (3, 2**16 // 3), (3, 2**15), (3, 2**16), (3, 2**16 + 1), (9, 2**16)):
        entries = np.random.default_rng(0).integers(bound - 20, bound, (rows, 50), dtype=np.int32)
        ordered, places = readers.sort_entries(jnp.asarray(entries), bound)
        np.testing.assert_array_equal(ordered, np.sort(entries, axis=1))
        np.testing.assert_array_equal(places, np.argsort(entries, axis=1, kind="stable"))
