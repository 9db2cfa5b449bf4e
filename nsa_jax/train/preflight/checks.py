"""Checks of a run against the workdir, the disk, the kernels and the memory of its devices."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from ml_collections import ConfigDict

from nsa_jax import aot
from nsa_jax.command_line import LARGEST, workdir_problems
from nsa_jax.config import Problem
from nsa_jax.hub.remote_run import ADDRESS
from nsa_jax.nn.dense import cudnn_serves
from nsa_jax.ops import plan
from nsa_jax.ops.target import Target, current_target
from nsa_jax.rules import float8_problems, piece_rows, save_interval
from nsa_jax.train import disk
from nsa_jax.train.env import LOADER_FIELDS, changed_fields
from nsa_jax.train.errors import newest_checkpoint
from nsa_jax.train.goodput import last_saved
from nsa_jax.train.metrics import last_rows
from nsa_jax.train.preflight import cost as cost_lib
from nsa_jax.train.preflight.report import Report, gib
from nsa_jax.train.state import Setup

# Fields that may change between two starts of one run without making it another experiment.
_MAY_CHANGE = ("name", "compilation_cache_dir", "preflight", "guards", "train", "mesh", *LOADER_FIELDS)
_MAY_CHANGE_ON_PURPOSE = ("optim.", "model.implementation", "model.remat", "model.scan_layers", "model.matmul_dtype")
# Where files lie. If there is a checkpoint, what they hold is compared with what its data position belongs to.
_PLACE = re.compile(r"data\.(sources\.[^.]+\.)?(files|val_files|hf_path|hf_data_files|tokenizer_path): ")


def check_workdir(config: ConfigDict, workdir: Path) -> list[Problem]:
    """R023: the workdir can be written, and what it holds is this run."""
    if problems := workdir_problems(workdir):
        return problems
    workdir = workdir.absolute()
    if problems := _check_lost_checkpoints(config, workdir):
        return problems
    new = json.loads(config.to_json())
    try:
        old = json.loads((workdir / "env.json").read_text())["config"]
        changed = changed_fields(old, new, but=_MAY_CHANGE)
        saved = newest_checkpoint(workdir) is not None
        if saved and piece_rows(old["train"]) != piece_rows(new["train"]):
            changed += changed_fields(_batch_fields(old["train"]), _batch_fields(new["train"]), "train.")
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError) as error:
        message = f"workdir {workdir}: its env.json cannot be read ({type(error).__name__})"
        return [Problem("R023", "warning", message, "another --workdir, if this is not the run to continue")]
    if not changed:
        return []
    on_purpose = all(line.startswith(_MAY_CHANGE_ON_PURPOSE) or (saved and _PLACE.match(line)) for line in changed)
    message = f"workdir {workdir} holds a run with another config: {'; '.join(changed[:8])}"
    fix = "choose another --workdir, or restore the config in its env.json"
    return [Problem("R023", "warning" if on_purpose else "error", message, fix)]


def _batch_fields(train: dict[str, Any]) -> dict[str, Any]:
    """What decides the pieces in which data are read: the position in a checkpoint counts these."""
    return {name: train[name] for name in ("batch_size", "batch_ramp") if name in train}


def _check_lost_checkpoints(config: ConfigDict, workdir: Path) -> list[Problem]:
    """R023: where a run has saved, there are checkpoints; a start without them would replace its metrics.

    A copy of a workdir in an object store may lack what was not uploaded in time: the store decides there.
    """
    if not config.train.save_every or any((workdir / "checkpoints").glob("[0-9]*")) or (workdir / ADDRESS).exists():
        return []
    saved = last_saved(workdir)
    if saved is None or not last_rows(workdir, LARGEST)[0]:
        return []
    message = f"workdir {workdir}: its metrics tell of a checkpoint of step {saved:,}, and checkpoints/ has none"
    fix = "restore checkpoints/, delete metrics.jsonl to start anew at step 0, or use another --workdir"
    return [Problem("R023", "error", message, fix)]


def check_disk(config: ConfigDict, workdir: Path, one_checkpoint: int) -> list[Problem]:
    """R024: room for the checkpoints that are kept, and one that is being written."""
    if not config.train.save_every:
        return []
    t = config.train
    best = bool(t.keep_best and t.eval_batches)
    evaluations = t.steps // t.eval_every if best and t.eval_every else 0
    kept = min(t.keep_last, t.steps // t.save_every + evaluations + 1) + best + 1
    if t.keep_every:
        kept += t.steps // t.keep_every
    parent = disk.fullest(workdir / "checkpoints")  # which may be a link to another disk
    free = shutil.disk_usage(parent).free
    steps = [path for path in (workdir / "checkpoints").glob("*") if path.name.isdecimal()]  # damaged ones stay besides
    present = sum(f.stat().st_size for step in steps for f in step.rglob("*") if f.is_file())
    need = kept * one_checkpoint - present
    if free >= need:
        return []
    message = (
        f"workdir {workdir}: {gib(free)} free, but {kept} checkpoints of {gib(one_checkpoint)} each need {gib(need)}"
    )
    return [Problem("R024", "error", message, "free some space, or lower config.train.keep_last (or raise keep_every)")]


def check_float8(config: ConfigDict, made: Setup, gpu: str) -> list[Problem]:
    """R061: the devices have float8 tensor cores if the config asks for float8."""
    if gpu:
        return float8_problems(config, aot.GPUS[gpu].target, gpu)
    device = made.mesh.devices.flat[0]
    target = current_target() if device.platform == "gpu" else Target(device.platform)
    return float8_problems(config, target, device.device_kind)


def takes_cudnn(config: ConfigDict, made: Setup) -> bool:
    """Whether the model's dense layers, if it has any, take cuDNN's kernels on a GPU."""
    m = made.model_config
    asked = {"packed": config.data.packing, "deterministic": m.deterministic}
    whole = config.mesh.context == 1
    return "dense" in m.kinds and whole and cudnn_serves(m.dtype, m.head_dim, m.value_head_dim, **asked)


def check_kernels(config: ConfigDict, made: Setup, gpu: str) -> list[Problem]:
    """R018: the GPU kernels serve this model's head dims and groups."""
    m, implementation = made.model_config, config.model.implementation
    if m.kinds == ("dense",):  # the window kernels serve whatever the implementation, unless cuDNN does
        implementation = "auto"
        if takes_cudnn(config, made):
            return []
    if implementation in ("xla", "reference") or (not gpu and made.mesh.devices.flat[0].platform != "gpu"):
        return []
    target = aot.GPUS[gpu].target if gpu else current_target()
    length, dims = config.data.seq_len, (m.num_heads, m.num_kv_heads, m.head_dim, m.value_head_dim)
    shape = plan.Shape(1, length, length, *dims, jnp.dtype(m.dtype).name)
    op = "select_blocks" if "nsa" in m.kinds else "window_attention"
    found = plan.unsupported(op, shape, target, select_block=m.nsa.select_block)
    if found is None:
        return []
    severity = "error" if implementation == "pallas" else "warning"
    message = f"config.model.implementation={implementation!r}: {found}"
    if severity == "warning":
        message += "; the xla implementation would serve instead, many times slower"
    return [Problem("R018", severity, message, "use head dims and groups that the kernels support, such as 64 or 128")]


