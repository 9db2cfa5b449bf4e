"""The compiled functions of training: loss, train step, evaluation step, sampling."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable

import chex
import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

from nsa_jax.nn import Transformer
from nsa_jax.nn.attention import WIDTH_MULTIPLE
from nsa_jax.nn.layers import soft_cap
from nsa_jax.nn.sharding import TENSOR, on_shards, parameter_spec, tensor_size, token_spec, whole_weights
from nsa_jax.train.state import Setup, State, batch_sharding, learning_rate

Batch = dict[str, jax.Array]

# float32 logits of one chunk on one device: more is not faster, and [B*T, vocab] can be larger than the model.
_LOGIT_BYTES = 512 * 2**20


def check_batch(batch: Batch, batch_size: int, seq_len: int) -> None:
    """Shapes and dtypes of a batch at the step's boundary."""
    chex.assert_shape(
        [batch[name] for name in ("inputs", "targets", "segment_start", "loss_mask")], (batch_size, seq_len)
    )
    chex.assert_type([batch["inputs"], batch["targets"], batch["segment_start"]], jnp.int32)
    chex.assert_type(batch["loss_mask"], jnp.float32)


def _num_chunks(rows: int, length: int, vocab: int) -> int:
    """The smallest divisor of `length` that keeps a chunk's float32 logits within `_LOGIT_BYTES`."""
    need = rows * length * vocab * 4 / _LOGIT_BYTES
    return next(k for k in range(1, length + 1) if length % k == 0 and k >= min(need, length))


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
    return _on_token_shards(_local_token_losses, model, (hidden, targets), (tokens, tokens), tokens)


def weighted_loss(
    model: Transformer, hidden: jax.Array, targets: jax.Array, weights: jax.Array, z_loss: float = 0.0
) -> tuple[jax.Array, jax.Array]:
    """What training minimises: the sum over all tokens of weight * (cross-entropy + z_loss * logsumexp(logits)**2).

    Where it is differentiated, the gradients are computed together with the loss, chunk by chunk of the sequence: each
    chunk's logits are computed once and never kept. Logits and the head's gradient are float32; the gradient of the
    logits is rounded to the compute dtype, as every factor of a matrix product is. A head that fsdp splits is fetched
    in the compute dtype. Its gradient is summed over devices once, not per chunk, and each device receives that of its
    own part.

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
    sums = _on_token_shards(
        lambda head, *args: _local_weighted_loss(dataclasses.replace(head, z_loss=z_loss), *args)[None, None],
        model,
        (hidden, targets, weights),
        (tokens, tokens, tokens),
        tokens,
    )
    sums = sums.sum((0, 1))
    return sums.sum(), jax.lax.stop_gradient(sums[0])


@dataclasses.dataclass(frozen=True)
class _Head:
    """What is fixed about the output head on a device.

    Attributes:
      tied: its weight is the embedding [vocab, D], otherwise [D, vocab].
      split: its weight is this device's share of the vocabulary.
      soft_cap: see `ModelConfig.logit_soft_cap`.
      z_loss: see `weighted_loss`.
    """

    tied: bool
    split: bool
    soft_cap: float
    z_loss: float = 0.0

    def vocabulary(self, weight: jax.Array) -> int:
        return weight.shape[0 if self.tied else 1]

    def first_token(self, weight: jax.Array) -> jax.Array | int:
        """The index of the first token of this device's share of the vocabulary."""
        return jax.lax.axis_index(TENSOR) * self.vocabulary(weight) if self.split else 0


def _on_token_shards(local: Callable, model: Transformer, arrays: tuple, specs: tuple, out_spec: P) -> jax.Array:
    """`local(head, weight, *arrays)` on each device's tokens, with a `_Head` and its weight in the compute dtype."""
    weight, config = model.output_weight(), model.config
    split = config.vocab_size % tensor_size() == 0 and tensor_size() > 1
    head = _Head(config.tie_embeddings, split, config.logit_soft_cap)
    weight_spec = parameter_spec(weight.shape, 0 if head.tied else 1)
    dtype = arrays[0].dtype

    def shard(shard, *arrays):
        return local(head, whole_weights(shard, weight_spec, dtype), *arrays)

    return on_shards(shard, (weight, *arrays), (weight_spec, *specs), out_spec)


