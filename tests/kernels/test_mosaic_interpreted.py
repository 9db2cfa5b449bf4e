"""Values of the Hopper kernels without a GPU: each runs in JAX's Mosaic GPU interpreter against the float32 reference.

The interpreter also looks for data races between warpgroups and TMA and for barriers out of step: either fails a test.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nsa_jax.config import NSAConfig
from nsa_jax.ops import blocks, plan, reference, selected_tiles
from nsa_jax.ops import tiles as tuning
from nsa_jax.ops.kernels.range_attention import attention as range_attention
from nsa_jax.ops.kernels.range_attention.tiles import GatedSum
from nsa_jax.ops.kernels.selected import attention as selected
from nsa_jax.ops.kernels.selected import whole_row_sm90
from nsa_jax.ops.kernels.softmax import LOG2E
from nsa_jax.ops.kernels.triton import row_delta
from nsa_jax.ops.target import current_target
from tests.kernels import mosaic_interpreter, test_ranged
from tests.kernels import test_selected_backward as selected_cases

mosaic_interpreter.skip_where_missing()

# A kernel that waits for a barrier for ever blocks outside Python, where only the thread method gets through.
pytestmark = pytest.mark.timeout(580, method="thread")


@pytest.fixture
def called(monkeypatch):
    """Interprets Hopper's kernels during a test; the names of those that were called."""
    with mosaic_interpreter.interpret(monkeypatch) as names:
        yield names


REST = ["by_block_sm90", "sum_partials_sm90"]
FORWARD_AND_BACKWARD = ["sm90_forward", "sm90_grad_query", "sm90_grad_key_value"]

COMPRESSED = NSAConfig(compress_block=8, compress_stride=4, select_block=16, num_selected=4)
NARROW = dataclasses.replace(COMPRESSED, window=40)
WIDE = dataclasses.replace(COMPRESSED, window=1100)

# name: branch, config, query tiles per program of the forward, programs per key block of the dk, dv kernel, shape
RANGED_CASES = {
    "compressed_offset_two_key_blocks": (
        "compressed", COMPRESSED, 2, 3, dict(length=33, offset=621, group=16, h_dim=128, v_dim=128),
    ),
    "compressed_group_1_three_part_keys": (
        "compressed", COMPRESSED, 1, 1, dict(length=150, num_kv=2, group=1, h_dim=192, v_dim=128),
    ),
    # Rows fill tiles of 64, but not those of all warpgroups: what lies behind them is the next batch entry.
    "compressed_group_4_even": (
        "compressed", COMPRESSED, 2, 2, dict(batch=2, length=48, offset=70, num_kv=2, group=4, h_dim=128, v_dim=64),
    ),
    "narrow_window_group_1_even": (
        "window", NARROW, 1, 1, dict(batch=2, length=64, num_kv=2, group=1, h_dim=128, v_dim=128),
    ),
    "narrow_window_group_2_even": (
        "window", NARROW, 2, 1, dict(batch=2, length=64, num_kv=2, group=2, h_dim=64, v_dim=64),
    ),
    "narrow_window_group_4": (
        "window", NARROW, 2, 1, dict(batch=2, length=45, num_kv=2, group=4, h_dim=64, v_dim=128),
    ),
    "narrow_window_group_8": ("window", NARROW, 3, 1, dict(length=45, offset=30, group=8, h_dim=64, v_dim=128)),
    "narrow_window_group_6": ("window", NARROW, 2, 1, dict(length=45, group=6, h_dim=64, v_dim=64)),
    "narrow_window_group_6_two_heads": (
        "window", NARROW, 2, 1, dict(batch=2, length=45, num_kv=2, group=6, h_dim=64, v_dim=64),
    ),
    # 192 rows fill the tiles of three warpgroups, and the last tile of four has none for two of them.
    "compressed_group_3_two_heads_even": (
        "compressed", COMPRESSED, 1, 2, dict(batch=2, length=64, offset=70, num_kv=2, group=3, h_dim=64, v_dim=64),
    ),
    "wide_window_group_12_two_heads": (
        "window", WIDE, 2, 2, dict(batch=2, length=45, offset=100, num_kv=2, group=12, h_dim=64, v_dim=64),
    ),
    "wide_window_group_6": ("window", WIDE, 2, 2, dict(batch=2, length=45, offset=100, group=6, h_dim=64, v_dim=64)),
}  # fmt: skip


