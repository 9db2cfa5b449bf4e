"""Stacks of all threads on SIGUSR1, for who wants to know what a process does."""

from __future__ import annotations

import contextlib
import faulthandler
import signal
from collections.abc import Iterator
from typing import TextIO

_files: list[TextIO] = []  # the last one is written to


@contextlib.contextmanager
def stacks_on_signal(file: TextIO) -> Iterator[None]:
    """SIGUSR1, which would end the process, writes the stacks to a file instead."""
    try:
        faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
    except (AttributeError, OSError, RuntimeError, ValueError):  # no such signal, or a file without a descriptor
        yield
        return
    _files.append(file)
    try:
        yield
    finally:
        _files.pop()
        if _files:
            faulthandler.register(signal.SIGUSR1, file=_files[-1], all_threads=True)
        else:
            faulthandler.unregister(signal.SIGUSR1)
