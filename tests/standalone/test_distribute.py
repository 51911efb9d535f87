"""A whole deployment from one call: it just works, or says why and leaves nothing."""

from __future__ import annotations

import math
import os
import resource
import shutil
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from paceline.errors import (
    Conflict,
    CorruptData,
    DeploymentFailed,
    InvalidInput,
    InvalidManifest,
    InvalidPlan,
    OriginBudgetExceeded,
    PacelineError,
    PeerLost,
    PortInUse,
    ServiceUnavailable,
    SourceMissing,
    StateLocked,
    StorageFull,
    UntrustedManifest,
)
from paceline.manifest import (
    Manifest,
    Piece,
    TrustPolicy,
    fetch_manifest,
    load_key,
    new_key,
    public_key,
    publish_model,
    sign_manifest,
    write_manifest,
)
from paceline.plan import origin_cap_bytes
from paceline.relay import DirectoryReader, RelayDriver, S3Reader, origin
from paceline.relay.store import OriginReadCounts, Staging, Store
from paceline.schemas import Distribution, WorkerLanes
from paceline.standalone import distribute, fleet, worker
from paceline.storage import client
from tests.relay.kit import damage, manifest_of, write_model
from tests.support.rclone import RcloneS3


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model", 500_000)


def into(tmp_path: Path) -> Path:
    return tmp_path / "nodes"


def check(done: Distribution, model: Path) -> None:
    """Every receipt is true, and the origin was read once."""
    assert done.workers_complete == done.workers
    assert not done.workers_failed
    for receipt in done.receipts:
        shown = Path(receipt.path)
        assert shown.is_absolute()
        assert not (shown / "manifest.json").stat().st_mode & 0o222
        for path in model.rglob("*"):
            if path.is_file() and path.name != "manifest.json":
                assert (shown / path.relative_to(model)).read_bytes() == path.read_bytes()
    if done.topology != "direct":
        assert done.origin_bytes <= 1.02 * done.total_bytes


@pytest.mark.parametrize("topology", ["auto", "chain", "tree", "tree-of-chains", "mesh", "direct"])
def test_every_topology_brings_the_model_to_everybody(
    tmp_path: Path, model: Path, topology: str
) -> None:
    told: list[tuple[int, int]] = []
    done = distribute(
        model,
        into(tmp_path),
        5,
        topology=topology,
        racks=2,
        on_progress=lambda held, pieces: told.append((held, pieces)),
    )
    check(done, model)
    assert (done.racks, done.version, done.model_id) == (2, "1", "model")
    assert told[-1][0] == told[-1][1] > 0
    if topology == "chain":
        assert done.cross_rack_bytes == pytest.approx(done.total_bytes, rel=0.05)
        done = distribute(model, into(tmp_path), 5)
        assert done.origin_bytes == done.received_bytes == 0
        assert done.workers_complete == 5


@pytest.mark.parametrize(
    ("size", "workers", "racks"),
    [(1, 1, 1), (500_000, 3, 8), (700, 4, 2)],
    ids=["one of each", "more racks than workers", "less than a piece"],
)
def test_the_smallest_of_everything_just_works(
    tmp_path: Path, size: int, workers: int, racks: int
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "weights").write_bytes(Random(size).randbytes(size))
    (model / "empty").touch()
    check(distribute(model, into(tmp_path), workers, racks=racks), model)


def test_what_is_asked_for_by_name_is_what_is_served(tmp_path: Path, model: Path) -> None:
    done = distribute(model, into(tmp_path), ["a", "b", "c"], targets=["c", "a"], activate=True)
    assert sorted(receipt.worker_id for receipt in done.receipts) == ["a", "c"]
    assert not (into(tmp_path) / "b").exists()
    assert done.activated
    assert (into(tmp_path) / "a/store/models/model/active/config.json").exists()


def test_a_limited_link_is_reported_beside_its_bound(tmp_path: Path, model: Path) -> None:
    done = distribute(model, into(tmp_path), 2, link_mbit=20)
    assert done.bound_seconds == pytest.approx(done.total_bytes * 8 / 20e6)
    assert done.predicted_seconds is not None
    assert done.predicted_seconds >= done.bound_seconds
    assert done.seconds >= 0.8 * done.bound_seconds


