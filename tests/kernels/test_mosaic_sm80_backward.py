"""Values of the backward of the A100 prototype in benchmarks/mosaic_sm80.py without a GPU: its PTX, emulated."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from nsa_jax.ops import reference
from nsa_jax.ops.kernels.softmax import LOG2E, NO_WEIGHT
from tests.kernels import ptx
from tests.kernels import test_mosaic_sm80 as forward

if jax.__version_info__ < (0, 11):
    pytest.skip("the prototype needs JAX 0.11, whose plgpu has Layout.MMA_ACC", allow_module_level=True)

from benchmarks.mosaic_sm80_parts import DIM  # noqa: E402
from benchmarks.mosaic_sm80_tiles import KeyVariant, Variant  # noqa: E402

TOLERANCE = 1e-2  # of the largest gradient
# As in the forward's test: the last tile sees two whole blocks of 64 keys and a part of the third.
BATCH, LENGTH, HEADS, KV_HEADS, GROUP = (
    forward.BATCH,
    forward.LENGTH,
    forward.HEADS,
    forward.KV_HEADS,
    forward.GROUP,
)
VARIANTS = {
    variant.name: variant
    for variant in (
        Variant(row_tiles=2, warpgroups=1, keys=32, stages=1),
        Variant(row_tiles=2, warpgroups=2, keys=32, stages=2, at_once=16),
        Variant(row_tiles=1, warpgroups=2, keys=64, stages=2),
    )
}
# The 159 keys do not fill the last block. The query tiles of a block are split over `SPLITS` programs.
SPLITS = 3
KEY_VARIANTS = {
    variant.name: variant
    for variant in (
        KeyVariant(warpgroups=2, rows=64, stages=2, at_once=64, programs=SPLITS * 2 * KV_HEADS * BATCH),
        KeyVariant(warpgroups=1, rows=32, stages=3, at_once=16, programs=SPLITS * 3 * KV_HEADS * BATCH),
        KeyVariant(warpgroups=1, rows=64, stages=2, at_once=32, held=True, programs=SPLITS * 3 * KV_HEADS * BATCH),
    )
}

COMPILE = """
import functools, sys
from jax.experimental.mosaic.gpu import utils
from benchmarks.mosaic_sm80_dkv import key_value_gradients
from benchmarks.mosaic_sm80_dq import query_gradient
from nsa_jax.aot import compile_for_gpu
from tests.kernels import test_mosaic_sm80_backward as test

utils._infer_arch = lambda: (8, 0)
variant = (test.VARIANTS | test.KEY_VARIANTS)[sys.argv[1]]
gradient = query_gradient if sys.argv[1] in test.VARIANTS else key_value_gradients
function = functools.partial(gradient, config=test.forward.CONFIG, variant=variant)
compile_for_gpu(function, *test.shapes(), gpu="a100-80gb")
"""


def shapes() -> list[jax.ShapeDtypeStruct]:
    """Query, keys, values, log-sum-exp, delta and the output's gradient."""
    query, key, value = forward.shapes()
    row = jax.ShapeDtypeStruct(query.shape[:3], jnp.float32)
    return [query, key, value, row, row, query]


@functools.cache
def problem() -> tuple[list[np.ndarray], np.ndarray, list[np.ndarray]]:
    """Query, keys, values and the output's gradient; minus the log-sum-exp and delta; the gradients in float32.

    The second is [B, K, T * N / K, 2], the others have the shapes of the op.
    """
    generator = np.random.default_rng(0)
    sizes = *forward.SHAPES, forward.SHAPES[0]
    inputs = [generator.normal(size=shape).astype(ml_dtypes.bfloat16) for shape in sizes]
    query, key, value, grad_out = (jnp.asarray(x, jnp.float32) for x in inputs)
    attend = functools.partial(reference.compressed_attention, config=forward.CONFIG)
    (out, lse), pull = jax.vjp(attend, query, key, value)
    wanted = [np.asarray(x) for x in pull((grad_out, jnp.zeros_like(lse)))]
    lse = jnp.where(lse == -jnp.inf, NO_WEIGHT, lse * LOG2E)
    pairs = np.stack([-lse, (out * grad_out).sum(-1)], -1).reshape(BATCH, LENGTH, KV_HEADS, GROUP, 2)
    pairs = np.ascontiguousarray(pairs.swapaxes(1, 2), np.float32)
    for x in (*inputs, pairs):
        x.flags.writeable = False
    return inputs, pairs, wanted


