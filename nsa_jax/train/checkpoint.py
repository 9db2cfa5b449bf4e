"""Checkpoints: training state and data position in one step directory, written in the background by Orbax.

Layout: <workdir>/checkpoints/<step>/{state, data}; a step directory gets its name when it is complete. The step's
metadata holds what the state must fit: shapes and dtypes, tokenizer fingerprint, and the config for reference.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
from orbax.checkpoint import v1 as ocp

from nsa_jax.data.errors import DataError
from nsa_jax.train import distributed
from nsa_jax.train.state import State

logger = logging.getLogger("nsa_jax")

_TEMPORARY = ".orbax-checkpoint-tmp"


class CheckpointError(ValueError):
    """A checkpoint cannot be used; the message says why and what to do."""


@dataclasses.dataclass(frozen=True)
class _KeepLastAndBest:
    """Keeps the last `last` steps and, if asked, the one with the lowest validation loss."""

    last: int
    best: bool

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> Sequence[bool]:
        keep = [index >= len(checkpoints) - self.last for index in range(len(checkpoints))]
        scored = [(_val_loss(info), index) for index, info in enumerate(checkpoints) if _val_loss(info) is not None]
        if self.best and scored:
            keep[min(scored)[1]] = True
        return keep


def _val_loss(info: Any) -> float | None:
    loss = (info.metrics or {}).get("val_loss")
    return loss if loss is not None and math.isfinite(loss) else None


def describe(abstract_state: State) -> dict[str, list]:
    """Shape and dtype of every parameter by its path: what a checkpoint and a config must agree on."""
    leaves = jax.tree_util.tree_leaves_with_path(abstract_state["params"])
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): [list(leaf.shape), str(leaf.dtype)]
        for path, leaf in leaves
    }


def differences(saved: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    """Lines that say how two checkpoint descriptions (`info` of `Checkpoints`) differ; empty if they fit."""
    lines = []
    if saved["tokenizer"] != wanted["tokenizer"]:
        lines.append(f"tokenizer: checkpoint {saved['tokenizer']}, config {wanted['tokenizer']}")
    old, new = saved["parameters"], wanted["parameters"]
    for name in sorted({*old, *new}):
        if old.get(name) != new.get(name):
            shown = [f"{tuple(entry[0])} {entry[1]}" if entry else "absent" for entry in (old.get(name), new.get(name))]
            lines.append(f"{name}: checkpoint {shown[0]}, config {shown[1]}")
    return lines


def parse_resume(text: str) -> tuple[Path, int | None]:
    """Splits "DIR[@STEP]" of --resume; DIR is a workdir or its checkpoints directory.

    Raises:
      CheckpointError: there is no such directory, or STEP is no number.
    """
    name, at, step = text.rpartition("@")
    if not at or not step.isdigit():
        name, step = text, ""
    directory = Path(name)
    if (directory / "checkpoints").is_dir():
        directory = directory / "checkpoints"
    if not directory.is_dir():
        raise CheckpointError(f"--resume={text}: {directory} is no directory. Fix: give a run's workdir, or DIR@STEP")
    return directory, int(step) if step else None


class Checkpoints:
    """The checkpoints of one run.

    Args:
      directory: where step directories lie; created if missing.
      info: what checkpoints must fit: {"parameters": `describe(...)`, "tokenizer": fingerprint, ...}, JSON.
      keep_last: how many steps to keep.
      keep_best: also keep the one with the lowest validation loss.
      read_only: the directory is another run's, which may be alive: nothing there is cleaned up.
    """

    def __init__(
        self,
        directory: Path,
        info: dict[str, Any],
        *,
        keep_last: int = 3,
        keep_best: bool = True,
        read_only: bool = False,
    ):
        self._directory = Path(directory).absolute()
        self._info = info
        for leftover in sorted(self._directory.glob(f"*{_TEMPORARY}*")) if self._directory.is_dir() else []:
            if jax.process_index() == 0:
                logger.warning("skipping %s: its writing was never finished", leftover)
        distributed.barrier()  # the first to go on cleans up what the others are still looking at
        self._checkpointer = ocp.training.Checkpointer(
            self._directory,
            preservation_policy=_KeepLastAndBest(keep_last, keep_best),
            cleanup_tmp_directories=not read_only,
        )

    def steps(self) -> list[int]:
        """Finished steps, ascending."""
        return [checkpoint.step for checkpoint in self._checkpointer.checkpoints]

    def best(self) -> tuple[int, float] | None:
        """Step and validation loss of the best checkpoint kept."""
        scored = [(_val_loss(c), c.step) for c in self._checkpointer.checkpoints]
        found = min(((loss, step) for loss, step in scored if loss is not None), default=None)
        return (found[1], found[0]) if found else None

    def save(
        self, step: int, state: State, data: Any, val_loss: float | None = None, guards: dict[str, Any] | None = None
    ) -> None:
        """Starts to write a checkpoint; returns when the arrays are copied, and waits for an earlier one first.

        Args:
          step: finished optimizer steps.
          state: the training state.
          data: the training iterator.
          val_loss: at this step, if it is known.
          guards: what the guards remember (`Guards.state`).
        """
        self._checkpointer.save_checkpointables_async(
            step,
            {"state": state, "data": data},
            force=True,
            overwrite=step in self.steps(),
            metrics=None if val_loss is None else {"val_loss": val_loss},
            custom_metadata={**self._info, "guards": guards or {}},
        )

    def guards(self, step: int) -> dict[str, Any]:
        """What was saved of the guards with a step; empty if nothing was."""
        return (self._checkpointer.metadata(step).custom_metadata or {}).get("guards", {})

    def restore(self, target: State, data: Any, step: int | None = None) -> tuple[int, State] | None:
        """Loads the newest step that can be read.

        A step that cannot be read (cut off by a full disk or a kill) is skipped with a warning.

        Args:
          target: abstract state with shardings.
          data: the training iterator; it is moved to the saved position.
          step: this one and no other.

        Returns:
          The step and the state, or None if there is no checkpoint.

        Raises:
          CheckpointError: the config does not fit the checkpoint, or none of the steps can be read.
        """
        # All processes must try the same steps, and a network file system may show them different ones.
        steps = json.loads(distributed.from_first(lambda: json.dumps(self.steps())))
        if step is not None and step not in steps:
            raise CheckpointError(f"{self._directory} has no finished step {step}; it has {steps or 'none'}")
        failures = []
        for candidate in reversed(steps) if step is None else [step]:
            state, reason = None, "another process cannot read it"
            try:
                self._check_fits(candidate)
                state = self._checkpointer.load_checkpointables(candidate, {"state": target})["state"]
                self._restore_data(candidate, data)
            except (CheckpointError, DataError):
                raise
            except Exception as error:  # whatever a damaged file makes Orbax raise
                state = None
                reason = f"{type(error).__name__}: {str(error)[:200]}"  # Orbax quotes whole specifications
            if distributed.all_agree(state is not None):
                assert state is not None
                return candidate, state
            failures.append(f"step {candidate}: {reason}")
            logger.warning("skipping checkpoint %s of %s, it cannot be read: %s", candidate, self._directory, reason)
        if failures:
            listed = "\n  ".join(failures)
            raise CheckpointError(f"no checkpoint in {self._directory} can be read:\n  {listed}")
        return None

    def _restore_data(self, step: int, data: Any) -> None:
        """Moves the iterator; not through Orbax, which hides why an iterator refuses a position."""
        directory = self._directory / str(step) / "data"
        if not directory.is_dir():
            raise FileNotFoundError(directory)

        async def load() -> None:
            await (await data.load(directory))

        with ThreadPoolExecutor(1) as pool:  # the calling thread may have a running event loop (notebooks)
            pool.submit(asyncio.run, load()).result()

    def _check_fits(self, step: int) -> None:
        saved = self._checkpointer.metadata(step).custom_metadata
        lines = differences(saved, self._info) if saved else []
        if lines:
            shown = "\n  ".join(lines[:20] + ([f"... and {len(lines) - 20} more"] if len(lines) > 20 else []))
            raise CheckpointError(
                f"the config does not fit checkpoint {self._directory / str(step)}:\n  {shown}\n"
                "Fix: restore the config that wrote it (it is in env.json), or use another workdir"
            )

    def wait(self) -> None:
        """Returns when everything is written; raises what went wrong in the background."""
        self._checkpointer.wait()

    def close(self) -> None:
        """Waits and releases the directory; what could not be written is for `wait` to tell."""
        try:
            self._checkpointer.close()
        except Exception as error:
            logger.warning("checkpoints of %s were not all written: %s", self._directory, error)
