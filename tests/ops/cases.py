"""Named inputs of the operator suite, and the implementations it runs with their bars."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import nsa_jax
from nsa_jax import NSAConfig
from nsa_jax.ops import blocks

SMALL = NSAConfig(
    compress_block=8, compress_stride=4, select_block=16, num_selected=4, num_initial=1, num_local=2, window=24
)
TINY = NSAConfig(
    compress_block=4, compress_stride=4, select_block=4, num_selected=3, num_initial=1, num_local=1, window=5
)
ARGUMENTS = ("query", "key_cmp", "value_cmp", "key_slc", "value_slc", "key_win", "value_win", "gates")


@dataclasses.dataclass(frozen=True)
class Case:
    """Sizes in the symbols of the operator; `packing` is "", "documents" or "blind" (some rows see nothing)."""

    name: str
    T: int
    N: int = 2
    K: int = 1
    H: int = 16
    V: int = 16
    B: int = 2
    offset: int = 0
    packing: str = ""
    config: NSAConfig = SMALL
    dtype: Any = jnp.float32

    def __str__(self) -> str:
        return self.name

    @property
    def S(self) -> int:
        return self.T + self.offset

    def rng(self) -> np.random.Generator:
        return np.random.default_rng([ord(c) for c in self.name])

    def segment_start(self) -> jax.Array | None:
        if not self.packing:
            return None
        rng = np.random.default_rng(self.T)
        t = np.arange(self.offset, self.S)
        if self.packing == "blind":
            start = np.where(rng.random((self.B, self.T)) < 0.3, t + 1 + rng.integers(0, 5), rng.integers(0, t + 1))
            start[:, -1] = self.S
            return jnp.asarray(start, jnp.int32)
        rows = []
        for _ in range(self.B):
            begins = np.unique(np.concatenate([[0], rng.integers(1, self.S, 3)]))
            rows.append(begins[np.searchsorted(begins, t, side="right") - 1])
        return jnp.asarray(np.stack(rows), jnp.int32)

    def inputs(self) -> dict[str, jax.Array]:
        """The arrays of `nsa_attention` by name."""
        rng, cmp = self.rng(), blocks.num_compressed(self.S, self.config)
        shapes = dict(
            query=(self.B, self.T, self.N, self.H),
            key_cmp=(self.B, cmp, self.K, self.H),
            value_cmp=(self.B, cmp, self.K, self.V),
            key_slc=(self.B, self.S, self.K, self.H),
            value_slc=(self.B, self.S, self.K, self.V),
            key_win=(self.B, self.S, self.K, self.H),
            value_win=(self.B, self.S, self.K, self.V),
            gates=(self.B, self.T, self.N, 3),
        )
        arrays = {name: rng.normal(size=shape) for name, shape in shapes.items()}
        arrays["gates"] = 1 / (1 + np.exp(-arrays["gates"]))
        return {name: jnp.asarray(array, self.dtype) for name, array in arrays.items()}

    def cotangent(self) -> np.ndarray:
        return np.random.default_rng(7).normal(size=(self.B, self.T, self.N, self.V)).astype(np.float32)

    def kwargs(self) -> dict[str, Any]:
        return dict(config=self.config, segment_start=self.segment_start(), query_offset=self.offset or None)


CASES = (
    Case("one_token", T=1),
    Case("shorter_than_a_block", T=5, N=2, K=2),
    Case("group_1_ragged", T=61, N=2, K=2),
    Case("group_2_packed", T=77, N=4, K=2, packing="documents"),
    Case("group_3_wide_values", T=64, N=6, K=2, H=16, V=32),
    Case("group_6_packed_narrow_values", T=50, N=6, K=1, H=32, V=16, packing="documents"),
    Case("group_16", T=70, N=16, K=1),
    Case("long_gathers", T=300, N=2, K=1, B=1),
    Case("offset", T=33, N=3, K=1, offset=45),
    Case("offset_packed", T=19, N=2, K=1, offset=60, packing="documents"),
    Case("blind_rows", T=66, N=4, K=2, packing="blind"),
    Case("equal_blocks", T=41, N=2, K=1, config=TINY),
    Case("bfloat16_packed", T=77, N=4, K=2, packing="documents", dtype=jnp.bfloat16),
)
BY_NAME = {case.name: case for case in CASES}


@dataclasses.dataclass(frozen=True)
class Tested:
    """An implementation under test: relative errors it must meet, and the cases it runs.

    Attributes:
      implementation: name passed to the ops.
      label: shown in test ids.
      values: bar for float32 values; `gradients`, `values_bf16` and `gradients_bf16` likewise.
      cases: cases to run.
      patches: attributes to set while it runs, "module:attribute" -> value.
      options: more arguments of `nsa_attention`.
    """

    __test__ = False  # not a test class, whatever its name

    implementation: str
    label: str = ""
    values: float = 1e-5
    gradients: float = 1e-4
    values_bf16: float = 4e-3
    gradients_bf16: float = 1e-2
    cases: tuple[Case, ...] = CASES
    patches: tuple[tuple[str, Any], ...] = ()
    options: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        return self.label or self.implementation


# Small chunks and no dense path: every loop and gather of the xla implementation runs on small inputs.
CHUNKED = (
    ("nsa_jax.ops.xla._CHUNK_ELEMENTS", {"cpu": 2048}),
    ("nsa_jax.ops.xla._CHUNK_ELEMENTS_ELSEWHERE", 2048),
    (
        "nsa_jax.ops.xla._DENSE_FACTOR",
        0,
    ),
)
# On a GPU the kernels multiply float32 on the matrix units, in three tf32 passes.
ON_GPU = jax.default_backend() == "gpu"
INTERPRETED = (
    "one_token",
    "shorter_than_a_block",
    "group_2_packed",
    "group_3_wide_values",
    "offset_packed",
    "blind_rows",
    "bfloat16_packed",
)
TESTED = (
    Tested("xla"),
    Tested("xla", label="xla_chunked", patches=CHUNKED),
    Tested(
        "pallas",
        values=1e-3 if ON_GPU else 1e-5,
        gradients=1e-3 if ON_GPU else 1e-4,
        # Interpreted kernels are slow; tests/kernels has many more cases of each.
        cases=CASES if ON_GPU else tuple(BY_NAME[name] for name in INTERPRETED),
    ),
    Tested(
        "pallas",
        label="pallas_nonnegative_gates",
        values=1e-3 if ON_GPU else 1e-5,
        gradients=1e-3 if ON_GPU else 1e-4,
        cases=CASES if ON_GPU else (BY_NAME["bfloat16_packed"],),
        options=(("nonnegative_gates", True),),
    ),
    # What groups of 3, 5, 6, 7 and other sizes that TMA cannot copy as they lie get on Hopper.
    Tested(
        "pallas",
        label="pallas_heads_to_batch",
        values=1e-3 if ON_GPU else 1e-5,
        gradients=1e-3 if ON_GPU else 1e-4,
        cases=tuple(BY_NAME[name] for name in ("group_3_wide_values", "blind_rows")),
        patches=(("nsa_jax.ops.plan.moves_heads_to_batch", lambda *args: True),),
        options=(("nonnegative_gates", True),),
    ),
)


def relative_error(actual, expected, floor: float = 1e-2) -> float:
    """||actual - expected|| / max(||expected||, floor); the floor serves gradients that are zero but for rounding."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    return float(np.linalg.norm(actual - expected) / max(float(np.linalg.norm(expected)), floor))


