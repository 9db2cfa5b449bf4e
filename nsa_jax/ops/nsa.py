"""The public ops of Native Sparse Attention (arXiv 2502.11089): argument checks and the choice of implementation.

Shapes use B batch, T query tokens, S key tokens, N query heads, K key/value heads, G = N / K, H and V head dims of
keys and values, C compressed blocks, J = ceil(S / select_block) selection blocks, n = num_selected.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from nsa_jax.ops import blocks, checks
from nsa_jax.ops.blocks import NSAConfig
from nsa_jax.ops.decode import gated_sum
from nsa_jax.ops.implementations import choose
from nsa_jax.ops.plan import Shape


def compressed_attention(
    query: Float[Array, "B T N H"],
    key_cmp: Float[Array, "B C K H"],
    value_cmp: Float[Array, "B C K V"],
    *,
    config: NSAConfig,
    segment_start: Int[Array, "B T"] | None = None,
    query_offset=None,
    implementation: str | None = None,
) -> tuple[Float[Array, "B T N V"], Float[Array, "B T N"]]:
    """Attention over the compressed blocks that lie wholly inside each query's visible past (paper eq. 8).

    Block i covers tokens [i*d, i*d + l); the query at t sees it iff i*d >= segment_start[t] and i*d + l - 1 <= t.
    A query that sees no block gets exactly 0, with zero gradients.

    Args:
      query: [B, T, N, H], float32 or bfloat16. Scores are scaled by 1/sqrt(H).
      key_cmp: [B, C, K, H] compressed keys, C = 0 if S < l else (S - l) // d + 1.
      value_cmp: [B, C, K, V] compressed values.
      config: block geometry.
      segment_start: int [B, T], row position of the first token of each query's document; None means 0 everywhere. The
        query at position t may use a key at p iff segment_start[t] <= p <= t.
      query_offset: position of the first query in the keys' row, an int or int32 scalar; None: queries and keys are the
        same tokens (S = T). A traced one below 0 counts as 0. One beyond S - T is taken as it is: S is not known here.
      implementation: "reference", "xla", "pallas", or None for the best that supports the inputs on this device.

    Returns:
      The output [B, T, N, V] in query's dtype, and the natural-log log-sum-exp of the scaled scores, float32
      [B, T, N], -inf where a query sees nothing. The log-sum-exp carries no gradient.

    Raises:
      ValueError: an argument has the wrong shape, dtype or value.
      NotImplementedError: the named implementation cannot serve these inputs.
    """
    checks.nsa_config(config)
    sizes = checks.query(query)
    checks.key_value(("key_cmp", "value_cmp"), key_cmp, value_cmp, query, sizes, "C")
    query_offset = checks.position("query_offset", query_offset)
    last = checks.last_position(query_offset, sizes["T"])
    checks.length("key_cmp", sizes["C"], query_offset, sizes["T"], blocks.num_compressed(last, config))
    checks.segments(segment_start, sizes)
    serving = choose("compressed_attention", implementation, Shape.of(query, key_cmp, value_cmp))
    out, lse = serving.compressed_attention(
        query,
        key_cmp,
        value_cmp,
        config=config,
        segment_start=checks.clip_segments(segment_start),
        query_offset=checks.clip_offset(query_offset),
    )
    return out, jax.lax.stop_gradient(lse)


def select_blocks(
    query: Float[Array, "B T N H"],
    key_cmp: Float[Array, "B C K H"],
    lse: Float[Array, "B T N"],
    *,
    config: NSAConfig,
    segment_start: Int[Array, "B T"] | None = None,
    query_offset=None,
    num_keys: int | None = None,
    implementation: str | None = None,
) -> Int[Array, "B T K n"]:
    """The selection blocks each query reads, chosen by compressed-attention probability (paper eq. 8 to 12).

    Probabilities are recomputed from `lse`, folded into selection blocks and summed over the G heads of a key/value
    head. The first `num_initial` and last `num_local` blocks of [segment_start, t] are always taken and count
    towards n; the rest are the highest scores, ties to the lower index. No gradient flows.

    Args:
      query: [B, T, N, H], float32 or bfloat16.
      key_cmp: [B, C, K, H], C = 0 if S < l, else (S - l) // d + 1.
      lse: float32 [B, T, N], as `compressed_attention` returns it.
      config: block geometry.
      segment_start: int [B, T], row position of the first token of each query's document; None means 0 everywhere. The
        query at position t may use a key at p iff segment_start[t] <= p <= t.
      query_offset: position of the first query in the keys' row, an int or int32 scalar; None: queries and keys are the
        same tokens (S = T). A traced one is clipped to [0, S - T].
      num_keys: S, how many key tokens the lists index; None means T (it is required with a query_offset).
      implementation: "reference", "xla", "pallas", or None for the best that supports the inputs on this device.

    Returns:
      int32 [B, T, K, n], ascending block indices, padded at the end with J = ceil(S / select_block).

    Raises:
      ValueError: an argument has the wrong shape, dtype or value.
      NotImplementedError: the named implementation cannot serve these inputs.
    """
    checks.nsa_config(config)
    sizes = checks.query(query)
    checks.array("key_cmp", key_cmp, "BCKH", sizes)
    checks.floating("key_cmp", key_cmp, query)
    checks.heads("key_cmp", sizes)
    checks.array("lse", lse, "BTN", sizes)
    checks.require(
        lse.dtype == jnp.float32, f"lse has dtype {lse.dtype}: must be float32, as compressed_attention returns it"
    )
    query_offset = checks.position("query_offset", query_offset)
    length, last = sizes["T"], checks.last_position(query_offset, sizes["T"])
    checks.length("key_cmp", sizes["C"], query_offset, length, blocks.num_compressed(last, config))
    checks.segments(segment_start, sizes)
    checks.require(
        query_offset is None or num_keys is not None,
        "num_keys=None: must be the number of keys when query_offset is given",
    )
    num_keys = length if num_keys is None else checks.positive("num_keys", num_keys)
    checks.require(num_keys >= last, f"num_keys={num_keys}: must be at least {last} to reach the last query")
    query, key_cmp, lse = jax.lax.stop_gradient((query, key_cmp, lse))
    shape = Shape.of(query, key_cmp).with_keys(num_keys)
    serving = choose("select_blocks", implementation, shape, select_block=config.select_block)
    indices = serving.select_blocks(
        query,
        key_cmp,
        lse,
        config=config,
        num_keys=num_keys,
        segment_start=checks.clip_segments(segment_start),
        query_offset=checks.clip_offset(query_offset, num_keys - length),
    )
    return checkpoint_name(indices, "nsa_block_indices")


def selected_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K V"],
    block_indices: Int[Array, "B T K n"],
    *,
    select_block: int,
    segment_start: Int[Array, "B T"] | None = None,
    query_offset=None,
    implementation: str | None = None,
) -> Float[Array, "B T N V"]:
    """Attention over the tokens p of the listed blocks with segment_start[t] <= p <= t (paper section 3.3.2).

    Args:
      query: [B, T, N, H], float32 or bfloat16. Scores are scaled by 1/sqrt(H).
      key: [B, S, K, H].
      value: [B, S, K, V].
      block_indices: int32 [B, T, K, n], the set of blocks each query reads: entries outside [0, J) are padding, such as
        J or -1, and order and repeats change nothing. J = ceil(S / select_block).
      select_block: l', tokens in one block.
      segment_start: int [B, T], row position of the first token of each query's document; None means 0 everywhere. The
        query at position t may use a key at p iff segment_start[t] <= p <= t.
      query_offset: position of the first query in the keys' row, an int or int32 scalar; None: queries and keys are the
        same tokens (S = T). A traced one is clipped to [0, S - T].
      implementation: "reference", "xla", "pallas", or None for the best that supports the inputs on this device.

    Returns:
      [B, T, N, V] in query's dtype; exactly 0 where a query's list holds nothing it may use.

    Raises:
      ValueError: an argument has the wrong shape, dtype or value.
      NotImplementedError: the named implementation cannot serve these inputs.
    """
    sizes = checks.query(query)
    checks.key_value(("key", "value"), key, value, query, sizes, "S")
    query_offset = checks.position("query_offset", query_offset)
    checks.length("key", sizes["S"], query_offset, sizes["T"], checks.last_position(query_offset, sizes["T"]))
    checks.array("block_indices", block_indices, "BTKn", sizes, origin="query and key")
    checks.require(block_indices.dtype == jnp.int32, f"block_indices has dtype {block_indices.dtype}: must be int32")
    checks.require(sizes["n"] >= 1, f"block_indices has shape {tuple(block_indices.shape)}: every size must be >= 1")
    select_block = checks.positive("select_block", select_block)
    checks.segments(segment_start, sizes)
    serving = choose("selected_attention", implementation, Shape.of(query, key, value))
    return serving.selected_attention(
        query,
        key,
        value,
        blocks.clean_lists(block_indices, blocks.num_selection_blocks(sizes["S"], select_block)),
        select_block=select_block,
        segment_start=checks.clip_segments(segment_start),
        query_offset=checks.clip_offset(query_offset, sizes["S"] - sizes["T"]),
    )


def window_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K V"],
    *,
    window: int,
    segment_start: Int[Array, "B T"] | None = None,
    query_offset=None,
    implementation: str | None = None,
) -> Float[Array, "B T N V"]:
    """Attention over p in [max(segment_start[t], t - window + 1), t] (paper section 3.3.3).

    Args:
      query: [B, T, N, H], float32 or bfloat16. Scores are scaled by 1/sqrt(H).
      key: [B, S, K, H].
      value: [B, S, K, V].
      window: w, tokens each query reads, its own included.
      segment_start: int [B, T], row position of the first token of each query's document; None means 0 everywhere. The
        query at position t may use a key at p iff segment_start[t] <= p <= t.
      query_offset: position of the first query in the keys' row, an int or int32 scalar; None: queries and keys are the
        same tokens (S = T). A traced one is clipped to [0, S - T].
      implementation: "reference", "xla", "pallas", or None for the best that supports the inputs on this device.

    Returns:
      [B, T, N, V] in query's dtype.

    Raises:
      ValueError: an argument has the wrong shape, dtype or value.
      NotImplementedError: the named implementation cannot serve these inputs.
    """
    sizes = checks.query(query)
    checks.key_value(("key", "value"), key, value, query, sizes, "S")
    query_offset = checks.position("query_offset", query_offset)
    checks.length("key", sizes["S"], query_offset, sizes["T"], checks.last_position(query_offset, sizes["T"]))
    window = checks.positive("window", window)
    checks.segments(segment_start, sizes)
    serving = choose("window_attention", implementation, Shape.of(query, key, value))
    offset = checks.clip_offset(query_offset, sizes["S"] - sizes["T"])
    start = checks.clip_segments(segment_start)
    return serving.window_attention(query, key, value, window=window, segment_start=start, query_offset=offset)


def check_branches(
    tensors, gates, *, config: NSAConfig, segment_start=None, query_offset=None, window_start=None
) -> dict[str, int]:
    """Checks the arguments of `nsa_attention`, the first seven as one tuple, and returns their sizes by symbol."""
    query, key_cmp, value_cmp, key_slc, value_slc, key_win, value_win = tensors
    checks.nsa_config(config)
    sizes = checks.query(query)
    checks.key_value(("key_cmp", "value_cmp"), key_cmp, value_cmp, query, dict(sizes), "C")
    checks.key_value(("key_slc", "value_slc"), key_slc, value_slc, query, sizes, "S")
    window_symbol = "S" if window_start is None else "W"
    checks.key_value(("key_win", "value_win"), key_win, value_win, query, sizes, window_symbol)
    checks.require(
        key_cmp.shape[2] == sizes["K"] and value_cmp.shape[3] == sizes["V"],
        f"key_cmp and value_cmp have shapes {tuple(key_cmp.shape)} and {tuple(value_cmp.shape)}: must have "
        f"K={sizes['K']} heads and V={sizes['V']} to match key_slc and value_slc",
    )
    checks.require(hasattr(gates, "shape"), f"gates={repr(gates):.80}: must be an array [B, T, N, 3]")
    checks.require(
        tuple(gates.shape) == (sizes["B"], sizes["T"], sizes["N"], 3),
        f"gates has shape {tuple(gates.shape)}: must be {(sizes['B'], sizes['T'], sizes['N'], 3)}",
    )
    checks.floating("gates", gates)
    length = sizes["T"]
    last = checks.last_position(query_offset, length)
    checks.length("key_cmp", key_cmp.shape[1], query_offset, length, blocks.num_compressed(last, config))
    checks.length("key_slc", sizes["S"], query_offset, length, last)
    checks.segments(segment_start, sizes)
    checks.window_start(window_start, query_offset, config.window, segment_start, length, key_win.shape[1])
    return sizes


def choose_all(query, key_cmp, key_slc, value_slc, key_win, implementation: str | None, config: NSAConfig) -> list:
    """The modules that serve the four ops which `nsa_attention` is made of."""
    shape = Shape.of(query, key_slc, value_slc)
    return [
        choose("compressed_attention", implementation, shape.with_keys(key_cmp.shape[1])),
        choose("select_blocks", implementation, shape, select_block=config.select_block),
        choose("selected_attention", implementation, shape),
        choose("window_attention", implementation, shape.with_keys(key_win.shape[1])),
    ]


def nsa_attention(
    query: Float[Array, "B T N H"],
    key_cmp: Float[Array, "B C K H"],
    value_cmp: Float[Array, "B C K V"],
    key_slc: Float[Array, "B S K H"],
    value_slc: Float[Array, "B S K V"],
    key_win: Float[Array, "B S K H"],
    value_win: Float[Array, "B S K V"],
    gates: Float[Array, "B T N 3"],
    *,
    config: NSAConfig,
    segment_start: Int[Array, "B T"] | None = None,
    query_offset=None,
    window_start=None,
    block_indices: Int[Array, "B T K n"] | None = None,
    implementation: str | None = None,
    return_block_indices: bool = False,
    nonnegative_gates: bool = False,
):
    """Native Sparse Attention: the gated sum of compressed, selected and window attention (paper eq. 5).

    Args:
      query: [B, T, N, H], float32 or bfloat16. Scores are scaled by 1/sqrt(H).
      key_cmp: [B, C, K, H] compressed keys, such as `mean_compress(key, config=config)`; C = 0 if S < l, else
        (S - l) // d + 1. With RoPE compress unrotated keys, then rotate block i at its last position, i*d + l - 1.
      value_cmp: [B, C, K, V] compressed values.
      key_slc: [B, S, K, H] keys of the selected branch.
      value_slc: [B, S, K, V] values of the selected branch.
      key_win: [B, S, K, H] keys of the window branch.
      value_win: [B, S, K, V] values of the window branch.
      gates: [B, T, N, 3] weights of the branches in the order compressed, selected, window.
      config: block geometry.
      segment_start: int [B, T], row position of the first token of each query's document; None means 0 everywhere. The
        query at position t may use a key at p iff segment_start[t] <= p <= t.
      query_offset: position of the first query in the keys' row, an int or int32 scalar; None: queries and keys are the
        same tokens (S = T). A traced one is clipped to [0, S - T].
      window_start: row position of the first token of key_win and value_win, an int or a traced int32 scalar, which may
        then have a length of their own; tokens before position 0 are never read. They must begin with the first token
        that a query's window reads, max(query_offset - w + 1, 0) or before; a traced number is not checked. None means
        that they cover the row as key_slc does. Needs a query_offset.
      block_indices: int32 [B, T, K, n], lists to read instead of selecting, as `selected_attention` takes them; any n.
        The ops' own kernels then serve one after the other, not the fused ones.
      implementation: "reference", "xla", "pallas", or None for the best that supports the inputs on this device.
      return_block_indices: also return the block lists that the selected branch read, ascending and padded with J.
      nonnegative_gates: a promise that no gate is negative, as after a sigmoid. The kernels' backward pass is then
        faster and takes less memory; a row with a negative gate gets NaN for its gradients.

    Returns:
      [B, T, N, V] in query's dtype; with `return_block_indices`, a pair with int32 [B, T, K, n].

    Raises:
      ValueError: an argument has the wrong shape, dtype or value.
      NotImplementedError: the named implementation cannot serve these inputs.
    """
    tensors = (query, key_cmp, value_cmp, key_slc, value_slc, key_win, value_win)
    query_offset = checks.position("query_offset", query_offset)
    window_start = checks.position("window_start", window_start, least=-(2**31) + 1)
    positions = dict(segment_start=segment_start, query_offset=query_offset, window_start=window_start)
    sizes = check_branches(tensors, gates, config=config, **positions)
    length = sizes["T"]
    offset, segment_start = checks.clip_offset(query_offset, sizes["S"] - length), checks.clip_segments(segment_start)
    modules = choose_all(query, key_cmp, key_slc, value_slc, key_win, implementation, config)
    if block_indices is None and {x.__name__ for x in modules} == {"nsa_jax.ops.pallas"}:
        # One backward pass for all branches: less memory and less traffic than the sum of three ops.
        out, block_indices = modules[0].nsa_attention(
            *tensors,
            gates,
            config=config,
            segment_start=segment_start,
            query_offset=offset,
            window_start=window_start,
            nonnegative_gates=nonnegative_gates,
        )
    else:
        query_offset = None if query_offset is None else offset
        common = dict(segment_start=segment_start, query_offset=query_offset, implementation=implementation)
        out_cmp, lse = compressed_attention(query, key_cmp, value_cmp, config=config, **common)
        if block_indices is None:
            block_indices = select_blocks(query, key_cmp, lse, config=config, num_keys=sizes["S"], **common)
        arrays = (query, key_slc, value_slc, key_win, value_win, block_indices)
        *outs, block_indices = selected_and_window(*arrays, config=config, window_start=window_start, **common)
        out = gated_sum(gates, (out_cmp, *outs), query.dtype)
    return (out, block_indices) if return_block_indices else out


def selected_and_window(
    query,
    key_slc,
    value_slc,
    key_win,
    value_win,
    block_indices,
    *,
    config: NSAConfig,
    segment_start=None,
    query_offset=None,
    window_start=None,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Outputs [B, T, N, V] of the selected branch and of the window branch, and the lists that were read.

    The arguments are those of `nsa_attention`; block_indices are those of `selected_attention`. The lists returned are
    ascending and padded with J.
    """
    common: dict[str, Any] = dict(segment_start=segment_start, query_offset=query_offset, implementation=implementation)
    block = config.select_block
    out_slc = selected_attention(query, key_slc, value_slc, block_indices, select_block=block, **common)
    lists = blocks.clean_lists(block_indices, blocks.num_selection_blocks(key_slc.shape[1], block))
    if window_start is not None:
        # Positions are counted from the window's first key; what lies before the row is nobody's document.
        start = jnp.zeros(query.shape[:2], jnp.int32) if segment_start is None else segment_start
        common["segment_start"] = checks.clip_segments(start) - window_start
        common["query_offset"] = query_offset - jnp.asarray(window_start, jnp.int32)
    return out_slc, window_attention(query, key_win, value_win, window=config.window, **common), lists


