"""nsa_jax.inspect: what it captures is what the model computes, and what it draws shows it."""

import dataclasses
import html
import re

import chex
import jax
import jax.numpy as jnp
import matplotlib.figure
import numpy as np
import pytest
from flax import nnx

import nsa_jax
from nsa_jax import inspect
from nsa_jax.data.tokenizers import ByteTokenizer
from nsa_jax.nn import ModelConfig, Transformer
from nsa_jax.ops import blocks

GEOMETRY = nsa_jax.NSAConfig(compress_block=8, compress_stride=4, select_block=8, num_selected=4, window=12)
LENGTH, HEADS, GROUPS = 64, 4, 2


def config_of(**changes) -> ModelConfig:
    values = dict(dim=32, num_heads=HEADS, num_kv_heads=GROUPS, head_dim=8, value_head_dim=6, vocab_size=257)
    values |= dict(num_layers=3, mlp_dim=48, nsa=GEOMETRY, init_std=0.3, compute_dtype="float32", remat="none")
    return ModelConfig(**{**values, "implementation": "reference", **changes})


def model_of(**changes) -> Transformer:
    return Transformer(config_of(**changes), rngs=nnx.Rngs(0))


def row(length: int = LENGTH, batch: int = 2):
    tokens = np.random.default_rng(0).integers(0, 256, (batch, length), dtype=np.int32)
    start = np.zeros_like(tokens)
    start[-1, 21:] = 21  # the last row holds two documents
    return tokens, start


@pytest.fixture(scope="module")
def found():
    tokens, start = row()
    return inspect.capture(model_of(), tokens, start)


def layers_by_hand(model, tokens, start):
    """Input, module and lists of every layer, by the modules' own calls."""
    x = model.embedding[...][tokens]
    for index in range(model.config.num_layers):
        block = nnx.merge(*_layer(model, index))
        h = block.norm_attention(x)
        out, lists = block.attention(h, start, return_block_indices=True)
        yield h, block.attention, out, lists
        x = x + out
        x = x + block.mlp(block.norm_mlp(x))


def _layer(model, index):
    graphdef, state = nnx.split(model.blocks)
    return graphdef, jax.tree.map(lambda a: a[index], state)


def test_captured_lists_and_gates_are_the_layers_own(found):
    tokens, start = row()
    for index, (h, attention, _, lists) in enumerate(layers_by_hand(model_of(), tokens, start)):
        p = attention.project(h, jnp.arange(LENGTH))
        key_cmp, value_cmp = attention.compress(p.key_raw, p.value_raw)
        common = dict(config=GEOMETRY, segment_start=start)
        _, lse = nsa_jax.compressed_attention(p.query, key_cmp, value_cmp, **common)
        by_hand = nsa_jax.select_blocks(p.query, key_cmp, lse, **common)
        np.testing.assert_array_equal(found.lists[index], by_hand)
        np.testing.assert_array_equal(found.lists[index], lists)
        chex.assert_trees_all_close(found.gates[index], np.asarray(p.gates), atol=1e-5)
    assert found.lists.shape == (3, 2, LENGTH, GROUPS, 4) and found.gates.shape == (3, 2, LENGTH, HEADS, 3)


def test_scanned_and_unscanned_layers_capture_the_same(found):
    tokens, start = row()
    other = inspect.capture(model_of(scan_layers=False), tokens, start)
    np.testing.assert_array_equal(found.lists, other.lists)
    chex.assert_trees_all_close(found.entropy, other.entropy, atol=1e-5)


def test_walking_the_layers_is_the_models_forward_pass():
    tokens, start = row()
    tokens = np.where(np.arange(LENGTH) == 3, -1, tokens)  # which the model lacks
    model = model_of()
    hidden, _ = inspect.walk_layers(model, tokens, start, lambda arrays: arrays.lists)
    chex.assert_trees_all_close(hidden, model.hidden(tokens, start), atol=1e-5)


