"""Every kernel, forward and backward, compiles for A100 and H100 at the real shapes, on a machine without a GPU."""

import functools
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import nsa_jax
from nsa_jax import aot
from nsa_jax.nn import ModelConfig, Transformer
from nsa_jax.ops import blocks
from tests.kernels.hollow import hollow_kernels

ROOT = Path(__file__).parents[2]
CONFIG = nsa_jax.NSAConfig()
RESIDUALS = ("nsa_attention_residuals", "nsa_block_indices")

# 4 GiB is the bar, on the versions that GPU work is verified on. JAX 0.12 keeps one more copy: 4.35 GiB.
MAX_TEMP_GIB = 4.0 if jax.__version_info__ < (0, 12) else 4.5

# name: B, T, N, K, H, V
SHAPES = {
    "a100_prod": (8, 2048, 12, 2, 64, 64),
    "h200_long": (1, 65536, 12, 2, 64, 64),
    "paper": (1, 65536, 64, 4, 128, 128),
    "paper_192": (1, 8192, 64, 4, 192, 128),
}


def _inputs(shape):
    batch, length, heads, kv_heads, head, value_head = shape
    num_cmp = blocks.num_compressed(length, CONFIG)

    def array(*dims):
        return jax.ShapeDtypeStruct((batch, *dims), jnp.bfloat16)

    key, value = array(length, kv_heads, head), array(length, kv_heads, value_head)
    compressed = array(num_cmp, kv_heads, head), array(num_cmp, kv_heads, value_head)
    return array(length, heads, head), *compressed, key, value, key, value, array(length, heads, 3)


def _loss(packed):
    def loss(*args):
        *inputs, segment_start = args if packed else (*args, None)
        out = nsa_jax.nsa_attention(*inputs, config=CONFIG, segment_start=segment_start, implementation="pallas")
        return out.astype(jnp.float32).sum()

    return loss


def _cases():
    """Shape, GPU and packing, so that each group of heads meets both kinds of rows on each GPU. Few are not slow."""
    for name in SHAPES:
        for gpu in ("a100-80gb", "h100"):
            kinds = {"a100_prod": (True,), "paper": (False, True) if gpu == "h100" else (True,)}.get(name, (False,))
            for packed in kinds:
                quick = name == "a100_prod" or (name, gpu, packed) == ("paper", "h100", False)
                label = f"{name}-{gpu}-{'packed' if packed else 'plain'}"
                yield pytest.param(name, gpu, packed, id=label, marks=() if quick else pytest.mark.slow)


@pytest.mark.parametrize("name,gpu,packed", list(_cases()))
def test_forward_and_backward_compile_for_gpus_that_are_not_here(name, gpu, packed):
    inputs = _inputs(SHAPES[name])
    segments = (jax.ShapeDtypeStruct(inputs[0].shape[:2], jnp.int32),) if packed else ()
    gradient = jax.grad(_loss(packed), argnums=tuple(range(8)))
    compiled = aot.compile_for_gpu(gradient, *inputs, *segments, gpu=gpu)
    assert "__gpu$xla.gpu.triton" in compiled.as_text()
    temp_gib = compiled.memory_analysis().temp_size_in_bytes / 2**30
    assert temp_gib <= MAX_TEMP_GIB


def test_too_much_shared_memory_is_refused():
    """The compiler really checks the GPU's limit: a kernel that needs 512 KiB must not compile for an A100."""
    from nsa_jax.ops.kernels.triton import triton_call

    def kernel(a_ref, b_ref, out_ref):
        out_ref[...] = jnp.dot(a_ref[...], b_ref[...], preferred_element_type=jnp.float32).astype(out_ref.dtype)

    square = jax.ShapeDtypeStruct((512, 512), jnp.bfloat16)

    def run(a, b):
        return triton_call(kernel, num_warps=8, num_stages=2, out_shape=square, grid=(1,))(a, b)

    with pytest.raises(Exception, match="Shared memory size limit exceeded"):
        aot.compile_for_gpu(run, square, square, gpu="a100-80gb")


def test_unknown_gpu_names_the_known_ones():
    with pytest.raises(ValueError, match="a100-80gb"):
        aot.devices("v100")


@pytest.mark.parametrize("heads", [16, 12])
def test_kernels_of_layers_in_a_scan_run_once(heads):
    """XLA would let a kernel write into the scan's residuals, and run it a second time for its other readers.

    Three branches have three Hopper kernels each; in rows this short the scores have a Triton kernel.
    """
    query, *rest = _inputs((2, 1024, heads, 2, 64, 64))

    def loss(query, keys_values, gates):
        @functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names(*RESIDUALS))
        def layer(query, _):
            out = nsa_jax.nsa_attention(query, *keys_values, gates, config=CONFIG, implementation="pallas")
            return out, None

        return jax.lax.scan(layer, query, None, length=3)[0].astype(jnp.float32).sum()

    gradient = jax.grad(loss, argnums=(0, 1, 2))
    with hollow_kernels():
        compiled = aot.compile_for_gpu(gradient, query, tuple(rest[:6]), rest[6], gpu="h100")
    assert compiled.as_text().count('custom_call_target="mosaic_gpu') == 9


