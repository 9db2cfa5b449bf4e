"""Health figures, against lists written by hand and the model's own forward pass."""

import jax.numpy as jnp
import numpy as np
import pytest

from nsa_jax.config import NSAConfig
from nsa_jax.ops import blocks
from nsa_jax.train.state import setup
from nsa_jax.train.watch import health

from .tiny import VOCAB, one_device, random_batch, tiny_config


@pytest.mark.parametrize("num_selected", [4, 20])
def test_keys_by_the_formula_are_those_that_lists_hold(num_selected):
    config = NSAConfig(8, 4, 8, num_selected, 1, 2, 12)
    random = np.random.default_rng(num_selected)
    t = np.tile(np.arange(80), (3, 1))
    start = np.array([np.zeros(80), np.where(t[0] >= 13, 13, 0), np.where(t[0] >= 40, 40, 0)], np.int32)
    scores = jnp.asarray(random.random((3, 80, 10), np.float32))
    lists = blocks.select_from_importance(scores, jnp.asarray(t), jnp.asarray(start), config)
    read = [
        [len({p for j in row for p in range(j * 8, j * 8 + 8) if s <= p <= q}) for row, q, s in zip(*rows, strict=True)]
        for rows in zip(np.asarray(lists), t, start, strict=True)
    ]
    np.testing.assert_array_equal(blocks.selected_key_count(t, start, config), read)
    np.testing.assert_array_equal(blocks.counted_keys(lists, jnp.asarray(t), jnp.asarray(start), 8), read)


def test_health_runs_the_same_forward_pass_as_the_model():
    config = tiny_config()
    made = setup(config, VOCAB, one_device())
    params, batch = made.init()["params"], random_batch(config)
    start = np.where(np.arange(48) >= 17, 17, 0).astype(np.int32)[None].repeat(8, 0)
    hidden, figures = health.forward_with_health(made.model(params), batch["inputs"], start)
    np.testing.assert_array_equal(hidden, made.model(params).hidden(batch["inputs"], start))
    assert set(figures["key_mismatches"].tolist()) == {0.0}
    shares = [figures[f"gate_share_{name}"] for name in health.BRANCHES]
    np.testing.assert_allclose(sum(shares), 1.0, rtol=1e-5)
    assert figures["gate_entropy"].shape == (2,) and 1.0 < figures["gate_entropy"].min() <= np.log(3) + 1e-6


def test_selection_figures_on_a_list_written_by_hand():
    config = NSAConfig(8, 4, 8, 4, 1, 2, 12)
    lists = np.full((1, 48, 1, 4), 6, np.int32)  # 6: padding
    for t in range(48):
        own = t // 8
        chosen = sorted({0, own, max(own - 1, 0)} | ({1} if own >= 3 else set()))
        lists[0, t, 0, : len(chosen)] = chosen
    found = health.selection_health(jnp.asarray(lists), jnp.zeros((1, 48), jnp.int32), config)
    counts = np.array([1, 2, 3, 4, 4, 4])
    assert float(found["blocks_distinct"]) == pytest.approx(counts.mean())
    assert float(found["blocks_beyond"]) == pytest.approx(3 / counts.sum())
    assert float(found["key_mismatches"]) == 0  # short lists of early queries hold all their candidates


def test_the_mean_distance_of_blocks_in_a_long_row_is_right():
    """Their sum is above 2^31 tokens."""
    config, length = NSAConfig(), 65_536
    own = np.arange(length) // config.select_block
    lists = own[:, None] * np.arange(16) // 16  # evenly spread over the past
    found = health.selection_health(jnp.asarray(lists[None, :, None]), jnp.zeros((1, length), jnp.int32), config)
    assert float(found["block_distance"]) == pytest.approx(64 * (own[:, None] - lists).mean(), rel=1e-5)
