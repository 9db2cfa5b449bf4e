"""Block selection's kernels against the reference, interpreted on the CPU and, where there is one, on a GPU."""

from __future__ import annotations

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nsa_jax
from nsa_jax.config import NSAConfig
from nsa_jax.ops import blocks, pallas, reference
from nsa_jax.ops import tiles as tuning
from nsa_jax.ops.kernels.selection import scores_sm90, top_n
from nsa_jax.ops.kernels.selection.fold import Fold

pytestmark = pytest.mark.usefixtures("quick_compilation")

SMALL = NSAConfig(compress_block=16, compress_stride=8, select_block=32, num_selected=4, num_initial=1, num_local=1)


def make_inputs(*, batch=1, length=200, num_keys=None, num_kv=1, group=2, h_dim=16, config=SMALL, offset=0,
                dtype=jnp.float32, documents=False, seed=0):  # fmt: skip
    """Random arguments of select_blocks, as (arrays, keywords); the log-sum-exp is the reference's."""
    rng = np.random.default_rng(seed)
    num_keys = num_keys or length + offset
    num_cmp = blocks.num_compressed(num_keys, config)
    query = jnp.asarray(rng.normal(size=(batch, length, num_kv * group, h_dim)), dtype)
    key = jnp.asarray(rng.normal(size=(batch, num_cmp, num_kv, h_dim)), dtype)
    start = None
    if documents:
        cuts = np.sort(rng.integers(0, num_keys, (batch, 1, 3)), axis=-1)
        t = np.arange(length)[None, :, None] + offset
        start = jnp.asarray(np.where(cuts <= t, cuts, 0).max(-1), jnp.int32)
    lse = reference.compressed_attention(query, key, key, config=config, segment_start=start, query_offset=offset)[1]
    return (query, key, lse), dict(config=config, num_keys=num_keys, segment_start=start, query_offset=offset)


CASES = {
    "group_1": dict(group=1, length=170),
    "group_3_documents": dict(group=3, num_kv=2, batch=2, length=150, documents=True),
    "group_16_bfloat16": dict(group=16, dtype=jnp.bfloat16, length=140),
    "head_dim_192": dict(h_dim=192, length=90),
    "offset_and_spare_keys": dict(length=77, offset=301, num_keys=500),
    "one_query": dict(length=1, offset=411, group=4),
    "paper_blocks": dict(config=NSAConfig(num_selected=5), length=100, offset=1100),
    "no_compressed_block": dict(config=NSAConfig(), length=10),
    "stride_is_block_48": dict(config=NSAConfig(16, 16, 48, 4, 1, 2), length=200, documents=True, offset=100),
    "all_blocks_alike": dict(config=NSAConfig(16, 16, 16, 8, 1, 2), length=300, num_kv=2),
    "all_forced": dict(config=NSAConfig(16, 8, 32, 4, 2, 2), length=250),
    "wide_support": dict(config=NSAConfig(64, 2, 64, 3, 1, 2), length=300, documents=True),
    "several_key_tiles": dict(config=NSAConfig(8, 4, 8, 5, 2, 2), length=64, offset=996, num_keys=2100, documents=True),
}


@pytest.mark.parametrize("name", CASES)
def test_lists_equal_the_reference(name):
    arrays, keywords = make_inputs(**CASES[name])
    got = pallas.select_blocks(*arrays, **keywords)
    assert got.dtype == jnp.int32
    chex.assert_trees_all_equal(got, reference.select_blocks(*arrays, **keywords))


def test_ties_go_to_the_lower_index():
    """Identical compressed keys: inner blocks tie exactly, so the free places go to the first of them."""
    (query, key, _), keywords = make_inputs(length=400, config=SMALL)
    key = jnp.broadcast_to(key[:, :1], key.shape)
    lse = reference.compressed_attention(query, key, key, config=SMALL)[1]
    got = pallas.select_blocks(query, key, lse, **keywords)
    chex.assert_trees_all_equal(got, reference.select_blocks(query, key, lse, **keywords))
    np.testing.assert_array_equal(got[0, 399, 0], [0, 1, 2, 12])


TOP_N = NSAConfig(compress_block=16, compress_stride=8, select_block=16, num_selected=7, num_initial=1, num_local=2)
TOP_N_BLOCKS, TOP_N_ROWS = 1000, 16


