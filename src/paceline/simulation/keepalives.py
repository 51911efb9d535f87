"""Signs of life: what keepalives and arriving bytes tell sessions of their sources.

While bytes flow a session is told so once, until further notice; that spares a large fleet most of
its events.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from paceline.relay.protocol.events import SessionEvent, SourceAlive
from paceline.relay.protocol.limits import SessionLimits
from paceline.simulation.coalescing import PAID
from paceline.simulation.hosts import Flow, Host
from paceline.simulation.network import Clock
from paceline.simulation.runs import Runs

WATCH_S = 0.25  # a stream that has not moved for so long says that it waits, like the real one


class Keepalives:
    """Watches every flow. ``network.noted`` marks those whose sessions know that they move,
    ``network.idle`` those of which nothing is asked.
    """

    def __init__(
        self,
        clock: Clock,
        runs: Runs,
        hosts: dict[str, Host],
        limits: SessionLimits,
        tell: Callable[[Host, SessionEvent], None],
    ) -> None:
        self._clock = clock
        self._runs = runs
        self._network = runs.network
        self._hosts = hosts
        self._limits = limits
        self._tell = tell

    def is_vouched(self, flow: Flow) -> bool:
        """Return whether the reader's session was told that bytes move until further notice."""
        return bool(self._network.noted[flow.slot])

    def silence(self, flow: Flow) -> None:
        """Take back what was vouched for: from now on nothing is heard."""
        if self._network.noted[flow.slot]:
            self._network.noted[flow.slot] = False
            self._tell(flow.reader, SourceAlive(flow.key, flow.number))

    def watch(self) -> None:
        """Say who lives and who sends, as keepalives and arriving bytes do.

        While bytes flow a session is told so once, until further notice.
        """
        going = self._network.moved_since(self._clock.now_s - WATCH_S)
        network = self._network
        slots = np.flatnonzero(network.used & ~network.idle & ~(going & network.noted))
        streams: dict[tuple[Host, str, int], None] = {}
        # Those ahead first: what is flushed takes everybody above along.
        slots = slots[np.argsort(-self._network.pos[slots], kind="stable")]
        for slot in slots.tolist():
            flow = self._runs.by_slot.get(slot)
            if flow is None or not flow.open:
                continue
            if flow.wanted:
                streams[flow.reader, flow.key, flow.number] = None
            else:
                network.idle[slot] = True  # until it is asked for something
        for host, key, number in streams:
            flows = [f for f in host.feeds.values() if f.key == key and f.number == number]
            asked = [f for f in flows if f.wanted]
            if not asked or not host.serves or not asked[0].source.serves:
                continue
            # A repair that waits for its source's own is nothing that the stream says.
            lanes = [f for f in asked if f.lane != PAID] or asked
            self._vouch(flows, key, number, [bool(going[f.slot]) for f in lanes])
        self._clock.after(WATCH_S, self.watch)

    def assure(self) -> None:
        """Say again of slow streams that they move, before sessions think that all is lost."""
        every_s = self._limits.give_up_s / 4
        for host in self._hosts.values():
            if host.session is None or self._clock.now_s - host.told_s < every_s:
                continue
            for flow in host.feeds.values():
                if self._network.noted[flow.slot]:
                    self._tell(
                        host, SourceAlive(flow.key, flow.number, moving=True, until_s=np.inf)
                    )
        self._clock.after(every_s, self.assure)

    def _vouch(self, flows: list[Flow], key: str, number: int, moving: list[bool]) -> None:
        host = flows[0].reader
        if all(moving) and any(self._network.noted[flow.slot] for flow in flows):
            for flow in flows:  # its session knows, and that holds for what has begun since
                self._network.noted[flow.slot] = True
            return
        if all(moving):
            news = SourceAlive(key, number, moving=True, until_s=np.inf)
        else:
            self._runs.flush(f for f in flows if self._network.noted[f.slot])
            news = SourceAlive(key, number, moving=any(moving))
        for flow in flows:
            self._network.noted[flow.slot] = all(moving)
        self._tell(host, news)
