"""Runs whose workdir is in an object store: s3://BUCKET/PATH or gs://BUCKET/PATH.

Such a run works in a local directory, with all guarantees of one, and a thread of process 0 copies what is finished:
the small files first, then the files of each new checkpoint, its SHA256SUMS last. Orbax does not write to s3://, and
objects can neither be renamed nor appended to. While the store does not answer, the run goes on and the copies follow
later. A start fetches the newest step that the store holds if the local directory has none as new.

lock.json in the store says which run writes there. The store itself lets only one of several starts create it; the
holder rewrites it every few seconds, and uploads nothing once it finds another's name in it.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import shutil
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from nsa_jax.config import ConfigError, Problem
from nsa_jax.hub import remote_run
from nsa_jax.hub.checkpoint_files import find_steps, surplus, verify
from nsa_jax.hub.digests import Damage
from nsa_jax.object_store import Folder, StoreError, normal, scheme_of
from nsa_jax.train import lock, processes, rollback
from nsa_jax.train.checkpoint import CheckpointError
from nsa_jax.train.env import write_json
from nsa_jax.train.errors import TrainingError
from nsa_jax.train.lock import WorkdirInUse

logger = logging.getLogger("nsa_jax")

_BEAT_SECONDS = 10.0
_SILENT_SECONDS = 60.0  # without a sign of life from another machine
_SETTLE_SECONDS = 3.0  # after taking over: a holder that was cut off may have been about to write
_POLL_SECONDS = 2.0  # between looks for a new checkpoint
_FILES_SECONDS = 60.0  # between uploads of the small files, besides those with a checkpoint
_RETRY_SECONDS = 30.0  # after an upload failed; the packages below have tried a few times by then
_LAST_SECONDS = 300.0  # for the last upload to succeed
_FETCH_SECONDS = 12 * 3600.0  # for process 0 to fetch a checkpoint, or to upload the last ones


_given_back: set[str] = set()  # locks of this process; the store may not have answered when they were deleted


class _Lost(RuntimeError):
    """Another run has taken the store."""


def local_directory(workdir: str | Path, local_dir: str = "") -> Path:
    """Where a run works: its workdir, or for one in an object store `local_dir`, by default runs/SCHEME/BUCKET/PATH."""
    if not scheme_of(str(workdir)):
        return Path(workdir).absolute()
    return Path(local_dir or "runs/" + normal(str(workdir)).replace("://", "/")).expanduser().absolute()


@contextlib.contextmanager
def mirroring(address: str, workdir: Path, config: ConfigDict) -> Iterator[Mirror | None]:
    """While the context lasts, `workdir` is copied to `address`; process 0 does it for all.

    At the start the newest checkpoint there is fetched if it is newer than those of the workdir. At the end everything
    has been uploaded.

    Args:
      address: of the object store; empty: nothing is done.
      workdir: local.
      config: of the run.

    Raises:
      WorkdirInUse: another run works there.
      CheckpointError: the store holds nothing but damaged checkpoints, or the workdir belongs to another address.
      ConfigError: the store refuses.
      TrainingError: the store does not answer.
    """
    if not address:
        yield None
        return
    mirror = Mirror(address, workdir, config)
    try:
        refusal = processes.from_first(mirror.begin, _FETCH_SECONDS)
        if refusal:
            raise WorkdirInUse(
                f"--workdir={mirror} is in use by {refusal}; nothing was touched. Fix: wait until it ends, stop it "
                f"(create an object {mirror}/HALT), or use another --workdir"
            )
        try:
            yield mirror
        except BaseException:
            mirror.finish(seconds=0, quiet=True)
            raise
        mirror.finish()
        processes.barrier(_FETCH_SECONDS)  # the others must not give up on process 0
    finally:
        mirror.close()


class Mirror:
    """Copies one run to an object store. Only process 0 calls `begin`; in the others everything does nothing."""

    def __init__(self, address: str, workdir: Path, config: ConfigDict):
        self.address, self._workdir = normal(address), workdir
        train = config.train
        self._keep = (train.keep_last, train.keep_best, train.keep_every)
        self._limit = config.guards.upload_seconds
        self._me = {**lock.me(), "id": uuid.uuid4().hex}
        self._active = False
        self._lost = ""
        self._held = 0.0  # when the lock was last written
        self._error: Exception | None = None
        self._failing_since = 0.0
        self._steps: dict[int, float | None] = {}  # whole ones in the store, with their losses
        self._unusable: set[int] = set()  # local ones that cannot be uploaded
        self._sent: dict[str, tuple[int, int]] = {}  # small files: time and size when they were uploaded
        self._released, self._last = threading.Event(), threading.Event()
        self._beats = threading.Thread(target=self._beat, name="nsa_jax store lock", daemon=True)
        self._uploads = threading.Thread(target=self._upload_in_background, name="nsa_jax upload", daemon=True)

    def __str__(self) -> str:
        return self.address

    # The start.

    def begin(self) -> str:
        """Takes the store and fetches what the workdir lacks; returns who has it instead, if somebody has."""
        try:
            self._store = Folder(self.address)
            if refusal := self._take():
                return refusal
            self._active = True
            self._beats.start()
            self._fetch()
        except StoreError as error:
            if error.denied:
                raise ConfigError([Problem("R023", "error", f"--workdir={error.what}", error.fix)]) from error
            raise TrainingError(f"{error}; nothing was trained", guard="upload") from error
        except Damage as error:
            raise CheckpointError(str(error)) from error
        self._uploads.start()
        return ""

    def _take(self) -> str:
        for _ in range(3):
            with contextlib.suppress(FileExistsError):
                self._write_lock(only_new=True)
                return ""
            old = self._holder()
            if old is None:  # it has just been given back
                continue
            if old.get("id") == self._me["id"]:  # a second attempt of the package below, after an answer was lost
                return ""
            dead = True if old.get("id") in _given_back else lock.is_dead(old)
            if dead is False or (dead is None and not self._is_silent(old)):
                return lock.named(old)
            logger.warning("taking over %s from %s, which is gone", self, lock.named(old))
            self._write_lock()
            if dead is None:
                time.sleep(_SETTLE_SECONDS)
            now = self._holder()
            if now is not None and now.get("id") == self._me["id"]:
                return ""
        return "another process"

    def _is_silent(self, old: dict[str, Any]) -> bool:
        logger.warning(
            "%s/%s names %s: waiting %.0f s for a sign of life (if it is gone for sure, delete that object instead)",
            *(self, remote_run.LOCK, lock.named(old), _SILENT_SECONDS),
        )
        end = time.monotonic() + _SILENT_SECONDS
        while time.monotonic() < end:
            time.sleep(_SILENT_SECONDS / 12)
            if self._holder() != old:
                return False
        return True

    def _holder(self) -> dict[str, Any] | None:
        try:
            found = json.loads(self._store.read(remote_run.LOCK))
        except FileNotFoundError:
            return None
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}

    def _write_lock(self, *, only_new: bool = False) -> None:
        self._me["beat"] = time.time()
        self._store.write(remote_run.LOCK, json.dumps(self._me).encode(), only_new=only_new)
        self._held = time.monotonic()

    def _fetch(self) -> None:
        note = self._workdir / remote_run.ADDRESS
        other = note.read_text().strip() if note.exists() else self.address
        if other != self.address:
            raise CheckpointError(
                f"{self._workdir} holds the files of {other}, not of {self}. Fix: set config.train.local_dir to "
                "another directory"
            )
        note.write_text(self.address + "\n")
        # What is damaged here may be whole there.
        directory = self._workdir / remote_run.CHECKPOINTS
        newest_first = sorted(find_steps(directory)[0], reverse=True)
        have = next(([step] for step in newest_first if _is_whole(directory / str(step))), [])
        fetched = remote_run.fetch_newest(self._store, self._workdir, have, best=self._keep[1])
        self._steps = fetched.losses
        if fetched.steps:
            logger.info("fetched checkpoints %s of %s", fetched.steps, self)
        elif have == sorted(self._steps)[-1:]:
            self._fetch_rollbacks()
        for step in remote_run.unfinished(self._store):
            remote_run.delete_step(self._store, step)

    def _fetch_rollbacks(self) -> None:
        """Takes over what another machine has left out of the data since the newest checkpoint, which both have."""
        path = self._workdir / rollback.FILE
        with contextlib.suppress(FileNotFoundError):
            there = self._store.read(rollback.FILE)
            if _length(there) > (_length(path.read_bytes()) if path.exists() else 0):
                write_json(path, json.loads(there))

    # In the background.

    def _beat(self) -> None:
        while not self._released.wait(_BEAT_SECONDS):
            with contextlib.suppress(OSError):  # the uploads tell of it
                try:
                    self._check_mine()
                    self._write_lock()
                except _Lost as error:
                    self._lost = str(error)
                    return
                with contextlib.suppress(FileNotFoundError):
                    self._store.read(remote_run.HALT)
                    (self._workdir / remote_run.HALT).touch()
                    self._store.delete(remote_run.HALT)

    def _check_mine(self) -> None:
        """Raises if another run has taken the store. A lock that somebody deleted is written anew."""
        if self._lost:  # for good: the other run may have ended since and given the lock back
            raise _Lost(self._lost)
        now = self._holder()
        if now is None and time.monotonic() - self._held > _SILENT_SECONDS:
            raise _Lost(f"{self} may have been taken over while this run did not reach it: its lock is gone")
        if now is None:
            with contextlib.suppress(FileExistsError):
                self._write_lock(only_new=True)
                return
            now = self._holder() or {}
        if now.get("id") != self._me["id"]:
            raise _Lost(f"{self} has been taken over by {lock.named(now)} while this run did not reach it")

    def _upload_in_background(self) -> None:
        due, pause = 0.0, _POLL_SECONDS
        while not self._last.wait(pause):
            with contextlib.suppress(OSError):  # which the upload meets, too
                if time.monotonic() < due and not self._pending():
                    continue
            failed = not self._try_upload()
            due, pause = time.monotonic() + _FILES_SECONDS, _RETRY_SECONDS if failed else _POLL_SECONDS

    def _try_upload(self) -> bool:
        """One turn; whether it succeeded. What went wrong is kept for `check` and `finish`."""
        try:
            self._upload()
        except _Lost as error:
            self._lost = str(error)
            self._error = error
            return False
        except Exception as error:
            if self._error is None:
                self._failing_since = time.monotonic()
                logger.warning("%s; the run goes on in %s, and the upload is tried again", error, self._workdir)
            self._error = error
            return False
        if self._error is not None:
            logger.warning("%s is up to date again", self)
        self._error = None
        return True

    def _upload(self) -> None:
        self._check_mine()
        self._upload_small_files()
        for step, loss in iter(self._next_step, None):
            self._upload_step(step, loss)
            self._check_mine()
            for old in surplus(self._steps, *self._keep):
                del self._steps[old]
                remote_run.delete_step(self._store, old)

    def _pending(self) -> dict[int, float | None]:
        """Finished steps of the workdir that the store lacks and would keep, with their losses."""
        local, _ = find_steps(self._workdir / remote_run.CHECKPOINTS)
        surplus_then = surplus({**self._steps, **local}, *self._keep)
        there = {*self._steps, *self._unusable, *surplus_then}
        return {step: loss for step, loss in local.items() if step not in there}

    def _next_step(self) -> tuple[int, float | None] | None:
        """The newest first: it is worth most."""
        return max(self._pending().items(), default=None, key=lambda item: item[0])

    def _upload_step(self, step: int, loss: float | None) -> None:
        # The trainer deletes old steps. Hard links keep this one's files until they are uploaded.
        source, held = self._workdir / remote_run.CHECKPOINTS / str(step), self._workdir / ".upload"
        try:
            shutil.rmtree(held, ignore_errors=True)
            try:
                shutil.copytree(source, held, copy_function=os.link)
            except (OSError, shutil.Error):
                if not source.is_dir():  # deleted just now
                    return
                shutil.rmtree(held, ignore_errors=True)
                shutil.copytree(source, held)  # a file system without hard links
            self._upload_small_files()
            remote_run.upload_step(self._store, step, held)
            self._steps[step] = loss
        except (Damage, FileNotFoundError) as error:
            self._unusable.add(step)
            logger.warning("checkpoint %d of %s cannot be uploaded: %s", step, self._workdir, error)
        except shutil.Error:  # of the copy, for want of room for instance: it is tried again
            if source.is_dir():
                raise
        finally:
            shutil.rmtree(held, ignore_errors=True)

    def _upload_small_files(self) -> None:
        for directory, inside, names in os.walk(self._workdir):
            inside[:] = [name for name in inside if remote_run.belongs(name)]
            for name in names:
                path = Path(directory, name)
                relative = path.relative_to(self._workdir).as_posix()
                if not remote_run.belongs(relative):
                    continue
                with contextlib.suppress(FileNotFoundError):  # a temporary file that is gone by now
                    now = path.stat()
                    if self._sent.get(relative) != (found := (now.st_mtime_ns, now.st_size)):
                        self._store.upload(str(path), relative)
                        self._sent[relative] = found

    # From the loop.

    def check(self, step: int) -> None:
        """Stops a run whose uploads can no longer succeed, or have failed for `config.guards.upload_seconds`.

        Raises:
          TrainingError: guard "upload".
        """
        if self._lost:
            raise TrainingError(f"step {step}: {self._lost}. Fix: let that one go on", guard="upload", step=step)
        if self._error is not None and self._limit and time.monotonic() - self._failing_since > self._limit:
            raise TrainingError(
                f"step {step}: nothing could be uploaded for config.guards.upload_seconds={self._limit:g}: "
                f"{self._error}. Everything is in {self._workdir}; the same command uploads it",
                guard="upload",
                step=step,
            )

    def finish(self, seconds: float | None = None, *, quiet: bool = False) -> None:
        """Uploads what is left.

        Args:
          seconds: for how long a store that does not answer is tried; None: five minutes.
          quiet: the run has failed already: only log what goes wrong.

        Raises:
          TrainingError: it could not be uploaded.
        """
        if not self._active:
            return
        self._last.set()
        self._uploads.join()
        end = time.monotonic() + (_LAST_SECONDS if seconds is None else seconds)
        for attempt in itertools.count():
            if self._try_upload():
                return
            denied = isinstance(self._error, StoreError) and self._error.denied
            if self._lost or denied or time.monotonic() > end:
                break
            time.sleep(min(2.0**attempt, _RETRY_SECONDS))
        message = (
            f"the run is not all in {self}: {self._error}. Everything is in {self._workdir}: start the same command "
            "again on this machine, which uploads what is missing"
        )
        if not quiet:
            raise TrainingError(message, guard="upload")
        logger.error("%s", message)

    def close(self) -> None:
        """Gives the store back."""
        if not self._active:
            return
        self._active = False
        for event, thread in ((self._last, self._uploads), (self._released, self._beats)):
            event.set()
            if thread.ident is not None:  # started
                thread.join()
        _given_back.add(self._me["id"])
        with contextlib.suppress(StoreError):
            if (self._holder() or {}).get("id") == self._me["id"]:
                self._store.delete(remote_run.LOCK)


def _length(content: bytes) -> int:
    """Of a list in JSON; 0 for anything else."""
    try:
        found = json.loads(content)
    except ValueError:
        return 0
    return len(found) if isinstance(found, list) else 0


def _is_whole(checkpoint: Path) -> bool:
    """Whether all files of a checkpoint are as they were written, which takes reading them."""
    try:
        verify(checkpoint)
    except (Damage, OSError):
        return False
    return True
