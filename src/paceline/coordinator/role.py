"""Which replica leads, by this replica's last read of the store: itself, another, or none.

Calls read it without a lock; ``coordinator`` changes it while it holds its lock. No I/O.
"""

from __future__ import annotations

from collections.abc import Callable

from paceline.coordinator.stores import Term
from paceline.errors import NotLeading, ServiceUnavailable

STALE_READ_S = 10.0  # a standby that has not read the store for this long refuses reads


class Role:
    """This replica's term, or the leader that it read last.

    ``is_leading`` is the store's local lease check; ``monotonic`` is the process's clock.
    """

    def __init__(self, is_leading: Callable[[Term], bool], monotonic: Callable[[], float]) -> None:
        self._is_leading, self._monotonic = is_leading, monotonic
        self.own_term: Term | None = None  # from this replica's election until it steps down
        self._other: Term | None = None  # another replica that leads, as last read from the store
        self._last_read_s: float | None = None  # when the store was last read
        self.epoch = 0  # the newest epoch seen

    def lead(self, term: Term) -> None:
        self.own_term, self._other, self.epoch = term, None, term.epoch

    def step_down(self) -> None:
        """Record that this replica no longer leads; the new leader is read later."""
        self.own_term = self._other = None

    def observed_leader(self, leader: Term | None) -> None:
        """Record who leads, as just read from the store."""
        self._other, self._last_read_s = leader, self._monotonic()
        self.epoch = self.newest(leader)

    def newest(self, leader: Term | None) -> int:
        """Return the newest epoch seen, that of ``leader`` included."""
        return max(self.epoch, leader.epoch if leader else 0)

    @property
    def term(self) -> Term | None:
        """Return this replica's term while it certainly leads."""
        term = self.own_term
        return term if term is not None and self._is_leading(term) else None

    @property
    def leader(self) -> Term | None:
        """Return the leader that this replica read last; None where it has no current one."""
        if (term := self.term) is not None:
            return term
        if self.own_term is not None:
            return None  # its lease may have expired, and another leader was not read yet
        return None if self.is_cut_off else self._other

    @property
    def is_cut_off(self) -> bool:
        """Return whether the last read of the store is so old that a standby may be out of date."""
        return self._last_read_s is None or self._monotonic() - self._last_read_s > STALE_READ_S

    def not_leading(self) -> NotLeading:
        """Return the error for a call that only the leader may decide."""
        leader = self.leader
        return NotLeading(
            "this replica does not lead",
            got=f"the leader is {leader.url}" if leader else "no replica leads now",
            do="Ask the leader, or call again in a second.",
        )

    def require_current(self, where: str) -> None:
        """Raise ServiceUnavailable where a standby's last read of the store is too old."""
        if self.is_cut_off:
            raise ServiceUnavailable(
                "this replica is cut off from the store and may be out of date",
                wanted=f"a read of it within {STALE_READ_S:.0f} s",
                where=where,
                do="Ask another replica.",
            )
