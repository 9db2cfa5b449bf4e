"""The ops by GPU kernels: a plan for the current device, and the kernels that take it.

This is the one place where kernels learn what device they are for. Kernel families are imported when they are first
used: a jaxlib without GPU backends can still import the library.
"""

from __future__ import annotations

import functools
import importlib
import types
from collections.abc import Iterable

import jax

from nsa_jax.ops import plan
from nsa_jax.ops.blocks import NSAConfig
from nsa_jax.ops.choices import Choice
from nsa_jax.ops.decode_tiles import PRODUCT_ROWS, product_config
from nsa_jax.ops.plan import Shape
from nsa_jax.ops.target import current_target

# The kernels for gradients of embeddings, norms and SwiGLU serve layers whose width is a multiple of this.
WIDTHS_SERVED = 64


def _kernels(name: str) -> types.ModuleType:
    return importlib.import_module(f"nsa_jax.ops.kernels.{name}")


@functools.cache
def has_cudnn() -> bool:
    """Whether cuDNN is there, which serves the forward pass of windows on some GPUs."""
    return _kernels("range_attention.window_cudnn").version() > 0


def _whole_rows(segment_start, query_offset) -> bool:
    """Whether rows hold one document each and queries are all of their tokens, as far as is known while tracing."""
    return segment_start is None and isinstance(query_offset, int) and query_offset == 0


def compressed_attention(query, key_cmp, value_cmp, *, config: NSAConfig, segment_start=None, query_offset=0):
    """See `nsa_jax.compressed_attention`."""
    return _kernels("range_attention.attention").compressed_attention(
        query, key_cmp, value_cmp, config=config, segment_start=segment_start, query_offset=query_offset,
        plan=plan.plan_range(Shape.of(query, key_cmp, value_cmp), current_target()),
    )  # fmt: skip


def select_blocks(query, key_cmp, lse, *, config: NSAConfig, num_keys: int, segment_start=None, query_offset=0):
    """See `nsa_jax.select_blocks`; `num_keys` is S."""
    return _kernels("selection.select").select_blocks(
        query, key_cmp, lse, config=config, num_keys=num_keys, segment_start=segment_start, query_offset=query_offset,
        plan=plan.plan_selection(Shape.of(query, key_cmp), config, current_target()),
    )  # fmt: skip


def selected_attention(query, key, value, block_indices, *, select_block: int, segment_start=None, query_offset=0):
    """See `nsa_jax.selected_attention`."""
    sizes = dict(select_block=select_block, num_selected=block_indices.shape[-1])
    return _kernels("selected.attention").selected_attention(
        query, key, value, block_indices, select_block=select_block, segment_start=segment_start,
        query_offset=query_offset, plan=plan.plan_selected(Shape.of(query, key, value), current_target(), **sizes),
    )  # fmt: skip


def window_attention(query, key, value, *, window: int, segment_start=None, query_offset=0):
    """See `nsa_jax.window_attention`."""
    cudnn = _whole_rows(segment_start, query_offset) and has_cudnn()
    return _kernels("range_attention.attention").window_attention(
        query, key, value, window=window, segment_start=segment_start, query_offset=query_offset,
        plan=plan.plan_range(Shape.of(query, key, value), current_target(), span=window, cudnn=cudnn),
    )  # fmt: skip


def _plan_nsa(
    query, others, *, config, segment_start, query_offset, window_start, by_kv_head: bool, shared_window: bool
) -> plan.NSAPlan:
    key_cmp, _, key_slc, value_slc, key_win, *_ = others
    return plan.plan_nsa(
        Shape.of(query, key_slc, value_slc),
        config,
        current_target(),
        num_compressed=key_cmp.shape[1],
        window_keys=key_win.shape[1],
        cudnn=window_start is None and _whole_rows(segment_start, query_offset) and has_cudnn(),
        by_kv_head=by_kv_head,
        shared_window=shared_window,
    )


def nsa_attention(
    query, *others, config: NSAConfig, segment_start=None, query_offset=0, window_start=None, nonnegative_gates=False
) -> tuple[jax.Array, jax.Array]:
    """See `nsa_jax.nsa_attention`; returns the output and the block lists."""
    where = dict(segment_start=segment_start, query_offset=query_offset, window_start=window_start)
    _, _, key_slc, value_slc, key_win, value_win, _ = others
    shared = nonnegative_gates and window_start is None and key_win is key_slc and value_win is value_slc
    made = _plan_nsa(query, others, config=config, **where, by_kv_head=False, shared_window=shared)
    return _kernels("layer.nsa").nsa_attention(
        query, *others, config=config, **where, nonnegative_gates=nonnegative_gates, plan=made
    )


