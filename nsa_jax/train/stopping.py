"""Requests to stop: signals and a file."""

from __future__ import annotations

import collections
import contextlib
import functools
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from nsa_jax.train.terminal import Terminal

HALT = "HALT"
_ONE_REQUEST = 1.0  # seconds: GNU timeout sends SIGTERM to its child, and again to the group that the child is in


@contextlib.contextmanager
def listening(heard: Callable[[int], None]) -> Iterator[None]:
    """Calls `heard` with the number of each signal that has a Python handler, in a thread and at once.

    The handler itself waits until the main thread returns from compiled code, such as from compiling the train step.
    The outermost of these blocks ends after `heard` has been called for every signal, also where a handler raised.
    """
    with contextlib.ExitStack() as stack:
        _listeners.append(heard)
        stack.callback(_listeners.pop)  # once the thread has told what came before
        if len(_listeners) == 1:
            stack.enter_context(_thread())
        yield


_listeners: list[Callable[[int], None]] = []  # the last one is told


@contextlib.contextmanager
def _thread() -> Iterator[None]:
    """The thread that tells the last listener of signals, unless somebody else already has their bytes."""
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)

    def listen() -> None:
        while numbers := ours.recv(64):
            for number in numbers:
                if _listeners:
                    _listeners[-1](number)

    with ours:
        with theirs:
            try:
                previous = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
            except ValueError:  # not the main thread: signals are not ours
                yield
                return
            if previous != -1:  # the event loop of a notebook
                signal.set_wakeup_fd(previous)
                yield
                return
            thread = threading.Thread(target=listen, name="nsa_jax signals", daemon=True)
            thread.start()
            try:
                yield
            finally:
                signal.set_wakeup_fd(-1)
                theirs.shutdown(socket.SHUT_RDWR)  # ends the thread, even if a forked process holds a copy
                thread.join()


class Vote:
    """Whether any process wants to stop: all learn it at the same step, and nobody waits for the device.

    Each step's votes are added up on the devices behind the step, and read `lag` steps later, when they are there.

    Args:
      mesh: of all devices.
      lag: steps between a vote and its result.
    """

    def __init__(self, mesh: jax.sharding.Mesh, lag: int = 2):
        self._sharding = NamedSharding(mesh, P(mesh.axis_names))
        self._highest = jax.jit(jnp.max, out_shardings=NamedSharding(mesh, P()))
        self._votes: collections.deque[jax.Array] = collections.deque()
        self._lag = lag

    @functools.cached_property
    def _local(self) -> int:
        return len(self._sharding.addressable_devices)

    def __call__(self, mine: int) -> int:
        """Votes with a number, 0 for going on; returns the highest of all processes' votes `lag` calls ago, or 0."""
        value = np.full(self._local, mine, np.int32)
        self._votes.append(self._highest(jax.make_array_from_process_local_data(self._sharding, value)))
        return int(self._votes.popleft()) if len(self._votes) > self._lag else 0


def _repeated(times: dict[int, float], number: int) -> bool:
    """Whether a signal that comes now is another request than the first of its kind, whose time is kept."""
    now = time.monotonic()
    first = times.setdefault(number, now)
    return first < now and (number != signal.SIGTERM or now - first >= _ONE_REQUEST)


class StopRequest:
    """SIGTERM, SIGINT or a file named HALT in the workdir ask the run to save and stop.

    The second signal of a kind ends the process at once, but not a SIGTERM within a second of the first.

    Attributes:
      terminated: SIGTERM asked, by which schedulers announce that they take the machine: start the run again.

    Args:
      workdir: of the run.
      mesh: of all devices: the processes stop at the same step.
      terminal: where a signal is answered, as soon as it comes.
      stopping: what follows, for the answer.
    """

    def __init__(
        self,
        workdir: Path,
        mesh: jax.sharding.Mesh,
        terminal: Terminal | None = None,
        stopping: Callable[[], str] = lambda: "stopping after this step",
    ):
        self.terminated = False
        self._halt = workdir / HALT
        self._vote = Vote(mesh) if jax.process_count() > 1 else None
        self._signal: str | None = None
        self._previous: dict[int, Any] = {}
        self._terminal, self._stopping = terminal or Terminal(), stopping
        self._heard: dict[int, float] = {}
        self._handled: dict[int, float] = {}
        self._listening = listening(self._on_byte)

    def __enter__(self) -> StopRequest:
        self._listening.__enter__()
        for number in (signal.SIGTERM, signal.SIGINT):
            # Only the main thread may install handlers; elsewhere (a notebook's thread, a test) HALT still works.
            with contextlib.suppress(ValueError):
                self._previous[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._listening.__exit__(None, None, None)
        if jax.process_index() == 0:  # by now it has done its work on all: starting again resumes
            self._halt.unlink(missing_ok=True)

    def _on_signal(self, number: int, _frame: Any) -> None:
        if self._signal != signal.SIGINT.name:  # a person asked first: the run is not to be started again
            self._signal = signal.Signals(number).name
        again = _repeated(self._handled, number)
        if again:
            self._kill(number)
        if again or number != signal.SIGTERM:
            signal.signal(number, self._previous[number])
        if again:  # in a notebook
            signal.raise_signal(number)

    def _on_byte(self, number: int) -> None:
        """Answers a signal, in another thread."""
        if number not in self._previous:
            return
        if number not in self._heard:
            name = self._name(number)
            self._terminal.say(f"{name}: {self._stopping()}; {name} again kills, unsaved")
        if _repeated(self._heard, number):
            self._kill(number)

    def _name(self, number: int) -> str:
        return "Ctrl-C" if number == signal.SIGINT and self._terminal.live else signal.Signals(number).name

    def _kill(self, number: int) -> None:
        if not hasattr(sys, "ps1"):  # a notebook's kernel outlives the run
            self._terminal.close()
            name = self._name(number)
            self._terminal.say(f"{name} again: killed, unsaved; start again to resume from the newest checkpoint")
            os._exit(128 + number)

    def reason(self) -> str | None:
        """What asked to stop: on this process or, which all learn at the same step, on another."""
        mine = HALT if self._halt.exists() else self._signal
        terminated = mine == signal.SIGTERM.name
        if self._vote is None:
            self.terminated = terminated
            return mine
        # A person's request, which comes from a process of any number, is higher than all of schedulers.
        index, count = jax.process_index(), jax.process_count()
        highest = self._vote(1 + index + (0 if terminated else count) if mine else 0)
        if not highest:
            return None
        self.terminated = highest <= count
        asker = (highest - 1) % count
        return mine if mine and terminated == self.terminated else f"process {asker}"
