"""Any bits in queries, keys and scores, any integers in lists: lists stay in range, and no row spoils another.

Four things are attacked, in every implementation: the code that ranks scores, `nsa_attention` and `decode_attention`
of inputs with NaN, infinity and the like, and `selected_attention` of lists of random integers.
"""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import nsa_jax
from nsa_jax.ops import blocks
from nsa_jax.ops.implementations import IMPLEMENTATIONS
from tests.ops import poison
from tests.ops.cases import SMALL, Case, relative_error

from .harness import Outcome

QUICK = 12  # each kind once
CASE = Case("chaos_nan", T=40, N=4, K=2, B=2, packing="documents")
CAPACITY, SLOTS = 96, SMALL.window
FLOATS = ("query", "key_cmp", "key_slc", "key_win")


@functools.cache
def _operator(implementation: str):
    """nsa_attention of the case's arrays: (output, block lists)."""
    attend = functools.partial(
        nsa_jax.nsa_attention, **CASE.kwargs(), implementation=implementation, return_block_indices=True
    )
    return jax.jit(lambda arrays: attend(**arrays))


@functools.cache
def _decoder(implementation: str):
    """decode_attention of a cache's arrays: (output, block lists)."""

    def step(arrays):
        out, info = nsa_jax.decode_attention(**arrays, config=SMALL, implementation=implementation, return_info=True)
        return out, info.block_indices

    return jax.jit(step)


@functools.cache
def _selected(implementation: str):
    """selected_attention of the case's arrays and lists [B, T, K, 5]."""
    arrays, options = CASE.inputs(), dict(select_block=SMALL.select_block, implementation=implementation)
    tensors = arrays["query"], arrays["key_slc"], arrays["value_slc"]
    return jax.jit(
        lambda lists: nsa_jax.selected_attention(*tensors, lists, segment_start=CASE.segment_start(), **options)
    )


def _poison(rng: np.random.Generator, arrays: dict) -> tuple[dict, list[str]]:
    """The arrays with numbers of drawn bit patterns in up to 4 places of the last batch entry."""
    out, names = dict(arrays), poison.draw_classes(rng)
    for name in rng.choice(FLOATS, rng.integers(1, 5)):
        place = (-1, *(rng.integers(size) for size in out[name].shape[1:3]))
        vector = poison.draw_bits(rng, out[name].shape[3:], names)
        out[name] = out[name].at[place].set(jnp.asarray(vector))
    return out, names


def _fault(run, clean: dict, spoiled: dict, t, start, num_blocks: int) -> str:
    """What is wrong with the output and lists of arrays whose last batch entry is spoiled."""
    (out, lists), (want, _) = jax.device_get((run(spoiled), run(clean)))
    if not np.array_equal(out[:-1], want[:-1]):
        return "a batch entry without NaN got another output"
    return poison.list_fault(lists, np.asarray(t)[..., None], np.asarray(start)[..., None], num_blocks, SMALL)


def _attack_operator(rng: np.random.Generator, implementation: str) -> str:
    arrays = CASE.inputs()
    spoiled, names = _poison(rng, arrays)
    t = np.broadcast_to(np.arange(CASE.T), (CASE.B, CASE.T))
    num_blocks = blocks.num_selection_blocks(CASE.S, SMALL.select_block)
    fault = _fault(_operator(implementation), arrays, spoiled, t, CASE.segment_start(), num_blocks)
    return fault and f"{names}: {fault}"


def _attack_decoding(rng: np.random.Generator, implementation: str) -> str:
    cache = Case("chaos_cache", T=CAPACITY, N=4, K=2, B=2).inputs()
    arrays = {name: x[:, :SLOTS] if "win" in name else x for name, x in cache.items()}
    arrays |= {name: cache[name][:, :1] for name in ("query", "gates")}
    lengths = rng.integers(0, CAPACITY + 1, 2).astype(np.int32)
    start = rng.integers(0, np.maximum(lengths[:, None], 1)) * rng.integers(0, 2)
    arrays |= dict(lengths=jnp.asarray(lengths), segment_start=jnp.asarray(start, jnp.int32))
    spoiled, names = _poison(rng, arrays)
    # A row without tokens has no candidates: as if its document began behind it.
    t, start = np.maximum(lengths - 1, 0)[:, None], np.where(lengths[:, None] == 0, SMALL.select_block, start)
    fault = _fault(_decoder(implementation), arrays, spoiled, t, start, CAPACITY // SMALL.select_block)
    return fault and f"{names}, lengths {lengths.tolist()}: {fault}"


def _attack_lists(rng: np.random.Generator, implementation: str) -> str:
    num_blocks = blocks.num_selection_blocks(CASE.S, SMALL.select_block)
    shape = (CASE.B, CASE.T, CASE.K, 5)
    any_integer = rng.integers(-(2**31), 2**31, shape)
    lists = np.where(rng.random(shape) < rng.random(), rng.integers(-2, num_blocks + 3, shape), any_integer)
    clean = np.full(shape, num_blocks)
    for index in np.ndindex(shape[:-1]):
        real = sorted({int(entry) for entry in lists[index] if 0 <= entry < num_blocks})
        clean[index][: len(real)] = real
    got = _selected(implementation)(jnp.asarray(lists, jnp.int32))
    error = relative_error(got, _selected("reference")(jnp.asarray(clean, jnp.int32)))
    return "" if error <= 1e-5 else f"relative error {error:.1e}"


def attack(rng: np.random.Generator, folder: Path) -> Iterator[Outcome]:
    kinds = [("top-n", which, poison.top_n_fault) for which in poison.TOP_N]
    attacks = {"nsa_attention": _attack_operator, "decode_attention": _attack_decoding, "lists": _attack_lists}
    kinds += [(name, which, attacks[name]) for name, which in itertools.product(attacks, IMPLEMENTATIONS)]
    while True:
        for name, which, attempt in kinds:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=".*interpret mode")
                yield Outcome(f"{name} {which}", attempt(rng, which))
