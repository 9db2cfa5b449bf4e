"""What the kernels of decoding share: a running softmax over one part of the keys, and the sum of the parts."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from nsa_jax.ops import blocks
from nsa_jax.ops.blocks import NSAConfig
from nsa_jax.ops.kernels.softmax import MINUS_INFINITY, accumulate, score_products
from nsa_jax.ops.kernels.triton import barrier, pieces, triton_call


def iota(size: int) -> jax.Array:
    return lax.broadcasted_iota(jnp.int32, (size,), 0)


def query_position(lengths_ref, start_refs, num_queries: int, capacity: int | None):
    """Position and segment start of this program's query; the last grid axis runs over B * T.

    A row that claims more tokens than the cache holds is read up to its end: nothing outside the cache is touched. A
    ring has no such end, and no capacity.
    """
    length = lengths_ref[0] if capacity is None else jnp.minimum(lengths_ref[0], capacity)
    t = length - num_queries + pl.program_id(2) % num_queries
    return t, jnp.maximum(start_refs[0][0], 0) if start_refs else jnp.int32(0)


class Positions(NamedTuple):
    """Where the queries of a batch are: int32 lengths [B], and segment starts [B * T, 1] if rows are packed."""

    lengths: jax.Array
    starts: tuple[jax.Array, ...]
    num_queries: int

    @classmethod
    def of(cls, lengths, segment_start, num_queries: int) -> Positions:
        """segment_start: int [B, T], or None."""
        starts = () if segment_start is None else (segment_start.astype(jnp.int32).reshape(-1, 1),)
        return cls(lengths.astype(jnp.int32), starts, num_queries)

    def arrays(self) -> tuple[jax.Array, ...]:
        """What a kernel reads for `query_position`."""
        return (self.lengths, *self.starts)

    def specs(self) -> list[pl.BlockSpec]:
        """Specs of `arrays` where the last grid axis runs over B * T."""
        count = self.num_queries
        length = pl.BlockSpec((1,), lambda s, k, r: (r // count,))
        return [length, *(pl.BlockSpec((None, 1), lambda s, k, r: (r, 0)) for _ in self.starts)]


def per_pair(*shape: int) -> pl.BlockSpec:
    """Of an array [rows, K, *shape]."""
    return pl.BlockSpec((None, None, *shape), lambda s, k, r: (r, k, *(0 for _ in shape)))


def part_of(count, parts, part):
    """[begin, end) of the part-th of `parts` nearly equal ones of `count` steps."""
    each = pl.cdiv(count, parts)
    begin = jnp.minimum(part * each, count)
    return begin, jnp.minimum(begin + each, count)


def query_rows(group: int) -> int:
    """How many rows a tile of a group's queries has: a product of Triton has at least 16."""
    return max(16, pl.next_power_of_2(group))


class PartSoftmax:
    """A running softmax over tiles of keys for the G query heads of one group, padded to `query_rows`.

    `query` is a reference to [G, H], or the tile itself in `pieces` of H.
    """

    def __init__(self, query, *, group: int, keys: int, v_dim: int, scale: float):
        rows = query_rows(group)
        self.head = jnp.minimum(iota(rows), group - 1)
        if not isinstance(query, list):
            query = [query[self.head, pl.ds(at, size)] for at, size in pieces(query.shape[-1])]
        self.q = query
        self.v_dim, self.rows, self.keys, self.scale = v_dim, rows, keys, scale

    def init(self):
        acc = tuple(jnp.zeros((self.rows, size), jnp.float32) for _, size in pieces(self.v_dim))
        # One sum per column: adding the columns up would make the warps wait for each other in every step.
        total = jnp.zeros((self.rows, self.keys), jnp.float32)
        return acc, jnp.full((self.rows,), MINUS_INFINITY, jnp.float32), total

    def scores(self, load_key, visible):
        """Base-2 scores [rows, keys] of keys [keys, H], whose columns come from a function of (offset, width)."""
        scores = score_products(self.q, load_key)
        return jnp.where(visible[None, :], scores * self.scale, MINUS_INFINITY)

    def step(self, carry, k_ref, v_ref, slots, visible):
        """Adds the keys at rows `slots` of which `visible` count; returns what `add` does."""
        load_key, load_value = (lambda at, size, ref=ref: ref[slots, pl.ds(at, size)] for ref in (k_ref, v_ref))
        return self.add(carry, load_key, load_value, v_ref.dtype, visible)

    def add(self, carry, load_key, load_value, dtype, visible):
        """Adds keys [keys, H] and values [keys, V], whose columns come from functions of (offset, width).

        Returns:
          The carry, base-2 scores [rows, keys] and weights [rows, keys], which are relative to the carry's peak.
        """
        acc, peak, total = carry
        scores = self.scores(load_key, visible)
        new_peak = jnp.maximum(peak, scores.max(1))
        alpha = jnp.exp2(peak - new_peak)
        weights = jnp.where(visible[None, :], jnp.exp2(scores - new_peak[:, None]), 0.0)
        total = total * alpha[:, None] + weights
        acc = accumulate(acc, alpha, weights.astype(dtype), load_value, self.v_dim)
        return (acc, new_peak, total), scores, weights

    def store(self, carry, acc_ref, stats_ref):
        """Into acc_ref [G, V] the unnormalised output, into stats_ref [2, G] peak and sum (padding repeats a row)."""
        acc, peak, total = carry
        for a, (at, size) in zip(acc, pieces(self.v_dim), strict=True):
            acc_ref[self.head, pl.ds(at, size)] = a
        stats_ref[0, self.head] = peak
        stats_ref[1, self.head] = total.sum(1)


