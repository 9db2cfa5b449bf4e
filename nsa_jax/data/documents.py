"""What all sources of documents share: their protocol, hashes, and the longest document."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from typing import Any, Protocol

# Longer documents are cut at a line end. This bounds memory and allows one big file to be split into training and
# validation.
MAX_DOCUMENT_CHARS = 1 << 20


class Source(Protocol):
    """Documents of one corpus."""

    name: str  # for progress bars and messages

    def fingerprint(self) -> str:
        """Hash of everything that decides the documents and their order."""

    def documents(self) -> Iterator[str]:
        """Yields every document once, always in the same order."""

    def size_bytes(self) -> int | None:
        """Bytes of text to expect, for the progress bar; None if unknown."""


def digest(*parts: Any) -> str:
    """Hash of JSON-serialisable values."""
    return hashlib.blake2b(json.dumps(parts, sort_keys=True, default=str).encode(), digest_size=16).hexdigest()


def as_tuple(value: Any) -> tuple[str, ...]:
    """A tuple of strings from a config file's tuple or from a flag's comma-separated string."""
    if isinstance(value, (str, os.PathLike)):
        value = [v for v in os.fspath(value).split(",") if v]
    return tuple(os.fspath(v) for v in value)


def piece_length(text: str) -> int:
    """The length of the first piece of a long document: up to its last line end, or the limit if there is none."""
    end = text.rfind("\n", 0, MAX_DOCUMENT_CHARS)
    return end + 1 if end > 0 else MAX_DOCUMENT_CHARS


def bounded(document: str) -> Iterator[str]:
    """A document, in pieces of at most `MAX_DOCUMENT_CHARS` that are cut at line ends if it is longer."""
    while len(document) > MAX_DOCUMENT_CHARS:
        end = piece_length(document)
        yield document[:end]
        document = document[end:]
    yield document
