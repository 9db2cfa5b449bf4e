"""A decode step's products with weights by kernels for few rows."""

from __future__ import annotations

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import nsa_jax
from nsa_jax import aot, nn
from nsa_jax.nn import few_rows
from nsa_jax.nn.decoder import Decoder
from nsa_jax.nn.transformer import Transformer
from nsa_jax.ops import decode_tiles, pallas
from nsa_jax.ops.target import Target

pytestmark = pytest.mark.usefixtures("quick_compilation")

A100, H100, L40S = (Target("gpu", capability) for capability in ((8, 0), (9, 0), (8, 9)))


def operands(rows, inner, width, key=0):
    keys = jax.random.split(jax.random.key(key))
    x = 3 * jax.random.normal(keys[0], (rows, inner), jnp.bfloat16)
    return x, inner**-0.5 * jax.random.normal(keys[1], (inner, width), jnp.bfloat16)


def in_float32(x, w, gated):
    out = np.asarray(x, np.float32) @ np.asarray(w, np.float32)
    left, right = np.split(out, 2, axis=1)
    return left / (1 + np.exp(-left)) * right if gated else out


# Widths that tiles divide, and such whose last tile overlaps the one before.
@pytest.mark.parametrize("rows", [1, 5, 16, 33, 64])
@pytest.mark.parametrize(("inner", "width"), [(128, 96), (192, 1072), (640, 208)])
def test_products_are_those_of_float32(rows, inner, width):
    x, w = operands(rows, inner, width)
    for gated in (False, True):
        want = in_float32(x, w, gated)
        got = pallas.product(x, w, gated=gated)
        assert got.dtype == jnp.bfloat16 and got.shape == want.shape
        np.testing.assert_allclose(np.asarray(got, np.float32), want, rtol=2**-8, atol=1e-4)  # rounded once
    parts = pallas.product(x, w, in_parts=True)
    assert parts.shape[1:] == (rows, width) and parts.dtype == jnp.float32
    np.testing.assert_allclose(parts.sum(0), in_float32(x, w, False), rtol=1e-5, atol=1e-4)


def test_how_products_are_divided():
    def divided(inner, width, target=H100, rows=16, **kinds):
        made = decode_tiles.product_config(
            rows, inner, width, **dict(gated=False, in_parts=False) | kinds, target=target
        )
        return made.columns, made.inner, made.parts, made.num_stages

    assert divided(768, 1072) == (16, 128, 1, 6)
    assert divided(768, 2432, gated=True) == (32, 128, 1, 6)
    assert divided(768, 768, in_parts=True) == (32, 128, 3, 6)  # six steps: two for each
    assert divided(2432, 768, in_parts=True) == (32, 128, 4, 6)
    assert divided(4096, 4096, in_parts=True) == (64, 128, 2, 6)
    assert divided(192, 768, in_parts=True) == (32, 64, 3, 6)  # no part without a step
    assert divided(64, 64) == (16, 64, 1, 6)
    wide = dict(inner=4096, width=14336, gated=True, rows=40)  # as many as 64
    assert [divided(**wide, target=target)[1::2] for target in (H100, A100, L40S)] == [(128, 4), (128, 3), (64, 3)]
    for target in (H100, A100, L40S):
        columns, inner, _, stages = divided(**wide, target=target)
        assert stages * inner * 2 * (64 + 2 * columns) <= target.shared_memory


MODELS = {
    "shared_kv": dict(compressor="mean", shared_kv=True),
    "separate": dict(compressor="mlp", out_bias=True),
    "biased": dict(qkv_bias=True, qk_norm=True),
    "dense": dict(attention="dense", qkv_bias=True),
    "pattern": dict(layer_pattern=("nsa", "dense"), compressor="mean", shared_kv=True),
}
GEOMETRY = nsa_jax.NSAConfig(compress_block=8, compress_stride=4, select_block=16, num_selected=3, window=12)


