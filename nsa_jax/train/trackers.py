"""Experiment trackers: a run's config, rows and texts go to Weights & Biases or MLflow.

Each tracker works in a thread of its own behind a bounded queue, so the loop never waits for one. A tracker that
raises, or falls behind by `QUEUE_CALLS` calls, is dropped with one warning; metrics.jsonl has every row in any case.
Where a tracker sends its data is decided by its library's own environment variables; docs/tracking.md lists them.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import queue
import threading
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from nsa_jax.extras import extra
from nsa_jax.fields import Problem
from nsa_jax.train.env import write_json

logger = logging.getLogger("nsa_jax")

QUEUE_CALLS = 10_000  # that wait for a tracker; one more drops it
FINISH_SECONDS = 30.0  # that the end of a run waits for all trackers together
PROJECT = "nsa_jax"  # unless the library's own variable names another


class Tracker(Protocol):
    """What a tracker does. Its methods are called in one thread, `start` first and `finish` last."""

    package: str  # a module of its library, imported before the run starts

    def start(self, config: dict[str, Any], workdir: Path, env: dict[str, Any]) -> None:
        """Begins a tracked run, or continues the one whose id `workdir` keeps.

        Args:
          config: every field of the run's config.
          workdir: of the run.
          env: what env.json holds besides the config.
        """

    def log(self, step: int, row: dict[str, float]) -> None:
        """Takes the numbers of one row of metrics.jsonl."""

    def text(self, step: int, name: str, text: str) -> None:
        """Takes one text sample."""

    def finish(self, summary: dict[str, Any] | None) -> None:
        """Ends the tracked run.

        Args:
          summary: what summary.json holds; None if an error ended the run.
        """


_ids_lock = threading.Lock()


def kept_id(workdir: Path, name: str) -> str | None:
    """The id under which a tracker knows the run of a workdir; None before its first start."""
    path = workdir / "trackers.json"
    return json.loads(path.read_text()).get(name) if path.exists() else None


def keep_id(workdir: Path, name: str, run_id: str) -> None:
    """Writes a tracker's id of the run into trackers.json, so that the next start continues it."""
    path = workdir / "trackers.json"
    with _ids_lock:
        ids = json.loads(path.read_text()) if path.exists() else {}
        write_json(path, {**ids, name: run_id})


class WandbTracker:
    """Weights & Biases. Every row carries `step`, which all charts use as their axis."""

    package = "wandb.sdk"

    def start(self, config: dict[str, Any], workdir: Path, env: dict[str, Any]) -> None:
        """See `Tracker`."""
        import wandb

        # silent: nothing is printed over the progress bar, and no login prompt waits at the terminal.
        settings = wandb.Settings(silent=True, console="off", finish_timeout=FINISH_SECONDS - 5)
        wandb.setup(settings)
        run_id = kept_id(workdir, "wandb") or os.environ.get("WANDB_RUN_ID") or uuid.uuid4().hex
        self._run = wandb.init(
            id=run_id,
            resume="allow",
            project=os.environ.get("WANDB_PROJECT") or PROJECT,
            name=os.environ.get("WANDB_NAME") or config["name"],
            dir=os.environ.get("WANDB_DIR") or workdir,
            settings=settings,
            reinit="create_new",  # never a run that other code of this process has open
        )
        keep_id(workdir, "wandb", run_id)
        self._run.config.update({**config, "env": env}, allow_val_change=True)
        # A run that resumes from an earlier checkpoint logs some steps again; W&B's own step could not go back.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        self._html = wandb.Html
        if self._run.url:
            logger.info("tracker wandb: %s", self._run.url)

    def log(self, step: int, row: dict[str, float]) -> None:
        """See `Tracker`."""
        self._run.log({"step": step, **row})

    def text(self, step: int, name: str, text: str) -> None:
        """See `Tracker`."""
        import html

        self._run.log({"step": step, name: self._html(f"<pre>{html.escape(text)}</pre>", inject=False)})

    def finish(self, summary: dict[str, Any] | None) -> None:
        """See `Tracker`."""
        if summary is not None:
            self._run.summary.update({"summary": summary})
        self._run.finish(exit_code=0 if summary is not None else 1)


