"""Selected attention's kernels against the reference, interpreted on the CPU and, where there is one, on a GPU."""

from __future__ import annotations

import chex
import jax.numpy as jnp
import numpy as np
import pytest

from nsa_jax.ops import reference
from nsa_jax.ops.pallas import selected


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


def make_inputs(*, batch=1, length=40, num_keys=None, num_kv=2, group=2, h_dim=16, v_dim=16, block=16, n=3, offset=0,
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
        cuts = np.asarray([0, 7, 24, 33])
        start = np.broadcast_to(cuts[np.searchsorted(cuts, t, side="right") - 1], (batch, length))
        start = jnp.asarray(start, jnp.int32)
    return (*arrays, jnp.asarray(lists)), dict(select_block=block, segment_start=start, query_offset=offset)


def relative_error(got, want) -> float:
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


CASES = {
    "group_1": dict(group=1),
    "group_3_odd_length": dict(group=3, length=37),
    "group_6_two_rows": dict(group=6, batch=2, num_kv=1),
    "group_16": dict(group=16, num_kv=1),
    "group_20": dict(group=20, num_kv=1, length=24),
    "value_wider": dict(h_dim=16, v_dim=64),
    "paper_head_dims": dict(h_dim=192, v_dim=128, num_kv=1, length=24),
    "documents": dict(documents=True, length=48, n=4),
    "documents_shared_lists": dict(documents=True, length=48, shared=8, n=4),
    "chunk_of_a_longer_row": dict(offset=50, length=16, num_keys=75, n=4),
    "chunk_packed": dict(offset=20, length=16, num_keys=36, documents=True),
    "one_token": dict(length=1),
    "more_slots_than_blocks": dict(length=20, n=7),
    "block_of_24": dict(block=24, length=60),
    "block_of_128": dict(block=128, length=140, num_kv=1),
    "bfloat16": dict(dtype=jnp.bfloat16, group=4),
}


@pytest.mark.parametrize("case", CASES)
def test_forward_equals_reference(case):
    arrays, keywords = make_inputs(**CASES[case])
    got = selected.selected_attention(*arrays, **keywords)
    want = reference.selected_attention(*(x.astype(jnp.float32) for x in arrays[:3]), arrays[3], **keywords)
    chex.assert_shape(got, want.shape)
    assert got.dtype == arrays[0].dtype
    assert relative_error(got, want) < (4e-3 if got.dtype == jnp.bfloat16 else 1e-5)


def test_rows_with_nothing_are_exactly_zero():
    (query, key, value, lists), keywords = make_inputs(length=32, documents=True)
    num_blocks = 2
    lists = jnp.full_like(lists, num_blocks).at[:, 30].set(jnp.asarray([0, 2, 2]))  # block 0 is another document's
    lists = lists.at[:, 5, 0].set(jnp.asarray([1, 2, 2]))  # all in the future
    lists = lists.at[:, 31, 0].set(jnp.asarray([1, 2, 2]))
    out = selected.selected_attention(query, key, value, lists, **keywords)
    empty = np.ones((32, 2), bool)
    empty[31, 0] = False
    heads = np.repeat(empty, 2, axis=1)
    np.testing.assert_array_equal(np.asarray(out)[0][heads], 0.0)
    assert np.abs(np.asarray(out)[0][~heads]).min() > 0


def test_lse_is_natural_log_and_minus_infinity_for_empty_rows():
    (query, key, value, lists), keywords = make_inputs(group=3, length=20)
    lists = lists.at[0, 4].set(2)
    start = jnp.zeros((1, 20), jnp.int32)
    _, lse = selected._forward(query, key, value, lists, start, jnp.asarray(0, jnp.int32), 16, False)
    t, position = np.arange(20), np.arange(20)
    listed = (np.asarray(lists)[..., None] == np.arange(2)).any(-2)[0]  # [T, K, J]
    mask = np.repeat(listed, 16, -1)[..., :20] & (position <= t[:, None])[:, None]
    scores = np.einsum("tkgh,skh->tkgs", np.asarray(query[0]).reshape(20, 2, 3, 16), np.asarray(key[0])) / 4
    with np.errstate(divide="ignore"):
        want = np.log(np.where(mask[:, :, None], np.exp(scores), 0).sum(-1)).reshape(20, 6)
    assert np.isneginf(np.asarray(lse)[0, 4]).all()
    np.testing.assert_allclose(np.asarray(lse)[0], want, rtol=1e-5)


def test_future_keys_never_matter():
    (query, key, value, lists), keywords = make_inputs(length=48, shared=8, n=4)
    changed = selected.selected_attention(query, key.at[:, 20:].add(1.0), value.at[:, 20:].add(1.0), lists, **keywords)
    same = selected.selected_attention(query, key, value, lists, **keywords)
    chex.assert_trees_all_equal(changed[:, :20], same[:, :20])
    assert float(jnp.abs(changed[:, 20:] - same[:, 20:]).max()) > 0.1
