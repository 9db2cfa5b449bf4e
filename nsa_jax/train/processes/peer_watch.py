"""What the processes of a run know about each other: who is alive, who failed and why.

Collectives cannot tell: when one process is gone, the others wait in the next one, some for ever. So every process
writes a sign of life to the key-value store of JAX's coordination service, which process 0 hosts, and reads those of
the others. Whoever is silent for too long, or says that it failed, is named, and the process ends: with the status of
the one that failed, if starting the run again would end in the same way or a person ended it by Ctrl-C, else with
`EXIT_AGAIN`.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from nsa_jax.exit_status import EXIT_AGAIN, EXIT_CONFIG, EXIT_FAULT, EXIT_GUARD, EXIT_INTERRUPTED

logger = logging.getLogger("nsa_jax")

_PREFIX = "nsa_jax/peer/"
_TICK = 2.0  # seconds between signs of life
_GRACE = 5.0  # seconds that a process has to end by itself after another failed: often it meets the same error
_ENDING = 3600.0  # seconds to save and upload what there is, once this process meets an error itself
_MARGIN = 8.0  # seconds, for a busy machine
_PROBE_SECONDS = 3.0


def reachable(address: str) -> bool:
    """Whether a connection to "host:port" is accepted."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_PROBE_SECONDS).close()
    except OSError:
        return False
    return True


@dataclasses.dataclass
class Peer:
    """What is known of one process.

    Attributes:
      process: its index.
      host: its host's name; empty: it was never heard of.
      pid: its process id.
      step: the last step it finished.
      state: "alive", "failed" or "done".
      why: the error of a failed one.
      status: with which a failed one ends.
      changed: when its sign of life last changed, on this process's monotonic clock.
    """

    process: int
    host: str = ""
    pid: int = 0
    step: int | None = None
    state: str = "alive"
    why: str = ""
    status: int = 0
    changed: float = 0.0
    count: int = -1

    def __str__(self) -> str:
        if not self.host:
            return f"process {self.process} (never heard of)"
        return f"process {self.process} (host {self.host}, pid {self.pid})"


