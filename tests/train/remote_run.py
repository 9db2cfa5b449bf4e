"""A run into an object store, as slow as a test needs it to be killed: python -m tests.train.remote_run ADDRESS DIR."""

import sys
import time

from nsa_jax.train import Callback, mirror, run

from .tiny import one_device, tiny_config


def config(local_dir, steps=12):
    """A checkpoint every two steps; the steps' number decides nothing else."""
    return tiny_config(
        train__steps=steps, train__save_every=2, train__local_dir=str(local_dir), model__num_layers=1,
        optim__schedule="constant", preflight__selftest=False, guards__peer_seconds=10.0,
    )  # fmt: skip


class Slow(Callback):
    """Steps of a fifth of a second."""

    def on_step(self, step, metrics):
        time.sleep(0.2)


if __name__ == "__main__":
    mirror._POLL_SECONDS = 0.05
    run(config(sys.argv[2], 1000), sys.argv[1], devices=one_device(), callbacks=[Slow()])
