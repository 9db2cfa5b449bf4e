"""What the modules need to know about the mesh: who holds which part of an activation, and kernels under shard_map.

The mesh is the one in context (`jax.set_mesh`). Its axes:

  data, fsdp  rows of the batch; fsdp also splits parameters and optimizer state (`nsa_jax.train.state`)
  context     tokens of a row: each device holds T / context neighbouring tokens of it
  tensor      heads, the MLP's hidden width and the vocabulary

Activations [B, T, ...] between layers are split over the first three. An axis that does not divide its dimension is not
used for it: such arrays are whole on every device of the axis, and the numbers are the same. Without a mesh, or with a
single device, everything here does nothing.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from nsa_jax.ops.target import has_explicit_axes

DATA, FSDP = "data", "fsdp"
BATCH_AXES = (DATA, FSDP)
CONTEXT, TENSOR = "context", "tensor"
# Ordered by communication volume, smallest first: neighbouring devices should have the fastest links.
MESH_AXES = (*BATCH_AXES, CONTEXT, TENSOR)

# Below this many elements a parameter is cheaper to keep everywhere than to gather.
_REPLICATE_BELOW = 4096


def _axis_sizes() -> dict[str, int]:
    """Sizes of the mesh axes in context that are still to be split over, not inside a shard_map over them."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh is None or mesh.empty:
        return {}
    return {axis: size for axis, size in mesh.shape.items() if axis not in mesh.manual_axes}


def batch_axes(batch_size: int) -> tuple[str, ...]:
    """Mesh axes in context over which a batch of this size is split; empty if it is not."""
    sizes = _axis_sizes()
    axes = tuple(axis for axis in BATCH_AXES if sizes.get(axis, 1) > 1)
    count = 1
    for axis in axes:
        count *= sizes[axis]
    return axes if count > 1 and batch_size % count == 0 else ()


def context_size(length: int) -> int:
    """Into how many parts rows of this length are split."""
    size = _axis_sizes().get(CONTEXT, 1)
    return size if length % size == 0 else 1


def tensor_size() -> int:
    """Over how many devices heads, hidden widths and the vocabulary are split."""
    return _axis_sizes().get(TENSOR, 1)


def token_spec(batch_size: int, length: int) -> P:
    """How an array [B, T] is laid out."""
    return P(batch_axes(batch_size) or None, CONTEXT if context_size(length) > 1 else None)


def _laid_out(x: jax.Array, spec: P) -> jax.Array:
    """x in a layout: what the compiler is asked for, or what x is moved to where the mesh has explicit axes."""
    return jax.sharding.reshard(x, spec) if has_explicit_axes() else jax.lax.with_sharding_constraint(x, spec)


def constrain_batch(x: jax.Array) -> jax.Array:
    """Asks the compiler to keep the first axis of x split over the batch axes, and the others whole."""
    axes = batch_axes(x.shape[0])
    return _laid_out(x, P(axes)) if axes else x


def constrain_tokens(x: jax.Array, *rest: str | None) -> jax.Array:
    """Asks the compiler to keep x [B, T, ...] split over rows and tokens.

    Args:
      x: the array.
      *rest: mesh axes of the further dimensions, where they are split.
    """
    rest = tuple(axis if _axis_sizes().get(axis or "", 1) > 1 else None for axis in rest)
    spec = P(*token_spec(*x.shape[:2]), *rest)
    return _laid_out(x, spec) if any(spec) else x


def constrain_tensor(x: jax.Array, dimension: int) -> jax.Array:
    """Asks the compiler to split one dimension of x over the tensor axis and keep the others whole: for weights."""
    size = tensor_size()
    if size == 1 or x.shape[dimension] % size:
        return x
    return _laid_out(x, P(*(None,) * dimension, TENSOR))


def constrain_whole(x: jax.Array) -> jax.Array:
    """Asks the compiler to keep x whole on every device: for weights that fsdp splits."""
    return _laid_out(x, P()) if _axis_sizes().get(FSDP, 1) > 1 else x


def parameter_spec(
    shape: tuple[int, ...],
    tensor_dimension: int | None = None,
    first: int = 0,
    sizes=None,
    over: tuple[str, ...] = (FSDP,),
) -> P:
    """How a parameter is stored: `tensor` splits one dimension, then `fsdp` the largest that it divides.

    Args:
      shape: of the parameter.
      tensor_dimension: what `tensor` splits, where it divides it; None means nothing.
      first: dimensions before this one are never split.
      sizes: of the mesh's axes by name; None means those of the mesh in context.
      over: the axes that split after `tensor`, each the dimension that is largest on a device by then.
    """
    sizes = _axis_sizes() if sizes is None else sizes
    tensor = sizes.get(TENSOR, 1)
    axes: list[tuple[str, ...]] = [()] * len(shape)
    local = list(shape)  # sizes on one device
    if tensor > 1 and tensor_dimension is not None and shape[tensor_dimension] % tensor == 0:
        axes[tensor_dimension] = (TENSOR,)
        local[tensor_dimension] //= tensor
    for axis in over if math.prod(shape) >= _REPLICATE_BELOW else ():
        size = sizes.get(axis, 1)
        dims = [dim for dim in range(first, len(shape)) if local[dim] % size == 0]
        if size > 1 and dims:
            best = max(dims, key=lambda dim: local[dim])
            axes[best] = (*axes[best], axis)
            local[best] //= size
    while axes and not axes[-1]:
        axes.pop()
    return P(*(None if not dim else dim[0] if len(dim) == 1 else dim for dim in axes))


