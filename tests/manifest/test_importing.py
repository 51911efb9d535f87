"""A model that others host is read once, whatever fails, and is then a version like any other."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.config import Profile
from paceline.errors import (
    Conflict,
    CorruptData,
    InvalidManifest,
    OriginBudgetExceeded,
    PacelineError,
    ServiceUnavailable,
)
from paceline.manifest import (
    Manifest,
    build_manifest,
    fetch_manifest,
    import_model,
    importing,
)
from paceline.plan import origin_cap_bytes
from paceline.storage import ObjectStore, RemoteModel, client, join_url, remote_model
from tests.support.hub import Hub, serving_hub
from tests.support.rclone import RcloneS3

NAME = "acme/tiny"
PART = 5 * 1024 * 1024  # the least that S3 takes
BIG = 3 * PART + 12_345


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importing, "MIN_PART", PART)
    monkeypatch.setattr(importing, "SETTLE_S", 0.05)
    monkeypatch.setattr(importing, "LOOK_S", 0.05)
    monkeypatch.setattr(client, "RETRY_BUDGET_S", 0.2)


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    place = tmp_path / "hub" / NAME
    (place / "onnx").mkdir(parents=True)
    (place / "config.json").write_text('{"model_type": "tiny"}')
    (place / "empty.txt").touch()
    (place / "onnx/words.txt").write_text("words " * 500)
    (place / "model-1.safetensors").write_bytes(os.urandom(BIG))
    (place / "model-2.safetensors").write_bytes(os.urandom(200_000))
    with serving_hub(tmp_path / "hub") as made:
        yield made


@pytest.fixture
def store(s3: RcloneS3) -> ObjectStore:
    store = s3.store()
    store.ensure_bucket("imports")
    return store


@pytest.fixture
def url(request: pytest.FixtureRequest) -> str:
    return f"s3://imports/{abs(hash(request.node.name))}/{NAME}/main"


def source(hub: Hub) -> RemoteModel:
    hosts = (hub.cdn_url.removeprefix("http://"),)
    profile = Profile.model_validate({"hub": {"endpoint": hub.url, "redirect_hosts": hosts}})
    return remote_model(f"hf://{NAME}", profile)


def bring(hub: Hub, url: str, store: ObjectStore, cap: int | None = None, **more: Any) -> Manifest:
    found = source(hub)
    cap = origin_cap_bytes(found.total_size) if cap is None else cap
    return import_model(found, url, store=store, cap_bytes=cap, link_mbit=1000, **more)


def assert_complete(hub: Hub, url: str, store: ObjectStore, manifest: Manifest) -> None:
    """The version is what a publish of the same files would be."""
    place = hub.root / NAME
    wanted = build_manifest(place, model_id=NAME, version=hub.commit(NAME), link_mbit=1000)
    assert manifest == wanted == fetch_manifest(url, store)
    for file in wanted.files:
        assert store.get_bytes(join_url(url, file.path)) == (place / file.path).read_bytes()
    names = {each.url.removeprefix(f"{url}/") for each in store.list(url)}
    assert names == {*(file.path for file in wanted.files), "manifest.json"}


def test_an_import_reads_each_byte_once_and_never_again(
    hub: Hub, url: str, store: ObjectStore
) -> None:
    seen: list[float] = []
    manifest = bring(hub, url, store, on_progress=lambda moved: seen.append(moved.share))
    assert_complete(hub, url, store, manifest)
    assert hub.sent_bytes == manifest.total_size
    assert seen[-1] == 1.0
    assert bring(hub, url, store) == manifest
    assert hub.sent_bytes == manifest.total_size


def test_an_import_that_failed_goes_on_with_what_arrived(
    hub: Hub, url: str, store: ObjectStore
) -> None:
    hub.fails_after = 2 * PART + 100_000
    with pytest.raises(ServiceUnavailable):
        bring(hub, url, store)
    assert not store.exists(join_url(url, "manifest.json"))
    hub.fails_after = None
    manifest = bring(hub, url, store)
    assert_complete(hub, url, store, manifest)
    assert hub.sent_bytes < manifest.total_size + 2 * PART  # the parts that were cut


@pytest.mark.parametrize("path", ["model-2.safetensors", "config.json"])
def test_bytes_that_are_not_what_the_hub_lists_are_refused(
    hub: Hub, url: str, store: ObjectStore, path: str
) -> None:
    """Large files by their SHA-256, others by git's digest; what arrived is not read again."""
    hub.corrupt = path
    with pytest.raises(CorruptData, match="not what its server lists"):
        bring(hub, url, store)
    assert not store.exists(join_url(url, "manifest.json"))
    assert not store.exists(join_url(url, path))
    hub.corrupt = ""
    manifest = bring(hub, url, store)
    assert_complete(hub, url, store, manifest)
    assert hub.sent["model-1.safetensors"] < BIG + PART  # a part was in flight