def divide_work(monkeypatch, tiles: int, splits: int):
    """Sets the query tiles per program of the forward and the programs per key block of the dk, dv kernel."""
    monkeypatch.setattr(tuning, "ranged_hopper_tiles_per_program", lambda *_: tiles)
    monkeypatch.setattr(tuning, "ranged_splits", lambda *_: splits)


@pytest.mark.parametrize("name", RANGED_CASES)
def test_compressed_and_window_attention_match_the_reference(name, called, monkeypatch):
    """Rows are packed and end with two queries that see nothing."""
    branch, config, tiles, splits, shape = RANGED_CASES[name]
    divide_work(monkeypatch, tiles, splits)
    if name == "compressed_offset_two_key_blocks":
        wide_blocks = tuning.ranged_hopper_config(64, 64, None, 4096)
        assert wide_blocks.keys == 128
        monkeypatch.setattr(tuning, "ranged_hopper_config", lambda *_: wide_blocks)
        wide_blocks_backward = tuning.RangedHopperQueryConfig(128, 2)
        monkeypatch.setattr(tuning, "ranged_hopper_dq_config", lambda *_: wide_blocks_backward)
    inputs = test_ranged.make_inputs(branch, packed=True, dtype=jnp.bfloat16, config=config, **shape)
    test_ranged.check_against_reference(branch, *inputs, config, forward=4e-3, gradient=1e-2)
    assert called == FORWARD_AND_BACKWARD


def test_maxima_that_rise_late_scale_what_was_summed(called):
    """Keys grow with their position, so that maxima rise by more and by less than what leaves the sum as it is."""
    from nsa_jax.ops.kernels import sm90

    shape = dict(batch=2, length=45, offset=100, group=6, h_dim=64, v_dim=64)
    (query, key, *others), keywords = test_ranged.make_inputs("window", dtype=jnp.bfloat16, config=WIDE, **shape)
    key *= jnp.linspace(0.1, 8, key.shape[1], dtype=key.dtype)[:, None, None]
    scores = jnp.einsum("btnh,bskh->btns", query, key, preferred_element_type=jnp.float32) / 8 * LOG2E
    rises = jnp.diff(scores.reshape(*scores.shape[:3], -1)[..., :128].reshape(*scores.shape[:3], 2, 64).max(-1))
    assert rises.min() < sm90._MOST_ABOVE < rises.max()
    arrays = query, key, *others
    test_ranged.check_against_reference("window", arrays, keywords, WIDE, forward=4e-3, gradient=1e-2)
    assert called == FORWARD_AND_BACKWARD


@pytest.mark.parametrize(("num_keys", "warpgroups"), [(301, 2), (401, 3)])
def test_arbitrary_ranges_match_dense_attention(num_keys, warpgroups, called, monkeypatch):
    """Ranges that do not grow with the query, a fifth of them empty; key blocks that some queries see whole.

    Warpgroups of the dk, dv kernel have 64 keys each; the last one of the last program has none.
    """
    assert tuning.ranged_hopper_dkv_config(64, 64, None, num_keys).warpgroups == warpgroups
    divide_work(monkeypatch, 2, 2)
    rng = np.random.default_rng(0)
    length = 65
    low, high = (jnp.asarray(x) for x in test_ranged.random_ranges(rng, 1, length, num_keys))
    shapes = (length, 4), (num_keys, 1), (num_keys, 1), (length, 4)
    *inputs, cotangent = (jnp.asarray(rng.normal(size=(1, *shape, 64)), jnp.bfloat16) for shape in shapes)
    position = jnp.arange(num_keys)
    mask = ((position >= low[..., None]) & (position < high[..., None]))[:, :, None, :]

    def gradients(attend, inputs, cotangent):
        out, vjp = jax.vjp(lambda *x: attend(*x)[0], *inputs)
        return out, *vjp(cotangent)

    attend = lambda *x: test_ranged.ranged_attention(*x, low, high)  # noqa: E731
    got = jax.jit(lambda *a: gradients(attend, *a))(inputs, cotangent)
    exact = [x.astype(jnp.float32) for x in inputs], cotangent.astype(jnp.float32)
    want = gradients(lambda *x: reference._attend(*x, mask), *exact)
    check_errors(got, want)
    assert called == FORWARD_AND_BACKWARD


