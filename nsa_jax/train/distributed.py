"""Several processes: finding the others, starting `jax.distributed`, and what all must agree on.

How a process learns of the others, the first that applies:

  flags        --coordinator=HOST:PORT --num_processes=N --process_id=I
  variables    JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID (or JOB_COMPLETION_INDEX)
  a launcher   Open MPI, Slurm or an indexed Kubernetes job, as JAX itself detects them

A launcher that runs a single process, and no launcher, leave everything as it is without this module.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import importlib.metadata
import json
import logging
import os
import re
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from ml_collections import ConfigDict

from nsa_jax.config import ConfigError, Problem
from nsa_jax.train.guards import TrainingError
from nsa_jax.train.peers import EXIT_PEER, Peers, reachable

logger = logging.getLogger("nsa_jax")

_JOIN_SECONDS = 300  # for all processes to arrive
_LEAVE_SECONDS = 120  # for all processes to finish
_DATA_SECONDS = 48 * 3600  # for process 0 to prepare the data
_MARGIN_SECONDS = 30  # JAX's own heartbeat is the second line, after `Peers`


class DistributedError(RuntimeError):
    """The processes of a run cannot find each other; the message says why and what to do."""


@dataclasses.dataclass(frozen=True)
class Cluster:
    """How a process finds the others.

    Attributes:
      coordinator: "host:port" on which process 0 listens.
      num_processes: of the run; more than 1.
      process_id: of this one.
      devices: local numbers of the GPUs that this process takes; None: all that it sees.
      found_by: who said so.
    """

    coordinator: str
    num_processes: int
    process_id: int
    devices: tuple[int, ...] | None = None
    found_by: str = "flags"

    def __post_init__(self):
        if not re.fullmatch(r".+:\d+", self.coordinator):
            raise DistributedError(f"coordinator {self.coordinator!r}: must be HOST:PORT of process 0")
        if not 0 <= self.process_id < self.num_processes:
            raise DistributedError(
                f"process_id={self.process_id}, num_processes={self.num_processes} ({self.found_by}): processes count "
                "from 0 to num_processes - 1"
            )


def from_flags(
    coordinator: str | None, num_processes: int | None, process_id: int | None, wanted: bool | None
) -> Cluster | None:
    """The cluster that the flags name, else the one that is detected.

    Args:
      coordinator: "host:port" of process 0.
      num_processes: of the run.
      process_id: of this process.
      wanted: True: there must be a cluster; False: there must be none; None: if one is detected.

    Returns:
      The cluster; None for a run of a single process.

    Raises:
      DistributedError: flags are missing or contradict each other, or a cluster is wanted and there is none.
    """
    flags = {"--coordinator": coordinator, "--num_processes": num_processes, "--process_id": process_id}
    given = [name for name, value in flags.items() if value is not None]
    if wanted is False:
        if given:
            raise DistributedError(f"--nodistributed contradicts {', '.join(given)}")
        return None
    if given:
        if len(given) < len(flags):
            missing = ", ".join(name for name in flags if name not in given)
            raise DistributedError(f"{missing} missing: --coordinator, --num_processes and --process_id go together")
        assert coordinator is not None and num_processes is not None and process_id is not None
        found = Cluster(coordinator, num_processes, process_id)
        return found if found.num_processes > 1 else None
    detected = detect()
    if wanted and detected is None and single_launcher() is None:
        raise DistributedError(
            "--distributed: no cluster was detected (Slurm, Open MPI, indexed Kubernetes job, or the variables "
            "JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID); give --coordinator=HOST:PORT "
            "--num_processes=N --process_id=I"
        )
    return detected


def _number(environ: Mapping[str, str], *names: str) -> int | None:
    """The first of these variables that is set."""
    for name in names:
        if environ.get(name):
            try:
                return int(environ[name])
            except ValueError:
                raise DistributedError(f"{name}={environ[name]!r}: must be a number") from None
    return None


def _launcher() -> tuple[str, int, int] | None:
    """Name of the launcher, processes it runs and this one's index; None if none is seen."""
    env = os.environ
    if env.get("OMPI_COMM_WORLD_SIZE"):  # before Slurm, whose variables mpirun's children inherit
        return "Open MPI", int(env["OMPI_COMM_WORLD_SIZE"]), int(env["OMPI_COMM_WORLD_RANK"])
    slurm = _jax_cluster("slurm")
    if slurm is not None and slurm.is_env_present():
        return "Slurm", slurm.get_process_count(), slurm.get_process_id()
    if env.get("JOB_COMPLETION_INDEX") and env.get("KUBERNETES_SERVICE_HOST"):
        kubernetes = _jax_cluster("k8s")
        if kubernetes is not None and kubernetes.is_env_present():
            return "Kubernetes", kubernetes.get_process_count(), kubernetes.get_process_id()
    return None


