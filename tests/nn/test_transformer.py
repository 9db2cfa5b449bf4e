"""The whole model: same numbers however it is run, causal, packed rows, gradients everywhere."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh

from nsa_jax import NSAConfig
from nsa_jax.config import CHOICES
from nsa_jax.nn import DenseAttention, ModelConfig, NSAttention, Transformer, count_parameters, layers
from nsa_jax.nn.dense import dense_attention
from nsa_jax.ops.target import Target, compile_for

NSA = NSAConfig(
    compress_block=8, compress_stride=4, select_block=8, num_selected=4, num_initial=1, num_local=2, window=16
)
CONFIG = ModelConfig(
    dim=32, num_heads=4, num_kv_heads=2, head_dim=8, vocab_size=50, num_layers=4, mlp_dim=48, nsa=NSA, init_std=0.1,
    compute_dtype="float32", implementation="xla",
)  # fmt: skip


def build(**changes):
    return nnx.split(Transformer(dataclasses.replace(CONFIG, **changes), rngs=nnx.Rngs(0)))


def tokens_of(length, batch=2, seed=1):
    return jax.random.randint(jax.random.key(seed), (batch, length), 0, CONFIG.vocab_size)


@functools.partial(jax.jit, static_argnums=0)
def run(graphdef, params, tokens, segment_start=None):
    return nnx.merge(graphdef, params)(tokens, segment_start)


def loss_of(graphdef, params, tokens, key=None):
    logits = nnx.merge(graphdef, params)(tokens[:, :-1], deterministic=key is None, rngs=key)
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], -1).mean()


@functools.cache
def baseline():
    """Loss and gradients of the plain model: scanned, nothing recomputed."""
    graphdef, params = build(remat="none", dropout=0.2, implementation="reference")
    return jax.jit(jax.value_and_grad(functools.partial(loss_of, graphdef)))(params, tokens_of(49), jax.random.key(7))


RUNS = [(remat, True) for remat in CHOICES["model.remat"]] + [("none", False), ("block", False), ("offload", False)]


@pytest.mark.parametrize(("remat", "scan_layers"), RUNS, ids=[f"{r}-{'un' * (not s)}scanned" for r, s in RUNS])
def test_scan_and_remat_do_not_change_loss_or_gradients(remat, scan_layers):
    graphdef, params = build(scan_layers=scan_layers, remat=remat, dropout=0.2, implementation="reference")
    got = jax.jit(jax.value_and_grad(functools.partial(loss_of, graphdef)))(params, tokens_of(49), jax.random.key(7))
    chex.assert_trees_all_close(got, baseline(), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("attention", "remat"), [("nsa", "attention_saved"), ("dense", "none")])
def test_the_gradients_written_for_gpus_are_those_of_the_formulas(attention, remat):
    """The projections have their own backward pass on GPUs."""
    graphdef, params = build(attention=attention, remat=remat, implementation="reference")

    def traced():
        return jax.jit(lambda params: jax.value_and_grad(functools.partial(loss_of, graphdef))(params, tokens_of(49)))

    plain = traced().trace(params)
    with compile_for(Target("gpu", (9, 0))):
        own = traced().trace(params)
    barriers = [_count(run.jaxpr.jaxpr, "optimization_barrier") for run in (plain, own)]
    assert barriers[1] - barriers[0] == 1  # before the pieces are put together
    want, got = (run.lower().compile()(params) for run in (plain, own))
    chex.assert_trees_all_close(got, want, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("remat", ["none", "dots_saved", "attention_saved"])
@pytest.mark.parametrize("scan_layers", [True, False])
def test_layers_with_the_gradients_of_kernels_equal_the_formulas(monkeypatch, remat, scan_layers):
    """As on a GPU, the kernels interpreted here: two norms and one SwiGLU a layer, and two for the embedding."""
    sizes = dict(dim=64, mlp_dim=192, num_layers=2, remat=remat, scan_layers=scan_layers)
    graphdef, params = build(attention="dense", **sizes)
    params = jax.tree.map(lambda a: a + 0.1 * jax.random.normal(jax.random.key(a.size), a.shape), params)

    def traced():
        return jax.jit(lambda params: jax.value_and_grad(functools.partial(loss_of, graphdef))(params, tokens_of(49)))

    plain = traced().trace(params)
    monkeypatch.setattr(layers, "layer_kernels_serve", lambda width: width % 64 == 0)
    own = traced().trace(params)
    assert _count(plain.jaxpr.jaxpr, "pallas_call") == 0
    assert _count(own.jaxpr.jaxpr, "pallas_call") == 2 + (3 if scan_layers else 6)
    want, got = (run.lower().compile()(params) for run in (plain, own))
    chex.assert_trees_all_close(got, want, rtol=2e-5, atol=1e-7)


def _count(jaxpr, name):
    """How often a primitive occurs in a jaxpr, inner jaxprs included."""
    found = 0
    for eqn in jaxpr.eqns:
        found += eqn.primitive.name == name
        for value in jax.tree.leaves(eqn.params, is_leaf=lambda v: hasattr(v, "eqns") or hasattr(v, "jaxpr")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                found += _count(inner, name)
    return found


@pytest.mark.parametrize("remat", CHOICES["model.remat"])
def test_blocks_are_selected_once_under_every_remat_policy(remat):
    graphdef, params = build(remat=remat, implementation="reference")
    grad = jax.make_jaxpr(jax.grad(functools.partial(loss_of, graphdef)))(params, tokens_of(49))
    assert _count(grad.jaxpr, "top_k") == 1


def test_attention_saved_does_not_run_the_forward_kernels_again():
    def kernels(remat):
        graphdef, params = build(remat=remat, implementation="pallas", head_dim=16, value_head_dim=16)
        grad = jax.make_jaxpr(jax.grad(functools.partial(loss_of, graphdef)))(params, tokens_of(49))
        return _count(grad.jaxpr, "pallas_call")

    none, saved, dots, block = map(kernels, ("none", "attention_saved", "dots_saved", "block"))
    assert none == dots
    assert saved == none + 1  # the sum of the branches, one pass over what is kept
    assert block >= none + 3  # the forward pass of each branch, once more


@pytest.mark.slow
def test_remat_policies_keep_fewer_activations_in_the_stated_order():
    def kept(remat):
        """Bytes that the forward pass leaves for the backward pass."""
        graphdef, params = build(remat=remat, num_layers=9)
        tokens = tokens_of(257)
        saved = jax.eval_shape(lambda p: jax.vjp(lambda p: loss_of(graphdef, p, tokens), p)[1], params)
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(saved))

    none, dots_saved, attention_saved, block, full = map(
        kept, ("none", "dots_saved", "attention_saved", "block", "full")
    )
    assert none > 1.5 * attention_saved
    assert none > 1.2 * dots_saved and dots_saved > 1.2 * attention_saved
    assert attention_saved > block > full


def test_dots_saved_computes_no_product_with_parameters_again():
    def dots(remat):
        graphdef, params = build(remat=remat, implementation="pallas", head_dim=16, value_head_dim=16)
        grad = jax.make_jaxpr(jax.grad(functools.partial(loss_of, graphdef)))(params, tokens_of(49))
        return _count(grad.jaxpr, "dot_general")

    none, dots_saved, attention_saved = map(dots, ("none", "dots_saved", "attention_saved"))
    assert none == dots_saved
    assert attention_saved >= none + 4  # projections in and out, the MLP's two products in


def test_dots_saved_does_not_rotate_the_query_again():
    def named(remat):
        graphdef, params = build(remat=remat, implementation="pallas", head_dim=16, value_head_dim=16)
        grad = jax.make_jaxpr(jax.grad(functools.partial(loss_of, graphdef)))(params, tokens_of(49))
        return str(grad).count("name=nsa_query")

    assert named("attention_saved") == 2  # forward and backward
    assert named("dots_saved") == 1


@pytest.mark.parametrize("attention", ["nsa", "dense"])
@pytest.mark.parametrize("tie", [True, False], ids=["tied", "separate"])
def test_every_parameter_gets_a_finite_nonzero_gradient(attention, tie):
    graphdef, params = build(attention=attention, tie_embeddings=tie)
    grads = jax.jit(jax.grad(functools.partial(loss_of, graphdef)))(params, tokens_of(65))
    for path, grad in jax.tree_util.tree_leaves_with_path(grads):
        name = jax.tree_util.keystr(path)
        assert bool(jnp.isfinite(grad).all()), name
        per_layer = grad if "blocks" in name else grad[None]
        assert float(jnp.abs(per_layer).reshape(per_layer.shape[0], -1).max(1).min()) > 0, name


@pytest.mark.parametrize("attention", ["nsa", "dense"])
def test_every_key_and_value_projection_gets_gradient(attention):
    graphdef, params = build(attention=attention)
    grads = jax.jit(jax.grad(functools.partial(loss_of, graphdef)))(params, tokens_of(65))
    columns = jnp.abs(grads["blocks"]["attention"]["w_in"][...]).max(1)  # [L, width]
    assert float(columns.min()) > 0


@pytest.mark.parametrize("implementation", ["reference", "xla"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tokens_after_t_change_nothing_up_to_t(implementation, dtype):
    graphdef, params = build(implementation=implementation, compute_dtype=dtype)
    length = 2 * NSA.window + 19
    tokens = tokens_of(length)
    before = run(graphdef, params, tokens)
    for t in (NSA.window - 1, NSA.window, 2 * NSA.window + 1, length - 2):
        after = run(graphdef, params, tokens.at[:, t + 1 :].set((tokens[:, t + 1 :] + 1) % CONFIG.vocab_size))
        chex.assert_trees_all_equal(before[:, : t + 1], after[:, : t + 1])
        assert bool((before[:, t + 1 :] != after[:, t + 1 :]).any())


@pytest.mark.parametrize("attention", ["nsa", "dense"])
def test_a_packed_row_equals_its_documents_apart(attention):
    graphdef, params = build(attention=attention)
    # Blocks are cut by row position: documents that start on a block boundary get the same blocks as alone.
    lengths = (24, 40, 13)
    starts = np.cumsum((0, *lengths[:-1]))
    tokens = tokens_of(sum(lengths), batch=1)
    segment_start = jnp.asarray(np.repeat(starts, lengths))[None]
    packed = run(graphdef, params, tokens, segment_start)
    for start, length in zip(starts, lengths, strict=True):
        alone = run(graphdef, params, tokens[:, start : start + length])
        chex.assert_trees_all_close(packed[:, start : start + length], alone, atol=2e-5)
    assert float(jnp.abs(packed - run(graphdef, params, tokens))[:, lengths[0] :].max()) > 1e-3


@pytest.mark.parametrize(("dtype", "vocab_size"), [(np.uint8, 256), (np.int8, 128), (np.uint16, 1 << 16)])
def test_tokens_are_integers_of_any_type(dtype, vocab_size):
    """One that cannot hold the vocabulary's size was read as no token at all, and every embedding was 0."""
    graphdef, params = build(vocab_size=vocab_size, num_layers=1)
    tokens = jnp.asarray([[1, 2, 127, 0, 30]])
    chex.assert_trees_all_equal(run(graphdef, params, tokens.astype(dtype)), run(graphdef, params, tokens))


