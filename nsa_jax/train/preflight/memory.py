"""Memory of a run on devices that need not be here: the real sharded steps compiled for them, or an estimate.

The compiler plans every buffer of a program, so the figures of a compiled step are what a device will really hold. JAX
takes a pool of 75 % of a GPU's memory at start (XLA_CLIENT_MEM_FRACTION changes that), and the pool is what a run must
fit into.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import math
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh
from ml_collections import ConfigDict

from nsa_jax import aot
from nsa_jax.config import ConfigError, Problem
from nsa_jax.nn.sharding import MESH_AXES
from nsa_jax.train.loss import logit_bytes, weighted_loss
from nsa_jax.train.preflight import hlo
from nsa_jax.train.state import Setup, mesh_problems, setup, state_sharding
from nsa_jax.train.step import host_transfers, make_eval_step, make_sampler, make_train_step
from nsa_jax.train.watch import health
from nsa_jax.train.watch.memory_use import host_memory


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on one device.

    Attributes:
      parameters: float32 or as `config.model.param_dtype` says.
      optimizer: averages, without those that are kept on the host.
      batch: of one optimizer step.
      gradients: of a step, and their sum over micro-batches.
      activations: what the forward pass keeps for the backward pass.
      temporaries: all else, at the fullest moment.
      limit: what may be used.
      compiled: False for an estimate.
      host: in the memory of the device's host, not on the device.
    """

    parameters: int
    optimizer: int
    batch: int
    gradients: int
    activations: int
    temporaries: int
    limit: int
    compiled: bool
    host: int

    @property
    def total(self) -> int:
        return self.parameters + self.optimizer + self.batch + self.gradients + self.activations + self.temporaries

    @property
    def headroom(self) -> int:
        return self.limit - self.total

    @property
    def fits(self) -> bool:
        return self.headroom >= 0


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What the compiled steps say.

    Attributes:
      memory: of the train step.
      others: bytes on one device while each of the other programs runs, the training state beside it included.
      seconds: of compiling each program.
      collectives: of one train step.
      host: instructions that talk to the host, of all programs.
      nondeterministic: instructions of the train step whose results differ from run to run on a GPU.
    """

    memory: Memory
    others: dict[str, int]
    seconds: dict[str, float]
    collectives: list[hlo.Collective]
    host: list[str]
    nondeterministic: list[str]


def pool_variable() -> str:
    """The environment variable that says which share of a GPU's memory JAX takes; empty: none does."""
    names = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")  # the second is JAX's older name
    return next((name for name in names if os.environ.get(name)), "")


def pool_bytes(memory_bytes: int) -> int:
    """What JAX takes of a GPU's memory.

    Raises:
      ConfigError: the environment variable that says so is no number.
    """
    name = pool_variable()
    value = os.environ[name] if name else "0.75"
    try:
        return int(memory_bytes * float(value))
    except (ValueError, OverflowError) as error:
        message = f"{name}={value}: must be the share of a GPU's memory that JAX takes, such as 0.9"
        raise ConfigError([Problem("R025", "error", message, f"set it to such a number, or unset {name}")]) from error


def device_bytes(gpu: str) -> int:
    """The limit on one device: the pool on a GPU; on a CPU what this process may use."""
    if gpu:
        return pool_bytes(aot.GPUS[gpu].memory_bytes)
    stats = jax.local_devices()[0].memory_stats() or {}
    return stats.get("bytes_limit") or host_memory()[1]


def vocabulary(config: ConfigDict) -> int:
    """The tokenizer's size as far as the config alone tells; 50,304 where only the tokenizer's files know."""
    data = config.data
    known = {"byte": 257, "bpe": data.bpe_vocab_size}.get(data.tokenizer, 50_304)
    return data.synthetic_vocab if data.source == "synthetic" else known


def for_target(config: ConfigDict, gpu: str, count: int, vocab_size: int) -> Setup:
    """The run's setup on devices that need not be here; on this machine's if `gpu` is empty.

    Raises:
      AheadOfTimeUnavailable: the `aot` extra is missing.
      ConfigError: mesh or batch do not fit the devices.
    """
    return setup(config, vocab_size, aot.devices(gpu, count) if gpu else None)