def as_bytes(*arrays: np.ndarray) -> list[np.ndarray]:
    return [x.reshape(-1).view(np.uint8) for x in arrays]


@pytest.mark.parametrize("name", VARIANTS)
def test_emulated_gradients_of_queries_match_the_reference(name, tmp_path):
    variant = VARIANTS[name]
    text = forward.compiled(COMPILE, name, tmp_path)
    (query, key, value, grad_out), pairs, (wanted, _, _) = problem()
    tiles = LENGTH * GROUP // variant.rows
    shared_bytes = 2 * (variant.rows + variant.stages * variant.keys) * DIM * 2
    for tile, kv_head, batch in ((0, 0, 1), (tiles // 2, 1, 0), (tiles - 1, 1, 1)):
        out = np.full(query.shape, np.nan, ml_dtypes.bfloat16)
        # The kernel's parameters are in the order of their first use. Late tiles go first.
        used = (value, pairs, key) if variant.stages == 1 else (value, key, pairs)
        buffers = as_bytes(query, grad_out, *used, out)
        emulator = ptx.Emulator(text, (batch, kv_head, tiles - 1 - tile), buffers, shared_bytes)
        emulator.run()
        assert emulator.bank_conflicts == 0

        tokens, heads = np.divmod(np.arange(tile * variant.rows, (tile + 1) * variant.rows), GROUP)
        heads += kv_head * GROUP
        got, want = out[batch, tokens, heads].astype(np.float32), wanted[batch, tokens, heads]
        np.testing.assert_allclose(got, want, rtol=0, atol=TOLERANCE * np.abs(want).max())
        out[batch, tokens, heads] = np.nan
        assert np.isnan(out.astype(np.float32)).all(), "wrote outside of its tile"


@pytest.mark.parametrize("name", KEY_VARIANTS)
def test_emulated_gradients_of_keys_and_values_match_the_reference(name, tmp_path):
    variant = KEY_VARIANTS[name]
    text = forward.compiled(COMPILE, name, tmp_path)
    (query, key, value, grad_out), pairs, (_, *wanted) = problem()
    held = 0 if variant.held else 2 * variant.keys
    shared_bytes = (held + 2 * variant.stages * variant.rows) * DIM * 2 + variant.stages * variant.rows * 8
    for block, kv_head, batch in ((0, 1, 0), (-(-forward.KEYS // variant.keys) - 1, 0, 1)):
        shares = [np.full((SPLITS, *key.shape), np.nan, np.float32) for _ in range(2)]
        buffers = as_bytes(key, value, pairs, query, grad_out, *shares)
        for split in range(SPLITS):
            emulator = ptx.Emulator(text, (batch, kv_head, block * SPLITS + split), buffers, shared_bytes)
            emulator.run()
            assert emulator.bank_conflicts == 0

        own = np.arange(block * variant.keys, min((block + 1) * variant.keys, forward.KEYS))
        for share, gradient in zip(shares, wanted, strict=True):
            got, want = share[:, batch, own, kv_head].sum(0), gradient[batch, own, kv_head]
            np.testing.assert_allclose(got, want, rtol=0, atol=TOLERANCE * np.abs(want).max())
            share[:, batch, own, kv_head] = np.nan
            assert np.isnan(share).all(), "wrote outside of its block"
