"""Checkpoints: training state and data position in one step directory, written in the background by Orbax.

Layout: <workdir>/checkpoints/<step>/{state, data, info.json, SHA256SUMS}. info.json says what the state must fit
(shapes and dtypes, tokenizer fingerprint), the validation loss, and the config for reference. A step directory gets its
name when it is complete: Orbax writes <step>.writing, info.json and the digests of all files are added, then it is
renamed.

Before a step is read its files are compared with their digests. A damaged step is passed over for the one before, and
set aside as <step>.damaged. An error after that comparison has another cause (memory, network, permissions) and is
raised.

Several processes: each writes its shards, and Orbax waits for all. Process 0 alone lists, digests, renames and deletes.
Which steps there are and which are kept, every process computes alike from what process 0 found at the start.
"""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
import tempfile
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
from orbax.checkpoint import v1 as ocp

from nsa_jax.config import accept
from nsa_jax.data.cache import cache_root
from nsa_jax.data.errors import DataError
from nsa_jax.hub import digests
from nsa_jax.hub.checkpoint_files import (
    INFO,
    best_of,
    find_steps,
    finite,
    has_digests,
    load_part,
    names_damage,
    read_info,
    verify,
)
from nsa_jax.hub.checkpoint_files import surplus as surplus_steps
from nsa_jax.hub.digests import Damage
from nsa_jax.hub.load import split_step
from nsa_jax.hub.remote_run import local_copy
from nsa_jax.nn import function_differences
from nsa_jax.object_store import StoreError, scheme_of
from nsa_jax.train import processes
from nsa_jax.train.env import LOADER_FIELDS, changed_fields
from nsa_jax.train.state import State

logger = logging.getLogger("nsa_jax")

_BASIC_PARTS = {"step", "params", "opt_state"}  # of every state
_WRITING, _DELETING, _DAMAGED = ".writing", ".deleting", ".damaged"
_UNFINISHED = (f"*{_WRITING}*", "*.orbax-checkpoint-tmp*")  # the second pattern is that of earlier versions

_FINISH_SECONDS = 12 * 3600.0  # for process 0 to read what all have written
_saves = iter(range(1 << 62))  # the processes save in one order, but not in one with their other barriers

# Makes an optimizer state for parameters at a step: `Setup.fresh_optimizer`.
FreshOptimizer = Callable[[Any, int], Any]


class CheckpointError(ValueError):
    """A checkpoint cannot be used; the message says why and what to do."""


def describe(abstract_state: State, part: str = "params") -> dict[str, list]:
    """Shape and dtype of every array of a part by its path: what a checkpoint and a config must agree on.

    Args:
      abstract_state: the state, or its shapes.
      part: "params" or "opt_state".
    """
    leaves = jax.tree_util.tree_leaves_with_path(abstract_state[part])
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): [list(leaf.shape), str(leaf.dtype)]
        for path, leaf in leaves
    }


def _array_differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    lines = []
    for name in sorted({*old, *new}):
        if old.get(name) != new.get(name):
            shown = [f"{tuple(entry[0])} {entry[1]}" if entry else "absent" for entry in (old.get(name), new.get(name))]
            lines.append(f"{name}: checkpoint {shown[0]}, config {shown[1]}")
    return lines


def differences(saved: dict[str, Any], wanted: dict[str, Any], may_change: tuple[str, ...] = ()) -> list[str]:
    """Lines that say how two checkpoint descriptions (`info` of `Checkpoints`) differ; empty if they fit.

    Fields of the config whose names begin with one of `may_change` may differ, with a warning.
    """
    lines = []
    if saved["tokenizer"] != wanted["tokenizer"]:
        lines.append(f"tokenizer: checkpoint {saved['tokenizer']}, config {wanted['tokenizer']}")
    lines += _array_differences(saved["parameters"], wanted["parameters"])
    if "config" in saved and "config" in wanted:
        found = function_differences(saved["config"]["model"], wanted["config"]["model"])
        found = accept(found, tuple(wanted["config"]["preflight"]["ignore"]))
        for problem in found:
            if problem.message.startswith(may_change):
                logger.warning("%s", problem.message)
            elif problem.severity == "error":
                lines.append(str(problem))
    return lines


