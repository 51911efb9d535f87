"""Credentials come from boto3's default chain, are renewed midway, and never stand in a profile."""

from __future__ import annotations

import json
import re
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import groupby
from pathlib import Path

import pytest

from paceline.config import ObjectAccess, ObjectSettings, Profile, load_profile, object_access
from paceline.errors import AccessDenied, InvalidInput
from paceline.storage import ObjectStore, client as clients
from tests.support.certificates import self_signed

EXPIRED = b"<Error><Code>ExpiredToken</Code><Message>The token has expired.</Message></Error>"


class Server(ThreadingHTTPServer):
    """Answers HEAD and GET as S3 does, to the keys in ``valid``; serves roles under /role."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.valid: set[str] = set()
        self.seen: list[tuple[str, str]] = []  # access key and payer of each request
        self.roles: list[str] = []
        self.url = f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if self.path == "/role":
            key = f"ROLE{len(self.server.roles)}"
            self.server.roles.append(key)
            self.server.valid = {key}
            # boto3 renews what ends within ten minutes before its next use
            ends = datetime.now(UTC) + timedelta(seconds=300)
            body = {"AccessKeyId": key, "SecretAccessKey": "s", "Token": f"token-of-{key}"}
            self._answer(200, json.dumps({**body, "Expiration": ends.isoformat()}).encode())
            return
        found = re.search(r"Credential=(\w+)/", self.headers.get("Authorization", ""))
        key = found[1] if found else ""
        self.server.seen.append((key, self.headers.get("x-amz-request-payer", "")))
        if key in self.server.valid:
            self._answer(200, b"four")
        else:
            self._answer(400, EXPIRED)

    do_HEAD = do_GET

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", '"e"')
        self.send_header("Last-Modified", "Sun, 22 Nov 2026 12:00:00 GMT")
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setattr(clients, "_sessions", {})
    with Server() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def write(path: Path, key: str, section: str = "default") -> None:
    path.write_text(
        f"[{section}]\naws_access_key_id={key}\naws_secret_access_key=s\n"
        f"aws_session_token=token-of-{key}\n"
    )


def store_at(server: Server, **named: object) -> ObjectStore:
    objects = ObjectSettings.model_validate({"endpoint_url": server.url, **named})
    return ObjectStore(object_access(Profile(objects=objects)))


def test_a_renewed_file_is_read_when_its_token_expires(server: Server, tmp_path: Path) -> None:
    write(tmp_path / "credentials", "OLD")
    server.valid = {"OLD"}
    store = store_at(server)
    assert store.get_bytes("s3://bucket/key") == b"four"
    server.valid = {"NEW"}
    write(tmp_path / "credentials", "NEW")
    assert store.get_bytes("s3://bucket/key") == b"four"
    assert [key for key, _ in groupby(key for key, _ in server.seen)] == ["OLD", "NEW"]


def test_an_expired_token_that_nothing_renews_is_named(server: Server, tmp_path: Path) -> None:
    write(tmp_path / "credentials", "OLD")
    store = store_at(server)
    with pytest.raises(AccessDenied, match="ExpiredToken"):
        store.read_range_into("s3://bucket/key", 0, memoryview(bytearray(4)), etag='"e"')
    with pytest.raises(AccessDenied, match="ExpiredToken"):  # a HEAD's answer has no body
        store.head("s3://bucket/key")
    assert {key for key, _ in server.seen} == {"OLD"}


def test_a_roles_credentials_are_renewed_before_they_end(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"{server.url}/role")
    store = store_at(server)
    end = time.monotonic() + 10
    while len({key for key, _ in server.seen}) < 2 and time.monotonic() < end:
        store.get_bytes("s3://bucket/key")
    assert len({key for key, _ in server.seen}) >= 2


def test_a_named_profile_and_its_parameters_are_used(server: Server, tmp_path: Path) -> None:
    write(tmp_path / "credentials", "TEAM", "team")
    server.valid = {"TEAM"}
    store = store_at(server, profile="team", parameters={"RequestPayer": "requester"})
    assert store.get_bytes("s3://bucket/key") == b"four"
    assert set(server.seen) == {("TEAM", "requester")}


def test_an_unknown_profile_is_named(server: Server) -> None:
    with pytest.raises(InvalidInput, match="no such profile: got nowhere"):
        store_at(server, profile="nowhere").get_bytes("s3://bucket/key")


def test_a_machine_without_credentials_says_so(server: Server) -> None:
    with pytest.raises(AccessDenied, match="no S3 credentials"):
        store_at(server).get_bytes("s3://bucket/key")
    assert server.seen == []


def test_a_certificate_of_a_private_authority_is_trusted_by_its_text(
    server: Server, tmp_path: Path
) -> None:
    """The profile's file is read once; its text is what other machines get."""
    cert, key = self_signed(tmp_path, "127.0.0.1")
    cert.write_text(cert.read_text() + key.read_text())  # as some keep them
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    url = server.url.replace("http:", "https:")
    write(tmp_path / "credentials", "KEY")
    server.valid = {"KEY"}
    with pytest.raises(AccessDenied, match=r"is not trusted here.*self-signed.*AWS_CA_BUNDLE"):
        store_at(server, endpoint_url=url).get_bytes("s3://bucket/key")
    profile = load_profile("fleet-1000", {"objects.ca": str(cert)})
    assert "PRIVATE" not in profile.objects.ca
    trusting = store_at(server, endpoint_url=url, ca=profile.objects.ca)
    assert trusting.get_bytes("s3://bucket/key") == b"four"


@pytest.mark.parametrize("key", ["SSECustomerKey", "CopySourceSSECustomerKey"])
def test_a_profile_holds_no_keys(key: str) -> None:
    with pytest.raises(ValueError, match="keys do not stand in a profile"):
        ObjectSettings(parameters={key: "x"})
    with pytest.raises(ValueError, match="access_key"):
        ObjectSettings.model_validate({"access_key": "x"})


def test_access_does_not_show_its_secret() -> None:
    assert "hidden" not in repr(ObjectAccess(access_key="a", secret_key="hidden"))


TOGETHER = """
import sys, threading, time
from paceline.errors import ServiceUnavailable
from paceline.storage import ObjectStore

class Slow:  # both threads are importing before either is done
    def find_spec(self, name, path=None, target=None):
        if name == "boto3":
            time.sleep(0.5)

sys.meta_path.insert(0, Slow())
keys = {"endpoint_url": "http://127.0.0.1:9", "access_key": "a", "secret_key": "b"}
asked, warm = ObjectStore(**keys), ObjectStore(**keys)

def ask():
    try:
        asked.head("s3://bucket/key")
    except ServiceUnavailable:
        print("asked")

def warm_up():
    warm.warm_up()
    print("warm")

threads = [threading.Thread(target=each) for each in (ask, warm_up)]
for each in threads: each.start()
for each in threads: each.join()
"""


def test_two_threads_may_make_the_first_request() -> None:
    """Importing boto3 in several threads at once must not show any of them half of it."""
    done = subprocess.run(
        [sys.executable, "-c", TOGETHER], capture_output=True, text=True, check=False, timeout=60
    )
    assert sorted(done.stdout.split()) == ["asked", "warm"], done.stderr