def test_weights_times_values_are_the_layers_output_and_sum_to_the_gates(found):
    tokens, start = row()
    model, at = model_of(), np.array([[0, 5, 30, 63], [20, 21, 40, 63]])
    reading = inspect.read_weights(model, tokens, at, start)
    rows = np.arange(2)[:, None]

    def attended(weights, value):  # [B, P, N, S], [B, S, K, V]
        return np.einsum("bpns,bsnv->bpnv", weights, np.repeat(value, HEADS // GROUPS, axis=2))

    for index, (h, attention, out, _) in enumerate(layers_by_hand(model, tokens, start)):
        p = attention.project(h, jnp.arange(LENGTH))
        _, value_cmp = attention.compress(p.key_raw, p.value_raw)
        total = attended(reading.compressed[index], value_cmp)
        total = total + attended(reading.selected[index], p.value_slc) + attended(reading.window[index], p.value_win)
        chex.assert_trees_all_close(attention.output(jnp.asarray(total)), out[rows, at], atol=1e-5)
    gates = found.gates[:, rows, at]
    chex.assert_trees_all_close(reading.selected.sum(-1), gates[..., 1], atol=1e-5)
    chex.assert_trees_all_close(reading.window.sum(-1), gates[..., 2], atol=1e-5)
    # Queries at the beginning of a document see no compressed block.
    sees = np.array([[False, False, True, True], [True, False, True, True]])
    expected = np.where(sees[..., None], gates[..., 0], 0)
    chex.assert_trees_all_close(reading.compressed.sum(-1), expected, atol=1e-5)
    chex.assert_trees_all_close(reading.tokens().sum(-1), expected + gates[..., 1:].sum(-1), atol=1e-5)
    assert (reading.tokens()[:, 1, 1:, :, :21] == 0).all(), "another document is read"
    assert all((reading.tokens()[:, b, i, :, t + 1 :] == 0).all() for (b, i), t in np.ndenumerate(at)), "the future is"


def test_token_weights_of_the_mean_compressor_are_exact():
    """With the mean compressor, spreading a block's weight over its tokens is what the branch really computes."""
    tokens, _ = row(batch=1)
    model, at = model_of(compressor="mean", num_layers=1), np.array([[11, 40, 63]])
    reading = inspect.read_weights(model, tokens, at)
    h, attention, out, _ = next(iter(layers_by_hand(model, tokens, None)))
    p = attention.project(h, jnp.arange(LENGTH))
    values = np.stack([p.value_raw, p.value_slc, p.value_win], -1).repeat(HEADS // GROUPS, axis=2)
    attended = np.einsum("bpnsi,bsnvi->bpnv", reading.branches()[0], values)
    chex.assert_trees_all_close(attention.output(jnp.asarray(attended)), out[:, at[0]], atol=1e-5)


def test_weights_of_a_row_of_a_million_tokens_are_spread():
    length, config = 2**20, nsa_jax.NSAConfig()
    weights = np.arange(blocks.num_compressed(length, config), dtype=np.float32)[None]
    for given in (weights, jnp.asarray(weights)):
        spread = np.asarray(inspect.spread_over_tokens(given, length, config))
        # Token t is in blocks t // 16 - 1 and t // 16, of 32 tokens each; there is none before the first.
        np.testing.assert_allclose(spread[0, [0, 16, length - 17]], [0, 1 / 32, (2 * 65_534 - 1) / 32])
        np.testing.assert_allclose(spread.sum(dtype=np.float64), weights.sum(dtype=np.float64), rtol=1e-6)
    assert not inspect.spread_over_tokens(weights[:, :0], 8, config).any()


def test_statistics_are_those_of_the_probabilities(found):
    tokens, start = row()
    at = np.broadcast_to(np.arange(LENGTH), (2, LENGTH))
    reading = inspect.read_weights(model_of(), tokens, at, start)
    probs = reading.window / found.gates[..., 2:3]
    away = np.arange(LENGTH)[:, None] - np.arange(LENGTH)
    entropy = -(probs * np.log(np.where(probs > 0, probs, 1))).sum(-1)
    chex.assert_trees_all_close(found.entropy[..., 2], entropy, atol=1e-4)
    chex.assert_trees_all_close(found.distance[..., 2], (probs * away[None, None, :, None]).sum(-1), atol=1e-4)
    chex.assert_trees_all_close(found.largest[..., 2], probs.max(-1), atol=1e-5)
    assert (found.beyond_window[..., 2] == 0).all()
    probs = reading.selected / found.gates[..., 1:2]
    beyond = (probs * (away >= GEOMETRY.window)[None, None, :, None]).sum(-1)
    chex.assert_trees_all_close(found.beyond_window[..., 1], beyond, atol=1e-5)
    assert 0.01 < beyond.max() <= 1.001
    # Of the compressed branch: one visible block leaves no doubt and lies 3.5 tokens before its last.
    chex.assert_trees_all_close(found.distance[:, 0, 7, :, 0], np.full((3, HEADS), 3.5), atol=1e-5)
    assert (found.largest[:, 0, :7, :, 0] == 0).all() and (found.sizes[:, 0, :7, :, 0] == 0).all()


def test_the_operator_alone_and_one_layer_are_captured_like_a_model(found):
    tokens, start = row()
    model = model_of()
    h, attention, _, _ = next(iter(layers_by_hand(model, tokens, start)))
    one = inspect.capture_layer(attention, h, start)
    arrays = inspect.run_attention(attention, h, start)
    raw = inspect.capture_arrays(*arrays[:8], config=GEOMETRY, segment_start=start, implementation="reference")
    for capture in (one, raw):
        assert capture.num_layers == 1 and capture.num_blocks == 8
        np.testing.assert_array_equal(capture.lists[0], found.lists[0])
        chex.assert_trees_all_close(capture.sizes[0], found.sizes[0], atol=1e-5)
    kwargs = dict(config=GEOMETRY, segment_start=start, implementation="reference")
    reading = inspect.read_weights_arrays(*arrays[:8], positions=[9, 63], **kwargs)
    whole = inspect.read_weights(model, tokens, [9, 63], start)
    chex.assert_trees_all_close(reading.tokens()[0], whole.tokens()[0], atol=1e-5)


def test_rows_shorter_than_a_compressed_block():
    tokens, _ = row(length=5)
    found = inspect.capture(model_of(), tokens)
    assert (found.entropy[..., 0] == 0).all() and np.isfinite(found.entropy).all()
    assert inspect.read_weights(model_of(), tokens, 4).tokens().shape == (3, 2, 1, HEADS, 5)


def test_models_without_nsa_are_refused():
    with pytest.raises(ValueError, match="model.config.attention='dense'"):
        inspect.capture(model_of(attention="dense"), row()[0])


def test_layers_of_a_pattern_keep_their_numbers():
    tokens, start = row()
    model = model_of(layer_pattern=("dense", "nsa"), num_layers=4)
    found, reading = inspect.capture(model, tokens, start), inspect.read_weights(model, tokens, 63, start)
    assert found.layers == reading.layers == (1, 3) and found.lists.shape[0] == reading.window.shape[0] == 2
    assert [axis.get_ylabel() for axis in inspect.draw_reading(reading).axes] == ["layer 1", "layer 3"]
    assert inspect.draw_lists(found, layers=[3]).axes[0].get_title().startswith("layer 3, ")
    assert [label.get_text() for label in inspect.draw_gates(found).axes[0].get_yticklabels()] == ["layer 1", "layer 3"]


LISTS = np.array([[0, 1, 6, 7], [0, 3, 6, 7]], np.int32)  # two head groups of the query at token 63


def test_figures_of_lists():
    lists = np.zeros((1, 1, LENGTH, 2, 4), np.int32) + 8
    lists[0, 0, 62] = [[0, 1, 6, 7], [0, 2, 6, 7]]
    lists[0, 0, 63] = LISTS
    chosen = inspect.chosen_by_score(lists, GEOMETRY)
    np.testing.assert_array_equal(chosen[0, 0, 63], [[False, True, False, False]] * 2)
    np.testing.assert_array_equal(inspect.block_distances(lists, GEOMETRY)[0, 0, 63, 0], [56, 48, 8, 0])
    assert (inspect.block_distances(lists, GEOMETRY)[0, 0, 3] == -1).all()
    np.testing.assert_allclose(inspect.neighbour_overlap(lists[0], 8)[0, -1], [1.0, 0.75])
    np.testing.assert_array_equal(
        np.flatnonzero(inspect.choosing_queries(GEOMETRY, np.zeros((1, LENGTH)))), range(32, 64)
    )
    shared, chance = inspect.layer_overlap(lists, GEOMETRY)
    np.testing.assert_allclose(shared, np.eye(2))
    # Queries of blocks 4 to 7 choose one block of 2, 3, 4, 5 candidates beyond the first and the last two.
    np.testing.assert_allclose(chance, np.mean([1 / 2, 1 / 3, 1 / 4, 1 / 5]))
    packed = inspect.chosen_by_score(lists, GEOMETRY, np.full((1, LENGTH), 24))
    np.testing.assert_array_equal(packed[0, 0, 63], np.zeros((2, 4)))  # block 3 is the document's first: forced


def test_random_lists_overlap_as_chance_says():
    model = model_of(num_layers=1)
    rng = np.random.default_rng(1)
    importance = jnp.asarray(rng.random((2, 8, LENGTH, GROUPS, 8)), jnp.float32)
    t = jnp.arange(LENGTH)[:, None]
    lists = np.asarray(blocks.select_from_importance(importance, t, 0 * t, model.config.nsa))
    shared, chance = inspect.layer_overlap(lists, GEOMETRY)
    off_diagonal = shared[~np.eye(4, dtype=bool)]
    np.testing.assert_allclose(off_diagonal.mean(), chance, atol=0.03)


def test_kinds_and_strings_of_tokens():
    text = "def f1(x):\n  é"
    strings = inspect.token_strings(ByteTokenizer(), ByteTokenizer().encode(text))
    assert "".join(strings[:13]) == text[:13] and len(strings) == 15
    kinds = inspect.token_kinds(strings)
    assert list(kinds[:11]) == [*["letter"] * 3, "space", "letter", "digit", "punctuation", "letter"] + [
        "punctuation",
        "punctuation",
        "newline",
    ]
    means = inspect.mean_by_kind(np.arange(11.0).reshape(1, 1, 11, 1), kinds[None, :11])
    assert {name: float(v[0, 0]) for name, v in means.items()} == {
        "letter": np.mean([0, 1, 2, 4, 7]),
        "space": 3.0,
        "digit": 5.0,
        "punctuation": np.mean([6, 8, 9]),
        "newline": 10.0,
    }


def test_figures_show_what_was_captured_and_leave_pyplot_alone(found, tmp_path):
    import matplotlib.pyplot as plt

    before = plt.get_fignums()  # of other tests in this process
    tokens, start = row()
    reading = inspect.read_weights(model_of(), tokens, [63], start)
    kinds = np.where(tokens < 128, "low", "high")
    figures = {
        "masks": inspect.draw_masks(GEOMETRY, LENGTH, found.lists[0, 0, :, 0]),
        "lists": inspect.draw_lists(found, layers=[0, 2]),
        "overlap": inspect.draw_overlap(found),
        "gates": inspect.draw_gates(found),
        "kinds": inspect.draw_gates_by_kind(inspect.mean_by_kind(found.gates, kinds)),
        "statistics": inspect.draw_statistics(found),
        "reading": inspect.draw_reading(reading),
    }
    assert plt.get_fignums() == before
    for name, figure in figures.items():
        assert isinstance(figure, matplotlib.figure.Figure)
        figure.savefig(tmp_path / f"{name}.png")
        assert all(axis.get_xlabel() or axis.get_title() or axis.get_ylabel() for axis in figure.axes)
    # The numbers behind the pictures.
    window = figures["masks"].axes[2].images[0].get_array()
    np.testing.assert_array_equal(np.asarray(window).sum(1), np.minimum(np.arange(LENGTH) + 1, GEOMETRY.window))
    selected = np.asarray(figures["masks"].axes[1].images[0].get_array()).sum(1)
    np.testing.assert_array_equal(selected, blocks.selected_key_count(np.arange(LENGTH), 0, GEOMETRY))
    states = np.asarray(figures["lists"].axes[0].images[0].get_array())
    assert states.shape == (LENGTH, 8) and (np.isin(states[63], (2, 3)).sum(), (states[63] == 2).sum()) == (4, 3)
    gates = np.asarray(figures["gates"].axes[1].images[0].get_array())
    chex.assert_trees_all_close(gates, found.gates[..., 1].mean((1, 2)), atol=1e-6)
    np.testing.assert_allclose(drawn_area(figures["reading"]), reading.tokens()[0, 0, 0].mean(0).sum(), rtol=1e-5)


def drawn_area(figure) -> float:
    """Of all branches in the first panel of `draw_reading`."""
    outlines = [area.get_paths()[0].vertices for area in figure.axes[0].collections[:3]]
    return sum(abs(x @ np.roll(y, 1) - y @ np.roll(x, 1)) / 2 for x, y in (outline.T for outline in outlines))


def test_a_query_of_a_long_row_is_drawn_at_once():
    length, config = 32_768, nsa_jax.NSAConfig()
    tokens = np.random.default_rng(0).random((1, 1, 1, 1, length), np.float32)
    compressed = np.zeros((1, 1, 1, 1, blocks.num_compressed(length, config)), np.float32)
    reading = inspect.Reading(config, np.array([[length - 1]]), compressed, tokens, tokens, (0,))
    figure = inspect.draw_reading(reading)
    assert len(figure.axes[0].get_children()) < 100  # an artist for each token would take minutes, and GiB
    np.testing.assert_allclose(drawn_area(figure), 2 * tokens.sum(dtype=np.float64), rtol=1e-5)


def test_drawn_means_of_long_rows_are_right(found):
    values = np.broadcast_to(np.float32(5.3), (1, 1, 131_072, 64, 3))  # 8 million for each branch
    names = ("sizes", "entropy", "distance", "beyond_window")
    capture = dataclasses.replace(found, layers=(0,), lists=found.lists[:1], **dict.fromkeys(names, values))
    share, *others = ([bar.get_height() for bar in axis.patches] for axis in inspect.draw_statistics(capture).axes)
    np.testing.assert_allclose(share, 1 / 3, rtol=1e-5)
    np.testing.assert_allclose(others, 5.3, rtol=1e-5)


def test_overlap_of_rows_without_a_choice_is_refused(found):
    short = dataclasses.replace(found, lists=found.lists[:, :, :24], segment_start=found.segment_start[:, :24])
    with pytest.raises(ValueError, match="every query lists all its blocks"):
        inspect.draw_overlap(short)


def test_highlighted_text_keeps_the_text_and_marks_the_largest_weight():
    strings = [*"if a<b:\n", "", *"tail"]
    weights = np.array([0.1, 0, 0, 0.4, 0, 0.025, 0, 0, 0, 9, 9, 9, 9])
    page = inspect.reading_html(strings, weights, 8, next_token="x")
    shown = html.unescape(re.sub(r"<[^>]*>", "", page))
    assert shown == "if a<b:⏎\n∎ → 'x'"
    alphas = [float(a) for a in re.findall(r"rgba\(213,94,0,([\d.]+)\)", page)]
    np.testing.assert_allclose(alphas, np.sqrt(weights[:9] / 0.4), atol=0.006)
    assert page.count("outline") == 1 and 'title="3: 0.4000"' in page
