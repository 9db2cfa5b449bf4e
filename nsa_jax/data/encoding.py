"""Documents as tokens: what a tokenising process makes of a group of documents, and the file that holds it.

This module and what it imports load neither JAX nor grain, because every tokenising process imports it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import uuid
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from nsa_jax.data.tokenizers import Tokenizer

_BATCH_BYTES = 1 << 20  # text that is tokenised at once; the tokenizer needs a hundred times as much memory


def content_hash(raw: bytes) -> int:
    """64-bit hash of a document without surrounding white space."""
    return int.from_bytes(hashlib.blake2b(raw.strip(), digest_size=8).digest(), "little")


class GroupedText(str):
    """A document that is held out together with all others of its group.

    Attributes:
      group: its name.
    """

    group: str

    def __new__(cls, text: str, group: str):
        made = super().__new__(cls, text)
        made.group = group
        return made


class GroupedBytes(bytes):
    """The UTF-8 of a `GroupedText`."""

    group = ""


def to_bytes(document: str) -> bytes:
    """A document's UTF-8, which keeps its group."""
    raw = document.encode("utf-8", "replace")
    if isinstance(document, GroupedText):
        raw = GroupedBytes(raw)
        raw.group = document.group
    return raw


def document_hash(raw: bytes) -> int:
    """The hash by which a document is held out: `content_hash`, whose upper half is the group's if it has one."""
    found = content_hash(raw)
    if isinstance(raw, GroupedBytes):
        return content_hash(raw.group.encode()) >> 32 << 32 | found & 0xFFFFFFFF
    return found


@dataclasses.dataclass(frozen=True)
class Encoded:
    """Tokens of consecutive documents.

    Attributes:
      tokens: [n] in the tokenizer's dtype, every document followed by EOS.
      lengths: int64 [documents], tokens of each document, its EOS included.
      hashes: uint64 [documents], `document_hash` of each.
      sizes: int64 [documents], bytes of UTF-8 of each.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    hashes: np.ndarray
    sizes: np.ndarray

    def payload(self, members: np.ndarray) -> np.ndarray:
        """What is kept of those documents for which `members`, bool [documents], is true."""
        return self.tokens[np.repeat(members, self.lengths)]

    def save(self, path: Path) -> None:
        """Writes a file that appears under its name when it is complete and on the disk."""
        unfinished = path.with_name(f"{path.name}.tmp{uuid.uuid4().hex[:8]}")
        try:
            with open(unfinished, "wb") as file:
                np.savez(file, **vars(self))
                file.flush()
                os.fsync(file.fileno())
            os.rename(unfinished, path)
        finally:
            unfinished.unlink(missing_ok=True)

    @staticmethod
    def load(path: Path) -> Encoded:
        """Reads what `save` wrote, and compares it with the checksums in the file.

        Raises:
          ValueError: the file is damaged.
        """
        try:
            with np.load(path, allow_pickle=False) as arrays:
                return Encoded(**arrays)
        except (zipfile.BadZipFile, zlib.error, EOFError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is damaged ({error})") from error


def encode(documents: Sequence[bytes], tokenizer: Tokenizer) -> Encoded:
    """Tokenises documents.

    Args:
      documents: UTF-8.
      tokenizer: turns them into tokens.

    Returns:
      Their tokens, in the same order.
    """
    eos = np.array([tokenizer.eos_id], tokenizer.dtype)
    parts: list[np.ndarray] = []
    lengths: list[int] = []
    first = size = 0
    for last, raw in enumerate(documents, 1):
        size += len(raw)
        if size >= _BATCH_BYTES or last == len(documents):
            for ids in tokenizer.encode_documents([raw.decode("utf-8") for raw in documents[first:last]]):
                parts += (ids, eos)
                lengths.append(len(ids) + 1)
            first, size = last, 0
    return Encoded(
        np.concatenate(parts),
        np.array(lengths, np.int64),
        np.array([document_hash(raw) for raw in documents], np.uint64),
        np.array([len(raw) for raw in documents], np.int64),
    )
