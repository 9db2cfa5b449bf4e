"""Joining and leaving the other processes: `jax.distributed`, and the watch over them."""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
from typing import Any

import jax

from nsa_jax.exit_status import EXIT_AGAIN
from nsa_jax.train.processes.cluster import JOIN_SECONDS, Cluster, DistributedError
from nsa_jax.train.processes.peer_watch import Peers, reachable

logger = logging.getLogger("nsa_jax")

_LEAVE_SECONDS = 120  # for all processes to finish
_MARGIN_SECONDS = 30  # JAX's own heartbeat is the second line, after `Peers`


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

    If not all of them arrive in time, the process ends with status `EXIT_AGAIN`, for a supervisor to start it again.

    Raises:
      DistributedError: JAX refuses, such as because devices are in use already.
    """
    global _peers
    # Its handler would swallow SIGTERM; the loop has its own.
    jax.config.update("jax_enable_preemption_service", False)
    # JAX would abort the process with a stack trace.
    late = threading.Timer(JOIN_SECONDS, _give_up_joining, [cluster])
    late.daemon = True
    late.start()
    try:
        jax.distributed.initialize(
            coordinator_address=cluster.coordinator,
            num_processes=cluster.num_processes,
            process_id=cluster.process_id,
            local_device_ids=cluster.devices,
            cluster_detection_method="deactivate",
            initialization_timeout=JOIN_SECONDS + 60,
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
    _peers = Peers(client(), cluster.process_id, cluster.num_processes, cluster.coordinator, silence_seconds)
    _peers.start()
    return _peers


def _give_up_joining(cluster: Cluster) -> None:
    here = cluster.process_id == 0 or reachable(cluster.coordinator)
    missing = "not all of the others came" if here else f"nothing answers at {cluster.coordinator}, where process 0 is"
    logger.error(
        "process %d of %d (host %s, found by %s) gives up after %d s: %s. Start all processes at about the same time, "
        "and let them reach that port",
        *(cluster.process_id, cluster.num_processes, socket.gethostname(), cluster.found_by, JOIN_SECONDS, missing),
    )
    sys.stderr.flush()
    os._exit(EXIT_AGAIN)


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
        _peers.fail(why or f"status {status}", status)
        # A normal exit would wait for the others, who may be waiting for this process in a collective.
        logging.shutdown()
        os._exit(status)
    _peers.leave()
    jax.distributed.shutdown()
    _peers = None


def client() -> Any:
    from jax._src import distributed as state  # its client has no public name

    return state.global_state.client
