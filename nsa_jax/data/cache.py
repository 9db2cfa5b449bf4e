"""Tokenised corpora on disk: built once per (source, tokenizer, split), and compared with checksums when read.

A finished corpus is a directory <root>/<fingerprint>/ with, for each split, `<split>.tokens` (the token stream: every
document followed by EOS), `<split>.offsets` (int64, stream position of each document, and the stream's length) and
`<split>.hashes` (uint64, content hash of each document), their checksums (see token_file.py), the tokenizer, and
`meta.json`, which holds checksums of itself and of the files of checksums. A corpus is built under another name and
renamed when it is complete. The builder holds a lock, which the system releases when the process dies. A process that
is killed therefore leaves nothing that could be mistaken for a corpus, and processes that start together build it once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import json
import logging
import os
import shutil
import uuid
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import filelock
import numpy as np
import rich.console
import rich.progress

from nsa_jax.data.errors import DataError
from nsa_jax.data.sources import Source
from nsa_jax.data.token_file import CHUNK, ChunkWriter, TokenFile, checksums_path
from nsa_jax.data.tokenizers import Tokenizer

_FORMAT = 1  # part of the fingerprint: raise it when the files' meaning changes
_BATCH_CHARS = 4 << 20  # text that is tokenised at once
_VERIFIED_CHUNKS = 4096  # of 16 KiB; larger files are only sampled when they are opened
_SAMPLED_CHUNKS = 64  # few, because each may cost a disk seek
_KINDS = ("tokens", "offsets", "hashes")
SPLITS = ("train", "validation")
# The fields of meta.json in versions without checksums.
_OLD_META = {"fingerprint", "source", "tokenizer", "val_fraction", "dtype", "splits", "files"}

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class SplitStats:
    """Size of one split.

    Attributes:
      documents: number of documents.
      tokens: number of tokens, with one EOS per document.
      bytes: bytes of UTF-8 text.
    """

    documents: int
    tokens: int
    bytes: int


class Split:
    """One split of a corpus.

    Attributes:
      stats: its size.
      tokens: the token stream.
    """

    def __init__(self, directory: Path, name: str, dtype: Any, stats: SplitStats, *, checked: bool):
        self.name = name
        self.stats = stats
        self.tokens = TokenFile(directory / f"{name}.tokens", dtype, checked=checked)
        self._offsets = TokenFile(directory / f"{name}.offsets", np.int64, checked=checked)
        self._hashes = TokenFile(directory / f"{name}.hashes", np.uint64, checked=checked)

    @property
    def offsets(self) -> np.ndarray:
        """int64 [documents + 1], stream position of the first token of each document; last: the stream's length."""
        return self._offsets.array

    @property
    def hashes(self) -> np.ndarray:
        """uint64 [documents], hash of each document's content."""
        return self._hashes.array

    def document(self, index: int) -> np.ndarray:
        """Token ids of one document, without its EOS."""
        start, end = self.offsets[index : index + 2]
        return self.tokens[start : end - 1]

    def verify_sample(self) -> None:
        """Compares files with their checksums: all chunks of small files, evenly spaced chunks of large ones.

        Raises:
          DataError: a file does not hold what was written.
        """
        for file in (self.tokens, self._offsets, self._hashes):
            chunks = -(-len(file) * file.dtype.itemsize // CHUNK)
            whole = chunks <= _VERIFIED_CHUNKS
            file.verify(range(chunks) if whole else np.linspace(0, chunks - 1, _SAMPLED_CHUNKS).astype(int).tolist())


@dataclasses.dataclass(frozen=True)
class Corpus:
    """A finished cache directory.

    Attributes:
      directory: where it is.
      fingerprint: of source, tokenizer and split.
      train: documents to train on.
      validation: documents held out.
    """

    directory: Path
    fingerprint: str
    train: Split
    validation: Split


def cache_root(cache_dir: str = "") -> Path:
    """Where corpora are kept: `cache_dir`, else $NSA_JAX_CACHE, else ~/.cache/nsa_jax."""
    return Path(cache_dir or os.environ.get("NSA_JAX_CACHE") or "~/.cache/nsa_jax").expanduser()


def content_hash(raw: bytes) -> int:
    """64-bit hash of a document without surrounding white space."""
    return int.from_bytes(hashlib.blake2b(raw.strip(), digest_size=8).digest(), "little")


def is_validation(document_hash: int, val_fraction: float) -> bool:
    """Whether a document is held out. Only its content decides, so duplicates fall into the same split."""
    return document_hash < int(val_fraction * 2**64)


def corpus_fingerprint(source: Source, tokenizer: Tokenizer, val_fraction: float) -> str:
    """Hash of everything that decides what is in the cache."""
    parts = [_FORMAT, source.fingerprint(), tokenizer.fingerprint, float(val_fraction)]
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=12).hexdigest()


