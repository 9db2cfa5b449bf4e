"""Converts a dense checkpoint of today to a model of nsa_jax, with NSA in the place of dense attention.

    python -m nsa_jax.convert Llama-3.2-1B converted/llama-nsa
    python -m nsa_jax.convert Qwen/Qwen3-0.6B converted/qwen-dense --attention=dense --dtype=float32
    python -m nsa_jax.convert Qwen/Qwen3-0.6B converted/qwen-mixed --layer-pattern=nsa,dense
    python -m nsa_jax.convert Qwen/Qwen3-0.6B converted/qwen-some --dense-layers=3 --text books/*.txt
    python -m nsa_jax.convert Qwen/Qwen3-0.6B converted/qwen-fast --dense-layers=3 --nsa-layers=8 --text books/*.txt
    python -m nsa_jax.convert Qwen/Qwen3-0.6B converted/qwen-nsa --config.model.nsa.num_selected=32

CHECKPOINT is a directory with config.json and safetensors, or the id of a model on the Hugging Face hub. OUTPUT is an
export, which `nsa_jax.load`, generate, evaluate and `train.py --resume` take; an earlier export is replaced. The
tokenizer, its chat template and the settings of generation are kept.

Supported are Llama 2 and 3, SmolLM2, Mistral, Qwen2, Qwen2.5 and Qwen3 (dense). What else a checkpoint has is refused
by name before any of its arrays is read. An NSA model begins close to the dense one (see --gate) and then needs
continued training; --text reports the loss of both before that, on files. Few layers of a dense model fetch what lies
far back: --dense-layers finds them on these files, and leaves them dense. With --nsa-layers those that come next have
NSA, and all others its window alone.
"""

from __future__ import annotations

import argparse
import logging
import os
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from ml_collections import ConfigDict

from nsa_jax.command_line import number, override, run_program
from nsa_jax.data import Tokenizer, load_tokenizer
from nsa_jax.data.sources import TextSource
from nsa_jax.data.tokenizers import TEMPLATES, ByteTokenizer
from nsa_jax.evaluate.far_layers import FarLayers, far_layers
from nsa_jax.evaluate.scoring import Scorer, score_documents
from nsa_jax.fields import ConfigError, Problem
from nsa_jax.hub.convert import GATE, check_import, import_dense
from nsa_jax.hub.export import export
from nsa_jax.hub.export_files import ADAPTER, INDEX, WHOLE, LoadError, file_in, read_json, shortened
from nsa_jax.hub.families import sliding_window
from nsa_jax.hub.generation import keep_generation
from nsa_jax.hub.output import TOKENIZER_FILES, check_output
from nsa_jax.nn import Transformer

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
_HUB_FILES = ["*.json", "model*.safetensors", "*.jinja"]
_NEW_FIELDS = ("model.nsa.", "model.compressor=", "data.tokenizer_eos=")  # what a dense checkpoint leaves open

# Which layers need to read far is found in so many rows of at most so many tokens; the others see so many of the last.
_FAR_ROWS, _FAR_TOKENS, _NEAR_TOKENS = 32, 2048, 128

OVERWRITE = "write into a directory that holds something else than an earlier export, unless that is a run"


def find_checkpoint(name: str) -> Path:
    """The directory of a checkpoint: a local one, or that of a model of the Hugging Face hub, which is fetched.

    Raises:
      LoadError: there is neither.
    """
    path = Path(name)
    if path.is_dir():
        return path
    if not _HUB_ID.fullmatch(name) or os.path.lexists(path):
        raise LoadError(f"{name} is no directory; give a checkpoint's directory, or a hub id such as OWNER/MODEL")
    try:
        import huggingface_hub
    except ImportError:
        raise LoadError(f"{name} is no directory, and without huggingface_hub no hub id: pip install it") from None
    try:
        fetched = Path(huggingface_hub.snapshot_download(name, allow_patterns=_HUB_FILES))
    except Exception as error:
        raise LoadError(
            f"{name} is no directory, and is not to be had from the Hugging Face hub "
            f"({type(error).__name__}: {shortened(error)}). Fix: correct the id, check the network, or give a directory"
        ) from error
    if not any((fetched / weights).exists() for weights in (WHOLE, INDEX, ADAPTER)):  # others are not fetched
        raise LoadError(
            f"{name}: holds no {WHOLE} and no {INDEX} on the Hugging Face hub. Fix: load it with transformers, save it "
            "with save_pretrained, which writes safetensors, and give that directory"
        )
    return fetched


