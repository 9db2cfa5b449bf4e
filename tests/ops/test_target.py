"""Kernels are chosen for the device that a function is traced for, whatever it was traced for before."""

from __future__ import annotations

import contextlib
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

import nsa_jax
from nsa_jax.ops import implementations
from nsa_jax.ops.target import Target, compile_for, current_target


def _outer_contexts():
    mesh = Mesh(np.array(jax.devices()[:1]), ("data",), axis_types=(AxisType.Auto,))
    return {"alone": contextlib.nullcontext, "in_a_mesh": lambda: jax.set_mesh(mesh)}


@pytest.mark.parametrize("outer", ["alone", "in_a_mesh"])
def test_one_jitted_function_gets_the_kernels_of_every_target(outer):
    query = jax.ShapeDtypeStruct((1, 256, 16, 64), jnp.bfloat16)
    key = jax.ShapeDtypeStruct((1, 256, 1, 64), jnp.bfloat16)
    attend = jax.jit(lambda *qkv: nsa_jax.window_attention(*qkv, window=64))

    def kernels(target=None):
        with contextlib.nullcontext() if target is None else compile_for(target):
            text = str(attend.trace(query, key, key).jaxpr)
        return [name for name in ("wgmma", "pallas_call") if name in text]

    with _outer_contexts()[outer]():
        hopper, ampere, here = kernels(Target("gpu", (9, 0))), kernels(Target("gpu", (8, 0))), kernels()
        assert (hopper, ampere) == (["wgmma"], ["pallas_call"])
        assert here == [] or current_target().is_gpu
        assert kernels(Target("gpu", (9, 0))) == hopper


def test_the_target_is_the_context_of_the_call():
    default = current_target()
    with compile_for(Target("gpu", (9, 0))):
        with compile_for(Target("gpu", (8, 0))):
            assert not current_target().is_hopper
        assert current_target().is_hopper and current_target().ahead_of_time
    assert current_target() == default


def test_threads_that_trace_at_once_log_the_implementation_once(monkeypatch):
    said = []

    def info(message, *values):
        time.sleep(0.2)  # the others arrive meanwhile
        said.append(message % values)

    monkeypatch.setattr(implementations.logger, "info", info)
    implementations.forget_implementations_served()
    query = jax.ShapeDtypeStruct((1, 32, 2, 8), jnp.float32)
    key = jax.ShapeDtypeStruct((1, 32, 1, 8), jnp.float32)

    def trace(window):
        jax.eval_shape(lambda *qkv: nsa_jax.window_attention(*qkv, window=window), query, key, key)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(trace, (3, 4, 5, 6)))
    assert said == ["the ops are served by 'xla' (no GPU (platform cpu))"]
