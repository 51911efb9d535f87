"""Keepalives: events that report to sessions which of their sources are alive and sending.

While bytes flow a session gets one such event, valid until further notice; that saves most of the
events of a large fleet.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from paceline.relay.protocol import SessionEvent, SessionLimits, SourceAlive
from paceline.simulation.hosts import Flow, Host
from paceline.simulation.network import Clock
from paceline.simulation.runs import Runs

WATCH_S = 0.25  # a stream without progress for so long reports that it waits, as in production


class Keepalives:
    """Watches every flow.

    ``network.noted`` marks flows that were reported to their sessions as moving, ``network.idle``
    those without requested pieces.
    """

    def __init__(
        self,
        clock: Clock,
        runs: Runs,
        hosts: dict[str, Host],
        limits: SessionLimits,
        deliver: Callable[[Host, SessionEvent], None],
    ) -> None:
        self._clock = clock
        self._runs = runs
        self._network = runs.network
        self._hosts = hosts
        self._limits = limits
        self._deliver = deliver

    def silence(self, flow: Flow) -> None:
        """Withdraw a report of movement, because the flow delivers nothing from now on."""
        if self._network.noted[flow.slot]:
            self._network.noted[flow.slot] = False
            self._deliver(flow.reader, SourceAlive(flow.key, flow.number))

    def watch(self) -> None:
        """Report to each session which sources are alive and which send, every WATCH_S."""
        network = self._network
        going = network.moving & (network.moved_s > self._clock.now_s - WATCH_S)
        slots = np.flatnonzero(network.used & ~network.idle & ~(going & network.noted))
        streams: dict[tuple[Host, str, int], None] = {}
        # Furthest positions first: flushing a flow also processes the flows upstream of it.
        slots = slots[np.argsort(-self._network.pos[slots], kind="stable")]
        for slot in slots.tolist():
            flow = self._runs.by_slot.get(slot)
            if flow is None or not flow.open:
                continue
            if flow.wanted:
                streams[flow.reader, flow.key, flow.number] = None
            else:
                network.idle[slot] = True  # until pieces are requested from it
        for host, key, number in streams:
            flows = [f for f in host.feeds.values() if f.key == key and f.number == number]
            asked = [f for f in flows if f.wanted]
            if not asked or not host.serves or not asked[0].source.serves:
                continue
            self._vouch(flows, key, number, [bool(going[f.slot]) for f in asked])
        self._clock.after(WATCH_S, self.watch)

    def assure(self) -> None:
        """Repeat the report for slow streams before their sessions time out."""
        every_s = self._limits.give_up_s / 4
        for host in self._hosts.values():
            if host.session is None or self._clock.now_s - host.told_s < every_s:
                continue
            for flow in host.feeds.values():
                if self._network.noted[flow.slot]:
                    self._deliver(
                        host, SourceAlive(flow.key, flow.number, moving=True, until_s=np.inf)
                    )
        self._clock.after(every_s, self.assure)

    def _vouch(self, flows: list[Flow], key: str, number: int, moving: list[bool]) -> None:
        host = flows[0].reader
        if all(moving) and any(self._network.noted[flow.slot] for flow in flows):
            for flow in flows:  # already reported; the report also covers flows that began since
                self._network.noted[flow.slot] = True
            return
        if all(moving):
            news = SourceAlive(key, number, moving=True, until_s=np.inf)
        else:
            self._runs.flush(f for f in flows if self._network.noted[f.slot])
            news = SourceAlive(key, number, moving=any(moving))
        for flow in flows:
            self._network.noted[flow.slot] = all(moving)
        self._deliver(host, news)
