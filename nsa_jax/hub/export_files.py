"""Files of exported models: which of them may be read, JSON, and arrays in safetensors files.

What is read here may come from anywhere, so every file is checked before it is used, and whatever is wrong with one
is a LoadError that names it. Arrays are compared with what the config asks for by the headers of their files, before
anything is allocated for them. Exports hold a checksum of each array; files of other programs have none.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import math
import os
import re
import reprlib
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

from nsa_jax.data.errors import DataError

INDEX = "model.safetensors.index.json"
WHOLE = "model.safetensors"
ADAPTER = "adapter_config.json"  # of a directory that holds changes to another checkpoint's weights
MODEL_TYPE = "nsa_jax"  # in the config.json of what `export` writes
NSA_TYPE = "nsa"  # in that of an NSA model which `export_native` wrote, with PyTorch code beside it
CHECKSUMS = "crc32"  # key of the safetensors metadata: JSON of {array: checksum of its bytes}
_LARGEST_JSON = 100_000_000  # bytes; safetensors bounds its own headers by this
_SHARD_NAME = re.compile(r"\w[\w.-]*\.safetensors", re.ASCII)
_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_BLOCK_BYTES = 8 * 2**20  # of an array that is read in parts

logger = logging.getLogger("nsa_jax")


class LoadError(ValueError):
    """A path holds no model that can be loaded; the message says why and what to do."""


def not_read_back(directory: Path) -> LoadError:
    """The error about a folder of the type NSA_TYPE."""
    return LoadError(
        f"{directory}: is an NSA model exported for transformers, which is not read back here. Fix: name the run that "
        "it came from, or export it without --format=transformers"
    )


def shortened(error: BaseException) -> str:
    """What an error says, on one line: libraries repeat what they read, and that may be anything."""
    text = " ".join(str(error).split())
    return text if len(text) <= 300 else f"{text[:300]}..."


@contextlib.contextmanager
def load_errors(directory: Path) -> Iterator[None]:
    """Turns what the file system, the tokenizer and safetensors raise about damaged files into LoadError."""
    try:
        yield
    except (DataError, OSError, SafetensorError) as error:
        reason = shortened(error)
        raise LoadError(f"{directory}: cannot be loaded: {reason}. Fix: copy or export the model again") from error


def file_in(directory: Path, name: str) -> Path:
    """The path of a file that an export may read.

    Links may lead to other files of the directory, and from a snapshot of a Hugging Face cache to its blobs. Others
    are refused: a model that was downloaded must not make the program read files of its choice.

    Raises:
      LoadError: there is no such file, it is no regular file, or it is a link that leads elsewhere.
    """
    path = directory / name
    with load_errors(directory):
        home, real = Path(os.path.realpath(directory)), Path(os.path.realpath(path))
        allowed = [home]
        if home.parent.name == "snapshots":
            allowed.append(home.parent.parent / "blobs")
        if not any(real.is_relative_to(place) for place in allowed):
            raise LoadError(f"{path}: a link to {real}, outside of the model's directory. Fix: copy the file into it")
        if not path.is_file():
            what = "is no regular file" if os.path.lexists(path) else "is missing"
            raise LoadError(f"{path} {what}. Fix: copy or export the model again")
    return path


def read_json(directory: Path, name: str) -> dict[str, Any]:
    """The object that a JSON file holds.

    Raises:
      LoadError: the file cannot be read, or holds something else.
    """
    path = file_in(directory, name)
    with load_errors(directory):
        if path.stat().st_size > _LARGEST_JSON:
            raise LoadError(f"{path}: larger than {_LARGEST_JSON:,} bytes, so it is not the JSON of a model")
        raw = path.read_bytes()
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise LoadError(f"{path}: is not JSON ({error}). Fix: copy or export the model again") from error
    if not isinstance(value, dict):
        raise LoadError(f"{path}={reprlib.repr(value)}: must be a JSON object. Fix: copy or export the model again")
    return value


def _checksum(array: Any) -> int:
    return zlib.crc32(_raw(np.asarray(array)))


def _raw(array: np.ndarray) -> memoryview:
    """The bytes of an array, row by row."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


