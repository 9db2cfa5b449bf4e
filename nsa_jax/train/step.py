"""The compiled functions of training: loss, train step, evaluation step, sampling."""

from __future__ import annotations

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
    """Cross-entropy of every token, float32 nats [B, T].

    Computed in chunks of the sequence whose logits are computed again in the backward pass, where all logits at once
    would be large. Every device of a mesh works on its own tokens, with its share of the vocabulary where a tensor axis
    splits it (only maxima and sums are exchanged then). A head that fsdp splits is fetched in the compute dtype. Its
    gradient is summed over devices once, not per chunk, and each device receives that of its own part; a large one is
    made and summed in pieces of the vocabulary (`nn.sharding.Pieces`). Logits and the head's gradient are float32; the
    gradient of the logits is rounded to the compute dtype, as every factor of a matrix product is.

    Args:
      model: for its output head.
      hidden: [B, T, D] from `model.hidden`.
      targets: int32 [B, T].
    """
    tokens = token_spec(*targets.shape)
    weight, tied = model.output_weight(), model.config.tie_embeddings
    split = model.config.vocab_size % tensor_size() == 0 and tensor_size() > 1
    weight_spec = parameter_spec(weight.shape, 0 if tied else 1)
    dimension = fsdp_dimension(weight_spec)
    if dimension is not None and not tied:
        dimension = 1 - dimension  # of the head as [vocab, D]

    def losses(hidden, shard, targets):
        return _local_token_losses(tied, split, dimension, hidden, shard, targets)

    return on_shards(losses, (hidden, weight, targets), (tokens, weight_spec, tokens), tokens)


def _head(shard: jax.Array, tied: bool, dimension: int | None, dtype: jnp.dtype) -> jax.Array:
    """The output head as [vocab, D] in the compute dtype, from the part of it that this device holds."""
    return fetch(shard.astype(dtype) if tied else shard.astype(dtype).T, dimension)


def _padded(head: jax.Array) -> jax.Array:
    """The head with rows of 0 up to a width with fast kernels."""
    return jnp.pad(head, ((0, -len(head) % WIDTH_MULTIPLE), (0, 0)))


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


def _logits(hidden: jax.Array, head: jax.Array, vocab: int) -> jax.Array:
    """float32 [B, T, padded vocabulary], -inf for what is no token."""
    logits = jnp.einsum("btd,vd->btv", hidden, head, preferred_element_type=jnp.float32)
    return logits if len(head) == vocab else jnp.where(jnp.arange(len(head)) < vocab, logits, -jnp.inf)


def _first_token_of(vocab: int, split: bool) -> jax.Array | int:
    """The index of the first token of a device's share of the vocabulary."""
    return jax.lax.axis_index(TENSOR) * vocab if split else 0


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _local_token_losses(
    tied: bool, split: bool, dimension: int | None, hidden: jax.Array, shard: jax.Array, targets: jax.Array
) -> jax.Array:
    """`token_losses` of one device's tokens; with `split` the head is its share of the vocabulary.

    `dimension` of the head [vocab, D] is what the fsdp axis splits, and `shard` is this device's part.
    """
    return _losses_fwd(tied, split, dimension, hidden, shard, targets)[0]


def _losses_fwd(tied, split, dimension, hidden, shard, targets):
    whole = _head(shard, tied, dimension, hidden.dtype)
    vocab, head = len(whole), _padded(whole)
    first = _first_token_of(vocab, split)

    def chunk(_, hidden, targets):
        logits = _logits(hidden, head, vocab)
        index = targets - first
        own = (index >= 0) & (index < vocab)
        picked = jnp.take_along_axis(logits, jnp.where(own, index, 0)[..., None], axis=-1)[..., 0]
        if not split:
            lse = jax.nn.logsumexp(logits, axis=-1)
            return None, (lse - picked, lse)
        peak = jax.lax.pmax(logits.max(-1), TENSOR)
        lse = peak + jnp.log(jax.lax.psum(jnp.exp(logits - peak[..., None]).sum(-1), TENSOR))
        return None, (lse - jax.lax.psum(jnp.where(own, picked, 0.0), TENSOR), lse)

    _, (losses, lse) = _over_chunks(chunk, None, (hidden, targets), vocab)
    # What was fetched is kept: fetching it again would cost more than its memory for the short time until it is used.
    return losses, (hidden, shard, None if dimension is None else whole, targets, lse)