def _jax_cluster(name: str) -> Any:
    """JAX's own detection of a kind of cluster; it has no public name."""
    from jax._src.clusters import ClusterEnv

    def named(kind: Any) -> bool:
        return kind.name == name or kind.__name__.lower().startswith(name)

    return next((kind for kind in ClusterEnv._cluster_types if named(kind)), None)


def single_launcher() -> str | None:
    """Name of the launcher that runs this process alone, such as a Slurm job of one task."""
    found = _launcher()
    return found[0] if found is not None and found[1] == 1 else None


def detect() -> Cluster | None:
    """The cluster that the environment speaks of; None for a single process.

    Raises:
      DistributedError: a launcher runs several processes, but does not say where process 0 is.
    """
    env = os.environ
    address = env.get("JAX_COORDINATOR_ADDRESS", "")
    count = _number(env, "JAX_NUM_PROCESSES", "JAX_PROCESS_COUNT")
    index = _number(env, "JAX_PROCESS_ID", "JOB_COMPLETION_INDEX")
    if address and count is not None and index is not None:
        return Cluster(address, count, index, found_by="variables") if count > 1 else None
    try:
        found = _launcher()
        if found is None or found[1] == 1:
            return None
        name, count, index = found
        address = address or _coordinator_of(name)
    except DistributedError:
        raise
    except Exception as error:  # JAX's detection raises what its libraries raise
        raise DistributedError(
            f"the cluster cannot be used ({type(error).__name__}: {error}). Give --coordinator=HOST:PORT "
            "--num_processes=N --process_id=I, or --nodistributed to train alone"
        ) from error
    return Cluster(address, count, index, devices_of(name), name)


def _coordinator_of(launcher: str) -> str:
    kinds = {"Open MPI": ("ompi", "mpi4py"), "Slurm": ("slurm",), "Kubernetes": ("k8s",)}[launcher]
    for kind in map(_jax_cluster, kinds):
        if kind is not None and kind.is_env_present():
            return kind.get_coordinator_address(
                timeout_secs=_JOIN_SECONDS, override_coordinator_port=os.environ.get("JAX_COORDINATOR_PORT")
            )
    raise DistributedError(
        f"{launcher} does not say where process 0 is: install mpi4py, or name its host, "
        "mpirun -x JAX_COORDINATOR_ADDRESS=HOST:PORT"
    )


