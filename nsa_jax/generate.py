r"""Generates text from a trained model with the sparse cache.

    python -m nsa_jax.generate runs/quickstart --prompt "def "
    python -m nsa_jax.generate runs/quickstart --prompt-file notes.txt --temperature 0.8 --top-p 0.95 --max-tokens 400
    python -m nsa_jax.generate runs/quickstart --interactive

The text streams to standard output. Measured times go to standard error. From Python:

    from nsa_jax.generator import Generator

    model, tokenizer, config = nsa_jax.load("runs/quickstart")
    completions = Generator(model, tokenizer, context=config.data.seq_len)(["def "], max_tokens=100)
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from nsa_jax.command_line import number, run_program, silence
from nsa_jax.generator import Completion, Generator, PromptError, Stats
from nsa_jax.hub.generation import is_imported
from nsa_jax.hub.load import load
from nsa_jax.sampling import Sampling


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m nsa_jax.generate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("path", help="a run's workdir (WORKDIR@STEP, WORKDIR@best) or an exported model")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--prompt", help="text to continue; empty or absent: a new document")
    source.add_argument("--prompt-file", type=Path, help="continue the contents of this file; - is standard input")
    source.add_argument("--interactive", action="store_true", help="read prompts line by line; /help lists commands")
    parser.add_argument(
        "--max-tokens", type=number(int, 1), default=128, help="new tokens per sample (default %(default)s)"
    )
    parser.add_argument("--num-samples", type=number(int, 1), default=1, help="samples of the prompt, in one batch")
    parser.add_argument(
        "--context", type=number(int, 2), help="tokens that prompt and text may have; default: the training length"
    )
    parser.add_argument(
        "--tokens-per-dispatch",
        type=number(int, 1),
        default=8,
        help="the text arrives in pieces of so many tokens; 1 for a large model on a CPU (default %(default)s)",
    )
    parser.add_argument("--greedy", action="store_true", help="always the most likely token (temperature 0)")
    parser.add_argument("--temperature", type=float, default=0.8, help="default %(default)s")
    parser.add_argument("--top-k", type=int, default=0, help="0: off")
    parser.add_argument("--top-p", type=float, default=0.95, help="1: off (default %(default)s)")
    parser.add_argument("--min-p", type=float, default=0.0, help="0: off")
    parser.add_argument("--repetition-penalty", type=float, default=1.0, help="1: off")
    begins = parser.add_mutually_exclusive_group()
    begins.add_argument(
        "--bos",
        action="store_true",
        default=None,
        help="begin the prompt as the tokenizer begins a text in transformers; default: for imported models",
    )
    begins.add_argument("--no-bos", dest="bos", action="store_false", default=None, help="begin it with its own text")
    parser.add_argument("--stop", action="append", default=[], help="end before this string; repeatable")
    parser.add_argument("--seed", type=number(int, 0), default=0)
    parser.add_argument("--quiet", action="store_true", help="print the text only")
    return parser


def _report(stats: Stats, completions: list[Completion]) -> str:
    ends = ", ".join(sorted({c.finish for c in completions}))
    rate = f", then {stats.tokens_per_s:,.1f} tokens/s" if stats.tokens_per_s else ""
    return (
        f"{stats.prompt_tokens:,} prompt tokens, {stats.new_tokens:,} new ({ends}); first token after "
        f"{stats.first_token_s:.2f} s with compilation{rate}; cache {stats.cache['total_mib']:.1f} MiB"
    )


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _run_once(
    generator: Generator,
    prompt: str | Sequence[int],
    args: argparse.Namespace,
    sampling: Sampling,
    shown: list[str],
) -> None:
    """Generates and prints; `shown` gets the pieces of the first sample's text as they are printed."""

    def on_text(row: int, text: str) -> None:
        if row == 0:
            shown.append(text)
            _write(text)

    completions = generator(
        [prompt],
        max_tokens=args.max_tokens,
        sampling=sampling,
        stop=args.stop,
        num_samples=args.num_samples,
        on_text=on_text,
    )
    _write("\n")
    for index, completion in enumerate(completions[1:], 2):
        _write(f"--- sample {index} ---\n{completion.text}\n")
    if not args.quiet:
        print(_report(generator.stats, completions), file=sys.stderr)


