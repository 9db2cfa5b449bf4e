"""Range attention with Ampere instructions, without a GPU: the sm80 kernels' PTX, emulated, and in float64.

Kernels are compiled for an A100 with the tiles that the plan chooses for one.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from nsa_jax.config import NSAConfig
from nsa_jax.ops import blocks, tiles
from nsa_jax.ops.kernels.range_attention import attention
from nsa_jax.ops.kernels.range_attention import tiles as attention_tiles
from nsa_jax.ops.kernels.softmax import LOG2E, NO_WEIGHT
from tests.kernels import ptx

if jax.__version_info__ < (0, 11):
    pytest.skip("these kernels need JAX 0.11, whose plgpu has Layout.MMA_ACC", allow_module_level=True)

from nsa_jax.ops.kernels.range_attention import (  # noqa: E402
    sm80_forward,
    sm80_grad_key_value,
    sm80_grad_query,
    sm80_tiles,
)


@dataclasses.dataclass(frozen=True)
class Case:
    """A problem: batch entry 0 has one document, entry 1 has three. `num_keys` is T or that of compressed keys."""

    length: int
    group: int
    dim: int
    window: int | None = None  # None: the compressed branch
    compress_block: int = 4
    kv_heads: int = 2
    batch: int = 2

    @property
    def config(self) -> NSAConfig:
        return NSAConfig(compress_block=self.compress_block, compress_stride=2, select_block=16, num_selected=4)

    @property
    def num_keys(self) -> int:
        return self.length if self.window else blocks.num_compressed(self.length, self.config)

    @functools.cached_property
    def ranges(self) -> tuple[np.ndarray, np.ndarray]:
        """(low, high) of every query, int32 [B, T], as kernels take them."""
        t = np.arange(self.length, dtype=np.int32)
        start = np.stack([np.zeros_like(t), np.where(t < 70, 0, np.where(t < 75, 70, 75)).astype(np.int32)])
        if self.window:
            low, high = np.maximum(start, t - self.window + 1), np.broadcast_to(t + 1, start.shape)
        else:
            low, high = blocks.compressed_range(np.broadcast_to(t, start.shape), start, self.config)
        return attention.clip_ranges(np.asarray(low), np.asarray(high), self.num_keys)

    def shapes(self, kind: str) -> list[jax.ShapeDtypeStruct]:
        """What a kernel takes, in order."""
        query = jax.ShapeDtypeStruct((self.batch, self.length, self.kv_heads * self.group, self.dim), jnp.bfloat16)
        key = jax.ShapeDtypeStruct((self.batch, self.num_keys, self.kv_heads, self.dim), jnp.bfloat16)
        row = jax.ShapeDtypeStruct(query.shape[:3], jnp.float32)
        token = jax.ShapeDtypeStruct((self.batch, self.length), jnp.int32)
        return [query, key, key, *([query, row, row] if kind != "forward" else []), token, token]


CASES = {
    # 3,804 rows of a head do not fill the last tile, nor do 157 keys the last block.
    "compressed": Case(length=317, group=12, dim=128),
    "window": Case(length=211, group=5, dim=64, window=50),
    "first_tile_sees_nothing": Case(length=101, group=12, dim=64, compress_block=16),
    "less_than_a_tile": Case(length=3, group=5, dim=64, window=2),
}
SPLITS = {"compressed": 3}  # programs that share the query tiles of a block of keys; 1 of other cases


def kernel(kind: str, name: str) -> Callable:
    """A kernel with the tiles that the plan chooses."""
    if kind == "forward":
        return functools.partial(sm80_forward.ranged_forward, config=tiles.ranged_sm80_forward_config())
    if kind == "dq":
        return functools.partial(sm80_grad_query.grad_query, config=tiles.ranged_sm80_dq_config())
    config = dataclasses.replace(tiles.ranged_sm80_dkv_config(), splits=SPLITS.get(name, 1))
    return functools.partial(sm80_grad_key_value.grad_key_value, config=config)


def compiled(kind: str, name: str, folder: pathlib.Path) -> str:
    """The PTX of a kernel."""
    code = f"test.kernel({kind!r}, {name!r}), *test.CASES[{name!r}].shapes({kind!r})"
    return ptx.compiled(code, "test_sm80", folder)


@functools.cache
def numbers(name: str) -> dict[str, np.ndarray]:
    """Random inputs of a case, and the output, log-sum-exp, delta and gradients in float64."""
    case = CASES[name]
    generator = np.random.default_rng(0)
    query, key, value, grad = (
        generator.normal(size=x.shape).astype(ml_dtypes.bfloat16)
        for x in (*case.shapes("forward")[:3], case.shapes("forward")[0])
    )
    low, high = case.ranges
    position = np.arange(case.num_keys)
    visible = (position >= low[..., None]) & (position < high[..., None])  # [B, T, S]

    def grouped(x):  # [B, K, T, G, ...]
        return x.reshape(case.batch, case.length, case.kv_heads, case.group, -1).swapaxes(1, 2).astype(np.float64)

    def ungrouped(x):
        return x.swapaxes(1, 2).reshape(case.batch, case.length, case.kv_heads * case.group, -1)

    q, g = grouped(query), grouped(grad)
    k, v = (x.swapaxes(1, 2).astype(np.float64) for x in (key, value))  # [B, K, S, H]
    scores = np.einsum("bktgh,bksh->bktgs", q, k) / np.sqrt(case.dim)
    scores = np.where(visible[:, None, :, None], scores, -np.inf)
    some = visible.any(-1)[:, None, :, None]
    peak = np.where(some, scores.max(-1), 0)
    weights = np.exp(scores - peak[..., None])
    total = np.where(some, weights.sum(-1), 1)
    weights /= total[..., None]
    out = np.einsum("bktgs,bksh->bktgh", weights, v)
    lse = np.where(some, peak + np.log(total), -np.inf)
    delta = (out * g).sum(-1)
    d_scores = weights * (np.einsum("bktgh,bksh->bktgs", g, v) - delta[..., None]) / np.sqrt(case.dim)
    found = {
        "query": query, "key": key, "value": value, "grad": grad,
        "out": ungrouped(out), "lse": ungrouped(lse)[..., 0], "delta": ungrouped(delta)[..., 0],
        "dq": ungrouped(np.einsum("bktgs,bksh->bktgh", d_scores, k)),
        "dk": np.einsum("bktgs,bktgh->bskh", d_scores, q),
        "dv": np.einsum("bktgs,bktgh->bskh", weights, g),
    }  # fmt: skip
    return {kind: read_only(x) for kind, x in found.items()}


def read_only(x) -> np.ndarray:
    """A copy into which the emulator cannot store."""
    x = np.array(x, order="C")
    x.flags.writeable = False
    return x


def vectors(name: str, rows: int, keys: int) -> dict[str, np.ndarray]:
    """What the kernels read of rows besides: bounds, ranges and pairs."""
    case, of = CASES[name], numbers(name)
    problem = sm80_tiles.Problem.of(of["query"], of["key"], rows, keys)
    lse = np.where(of["lse"] == -np.inf, NO_WEIGHT, of["lse"] * LOG2E).astype(np.float32)
    found = {
        "bounds": problem.bounds(*case.ranges, None),
        "ranges": problem.row_ranges(*map(jnp.asarray, case.ranges)),
        "pairs": problem.row_pairs(jnp.asarray(lse), jnp.asarray(of["delta"], jnp.float32)),
    }
    return {kind: read_only(x) for kind, x in found.items()}


def as_bytes(*arrays: np.ndarray) -> list[np.ndarray]:
    return [x.reshape(-1).view(np.uint8) for x in arrays]


def shared_bytes(*rows_and_bytes: tuple[int, int]) -> int:
    """Buffers of rows of as many bytes begin at multiples of 1,024 bytes."""
    return sum(-(-rows * size // 1024) * 1024 for rows, size in rows_and_bytes)


def tile_rows(case: Case, tile: int, kv_head: int, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and heads of a tile's rows."""
    row = np.arange(tile * rows, min((tile + 1) * rows, case.length * case.group))
    return row // case.group, row % case.group + kv_head * case.group


