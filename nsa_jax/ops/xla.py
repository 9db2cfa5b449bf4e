"""NSA in plain jnp with memory linear in T: the training path on CPU, the fallback where no kernel serves.

Queries are processed in chunks whose float32 scores fit a fixed budget; a short row is one chunk and no loop. The
backward pass recomputes each chunk's probabilities from the saved log-sum-exp and adds key and value gradients to
float32 accumulators in place, so nothing per chunk survives it.

Three plans say which keys a chunk meets: all of them (compressed; selected on short rows), a band (window), or each
query's own listed blocks (selected on long rows). What a query may use is a half-open range [low, high) of key indices
in all three; the selected plans intersect it with the block lists.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from nsa_jax.ops import blocks
from nsa_jax.ops.blocks import NSAConfig
from nsa_jax.ops.target import current_target

# Elements of one chunk's largest array, of which several are alive at once. On a CPU they should stay in cache (4 MiB
# of float32 was twice as fast as 64 MiB); on a GPU every step of the loop should keep the device busy.
_CHUNK_ELEMENTS = {"cpu": 2**20}
_CHUNK_ELEMENTS_ELSEWHERE = 2**24
# Up to this many times n * l' keys, masked matrix products over all keys beat gathering each query's blocks.
_DENSE_FACTOR = 4


def _explicit_layout(array) -> NamedSharding | None:
    """The sharding of an array on a mesh with explicit axes, else None. The mesh need not be in context."""
    layout = jax.typeof(array).sharding
    return layout if AxisType.Explicit in layout.mesh.axis_types else None


def _zeros_like(array) -> jax.Array:
    """Zeros in float32, sharded as the array. In JAX 0.12 jnp.zeros_like ignores a mesh that is not in context."""
    zeros, layout = jnp.zeros_like(array, jnp.float32), _explicit_layout(array)
    return zeros if layout is None else jax.sharding.reshard(zeros, layout)


def _laid_out_alike(*arrays):
    """The arrays, or None, with the first axis of all, the batch, laid out alike, where that is a part of types."""
    layouts = [None if x is None else _explicit_layout(x) for x in arrays]
    batch = next((layout.spec[0] for layout in layouts if layout and layout.spec[0]), None)

    def moved(x, layout):
        if layout is None or layout.spec[0] == batch:
            return x
        return jax.sharding.reshard(x, NamedSharding(layout.mesh, P(batch, *layout.spec[1:])))

    return tuple(map(moved, arrays, layouts))


class _Chunk(NamedTuple):
    """Some queries and what they may use; the arrays of a whole op have the same structure."""

    query: jax.Array  # [B, T, K, G, H]
    low: jax.Array  # int32 [B, T]
    high: jax.Array  # int32 [B, T]
    lists: jax.Array | None  # int32 [B, T, K, n]


class _Plan(Protocol):
    """How one chunk reads keys and values and adds to their gradients.

    `keys` and `scores` are einsum subscripts over b batch, q query, k key/value head, g query head in its group, l key.
    """

    @property
    def chunk(self) -> int: ...

    @property
    def keys(self) -> str: ...

    @property
    def scores(self) -> str: ...

    def load(self, array: jax.Array, chunk: _Chunk) -> jax.Array: ...

    def mask(self, num_keys: int, chunk: _Chunk) -> jax.Array: ...

    def add(self, total: jax.Array, part: jax.Array, chunk: _Chunk) -> jax.Array: ...


def _in_range(position: jax.Array, chunk: _Chunk) -> jax.Array:
    """Mask in layout "bkqgl" for keys at `position` [L]."""
    inside = (position >= chunk.low[..., None]) & (position < chunk.high[..., None])
    return inside[:, None, :, None]


@dataclasses.dataclass(frozen=True)
class _All:
    """Every query of the chunk meets every key; block lists, if any, are turned into a mask."""

    chunk: int
    select_block: int = 0
    keys: str = "blk"
    scores: str = "bkqgl"

    def load(self, array, chunk):
        return array

    def mask(self, num_keys, chunk):
        mask = _in_range(jnp.arange(num_keys, dtype=jnp.int32), chunk)
        if chunk.lists is None:
            return mask
        index = jnp.arange(blocks.num_selection_blocks(num_keys, self.select_block), dtype=jnp.int32)
        listed = (chunk.lists[..., None] == index).any(-2)  # [B, Q, K, J]
        tokens = jnp.repeat(listed, self.select_block, axis=-1)[..., :num_keys]
        return mask & tokens.transpose(0, 2, 1, 3)[:, :, :, None]

    def add(self, total, part, chunk):
        return total + part


@dataclasses.dataclass(frozen=True)
class _Band:
    """The chunk meets the keys from its first query's window to its last query: one slice."""

    chunk: int
    window: int
    keys: str = "blk"
    scores: str = "bkqgl"

    def _slice(self, num_keys, chunk):
        # high - 1 is the query's own position, equal in all rows of the batch; the first query is never padding.
        size = min(num_keys, self.chunk + self.window - 1)
        return jnp.clip(chunk.high[0, 0] - self.window, 0, num_keys - size), size

    def load(self, array, chunk):
        begin, size = self._slice(array.shape[1], chunk)
        return jax.lax.dynamic_slice_in_dim(array, begin, size, axis=1)

    def mask(self, num_keys, chunk):
        begin, size = self._slice(num_keys, chunk)
        return _in_range(begin + jnp.arange(size, dtype=jnp.int32), chunk)

    def add(self, total, part, chunk):
        begin, size = self._slice(total.shape[1], chunk)
        part = part + jax.lax.dynamic_slice_in_dim(total, begin, size, axis=1)
        return jax.lax.dynamic_update_slice_in_dim(total, part, begin, axis=1)


