"""Checks of the public ops' arguments: a ValueError names the argument, what it was and what it must be."""

from __future__ import annotations

import operator

import jax
import jax.numpy as jnp
import numpy as np

from nsa_jax.ops.blocks import NSAConfig

_DTYPES = (jnp.float32, jnp.bfloat16)


def require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def array(name: str, array, symbols: str, sizes: dict[str, int], origin: str = "query") -> None:
    """Checks rank and every dimension already known in `sizes`; learns the others."""
    require(hasattr(array, "shape"), f"{name}={repr(array):.80}: must be an array [{', '.join(symbols)}]")
    require(
        len(array.shape) == len(symbols),
        f"{name} has shape {tuple(array.shape)}: must have {len(symbols)} dimensions [{', '.join(symbols)}]",
    )
    for axis, symbol in enumerate(symbols):
        size = array.shape[axis]
        known = sizes.setdefault(symbol, size)
        require(
            known == size,
            f"{name} has shape {tuple(array.shape)}: dimension {axis} ({symbol}) must be {known} to match {origin}",
        )


def floating(name: str, array, like=None) -> None:
    dtype = like.dtype if like is not None else None
    require(array.dtype in _DTYPES, f"{name} has dtype {array.dtype}: must be float32 or bfloat16")
    require(dtype is None or array.dtype == dtype, f"{name} has dtype {array.dtype}: must be {dtype} to match query")


def query(query) -> dict[str, int]:
    sizes: dict[str, int] = {}
    array("query", query, "BTNH", sizes)
    floating("query", query)
    require(all(size >= 1 for size in query.shape), f"query has shape {tuple(query.shape)}: every size must be >= 1")
    return sizes


def heads(name: str, sizes: dict[str, int]) -> None:
    require(
        sizes["K"] >= 1 and sizes["N"] % sizes["K"] == 0,
        f"{name} has {sizes['K']} key/value heads: must divide query's {sizes['N']} heads",
    )


def key_value(names: tuple[str, str], key, value, query, sizes: dict[str, int], symbol: str) -> None:
    """Key [B, symbol, K, H] and value [B, symbol, K, V] against the query's sizes."""
    array(names[0], key, f"B{symbol}KH", sizes)
    array(names[1], value, f"B{symbol}KV", sizes, origin=names[0])
    floating(names[0], key, query)
    floating(names[1], value, query)
    heads(names[0], sizes)
    require(value.shape[-1] >= 1, f"{names[1]} has shape {tuple(value.shape)}: every size must be >= 1")


def length(name: str, have: int, query_offset, num_queries: int, need: int) -> None:
    """Keys must be exactly the queries' tokens, or, with a query_offset, reach at least the last query."""
    if query_offset is None:
        message = f"{name} has length {have}: must be {need} for {num_queries} query tokens (no query_offset)"
        if name == "key_cmp" and have == num_queries:
            message += (
                "; these seem to be uncompressed: pass nsa_jax.mean_compress(key, config=config), and so for value_cmp"
            )
        require(have == need, message)
    else:
        message = f"{name} has length {have}: must be at least {need} to reach the last query"
        if not isinstance(query_offset, jax.core.Tracer):
            message += f", {num_queries - 1} after query_offset={int(query_offset)}"
        require(have >= need, message)


def integers(name: str, x, symbols: str, sizes: dict[str, int], origin: str = "query") -> None:
    """`array` of any integer type."""
    array(name, x, symbols, sizes, origin)
    require(jnp.issubdtype(x.dtype, jnp.integer), f"{name} has dtype {x.dtype}: must be an integer type")


def segments(segment_start, sizes: dict[str, int], origin: str = "query") -> None:
    if segment_start is not None:
        integers("segment_start", segment_start, "BT", sizes, origin)


def at_most(x, most: int):
    """The integers x of any type as int32, none above `most`; a bound that their own type cannot hold is none."""
    if isinstance(x, (np.ndarray, np.generic)):  # JAX would cut 64 bits off to 32 before the bound
        info = np.iinfo(x.dtype)
        return jnp.asarray(np.clip(x, max(info.min, -(2**31)), min(info.max, most)).astype(np.int32))
    return jnp.minimum(x, min(most, jnp.iinfo(x.dtype).max)).astype(jnp.int32)


def clip_segments(segment_start):
    """The segment starts that implementations take: int32, with room for block arithmetic around them."""
    return None if segment_start is None else jnp.maximum(at_most(segment_start, 2**30), 0)


def nsa_config(config) -> None:
    require(isinstance(config, NSAConfig), f"config={config!r}: must be an nsa_jax.NSAConfig")


def positive(name: str, value) -> int:
    known = not isinstance(value, bool) and isinstance(value, (int, np.integer))
    require(known and 1 <= value < 2**31, f"{name}={value!r}: must be a positive int below 2**31")
    return int(value)


def position(name: str, position, least: int = 0):
    """A position in the keys' row as a Python int or, if it is an array, as that; None stays None.

    Its value is checked if it is known.
    """
    if position is None:
        return None
    shape, dtype = getattr(position, "shape", ()), getattr(position, "dtype", np.dtype(type(position)))
    require(
        shape == () and jnp.issubdtype(dtype, jnp.integer),
        f"{name}={position!r}: must be an int or an integer scalar, not {dtype} of shape {shape}",
    )
    if not isinstance(position, jax.core.Tracer):
        value = operator.index(position)
        require(least <= value < 2**31, f"{name}={value}: must be >= {least} and below 2**31")
        position = position if isinstance(position, jax.Array) else value
    return position


def window_start(window_start, query_offset, window: int, segment_start, num_queries: int, num_keys: int) -> None:
    """The window's keys must reach from the first that is read to the last, as far as tracing knows them."""
    if window_start is None:
        return
    require(query_offset is not None, f"window_start={window_start!r}: must be None without a query_offset")
    need = num_queries
    if not any(isinstance(x, jax.core.Tracer) for x in (window_start, query_offset)):
        begin, offset = int(window_start), int(query_offset)
        first = max(offset - window + 1, 0)
        if isinstance(segment_start, jax.core.Tracer) or not getattr(segment_start, "is_fully_addressable", True):
            first = offset  # documents may begin later, so that fewer keys are read
        elif segment_start is not None:
            t = offset + np.arange(num_queries)
            reads = np.maximum(np.maximum(t - window + 1, 0), np.asarray(segment_start))
            # At most the first query: the ops count queries from the window's first key.
            first = int(np.where(reads <= t, reads, offset).min(initial=offset))
        require(
            begin <= first,
            f"window_start={begin}: must be at most {first}, the first token that is read by windows of "
            f"{window} tokens{'' if segment_start is None else ' within documents'} from query_offset={offset} on",
        )
        need += offset - begin
    length("key_win", num_keys, query_offset, num_queries, need)


def last_position(query_offset, num_queries: int) -> int:
    """One past the last query's position; of a traced offset, the least that it can be."""
    known = query_offset is not None and not isinstance(query_offset, jax.core.Tracer)
    return (int(query_offset) if known else 0) + num_queries


def clip_offset(query_offset, most: int | None = None):
    """The offset that implementations take: a traced one within [0, most], since it could not be checked."""
    if query_offset is None:
        return 0
    if isinstance(query_offset, jax.core.Tracer):
        return jnp.maximum(at_most(query_offset, 2**31 - 1 if most is None else most), 0)
    return query_offset.astype(jnp.int32) if isinstance(query_offset, jax.Array) else query_offset
