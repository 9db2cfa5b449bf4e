"""What range attention's Hopper kernels share: loops over tiles, key blocks in flight, running softmaxes, roles."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from nsa_jax.ops.kernels import sm90_reduce

# See `raise_peak`. Sums of float32 have room for far more.
_MOST_ABOVE = 8.0


def for_each_tile(count, tile_range, serve) -> None:
    """Calls `serve(n, before, *tile_range(n))` for n < count.

    Each range is looked up one tile ahead: what comes from global memory one number at a time has a long latency.

    Args:
      count: how many tiles.
      tile_range: n -> (tile, begin, ..., end), the key blocks [begin, end) that a tile visits.
      serve: its `before` counts the key blocks of all earlier tiles.
    """

    def body(n, carry):
        before, current = carry
        following = tile_range(jnp.minimum(n + 1, count - 1))
        serve(n, before, *current)
        return before + current[-1] - current[1], following

    lax.fori_loop(0, count, body, (jnp.int32(0), tile_range(0)))


def whole_tiles(x: jax.Array) -> jax.Array:
    """Pads keys or values [B, S, K, D] to a multiple of 8, which TMA's swizzled tiles need."""
    return jnp.pad(x, ((0, 0), (0, -x.shape[1] % 8), (0, 0), (0, 0))) if x.shape[1] % 8 else x


def tiled(*shape: int, dtype):
    """A shared memory buffer for operands of matrix products and for what TMA takes out of registers."""
    width = min(128, shape[-1] * jnp.dtype(dtype).itemsize)
    tiling = plgpu.TilingTransform((8, width // jnp.dtype(dtype).itemsize))
    transforms: Any = (tiling, plgpu.SwizzleTransform(width))  # type: ignore[abstract]
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def divided(refs, *arrays) -> list[list]:
    """References in a row, divided as the sequences of arrays that they are of."""
    rest = iter(refs)
    return [[next(rest) for _ in some] for some in arrays]


def load(ref, layout, **options):
    """A part of an array in a register layout; JAX before 0.11 also takes an index."""
    try:
        return plgpu.load(ref, layout=layout, **options)  # type: ignore[call-arg]
    except TypeError:
        return plgpu.load(ref, (), layout=layout, **options)


def store(ref, value):
    """Stores registers in pieces narrower than a cache line, which JAX 0.12 wants to be told is meant."""
    if jax.__version_info__ >= (0, 12):
        plgpu.store(ref, value, optimized=False)  # type: ignore[attr-defined]
    else:
        ref[...] = value


def has_bit(words, index):
    """Whether bit `index % 32`, a number or one for each word, is set in each of `words`, a vector in registers."""
    return (lax.shift_right_logical(words, jnp.broadcast_to(lax.rem(index, jnp.int32(32)), words.shape)) & 1) == 1


def transpose(ref, axes=(1, 0)):
    """A transposed view of a ref."""
    return ref.transpose(axes) if hasattr(ref, "transpose") else plgpu.transpose_ref(ref, axes)


def zeros(shape, fill: float = 0.0, layout=plgpu.Layout.WGMMA):
    """A float32 register array of one value."""
    return plgpu.layout_cast(jnp.full(shape, fill, jnp.float32), layout)


def raise_peak(peak, total, highest):
    """A running softmax before a block's weights are added.

    Rows need not subtract their maximum itself. They keep what they subtracted before, unless a row of the warp would
    get a weight of more than 2^`_MOST_ABOVE`, so most blocks leave the accumulator as it is, and threads need not know
    each other's maxima. The relative error of a weight does not depend on its size.

    Args:
      peak: what was subtracted so far, in base 2, [64].
      total: each thread's part of the normalizers, float32 [64].
      highest: the block's maxima, each thread's of the columns that it has, [64].

    Returns:
      (what rows subtract from scores, each thread's part of the normalizers, factor, raised): `scale_rows` takes the
      last two and makes the accumulator fit.
    """

    def follow(peak, total):
        above = jnp.maximum(peak, sm90_reduce.max_of_row(highest))
        factor = jnp.exp2(peak - above)
        return above, total * factor, factor

    raised = sm90_reduce.any_in_warp((highest > peak + _MOST_ABOVE).astype(jnp.int32))
    peak, total, factor = lax.cond(raised, follow, lambda peak, total: (peak, total, total), peak, total)
    return peak, total, factor, raised.astype(jnp.int32)


def scale_rows(acc, factor, raised):
    """An accumulator, float32 [64, V], times `factor` where `raised`; both are of `raise_peak`."""
    return lax.cond(
        raised != 0,
        lambda acc, factor: acc * lax.broadcast_in_dim(factor, acc.shape, [0]),
        lambda acc, _: acc,
        acc,
        factor,
    )


def before_wait(values, rare):
    """Makes the assembler compute values before the next wait for products; returns them.

    The assembler moves a wait ahead of arithmetic that does not need the products, and so leaves nothing to overlap
    with them. It does not move a wait across a branch. The branch here waits too, which changes no result.

    Args:
      values: arrays in registers.
      rare: a bool of the running program; the branch is taken where it is True.
    """

    def wait():
        plgpu.wgmma_wait(0)

    values = lax.optimization_barrier(values)
    pl.when(rare)(wait)
    return values


def load_blocks(begin, end, before, size: int, streams, index, block_of=lambda i: i):
    """Copies the key blocks of steps [begin, end) to buffers that the consumers free again.

    Args:
      begin, end: steps.
      before: how many blocks went through the buffers for earlier tiles.
      size: keys per block.
      streams: of keys and of values, (array [B, S, K, D], buffers [stages, size, D], loaded, freed) with one barrier
        of each kind per buffer; freed is None where the buffer is freed with the other one.
      index: batch entry and key/value head.
      block_of: the block number of a step.
    """
    batch, kv_head = index
    stages = streams[0][1].shape[0]

    def load_block(i, block):
        following = block_of(jnp.minimum(i + 1, end - 1))  # on its way while this one waits for its buffer
        count = before + i - begin
        slot = lax.rem(count, jnp.int32(stages))
        for ref, smem, loaded, freed in streams:
            if freed is not None:
                pl.when(count >= stages)(functools.partial(plgpu.barrier_wait, freed.at[slot]))
            plgpu.copy_gmem_to_smem(ref.at[batch, pl.ds(block * size, size), kv_head], smem.at[slot], loaded.at[slot])
        return following

    lax.fori_loop(begin, end, load_block, block_of(begin))


def registers(warpgroups: int) -> tuple[int, int]:
    """Registers per thread of the consumer warpgroups and of the producer.

    A multiprocessor has 512 for the threads of all warpgroups. A program starts with equal shares of them, multiples of
    8, and waits for ever if its warpgroups ask for more than the sum: five start with 96 each, 480 together.
    """
    return {2: (240, 24), 3: (160, 32), 4: (112, 32)}[warpgroups]


def divide_roles(wg, warpgroups: int, consume: Callable[[], None], produce: Callable[[], None]) -> None:
    """Runs the computing warpgroups and the one behind them that loads, each with its share of the registers."""
    for role, is_role, share, action in (
        (consume, wg < warpgroups, registers(warpgroups)[0], "increase"),
        (produce, wg == warpgroups, registers(warpgroups)[1], "decrease"),
    ):

        @pl.when(is_role)
        def _run(role=role, share=share, action=action):
            plgpu.set_max_registers(share, action=action)
            role()
