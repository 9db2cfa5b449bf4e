"""A tokenised corpus on disk as it is read: its splits, and what is compared with checksums when it is opened.

cache.py says which files it consists of.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from nsa_jax.data.errors import DataError
from nsa_jax.data.token_file import CHUNK, TokenFile, TokenStream, checksums_path
from nsa_jax.data.token_view import Part, PartedTokens, TokenView

_VERIFIED_CHUNKS = 4096  # of 16 KiB; larger files are only sampled when they are opened
_SAMPLED_CHUNKS = 64  # few, because each may cost a disk seek
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

    def __init__(self, directory: Path, name: str, meta: dict[str, Any]):
        checked = "checksum" in meta
        self.name = name
        self.stats = SplitStats(**meta["splits"][name])
        self._offsets = TokenFile(directory / f"{name}.offsets", np.int64, checked=checked)
        self._hashes = TokenFile(directory / f"{name}.hashes", np.uint64, checked=checked)
        self.tokens: TokenStream
        if "parts" in meta:
            self._payload = TokenFile(directory / f"{name}.starts", np.int64, checked=checked)
            parts = PartedTokens([Part(**part) for part in meta["parts"]])
            ids = {"eos_id": meta["eos_id"], "vocab_size": meta["vocab_size"]}
            self.tokens = TokenView(parts, self._payload, self._offsets, **ids)
        else:
            self.tokens = self._payload = TokenFile(directory / f"{name}.tokens", meta["dtype"], checked=checked)

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
        for file in (self._payload, self._offsets, self._hashes):
            chunks = -(-len(file) * file.dtype.itemsize // CHUNK)
            whole = chunks <= _VERIFIED_CHUNKS
            file.verify(range(chunks) if whole else np.linspace(0, chunks - 1, _SAMPLED_CHUNKS).astype(int).tolist())


@dataclasses.dataclass(frozen=True)
class Corpus:
    """A finished cache directory.

    Attributes:
      directory: where it is.
      fingerprint: of source, tokenizer and split: the name in the cache.
      content: of the documents of both splits, wherever the source's files lie: what a data position belongs to.
      train: documents to train on.
      validation: documents held out.
      apart: the documents held out are those of another corpus.
      empty_documents: documents without text, which were left out; None if an earlier version did not count them.
    """

    directory: Path
    fingerprint: str
    content: str
    train: Split
    validation: Split
    apart: bool = False
    empty_documents: int | None = None

    def with_held_out(self, other: Corpus) -> Corpus:
        """These training documents, and the held-out documents of another corpus."""
        fingerprint = _digest(f"{self.fingerprint} {other.fingerprint}")
        content = _digest(f"{self.content} {other.content}")
        return dataclasses.replace(
            self, fingerprint=fingerprint, content=content, validation=other.validation, apart=True
        )


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()


def meta_checksum(meta: dict[str, Any]) -> int:
    """Checksum of all other fields of meta.json."""
    rest = {name: value for name, value in meta.items() if name != "checksum"}
    return zlib.crc32(json.dumps(rest, sort_keys=True).encode())


def open_corpus(directory: Path, fingerprint: str = "") -> Corpus | None:
    """Opens a finished corpus; None if there is none or if it is damaged.

    File sizes, meta.json and the files of checksums are compared, and a sample of the data (see `Split.verify_sample`).
    A corpus of an older version has no checksums; it is used with a warning.

    Args:
      directory: of the corpus.
      fingerprint: of the corpus; empty: the directory's name.
    """
    try:
        meta = json.loads((directory / "meta.json").read_bytes())
        checked = set(meta) != _OLD_META
        if meta["fingerprint"] != (fingerprint or directory.name) or (
            checked and meta["checksum"] != meta_checksum(meta)
        ):
            return None
        for name, size in meta["files"].items():
            if (directory / name).stat().st_size != size:
                return None
        for name, expected in meta["checksums"].items() if checked else ():
            if zlib.crc32(checksums_path(directory / name).read_bytes()) != expected:
                return None
        for part in meta.get("parts", []):
            if Part(**part) != Part(**part).stamped():
                return None
        splits = [Split(directory, name, meta) for name in SPLITS]
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
    content = meta["fingerprint"]
    if checked:
        content = _digest(json.dumps([meta["checksums"], meta["splits"], meta["dtype"]], sort_keys=True))
    empty = meta.get("empty_documents")
    return Corpus(directory, meta["fingerprint"], content, splits[0], splits[1], empty_documents=empty)
