"""Health of NSA, layer by layer: whether gates and selection do their work. Computed on log steps only.

Dense and window layers of a pattern have no such figures: health.jsonl has null in their places.

A separate compiled function runs the current parameters over one row of the current batch with the ops that the train
step uses, and looks at what lies between: gates, the three branches' outputs, and the block lists. Per layer:

  gate_entropy        of a token's three gates as shares, nats; three equal gates have ln 3 = 1.10
                      (with the selector "mean_key" there are two, which have ln 2 = 0.69)
  gate_share_*        mean share of each branch's gate; gate_share_max is the largest
  gate_collapsed      share of (token, head) where one branch has more than 95 % of the gates
  output_share_*      share of each branch in the size of what is added up
  blocks_distinct     distinct blocks per query
  blocks_beyond       share of the listed blocks that were chosen by score, beyond the forced ones
  block_distance      mean distance of a listed block from the query's own, tokens
  block_overlap       share of a query's blocks that its neighbour before also reads
  selection_held      share of dense attention by the selected branch's queries and keys that lies in listed blocks
  selection_random    the same of lists that are random but for the forced blocks, and
  selection_best      of the best lists of as many blocks; all three of a few queries that have a choice, 0 without any
  keys_counted        keys per query that the lists in use hold
  keys_predicted      the same by the formula; key_mismatches counts queries where they differ, and must be 0
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from nsa_jax.config import NSAConfig
from nsa_jax.data import Tokenizer
from nsa_jax.nn.observe import BRANCHES, NSAArrays, walk_layers
from nsa_jax.ops import block_mass, blocks
from nsa_jax.train.env import json_line
from nsa_jax.train.errors import TrainingError
from nsa_jax.train.program_store import Program
from nsa_jax.train.state import Setup, batch_sharding, replicated
from nsa_jax.train.watch.guards import Guards

_COLLAPSED = 0.95
_EPSILON = 1e-9
_QUERIES = 4  # whose block lists are kept at each validation
_MEASURED, _AT_ONCE = 16, 4  # queries whose lists are compared with dense attention, and those in memory at once
_LEAST_GAIN = 0.02  # by which the best lists must hold more than random ones for the difference to be judged


def _gate_health(gates: jax.Array, outputs: Sequence[jax.Array]) -> dict[str, jax.Array]:
    """Figures of gates [B, T, N, 3] float32 and branch outputs [B, T, N, V]."""
    share = gates / (gates.sum(-1, keepdims=True) + _EPSILON)
    means = share.mean((0, 1, 2))
    sizes = [
        jnp.linalg.norm(gates[..., i, None] * out.astype(jnp.float32), axis=-1).mean() for i, out in enumerate(outputs)
    ]
    total = sum(sizes) + _EPSILON
    return {
        "gate_entropy": -(share * jnp.log(share + _EPSILON)).sum(-1).mean(),
        "gate_share_max": means.max(),
        "gate_collapsed": (share.max(-1) > _COLLAPSED).mean(),
        **{f"gate_share_{name}": means[i] for i, name in enumerate(BRANCHES)},
        **{f"output_share_{name}": sizes[i] / total for i, name in enumerate(BRANCHES)},
    }


def selection_health(block_indices: jax.Array, start: jax.Array, config: NSAConfig) -> dict[str, jax.Array]:
    """Figures of block lists int32 [B, T, K, n] with segment starts int32 [B, T]."""
    length = block_indices.shape[1]
    t = jnp.arange(length, dtype=jnp.int32)[None, :, None]  # [1, T, 1]
    start = jnp.broadcast_to(start[..., None], block_indices.shape[:3])
    t = jnp.broadcast_to(t, start.shape)
    own = t[..., None] // config.select_block
    num_blocks = blocks.num_selection_blocks(length, config.select_block)
    listed = block_indices < num_blocks
    repeated = jnp.pad(block_indices[..., 1:] == block_indices[..., :-1], [(0, 0)] * 3 + [(1, 0)])
    first, last = blocks.candidate_range(t[..., None], start[..., None], config.select_block)
    forced = blocks.forced_blocks(block_indices, first, last, config)
    count = jnp.maximum(listed.sum(), 1)
    # In float32: of a row of 32,768 tokens, the sum of distances in tokens does not fit int32.
    back = jnp.where(listed, own - block_indices, 0).sum(dtype=jnp.float32) / count
    same = blocks.also_listed(block_indices[:, 1:], block_indices[:, :-1], num_blocks)
    counted = blocks.counted_keys(block_indices, t, start, config.select_block)
    predicted = blocks.selected_key_count(t, start, config)
    return {
        "blocks_distinct": (listed & ~repeated).sum(-1).mean(),
        "blocks_beyond": (listed & ~forced).sum() / count,
        "block_distance": back * config.select_block,
        "block_overlap": same.sum() / jnp.maximum(listed[:, 1:].sum(), 1),
        "keys_counted": counted.mean(),
        "keys_predicted": predicted.mean(),
        "key_mismatches": (counted != predicted).sum(),
    }


def choosing_queries(start: jax.Array, config: NSAConfig) -> tuple[jax.Array, jax.Array]:
    """Queries at equal distances among those of a row that have more blocks than they read.

    Args:
      start: int32 [T], segment starts.
      config: the operator's.

    Returns:
      int32 [16] positions, and whether there are any.
    """
    t = jnp.arange(start.shape[0], dtype=jnp.int32)
    seen = jnp.cumsum(blocks.has_choice(t, start, config).astype(jnp.int32))
    nth = (jnp.arange(_MEASURED, dtype=jnp.int32) * 2 + 1) * seen[-1] // (2 * _MEASURED)
    return jnp.minimum(jnp.searchsorted(seen, nth, side="right"), t[-1]).astype(jnp.int32), seen[-1] > 0


def selection_shares(arrays: NSAArrays, start: jax.Array, config: NSAConfig) -> dict[str, jax.Array]:
    """What lists hold of dense attention, beside random and the best lists: means over queries of the first row."""
    t, any_choice = choosing_queries(start[0], config)
    positions, starts = t[None], start[:1, t]
    mass = block_mass.block_mass(arrays.query[:1, t], arrays.key_slc[:1], config, starts, positions, at_once=_AT_ONCE)
    best = block_mass.oracle_lists(mass, config, positions, starts)
    found = {
        "selection_held": block_mass.held_mass(mass, arrays.lists[:1, t]),
        "selection_random": block_mass.random_mass(mass, config, positions, starts),
        "selection_best": block_mass.held_mass(mass, best),
    }
    return {name: jnp.where(any_choice, value.mean(), 0.0) for name, value in found.items()}


def sampled_queries(segment_start: jax.Array) -> jax.Array:
    """Positions of a few queries, spread evenly over the longest document of a row: int32 [queries] for int32 [T]."""
    length = jnp.arange(segment_start.shape[0], dtype=jnp.int32) - segment_start + 1
    last = jnp.argmax(length).astype(jnp.int32)
    count = jnp.arange(1, _QUERIES + 1, dtype=jnp.int32)
    return segment_start[last] + jnp.maximum(count * length[last] // _QUERIES, 1) - 1


def forward_with_health(
    model: Any, tokens: jax.Array, segment_start: jax.Array | None, queries: jax.Array | None = None
):
    """The model's forward pass with the figures of every layer.

    Args:
      model: a Transformer with NSA layers.
      tokens: int32 [B, T].
      segment_start: int32 [B, T] or None.
      queries: int32 [P], positions in the first row.

    Returns:
      What `model.hidden` returns, and {name: float32 [NSA layers]}. With `queries`, "lists" are their block lists:
      int32 [NSA layers, P, K, n].
    """
    start = jnp.zeros_like(tokens) if segment_start is None else jnp.asarray(segment_start)
    geometry = model.config.nsa

    def look(arrays: NSAArrays) -> dict[str, jax.Array]:
        found = {**_gate_health(arrays.gates, arrays.outputs), **selection_health(arrays.lists, start, geometry)}
        found |= selection_shares(arrays, start, geometry)
        values = {name: value.astype(jnp.float32) for name, value in found.items()}
        return values if queries is None else {**values, "lists": arrays.lists[0, queries]}

    return walk_layers(model, tokens, segment_start, look)


def make_health(setup: Setup) -> Callable:
    """The jitted function (params, batch) -> figures and `sampled_lists`, over the first row of the batch."""
    packed = setup.config.data.packing

    def health(params, batch):
        tokens, start = batch["inputs"][:1], batch["segment_start"][:1]
        positions = sampled_queries(start[0])
        found = forward_with_health(setup.model(params), tokens, start if packed else None, positions)[1]
        lists = found.pop("lists")
        return found, {"lists": lists, "queries": positions, "start": start[0, positions[0]], "tokens": tokens[0]}

    return jax.jit(
        health,
        in_shardings=(setup.sharding["params"], batch_sharding(setup.mesh)),
        out_shardings=replicated(setup.mesh),
        compiler_options=setup.compiler_options(),
    )


def wanted(setup: Setup) -> bool:
    """Whether the config asks for health figures and the model has any."""
    return bool(setup.config.guards.health) and "nsa" in setup.model_config.kinds


class Health:
    """Health figures of a run: started on the device at log steps, read with the metrics, kept in health.jsonl.

    Args:
      setup: of the run.
      workdir: of the run.

    Attributes:
      program: what `make_health` returns.
      seconds: that one call takes, measured at the first step.
    """

    def __init__(self, setup: Setup, workdir: Path):
        self._config = setup.config
        self._layers, self._num_layers = setup.model_config.layers_of("nsa"), setup.model_config.num_layers
        self.program = Program(make_health(setup))
        self._path = workdir / "health.jsonl"
        self.seconds = 0.0

    def warm_up(self, params: Any, batch: dict[str, jax.Array]) -> None:
        """Compiles, and measures what a call costs."""
        jax.block_until_ready(self.program(params, batch))
        start = time.perf_counter()
        jax.block_until_ready(self.program(params, batch))
        self.seconds = time.perf_counter() - start

    def start(self, params: Any, batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """Figures of all layers, still being computed."""
        return self.program(params, batch)[0]

    def sampled_lists(self, params: Any, batch: dict[str, jax.Array], tokenizer: Tokenizer) -> dict[str, Any]:
        """What a few queries of the batch's first row select, as JSON values.

        Returns:
          queries: positions in the row; start: of their document; text: up to 60 characters that end with each query's
          token; layers: indices of the L NSA layers; lists: [L][P][K][n], as the operator returns them.
        """
        found = {name: np.asarray(value) for name, value in jax.device_get(self.program(params, batch)[1]).items()}
        start, queries = int(found["start"]), found["queries"].tolist()
        return {
            "queries": queries,
            "start": start,
            "text": [tokenizer.decode(found["tokens"][max(start, q - 59) : q + 1])[-60:] for q in queries],
            "layers": list(self._layers),
            "lists": found["lists"].tolist(),
        }

    def read(self, step: int, figures: dict[str, jax.Array], guards: Guards) -> dict[str, float]:
        """Writes, checks and summarises the figures of a step; what is raised is `check`'s."""
        values = {name: np.asarray(value) for name, value in jax.device_get(figures).items()}
        if jax.process_index() == 0:
            rounded: dict[str, list[float | None]] = {name: [None] * self._num_layers for name in values}
            for name, value in values.items():
                for layer, v in zip(self._layers, value, strict=True):
                    rounded[name][layer] = round(float(v), 5)
            with self._path.open("a") as file:
                file.write(json_line({"step": step, **rounded}))
        check(values, step, self._config, guards, self._layers)
        return {**summarise(values), "perf/health_seconds": self.seconds}


