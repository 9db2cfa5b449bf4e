"""A new token's way into the cache on GPUs, in two launches instead of some twenty: they bound small batches.

append: splits the layer's projection of the token, turns query and keys, and writes keys and values in place. Where
  the token completes a compressed block, further programs compute the hidden layer of phi, each over some of the
  block's tokens; otherwise they end at once.
emit: the rest of phi, written to the compressed keys and values in place; ends at once where no block is complete.
Where blocks are compressed to their means, both are done by the kernel that attends first, see launch.py.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from nsa_jax.ops.blocks import NSAConfig
from nsa_jax.ops.kernels.decode.softmax_parts import iota, per_pair, query_rows
from nsa_jax.ops.kernels.triton import pieces, triton_call

_TILE = 8192  # elements of a weight tile in registers


class Phi(NamedTuple):
    """The learned compressor of keys or of values; F features, M hidden ones."""

    position: jax.Array  # [l, F]
    w_1: jax.Array  # [l, F, M]
    b_1: jax.Array  # [M]
    w_2: jax.Array  # [M, F]


def completes(lengths_ref, config: NSAConfig):
    """First token of the compressed block that ends at this row's new token, and whether one does."""
    first = lengths_ref[0] + 1 - config.compress_block
    return first, (first >= 0) & (first % config.compress_stride == 0)


def _halves(half: int):
    """Indices of the first and the second half of a head; the tile is a power of two, its padding repeats an index."""
    index = jnp.minimum(iota(pl.next_power_of_2(half)), half - 1)
    return index, half + index


def _turned(first, second, turn_ref):
    """RoPE of the halves [..., H/2], as `nsa_jax.ops.rope.rope`, from cosines and sines [2, H/2]."""
    index, _ = _halves(turn_ref.shape[1])
    cos, sin = turn_ref[0, index], turn_ref[1, index]
    first, second = first.astype(jnp.float32), second.astype(jnp.float32)
    return first * cos - second * sin, second * cos + first * sin


def _divisor(x: int, most: int) -> int:
    """The largest power of two that divides x and is at most `most`."""
    return min(x & -x, 1 << max(most, 1).bit_length() - 1)


