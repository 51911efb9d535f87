"""Of two publishers of different files at one version one wins, and its files stay as they are."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import Conflict, InvalidManifest, ServiceUnavailable
from paceline.manifest import (
    CLAIM_FILE,
    MANIFEST_FILE,
    Manifest,
    PublishProgress,
    discard_unfinished,
    fetch_manifest,
    publish_model,
)
from paceline.storage import DiskStore, ObjectStore, join_url
from tests.support.command import Ended, paceline
from tests.support.conditional_s3 import conditional_s3
from tests.support.rclone import RcloneS3

pytestmark = pytest.mark.xdist_group("rgw")
BUCKET = "publishers"


@pytest.fixture(scope="module")
def store(request: pytest.FixtureRequest, s3: RcloneS3) -> Iterator[ObjectStore]:
    """A store of a server with conditional writes: ours before rclone, or Ceph's."""
    if getattr(request, "param", "") == "rgw":
        made = request.getfixturevalue("rgw")
        made.ensure_bucket(BUCKET)
        yield made
    else:
        with conditional_s3(s3) as server:
            made = server.store()
            made.ensure_bucket(BUCKET)
            yield made


on_both = pytest.mark.parametrize(
    "store", ["conditional", pytest.param("rgw", marks=pytest.mark.services)], indirect=True
)


@pytest.fixture
def url(request: pytest.FixtureRequest) -> str:
    return f"s3://{BUCKET}/{request.node.name.replace('[', '-').replace(']', '')}/1"


def a_model(directory: Path, size: int = 200_000) -> Path:
    directory.mkdir()
    (directory / "weights").write_bytes(os.urandom(size))
    (directory / "config.json").write_bytes(os.urandom(100))
    return directory


def publish(model: Path, url: str, store: ObjectStore, **options: Any) -> Manifest:
    given = {"model_id": "m", "version": "1", "link_mbit": 40.0, **options}
    return publish_model(model, url, store=store, **given)


def require_whole(url: str, store: ObjectStore, model: Path, manifest: Manifest) -> None:
    assert fetch_manifest(url, store).digest == manifest.digest
    for file in manifest.files:
        assert store.get_bytes(join_url(url, file.path)) == (model / file.path).read_bytes()
    assert not store.exists(join_url(url, CLAIM_FILE)), "a claim ends with its publish"


class Stops(Exception):
    """A crash: nothing of the publish runs after it."""


def crashed(model: Path, url: str, store: ObjectStore) -> None:
    """Publish ``model`` as a process that dies before its manifest is there."""
    put = store.put_if_absent

    def die(where: str, data: bytes) -> bool | None:
        if where.endswith(MANIFEST_FILE):
            raise Stops
        return put(where, data)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Stops):
        patch.setattr(store, "put_if_absent", die)
        publish(model, url, store)
    assert store.exists(join_url(url, CLAIM_FILE))


@on_both
def test_many_publishers_at_once_have_one_winner(
    tmp_path: Path, url: str, store: ObjectStore
) -> None:
    models = [a_model(tmp_path / str(number)) for number in range(4)]
    won: dict[int, Manifest] = {}
    lost: dict[int, BaseException] = {}
    start = threading.Barrier(len(models))

    def run(number: int) -> None:
        start.wait(30)
        try:
            won[number] = publish(models[number], url, store)
        except Conflict as error:
            lost[number] = error

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(models))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert (len(won), len(lost)) == (1, 3)
    ((winner, manifest),) = won.items()
    require_whole(url, store, models[winner], manifest)


def test_a_loser_overwrites_no_file_of_a_winner_that_is_not_through(
    tmp_path: Path, url: str, store: ObjectStore
) -> None:
    first, second = a_model(tmp_path / "first"), a_model(tmp_path / "second")
    lost: list[Conflict] = []

    def meanwhile(moved: PublishProgress) -> None:
        if moved.stage == "upload" and moved.is_over and not lost:
            with pytest.raises(Conflict, match="--discard-unfinished") as caught:
                publish(second, url, store)
            lost.append(caught.value)

    manifest = publish(first, url, store, on_progress=meanwhile)
    assert manifest.digest in str(lost[0].wanted)
    require_whole(url, store, first, manifest)


def test_a_publisher_that_claims_late_finds_the_manifest(
    tmp_path: Path, url: str, store: ObjectStore
) -> None:
    first, second = a_model(tmp_path / "first"), a_model(tmp_path / "second")
    done: list[Manifest] = []

    def meanwhile(moved: PublishProgress) -> None:
        if moved.stage == "digest" and moved.is_over and not done:
            done.append(publish(first, url, store))  # begun, ended, and its claim given back

    with pytest.raises(Conflict, match="never changes"):
        publish(second, url, store, on_progress=meanwhile)
    require_whole(url, store, first, done[0])


@on_both
def test_a_publish_that_crashed_is_resumed_with_its_own_sizes(
    tmp_path: Path, url: str, store: ObjectStore
) -> None:
    model = a_model(tmp_path / "model", 4_000_000)
    crashed(model, url, store)
    before = store.uploaded_files
    manifest = publish(model, url, store, link_mbit=1.0)  # would choose other chunks
    assert store.uploaded_files == before, "its files are there"
    require_whole(url, store, model, manifest)