def _tasks_per_node(text: str) -> list[int]:
    """Slurm's "2(x3),1" as [2, 2, 2, 1]."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match:
            counts += [int(match[1])] * int(match[2] or 1)
    return counts


def devices_of(launcher: str) -> tuple[int, ...] | None:
    """Which of the host's GPUs a process takes: an even share if several see the same ones, otherwise all it sees."""
    env = os.environ
    local, count = 0, 1
    if launcher == "Open MPI":
        local = _number(env, "OMPI_COMM_WORLD_LOCAL_RANK") or 0
        count = _number(env, "OMPI_COMM_WORLD_LOCAL_SIZE") or 1
    elif launcher == "Slurm":
        if env.get("SLURM_GPUS_PER_TASK") or "gpu" in env.get("SLURM_TRES_PER_TASK", ""):
            return None  # Slurm has given each process its own
        local = _number(env, "SLURM_LOCALID") or 0
        counts = _tasks_per_node(env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE", ""))
        node = _number(env, "SLURM_NODEID") or 0
        count = counts[node] if node < len(counts) else 1
    share = gpus_seen() // count
    return tuple(range(local * share, (local + 1) * share)) if count > 1 and share else None


def gpus_seen() -> int:
    """GPUs that this process could use, without asking a driver."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([name for name in visible.split(",") if name.strip() and name.strip() != "-1"])
    return len([path for path in Path("/dev").glob("nvidia*") if path.name[6:].isdigit()])


_peers: Peers | None = None


def peers() -> Peers | None:
    """The watch over the other processes; None in a run of one."""
    return _peers


def hosts() -> list[str]:
    """Name of every process's host."""
    return [peer.host for peer in _peers.all] if _peers is not None else [socket.gethostname()]


def join(cluster: Cluster, silence_seconds: float = 30.0) -> Peers:
    """Starts `jax.distributed` and the watch; to be called before anything asks for devices.

    Args:
      cluster: where the others are.
      silence_seconds: after which a process without a sign of life counts as gone.

    If not all of them arrive in time, the process ends with status `EXIT_PEER`, for a supervisor to start it again.

    Raises:
      DistributedError: JAX refuses, such as because devices are in use already.
    """
    global _peers
    # Its handler would swallow SIGTERM; the loop has its own.
    jax.config.update("jax_enable_preemption_service", False)
    # JAX would abort the process with a stack trace.
    late = threading.Timer(_JOIN_SECONDS, _give_up_joining, [cluster])
    late.daemon = True
    late.start()
    try:
        jax.distributed.initialize(
            coordinator_address=cluster.coordinator,
            num_processes=cluster.num_processes,
            process_id=cluster.process_id,
            local_device_ids=cluster.devices,
            cluster_detection_method="deactivate",
            initialization_timeout=_JOIN_SECONDS + 60,
            heartbeat_timeout_seconds=int(silence_seconds) + _MARGIN_SECONDS,
            shutdown_timeout_seconds=_LEAVE_SECONDS,
        )
    except (RuntimeError, ValueError) as error:
        raise DistributedError(
            f"process {cluster.process_id} of {cluster.num_processes} (host {socket.gethostname()}, found by "
            f"{cluster.found_by}) could not join process 0 at {cluster.coordinator}: {error}"
        ) from error
    finally:
        late.cancel()
    _peers = Peers(_client(), cluster.process_id, cluster.num_processes, cluster.coordinator, silence_seconds)
    _peers.start()
    return _peers


def _give_up_joining(cluster: Cluster) -> None:
    here = cluster.process_id == 0 or reachable(cluster.coordinator)
    missing = "not all of the others came" if here else f"nothing answers at {cluster.coordinator}, where process 0 is"
    logger.error(
        "process %d of %d (host %s, found by %s) gives up after %d s: %s. Start all processes at about the same time, "
        "and let them reach that port",
        *(cluster.process_id, cluster.num_processes, socket.gethostname(), cluster.found_by, _JOIN_SECONDS, missing),
    )
    sys.stderr.flush()
    os._exit(EXIT_PEER)


def leave(status: int, why: str = "") -> None:
    """Ends this process's part in the run. With status 0 it waits for the others; otherwise it does not return.

    Args:
      status: exit status of the process.
      why: what the others are told.
    """
    global _peers
    if _peers is None:
        return
    if status:
        _peers.fail(why or f"status {status}")
        # A normal exit would wait for the others, who may be waiting for this process in a collective.
        logging.shutdown()
        os._exit(status)
    _peers.leave()
    jax.distributed.shutdown()
    _peers = None


def _client() -> Any:
    from jax._src import distributed as state  # its client has no public name

    return state.global_state.client


_calls = iter(range(1 << 62))  # the processes make the same calls in the same order, so that numbers name them


def barrier(seconds: float = 600.0) -> None:
    """Returns when every process is here; uses no device. Nothing in a run of one."""
    if _peers is not None:
        _client().wait_at_barrier(f"nsa_jax/barrier/{next(_calls)}", int(seconds * 1000))


def from_first(make: Callable[[], str], seconds: float = 600.0) -> str:
    """What `make` returns on process 0, on every process."""
    if _peers is None:
        return make()
    key = f"nsa_jax/first/{next(_calls)}"
    if _peers.process == 0:
        value = make()
        _client().key_value_set(key, value)
        return value
    return _client().blocking_key_value_get(key, int(seconds * 1000))


def first_alone(make: Callable[[], Any]) -> Any:
    """Calls `make` on process 0, and then on all others, for whom process 0 has done the work."""
    if _peers is not None and _peers.process != 0:
        barrier(_DATA_SECONDS)
    value = make()
    if _peers is not None and _peers.process == 0:
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
    if _peers is None:
        return
    first = json.loads(from_first(lambda: json.dumps(value)))
    mine = json.loads(json.dumps(value))
    wrong = [name for name in sorted({*first, *mine}) if first.get(name) != mine.get(name)]
    if wrong:
        listed = "; ".join(f"{name}: {mine.get(name)!r} here, {first.get(name)!r} there" for name in wrong[:8])
        message = f"{what} of process {_peers.process} (host {_peers.me.host}) differs from process 0's: {listed}"
        raise ConfigError([Problem("R050", "error", message, "start every process with the same command and versions")])


def check_same_run(config: ConfigDict, workdir: Path) -> None:
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


def find_cause(error: BaseException) -> None:
    """Collectives and checkpoints fail, in many ways, when a process is gone: gives the watch the time to say so.

    The watch then ends this process. Returns at once if there are no other processes or the error has another cause for
    sure, and after the time that a process takes to be missed if nobody is.
    """
    if _peers is None or not isinstance(error, Exception):
        return
    if isinstance(error, TrainingError) and error.guard != "checkpoint_write":
        return
    logger.warning("%s: looking for the cause in the other processes", type(error).__name__)
    _peers.wait_for_verdict()


def check_shared(directory: Path) -> None:
    """Every process must see the same directory: checkpoints are written into it by all.

    Raises:
      ConfigError: it is another one on this host.
    """
    if _peers is None:
        return
    token = from_first(lambda: uuid.uuid4().hex)
    path = directory / f".shared-{token}"
    if _peers.process == 0:
        path.touch()
    barrier()
    seen = path.exists()
    for _ in range(0 if seen else 20):  # network file systems tell late
        time.sleep(0.5)
        os.listdir(directory)
        if seen := path.exists():
            break
    if not seen:
        message = f"workdir {directory}: on host {_peers.me.host} it is another directory than on process 0's host"
        raise ConfigError(
            [Problem("R051", "error", message, "use a --workdir on a file system that all hosts share, the same path")]
        )
    barrier()
    if _peers.process == 0:
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
    from jax.experimental import multihost_utils

    return bool(multihost_utils.process_allgather(np.asarray(mine)).all())


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

    def __call__(self, mine: bool) -> int | None:
        """Votes; returns the index of a process that voted to stop `lag` calls ago, or None."""
        value = np.full(self._local, jax.process_index() + 1 if mine else 0, np.int32)
        self._votes.append(self._highest(jax.make_array_from_process_local_data(self._sharding, value)))
        if len(self._votes) <= self._lag:
            return None
        highest = int(self._votes.popleft())
        return highest - 1 if highest else None
