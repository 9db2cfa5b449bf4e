"""What a run is about to be fed: the first batches, duplicates, overlap of the splits, entropies.

Rules: R030 validation data is training data; R031 duplicated documents; R032 repeated rows; R033 a batch breaks its
contract (labels not shifted, ids out of range, nothing to predict); R034 many passes over the data; R035 slow; R036
text without content; R037 the data cannot be used at all; R038 documents too short for NSA to select; R028 it was not
looked at.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Iterable, Iterator

import numpy as np
from ml_collections import ConfigDict

from nsa_jax.batch_ramp import BatchRamp
from nsa_jax.config import Problem, nsa_config
from nsa_jax.data import DataError, Pipeline, make_pipeline, sources, statistics
from nsa_jax.data.packing import check_batch
from nsa_jax.data.pipeline import SAMPLE_TOKENS, Part
from nsa_jax.data.token_file import TokenStream
from nsa_jax.fields import source_configs
from nsa_jax.object_store import scheme_of
from nsa_jax.ops import blocks
from nsa_jax.rules import GENERATED, attention_kinds
from nsa_jax.train.metrics import printable

NOT_CHECKED = "not checked"  # the name of a fact: why it is the only one of its section
_BATCHES = 4
_LITTLE_CHOICE = 0.2  # share of queries below which sparse attention has little to do
_SAMPLE_TOKENS = 2_000_000
_BUILD_BELOW = 256 << 20  # bytes of local text that a preflight tokenises; more is left to the run
_WINDOW = 128  # tokens; the same so many in a row in both splits is no chance, save for boilerplate
_SHORTEST_WINDOW = 32  # tokens; fewer in a row occur in any text of the same kind
_WINDOWS = 1024
_SCAN_TOKENS = 256 << 20  # of training that are searched when a sample of it looks suspicious; half a minute
_STRETCH = 4 << 20


@dataclasses.dataclass
class DataReport:
    """What was found in the data.

    Attributes:
      problems: findings.
      facts: (name, value) lines for the reader.
      unigram_entropy: nats per token; None if the data was not looked at.
      bigram_entropy: nats per token, what the loss guard calls the floor; None likewise.
      vocab_size: the tokenizer's; None likewise.
      segment_start: int32 [rows, T] of sampled training rows; None likewise, and without packing.
      choice_share: share of the sampled queries that have more blocks than they select; None without NSA or data.
    """

    problems: list[Problem] = dataclasses.field(default_factory=list)
    facts: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    unigram_entropy: float | None = None
    bigram_entropy: float | None = None
    vocab_size: int | None = None
    segment_start: np.ndarray | None = None
    choice_share: float | None = None


def _is_small_and_local(config: ConfigDict) -> bool:
    """Whether the data can be read without a download and tokenised in a moment."""
    alone = [part for part in source_configs(config).values() if part.data.source not in GENERATED]
    if any(part.data.source not in ("stdlib", "text", "trees") for part in alone):
        return False
    if any(scheme_of(file) for part in alone for file in (*part.data.files, *part.data.val_files)):
        return False
    read = [sources.make_source(part) for part in alone]
    read += [sources.make_held_out_source(part) for part in alone if sources.has_held_out(part)]
    sizes = [source.size_bytes() for source in read]
    return sum(math.inf if size is None else size for size in sizes) <= _BUILD_BELOW


def _window_hashes(tokens: np.ndarray, length: int) -> np.ndarray:
    """uint64 hash of every run of `length` tokens of a row, `length` a power of two."""
    factor = np.uint64(0x9E3779B97F4A7C15)
    hashes = (tokens.astype(np.uint64) + np.uint64(1)) * factor
    done = 1
    with np.errstate(over="ignore"):
        while done < length:
            factor = factor * factor + np.uint64(2 * done + 1)
            hashes = hashes[:-done] * factor + hashes[done:]
            done *= 2
    return hashes


def shared_windows(haystack: Iterable[np.ndarray], validation_rows: np.ndarray, length: int) -> np.ndarray:
    """How often windows of the validation rows occur in training tokens.

    Args:
      haystack: stretches of training tokens.
      validation_rows: [b, T].
      length: tokens in a window, a power of two of at most T.

    Returns:
      int64, one number for each different window that was looked for; none if all rows are filler.
    """
    per_row = max(_WINDOWS // len(validation_rows), 1)
    wanted = []
    for row in validation_rows:
        starts = np.linspace(0, len(row) - length, per_row).astype(int)
        # A run of blanks or of one filler token says nothing.
        telling = [s for s in starts if len(np.unique(row[s : s + length])) > length // 16]
        wanted.append(_window_hashes(row, length)[telling])
    hashes = np.unique(np.concatenate(wanted))
    times = np.zeros(len(hashes), np.int64)
    for tokens in haystack if len(hashes) else []:
        seen = _window_hashes(tokens, length) if len(tokens) >= length else np.zeros(0, np.uint64)
        place = np.minimum(np.searchsorted(hashes, seen), len(hashes) - 1)
        times += np.bincount(place[hashes[place] == seen], minlength=len(hashes))
    return times


def _stretches(stream: TokenStream, count: int, length: int) -> Iterator[np.ndarray]:
    """About `count` tokens of a stream in evenly spaced stretches; all of it, seams included, if it has no more."""
    size = min(count, _STRETCH)
    if len(stream) <= count:
        for start in range(0, len(stream), size):
            yield np.asarray(stream[start : start + size + length - 1])
    else:
        for start in np.linspace(0, len(stream) - size, max(count // size, 1)).astype(np.int64):
            yield np.asarray(stream[start : start + size])


def _estimated_share(times: np.ndarray, coverage: float) -> float:
    """Share of windows that occur in all of training, from how often they occur in the share `coverage` of it.

    A held-out text that is trained on occurs once, and a sample finds the share `coverage` of such windows: those seen
    once stand for more of them. What occurs several times in a sample (a licence, say) is in nearly every sample.
    """
    once, more = int((times == 1).sum()), int((times > 1).sum())
    # Fewer than 8 are too few to scale up.
    return min((more + (once / coverage if once >= 8 else once)) / max(len(times), 1), 1.0)


def check_batches(batches: list[dict[str, np.ndarray]], vocab_size: int) -> list[Problem]:
    """R032, R033 and R036 on the batches that the trainer will read."""
    problems = []
    fix = "correct the data pipeline; no model can be trained on this"
    for index, batch in enumerate(batches):
        try:
            check_batch(batch)
        except DataError as error:
            problems.append(Problem("R033", "error", f"batch {index}: {error}", fix))
            break
        ids = np.stack([batch["inputs"], batch["targets"]])
        if ids.min() < 0 or ids.max() >= vocab_size:
            message = f"batch {index}: ids from {ids.min()} to {ids.max()}, the vocabulary has {vocab_size}"
            problems.append(Problem("R033", "error", message, fix))
        if not batch["loss_mask"].any():
            problems.append(Problem("R033", "error", f"batch {index}: the loss mask is 0 everywhere", fix))
    rows = np.concatenate([batch["inputs"] for batch in batches])
    repeated = statistics.repeated_window_share(rows)
    if repeated > 0.01:
        message = f"{repeated:.1%} of the first {len(rows)} rows repeat an earlier row: the loader stands still"
        problems.append(Problem("R032", "error", message, "more text, or correct the loader"))
    if statistics.unigram_entropy(rows) < 0.1:
        message = f"unigram entropy {statistics.unigram_entropy(rows):.3f} nats: nearly all tokens are the same"
        problems.append(Problem("R036", "error", message, "look at the decoded text; is it the right column or file?"))
    return problems


def check_splits(pipeline: Pipeline, train_rows: np.ndarray, seq_len: int) -> tuple[list[Problem], float | None]:
    """R030: no validation text is trained on.

    The documents' hashes tell whether the splits are apart; windows of the batches tell whether the batches come from
    the split that they should come from, and how much text the splits have in common.

    Args:
      pipeline: of the run.
      train_rows: [b, T] of the first training batches.
      seq_len: T.

    Returns:
      The problems, and the estimated share of validation windows that occur in training; None if there are no
      windows to compare.
    """
    problems = []
    corpus = pipeline.corpus
    length = min(_WINDOW, 1 << (seq_len.bit_length() - 1))
    rows = np.concatenate([b["inputs"][b["loss_mask"].any(1)] for b in itertools.islice(pipeline.validation(), 8)])
    if corpus is not None:
        overlap = statistics.corpus_report(corpus).overlap_documents
        if overlap:
            message = f"{overlap:,} training documents are also held out: validation would measure memory"
            if corpus.apart:  # the windows below tell how much of it
                fix = "leave them out of the training files, or read validation loss with that in mind"
                problems.append(Problem("R030", "warning", message, fix))
            else:
                problems.append(Problem("R030", "error", message, "build the cache again"))
    if length < _SHORTEST_WINDOW or not len(rows):
        return problems, None
    times = shared_windows(train_rows, rows, length)
    if not len(times):
        return problems, None
    share = float((times > 0).mean())
    if corpus is not None:
        stream = corpus.train.tokens
        for count in (2 * _SAMPLE_TOKENS, _SCAN_TOKENS):
            coverage = min(count / max(len(stream), 1), 1.0)
            found = _estimated_share(shared_windows(_stretches(stream, count, length), rows, length), coverage)
            if found <= 0.1 or coverage == 1.0:
                break
        share = max(share, found)
    if share > 0.5:
        message = f"about {share:.0%} of the validation windows of {length} tokens are training data"
        problems.append(Problem("R030", "error", message, "hold other documents out; these are trained on"))
    elif share > 0.1:
        message = f"about {share:.0%} of the validation windows of {length} tokens also occur in training: boilerplate"
        problems.append(
            Problem("R030", "warning", message, "read validation loss with that in mind, or clean the text")
        )
    return problems, share


def examine(config: ConfigDict, pipeline: Pipeline) -> DataReport:
    """Looks at a run's data; seconds for a corpus of any size.

    Args:
      config: the training config.
      pipeline: of the run.
    """
    report = DataReport(vocab_size=pipeline.tokenizer.vocab_size)
    start = time.perf_counter()
    iterator = pipeline.train()
    batches = [next(iterator)]
    first = time.perf_counter() - start
    batches += [next(iterator) for _ in range(_BATCHES - 1)]
    each = (time.perf_counter() - start - first) / (_BATCHES - 1)
    iterator.close()
    problems = report.problems
    problems += check_batches(batches, pipeline.tokenizer.vocab_size)
    rows = np.concatenate([batch["inputs"] for batch in batches])
    sampled, source_facts = [], []
    for name, part in pipeline.parts.items():
        if part.pipeline.corpus is not None:
            count = int(part.share * _SAMPLE_TOKENS)
            sampled.append(statistics.sample_tokens(part.pipeline.corpus.train, count))
        found, facts = _examine_source(config, name, part, rows)
        problems += found
        source_facts += facts
    problems += _check_sources_apart(pipeline)
    tokens = np.concatenate(sampled or [rows])
    report.unigram_entropy = statistics.unigram_entropy(tokens)
    report.bigram_entropy = statistics.bigram_entropy(tokens)
    if first > 60:
        message = f"the first batch came after {first:.0f} s"
        fix = "look at the disk and " + ("the network" if pipeline.streamed else "config.data.num_workers")
        problems.append(Problem("R035", "warning", message, fix))
    text = printable(pipeline.tokenizer.decode(batches[0]["inputs"][0, : min(64, config.data.seq_len)]))
    counts = statistics.token_histogram(tokens, pipeline.tokenizer.vocab_size)
    top = np.argsort(counts)[::-1][:5]
    strings = pipeline.tokenizer.decode_each(top)
    shares = counts[top] / counts.sum()
    of_guard = "" if loss_floor(config, report) is None else ", the loss guard's floor"
    common = ", ".join(f"{printable(text)!r} {share:.1%}" for text, share in zip(strings, shares, strict=True))
    report.facts = [
        ("first text", text.replace("\n", "\\n")[:160]),
        ("time to the first batch", f"{first:.2f} s, then {each * 1e3:.1f} ms each"),
        ("targets are the next tokens", "no" if any(p.rule == "R033" for p in problems) else "yes"),
        ("repeated rows", f"{statistics.repeated_window_share(rows):.2%} of {len(rows)}"),
        ("ids in use", f"{np.count_nonzero(counts):,} of {len(counts):,}; most common: {common}"),
        ("unigram entropy", f"{report.unigram_entropy:.3f} nats per token"),
        (f"bigram entropy{of_guard}", f"{report.bigram_entropy:.3f} nats per token"),
    ]
    report.facts += source_facts
    sampled_rows = pipeline.sampled_segment_starts()
    if sampled_rows is None:
        sampled_rows = np.concatenate([batch["segment_start"] for batch in batches])
        sampled_rows = sampled_rows[: max(SAMPLE_TOKENS // config.data.seq_len, 4)]
    _examine_documents(config, sampled_rows, report)
    return report


def _check_sources_apart(pipeline: Pipeline) -> list[Problem]:
    """R030: no source trains on what another one holds out."""
    corpora = {name: part.pipeline.corpus for name, part in pipeline.parts.items() if part.pipeline.corpus is not None}
    problems = []
    for (name, trained), (other, held_out) in itertools.permutations(corpora.items(), 2):
        if count := statistics.overlap_documents(trained, held_out):
            message = f"config.data.sources.{name}: {count:,} training documents are held out by the source {other}"
            fix = "leave them out of one of the two, or read the validation loss with that in mind"
            problems.append(Problem("R030", "warning", message, fix))
    return problems


def _examine_documents(config: ConfigDict, segment_start: np.ndarray, report: DataReport) -> None:
    """R038: NSA has something to select from within the documents."""
    positions = np.arange(segment_start.shape[1])
    if config.data.packing:
        report.segment_start = segment_start
        length = segment_start.size / np.count_nonzero(segment_start == positions)
        report.facts.append(("tokens of a document in a row", f"{length:,.0f} on average"))
    if "nsa" not in attention_kinds(config.model):
        return
    nsa = nsa_config(config)
    share = report.choice_share = float(blocks.has_choice(positions, segment_start, nsa).mean())
    report.facts.append(("queries with more blocks than they select", f"{share:.1%}"))
    if config.data.packing and share < _LITTLE_CHOICE and not config.allow_dense_regime:
        message = (
            f"only {share:.1%} of the queries have more than {nsa.num_selected} blocks of {nsa.select_block} tokens in "
            f"their document, which has {length:,.0f} tokens on average: for all others NSA is dense attention"
        )
        fix = "use longer documents or config.data.packing_method='best_fit', or select fewer or smaller blocks"
        report.problems.append(Problem("R038", "warning", message, fix))


def _examine_source(
    config: ConfigDict, name: str, part: Part, rows: np.ndarray
) -> tuple[list[Problem], list[tuple[str, str]]]:
    """Problems and facts of one source; those of one among several begin with its name."""
    problems: list[Problem] = []
    facts: list[tuple[str, str]] = []
    corpus = part.pipeline.corpus
    if corpus is not None:
        stats, found = corpus.train.stats, statistics.corpus_report(corpus)
        rows_read = BatchRamp.of(config.train).rows_before(config.train.steps)
        wanted = int(rows_read * config.data.seq_len * part.share)
        problems += _duplicate_problems(found) + _epoch_problems(wanted, stats.tokens, bool(name))
        if source_configs(config)[name].data.source == "hf":
            problems += _empty_problems(found, stats.documents + corpus.validation.stats.documents)
        facts += [
            ("training documents", f"{stats.documents:,}, {stats.tokens:,} tokens, {stats.bytes:,} bytes"),
            ("passes over them", f"{wanted / max(stats.tokens, 1):,.2f}: {wanted:,} tokens, {part.share:.2%} of all"),
            ("duplicated documents", f"{found.duplicate_documents:.2%}, {found.duplicate_tokens:.2%} of tokens"),
            ("documents in both splits", str(found.overlap_documents)),
        ]
        if found.empty_documents:
            facts.append(("documents without text, left out", f"{found.empty_documents:,}"))
    if config.train.eval_batches:
        split_problems, shared = check_splits(part.pipeline, rows, config.data.seq_len)
        problems += split_problems
        seen = "no windows to compare" if shared is None else f"{shared:.2%}"
        facts.append(("validation windows seen in training", seen))
    if name:
        where = f"config.data.sources.{name}"
        problems = [dataclasses.replace(p, message=f"{where}: {p.message}") for p in problems]
        facts = [(f"{name}: {fact}", value) for fact, value in facts]
    return problems, facts


def _duplicate_problems(found: statistics.CorpusReport) -> list[Problem]:
    share = found.duplicate_tokens
    if share <= 0.05:
        return []
    message = f"{share:.0%} of the training tokens are in documents that repeat an earlier one"
    fix = "remove the duplicates; a model memorises what it sees many times"
    return [Problem("R031", "error" if share > 0.3 else "warning", message, fix)]


def _empty_problems(found: statistics.CorpusReport, documents: int) -> list[Problem]:
    """Rows of a dataset whose column is null or blank; of files, blank pieces are the rule."""
    rows = found.empty_documents + documents
    if found.empty_documents <= 0.01 * rows:
        return []
    message = f"{found.empty_documents:,} of {rows:,} rows hold no text and were left out"
    return [Problem("R036", "warning", message, "look at config.data.hf_text_field: is it the right column?")]


def _epoch_problems(wanted: int, tokens: int, mixed: bool) -> list[Problem]:
    if wanted <= 4 * tokens:
        return []
    message = f"{wanted:,} tokens of training are {wanted / tokens:.1f} passes over {tokens:,}"
    fix = "more text or fewer steps; repeated text is memorised"
    if mixed:
        fix = f"a lower weight, {fix}"
    return [Problem("R034", "warning", message, fix)]


def loss_floor(config: ConfigDict, report: DataReport) -> float | None:
    """The entropy that an honest training loss does not fall far below early; None where there is no such thing.

    Synthetic rows but "random" and the answers of tasks are predicted from their row, far better than from one token.
    """
    synthetic = config.data.source == "synthetic" and config.data.synthetic != "random"
    tasks = any(part.data.source == "task" for part in source_configs(config).values())
    return None if synthetic or tasks else report.bigram_entropy


def examine_local(config: ConfigDict) -> DataReport:
    """As `examine`, but downloads nothing but a tokenizer of the hub.

    Data that is not here is a warning, R028, and data that is unusable an error, R037.
    """
    local = None
    try:
        local = _is_small_and_local(config)
        pipeline = make_pipeline(config, cached_only=not local)
        local = True
        return examine(config, pipeline)
    except DataError as error:
        if local is not False:
            problem = Problem("R037", "error", f"{error.where}: {error.what}", error.fix)
            return DataReport(problems=[problem])
        fix = "run --preflight again on the training machine when the cache is built; the run itself always checks"
        message = f"the data was not looked at: {error.where}: {error.what}"
        return DataReport(problems=[Problem("R028", "warning", message, fix)], facts=[(NOT_CHECKED, error.what)])