def check_memory(report: Report, gpu: str, devices: int) -> list[Problem]:
    """R025: the steps fit into the devices' memory."""
    memory = report.memory
    assert memory is not None
    need = max(memory.total, *(report.compiled.others.values() if report.compiled else ()), 0)
    if need <= memory.limit:
        return []
    where = f"{devices} x {gpu}" if gpu else "this machine"
    message = f"{gib(need)} per device are needed and {gib(memory.limit)} can be used on {where}"
    fix = "smaller micro-batches (config.train.grad_accum), config.model.remat='block' or 'full', config.mesh.fsdp"
    fix += ", config.train.offload_optimizer, or config.mesh.context if one row does not fit"
    if report.micro_batch:
        fix += f"; {report.micro_batch.rows} rows per device fit"
    return [Problem("R025", "error" if memory.compiled else "warning", message, fix)]


def check_save_interval(config: ConfigDict, cost: cost_lib.Cost) -> list[Problem]:
    """R029: a crash costs at most an hour of work."""
    if not config.train.save_every or cost.step_seconds is None:
        return []
    hours = min(save_interval(config.train), config.train.steps) * cost.step_seconds / 3600
    if hours <= 1.0:
        return []
    message = f"config.train.save_every={config.train.save_every}: about {hours:.1f} hours of work between checkpoints"
    fix = f"save at least every {max(int(3600 / cost.step_seconds), 1):,} steps"
    return [Problem("R029", "error", message, fix)]
