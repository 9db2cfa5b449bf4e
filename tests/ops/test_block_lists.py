"""Block lists of callers: any int32 is safe and means the same in every implementation."""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nsa_jax
from nsa_jax.ops import blocks
from tests.ops.cases import BY_NAME, ON_GPU, SMALL, Case, relative_error

CASE = Case("block_lists", T=64, N=4, K=2, B=2, offset=30)  # 94 keys: the last block is not whole
J = blocks.num_selection_blocks(CASE.S, SMALL.select_block)
NO_BLOCK = (-1, -2, J, J + 1, J + 40, 2**31 - 1, -(2**31), 2**26, -(2**26), 1_090_604_942)


def messy_lists(rng: np.random.Generator, size: int = 6) -> np.ndarray:
    """Lists with blocks of the row, some of them repeated or in the future, between entries that name none."""
    lists = rng.integers(0, J, (CASE.B, CASE.T, CASE.K, size))
    lists = np.where(rng.random(lists.shape) < 0.4, rng.choice(NO_BLOCK, lists.shape), lists)
    lists[:, ::7] = -1  # no block at all
    return lists.astype(np.int32)


def attend(lists, implementation, packed=False):
    """Selected attention and its gradients."""
    arrays = CASE.inputs()
    start = jnp.asarray(np.arange(CASE.T) // 20 * 20 + CASE.offset, jnp.int32) * jnp.ones((CASE.B, 1), jnp.int32)

    @jax.jit
    def run(query, key, value, lists):
        out, back = jax.vjp(
            lambda *x: nsa_jax.selected_attention(
                *x, lists, select_block=SMALL.select_block, query_offset=CASE.offset, implementation=implementation,
                segment_start=start if packed else None,
            ),
            query, key, value,
        )  # fmt: skip
        return out, *back(jnp.asarray(CASE.cotangent()))

    return run(arrays["query"], arrays["key_slc"], arrays["value_slc"], jnp.asarray(lists))


@pytest.mark.filterwarnings("ignore:.*interpret mode")
@pytest.mark.parametrize("implementation", ["reference", "xla", "xla_gathered", "pallas"])
@pytest.mark.parametrize("packed", [False, True])
def test_entries_that_name_no_block_and_repeats_change_nothing(implementation, packed, monkeypatch):
    if implementation == "xla_gathered":
        monkeypatch.setattr("nsa_jax.ops.xla._DENSE_FACTOR", 0)
    lists = messy_lists(np.random.default_rng(packed))
    clean = np.full_like(lists, J)
    for index in np.ndindex(lists.shape[:-1]):
        real = sorted({int(entry) for entry in lists[index] if 0 <= entry < J})
        clean[index][: len(real)] = real
    np.testing.assert_array_equal(blocks.clean_lists(jnp.asarray(lists), J), clean)
    implementation = implementation.removesuffix("_gathered")
    got, same = attend(lists, implementation, packed), attend(clean, implementation, packed)
    chex.assert_trees_all_equal(got, same)
    for name, mine, want in zip(("out", "query", "key", "value"), got, attend(clean, "reference", packed), strict=True):
        assert relative_error(mine, want) <= (1e-3 if ON_GPU else 1e-5), name
    assert (np.asarray(got[0])[:, ::7] == 0).all() and (np.asarray(got[1])[:, ::7] == 0).all()


@pytest.mark.filterwarnings("ignore:.*interpret mode")
def test_the_kernels_own_lists_are_not_cleaned(monkeypatch):
    def refuse(lists, num_blocks):
        raise AssertionError("cleaned")

    monkeypatch.setattr(blocks, "clean_lists", refuse)
    case = BY_NAME["group_2_packed"]
    run = lambda arrays: nsa_jax.nsa_attention(**arrays, **case.kwargs(), implementation="pallas")  # noqa: E731
    jax.eval_shape(run, case.inputs())


@pytest.mark.parametrize("implementation", ["reference", "xla", "pallas"])
@pytest.mark.filterwarnings("ignore:.*interpret mode")
def test_segment_starts_and_traced_offsets_out_of_range_give_lists_in_range(implementation):
    """A start below 0 is 0, one behind the query leaves it nothing, and an offset is clipped to what the keys allow."""
    case = Case("out_of_range", T=40, N=2, K=1, B=1, offset=24)
    arrays = case.inputs()

    @jax.jit
    def run(offset, start):
        return nsa_jax.nsa_attention(
            **arrays, config=SMALL, segment_start=start, query_offset=offset, implementation=implementation,
            return_block_indices=True,
        )  # fmt: skip

    num_blocks = blocks.num_selection_blocks(case.S, SMALL.select_block)
    t = np.arange(case.T) + case.offset
    for offset, start, same_offset, same_start in (
        (-5, 0, 0, 0),
        (10_000, 0, 24, 0),
        (24, -77, 24, 0),
        (24, t + 1, 24, t + 1000),
        (0, 2**31 - 1, 0, 50),
        (24, np.where(t % 3, -(2**31), t - 5), 24, np.where(t % 3, 0, t - 5)),
    ):
        got, want = (
            run(jnp.int32(o), jnp.broadcast_to(jnp.asarray(s, jnp.int32), (1, case.T)))
            for o, s in ((offset, start), (same_offset, same_start))
        )
        chex.assert_trees_all_equal(got, want)
        assert got[1].min() >= 0 and got[1].max() <= num_blocks
