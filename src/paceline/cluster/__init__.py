"""Running processes on nodes, and the embedded installation's supervisor.

``start``, ``stop`` and ``status`` run the servers of one state directory; ``Fleet``
starts agents and processes on nodes, and holds nodes for a job. This is the one package that
imports dask, and only when a Fleet connects. It does not import training, the relay or flows: it
runs an argv.
"""

from paceline.cluster.addresses import AgentInfo, Node, labels_of, node_names
from paceline.cluster.client import Fleet
from paceline.cluster.held_nodes import ProcessResult
from paceline.cluster.installation import start, status, stop
from paceline.cluster.service import Ready, ServiceSpec, StopReport
from paceline.schemas.command_results import InstallationStatus, ServiceStatus

__all__ = [
    "AgentInfo",
    "Fleet",
    "InstallationStatus",
    "Node",
    "ProcessResult",
    "Ready",
    "ServiceSpec",
    "ServiceStatus",
    "StopReport",
    "labels_of",
    "node_names",
    "start",
    "status",
    "stop",
]
