"""A run in its workdir, which is locked and, if it lies in an object store, mirrored there."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from nsa_jax import config as config_lib
from nsa_jax.command_line import workdir_problems
from nsa_jax.data.cache import cache_root
from nsa_jax.devices import keep_compiled_programs
from nsa_jax.object_store import scheme_of
from nsa_jax.train import disk, lock, trackers
from nsa_jax.train.callbacks import Callback
from nsa_jax.train.errors import TrainingError
from nsa_jax.train.loop import Run
from nsa_jax.train.mirror import local_directory, mirroring
from nsa_jax.train.profiling import Window


def run(
    config: ConfigDict,
    workdir: str | Path,
    resume: str | None = None,
    devices: list | None = None,
    profile: Window | None = None,
    callbacks: Sequence[Callback] = (),
    stage: bool = False,
    began: float | None = None,
    store_programs: bool = False,
) -> dict[str, Any]:
    """Trains as `config` says and returns the summary.

    Args:
      config: as a get_config() of configs/ returns it.
      workdir: everything is written there; a run that was interrupted is continued. Of one in an object store, such as
        s3://bucket/run, the files are in `local_directory(workdir)` too.
      resume: "DIR[@STEP]" of another run to start from.
      stage: begin another stage of it: its weights and optimizer averages, and this config's data, steps and schedule.
      devices: to run on; None means all.
      profile: steps to trace into the workdir.
      callbacks: called at the start, after each step and at the end; see `Callback`.
      began: when the start began, on the clock of `time.perf_counter`; what came before this call is startup then.
      store_programs: keep compiled programs, and load those of earlier starts without tracing anything. A program is
        found by the config and the files of all modules: leave it False where a session has changed what they hold.

    Raises:
      ConfigError: with everything that is wrong, before any device is touched.
      WorkdirInUse: another run is at work in the workdir.
      TrainingError: a guard or a callback stopped the run, a disk is full, or an object store does not answer.
    """
    began = time.perf_counter() if began is None else began
    address = str(workdir) if scheme_of(str(workdir)) else ""
    problems = workdir_problems(address) if address else []
    workdir = local_directory(workdir, config.train.local_dir)
    config_lib.check(config, problems + workdir_problems(workdir) + trackers.problems(config.train.trackers))
    keep_compiled_programs(config.compilation_cache_dir, lines=profile is not None)
    made = None
    try:
        with lock.holding(workdir), mirroring(address, workdir, config) as mirror:
            made = Run(
                config, workdir, resume, devices, profile, callbacks, stage, began, mirror, store_programs,
                compile_early=True,
            )  # fmt: skip
            made.examine()
            return made.run()
    except Exception as error:
        if not disk.is_full(error):
            raise
        full = disk.fullest(workdir, workdir / "checkpoints", cache_root(config.data.cache_dir))
        if made is None:
            raise TrainingError(disk.advice(full), guard="disk_full") from error
        raise made.stop_on_full_disk(full) from error
