"""Times tokenisation by 1, 2, 4, ... processes on one host, and compares the caches that they make.

    python benchmarks/tokenisation.py --workers 1 2 4 8 16 --megabytes 256 --json benchmarks/results/tokenize_16.json
    python benchmarks/tokenisation.py --files 'corpus/**/*.txt' --tokenizer path/to/tokenizer.json

Without --files the corpus is pseudo-words drawn from a Zipf distribution with the letters' frequencies of a seed, in
documents of log-normal length; the tokenizer is then a byte-level BPE of 32,768 ids, trained on it. Reading, starting
the processes, tokenising, and joining the shards are all timed. Where the machine has other work, compare
`cpu_seconds`, the processor time of this process and its workers: what the workers add to it as they become more is
what they cost each other.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import pathlib
import platform
import statistics
import sys
import tempfile
import time
from typing import Any

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from nsa_jax.data import cache, shards  # noqa: E402
from nsa_jax.data.sources import Source, TextSource  # noqa: E402
from nsa_jax.data.tokenizers import BPE_EOS, HuggingFaceTokenizer, Tokenizer, train_bpe  # noqa: E402

_SEPARATOR = "\n%%\n"
_FILE_BYTES = 64 << 20
_LETTERS = "etaoinshrdlcumwfgypbvkjxqz"


def write_corpus(directory: pathlib.Path, megabytes: float, seed: int = 0) -> list[str]:
    """Files of synthetic documents that `_SEPARATOR` divides."""
    rng = np.random.default_rng(seed)
    frequency = 1.0 / np.arange(1, 27)
    letters = rng.choice(list(_LETTERS), (200_000, 12), p=frequency / frequency.sum())
    lengths = rng.integers(2, 12, len(letters))
    words = np.array(["".join(row[:n]) for row, n in zip(letters, lengths, strict=True)])
    rank = 1.0 / np.arange(10, len(words) + 10)
    rank /= rank.sum()
    files, left = [], megabytes * 1e6
    while left > 0:
        path = directory / f"{len(files):04}.txt"
        documents, size = [], 0
        while size < min(_FILE_BYTES, left):
            count = int(np.clip(rng.lognormal(5.8, 1.0), 10, 20_000))
            documents.append(" ".join(rng.choice(words, count, p=rank)) + ".")
            size += len(documents[-1]) + len(_SEPARATOR)
        path.write_text(_SEPARATOR.join(documents))
        files.append(str(path))
        left -= size
    return files


def run(source: Source, tokenizer: Tokenizer, workers: int) -> dict[str, Any]:
    """One tokenisation into an empty cache."""
    with tempfile.TemporaryDirectory() as root:
        before, start = os.times(), time.perf_counter()
        corpus = cache.load_corpus(source, tokenizer, val_fraction=0.01, root=pathlib.Path(root), workers=workers)
        seconds = time.perf_counter() - start
        after = os.times()
        tokens = corpus.train.stats.tokens + corpus.validation.stats.tokens
        digest = hashlib.sha256()
        for split in (corpus.train, corpus.validation):
            for part in (split.tokens.array, split.offsets, split.hashes):
                digest.update(part)
        return {
            "workers": workers,
            "seconds": seconds,
            "tokens": tokens,
            "tokens_per_second": tokens / seconds,
            "documents": corpus.train.stats.documents + corpus.validation.stats.documents,
            "cpu_seconds": sum(after[:4]) - sum(before[:4]),
            "cpu_seconds_of_this_process": sum(after[:2]) - sum(before[:2]),
            "digest": digest.hexdigest()[:16],
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--repeats", type=int, default=3, help="of each; the median is compared")
    parser.add_argument("--megabytes", type=float, default=256.0, help="of the synthetic corpus")
    parser.add_argument("--files", nargs="*", default=[], help="text files or globs, instead of the synthetic corpus")
    parser.add_argument("--separator", default="", help="between the documents of --files")
    parser.add_argument("--tokenizer", type=pathlib.Path, help="a tokenizer.json; default: a BPE trained on the corpus")
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        files = args.files or write_corpus(pathlib.Path(folder), args.megabytes)
        source = TextSource(files, separator=args.separator if args.files else _SEPARATOR)
        if args.tokenizer:
            tokenizer = HuggingFaceTokenizer(args.tokenizer.read_text(encoding="utf-8"))
        else:
            tokenizer = HuggingFaceTokenizer(train_bpe(source.documents(), 32_768, max_bytes=16 << 20), eos=BPE_EOS)
        rows, megabytes = [], (source.size_bytes() or 0) / 1e6
        for _ in range(args.repeats):  # in turns, so that a busy moment of the machine does not hit one count only
            for workers in args.workers:
                rows.append(run(source, tokenizer, workers))
                print(json.dumps(rows[-1]), flush=True)
    medians = {n: statistics.median(r["tokens_per_second"] for r in rows if r["workers"] == n) for n in args.workers}
    for workers, rate in medians.items():
        print(f"{workers:3} workers: {rate:12,.0f} tokens/s, {rate / medians[args.workers[0]]:.2f} x", flush=True)
    if len({row["digest"] for row in rows}) > 1:
        raise SystemExit("the caches differ")
    if args.json:
        result = {
            "environment": {
                "cores": shards.available_cores(),
                "processor": platform.processor() or platform.machine(),
                "python": platform.python_version(),
                "command": " ".join(["python", *sys.argv]),
            },
            "case": {"megabytes": megabytes, "vocab_size": tokenizer.vocab_size},
            "rows": rows,
            "tokens_per_second": medians,
        }
        pathlib.Path(args.json).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
