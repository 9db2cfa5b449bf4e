"""Evaluation: what is counted, and that the figures are those of the model."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
import types

import chex
import jax
import numpy as np
import pytest
from flax import nnx

from nsa_jax import evaluate, inspect, nn
from nsa_jax.command_line import EXIT_USAGE
from nsa_jax.config import default_config
from nsa_jax.data.errors import DataError
from nsa_jax.data.synthetic import recall_rows
from nsa_jax.data.tokenizers import BPE_EOS, ByteTokenizer, HuggingFaceTokenizer, SyntheticTokenizer, train_bpe
from nsa_jax.evaluate import retrieval, scoring, validation

from .runs import small_config, write_run


@pytest.fixture(scope="module")
def model():
    return nn.Transformer(nn.ModelConfig.from_config(small_config(), 257), rngs=nnx.Rngs(0))


@pytest.mark.parametrize(
    ("length", "context", "stride"), [(1, 8, 8), (8, 8, 8), (9, 8, 8), (50, 8, 3), (50, 8, 8), (7, 8, 4)]
)
def test_windows_count_every_target_once_with_enough_context(length, context, stride):
    counted = []
    for first, end, skip in evaluate.windows(length, context, stride):
        assert first <= skip < end <= first + context
        if first:
            assert skip - first >= context - stride
        counted += range(skip, end)
    assert counted == list(range(length))


def test_scores_are_those_of_the_forward_pass(model):
    """Two documents, one longer than the context; a stride of half a context."""
    rng = np.random.default_rng(0)
    documents = [rng.integers(0, 256, n).astype(np.int32) for n in (100, 20)]
    context, stride = 64, 32
    forward = jax.jit(lambda tokens: jax.nn.log_softmax(model(tokens)))
    nats, total_bytes = 0.0, 0
    by_position = np.zeros(context)
    for document, jobs in ((documents[0], [(0, 64, 0), (32, 96, 64), (64, 100, 96)]), (documents[1], [(0, 20, 0)])):
        stream = np.append(document, 256)
        for first, end, skip in jobs:
            row = np.zeros((1, 64), np.int32)
            row[0, : end - first] = stream[first:end]
            losses = -np.asarray(forward(row))[0][np.arange(end - first), stream[first + 1 : end + 1]]
            nats += losses[skip - first :].sum()
            total_bytes += (stream[skip + 1 : end + 1] != 256).sum()
            if document is documents[0]:
                by_position[: end - first] += losses
    token_bytes = np.append(np.ones(256, np.int32), [0] * 4)
    scorer = evaluate.Scorer(model)
    found = evaluate.score_documents(scorer, documents, token_bytes, 256, context=context, stride=stride, batch_size=3)
    assert found["tokens"] == 120 and found["bytes"] == total_bytes == 118
    assert found["loss"] == pytest.approx(nats / 120, rel=1e-5)
    assert found["bits_per_byte"] == pytest.approx(nats / math.log(2) / 118, rel=1e-5)
    np.testing.assert_allclose(found["by_position"]["nats"], by_position, rtol=1e-4)
    np.testing.assert_array_equal(found["by_position"]["counts"], [3] * 36 + [2] * 28)


def test_rows_are_no_longer_than_the_documents():
    """A context of a million tokens took as much memory with documents of 300."""
    seen = []

    def scorer(inputs, targets):
        seen.append(inputs.shape)
        return np.ones(inputs.shape, np.float32)

    documents = [np.arange(size) % 256 for size in (300, 20)]
    sizes = dict(context=1_000_000, stride=500_000, batch_size=2)
    found = evaluate.score_documents(scorer, documents, np.ones(257, np.int32), 256, **sizes)
    assert seen == [(2, 384)] and found["tokens"] == 320 and found["loss"] == 1.0
    by_position = found["by_position"]
    assert by_position["counts"].sum() == 320 and len(by_position["nats"]) == 1_000_000


def test_a_document_that_was_cut_is_not_scored_as_if_it_ended_there(model, tmp_path):
    tokens = np.random.default_rng(0).integers(0, 256, 50).astype(np.int32)
    scorer, token_bytes = evaluate.Scorer(model), np.append(np.ones(256, np.int32), [0] * 4)
    sizes = dict(context=64, stride=32, batch_size=2)
    whole = evaluate.score_documents(scorer, [tokens], token_bytes, 256, **sizes)
    cut = evaluate.score_documents(scorer, [tokens[:31]], token_bytes, 256, **sizes, cut=[0])
    assert (whole["tokens"], cut["tokens"], cut["bytes"]) == (50, 30, 30)
    np.testing.assert_allclose(cut["by_position"]["nats"][:30], whole["by_position"]["nats"][:30], rtol=1e-5)
    for name, length in (("a", 20), ("b", 100)):
        (tmp_path / f"{name}.txt").write_text("x" * length)
    found = evaluate.held_out_documents(default_config(), (str(tmp_path / "*.txt"),), ByteTokenizer(), 60)
    assert [len(document) for document in found.documents] == [20, 40] and found.cut == {1}
    found = evaluate.held_out_documents(default_config(), (str(tmp_path / "*.txt"),), ByteTokenizer(), 120)
    assert [len(document) for document in found.documents] == [20, 100] and not found.cut


def test_files_are_cut_into_documents_as_in_training(tmp_path):
    """They were one document each, with the separator as a part of its text."""
    config = default_config()
    config.data.source, config.data.text_separator = "text", "<end>"
    path = tmp_path / "held_out.txt"
    path.write_text("one<end>two<end>three")

    def texts(config, separator=None):
        found = evaluate.held_out_documents(config, (str(path),), ByteTokenizer(), 1000, separator=separator)
        return [bytes(document.tolist()).decode() for document in found.documents]

    assert texts(config) == ["one", "two", "three"]
    assert texts(config, "") == texts(default_config()) == ["one<end>two<end>three"]
    assert texts(config, "two") == ["one<end>", "<end>three"]
    mixture = default_config()
    mixture.data.sources = {
        name: dict(weight=1.0, source="text", files=(str(path),), text_separator=end)
        for name, end in (("a", "<end>"), ("b", "two"))
    }
    assert texts(mixture) == ["one<end>two<end>three"]


def test_held_out_documents_are_long_enough_for_a_longer_context(tmp_path):
    config = small_config()
    config.data.source, config.data.files, config.data.val_fraction = "text", (str(tmp_path / "*.txt"),), 0.5
    config.data.cache_dir = str(tmp_path / "cache")
    for i in range(12):
        (tmp_path / f"{i}.txt").write_text(f"{i} " + "text " * 8 * config.data.seq_len)
    assert all(len(d) == 16 * config.data.seq_len for d in held_out(config).documents)
    assert all(len(d) > 39 * config.data.seq_len for d in held_out(config, 64 * config.data.seq_len).documents)


def test_files_that_spell_out_the_end_of_a_document_are_read_as_in_training(tmp_path):
    """The words became the token, which stands for no bytes: 13 of these 39 were counted, and the text ended within."""
    made = json.loads(train_bpe(["the grass is green. " * 50], 300))
    made["added_tokens"] = [{"id": made["model"]["vocab"][BPE_EOS], "content": BPE_EOS, "special": True}]
    made["added_tokens"][0] |= dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    tokenizer = HuggingFaceTokenizer(json.dumps(made), eos=BPE_EOS)
    text = f"the{BPE_EOS}grass is {BPE_EOS}\n"
    path = tmp_path / "text.txt"
    path.write_text(text)
    (document,) = evaluate.held_out_documents(default_config(), (str(path),), tokenizer, 1000).documents
    assert document.dtype == np.int32 and document.tolist() == tokenizer.encode_documents([text])[0].tolist()
    assert tokenizer.eos_id not in document and tokenizer.token_bytes[document].sum() == len(text)


def held_out(config, *more):
    return evaluate.held_out_documents(config, (), ByteTokenizer(), 10**6, *more)


def test_position_bins_double():
    rows = evaluate.position_bins(np.arange(10.0), np.ones(10))
    assert [(row["from"], row["to"], row["loss"]) for row in rows] == [
        (0, 1, 0.0), (1, 2, 1.0), (2, 4, 2.5), (4, 8, 5.5), (8, 10, 8.5)
    ]  # fmt: skip


@pytest.mark.parametrize("num_keys", [1, 3])
@pytest.mark.parametrize("depth", [0.0, 0.4, 1.0])
def test_needle_rows_hold_the_fact_at_its_depth(num_keys, depth):
    tokenizer = ByteTokenizer()
    haystack = np.full(500, ord("."), np.int32)
    rng = np.random.default_rng(3)
    row, queries, answer_at = retrieval.needle_row(tokenizer, haystack, 200, depth, rng=rng, num_keys=num_keys)
    text = tokenizer.decode(row)
    assert row.shape == (200,)
    question, answer = text[-12:].split(" =")
    fact = f"{question} ={answer}\n"
    assert text.count(fact) == 1 and text.count(" = ") == num_keys + 1
    room = text.count(".")
    assert text[: text.index(fact)].count(".") == round(depth * room)
    np.testing.assert_array_equal(row[queries + 1], row[answer_at])
    assert tokenizer.decode(row[queries + 1]) == answer
    with pytest.raises(ValueError, match="length=20"):
        retrieval.needle_row(tokenizer, haystack, 20, depth, rng=rng)


def test_recall_rows_ask_for_every_fact_far_away():
    batch = recall_rows(np.arange(3), 128, 128, seed=0, split="train")
    rows = np.concatenate([batch["inputs"], batch["targets"][:, -1:]], axis=1)
    for row, mask in zip(rows, batch["loss_mask"], strict=True):
        facts = dict(row[:32].reshape(16, 2).tolist())
        answers = np.flatnonzero(mask) + 1
        assert len(facts) == len(answers) == 16
        assert {row[a - 1]: row[a] for a in answers} == facts
        assert max(facts) < 32 <= min(facts.values()) and max(facts.values()) < 64
        assert answers.min() - 32 >= 64 and row[answers.min() - 2] == 127 and (row[32:96] >= 64).all()


class Oracle:
    """A probe that answers by looking up the key, and lists the blocks where it looked."""

    def __init__(self, config, wrong=()):
        self.config, self.wrong = config, wrong

    def __call__(self, tokens, positions):
        answers = np.zeros_like(positions)
        lists = np.full((1, *positions.shape, 1, self.config.nsa.num_selected), 99, np.int32)
        for b, p in np.ndindex(*positions.shape):
            key = tokens[b, positions[b, p]]
            at = int(np.flatnonzero(tokens[b, :32:2] == key)[0]) * 2 + 1
            answers[b, p] = tokens[b, at] + (p in self.wrong)
            if p not in self.wrong:
                lists[0, b, p, 0, 1] = at // self.config.nsa.select_block
        return answers, lists


def test_recall_accuracy_counts_answers_distances_and_picked_blocks():
    config = nn.ModelConfig.from_config(small_config(), 257)
    for wrong, share in (((), 1.0), ((0, 5, 6, 7), 0.75)):
        found = retrieval.recall_accuracy(Oracle(config, wrong), seq_len=128, vocab_size=128, rows=64)
        assert found["accuracy"] == found["selection_any"] == share
        assert found["questions"] == 64 * 16 and found["chance"] == 1 / 32
        assert found["selection_chance"] == 4 / 8 and found["least_distance_in_windows"] >= 66 / 12


@pytest.mark.parametrize("pattern", [(), ("window", "nsa", "dense")])
def test_probe_agrees_with_the_model(model, pattern):
    if pattern:
        config = dataclasses.replace(model.config, layer_pattern=pattern, num_layers=3)
        model = nn.Transformer(config, rngs=nnx.Rngs(0))
    tokens = np.random.default_rng(0).integers(0, 256, (2, 90)).astype(np.int32)
    positions = np.asarray([[3, 50, 89], [10, 70, 71]])
    most_likely, lists = inspect.Probe(model)(tokens, positions)
    want = np.argmax(np.asarray(jax.jit(model)(tokens)), -1)
    np.testing.assert_array_equal(most_likely, np.take_along_axis(want, positions, 1))
    assert lists.shape == (1, 2, 3, 2, 4)
    own = positions // 16
    assert (lists == own[None, :, :, None, None]).any(-1).all()  # the query's own block is always listed
    assert retrieval.picked(lists, positions, 16).all()


@pytest.mark.parametrize("kinds", [("nsa",), ("dense",)])
def test_rows_over_several_devices_are_answered_as_on_one(model, kinds):
    """The page on evaluation said so of every task, and tasks of questions ran on one device."""
    config = dataclasses.replace(model.config, layer_pattern=kinds)
    model = nn.Transformer(config, rngs=nnx.Rngs(0))
    rng = np.random.default_rng(1)
    tokens, positions = rng.integers(0, 256, (11, 64)).astype(np.int32), rng.integers(0, 64, (11, 3))
    devices = jax.devices()[:4]
    one, several = inspect.Probe(model), inspect.Probe(model, devices=devices)
    assert all(len(x.sharding.device_set) == len(devices) for x in jax.tree.leaves(several._run._params))
    for shut in ((), (0,)):  # models without NSA have no gates to shut
        want, got = (probe.without(*shut)(tokens, positions) for probe in (one, several))
        chex.assert_trees_all_equal(got, want)


def test_ids_that_only_fill_the_vocabulary_up_are_no_answers(model):
    """A tokenizer could not say what it was."""
    tokens = np.random.default_rng(0).integers(0, 256, (2, 16)).astype(np.int32)
    positions = np.asarray([[3, 15], [0, 7]])
    everything, _ = inspect.Probe(model)(tokens, positions)
    least = int(everything.min())
    assert least < everything.max()
    below, _ = inspect.Probe(model, least + 1)(tokens, positions)
    logits = np.asarray(jax.jit(model)(tokens))
    want = np.argmax(logits[..., : least + 1], -1)
    np.testing.assert_array_equal(below, np.take_along_axis(want, positions, 1))


def test_command_line(tmp_path, capsys):
    path = tmp_path / "run"
    write_run(path, small_config())
    (tmp_path / "text.txt").write_text("value = 1\n" * 60)
    command = [str(path), "--files", str(tmp_path / "text.txt"), "--lengths", "96", "--depths", "0,1", "--samples", "2"]
    assert evaluate.main([*command, "--num-keys", "2"]) == 0
    assert "perplexity" in capsys.readouterr().out
    found = json.loads((path / "evaluation" / "evaluation.json").read_text())["tasks"]
    assert set(found) == {"perplexity", "position", "needle", "needle-multi"}
    assert found["perplexity"]["tokens"] == 600 and found["perplexity"]["loss"] > 1
    assert len(found["needle"]["cells"]) == 2 and found["needle-multi"]["cells"][0]["num_keys"] == 2
    for name in ("loss_by_position.png", "needle.png", "needle-multi.png"):
        assert (path / "evaluation" / name).stat().st_size > 5_000
    assert evaluate.main([*command[:3], "--tasks", "position", "--context", "48"]) == 0
    later = json.loads((path / "evaluation" / "evaluation.json").read_text())["tasks"]
    assert set(later) == set(found) and later["needle"] == found["needle"]  # what this call did not run stays
    assert (found["position"]["context"], later["position"]["context"]) == (96, 48)
    assert evaluate.main([str(tmp_path)]) == EXIT_USAGE
    assert "neither checkpoints" in capsys.readouterr().err


def test_texts_can_be_named_where_the_data_of_a_run_are_not_on_this_machine(tmp_path, capsys):
    config = small_config()
    config.data.source, config.data.files = "text", (str(tmp_path / "gone" / "*.txt"),)
    write_run(tmp_path / "run", config)
    assert evaluate.main([str(tmp_path / "run")]) == EXIT_USAGE
    assert "matches no file" in (shown := capsys.readouterr().err) and "name texts with --files" in shown


def test_validation_that_cannot_be_repeated_is_refused(model, monkeypatch):
    config, token_bytes = small_config(), np.ones(260, np.int32)
    monkeypatch.setattr(scoring, "make_pipeline", lambda config: types.SimpleNamespace(tokenizer=ByteTokenizer()))
    with pytest.raises(DataError, match="tokenizer now is byte-1, the model's is synthetic-1-257-random"):
        validation.repeat_validation(model, SyntheticTokenizer(257, copy=False), config, token_bytes, 8)
    config.train.eval_batches = 0
    with pytest.raises(DataError, match="the run has no validation"):
        validation.repeat_validation(model, ByteTokenizer(), config, token_bytes, 8)


def test_tasks_of_the_harness_need_a_package(tmp_path, capsys, monkeypatch):
    write_run(tmp_path / "run", small_config())
    monkeypatch.setitem(sys.modules, "lm_eval", None)  # as if it were not installed
    monkeypatch.delitem(sys.modules, "nsa_jax.evaluate.harness", raising=False)
    assert evaluate.main([str(tmp_path / "run"), "--tasks", "lm_eval:arc_easy,hellaswag"]) == EXIT_USAGE
    assert 'pip install "nsa_jax[eval]"' in capsys.readouterr().err
    parse = evaluate.command._parser().parse_args
    found = parse(["run", "--tasks", "recall,lm_eval:a,b,position,lm_eval:recall"]).tasks
    assert found == ["recall", "lm_eval:a", "lm_eval:b", "position", "lm_eval:recall"]
    for wrong in ("arc_easy", "lm_eval:", "lm_eval:a,,b"):
        with pytest.raises(SystemExit):
            parse(["run", "--tasks", wrong])
        assert "lm_eval:NAME" in capsys.readouterr().err


def test_recall_is_the_default_task_of_its_run(tmp_path):
    config = small_config()
    config.data.source, config.data.synthetic, config.data.synthetic_vocab = "synthetic", "recall", 128
    config.data.seq_len, config.model.vocab_size = 64, 0
    write_run(tmp_path / "run", config)
    assert evaluate.main([str(tmp_path / "run"), "--samples", "1"]) == 0
    found = json.loads((tmp_path / "run" / "evaluation" / "evaluation.json").read_text())["tasks"]["recall"]
    assert found["questions"] == 32 * 8 and 0 <= found["accuracy"] < 0.3 and found["selection_any"] > 0
    assert all(0 <= found[f"accuracy_without_{branch}"] <= 1 for branch in ("compressed", "selected", "window"))


def test_without_branch_shuts_its_gate_alone(model):
    """Shutting the window changes what a token sees that has no complete block and whose block is short."""
    tokens = np.random.default_rng(0).integers(0, 256, (1, 40)).astype(np.int32)
    base = np.asarray(jax.jit(model)(tokens))
    for branch, first in ((0, 7), (1, 0), (2, 0)):  # the first compressed block of 8 tokens is complete at position 7
        other = np.asarray(jax.jit(inspect.without_branch(model, branch))(tokens))
        changed = np.flatnonzero(np.abs(other - base).max(axis=(0, 2)) > 1e-4)
        assert changed[0] == first
    np.testing.assert_array_equal(np.asarray(jax.jit(model)(tokens)), base)


def test_without_branch_shuts_the_gates_of_nsa_layers_alone(model):
    mixed = dataclasses.replace(model.config, layer_pattern=("dense", "nsa"), num_layers=4)
    shut = inspect.without_branch(nn.Transformer(mixed, rngs=nnx.Rngs(0)), 1).blocks.layer_1.attention.gate_bias
    np.testing.assert_array_equal(np.asarray(shut[...] < -1e3).any((0, 1)), [False, True, False])
