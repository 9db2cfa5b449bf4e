"""Exports and foreign checkpoints that hold anything: `load` and the import raise LoadError, or load what was saved."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import signal
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

import nsa_jax
from nsa_jax import export, nn
from nsa_jax.config import default_config
from nsa_jax.data.tokenizers import BPE_EOS, HuggingFaceTokenizer, train_bpe
from nsa_jax.loading import LoadError

from .harness import Outcome

QUICK = 40
LLAMA = Path(__file__).resolve().parents[1] / "tools" / "tiny_llama"
_SECONDS, _BYTES = 20, 2 << 30  # what one attempt may take
_VALUES = [
    *(None, True, False, -1, 0, 1, 2, 3, 7, 64, 10**9, 2**31, 2**63, 10**30, -(10**30), 0.5, -0.5, 1e308),
    *(float("nan"), float("inf"), float("-inf"), "", "x", "1", "x" * 100_000, "\ud800", "\x00", "../x", "/etc/passwd"),
    *([], {}, [None], [[]], {"a": None}, [1, 2, 3], ["x"], {"": {}}, [10**12, 10**12], "F64", "I8", "byte", "hf"),
]
_FILE_NAMES = [
    *("../outside.safetensors", "/etc/passwd", "a/../../outside.safetensors", "..", ".", "", "config.json", "\x00"),
    *("model.safetensors\x00.safetensors", "\ud800.safetensors", "x" * 5000 + ".safetensors", "missing.safetensors"),
    *(3, None, [], {}, "..\\outside.safetensors", "folder.safetensors", "link.safetensors", "file://x.safetensors"),
]


class _TooLong(Exception):
    pass


@contextlib.contextmanager
def _limits() -> Iterator[None]:
    """Bounds the time of an attempt, and the memory that it may add."""

    def stop(*_):
        raise _TooLong(f"more than {_SECONDS} s")

    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    handler = signal.signal(signal.SIGALRM, stop)
    before_timer = signal.setitimer(signal.ITIMER_REAL, _SECONDS)  # the test runner's own may be running
    resource.setrlimit(resource.RLIMIT_AS, (used + _BYTES, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, *before_timer)


def _leaves(model: nn.Transformer) -> dict[str, np.ndarray]:
    state = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    return {str(path): np.asarray(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(state)}


def _nodes(value: Any, path: tuple = ()) -> Iterator[tuple]:
    """Paths of everything within a JSON value."""
    if path:
        yield path
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _nodes(item, (*path, key))
    elif isinstance(value, list):
        for index, item in enumerate(value[:20]):
            yield from _nodes(item, (*path, index))


def _pick(rng: np.random.Generator, items: list) -> Any:
    return items[int(rng.integers(len(items)))]


def _mutate_json(rng: np.random.Generator, value: Any) -> str:
    """JSON text of a value with one node changed, deleted, renamed, doubled or deeply nested."""
    where = list(_nodes(value))
    if not where:
        return json.dumps(_pick(rng, _VALUES))
    path, how = _pick(rng, where), int(rng.integers(12))
    parent = value
    for key in path[:-1]:
        parent = parent[key]
    key, new = path[-1], _pick(rng, _VALUES)
    if how == 0:
        del parent[key]
    elif how == 1 and isinstance(parent, dict):
        parent[_pick(rng, [f"{key}_", f"{key}\n", "x" * 100_000])] = parent.pop(key)
    elif how == 2:
        parent[key] = "DEEP"
        return json.dumps(value).replace('"DEEP"', "[" * 100_000 + "]" * 100_000)
    elif how == 3 and isinstance(parent, dict):
        parent["AGAIN"] = new
        return json.dumps(value).replace('"AGAIN"', json.dumps(str(key)))
    elif how == 4 and isinstance(parent[key], (int, float)) and not isinstance(parent[key], bool):
        parent[key] = parent[key] * _pick(rng, [2, -1, 10**6, 0.5, 10**300])
    else:
        parent[key] = new
    return json.dumps(value)


def _hit_json(rng: np.random.Generator, directory: Path) -> None:
    path = _pick(rng, [p for p in sorted(directory.glob("*.json")) if p.name != "generation_config.json"])
    path.write_text(_mutate_json(rng, json.loads(path.read_text())), encoding="utf-8", errors="surrogatepass")


def _hit_model_fields(rng: np.random.Generator, directory: Path) -> None:
    """Aims at the numbers that decide how much is allocated."""
    path = directory / "config.json"
    value = json.loads(path.read_text())
    fields = value["config"]["model"] if "config" in value else value
    numbers = [name for name, item in fields.items() if isinstance(item, (int, float))]
    fields[_pick(rng, numbers)] = _pick(rng, [v for v in _VALUES if isinstance(v, (int, float))])
    path.write_text(json.dumps(value))


def _shard(rng: np.random.Generator, directory: Path) -> Path:
    return _pick(rng, sorted(directory.glob("*.safetensors")))


def _hit_header(rng: np.random.Generator, directory: Path) -> None:
    path = _shard(rng, directory)
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    text = _mutate_json(rng, json.loads(raw[8 : 8 + length])).encode("utf-8", "surrogatepass")
    if rng.random() < 0.2:
        length = _pick(rng, [0, 1, len(text) - 1, len(text) + 8, 2**32, 2**63, 2**64 - 1])
    else:
        length = len(text)
    path.write_bytes(struct.pack("<Q", length) + text + raw[8 + struct.unpack("<Q", raw[:8])[0] :])


def _hit_weights(rng: np.random.Generator, directory: Path) -> None:
    """Flips bits of the numbers themselves."""
    path = _shard(rng, directory)
    raw = bytearray(path.read_bytes())
    start = 8 + struct.unpack("<Q", raw[:8])[0]
    for _ in range(int(rng.integers(1, 4))):
        raw[int(rng.integers(start, len(raw)))] ^= 1 << int(rng.integers(8))
    path.write_bytes(raw)


def _hit_bytes(rng: np.random.Generator, directory: Path) -> None:
    """Overwrites, cuts, extends or empties any file."""
    path = _pick(rng, sorted(p for p in directory.iterdir() if p.is_file()))
    raw = bytearray(path.read_bytes())
    how = int(rng.integers(6))
    if how == 0:
        raw = raw[: int(rng.integers(len(raw)))]
    elif how == 1:
        raw = raw + rng.bytes(int(rng.integers(1, 100)))
    elif how == 2:
        raw = bytearray()
    elif how == 3:
        raw = bytearray(rng.bytes(len(raw)))
    elif how == 4:
        at = int(rng.integers(len(raw)))
        raw[at:at] = b"\xff\xfe\xc3\x28"
    else:
        for _ in range(int(rng.integers(1, 9))):
            raw[int(rng.integers(len(raw)))] = int(rng.integers(256))
    path.write_bytes(raw)


def _hit_weight_map(rng: np.random.Generator, directory: Path) -> None:
    path = directory / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    name = _pick(rng, sorted(index["weight_map"]))
    index["weight_map"][name] = _pick(rng, _FILE_NAMES)
    if rng.random() < 0.3:
        index["weight_map"] = dict.fromkeys(index["weight_map"], index["weight_map"][name])
    (directory / "folder.safetensors").mkdir()
    (directory / "link.safetensors").symlink_to("../outside.safetensors")
    path.write_text(json.dumps(index), encoding="utf-8")


def _hit_with_links(rng: np.random.Generator, directory: Path) -> None:
    """Leads a file out of the export, to a file that would load."""
    path = _pick(rng, sorted(p for p in directory.iterdir() if p.name != "generation_config.json"))
    outside = directory.parent / "outside"
    outside.mkdir()
    target = _pick(rng, [outside / path.name, Path("..") / "outside" / path.name, Path("/dev/zero"), path])
    path.rename(outside / path.name)
    path.symlink_to(target)


def _hit_with_specials(rng: np.random.Generator, directory: Path) -> None:
    """Puts a folder, a pipe, nothing or another file in place of a file, or forbids to read it."""
    files = sorted(p for p in directory.iterdir() if p.name != "generation_config.json")
    path, how = _pick(rng, files), int(rng.integers(5))
    content = _pick(rng, files).read_bytes()
    if how == 4:
        path.chmod(0)
        return
    path.unlink()
    if how == 0:
        path.mkdir()
    elif how == 1:
        os.mkfifo(path)
    elif how == 2:
        path.write_bytes(content)


def _hugging_face_cache(rng: np.random.Generator, directory: Path) -> None:
    """Moves the files to the blobs of a cache and links them; a good export stays one."""
    blobs = directory.parents[1] / "blobs"
    blobs.mkdir()
    for number, path in enumerate(sorted(directory.iterdir())):
        path.rename(blobs / str(number))
        path.symlink_to(Path("../../blobs") / str(number))


# {kind: (what is done, what must come of it: "refused", "loaded", or "either")}
_KINDS: dict[str, tuple[Callable[[np.random.Generator, Path], None], str]] = {
    "any value of any json": (_hit_json, "either"),
    "sizes in config.json": (_hit_model_fields, "either"),
    "safetensors header": (_hit_header, "either"),
    "bits of the weights": (_hit_weights, "refused"),
    "bytes of any file": (_hit_bytes, "either"),
    "weight_map": (_hit_weight_map, "refused"),
    "links to files outside": (_hit_with_links, "refused"),
    "folder, pipe, other or no file": (_hit_with_specials, "either"),
    "links of a hugging face cache": (_hugging_face_cache, "loaded"),
}


def _good_exports(folder: Path) -> dict[str, Path]:
    """One file, several files, and a Llama, each as (its directory)."""
    text = train_bpe(["the quick brown fox jumps over the lazy dog " * 20], 270)
    config = default_config()
    config.data.tokenizer = "bpe"
    m = config.model
    m.dim, m.num_layers, m.mlp_dim, m.vocab_size = 16, 2, 32, 280
    m.num_heads, m.num_kv_heads, m.head_dim = 4, 2, 8
    model = nn.Transformer(nn.ModelConfig.from_config(config, 280), rngs=nnx.Rngs(0))
    found = {name: folder / "good" / name for name in ("one file", "shards", "llama")}
    tokenizer = HuggingFaceTokenizer(text, eos=BPE_EOS)
    export.export(model, tokenizer, config, found["one file"])
    export.export(model, tokenizer, config, found["shards"], shard_bytes=9000)
    shutil.copytree(LLAMA, found["llama"], ignore=shutil.ignore_patterns("expected.npz"))
    return found


def _says(config: Any, saved: Any) -> bool:
    """Whether a config has every value that was saved."""
    if isinstance(saved, dict):
        return all(_says(config[name], value) for name, value in saved.items())
    return config == saved or (config != config and saved != saved)  # NaN is not equal to itself


def _load(name: str, directory: Path) -> tuple[dict[str, np.ndarray], Any]:
    """Parameters, and fingerprint of the tokenizer."""
    if name == "llama":
        return _leaves(export.import_dense(directory)[0]), None
    model, tokenizer, config = nsa_jax.load(directory)
    if not _says(json.loads(config.to_json()), json.loads((directory / "config.json").read_bytes())["config"]):
        raise AssertionError("the config is not that of config.json")
    return _leaves(model), tokenizer.fingerprint


def _attempt(name: str, directory: Path, expected: tuple[dict[str, np.ndarray], Any], must: str) -> str:
    """What was wrong with an attempt; empty if the promise held."""
    try:
        with _limits():
            leaves, fingerprint = _load(name, directory)
    except LoadError as error:
        text = str(error)
        if must == "loaded":
            return f"refused: {text}"
        return "" if "\n" not in text and len(text) < 2000 else f"message of {len(text)} characters: {text[:300]!r}"
    except BaseException as error:
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            raise
        return f"{type(error).__name__}: {str(error)[:300]}"
    if must == "refused":
        return "was loaded"
    same = leaves.keys() == expected[0].keys()
    if not (same and all(np.array_equal(leaves[k], v, equal_nan=True) for k, v in expected[0].items())):
        # Nothing guards the numbers in the files of other programs.
        return "" if name == "llama" and must == "either" else "other parameters were loaded"
    return "" if fingerprint == expected[1] else "another tokenizer was loaded"


def attack(rng: np.random.Generator, folder: Path) -> Iterator[Outcome]:
    """Changes one thing about a good export or Llama checkpoint, and loads it."""
    good = _good_exports(folder)
    expected = {name: _load(name, directory) for name, directory in good.items()}
    while True:
        for kind, (hit, must) in _KINDS.items():
            name = _pick(rng, sorted(good) if kind != "weight_map" else ["llama", "shards"])
            place = folder / "models--tiny" / "snapshots"
            shutil.copytree(good[name], place / "revision")
            shutil.copy(_shard(rng, good[name]), place / "outside.safetensors")
            hit(rng, place / "revision")
            if name == "llama" and kind == "bits of the weights":
                must = "either"
            failure = _attempt(name, place / "revision", expected[name], must)
            shutil.rmtree(folder / "models--tiny")
            yield Outcome(kind, failure and f"{name}: {failure}")
