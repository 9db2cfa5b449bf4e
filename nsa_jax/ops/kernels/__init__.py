"""Pallas GPU kernels of every op, forward and backward; the only place that knows about kernel backends."""

from __future__ import annotations

import importlib
from typing import Any

from nsa_jax.ops import blocks
from nsa_jax.ops.target import Target

__all__ = [
    "compressed_attention",
    "decode_attention",
    "select_blocks",
    "selected_attention",
    "unsupported",
    "window_attention",
]

_MODULES = {
    "Phi": "decode.append",
    "append_token": "decode.append",
    "compressed_attention": "range_attention.attention",
    "decode_attention": "decode.step",
    "dense_decode_attention": "decode.dense",
    "nsa_attention": "layer.nsa",
    "nsa_attention_by_kv_head": "layer.nsa",
    "split_projection": "layer.projection",
    "window_attention": "range_attention.attention",
    "select_blocks": "selection.select",
    "selected_attention": "selected.attention",
}


def __getattr__(name: str) -> Any:
    """Imports a kernel family when it is first used: a jaxlib without GPU backends can still import the library."""
    if name in _MODULES:
        return getattr(importlib.import_module(f"nsa_jax.ops.kernels.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def wants_kv_heads_as_batch(query, value, *, target: Target) -> bool:
    """Whether `nsa_attention` of query [B, T, N, H] and value [B, S, K, V] rearranges them by key/value head.

    Who makes them can then do that on the way: see `split_projection` and `nsa_attention_by_kv_head`.
    """
    return importlib.import_module("nsa_jax.ops.kernels.range_attention.sm90_forward").rearranges(query, value, target)


_HEAD_DIMS = (16, 32, 64, 128, 192)
_MAX_SELECTION_BLOCKS = 32_768  # top-n keeps a row of scores in registers


def unsupported(op: str, query, key, value, *, target: Target, **static) -> str | None:
    """Why the kernels cannot serve these inputs, or None if they can.

    Args:
      op: the public op's name.
      query: [B, T, N, H].
      key: [B, S or C, K, H].
      value: [B, S or C, K, V], or None for `select_blocks`.
      target: the device.
      **static: the op's static arguments (config, num_keys, select_block, window, packed).
    """
    if target.is_gpu and (target.compute_capability or (0, 0)) < (8, 0):
        return f"compute capability {target.compute_capability}: the kernels need 8.0 (A100) or later"
    for name, array in (("query", query), ("value", value)):
        if array is not None and array.shape[-1] not in _HEAD_DIMS:
            return f"{name} has head dim {array.shape[-1]}: the kernels support {_HEAD_DIMS}"
    group = query.shape[2] // key.shape[2]
    if group > 64:
        return f"{group} query heads per key/value head: the kernels support at most 64"
    if op == "select_blocks" and "num_keys" in static:
        num_blocks = blocks.num_selection_blocks(static["num_keys"], static["config"].select_block)
        if num_blocks > _MAX_SELECTION_BLOCKS:
            return f"{num_blocks} selection blocks: the kernels support at most {_MAX_SELECTION_BLOCKS}"
    rows = max(query.shape[0] * query.shape[1] * query.shape[2], key.shape[0] * key.shape[1] * key.shape[2])
    if rows >= 2**31:
        return f"{rows} rows of queries or keys (B*T*N or B*S*K): the kernels index them with 32 bits"
    return None
