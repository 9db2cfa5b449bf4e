"""The smallest model that uses every part of the library. It is for trying changes, not for training a useful model.

What:    dim 128, 8 heads, 2 key/value heads, 4 layers, rows of 128 tokens. The 8 selected blocks of 32 cover the whole
         row, so the selected branch is dense here; `allow_dense_regime` accepts that.
Data:    the source text of the running Python's standard library, byte tokenizer.
Takes:   2 minutes, measured on 2 CPU cores shared with other work, of which 45 seconds are computation.
Reaches: validation bits per byte fall from 7.8 to 2.9.
Command: python train.py --config=configs/toy.py
"""

from ml_collections import ConfigDict

from nsa_jax.config import default_config


def get_config() -> ConfigDict:
    """The toy run."""
    c = default_config()
    c.name = "toy"
    c.allow_dense_regime = True  # 8 blocks of 32 tokens are more than the row

    c.model.dim = 128
    c.model.num_layers = 4
    c.model.num_heads = 8
    c.model.num_kv_heads = 2
    c.model.head_dim = 16
    c.model.init_std = 0.06
    c.model.compute_dtype = "float32"
    c.model.remat = "none"
    c.model.nsa.compress_block = 16
    c.model.nsa.compress_stride = 8
    c.model.nsa.select_block = 32
    c.model.nsa.num_selected = 8
    c.model.nsa.window = 64

    c.data.seq_len = 128

    c.train.steps = 100
    c.train.batch_size = 16
    c.train.eval_every = 50
    c.train.eval_batches = 8
    c.train.save_every = 50

    c.optim.learning_rate = 3e-3
    c.optim.warmup_steps = 10
    return c
