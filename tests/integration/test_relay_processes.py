"""Real agents and a real coordinator on loopback: killed, frozen, corrupting, slow, all at once.

One fleet serves all tests; each brings another version to some of its nodes.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from paceline.coordinator.state import REPORTS_PER_SLACK
from paceline.manifest import verify_directory
from paceline.plan import SLACK_BYTES
from paceline.schemas import EventName
from tests.support.site import Site, until

pytestmark = pytest.mark.slow

LINK_MBIT = 16.0
SIZE = 6_000_000  # three seconds at that rate
AHEAD = SLACK_BYTES // REPORTS_PER_SLACK
NODES = ("n0", "n1", "n2", "n3", "n4")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    made = Site(tmp_path_factory.mktemp("site") / "state", LINK_MBIT)
    try:
        for name in NODES:
            made.start(name)
        made.registered(*NODES)
        yield made
    finally:
        made.close()


def half(site: Site, deployment_id: str, name: str, size: int = SIZE) -> None:
    until(lambda: site.part(deployment_id, name).bytes_held > size // 3, f"a third at {name}")


def refetched(site: Site, deployment_id: str, *names: str) -> int:
    receipts = [site.part(deployment_id, name).receipt for name in names]
    return sum(each.refetched_bytes for each in receipts if each is not None)


def line_of(site: Site, deployment_id: str) -> list[str]:
    return [each.worker_id for each in site.client.plan(deployment_id).workers]


@pytest.mark.nightly
def test_a_killed_agent_is_named_and_resumes_from_its_disk(site: Site) -> None:
    manifest = site.publish("killed", SIZE)
    d = site.deploy("killed", *NODES)
    until(lambda: site.view(d).deployment.epoch == 1, "the plan")
    victim = line_of(site, d)[1]
    half(site, d, victim)
    site.kill(victim)
    others = [name for name in NODES if name != victim]
    site.complete(d, *others)
    assert refetched(site, d, *others) <= 0.02 * SIZE * len(others)
    assert victim in {each.data["source"] for each in site.told(d, EventName.SOURCE_LOST)}
    site.start(victim)
    site.complete(d)
    receipt = site.part(d, victim).receipt
    assert receipt is not None
    assert receipt.incarnation > 1
    assert receipt.received_bytes + receipt.origin_bytes < 0.8 * SIZE
    assert site.view(d).deployment.origin_bytes <= 1.02 * SIZE + manifest.piece_bytes
    for name in NODES:
        verify_directory(site.final(name, "killed"), manifest)


def test_a_corrupting_agent_is_quarantined_and_others_stay_unharmed(
    site: Site,
) -> None:
    manifest = site.publish("corrupted", SIZE)
    site.start("bad", "tests.support.corrupting_agent")
    site.registered("bad")
    d = site.deploy("corrupted", "bad", *NODES, topology="chain")
    site.complete(d)
    caught = {each.data["source"] for each in site.told(d, EventName.PIECE_CORRUPT)}
    assert caught == {"bad"}
    [told] = site.told(d, EventName.WORKER_QUARANTINED)
    assert told.worker_id == "bad"
    assert site.part(d, "bad").standing == "quarantined"
    plan = site.client.plan(d)
    assert not [lane for each in plan.workers for lane in each.lanes if lane.source.key == "bad"]
    for name in NODES:
        verify_directory(site.final(name, "corrupted"), manifest)
    site.kill("bad")


def test_processes_all_killed_at_once_resume_from_their_disks(site: Site) -> None:
    size = 2 * SIZE
    manifest = site.publish("dark", size)
    d = site.deploy("dark", *NODES, topology="auto")
    until(lambda: all(site.part(d, name).bytes_held > size // 4 for name in NODES), "a quarter")
    held = {name: site.part(d, name).bytes_held for name in NODES}
    time.sleep(1.5)  # by then what was held is recorded as durable: a disk's records are 1 s apart
    assert not site.view(d).workers_complete
    site.kill("coordinator", *NODES)
    site.start_coordinator()
    for name in NODES:
        site.start(name)
    site.complete(d)
    moved, ahead = 0, 0
    for name in NODES:
        receipt = site.part(d, name).receipt
        assert receipt is not None
        # A killed reader of the origin counts what it had written down ahead of its reading, too.
        written = AHEAD if receipt.origin_bytes else 0
        most = 1.1 * size - 0.9 * held[name] + written
        assert receipt.received_bytes + receipt.origin_bytes <= most
        moved, ahead = moved + receipt.origin_bytes, ahead + written
        verify_directory(site.final(name, "dark"), manifest)
    assert moved < size + ahead, "the origin was not read from its beginning again"
    for name in NODES:
        site.processes[name].terminate()
    assert [site.processes[name].wait(10) for name in NODES] == [0] * len(NODES)
