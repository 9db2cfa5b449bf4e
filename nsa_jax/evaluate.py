r"""Evaluates a trained model: perplexity, use of the context, retrieval.

    python -m nsa_jax.evaluate runs/quickstart
    python -m nsa_jax.evaluate runs/quickstart --files notes.txt --stride 64 --tasks perplexity
    python -m nsa_jax.evaluate runs/quickstart --tasks needle,needle-multi --lengths 4096,16384 --samples 16
    python -m nsa_jax.evaluate runs/recall --tasks recall

Tasks (default: those that fit the run's data):
  perplexity    nats per token, perplexity and bits per byte over held-out documents (or --files), in windows of
                --context tokens that advance by --stride: a smaller stride gives tokens more context and costs more.
  position      loss by position in the context, with a plot: does the long context help?
  needle        a fact at every depth of contexts of several lengths: is it found, and was its block selected?
  needle-multi  the same among several facts.
  recall        the associative recall task of configs/recall.py.

Results go to a table, OUTPUT/evaluation.json and pictures in OUTPUT, by default PATH/evaluation.
"""

from __future__ import annotations

import argparse
import functools
import json
import logging
import math
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from ml_collections import ConfigDict
from rich.console import Console
from rich.table import Table

from nsa_jax import retrieval
from nsa_jax.command_line import number
from nsa_jax.data import DataError, Tokenizer, make_pipeline
from nsa_jax.data.sources import TextSource
from nsa_jax.devices import choose_platform
from nsa_jax.loading import LoadError, load
from nsa_jax.nn import Transformer

EXIT_USAGE = 2
TASKS = ("perplexity", "position", "needle", "needle-multi", "recall")
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


class Scorer:
    """Losses of a model on rows of tokens."""

    def __init__(self, model: Transformer):
        self._graphdef, self._params = nnx.split(model)
        self._run = jax.jit(self._losses)

    def _losses(self, params, inputs, targets):
        model: Transformer = nnx.merge(self._graphdef, params)
        hidden = model.hidden(inputs)
        batch, length, dim = hidden.shape
        pieces = max(-(-batch * length * model.config.vocab_size // _LOGITS_ELEMENTS), 1)
        while batch * length % pieces:
            pieces += 1

        def piece(args):
            logits = model.logits(args[0])
            return jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, args[1][:, None], -1)[:, 0]

        losses = jax.lax.map(piece, (hidden.reshape(pieces, -1, dim), targets.reshape(pieces, -1)))
        return losses.reshape(batch, length)

    def __call__(self, inputs: np.ndarray, targets: np.ndarray) -> np.ndarray:
        """Nats of each target: float32 [B, T] from int [B, T] inputs and targets."""
        return np.asarray(self._run(self._params, jnp.asarray(inputs), jnp.asarray(targets)))


def score_documents(
    scorer: Scorer,
    documents: Sequence[np.ndarray],
    token_bytes: np.ndarray,
    eos_id: int,
    *,
    context: int,
    stride: int,
    batch_size: int,
) -> dict[str, Any]:
    """Perplexity and bits per byte over documents, and loss by position in the window.

    As in training, a document's first token is not predicted and its end is.

    Args:
      scorer: of the model.
      documents: token ids of each, without EOS.
      token_bytes: bytes of text of each token id.
      eos_id: end-of-document token.
      context: tokens of a window.
      stride: how far windows advance; at most `context`.
      batch_size: windows at once.

    Returns:
      loss, perplexity, bits_per_byte, tokens, bytes, documents; by_position: nats [context] and counts [context] of the
      documents that fill at least one window (of all, if there is none).
    """
    jobs = []
    whole = any(len(document) >= context for document in documents)
    for document in documents:
        stream = np.append(document, eos_id).astype(np.int32)
        for first, end, counted in windows(len(document), context, stride):
            jobs.append((stream[first : end + 1], counted - first, len(document) >= context or not whole))
    nats = tokens = text_bytes = 0.0
    by_position, counts = np.zeros(context), np.zeros(context)
    for at in range(0, len(jobs), batch_size):
        part = jobs[at : at + batch_size]
        inputs, targets = np.zeros((2, batch_size, context), np.int32)
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
        "bits_per_byte": nats / math.log(2) / max(text_bytes, 1),
        "tokens": int(tokens),
        "bytes": int(text_bytes),
        "documents": len(documents),
        "context": context,
        "stride": stride,
        "by_position": {"nats": by_position, "counts": counts},
    }


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


