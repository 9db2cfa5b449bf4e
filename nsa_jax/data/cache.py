"""Tokenised corpora on disk: built once per (source, tokenizer, split), and compared with checksums when read.

A finished corpus is a directory <root>/<fingerprint>/ with, for each split, `<split>.tokens` (the token stream: every
document followed by EOS), `<split>.offsets` (int64, stream position of each document, and the stream's length) and
`<split>.hashes` (uint64, content hash of each document), their checksums (see token_file.py), the tokenizer, and
`meta.json`, which holds checksums of itself and of the files of checksums. `statistics.json` is added last; see
statistics.py. If the source's documents are tokens already, `<split>.starts` (int64, where each document lies in the
user's files) takes the place of `<split>.tokens`.

A corpus is built under another name and renamed when it is complete. Large sources are first tokenised in shards, which
later starts use; see shards.py. The builder holds a lock, which the system releases when the process dies. A process
that is killed therefore leaves nothing that could be mistaken for a corpus, and processes that start together build it
once. cache_store.py keeps finished corpora in an object store, too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import hashlib
import json
import logging
import os
import shutil
import socket
import uuid
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import filelock
import numpy as np

from nsa_jax.data import cache_store
from nsa_jax.data.corpus import SPLITS, Corpus, Split, SplitStats, meta_checksum, open_corpus
from nsa_jax.data.documents import Source
from nsa_jax.data.encoding import Encoded, content_hash
from nsa_jax.data.errors import DataError
from nsa_jax.data.shards import Progress, encoded_shards
from nsa_jax.data.sources import LimitedSource
from nsa_jax.data.statistics import corpus_report
from nsa_jax.data.token_file import ChunkWriter, checksums_path
from nsa_jax.data.token_sources import Indexed, TokenSource, index_documents
from nsa_jax.data.token_view import Part
from nsa_jax.data.tokenizers import Tokenizer
from nsa_jax.object_store import scheme_of

_META = "meta.json"  # what completes a corpus
_FORMAT = 1  # part of the fingerprint: raise it when the files' meaning changes

__all__ = [
    "SPLITS",
    "Corpus",
    "Split",
    "SplitStats",
    "cache_root",
    "content_hash",
    "corpus_fingerprint",
    "is_validation",
    "load_corpus",
    "open_corpus",
]

logger = logging.getLogger(__name__)


def cache_root(cache_dir: str = "") -> Path:
    """Where corpora are made and read: `cache_dir` if it is a directory, else $NSA_JAX_CACHE, else ~/.cache/nsa_jax."""
    directory = "" if scheme_of(cache_dir) else cache_dir
    return Path(directory or os.environ.get("NSA_JAX_CACHE") or "~/.cache/nsa_jax").expanduser()


def is_validation(document_hash: Any, val_fraction: float) -> Any:
    """Whether a document is held out. Its content or its group alone decides: duplicates fall into the same split.

    Args:
      document_hash: `encoding.document_hash` of the document, or uint64 [n] of several.
      val_fraction: share of documents held out.

    Returns:
      bool, or bool [n].
    """
    return document_hash < int(val_fraction * 2**64)


def corpus_fingerprint(source: Source, tokenizer: Tokenizer, val_fraction: float) -> str:
    """Hash of everything that decides what is in the cache."""
    parts = [_FORMAT, source.fingerprint(), tokenizer.fingerprint, float(val_fraction)]
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=12).hexdigest()


class _SplitWriter:
    def __init__(self, directory: Path, name: str, payload: str, stack: contextlib.ExitStack):
        kinds = (payload, "offsets", "hashes")
        self.files = {f"{name}.{kind}": ChunkWriter(directory / f"{name}.{kind}") for kind in kinds}
        for file in self.files.values():
            stack.callback(file.close)
        self._payload, self._offsets, self._hashes = self.files.values()
        self._offsets.write(np.int64(0).tobytes())
        self.documents = self.tokens = self.bytes = 0

    def append(self, encoded: Encoded | Indexed, members: np.ndarray) -> None:
        """Adds those documents for which `members`, bool [documents], is true."""
        lengths = encoded.lengths[members]
        self._payload.write(encoded.payload(members).tobytes())
        self._offsets.write((self.tokens + np.cumsum(lengths)).tobytes())
        self._hashes.write(encoded.hashes[members].tobytes())
        self.documents += len(lengths)
        self.tokens += int(lengths.sum())
        self.bytes += int(encoded.sizes[members].sum())

    def finish(self) -> None:
        for file in self.files.values():
            file.finish()


def _write(
    directory: Path,
    fingerprint: str,
    source: Source,
    tokenizer: Tokenizer,
    val_fraction: float,
    groups: Iterable[Encoded | Indexed],
    parts: Sequence[Part] = (),
    empty: int = 0,
) -> None:
    """Writes a complete corpus into `directory`; of tokens in `parts`, only where its documents lie.

    `empty` is the number of documents that were left out.
    """
    directory.mkdir()
    with contextlib.ExitStack() as stack:
        writers = {name: _SplitWriter(directory, name, "starts" if parts else "tokens", stack) for name in SPLITS}
        for encoded in groups:
            held_out = is_validation(encoded.hashes, val_fraction)
            writers["train"].append(encoded, ~held_out)
            writers["validation"].append(encoded, held_out)
        for writer in writers.values():
            writer.finish()
    if not any(w.documents for w in writers.values()):
        raise DataError(f"source {source.name}", "the corpus is empty: no document holds text", "check what it reads")
    tokenizer.save(directory / "tokenizer")
    names = [name for writer in writers.values() for name in writer.files]
    meta = {
        "fingerprint": fingerprint,
        "source": source.name,
        "tokenizer": tokenizer.fingerprint,
        "val_fraction": val_fraction,
        "dtype": tokenizer.dtype.name,
        "empty_documents": empty,
        "splits": {n: {"documents": w.documents, "tokens": w.tokens, "bytes": w.bytes} for n, w in writers.items()},
        "files": {p.name: p.stat().st_size for p in sorted(directory.iterdir()) if p.is_file()},
        "checksums": {name: zlib.crc32(checksums_path(directory / name).read_bytes()) for name in names},
    }
    if parts:
        ids = {"eos_id": tokenizer.eos_id, "vocab_size": tokenizer.vocab_size}
        meta |= {"parts": [dataclasses.asdict(part) for part in parts], **ids}
    meta["checksum"] = meta_checksum(meta)
    (directory / _META).write_text(json.dumps(meta, indent=2) + "\n")


def store_address(cache_dir: str) -> str:
    """`cache_dir` if it is the address of an object store, else ""."""
    return cache_dir if scheme_of(cache_dir) else ""


def load_corpus(
    source: Source, tokenizer: Tokenizer, *, val_fraction: float, root: Path, address: str = "", workers: int = 0
) -> Corpus:
    """The tokenised corpus, from the cache or built now.

    Args:
      source: where documents come from.
      tokenizer: turns them into tokens.
      val_fraction: share of documents held out.
      root: directory of all caches.
      address: of an object store from which a corpus that is not in `root` is fetched, and to which one that was built
        is uploaded; not if the documents are tokens already, which need no tokenising. Empty: none.
      workers: tokenising processes on this host; 0: one for each core that this process may use.

    Returns:
      The corpus; of large token files only a sample has been read.

    Raises:
      DataError: no text in the source, an unreadable file, no room or no permission under `root`, an object
        store that cannot be read.
    """
    if isinstance(_inner(source), TokenSource):
        address = ""
    fingerprint = corpus_fingerprint(source, tokenizer, val_fraction)
    final = root / fingerprint
    shards = root / f"{fingerprint}.shards"
    corpus = open_corpus(final)
    if corpus is not None:
        shutil.rmtree(shards, ignore_errors=True)  # of a process that was killed when all was done
        cache_store.keep(address, final, _META)
        return corpus
    try:
        root.mkdir(parents=True, exist_ok=True)
        # The processes of a host that have the same cores take turns; those of other hosts take part.
        with _locked(root / f"{fingerprint}.{_cores_name()}.lock", f"another process is building {final}"):
            how = "found"
            if open_corpus(final) is None:
                how = _build(final, shards, source, tokenizer, val_fraction, workers, address)
                shutil.rmtree(shards, ignore_errors=True)
    except OSError as error:
        raise storage_error(root, error) from error
    corpus = open_corpus(final)
    if corpus is None:
        raise DataError(str(final), "what was just written cannot be read back", "check the disk")
    train, held_out = corpus.train.stats, corpus.validation.stats
    logger.info(
        "%s %s: %s training documents (%s tokens), %s held out (%s tokens)%s, in %s",
        *(how, source.name, f"{train.documents:,}", f"{train.tokens:,}"),
        *(f"{held_out.documents:,}", f"{held_out.tokens:,}"),
        *(f", {corpus.empty_documents:,} without text left out" if corpus.empty_documents else "", final),
    )
    cache_store.keep(address, final, _META)
    return corpus


def _inner(source: Source) -> Source:
    return source.source if isinstance(source, LimitedSource) else source


def _build(
    final: Path,
    shards: Path,
    source: Source,
    tokenizer: Tokenizer,
    val_fraction: float,
    workers: int,
    address: str,
) -> str:
    """Fetches a corpus, or makes it, together with other hosts; one of them writes it. Returns which, as a verb."""
    alone = functools.partial(_locked, final.with_name(f"{final.name}.lock"), f"another process is writing {final}")
    with alone():
        if os.path.lexists(final) and open_corpus(final) is None:
            logger.warning("%s is damaged; building it again", final)
            shutil.rmtree(final) if final.is_dir() and not final.is_symlink() else final.unlink()
    if cache_store.fetch(address, final, _META, lambda directory: open_corpus(directory, final.name)):
        return "fetched"
    groups: Iterator[Encoded | Indexed] | None
    inner, limit = _inner(source), source.limit if isinstance(source, LimitedSource) else 0
    parts: list[Part] = []
    empty = [0]  # documents without text, by the last pass over the source
    if isinstance(inner, TokenSource):
        parts = inner.parts(tokenizer)
        groups = _with_progress(source.name, parts, index_documents(inner, parts, tokenizer, limit=limit))
    else:
        finished = (final / _META).exists
        groups = encoded_shards(source, tokenizer, shards, workers=workers, finished=finished, tell=empty.append)
    if groups is not None:
        with alone():
            if not final.exists():
                for leftover in final.parent.glob(f"{final.name}.tmp*"):  # of a killed process: we hold the lock
                    shutil.rmtree(leftover, ignore_errors=True)
                unfinished = final.with_name(f"{final.name}.tmp{uuid.uuid4().hex[:8]}")
                try:
                    _write(unfinished, final.name, source, tokenizer, val_fraction, groups, parts, empty[-1])
                    if corpus_fingerprint(source, tokenizer, val_fraction) != final.name:
                        what = "its files changed while they were read, so that part of their text may be missing"
                        raise DataError(f"source {source.name}", what, "start again when they are complete")
                    if corpus := open_corpus(unfinished, final.name):
                        corpus_report(corpus)  # stores what it measures, so that no start has to
                    os.rename(unfinished, final)
                finally:
                    shutil.rmtree(unfinished, ignore_errors=True)
    return "tokenised"


def _with_progress(name: str, parts: Sequence[Part], groups: Iterator[Indexed]) -> Iterator[Indexed]:
    total = sum(part.bytes for part in parts)
    width = total / max(sum(part.tokens for part in parts), 1)
    with contextlib.closing(Progress(f"looking up documents of {name}", total)) as progress:
        for group in groups:
            tokens = int(group.lengths.sum())
            progress.made(int(tokens * width), len(group.lengths), tokens)
            yield group


@contextlib.contextmanager
def _locked(path: Path, message: str) -> Iterator[None]:
    """Holds a lock, which the system releases if the process dies; logs the message if it has to wait."""
    lock = filelock.FileLock(path)
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        logger.warning("%s; waiting for it", message)
        lock.acquire()
    with contextlib.ExitStack() as stack:
        stack.callback(lock.release)
        yield


def _cores_name() -> str:
    """Names this host and the cores that this process may use."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    return hashlib.blake2b(f"{socket.gethostname()} {cores}".encode(), digest_size=4).hexdigest()


def storage_error(root: Path, error: OSError) -> DataError:
    """What to tell of an error of the file system while something is made in `root`, the directory of all caches."""
    where = "" if error.filename is None else os.fsdecode(error.filename)
    if where and not (Path(where).is_relative_to(root) or root.is_relative_to(where)):
        return DataError(where, f"cannot be read ({error.strerror or error})", "correct it, or name another file")
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    return DataError(
        f"cache directory {root}",
        "no space left" if full else f"cannot be written ({error.strerror or error})",
        "free some space, or set config.data.cache_dir or $NSA_JAX_CACHE to another place",
    )