def test_the_model_comes_from_s3_signed_and_once(tmp_path: Path, model: Path, s3: RcloneS3) -> None:
    store = s3.store()
    store.ensure_bucket("onecall")
    store.delete_prefix("s3://onecall/m")
    new_key(tmp_path / "key")
    key = load_key(tmp_path / "key")
    names = {"model_id": "m", "version": "1", "link_mbit": 1000.0}
    url = "s3://onecall/m/1"
    trust = TrustPolicy(trusted=(public_key(key),), required=True)
    publish_model(model, url, store=store, **names)  # type: ignore[arg-type]
    with pytest.raises(UntrustedManifest):
        distribute(url, into(tmp_path), 3, objects=store, trust=trust)
    assert not into(tmp_path).exists()
    publish_model(model, url, store=store, key=key, **names)  # type: ignore[arg-type]
    check(distribute(url, into(tmp_path), 3, objects=store, trust=trust), model)


def frozen(process: subprocess.Popen[bytes], *, freeze: bool) -> None:
    os.kill(process.pid, signal.SIGSTOP if freeze else signal.SIGCONT)


@pytest.fixture
def bucket(s3: RcloneS3, model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RcloneS3]:
    """The session's server with the model, to be frozen; patience with it is short."""
    monkeypatch.setattr(client, "QUICK_TIMEOUT_S", 0.3)
    monkeypatch.setattr(origin, "MIN_READ_TIMEOUT_S", 0.3)
    s3.store().ensure_bucket("frozen")
    names = {"model_id": "m", "version": "1", "link_mbit": 1000.0}
    publish_model(model, "s3://frozen/m/1", store=s3.store(), **names)  # type: ignore[arg-type]
    yield s3
    frozen(s3.process, freeze=False)


def test_a_source_that_is_frozen_is_named_asked_anew_and_read_on(
    tmp_path: Path, model: Path, bucket: RcloneS3
) -> None:
    said: list[str] = []

    def notice(text: str) -> None:
        said.append(text)
        frozen(bucket.process, freeze=False)

    def progress(held: int, _all: int) -> None:
        if held and not said:
            frozen(bucket.process, freeze=True)

    done = distribute(
        "s3://frozen/m/1",
        into(tmp_path),
        2,
        objects=bucket.store(),
        link_mbit=2,
        on_progress=progress,
        on_notice=notice,
    )
    check(done, model)
    assert done.notices == tuple(said)
    assert "s3://frozen/m/1/" in said[0]
    assert f"on {bucket.endpoint_url}" in said[0]
    assert "asked again on a new connection" in said[0]
    assert any("answers again after" in each for each in said)


def test_a_source_that_is_frozen_when_it_is_looked_up_is_named_too(bucket: RcloneS3) -> None:
    said: list[str] = []

    def notice(text: str) -> None:
        said.append(text)
        frozen(bucket.process, freeze=False)

    store = bucket.store()
    file = fetch_manifest("s3://frozen/m/1", store).files[0]
    frozen(bucket.process, freeze=True)
    S3Reader("s3://frozen/m/1", store, notice).pin(file)
    assert len(said) == 2
    assert f"s3://frozen/m/1/{file.path} on {bucket.endpoint_url} " in said[0]
    assert "answers again" in said[1]


def test_a_source_frozen_from_the_start_is_an_error_within_three_tries(
    tmp_path: Path, bucket: RcloneS3
) -> None:
    said: list[str] = []
    frozen(bucket.process, freeze=True)
    with pytest.raises(ServiceUnavailable, match=r"does not answer.*3 times"):
        distribute(
            "s3://frozen/m/1", into(tmp_path), 2, objects=bucket.store(), on_notice=said.append
        )
    assert said
    assert all(f"s3://frozen/m/1/manifest.json on {bucket.endpoint_url}" in each for each in said)
    assert not into(tmp_path).exists()


# ── what cannot work: a named error, and nothing left ────────────────────────────────────────────