def _tokenizer(given: str | None, source: Path, config: ConfigDict) -> Tokenizer:
    """The tokenizer that was asked for, or the checkpoint's own."""
    path = Path(given) if given else source / "tokenizer.json"
    if not given:
        for name in (*TOKENIZER_FILES, *(str(file.relative_to(source)) for file in source.glob(TEMPLATES))):
            if os.path.lexists(source / name):
                file_in(source, name)
    if given == "byte":
        tokenizer: Tokenizer = ByteTokenizer()
    elif path.is_file():
        config.data.tokenizer, config.data.tokenizer_path = "hf", str(path.absolute())
        tokenizer = load_tokenizer(config)
    else:
        raise LoadError(f"{path} is no file; name a tokenizer.json with --tokenizer, or --tokenizer=byte")
    if tokenizer.vocab_size > config.model.vocab_size:
        fix = f"add rows with transformers, resize_token_embeddings({tokenizer.vocab_size}), and save it again"
        fix = "give the tokenizer.json of the checkpoint" if given else fix
        raise LoadError(
            f"{'--tokenizer=byte' if given == 'byte' else path}: its ids go up to {tokenizer.vocab_size - 1}, but the "
            f"embedding has {config.model.vocab_size} rows. Fix: {fix}"
        )
    if not given:
        keep_generation(tokenizer, source, read_json(source, "config.json"))
    return tokenizer


def _set_fields(config: ConfigDict, overrides: Sequence[str]) -> None:
    """Sets the fields that the command line names; ConfigError if one is wrong or the checkpoint decides it."""
    problems = override(config, overrides)
    for text in overrides:
        name = text.partition("=")[0]
        if not problems and name == "model.nsa.gate_bias":
            problems.append(Problem("R057", "error", f"--config.{name}: gates begin where --gate says", "use --gate"))
        if not problems and not text.startswith(_NEW_FIELDS):
            message = f"--config.{name}: the checkpoint and the other options decide it"
            fix = "here set fields of config.model.nsa, config.model.compressor or config.data.tokenizer_eos alone"
            problems.append(Problem("R057", "error", message, fix))
    if problems:
        raise ConfigError(problems)