@dataclasses.dataclass(frozen=True)
class _Gather:
    """Each query meets the blocks on its own list; keys and values come as blocks [B, K, J, l', H]."""

    chunk: int
    select_block: int
    keys: str = "bqkl"
    scores: str = "bqkgl"

    def _index(self, chunk):
        batch, _, num_kv, _ = chunk.lists.shape
        rows = jnp.arange(batch, dtype=jnp.int32)[:, None, None, None]
        heads = jnp.arange(num_kv, dtype=jnp.int32)[:, None]
        return rows, heads, chunk.lists

    def load(self, array, chunk):
        # [B, K, J, l', H] as [B, Q, K, n, l', H], with batch and heads laid out alike; padding is masked below.
        layout = _explicit_layout(array)
        if layout is not None:
            batch, heads = layout.spec[:2]
            layout = NamedSharding(layout.mesh, P(batch, None, heads))
        picked = array.at[self._index(chunk)].get(mode="clip", out_sharding=layout)
        return picked.reshape(*picked.shape[:3], -1, picked.shape[-1])

    def mask(self, num_keys, chunk):
        offset = jnp.arange(self.select_block, dtype=jnp.int32)
        position = chunk.lists[..., None] * self.select_block + offset
        position = position.reshape(*position.shape[:3], -1)  # [B, Q, K, n * l']; padding lies at or beyond S
        mask = (position >= chunk.low[:, :, None, None]) & (position < chunk.high[:, :, None, None])
        return mask[:, :, :, None]

    def add(self, total, part, chunk):
        part = part.reshape(*chunk.lists.shape, self.select_block, part.shape[-1])
        return total.at[self._index(chunk)].add(part, mode="drop", out_sharding=_explicit_layout(total))


