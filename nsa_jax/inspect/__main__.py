"""Makes one HTML file in which a reader explores what runs read in a text: click a token, see the blocks.

    python -m nsa_jax.inspect runs/quickstart --text notes.txt
    python -m nsa_jax.inspect runs/quickstart runs/wider --text notes.txt --html comparison.html

The file contains everything and opens from disk without a network. A run is shown at each of its kept checkpoints
(config.train.keep_last and keep_every say which are kept), RUN@STEP and RUN@best at one. Runs that are compared have
the same tokenizer.
"""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from nsa_jax.command_line import number, run_program
from nsa_jax.data import Tokenizer
from nsa_jax.hub.export_files import LoadError
from nsa_jax.hub.load import checkpoints_of, load, local_directory
from nsa_jax.hub.output import check_writable
from nsa_jax.inspect.exploration import MAX_TOKENS, Exploration
from nsa_jax.nn import Transformer


def _undamaged(path: str) -> Iterator[tuple[int | None, Transformer, Tokenizer]]:
    """Step, model and tokenizer of the checkpoints that are whole; `load` warns of the others."""
    places = checkpoints_of(path)
    whole = 0
    for index, (step, place) in enumerate(places):
        try:
            model, tokenizer, _ = load(place)
        except LoadError:
            if not whole and index + 1 == len(places):
                raise
            continue
        whole += 1
        yield step, model, tokenizer


def explore_runs(paths: Sequence[str], text: str, max_tokens: int) -> Exploration:
    """The exploration of a text by every kept checkpoint of some runs.

    Args:
      paths: as `nsa_jax.load` takes them.
      text: one document.
      max_tokens: tokens of it to keep.

    Raises:
      LoadError: something cannot be loaded, or the runs have different tokenizers.
      ValueError: the text is empty, or a model has no NSA layers.
    """
    found = None
    names = {path: Path(path).absolute().name for path in paths}  # "." has the directory's
    for path in names:
        name = names[path] if len(set(names.values())) == len(names) else path
        for step, model, tokenizer in _undamaged(path):
            tokenizer.check_fits(model.config.vocab_size)
            if found is None:
                found, first = Exploration(tokenizer, text, max_tokens), tokenizer
            elif tokenizer.fingerprint != first.fingerprint:
                raise LoadError(
                    f"{path}: its tokenizer is {tokenizer.fingerprint}, and that of {paths[0]} is {first.fingerprint}. "
                    "Fix: compare runs of the same tokenizer"
                )
            found.add(model, name, step)
    assert found is not None
    return found


def _write(args: argparse.Namespace) -> None:
    if args.text == "-" and sys.stdin is None:
        raise ValueError("--text=-: the standard input is closed; pipe a text, or name a FILE")
    try:
        raw = sys.stdin.buffer.read() if args.text == "-" else Path(args.text).read_bytes()
        text = io.TextIOWrapper(io.BytesIO(raw), encoding="utf-8").read()  # whatever the locale
    except UnicodeDecodeError as error:
        raise ValueError(f"--text={args.text}: not UTF-8 ({error.reason} at byte {error.start:,})") from error
    except OSError as error:
        what = f"--text={args.text}: cannot be read ({error.strerror})"
        raise ValueError(f"{what}; --text names a FILE, and - is the standard input") from error
    directory = local_directory(args.runs[0])
    if args.html is None and directory is None:
        raise ValueError(f"{args.runs[0]}: name a file to write with --html")
    out = args.html or Path(directory or "") / "explore.html"
    if args.html and not args.html.parent.is_dir():
        raise ValueError(f"--html={args.html}: there is no directory {args.html.parent}")
    if out.is_dir():
        raise ValueError(f"--html={out}: a directory; name a file")
    check_writable(out.parent, "name another place with --html")
    found = explore_runs(args.runs, text, args.tokens)
    if found.left_out:
        print(f"the first {len(found.tokens):,} tokens are shown, {found.left_out:,} are left out (--tokens)")
    size = found.save(out).stat().st_size
    print(f"{out} ({size / 1e6:.1f} MB, {len(found.tokens):,} tokens, {len(found.views)} checkpoints)")


def main(argv: Sequence[str] | None = None) -> int:
    """The command line tool; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m nsa_jax.inspect", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a workdir (RUN@STEP, RUN@best) or an exported model")
    parser.add_argument("--text", required=True, metavar="FILE", help="what is read, UTF-8; - is standard input")
    parser.add_argument("--html", type=Path, metavar="FILE", help="to write; default: explore.html of the first run")
    parser.add_argument(
        "--tokens",
        type=number(int, 1, MAX_TOKENS),
        default=2048,
        help="how many tokens of the text to keep (default 2048)",
    )
    args = parser.parse_args(argv)
    return run_program(lambda: _write(args))


if __name__ == "__main__":
    sys.exit(main())