def convert(args: argparse.Namespace, overrides: Sequence[str] = ()) -> None:
    """Does what the command line of `nsa_jax.convert` asks for.

    Args:
      args: as `add_arguments` declares them, with `checkpoint`, `output` and `overwrite`.
      overrides: fields of the config that a dense checkpoint leaves open, such as "model.nsa.num_selected=32".

    Raises:
      LoadError, DataError: the checkpoint or its tokenizer cannot be used, or the output cannot be written.
      ConfigError: an override is wrong.
    """
    target = Path(args.output)
    if target.exists() and Path(args.checkpoint).exists() and target.samefile(args.checkpoint):
        raise LoadError(f"{target}: is the checkpoint itself; name another directory to write")
    check_output(target, args.overwrite)
    source = find_checkpoint(args.checkpoint)
    if args.dense_layers and not args.text:
        raise LoadError("--dense-layers: name files with --text, in which to find the layers that need to read far")
    if args.nsa_layers is not None and not args.dense_layers:
        raise LoadError("--nsa-layers: goes with --dense-layers, which layers stay dense before NSA takes its share")
    options = {"dtype": args.dtype, "seq_len": args.seq_len, "edit": lambda config: _set_fields(config, overrides)}
    kind = {"attention": args.attention, "layer_pattern": args.layer_pattern, "shared_kv": args.shared_kv}
    if args.dense_layers:  # how many layers are of which kind is known now, and which ones only after a long search
        num_layers = check_import(source, **options)[2].num_layers
        _check_counts(args, num_layers)
        kind["layer_pattern"] = _pattern(args, num_layers, range(num_layers))
    _, config, model_config = check_import(source, **kind, **options)
    if args.gate is not None and "nsa" not in model_config.kinds:
        raise LoadError(f"--gate={args.gate}: no layer has NSA, whose gate it is; leave it out")
    tokenizer = _tokenizer(args.tokenizer, source, config)
    context = min(config.data.seq_len, 4096)
    text = _first_tokens(tokenizer, args.text, context) if args.text else None
    if args.dense_layers:
        rows = _far_rows(args, config, tokenizer)
        dense, _ = import_dense(source, attention="dense", **options)
        found = _far_layers(dense, config, rows, args.dense_layers + (args.nsa_layers or 0))
        kind["layer_pattern"] = _pattern(args, num_layers, found.layers)
        del dense
    model, config = import_dense(source, **kind, gate=GATE if args.gate is None else args.gate, **options)
    if args.tokenizer != "byte":
        config.data.tokenizer, config.data.tokenizer_path = "hf", str((target / "tokenizer.json").absolute())
    config.train.eval_batches = 0  # no run has validated it, so that evaluate has none to repeat
    export(model, tokenizer, config, target, overwrite=args.overwrite)
    kinds = _by_layer(kind["layer_pattern"]) if args.dense_layers else ", ".join(model.config.kinds)
    print(f"converted {args.checkpoint} to {kinds} attention: {target}")
    if text:
        window, _ = sliding_window(read_json(source, "config.json"), source)
        was = "window" if 0 < window < config.data.seq_len else "dense"
        models = {was: import_dense(source, attention=was, **options)[0]} if "nsa" in model.config.kinds else {}
        for name, loss in _losses(models | {kinds: model}, tokenizer, text, context).items():
            print(f"loss at step 0, {name}: {loss:.4f} nats per token")


def _documents(tokenizer: Tokenizer, files: Sequence[str], characters: int | None = None) -> Iterator[np.ndarray]:
    """Tokens of the documents of text files, cut after so many characters.

    A document begins with what the tokenizer puts before a text in transformers.
    """
    prefix = np.asarray(tokenizer.prefix_ids, np.int32)
    for text in TextSource(tuple(files)).documents():
        tokens = tokenizer.encode(text[:characters])
        if len(tokens):
            yield np.concatenate([prefix, tokens])


def _check_counts(args: argparse.Namespace, num_layers: int) -> None:
    """Raises LoadError if --dense-layers and --nsa-layers ask for more layers than the model has."""
    if args.dense_layers >= num_layers:
        raise LoadError(
            f"--dense-layers={args.dense_layers}: must be less than the model's {num_layers} layers; for dense "
            "attention in all of them use --attention=dense"
        )
    if args.dense_layers + (args.nsa_layers or 0) > num_layers:
        raise LoadError(
            f"--dense-layers={args.dense_layers} --nsa-layers={args.nsa_layers}: the model has {num_layers} layers; "
            "without --nsa-layers all that do not stay dense have NSA"
        )


def _pattern(args: argparse.Namespace, num_layers: int, order: Sequence[int]) -> tuple[str, ...]:
    """Kinds of the layers: in this order as many are dense and have NSA as is asked for, and the rest have a window.

    Without --nsa-layers the rest have NSA, too.
    """
    dense = args.dense_layers
    nsa = num_layers if args.nsa_layers is None else args.nsa_layers
    kinds = dict.fromkeys(range(num_layers), "nsa" if args.nsa_layers is None else "window")
    kinds |= dict.fromkeys(order[: dense + nsa], "nsa") | dict.fromkeys(order[:dense], "dense")
    return tuple(kinds.values())


