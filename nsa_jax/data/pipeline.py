"""The pipeline that a config asks for: a source or a mixture of them, its tokenizer, its rows and their batches."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import hashlib
import json
import logging
import math
import os
from collections.abc import Callable, Iterator
from typing import Any

import grain
import numpy as np
from absl import flags
from ml_collections import ConfigDict

from nsa_jax.data import cache, cache_store, long_tasks, sources, streaming, synthetic, tokenizers
from nsa_jax.data.batches import Share, StepBatches, TrainIterator, ValidationBatches, end_with
from nsa_jax.data.cache import SplitStats
from nsa_jax.data.encoding import document_hash, to_bytes
from nsa_jax.data.errors import DataError
from nsa_jax.data.mixture import MixedDocuments, MixedRows, Schedule
from nsa_jax.data.packing import Batch
from nsa_jax.data.windows import BestFitRows, SequentialWindows, ShuffledWindows
from nsa_jax.fields import source_configs

logger = logging.getLogger(__name__)

_ENDLESS = 1 << 48  # steps; grain requires a length
SAMPLE_TOKENS = 1 << 20  # of the rows whose document lengths are looked at
_READ_THREADS = 2  # a batch is one memory copy, which more threads do not speed up


@dataclasses.dataclass(frozen=True)
class Part:
    """One source of a pipeline.

    Attributes:
      pipeline: of this source alone.
      share: of the rows of training, and so of their tokens.
    """

    pipeline: Pipeline
    share: float


class Pipeline:
    """Data of one run, as this process sees it.

    Attributes:
      tokenizer: of the run.
      stats: {"train": SplitStats, "validation": SplitStats}; None where the size is not known (streams, synthetic).
      corpus: the cached corpus; None for streams, synthetic data and several sources.
      fingerprint: of everything that decides the batches.
      earlier_fingerprint: as earlier versions saved it, which took paths and times of files for the documents.
      parts: each source by its name; a single source is the pipeline itself, under an empty name.
    """

    def __init__(
        self,
        config: ConfigDict,
        tokenizer: tokenizers.Tokenizer,
        share: Share,
        *,
        train_rows: Callable[[np.ndarray], Batch] | None,
        validation_rows: Callable[[np.ndarray], Batch] | None = None,
        num_validation_rows: int = 0,
        data_fingerprint: str,
        earlier_fingerprint: str = "",
        corpus: cache.Corpus | None = None,
        stats: dict[str, SplitStats | None] | None = None,
        stream: streaming.StreamBatches | None = None,
        parts: dict[str, Part] | None = None,
    ):
        self.tokenizer = tokenizer
        self.corpus = corpus
        self.stats = stats or {"train": None, "validation": None}
        data = config.data
        settings = [tokenizer.fingerprint, data.seq_len, data.packing, share.batch_size, config.seed]
        if data.packing_method != "concatenate":
            settings.append(data.packing_method)
        self.fingerprint, self.earlier_fingerprint = (
            hashlib.blake2b(json.dumps([documents, *settings]).encode(), digest_size=8).hexdigest()
            for documents in (data_fingerprint, earlier_fingerprint or data_fingerprint)
        )
        self._share = share
        self._train_rows = train_rows
        self._validation_rows = validation_rows
        self._num_validation_rows = num_validation_rows
        self._eval_batches = config.train.eval_batches
        self._num_workers = data.num_workers
        self._seq_len = data.seq_len
        self._prefetch = data.prefetch
        self._stream = stream
        self._place = ""
        self.parts = parts or {"": Part(self, 1.0)}
        for name in parts or ():
            self.parts[name].pipeline._place = f"config.data.sources.{name}: "

    @property
    def streamed(self) -> bool:
        """Whether a batch can only be reached by reading all batches before it."""
        return self._stream is not None

    def train(self, start_step: int = 0) -> TrainIterator:
        """Endless batches from that of `start_step` on.

        Args:
          start_step: first step. Cached and synthetic data start there at once; a stream is read up to there.

        Returns:
          A grain iterator of dicts `inputs`, `targets`, `segment_start` int32 [b, T] and `loss_mask` float32 [b, T],
          where b = batch_size / process_count.
        """
        stream = self._stream is not None
        return TrainIterator(
            self._open_stream if stream else self._open_at,
            self.fingerprint,
            earlier=self.earlier_fingerprint,
            start_step=start_step,
            stream=stream,
        )

    def _open_at(self, step: int) -> grain.DatasetIterator:
        assert self._train_rows is not None
        steps = grain.MapDataset.range(step, _ENDLESS).map(StepBatches(self._train_rows, self._share))
        if self._num_workers:
            if not flags.FLAGS.is_parsed():
                # Grain's workers read absl flags, which a program without absl has not parsed.
                flags.FLAGS.mark_as_parsed()
            workers = grain.multiprocessing.MultiprocessingOptions(
                num_workers=self._num_workers, per_worker_buffer_size=max(1, self._prefetch // self._num_workers)
            )
            read = grain.ReadOptions(num_threads=1, prefetch_buffer_size=1)
            ends = functools.partial(end_with, os.getpid())
            return iter(steps.to_iter_dataset(read).mp_prefetch(workers, worker_init_fn=ends))
        read = grain.ReadOptions(
            num_threads=min(_READ_THREADS, self._prefetch), prefetch_buffer_size=max(self._prefetch, 0)
        )
        return iter(steps.to_iter_dataset(read))

    def _open_stream(self, step: int) -> grain.DatasetIterator:
        assert self._stream is not None and step == 0
        return iter(grain.experimental.ThreadPrefetchIterDataset(self._stream, prefetch_buffer_size=self._prefetch))

    def sampled_segment_starts(self) -> np.ndarray | None:
        """`segment_start` of some rows of training, int32 [rows, T], which tells document lengths; None for streams."""
        if self._train_rows is None:
            return None
        count = min(max(SAMPLE_TOKENS // self._seq_len, 4), 1024)
        return self._train_rows(np.arange(count))["segment_start"]  # in the first epoch's shuffled order

    @functools.cached_property
    def loss_shares(self) -> dict[str, float]:
        """Share of each source in the loss of training, in which not every token of a task counts."""
        weights = {name: part.share for name, part in self.parts.items()}
        if any(part.pipeline.corpus is None for part in self.parts.values()):
            rows = np.arange(min(max(SAMPLE_TOKENS // self._seq_len, 4), 256))
            for name, part in self.parts.items():
                assert part.pipeline._train_rows is not None  # no source of several is a stream
                weights[name] *= float(part.pipeline._train_rows(rows)["loss_mask"].sum(dtype=np.float64))
        total = math.fsum(weights.values())
        return {name: weight / total for name, weight in weights.items()}

    def epochs(self, batches: int) -> dict[str, float]:
        """How often each source was passed after so many batches, by its name; of cached sources alone."""
        rows, found = batches * self._share.batch_size, {}
        if isinstance(self._train_rows, MixedRows):
            counts = self._train_rows.schedule.counts(rows)
            parts = zip(self.parts.items(), counts, strict=True)
        else:
            parts = zip(self.parts.items(), [rows], strict=True)
        for (name, part), count in parts:
            if isinstance(windows := part.pipeline._train_rows, (ShuffledWindows, BestFitRows)):
                found[name] = count / windows.rows_per_epoch
        return found

    def validation(self) -> ValidationBatches:
        """Up to `config.train.eval_batches` batches of held-out rows, the same each time.

        A smaller corpus gives fewer batches. Missing rows of the last batch have loss mask 0. Of several sources, each
        of `parts` has batches of its own.

        Raises:
          DataError: no document is held out.
        """
        if self._validation_rows is None:
            raise DataError(
                "validation split", "there is one for each source", "use pipeline.parts[NAME].pipeline.validation()"
            )
        batches = -(-self._num_validation_rows // self._share.batch_size)
        if not batches:
            raise DataError(
                f"{self._place}validation split",
                "no document is held out, so there is nothing to validate on",
                "raise config.data.val_fraction, use more documents (config.data.text_separator splits files), "
                "or turn validation off with config.train.eval_batches=0",
            )
        return ValidationBatches(self._validation_rows, self._share, min(batches, self._eval_batches))


def make_pipeline(
    config: ConfigDict,
    *,
    process_index: int = 0,
    process_count: int = 1,
    cached_only: bool = False,
    on_tokenizer: Callable[[tokenizers.Tokenizer], None] = lambda tokenizer: None,
) -> Pipeline:
    """Opens the data that `config` names, and builds the tokenised cache if it does not exist.

    Args:
      config: the training config; `config.data`, `config.seed` and the batch fields of `config.train` are read.
      process_index: of this process.
      process_count: processes of the run; each gets an equal share of every batch.
      cached_only: do not read the source; raise if its tokens are not in the cache.
      on_tokenizer: called with the tokenizer before anything is tokenised, which may take hours.

    Returns:
      The pipeline.

    Raises:
      DataError: the data cannot be used; it says what is wrong, where, and how to fix it.
    """
    data = config.data
    share = Share(config.train.batch_size, process_index, process_count)
    if data.seq_len < 1:
        raise DataError(f"config.data.seq_len={data.seq_len}", "must be positive", "set the tokens in one row")
    if config.seed < 0:
        raise DataError(f"config.seed={config.seed}", "must not be negative", "use 0 or more")
    if not 0 <= data.val_fraction < 1:
        raise DataError(f"config.data.val_fraction={data.val_fraction}", "not in [0, 1)", "use a share such as 0.01")
    if cached_only and cache.store_address(data.cache_dir):  # what is there would have to be fetched
        config = copy.deepcopy(config)
        data = config.data
        data.cache_dir = ""
    if data.sources:
        return _mixture_pipeline(config, share, cached_only, on_tokenizer)
    if data.source in ("synthetic", "task"):
        made = _synthetic_pipeline if data.source == "synthetic" else _task_pipeline
        pipeline = made(config, share, tokenizers.load_tokenizer(config))
        on_tokenizer(pipeline.tokenizer)
        return pipeline
    source = sources.make_source(config)
    if cached_only:
        source = _Unread(source)
    tokenizer = _tokenizer(config, source)
    if data.source == "hf" and data.hf_streaming:
        if cached_only:
            raise DataError(f"source {source.name}", "is streamed, never cached", "start the run to read it")
        on_tokenizer(tokenizer)
        return _streaming_pipeline(config, share, source, tokenizer)
    return _cached_pipeline(config, share, source, tokenizer, on_tokenizer)


def _cached_pipeline(
    config: ConfigDict,
    share: Share,
    source: sources.Source,
    tokenizer: tokenizers.Tokenizer,
    on_tokenizer: Callable[[tokenizers.Tokenizer], None],
) -> Pipeline:
    data = config.data
    load = functools.partial(
        cache.load_corpus,
        tokenizer=tokenizer,
        root=cache.cache_root(data.cache_dir),
        address=cache.store_address(data.cache_dir),
        workers=data.tokenizer_workers,
    )
    # Before anything is tokenised, which may take hours: it may name files that are not there, or are trained on.
    held_out_source = sources.make_held_out_source(config) if sources.has_held_out(config) else None
    on_tokenizer(tokenizer)
    corpus = load(source, val_fraction=_val_fraction(config))
    if held_out_source is not None:
        if isinstance(source, _Unread):
            held_out_source = _Unread(held_out_source)
        with _naming("held-out documents"):
            held_out_corpus = load(held_out_source, val_fraction=1.0)
        corpus = corpus.with_held_out(held_out_corpus)
    if corpus.train.stats.tokens < data.seq_len + 1:
        raise DataError(
            f"training split of {source.name}",
            f"{corpus.train.stats.tokens:,} tokens in {corpus.train.stats.documents:,} documents are fewer than one "
            f"row of seq_len + 1 = {data.seq_len + 1:,}",
            "lower config.data.seq_len, lower config.data.val_fraction, or use a longer corpus",
        )
    settings = data.seq_len, config.seed, tokenizer.eos_id, data.packing
    train_rows: BestFitRows | ShuffledWindows
    layout = ""
    if data.packing_method == "best_fit":
        train_rows = BestFitRows(corpus.train, *settings)
        layout = train_rows.layout
    else:
        train_rows = ShuffledWindows(corpus.train.tokens, *settings)
    held_out = SequentialWindows(corpus.validation.tokens, data.seq_len, tokenizer.eos_id, data.packing)
    return Pipeline(
        config,
        tokenizer,
        share,
        train_rows=train_rows,
        validation_rows=held_out,
        num_validation_rows=held_out.num_rows,
        data_fingerprint=corpus.content + layout,
        earlier_fingerprint=corpus.fingerprint + layout,
        corpus=corpus,
        stats={"train": corpus.train.stats, "validation": corpus.validation.stats},
    )


def _val_fraction(config: ConfigDict) -> float:
    """Share of the source's own documents that is held out: none if it names held-out documents of its own."""
    return 0.0 if sources.has_held_out(config) else config.data.val_fraction


