"""NSA of a layer's fused projection, where kernels cut it: by key/value head, rotated on the way.

`serves` tells where. Elsewhere cut, rotate, and call `nsa_jax.nsa_attention`: the same numbers but for rounding.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from nsa_jax.ops import checks, nsa, plan
from nsa_jax.ops.blocks import NSAConfig
from nsa_jax.ops.implementations import kernels_wanted, module
from nsa_jax.ops.plan import Shape
from nsa_jax.ops.target import current_target


def serves(
    shape: tuple[int, ...],
    kv_heads: int,
    value_dim: int,
    dtype,
    *,
    config: NSAConfig,
    implementation: str | None,
) -> bool:
    """Whether `split_projection` and `attend` serve whole rows with a query [B, T, N, H] of this shape.

    Args:
      shape: the query's.
      kv_heads: K.
      value_dim: V.
      dtype: of activations.
      config: block geometry.
      implementation: as in `nsa_jax.nsa_attention`.
    """
    if not kernels_wanted(implementation):
        return False
    batch, length, num_heads, head_dim = shape
    target = current_target()
    sizes = Shape(batch, length, length, num_heads, kv_heads, head_dim, value_dim, jnp.dtype(dtype).name)
    if plan.unsupported("select_blocks", sizes, target, select_block=config.select_block) is not None:
        return False
    return plan.cuts_projection(sizes, target)


def split_projection(
    projected: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    *,
    config: NSAConfig,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    value_dim: int,
    shared_kv: bool,
):
    """See `nsa_jax.ops.kernels.layer.projection.split_projection`; the query as often as `attend` takes it."""
    batch, length, _ = projected.shape
    sizes: dict[str, Any] = dict(num_heads=num_heads, head_dim=head_dim, value_dim=value_dim)
    shape = Shape(batch, length, length, kv_heads=num_kv_heads, dtype=projected.dtype.name, **sizes)
    joint = plan.joins_window(shape, current_target(), config) if shared_kv else False
    sizes |= dict(num_kv_heads=num_kv_heads, shared_kv=shared_kv, joint_window=joint)
    return module("pallas").split_projection(projected, cos, sin, **sizes)


def attend(
    queries: tuple[jax.Array, ...],
    others: tuple[jax.Array, ...],
    *,
    kv_heads: int,
    config: NSAConfig,
    segment_start: jax.Array | None = None,
    implementation: str | None = None,
    nonnegative_gates: bool = False,
    shared_kv: bool = False,
    keeps_sum: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """As `nsa_jax.nsa_attention` of whole rows, where `serves` says so, with key/value heads as batch entries.

    Args:
      queries: the query [B * K, T, G, H] as `split_projection` gives it; each gets a part of its gradient.
      others: its arguments after the query: six keys and values [B * K, S, 1, H or V], gates [B * K, T, G, 3].
      kv_heads: K.
      config, segment_start, implementation, nonnegative_gates: see `nsa_jax.nsa_attention`.
      shared_kv: the window's keys and values are those of the selected branch; `split_projection`'s, with nonnegative
        gates. Where kernels compute both gradients at once, the window's are 0 and the selected branch's their sum.
      keeps_sum: the output is kept for the backward pass where `jax.checkpoint` decides what is: under the name
        "nsa_gated_sum". A kernel that serves the window alone stores it.

    Returns:
      [B, T, K * G, V] and the block lists, int32 [B, T, K, n].
    """
    *by_token, gates_by_token = [
        jax.ShapeDtypeStruct((x.shape[0] // kv_heads, x.shape[1], x.shape[2] * kv_heads, x.shape[3]), x.dtype)
        for x in (queries[0], *others)
    ]
    nsa.check_branches(by_token, gates_by_token, config=config, segment_start=segment_start)
    query, key_cmp, _, key_slc, value_slc, key_win, _ = by_token
    nsa.choose_all(query, key_cmp, key_slc, value_slc, key_win, implementation, config)
    return module("pallas").nsa_attention_by_kv_head(
        queries,
        others,
        kv_heads=kv_heads,
        config=config,
        segment_start=checks.clip_segments(segment_start),
        nonnegative_gates=nonnegative_gates,
        shared_kv=shared_kv,
        keeps_sum=keeps_sum,
    )
