"""A lifecycle with a key that may do what docs/how-to/use-your-own-s3.md says, and nothing else.

The bucket is another account's, on Ceph's gateway; the key sees one prefix of it.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest

from paceline.errors import AccessDenied, SourceMissing
from paceline.storage import ObjectStore
from tests.journeys.guide import commands
from tests.support.rgw import Gateway, gateway
from tests.support.stack import paceline

pytestmark = [
    pytest.mark.slow,
    pytest.mark.services,
    pytest.mark.nightly,  # a second installation
    pytest.mark.xdist_group("installation"),
    pytest.mark.timeout(400),
]
PAGE = "how-to/use-your-own-s3.md"


@pytest.fixture(scope="module")
def server() -> Iterator[Gateway]:
    with gateway() as made:
        yield made


def granted(server: Gateway, *without: str) -> ObjectStore:
    """Give the reader the page's policy, less some actions; return a store with its key."""
    policy = json.loads(commands(PAGE, "json")["policy"])
    for each in policy["Statement"]:
        each["Principal"] = {"AWS": ["arn:aws:iam:::user/reader"]}
        each["Action"] = [action for action in each["Action"] if action not in without]
    policy["Statement"] = [each for each in policy["Statement"] if each["Action"]]
    owner: Any = boto3.client(
        "s3", endpoint_url=server.url, region_name="us-east-1",
        aws_access_key_id=server.access_key, aws_secret_access_key=server.secret_key,
    )  # fmt: skip
    if "models" not in [each["Name"] for each in owner.list_buckets()["Buckets"]]:
        owner.create_bucket(Bucket="models")
    owner.put_bucket_policy(Bucket="models", Policy=json.dumps(policy))
    return ObjectStore(
        endpoint_url=server.url, access_key=f"reader{server.access_key}",
        secret_key=server.secret_key,
    )  # fmt: skip


def test_a_lifecycle_needs_no_more_than_the_page_says(
    server: Gateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = granted(server)
    with pytest.raises(AccessDenied):
        store.put_bytes("s3://models/others/x", b"")
    with pytest.raises(AccessDenied):
        store.list("s3://models/others")
    own = tomllib.loads(commands(PAGE, "toml")["prefix"])["storage"]
    settings = [f"storage.{name}={value}" for name, value in own.items()]
    settings += [f"objects.endpoint_url={server.url}", "training.steps=10"]
    words = [word for each in settings for word in ("--set", each)]
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", f"reader{server.access_key}")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", server.secret_key)
    words = ["demo", "--json", "--profile", "ci", *words]
    demo = paceline(*words, state=tmp_path / "state", timeout_s=350)
    assert demo.code == 0, demo.err
    assert demo.answer["status"] == "complete"
    found = {each.url.split("/")[4] for each in store.list("s3://models/team")}
    assert found == {"models", "data", "checkpoints", "records"}


def test_what_is_missing_is_told_from_what_is_refused(server: Gateway) -> None:
    store = granted(server)
    assert not store.exists("s3://models/team/models/none")
    with pytest.raises(SourceMissing, match="object does not exist"):
        store.get_bytes("s3://models/team/models/none")
    store.put_bytes("s3://models/team/models/one", b"1")
    assert store.get_bytes("s3://models/team/models/one") == b"1"
    with pytest.raises(AccessDenied, match="Without s3:ListBucket"):
        granted(server, "s3:ListBucket").head("s3://models/team/models/none")
    reads = granted(server, "s3:PutObject", "s3:DeleteObject")
    with pytest.raises(AccessDenied, match="AccessDenied"):
        reads.put_bytes("s3://models/team/models/two", b"2")