@pytest.mark.parametrize("copies", [1, 16])
def test_the_stream_and_its_norm(copies):
    """Sums in float32, rounded once; a single row's parts are added to all of its copies."""
    keys = jax.random.split(jax.random.key(0), 4)
    rows = 16 if copies > 1 else 3
    x = jax.random.normal(keys[0], (rows, 192), jnp.bfloat16)
    parts = jax.random.normal(keys[1], (3, rows // copies, 192))
    bias, scale = jax.random.normal(keys[2], (2, 192))
    for given in ({}, {"parts": parts}, {"parts": parts, "bias": bias}):
        total = np.asarray(x, np.float32) + sum(np.asarray(given["parts"], np.float64)) if "parts" in given else x
        total = total + np.asarray(given["bias"], np.float64) if "bias" in given else total
        added, normed = pallas.add_and_norm(x, given.get("parts"), given.get("bias"), scale, eps=1e-3)
        assert added.dtype == normed.dtype == jnp.bfloat16
        np.testing.assert_allclose(np.asarray(added, np.float32), np.asarray(total, np.float32), rtol=2**-8, atol=1e-6)
        wide = np.asarray(added, np.float32)
        want = wide / np.sqrt((wide**2).mean(1, keepdims=True) + 1e-3) * scale
        np.testing.assert_allclose(np.asarray(normed, np.float32), want, rtol=2**-8, atol=1e-6)


def decoder_of(model, **changes):
    """The model's decoder with its config changed."""
    other = Transformer(dataclasses.replace(model.config, **changes), rngs=nnx.Rngs(0))
    nnx.update(other, nnx.state(model))
    return Decoder(other)


def decoded(model, dtype, implementation, tokens, steps=3):
    """Logits [steps, B, vocab] of steps behind a prompt, which plain operations process."""
    plain, decoder = (decoder_of(model, compute_dtype=dtype, implementation=i) for i in ("xla", implementation))
    _, cache = plain.prefill(plain.init_cache(len(tokens), 64), tokens[:, :-steps])
    out = []
    for step in range(steps):
        logits, cache = decoder.decode(cache, tokens[:, step - steps])
        out.append(logits)
    return np.asarray(jnp.stack(out))


@pytest.mark.parametrize(
    ("name", "batch"),
    [("shared_kv", 1), ("shared_kv", 3), ("separate", 3), ("biased", 1), ("dense", 3), ("pattern", 1)],
)
def test_a_step_with_kernels_is_as_exact_as_without(name, batch, monkeypatch):
    """Against float32: no further from it than the same model in bfloat16 whose products are the compiler's."""
    config = nn.ModelConfig(
        vocab_size=97, dim=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=32, mlp_dim=128, nsa=GEOMETRY,
        compute_dtype="float32", init_std=0.1, **MODELS[name],
    )  # fmt: skip
    model = Transformer(config, rngs=nnx.Rngs(0))
    for path, leaf in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        if path[-1] in ("b_in", "b_out", "scale"):
            leaf[...] = leaf[...] + 0.1 * jax.random.normal(jax.random.key(len(path[-1])), leaf.shape)
    tokens = np.asarray(jax.random.randint(jax.random.key(1), (batch, 40), 0, 97))
    served = []
    forward = few_rows.forward

    def counted(*args):
        served.append(args)
        return forward(*args)

    monkeypatch.setattr(few_rows, "forward", counted)
    exact, plain = (decoded(model, dtype, "xla", tokens) for dtype in ("float32", "bfloat16"))
    assert not served
    kernels = decoded(model, "bfloat16", "pallas", tokens)
    assert len(served) == 2  # one trace of two layers
    apart, bound = (np.linalg.norm(x - exact) / np.linalg.norm(exact) for x in (kernels, plain))
    assert apart < 1.1 * bound < 0.02, (apart, bound)


def test_what_kernels_do_not_serve_is_left_to_the_compiler():
    def serves(batch=2, **changes):
        config = nn.ModelConfig(
            **dict(
                vocab_size=97, dim=64, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=32, mlp_dim=64,
                compute_dtype="bfloat16", implementation="pallas",
            ) | changes
        )  # fmt: skip
        return few_rows.serves(nn.transformer.Block(config, rngs=nnx.Rngs(0)), batch)

    assert serves() and serves(batch=64)
    assert not serves(batch=65)
    assert not serves(implementation="xla") and not serves(implementation=None)  # None: kernels on GPUs alone
    assert not serves(compute_dtype="float32") and not serves(mlp_bias=True) and not serves(matmul_dtype="float8")
    assert not serves(mlp_dim=96) and not serves(dim=80, num_heads=5)
    with jax.set_mesh(jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))):
        assert not serves()


@pytest.mark.parametrize("gpu", ["a100-80gb", "h100", "l40s", "b200"])
def test_kernels_compile_ahead_of_time(gpu):
    """With the most rows, and as wide as models of 8B."""
    rows, inner, width = 64, 4096, 14336
    x, up, down = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((rows, inner), (inner, 2 * width), (width, inner)))
    scale = jax.ShapeDtypeStruct((inner,), jnp.float32)

    def mlp(x, scale, up, down):
        x, normed = pallas.add_and_norm(x, None, None, scale, eps=1e-6)
        parts = pallas.product(pallas.product(normed, up, gated=True), down, in_parts=True)
        return pallas.add_and_norm(x, parts, None, scale, eps=1e-6)

    try:
        text = aot.compile_for_gpu(mlp, x, scale, up, down, gpu=gpu).as_text()
    except aot.AheadOfTimeUnavailable as error:
        pytest.skip(str(error))
    assert all(name in text for name in ("nsa_decode_product", "nsa_decode_norm"))


@pytest.mark.gpu
@pytest.mark.parametrize(("inner", "width"), [(768, 1072), (2432, 768), (2048, 5632), (64, 64)])
def test_gpu_products(inner, width):
    for rows in (1, 7, 16, 40, 64):
        x, w = operands(rows, inner, 2 * width)
        want = in_float32(x, w, True)
        got = [pallas.product(x, w, gated=True) for _ in range(3)]
        np.testing.assert_allclose(np.asarray(got[0], np.float32), want, rtol=2**-8, atol=1e-3)
        chex.assert_trees_all_equal(*got)
        parts = [pallas.product(x, w, in_parts=True) for _ in range(3)]
        np.testing.assert_allclose(parts[0].sum(0), in_float32(x, w, False), rtol=1e-4, atol=1e-3)
        chex.assert_trees_all_equal(*parts)
