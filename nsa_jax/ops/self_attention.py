"""Native Sparse Attention from one query, key and value per token: for trying it in the place of dense attention."""

from __future__ import annotations

from jaxtyping import Array, Float, Int

from nsa_jax.ops import blocks, checks
from nsa_jax.ops.blocks import NSAConfig
from nsa_jax.ops.nsa import mean_compress, nsa_attention


def nsa_self_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K V"],
    gates: Float[Array, "B T N 3"],
    *,
    config: NSAConfig | None = None,
    key_cmp: Float[Array, "B C K H"] | None = None,
    segment_start: Int[Array, "B T"] | None = None,
    query_offset=None,
    implementation: str | None = None,
    return_block_indices: bool = False,
    nonnegative_gates: bool = False,
):
    """`nsa_attention` whose three branches share keys and values, compressed by the mean of each block.

    Symbols: B batch, T query tokens, S key tokens (T without a query_offset), N query heads, K key/value heads, H head
    dim of queries and keys, V of values, C compressed blocks, n = config.num_selected. The paper gives each branch
    keys and values of its own and learns the compressor: `nsa_attention` takes those.

    Position embeddings: rotate `query` and `key` before the call, as for dense attention. `key_cmp` is then the mean of
    rotated keys, in which high frequencies cancel. A model trained with RoPE after compression, as
    `nsa_jax.nn.NSAttention` does it, passes its own: rotate `mean_compress(unrotated_key, config=config)` at the last
    position of each block, i * compress_stride + compress_block - 1.

    Args:
      query: [B, T, N, H], float32 or bfloat16. Query heads g*N/K to (g+1)*N/K - 1 read key/value head g. Scores are
        scaled by 1/sqrt(H). Attention is causal.
      key: [B, S, K, H], for all branches.
      value: [B, S, K, V], for all branches.
      gates: [B, T, N, 3], weights of the branches in the order compressed, selected, window; usually
        sigmoid(linear(x)) of the layer's input x.
      config: block geometry; None means the paper's, `NSAConfig()`.
      key_cmp: [B, C, K, H] compressed keys, C = 0 if S < l, else (S - l) // d + 1; None means `mean_compress(key)`.
      segment_start: int [B, T], row position of the first token of each query's document in packed rows; None means 0
        everywhere. The query at position t reads keys p with segment_start[t] <= p <= t.
      query_offset: position of the first query in the keys' row, an int or an int32 scalar; None means that queries and
        keys are the same tokens.
      implementation: "reference", "xla", "pallas", or None for the best that supports the inputs on this device.
      return_block_indices: also return the block lists that the selected branch read, ascending and padded with
        J = ceil(S / config.select_block).
      nonnegative_gates: a promise that no gate is negative, as after a sigmoid: a faster backward pass on GPUs. A row
        with a negative gate gets NaN for its gradients.

    Returns:
      [B, T, N, V] in query's dtype; with `return_block_indices`, a pair with int32 [B, T, K, n].

    Raises:
      ValueError: an argument has the wrong shape, dtype or value.
      NotImplementedError: the named implementation cannot serve these inputs.
    """
    config = NSAConfig() if config is None else config
    checks.nsa_config(config)
    sizes = checks.query(query)
    checks.key_value(("key", "value"), key, value, query, sizes, "S")
    last = checks.last_position(checks.position("query_offset", query_offset), sizes["T"])
    checks.length("key", sizes["S"], query_offset, sizes["T"], last)
    if key_cmp is None:
        key_cmp = mean_compress(key, config=config)
    else:
        expected = {**sizes, "C": blocks.num_compressed(sizes["S"], config)}
        checks.array("key_cmp", key_cmp, "BCKH", expected, origin="key")
    value_cmp = mean_compress(value, config=config)
    return nsa_attention(
        query,
        key_cmp,
        value_cmp,
        key,
        value,
        key,
        value,
        gates,
        config=config,
        segment_start=segment_start,
        query_offset=query_offset,
        implementation=implementation,
        return_block_indices=return_block_indices,
        nonnegative_gates=nonnegative_gates,
    )