def selection_gain(held: float, random: float, best: float) -> float | None:
    """Which share of the way from random lists to the best ones lists come; None if the two hardly differ."""
    return (held - random) / (best - random) if best - random > _LEAST_GAIN else None


def _selection(figures: dict[str, np.ndarray]) -> list[float]:
    """Held, random and best, over all layers."""
    return [float(figures[f"selection_{name}"].mean()) for name in ("held", "random", "best")]


def summarise(figures: dict[str, np.ndarray]) -> dict[str, float]:
    """Figures of all layers as a few metrics: the layer that is worst off, and means."""
    gain = selection_gain(*_selection(figures))
    return {
        **({} if gain is None else {"health/selection_gain": gain}),
        "health/gate_entropy_min": float(figures["gate_entropy"].min()),
        "health/gate_share_max": float(figures["gate_share_max"].max()),
        "health/gate_collapsed_max": float(figures["gate_collapsed"].max()),
        **{f"health/gate_share_{name}": float(figures[f"gate_share_{name}"].mean()) for name in BRANCHES},
        **{f"health/output_share_{name}": float(figures[f"output_share_{name}"].mean()) for name in BRANCHES},
        "health/blocks_distinct": float(figures["blocks_distinct"].mean()),
        "health/blocks_beyond_forced": float(figures["blocks_beyond"].mean()),
        "health/block_distance_tokens": float(figures["block_distance"].mean()),
        "health/block_overlap": float(figures["block_overlap"].mean()),
        "health/keys_counted": float(figures["keys_counted"].mean()),
        "health/keys_predicted": float(figures["keys_predicted"].mean()),
    }