def test_rows_that_fill_no_tile_are_not_copied():
    """Rows of 1,024 tokens with 4 heads each are no multiple of the 192 rows of a query tile; TMA cuts them off."""
    batch, length, group, dim = 2, 1024, 4, 64
    query, *rest = _inputs((batch, length, group, 1, dim, dim))
    with hollow_kernels():
        program = aot.compile_for_gpu(jax.grad(_loss(packed=False), argnums=0), query, *rest, gpu="h100").as_text()
    copies = re.findall(r" = bf16\[([\d,]+)\]\S* (?:pad|slice)\(", program)
    assert 'custom_call_target="mosaic_gpu' in program
    assert all(math.prod(map(int, dims.split(","))) < batch * length * group * dim for dims in copies)


@pytest.mark.parametrize(
    ("length", "group", "dim"),
    [(8192, 4, 128), (1023, 1, 128), (1023, 6, 64)],
    ids=["by_block", "whole_rows_uneven", "cut_tokens"],
)
def test_groups_that_tma_copies_as_they_lie_are_not_rearranged(length, group, dim):
    """Nothing as large as the keys is transposed, forward or backward."""
    batch, kv_heads = 2, 4
    inputs = _inputs((batch, length, group * kv_heads, kv_heads, dim, dim))
    gradient = jax.grad(_loss(packed=False), argnums=tuple(range(8)))
    with hollow_kernels():
        program = aot.compile_for_gpu(gradient, *inputs, gpu="h100").as_text()
    transposed = re.findall(r" = bf16\[([\d,]+)\]\S* transpose\(", program)
    assert 'custom_call_target="mosaic_gpu' in program
    assert all(math.prod(map(int, dims.split(","))) < batch * length * kv_heads * dim for dims in transposed)


def test_each_further_layer_takes_only_what_is_kept_for_its_backward_pass():
    """No copy of its parameters, and no buffer of its backward pass that XLA allocates when the program begins."""
    shape, heads = jax.ShapeDtypeStruct((1, 16_384), jnp.int32), 12

    def model(layers):
        config = ModelConfig(
            dim=64, num_heads=heads, num_kv_heads=2, head_dim=64, vocab_size=64, num_layers=layers, mlp_dim=32_768,
            compute_dtype="bfloat16", remat="attention_saved", scan_layers=False, implementation="pallas",
        )  # fmt: skip
        graphdef, params = nnx.split(nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0))))

        def loss(params, tokens):
            return nnx.merge(graphdef, params).hidden(tokens).astype(jnp.float32).sum()

        return loss, params

    def temporary(layers):
        loss, params = model(layers)
        with hollow_kernels():
            compiled = aot.compile_for_gpu(jax.grad(loss), params, shape, gpu="h100")
        return compiled.memory_analysis().temp_size_in_bytes

    # Layer's input, three branches, a log-sum-exp for each of their rows, and the block lists.
    kept = shape.size * (2 * 64 + 3 * heads * (2 * 64 + 4) + 4 * 2 * 16)
    assert (temporary(3) - temporary(1)) / 2 <= 1.1 * kept


def test_long_rows_of_six_heads_per_group_get_hoppers_kernels():
    """For the blocks that tiles share, the other list entries, the sum of these and shares of dq."""
    query = jax.ShapeDtypeStruct((4, 32768, 6, 64), jnp.bfloat16)
    key = value = jax.ShapeDtypeStruct((4, 32768, 1, 64), jnp.bfloat16)
    indices = jax.ShapeDtypeStruct((4, 32768, 1, 16), jnp.int32)

    def gradients(query, key, value, indices):
        def loss(*tensors):
            attend = functools.partial(nsa_jax.selected_attention, select_block=64, implementation="pallas")
            return attend(*tensors, indices).astype(jnp.float32).sum()

        return jax.grad(loss, argnums=(0, 1, 2))(query, key, value)

    compiled = aot.compile_for_gpu(gradients, query, key, value, indices, gpu="h100")
    replaced = (
        "selected_forward_tiles",
        "selected_forward_shares",
        "selected_forward_sum",
        "selected_backward_key_major",
    )
    triton = "\n".join(line for line in compiled.as_text().splitlines() if "__gpu$xla.gpu.triton" in line)
    assert "nsa_selected_split" in triton and not any(name in triton for name in replaced)
    assert compiled.as_text().count('custom_call_target="mosaic_gpu') == 4


