"""Losses of a model on documents: perplexity, bits per byte, and loss by position in the context."""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int
from ml_collections import ConfigDict

from nsa_jax.data import DataError, Pipeline, Tokenizer, make_pipeline
from nsa_jax.data.sources import TextSource
from nsa_jax.fields import source_configs
from nsa_jax.nn import Transformer
from nsa_jax.nn.replicas import Replicas

# Tokens of logits that exist at once, times the vocabulary.
_LOGITS_ELEMENTS = 2**26


def windows(num_tokens: int, context: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """How a document is cut: (first input, end, first position that counts) of each window.

    Windows advance by `stride`; each counts the targets that none before it has counted, so that every token but the
    document's first is counted once.
    """
    first, counted = 0, 0
    while counted < num_tokens:
        end = min(first + context, num_tokens)
        yield first, end, counted
        counted = end
        first = min(first + stride, max(num_tokens - 1, 0)) if stride < context else end


_MULTIPLE = 128  # tokens of a row, where it may be shorter than a window


def token_losses(
    model: Transformer, hidden: Float[Array, "B T D"], targets: Int[Array, "B T"]
) -> tuple[Float[Array, "B T"], Bool[Array, "B T"]]:
    """Nats of each target, float32, and whether it is the most likely token. Logits are there in pieces alone."""
    batch, length, dim = hidden.shape
    pieces = max(-(-batch * length * model.config.vocab_size // _LOGITS_ELEMENTS), 1)
    while batch * length % pieces:
        pieces += 1

    def piece(args):
        logits = model.logits(args[0])
        losses = jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, args[1][:, None], -1)[:, 0]
        return losses, jnp.argmax(logits, -1) == args[1]

    found = jax.lax.map(piece, (hidden.reshape(pieces, -1, dim), targets.reshape(pieces, -1)))
    return jax.tree.map(lambda x: x.reshape(batch, length), found)


class Scorer:
    """Losses of a model on rows of tokens. Rows are spread over devices, each of which holds the whole model.

    Args:
      model: the Transformer.
      devices: None means all of this process.
    """

    def __init__(self, model: Transformer, devices: Sequence[jax.Device] | None = None):
        def losses(model, inputs, targets):
            return token_losses(model, model.hidden(inputs), targets)

        self._run = Replicas(losses, model, devices)

    def score(self, inputs: np.ndarray, targets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Nats of each target, float32 [B, T], and whether it is the most likely token, bool [B, T].

        Args:
          inputs, targets: int [B, T].
        """
        return self._run(inputs, targets)

    def __call__(self, inputs: np.ndarray, targets: np.ndarray) -> np.ndarray:
        """Nats of each target: float32 [B, T] from int [B, T] inputs and targets."""
        return self.score(inputs, targets)[0]


def score_documents(
    scorer: Scorer,
    documents: Sequence[np.ndarray],
    token_bytes: np.ndarray,
    eos_id: int,
    *,
    context: int,
    stride: int,
    batch_size: int,
    cut: Collection[int] = (),
) -> dict[str, Any]:
    """Perplexity and bits per byte over documents, and loss by position in the window.

    As in training, a document's first token is not predicted and its end is, unless the document was cut.

    Args:
      scorer: of the model.
      documents: token ids of each, without EOS.
      token_bytes: bytes of text of each token id.
      eos_id: end-of-document token.
      context: tokens of a window.
      stride: how far windows advance; at most `context`.
      batch_size: windows at once.
      cut: indices of documents that go on beyond their last token: no end is predicted after it.

    Returns:
      loss, perplexity, bits_per_byte (None without bytes), tokens, bytes, documents; by_position: nats [context] and
      counts [context] of the documents that fill at least one window (of all, if there is none).
    """
    jobs = []
    whole = any(len(document) >= context for document in documents)
    for index, document in enumerate(documents):
        stream = document if index in cut else np.append(document, eos_id)
        for first, end, counted in windows(len(stream) - 1, context, stride):
            piece = stream[first : end + 1].astype(np.int32)
            jobs.append((piece, counted - first, len(document) >= context or not whole))
    nats = tokens = text_bytes = 0.0
    by_position, counts = np.zeros(context), np.zeros(context)
    longest = max((len(stream) - 1 for stream, _, _ in jobs), default=0)
    width = min(-(-longest // _MULTIPLE) * _MULTIPLE, context)  # documents may all be far shorter than a window
    for at in range(0, len(jobs), batch_size):
        part = jobs[at : at + batch_size]
        inputs, targets = np.zeros((2, batch_size, width), np.int32)
        for row, (stream, _, _) in enumerate(part):
            inputs[row, : len(stream) - 1], targets[row, : len(stream) - 1] = stream[:-1], stream[1:]
        losses = scorer(inputs, targets)
        for row, (stream, skip, positional) in enumerate(part):
            length = len(stream) - 1
            nats += float(losses[row, skip:length].sum(dtype=np.float64))
            tokens += length - skip
            text_bytes += float(token_bytes[stream[1 + skip :]].sum())
            if positional:
                by_position[:length] += losses[row, :length]
                counts[:length] += 1
    loss = nats / max(tokens, 1)
    return {
        "loss": loss,
        "perplexity": math.exp(min(loss, 700)),
        "bits_per_byte": nats / math.log(2) / text_bytes if text_bytes else None,
        "tokens": int(tokens),
        "bytes": int(text_bytes),
        "documents": len(documents),
        "context": context,
        "stride": stride,
        "by_position": {"nats": by_position, "counts": counts},
    }


def fingerprint(model: Transformer) -> str:
    """A checksum of a model's parameters, which tells it from others at the same place."""
    found = 0
    for leaf in jax.tree.leaves(model):
        found = zlib.crc32(np.ascontiguousarray(leaf).reshape(-1).view(np.uint8).data, found)
    return f"{found:08x}"


def position_bins(nats: np.ndarray, counts: np.ndarray) -> list[dict[str, float]]:
    """Mean loss in ranges of positions that double: [0, 1), [1, 2), [2, 4), ... as from, to, loss, tokens."""
    rows, first = [], 0
    while first < len(nats):
        end = min(max(2 * first, 1), len(nats))
        total = int(counts[first:end].sum())
        if total:
            loss = float(nats[first:end].sum()) / total
            rows.append({"from": first, "to": end, "loss": loss, "tokens": total})
        first = end
    return rows


def plot_positions(nats: np.ndarray, counts: np.ndarray, window: int, title: str, path: Path) -> None:
    """Loss over the position in the context, smoothed, with the sliding window marked."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    seen = np.flatnonzero(counts)
    width = max(len(seen) // 64, 1)
    keep = seen[: len(seen) // width * width]
    loss = nats[keep].reshape(-1, width).sum(1) / counts[keep].reshape(-1, width).sum(1)
    figure, axis = plt.subplots(figsize=(7, 4))
    axis.plot(keep.reshape(-1, width).mean(1) + 1, loss)
    axis.axvline(window, color="tab:grey", linestyle=":", label=f"window ({window} tokens)")
    axis.set_xscale("log")
    axis.set_xlabel("position in the context")
    axis.set_ylabel("loss (nats per token)")
    axis.set_title(title)
    axis.grid(True, alpha=0.3)
    axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)


class HeldOut(NamedTuple):
    """Documents that were not trained on.

    Attributes:
      documents: token ids of each, int32.
      cut: indices of those of which only the beginning is here.
    """

    documents: list[np.ndarray]
    cut: frozenset[int]


def data_of_the_run(config: ConfigDict, tokenizer: Tokenizer) -> Pipeline:
    """The data that a config names, in the tokens of a model.

    Raises:
      DataError: they are not on this machine, or have another tokenizer now.
    """
    try:
        pipeline = make_pipeline(config)
    except DataError as error:
        # A model is evaluated as it was trained: no option here changes where its data lies.
        fix = f"restore the data of the run, or name texts with --files (in training: {error.fix})"
        raise DataError(error.where, error.what, fix) from error
    if pipeline.tokenizer.fingerprint != tokenizer.fingerprint:
        raise DataError(
            f"config.data.source={config.data.source!r}",
            f"its tokenizer now is {pipeline.tokenizer.fingerprint}, the model's is {tokenizer.fingerprint}",
            "restore data and tokenizer of the run, or name texts with --files and --tasks perplexity",
        )
    return pipeline


def _separator_of_the_run(config: ConfigDict) -> str:
    """What is between the documents of the run's text files; empty if some of its sources say otherwise."""
    found = {part.data.text_separator for part in source_configs(config).values() if part.data.source == "text"}
    return found.pop() if len(found) == 1 else ""


def held_out_documents(
    config: ConfigDict,
    files: Sequence[str],
    tokenizer: Tokenizer,
    max_tokens: int,
    context: int = 0,
    separator: str | None = None,
) -> HeldOut:
    """Documents to score: of files if given, else of the run's validation split, up to `max_tokens` tokens.

    `separator` is between the documents of a file; empty: a file is one document; None: as in the run's own files.

    Of a held-out document, 16 contexts at most are taken, so that one long document does not stand for all. They are
    of `context` tokens, or of the training length if that is longer.

    Raises:
      DataError: there are none, or they have another tokenizer now.
    """
    found: list[np.ndarray] = []
    cut: list[int] = []
    total, longest = 0, max_tokens
    if files:
        if separator is None:
            separator = _separator_of_the_run(config)
        texts = TextSource(tuple(files), separator=separator).documents()
        source: Iterator[np.ndarray] = (tokenizer.encode_documents([text])[0].astype(np.int32) for text in texts)
    else:
        corpora = [part.pipeline.corpus for part in data_of_the_run(config, tokenizer).parts.values()]
        splits = [corpus.validation for corpus in corpora if corpus is not None]
        if not splits:
            raise DataError(
                f"config.data.source={config.data.source!r}", "keeps no held-out documents", "name some with --files"
            )
        longest = 16 * max(context, config.data.seq_len)
        by_turns = itertools.zip_longest(*(itertools.product([s], range(s.stats.documents)) for s in splits))
        each = (found for turn in by_turns for found in turn if found is not None)
        source = (np.asarray(split.document(i), np.int32) for split, i in each)
    for document in source:
        if len(document):
            found.append(document[: max(min(max_tokens - total, longest), 2)])
            if len(found[-1]) < len(document):
                cut.append(len(found) - 1)
            total += len(found[-1])
        if total >= max_tokens:
            break
    if not found:
        raise DataError("held-out documents", "there are none", "name some with --files")
    return HeldOut(found, frozenset(cut))
