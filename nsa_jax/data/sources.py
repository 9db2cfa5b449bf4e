"""Sources of documents by name: the standard library's source text, text files and trees of files, which are here,
and those of huggingface.py and token_sources.py.

A source yields documents (str) and has a fingerprint that changes whenever the documents may have changed. Synthetic
rows have no documents; they are in synthetic.py and long_tasks.py.
"""

from __future__ import annotations

import glob
import gzip
import io
import logging
import os
import sys
import sysconfig
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import zstandard
from ml_collections import ConfigDict

from nsa_jax import object_store
from nsa_jax.data import documents
from nsa_jax.data.documents import Source, as_tuple, bounded, digest, piece_length
from nsa_jax.data.encoding import GroupedText
from nsa_jax.data.errors import DataError
from nsa_jax.data.huggingface import HuggingFaceSource
from nsa_jax.data.token_sources import HuggingFaceTokens, TokenFiles

logger = logging.getLogger(__name__)

_READ_BYTES = 1 << 20
_ZSTD_WINDOW = 1 << 31  # the largest of the format; a frame takes what it needs


def make_source(config: ConfigDict) -> Source:
    """The source that `config.data` names.

    Args:
      config: the training config.

    Returns:
      A source of documents.

    Raises:
      DataError: unknown source, or one that needs a field that is not set.
    """
    data = config.data
    source: Source
    if data.source == "stdlib":
        source = StdlibSource()
    elif data.source == "text":
        source = TextSource(data.files, separator=data.text_separator)
        _refuse_records(source)
    elif data.source == "trees":
        source = TreeSource(data.files, least=data.tree_characters)
    elif data.source == "hf":
        source = HuggingFaceSource(
            path=data.hf_path,
            name=data.hf_name,
            data_files=data.hf_data_files,
            split=data.hf_split,
            text_field=data.hf_tokens_field or data.hf_text_field,
            streaming=data.hf_streaming,
        )
        if data.hf_tokens_field:
            source = HuggingFaceTokens(source)
    elif data.source == "tokens":
        source = TokenFiles(TextSource(data.files))
    else:
        what, fix = "no such source of documents", "use stdlib, text, trees, tokens, hf, task or synthetic"
        raise DataError(f"config.data.source={data.source!r}", what, fix)
    if data.max_documents:
        source = LimitedSource(source, data.max_documents)
    return source


_RECORDS = {".json": "json", ".jsonl": "json", ".ndjson": "json", ".parquet": "parquet"}


def _refuse_records(source: TextSource) -> None:
    """Files of records are no text: a model would learn field names and braces."""
    for pattern, files in source.matches.items():
        kinds = {_RECORDS.get(os.path.splitext(file.removesuffix(".gz").removesuffix(".zst"))[1]) for file in files}
        if kinds and None not in kinds:
            kind = min(filter(None, kinds))
            what = f"names {kind} files, which source text would read as they are, field names and all"
            fix = f"set source='hf', hf_path='{kind}', hf_data_files=({pattern!r},) and hf_text_field"
            raise DataError(f"config.data.files entry {pattern!r}", what, fix)


def has_held_out(config: ConfigDict) -> bool:
    """Whether the source of `config.data` names held-out documents of its own."""
    data = config.data
    return bool(data.val_files if data.source in ("text", "tokens") else data.source == "hf" and data.hf_val_split)


def held_out_files(data: ConfigDict) -> Sequence[str]:
    """The files that `data.val_files` names.

    Raises:
      DataError: a name or glob matches none.
    """
    try:
        return TextSource(data.val_files).files
    except DataError as error:
        raise _of_val_files(error) from error


def _of_val_files(error: DataError) -> DataError:
    return DataError(error.where.replace("config.data.files", "config.data.val_files"), error.what, error.fix)


def make_held_out_source(config: ConfigDict) -> Source:
    """The source of the held-out documents that `config.data` names; see `has_held_out`.

    Raises:
      DataError: as `make_source`.
    """
    data, alone = config.data, config.copy_and_resolve_references()
    with alone.unlocked():
        alone.data.update(files=data.val_files, hf_split=data.hf_val_split, max_documents=0)
    try:
        held_out = make_source(alone)
    except DataError as error:
        raise _of_val_files(error) from error
    if data.source in ("text", "tokens"):
        trained = {os.path.realpath(name) for name in TextSource(data.files).files}
        if both := [name for name in held_out_files(data) if os.path.realpath(name) in trained]:
            fix = "take it out of config.data.files, whose globs may match it"
            raise DataError(f"config.data.val_files entry {both[0]!r}", "is also trained on", fix)
    return held_out