def _head_rows(weight: jax.Array, tied: bool, dtype: jnp.dtype) -> jax.Array:
    """The output head as [vocab, D] in the compute dtype, the vocabulary rounded up to a width with fast kernels."""
    weight = weight.astype(dtype) if tied else weight.astype(dtype).T
    return jnp.pad(weight, ((0, -len(weight) % WIDTH_MULTIPLE), (0, 0)))


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


def _logits(head: _Head, hidden: jax.Array, rows: jax.Array, vocab: int) -> jax.Array:
    """float32 [B, T, padded vocabulary], -inf for what is no token."""
    logits = jnp.einsum("btd,vd->btv", hidden, rows, preferred_element_type=jnp.float32)
    logits = soft_cap(logits, head.soft_cap)
    return logits if len(rows) == vocab else jnp.where(jnp.arange(len(rows)) < vocab, logits, -jnp.inf)


def _cross_entropy(logits, targets: jax.Array, vocab: int, first, split: bool) -> tuple[jax.Array, jax.Array]:
    """(losses, logsumexp) [B, T] of logits of all the vocabulary, or with `split` of the share that begins at `first`."""
    index = targets - first
    own = (index >= 0) & (index < vocab)
    picked = jnp.take_along_axis(logits, jnp.where(own, index, 0)[..., None], axis=-1)[..., 0]
    if not split:
        lse = jax.nn.logsumexp(logits, axis=-1)
        return lse - picked, lse
    peak = jax.lax.pmax(logits.max(-1), TENSOR)
    lse = peak + jnp.log(jax.lax.psum(jnp.exp(logits - peak[..., None]).sum(-1), TENSOR))
    return lse - jax.lax.psum(jnp.where(own, picked, 0.0), TENSOR), lse


def _local_losses(head: _Head, weight, hidden, targets) -> tuple[jax.Array, jax.Array]:
    """(losses, logsumexp) [B, T] of one device's tokens."""
    vocab, first = head.vocabulary(weight), head.first_token(weight)
    rows = _head_rows(weight, head.tied, hidden.dtype)

    def chunk(_, hidden, targets):
        return None, _cross_entropy(_logits(head, hidden, rows, vocab), targets, vocab, first, head.split)

    return _over_chunks(chunk, None, (hidden, targets), vocab)[1]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _local_token_losses(head: _Head, weight: jax.Array, hidden: jax.Array, targets: jax.Array) -> jax.Array:
    """`token_losses` of one device's tokens."""
    return _local_losses(head, weight, hidden, targets)[0]


def _token_losses_fwd(head, weight, hidden, targets):
    raise NotImplementedError("token_losses would keep all logits for its gradient: differentiate weighted_loss")


_local_token_losses.defvjp(_token_losses_fwd, lambda *_: ())


def _weighted_sums(head: _Head, losses: jax.Array, lse: jax.Array, weights: jax.Array) -> jax.Array:
    """[cross-entropy, z-loss], each summed with the weights."""
    z_losses = head.z_loss * jnp.square(lse) if head.z_loss else jnp.zeros_like(lse)
    return jnp.stack([jnp.sum(losses * weights), jnp.sum(z_losses * weights)])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _local_weighted_loss(
    head: _Head, weight: jax.Array, hidden: jax.Array, targets: jax.Array, weights: jax.Array
) -> jax.Array:
    """The two parts of `weighted_loss` of one device's tokens; both must have the same cotangent."""
    return _weighted_sums(head, *_local_losses(head, weight, hidden, targets), weights)


def _weighted_loss_fwd(head, weight, hidden, targets, weights):
    vocab, first = head.vocabulary(weight), head.first_token(weight)
    rows = _head_rows(weight, head.tied, hidden.dtype)

    def chunk(d_rows, hidden, targets, weights):
        logits = _logits(head, hidden, rows, vocab)
        losses, lse = _cross_entropy(logits, targets, vocab, first, head.split)
        picked = jnp.arange(len(rows)) == (targets - first)[..., None]
        probs = jnp.exp(logits - lse[..., None])
        if head.z_loss:
            probs = probs * (1 + 2 * head.z_loss * lse[..., None])
        d_logits = (probs - picked) * weights[..., None]
        if head.soft_cap:  # -inf stands for what is no token
            d_logits *= 1 - jnp.square(jnp.maximum(logits, -head.soft_cap) / head.soft_cap)
        d_logits = d_logits.astype(hidden.dtype)
        d_rows += jnp.einsum("btv,btd->vd", d_logits, hidden, preferred_element_type=jnp.float32)
        return d_rows, (losses, lse, jnp.einsum("btv,vd->btd", d_logits, rows))

    d_rows = jnp.zeros(rows.shape, jnp.float32)
    d_rows, (losses, lse, d_hidden) = _over_chunks(chunk, d_rows, (hidden, targets, weights), vocab)
    d_weight = d_rows[:vocab].astype(weight.dtype)
    per_token = losses + head.z_loss * jnp.square(lse) if head.z_loss else losses
    return _weighted_sums(head, losses, lse, weights), (d_weight if head.tied else d_weight.T, d_hidden, per_token)


