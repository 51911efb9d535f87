"""Running processes on nodes, and the embedded installation's supervisor.

``start``, ``stop`` and ``status`` run the servers of one state directory; ``Fleet`` starts agents
and processes on nodes, and holds nodes for a job. The one package that imports dask, and only when
a Fleet connects. It knows no training, no relay and no flow: what it runs is an argv.
"""

from paceline.fleet.client import Fleet
from paceline.fleet.installation import start, status, stop
from paceline.fleet.nodes import AgentInfo, Node, labels_of, node_names
from paceline.fleet.process import ProcessResult
from paceline.fleet.spec import Ready, ServiceSpec, StopReport
from paceline.wire.status import InstallationStatus, ServiceStatus

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
