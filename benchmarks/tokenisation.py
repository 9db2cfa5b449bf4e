r"""Times tokenisation by 1, 2, 4, ... processes on one host, and compares the caches that they make.

    python benchmarks/tokenisation.py --workers 1 2 4 8 16 --megabytes 256 \
        --json benchmarks/results/tokenisation_16_cores.json
    python benchmarks/tokenisation.py --files 'corpus/*.txt' --tokenizer path/to/tokenizer.json --workers 16 1 --control

Without --files the corpus is pseudo-words drawn from a Zipf distribution with the letters' frequencies of a seed, in
documents of log-normal length; the tokenizer is then a byte-level BPE of 32,768 ids, trained on it. Reading, starting
the processes, tokenising, and joining the shards are all timed. Where the machine has other work, compare
`cpu_seconds`, the processor time of this process and its workers: what the workers add to it as they become more is
what they cost each other.

--control times what the machine itself allows: processes that share nothing, each of which tokenises the same shards
in a loop, without being started, fed or waited for within the time. Cores that are threads of one core, and clocks that
sink when all cores work, show there.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import pathlib
import pickle
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from nsa_jax.data import cache, shards  # noqa: E402
from nsa_jax.data.documents import Source  # noqa: E402
from nsa_jax.data.encoding import encode  # noqa: E402
from nsa_jax.data.sources import TextSource  # noqa: E402
from nsa_jax.data.tokenizers import BPE_EOS, HuggingFaceTokenizer, Tokenizer, train_bpe  # noqa: E402

_SEPARATOR = "\n%%\n"
_FILE_BYTES = 64 << 20
_LETTERS = "etaoinshrdlcumwfgypbvkjxqz"


def write_corpus(directory: pathlib.Path, megabytes: float) -> list[str]:
    """Files of synthetic documents that `_SEPARATOR` divides."""
    rng = np.random.default_rng(0)
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


def control(groups: list[list[bytes]], tokenizer: Tokenizer, processes: int) -> dict[str, Any]:
    """Each of several processes tokenises the same groups of documents; the sum of their rates."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save(folder)
        environment = {**os.environ, **shards.WORKER_ENVIRONMENT}
        command = [sys.executable, __file__, "--copy"]
        pipe = subprocess.PIPE
        copies = [subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environment) for _ in range(processes)]
        for copy in copies:
            pickle.dump((folder, groups), copy.stdin)
            copy.stdin.flush()
        for copy in copies:
            copy.stdout.readline()  # it is ready
        for copy in copies:
            copy.stdin.close()  # it begins
        found = [json.loads(copy.stdout.read()) for copy in copies]
        for copy in copies:
            copy.wait()
    return {
        "control": processes,
        "seconds": statistics.mean(f["seconds"] for f in found),
        "tokens_per_second": sum(f["tokens"] / f["seconds"] for f in found),
        "cpu_seconds": sum(f["cpu_seconds"] for f in found),
    }


def control_copy() -> None:
    """A process of `control`."""
    folder, groups = pickle.load(sys.stdin.buffer)
    tokenizer = Tokenizer.load(folder)
    print("ready", flush=True)
    sys.stdin.buffer.read()
    start, cpu = time.perf_counter(), time.process_time()
    tokens = sum(len(encode(group, tokenizer).tokens) for group in groups)
    found = {"tokens": tokens, "seconds": time.perf_counter() - start, "cpu_seconds": time.process_time() - cpu}
    print(json.dumps(found), flush=True)


def show_speedups(rates: dict[int, float], name: str) -> None:
    least = min(rates)
    for count, rate in rates.items():
        print(f"{count:3} {name}: {rate:12,.0f} tokens/s, {rate / rates[least]:.2f} x", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--repeats", type=int, default=3, help="of each; the median is compared")
    parser.add_argument("--megabytes", type=float, default=256.0, help="of the synthetic corpus")
    parser.add_argument("--files", nargs="*", default=[], help="text files or globs, instead of the synthetic corpus")
    parser.add_argument("--separator", default="", help="between the documents of --files")
    parser.add_argument("--tokenizer", type=pathlib.Path, help="a tokenizer.json; default: a BPE trained on the corpus")
    parser.add_argument("--control", action="store_true", help="also time processes that share nothing")
    parser.add_argument("--copy", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    if args.copy:
        return control_copy()
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
        controls: list[dict[str, Any]] = []
        if args.control:
            share = list(shards._groups(source))[:: max(args.workers)]
            for processes in sorted({1, *args.workers}):
                controls.append(control(share, tokenizer, processes))
                print(json.dumps(controls[-1]), flush=True)
    medians = {n: statistics.median(r["tokens_per_second"] for r in rows if r["workers"] == n) for n in args.workers}
    show_speedups(medians, "workers")
    if controls:
        show_speedups({row["control"]: row["tokens_per_second"] for row in controls}, "that share nothing")
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
            "controls": controls,
        }
        pathlib.Path(args.json).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
