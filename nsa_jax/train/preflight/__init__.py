"""Preflight: whether a run is sane, fits, and what it will cost, before a device hour is spent.

`examine` looks at everything that can be known without training: the config's rules, the compiled steps, the cost, the
workdir and the data. `python train.py --config=... --preflight` prints what it finds and exits with 0 or 2. Rules of
the config itself are in nsa_jax/rules.py; those that need a device, a disk or data are here and in data_check.py:

  R008 vocabulary smaller than the tokenizer's      R025 does not fit into the devices' memory
  R018 the kernels do not serve this model          R026 the compiled step talks to the host
  R023 workdir: unwritable or another run's         R027 not compiled for the target: figures are estimates
  R024 disk too small for the checkpoints           R028 data not looked at
  R029 checkpoints more than an hour of work apart  R03x data: see data_check.py; R04x self-test: see selftest.py
"""

from nsa_jax.train.preflight.checks import (
    check_disk,
    check_float8,
    check_kernels,
    check_memory,
    check_save_interval,
    check_workdir,
)
from nsa_jax.train.preflight.report import Report, show
from nsa_jax.train.preflight.run import before_run, begin_selftest, examine

__all__ = [
    "Report",
    "before_run",
    "begin_selftest",
    "check_disk",
    "check_float8",
    "check_kernels",
    "check_memory",
    "check_save_interval",
    "check_workdir",
    "examine",
    "show",
]