def on_shards(function: Callable, arrays: tuple, in_specs: tuple, out_specs: Any):
    """Runs `function(*arrays)` on every device's share, where the mesh in context splits any of them.

    The compiler cannot split a custom kernel by itself: it would gather everything on every device.

    Args:
      function: of arrays or pytrees of arrays alone.
      arrays: its arguments; None is passed on.
      in_specs: a PartitionSpec for each, or a pytree of them.
      out_specs: of what it returns.
    """
    if not any(axis for spec in jax.tree.leaves(in_specs) for axis in spec):
        return function(*arrays)
    present = [index for index, array in enumerate(arrays) if array is not None]

    def local(*given):
        full: list[Any] = [None] * len(arrays)
        for index, array in zip(present, given, strict=True):
            full[index] = array
        return function(*full)

    specs = tuple(in_specs[index] for index in present)
    split = jax.shard_map(local, in_specs=specs, out_specs=out_specs, check_vma=False)
    given = tuple(arrays[index] for index in present)
    if has_explicit_axes():  # shard_map takes nothing else there
        given = jax.sharding.reshard(given, specs)
    return split(*given)


def sharded_attention(attend: Callable, *arrays: jax.Array | None):
    """Runs `attend(*arrays)` on each device's share of the batch; rows do not interact in attention.

    Args:
      attend: a function of the arrays alone whose results all have the batch as their first axis.
      *arrays: arrays with the batch as their first axis; None is passed on.

    Returns:
      What `attend` returns.
    """
    spec = P(batch_axes(next(array.shape[0] for array in arrays if array is not None)))
    return on_shards(attend, arrays, (spec,) * len(arrays), spec)


@dataclasses.dataclass(frozen=True)
class HeadSplit:
    """How attention's arrays are split over the mesh in context.

    Attributes:
      tokens: of arrays [B, T].
      heads: of arrays [B, T, heads, ...]: every device has whole key/value heads with their query heads.
      rows: of arrays [B, ...] without tokens.
      context: into how many parts the rows are split.
    """

    tokens: P
    heads: P
    rows: P
    context: int


def head_split(batch_size: int, length: int, num_kv_heads: int, multiple: int = 1, at_least: int = 1) -> HeadSplit:
    """The split of attention over rows of `length` tokens.

    Args:
      batch_size: B.
      length: T.
      num_kv_heads: K; not split over the tensor axis unless it divides them.
      multiple: a device's tokens must be a multiple of this ...
      at_least: ... and so many, or rows stay whole.
    """
    rows, context = batch_axes(batch_size) or None, context_size(length)
    if length // context % multiple or length // context < at_least:
        context = 1
    axis = CONTEXT if context > 1 else None
    tensor = TENSOR if tensor_size() > 1 and num_kv_heads % tensor_size() == 0 else None
    return HeadSplit(P(rows, axis), P(rows, axis, tensor), P(rows), context)


# Below, functions for use inside `on_shards`.


def split_dimension(spec: P, axis: str) -> int | None:
    """The dimension of an array that a mesh axis splits, or None."""
    for dimension, axes in enumerate(spec):
        if axis in (axes if isinstance(axes, tuple) else (axes,)):
            return dimension
    return None


def fsdp_dimension(spec: P) -> int | None:
    """The dimension of a weight that the fsdp axis splits, or None."""
    return split_dimension(spec, FSDP)


def fetch(shard: jax.Array, dimension: int | None) -> jax.Array:
    """The weight of which the devices of the fsdp axis hold parts; the shard itself where `dimension` is None."""
    return shard if dimension is None else jax.lax.all_gather(shard, FSDP, axis=dimension, tiled=True)


def give_back(gradient: jax.Array, dimension: int | None) -> jax.Array:
    """The gradient of `fetch`'s argument: summed over the fsdp axis, this device's part of it."""
    if dimension is None:
        return gradient
    return jax.lax.psum_scatter(gradient, FSDP, scatter_dimension=dimension, tiled=True)


def whole_weights(shards: Any, specs: Any) -> Any:
    """The weights of which the devices of the fsdp axis hold parts.

    A gradient is added up over devices in its weight's dtype, and each device receives that of its part alone.

    Args:
      shards: this device's parts, a pytree.
      specs: how each weight is split; what the fsdp axis does not split is returned as it is.
    """
    return jax.tree.map(lambda shard, spec: fetch(shard, fsdp_dimension(spec)), shards, specs)


# Where fsdp splits embedding or head, a float32 gradient that is larger than this is made and given back in pieces.
PIECE_BYTES = 512 * 2**20


