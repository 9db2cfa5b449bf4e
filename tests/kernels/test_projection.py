"""The kernels that cut and rotate a fused projection and put its gradient together, and the layer that uses them."""

from __future__ import annotations

import collections
import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh

import nsa_jax
from nsa_jax import aot
from nsa_jax.nn import ModelConfig, NSAttention
from nsa_jax.nn.transformer import remat
from nsa_jax.ops.kernels.layer import projection
from nsa_jax.ops.rope import RopeScaling, rope, rope_turns
from nsa_jax.ops.target import Target, compile_for
from tests.kernels.hollow import hollow_kernels
from tests.ops.cases import ON_GPU, SMALL, relative_error

THETA = 10_000.0
# A GPU's compiler may compute the frequencies otherwise where it folds them: an ulp times the position.
ATOL = 5e-4 if ON_GPU else 3e-6


def plain(projected, positions, heads, kv_heads, head_dim, value_dim, shared=False):
    """What `split_projection` does, by slices, `rope` and transpositions."""
    batch, length = projected.shape[:2]
    widths = (heads * head_dim, *(kv_heads * head_dim, kv_heads * value_dim) * (1 if shared else 3), 3 * heads)
    pieces, at = [], 0
    for width in widths:
        pieces.append(projected[..., at : at + width])
        at += width

    def by_kv_head(piece, count, turned):
        x = piece.reshape(batch, length, count, -1)
        x = rope(x, positions, THETA) if turned else x
        x = x.reshape(batch, length, kv_heads, count // kv_heads, -1)
        return jnp.moveaxis(x, 2, 1).reshape(batch * kv_heads, length, count // kv_heads, -1)

    query = by_kv_head(pieces[0], heads, True)
    keys_values = pieces[1:-1] * (3 if shared else 1)
    others = [by_kv_head(piece, kv_heads, index in (2, 4)) for index, piece in enumerate(keys_values)]
    return projection.Pieces((query,) * 3, *others, pieces[-1])


def cut(projected, positions, heads, kv_heads, head_dim, value_dim, shared=False, **options):
    cos, sin = rope_turns(positions, head_dim, THETA)
    if positions.ndim == 1:
        cos, sin = cos[None], sin[None]
    sizes = dict(num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, value_dim=value_dim, shared_kv=shared)
    return projection.split_projection(projected, cos, sin, **sizes, **options)


# B, T, N, K, H, V, columns behind the logits
SHAPES = {
    "prod_heads": (2, 45, 12, 2, 64, 64, 28),
    "one_token": (2, 1, 2, 2, 32, 64, 0),
    "one_group_of_one": (1, 33, 1, 1, 16, 8, 5),
    "wide_values": (2, 70, 6, 2, 32, 64, 46),
    "narrow_values": (1, 64, 7, 1, 64, 32, 43),
    "dims_of_pieces": (2, 37, 4, 4, 96, 96, 52),
    "many_heads": (1, 19, 32, 4, 16, 16, 32),
    "long_tiles": (3, 130, 3, 1, 48, 24, 7),
}


@pytest.mark.usefixtures("quick_compilation")
# Where positions lie has nothing to do with the dtype.
@pytest.mark.parametrize(
    ("batched", "dtype"),
    [(False, jnp.float32), (True, jnp.bfloat16)],
    ids=["positions-float32", "positions_by_row-bfloat16"],
)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("shared", [False, True], ids=["own", "shared"])
def test_pieces_and_gradient_are_those_of_slices_rope_and_transpositions(shared, shape, batched, dtype):
    batch, length, *sizes, padding = shape
    heads, kv_heads, head_dim, value_dim = sizes
    width = heads * head_dim + (1 if shared else 3) * kv_heads * (head_dim + value_dim) + 3 * heads
    sizes.append(shared)
    rng = np.random.default_rng(length)
    projected = jnp.asarray(rng.normal(size=(batch, length, width + padding)), dtype)
    positions = jnp.arange(length, dtype=jnp.int32) + 3
    if batched:
        positions = jnp.stack([positions * (row + 1) for row in range(batch)])

    shapes = jax.eval_shape(lambda x: plain(x, positions, *sizes), projected)
    cotangents = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), dtype), shapes)

    @functools.partial(jax.jit, static_argnums=0)
    def run(way, projected, cotangents):
        pieces, pull = jax.vjp(lambda x: way(x, positions, *sizes), projected)
        return pieces, pull(cotangents)[0]

    wide = jax.tree.map(lambda x: x.astype(jnp.float32), (projected, cotangents))
    expected, expected_gradient = run(plain, *wide)
    pieces, gradient = run(cut, projected, cotangents)
    rounding = 2.0**-8 if dtype == jnp.bfloat16 else 0.0  # half a unit in the last place
    for name, got, want in zip(
        jax.tree.leaves(_names(expected)), *map(jax.tree.leaves, (pieces, expected)), strict=True
    ):
        assert got.dtype == dtype
        np.testing.assert_allclose(_wide(got), want, rtol=rounding, atol=ATOL, err_msg=name)
        if not name.startswith(("queries", "key_slc", "key_win")):
            np.testing.assert_array_equal(_wide(got), want, err_msg=name)
    assert gradient.dtype == dtype
    # Three gradients of the query are added before they are rounded; so are those of keys and values that are shared.
    np.testing.assert_allclose(_wide(gradient), expected_gradient, rtol=rounding, atol=ATOL)
    assert not np.asarray(gradient[..., width:]).any()
    if shared:
        return
    start, stop = heads * head_dim, heads * head_dim + kv_heads * (head_dim + value_dim)
    np.testing.assert_array_equal(_wide(gradient[..., start:stop]), expected_gradient[..., start:stop])


