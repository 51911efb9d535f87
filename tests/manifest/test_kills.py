"""SIGKILL at the system calls of a publish: the version is there whole or not at all, and the same
command goes on. A few in `make test`, more in `make test-nightly`, all in `make chaos`.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from paceline.errors import SourceMissing
from paceline.manifest import build_manifest, fetch_manifest
from paceline.storage import ObjectStore, join_url, uploads
from tests.manifest import publish_work
from tests.support import kills
from tests.support.kills import Point
from tests.support.rclone import RcloneS3

PROGRAM = Path(publish_work.__file__)
CALLS = f"{kills.NETWORK_CALLS},{kills.DISK_CALLS}"
BUCKET = "publish-kills"
SEED = 20


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    kills.require_strace()
    model = tmp_path_factory.mktemp("model")
    (model / "large.bin").write_bytes(os.urandom(2 * publish_work.PART + 1_000_000))
    (model / "small.bin").write_bytes(os.urandom(300_000))
    (model / "config.json").write_text("{}")
    return model


@pytest.fixture
def store(s3: RcloneS3, monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    monkeypatch.setattr(uploads, "PART_BYTES", publish_work.PART)
    made = s3.store()
    made.ensure_bucket(BUCKET)
    return made


def environment(s3: RcloneS3) -> dict[str, str]:
    return {"S3_URL": s3.endpoint_url, "S3_KEY": s3.access_key, "S3_SECRET": s3.secret_key}


def found(s3: RcloneS3, model: Path, scratch: Path) -> list[Point]:
    program = [PROGRAM, model, f"s3://{BUCKET}/traced/1"]
    return kills.points(program, CALLS, scratch / "trace", environment(s3))


def check_kill(point: Point, s3: RcloneS3, store: ObjectStore, model: Path) -> None:
    url = f"s3://{BUCKET}/{point}/1"
    kills.kill([PROGRAM, model, url], point, environment(s3))
    wanted = build_manifest(model, model_id="m", version="1", link_mbit=1000)
    try:
        assert fetch_manifest(url, store) == wanted  # whole, or not there
        check_files(url, store, model)
    except SourceMissing:
        pass
    publish_work.work(model, url, store)
    assert fetch_manifest(url, store) == wanted
    check_files(url, store, model)
    assert store.abort_uploads(url) == 0  # what the dead one began was gone on with
    store.delete_prefix(url)


def check_files(url: str, store: ObjectStore, model: Path) -> None:
    for path in model.iterdir():
        assert store.get_bytes(join_url(url, path.name)) == path.read_bytes()


@kills.SAMPLED
def test_a_kill_at_sampled_calls_of_a_publish_leaves_it_whole_or_absent(
    s3: RcloneS3, store: ObjectStore, model: Path, tmp_path: Path, count: int
) -> None:
    for point in kills.sample(found(s3, model, tmp_path), count, SEED):
        try:
            check_kill(point, s3, store, model)
        except BaseException as error:
            error.add_note(f"killed at {point}")
            raise


@pytest.mark.chaos
@pytest.mark.timeout(3600)
def test_a_kill_at_every_call_of_a_publish_leaves_it_whole_or_absent(
    s3: RcloneS3, store: ObjectStore, model: Path, tmp_path: Path
) -> None:
    points = found(s3, model, tmp_path)
    assert len(points) > 20
    for point in points:
        try:
            check_kill(point, s3, store, model)
        except BaseException as error:
            error.add_note(f"killed at {point}")
            raise
