"""Native Sparse Attention (arXiv 2502.11089) for JAX: the operator, Flax modules, a KV cache and a trainer."""

from nsa_jax.config import NSAConfig
from nsa_jax.loading import load
from nsa_jax.ops.decode import DecodeInfo, decode_attention
from nsa_jax.ops.nsa import (
    compressed_attention,
    implementations_served,
    mean_compress,
    nsa_attention,
    select_blocks,
    selected_attention,
    window_attention,
)

__all__ = [
    "DecodeInfo",
    "NSAConfig",
    "compressed_attention",
    "decode_attention",
    "implementations_served",
    "load",
    "mean_compress",
    "nsa_attention",
    "select_blocks",
    "selected_attention",
    "window_attention",
]
