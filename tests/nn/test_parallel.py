"""Layers under a mesh whose axes split tokens and heads: the numbers and gradients of one device, and no look ahead."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from nsa_jax import NSAConfig, nsa_attention
from nsa_jax.nn import DenseAttention, ModelConfig, NSAttention, Transformer, layers
from nsa_jax.nn.decoder import Decoder
from nsa_jax.nn.sharding import MESH_AXES
from nsa_jax.nn.transformer import Block
from nsa_jax.ops import blocks
from nsa_jax.ops.rope import RopeScaling
from tests.nn.test_model_options import OPTIONS, fill

# 48 tokens in shares of 12: every cut goes through a window of 20, which reaches over two shares, and a compressed
# block of 8; two of three cuts go through a selection block.
NSA = NSAConfig(
    compress_block=8, compress_stride=4, select_block=8, num_selected=4, num_initial=1, num_local=2, window=20
)
CONFIG = ModelConfig(
    dim=32, num_heads=4, num_kv_heads=2, head_dim=16, vocab_size=50, num_layers=2, mlp_dim=48, nsa=NSA, init_std=0.1,
    compute_dtype="float32", implementation="xla",
)  # fmt: skip
LENGTH = 48


def mesh_of(**sizes):
    shape = [sizes.get(axis, 1) for axis in MESH_AXES]
    return Mesh(np.asarray(jax.devices()[: np.prod(shape)]).reshape(shape), MESH_AXES, axis_types=(AxisType.Auto,) * 4)


def layer_outputs(layer, x, segment_start, mesh=None):
    """Output of a layer, and the gradients of its parameters and input."""
    graphdef, params = nnx.split(layer)

    @jax.jit
    def run(params, x, segment_start):
        def loss(params, x):
            out = nnx.merge(graphdef, params)(x, segment_start)
            return jnp.sum(jnp.sin(3 * out)), out

        (_, out), grads = jax.value_and_grad(loss, (0, 1), has_aux=True)(params, x)
        return out, grads

    if mesh is None:
        return run(params, x, segment_start)
    with jax.set_mesh(mesh):
        return run(params, x, segment_start)


def inputs(batch=2):
    x = jax.random.normal(jax.random.key(1), (batch, LENGTH, CONFIG.dim))
    starts = np.where(np.arange(LENGTH) >= 21, 21, 0)
    return x, jnp.asarray(np.stack([starts, np.zeros(LENGTH)])[:batch], jnp.int32)


def make_layer(attention="nsa", **changes):
    config = dataclasses.replace(CONFIG, attention=attention, **changes)
    return fill((NSAttention if attention == "nsa" else DenseAttention)(config, rngs=nnx.Rngs(0)))


@functools.cache
def truth(attention, packed):
    x, segment_start = inputs()
    layer = make_layer(attention, implementation="reference")
    return layer_outputs(layer, x, segment_start if packed else None)


@pytest.mark.parametrize(
    ("implementation", "packed", "mesh"),
    [
        ("xla", True, dict(context=4, tensor=2)),
        ("xla", False, dict(fsdp=2, context=4)),
        ("pallas", False, dict(context=4, tensor=2)),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value) if isinstance(value, dict) else str(value),
)
def test_nsa_on_shares_of_tokens_and_heads(implementation, packed, mesh):
    layer = make_layer(implementation=implementation)
    x, segment_start = inputs()
    got = layer_outputs(layer, x, segment_start if packed else None, mesh_of(**mesh))
    chex.assert_trees_all_close(got, truth("nsa", packed), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("packed", [True, False])
def test_shared_keys_and_values_on_shares_of_tokens_and_heads(packed):
    """The window reads what was fetched for the selected branch."""
    x, segment_start = inputs()
    start = segment_start if packed else None
    want = layer_outputs(make_layer(implementation="reference", shared_kv=True), x, start)
    got = layer_outputs(make_layer(shared_kv=True), x, start, mesh_of(context=4, tensor=2))
    chex.assert_trees_all_close(got, want, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("window", [38, 44, 100])
@pytest.mark.parametrize("attention", ["nsa", "window"])
def test_windows_that_reach_over_all_tokens_before_a_share(attention, window):
    """A device fetches at most the tokens of all others, which may be fewer than those before its own in a window."""
    x, segment_start = inputs()
    options = dict(nsa=dataclasses.replace(NSA, window=window))
    make = functools.partial(make_layer, attention, **options)
    want = layer_outputs(make(implementation="reference"), x, segment_start)
    for mesh in (dict(context=4), dict(context=2)):
        chex.assert_trees_all_close(
            layer_outputs(make(), x, segment_start, mesh_of(**mesh)), want, atol=2e-5, rtol=1e-4
        )


@pytest.mark.parametrize("attention", ["dense", "window"])
def test_dense_and_window_layers_on_shares_of_tokens_and_heads(attention):
    layer = make_layer(attention)
    x, segment_start = inputs()
    for packed in (True, False):
        got = layer_outputs(layer, x, segment_start if packed else None, mesh_of(context=4, tensor=2))
        chex.assert_trees_all_close(got, truth(attention, packed), atol=2e-5, rtol=1e-4)


def test_a_segment_start_before_the_row_means_0_on_every_device():
    layer, (x, start) = make_layer("window"), inputs()
    want = layer_outputs(layer, x, start * 0)
    got = layer_outputs(layer, x, start * 0 - 3, mesh_of(context=4))
    chex.assert_trees_all_close(got, want, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("attention", ["nsa", "dense"])
@pytest.mark.parametrize("scaling", [OPTIONS["rope_scaling"], RopeScaling("dynamic", 4.0, 16)], ids=["yarn", "dynamic"])
def test_layers_with_norms_biases_and_scaled_rope_on_shares_of_tokens_and_heads(attention, scaling):
    options = OPTIONS | dict(rope_scaling=scaling)
    x, segment_start = inputs()
    want = layer_outputs(make_layer(attention, implementation="reference", **options), x, segment_start)
    got = layer_outputs(make_layer(attention, **options), x, segment_start, mesh_of(context=4, tensor=2))
    chex.assert_trees_all_close(got, want, atol=3e-5, rtol=1e-4)


@pytest.mark.parametrize("attention", ["nsa", "dense", "window"])
def test_tokens_after_t_change_nothing_up_to_t_on_any_device(attention):
    config = dataclasses.replace(CONFIG, attention=attention, num_layers=1)
    graphdef, params = nnx.split(Transformer(config, rngs=nnx.Rngs(0)))
    run = jax.jit(lambda params, tokens: nnx.merge(graphdef, params)(tokens))
    tokens = jax.random.randint(jax.random.key(1), (2, LENGTH), 0, CONFIG.vocab_size)
    with jax.set_mesh(mesh_of(context=4, tensor=2)):
        before = run(params, tokens)
        for t in (0, 10, 11, 12, 23, 24, 31, 35, 46):  # around the cuts at 12, 24 and 36
            after = run(params, tokens.at[:, t + 1 :].set((tokens[:, t + 1 :] + 1) % CONFIG.vocab_size))
            chex.assert_trees_all_equal(before[:, : t + 1], after[:, : t + 1])
            assert bool((before[:, t + 1 :] != after[:, t + 1 :]).any())


@pytest.mark.parametrize(
    "mesh", [dict(data=2, fsdp=2, context=2), dict(context=4, tensor=2), dict(data=8)], ids="-".join
)
def test_kernels_of_norms_and_swiglu_on_shares_of_tokens(monkeypatch, mesh):
    """Forced, and interpreted here. A batch of 4 cannot be split by data=8: every device then has all of it."""
    config = dataclasses.replace(CONFIG, dim=64, mlp_dim=64, attention="dense")
    x = jax.random.normal(jax.random.key(1), (4, LENGTH, config.dim))
    block = Block(config, rngs=nnx.Rngs(0))
    block.norm_mlp.scale[...] = jax.random.uniform(jax.random.key(2), (config.dim,), minval=0.5, maxval=2.0)
    want = layer_outputs(block, x, None)
    monkeypatch.setattr(layers, "layer_kernels_serve", lambda width: width % 64 == 0)
    got = layer_outputs(block, x, None, mesh_of(**mesh))
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.linalg.norm(a - b) <= 3e-6 * np.linalg.norm(b), jax.tree_util.keystr(path)


@pytest.mark.parametrize("attention", ["nsa", "dense"])
@pytest.mark.parametrize("split", [False, True])
def test_models_on_a_mesh_with_explicit_axes(attention, split):
    """Such a mesh is what jax.make_mesh gives unless it is asked for another. The decoder says what to do."""
    model = Transformer(dataclasses.replace(CONFIG, attention=attention), rngs=nnx.Rngs(0))
    graphdef, params = nnx.split(model)
    tokens = jax.random.randint(jax.random.key(0), (4, LENGTH), 0, 50)

    @jax.jit
    def loss_and_gradients(params, tokens):
        return jax.value_and_grad(lambda params: (nnx.merge(graphdef, params)(tokens) ** 2).mean())(params)

    want = jax.device_get(loss_and_gradients(params, tokens))
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        given = jax.device_put(tokens, NamedSharding(mesh, PartitionSpec("data" if split else None)))
        got = jax.device_get(loss_and_gradients(params, given))
        with pytest.raises(ValueError, match="explicit axes.*AxisType.Auto"):
            Decoder(model).init_cache(4, 64)
    chex.assert_trees_all_close(got, want, atol=2e-5, rtol=1e-4)


def test_rows_that_cannot_be_split_are_computed_whole():
    graphdef, params = nnx.split(NSAttention(CONFIG, rngs=nnx.Rngs(0)))
    run = jax.jit(lambda params, x: nnx.merge(graphdef, params)(x))
    for length in (36, 47):  # shares of 9 are no multiple of the compress stride; 47 tokens have no equal shares
        x = inputs()[0][:1, :length]
        want = run(params, x)
        with jax.set_mesh(mesh_of(fsdp=2, context=4)):
            chex.assert_trees_all_close(run(params, x), want, atol=1e-5)


def test_the_layers_fetch_what_they_say():
    """A layer's forward pass, traced: halos of compressed blocks, windows of two hops, mirrored halves, gathers."""
    graphdef, params = nnx.split(NSAttention(CONFIG, rngs=nnx.Rngs(0)))
    x, _ = inputs()
    with jax.set_mesh(mesh_of(context=4, tensor=2)):
        text = str(jax.make_jaxpr(lambda params, x: nnx.merge(graphdef, params)(x))(params, x))
    assert text.count("ppermute[") == 2 + 2 * 2 + 6  # query, gates, key, value; output and block lists
    gathered = sorted(line.split(":")[1].split("=")[0].strip() for line in text.splitlines() if "all_gather[" in line)
    # [B, T / d, K / 2, H] of the compressed branch and [B, T, K / 2, H] of the selected one: one head per device.
    assert gathered == ["f32[2,12,1,16]"] * 2 + ["f32[2,48,1,16]"] * 2