def run(case: Case, implementation: str, arrays: dict[str, jax.Array] | None = None, **options: Any):
    """Branch outputs, lists, the gated output and its gradients, by name; `options` are `nsa_attention`'s."""
    arrays = case.inputs() if arrays is None else arrays
    common = dict(segment_start=case.segment_start(), query_offset=case.offset or None, implementation=implementation)
    weight = jnp.asarray(case.cotangent())

    @jax.jit
    def everything(arrays):
        def loss(arrays):
            out, lists = nsa_jax.nsa_attention(
                **arrays, **common, **options, config=case.config, return_block_indices=True
            )
            return (out.astype(jnp.float32) * weight).sum(), (out, lists)

        (_, (out, lists)), gradients = jax.value_and_grad(loss, has_aux=True)(arrays)
        query = arrays["query"]
        cmp, lse = nsa_jax.compressed_attention(
            query, arrays["key_cmp"], arrays["value_cmp"], config=case.config, **common
        )
        slc = nsa_jax.selected_attention(
            query, arrays["key_slc"], arrays["value_slc"], lists, select_block=case.config.select_block, **common
        )
        win = nsa_jax.window_attention(
            query, arrays["key_win"], arrays["value_win"], window=case.config.window, **common
        )
        values = dict(out=out, compressed=cmp, lse=lse, selected=slc, window=win)
        return values, lists, gradients

    return jax.device_get(everything(arrays))


@functools.cache
def reference(case: Case):
    """What the reference implementation gives for a case, in float32."""
    arrays = {name: array.astype(jnp.float32) for name, array in case.inputs().items()}
    return run(case, "reference", arrays)
