"""Writes a corpus of long documents without a download: the source text of the Python packages that are installed.

    python benchmarks/corpus.py corpus --megabytes 220
    python benchmarks/corpus.py corpus --megabytes 290 --short corpus_short

A document is the Python files of one folder (and of those below it, while they are small), one after the other, each
after a line with its path: names that are defined in one file are used in others, often tens of thousands of characters
later. Documents have at least 64 KiB and at most 1 MiB. Only ASCII is kept, so that a byte is a token for the byte
tokenizer. Which text is found depends on the machine; the report says how much. --short takes a fourteenth of the
documents out of the corpus and writes them elsewhere as short ones, of 128 bytes each and 12.8 MB at most.
"""

from __future__ import annotations

import argparse
import hashlib
import pathlib
import random
import sysconfig
from collections.abc import Iterator

LEAST, MOST = 64 * 2**10, 2**20
MOST_SHORT = 12_800_000


def _text(path: pathlib.Path, root: pathlib.Path) -> str:
    try:
        text = path.read_text(encoding="ascii", errors="ignore")
    except OSError:
        return ""
    return f"# {path.relative_to(root)}\n{text}\n"


def documents(root: pathlib.Path) -> Iterator[str]:
    """The documents below a folder of packages."""
    for package in sorted(path for path in root.iterdir() if path.is_dir()):
        parts: list[str] = []
        size = 0
        folder = None
        for path in sorted(package.rglob("*.py")):
            # A folder's end is a document's end if there is enough.
            if (size >= LEAST and path.parent != folder) or size >= MOST:
                yield "".join(parts)
                parts, size = [], 0
            folder = path.parent
            text = _text(path, root)[: MOST - size]
            parts.append(text)
            size += len(text)
        if size >= LEAST:
            yield "".join(parts)


def take_short(corpus: pathlib.Path, output: pathlib.Path, size: int) -> None:
    """Cuts the documents whose names, which are hashes, come last."""
    files = sorted(corpus.glob("*.txt"))
    taken = files[-max(len(files) // 14, 1) :]
    texts = [path.read_text() for path in taken]
    pieces = [text[i : i + size] for text in texts for i in range(0, len(text) - size + 1, size)]
    random.Random(0).shuffle(pieces)
    del pieces[MOST_SHORT // size :]
    output.mkdir(parents=True)
    for count, piece in enumerate(pieces):
        (output / f"{count}.txt").write_text(piece)
    for path in taken:
        path.unlink()
    print(f"{len(taken):,} of them became {len(pieces):,} short ones in {output}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=pathlib.Path, help="folder, created if needed")
    parser.add_argument("--megabytes", type=float, default=220.0, help="at most (default %(default)s)")
    parser.add_argument(
        "--roots",
        nargs="*",
        type=pathlib.Path,
        default=[],
        help="folders of packages; default: site-packages and the standard library",
    )
    parser.add_argument("--short", type=pathlib.Path, help="new folder for short documents")
    parser.add_argument("--short-bytes", type=int, default=128, help="of a short document (default %(default)s)")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    paths = sysconfig.get_paths()
    roots = options.roots or [pathlib.Path(paths[name]) for name in ("purelib", "stdlib")]
    total, count, seen = 0, 0, set()
    for root in roots:
        for text in documents(root):
            digest = hashlib.sha256(text.encode()).hexdigest()[:16]
            if digest in seen or total >= options.megabytes * 1e6:
                continue
            seen.add(digest)
            (options.output / f"{digest}.txt").write_text(text)
            total, count = total + len(text), count + 1
    print(f"{count:,} documents, {total / 1e6:.1f} MB in {options.output}")
    if options.short:
        take_short(options.output, options.short, options.short_bytes)


if __name__ == "__main__":
    main()
