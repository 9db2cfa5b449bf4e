"""What is refused in a config, and how it is fixed: the rules that need neither device, disk, data nor network.

The others are those of preflight.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from nsa_jax.batch_ramp import BatchRamp
from nsa_jax.bounds import CHOICES, check_values, value_of
from nsa_jax.fields import Findings, Problem, nearest, remote, source_configs
from nsa_jax.object_store import SCHEMES, scheme_of
from nsa_jax.ops.blocks import NSAConfig
from nsa_jax.ops.rope import KINDS, RopeScaling
from nsa_jax.ops.target import Target

GENERATED = ("task", "synthetic")  # sources whose rows are made, not read


def attention_kinds(model: Mapping[str, Any]) -> tuple[str, ...]:
    """The kinds of attention over which the layers of `config.model` repeat; one kind without a layer_pattern."""
    return tuple(model["layer_pattern"]) or (model["attention"],)


def shortest_pattern(pattern: tuple[str, ...]) -> tuple[str, ...]:
    """The shortest pattern that gives the same layers when it is repeated."""
    lengths = (n for n in range(1, len(pattern) + 1) if len(pattern) % n == 0)
    return next(pattern[:n] for n in lengths if pattern[:n] * (len(pattern) // n) == pattern)


def pattern_problem(model: Mapping[str, Any]) -> tuple[str, str]:
    """What is wrong with the layer_pattern of `config.model`, and the fix; empty texts if nothing is."""
    pattern, allowed = model["layer_pattern"], CHOICES["model.attention"]
    if not isinstance(pattern, (tuple, list)):
        return "must be a tuple of kinds of attention", "use () for one kind in all layers"
    if unknown := [kind for kind in pattern if kind not in allowed]:
        return f"{unknown[0]!r} is no kind of attention", f"""use {", ".join(allowed)}, such as ("nsa", "dense")"""
    if pattern and model["num_layers"] % len(pattern):
        fix = f"use a multiple of {len(pattern)} layers, or a pattern whose length divides their number"
        return f"{len(pattern)} kinds cannot be repeated over num_layers={model['num_layers']}", fix
    if pattern and model["attention"] not in ("nsa", *pattern):
        return f"has no {model['attention']!r}, which attention asks for", "leave attention at its default, 'nsa'"
    return "", ""


# Experiment trackers; train/trackers.py has a class for each.
TRACKERS = ("wandb", "mlflow")

# Fields that name files: none can hold a null character. Buckets are for workdirs and data.files alone.
_PATHS = "name compilation_cache_dir train.local_dir data.cache_dir data.tokenizer_path data.hf_path data.hf_name"

# Errors that cannot be accepted by config.preflight.ignore: no run could follow.
FATAL = frozenset(f"R{i:03}" for i in (0, 1, 2, 3, 4, 5, 7, 8, 10, 20, 21, 22, 55, 56, 57, 58, 59, 62))

_LONG_RUN = 5_000  # steps; beyond, a mistake costs days
_TOY_PARAMETERS = 5_000_000  # outside the embedding; fewer are for trying things out


def geometry(section: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `NSAConfig` in `config.model.nsa`, which also says how the layer is built.

    With the selector "mean_key" nothing but mean keys is compressed: the blocks are those of selection.
    """
    fields = {field.name: section[field.name] for field in dataclasses.fields(NSAConfig)}
    if section["selector"] == "mean_key":
        fields |= dict.fromkeys(("compress_block", "compress_stride"), fields["select_block"])
    return fields


def _check_model(config: ConfigDict, found: Findings) -> NSAConfig | None:
    m, seq_len = config.model, config.data.seq_len
    if m.num_kv_heads >= 1 and m.num_heads % m.num_kv_heads:
        message = f"config.model.num_kv_heads={m.num_kv_heads}: does not divide num_heads={m.num_heads}"
        found.error("R004", message, "use a divisor of num_heads")
    if m.head_dim % 2:
        message = f"config.model.head_dim={m.head_dim}: odd, but RoPE turns pairs"
        found.error("R004", message, "use an even head_dim (64 or 128 for the GPU kernels)")
    if m.rotary_dim % 2 or m.rotary_dim > m.head_dim:
        message = f"config.model.rotary_dim={m.rotary_dim}: odd, or larger than head_dim={m.head_dim}"
        found.error("R004", message, "use an even number of a head's features, or 0 for all")
    message, fix = pattern_problem(m)
    if message:
        found.error("R004", f"config.model.layer_pattern={m.layer_pattern}: {message}", fix)
    _check_rope_scaling(config, found)
    try:
        nsa = NSAConfig(**geometry(m.nsa))
    except ValueError as error:
        found.error("R005", f"config.model.nsa: {error}", "see NSAConfig; the paper's geometry is the default")
        return None
    if "nsa" not in attention_kinds(m) or config.allow_dense_regime:
        return nsa
    reach = nsa.num_selected * nsa.select_block
    if seq_len <= reach:
        message = (
            f"config.data.seq_len={seq_len}: every query reads all of its past, since num_selected * select_block = "
            f"{reach}; nothing is sparse"
        )
        found.error("R006", message, "use longer sequences or fewer blocks, or set config.allow_dense_regime=True")
    elif seq_len <= 2 * nsa.window:
        message = f"config.data.seq_len={seq_len}: the window of {nsa.window} covers most of it"
        found.warning("R006", message, "use sequences of at least 4 windows")
    return nsa


