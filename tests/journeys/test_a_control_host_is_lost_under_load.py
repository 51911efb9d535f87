"""A control host is lost, with its disk, while deployments run; nothing answered is lost.

Types docs/how-to/bring-up-a-fleet.md, "Three coordinators", and "To lose nothing with a host" of
docs/how-to/set-up-state-stores.md. The lost host has the leading coordinator, an etcd member,
Redis and the PostgreSQL that takes writes. A CI host makes deployments all the time.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tests.journeys.fleet import ENVIRONMENT, Fleet, bring_up_three, rclone_s3
from tests.journeys.guide import commands
from tests.journeys.hosts import Host, Site, site, until
from tests.journeys.stores import (
    AS_POSTGRES,
    PASSWORD,
    Authority,
    prepare_postgres,
    run_postgres,
    start_etcd,
    start_postgres,
    start_redis,
)

pytestmark = [
    pytest.mark.netns,
    pytest.mark.services,
    pytest.mark.nightly,
    pytest.mark.timeout(900),
]

TYPED = commands("how-to/set-up-state-stores.md")
NODES = 3
MEGABYTES, RATE_MBIT = 60.0, 20.0  # takes at least 25 s
SMALL = 4  # versions of 0.2 MB
ANSWERS = 5  # before the loss, and after it before the standby is promoted
MOST = 60  # deployments that it makes; the coordinator keeps 100 that ended


@dataclass(frozen=True)
class Running:
    fleet: Fleet
    ci: Host
    bed: Site
    authority: Authority


@pytest.fixture(scope="module")
def running(control_software: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    logs = tmp_path_factory.mktemp("logs")
    with (
        site(control_software, 4 + NODES, RATE_MBIT, origin_mbit=200.0) as bed,
        rclone_s3(bed, logs) as s3_url,
    ):
        replicas, ci, nodes = bed.hosts[:3], bed.hosts[3], bed.hosts[4:]
        first, second, _ = replicas
        for each in (first, second):  # which publish and copy databases
            bed.bed.set_rate(each.index, 200.0)
        authority = Authority(tmp_path_factory.mktemp("authority"))
        for each in replicas:
            authority.issue(each)
        start_etcd(replicas, logs)
        start_redis(first, logs)
        start_postgres(first, logs)
        psql("replicator", first, second)
        add_standby(first, second, logs)
        postgres = f"{first.address},{second.address}"
        servers = {"REDIS": first.address, "POSTGRES": postgres}
        fleet = bring_up_three(replicas, nodes, logs, s3_url, RATE_MBIT, **servers)
        for each in nodes:
            fleet.agent(each, **ENVIRONMENT)
        yield Running(fleet, ci, bed, authority)


def psql(block: str, primary: Host, standby: Host) -> None:
    """Type a block of the page, on the host whose PostgreSQL it changes."""
    words = {
        **{"PRIMARY": primary.address, "STANDBY": standby.address, "PGUSER": "paceline"},
        **{"PKI": "/home/user/pki", "POSTGRES_PASSWORD": PASSWORD},
        **{"REPLICATION_PASSWORD": "replicatorspassword", "DATA": "/srv/postgres/data"},
    }
    if block == "standby":
        argv, words["PKI"] = (*AS_POSTGRES, "bash", "-ec", TYPED[block]), "/srv/postgres"
        standby.run(*argv, env=words, root=True, at="/srv/postgres").ok()
    else:
        on = standby if block == "promote" else primary
        on.run("bash", "-ec", TYPED[block], env=words).ok()


def add_standby(primary: Host, standby: Host, logs: Path) -> None:
    """Make a synchronous standby."""
    prepare_postgres(standby)
    psql("standby", primary, standby)
    run_postgres(standby, logs, "SELECT 1")
    psql("synchronous", primary, standby)


class Caller:
    """Makes deployments from the CI host, one after the other, and keeps what was answered.

    Of a version it makes the next one when the one before ended: a node takes one at a time.
    """

    def __init__(self, fleet: Fleet, ci: Host, token: str) -> None:
        self._fleet, self._ci, self._token = fleet, ci, token
        self.answered: list[tuple[str, float]] = []  # ids, and when
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        newest: dict[str, str] = {}
        for number in range(MOST):
            version, key = f"small-{number % SMALL}", f"call-{number}"
            while version in newest and self.status(newest[version]) != "complete":
                if self._stop.wait(0.5):
                    return
            while True:  # the same key until there is an answer, as the page says
                if self._stop.wait(0.2):
                    return
                done = self._fleet.distribute(
                    self._ci, self._token, version, self._fleet.nodes, key
                )
                if done.code == 0:
                    break
            newest[version] = json.loads(done.out)["deployment_id"]
            self.answered.append((newest[version], time.monotonic()))

    def status(self, deployment: str) -> object:
        return (self._fleet.ended(self._ci, self._token, deployment) or {}).get("status")

    def since(self, moment: float) -> list[float]:
        """Return when calls were answered after ``moment``, in seconds after it."""
        return [at - moment for _, at in self.answered if at > moment]

    def __enter__(self) -> Caller:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def audit(host: Host) -> list[Any] | None:
    """Return the changes in the audit, None where the host's coordinators cannot read it."""
    options = ("--name", "change.accepted", "--limit", "1000", "--json")
    done = host.run("paceline", "audit", *options)
    return list(json.loads(done.out)["events"]) if done.code == 0 else None


