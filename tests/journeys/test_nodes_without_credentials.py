"""Nodes have no credentials: the coordinator signs each of their reads, with a role's tokens.

The S3 server and its STS are Ceph's; the role's tokens end after six seconds, and with them the
signatures, while the model arrives (docs/how-to/use-your-own-s3.md).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.journeys.fleet import Fleet, bring_up
from tests.journeys.hosts import Ended, Host, Site, site, until
from tests.journeys.test_credentials_expire import WAYS, hand_out_tokens, make_bucket
from tests.support.rgw import Gateway, gateway

pytestmark = [
    pytest.mark.netns,
    pytest.mark.services,
    pytest.mark.nightly,
    pytest.mark.timeout(900),
]

NONE = {"AWS_EC2_METADATA_DISABLED": "true"}
MEGABYTES = 12
MODEL = "s3://models/models/acme-7b/1"


@pytest.fixture(scope="module")
def bed(software: Path) -> Iterator[Site]:
    with site(software, hosts=3, origin_mbit=8.0) as made:  # two nodes read 24 MB in about 25 s
        yield made


@pytest.fixture(scope="module")
def s3(bed: Site) -> Iterator[Gateway]:
    with gateway("10.77.200.1", bed.enter_outside) as made:
        yield made


@pytest.fixture(scope="module")
def fleet(bed: Site, s3: Gateway, tmp_path_factory: pytest.TempPathFactory) -> Fleet:
    logs = tmp_path_factory.mktemp("logs")
    hand_out_tokens(bed.hosts[0], s3, logs, "")
    made = bring_up(bed, logs, s3.url, WAYS["container"], "objects.presigned_s=900")
    make_bucket(made.control, s3)
    return made


def signs(fleet: Fleet, node: Host, **changed: str) -> Ended:
    """Ask the coordinator for a signed URL with the token of a node."""
    runtime = json.loads(node.run("cat", "state/runtime.json").ok().out)
    call = {"worker_id": f"node-{node.index}", "method": "GET", "url": f"{MODEL}/w", **changed}
    return node.run(
        *("curl", "-sk", "-H", f"Authorization: Bearer {runtime['secrets']['worker_token']}"),
        *("-H", "Content-Type: application/json", "-d", json.dumps(call)),
        f"{fleet.url}/workers/signed-reads",
    )


def test_a_model_arrives_on_nodes_that_hold_no_key(fleet: Fleet, s3: Gateway) -> None:
    wanted = fleet.publish("1", MEGABYTES, WAYS["container"])
    for node in fleet.nodes:
        fleet.agent(node, **NONE)
    token = fleet.ci_token(fleet.control)
    until(lambda: fleet.alive(token) == len(fleet.nodes), "every node registers")
    body = {
        "model_id": "acme-7b",
        "version": "1",
        "source_url": MODEL,
        "topology": "direct",
        "target_workers": [f"node-{each.index}" for each in fleet.nodes],
    }
    fleet.call(token, "/deployments", json.dumps(body)).ok()
    first = fleet.nodes[0]
    until(lambda: "X-Amz-Signature" in signs(fleet, first).out, "its reads are signed")
    for changed in (
        {"url": "s3://models/models/another/1/w"},
        {"url": f"{MODEL}/not-a-file"},
        {"worker_id": "node-2"},
    ):
        refused = signs(fleet, first, **changed).out
        assert '"code":"AccessDenied"' in refused, refused
    assert '"code":"InvalidInput"' in signs(fleet, first, method="PUT").out
    ended = fleet.control.run("paceline", "watch").ok()
    assert "2 of 2 workers" in ended.out
    for node in fleet.nodes:
        assert fleet.holds(node, "1") == wanted
        assert node.run("grep", "-rlE", s3.secret_key, "state").code == 1
    assert '"code":"AccessDenied"' in signs(fleet, first).out, "the deployment is over"
