"""Sum of the selected branch's partial outputs for Hopper: the counterpart of `by_block_triton._sum_kernel`.

A row of the output is held by 4 threads, as in the layout of a product. They load all partials of the row themselves
(`sm90_gather`). So no thread waits at a barrier, and several partials are always on their way.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

from nsa_jax.ops.kernels.softmax import LN2, LOG2E, MINUS_INFINITY
from nsa_jax.ops.tiles import ROWS

# How many partials of a row, and how many of their log-sum-exps, are loaded together. On an H200 the kernel takes about
# the same time with one, two or three partials (0.98, 0.98 and 0.96 ms for 32,768 tokens, N=32, K=8, H=128).
_PARTIALS = 2
_LSES = 8


def add_partials(first_row, count, chunk_tokens: int, partial, partial_lse, out, lse, *, num_listed: int):
    """Adds the partials of some rows of the inverted lists to the attention so far.

    Args:
      first_row: int32 [1], the first of those rows, each of which is a (batch row, kv head, range of tokens).
      count: int32 [rows, chunk_tokens or more], how many partials a token has: the first places of its list.
      chunk_tokens: tokens of a row.
      partial: [R, chunk_tokens * num_listed, G, V] of R rows, V a multiple of 32.
      partial_lse: float32 [R, chunk_tokens * num_listed, G], in base 2.
      out: [B, T, K, G, V].
      lse: float32 [B, T, K, G], natural, -inf where `out` is exactly 0.
      num_listed: n.

    Returns:
      The new (out, lse).
    """
    # A jaxlib without GPU support cannot import Mosaic GPU, and must still import the library.
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from nsa_jax.ops.kernels import sm90_gather, sm90_reduce

    at_once, _, group, v_dim = partial.shape
    batch, length, num_kv = out.shape[:3]
    num_chunks = count.shape[0] // (batch * num_kv)

    def nsa_selected_forward_sum(row_ref, count_ref, partial_ref, partial_lse_ref, out_ref, lse_ref):
        local_row = lax.axis_index("row")
        list_row = row_ref[0] + local_row
        pair, chunk = lax.div(list_row, jnp.int32(num_chunks)), lax.rem(list_row, jnp.int32(num_chunks))
        batch_row, kv_head = lax.div(pair, jnp.int32(num_kv)), lax.rem(pair, jnp.int32(num_kv))
        tokens = jnp.minimum(chunk_tokens, length - chunk * chunk_tokens)
        inside, token, head = sm90_gather.rows_of_tile(lax.axis_index("tile"), jnp.maximum(tokens, 1) * group, group)
        num_partials = sm90_gather.load_numbers(count_ref, token + list_row * count.shape[1])
        num_partials = jnp.where(inside & (tokens > 0), num_partials, 0)
        most = sm90_reduce.max_in_warp(num_partials)
        first = ((token + local_row * chunk_tokens) * num_listed) * group + head
        last = jnp.maximum(num_partials - 1, 0)

        def place(slot):
            """Where each row's partial of that slot lies; past the last one the last again."""
            return first + jnp.minimum(last, slot) * group

        def load_lse(slot):
            return sm90_gather.load_numbers(partial_lse_ref, place(slot))

        def peak_of(step, peak):
            slots = [step * _LSES + i for i in range(_LSES)]
            return functools.reduce(jnp.maximum, [load_lse(slot) for slot in slots], peak)

        @pl.when(most > 0)
        def _add():
            row = ((batch_row * length + chunk * chunk_tokens + token) * num_kv + kv_head) * group + head
            acc = sm90_gather.load_rows(out_ref, row)
            before = jnp.maximum(sm90_gather.load_numbers(lse_ref, row) * LOG2E, MINUS_INFINITY)
            peak = lax.fori_loop(0, pl.cdiv(most, _LSES), peak_of, before)
            total = jnp.exp2(before - peak)
            acc = acc.astype(jnp.float32) * lax.broadcast_in_dim(total, acc.shape, [0])

            def add(step, state):
                acc, total = state
                slots = [step * _PARTIALS + i for i in range(_PARTIALS)]
                parts = [sm90_gather.load_rows(partial_ref, place(slot)) for slot in slots]
                for slot, part in zip(slots, parts, strict=True):
                    share = jnp.where(slot < num_partials, jnp.exp2(load_lse(slot) - peak), 0.0)
                    total += share
                    acc += part.astype(jnp.float32) * lax.broadcast_in_dim(share, acc.shape, [0])
                return acc, total

            acc, total = lax.fori_loop(0, pl.cdiv(most, _PARTIALS), add, (acc, total))
            acc *= lax.broadcast_in_dim(1.0 / total, acc.shape, [0])
            # Rows without partials keep what they have: what was read for them was never written, and may be NaN.
            mine = (num_partials > 0).astype(jnp.int32)
            sm90_gather.store_rows(out_ref, row, acc.astype(out.dtype), mine)
            sm90_gather.store_numbers(lse_ref, row, (peak + jnp.log(total) * LOG2E) * LN2, mine)

    kernel = pl.kernel(
        nsa_selected_forward_sum,
        mesh=plgpu.Mesh(grid=(at_once, pl.cdiv(chunk_tokens * group, ROWS)), grid_names=("row", "tile")),
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
        name="nsa_selected_forward_sum",
    )

    @jax.custom_batching.sequential_vmap  # kernels that write in place have no rule of their own
    def update(so_far, *arrays):
        return pl.run_state(lambda refs: kernel(*arrays, *refs))(so_far)

    so_far = out.reshape(-1, v_dim), lse.reshape(-1)
    arrays = first_row, count.reshape(-1), partial.reshape(-1, v_dim), partial_lse.reshape(-1)
    new_out, new_lse = update(so_far, *arrays)
    return new_out.reshape(out.shape), new_lse.reshape(lse.shape)
