"""Flax NNX modules: attention layers, the transformer block, the language model, and its cache for decoding."""

from nsa_jax.extras import extra

with extra("nn"):
    from nsa_jax.nn.attention import NSAttention
    from nsa_jax.nn.cache import Cache, init_cache, memory_report
    from nsa_jax.nn.config import ModelConfig, function_differences
    from nsa_jax.nn.decoder import Decoder
    from nsa_jax.nn.dense import DenseAttention
    from nsa_jax.nn.transformer import Block, Transformer, count_parameters

__all__ = [
    "Block",
    "Cache",
    "Decoder",
    "DenseAttention",
    "ModelConfig",
    "NSAttention",
    "Transformer",
    "count_parameters",
    "function_differences",
    "init_cache",
    "memory_report",
]
