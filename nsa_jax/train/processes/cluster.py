"""How a process finds the others of its run.

How a process learns of the others, the first that applies:

  flags        --coordinator=HOST:PORT --num_processes=N --process_id=I
  variables    JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID (or JOB_COMPLETION_INDEX)
  a launcher   Open MPI, Slurm or an indexed Kubernetes job, as JAX itself detects them

A launcher that runs a single process, and no launcher, leave everything as it is without this module.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

JOIN_SECONDS = 300  # for all processes to arrive


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
                timeout_secs=JOIN_SECONDS, override_coordinator_port=os.environ.get("JAX_COORDINATOR_PORT")
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
