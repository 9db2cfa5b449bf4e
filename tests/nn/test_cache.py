"""Prefill and decode with the cache against the full forward pass."""

from __future__ import annotations

import dataclasses
import math
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType

import nsa_jax
from nsa_jax import aot, nn
from nsa_jax.nn.cache import capacity_bucket, memory_report
from nsa_jax.nn.decoder import Decoder
from nsa_jax.ops.rope import RopeScaling
from nsa_jax.ops.target import Target
from tests.nn.test_model_options import OPTIONS, fill

SMALL = nsa_jax.NSAConfig(compress_block=8, compress_stride=4, select_block=16, num_selected=4, window=12)
LENGTH = 90  # more than five selection blocks and seven windows


def make_model(**changes) -> nn.Transformer:
    fields = dict(dim=16, num_heads=4, num_kv_heads=2, head_dim=8, vocab_size=31, num_layers=2, mlp_dim=24, nsa=SMALL)
    fields |= dict(compute_dtype="float32", init_std=0.2, remat="none") | changes
    model = nn.Transformer(nn.ModelConfig(**fields), rngs=nnx.Rngs(0))
    fill(model)  # biases and norms
    if model.config.kinds == ("nsa",):  # gates that differ between heads and branches
        bias = model.blocks.attention.gate_bias
        bias[...] = jax.random.normal(jax.random.key(1), bias[...].shape)
    return model


def abstract_decoder(**fields) -> Decoder:
    """A decoder whose parameters are shapes, to be compiled ahead of time: nothing is drawn."""
    made = []

    def parameters():
        made.append(Decoder(nn.Transformer(nn.ModelConfig(**fields), rngs=nnx.Rngs(0))))
        return made[0].params

    shapes = jax.eval_shape(parameters)
    made[0].params = shapes
    return made[0]


def random_tokens(batch, length, seed=0):
    return np.random.default_rng(seed).integers(0, 31, (batch, length)).astype(np.int32)


def documents(length):
    """segment_start of a row of documents with odd boundaries."""
    cuts = np.asarray([0, 5, 6, 37, 64])
    return cuts[np.searchsorted(cuts, np.arange(length), side="right") - 1].astype(np.int32)


def decode_from_every_split(decoder, row, start=None, splits=None):
    """Row b of a batch prefills row[:b + 1] (or row[:splits[b]]) and decodes the rest.

    Returns:
      float32 [splits, T, vocab]: logits of position t of split b at [b, t].
    """
    length = row.size
    splits = np.arange(1, length) if splits is None else np.asarray(splits)
    batch = splits.size
    tokens = np.where(np.arange(length - 1) < splits[:, None], row[: length - 1], 7)  # padding that must not show
    starts = None if start is None else np.broadcast_to(start[: length - 1], (batch, length - 1))
    got = np.zeros((batch, length, decoder.config.vocab_size), np.float32)

    def collect(offset, hidden):
        part = np.asarray(decoder.logits(decoder.params, hidden))[:, : length - offset]
        got[:, offset : offset + part.shape[1]] = part

    logits, cache = decoder.prefill(decoder.init_cache(batch, length), tokens, splits, starts, on_chunk=collect)
    chex.assert_trees_all_close(np.asarray(logits), got[np.arange(batch), splits - 1], atol=1e-6)
    for step in range(length - 1):
        position = np.minimum(splits + step, length - 1)  # rows at the end repeat their last token; not looked at
        here = None if start is None else jnp.asarray(start[position])
        logits, cache = decoder.decode(cache, row[position], here)
        live = splits + step < length
        got[np.flatnonzero(live), position[live]] = np.asarray(logits)[live]
    return got


SHAPES = {
    "group_1": dict(num_heads=2, num_kv_heads=2),
    "group_4": dict(num_heads=8, num_kv_heads=2, value_head_dim=4),
    "group_6": dict(num_heads=6, num_kv_heads=1, tie_embeddings=False),
    "group_16": dict(num_heads=16, num_kv_heads=1, compressor="mean", scan_layers=False),
    "dense": dict(attention="dense"),
    "window": dict(attention="window"),
    "options": OPTIONS | dict(rotary_dim=4),
    "shared_kv": OPTIONS | dict(value_head_dim=4, shared_kv=True),
    "mean_key": dict(num_heads=8, value_head_dim=4, selector="mean_key"),
    "mean_key_shared_kv": OPTIONS | dict(value_head_dim=4, selector="mean_key", shared_kv=True),
    "dense_options": OPTIONS | dict(rotary_dim=4, attention="dense"),
}
CASES = [(name, False) for name in SHAPES] + [("group_4", True), ("group_6", True), ("dense", True), ("window", True)]
CASES += [("shared_kv", True), ("mean_key", True)]