def check_errors(got, want):
    """Output, then gradients, within the bounds that bfloat16 has in this project; NaN is within none."""
    errors = [test_ranged.relative_error(g, w) for g, w in zip(got, want, strict=True)]
    assert errors[0] <= 4e-3 and all(error <= 1e-2 for error in errors[1:]), errors


def check_forward_and_backward(attend, differentiate, arrays, block_indices, start, offset):
    """`attend()` -> (out, lse) and `differentiate(delta, lse)` of selected attention against the reference."""
    query, key, value, d_out = arrays
    want, want_lse, want_grads = selected_cases._reference(query, key, value, block_indices, d_out, start, 64, offset)
    out, lse = attend() if attend else (want.astype(query.dtype), want_lse)
    grads = differentiate(row_delta(out, d_out), lse)
    check_errors((out, *grads), (want, *want_grads))
    unseen = check_unseen(out, lse, want_lse)
    assert not np.asarray(grads[0])[unseen].any()


def check_unseen(out, lse, want_lse) -> np.ndarray:
    """Which rows see nothing: some do, and they get 0 and -inf; the others get the reference's lse."""
    unseen = np.isneginf(want_lse)
    assert unseen.any() and not np.asarray(out)[unseen].any()
    np.testing.assert_array_equal(np.isneginf(lse), unseen)
    np.testing.assert_allclose(np.where(unseen, 0, lse), np.where(unseen, 0, want_lse), atol=1e-4)
    return unseen


SELECTED = dict(batch=1, num_kv=1, h_dim=64, v_dim=64, slots=3, select_block=64, packed=False, offset=0)

# The first two numbers are `divide_work`'s.
MASKED_CASES = {
    "group_6": (3, 2, dict(length=151, num_keys=151, num_heads=12, num_kv=2)),
    "group_2_packed": (
        2,
        1,
        dict(batch=2, length=96, num_keys=96, num_heads=4, num_kv=2, h_dim=128, v_dim=128, packed=True),
    ),
    "group_4": (1, 2, dict(length=75, num_keys=75, num_heads=8, num_kv=2)),
    "group_16_packed": (2, 1, dict(length=71, num_keys=71, num_heads=16, h_dim=128, v_dim=128, packed=True)),
    # 35 blocks: two words of 32 bits. Of three warpgroups one has block 32, the first of the second word.
    "group_4_many_blocks": (1, 1, dict(length=15, num_keys=2201, num_heads=4, v_dim=128, slots=20, offset=2186)),
    "group_6_many_blocks": (1, 1, dict(length=15, num_keys=2201, num_heads=6, slots=20, offset=2186)),
}


@pytest.mark.parametrize("name", MASKED_CASES)
def test_selected_attention_under_a_mask_matches_the_reference(name, called, monkeypatch):
    """Lists have random lengths and name blocks of the future; one is empty."""
    tiles, splits, shape = MASKED_CASES[name]
    divide_work(monkeypatch, tiles, splits)
    case = SELECTED | shape
    *inputs, block_indices, d_out, start = selected_cases._inputs(0, dtype=jnp.bfloat16, **case)
    block_indices = block_indices.at[:, 7].set(blocks.num_selection_blocks(case["num_keys"], 64))
    offset = case["offset"]

    shape, target = plan.Shape.of(*inputs), current_target()
    assert plan.reads_whole_rows(shape, target, 64, block_indices.shape[-1])
    made = plan.plan_selected(shape, target, select_block=64, num_selected=block_indices.shape[-1])

    def differentiate(delta, lse):
        backward = functools.partial(whole_row_sm90.backward, plan=made.backward)
        return jax.jit(backward)(*inputs, block_indices, delta, lse, d_out, start, offset)

    forward = functools.partial(whole_row_sm90.forward, config=made.forward.rest.tiles)
    check_forward_and_backward(
        lambda: jax.jit(forward)(*inputs, block_indices, start, offset),
        differentiate, (*inputs, d_out), block_indices, start, offset,
    )  # fmt: skip
    assert called == FORWARD_AND_BACKWARD


