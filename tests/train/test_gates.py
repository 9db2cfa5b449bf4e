"""What earlier systems got wrong about training (design, section 6): each is a gate here."""

import math

import numpy as np

from nsa_jax.data import make_pipeline

from .tiny import VOCAB, losses, make_run, random_batch, steps, tiny_config

FLOOR = math.log(VOCAB) - 0.02


def train_losses(batches):
    config = tiny_config(train__steps=200)
    return np.asarray([m["loss"] for m in steps(config, batches(config))[0]])


def test_uniformly_random_tokens_cannot_be_learned(tmp_path):
    make_run(tmp_path, train__steps=200, data__synthetic="random").run()
    seen = np.asarray(list(losses(tmp_path).values()))
    assert len(seen) == 200
    assert seen[20:].min() >= FLOOR


def test_unshifted_labels_are_caught_by_the_same_gate():
    def unshifted(config):
        for seed in range(200):
            batch = random_batch(config, seed)
            yield {**batch, "targets": batch["inputs"]}

    assert train_losses(unshifted).min() < FLOOR


def test_a_learnable_task_is_learned():
    def counting(config):
        for seed in range(200):
            batch = random_batch(config, seed)
            tokens = (batch["inputs"][:, :1] + np.arange(config.data.seq_len + 1, dtype=np.int32)) % VOCAB
            yield {**batch, "inputs": tokens[:, :-1], "targets": tokens[:, 1:]}

    assert train_losses(counting)[-1] < 0.1


def test_targets_are_the_next_tokens_in_what_the_trainer_reads():
    pipeline = make_pipeline(tiny_config())
    batch = next(pipeline.train())
    np.testing.assert_array_equal(batch["targets"][:, :-1], batch["inputs"][:, 1:])
