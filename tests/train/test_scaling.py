"""Twice the tokens take about twice the time (design, section 6, gate 10): no host loop, nothing quadratic."""

import time

import jax
import numpy as np
import pytest

from nsa_jax.train.state import setup
from nsa_jax.train.step import make_train_step

from .tiny import VOCAB, one_device, random_batch, tiny_config

# The compressed branch alone is quadratic, over compress_stride squared: rows here are several times what the other two
# branches read, and short enough for that part to be small, as with the paper's geometry up to some 64k tokens.
GEOMETRY = dict(compress_block=16, compress_stride=16, select_block=16, num_selected=4, window=32)
LENGTHS = (512, 1024)


def seconds_per_step(implementation, repeats=6, steps=2):
    """Processor seconds of a training step by row length: the least of several, taken in turn.

    Processor time, because the cores are shared with other tests; the least, because a cache is too.
    """
    runs = []
    for length in LENGTHS:
        geometry = {f"model__nsa__{name}": value for name, value in GEOMETRY.items()}
        config = tiny_config(
            model__implementation=implementation,
            model__num_layers=1,
            data__seq_len=length,
            train__batch_size=1,
            **geometry,
        )
        made = setup(config, VOCAB, one_device())
        runs.append((made, make_train_step(made, np.ones(VOCAB, np.int32)), made.init(), random_batch(config)))
    times = np.full((repeats + 1, len(LENGTHS)), np.inf)
    for repeat in range(repeats + 1):
        for i, (made, step, state, batch) in enumerate(runs):
            with jax.set_mesh(made.mesh):
                start = time.process_time()
                for _ in range(steps):
                    state, _ = step(state, batch)
                jax.block_until_ready(state)
                times[repeat, i] = (time.process_time() - start) / steps
            runs[i] = (made, step, state, batch)
    return times[1:].min(0)  # the first compiled


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_time_doubles_with_the_length(implementation):
    short, long = seconds_per_step(implementation)
    if implementation == "xla":
        assert long / short <= 2.3
    else:  # quadratic by design: the measurement sees it
        assert long / short > 2.3