def without_compiler(config: ConfigDict, count: int, vocab_size: int) -> tuple[Setup, AbstractMesh]:
    """The setup of one device's share of the batch on this machine's first device, and the mesh that it is a share of.

    Raises:
      ConfigError: mesh or batch do not fit the devices.
    """
    if problems := mesh_problems(config, count):
        raise ConfigError(problems)
    sizes = dict.fromkeys(MESH_AXES, 1) | {axis: config.mesh[axis] for axis in MESH_AXES[1:]}
    sizes["data"] = count // math.prod(sizes.values())
    share = config.copy_and_resolve_references()
    with share.unlocked():
        # cuDNN may be missing; the window kernels keep what its dense attention keeps.
        share.train.deterministic = True
        share.train.batch_size = config.train.batch_size // (sizes["data"] * sizes["fsdp"])
        share.data.seq_len = config.data.seq_len // sizes["context"]
        share.mesh.data = share.mesh.fsdp = share.mesh.tensor = share.mesh.context = 1
    return setup(share, vocab_size, jax.devices()[:1]), AbstractMesh(tuple(sizes.values()), MESH_AXES)


@contextlib.contextmanager
def _tracing(made: Setup, gpu: str):
    with aot.tracing_for(gpu, made.mesh) if gpu else jax.set_mesh(made.mesh):
        yield


def _on_one_device(tree: Any, sharding: Any) -> int:
    sizes = jax.tree.map(lambda leaf, s: math.prod(s.shard_shape(leaf.shape)) * leaf.dtype.itemsize, tree, sharding)
    return sum(jax.tree.leaves(sizes))


def kept_activations(made: Setup) -> tuple[int, int]:
    """Bytes that the forward pass of one micro-batch keeps for its backward pass, read from the trace.

    Those in the memory of each device, and those in its host's.

    Call it where the step may be traced for its target.
    """
    config = made.config
    rows, length = config.train.batch_size // config.train.grad_accum, config.data.seq_len
    tokens = jax.ShapeDtypeStruct((rows, length), jnp.int32)

    def residuals(params, inputs, targets):
        def loss(params):
            model = made.model(params)
            hidden = model.hidden(inputs, inputs if config.data.packing else None)
            return weighted_loss(model, hidden, targets, jnp.ones(targets.shape, jnp.float32))[0]

        return jax.tree.leaves(jax.vjp(loss, params)[1])

    leaves = jax.make_jaxpr(residuals)(made.abstract_state["params"], tokens, tokens).out_avals
    # Parameters and their casts are residuals too, but no activations: those have a number for every token.
    params = jax.tree.leaves(made.abstract_state["params"])
    shapes = {leaf.shape for leaf in params}
    one_layer: collections.Counter[Any] = collections.Counter()  # of unrolled layers, once for each
    for leaf in params:
        one_layer[(1, *leaf.shape[1:]), leaf.dtype] += leaf.shape[0]
    kept = []
    for leaf in leaves:
        if leaf.size < rows * length or leaf.shape in shapes:
            continue
        one_layer[leaf.shape, leaf.dtype] -= 1
        if one_layer[leaf.shape, leaf.dtype] < 0:
            kept.append(leaf)
    size = {space: 0 for space in jax.memory.Space}
    for leaf in kept:
        size[leaf.memory_space] += leaf.size * leaf.dtype.itemsize // made.token_shards
    return size[jax.memory.Space.Device], size[jax.memory.Space.Host]


def _tensor_share(made: Setup, tensor: int) -> Setup:
    """The setup of what one device of the axis `tensor` computes: its heads, and its part of MLP and vocabulary."""
    if tensor == 1:
        return made
    m, share = made.model_config, made.config.copy_and_resolve_references()
    with share.unlocked():
        share.mesh.tensor = 1
        for name in ("num_heads", "num_kv_heads", "mlp_dim", "vocab_size"):
            share.model[name] = getattr(m, name) // tensor
    return setup(share, share.model.vocab_size, list(made.mesh.devices.flat)[:: made.mesh.shape["tensor"]])


def _fixed(made: Setup, mesh: AbstractMesh | None = None) -> dict[str, int]:
    """Bytes of everything whose size is plain from its shape; the state is that of one device of a mesh."""
    state = made.abstract_state
    sharding = made.sharding if mesh is None else state_sharding(state, mesh, made.config)
    parameters = _on_one_device(state["params"], sharding["params"])
    rest = _on_one_device(*({name: tree[name] for name in tree if name != "params"} for tree in (state, sharding)))
    host = 0
    if made.config.train.offload_optimizer:
        pairs = zip(*(jax.tree.leaves(tree["opt_state"]) for tree in (state, sharding)), strict=True)
        host = _on_one_device(*zip(*(pair for pair in pairs if pair[0].ndim), strict=True))
    batch = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(made.abstract_batch())) // made.token_shards
    return {
        "parameters": parameters,
        "optimizer": rest - host,
        "batch": batch,
        "gradients": parameters * (2 if made.config.train.grad_accum > 1 else 1),
        "host": host,
    }


