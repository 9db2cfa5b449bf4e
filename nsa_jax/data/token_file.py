"""Files of numbers with a checksum of every 16 KiB, which is verified at every read.

The checksums of `<file>` are in `<file>.crc32`, one uint32 per chunk. Every read is verified, not only the first, so
that data which is overwritten during a run is never trained on. Files are read instead of mapped, because the system
kills a process that reads a mapped file after it was truncated.
"""

from __future__ import annotations

import array
import io
import os
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from nsa_jax.data.errors import DataError

CHUNK = 16 << 10  # bytes per checksum; part of the file format
_PIECE = 64 << 20  # bytes that are read at once when a whole file is verified


def checksums_path(path: str | os.PathLike) -> Path:
    """Where the checksums of a file are kept."""
    return Path(f"{os.fspath(path)}.crc32")


class ChunkWriter:
    """Writes a file and its checksums. The checksums are of the data in memory, so they detect write errors."""

    def __init__(self, path: Path):
        self._path = path
        self._file = open(path, "wb", buffering=1 << 20)
        self._sums = array.array("I")
        self._rest = b""

    def write(self, data: bytes) -> None:
        """Appends bytes."""
        self._file.write(data)
        data = self._rest + data
        whole = len(data) // CHUNK * CHUNK
        self._sums.extend(zlib.crc32(data[start : start + CHUNK]) for start in range(0, whole, CHUNK))
        self._rest = data[whole:]

    def finish(self) -> None:
        """Writes the checksums and waits until both files are on the disk."""
        if self._rest:
            self._sums.append(zlib.crc32(self._rest))
            self._rest = b""
        with open(checksums_path(self._path), "wb") as sums:
            sums.write(np.array(self._sums, np.uint32).tobytes())
            for file in (self._file, sums):
                file.flush()
                os.fsync(file.fileno())

    def close(self) -> None:
        """Closes the file, finished or not."""
        self._file.close()


class TokenStream(Protocol):
    """The tokens of a split, wherever they lie. It can be pickled."""

    @property
    def array(self) -> np.ndarray:
        """All tokens."""

    def __len__(self) -> int: ...

    def __getitem__(self, part: slice) -> np.ndarray:
        """A copy of consecutive tokens."""


class TokenFile:
    """A file of numbers. It is pickled as its path, so that worker processes open it themselves.

    Args:
      path: of the file.
      dtype: of the numbers.
      checked: whether the file has checksums; caches of older versions have none.
    """

    def __init__(self, path: str | os.PathLike, dtype: Any, *, checked: bool):
        self.path = os.fspath(path)
        self.dtype = np.dtype(dtype)
        self.checked = checked
        self._bytes = os.path.getsize(self.path)
        self._files: dict[str, io.FileIO] = {}
        self._array: np.ndarray | None = None

    @property
    def array(self) -> np.ndarray:
        """The whole file as a memory map. The first use reads all of it and verifies its checksums."""
        if self._array is None:
            self.verify(range(-(-self._bytes // CHUNK)))
            # An empty file cannot be mapped.
            self._array = np.memmap(self._open(self.path), self.dtype, "r") if len(self) else np.empty(0, self.dtype)
        return self._array

    def __len__(self) -> int:
        return self._bytes // self.dtype.itemsize

    def __getitem__(self, part: slice) -> np.ndarray:
        """A copy of consecutive numbers.

        Raises:
          DataError: the file does not hold what was written.
        """
        first, last, _ = part.indices(len(self))
        start, stop = first * self.dtype.itemsize, max(first, last) * self.dtype.itemsize
        begin = start // CHUNK * CHUNK
        raw = self._read_chunks(start // CHUNK, -(-stop // CHUNK))
        return np.frombuffer(raw, self.dtype, count=(stop - start) // self.dtype.itemsize, offset=start - begin)

    def verify(self, chunks: Iterable[int]) -> None:
        """Compares chunks with their checksums. Files without checksums pass.

        Raises:
          DataError: the file does not hold what was written.
        """
        if not self.checked:
            return
        if isinstance(chunks, range):
            for start in range(chunks.start, chunks.stop, _PIECE // CHUNK):
                self._read_chunks(start, min(start + _PIECE // CHUNK, chunks.stop))
        else:
            for chunk in chunks:
                self._read_chunks(chunk, chunk + 1)

    def _read_chunks(self, first: int, last: int) -> bytes:
        """The bytes of chunks [first, last), compared with their checksums."""
        raw = self._read(self.path, first * CHUNK, min(last * CHUNK, self._bytes))
        if self.checked:
            sums = np.frombuffer(self._read(os.fspath(checksums_path(self.path)), 4 * first, 4 * last), np.uint32)
            view = memoryview(raw)
            for index, expected in enumerate(sums.tolist()):
                if zlib.crc32(view[index * CHUNK : (index + 1) * CHUNK]) != expected:
                    start = (first + index) * CHUNK
                    end = min(start + CHUNK, self._bytes)
                    raise self._damaged(f"bytes {start:,} to {end:,} are not what was written: the checksum differs")
        return raw

    def _open(self, path: str) -> io.FileIO:
        try:
            file = self._files.get(path)
            if file is None:
                file = self._files[path] = io.FileIO(path)
        except OSError as error:
            raise self._damaged(f"cannot be opened ({error.strerror or error})") from error
        return file

    def _read(self, path: str, start: int, stop: int) -> bytes:
        file, parts = self._open(path), []
        try:
            while start < stop:
                part = os.pread(file.fileno(), min(stop - start, _PIECE), start)
                if not part:
                    raise self._damaged(f"{Path(path).name} has become shorter than {stop:,} bytes")
                parts.append(part)
                start += len(part)
        except OSError as error:
            raise self._damaged(f"cannot be read ({error.strerror or error})") from error
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _damaged(self, what: str) -> DataError:
        directory = Path(self.path).parent
        return DataError(
            self.path, what, f"check the disk, and delete {directory}: it is built again at the next start"
        )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_files": {}, "_array": None}
