"""A second formulation of NSA, token by token in NumPy float64, written from the formulas and nothing else."""

from __future__ import annotations

import numpy as np


def _softmax_attention(query, keys, values):
    """One query [H] over the rows of keys and values: (output [V], log-sum-exp); nothing to see gives (0, -inf)."""
    if len(keys) == 0:
        return np.zeros(values.shape[-1]), -np.inf
    scores = keys @ query / np.sqrt(query.shape[-1])
    lse = np.log(np.exp(scores - scores.max()).sum()) + scores.max()
    return np.exp(scores - lse) @ values, lse


def nsa(arrays, config, segment_start=None, offset=0, lists=None):
    """All of NSA for arrays by argument name; `lists` fixes the block lists instead of selecting them.

    Returns:
      dict of out, compressed, selected, window [B, T, N, V], lse [B, T, N] and lists int [B, T, K, n].
    """
    x = {name: np.asarray(array, np.float64) for name, array in arrays.items()}
    batch, length, num_heads, _ = x["query"].shape
    num_keys, num_kv = x["key_slc"].shape[1:3]
    num_cmp, group = x["key_cmp"].shape[1], num_heads // num_kv
    l, d, width, n = config.compress_block, config.compress_stride, config.select_block, config.num_selected  # noqa: E741
    num_blocks = int(np.ceil(num_keys / width))
    shape = (batch, length, num_heads, x["value_slc"].shape[-1])
    result = {name: np.zeros(shape) for name in ("compressed", "selected", "window")}
    result["lse"] = np.zeros(shape[:-1])
    result["lists"] = np.full((batch, length, num_kv, n), num_blocks)
    for b in range(batch):
        for row in range(length):
            t = row + offset
            start = 0 if segment_start is None else int(segment_start[b, row])
            seen = [i for i in range(num_cmp) if i * d >= start and i * d + l - 1 <= t]
            window = [p for p in range(num_keys) if max(start, t - config.window + 1) <= p <= t]
            for kv in range(num_kv):
                p_slc = np.zeros(num_blocks)
                for head in range(kv * group, (kv + 1) * group):
                    query = x["query"][b, row, head]
                    keys = x["key_cmp"][b, seen, kv]
                    out, lse = _softmax_attention(query, keys, x["value_cmp"][b, seen, kv])
                    result["compressed"][b, row, head], result["lse"][b, row, head] = out, lse
                    p_cmp = dict(zip(seen, np.exp(keys @ query / np.sqrt(len(query)) - lse), strict=True))
                    for j in range(num_blocks):
                        for m in range(width // d):
                            for r in range(l // d):
                                p_slc[j] += p_cmp.get(width // d * j + m - r, 0.0)
                    result["window"][b, row, head], _ = _softmax_attention(
                        query, x["key_win"][b, window, kv], x["value_win"][b, window, kv]
                    )
                if lists is None:
                    candidates = [j for j in range(num_blocks) if j * width <= t and (j + 1) * width > start <= t]
                    forced = {*candidates[: config.num_initial], *candidates[-config.num_local :]}
                    best = sorted((j for j in candidates if j not in forced), key=lambda j: (-p_slc[j], j))
                    chosen = sorted([*forced, *best[: n - len(forced)]])
                    result["lists"][b, row, kv, : len(chosen)] = chosen
                else:
                    result["lists"][b, row, kv] = lists[b, row, kv]
                listed = set(result["lists"][b, row, kv].tolist())
                tokens = [p for p in range(num_keys) if p // width in listed and start <= p <= t]
                for head in range(kv * group, (kv + 1) * group):
                    result["selected"][b, row, head], _ = _softmax_attention(
                        x["query"][b, row, head], x["key_slc"][b, tokens, kv], x["value_slc"][b, tokens, kv]
                    )
    branches = np.stack([result["compressed"], result["selected"], result["window"]], axis=-1)
    result["out"] = (branches * x["gates"][..., None, :]).sum(-1)
    return result
