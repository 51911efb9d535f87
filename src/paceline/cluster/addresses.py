"""Port reservations, and nodes: names, labels, machines.

A reservation is a socket that is bound but never listens, with SO_REUSEADDR. The kernel then does
not assign the port to a process that binds port 0, but a server that names the port (and sets
SO_REUSEADDR, as every server here does) can listen on it. A reservation is held for a whole run, so
a restarted server gets its port again.
"""

from __future__ import annotations

import contextlib
import errno
import socket

from paceline import __version__
from paceline.config import Profile, load_runtime, this_node
from paceline.errors import PortInUse
from paceline.extras import installed_extras
from paceline.relay import read_inventory
from paceline.schemas import Inventory, Labels, Record


def reserve_port(host: str, port: int = 0, *, purpose: str = "a server") -> socket.socket:
    """Return a socket that reserves ``port`` (any free one for 0) until it is closed.

    Raises PortInUse.
    """
    reservation = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        reservation.bind((host, port))
    except OSError as error:
        reservation.close()
        if error.errno not in (errno.EADDRINUSE, errno.EACCES):
            raise
        raise PortInUse(
            f"port for {purpose} is taken",
            got=_holder(port) if error.errno == errno.EADDRINUSE else "not permitted",
            wanted=f"{port} free",
            where=f"{host}:{port}",
            do="Stop what listens there, or ask for another port (0 takes any free one).",
        ) from error
    return reservation


def accepts(host: str, port: int, timeout_s: float) -> bool:
    """Return whether a connection to ``port`` is accepted."""
    with contextlib.suppress(OSError, OverflowError):
        socket.create_connection((host, port), timeout=timeout_s).close()
        return True
    return False


def listens(pids: list[int], port: int) -> bool:
    """Return whether one of ``pids`` holds the socket that listens on ``port``."""
    import psutil

    for pid in pids:
        with contextlib.suppress(psutil.Error):
            for each in psutil.Process(pid).net_connections(kind="tcp"):
                if each.status == psutil.CONN_LISTEN and each.laddr.port == port:
                    return True
    return False


def _holder(port: int) -> str:
    import psutil

    with contextlib.suppress(psutil.Error):
        for each in psutil.net_connections(kind="tcp"):
            if each.status == psutil.CONN_LISTEN and each.laddr.port == port and each.pid:
                return f"process {each.pid} ({psutil.Process(each.pid).name()}) listening"
    return "another process listening"


DRIVER_S = 30.0  # the GPUs' driver, loaded at its first use, answers within it

CONTROL_THREADS = 4  # threads of a Dask worker that only start, watch and stop processes


class Machine(Inventory):
    """What a node's worker reports about its machine."""

    version: str  # of Paceline
    labels: Labels
    extras: tuple[str, ...] = ()  # of Paceline, installed there


class Node(Record):
    """One machine of the fleet that can be reached now."""

    worker_id: str
    address: str  # of its Dask worker; changes when the worker restarts
    machine: Machine

    @property
    def labels(self) -> Labels:
        """Return where it is."""
        return self.machine.labels

    @property
    def accelerator_count(self) -> int:
        """Return how many accelerators ranks may use, all of one kind."""
        return sum(each.count for each in self.machine.like_cards)


class AgentInfo(Record):
    """A node's agent, as it announced itself."""

    worker_id: str
    pid: int
    address: str
    incarnation: int
    adopted: bool  # it ran already; the installation must not stop it


def by_number(name: str) -> tuple[str, int]:
    """Return a sort key that puts node-2 before node-10."""
    head, _, tail = name.rpartition("-")
    return (head, int(tail)) if tail.isdigit() else (name, 0)


def node_names(profile: Profile) -> list[str]:
    """Return the worker ids of the nodes that ``kind = "local"`` starts."""
    return [f"node-{index}" for index in range(profile.cluster.nodes)]


def labels_of(profile: Profile, worker_id: str) -> Labels:
    """Return the host and rack of node ``worker_id``; racks are contiguous blocks of nodes."""
    cluster = profile.cluster
    index = node_names(profile).index(worker_id)
    racks = min(cluster.racks, cluster.nodes)
    return Labels(host=worker_id, rack=f"rack-{index * racks // cluster.nodes}")


def machine() -> Machine:
    """Return this machine, within the limits of this process's cgroup."""
    node = this_node()
    return Machine(
        version=__version__,
        labels=Labels.model_validate(dict(node.labels)),
        extras=tuple(installed_extras()),
        **dict(read_inventory(load_runtime(node.state_dir), DRIVER_S)),
    )
