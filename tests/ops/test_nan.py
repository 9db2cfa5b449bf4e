"""NaN, infinity and any other bits in queries, keys and scores: lists stay lists, and no row spoils another."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nsa_jax
from nsa_jax import NSAConfig
from nsa_jax.ops import blocks
from nsa_jax.ops.implementations import IMPLEMENTATIONS
from tests.decode.test_decode_attention import SERVING, decode, filled_cache
from tests.decode.test_decode_attention import SMALL as SMALL_CACHE
from tests.ops import poison
from tests.ops.cases import BY_NAME, ON_GPU

pytestmark = pytest.mark.filterwarnings("ignore:.*interpret mode")


@functools.cache
def _attention(case, implementation):
    """nsa_attention of a case's arrays: (output, block lists) as NumPy arrays."""
    attend = functools.partial(
        nsa_jax.nsa_attention, **case.kwargs(), implementation=implementation, return_block_indices=True
    )
    compiled = jax.jit(lambda arrays: attend(**arrays))
    return lambda arrays: jax.device_get(compiled(arrays))


@pytest.mark.parametrize("which", poison.TOP_N)
@pytest.mark.parametrize("name", [*poison.CLASSES, "any"])
def test_scores_of_any_bits_give_full_ascending_lists(which, name):
    rng = np.random.default_rng([ord(c) for c in which + name])
    for names in [[name], ["zero", "normal", name]] if name != "any" else [list(poison.CLASSES)] * 4:
        assert not poison.top_n_fault(rng, which, names), names


@pytest.mark.parametrize(
    "classes", [["zero", "normal"], ["normal", "nan", "negative_nan", "negative"]], ids=["numbers", "nan"]
)
def test_all_implementations_rank_scores_alike(classes):
    config, rows, num_blocks = NSAConfig(16, 16, 16, 7), 16, 200
    rng = np.random.default_rng(len(classes))
    position = np.arange(3000, 3000 + rows, dtype=np.int32)
    start = np.where(rng.random(rows) < 0.5, 0, 1500).astype(np.int32)
    scores = poison.draw_bits(rng, (rows, 256), classes)
    want = poison.top_n_of_formulas(scores, position, start, config, num_blocks)
    training = poison.top_n_of_training(scores[None], position, start, config, num_blocks)
    decoding = poison.top_n_of_decoding(scores, position, start, config, num_blocks)
    np.testing.assert_array_equal(training, want)
    np.testing.assert_array_equal(decoding, want)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("bits", [0x7FFFFFFF, 0xFFC00000, 0x7F800000, 0xFF800000], ids=hex)
@pytest.mark.parametrize("name", ["query", "key_cmp"])
def test_a_nan_or_infinity_spoils_only_what_reads_it(implementation, bits, name):
    """The lists of all queries are full; queries that do not read the poisoned vector get what they got before."""
    case = BY_NAME["group_2_packed"]
    arrays = case.inputs()
    attend = _attention(case, implementation)
    clean, _ = attend(arrays)
    value = jnp.asarray(np.uint32(bits).view(np.float32))
    t, start = np.arange(case.T), np.asarray(case.segment_start())
    low, high = blocks.compressed_range(t, start[1], case.config)
    token, block = 50, int(low[np.argmax(high - low)])
    place = (1, token, 2) if name == "query" else (1, block, 1)
    out, lists = attend({**arrays, name: arrays[name].at[place].set(value)})
    num_blocks = blocks.num_selection_blocks(case.S, case.config.select_block)
    assert not poison.list_fault(lists, t[:, None], start[:, :, None], num_blocks, case.config)
    reads = np.zeros((case.B, case.T, case.N), bool)
    if name == "query":
        reads[1, token, 2:] = True  # the heads of a group share the list
        assert np.isnan(out[1, token, 2]).all()
    else:
        reads[1, :, 2:] = ((low <= block) & (block < high))[:, None]
        assert reads.any() and np.isnan(out[reads]).all()
    assert np.isfinite(out[~reads]).all()
    if implementation == "pallas":  # a tile's shared blocks depend on all of its lists, and the order of sums on them
        np.testing.assert_allclose(out[~reads], clean[~reads], rtol=1e-3 if ON_GPU else 1e-5, atol=1e-5)
    else:
        np.testing.assert_array_equal(out[~reads], clean[~reads])


