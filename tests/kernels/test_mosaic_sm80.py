"""Values of the A100 prototype in benchmarks/mosaic_sm80.py without a GPU: its PTX, emulated, against float64."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from nsa_jax.config import NSAConfig
from nsa_jax.ops import blocks
from tests.kernels import ptx

if jax.__version_info__ < (0, 11):
    pytest.skip("the prototype needs JAX 0.11, whose plgpu has Layout.MMA_ACC", allow_module_level=True)

from benchmarks.mosaic_sm80_parts import DIM  # noqa: E402
from benchmarks.mosaic_sm80_tiles import Variant  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parents[2]
VARIANTS = {
    variant.name: variant
    for variant in (
        Variant(row_tiles=2, warpgroups=1, keys=64, stages=1),
        Variant(row_tiles=2, warpgroups=1, keys=32, stages=2),
        Variant(row_tiles=1, warpgroups=2, keys=64, stages=2),
    )
}

# The last tile sees two whole blocks of 64 keys and a part of the third, which the 159 keys do not fill. A tile of 128
# rows begins and ends within the 12 heads of a token.
CONFIG = NSAConfig(compress_block=4, compress_stride=2, select_block=16, num_selected=4)
BATCH, LENGTH, HEADS, KV_HEADS = 2, 320, 24, 2
GROUP = HEADS // KV_HEADS
KEYS = blocks.num_compressed(LENGTH, CONFIG)
SHAPES = (BATCH, LENGTH, HEADS, DIM), (BATCH, KEYS, KV_HEADS, DIM), (BATCH, KEYS, KV_HEADS, DIM)

# In a process of its own: Mosaic GPU keeps the first GPU's settings of ptxas for as long as a process lasts. JAX takes
# every GPU that is not there for a Hopper GPU, so it is told.
COMPILE = """
import functools, sys
from jax.experimental.mosaic.gpu import utils
from benchmarks.mosaic_sm80_kernel import compressed_forward
from nsa_jax.aot import compile_for_gpu
from tests.kernels import test_mosaic_sm80 as test

