"""Block selection on GPUs: importance of selection blocks from the log-sum-exp, then the top n (paper eq. 8 to 12).

The scores kernel keeps a tile of compressed keys and walks over the G query heads, whose probabilities it adds up; the
mask and the fold into selection blocks come after that sum, once per tile, as float32 sums. The top-n kernel finds the
n-th largest score of a row by bisection on the float32 bits (`blocks.rank_bits`) and compacts what lies above it in
ascending order.

The scores are a [T, J] buffer, so query ranges are processed one after the other within a bounded buffer.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from nsa_jax.ops import blocks
from nsa_jax.ops import tiles as tuning
from nsa_jax.ops.blocks import NSAConfig
from nsa_jax.ops.kernels.selection import scores_sm90
from nsa_jax.ops.kernels.softmax import LOG2E
from nsa_jax.ops.kernels.triton import dot, interpreted, pieces, triton_call
from nsa_jax.ops.target import current_target


def _exp2(x: jax.Array) -> jax.Array:
    """2**x with results below 2^-126 flushed to 0: one instruction where the exact one needs four."""
    if interpreted():
        return jnp.exp2(x)
    (out,) = pltriton.elementwise_inline_asm(
        "ex2.approx.ftz.f32 $0, $1;",
        args=[x],
        constraints="=f,f",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(x.shape, x.dtype)],
    )
    return out


@dataclasses.dataclass(frozen=True)
class _Fold:
    """How a tile of compressed blocks folds into selection blocks: constants of the geometry.

    Selection block j gathers the `reach + per_block` compressed blocks from j * per_block - reach on (`reach` is
    l / d - 1). The first per_block of them are group j, the others the head of group j + 1, so one group contributes
    to two selection blocks: the scores are two planes, own[j] and head[j + 1], that the top-n kernel adds.

    Attributes:
      per_block: l' / d.
      reach: l / d - 1; without it there is one plane.
      padded: per_block rounded up to a power of two; a tile row beyond per_block repeats another with weight 0.
    """

    per_block: int
    reach: int
    padded: int
    weights: tuple[int, ...]

    @classmethod
    def of(cls, config: NSAConfig) -> _Fold:
        per_block = config.select_block // config.compress_stride
        weights = tuple(int(w) for w in blocks.fold_weights(config))
        return cls(per_block, len(weights) - per_block, pl.next_power_of_2(per_block), weights)

    @property
    def planes(self) -> int:
        return 2 if self.reach else 1

    def split_rows(self, rows: int) -> tuple[int, ...]:
        """Shape (member high bit, block high bits, member low bits, block low bits) of a tile's rows.

        Row 64 * i + 16 * w + 8 * h + r of a matrix product sits in warp w, lane group r of a GPU; i and h are
        registers of one thread. With members (i, h) a group of 4 is summed without leaving its thread.
        """
        if self.padded in (2, 4) and rows >= 16 * self.padded:
            high = self.padded // 2
            return high, rows // (16 * high), 2, 8
        return 1, rows // self.padded, self.padded, 1

    def locate(self, rows: int) -> tuple[jax.Array, jax.Array]:
        """(selection block in the tile, member of its group) of every tile row, both int32 [rows]."""
        high, outer, low, inner = self.split_rows(rows)
        row = lax.broadcasted_iota(jnp.int32, (rows,), 0)
        member = row // (rows // high) * low + row // inner % low
        block = row // (low * inner) % outer * inner + row % inner
        return block, member

    def member_weights(self, member: jax.Array, plane: int) -> jax.Array:
        """Weight of each group member in `own` (plane 0) or `head` (plane 1), as blocks.fold_weights."""
        position = member + plane * self.per_block
        weight = jnp.minimum(jnp.minimum(position + 1, len(self.weights) - position), max(self.weights))
        inside = member < (self.reach if plane else self.per_block)
        return jnp.where(inside, weight, 0).astype(jnp.float32)

    def add_groups(self, total: jax.Array) -> jax.Array:
        """Sums tile rows [rows, queries] over the members of each group: [rows / padded, queries]."""
        rows, queries = total.shape
        high, outer, low, inner = self.split_rows(rows)
        total = total.reshape(high, outer, low, inner, queries).sum(2)
        return total.sum(0).reshape(outer * inner, queries)


def _scores_kernel(*refs, tile, config: NSAConfig, num_heads, num_cmp, length, scale, packed):
    """Importance of the selection blocks of one key tile for one query tile.

    refs: where = (position of query 0, first query of this buffer) [2], query [T, G, H], key [C, H], base-2 lse [G, T]
    (+inf for rows that see nothing), segment_start [T] if packed; out: scores [planes, queries of the buffer, width].
    """
    where_ref, q_ref, k_ref, lse_ref, *start_refs, out_ref = refs
    fold = _Fold.of(config)
    width = tile.keys // fold.padded
    offset, first_row = where_ref[0], where_ref[1]
    tile_row = pl.program_id(1) * tile.queries
    rows = jnp.minimum(first_row + tile_row + lax.broadcasted_iota(jnp.int32, (tile.queries,), 0), length - 1)
    position = offset + rows
    start = start_refs[0][rows] if packed else jnp.zeros_like(rows)
    block = pl.program_id(0) * width
    # Forced blocks are taken whatever their scores, so tiles that hold nothing else are skipped.
    last_row = jnp.minimum(first_row + tile_row + tile.queries, length) - 1
    last = (offset + last_row) // config.select_block - config.num_local
    needed = block < last + fold.planes
    if packed:
        needed &= block + width > jnp.min(start) // config.select_block + config.num_initial

    @pl.when(needed)
    def _():
        local, member = fold.locate(tile.keys)
        column = (block + local) * fold.per_block + member - fold.reach
        key_rows = jnp.clip(column, 0, num_cmp - 1)
        parts = pieces(k_ref.shape[-1])
        keys = [k_ref[key_rows, pl.ds(at, size)] for at, size in parts]

        def head(g, total):
            scores = None
            for key, (at, size) in zip(keys, parts, strict=True):
                part = dot(key, q_ref[rows, g, pl.ds(at, size)], (1, 1))  # [keys, queries]
                scores = part if scores is None else scores + part
            return total + _exp2(scores * scale - lse_ref[g, rows][None, :])

        total = lax.fori_loop(0, num_heads, head, jnp.zeros((tile.keys, tile.queries), jnp.float32))
        low, high = blocks.compressed_range(position, start, config)
        low, high = jnp.maximum(low, 0), jnp.minimum(high, num_cmp)
        visible = (column[:, None] >= low[None, :]) & (column[:, None] < high[None, :])
        total = jnp.where(visible, total, 0.0)
        for plane in range(fold.planes):
            folded = fold.add_groups(total * fold.member_weights(member, plane)[:, None])  # [width, queries]
            out_ref[plane, pl.ds(tile_row, tile.queries), pl.ds(block, width)] = folded.T


def _select_rows(s_ref, out_ref, first, last, width: int, num_blocks: int, config: NSAConfig):
    """Writes the lists of a program's rows, whose candidates [first, last] all lie in the first `width` blocks.

    A list is the initial blocks, then those chosen by score, which lie between, then the local ones, then padding.
    """
    n = config.num_selected
    rows = first.shape[0]
    candidates = last - first + 1
    initial = jnp.minimum(candidates, config.num_initial)
    local = jnp.minimum(candidates - initial, config.num_local)
    free = candidates - initial - local
    want = jnp.minimum(free, n - initial - local)  # how many are chosen by score

    groups = pl.next_power_of_2(n)
    row = lax.broadcasted_iota(jnp.int32, (rows, groups), 0)
    slot = lax.broadcasted_iota(jnp.int32, (rows, groups), 1)
    behind = slot - (initial + want)[:, None]
    entry = jnp.where(behind < local[:, None], (last - local + 1)[:, None] + behind, num_blocks)
    entry = jnp.where(slot < initial[:, None], first[:, None] + slot, entry)
    known = ((slot < initial[:, None]) | (behind >= 0)) & (slot < n)
    pltriton.store(out_ref.at[row, jnp.where(known, slot, n)], entry, mask=known)

    parts = pieces(width)
    columns = [at + lax.broadcasted_iota(jnp.int32, (rows, size), 1) for at, size in parts]

    def bits_of(j, at, size):
        """A part's scores as integers of the same order, -1 where a block cannot be chosen by score."""
        scores = s_ref[0, :, pl.ds(at, size)]
        if s_ref.shape[0] > 1:
            scores += s_ref[1, :, pl.ds(at + 1, size)]
        from_first = j - (first + initial)[:, None]
        return jnp.where((from_first >= 0) & (from_first < free[:, None]), blocks.rank_bits(scores), -1)

    bits = [bits_of(j, *part) for j, part in zip(columns, parts, strict=True)]

    def most(values):
        return functools.reduce(jnp.maximum, values)

    def at_least(threshold):
        return sum(jnp.sum((part >= threshold[:, None]).astype(jnp.int32), axis=1) for part in bits)

    # Bisection keeps at_least(low) >= want > at_least(high). The least of at least `want` group maxima is such a low.
    if width > groups and parts[-1][1] >= groups:
        maxima = most(jnp.max(part.reshape(rows, part.shape[1] // groups, groups), axis=1) for part in bits)
        low = jnp.maximum(jnp.min(maxima, axis=1), 0)
    else:
        low = jnp.zeros_like(first)
    high = most(jnp.max(part, axis=1) for part in bits) + 1
    low = jnp.where(want > 0, low, high)

    def unresolved(carry):
        low, high, count = carry
        return jnp.max(((count > want) & (high - low > 1)).astype(jnp.int32)) > 0

    def halve(carry):
        low, high, count = carry
        middle = low + (high - low) // 2
        above = at_least(middle)
        keep = above >= want
        return jnp.where(keep, middle, low), jnp.where(keep, high, middle), jnp.where(keep, above, count)

    low, _, count = lax.while_loop(unresolved, halve, (low, high, at_least(low)))

    def numbered(flags):
        """Running count of flags, int32 parts, from the first part's first column on."""
        before, counts = jnp.zeros((rows, 1), jnp.int32), []
        for part in flags:
            counts.append(before + lax.cumsum(part, axis=1))
            before += jnp.sum(part, axis=1)[:, None]
        return counts

    def drop_ties():
        """Of the blocks that score exactly the threshold, the ones with the lowest indices."""
        room = (want - at_least(low + 1))[:, None]
        tied = [(part == low[:, None]).astype(jnp.int32) for part in bits]
        kept = [tie * (number <= room) for tie, number in zip(tied, numbered(tied), strict=True)]
        return tuple((part > low[:, None]).astype(jnp.int32) + keep for part, keep in zip(bits, kept, strict=True))

    def all_of_them():
        return tuple((part >= low[:, None]).astype(jnp.int32) for part in bits)

    chosen = lax.cond(jnp.max(count - want) > 0, drop_ties, all_of_them)
    for j, part, number in zip(columns, chosen, numbered(chosen), strict=True):
        row = lax.broadcasted_iota(jnp.int32, j.shape, 0)
        slot = number + (initial - 1)[:, None]
        pltriton.store(out_ref.at[row, jnp.where(part > 0, slot, n)], j, mask=part > 0)


def _top_n_kernel(*refs, rows, widths, config: NSAConfig, length, num_blocks, packed):
    """Block lists of `rows` neighbouring queries.

    refs: where [2] as in `_scores_kernel`, scores [planes, rows, width], segment_start [T] if packed; out: lists
    [rows, n].
    """
    where_ref, s_ref, *start_refs, out_ref = refs
    row = where_ref[1] + pl.program_id(0) * rows + lax.broadcasted_iota(jnp.int32, (rows,), 0)
    row = jnp.minimum(row, length - 1)
    start = start_refs[0][row] if packed else jnp.zeros_like(row)
    first, last = blocks.candidate_range(where_ref[0] + row, start, config.select_block)
    needed = jnp.maximum(jnp.max(last) + 1, 1)  # rows without candidates get a list too
    below = 0
    for width in widths:  # early queries have few candidates: read no more than the next width

        @pl.when((needed > below) & (needed <= width))
        def _(width=width):
            _select_rows(s_ref, out_ref, first, last, width, num_blocks, config)

        below = width


def _widths(num_blocks: int, n: int) -> list[int]:
    """Row widths the top-n kernel is specialised for, ascending; the last one covers every block."""
    top = max(pl.next_power_of_2(num_blocks), pl.next_power_of_2(n), 16)
    return [w for w in range(top // 8, top, max(top // 8, 1)) if w % 128 == 0] + [top]


def _num_scored(num_blocks: int, fold: _Fold, config: NSAConfig) -> int:
    """How many blocks, from 0 on, can need a column of the scores: the last ones are always local."""
    return max(num_blocks - config.num_local + fold.planes - 1, 1)


def _call_scores(scores_tile, where, query, key_cmp, lse2, start, *, rows, width, config, num_blocks):
    """Scores [B * K, planes, rows, width] of the queries from row where[1] on."""
    batch, length, num_heads, head_dim = query.shape
    num_cmp, num_kv = key_cmp.shape[1:3]
    group = num_heads // num_kv
    fold = _Fold.of(config)
    packed = [] if start is None else [start]
    kernel = functools.partial(
        _scores_kernel,
        tile=scores_tile,
        config=config,
        num_heads=group,
        num_cmp=num_cmp,
        length=length,
        scale=LOG2E * head_dim**-0.5,
        packed=bool(packed),
    )
    return triton_call(
        kernel,
        num_warps=scores_tile.num_warps,
        num_stages=scores_tile.num_stages,
        grid=(
            pl.cdiv(_num_scored(num_blocks, fold, config), scores_tile.keys // fold.padded),
            rows // scores_tile.queries,
            batch * num_kv,
        ),
        in_specs=[
            pl.BlockSpec((2,), lambda j, t, b: (0,)),
            pl.BlockSpec((None, length, group, head_dim), lambda j, t, b: (b // num_kv, 0, b % num_kv, 0)),
            pl.BlockSpec((None, num_cmp, None, head_dim), lambda j, t, b: (b // num_kv, 0, b % num_kv, 0)),
            pl.BlockSpec((None, group, length), lambda j, t, b: (b // num_kv, b % num_kv, 0)),
            *(pl.BlockSpec((None, length), lambda j, t, b: (b // num_kv, 0)) for _ in packed),
        ],
        out_specs=pl.BlockSpec((None, fold.planes, rows, width), lambda j, t, b: (b, 0, 0, 0)),
        out_shape=jax.ShapeDtypeStruct((batch * num_kv, fold.planes, rows, width), jnp.float32),
        name="nsa_importance_scores",
    )(where, query, key_cmp, lse2, *packed)


def _hopper_scores(query, key_cmp, lse2, start, query_offset, fold, *, rows, width, config, num_blocks):
    """A function from where [2] to scores [B * K, planes, rows, width], with what all query ranges share prepared."""
    batch, length, *_ = query.shape
    num_scored = _num_scored(num_blocks, fold, config)
    keys = scores_sm90.arrange_keys(key_cmp, fold, num_scored)
    if length % 8:  # TMA copies swizzled tiles of 8 rows
        query = jnp.pad(query, ((0, 0), (0, -length % 8), (0, 0), (0, 0)))
    pad = ((0, 0), (0, -length % scores_sm90.QUERIES))
    lse2 = jnp.pad(lse2, ((0, 0), *pad), constant_values=jnp.inf)
    position = jnp.arange(length, dtype=jnp.int32)[None] + query_offset
    position = jnp.broadcast_to(position, (batch, length))
    low, high = blocks.compressed_range(position, jnp.zeros_like(position) if start is None else start, config)
    low, high = (jnp.pad(jnp.clip(x, 0, key_cmp.shape[1]), pad) for x in (low, high))
    first = None
    if start is not None:
        first = jnp.pad(start, pad, mode="edge").reshape(batch, -1, scores_sm90.QUERIES).min(-1)
        first = first // config.select_block + config.num_initial
    shapes = dict(fold=fold, config=config, rows=rows, width=width, num_scored=num_scored)
    return lambda where: scores_sm90.scores(query, keys, lse2, low, high, where, first, **shapes)


def _call_top_n(where, scores, start, *, batch, num_kv, length, config, num_blocks):
    """Lists [B, rows, K, n] from scores [B * K, planes, rows, width]."""
    planes, rows, width = scores.shape[1:]
    widths = _widths(num_blocks, config.num_selected)
    per_program, num_warps = tuning.top_n_shape(widths[-1])
    packed = [] if start is None else [start]
    kernel = functools.partial(
        _top_n_kernel,
        rows=per_program,
        widths=widths,
        config=config,
        length=length,
        num_blocks=num_blocks,
        packed=bool(packed),
    )
    n = config.num_selected
    return triton_call(
        kernel,
        num_warps=num_warps,
        num_stages=1,
        grid=(rows // per_program, batch * num_kv),
        in_specs=[
            pl.BlockSpec((2,), lambda t, b: (0,)),
            pl.BlockSpec((None, planes, per_program, width), lambda t, b: (b, 0, t, 0)),
            *(pl.BlockSpec((None, length), lambda t, b: (b // num_kv, 0)) for _ in packed),
        ],
        out_specs=pl.BlockSpec((None, per_program, None, n), lambda t, b: (b // num_kv, t, b % num_kv, 0)),
        out_shape=jax.ShapeDtypeStruct((batch, rows, num_kv, n), jnp.int32),
        name="nsa_top_n",
    )(where, scores, *packed)


def select_blocks(query, key_cmp, lse, *, config: NSAConfig, num_keys: int, segment_start=None, query_offset=0):
    """See `nsa_jax.select_blocks`; `num_keys` is S."""
    batch, length, _, head_dim = query.shape
    num_cmp, num_kv = key_cmp.shape[1:3]
    num_blocks = blocks.num_selection_blocks(num_keys, config.select_block)
    fold = _Fold.of(config)
    hopper = num_cmp > 0 and scores_sm90.serves(query, key_cmp, fold, current_target())
    tile = tuning.select_config(length, fold.padded, query.dtype, hopper)
    per_tile = scores_sm90.blocks_per_tile(fold, head_dim) if hopper else tile.keys // fold.padded
    tile_queries = scores_sm90.QUERIES if hopper else tile.queries
    # The top-n kernel reads one block past a row's width from the second plane; TMA writes tiles of 32 columns.
    width = _widths(num_blocks, config.num_selected)[-1] + (32 if hopper else 8)
    width = max(pl.cdiv(num_blocks, per_tile) * per_tile, width)

    # Rows of one buffer: a multiple of both kernels' tiles (the scores tile is at least as tall).
    most = max(tile.chunk_bytes // (batch * num_kv * fold.planes * width * 4) // tile_queries, 1)
    needed = pl.cdiv(length, tile_queries)
    chunks = pl.cdiv(needed, most)
    rows = pl.cdiv(needed, chunks) * tile_queries

    start = None if segment_start is None else segment_start.astype(jnp.int32)
    lse2 = jnp.where(lse == -jnp.inf, jnp.inf, lse.astype(jnp.float32) * LOG2E).swapaxes(1, 2)  # [B, N, T]
    call = dict(config=config, num_blocks=num_blocks)
    if hopper:
        call_scores = _hopper_scores(query, key_cmp, lse2, start, query_offset, fold, rows=rows, width=width, **call)
    elif num_cmp:

        def call_scores(where):
            return _call_scores(tile, where, query, key_cmp, lse2, start, rows=rows, width=width, **call)
    else:

        def call_scores(where):
            return jnp.zeros((batch * num_kv, fold.planes, rows, width), jnp.float32)

    def chunk(index):
        where = jnp.stack([jnp.asarray(query_offset, jnp.int32), index * rows])
        return _call_top_n(where, call_scores(where), start, batch=batch, num_kv=num_kv, length=length, **call)

    if chunks == 1:
        return chunk(jnp.int32(0))[:, :length]
    lists = lax.map(chunk, jnp.arange(chunks, dtype=jnp.int32))  # [chunks, B, rows, K, n]
    lists = jnp.moveaxis(lists, 0, 1).reshape(batch, chunks * rows, num_kv, config.num_selected)
    return lists[:, :length]
