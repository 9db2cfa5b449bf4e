"""How a step of decoding is launched: attention of tokens in the cache, or of one that is written into it first.

The kernels for short rows, for pairs, and for everything else (short.py, pair.py and step.py) each have a class
`Launch`. It says how the first kernel is launched, has the function of its programs, and adds the kernels that follow.
`append_and_attend` also writes the new token into the cache: before a program attends, it does what append.py's does.

Of the programs that share a (row, key/value head) pair, those that read the new token or the compressed block that it
completes write it before (`Launch.needs`), the token with its query and gates. None waits for another. That is safe
because every place is written once by each of them, with the same bits:

- Query, gates and token come from inputs that no program writes, the compressed block from these and the tails. In a
  tail only the new token's slot changes, and what is loaded from it is replaced by the projection. If the tail is a
  ring, that slot held a token from before the compressed block, in the window's ring one from before the window.
- Whatever else a program reads of these arrays it has written itself, with a barrier between. Compressed keys that it
  loaded before are loaded again where it writes one.
- In a full row no program writes to the cache, neither a token nor a compressed block.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from nsa_jax.ops.blocks import NSAConfig
from nsa_jax.ops.choices import Choice
from nsa_jax.ops.kernels.decode import append, pair, short, step
from nsa_jax.ops.kernels.decode.softmax_parts import Positions, per_pair, query_position
from nsa_jax.ops.kernels.triton import barrier, triton_call

_LAUNCHES: dict[str, Any] = {"decode.pair": pair.Launch, "decode.short": short.Launch, "decode.step": step.Launch}


def _attend_kernel(*refs, num_starts, num_queries, attend):
    """refs: lengths [1], segment_start [1] if packed, gates [G, 3], query [G, H] and the caches; out: `attend`'s."""
    lengths_ref, start_refs = refs[0], refs[1 : 1 + num_starts]
    gates_ref, q_ref, *others = refs[1 + num_starts :]
    caches, outs = others[:6], others[6:]

    def gate_of(head, branch):
        return gates_ref[head, branch].astype(jnp.float32)

    t, start = query_position(lengths_ref, start_refs, num_queries, caches[2].shape[0])
    attend(q_ref, gate_of, caches, outs, t, start)


def _append_kernel(*refs, h_dim, v_dim, offsets, shared, launch, config: NSAConfig):
    """refs: lengths [1] before the token, projection [F], gate bias [3G], cos and sin [2, H/2], the caches in the order
    of `append.append_token`, compressed ones last (aliased), and segment_start [1]; out: query [G, H], gates [3G], the
    caches, and those of `launch.attend`."""
    lengths_ref, y_ref, bias_ref, turn_ref = refs[:4]
    held = 3 if shared else 6
    start_ref, q_ref, gates_ref, *others = refs[4 + held + 2 :]
    caches, compressed, outs = others[:held], others[held : held + 2], others[held + 2 :]
    read = (*compressed, *caches[:2], *(caches[:2] if shared else caches[2:4]))
    at, kv = lengths_ref[0], pl.program_id(1)
    t, start = jnp.minimum(at, caches[0].shape[0] - 1), jnp.maximum(start_ref[0], 0)
    early = pair.load_keys(compressed[0], launch.early_keys) if launch.early_keys else []
    needs_token, needs_block = launch.needs(t, start)
    query = append.turned_query(y_ref, turn_ref, kv, q_ref.shape[0], h_dim, offsets, q_ref.dtype)

    @pl.when(needs_token)
    def _token():
        append.write_token(query, y_ref, bias_ref, turn_ref, at, kv, q_ref, gates_ref, caches, h_dim, offsets, shared)

    newest = [(y_ref, offsets[1] + kv * h_dim, at), (y_ref, offsets[2] + kv * v_dim, at)]
    tails = (caches[2], caches[1]) if shared else caches[4:]
    _, complete = append.completes(lengths_ref, config)

    @pl.when(complete & needs_block)
    def _emit():
        for role in range(2):
            append.emit(role, lengths_ref, turn_ref, tails, ((), ()), compressed, newest, config)
        barrier()

    def gate_of(head, branch):
        return gates_ref[3 * head + branch]

    early = [pair.load_keys_again(early, compressed[0], complete)] if early else []
    launch.attend(query, gate_of, read, outs, t, start, *early)


