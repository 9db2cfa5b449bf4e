"""Scores of far questions, the verdict on selection, and what a run with tasks among its sources tells at its end."""

import dataclasses
import json
import re

import numpy as np
import pytest
from flax import nnx

from nsa_jax import NSAConfig, inspect, nn
from nsa_jax.data import load_tokenizer
from nsa_jax.data.long_tasks import Answer, Row
from nsa_jax.inspect.probe import Scored, score_rows

from .tiny import make_run, tiny_config

GEOMETRY = NSAConfig(compress_block=4, compress_stride=2, select_block=4, num_selected=4, num_local=1, window=4)
SOURCES = {
    "keypad": {"source": "task", "tasks": ("keypad",), "weight": 3.0, "task_answer_weight": 8.0},
    "stdlib": {"max_documents": 20},
}


def config_of(**changes):
    geometry = {f"model__nsa__{name}": value for name, value in vars(GEOMETRY).items()}
    data = dict(data__source="stdlib", data__sources=SOURCES, data__seq_len=64, data__val_fraction=0.2)
    return tiny_config(**{**geometry, **data, "model__implementation": "xla", **changes})


def make_probe(**changes):
    config = config_of(**changes)
    return inspect.Probe(nn.Transformer(nn.ModelConfig.from_config(config, 257), rngs=nnx.Rngs(0)))


def make_task(**changes):
    config = config_of(**changes)
    return inspect.far_task(config, load_tokenizer(config))


@pytest.fixture(scope="module")
def probe():
    return make_probe()


