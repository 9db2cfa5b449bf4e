"""Writes tests/tools/tiny_llama: a random Llama of 5,000 parameters and its logits, by Hugging Face transformers.

    pip install torch transformers && python tests/tools/make_tiny_llama.py

The suite compares the import with these files, and with a model made on the spot where transformers is installed.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np


def make(directory: Path, *, seed: int = 0, tied: bool = False, shard: str = "8KB") -> tuple[np.ndarray, np.ndarray]:
    """Saves a random model with transformers; returns tokens int32 [2, 24] and its float32 logits [2, 24, 32]."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
        rope_theta=500.0,
        rms_norm_eps=1e-5,
        initializer_range=0.4,
        tie_word_embeddings=tied,
        attention_bias=False,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
        tokens = torch.randint(0, 32, (2, 24))
        logits = model(tokens).logits.float().numpy()
    model.save_pretrained(directory, max_shard_size=shard)
    return tokens.numpy().astype(np.int32), logits


if __name__ == "__main__":
    here = Path(__file__).parent / "tiny_llama"
    tokens, logits = make(here)
    np.savez(here / "expected.npz", tokens=tokens, logits=logits)
