"""Callers of the peer port: those who have not shown yet who they are, and those who have.

Anybody may connect. Who is silent, or speaks slowly, must not take a place from a peer: there are
places of their own for callers, and where those are full the one that has waited longest makes
room. A peer needs milliseconds to show who it is.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

from paceline.errors import ServiceUnavailable

PLACES = 128  # as many as streams, so that a whole fleet may call at once
WELCOME_S = 3.0  # from the connection to the proof
PEER_STREAMS = 32  # of one peer at once: it needs one for each model, and one that just broke

Caller = TypeVar("Caller")


class Lobby(Generic[Caller]):
    """``turn_away(caller)`` ends one, from any thread; whoever serves it notices."""

    def __init__(self, turn_away: Callable[[Caller], None]) -> None:
        self._turn_away = turn_away
        self._lock = threading.Lock()
        self._due_s: dict[Caller, float] = {}

    def enter(self, caller: Caller, now_s: float) -> None:
        """Take ``caller`` in, in place of the one that came first where all places are taken."""
        with self._lock:
            while len(self._due_s) >= PLACES:
                self._turn_away_first()
            self._due_s[caller] = now_s + WELCOME_S

    def replace(self, caller: Caller, by: Caller) -> None:
        """Call ``caller`` otherwise from here on; one that is gone stays gone."""
        with self._lock:
            due_s = self._due_s.pop(caller, None)
            if due_s is None:
                self._turn_away(by)
            else:
                self._due_s[by] = due_s

    def leave(self, caller: Caller) -> bool:
        """Let ``caller`` go on; return False where it was turned away meanwhile."""
        with self._lock:
            return self._due_s.pop(caller, None) is not None

    def sweep(self, now_s: float) -> float | None:
        """Turn away who is late; return when to look again, None where nobody waits."""
        with self._lock:
            for caller, due_s in list(self._due_s.items()):
                if due_s <= now_s:
                    del self._due_s[caller]
                    self._turn_away(caller)
            return min(self._due_s.values(), default=None)

    def close(self) -> None:
        """Turn everybody away."""
        with self._lock:
            while self._due_s:
                self._turn_away_first()

    def _turn_away_first(self) -> None:
        first = min(self._due_s, key=self._due_s.__getitem__)
        del self._due_s[first]
        self._turn_away(first)


class Seats:
    """How many streams are served: ``PEER_STREAMS`` of one peer at most, so that no peer takes the
    places of the others.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._taken: Counter[str] = Counter()

    @contextmanager
    def taken(self, peer: str, most: int, *, shared: bool = False) -> Iterator[None]:
        """Hold a place for a stream of ``peer`` among ``most``; raises ServiceUnavailable.

        ``shared`` is a name that several peers go by: only the total is bounded.
        """
        with self._lock:
            if self._taken.total() >= most:
                raise ServiceUnavailable("too many streams", got=most)
            if not shared and self._taken[peer] >= PEER_STREAMS:
                raise ServiceUnavailable(
                    "too many streams of one peer",
                    got=PEER_STREAMS + 1,
                    wanted=f"at most {PEER_STREAMS}",
                    where=peer,
                    do="Close streams that are not used.",
                )
            self._taken[peer] += 1
        try:
            yield
        finally:
            with self._lock:
                self._taken[peer] -= 1
                if not self._taken[peer]:
                    del self._taken[peer]
