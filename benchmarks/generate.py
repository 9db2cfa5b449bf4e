r"""Whole-model decoding: tokens per second of a config's model with random weights, NSA and dense.

    python benchmarks/generate.py --config configs/a100_prod.py --json benchmarks/results/generate_h200.json

A step is a decode step with greedy choice of the next token. One dispatch from Python runs as many of them as
--tokens-per-dispatch says, in a loop on the device, as `nsa_jax.generate` does. The cache holds random numbers, as full
as the context says.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import itertools
import json
import pathlib
import statistics
import sys
import time

import jax
import jax.numpy as jnp
from flax import nnx

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from benchmarks.timing import environment  # noqa: E402
from nsa_jax.command_line import load_config  # noqa: E402
from nsa_jax.nn import ModelConfig, Transformer, count_parameters  # noqa: E402
from nsa_jax.nn.cache import memory_report  # noqa: E402
from nsa_jax.nn.decoder import Decoder  # noqa: E402


def model_config(path: str, attention: str) -> ModelConfig:
    """The model of a file in configs/, bfloat16 on a GPU."""
    config = load_config(path)
    config.model.attention = attention
    return ModelConfig.from_config(config, config.data.bpe_vocab_size if config.data.tokenizer == "bpe" else 257)


def filled(decoder: Decoder, batch: int, context: int, steps: int):
    """A cache with `context` random tokens in every row and room for `steps` more."""
    cache = decoder.init_cache(batch, context + steps)
    leaves, tree = jax.tree.flatten(cache.layers)
    # One program for each shape: in one for the whole cache, XLA puts the arrays of all layers into one kernel, which
    # takes several times as long to compile as the steps.
    keys = jax.random.split(jax.random.key(0), len(leaves))
    layers = [jax.random.normal(k, x.shape, x.dtype) for k, x in zip(keys, leaves, strict=True)]
    return dataclasses.replace(
        cache, layers=jax.tree.unflatten(tree, layers), lengths=jnp.full_like(cache.lengths, context)
    )


# The positions that are decoded again and again. A compressed block must end as often among them as in a whole row.
POSITIONS = 64


def milliseconds(decoder: Decoder, batch: int, context: int, steps: int, at_once: int) -> float:
    """Milliseconds of a step, `at_once` per dispatch: the median of five means over `steps`, after a few uncounted.

    Rows go back to their beginning when they are full, so that there may be as many dispatches as it takes for the
    first one's way to the device not to count.
    """
    samples, dispatches = 5, -(-steps // at_once)
    room = -(-POSITIONS // at_once) * at_once

    def choose(index, logits, held):
        return jnp.argmax(logits, axis=-1).astype(jnp.int32), held

    def advance(params, state):
        cache, tokens = state
        begin = jnp.where(cache.lengths == context, context - room, cache.lengths)
        cache, drawn, _ = decoder.steps(
            params, dataclasses.replace(cache, lengths=begin), tokens, choose, None, at_once
        )
        return cache, drawn[-1]

    run = jax.jit(advance, donate_argnums=1)

    def timed(state, count):
        begin = time.perf_counter()
        for _ in range(count):
            state = run(decoder.params, state)
        jax.block_until_ready(state)
        return state, (time.perf_counter() - begin) / (count * at_once) * 1e3

    state = filled(decoder, batch, context - room, room), jnp.zeros((batch,), jnp.int32)
    state, _ = timed(state, 5)
    found = []
    for _ in range(samples):
        state, ms = timed(state, dispatches)
        found.append(ms)
    return statistics.median(found)


def main() -> None:
    def numbers(text):
        return [int(x) for x in text.split(",")]

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="configs/a100_prod.py")
    parser.add_argument("--batches", default=[1, 16, 64], type=numbers)
    parser.add_argument("--contexts", default=[2048, 32768], type=numbers)
    parser.add_argument("--attention", default=["nsa", "dense"], type=lambda text: text.split(","))
    parser.add_argument("--tokens-per-dispatch", default=[1, 8], type=numbers)
    parser.add_argument("--steps", default=256, type=int)
    parser.add_argument("--json", help="write the rows and the environment here")
    parser.add_argument("--commit", help="commit to record where git is not available")
    args = parser.parse_args()
    env, rows = environment(args.commit), []
    for attention in args.attention:
        config = model_config(args.config, attention)
        model = Transformer(config, rngs=nnx.Rngs(0))
        parameters = count_parameters(model)
        decoder = Decoder(model)
        del model
        for batch, context, at_once in itertools.product(args.batches, args.contexts, args.tokens_per_dispatch):
            row = {"attention": attention, "parameters": parameters, "B": batch, "context": context}
            row["tokens_per_dispatch"] = at_once
            try:
                ms = milliseconds(decoder, batch, context, args.steps, at_once)
            except Exception as error:  # one size that does not fit must not lose the others
                print(f"{row}: {type(error).__name__}: {str(error)[:200]}", flush=True)
                continue
            finally:
                gc.collect()
            row["ms_per_step"] = round(ms, 4)
            row["tokens_per_s"] = round(batch / ms * 1e3, 1)
            row["cache_mib"] = round(memory_report(config, batch, context)["total_mib"], 1)
            rows.append(row)
            print("  ".join(f"{name}={value}" for name, value in row.items()), flush=True)
            if args.json:  # after each row: a run cut short keeps its figures
                result = {"environment": env, "config": args.config, "rows": rows}
                pathlib.Path(args.json).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
