"""What single fields of a config may hold: choices, bounds and ranges."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ml_collections import ConfigDict

from nsa_jax.fields import Findings
from nsa_jax.ops.gpus import GPUS
from nsa_jax.ops.rope import KINDS

CHOICES = {
    "model.attention": ("nsa", "dense", "window"),
    "model.compressor": ("mlp", "mean"),
    "model.nsa.selector": ("compressed", "mean_key"),
    "model.rope_scaling.kind": KINDS,
    "model.implementation": ("auto", "reference", "xla", "pallas"),
    "model.compute_dtype": ("float32", "bfloat16"),
    "model.matmul_dtype": ("", "float8"),
    "model.param_dtype": ("float32", "bfloat16"),
    "model.remat": ("none", "block", "attention_saved", "dots_saved", "offload", "full"),
    "data.source": ("stdlib", "text", "trees", "tokens", "hf", "task", "synthetic"),
    "data.synthetic": ("random", "copy", "recall"),
    "data.packing_method": ("concatenate", "best_fit"),
    "data.tokenizer": ("byte", "bpe", "hf"),
    "optim.name": ("adamw", "muon"),
    "optim.schedule": ("cosine", "linear", "constant", "wsd"),
    "preflight.target": ("", *GPUS),
}

_FACTORS = [
    f"optim.{kind}_factor.{group}"
    for kind in ("learning_rate", "weight_decay")
    for group in ("embedding", "head", "gates", "compressor")
]

AT_LEAST = {
    3: "data.synthetic_vocab",
    1: (
        "model.dim model.num_layers model.num_heads model.num_kv_heads model.head_dim data.seq_len data.prefetch "
        "data.stream_lanes train.selection_queries "
        "train.steps train.batch_size train.grad_accum train.log_every train.keep_last mesh.fsdp mesh.tensor "
        "mesh.context preflight.devices"
    ),
    0: (
        "seed model.vocab_size model.value_head_dim model.mlp_dim model.rotary_dim model.rope_scaling.original_length "
        "data.max_documents data.tree_characters data.task_length "
        "data.num_workers data.tokenizer_workers data.shuffle_buffer "
        "train.eval_every train.keep_every "
        "train.eval_batches train.save_every train.sample_tokens optim.warmup_steps optim.weight_decay optim.clip "
        "guards.floor_steps guards.skip_steps guards.skip_spikes guards.spike_norm guards.roll_back "
        "guards.max_gap guards.divergence guards.spike guards.plateau_steps "
        "guards.early_stop guards.early_stop_delta guards.min_gate_entropy guards.stall_seconds guards.upload_seconds"
    ),
}

# Beyond these a slip of the keyboard is likelier than a purpose, and what it leads to is no clear message.
AT_MOST = {
    1 << 24: "model.vocab_size data.bpe_vocab_size data.synthetic_vocab",
    1 << 20: (
        "model.dim model.num_layers model.num_heads model.num_kv_heads model.head_dim model.value_head_dim "
        "model.mlp_dim model.nsa.compress_block model.nsa.compress_stride model.nsa.select_block "
        "model.nsa.num_selected model.nsa.num_initial model.nsa.num_local model.nsa.window"
    ),
    1 << 10: "data.num_workers data.tokenizer_workers data.prefetch",
    30 * 86_400: "guards.stall_seconds guards.heartbeat_seconds guards.upload_seconds",
}

# field: (lowest, is it allowed itself, highest, is it allowed itself)
RANGES = {
    "model.dropout": (0.0, True, 1.0, False),
    "model.nsa.gate_bias": (-30.0, True, 30.0, True),
    "data.val_fraction": (0.0, True, 1.0, False),
    "data.task_answer_weight": (0.0, False, 1e6, True),
    "optim.learning_rate": (0.0, False, float("inf"), False),
    "optim.final_fraction": (0.0, True, 1.0, True),
    "optim.decay_fraction": (0.0, False, 1.0, True),
    # A decay closer to 1 can round to 1 in float32, and Adam's correction of the averages then divides by zero.
    "optim.b1": (0.0, True, 0.999999, True),
    "optim.b2": (0.0, True, 0.999999, True),
    "optim.momentum": (0.0, True, 1.0, False),
    "optim.eps": (0.0, False, float("inf"), False),
    "model.norm_eps": (0.0, False, float("inf"), False),
    "model.init_std": (0.0, False, float("inf"), False),
    "model.rope_theta": (1.0, False, float("inf"), False),
    "model.logit_soft_cap": (0.0, True, float("inf"), False),
    "train.ema_decay": (0.0, True, 1.0, False),
    "train.z_loss": (0.0, True, float("inf"), False),
    "train.selection_loss": (0.0, True, float("inf"), False),
    "model.rope_scaling.factor": (1.0, True, float("inf"), False),
    "model.rope_scaling.attention_factor": (0.0, True, float("inf"), False),
    "model.rope_scaling.low_freq_factor": (0.0, False, float("inf"), False),
    "model.rope_scaling.high_freq_factor": (0.0, False, float("inf"), False),
    "model.rope_scaling.beta_fast": (0.0, False, float("inf"), False),
    "model.rope_scaling.beta_slow": (0.0, False, float("inf"), False),
    "preflight.utilisation": (0.0, False, 1.0, True),
    "guards.floor_ratio": (0.0, True, 1.0, False),
    "guards.late_floor_ratio": (0.0, True, 1.0, False),
    "guards.max_gate_share": (0.0, False, 1.0, True),
    "guards.max_collapsed": (0.0, True, 1.0, True),
    "guards.min_selection_gain": (0.0, True, 1.0, True),
    "guards.selection_from": (0.0, True, 1.0, True),
    "guards.heartbeat_seconds": (1.0, True, float("inf"), False),
    "guards.peer_seconds": (2.0, True, 600.0, True),
    **dict.fromkeys(_FACTORS, (0.0, True, float("inf"), False)),
}


def value_of(config: ConfigDict, name: str) -> Any:
    """The value of a field such as "model.dim"."""
    for part in name.split("."):
        config = config[part]
    return config


def with_sources(config: ConfigDict, name: str) -> Iterator[tuple[str, Any]]:
    """A field with its value, and what sources set in its place."""
    field = name.removeprefix("data.")
    yield name, value_of(config, name)
    for source in (source for source, own in config.data.sources.items() if field in own):
        yield f"data.sources.{source}.{field}", config.data.sources[source][field]


def check_values(config: ConfigDict, found: Findings) -> None:
    for name, allowed in CHOICES.items():
        value = value_of(config, name)
        if value not in allowed:
            choices = ", ".join(choice or '""' for choice in allowed)
            found.error("R001", f"config.{name}={value!r}: no such choice", f"use one of {choices}")
    for lowest, names in AT_LEAST.items():
        for name, value in (each for field in names.split() for each in with_sources(config, field)):
            if not value >= lowest:
                found.error("R002", f"config.{name}={value}: too small", f"use at least {lowest}")
    for highest, names in AT_MOST.items():
        for name in names.split():
            value = value_of(config, name)
            if value > highest:
                found.error("R002", f"config.{name}={value}: too large", f"use at most {highest:,}")
    for field, (low, low_included, high, high_included) in RANGES.items():
        interval = f"{'[' if low_included else '('}{low:g}, {high:g}{']' if high_included else ')'}"
        for name, value in with_sources(config, field):
            above = value >= low if low_included else value > low
            if not above or not (value <= high if high_included else value < high):
                found.error("R003", f"config.{name}={value}: out of range", f"use a value in {interval}")
    if 0 < config.guards.stall_seconds < 1:
        message = f"config.guards.stall_seconds={config.guards.stall_seconds}: too small"
        found.error("R002", message, "use 0 for no such guard, or at least 1")
    if config.mesh.data != -1 and config.mesh.data < 1:
        found.error("R002", f"config.mesh.data={config.mesh.data}: too small", "use -1 for all devices, or at least 1")