@pytest.mark.usefixtures("quick_compilation")
def test_gradients_of_a_window_that_has_none_are_not_read():
    sizes = 12, 2, 64, 64, True
    rng = np.random.default_rng(0)
    projected = jnp.asarray(rng.normal(size=(1, 33, 1088)), jnp.float32)
    joint, apart = (functools.partial(cut, joint_window=joint) for joint in (True, False))

    @functools.partial(jax.jit, static_argnums=0)
    def gradient(way, cotangents):
        return jax.vjp(lambda x: way(x, jnp.arange(33), *sizes), projected)[1](cotangents)[0]

    pieces = jax.eval_shape(lambda x: joint(x, jnp.arange(33), *sizes), projected)
    assert len(pieces.queries) == 2
    cotangents = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), pieces)
    zeros = {name: jnp.zeros_like(getattr(cotangents, name)) for name in ("key_win", "value_win")}
    queries = *cotangents.queries, jnp.zeros_like(cotangents.queries[0])
    got = gradient(joint, cotangents)
    np.testing.assert_array_equal(got, gradient(apart, cotangents._replace(queries=queries, **zeros)))
    assert np.abs(got - gradient(apart, cotangents._replace(queries=queries))).max() > 0.1


def _wide(x):
    return np.asarray(x, np.float32)


def _names(pieces):
    """The pieces' names in their place."""
    named = {name: name for name in pieces._fields if name != "queries"}
    return pieces._replace(queries=tuple(f"queries[{i}]" for i in range(3)), **named)


def test_turns_have_no_gradient():
    cos, sin = rope_turns(jnp.arange(5)[None], 16, THETA)
    sizes = dict(num_heads=1, num_kv_heads=1, head_dim=16, value_dim=16)
    x = jnp.ones((1, 5, 128))
    total = lambda cos, sin: projection.split_projection(x, cos, sin, **sizes).queries[0].sum()  # noqa: E731
    for gradient in jax.grad(total, (0, 1))(cos, sin):
        np.testing.assert_array_equal(gradient, np.zeros((1, 5, 8)))


# What layers return is kept, so that the kernel of the window stores the sum of all branches.
CONFIG = ModelConfig(dim=256, num_heads=12, num_kv_heads=2, head_dim=64, init_std=0.06, remat="dots_saved")


# Options that the kernels serve: a bias is added before the cut, and turns are whatever cosines and sines are given.
BIASED = dict(qkv_bias=True, out_bias=True, rotary_dim=8, rope_scaling=RopeScaling("yarn", 4.0, 16))

SHARED = dict(shared_kv=True, compressor="mean")


def layer_outputs(config, x, segment_start, positions):
    """Output, block lists and gradients (of all parameters and of x) of a layer with the given config."""
    layer = NSAttention(config, rngs=nnx.Rngs(0))
    layer.gate_bias[...] = jax.random.normal(jax.random.key(5), layer.gate_bias.shape)
    if config.qkv_bias:
        layer.b_in[...] = jax.random.normal(jax.random.key(6), layer.b_in.shape)
    graphdef, params = nnx.split(layer)
    weight = jax.random.normal(jax.random.key(3), x.shape)

    @jax.jit
    def run(params, x):
        def loss(params, x):
            out, lists = nnx.merge(graphdef, params)(x, segment_start, positions=positions, return_block_indices=True)
            return (out.astype(jnp.float32) * weight).sum(), (out, lists)

        (_, (out, lists)), gradients = jax.value_and_grad(loss, (0, 1), has_aux=True)(params, x)
        return out, lists, gradients

    return run(params, x)


