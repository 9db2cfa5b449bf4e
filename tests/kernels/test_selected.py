"""Selected attention's kernels against the reference, interpreted on the CPU and, where there is one, on a GPU."""

from __future__ import annotations

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nsa_jax.ops import pallas, plan, reference, selected_tiles
from nsa_jax.ops.kernels.selected import attention as selected
from nsa_jax.ops.kernels.selected import neighbours
from nsa_jax.ops.target import current_target

pytestmark = pytest.mark.usefixtures("quick_compilation")


def random_lists(rng, batch, length, num_kv, num_keys, block, n, offset=0, shared=1):
    """Ascending random lists, `shared` neighbouring tokens alike, padded with J; own block and block 0 forced.

    Tokens alike may list blocks in their future, which must be masked.
    """
    num_blocks = -(-num_keys // block)
    lists = np.full((batch, length, num_kv, n), num_blocks, np.int32)
    for b, k, t0 in np.ndindex(batch, num_kv, -(-length // shared)):
        for t in range(t0 * shared, min((t0 + 1) * shared, length)):
            if t == t0 * shared:
                own = min((t + shared - 1 + offset) // block, num_blocks - 1)
                others = rng.permutation(np.arange(1, max(own, 1)))[: n - 2]
                chosen = sorted({0, own, *others.tolist()})[:n]
            lists[b, t, k, : len(chosen)] = chosen
    return lists


def make_inputs(*, batch=1, length=72, num_keys=None, num_kv=2, group=2, h_dim=16, v_dim=16, block=16, n=3, offset=0,
                dtype=jnp.float32, documents=False, shared=1, seed=0):  # fmt: skip
    """Random arguments of selected_attention, as (arrays, keywords)."""
    rng = np.random.default_rng(seed)
    num_keys = num_keys or length + offset
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), dtype)  # noqa: E731
    arrays = (
        draw(batch, length, num_kv * group, h_dim),
        draw(batch, num_keys, num_kv, h_dim),
        draw(batch, num_keys, num_kv, v_dim),
    )
    lists = random_lists(rng, batch, length, num_kv, num_keys, block, n, offset, shared)
    start = None
    if documents:
        t = np.arange(length) + offset
        cuts = np.asarray([0, 7, 24, 60])
        start = np.broadcast_to(cuts[np.searchsorted(cuts, t, side="right") - 1], (batch, length))
        start = jnp.asarray(start, jnp.int32)
    return (*arrays, jnp.asarray(lists)), dict(select_block=block, segment_start=start, query_offset=offset)


def relative_error(got, want) -> float:
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


CASES = {
    "group_1": dict(group=1),
    "group_3_odd_length": dict(group=3, length=77),
    "group_6_two_rows": dict(group=6, batch=2, num_kv=1),
    "group_16": dict(group=16, num_kv=1),
    "group_20": dict(group=20, num_kv=1, length=72),
    "value_wider": dict(h_dim=16, v_dim=64),
    "paper_head_dims": dict(h_dim=192, v_dim=128, num_kv=1, length=56),
    "documents": dict(documents=True, n=3),
    "documents_shared_lists": dict(documents=True, shared=8, n=3),
    "chunk_of_a_longer_row": dict(offset=50, length=16, num_keys=75, n=4),
    "chunk_packed": dict(offset=40, length=32, num_keys=72, documents=True),
    "one_token": dict(length=1),
    "more_slots_than_blocks": dict(length=20, n=7),
    "block_of_24": dict(block=24, length=60),
    "block_of_128": dict(block=128, length=140, num_kv=1),
    "bfloat16": dict(dtype=jnp.bfloat16, group=4),
}


# Every way through the forward kernels, whatever the heuristic would pick: small tiles, work items and buffers, so that
# short rows already have several of each.
PATHS = {
    "plain": dict(tile=1, key_major=False),
    "tiles": dict(tile=4, share=2, key_major=False),
    "key_major": dict(tile=4, share=3, key_major=True, gather_rows=16, chunk=8, row_tokens=22, buffer_bytes=1 << 16),
}
CASES_OF = {
    "plain": ("group_20", "paper_head_dims", "chunk_packed", "block_of_128"),
    "tiles": ("group_3_odd_length", "group_16", "paper_head_dims", "documents_shared_lists", "chunk_of_a_longer_row",
              "more_slots_than_blocks", "block_of_24", "block_of_128", "bfloat16"),
    # These kernels hold a whole block: the heuristic gives them blocks of up to 64 tokens.
    "key_major": ("group_1", "group_3_odd_length", "group_6_two_rows", "value_wider", "documents", "chunk_packed",
                  "one_token", "block_of_24", "bfloat16"),
}  # fmt: skip


def forward(path, arrays, keywords):
    """The forward kernels by a named path: (out, lse)."""
    query, key, value, lists = arrays
    group = query.shape[2] // key.shape[2]
    config = selected_tiles.selected_config(
        group, query.shape[3], value.shape[3], keywords["select_block"], query.dtype, current_target()
    )
    start = keywords["segment_start"]
    packed = start is not None
    start = jnp.zeros(query.shape[:2], jnp.int32) if start is None else start
    offset = jnp.asarray(keywords["query_offset"], jnp.int32)
    config = dataclasses.replace(config, **PATHS[path])
    sizes = dict(select_block=keywords["select_block"], num_selected=lists.shape[-1])
    made = plan.plan_selected_forward(plan.Shape.of(query, key, value), current_target(), **sizes, lists=config)
    attend = jax.jit(selected.selected_forward, static_argnums=(6, 7, 8))
    return attend(query, key, value, lists, start, offset, keywords["select_block"], packed, made)


@pytest.mark.parametrize(("path", "case"), [(path, case) for path, cases in CASES_OF.items() for case in cases])
def test_forward_equals_reference(path, case):
    arrays, keywords = make_inputs(**CASES[case])
    got, _ = forward(path, arrays, keywords)
    want = reference.selected_attention(*(x.astype(jnp.float32) for x in arrays[:3]), arrays[3], **keywords)
    chex.assert_shape(got, want.shape)
    assert got.dtype == arrays[0].dtype
    assert relative_error(got, want) < (4e-3 if got.dtype == jnp.bfloat16 else 1e-5)


@pytest.mark.parametrize("group", [4, 16])
def test_heuristic_serves_bfloat16(group):
    arrays, keywords = make_inputs(dtype=jnp.bfloat16, group=group, length=40, num_kv=1, shared=4, h_dim=32)
    got = pallas.selected_attention(*arrays, **keywords)
    want = reference.selected_attention(*(x.astype(jnp.float32) for x in arrays[:3]), arrays[3], **keywords)
    assert relative_error(got, want) < 4e-3


@pytest.mark.parametrize("documents", [False, True])
def test_gradients_equal_reference(documents):
    (query, key, value, lists), keywords = make_inputs(length=40, group=2, num_kv=1, documents=documents)
    cotangent = jnp.asarray(np.random.default_rng(1).normal(size=query.shape), jnp.float32)

    def loss(module):
        return lambda *qkv: (module.selected_attention(*qkv, lists, **keywords) * cotangent).sum()

    got = jax.grad(loss(pallas), argnums=(0, 1, 2))(query, key, value)
    want = jax.grad(loss(reference), argnums=(0, 1, 2))(query, key, value)
    for name, g, w in zip(("query", "key", "value"), got, want, strict=True):
        assert relative_error(g, w) < 1e-5, name


def test_split_keeps_every_entry_once():
    """What tiles share and what is left to the tokens is exactly what the lists hold and the queries may use."""
    (_, _, _, lists), keywords = make_inputs(length=37, num_keys=37, n=4, shared=8, documents=True)
    start = keywords["segment_start"]
    tile, num_blocks = 4, 3
    split = neighbours.split_lists(
        lists, start, jnp.zeros((1,), jnp.int32),
        tile=tile, share=3, select_block=16, num_keys=37, packed=True,
    )  # fmt: skip
    found = np.zeros((37, 2, num_blocks), int)
    for k, i in np.ndindex(2, split.block.shape[2]):
        for u in range(int(split.num_shared[0, k, i, 0])):
            for token in range(tile):
                if int(split.bits[0, k, i, u]) >> token & 1:
                    found[i * tile + token, k, int(split.block[0, k, i, u])] += 1
    assert found.sum() > 0
    for t, k in np.ndindex(37, 2):
        for j in np.asarray(split.rest)[0, t // tile, t % tile, k, :4]:
            if j < num_blocks:
                found[t, k, j] += 1
    t = np.arange(37)[:, None, None]
    j = np.arange(num_blocks)
    useful = (j <= t // 16) & (j >= np.asarray(start)[0][:, None, None] // 16)
    listed = (np.asarray(lists)[0][..., None] == j).any(-2)
    np.testing.assert_array_equal(found, (listed & useful).astype(int))


@pytest.mark.parametrize("path", PATHS)
def test_rows_with_nothing_are_exactly_zero(path):
    (query, key, value, lists), keywords = make_inputs(length=32, documents=True)
    num_blocks = 2
    lists = jnp.full_like(lists, num_blocks).at[:, 30].set(jnp.asarray([0, 2, 2]))  # block 0 is another document's
    lists = lists.at[:, 5, 0].set(jnp.asarray([1, 2, 2]))  # all in the future
    lists = lists.at[:, 31, 0].set(jnp.asarray([1, 2, 2]))
    out, lse = forward(path, (query, key, value, lists), keywords)
    empty = np.ones((32, 2), bool)
    empty[31, 0] = False
    heads = np.repeat(empty, 2, axis=1)
    np.testing.assert_array_equal(np.asarray(out)[0][heads], 0.0)
    assert np.isneginf(np.asarray(lse)[0][heads]).all()
    assert np.abs(np.asarray(out)[0][~heads]).min() > 0
    assert np.isfinite(np.asarray(lse)[0][~heads]).all()


@pytest.mark.parametrize("path", ["tiles", "key_major"])
def test_a_token_may_list_none_of_what_its_tile_shares(path):
    """Its scores are all masked then, and the first weights must not be infinite."""
    arrays, keywords = make_inputs(length=40, num_keys=50, offset=10, n=2, block=64, dtype=jnp.bfloat16)
    lists = jnp.ones((1, 40, 2, 2), jnp.int32).at[..., 0].set(0).at[:, 3::15].set(1)
    got, _ = forward(path, (*arrays[:3], lists), keywords)
    want = reference.selected_attention(*(x.astype(jnp.float32) for x in arrays[:3]), lists, **keywords)
    assert relative_error(got, want) < 4e-3
    np.testing.assert_array_equal(np.asarray(got[:, 3::15]), 0.0)


@pytest.mark.parametrize("path", PATHS)
def test_lse_is_natural_log_and_minus_infinity_for_empty_rows(path):
    (query, key, value, lists), keywords = make_inputs(group=3, length=20)
    lists = lists.at[0, 4].set(2)
    _, lse = forward(path, (query, key, value, lists), keywords)
    t, position = np.arange(20), np.arange(20)
    listed = (np.asarray(lists)[..., None] == np.arange(2)).any(-2)[0]  # [T, K, J]
    mask = np.repeat(listed, 16, -1)[..., :20] & (position <= t[:, None])[:, None]
    scores = np.einsum("tkgh,skh->tkgs", np.asarray(query[0]).reshape(20, 2, 3, 16), np.asarray(key[0])) / 4
    with np.errstate(divide="ignore"):
        want = np.log(np.where(mask[:, :, None], np.exp(scores), 0).sum(-1)).reshape(20, 6)
    assert np.isneginf(np.asarray(lse)[0, 4]).all()
    np.testing.assert_allclose(np.asarray(lse)[0], want, rtol=1e-5)


@pytest.mark.parametrize("path", PATHS)
def test_future_keys_never_matter(path):
    (query, key, value, lists), keywords = make_inputs(length=48, shared=8, n=4)
    later = (query, key.at[:, 20:].add(1.0), value.at[:, 20:].add(1.0), lists)
    changed, _ = forward(path, later, keywords)
    same, _ = forward(path, (query, key, value, lists), keywords)
    chex.assert_trees_all_equal(changed[:, :20], same[:, :20])
    assert float(jnp.abs(changed[:, 20:] - same[:, 20:]).max()) > 0.1


@pytest.mark.gpu
def test_on_gpu_shorter_last_range():
    """Ranges of whole tiles, the last one of 1 token: a program that adds up shares of two, in place, has one alone."""
    arrays, keywords = make_inputs(group=16, num_kv=1, length=97, h_dim=64, v_dim=64, dtype=jnp.bfloat16)
    got, _ = forward("key_major", arrays, keywords)
    want = reference.selected_attention(*(x.astype(jnp.float32) for x in arrays[:3]), arrays[3], **keywords)
    assert relative_error(got[:, -1], want[:, -1]) < 4e-3


@pytest.mark.gpu
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("shared", [1, 32])
@pytest.mark.parametrize(
    "shape",
    [
        dict(group=1, num_kv=4, h_dim=64, v_dim=64),
        dict(group=3, length=1501),
        dict(group=4, h_dim=64, v_dim=64),
        dict(group=2, num_kv=3, length=1504),
        dict(group=7, num_kv=1, length=1501, documents=True),
        dict(group=6, h_dim=64, v_dim=64, documents=True),
        dict(group=16),
        dict(group=16, h_dim=192),
        dict(group=16, documents=True),
        dict(group=20, h_dim=16, v_dim=32),
        dict(group=64, num_kv=1),
        dict(group=4, offset=333, num_keys=2001, length=1000),
        dict(group=16, block=128),
        dict(group=4, block=32),
        dict(group=16, dtype=jnp.float32),
    ],
    ids=str,
)
def test_on_gpu_equals_reference_and_repeats_bit_for_bit(shape, shared, masked, monkeypatch):
    settings = dict(batch=2, length=1500, h_dim=128, v_dim=128, block=64, n=16, dtype=jnp.bfloat16, shared=shared)
    arrays, keywords = make_inputs(**(settings | shape))
    monkeypatch.setattr(selected_tiles, "MASKED_BLOCKS_PER_SLOT", 2 if masked else 0)
    sizes = keywords["select_block"], arrays[3].shape[-1]
    if masked and not plan.reads_whole_rows(plan.Shape.of(*arrays[:3]), current_target(), *sizes):
        pytest.skip("not served under a mask")
    check_against_reference_twice(arrays, keywords)


def check_against_reference_twice(arrays, keywords):
    attend = jax.jit(lambda *a: pallas.selected_attention(*a, **keywords))
    got = attend(*arrays)
    chex.assert_trees_all_equal(got, attend(*arrays))
    upcast = [x.astype(jnp.float32) for x in arrays[:3]]
    want = jax.jit(lambda *a: reference.selected_attention(*a, **keywords))(*upcast, arrays[3])
    assert relative_error(got.astype(jnp.float32), want) < (4e-3 if got.dtype == jnp.bfloat16 else 1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "shape",
    [
        dict(group=4, h_dim=128, v_dim=128),
        dict(group=7, h_dim=128, v_dim=128, documents=True),
        dict(group=6, h_dim=128, v_dim=128),
        dict(group=5, h_dim=128, v_dim=128),
        dict(group=1, h_dim=64, v_dim=64),
        dict(group=5, h_dim=128, v_dim=64),
        dict(group=2, h_dim=64, v_dim=128, offset=333, num_keys=2001, length=1000),
    ],
    ids=str,
)
def test_on_gpu_hoppers_kernel_by_block_serves_other_groups(shape, monkeypatch):
    monkeypatch.setattr(selected_tiles, "MASKED_BLOCKS_PER_SLOT", 0)
    arrays, keywords = make_inputs(**(dict(batch=2, length=1500, block=64, n=16, dtype=jnp.bfloat16) | shape))
    sizes = dict(select_block=64, num_selected=16)
    made = plan.plan_selected_forward(plan.Shape.of(*arrays[:3]), current_target(), **sizes)
    if current_target().is_hopper:
        assert made.rest.kernel == "selected.by_block_sm90"
    check_against_reference_twice(arrays, keywords)