def _mixture_pipeline(
    config: ConfigDict,
    share: Share,
    cached_only: bool,
    on_tokenizer: Callable[[tokenizers.Tokenizer], None],
) -> Pipeline:
    """Several sources, each of them a pipeline of its own, with one tokenizer."""
    if config.data.source == "synthetic":
        raise DataError("config.data.source='synthetic'", "with config.data.sources", "set 'text', or another")
    alone = source_configs(config)
    weights = {name: float(config.data.sources[name].get("weight", 1.0)) for name in alone}
    for name, weight in weights.items():
        if not 0 < weight < math.inf:
            raise DataError(f"config.data.sources.{name}.weight={weight}", "not positive", "use a positive weight")
    schedule = Schedule.of(weights)
    found: dict[str, sources.Source] = {}
    for name, part in alone.items():
        if part.data.source == "task":
            continue
        with _naming(f"config.data.sources.{name}"):
            source = sources.make_source(part)
        found[name] = _Unread(source) if cached_only else source
    _check_apart(alone)
    read: dict[str, sources.Source] = {}  # by the tokenizer: a source may hold out more than config.data says
    for name, source in found.items():
        fraction = _val_fraction(alone[name])
        read[name] = _TrainingDocuments(source, fraction) if fraction > _val_fraction(config) else source
    tokenizer = _tokenizer(config, MixedDocuments(read, weights))
    on_tokenizer(tokenizer)
    parts = {}
    for (name, part), exact in zip(alone.items(), schedule.shares, strict=True):
        # Orders of their own, for sources of equally many rows.
        part.seed = int.from_bytes(hashlib.blake2b(f"{config.seed} {name}".encode(), digest_size=3).digest(), "little")
        with _naming(f"config.data.sources.{name}"):
            made = (
                _cached_pipeline(part, share, found[name], tokenizer, lambda _: None)
                if name in found
                else _task_pipeline(part, share, tokenizer)
            )
            parts[name] = Part(made, float(exact))
    return Pipeline(
        config,
        tokenizer,
        share,
        train_rows=MixedRows(tuple(rows for part in parts.values() if (rows := part.pipeline._train_rows)), schedule),
        data_fingerprint=sources.digest(
            [(n, weights[n], part.pipeline.fingerprint) for n, part in parts.items()], *schedule.layout
        ),
        earlier_fingerprint=sources.digest(
            [(n, weights[n], part.pipeline.earlier_fingerprint) for n, part in parts.items()], *schedule.layout
        ),
        parts=parts,
    )


