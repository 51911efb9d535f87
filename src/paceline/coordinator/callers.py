"""The identity of the current call's sender, for the code that decides or commits its change.

The access middleware sets ``current_call`` before the routes run; the context variable also
reaches worker threads. From it come the audit event of a change, committed in the change's own
transaction (``with_audit_event``), and the checks that a worker's token acts for that worker only,
and a team's for that team.
No HTTP here.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import NoReturn

from paceline.coordinator.state import (
    Answer,
    Effect,
    EmitEvent,
    Save,
    SaveDeployment,
)
from paceline.errors import AccessDenied
from paceline.schemas import EventName, PurposeRule, Scope, TokenRecord, Worker

MAX_TEXT_CHARS = 200  # characters of each caller-chosen text in an audit event


@dataclass(frozen=True, kw_only=True, slots=True)
class Caller:
    """The owner of the token that a call presented, and what the token permits."""

    name: str
    token_id: str
    scopes: frozenset[Scope]  # included ones too
    worker_id: str | None = None  # the only worker that it may act for
    team: str | None = None  # the only team whose jobs it may submit and control
    project: str | None = None  # the only project, likewise
    admission: str = ""  # the token that its chain of renewals began with
    begins: bool = False  # its first use, which ends the token that it was issued to replace
    authority: str | None = None  # digest of the authorities that came with it

    @property
    def is_bound(self) -> bool:
        """Return whether the token is one team's or one project's."""
        return self.team is not None or self.project is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """One call in progress. ``what`` is the route, ``on`` the identifiers in its path."""

    caller: Caller | None  # None: not authenticated
    what: str
    address: str
    on: dict[str, str] = field(default_factory=dict)
    is_change: bool = True  # whether its changes get an audit event


current_call: ContextVar[Call | None] = ContextVar("paceline_call", default=None)


def current_caller() -> Caller:
    """Return the sender of the current call; raises AccessDenied where there is none."""
    call = current_call.get()
    if call is None or call.caller is None:
        raise AccessDenied("the call is not authenticated", wanted="Authorization: Bearer TOKEN")
    return call.caller


def require_worker(worker_id: str) -> None:
    """Raise AccessDenied where the caller may not act for ``worker_id``.

    Calls from no guarded port (tests, the simulator) may act for every worker.
    """
    call = current_call.get()
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


def owner_of(team: str, project: str) -> tuple[str, str]:
    """Return the team and project of what names these: where it names none, those that the caller's
    token is bound to. Raises AccessDenied where the token is bound to others."""
    caller = current_caller()
    team, project = team or caller.team or "default", project or caller.project or ""
    require_owner(team, project)
    return team, project


def require_owner(team: str, project: str) -> None:
    """Raise AccessDenied where the caller's token is bound to another team or project."""
    caller = current_caller()
    for kind, bound, got in (("team", caller.team, team), ("project", caller.project, project)):
        if bound is not None and bound != got:
            raise AccessDenied(
                f"the token is another {kind}'s",
                got=f"{kind} {got or 'none'}",
                wanted=f"{kind} {bound}",
            )


def refuse_own(what: str, where: str) -> NoReturn:
    """Raise AccessDenied: the caller submitted it, and the model's policy wants a second person."""
    raise AccessDenied(
        what,
        got=f"the token of {current_caller().name}",
        wanted="a token of scope approve of another person",
        where=where,
        do='The policy of the model demands it: gate.approval = "four-eyes".',
    )


def may_see(team: str, project: str) -> bool:
    """Return whether the caller's token is bound to no other team or project."""
    return sees(current_caller(), team, project)


def sees(caller: Caller, team: object, project: object) -> bool:
    """Return whether ``caller``'s token is bound to no other team or project."""
    return caller.team in (None, team) and caller.project in (None, project)


def with_audit_event(effects: Sequence[Effect], at: float) -> list[Effect]:
    """Return ``effects`` with an audit event of the change, where a caller made one."""
    call = current_call.get()
    if call is None or not call.is_change or all(isinstance(e, Answer) for e in effects):
        return list(effects)
    return [*effects, audit_event(call, EventName.CHANGE_ACCEPTED, "accepted", at, effects)]


def audit_event(
    call: Call, name: EventName, outcome: str, at: float, effects: Sequence[Effect] = ()
) -> EmitEvent:
    """Return the audit event of ``call``: who, what, on which identifiers, from where, outcome."""
    on = {key: value[:MAX_TEXT_CHARS] for key, value in call.on.items()}
    for each in effects:
        match each:
            case SaveDeployment(deployment):
                on.setdefault("deployment_id", deployment.deployment_id)
            case Save(Worker() as worker):
                on.setdefault("worker_id", worker.worker_id)
            case Save(TokenRecord() as token):
                on["token_id"] = token.token_id  # the last one is the one that was issued
                if token.worker_id is not None:
                    on["worker_id"] = token.worker_id
            case Save(PurposeRule() as rule):
                on |= {"rule_id": rule.rule_id, "purpose": rule.purpose, "reason": rule.reason}
                for key in ("data", "teams", "projects"):
                    on[key] = ", ".join(getattr(rule, key))[:MAX_TEXT_CHARS]
    data: dict[str, object] = {
        "who": call.caller.name if call.caller else "",
        "token_id": call.caller.token_id if call.caller else "",
        "what": call.what,
        "on": on,
        "address": call.address,
        "outcome": outcome,
    }
    return EmitEvent(name, at, on.get("deployment_id"), on.get("worker_id"), data)
