"""One run per workdir: a second start is refused, and what a dead process left behind is taken over.

lock.json in the workdir names the process that trains there. It holds an operating system's lock on that file, which
ends with the process however it ends. File systems that do not carry this lock from host to host need a second sign:
the holder touches the file every few seconds, and a start on another host waits for that before it takes over.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nsa_jax.train import processes

logger = logging.getLogger("nsa_jax")

LOCK = "lock.json"

_BEAT_SECONDS = 5.0
_SILENT_SECONDS = 45.0  # without a sign of life from another host: more than a network file system keeps to itself
_DYING_SECONDS = 10.0  # a killed process keeps its lock until its memory is freed
_ENDING_SECONDS = 3.0  # and is listed for a moment after its lock is free


class WorkdirInUse(RuntimeError):
    """Another run is at work in this workdir; the message names it and says what to do."""


@contextlib.contextmanager
def holding(workdir: Path) -> Iterator[None]:
    """The workdir belongs to this run while the context lasts; process 0 decides for all.

    Args:
      workdir: of the run; created if missing. Nothing else in it is touched.

    Raises:
      WorkdirInUse: another run is at work there.
    """
    lock = _Lock(workdir / LOCK)
    try:
        refusal = processes.from_first(lock.take)
        if refusal:
            raise WorkdirInUse(
                f"--workdir={workdir} is in use by {refusal}; nothing was touched. Fix: wait until it ends, stop it "
                f"(touch {workdir / 'HALT'}), or use another --workdir"
            )
        yield
    finally:
        lock.release()


class _Lock:
    """The lock file of one workdir."""

    def __init__(self, path: Path):
        self._path = path
        self._mine: dict[str, Any] = {}  # what this process wrote into the file
        self._descriptor = -1
        self._held = threading.Event()
        self._released = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="nsa_jax lock", daemon=True)

    def take(self) -> str:
        """Takes the workdir; returns who has it if that is not possible, else nothing."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        refusal = self._lock()
        if refusal:
            return refusal
        old = self._read()
        if old:
            refusal = self._judge(old)
            if refusal:
                return refusal
            logger.warning("taking over %s from %s, which is gone", self._path.parent, named(old))
        os.ftruncate(self._descriptor, 0)
        self._mine = me()
        os.pwrite(self._descriptor, json.dumps(self._mine).encode() + b"\n", 0)
        self._held.set()
        self._thread.start()
        return ""

    def release(self) -> None:
        """Gives the workdir back; removes the file if it was this process's."""
        self._released.set()
        if self._held.is_set():
            self._thread.join()
            # Another host may have taken over a process that it did not hear of for long.
            with contextlib.suppress(OSError, ValueError):
                if json.loads(self._path.read_bytes()) == self._mine:
                    self._path.unlink()
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _lock(self) -> str:
        """The operating system's lock; returns who has it instead."""
        end = time.monotonic() + _DYING_SECONDS
        while True:
            self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                old = self._read()
                if (not old or is_dead(old)) and time.monotonic() < end:
                    os.close(self._descriptor)
                    time.sleep(0.2)
                    continue
                return named(old)
            except OSError as error:  # a file system without locks: signs of life must do
                logger.warning("%s cannot be locked here (%s)", self._path, error.strerror)
                return ""
            # A holder removes the file as it leaves: what was opened before that is no longer the lock.
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.stat(self._path), os.fstat(self._descriptor)):
                    return ""
            os.close(self._descriptor)

    def _judge(self, old: dict[str, Any]) -> str:
        """Who still works here although the lock was free; empty if nobody does."""
        dead = is_dead(old)
        end = time.monotonic() + _ENDING_SECONDS
        while dead is False and time.monotonic() < end:
            time.sleep(0.1)
            dead = is_dead(old)
        if dead is None:  # another host
            logger.warning(
                "%s names %s: waiting %.0f s for a sign of life (if it is gone for sure, delete that file instead)",
                *(self._path, named(old), _SILENT_SECONDS),
            )
            try:
                dead = self._is_silent()
            except FileNotFoundError:  # it has just ended, and removed the file that is open here
                os.close(self._descriptor)
                self._descriptor = -1
                return self._lock()
        return "" if dead else named(old)

    def _is_silent(self) -> bool:
        """Whether nobody touches the file. Clocks of different hosts are not compared."""
        seen, end = self._touched(), time.monotonic() + _SILENT_SECONDS
        while time.monotonic() < end:
            time.sleep(min(1.0, _SILENT_SECONDS / 10))
            if self._touched() != seen:
                return False
        return True

    def _touched(self) -> int:
        with self._path.open() as file:  # opening makes a network file system ask the server
            return os.fstat(file.fileno()).st_mtime_ns

    def _read(self) -> dict[str, Any]:
        try:
            found = json.loads(os.pread(self._descriptor, 1 << 16, 0))
        except ValueError:  # empty, or cut off by a full disk
            return {}
        return found if isinstance(found, dict) else {}

    def _beat(self) -> None:
        while not self._released.wait(_BEAT_SECONDS):
            with contextlib.suppress(OSError):
                os.utime(self._descriptor)


def named(holder: dict[str, Any]) -> str:
    """What a lock's content says about its holder, for a message."""
    if not holder:
        return "another process"
    return f"process {holder.get('pid')} on host {holder.get('host')}, which started at {holder.get('started')}"


def me() -> dict[str, Any]:
    """What a lock of this process holds."""
    return {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "started": time.strftime("%Y-%m-%d %H:%M:%S %Z"),
        "machine": _machine(),
        "process_start": _process_start(os.getpid()),
    }


def _machine() -> str:
    """Where process ids mean the same: this host, since it was booted, in this container."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts += [Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.readlink("/proc/self/ns/pid")]
    return " ".join(parts)


def _process_start(pid: int) -> str | None:
    """When a process was started, in clock ticks since boot, which tells it from a later one of the same id.

    Returns:
      None if there is no such process; "" where the system does not say when it started.
    """
    if Path("/proc/self/stat").exists():
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return None
        return None if fields[0] in "ZX" else fields[19]
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        pass
    return ""


def is_dead(holder: dict[str, Any]) -> bool | None:
    """Whether the process that a lock file names is gone; None if this machine cannot tell."""
    if holder.get("machine") != _machine() or not isinstance(holder.get("pid"), int):
        return None
    return _process_start(holder["pid"]) != holder.get("process_start")