@pytest.mark.parametrize(("name", "packed"), CASES)
def test_prefill_and_decode_equal_the_full_forward_at_every_position_and_split(name, packed):
    shape = SHAPES[name]
    model = make_model(**shape)
    row = random_tokens(1, LENGTH)[0]
    start = documents(LENGTH) if packed else None
    want = jax.jit(model)(row[None], None if start is None else jnp.asarray(start)[None])[0]
    decoder = Decoder(model, chunk=32)
    got = decode_from_every_split(decoder, row, start)
    chex.assert_trees_all_close(got, np.broadcast_to(np.asarray(want), got.shape), atol=1e-5, rtol=1e-5)


def test_rows_of_different_lengths_do_not_touch_each_other():
    """Each prompt of a batch continues as it does alone, bit for bit in what the others and the padding are."""
    decoder = Decoder(make_model(), chunk=32)
    tokens, lengths = random_tokens(3, 70), np.asarray([70, 1, 33])

    def run(tokens):
        logits, cache = decoder.prefill(decoder.init_cache(3, 128), tokens, lengths)
        out = [logits]
        for step in range(6):
            logits, cache = decoder.decode(cache, np.full((3,), step, np.int32))
            out.append(logits)
        return np.stack(out)

    first = run(tokens)
    changed = tokens.copy()
    changed[1, 1:] = random_tokens(1, 69, seed=5)[0]
    changed[2] = random_tokens(1, 70, seed=6)[0]
    second = run(changed)
    np.testing.assert_array_equal(first[:, :2], second[:, :2])
    assert np.abs(first[:, 2] - second[:, 2]).max() > 1e-3


def test_window_layers_keep_the_window_alone():
    """In a model of window layers, too, rows end where the cache was asked to; short caches are no longer than rows."""
    decoder = Decoder(make_model(attention="window", num_layers=2), chunk=32)
    cache = decoder.init_cache(2, 1000)
    assert cache.capacity == 1024 and all(x.shape[1] == 12 for x in jax.tree.leaves(cache.layers))
    report = memory_report(decoder.config, 2, 1024)
    assert report["total_mib"] * 2**20 == sum(x.nbytes for x in jax.tree.leaves(cache.layers))
    assert report["bytes_per_token"] == 0 and report["fixed_bytes_per_row"] == 12 * report["dense_bytes_per_token"]
    with pytest.raises(ValueError, match="the cache holds 1024 tokens"):
        decoder.prefill(cache, random_tokens(2, 1025))
    wide = dataclasses.replace(decoder.config, nsa=dataclasses.replace(SMALL, window=300))
    assert nn.init_cache(wide, 1, 256).layers[0].key.shape[1] == 256


def test_rows_that_dynamic_scaling_would_turn_again_have_no_cache():
    decoder = Decoder(make_model(rope_scaling=RopeScaling("dynamic", 2.0, 256)))
    decoder.init_cache(1, 256)
    with pytest.raises(ValueError, match="original_length=256"):
        decoder.init_cache(1, 257)
    with pytest.raises(ValueError, match="capacity=272: RoPE scaling .* original_length=256"):
        memory_report(decoder.config, 1, 272)
    short = Decoder(make_model(rope_scaling=RopeScaling("dynamic", 2.0, 200)))
    block = short.config.nsa.select_block
    assert short.init_cache(1, 64).capacity == 200 // block * block


def test_prefill_is_causal_across_chunks():
    """Changing token t + 1 and what follows leaves outputs up to t bit-equal, with a context of several windows."""
    decoder = Decoder(make_model(), chunk=32)
    tokens = random_tokens(1, 96)

    def hidden(tokens):
        out = []
        decoder.prefill(decoder.init_cache(1, 96), tokens, on_chunk=lambda _, h: out.append(np.asarray(h)))
        return np.concatenate(out, axis=1)[:, :96]

    base = hidden(tokens)
    for t in (11, 12, 31, 32, 50, 79):
        changed = tokens.copy()
        changed[:, t + 1 :] = (changed[:, t + 1 :] + 3) % 31
        other = hidden(changed)
        np.testing.assert_array_equal(other[:, : t + 1], base[:, : t + 1])
        assert np.abs(other[:, t + 1] - base[:, t + 1]).max() > 1e-3