def test_dropout_is_decided_by_the_key_alone():
    graphdef, params = build(dropout=0.3)
    tokens = tokens_of(32)

    @functools.partial(jax.jit, static_argnums=(1, 2))
    def drop(rngs, deterministic=False, stream=False):
        rngs = nnx.Rngs(dropout=rngs) if stream else rngs
        return nnx.merge(graphdef, params)(tokens, deterministic=deterministic, rngs=rngs)

    one, plain = drop(jax.random.key(1)), drop(None, True)
    chex.assert_trees_all_equal(one, drop(jax.random.key(1)))
    chex.assert_trees_all_equal(plain, drop(jax.random.key(1), True))
    for other in (plain, drop(jax.random.key(2)), drop(jax.random.key(1), False, True)):
        assert float(jnp.abs(one - other).max()) > 1e-3
    with pytest.raises(ValueError, match="rngs=None"):
        drop(None)


@pytest.mark.parametrize("kv_heads", [1, 6])
@pytest.mark.parametrize("attention", ["nsa", "dense"])
@pytest.mark.parametrize("value_head_dim", [8, 12])
def test_group_sizes_and_value_head_dims(kv_heads, attention, value_head_dim):
    changes = dict(num_heads=6, num_kv_heads=kv_heads, value_head_dim=value_head_dim, num_layers=1)
    graphdef, params = build(attention=attention, implementation="reference", **changes)
    for length in (5, 39):  # 5 is shorter than one compressed block
        logits = run(graphdef, params, tokens_of(length))
        chex.assert_shape(logits, (2, length, CONFIG.vocab_size))
        chex.assert_tree_all_finite(logits)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("value_dim", [8, 12])
