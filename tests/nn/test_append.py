"""The kernels that write a token into the cache against the plain operations."""

from __future__ import annotations

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import nsa_jax
from nsa_jax import nn
from nsa_jax.nn import cache as caches
from nsa_jax.ops import decode_tiles
from nsa_jax.ops.rope import RopeScaling

pytestmark = pytest.mark.usefixtures("quick_compilation")

GEOMETRY = nsa_jax.NSAConfig(compress_block=8, compress_stride=4, select_block=8, num_selected=4, window=12)
# Positions of the new token: the first; in the middle; ends of the first and a later block; the last; beyond the cache.
LENGTHS = np.asarray([0, 5, 7, 30, 43, 63, 64, 67], np.int32)
YARN = RopeScaling("yarn", 4.0, 16)
MODELS = {
    "mlp_group_6": dict(num_heads=6, num_kv_heads=1, head_dim=32, value_head_dim=16),
    "mlp_group_1": dict(num_heads=2, num_kv_heads=2, head_dim=16),
    "biased": dict(num_heads=4, num_kv_heads=2, head_dim=16, qkv_bias=True, rotary_dim=8, rope_scaling=YARN),
    "shared_kv": dict(num_heads=4, num_kv_heads=2, head_dim=16, value_head_dim=32, qkv_bias=True, shared_kv=True),
    "key_dim_192": dict(num_heads=2, num_kv_heads=1, head_dim=192, value_head_dim=128),
}
MEANS = {
    "mean_group_4": dict(num_heads=8, num_kv_heads=2, head_dim=16, compressor="mean"),
    "shared_kv_mean": dict(num_heads=4, num_kv_heads=2, head_dim=16, compressor="mean", shared_kv=True),
}


def build(changes, implementation):
    fields = dict(dim=24, mlp_dim=8, nsa=GEOMETRY, compute_dtype="float32", init_std=0.3) | changes
    config = nn.ModelConfig(implementation=implementation, **fields)
    attention = nn.NSAttention(config, rngs=nnx.Rngs(0))
    attention.gate_bias[...] = jax.random.normal(jax.random.key(1), attention.gate_bias.shape)
    if config.qkv_bias:
        attention.b_in[...] = jax.random.normal(jax.random.key(4), attention.b_in.shape)
    if config.compressor == "mlp":
        phis = (attention.compress_key, attention.compress_value) if config.selector == "compressed" else ()
        for index, phi in enumerate(phis):
            phi.b_1[...] = jax.random.normal(jax.random.key(2 + index), phi.b_1.shape)
    return attention


@pytest.mark.parametrize("name", MODELS)
def test_kernels_write_what_the_plain_operations_write(name):
    """Query, gates and every array of the cache, where blocks end, where they do not, and where the row is full."""
    attention = build(MODELS[name], "pallas")
    keys = iter(jax.random.split(jax.random.key(3), 20))
    shapes = caches._layer_shapes(attention.config, LENGTHS.size, 64, lists=False)
    layer = jax.tree.map(lambda s: jax.random.normal(next(keys), s.shape, s.dtype), shapes)
    h = jax.random.normal(next(keys), (LENGTHS.size, 1, 24), jnp.float32)
    assert caches._append_by_kernels(attention, layer, LENGTHS.size)

    @jax.jit
    def both(h, layer, lengths):
        return [f(attention, h, layer, lengths) for f in (caches._append_nsa_kernels, caches._append_nsa)]

    got, want = both(h, layer, jnp.asarray(LENGTHS))
    chex.assert_trees_all_close(got, want, atol=2e-5, rtol=2e-5)
    for written in (got[2], want[2]):  # full rows
        chex.assert_trees_all_equal(*(jax.tree.map(lambda x: x[6:], arrays) for arrays in (written, layer)))
    changed = [np.abs(np.asarray(got[2].key_cmp[b] - layer.key_cmp[b])).sum() > 0 for b in range(LENGTHS.size)]
    assert changed == [False, False, True, False, True, True, False, False]


def poisoned(layer, lengths, geometry):
    """The layer's cache with NaN in every place that a new token will take in the first rows, which are not full."""
    rows = np.arange(len(lengths))
    arrays = {
        name: array.at[rows, lengths % array.shape[1]].set(jnp.nan)
        for name, array in layer._asdict().items()
        if array is not None and name not in ("key_cmp", "value_cmp", "lists")
    }
    first = lengths + 1 - geometry.compress_block
    ends = (first >= 0) & (first % geometry.compress_stride == 0)
    index = first[ends] // geometry.compress_stride
    for name in ("key_cmp", "value_cmp"):
        arrays[name] = getattr(layer, name).at[rows[ends], index].set(jnp.nan)
    return layer._replace(**arrays)