def _listed(lines: list[str], limit: int = 20) -> str:
    return "\n  ".join(lines[:limit] + ([f"... and {len(lines) - limit} more"] if len(lines) > limit else []))


def parse_resume(text: str) -> tuple[Path, int | None]:
    """Splits "DIR[@STEP]" of --resume as `nsa_jax.load` does; DIR is a workdir or its checkpoints directory.

    A workdir in an object store is fetched.

    Raises:
      CheckpointError: there is no such directory, no checkpoint with a validation loss for "best", or an object store
        cannot be read.
    """
    name, step = split_step(text)
    if scheme_of(name):
        try:
            workdir, found = processes.first_alone(lambda: local_copy(name, step, cache_root()))
        except (Damage, StoreError) as error:
            raise CheckpointError(f"--resume={text}: {error}") from error
        return workdir / "checkpoints", found
    directory = Path(name).expanduser()
    if (directory / "checkpoints").is_dir():
        directory = directory / "checkpoints"
    if not directory.is_dir():
        raise CheckpointError(f"--resume={text}: {directory} is no directory. Fix: give a run's workdir, or DIR@STEP")
    if step == "best":
        best = best_of(find_steps(directory)[0])
        if best is None:
            raise CheckpointError(f"--resume={text}: no checkpoint has a validation loss. Fix: name a step, or no step")
        return directory, best
    return directory, int(step) if step else None


