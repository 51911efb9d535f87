"""What one replica knows of who leads: itself, another, or nobody that it heard of lately.

Read by every call without a lock, changed by ``coordinator`` with its lock held. It asks nobody.
"""

from __future__ import annotations

from collections.abc import Callable

from paceline.coordinator.stores.contracts import Term
from paceline.errors import NotLeading, ServiceUnavailable

CUT_OFF_S = 10.0  # a standby that heard nothing of the store for so long answers nothing any more


class Role:
    """``is_leading`` is the store's local word on a term; ``monotonic`` the process's clock."""

    def __init__(self, is_leading: Callable[[Term], bool], monotonic: Callable[[], float]) -> None:
        self._is_leading, self._monotonic = is_leading, monotonic
        self.held: Term | None = None  # from its election until this replica steps down
        self._other: Term | None = None  # who leads otherwise, as the store said last
        self._heard_s: float | None = None  # when the store said so
        self.epoch = 0  # the newest one seen

    def lead(self, term: Term) -> None:
        """Take note of this replica's election."""
        self.held, self._other, self.epoch = term, None, term.epoch

    def drop(self) -> None:
        """Take note that this replica leads no more; who does, it has yet to hear."""
        self.held = self._other = None

    def heard(self, leader: Term | None) -> None:
        """Take note of who leads, as the store has it now."""
        self._other, self._heard_s = leader, self._monotonic()
        self.epoch = self.newest(leader)

    def newest(self, leader: Term | None) -> int:
        """Return the newest epoch, that of ``leader`` included."""
        return max(self.epoch, leader.epoch if leader else 0)

    @property
    def term(self) -> Term | None:
        """Return this replica's term while it certainly leads."""
        term = self.held
        return term if term is not None and self._is_leading(term) else None

    @property
    def leader(self) -> Term | None:
        """Return who leads as far as this replica knows; None where it knows nobody."""
        if (term := self.term) is not None:
            return term
        if self.held is not None:
            return None  # its lease may have run out: somebody else may lead, it knows not who
        return None if self.is_cut_off else self._other

    @property
    def is_cut_off(self) -> bool:
        """Return whether the store was silent for so long that a standby may be out of date."""
        return self._heard_s is None or self._monotonic() - self._heard_s > CUT_OFF_S

    def not_leading(self) -> NotLeading:
        """Return what to tell whoever wants something decided here."""
        leader = self.leader
        return NotLeading(
            "this replica does not lead",
            got=f"the leader is {leader.url}" if leader else "nobody leads now",
            do="Ask the leader, or call again in a second.",
        )

    def require_heard(self, where: str) -> None:
        """Raise ServiceUnavailable where a standby is cut off from the store."""
        if self.is_cut_off:
            raise ServiceUnavailable(
                "this replica is cut off from the store and may be out of date",
                wanted=f"news of it within {CUT_OFF_S:.0f} s",
                where=where,
                do="Ask another replica.",
            )