def _check_apart(alone: dict[str, ConfigDict]) -> None:
    """Raises DataError if a file that one source holds out is trained on by another one."""
    readers = {name: part.data for name, part in alone.items() if part.data.source in ("text", "tokens")}
    trained: dict[str, str] = {}
    for name, data in readers.items() if any(data.val_files for data in readers.values()) else ():
        trained |= dict.fromkeys(map(os.path.realpath, sources.TextSource(data.files).files), name)
    for name, data in readers.items():
        with _naming(f"config.data.sources.{name}"):
            for file in sources.held_out_files(data) if data.val_files else ():
                other = trained.get(os.path.realpath(file), name)
                if other != name:
                    what = f"is also trained on by the source {other}"
                    raise DataError(f"config.data.val_files entry {file!r}", what, "take it out of its files")


@contextlib.contextmanager
def _naming(place: str) -> Iterator[None]:
    """Errors say what they are about: which of several sources, or the held-out documents."""
    try:
        yield
    except DataError as error:
        raise DataError(f"{place}: {error.where}", error.what, error.fix) from error


class _TrainingDocuments:
    """A source without the documents that it holds out by their hash."""

    def __init__(self, source: sources.Source, val_fraction: float):
        self.name = source.name
        self.size_bytes = source.size_bytes
        self._source = source
        self._val_fraction = val_fraction

    def fingerprint(self) -> str:
        return sources.digest("training documents", self._source.fingerprint(), self._val_fraction)

    def documents(self) -> Iterator[str]:
        for text in self._source.documents():
            if not cache.is_validation(document_hash(to_bytes(text)), self._val_fraction):
                yield text