@pytest.mark.gpu
@pytest.mark.parametrize("packed", [False, True])
def test_the_kernels_serve_a_share_of_the_queries_with_a_window_of_their_own(packed):
    """What one device of a context axis computes, at the real geometry, against whole rows: outputs and gradients."""
    config, length, first, halo = NSAConfig(), 8192, 4096 + 1024, 511
    keys = iter(jax.random.split(jax.random.key(0), 10))
    draw = lambda *shape: jax.random.normal(next(keys), (1, *shape), jnp.bfloat16)  # noqa: E731
    count = blocks.num_compressed(length, config)
    compressed, selected, window = ((draw(n, 2, 64), draw(n, 2, 64)) for n in (count, length, length))
    query, gates = draw(length, 12, 64), jax.nn.sigmoid(draw(length, 12, 3))
    cotangent = draw(length, 12, 64).at[:, :first].set(0).at[:, first + 2048 :].set(0)
    starts = jnp.where(jnp.arange(length) >= 3000, 3000, 0)[None] if packed else None

    @jax.jit
    def whole(query, gates, compressed, selected, window):
        common = dict(config=config, segment_start=starts, implementation="pallas")
        out = nsa_attention(query, *compressed, *selected, *window, gates, **common)
        return jnp.sum(out.astype(jnp.float32) * cotangent), out[:, first : first + 2048]

    @jax.jit
    def share(query, gates, compressed, selected, window, offset):
        mine = lambda x, begin=first: jax.lax.slice_in_dim(x, begin, first + 2048, axis=1)  # noqa: E731
        out = nsa_attention(
            mine(query), *compressed, *selected, *(mine(x, first - halo) for x in window), mine(gates),
            config=config, segment_start=None if starts is None else mine(starts), implementation="pallas",
            query_offset=offset, window_start=offset - halo,
        )  # fmt: skip
        return jnp.sum(out.astype(jnp.float32) * mine(cotangent)), out

    arrays = (query, gates, compressed, selected, window)
    grad = functools.partial(jax.value_and_grad, argnums=(0, 1, 2, 3, 4), has_aux=True)
    (_, want), want_grads = grad(whole)(*arrays)
    (_, got), got_grads = grad(share)(*arrays, jnp.int32(first))
    pairs = zip(jax.tree.leaves((want, want_grads)), jax.tree.leaves((got, got_grads)), strict=True)
    for one, other in pairs:
        one, other = (np.asarray(x, np.float32) for x in (one, other))
        assert np.linalg.norm(one - other) <= 1e-2 * np.linalg.norm(one)
