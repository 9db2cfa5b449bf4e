"""A run in an object store: ADDRESS/checkpoints/STEP/... and the run's small files, as in a workdir.

An object store has no rename. A step is finished there when it has its SHA256SUMS, which is written last and deleted
first; it lists the step's files. Only whole steps are fetched, and they are compared with their digests.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from filelock import FileLock

from nsa_jax.hub import digests
from nsa_jax.hub.checkpoint_files import INFO, best_of, finite
from nsa_jax.hub.digests import SUMS, Damage
from nsa_jax.object_store import Folder

logger = logging.getLogger("nsa_jax")

CHECKPOINTS = "checkpoints"
# Of this machine, or of this moment: never copied in either direction. `ADDRESS` says which store a workdir belongs to.
LOCK, HALT, ADDRESS = "lock.json", "HALT", "remote.txt"
_LOCAL = (LOCK, HALT, ADDRESS)

_THREADS = 4  # files at a time


def belongs(path: str) -> bool:
    """Whether a file of a workdir, by its path there, is one of the small files that are copied."""
    first = path.partition("/")[0]
    return first != CHECKPOINTS and path not in _LOCAL and not any(part.startswith(".") for part in path.split("/"))


def whole_steps(store: Folder) -> dict[int, float | None]:
    """The finished steps of a run, ascending, with their validation losses as far as they are known."""
    sizes = store.sizes(f"{CHECKPOINTS}/")
    steps = sorted(int(path.split("/")[1]) for path in sizes if path.split("/")[2:] == [SUMS] and _is_step(path))
    losses: dict[int, float | None] = {}
    for step in steps:
        try:
            losses[step] = finite(json.loads(store.read(f"{CHECKPOINTS}/{step}/{INFO}")).get("val_loss"))
        except (FileNotFoundError, ValueError, AttributeError):  # damaged, which `fetch_step` finds
            losses[step] = None
    return losses


def _is_step(path: str) -> bool:
    return path.split("/")[1].isdecimal()


def unfinished(store: Folder) -> set[int]:
    """Steps without SHA256SUMS: what an upload or a deletion left that was cut short."""
    parts = [path.split("/") for path in store.sizes(f"{CHECKPOINTS}/") if _is_step(path)]
    return {int(part[1]) for part in parts} - {int(part[1]) for part in parts if part[2:] == [SUMS]}


def delete_step(store: Folder, step: int) -> None:
    """Deletes a step; what is left if that is cut short no longer counts."""
    store.delete(f"{CHECKPOINTS}/{step}/{SUMS}")
    _each(store.delete, store.sizes(f"{CHECKPOINTS}/{step}/"))


def upload_step(store: Folder, step: int, directory: Path) -> None:
    """Uploads the directory of a finished step, SHA256SUMS last. What an earlier attempt left is overwritten."""
    base = f"{CHECKPOINTS}/{step}"
    store.delete(f"{base}/{SUMS}")
    _each(lambda path: store.upload(str(directory / path), f"{base}/{path}"), digests.read(directory))
    store.upload(str(directory / SUMS), f"{base}/{SUMS}")


def fetch_step(store: Folder, step: int, directory: Path) -> None:
    """Downloads a step into `directory` (of all steps), which gets its name when it is whole and undamaged.

    Raises:
      Damage: it is not what was written.
      StoreError: the store does not answer.
    """
    base, temporary = f"{CHECKPOINTS}/{step}", directory / f"{step}.writing"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        _download(store, f"{base}/{SUMS}", temporary / SUMS)
        listed = digests.read(temporary)
        if any(".." in Path(path).parts or Path(path).is_absolute() for path in listed):
            raise Damage(f"{SUMS}: names files outside of the step")
        _each(lambda path: _download(store, f"{base}/{path}", temporary / path), listed)
        digests.verify(temporary)
        shutil.rmtree(directory / str(step), ignore_errors=True)
        temporary.rename(directory / str(step))
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def fetch_small_files(store: Folder, workdir: Path) -> None:
    """Downloads the run's files that are not checkpoints; those of the workdir are overwritten."""
    _each(lambda path: _download(store, path, workdir / path), filter(belongs, store.sizes()))