@pytest.mark.parametrize("window", [None, 40], ids=["compressed", "window"])
def test_known_ranges_change_no_bit_of_attention(window, called, monkeypatch):
    """What tiles visit as a constant of the program, and as the program computes it; last tiles are partial."""
    divide_work(monkeypatch, 2, 2)
    length, offset = 150, 30
    num_keys = length + offset if window else blocks.num_compressed(length + offset, COMPRESSED)
    rng = np.random.default_rng(0)
    shapes = (length, 6), (num_keys, 1), (num_keys, 1), (length, 6)
    query, key, value, grad_out = (jnp.asarray(rng.normal(size=(2, *s, 64)), jnp.bfloat16) for s in shapes)
    if window:
        known = range_attention.known_window_ranges(length, offset, num_keys, window)
        low, high = range_attention.window_ranges(query, None, offset, window)
    else:
        known = range_attention.known_compressed_ranges(length, offset, num_keys, COMPRESSED)
        low, high = range_attention.compressed_ranges(query, None, offset, COMPRESSED)
    ranges = range_attention.clip_ranges(low, high, num_keys)
    made = plan.plan_range(plan.Shape.of(query, key, value), current_target())

    def run(known):
        out, lse = range_attention.forward(query, key, value, *ranges, made, None, known)
        delta = row_delta(out, grad_out)
        return out, lse, *range_attention.backward(query, key, value, *ranges, delta, lse, grad_out, made, known)

    assert known is not None
    jax.tree.map(np.testing.assert_array_equal, jax.jit(lambda: run(known))(), jax.jit(lambda: run(None))())
    assert called == FORWARD_AND_BACKWARD * 2