def _weighted_loss_bwd(head, gradients, cotangents):
    factor = cotangents[0]
    if head.split:  # each device of the tensor axis was given its share of the cotangent of a result that all have
        factor = jax.lax.psum(factor, TENSOR)
    d_weight, d_hidden, d_weights = (x * factor.astype(x.dtype) for x in gradients)
    return d_weight, d_hidden, None, d_weights


_local_weighted_loss.defvjp(_weighted_loss_fwd, _weighted_loss_bwd)


def _split_micro_batches(batch: Batch, count: int) -> Batch:
    """[B, ...] -> [count, B / count, ...] such that every device keeps the rows it has."""

    def split(x):
        x = jnp.swapaxes(x.reshape(x.shape[0] // count, count, *x.shape[1:]), 0, 1)
        spec = token_spec(*x.shape[1:3])
        return jax.lax.with_sharding_constraint(x, P(None, *spec)) if any(spec) else x

    return jax.tree.map(split, batch)


def _global_norm(tree) -> jax.Array:
    """Square root of the sum of all squares, float32."""
    return jnp.sqrt(sum(jnp.sum(jnp.square(leaf.astype(jnp.float32))) for leaf in jax.tree.leaves(tree)))


def _summed_once(gradient: Callable) -> Callable:
    """`gradient` on each device's rows, summed over the devices of a mesh that splits nothing but the batch.

    Left to the compiler, every layer of every micro-batch is summed by itself, matrices in the compute dtype: for
    a100_prod on 8 devices 1.4 GiB per step instead of 0.4. (Dropout needs the compiler: its masks are drawn for the
    whole batch, so that they are the same on any mesh.)
    """

    def local(params, batch, total, key):
        return jax.lax.psum(gradient(params, batch, total, key), "data")

    return jax.shard_map(local, in_specs=(P(), P("data"), P(), P()), out_specs=P(), check_vma=False)


def make_train_step(setup: Setup, token_bytes) -> Callable[[State, Batch], tuple[State, dict[str, jax.Array]]]:
    """The jitted step (state, batch) -> (state, metrics); the state is donated.

    The loss is the mean over every token of the global batch that `loss_mask` weights, whatever the number of
    micro-batches and devices. Metrics are float32 scalars on the device; nothing is sent to the host.

    Args:
      setup: the run's.
      token_bytes: int [vocab], bytes of text of each token, for bits per byte.
    """
    config = setup.config
    schedule = learning_rate(config)
    packed, count = config.data.packing, config.train.grad_accum
    lengths = jnp.asarray(token_bytes, jnp.float32)

    def micro_loss(params, batch, total, key):
        model = setup.model(params)
        hidden = model.hidden(
            batch["inputs"],
            batch["segment_start"] if packed else None,
            deterministic=config.model.dropout == 0,
            rngs=key,
        )
        return weighted_loss(model, hidden, batch["targets"], batch["loss_mask"] / total, config.train.z_loss)

    def gradient(params, batch, total, key):
        """What is minimised and the cross-entropy in it, and the gradients of all micro-batches."""
        value_and_grad = jax.value_and_grad(micro_loss, has_aux=True)
        if count == 1:
            return value_and_grad(params, batch, total, jax.random.fold_in(key, 0))

        def accumulate(carry, inputs):
            index, micro = inputs
            got = value_and_grad(params, micro, total, jax.random.fold_in(key, index))
            return jax.tree.map(jnp.add, carry, got), None

        zero = jax.tree.map(jnp.zeros_like, ((jnp.zeros(()), jnp.zeros(())), params))
        return jax.lax.scan(accumulate, zero, (jnp.arange(count), _split_micro_batches(batch, count)))[0]

    if setup.mesh.shape["data"] == setup.mesh.size > 1 and config.model.dropout == 0:
        gradient = _summed_once(gradient)

    def step(state: State, batch: Batch):
        check_batch(batch, config.train.batch_size, config.data.seq_len)
        params = state["params"]
        total = jnp.maximum(batch["loss_mask"].sum(), 1.0)
        key = jax.random.fold_in(jax.random.key(config.seed), state["step"])
        (objective, loss), grads = gradient(params, batch, total, key)
        # Measured here, before clipping and before anything could reset it.
        grad_norm = _global_norm(grads)
        updates, opt_state = setup.optimizer.update(grads, state["opt_state"], params)
        new_params = optax.apply_updates(params, updates)
        text_bytes = jnp.sum(lengths[batch["targets"]] * batch["loss_mask"])
        metrics = {
            "loss": loss,
            "tokens": batch["loss_mask"].sum(),
            "bits_per_byte": loss * total / math.log(2) / jnp.maximum(text_bytes, 1.0),
            "grad_norm": grad_norm,
            "param_norm": _global_norm(new_params),
            "update_norm": _global_norm(updates),
            "learning_rate": schedule(state["step"]),
        }
        if config.train.z_loss:
            metrics["z_loss"] = objective - loss
        chex.assert_rank(list(metrics.values()), 0)
        return {"step": state["step"] + 1, "params": new_params, "opt_state": opt_state}, metrics

    return jax.jit(
        step,
        donate_argnums=0,
        in_shardings=(setup.sharding, batch_sharding(setup.mesh)),
        out_shardings=(setup.sharding, None),
        compiler_options=setup.compiler_options,
    )


def make_eval_step(setup: Setup, token_bytes) -> Callable[[State, Batch], dict[str, jax.Array]]:
    """The jitted evaluation (params, batch) -> sums over the global batch: nats, tokens and bytes of text."""
    config = setup.config
    lengths = jnp.asarray(token_bytes, jnp.float32)

    def step(params, batch: Batch):
        check_batch(batch, config.train.batch_size, config.data.seq_len)
        model = setup.model(params)

        def sums(micro):
            hidden = model.hidden(micro["inputs"], micro["segment_start"] if config.data.packing else None)
            losses = token_losses(model, hidden, micro["targets"])
            return {
                "nats": jnp.sum(losses * micro["loss_mask"]),
                "tokens": micro["loss_mask"].sum(),
                "bytes": jnp.sum(lengths[micro["targets"]] * micro["loss_mask"]),
            }

        if config.train.grad_accum == 1:
            return sums(batch)
        parts = jax.lax.map(sums, _split_micro_batches(batch, config.train.grad_accum))
        return jax.tree.map(jnp.sum, parts)

    return jax.jit(
        step,
        in_shardings=(setup.sharding["params"], batch_sharding(setup.mesh)),
        compiler_options=setup.compiler_options,
    )


def make_sampler(setup: Setup, length: int, vocab_size: int, temperature: float = 0.8) -> Callable:
    """The jitted sampler (params, tokens [1, length], prompt_length, key) -> tokens [1, length].

    Every new token costs a forward pass over the whole row: simple, and one compilation. Only the first `vocab_size`
    ids are drawn, since the model's vocabulary may be padded beyond the tokenizer's.
    """

    def sample(params, tokens, prompt_length, key):
        model = setup.model(params)

        def extend(position, tokens):
            hidden = model.hidden(tokens)
            last = jax.lax.dynamic_slice_in_dim(hidden, position - 1, 1, axis=1)
            logits = model.logits(last)[0, 0, :vocab_size] / temperature
            token = jax.random.categorical(jax.random.fold_in(key, position), logits)
            return tokens.at[0, position].set(token.astype(tokens.dtype))

        return jax.lax.fori_loop(prompt_length, length, extend, tokens)

    return jax.jit(
        sample,
        in_shardings=(setup.sharding["params"], None, None, None),
        compiler_options=setup.compiler_options,
    )


def host_transfers(hlo_text: str) -> list[str]:
    """Instructions of a compiled program that talk to the host while it runs: callbacks, infeed, outfeed, send, recv.

    Args:
      hlo_text: `compiled.as_text()`.
    """
    marks = ("callback", " infeed(", " outfeed(", " send(", " recv(", "MoveToHost")
    return [line.strip() for line in hlo_text.splitlines() if "=" in line and any(mark in line for mark in marks)]