def _check_rope_scaling(config: ConfigDict, found: Findings) -> None:
    scaling = config.model.rope_scaling
    try:
        RopeScaling(**scaling.to_dict())
    except ValueError as error:
        if scaling.kind in KINDS:  # another kind is reported as no such choice
            found.error("R005", f"config.model.{error}", "see RopeScaling; converted models have what they came with")


def float8_problems(config: ConfigDict, target: Target, name: str) -> list[Problem]:
    """R061: the device that trains has float8 tensor cores.

    Args:
      config: the training config.
      target: the device.
      name: of the device, for the message.
    """
    if config.model.matmul_dtype != "float8" or (target.compute_capability or (0, 0)) >= (8, 9):
        return []
    message = f"config.model.matmul_dtype='float8': {name} has no float8 tensor cores"
    return [Problem("R061", "error", message, 'set "", or use a GPU of compute capability 8.9 or later, such as h100')]


def _check_offload(config: ConfigDict, found: Findings) -> None:
    m = config.model
    if m.remat == "offload" and not m.scan_layers:
        message = (
            "config.model.remat='offload' with scan_layers=False: XLA copies each input to the host only when it is "
            "needed again, and memory grows"
        )
        found.error("R060", message, "set config.model.scan_layers=True")


def _check_selection_loss(config: ConfigDict, found: Findings) -> None:
    if not config.train.selection_loss:
        return
    field = f"config.train.selection_loss={config.train.selection_loss}"
    nsa, seq_len = config.model.nsa, config.data.seq_len
    reach = nsa.num_selected * nsa.select_block
    if "nsa" not in attention_kinds(config.model) or nsa.selector != "compressed":
        found.error("R062", f"{field}: no layer chooses blocks by its compressed branch", "set it to 0")
    elif nsa.shared_kv and config.model.compressor == "mean":
        message = f"{field}: means of keys that all branches share have nothing of their own to learn"
        found.error("R062", message, 'set it to 0, or nsa.shared_kv=False, or compressor="mlp"')
    elif seq_len <= reach:
        message = f"{field}: rows of {seq_len} tokens leave no choice, since num_selected * select_block = {reach}"
        found.error("R062", message, "set it to 0, or use longer rows")
    if config.mesh.context > 1:
        message = f"{field} with config.mesh.context={config.mesh.context}: its queries' keys are on other devices"
        found.error("R062", message, "set either to its default")


def _check_mesh(config: ConfigDict, found: Findings) -> None:
    m, tensor, context = config.model, config.mesh.tensor, config.mesh.context
    if tensor > 1:
        if m.num_kv_heads % tensor:
            message = (
                f"config.mesh.tensor={tensor}: does not divide num_kv_heads={m.num_kv_heads}; a key/value head, its "
                "query heads and their block list stay on one device"
            )
            found.error("R020", message, "use a divisor of num_kv_heads, and fsdp or context for the other devices")
        if m.mlp_dim % tensor:
            message = f"config.mesh.tensor={tensor}: does not divide mlp_dim={m.mlp_dim}"
            found.error("R020", message, "use a multiple of 64 * tensor")
        if m.vocab_size % tensor:
            message = f"config.mesh.tensor={tensor}: does not divide vocab_size={m.vocab_size}"
            found.error("R020", message, f"pad it to {-(-m.vocab_size // (64 * tensor)) * 64 * tensor}")
        if m.matmul_dtype == "float8":
            message = (
                f"config.mesh.tensor={tensor} with config.model.matmul_dtype='float8': its products are not in float8"
            )
            found.error("R020", message, 'use fsdp or context for the other devices, or set matmul_dtype=""')
    if context > 1:
        share, rest = divmod(config.data.seq_len, context)
        nsa = geometry(m.nsa)
        least = (
            (max(nsa["compress_stride"], 1), nsa["compress_block"] - nsa["compress_stride"])
            if "nsa" in attention_kinds(m)
            else (1, 1)
        )
        if rest or share % least[0] or share < least[1]:
            name = "select_block" if m.nsa.selector == "mean_key" else "compress_stride"
            message = (
                f"config.mesh.context={context}: rows of {config.data.seq_len} tokens cannot be split over {context} "
                f"devices in multiples of {least[0]} tokens ({name}), at least {least[1]}"
            )
            step, shortest = context * least[0], context * max(least)
            fix = f"use a data.seq_len that is a multiple of {step}, at least {shortest}, or fewer devices"
            found.error("R020", message, fix)


