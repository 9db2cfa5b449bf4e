"""Training state: mesh, sharding rules, and what a checkpoint holds.

The state is a plain nested dict {"step", "params", "opt_state"} of arrays. Parameters carry their names as dict keys,
which sharding, weight decay and checkpoints go by. Some configs have further parts: "ema", the averaged parameters, and
"recent", by which spikes are judged.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from ml_collections import ConfigDict

from nsa_jax.aot import on_host
from nsa_jax.config import ConfigError, Problem
from nsa_jax.nn import ModelConfig, Transformer
from nsa_jax.nn.sharding import BATCH_AXES, CONTEXT, DATA, FSDP, MESH_AXES, parameter_spec
from nsa_jax.train import spikes
from nsa_jax.train.compiler import check_xla_options, compiler_options
from nsa_jax.train.optimizer import make_optimizer, names_of, schedule_at
from nsa_jax.train.program_store import Program

logger = logging.getLogger("nsa_jax")

State = dict[str, Any]

_BATCH = {"inputs": jnp.int32, "targets": jnp.int32, "segment_start": jnp.int32, "loss_mask": jnp.float32}

# Tensor parallelism: which dimension of a parameter its mesh axis splits (a stacked layer axis not counted). All others
# (norms, biases, the compressors, which every head shares) are whole on each of its devices. Then fsdp splits the
# largest dimension that it divides.
#   column parallel: every device computes its own heads or hidden features, for which it needs all of x
#   row parallel: it multiplies them with its rows, and the products are summed over the devices
_TENSOR_DIMENSIONS = {
    "embedding": 0,  # [V, D] vocabulary: a device looks up its own tokens; the others add 0
    "head": 1,  # [D, V] vocabulary: the cross-entropy sums over devices, logits are never gathered
    "attention/w_out": 0,  # [N*V, D] row parallel, by head
    "mlp/w_out": 0,  # [hidden, D] row parallel
    # Fused matrices: a share of their columns would tear heads (or the halves of SwiGLU) apart. They are stored split
    # by rows, and the layer that uses them turns this into whole heads (or hidden features) by an all-to-all.
    "attention/w_in": 0,  # [D, ...] used column parallel, a key/value head with its queries and gates on one device
    "mlp/w_in": 0,  # [D, 2*hidden] used column parallel
}


def mesh_problems(config: ConfigDict, num_devices: int) -> list[Problem]:
    """What is wrong with `config.mesh` and the batch on this many devices."""
    mesh = config.mesh
    others = mesh.fsdp * mesh.tensor * mesh.context
    where = ", ".join(f"config.mesh.{axis}={mesh[axis]}" for axis in ("data", "fsdp", "tensor", "context"))
    if others < 1 or num_devices % others or (mesh.data > 0 and mesh.data * others != num_devices):
        message = f"{where}: data * fsdp * tensor * context must be the number of devices, {num_devices}"
        fix = "set config.mesh.data=-1 and the other axes so that their product divides the device count"
        return [Problem("R020", "error", message, fix)]
    if mesh.shard_optimizer and others > 1:
        message = f"config.mesh.shard_optimizer=True with {where}: it serves meshes that split nothing but the batch"
        fix = "leave it False: fsdp splits the optimizer state already; or set fsdp, tensor and context to 1"
        return [Problem("R020", "error", message, fix)]
    per_process = num_devices // jax.process_count() if num_devices == jax.device_count() else num_devices
    if per_process % (mesh.tensor * mesh.context):
        message = f"{where}: tensor * context must divide the {per_process} devices of a process"
        return [Problem("R020", "error", message, "keep these two axes within a host; split the batch over hosts")]
    shards = num_devices // (mesh.tensor * mesh.context)
    micro = config.train.batch_size // max(config.train.grad_accum, 1)
    if micro % shards:
        beside = f" ({num_devices} / tensor / context)" if shards < num_devices else ""
        message = (
            f"config.train.batch_size={config.train.batch_size} with grad_accum={config.train.grad_accum}: "
            f"micro-batches of {micro} rows cannot be split over {shards} devices{beside}"
        )
        return [Problem("R021", "error", message, f"use a multiple of {shards * config.train.grad_accum} rows")]
    return []


def vocabulary_problems(config: ConfigDict, model_config: ModelConfig) -> list[Problem]:
    """What is wrong with `config.mesh` and the vocabulary, which is known only with the tokenizer."""
    size, tensor = model_config.vocab_size, config.mesh.tensor
    if size % tensor == 0:
        return []
    message = f"config.mesh.tensor={tensor}: a vocabulary of {size:,} cannot be split over {tensor} devices"
    fix = f"pad it: config.model.vocab_size={-(-size // (64 * tensor)) * 64 * tensor}"
    return [Problem("R020", "error", message, fix)]


def make_mesh(config: ConfigDict, devices: list | None = None) -> Mesh:
    """A mesh with the axes data, fsdp, context and tensor over all devices.

    Raises:
      ConfigError: `config.mesh` or the batch size does not fit the devices.
    """
    devices = jax.devices() if devices is None else devices
    problems = mesh_problems(config, len(devices))
    if problems:
        raise ConfigError(problems)
    grid = np.asarray(devices).reshape(-1, *(config.mesh[axis] for axis in MESH_AXES[1:]))
    return Mesh(grid, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def partition_spec(
    path: tuple, shape: tuple[int, ...], mesh: Mesh | AbstractMesh, over: tuple[str, ...] = (FSDP,)
) -> P:
    """How one array of the state is laid out: first by `_TENSOR_DIMENSIONS`, then its largest dimension over fsdp.

    Arrays under "blocks" have the layers as first axis, which is never split: a scan reads one layer at a time.
    Optimizer moments have their parameter's name in their path and get its layout.

    Args:
      path: of the array in the state.
      shape: of the array.
      mesh: of all devices.
      over: the axes that split whatever array they can.
    """
    names = names_of(path)
    first = 1 if "blocks" in names else 0
    rule = next((r for r in ("/".join(names[-2:]), "".join(names[-1:])) if r in _TENSOR_DIMENSIONS), None)
    dimension = None if rule is None else first + _TENSOR_DIMENSIONS[rule]
    return parameter_spec(shape, dimension, first, mesh.shape, over)


def optimizer_axes(config: ConfigDict) -> tuple[str, ...]:
    """The mesh axes that split the optimizer's averages, beside `tensor`."""
    return (FSDP, DATA) if config.mesh.shard_optimizer else (FSDP,)


