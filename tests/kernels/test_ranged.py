"""Compressed and window attention's kernels against the reference, interpreted and, where there is a GPU, on it."""

from __future__ import annotations

import contextlib
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nsa_jax
from nsa_jax.config import NSAConfig
from nsa_jax.ops import blocks, pallas, plan, reference
from nsa_jax.ops import tiles as tuning
from nsa_jax.ops.choices import Shape
from nsa_jax.ops.kernels.range_attention import attention as range_attention
from nsa_jax.ops.kernels.range_attention import (
    sm90_forward,
    sm90_grad_key_value,
    sm90_grad_query,
    triton_backward,
    triton_forward,
)
from nsa_jax.ops.kernels.range_attention import tiles as range_tiles
from nsa_jax.ops.kernels.softmax import NO_WEIGHT
from nsa_jax.ops.target import Target, compile_for, current_target

pytestmark = pytest.mark.usefixtures("quick_compilation")

CONFIG = NSAConfig(compress_block=8, compress_stride=4, select_block=16, num_selected=4, window=40)


def make_inputs(
    branch,
    *,
    length,
    group,
    num_kv=1,
    h_dim=16,
    v_dim=16,
    batch=1,
    dtype=jnp.float32,
    packed=False,
    offset=0,
    config=CONFIG,
):
    """(query, key, value, cotangent) and a branch's keywords; packed rows end with two queries that see nothing."""
    rng = np.random.default_rng(length + group)
    num_keys = length + offset
    if branch == "compressed":
        num_keys = blocks.num_compressed(num_keys, config)
    heads = num_kv * group
    shapes = [(length, heads, h_dim), (num_keys, num_kv, h_dim), (num_keys, num_kv, v_dim), (length, heads, v_dim)]
    arrays = [jnp.asarray(rng.normal(size=(batch, *shape)), dtype) for shape in shapes]
    start = None
    if packed:
        cuts = np.sort(rng.integers(0, length + offset, (batch, 1, 3)), axis=-1)
        t = np.arange(length)[None, :, None] + offset
        start = np.where(cuts <= t, cuts, 0).max(-1)
        start[:, -2:] = 10**6
        start = jnp.asarray(start, jnp.int32)
    return arrays, dict(segment_start=start, query_offset=offset)


def run(module, branch, arrays, keywords, config=CONFIG):
    """The branch's output, log-sum-exp (compressed only) and gradients for query, key and value."""
    *inputs, cotangent = arrays

    @jax.jit
    def forward_and_backward(inputs, cotangent):
        def attend(query, key, value):
            if branch == "compressed":
                return module.compressed_attention(query, key, value, config=config, **keywords)
            return module.window_attention(query, key, value, window=config.window, **keywords), jnp.zeros(())

        (out, lse), vjp = jax.vjp(attend, *inputs)
        return out, lse, vjp((cotangent, jnp.zeros_like(lse)))

    return forward_and_backward(tuple(inputs), cotangent)


def relative_error(got, want) -> float:
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return float(np.linalg.norm(got - want) / max(np.linalg.norm(want), 1e-30))


def check_against_reference(
    branch, arrays, keywords, config=CONFIG, *, forward, gradient, serving=contextlib.nullcontext
):  # fmt: skip
    with serving():
        out, lse, grads = run(pallas, branch, arrays, keywords, config)
    assert out.dtype == arrays[0].dtype
    cpu = jax.devices("cpu")[0]  # on a GPU the reference's dense products take much longer to compile than to run
    with jax.default_device(cpu):
        arrays, keywords = jax.device_put(([x.astype(jnp.float32) for x in arrays], keywords), cpu)
        want_out, want_lse, want_grads = run(reference, branch, arrays, keywords, config)
    assert relative_error(out, want_out) <= forward
    np.testing.assert_array_equal(np.isneginf(lse), np.isneginf(want_lse))
    np.testing.assert_allclose(
        jnp.where(jnp.isneginf(lse), 0, lse), jnp.where(jnp.isneginf(lse), 0, want_lse), atol=1e-4
    )
    for name, got, want in zip(("query", "key", "value"), grads, want_grads, strict=True):
        chex.assert_equal_shape([got, want])
        assert relative_error(got, want) <= gradient, name
    if keywords["segment_start"] is not None:  # the last two queries see nothing
        assert not np.asarray(out[:, -2:]).any() and not np.asarray(grads[0][:, -2:]).any()