utils._infer_arch = lambda: (8, 0)
function = functools.partial(compressed_forward, config=test.CONFIG, variant=test.VARIANTS[sys.argv[1]])
compile_for_gpu(function, *test.shapes(), gpu="a100-80gb")
"""


def shapes() -> list[jax.ShapeDtypeStruct]:
    """Query, keys and values."""
    return [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in SHAPES]


def compiled(script: str, name: str, folder: pathlib.Path) -> str:
    """The PTX of a variant that a script compiles for an A100, which Mosaic GPU leaves in an empty folder."""
    settings = {"MOSAIC_GPU_DUMP_TO": str(folder), "JAX_ENABLE_COMPILATION_CACHE": "false"}
    command = [sys.executable, "-c", script, name]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | settings, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    (path,) = folder.glob("*.ptx")
    return path.read_text()


def expected(query, key, value, tokens, heads):
    """Output [rows, H] and log-sum-exp [rows], float64, of the pairs of a token and a head of one batch and KV head."""
    last = np.arange(KEYS) * CONFIG.compress_stride + CONFIG.compress_block - 1
    query, key, value = (x.astype(np.float64) for x in (query[tokens, heads], key, value))
    scores = np.where(last <= tokens[:, None], query @ key.T / np.sqrt(DIM), -np.inf)  # [rows, KEYS]
    sees = last[0] <= tokens
    peak = np.where(sees, scores.max(axis=1), 0)
    weights = np.exp(scores - peak[:, None])
    total = np.where(sees, weights.sum(axis=1), 1)
    return weights @ value / total[:, None], np.where(sees, peak + np.log(total), -np.inf)


@pytest.mark.parametrize("name", VARIANTS)
def test_emulated_tiles_match_float64_and_write_nothing_else(name, tmp_path):
    variant = VARIANTS[name]
    text = compiled(COMPILE, name, tmp_path)
    generator = np.random.default_rng(0)
    inputs = [generator.normal(size=shape).astype(ml_dtypes.bfloat16) for shape in SHAPES]
    for x in inputs:
        x.flags.writeable = False
    tiles = LENGTH * GROUP // variant.rows
    shared_bytes = (variant.rows + 2 * variant.stages * variant.keys) * DIM * 2
    for tile, kv_head, batch in ((0, 0, 1), (tiles // 2, 1, 0), (tiles - 1, 1, 1)):
        out = np.full(SHAPES[0], np.nan, ml_dtypes.bfloat16)
        lse = np.full(SHAPES[0][:3], np.nan, np.float32)
        # The kernel's parameters are in the order of their first use. Late tiles go first.
        buffers = [x.reshape(-1).view(np.uint8) for x in (*inputs, lse, out)]
        emulator = ptx.Emulator(text, (batch, kv_head, tiles - 1 - tile), buffers, shared_bytes)
        emulator.run()
        assert emulator.bank_conflicts == 0

        tokens, heads = np.divmod(np.arange(tile * variant.rows, (tile + 1) * variant.rows), GROUP)
        heads += kv_head * GROUP
        query, key, value = inputs[0][batch], inputs[1][batch, :, kv_head], inputs[2][batch, :, kv_head]
        want, want_lse = expected(query, key, value, tokens, heads)
        got, got_lse = out[batch, tokens, heads].astype(np.float64), lse[batch, tokens, heads]
        np.testing.assert_allclose(got, want, rtol=0, atol=4e-3 * np.abs(want).max())
        np.testing.assert_allclose(got_lse, want_lse, rtol=0, atol=1e-5)
        out[batch, tokens, heads] = lse[batch, tokens, heads] = np.nan
        assert np.isnan(out.astype(np.float32)).all() and np.isnan(lse).all(), "wrote outside of its tile"


# Two warps copy 16 bytes per thread to shared memory; each thread reads those of the other warp and stores them.
COPY = """
    .visible .entry copy(.param .u64 copy_param_0) .maxntid 64, 1, 1
{
    ld.param.b64 %rd1, [copy_param_0];
    mul.wide.u32 %rd2, %tid.x, 16;
    add.s64 %rd3, %rd1, %rd2;
    mov.b64 %rd4, __dynamic_shmem__0;
    cvt.u32.u64 %r1, %rd4;
    shl.b32 %r2, %tid.x, 4;
    add.s32 %r3, %r1, %r2;
    xor.b32 %r4, %r3, 512;
    cp.async.cg.shared.global [%r3], [%rd3], 16; cp.async.commit_group;
    cp.async.wait_group 0;
    bar.sync 0;
    ld.shared.v4.b32 {%r5, %r6, %r7, %r8}, [%r4];
    st.global.v4.b32 [%rd3], {%r5, %r6, %r7, %r8};
    ret;
}
"""


def emulate_copy(old: str = "", new: str = "") -> np.ndarray:
    """What `COPY`, with one text in place of another, makes of each thread's number: uint8 [64, 16]."""
    assert old in COPY
    buffer = np.repeat(np.arange(64, dtype=np.uint8), 16)
    ptx.Emulator(COPY.replace(old, new, 1), (0, 0, 0), [buffer], buffer.size).run()
    return buffer.reshape(64, 16)


def test_emulated_copies_are_visible_after_a_wait_and_a_barrier():
    assert (emulate_copy().T == np.roll(np.arange(64), 32)).all()
    assert (emulate_copy("cp.async.wait_group 0;") == 0xFF).all()
    assert (emulate_copy("wait_group 0", "wait_group 1") == 0xFF).all()


@pytest.mark.parametrize(
    "old, new, problem",
    [
        ("bar.sync 0;", "", "line 15: ld.shared.*race"),
        ("ret;", "st.shared.b32 [%r3], %r5; ret;", "line 17: st.shared.*race"),
        ("%rd2, %tid.x, 16", "%rd2, %tid.x, 32", "line 12: cp.async.*bytes 0 to 2032 of 1024 global"),
        ("%r4, %r3, 512", "%r4, %r3, 4096", "line 15: ld.shared.*bytes 4096 to 5120 of 1024 shared"),
        ("%rd2, %tid.x, 16", "%rd2, %tid.x, 8", "line 12: cp.async.*16 aligned"),
        ("shl.b32", "shf.l.b32", "line 9: shf.l.b32.*unknown instruction"),
        ("%r2, %tid.x, 4", "%r2, %r9, 4", "line 9: shl.b32.*%r9"),
        ("ret;", "setp.eq.u32 %p1, %r2, 0; @%p1 bra $L_end;\n$L_end:\nret;", "line 17: @%p1 bra.*some of the threads"),
    ],
)
def test_the_emulator_refuses_wrong_programs(old, new, problem):
    with pytest.raises(RuntimeError, match=problem):
        emulate_copy(old, new)
