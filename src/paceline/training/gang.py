"""The port through which ranks are launched: all together or none, ended together.

``paceline.fleet`` implements it on Dask, ``local`` with plain subprocesses; neither is known here.
A launcher gives each rank RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT, PACELINE_ATTEMPT
and the member's own environment, its input on standard input, and hands every JSON line that a rank
writes to ``on_event``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

OnLine = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class GangMember:
    """A rank to start: on which node, as what, with which standard input."""

    worker_id: str
    rank: int
    argv: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    input_json: str = ""


class GangOutcome(Protocol):
    """How a gang ended, as any launcher tells it."""

    @property
    def ok(self) -> bool: ...  # every rank ended with 0
    @property
    def exit_codes(self) -> Mapping[int, int | None]: ...  # by rank; None: lost with its node
    @property
    def failed_rank(self) -> int | None: ...
    @property
    def failed_worker(self) -> str | None: ...
    @property
    def reason(self) -> str: ...


class GangLauncher(Protocol):
    """Runs ranks."""

    def run_gang(
        self,
        members: Sequence[Any],
        *,
        on_event: OnLine | None,
        start_deadline_s: float,
        silence_deadline_s: float,
        attempt: int,
    ) -> GangOutcome:
        """Run one rank a member until all ended or one failed, and return how it ended."""


@dataclass(frozen=True, kw_only=True)
class GangResult:
    """How a gang ended."""

    ok: bool
    exit_codes: dict[int, int | None]
    failed_rank: int | None = None
    failed_worker: str | None = None
    reason: str = ""
    stderr_tail: str = ""
