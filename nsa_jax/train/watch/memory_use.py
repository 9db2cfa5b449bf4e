"""Memory in use, of the host and of its devices."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import jax

_GROUPS_OF_PROCESS, _GROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def host_memory() -> tuple[int, int]:
    """Bytes of this process in memory now, and what it may use: the machine's, or less in a container or a job."""
    page = os.sysconf("SC_PAGE_SIZE")
    try:
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * page
    except (OSError, ValueError, IndexError):
        resident = 0
    return resident, min([page * os.sysconf("SC_PHYS_PAGES"), *_group_limits()])


def _group_limits() -> list[int]:
    """Limits in bytes of the control groups that this process is in, and of those that hold them."""
    try:
        lines = _GROUPS_OF_PROCESS.read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if controllers not in ("", "memory"):  # of version 2, and of version 1
            continue
        root, name = (_GROUPS / "memory", "memory.limit_in_bytes") if controllers else (_GROUPS, "memory.max")
        own = Path(group.lstrip("/"))
        for holder in (own, *own.parents):  # a container may see its own group alone, as the root
            with contextlib.suppress(OSError, ValueError):  # without a limit: "max"
                found.append(int((root / holder / name).read_text()))
    return found


def memory_points() -> dict[str, tuple[int, int]]:
    """(in use, limit) in bytes of the host and, where the backend tells, of the fullest local device."""
    points = {"host": host_memory()}
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    if all("bytes_in_use" in s and "bytes_limit" in s for s in stats):
        fullest = max(stats, key=lambda s: s["bytes_in_use"])
        points["device"] = (fullest["bytes_in_use"], fullest["bytes_limit"])
    return points
