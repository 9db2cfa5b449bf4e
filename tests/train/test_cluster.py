"""How a process finds the others, and how it notices that one is gone: without starting any."""

import json
import os
import socket
import threading
import time

import pytest

from nsa_jax.exit_status import EXIT_AGAIN, EXIT_CONFIG, EXIT_GUARD, EXIT_INTERRUPTED
from nsa_jax.train import processes
from nsa_jax.train.processes import peer_watch
from nsa_jax.train.processes.agreement import _flat
from nsa_jax.train.processes.cluster import Cluster, DistributedError, detect, devices_of, from_flags
from nsa_jax.train.processes.peer_watch import Peer, Peers, reachable

SLURM = {
    "SLURM_JOB_ID": "77", "SLURM_STEP_NODELIST": "gpu[003-004,009]", "SLURM_NTASKS": "3", "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0", "SLURM_NODEID": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x3)",
}  # fmt: skip
OMPI = {
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911", "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}  # fmt: skip
INDEXED = {
    "KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "1", "JAX_NUM_PROCESSES": "2",
    "JAX_COORDINATOR_ADDRESS": "nsa-0.nsa:12345",
}  # fmt: skip


@pytest.fixture
def variables(monkeypatch):
    """Sets exactly these variables among those that launchers use."""

    def setting(values):
        for name in list(os.environ):
            if name.startswith(
                ("SLURM_", "OMPI_", "JAX_COORD", "JAX_NUM", "JAX_PROCESS", "KUBERNETES", "JOB_", "CUDA_V")
            ):
                monkeypatch.delenv(name)
        for name, value in values.items():
            monkeypatch.setenv(name, value)

    return setting


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, None),
        (SLURM, Cluster("gpu003:61517", 3, 2, None, "Slurm")),
        (SLURM | {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}, None),
        (OMPI, Cluster("10.96.0.1:62624", 4, 3, (4, 5, 6, 7), "Open MPI")),
        (OMPI | SLURM, Cluster("10.96.0.1:62624", 4, 3, (4, 5, 6, 7), "Open MPI")),  # mpirun within a Slurm job
        (OMPI | {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"}, None),
        (INDEXED, Cluster("nsa-0.nsa:12345", 2, 1, None, "variables")),
        (INDEXED | {"JAX_NUM_PROCESSES": "1", "JOB_COMPLETION_INDEX": "0"}, None),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, None),  # a pod that is no part of an indexed job
    ],
)
def test_the_cluster_that_the_environment_speaks_of(variables, values, expected):
    variables({"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"} | values)
    assert detect() == expected


def test_a_launcher_that_does_not_say_where_process_0_is(variables):
    newer = {name: value for name, value in OMPI.items() if "uri" not in name}  # Open MPI 5
    variables(newer)
    with pytest.raises(DistributedError, match="mpirun -x JAX_COORDINATOR_ADDRESS=HOST:PORT|--nodistributed"):
        detect()
    variables(newer | {"JAX_COORDINATOR_ADDRESS": "node1:777", "CUDA_VISIBLE_DEVICES": ""})
    assert detect() == Cluster("node1:777", 4, 3, None, "Open MPI")


@pytest.mark.parametrize(
    ("launcher", "values", "expected"),
    [
        ("Slurm", SLURM, None),  # one process on a host takes all its GPUs
        ("Slurm", SLURM | {"SLURM_STEP_TASKS_PER_NODE": "4(x2),2", "SLURM_LOCALID": "1"}, (4, 5, 6, 7)),
        ("Slurm", SLURM | {"SLURM_STEP_TASKS_PER_NODE": "8(x3)", "SLURM_LOCALID": "7"}, (7,)),
        ("Slurm", SLURM | {"SLURM_STEP_TASKS_PER_NODE": "8(x3)", "SLURM_GPUS_PER_TASK": "1"}, None),
        ("Slurm", SLURM | {"SLURM_STEP_TASKS_PER_NODE": "8(x3)", "CUDA_VISIBLE_DEVICES": "5"}, None),  # bound already
        ("Slurm", SLURM | {"SLURM_STEP_TASKS_PER_NODE": "2(x3)", "CUDA_VISIBLE_DEVICES": ""}, None),
        ("Kubernetes", INDEXED, None),
    ],
)
def test_processes_of_a_host_share_its_gpus(variables, launcher, values, expected):
    variables({"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"} | values)
    assert devices_of(launcher) == expected


def test_flags(variables):
    variables({})
    assert from_flags("host:1", 2, 1, None) == Cluster("host:1", 2, 1)
    assert from_flags("host:1", 1, 0, None) is None
    assert from_flags(None, None, None, None) is None
    with pytest.raises(DistributedError, match="--process_id missing"):
        from_flags("host:1", 2, None, None)
    with pytest.raises(DistributedError, match="no cluster was detected"):
        from_flags(None, None, None, True)
    with pytest.raises(DistributedError, match="--nodistributed contradicts --coordinator"):
        from_flags("host:1", None, None, False)
    with pytest.raises(DistributedError, match="count from 0"):
        from_flags("host:1", 2, 2, None)
    with pytest.raises(DistributedError, match="must be HOST:PORT"):
        from_flags("host", 2, 1, None)
    variables(SLURM)
    assert from_flags(None, None, None, False) is None
    assert from_flags(None, None, None, True) == detect()


