"""What a deployment remembers across a restart or a change of leaders beyond its public record."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from paceline.schemas.calls import SwitchKind, SwitchPhase
from paceline.schemas.records import Failure


@dataclass(frozen=True, kw_only=True, slots=True)
class Switch:
    """The newest switch that was asked of a deployment: to its version, or back from it."""

    kind: SwitchKind
    phase: SwitchPhase
    since_s: float  # monotonic, of the phase
    failure: Failure | None = None
    late: bool = False  # it was told that the quorum has not switched in time
    missing: tuple[str, ...] = ()  # workers that are to be told when they return

    @property
    def open(self) -> bool:
        """Return whether it is still under way."""
        return self.phase in (SwitchPhase.PREPARING, SwitchPhase.SWITCHING)


@dataclass(frozen=True, kw_only=True, slots=True)
class Memo:
    """Times are of the monotonic clock of the machine that kept them; see ``rebased``."""

    created_s: float
    kept_s: float | None = None  # when this was kept
    seed: int = 0
    planned_s: float | None = None
    done_s: float | None = None  # the last verified rename seen so far
    closed_s: float | None = None  # it became final
    # Origin bytes by agent process: a restarted one counts from zero again.
    spent: dict[str, int] = field(default_factory=dict)
    # By agent process too: what one that is gone may have read after its last word.
    untold: dict[str, int] = field(default_factory=dict)
    extra_bytes: int = 0  # that an operator lets it read from the origin beyond the fuse
    failures: dict[str, Failure] = field(default_factory=dict)  # by worker, as they reported
    auto: bool = False  # the topology was chosen here, not asked for
    order: tuple[str, ...] = ()  # of the line, where the plan lacks some who are gone
    demoted: dict[str, str] = field(default_factory=dict)  # standings that were judged, by worker
    late: dict[str, int] = field(default_factory=dict)  # pieces missing when a worker came back
    allow_older: bool = False  # than the active version
    # Its place among all activations: the highest of a model is active on a worker, and the next
    # is what a rollback returns to. 0: never activated, or rolled back.
    number: int = 0
    switch: Switch | None = None

    def rebased(self, now_s: float) -> Memo:
        """Return this for a monotonic clock that is another one, and shows ``now_s``.

        Durations go on from where they were when this was kept; nobody counted in between.
        """
        if self.kept_s is None:
            planned_s = None if self.planned_s is None else now_s
            return replace(self, created_s=now_s, planned_s=planned_s, done_s=None)
        shift_s = now_s - self.kept_s

        def moved(time_s: float | None) -> float | None:
            return None if time_s is None else time_s + shift_s

        switch = self.switch and replace(self.switch, since_s=self.switch.since_s + shift_s)
        return replace(
            self,
            created_s=self.created_s + shift_s,
            kept_s=now_s,
            planned_s=moved(self.planned_s),
            done_s=moved(self.done_s),
            closed_s=moved(self.closed_s),
            switch=switch,
        )

    def to_json(self) -> str:
        """Return this as the stores keep it."""
        raw = asdict(self)
        raw["failures"] = {name: failure.model_dump() for name, failure in self.failures.items()}
        if self.switch is not None:
            failure = self.switch.failure
            raw["switch"]["failure"] = None if failure is None else failure.model_dump()
        return json.dumps(raw, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Memo:
        """Return what ``to_json`` wrote; fields of an older or newer Paceline are passed over."""
        known = {each.name for each in fields(cls)}
        raw: dict[str, Any] = {k: v for k, v in json.loads(text).items() if k in known}
        raw["failures"] = {
            name: Failure.model_validate(each) for name, each in raw.get("failures", {}).items()
        }
        raw["order"] = tuple(raw.get("order", ()))
        switch = raw.get("switch")
        if switch is not None:
            failure = switch.pop("failure", None)
            raw["switch"] = Switch(
                kind=SwitchKind(switch.pop("kind")),
                phase=SwitchPhase(switch.pop("phase")),
                failure=None if failure is None else Failure.model_validate(failure),
                missing=tuple(switch.pop("missing")),
                **switch,
            )
        return cls(**raw)
