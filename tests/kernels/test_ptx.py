"""The emulator of PTX runs right programs and refuses wrong ones."""

from __future__ import annotations

import numpy as np
import pytest

from tests.kernels import ptx

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
