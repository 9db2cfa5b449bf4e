"""Variants of NSA and of dense attention at 32,768 tokens, on equal tokens and parameters.

What:    as configs/quality/h200_8k.py, with longer rows, a larger base of RoPE and fewer variants.
Data:    the same. 1,908 steps of 4 x 32,768 tokens are 250 million tokens.
Takes:   one H200 trains 422,000 tokens/s with NSA, 529,000 with window and NSA by turns and 698,000 with a window, two
         325,000 with dense attention: 10, 8, 6 and 13 minutes, and 3 to 4 more to start and validate. One H100 trains
         `shared_mean` at 384,000 tokens/s, two at 729,000; one H200 `shared_mean_dense` at 305,000. Measuring a variant
         takes 1 to 3 minutes.
Reaches: bits per byte of held-out packages: `shared_mean` 0.832, `shared_mean_dense` 0.763 after 224M tokens, NSA 0.894
         and 0.905 in two runs, window and NSA by turns 0.920, a window of 512 0.934, dense attention 1.010.
Command: python benchmarks/quality.py --grid configs/quality/h200_32k.py
"""

from pathlib import Path

from ml_collections import ConfigDict

from nsa_jax.command_line import load_config

VARIANTS = {
    "dense": {"model.attention": "dense"},
    "window": {"model.attention": "window"},
    "nsa": {},
    "shared": {"model.nsa.shared_kv": True},
    "shared_mean": {"model.nsa.shared_kv": True, "model.compressor": "mean"},
    "shared_mean_dense": {
        "model.nsa.shared_kv": True,
        "model.compressor": "mean",
        "model.layer_pattern": ("nsa", "nsa", "nsa", "dense"),
    },
    "window_nsa": {"model.layer_pattern": ("window", "nsa")},
    "open_gates": {"model.nsa.gate_bias": 2.0},
    "selection_loss": {"train.selection_loss": 0.1},
    "n32": {"model.nsa.num_selected": 32},
}

MEASURES = {
    "lengths": (4096, 8192, 16_384, 32_768),
    "samples": 16,
    "max_tokens": 4_000_000,
    "cuts": (512, 2048, 8192),
}


def get_config() -> ConfigDict:
    """Plain NSA, which the variants change."""
    c = load_config(str(Path(__file__).with_name("h200_8k.py")))
    c.name = "h200_32k"

    c.model.rope_theta = 500_000.0
    c.data.seq_len = 32_768

    c.train.steps = 1908
    c.train.batch_size = 4
    c.train.eval_every = 190
    c.train.eval_batches = 8
    c.train.save_every = 190
    return c