def _by_layer(pattern: Sequence[str]) -> str:
    """Kinds of the layers in words: that of the rest, and which layers are of another one."""
    rest = "window" if "window" in pattern else "nsa"
    places = {kind: [str(i) for i, its in enumerate(pattern) if its == kind] for kind in ("dense", "nsa")}
    return ", ".join(
        [rest, *(f"in layers {', '.join(at)} {kind}" for kind, at in places.items() if at and kind != rest)]
    )


def _far_rows(args: argparse.Namespace, config: ConfigDict, tokenizer: Tokenizer) -> np.ndarray:
    """Rows of --text in which to look for the layers that need to read far, int [R, T + 1], R at most 32.

    They are taken evenly from the first 256 rows of the files.
    """
    length = min(config.data.seq_len, _FAR_TOKENS)
    if length < 16:
        raise LoadError(f"--seq-len={length}: must be at least 16 to find layers that need to read far")
    found = np.zeros((0, length + 1), np.int32)
    for tokens in _documents(tokenizer, args.text, 16 * length):
        whole = len(tokens) // (length + 1)
        found = np.concatenate([found, tokens[: whole * (length + 1)].reshape(whole, length + 1)])
        if len(found) >= 8 * _FAR_ROWS:
            break
    if not len(found):
        raise LoadError(
            f"--text: no document has {length + 1} tokens, so that no layer could read far in it. Fix: give longer "
            "texts, or a smaller --seq-len"
        )
    return found[np.unique(np.linspace(0, len(found) - 1, min(len(found), _FAR_ROWS)).astype(int))]