_HELP = """Each line is added to the text so far, and the model continues it: it was trained on text, not to answer.
/reset forgets the text so far, /quit or Ctrl-D ends, Ctrl-C stops the text, /help shows this."""


def _is_command(line: str) -> bool:
    """Whether a line is "/word"; a prompt such as "/usr/bin" is none."""
    return line.startswith("/") and line[1:].isalpha()


def _interact(generator: Generator, args: argparse.Namespace, sampling: Sampling) -> None:
    """Reads lines and continues the text so far after each, until /reset."""
    if sys.stdin is None:  # closed: there are no lines
        return
    reconfigure = getattr(sys.stdin, "reconfigure", None)
    if reconfigure:  # odd bytes arrive as they do in arguments, where most locales would refuse the line
        reconfigure(errors="surrogateescape")
    if not args.quiet and sys.stdin.isatty():
        limit = f"{generator.context:,} tokens" if generator.context else "no limit"
        print(f"{args.path}: context {limit}, up to {args.max_tokens:,} new tokens a line\n{_HELP}", file=sys.stderr)
    history = ""
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "")
        except (EOFError, KeyboardInterrupt):
            return
        if line == "/quit":
            return
        if line == "/reset":
            history = ""
            continue
        if line == "/help":
            print(_HELP, file=sys.stderr)
            continue
        if _is_command(line):
            print(f"{line} is no command; /help lists them. A space before it makes it a prompt", file=sys.stderr)
            continue
        shown: list[str] = []
        try:
            history += line
            _run_once(generator, history, args, sampling, shown)
        except PromptError as error:
            print(f"{error}; the text so far is forgotten", file=sys.stderr)
            history = ""
        except KeyboardInterrupt:
            _write("\n")
        history += "".join(shown)  # also of a text that was stopped: it is what the next line continues


def _prompt(args: argparse.Namespace) -> str | bytes:
    if args.prompt_file is None:
        return args.prompt or ""
    if str(args.prompt_file) == "-":
        if sys.stdin is None:
            raise PromptError("--prompt-file=-: the standard input is closed; pipe a text, or name a file")
        return sys.stdin.buffer.read()
    try:
        return args.prompt_file.read_bytes()
    except OSError as error:
        raise PromptError(f"--prompt-file={args.prompt_file}: {error.strerror}") from error


def _generate(args: argparse.Namespace) -> None:
    sampling = Sampling(
        repetition_penalty=args.repetition_penalty,
        temperature=0.0 if args.greedy else args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        seed=args.seed,
    )
    model, tokenizer, config = load(args.path)
    generator = Generator(
        model,
        tokenizer,
        context=args.context or config.data.seq_len,
        tokens_per_dispatch=args.tokens_per_dispatch,
        bos=is_imported(tokenizer) if args.bos is None else args.bos,
    )
    if args.interactive:
        return _interact(generator, args, sampling)
    prompt = _prompt(args)
    ids = generator.prompt_ids(prompt).tolist()
    generator.check([ids])  # before it is printed
    if not prompt and not args.quiet:
        begin = tokenizer.decode(ids)
        print(f"empty prompt: a new document is started with {begin!r}", file=sys.stderr)
    elif not args.quiet:
        _write(prompt.decode("utf-8", "replace") if isinstance(prompt, bytes) else prompt)
    _run_once(generator, ids, args, sampling, [])


def main(argv: Sequence[str] | None = None) -> int:
    """The command line tool; returns the exit status."""
    args = _parser().parse_args(argv)

    def work() -> None:
        try:
            _generate(args)
        except BrokenPipeError:  # who reads the text, such as head, has enough of it
            silence(sys.stdout)

    return run_program(work)


if __name__ == "__main__":
    sys.exit(main())