class LimitedSource:
    """The first `limit` documents of another source."""

    def __init__(self, source: Source, limit: int):
        self.name = source.name
        self.source = source
        self.limit = limit

    def fingerprint(self) -> str:
        return digest(self.source.fingerprint(), self.limit)

    def documents(self) -> Iterator[str]:
        for _, text in zip(range(self.limit), self.source.documents(), strict=False):
            yield text

    def size_bytes(self) -> int | None:
        return None


class StdlibSource:
    """The .py files of the running Python's standard library: about 30 MB of real text on every machine.

    Files that are not UTF-8 (a handful of encoding tests), installed packages, and the generated build description,
    which differs between machines, are left out.

    Args:
      root: directory to read; default: the standard library of this interpreter.
    """

    name = "stdlib"

    def __init__(self, root: str | os.PathLike | None = None):
        self.root = Path(root or sysconfig.get_paths()["stdlib"])
        self._files: list[tuple[str, int]] | None = None

    def files(self) -> list[tuple[str, int]]:
        """Relative path and size of every file, in the order in which they are read."""
        if self._files is None:
            found = []
            for directory, subdirectories, names in os.walk(self.root):
                subdirectories[:] = sorted(
                    s for s in subdirectories if s not in ("site-packages", "dist-packages", "__pycache__")
                )
                for name in sorted(names):
                    if name.endswith(".py") and not name.startswith("_sysconfigdata"):
                        path = Path(directory, name)
                        found.append((path.relative_to(self.root).as_posix(), path.stat().st_size))
            self._files = found
        return self._files

    def fingerprint(self) -> str:
        return digest(self.name, sys.version_info[:3], self.files())

    def documents(self) -> Iterator[str]:
        for relative, _ in self.files():
            try:
                yield (self.root / relative).read_bytes().decode("utf-8-sig")
            except UnicodeDecodeError:
                continue

    def size_bytes(self) -> int | None:
        return sum(size for _, size in self.files())