@pytest.mark.parametrize("changes", [dict(), dict(shared_kv=True), dict(selector="mean_key")], ids=str)
def test_every_part_of_the_cache_matters_to_decoding(changes):
    """A cache whose part is blanked gives other logits: nothing of it is dead weight."""
    decoder = Decoder(make_model(**changes), chunk=32)
    tokens = random_tokens(1, 70)

    def logits(blank=None):
        _, cache = decoder.prefill(decoder.init_cache(1, 128), tokens)
        if blank is not None:
            layers = tuple(layer._replace(**{blank: jnp.zeros_like(getattr(layer, blank))}) for layer in cache.layers)
            cache = dataclasses.replace(cache, layers=layers)
        for token in (1, 2, 3, 4, 5, 6):  # completes compressed blocks from the tail
            out, cache = decoder.decode(cache, [token])
        return np.asarray(out)

    base = logits()
    np.testing.assert_array_equal(base, logits())
    kept = decoder.init_cache(1, 128).layers[0]
    for name in (name for name in kept._fields if getattr(kept, name) is not None):
        assert np.abs(logits(name) - base).max() > 1e-4, name


def test_one_compiled_step_serves_a_capacity_bucket():
    """No recompilation as the context grows past block, window and chunk boundaries."""
    decoder = Decoder(make_model(num_layers=1), chunk=16)
    for length in (3, 40, 41, 200):
        logits, cache = decoder.prefill(decoder.init_cache(1, 250), random_tokens(1, length))
        for _ in range(5):
            logits, cache = decoder.decode(cache, jnp.argmax(logits, -1))
    assert decoder.compilations() == {"prefill": 1, "step": 1}


def test_a_step_looks_through_tuples_of_arrays_alone():
    """Flax's states among its arguments would be flattened in Python for every token."""
    decoder = Decoder(make_model())
    arguments = (decoder.params, decoder.init_cache(1, 50))

    def check(node):
        if isinstance(node, (dict, tuple)):
            for child in node.values() if isinstance(node, dict) else node:
                check(child)
        elif isinstance(node, nn.Cache):  # taken apart in C++, too
            check((node.layers, node.lengths, node.segment_start))
        else:  # None is an array that this cache does not have
            assert node is None or isinstance(node, jax.Array), type(node)

    check(arguments)
    assert len(jax.tree.leaves(arguments)) > 2 * 15


@pytest.mark.parametrize("token", [-1, 31, 999])
def test_a_step_reads_tokens_that_the_model_lacks_as_the_model_does(token):
    model = make_model(num_layers=1)
    decoder = Decoder(model)
    assert decoder.config.vocab_size == 31
    got, _ = decoder.decode(decoder.init_cache(1, 64), np.array([token]))
    np.testing.assert_allclose(got, model(jnp.array([[token]]))[:, 0], atol=1e-5)


def test_bfloat16_decode_is_near_the_forward():
    model = make_model(compute_dtype="bfloat16", init_std=0.05)
    row = random_tokens(1, 60)[0]
    want = np.asarray(jax.jit(model)(row[None])[0], np.float32)
    got = decode_from_every_split(Decoder(model, chunk=32), row)
    assert np.abs(got - want).max() < 2e-2 * np.abs(want).max()