def write_gated_sum(out_ref, softmax: PartSoftmax, branches, gate_of):
    """Writes the output [G, V] of a group: the sum of branches, each the carry of a whole softmax, times their gates.

    gate_of: (heads [rows], branch) -> gates [rows].
    """
    totals = [total.sum(1) for _, _, total in branches]
    weights = [gate_of(softmax.head, i) / jnp.where(total > 0, total, 1.0) for i, total in enumerate(totals)]
    for index, (at, size) in enumerate(pieces(softmax.v_dim)):
        weighted = [weight[:, None] * acc[index] for weight, (acc, _, _) in zip(weights, branches, strict=True)]
        out_ref[softmax.head, pl.ds(at, size)] = sum(weighted).astype(out_ref.dtype)


def visible_range(t, start, num_cmp: int, config: NSAConfig):
    """The compressed blocks that a query sees and the cache holds, [low, high)."""
    low, high = blocks.compressed_range(t, start, config)
    return jnp.maximum(low, 0), jnp.minimum(high, num_cmp)


def candidate_range(t, start, config: NSAConfig):
    """First and last candidate of the selected branch, 0 and -1 if there is none."""
    first, last = blocks.candidate_range(jnp.maximum(t, 0), start, config.select_block)
    some = (start <= t) & (t >= 0)
    return jnp.where(some, first, 0), jnp.where(some, last, -1)


def compressed_part(query, refs, part, parts, t, start, *, group, keys, num_cmp, scale, config: NSAConfig):
    """The part-th part of the compressed blocks.

    query is that of `PartSoftmax`; refs: key [C, H], value [C, V], partial output, stats, base-2 scores
    [G, C + padding] if wanted.
    """
    k_ref, v_ref, acc_ref, stats_ref, *s_refs = refs
    softmax = PartSoftmax(query, group=group, keys=keys, v_dim=v_ref.shape[-1], scale=scale)
    low, high = visible_range(t, start, num_cmp, config)
    first, count = compressed_tiles(low, high, keys)
    begin, end = part_of(count, parts, part)

    def body(i, carry):
        carry, scores, _ = compressed_step(softmax, carry, i, k_ref, v_ref, low, high)
        for s_ref in s_refs:
            s_ref[softmax.head, pl.ds(i * keys, keys)] = scores
        return carry

    softmax.store(lax.fori_loop(first + begin, first + end, body, softmax.init()), acc_ref, stats_ref)


def compressed_tiles(low, high, keys: int):
    """The first tile of `keys` compressed blocks that holds some of [low, high), and how many tiles do.

    Tiles begin at multiples of their size, so that what is stored for each block is aligned.
    """
    first = low // keys
    return first, jnp.where(high > low, pl.cdiv(high, keys) - first, 0)


def compressed_step(softmax: PartSoftmax, carry, i, k_ref, v_ref, low, high):
    """Adds those of the compressed blocks [low, high) that the i-th tile holds; returns what `PartSoftmax.add` does."""
    index = i * softmax.keys + iota(softmax.keys)
    visible = (index >= low) & (index < high)
    return softmax.step(carry, k_ref, v_ref, jnp.minimum(index, k_ref.shape[0] - 1), visible)


def window_part(query, refs, part, parts, t, start, *, group, keys, scale, config: NSAConfig):
    """The part-th part of the window; refs: key [W, H], value [W, V], partial output, stats."""
    k_ref, v_ref, acc_ref, stats_ref = refs
    softmax = PartSoftmax(query, group=group, keys=keys, v_dim=v_ref.shape[-1], scale=scale)
    begin, end = part_of(window_tiles(t, start, keys, config), parts, part)
    softmax.store(attend_window(softmax, k_ref, v_ref, begin, end, t, start, config), acc_ref, stats_ref)


