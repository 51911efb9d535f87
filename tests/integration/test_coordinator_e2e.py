"""Sixteen real agents, three replicas, etcd, Redis and PostgreSQL; an agent and the leader die.

The deployment completes all the same, every survivor verified it, the fleet switches to it with a
quorum, and the audit table tells the story in the order in which it happened.
"""

from __future__ import annotations

import signal

import pytest

from benchmarks.leaders.cluster import cluster, make_model
from paceline.manifest import fetch_manifest, verify_directory
from paceline.schemas import CreateDeployment, SwitchPhase
from tests.support.site import until

pytestmark = [
    pytest.mark.services,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.xdist_group("installation"),  # one at a time: two cores
]

AGENTS = tuple(f"n{number:02d}" for number in range(16))
SIZE = 6_000_000
LINK_MBIT = 8.0  # so that it takes six seconds, and somebody can die on the way
FEW_FAILED = 0.07  # one of sixteen


def read_audit(server, database):
    """Every row of the audit table, in its own order."""
    query = "SELECT seq, name, deployment_id, worker_id, data FROM audit ORDER BY seq"
    with server.connect(database) as db:
        return [tuple(row) for row in db.execute(query).fetchall()]


def place(story, name, **wanted):
    """Where in the story an event of this name stands whose data has what is wanted."""
    for index, (told, data) in enumerate(story):
        if told == name and all(data.get(key) == value for key, value in wanted.items()):
            return index
    raise AssertionError(f"the audit table does not tell of {name} {wanted}: {story}")


@pytest.mark.nightly
def test_an_agent_and_the_leader_die_and_the_audit_table_tells_the_story(
    etcd, redis, postgres, tmp_path
):
    database = postgres.schema()
    control = {
        "progress": "redis",
        "redis_url": f"redis://127.0.0.1:{redis.port}/0",
        "redis_prefix": f"e2e:{database}",
        "audit": "postgres",
        "postgres_url": postgres.url(database),
    }
    passwords = {
        "PACELINE_REDIS_PASSWORD": redis.password,
        "PACELINE_POSTGRES_PASSWORD": postgres.password,
    }
    endpoints = list(etcd.access.endpoints)
    state = tmp_path / "state"
    with cluster(state, endpoints, lease_s=2.0, environment=passwords, control=control) as made:
        first, first_epoch = made.leader()
        source = make_model(state / "sources" / "v1", "v1", SIZE)
        client = made.client(patience_s=60.0)
        for name in AGENTS:
            made.start_agent(name, LINK_MBIT)
        until(lambda: sum(each.alive for each in client.workers()) == len(AGENTS), "the fleet")
        call = CreateDeployment(
            model_id="m",
            version="v1",
            source_url=source,
            target_workers=AGENTS,
            topology="chain",
            max_failed=FEW_FAILED,
        )
        d = client.create(call, "e2e").deployment_id

        def part(name):
            return next(each for each in client.workers_of(d) if each.worker_id == name)

        until(lambda: client.deployment(d).deployment.epoch >= 1, "the plan")
        victim = client.plan(d).workers[7].worker_id
        until(lambda: part(victim).bytes_held > SIZE // 5, "a fifth at the victim")
        made.agents[victim].kill()
        made.agents.pop(victim).wait()
        made.signal(first, signal.SIGKILL)
        made.reap(first)
        assert client.create(call, "e2e").deployment_id == d, "acknowledged is acknowledged"
        second, second_epoch = made.leader()
        assert second != first
        assert second_epoch > first_epoch
        made.start_replica(first)

        until(lambda: client.deployment(d).status.value == "complete", "completion", 120.0)
        view = client.deployment(d)
        survivors = [name for name in AGENTS if name != victim]
        assert sorted(view.workers_complete) == survivors
        assert view.workers_failed == (victim,)
        assert view.deployment.origin_bytes <= 1.02 * SIZE + 64 * 1024 * 1024
        manifest = fetch_manifest(source, None)
        for name in survivors:
            final = state / "nodes" / name / "store" / "models" / "m" / "v1"
            verify_directory(final, manifest)
            assert part(name).receipt.manifest_digest == manifest.digest

        client.activate(d)
        until(lambda: client.switch(d).phase is SwitchPhase.SWITCHED, "the switch")
        states = {each.worker_id: each.state for each in client.switch(d).workers}
        assert {name for name in states if states[name] == "switched"} == set(survivors)
        for name in survivors:
            active = state / "nodes" / name / "store" / "models" / "m" / "active"
            assert active.resolve().name == "v1"

        def told():
            return {row[1] for row in read_audit(postgres, database)}

        until(lambda: "deployment.activated" in told(), "the audit table")
        rows = read_audit(postgres, database)
    numbers = [row[0] for row in rows]
    assert numbers == sorted(set(numbers)), "in order, and each once"
    story = [(name, data | {"worker": who}) for _, name, where, who, data in rows
             if where == d or (where is None and who is not None)]  # fmt: skip
    begun = place(story, "deployment.status_changed", to="downloading")
    ended = place(story, "deployment.status_changed", to="complete")
    order = [
        max(place(story, "worker.registered", worker=name) for name in AGENTS),
        place(story, "deployment.created", model_id="m", targets=16),
        place(story, "deployment.planned", epoch=1),
        begun,
        ended,
        place(story, "deployment.switching", version="v1"),
        place(story, "deployment.activated", version="v1", workers=15),
    ]
    assert order == sorted(order), f"not in the order in which it happened: {order}"
    # The line closes up by itself, and may be done before anybody misses the dead.
    meanwhile = [
        place(story, "relay.source_lost", source=victim),
        place(story, "worker.lost", worker=victim),
        *(place(story, "deployment.worker_completed", worker=name) for name in survivors),
    ]
    assert begun < min(meanwhile)
    assert max(meanwhile) < ended
    completed = [data["worker"] for name, data in story if name == "deployment.worker_completed"]
    assert sorted(completed) == survivors, "each once, by whichever leader"
    made_by = [data for name, data in story if name == "change.accepted"]
    assert any(each["what"] == "POST /deployments" for each in made_by), "and who asked for it"