CASES = {
    "compressed_odd_group_3": ("compressed", dict(length=37, group=3, num_kv=2, v_dim=32)),
    "compressed_packed_offset_group_16": ("compressed", dict(length=33, group=16, packed=True, offset=21)),
    "compressed_several_tiles": ("compressed", dict(length=400, group=1, packed=True)),
    "window_packed_group_6": ("window", dict(length=50, group=6, batch=2, packed=True, h_dim=32)),
    "window_several_tiles_offset": ("window", dict(length=150, group=2, offset=30)),
    "window_one_query": ("window", dict(length=1, group=2, offset=60)),
}


@pytest.mark.parametrize("name", CASES)
def test_matches_the_reference(name):
    branch, shape = CASES[name]
    check_against_reference(branch, *make_inputs(branch, **shape), forward=1e-5, gradient=1e-5)


@pytest.mark.parametrize("branch", ["compressed", "window"])
def test_matches_the_reference_in_bfloat16_at_head_dims_192_and_128(branch):
    inputs = make_inputs(branch, length=70, group=2, h_dim=192, v_dim=128, dtype=jnp.bfloat16, packed=True)
    check_against_reference(branch, *inputs, forward=4e-3, gradient=1e-2)


def test_no_compressed_block_gives_zeros():
    arrays, keywords = make_inputs("compressed", length=5, group=2)
    out, lse, grads = run(pallas, "compressed", arrays, keywords)
    assert arrays[1].shape[1] == 0
    assert not np.asarray(out).any() and np.isneginf(lse).all() and not np.asarray(grads[0]).any()


def random_ranges(rng, batch, length, num_keys):
    """Arbitrary ranges, not monotone, about a fifth of them empty (low = S, high = 0)."""
    low = rng.integers(0, num_keys, (batch, length))
    high = np.minimum(low + rng.integers(1, num_keys, (batch, length)), num_keys)
    empty = rng.random((batch, length)) < 0.2
    return np.where(empty, num_keys, low).astype(np.int32), np.where(empty, 0, high).astype(np.int32)


