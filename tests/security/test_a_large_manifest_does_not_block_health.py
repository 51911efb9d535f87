"""While a coordinator parses a hostile manifest as large as it reads, /healthz answers."""

from __future__ import annotations

import http.client
import threading
import time
from contextlib import closing
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from benchmarks.parsers import CASES, SIZE
from paceline.errors import InvalidManifest
from paceline.manifest import MANIFEST_FILE, MAX_MANIFEST_BYTES, parse, parse_manifest
from tests.api.conftest import Served, creation, make_runtime

LEAST_ANSWERS = 10  # of /healthz while one manifest is parsed; a blocked loop gives none or one


@pytest.fixture
def coordinator(tmp_path: Path):
    server = Served(make_runtime(tmp_path / "state"))
    server.runtime.state_dir.mkdir()
    server.start()
    yield server
    server.end()


class Health(threading.Thread):
    """Asks for /healthz again and again, and keeps how long each answer took."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self.address = urlsplit(url).netloc
        self.seconds: list[float] = []
        self.over = threading.Event()

    def run(self) -> None:
        with closing(http.client.HTTPConnection(self.address, timeout=60)) as connection:
            while not self.over.wait(0.025):  # below the 50 calls/s of an address
                began = time.monotonic()
                connection.request("GET", "/healthz")
                answer = connection.getresponse()
                answer.read()
                assert answer.status == 200
                self.seconds.append(time.monotonic() - began)


def refused_while_healthy(server: Served, raw: bytes) -> tuple[str, Health]:
    place = server.runtime.state_dir / "sources/hostile"
    place.mkdir(parents=True, exist_ok=True)
    (place / MANIFEST_FILE).write_bytes(raw)
    health = Health(server.url)
    health.start()
    try:
        with closing(server.client()) as client, pytest.raises(InvalidManifest) as caught:
            client.create(creation(str(place), ["node-0"]), "key")
    finally:
        health.over.set()
        health.join(60)
    return caught.value.one_line(), health


def test_health_answers_while_the_largest_manifest_is_parsed(coordinator: Served) -> None:
    assert SIZE <= MAX_MANIFEST_BYTES
    said, health = refused_while_healthy(coordinator, CASES["manifest: long paths"].make(SIZE))
    assert "files do not tile" in said
    assert len(health.seconds) >= LEAST_ANSWERS, health.seconds


def test_large_manifests_are_parsed_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    most, now, lock = [0], [0], threading.Lock()

    def parsed(raw: bytes) -> None:
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
        time.sleep(0.02)
        with lock:
            now[0] -= 1

    monkeypatch.setattr(parse, "_parsed", parsed)
    raw = bytes(parse.LARGE_BYTES + 1)
    threads = [threading.Thread(target=parse_manifest, args=(raw,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert most == [1]