class Store:
    """The key-value store of the coordination service."""

    def __init__(self):
        self.values = {}
        self.broken = False

    def key_value_set(self, key, value, allow_overwrite=False):
        if self.broken:
            raise RuntimeError("UNAVAILABLE")
        self.values[key] = value

    def key_value_dir_get(self, prefix):
        return [(key, value) for key, value in self.values.items() if key.startswith(prefix)]


@pytest.fixture
def three():
    """Three processes that have exchanged a sign of life, the address of process 0's service, and the store."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        store, address = Store(), f"127.0.0.1:{server.getsockname()[1]}"
        made = [Peers(store, index, 3, address, seconds=8.0) for index in range(3)]
        for index, peer in enumerate(made):
            peer.me.host = f"node{index}"
            peer.beat(10 + index)
        for peer in made * 2:
            peer._exchange()
        yield made, store, server


def test_silent_processes_are_named_with_their_host_and_step(three):
    (first, second, third), store, _ = three
    now = time.monotonic()
    assert first.verdict(now + 7)[0] == second.verdict(now + 7)[0] == ""
    assert first.verdict(now + 99)[0] == ""  # it was itself suspended: nothing has been read since
    for _ in range(2):
        first._exchange()
        second._exchange()
    first.all[2].changed -= 9  # nothing from process 2 for 9 seconds
    message, lost = first.verdict(time.monotonic())
    assert [peer.process for peer in lost] == [2]
    assert message == (
        f"process 2 (host node2, pid {os.getpid()}) is gone: no sign of life for 9 s, last after step 12"
    )
    assert second.verdict(time.monotonic())[0] == ""


def test_a_failure_is_told_with_its_reason_and_an_end_is_none(three):
    (first, second, third), store, _ = three
    second.leave()
    first._exchange()
    first.all[1].changed -= 9  # it has left: silence is to be expected
    assert first.verdict(time.monotonic()) == ("", [])
    third.fail("TrainingError: step 7: loss nan")
    first._exchange()
    message, lost = first.verdict(time.monotonic() + 100)
    assert message.startswith("process 2 (host node2") and message.endswith("failed: TrainingError: step 7: loss nan")
    assert [peer.process for peer in lost] == [2]


@pytest.mark.parametrize("ending", [True, False])
def test_an_error_that_all_met_cuts_nobody_off(ending, three, monkeypatch):
    """Process 0 may still be uploading when the others have ended."""
    (first, _, third), *_ = three
    monkeypatch.setattr(first, "_grace", 0.2)
    ended = threading.Event()
    monkeypatch.setattr(first, "_end", lambda *_: (ended.set(), first._stop.set()))
    if ending:
        first.ending()
    third.fail("guard loss_floor")
    first._exchange()
    thread = threading.Thread(target=first._watch)
    thread.start()
    assert ended.wait(3) != ending
    first._stop.set()
    thread.join(10)
    assert not thread.is_alive() and ended.is_set() != ending


@pytest.mark.parametrize(
    ("lost", "status"),
    [
        (Peer(1, "h", state="failed", status=EXIT_GUARD), EXIT_GUARD),
        (Peer(1, "h", state="failed", status=EXIT_CONFIG), EXIT_CONFIG),
        (Peer(1, "h", state="failed", status=EXIT_INTERRUPTED), EXIT_INTERRUPTED),
        (Peer(1, "h", state="failed", status=EXIT_AGAIN), EXIT_AGAIN),
        (Peer(1, "h"), EXIT_AGAIN),
    ],
)
def test_a_fault_of_one_is_the_status_of_all(three, monkeypatch, lost, status):
    """srun returns the highest one: with 75 beside it a supervisor would start the same fault again."""
    ended = []
    monkeypatch.setattr(peer_watch.os, "_exit", ended.append)
    three[0][2]._end("of the test", [lost])
    assert ended == [status]


def test_a_coordinator_that_refuses_connections_is_gone(three):
    (first, second, third), store, server = three
    assert reachable(second._coordinator)
    server.close()
    assert not reachable(second._coordinator)
    second._refusals = 1
    assert second.verdict(time.monotonic())[0] == ""  # once may be a hiccup
    second._refusals = 2
    message, lost = second.verdict(time.monotonic())
    assert message.startswith("process 0 (host node0") and "nothing answers at 127.0.0.1:" in message
    assert [peer.process for peer in lost] == [0]


def test_a_coordinator_that_hangs_is_named_and_not_the_others(three):
    (first, second, third), store, _ = three
    store.broken = True
    second._exchange()
    message, lost = second.verdict(time.monotonic() + 9)
    assert message.startswith("process 0 (host node0") and "has not answered for 9 s" in message
    assert [peer.process for peer in lost] == [0]


def test_one_process_needs_no_others(tmp_path):
    assert processes.peers() is None and processes.hosts() == [socket.gethostname()]
    assert processes.from_first(lambda: "made") == "made" and processes.together(lambda: 3) == 3
    processes.barrier()
    processes.check_shared(tmp_path)
    processes.check_same("data", {"seed": 1})
    processes.leave(0)
    assert processes.all_agree(True) and not processes.all_agree(False)
    assert json.loads(json.dumps(_flat({"a": {"b": 1}, "c": 2}, "x"))) == {"x.a.b": 1, "x.c": 2}
