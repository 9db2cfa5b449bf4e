"""The training loop and what surrounds it, from the state that a run begins with to its summary."""

from __future__ import annotations

import collections
import contextlib
import functools
import logging
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from ml_collections import ConfigDict

from nsa_jax.batch_ramp import Taken
from nsa_jax.config import ConfigError, Problem
from nsa_jax.ops.implementations import implementations_served
from nsa_jax.train import disk, env, far_task, flops, metrics, processes
from nsa_jax.train.batches import Batches, idle_seconds
from nsa_jax.train.callbacks import Callback, Callbacks
from nsa_jax.train.checkpoint import Checkpoints
from nsa_jax.train.errors import TrainingError, check_room, newest_checkpoint, write_stop, writing_checkpoint
from nsa_jax.train.goodput import Goodput
from nsa_jax.train.mirror import Mirror
from nsa_jax.train.preflight.data_check import loss_floor
from nsa_jax.train.prepared import Prepared
from nsa_jax.train.profiling import Profile, Window, check_window
from nsa_jax.train.rollback import Rollbacks
from nsa_jax.train.start import (
    Start,
    checkpoint_info,
    finished_before,
    first_state,
    optimizer_to_reset,
    recorded_stages,
    set_aside_ends,
)
from nsa_jax.train.state import State, batch_sharding
from nsa_jax.train.stopping import HALT, StopRequest
from nsa_jax.train.terminal import TRAINING, data_line, ending, program_and_place, run_line, validation_line
from nsa_jax.train.timing import Clock, Interval
from nsa_jax.train.trackers import Trackers
from nsa_jax.train.validation import evaluate, record_validation
from nsa_jax.train.watch import guards
from nsa_jax.train.watch.guards import Guards
from nsa_jax.train.watch.layers import write_layers
from nsa_jax.train.watch.watchdog import Watchdog

logger = logging.getLogger("nsa_jax")

__all__ = ["HALT", "Run", "TrainingError"]


