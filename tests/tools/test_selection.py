"""Selection quality and substituted branches against loops over tokens and blocks."""

import dataclasses
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from benchmarks import selection
from nsa_jax import inspect
from nsa_jax.command_line import EXIT_USAGE
from nsa_jax.hub.export_files import LoadError
from nsa_jax.nn.observe import run_attention
from nsa_jax.ops import blocks

from .test_inspect import GEOMETRY, GROUPS, LENGTH, layers_by_hand, model_of, row

POSITIONS = np.array([[3, 40, 63], [20, 50, 62]])


def mass_by_hand(query, key, t, start, size=8):
    """Of one query [N, H] over keys [S, K, H]: [K, J]."""
    groups = key.shape[1]
    mass = np.zeros((groups, -(-len(key) // size)))
    for head in range(len(query)):
        group = head * groups // len(query)
        scores = np.array([query[head] @ key[p, group] for p in range(start, t + 1)]) / np.sqrt(query.shape[-1])
        weights = np.exp(scores - scores.max())
        for p, weight in zip(range(start, t + 1), weights / weights.sum(), strict=True):
            mass[group, p // size] += weight / (len(query) // groups)
    return mass


def test_mass_is_that_of_dense_attention():
    query, key = (np.asarray(jax.random.normal(jax.random.key(i), (2, 21, n, 8))) for i, n in ((0, 4), (1, 2)))
    t, start = np.array([[0, 13, 20], [5, 9, 20]]), np.array([[0, 0, 9], [5, 2, 0]])
    rows = np.arange(2)[:, None]
    found = inspect.block_mass(query[rows, t], key, GEOMETRY, start, t)
    for b, p in np.ndindex(2, 3):
        np.testing.assert_allclose(
            found[b, p], mass_by_hand(query[b, t[b, p]], key[b], t[b, p], start[b, p]), atol=1e-5
        )
    np.testing.assert_allclose(found.sum(-1), 1, atol=1e-5)


def test_quality_of_lists_against_the_oracle_and_random_ones():
    """Of 2 free places among 5 free candidates, random lists get each with probability 2/5."""
    config = dataclasses.replace(GEOMETRY, num_selected=5)
    tokens, start = row()
    model = model_of(nsa=config)
    found = inspect.selection_quality(model, tokens, POSITIONS, start)
    assert found["listed"].shape == (3, 2, 3, GROUPS)
    for layer, (h, attention, _, lists) in enumerate(layers_by_hand(model, tokens, start)):
        arrays = run_attention(attention, h, jnp.asarray(start))
        for b, p in np.ndindex(2, 3):
            t, s = POSITIONS[b, p], start[b, POSITIONS[b, p]]
            mass = mass_by_hand(arrays.query[b, t], arrays.key_slc[b], t, s)
            candidates = list(range(s // 8, t // 8 + 1))
            forced = {candidates[0], *candidates[-2:]}
            free = [j for j in candidates if j not in forced]
            for group in range(GROUPS):
                own = {int(j) for j in lists[b, t, group] if j < 8}
                room = 5 - len(forced)
                best = forced | set(sorted(free, key=lambda j: -mass[group, j])[:room])
                at = layer, b, p, group
                assert found["listed"][at] == pytest.approx(sum(mass[group, j] for j in own), abs=1e-5)
                assert found["oracle"][at] == pytest.approx(sum(mass[group, j] for j in best), abs=1e-5)
                share = min(room / len(free), 1) if free else 0
                by_chance = mass[group, list(forced)].sum() + share * mass[group, free].sum()
                assert found["random"][at] == pytest.approx(by_chance, abs=1e-5)
                by_score = own - forced
                overlap = len(by_score & best) / max(len(by_score), 1)
                assert found["overlap"][at] == pytest.approx(overlap, abs=1e-6)
    assert (found["oracle"] >= found["listed"] - 1e-6).all() and (found["oracle"] > found["random"] + 1e-3).any()


def test_quality_against_another_models_attention():
    tokens, start = row()
    dense = inspect.dense_mass
    model, other = model_of(layer_pattern=("nsa", "dense"), num_layers=2), model_of(attention="dense", num_layers=2)
    mass = dense(other, tokens, POSITIONS, GEOMETRY, start)
    assert mass.shape == (2, 2, 3, 8)
    np.testing.assert_allclose(mass.sum(-1), 1, atol=1e-5)
    found = inspect.selection_quality(model, tokens, POSITIONS, start, dense=other)
    lists = inspect.capture(model, tokens, start).lists[0][np.arange(2)[:, None], POSITIONS]
    held = inspect.held_mass(mass[0][:, :, None], lists)
    np.testing.assert_allclose(found["listed"][0], held, atol=1e-5)
    with pytest.raises(ValueError, match="num_layers=3: must be the 2"):
        inspect.selection_quality(model, tokens, POSITIONS, start, dense=model_of(attention="dense"))
    with pytest.raises(ValueError, match="must be 'dense'"):
        dense(model, tokens, POSITIONS, GEOMETRY)


def losses_by_hand(model, tokens, start, branch):
    """Losses when branch(arrays, attention, h) gives the outputs of the branches."""
    x = model.embedding[...][tokens]
    for index in range(model.config.num_layers):
        graphdef, state = nnx.split(model.blocks)
        block = nnx.merge(graphdef, jax.tree.map(lambda a, index=index: a[index], state))
        h = block.norm_attention(x)
        arrays = run_attention(block.attention, h, jnp.asarray(start))
        outputs = branch(arrays, block.attention, h)
        attended = sum(np.asarray(arrays.gates)[..., i, None] * outputs[i] for i in range(3))
        x = x + block.attention.output(jnp.asarray(attended))
        x = x + block.mlp(block.norm_mlp(x))
    logits = jax.nn.log_softmax(model.logits(model.norm(x)))[:, :-1]
    return -np.take_along_axis(np.asarray(logits), tokens[:, 1:, None], -1)[..., 0]


def attend_to(query, key, value, allowed):
    """Softmax attention [B, T, N, V] over the keys that allowed [B, T, K, S] holds; 0 where it holds none."""
    heads = query.shape[2] // key.shape[2]
    key, value, allowed = np.repeat(key, heads, 2), np.repeat(value, heads, 2), np.repeat(allowed, heads, 2)
    scores = np.einsum("btnh,bsnh->btns", query, key) / np.sqrt(query.shape[-1])
    weights = np.where(allowed, np.exp(np.where(allowed, scores, -np.inf) - scores.max(-1, keepdims=True)), 0)
    return np.einsum("btns,bsnv->btnv", weights / np.maximum(weights.sum(-1, keepdims=True), 1e-30), value)


@pytest.mark.parametrize("substitute", inspect.SUBSTITUTES)
def test_losses_with_a_branch_computed_otherwise(substitute):
    model, (tokens, start) = model_of(num_layers=2), row()
    t, p = np.arange(LENGTH)[:, None], np.arange(LENGTH)
    usable = (p <= t) & (p >= start[..., None])  # [B, T, S]

    def branch(arrays, attention, h):
        outputs = [np.asarray(out) for out in arrays.outputs]
        query, key, value = (np.asarray(a) for a in (arrays.query, arrays.key_slc, arrays.value_slc))
        if substitute == "oracle":
            chosen = np.zeros((2, LENGTH, GROUPS, LENGTH), bool)
            for b, at in np.ndindex(2, LENGTH):
                mass = mass_by_hand(query[b, at], key[b], at, start[b, at])
                last, first = at // 8, start[b, at] // 8
                for group in range(GROUPS):
                    forced = {first, max(last - 1, first), last}
                    free = sorted(set(range(first, last + 1)) - forced, key=lambda j: -mass[group, j])
                    chosen[b, at, group] = np.isin(p // 8, [*forced, *free[: 4 - len(forced)]])
            outputs[1] = attend_to(query, key, value, chosen & usable[:, :, None])
        elif substitute == "all":
            outputs[1] = attend_to(query, key, value, np.repeat(usable[:, :, None], GROUPS, 2))
        elif substitute == "exact":
            raw = attention.project(h, jnp.arange(LENGTH), LENGTH)
            covered = np.zeros_like(usable)
            for b, at in np.ndindex(2, LENGTH):
                for i in range(blocks.num_compressed(LENGTH, GEOMETRY)):
                    if i * 4 >= start[b, at] and i * 4 + 7 <= at:
                        covered[b, at, i * 4 : i * 4 + 8] = True
            key = np.asarray(model.config.rope(raw.key_raw, jnp.arange(LENGTH), LENGTH))
            outputs[0] = attend_to(query, key, np.asarray(raw.value_raw), np.repeat(covered[:, :, None], GROUPS, 2))
        return outputs

    found = inspect.substituted_losses(model, tokens, substitute, start)
    np.testing.assert_allclose(found, losses_by_hand(model, tokens, start, branch), atol=2e-4)
    if substitute != "none":
        assert np.abs(found - inspect.substituted_losses(model, tokens, "none", start)).max() > 1e-3


def test_what_cannot_be_substituted_is_named():
    tokens = row()[0]
    with pytest.raises(ValueError, match="substitute='some'"):
        inspect.substituted_losses(model_of(), tokens, "some")
    with pytest.raises(ValueError, match="no compressed branch"):
        inspect.substituted_losses(model_of(selector="mean_key"), tokens, "exact")
    with pytest.raises(ValueError, match="must be 'nsa'"):
        inspect.substituted_losses(model_of(attention="dense"), tokens)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nowhere"], "no directory"),
        (["window"], "has no NSA layers, only window"),
        (["nsa", "--dense=window"], "must have dense attention in all of 2 layers"),
        (["nsa", "--dense=other"], "its tokenizer is not that"),
        (["nsa", "--context=9999"], "no held-out document has 9999 tokens"),
        (["nsa", "--context=24"], "raise --context"),
    ],
)
def test_mistakes_end_in_one_line(arguments, says, monkeypatch, capsys):
    def load(path):
        if path == "nowhere":
            raise LoadError("nowhere is no directory")
        kind = path if path in ("nsa", "window") else "dense"
        model = SimpleNamespace(config=SimpleNamespace(kinds=(kind,), nsa=GEOMETRY, num_layers=2))
        return model, SimpleNamespace(fingerprint="other" if path == "other" else "same"), None

    documents = SimpleNamespace(documents=[np.zeros(100, np.int32)])
    monkeypatch.setattr(selection, "load", load)
    monkeypatch.setattr(selection, "held_out_documents", lambda *_: documents)
    monkeypatch.setattr(sys, "argv", ["selection.py", *arguments])
    assert selection.main() == EXIT_USAGE
    assert says in capsys.readouterr().err