def held_out_documents(config: ConfigDict, files: Sequence[str], tokenizer: Tokenizer, max_tokens: int):
    """Documents to score: of files if given, else of the run's validation split, up to `max_tokens` tokens.

    Of a held-out document, 16 contexts at most are taken, so that one long document does not stand for all.

    Raises:
      DataError: there are none.
    """
    found: list[np.ndarray] = []
    total, longest = 0, max_tokens
    if files:
        source: Iterator[np.ndarray] = (tokenizer.encode(text) for text in TextSource(tuple(files)).documents())
    else:
        corpus = make_pipeline(config).corpus
        if corpus is None:
            raise DataError(
                f"config.data.source={config.data.source!r}", "keeps no held-out documents", "name some with --files"
            )
        split, longest = corpus.validation, 16 * config.data.seq_len
        source = (np.asarray(split.document(i), np.int32) for i in range(split.stats.documents))
    for document in source:
        if len(document):
            found.append(document[: max(min(max_tokens - total, longest), 2)])
            total += len(found[-1])
        if total >= max_tokens:
            break
    if not found:
        raise DataError("held-out documents", "there are none", "name some with --files")
    return found


class Evaluation:
    """The tasks of one call, sharing the model, its data and where results go."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.model, self.tokenizer, self.config = load(args.path)
        self.context = args.context or self.config.data.seq_len
        self.output = Path(args.output or Path(args.path.rpartition("@")[0] or args.path) / "evaluation")
        self.output.mkdir(parents=True, exist_ok=True)
        self.console = Console() if sys.stdout.isatty() else Console(width=120)
        self._documents: list[np.ndarray] | None = None
        self._scores: dict[str, Any] | None = None
        self._probe: retrieval.Probe | None = None

    def default_tasks(self) -> list[str]:
        """Tasks that fit the run's data."""
        if self.config.data.source == "synthetic" and not self.args.files:
            return ["recall"] if self.config.data.synthetic == "recall" else []
        return ["perplexity", "position", "needle", "needle-multi"]

    @property
    def documents(self) -> list[np.ndarray]:
        if self._documents is None:
            self._documents = held_out_documents(self.config, self.args.files, self.tokenizer, self.args.max_tokens)
        return self._documents

    @property
    def probe(self) -> retrieval.Probe:
        if self._probe is None:
            self._probe = retrieval.Probe(self.model)
        return self._probe

    @property
    def scores(self) -> dict[str, Any]:
        if self._scores is None:
            token_bytes = np.zeros(self.model.config.vocab_size, np.int32)
            token_bytes[: self.tokenizer.vocab_size] = self.tokenizer.token_bytes
            self._scores = score_documents(
                Scorer(self.model),
                self.documents,
                token_bytes,
                self.tokenizer.eos_id,
                context=self.context,
                stride=min(self.args.stride or self.context // 2, self.context),
                batch_size=self.args.batch_size,
            )
        return self._scores

    def perplexity(self) -> dict[str, Any]:
        """The task of that name."""
        result = {name: value for name, value in self.scores.items() if name != "by_position"}
        self._table("perplexity", [result])
        return result

    def position(self) -> dict[str, Any]:
        """The task of that name."""
        found = self.scores["by_position"]
        rows = position_bins(found["nats"], found["counts"])
        window = self.config.model.nsa.window
        plot_positions(found["nats"], found["counts"], window, self.config.name, self.output / "loss_by_position.png")
        self._table("loss by position", rows)
        return {"bins": rows}

    def needle(self, num_keys: int = 1, name: str = "needle") -> dict[str, Any]:
        """The tasks needle and needle-multi."""
        needed = 2 * retrieval.needle_tokens(self.tokenizer, num_keys)
        lengths = self.args.lengths or [
            length for length in (self.context >> shift for shift in (3, 2, 1, 0)) if length >= needed
        ]
        if not lengths:
            raise DataError(f"context={self.context}", f"too short for {num_keys} facts", "use fewer with --num-keys")
        haystack = np.concatenate(self.documents)
        haystack = np.tile(haystack, -(-max(lengths) // len(haystack)))
        cells = retrieval.needle_grid(
            self.probe,
            self.tokenizer,
            haystack,
            lengths=lengths,
            depths=self.args.depths,
            samples=self.args.samples,
            num_keys=num_keys,
            seed=self.args.seed,
            batch_size=min(self.args.batch_size, self.args.samples),
        )
        retrieval.plot_needles(cells, f"{self.config.name}: {num_keys} fact(s)", self.output / f"{name}.png")
        self._table(f"{name} ({num_keys} facts per context)", cells)
        return {"cells": cells, "exact_match": float(np.mean([cell["exact_match"] for cell in cells]))}

    def recall(self) -> dict[str, Any]:
        """The task of that name."""
        data = self.config.data
        measure = functools.partial(
            retrieval.recall_accuracy,
            seq_len=data.seq_len,
            vocab_size=data.synthetic_vocab,
            rows=32 * self.args.samples,
            seed=self.config.seed,
        )
        result = measure(self.probe)
        if self.model.config.attention == "nsa":  # what each branch contributes to this model
            for index, branch in enumerate(("compressed", "selected", "window")):
                probe = retrieval.Probe(retrieval.without_branch(self.model, index))
                result[f"accuracy_without_{branch}"] = measure(probe)["accuracy"]
        self._table(f"associative recall ({self.config.model.attention})", [result])
        return result

    def _table(self, title: str, rows: list[dict[str, Any]]) -> None:
        def shown(value):
            return f"{value:.4g}" if isinstance(value, float) else f"{value:,}"

        table = Table(title=title, show_header=len(rows) > 1)
        if len(rows) == 1:
            for name, value in rows[0].items():
                table.add_row(name.replace("_", " "), shown(value))
        else:
            for name in rows[0]:
                table.add_column(name.replace("_", " "), justify="right")
            for row in rows:
                table.add_row(*map(shown, row.values()))
        self.console.print(table)

    def run(self) -> dict[str, Any]:
        """Runs the tasks and writes evaluation.json."""
        tasks = self.args.tasks or self.default_tasks()
        if not tasks:
            raise DataError("--tasks", "none fits synthetic data of this kind", "name tasks, with --files for text")
        result: dict[str, Any] = {"path": str(self.args.path), "context": self.context, "tasks": {}}
        for task in tasks:
            begin = time.perf_counter()
            if task == "needle-multi":
                found = self.needle(self.args.num_keys, "needle-multi")
            else:
                found = getattr(self, task)()
            result["tasks"][task] = {**found, "seconds": round(time.perf_counter() - begin, 2)}
        (self.output / "evaluation.json").write_text(json.dumps(result, indent=1) + "\n")
        self.console.print(f"written to {self.output}")
        return result


def _parser() -> argparse.ArgumentParser:
    def numbers(kind):
        return lambda text: [kind(x) for x in text.split(",")]

    def tasks(text):
        names = text.split(",")
        if unknown := set(names) - set(TASKS):
            raise argparse.ArgumentTypeError(f"unknown {sorted(unknown)}: choose from {', '.join(TASKS)}")
        return names

    parser = argparse.ArgumentParser(
        prog="python -m nsa_jax.evaluate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("path", help="a run's workdir (WORKDIR@STEP, WORKDIR@best) or an exported model")
    parser.add_argument("--tasks", type=tasks, help="comma separated; default: those that fit the run's data")
    parser.add_argument("--files", nargs="+", default=[], help="text files or globs instead of held-out documents")
    parser.add_argument("--context", type=number(int, 2), help="tokens of a window; default: the training length")
    parser.add_argument("--stride", type=number(int, 1), help="how far windows advance; default: half the context")
    parser.add_argument(
        "--max-tokens", type=number(int, 2), default=200_000, help="tokens of text to score (default %(default)s)"
    )
    parser.add_argument("--batch-size", type=number(int, 1), default=8)
    parser.add_argument(
        "--lengths", type=numbers(number(int, 2)), help="needle: context lengths; default: up to the context"
    )
    parser.add_argument(
        "--depths", type=numbers(number(float, 0, 1)), default=[0.0, 0.25, 0.5, 0.75, 1.0], help="needle: 0 to 1"
    )
    parser.add_argument(
        "--samples", type=number(int, 1), default=8, help="needle: samples per cell; recall: 32 rows each"
    )
    parser.add_argument(
        "--num-keys", type=number(int, 1), default=4, help="needle-multi: facts per context (default %(default)s)"
    )
    parser.add_argument("--seed", type=number(int, 0), default=0)
    parser.add_argument("--output", help="directory for results; default: PATH/evaluation")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """The command line tool; returns the exit status."""
    args = _parser().parse_args(argv)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    logging.getLogger("absl").setLevel(logging.ERROR)
    choose_platform()
    try:
        Evaluation(args).run()
    except (LoadError, DataError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USAGE
    return 0


if __name__ == "__main__":
    sys.exit(main())
