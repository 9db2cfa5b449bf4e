"""A small model with random parameters, and its generator."""

import pytest
from flax import nnx

from nsa_jax import nn
from nsa_jax.data.tokenizers import ByteTokenizer
from nsa_jax.generator import Generator

from .runs import small_config


@pytest.fixture(scope="module")
def model():
    return nn.Transformer(nn.ModelConfig.from_config(small_config(), 257), rngs=nnx.Rngs(0))


@pytest.fixture(scope="module")
def generator(model):
    return Generator(model, ByteTokenizer(), context=96, chunk=32)