def _check_paths(config: ConfigDict, found: Findings) -> None:
    if not config.name:
        found.error("R001", "config.name='': empty", "name the run; runs/<name> is its default workdir")
    for name in _PATHS.split():
        if "\0" in value_of(config, name):
            found.error("R001", f"config.{name}={value_of(config, name)!r}: holds a null character", "remove it")
    for name in ("compilation_cache_dir", "data.cache_dir", "train.local_dir"):
        scheme = remote(value_of(config, name))
        kept = name == "data.cache_dir" and scheme in SCHEMES
        if kept and not scheme_of(value_of(config, name)):
            message = f"config.{name}={value_of(config, name)!r}: no bucket is named"
            found.error("R001", message, f"write {scheme}BUCKET/PATH")
        elif scheme and not kept:
            message = f"config.{name}={value_of(config, name)!r}: {scheme} is not supported"
            others = f", {' or '.join(SCHEMES)}" if name == "data.cache_dir" else ": its files are locked there"
            found.error("R001", message, f"use a local or shared directory{others}")


def _check_data(config: ConfigDict, found: Findings) -> None:
    d = config.data
    for name, alone in source_configs(config).items():
        path, one = f"data.sources.{name}" if name else "data", alone.data
        if one.source in ("text", "tokens") and not one.files:
            message = f"config.{path}.files=(): source {one.source} has nothing to read"
            found.error("R007", message, "give files or globs")
        if one.source == "hf" and not one.hf_path:
            message = f"config.{path}.hf_path='': source hf needs a dataset"
            found.error("R007", message, "give the first argument of datasets.load_dataset")
        holds_tokens = one.source == "tokens" or (one.source == "hf" and one.hf_tokens_field)
        if holds_tokens and d.tokenizer == "bpe":
            message = (
                f"config.data.tokenizer='bpe': source {name or one.source} holds tokens, and no text to train it on"
            )
            found.error("R007", message, "name the tokenizer that made the tokens: tokenizer='hf' and tokenizer_path")
        if holds_tokens and one.source == "hf" and one.hf_streaming:
            message = f"config.{path}.hf_streaming=True with hf_tokens_field={one.hf_tokens_field!r}: streams hold text"
            found.error("R007", message, "set hf_streaming=False; tokens are read where they are")
        if one.val_files and one.source not in ("text", "tokens"):
            message = f"config.{path}.val_files={tuple(one.val_files)}: source {one.source} does not read files"
            fix = "leave it empty" if one.source in GENERATED else "leave it empty; val_fraction holds out"
            fix = "name the split with hf_val_split" if one.source == "hf" else fix
            found.error("R007", message, fix)
        if one.hf_val_split and (one.source != "hf" or one.hf_streaming):
            what = f"source {one.source} has no splits"
            if one.source == "hf":
                what = "streams hold documents out by their hash"
            found.error("R007", f"config.{path}.hf_val_split={one.hf_val_split!r}: {what}", "leave it empty")
        if name:
            _check_mixed_source(path, alone, d.sources[name].get("weight", 1.0), found)
    if d.sources and d.source == "synthetic":
        message = "config.data.source='synthetic' with config.data.sources: a toy task has a tokenizer of its own"
        found.error("R007", message, "leave it at its default, 'stdlib', or set what most of the sources are")
    made = d.source in GENERATED and not d.sources
    if d.packing_method == "best_fit" and (made or (d.source == "hf" and d.hf_streaming)):
        message = "config.data.packing_method='best_fit': streams and generated rows have no documents to place"
        found.error("R007", message, "set 'concatenate', or hf_streaming=False, which tokenises the data once")
    if d.tokenizer == "hf" and not d.tokenizer_path:
        message = "config.data.tokenizer_path='': tokenizer hf needs one"
        found.error("R007", message, "give the path of a tokenizer.json or a hub id")
    if d.tokenizer == "bpe" and d.bpe_vocab_size < 257:
        message = f"config.data.bpe_vocab_size={d.bpe_vocab_size}: smaller than the 256 bytes and EOS"
        found.error("R007", message, "use at least 257")
    lanes = max(d.stream_lanes, 1)  # R002 tells of fewer
    if config.train.batch_size % lanes:
        message = f"config.data.stream_lanes={d.stream_lanes}: cannot share batch_size={config.train.batch_size} evenly"
        found.error("R007", message, "use a divisor of config.train.batch_size")
    elif (rows := piece_rows(config.train)) % lanes:
        message = f"config.data.stream_lanes={d.stream_lanes}: cannot share batch_ramp's pieces of {rows} rows"
        found.error("R007", message, f"use a divisor of {rows}, which divides every batch of config.train.batch_ramp")
    smallest = {"byte": 257, "bpe": d.bpe_vocab_size}.get(d.tokenizer, 0)
    if d.source != "synthetic" and 0 < config.model.vocab_size < smallest:
        message = f"config.model.vocab_size={config.model.vocab_size}: smaller than the tokenizer's {smallest}"
        found.error("R008", message, "set it to 0, which means the tokenizer's size")
    if d.tokenizer == "bpe" and {part.data.source for part in source_configs(config).values()} == {"task"}:
        message = "config.data.tokenizer='bpe': tasks are no text to train it on"
        found.error("R007", message, "use byte, or hf with a tokenizer_path")
    read = [part.data for part in source_configs(config).values() if part.data.source not in GENERATED]
    own = all(data.val_files or data.hf_val_split for data in read)
    if config.train.eval_batches and d.val_fraction == 0 and not made and not own:
        message = f"config.data.val_fraction={d.val_fraction} with eval_batches > 0: no document is held out"
        fix = "hold out a share such as 0.01, name val_files or hf_val_split, or set config.train.eval_batches=0"
        found.error("R009", message, fix)