@pytest.mark.parametrize("serving", SERVING)
@pytest.mark.parametrize("bits", [0x7FFFFFFF, 0xFFC00000, 0x7F800000], ids=hex)
def test_a_nan_query_spoils_only_its_own_row_of_a_batch_that_decodes(serving, bits):
    lengths = np.array([150, 61, 150], np.int32)
    (query, *cache, gates, lengths), _, last = filled_cache(SMALL_CACHE, lengths, capacity=192)
    value = jnp.asarray(np.uint32(bits).view(np.float32))
    clean, _ = decode((query, *cache, gates, lengths), config=SMALL_CACHE, serving=serving)
    poisoned = query.at[0, 0, 1].set(value)
    out, info = decode((poisoned, *cache, gates, lengths), config=SMALL_CACHE, serving=serving)
    assert np.isnan(out[0, 0, 1]).all()
    np.testing.assert_array_equal(out[1:], clean[1:])
    lists, t = np.asarray(info.block_indices), last[..., None]
    assert not poison.list_fault(lists, t, np.zeros_like(t), 192 // SMALL_CACHE.select_block, SMALL_CACHE)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_poisoned_lse_gives_full_lists(implementation):
    case = BY_NAME["group_2_packed"]
    arrays, start = case.inputs(), case.segment_start()
    rng = np.random.default_rng(1)
    num_blocks = blocks.num_selection_blocks(case.S, case.config.select_block)
    select = jax.jit(
        lambda lse: nsa_jax.select_blocks(
            arrays["query"], arrays["key_cmp"], lse, config=case.config, segment_start=start,
            implementation=implementation,
        )
    )  # fmt: skip
    for _ in range(3):
        lse = poison.draw_bits(rng, (case.B, case.T, case.N), list(poison.CLASSES))
        lists = select(jnp.asarray(lse))
        fault = poison.list_fault(lists, np.arange(case.T)[:, None], start[:, :, None], num_blocks, case.config)
        assert not fault


@pytest.mark.gpu
@pytest.mark.parametrize("which", poison.TOP_N)
def test_gpu_scores_of_any_bits_give_full_ascending_lists(which):
    rng = np.random.default_rng(len(which))
    for names in [[name] for name in poison.CLASSES] + [poison.draw_classes(rng) for _ in range(20)]:
        assert not poison.top_n_fault(rng, which, names), names


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [(16, 1, 128), (6, 1, 64)], ids=str)
@pytest.mark.parametrize("packed", [False, True])
def test_gpu_long_rows_with_nan_give_full_lists(heads, packed):
    """8,192 tokens, bfloat16, forward and backward: NaN and infinity in queries and keys."""
    (num_heads, num_kv, dim), length, config = heads, 8192, NSAConfig()
    num_blocks = blocks.num_selection_blocks(length, config.select_block)
    arrays, start = poison.long_rows(1, length, num_heads, num_kv, dim, packed=packed)

    @jax.jit
    def run(arrays):
        def loss(arrays):
            out, lists = nsa_jax.nsa_attention(
                **arrays, config=config, segment_start=start, implementation="pallas", return_block_indices=True
            )
            return out.astype(jnp.float32).sum(), (out, lists)

        return jax.grad(loss, has_aux=True)(arrays)

    t, begin = np.arange(length)[:, None], np.zeros((1, length, 1), int) if start is None else start[:, :, None]
    after_key = {"query": [(0, 8191, 0)], "key_cmp": [(0, 250, 0)]}
    for places, first in (({"query": [(0, 3000, 1)]}, 3000), (after_key, 250 * 16 + 31)):
        gradients, (out, lists) = jax.device_get(run(poison.poisoned(arrays, places)))
        assert not poison.list_fault(lists, t, begin, num_blocks, config)
        assert np.isnan(out[places["query"][0]].astype(np.float32)).all()
        assert np.isfinite(out[:, :first].astype(np.float32)).all()
        assert gradients["query"].dtype == jnp.bfloat16


@pytest.mark.gpu
def test_gpu_decoding_of_nan_gives_full_lists():
    config, lengths = NSAConfig(), np.array([8192, 65, 5000], np.int32)
    arrays = poison.long_cache(lengths, 8192, 16, 1, 128)
    step = jax.jit(
        lambda arrays: nsa_jax.decode_attention(**arrays, config=config, implementation="pallas", return_info=True)
    )
    for places in ({}, {"query": [(0, 0, 3)]}, {"query": [(2, 0, 0)], "key_cmp": [(0, 100, 0)]}):
        out, info = jax.device_get(step(poison.poisoned(arrays, places)))
        t = lengths[:, None, None] - 1
        num_blocks = blocks.num_selection_blocks(8192, config.select_block)
        assert not poison.list_fault(info.block_indices, t, np.zeros_like(t), num_blocks, config)
        spoiled = {row for where in places.values() for row, *_ in where}
        assert np.isfinite(out[[row for row in range(3) if row not in spoiled]].astype(np.float32)).all()
        for place in places.get("query", ()):
            assert np.isnan(out[place].astype(np.float32)).all()