@pytest.mark.skipif(len(jax.devices()) < 2, reason="needs two devices")
def test_the_cache_is_sharded_over_the_batch_axes():
    """Under a mesh each device holds its rows' cache, and the numbers stay the same."""
    model, tokens = make_model(num_layers=1), random_tokens(4, 50)

    def run():
        decoder = Decoder(model, chunk=32)
        logits, cache = decoder.prefill(decoder.init_cache(4, 100), tokens, [50, 3, 20, 40])
        logits, cache = decoder.decode(cache, jnp.argmax(logits, -1))
        return np.asarray(logits), cache

    alone, _ = run()
    grid = np.asarray(jax.devices()[:2]).reshape(2, 1)
    mesh = jax.sharding.Mesh(grid, ("data", "fsdp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    with jax.set_mesh(mesh):
        shared, cache = run()
    np.testing.assert_allclose(shared, alone, atol=1e-6)
    assert all(x.sharding.spec[0] == "data" for x in jax.tree.leaves(cache.layers))


@pytest.mark.parametrize("attention", ["nsa", "dense", "window"])
def test_a_full_row_stays_full_while_the_others_go_on(attention):
    """A batch is decoded until its longest row ends: a row whose cache is full keeps it, the others are not touched."""
    decoder = Decoder(make_model(attention=attention), chunk=64)
    tokens, lengths = random_tokens(2, 254), np.asarray([254, 40])

    def run(steps, rows):
        cache = decoder.init_cache(len(rows), 256, record_block_indices=attention == "nsa")
        _, cache = decoder.prefill(cache, tokens[rows], lengths[rows])
        for step in range(steps):
            start = np.asarray(cache.lengths) if step == 4 else None  # another document
            logits, cache = decoder.decode(cache, np.full((len(rows),), step, np.int32), start)
        return logits, cache

    logits, cache = run(7, np.asarray([0, 1]))
    alone, _ = run(7, np.asarray([1]))
    np.testing.assert_array_equal(cache.lengths, [256, 47])
    chex.assert_trees_all_close(logits[1:], alone, atol=1e-6)
    _, before = run(2, np.asarray([0, 1]))
    chex.assert_trees_all_equal(*(jax.tree.map(lambda x: x[0], kept) for kept in (cache, before)))


@pytest.mark.parametrize("implementation", ["xla", "pallas"])
@pytest.mark.parametrize("attention", ["nsa", "dense", "window"])
def test_a_token_before_its_document_sees_nothing(attention, implementation):
    """As padding may be marked: what it gets depends on no other token, in a row as in prefill and in a step."""
    model = make_model(attention=attention, num_layers=1, head_dim=16, implementation=implementation)
    decoder, tokens = Decoder(model, chunk=64), random_tokens(1, 40)
    start, far = (np.where(np.arange(40) < 20, 0, begin)[None] for begin in (64, np.iinfo(np.int64).max))
    changed = np.where(np.arange(40) == 39, tokens, (tokens + 1) % 7)
    want = model(jnp.asarray(tokens), jnp.asarray(start))[:, -1]
    for row in (tokens, changed):
        np.testing.assert_allclose(model(jnp.asarray(row), jnp.asarray(start))[:, -1], want, atol=1e-6)
        logits, _ = decoder.prefill(decoder.init_cache(1, 64), row, segment_start=far)
        np.testing.assert_allclose(logits, want, atol=1e-5)
        _, cache = decoder.prefill(decoder.init_cache(1, 64), row[:, :-1], segment_start=far[:, :-1])
        logits, _ = decoder.decode(cache, row[:, -1], far[:, -1])
        np.testing.assert_allclose(logits, want, atol=1e-5)


@pytest.mark.parametrize("changes", [{}, dict(attention="window"), dict(selector="mean_key")], ids=str)
def test_a_segment_start_before_the_row_means_0(changes):
    """In prefill and in a step as in the model: slots of a ring that hold no token yet are not read."""
    model = make_model(num_layers=1, **changes)
    decoder, tokens, start = Decoder(model), random_tokens(1, 7), np.full((1, 7), -5)
    want = model(jnp.asarray(tokens), jnp.asarray(start))[0]
    logits, cache = decoder.prefill(decoder.init_cache(1, 7), tokens[:, :6], segment_start=start[:, :6])
    np.testing.assert_allclose(logits[0], want[5], atol=1e-5)
    np.testing.assert_allclose(decoder.decode(cache, tokens[:, 6], start[:, 6])[0][0], want[6], atol=1e-5)


def test_memory_report_counts_what_is_allocated():
    for changes in (
        dict(),
        dict(attention="dense"),
        dict(value_head_dim=4),
        dict(value_head_dim=4, shared_kv=True),
        dict(value_head_dim=4, shared_kv=True, selector="mean_key"),
    ):
        decoder = Decoder(make_model(**changes))
        cache = decoder.init_cache(3, 1000)
        report = memory_report(decoder.config, 3, cache.capacity)
        assert cache.capacity == 1024 == capacity_bucket(1000, decoder.config)
        allocated = sum(x.nbytes for x in jax.tree.leaves(cache.layers))
        assert report["total_mib"] * 2**20 == allocated
        if "attention" not in changes:
            recording = decoder.init_cache(3, 1000, record_block_indices=True)
            lists = memory_report(decoder.config, 3, cache.capacity, record_block_indices=True)
            assert lists["total_mib"] * 2**20 == sum(x.nbytes for x in jax.tree.leaves(recording.layers)) > allocated
            more = lists["bytes_per_token"] - report["bytes_per_token"]
            assert 3 * 1024 * more == (lists["total_mib"] - report["total_mib"]) * 2**20
        growth = (
            memory_report(decoder.config, 1, 2048)["total_mib"] - memory_report(decoder.config, 1, 1024)["total_mib"]
        )
        assert growth * 2**20 == 1024 * report["bytes_per_token"]
        assert report["dense_total_mib"] * 2**20 == 3 * 1024 * report["dense_bytes_per_token"]
        if "selector" in changes:  # 2 layers, 2 heads, float32; one mean key of 8 features for 16 tokens
            assert report["fixed_bytes_per_row"] == 0
            assert report["bytes_per_token"] == 2 * 2 * 4 * (8 + 4 + 8 / 16)
        elif "shared_kv" in changes:  # 2 layers, 2 heads, float32; l = 8 unroped keys of 8 features beside dense keys
            assert report["fixed_bytes_per_row"] == 2 * 2 * 4 * 8 * 8
            assert report["bytes_per_token"] == 2 * 2 * 4 * (8 + 4) * (1 + 1 / 4)


def test_mistakes_are_named():
    decoder = Decoder(make_model(num_layers=1))
    cache = decoder.init_cache(1, 100)
    with pytest.raises(ValueError, match="the cache holds 256 tokens"):
        decoder.prefill(cache, random_tokens(1, 257))
    with pytest.raises(ValueError, match="every prompt must have"):
        decoder.prefill(cache, random_tokens(1, 5), [0])
    with pytest.raises(ValueError, match="multiple of select_block"):
        nn.cache.init_cache(decoder.config, 1, 100)
    row = np.zeros((1, 5), np.int32)
    for message, arguments in {
        "tokens has shape (5,): must have 2 dimensions": (row[0],),
        "tokens has rows of different lengths: pad them on the right, and give lengths": ([[1, 2], [3]],),
        "tokens has shape (2, 5): dimension 0 (B) must be 1 to match the cache": (np.zeros((2, 5), np.int32),),
        "tokens has dtype float32: must be an integer type": (row.astype(np.float32),),
        "tokens has ids 0 to 31: must be 0 to 30": (row + 31 * (np.arange(5) == 4),),
        "lengths has shape (2,): dimension 0 (B) must be 1": (row, np.asarray([5, 5])),
        "lengths has dtype float64: must be an integer type": (row, np.asarray([4.5])),
        "segment_start has shape (1, 4): dimension 1 (T) must be 5": (row, None, row[:, :4]),
    }.items():
        with pytest.raises(ValueError, match=re.escape(message)):
            decoder.prefill(cache, *arguments)
    for tokens in (0, -5, 5.5):
        with pytest.raises(ValueError, match=f"tokens={tokens}: must be a positive int"):
            decoder.init_cache(1, tokens)
    for batch in (0, -1, 1.5):
        with pytest.raises(ValueError, match=f"batch={batch}: must be a positive int"):
            decoder.init_cache(batch, 5)
    for make in (nn.init_cache, memory_report):
        for capacity in (0, -16, 96.0, "96", True):
            with pytest.raises(ValueError, match=f"capacity={capacity!r}: must be a positive int"):
                make(decoder.config, 1, capacity)
        with pytest.raises(ValueError, match="capacity=100: must be a positive multiple of select_block"):
            make(decoder.config, 1, 100)
        with pytest.raises(ValueError, match="batch=0: must be a positive int"):
            make(decoder.config, 0, 96)
    with pytest.raises(ValueError, match="chunk=-1: must be a positive int"):
        Decoder(make_model(num_layers=1), chunk=-1)
    padded = np.asarray([[1, 2, -1, 900, -1]])  # what stands behind a prompt is nobody's token
    _, cache = decoder.prefill(cache, padded, [2])
    with pytest.raises(ValueError, match="cache holds tokens already"):
        decoder.prefill(cache, row)
    with pytest.raises(ValueError, match=r"tokens has shape \(1, 1\): must have 1 dimensions"):
        decoder.decode(cache, row[:, :1])
    with pytest.raises(ValueError, match="tokens has dtype float32"):
        decoder.decode(cache, np.zeros(1, np.float32))


@pytest.mark.usefixtures("usual_compilation")
@pytest.mark.parametrize(
    ("kinds", "shared_kv"),
    [pytest.param(("nsa",), False, marks=pytest.mark.slow), (("nsa",), True), (("window", "dense"), False)],
    ids=str,
)
def test_decode_and_prefill_compile_ahead_of_time(kinds, shared_kv):
    """Six query heads per group and head dim 64, as in the production config, with the kernels chosen for an A100.

    Several steps in one dispatch copy no cache, and the host need not look between them.
    """
    fields = dict(dim=768, num_heads=12, num_kv_heads=2, head_dim=64, vocab_size=512, mlp_dim=256)
    decoder = abstract_decoder(**fields, num_layers=len(kinds), layer_pattern=kinds, shared_kv=shared_kv)
    params, cache = decoder.params, jax.eval_shape(lambda: nn.cache.init_cache(decoder.config, 4, 8192))
    tokens, lengths = jax.ShapeDtypeStruct((4,), jnp.int32), jax.ShapeDtypeStruct((4,), jnp.int32)
    chunk, offset = jax.ShapeDtypeStruct((4, 1024), jnp.int32), jax.ShapeDtypeStruct((), jnp.int32)

    def steps(params, cache, tokens):
        def greedy(index, logits, held):
            return jnp.argmax(logits, axis=-1).astype(jnp.int32), held

        return decoder.steps(params, cache, tokens, greedy, None, 3)

    try:
        step = aot.compile_for_gpu(steps, params, cache, tokens, gpu="a100-80gb", donate_argnums=(1,))
        if not shared_kv:
            prefill = aot.compile_for_gpu(
                decoder.prefill_chunk, params, cache, chunk, offset, lengths, gpu="a100-80gb", donate_argnums=(1,)
            )
            assert prefill.memory_analysis().temp_size_in_bytes < 512 * 2**20
    except aot.AheadOfTimeUnavailable as error:
        pytest.skip(str(error))
    held = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache))
    assert step.memory_analysis().alias_size_in_bytes >= held  # the cache is updated in place
    assert step.memory_analysis().temp_size_in_bytes < held / 4
    names = ("nsa_decode_append", "nsa_decode_emit", "nsa_decode_selected") if "nsa" in kinds else ("dense_decode",)
    assert all(name in step.as_text() for name in names) and '"known_trip_count":{"n":"3"}' in step.as_text()


