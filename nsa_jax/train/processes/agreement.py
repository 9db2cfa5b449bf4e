"""What the processes of a run must agree on. Nothing here does anything in a run of one process."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from ml_collections import ConfigDict

from nsa_jax.config import ConfigError, Problem
from nsa_jax.train.processes.session import client, peers

_DATA_SECONDS = 48 * 3600  # for the slowest process to prepare the data, beyond the fastest
_ENDING_SECONDS = 60.0  # between the first and the last process that meets an error
_calls = iter(range(1 << 62))  # the processes make the same calls in the same order, so that numbers name them


def barrier(seconds: float = 600.0, name: str = "") -> None:
    """Returns when every process is here; uses no device. Nothing in a run of one.

    Args:
      seconds: after which it raises.
      name: of a barrier that not all threads meet in one order; used once.
    """
    if peers() is not None:
        client().wait_at_barrier(f"nsa_jax/barrier/{name or next(_calls)}", int(seconds * 1000))


def all_end() -> bool:
    """Whether an error ends every process, so that they can save together; at once in a run of one."""
    try:
        barrier(_ENDING_SECONDS, "ending")
    except Exception:  # jaxlib raises several types
        return False
    return True


def from_first(make: Callable[[], str], seconds: float = 600.0) -> str:
    """What `make` returns on process 0, on every process."""
    others = peers()
    if others is None:
        return make()
    key = f"nsa_jax/first/{next(_calls)}"
    if others.process == 0:
        value = make()
        client().key_value_set(key, value)
        return value
    return client().blocking_key_value_get(key, int(seconds * 1000))


def first_alone(make: Callable[[], Any]) -> Any:
    """Calls `make` on process 0, and then on all others, for whom process 0 has done the work."""
    others = peers()
    if others is not None and others.process != 0:
        barrier(_DATA_SECONDS)
    value = make()
    if others is not None and others.process == 0:
        barrier(_DATA_SECONDS)
    return value


def together(make: Callable[[], Any]) -> Any:
    """Calls `make`, which may take hours, and returns when all processes have done so."""
    value = make()
    barrier(_DATA_SECONDS)
    return value


def check_same(what: str, value: Mapping[str, Any]) -> None:
    """Every process must have process 0's values.

    Args:
      what: they are of, for the message.
      value: flat, JSON.

    Raises:
      ConfigError: naming the values that differ.
    """
    others = peers()
    if others is None:
        return
    first = json.loads(from_first(lambda: json.dumps(value)))
    mine = json.loads(json.dumps(value))
    wrong = [name for name in sorted({*first, *mine}) if first.get(name) != mine.get(name)]
    if wrong:
        listed = "; ".join(f"{name}: {mine.get(name)!r} here, {first.get(name)!r} there" for name in wrong[:8])
        message = f"{what} of process {others.process} (host {others.me.host}) differs from process 0's: {listed}"
        raise ConfigError([Problem("R050", "error", message, "start every process with the same command and versions")])


def check_same_run(config: ConfigDict, workdir: str | Path) -> None:
    """Every process must have been started for the same run, with the same versions.

    Raises:
      ConfigError: naming what differs.
    """
    values = {"workdir": str(workdir), "jax": jax.__version__}
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # run from a source tree
        values["nsa_jax"] = importlib.metadata.version("nsa_jax")
    check_same("the run", {**values, **_flat(json.loads(config.to_json()), "config")})


def _flat(values: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    found = {}
    for name, value in values.items():
        key = f"{prefix}.{name}"
        found.update(_flat(value, key) if isinstance(value, dict) else {key: value})
    return found


def check_shared(directory: Path) -> None:
    """Every process must see the same directory: checkpoints are written into it by all.

    Raises:
      ConfigError: it is another one on this host.
    """
    others = peers()
    if others is None:
        return
    token = from_first(lambda: uuid.uuid4().hex)
    path = directory / f".shared-{token}"
    if others.process == 0:
        path.touch()
    barrier()
    seen = path.exists()
    for _ in range(0 if seen else 20):  # network file systems tell late
        time.sleep(0.5)
        os.listdir(directory)
        if seen := path.exists():
            break
    if not seen:
        fix = (
            "use a --workdir (if it is s3:// or gs://, a config.train.local_dir) on a file system that all hosts share"
        )
        message = f"workdir {directory}: on host {others.me.host} it is another directory than on process 0's host"
        raise ConfigError([Problem("R051", "error", message, f"{fix}, the same path on each")])
    barrier()
    if others.process == 0:
        path.unlink(missing_ok=True)


def check_devices() -> None:
    """Every process must have as many devices as the others: each loads an equal share of the batch.

    Raises:
      ConfigError: they have not.
    """
    counts = np.bincount([device.process_index for device in jax.devices()], minlength=jax.process_count())
    if len(set(counts.tolist())) > 1:
        message = f"processes have different numbers of devices: {counts.tolist()}"
        raise ConfigError([Problem("R052", "error", message, "start the processes so that each has the same number")])


def all_agree(mine: bool) -> bool:
    """Whether it is true on every process."""
    if jax.process_count() == 1:
        return mine
    return bool(multihost_utils.process_allgather(np.asarray(mine)).all())
