"""What `mosaic_sm80.py` compiles, checks and times: variants, arrays, and the library's kernels in the same parts.

A kind is "forward", "dq" or "dkv". Forward takes query, key and value. The others take these, the output, its natural
log-sum-exp and its gradient, so the time of either has that of delta in it, for Triton as for Mosaic GPU.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

import nsa_jax
from benchmarks.mosaic_sm80_tiles import KeyVariant, Variant
from nsa_jax.ops import reference
from nsa_jax.ops.kernels.range_attention import attention
from nsa_jax.ops.kernels.softmax import LOG2E, NO_WEIGHT
from nsa_jax.ops.kernels.triton import row_delta
from nsa_jax.ops.plan import Shape, plan_range
from nsa_jax.ops.target import Target, compile_for, current_target

CONFIG = nsa_jax.NSAConfig()
HEADS, KV_HEADS, DIM = 64, 4, 128
KINDS = ("forward", "dq", "dkv")
LARGEST_ERROR = {"forward": 4e-3, "dq": 1e-2, "dkv": 1e-2}  # of the largest value
VARIANTS: dict[str, tuple[Variant | KeyVariant, ...]] = {
    "forward": (
        Variant(row_tiles=2, warpgroups=1, keys=64, stages=1),
        Variant(row_tiles=2, warpgroups=1, keys=64, stages=2),
        Variant(row_tiles=2, warpgroups=2, keys=64, stages=2),
        Variant(row_tiles=1, warpgroups=2, keys=64, stages=2),
        Variant(row_tiles=1, warpgroups=1, keys=64, stages=1),
        Variant(row_tiles=2, warpgroups=1, keys=32, stages=2),
    ),
    "dq": (
        Variant(row_tiles=2, warpgroups=1, keys=32, stages=1),
        Variant(row_tiles=2, warpgroups=1, keys=32, stages=2),
        Variant(row_tiles=2, warpgroups=2, keys=32, stages=1),
        Variant(row_tiles=2, warpgroups=2, keys=32, stages=2),
        Variant(row_tiles=1, warpgroups=2, keys=64, stages=2),
        Variant(row_tiles=1, warpgroups=1, keys=64, stages=1),
        Variant(row_tiles=1, warpgroups=1, keys=32, stages=1),
    ),
    "dkv": (
        KeyVariant(warpgroups=2, rows=64, stages=2, at_once=64),
        KeyVariant(warpgroups=2, rows=64, stages=2, at_once=64, programs=512),
        KeyVariant(warpgroups=2, rows=32, stages=3, at_once=32),
        KeyVariant(warpgroups=1, rows=64, stages=2, at_once=64),
        KeyVariant(warpgroups=1, rows=32, stages=2, at_once=32),
        KeyVariant(warpgroups=1, rows=32, stages=2, at_once=32, programs=512),
        KeyVariant(warpgroups=1, rows=64, stages=2, at_once=32, held=True),
        KeyVariant(warpgroups=1, rows=64, stages=2, at_once=16, held=True),
        KeyVariant(warpgroups=2, rows=64, stages=3, at_once=32, held=True),
    ),
}
Arrays = tuple[jax.Array, ...]


def shapes(length: int, kind: str) -> list[jax.ShapeDtypeStruct]:
    """The arrays that a kind takes, of one row of `length` tokens."""
    blocks = (length - CONFIG.compress_block) // CONFIG.compress_stride + 1
    query, row = (1, length, HEADS, DIM), (1, length, HEADS)
    key = (1, blocks, KV_HEADS, DIM)
    found = [jax.ShapeDtypeStruct(size, jnp.bfloat16) for size in (query, key, key)]
    if kind != "forward":
        found += [found[0], jax.ShapeDtypeStruct(row, jnp.float32), found[0]]
    return found


def inputs(length: int, seed: int) -> Arrays:
    """Random query, key, value and gradient of the output."""
    keys = jax.random.split(jax.random.key(seed), 4)
    of_backward = shapes(length, "dq")
    wanted = (*of_backward[:3], of_backward[-1])
    return tuple(jax.random.normal(k, x.shape, x.dtype) for k, x in zip(keys, wanted, strict=True))


def rows_of(out: jax.Array, lse: jax.Array, grad_out: jax.Array) -> Arrays:
    """Log-sum-exp in base 2 and delta, float32 [B, T, N], from the output [B, T, N, V], its lse and its gradient."""
    # XLA would fuse delta into the loop that stores it in another order, with one thread to a row.
    return jax.lax.optimization_barrier((jnp.where(lse == -jnp.inf, NO_WEIGHT, lse * LOG2E), row_delta(out, grad_out)))


def prototype(kind: str, variant: Variant | KeyVariant) -> Callable[..., Arrays]:
    """A variant as a function of a kind's arrays; it needs JAX 0.11."""
    from benchmarks.mosaic_sm80_dkv import key_value_gradients
    from benchmarks.mosaic_sm80_dq import query_gradient
    from benchmarks.mosaic_sm80_kernel import compressed_forward

    if kind == "forward":
        assert isinstance(variant, Variant)
        return functools.partial(compressed_forward, config=CONFIG, variant=variant)

    def backward(query, key, value, out, lse, grad_out) -> Arrays:
        arrays = query, key, value, *rows_of(out, lse, grad_out), grad_out
        if isinstance(variant, KeyVariant):
            return key_value_gradients(*arrays, config=CONFIG, variant=variant)
        return (query_gradient(*arrays, config=CONFIG, variant=variant),)

    return backward


