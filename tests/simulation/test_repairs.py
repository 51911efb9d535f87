"""Paid repairs: they take their reader's time, one after the other, and nobody else's."""

from __future__ import annotations

from paceline.relay.protocol.extents import Extent, Extents
from paceline.relay.protocol.limits import PieceMap
from paceline.schemas.plan import Topology
from paceline.simulation import Scenario, Simulation
from paceline.simulation.coalescing import PAID, Gathering, PaidRepairs
from paceline.simulation.hosts import Flow, Host
from paceline.simulation.network import Clock, Network
from paceline.simulation.scenario import paper_manifest

PIECE = 1 << 20
PIECES = 64
RATE = 16.0 * PIECE  # bytes a second


class Bench:
    """One reader of one source, and what arrived when."""

    def __init__(self, has: Extents, promised: Extents) -> None:
        self.clock, self.network = Clock(), Network()
        self.arrived: list[tuple[float, int, int]] = []
        pieces = PieceMap(paper_manifest(PIECES * PIECE, PIECE, PIECE))
        gathering = Gathering(pieces=PIECES, piece_bytes=PIECE, coalesce=16, corrupt=0.0, seed=1)
        self.repairs = PaidRepairs(
            clock=self.clock,
            network=self.network,
            pieces=pieces,
            gathering=gathering,
            look=lambda _flow, _run: None,
            arrive=self._arrive,
            more=self._more,
        )
        above = self._host("above", Extents([Extent(0, PIECES)]))
        self.source = self._host("source", has)
        reader = self._host("reader", Extents())
        reader.repairs_bytes_s = RATE
        feed = self._flow(self.source, above, 0)
        feed.wanted = promised
        self.source.feeds[feed.key, 0] = feed
        self.flow = self._flow(reader, self.source, PAID)

    def want(self, *runs: Extent) -> None:
        for run in runs:
            self.flow.wanted.add(run)
        self.repairs.send(self.flow)

    def _host(self, name: str, have: Extents) -> Host:
        return Host(name, "", 0, 0, have=have)

    def _flow(self, reader: Host, source: Host, lane: int) -> Flow:
        slot = self.network.add((), 0.0)
        return Flow(slot, reader, source, source.name, 1, lane, False, open=True)

    def _arrive(self, flow: Flow, upto: int) -> None:
        self.arrived.append((self.clock.now_s, flow.base, upto))
        flow.wanted.remove(Extent(flow.base, upto))

    def _more(self, flow: Flow) -> None:
        self.repairs.send(flow)


def test_repairs_come_one_after_the_other_at_the_links_rate() -> None:
    bench = Bench(has=Extents([Extent(0, PIECES)]), promised=Extents())
    bench.want(Extent(0, 8), Extent(20, 24))
    bench.clock.happen(10.0, lambda: None)
    assert bench.arrived == [(0.5, 0, 8), (0.75, 20, 24)]
    assert bench.network.carried[bench.flow.slot] == 12 * PIECE


def test_what_the_source_is_still_to_get_is_on_its_way_meanwhile() -> None:
    bench = Bench(has=Extents(), promised=Extents([Extent(8, 16)]))
    bench.want(Extent(0, 4))
    assert bench.flow in bench.source.waiting, "nobody will send it these"
    bench.want(Extent(8, 16))
    bench.clock.happen(10.0, lambda: None)
    assert bench.arrived == [(0.5, 8, 16)]


def test_what_is_owed_is_not_sent_again() -> None:
    bench = Bench(has=Extents(), promised=Extents([Extent(8, 16)]))
    bench.flow.owed.add(Extent(8, 16))
    bench.want(Extent(8, 16))
    bench.clock.happen(10.0, lambda: None)
    assert bench.arrived == []


def test_a_repair_of_a_dead_source_does_not_arrive() -> None:
    bench = Bench(has=Extents([Extent(0, PIECES)]), promised=Extents())
    bench.want(Extent(0, 8))
    bench.source.alive = False
    bench.clock.happen(10.0, lambda: None)
    assert bench.arrived == []


def test_a_corrupt_run_costs_a_line_few_events_and_no_new_rates() -> None:
    """Gathered, a corrupt run was six events and four new divisions of every link; it is told, its
    repair is told with what came around it, and rates stay as they are.
    """
    events, divisions, runs = [], [], 0
    for corrupt in (0.0, 0.01):
        fleet = Scenario(
            workers=12,
            size_bytes=100 * 10**9,
            link_mbit=1e4,
            topology=Topology.CHAIN,
            corrupt=corrupt,
            seed=7,
            coalesce_pieces=1024,
            step_s=0.05,
        )
        simulation = Simulation(fleet)
        network, divided = simulation.streams.network, 0
        share_out = network._share_out

        def counted() -> None:
            nonlocal divided
            divided += 1
            share_out()  # noqa: B023  # called while this fleet runs

        network._share_out = counted  # type: ignore[method-assign]
        report = simulation.run()
        assert report.violations == ()
        events.append(report.events)
        divisions.append(divided)
        runs = sum(len(list(host.paid)) for host in simulation.streams.hosts.values())
    assert runs > 200
    assert events[1] - events[0] < 4 * runs
    assert divisions[1] - divisions[0] < runs