def scored(positions, sources, chosen):
    """Answers whose lists are those of the operator, the blocks by score being `chosen` [Q, L, K, 2]."""
    found = []
    for query, source, blocks in zip(positions, sources, chosen, strict=True):
        forced = np.broadcast_to([0, query // GEOMETRY.select_block], (*blocks.shape[:-1], 2))
        listed = (np.concatenate([forced, blocks], -1) == source // GEOMETRY.select_block).any(-1)
        found.append(Scored("made", Answer(query + 1, query + 2, source, 0.2), True, listed))
    return found


def random_choices(positions, rng):
    """Two different blocks of those that no rule forces, at random, for 2 layers and 2 groups."""
    shape = (len(positions), 2, 2)
    chosen = np.empty((*shape, 2), int)
    for at in np.ndindex(shape):
        chosen[at] = 1 + rng.permutation(positions[at[0]] // GEOMETRY.select_block - 1)[:2]
    return chosen


def test_the_verdict_tells_lists_that_hold_the_answers_from_lists_drawn_at_random():
    rng = np.random.default_rng(0)
    positions, sources = rng.integers(48, 64, 200), rng.integers(8, 40, 200)
    chosen = random_choices(positions, rng)
    at_random = inspect.judge_selection(scored(positions, sources, chosen), GEOMETRY)
    assert at_random.chance == pytest.approx(np.mean(2 / (positions // 4 - 1)))  # of the candidates, two are forced
    assert not at_random.unlike_chance and "selection is at chance" in str(at_random)
    np.testing.assert_allclose(at_random.share, at_random.chance, atol=5 * at_random.error.max())

    chosen[:, 1, 0, 0] = sources // 4  # one head group of the second layer reads what it needs
    knowing = inspect.judge_selection(scored(positions, sources, chosen), GEOMETRY)
    assert knowing.share[1, 0] == 1.0 and knowing.unlike_chance
    assert "clearly unlike chance" in str(knowing) and "100% in NSA layer 1, group 0" in str(knowing)


def test_lists_that_rules_force_are_no_achievement():
    positions, sources = np.full(9, 50), np.full(9, 2)  # in the first block, which is always listed
    chosen = random_choices(positions, np.random.default_rng(0))
    verdict = inspect.judge_selection(scored(positions, sources, chosen), GEOMETRY)
    assert verdict.chance == 1.0 == verdict.share.min() and not verdict.unlike_chance


@pytest.mark.parametrize("questions", [1, 3])
def test_a_few_questions_that_are_answered_by_accident_do_not_tell_lists_from_random_ones(questions):
    positions, sources = np.full(questions, 50), np.full(questions, 20)
    chosen = random_choices(positions, np.random.default_rng(0))
    chosen[:, 1, 0, 0] = sources // 4
    verdict = inspect.judge_selection(scored(positions, sources, chosen), GEOMETRY)
    assert verdict.share.max() == 1.0 and np.isfinite(verdict.error).all() and not verdict.unlike_chance


def test_at_initialisation_answers_and_lists_are_at_chance(probe):
    found, verdict = inspect.score_far_task(probe, make_task(), rows=32)
    assert found["questions"] >= 320 and found["chance"] == pytest.approx(0.2) and found["window"] == 4
    assert max(found[name] for name in ("accuracy", "without_selected", "window_only")) < 0.3
    assert not found["selection_unlike_chance"] and not verdict.unlike_chance
    assert found["selection_mean"] == pytest.approx(found["selection_chance"], abs=0.1)
    assert found["least_distance"] > probe.config.num_layers * 3  # the windows of all layers together


def test_each_accuracy_is_that_of_the_model_with_these_branches(monkeypatch):
    """The answers of made-up rows are what one of the models predicts, so that this one alone is always right."""
    probe, task = make_probe(model__init_std=1.0), make_task()  # attention decides what is predicted
    assert task.weights == {"keypad": 1.0}
    rows = [row for _, row in task.rows(16)]
    answers = [next(a for a in reversed(row.answers) if task.is_far(a)) for row in rows]
    at = np.array([[a.first - 1] for a in answers])
    logits = nnx.jit(lambda model, tokens: model(tokens))
    for name, shut in {"accuracy": (), "without_selected": (1,), "window_only": (0, 1)}.items():
        tokens = np.stack([row.tokens for row in rows])
        predicted = np.asarray(logits(inspect.without_branch(probe.model, *shut), tokens)).argmax(-1)
        np.put_along_axis(tokens, at + 1, np.take_along_axis(predicted, at, axis=1), axis=1)
        made = [("made", Row(row, (answer,))) for row, answer in zip(tokens, answers, strict=True)]
        monkeypatch.setattr(inspect.FarTask, "rows", lambda task, count, made=made: made)
        found, _ = inspect.score_far_task(probe, task, rows=16)
        assert found[name] == 1.0
        assert all(found[other] < 0.9 for other in ("accuracy", "without_selected", "window_only") if other != name)


def test_a_run_without_far_questions_has_no_scores(probe):
    none_far = dataclasses.replace(make_task(), reach=64)
    assert inspect.score_far_task(probe, none_far, rows=2) == ({}, None)
    assert inspect.show_far_question(probe, none_far) is None
    assert make_task(data__sources={}) is None


def test_the_map_of_a_query_shows_its_blocks_and_what_it_reads(probe):
    task = make_task()
    ((_, row),) = task.rows(1)
    answer = next(a for a in row.answers if task.is_far(a))
    tokens, query = row.tokens[None], answer.first - 1
    reading = inspect.read_weights(probe.model, tokens, query)
    _, lists = probe(tokens, np.array([[query]]))
    strings = [chr(token) for token in row.tokens]
    text = inspect.terminal.describe_reading(reading, strings, lists, answer.source)
    weights = reading.branches()[:, 0, 0]
    layer, head = np.unravel_index(weights[:, :, answer.source].sum(-1).argmax(), weights.shape[:2])
    listed = lists[layer, 0, 0, head // 2]
    (drawn,) = re.findall(r"\[([.ox#]+)\]", text)
    assert [i for i, c in enumerate(drawn) if c in "o#"] == listed[listed < 16].tolist() and len(drawn) == 16
    home = answer.source // 4
    assert drawn[home] == ("#" if home in listed else "x")
    weight = weights[layer, head]
    share = weight.sum(0) / weight.sum()
    assert f"read by compressed {share[0]:.0%}, selected {share[1]:.0%}, window {share[2]:.0%}" in text
    top = int(weight.sum(-1).argmax())
    assert f"most: {strings[top]!r} at {top} {weight[top].sum() / weight.sum():.0%}" in text
    shown, figure = inspect.show_far_question(probe, task)
    right = [s for s in score_rows(probe, [("keypad", row)], 1) if task.is_far(s.answer)]
    asked = next((s for s in right if s.right), right[0]).answer
    assert f"at {asked.first - 1} asks for" in figure.axes[0].get_title() and f"at {asked.source}" in shown


def test_a_run_with_tasks_ends_with_its_accuracies_and_a_picture(tmp_path, capsys):
    changes = dict(model__implementation="xla", data__source="stdlib", data__sources=SOURCES, data__seq_len=64)
    geometry = {f"model__nsa__{name}": value for name, value in vars(GEOMETRY).items()}
    more = dict(data__val_fraction=0.2, train__steps=2, train__eval_batches=1)
    summary = make_run(tmp_path, **geometry, **changes, **more).run()
    assert json.loads((tmp_path / "summary.json").read_text())["far_task"] == summary["far_task"]
    assert summary["far_task"].keys() >= {"accuracy", "without_selected", "window_only", "chance"}
    said = capsys.readouterr().out
    bits = summary["validation"]["val/bits_per_byte/stdlib"]
    assert f"stdlib: {bits:.3f} bits per byte" in said and "keypad: " not in said
    assert f"whole model {summary['far_task']['accuracy']:.1%}, selected branch off" in said
    assert "of 16 blocks listed" in said and "selection is " in said
    assert (tmp_path / "far_task.png").read_bytes()[1:4] == b"PNG"
