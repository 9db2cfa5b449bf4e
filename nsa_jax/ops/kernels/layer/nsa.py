"""All of NSA with one backward pass: the gated sum of the three branches (paper eq. 5).

Run as three ops, each branch would keep its output to sum it with its cotangent row by row (`row_delta`). But that sum
is the gate's gradient times the gate, so it is computed once for all branches here, which frees the three outputs, each
as large as the query, before any branch's backward pass begins. The branches' passes then run one after the other:
optimization barriers keep the compiler from holding several cotangents at once.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from nsa_jax.ops.blocks import NSAConfig
from nsa_jax.ops.choices import NSAPlan
from nsa_jax.ops.kernels.layer import gate_kernels
from nsa_jax.ops.kernels.range_attention import attention as range_attention
from nsa_jax.ops.kernels.range_attention.tiles import GatedSum, KnownRanges
from nsa_jax.ops.kernels.selected import whole_row_sm90
from nsa_jax.ops.kernels.selected.attention import selected_forward
from nsa_jax.ops.kernels.selected.backward import selected_backward
from nsa_jax.ops.kernels.selection.select import select_blocks
from nsa_jax.ops.kernels.softmax import in_rows
from nsa_jax.ops.kernels.triton import first_derivative

# Under these names remat policies keep what the backward pass needs.
_RESIDUALS = "nsa_attention_residuals"
_INDICES = "nsa_block_indices"
_SUM = "nsa_gated_sum"
_QUERY = "nsa_query"


@dataclasses.dataclass(frozen=True)
class _Static:
    """What is known while tracing."""

    config: NSAConfig
    plan: NSAPlan
    packed: bool  # rows hold several documents
    fold_gates: bool  # no gate is negative: the backward pass takes them into the log-sum-exp
    kv_heads: int  # how many key/value heads of a batch entry have become batch entries; 1 if they have not
    offset: int | None  # query_offset, where it is a Python int
    window_start: int | None  # of the window's keys, where it is a Python int
    gradients: int  # of the query that are handed out, one of each branch's backward pass; 1: they are added up
    keeps_sum: bool = False  # see `nsa_attention_by_kv_head`


def nsa_attention(
    query,
    key_cmp,
    value_cmp,
    key_slc,
    value_slc,
    key_win,
    value_win,
    gates,
    *,
    config: NSAConfig,
    segment_start,
    query_offset,
    window_start,
    nonnegative_gates: bool,
    plan: NSAPlan,
) -> tuple[jax.Array, jax.Array]:
    """See `nsa_jax.nsa_attention`; returns the output and the block lists."""
    tensors: tuple[jax.Array, ...] = (query, key_cmp, value_cmp, key_slc, value_slc, key_win, value_win, gates)
    kv_heads = 1
    if plan.heads_to_batch is not None:
        # Rearranged here, all branches share one copy, forward and backward; as batch entries the key/value heads need
        # no kernels of their own.
        kv_heads = key_slc.shape[2]
        tensors = tuple(_heads_to_batch(x, kv_heads) for x in tensors)
    return nsa_attention_by_kv_head(
        (checkpoint_name(tensors[0], _QUERY),),
        tensors[1:],
        kv_heads=kv_heads,
        config=config,
        segment_start=segment_start,
        query_offset=query_offset,
        window_start=window_start,
        nonnegative_gates=nonnegative_gates,
        plan=plan,
    )


def nsa_attention_by_kv_head(
    queries: tuple[jax.Array, ...],
    others: tuple[jax.Array, ...],
    *,
    kv_heads: int,
    config: NSAConfig,
    segment_start,
    query_offset,
    window_start,
    nonnegative_gates: bool,
    plan: NSAPlan,
    keeps_sum: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """As `nsa_attention`, of tensors whose key/value heads are batch entries already.

    Args:
      queries: the query [B * K, T, G, H]. Given as often as there are backward passes, each gets the gradient of one:
        three times, or twice where `plan.joint_window`. Given once, it gets their sum.
      others: the arguments of `nsa_jax.nsa_attention` after it: keys and values [B * K, S, 1, H or V], gates
        [B * K, T, G, 3].
      kv_heads: K; 1 for tensors as `nsa_attention` takes them, whose key/value heads are no batch entries.
      config, query_offset, window_start, nonnegative_gates: see `nsa_jax.nsa_attention`.
      segment_start: int [B, T] or None.
      plan: the kernels.
      keeps_sum: the output is kept for the backward pass, so that the window's kernel may store it. Recomputed from
        the branches' outputs, it needs a kernel of its own.

    Returns:
      [B, T, K * G, V] and the block lists, int32 [B, T, K, n].
    """
    query = queries[0]
    packed = segment_start is not None
    if segment_start is None:
        segment_start = jnp.zeros(query.shape[:2], jnp.int32)
    elif kv_heads > 1:
        segment_start = jnp.repeat(segment_start, kv_heads, axis=0)
    offset = jnp.asarray(query_offset, jnp.int32)
    window_start = 0 if window_start is None else window_start
    static_offset, static_window = (x if isinstance(x, int) else None for x in (query_offset, window_start))
    gates = nonnegative_gates, kv_heads, static_offset, static_window
    static = _Static(config, plan, packed, *gates, gradients=len(queries), keeps_sum=keeps_sum)
    positions = segment_start.astype(jnp.int32), offset, jnp.asarray(window_start, jnp.int32)
    out, indices = _nsa(static, queries, others, positions)
    if kv_heads > 1:
        indices = indices.reshape(-1, kv_heads, *indices.shape[1:2], indices.shape[-1]).swapaxes(1, 2)
    return out, indices


def _heads_to_batch(x: jax.Array, kv_heads: int) -> jax.Array:
    """[B, T, K * G, D] as [B * K, T, G, D]."""
    batch, length, heads, dim = x.shape
    x = x.reshape(batch, length, kv_heads, heads // kv_heads, dim).swapaxes(1, 2)
    return x.reshape(batch * kv_heads, length, heads // kv_heads, dim)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _nsa(static: _Static, queries, others, positions):
    return _forward(static, queries, others, positions, differentiated=False)[0]


def _ranges(static: _Static, query, key_cmp, key_win, positions):
    """(low, high) of the compressed and of the window branch."""
    segment_start, offset, window_start = positions
    compressed = range_attention.compressed_ranges(query, segment_start, offset, static.config)
    low, high = range_attention.window_ranges(query, segment_start, offset, static.config.window)
    window = (low - window_start, high - window_start)
    clip = range_attention.clip_ranges
    return clip(*compressed, key_cmp.shape[1]), clip(*window, key_win.shape[1])


def _known_ranges(static: _Static, query, key_cmp, key_win) -> tuple[KnownRanges | None, KnownRanges | None]:
    """What `_ranges` returns, where tracing knows it."""
    if static.packed or static.offset is None or static.window_start is None:
        return None, None
    length, offset = query.shape[1], static.offset
    compressed = range_attention.known_compressed_ranges(length, offset, key_cmp.shape[1], static.config)
    in_window = offset - static.window_start, key_win.shape[1], static.config.window, -static.window_start
    return compressed, range_attention.known_window_ranges(length, *in_window)


def _forward(static: _Static, queries, others, positions, differentiated: bool):
    """((output, block lists), residuals).

    Args:
      static: see `_Static`.
      queries, others: see `nsa_attention_by_kv_head`.
      positions: (segment_start, query_offset, window_start).
      differentiated: whether a backward pass needs the residuals. If none does, they are None, and the kernel of the
        last branch may store the sum of all branches in place of its output.
    """
    segment_start, offset, _ = positions
    query = queries[0]  # one residual, however often it was given
    key_cmp, value_cmp, key_slc, value_slc, key_win, value_win, gates = others
    config = static.config
    (low_cmp, high_cmp), (low_win, high_win) = _ranges(static, query, key_cmp, key_win, positions)
    known_cmp, known_win = _known_ranges(static, query, key_cmp, key_win)
    known_offset = offset if static.offset is None else static.offset
    # One branch after the other: some kernels work on rearranged copies as large as the query. The barrier is on keys
    # and not on the query, so that branches that rearrange the query alike share one copy.
    plan = static.plan

    def window(gated: GatedSum | None = None):
        args = query, key_win, value_win, low_win, high_win, plan.window, config.window, known_win
        return range_attention.forward(*args, gated)

    def gated_sum(*outs: jax.Array) -> GatedSum:
        return GatedSum(gates, outs, static.kv_heads, keep=differentiated)

    # Beside two outputs of its own, the joint kernel takes as long for the sum as a kernel of its own.
    stores_sum = not differentiated or (static.keeps_sum and not plan.joint_window)
    sums_in_kernel = plan.sums_in_kernel and stores_sum
    if not plan.joint_window and not sums_in_kernel:
        window_pair = window()
        key_cmp, window_pair = lax.optimization_barrier((key_cmp, window_pair))
    if plan.compressed is not None:
        out_cmp, lse_cmp = range_attention.forward(
            query, key_cmp, value_cmp, low_cmp, high_cmp, plan.compressed, None, known_cmp
        )
    else:
        out_cmp = jnp.zeros((*query.shape[:3], value_cmp.shape[-1]), query.dtype)
        lse_cmp = jnp.full(query.shape[:3], -jnp.inf, jnp.float32)
    indices = select_blocks(
        query,
        key_cmp,
        lse_cmp,
        config=config,
        num_keys=key_slc.shape[1],
        segment_start=segment_start if static.packed else None,
        query_offset=known_offset,
        plan=plan.selection,
    )
    indices = checkpoint_name(indices, _INDICES)
    selected = query, key_slc, value_slc, indices, segment_start, known_offset
    if plan.joint_window:
        joint = functools.partial(
            whole_row_sm90.forward, *selected, plan.selected.forward.rest.tiles, static.packed, config.window
        )
        results = joint(gated_sum(out_cmp) if sums_in_kernel else None)
    else:
        selected_pair = selected_forward(*selected, config.select_block, static.packed, plan.selected.forward)
        last = window(gated_sum(out_cmp, selected_pair[0])) if sums_in_kernel else [window_pair]
        results = [selected_pair, *last]
    if sums_in_kernel:
        *results, total = results
        if not differentiated:
            return (total, indices), None
        total = checkpoint_name(lax.optimization_barrier(total), _SUM)
    # The barrier hides the kernels from XLA's dynamic-slice fusion. In a scan over layers that keeps their results, JAX
    # 0.11's lets a kernel write into the array of all layers, and runs it again for whoever else reads them.
    branches = (lax.optimization_barrier(x) for x in ((out_cmp, lse_cmp), *results))
    outs, lses = checkpoint_name(tuple(zip(*branches, strict=True)), _RESIDUALS)
    if not sums_in_kernel:
        total = gate_kernels.gated_sum(gates, outs, static.kv_heads)
    return (total, indices), (query, others, positions, indices, outs, lses)


def _nsa_fwd(static: _Static, queries, others, positions):
    query, *others = first_derivative(queries[0], *others)
    return _forward(static, (query,), tuple(others), positions, differentiated=True)


def _fold_gate(lse, gate):
    return jnp.where(lse == -jnp.inf, -jnp.inf, lse - jnp.log(gate))


def _nsa_bwd(static: _Static, residuals, cotangents):
    query, others, positions, indices, outs, lses = residuals
    segment_start, offset, _ = positions
    plan = static.plan
    key_cmp, value_cmp, key_slc, value_slc, key_win, value_win, gates = others
    (d_out,) = first_derivative(cotangents[0])
    gate = gates.astype(jnp.float32)
    d_gates, d_out = gate_kernels.gate_gradients(outs, d_out, static.kv_heads)
    # From here on the outputs are not needed.
    d_out, d_gates = lax.optimization_barrier((d_out, d_gates))
    (low_cmp, high_cmp), (low_win, high_win) = _ranges(static, query, key_cmp, key_win, positions)
    known_cmp, known_win = _known_ranges(static, query, key_cmp, key_win)

    def branch(i: int) -> tuple[jax.Array, jax.Array, jax.Array]:
        """(delta, lse, cotangent) of a branch's backward pass."""
        if static.fold_gates:
            # A smaller log-sum-exp makes the recomputed weights come out times the gate. That is all the gate does: to
            # dv = weights^T d_out, and to the scores' gradients weights * (d_out v^T - sum(out * d_out)). No cotangent
            # of the branch's own is written, and branches that rearrange d_out share one copy.
            return d_gates[i], in_rows(_fold_gate, lses[i], gate[..., i]), d_out
        cotangent = gate[..., i, None] * d_out.astype(jnp.float32)
        return gate[..., i] * d_gates[i], lses[i], cotangent.astype(query.dtype)

    d_queries: list[jax.Array] = []

    def before() -> jax.Array | None:
        """What the next branch adds its gradient of the query to, unless the gradients are handed out one by one."""
        return d_queries.pop() if static.gradients == 1 else None

    def after(key: jax.Array) -> jax.Array:
        """Lets the next branch wait for those before: through its key, or its cotangent would be written early."""
        nonlocal d_out
        if static.fold_gates:
            d_queries[-1], key = lax.optimization_barrier((d_queries[-1], key))
        else:
            d_queries[-1], key, d_out = lax.optimization_barrier((d_queries[-1], key, d_out))
        return key

    known_offset = offset if static.offset is None else static.offset
    selected = query, key_slc, value_slc, indices, *branch(1)
    if plan.joint_window:
        assert static.fold_gates  # so that both branches have the same cotangent
        delta, lse, _ = branch(2)
        d_query, d_key_slc, d_value_slc = whole_row_sm90.backward(
            *selected, segment_start, known_offset, plan.selected.backward, static.packed,
            window=(delta, lse, static.config.window),
        )  # fmt: skip
    else:
        d_query, d_key_slc, d_value_slc = selected_backward(
            *selected,
            select_block=static.config.select_block,
            segment_start=segment_start,
            query_offset=known_offset,
            packed=static.packed,
            plan=plan.selected.backward,
        )
    d_queries.append(d_query)
    if plan.compressed is not None:
        key_cmp = after(key_cmp)
        d_query, d_key_cmp, d_value_cmp = range_attention.backward(
            query, key_cmp, value_cmp, low_cmp, high_cmp, *branch(0), plan.compressed, known_cmp, before()
        )
        d_queries.append(d_query)
    else:
        d_key_cmp, d_value_cmp = jnp.zeros_like(key_cmp), jnp.zeros_like(value_cmp)
    if plan.joint_window:
        d_key_win, d_value_win = jnp.zeros_like(key_win), jnp.zeros_like(value_win)
    else:
        key_win = after(key_win)
        d_query, d_key_win, d_value_win = range_attention.backward(
            query, key_win, value_win, low_win, high_win, *branch(2), plan.window, known_win, before()
        )
        d_queries.append(d_query)
    d_queries += [jnp.zeros_like(query)] * (static.gradients - len(d_queries))
    d_gates = jnp.moveaxis(d_gates.astype(gates.dtype), 0, -1)
    d_others = (d_key_cmp, d_value_cmp, d_key_slc, d_value_slc, d_key_win, d_value_win, d_gates)
    return tuple(d_queries), d_others, None


_nsa.defvjp(_nsa_fwd, _nsa_bwd)
