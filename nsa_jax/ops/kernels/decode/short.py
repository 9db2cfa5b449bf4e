"""Decoding of short rows on GPUs in two kernels, where launches take longer than reading does.

  read: every part of every branch at once, the selected branch included: of each of its blocks, listed or not, the
    partial result of a running softmax, because the list is not known yet;
  finish: one program per head makes the list of its group, and adds up the partial results of the compressed blocks,
    of the window and of the listed blocks, in a fixed order.
Lists and outputs are those of step.py, whose four kernels wait for each other and read the listed blocks alone.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from nsa_jax.ops import blocks
from nsa_jax.ops.blocks import NSAConfig
from nsa_jax.ops.decode_tiles import DecodeConfig
from nsa_jax.ops.kernels.decode.ranking import block_importance, column_probabilities, ranking_widths, write_list
from nsa_jax.ops.kernels.decode.softmax_parts import (
    Parts,
    Positions,
    candidate_range,
    partials,
    per_pair,
    query_position,
    read_part,
    selected_part,
    visible_range,
    write_sum,
)
from nsa_jax.ops.kernels.softmax import LOG2E
from nsa_jax.ops.kernels.triton import barrier, triton_call


def _read(query, gate_of, caches, outs, t, start, *, block_keys, cut, group, scale, config, **sizes):
    """One part of a branch: the programs of `read_part` come first, then those of blocks.

    The arguments are those of `pair._attend`; outs are partial output [G, V], stats [2, G], base-2 scores
    [G, C + padding].
    """
    del gate_of
    block, common = pl.program_id(0) - sum(cut), dict(group=group, scale=scale, config=config)
    read_part(query, caches, outs, pl.program_id(0), cut, t, start, **sizes, **common)

    @pl.when(block >= 0)
    def _block():
        begin = block * config.select_block
        visible = (begin <= t) & (begin + config.select_block > start)
        end, refs = visible.astype(jnp.int32), (*caches[2:4], *outs[:2])
        barrier()  # a token that this program has written may be the block's last
        selected_part(query, refs, lambda i: block, jnp.int32(0), end, t, start, keys=block_keys, **common)


def _finish_kernel(*refs, num_starts, num_queries, capacity, group, columns, width, num_cmp, cut, config: NSAConfig):
    """The list of a head's group, and the head's output.

    refs: lengths [1], segment_start [1] if packed, gates [3], stats of the compressed parts [parts, 2, G], scores
    [G, C + padding], partial outputs [parts, V] and stats [parts, 2] of the head; out: output [V], list [n],
    probabilities [C + padding].
    """
    gates_ref, group_stats_ref, s_ref, acc_ref, stats_ref, o_ref, list_ref, sum_ref = refs[1 + num_starts :]
    t, start = query_position(refs[0], refs[1 : 1 + num_starts], num_queries, capacity)
    low, high = visible_range(t, start, num_cmp, config)
    column_probabilities(group_stats_ref, s_ref, sum_ref, 0, low, high, group, columns, cut[0])
    barrier()
    num_blocks = blocks.num_selection_blocks(capacity, config.select_block)
    compressed_end, window_end = cut[0], sum(cut)
    gates = [gates_ref[i].astype(jnp.float32) for i in range(3)]
    # All that the sum may need is on its way while blocks are ranked.
    compressed = Parts.load(acc_ref, stats_ref, 0, compressed_end)
    listed = Parts.load(acc_ref, stats_ref, window_end, window_end + num_blocks, width)
    window = Parts.load(acc_ref, stats_ref, compressed_end, window_end)
    first, last = candidate_range(t, start, config)
    scores = block_importance(sum_ref, width, low, high, num_cmp, config)
    chosen = write_list(scores, list_ref, first, last, num_blocks, config)  # the same by every head of the group
    listed = listed._replace(inside=listed.inside & chosen)
    # In the order in which step.py adds them up.
    write_sum(o_ref, list(zip((compressed, listed, window), gates, strict=True)))


class Launch:
    """Both kernels; see launch.py."""

    name = "nsa_decode_read"
    early_keys = 0  # see pair.py

    def __init__(self, rows, num_kv, group, num_cmp, capacity, dims, dtype, config: NSAConfig, tile: DecodeConfig):
        """The arguments are sizes: `rows` is B * T, num_cmp is C, capacity is S, and dims are (H, V)."""
        h_dim, self.v_dim = dims
        num_blocks = blocks.num_selection_blocks(capacity, config.select_block)
        (self.width,) = ranking_widths(num_blocks, config.num_selected)[-1:]
        cut = tile.compressed_parts, tile.window_parts
        self.parts, self.columns = sum(cut) + num_blocks, max(tile.keys, pl.next_power_of_2(num_cmp), 16)
        self.dtype, self.cut, self.group, self.capacity, self.config = dtype, cut, group, capacity, config
        self.sizes = dict(group=group, num_cmp=num_cmp, cut=cut, config=config)
        self.grid = (self.parts, num_kv, rows)
        self.options = dict(num_warps=tile.num_warps, num_stages=tile.num_stages)
        self.attend = functools.partial(
            _read,
            keys=tile.keys,
            block_keys=min(tile.keys, max(16, pl.next_power_of_2(config.select_block))),
            window_keys=tile.window_keys,
            scale=LOG2E * h_dim**-0.5,
            **self.sizes,
        )
        specs, shapes = partials(rows, num_kv, self.parts, group, self.v_dim)
        self.out_specs = [*specs, per_pair(group, self.columns)]
        self.out_shape = [*shapes, jax.ShapeDtypeStruct((rows, num_kv, group, self.columns), jnp.float32)]

    def needs(self, t, start):
        """Whether the program reads the token at position t, and whether it reads compressed blocks."""
        part, (compressed, window) = pl.program_id(0), self.cut
        newest = part - sum(self.cut) == t // self.config.select_block
        return newest | ((part >= compressed) & (part < compressed + window)), part < compressed

    def finish(self, outs, query, gates, caches, where: Positions):
        """Output [rows, N, V] and lists [rows, K, n] from what the first kernel put out and gates [rows, N, 3]."""
        del query, caches
        acc, stats, scores = outs
        group, columns, v_dim, parts = self.group, self.columns, self.v_dim, self.parts
        _, num_kv, rows = self.grid
        n, num_heads = self.config.num_selected, num_kv * group
        # As few as have registers for all parts and scores: warps that share a tile wait for each other in every sum.
        numbers = (self.width + sum(map(pl.next_power_of_2, self.cut))) * v_dim + pl.next_power_of_2(group) * columns

        def of_group(*shape):
            return pl.BlockSpec((None, None, *shape), lambda s, h, r: (r, h // group, *(0 for _ in shape)))

        def of_head(*shape):
            return pl.BlockSpec((None, None, *shape), lambda s, h, r: (r, h, *(0 for _ in shape)))

        sizes = dict(num_starts=len(where.starts), num_queries=where.num_queries, capacity=self.capacity)
        out, lists, _ = triton_call(
            functools.partial(_finish_kernel, columns=columns, width=self.width, **sizes, **self.sizes),
            grid=(1, num_heads, rows),
            in_specs=[
                *where.specs(),
                of_head(3),
                of_group(self.cut[0], 2, group),
                of_group(group, columns),
                pl.BlockSpec((None, None, parts, None, v_dim), lambda s, h, r: (r, h // group, 0, h % group, 0)),
                pl.BlockSpec((None, None, parts, 2, None), lambda s, h, r: (r, h // group, 0, 0, h % group)),
            ],
            out_specs=[of_head(v_dim), of_group(n), of_head(columns)],
            out_shape=[
                jax.ShapeDtypeStruct((rows, num_heads, v_dim), self.dtype),
                jax.ShapeDtypeStruct((rows, num_kv, n), jnp.int32),
                jax.ShapeDtypeStruct((rows, num_heads, columns), jnp.float32),
            ],
            num_warps=min(pl.next_power_of_2(pl.cdiv(numbers, 4096)), 8),
            num_stages=1,
            name="nsa_decode_finish",
        )(*where.arrays(), gates, stats, scores, acc, stats)
        return out, lists
