"""What a service is, as data: how to start it, how to tell that it is ready, how to stop it.

Flows, deployments and servers reach the supervisor only in this form; it imports none of them.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from paceline.wire.base import Name, Record


class Ready(Record):
    """How to tell that a service is ready.

    ``http``: a GET of ``url`` answers 2xx. ``port``: it listens on ``port``. ``file``: ``path``
    exists. ``exit``: it ended with 0 (a one-shot). ``alive``: it runs. Where ``port`` is known, the
    listener must also be the service's own process.
    """

    kind: Literal["http", "port", "file", "exit", "alive"] = "alive"
    url: str = ""
    authorization: str = ""  # "user:password" to ask with
    port: int = 0
    host: str = "127.0.0.1"  # where ``port`` is tried
    path: str = ""


class ServiceSpec(Record):
    """One process of an installation."""

    name: Name
    argv: tuple[str, ...] = Field(min_length=1)
    env: dict[str, str] = Field(default_factory=dict)
    cwd: str | None = None
    ready: Ready = Ready()
    after: tuple[Name, ...] = ()  # start only once these are ready
    blocking: bool = True  # `start` waits for it, and fails when it does not get ready
    stop_phase: int = 0  # lower stops earlier
    stop_grace_s: float = Field(default=5.0, ge=0)
    max_restarts: int = Field(default=5, ge=0)  # within RESTART_WINDOW_S; then it is given up


class Launch(Record):
    """What `start` hands to the supervisor process on its standard input."""

    profile: dict[str, object]
    only: tuple[Name, ...] | None = None  # of the embedded servers; None: all
    extra_services: tuple[ServiceSpec, ...] = ()


class StopReport(Record):
    """What `stop` found and did."""

    was_running: bool
    pid: int = 0
    seconds: float = 0.0
    forced: bool = False  # the supervisor did not end by itself in time
