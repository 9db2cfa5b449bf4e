"""A function of a model and of rows, on devices that each hold the whole model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from nsa_jax.nn.sharding import MESH_AXES
from nsa_jax.nn.transformer import Transformer


class Replicas:
    """Spreads rows over devices, each of which holds the whole model.

    Args:
      function: of a Transformer and of arrays [B, ...]; it is compiled once for each of their shapes.
      model: the Transformer.
      devices: None means all of this process.
      out_axes: the axis of rows in what `function` returns, a prefix of its tree.
    """

    def __init__(
        self, function: Callable, model: Transformer, devices: Sequence[jax.Device] | None = None, out_axes: Any = 0
    ):
        devices = jax.local_devices() if devices is None else list(devices)
        grid = np.asarray(devices).reshape(-1, *(1,) * (len(MESH_AXES) - 1))
        self._mesh = Mesh(grid, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))
        self._out_axes = out_axes
        graphdef, params = nnx.split(model)

        def run(params, arrays):
            return function(nnx.merge(graphdef, params), *arrays)

        if len(devices) > 1:
            rows = MESH_AXES[0]
            out_specs = jax.tree.map(lambda axis: P(*(None,) * axis, rows), out_axes)
            run = jax.shard_map(run, mesh=self._mesh, in_specs=(P(), P(rows)), out_specs=out_specs, check_vma=False)
        self._run: Any = jax.jit(run)
        self._place(params)

    def _place(self, params) -> None:
        several = self._mesh.size > 1
        self._params = jax.device_put(params, NamedSharding(self._mesh, P())) if several else params

    def of(self, model: Transformer) -> Replicas:
        """The same for a model of the same config with other parameters, by the same compiled programs."""
        other = copy.copy(self)
        other._place(nnx.split(model)[1])
        return other

    def __call__(self, *arrays: np.ndarray) -> Any:
        """What `function` returns for arrays [B, ...], in NumPy's arrays."""
        count = len(arrays[0])
        missing = -count % self._mesh.size  # every device has as many rows
        found = self._run(self._params, [np.pad(x, ((0, missing), *((0, 0),) * (x.ndim - 1))) for x in arrays])

        def rows(axis, part):
            return jax.tree.map(lambda x: np.asarray(x)[(slice(None),) * axis + (slice(count),)], part)

        return jax.tree.map(rows, self._out_axes, found)