def _dot(spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """einsum that multiplies in the inputs' dtype and accumulates in float32."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jnp.einsum(spec, a, b, precision=precision, preferred_element_type=jnp.float32)


def _chunk_scores(plan: _Plan, chunk: _Chunk, key: jax.Array, num_keys: int) -> tuple[jax.Array, jax.Array]:
    """Scaled float32 scores of a chunk against loaded keys, and which of them count."""
    scores = _dot(f"bqkgh,{plan.keys}h->{plan.scores}", chunk.query, key) * chunk.query.shape[-1] ** -0.5
    return scores, plan.mask(num_keys, chunk)


def _to_rows(plan: _Plan, per_score_row: jax.Array) -> jax.Array:
    """[B, Q, K, G] from the scores' layout without its last axis."""
    return jnp.einsum(f"{plan.scores[:-1]}->bqkg", per_score_row)


def _to_scores(plan: _Plan, per_row: jax.Array) -> jax.Array:
    """The scores' layout with a last axis of 1, from [B, Q, K, G]."""
    return jnp.einsum(f"bqkg->{plan.scores[:-1]}", per_row)[..., None]


def _over_chunks(plan: _Plan, body, carry, arrays):
    """Runs `body(carry, arrays of one chunk) -> (carry, outputs)` over the token axis (axis 1) of `arrays`."""
    length = jax.tree.leaves(arrays)[0].shape[1]
    if length <= plan.chunk:
        return body(carry, arrays)
    count = -(-length // plan.chunk)

    def split(x):  # zero padding gives low = high = 0: such queries see nothing
        x = jnp.pad(x, [(0, 0), (0, count * plan.chunk - length)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(x.shape[0], count, plan.chunk, *x.shape[2:]), 1, 0)

    def join(x):
        x = jnp.moveaxis(x, 0, 1)
        return x.reshape(x.shape[0], count * plan.chunk, *x.shape[3:])[:, :length]

    carry, outputs = jax.lax.scan(body, carry, jax.tree.map(split, arrays))
    return carry, jax.tree.map(join, outputs)


def _attend_fwd(plan: _Plan, num_keys: int, rows: _Chunk, key: jax.Array, value: jax.Array):
    def body(_, chunk):
        scores, mask = _chunk_scores(plan, chunk, plan.load(key, chunk), num_keys)
        scores = jnp.where(mask, scores, -jnp.inf)
        peak = scores.max(-1)
        peak = jnp.where(peak == -jnp.inf, 0.0, peak)  # rows that see nothing: weights 0, not NaN
        weights = jnp.exp(scores - peak[..., None])
        total = weights.sum(-1)
        out = _dot(f"{plan.scores},{plan.keys}v->bqkgv", weights.astype(value.dtype), plan.load(value, chunk))
        out = out / _to_rows(plan, jnp.where(total > 0, total, 1.0))[..., None]
        # Masked before the logarithm as well as behind it: its derivative is part of second derivatives.
        lse = jnp.where(total == 0, -jnp.inf, peak + jnp.log(jnp.where(total == 0, 1.0, total)))
        return None, (out.astype(chunk.query.dtype), _to_rows(plan, lse))

    _, (out, lse) = _over_chunks(plan, body, None, rows)
    return (out, lse), (rows, key, value, out, lse)


def _attend_bwd(plan: _Plan, num_keys: int, residuals, cotangents):
    rows, key, value, out, lse = residuals
    dout = cotangents[0]  # the log-sum-exp carries no gradient: the public ops stop it

    def body(totals, arrays):
        chunk, out, lse, dout = arrays
        key_part, value_part = plan.load(key, chunk), plan.load(value, chunk)
        scores, mask = _chunk_scores(plan, chunk, key_part, num_keys)
        probs = jnp.exp(jnp.where(mask, scores - _to_scores(plan, lse), -jnp.inf))
        dvalue = _dot(f"{plan.scores},bqkgv->{plan.keys}v", probs.astype(value.dtype), dout)
        dprobs = _dot(f"bqkgv,{plan.keys}v->{plan.scores}", dout, value_part)
        delta = (dout.astype(jnp.float32) * out.astype(jnp.float32)).sum(-1)
        dscores = probs * (dprobs - _to_scores(plan, delta)) * chunk.query.shape[-1] ** -0.5
        dscores = dscores.astype(key.dtype)
        dquery = _dot(f"{plan.scores},{plan.keys}h->bqkgh", dscores, key_part).astype(chunk.query.dtype)
        dkey = _dot(f"{plan.scores},bqkgh->{plan.keys}h", dscores, chunk.query)
        return (plan.add(totals[0], dkey, chunk), plan.add(totals[1], dvalue, chunk)), dquery

    totals = tuple(map(_zeros_like, (key, value)))
    (dkey, dvalue), dquery = _over_chunks(plan, body, totals, (rows, out, lse, dout))
    drows = _Chunk(dquery, None, None, None)  # type: ignore[arg-type]  # integers have no gradient
    return drows, dkey.astype(key.dtype), dvalue.astype(value.dtype)


def _attend_primal(plan: _Plan, num_keys: int, rows: _Chunk, key: jax.Array, value: jax.Array):
    """Softmax attention: (out [B, T, K, G, V] in query's dtype, lse [B, T, K, G] float32)."""
    return _attend_fwd(plan, num_keys, rows, key, value)[0]


_attend_vjp = jax.custom_vjp(_attend_primal, nondiff_argnums=(0, 1))
_attend_vjp.defvjp(_attend_fwd, _attend_bwd)


def _attend(plan: _Plan, num_keys: int, rows: _Chunk, key: jax.Array, value: jax.Array):
    """`_attend_primal` with its gradients."""
    query, lists, key, value = _laid_out_alike(rows.query, rows.lists, key, value)
    return _attend_vjp(plan, num_keys, rows._replace(query=query, lists=lists), key, value)


def _chunk_size(length: int, elements_per_query: int) -> int:
    """Queries per chunk: all of them if they fit the budget, else the largest power of two that does."""
    budget = _CHUNK_ELEMENTS.get(current_target().platform, _CHUNK_ELEMENTS_ELSEWHERE)
    fits = max(budget // max(elements_per_query, 1), 1)
    return length if length <= fits else 1 << (fits.bit_length() - 1)


def _group(query: jax.Array, num_kv: int) -> jax.Array:
    batch, length, num_heads, head_dim = query.shape
    return query.reshape(batch, length, num_kv, num_heads // num_kv, head_dim)


def _ungroup(out: jax.Array) -> jax.Array:
    return out.reshape(*out.shape[:2], out.shape[2] * out.shape[3], *out.shape[4:])


def _compressed_rows(query, key_cmp, config, segment_start, query_offset):
    """The chunk plan and rows that compressed attention and selection share, and (t, start)."""
    batch, length, num_heads, _ = query.shape
    t, start = blocks.query_positions(query, segment_start, query_offset)
    low, high = blocks.compressed_range(t, start, config)
    plan = _All(_chunk_size(length, batch * num_heads * key_cmp.shape[1]))
    return plan, _Chunk(_group(query, key_cmp.shape[2]), low, high, None), t, start


def compressed_attention(query, key_cmp, value_cmp, *, config: NSAConfig, segment_start=None, query_offset=0):
    """See `nsa_jax.compressed_attention`."""
    batch, length, num_heads, _ = query.shape
    num_cmp = key_cmp.shape[1]
    if num_cmp == 0:
        out = jnp.zeros((batch, length, num_heads, value_cmp.shape[-1]), query.dtype)
        return out, jnp.full((batch, length, num_heads), -jnp.inf, jnp.float32)
    plan, rows, _, _ = _compressed_rows(query, key_cmp, config, segment_start, query_offset)
    out, lse = _attend(plan, num_cmp, rows, key_cmp, value_cmp)
    return _ungroup(out), _ungroup(lse)


def select_blocks(query, key_cmp, lse, *, config: NSAConfig, num_keys: int, segment_start=None, query_offset=0):
    """See `nsa_jax.select_blocks`; `num_keys` is S."""
    num_blocks = blocks.num_selection_blocks(num_keys, config.select_block)
    query, key_cmp, lse = _laid_out_alike(query, key_cmp, lse)
    plan, rows, t, start = _compressed_rows(query, key_cmp, config, segment_start, query_offset)

    def body(_, arrays):
        chunk, lse, t, start = arrays
        scores, mask = _chunk_scores(plan, chunk, key_cmp, key_cmp.shape[1])
        probs = jnp.where(mask, jnp.exp(scores - _to_scores(plan, lse)), 0.0).sum(3)  # [B, K, Q, C]
        importance = blocks.fold_importance(probs, num_blocks, config)
        picked = blocks.select_from_importance(importance, t[:, None], start[:, None], config)
        return None, picked.transpose(0, 2, 1, 3)

    lse = _group(lse[..., None], key_cmp.shape[2])[..., 0]
    return _over_chunks(plan, body, None, (rows, lse, t, start))[1]


def _as_blocks(array: jax.Array, select_block: int) -> jax.Array:
    """[B, S, K, H] -> [B, K, J, l', H], the last block padded with zeros."""
    batch, num_keys, num_kv, dim = array.shape
    num_blocks = blocks.num_selection_blocks(num_keys, select_block)
    array = jnp.pad(array, [(0, 0), (0, num_blocks * select_block - num_keys), (0, 0), (0, 0)])
    return array.reshape(batch, num_blocks, select_block, num_kv, dim).transpose(0, 3, 1, 2, 4)


def selected_attention(query, key, value, block_indices, *, select_block: int, segment_start=None, query_offset=0):
    """See `nsa_jax.selected_attention`."""
    batch, length, num_heads, head_dim = query.shape
    num_keys, num_kv = key.shape[1:3]
    t, start = blocks.query_positions(query, segment_start, query_offset)
    rows = _Chunk(_group(query, num_kv), start, t + 1, block_indices)
    listed = block_indices.shape[-1] * select_block
    if num_keys <= _DENSE_FACTOR * listed:
        plan: _Plan = _All(_chunk_size(length, batch * num_heads * num_keys), select_block)
    else:
        plan = _Gather(_chunk_size(length, batch * num_kv * listed * (head_dim + value.shape[-1])), select_block)
        key, value = _as_blocks(key, select_block), _as_blocks(value, select_block)
    return _ungroup(_attend(plan, num_keys, rows, key, value)[0])


def window_attention(query, key, value, *, window: int, segment_start=None, query_offset=0):
    """See `nsa_jax.window_attention`."""
    window = min(window, key.shape[1])
    batch, length, num_heads, _ = query.shape
    t, start = blocks.query_positions(query, segment_start, query_offset)
    rows = _Chunk(_group(query, key.shape[2]), jnp.maximum(start, t - window + 1), t + 1, None)
    # A chunk of w queries meets 2w - 1 keys, half of them in vain: smaller chunks waste less, larger ones loop less.
    chunk = min(length, max(window, 128))
    plan = _Band(min(chunk, _chunk_size(length, batch * num_heads * (chunk + window))), window)
    return _ungroup(_attend(plan, key.shape[1], rows, key, value)[0])
