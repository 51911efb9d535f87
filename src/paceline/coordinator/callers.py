"""Who is calling, for whoever decides or commits while the call is in progress.

The guard before the routes says who it is (``acting``); it travels with the call, also into worker
threads. From it come the audit row of a change, committed in the change's own transaction
(``audited``), and the check that a worker speaks for itself only. It knows no HTTP.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field

from paceline.coordinator.state.messages import (
    Answer,
    Effect,
    KeepDeployment,
    KeepToken,
    KeepWorker,
    Observed,
)
from paceline.errors import AccessDenied
from paceline.schemas.access import Scope
from paceline.schemas.events import EventName

LONGEST = 200  # characters of anything a caller chose that goes into a row


@dataclass(frozen=True, kw_only=True, slots=True)
class Caller:
    """Whose token it is and what it opens."""

    name: str
    token_id: str
    scopes: frozenset[Scope]  # included ones too
    worker_id: str | None = None  # it speaks for this worker only
    admission: str = ""  # the token that its chain of renewals began with
    begins: bool = False  # it is used for the first time, and ends what it was issued in place of


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """One call in progress. ``what`` is the route, ``on`` what its path names."""

    caller: Caller | None  # None: nobody that is known
    what: str
    address: str
    on: dict[str, str] = field(default_factory=dict)
    is_change: bool = True  # whether what it changes gets an audit row


acting: ContextVar[Call | None] = ContextVar("paceline_call", default=None)


def caller() -> Caller:
    """Return whose call is in progress; raises AccessDenied where there is none."""
    call = acting.get()
    if call is None or call.caller is None:
        raise AccessDenied("nobody is known to be calling", wanted="Authorization: Bearer TOKEN")
    return call.caller


def require_worker(worker_id: str) -> None:
    """Raise AccessDenied where the caller may not speak for ``worker_id``.

    Calls that come from no guarded port (tests, the simulator) speak for everybody.
    """
    call = acting.get()
    if call is None or call.caller is None:
        return
    bound = call.caller.worker_id
    if bound is not None and bound != worker_id:
        raise AccessDenied(
            "the token is another worker's",
            got=worker_id,
            wanted=bound,
            where=call.what,
            do="Each agent uses the token that it joined with.",
        )


def audited(effects: Sequence[Effect], at: float) -> list[Effect]:
    """Return ``effects`` with the audit row of the change that they make, if a caller makes one."""
    call = acting.get()
    if call is None or not call.is_change or all(isinstance(e, Answer) for e in effects):
        return list(effects)
    return [*effects, change_row(call, EventName.CHANGE_ACCEPTED, "accepted", at, effects)]


def change_row(
    call: Call, name: EventName, outcome: str, at: float, effects: Sequence[Effect] = ()
) -> Observed:
    """Return the row of ``call``: who, what, on which id, from where, and the outcome."""
    on = {key: value[:LONGEST] for key, value in call.on.items()}
    for each in effects:
        match each:
            case KeepDeployment(deployment):
                on.setdefault("deployment_id", deployment.deployment_id)
            case KeepWorker(worker):
                on.setdefault("worker_id", worker.worker_id)
            case KeepToken(token):
                on["token_id"] = token.token_id  # the last one is the one that was made
    data: dict[str, object] = {
        "who": call.caller.name if call.caller else "",
        "token_id": call.caller.token_id if call.caller else "",
        "what": call.what,
        "on": on,
        "address": call.address,
        "outcome": outcome,
    }
    return Observed(name, at, on.get("deployment_id"), on.get("worker_id"), data)
