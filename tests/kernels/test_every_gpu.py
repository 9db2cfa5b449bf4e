"""The kernels compile for every GPU that is known: their tiles fit its shared memory."""

import jax
import jax.numpy as jnp
import pytest

import nsa_jax
from nsa_jax import aot
from nsa_jax.ops import blocks
from nsa_jax.ops.target import Target

CONFIG = nsa_jax.NSAConfig()
LENGTH = 4096
# name: N, K, H, V
SHAPES = {
    "wide_groups": (64, 4, 128, 128),
    "wide_heads": (16, 4, 192, 128),
    "widest": (16, 4, 192, 192),
    "groups_of_4": (32, 8, 128, 128),
    "small": (12, 2, 64, 64),
}


def compiled(function, *inputs, gpu):
    try:
        return aot.compile_for_gpu(function, *inputs, gpu=gpu)
    except aot.AheadOfTimeUnavailable as error:
        pytest.skip(str(error))


def operator(shape, dtype):
    """The gradient of a sum of outputs, and its inputs."""
    heads, kv_heads, head, value_head = SHAPES[shape]
    count = blocks.num_compressed(LENGTH, CONFIG)

    def array(*dims):
        return jax.ShapeDtypeStruct((1, *dims), dtype)

    key, value = array(LENGTH, kv_heads, head), array(LENGTH, kv_heads, value_head)
    compressed = array(count, kv_heads, head), array(count, kv_heads, value_head)
    inputs = (array(LENGTH, heads, head), *compressed, key, value, key, value, array(LENGTH, heads, 3))

    def loss(*inputs):
        return nsa_jax.nsa_attention(*inputs, config=CONFIG, implementation="pallas").astype(jnp.float32).sum()

    return jax.grad(loss, argnums=tuple(range(8))), inputs


@pytest.mark.slow
@pytest.mark.parametrize(
    ("gpu", "shape", "dtype"),
    [
        ("a6000", "widest", "float32"),
        ("a6000", "wide_groups", "bfloat16"),
        ("l40s", "small", "float32"),
        ("b200", "groups_of_4", "bfloat16"),
        ("rtx-pro-6000", "wide_groups", "float32"),
        ("rtx-pro-6000", "wide_heads", "bfloat16"),
    ],
)
def test_forward_and_backward_fit(gpu, shape, dtype):
    gradient, inputs = operator(shape, dtype)
    assert "__gpu$xla.gpu.triton" in compiled(gradient, *inputs, gpu=gpu).as_text()


@pytest.mark.parametrize("gpu", ["a6000", pytest.param("b200", marks=pytest.mark.slow)])
def test_a_float32_window_fits(gpu):
    """The forward pass alone: with an A100's tiles it asks for 112 KiB of shared memory, where an A6000 has 99."""
    heads, kv_heads, head, _ = SHAPES["wide_groups"]
    query, key = (jax.ShapeDtypeStruct((1, LENGTH, n, head), jnp.float32) for n in (heads, kv_heads))

    def window(query, key, value):
        return nsa_jax.window_attention(query, key, value, window=512, implementation="pallas")

    assert "__gpu$xla.gpu.triton" in compiled(window, query, key, key, gpu=gpu).as_text()


@pytest.mark.slow
@pytest.mark.parametrize(("gpu", "length"), [("l40s", LENGTH), ("b200", LENGTH), ("l40s", 65_536), ("b200", 65_536)])
def test_decoding_fits(gpu, length):
    """Of few blocks, which are all read, and of many."""
    heads, kv_heads, head, _ = SHAPES["wide_groups"]

    def array(*dims):
        return jax.ShapeDtypeStruct((1, *dims), jnp.bfloat16)

    count = blocks.num_compressed(length, CONFIG)
    caches = [array(size, kv_heads, head) for size in (count, count, length, length, CONFIG.window, CONFIG.window)]
    lengths = jax.ShapeDtypeStruct((1,), jnp.int32)

    def step(*inputs):
        return nsa_jax.decode_attention(*inputs, config=CONFIG, implementation="pallas")

    made = compiled(step, array(1, heads, head), *caches, array(1, heads, 3), lengths, gpu=gpu)
    assert "__gpu$xla.gpu.triton" in made.as_text()


@pytest.mark.parametrize(
    ("capability", "kibibytes"),
    [((8, 0), 163), ((8, 6), 99), ((8, 9), 99), ((9, 0), 227), ((10, 0), 227), ((12, 0), 99)],
)
def test_shared_memory_of_a_block(capability, kibibytes):
    """CUDA C++ Programming Guide, table of technical specifications per compute capability."""
    assert Target("gpu", capability).shared_memory == kibibytes * 1024


def test_known_gpus_are_explained_and_have_a_peak():
    from nsa_jax.train.flops import peak_flops

    for name, gpu in aot.GPUS.items():
        assert peak_flops(gpu.device_kind) > 1e14
        made = nsa_jax.explain(length=8192, num_heads=32, num_kv_heads=8, head_dim=128, target=name)
        assert made.unsupported is None and made.rows
        assert made.target.is_hopper == any("sm90" in row.choice.kernel for row in made.rows)