class _Unread:
    """A source that has a name but must not be read."""

    def __init__(self, source: sources.Source):
        self.name = source.name
        self.fingerprint = source.fingerprint
        self.size_bytes = source.size_bytes

    def documents(self) -> Iterator[str]:
        raise DataError(f"source {self.name}", "its tokens are not in the cache yet", "start the run to build it")


def _tokenizer(config: ConfigDict, source: sources.Source) -> tokenizers.Tokenizer:
    """Loads the tokenizer. A BPE is trained on training documents only, and so is not tuned to held-out text."""
    data, val_fraction = config.data, _val_fraction(config)
    parts = f"{source.fingerprint()} {data.bpe_vocab_size} {val_fraction}"
    name = f"bpe-{hashlib.blake2b(parts.encode(), digest_size=12).hexdigest()}"
    root = cache.cache_root(data.cache_dir)
    directory = root / name
    address = cache.store_address(data.cache_dir) if data.tokenizer == "bpe" else ""
    try:
        cache_store.fetch(address, directory, tokenizers.CONFIG_FILE, tokenizers.Tokenizer.load)
        tokenizer = tokenizers.load_tokenizer(
            config, _TrainingDocuments(source, val_fraction).documents(), directory=directory
        )
    except OSError as error:
        raise cache.storage_error(root, error) from error
    cache_store.keep(address, directory, tokenizers.CONFIG_FILE)
    _check_vocabulary(config, tokenizer)
    if data.tokenizer == "bpe" and tokenizer.vocab_size < data.bpe_vocab_size:
        asked, found = f"{data.bpe_vocab_size:,}", f"{tokenizer.vocab_size:,}"
        logger.warning(
            "config.data.bpe_vocab_size=%d: the corpus gave %s of %s tokens", data.bpe_vocab_size, found, asked
        )
    return tokenizer