@pytest.mark.usefixtures("usual_compilation")
@pytest.mark.parametrize(("compressor", "head_dim", "group"), [("mlp", 128, 16), ("mlp", 64, 4), ("mean", 128, 5)])
def test_a_step_compiles_ahead_of_time_for_other_heads(compressor, head_dim, group):
    """Wide heads take the learned compressor's weights in pieces."""
    fields = dict(dim=256, num_heads=4 * group, num_kv_heads=4, head_dim=head_dim, vocab_size=512, mlp_dim=256)
    decoder = abstract_decoder(**fields, compressor=compressor)
    cache = jax.eval_shape(lambda: nn.cache.init_cache(decoder.config, 1, 2048))
    tokens = jax.ShapeDtypeStruct((1,), jnp.int32)
    try:
        step = aot.compile_for_gpu(decoder.step, decoder.params, cache, tokens, gpu="h100", donate_argnums=(1,))
    except aot.AheadOfTimeUnavailable as error:
        pytest.skip(str(error))
    assert ("nsa_decode_append" if compressor == "mlp" else "nsa_decode_token") in step.as_text()


@pytest.mark.parametrize(("batch", "attention"), [(1, "nsa"), (64, "nsa"), (1, "dense")])
def test_the_kernels_of_a_step_are_lowered_once_for_all_layers(batch, attention):
    def kernels(num_layers):
        fields = dict(dim=128, num_heads=4, num_kv_heads=2, head_dim=64, vocab_size=64, mlp_dim=128)
        decoder = abstract_decoder(**fields, num_layers=num_layers, attention=attention, compute_dtype="bfloat16")
        cache = jax.eval_shape(lambda: nn.cache.init_cache(decoder.config, batch, 2048))
        tokens = jax.ShapeDtypeStruct((batch,), jnp.int32)
        mesh = jax.make_mesh((1,), ("device",), axis_types=(AxisType.Auto,), devices=jax.devices()[:1])
        with aot.tracing_for("h100", mesh):
            lowered = jax.jit(decoder.step).trace(decoder.params, cache, tokens).lower(lowering_platforms=("cuda",))
        return re.findall(r'name = "((?:nsa|dense)_decode\w*)"', lowered.as_text())

    assert kernels(3) == kernels(2) != []  # in the first layer nothing is added to the residual stream yet