def nsa_attention_by_kv_head(
    queries, others, *, kv_heads: int, config: NSAConfig, segment_start=None, nonnegative_gates: bool = False,
    shared_kv: bool = False, keeps_sum: bool = False,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """See `nsa_jax.ops.kernels.layer.nsa.nsa_attention_by_kv_head`; rows are whole.

    With `shared_kv` the window's keys and values are those of the selected branch.
    """
    where = dict(segment_start=segment_start, query_offset=0, window_start=None)
    shared = nonnegative_gates and shared_kv
    made = _plan_nsa(queries[0], others, config=config, **where, by_kv_head=True, shared_window=shared)
    return _kernels("layer.nsa").nsa_attention_by_kv_head(
        queries, others, kv_heads=kv_heads, config=config, **where, nonnegative_gates=nonnegative_gates, plan=made,
        keeps_sum=keeps_sum,
    )  # fmt: skip


def split_projection(projected: jax.Array, cos: jax.Array, sin: jax.Array, **sizes: int):
    """See `nsa_jax.ops.kernels.layer.projection.split_projection`."""
    return _kernels("layer.projection").split_projection(projected, cos, sin, **sizes)


def decode_attention(
    query, key_cmp, value_cmp, key_slc, value_slc, key_win, value_win, gates, lengths, config: NSAConfig, segment_start
):
    """See `nsa_jax.decode_attention`; returns the output [B, T, N, V] and the block lists int32 [B, T, K, n]."""
    made = plan.plan_decode(Shape.of(query, key_slc, value_slc), key_cmp.shape[1], config, current_target())
    return _kernels("decode.launch").decode_attention(
        query, key_cmp, value_cmp, key_slc, value_slc, key_win, value_win, gates, lengths, config, segment_start, made
    )


def append_token(projected, gate_bias, turn, lengths, arrays, key_cmp, value_cmp, phis, **sizes):
    """See `nsa_jax.ops.kernels.decode.append.append_token`; `phis` are tuples of the fields of its `Phi`."""
    append = _kernels("decode.append")
    phis = [append.Phi(*phi) for phi in phis]
    return append.append_token(projected, gate_bias, turn, lengths, arrays, key_cmp, value_cmp, phis, **sizes)


def append_and_attend(
    projected, gate_bias, turn, lengths, segment_start, arrays, key_cmp, value_cmp, *, made: Choice, **sizes
):
    """See `nsa_jax.ops.kernels.decode.launch.append_and_attend`; `made` is `plan.plan_decode`'s."""
    return _kernels("decode.launch").append_and_attend(
        projected, gate_bias, turn, lengths, segment_start, arrays, key_cmp, value_cmp, plan=made, **sizes
    )


def dense_decode_attention(query, key, value, lengths, segment_start=None, *, ring=False):
    """See `nsa_jax.ops.kernels.decode.dense.dense_decode_attention`."""
    made = plan.plan_decode(Shape.of(query, key, value), key.shape[1], NSAConfig(), current_target())
    return _kernels("decode.dense").dense_decode_attention(query, key, value, lengths, segment_start, made, ring=ring)


def products_serve(rows: int, dims: Iterable[int]) -> bool:
    """Whether `product` serves so many rows and weights with these dimensions here, if they are bfloat16."""
    capability = current_target().compute_capability or (8, 0)
    return rows <= PRODUCT_ROWS and capability >= (8, 0) and all(dim % 64 == 0 for dim in dims)


def product(x: jax.Array, w: jax.Array, *, gated: bool = False, in_parts: bool = False) -> jax.Array:
    """See `nsa_jax.ops.kernels.decode.few_rows.product`."""
    kinds = dict(gated=gated, in_parts=in_parts)
    tile = product_config(len(x), len(w), w.shape[1] // (1 + gated), **kinds, target=current_target())
    return _kernels("decode.few_rows").product(x, w, **kinds, tile=tile)


def add_and_norm(x: jax.Array, parts: jax.Array | None, bias: jax.Array | None, scale: jax.Array, *, eps: float):
    """See `nsa_jax.ops.kernels.decode.few_rows.add_and_norm`."""
    return _kernels("decode.few_rows").add_and_norm(x, parts, bias, scale, eps=eps)


def layer_kernels_serve(width: int) -> bool:
    """Whether the kernels for gradients of embeddings, norms and SwiGLU serve layers of this width here."""
    target = current_target()
    return target.is_gpu and (target.compute_capability or (0, 0)) >= (8, 0) and width % WIDTHS_SERVED == 0