def piece_rows(train: Mapping[str, Any]) -> int:
    """Rows in which the data are read; those of the whole batch where the ramp is wrong, which R010 reports."""
    try:
        return BatchRamp.of(train).unit
    except ValueError:
        return int(train["batch_size"])


def save_interval(train: Mapping[str, Any]) -> int:
    """The most steps between two checkpoints, which multiples of keep_every are, too; 0: none are saved."""
    return min(train["save_every"], train["keep_every"] or train["save_every"])


def _check_mixed_source(path: str, alone: ConfigDict, weight: float, found: Findings) -> None:
    """What one of several sources must be besides what any source must be."""
    if not weight > 0:
        found.error(
            "R003", f"config.{path}.weight={weight}: out of range", "use a positive weight, or leave the source out"
        )
    kinds = [kind for kind in CHOICES["data.source"] if kind != "synthetic"]
    if alone.data.source not in kinds:
        message = f"config.{path}.source={alone.data.source!r}: cannot be mixed with others"
        found.error("R001", message, f"use one of {', '.join(kinds)}")
    if alone.data.source == "hf" and alone.data.hf_streaming:
        message = f"config.{path}: a stream cannot be mixed with others, since batches are found by their numbers"
        found.error("R007", message, "set config.data.hf_streaming=False, which tokenises the data once")


