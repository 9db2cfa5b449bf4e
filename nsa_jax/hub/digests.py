"""Digests of a checkpoint's files: SHA256SUMS in the step directory, which `sha256sum -c SHA256SUMS` checks, too.

Digests are of files, not of arrays: they cover the data position and Orbax's metadata as well as the weights, they need
no device, and a step can be checked without the config that wrote it. They are taken in the background after the files
are written, which costs one read of what the page cache still holds (1.4 GiB/s per core). Damage that happens before
the files are written, in device or host memory, is not seen.
"""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SUMS = "SHA256SUMS"

# Hashing releases the GIL; more threads would take cores from the input pipeline.
_THREADS = 4


class Damage(ValueError):
    """A file of a checkpoint is not what was written; the message names the file and what is wrong with it."""


def file_digest(path: Path) -> str:
    """SHA-256 of a file in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _last_line(lines: bytes) -> bytes:
    """A comment to `sha256sum`; without it a file cut off at the end of a line would look whole."""
    return f"# {hashlib.sha256(lines).hexdigest()}  of the lines above\n".encode()


def write(directory: Path) -> None:
    """Writes SHA256SUMS of all files below `directory`."""
    files = sorted(path for path in directory.rglob("*") if path.is_file() and path != directory / SUMS)
    with ThreadPoolExecutor(_THREADS) as pool:
        found = pool.map(file_digest, files)
    lines = "".join(
        f"{digest}  {path.relative_to(directory).as_posix()}\n" for digest, path in zip(found, files, strict=True)
    ).encode()
    (directory / SUMS).write_bytes(lines + _last_line(lines))


def read(directory: Path) -> dict[str, str]:
    """Digest of every file by its path below `directory`.

    Raises:
      Damage: SHA256SUMS is missing or is not what was written.
    """
    try:
        content = (directory / SUMS).read_bytes()
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        raise Damage(f"{SUMS}: is missing") from None
    end = content.rfind(b"\n", 0, -1) + 1
    lines = content[:end]
    if content[end:] != _last_line(lines):
        raise Damage(f"{SUMS}: its last line is not the digest of the lines above")
    return {path: digest for digest, path in (line.split("  ", 1) for line in lines.decode().splitlines())}


def check(directory: Path, path: str, digest: str) -> None:
    """Compares one file below `directory` with its digest.

    Raises:
      Damage: it is missing or differs.
      OSError: it cannot be read, which says nothing about its content.
    """
    try:
        found = file_digest(directory / path)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        raise Damage(f"{path}: is missing") from None
    if found != digest:
        size = (directory / path).stat().st_size
        raise Damage(f"{path}: its {size:,} bytes are not those that were written (SHA-256 differs from {SUMS})")


def verify(directory: Path, index: int = 0, count: int = 1) -> None:
    """Reads all files of `directory` and compares them with SHA256SUMS.

    Args:
      directory: that `write` was called for.
      index: of the share that this process reads.
      count: of shares.

    Raises:
      Damage: a file of this share is missing or differs, or SHA256SUMS itself does.
      OSError: a file cannot be read, which says nothing about its content.
    """
    mine = sorted(read(directory).items())[index::count]
    with ThreadPoolExecutor(_THREADS) as pool:
        for _ in pool.map(lambda item: check(directory, *item), mine):
            pass
