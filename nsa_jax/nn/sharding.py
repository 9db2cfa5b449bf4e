"""What the modules need to know about the mesh: which axes split the batch, and kernels under shard_map.

The mesh is the one in context (`jax.set_mesh`). Without one, or with a single device, everything here does nothing.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
from jax.sharding import PartitionSpec as P

BATCH_AXES = ("data", "fsdp")


def batch_axes(batch_size: int) -> tuple[str, ...]:
    """Mesh axes in context over which a batch of this size is split; empty if it is not."""
    mesh = jax.sharding.get_abstract_mesh()
    sizes = dict(mesh.shape) if mesh is not None and not mesh.empty else {}
    axes = tuple(axis for axis in BATCH_AXES if sizes.get(axis, 1) > 1)
    count = 1
    for axis in axes:
        count *= sizes[axis]
    return axes if count > 1 and batch_size % count == 0 else ()


def constrain_batch(x: jax.Array) -> jax.Array:
    """Asks the compiler to keep the first axis of x split over the batch axes, and the others whole."""
    axes = batch_axes(x.shape[0])
    return jax.lax.with_sharding_constraint(x, P(axes)) if axes else x


def sharded_attention(attend: Callable, *arrays: jax.Array | None):
    """Runs `attend(*arrays)` on each device's share of the batch.

    The compiler cannot split a custom kernel by itself: it would gather the whole batch on every device. Rows do not
    interact in attention, so each device runs it on the rows it holds.

    Args:
      attend: a function of the arrays alone whose results all have the batch as their first axis.
      *arrays: arrays with the batch as their first axis; None is passed on.

    Returns:
      What `attend` returns.
    """
    batch = next(array.shape[0] for array in arrays if array is not None)
    axes = batch_axes(batch)
    if not axes:
        return attend(*arrays)
    present = [index for index, array in enumerate(arrays) if array is not None]

    def local(*given):
        full = [None] * len(arrays)
        for index, array in zip(present, given, strict=True):
            full[index] = array
        return attend(*full)

    split = jax.shard_map(local, in_specs=P(axes), out_specs=P(axes), check_vma=False)
    return split(*(arrays[index] for index in present))