@pytest.mark.parametrize(
    ("group", "kv_heads", "in_kernel"), [(16, 2, True), (4, 2, True), (6, 2, True), (7, 2, False), (6, 1, True)]
)
def test_a_gradient_of_the_query_is_added_onto_another(group, kv_heads, in_kernel, called, monkeypatch):
    """Summed before rounding where the kernel adds: onto its negation remains what rounding cut off."""
    divide_work(monkeypatch, 2, 2)
    length = 70
    rng = np.random.default_rng(0)
    heads = kv_heads * group
    shapes = (length, heads), (length, kv_heads), (length, kv_heads), (length, heads)
    query, key, value, grad_out = (jnp.asarray(rng.normal(size=(2, *s, 64)), jnp.bfloat16) for s in shapes)
    known = range_attention.known_window_ranges(length, 0, length, 40)
    ranges = range_attention.clip_ranges(*range_attention.window_ranges(query, None, 0, 40), length)
    made = plan.plan_range(plan.Shape.of(query, key, value), current_target())
    other = jnp.asarray(rng.normal(size=query.shape), jnp.bfloat16)

    @jax.jit
    def run():
        out, lse = range_attention.forward(query, key, value, *ranges, made, None, known)
        args = query, key, value, *ranges, row_delta(out, grad_out), lse, grad_out, made, known
        alone, *rest = range_attention.backward(*args)
        sums = [range_attention.backward(*args, onto)[0] for onto in (-alone, other)]
        return alone, sums, rest

    alone, (difference, total), _ = run()
    want = np.asarray(alone, np.float32) + np.asarray(other, np.float32)
    np.testing.assert_allclose(np.asarray(total, np.float32), want, rtol=2**-7, atol=2**-7 * np.abs(want).max())
    rounding = np.abs(np.asarray(difference, np.float32))
    assert (rounding <= 2**-8 * np.abs(np.asarray(alone, np.float32)) + 1e-6).all()
    assert (np.count_nonzero(rounding) > rounding.size // 2) == in_kernel
    assert called == FORWARD_AND_BACKWARD + FORWARD_AND_BACKWARD[1:] * 2


@pytest.mark.parametrize(
    ("group", "kv_heads", "moved", "dtype"),
    [(16, 2, 1, "bfloat16"), (4, 2, 1, "float32"), (6, 2, 1, "bfloat16"), (6, 1, 2, "float32")],
)
def test_the_last_branch_adds_up_all_of_them(group, kv_heads, moved, dtype, called, monkeypatch):
    """Odd lengths: what lies behind a row's last tile belongs to the next batch entry, whose sum nobody may touch."""
    divide_work(monkeypatch, 2, 2)
    (length, v_dim), batch = (25, 128) if group == 16 else (70, 64), 2 * moved
    rng = np.random.default_rng(0)
    heads = kv_heads * group
    shapes = (length, heads, 64), (length, kv_heads, 64), (length, kv_heads, v_dim)
    tensors = [jnp.asarray(rng.normal(size=(batch, *s)), jnp.bfloat16) for s in shapes]
    others = tuple(jnp.asarray(rng.normal(size=(batch, length, heads, v_dim)), jnp.bfloat16) for _ in range(2))
    gates = jnp.asarray(rng.uniform(size=(batch, length, heads, 3)), dtype)
    ranges = range_attention.clip_ranges(*range_attention.window_ranges(tensors[0], None, 0, 40), length)
    made = plan.plan_range(plan.Shape.of(*tensors), current_target())

    def run(gated):
        return range_attention.forward(*tensors, *ranges, made, None, None, gated)

    pair = jax.jit(lambda: run(None))()
    (total,) = jax.jit(lambda: run(GatedSum(gates, others, moved, keep=False)))()
    kept, total_beside = jax.jit(lambda: run(GatedSum(gates, others, moved, keep=True)))()
    jax.tree.map(np.testing.assert_array_equal, (pair, total), (kept, total_beside))
    out, _ = pair
    want = sum(gates[..., i, None].astype(jnp.float32) * x for i, x in enumerate((*others, out)))
    want = want.reshape(-1, moved, length, heads, v_dim).swapaxes(1, 2).reshape(total.shape)
    np.testing.assert_allclose(total.astype(jnp.float32), want, rtol=2**-8, atol=1e-6)
    assert called == ["sm90_forward"] * 3


def test_known_ranges_change_no_bit_of_selected_attention(called, monkeypatch):
    """The same of rows that are read whole under a mask of blocks."""
    divide_work(monkeypatch, 2, 2)
    case = SELECTED | dict(length=151, num_keys=151, num_heads=6)
    *inputs, lists, d_out, start = selected_cases._inputs(0, dtype=jnp.bfloat16, **case)
    made = plan.plan_selected(plan.Shape.of(*inputs), current_target(), select_block=64, num_selected=lists.shape[-1])

    def run(packed):
        out, lse = whole_row_sm90.forward(*inputs, lists, start, 0, made.forward.rest.tiles, packed)
        delta = row_delta(out, d_out)
        return out, lse, *whole_row_sm90.backward(*inputs, lists, delta, lse, d_out, start, 0, made.backward, packed)

    jax.tree.map(np.testing.assert_array_equal, jax.jit(lambda: run(False))(), jax.jit(lambda: run(True))())
    assert called == FORWARD_AND_BACKWARD * 2


# `divide_work`'s numbers, the window, and the shape. Whole key blocks lie in the longer windows of a tile's queries.
JOINT_CASES = {
    "group_6": (2, 2, 250, dict(length=420, num_keys=420, num_heads=12, num_kv=2)),
    "group_6_short_window_packed": (3, 1, 40, dict(length=151, num_keys=151, num_heads=6, packed=True)),
    "group_16_offset": (2, 2, 150, dict(length=71, num_keys=371, num_heads=16, h_dim=128, v_dim=128, offset=300)),
    # Scores of keys of the first block are up to 2,000: log-sum-exps lie further apart than float32 has exponents.
    "group_6_far_apart": (2, 2, 70, dict(length=200, num_keys=200, num_heads=6, spread=400.0)),
    "group_4_packed_in_batch": (1, 3, 130, dict(batch=2, length=230, num_keys=230, num_heads=8, num_kv=2, packed=True)),
}


@pytest.mark.parametrize("name", JOINT_CASES)
def test_selected_and_window_attention_in_one_pass(name, called, monkeypatch):
    """Both outputs and the sum of the gradients of both, from one pass over the keys that they share."""
    tiles, splits, window, shape = JOINT_CASES[name]
    divide_work(monkeypatch, tiles, splits)
    case = SELECTED | dict(slots=6) | shape
    spread = case.pop("spread", 1.0)
    *inputs, lists, d_out, start = selected_cases._inputs(0, dtype=jnp.bfloat16, **case)
    inputs[1] = inputs[1].at[:, :64].multiply(spread)
    offset, packed, num_keys = case["offset"], case["packed"], case["num_keys"]
    made = plan.plan_selected(plan.Shape.of(*inputs), current_target(), select_block=64, num_selected=lists.shape[-1])
    made = made.with_window(plan.Shape.of(*inputs))
    assert made.backward.lists is None

    rng = np.random.default_rng(1)
    first = jnp.asarray(rng.normal(size=d_out.shape), jnp.bfloat16)
    gates = jnp.asarray(rng.uniform(size=(*d_out.shape[:3], 3)), jnp.float32)

    t = jnp.arange(case["length"])[:, None] + offset
    key = jnp.arange(num_keys)
    near = (key <= t) & (key > t - window) & (key >= start[..., None])  # [B, T, S]
    listed = (lists[..., None] == key // 64).any(-2)  # [B, T, K, S]
    seen = listed & ((key <= t) & (key >= start[..., None]))[:, :, None]

    @jax.jit
    def exact(query, key, value, mask):
        (out, lse), pullback = jax.vjp(lambda *x: reference._attend(*x, mask), query, key, value)
        return out, lse, pullback((d_out.astype(jnp.float32), jnp.zeros_like(lse)))

    want = [exact(*(x.astype(jnp.float32) for x in inputs), mask) for mask in (seen, near[:, :, None])]

    @functools.partial(jax.jit, static_argnums=0)
    def together(packed):
        arrays = *inputs, lists, start, offset, made.forward.rest.tiles, packed
        pairs = whole_row_sm90.forward(*arrays, window)
        (delta, lse), (window_delta, window_lse) = [(row_delta(out, d_out), lse) for out, lse in pairs]
        arrays = *inputs, lists, delta, lse, d_out, start, offset, made.backward, packed
        return *pairs, whole_row_sm90.backward(*arrays, window=(window_delta, window_lse, window))

    got = together(packed)
    *pairs, grads = got
    arrays = *inputs, lists, start, offset, made.forward.rest.tiles, packed
    gated = GatedSum(gates, (first,), 1, keep=False)
    (total,) = jax.jit(lambda: whole_row_sm90.forward(*arrays, window, gated))()
    want_sum = sum(gates[..., i, None] * x.astype(jnp.float32) for i, x in enumerate((first, *(x for x, _ in pairs))))
    np.testing.assert_allclose(total.astype(jnp.float32), want_sum, rtol=2**-8, atol=1e-6)
    for (out, lse), (want_out, want_lse, _) in zip(pairs, want, strict=True):
        assert test_ranged.relative_error(out, want_out) <= 4e-3
        np.testing.assert_array_equal(np.isneginf(lse), np.isneginf(want_lse))
        # Far apart, they are so large that float32 has steps of 1.2e-4: two of them, and what small ones may differ by.
        lses = (np.where(np.isneginf(x), 0, x) for x in (lse, want_lse))
        np.testing.assert_allclose(*lses, rtol=2**-22, atol=1e-4)
    wanted = jax.tree.map(jnp.add, *(x for *_, x in want))
    errors = [test_ranged.relative_error(g, w) for g, w in zip(grads, wanted, strict=True)]
    # Delta has the rounding of the output, which keys of such a size multiply.
    assert all(error <= (1e-2 if spread == 1 else 0.1) for error in errors), errors
    assert called == [*FORWARD_AND_BACKWARD, "sm90_forward"]
    if not packed:  # ranges that tracing knows change no bit
        jax.tree.map(np.testing.assert_array_equal, got, together(True))


# The kernel, its query tiles per program or, of neighbours_sm90, its programs. Lists have 5 blocks, of which as
# many tokens as the next number share 3.
TILE_CASES = {
    "group_16": (
        "sm90_forward", 3, 12,
        dict(length=43, num_keys=700, num_heads=32, num_kv=2, h_dim=128, v_dim=128, offset=657),
    ),
    "group_64_packed": ("sm90_forward", 1, 3, dict(length=7, num_keys=690, num_heads=64, offset=680, packed=True)),
    # No token lists what another does but by chance: warps serve most blocks, and some tiles share none.
    "group_16_few_shared": (
        "sm90_forward", 2, 1, dict(length=27, num_keys=1400, num_heads=16, offset=1360, packed=True),
    ),
    "group_32": (
        "sm90_forward", 2, 2,
        dict(batch=2, length=14, num_keys=690, num_heads=64, num_kv=2, h_dim=128, v_dim=64, offset=680),
    ),
    "group_4_range_kernel": (
        "sm90_forward", 2, 32, dict(length=45, num_keys=710, num_heads=8, num_kv=2, h_dim=128, v_dim=128, offset=660),
    ),
    # One program: its first warpgroup has two tiles, the second of them with 5 tokens. The last queries lie behind the
    # last key, which does not end its block.
    "group_6": ("neighbours_sm90", 1, 30, dict(length=35, num_keys=715, num_heads=6, offset=688)),
    "group_6_two_heads_packed": (
        "neighbours_sm90", 2, 20,
        dict(batch=2, length=44, num_keys=700, num_heads=12, num_kv=2, offset=656, packed=True),
    ),
    "group_4": ("neighbours_sm90", 2, 24, dict(length=45, num_keys=710, num_heads=8, num_kv=2, offset=660)),
    "group_5": ("neighbours_sm90", 3, 24, dict(length=29, num_keys=644, num_heads=5, offset=615)),
    "group_7_wide_packed": (
        "neighbours_sm90", 2, 24,
        dict(batch=2, length=43, num_keys=710, num_heads=7, h_dim=128, v_dim=128, offset=660, packed=True),
    ),
    "group_5_wide": (
        "neighbours_sm90", 1, 24, dict(length=29, num_keys=644, num_heads=5, h_dim=128, v_dim=128, offset=615),
    ),
    "group_6_wide": (
        "neighbours_sm90", 1, 24, dict(length=25, num_keys=644, num_heads=6, h_dim=128, v_dim=128, offset=619),
    ),
    "group_2_wide": (
        "neighbours_sm90", 1, 45,
        dict(length=75, num_keys=730, num_heads=4, num_kv=2, h_dim=128, v_dim=128, offset=650),
    ),
    # Nearly nothing is shared: some tiles have no blocks.
    "group_7_few_shared": ("neighbours_sm90", 1, 1, dict(length=20, num_keys=2040, num_heads=7, offset=2020)),
}  # fmt: skip


@pytest.mark.parametrize("name", TILE_CASES)
def test_blocks_that_a_tile_shares_match_the_reference(name, called, monkeypatch):
    """Blocks that all queries of a tile see whole, that some do, and that lie in their future; one list is empty."""
    kernel, division, shared_by, shape = TILE_CASES[name]
    divide_work(monkeypatch, division, 1)
    buffers = 1 if shape.get("h_dim") == 128 else 2
    config = selected_tiles.SelectedHopperTilesConfig(buffers, division, buffers)
    monkeypatch.setattr(selected_tiles, "selected_hopper_tiles_config", lambda *_: config)
    case = SELECTED | dict(dtype=jnp.bfloat16) | shape
    query, key, value, _, d_out, start = selected_cases._inputs(0, **case)
    num_blocks = blocks.num_selection_blocks(case["num_keys"], 64)
    rng = np.random.default_rng(2)
    lists = selected_cases._shared_lists(
        rng, case["batch"], case["length"], case["num_kv"], num_blocks, shared_by, 3, 2
    )
    lists[:, 5] = num_blocks
    lists, offset = jnp.asarray(lists), case["offset"]
    want, want_lse, _ = selected_cases._reference(query, key, value, lists, d_out, start, 64, offset)
    made = plan.plan_selected_forward(
        plan.Shape.of(query, key, value), current_target(), select_block=64, num_selected=lists.shape[-1]
    )
    got, lse = jax.jit(selected.selected_forward, static_argnums=(6, 7, 8))(
        query, key, value, lists, start, jnp.int32(offset), 64, case["packed"], made
    )
    rest = REST * (case["num_heads"] // case["num_kv"] <= 8)
    assert called == [kernel, *rest]
    assert test_ranged.relative_error(got, want) <= 4e-3
    check_unseen(got, lse, want_lse)


def test_a_missing_fence_is_a_race(called, monkeypatch):
    """TMA must not store what a warpgroup wrote before a fence has made that visible to it."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    monkeypatch.setattr(plgpu, "commit_smem", lambda: None)
    (*inputs, _), _ = test_ranged.make_inputs("window", length=2, group=1, h_dim=64, v_dim=64, dtype=jnp.bfloat16)
    low, high = jnp.zeros((1, 2), jnp.int32), jnp.ones((1, 2), jnp.int32)
    with pytest.raises(Exception, match="RACE DETECTED"):
        jax.block_until_ready(test_ranged.ranged_attention(*inputs, low, high))
    assert called == ["sm90_forward"]
