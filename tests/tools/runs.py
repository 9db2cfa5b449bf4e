"""A small run's workdir, written by the trainer's own code without training."""

from __future__ import annotations

from pathlib import Path

import grain
import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from nsa_jax.config import default_config
from nsa_jax.data import load_tokenizer
from nsa_jax.train import Checkpoints, env, setup
from nsa_jax.train.checkpoint import describe


def small_config() -> ConfigDict:
    """A byte-level NSA model of one layer with a padded vocabulary."""
    c = default_config()
    c.model.dim, c.model.num_layers, c.model.mlp_dim = 16, 1, 32
    c.model.num_heads, c.model.num_kv_heads, c.model.head_dim = 4, 2, 8
    c.model.init_std, c.model.compute_dtype, c.model.vocab_size = 0.3, "float32", 260  # padded beyond the 257 bytes
    c.model.nsa.compress_block, c.model.nsa.compress_stride, c.model.nsa.select_block = 8, 4, 16
    c.model.nsa.num_selected, c.model.nsa.window = 4, 12
    c.data.seq_len = 96
    return c


def write_run(path: Path, config: ConfigDict):
    """Writes checkpoints of steps 1 and 2, whose weights are 1.5 times those of step 1; returns step 1's parameters."""
    tokenizer = load_tokenizer(config)
    made = setup(config, tokenizer.vocab_size)
    info = {"tokenizer": tokenizer.fingerprint, "config": env.plain_config(config)}
    info["parameters"] = describe(made.abstract_state)
    checkpoints = Checkpoints(path / "checkpoints", info)
    state = made.init()
    for step, loss in ((1, 2.0), (2, 3.0)):
        data = iter(grain.MapDataset.range(10).to_iter_dataset())
        checkpoints.save(step, state, data, val_loss=loss)
        checkpoints.wait()
        state = jax.tree.map(lambda x: x + 1 if x.dtype == jnp.int32 else x * 1.5, state)
    checkpoints.close()
    tokenizer.save(path / "tokenizer")
    return made.init()["params"]