def _check_vocabulary(config: ConfigDict, tokenizer: tokenizers.Tokenizer) -> None:
    model_vocab = config.model.vocab_size
    if model_vocab and model_vocab < tokenizer.vocab_size:
        raise DataError(
            f"config.model.vocab_size={model_vocab}",
            f"smaller than the {tokenizer.vocab_size} ids of the {tokenizer.name} tokenizer",
            f"set it to 0 (the tokenizer's size) or to at least {tokenizer.vocab_size}",
        )


def _synthetic_pipeline(config: ConfigDict, share: Share, tokenizer: tokenizers.Tokenizer) -> Pipeline:
    data = config.data
    if data.synthetic not in synthetic.TASKS:
        raise DataError(
            f"config.data.synthetic={data.synthetic!r}", "no such task", f"use one of {sorted(synthetic.TASKS)}"
        )
    if data.synthetic_vocab < 3:
        raise DataError(f"config.data.synthetic_vocab={data.synthetic_vocab}", "too small", "use at least 3")
    if data.synthetic == "copy" and data.seq_len < 2:
        raise DataError(f"config.data.seq_len={data.seq_len}", "too short for the copy task", "use at least 2")
    _check_vocabulary(config, tokenizer)
    if data.synthetic == "recall" and data.synthetic_vocab // 4 < synthetic.num_facts(data.seq_len):
        raise DataError(
            f"config.data.synthetic_vocab={data.synthetic_vocab}",
            f"too small for the {synthetic.num_facts(data.seq_len)} keys of a row of the recall task",
            f"use at least {4 * synthetic.num_facts(data.seq_len)}",
        )
    rows = functools.partial(
        synthetic.TASKS[data.synthetic], seq_len=data.seq_len, vocab_size=data.synthetic_vocab, seed=config.seed
    )
    return Pipeline(
        config,
        tokenizer,
        share,
        train_rows=functools.partial(rows, split="train"),
        validation_rows=functools.partial(rows, split="validation"),
        num_validation_rows=_ENDLESS,
        data_fingerprint=f"synthetic-1-{data.synthetic}",
    )


