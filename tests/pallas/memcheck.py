"""Runs the kernels on inputs with NaN, for a memory checker: no access may leave an array.

    compute-sanitizer --tool memcheck --error-exitcode 1 python -m tests.pallas.memcheck

Cases: nsa_attention forward and backward, packed and not; selected attention of any lists; decoding. One line each.
`--length 128` makes rows short enough for the interpreter. A memory checker sees each allocation, so memory must be
given back between cases: set XLA_PYTHON_CLIENT_ALLOCATOR=platform.
"""

from __future__ import annotations

import argparse
import time

import jax
import jax.numpy as jnp
import numpy as np

import nsa_jax
from nsa_jax import NSAConfig
from tests.ops import poison

CONFIG = NSAConfig()
SIZES = ((16, 1, 128), (6, 1, 64))  # N, K, H = V


def _places(length: int) -> dict:
    return {
        "query": [(0, length // 3, 1), (0, length - 1, 0)],
        "key_cmp": [(0, 1, 0), (0, 0, 0)],
        "value_slc": [(0, length // 2, 0)],
    }


def operator(length: int, sizes: tuple[int, int, int], packed: bool):
    """Forward and backward of nsa_attention; returns (lists, whether some output is NaN)."""
    arrays, start = poison.long_rows(1, length, *sizes, packed=packed)

    def loss(arrays):
        out, lists = nsa_jax.nsa_attention(
            **arrays, config=CONFIG, segment_start=start, implementation="pallas", return_block_indices=True
        )
        return out.astype(jnp.float32).sum(), (out, lists)

    _, (out, lists) = jax.block_until_ready(
        jax.jit(jax.grad(loss, has_aux=True))(poison.poisoned(arrays, _places(length)))
    )
    return lists, jnp.isnan(out).any()


def selected(length: int, sizes: tuple[int, int, int], packed: bool):
    """Forward and backward of selected attention of lists with entries that name no block."""
    arrays, start = poison.long_rows(1, length, *sizes, packed=packed)
    rng = np.random.default_rng(0)
    num_blocks = -(-length // CONFIG.select_block)
    lists = rng.integers(-2, num_blocks + 3, (1, length, sizes[1], CONFIG.num_selected))
    lists = np.where(
        rng.random(lists.shape) < 0.1, rng.choice([2**31 - 1, -(2**31), 1_090_604_942], lists.shape), lists
    )
    lists = jnp.asarray(lists, jnp.int32)

    def loss(query, key, value):
        out = nsa_jax.selected_attention(
            query, key, value, lists, select_block=CONFIG.select_block, segment_start=start, implementation="pallas"
        )
        return out.astype(jnp.float32).sum()

    tensors = (poison.poisoned(arrays, _places(length))[name] for name in ("query", "key_slc", "value_slc"))
    gradients = jax.block_until_ready(jax.jit(jax.grad(loss, (0, 1, 2)))(*tensors))
    return lists.clip(0, num_blocks), jnp.isnan(gradients[0]).any()


def decoding(length: int, sizes: tuple[int, int, int]):
    """One step of decode_attention for rows of several lengths."""
    lengths = np.array([length, min(65, length), length // 2, 0], np.int32)
    arrays = poison.poisoned(poison.long_cache(lengths, length, *sizes), {"query": [(0, 0, 1), (2, 0, 0)]})
    step = jax.jit(
        lambda arrays: nsa_jax.decode_attention(**arrays, config=CONFIG, implementation="pallas", return_info=True)
    )
    out, info = jax.block_until_ready(step(arrays))
    return info.block_indices, jnp.isnan(out).any()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--length", type=int, nargs="+", default=[2048, 8192], help="tokens of a row, multiples of 64")
    args = parser.parse_args()
    device = jax.devices()[0]
    print(f"{device.device_kind}, jax {jax.__version__}", flush=True)
    for length in args.length:
        num_blocks = -(-length // CONFIG.select_block)
        for sizes in SIZES:
            cases = [(f"{op.__name__}{' packed' if packed else ''}", lambda op=op, packed=packed: op(length, sizes, packed))
                     for op in (operator, selected) for packed in (False, True)]  # fmt: skip
            for name, case in [*cases, ("decoding", lambda: decoding(length, sizes))]:
                began = time.monotonic()
                lists, spoiled = case()
                low, high = int(lists.min()), int(lists.max())
                assert 0 <= low and high <= num_blocks, (name, low, high)
                assert spoiled, f"{name}: NaN did not reach the output"
                print(f"T={length} N,K,H={sizes} {name}: entries {low} to {high}, J={num_blocks}, "
                      f"{time.monotonic() - began:.1f} s", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