class Run(Prepared):
    """One run from its config to its summary; `workdir.run` is the whole of it.

    Args:
      config: validated.
      workdir: where everything is written.
      resume: what to start from if the workdir has no checkpoint of its own: "DIR[@STEP]" of another run, or the
        directory of an exported model (its weights only).
      devices: to run on; None means all.
      profile: steps to trace into the workdir.
      callbacks: called at the start, after each step and at the end.
      stage: begin another stage of the run that `resume` names; see `nsa_jax.train.start.first_state`.
      began: when the start began, on the clock of `time.perf_counter`, for goodput; None: now.
      mirror: what copies the workdir to an object store, if something does.
      store_programs: load compiled programs of earlier starts; see `nsa_jax.train.program_store`.
      compile_early: compile the programs and test the model while the data are tokenised; otherwise `examine` begins.
    """

    def __init__(
        self,
        config: ConfigDict,
        workdir: Path,
        resume: str | None = None,
        devices: list | None = None,
        profile: Window | None = None,
        callbacks: Sequence[Callback] = (),
        stage: bool = False,
        began: float | None = None,
        mirror: Mirror | None = None,
        store_programs: bool = False,
        compile_early: bool = False,
    ):
        began = time.perf_counter() if began is None else began
        self._mirror = mirror
        self._window = profile
        self._callbacks = Callbacks(callbacks)
        super().__init__(config, workdir, resume, devices, stage, store_programs, compile_early)
        self.peers = processes.peers()
        self.rollbacks = Rollbacks(self.workdir, config.guards.roll_back)
        self._start_step: int | None = None  # that this start began after, whatever it returned to since
        self._floor: float | None = None  # bigram entropy of the data, from the preflight
        self._forget(began)

    def _forget(self, began: float | None = None) -> None:
        """Puts away what is known of the steps so far: at the start, and before the last checkpoint is restored."""
        active = jax.process_index() == 0
        self.guards = Guards(self.config, self.workdir, bigram_entropy=self._floor, active=active)
        self.goodput = Goodput(self.workdir, began, active=active)
        self.trackers = Trackers(self.config.train.trackers, active=active)
        self.best: tuple[int, float] | None = None
        self._taken = Taken(self.ramp, self.config.data.seq_len)
        self._early: str | None = None  # why to stop before the last step
        self._live: tuple[int, State, Any] | None = None  # last finished step, state, data: what a guard's stop saves
        self._last_validation: tuple[int, dict[str, float]] | None = None
        self._last_row: dict[str, float] = {}

    def examine(self) -> None:
        super().examine()
        found = self.preflight and self.preflight.data
        self._floor = loss_floor(self.config, found) if found else None
        self.guards = Guards(self.config, self.workdir, bigram_entropy=self._floor, active=jax.process_index() == 0)

    def _restore(self, checkpoints: Checkpoints, info: dict, data: Any) -> Start:
        """What this workdir holds, else what --resume names, else the initialisation."""
        own = checkpoints.restore(self.setup.target(), data, fresh_optimizer=optimizer_to_reset(self.setup))
        if own is None:
            self.rollbacks.forget()
            self._compiling.wait("initial state")
            begin = first_state(self.setup, self._other, info, data, self._stage)
            if begin.trained:
                self.guards.begin_trained()
            return begin
        step, state = own[0], self.setup.completed(own[1])
        position = data.get_state()["step"]
        for _ in range(self.rollbacks.batches_to_skip(step, position)):
            next(data)
        self.best = checkpoints.best()
        remembered = checkpoints.guards(step)
        if not step:  # the validation at step 0 is repeated, and must count once
            trained = remembered.get("values", {}).get("trained", 0)
            remembered = {"values": {"trained": trained}} if trained else {}
        if (alarms := self.rollbacks.alarms(step, position)) is not None:
            remembered = {**remembered, "alarms": alarms}  # alarms of steps that a rollback undid stay counted
        self.guards.restore(remembered)
        self._early = self.guards.early_stop()
        self._last_row, self._last_validation = metrics.last_rows(self.workdir, step)
        return Start.after(step, state, self.workdir, self.config, recorded_stages(self.workdir))

    def run(self) -> dict[str, Any]:
        """Trains to the end, or to a stop request.

        Returns:
          The summary that is also written to summary.json.

        Raises:
          TrainingError: a guard stopped the run; stopped.json says why.
          CheckpointError: a checkpoint does not fit the config.
        """
        request = StopRequest(self.workdir, self.setup.mesh, self.terminal, self._stopping)
        try:
            with contextlib.ExitStack() as whole:  # a request that comes before a rollback counts after it
                stop = functools.cache(lambda: whole.enter_context(request))
                while (summary := self._run(stop)) is None:
                    self._forget()
        finally:
            self._compiling.abandon()
        return summary

    def _run(self, stop_request: Callable[[], StopRequest]) -> dict[str, Any] | None:
        """From the last checkpoint on; None if it is to be restored again, since a guard has called for that."""
        config, train = self.config, self.config.train
        info = checkpoint_info(self.setup, self.pipeline)
        checkpoints = Checkpoints(
            self.workdir / "checkpoints",
            info,
            keep_last=train.keep_last,
            keep_best=train.keep_best,
            keep_every=train.keep_every,
        )
        data = self.pipeline.train()
        with jax.set_mesh(self.setup.mesh), contextlib.ExitStack() as stack:
            stack.callback(checkpoints.close)
            stack.callback(data.close)
            stack.callback(self.terminal.close)
            self.terminal.doing("preparing the state")
            begin = self._restore(checkpoints, info, data)
            start = begin.step
            self._start_step = start if self._start_step is None else self._start_step
            if start >= train.steps and (finished := finished_before(self.workdir, start)) is not None:
                return finished
            if start > train.steps:
                message = f"config.train.steps={train.steps}: the workdir has a checkpoint of step {start:,} already"
                raise ConfigError([Problem("R022", "error", message, f"use more than {start:,} steps")])
            if self._window is not None:
                own = begin.source == str(self.workdir)
                self._window = check_window(self._window, start + 1, train.steps, goes_on=own)
            data.start_prefetch()
            if jax.process_index() == 0:
                set_aside_ends(self.workdir)
                self.pipeline.tokenizer.save(self.workdir / "tokenizer")
            self.goodput.resume(start)
            stack.callback(self.goodput.close)
            stack.callback(self.trackers.finish)
            writer = metrics.MetricsWriter(
                self.workdir,
                start_step=start,
                total_steps=train.steps,
                active=jax.process_index() == 0,
                trackers=self.trackers,
                terminal=self.terminal,
            )
            stack.callback(writer.close)
            self._announce(writer, begin.said)
            if jax.process_index() == 0:  # the others tell what they alone see through the log
                self.guards.tell(writer.say)
            self.profile = Profile(self._window, self.workdir, writer.say)
            stack.callback(self.profile.close)
            self._begun = start
            stop = stop_request()
            self.watchdog = stack.enter_context(
                Watchdog(
                    self.workdir,
                    process=jax.process_index(),
                    stall_seconds=config.guards.stall_seconds,
                    heartbeat_seconds=config.guards.heartbeat_seconds,
                    exit_on_stall=config.guards.stall_exit,
                )
            )
            if self.peers is not None:
                self.peers.on_loss = self._on_loss
            try:
                self._callbacks.on_start(self, start)
                step, state, reason = self._train(begin, data, checkpoints, writer, stop)
                if train.save_every and step not in checkpoints.steps():
                    self._save(checkpoints, step, state, data)
                with writing_checkpoint(step), self.goodput.spent_on("saving"):
                    checkpoints.wait()
                self.best = checkpoints.best() or self.best
                ended = {"saved": step in checkpoints.steps(), "terminated": reason is not None and stop.terminated}
                if reason is None:
                    ended |= far_task.measure(self, state, self._last_validation, writer)
                summary = self._summarise(writer, step, reason, ended)
                self._callbacks.on_end(summary)
                return summary
            except TrainingError as error:
                if self._roll_back(error, checkpoints, writer):
                    return None
                if self.peers is not None:
                    self.peers.ending()
                self._explain(error, checkpoints)
                raise

    def _train(self, begin: Start, data, checkpoints, writer, stop):
        """The loop. Returns the last finished step, the state, and what stopped it early (or None)."""
        config, train = self.config, self.config.train
        start, state = begin.step, begin.state
        self._taken = self._taken.after(start, data.get_state()["step"], begin.tokens)
        batches = Batches(data, self.setup, start, self._on_batch, self.ramp)
        sizes: set[int] = set()  # of batches, for each of which the step is compiled
        pending: collections.deque[Interval] = collections.deque()
        interval = Interval(start + 1)
        clock = Clock()
        if start == 0 and train.eval_batches:
            with self.goodput.spent_on("validation"):
                self._validate(0, state, writer)
        clock.restart()
        step, reason = start, None
        while step < train.steps:
            reason = stop.reason() or self._early
            if reason:
                self.terminal.stopping(f"stopping after step {step}")
                if step == start:  # the checkpoint that follows needs its config and the stages before
                    self._write_env(begin)
                break
            self._begun = step + 1
            batch = next(batches)
            rows = self.ramp.rows(step + 1)
            compiles = rows not in sizes
            if compiles:  # otherwise nothing would be heard for as long as that takes
                sizes.add(rows)
                what = f"compiling the train step{f' for {rows} rows' if self.ramp.stages else ''}"
                self._doing(step, what, compiles=True)
                if not self.terminal.live:
                    writer.say(what)
                self._compiling.wait("train step")
            self.profile.before(step + 1, state)
            with jax.profiler.StepTraceAnnotation("train", step_num=step + 1):
                state, values = self.train_step(state, batch)
            batches.last_step = interval.add(values)
            step += 1
            batches.last_step.add_done_callback(functools.partial(self._finished, step))
            profiled = self.profile.after(step, state)
            self._live = (step, state, data)
            if step == start + 1:
                guards.check_implementations(config.model.implementation, implementations_served())
                self._write_env(begin)
            if compiles:
                jax.block_until_ready(values)
                if self.health is not None:
                    self.terminal.doing("compiling the health metrics")
                    self._compiling.wait("health")
                    self.health.warm_up(state["params"], batch)
                clock.restart()  # compilation is over
                self.watchdog.beat(step)  # a step that hangs is noticed before the first report
                self.terminal.doing(TRAINING)
                interval.untimed, self._sizes = 1, len(sizes)
            if step == start + 1:
                self.goodput.first_lap(clock.mark)
            changes = self.ramp.rows(step + 1) != rows  # a log line's steps have batches of one size
            last = step == train.steps
            evaluates = train.eval_batches and (last or (train.eval_every and step % train.eval_every == 0))
            kept = train.keep_every and step % train.keep_every == 0
            saves = train.save_every and (last or kept or step % train.save_every == 0)
            pauses = evaluates or saves or profiled or changes
            if step % train.log_every == 0 or last or pauses:
                if self.health is not None:
                    interval.health = self.health.start(state["params"], batch)
                interval.close(*batches.take_waits())
                pending.append(interval)
                interval = Interval(step + 1)
                # The newest interval is still running on the device: report the one before it. Before a pause report
                # both, since nothing that is not finite may be validated or saved.
                began = time.perf_counter()
                while len(pending) > (0 if pauses else 1):
                    self._report(pending.popleft(), writer, clock)
                interval.held = idle_seconds(began, time.perf_counter(), batches.last_step)
            if pauses:
                if evaluates:
                    with self.goodput.spent_on("validation"):
                        self._validate(step, state, writer)
                if saves or (evaluates and self._is_best(checkpoints)):
                    self._save(checkpoints, step, state, data)
                self.terminal.doing(TRAINING)
                clock.restart()
                interval.held = 0.0
        interval.close(*batches.take_waits())
        for rest in (*pending, interval):
            if rest.values:
                self._report(rest, writer, clock)
        return step, state, reason

    def _on_batch(self, step: int, batch: dict[str, np.ndarray]) -> None:
        begins, _ = self._taken.pieces(step)
        passes = {name: int(count) for name, count in self.pipeline.epochs(begins).items()}
        self.guards.on_batch(step, batch, passes)

    def _report(self, interval: Interval, writer: metrics.MetricsWriter, clock: Clock) -> None:
        """Logs the last step of an interval, and the speed over all of it."""
        rows, seconds = clock.lap(interval)
        step = interval.first_step + len(rows) - 1
        self.watchdog.beat(step)
        if self.peers is not None:
            self.peers.beat(step)
        self._check_steps(interval.first_step, rows, writer)
        for number, values in enumerate(rows, interval.first_step):
            self._callbacks.on_step(number, metrics.train_row(values))
        config = self.config
        timed = len(rows) - interval.untimed
        tokens = timed * self.ramp.rows(step) * config.data.seq_len
        row = metrics.train_row(rows[-1])
        for name in ("loss", "bits_per_byte"):
            row[f"train/{name}_mean"] = metrics.finite_mean([values[name] for values in rows])
        row["train/tokens"] = self._taken.tokens(step)
        if timed:  # otherwise the step was over before the clock ran
            row["perf/tokens_per_second"] = tokens / seconds
            row["perf/step_seconds"] = seconds / timed
        row.update(metrics.wait_row(interval.waits))
        row.update(self.goodput.lap(step, seconds, interval.idle, clock.mark, interval.held))
        peak = flops.peak_flops(jax.devices()[0].device_kind)
        if peak is not None and timed:
            row["perf/mfu"] = self._flops_per_token * tokens / seconds / (peak * self.setup.mesh.size)
        row.update(metrics.epochs_row(self.pipeline.epochs(sum(self._taken.pieces(step)))))
        row.update(metrics.memory_row())
        if self.health is not None and interval.health is not None:
            row.update(self.health.read(step, interval.health, self.guards))
        row.update(
            self.guards.on_report(
                step,
                tokens_per_second=row.get("perf/tokens_per_second"),
                seconds=seconds,
                waits=interval.waits[interval.untimed :],
                idle=interval.idle if timed else 0.0,
                programs=guards.programs(self.train_step, self._sizes),
            )
        )
        write_layers(self.workdir, step, interval.layers)
        self._last_row = row
        writer.write(step, row)
        writer.progress(step, row)

    @property
    def _segment_start(self) -> np.ndarray | None:
        """Of the packed rows that preflight sampled."""
        return self.preflight.data.segment_start if self.preflight and self.preflight.data else None

    @functools.cached_property
    def _flops_per_token(self) -> float:
        return flops.train_flops_per_token(self.setup.model_config, self.config.data.seq_len, self._segment_start)

    def _check_steps(self, first_step: int, rows: list[dict[str, float]], writer: metrics.MetricsWriter) -> None:
        """Loss guards; what was trained on when the loss stopped being finite is kept, and the metrics of that step."""
        try:
            self.guards.on_steps(first_step, rows)
        except TrainingError as error:
            if error.guard == "non_finite" and jax.process_index() == 0:
                path = guards.dump(self.workdir, error.step, self.pipeline, rows, *self._taken.pieces(error.step))
                logger.error("the batch and the statistics of step %s are in %s", error.step, path)
            with contextlib.suppress(OSError):  # the first error is the one to tell
                writer.write(error.step, metrics.train_row(rows[error.step - first_step]))
            raise

    def _roll_back(self, error: TrainingError, checkpoints: Checkpoints, writer: metrics.MetricsWriter) -> bool:
        """Prepares going back to the last checkpoint without the data since; False if the run must stop instead."""
        if not self.rollbacks.serves(error):
            return False
        try:
            with writing_checkpoint(error.step):
                checkpoints.wait()
        except TrainingError:
            return False
        if not checkpoints.steps():
            writer.say("config.guards.roll_back: there is no checkpoint to return to; save the first one earlier")
            return False
        step = checkpoints.steps()[-1]
        # Process 0 alone gives a finished step its name.
        position = int(processes.from_first(lambda: str(checkpoints.position(step))))
        next_batch = sum(self._taken.pieces(error.step))
        writer.say(self.rollbacks.add(error, step, position, next_batch, self.guards.summary()))
        return True

    def _explain(self, error: TrainingError, checkpoints: Checkpoints) -> None:
        """Writes why a guard stopped the run, and saves the state if it is worth it."""
        if error.save and self._live is not None and self.config.train.save_every and processes.all_end():
            step, state, data = self._live
            # No guard has looked at the steps after the error's, and the next start goes on from this state.
            finite = math.isfinite(jax.jit(optax.tree.norm)(state["params"]))
            if finite and step not in checkpoints.steps():
                with contextlib.suppress(TrainingError, OSError):  # the first error is the one to tell
                    self._save(checkpoints, step, state, data)
        with contextlib.suppress(Exception):
            checkpoints.wait()
        self._write_stopped(error, max(checkpoints.steps(), default=None), write=jax.process_index() == 0)

    def _write_stopped(self, error: TrainingError, last_checkpoint: int | None, *, write: bool = True) -> None:
        """Completes the error's message with the newest checkpoint, and writes stopped.json."""
        error.name_checkpoint(last_checkpoint)
        if write:
            write_stop(self.workdir, error, last_checkpoint, self.guards.summary())

    def stop_on_full_disk(self, directory: Path) -> TrainingError:
        """Writes stopped.json, if there is room for that, and returns the error to raise."""
        step = self._live[0] if self._live is not None else 0
        need = self.setup.checkpoint_bytes() if self.config.train.save_every else 0
        error = TrainingError(disk.advice(directory, need), guard="disk_full", step=step)
        self._write_stopped(error, newest_checkpoint(self.workdir))
        return error

    def _on_loss(self, message: str) -> None:
        """Called in another thread when a process is gone, before this one ends."""
        self.watchdog.write("peer lost")
        if (self.workdir / "stopped.json").exists():  # of this start: process 0 has told why it ended
            return
        step = self._live[0] if self._live is not None else 0
        self._write_stopped(TrainingError(message, guard="peer", step=step), newest_checkpoint(self.workdir))

    def _validate(self, step: int, state: State, writer: metrics.MetricsWriter) -> None:
        self._doing(step, "validating")
        self._compiling.wait("evaluation", "health")
        weights = state.get("ema", state["params"])
        sharding = batch_sharding(self.setup.mesh)
        row, sums = evaluate(self.eval_step, weights, self.pipeline, sharding, self.watchdog.alive)
        record_validation(self.workdir, step, sums, self.health, weights, self.pipeline, sharding)
        self._last_validation = (step, row)
        self.watchdog.beat(step, TRAINING, finished=False)
        writer.write(step, row)
        writer.say(validation_line(step, row, self.pipeline))
        self._early = self.guards.on_validation(step, row["val/loss"], self._last_row.get("train/loss"))
        if self.sampler is not None:
            self.terminal.doing("writing a sample")
            writer.text(step, "sample", self.sampler(weights, step))

    def _doing(self, step: int, what: str, *, compiles: bool = False) -> None:
        """What begins now, after a step, for the watchdog and the terminal."""
        self.watchdog.beat(step, what, finished=False, compiles=compiles)
        self.terminal.doing(what)

    def _finished(self, step: int, future: Any) -> None:
        """The device is done with a step, or has failed; called in another thread."""
        if future.exception() is None:
            self.watchdog.alive()
            self.terminal.advance(step)

    def _stopping(self) -> str:
        """What follows when a stop is asked for now: the answer to Ctrl-C."""
        now = self.watchdog.doing()
        now = "" if now.startswith(TRAINING) else f" (now {now})"
        saved = "then saving" if self.config.train.save_every else "saving nothing (config.train.save_every is 0)"
        about = "about " if jax.process_count() > 1 else ""  # all processes agree on a step soon
        stopping = f"stopping after {about}step {self._begun}"
        self.terminal.stopping(stopping)
        return f"{stopping}{now}, {saved}"

    def _is_best(self, checkpoints: Checkpoints) -> bool:
        """Whether the newest validation is a reason to save: no kept checkpoint has a loss as low."""
        train, best = self.config.train, checkpoints.best()
        if not train.save_every or not train.keep_best or self._last_validation is None:
            return False
        loss = self._last_validation[1]["val/loss"]
        return math.isfinite(loss) and (best is None or loss < best[1])

    def _save(self, checkpoints: Checkpoints, step: int, state: State, data: Any) -> None:
        val_loss = None
        if self._last_validation is not None and self._last_validation[0] == step:
            val_loss = self._last_validation[1]["val/loss"]
        self._doing(step, "saving")
        check_room(self.workdir / "checkpoints", self.setup.checkpoint_bytes(), step)
        with writing_checkpoint(step), self.goodput.spent_on("saving"):
            checkpoints.save(step, state, data, val_loss, self.guards.state(), self._taken.tokens(step))
        if self._mirror is not None:
            self._mirror.check(step)

    def _announce(self, writer: metrics.MetricsWriter, said: str | None) -> None:
        run = run_line(self.config, self.setup)
        writer.say(f"{run}\n{self.workdir}" if self.terminal.live else f"{run}, {self.workdir}")
        writer.say(data_line(self.config, self.pipeline))
        if said is not None:
            writer.say(said)

    def _write_env(self, begin: Start) -> None:
        if jax.process_index() == 0:
            found = env.environment(
                self.setup,
                start_step=begin.step,
                resumed_from=begin.source,
                data=env.data_facts(self.pipeline),
                segment_start=self._segment_start,
            )
            found["stages"] = list(begin.stages)
            found["preflight"] = self.preflight.record() if self.preflight else None
            env.write_json(self.workdir / "env.json", found)
            self.trackers.start(found.pop("config"), self.workdir, found)

    def _summarise(self, writer: metrics.MetricsWriter, step: int, reason: str | None, ended: dict) -> dict[str, Any]:
        summary = {
            "step": step,
            "steps": self.config.train.steps,
            "start_step": self._start_step,
            "finished": step >= self.config.train.steps,
            "stopped_by": reason,
            **ended,
            "last": self._last_row,
            "validation": {"step": self._last_validation[0], **self._last_validation[1]}
            if self._last_validation
            else None,
            "best_checkpoint": {"step": self.best[0], "val/loss": self.best[1]} if self.best else None,
            "alarms": self.guards.summary(),
            "rollbacks": len(self.rollbacks.done),
            "goodput": self.goodput.summary(),
            "workdir": str(self.workdir),
        }
        if jax.process_index() == 0:
            env.write_json(self.workdir / "summary.json", summary)
        stopped = f"stopped by {reason}" if reason else "done"
        self.trackers.finish(summary)
        self.terminal.close()
        if self.terminal.live:
            for line in ending(summary, *program_and_place(self.workdir)):
                self.terminal.say(line, wrap=False)
        else:
            writer.say(f"{stopped} at step {step}; the run is in {self.workdir}")
        return summary
