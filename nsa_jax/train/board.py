"""TensorBoard's files of events."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from nsa_jax.extras import hidden

with hidden("torch"):  # which tensorboardX imports for the name of a type, and takes seconds
    from tensorboardX.event_file_writer import EventsWriter
    from tensorboardX.proto.event_pb2 import Event, SessionLog
    from tensorboardX.summary import scalar, text

__all__ = ["Board", "scalar", "text"]

_FLUSH_SECONDS = 60.0  # between writes to the disk


class Board:
    """TensorBoard's events, written in this thread.

    tensorboardX's own writer hands them to another thread; when that meets a full disk it ends, and the run waits for
    room in its queue for ever.
    """

    def __init__(self, directory: Path, purge_step: int):
        directory.mkdir(parents=True, exist_ok=True)
        self._events = EventsWriter(str(directory / "events"), f".{os.getpid()}")
        self._flushed = time.monotonic()
        self._events.write_event(Event(step=purge_step, file_version="brain.Event:2"))
        start = SessionLog(status=SessionLog.START)
        self._events.write_event(Event(step=purge_step, session_log=start))

    def add(self, step: int, summaries: Iterable[Any]) -> None:
        """Appends summaries of a step."""
        for summary in summaries:
            self._events.write_event(Event(wall_time=time.time(), step=step, summary=summary))
        if time.monotonic() - self._flushed > _FLUSH_SECONDS:
            self._events.flush()
            self._flushed = time.monotonic()

    def close(self) -> None:
        self._events.close()