def estimate(made: Setup, gpu: str, mesh: AbstractMesh | None = None) -> Memory:
    """Memory without compiling for the target: activations are traced for it, temporaries guessed from the shapes.

    With a mesh, `made` is one device's share of the batch and the mesh splits the state; see `without_compiler`.

    The guess: one layer's activations twice over (what is recomputed, and its gradient), the chunk of logits and its
    gradient, and a copy of the largest parameter in the compute dtype and one in float32.
    """
    share = _tensor_share(made, (mesh or made.mesh).shape["tensor"])
    with _tracing(share, gpu):
        activations, on_host = kept_activations(share)
    m, config = share.model_config, made.config
    rows = config.train.batch_size // config.train.grad_accum // made.batch_shards
    length = config.data.seq_len // (made.token_shards // made.batch_shards)
    width = 3 * m.mlp_dim + 4 * m.dim + 3 * m.num_heads * m.value_head_dim * 2 + 2 * m.num_heads * m.head_dim
    layer = 2 * rows * length * width * m.dtype.itemsize
    largest = max(math.prod(leaf.shape) for leaf in jax.tree.leaves(share.abstract_state["params"]))
    logits = 2 * logit_bytes(rows, length, m.vocab_size)
    fixed = _fixed(made, mesh)
    # The optimizer's averages come from the host when activations are no longer needed.
    temporaries = max(layer + logits + largest * (m.dtype.itemsize + 4), fixed["host"] - activations)
    fixed["host"] += on_host
    return Memory(
        **fixed,
        activations=activations,
        temporaries=temporaries,
        limit=device_bytes(gpu),
        compiled=False,
    )


def _lower(made: Setup, gpu: str, step: Any, *args: Any) -> Any:
    with _tracing(made, gpu):
        traced = step.trace(*args)
        return traced.lower(lowering_platforms=("cuda",)) if gpu else traced.lower()


def _compile(made: Setup, gpu: str, step: Any, *args: Any) -> Any:
    return _lower(made, gpu, step, *args).compile()


def _timed_compile(lowered: Any) -> tuple[Any, float]:
    start = time.perf_counter()
    return lowered.compile(), time.perf_counter() - start


def _token_bytes(made: Setup) -> np.ndarray:
    return np.ones(made.model_config.vocab_size, np.int32)


def _lower_train_step(made: Setup, gpu: str) -> Any:
    return _lower(made, gpu, make_train_step(made, _token_bytes(made)), made.target(), made.abstract_batch())


def _train_memory(made: Setup, gpu: str, program: Any) -> Memory:
    """Of the compiled train step."""
    share = _tensor_share(made, made.mesh.shape["tensor"])
    with _tracing(share, gpu):
        activations, _ = kept_activations(share)
    planned, fixed = program.memory_analysis(), _fixed(made)
    total = planned.argument_size_in_bytes + planned.temp_size_in_bytes
    total += planned.output_size_in_bytes - planned.alias_size_in_bytes
    host = planned.host_argument_size_in_bytes + planned.host_temp_size_in_bytes
    host += planned.host_output_size_in_bytes - planned.host_alias_size_in_bytes
    if not host:  # programs for CPUs count all memory as the device's
        total -= fixed["host"]
    fixed["host"] = max(host, fixed["host"])
    # Buffers share memory when they are not alive together, so that parts can add up to more than the plan.
    rest = total - (sum(fixed.values()) - fixed["host"])
    if rest < 0:
        fixed["gradients"] = max(rest + fixed["gradients"], 0)
        rest = 0
    activations = min(activations, rest)
    return Memory(
        **fixed, activations=activations, temporaries=rest - activations, limit=device_bytes(gpu), compiled=True
    )


def _other_programs(made: Setup) -> dict[str, tuple[Any, tuple]]:
    """The jitted functions that a run calls beside the train step, each with its arguments after the parameters."""
    config = made.config
    batch = made.abstract_batch()
    found: dict[str, tuple[Any, tuple]] = {"evaluation": (make_eval_step(made, _token_bytes(made)), (batch,))}
    if health.wanted(made):
        found["health"] = health.make_health(made), (batch,)
    if config.train.sample_tokens:
        length = min(1 + config.train.sample_tokens, config.data.seq_len)
        row, prompt = jax.ShapeDtypeStruct((1, length), jnp.int32), jax.ShapeDtypeStruct((), jnp.int32)
        sampler = make_sampler(made, length, made.model_config.vocab_size)
        found["sampling"] = sampler, (row, prompt, jax.eval_shape(lambda: jax.random.key(0)))
    return found


