"""The simulated disk: pieces become durable in groups, and a whole version is published."""

from __future__ import annotations

from collections.abc import Callable

from paceline.relay.session.events import PiecesDurable, SessionEvent
from paceline.relay.session.extents import Extent, Extents
from paceline.simulate.clock import Clock
from paceline.simulate.hosts import Host
from paceline.simulate.scenario import Timing


class Disk:
    """Every host's disk. ``on_published`` is called when a version stands at its final path."""

    def __init__(
        self, clock: Clock, pieces: int, timing: Timing, tell: Callable[[Host, SessionEvent], None]
    ) -> None:
        self.violations: list[str] = []
        self.on_published: Callable[[Host], None] = lambda _host: None
        self._clock = clock
        self._pieces = pieces
        self._timing = timing
        self._tell = tell

    def commit_soon(self, host: Host) -> None:
        """Make what is verified durable with the next group, or now when nothing is missing."""
        full = host.have.count == self._pieces
        group_s = 0.0 if full else self._timing.group_s
        due_s = self._clock.now_s + group_s + self._timing.commit_s
        if host.commit_s is not None and host.commit_s <= due_s:
            return
        host.commit_s = due_s
        session = host.session
        ready = host.have.copy() if full else None

        def commit() -> None:
            if host.session is not session or host.commit_s != due_s or not host.serves:
                return
            host.commit_s = None
            self._commit(host, ready if ready is not None else host.have)

        self._clock.at(due_s, commit)

    def completed(self, host: Host) -> None:
        """Publish what the session says is complete."""
        if host.durable.count != self._pieces:
            lacking = self._pieces - host.durable.count
            self.violations.append(f"I1 {host.name} published with {lacking} pieces missing")
        host.complete = True
        self.publish_soon(host)

    def publish_soon(self, host: Host) -> None:
        """Show the version at its final path after the time that this takes."""
        session = host.session

        def published() -> None:
            if host.session is session and host.serves and host.published_s is None:
                host.published_s = self._clock.now_s
                self.on_published(host)

        self._clock.after(self._timing.publish_s, published)

    def _commit(self, host: Host, have: Extents) -> None:
        everything = Extent(0, self._pieces)
        for gap in list(host.durable.gaps(everything)):
            for run in list(have.common(gap)):
                host.durable.add(run)
                self._tell(host, PiecesDurable(run))
