"""Pallas GPU kernels of every op, forward and backward; the only place that knows about kernel backends."""

from __future__ import annotations

from nsa_jax.ops.target import Target


def unsupported(op: str, query, key, value, *, target: Target, **static) -> str | None:
    """Why the kernels cannot serve these inputs, or None if they can."""
    return "no kernels yet"
