"""The pieces that one reader of a model has requested and has not been sent yet.

Requests are served in the order in which they arrive; a piece that is not verified when its turn
comes is *parked*, and queued again when it is verified. Each piece is in one place: in the queue or
parked. Adding a request, taking the next run and verifying a piece each take logarithmic time in
the number of runs, whatever a peer sends, and a long queue of single pieces is sorted into runs. It
does not depend on sockets; ``Staging`` owns it and its lock.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from paceline.relay.protocol import Extent, Extents

QUEUED = 4096  # runs in the queue, before neighbours in it are joined


class RequestQueue:
    """The requests of one reader. ``verified`` is the model's set; ``changed`` shares its lock."""

    def __init__(
        self, verified: Extents, changed: threading.Condition, is_over: Callable[[], bool]
    ) -> None:
        self._verified, self._changed, self._is_over = verified, changed, is_over
        self._wanted = Extents()  # requested and not sent: queued or parked
        self._parked = Extents()  # of these, not verified when last checked
        self._queue: deque[Extent] = deque()
        self._join_at = QUEUED

    def __bool__(self) -> bool:
        return bool(self._wanted)

    @property
    def runs(self) -> int:
        """Return how many separate runs of pieces are waiting."""
        return self._wanted.runs

    def add(self, extent: Extent) -> None:
        """Queue the pieces of ``extent`` that are not waiting already."""
        with self._changed:
            for new in list(self._wanted.gaps(extent)):
                self._wanted.add(new)
                self._enqueue(new)

    def next(self, most: int, wait_s: float) -> Extent | None:
        """Take up to ``most`` verified pieces; waits up to ``wait_s`` until there are some."""
        with self._changed:
            run = self._take(most)
            if run is None and not self._is_over():
                self._changed.wait_for(lambda: self._queue or self._is_over(), wait_s)
                run = self._take(most)
            return run

    def became_verified(self, extent: Extent) -> None:
        """Queue the parked pieces of ``extent``; with the lock held."""
        if not self._parked:
            return
        for run in list(self._parked.common(extent)):
            self._parked.remove(run)
            self._enqueue(run)
            self._changed.notify()

    def wake(self) -> None:
        """Have a waiting ``next`` return; with the lock held."""
        self._changed.notify()

    def _enqueue(self, run: Extent) -> None:
        if self._queue and self._queue[-1].stop == run.first:  # as if requested at once
            self._queue[-1] = Extent(self._queue[-1].first, run.stop)
        else:
            self._queue.append(run)
        if len(self._queue) > self._join_at:
            self._queue = deque(Extents(self._queue))
            self._join_at = max(QUEUED, 2 * len(self._queue))

    def _take(self, most: int) -> Extent | None:
        while self._queue:
            first, stop = asked = self._queue.popleft()
            held = next(self._verified.common(asked), None)
            self._parked.add(Extent(first, stop if held is None else held.first))
            if held is None:
                continue
            run = Extent(held.first, min(held.stop, held.first + most))
            if run.stop < stop:
                self._queue.appendleft(Extent(run.stop, stop))
            self._wanted.remove(run)
            return run
        return None
