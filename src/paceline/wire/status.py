"""How an installation does, as ``paceline status --json`` prints it: servers, replicas, fleet."""

from __future__ import annotations

from typing import Literal

from paceline.wire.base import Record, Text
from paceline.wire.stream import DeploymentMoment, WorkerMoment


class ServiceStatus(Record):
    """How one service does."""

    name: str
    state: Literal["waiting", "starting", "ready", "done", "restarting", "failed", "stopped"]
    pid: int = 0  # of the service's process
    session: int = 0  # of its guard, which leads the session
    restarts: int = 0
    ready_s: float | None = None  # from its own start
    rss_bytes: int = 0
    processes: int = 0
    log: str = ""
    problem: Text = ""


class InstallationStatus(Record):
    """How a state directory's installation does."""

    running: bool
    ready: bool = False
    pid: int = 0  # of the supervisor
    started_at: float = 0.0  # seconds since the Unix epoch
    ready_s: float | None = (
        None  # from the start of the supervisor until all blocking services were ready
    )
    services: tuple[ServiceStatus, ...] = ()
    rss_bytes: int = 0
    problem: Text = ""


class ReplicaStatus(Record):
    """One replica of the coordinator."""

    url: str
    answers: bool
    leads: bool = False
    leader_url: str | None = None  # as this replica knows it
    epoch: int = 0
    problem: Text = ""


class StatusReport(InstallationStatus):
    """The servers of this machine, and the fleet as the coordinator's replicas know it."""

    replicas: tuple[ReplicaStatus, ...] = ()
    leader_url: str | None = None
    workers: tuple[WorkerMoment, ...] = ()
    deployments: tuple[DeploymentMoment, ...] = ()  # in flight and the newest, without their parts


class Changed(Record):
    """What ``activate``, ``rollback`` (of a deployment) and ``cancel`` did."""

    status: Literal["switched", "cancelled"]
    deployment_id: str
    workers: int = 0  # that switched
    waiting: tuple[str, ...] = ()  # workers that are told when they return
    seconds: float = 0.0