def _meta_checksum(meta: dict[str, Any]) -> int:
    """Checksum of all other fields of meta.json."""
    rest = {name: value for name, value in meta.items() if name != "checksum"}
    return zlib.crc32(json.dumps(rest, sort_keys=True).encode())


def open_corpus(directory: Path) -> Corpus | None:
    """Opens a finished corpus; None if there is none or if it is damaged.

    File sizes, meta.json and the files of checksums are compared, and a sample of the data (see `Split.verify_sample`).
    A corpus of an older version has no checksums; it is used with a warning.
    """
    try:
        meta = json.loads((directory / "meta.json").read_bytes())
        checked = set(meta) != _OLD_META
        if meta["fingerprint"] != directory.name or (checked and meta["checksum"] != _meta_checksum(meta)):
            return None
        for name, size in meta["files"].items():
            if (directory / name).stat().st_size != size:
                return None
        for name, expected in meta["checksums"].items() if checked else ():
            if zlib.crc32(checksums_path(directory / name).read_bytes()) != expected:
                return None
        splits = [
            Split(directory, name, meta["dtype"], SplitStats(**meta["splits"][name]), checked=checked)
            for name in SPLITS
        ]
        for split in splits:
            split.verify_sample()
    except DataError as error:
        logger.warning("%s: %s", error.where, error.what)
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    if not checked:
        logger.warning(
            "%s was made by a version that kept no checksums: if it is damaged, that cannot be noticed. "
            "Delete it to have it built again with them",
            directory,
        )
    return Corpus(directory, meta["fingerprint"], *splits)


class _SplitWriter:
    def __init__(self, directory: Path, name: str, stack: contextlib.ExitStack):
        self.files = {f"{name}.{kind}": ChunkWriter(directory / f"{name}.{kind}") for kind in _KINDS}
        for file in self.files.values():
            stack.callback(file.close)
        self._tokens, self._offsets, self._hashes = self.files.values()
        self._offsets.write(np.int64(0).tobytes())
        self.documents = self.tokens = self.bytes = 0

    def append(self, encoded: list[np.ndarray], hashes: list[int], num_bytes: int, eos: np.ndarray) -> None:
        lengths = np.array([len(e) + 1 for e in encoded], np.int64)
        self._tokens.write(np.concatenate([part for e in encoded for part in (e, eos)]).tobytes())
        self._offsets.write((self.tokens + np.cumsum(lengths)).tobytes())
        self._hashes.write(np.array(hashes, np.uint64).tobytes())
        self.documents += len(encoded)
        self.tokens += int(lengths.sum())
        self.bytes += num_bytes

    def finish(self) -> None:
        for file in self.files.values():
            file.finish()


def _batches(source: Source) -> Iterator[list[tuple[str, int, int]]]:
    """Groups of (text, hash, bytes) of about `_BATCH_CHARS` characters; documents without text are left out."""
    group: list[tuple[str, int, int]] = []
    size = 0
    for text in source.documents():
        if not text or text.isspace():
            continue
        raw = text.encode("utf-8", "replace")
        group.append((text, content_hash(raw), len(raw)))
        size += len(text)
        if size >= _BATCH_CHARS:
            yield group
            group, size = [], 0
    if group:
        yield group


@contextlib.contextmanager
def _progress(source: Source) -> Iterator[Any]:
    """Yields a function to call with the bytes and documents done. It draws a progress bar, in terminals only."""
    console = rich.console.Console(stderr=True)
    with rich.progress.Progress(
        rich.progress.TextColumn("{task.description}"),
        rich.progress.BarColumn(),
        rich.progress.DownloadColumn(),
        rich.progress.TransferSpeedColumn(),
        rich.progress.TextColumn("{task.fields[documents]:,} documents"),
        rich.progress.TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    ) as bar:
        task = bar.add_task(f"Tokenising {source.name}", total=source.size_bytes(), documents=0)

        def advance(num_bytes: int, documents: int) -> None:
            bar.update(task, advance=num_bytes, documents=bar.tasks[task].fields["documents"] + documents)

        yield advance