def many_blocks(monkeypatch, pairs: int = 0):
    """Rows count as such of many blocks; from so many pairs on, one kernel serves them."""
    monkeypatch.setattr(decode_tiles, "DECODE_FEW_COMPRESSED", 0)
    monkeypatch.setattr(decode_tiles, "DECODE_LONG_PAIRS", pairs)


KERNELS = {"pair": [1, 2, 4], "long": [1], "short": [1], "step": [1, 4]}  # and how many programs share a pair


@pytest.mark.parametrize(("kernel", "parts"), [(kernel, parts) for kernel in KERNELS for parts in KERNELS[kernel]])
@pytest.mark.parametrize("name", MEANS)
def test_a_step_by_kernels_is_a_step_of_plain_operations(name, kernel, parts, monkeypatch):
    """Output and every array of the cache; rows in later documents, and full ones, whose output means nothing."""
    chosen, fields = decode_tiles.decode_config, dict(pair_parts=parts, pair_keys=32)
    if kernel == "step":
        fields |= dict(keys=16 // parts, compressed_parts=parts, window_parts=1)
    monkeypatch.setattr(decode_tiles, "DECODE_PAIRS", 0 if kernel in ("pair", "long") else 1 << 30)
    monkeypatch.setattr(decode_tiles, "DECODE_READ_BYTES", 0 if kernel == "step" else 1 << 30)
    if kernel == "long":
        many_blocks(monkeypatch)
    monkeypatch.setattr(decode_tiles, "decode_config", lambda *args: dataclasses.replace(chosen(*args), **fields))
    layers = [build(MEANS[name], implementation) for implementation in ("pallas", "xla")]
    keys = iter(jax.random.split(jax.random.key(3), 20))
    shapes = caches._layer_shapes(layers[0].config, LENGTHS.size, 64, lists=False)
    layer = jax.tree.map(lambda s: jax.random.normal(next(keys), s.shape, s.dtype), shapes)
    layer = layer._replace(
        lists=jnp.zeros((LENGTHS.size, 64, layer.key_slc.shape[2], GEOMETRY.num_selected), jnp.int32)
    )
    h = jax.random.normal(next(keys), (LENGTHS.size, 1, 24), jnp.float32)
    start = jnp.asarray([0, 3, 0, 17, 41, 0, 0, 0], jnp.int32)

    @jax.jit
    def both(h, layer, lengths):
        return [caches.step_attention(attention, h, layer, lengths, start, 64) for attention in layers]

    planned = caches._decode_plan(layers[0], layer, LENGTHS.size).kernel
    assert planned == f"decode.{'pair' if kernel == 'long' else kernel}"
    (got, written), (want, expected) = both(h, layer, jnp.asarray(LENGTHS))
    chex.assert_trees_all_close(got[:6], want[:6], atol=2e-5, rtol=2e-5)
    chex.assert_trees_all_close(written, expected, atol=2e-5, rtol=2e-5)
    full = [jax.tree.map(lambda x: x[6:], arrays._replace(lists=None)) for arrays in (written, layer)]
    chex.assert_trees_all_equal(*full)
    # A program that shares a pair may find the new token's slots as they were or as another program left them.
    for found in (poisoned(layer, LENGTHS[:6], GEOMETRY), written):
        chex.assert_trees_all_equal(both(h, found, jnp.asarray(LENGTHS))[0], (got, written))


@pytest.mark.parametrize("kernel", ["pair", "short", "step"])
def test_the_newest_block_does_not_show_in_the_one_before(kernel, monkeypatch):
    """Tiles are wider than blocks of 12 keys, and a program may find NaN where another one writes the token."""
    chosen = decode_tiles.decode_config
    monkeypatch.setattr(decode_tiles, "DECODE_PAIRS", 0 if kernel == "pair" else 1 << 30)
    monkeypatch.setattr(decode_tiles, "DECODE_READ_BYTES", 0 if kernel == "step" else 1 << 30)
    monkeypatch.setattr(decode_tiles, "decode_config", lambda *args: dataclasses.replace(chosen(*args), pair_parts=4))
    geometry = dataclasses.replace(GEOMETRY, select_block=12)
    layers = [
        build(MEANS["shared_kv_mean"] | dict(nsa=geometry), implementation) for implementation in ("pallas", "xla")
    ]
    lengths = np.asarray([24, 36, 39, 48, 60, 71], np.int32)
    keys = iter(jax.random.split(jax.random.key(3), 20))
    shapes = caches._layer_shapes(layers[0].config, lengths.size, 72, lists=False)
    layer = jax.tree.map(lambda s: jax.random.normal(next(keys), s.shape, s.dtype), shapes)
    h = jax.random.normal(next(keys), (lengths.size, 1, 24), jnp.float32)

    @jax.jit
    def step(layer):
        start = jnp.zeros_like(lengths)
        return [caches.step_attention(attention, h, layer, jnp.asarray(lengths), start, 72) for attention in layers]

    assert caches._decode_plan(layers[0], layer, lengths.size).kernel == f"decode.{kernel}"
    got, want = step(layer)
    chex.assert_trees_all_close(got, want, atol=2e-5, rtol=2e-5)
    chex.assert_trees_all_equal(step(poisoned(layer, lengths, geometry))[0], got)


@pytest.mark.gpu
@pytest.mark.parametrize("parts", [1, 2, 4, 0])
@pytest.mark.parametrize("shared", [False, True])
def test_gpu_a_step_in_one_kernel(shared, parts, monkeypatch):
    """The cache is bit-equal whichever kernels attend; outputs differ by rounding and do not from call to call."""
    config = nn.ModelConfig(
        dim=64, num_heads=12, num_kv_heads=2, head_dim=64, compressor="mean", shared_kv=shared, init_std=0.3,
        compute_dtype="bfloat16", implementation="pallas",
    )  # fmt: skip
    attention = nn.NSAttention(config, rngs=nnx.Rngs(0))
    lengths = jnp.asarray([0, 31, 511, 1000, 1007, 2047, 2048], jnp.int32)
    keys = iter(jax.random.split(jax.random.key(3), 20))
    shapes = caches._layer_shapes(config, lengths.size, 2048, lists=False)
    layer = jax.tree.map(lambda s: jax.random.normal(next(keys), s.shape, s.dtype), shapes)
    h = jax.random.normal(next(keys), (lengths.size, 1, 64), jnp.bfloat16)
    start = jnp.asarray([0, 0, 3, 700, 0, 0, 0], jnp.int32)
    chosen, fields = decode_tiles.decode_config, dict(pair_parts=parts or 1)
    monkeypatch.setattr(decode_tiles, "decode_config", lambda *args: dataclasses.replace(chosen(*args), **fields))

    def step(pairs, layer=layer):
        monkeypatch.setattr(decode_tiles, "DECODE_PAIRS", pairs)
        if not parts:
            many_blocks(monkeypatch, pairs)
        run = jax.jit(lambda h, layer: caches.step_attention(attention, h, layer, lengths, start, 2048))
        return jax.tree.map(lambda x: np.asarray(x, np.float32), run(h, layer))

    (out, written), (want, expected) = step(0), step(1 << 30)  # the latter by other kernels
    chex.assert_trees_all_equal(written, expected)
    assert np.linalg.norm(out[:6] - want[:6]) < 4e-3 * np.linalg.norm(want[:6])
    again = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), written)
    for found in (layer, again, poisoned(layer, np.asarray(lengths[:6]), config.nsa)):
        chex.assert_trees_all_equal(step(0, found), (out, written))
        chex.assert_trees_all_equal(step(1 << 30, found), (want, expected))


def test_plain_operations_serve_where_kernels_cannot():
    layer = caches._layer_shapes(build(MODELS["mlp_group_1"], None).config, 8, 64, lists=False)
    assert not caches._append_by_kernels(build(MODELS["mlp_group_1"], None), layer, 8)  # no GPU
    assert not caches._append_by_kernels(build(MODELS["mlp_group_1"], "xla"), layer, 8)
    assert not caches._append_by_kernels(build(dict(MODELS["mlp_group_1"], qk_norm=True), "pallas"), layer, 8)
    assert not caches._append_by_kernels(build(dict(MODELS["mlp_group_1"], selector="mean_key"), "pallas"), layer, 8)
    odd = build(dict(num_heads=2, num_kv_heads=2, head_dim=24), "pallas")
    assert not caches._append_by_kernels(odd, caches._layer_shapes(odd.config, 8, 64, lists=False), 8)  # head dim 24
    grid = np.asarray(jax.devices()[:2]).reshape(2, 1)
    mesh = jax.sharding.Mesh(grid, ("data", "fsdp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    with jax.set_mesh(mesh):
        assert not caches._append_by_kernels(build(MODELS["mlp_group_1"], "pallas"), layer, 8)