def test_all_attempts_together_keep_the_origin_budget(
    hub: Hub, url: str, store: ObjectStore
) -> None:
    total = source(hub).total_size
    for fails_after in range(PART, 100 * PART, PART):
        hub.fails_after = fails_after
        try:
            bring(hub, url, store, cap=total + 2 * PART)
        except ServiceUnavailable:
            for each in source(hub).files:
                store.delete(join_url(url, each.path))
            store.abort_uploads(url)  # somebody removed what had arrived
        except OriginBudgetExceeded as error:
            assert "--extra-origin" in error.one_line()
            break
    else:
        pytest.fail("the budget never ended")
    assert hub.sent_bytes <= total + 2 * PART
    hub.fails_after = None
    manifest = bring(hub, url, store, cap=2 * total + 4 * PART)  # the operator allows more
    assert_complete(hub, url, store, manifest)


def test_two_importers_read_once(
    hub: Hub, url: str, store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importing, "SETTLE_S", 1.0)  # the other one's write may take a while
    # This S3 server answers 500 to a read of what another client rewrites at that moment.
    monkeypatch.setattr(client, "RETRY_BUDGET_S", 5.0)
    hub.block_wait_s = 0.002
    found: list[Manifest] = []
    both = [threading.Thread(target=lambda: found.append(bring(hub, url, store))) for _ in range(2)]
    for each in both:
        each.start()
    for each in both:
        each.join()
    assert found[0] == found[1]
    assert hub.sent_bytes == found[0].total_size
    assert_complete(hub, url, store, found[0])


def test_an_importer_that_was_replaced_publishes_nothing(
    hub: Hub, url: str, store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importing, "BEAT_S", 0.05)
    hub.block_wait_s = 0.005
    failed: list[PacelineError] = []

    def first() -> None:
        try:
            bring(hub, url, store)
        except PacelineError as error:
            failed.append(error)

    thread = threading.Thread(target=first)
    thread.start()
    record = join_url(url, importing.RECORD_FILE)
    while not hub.sent_bytes:
        time.sleep(0.01)
    other = importing.ImportRecord(by="another", read_bytes=0)
    while thread.is_alive():
        with contextlib.suppress(CorruptData):  # the beat rewrites it at this moment
            store.put_bytes(record, other.model_dump_json().encode())
        time.sleep(0.02)
    thread.join()
    assert isinstance(failed[0], Conflict), failed
    assert not store.exists(join_url(url, "manifest.json"))


def test_files_that_cannot_be_a_model_are_refused_before_a_byte(
    hub: Hub, url: str, store: ObjectStore
) -> None:
    (hub.root / NAME / "manifest.json").write_text("{}")
    with pytest.raises(InvalidManifest, match="manifest's own"):
        bring(hub, url, store)
    assert hub.sent_bytes == 0


_IMPORT = """
import sys
from paceline.config import Profile
from paceline.manifest import import_model, importing
from paceline.plan import origin_cap_bytes
from paceline.storage import ObjectStore, remote_model
hub, cdn, endpoint, key, secret, url = sys.argv[1:]
importing.MIN_PART = 5 << 20
found = remote_model("hf://acme/tiny", Profile.model_validate(
    {"hub": {"endpoint": hub, "redirect_hosts": [cdn]}}))
import_model(found, url, store=ObjectStore(endpoint_url=endpoint, access_key=key,
             secret_key=secret),
             cap_bytes=origin_cap_bytes(found.total_size), link_mbit=1000)
"""


@pytest.mark.nightly  # a lease has to end
def test_a_killed_importer_is_replaced_within_the_budget(
    hub: Hub, url: str, store: ObjectStore, s3: RcloneS3
) -> None:
    hub.block_wait_s = 0.01
    cdn = hub.cdn_url.removeprefix("http://")
    words = [hub.url, cdn, s3.endpoint_url, s3.access_key, s3.secret_key, url]
    killed = subprocess.Popen([sys.executable, "-c", _IMPORT, *words])
    while hub.sent_bytes < 2 * PART and killed.poll() is None:
        time.sleep(0.01)
    killed.send_signal(signal.SIGKILL)
    killed.wait(20)
    assert not store.exists(join_url(url, "manifest.json"))
    hub.block_wait_s = 0.0
    manifest = bring(hub, url, store)
    assert_complete(hub, url, store, manifest)
    assert hub.sent_bytes <= origin_cap_bytes(manifest.total_size)