class Checkpoints:
    """The checkpoints of one run.

    Args:
      directory: where step directories lie; created if missing.
      info: what checkpoints must fit: {"parameters": `describe(...)`, "tokenizer": fingerprint, ...}, JSON. "parts"
        names those of the state that only some configs have.
      keep_last: how many steps to keep.
      keep_best: also keep the one with the lowest validation loss.
      keep_every: also keep steps that are multiples of this; 0: none.
      read_only: the directory is another run's, which may be alive: nothing there is cleaned up.
    """

    def __init__(
        self,
        directory: Path,
        info: dict[str, Any],
        *,
        keep_last: int = 3,
        keep_best: bool = True,
        keep_every: int = 0,
        read_only: bool = False,
    ):
        self._directory = Path(directory).absolute()
        self._info = info
        self._keep_last, self._keep_best, self._keep_every = keep_last, keep_best, keep_every
        self._read_only = read_only
        # A network file system may show the processes different steps.
        losses, damaged = json.loads(processes.from_first(lambda: json.dumps(self._open())))
        self._losses: dict[int, float | None] = {int(step): loss for step, loss in losses.items()}
        self._damaged: dict[int, str] = {int(step): reason for step, reason in damaged.items()}
        self._background = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None
        self._losses_before: dict[int, float | None] = {}  # if the step that is being written fails

    def _open(self) -> tuple[dict[int, float | None], dict[int, str]]:
        """On process 0: cleans up what was left unfinished and finds the steps."""
        leftovers = {path for pattern in _UNFINISHED for path in self._directory.glob(pattern)}
        for leftover in sorted(leftovers):
            logger.warning("skipping %s: its writing was never finished", leftover)
        if not self._read_only:
            self._directory.mkdir(parents=True, exist_ok=True)
            for path in {*leftovers, *self._directory.glob(f"*{_DELETING}")}:
                shutil.rmtree(path, ignore_errors=True)
        return find_steps(self._directory)

    def _path(self, step: int) -> Path:
        return self._directory / str(step)

    def steps(self) -> list[int]:
        """Steps that are finished or being written, ascending; without those known to be damaged."""
        return sorted(self._losses)

    def best(self) -> tuple[int, float] | None:
        """Step and validation loss of the best checkpoint kept."""
        step = best_of(self._losses)
        loss = None if step is None else self._losses[step]
        return None if step is None or loss is None else (step, loss)

    def save(
        self,
        step: int,
        state: State,
        data: Any,
        val_loss: float | None = None,
        guards: dict[str, Any] | None = None,
        tokens: int | None = None,
    ) -> None:
        """Starts to write a checkpoint; returns when the arrays are copied, and waits for an earlier one first.

        Args:
          step: finished optimizer steps.
          state: the training state.
          data: the training iterator.
          val_loss: at this step, if it is known.
          guards: what the guards remember (`Guards.state`).
          tokens: trained on so far.
        """
        self.wait()
        temporary = self._directory / f"{step}{_WRITING}"
        if jax.process_index() == 0:
            # Where Orbax cannot make its directory, its threads keep the process alive for minutes after the error.
            self._directory.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=self._directory):
                pass
        response = ocp.save_checkpointables_async(temporary, {"state": state, "data": data}, overwrite=True)
        self._losses_before = dict(self._losses)
        self._losses[step] = finite(val_loss)
        surplus = surplus_steps(self._losses, self._keep_last, self._keep_best, self._keep_every)
        for old in surplus:
            del self._losses[old]
        info = {**self._info, "val_loss": self._losses[step], "guards": guards or {}}
        info |= {} if tokens is None else {"tokens": tokens}
        self._writing = self._background.submit(self._finish, step, temporary, response, info, surplus)

    def guards(self, step: int) -> dict[str, Any]:
        """What was saved of the guards with a step; empty if nothing was."""
        return read_info(self._path(step)).get("guards", {})

    def position(self, step: int) -> int:
        """The position of the data in a finished step, in batches."""
        return json.loads(sorted((self._path(step) / "data").glob("process_*.json"))[0].read_text())["step"]

    def _finish(self, step: int, temporary: Path, response: Any, info: dict[str, Any], surplus: list[int]) -> None:
        """In the background: waits for Orbax, adds info and digests, gives the step its name, deletes old steps."""
        response.result()  # Orbax frees its thread and event loop only when the result is taken
        if jax.process_index() == 0:
            self._complete(step, temporary, info, surplus)
        # Digests of all processes' files take long. A process that ended meanwhile would take process 0 with it.
        processes.barrier(_FINISH_SECONDS, f"saved/{next(_saves)}")

    def _complete(self, step: int, temporary: Path, info: dict[str, Any], surplus: list[int]) -> None:
        """On process 0: what makes a written directory a checkpoint."""
        (temporary / INFO).write_text(json.dumps(info))
        digests.write(temporary)
        if self._path(step).exists():
            self._delete(step)
        temporary.rename(self._path(step))
        for old in surplus:
            self._delete(old)

    def _delete(self, step: int) -> None:
        # Renamed first: a kill in the middle leaves no step with half of its files.
        if (renamed := self._set_aside(step, _DELETING)) is not None:
            shutil.rmtree(renamed, ignore_errors=True)

    def _set_aside(self, step: int, suffix: str) -> Path | None:
        """Renames a step so that it counts no more; None if that is not possible."""
        path = self._path(step)
        target = path.with_name(path.name + suffix)
        count = 1
        while target.exists():
            count += 1
            target = path.with_name(f"{path.name}{suffix}-{count}")
        try:
            return path.rename(target)
        except OSError as error:
            logger.warning("checkpoint %s cannot be renamed to %s: %s", path, target.name, error)
            return None

    def restore(
        self,
        target: State,
        data: Any,
        step: int | None = None,
        fresh_optimizer: FreshOptimizer | None = None,
        may_change: tuple[str, ...] = (),
    ) -> tuple[int, State] | None:
        """Loads the newest step that is undamaged.

        A damaged step (cut off, changed, or with files missing) is passed over with a warning. Once an older one has
        been loaded, the damaged ones are renamed to <step>.damaged, unless the directory is another run's.

        Args:
          target: abstract state with shardings.
          data: the training iterator; it is moved to the saved position. None: no position is restored.
          step: this one and no other.
          fresh_optimizer: makes the optimizer's state anew if the saved one does not fit; None: that is an error.
          may_change: see `differences`.

        Returns:
          The step and the state, or None if there is no checkpoint. Parts of the target that the checkpoint lacks are
          absent; see `Setup.completed`.

        Raises:
          CheckpointError: the config does not fit the checkpoint, or none of the steps can be read.
          OSError: an undamaged step cannot be read, such as for lack of permission.
        """
        if step is not None and step not in {*self._losses, *self._damaged}:
            raise CheckpointError(f"{self._directory} has no finished step {step}; it has {self.steps() or 'none'}")
        for candidate in sorted({*self._losses, *self._damaged}, reverse=True) if step is None else [step]:
            state = self._read(candidate, target, data, fresh_optimizer, may_change)
            if state is not None:
                self._leave_damaged()
                return candidate, state
        if self._damaged:
            listed = _listed([f"step {number}: {reason}" for number, reason in sorted(self._damaged.items())])
            raise CheckpointError(
                f"no checkpoint in {self._directory} can be read:\n  {listed}\n"
                "Fix: restore these files from a copy, name another step or run, or use another workdir to start anew"
            )
        if not self._read_only and (aside := sorted(path.name for path in self._directory.glob(f"*{_DAMAGED}*"))):
            raise CheckpointError(
                f"{self._directory} holds nothing but damaged checkpoints: {', '.join(aside)}. Fix: restore one that "
                "is not damaged from a copy, or delete these to start anew"
            )
        return None

    def _read(
        self, step: int, target: State, data: Any, fresh_optimizer: FreshOptimizer | None, may_change: tuple[str, ...]
    ) -> State | None:
        """State and data position of a step, or None on every process if it is damaged."""
        path, state, reason = self._path(step), None, self._damaged.get(step)
        verifiable = has_digests(path)
        try:
            if reason is None:
                verify(path, jax.process_index(), jax.process_count())
        except Damage as error:
            reason = str(error)
        if not processes.all_agree(reason is None):
            self._pass_over(step, reason)
            return None
        self._check_fits(step, may_change)
        if self._read_only:  # R023 of the preflight tells it of a run's own workdir
            self._tell_optimizer_changes(step)
        try:
            state = self._load_state(step, target, fresh_optimizer)
            if data is not None:
                self._restore_data(step, data)
        except (CheckpointError, DataError):
            raise
        except Exception as error:
            if verifiable or not names_damage(error):
                raise
            state, reason = None, f"{type(error).__name__}: {str(error)[:200]}"  # Orbax quotes whole specifications
        if not processes.all_agree(state is not None):
            self._pass_over(step, reason)
            return None
        return state

    def _pass_over(self, step: int, reason: str | None) -> None:
        reason = reason or "another process found it damaged"
        self._losses.pop(step, None)
        self._damaged[step] = reason
        logger.warning(
            "skipping checkpoint %s of %s, it is damaged: %s. The newest undamaged step before it is used",
            *(step, self._directory, reason),
        )

    def _leave_damaged(self) -> None:
        """Renames the damaged steps; only when another has been loaded, or the next start would be a fresh one."""
        if self._read_only:
            return
        for step in sorted(self._damaged):
            renamed = self._set_aside(step, _DAMAGED) if jax.process_index() == 0 else None
            if renamed is not None:
                logger.warning("checkpoint %s is kept as %s; delete it when you have looked at it", step, renamed)
        self._damaged.clear()

    def _load_state(self, step: int, target: State, fresh_optimizer: FreshOptimizer | None) -> State:
        path, saved = self._path(step), read_info(self._path(step))
        parts = saved.get("parts", [])
        other_parts = sorted(parts) != sorted(set(target) - _BASIC_PARTS)
        target = {name: part for name, part in target.items() if name in _BASIC_PARTS or name in parts}
        if not has_digests(path) and saved.get("config", {}).get("optim", {}).get("clip") == 0:
            # Earlier versions left clipping out of the chain when it was off.
            clipping, rest = target["opt_state"]
            state = ocp.load_checkpointables(path, {"state": {**target, "opt_state": rest}})["state"]
            return {**state, "opt_state": (clipping, state["opt_state"])}
        lines = []
        if "optimizer" in saved and "optimizer" in self._info:
            lines = _array_differences(saved["optimizer"], self._info["optimizer"])
        if not lines:
            if other_parts:
                return load_part(path, target)
            return ocp.load_checkpointables(path, {"state": target})["state"]
        shown = _listed(lines, 8)
        if fresh_optimizer is None:
            changed = "; ".join(self._optimizer_changes(step))
            raise CheckpointError(
                f"the config's optimizer does not fit checkpoint {path}, all of its averages would be lost"
                f"{f' ({changed})' if changed else ''}:\n  {shown}\n"
                "Fix: restore config.optim (it is in env.json), or accept the loss with "
                "config.train.reset_optimizer=True: weights, step and data position are kept"
            )
        logger.warning("the optimizer's state in %s does not fit the config and starts anew:\n  %s", path, shown)
        kept = load_part(path, {name: part for name, part in target.items() if name != "opt_state"})
        return {**kept, "opt_state": fresh_optimizer(kept["params"], step)}

    def _restore_data(self, step: int, data: Any) -> None:
        """Moves the iterator; not through Orbax, which hides why an iterator refuses a position."""
        directory = self._path(step) / "data"
        if not directory.is_dir():
            raise FileNotFoundError(directory)

        async def load() -> None:
            await (await data.load(directory))

        try:
            with ThreadPoolExecutor(1) as pool:  # the calling thread may have a running event loop (notebooks)
                pool.submit(asyncio.run, load()).result()
        except DataError as error:
            if changed := self._data_changes(step):
                what = f"belongs to other data than the config gives: {_listed(changed)}"
                run = self._directory.parent if self._directory.name == "checkpoints" else self._directory
                stage = f"or begin another stage with it: --resume={run}@{step} --stage, in a workdir of its own"
                raise DataError(error.where, what, f"restore these settings and documents, {stage}") from error
            raise

    def _check_fits(self, step: int, may_change: tuple[str, ...]) -> None:
        saved = read_info(self._path(step))
        if lines := differences(saved, self._info, may_change):
            fix = "restore the config that wrote it (it is in env.json), or use another workdir"
            if self._read_only:
                fix = "set these fields as in its env.json, or name another run"
            raise CheckpointError(
                f"the config does not fit checkpoint {self._path(step)}:\n  {_listed(lines)}\nFix: {fix}"
            )

    def _optimizer_changes(self, step: int) -> list[str]:
        """The fields of config.optim that differ from a step's, with both values."""
        old, new = (info.get("config", {}).get("optim", {}) for info in (read_info(self._path(step)), self._info))
        return changed_fields(old, new, "config.optim.")

    def _data_changes(self, step: int) -> list[str]:
        """What decides the batches and differs from a step's, with both values: fields, and the size of the corpus."""
        found = []
        for info in (read_info(self._path(step)), self._info):
            config = {name: info.get("config", {}).get(name, {}) for name in ("data", "seed", "train")}
            train = {name: config["train"].get(name) for name in ("batch_size", "batch_ramp")}
            found.append(({**config, "train": train}, info.get("corpus", {})))
        (old, old_corpus), (new, new_corpus) = found
        fields = changed_fields(old, new, "config.", [f"config.{name}" for name in LOADER_FIELDS])
        return fields + changed_fields(old_corpus, new_corpus)

    def _tell_optimizer_changes(self, step: int) -> None:
        if changed := self._optimizer_changes(step):
            logger.warning("continuing checkpoint %s with another optimizer: %s", self._path(step), "; ".join(changed))

    def wait(self) -> None:
        """Returns when everything is written; raises what went wrong in the background."""
        writing, self._writing = self._writing, None
        if writing is not None:
            try:
                writing.result()
            except BaseException:
                self._losses = self._losses_before
                raise

    def close(self) -> None:
        """Waits and releases the directory; what could not be written is for `wait` to tell."""
        try:
            self.wait()
        except Exception as error:
            logger.warning("checkpoints of %s were not all written: %s", self._directory, error)
        self._background.shutdown()
