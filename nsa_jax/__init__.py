"""Native Sparse Attention (arXiv 2502.11089) for JAX: the operator, Flax modules, a KV cache and a trainer."""

from typing import TYPE_CHECKING, Any

from nsa_jax.extras import extra, installed_version
from nsa_jax.ops.blocks import NSAConfig
from nsa_jax.ops.decode import DecodeInfo, decode_attention
from nsa_jax.ops.explain import explain
from nsa_jax.ops.implementations import implementations_served
from nsa_jax.ops.nsa import (
    compressed_attention,
    mean_compress,
    nsa_attention,
    select_blocks,
    selected_attention,
    window_attention,
)
from nsa_jax.ops.self_attention import nsa_self_attention

if TYPE_CHECKING:
    from nsa_jax.hub.load import load

__all__ = [
    "DecodeInfo",
    "NSAConfig",
    "compressed_attention",
    "decode_attention",
    "explain",
    "implementations_served",
    "load",
    "mean_compress",
    "nsa_attention",
    "nsa_self_attention",
    "select_blocks",
    "selected_attention",
    "window_attention",
]


def __getattr__(name: str) -> Any:
    """Imports `load` when it is first used: the operator alone needs neither Flax nor the trainer's configuration."""
    if name == "load":
        with extra("train"):
            from nsa_jax.hub.load import load
        return load
    if name == "__version__":
        return installed_version()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
