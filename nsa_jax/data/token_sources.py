"""Sources of documents that are tokens already: .bin files of nanoGPT, llm.c and Megatron, and Hugging Face data sets.

Their documents are looked up once: positions and content hashes go into the cache, and the tokens stay where they are.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from nsa_jax.data.errors import DataError
from nsa_jax.data.token_view import Part, PartedTokens, arrow_lists
from nsa_jax.data.tokenizers import Tokenizer
from nsa_jax.object_store import scheme_of

_CHUNK = 4 << 20  # tokens that are looked at in one go
_MEGATRON_MAGIC = b"MMIDIDX\x00\x00"
_MEGATRON_DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
_NPY_MAGIC = b"\x93NUMPY"
_HEADER_INTS = 256  # int32, of llm.c: magic, version, number of tokens
_HEADERS = {(20240520, 1): "uint16", (20240801, 7): "uint32"}  # of GPT-2 and of Llama 3

# Documents: position of the first token, and number of tokens.
Spans = tuple[np.ndarray, np.ndarray]


class TokenSource:
    """Documents of one corpus that are tokens already."""

    name = "tokens"

    def fingerprint(self) -> str:
        """Hash of everything that decides the tokens."""
        raise NotImplementedError

    def parts(self, tokenizer: Tokenizer) -> list[Part]:
        """The files, in order."""
        raise NotImplementedError

    def spans(self, parts: Sequence[Part], eos_id: int) -> Iterator[Spans]:
        """Where documents lie in the tokens of all parts, in order. An EOS at the end may be part of a document."""
        raise NotImplementedError

    def size_bytes(self) -> int | None:
        """Unknown."""
        return None

    def documents(self) -> Iterator[str]:
        """Raises DataError: there is no text."""
        raise DataError(
            f"config.data.source ({self.name})",
            "holds tokens, and a tokenizer cannot be trained on them",
            "name the tokenizer that made them: config.data.tokenizer='hf' and config.data.tokenizer_path",
        )


class TokenFiles(TokenSource):
    """.bin files of token ids.

    With an .idx file of Megatron beside it, a file has that index's documents. Other files follow each other in one
    stream, in which EOS divides the documents. They begin with a header of llm.c, or are bare arrays as nanoGPT writes
    them, of uint16 or, for a tokenizer of more than 65,536 ids, of uint32.

    Args:
      files: whose `files` and `fingerprint` to use.
    """

    def __init__(self, files: Any):
        if remote := [path for path in files.files if scheme_of(path)]:
            what = "lies in an object store, and token files are read in place"
            raise DataError(f"config.data.files: {remote[0]}", what, "copy it to a local disk")
        self._fingerprint = files.fingerprint
        self.files = [os.path.abspath(path) for path in files.files if not path.endswith(".idx")]
        if not self.files:
            raise DataError("config.data.files", "names .idx files only", "name the .bin files; .idx files are found")

    def fingerprint(self) -> str:
        indices = [os.stat(index) for path in self.files if (index := _index_path(path)).exists()]
        return _digest("tokens", self._fingerprint(), [(found.st_size, found.st_mtime_ns) for found in indices])

    def parts(self, tokenizer: Tokenizer) -> list[Part]:
        return [_array_part(path, tokenizer).stamped() for path in self.files]

    def spans(self, parts: Sequence[Part], eos_id: int) -> Iterator[Spans]:
        begin = 0
        for indexed, members in itertools.groupby(parts, lambda part: _index_path(part.path).exists()):
            for group in [[part] for part in members] if indexed else [list(members)]:
                found = _megatron_spans(group[0]) if indexed else _eos_spans(PartedTokens(group), eos_id)
                for starts, lengths in found:
                    yield starts + begin, lengths
                begin += sum(part.tokens for part in group)


def _index_path(path: str) -> Path:
    return Path(path).with_suffix(".idx")


def _digest(*parts: Any) -> str:
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()


def _array_part(path: str, tokenizer: Tokenizer) -> Part:
    """How the tokens of a .bin file are stored."""
    size = os.path.getsize(path)
    first, dtype, promised = 0, tokenizer.dtype.name, None
    with open(path, "rb") as file:
        if file.read(len(_NPY_MAGIC)) == _NPY_MAGIC:
            fix = f"write the numbers alone: array.astype(np.{dtype}).tofile('tokens.bin')"
            raise DataError(path, "is a .npy file, whose header would be read as tokens", fix)
    if _index_path(path).exists():
        dtype = _megatron_index(_index_path(path))[0]
    elif size >= 4 * _HEADER_INTS:
        magic, version, count = np.fromfile(path, "<i4", 3).tolist()
        if (magic, version) in _HEADERS:
            dtype, promised = _HEADERS[magic, version], count
            first = 4 * _HEADER_INTS // np.dtype(dtype).itemsize
    width = np.dtype(dtype).itemsize
    if size % width or (promised is not None and promised != size // width - first):
        what = f"{size:,} bytes are not " + (f"a header and {promised:,} tokens" if promised is not None else dtype)
        raise DataError(path, what, "copy the file again, or name the tokenizer that made it")
    if dtype == "uint16" and not first:
        _refuse_wider(path)
    return Part(path, size // width - first, dtype, first)


def _refuse_wider(path: str) -> None:
    """Ids below 65,536 as uint32 or int64 have a 0 in every second uint16, which would be taken for a token."""
    sample = np.fromfile(path, "<u2", 4096)
    if len(sample) >= 64 and sample[::2].any() and not sample[1::2].any():
        raise DataError(path, "every second uint16 is 0, as in a file of uint32 or int64", "write the tokens as uint16")


def _eos_spans(tokens: PartedTokens, eos_id: int) -> Iterator[Spans]:
    """Documents of a stream that EOS divides; without their EOS."""
    begin, found = 0, False
    for position in range(0, len(tokens), _CHUNK):
        ends = position + np.flatnonzero(tokens[position : position + _CHUNK] == eos_id)
        if len(ends):
            starts = np.append(begin, ends[:-1] + 1)
            yield starts, ends - starts
            begin, found = int(ends[-1]) + 1, True
    if not found and len(tokens):
        raise DataError(
            tokens.parts[0].path,
            f"holds no end-of-document token (id {eos_id}), so its documents cannot be told apart",
            "name the tokenizer that made it, and its end-of-document token in config.data.tokenizer_eos",
        )
    if begin < len(tokens):
        yield np.array([begin]), np.array([len(tokens) - begin])


def _megatron_index(path: Path) -> tuple[str, np.ndarray, np.ndarray, np.ndarray]:
    """dtype, int32 lengths and int64 byte positions of sequences, and int64 first sequence of each document and end."""
    try:
        raw = np.memmap(path, np.uint8, "r")
        code = int(raw[17])
        sequences, documents = np.frombuffer(raw[18:34], "<i8").tolist()
        if bytes(raw[:9]) != _MEGATRON_MAGIC or int(np.frombuffer(raw[9:17], "<i8")[0]) != 1:
            raise ValueError("the magic or the version is another")
        edges = 34 + np.cumsum([0, 4 * sequences, 8 * sequences, 8 * documents])
        if not 0 <= edges[1] <= edges[3] <= len(raw) or code not in _MEGATRON_DTYPES:
            raise ValueError(f"{len(raw):,} bytes, type {code}, {sequences:,} sequences, {documents:,} documents")
        lengths, positions, firsts = (
            np.frombuffer(raw[edges[i] : edges[i + 1]], kind) for i, kind in enumerate(("<i4", "<i8", "<i8"))
        )
    except (OSError, ValueError, IndexError) as error:
        raise DataError(str(path), f"is no index of Megatron ({error})", "copy it again") from error
    return _MEGATRON_DTYPES[code], lengths, positions, firsts


def _megatron_spans(part: Part) -> Iterator[Spans]:
    """Documents of a file with an index. The sequences of a document must follow each other."""
    path = _index_path(part.path)
    dtype, lengths, positions, documents = _megatron_index(path)
    starts = positions // np.dtype(dtype).itemsize
    ends = starts + lengths
    following = np.ones(len(starts), bool)  # whether a sequence begins where the one before it ends
    following[1:] = starts[1:] == ends[:-1]
    following[documents[:-1][documents[:-1] < len(starts)]] = True
    if not following.all() or (len(ends) and (starts.min() < 0 or ends.max() > part.tokens)):
        what = "names tokens that the .bin file does not hold, or documents in several pieces"
        raise DataError(str(path), what, "copy both files again")
    filled = documents[1:] > documents[:-1]
    begins, last = documents[:-1][filled], documents[1:][filled] - 1
    for at in range(0, len(begins), _CHUNK):
        group = slice(at, at + _CHUNK)
        yield starts[begins[group]], ends[last[group]] - starts[begins[group]]


class HuggingFaceTokens(TokenSource):
    """A column of token ids of a Hugging Face data set; every row is a document.

    Args:
      source: the data set; its `text_field` is the column. `path` may be a directory of `save_to_disk`.
    """

    def __init__(self, source: Any):
        self.source = source
        self.name = f"hf {source}"

    def fingerprint(self) -> str:
        return _digest("hf tokens", self.source.fingerprint())

    def _files(self) -> list[str]:
        """The Arrow files that hold exactly this data set's rows."""
        directory = Path(self.source.path)
        if (directory / "state.json").exists() or (directory / "dataset_dict.json").exists():
            import datasets

            try:
                dataset = datasets.load_from_disk(str(directory))
                one = not isinstance(dataset, datasets.DatasetDict)
                dataset = dataset if one else dataset[self.source.split]
            except Exception as error:
                raise self.source.explain(error) from error
            if one and self.source.split not in ("train", str(dataset.split)):  # "train" is what nobody set
                raise DataError(
                    f"config.data.hf_path={self.source.path!r}",
                    f"holds one split ({dataset.split}), not {self.source.split!r}",
                    "name the directory of a DatasetDict, or leave hf_split and hf_val_split as they are",
                )
        else:
            dataset = self.source.load()
        files = [file["filename"] for file in dataset.cache_files]
        rows = sum(len(offsets) - 1 for file in files for _, offsets in arrow_lists(file, self.source.text_field))
        if rows != len(dataset) or dataset._indices is not None:
            raise DataError(
                f"config.data.hf_path={self.source.path!r}",
                f"{self.source} has {len(dataset):,} rows in an order of its own, its files have {rows:,}",
                "save it with flatten_indices() and save_to_disk(), and name that directory",
            )
        return files

    def parts(self, tokenizer: Tokenizer) -> list[Part]:
        field = self.source.text_field
        return [
            Part(path, sum(int(o[-1] - o[0]) for _, o in arrow_lists(path, field)), column=field).stamped()
            for path in self._files()
        ]

    def spans(self, parts: Sequence[Part], eos_id: int) -> Iterator[Spans]:
        begin = 0
        for part in parts:
            for _, offsets in arrow_lists(part.path, part.column):
                yield begin + offsets[:-1] - offsets[0], np.diff(offsets)
                begin += int(offsets[-1] - offsets[0])


