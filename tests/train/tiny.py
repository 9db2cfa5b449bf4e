"""A run small enough to train in seconds, shared by the tests of training."""

import json
from pathlib import Path

import jax
import numpy as np

from nsa_jax.config import default_config
from nsa_jax.train.loop import Run
from nsa_jax.train.state import setup
from nsa_jax.train.step import make_train_step

VOCAB = 32


def tiny_config(**changes):
    """Four blocks of 8 tokens selected out of rows of 48 tokens, two layers, synthetic copy task.

    Args:
      **changes: fields to override, with "__" for ".", such as train__steps=5.
    """
    c = default_config()
    c.name = "tiny"
    c.model.dim, c.model.num_layers, c.model.mlp_dim = 32, 2, 48
    c.model.num_heads, c.model.num_kv_heads, c.model.head_dim = 4, 2, 8
    c.model.compute_dtype, c.model.init_std = "float32", 0.1
    c.model.implementation, c.model.remat = "reference", "none"
    n = c.model.nsa
    n.compress_block, n.compress_stride, n.select_block, n.num_selected, n.window = 8, 4, 8, 4, 12
    c.data.source, c.data.synthetic, c.data.synthetic_vocab = "synthetic", "copy", VOCAB
    c.data.seq_len, c.data.prefetch = 48, 2
    c.train.steps, c.train.batch_size, c.train.log_every = 8, 8, 1
    c.train.eval_every, c.train.eval_batches, c.train.save_every, c.train.sample_tokens = 0, 0, 0, 0
    c.optim.learning_rate, c.optim.warmup_steps = 3e-3, 2
    c.guards.health = False  # one compilation less
    for name, value in changes.items():
        target, field = c, name
        while "__" in field:
            part, field = field.split("__", 1)
            target = target[part]
        target[field] = value
    return c


def one_device():
    return jax.devices()[:1]


def make_run(workdir, resume=None, **changes) -> Run:
    return Run(tiny_config(**changes), Path(workdir), resume, one_device())


def rows(workdir):
    """Training rows of metrics.jsonl by step."""
    lines = [json.loads(line) for line in (Path(workdir) / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row for row in lines if "train/loss" in row}


def losses(workdir):
    """Training loss by step, exactly as written."""
    return {step: row["train/loss"] for step, row in rows(workdir).items()}


def random_batch(config, seed=0, mask=None):
    """A batch of random tokens whose targets are the next tokens."""
    b, t = config.train.batch_size, config.data.seq_len
    tokens = np.random.default_rng(seed).integers(0, VOCAB, (b, t + 1), dtype=np.int32)
    return {
        "inputs": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "segment_start": np.zeros((b, t), np.int32),
        "loss_mask": np.ones((b, t), np.float32) if mask is None else mask,
    }


def steps(config, batches, devices=None, token_bytes=None):
    """Trains on the given batches; returns the metrics of each step and the final state."""
    made = setup(config, VOCAB, devices or one_device())
    step = make_train_step(made, np.ones(VOCAB, np.int32) if token_bytes is None else token_bytes)
    metrics = []
    with jax.set_mesh(made.mesh):
        state = made.init()
        for batch in batches:
            state, values = step(state, batch)
            metrics.append(jax.device_get(values))
    return metrics, state


def rules(problems, severity="error"):
    """The rules that problems of a severity break."""
    return {problem.rule for problem in problems if problem.severity == severity}