def _check_training(config: ConfigDict, found: Findings) -> None:
    t, o, mesh = config.train, config.optim, config.mesh
    if t.batch_size * config.data.seq_len >= 1 << 31:
        message = f"config.train.batch_size={t.batch_size}: {t.batch_size * config.data.seq_len:,} tokens in a step"
        found.error("R010", message, f"use fewer than {1 << 31:,}: smaller batches or a smaller config.data.seq_len")
    if t.grad_accum >= 1 and t.batch_size % t.grad_accum:
        message = f"config.train.batch_size={t.batch_size}: not a multiple of grad_accum={t.grad_accum}"
        found.error("R010", message, "make it one; batch_size counts all micro-batches")
    elif t.grad_accum >= 1 and mesh.data >= 1 and mesh.fsdp >= 1:
        micro, devices = t.batch_size // t.grad_accum, mesh.data * mesh.fsdp
        if micro % devices:
            message = (
                f"config.mesh.data={mesh.data}: {micro} rows per micro-batch cannot be split over {devices} devices"
            )
            found.error("R010", message, f"use a batch_size that is a multiple of {devices * t.grad_accum}")
    if wrong := [text for text in t.xla_options if not re.fullmatch(r"xla_\w+=.+", text)]:
        message = f"config.train.xla_options={t.xla_options}: {wrong[0]!r} is not xla_NAME=VALUE"
        found.error("R059", message, 'write, for example, ("xla_gpu_enable_latency_hiding_scheduler=True",)')
    if unknown := [name for name in t.trackers if name not in TRACKERS]:
        message = f"config.train.trackers={t.trackers}: {unknown[0]!r} is no tracker"
        found.error("R001", message, f'use some of {", ".join(TRACKERS)}, such as ("wandb",)')
    try:
        _check_rows(config, BatchRamp.of(t), found)
    except ValueError as error:
        found.error("R010", f"config.train.batch_ramp={t.batch_ramp}: {error}", "see docs/training.md")
    if config.guards.roll_back and not t.save_every:
        message = f"config.guards.roll_back={config.guards.roll_back} with save_every=0: there is nothing to return to"
        found.error("R010", message, "set config.train.save_every, or roll_back=0")
    if config.guards.early_stop and not (t.eval_every and t.eval_batches):
        message = f"config.guards.early_stop={config.guards.early_stop} without validation: nothing would stop the run"
        found.error("R010", message, "set config.train.eval_every and eval_batches, or early_stop=0")
    elif config.guards.early_stop and config.guards.early_stop * t.eval_every >= t.steps:
        message = f"config.guards.early_stop={config.guards.early_stop}: the run ends before validations could stop it"
        found.warning("R010", message, "lower config.train.eval_every or early_stop, or set early_stop=0")
    if config.guards.skip_spikes and not (config.guards.spike or config.guards.spike_norm):
        message = f"config.guards.skip_spikes={config.guards.skip_spikes} with spike=0 and spike_norm=0: no step is one"
        found.error("R010", message, "set config.guards.spike_norm or spike, or skip_spikes=0")
    if o.warmup_steps >= t.steps > 0:
        message = f"config.optim.warmup_steps={o.warmup_steps}: the run of {t.steps} steps ends before the warm-up"
        found.error("R011", message, "warm up for 1 to 10 % of the steps" if t.steps >= 10 else "set warmup_steps=0")
    elif o.schedule == "wsd" and (late := o.warmup_steps + o.decay_fraction * t.steps) > t.steps + 1e-6:
        message = (
            f"config.optim.warmup_steps={o.warmup_steps}, decay_fraction={o.decay_fraction}: warm-up and decay need "
            f"{math.ceil(late):,} of {t.steps:,} steps, so the learning rate never reaches its peak"
        )
        found.error("R011", message, "warm up for 1 to 10 % of the steps, and lower decay_fraction")
    if t.eval_every and not t.eval_batches:
        message = "config.train.eval_batches=0 with eval_every > 0: there is no validation"
        found.warning("R012", message, "set eval_batches, or eval_every=0 as well")
    if t.steps < _LONG_RUN:
        return
    if not t.save_every:
        message = f"config.train.save_every=0: runs of {_LONG_RUN:,} steps or more need checkpoints"
        found.error("R013", message, "set save_every, such as 1000")
    elif save_interval(t) > t.steps // 2:
        message = f"config.train.save_every={t.save_every}: at most one checkpoint before the end of {t.steps} steps"
        found.error("R013", message, "save several times, such as every 1000 steps")
    if not t.eval_batches or not 0 < t.eval_every < t.steps:
        message = f"config.train.eval_every={t.eval_every}, eval_batches={t.eval_batches}: no validation before the end"
        found.error("R014", message, "validate several times, on 16 batches or more")
    _check_long_run(config, found)