@dataclasses.dataclass(frozen=True)
class Indexed:
    """Where consecutive documents lie.

    Attributes:
      starts: int64 [documents], position of each document in the tokens of all parts.
      lengths: int64 [documents], tokens of each document, and one for the EOS that follows it.
      hashes: uint64 [documents], hash of the tokens of each, without EOS.
      sizes: int64 [documents], bytes of text of each.
    """

    starts: np.ndarray
    lengths: np.ndarray
    hashes: np.ndarray
    sizes: np.ndarray

    def payload(self, members: np.ndarray) -> np.ndarray:
        """What is kept of those documents for which `members`, bool [documents], is true."""
        return self.starts[members]


def index_documents(
    source: TokenSource, parts: Sequence[Part], tokenizer: Tokenizer, *, limit: int = 0
) -> Iterator[Indexed]:
    """Looks up the documents, and checks their ids. Documents without tokens are left out.

    Args:
      source: of the tokens.
      parts: its files.
      tokenizer: that made the tokens.
      limit: documents to use; 0: all.

    Raises:
      DataError: an id is outside the tokenizer's vocabulary, or no EOS divides the documents.
    """
    tokens, left = PartedTokens(parts), limit or 1 << 62
    for starts, lengths in source.spans(parts, tokenizer.eos_id):
        sums, at = np.cumsum(lengths), 0
        while at < len(starts) and left:
            # At least one document, and as many as fill a chunk.
            end = max(int(np.searchsorted(sums, (sums[at - 1] if at else 0) + _CHUNK, side="right")), at + 1)
            found = _index(tokens, starts[at:end], lengths[at:end], tokenizer)
            found = Indexed(*(values[:left] for values in vars(found).values()))
            at, left = end, left - len(found.starts)
            yield found