@dataclasses.dataclass(frozen=True)
class Pieces:
    """The pieces in which the gradient of a matrix [rows, D] is made, so that no device ever holds all of it.

    Every piece has as many rows of each owner's part as of any other's, so that each device receives its share of every
    piece. The rows of a piece are grouped by owner, and pieces follow each other: that gives every row a number.

    Attributes:
      owners: devices that hold neighbouring rows each; 1 where the rows are not split.
      own: rows that each of them holds.
      size: rows of one owner in a piece; the last piece may have fewer.
    """

    owners: int
    own: int
    size: int

    @classmethod
    def of(cls, shard: tuple[int, ...], dimension: int | None) -> Pieces:
        """Those of a matrix [rows, D] that the fsdp axis splits into parts of shape `shard` at `dimension`, if it does.

        Without a split there is one piece: the device needs the whole gradient.
        """
        devices = 1 if dimension is None else jax.sharding.get_abstract_mesh().shape[FSDP]
        owners = devices if dimension == 0 else 1
        count = 1 if dimension is None else -(-math.prod(shard) * devices * 4 // PIECE_BYTES)
        return cls(owners, shard[0], -(-shard[0] // min(count, shard[0])))

    @property
    def single(self) -> bool:
        return self.size == self.own

    def number(self, row: jax.Array) -> jax.Array:
        """The numbers of rows, -1 for those outside of the matrix."""
        owner, within = row // self.own, row % self.own
        start = within // self.size * self.size
        number = start * self.owners + owner * jnp.minimum(self.size, self.own - start) + within - start
        return jnp.where((row >= 0) & (row < self.owners * self.own), number, -1)

    def take(self, matrix: jax.Array, start: jax.Array | int, width: int) -> jax.Array:
        """Rows [owners * width, D] of the piece that begins at row `start` of each owner."""
        if self.single:
            return matrix
        parts = matrix.reshape(self.owners, self.own, -1)
        return jax.lax.dynamic_slice_in_dim(parts, start, width, axis=1).reshape(self.owners * width, -1)

    def over(self, function: Callable, carry: Any) -> tuple[Any, jax.Array]:
        """(carry, [own, ...]) of `function(carry, start, width) -> (carry, [width, ...])` for one piece after another.

        A piece begins at row `start` of each owner and has `width` rows of it. Its first number is start * owners.
        """
        if self.single:
            return function(carry, 0, self.own)
        whole, rest = divmod(self.own, self.size)
        starts = jnp.arange(whole, dtype=jnp.int32) * self.size
        carry, parts = jax.lax.scan(lambda carry, start: function(carry, start, self.size), carry, starts)
        parts = parts.reshape(whole * self.size, *parts.shape[2:])
        if rest:
            carry, last = function(carry, whole * self.size, rest)
            parts = jnp.concatenate([parts, last])
        return carry, parts


# Below, those on a device's tokens x [B, T / context, ...].


def first_token(x: jax.Array) -> jax.Array:
    """Row position of this device's first token, int32."""
    return jax.lax.axis_index(CONTEXT).astype(jnp.int32) * x.shape[1]


def mirrored_first_token(x: jax.Array, context: int) -> jax.Array:
    """Row position of the first token of this device's mirror image: the first device's is the last."""
    return (context - 1 - jax.lax.axis_index(CONTEXT).astype(jnp.int32)) * x.shape[1]


def swap_mirrored(arrays: Any, context: int) -> Any:
    """The arrays of this device's mirror image."""
    pairs = [(source, context - 1 - source) for source in range(context)]
    return jax.tree.map(lambda x: jax.lax.ppermute(x, CONTEXT, pairs), arrays)


def all_tokens(x: jax.Array) -> jax.Array:
    """The whole row, [B, T, ...]; its gradient comes back to each device's own tokens."""
    return jax.lax.all_gather(x, CONTEXT, axis=1, tiled=True)


def with_tokens_before(x: jax.Array, count: int, context: int) -> tuple[jax.Array, int]:
    """This device's tokens after the `count` before them, fetched from the devices that hold them.

    Args:
      x: [B, T / context, ...].
      count: tokens wanted; no more than the row can have before a token.
      context: devices of the axis.

    Returns:
      [B, fetched + T / context, ...] and the number fetched. What lies before the row is 0.
    """
    length = x.shape[1]
    fetched = min(count, (context - 1) * length)
    pieces = [x]
    for hop in range(1, -(-fetched // length) + 1):
        take = min(length, fetched - (hop - 1) * length)
        pairs = [(source, source + hop) for source in range(context - hop)]
        pieces.insert(0, jax.lax.ppermute(x[:, length - take :], CONTEXT, pairs))
    return jnp.concatenate(pieces, axis=1), fetched


def with_tokens_after(x: jax.Array, count: int, context: int) -> jax.Array:
    """This device's tokens and the `count` that follow them: [B, T / context + count, ...], 0 beyond the row."""
    if not count:
        return x
    pairs = [(source, source - 1) for source in range(1, context)]
    return jnp.concatenate([x, jax.lax.ppermute(x[:, :count], CONTEXT, pairs)], axis=1)
