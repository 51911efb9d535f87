"""The authority is replaced while a deployment runs; a node is taken out and comes back.

One node's clock is ten minutes ahead all the time. What is typed is
docs/how-to/bring-up-a-fleet.md ("Replace the authority", "Take a node out, and back").
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.journeys.fleet import (
    ENVIRONMENT,
    MODEL,
    Fleet,
    bring_up,
    name_of,
    rclone_s3,
    start_coordinator,
)
from tests.journeys.guide import block, type_on
from tests.journeys.hosts import Host, Site, clock_ahead, site, until

pytestmark = [
    pytest.mark.netns,
    pytest.mark.services,
    pytest.mark.nightly,
    pytest.mark.timeout(900),
]

NODES = 3
RATE_MBIT = 20.0
MEGABYTES = 50.0  # 21 s at that rate: the three steps and a restart lie within


@pytest.fixture(scope="module")
def bed(software: Path) -> Iterator[Site]:
    with site(software, hosts=2 + NODES, rate_mbit=RATE_MBIT) as made:
        yield made


@pytest.fixture(scope="module")
def fleet(bed: Site, tmp_path_factory: pytest.TempPathFactory, clock_shim: Path) -> Iterator[Fleet]:
    logs = tmp_path_factory.mktemp("logs")
    with rclone_s3(bed, logs) as url:
        made = bring_up(bed, logs, url, ENVIRONMENT)
        for node in made.nodes[:NODES]:
            clock = clock_ahead(node, clock_shim, 600) if node is made.nodes[1] else {}
            made.agent(node, **ENVIRONMENT, **clock)
        yield made


def authority(fleet: Fleet, step: str) -> None:
    """Type a step of the page, again while it says that nodes are not ready for it."""
    number = ("add", "switch", "retire").index(step) + 1
    text = block("Replace the authority", number)
    until(
        lambda: fleet.control.run("bash", "-ec", text).code == 0,
        f"the authority takes the step {step}",
    )


def certificates(host: Host) -> list[str]:
    """Return the certificates that a node trusts, and who signed its own."""
    script = (
        "for each in state/identity/ca.*pem; do"
        # One may go between the listing and the reading.
        " openssl x509 -in $each -noout -fingerprint -sha256 || test ! -e $each; done;"
        " openssl verify -CAfile state/identity/ca.pem state/identity/node.pem"
    )
    return host.run("bash", "-ec", script).ok().out.splitlines()


def test_deployments_run_on_while_the_authority_is_replaced(
    fleet: Fleet, bed: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    nodes, ci = fleet.nodes[:NODES], fleet.nodes[NODES]
    token = fleet.ci_token(ci)
    until(lambda: fleet.alive(token) == NODES, "every node registers")
    before = {node.index: certificates(node) for node in nodes}
    assert all(len(each) == 2 for each in before.values())
    wanted = fleet.publish("1", MEGABYTES, ENVIRONMENT)
    sent, began = bed.bed.counters()["origin_out"], time.monotonic()
    made = json.loads(fleet.distribute(ci, token, "1", nodes).ok().out)["deployment_id"]
    authority(fleet, "add")
    authority(fleet, "switch")
    token = fleet.ci_token(ci)  # with the new certificate beside it
    fleet.control.run("pkill", "-TERM", "-f", "paceline coordinator").ok()
    start_coordinator(fleet.control, fleet.logs, ENVIRONMENT)
    authority(fleet, "retire")
    rotated_s = time.monotonic() - began
    until(lambda: over(fleet, ci, token, made), "the deployment ends", timeout_s=120)
    seconds = time.monotonic() - began
    view = fleet.ended(ci, token, made)
    assert view is not None
    assert view["status"] == "complete", view
    for node in nodes:
        assert fleet.holds(node, "1") == wanted
        until(
            lambda on=node: len(certificates(on)) == 2,
            f"{name_of(node)} trusts the new authority alone",
        )
        assert not set(certificates(node)[:1]) & set(before[node.index])
        assert node.run("sh", "-c", "ls -A state/nodes/*/store/staging").ok().out == ""
    read = (bed.bed.counters()["origin_out"] - sent) / (MEGABYTES * 1e6)
    with capsys.disabled():
        sys.stderr.write(
            f"\nreplaced in {rotated_s:.1f} s, {MEGABYTES:.0f} MB on {NODES} nodes in "
            f"{seconds:.1f} s meanwhile; from the source {read:.3f} x on the wire\n"
        )
    assert read < 1.2


def test_a_node_is_taken_out_and_comes_back(fleet: Fleet) -> None:
    """Peers refuse it from then on; with a new token in place of the old it is one again."""
    *stay, out = fleet.nodes[:NODES]
    ci = fleet.nodes[NODES]
    token = fleet.ci_token(ci)
    type_on(fleet.control, block("Take a node out, and back", 1, NODE=name_of(out)))
    until(lambda: fleet.alive(token) == NODES - 1, "the coordinator counts it no more")
    for each in stay:
        until(
            lambda on=each: f"refused from now on: {name_of(out)}" in fleet.log(name_of(on)),
            "peers",
        )
    bring("2", fleet, ci, token, stay)
    assert out.run("ls", f"state/nodes/{name_of(out)}/store/models/{MODEL}").ok().out == "1\n"
    out.run("pkill", "-TERM", "-f", "paceline agent").ok()
    fleet.agent(out, **ENVIRONMENT)
    until(lambda: fleet.alive(token) == NODES, "it is back")
    assert fleet.holds(out, "1"), "what it held stays"
    bring("3", fleet, ci, token, fleet.nodes[:NODES])


def bring(version: str, fleet: Fleet, ci: Host, token: str, nodes: Sequence[Host]) -> None:
    """Publish a version and distribute it to its end."""
    wanted = fleet.publish(version, 5, ENVIRONMENT)
    made = json.loads(fleet.distribute(ci, token, version, nodes).ok().out)["deployment_id"]
    until(lambda: over(fleet, ci, token, made), "the deployment ends", timeout_s=60)
    for each in nodes:
        assert fleet.holds(each, version) == wanted


def over(fleet: Fleet, ci: Host, token: str, deployment: str) -> bool:
    view = fleet.ended(ci, token, deployment) or {}
    return view.get("status") in ("complete", "failed", "stalled")