def _head_gradients(rows, index, hidden, lse, d_losses, d_hidden=None):
    """float32 [len(rows), D] of some rows of the head, and `d_hidden` [B, T, D] with what they add to it.

    Args:
      rows: [rows, D].
      index: int32 [B, T], the row that is each token's target; others than rows are none of these.
      hidden, lse, d_losses: as in the forward pass, of all tokens.
      d_hidden: float32 so far; None where these are all rows: then it is returned in the compute dtype.
    """
    count, rows = len(rows), _padded(rows)

    def chunk(d_rows, hidden, index, lse, d_losses, *so_far):
        probs = jnp.exp(_logits(hidden, rows, count) - lse[..., None])
        picked = jnp.arange(len(rows)) == index[..., None]
        d_logits = ((probs - picked) * d_losses[..., None]).astype(hidden.dtype)
        d_rows += jnp.einsum("btv,btd->vd", d_logits, hidden, preferred_element_type=jnp.float32)
        dtype = jnp.float32 if so_far else None
        return d_rows, sum(so_far, jnp.einsum("btv,vd->btd", d_logits, rows, preferred_element_type=dtype))

    so_far = () if d_hidden is None else (d_hidden,)
    zero = jnp.zeros(rows.shape, jnp.float32)
    d_rows, d_hidden = _over_chunks(chunk, zero, (hidden, index, lse, d_losses, *so_far), count)
    return d_rows[:count], d_hidden


def _losses_bwd(tied, split, dimension, residuals, d_losses):
    hidden, shard, head, targets, lse = residuals
    head = _head(shard, tied, dimension, hidden.dtype) if head is None else head
    if split:  # each device of the tensor axis was given its share of the cotangent of a result that all of them have
        d_losses = jax.lax.psum(d_losses, TENSOR)
    pieces = Pieces.of(shard.shape if tied else shard.shape[::-1], dimension)
    index = targets - _first_token_of(len(head), split)
    number = index if pieces.single else pieces.number(index)

    def piece(d_hidden, start, width):
        rows = pieces.take(head, start, width)
        d_rows, d_hidden = _head_gradients(rows, number - start * pieces.owners, hidden, lse, d_losses, d_hidden)
        return d_hidden, give_back(d_rows.astype(shard.dtype), dimension)

    none = None if pieces.single else jnp.zeros(hidden.shape, jnp.float32)
    d_hidden, d_head = pieces.over(piece, none)
    return d_hidden.astype(hidden.dtype), d_head if tied else d_head.T, None


_local_token_losses.defvjp(_losses_fwd, _losses_bwd)


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
        losses = token_losses(model, hidden, batch["targets"])
        return jnp.sum(losses * batch["loss_mask"]) / total

    def gradient(params, batch, total, key):
        """Loss and gradients of all micro-batches."""
        value_and_grad = jax.value_and_grad(micro_loss)
        if count == 1:
            return value_and_grad(params, batch, total, jax.random.fold_in(key, 0))

        def accumulate(carry, inputs):
            index, micro = inputs
            got = value_and_grad(params, micro, total, jax.random.fold_in(key, index))
            return jax.tree.map(jnp.add, carry, got), None

        zero = jax.tree.map(jnp.zeros_like, (jnp.zeros(()), params))
        return jax.lax.scan(accumulate, zero, (jnp.arange(count), _split_micro_batches(batch, count)))[0]

    if setup.mesh.shape["data"] == setup.mesh.size > 1 and config.model.dropout == 0:
        gradient = _summed_once(gradient)

    def step(state: State, batch: Batch):
        check_batch(batch, config.train.batch_size, config.data.seq_len)
        params = state["params"]
        total = jnp.maximum(batch["loss_mask"].sum(), 1.0)
        key = jax.random.fold_in(jax.random.key(config.seed), state["step"])
        loss, grads = gradient(params, batch, total, key)
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