def compile_run(made: Setup, gpu: str, doing: Callable[[str], None] = lambda part: None) -> Compiled:
    """Compiles the train step of a run for its devices, and the programs for evaluation, health and sampling.

    Args:
      made: from `for_target`.
      gpu: a name in `aot.GPUS`, or empty for this machine.
      doing: told the name of each part as it begins.
    """
    doing("tracing")
    lowered = {"train step": _lower_train_step(made, gpu)}
    for name, (function, arguments) in _other_programs(made).items():
        lowered[name] = _lower(made, gpu, function, made.target()["params"], *arguments)
    left = set(lowered)

    def done(name: str, _: Any = None) -> None:
        left.discard(name)
        if left:
            doing(f"compiling {', '.join(name for name in lowered if name in left)}")

    done("")
    # The compiler has long parts that use one core.
    with ThreadPoolExecutor(max_workers=2) as pool:
        running = {name: pool.submit(_timed_compile, program) for name, program in lowered.items()}
        for name, future in running.items():
            future.add_done_callback(functools.partial(done, name))
        compiled = {name: future.result() for name, future in running.items()}
    program = compiled["train step"][0]
    memory, text = _train_memory(made, gpu, program), program.as_text()
    others, host = {}, host_transfers(text)
    for name, (other, _) in compiled.items():
        if other is not program:
            planned = other.memory_analysis()
            used = planned.argument_size_in_bytes + planned.temp_size_in_bytes + planned.output_size_in_bytes
            others[name] = memory.optimizer + used
            host += host_transfers(other.as_text())
    return Compiled(
        memory=memory,
        others=others,
        seconds={name: seconds for name, (_, seconds) in compiled.items()},
        collectives=hlo.collectives(text),
        host=host,
        nondeterministic=hlo.nondeterministic(text) if gpu else [],
    )


def _with_rows(config: ConfigDict, rows: int, shards: int) -> ConfigDict:
    """The config with `rows` rows per device and micro-batch; accumulation stays if there is any."""
    changed = config.copy_and_resolve_references()
    with changed.unlocked():
        accumulate = min(config.train.grad_accum, 2)
        changed.train.grad_accum = accumulate
        changed.train.batch_size = rows * shards * accumulate
    return changed


@dataclasses.dataclass(frozen=True)
class MicroBatch:
    """The largest micro-batch that fits.

    Attributes:
      rows: per device.
      bytes: that it needs on a device.
      verified: it was compiled; otherwise it is a line through the sizes that were.
    """

    rows: int
    bytes: int
    verified: bool


def largest_micro_batch(
    config: ConfigDict, gpu: str, count: int, known: Memory, vocab: int, seconds: float, one: float = 0.0
) -> MicroBatch | None:
    """Searches the largest micro-batch that fits, by compiling few sizes.

    Memory grows by the same amount with every row, so a second size gives the line, and a third checks its end.

    Args:
      config: the training config; its own micro-batch is `known`.
      gpu: a name in `aot.GPUS`, or empty for this machine.
      count: devices.
      known: of the config as it is, compiled.
      vocab: tokenizer's size.
      seconds: that the search may take.
      one: seconds that a size is expected to take.

    Returns:
      A `MicroBatch`, or None if not even one row fits or time was up before a second size.
    """
    start = time.perf_counter()
    shards = count // (config.mesh.tensor * config.mesh.context)
    rows = config.train.batch_size // config.train.grad_accum // shards
    # Of one row of every micro-batch: the sizes that are compiled have fewer of them.
    row_batch = 16 * config.data.seq_len // config.mesh.context * config.train.grad_accum
    sizes = {rows: known.total}

    def measure(candidate: int) -> int:
        made = for_target(_with_rows(config, candidate, shards), gpu, count, vocab)
        memory = _train_memory(made, gpu, _lower_train_step(made, gpu).compile())
        sizes[candidate] = memory.total - memory.batch + row_batch * candidate
        return sizes[candidate]

    def line() -> int:
        (a, low), (b, high) = sorted(sizes.items())[0], sorted(sizes.items())[-1]
        slope = max((high - low) / (b - a), 1.0)
        return max(int(a + (known.limit - low) / slope), 0)

    def last(spent: float) -> bool:
        return time.perf_counter() - start + spent > seconds

    before = time.perf_counter()
    if last(one) or (rows == 1 and not known.fits):
        return None
    measure(rows * 2 if known.fits else max(rows // 2, 1))
    one = time.perf_counter() - before
    best = 0
    while not last(one):
        guess = min(line(), max(sizes) - 1) if max(sizes.values()) > known.limit else line()
        guess -= guess % 8 if guess >= 32 else 0
        if guess < 1 or guess in sizes or guess <= best:
            break
        if measure(guess) <= known.limit:
            best = guess
            if sizes[guess] > 0.95 * known.limit:
                break
    if not best:
        guess = line()
        return MicroBatch(guess, known.limit, False) if guess else None
    return MicroBatch(best, sizes[best], True)
