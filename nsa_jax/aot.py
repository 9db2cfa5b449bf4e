"""Ahead-of-time compilation for a GPU that need not be present, for preflight and the kernel tests.

It needs the `aot` extra (the CUDA compiler plugin; no CUDA libraries, no driver). `compile_for_gpu` lowers a function
for the named GPU with the kernels chosen for it. It returns the executable, whose `memory_analysis()` and `as_text()`
describe the program. The executable cannot be run.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec, use_abstract_mesh

from nsa_jax.ops.gpus import GPUS
from nsa_jax.ops.target import compile_for

_HOST = "pinned_host"  # JAX's kind of memory of a host from which and to which a GPU copies by itself
_lowering: contextvars.ContextVar[bool] = contextvars.ContextVar("lowering", default=False)


class AheadOfTimeUnavailable(RuntimeError):
    """The `aot` extra is not installed or does not match this JAX."""


def devices(gpu: str, count: int = 1) -> list[Any]:
    """Devices to build a Mesh from: `count` GPUs of the named kind on one host, compile-only.

    Raises:
      ValueError: `gpu` is not in `GPUS`.
      AheadOfTimeUnavailable: the `aot` extra is missing.
    """
    if gpu not in GPUS:
        raise ValueError(f"gpu={gpu!r}: must be one of {sorted(GPUS)}")
    try:
        topology = topologies.get_topology_desc(
            "", "cuda", topology=f"1x1x{count}", target_config=GPUS[gpu].target_config()
        )
    except Exception as error:
        raise AheadOfTimeUnavailable(
            f"cannot compile for {gpu} on this machine ({type(error).__name__}: {str(error)[:200]}); "
            "install the extra (pip install 'nsa_jax[aot]') and, where there is no GPU, set JAX_PLATFORMS=cpu"
        ) from error
    return list(topology.devices)


class _OnHost(NamedSharding):
    """In the memory of the host of compile-only devices.

    These devices name no kinds of memory, so JAX drops a sharding's `memory_kind`. Here it is kept while a program is
    traced and lowered. JAX compares the shardings of the compiled program, which have none, with it afterwards.
    """

    @property
    def memory_kind(self) -> str | None:
        return _HOST if _lowering.get() else None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _OnHost) and super().__eq__(other)

    def __hash__(self) -> int:
        return hash((_OnHost, super().__hash__()))


def on_host(sharding: NamedSharding) -> NamedSharding:
    """The same layout in pinned memory of the devices' host, also for devices from `devices`."""
    moved = sharding.with_memory_kind(_HOST)
    return moved if moved.memory_kind else _OnHost(sharding.mesh, sharding.spec)


@contextlib.contextmanager
def tracing_for(gpu: str, mesh: Mesh) -> Iterator[None]:
    """Traces ops for `gpu`: kernels are chosen and lowered for it, and sharding sees `mesh`'s axes."""
    from jax._src.mesh import AbstractDevice  # no public name yet

    spec = GPUS[gpu]
    kind = AbstractDevice(device_kind=spec.traced_as or spec.device_kind, num_cores=spec.cores, platform="gpu")
    abstract = AbstractMesh(mesh.devices.shape, mesh.axis_names, axis_types=mesh.axis_types, abstract_device=kind)
    token = _lowering.set(True)
    try:
        with compile_for(spec.target), use_abstract_mesh(abstract):
            yield
    finally:
        _lowering.reset(token)


def compile_for_gpu(function: Callable, *args: Any, gpu: str, donate_argnums: Sequence[int] = ()) -> Any:
    """Compiles `function` for one GPU that need not be present.

    Args:
      function: a function of arrays (or pytrees of arrays), not yet jitted.
      *args: its arguments as pytrees of anything with shape and dtype.
      gpu: a name in `GPUS`.
      donate_argnums: as in `jax.jit`.

    Returns:
      The compiled program (`memory_analysis()`, `as_text()`).

    Raises:
      ValueError: `gpu` is not in `GPUS`.
      AheadOfTimeUnavailable: the `aot` extra is missing.
    """
    mesh = Mesh(np.array(devices(gpu)), ("device",), axis_types=(AxisType.Auto,))
    sharding = NamedSharding(mesh, PartitionSpec())
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), args)
    with tracing_for(gpu, mesh):
        traced = jax.jit(function, donate_argnums=tuple(donate_argnums)).trace(*shapes)
        lowered = traced.lower(lowering_platforms=("cuda",))
    return lowered.compile()
