"""Faults in a run's data are named before it starts."""

import dataclasses

import numpy as np
import pytest

from nsa_jax import object_store
from nsa_jax.data import make_pipeline
from nsa_jax.train.preflight import data_check

from .tiny import VOCAB, random_batch, rules, tiny_config


def text_config(tmp_path, documents, **changes):
    path = tmp_path / "corpus.txt"
    path.write_text("\n%%\n".join(documents))
    config = tiny_config(data__source="text", data__files=(str(path),), data__text_separator="\n%%\n", **changes)
    config.data.val_fraction, config.data.cache_dir = 0.3, str(tmp_path / "cache")
    config.train.eval_batches, config.train.steps = 2, 2
    return config


def documents(count, seed=0):
    random = np.random.default_rng(seed)
    words = ["".join(chr(97 + c) for c in random.integers(0, 26, 5)) for _ in range(500)]
    return [" ".join(random.choice(words, 60)) for _ in range(count)]


def test_sound_text_has_no_finding(tmp_path):
    report = data_check.examine_local(text_config(tmp_path, documents(60)))
    assert report.problems == []
    assert 1.0 < report.bigram_entropy < report.unigram_entropy < np.log(257)
    facts = dict(report.facts)
    assert facts["documents in both splits"] == "0" and facts["validation windows seen in training"] == "0.00%"
    assert all(word.strip(".").isalpha() for word in facts["first text"].split("\\n")[0].split())


@pytest.mark.parametrize("tasks", [False, True])
def test_the_loss_guards_floor_is_named_where_there_is_one(tasks, tmp_path):
    config = text_config(tmp_path, documents(60), data__seq_len=128)
    if tasks:
        with config.data.unlocked():
            config.data.sources = {"text": {"source": "text"}, "far": {"source": "task", "tasks": ("keypad",)}}
    report = data_check.examine_local(config)
    assert (data_check.loss_floor(config, report) is None) == tasks
    named = "bigram entropy" if tasks else "bigram entropy, the loss guard's floor"
    assert [name for name, _ in report.facts if name.startswith("bigram")] == [named]


def test_a_corpus_full_of_duplicates_is_an_error(tmp_path):
    report = data_check.examine_local(text_config(tmp_path, documents(30) + documents(30)))
    assert rules(report.problems) >= {"R031"}
    assert "documents that repeat an earlier one" in str(report.problems)


def test_text_that_cannot_be_used_is_an_error(tmp_path):
    config = text_config(tmp_path, documents(60))
    config.data.val_fraction = 1e-9
    (problem,) = data_check.examine_local(config).problems
    assert (problem.rule, problem.severity) == ("R037", "error") and "no document is held out" in problem.message


def test_validation_on_training_data_is_an_error(tmp_path):
    config = text_config(tmp_path, documents(60))
    pipeline = make_pipeline(config)
    rows = pipeline._validation_rows
    pipeline._validation_rows = dataclasses.replace(rows, tokens=pipeline.corpus.train.tokens)
    found = data_check.examine(config, pipeline)
    assert rules(found.problems) == {"R030"} and "are training data" in str(found.problems[0])


def test_windows_of_short_rows_do_not_take_common_words_for_training_data(tmp_path):
    random = np.random.default_rng(0)
    texts = [" ".join(random.choice(["one", "two", "three", "four", "five", "six", "seven"], 60)) for _ in range(90)]
    report = data_check.examine_local(text_config(tmp_path, texts, data__seq_len=16))
    assert rules(report.problems) == set()
    assert dict(report.facts)["validation windows seen in training"] == "no windows to compare"


def test_held_out_text_of_a_few_bytes_has_no_share_of_windows(tmp_path):
    config = text_config(tmp_path, documents(60), data__seq_len=128)
    (tmp_path / "held_out.txt").write_text("yes")
    config.data.val_files = (str(tmp_path / "held_out.txt"),)
    report = data_check.examine_local(config)
    assert report.problems == []
    assert dict(report.facts)["validation windows seen in training"] == "no windows to compare"


def test_passes_over_the_documents_are_those_of_a_batch_that_grows(tmp_path):
    config = text_config(tmp_path, documents(60), train__batch_ramp=("1:4",))
    config.train.steps, config.train.batch_size, config.train.grad_accum = 3, 8, 2
    tokens = (4 + 8 + 8) * config.data.seq_len
    assert f": {tokens:,} tokens," in dict(data_check.examine_local(config).facts)["passes over them"]


def test_unshifted_labels_ids_out_of_range_and_empty_masks_are_errors():
    config = tiny_config()
    batch = random_batch(config)
    assert data_check.check_batches([batch], VOCAB) == []
    found = data_check.check_batches([{**batch, "targets": batch["inputs"]}], VOCAB)
    assert rules(found) == {"R033"} and "labels are not shifted" in str(found[0])
    found = data_check.check_batches([batch], VOCAB - 1)
    assert rules(found) == {"R033"} and "the vocabulary has 31" in str(found[0])
    found = data_check.check_batches([{**batch, "loss_mask": 0 * batch["loss_mask"]}], VOCAB)
    assert rules(found) == {"R033"} and "loss mask is 0" in str(found[0])


def test_a_loader_that_repeats_rows_and_text_without_content_are_errors():
    batch = random_batch(tiny_config())
    assert rules(data_check.check_batches([batch, batch], VOCAB)) == {"R032"}
    same = np.full_like(batch["inputs"], 3)
    assert "R036" in rules(data_check.check_batches([{**batch, "inputs": same, "targets": same}], VOCAB))


def test_data_that_is_not_here_is_a_warning_and_nothing_is_downloaded(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.load_dataset", lambda *a, **k: pytest.fail("it was loaded"))
    config = tiny_config(data__source="hf", data__hf_path="some/dataset", data__tokenizer="bpe")
    config.data.cache_dir = str(tmp_path)
    report = data_check.examine_local(config)
    assert rules(report.problems, "warning") == {"R028"} and rules(report.problems) == set()
    assert [name for name, _ in report.facts] == ["not checked"]


def test_objects_of_a_store_are_not_fetched_for_a_preflight(tmp_path, monkeypatch):
    entry = object_store.Object("s3://bucket/a.txt", 1000, "1")
    monkeypatch.setattr(object_store, "matching", lambda pattern: [entry])
    monkeypatch.setattr(object_store, "open_object", lambda address: pytest.fail("it was fetched"))
    config = text_config(tmp_path, documents(60))
    config.data.files = (entry.address,)
    assert rules(data_check.examine_local(config).problems, "warning") == {"R028"}


def test_held_out_files_count_in_the_size_that_a_preflight_tokenises(tmp_path, monkeypatch):
    config = text_config(tmp_path, documents(60))
    (tmp_path / "held_out.txt").write_text("\n%%\n".join(documents(600, seed=1)))
    config.data.val_files = (str(tmp_path / "held_out.txt"),)
    monkeypatch.setattr(data_check, "_BUILD_BELOW", 100_000)
    assert rules(data_check.examine_local(config).problems, "warning") == {"R028"}
    monkeypatch.setattr(data_check, "_BUILD_BELOW", 1_000_000)
    assert data_check.examine_local(config).problems == []
