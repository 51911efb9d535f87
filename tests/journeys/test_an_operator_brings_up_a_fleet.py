"""An operator brings up a fleet; a CI host distributes while a leader, a rack and a node fail.

Three coordinators with etcd, Redis and PostgreSQL (all with TLS), an external S3, fifteen nodes in
three racks, on two versions of Python where this machine has two. What is typed is
docs/how-to/bring-up-a-fleet.md. PACELINE_JOURNEY_MB sets the model's size; `make journeys` sets
400.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.journeys.fleet import ENVIRONMENT, Fleet, bring_up_three, rclone_s3
from tests.journeys.guide import typed
from tests.journeys.hosts import Host, Site, site, until
from tests.journeys.stores import start_three_stores

pytestmark = [
    pytest.mark.netns,
    pytest.mark.services,
    pytest.mark.nightly,
    pytest.mark.timeout(1800),
]

RACK = 5  # hosts; in rack 0 are three replicas, the stores and the CI's host
MEGABYTES = float(os.environ.get("PACELINE_JOURNEY_MB", "100"))
RATE_MBIT = 50.0
GOODPUT = RATE_MBIT * 1e6 * 1448 / 1514 / 8  # bytes a second
SWITCH_S = 8.0  # how long a rack is cut off
FUSE_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True)
class Grown:
    """The running fleet, with its CI host."""

    fleet: Fleet
    ci: Host
    bed: Site


@pytest.fixture(scope="module")
def grown(
    software: Path,
    newest_software: Path,
    control_software: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Grown]:
    logs = tmp_path_factory.mktemp("logs")
    nodes_of_a_rack = [software, newest_software, software, newest_software, software]
    installed = [control_software] * 3 + [software] * 2 + nodes_of_a_rack * 3
    with site(installed, hosts=4 * RACK, rate_mbit=RATE_MBIT, racks=4) as bed:
        replicas, (stores, ci), nodes = bed.hosts[:3], bed.hosts[3:5], bed.hosts[5:]
        directory = tmp_path_factory.mktemp("authority")
        servers = start_three_stores(replicas, stores, directory, logs)
        with rclone_s3(bed, logs) as s3_url:
            fleet = bring_up_three(replicas, nodes, logs, s3_url, RATE_MBIT, **servers)
            for index, node in enumerate(nodes):
                fleet.agent(node, rack=f"r{1 + index // RACK}", **ENVIRONMENT)
            yield Grown(fleet, ci, bed)


def test_a_deployment_outlives_its_leader_a_rack_switch_and_a_node(
    grown: Grown, capsys: pytest.CaptureFixture[str]
) -> None:
    fleet, ci, bed = grown.fleet, grown.ci, grown.bed.bed
    nodes, size = fleet.nodes, MEGABYTES * 1e6
    wanted = fleet.publish("1", MEGABYTES, ENVIRONMENT)
    token = fleet.ci_token(ci)
    until(lambda: fleet.alive(token) == len(nodes), "every node registers", timeout_s=60)
    pythons = {each.run("python", "--version").ok().out.split()[1] for each in nodes}
    sent, began = bed.counters()["origin_out"], time.monotonic()
    made = json.loads(fleet.distribute(ci, token, "1", nodes).ok().out)["deployment_id"]
    again = json.loads(fleet.distribute(ci, token, "1", nodes).ok().out)["deployment_id"]
    assert again == made, "the same call again is the same deployment"

    def copied() -> float:
        return min(
            float(node.run("sh", "-c", "du -sb state/nodes/*/store | cut -f1").out or 0)
            for node in nodes
        )

    until(lambda: copied() > size / 5, "a fifth is everywhere", timeout_s=120 + size / GOODPUT)
    leader, rack, lost = fleet.leader(ci), nodes[RACK : 2 * RACK], nodes[-1]
    assert leader is not None, "a replica names it"
    leader.power_off()
    lost.power_off()
    for each in rack:
        bed.cut(each.index)
    time.sleep(SWITCH_S)
    for each in rack:
        bed.mend(each.index)
    last: dict[str, Any] = {}

    def ended() -> bool:
        last.update(fleet.ended(ci, token, made) or {})
        return last.get("status") in ("complete", "failed", "stalled")

    until(ended, "the deployment ends", timeout_s=240 + 2 * size / GOODPUT)
    seconds = time.monotonic() - began
    assert last["status"] == "complete", json.dumps(last)
    for node in nodes[:-1]:
        assert fleet.holds(node, "1") == wanted
        left = node.run("sh", "-c", "ls -A state/nodes/*/store/staging; find . -name '*.tmp'")
        assert left.ok().out == "", f"{node.index}: temporaries stay behind"
    read = last["deployment"]["origin_bytes"]
    on_the_wire = bed.counters()["origin_out"] - sent
    assert read <= (budget := max(1.02 * size, size + FUSE_BYTES))
    assert on_the_wire <= 1.08 * budget, "what is not counted was read too"
    survivors = [each for each in (*fleet.replicas, *nodes[:-1]) if each is not leader]
    for each in survivors:
        each.run("pkill", "-TERM", "-f", "bin/paceline")
    for each in survivors:
        until(lambda on=each: running(on) == "", f"host {each.index} stops what it runs")
    with capsys.disabled():
        sys.stderr.write(
            f"\n{size / 1e6:.0f} MB on {len(nodes) - 1} nodes in {seconds:.1f} s, "
            f"{seconds * GOODPUT / size:.2f} x the bound; from the source {read / size:.3f} x, "
            f"{on_the_wire / size:.3f} x on the wire; typed: {len(set(typed))} of the page's "
            f"blocks, two of them for each node; Python {' and '.join(sorted(pythons))}\n"
        )


def running(host: Host) -> str:
    """Return the processes of Paceline on a host."""
    return host.run("pgrep", "-a", "-f", "bin/paceline").out
