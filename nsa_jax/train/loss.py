"""The loss: cross-entropy from hidden activations, computed in chunks of the sequence together with its gradients."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from nsa_jax.nn import Transformer
from nsa_jax.nn.layers import soft_cap
from nsa_jax.nn.projection import WIDTH_MULTIPLE
from nsa_jax.nn.sharding import (
    TENSOR,
    Pieces,
    fetch,
    fsdp_dimension,
    give_back,
    on_shards,
    parameter_spec,
    tensor_size,
    token_spec,
)

# float32 logits of one chunk on one device: more is not faster, and [B*T, vocab] can be larger than the model.
_LOGIT_BYTES = 512 * 2**20


def token_losses(model: Transformer, hidden: jax.Array, targets: jax.Array) -> jax.Array:
    """Cross-entropy of every token, float32 nats [B, T], computed in chunks of the sequence from float32 logits.

    Every device of a mesh works on its own tokens, with its share of the vocabulary where a tensor axis splits it (only
    maxima and sums are exchanged then). It has no gradient; `weighted_loss` has.

    Args:
      model: for its output head.
      hidden: [B, T, D] from `model.hidden`.
      targets: int32 [B, T].

    Raises:
      NotImplementedError: it is differentiated.
    """
    tokens = token_spec(*targets.shape)
    return _on_token_shards(_local_token_losses, model, (hidden, targets), tokens)


def weighted_loss(
    model: Transformer, hidden: jax.Array, targets: jax.Array, weights: jax.Array, z_loss: float = 0.0
) -> tuple[jax.Array, jax.Array]:
    """What training minimises: the sum over all tokens of weight * (cross-entropy + z_loss * logsumexp(logits)**2).

    Where it is differentiated, the gradients are computed together with the loss, chunk by chunk of the sequence: each
    chunk's logits are computed once and never kept. Logits and the head's gradient are float32; the gradient of the
    logits is rounded to the compute dtype, as every factor of a matrix product is. A head that fsdp splits is fetched
    in the compute dtype. Its gradient is summed over devices once, not per chunk, and each device receives that of its
    own part. A large one is made and summed in pieces of the vocabulary (`nn.sharding.Pieces`), which computes the
    logits twice.

    Args:
      model: for its output head.
      hidden: [B, T, D] from `model.hidden`.
      targets: int32 [B, T].
      weights: float32 [B, T].
      z_loss: keeps the logits' normaliser near 1 (arXiv 2204.02311, section 5).

    Returns:
      Two float32 scalars: the sum, and the part of it that is cross-entropy in nats, which has no gradient.
    """
    tokens = token_spec(*targets.shape)

    def local(head, *args):
        return _local_weighted_loss(dataclasses.replace(head, z_loss=z_loss), *args)[None, None]

    sums = _on_token_shards(local, model, (hidden, targets, weights), tokens).sum((0, 1))
    return sums.sum(), jax.lax.stop_gradient(sums[0])


@dataclasses.dataclass(frozen=True)
class _Head:
    """What is fixed about the output head on a device.

    Attributes:
      tied: its weight is the embedding [vocab, D], otherwise [D, vocab].
      split: its weight is this device's share of the vocabulary.
      dimension: what the fsdp axis splits of the head as [vocab, D]; None means nothing.
      soft_cap: see `ModelConfig.logit_soft_cap`.
      z_loss: see `weighted_loss`.
    """

    tied: bool
    split: bool
    dimension: int | None
    soft_cap: float
    z_loss: float = 0.0

    def rows(self, shard: jax.Array, dtype: jnp.dtype) -> jax.Array:
        """The head as [vocab, D] in `dtype`, from the part of it that this device holds."""
        return fetch(shard.astype(dtype) if self.tied else shard.astype(dtype).T, self.dimension)

    def index(self, targets: jax.Array, vocab: int) -> jax.Array:
        """Rows of the targets in this device's share of the vocabulary; outside of [0, vocab) they are another's."""
        return targets - jax.lax.axis_index(TENSOR) * vocab if self.split else targets

    def pieces(self, shard: jax.Array) -> Pieces:
        """In which the gradient of the head as [vocab, D] is made."""
        return Pieces.of(shard.shape if self.tied else shard.shape[::-1], self.dimension)


def _on_token_shards(local: Callable, model: Transformer, arrays: tuple, tokens: P) -> jax.Array:
    """`local(head, shard, *arrays)` on each device's tokens, with a `_Head` and the device's part of its weight.

    Args:
      arrays: [B, T, ...] each; so is the result.
      tokens: how devices split them.
    """
    weight, config = model.output_weight(), model.config
    split = config.vocab_size % tensor_size() == 0 and tensor_size() > 1
    stored = parameter_spec(weight.shape, 0 if config.tie_embeddings else 1)
    dimension = fsdp_dimension(stored)
    if dimension is not None and not config.tie_embeddings:
        dimension = 1 - dimension
    head = _Head(config.tie_embeddings, split, dimension, config.logit_soft_cap)
    specs = (stored, *(tokens,) * len(arrays))
    return on_shards(functools.partial(local, head), (weight, *arrays), specs, tokens)


def _num_chunks(rows: int, length: int, vocab: int) -> int:
    """The smallest divisor of `length` that keeps a chunk's float32 logits within `_LOGIT_BYTES`."""
    need = rows * length * vocab * 4 / _LOGIT_BYTES
    return next(k for k in range(1, length + 1) if length % k == 0 and k >= min(need, length))


