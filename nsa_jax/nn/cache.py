"""The KV cache: what a layer keeps of the tokens it has seen, for NSA, dense and window attention.

Every array has a fixed shape. Row b of the batch has its first `lengths[b]` tokens in use, so prompts of different
lengths start at position 0 and are padded on the right; what lies behind a row's length is never read and is written
over as the row grows.

A layer's cache is its own set of arrays instead of a slice of stacked ones: a decode step then writes one token and its
kernels read, both in place, where a scan over layers would copy each layer's whole cache twice per token.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from nsa_jax.nn.attention import NSAttention, Projections
from nsa_jax.nn.config import ModelConfig
from nsa_jax.nn.dense import DenseAttention
from nsa_jax.nn.layers import MeanCompressor, MLPCompressor
from nsa_jax.nn.projection import Projected, fused_product
from nsa_jax.nn.sharding import batch_axes, constrain_batch, sharded_attention, tensor_size
from nsa_jax.ops import blocks, checks, nsa, pallas, plan
from nsa_jax.ops.decode import decode_attention, gated_sum, masked_attention, slot_positions
from nsa_jax.ops.implementations import kernels_wanted
from nsa_jax.ops.mean_key import decode_mean_key_attention, select_by_mean_key
from nsa_jax.ops.target import current_target


class NSALayerCache(NamedTuple):
    """One NSA layer's cache; S is the capacity.

    What is None lies in key_slc and value_slc, which then serve as rings of S slots: with `ModelConfig.shared_kv` the
    window's arrays and value_tail, with the selector "mean_key" both tails. value_cmp is None with that selector, and
    key_cmp holds the mean keys.
    """

    key_slc: jax.Array  # [B, S, K, H], roped
    value_slc: jax.Array  # [B, S, K, V]
    key_cmp: jax.Array  # [B, C, K, H], roped at the block's last position
    value_cmp: jax.Array | None  # [B, C, K, V]
    key_win: jax.Array | None  # [B, W, K, H], roped; position p at p % W
    value_win: jax.Array | None  # [B, W, K, V]
    key_tail: jax.Array | None  # [B, l, K, H], raw keys that phi still needs; position p at p % l
    value_tail: jax.Array | None  # [B, l, K, V]
    lists: jax.Array | None = None  # int32 [B, S, K, n], the block lists of each position, if they are recorded

    def window(self) -> tuple[jax.Array, jax.Array]:
        """Keys and values that the window branch reads, as rings."""
        if self.key_win is None or self.value_win is None:
            return self.key_slc, self.value_slc
        return self.key_win, self.value_win

    def raw(self) -> tuple[jax.Array, jax.Array | None]:
        """Keys and values that are compressed, as rings."""
        key = self.key_slc if self.key_tail is None else self.key_tail
        if self.value_cmp is None:
            return key, None
        return key, self.value_slc if self.value_tail is None else self.value_tail


class DenseLayerCache(NamedTuple):
    """One dense layer's cache."""

    key: jax.Array  # [B, S, K, H], roped
    value: jax.Array  # [B, S, K, V]


class WindowLayerCache(NamedTuple):
    """One window layer's cache: the last W = min(window, S) tokens; position p at p % W."""

    key: jax.Array  # [B, W, K, H], roped
    value: jax.Array  # [B, W, K, V]


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("layers", "lengths", "segment_start"),
    meta_fields=("capacity",),
)
@dataclasses.dataclass(frozen=True)
class Cache:
    """The cache of a model, a pytree.

    Rows grow and cannot be shortened: a smaller `lengths` would be wrong without an error, since rings hold the last
    tokens alone. To go back, keep a copy; `Decoder` donates the cache that it is given.

    Attributes:
      layers: one `NSALayerCache`, `DenseLayerCache` or `WindowLayerCache` per layer.
      lengths: int32 [B], tokens in each row.
      segment_start: int32 [B], first position of the document that each row is in.
      capacity: S, tokens a row can hold.
    """

    layers: tuple[Any, ...]
    lengths: jax.Array
    segment_start: jax.Array
    capacity: int

    def block_indices(self) -> jax.Array:
        """The block lists that every token read, int32 [NSA layers, B, S, K, n], padded with J = S / select_block.

        Those of positions from `lengths` on mean nothing.

        Raises:
          ValueError: the cache does not record them.
        """
        lists = [layer.lists for layer in self.layers if getattr(layer, "lists", None) is not None]
        if not lists:
            raise ValueError("the cache has no block lists: must come from init_cache(..., record_block_indices=True)")
        return jnp.stack(lists)