class TreeSource:
    """Long documents: the text files of one package or documentation tree, joined in the order of their paths.

    Source code and manuals refer across their files, so the loss on later tokens depends on text that lies tens of
    thousands of tokens before. Each file comes after a line with its path. A tree of more than `MAX_DOCUMENT_CHARS` is
    several documents of about equal size, which are held out together or not at all.

    Args:
      folders: folders and globs of folders, each of which is a tree; empty: every package in this Python's
        site-packages and standard library.
      least: trees with fewer characters are left out.

    Raises:
      DataError: an entry matches no folder.
    """

    name = "trees"

    def __init__(self, folders: Any = (), *, least: int = 0):
        self.least = least
        self._trees: dict[str, list[Path]] | None = None
        self.folders: list[Path] = []
        for pattern in as_tuple(folders):
            matches = [Path(m) for m in sorted(glob.glob(os.path.expanduser(pattern))) if os.path.isdir(m)]
            if not matches:
                raise DataError(
                    f"config.data.files entry {pattern!r}",
                    f"matches no folder (from {os.getcwd()})",
                    "correct the path",
                )
            self.folders += matches
        if not self.folders:
            paths = sysconfig.get_paths()
            for root in (Path(paths["purelib"]), Path(paths["stdlib"])):
                packages = [path for path in sorted(root.iterdir()) if path.is_dir()]
                self.folders += [path for path in packages if path.name not in _NO_TREES]

    def trees(self) -> dict[str, list[Path]]:
        """The files of each tree in order, by the tree's path."""
        if self._trees is None:
            self._trees = {}
            for folder in dict.fromkeys(path.resolve() for path in self.folders):
                paths = [os.path.join(inside, name) for inside, _, names in os.walk(folder) for name in names]
                files = [path for path in paths if path.endswith(TREE_SUFFIXES) and os.path.isfile(path)]
                self._trees[str(folder)] = [Path(file) for file in sorted(files, key=lambda file: file.split(os.sep))]
        return self._trees

    def fingerprint(self) -> str:
        versions = {tree: [_file_version(str(file)) for file in files] for tree, files in self.trees().items()}
        return digest(self.name, versions, self.least)

    def documents(self) -> Iterator[str]:
        for tree, files in self.trees().items():
            text = "".join(_file_text(file, Path(tree).parent) for file in files)
            if len(text) < max(self.least, 1):
                continue
            pieces = -(-len(text) // documents.MAX_DOCUMENT_CHARS)
            ends = [text.rfind("\n", 0, len(text) * i // pieces) + 1 for i in range(1, pieces)]
            for start, end in zip([0, *ends], [*ends, len(text)], strict=True):
                yield GroupedText(text[start:end], Path(tree).name)

    def size_bytes(self) -> int | None:
        return sum(file.stat().st_size for files in self.trees().values() for file in files)


TREE_SUFFIXES = (".py", ".md", ".rst", ".txt")
_NO_TREES = ("site-packages", "dist-packages", "__pycache__")


def _file_text(path: Path, root: Path) -> str:
    """A file after a line with its path; nothing if it is empty or not UTF-8."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError:
        return ""
    except OSError as error:
        raise DataError(str(path), f"cannot be read ({error})", "correct it, or leave its folder out") from error
    return f"# {path.relative_to(root).as_posix()}\n{text.rstrip()}\n\n" if text.strip() else ""


class _ZstdReader(io.RawIOBase):
    """Decompresses all frames of a .zst file. Unlike `zstandard.stream_reader`, it detects a truncated frame."""

    def __init__(self, raw: BinaryIO):
        self._raw = raw
        # By default frames of `zstd --long=31` and `--ultra -22` on large files are refused, and dumps use these.
        self._decompressor = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW)
        self._frame: Any = None
        self._pending = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        while not self._pending:
            chunk = self._frame.unused_data if self._frame is not None and self._frame.eof else b""
            if self._frame is None or self._frame.eof:
                chunk = chunk or self._raw.read(_READ_BYTES)
                if not chunk:
                    return 0
                self._frame = self._decompressor.decompressobj()
            else:
                chunk = self._raw.read(_READ_BYTES)
                if not chunk:
                    raise EOFError("compressed file ended before the end of its last frame")
            self._pending = self._frame.decompress(chunk)
        count = min(len(buffer), len(self._pending))
        buffer[:count] = self._pending[:count]
        self._pending = self._pending[count:]
        return count

    def close(self) -> None:
        self._raw.close()
        super().close()


def _open_text(path: str) -> io.TextIOWrapper:
    remote = object_store.open_object(path) if object_store.scheme_of(path) else None
    if path.endswith(".gz"):
        binary: Any = gzip.open(remote or path, "rb")
    elif path.endswith(".zst"):
        binary = io.BufferedReader(_ZstdReader(remote or open(path, "rb")), _READ_BYTES)
    else:
        binary = remote or open(path, "rb")
    return io.TextIOWrapper(binary, encoding="utf-8-sig", newline="")  # programs of Windows begin files with a mark


class TextSource:
    """UTF-8 text files, plain, .gz or .zst; one document per file, or per piece between separators.

    Args:
      files: paths, addresses of objects (s3://, gs://), and globs of both (`**` allowed); a comma-separated string is
        accepted, as flags give it.
      separator: string between the documents of a file. If it is empty, a file is one document, which is cut at line
        ends into pieces of at most `MAX_DOCUMENT_CHARS`.

    Raises:
      DataError: there are no entries, or an entry matches no file.
    """

    name = "text"

    def __init__(self, files: Any, *, separator: str = ""):
        patterns = as_tuple(files)
        if not patterns:
            raise DataError("config.data.files=()", "the text source has no files", "list files or globs")
        self.separator = separator
        found: dict[str, object_store.Object | None] = {}  # in order, each file once
        self.matches: dict[str, list[str]] = {}
        for pattern in patterns:
            if object_store.scheme_of(pattern):
                entries = {entry.address: entry for entry in _objects(pattern)}
                self.matches[pattern] = list(entries)
                found |= entries
                continue
            expanded = os.path.expanduser(pattern)
            # A path may itself contain glob characters.
            if os.path.exists(expanded):
                matches = [expanded]
            else:
                matches = sorted(glob.glob(expanded, recursive=True))
            if dangling := next((m for m in matches if os.path.islink(m) and not os.path.exists(m)), None):
                what = f"is a link to {os.readlink(dangling)}, which does not exist"
                raise DataError(dangling, what, "restore the file, or delete the link")
            matches = [m for m in matches if os.path.isfile(m)]
            if not matches:
                what = "is a directory" if os.path.isdir(expanded) else f"matches no file (from {os.getcwd()})"
                fix = (
                    f"use {pattern.rstrip('/')}/**/*.txt or similar" if os.path.isdir(expanded) else "correct the path"
                )
                raise DataError(f"config.data.files entry {pattern!r}", what, fix)
            self.matches[pattern] = matches
            found |= dict.fromkeys(matches)
        self.files = list(found)
        self._objects = {name: entry for name, entry in found.items() if entry is not None}

    def fingerprint(self) -> str:
        return digest(self.name, [self._objects.get(f) or _file_version(f) for f in self.files], self.separator)

    def documents(self) -> Iterator[str]:
        self._separated = False
        for path in self.files:
            try:
                with _open_text(path) as stream:
                    yield from self._pieces(stream)
            except UnicodeDecodeError as error:
                bad = error.object[error.start : error.start + 4]
                raise DataError(
                    path, f"not UTF-8 text ({error.reason}: bytes {bad!r})", "convert it to UTF-8 or leave it out"
                ) from error
            except Exception as error:
                if path in self._objects and not isinstance(error, _DAMAGED):
                    told = object_store.explain(path, error)
                    raise DataError(path, told.what.removeprefix(f"{path}: "), told.fix) from error
                if not isinstance(error, (OSError, *_DAMAGED)):
                    raise
                raise DataError(path, f"cannot be read ({error})", "replace the file or leave it out") from error
        if self.separator and not self._separated:
            logger.warning(
                "config.data.text_separator=%r is in none of the %d files: each is one document. Shells write a line's "
                "end as $'\\n', and files of Windows have '\\r\\n'",
                *(self.separator, len(self.files)),
            )

    def _pieces(self, stream: io.TextIOWrapper) -> Iterator[str]:
        pending = ""
        while chunk := stream.read(_READ_BYTES):
            pending += chunk
            if self.separator:
                *whole, pending = pending.split(self.separator)
                self._separated |= bool(whole)
                for document in whole:
                    yield from bounded(document)
            while len(pending) > documents.MAX_DOCUMENT_CHARS + len(self.separator):
                end = piece_length(pending)
                yield pending[:end]
                pending = pending[end:]
        yield from bounded(pending)

    def size_bytes(self) -> int | None:
        if any(f.endswith((".gz", ".zst")) for f in self.files):
            return None
        return sum(self._objects[f].size if f in self._objects else os.path.getsize(f) for f in self.files)


_DAMAGED = (gzip.BadGzipFile, EOFError, zlib.error, zstandard.ZstdError)


def _file_version(path: str) -> tuple[str, int, int]:
    try:
        found = os.stat(path)
    except OSError as error:  # it was there when the source was made
        raise DataError(path, f"cannot be read ({error})", "restore it, or leave it out") from error
    return os.path.abspath(path), found.st_size, found.st_mtime_ns


def _objects(pattern: str) -> list[object_store.Object]:
    where = f"config.data.files entry {pattern!r}"
    try:
        found = object_store.matching(pattern)
    except object_store.StoreError as error:
        raise DataError(where, error.what, error.fix) from error
    if not found:
        raise DataError(where, "matches no object", f"correct the address; a folder is {pattern.rstrip('/')}/**")
    return found


def fineweb_edu(name: str = "sample-10BT", *, streaming: bool = True) -> dict[str, Any]:
    """The fields of `config.data` for FineWeb-Edu: `config.data.update(fineweb_edu())`.

    Args:
      name: subset: sample-10BT, sample-100BT, sample-350BT, or a crawl such as CC-MAIN-2024-10.
      streaming: whether to read over the network while training, without downloading and tokenising first.

    Returns:
      Field names and values.
    """
    return {
        "source": "hf",
        "hf_path": "HuggingFaceFW/fineweb-edu",
        "hf_name": name,
        "hf_split": "train",
        "hf_text_field": "text",
        "hf_streaming": streaming,
    }