@pytest.mark.parametrize("group", [1, 6])
def test_key_blocks_visit_every_query_tile_that_sees_them(group):
    rng = np.random.default_rng(group)
    rows, keys, num_keys, length = 16, 8, 61, 45
    for narrow in (False, True):
        low, high = random_ranges(rng, 2, length, num_keys)
        if narrow:  # so that some tiles see a block whole and some not at all
            low, high = np.where(high > 0, 8 * (np.arange(length) // 16), num_keys).astype(np.int32), high
            high = np.where((high > 0) & (low < num_keys), low + 17, 0).astype(np.int32)
            low = np.where(high > 0, low, num_keys).astype(np.int32)
        ranges = np.asarray(
            range_tiles.query_tile_ranges(jnp.asarray(low), jnp.asarray(high), group, rows, keys, num_keys)
        )
        position = np.arange(num_keys)
        sees = (position >= low[..., None]) & (position < high[..., None])  # [B, T, S]
        sees = np.repeat(sees, group, axis=1)
        for b in range(2):
            for block in range(-(-num_keys // keys)):
                first, whole_begin, whole_end, last = ranges[b, :, block]
                assert 0 <= first <= whole_begin <= whole_end <= last
                for tile in range(-(-length * group // rows)):
                    part = sees[b, tile * rows : (tile + 1) * rows]
                    block_part = part[:, block * keys : (block + 1) * keys]
                    if block_part.any():
                        assert first <= tile < last
                    if whole_begin <= tile < whole_end:
                        assert block_part[part.any(-1)].all()
        if narrow:
            assert (ranges[:, 2] > ranges[:, 1]).any(), "no tile is free of masks"


def ranged_attention(query, key, value, low, high):
    """`range_attention.ranged_attention` with the plan for the current target."""
    made = plan.plan_range(plan.Shape.of(query, key, value), current_target())
    return range_attention.ranged_attention(query, key, value, low, high, made)


def test_arbitrary_ranges_match_dense_attention():
    """The key-major kernel must not assume that ranges grow with the query."""
    rng = np.random.default_rng(0)
    length, num_keys = 45, 61
    low, high = (jnp.asarray(x) for x in random_ranges(rng, 1, length, num_keys))
    query, key, value = (jnp.asarray(rng.normal(size=(1, n, 2, 16)), jnp.float32) for n in (length, num_keys, num_keys))
    cotangent = jnp.asarray(rng.normal(size=query.shape), jnp.float32)
    position = jnp.arange(num_keys)
    mask = ((position >= low[..., None]) & (position < high[..., None]))[:, :, None, :]

    def gradients(attend):
        out, vjp = jax.vjp(lambda *x: attend(*x)[0], query, key, value)
        return out, vjp(cotangent)

    got = jax.jit(lambda: gradients(lambda *x: ranged_attention(*x, low, high)))()
    want = gradients(functools.partial(reference._attend, mask=mask))
    chex.assert_trees_all_close(got, want, atol=2e-5)


def test_splitting_a_key_block_over_programs_changes_only_rounding():
    rng = np.random.default_rng(1)
    length, num_keys, heads, dim = 96, 40, 2, 16
    low = jnp.zeros((1, length), jnp.int32)
    high = jnp.minimum(jnp.arange(length, dtype=jnp.int32)[None] // 2 + 1, num_keys)
    rows = (1, length * heads)
    query, grad = (jnp.asarray(rng.normal(size=(*rows, dim)), jnp.float32) for _ in range(2))
    key, value = (jnp.asarray(rng.normal(size=(1, num_keys, 1, dim)), jnp.float32) for _ in range(2))
    lse, delta = jnp.full(rows, 3.0), jnp.asarray(rng.normal(size=rows), jnp.float32)

    def compute(splits):
        config = tuning.RangedConfig(rows=16, keys=16, num_warps=4, num_stages=1, splits=splits)
        return triton_backward.grad_key_value_kernel(query, key, value, grad, lse, delta, low, high, config)

    chex.assert_trees_all_close(compute(1), compute(5), rtol=1e-5, atol=1e-4)


def test_hopper_tiles_walk_exactly_the_blocks_they_see():
    rng = np.random.default_rng(2)
    rows, keys, num_keys = 8, 4, 37
    low, high = random_ranges(rng, 2, 64, num_keys)
    low[0, :8], high[0, :8] = 3, 30
    bounds = np.asarray(range_tiles.tile_bounds(jnp.asarray(low), jnp.asarray(high), rows, keys))
    position = np.arange(-(-num_keys // keys) * keys)
    sees = (position >= low[..., None]) & (position < high[..., None])
    for b in range(2):
        for tile in range(8):
            begin, exact_begin, exact_end, end = bounds[b, tile]
            seen = sees[b, tile * rows : (tile + 1) * rows].reshape(rows, -1, keys)
            block = np.arange(seen.shape[1])
            assert not seen[:, (block < begin) | (block >= end)].any()
            assert seen[:, (block >= exact_begin) & (block < exact_end)].all()
            assert begin <= exact_begin <= exact_end <= end
    assert bounds[0, 0].tolist() == [0, 1, 7, 8]


def test_shares_of_dk_and_dv_stay_within_their_bound():
    assert tuning.ranged_splits(128, 16384, 2**24) == 8
    assert tuning.ranged_splits(128, 16384, 2**27) == 2
    assert tuning.ranged_splits(4096, 16384, 2**20) == 1
    assert tuning.ranged_splits(4, 40, 2**10) == 2
    assert tuning.ranged_splits(64, 512, 2**20, seen=140) == 4  # a window of 512 at 2,048 tokens, groups of 16
    assert tuning.ranged_splits(512, 512, 2**20, seen=40) == 1  # groups of 4 at 8,192
    assert tuning.ranged_splits(4, 512, 2**20, seen=505) == 32  # few key blocks: the GPU is filled first


PAPER = NSAConfig()


def real_inputs(branch, length, num_kv=4, group=16, h_dim=128, v_dim=128, packed=False, dtype=jnp.bfloat16):
    arrays, keywords = make_inputs(
        branch,
        length=length,
        group=group,
        num_kv=num_kv,
        h_dim=h_dim,
        v_dim=v_dim,
        packed=packed,
        dtype=dtype,
        config=PAPER,
    )
    return jax.device_put(arrays), keywords


@pytest.mark.gpu
@pytest.mark.parametrize("branch", ["compressed", "window"])
@pytest.mark.parametrize(
    ("num_kv", "group", "h_dim", "v_dim", "packed"),
    [
        (2, 16, 128, 128, True),
        (2, 16, 128, 128, False),
        (2, 6, 64, 128, True),
        (1, 16, 192, 128, True),
        (2, 4, 32, 16, True),
        (1, 64, 64, 64, True),
    ],
)
def test_gpu_bfloat16_matches_the_reference(branch, packed, num_kv, group, h_dim, v_dim):
    inputs = real_inputs(branch, 1499, num_kv, group, h_dim, v_dim, packed)
    check_against_reference(branch, *inputs, PAPER, forward=4e-3, gradient=1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("branch", ["compressed", "window"])
@pytest.mark.parametrize(
    ("length", "group", "h_dim", "v_dim"),
    # The even lengths fill tiles of 64 rows. The last of 128 or 192 rows is not full, and the next batch entry follows.
    [
        (1504, 4, 64, 64), (1520, 4, 128, 128), (1499, 4, 128, 64), (1504, 2, 128, 128), (1499, 2, 64, 64),
        (1472, 1, 192, 128), (1499, 1, 128, 128),
        (1504, 6, 64, 64), (1499, 6, 64, 64), (1472, 3, 64, 64), (1499, 3, 64, 64), (1504, 12, 64, 64),
        (1499, 12, 64, 64), (1499, 24, 64, 64), (1496, 24, 64, 64), (9, 6, 64, 64),
    ],
)  # fmt: skip
def test_gpu_groups_that_lie_as_tma_reads_them_match_the_reference(branch, length, group, h_dim, v_dim):
    sizes = dict(batch=2, length=length, num_kv=3, group=group, h_dim=h_dim, v_dim=v_dim)
    arrays, keywords = make_inputs(branch, packed=True, dtype=jnp.bfloat16, config=PAPER, **sizes)
    check_against_reference(branch, jax.device_put(arrays), keywords, PAPER, forward=4e-3, gradient=1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize(("length", "offset", "group"), [(500, 0, 16), (500, 0, 8), (1, 299, 64)])
def test_gpu_rows_past_the_end_are_nobodys(length, offset, group):
    """So short that all programs run at once: what one stored past its row would stay in the next one's."""
    sizes = dict(batch=2, length=length, offset=offset, num_kv=1, group=group, h_dim=128, v_dim=128)
    arrays, keywords = make_inputs("window", dtype=jnp.bfloat16, config=PAPER, **sizes)
    check_against_reference("window", jax.device_put(arrays), keywords, PAPER, forward=4e-3, gradient=1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize(("group", "dim"), [(16, 128), (6, 64)])
@pytest.mark.parametrize("branch", ["compressed", "window"])
def test_gpu_maxima_that_rise_late_scale_what_was_summed(branch, group, dim):
    """Keys grow with their position, so that maxima rise by more and by less than what leaves the sum as it is."""
    (query, key, *others), keywords = real_inputs(branch, 1499, 2, group, dim, dim)
    key *= jnp.linspace(0.1, 8, key.shape[1], dtype=key.dtype)[:, None, None]
    check_against_reference(branch, (query, key, *others), keywords, PAPER, forward=4e-3, gradient=1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("branch", ["compressed", "window"])
def test_gpu_float32_matches_the_reference(branch):
    inputs = real_inputs(branch, 1500, 2, 4, 128, 64, packed=True, dtype=jnp.float32)
    check_against_reference(branch, *inputs, PAPER, forward=1e-4, gradient=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("branch", ["compressed", "window"])
def test_gpu_reruns_are_bit_equal(branch, packed):
    arrays, keywords = real_inputs(branch, 8192, packed=packed)
    first = run(pallas, branch, arrays, keywords, PAPER)
    for _ in range(3):
        chex.assert_trees_all_equal(run(pallas, branch, arrays, keywords, PAPER), first)


@pytest.mark.gpu
@pytest.mark.parametrize(("group", "dim"), [(16, 128), (8, 64), (6, 64), (4, 64)])
@pytest.mark.parametrize("branch", ["compressed", "window"])
def test_gpu_a_gradient_of_the_query_is_added_onto_another(branch, group, dim):
    """Onto another array: the sum. Onto its negation: no more than what rounding cut off."""
    (query, key, value, grad_out), _ = real_inputs(branch, 2999, 2, group, dim, dim)
    ranges = {
        "compressed": lambda: range_attention.compressed_ranges(query, None, 0, PAPER),
        "window": lambda: range_attention.window_ranges(query, None, 0, PAPER.window),
    }[branch]()
    ranges = range_attention.clip_ranges(*ranges, key.shape[1])
    made = plan.plan_range(Shape.of(query, key, value), current_target())
    other = jax.random.normal(jax.random.key(0), query.shape, query.dtype)

    @jax.jit
    def run():
        out, lse = range_attention.forward(query, key, value, *ranges, made, None)
        delta = jnp.sum(out.astype(jnp.float32) * grad_out.astype(jnp.float32), -1)
        args = query, key, value, *ranges, delta, lse, grad_out, made, None
        alone = range_attention.backward(*args)[0]
        return alone, [range_attention.backward(*args, onto)[0] for onto in (other, -alone)]

    alone, (total, rounding) = run()
    exact = alone.astype(jnp.float32) + other.astype(jnp.float32)
    assert relative_error(total, exact) <= 4e-3
    assert bool(jnp.all(jnp.abs(rounding.astype(jnp.float32)) <= 2**-8 * jnp.abs(alone.astype(jnp.float32)) + 1e-6))
    for _ in range(3):
        chex.assert_trees_all_equal(run(), (alone, [total, rounding]))


SM80 = ["range_attention.sm80_forward", "range_attention.sm80_grad_query", "range_attention.sm80_grad_key_value"]


@contextlib.contextmanager
def an_a100_here(query, key):
    """Kernels are those of an A100 with Mosaic GPU; what was traced for the GPU at hand is forgotten."""
    if jax.__version_info__ < (0, 11):
        pytest.skip("JAX 0.11 is the first with mma.sync in Mosaic GPU")
    jax.clear_caches()
    try:
        with compile_for(Target("gpu", (8, 0)), ahead_of_time=False) as target:
            made = plan.plan_range(Shape.of(query, key), target)
            assert [x.kernel for x in (made.forward, made.grad_query, made.grad_key_value)] == SM80
            yield
    finally:
        jax.clear_caches()


@pytest.mark.gpu
@pytest.mark.parametrize("branch", ["compressed", "window"])
@pytest.mark.parametrize(
    ("num_kv", "group", "dim", "packed"),
    [(2, 16, 128, True), (2, 16, 128, False), (2, 6, 64, True), (1, 5, 64, False)],
)
def test_gpu_an_a100s_kernels_match_the_reference(branch, num_kv, group, dim, packed):
    inputs = real_inputs(branch, 1499, num_kv, group, dim, dim, packed)
    here = functools.partial(an_a100_here, *inputs[0][:2])
    check_against_reference(branch, *inputs, PAPER, forward=4e-3, gradient=1e-2, serving=here)


@pytest.mark.gpu
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("branch", ["compressed", "window"])
def test_gpu_reruns_of_an_a100s_kernels_are_bit_equal(branch, packed):
    arrays, keywords = real_inputs(branch, 8192, packed=packed)
    with an_a100_here(*arrays[:2]):
        first = run(pallas, branch, arrays, keywords, PAPER)
        for _ in range(3):
            chex.assert_trees_all_equal(run(pallas, branch, arrays, keywords, PAPER), first)


@pytest.mark.gpu
def test_gpu_an_a100s_kernels_serve_the_operator():
    """Rows of 1,024 tokens, whose lists hold all blocks, so that kernels of scores cannot choose otherwise."""
    length, heads, kv_heads, dim = 1024, 12, 2, 64
    rng = np.random.default_rng(0)
    count = blocks.num_compressed(length, PAPER)
    sizes = [(length, heads)] + [(count, kv_heads)] * 2 + [(length, kv_heads)] * 4 + [(length, heads)]
    *arrays, grad = (jnp.asarray(rng.normal(size=(2, *size, dim)), jnp.bfloat16) for size in sizes)
    gates = jnp.asarray(rng.uniform(size=(2, length, heads, 3)), jnp.bfloat16)

    def gradients():
        def attend(query, key_cmp, value_cmp, key_slc, value_slc, key_win, value_win, gates):
            return nsa_jax.nsa_attention(
                query, key_cmp, value_cmp, key_slc, value_slc, key_win, value_win, gates, config=PAPER,
                implementation="pallas",
            )  # fmt: skip

        out, pullback = jax.vjp(attend, *arrays, gates)
        return out, *pullback(grad)

    want = jax.jit(lambda: gradients())()
    with an_a100_here(arrays[0], arrays[1]):
        got = jax.jit(lambda: gradients())()
    for x, y in zip(got, want, strict=True):
        assert relative_error(x, y) <= 1e-2


@pytest.mark.gpu
@pytest.mark.parametrize("group", [3, 8])
def test_gpu_hopper_kernels_equal_the_triton_ones(group):
    """Whatever tiles are chosen, and also where the choice would fall on the Triton kernels."""
    if not current_target().is_hopper:
        pytest.skip("needs a Hopper GPU")
    length = 3001
    arrays, keywords = real_inputs("window", length, group=group, packed=True)
    query, key, value, grad_out = arrays
    t = jnp.arange(length, dtype=jnp.int32)[None]
    low, high = jnp.maximum(keywords["segment_start"], t - 300), t + 1
    empty = low >= high
    low, high = jnp.where(empty, length, low), jnp.where(empty, 0, high)
    forward_tiles = tuning.ranged_forward_config(query.shape[-1], value.shape[-1], query.dtype, current_target())
    forward = jax.jit(functools.partial(triton_forward.ranged_forward, config=forward_tiles))
    out, lse = forward(query, key, value, low, high)
    delta = jnp.sum(out.astype(jnp.float32) * grad_out.astype(jnp.float32), -1)
    weight = jnp.where(jnp.isneginf(lse), NO_WEIGHT, lse * np.float32(np.log2(np.e)))
    rows = (1, query.shape[1] * query.shape[2])
    flat = [x.reshape(*rows, *x.shape[3:]) for x in (grad_out, weight, delta)]
    args = (query.reshape(*rows, -1), key, value, *flat, low, high)
    config = tuning.RangedConfig(rows=64, keys=64, num_warps=4, num_stages=2)
    grad_query = jax.jit(functools.partial(triton_backward.grad_query_kernel, config=config))(*args)
    grads = jax.jit(functools.partial(triton_backward.grad_key_value_kernel, config=config))(*args)
    for keys, stages, splits, tiles, overlap in ((64, 3, 1, 1, True), (128, 2, 4, 5, False)):
        config = tuning.RangedHopperQueryConfig(keys, stages, tiles, overlap=overlap)
        forward = jax.jit(functools.partial(sm90_forward.ranged_forward, config=config))
        got, got_lse = forward(query, key, value, low, high)
        assert relative_error(got, out) <= 2e-3
        np.testing.assert_array_equal(np.isneginf(got_lse), np.isneginf(lse))
        finite = ~jnp.isneginf(lse)
        np.testing.assert_allclose(jnp.where(finite, got_lse, 0), jnp.where(finite, lse, 0), atol=1e-4)
        args = (query, key, value, grad_out, weight, delta, low, high)
        got = jax.jit(functools.partial(sm90_grad_query.grad_query, config=config))(*args)
        assert relative_error(got.reshape(grad_query.shape), grad_query) <= 2e-3
        keys_config = tuning.RangedHopperKeysConfig(stages, splits=splits, overlap=overlap)
        backward = functools.partial(sm90_grad_key_value.grad_key_value, config=keys_config)
        for got, want in zip(jax.jit(backward)(*args), grads, strict=True):
            assert relative_error(got, want) <= 5e-3
