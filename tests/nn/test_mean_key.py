"""The selector "mean_key": blocks chosen by their mean keys, against the definition in NumPy."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from nsa_jax import inspect
from nsa_jax.config import default_config, nsa_config, validate
from nsa_jax.nn import ModelConfig, NSAttention, Transformer, count_parameters, function_differences
from nsa_jax.nn.observe import walk_layers
from nsa_jax.ops import reference
from nsa_jax.ops.blocks import NSAConfig
from nsa_jax.ops.mean_key import decode_mean_key_attention, mean_key_attention, mean_keys, select_by_mean_key
from nsa_jax.train.flops import forward_flops_per_token
from tests.nn.test_model_options import OPTIONS, assert_computes, fill
from tests.nn.test_parallel import layer_outputs, mesh_of

pytestmark = pytest.mark.usefixtures("quick_compilation")

BLOCK, LENGTH = 8, 70  # the last block is not whole
NSA = NSAConfig(compress_block=BLOCK, compress_stride=BLOCK, select_block=BLOCK, num_selected=4, num_local=2, window=10)
CONFIG = ModelConfig(
    dim=24, num_heads=4, num_kv_heads=2, head_dim=16, value_head_dim=8, vocab_size=50, mlp_dim=24, nsa=NSA,
    init_std=0.3, compute_dtype="float32", implementation="xla", selector="mean_key", remat="none", **OPTIONS,
)  # fmt: skip


def inputs(length=LENGTH):
    starts = np.where(np.arange(length) >= 21, 21, 0)  # 21 lies within a block
    x = jax.random.normal(jax.random.key(1), (2, length, CONFIG.dim))
    return x, jnp.asarray(np.stack([starts, np.zeros(length)]), jnp.int32)


def lists_by_hand(query, key, start, config):
    """The module's formula: float64 [B, T, N, H] and [B, S, K, H] -> int32 [B, T, K, n], padded with J."""
    batch, length, num_heads, _ = query.shape
    num_kv, total = key.shape[2], -(-length // BLOCK)
    lists = np.full((batch, length, num_kv, config.num_selected), total, np.int32)
    for b, t, k in np.ndindex(batch, length, num_kv):
        heads = range(k * num_heads // num_kv, (k + 1) * num_heads // num_kv)
        first, last = start[b, t] // BLOCK, t // BLOCK
        candidates = list(range(first, last + 1))
        forced = {j for j in candidates if j < first + config.num_initial or j > last - config.num_local}
        scores = {
            j: sum(query[b, t, g] @ key[b, j * BLOCK : (j + 1) * BLOCK, k].mean(0) for g in heads)
            for j in candidates
            if j not in forced
        }
        best = sorted(scores, key=lambda j: -scores[j])[: max(config.num_selected - len(forced), 0)]
        chosen = sorted(forced | set(best))
        lists[b, t, k, : len(chosen)] = chosen
    return lists


@pytest.mark.parametrize("implementation", ["reference", "xla", "pallas"])
def test_lists_are_those_of_the_formula(implementation):
    rng = np.random.default_rng(0)
    query, key = rng.normal(size=(2, LENGTH, 4, 16)), rng.normal(size=(2, LENGTH, 2, 16))
    _, start = inputs()
    query32, key32 = jnp.asarray(query, jnp.float32), jnp.asarray(key, jnp.float32)
    means = mean_keys(key32, config=NSA)
    assert means.shape == (2, LENGTH // BLOCK, 2, 16)
    common = dict(config=NSA, segment_start=start, implementation=implementation)
    got = np.asarray(jax.jit(lambda q, m: select_by_mean_key(q, m, **common))(query32, means))
    np.testing.assert_array_equal(got, lists_by_hand(query, key, np.asarray(start), NSA))
    # Scores choose: more than the forced blocks are listed, and they differ between heads.
    assert (got[:, 60:, 0] != got[:, 60:, 1]).any()


def test_geometry_with_other_blocks_is_refused():
    with pytest.raises(ValueError, match="compress_block=8 and compress_stride=4: must be select_block=8"):
        mean_keys(jnp.zeros((1, 16, 1, 8)), config=dataclasses.replace(NSA, compress_stride=4))


def by_hand(attention: NSAttention, x, start):
    """The layer from its parameters, the formula's lists and the reference of the ops."""
    config, (batch, length, _) = attention.config, x.shape
    n, k, h, v = config.num_heads, config.num_kv_heads, config.head_dim, config.value_head_dim
    projected = x @ attention.w_in[...]
    bias = attention.b_in[...]
    pieces = jnp.split(projected[..., : len(bias)] + bias, np.cumsum([n * h, *(k * h, k * v) * 2])[:-1], axis=-1)
    query, key_slc, value_slc, key_win, value_win = (
        x.reshape(batch, length, heads, -1) for x, heads in zip(pieces, (n, k, k, k, k), strict=True)
    )
    query = config.rope(attention.q_norm(query), jnp.arange(length))
    key_slc, key_win = (config.rope(attention.k_norm(key), jnp.arange(length)) for key in (key_slc, key_win))
    gates = jax.nn.sigmoid(projected[..., len(bias) :].reshape(batch, length, n, 2) + attention.gate_bias[...])
    shape = jax.ShapeDtypeStruct((batch, length, k, config.nsa.num_selected), jnp.int32)
    lists = jax.pure_callback(
        lambda *a: lists_by_hand(*(np.asarray(x, np.float64) for x in a[:2]), np.asarray(a[2]), config.nsa),
        shape, *jax.lax.stop_gradient((query, key_slc)), start,
    )  # fmt: skip
    out = gates[..., :1] * reference.selected_attention(
        query, key_slc, value_slc, lists, select_block=BLOCK, segment_start=start
    )
    out += gates[..., 1:] * reference.window_attention(query, key_win, value_win, window=10, segment_start=start)
    return out.reshape(batch, length, -1) @ attention.w_out[...] + attention.b_out[...]


def test_layer_and_gradients_are_those_of_the_definition():
    assert_computes(fill(NSAttention(CONFIG, rngs=nnx.Rngs(0))), by_hand, *inputs(), tolerance=5e-5)


@pytest.mark.parametrize("shared_kv", [False, True])
def test_layers_on_shares_of_tokens_and_heads(shared_kv):
    x, start = inputs(64)
    config = dataclasses.replace(CONFIG, shared_kv=shared_kv)
    want = layer_outputs(
        fill(NSAttention(dataclasses.replace(config, implementation="reference"), rngs=nnx.Rngs(0))), x, start
    )
    got = layer_outputs(fill(NSAttention(config, rngs=nnx.Rngs(0))), x, start, mesh_of(context=4, tensor=2))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5 * np.abs(b).max())


def test_parameters_and_operations_lack_the_compressed_branch():
    def made(**changes):
        config = dataclasses.replace(CONFIG, **changes)
        return count_parameters(Transformer(config, rngs=nnx.Rngs(0))), forward_flops_per_token(config, LENGTH)

    n, k, h, v = CONFIG.num_heads, CONFIG.num_kv_heads, CONFIG.head_dim, CONFIG.value_head_dim
    dense, (shared, flops), (apart, _) = made(attention="dense")[0], made(shared_kv=True), made()
    assert shared == dense + 2 * n * (CONFIG.dim + 1)
    assert apart == shared + (CONFIG.dim + 1) * k * (h + v)
    assert "compressor" not in flops and "attention_compressed" not in flops
    whole = np.mean([(t + 1) // BLOCK for t in range(LENGTH)])
    assert flops["selection"] == pytest.approx(2 * h * k * whole)


def test_what_inspection_sees_gives_the_layers_output():
    model = fill(Transformer(dataclasses.replace(CONFIG, num_layers=1), rngs=nnx.Rngs(0)))
    tokens = jnp.asarray(np.random.default_rng(2).integers(0, 50, (1, 40)), jnp.int32)
    hidden, gates = jax.jit(lambda tokens: walk_layers(model, tokens, None, lambda arrays: arrays.gates))(tokens)
    np.testing.assert_allclose(hidden, jax.jit(model.hidden)(tokens), atol=1e-5)
    assert not np.asarray(gates[..., 0]).any() and np.asarray(gates[..., 1:]).all()
    found = inspect.capture(model, tokens)
    assert found.gates.shape[-1] == 3 and np.isfinite(found.entropy).all() and not found.sizes[..., 0].any()


def test_blocks_of_compression_are_those_of_selection_whatever_the_config_says():
    config = default_config()
    config.model.nsa.selector = "mean_key"
    assert nsa_config(config).compress_stride == 64 and ModelConfig.from_config(config, 50).nsa.compress_block == 64
    saved, wanted = default_config().model.to_dict(), config.model.to_dict()
    (*_, problem) = function_differences(saved, wanted)
    assert problem.rule == "R054" and "config.model.nsa.selector: 'compressed' where it was saved" in problem.message
    again = config.model.to_dict()
    again["nsa"]["compress_block"], again["compressor"] = 64, "mean"
    assert not function_differences(wanted, again)
    config.mesh.context, config.data.seq_len = 2, 64 * 5  # 160 tokens each, no multiple of 64
    messages = [problem.message for problem in validate(config) if problem.rule == "R020"]
    assert messages and "multiples of 64 tokens (select_block)" in messages[0]
    config.model.nsa.selector = "mean"
    assert any("config.model.nsa.selector='mean': no such choice" in p.message for p in validate(config))


def test_tokens_before_position_0_are_never_read():
    """Where the window's keys begin before the row, a negative segment start means 0, as everywhere."""
    query, key, gates = (jax.random.normal(jax.random.key(i), (1, 16, 2, n)) for i, n in enumerate((8, 8, 2)))
    start, keys = jnp.zeros((1, 16), jnp.int32), mean_keys(key, config=NSA)
    want, _ = mean_key_attention(query, keys, *[key] * 4, gates, config=NSA)
    longer = jnp.pad(key, [(0, 0), (4, 0), (0, 0), (0, 0)], constant_values=9.0)
    common = dict(config=NSA, query_offset=0, window_start=-4)
    for first in (0, -3):
        got, _ = mean_key_attention(query, keys, key, key, longer, longer, gates, segment_start=start + first, **common)
        np.testing.assert_allclose(got, want, atol=1e-5)


def test_wrong_arguments_are_refused():
    query, key, gates = jnp.ones((1, 16, 2, 8)), jnp.ones((1, 16, 2, 8)), jnp.ones((1, 16, 2, 2))
    keys = mean_keys(key, config=NSA)
    for changes, words in (
        (dict(window_start=0), "window_start=0: must be None without a query_offset"),
        (dict(query_offset=0, window_start=1), "window_start=1: must be at most 0"),
        (dict(gates=gates.astype(int)), "gates has dtype int32: must be float32"),
    ):
        with pytest.raises(ValueError, match=words):
            mean_key_attention(query, keys, *[key] * 4, **{"gates": gates, "config": NSA} | changes)
    for place, array, words in (
        (0, keys[:, :1], "key_mean has length 1: must be 2 for 16 query tokens"),
        (0, keys.astype(jnp.bfloat16), "key_mean has dtype bfloat16: must be float32"),
        (1, key[:, :8], r"value_slc has shape \(1, 16, 2, 8\): dimension 1 \(S\) must be 8"),
        (3, key.astype(jnp.bfloat16), "key_win has dtype bfloat16: must be float32"),
    ):
        arrays = [keys, *[key] * 4]
        arrays[place] = array
        with pytest.raises(ValueError, match=words):
            mean_key_attention(query, *arrays, gates=gates, config=NSA)
    step = dict(gates=gates[:, :1], lengths=jnp.asarray([4]), config=NSA)
    for ring, changes, words in (
        (8, {}, "key_win has length 8: must be at least 10"),
        (16, dict(lengths=jnp.asarray([4.0])), "lengths has dtype float32: must be an integer"),
        (16, dict(gates=gates[:, :1, :, :1]), r"gates has shape \(1, 1, 2, 1\)"),
    ):
        with pytest.raises(ValueError, match=words):
            decode_mean_key_attention(query[:, :1], keys, key, key, *[key[:, :ring]] * 2, **step | changes)
    with pytest.raises(ValueError, match="key_mean has length 1: must be at least 2"):
        decode_mean_key_attention(query[:, :1], keys[:, :1], *[key] * 4, **step)
