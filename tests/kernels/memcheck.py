"""Runs the kernels on inputs with NaN, for a memory checker: no access may leave an array.

    XLA_PYTHON_CLIENT_ALLOCATOR=platform compute-sanitizer --tool memcheck --error-exitcode 1 \
        python -m tests.kernels.memcheck

The allocator makes every array an allocation of its own, which the checker knows the ends of. Cases, one line each:
nsa_attention forward and backward, selected attention of any lists likewise, and decoding; packed and not.
`--length 128` makes rows short enough for the interpreter.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import time

import jax
import jax.numpy as jnp
import numpy as np

import nsa_jax
from nsa_jax import NSAConfig
from tests.ops import poison

CONFIG = NSAConfig()
SIZES = ((16, 1, 128), (6, 1, 64))  # N, K, H = V
FAR = (2**31 - 1, -(2**31), 1_090_604_942)


def _places(length: int) -> dict:
    return {
        "query": [(0, length // 3, 1), (0, length - 1, 0)],
        "key_cmp": [(0, 1, 0), (0, 0, 0)],
        "value_slc": [(0, length // 2, 0)],
    }


def operator(length: int, sizes: tuple[int, int, int], packed: bool):
    """Forward and backward of nsa_attention: (lists, whether NaN has reached the output)."""
    arrays, start = poison.long_rows(1, length, *sizes, packed=packed)

    def loss(arrays):
        out, lists = nsa_jax.nsa_attention(
            **arrays, config=CONFIG, segment_start=start, implementation="pallas", return_block_indices=True
        )
        return out.astype(jnp.float32).sum(), (out, lists)

    run = jax.jit(jax.grad(loss, has_aux=True))
    _, (out, lists) = jax.block_until_ready(run(poison.poisoned(arrays, _places(length))))
    return lists, jnp.isnan(out).any()


def selected(length: int, sizes: tuple[int, int, int], packed: bool):
    """Forward and backward of selected attention of lists with entries that name no block."""
    arrays, start = poison.long_rows(1, length, *sizes, packed=packed)
    arrays = poison.poisoned(arrays, _places(length))
    rng = np.random.default_rng(0)
    num_blocks = -(-length // CONFIG.select_block)
    lists = rng.integers(-2, num_blocks + 3, (1, length, sizes[1], CONFIG.num_selected))
    lists = jnp.asarray(np.where(rng.random(lists.shape) < 0.1, rng.choice(FAR, lists.shape), lists), jnp.int32)

    def loss(query, key, value):
        out = nsa_jax.selected_attention(
            query, key, value, lists, select_block=CONFIG.select_block, segment_start=start, implementation="pallas"
        )
        return out.astype(jnp.float32).sum()

    run = jax.jit(jax.grad(loss, (0, 1, 2)))
    gradients = jax.block_until_ready(run(arrays["query"], arrays["key_slc"], arrays["value_slc"]))
    return lists.clip(0, num_blocks), jnp.isnan(gradients[0]).any()


def decoding(length: int, sizes: tuple[int, int, int], packed: bool):
    """One step of decode_attention for rows of several lengths."""
    lengths = np.array([length, min(65, length), length // 2, 0], np.int32)
    arrays = poison.poisoned(poison.long_cache(lengths, length, *sizes), {"query": [(0, 0, 1), (2, 0, 0)]})
    if packed:
        arrays["segment_start"] = jnp.asarray(lengths[:, None] // 2)
    step = functools.partial(nsa_jax.decode_attention, config=CONFIG, implementation="pallas", return_info=True)
    out, info = jax.block_until_ready(jax.jit(lambda arrays: step(**arrays))(arrays))
    return info.block_indices, jnp.isnan(out).any()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--length", type=int, nargs="+", default=[2048, 8192], help="tokens of a row, multiples of 64")
    args = parser.parse_args()
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}", flush=True)
    for length, sizes in itertools.product(args.length, SIZES):
        num_blocks = -(-length // CONFIG.select_block)
        for case, packed in itertools.product((operator, selected, decoding), (False, True)):
            began = time.monotonic()
            lists, spoiled = case(length, sizes, packed)
            low, high = int(lists.min()), int(lists.max())
            name = f"T={length} N,K,H={sizes} {case.__name__}{' packed' * packed}"
            if not (0 <= low and high <= num_blocks and spoiled):
                raise SystemExit(f"{name}: entries {low} to {high} of J={num_blocks}, NaN in the result: {spoiled}")
            print(f"{name}: entries {low} to {high}, J={num_blocks}, {time.monotonic() - began:.1f} s", flush=True)


if __name__ == "__main__":
    main()
