"""What clients asked for and were told, and whether what is there at the end can be true.

Every attempt is an invocation of its own. One that was acknowledged must be there exactly once; one
whose outcome is unknown (a timeout, a 503, a dead leader) at most once; one that was refused not at
all. Nothing here does I/O.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["create", "cancel", "register", "put", "beat"]
Outcome = Literal["acknowledged", "refused", "unknown"]


@dataclass(frozen=True, kw_only=True)
class Invocation:
    """One attempt: what was asked under which key, and what came back when."""

    kind: Kind
    key: str  # idempotency key, deployment id, worker id or input digest
    began_s: float
    ended_s: float
    outcome: Outcome
    value: int = 0  # register: the incarnation; put: the number written
    answer: str = ""  # create: the deployment id
    epoch: int = 0  # beat: the leader's


@dataclass(frozen=True, kw_only=True)
class Final:
    """What the cluster shows once everything has settled."""

    deployments: tuple[tuple[str, str, str], ...]  # (deployment id, key, status)
    incarnations: dict[str, int]
    ledger: dict[str, int]
    created: Counter[str] = field(default_factory=Counter)  # events that tell so, by deployment


class History:
    """Written by many threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._invocations: list[Invocation] = []

    def add(self, invocation: Invocation) -> None:
        """Record one attempt."""
        with self._lock:
            self._invocations.append(invocation)

    def all(self) -> list[Invocation]:
        """Return every attempt so far, in the order of their ends."""
        with self._lock:
            return sorted(self._invocations, key=lambda each: each.ended_s)

    def counts(self) -> dict[str, int]:
        """Return how many attempts had which outcome, by kind."""
        found = Counter(f"{each.kind} {each.outcome}" for each in self.all())
        return dict(sorted(found.items()))


def violations(history: list[Invocation], final: Final) -> list[str]:
    """Return what cannot be true, in words; empty where everything can."""
    return [
        *_creations(history, final),
        *_cancels(history, final),
        *_registers(history, final),
        *_puts(history, final),
        *_epochs(history),
    ]


def _creations(history: list[Invocation], final: Final) -> list[str]:
    found: list[str] = []
    there: dict[str, list[str]] = defaultdict(list)
    for deployment_id, key, _ in final.deployments:
        there[key].append(deployment_id)
    asked = _by_key(history, "create")
    for key, attempts in asked.items():
        acknowledged = {each.answer for each in attempts if each.outcome == "acknowledged"}
        possible = any(each.outcome != "refused" for each in attempts)
        held = there.get(key, [])
        if len(acknowledged) > 1:
            found.append(f"key {key} was answered with several: {sorted(acknowledged)}")
        if acknowledged and not held:
            found.append(f"key {key} was acknowledged and is lost: {sorted(acknowledged)}")
        if len(held) > 1:
            found.append(f"key {key} is there {len(held)} times: {held}")
        if acknowledged and held and acknowledged != set(held):
            found.append(f"key {key} is {held} and was answered with {sorted(acknowledged)}")
        if held and not possible:
            found.append(f"key {key} was refused and is there: {held}")
    found += [f"nobody asked for {held}" for key, held in there.items() if key not in asked]
    ids = [deployment_id for deployment_id, _, _ in final.deployments]
    if final.created:
        found += [
            f"{each} was told of {final.created[each]} times"
            for each in ids
            if final.created[each] != 1
        ]
        found += [
            f"{each} was told of and is not there" for each in final.created.keys() - set(ids)
        ]
    return found


def _cancels(history: list[Invocation], final: Final) -> list[str]:
    found = []
    asked = _by_key(history, "cancel")
    for deployment_id, _, status in final.deployments:
        outcomes = {each.outcome for each in asked.get(deployment_id, [])}
        if "acknowledged" in outcomes and status != "cancelled":
            found.append(f"{deployment_id} is {status} after its cancel was acknowledged")
        if status == "cancelled" and not outcomes & {"acknowledged", "unknown"}:
            found.append(f"{deployment_id} is cancelled and nobody asked for it")
    return found


def _registers(history: list[Invocation], final: Final) -> list[str]:
    found = []
    for worker_id, attempts in _by_key(history, "register").items():
        least = max((a.value for a in attempts if a.outcome == "acknowledged"), default=0)
        most = max((a.value for a in attempts if a.outcome != "refused"), default=0)
        held = final.incarnations.get(worker_id, 0)
        if not least <= held <= most:
            found.append(f"{worker_id} is incarnation {held}, which is not in {least}..{most}")
    return found


def _puts(history: list[Invocation], final: Final) -> list[str]:
    """One client writes a key, one attempt after the other, so their order is known."""
    found = []
    for key, attempts in _by_key(history, "put").items():
        attempts.sort(key=lambda each: each.began_s)
        acknowledged = [n for n, each in enumerate(attempts) if each.outcome == "acknowledged"]
        last = acknowledged[-1] if acknowledged else 0
        possible = {each.value for each in attempts[last:] if each.outcome != "refused"}
        held = final.ledger.get(key)
        if held is None and acknowledged:
            found.append(f"ledger {key} was acknowledged and is lost")
        if held is not None and held not in possible:
            found.append(f"ledger {key} is {held}, which is none of {sorted(possible)}")
    return found


def _epochs(history: list[Invocation]) -> list[str]:
    """Whoever asks after an answer of epoch N ended must not be answered by an older leader."""
    found = []
    beats = [each for each in history if each.kind == "beat" and each.outcome == "acknowledged"]
    ends = sorted(beats, key=lambda each: each.ended_s)
    newest, position = 0, 0
    for beat in sorted(beats, key=lambda each: each.began_s):
        while position < len(ends) and ends[position].ended_s < beat.began_s:
            newest = max(newest, ends[position].epoch)
            position += 1
        if beat.epoch < newest:
            found.append(f"{beat.key} was answered by epoch {beat.epoch} after epoch {newest}")
    return found


def _by_key(history: list[Invocation], kind: Kind) -> dict[str, list[Invocation]]:
    found: dict[str, list[Invocation]] = defaultdict(list)
    for each in history:
        if each.kind == kind:
            found[each.key].append(each)
    return found