def segments(batch, length, begin):
    starts = np.where(np.arange(length) < begin, 0, begin)
    return jnp.asarray(np.stack([starts, np.zeros(length)][:batch]), jnp.int32)


@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize(
    ("packed", "devices", "options"),
    [(False, 1, BIASED), (True, 1, {}), (True, 2, BIASED), (True, 2, BIASED | SHARED)],
    ids=["plain_biased", "packed_positions_by_row", "rows_split_biased", "rows_split_biased_shared"],
)
def test_a_layer_on_interpreted_kernels_equals_the_reference(packed, devices, options, monkeypatch):
    monkeypatch.setattr("nsa_jax.ops.plan.cuts_projection", lambda *args: True)
    sizes = dict(dim=32, num_heads=6, head_dim=16, value_head_dim=32, nsa=SMALL, init_std=0.1, **options)
    exact = dataclasses.replace(CONFIG, **sizes, compute_dtype="float32", implementation="reference")
    length = 61
    x = jax.random.normal(jax.random.key(1), (2, length, 32))
    start = segments(2, length, 31) if packed else None
    positions = jnp.stack([jnp.arange(length) + 40, jnp.arange(length)]) if packed else None
    config = dataclasses.replace(exact, implementation="pallas")
    with monkeypatch.context() as patch:
        patch.setattr(NSAttention, "project", None)  # it must not be needed
        nsa_jax.ops.implementations.forget_implementations_served()
        mesh = Mesh(np.asarray(jax.devices()[:devices]), ("fsdp",), axis_types=(AxisType.Auto,))
        with jax.set_mesh(mesh):
            got = layer_outputs(config, x, start, positions)
    served = ("compressed_attention", "select_blocks", "selected_attention", "window_attention")
    assert nsa_jax.implementations_served() == dict.fromkeys(served, "pallas")
    want = layer_outputs(exact, x, start, positions)
    np.testing.assert_array_equal(got[1], want[1])
    for (path, value), expected in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True):
        assert relative_error(value, expected) <= (1e-3 if ON_GPU else 1e-5), jax.tree_util.keystr(path)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("packed", "given", "num_selected"),  # lists of all blocks, and of the forced ones: no ties
    [(False, False, 16), (True, True, 3), (True, False, 16), (False, True, 3)],
    ids=["plain", "packed_positions_by_row_forced", "packed", "positions_by_row_forced"],
)
@pytest.mark.parametrize("options", [{}, SHARED], ids=["own", "shared"])
def test_a_layer_whose_projection_kernels_cut_equals_the_reference(options, packed, given, num_selected, monkeypatch):
    batch, length = 2, 650
    x = jax.random.normal(jax.random.key(1), (batch, length, CONFIG.dim), jnp.bfloat16)
    start = segments(batch, length, 301) if packed else None
    positions = jnp.stack([jnp.arange(length) + 40, jnp.arange(length)]) if given else None
    config = dataclasses.replace(CONFIG, nsa=nsa_jax.NSAConfig(num_selected=num_selected), **options)
    out, lists, gradients = layer_outputs(config, x, start, positions)
    assert nsa_jax.implementations_served()["selected_attention"] == "pallas"

    exact = dataclasses.replace(config, implementation="reference", compute_dtype="float32")
    want, want_lists, want_gradients = layer_outputs(exact, x.astype(jnp.float32), start, positions)
    np.testing.assert_array_equal(lists, want_lists)
    monkeypatch.setattr("nsa_jax.ops.projected.serves", lambda *args, **kwargs: False)
    other, _, other_gradients = layer_outputs(config, x, start, positions)

    # Weights, projections and sums of the reference are not rounded to bfloat16; those of the other path are, and
    # gradients that are small sums of large terms (biases) come out alike to that rounding only.
    assert relative_error(_wide(out), want) <= 1e-2
    assert relative_error(_wide(out), _wide(other)) <= 4e-3
    leaves = (jax.tree.leaves(tree) for tree in (want_gradients, other_gradients))
    for (path, got), expected, same in zip(jax.tree_util.tree_leaves_with_path(gradients), *leaves, strict=True):
        error, other_error = (relative_error(_wide(x), expected) for x in (got, same))
        assert error <= min(2e-2, 1.25 * other_error), (jax.tree_util.keystr(path), error, other_error)


