"""What a run is before its first step: its data, its programs and its preflight."""

from __future__ import annotations

import functools
import logging
from concurrent.futures import Future
from pathlib import Path

import jax
import numpy as np
from ml_collections import ConfigDict

from nsa_jax.batch_ramp import BatchRamp
from nsa_jax.data import make_pipeline
from nsa_jax.data.tokenizers import Tokenizer
from nsa_jax.devices import wake
from nsa_jax.object_store import scheme_of
from nsa_jax.ops.implementations import forget_implementations_served
from nsa_jax.train import preflight, processes
from nsa_jax.train.compile_ahead import CompileAhead, first_programs
from nsa_jax.train.errors import newest_checkpoint
from nsa_jax.train.program_store import Program, ProgramStore
from nsa_jax.train.start import begins_anew, other_run
from nsa_jax.train.state import setup
from nsa_jax.train.step import make_eval_step, make_train_step
from nsa_jax.train.terminal import Terminal
from nsa_jax.train.validation import Sampler
from nsa_jax.train.watch import health

logger = logging.getLogger("nsa_jax")


class Prepared:
    """A run up to its first step. The arguments are those of `nsa_jax.train.loop.Run`.

    Attributes:
      config, workdir: the arguments; the path is absolute.
      pipeline: the data.
      setup: model, optimizer, mesh and shardings.
      train_step, eval_step, health: the programs; no health metrics without `config.guards.health`.
      ramp: rows of a batch by step.
      sampler: draws a sample at a validation, if the config wants that.
      terminal: what a person sees.
      preflight: what `examine` found; None before.
    """

    def __init__(
        self,
        config: ConfigDict,
        workdir: Path,
        resume: str | None,
        devices: list | None,
        stage: bool,
        store_programs: bool,
        compile_early: bool,
    ):
        forget_implementations_served()
        self.config = config
        self.workdir = Path(workdir).absolute()
        self.workdir.mkdir(parents=True, exist_ok=True)
        processes.check_shared(self.workdir)
        processes.check_devices()
        self._other = other_run(self.workdir, resume, stage, config.train.steps)
        self._stage = stage
        self.ramp = BatchRamp.of(config.train)
        self.terminal = Terminal(active=jax.process_index() == 0)
        wake(devices)
        self._compiling = CompileAhead({})
        self._compile_early = compile_early
        self._selftest: Future | None = None
        data = functools.partial(
            make_pipeline,
            self.ramp.data_config(config),
            process_index=jax.process_index(),
            process_count=jax.process_count(),
            on_tokenizer=functools.partial(self._set_up, devices, store_programs),
        )
        # Hosts fetch what process 0 has put into an object store; those that share a directory tokenise together.
        in_store = bool(scheme_of(config.data.cache_dir))
        try:
            self.pipeline = processes.together(functools.partial(processes.first_alone, data) if in_store else data)
            processes.check_same("data", {"fingerprint": self.pipeline.fingerprint})
            if config.train.eval_batches:
                for part in self.pipeline.parts.values():
                    part.pipeline.validation()  # raises where no document is held out
            self.sampler = Sampler(self.setup, self.pipeline) if config.train.sample_tokens else None
        except BaseException:
            self._compiling.abandon()
            raise
        self.preflight: preflight.Report | None = None

    def _set_up(self, devices: list | None, store_programs: bool, tokenizer: Tokenizer) -> None:
        """Makes the programs, which depend on the tokenizer alone of what the data decide."""
        config = self.config
        self.setup = setup(config, tokenizer.vocab_size, devices)
        token_bytes = np.zeros(self.setup.model_config.vocab_size, np.int32)
        token_bytes[: tokenizer.vocab_size] = tokenizer.token_bytes
        store = ProgramStore.of_run(config, self.setup.mesh, token_bytes.tobytes())
        self._store = store if store_programs else None
        self.train_step = Program(make_train_step(self.setup, token_bytes))
        self.eval_step = Program(make_eval_step(self.setup, token_bytes))
        self.health = health.Health(self.setup, self.workdir) if health.wanted(self.setup) else None
        if self._compile_early:
            self._compile_ahead()
            self._selftest = preflight.begin_selftest(config, self._store)

    def _compile_ahead(self) -> None:
        """Begins to compile what the run calls first, unless its last step is done."""
        if (newest_checkpoint(self.workdir) or 0) < self.config.train.steps:
            health_program = self.health.program if self.health is not None else None
            anew = begins_anew(self.workdir, self._other)
            programs = first_programs(self.setup, self.train_step, self.eval_step, health_program, anew)
            self._compiling = CompileAhead(programs, lambda: jax.set_mesh(self.setup.mesh), self._store)

    def examine(self) -> None:
        """The preflight that every run makes: workdir, disk, kernels, data, causality of the model code.

        Raises:
          ConfigError: with everything that is wrong; nothing has been trained.
        """
        if not self._compile_early:
            self._compile_ahead()
        try:
            self.preflight = preflight.before_run(
                self.config,
                self.workdir,
                self.setup,
                self.pipeline,
                lambda part: self.terminal.doing(f"preflight: {part}"),
                self._store,
                self._selftest,
            )
        except BaseException:
            self._compiling.abandon()
            raise
        finally:
            self.terminal.close()
        for problem in self.preflight.problems:
            logger.warning("%s", problem)
        seconds = ", ".join(f"{name} {value:.1f} s" for name, value in self.preflight.seconds.items())
        logger.info("preflight passed: %s", seconds)