def state_sharding(state: State, mesh: Mesh | AbstractMesh, config: ConfigDict) -> State:
    """NamedSharding of every array of a state (abstract or real)."""

    def sharding(path, leaf):
        optimizer = names_of(path)[0] == "opt_state"
        over = optimizer_axes(config) if optimizer else (FSDP,)
        layout = NamedSharding(mesh, partition_spec(path, leaf.shape, mesh, over))
        # Averages, not counts of steps.
        return on_host(layout) if optimizer and config.train.offload_optimizer and leaf.ndim else layout

    return jax.tree_util.tree_map_with_path(sharding, state)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Rows of a batch are split over data and fsdp, their tokens over context."""
    return NamedSharding(mesh, P(BATCH_AXES, CONTEXT))


def replicated(mesh: Mesh) -> NamedSharding:
    """Of small results that every process reads: each device has the whole."""
    return NamedSharding(mesh, P())


def to_device(batch: dict[str, np.ndarray], sharding: jax.sharding.NamedSharding) -> dict[str, jax.Array]:
    """This process's rows as part of a global array."""
    return {name: jax.make_array_from_process_local_data(sharding, value) for name, value in batch.items()}


@dataclasses.dataclass(frozen=True)
class Setup:
    """What stays fixed over a run.

    Attributes:
      config: the training config.
      model_config: the model's.
      graphdef: the model that is trained without its parameters; `nnx.merge(graphdef, params)` makes a model.
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
        """The model with these parameters, as it is trained."""
        return nnx.merge(self.graphdef, params)

    def scanned_model(self, params) -> Transformer:
        """The same with its layers in a loop: for programs that run seldom, it compiles in a third of the time.

        No product is in float8.
        """
        return nnx.merge(_graphdef(dataclasses.replace(self.model_config, scan_layers=True)), params)

    @property
    def batch_shards(self) -> int:
        """Into how many parts the rows of a batch are split."""
        return self.mesh.shape["data"] * self.mesh.shape["fsdp"]

    @property
    def token_shards(self) -> int:
        """Into how many parts the tokens of a batch are split: its rows, and each row over the context axis."""
        return self.batch_shards * self.mesh.shape[CONTEXT]

    def compiler_options(self, *, measured: bool = False) -> dict[str, Any] | None:
        """See `compiler.compiler_options`."""
        return compiler_options(self.config, self.mesh.devices.flat[0], measured=measured)

    @property
    def gradient_spec(self) -> Any:
        """The layout in which the optimizer takes gradients, a PartitionSpec for each: that of its averages."""
        over = optimizer_axes(self.config)
        return jax.tree_util.tree_map_with_path(
            lambda path, leaf: partition_spec(path, leaf.shape, self.mesh, over), self.abstract_state["params"]
        )

    def num_parameters(self) -> int:
        """Measured from the arrays."""
        return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(self.abstract_state["params"]))

    def checkpoint_bytes(self) -> int:
        """Size of one checkpoint: the whole state, once."""
        return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(self.abstract_state))

    def target(self) -> State:
        """Shapes, dtypes and shardings to restore a checkpoint into."""
        return jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            self.abstract_state,
            self.sharding,
        )

    def abstract_batch(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes, dtypes and shardings of a batch of `config.train.batch_size` rows."""
        shape, sharding = (self.config.train.batch_size, self.config.data.seq_len), batch_sharding(self.mesh)
        return {name: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for name, dtype in _BATCH.items()}

    @functools.cached_property
    def initialise(self) -> Any:
        """The program that creates a fresh state with its sharding: no device ever holds all of an array."""

        def initial_state() -> State:
            return _init(self.config, self.model_config, self.optimizer)

        return Program(jax.jit(initial_state, out_shardings=self.sharding))

    def init(self) -> State:
        """A fresh state."""
        with jax.set_mesh(self.mesh):
            return self.initialise()

    def fresh_optimizer(self, params, step: int) -> Any:
        """Optimizer state for restored parameters: its averages start anew, its schedule continues after `step`."""

        def make(params):
            return schedule_at(step, self.optimizer.init(params))

        with jax.set_mesh(self.mesh):
            return jax.jit(make, out_shardings=self.sharding["opt_state"])(params)

    def completed(self, state: State) -> State:
        """A restored state with the parts that the config asks for and the checkpoint did not have, begun anew."""
        missing = {name: sharding for name, sharding in self.sharding.items() if name not in state}
        if not missing:
            return state
        if "ema" in missing:
            logger.warning(
                "no averaged weights were saved: the average begins with those of step %s", int(state["step"])
            )

        def make(params):
            return {name: part for name, part in _further_parts(self.config, params).items() if name in missing}

        with jax.set_mesh(self.mesh):
            return {**state, **jax.jit(make, out_shardings=missing)(state["params"])}

    def another_stage(self, state: State) -> State:
        """The state before the first step of another stage: weights and the optimizer's averages stay.

        Steps and the schedule begin again. The argument is consumed.
        """

        def make(state):
            recent = {"recent": spikes.none_yet()} if "recent" in state else {}  # other data have other losses
            opt_state = schedule_at(0, state["opt_state"])
            return {**state, **recent, "step": jnp.zeros_like(state["step"]), "opt_state": opt_state}

        with jax.set_mesh(self.mesh):
            return jax.jit(make, out_shardings=self.sharding, donate_argnums=0)(state)


