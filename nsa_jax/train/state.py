"""Training state: mesh, sharding rules, optimizer, and what a checkpoint holds.

The state is a plain nested dict {"step", "params", "opt_state"} of arrays. Parameters carry their names as dict keys,
which sharding, weight decay and checkpoints go by.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from ml_collections import ConfigDict

from nsa_jax.config import ConfigError, Problem
from nsa_jax.nn import ModelConfig, Transformer
from nsa_jax.nn.sharding import BATCH_AXES

State = dict[str, Any]

# Below this many elements a parameter is cheaper to keep everywhere than to gather.
_REPLICATE_BELOW = 4096


def mesh_problems(config: ConfigDict, num_devices: int) -> list[Problem]:
    """What is wrong with `config.mesh` and the batch on this many devices."""
    data, fsdp = config.mesh.data, config.mesh.fsdp
    where = f"config.mesh.data={data}, config.mesh.fsdp={fsdp}"
    if fsdp < 1 or num_devices % fsdp or (data > 0 and data * fsdp != num_devices):
        message = f"{where}: data * fsdp must be the number of devices, {num_devices}"
        return [Problem("R020", "error", message, "set config.mesh.data=-1 and fsdp to a divisor of the device count")]
    micro = config.train.batch_size // max(config.train.grad_accum, 1)
    if micro % num_devices:
        message = (
            f"config.train.batch_size={config.train.batch_size} with grad_accum={config.train.grad_accum}: "
            f"micro-batches of {micro} rows cannot be split over {num_devices} devices"
        )
        return [Problem("R021", "error", message, f"use a multiple of {num_devices * config.train.grad_accum} rows")]
    return []


def make_mesh(config: ConfigDict, devices: list | None = None) -> Mesh:
    """A mesh with axes data and fsdp over all devices.

    Raises:
      ConfigError: `config.mesh` or the batch size does not fit the devices.
    """
    devices = jax.devices() if devices is None else devices
    problems = mesh_problems(config, len(devices))
    if problems:
        raise ConfigError(problems)
    fsdp = config.mesh.fsdp
    grid = np.asarray(devices).reshape(len(devices) // fsdp, fsdp)
    return Mesh(grid, BATCH_AXES, axis_types=(AxisType.Auto, AxisType.Auto))


def _names(path: tuple) -> list[str]:
    return [str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))) for key in path]


def partition_spec(path: tuple, shape: tuple[int, ...], mesh: Mesh) -> P:
    """How one array of the state is laid out: its largest divisible dimension is split over the fsdp axis.

    Arrays under "blocks" have the layers as first axis, which is never split: a scan reads one layer at a time.
    Optimizer moments have their parameter's name in their path and get its layout.
    """
    size = mesh.shape["fsdp"]
    first = 1 if "blocks" in _names(path) else 0
    dims = [dim for dim in range(first, len(shape)) if shape[dim] % size == 0]
    if size == 1 or not dims or math.prod(shape) < _REPLICATE_BELOW:
        return P()
    best = max(dims, key=lambda dim: shape[dim])
    return P(*(None,) * best, "fsdp")


def state_sharding(state: State, mesh: Mesh) -> State:
    """NamedSharding of every array of a state (abstract or real)."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: NamedSharding(mesh, partition_spec(path, leaf.shape, mesh)), state
    )


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Rows of a batch are split over both axes."""
    return NamedSharding(mesh, P(BATCH_AXES))


def decays(path: tuple, _leaf=None) -> bool:
    """Whether weight decay applies: to matrices (by name), not to norms, biases and position embeddings."""
    name = _names(path)[-1]
    return name.startswith("w_") or name in ("embedding", "head")


def learning_rate(config: ConfigDict) -> Callable[[jax.Array], jax.Array]:
    """The schedule: linear warm-up to the peak, then cosine, linear or constant.

    Step s (0 is the first) of the warm-up uses the share (s + 1) / warmup_steps; the last step uses `final_fraction`
    of the peak.
    """
    o, steps = config.optim, config.train.steps

    def schedule(step):
        step = jnp.asarray(step, jnp.float32)
        warm = jnp.minimum((step + 1) / max(o.warmup_steps, 1), 1.0)
        progress = jnp.clip((step - o.warmup_steps) / max(steps - 1 - o.warmup_steps, 1), 0.0, 1.0)
        shape = {
            "cosine": 0.5 * (1 + jnp.cos(jnp.pi * progress)),
            "linear": 1.0 - progress,
            "constant": jnp.ones_like(progress),
        }[o.schedule]
        final = 1.0 if o.schedule == "constant" else o.final_fraction
        return o.learning_rate * warm * (final + (1 - final) * shape)

    return schedule


def make_optimizer(config: ConfigDict) -> optax.GradientTransformation:
    """AdamW with global-norm clipping; decays matrices only."""
    o = config.optim
    adamw = optax.adamw(
        learning_rate(config),
        b1=o.b1,
        b2=o.b2,
        eps=o.eps,
        weight_decay=o.weight_decay,
        mask=lambda params: jax.tree_util.tree_map_with_path(decays, params),
    )
    return optax.chain(optax.clip_by_global_norm(o.clip), adamw) if o.clip > 0 else adamw


@dataclasses.dataclass(frozen=True)
class Setup:
    """What stays fixed over a run.

    Attributes:
      config: the training config.
      model_config: the model's.
      graphdef: the model without its parameters; `nnx.merge(graphdef, params)` makes a model.
      optimizer: the optax transformation.
      mesh: of all devices.
      abstract_state: shapes and dtypes of the state.
      sharding: of the state.
    """

    config: ConfigDict
    model_config: ModelConfig
    graphdef: nnx.GraphDef
    optimizer: optax.GradientTransformation
    mesh: Mesh
    abstract_state: State
    sharding: State

    def model(self, params) -> Transformer:
        """The model with these parameters."""
        return nnx.merge(self.graphdef, params)

    def num_parameters(self) -> int:
        """Measured from the arrays."""
        return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(self.abstract_state["params"]))

    def target(self) -> State:
        """Shapes, dtypes and shardings to restore a checkpoint into."""
        return jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            self.abstract_state,
            self.sharding,
        )

    def init(self) -> State:
        """A fresh state, created with its sharding: no device ever holds all of a sharded array."""
        make = jax.jit(lambda: _init(self.config, self.model_config, self.optimizer), out_shardings=self.sharding)
        with jax.set_mesh(self.mesh):
            return make()


def _init(config: ConfigDict, model_config: ModelConfig, optimizer: optax.GradientTransformation) -> State:
    model = Transformer(model_config, rngs=nnx.Rngs(params=config.seed))
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    return {"step": jnp.zeros((), jnp.int32), "params": params, "opt_state": optimizer.init(params)}


def setup(config: ConfigDict, vocab_size: int, devices: list | None = None) -> Setup:
    """Everything about a run that needs no data and no device memory.

    Args:
      config: the training config.
      vocab_size: the tokenizer's.
      devices: None means all.
    """
    mesh = make_mesh(config, devices)
    model_config = ModelConfig.from_config(config, vocab_size)
    optimizer = make_optimizer(config)
    graphdef = nnx.graphdef(nnx.eval_shape(lambda: Transformer(model_config, rngs=nnx.Rngs(0))))
    abstract = jax.eval_shape(lambda: _init(config, model_config, optimizer))
    return Setup(config, model_config, graphdef, optimizer, mesh, abstract, state_sharding(abstract, mesh))
