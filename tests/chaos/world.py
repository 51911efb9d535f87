"""One seed of chaos: sixteen workers, a coordinator in a few lines, and everything that can fail.

``play(seed)`` runs real sessions and real plans under a virtual clock. What may never happen is an
AssertionError of the fleet itself; what must have happened at the end is ``World.judge``. The same
seed plays the same world: ``python -m tests.chaos.world SEED`` replays one and prints its story.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from functools import cache
from itertools import islice
from random import Random

from paceline.errors import OriginBudgetExceeded
from paceline.manifest import Manifest
from paceline.plan import PlanWorker, Standing, make_plan
from paceline.plan.cost import origin_cap_bytes
from paceline.relay.protocol.extents import Extents
from paceline.relay.protocol.limits import MIB, PieceMap, SessionLimits
from paceline.schemas.plan import Labels, Topology, WorkerLanes
from tests.relay.kit import paper_manifest
from tests.support.memory_fleet import Faults, MemoryFleet

WORKERS = 16
PIECES = 64
PIECE_BYTES = 4 * MIB  # so that the fuse's 64 MiB are a quarter of the model, not a thousand times
LINK_BYTES_S = 64 * MIB  # the whole model in 4 s
TOPOLOGIES = (Topology.CHAIN, Topology.TREE, Topology.TREE_OF_CHAINS, Topology.MESH)
DEADLINE_S = 1.0
CALM_S = 10.0  # every fault has healed
ALONE_S = 24.0  # until then the data plane had to help itself, where the coordinator was away
BOUND_S = 70.0  # and by then everybody who lives is complete
STUCK_S = 8.0  # without a piece, beside a source that has some,
TRY_S = 1.0  # and so long for each spare that was tried before it
HERD = 16  # pieces read from the origin although others had them: two windows of an heir
LOST_AFTER_S = 3.0  # without a beat


@cache
def manifest() -> Manifest:
    return paper_manifest(PIECES, PIECE_BYTES, chunk_pieces=2)


@cache
def piece_map() -> PieceMap:
    return PieceMap(manifest())


@dataclass
class World:
    """A fleet, its coordinator, and what befell them."""

    seed: int
    random: Random
    fleet: MemoryFleet
    topology: Topology
    labels: dict[str, Labels]
    epoch: int = 0
    standing: dict[str, Standing] = field(default_factory=dict)
    order: tuple[str, ...] = ()
    sent: list[WorkerLanes] = field(default_factory=list)
    story: list[str] = field(default_factory=list)
    granted_bytes: int = 0  # by an operator, beyond the fuse
    away_s: float = BOUND_S  # from when on the coordinator is away, until ``ALONE_S``

    def tell(self, what: str) -> None:
        self.story.append(f"{self.fleet.now_s:6.2f} s  {what}")

    # ── what befalls ─────────────────────────────────────────────────────────────────────────────

    def kill(self, name: str) -> None:
        if self.fleet.nodes[name].alive:
            self.tell(f"{name} is killed")
            self.fleet.kill(name)
            self.fleet.at(self.fleet.now_s + LOST_AFTER_S * self.random.random(), self.notice, name)

    def freeze(self, name: str, for_s: float) -> None:
        node = self.fleet.nodes[name]
        if node.alive and not node.frozen:
            self.tell(f"{name} freezes for {for_s:.2f} s")
            self.fleet.freeze(name)
            self.fleet.at(self.fleet.now_s + for_s, self.thaw, name)
            if for_s > LOST_AFTER_S:
                self.fleet.at(self.fleet.now_s + LOST_AFTER_S, self.notice, name)

    def thaw(self, name: str) -> None:
        node = self.fleet.nodes[name]
        if node.alive and node.frozen:
            self.tell(f"{name} thaws")
            self.fleet.thaw(name)
            self.fleet.at(self.fleet.now_s + 0.3, self.notice, name)

    def reset(self, name: str) -> None:
        self.tell(f"connections of {name} break")
        self.fleet.reset(name)

    def restart(self, name: str) -> None:
        if not self.fleet.nodes[name].alive:
            self.tell(f"{name} returns with {self.fleet.nodes[name].durable.count} pieces")
            self.fleet.restart(name)
            if self.standing[name] is not Standing.QUARANTINED:
                self.standing[name] = self.random.choice([Standing.LINE, Standing.TAIL])
            self.fleet.at(self.fleet.now_s + 0.3, self.plan, f"{name} returned")

    def rot(self, name: str) -> None:
        held = list(self.fleet.nodes[name].durable.pieces())
        if held:
            piece = self.random.choice(held)
            self.tell(f"piece {piece} rots at {name}")
            self.fleet.rot(name, piece)

    # ── the coordinator ──────────────────────────────────────────────────────────────────────────

    def notice(self, name: str) -> None:
        """See whether ``name`` still beats, and plan again where that changed."""
        node = self.fleet.nodes[name]
        here = node.alive and not node.frozen
        gone = self.standing[name] is Standing.GONE
        if here is gone:
            self.standing[name] = Standing.TAIL if here else Standing.GONE
            self.plan(f"{name} is {'back' if here else 'gone'}")
        elif here and not self.away_s <= self.fleet.now_s < ALONE_S:
            self.fleet.confirm(name)

    def demote(self, name: str, standing: Standing) -> None:
        if self.standing[name] is Standing.LINE:
            self.standing[name] = standing
            self.plan(f"{name} is {standing}")

    def plan(self, why: str) -> None:
        """Plan again, and send everybody their lanes: late, sometimes twice, out of order."""
        fleet, random = self.fleet, self.random
        if self.away_s <= fleet.now_s < ALONE_S:
            return
        workers = [self.worker(name) for name in fleet.nodes]
        if all(worker.standing is Standing.GONE for worker in workers):
            return
        self.epoch += 1
        fleet.reliable = {
            name for name, standing in self.standing.items() if standing is Standing.LINE
        }
        self.tell(f"epoch {self.epoch}: {why}")
        made = make_plan(
            self.topology,
            deployment_id="d-chaos",
            epoch=self.epoch,
            manifest=manifest(),
            workers=workers,
            source_url="/origin",
            seed=self.seed,
            origin_spent_bytes=fleet.origin_pieces * PIECE_BYTES - self.granted_bytes,
            order=self.order,
        )
        present = tuple(each.worker_id for each in made.workers)
        self.order = self.order or present
        for planned in made.workers:
            # 64 pieces would take less time than one deadline of twenty piece times.
            lanes = planned.model_copy(update={"piece_deadline_s": DEADLINE_S})
            at_s = fleet.now_s + 0.5 * random.random() ** 2
            fleet.at(at_s, self.hand_over, lanes)
            self.sent.append(lanes)
        if random.random() < 0.3:  # a message from long ago turns up again
            fleet.at(fleet.now_s + random.random(), self.hand_over, random.choice(self.sent))

    def worker(self, name: str) -> PlanWorker:
        node = self.fleet.nodes[name]
        progress = node.session.progress() if node.session else None
        return PlanWorker(
            worker_id=name,
            labels=self.labels[name],
            address=f"{name}:1",
            link_mbit=LINK_BYTES_S * 8 / 1e6,
            complete=node.complete,
            held_pieces=progress.pieces_held if progress else 0,
            held_chunks=frozenset(progress.chunks_received if progress else ()),
            standing=self.standing[name],
        )

    def hand_over(self, lanes: WorkerLanes) -> None:
        if self.fleet.nodes[lanes.worker_id].alive:
            self.fleet.assign(lanes)
            if lanes.epoch == self.epoch:
                self.fleet.confirm(lanes.worker_id)

    def calm(self) -> None:
        """Nothing fails any more; a last plan."""
        for name, node in self.fleet.nodes.items():
            self.thaw(name)
            if node.alive:
                self.standing[name] = (
                    Standing.TAIL if self.standing[name] is Standing.GONE else self.standing[name]
                )
        if self.fleet.unfinished():
            self.plan("all is calm")

    def look(self) -> None:
        """Raise AssertionError where somebody is stuck beside a source that has what it misses.

        Nobody planned for a while and nothing failed: sessions had to find each other by their
        spares alone.
        """
        if self.away_s > CALM_S:
            return
        for name in self.fleet.unfinished():
            node = self.fleet.nodes[name]
            lanes = node.lanes.lanes if node.lanes is not None else ()
            for lane in lanes:
                # Where a window is full of pieces that nobody has, it takes a round of its spares.
                long_ago_s = self.fleet.now_s - STUCK_S - TRY_S * len(lane.spares)
                if node.received_s > long_ago_s:
                    continue
                extent = piece_map().chunk_range(lane.first_chunk, lane.last_chunk)
                # A window at least: behind pieces that nobody has, it waits like everybody else.
                missing = list(islice(Extents(node.verified.gaps(extent)).pieces(), 4))
                for source in (lane.source, *lane.spares):
                    if source.worker_id is None or source.worker_id in self.fleet.liars:
                        continue
                    held = self.fleet.nodes[source.worker_id]
                    if (
                        held.alive
                        and held.received_s < long_ago_s
                        and any(
                            piece in held.verified and piece not in held.distrusted
                            for piece in missing
                        )
                    ):
                        raise AssertionError(f"{name} is stuck beside {source.key} (I7)")
        self.plan("the coordinator is back")

    def operate(self) -> None:
        """Raise the fuse, as an operator would, where somebody says that it holds things up."""
        fuse = OriginBudgetExceeded.__name__
        for name in self.fleet.unfinished():
            session = self.fleet.nodes[name].session
            failure = session.progress().failure if session else None
            if failure is not None and failure.code == fuse:
                # As much again: what a liar at the head was fed is all lost.
                self.granted_bytes += origin_cap_bytes(manifest().total_size)
                self.plan(f"{name} is stalled: the fuse is raised")
                return

    # ── what must be true at the end ─────────────────────────────────────────────────────────────

    def judge(self) -> None:
        """Raise AssertionError unless every promise was kept."""
        fleet = self.fleet
        stuck = {
            name: node.session.progress() if node.session else None
            for name in fleet.unfinished()
            for node in (fleet.nodes[name],)
        }
        assert not stuck, f"unfinished after {BOUND_S} s (I7): {stuck}"
        for node in fleet.nodes.values():
            kept = node.durable.count + node.distrusted.count  # found rotten after it was shown
            assert not node.complete or kept == PIECES, f"{node.name} (I1)"
            assert node.error is None, f"{node.name} failed: {node.error}"
            assert node.corrupt_seen.keys() <= node.corrupt_sent, f"{node.name} blames others (I3)"
        again = fleet.origin_again
        assert again <= HERD, f"{again} pieces came from the origin again that others had (I6)"


def make_world(
    seed: int,
    *,
    topology: Topology | None = None,
    faults: Faults | None = None,
    calamities: int | None = None,
) -> World:
    """Return the world of ``seed``, its faults scheduled; what is given is not left to chance."""
    random = Random(seed)
    names = [f"w{number:02}" for number in range(WORKERS)]
    racks = random.choice([1, 2, 4])
    chance = Faults(
        corrupt=random.choice([0, 0, 0.01, 0.03]),
        duplicate=random.choice([0, 0, 0.05]),
        delay_s=random.choice([0, 0, 0, 0.05, 0.2]),
        late_failure_s=random.choice([0, 0, 2.0]),
        corrupt_from=frozenset(random.sample(names, random.choice([0, 0, 0, 1]))),
    )
    faults = faults or chance
    shape = random.choice(TOPOLOGIES)
    fleet = MemoryFleet(
        manifest(),
        names,
        seed=seed,
        link_bytes_s=LINK_BYTES_S,
        faults=faults,
        limits=SessionLimits(),
        pieces=piece_map(),
        coordinated=True,
    )
    world = World(
        seed,
        random,
        fleet,
        topology or shape,
        {name: Labels(rack=f"r{at % racks}") for at, name in enumerate(names)},
        standing=dict.fromkeys(names, Standing.LINE),
    )
    world.tell(f"{world.topology}, {racks} racks, {faults}")
    world.plan("the first")
    if calamities != 0:
        befall(world, names, calamities or random.randint(1, 5))
    fleet.at(CALM_S, world.calm)
    fleet.at(ALONE_S, world.look)
    for at_s in range(3, int(BOUND_S - CALM_S), 3):
        fleet.at(CALM_S + at_s, world.operate)
    return world


def befall(world: World, names: list[str], calamities: int) -> None:
    """Schedule what befalls the workers of ``world``, and plans for no reason."""
    fleet, random = world.fleet, world.random
    world.away_s = random.choice([BOUND_S, BOUND_S, random.uniform(0.6, 4)])
    for victim in random.sample(names, calamities):
        at_s = random.uniform(0.0, 6.0)
        kind = random.choice(["kill", "kill", "freeze", "return", "reset", "rot", "slow"])
        if kind == "freeze":
            fleet.at(at_s, world.freeze, victim, random.uniform(0.3, 5))
        elif kind == "reset":
            fleet.at(at_s, world.reset, victim)
        elif kind == "rot":
            fleet.at(at_s, world.rot, victim)
        elif kind == "slow":
            fleet.at(at_s, fleet.slow_down, victim, random.uniform(2, 4))
            fleet.at(at_s + random.uniform(0.5, 3), world.demote, victim, Standing.TAIL)
        else:
            fleet.at(at_s, world.kill, victim)
            if kind == "return":
                fleet.at(at_s + random.uniform(0.2, 4), world.restart, victim)
    for liar in sorted(fleet.liars):
        fleet.at(random.uniform(1, 4), world.demote, liar, Standing.QUARANTINED)
    for _ in range(random.choice([0, 0, 1, 3])):
        fleet.at(random.uniform(0, CALM_S), world.plan, "for no reason")


def play(seed: int) -> World:
    """Play ``seed`` to its end and judge it; an AssertionError says how to replay it."""
    world = make_world(seed)
    try:
        world.fleet.run(until_s=BOUND_S)
        world.judge()
    except AssertionError as error:
        replay = f"python -m tests.chaos.world {seed}"
        raise AssertionError(f"seed {seed}: {error}\nreplay it with: {replay}") from error
    return world


if __name__ == "__main__":
    for number in map(int, sys.argv[1:]):
        played = make_world(number)
        try:
            played.fleet.run(until_s=BOUND_S)
            played.judge()
        finally:
            sys.stdout.write("\n".join(played.story) + "\n")