@pytest.mark.usefixtures("usual_compilation")
def test_a_step_of_one_row_writes_nothing_of_a_weights_size():
    """Nor does a second layer launch more than 8 kernels, of which two are attention's."""
    fields = dict(dim=768, num_heads=12, num_kv_heads=2, head_dim=64, vocab_size=512, mlp_dim=2432, shared_kv=True)

    def written(num_layers):
        decoder = abstract_decoder(**fields, num_layers=num_layers, compressor="mean", compute_dtype="bfloat16")
        cache = jax.eval_shape(lambda: nn.cache.init_cache(decoder.config, 1, 2048))
        tokens = jax.ShapeDtypeStruct((1,), jnp.int32)
        try:
            step = aot.compile_for_gpu(decoder.step, decoder.params, cache, tokens, gpu="h100", donate_argnums=(1,))
        except aot.AheadOfTimeUnavailable as error:
            pytest.skip(str(error))
        program = step.as_text()
        program = program[program.index("\nENTRY") :]
        held = max(x.size for x in jax.tree.leaves(cache.layers))
        launched = re.findall(r"= (\S+|\([^)]*\)) (?:fusion|custom-call)\(", program)
        sizes = [math.prod(map(int, dims.split(","))) for x in launched for dims in re.findall(r"\w+\[([\d,]+)\]", x)]
        assert max(size for size in sizes if size != held) < 768 * 768 / 8
        return len(launched)

    assert written(3) - written(2) <= 8