@functools.cache
def call_top_n(packed):
    """Compiled once for all rows: which of their blocks are candidates is known when the program runs."""
    common = dict(batch=1, num_kv=1, length=TOP_N_ROWS, config=TOP_N, num_blocks=TOP_N_BLOCKS)
    return jax.jit(lambda where, scores, start: top_n.block_lists(where, scores, start if packed else None, **common))


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("candidates", [5, 127, 128, 130, 257, 300, 384, 385, 600, 700, 800, 896, 900, 1000])
def test_top_n_of_rows_of_every_width(candidates, ties):
    """Rows are read up to a multiple of 128 blocks, in up to three parts."""
    config, num_blocks, rows = TOP_N, TOP_N_BLOCKS, TOP_N_ROWS
    assert top_n.row_widths(num_blocks, config.num_selected) == list(range(128, 1025, 128))
    rng = np.random.default_rng(candidates)
    scores = rng.uniform(size=(1, 2, rows, 1032)).astype(np.float32)
    if ties:  # few values, and the sums of two planes exact: many blocks score alike
        scores = np.round(scores * 4) / 4
    position = candidates * config.select_block - rows + jnp.arange(rows, dtype=jnp.int32)
    start = jnp.maximum(position[-1:] // 3 if ties else 0, 0) * jnp.ones_like(position)
    where = jnp.asarray([position[0], 0], jnp.int32)
    got = call_top_n(ties)(where, jnp.asarray(scores), start[None])
    importance = scores[0, 0, :, :num_blocks] + scores[0, 1, :, 1 : num_blocks + 1]
    want = blocks.select_from_importance(jnp.asarray(importance), position, start, config)
    np.testing.assert_array_equal(got[0, :, 0], want)


@pytest.mark.parametrize("documents", [False, True])
def test_query_ranges_that_do_not_fit_the_buffer(documents, monkeypatch):
    """A buffer of one query tile: the ranges are processed one after the other, with a traced offset."""
    choose = tuning.select_config
    monkeypatch.setattr(tuning, "select_config", lambda *a: dataclasses.replace(choose(*a), chunk_bytes=1))
    arrays, keywords = make_inputs(batch=2, length=150, offset=60, num_kv=2, documents=documents)
    offset, config, num_keys = (keywords.pop(name) for name in ("query_offset", "config", "num_keys"))
    call = jax.jit(lambda o, **k: pallas.select_blocks(*arrays, config=config, num_keys=num_keys, query_offset=o, **k))
    want = reference.select_blocks(*arrays, config=config, num_keys=num_keys, query_offset=offset, **keywords)
    chex.assert_trees_all_equal(call(jnp.int32(offset), **keywords), want)


@pytest.mark.parametrize(
    "config", [NSAConfig(), SMALL, NSAConfig(16, 16, 48), NSAConfig(16, 16, 16), NSAConfig(32, 8, 32)]
)
def test_hopper_key_order_folds_like_the_reference(config):
    """Weighted sums of equal slices of the arranged keys, own[j] + head[j + 1], are the fold into selection blocks."""
    fold = Fold.of(config)
    num_cmp, num_blocks = 150, 20
    probs = np.random.default_rng(0).uniform(size=num_cmp).astype(np.float32)
    key = np.arange(num_cmp, dtype=np.float32)[None, :, None, None]  # each key holds its own index
    arranged = np.asarray(scores_sm90.arrange_keys(key, fold, num_blocks + 1))[0, :, 0, 0].astype(int)
    row = np.arange(len(arranged))
    width = 128 // fold.padded
    column = scores_sm90._column(row, row // 128 * width + row % width, fold)
    inside = (column >= 0) & (column < num_cmp)
    np.testing.assert_array_equal(arranged[inside], column[inside])
    members = (
        np.where(inside, probs[arranged], 0).reshape(-1, fold.padded, width).swapaxes(0, 1).reshape(fold.padded, -1)
    )
    weights = np.zeros((2, fold.padded))
    weights[0, : fold.per_block] = fold.weights[: fold.per_block]
    weights[1, : fold.reach] = fold.weights[fold.per_block :]
    own, head = weights @ members
    want = blocks.fold_importance(jnp.asarray(probs), num_blocks, config)
    np.testing.assert_allclose(own[:num_blocks] + head[1 : num_blocks + 1], want, rtol=1e-6)


def test_too_many_blocks_are_refused():
    (query, key, lse), keywords = make_inputs(length=20)
    keywords["num_keys"] = 40_000 * SMALL.select_block
    with pytest.raises(NotImplementedError, match="40000 selection blocks: the kernels support at most 32768"):
        nsa_jax.select_blocks(query, key, lse, **keywords, implementation="pallas")


def disagreements(scores, got, want) -> int:
    """Rows whose lists differ by more than a swap of blocks that score alike within 1e-5.

    scores: importance [..., J] of the rows; got, want: lists [..., n].
    """
    padded = np.pad(np.asarray(scores, np.float64), [(0, 0)] * (scores.ndim - 1) + [(0, 1)])
    got, want = np.asarray(got), np.asarray(want)
    bad = 0
    for index in np.argwhere((got != want).any(-1)):
        row = tuple(index)
        only_got = sorted(padded[row][list(set(got[row].tolist()) - set(want[row].tolist()))])
        only_want = sorted(padded[row][list(set(want[row].tolist()) - set(got[row].tolist()))])
        alike = len(only_got) == len(only_want) and np.allclose(only_got, only_want, rtol=1e-5, atol=0)
        ascending = (np.diff(got[row]) >= 0).all()
        bad += not (alike and ascending)
    return bad


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("shape", [(64, 4, 128), (12, 2, 64), (16, 1, 192), (6, 6, 16)])
def test_gpu_lists_equal_the_reference(shape, documents, dtype):
    num_heads, num_kv, h_dim = shape
    config = NSAConfig()
    arrays, keywords = make_inputs(
        batch=2, length=2000, num_kv=num_kv, group=num_heads // num_kv, h_dim=h_dim, config=config, dtype=dtype,
        documents=documents,
    )  # fmt: skip
    got = jax.jit(lambda *a: pallas.select_blocks(*a, **keywords))(*arrays)
    want = reference.select_blocks(*arrays, **keywords)
    keywords.pop("num_keys")
    num_blocks = blocks.num_selection_blocks(2000, config.select_block)
    scores = reference.importance(*arrays, num_blocks=num_blocks, **keywords)
    assert disagreements(scores, got, want) == 0
    chex.assert_trees_all_equal(got, jax.jit(lambda *a: pallas.select_blocks(*a, **keywords, num_keys=2000))(*arrays))