def whole_backward(dq: Variant, dkv: KeyVariant) -> Callable[..., Arrays]:
    """Gradients of query, key and value as one function of the arrays of "dq"."""

    def backward(*arrays) -> Arrays:
        return *prototype("dq", dq)(*arrays), *prototype("dkv", dkv)(*arrays)

    return backward


def _triton(kind: str) -> Callable[..., Arrays]:
    """The library's kernels of a kind, or of "backward", as a function of the kind's arrays.

    The backward is what the vjp of `nsa_jax.compressed_attention` runs. A gradient not returned is not computed.
    """
    if kind == "forward":
        return lambda query, key, value: nsa_jax.compressed_attention(
            query, key, value, config=CONFIG, implementation="pallas"
        )

    def backward(query, key, value, out, lse, grad_out) -> Arrays:
        ranges = attention.compressed_ranges(query, None, 0, CONFIG)
        low, high = attention.clip_ranges(*ranges, key.shape[1])
        plan = plan_range(Shape.of(query, key, value), current_target())
        delta = row_delta(out, grad_out)
        gradients = attention.backward(query, key, value, low, high, delta, lse, grad_out, plan)
        return {"dq": gradients[:1], "dkv": gradients[1:], "backward": gradients}[kind]

    return backward


def compiled_triton(kind: str, length: int) -> Any:
    """The library's kernels with the tiles that it chooses for an A100, compiled for the GPU at hand.

    On Hopper, Triton makes the same instructions as for an A100 (mma.sync, ldmatrix, cp.async) inside `without_wgmma`.
    """
    with compile_for(Target("gpu", (8, 0))):
        return jax.jit(_triton(kind)).trace(*shapes(length, kind)).lower().compile()


@contextlib.contextmanager
def without_wgmma() -> Iterator[None]:
    """On Hopper, keeps Triton from wgmma, which an A100 does not have, while it compiles."""
    os.environ["DISABLE_MMA_V3"] = "1"  # Triton reads it whenever it compiles
    try:
        yield
    finally:
        del os.environ["DISABLE_MMA_V3"]


def compiled_mosaic(function: Callable[..., Arrays], length: int, kind: str) -> Any:
    """A variant compiled for the GPU at hand."""
    return jax.jit(function).lower(*shapes(length, kind)).compile()


def wanted(length: int) -> tuple[dict[str, Arrays], dict[str, Arrays]]:
    """Of random numbers, what each kind takes, and what it should return by the float32 reference."""
    query, key, value, grad_out = inputs(length, 0)
    attend = functools.partial(reference.compressed_attention, config=CONFIG)

    @jax.jit
    def run(*arrays):
        *attended, grad = (x.astype(jnp.float32) for x in arrays)
        (out, lse), pull = jax.vjp(attend, *attended)
        return (out, lse), pull((grad, jnp.zeros_like(lse)))

    result, gradients = run(query, key, value, grad_out)
    of_backward = query, key, value, result[0].astype(query.dtype), result[1], grad_out
    taken = {"forward": (query, key, value), "dq": of_backward, "dkv": of_backward}
    return taken, {"forward": result, "dq": gradients[:1], "dkv": gradients[1:]}


def error(got: jax.Array, want: jax.Array) -> float:
    """The largest difference as a share of the largest value; infinite where one is finite and the other is not."""
    finite = jnp.isfinite(want)
    if not bool((jnp.isfinite(got) == finite).all()):
        return math.inf
    got, want = (jnp.where(finite, x.astype(jnp.float32), 0) for x in (got, want))
    return float(jnp.abs(got - want).max() / jnp.abs(want).max())


def shared_bytes(kind: str, variant: Variant | KeyVariant) -> int:
    """Shared memory of a program, whose buffers begin at multiples of 1,024 bytes."""
    row = DIM * 2
    if isinstance(variant, Variant):
        buffers = [variant.rows * row] * (1 if kind == "forward" else 2) + [variant.stages * variant.keys * row] * 2
    else:
        buffers = [variant.stages * variant.rows * row] * 2 + [variant.stages * variant.rows * 8]
        if not variant.held or variant.stages * variant.rows < variant.keys:
            buffers += [variant.keys * row] * 2
    return sum(-(-size // 1024) * 1024 for size in buffers)