class Peers:
    """Watches the other processes of a run, in two threads.

    Args:
      client: of the coordination service: `key_value_set` and `key_value_dir_get`.
      process: index of this process.
      count: of the run.
      coordinator: "host:port" of the service, which is probed when it does not answer.
      seconds: of silence after which a process counts as gone.
    """

    def __init__(self, client: Any, process: int, count: int, coordinator: str, seconds: float = 30.0):
        self._client, self._coordinator, self._seconds = client, coordinator, seconds
        self.process, self.count = process, count
        self._tick = min(_TICK * max(count / 64, 1), seconds / 4)  # each process reads all: n^2 per tick
        now = time.monotonic()
        self.all = [Peer(index, changed=now) for index in range(count)]
        self.me = Peer(process, socket.gethostname(), os.getpid(), changed=now)
        self._answered = self._asking = now  # when the service last answered, and since when it could have
        self._refusals = 0  # connections to it in a row
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._verdict = threading.Event()
        self._grace = _GRACE
        self._threads = [
            threading.Thread(target=target, name=f"nsa_jax {name}", daemon=True)
            for name, target in (("signs of life", self._exchange_always), ("peers", self._watch))
        ]
        # Called with the message before the process ends, by the first of the processes that are left.
        self.on_loss: Callable[[str], None] | None = None

    def start(self) -> None:
        """Begins to watch."""
        _delay_abort()
        self._exchange()
        for thread in self._threads:
            thread.start()

    def beat(self, step: int) -> None:
        """Tells the others the last finished step; it is sent with the next sign of life."""
        self.me.step = step

    def wait_for_verdict(self) -> None:
        """Called when a collective failed: gives the watch the time to find out who is gone, which ends the process.

        Returns if nobody is: then the error is this process's own.
        """
        self._verdict.wait(self._seconds + 2 * self._tick + _MARGIN)
        if self._verdict.is_set():
            time.sleep(600)  # the watch is about to end the process

    def ending(self) -> None:
        """An error ends this process too: that others end before it is no loss."""
        self._grace = _ENDING

    def leave(self) -> None:
        """This process is done; the others may go on."""
        self._finish("done", "")

    def fail(self, why: str, status: int = 0) -> None:
        """Tells the others that this process ends because of an error, and with which status."""
        self.me.status = status
        self._finish("failed", why)
        if self.process == 0:
            time.sleep(2 * self._tick + 1)  # the others read it from the service, which ends with this process

    def _finish(self, state: str, why: str) -> None:
        self._stop.set()
        self.me.state, self.me.why = state, why[:2000]
        self._exchange()

    def _exchange(self) -> None:
        """Sends a sign of life and reads those of all."""
        with self._lock:
            self.me.count += 1
            names = ("host", "pid", "step", "state", "why", "status", "count")
            row = {name: getattr(self.me, name) for name in names}
            try:
                self._client.key_value_set(f"{_PREFIX}{self.process}", json.dumps(row), allow_overwrite=True)
                found = self._client.key_value_dir_get(_PREFIX)
            except Exception:  # jaxlib raises several types; what it means is for the watch to find out
                return
            self._answered = now = time.monotonic()
            for key, value in found:
                peer = self.all[int(key.rpartition("/")[2])]
                row = json.loads(value)
                if row["count"] != peer.count:
                    peer.changed = now
                    for name, entry in row.items():
                        setattr(peer, name, entry)

    def _exchange_always(self) -> None:
        while not self._stop.wait(self._tick):
            self._exchange()

    def _watch(self) -> None:
        last = time.monotonic()
        while not self._stop.wait(min(self._tick, 1.0)):
            now = time.monotonic()
            if now - last > self._seconds / 2:  # this process stood still itself: nothing could be answered
                self._asking = now
            last = now
            # Its end is noticed by a connection that is refused: JAX's own calls may hang, and abort soon after.
            self._refusals = 0 if self.process == 0 or reachable(self._coordinator) else self._refusals + 1
            message, lost = self.verdict(now)
            if not message:
                continue
            if lost and all(peer.state == "failed" for peer in lost):
                while time.monotonic() - now < self._grace:  # which `ending` may lengthen meanwhile
                    if self._stop.wait(0.2):
                        return
            self._end(message, lost)

    def verdict(self, now: float) -> tuple[str, list[Peer]]:
        """Why the run cannot go on, and whose fault it is; an empty message if it can."""
        others = [peer for peer in self.all if peer.process != self.process]
        failed = [peer for peer in others if peer.state == "failed"]
        if failed:
            return "; ".join(f"{peer} failed: {peer.why}" for peer in failed), failed
        host = self.all[0]
        if self.process != 0 and host.state != "done":
            if self._refusals >= 2:
                return f"{host} is gone: nothing answers at {self._coordinator}", [host]
            waited = now - max(self._answered, self._asking)
            if waited > self._seconds:
                return f"{host} has not answered for {waited:.0f} s at {self._coordinator}", [host]
        # Up to the last answer: what came since has not been read.
        silent = [peer for peer in others if peer.state == "alive" and self._answered - peer.changed > self._seconds]
        if silent:
            told = (
                f"{peer} is gone: no sign of life for {self._answered - peer.changed:.0f} s, last after step "
                f"{peer.step}"
                for peer in silent
            )
            return "; ".join(told), silent
        return "", []

    def _end(self, message: str, lost: list[Peer]) -> None:
        self._verdict.set()
        not_again = (EXIT_FAULT, EXIT_CONFIG, EXIT_GUARD, EXIT_INTERRUPTED)
        final = [peer.status for peer in lost if peer.status in not_again]
        status = min(final, default=EXIT_AGAIN)
        logger.error("ALARM peer: %s", message)
        logger.error(
            "process %d of %d (host %s) stops with status %d%s",
            *(self.process, self.count, self.me.host, status),
            ", as that one"
            if final
            else "; start the run again, with any number of processes, to resume it from its last checkpoint",
        )
        left = [peer.process for peer in self.all if peer not in lost and peer.state == "alive"]
        if self.on_loss is not None and self.process == min(left, default=self.process):
            with contextlib.suppress(Exception):  # nothing may keep the process from ending
                self.on_loss(message)
        if self.process == 0:
            time.sleep(2 * self._tick + 1)  # the others learn it from the service, which ends with this process
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _delay_abort() -> None:
    """Makes abort() wait for a few seconds.

    When process 0 dies, JAX's client aborts the process at once, with a message that names nobody. The handler of the
    signal is libc's sleep() itself, which takes the signal's number, 6, as its argument: the aborting thread sleeps
    that many seconds, without interpreter, locks or memory, and then dies as it would have; meanwhile the watch says
    who is gone. It takes the place of faulthandler's handler, which absl installs, and which is kept for the other
    signals.
    """
    with contextlib.suppress(AttributeError, OSError):
        libc = ctypes.CDLL(None)
        libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
        libc.signal.restype = ctypes.c_void_p
        libc.signal(signal.SIGABRT, ctypes.cast(libc.sleep, ctypes.c_void_p))