def capacity_bucket(tokens: int, config: ModelConfig) -> int:
    """The capacity to allocate for this many tokens: a power of two of at least 256, in whole selection blocks.

    Programs are compiled for a capacity, so nearby lengths share one. RoPE scaling of the kind "dynamic" bounds it by
    the whole blocks of its original length.

    Raises:
      ValueError: `tokens` is no positive whole number.
    """
    tokens, block = checks.positive("tokens", tokens), config.nsa.select_block
    power = 1 << (max(tokens, 256) - 1).bit_length()
    most = config.rope_scaling.original_length if config.rope_scaling.kind == "dynamic" else power
    return -(-max(min(power, most // block * block), tokens) // block) * block


def _layer_shapes(
    config: ModelConfig, batch: int, capacity: int, lists: bool
) -> NSALayerCache | DenseLayerCache | WindowLayerCache:
    def pair(length):
        return [
            jax.ShapeDtypeStruct((batch, length, config.num_kv_heads, dim), config.dtype)
            for dim in (config.head_dim, config.value_head_dim)
        ]

    geometry = config.nsa
    if config.attention == "window":
        return WindowLayerCache(*pair(min(geometry.window, capacity)))
    if config.attention == "dense":
        return DenseLayerCache(*pair(capacity))
    lengths = (capacity, blocks.num_compressed(capacity, geometry), min(geometry.window, capacity))
    layer: Any = NSALayerCache(*(x for length in (*lengths, geometry.compress_block) for x in pair(length)))
    if lists:
        size = (batch, capacity, config.num_kv_heads, geometry.num_selected)
        layer = layer._replace(lists=jax.ShapeDtypeStruct(size, jnp.int32))
    if config.shared_kv:
        layer = layer._replace(key_win=None, value_win=None, value_tail=None)
    return layer._replace(value_cmp=None, key_tail=None, value_tail=None) if config.selector == "mean_key" else layer


def init_cache(config: ModelConfig, batch: int, capacity: int, *, record_block_indices: bool = False) -> Cache:
    """An empty cache.

    Args:
      config: the model's.
      batch: B.
      capacity: S, tokens a row can hold, a multiple of `select_block`; see `capacity_bucket`.
      record_block_indices: keep the block lists of every token for `Cache.block_indices`, which takes 4 S K n bytes per
        row and layer.

    Raises:
      ValueError: `batch` is no whole number of at least 1, `capacity` is not a multiple of `select_block`, rows would
        outgrow what RoPE scaling of the kind "dynamic" leaves as it is, or lists are to be recorded without NSA layers.
    """
    batch, capacity = _checked_sizes(config, batch, capacity, record_block_indices)
    layers = tuple(
        jax.tree.map(
            lambda s: constrain_batch(jnp.zeros(s.shape, s.dtype)),
            _layer_shapes(layer, batch, capacity, record_block_indices),
        )
        for layer in map(config.of_layer, range(config.num_layers))
    )
    return Cache(layers, jnp.zeros((batch,), jnp.int32), jnp.zeros((batch,), jnp.int32), capacity)


def _checked_sizes(config: ModelConfig, batch: int, capacity: int, lists: bool) -> tuple[int, int]:
    batch, capacity = checks.positive("batch", batch), checks.positive("capacity", capacity)
    if capacity % config.nsa.select_block:
        raise ValueError(f"capacity={capacity}: must be a positive multiple of select_block={config.nsa.select_block}")
    scaling = config.rope_scaling
    if scaling.kind == "dynamic" and capacity > scaling.original_length:
        raise ValueError(
            f"capacity={capacity}: RoPE scaling of the kind 'dynamic' would turn the cached keys of rows beyond "
            f"original_length={scaling.original_length} tokens again; use a capacity of at most "
            f"{scaling.original_length // config.nsa.select_block * config.nsa.select_block} (of a Generator: context; "
            "of python -m nsa_jax.generate: --context), or train with 'yarn' or 'linear'"
        )
    if lists and "nsa" not in config.kinds:
        kinds = "/".join(config.kinds)
        raise ValueError(f"record_block_indices=True: must be False for attention={kinds!r}, which has no block lists")
    return batch, capacity


def memory_report(
    config: ModelConfig, batch: int, capacity: int, *, record_block_indices: bool = False
) -> dict[str, float]:
    """What the cache takes, beside a dense cache of the same model.

    Args:
      config, batch, capacity, record_block_indices: as `init_cache` takes them.

    Returns:
      total_mib and dense_total_mib: the whole cache; bytes_per_token and dense_bytes_per_token: what one more token of
      one row takes in all layers; fixed_bytes_per_row: windows and tails, where the cache has them.

    Raises:
      ValueError: `init_cache` would not make such a cache.
    """
    batch, capacity = _checked_sizes(config, batch, capacity, record_block_indices)
    configs = map(config.of_layer, range(config.num_layers))
    layers = [_layer_shapes(layer, 1, capacity, record_block_indices) for layer in configs]

    def size(arrays) -> int:
        return sum(s.size * s.dtype.itemsize for s in jax.tree.leaves(arrays))

    token_bytes = config.num_kv_heads * (config.head_dim + config.value_head_dim) * config.dtype.itemsize
    dense_bytes = config.num_layers * token_bytes
    total, dense_total = size(layers), dense_bytes * capacity
    report = {"total_mib": batch * total / 2**20, "dense_total_mib": batch * dense_total / 2**20}
    sparse = [layer for layer in layers if isinstance(layer, NSALayerCache)]
    windows = [layer for layer in layers if isinstance(layer, WindowLayerCache)]
    compressed = [layer[2:4] for layer in sparse]
    entry = size(jax.tree.map(lambda s: jax.ShapeDtypeStruct((1, 1, *s.shape[2:]), s.dtype), compressed))
    per_token = (len(layers) - len(windows)) * token_bytes + entry / config.nsa.compress_stride
    per_token += size([layer.lists for layer in sparse]) / capacity
    report |= {"bytes_per_token": per_token, "dense_bytes_per_token": float(dense_bytes)}
    report["fixed_bytes_per_row"] = float(size([windows, [layer[4:8] for layer in sparse]]))
    return report


def _ordered(ring: jax.Array, first: jax.Array, count: int) -> jax.Array:
    """Positions first..first+count-1 of a ring buffer [B, W, ...]."""
    slots = (first + jnp.arange(count, dtype=jnp.int32)) % ring.shape[1]
    return jnp.take(ring, slots, axis=1)


def _behind_rings(rings: Sequence, chunk: Sequence, offset: jax.Array, start: jax.Array | None):
    """What the window reads of a chunk of tokens at positions offset..: the rings' tokens, in order, and the chunk's.

    Args:
      rings, chunk: keys and values, [B, W, ...] and [B, T, ...].
      offset: int32 scalar.
      start: int32 [B, T] or None.

    Returns:
      Keys and values [B, W + T, ...], and the start of each token's document among them.
    """
    slots = rings[0].shape[1]
    pairs = zip(rings, chunk, strict=True)
    joined = [jnp.concatenate([_ordered(ring, offset - slots, slots), new], axis=1) for ring, new in pairs]
    zero = jnp.zeros(chunk[0].shape[:2], jnp.int32) if start is None else start
    return joined, jnp.maximum(zero - (offset - slots), 0)  # slots before position 0 are empty


def _advance_ring(ring: jax.Array, chunk: jax.Array, offset: jax.Array, ends: jax.Array) -> jax.Array:
    """Writes a chunk of tokens at positions offset.. into a ring buffer, up to each row's end [B]."""
    index = slot_positions(ends, ring.shape[1]) - offset
    picked = jnp.take_along_axis(chunk, jnp.maximum(index, 0)[..., None, None], axis=1)
    return jnp.where((index >= 0)[..., None, None], picked, ring)


def _write(cache: jax.Array, index: jax.Array, value: jax.Array) -> jax.Array:
    """cache[b, index[b]] = value[b]; an index past the end writes nothing."""
    rows = jnp.arange(cache.shape[0], dtype=jnp.int32)
    return cache.at[rows, index].set(value, mode="drop", unique_indices=True)


def _ring_slot(lengths: jax.Array, ring: jax.Array, capacity: int) -> jax.Array:
    """The slot of the newest token in a ring, [B]; one past the end in rows that are full."""
    slots = ring.shape[1]
    return jnp.where(lengths < capacity, lengths % slots, slots)


def _held(function: Callable, arrays: Iterable, *others: Iterable) -> list[Any]:
    """`function` of each array with its counterparts; None for those that the cache does not have."""
    rows = zip(arrays, *others, strict=True)
    return [None if row[0] is None else function(*row) for row in rows]


def _prefill_nsa(attention: NSAttention, h, layer: NSALayerCache, offset, start, ends):
    config, geometry = attention.config, attention.config.nsa
    batch, length = h.shape[:2]
    capacity, num_cmp = layer.key_slc.shape[1], layer.key_cmp.shape[1]
    p: Projections = attention.project(h, offset + jnp.arange(length, dtype=jnp.int32))

    # Blocks that end in this chunk begin up to l - d tokens before it.
    before, stride = geometry.compress_block - geometry.compress_stride, geometry.compress_stride
    raw = _held(
        lambda tail, new: jnp.concatenate([_ordered(tail, offset - before, before), new], axis=1),
        layer.raw(),
        (p.key_raw, p.value_raw),
    )
    compressed = attention.compress(raw[0], raw[1], offset - before)
    index = (offset - before) // stride + jnp.arange(compressed[0].shape[1], dtype=jnp.int32)
    index = jnp.where(index >= 0, index, num_cmp)
    key_cmp, value_cmp = _held(
        lambda old, new: old.at[:, index].set(new, mode="drop", unique_indices=True), layer[2:4], compressed
    )
    key_slc, value_slc = (
        jax.lax.dynamic_update_slice_in_dim(old, new, offset, axis=1)
        for old, new in ((layer.key_slc, p.key_slc), (layer.value_slc, p.value_slc))
    )
    if config.shared_kv:
        key_win, value_win, start_win, slots = key_slc, value_slc, start, offset
    else:
        slots = layer.window()[0].shape[1]
        (key_win, value_win), start_win = _behind_rings(layer.window(), (p.key_win, p.value_win), offset, start)

    def attend(start, start_win, query, key_cmp, value_cmp, key_slc, value_slc, key_win, value_win, gates):
        common = dict(segment_start=start, query_offset=offset, implementation=config.implementation)
        outs = []
        if config.selector == "mean_key":
            lists = select_by_mean_key(query, key_cmp, config=geometry, num_keys=capacity, **common)
        else:
            out_cmp, lse = nsa.compressed_attention(query, key_cmp, value_cmp, config=geometry, **common)
            lists = nsa.select_blocks(query, key_cmp, lse, config=geometry, num_keys=capacity, **common)
            outs.append(out_cmp)
        outs.append(
            nsa.selected_attention(query, key_slc, value_slc, lists, select_block=geometry.select_block, **common)
        )
        common |= dict(segment_start=start_win, query_offset=slots)
        outs.append(nsa.window_attention(query, key_win, value_win, window=geometry.window, **common))
        return gated_sum(gates, outs, query.dtype), lists

    attended, lists = sharded_attention(
        attend, start, start_win, p.query, key_cmp, value_cmp, key_slc, value_slc, key_win, value_win, p.gates
    )
    new = (p.key_win, p.value_win, p.key_raw, p.value_raw)
    rings = _held(lambda ring, new: _advance_ring(ring, new, offset, ends), layer[4:8], new)
    recorded = layer.lists
    if recorded is not None:
        recorded = jax.lax.dynamic_update_slice_in_dim(recorded, lists, offset, axis=1)
    return attended, NSALayerCache(key_slc, value_slc, key_cmp, value_cmp, *rings)._replace(lists=recorded)


def _append_by_kernels(attention: NSAttention, layer: NSALayerCache, batch: int) -> bool:
    """Whether the kernels that write a token into the cache can serve this layer: on a GPU, or if asked for by name.

    They know the compressors of this library, and one device: under a mesh the compiler splits the plain operations.
    """
    config = attention.config
    if not kernels_wanted(config.implementation) or config.qk_norm or config.selector == "mean_key":
        return False
    if batch_axes(batch) or tensor_size() > 1:
        return False
    compressors = (attention.compress_key, attention.compress_value)
    if not all(type(phi) in (MLPCompressor, MeanCompressor) for phi in compressors):
        return False
    query = jax.ShapeDtypeStruct((batch, 1, config.num_heads, config.head_dim), config.dtype)
    shape = plan.Shape.of(query, layer.key_slc, layer.value_slc)
    return plan.unsupported("decode_attention", shape, current_target()) is None


def _decode_plan(attention: NSAttention, layer: NSALayerCache, batch: int):
    """How one token per row attends to the cache, by kernels."""
    config = attention.config
    query = jax.ShapeDtypeStruct((batch, 1, config.num_heads, config.head_dim), config.dtype)
    shape = plan.Shape.of(query, layer.key_slc, layer.value_slc)
    return plan.plan_decode(shape, layer.key_cmp.shape[1], config.nsa, current_target())


def _projected(attention: NSAttention, h, lengths) -> tuple[jax.Array, jax.Array, jax.Array]:
    """What kernels make of a token: its projection, the gates' bias, and RoPE's cosine and sine at its position."""
    config = attention.config
    turn = jnp.stack(config.rope_turns(lengths), axis=1)
    if isinstance(h, Projected):
        return h.array, attention.gate_bias[...], turn
    rows = h[:, 0]
    if len(rows) == 1:  # XLA computes the product of a single row otherwise (`product`), and would copy it out of two
        rows = jnp.broadcast_to(rows, (2, rows.shape[1]))
    return fused_product(rows, attention.w_in, attention.b_in, config), attention.gate_bias[...], turn


def _append_nsa_kernels(attention: NSAttention, h, layer: NSALayerCache, lengths):
    """What `_append_nsa` returns, by two kernels, with learned compressors."""
    config = attention.config
    phis = [
        tuple(x[...].astype(config.dtype) for x in (phi.position, phi.w_1, phi.b_1, phi.w_2))
        for phi in (attention.compress_key, attention.compress_value)
        if isinstance(phi, MLPCompressor)
    ]
    query, gates, arrays = pallas.append_token(
        *_projected(attention, h, lengths),
        lengths,
        (layer.key_slc, layer.value_slc, *layer[4:8]),
        layer.key_cmp,
        layer.value_cmp,
        phis,
        config=config.nsa,
    )
    return query, gates, _with_arrays(layer, arrays)


def _with_arrays(layer: NSALayerCache, arrays) -> NSALayerCache:
    """The layer's cache with what kernels wrote in their order: compressed keys and values last."""
    return NSALayerCache(*arrays[:2], *arrays[6:], *arrays[2:6])._replace(lists=layer.lists)


def _append_nsa(attention: NSAttention, h, layer: NSALayerCache, lengths):
    """The token's query and gates, and the cache with the token in it."""
    geometry = attention.config.nsa
    p: Projections = attention.project(h, lengths[:, None])
    key_slc, value_slc = (
        _write(old, lengths, new[:, 0]) for old, new in ((layer.key_slc, p.key_slc), (layer.value_slc, p.value_slc))
    )
    new = (p.key_win, p.value_win, p.key_raw, p.value_raw)
    capacity = layer.key_slc.shape[1]
    rings = _held(lambda ring, new: _write(ring, _ring_slot(lengths, ring, capacity), new[:, 0]), layer[4:8], new)
    layer = NSALayerCache(key_slc, value_slc, *layer[2:4], *rings)._replace(lists=layer.lists)
    # A block is complete every d tokens, in every row at its own time.
    first = lengths + 1 - geometry.compress_block
    complete = (first >= 0) & (first % geometry.compress_stride == 0)

    def compress():
        order = (first[:, None] + jnp.arange(geometry.compress_block, dtype=jnp.int32))[..., None, None]
        raw = _held(lambda x: jnp.take_along_axis(x, order % x.shape[1], axis=1), layer.raw())
        return attention.compress(raw[0], raw[1], first[:, None])

    shapes = jax.eval_shape(compress)
    new_cmp = jax.lax.cond(
        complete.any(), compress, lambda: jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    )
    index = jnp.where(complete, first // geometry.compress_stride, layer.key_cmp.shape[1])
    key_cmp, value_cmp = _held(lambda old, new: _write(old, index, new[:, 0]), layer[2:4], new_cmp)
    return p.query, p.gates, layer._replace(key_cmp=key_cmp, value_cmp=value_cmp)


def _step_nsa(attention: NSAttention, h, layer: NSALayerCache, lengths, segment_start):
    config = attention.config
    by_kernels = _append_by_kernels(attention, layer, len(lengths))
    if by_kernels and type(attention.compress_key) is type(attention.compress_value) is MeanCompressor:
        attended, lists, arrays = pallas.append_and_attend(
            *_projected(attention, h, lengths),
            lengths,
            segment_start,
            (layer.key_slc, layer.value_slc, *layer[4:8]),
            layer.key_cmp,
            layer.value_cmp,
            made=_decode_plan(attention, layer, len(lengths)),
            config=config.nsa,
        )
        return attended, _record(_with_arrays(layer, arrays), lengths, lists)
    append = _append_nsa_kernels if by_kernels else _append_nsa
    query, gates, layer = append(attention, h, layer, lengths)

    def attend(start, query, key_cmp, value_cmp, *arrays):
        where: dict[str, Any] = dict(config=config.nsa, segment_start=start[:, None])
        if config.selector == "mean_key":
            return decode_mean_key_attention(query, key_cmp, *arrays, **where)
        where |= dict(implementation=config.implementation, return_info=True)
        attended, info = decode_attention(query, key_cmp, value_cmp, *arrays, **where)
        return attended, info.block_indices

    read = (layer.key_cmp, layer.value_cmp, layer.key_slc, layer.value_slc, *layer.window())
    attended, lists = sharded_attention(attend, segment_start, query, *read, gates, lengths + 1)
    return attended, _record(layer, lengths, lists)


def _record(layer: NSALayerCache, lengths, lists) -> NSALayerCache:
    """The cache with the lists [B, 1, K, n] of the newest token, if it records them."""
    return layer if layer.lists is None else layer._replace(lists=_write(layer.lists, lengths, lists[:, 0]))


def _prefill_dense(attention: DenseAttention, h, layer: DenseLayerCache | WindowLayerCache, offset, start, ends):
    config, length = attention.config, h.shape[1]
    query, *new = attention.project(h, offset + jnp.arange(length, dtype=jnp.int32))
    window, first = config.nsa.window, offset
    if isinstance(layer, WindowLayerCache):
        (key, value), start = _behind_rings(layer, new, offset, start)
        kept: Any = WindowLayerCache(*(_advance_ring(*x, offset, ends) for x in zip(layer, new, strict=True)))
        first = layer.key.shape[1]
    else:
        written = (jax.lax.dynamic_update_slice_in_dim(*x, offset, axis=1) for x in zip(layer, new, strict=True))
        key, value = kept = DenseLayerCache(*written)
        window = key.shape[1]

    def attend(start, query, key, value):
        return nsa.window_attention(
            query, key, value, window=window, segment_start=start, query_offset=first,
            implementation=config.implementation,
        )  # fmt: skip

    return sharded_attention(attend, start, query, key, value), kept


def _step_dense(
    attention: DenseAttention, h, layer: DenseLayerCache | WindowLayerCache, lengths, segment_start, capacity: int
):
    query, *new = attention.project(h, lengths[:, None])
    ring = isinstance(layer, WindowLayerCache)
    place = _ring_slot(lengths, layer.key, capacity) if ring else lengths
    layer = type(layer)(*(_write(old, place, x[:, 0]) for old, x in zip(layer, new, strict=True)))

    def attend(query, key, value, lengths, start):
        shape, wanted = plan.Shape.of(query, key, value), kernels_wanted(attention.config.implementation)
        if wanted and plan.unsupported("decode_attention", shape, current_target()) is None:
            return pallas.dense_decode_attention(query, key, value, lengths, start[:, None], ring=ring)
        slots = key.shape[1]
        position = slot_positions(lengths, slots) if ring else jnp.arange(slots, dtype=jnp.int32)
        visible = (position >= start[:, None]) & (position < lengths[:, None])
        grouped = query.reshape(*query.shape[:2], key.shape[2], -1, query.shape[-1])
        return masked_attention(grouped, key, value, visible[:, None, None, None], "blk")

    return sharded_attention(attend, query, *layer, lengths + 1, segment_start), layer


def prefill_attention(attention, h: jax.Array, layer, offset: jax.Array, start: jax.Array | None, ends: jax.Array):
    """Attention of a chunk of tokens to the cache and to itself, and the cache with the chunk in it.

    Args:
      attention: `NSAttention` or `DenseAttention`.
      h: [B, T, D], the layer's normed input; T is a multiple of the compression stride.
      layer: the layer's cache, which holds all tokens before the chunk.
      offset: int32 scalar, position of the chunk's first token, a multiple of the compression stride.
      start: int32 [B, T], first position of each token's document, or None.
      ends: int32 [B], tokens of each row up to the end of the chunk, padding excluded.

    Returns:
      The heads' outputs [B, T, N, V] and the layer's cache.
    """
    serve = _prefill_nsa if isinstance(attention, NSAttention) else _prefill_dense
    return serve(attention, h, layer, offset, start, ends)


def step_attention(
    attention, h: jax.Array | Projected, layer, lengths: jax.Array, segment_start: jax.Array, capacity: int
):
    """Attention of one new token per row, and the cache with it. A row that is full stays as it is.

    Args:
      attention: `NSAttention` or `DenseAttention`.
      h: [B, 1, D], the layer's normed input, or its projection.
      layer: the layer's cache.
      lengths: int32 [B], tokens of each row before this one.
      segment_start: int32 [B], first position of the new token's document.
      capacity: S, tokens a row can hold.

    Returns:
      The heads' outputs [B, 1, N, V] and the layer's cache.
    """
    if isinstance(attention, NSAttention):
        return _step_nsa(attention, h, layer, lengths, segment_start)
    return _step_dense(attention, h, layer, lengths, segment_start, capacity)