def _index(tokens: PartedTokens, starts: np.ndarray, lengths: np.ndarray, tokenizer: Tokenizer) -> Indexed:
    low, high = int(starts.min()), int((starts + lengths).max())
    if high - low <= lengths.sum() + len(lengths):  # they follow each other, with no more than one EOS between them
        flat, local = tokens[low:high], starts - low
    else:
        flat = np.concatenate([tokens[s : s + n] for s, n in zip(starts.tolist(), lengths.tolist(), strict=True)])
        local = np.cumsum(lengths) - lengths
    if len(flat) and not 0 <= flat.min() <= flat.max() < tokenizer.vocab_size:
        bad = int(np.flatnonzero((flat < 0) | (flat >= tokenizer.vocab_size))[0])
        document = int(np.searchsorted(local, bad, side="right")) - 1
        raise DataError(
            tokens.where(int(starts[document] + bad - local[document])),
            f"the id is {int(flat[bad])}, and the {tokenizer.name} tokenizer has {tokenizer.vocab_size:,} ids",
            "name the tokenizer that made these tokens, or the column or file that holds tokens",
        )
    ended = np.zeros(len(lengths), bool)
    some = lengths > 0
    ended[some] = flat[(local + lengths - 1)[some]] == tokenizer.eos_id
    lengths = lengths - ended
    text = np.append(0, np.cumsum(tokenizer.token_bytes[flat], dtype=np.int64))
    raw = memoryview(flat.astype("<u4").tobytes())  # the same content has the same hash, whatever type stores it
    kept = lengths > 0
    starts, lengths, local = starts[kept], lengths[kept], local[kept]
    hashes = [
        hashlib.blake2b(raw[4 * begin : 4 * end], digest_size=8).digest()
        for begin, end in zip(local.tolist(), (local + lengths).tolist(), strict=True)
    ]
    return Indexed(
        starts.astype(np.int64),
        (lengths + 1).astype(np.int64),
        np.frombuffer(b"".join(hashes), "<u8"),
        text[local + lengths] - text[local],
    )