def refused(error: type[PacelineError], tmp_path: Path, *words: str, **call: object) -> None:
    """The call raises ``error`` with these words, and leaves nothing behind."""
    given = {"into": into(tmp_path), "workers": 2, **call}
    with pytest.raises(error) as caught:
        distribute(**given)  # type: ignore[arg-type]
    line = caught.value.one_line()
    for word in words:
        assert word in line
    assert not into(tmp_path).exists()


def test_no_workers_are_refused(tmp_path: Path, model: Path) -> None:
    refused(InvalidInput, tmp_path, "no workers", "at least 1", source=model, workers=0)
    refused(InvalidInput, tmp_path, "empty list", source=model, workers=[])
    refused(InvalidInput, tmp_path, "empty list", source=model, targets=[])


def test_an_unknown_worker_is_named(tmp_path: Path, model: Path) -> None:
    refused(
        InvalidInput,
        tmp_path,
        "unknown worker",
        "worker-7",
        "worker-0",
        source=model,
        targets=["worker-0", "worker-7"],
    )
    refused(InvalidInput, tmp_path, "twice", source=model, workers=["a", "a"])
    refused(InvalidInput, tmp_path, "not a worker's name", source=model, workers=["../a"])


def test_another_digest_than_wanted_is_refused(tmp_path: Path, model: Path) -> None:
    wanted = "0" * 64
    refused(CorruptData, tmp_path, "another model", wanted, source=model, digest=wanted)


def test_a_source_that_is_not_there_is_named(tmp_path: Path, s3: RcloneS3) -> None:
    refused(SourceMissing, tmp_path, "/no/such/model", source="/no/such/model")
    store = s3.store()
    store.ensure_bucket("onecall")
    url = "s3://onecall/nothing/here"
    refused(SourceMissing, tmp_path, url, source=url, objects=store)
    refused(InvalidInput, tmp_path, "no object store", source=url)


def test_an_empty_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    refused(InvalidManifest, tmp_path, "no bytes", "no files", source=tmp_path / "model")
    (tmp_path / "model/empty").touch()
    refused(InvalidManifest, tmp_path, "1 empty files", source=tmp_path / "model")


def test_another_name_than_the_manifests_is_refused(tmp_path: Path, model: Path) -> None:
    write_manifest(model, manifest_of(model))
    refused(InvalidInput, tmp_path, "another model", source=model, model_id="other")
    refused(InvalidInput, tmp_path, "another version", source=model, version="v9")
    refused(InvalidPlan, tmp_path, "no such topology", source=model, topology="ring")
    for link_mbit in (0, -1.0, math.nan, math.inf):
        refused(InvalidInput, tmp_path, "link", source=model, link_mbit=link_mbit)
    refused(InvalidInput, tmp_path, "racks", source=model, racks=0)
    refused(InvalidInput, tmp_path, "beyond the origin budget", source=model, extra_origin_bytes=-1)
    refused(InvalidInput, tmp_path, "share", "nan", source=model, max_failed=math.nan)
    for first_port in (-5, 65_535):
        refused(InvalidInput, tmp_path, "no such ports", source=model, first_port=first_port)
    refused(InvalidInput, tmp_path, "2000000", "at most 1000", source=model, workers=2_000_000)


