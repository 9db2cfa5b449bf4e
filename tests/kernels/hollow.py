"""Kernels without their bodies, for tests that read what XLA compiles around them: collectives, copies and calls.

XLA takes a kernel for a black box of the shapes it is called with; its body is compiled last, and that takes much of
the time of ahead-of-time compilation. tests/kernels/test_aot.py compiles the bodies.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from nsa_jax.ops.kernels import triton


def _nothing(kernel):
    def nothing(*refs, **keywords):
        """Reads nothing and leaves the outputs as they are."""

    while isinstance(kernel, functools.partial):
        kernel = kernel.func
    nothing.__name__ = kernel.__name__
    return nothing


@contextmanager
def hollow_kernels() -> Iterator[None]:
    """Triton and Mosaic GPU kernels that are traced meanwhile do nothing."""
    mosaic = plgpu.kernel
    named = types.SimpleNamespace(**vars(pl))
    named.pallas_call = lambda kernel, **keywords: pl.pallas_call(_nothing(kernel), **keywords)
    # What was traced with bodies must not be used without them, nor the other way round.
    jax.clear_caches()
    try:
        with (
            mock.patch.object(triton, "pl", named),
            mock.patch.object(plgpu, "kernel", lambda body, **keywords: mosaic(_nothing(body), **keywords)),
        ):
            yield
    finally:
        jax.clear_caches()