def traced_layer(policy, scanned=False):
    """A loss of bfloat16 NSA layers under a remat policy, and shapes of its arguments."""
    config = dataclasses.replace(CONFIG, remat=policy)
    graphdef, params = nnx.split(jax.eval_shape(lambda: NSAttention(config, rngs=nnx.Rngs(0))))
    x = jax.ShapeDtypeStruct((2, 1024, CONFIG.dim), jnp.bfloat16)
    run = remat(lambda params, x: nnx.merge(graphdef, params)(x), policy, scanned=True)
    if scanned:
        params = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((3, *leaf.shape), leaf.dtype), params)

    def loss(params, x):
        if scanned:
            x, _ = jax.lax.scan(lambda x, params: (x + run(params, x), None), x, params)
        else:
            x = run(params, x)
        return x.astype(jnp.float32).sum()

    return loss, params, x


HOPPER, AMPERE = Target("gpu", (9, 0)), Target("gpu", (8, 0))


def kernels(policy, target):
    """How often (the kernel that cuts, the one that puts the gradient together) stand in a layer's gradient."""
    loss, *arguments = traced_layer(policy)
    with compile_for(target):
        text = str(jax.make_jaxpr(jax.grad(loss, (0, 1)))(*arguments))
    return tuple(len(re.findall(rf"\bname={projection.NAME}{suffix}\b", text)) for suffix in ("", "_gradient"))


@pytest.mark.parametrize(
    ("policy", "target", "expected"),
    [
        ("none", HOPPER, (1, 1)),
        ("dots_saved", HOPPER, (1, 1)),
        ("attention_saved", HOPPER, (2, 1)),
        ("block", HOPPER, (2, 1)),
        ("dots_saved", AMPERE, (0, 0)),
    ],
    ids=lambda value: f"sm{value.compute_capability[0]}0" if isinstance(value, Target) else str(value),
)
def test_the_projection_is_cut_again_where_its_parts_are_not_kept(policy, target, expected):
    assert kernels(policy, target) == expected


@pytest.mark.parametrize("policy", ["none", "dots_saved", "attention_saved", "block"])
def test_remat_policies_keep_the_projections_parts_once_or_not_at_all(policy):
    loss, *arguments = traced_layer(policy)
    with compile_for(HOPPER):
        saved = jax.eval_shape(lambda *arguments: jax.vjp(loss, *arguments)[1], *arguments)
    kept = collections.Counter(leaf.shape for leaf in jax.tree.leaves(saved) if leaf.size >= 2 * 1024)
    outputs = 0 if policy == "block" else 3  # of the branches
    parts = policy in ("none", "dots_saved")
    assert not any(1600 in shape[2:] for shape in kept)  # the whole projection
    assert kept[4, 1024, 6, 64] == outputs + parts  # the query, once
    # Four keys and values that attention reads, and two more that are compressed.
    assert kept[4, 1024, 1, 64] == {"none": 4, "dots_saved": 6}.get(policy, 0)
    assert kept[2, 1024, 36] == (policy == "dots_saved")  # logits


@pytest.mark.slow
def test_layers_in_a_scan_compile_and_cut_their_projection_once():
    loss, *arguments = traced_layer("dots_saved", scanned=True)
    with hollow_kernels():
        text = aot.compile_for_gpu(jax.grad(loss, (0, 1)), *arguments, gpu="h100").as_text()
    calls = [line for line in text.splitlines() if "custom-call(" in line]
    # The sum of the branches, which is kept, comes from the kernel of the window, which does not run again for it.
    assert sum("nsa_ranged_forward/" in line for line in calls) == 3
    assert not any("nsa_gated_sum" in line for line in calls)
    calls = [line for line in calls if "__gpu$xla.gpu.triton" in line]
    assert sum(f"{projection.NAME})" in line or f"{projection.NAME}/" in line for line in calls) == 1
    assert sum(f"{projection.NAME}_gradient/" in line for line in calls) == 1
    # Neither kept nor copied: the projection of a layer, and its gradient, are there while they are read.
    assert "bf16[3,2,1024,1600]" not in text and "bf16[3,2048,1600]" not in text