def mean_compress(x: Float[Array, "B S K H"], *, config: NSAConfig) -> Float[Array, "B C K H"]:
    """Mean of each compressed block's tokens, the parameter-free compressor phi (paper eq. 7 with phi = mean).

    Args:
      x: [B, S, K, H] keys or values, float32 or bfloat16.
      config: block geometry.

    Returns:
      [B, C, K, H] in x's dtype; C = 0 if S < l, else (S - l) // d + 1. The mean is taken in float32.

    Raises:
      ValueError: x has the wrong shape or dtype.
    """
    checks.nsa_config(config)
    checks.array("x", x, "BSKH", {})
    checks.floating("x", x)
    batch, length, heads, dim = x.shape
    num_cmp = blocks.num_compressed(length, config)
    if num_cmp == 0:
        return jnp.zeros((batch, 0, heads, dim), x.dtype)
    stride, overlap = config.compress_stride, config.compress_block // config.compress_stride
    pieces = num_cmp + overlap - 1
    sums = x[:, : pieces * stride].astype(jnp.float32).reshape(batch, pieces, stride, heads, dim).sum(2)
    total = sums[:, :num_cmp]
    for r in range(1, overlap):
        total = total + sums[:, r : r + num_cmp]
    return (total / config.compress_block).astype(x.dtype)
