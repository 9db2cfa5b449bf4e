import numpy as np
import pytest

from nsa_jax.data import DataError, make_pipeline, statistics


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


def test_duplicates_overlap_and_repeated_rows():
    assert statistics.duplicate_share(np.array([1, 2, 1, 1])) == 0.5
    assert statistics.duplicate_share(np.array([], np.uint64)) == 0.0
    assert statistics.split_overlap(np.array([1, 2, 2, 3]), np.array([2, 9])) == 2
    assert statistics.repeated_window_share(np.array([[1, 2], [2, 1], [1, 2], [1, 2]])) == 0.5


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
    split = make_pipeline(text_config).corpus.train
    sample = statistics.sample_tokens(split, 2000, pieces=10)
    assert len(sample) == 2000
    assert np.array_equal(sample[-200:], split.tokens.array[-200:])
    assert len(statistics.sample_tokens(split, 10**9)) == split.stats.tokens
