"""Statistics of a corpus for preflight and the loss guards: entropies, duplicates, overlap of the splits."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import uuid
import zlib
from typing import Any

import numpy as np

from nsa_jax.data.corpus import Corpus, Split
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
      empty_documents: documents of both splits that were left out, since they hold no text.
    """

    sample_tokens: int
    unigram_entropy: float
    bigram_entropy: float
    used_ids: int
    duplicate_documents: float
    duplicate_tokens: float
    overlap_documents: int
    empty_documents: int = 0


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
    return _entropy(np.bincount(np.asarray(tokens).reshape(-1)))


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


def corpus_report(corpus: Corpus) -> CorpusReport:
    """What was measured when the corpus was built. It is measured and stored now if it was not.

    Documents that are held out apart are compared at every call: two seconds for ten million documents.

    Args:
      corpus: of a pipeline.

    Returns:
      The report.
    """
    report = _stored_report(corpus)
    if not corpus.apart:
        return report
    return dataclasses.replace(report, overlap_documents=overlap_documents(corpus, corpus))


def overlap_documents(trained: Corpus, held_out: Corpus) -> int:
    """How many training documents of a corpus another one, or itself, holds out."""
    hashes, wanted = trained.train.hashes, np.unique(held_out.validation.hashes)
    if not len(wanted):
        return 0
    at = np.minimum(np.searchsorted(wanted, hashes), len(wanted) - 1)
    return int((wanted[at] == hashes).sum())


def _stored_report(corpus: Corpus) -> CorpusReport:
    path = corpus.directory / "statistics.json"
    try:
        stored = json.loads(path.read_bytes())
        if stored["checksum"] == _checksum(stored["report"]):
            return CorpusReport(**stored["report"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        pass  # a corpus of an older version, or a damaged file
    report = _measure(corpus)
    values = dataclasses.asdict(report)
    unfinished = path.with_name(f"{path.name}.tmp{uuid.uuid4().hex[:8]}")
    with contextlib.suppress(OSError):  # the cache may belong to somebody else
        unfinished.write_text(json.dumps({"report": values, "checksum": _checksum(values)}, indent=2) + "\n")
        os.replace(unfinished, path)
    return report


def _checksum(report: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(report, sort_keys=True).encode())


def _measure(corpus: Corpus) -> CorpusReport:
    tokens = sample_tokens(corpus.train)
    hashes, lengths = corpus.train.hashes, np.diff(corpus.train.offsets)
    order = np.argsort(hashes, kind="stable")  # of equal documents, the first remains first
    ordered = hashes[order]
    repeats = np.zeros(len(ordered), bool)
    repeats[1:] = ordered[1:] == ordered[:-1]
    held_out = np.unique(corpus.validation.hashes)
    overlap = np.searchsorted(ordered, held_out, side="right") - np.searchsorted(ordered, held_out)
    return CorpusReport(
        sample_tokens=len(tokens),
        unigram_entropy=unigram_entropy(tokens),
        bigram_entropy=bigram_entropy(tokens),
        used_ids=int(np.count_nonzero(np.bincount(tokens))),
        duplicate_documents=float(repeats.mean()) if len(repeats) else 0.0,
        duplicate_tokens=float(lengths[order[repeats]].sum() / max(lengths.sum(), 1)),
        overlap_documents=int(overlap.sum()),
        empty_documents=corpus.empty_documents or 0,
    )