def read_part(query, caches, outs, part, cut, t, start, *, keys, window_keys, num_cmp, **sizes):
    """What needs no list: the first of `cut` parts are those of the compressed blocks, the others the window's.

    Args:
      query, caches, t, start: those of `pair._attend`.
      outs: references to partial output [G, V], stats [2, G] and, if wanted, base-2 scores [G, C + padding].
      part: which one this is; what is neither leaves the program to its caller.
    """
    kc_ref, vc_ref, _, _, kw_ref, vw_ref = caches
    compressed_parts, window_parts = cut

    @pl.when(part < compressed_parts)
    def _compressed():
        refs = (kc_ref, vc_ref, *outs)
        compressed_part(query, refs, part, compressed_parts, t, start, keys=keys, num_cmp=num_cmp, **sizes)

    @pl.when((part >= compressed_parts) & (part < compressed_parts + window_parts))
    def _window():
        barrier()  # a token that this program has written is the window's last
        refs = (kw_ref, vw_ref, *outs[:2])
        window_part(query, refs, part - compressed_parts, window_parts, t, start, keys=window_keys, **sizes)


def window_tiles(t, start, keys: int, config: NSAConfig):
    """How many tiles of `keys` keys the window of a query has."""
    return pl.cdiv(jnp.minimum(jnp.maximum(t + 1 - start, 0), config.window), keys)


def attend_window(softmax: PartSoftmax, k_ref, v_ref, begin, end, t, start, config: NSAConfig):
    """Attention to tiles [begin, end) of the window."""
    low, keys = jnp.maximum(start, t - config.window + 1), softmax.keys

    def body(i, carry):
        position = low + i * keys + iota(keys)
        return softmax.step(carry, k_ref, v_ref, position % k_ref.shape[0], position <= t)[0]

    return lax.fori_loop(begin, end, body, softmax.init())