def check(
    figures: dict[str, np.ndarray], step: int, config: Any, guards: Guards, layers: Sequence[int] | None = None
) -> None:
    """Raises alarms for gates beyond the thresholds in `config.guards`, and for selection that hardly chooses.

    Args:
      figures: {name: [NSA layers]}.
      step: they are of.
      config: the training config.
      guards: where alarms are raised.
      layers: indices of the NSA layers in the model; None means that all layers are.

    Raises:
      TrainingError: the lists in use do not hold the keys that the formula predicts.
    """

    def at(layer: int) -> str:
        return f"layer {layer if layers is None else layers[layer]}"

    wrong = figures["key_mismatches"]
    if wrong.any():
        layer = int(np.argmax(wrong > 0))
        raise TrainingError(
            f"step {step}, guard key_count: in {at(layer)}, {int(wrong[layer])} queries read another number of keys "
            f"than the formula predicts (mean {figures['keys_counted'][layer]:.2f} counted, "
            f"{figures['keys_predicted'][layer]:.2f} predicted): block lists are wrong",
            guard="key_count",
            step=step,
            save=True,
        )
    g = config.guards
    fix = "NSA degenerates to one branch; look at health.jsonl, lower the learning rate, or warm up for longer"
    entropy, share, collapsed = figures["gate_entropy"], figures["gate_share_max"], figures["gate_collapsed"]
    if entropy.min() < g.min_gate_entropy:
        layer = int(np.argmin(entropy))
        most = math.log(2 if config.model.nsa.selector == "mean_key" else len(BRANCHES))  # of equal gates
        message = f"{at(layer)}: gate entropy {entropy[layer]:.2f} nats (limit {g.min_gate_entropy}, most {most:.2f})"
        guards.alarm("gate_entropy", step, f"{message}: {fix}")
    if share.max() > g.max_gate_share:
        layer = int(np.argmax(share))
        name = BRANCHES[int(np.argmax([figures[f"gate_share_{b}"][layer] for b in BRANCHES]))]
        message = f"{at(layer)}: the {name} branch has {share[layer]:.0%} of the gates (limit {g.max_gate_share:.0%})"
        guards.alarm("gate_share", step, f"{message}: {fix}")
    if collapsed.max() > g.max_collapsed:
        layer = int(np.argmax(collapsed))
        message = f"{at(layer)}: {collapsed[layer]:.0%} of tokens use a single branch (limit {g.max_collapsed:.0%})"
        guards.alarm("gate_collapse", step, f"{message}: {fix}")
    check_selection(_selection(figures), step, config, guards)


