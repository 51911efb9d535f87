"""Names and labels of a profile's nodes: the same wherever they are computed."""

from __future__ import annotations

from paceline.profile import Profile
from paceline.wire.base import Record
from paceline.wire.plan import Labels

CONTROL_THREADS = 4  # threads of a Dask worker that only start, watch and stop processes


class Node(Record):
    """One machine of the fleet that can be reached now."""

    worker_id: str
    address: str  # of its Dask worker; changes when that restarts
    labels: Labels


class AgentInfo(Record):
    """A node's agent, as it announced itself."""

    worker_id: str
    pid: int
    address: str
    incarnation: int
    adopted: bool  # it ran before and is not ours to stop


def node_names(profile: Profile) -> list[str]:
    """Return the worker ids of a profile's nodes."""
    return [f"node-{index}" for index in range(profile.cluster.nodes)]


def labels_of(profile: Profile, worker_id: str) -> Labels:
    """Return where node ``worker_id`` stands: racks are contiguous blocks of nodes."""
    cluster = profile.cluster
    index = node_names(profile).index(worker_id)
    racks = min(cluster.racks, cluster.nodes)
    return Labels(host=worker_id, rack=f"rack-{index * racks // cluster.nodes}")
