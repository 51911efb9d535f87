"""An operator plans, publishes, lets nodes join with one token, distributes and activates.

What is typed is docs/how-to/from-plan-to-activation.md, on a coordinator and three nodes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.journeys.fleet import ENVIRONMENT, Fleet, bring_up, rclone_s3
from tests.journeys.guide import commands
from tests.journeys.hosts import Ended, Host, site, until

pytestmark = [pytest.mark.netns, pytest.mark.nightly, pytest.mark.timeout(900)]

BLOCKS = commands("how-to/from-plan-to-activation.md")
NODES = 2  # that may join; a third has the token too


@dataclass(frozen=True)
class Operator:
    """The fleet, and what the page's variables are."""

    fleet: Fleet
    values: dict[str, str]
    logs: Path

    def types(self, name: str, **more: str) -> Ended:
        env = ENVIRONMENT | self.values | more
        return self.fleet.control.run("bash", "-ec", BLOCKS[name], env=env).ok()

    def joins(self, node: Host, token: str) -> Path:
        """Start the agent of a node with the group's token; return its log."""
        node.write("token", token)
        log = self.logs / f"agent-{node.index}"
        env = ENVIRONMENT | self.values
        node.start("bash", "-c", f"exec {BLOCKS['agent']}", log=log, env=env)
        return log


@pytest.fixture(scope="module")
def operator(software: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operator]:
    logs = tmp_path_factory.mktemp("logs")
    with site(software, hosts=4) as bed, rclone_s3(bed, logs) as s3_url:
        fleet = bring_up(bed, logs, s3_url, ENVIRONMENT)
        fleet.control.run("sh", "-c", "mkdir new; head -c 6000000 /dev/urandom > new/w").ok()
        values = {
            "COORDINATOR": fleet.url,
            "NODES": str(NODES),
            "NETWORK": ".".join(fleet.control.address.split(".")[:2]) + ".0.0/16",
            "SIZE": "6MB",
            "LINK": "200Mbps",
            "DIRECTORY": "new",
            "MODEL": "acme-7b",
            "VERSION": "1",
        }
        yield Operator(fleet, values, logs)


def test_every_node_of_one_token_serves_the_model_at_the_end(operator: Operator) -> None:
    fleet, control = operator.fleet, operator.fleet.control
    assert "tree" in operator.types("plan").out
    operator.types("publish")
    operator.types("token")
    token = control.run("cat", "token").ok().out
    *joining, late = fleet.nodes
    for node in joining:
        operator.joins(node, token)
    until(
        lambda: operator.types("workers").out.count("host-") >= 2 * NODES,
        "every node is in both lists",
        timeout_s=60,
    )
    assert f"0 of {NODES} uses left" in " ".join(operator.types("workers").out.split())
    log = operator.joins(late, token)
    until(lambda: "the token is used up" in log.read_text(), "one node more is refused")
    shown = operator.types("distribute").out
    assert f"on {NODES} of {NODES} workers, not activated" in shown
    operator.types("activate", DEPLOYMENT=shown.split()[-1])
    for node in joining:
        store = f"state/nodes/host-{node.index}/store/models/acme-7b"
        assert node.run("sh", "-c", f"basename $(readlink {store}/active)").ok().out == "1\n"
        assert (
            node.run("sha256sum", f"{store}/1/w").ok().out.split()[0]
            == (control.run("sha256sum", "new/w").ok().out.split()[0])
        )


def test_a_token_for_another_network_is_refused_in_one_line(operator: Operator) -> None:
    made = operator.types("token", NETWORK="192.0.2.0/24")
    assert "shown this once" in made.err
    late = operator.fleet.nodes[-1]
    log = operator.joins(late, operator.fleet.control.run("cat", "token").ok().out)
    until(lambda: "not for this network" in log.read_text(), "its network is refused")
    line = next(each for each in log.read_text().splitlines() if "this network" in each)
    assert late.address in line
    assert "192.0.2.0/24" in line
    listed = json.loads(operator.fleet.control.run("paceline", "tokens", "list", "--json").ok().out)
    assert [each["joined"] for each in listed["tokens"] if each.get("nodes")] == [NODES, 0]