def test_a_disk_too_small_for_all_is_reported_before_a_byte_moves(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = os.statvfs(tmp_path)
    blocks = 700_000 // room.f_frsize  # enough for one of the two
    full = os.statvfs_result([*room[:3], blocks, blocks, *room[5:]])
    monkeypatch.setattr(os, "statvfs", lambda _path: full)
    refused(StorageFull, tmp_path, "does not fit", "2 workers", "fewer workers", source=model)


def test_more_files_than_may_be_open_are_reported_before_a_byte_moves(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits, raised = [100, 200], []
    monkeypatch.setattr(resource, "getrlimit", lambda _what: tuple(limits))
    monkeypatch.setattr(resource, "setrlimit", lambda _what, to: raised.append(to))
    wanted = "200"
    refused(InvalidInput, tmp_path, "open", wanted, "fewer workers", source=model, workers=9)
    assert not raised
    check(distribute(model, into(tmp_path), 3), model)
    assert raised == [(200, 200)], "the soft limit is only where shells begin"


def test_a_taken_port_is_named(tmp_path: Path, model: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        refused(PortInUse, tmp_path, str(port), source=model, workers=1, first_port=port)


def test_a_store_in_use_is_left_alone(tmp_path: Path, model: Path) -> None:
    store = Store(into(tmp_path) / "worker-1/store")
    with pytest.raises(StateLocked, match="another agent"):
        distribute(model, into(tmp_path), 2)
    store.close()
    check(distribute(model, into(tmp_path), 2), model)


def test_an_older_version_is_refused_unless_asked(tmp_path: Path, model: Path) -> None:
    distribute(model, into(tmp_path), 2, version="v10")
    distribute(model, into(tmp_path), 2, version="v11")
    with pytest.raises(Conflict, match=r"v11 or later.*--allow-older"):
        distribute(model, into(tmp_path), 2, version="v9")
    check(distribute(model, into(tmp_path), 2, version="v9", allow_older=True), model)


def test_an_unsigned_directory_is_refused_where_signatures_are_required(
    tmp_path: Path, model: Path
) -> None:
    new_key(tmp_path / "key")
    key = load_key(tmp_path / "key")
    trust = TrustPolicy(trusted=(public_key(key),), required=True)
    refused(UntrustedManifest, tmp_path, "not signed", source=model, trust=trust)
    write_manifest(model, sign_manifest(manifest_of(model), key))
    check(distribute(model, into(tmp_path), 2, trust=trust), model)


# ── a worker that fails does not stop the others ─────────────────────────────────────────────────


def test_the_others_go_on_when_a_worker_fails(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = Store.open

    def full(self: Store, manifest: object, in_use: object = ()) -> object:
        if "worker-1" in str(self.root):
            raise StorageFull("planted", where=self.root)
        return opened(self, manifest, in_use)  # type: ignore[arg-type]

    monkeypatch.setattr(Store, "open", full)
    done = distribute(model, into(tmp_path), 4, max_failed=0.25, topology="chain")
    assert done.epochs == 2
    assert done.workers_complete == 3
    assert done.workers_failed["worker-1"].code == "StorageFull"
    assert done.origin_bytes <= 1.02 * done.total_bytes
    shutil.rmtree(into(tmp_path))
    with pytest.raises(PacelineError, match=r"worker-1.*planted"):
        distribute(model, into(tmp_path), 4)


def test_grants_after_a_death_count_bytes_read_and_fit_under_the_fuse(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[WorkerLanes] = []
    deploy, hold = RelayDriver.deploy, Staging.hold

    def noted(self: RelayDriver, lanes: WorkerLanes, manifest: Manifest) -> None:
        given.append(lanes)
        deploy(self, lanes, manifest)

    def full(self: Staging, *pieces: Piece) -> None:
        if f"{head()}/" in str(self.directory) and any(each.index >= 8 for each in pieces):
            raise StorageFull("planted", where=self.directory)
        hold(self, *pieces)

    def head() -> str:
        return next(each.worker_id for each in given if each.origin_lanes)

    monkeypatch.setattr(RelayDriver, "deploy", noted)
    monkeypatch.setattr(Staging, "hold", full)
    done = distribute(model, into(tmp_path), 3, max_failed=0.5, topology="chain", link_mbit=20)
    assert list(done.workers_failed) == [head()]
    second = [each for each in given if each.epoch == 2]
    assert second
    counted = [each.origin_counted_bytes for each in second]
    assert None not in counted, "a grant goes on from what was read when it was made"
    read_by_head = 8 * 16_384  # at least; what it read is counted though it is gone
    granted = sum(each.origin_budget_bytes for each in second)
    assert granted <= origin_cap_bytes(done.total_bytes) - read_by_head


def test_a_source_that_falls_silent_for_a_while_costs_no_worker_its_copy(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, silent = DirectoryReader.stream, threading.Event()

    def once(self: DirectoryReader, *given: object) -> Iterator[int]:
        if not silent.is_set():  # the first reader hears nothing until long after it was given up
            silent.set()
            raise PeerLost("planted: the source is away")
        return read(self, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(DirectoryReader, "stream", once)
    done = distribute(model, into(tmp_path), 3, topology="chain")
    assert done.workers_complete == 3
    assert not done.workers_failed


def test_a_call_in_which_nothing_moves_ends(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet, "STALL_S", 0.5)
    monkeypatch.setattr(RelayDriver, "deploy", lambda *_: None)
    with pytest.raises(PacelineError, match="nothing moves"):
        distribute(model, into(tmp_path), 2)


def test_a_copy_that_rotted_since_is_found_and_mended_by_the_next_call(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet, "STALL_S", 20.0)
    first = distribute(model, into(tmp_path), 1)
    damage(Path(first.receipts[0].path) / "shards/a.bin", 100_000, b"rot")
    done = distribute(model, into(tmp_path), 3)
    check(done, model)
    assert done.epochs > 1
    assert set(done.corrupt_from) == {"worker-0"}
    # the rotten piece, and at most what two readers had in flight: so small a model is all of that
    assert 0 < done.origin_bytes < done.total_bytes


# ── one fuse, however often the call is made ─────────────────────────────────────────────────────


def interrupted(tmp_path: Path, model: Path) -> None:
    """Make a call of three workers that ends in its middle."""

    def stop(held: int, _pieces: int) -> None:
        if held:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        distribute(model, into(tmp_path), 3, link_mbit=0.5, on_progress=stop)
    assert list(into(tmp_path).glob("*/store/staging/*/data"))
    counts = into(tmp_path).glob("*/readings/*.read")
    read = sum(OriginReadCounts(path.parent).of(path.stem).begun_bytes for path in counts)
    assert read < manifest_of(model).total_size, "it ended in the middle"


def test_a_call_made_again_is_granted_what_the_first_one_left(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[WorkerLanes] = []
    deploy = RelayDriver.deploy

    def noted(self: RelayDriver, lanes: WorkerLanes, manifest: Manifest) -> None:
        given.append(lanes)
        deploy(self, lanes, manifest)

    interrupted(tmp_path, model)
    monkeypatch.setattr(RelayDriver, "deploy", noted)
    done = distribute(model, into(tmp_path), 3)
    first = [each for each in given if each.epoch == 1]
    assert done.origin_before_bytes > 0
    cap = origin_cap_bytes(done.total_bytes)
    assert sum(each.origin_budget_bytes for each in first) <= cap - done.origin_before_bytes
    assert done.origin_bytes - done.origin_before_bytes < done.total_bytes
    assert not list(into(tmp_path).glob("*/readings/*")), "it is over"
    again = distribute(model, into(tmp_path), 3)
    assert again.origin_bytes == again.origin_before_bytes == 0


def test_a_call_with_the_fuse_spent_fails_and_more_may_be_allowed(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted(tmp_path, model)
    cap = origin_cap_bytes(manifest_of(model).total_size)
    spent = next(into(tmp_path).glob("*/readings/*.read"))
    readings = OriginReadCounts(spent.parent)
    readings.of(spent.stem).cover(cap, 0)
    readings.close()
    monkeypatch.setattr(worker, "SETTINGS", replace(worker.SETTINGS, beat_s=0.04))
    with pytest.raises(OriginBudgetExceeded, match=rf"at most {cap} bytes.*--extra-origin"):
        distribute(model, into(tmp_path), 3)
    shutil.copytree(into(tmp_path), tmp_path / "other")
    done = distribute(model, into(tmp_path), 3, extra_origin_bytes=cap)
    assert done.workers_complete == 3
    assert done.origin_before_bytes >= cap
    for left in (tmp_path / "other").glob("*/store/staging/*"):
        shutil.rmtree(left)
    anew = distribute(model, tmp_path / "other", 3)  # with nothing to go on from
    assert anew.origin_before_bytes == 0
    check(anew, model)


def test_a_defect_at_the_end_fails_the_call_and_is_no_silence(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(fleet, "STALL_S", 20.0)
    monkeypatch.setattr(Store, "publish", broken)
    with pytest.raises(DeploymentFailed, match=r"every one of 2 workers.*planted"):
        distribute(model, into(tmp_path), 2)
    assert not into(tmp_path).exists()
