"""A deployment's internal state that survives a restart, beyond its public record."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Annotated

from pydantic import Field, TypeAdapter

from paceline.schemas import Failure, SwitchKind, SwitchPhase


@dataclass(frozen=True, kw_only=True, slots=True)
class Switch:
    """The newest requested switch of a deployment: to its version, or back from it."""

    kind: SwitchKind
    phase: SwitchPhase
    since_s: float  # monotonic; start of the phase
    failure: Failure | None = None
    late: bool = False  # reported that the quorum did not switch in time
    missing: tuple[str, ...] = ()  # workers that get the command when they return

    @property
    def open(self) -> bool:
        return self.phase in (SwitchPhase.PREPARING, SwitchPhase.SWITCHING)


@dataclass(frozen=True, kw_only=True, slots=True)
class PersistedState:
    """Times are monotonic, of the machine that stored them; see ``rebased``."""

    created_s: float
    kept_s: float | None = None  # when this was stored
    seed: int = 0
    planned_s: float | None = None
    done_s: float | None = None  # the latest verified rename so far
    closed_s: float | None = None  # when it became final
    # Origin bytes by agent process: a restarted process counts from zero again.
    spent: dict[str, int] = field(default_factory=dict)
    # By agent process too: what a lost one may have read after its last report.
    # (Stored as "untold" since 0.1, so that replicas of two versions read each other's records.)
    unreported: Annotated[dict[str, int], Field(alias="untold")] = field(default_factory=dict)
    extra_bytes: int = 0  # beyond the origin budget, granted by an operator
    failures: dict[str, Failure] = field(default_factory=dict)  # by worker, as reported
    auto: bool = False  # the topology was chosen here, not by the caller
    order: tuple[str, ...] = ()  # of the line, where the plan lacks lost workers
    demoted: dict[str, str] = field(default_factory=dict)  # judged standings, by worker
    late: dict[str, int] = field(default_factory=dict)  # pieces missing when a worker returned
    allow_older: bool = False  # than the active version
    # Sequence number among all activations: a model's highest is active on a worker, and the
    # next is what a rollback returns to. 0: never activated, or rolled back.
    number: int = 0
    switch: Switch | None = None

    def rebased(self, now_s: float) -> PersistedState:
        """Return this for another monotonic clock, which now shows ``now_s``.

        Durations continue from their stored value; the time in between is not counted.
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
        return _JSON.dump_json(self, by_alias=True).decode()

    @classmethod
    def from_json(cls, text: str) -> PersistedState:
        """Return what ``to_json`` wrote; ignores fields of older or newer versions."""
        return _JSON.validate_json(text)


_JSON = TypeAdapter(PersistedState)
