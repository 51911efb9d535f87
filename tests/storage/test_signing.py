"""Reads without credentials: each URL is signed by somebody else, and renewed when it ends."""

from __future__ import annotations

import os
import time

import pytest

from paceline.errors import AccessDenied, ServiceUnavailable, SourceChanged, SourceMissing
from paceline.storage import ObjectStore, Sign, Signed
from tests.support.rclone import RcloneS3

URL = "s3://signed/a b+c/w"


@pytest.fixture(params=[pytest.param("rgw", marks=pytest.mark.services), "s3"])
def owner(request: pytest.FixtureRequest) -> ObjectStore:
    """A store with credentials, on two real servers."""
    made = request.getfixturevalue(request.param)
    found: ObjectStore = made.store() if isinstance(made, RcloneS3) else made
    found.ensure_bucket("signed")
    return found


pytestmark = pytest.mark.xdist_group("rgw")  # one server


def signed_by(owner: ObjectStore, asked: list[str], valid_s: int = 60, says_s: float = 60) -> Sign:
    def sign(method: str, url: str, version_id: str) -> Signed:
        asked.append(method)
        return Signed(owner.signed(method, url, version_id, valid_s), says_s)

    return sign


def reader(owner: ObjectStore, sign: Sign) -> ObjectStore:
    return ObjectStore(endpoint_url=owner.endpoint_url, sign=sign)


def test_ranges_are_read_without_credentials_and_each_url_is_signed_once(
    owner: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = os.urandom(300_000)
    owner.put_bytes(URL, data)
    for each in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(each, raising=False)
    asked: list[str] = []
    store = reader(owner, signed_by(owner, asked))
    info = store.head(URL)
    for offset in (0, 100_000, 250_000):
        into = bytearray(50_000)
        store.read_range_into(URL, offset, memoryview(into), etag=info.etag, size=info.size)
        assert bytes(into) == data[offset : offset + 50_000]
    assert asked == ["HEAD", "GET"]
    owner.put_bytes(URL, os.urandom(300_000))
    with pytest.raises(SourceChanged):
        store.read_range_into(URL, 0, memoryview(bytearray(10)), etag=info.etag, size=info.size)
    with pytest.raises(SourceMissing):
        store.head("s3://signed/nothing")


def test_an_expired_url_is_signed_anew_and_a_second_refusal_counts(
    owner: ObjectStore,
) -> None:
    data = os.urandom(100_000)
    info = owner.put_bytes(URL, data)
    asked: list[str] = []
    # The signer's session ends long before it says: the server refuses what is still in use here.
    store = reader(owner, signed_by(owner, asked, valid_s=2, says_s=600))
    into = bytearray(1000)
    store.read_range_into(URL, 0, memoryview(into), etag=info.etag)
    time.sleep(3.2)
    store.read_range_into(URL, 5000, memoryview(into), etag=info.etag)
    assert bytes(into) == data[5000:6000]
    assert asked == ["GET", "GET"]
    forged = ObjectStore(
        endpoint_url=owner.endpoint_url, access_key=owner.access.access_key, secret_key="x" * 40
    )
    with pytest.raises(AccessDenied):
        reader(owner, signed_by(forged, [])).head(URL)


def test_a_signer_that_is_away_is_waited_for_like_the_server(owner: ObjectStore) -> None:
    info = owner.put_bytes(URL, b"0123456789")
    sign, tries = signed_by(owner, []), []

    def away_at_first(method: str, url: str, version_id: str) -> Signed:
        tries.append(method)
        if len(tries) < 3:
            raise ServiceUnavailable("the coordinator does not answer")
        return sign(method, url, version_id)

    into = bytearray(10)
    reader(owner, away_at_first).read_range_into(URL, 0, memoryview(into), etag=info.etag)
    assert bytes(into) == b"0123456789"


def test_nothing_is_written_without_credentials(owner: ObjectStore) -> None:
    def never(method: str, url: str, version_id: str) -> Signed:
        raise AccessDenied("no such read", got=method)

    with pytest.raises(AccessDenied, match="PUT"):
        reader(owner, never).put_bytes(URL, b"x")
