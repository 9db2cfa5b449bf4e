"""A model of 1.0 billion parameters at 8,192 tokens, sized for one H100 or H200.

What:    dim 2,048, 16 layers, 32 query heads in 8 key/value groups of head dim 64, the paper's block geometry. What
         attention returns is kept for the backward pass; all else of a layer is computed again.
Data:    FineWeb-Edu, sample-100BT, packed, with a byte-pair vocabulary of 32,768. 40,000 steps of 64 x 8,192 tokens are
         21 billion tokens.
Takes:   61,700 tokens/s on one H200 at 8,192 tokens and 57,500 at 32,768, where dense attention takes 59,400 and
         33,500, with 65,536 tokens in a step, 34 GiB and a byte vocabulary (0.98 billion parameters,
         benchmarks/results/train_1b_shared_h200.json). An H200 has room for --config.model.remat=dots_saved: 70,300 and
         63,800 tokens/s with 32,768 tokens in a step.
Reaches: not measured.
Command: python train.py --config=configs/nsa_1b.py
Other:   --config.data.seq_len=32768 --config.train.batch_size=16 for longer rows. Several GPUs:
         --config.mesh.fsdp=8 --config.train.grad_accum=1
"""

from pathlib import Path

from ml_collections import ConfigDict

from nsa_jax.command_line import load_config


def get_config() -> ConfigDict:
    """The 1B model."""
    c = load_config(str(Path(__file__).with_name("a100_prod.py")))
    c.name = "nsa_1b"

    c.model.dim = 2048
    c.model.num_layers = 16
    c.model.num_heads = 32
    c.model.num_kv_heads = 8
    c.model.head_dim = 64
    c.model.mlp_dim = 8192
    c.model.rope_theta = 500_000.0
    c.model.remat = "attention_saved"

    c.data.hf_name = "sample-100BT"
    c.data.seq_len = 8192

    c.train.steps = 40_000
    c.train.batch_size = 64
    c.train.grad_accum = 16

    c.optim.learning_rate = 4e-4
    c.optim.weight_decay = 0.1

    c.preflight.target = "h100"
    c.preflight.devices = 1
    return c
