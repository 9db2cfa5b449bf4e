"""Memory in use, of the host and of its devices."""

from __future__ import annotations

import os
from pathlib import Path

import jax


def host_memory() -> tuple[int, int]:
    """Bytes of this process in memory now, and of the machine."""
    page = os.sysconf("SC_PAGE_SIZE")
    try:
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * page
    except (OSError, ValueError, IndexError):
        resident = 0
    return resident, page * os.sysconf("SC_PHYS_PAGES")


def memory_points() -> dict[str, tuple[int, int]]:
    """(in use, limit) in bytes of the host and, where the backend tells, of the fullest local device."""
    points = {"host": host_memory()}
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    if all("bytes_in_use" in s and "bytes_limit" in s for s in stats):
        fullest = max(stats, key=lambda s: s["bytes_in_use"])
        points["device"] = (fullest["bytes_in_use"], fullest["bytes_limit"])
    return points
