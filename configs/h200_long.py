"""The model of a100_prod at 65,536 tokens, the length range that NSA is made for. Sized for H200s.

What:    as a100_prod, with the base of RoPE raised to 1,000,000 for the longer row.
Data:    FineWeb-Edu, sample-10BT, with documents packed into rows of 65,536 tokens. Attention does not cross documents
         unless config.data.packing=False. 20,000 steps of 8 x 65,536 tokens are 10.5 billion tokens.
Takes:   not measured end to end. Tokens per second of this model are in benchmarks/results.
Reaches: not measured.
Command: python train.py --config=configs/h200_long.py
"""

from pathlib import Path

from ml_collections import ConfigDict

from nsa_jax.command_line import load_config


def get_config() -> ConfigDict:
    """The long-context run."""
    c = load_config(str(Path(__file__).with_name("a100_prod.py")))
    c.name = "h200_long"

    c.model.rope_theta = 1_000_000.0

    c.data.seq_len = 65_536

    c.train.steps = 20_000
    c.train.batch_size = 8
    c.train.grad_accum = 1
    c.train.log_every = 10
    c.train.eval_every = 500
    c.train.eval_batches = 8
    c.train.save_every = 500
    c.train.sample_tokens = 256

    c.optim.learning_rate = 3e-4
    c.optim.warmup_steps = 500

    c.preflight.target = "h200"
    c.preflight.devices = 8
    return c