def test_a_stale_claim_of_other_content_names_the_remedy(
    tmp_path: Path, url: str, store: ObjectStore
) -> None:
    crashed(a_model(tmp_path / "old"), url, store)
    new = a_model(tmp_path / "new")
    with pytest.raises(Conflict, match=r"pid \d+ at 20.*--discard-unfinished"):
        publish(new, url, store)
    discard_unfinished(url, store)
    require_whole(url, store, new, publish(new, url, store))


@on_both
def test_a_claim_that_was_discarded_under_a_publisher_stops_it(
    tmp_path: Path, url: str, store: ObjectStore
) -> None:
    first, second = a_model(tmp_path / "first"), a_model(tmp_path / "second")

    def meanwhile(moved: PublishProgress) -> None:
        if moved.stage == "upload" and moved.is_over:
            discard_unfinished(url, store)
            crashed(second, url, store)

    with pytest.raises(Conflict, match="being published"):
        publish(first, url, store, on_progress=meanwhile)
    assert not store.exists(join_url(url, MANIFEST_FILE))


def test_the_manifest_is_written_on_the_condition_that_none_is_there(
    tmp_path: Path, s3: RcloneS3
) -> None:
    with conditional_s3(s3) as server:
        store = server.store()
        store.ensure_bucket(BUCKET)
        publish(a_model(tmp_path / "model"), f"s3://{BUCKET}/condition/1", store)
        puts = dict(server.puts)
    assert puts[f"/{BUCKET}/condition/1/{MANIFEST_FILE}"], "If-None-Match: *"


@pytest.mark.parametrize("mode", ["deny", "ignore"])
def test_a_server_without_conditional_writes_is_detected_and_still_used(
    tmp_path: Path, s3: RcloneS3, mode: Any
) -> None:
    model, url = a_model(tmp_path / "model"), f"s3://{BUCKET}/without-{mode}/1"
    with conditional_s3(s3, mode) as server:
        store = server.store()
        store.ensure_bucket(BUCKET)
        manifest = publish(model, url, store)
        assert store.has_conditional_writes is False
        require_whole(url, store, model, manifest)
        assert publish(model, url, store).digest == manifest.digest


def test_a_conditional_write_is_retried_where_two_collide(tmp_path: Path, s3: RcloneS3) -> None:
    with conditional_s3(s3) as server:
        store = server.store()
        store.ensure_bucket(BUCKET)
        handler = server.RequestHandlerClass
        forward, left = handler.do_PUT, [2]

        def collide(self: Any) -> None:
            if left[0] and self.headers.get("If-None-Match"):
                left[0] -= 1
                self.rfile.read(int(self.headers["Content-Length"]))
                self._error(409, "ConditionalRequestConflict")
            else:
                forward(self)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(handler, "do_PUT", collide)
            assert store.put_if_absent(f"s3://{BUCKET}/collide", b"x") is True
        assert left == [0]


def test_a_failing_server_is_not_taken_for_one_without_conditional_writes(
    tmp_path: Path,
) -> None:
    store = ObjectStore(endpoint_url="http://127.0.0.1:9", access_key="a", secret_key="b")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ServiceUnavailable):
        patch.setattr("paceline.storage.client.MAX_RETRIES", 1)
        store.put_if_absent("s3://bucket/key", b"x")
    assert store.has_conditional_writes is None


def test_a_model_may_not_hold_the_file_that_a_claim_is_kept_in(
    tmp_path: Path, url: str, store: ObjectStore
) -> None:
    model = a_model(tmp_path / "model")
    (model / CLAIM_FILE).write_text("mine")
    with pytest.raises(InvalidManifest, match="Remove it"):
        publish(model, url, store)


def test_the_command_discards_a_claim_only_where_it_is_asked_to(
    tmp_path: Path, s3: RcloneS3
) -> None:
    url = f"s3://{BUCKET}/command/1"
    new = a_model(tmp_path / "new")
    with conditional_s3(s3) as server:
        store = server.store()
        store.ensure_bucket(BUCKET)
        crashed(a_model(tmp_path / "old"), url, store)

        def command(*more: str) -> Ended:
            words = ["publish", str(new), url, "--model", "m", "--version", "1", *more]
            access = {"AWS_ACCESS_KEY_ID": s3.access_key, "AWS_SECRET_ACCESS_KEY": s3.secret_key}
            access |= {"AWS_ENDPOINT_URL": store.endpoint_url}
            return paceline(*words, **access, PACELINE_STATE=str(tmp_path / "state"))

        refused = command()
        assert refused.returncode != 0 and "--discard-unfinished" in refused.stderr
        done = command("--discard-unfinished")
        assert done.returncode == 0, done.stderr
        assert "no conditional writes" not in done.stderr
        require_whole(url, store, new, fetch_manifest(url, store))


def test_a_disk_writes_once_where_nothing_is(tmp_path: Path) -> None:
    store, url = DiskStore(), DiskStore.url_of(tmp_path / "object")
    assert store.put_if_absent(url, b"first")
    assert not store.put_if_absent(url, b"second")
    assert store.get_bytes(url) == b"first"
    assert [each.name for each in tmp_path.iterdir()] == ["object"], "nothing is left beside it"