def logit_bytes(rows: int, length: int, vocab: int) -> int:
    """Bytes of the float32 logits that one device computes at once, of rows of `length` tokens: those of a chunk."""
    return rows * (length // _num_chunks(rows, length, vocab)) * vocab * 4


def _over_chunks(function: Callable, carry, arrays: tuple, vocab: int):
    """(carry, results [B, T, ...]) of `function(carry, *chunks)` over chunks of the sequence of arrays [B, T, ...]."""
    rows, length = arrays[0].shape[:2]
    chunks = _num_chunks(rows, length, vocab)
    if chunks == 1:
        return function(carry, *arrays)

    def cut(x):  # [B, T, ...] -> [chunks, B, T / chunks, ...]
        return jnp.moveaxis(x.reshape(rows, chunks, length // chunks, *x.shape[2:]), 1, 0)

    carry, out = jax.lax.scan(lambda carry, chunk: function(carry, *chunk), carry, tuple(map(cut, arrays)))
    return carry, jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1).reshape(rows, length, *x.shape[3:]), out)


def _padded(rows: jax.Array) -> jax.Array:
    """Rows of the head, and rows of 0 up to a width with fast kernels."""
    return jnp.pad(rows, ((0, -len(rows) % WIDTH_MULTIPLE), (0, 0)))


def _logits(head: _Head, hidden: jax.Array, rows: jax.Array, count: int) -> jax.Array:
    """float32 [B, T, padded rows] of padded rows of the head; -inf behind the first `count`, which are no tokens."""
    logits = jnp.einsum("btd,vd->btv", hidden, rows, preferred_element_type=jnp.float32)
    logits = soft_cap(logits, head.soft_cap)
    return logits if len(rows) == count else jnp.where(jnp.arange(len(rows)) < count, logits, -jnp.inf)


def _cross_entropy(logits: jax.Array, index: jax.Array, vocab: int, split: bool) -> tuple[jax.Array, jax.Array]:
    """(losses, logsumexp) [B, T]; with `split`, logits are of this device's share of the vocabulary."""
    own = (index >= 0) & (index < vocab)
    picked = jnp.take_along_axis(logits, jnp.where(own, index, 0)[..., None], axis=-1)[..., 0]
    if not split:
        lse = jax.nn.logsumexp(logits, axis=-1)
        return lse - picked, lse
    peak = jax.lax.pmax(logits.max(-1), TENSOR)
    lse = peak + jnp.log(jax.lax.psum(jnp.exp(logits - peak[..., None]).sum(-1), TENSOR))
    return lse - jax.lax.psum(jnp.where(own, picked, 0.0), TENSOR), lse


def _logit_gradient(head: _Head, logits, lse, index, weights, dtype: jnp.dtype) -> jax.Array:
    """Gradient of `weighted_loss` with respect to logits before the soft cap, in `dtype`."""
    probs = jnp.exp(logits - lse[..., None])
    if head.z_loss:
        probs *= 1 + 2 * head.z_loss * lse[..., None]
    gradient = (probs - (jnp.arange(logits.shape[-1]) == index[..., None])) * weights[..., None]
    if head.soft_cap:  # bounded, since -inf stands for what is no token
        gradient *= 1 - jnp.square(jnp.maximum(logits, -head.soft_cap) / head.soft_cap)
    return gradient.astype(dtype)


def _local_losses(head: _Head, rows, hidden, index) -> tuple[jax.Array, jax.Array]:
    """(losses, logsumexp) [B, T] of one device's tokens."""
    vocab, padded = len(rows), _padded(rows)

    def chunk(_, hidden, index):
        return None, _cross_entropy(_logits(head, hidden, padded, vocab), index, vocab, head.split)

    return _over_chunks(chunk, None, (hidden, index), vocab)[1]


def _losses_and_gradients(head: _Head, rows, hidden, index, weights):
    """Losses and logsumexp [B, T] of one device's tokens, and float32 d_rows [vocab, D] and d_hidden [B, T, D]."""
    vocab, padded = len(rows), _padded(rows)

    def chunk(d_rows, hidden, index, weights):
        logits = _logits(head, hidden, padded, vocab)
        losses, lse = _cross_entropy(logits, index, vocab, head.split)
        d_logits = _logit_gradient(head, logits, lse, index, weights, hidden.dtype)
        d_rows += jnp.einsum("btv,btd->vd", d_logits, hidden, preferred_element_type=jnp.float32)
        return d_rows, (losses, lse, jnp.einsum("btv,vd->btd", d_logits, padded))

    zero = jnp.zeros(padded.shape, jnp.float32)
    d_rows, (losses, lse, d_hidden) = _over_chunks(chunk, zero, (hidden, index, weights), vocab)
    return losses, lse, d_rows[:vocab], d_hidden


def _gradients_of_piece(head: _Head, rows, hidden, index, lse, weights, d_hidden):
    """float32 gradient [len(rows), D] of some rows of the head, and d_hidden [B, T, D] with what they add to it.

    Args:
      rows: [rows, D].
      index: int32 [B, T], the row that is each token's target; others than rows are none of these.
      hidden, weights: of all tokens.
      lse: [B, T], logsumexp over the whole vocabulary.
      d_hidden: float32 so far.
    """
    count, padded = len(rows), _padded(rows)

    def chunk(d_rows, hidden, index, lse, weights, d_hidden):
        logits = _logits(head, hidden, padded, count)
        d_logits = _logit_gradient(head, logits, lse, index, weights, hidden.dtype)
        d_rows += jnp.einsum("btv,btd->vd", d_logits, hidden, preferred_element_type=jnp.float32)
        return d_rows, d_hidden + jnp.einsum("btv,vd->btd", d_logits, padded, preferred_element_type=jnp.float32)

    zero = jnp.zeros(padded.shape, jnp.float32)
    d_rows, d_hidden = _over_chunks(chunk, zero, (hidden, index, lse, weights, d_hidden), count)
    return d_rows[:count], d_hidden


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _local_token_losses(head: _Head, shard: jax.Array, hidden: jax.Array, targets: jax.Array) -> jax.Array:
    """`token_losses` of one device's tokens."""
    rows = head.rows(shard, hidden.dtype)
    return _local_losses(head, rows, hidden, head.index(targets, len(rows)))[0]


def _token_losses_fwd(head, shard, hidden, targets):
    raise NotImplementedError("token_losses would keep all logits for its gradient: differentiate weighted_loss")


_local_token_losses.defvjp(_token_losses_fwd, lambda *_: ())


def _weighted_sums(head: _Head, losses: jax.Array, lse: jax.Array, weights: jax.Array) -> jax.Array:
    """[cross-entropy, z-loss], each summed with the weights."""
    z_loss = jnp.sum(head.z_loss * jnp.square(lse) * weights) if head.z_loss else jnp.zeros(())
    return jnp.stack([jnp.sum(losses * weights), z_loss])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _local_weighted_loss(
    head: _Head, shard: jax.Array, hidden: jax.Array, targets: jax.Array, weights: jax.Array
) -> jax.Array:
    """The two parts of `weighted_loss` of one device's tokens. Both, on all devices, must have one cotangent."""
    rows = head.rows(shard, hidden.dtype)
    return _weighted_sums(head, *_local_losses(head, rows, hidden, head.index(targets, len(rows))), weights)


def _weighted_loss_fwd(head, shard, hidden, targets, weights):
    rows, pieces = head.rows(shard, hidden.dtype), head.pieces(shard)
    index = head.index(targets, len(rows))
    if pieces.single:
        losses, lse, d_rows, d_hidden = _losses_and_gradients(head, rows, hidden, index, weights)
        d_rows = give_back(d_rows.astype(shard.dtype), head.dimension)
    else:
        losses, lse = _local_losses(head, rows, hidden, index)
        number = pieces.number(index)

        def piece(d_hidden, start, width):
            part, own = pieces.take(rows, start, width), number - start * pieces.owners
            d_rows, d_hidden = _gradients_of_piece(head, part, hidden, own, lse, weights, d_hidden)
            return d_hidden, give_back(d_rows.astype(shard.dtype), head.dimension)

        d_hidden, d_rows = pieces.over(piece, jnp.zeros(hidden.shape, jnp.float32))
    d_weights = losses + head.z_loss * jnp.square(lse) if head.z_loss else losses
    gradients = (d_rows if head.tied else d_rows.T, d_hidden.astype(hidden.dtype), d_weights)
    return _weighted_sums(head, losses, lse, weights), gradients


def _weighted_loss_bwd(head, gradients, cotangents):
    factor = cotangents[0]
    if head.split:  # each device of the tensor axis was given its share of the cotangent of a result that all have
        factor = jax.lax.psum(factor, TENSOR)
    d_shard, d_hidden, d_weights = (x * factor.astype(x.dtype) for x in gradients)
    return d_shard, d_hidden, None, d_weights


_local_weighted_loss.defvjp(_weighted_loss_fwd, _weighted_loss_bwd)
