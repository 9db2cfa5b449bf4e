import json
from types import SimpleNamespace

import numpy as np
import pytest

from nsa_jax.config import default_config
from nsa_jax.data import DataError, make_pipeline, statistics
from nsa_jax.data.corpus import Corpus
from nsa_jax.train.env import data_facts
from nsa_jax.train.preflight.data_check import examine


def test_rows_without_text_are_counted(tmp_path, write_rows, hf_home, documents, caplog):
    rows = [*documents[:95], None, None, "", " \n", None]
    config = default_config()
    config.data.source, config.data.hf_path, config.data.seq_len = "hf", "json", 48
    config.data.hf_data_files, config.data.val_fraction = (write_rows(tmp_path / "rows", "json", rows),), 0.2
    config.train.batch_size, config.train.eval_batches = 2, 1
    with caplog.at_level("INFO", logger="nsa_jax"):
        corpus = make_pipeline(config).corpus
    assert "held out" in caplog.text and ", 5 without text left out, in " in caplog.text
    again = make_pipeline(config)
    assert corpus.empty_documents == again.corpus.empty_documents == 5
    assert statistics.corpus_report(again.corpus).empty_documents == 5
    assert data_facts(again)["splits"]["empty_documents"] == 5
    warnings = [problem.message for problem in examine(config, again).problems if problem.rule == "R036"]
    assert warnings == ["5 of 100 rows hold no text and were left out"]


def test_entropies_of_uniform_tokens_are_the_logarithm_of_their_number():
    tokens = np.random.default_rng(0).integers(0, 16, 400_000)
    assert statistics.unigram_entropy(tokens) == pytest.approx(np.log(16), abs=1e-3)
    assert statistics.bigram_entropy(tokens) == pytest.approx(np.log(16), abs=1e-3)


def test_bigram_entropy_of_a_markov_chain_is_that_of_its_rows():
    transitions = np.array([[0.9, 0.1, 0.0], [0.2, 0.5, 0.3], [0.05, 0.05, 0.9]])
    rng = np.random.default_rng(1)
    chain = [0]
    for u in rng.random(200_000):
        chain.append(int(np.searchsorted(np.cumsum(transitions[chain[-1]]), u)))
    stationary = np.linalg.matrix_power(transitions, 500)[0]
    logs = np.log(transitions, out=np.zeros_like(transitions), where=transitions > 0)
    expected = -(stationary[:, None] * transitions * logs).sum()
    assert statistics.bigram_entropy(np.array(chain)) == pytest.approx(expected, abs=0.01)
    assert statistics.unigram_entropy(np.array(chain)) > expected + 0.3


def test_deterministic_sequences_have_no_bigram_entropy_and_pairs_stay_in_their_row():
    assert statistics.bigram_entropy(np.tile(np.arange(7), 100)) == pytest.approx(0, abs=1e-9)
    rows = np.array([[0, 1, 0, 1], [2, 3, 2, 3]])
    assert statistics.bigram_entropy(rows) == pytest.approx(0, abs=1e-9)
    assert statistics.bigram_entropy(np.array([3])) == 0.0


def test_histogram_counts_every_id_and_refuses_others():
    assert statistics.token_histogram(np.array([[0, 2], [2, 2]]), 4).tolist() == [1, 0, 3, 0]
    with pytest.raises(DataError, match=r"id 4, outside \[0, 4\)"):
        statistics.token_histogram(np.array([4]), 4)


def split(hashes, lengths):
    offsets = np.append(0, np.cumsum(np.array(lengths, np.int64)))
    return SimpleNamespace(hashes=np.array(hashes, np.uint64), offsets=offsets, tokens=np.arange(offsets[-1]) % 7)


def test_duplicates_and_overlap_are_counted_by_document_and_by_token(tmp_path):
    train = split([5, 1, 2, 1, 1, 2], [4, 10, 3, 20, 30, 3])
    report = statistics.corpus_report(Corpus(tmp_path, "x", "y", train, split([2, 9, 2], [3, 1, 3])))
    assert report.duplicate_documents == 0.5 and report.duplicate_tokens == pytest.approx(53 / 70)
    assert report.overlap_documents == 2
    empty = split([], [])
    report = statistics.corpus_report(Corpus(tmp_path / "none", "x", "y", empty, empty))
    assert (report.duplicate_documents, report.duplicate_tokens, report.overlap_documents) == (0, 0, 0)


def test_rows_that_repeat_are_counted():
    assert statistics.repeated_window_share(np.array([[1, 2], [2, 1], [1, 2], [1, 2]])) == 0.5


def test_a_start_from_the_cache_measures_nothing(text_config, monkeypatch):
    corpus = make_pipeline(text_config).corpus
    report = statistics.corpus_report(corpus)
    path = corpus.directory / "statistics.json"
    with monkeypatch.context() as patch:
        patch.delattr(statistics, "_measure")
        again = make_pipeline(text_config).corpus
        assert statistics.corpus_report(again) == report
    for damaged in (path.read_text().replace("0.0", "0.5", 1), "[]", "{"):
        path.write_text(damaged)
        assert statistics.corpus_report(corpus) == report and json.loads(path.read_text())["checksum"]
    path.unlink()  # a cache of an older version
    assert statistics.corpus_report(make_pipeline(text_config).corpus) == report and path.exists()


def test_report_of_a_corpus(text_config, documents, tmp_path):
    report = statistics.corpus_report(make_pipeline(text_config).corpus)
    assert report.overlap_documents == 0 and report.duplicate_documents == 0
    assert 0.5 < report.bigram_entropy < report.unigram_entropy < np.log(report.used_ids)
    for i, text in enumerate(documents):  # the same corpus twice
        (tmp_path / "corpus" / f"again{i}.txt").write_text(text, encoding="utf-8")
    doubled = statistics.corpus_report(make_pipeline(text_config).corpus)
    assert doubled.duplicate_documents == pytest.approx(0.5)
    assert doubled.duplicate_tokens == pytest.approx(0.5)
    assert doubled.overlap_documents == 0
    assert doubled.unigram_entropy == pytest.approx(report.unigram_entropy, abs=1e-9)


def test_sample_is_spread_over_the_split(text_config):
    train = make_pipeline(text_config).corpus.train
    sample = statistics.sample_tokens(train, 2000, pieces=10)
    assert len(sample) == 2000
    assert np.array_equal(sample[-200:], train.tokens.array[-200:])
    assert len(statistics.sample_tokens(train, 10**9)) == train.stats.tokens
