r"""Exports a trained model as safetensors, and imports dense Llama-style checkpoints.

    python -m nsa_jax.export runs/quickstart exported/quickstart
    python -m nsa_jax.export --import-from=TinyLlama-1.1B --attention=nsa imported/tinyllama-nsa --text notes.txt

An export is a directory in the Hugging Face layout: model.safetensors (in shards if large), config.json and the
tokenizer's files. `nsa_jax.load` reads it back bit-equal; generate and evaluate take it in place of a workdir. The
metadata of the safetensors files hold a checksum of each array, which is verified when the array is read.

The import reads safetensors checkpoints (also sharded) with grouped-query attention, RoPE, RMSNorm and SwiGLU (Llama,
and Mistral or Qwen models without biases, norms of queries and keys, or scaled RoPE) and writes an export. With
--attention=nsa, each branch's keys and values begin as the dense ones, compression as the mean, and gates give every
branch a third; the model then needs continued training. --text reports the loss before that, on files.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from nsa_jax.data import DataError, Tokenizer, load_tokenizer
from nsa_jax.data.sources import TextSource
from nsa_jax.data.tokenizers import ByteTokenizer
from nsa_jax.devices import choose_platform
from nsa_jax.evaluate.scoring import Scorer, score_documents
from nsa_jax.hub.convert import import_dense, imported_config
from nsa_jax.hub.export import export, load_exported
from nsa_jax.hub.export_files import LoadError, file_in
from nsa_jax.hub.load import load
from nsa_jax.nn import Transformer

__all__ = ["export", "import_dense", "imported_config", "load_exported", "main", "step_zero_losses"]

EXIT_USAGE = 2


def _import(args: argparse.Namespace) -> None:
    source, target = Path(args.import_from), Path(args.path)
    model, config = import_dense(source, attention=args.attention)
    given = args.tokenizer or (source / "tokenizer.json")
    if not args.tokenizer and os.path.lexists(given):
        file_in(source, "tokenizer.json")
    if str(given) == "byte":
        tokenizer: Tokenizer = ByteTokenizer()
    else:
        if not Path(given).is_file():
            raise LoadError(f"{given} is no file; name a tokenizer.json with --tokenizer, or --tokenizer=byte")
        config.data.tokenizer, config.data.tokenizer_path = "hf", str(Path(given).absolute())
        tokenizer = load_tokenizer(config)
    export(model, tokenizer, config, target)
    print(f"imported {source} as {args.attention} model into {target}")
    if args.text:
        models = {"dense": import_dense(source)[0], args.attention: model}
        for name, loss in step_zero_losses(models, tokenizer, args.text, min(config.data.seq_len, 4096)).items():
            print(f"loss at step 0, {name}: {loss:.4f} nats per token")


def step_zero_losses(
    models: dict[str, Transformer], tokenizer: Tokenizer, files: Sequence[str], context: int
) -> dict[str, float]:
    """Nats per token of several models on text files, in windows of `context` tokens."""
    documents = [tokenizer.encode(text) for text in TextSource(tuple(files)).documents()]
    documents = [document[: 64 * context] for document in documents if len(document)]
    token_bytes = np.asarray(tokenizer.token_bytes)
    return {
        name: score_documents(
            Scorer(model), documents, token_bytes, tokenizer.eos_id, context=context, stride=context, batch_size=1
        )["loss"]
        for name, model in models.items()
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m nsa_jax.export", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "path", help="what to export: a workdir (WORKDIR@STEP, WORKDIR@best); with --import-from: OUTPUT"
    )
    parser.add_argument("output", nargs="?", help="directory to write")
    parser.add_argument("--import-from", help="directory of a dense Llama-style checkpoint")
    parser.add_argument("--attention", choices=("dense", "nsa"), default="nsa", help="of the imported model")
    parser.add_argument("--tokenizer", help="import: a tokenizer.json, or byte; default: the checkpoint's")
    parser.add_argument("--text", nargs="+", default=[], help="import: report the loss before training on these files")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """The command line tool; returns the exit status."""
    args = _parser().parse_args(argv)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    logging.getLogger("absl").setLevel(logging.ERROR)
    choose_platform()
    try:
        if args.import_from:
            _import(args)
            return 0
        if not args.output:
            raise LoadError("name the directory to write: python -m nsa_jax.export WORKDIR OUTPUT")
        model, tokenizer, config = load(args.path)
        export(model, tokenizer, config, args.output)
        print(f"exported {args.path} to {args.output}")
    except (LoadError, DataError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USAGE
    return 0


if __name__ == "__main__":
    sys.exit(main())
