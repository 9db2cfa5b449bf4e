r"""Exports a trained model as safetensors: to be loaded here, or by transformers.

    python -m nsa_jax.export runs/quickstart exported/quickstart
    python -m nsa_jax.export runs/quickstart exported/for_transformers --format=transformers

An export is a directory in the Hugging Face layout: model.safetensors (in shards if large), config.json and the
tokenizer's files. `nsa_jax.load` reads it back bit-equal; generate and evaluate take it in place of a workdir. The
metadata of the safetensors files hold a checksum of each array, which is verified when the array is read. An earlier
export is replaced when the new one is whole; a directory that holds something else is refused (see --overwrite).

With --format=transformers a model becomes a folder that transformers loads. That of an NSA model holds PyTorch code,
which transformers runs with trust_remote_code=True. A model with dense or window attention becomes a Llama, a Mistral,
a Qwen2 or a Qwen3 that transformers loads by itself; `python -m nsa_jax.convert` reads it back bit-equal.

With --import-from=CHECKPOINT the arguments are those of `python -m nsa_jax.convert`, which does the work; without it
they are refused.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from nsa_jax.command_line import run_program
from nsa_jax.convert import OVERWRITE, add_arguments, convert, parse_arguments, step_zero_losses
from nsa_jax.hub.convert import import_dense, imported_config
from nsa_jax.hub.export import export, load_exported
from nsa_jax.hub.export_files import LoadError
from nsa_jax.hub.load import load_recorded, local_directory
from nsa_jax.hub.native import export_native
from nsa_jax.hub.output import check_output

__all__ = [
    "export",
    "export_native",
    "import_dense",
    "imported_config",
    "load_exported",
    "main",
    "step_zero_losses",
]


def _import_options(argv: Sequence[str], overrides: Sequence[str]) -> list[str]:
    """Names of the options among the arguments that only an import reads."""
    parser = argparse.ArgumentParser(add_help=False)
    add_arguments(parser)
    others = parser.parse_known_args(argv)[1]
    given = [text for text in argv if text.startswith("--") and text not in others]
    return [text.partition("=")[0] for text in [*given, *(f"--config.{text}" for text in overrides)]]


def _export(args: argparse.Namespace, overrides: Sequence[str], import_options: Sequence[str]) -> None:
    if args.import_from:
        if args.output:
            raise LoadError(f"{args.output}: with --import-from=CHECKPOINT name one directory, the one to write")
        args.checkpoint, args.output = args.import_from, args.path
        return convert(args, overrides)
    if import_options:
        raise LoadError(
            f"{', '.join(import_options)}: only with --import-from=CHECKPOINT; a model is exported as it is. Fix: "
            "leave this out, or convert the checkpoint that the model came from"
        )
    if not args.output:
        raise LoadError("name the directory to write: python -m nsa_jax.export WORKDIR OUTPUT")
    source, output = local_directory(args.path), Path(args.output)
    if source is not None and output.exists() and source.exists() and output.samefile(source):
        raise LoadError(f"{args.output}: is what is to be exported; name another directory to write")
    check_output(args.output, args.overwrite)
    model, tokenizer, config, metrics = load_recorded(args.path)
    if args.format == "transformers":
        export_native(model, tokenizer, config, args.output, metrics=metrics, overwrite=args.overwrite)
    else:
        export(model, tokenizer, config, args.output, overwrite=args.overwrite)
    print(f"exported {args.path} to {args.output}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m nsa_jax.export", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "path", help="what to export: a workdir (WORKDIR@STEP, WORKDIR@best); with --import-from: OUTPUT"
    )
    parser.add_argument("output", nargs="?", help="directory to write")
    parser.add_argument("--overwrite", action="store_true", help=OVERWRITE)
    parser.add_argument(
        "--format",
        choices=("nsa_jax", "transformers"),
        default="nsa_jax",
        help="who is to load it: nsa_jax.load (default), or transformers",
    )
    group = parser.add_argument_group("import")
    group.add_argument("--import-from", metavar="CHECKPOINT", help="as python -m nsa_jax.convert CHECKPOINT OUTPUT")
    add_arguments(group)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """The command line tool; returns the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    args, overrides = parse_arguments(_parser(), argv)
    return run_program(lambda: _export(args, overrides, _import_options(argv, overrides)))


if __name__ == "__main__":
    sys.exit(main())
