"""Decoding of many rows on GPUs in one kernel, or two.

One program serves all branches of a (query token, key/value head) pair: it attends to the compressed blocks, makes the
list from their scores, and attends to the listed blocks and to the window. No program waits for another kernel's list.
Where a batch has too few pairs to fill a GPU, several programs share one. Each of them makes the list and reads a part
of its blocks and of the window, and a second kernel adds up their results. That is for short rows, whose scores stay in
registers; pair_long.py has the program for long ones, which shares its pair with none.

`append_and_attend` also writes the new token into the cache: before a program attends, it does what append.py's does.
Lists are those of step.py and short.py.

Programs that share a pair all write its query, gates, token, compressed block, probabilities and list, and none waits
for another. That is safe because every place is written once by each of them, with the same bits:

- Query, gates and token come from inputs that no program writes, the compressed block from these and the tails. In a
  tail only the new token's slot changes, and what is loaded from it is replaced by the projection. If the tail is a
  ring, that slot held a token from before the compressed block, in the window's ring one from before the window.
- Whatever else a program reads of these arrays it has written itself, with a barrier between. All of them then compute
  probabilities and list from the same numbers with the same instructions: which part a program has decides only over
  which keys it attends afterwards, and its partial results are its own.
- In a full row no program writes to the cache, neither a token nor a compressed block.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from nsa_jax.ops import blocks
from nsa_jax.ops.blocks import NSAConfig
from nsa_jax.ops.choices import Choice
from nsa_jax.ops.kernels.decode import append, pair_long
from nsa_jax.ops.kernels.decode.ranking import block_importance, rank, ranking_widths
from nsa_jax.ops.kernels.decode.softmax_parts import (
    PartSoftmax,
    attend_listed,
    attend_window,
    candidate_range,
    combine,
    iota,
    part_of,
    query_position,
    visible_range,
    window_tiles,
    write_gated_sum,
)
from nsa_jax.ops.kernels.softmax import LOG2E
from nsa_jax.ops.kernels.triton import barrier, pieces, triton_call


def _attend_compressed(softmax: PartSoftmax, k_ref, v_ref, sum_ref, low, high, group: int, num_cmp: int):
    """Attention to the compressed blocks [low, high); their probabilities, summed over the group, go to sum_ref."""
    keys, carry, scored = softmax.keys, softmax.init(), []
    for begin in range(0, sum_ref.shape[0], keys):
        index = begin + iota(keys)
        slots, visible = jnp.minimum(index, num_cmp - 1), (index >= low) & (index < high)
        # Both are loaded before the first product, so that their latencies overlap.
        key, value = ({at: ref[slots, pl.ds(at, size)] for at, size in pieces(ref.shape[-1])} for ref in (k_ref, v_ref))
        load_key, load_value = (lambda at, _, loaded=loaded: loaded[at] for loaded in (key, value))
        carry, scores, _ = softmax.add(carry, load_key, load_value, v_ref.dtype, visible)
        scored.append((visible, scores))
    _, peak, total = carry
    total = total.sum(1)
    lse = peak + jnp.log2(jnp.where(total > 0, total, 1.0))
    heads = (iota(softmax.rows) < group)[:, None]
    for tile, (visible, scores) in enumerate(scored):
        probs = jnp.where(visible[None, :] & heads, jnp.exp2(scores - lse[:, None]), 0.0)
        sum_ref[pl.ds(tile * keys, keys)] = probs.sum(0)
    return carry


def _attend(q_ref, gate_of, caches, outs, t, start, *, group, rows, keys, widths, num_cmp, parts, scale, config):
    """One part of a pair.

    Args:
      q_ref: query [G, H].
      gate_of: (heads [rows], branch) -> gates [rows].
      caches: references to compressed key [C, H] and value [C, V], key [S, H], value [S, V], window key [W, H] and
        value [W, V].
      outs: references to list [n], probabilities [C + padding], then the output [G, V], or with several parts partial
        outputs [3, G, V] and stats [3, 2, G] of the branches.
      t, start: position of the query and of its document.
    """
    kc_ref, vc_ref, ks_ref, vs_ref, kw_ref, vw_ref = caches
    list_ref, sum_ref, *out_refs = outs
    part, capacity = pl.program_id(0), ks_ref.shape[0]
    softmax = PartSoftmax(q_ref, rows=rows, group=group, keys=keys, v_dim=vs_ref.shape[-1], scale=scale)
    low, high = visible_range(t, start, num_cmp, config)
    compressed = _attend_compressed(softmax, kc_ref, vc_ref, sum_ref, low, high, group, num_cmp)
    barrier()
    importance = functools.partial(block_importance, sum_ref, low=low, high=high, num_cmp=num_cmp, config=config)
    rank(importance, list_ref, t, start, True, widths=widths, capacity=capacity, config=config)
    barrier()
    first, last = candidate_range(t, start, config)
    entry, entries = part_of(jnp.minimum(last - first + 1, config.num_selected), parts, part)
    selected = attend_listed(softmax, ks_ref, vs_ref, list_ref, entry, entries, t, start, config)
    begin, end = part_of(window_tiles(t, start, keys, config), parts, part)
    window = attend_window(softmax, kw_ref, vw_ref, begin, end, t, start, config)
    branches = compressed, selected, window
    if parts > 1:
        acc_ref, stats_ref = out_refs
        for branch, (acc, peak, total) in enumerate(branches):
            for piece, (at, size) in zip(acc, pieces(softmax.v_dim), strict=True):
                acc_ref[branch, softmax.head, pl.ds(at, size)] = piece
            stats_ref[branch, 0, softmax.head] = peak
            stats_ref[branch, 1, softmax.head] = total.sum(1)
        return
    write_gated_sum(out_refs[0], softmax, branches, gate_of)


def _attend_kernel(*refs, num_starts, num_queries, attend):
    """refs: lengths [1], segment_start [1] if packed, gates [G, 3], query [G, H] and the caches; out: see `_attend`."""
    lengths_ref, start_refs = refs[0], refs[1 : 1 + num_starts]
    gates_ref, q_ref, *others = refs[1 + num_starts :]
    caches, outs = others[:6], others[6:]

    def gate_of(head, branch):
        return gates_ref[head, branch].astype(jnp.float32)

    t, start = query_position(lengths_ref, start_refs, num_queries, caches[2].shape[0])
    attend(q_ref, gate_of, caches, outs, t, start)


def _append_kernel(*refs, h_dim, v_dim, offsets, shared, attend, config: NSAConfig):
    """refs: lengths [1] before the token, segment_start [1], projection [F], gate bias [3G], cos and sin [2, H/2], and
    the caches in the order of `append.append_token`, compressed ones last (aliased); out: query [G, H], gates [3G], the
    caches, and those of `attend`."""
    lengths_ref, start_ref, y_ref, bias_ref, turn_ref = refs[:5]
    held = 3 if shared else 6
    q_ref, gates_ref, *others = refs[5 + held + 2 :]
    caches, compressed, outs = others[:held], others[held : held + 2], others[held + 2 :]
    at, kv = lengths_ref[0], pl.program_id(1)
    append.write_token(y_ref, bias_ref, turn_ref, at, kv, q_ref, gates_ref, caches, h_dim, v_dim, offsets, shared)
    newest = [(y_ref, offsets[1] + kv * h_dim, at), (y_ref, offsets[2] + kv * v_dim, at)]
    tails = (caches[2], caches[1]) if shared else caches[4:]
    for role in range(2):
        append.emit(role, lengths_ref, turn_ref, tails, ((), ()), compressed, newest, config)
    barrier()
    t, start = jnp.minimum(at, caches[0].shape[0] - 1), jnp.maximum(start_ref[0], 0)
    read = (*compressed, *caches[:2], *(caches[:2] if shared else caches[2:4]))

    def gate_of(head, branch):
        return gates_ref[3 * head + branch]

    attend(q_ref, gate_of, read, outs, t, start)


class _Launch:
    """What both kernels share: sizes, and what they put out."""

    def __init__(self, rows: int, num_kv: int, group: int, num_cmp: int, cache_shape, h_dim: int, dtype, config, tile):
        capacity, v_dim = cache_shape
        parts, keys, n = tile.pair_parts, tile.pair_keys, config.num_selected
        widths = ranking_widths(blocks.num_selection_blocks(capacity, config.select_block), n)
        sizes = dict(group=group, rows=max(16, pl.next_power_of_2(group)), keys=keys, num_cmp=num_cmp, config=config)
        sizes |= dict(scale=LOG2E * h_dim**-0.5)
        self.grid, self.dtype = (parts, num_kv, rows), dtype
        self.options = dict(num_warps=tile.num_warps, num_stages=tile.pair_stages)
        shapes: list[tuple[tuple[int, ...], Any]] = [((n,), jnp.int32)]
        if tile.pair_tiles:
            self.attend = functools.partial(pair_long.attend, tiles=tile.pair_tiles, widths=widths, **sizes)
            shapes += [(shape, jnp.float32) for shape in pair_long.scratch_shapes(group, num_cmp, keys)]
        else:
            self.attend = functools.partial(_attend, parts=parts, widths=widths[-1:], **sizes)
            shapes.append(((pl.cdiv(num_cmp, keys) * keys,), jnp.float32))
        if parts == 1:
            shapes.append(((group, v_dim), dtype))
        self.out_specs = [per_pair(*shape) for shape, _ in shapes]
        for shape in ((group, v_dim), (2, group)) if parts > 1 else ():
            self.out_specs.append(pl.BlockSpec((None, None, 3, None, *shape), lambda s, k, r: (r, k, 0, s, 0, 0)))
            shapes.append(((3, parts, *shape), jnp.float32))
        self.out_shape = [jax.ShapeDtypeStruct((rows, num_kv, *shape), kind) for shape, kind in shapes]

    def output(self, outs, gates):
        """Output [rows, K, G, V] from what the kernel put out behind the list."""
        parts, num_kv, rows = self.grid
        if parts == 1:
            return outs[-1]
        acc, stats = (x.reshape(rows, num_kv, 3 * parts, *x.shape[4:]) for x in outs[-2:])
        # Every part has the whole of the compressed branch.
        branches = (0, 0, 1), (0, parts, 2 * parts), (0, 2 * parts, 3 * parts)
        return combine(gates.reshape(rows, -1, 3), (acc, stats), branches, self.dtype)


def per_pair(*shape):
    """Of an array [rows, K, *shape]."""
    return pl.BlockSpec((None, None, *shape), lambda s, k, r: (r, k, *(0 for _ in shape)))


@functools.partial(jax.jit, static_argnames=("config", "plan"))
def decode_attention(
    query, key_cmp, value_cmp, key_slc, value_slc, key_win, value_win, gates, lengths, config: NSAConfig, segment_start,
    plan: Choice,
):  # fmt: skip
    """See `nsa_jax.decode_attention`; returns the output [B, T, N, V] and the block lists int32 [B, T, K, n]."""
    batch, num_queries, num_heads, h_dim = query.shape
    num_cmp, num_kv, v_dim = value_cmp.shape[1:]
    group, num_rows = num_heads // num_kv, batch * num_queries
    cache_shape = key_slc.shape[1], v_dim
    launch = _Launch(num_rows, num_kv, group, num_cmp, cache_shape, h_dim, query.dtype, config, plan.tiles)
    starts = [] if segment_start is None else [segment_start.astype(jnp.int32).reshape(num_rows, 1)]

    def cache(array):  # one row's and head's slice
        return pl.BlockSpec((None, array.shape[1], None, array.shape[3]), lambda s, k, r: (r // num_queries, 0, k, 0))

    arrays = (key_cmp, value_cmp, key_slc, value_slc, key_win, value_win)
    lists, *outs = triton_call(
        functools.partial(
            _attend_kernel,
            num_starts=len(starts),
            num_queries=num_queries,
            attend=launch.attend,
        ),
        grid=launch.grid,
        in_specs=[
            pl.BlockSpec((1,), lambda s, k, r: (r // num_queries,)),
            *(pl.BlockSpec((None, 1), lambda s, k, r: (r, 0)) for _ in starts),
            per_pair(group, 3),
            per_pair(group, h_dim),
            *map(cache, arrays),
        ],
        out_specs=launch.out_specs,
        out_shape=launch.out_shape,
        name="nsa_decode_pair",
        **launch.options,
    )(
        lengths.astype(jnp.int32),
        *starts,
        gates.reshape(num_rows, num_kv, group, 3),
        query.reshape(num_rows, num_kv, group, h_dim),
        *arrays,
    )
    out = launch.output(outs, gates)
    return out.reshape(batch, num_queries, num_heads, v_dim), lists.reshape(batch, num_queries, num_kv, -1)


@functools.partial(jax.jit, static_argnames=("config", "plan"))
def append_and_attend(
    projected, gate_bias, turn, lengths, segment_start, caches, key_cmp, value_cmp, *, config: NSAConfig, plan: Choice
):
    """`append.append_token` with the mean as compressor, and the attention of the token to the cache that has it.

    Args:
      segment_start: int32 [B].
      The others are `append_token`'s.

    Returns:
      Output [B, 1, N, V], block lists int32 [B, 1, K, n], and the arrays of the cache, as `append_token` orders them.
    """
    batch, num_heads = lengths.shape[0], gate_bias.shape[0]
    num_cmp, num_kv, v_dim = value_cmp.shape[1:]
    h_dim, dtype = key_cmp.shape[3], projected.dtype
    group = num_heads // num_kv
    kept = [array for array in caches if array is not None]
    shared = len(kept) < len(caches)
    cache_shape = caches[0].shape[1], v_dim
    launch = _Launch(batch, num_kv, group, num_cmp, cache_shape, h_dim, dtype, config, plan.tiles)
    arrays = [*kept, key_cmp, value_cmp]
    specs = [pl.BlockSpec((None, x.shape[1], None, x.shape[3]), lambda s, k, b: (b, 0, k, 0)) for x in arrays]
    offsets = append.projection_offsets(num_heads, num_kv, h_dim, v_dim, shared)
    _, gates, *outs = triton_call(
        functools.partial(
            _append_kernel,
            h_dim=h_dim,
            v_dim=v_dim,
            offsets=offsets,
            shared=shared,
            attend=launch.attend,
            config=config,
        ),
        grid=launch.grid,
        in_specs=[
            pl.BlockSpec((1,), lambda s, k, b: (b,)),
            pl.BlockSpec((1,), lambda s, k, b: (b,)),
            pl.BlockSpec((None, projected.shape[1]), lambda s, k, b: (b, 0)),
            pl.BlockSpec((None, 3 * group), lambda s, k, b: (k, 0)),
            pl.BlockSpec((None, 2, h_dim // 2), lambda s, k, b: (b, 0, 0)),
            *specs,
        ],
        out_specs=[per_pair(group, h_dim), per_pair(3 * group), *specs, *launch.out_specs],
        out_shape=[
            jax.ShapeDtypeStruct((batch, num_kv, group, h_dim), dtype),
            jax.ShapeDtypeStruct((batch, num_kv, 3 * group), jnp.float32),
            *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays),
            *launch.out_shape,
        ],
        input_output_aliases={5 + index: 2 + index for index in range(len(arrays))},
        name="nsa_decode_token",
        **launch.options,
    )(lengths, segment_start, projected, gate_bias.reshape(num_kv, 3 * group), turn, *arrays)
    written, (lists, *outs) = outs[: len(arrays)], outs[len(arrays) :]
    out = launch.output(outs, gates).reshape(batch, 1, num_heads, v_dim)
    if shared:
        key_slc, value_slc, key_tail, *compressed = written
        written = [key_slc, value_slc, None, None, key_tail, None, *compressed]
    return out, lists.reshape(batch, 1, num_kv, -1), tuple(written)
