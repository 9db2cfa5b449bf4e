"""Flax NNX modules: attention layers, the transformer block and the language model."""

from nsa_jax.nn.attention import DenseAttention, NSAttention
from nsa_jax.nn.config import ModelConfig
from nsa_jax.nn.transformer import Block, Transformer, count_parameters

__all__ = ["Block", "DenseAttention", "ModelConfig", "NSAttention", "Transformer", "count_parameters"]
