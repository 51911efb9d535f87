"""Fleets, manifests and checks that the planners' tests share."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from hypothesis import strategies as st

from paceline.manifest import Chunk, FileEntry, Manifest
from paceline.plan import PlanWorker, Standing, make_plan
from paceline.schemas import Labels, Plan, Topology

H = "0" * 64
P = 65_536
MIB = 1024 * 1024
RELAYED = [Topology.CHAIN, Topology.TREE, Topology.TREE_OF_CHAINS, Topology.MESH]
STRIPED = [Topology.TREE_OF_CHAINS, Topology.MESH]


def manifest_of(chunks: int, pieces_per_chunk: int = 2, piece_bytes: int = P) -> Manifest:
    """Return a model of equal chunks."""
    pieces, chunk = chunks * pieces_per_chunk, pieces_per_chunk * piece_bytes
    return Manifest(
        model_id="m",
        version="1",
        piece_bytes=piece_bytes,
        chunk_bytes=chunk,
        files=(FileEntry("weights", pieces * piece_bytes, H, (H,) * pieces),),
        chunks=tuple(Chunk(number, number * chunk, chunk, H) for number in range(chunks)),
    )


MANIFEST = manifest_of(8)
S = MANIFEST.total_size


def worker(
    number: int, rack: str = "r0", zone: str = "", host: str = "", **more: object
) -> PlanWorker:
    """Return one worker of 40 Mbit/s."""
    return PlanWorker(
        **{  # type: ignore[arg-type]
            "worker_id": f"node-{number}",
            "labels": Labels(host=host or f"host-{number}", rack=rack, zone=zone),
            "address": f"127.0.0.1:{number + 1}",
            "link_mbit": 40.0,
            **more,
        }
    )


def racks_of(count: int, per_rack: int) -> list[PlanWorker]:
    """Return ``count`` workers that hold nothing, in racks of ``per_rack``."""
    return [worker(number, rack=f"r{number // per_rack}") for number in range(count)]


def plan(
    workers: Sequence[PlanWorker],
    topology: str = "chain",
    manifest: Manifest = MANIFEST,
    **more: object,
) -> Plan:
    """Return the plan of epoch 1 from one bucket, unless told otherwise."""
    given = {"deployment_id": "d", "epoch": 1, "source_url": "s3://bucket/m/1", "seed": 0, **more}
    return make_plan(topology, manifest=manifest, workers=workers, **given)  # type: ignore[arg-type]


@st.composite
def fleets(
    draw: st.DrawFn, least: int = 1, *, sick: bool = False, chunks: bool = True
) -> list[PlanWorker]:
    """Draw up to 24 workers in few racks, some of whom hold something; ``sick``: not all well;
    ``chunks``: which chunks they hold is known.
    """
    fleet = []
    for number in range(draw(st.integers(least, 24))):
        held = draw(st.sampled_from([0, 0, 3, 10, 16]))
        known = chunks and held > 1
        whole = draw(st.frozensets(st.integers(0, held // 2 - 1))) if known else frozenset()
        made = worker(
            number,
            rack=draw(st.sampled_from(["", "r1", "r2", "r3"])),
            zone=draw(st.sampled_from(["", "a", "b"])),
            host=draw(st.sampled_from(["h1", "h2", "h3"])),
            held_pieces=held,
            held_chunks=whole,
            complete=held == 16 and draw(st.booleans()),
        )
        if sick:
            standing = draw(st.sampled_from([Standing.LINE, Standing.LINE, *Standing]))
            link = draw(st.sampled_from([40.0, 40.0, 40.0, 10.0]))
            made = replace(made, standing=standing, link_mbit=link)
        fleet.append(made)
    return fleet


def sources(made: Plan) -> dict[str, str | None]:
    """Return each worker's primary source, of its first lane; None is the origin."""
    return {part.worker_id: part.lanes[0].source.worker_id for part in made.workers if part.lanes}


def above(made: Plan) -> dict[tuple[str, int], str | None]:
    """Return whom each worker takes each chunk from; None is the origin."""
    return {
        (part.worker_id, chunk): lane.source.worker_id
        for part in made.workers
        for lane in part.lanes
        for chunk in range(lane.first_chunk, lane.last_chunk + 1)
    }


def feeders(made: Plan) -> Counter[str]:
    """Return how many chunks each worker sends, all told."""
    return Counter(source for source in above(made).values() if source is not None)


def check(made: Plan, fleet: Sequence[PlanWorker], manifest: Manifest = MANIFEST) -> None:
    """Assert what holds for every plan, whatever the topology."""
    living = {each.worker_id: each for each in fleet if each.standing is not Standing.GONE}
    complete = {name for name, each in living.items() if each.complete}
    assert sorted(part.worker_id for part in made.workers) == sorted(living)
    assert made.topology is not Topology.AUTO
    for part in made.workers:
        if part.worker_id in complete:
            assert part.lanes == ()
            assert part.origin_budget_bytes == 0
            continue
        covered = [
            chunk for lane in part.lanes for chunk in range(lane.first_chunk, lane.last_chunk + 1)
        ]
        assert covered == list(range(len(manifest.chunks))), "each chunk once, in order"
        assert part.piece_deadline_s >= 1.0
        for lane in part.lanes:
            sources = (lane.source, *lane.spares)
            keys = [source.key for source in sources]
            assert len(set(keys)) == len(keys), "nobody is named twice"
            assert part.worker_id not in keys
            kinds = [source.kind for source in sources]
            assert len(sources) <= 10
            if lane.source.kind == "worker":
                assert kinds.count("origin") == 1
                assert kinds[-1] == "origin", "the origin comes last"
            for source in sources:
                if source.worker_id:
                    assert source.address == living[source.worker_id].address
    whom = above(made)
    for (name, chunk), source in whom.items():
        step, seen = source, {name}
        while step is not None and step not in complete:
            if chunk in living[step].held_chunks:
                break
            assert step not in seen, "a cycle"
            seen.add(step)
            step = whom[step, chunk]


def kill(fleet: Sequence[PlanWorker], *dead: int) -> list[PlanWorker]:
    """Return ``fleet`` with the workers at these places gone."""
    return [
        replace(each, standing=Standing.GONE) if number in dead else each
        for number, each in enumerate(fleet)
    ]


def shuffled(fleet: Sequence[PlanWorker], seed: int) -> list[PlanWorker]:
    """Return ``fleet`` in another order."""
    turned = list(fleet)
    random.Random(seed).shuffle(turned)
    return turned