def _far_layers(model: Transformer, config: ConfigDict, rows: np.ndarray, count: int) -> FarLayers:
    """The layers of a dense model that need to read far, which are printed as they are found."""
    length, nsa = rows.shape[1] - 1, config.model.nsa
    near, first = min(_NEAR_TOKENS, length // 4), min(nsa.num_initial * nsa.select_block, length // 8)

    def tell(found: FarLayers) -> None:
        index = len(found.layers) - 1
        if not index:
            seen = f"where layers see the first {first} and the last {near} tokens alone: {found.near:.4f}"
            print(f"loss in rows of {length} tokens: {found.full:.4f}; {seen}")
        what = f"{'also ' if index else ''}layer {found.layers[index]} (the first is 0) sees all"
        share = f", {found.share(index):.0%} of the way" if found.clear else ""
        print(f"{what}: {found.losses[index]:.4f}{share}", flush=True)

    passes = count * model.config.num_layers
    print(f"looking for the layers that read far: about {passes:,} times {len(rows) * length:,} tokens", flush=True)
    found = far_layers(model, rows, count, near=near, first=first, on_found=tell)
    if not found.clear:
        logging.warning(
            "reading further gains the model %.4f nats here, while the view of a single layer changes its loss by up "
            "to %.4f: these layers may mean nothing. Fix: give --text in which it pays to look back",
            found.near - found.full, max(abs(found.near - loss) for loss in found.alone),
        )  # fmt: skip
    return found


def _first_tokens(
    tokenizer: Tokenizer, files: Sequence[str], context: int, limit: int = 1 << 20
) -> tuple[list[np.ndarray], list[int]]:
    """Documents of the first `limit` tokens of text files, and the indices of those that were cut.

    Of one document at most 64 windows of `context` tokens are taken. No more of the files is read.

    Raises:
      LoadError: the files hold no text.
      DataError: a file cannot be read.
    """
    documents: list[np.ndarray] = []
    cut: list[int] = []
    room = limit
    for tokens in _documents(tokenizer, files):
        longest = min(64 * context, room)
        if len(tokens) > longest:
            cut.append(len(documents))
        documents.append(tokens[:longest])
        room -= len(documents[-1])
        if room <= 0:
            break
    if not documents:
        raise LoadError(f"--text: these files hold no text: {', '.join(files)}. Fix: name files with text in them")
    return documents, cut


def _losses(
    models: dict[str, Transformer], tokenizer: Tokenizer, text: tuple[list[np.ndarray], list[int]], context: int
) -> dict[str, float]:
    """Nats per token of several models on what `_first_tokens` returned."""
    documents, cut = text
    given = (documents, np.asarray(tokenizer.token_bytes), tokenizer.eos_id)
    return {
        name: score_documents(Scorer(model), *given, context=context, stride=context, batch_size=1, cut=cut)["loss"]
        for name, model in models.items()
    }


def step_zero_losses(
    models: dict[str, Transformer], tokenizer: Tokenizer, files: Sequence[str], context: int, limit: int = 1 << 20
) -> dict[str, float]:
    """Nats per token of several models on the first `limit` tokens of text files, in windows of `context` tokens.

    Of one document at most 64 windows are taken.

    Raises:
      LoadError: the files hold no text.
      DataError: a file cannot be read.
    """
    return _losses(models, tokenizer, _first_tokens(tokenizer, files, context, limit), context)


def add_arguments(parser: argparse._ActionsContainer) -> None:
    """Declares the options of an import."""
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument(
        "--attention", choices=("nsa", "dense", "window"), default="nsa", help="of the model (default %(default)s)"
    )
    kinds.add_argument(
        "--layer-pattern",
        type=lambda text: tuple(part.strip() for part in text.split(",")),
        default=(),
        metavar="KINDS",
        help="instead of --attention, kinds that the layers repeat, such as nsa,dense",
    )
    kinds.add_argument(
        "--dense-layers",
        type=number(int, 1),
        default=0,
        metavar="N",
        help="NSA but in the N layers that need to read far most, found on --text: of these files, rows of "
        f"{_FAR_TOKENS:,} tokens",
    )
    parser.add_argument(
        "--nsa-layers",
        type=number(int, 0),
        metavar="M",
        help="with --dense-layers: NSA in the M layers that come next, and in all others a window alone, of "
        "config.model.nsa.window tokens; default: NSA in all others",
    )
    parser.add_argument(
        "--gate",
        type=number(float, 0.0, 0.99),
        metavar="EPS",
        help=f"NSA: the compressed branch's gate at first; 0: dense attention on short rows (default {GATE})",
    )
    parser.add_argument(
        "--shared-kv",
        "--shared_kv",
        action="store_true",
        help="NSA: one projection of keys and values for all branches",
    )
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), help="of the parameters; default: the checkpoint's, or float32"
    )
    parser.add_argument(
        "--seq-len", type=number(int, 1), help="tokens of rows; default: the checkpoint's max_position_embeddings"
    )
    parser.add_argument("--tokenizer", help="a tokenizer.json, or byte; default: the checkpoint's")
    parser.add_argument(
        "--text",
        nargs="+",
        default=[],
        help="report the loss before training on the first million tokens of these files, and look in them for the "
        "layers of --dense-layers",
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m nsa_jax.convert", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="directory of a dense checkpoint, or a hub id")
    parser.add_argument("output", metavar="OUTPUT", help="directory to write")
    parser.add_argument("--overwrite", action="store_true", help=OVERWRITE)
    add_arguments(parser)
    return parser


def parse_arguments(
    parser: argparse.ArgumentParser, argv: Sequence[str] | None
) -> tuple[argparse.Namespace, list[str]]:
    """Arguments that a parser declares, and the fields after --config., such as "model.nsa.num_selected=32"."""
    args, others = parser.parse_known_args(argv)
    prefix = "--config."
    if unknown := [text for text in others if not text.startswith(prefix) or "=" not in text]:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}; a field of the config is {prefix}FIELD=VALUE")
    return args, [text.removeprefix(prefix) for text in others]


def main(argv: Sequence[str] | None = None) -> int:
    """The command line tool; returns the exit status."""
    args, overrides = parse_arguments(_parser(), argv)
    return run_program(lambda: convert(args, overrides))


if __name__ == "__main__":
    sys.exit(main())
