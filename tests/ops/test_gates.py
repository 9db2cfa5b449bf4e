"""What earlier systems got wrong, as properties of the operator: causality, live keys, selection, reads, packing."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nsa_jax
from nsa_jax import NSAConfig
from nsa_jax.ops import blocks
from tests.ops import oracle
from tests.ops.cases import ARGUMENTS, SMALL, TESTED, Case, Tested, run

pytestmark = pytest.mark.usefixtures("quick_compilation")

# Options and what goes with them are met in test_implementations.
EVERY = (Tested("reference"), *(tested for tested in TESTED if not tested.options))
LONG = Case("long", T=75, N=4, K=2)  # T > 2w + l: every branch has left its start


@pytest.fixture(params=EVERY, ids=str)
def tested(request, monkeypatch):
    for name, value in request.param.patches:
        monkeypatch.setattr(name, value)
    return request.param


def _forward(case, tested, **changes):
    """(output, lists) of `nsa_attention` with keys compressed by the mean, as a function of uncompressed keys."""

    @jax.jit
    def forward(arrays):
        keys = {
            f"{name}_cmp": nsa_jax.mean_compress(arrays[f"{name}_slc"] + arrays[f"{name}_win"], config=case.config)
            for name in ("key", "value")
        }
        return nsa_jax.nsa_attention(
            **{**arrays, **keys},
            **{**case.kwargs(), **changes},
            implementation=tested.implementation,
            return_block_indices=True,
        )

    return forward


def test_outputs_up_to_t_ignore_tokens_after_t(tested):
    assert LONG.T > 2 * SMALL.window
    arrays = LONG.inputs()
    other = Case("other", T=LONG.T, N=LONG.N, K=LONG.K).inputs()
    forward = _forward(LONG, tested)
    out, lists = jax.device_get(forward(arrays))
    for t in (0, 6, 7, 15, 16, 23, 24, 47, 48, 49, 60, 73):
        changed = {
            name: array if name.endswith("_cmp") else array.at[:, t + 1 :].set(other[name][:, t + 1 :])
            for name, array in arrays.items()
        }
        new_out, new_lists = jax.device_get(forward(changed))
        np.testing.assert_array_equal(new_out[:, : t + 1], out[:, : t + 1], err_msg=f"t={t}")
        np.testing.assert_array_equal(new_lists[:, : t + 1], lists[:, : t + 1], err_msg=f"t={t}")
        assert (new_out[:, t + 1 :] != out[:, t + 1 :]).any()


@pytest.mark.slow
def test_every_input_has_a_gradient_and_an_effect(tested):
    values, _, gradients = run(LONG, tested.implementation)
    for name in ARGUMENTS:
        assert np.linalg.norm(gradients[name]) > 0.1, name
    arrays = LONG.inputs()
    for name in ARGUMENTS[1:7]:
        gradient = np.asarray(gradients[name])
        last = gradient.shape[1] - 1
        assert (np.abs(gradient[:, :last]).max((0, 2, 3)) > 0).sum() >= 0.9 * last, f"{name}: dead positions"
        changed, _, _ = run(LONG, tested.implementation, {**arrays, name: arrays[name] + arrays[name][:, ::-1]})
        assert np.abs(changed["out"] - values["out"]).max() > 1e-2, name


def test_compressed_probabilities_exclude_blocks_that_reach_past_t(tested):
    """With value_cmp = one-hot of the block index, the output is p_cmp itself."""
    case = Case("probabilities", T=60, N=2, K=1)
    arrays = case.inputs()
    num_cmp = arrays["key_cmp"].shape[1]
    width = 16  # >= num_cmp, and a head dim that every implementation serves
    one_hot = jnp.broadcast_to(jnp.eye(num_cmp, width)[None, :, None, :], (case.B, num_cmp, 1, width))
    probs, _ = jax.jit(
        lambda *arrays: nsa_jax.compressed_attention(*arrays, config=SMALL, implementation=tested.implementation)
    )(arrays["query"], arrays["key_cmp"], one_hot)
    probs = np.asarray(probs)
    for t in range(case.T):
        seen = [i for i in range(num_cmp) if i * SMALL.compress_stride + SMALL.compress_block - 1 <= t]
        unseen = sorted(set(range(num_cmp)) - set(seen))
        assert (probs[:, t][..., unseen] == 0).all()
        assert (probs[:, t][..., seen] > 0).all()
        np.testing.assert_allclose(probs[:, t].sum(-1), 1.0 if seen else 0.0, atol=1e-6)


@pytest.mark.parametrize("packing", ["", "documents"])
def test_lists_hold_forced_blocks_in_order_without_future_blocks(tested, packing):
    case = Case("lists", T=130, N=2, K=2, packing=packing)
    _, lists, _ = run(case, tested.implementation)
    start = np.zeros((case.B, case.T), int) if not packing else np.asarray(case.segment_start())
    width, num_blocks = SMALL.select_block, -(-case.T // SMALL.select_block)
    for b in range(case.B):
        for t in range(case.T):
            first, last = start[b, t] // width, t // width
            for row in lists[b, t]:
                listed = row[row < num_blocks]
                assert (np.diff(listed) > 0).all() and (row[len(listed) :] == num_blocks).all()
                assert len(listed) == min(SMALL.num_selected, last - first + 1)
                assert listed.min() >= first and listed.max() == last, "the query's own block must be listed"
                assert first in listed and max(first, last - 1) in listed


def test_ties_go_to_the_lower_index(tested):
    """Equal keys give equal probabilities; block 0 and blocks at the edge of visibility weigh less."""
    length = 160
    query = jnp.ones((1, length, 1, 16))
    key_cmp = jnp.ones((1, blocks.num_compressed(length, SMALL), 1, 16))

    @jax.jit
    def select(query, key_cmp, start):
        common = dict(config=SMALL, segment_start=start, implementation=tested.implementation)
        _, lse = nsa_jax.compressed_attention(query, key_cmp, key_cmp, **common)
        return nsa_jax.select_blocks(query, key_cmp, lse, **common)

    start = jnp.zeros((1, length), jnp.int32)
    np.testing.assert_array_equal(select(query, key_cmp, start)[0, -1, 0], [0, 1, 8, 9])
    # Block 5 scores less than 6: the compressed block that reaches into it from token 76 is of the document before.
    start = start.at[:, -1].set(4 * 16 + 14)
    np.testing.assert_array_equal(select(query, key_cmp, start)[0, -1, 0], [4, 6, 8, 9])


def test_without_compressed_blocks_the_forced_blocks_are_listed(tested):
    lists = jax.jit(
        lambda query, key_cmp, lse: nsa_jax.select_blocks(
            query, key_cmp, lse, config=NSAConfig(32, 2, 32, 3, 1, 1, 4), implementation=tested.implementation
        )
    )(jnp.ones((1, 16, 1, 16)), jnp.ones((1, 0, 1, 16)), jnp.full((1, 16, 1), -jnp.inf))
    np.testing.assert_array_equal(lists[0, :, 0], [[0, 1, 1]] * 16)


def test_reads_counted_from_the_lists_are_what_the_branch_reads(tested):
    """Value gradients of one query are non-zero exactly at the tokens its list names: counted, not computed."""
    case = Case("reads", T=150, N=2, K=1, B=1, packing="documents")
    arrays = case.inputs()
    _, lists, _ = run(case, tested.implementation)
    start = np.asarray(case.segment_start())[0]

    @jax.jit
    def read_by(t):
        def attend(value):
            out = nsa_jax.selected_attention(
                arrays["query"], arrays["key_slc"], value, jnp.asarray(lists), select_block=SMALL.select_block,
                segment_start=case.segment_start(), implementation=tested.implementation,
            )  # fmt: skip
            return out[0, t].sum()

        return jnp.abs(jax.grad(attend)(arrays["value_slc"])[0]).sum((1, 2)) > 0

    for t in (0, 20, 74, 111, 149):
        tokens = [p for j in lists[0, t, 0] for p in range(j * 16, j * 16 + 16) if j < 10 and start[t] <= p <= t]
        np.testing.assert_array_equal(np.flatnonzero(read_by(t)), tokens)
        assert len(tokens) <= SMALL.num_selected * SMALL.select_block
    assert len(tokens) < 150 - start[149] or start[149] > 86


def test_a_packed_document_equals_the_document_alone(tested):
    """The documents begin at multiples of l', so their blocks are the same alone and packed."""
    first, second = 48, 45
    case = Case("packed", T=first + second, N=4, K=2, B=1)
    arrays = case.inputs()
    start = jnp.where(jnp.arange(case.T) < first, 0, first)[None].astype(jnp.int32)
    packed, lists = _forward(case, tested, segment_start=start)(arrays)
    for begin, end in ((0, first), (first, first + second)):
        alone_case = Case("alone", T=end - begin, N=4, K=2, B=1)
        part = {
            name: array[:, : blocks.num_compressed(end - begin, SMALL)] if "cmp" in name else array[:, begin:end]
            for name, array in arrays.items()
        }
        alone, alone_lists = _forward(alone_case, tested)(part)
        np.testing.assert_allclose(packed[:, begin:end], alone, rtol=0, atol=2e-6)
        shifted = np.where(alone_lists < -(-(end - begin) // 16), alone_lists + begin // 16, -(-case.T // 16))
        np.testing.assert_array_equal(lists[:, begin:end], shifted)
    whole, _ = _forward(case, tested)(arrays)
    assert np.abs(np.asarray(whole - packed)[:, first:]).max() > 1e-2, "without segment_start documents must mix"


def test_a_document_ignores_its_neighbours_wherever_it_begins(tested):
    """Document starts off every block boundary: nothing before a document reaches it, bit for bit."""
    case, begin = Case("neighbours", T=93, N=4, K=2, B=1), 43
    arrays = case.inputs()
    other = Case("strangers", T=93, N=4, K=2, B=1).inputs()
    start = jnp.where(jnp.arange(case.T) < begin, 0, begin)[None].astype(jnp.int32)
    forward = _forward(case, tested, segment_start=start)
    changed = {
        name: array if "cmp" in name else array.at[:, :begin].set(other[name][:, :begin])
        for name, array in arrays.items()
    }
    (before, before_lists), (after, after_lists) = jax.device_get((forward(arrays), forward(changed)))
    np.testing.assert_array_equal(after[:, begin:], before[:, begin:])
    np.testing.assert_array_equal(after_lists[:, begin:], before_lists[:, begin:])
    assert (after[:, :begin] != before[:, :begin]).any()


@pytest.mark.parametrize("traced", [False, True], ids=["int", "traced"])
def test_chunks_with_an_offset_equal_the_whole_row(tested, traced):
    case = Case("chunks", T=75, N=4, K=2, packing="documents")
    arrays = case.inputs()
    whole, whole_lists = _forward(case, tested)(arrays)
    keys = {
        f"{name}_cmp": nsa_jax.mean_compress(arrays[f"{name}_slc"] + arrays[f"{name}_win"], config=SMALL)
        for name in ("key", "value")
    }
    size = 25

    def chunk(part, segment_start, offset):
        return nsa_jax.nsa_attention(
            **part,
            config=SMALL,
            segment_start=segment_start,
            query_offset=offset,
            implementation=tested.implementation,
            return_block_indices=True,
        )

    chunk = jax.jit(chunk, static_argnums=() if traced else (2,))
    for offset in range(0, case.T, size):
        rows = slice(offset, offset + size)
        part = {**arrays, **keys, "query": arrays["query"][:, rows], "gates": arrays["gates"][:, rows]}
        out, lists = chunk(part, case.segment_start()[:, rows], offset)
        np.testing.assert_allclose(out, whole[:, rows], rtol=0, atol=2e-6)
        np.testing.assert_array_equal(lists, whole_lists[:, rows])


def test_mean_compress_is_the_mean_of_each_block():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 37, 2, 4)), jnp.float32)
    out = nsa_jax.mean_compress(x, config=SMALL)
    assert out.shape == (2, 8, 2, 4)
    for i in range(8):
        np.testing.assert_allclose(out[:, i], x[:, 4 * i : 4 * i + 8].mean(1), atol=1e-6)
    assert nsa_jax.mean_compress(x[:, :7], config=SMALL).shape == (2, 0, 2, 4)


def test_fold_weights_are_the_papers():
    np.testing.assert_array_equal(blocks.fold_weights(NSAConfig()), [1, 2, 2, 2, 1])


def test_oracle_sees_no_future():
    """The oracle is judged by the same gate as what it judges."""
    case = Case("oracle", T=55, N=2, K=1, B=1)
    arrays = {name: np.asarray(array) for name, array in case.inputs().items()}
    changed = {name: array.copy() for name, array in arrays.items()}
    for name in ("key_slc", "value_slc", "key_win", "value_win"):
        changed[name][:, 31:] += 1
    for name in ("key_cmp", "value_cmp"):
        changed[name][:, 6:] += 1  # block 6 covers tokens 24 to 31
    before, after = oracle.nsa(arrays, SMALL), oracle.nsa(changed, SMALL)
    np.testing.assert_array_equal(before["out"][:, :31], after["out"][:, :31])
    assert (before["out"][:, 31:] != after["out"][:, 31:]).any()
