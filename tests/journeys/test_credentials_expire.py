"""Nodes read S3 with a role's session tokens, which end and are renewed while a model arrives.

The S3 server and its STS are Ceph's; every token ends after six seconds. Each node gets them in
another way that clouds have (docs/how-to/use-your-own-s3.md).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.journeys.fleet import Fleet, bring_up
from tests.journeys.hosts import SOFTWARE, Host, Site, site, until
from tests.support.rgw import Gateway, gateway

pytestmark = [
    pytest.mark.netns,
    pytest.mark.services,
    pytest.mark.nightly,
    pytest.mark.timeout(900),
]

ROLES = Path(__file__).with_name("roles.py")
TOKEN_S = 6
LOCAL = "http://127.0.0.1:8888"
MEGABYTES = 12
ORIGIN_MBIT = 16.0  # four nodes read 48 MB in about 25 s, so that every token ends meanwhile
SOURCE = "s3://models/models/acme-7b/1"

# How the agent of each node finds a role's credentials.
WAYS: dict[str, dict[str, str]] = {
    "container": {"AWS_CONTAINER_CREDENTIALS_FULL_URI": f"{LOCAL}/container"},
    "instance": {"AWS_EC2_METADATA_SERVICE_ENDPOINT": f"{LOCAL}/"},
    "web identity": {
        "AWS_ROLE_ARN": "arn:aws:iam:::role/node",
        "AWS_WEB_IDENTITY_TOKEN_FILE": "/home/user/identity",
        "AWS_ENDPOINT_URL_STS": LOCAL,
        "AWS_REGION": "us-east-1",
    },
    "file": {"AWS_EC2_METADATA_DISABLED": "true"},
}


@pytest.fixture(scope="module")
def bed(software: Path) -> Iterator[Site]:
    with site(software, hosts=1 + len(WAYS), origin_mbit=ORIGIN_MBIT) as made:
        yield made


@pytest.fixture(scope="module")
def s3(bed: Site) -> Iterator[Gateway]:
    with gateway("10.77.200.1", bed.enter_outside) as made:
        yield made


@pytest.fixture(scope="module")
def fleet(bed: Site, s3: Gateway, tmp_path_factory: pytest.TempPathFactory) -> Fleet:
    logs = tmp_path_factory.mktemp("logs")
    for host, way in zip(bed.hosts, ["container", *WAYS], strict=True):
        hand_out_tokens(host, s3, logs, "--file" if way == "file" else "")
    return bring_up(bed, logs, s3.url, WAYS["container"])


def keys(s3: Gateway) -> dict[str, str]:
    return {"AWS_ACCESS_KEY_ID": s3.access_key, "AWS_SECRET_ACCESS_KEY": s3.secret_key}


def make_bucket(host: Host, s3: Gateway) -> None:
    """Make the fleet's bucket, as its owner would."""
    host.run(
        *(f"{SOFTWARE}/bin/python", "-c"),
        f"import boto3; boto3.client('s3', endpoint_url='{s3.url}', region_name='us-east-1')"
        ".create_bucket(Bucket='models')",
        env=keys(s3),
    ).ok()


def hand_out_tokens(host: Host, s3: Gateway, logs: Path, file: str) -> None:
    """Start the host's source of tokens: the agent never sees the keys that this one has."""
    host.write("roles.py", ROLES.read_text())
    host.write("identity", "of-the-cluster")
    host.start(
        *(f"{SOFTWARE}/bin/python", "roles.py", "--sts", s3.url, "--seconds", str(TOKEN_S)),
        *((file, "/home/user/.aws/credentials") if file else ()),
        log=logs / f"roles-{host.index}",
        env=keys(s3),
    )


def test_tokens_that_end_midway_are_renewed_in_every_way(
    fleet: Fleet, bed: Site, s3: Gateway
) -> None:
    control = fleet.control
    make_bucket(control, s3)
    wanted = fleet.publish("1", MEGABYTES, WAYS["container"])
    for node, way in zip(fleet.nodes, WAYS, strict=True):
        fleet.agent(node, **WAYS[way])
    token = fleet.ci_token(control)
    until(lambda: fleet.alive(token) == len(WAYS), "every node registers")
    body = {
        "model_id": "acme-7b",
        "version": "1",
        "source_url": SOURCE,
        "topology": "direct",
        "target_workers": [f"node-{each.index}" for each in fleet.nodes],
    }
    fleet.call(token, "/deployments", json.dumps(body)).ok()
    ended = control.run("paceline", "watch").ok()
    assert "4 of 4 workers" in ended.out
    for node in fleet.nodes:
        assert fleet.holds(node, "1") == wanted
        assert node.run("grep", "-rlE", s3.secret_key, "state").code == 1