@dataclasses.dataclass(frozen=True)
class LaterArray:
    """An array that is made when it is written, so that only one of many takes memory.

    Attributes:
      shape: of the array.
      dtype: of the array.
      make: returns it.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    make: Callable[[], Any]

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return math.prod(self.shape) * self.dtype.itemsize

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.make(), dtype)


def _save(path: Path, arrays: Mapping[str, Any], kind: str) -> None:
    """Writes a safetensors file, one array after another: no second copy of them all is made."""
    names = sorted(arrays, key=lambda name: (-arrays[name].dtype.itemsize, name))  # every array begins aligned

    def header(checksums: dict[str, int]) -> bytes:
        sums = ", ".join(f"{json.dumps(name)}: {checksums.get(name, 0):>10}" for name in names)  # always as long
        fields: dict[str, Any] = {"__metadata__": {"format": kind, CHECKSUMS: f"{{{sums}}}"}}
        end = 0
        for name in names:
            begin, end = end, end + arrays[name].nbytes
            dtype, shape = _NAMES[str(arrays[name].dtype)], list(arrays[name].shape)
            fields[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
        text = json.dumps(fields).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text

    checksums: dict[str, int] = {}
    with path.open("wb") as file:
        file.write(header(checksums))
        for name in names:
            array = np.asarray(arrays[name])
            checksums[name] = _checksum(array)
            file.write(_raw(array))
        file.seek(0)
        file.write(header(checksums))


def write_arrays(directory: Path, arrays: Mapping[str, Any], shard_bytes: int, kind: str = "flax") -> None:
    """Writes model.safetensors, or shards of at most `shard_bytes` (or one array) and their index.

    Args:
      directory: holds no model files yet.
      arrays: arrays or `LaterArray`s by name.
      shard_bytes: size at which another file is begun.
      kind: what the files say about the arrays' layout: "flax", or "pt" for transformers.
    """
    shards: list[dict[str, Any]] = [{}]
    size = 0
    for name, array in arrays.items():
        if shards[-1] and size + array.nbytes > shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = array
        size += array.nbytes
    if len(shards) == 1:
        _save(directory / WHOLE, shards[0], kind)
        return
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _save(directory / name, shard, kind)
        weight_map |= dict.fromkeys(shard, name)
    total = sum(array.nbytes for array in arrays.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / INDEX).write_text(json.dumps(index, indent=1) + "\n")


def _weight_map(directory: Path) -> dict[str, str] | None:
    """{array: file} of a sharded checkpoint; None of one that is a single file, which counts where both are there."""
    if not os.path.lexists(directory / INDEX):
        return None
    if os.path.lexists(directory / WHOLE):
        logger.warning("%s holds %s and %s: the first is read, as transformers does", directory, WHOLE, INDEX)
        return None
    found = read_json(directory, INDEX).get("weight_map")
    if not isinstance(found, dict):
        raise LoadError(f"{directory / INDEX}: weight_map={reprlib.repr(found)}: must be an object {{array: file}}")
    for name, file in found.items():
        if not (isinstance(file, str) and _SHARD_NAME.fullmatch(file)):
            raise LoadError(
                f"{directory / INDEX}: weight_map[{reprlib.repr(name)}]={reprlib.repr(file)}: must be the name of a "
                "safetensors file in the same directory, without a path"
            )
    return found


class Arrays:
    """The arrays of a safetensors checkpoint, whole or sharded, read one at a time.

    Attributes:
      files: {array: name of its file}.
      shapes: {array: (shape, dtype)}, as the headers say; safetensors has compared them with the files' sizes.

    Raises:
      LoadError: a file is missing, damaged, or not within the directory.
    """

    def __init__(self, directory: Path):
        self._directory = directory
        found = _weight_map(directory)
        if found is None and not os.path.lexists(directory / WHOLE):
            raise LoadError(f"{directory} holds no {WHOLE} and no {INDEX}. Fix: copy or export the model again")
        names = [WHOLE] if found is None else sorted(set(found.values()))
        self._open = {name: self._open_file(name) for name in names}
        held = {name: set(file.keys()) for name, file in self._open.items()}
        # As in transformers, arrays count that the index does not name: those without a place in the model are refused.
        self.files = {name: file for file in names for name in sorted(held[file])} | (found or {})
        self._checksums = {name: self._read_checksums(name) for name in names}
        self._begins: dict[str, dict[str, int]] = {}
        self.shapes: dict[str, tuple[tuple[int, ...], str]] = {}
        for name, file in self.files.items():
            if name not in held[file]:
                raise LoadError(f"{directory / file} holds no array {reprlib.repr(name)}, though {INDEX} says so")
            header = self._open[file].get_slice(name)
            dtype = str(header.get_dtype())
            self.shapes[name] = tuple(header.get_shape()), _DTYPES.get(dtype, dtype)

    def _open_file(self, name: str) -> Any:
        path = file_in(self._directory, name)
        try:
            return safe_open(path, framework="flax")
        except (SafetensorError, OSError) as error:
            what = "is no whole safetensors file"
            raise LoadError(f"{path}: {what} ({shortened(error)}). Fix: copy or export the model again") from error

    def _read_checksums(self, name: str) -> dict[str, int]:
        text = (self._open[name].metadata() or {}).get(CHECKSUMS)
        if text is None:
            return {}
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            raise LoadError(f"{self._directory / name}: its checksums are damaged. Fix: copy or export the model again")
        return found

    def expect(self, name: str, shape: tuple[int, ...], dtype: str | None = None) -> None:
        """Compares an array's header with what the config asks for.

        Args:
          name: of the array.
          shape: that it must have.
          dtype: that it must have; None: any floating-point type.

        Raises:
          LoadError: there is no such array, or it is another.
        """
        if name not in self.shapes:
            raise LoadError(f"{self._directory}: no array {name!r}, which config.json asks for")
        got, kind = self.shapes[name]
        if got != shape or (kind != dtype if dtype else kind not in _DTYPES.values()):
            raise LoadError(
                f"{self._directory}: {name} is {got} {kind}, must be {shape} {dtype or 'of floating-point numbers'}; "
                "config.json does not fit the arrays"
            )

    def expect_no_others(self, names: Collection[str]) -> None:
        """Raises LoadError if there are arrays of other names, which what the config describes would not read."""
        if unused := sorted(set(self.files) - set(names)):
            raise LoadError(
                f"{self._directory}: {len(unused)} arrays have no place in this model: "
                f"{', '.join(map(reprlib.repr, unused[:5]))}; config.json does not fit the arrays"
            )

    def __getitem__(self, name: str) -> jax.Array:
        file = self.files[name]
        with load_errors(self._directory / file):
            array = self._open[file].get_tensor(name)
        checksums = self._checksums[file]
        if checksums and checksums.get(name) != _checksum(array):
            raise self._damaged(name)
        return array

    def _damaged(self, name: str) -> LoadError:
        return LoadError(
            f"{self._directory / self.files[name]}: {name} has not the checksum that was written with it; the file is "
            "damaged. Fix: copy or export the model again"
        )

    def _begin(self, name: str) -> int:
        """Where an array begins in its file, whose header safetensors has checked."""
        file = self.files[name]
        if file not in self._begins:
            with (self._directory / file).open("rb") as opened:
                length = int.from_bytes(opened.read(8), "little")
                header = json.loads(opened.read(length))
            header.pop("__metadata__", None)
            self._begins[file] = {key: 8 + length + field["data_offsets"][0] for key, field in header.items()}
        return self._begins[file][name]

    def parts(self, name: str) -> Iterator[tuple[slice, np.ndarray]]:
        """An array in parts along its first axis, so that no whole copy of it is made.

        Args:
          name: of the array, whose header `expect` has compared.

        Yields:
          Indices of the first axis, and these rows in the dtype of the file.

        Raises:
          LoadError: the file is damaged.
        """
        shape, kind = self.shapes[name]
        dtype, file = np.dtype(getattr(jnp, kind)), self.files[name]
        row = math.prod(shape[1:]) * dtype.itemsize
        step, checksum = max(_BLOCK_BYTES // max(row, 1), 1), 0
        with load_errors(self._directory / file), (self._directory / file).open("rb") as opened:
            opened.seek(self._begin(name))
            for first in range(0, shape[0], step):
                rows = slice(first, min(first + step, shape[0]))
                raw = opened.read((rows.stop - first) * row)
                if len(raw) != (rows.stop - first) * row:
                    raise self._damaged(name)
                checksum = zlib.crc32(raw, checksum)
                yield rows, np.frombuffer(raw, dtype).reshape(-1, *shape[1:])
        if self._checksums[file] and self._checksums[file].get(name) != checksum:
            raise self._damaged(name)

    @property
    def largest(self) -> int:
        """Elements of the largest array."""
        return max((math.prod(shape) for shape, _ in self.shapes.values()), default=0)
