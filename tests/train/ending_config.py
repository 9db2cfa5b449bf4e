"""As distributed_config.py. An error ends the run at step 6, in all processes or (ENDING=first) in process 0."""

import os
import time

import jax

from nsa_jax.hub import digests
from nsa_jax.train.errors import TrainingError
from nsa_jax.train.processes import agreement
from nsa_jax.train.watch.guards import Guards
from tests.train.distributed_config import get_config  # noqa: F401

_ALONE = os.environ["ENDING"] == "first"
_on_steps, _write = Guards.on_steps, digests.write


def _fail(self, first_step, rows):
    _on_steps(self, first_step, rows)
    if first_step + len(rows) > 6 and (jax.process_index() == 0 or not _ALONE):
        raise TrainingError("step 6: of the test", guard="callback" if _ALONE else "loss_floor", step=6, save=True)


def _write_slowly(directory):
    time.sleep(0 if _ALONE else 20)  # longer than the others are given once one has failed
    _write(directory)


Guards.on_steps, digests.write, agreement._ENDING_SECONDS = _fail, _write_slowly, 5.0