def test_kernels_that_write_in_place_serve_a_mapped_operator():
    """Mosaic GPU's calls have no batching rule where they write in place."""
    query, key = (jax.ShapeDtypeStruct((2, 1, 4096, heads, 64), jnp.bfloat16) for heads in (8, 2))
    indices = jax.ShapeDtypeStruct((2, 1, 4096, 2, 16), jnp.int32)
    attend = functools.partial(nsa_jax.selected_attention, select_block=64, implementation="pallas")
    with hollow_kernels():
        compiled = aot.compile_for_gpu(jax.vmap(attend), query, key, key, indices, gpu="h100")
    assert compiled.out_info.shape == query.shape and "nsa_selected_forward_sum" in compiled.as_text()


@pytest.mark.slow
def test_hoppers_kernels_by_block_compile_at_head_dim_128(monkeypatch):
    query, key = (jax.ShapeDtypeStruct((1, 4096, heads, 128), jnp.bfloat16) for heads in (8, 2))
    indices = jax.ShapeDtypeStruct((1, 4096, 2, 16), jnp.int32)

    def loss(*inputs):
        attend = functools.partial(nsa_jax.selected_attention, select_block=64, implementation="pallas")
        return attend(*inputs).astype(jnp.float32).sum()

    gradient = jax.grad(loss, argnums=(0, 1, 2))
    text = aot.compile_for_gpu(gradient, query, key, key, indices, gpu="h100").as_text()
    assert text.count('custom_call_target="mosaic_gpu') == 4
    names = (
        "nsa_ranged_forward",
        "nsa_selected_forward_shares",
        "nsa_selected_forward_sum",
        "nsa_selected_backward_key_major",
    )
    assert all(name in text for name in names)


@pytest.mark.slow
def test_kernels_compile_where_64_bit_types_are_enabled():
    """Python integers and sums of integers are 64 bits wide then, outside of the kernels."""
    query, *rest = inputs = _inputs((1, 512, 12, 2, 64, 64))
    segments = jax.ShapeDtypeStruct(query.shape[:2], jnp.int32)
    newest = [jax.ShapeDtypeStruct((1, 1, *x.shape[2:]), x.dtype) for x in (query, inputs[7])]
    decode = functools.partial(nsa_jax.decode_attention, config=CONFIG, implementation="pallas", return_info=True)
    with jax.enable_x64(True):
        aot.compile_for_gpu(jax.grad(_loss(packed=True), argnums=(0, 3)), *inputs, segments, gpu="a100-80gb")
        lengths = jax.ShapeDtypeStruct((1,), jnp.int64)
        aot.compile_for_gpu(decode, newest[0], *rest[:6], newest[1], lengths, gpu="a100-80gb")


@pytest.mark.parametrize("gpu", sorted(aot.GPUS))
def test_what_is_made_while_tracing_for_a_gpu_may_meet_arrays_of_its_mesh(gpu):
    """As in a train step, whose key for dropout comes from the step of the state and the micro-batch."""
    mesh = Mesh(np.array(aot.devices(gpu, 2)), ("data",), axis_types=(AxisType.Auto,))
    step = jax.ShapeDtypeStruct((), jnp.int32, sharding=NamedSharding(mesh, PartitionSpec()))
    with aot.tracing_for(gpu, mesh):
        jax.jit(lambda step: jax.random.fold_in(jax.random.fold_in(jax.random.key(0), step), 0)).trace(step)


@pytest.mark.parametrize("gpu", ["a100-80gb", "h100"])
def test_the_text_of_a_program_stays_when_lines_of_a_caller_move(gpu):
    """JAX finds compiled programs by it. From JAX 0.11 on, Triton kernels can have the lines of their callers."""
    script = """
import sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, Mesh
from nsa_jax import aot, devices, window_attention

devices.keep_compiled_programs(lines=sys.argv[1] == "lines")
found = {}
code = "def total(q, k, v): return window_attention(q, k, v, window=64, implementation='pallas').astype(float).sum()"
exec(compile("\\n" * int(sys.argv[2]) + code, "model.py", "exec"), globals(), found)
shapes = [jax.ShapeDtypeStruct((1, 256, heads, 64), jnp.bfloat16) for heads in (4, 2, 2)]
mesh = Mesh(np.array(aot.devices(sys.argv[3])), ("device",), axis_types=(AxisType.Auto,))
with aot.tracing_for(sys.argv[3], mesh):
    print(jax.jit(jax.grad(found["total"])).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text())
"""

    def text(lines, moved):
        environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
        environment.pop("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", None)
        command = [sys.executable, "-c", script, lines, str(moved), gpu]
        done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    told = text("none", 0)
    assert ("mosaic_gpu" if gpu == "h100" else "triton") in told and told == text("none", 3)
    if jax.__version_info__ >= (0, 11) and gpu != "h100":
        assert text("lines", 0) != text("lines", 3)
