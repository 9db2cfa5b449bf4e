"""Associative recall across eight windows, which tests the compressed and selected branches end to end.

What:    a row states 16 facts (key, value), continues with noise and then asks for every fact. With rows of 128 tokens
         and a window of 8, every answer lies at least 64 tokens (eight windows) before its question. Two layers of
         window attention reach back 14 tokens. The model reads at most 4 of the 16 selection blocks.
Data:    synthetic, with new rows in every step. With 32 keys and 32 values, guessing is right in 3.1 % of cases.
Takes:   1 to 4 minutes on 2 CPU cores (400 steps).
Reaches: 99.98 % of 4,096 held-out answers are right; with the window alone 2.7 %, which is chance. At least one head
         lists the block that holds the fact in 100 % of cases, and an average head does in 64 % (25 % at random). The
         learned compressor holds single facts here, so most answers come from the compressed branch: without the output
         of the selected branch 96 % stay right, and without that of the compressed branch 5 %.
Command: python train.py --config=configs/recall.py && python -m nsa_jax.evaluate runs/recall --tasks recall
         With the window alone:
         python train.py --config=configs/recall.py --workdir=runs/recall_window --config.model.attention=window
"""

from ml_collections import ConfigDict

from nsa_jax.config import default_config


def get_config() -> ConfigDict:
    """The recall run."""
    c = default_config()
    c.name = "recall"

    c.model.dim = 64
    c.model.num_layers = 2
    c.model.num_heads = 4
    c.model.num_kv_heads = 2
    c.model.head_dim = 32
    c.model.mlp_dim = 128
    c.model.init_std = 0.1
    c.model.compute_dtype = "float32"
    c.model.remat = "none"
    c.model.nsa.compress_block = 4
    c.model.nsa.compress_stride = 2
    c.model.nsa.select_block = 8
    c.model.nsa.num_selected = 4
    c.model.nsa.num_local = 1
    c.model.nsa.window = 8

    c.data.source = "synthetic"
    c.data.synthetic = "recall"
    c.data.synthetic_vocab = 128
    c.data.seq_len = 128

    c.train.steps = 400
    c.train.batch_size = 32
    c.train.log_every = 50
    c.train.eval_every = 100
    c.train.eval_batches = 4
    c.train.save_every = 200
    c.train.sample_tokens = 0

    c.optim.learning_rate = 3e-3
    c.optim.warmup_steps = 50
    c.optim.weight_decay = 0.0

    # The task can be solved exactly, so a loss near zero does not indicate a leak.
    c.guards.floor_ratio = 0.0
    c.guards.late_floor_ratio = 0.0
    return c
