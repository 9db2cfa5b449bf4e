"""Token caches whose bytes change before or while they are read: an error, a new cache, or what was written."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from nsa_jax.config import default_config
from nsa_jax.data import DataError, corpus, make_pipeline

from .harness import Outcome

QUICK = 36
_STEPS = 40  # more than an epoch
_WHEN = ("before the start", "while training")


def _config(folder: Path) -> ConfigDict:
    rng = np.random.default_rng(0)
    words = [bytes(rng.integers(97, 123, 5, np.uint8)).decode() for _ in range(400)]
    text = folder / "corpus.txt"
    text.write_text("\n%\n".join(" ".join(rng.choice(words, 80)) for _ in range(500)))
    c = default_config()
    c.data.source, c.data.files, c.data.text_separator = "text", (str(text),), "\n%\n"
    c.data.tokenizer, c.data.bpe_vocab_size = "bpe", 300
    c.data.seq_len, c.train.batch_size, c.data.val_fraction, c.data.prefetch = 96, 24, 0.1, 2
    c.train.eval_batches = 2
    return c


def _pick(rng: np.random.Generator, items: list) -> Any:
    return items[int(rng.integers(len(items)))]


def _files(root: Path) -> list[Path]:
    """The files of the corpus."""
    return sorted(path for path in next(root.glob("*/meta.json")).parent.iterdir() if path.is_file())


def _overwrite(rng: np.random.Generator, root: Path) -> None:
    """Other bytes in place of some, the size unchanged; most often in what is trained on."""
    path = _pick(rng, [p for p in _files(root) if p.stat().st_size])
    if rng.random() < 0.5:
        path = next(root.glob("*/train.tokens"))
    raw = bytearray(path.read_bytes())
    length = min(int(rng.integers(1, 5000)), len(raw))
    start = int(rng.integers(len(raw) - length + 1))
    raw[start : start + length] = bytes(length) if rng.random() < 0.5 else rng.bytes(length)
    path.write_bytes(raw)


def _flip(rng: np.random.Generator, root: Path) -> None:
    """One bit of any file, the trained tokenizer's included."""
    path = _pick(rng, [p for p in (*_files(root), *root.glob("bpe-*/*")) if p.stat().st_size])
    raw = bytearray(path.read_bytes())
    raw[int(rng.integers(len(raw)))] ^= 1 << int(rng.integers(8))
    path.write_bytes(raw)


def _cut(rng: np.random.Generator, root: Path) -> None:
    path = _pick(rng, [p for p in _files(root) if p.stat().st_size])
    raw = path.read_bytes()
    path.write_bytes(raw[: int(rng.integers(len(raw)))] + (rng.bytes(3) if rng.random() < 0.2 else b""))


def _swap(rng: np.random.Generator, root: Path) -> None:
    """Exchanges two chunks of the stream, two files, or each split's files for the other's."""
    tokens = next(root.glob("*/train.tokens"))
    how = int(rng.integers(3))
    if how == 0:
        raw = bytearray(tokens.read_bytes())
        size = int(rng.integers(100, len(raw) // 2))
        raw[:size], raw[-size:] = raw[-size:], raw[:size]
        tokens.write_bytes(raw)
        return
    pairs = [(p, p.with_name(p.name.replace("train", "validation"))) for p in _files(root) if "train" in p.name]
    if how == 1:
        pairs = [tuple(_pick(rng, _files(root)) for _ in range(2))]
    for first, second in pairs:
        one, other = first.read_bytes(), second.read_bytes()
        first.write_bytes(other)
        second.write_bytes(one)


def _meta(rng: np.random.Generator, root: Path) -> None:
    path = next(root.glob("*/meta.json"))
    meta = json.loads(path.read_text())
    key = _pick(rng, sorted(meta))
    values = [None, 3, -1, "uint32", "", [], {}, "x" * 1000, meta[_pick(rng, sorted(meta))]]
    if rng.random() < 0.3:
        del meta[key]
    elif isinstance(meta[key], dict) and rng.random() < 0.7:
        meta[key][_pick(rng, sorted(meta[key]))] = _pick(rng, values)
    else:
        meta[key] = _pick(rng, values)
    path.write_text(json.dumps(meta))


def _remove(rng: np.random.Generator, root: Path) -> None:
    path = _pick(rng, _files(root))
    path.unlink()
    if rng.random() < 0.3:
        path.mkdir()


_KINDS = {"overwritten": _overwrite, "one bit": _flip, "cut": _cut, "swapped": _swap, "meta": _meta, "removed": _remove}


def _read(config: ConfigDict, damage=None) -> list[np.ndarray]:
    """Everything that a run reads; `damage` is done after it has begun to train."""
    pipeline = make_pipeline(config)
    batches = pipeline.train()
    found = []
    try:
        for step in range(_STEPS):
            if step == 3 and damage is not None:
                damage()
            batch = next(batches)
            found += [batch["inputs"].copy(), batch["targets"].copy(), batch["segment_start"].copy()]
        found += [batch["targets"] for batch in pipeline.validation()]
        found += [
            np.array(a) for s in (pipeline.corpus.train, pipeline.corpus.validation) for a in (s.offsets, s.hashes)
        ]
    finally:
        batches.close()
    return found


def attack(rng: np.random.Generator, folder: Path) -> Iterator[Outcome]:
    """Damages a copy of a good cache, and reads it as a run does."""
    config = _config(folder)
    config.data.cache_dir = str(folder / "good")
    expected = _read(config)
    config.data.cache_dir = str(folder / "cache")
    # Half of the attempts read caches as large ones are read: next to nothing is compared when they are opened.
    whole = corpus._VERIFIED_CHUNKS
    while True:
        for kind, damage in _KINDS.items():
            for when in _WHEN:
                shutil.copytree(folder / "good", folder / "cache")
                corpus._VERIFIED_CHUNKS, corpus._SAMPLED_CHUNKS = (whole, 64) if rng.random() < 0.5 else (0, 2)

                def now(damage=damage) -> None:
                    damage(rng, folder / "cache")

                failure = ""
                try:
                    if when == _WHEN[0]:
                        now()
                    found = _read(config, now if when == _WHEN[1] else None)
                    if len(found) != len(expected) or not all(map(np.array_equal, found, expected)):
                        failure = "damage was trained on"
                except DataError as error:
                    if "Fix: " not in str(error) or "\n" in str(error):
                        failure = f"message: {error}"
                except Exception as error:
                    failure = f"{type(error).__name__}: {error}"
                finally:
                    corpus._VERIFIED_CHUNKS, corpus._SAMPLED_CHUNKS = whole, 64
                shutil.rmtree(folder / "cache")
                yield Outcome(f"{kind} {when}", failure)