def test_nothing_that_was_answered_is_lost_with_the_leaders_host(
    running: Running, capsys: pytest.CaptureFixture[str]
) -> None:
    fleet, ci, bed = running.fleet, running.ci, running.bed.bed
    lost, second, third = fleet.replicas
    for number in range(SMALL):
        fleet.publish(f"small-{number}", 0.2, ENVIRONMENT)
    wanted = fleet.publish("1", MEGABYTES, ENVIRONMENT)
    token = fleet.ci_token(ci)
    until(lambda: fleet.alive(token) == NODES, "every node registers", 60)
    assert fleet.leader(ci) is lost, "the first one leads"
    left = replace(fleet, control=second, replicas=(second, third, lost))
    sent = bed.counters()["origin_out"]
    large = json.loads(left.distribute(ci, token, "1", fleet.nodes).ok().out)["deployment_id"]
    with Caller(left, ci, token) as caller:
        until(lambda: len(caller.answered) >= ANSWERS, "calls are answered", 60)
        status = caller.status(large)
        options = ("--name", "auditor", "--scope", "read", "--json")
        token_made = lost.run("paceline", "tokens", "create", *options).ok()
        bed.cut(lost.index)
        began = time.monotonic()
        lost.power_off()
        before = {made for made, _ in caller.answered}
        until(lambda: left.leader(ci) not in (None, lost), "another leads", 60)
        leads_s = time.monotonic() - began
        until(lambda: len(caller.since(began)) >= ANSWERS, "calls are answered again", 120)
        writes_s = caller.since(began)[0]
        assert audit(second) is None, "not before the standby is promoted"
        psql("promote", lost, second)
        promoted = time.monotonic()
        until(lambda: audit(second) is not None, "the audit answers again", 120)
        audit_s = time.monotonic() - promoted
    made = {large, *(each for each, _ in caller.answered)}
    for each in sorted(made):
        done = f"{each}, which was answered, is known and completes"
        until(lambda made=each: caller.status(made) == "complete", done, 120)
    assert status not in ("complete", "failed"), "the large one ran when the host was lost"
    for node in fleet.nodes:
        assert fleet.holds(node, "1") == wanted
    until(lambda: left.alive(token) == NODES, "every node is back by itself", 60)
    assert before < made

    made_last = json.loads(token_made.out)["record"]["token_id"]

    def trail() -> list[str]:
        """Return what the audit has been made by callers."""
        made = [(e["deployment_id"], e["data"]["on"].get("token_id")) for e in audit(second) or []]
        return [str(deployment or token) for deployment, token in made]

    until(lambda: made | {made_last} <= set(trail()), "each has its line in the audit", 60)
    assert len([each for each in trail() if each in made]) == len(made), "each once"
    read = bed.counters()["origin_out"] - sent

    fresh = running.bed.replace(lost)
    bed.mend(fresh.index)
    running.authority.issue(fresh)
    second.copy(".paceline", fresh)
    start_redis(fresh, fleet.logs)
    replace(fleet, replicas=(fresh, second, third)).start_replica(fresh)
    add_standby(second, fresh, fleet.logs)
    with capsys.disabled():
        sys.stderr.write(
            f"\n{len(before)} calls answered before the loss, {len(made) - 1} in all, none lost;"
            f" {leads_s:.1f} s until another led, {writes_s:.1f} s until a call was answered,"
            f" {audit_s:.1f} s from the promotion until the audit was read;"
            f" {read / (MEGABYTES * 1e6):.3f} x read; typed {len(TYPED)} blocks;"
            f" load {os.getloadavg()[0]:.0f}\n"
        )
