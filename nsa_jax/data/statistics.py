"""Statistics of a corpus for preflight and the loss guards: entropies, duplicates, overlap of the splits."""

from __future__ import annotations

import dataclasses

import numpy as np

from nsa_jax.data.cache import Corpus, Split
from nsa_jax.data.errors import DataError


@dataclasses.dataclass(frozen=True)
class CorpusReport:
    """Summary of a cached corpus.

    Attributes:
      sample_tokens: training tokens that the entropies come from.
      unigram_entropy: nats per token, see `unigram_entropy`.
      bigram_entropy: nats per token, see `bigram_entropy`.
      used_ids: distinct token ids in the sample.
      duplicate_documents: share of training documents that repeat an earlier one.
      duplicate_tokens: share of training tokens in such documents.
      overlap_documents: training documents whose content is also held out; validation is only valid if this is 0.
    """

    sample_tokens: int
    unigram_entropy: float
    bigram_entropy: float
    used_ids: int
    duplicate_documents: float
    duplicate_tokens: float
    overlap_documents: int


def sample_tokens(split: Split, count: int = 1_000_000, *, pieces: int = 64) -> np.ndarray:
    """Tokens from evenly spaced stretches of a split.

    Args:
      split: of a corpus.
      count: about how many tokens.
      pieces: number of stretches.

    Returns:
      int64 [n], n <= count; all tokens if the split has no more than `count`.
    """
    stream = split.tokens
    if len(stream) <= count:
        return np.asarray(stream[:], dtype=np.int64)
    length = max(count // pieces, 1)
    starts = np.linspace(0, len(stream) - length, pieces).astype(np.int64)
    return np.concatenate([np.asarray(stream[s : s + length], dtype=np.int64) for s in starts])


def token_histogram(tokens: np.ndarray, vocab_size: int) -> np.ndarray:
    """How often each id occurs: int64 [vocab_size].

    Raises:
      DataError: a token is outside the vocabulary.
    """
    tokens = np.asarray(tokens).reshape(-1)
    if tokens.size and not 0 <= tokens.min() <= tokens.max() < vocab_size:
        bad = int(tokens.max()) if tokens.max() >= vocab_size else int(tokens.min())
        raise DataError("token stream", f"holds id {bad}, outside [0, {vocab_size})", "build the cache again")
    return np.bincount(tokens, minlength=vocab_size)


def _entropy(counts: np.ndarray) -> float:
    counts = counts[counts > 0].astype(np.float64)
    if not counts.size:
        return 0.0
    total = counts.sum()
    return float(np.log(total)) - float((counts * np.log(counts)).sum()) / float(total)


def unigram_entropy(tokens: np.ndarray) -> float:
    """Entropy of the token frequencies, nats per token: the loss of the best model that ignores context."""
    return _entropy(np.unique(np.asarray(tokens).reshape(-1), return_counts=True)[1])


def bigram_entropy(tokens: np.ndarray) -> float:
    """Entropy of a token given the one before it, nats per token: the loss of the best model that sees one token.

    The estimate uses the frequencies of the sample. It is too low if there are few tokens per pair of ids, so sample
    many tokens with a large vocabulary.

    Args:
      tokens: [n] consecutive tokens, or [b, n] rows; pairs do not cross rows.

    Returns:
      H(x[t+1] | x[t]).
    """
    rows = np.atleast_2d(np.asarray(tokens, dtype=np.int64))
    first, second = rows[:, :-1].reshape(-1), rows[:, 1:].reshape(-1)
    if not first.size:
        return 0.0
    pairs = np.unique(first * (int(rows.max()) + 1) + second, return_counts=True)[1]
    return _entropy(pairs) - unigram_entropy(first)


def duplicate_share(hashes: np.ndarray) -> float:
    """Share of documents that repeat an earlier one, by content hash."""
    return 1 - len(np.unique(hashes)) / len(hashes) if len(hashes) else 0.0


def split_overlap(train_hashes: np.ndarray, validation_hashes: np.ndarray) -> int:
    """Number of training documents whose content is also held out."""
    return int(np.isin(train_hashes, validation_hashes).sum())


def repeated_window_share(rows: np.ndarray) -> float:
    """Share of rows that repeat an earlier row exactly.

    Args:
      rows: [n, T] token ids, for instance the stacked inputs of many batches, or windows of them.

    Returns:
      0 if all differ.
    """
    rows = np.ascontiguousarray(rows)
    if not len(rows):
        return 0.0
    return 1 - len({row.tobytes() for row in rows}) / len(rows)


def corpus_report(corpus: Corpus, *, count: int = 1_000_000) -> CorpusReport:
    """Measures a cached corpus. Apart from sorting document hashes, the time does not depend on the corpus's size.

    Args:
      corpus: of a pipeline.
      count: training tokens to sample for the entropies.

    Returns:
      The report.
    """
    tokens = sample_tokens(corpus.train, count)
    hashes = corpus.train.hashes
    lengths = np.diff(corpus.train.offsets)
    _, first = np.unique(hashes, return_index=True)
    total = int(lengths.sum())
    return CorpusReport(
        sample_tokens=len(tokens),
        unigram_entropy=unigram_entropy(tokens),
        bigram_entropy=bigram_entropy(tokens),
        used_ids=len(np.unique(tokens)),
        duplicate_documents=duplicate_share(hashes),
        duplicate_tokens=1 - int(lengths[first].sum()) / total if total else 0.0,
        overlap_documents=split_overlap(hashes, corpus.validation.hashes),
    )