@pytest.mark.parametrize("kind", ["forward", "dq"])
@pytest.mark.parametrize("name", CASES)
def test_emulated_tiles_match_float64_and_write_nothing_else(name, kind, tmp_path):
    case, of = CASES[name], numbers(name)
    text = ptx.compiled(
        f"test.kernel({kind!r}, {name!r}), *test.CASES[{name!r}].shapes({kind!r})", "test_sm80", tmp_path
    )
    config = kernel(kind, name).keywords["config"]
    vector = vectors(name, config.rows, config.keys)
    count = -(-case.length * case.group // config.rows)
    inputs = 1 if kind == "forward" else 2
    size = shared_bytes(*[(config.rows, 2 * case.dim)] * inputs, *[(config.keys, 2 * case.dim)] * 2)
    for tile, kv_head, batch in {(0, 0, 1), (count // 2, 1, 0), (count // 2, 0, 1), (count - 1, 1, 1)}:
        out = np.full(of["query"].shape, np.nan, ml_dtypes.bfloat16)
        lse = np.full(out.shape[:3], np.nan, np.float32)
        # The kernel's parameters are in the order of their first use. Late tiles go first.
        if kind == "forward":
            used = vector["bounds"], of["query"], of["key"], of["value"], vector["ranges"], lse, out
        else:
            used = vector["bounds"], of["query"], of["grad"], of["value"], vector["pairs"], of["key"]
            used = *used, vector["ranges"], out
        emulator = ptx.Emulator(text, (batch, kv_head, count - 1 - tile), as_bytes(*used), size)
        emulator.run()
        assert emulator.bank_conflicts == 0

        at = batch, *tile_rows(case, tile, kv_head, config.rows)
        want = of["out" if kind == "forward" else "dq"]
        tolerance = (4e-3 if kind == "forward" else 1e-2) * np.abs(want[at]).max()
        np.testing.assert_allclose(out[at].astype(np.float64), want[at], rtol=0, atol=tolerance)
        if kind == "forward":
            np.testing.assert_allclose(lse[at], of["lse"][at], rtol=0, atol=1e-5)
        out[at] = lse[at] = np.nan
        assert np.isnan(out.astype(np.float32)).all() and np.isnan(lse).all(), "wrote outside of its tile"


@pytest.mark.parametrize("name", CASES)
def test_emulated_gradients_of_keys_and_values_match_float64(name, tmp_path):
    case, of = CASES[name], numbers(name)
    text = compiled("dkv", name, tmp_path)
    config = kernel("dkv", name).keywords["config"]
    splits = config.splits
    dtype = ml_dtypes.bfloat16 if splits == 1 else np.float32
    vector = vectors(name, config.rows, 64)
    seen = read_only(
        attention_tiles.query_tile_ranges(*map(jnp.asarray, case.ranges), case.group, config.rows, 64, case.num_keys)
    )
    row, in_flight = 2 * case.dim, config.stages * config.rows
    size = shared_bytes(*[(64, row)] * 2, *[(in_flight, row)] * 2, *[(in_flight, 8)] * 2)
    last = -(-case.num_keys // 64) - 1
    for block, kv_head, batch in {(0, 1, 0), (last // 2, 0, 1), (last, 0, 1)}:
        shares = [np.full((splits, *of["key"].shape), np.nan, dtype) for _ in range(2)]
        used = seen, of["key"], of["value"], vector["pairs"], vector["ranges"], of["query"], of["grad"], *shares
        for split in range(splits):
            emulator = ptx.Emulator(text, (batch, kv_head, block * splits + split), as_bytes(*used), size)
            emulator.run()
            assert emulator.bank_conflicts == 0

        own = np.arange(block * 64, min((block + 1) * 64, case.num_keys))
        for share, want in zip(shares, (of["dk"], of["dv"]), strict=True):
            got, want = share[:, batch, own, kv_head].astype(np.float64).sum(0), want[batch, own, kv_head]
            np.testing.assert_allclose(got, want, rtol=0, atol=1e-2 * np.abs(want).max())
            share[:, batch, own, kv_head] = np.nan
            assert np.isnan(share.astype(np.float32)).all(), "wrote outside of its block"


def test_what_tiles_visit_is_the_same_if_tracing_knows_it():
    query, key = jnp.zeros((3, 317, 12, 128)), jnp.zeros((3, 157, 1, 128))
    config = CASES["compressed"].config
    known = attention.known_compressed_ranges(317, 0, 157, config)
    low, high = attention.clip_ranges(*attention.compressed_ranges(query, None, 0, config), 157)
    problem = sm80_tiles.Problem.of(query, key, 128, 64)
    np.testing.assert_array_equal(problem.bounds(low, high, known), problem.bounds(low, high, None))
