"""A model of 8 billion parameters at 32,768 tokens, for 64 GPUs with 80 GB.

What:    dim 4,096, 32 layers, 32 query heads in 8 key/value groups of head dim 128, MLPs of 14,336, the paper's block
         geometry. Parameters and optimizer state are sharded over all GPUs (fsdp). A layer's input is kept for the
         backward pass. Layers are scanned, so that the step compiles in minutes.
Data:    FineWeb-Edu, whole, packed, with a byte-pair vocabulary of 128,256. In rows of short documents few queries have
         blocks to choose from, which preflight reports (R038). 100,000 steps of 64 x 32,768 tokens are 210 billion
         tokens.
Takes:   not measured. Memory and collectives: python train.py --config=configs/nsa_8b.py --preflight
Reaches: not measured.
Command: python train.py --config=configs/nsa_8b.py (one process per host; launch/ has the scripts)
"""

from pathlib import Path

from ml_collections import ConfigDict

from nsa_jax.command_line import load_config


def get_config() -> ConfigDict:
    """The 8B model."""
    c = load_config(str(Path(__file__).with_name("a100_prod.py")))
    c.name = "nsa_8b"

    c.model.dim = 4096
    c.model.num_layers = 32
    c.model.num_heads = 32
    c.model.num_kv_heads = 8
    c.model.head_dim = 128
    c.model.mlp_dim = 14_336
    c.model.rope_theta = 1_000_000.0
    c.model.tie_embeddings = False
    c.model.remat = "block"
    c.model.scan_layers = True

    c.data.hf_name = ""
    c.data.bpe_vocab_size = 128_256
    c.data.seq_len = 32_768

    c.train.steps = 100_000
    c.train.batch_size = 64
    c.train.grad_accum = 1
    c.train.save_every = 500

    c.optim.learning_rate = 3e-4
    c.optim.warmup_steps = 2000

    c.mesh.fsdp = 64

    c.preflight.target = "h100"
    c.preflight.devices = 64
    return c
