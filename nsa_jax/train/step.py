"""The compiled functions of training: train step, evaluation step, sampling."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P
from ml_collections import ConfigDict

from nsa_jax.nn.selection_loss import selection_queries
from nsa_jax.nn.sharding import DATA, split_dimension, token_spec
from nsa_jax.train import spikes
from nsa_jax.train.loss import token_losses, weighted_loss
from nsa_jax.train.optimizer import learning_rate, schedule_at
from nsa_jax.train.state import Setup, State, batch_sharding, replicated
from nsa_jax.train.watch.layers import layer_figures

Batch = dict[str, jax.Array]


def check_batch(batch: Batch, config: ConfigDict) -> int:
    """Checks shapes and dtypes of a batch at the step's boundary; returns its number of micro-batches."""
    names, train = ("inputs", "targets", "segment_start", "loss_mask"), config.train
    rows = batch["inputs"].shape[0] if train.batch_ramp else train.batch_size
    chex.assert_shape([batch[name] for name in names], (rows, config.data.seq_len))
    chex.assert_type([batch["inputs"], batch["targets"], batch["segment_start"]], jnp.int32)
    chex.assert_type(batch["loss_mask"], jnp.float32)
    count, rest = divmod(rows, train.batch_size // train.grad_accum)
    chex.assert_equal(rest, 0)
    return count


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


def _moved_average(average, params, step: jax.Array, decay: float):
    """The averaged parameters after step `step`; early, when parameters move fast, the average is shorter."""
    step = step.astype(jnp.float32)
    share = jnp.maximum(1 - decay, 9 / (10 + step))
    return jax.tree.map(lambda old, param: old + share * (param.astype(jnp.float32) - old), average, params)


def _summed_once(gradient: Callable, specs: Any) -> Callable:
    """`gradient` on each device's rows, summed over the devices of a mesh that splits nothing but the batch.

    Left to the compiler, every layer of every micro-batch is summed by itself, matrices in the compute dtype: for
    a100_prod on 8 devices 1.4 GiB per step instead of 0.4. (Dropout needs the compiler: its masks are drawn for the
    whole batch, so that they are the same on any mesh.)

    Args:
      gradient: returns losses and gradients of a device's rows.
      specs: of the gradients: where `data` splits one, each device receives its part of the sum.
    """

    def add_up(leaf, spec):
        dimension = split_dimension(spec, DATA)
        if dimension is None:
            return jax.lax.psum(leaf, DATA)
        return jax.lax.psum_scatter(leaf, DATA, scatter_dimension=dimension, tiled=True)

    def local(params, batch, of_batch, key):
        losses, grads = gradient(params, batch, of_batch, key)
        return jax.lax.psum(losses, DATA), jax.tree.map(add_up, grads, specs)

    return jax.shard_map(local, in_specs=(P(), P(DATA), P(), P()), out_specs=(P(), specs), check_vma=False)


def make_train_step(setup: Setup, token_bytes) -> Callable[[State, Batch], tuple[State, dict[str, jax.Array]]]:
    """The jitted step (state, batch) -> (state, metrics); the state is donated.

    The loss is the mean over every token of the global batch that `loss_mask` weights, whatever the number of
    micro-batches and devices. `config.train.z_loss` and `config.train.selection_loss` add to what is minimised. A step
    whose loss or gradient norm is not finite (with `config.guards.skip_steps`) or a spike (with
    `config.guards.skip_spikes`) leaves parameters and all averages as they were.

    Metrics are float32 scalars on the device, and with `config.guards.health` those of `layer_figures` under "layers";
    nothing is sent to the host.

    Args:
      setup: the run's.
      token_bytes: int [vocab], bytes of text of each token, for bits per byte.
    """
    config = setup.config
    schedule = learning_rate(config)
    packed = config.data.packing
    lengths = jnp.asarray(token_bytes, jnp.float32)

    def micro_loss(params, batch, of_batch, key):
        model, queries = setup.model(params), of_batch["queries"]
        hidden = model.hidden(
            batch["inputs"],
            batch["segment_start"] if packed else None,
            deterministic=config.model.dropout == 0,
            rngs=key,
            selection_queries=queries,
        )
        hidden, by_layer = (hidden, None) if queries is None else hidden
        weights = batch["loss_mask"] / of_batch["total"]
        objective, loss = weighted_loss(model, hidden, batch["targets"], weights, config.train.z_loss)
        parts = {"loss": loss, "z_loss": objective - loss}
        if by_layer is not None:
            parts["selection_loss"] = by_layer.mean(0).sum() / of_batch["rows"]
            objective += config.train.selection_loss * parts["selection_loss"]
        return objective, parts

    def gradient(count, params, batch, of_batch, key):
        """The parts of what is minimised, and its gradients, of all micro-batches."""
        gradient_and_parts = jax.grad(micro_loss, has_aux=True)
        if count == 1:
            return gradient_and_parts(params, batch, of_batch, jax.random.fold_in(key, 0))[::-1]

        def accumulate(carry, inputs):
            index, micro = inputs
            grads, parts = gradient_and_parts(params, micro, of_batch, jax.random.fold_in(key, index))
            return jax.tree.map(jnp.add, carry, (parts, grads)), None

        names = ("loss", "z_loss", *(["selection_loss"] if config.train.selection_loss else []))
        zero = jax.tree.map(jnp.zeros_like, (dict.fromkeys(names, jnp.zeros(())), params))
        return jax.lax.scan(accumulate, zero, (jnp.arange(count), _split_micro_batches(batch, count)))[0]

    sums_once = setup.mesh.shape[DATA] == setup.mesh.size > 1 and config.model.dropout == 0
    gradient_spec = setup.gradient_spec

    def step(state: State, batch: Batch):
        micro_gradients = functools.partial(gradient, check_batch(batch, config))
        params = state["params"]
        counted = batch["loss_mask"].sum()
        total = jnp.where(counted > 0, counted, 1.0)
        key = jax.random.fold_in(jax.random.key(config.seed), state["step"])
        of_batch = {"total": total, "rows": jnp.float32(len(batch["inputs"])), "queries": None}
        if config.train.selection_loss:
            count, length = config.train.selection_queries, config.data.seq_len
            # The same for all rows: neither micro-batches nor devices change them. Dropout takes the first numbers.
            own_key = jax.random.fold_in(key, 2**31 - 1)
            of_batch["queries"] = selection_queries(length, count, setup.model_config.nsa, own_key)
        whole_gradient = _summed_once(micro_gradients, gradient_spec) if sums_once else micro_gradients
        parts, grads = whole_gradient(params, batch, of_batch, key)
        loss = parts["loss"]
        if config.mesh.shard_optimizer:
            grads = jax.lax.with_sharding_constraint(grads, gradient_spec)
        # Measured here, before clipping and before anything could reset it.
        grad_norm = _global_norm(grads)
        if config.train.offload_optimizer:
            # Without the barrier XLA fetches the averages first, and the backward pass has no memory of theirs.
            kept, grad_norm = jax.lax.optimization_barrier((state["opt_state"], grad_norm))
            on_device = jax.tree.map(lambda leaf: jax.device_put(leaf, jax.memory.Space.Device), kept)
            state = {**state, "opt_state": on_device}
        updates, opt_state = setup.optimizer.update(grads, state["opt_state"], params)
        new = {**state, "params": optax.apply_updates(params, updates), "opt_state": opt_state}
        if config.mesh.shard_optimizer:
            # Without this constraint XLA splits the averaged parameters too, and gathers them beside the parameters.
            new["params"] = jax.lax.with_sharding_constraint(new["params"], P())
        if "ema" in state:
            new["ema"] = _moved_average(state["ema"], new["params"], state["step"], config.train.ema_decay)
        measured = {"loss": loss, "grad_norm": grad_norm}
        good, extra = jnp.array(True), {}
        if config.guards.skip_steps:
            good &= jnp.isfinite(loss) & jnp.isfinite(grad_norm)
        if "recent" in state:
            limit = spikes.limits(state["recent"], config.guards)
            spike = (loss > limit["loss"]) | (grad_norm > limit["grad_norm"])
            good &= ~spike
            new["recent"] = spikes.with_step(state["recent"], **measured)
            extra = {"spike": spike.astype(jnp.float32), **{f"{name}_limit": value for name, value in limit.items()}}
        if config.guards.skip_steps or "recent" in state:
            new = jax.tree.map(functools.partial(jnp.where, good), new, state)
            # A step that is left out has its place in the schedule.
            new["opt_state"] = schedule_at(state["step"] + 1, new["opt_state"])
        text_bytes = jnp.sum(lengths[batch["targets"]] * batch["loss_mask"])
        metrics = {
            **measured,
            "tokens": batch["loss_mask"].sum(),
            "bits_per_byte": loss * total / math.log(2) / jnp.maximum(text_bytes, 1.0),
            "param_norm": _global_norm(new["params"]),
            "update_norm": _global_norm(updates),
            "learning_rate": schedule(state["step"]),
            **extra,
        }
        metrics |= {name: parts[name] for name in ("z_loss", "selection_loss") if config.train[name]}
        chex.assert_rank(list(metrics.values()), 0)
        if config.guards.health:
            trees = {"weights": new["params"], "gradients": grads, "updates": updates}
            metrics["layers"] = layer_figures(setup.model_config, **trees)
        return {**new, "step": state["step"] + 1}, metrics

    return jax.jit(
        step,
        donate_argnums=0,
        in_shardings=(setup.sharding, batch_sharding(setup.mesh)),
        out_shardings=(setup.sharding, replicated(setup.mesh)),
        compiler_options=setup.compiler_options(measured=True),
    )


def _by_position(values: jax.Array, segment_start: jax.Array) -> jax.Array:
    """Sums of values [B, T] over ranges of positions in the document, float32 [bins]: 0, 1, 2 to 3, 4 to 7, ..."""
    length = values.shape[1]
    position = jnp.arange(length, dtype=jnp.int32) - segment_start
    number = 32 - jax.lax.clz(position)  # of binary digits
    bins = jnp.arange((length - 1).bit_length() + 1)
    return jnp.where(number[..., None] == bins, values[..., None], 0.0).sum((0, 1))


def make_eval_step(setup: Setup, token_bytes) -> Callable[[State, Batch], dict[str, jax.Array]]:
    """The jitted evaluation (params, batch) -> sums over the global batch: nats, tokens and bytes of text.

    `nats_at` and `tokens_at`, float32 [bins], are the sums over ranges of positions in the document that double:
    [0, 1), [1, 2), [2, 4), ...
    """
    config = setup.config
    lengths = jnp.asarray(token_bytes, jnp.float32)

    def step(params, batch: Batch):
        count = check_batch(batch, config)
        model = setup.scanned_model(params)

        def sums(micro):
            hidden = model.hidden(micro["inputs"], micro["segment_start"] if config.data.packing else None)
            losses = token_losses(model, hidden, micro["targets"])
            return {
                "nats": jnp.sum(losses * micro["loss_mask"]),
                "tokens": micro["loss_mask"].sum(),
                "bytes": jnp.sum(lengths[micro["targets"]] * micro["loss_mask"]),
                "nats_at": _by_position(losses * micro["loss_mask"], micro["segment_start"]),
                "tokens_at": _by_position(micro["loss_mask"], micro["segment_start"]),
            }

        if count == 1:
            return sums(batch)
        parts = jax.lax.map(sums, _split_micro_batches(batch, count))
        return jax.tree.map(lambda x: x.sum(0), parts)

    return jax.jit(
        step,
        in_shardings=(setup.sharding["params"], batch_sharding(setup.mesh)),
        out_shardings=replicated(setup.mesh),
        compiler_options=setup.compiler_options(),
    )


def make_sampler(setup: Setup, length: int, vocab_size: int, temperature: float = 0.8) -> Callable:
    """The jitted sampler (params, tokens [1, length], prompt_length, key) -> tokens [1, length].

    Every new token costs a forward pass over the whole row: simple, and one compilation. Only the first `vocab_size`
    ids are drawn, since the model's vocabulary may be padded beyond the tokenizer's.
    """

    def sample(params, tokens, prompt_length, key):
        model = setup.scanned_model(params)

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
        compiler_options=setup.compiler_options(),
    )


def host_transfers(hlo_text: str) -> list[str]:
    """Instructions of a compiled program that talk to the host while it runs: callbacks, infeed, outfeed, send, recv.

    Args:
      hlo_text: `compiled.as_text()`.
    """
    marks = ("callback", " infeed(", " outfeed(", " send(", " recv(", "MoveToHost")
    return [line.strip() for line in hlo_text.splitlines() if "=" in line and any(mark in line for mark in marks)]
