"""A small NSA language model that trains on a laptop.

What:    a byte-level model with 0.9M parameters that uses all three branches of NSA: a row of 256 tokens is four
         windows of 64 tokens, and the selected branch reads at most 6 blocks of 32.
Data:    the source text of the running Python's standard library (about 30 MB, no download), one document per file.
         Validation uses files that are held out by a hash of their content.
Takes:   4.5 minutes, measured on 2 CPU cores shared with other work, of which 2.7 are computation. It takes less time
         on cores that do nothing else.
Reaches: validation bits per byte fall from 7.9 to 2.1 (library of Python 3.12) or 2.2 (3.11).
Command: python train.py --config=configs/quickstart.py
"""

from ml_collections import ConfigDict

from nsa_jax.config import default_config


def get_config() -> ConfigDict:
    """The quickstart run."""
    c = default_config()
    c.name = "quickstart"

    c.model.dim = 128
    c.model.num_layers = 4
    c.model.num_heads = 8
    c.model.num_kv_heads = 2
    c.model.head_dim = 16
    c.model.mlp_dim = 384
    c.model.init_std = 0.06  # about 1 / sqrt(dim): a narrow model starts to learn sooner
    c.model.compute_dtype = "float32"  # CPUs multiply float32 faster than bfloat16
    c.model.remat = "none"  # memory is no concern at this size
    c.model.nsa.compress_block = 16
    c.model.nsa.compress_stride = 8
    c.model.nsa.select_block = 32
    c.model.nsa.num_selected = 6
    c.model.nsa.window = 64

    c.data.seq_len = 256

    c.train.steps = 240
    c.train.batch_size = 16
    c.train.eval_every = 60
    c.train.eval_batches = 8
    c.train.save_every = 120
    c.train.sample_prompt = "def "

    c.optim.learning_rate = 3e-3
    c.optim.warmup_steps = 20
    return c
