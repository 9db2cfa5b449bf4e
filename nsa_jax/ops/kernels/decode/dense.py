"""Full attention of new tokens to a cache, split like the sparse kernels: what NSA's decoding is compared with."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from nsa_jax.ops.choices import Choice
from nsa_jax.ops.kernels.decode.softmax_parts import (
    PartSoftmax,
    combine,
    iota,
    part_of,
    partials,
    query_position,
)
from nsa_jax.ops.kernels.softmax import LOG2E
from nsa_jax.ops.kernels.triton import triton_call


def _dense_kernel(*refs, num_starts, num_queries, group, keys, scale, ring):
    """One part of all keys. refs: lengths [1], segment_start [1] if packed, query [G, H], key [S, H], value [S, V];
    out: partial output [G, V], stats [2, G]."""
    lengths_ref, start_refs = refs[0], refs[1 : 1 + num_starts]
    q_ref, k_ref, v_ref, acc_ref, stats_ref = refs[1 + num_starts :]
    slots = k_ref.shape[0]
    t, start = query_position(lengths_ref, start_refs, num_queries, None if ring else slots)
    if ring:
        start = jnp.maximum(start, lengths_ref[0] - slots)
    softmax = PartSoftmax(q_ref, group=group, keys=keys, v_dim=v_ref.shape[-1], scale=scale)
    count = pl.cdiv(jnp.maximum(t + 1 - start, 0), keys)
    begin, end = part_of(count, pl.num_programs(0), pl.program_id(0))

    def body(i, carry):
        position = start + i * keys + iota(keys)
        slot = position % slots if ring else jnp.minimum(position, slots - 1)
        return softmax.step(carry, k_ref, v_ref, slot, position <= t)[0]

    softmax.store(lax.fori_loop(begin, end, body, softmax.init()), acc_ref, stats_ref)


@functools.partial(jax.jit, static_argnames=("plan", "ring"))
def dense_decode_attention(query, key, value, lengths, segment_start, plan: Choice, *, ring: bool = False):
    """Full attention of the newest T tokens of each row to a cache: the baseline, split like the sparse kernels.

    With `ring`, the cache holds position p at p % S, and the last S tokens alone are read.

    Args:
      query: [B, T, N, H].
      key: [B, S, K, H], of which lengths[b] tokens are in use, the T queries' own included; a ring has seen so many.
      value: [B, S, K, V].
      lengths: int [B].
      segment_start: int [B, T] or None.
      plan: how the keys are divided.
      ring: see above.

    Returns:
      [B, T, N, V] in query's dtype.
    """
    batch, num_queries, num_heads, h_dim = query.shape
    capacity, num_kv, v_dim = value.shape[1:]
    group, num_rows = num_heads // num_kv, batch * num_queries
    tile = plan.tiles
    starts = [] if segment_start is None else [segment_start.astype(jnp.int32).reshape(num_rows, 1)]
    specs, shapes = partials(num_rows, num_kv, tile.compressed_parts, group, v_dim)
    acc, stats = triton_call(
        functools.partial(
            _dense_kernel,
            num_starts=len(starts),
            num_queries=num_queries,
            group=group,
            keys=tile.keys,
            scale=LOG2E * h_dim**-0.5,
            ring=ring,
        ),
        grid=(tile.compressed_parts, num_kv, num_rows),
        in_specs=[
            pl.BlockSpec((1,), lambda s, k, r: (r // num_queries,)),
            *(pl.BlockSpec((None, 1), lambda s, k, r: (r, 0)) for _ in starts),
            pl.BlockSpec((None, None, group, h_dim), lambda s, k, r: (r, k, 0, 0)),
            pl.BlockSpec((None, capacity, None, h_dim), lambda s, k, r: (r // num_queries, 0, k, 0)),
            pl.BlockSpec((None, capacity, None, v_dim), lambda s, k, r: (r // num_queries, 0, k, 0)),
        ],
        out_specs=specs,
        out_shape=shapes,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        name="dense_decode",
    )(lengths.astype(jnp.int32), *starts, query.reshape(num_rows, num_kv, group, h_dim), key, value)
    out = combine(None, (acc, stats), ((0, 0, tile.compressed_parts),), query.dtype)
    return out.reshape(batch, num_queries, num_heads, v_dim)