def _check_rows(config: ConfigDict, ramp: BatchRamp, found: Findings) -> None:
    """What a run of several batch sizes, or of several sources, makes of its rows."""
    t, rows = config.train, [rows for _, rows in ramp.stages] + [ramp.final]
    if ramp.stages and ramp.stages[-1][0] >= t.steps:
        message = (
            f"config.train.batch_ramp={t.batch_ramp}: never reaches batch_size={t.batch_size} in {t.steps:,} steps"
        )
        found.warning("R010", message, "end its last stage before config.train.steps")
    if (tokens := max(rows) * config.data.seq_len) >= 1 << 31 and max(rows) > ramp.final:
        message = f"config.train.batch_ramp={t.batch_ramp}: {tokens:,} tokens in a step"
        found.error("R010", message, f"use fewer than {1 << 31:,}: smaller batches or a smaller config.data.seq_len")
    elif rows != sorted(rows):
        message = f"config.train.batch_ramp={t.batch_ramp}: batches shrink ({' to '.join(map(str, rows))} rows)"
        found.warning("R010", message, "let the rows of later stages grow, up to batch_size")
    weights = {name: fields.get("weight", 1.0) for name, fields in config.data.sources.items()}
    total = sum(max(weight, 0) for weight in weights.values())
    for name, weight in weights.items():
        if weight > 0 and (expected := ramp.rows_before(t.steps) * weight / total) < 1:
            message = f"config.data.sources.{name}.weight={weight}: {expected:.2g} rows are expected in the whole run"
            found.warning("R007", message, "raise it, or leave the source out")


def _check_long_run(config: ConfigDict, found: Findings) -> None:
    """What is fine for trying things out and a waste in a run of days."""
    m, o = config.model, config.optim
    if m.compute_dtype != "bfloat16":
        message = f"config.model.compute_dtype={m.compute_dtype!r}: a GPU computes it many times slower than bfloat16"
        found.error("R015", message, 'set "bfloat16"; statistics and optimizer stay float32')
    width = m.num_heads * m.head_dim
    parameters = m.num_layers * m.dim * (2 * width + 3 * (m.mlp_dim or 8 * m.dim // 3))
    if parameters < _TOY_PARAMETERS:
        message = f"config.model.dim={m.dim}, num_layers={m.num_layers}: about {parameters:,} parameters, a toy"
        found.error("R016", message, "use a larger model, or fewer steps")
    sources = {f"data.sources.{name}" if name else "data": one.data for name, one in source_configs(config).items()}
    if all(data.source in GENERATED for data in sources.values()):
        kinds = ", ".join(f"config.{path}.source={data.source!r}" for path, data in sources.items())
        found.error("R016", f"config.data.source: a toy task, {kinds}", "use text, or fewer steps")
    if m.param_dtype != "float32":
        message = f"config.model.param_dtype={m.param_dtype!r}: small updates are rounded away"
        found.error("R017", message, 'set "float32"; compute_dtype alone decides the speed')
    if o.clip == 0:
        found.warning("R019", "config.optim.clip=0: one bad batch can undo days", "clip at 1.0")
    if o.warmup_steps == 0:
        found.warning("R019", "config.optim.warmup_steps=0: Adam's first steps are at full size", "warm up for 1 %")
    if o.learning_rate > 1e-2:
        message = f"config.optim.learning_rate={o.learning_rate}: beyond what models of this kind survive"
        found.warning("R019", message, "start from 3e-4 to 1e-3")
    if "nsa" in attention_kinds(m) and not config.guards.health:
        found.warning("R019", "config.guards.health=False: collapsed gates would go unnoticed", "leave it on")
    if not config.preflight.selftest:
        found.warning("R019", "config.preflight.selftest=False: causality is taken on trust", "leave it on")


# The ids of all rules, of preflight too; docs/config.md lists what they say.
RULES = frozenset(f"R{i:03}" for i in (*range(39), *range(40, 45), *range(50, 64)))


def _check_ignored(config: ConfigDict, found: Findings) -> None:
    for rule in config.preflight.ignore:
        if rule not in RULES:
            meant = nearest(str(rule).upper(), sorted(RULES))
            message = f"config.preflight.ignore: {rule!r} is no rule's id"
            hint = f"did you mean {meant!r}? " if meant else ""
            found.error("R000", message, f'{hint}name the rules as errors do, such as ("R013",)')
        elif rule in FATAL:
            message = f"config.preflight.ignore: {rule} cannot be ignored, no run could follow"
            found.error("R000", message, f"correct what {rule} says, and take it out of the tuple")


_CHECKS: tuple[Any, ...] = (
    *(check_values, _check_paths, _check_model, _check_selection_loss, _check_offload, _check_mesh, _check_data),
    *(_check_training, _check_ignored),
)


def broken_rules(config: ConfigDict) -> list[Problem]:
    """What the rules say about a config that has every field, each of its default's type."""
    found = Findings()
    for check_part in _CHECKS:
        check_part(config, found)
    return found.problems