@functools.partial(jax.jit, static_argnames=("config", "plan"))
def decode_attention(
    query, key_cmp, value_cmp, key_slc, value_slc, key_win, value_win, gates, lengths, config: NSAConfig, segment_start,
    plan: Choice,
):  # fmt: skip
    """See `nsa_jax.decode_attention`; returns the output [B, T, N, V] and the block lists int32 [B, T, K, n]."""
    batch, num_queries, num_heads, h_dim = query.shape
    num_cmp, num_kv, v_dim = value_cmp.shape[1:]
    group, num_rows = num_heads // num_kv, batch * num_queries
    launch = _LAUNCHES[plan.kernel](
        num_rows, num_kv, group, num_cmp, key_slc.shape[1], (h_dim, v_dim), query.dtype, config, plan.tiles
    )
    where = Positions.of(lengths, segment_start, num_queries)

    def cache(array):  # one row's and head's slice
        return pl.BlockSpec((None, array.shape[1], None, array.shape[3]), lambda s, k, r: (r // num_queries, 0, k, 0))

    arrays = (key_cmp, value_cmp, key_slc, value_slc, key_win, value_win)
    query_by_pair = query.reshape(num_rows, num_kv, group, h_dim)
    outs = triton_call(
        functools.partial(_attend_kernel, num_starts=len(where.starts), num_queries=num_queries, attend=launch.attend),
        grid=launch.grid,
        in_specs=[*where.specs(), per_pair(group, 3), per_pair(group, h_dim), *map(cache, arrays)],
        out_specs=launch.out_specs,
        out_shape=launch.out_shape,
        name=launch.name,
        **launch.options,
    )(*where.arrays(), gates.reshape(num_rows, num_kv, group, 3), query_by_pair, *arrays)
    out, lists = launch.finish(outs, query_by_pair, gates.reshape(num_rows, num_heads, 3), arrays, where)
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
    launch = _LAUNCHES[plan.kernel](
        batch, num_kv, group, num_cmp, caches[0].shape[1], (h_dim, v_dim), dtype, config, plan.tiles
    )
    arrays = [*kept, key_cmp, value_cmp]
    inputs, in_specs, out_specs, out_shape, aliases = append.token_arrays(projected, gate_bias, turn, lengths, arrays)
    offsets = append.projection_offsets(num_heads, num_kv, h_dim, v_dim, shared)
    query, gates, *outs = triton_call(
        functools.partial(
            _append_kernel,
            h_dim=h_dim,
            v_dim=v_dim,
            offsets=offsets,
            shared=shared,
            launch=launch,
            config=config,
        ),
        grid=launch.grid,
        in_specs=[*in_specs, in_specs[0]],
        out_specs=[*out_specs, *launch.out_specs],
        out_shape=[*out_shape, *launch.out_shape],
        input_output_aliases=aliases,
        name="nsa_decode_token",
        **launch.options,
    )(*inputs, segment_start)
    written, outs = outs[: len(arrays)], outs[len(arrays) :]
    key_slc, value_slc, *rings = written[:-2]
    window = (key_slc, value_slc) if shared else rings[:2]
    read = (*written[-2:], key_slc, value_slc, *window)
    where = Positions.of(lengths + 1, segment_start, 1)
    out, lists = launch.finish(outs, query, gates.reshape(batch, num_heads, 3), read, where)
    if shared:
        written = [key_slc, value_slc, None, None, *rings, None, *written[-2:]]
    return out.reshape(batch, 1, num_heads, v_dim), lists.reshape(batch, 1, num_kv, -1), tuple(written)
