"""Numbers that no trained model should have, for every class of float32 bit patterns, and what must hold with them."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from nsa_jax import NSAConfig
from nsa_jax.ops import blocks
from nsa_jax.ops.kernels.decode import ranking, softmax_parts
from nsa_jax.ops.kernels.selection.top_n import block_lists
from nsa_jax.ops.kernels.triton import triton_call

# First and last bit pattern of every class of float32.
CLASSES = {
    "zero": (0x00000000, 0x00000000),
    "subnormal": (0x00000001, 0x007FFFFF),
    "normal": (0x00800000, 0x7F7FFFFF),
    "infinity": (0x7F800000, 0x7F800000),
    "nan": (0x7F800001, 0x7FFFFFFF),
    "nan_of_gpus": (0x7FFFFFFF, 0x7FFFFFFF),
    "negative_zero": (0x80000000, 0x80000000),
    "negative_subnormal": (0x80000001, 0x807FFFFF),
    "negative": (0x80800000, 0xFF7FFFFF),
    "negative_infinity": (0xFF800000, 0xFF800000),
    "negative_nan": (0xFF800001, 0xFFFFFFFF),
    "nan_of_cpus": (0xFFC00000, 0xFFC00000),
}


def draw_bits(rng: np.random.Generator, shape: tuple[int, ...], names) -> np.ndarray:
    """float32 of `shape`, each number of one of the named classes."""
    low, high = np.array([CLASSES[name] for name in names], np.int64).T
    index = rng.integers(len(low), size=shape)
    return rng.integers(low[index], high[index] + 1).astype(np.uint32).view(np.float32)


def draw_classes(rng: np.random.Generator) -> list[str]:
    """One to all of the classes."""
    return list(rng.permutation(list(CLASSES))[: rng.integers(1, len(CLASSES) + 1)])


def list_fault(lists, t, start, num_blocks: int, config: NSAConfig) -> str:
    """What is wrong with lists [..., n] of queries at t [...] of documents from start [...] on; empty if nothing."""
    lists = np.asarray(lists, np.int64)
    first, last = blocks.candidate_range(np.asarray(t), np.asarray(start), config.select_block)
    want = np.clip(last - first + 1, 0, config.num_selected)
    if lists.min() < 0 or lists.max() > num_blocks:
        return f"entries from {lists.min()} to {lists.max()}, J = {num_blocks}"
    real = lists < num_blocks
    if (real.sum(-1) != want).any():
        return f"{real.sum(-1)[real.sum(-1) != want][:4]} entries, must be {want[real.sum(-1) != want][:4]}"
    if (np.diff(lists) < 0).any() or ((np.diff(lists) == 0) & real[..., 1:]).any():
        return "entries not ascending"
    inside = (lists >= first[..., None]) & (lists <= last[..., None])
    return "" if (inside | ~real).all() else "entries that are no candidates"


def top_n_of_training(scores: np.ndarray, position, start, config: NSAConfig, num_blocks: int) -> np.ndarray:
    """Lists [rows, n] of the kernel behind `select_blocks`, from scores [planes, rows, width]."""
    where = jnp.asarray([position[0], 0], jnp.int32)
    shapes = dict(batch=1, num_kv=1, length=len(position), config=config, num_blocks=num_blocks)
    start = jnp.asarray(start, jnp.int32)[None]
    return np.asarray(block_lists(where, jnp.asarray(scores)[None], start, **shapes)[0, :, 0])


def top_n_of_decoding(scores: np.ndarray, position, start, config: NSAConfig, num_blocks: int) -> np.ndarray:
    """Lists [rows, n] of the code behind `decode_attention`, from scores [rows, width], a power of two of blocks."""

    def kernel(t_ref, start_ref, score_ref, list_ref):
        first, last = softmax_parts.candidate_range(t_ref[0], start_ref[0], config)
        ranking.write_list(score_ref[...], list_ref, first, last, num_blocks, config)

    rows, width = scores.shape
    n = config.num_selected
    call = triton_call(
        kernel,
        num_warps=4,
        num_stages=1,
        grid=(rows,),
        in_specs=[pl.BlockSpec((1,), lambda i: (i,))] * 2 + [pl.BlockSpec((None, width), lambda i: (i, 0))],
        out_specs=pl.BlockSpec((None, n), lambda i: (i, 0)),
        out_shape=jax.ShapeDtypeStruct((rows, n), jnp.int32),
    )
    return np.asarray(jax.jit(call)(jnp.asarray(position), jnp.asarray(start), jnp.asarray(scores)))


def top_n_of_formulas(scores: np.ndarray, position, start, config: NSAConfig, num_blocks: int) -> np.ndarray:
    """Lists [rows, n] of the code behind the reference and `xla`, from scores [rows, J]."""
    pick = jax.jit(functools.partial(blocks.select_from_importance, config=config))
    return np.asarray(pick(jnp.asarray(scores[:, :num_blocks]), jnp.asarray(position), jnp.asarray(start)))


def top_n_fault(rng: np.random.Generator, which: str, names: list[str] | None = None) -> str:
    """What is wrong with the lists of 16 queries whose scores have bit patterns of the named classes, or drawn ones."""
    num_blocks, width, rows = 200, 256, 16
    n = int(rng.choice([4, 7, 16]))
    config = NSAConfig(compress_block=16, compress_stride=16, select_block=16, num_selected=n, num_local=2)
    begin = int(rng.integers(0, num_blocks * 16 - rows))
    position = np.arange(begin, begin + rows, dtype=np.int32)
    start = np.where(rng.random(rows) < 0.5, 0, rng.integers(0, position + 20)).astype(np.int32)
    scores = draw_bits(rng, (rows, width), names or draw_classes(rng))
    if which == "training":
        lists = top_n_of_training(scores[None], position, start, config, num_blocks)
    else:
        lists = TOP_N[which](scores, position, start, config, num_blocks)
    return list_fault(lists, position, start, num_blocks, config)


TOP_N = {"training": top_n_of_training, "decoding": top_n_of_decoding, "formulas": top_n_of_formulas}


def long_rows(batch: int, length: int, num_heads: int, num_kv: int, dim: int, *, packed: bool, dtype=jnp.bfloat16):
    """Random arguments of nsa_attention by name, and segment starts of documents of 1,000 tokens or None."""
    config, rng = NSAConfig(), np.random.default_rng(0)
    num_cmp = blocks.num_compressed(length, config)
    keys = {f"{kind}_{branch}": (batch, num_cmp if branch == "cmp" else length, num_kv, dim)
            for branch in ("cmp", "slc", "win") for kind in ("key", "value")}  # fmt: skip
    shapes = {"query": (batch, length, num_heads, dim), **keys, "gates": (batch, length, num_heads, 3)}
    arrays = {name: jnp.asarray(rng.normal(size=shape), dtype) for name, shape in shapes.items()}
    start = np.broadcast_to(np.arange(length) // 1000 * 1000, (batch, length)).astype(np.int32)
    return arrays, jnp.asarray(start) if packed else None


def long_cache(lengths: np.ndarray, capacity: int, num_heads: int, num_kv: int, dim: int, dtype=jnp.bfloat16):
    """Random arguments of decode_attention by name, one token for each row."""
    arrays, _ = long_rows(len(lengths), capacity, num_heads, num_kv, dim, packed=False, dtype=dtype)
    window = min(NSAConfig().window, capacity)
    arrays |= {name: arrays[name][:, :window] for name in ("key_win", "value_win")}
    arrays |= {name: arrays[name][:, :1] for name in ("query", "gates")}
    return {**arrays, "lengths": jnp.asarray(lengths)}


def poisoned(arrays: dict, places: dict) -> dict:
    """The arrays with NaN, of alternating sign, in the vectors at `places`, {name: [index, ...]}."""
    out = dict(arrays)
    for name, indices in places.items():
        for i, index in enumerate(indices):
            nan = np.uint32(0xFFC00000 if i % 2 else 0x7FFFFFFF).view(np.float32)
            out[name] = out[name].at[index].set(jnp.asarray(nan).astype(out[name].dtype))
    return out
