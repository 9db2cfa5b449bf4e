"""Muon for the matrices of the blocks, Adam for all other parameters (Jordan 2024; arXiv 2502.16982).

Muon adds up the gradient of a matrix, and replaces the sum by the nearest matrix whose singular values are all about 1.
Layers are stacked, and several matrices that read the same input are stored as one; each matrix of each layer is
orthogonalised by itself. NSA's gates are columns of such an array; Adam updates them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import PartitionSpec as P

from nsa_jax.nn import ModelConfig
from nsa_jax.nn.projection import projection_widths
from nsa_jax.nn.sharding import MESH_AXES

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # Jordan's: the steepest at 0 that keep singular values near 1
_ITERATIONS = 5
_RMS = 0.2  # root mean square of an update's elements, as Adam's usually are (arXiv 2502.16982, section 2.2)

Path = tuple[str, ...]
# How an array of the state is laid out, by its path and shape: `nsa_jax.train.state.partition_spec` for a mesh.
Layout = Callable[[Path, tuple[int, ...]], P]


class MuonState(NamedTuple):
    """The sums of gradients of the matrices, and Adam's averages of all else."""

    momentum: dict[str, Any]
    adam: optax.OptState


def is_matrix(path: Path) -> bool:
    """Whether Muon updates a parameter: the projections of attention and MLP in the blocks."""
    return path[0] == "blocks" and path[-2] in ("attention", "mlp") and path[-1] in ("w_in", "w_out")


def matrix_widths(path: Path, shape: tuple[int, ...], model: ModelConfig) -> tuple[tuple[int, ...], int]:
    """Columns of each of the matrices that an array [layers, rows, columns] consists of, and how many gates follow."""
    if path[-2:] == ("mlp", "w_in"):
        return (shape[-1] // 2,) * 2, 0
    if path[-1] != "w_in":
        return (shape[-1],), 0
    layer = model.of_layer(int(path[1].removeprefix("layer_")) if model.layer_pattern else 0)
    widths = projection_widths(layer, layer.attention)
    return (widths[:-1], widths[-1]) if layer.attention == "nsa" else (widths, 0)


def newton_schulz(x: jax.Array) -> jax.Array:
    """Matrices [..., m, n] with the singular vectors of x, and singular values between about 0.7 and 1.2."""
    rows, columns = x.shape[-2:]
    norm = jnp.linalg.norm(x.astype(jnp.float32), axis=(-2, -1), keepdims=True)
    x = x / (norm + 1e-30).astype(x.dtype)
    x = x.mT if rows > columns else x
    a, b, c = _COEFFICIENTS
    for _ in range(_ITERATIONS):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return x.mT if rows > columns else x


def _hops(spec: P) -> list[P]:
    """Layouts [layers, rows, columns] from `spec` to layers over all devices, each one exchange from the one before.

    In a single step the compiler would gather an array of which rows and columns are split. Axes that split neither
    come first: along them every device only drops what others take.
    """
    rows, columns = (axes if isinstance(axes, tuple) else (axes,) for axes in (*spec, None, None, None)[1:3])
    rows, columns = (tuple(filter(None, axes)) for axes in (rows, columns))
    unused = tuple(axis for axis in MESH_AXES if axis not in rows + columns)
    return [P(unused, rows, columns), P(unused + columns, rows), P(unused + columns + rows)]


def orthogonalized(x: jax.Array, widths: Sequence[int], spec: P | None = None) -> jax.Array:
    """Updates of matrices [layers, rows, width] that stand side by side in x; 0 in the columns behind them.

    The devices of a mesh share the layers: each receives whole matrices, orthogonalises them and gives them back.

    Args:
      x: [layers, rows, columns], sums of gradients.
      widths: columns of each matrix.
      spec: how x is laid out over the mesh in context; None: there is no mesh.
    """
    layers, columns = x.shape[0], x.shape[-1]
    hops: list[P] = []
    if spec is not None:
        hops = [spec, *_hops(spec)]
        x = jax.lax.with_sharding_constraint(x, spec)  # or the compiler splits the sums by layers, and gathers them
        x = jnp.pad(x, ((0, -layers % jax.sharding.get_abstract_mesh().size), (0, 0), (0, 0)))
    for hop in hops[1:]:
        x = jax.lax.with_sharding_constraint(x, hop)
    cuts = [sum(widths[: index + 1]) for index in range(len(widths))]
    matrices = jnp.split(x, cuts, axis=-1)[: len(widths)]
    updates = [newton_schulz(matrix) * (_RMS * max(matrix.shape[-2:]) ** 0.5) for matrix in matrices]
    update = jnp.pad(jnp.concatenate(updates, axis=-1), ((0, 0), (0, 0), (0, columns - sum(widths))))
    for hop in reversed(hops[:-1]):
        update = jax.lax.with_sharding_constraint(update, hop)
    return update[:layers]


def _gate_columns(params: dict[Path, jax.Array], model: ModelConfig) -> dict[Path, jax.Array]:
    """What Adam updates: whole parameters, and the gates' columns of matrices."""
    rest = {}
    for path, leaf in params.items():
        gates = matrix_widths(path, leaf.shape, model)[1] if is_matrix(path) else leaf.shape[-1]
        if gates:
            rest[path] = leaf[..., -gates:] if is_matrix(path) else leaf
    return rest


def scale_by_muon(
    model: ModelConfig, *, decay: float, adam: optax.GradientTransformation, layout: Layout | None = None
) -> optax.GradientTransformation:
    """Muon with Nesterov's momentum for the matrices of the blocks, `adam` for all else.

    An update's elements have a root mean square of 0.2, about that of Adam, so that both have one learning rate and
    one weight decay. Matrices are orthogonalised in the model's compute dtype.

    Args:
      model: of the parameters.
      decay: of the sum of gradients.
      adam: scales the updates of all other parameters.
      layout: of the arrays over the mesh; None: there is no mesh.
    """

    def init(params):
        flat = flatten_dict(params)
        momentum = {path: jnp.zeros_like(leaf) for path, leaf in flat.items() if is_matrix(path)}
        return MuonState(unflatten_dict(momentum), adam.init(unflatten_dict(_gate_columns(flat, model))))

    def update(updates, state, params=None):
        flat, momentum = flatten_dict(updates), flatten_dict(state.momentum)
        momentum = {path: decay * old + flat[path] for path, old in momentum.items()}
        rest, adam_state = adam.update(unflatten_dict(_gate_columns(flat, model)), state.adam)
        found = flatten_dict(rest)
        for path, total in momentum.items():
            widths, gates = matrix_widths(path, total.shape, model)
            direction = (decay * total + flat[path]).astype(model.dtype)
            spec = None if layout is None else layout(path, total.shape)
            scaled = orthogonalized(direction, widths, spec).astype(total.dtype)
            if gates:
                scaled += jnp.pad(found[path], ((0, 0), (0, 0), (sum(widths), 0)))
            found[path] = scaled
        return unflatten_dict(found), MuonState(unflatten_dict(momentum), adam_state)

    return optax.GradientTransformation(init, update)
