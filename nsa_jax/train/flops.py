"""What a token costs: floating point operations by part, and the peaks of GPUs that MFU is measured against.

One multiply-add is two operations. A matrix product of w parameters costs 2w per token forward; the backward pass costs
twice the forward pass; recomputation under remat is not counted, so MFU is about useful work. Attention costs
2(H + V) per query head and key that it reads, keys averaged over the row's positions, causally. In packed rows a query
reads its own document only, so rows of short documents cost less than rows of one.
"""

from __future__ import annotations

import numpy as np

from nsa_jax.nn import ModelConfig
from nsa_jax.ops import blocks

# Dense bfloat16 peak in FLOP/s, by a substring of JAX's device_kind; the first match counts.
_PEAKS = (
    ("H100 PCIe", 756e12),
    ("H100 NVL", 835e12),
    ("H100", 989e12),
    ("H200 NVL", 835e12),
    ("H200", 989e12),
    ("A100", 312e12),
    ("L40S", 362e12),
    ("GB200", 2500e12),
    ("B200", 2250e12),
    ("RTX A6000", 155e12),
    ("RTX PRO 6000 Blackwell Max-Q", 438e12),
    ("RTX PRO 6000", 503e12),
)


def peak_flops(device_kind: str) -> float | None:
    """Dense bfloat16 FLOP/s of a GPU, or None where it is not known (MFU is then not reported)."""
    return next((peak for name, peak in _PEAKS if name in device_kind), None)


def keys_per_query(config: ModelConfig, seq_len: int, segment_start: np.ndarray | None = None) -> dict[str, float]:
    """Mean number of keys that a query of a layer reads in each branch.

    With a layer_pattern, the window is that of NSA and of window layers alike.

    Args:
      config: the model's.
      seq_len: T.
      segment_start: int [rows, T] of sampled packed rows: the row position of the first token of each token's document.
        None: each row is one document.
    """
    t, start, nsa, found = np.arange(seq_len), _starts(segment_start), config.nsa, {}
    if "dense" in config.kinds:
        found["dense"] = float((t - start + 1).mean())
    if "window" in config.kinds:
        found["window"] = float(np.minimum(t - start + 1, nsa.window).mean())
    if "nsa" not in config.kinds:
        return found
    sparse = {
        "compressed": _compressed_keys(config, seq_len, segment_start),
        "selected": float(blocks.selected_key_count(t, start, nsa).mean()),
        "window": float(np.minimum(t - start + 1, nsa.window).mean()),
    }
    return found | {name: sparse[name] for name in config.branches}


def _starts(segment_start: np.ndarray | None) -> np.ndarray:
    return np.zeros((), np.int64) if segment_start is None else np.asarray(segment_start, np.int64)


def _compressed_keys(config: ModelConfig, seq_len: int, segment_start: np.ndarray | None) -> float:
    """Mean number of compressed keys, or mean keys, that a query is scored with."""
    low, high = blocks.compressed_range(np.arange(seq_len), _starts(segment_start), config.nsa)
    return float(np.maximum(high - low, 0).mean())


def forward_flops_per_token(
    config: ModelConfig, seq_len: int, segment_start: np.ndarray | None = None
) -> dict[str, float]:
    """Operations of one token's forward pass, by part; those of all kinds of layers are added up.

    Arguments are those of `keys_per_query`.
    """
    parts: dict[str, float] = {}
    for kind in sorted(set(config.kinds)):
        layers = config.layers_of(kind)
        for name, value in _layer_flops(config.of_layer(layers[0]), seq_len, segment_start).items():
            parts[name] = parts.get(name, 0.0) + value * len(layers)
    parts["head"] = 2.0 * config.dim * config.vocab_size
    return parts


def _layer_flops(config: ModelConfig, seq_len: int, segment_start: np.ndarray | None) -> dict[str, float]:
    """Operations of one layer for one token."""
    d, n, k, h, v = config.dim, config.num_heads, config.num_kv_heads, config.head_dim, config.value_head_dim
    sparse = config.attention == "nsa"
    branches = len(config.branches)
    width = n * h + (branches if sparse and not config.shared_kv else 1) * k * (h + v) + (branches * n if sparse else 0)
    per_layer = {
        "projections": 2.0 * d * (width + n * v),
        "mlp": 2.0 * 3 * d * config.mlp_dim,
    }
    if sparse and config.selector == "compressed" and config.compressor == "mlp":
        overlap = config.nsa.compress_block // config.nsa.compress_stride
        hidden = sum(2 * f * f * overlap + 2 * f * f / config.nsa.compress_stride for f in (h, v))
        per_layer["compressor"] = 2.0 * k * hidden
    for branch, keys in keys_per_query(config, seq_len, segment_start).items():
        per_layer[f"attention_{branch}"] = 2.0 * (h + v) * n * keys
    if sparse:  # scores of the compressed keys, once more, for selection; of mean keys, with one query per group
        queries = k if config.selector == "mean_key" else n
        per_layer["selection"] = 2.0 * h * queries * _compressed_keys(config, seq_len, segment_start)
    return per_layer


def train_flops_per_token(config: ModelConfig, seq_len: int, segment_start: np.ndarray | None = None) -> float:
    """Operations of one trained token: three forward passes, but selection has no backward pass.

    Arguments are those of `keys_per_query`.
    """
    parts = forward_flops_per_token(config, seq_len, segment_start)
    return 3 * sum(parts.values()) - 2 * parts.get("selection", 0.0)
