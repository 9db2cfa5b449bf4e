"""Two tiny variants and a few steps: whether benchmarks/quality.py runs from end to end.

What:    NSA with a window of 16 tokens, and window attention alone.
Data:    the text files of --files, and rows of the task needle.
Takes:   two minutes for each variant on two busy CPU cores, nearly all of it the start of programs.
Reaches: nothing; it is not trained long enough.
Command: python benchmarks/quality.py --grid configs/quality/cpu_smoke.py --files nsa_jax/data nsa_jax/ops
"""

from ml_collections import ConfigDict

from nsa_jax.config import default_config

VARIANTS = {"nsa": {}, "window": {"model.attention": "window"}}

MEASURES = {"lengths": (128, 256), "samples": 2, "max_tokens": 2000, "cuts": (16, 64), "tasks": ("needle",)}


def get_config() -> ConfigDict:
    """The tiny NSA model."""
    c = default_config()
    c.name = "cpu_smoke"

    c.model.dim = 32
    c.model.num_layers = 2
    c.model.num_heads = 4
    c.model.num_kv_heads = 2
    c.model.head_dim = 8
    c.model.mlp_dim = 128
    c.model.init_std = 0.1
    c.model.compute_dtype = "float32"
    c.model.remat = "none"
    c.model.nsa.compress_block = 8
    c.model.nsa.compress_stride = 4
    c.model.nsa.select_block = 16
    c.model.nsa.num_selected = 4
    c.model.nsa.window = 16

    c.data.source = "trees"
    c.data.sources = {
        "text": {"source": "trees", "weight": 0.5, "tree_characters": 0},
        "tasks": {"source": "task", "weight": 0.5, "tasks": ("needle",)},
    }
    c.data.seq_len = 256
    c.data.val_fraction = 0.5

    c.train.steps = 4
    c.train.batch_size = 2
    c.train.log_every = 1
    c.train.eval_every = 2
    c.train.eval_batches = 1
    c.train.save_every = 2
    c.train.sample_tokens = 0
    c.optim.warmup_steps = 1
    c.guards.floor_ratio = 0.0
    c.guards.late_floor_ratio = 0.0
    return c