def check_selection(shares: list[float], step: int, config: Any, guards: Guards) -> None:
    """Raises the alarm "selection" where lists have been hardly better than random ones over the last reports.

    Args:
      shares: held, random and best of this report; zeros if no query had a choice.
      step: they are of.
      config: the training config.
      guards: where the alarm is raised; it keeps the last reports.
    """
    g = config.guards
    if shares[2] > 0:
        guards.selection.append(shares)
    full = len(guards.selection) == guards.selection.maxlen
    if not full or not g.min_selection_gain or step < g.selection_from * config.train.steps:
        return
    gain = selection_gain(*np.mean(guards.selection, axis=0).tolist())
    if gain is None or gain >= g.min_selection_gain:
        return
    fix = "lower the learning rate, or warm up for longer"
    # With mean keys, blocks are ranked by the keys that are read already.
    if not config.model.nsa.shared_kv and config.model.nsa.selector == "compressed":
        fix = 'share keys between the branches in a new run (model.nsa.shared_kv=True, model.compressor="mean")'
    guards.alarm(
        "selection",
        step,
        f"lists come {gain:.0%} of the way from random blocks to the best (limit {g.min_selection_gain:.0%}): "
        f"selection hardly chooses; look at selection_held in health.jsonl; {fix}",
    )
