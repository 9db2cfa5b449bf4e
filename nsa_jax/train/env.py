"""env.json: everything needed to say later what a run was."""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from nsa_jax.data import Pipeline
from nsa_jax.ops.choices import Shape
from nsa_jax.ops.explain import Explanation, explanation_of
from nsa_jax.ops.implementations import implementations_served
from nsa_jax.ops.target import Target, current_target
from nsa_jax.train import processes
from nsa_jax.train.flops import forward_flops_per_token, peak_flops, train_flops_per_token
from nsa_jax.train.state import Setup

_PACKAGES = ("nsa_jax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy", "ml_collections")


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {"python": platform.python_version(), **found}


def _git() -> dict[str, Any] | None:
    """Commit of the source tree and whether it has changes; None outside a repository."""

    def run(*command: str) -> str:
        root = Path(__file__).parent
        return subprocess.run(
            ("git", *command), cwd=root, capture_output=True, text=True, check=True, timeout=10
        ).stdout

    try:
        return {"commit": run("rev-parse", "HEAD").strip(), "changed": bool(run("status", "--porcelain").strip())}
    except (OSError, subprocess.SubprocessError):
        return None


def plain_config(config: ConfigDict) -> dict[str, Any]:
    """The config as JSON values."""
    return json.loads(config.to_json())


# Fields of config.data that change how data are read, but not which.
LOADER_FIELDS = ("data.num_workers", "data.tokenizer_workers", "data.prefetch", "data.cache_dir")


def changed_fields(old: dict[str, Any], new: dict[str, Any], prefix: str = "", but: Sequence[str] = ()) -> list[str]:
    """One line, such as "train.batch_size: 4 there, 8 now", for every field that both have and that differs.

    Of `data.sources`, whose names are free, also one for each source that only one of them has.

    Args:
      old: as `plain_config` returns it, or a section of that.
      new: likewise.
      prefix: of the names.
      but: fields and sections that are passed over, by their names with the prefix.
    """
    found, sources = [], prefix.endswith("data.sources.")
    for key in sorted({*old} & {*new}):
        name, before, after = f"{prefix}{key}", old[key], new[key]
        if name in but:
            continue
        if isinstance(before, dict) and isinstance(after, dict):
            if sources:  # a weight of 1 may be left out
                before, after = {"weight": 1.0, **before}, {"weight": 1.0, **after}
            found += changed_fields(before, after, f"{name}.", but)
        elif before != after:
            found.append(f"{name}: {before!r} there, {after!r} now")
    if sources:
        found += [f"{prefix}{key}: only {'there' if key in old else 'now'}" for key in sorted({*old} ^ {*new})]
    return found


def corpus_sizes(pipeline: Pipeline) -> dict[str, int]:
    """Training documents and tokens of each source, by a name for messages; of cached sources alone."""
    found: dict[str, int] = {}
    for name, part in pipeline.parts.items():
        if stats := part.pipeline.stats["train"]:
            of = f" of {name}" if name else ""
            found |= {f"training documents{of}": stats.documents, f"training tokens{of}": stats.tokens}
    return found


def data_facts(pipeline: Pipeline) -> dict[str, Any]:
    """What env.json holds of the data: sizes of the splits of each source, and the tokenizer.

    Of cached text, `empty_documents` says how many documents without text were left out.
    """
    splits: dict[str, Any] = {}
    for name, part in pipeline.parts.items():
        splits[name] = {split: vars(stats) if stats else None for split, stats in part.pipeline.stats.items()}
        if (corpus := part.pipeline.corpus) is not None:
            splits[name]["empty_documents"] = corpus.empty_documents
    tokenizer = pipeline.tokenizer
    return {
        "splits": splits.get("", splits),
        "tokenizer": tokenizer.fingerprint,
        "vocab_size": tokenizer.vocab_size,
    }


def parameter_counts(setup: Setup) -> dict[str, int]:
    """Measured numbers of parameters: in all, of the embedding and head, and of the rest."""
    params = setup.abstract_state["params"]
    outside = sum(math.prod(params[name].shape) for name in ("embedding", "head") if name in params)
    total = setup.num_parameters()
    return {"total": total, "embedding_and_head": outside, "without_embedding_and_head": total - outside}


def kernels(setup: Setup, target: Target) -> dict[str, str]:
    """The kernel of each stage and pass on one device of `target`; empty where no NSA kernels serve."""
    explained = explain_step(setup, target)
    return {} if explained is None else {f"{row.stage}, {row.direction}": row.choice.kernel for row in explained.rows}


def explain_step(setup: Setup, target: Target) -> Explanation | None:
    """Which kernels serve one device's share of a micro-batch on `target`.

    None if NSA's kernels are not wanted, or where a context axis cuts rows into slices of their own shapes.
    """
    config, m = setup.config, setup.model_config
    if "nsa" not in m.kinds or m.implementation in ("xla", "reference") or not target.is_gpu:
        return None
    if setup.token_shards != setup.batch_shards:
        return None
    rows = max(config.train.batch_size // config.train.grad_accum // setup.batch_shards, 1)
    length, tensor = config.data.seq_len, setup.mesh.shape.get("tensor", 1)
    heads = tensor if m.num_kv_heads % tensor == 0 else 1
    dims = m.num_heads // heads, m.num_kv_heads // heads, m.head_dim, m.value_head_dim, jnp.dtype(m.dtype).name
    shape = Shape(rows, length, length, *dims)
    packed = config.data.packing
    return explanation_of(shape, m.nsa, target, packed=packed, shared_kv=m.shared_kv, selector=m.selector)


def environment(
    setup: Setup,
    *,
    start_step: int,
    resumed_from: str | None,
    data: dict[str, Any],
    segment_start: np.ndarray | None = None,
) -> dict[str, Any]:
    """What env.json holds; called when the step has been traced, so that the served implementations are known.

    Args:
      setup: of the run.
      start_step: that this start begins after.
      resumed_from: the checkpoint, if there is one.
      data: what the run reads.
      segment_start: of sampled packed rows, for the operations per token; see `flops.keys_per_query`.
    """
    device = setup.mesh.devices.flat[0]
    seq_len = setup.config.data.seq_len
    return {
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "versions": _versions(),
        "platform": platform.platform(),
        "cpu_count": os.cpu_count(),
        "git": _git(),
        "devices": {"kind": device.device_kind, "platform": device.platform, "count": setup.mesh.size},
        "processes": jax.process_count(),
        "hosts": processes.hosts(),
        "mesh": dict(setup.mesh.shape),
        "peak_flops_per_device": peak_flops(device.device_kind),
        "parameters": parameter_counts(setup),
        "flops_per_token": {
            "train": train_flops_per_token(setup.model_config, seq_len, segment_start),
            "forward": forward_flops_per_token(setup.model_config, seq_len, segment_start),
        },
        "implementations": implementations_served(),
        "kernels": kernels(setup, current_target()),
        "deterministic": setup.config.train.deterministic,
        "start_step": start_step,
        "resumed_from": resumed_from,
        "data": data,
        "config": plain_config(setup.config),
    }


def _strict(value: Any) -> Any:
    """The same with None for numbers that are not finite, which JSON does not have."""
    if isinstance(value, dict):
        return {name: _strict(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_strict(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def json_line(row: dict[str, Any]) -> str:
    """A row of a JSON Lines file; null stands for numbers that are not finite."""
    return json.dumps(_strict(row)) + "\n"


def write_json(path: Path, value: Any) -> None:
    """Writes a file that is never seen half-written; null stands for numbers that are not finite."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(_strict(value), indent=2) + "\n")
    temporary.replace(path)