class MLflowTracker:
    """MLflow. Fields of the config are parameters; env.json, summary.json and the texts are artifacts."""

    package = "mlflow.tracking"

    def start(self, config: dict[str, Any], workdir: Path, env: dict[str, Any]) -> None:
        """See `Tracker`."""
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        self._client, self._metric = MlflowClient(), Metric
        run_id = kept_id(workdir, "mlflow")
        if run_id is None:
            run_id = self._client.create_run(self._experiment(), run_name=config["name"]).info.run_id
            keep_id(workdir, "mlflow", run_id)
            fields = [Param(name, str(value)) for name, value in _flat(config).items()]
            for first in range(0, len(fields), 100):  # MLflow takes 100 at once
                self._client.log_batch(run_id, params=fields[first : first + 100], synchronous=True)
        else:
            self._client.update_run(run_id, status="RUNNING")
        self._id = run_id
        # Parameters cannot change. These can: a later start may have another config or other devices.
        self._client.log_dict(run_id, {**env, "config": config}, "env.json")

    def _experiment(self) -> str:
        """The id of the experiment that the environment names."""
        if given := os.environ.get("MLFLOW_EXPERIMENT_ID"):
            return given
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or PROJECT
        found = self._client.get_experiment_by_name(name)
        return self._client.create_experiment(name) if found is None else found.experiment_id

    def log(self, step: int, row: dict[str, float]) -> None:
        """See `Tracker`."""
        now = int(time.time() * 1000)
        metrics = [self._metric(name, value, now, step) for name, value in row.items()]
        self._client.log_batch(self._id, metrics=metrics, synchronous=True)

    def text(self, step: int, name: str, text: str) -> None:
        """See `Tracker`."""
        self._client.log_text(self._id, text, f"texts/{name}_{step}.txt")

    def finish(self, summary: dict[str, Any] | None) -> None:
        """See `Tracker`."""
        if summary is not None:
            self._client.log_dict(self._id, summary, "summary.json")
        ended = summary is not None and (summary["finished"] or str(summary.get("stopped_by")).startswith("early"))
        status = "FAILED" if summary is None else "FINISHED" if ended else "KILLED"
        self._client.set_terminated(self._id, status)


TRACKERS: dict[str, type[Tracker]] = {"wandb": WandbTracker, "mlflow": MLflowTracker}  # named by rules.TRACKERS


def _flat(value: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested fields as {"model.dim": 768}."""
    found: dict[str, Any] = {}
    for name, inner in value.items():
        found.update(_flat(inner, f"{prefix}{name}.") if isinstance(inner, dict) else {prefix + name: inner})
    return found


def problems(names: Sequence[str] | None) -> list[Problem]:
    """R058: the packages of the trackers that a config names can be imported."""
    found = []
    for name in names or ():
        if name not in TRACKERS:
            continue  # R001 says so
        try:
            with extra(name):
                # A module inside the package: a folder of the package's name, such as W&B writes, imports as well.
                importlib.import_module(TRACKERS[name].package)
        except Exception as error:
            message = f"config.train.trackers names {name!r}, which cannot be imported: {error}"
            fix = f'pip install "nsa_jax[{name}]", or leave it out of config.train.trackers'
            found.append(Problem("R058", "error", message, fix))
    return found


class _Worker:
    """One tracker, its queue and its thread."""

    def __init__(self, name: str):
        self._name = name
        self._tracker = TRACKERS[name]()
        self._queue: queue.Queue[tuple[str, tuple]] = queue.Queue(QUEUE_CALLS)
        self._thread: threading.Thread | None = None
        self._dropped = False

    def start(self, *args: Any) -> None:
        """Starts the thread; calls that were queued before follow the tracker's `start`."""
        self._thread = threading.Thread(target=self._work, args=args, name=f"tracker-{self._name}", daemon=True)
        self._thread.start()

    def _work(self, *args: Any) -> None:
        try:
            self._tracker.start(*args)
            method = ""
            while method != "finish" and not self._dropped:
                method, args = self._queue.get()
                getattr(self._tracker, method)(*args)
        except BaseException as error:  # some libraries raise SystemExit
            self._drop(f"{type(error).__name__}: {error}")

    def call(self, method: str, *args: Any) -> None:
        """Queues a call."""
        if not self._dropped:
            try:
                self._queue.put_nowait((method, args))
            except queue.Full:
                self._drop(f"it is {QUEUE_CALLS:,} calls behind")

    def _drop(self, why: str) -> None:
        if not self._dropped:
            self._dropped = True
            logger.warning("tracker %s is dropped, training goes on: %s", self._name, why)

    def wait(self, until: float) -> None:
        """Waits for the end of the tracked run, at most until a time of `time.monotonic`."""
        if self._thread is None or self._dropped:
            return
        self._thread.join(max(until - time.monotonic(), 0.0))
        if self._thread.is_alive():
            self._drop("it has not finished in time, and its last rows may be missing")


class Trackers:
    """The trackers that a config names.

    Args:
      names: `config.train.trackers`.
      active: False on all processes but the first: everything does nothing.
    """

    def __init__(self, names: Sequence[str] = (), *, active: bool = True):
        self._workers = [_Worker(name) for name in dict.fromkeys(names)] if active else []

    def start(self, config: dict[str, Any], workdir: Path, env: dict[str, Any]) -> None:
        """Begins the tracked runs, or continues them. Rows and texts that came before are not lost."""
        for worker in self._workers:
            worker.start(config, workdir, env)

    def log(self, step: int, row: dict[str, float]) -> None:
        """Hands on the numbers of a row."""
        for worker in self._workers:
            worker.call("log", step, row)

    def text(self, step: int, name: str, text: str) -> None:
        """Hands on a text."""
        for worker in self._workers:
            worker.call("text", step, name, text)

    def finish(self, summary: dict[str, Any] | None = None) -> None:
        """Ends the tracked runs and waits for them, at most FINISH_SECONDS. Later calls do nothing.

        Args:
          summary: of a run that ended as it should; None after an error.
        """
        workers, self._workers = self._workers, []
        for worker in workers:
            worker.call("finish", summary)
        until = time.monotonic() + FINISH_SECONDS
        for worker in workers:
            worker.wait(until)