def attend_listed(softmax: PartSoftmax, k_ref, v_ref, list_ref, begin, end, t, start, config: NSAConfig):
    """Attention to the blocks of list_ref [n] from the begin-th up to the end-th, which is left out."""
    keys, width = softmax.keys, pl.next_power_of_2(config.select_block)
    at_once, last = max(keys // width, 1), end - 1  # blocks per tile; behind the last one lies the list's padding
    steps = pl.cdiv(width, keys)  # tiles per block

    def body(i, carry):
        i, column = jnp.int32(i), iota(keys)  # Triton's lowering refuses `i % steps` of two weakly typed values
        first = begin + i // steps * at_once
        block, entry = list_ref[jnp.minimum(first, last)], jnp.full((keys,), first, jnp.int32)
        for j in range(1, at_once):
            later = column >= j * width
            block = jnp.where(later, list_ref[jnp.minimum(first + j, last)], block)
            entry = jnp.where(later, first + j, entry)
        offset = column % width + i % steps * keys
        position = block * config.select_block + _within_block(offset, width, config)
        visible = (offset < config.select_block) & (entry < end) & (position >= start) & (position <= t)
        return softmax.step(carry, k_ref, v_ref, jnp.clip(position, 0, k_ref.shape[0] - 1), visible)[0]

    count = pl.cdiv(jnp.maximum(end - begin, 0), at_once) * steps
    return lax.fori_loop(0, count, body, softmax.init())


def _within_block(offset, width: int, config: NSAConfig):
    """Offsets in a tile of `width` keys; behind the block its last one, because the next block may be half written."""
    return offset if width == config.select_block else jnp.minimum(offset, config.select_block - 1)


def selected_part(query, refs, block_of, begin, end, t, start, *, group, keys, scale, config: NSAConfig):
    """The blocks block_of(begin) to block_of(end - 1) of the selected branch.

    refs: key [S, H], value [S, V], partial output, stats.
    """
    k_ref, v_ref, acc_ref, stats_ref = refs
    softmax = PartSoftmax(query, group=group, keys=keys, v_dim=v_ref.shape[-1], scale=scale)
    steps = pl.cdiv(config.select_block, keys)

    def body(i, carry):
        offset = (i % steps) * keys + iota(keys)
        position = block_of(i // steps) * config.select_block + _within_block(offset, steps * keys, config)
        visible = (offset < config.select_block) & (position >= start) & (position <= t)
        return softmax.step(carry, k_ref, v_ref, jnp.clip(position, 0, k_ref.shape[0] - 1), visible)[0]

    softmax.store(lax.fori_loop(begin * steps, end * steps, body, softmax.init()), acc_ref, stats_ref)


class Parts(NamedTuple):
    """The partial results of one branch for one head, padded to a power of two of them.

    `inside` [parts] says which count, `outputs` are the pieces of [parts, V]; peaks and sums are [parts].
    """

    inside: jax.Array
    peaks: jax.Array
    sums: jax.Array
    outputs: list[jax.Array]

    @classmethod
    def load(cls, acc_ref, stats_ref, begin: int, end: int, width: int | None = None) -> Parts:
        """Parts [begin, end) of acc_ref [parts, V] and stats_ref [parts, 2], padded to `width` of them."""
        index = begin + iota(width or pl.next_power_of_2(end - begin))
        inside, index = index < end, jnp.minimum(index, end - 1)
        outputs = [acc_ref[index, pl.ds(at, size)] for at, size in pieces(acc_ref.shape[-1])]
        return cls(inside, stats_ref[index, 0], stats_ref[index, 1], outputs)

    def add_to(self, outs, gate):
        """Adds the branch to the output of the head, a list of its pieces."""
        peaks = jnp.where(self.inside, self.peaks, MINUS_INFINITY)
        weight = jnp.where(self.inside, jnp.exp2(peaks - peaks.max()), 0.0)
        total = jnp.where(self.inside, weight * self.sums, 0.0).sum()  # NaN where nothing counts does not spread
        weight = weight * (gate / jnp.where(total > 0, total, 1.0))
        return [
            out + jnp.where(self.inside[:, None], acc * weight[:, None], 0.0).sum(0)
            for out, acc in zip(outs, self.outputs, strict=True)
        ]


def write_sum(o_ref, branches):
    """Writes the output [V] of one head: the sum of branches, pairs of `Parts` and gate, in their order."""
    widths = pieces(o_ref.shape[0])
    outs = [jnp.zeros((size,), jnp.float32) for _, size in widths]
    for parts, gate in branches:
        outs = parts.add_to(outs, gate)
    for out, (at, size) in zip(outs, widths, strict=True):
        o_ref[pl.ds(at, size)] = out.astype(o_ref.dtype)


def _combine_kernel(*refs, branches):
    """The sum of the branches for one head.

    refs: gates [branches] if there are several, then partial outputs [parts, V] and stats [parts, 2] for every group
    of parts; out: [V]. A branch is (group, first part, end).
    """
    gates_ref, groups = (refs[0], refs[1:-1]) if len(branches) > 1 else (None, refs[:-1])
    gates = [1.0 if gates_ref is None else gates_ref[i].astype(jnp.float32) for i in range(len(branches))]
    # All are loaded before the first is added, so that their latencies overlap.
    parts = [Parts.load(groups[2 * group], groups[2 * group + 1], begin, end) for group, begin, end in branches]
    write_sum(refs[-1], list(zip(parts, gates, strict=True)))


def combine(gates, partials, branches, dtype):
    """Output [rows, N, V] from gates [rows, N, branches] or None and partial results, a pair for every group."""
    num_rows, num_kv, _, group, v_dim = partials[0].shape
    # One warp, if it has registers for all parts: several would wait for each other in every sum.
    numbers = sum(pl.next_power_of_2(end - begin) for _, begin, end in branches) * v_dim
    specs = []
    for acc in partials[::2]:  # all parts of one head
        parts = acc.shape[2]
        specs.append(pl.BlockSpec((None, None, parts, None, v_dim), lambda h, r: (r, h // group, 0, h % group, 0)))
        specs.append(pl.BlockSpec((None, None, parts, 2, None), lambda h, r: (r, h // group, 0, 0, h % group)))
    arrays = list(partials)
    if gates is not None:
        specs.insert(0, pl.BlockSpec((None, None, len(branches)), lambda h, r: (r, h, 0)))
        arrays.insert(0, gates)
    return triton_call(
        functools.partial(_combine_kernel, branches=branches),
        grid=(num_kv * group, num_rows),
        in_specs=specs,
        out_specs=pl.BlockSpec((None, None, v_dim), lambda h, r: (r, h, 0)),
        out_shape=jax.ShapeDtypeStruct((num_rows, num_kv * group, v_dim), dtype),
        num_warps=1 if numbers <= 4096 else 4,
        num_stages=1,
        name="nsa_decode_combine",
    )(*arrays)


def partials(num_rows, num_kv, parts, group, v_dim):
    """Partial outputs and stats of every share: specs to write one, and shapes."""
    specs = [
        pl.BlockSpec((None, None, None, group, v_dim), lambda s, k, r: (r, k, s, 0, 0)),
        pl.BlockSpec((None, None, None, 2, group), lambda s, k, r: (r, k, s, 0, 0)),
    ]
    shapes = [
        jax.ShapeDtypeStruct((num_rows, num_kv, parts, group, v_dim), jnp.float32),
        jax.ShapeDtypeStruct((num_rows, num_kv, parts, 2, group), jnp.float32),
    ]
    return specs, shapes