class Fetched(NamedTuple):
    """What `fetch_newest` found.

    Attributes:
      steps: that were fetched, the newest first.
      losses: validation loss of every step of the store that is not known to be damaged.
    """

    steps: list[int]
    losses: dict[int, float | None]


def fetch_newest(store: Folder, workdir: Path, have: Iterable[int] = (), *, best: bool = False) -> Fetched:
    """Brings a workdir up to what the store holds: its newest undamaged step, and the small files.

    Args:
      store: of the run.
      workdir: where the run is continued.
      have: finished steps of the workdir; nothing that is older than the newest of them is fetched.
      best: also fetch the step of the lowest validation loss.

    Raises:
      Damage: there are steps, none of them can be used, and the workdir has none either.
    """
    have, losses = set(have), whole_steps(store)
    newer = [step for step in sorted(losses, reverse=True) if step > max(have, default=-1)]
    if newer:
        fetch_small_files(store, workdir)  # before the step: with it, a start that was cut short would look complete
    steps: list[int] = []
    damaged = []
    for step in newer:
        if steps and not (best and step == best_of(losses)):
            continue
        try:
            fetch_step(store, step, workdir / CHECKPOINTS)
            steps.append(step)
        except Damage as error:
            del losses[step]
            damaged.append(f"step {step}: {error}")
            logger.warning("skipping checkpoint %d of %s, it is damaged: %s", step, store, error)
    if damaged and not steps and not have:
        raise Damage(
            f"no checkpoint of {store} can be read:\n  " + "\n  ".join(damaged) + "\n"
            "Fix: restore these objects from a copy, or use another --workdir to start anew"
        )
    return Fetched(steps, losses)


def local_copy(address: str, step: str, cache: Path) -> tuple[Path, int]:
    """A workdir on this machine with one step of a run in an object store, for reading.

    What an earlier call fetched is used again if the store still holds the same, and it is undamaged.

    Args:
      address: of the run.
      step: a number, "best", or "" for the newest.
      cache: copies are kept below this directory.

    Returns:
      The directory, and the step.

    Raises:
      Damage: there is no such step, or none that is what was written.
      StoreError: the store cannot be read.
    """
    store = Folder(address)
    losses = whole_steps(store)
    chosen = best_of(losses) if step == "best" else int(step) if step else None
    candidates = sorted(losses, reverse=True) if not step else [] if chosen not in losses else [chosen]
    workdir = cache / "runs" / store.address.replace("://", "/")
    workdir.mkdir(parents=True, exist_ok=True)
    reasons = []
    with FileLock(workdir / ".lock"):  # several processes may ask for the same
        fetch_small_files(store, workdir)
        for candidate in candidates:
            try:
                if not _is_copy(store, candidate, workdir / CHECKPOINTS / str(candidate)):
                    fetch_step(store, candidate, workdir / CHECKPOINTS)
                return workdir, candidate
            except Damage as error:
                reasons.append(f"step {candidate}: {error}")
                logger.warning("skipping checkpoint %d of %s, it is damaged: %s", candidate, store, error)
    if not losses:
        raise Damage(f"{address}: holds no finished checkpoint. Fix: give the address of a run that has saved")
    none = "no checkpoint has a validation loss" if step == "best" else "no such finished step"
    raise Damage(
        f"{address}{'@' if step else ''}{step}: {'; '.join(reasons) or none}. Fix: name another, of {sorted(losses)}"
    )


def _is_copy(store: Folder, step: int, directory: Path) -> bool:
    """Whether a directory is what the store holds of a step, and undamaged."""
    try:
        if (directory / SUMS).read_bytes() != store.read(f"{CHECKPOINTS}/{step}/{SUMS}"):
            return False
        digests.verify(directory)
    except (FileNotFoundError, Damage):
        return False
    return True


def _download(store: Folder, path: str, local: Path) -> None:
    local.parent.mkdir(parents=True, exist_ok=True)
    try:
        store.download(path, str(local))
    except FileNotFoundError:
        raise Damage(f"{path}: is missing") from None


def _each(work: Callable[[str], object], paths: Iterable[str]) -> None:
    """Calls `work` with every path, a few at a time; raises what the first failure raised."""
    with ThreadPoolExecutor(_THREADS) as pool:
        list(pool.map(work, list(paths)))
