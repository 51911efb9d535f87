"""`paceline publish DIRECTORY URL` and `paceline keys`: processes, a real S3 server, no other."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import InvalidInput
from paceline.manifest import TrustPolicy, fetch_manifest
from paceline.schemas import Published
from paceline.storage import ObjectStore
from paceline.units import link_mbit, size_bytes
from tests.support.command import Ended, paceline
from tests.support.rclone import RcloneS3


@pytest.fixture
def store(s3: RcloneS3, request: pytest.FixtureRequest) -> ObjectStore:
    made = s3.store()
    made.ensure_bucket("cli-publish")
    made.delete_prefix("s3://cli-publish/m")
    return made


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "weights.bin").write_bytes(os.urandom(300_000))
    (directory / "config.json").write_text("{}")
    return directory


@pytest.fixture
def run(s3: RcloneS3, tmp_path: Path) -> Any:
    def publish(*words: str, **environment: str) -> Ended:
        given = {
            "AWS_ACCESS_KEY_ID": s3.access_key,
            "AWS_SECRET_ACCESS_KEY": s3.secret_key,
            "AWS_ENDPOINT_URL": s3.endpoint_url,
            "PACELINE_STATE": str(tmp_path / "state"),
        }
        return paceline(*words, **given | environment)

    return publish


def test_publish_to_a_url_needs_no_installation_and_signs(
    run: Any, store: ObjectStore, model: Path, tmp_path: Path
) -> None:
    public = run("keys", "new", str(tmp_path / "key")).stdout.strip()
    names = ("--model", "m", "--version", "1")
    url = "s3://cli-publish/m/1"
    done = run("publish", str(model), url, *names, "--json", "--piece", "64KiB", "--link", "1Gbps")
    assert done.returncode == 0, done.stderr
    published = Published.model_validate_json(done.stdout)
    assert published.uploaded_files == published.files == 2
    assert published.signed_by is None
    again = run("publish", str(model), url, *names, "--json", "--sign", str(tmp_path / "key"))
    signed = Published.model_validate_json(again.stdout)
    assert signed.manifest_digest == published.manifest_digest
    assert signed.uploaded_files == 0
    policy = TrustPolicy(trusted=(public,), required=True)
    assert fetch_manifest(url, store, policy).digest == published.manifest_digest
    # published once more without the key: whoever signed it still vouches for it
    assert run("publish", str(model), url, *names).returncode == 0
    assert fetch_manifest(url, store, policy).digest == published.manifest_digest


@pytest.mark.parametrize(
    ("words", "environment", "code", "needles"),
    [
        (("{model}", "/a/path"), {}, 2, ("not a destination", "s3://bucket/prefix")),
        (("{model}", "s3://no-such-bucket-here/m"), {}, 1, ("bucket does not exist",)),
        (("/does/not/exist", "s3://cli-publish/m/1"), {}, 1, ("SourceMissing", "does not exist")),
        (("{empty}", "s3://cli-publish/m/1"), {}, 2, ("no bytes", "no files")),
        (
            ("{model}", "s3://cli-publish/m/1"),
            {"AWS_SECRET_ACCESS_KEY": "wrong"},
            77,
            ("AccessDenied", "credentials"),
        ),
        (
            ("{model}", "s3://cli-publish/m/1"),
            {"AWS_SECRET_ACCESS_KEY": ""},
            77,
            ("no S3 credentials", "missing: AWS_SECRET_ACCESS_KEY"),
        ),
        (("{model}", "s3://cli-publish/m/1", "--sign", "/no/key"), {}, 1, ("paceline keys new",)),
        (("{model}", "s3://cli-publish/m/1", "--link", "fast"), {}, 2, ("10Gbps", "--link")),
        (("{model}", "s3://cli-publish/m/1", "--piece", "3 bytes"), {}, 2, ("--piece", "64MiB")),
        (("{model}", "--sign", "/no/key"), {}, 2, ('--sign belongs to "With URL"',)),
    ],
    ids=lambda each: " ".join(each) if isinstance(each, tuple) else None,
)
def test_bad_input_is_one_line_an_exit_code_and_nothing_left(
    run: Any,
    store: ObjectStore,
    model: Path,
    tmp_path: Path,
    words: tuple[str, ...],
    environment: dict[str, str],
    code: int,
    needles: tuple[str, ...],
) -> None:
    (tmp_path / "empty").mkdir()
    places = {"model": str(model), "empty": str(tmp_path / "empty")}
    given = [word.format(**places) for word in words]
    done = run("publish", *given, "--model", "m", "--version", "1", "--json", **environment)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    error = json.loads(done.stdout)["error"]
    for needle in needles:
        assert needle in f"{error['code']} {error['message']}"
    assert store.list("s3://cli-publish/m") == []


def test_a_version_goes_forwards_unless_asked(run: Any, store: ObjectStore, model: Path) -> None:
    def publish(version: str, *more: str) -> Ended:
        url = f"s3://cli-publish/m/{version}"
        return run("publish", str(model), url, "--model", "m", "--version", version, *more)

    assert publish("1.10").returncode == 0
    refused = publish("1.9")
    assert refused.returncode == 1
    assert "newer version" in refused.stderr
    assert "--allow-older" in refused.stderr
    assert not store.directories("s3://cli-publish/m/1.9")
    assert publish("1.9", "--allow-older").returncode == 0
    assert publish("1.9").returncode == 0  # it is there already
    assert publish("1.11").returncode == 0


@pytest.mark.parametrize(
    ("text", "size"),
    [("500GB", 500 * 10**9), ("64MiB", 64 << 20), ("1e9B", 10**9), ("4 KiB", 4096), ("7B", 7)],
)
def test_sizes_are_read_as_people_write_them(text: str, size: int) -> None:
    assert size_bytes(text) == size


@pytest.mark.parametrize(
    ("text", "mbit"),
    [("10Gbps", 1e4), ("80Mbit", 80), ("1.5 Gbit/s", 1500), ("64kbit", 0.064), ("2GB/s", 16_000)],
)
def test_speeds_are_read_as_people_write_them(text: str, mbit: float) -> None:
    assert link_mbit(text) == pytest.approx(mbit)


@pytest.mark.parametrize(
    ("parse", "text", "wanted"),
    [(link_mbit, each, "10Gbps") for each in ("", "fast", "10GBps!", "0", "-5Mbit", "1e400Gbps")]
    + [(size_bytes, each, "64MiB") for each in ("", "500", "3 bytes", "-1", "1e400GB", "1e10GB")],
)
def test_what_is_no_size_or_speed_is_refused(parse: Any, text: str, wanted: str) -> None:
    with pytest.raises(InvalidInput, match=wanted):
        parse(text)
