"""Several processes: how they find each other, watch each other, and agree."""

from nsa_jax.train.processes.agreement import (
    all_agree,
    all_end,
    barrier,
    check_devices,
    check_same,
    check_same_run,
    check_shared,
    first_alone,
    from_first,
    together,
)
from nsa_jax.train.processes.cluster import Cluster, DistributedError, detect, from_flags
from nsa_jax.train.processes.session import hosts, join, leave, peers

__all__ = [
    "Cluster",
    "DistributedError",
    "all_agree",
    "all_end",
    "barrier",
    "check_devices",
    "check_same",
    "check_same_run",
    "check_shared",
    "detect",
    "first_alone",
    "from_first",
    "from_flags",
    "hosts",
    "join",
    "leave",
    "peers",
    "together",
]
