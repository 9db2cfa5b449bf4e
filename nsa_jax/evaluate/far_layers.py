"""Which layers of a dense model need to read far, to keep these dense where the others become sparse.

In a trained model a few layers fetch from afar what the others work with (retrieval heads, arXiv 2404.15574). Here it
is measured: all layers see the first and the last tokens alone, which NSA always reads, and the layer is found whose
full view lowers the loss most; then, with that one's, the next.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

from nsa_jax.evaluate.scoring import token_losses
from nsa_jax.nn import Transformer
from nsa_jax.nn.dense import DenseAttention
from nsa_jax.nn.layers import embed


@dataclasses.dataclass(frozen=True)
class FarLayers:
    """What `far_layers` found.

    Attributes:
      layers: the layers that were chosen, the most important one first.
      losses: nats per token with the first, the first two, ... of them seeing all, and the others what is near.
      near: the loss where every layer sees what is near alone.
      full: the loss of the model itself.
      alone: the loss where one layer sees all, by layer.
    """

    layers: tuple[int, ...]
    losses: tuple[float, ...]
    near: float
    full: float
    alone: tuple[float, ...]

    @property
    def clear(self) -> bool:
        """Whether no single layer's view changes the loss by more than 1.25 times what the model gains by reading far.

        Where one does, or the model gains nothing, shares of that gain say nothing.
        """
        return 1.25 * (self.near - self.full) > max(abs(self.near - loss) for loss in self.alone)

    def share(self, index: int) -> float:
        """How much of the way from `near` to `full` the first `index + 1` layers go; 0 if there is none to go."""
        way = self.near - self.full
        return (self.near - self.losses[index]) / way if way > 0 else 0.0


def _hidden(
    model: Transformer, tokens: Int[Array, "B T"], reach: Int[Array, " L"], first: int
) -> Float[Array, "B T D"]:
    """Final activations of a dense model whose layer i sees the first tokens and the last reach[i]."""
    graphdef, layers = nnx.split(model.blocks)
    length = tokens.shape[1]
    positions = jnp.arange(length)
    distance = positions[:, None] - positions

    def layer(x, inputs):
        params, seen = inputs
        block: Any = nnx.merge(graphdef, params)
        attention: DenseAttention = block.attention

        def attend(normed):
            query, key, value = attention.project(normed, jnp.broadcast_to(positions, tokens.shape), length)
            visible = (distance >= 0) & ((distance < seen) | (positions < first))
            mixed = jax.nn.dot_product_attention(query, key, value, mask=visible[None, None], implementation="xla")
            return attention.output(mixed), None

        return block.forward(x, attend)

    x = embed(model.embedding[...], tokens, model.config.dtype)
    return model.norm(lax.scan(layer, x, (layers, reach))[0])


def far_layers(
    model: Transformer,
    rows: np.ndarray,
    count: int,
    *,
    near: int = 128,
    first: int = 64,
    batch_size: int = 4,
    on_found: Callable[[FarLayers], None] | None = None,
) -> FarLayers:
    """Finds the layers of a dense model that need to read far, one after the other.

    The loss is that of the second half of the rows, so that it is worth looking back. Takes about
    `count * num_layers` evaluations of all rows; scores of one layer take batch_size * N * T * T numbers.

    Args:
      model: dense in every layer, with values as wide as keys.
      rows: int [R, T + 1] tokens, each row of one document.
      count: how many layers to find.
      near: tokens that the other layers see, their own included.
      first: tokens of a row that they see, too; together less than T / 2.
      batch_size: rows at a time.
      on_found: is called with all that is known whenever one more layer was found.

    Raises:
      ValueError: an argument is out of range, the model has other layers than dense ones, or a loss is not finite.
    """
    config = model.config
    num_layers, (num_rows, width) = config.num_layers, rows.shape
    length = width - 1
    if config.kinds != ("dense",) or config.head_dim != config.value_head_dim:
        kinds = "/".join(config.kinds)
        raise ValueError(
            f"model has {kinds} layers, keys of {config.head_dim} and values of {config.value_head_dim} features: "
            "all layers must be dense, keys and values as wide"
        )
    if not 1 <= count <= num_layers:
        raise ValueError(f"count={count}: must be from 1 to the model's {num_layers} layers")
    if not (near >= 1 and first >= 0 and near + first < length // 2 and num_rows >= 1):
        raise ValueError(f"near={near}, first={first} with rows of shape {rows.shape}: must be less than half of a row")
    graphdef, params = nnx.split(model)

    @jax.jit
    def batch_losses(params, tokens, reach):
        model = nnx.merge(graphdef, params)
        hidden = _hidden(model, tokens[:, :-1], reach, first)
        return token_losses(model, hidden[:, length // 2 :], tokens[:, 1 + length // 2 :])[0]

    def loss(far: Sequence[int]) -> float:
        reach = np.full(num_layers, near, np.int32)
        reach[list(far)] = length
        parts = (rows[at : at + batch_size] for at in range(0, num_rows, batch_size))
        mean = float(np.concatenate([batch_losses(params, part.astype(np.int32), reach) for part in parts]).mean())
        if not math.isfinite(mean):
            raise ValueError(f"the model's loss is {mean} in these rows: its parameters may not be finite")
        return mean

    alone = tuple(loss([layer]) for layer in range(num_layers))
    found = FarLayers((), (), loss([]), loss(range(num_layers)), alone)
    while len(layers := found.layers) < count:
        tried = {i: loss([*layers, i]) if layers else alone[i] for i in range(num_layers) if i not in layers}
        best = min(tried, key=lambda i: tried[i])
        found = dataclasses.replace(found, layers=(*layers, best), losses=(*found.losses, tried[best]))
        if on_found:
            on_found(found)
    return found