def _build(directory: Path, fingerprint: str, source: Source, tokenizer: Tokenizer, val_fraction: float) -> None:
    """Writes a complete corpus into `directory`."""
    directory.mkdir()
    eos = np.array([tokenizer.eos_id], tokenizer.dtype)
    with contextlib.ExitStack() as stack:
        writers = {name: _SplitWriter(directory, name, stack) for name in SPLITS}
        advance = stack.enter_context(_progress(source))
        for group in _batches(source):
            encoded = tokenizer.encode_batch([text for text, _, _ in group])
            sides: dict[str, list[int]] = {name: [] for name in SPLITS}
            for i, (_, document_hash, _) in enumerate(group):
                sides["validation" if is_validation(document_hash, val_fraction) else "train"].append(i)
            for name, members in sides.items():
                if members:
                    writers[name].append(
                        [encoded[i] for i in members],
                        [group[i][1] for i in members],
                        sum(group[i][2] for i in members),
                        eos,
                    )
            advance(sum(num_bytes for _, _, num_bytes in group), len(group))
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
        "splits": {n: {"documents": w.documents, "tokens": w.tokens, "bytes": w.bytes} for n, w in writers.items()},
        "files": {p.name: p.stat().st_size for p in sorted(directory.iterdir()) if p.is_file()},
        "checksums": {name: zlib.crc32(checksums_path(directory / name).read_bytes()) for name in names},
    }
    meta["checksum"] = _meta_checksum(meta)
    (directory / "meta.json").write_text(json.dumps(meta, indent=2) + "\n")


def load_corpus(source: Source, tokenizer: Tokenizer, *, val_fraction: float, root: Path) -> Corpus:
    """The tokenised corpus, from the cache or built now.

    Args:
      source: where documents come from.
      tokenizer: turns them into tokens.
      val_fraction: share of documents held out.
      root: directory of all caches.

    Returns:
      The corpus; of large token files only a sample has been read.

    Raises:
      DataError: no text in the source, an unreadable file, no room or no permission under `root`.
    """
    fingerprint = corpus_fingerprint(source, tokenizer, val_fraction)
    final = root / fingerprint
    corpus = open_corpus(final)
    if corpus is not None:
        return corpus
    try:
        root.mkdir(parents=True, exist_ok=True)
        lock = filelock.FileLock(root / f"{fingerprint}.lock")
        try:
            lock.acquire(timeout=0)
        except filelock.Timeout:
            logger.warning("another process is building %s; waiting for it", final)
            lock.acquire()
    except OSError as error:
        raise _storage_error(root, error) from error
    with contextlib.ExitStack() as stack:
        stack.callback(lock.release)
        corpus = open_corpus(final)
        if corpus is not None:
            return corpus
        for leftover in root.glob(f"{fingerprint}.tmp*"):  # of a killed process: we hold the lock
            shutil.rmtree(leftover, ignore_errors=True)
        unfinished = root / f"{fingerprint}.tmp{uuid.uuid4().hex[:8]}"
        try:
            if os.path.lexists(final):
                logger.warning("%s is damaged; building it again", final)
                shutil.rmtree(final) if final.is_dir() and not final.is_symlink() else final.unlink()
            _build(unfinished, fingerprint, source, tokenizer, val_fraction)
            os.rename(unfinished, final)
        except OSError as error:
            raise _storage_error(root, error) from error
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    corpus = open_corpus(final)
    if corpus is None:
        raise DataError(str(final), "what was just written cannot be read back", "check the disk")
    train, held_out = corpus.train.stats, corpus.validation.stats
    logger.info(
        "tokenised %s: %s training documents (%s tokens), %s held out (%s tokens), in %s",
        *(source.name, f"{train.documents:,}", f"{train.tokens:,}"),
        *(f"{held_out.documents:,}", f"{held_out.tokens:,}", final),
    )
    return corpus


def _storage_error(root: Path, error: OSError) -> DataError:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    return DataError(
        f"cache directory {root}",
        "no space left" if full else f"cannot be written ({error.strerror or error})",
        "free some space, or set config.data.cache_dir or $NSA_JAX_CACHE to another place",
    )