def test_dense_attention_against_a_loop(packed, value_dim):
    keys = jax.random.split(jax.random.key(0), 3)
    query = jax.random.normal(keys[0], (2, 11, 4, 8))
    key = jax.random.normal(keys[1], (2, 11, 2, 8))
    value = jax.random.normal(keys[2], (2, 11, 2, value_dim))
    start = jnp.asarray([[0] * 11, [0] * 4 + [4] * 7]) if packed else jnp.zeros((2, 11), int)
    want = np.zeros((2, 11, 4, value_dim))
    q, k, v = (np.asarray(a, np.float64) for a in (query, key, value))
    for b, t, n in np.ndindex(2, 11, 4):
        seen = slice(int(start[b, t]), t + 1)
        score = k[b, seen, n // 2] @ q[b, t, n] / np.sqrt(8)
        weight = np.exp(score - score.max())
        want[b, t, n] = weight @ v[b, seen, n // 2] / weight.sum()
    got = dense_attention(query, key, value, segment_start=start if packed else None)
    chex.assert_trees_all_close(got, want.astype(np.float32), atol=2e-5)


@pytest.mark.parametrize(("packed", "value_dim"), [(True, 64), (False, 128)])
def test_dense_attention_that_cudnn_cannot_serve_takes_the_kernels_on_a_gpu(packed, value_dim):
    """No scores of a whole row in memory."""
    length = 320
    query, key, value = (
        jax.ShapeDtypeStruct((1, length, heads, dim), jnp.bfloat16) for heads, dim in ((4, 64), (2, 64), (2, value_dim))
    )
    start = jax.ShapeDtypeStruct((1, length), jnp.int32) if packed else None

    def loss(query, key, value, start):
        return dense_attention(query, key, value, segment_start=start).astype(jnp.float32).sum()

    with compile_for(Target("gpu", (9, 0))):
        text = str(jax.make_jaxpr(jax.grad(loss, argnums=(0, 1, 2)))(query, key, value, start))
    assert "nsa_ranged_forward" in text and f"{length},{length}]" not in text


def test_logits_are_float32_and_parameters_stay_float32():
    graphdef, params = build(compute_dtype="bfloat16")
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(params))
    chex.assert_type(nnx.merge(graphdef, params)(tokens_of(20)), jnp.float32)


def test_bfloat16_follows_float32():
    graphdef, params = build()
    low, _ = build(compute_dtype="bfloat16")
    exact, got = (run(g, params, tokens_of(48)) for g in (graphdef, low))
    assert float(jnp.linalg.norm(exact - got) / jnp.linalg.norm(exact)) < 0.05


def test_gates_start_near_one_half_and_are_per_head():
    layer = NSAttention(dataclasses.replace(CONFIG, init_std=0.02), rngs=nnx.Rngs(0))
    gates = layer.project(jax.random.normal(jax.random.key(0), (2, 64, 32)), jnp.arange(64)).gates
    chex.assert_shape(gates, (2, 64, 4, 3))
    chex.assert_type(gates, jnp.float32)
    assert 0.2 < float(gates.min()) and float(gates.max()) < 0.8
    assert abs(float(gates.mean()) - 0.5) < 0.02


def test_initialisation_scales():
    config = dataclasses.replace(CONFIG, dim=96, num_layers=8, init_std=0.02)
    model = Transformer(config, rngs=nnx.Rngs(0))
    assert float(model.embedding[...].std()) == pytest.approx(0.02, rel=0.05)
    assert float(model.blocks.attention.w_in[...].std()) == pytest.approx(0.02, rel=0.05)
    for written in (model.blocks.attention.w_out, model.blocks.mlp.w_out):
        assert float(written[...].std()) == pytest.approx(0.02 / 4, rel=0.05)
    layers = model.blocks.attention.w_in[...]
    assert float(jnp.abs(layers[0] - layers[1]).max()) > 0.01


def test_parameter_count_is_measured():
    d, v, h, m, layers = 32, 50, 8, 48, 4
    block = d * (4 * h + 3 * 2 * (h + h) + 3 * 4) + 3 * 4 + 4 * h * d + 2 * d + 3 * d * m
    phi = 8 * h + 8 * h * 2 * h + 2 * h + 2 * h * h
    assert count_parameters(Transformer(CONFIG, rngs=nnx.Rngs(0))) == v * d + d + layers * (block + 2 * phi)
    separate = dataclasses.replace(CONFIG, tie_embeddings=False, compressor="mean")
    assert count_parameters(Transformer(separate, rngs=nnx.Rngs(0))) == 2 * v * d + d + layers * block


def test_attention_layers_share_their_interface():
    x = jax.random.normal(jax.random.key(0), (2, 24, 32))
    start = jnp.zeros((2, 24), jnp.int32)
    for layer in (NSAttention(CONFIG, rngs=nnx.Rngs(0)), DenseAttention(CONFIG, rngs=nnx.Rngs(0))):
        call = nnx.jit(lambda layer, *args, **kwargs: layer(*args, **kwargs))
        chex.assert_trees_all_close(call(layer, x), call(layer, x, start, positions=jnp.arange(24)), atol=1e-6)
    layer = NSAttention(dataclasses.replace(CONFIG, implementation="reference"), rngs=nnx.Rngs(0))
    _, indices = layer(x, return_block_indices=True)
    chex.assert_shape(indices, (2, 24, 2, 4))
    chex.assert_type(indices, jnp.int32)


def test_without_a_mesh_or_on_one_device_nothing_is_sharded():
    graphdef, params = build(num_layers=1)
    alone = run(graphdef, params, tokens_of(24))
    mesh = Mesh(np.asarray(jax.devices()[:1]).reshape(1, 1), ("data", "fsdp"))
    with jax.set_mesh(mesh):
        chex.assert_trees_all_close(run(graphdef, params, tokens_of(24)), alone, atol=1e-6)