def _task_pipeline(config: ConfigDict, share: Share, tokenizer: tokenizers.Tokenizer) -> Pipeline:
    data = config.data
    _check_vocabulary(config, tokenizer)
    weights = long_tasks.parse_tasks(data.tasks)
    rows = {
        split: long_tasks.TaskRows(
            tokenizer,
            weights,
            data.seq_len,
            config.seed,
            split,
            least=data.task_length,
            answers_only=data.task_answers_only,
            answer_weight=data.task_answer_weight if split == "train" else 1.0,
            packing=data.packing,
        )
        for split in ("train", "validation")
    }
    kind = long_tasks.rows_kind(tokenizer)
    identity, earlier = (
        sources.digest(kind, tasks, data.task_length, data.task_answers_only, data.task_answer_weight)
        for tasks in (list(weights.items()), sorted(weights.items()))  # tasks are drawn in the order given
    )
    return Pipeline(
        config,
        tokenizer,
        share,
        train_rows=rows["train"],
        validation_rows=rows["validation"],
        num_validation_rows=_ENDLESS,
        data_fingerprint=identity,
        earlier_fingerprint=earlier,
    )


def _streaming_pipeline(config: ConfigDict, share: Share, source: Any, tokenizer: tokenizers.Tokenizer) -> Pipeline:
    data = config.data
    needed = config.train.eval_batches * share.batch_size * data.seq_len + 1
    held_out_source = streaming.HeldOutSource(source, tokenizer, val_fraction=data.val_fraction, tokens=needed)
    held_out = None
    if data.val_fraction and config.train.eval_batches:
        root, address = cache.cache_root(data.cache_dir), cache.store_address(data.cache_dir)
        held_out = cache.load_corpus(
            held_out_source, tokenizer, val_fraction=1.0, root=root, address=address
        ).validation
    rows = None
    if held_out is not None:
        rows = SequentialWindows(held_out.tokens, data.seq_len, tokenizer.eos_id, data.packing)
    stream = streaming.StreamBatches(
        source,
        tokenizer,
        seq_len=data.seq_len,
        packing=data.packing,
        val_fraction=data.val_fraction,
        batch_size=share.batch_size,
        first_row=share.process_index * share.size,
        num_rows=share.size,
        lanes=data.stream_lanes,
        shuffle_buffer=data.shuffle_buffer,
        seed=config.seed,
    )
    order = [data.stream_lanes, data.shuffle_buffer]
    return Pipeline(
        config,
        tokenizer,
        share,
        train_rows=None,
        validation_rows=rows or _no_rows,
        num_validation_rows=rows.num_rows if rows else 0,
        data_fingerprint=f"stream {source.fingerprint()} {data.val_fraction}"
        + (f" {order}" if order != [1, 0] else ""),
        stats={"train": None, "validation": held_out.stats if held_out else None},
        stream=stream,
    )


def _no_rows(rows: np.ndarray) -> Batch:
    raise DataError("validation split", "no document is held out", "raise config.data.val_fraction")
