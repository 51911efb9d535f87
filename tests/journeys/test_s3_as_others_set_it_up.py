"""S3 servers that are set up in other ways: virtual hosts, encryption, readers who pay.

Ceph's gateway, with the settings that docs/how-to/use-your-own-s3.md shows. The bucket is the
operator's; nodes read with keys of another account, or have none.
"""

from __future__ import annotations

import base64
import json
import os
import re
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.journeys.fleet import Fleet, bring_up
from tests.journeys.hosts import ROOT, SOFTWARE, Ended, Host, Site, site, until
from tests.journeys.test_credentials_expire import keys, make_bucket
from tests.support.rgw import Gateway, gateway

pytestmark = [
    pytest.mark.netns,
    pytest.mark.services,
    pytest.mark.nightly,
    pytest.mark.timeout(900),
]

PAGE = (ROOT / "docs/how-to/use-your-own-s3.md").read_text()
MEGABYTES = 12
READERS_POLICY = """{"Version": "2012-10-17", "Statement": [{"Effect": "Allow",
"Principal": {"AWS": ["arn:aws:iam:::user/reader"]}, "Action": ["s3:GetObject"],
"Resource": ["arn:aws:s3:::models/*"]}]}"""
# As the bucket's owner does with any tool of AWS's.
PREPARE = f"""
s3.put_bucket_policy(Bucket="models", Policy='''{READERS_POLICY}''')
s3.put_bucket_request_payment(
    Bucket="models", RequestPaymentConfiguration={{"Payer": "Requester"}}
)
"""
HEAD = 'print(s3.head_object(Bucket="models", Key="models/acme-7b/1/w").get("SSEKMSKeyId"))'


def settings(block: str) -> list[str]:
    """Return what a block of the page sets, as options of ``init``."""
    text = re.search(rf"^```toml {block}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert text, block
    made = []
    for name, value in tomllib.loads(text[1])["objects"].items():
        for key, each in value.items() if isinstance(value, dict) else [("", value)]:
            made.append(f"objects.{name}{key and '.'}{key}={each}")
    return made


@pytest.fixture(scope="module")
def bed(software: Path) -> Iterator[Site]:
    with site(software, hosts=3) as made:
        yield made


@pytest.fixture(scope="module")
def s3(bed: Site) -> Iterator[Gateway]:
    """Start the gateway; on hosts only its bucket has a name, as a host below the gateway's."""
    with gateway("10.77.200.1", bed.enter_outside) as made:
        for host in bed.hosts:
            line = "echo 10.77.200.1 models.s3.example >> /etc/hosts"
            host.run("sh", "-c", line, root=True).ok()
        make_bucket(bed.hosts[0], made)
        yield made


def python(host: Host, s3: Gateway, lines: str, **env: str) -> Ended:
    """Run lines of Python with a client ``s3``, as a user of boto3 has it."""
    client = f"import boto3; s3 = boto3.client('s3', endpoint_url='{s3.url}')\n"
    more = {"AWS_DEFAULT_REGION": "us-east-1", **env}
    return host.run(f"{SOFTWARE}/bin/python", "-c", client + lines, env=more)


def relayed(fleet: Fleet, version: str, wanted: str, way: str) -> None:
    """Deploy a version over REST to every node; their digests are ``wanted``."""
    token, began = fleet.ci_token(fleet.control), time.monotonic()
    until(lambda: fleet.alive(token) == len(fleet.nodes), "every node registers")
    made = fleet.distribute(fleet.control, token, version, fleet.nodes).ok()
    deployment = json.loads(made.out)["deployment_id"]

    def shown() -> dict[str, object]:
        return fleet.ended(fleet.control, token, deployment) or {}

    until(lambda: shown().get("status") == "complete", "the deployment completes", 120)
    assert [fleet.holds(each, version) for each in fleet.nodes] == [wanted] * len(fleet.nodes)
    record = shown()["deployment"]
    assert isinstance(record, dict)
    read = record["origin_bytes"] / (MEGABYTES * 1e6)
    sys.stdout.write(f"{way}: {time.monotonic() - began:.1f} s, {read:.3f} x from S3\n")
    assert read < 1.5, "one reader"


def test_a_bucket_is_a_host_has_a_key_of_kms_and_its_readers_pay(
    bed: Site, s3: Gateway, tmp_path: Path
) -> None:
    owner, there = keys(s3), s3.url.replace("10.77.200.1", "s3.example")
    python(bed.hosts[0], s3, PREPARE, **owner).ok()
    fleet = bring_up(bed, tmp_path, there, owner, *settings("kms"))
    wanted = fleet.publish("1", MEGABYTES, owner)
    reader = {**owner, "AWS_ACCESS_KEY_ID": f"reader{s3.access_key}"}
    for node in fleet.nodes:
        fleet.agent(node, **reader)
        assert "403" in python(node, s3, HEAD, **reader).err, "without a payer"
    relayed(fleet, "1", wanted, "virtual hosts, KMS, requester pays")
    assert python(fleet.control, s3, HEAD, **owner).ok().out == "models\n", "the key's name"


def test_a_key_of_ones_own_and_nodes_without_credentials(
    bed: Site, s3: Gateway, tmp_path: Path
) -> None:
    for host in bed.hosts:
        bed.replace(host)
    key = {"S3_CUSTOMER_KEY": base64.b64encode(os.urandom(32)).decode()}
    owner = {**keys(s3), **key}
    fleet = bring_up(bed, tmp_path, s3.url, owner, *settings("customer-key"))
    without = fleet.control.run(
        *("sh", "-c", "mkdir v; echo x > v/w; paceline publish v --model acme-7b --version 2"),
        env=keys(s3),
    )
    assert without.code == 77 and without.err.count("\n") == 1, without
    assert "$S3_CUSTOMER_KEY is not set" in without.err
    wanted = fleet.publish("2", MEGABYTES, owner)
    for node in fleet.nodes:
        fleet.agent(node, AWS_EC2_METADATA_DISABLED="true", **key)
    relayed(fleet, "2", wanted, "SSE-C, presigned")
    assert "400" in python(fleet.control, s3, HEAD.replace("/1/", "/2/"), **keys(s3)).err, (
        "unreadable without the key"
    )
    for host in bed.hosts:
        assert host.run("grep", "-rlF", key["S3_CUSTOMER_KEY"], ".").code == 1