def test_a_row_by_itself_is_computed_as_in_a_batch(monkeypatch):
    """On GPUs a single row goes through norms and products twice."""
    decoder = Decoder(make_model())
    row = random_tokens(1, 40)

    def decoded():
        logits, cache = Decoder(make_model()).prefill(decoder.init_cache(1, 100), row)
        for token in (3, 7):
            logits, cache = jax.jit(decoder.step)(decoder.params, cache, jnp.asarray([token], jnp.int32))
        return logits

    want = decoded()
    for module in (nn.decoder, nn.layers):
        monkeypatch.setattr(module, "current_target", lambda: Target("gpu", (9, 0)))
    jax.clear_caches()
    got = decoded()
    assert got.shape == want.shape == (1, 31)
    chex.assert_trees_all_close(got, want, atol=1e-6)
    program = jax.jit(decoder.step).lower(decoder.params, decoder.init_cache(1, 100), jnp.asarray([3])).as_text()
    assert "tensor<2x1x16xf32>" in program


@pytest.mark.gpu
@pytest.mark.parametrize(
    "shape",
    [
        dict(num_heads=12, num_kv_heads=2),
        dict(num_heads=16, num_kv_heads=1),
        dict(num_heads=12, num_kv_heads=2, shared_kv=True),
        dict(num_heads=12, num_kv_heads=2, attention="window"),
        dict(num_heads=12, num_kv_heads=2, attention="dense"),
    ],
    ids=str,
)
def test_gpu_decode_equals_the_forward(shape):
    """The paper's geometry in bfloat16 with the kernels, from splits around block and window boundaries."""
    fields = dict(dim=256, head_dim=64, vocab_size=31, num_layers=2, mlp_dim=256, init_std=0.06, remat="none") | shape
    model = nn.Transformer(nn.ModelConfig(**fields), rngs=nnx.Rngs(0))
    row = random_tokens(1, 1300)[0]
    want = np.asarray(jax.jit(model)(row[None])[0], np.float32)
    splits = [1, 31, 32, 63, 64, 511, 512, 513, 1023, 1024, 1100, 1299]
    got = decode_from_every_split(Decoder(model, chunk=512), row, splits=splits)
    op = "window_attention" if "attention" in shape else "decode_attention"
    assert nsa_jax.implementations_served()[op] == "pallas"
    for b in range(len(splits)):
        error = np.linalg.norm(got[b] - want) / np.linalg.norm(want)
        assert error < 2e-2, (splits[b], error)
