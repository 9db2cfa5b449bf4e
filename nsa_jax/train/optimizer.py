"""The optimizer (AdamW or Muon), its schedule, and factors of learning rate and weight decay for parameter groups."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from ml_collections import ConfigDict

from nsa_jax.nn import ModelConfig
from nsa_jax.train.muon import Layout, scale_by_muon

# Which group a parameter, or all below a module, belongs to.
_GROUPS = {
    "embedding": "embedding",
    "head": "head",
    "gate_bias": "gates",
    "compress_key": "compressor",
    "compress_value": "compressor",
}


def names_of(path: tuple) -> list[str]:
    """The names along a path of `jax.tree_util`."""
    return [str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))) for key in path]


def decays(path: tuple, _leaf=None) -> bool:
    """Whether weight decay applies: to matrices (by name), not to norms, biases and position embeddings."""
    name = names_of(path)[-1]
    return name.startswith("w_") or name in ("embedding", "head")


def learning_rate(config: ConfigDict) -> Callable[[jax.Array], jax.Array]:
    """The schedule: linear warm-up to the peak, then cosine, linear, constant or wsd.

    Step s (0 is the first) of the warm-up uses the share (s + 1) / warmup_steps; the last step uses `final_fraction`
    of the peak. "wsd" (warm-up, stable, decay; arXiv 2404.06395) stays at the peak and falls linearly over the last
    `decay_fraction` of the steps. Until then it does not depend on the number of steps, which may be raised.
    """
    o, steps = config.optim, config.train.steps

    begin = min(o.warmup_steps, steps - 2)  # of the fall; the last step is its end even right after the warm-up

    def schedule(step):
        step = jnp.asarray(step, jnp.float32)
        warm = jnp.minimum((step + 1) / max(o.warmup_steps, 1), 1.0)
        progress = jnp.clip((step - begin) / (steps - 1 - begin), 0.0, 1.0)
        decay_steps = max(o.decay_fraction * steps, 1)
        shape = {
            "wsd": jnp.clip((steps - 1 - step) / decay_steps, 0.0, 1.0),
            "cosine": 0.5 * (1 + jnp.cos(jnp.pi * progress)),
            "linear": 1.0 - progress,
            "constant": jnp.ones_like(progress),
        }[o.schedule]
        final = 1.0 if o.schedule == "constant" else o.final_fraction
        return o.learning_rate * warm * (final + (1 - final) * shape)

    return schedule


def group_factors(params: Any, factors: Mapping[str, float]) -> Any:
    """The factor of each parameter.

    Args:
      params: nested dict of arrays, named as in `nsa_jax.nn.Transformer`.
      factors: by group, the fields of `nsa_jax.config.GroupFactors`.

    Returns:
      A dict of the same form: a number for each parameter. NSA's gates are the last columns of `attention/w_in`; unless
      their factor is 1, that has one number per column, float32 [columns].
    """

    def of(tree: Any, group: str | None) -> Any:
        if not isinstance(tree, Mapping):
            return factors[group] if group else 1.0
        found = {name: of(value, _GROUPS.get(name, group)) for name, value in tree.items()}
        if factors["gates"] != 1.0 and {"w_in", "gate_bias"} <= tree.keys():
            gates, columns = tree["gate_bias"].shape, tree["w_in"].shape[-1]
            gate_columns = jnp.arange(columns) >= columns - gates[-2] * gates[-1]
            found["w_in"] = jnp.where(gate_columns, jnp.float32(factors["gates"]), 1.0)
        return found

    return of(params, None)


def _scale_groups(factors: ConfigDict) -> optax.GradientTransformation:
    """Multiplies each update by the factor of its parameter's group."""
    return optax.stateless(
        lambda updates, params: jax.tree.map(
            lambda update, factor: update * jnp.asarray(factor, update.dtype), updates, group_factors(updates, factors)
        )
    )


def _decay_groups(weight_decay: float, factors: ConfigDict) -> optax.GradientTransformation:
    """Adds to each update its parameter times the weight decay of its group, matrices only."""

    def add(updates, params):
        def one(path, update, param, factor):
            decay = jnp.asarray(weight_decay * factor, param.dtype)
            return update + decay * param if decays(path) else update

        return jax.tree_util.tree_map_with_path(one, updates, params, group_factors(params, factors))

    return optax.stateless(add)


def make_optimizer(
    config: ConfigDict, model: ModelConfig | None = None, layout: Layout | None = None
) -> optax.GradientTransformation:
    """AdamW (arXiv 1711.05101) or Muon (`nsa_jax.train.muon`) with global-norm clipping.

    Weight decay applies to matrices only, and is multiplied by the learning rate. The state, and so a checkpoint, has
    one form whatever `config.optim` says of clipping and groups.

    Args:
      config: the training config.
      model: of the parameters; Muon needs it.
      layout: see `nsa_jax.train.muon.scale_by_muon`.
    """
    o = config.optim
    scaled = optax.scale_by_adam(b1=o.b1, b2=o.b2, eps=o.eps)
    if o.name == "muon":
        if model is None:
            raise ValueError("model=None: must be a ModelConfig for config.optim.name='muon'")
        scaled = scale_by_muon(model, decay=o.momentum, adam=scaled, layout=layout)
    optimizer = optax.chain(
        scaled,
        _decay_groups(o.weight_decay, o.weight_decay_factor),
        optax.scale_by_learning_rate(learning_rate(config)),
        _scale_groups(o.learning_rate_factor),
    )
    return optax.chain(optax.clip_by_global_norm(o.clip) if o.clip > 0 else optax.identity(), optimizer)


def schedule_at(step: int | jax.Array, opt_state: Any) -> Any:
    """The optimizer's state with the schedule's count at `step`; that of the averages stays."""
    is_schedule = lambda part: isinstance(part, optax.ScaleByScheduleState)  # noqa: E731
    at_step = optax.ScaleByScheduleState(jnp.asarray(step, jnp.int32))
    return jax.tree.map(lambda part: at_step if is_schedule(part) else part, opt_state, is_leaf=is_schedule)
