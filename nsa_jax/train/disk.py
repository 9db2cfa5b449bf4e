"""A full disk ends a run with one line, whatever was being written."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

_FULL = (errno.ENOSPC, errno.EDQUOT)
_LITTLE = 100 << 20  # bytes for logs and metrics
_TEXTS = ("No space left on device", "Disk quota exceeded")  # where a library keeps the text alone


def is_full(error: BaseException) -> bool:
    """Whether an error, or one of those that led to it, says that a disk is full."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        found = waiting.pop()
        if found is None or id(found) in seen:
            continue
        seen.add(id(found))
        if getattr(found, "errno", None) in _FULL or any(text in str(found) for text in _TEXTS):
            return True
        waiting += [found.__cause__, found.__context__, *getattr(found, "exceptions", ())]
    return False


def fullest(*directories: Path) -> Path:
    """The directory, or the one above it that exists, whose disk has the least room.

    A write that fails does not say where.
    """
    present = [next(path for path in (directory, *directory.parents) if path.is_dir()) for directory in directories]
    return min(present, key=lambda directory: shutil.disk_usage(directory).free)


def advice(directory: Path, need: int = 0) -> str:
    """What to tell: how full the disk is, and how much to free.

    Args:
      directory: on the disk.
      need: bytes that are about to be written; 0: few.
    """
    free = shutil.disk_usage(directory).free
    room = f"a checkpoint takes {_size(need)}" if need else "more is needed"
    missing = _size(max(need - free, _LITTLE))
    return (
        f"the disk of {directory} is full: {_size(free)} are free, {room}. Fix: free some space (at least {missing}) "
        "and start again"
    )


def _size(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"
