"""Compiled training steps hold no operation whose result depends on the order in which GPU threads add."""

import os
import subprocess
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from nsa_jax import aot
from nsa_jax.config import ConfigError
from nsa_jax.train.compiler import compiler_options
from nsa_jax.train.preflight import memory
from nsa_jax.train.preflight.hlo import nondeterministic
from nsa_jax.train.state import setup
from nsa_jax.train.step import make_train_step
from tests.kernels.hollow import hollow_kernels

from .tiny import one_device, tiny_config

VOCAB = 320

# name: devices, GPU, changes of the config
CASES = {
    "nsa_a100_untied_accumulated_dropout": (
        1,
        "a100-80gb",
        dict(model__tie_embeddings=False, train__grad_accum=2, model__dropout=0.1),
    ),
    "nsa_scanned_fsdp": (4, "h100", dict(mesh__fsdp=4, model__scan_layers=True, model__num_layers=2)),
    "dense_unpacked": (1, "h100", dict(model__attention="dense", data__packing=False)),
    "nsa_muon_selection_loss_averages": (
        1,
        "h100",
        dict(optim__name="muon", train__selection_loss=0.1, train__ema_decay=0.9, guards__skip_spikes=3),
    ),
    "xla": (1, "h100", dict(model__implementation="xla")),
}


def _step_text(count, gpu, changes):
    """The compiled step of a model whose layers are wide enough for the GPU's kernels."""
    nsa = dict(compress_block=32, compress_stride=16, select_block=64, num_selected=4, window=64)
    config = tiny_config(
        **dict(model__dim=64, model__mlp_dim=64, model__head_dim=32, model__implementation="auto"),
        **dict(model__compute_dtype="bfloat16", model__scan_layers=False, data__seq_len=512, model__num_layers=1),
        **{f"model__nsa__{name}": value for name, value in nsa.items()},
    )
    for name, value in changes.items():
        *path, field = name.split("__")
        target = config
        for part in path:
            target = target[part]
        target[field] = value
    made = memory.for_target(config, gpu, count, VOCAB)
    step = make_train_step(made, np.ones(VOCAB, np.int32))
    with hollow_kernels():  # they have no atomics, and what is looked for stands around them
        return memory._compile(made, gpu, step, made.target(), made.abstract_batch()).as_text()


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_training_steps_are_deterministic(name):
    count, gpu, changes = CASES[name]
    text = _step_text(count, gpu, changes)
    assert nondeterministic(text) == []
    if changes.get("model__implementation") != "xla":
        # The embedding's gradient is our kernel, not a scatter that the compiler made deterministic by a scan.
        assert "embedding_gradient" in text and " scatter(" not in text


@pytest.mark.parametrize("excluded", [False, True])
def test_a_scatter_that_adds_with_atomics_is_found(excluded):
    mesh = Mesh(np.array(aot.devices("h100")), ("device",), axis_types=(AxisType.Auto,))

    def array(shape, dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec()))

    options = {"xla_gpu_exclude_nondeterministic_ops": True} if excluded else None
    add = jax.jit(lambda table, index, rows: table.at[index].add(rows), compiler_options=options)
    arrays = array((128, 64), jnp.float32), array((500,), jnp.int32), array((500, 64), jnp.float32)
    with aot.tracing_for("h100", mesh):
        compiled = add.trace(*arrays).lower(lowering_platforms=("cuda",)).compile()
    assert bool(nondeterministic(compiled.as_text())) != excluded


def test_options_of_the_config_reach_the_compiler():
    name = "xla_gpu_all_reduce_combine_threshold_bytes"
    given = tiny_config(train__xla_options=(f"{name}=1234", "xla_gpu_enable_latency_hiding_scheduler=True"))
    made = setup(given, VOCAB, one_device())
    assert made.compiler_options() == {name: "1234", "xla_gpu_enable_latency_hiding_scheduler": True}
    for option in (f"{name}=many", "xla_no_such_option=True"):
        with pytest.raises(ConfigError, match="R059.*config.train.xla_options"):
            setup(tiny_config(train__xla_options=(option,)), VOCAB, one_device())


@pytest.mark.parametrize(
    "changes, compares",
    [
        ({}, True),
        ({"model__matmul_dtype": "float8"}, False),  # not tried
        ({"model__implementation": "xla"}, False),  # its gradients of gathered rows add with atomics
        ({"model__dim": 72}, False),  # the embedding's too
        ({"model__head_dim": 24}, False),  # no kernel serves it
        ({"train__deterministic": False}, None),
    ],
)
def test_matrix_products_are_measured_where_nothing_adds_with_atomics(monkeypatch, changes, compares):
    monkeypatch.setattr(jax, "__version_info__", (0, 11, 2))
    config = tiny_config(**dict(model__implementation="auto", model__dim=64, model__head_dim=16) | changes)
    gpu = SimpleNamespace(platform="gpu")
    options = compiler_options(config, gpu, measured=True) or {}
    assert (options.get("xla_gpu_autotune_gemm_rtol") == "0.0") == (compares is True)
    assert options.get("xla_gpu_exclude_nondeterministic_ops", False) == (compares is False)
    assert ("xla_gpu_enable_triton_gemm" in options) == ("model__matmul_dtype" in changes)
    once = compiler_options(config, gpu) or {}  # of programs that run now and then
    assert once.get("xla_gpu_exclude_nondeterministic_ops", False) == (compares is not None)
    for given in (options, once):
        jax.jit(lambda: 0, compiler_options=given).lower().compile()  # XLA knows these options, with these values


_PRODUCTS = """
import hashlib, jax, jax.numpy as jnp
from nsa_jax.train.compiler import compiler_options
from tests.train.tiny import tiny_config

config = tiny_config(model__implementation="auto", model__dim=64, model__head_dim=16)
options = compiler_options(config, jax.devices()[0], measured=True)
digest = hashlib.sha256()
for tokens, dim, width in ((8192, 768, 1072), (65536, 256, 320), (4096, 2048, 3168)):
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = (tokens, dim), (dim, width), (tokens, width)
    x, w, g = (jax.random.normal(k, shape, jnp.bfloat16) for k, shape in zip(keys, shapes))
    for product in jax.jit(lambda x, w, g: (x @ w, g @ w.T, x.T @ g), compiler_options=options)(x, w, g):
        digest.update(jax.device_get(product).tobytes())
print(digest.hexdigest())
"""


@pytest.mark.gpu
def test_processes_that_measure_at_the_same_time_multiply_to_the_same_bits():
    environment = os.environ | dict(XLA_PYTHON_CLIENT_PREALLOCATE="false", JAX_ENABLE_COMPILATION_CACHE="false")
    command = [sys.executable, "-c", _PRODUCTS]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) for _ in range(3)]
    printed = [process.communicate(timeout=300)[0].split()[-1:] for process in started]
    assert printed[0] and printed == [printed[0]] * 3