@functools.cache
def _graphdef(config: ModelConfig) -> nnx.GraphDef:
    return nnx.graphdef(nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0))))


def _init(config: ConfigDict, model_config: ModelConfig, optimizer: optax.GradientTransformation) -> State:
    model = Transformer(model_config, rngs=nnx.Rngs(params=config.seed))
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    state = {"step": jnp.zeros((), jnp.int32), "params": params, "opt_state": optimizer.init(params)}
    return {**state, **_further_parts(config, params)}


def _further_parts(config: ConfigDict, params: Any) -> State:
    """What the config adds to the state, as it begins beside these parameters."""
    parts: State = {}
    if config.train.ema_decay:
        parts["ema"] = jax.tree.map(lambda param: param.astype(jnp.float32), params)
    if config.guards.skip_spikes:
        parts["recent"] = spikes.none_yet()
    return parts


def setup(config: ConfigDict, vocab_size: int, devices: list | None = None) -> Setup:
    """Everything about a run that needs no data and no device memory.

    Args:
      config: the training config.
      vocab_size: the tokenizer's.
      devices: None means all.

    Raises:
      ConfigError: `config.mesh`, batch, rows or vocabulary do not fit together, or XLA does not know an option.
    """
    mesh = make_mesh(config, devices)
    check_xla_options(config)
    model_config = ModelConfig.from_config(config, vocab_size)
    if problems := vocabulary_problems(config, model_config):
        raise ConfigError(problems)
    over = optimizer_axes(config)
    layout = (lambda path, shape: partition_spec(path, shape, mesh, over)) if mesh.size > 1 else None
    optimizer = make_optimizer(config, model_config, layout)
    graphdef = _graphdef(dataclasses.replace(model_config, matmul_dtype=config.model.matmul_dtype))
    abstract = jax.eval_shape(lambda: _init(config, model_config, optimizer))
    return Setup(config, model_config, graphdef, optimizer, mesh, abstract, state_sharding(abstract, mesh, config))
