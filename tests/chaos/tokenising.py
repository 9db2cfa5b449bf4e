"""Kills tokenisations at any moment, joining of the shards included, and starts them again: the cache is the same."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from nsa_jax.data import cache, sources, tokenizers

from .harness import Outcome
from .runs import wait_until

QUICK = 3

_SEPARATOR = "\n%\n"
_BUILDER = """
import sys
from pathlib import Path
from nsa_jax.data import cache, shards, sources, tokenizers

shards._SHARD_BYTES = 60_000
source = sources.TextSource((sys.argv[1],), separator="\\n%\\n")
tokenizer = tokenizers.Tokenizer.load(sys.argv[2])
cache.load_corpus(source, tokenizer, val_fraction=0.1, root=Path(sys.argv[3]), workers=2)
"""


def _files(root: Path) -> dict[str, bytes]:
    """Everything below a root but locks."""
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file() and p.suffix != ".lock"}


def attack(rng: np.random.Generator, folder: Path) -> Iterator[Outcome]:
    """Up to four kills of one tokenisation, which is then left to finish: an attempt is one kill."""
    words = [bytes(rng.integers(97, 123, rng.integers(2, 9), np.uint8)).decode() for _ in range(2000)]
    documents = [" ".join(rng.choice(words, rng.integers(5, 400))) for _ in range(4000)]
    (folder / "corpus.txt").write_text(_SEPARATOR.join(documents))
    tokenizer = tokenizers.HuggingFaceTokenizer(tokenizers.train_bpe(documents[:500], 1000))
    tokenizer.save(folder / "tokenizer")
    source = sources.TextSource((str(folder / "corpus.txt"),), separator=_SEPARATOR)
    corpus = cache.load_corpus(source, tokenizer, val_fraction=0.1, root=folder / "reference", workers=1)
    expected = _files(folder / "reference")
    kept = [corpus.train.document(i) for i in range(corpus.train.stats.documents)]
    train = [tokenizer.decode(ids) for ids in kept]
    lost = "" if train == [d for d in documents if d in set(train)] and len(train) > 3000 else "documents differ"

    def start(root: Path) -> subprocess.Popen:
        command = [sys.executable, "-c", _BUILDER, str(folder / "corpus.txt"), str(folder / "tokenizer"), str(root)]
        process = subprocess.Popen(command)
        wait_until(lambda: list(root.glob("*.shards")) or process.poll() is not None, 120, tick=0.005)
        return process

    process = start(folder / "timed")
    began = time.monotonic()
    process.wait(300)
    seconds = time.monotonic() - began
    for number in range(1 << 30):
        root, killed = folder / str(number), []
        for _ in range(int(rng.integers(1, 5))):
            process = start(root)
            time.sleep(rng.uniform(0, seconds))
            made = len(list(root.glob("*.shards/*.npz")))
            running = process.poll() is None
            process.kill()
            process.wait()
            joining = bool(list(root.glob("*.tmp*")))
            killed.append("joining" if joining else "tokenising" if made and running else "other")
        process = start(root)
        failure = lost or ("" if process.wait(300) == 0 else f"{root}: the last start failed")
        found = _files(root)
        if not failure and found != expected:
            names = sorted(name for name in {*found, *expected} if found.get(name) != expected.get(name))
            failure = f"{root}: {names} differ"
        for kind in killed:
            yield Outcome(f"killed while {kind}", failure)