def _hidden(y_ref, offset, tail_ref, position_ref, w_ref, out_ref, begin, count: int, newest, config: NSAConfig):
    """Adds up what `count` tokens of the block, from the begin-th, give to the hidden layer [M]."""
    features, block = tail_ref.shape[1], config.compress_block
    for at, size in pieces(out_ref.shape[0]):
        step = _divisor(features, _TILE // size)
        chunks = features // step

        def body(i, acc, at=at, size=size, step=step, chunks=chunks):
            i = jnp.int32(i)  # Triton's lowering refuses `i % chunks` of two weakly typed values
            token, run = begin + i // chunks, i % chunks
            feature = run * step + iota(step)
            slot = (newest + 1 - block + token) % tail_ref.shape[0]
            x = tail_ref[slot, feature]
            x = jnp.where(token == block - 1, y_ref[offset + feature], x)  # another program writes the newest one
            x = x.astype(jnp.float32) + position_ref[token, feature].astype(jnp.float32)
            weight = w_ref[token, feature, pl.ds(at, size)].astype(jnp.float32)
            return acc + x[:, None] * weight

        acc = lax.fori_loop(0, count * chunks, body, jnp.zeros((step, size), jnp.float32))
        out_ref[pl.ds(at, size)] = acc.sum(0)


def _turned_columns(y_ref, base, turn_ref, at: int, size: int):
    """Columns [at, at + size) of RoPE of a head that begins at `base` of the projection, or of heads, [rows, 1]."""
    half = turn_ref.shape[1]
    column = at + iota(size)
    first = column < half
    other = jnp.where(first, column + half, column - half)
    cos, sin = (turn_ref[i, jnp.minimum(column, other)] for i in range(2))
    x, partner = (y_ref[base + index].astype(jnp.float32) for index in (column, other))
    return x * cos + jnp.where(first, -partner, partner) * sin


def turned_query(y_ref, turn_ref, kv, group: int, h_dim: int, offsets, dtype):
    """A token's query of one key/value head, as `PartSoftmax` takes it."""
    head = jnp.minimum(iota(query_rows(group)), group - 1)
    base = (offsets[0] + (kv * group + head) * h_dim)[:, None]
    return [_turned_columns(y_ref, base, turn_ref, *piece).astype(dtype) for piece in pieces(h_dim)]


def write_token(
    query, y_ref, bias_ref, turn_ref, at, kv, q_ref, gates_ref, cache_refs, h_dim: int, offsets, shared: bool
):  # fmt: skip
    """Writes a token's query [G, H] from `turned_query`, gates [3G], keys and values of one key/value head.

    cache_refs: key_slc, value_slc, key_win, value_win, key_tail, value_tail; or key_slc, value_slc, key_tail if the
    branches share keys and values.
    """
    ks_ref, vs_ref, *ring_refs = cache_refs
    group = q_ref.shape[0]
    _, at_key_raw, at_value_raw, at_key_slc, at_value_slc, at_key_win, at_value_win, at_gates = offsets
    head = jnp.minimum(iota(query_rows(group)), group - 1)
    for (begin, size), x in zip(pieces(h_dim), query, strict=True):
        q_ref[head, pl.ds(begin, size)] = x
    gate = jnp.minimum(iota(pl.next_power_of_2(3 * group)), 3 * group - 1)
    logits = y_ref[at_gates + kv * 3 * group + gate].astype(jnp.float32) + bias_ref[gate].astype(jnp.float32)
    gates_ref[gate] = 1.0 / (1.0 + jnp.exp(-logits))

    def turned_key(source, ref, slot):
        for begin, size in pieces(h_dim):
            key = _turned_columns(y_ref, source + kv * h_dim, turn_ref, begin, size)
            ref[slot, pl.ds(begin, size)] = key.astype(ref.dtype)

    def as_it_is(source, ref, slot):
        for begin, size in pieces(ref.shape[1]):
            index = begin + iota(size)
            ref[slot, index] = y_ref[source + kv * ref.shape[1] + index].astype(ref.dtype)

    @pl.when(at < ks_ref.shape[0])  # a full row stays as it is
    def _in_cache():
        turned_key(at_key_slc, ks_ref, at)
        as_it_is(at_value_slc, vs_ref, at)
        if shared:
            (kt_ref,) = ring_refs
        else:
            kw_ref, vw_ref, kt_ref, vt_ref = ring_refs
            as_it_is(at_value_raw, vt_ref, at % vt_ref.shape[0])
            turned_key(at_key_win, kw_ref, at % kw_ref.shape[0])
            as_it_is(at_value_win, vw_ref, at % vw_ref.shape[0])
        as_it_is(at_key_raw, kt_ref, at % kt_ref.shape[0])


def projection_offsets(num_heads: int, num_kv: int, h_dim: int, v_dim: int, shared: bool) -> tuple[int, ...]:
    """Where query, keys and values (raw, selected, window) and gates begin in a layer's projection."""
    widths = (num_heads * h_dim, *(num_kv * dim for dim in (h_dim, v_dim) * (1 if shared else 3)))
    begins = [sum(widths[:i]) for i in range(len(widths) + 1)]
    return (begins[0], *begins[1:-1] * (3 if shared else 1), begins[-1])


def _append_kernel(*refs, h_dim, v_dim, offsets, chunks, shared, config: NSAConfig):
    """refs: lengths [1], projection [F], gate bias [3G], cos and sin [2, H/2], the caches (aliased; key_slc, value_slc,
    key_win, value_win, key_tail, value_tail, or with shared keys and values key_slc, value_slc, key_tail), then
    position and W_1 of both compressors; out: query [G, H], gates [3G], the caches, then hidden layers of keys and
    values [M].
    """
    lengths_ref, y_ref, bias_ref, turn_ref = refs[:4]
    held = 3 if shared else 6
    caches, refs = refs[4 : 4 + held], refs[4 + held :]
    phi_refs, outs = refs[:4], refs[4:]
    q_ref, gates_ref, ks_ref, vs_ref, *ring_refs = outs[: 2 + held]
    tail_refs = (caches[2], caches[1]) if shared else caches[4:]
    hidden_refs = outs[2 + held :]
    at, (part, kv) = lengths_ref[0], (pl.program_id(0) - 1, pl.program_id(1))
    at_key_raw, at_value_raw = offsets[1:3]

    @pl.when(part < 0)
    def _():
        written = (ks_ref, vs_ref, *ring_refs)
        query = turned_query(y_ref, turn_ref, kv, q_ref.shape[0], h_dim, offsets, q_ref.dtype)
        write_token(query, y_ref, bias_ref, turn_ref, at, kv, q_ref, gates_ref, written, h_dim, offsets, shared)

    _, complete = completes(lengths_ref, config)
    count = config.compress_block // chunks
    for role, (tail_ref, source, dim) in enumerate(
        ((tail_refs[0], at_key_raw, h_dim), (tail_refs[1], at_value_raw, v_dim))
    ):

        @pl.when(complete & (part >= role * chunks) & (part < (role + 1) * chunks))
        def _(role=role, tail_ref=tail_ref, source=source, dim=dim):
            position_ref, w_ref = phi_refs[2 * role : 2 * role + 2]
            begin = (part - role * chunks) * count
            _hidden(
                y_ref,
                source + kv * dim,
                tail_ref,
                position_ref,
                w_ref,
                hidden_refs[role],
                begin,
                count,
                at,
                config,
            )


def _compressed(features, tail_ref, first, phi_refs, newest, config: NSAConfig):
    """Features `features` of phi of the block that begins at position `first`, float32.

    newest: a projection, where the newest token's features begin in it, and the token's position, unless the tail has
    the token already.
    """
    block = config.compress_block
    token = iota(pl.next_power_of_2(block))
    # A tail holds the block's tokens and no others; their order means nothing to the mean.
    slot = jnp.minimum(token, block - 1) + (0 if tail_ref.shape[0] == block else first)
    x = tail_ref[slot[:, None], features[None, :]]
    if newest is not None:  # another program writes it
        y_ref, offset, at = newest
        new = y_ref[offset + features].astype(x.dtype)
        x = jnp.where((slot == at % tail_ref.shape[0])[:, None], new[None, :], x)
    out = jnp.where(token[:, None] < block, x.astype(jnp.float32), 0.0).sum(0) / block
    if not phi_refs:
        return out
    hidden_ref, b_ref, w_ref = phi_refs
    chunks, width = hidden_ref.shape
    step = _divisor(width, _TILE // features.shape[0])
    part = iota(pl.next_power_of_2(chunks))[:, None]

    def body(i, acc):
        index = i * step + iota(step)
        parts = hidden_ref[jnp.minimum(part, chunks - 1), index[None, :]]
        hidden = jnp.where(part < chunks, parts, 0.0).sum(0) + b_ref[index].astype(jnp.float32)
        hidden = hidden / (1.0 + jnp.exp(-hidden))
        return acc + hidden[:, None] * w_ref[index[:, None], features[None, :]].astype(jnp.float32)

    acc = lax.fori_loop(0, width // step, body, jnp.zeros((step, features.shape[0]), jnp.float32))
    return out + acc.sum(0)


def emit(role, lengths_ref, turn_ref, tail_refs, phi_refs, out_refs, newest, config: NSAConfig):
    """Writes the compressed key (role 0) or value (role 1) of the block that the token completes, if it does.

    tail_refs, phi_refs, out_refs and newest have one for each role; see `_compressed`.
    """
    key_ref, value_ref = out_refs
    first, complete = completes(lengths_ref, config)
    index = first // config.compress_stride
    complete = complete & (index < key_ref.shape[0])

    @pl.when(complete & (role == 0))
    def _():
        halves = _halves(turn_ref.shape[1])
        one, two = (_compressed(half, tail_refs[0], first, phi_refs[0], newest[0], config) for half in halves)
        for half, value in zip(halves, _turned(one, two, turn_ref), strict=True):
            key_ref[index, half] = value.astype(key_ref.dtype)

    @pl.when(complete & (role == 1))
    def _():
        for begin, size in pieces(value_ref.shape[1]):
            features = begin + iota(size)
            value = _compressed(features, tail_refs[1], first, phi_refs[1], newest[1], config)
            value_ref[index, features] = value.astype(value_ref.dtype)


def _emit_kernel(*refs, config: NSAConfig):
    """refs: lengths [1], cos and sin [2, H/2], key and value tails [l or S, H or V], compressed keys and values
    (aliased), then hidden [chunks, M], b_1 and W_2 of both compressors; out: compressed keys [C, H], values [C, V]."""
    lengths_ref, turn_ref, *tail_refs = refs[:4]
    phi_refs, out_refs = (refs[6:9], refs[9:12]), refs[12:]
    emit(pl.program_id(0), lengths_ref, turn_ref, tail_refs, phi_refs, out_refs, (None, None), config)


def _one_row(*shape):
    return pl.BlockSpec((None, *shape), lambda s, k, b: (b, *(0 for _ in shape)))


def _whole(array):
    return pl.BlockSpec(array.shape, lambda s, k, b: (0,) * array.ndim)


def _cache(array):
    return pl.BlockSpec((None, array.shape[1], None, array.shape[3]), lambda s, k, b: (b, 0, k, 0))


def _shape_of(array):
    return jax.ShapeDtypeStruct(array.shape, array.dtype)


def _emit(turn, lengths, tails, key_cmp, value_cmp, phis: Sequence[Phi], hidden, config: NSAConfig):
    """The compressed keys and values with those of blocks that are complete, from the hidden layers of both phis."""
    inputs = [lengths, turn, *tails, key_cmp, value_cmp]
    in_specs = [pl.BlockSpec((1,), lambda s, k, b: (b,)), _one_row(*turn.shape[1:]), *map(_cache, inputs[2:])]
    for phi, partial in zip(phis, hidden, strict=True):
        inputs += [partial, phi.b_1, phi.w_2]
        in_specs += [
            pl.BlockSpec((None, None, *partial.shape[2:]), lambda s, k, b: (b, k, 0, 0)),
            _whole(phi.b_1),
            _whole(phi.w_2),
        ]
    return triton_call(
        functools.partial(_emit_kernel, config=config),
        grid=(2, key_cmp.shape[2], lengths.shape[0]),
        in_specs=in_specs,
        out_specs=[_cache(key_cmp), _cache(value_cmp)],
        out_shape=[_shape_of(key_cmp), _shape_of(value_cmp)],
        input_output_aliases={4: 0, 5: 1},
        num_warps=4,
        num_stages=2,
        name="nsa_decode_emit",
    )(*inputs)


def token_arrays(projected, gate_bias, turn, lengths, caches: Sequence[jax.Array]):
    """What every kernel that writes a token reads first and puts out first.

    The arguments are those of `append_token`; `caches` are the arrays that it writes in place.

    Returns:
      Inputs (lengths, projection, gate bias, turn, caches) and their specs; specs and shapes of what is put out (query,
      gates, caches); and the aliases.
    """
    batch, num_heads = lengths.shape[0], gate_bias.shape[0]
    num_kv, h_dim = caches[0].shape[2:]
    group = num_heads // num_kv
    inputs = [lengths, projected, gate_bias.reshape(num_kv, 3 * group), turn, *caches]
    in_specs = [
        pl.BlockSpec((1,), lambda s, k, b: (b,)),
        _one_row(projected.shape[1]),
        pl.BlockSpec((None, 3 * group), lambda s, k, b: (k, 0)),
        _one_row(2, h_dim // 2),
        *map(_cache, caches),
    ]
    out_specs = [per_pair(group, h_dim), per_pair(3 * group), *map(_cache, caches)]
    out_shape = [
        jax.ShapeDtypeStruct((batch, num_kv, group, h_dim), projected.dtype),
        jax.ShapeDtypeStruct((batch, num_kv, 3 * group), jnp.float32),
        *map(_shape_of, caches),
    ]
    return inputs, in_specs, out_specs, out_shape, {4 + index: 2 + index for index in range(len(caches))}


@functools.partial(jax.jit, static_argnames="config")
def append_token(
    projected, gate_bias, turn, lengths, caches, key_cmp, value_cmp, phis: Sequence[Phi], *, config: NSAConfig
):
    """Writes one token per row into a layer's cache.

    Args:
      projected: [B, F], the layer's projection, in the order of `NSAttention.widths`; F may be padded, and further rows
        are not read.
      gate_bias: [N, 3].
      turn: float32 [B, 2, H/2], cosine and sine of RoPE at the token's position.
      lengths: int32 [B], the token's position. A row at the capacity keeps its cache.
      caches: key_slc, value_slc, key_win, value_win, key_tail, value_tail; all are written in place. Where the branches
        share their keys and values, key_win, value_win and value_tail are None.
      key_cmp: [B, C, K, H].
      value_cmp: [B, C, K, V].
      phis: the compressors of keys and values.
      config: block geometry.

    Returns:
      query [B, 1, N, H], gates float32 [B, 1, N, 3], and the arrays of the cache in the same order: six, then two.
    """
    batch, num_heads = lengths.shape[0], gate_bias.shape[0]
    num_kv, h_dim = key_cmp.shape[2:]
    v_dim = value_cmp.shape[3]
    kept = [array for array in caches if array is not None]
    shared = len(kept) < len(caches)
    offsets = projection_offsets(num_heads, num_kv, h_dim, v_dim, shared)
    chunks = _divisor(config.compress_block, 8)  # enough programs that reading W_1 takes no longer than a launch

    inputs, in_specs, out_specs, out_shape, aliases = token_arrays(projected, gate_bias, turn, lengths, kept)
    for role, phi in enumerate(phis):
        inputs += [phi.position, phi.w_1]
        in_specs += [_whole(phi.position), _whole(phi.w_1)]
        width = phi.b_1.shape[0]
        out_shape.append(jax.ShapeDtypeStruct((batch, num_kv, chunks, width), jnp.float32))
        out_specs.append(
            pl.BlockSpec(
                (None, None, None, width),
                lambda s, k, b, role=role: (b, k, jnp.clip(s - 1 - role * chunks, 0, chunks - 1), 0),
            )
        )
    query, gates, *written = triton_call(
        functools.partial(
            _append_kernel,
            h_dim=h_dim,
            v_dim=v_dim,
            offsets=offsets,
            chunks=chunks,
            shared=shared,
            config=config,
        ),  # fmt: skip
        grid=(1 + 2 * chunks, num_kv, batch),
        in_specs=in_specs,
        out_specs=out_specs,
        out_shape=out_shape,
        input_output_aliases=aliases,
        num_warps=4,
        num_stages=2,
        name="nsa_decode_append",
    )(*inputs)
    written, hidden = written[: len(kept)], written[len(kept) :]
    key_slc, value_slc, *rings = written
    tails = (rings[0], value_slc) if shared else rings[2:]
    compressed = _emit(turn, lengths, tails, key_cmp, value_cmp, phis, hidden, config)
    caches = (key_slc, value_slc, None, None, *rings, None) if shared else written
    query = query.reshape(batch, 1, num_heads, h_dim)
    return query, gates.reshape(batch, 1, num_heads, 3), (*caches, *compressed)
