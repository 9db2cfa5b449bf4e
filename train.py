"""Trains a model: python train.py --config=configs/quickstart.py [--workdir=DIR] [--resume=DIR[@STEP]].

Any field of the config can be overridden: --config.train.steps=100. An interrupted run is continued by starting it
again with the same workdir.

    python train.py --config=configs/a100_prod.py --preflight --target=a100-80gb --devices=8

says whether the run is sane, fits and what it will cost, and exits with 0 or 2. It needs no GPU.

The same command, started on every host by Slurm, Open MPI or an indexed Kubernetes job, is one run over all of their
devices; launch/README.md has examples. Without a launcher: --coordinator=HOST:PORT --num_processes=N --process_id=I.
"""

from __future__ import annotations

import os
import signal


def _end_at_once(number: int, _frame: object) -> None:
    """Ctrl-C while modules are imported, which takes seconds. Later ones are answered by `nsa_jax.trainer`."""
    os.write(2, b"interrupted before training began; nothing was changed. Start again with the same command\n")
    os._exit(130)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, _end_at_once)
    from nsa_jax import trainer

    trainer.start()
