"""What a node holds is found where Hugging Face's tools look, offline."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

huggingface_hub = pytest.importorskip("huggingface_hub")

from paceline.manifest import Manifest  # noqa: E402
from paceline.relay.store import Store, freed_bytes  # noqa: E402
from tests.relay.kit import manifest_of, write_model  # noqa: E402
from tests.relay.test_store import fill  # noqa: E402

NAME = "acme/tiny"
COMMITS = ("a" * 40, "b" * 40, "c" * 40)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model", 300_000)


def version(model: Path, name: str, model_id: str = NAME) -> Manifest:
    return replace(manifest_of(model), model_id=model_id, version=name)


def publish(store: Store, manifest: Manifest, model: Path) -> Path:
    staging = store.open(manifest)
    fill(staging, model)
    try:
        return store.publish(staging)
    finally:
        staging.close()


def found(cache: Path, revision: str | None = None) -> Path:
    """Return the snapshot that the hub's own library finds without a network."""
    place = huggingface_hub.snapshot_download(
        NAME, revision=revision, cache_dir=cache, local_files_only=True
    )
    return Path(place)


def test_a_published_version_is_found_and_main_is_the_active_one(
    tmp_path: Path, model: Path
) -> None:
    store, cache = Store(tmp_path / "store"), tmp_path / "store/hub"
    for each in COMMITS[:2]:
        publish(store, version(model, each), model)
    snapshot = found(cache)
    assert snapshot.name == COMMITS[0]  # none is active: the first
    for file in manifest_of(model).files:
        assert (snapshot / file.path).read_bytes() == (model / file.path).read_bytes()
    assert not (snapshot / "manifest.json").exists()
    store.activate(NAME, COMMITS[1])
    assert found(cache).name == COMMITS[1]
    assert found(cache, COMMITS[0]).name == COMMITS[0]
    report = huggingface_hub.scan_cache_dir(cache)
    assert not report.warnings
    assert {each.commit_hash for each in next(iter(report.repos)).revisions} == set(COMMITS[:2])
    publish(store, version(model, "v3"), model)
    assert found(cache, "v3").name == "v3"
    publish(store, version(model, "1", "plain"), model)
    assert [each.name for each in cache.iterdir()] == ["models--acme--tiny"]


def test_the_cache_is_whole_where_only_it_is_mounted(tmp_path: Path, model: Path) -> None:
    store = Store(tmp_path / "store")
    publish(store, version(model, COMMITS[0]), model)
    shutil.copytree(tmp_path / "store/hub", tmp_path / "mounted", symlinks=True)
    shutil.rmtree(tmp_path / "store")
    snapshot = found(tmp_path / "mounted")
    for file in manifest_of(model).files:
        assert (snapshot / file.path).read_bytes() == (model / file.path).read_bytes()


def test_removing_a_version_frees_its_bytes(tmp_path: Path, model: Path) -> None:
    store, cache = Store(tmp_path / "store"), tmp_path / "store/hub"
    path = publish(store, version(model, COMMITS[0]), model)
    assert freed_bytes(path) >= 300_000
    other = write_model(tmp_path / "other", 200_000, seed=7)
    publish(store, version(other, COMMITS[1]), other)
    store.activate(NAME, COMMITS[1])
    assert [each.version for each in store.collect(1)] == [COMMITS[0]]
    with pytest.raises(huggingface_hub.errors.LocalEntryNotFoundError):
        found(cache, COMMITS[0])
    assert found(cache).name == COMMITS[1]
    held = {each.sha256 for each in manifest_of(other).files}
    assert {each.name for each in (cache / "models--acme--tiny/blobs").iterdir()} == held


def test_a_withdrawn_version_is_hidden_until_it_is_whole_again(tmp_path: Path, model: Path) -> None:
    store, cache = Store(tmp_path / "store"), tmp_path / "store/hub"
    manifest = version(model, COMMITS[0])
    publish(store, manifest, model)
    staging = store.open(manifest)
    store.withdraw(staging)
    with pytest.raises(huggingface_hub.errors.LocalEntryNotFoundError):
        found(cache)
    staging.close()
    publish(store, manifest, model)
    assert found(cache).name == COMMITS[0]


def test_a_restart_mends_what_a_killed_process_left(tmp_path: Path, model: Path) -> None:
    store, cache = Store(tmp_path / "store"), tmp_path / "store/hub"
    first = publish(store, version(model, COMMITS[0]), model)
    publish(store, version(model, COMMITS[1]), model)
    store.activate(NAME, COMMITS[1])
    store.close()
    shutil.rmtree(first)  # another process unpublished it
    repository = cache / "models--acme--tiny"
    (repository / "snapshots" / COMMITS[1]).rename(repository / f".{COMMITS[1]}.new")
    (repository / "refs/main").unlink()
    Store(tmp_path / "store").close()
    assert found(cache).name == COMMITS[1]
    with pytest.raises(huggingface_hub.errors.LocalEntryNotFoundError):
        found(cache, COMMITS[0])


def test_two_ids_share_no_repository(tmp_path: Path, model: Path) -> None:
    """The hub has no name with two hyphens, and its directories write a slash as two."""
    store, cache = Store(tmp_path / "store"), tmp_path / "store/hub"
    publish(store, version(model, "1", "acme/big/tiny"), model)
    for model_id in ("acme/big--tiny", "acme-/tiny"):
        publish(store, version(model, "2", model_id), model)
        store.activate(model_id, "2")
    assert [each.name for each in cache.iterdir()] == ["models--acme--big--tiny"]
    assert [each.name for each in (cache / "models--acme--big--tiny/snapshots").iterdir()] == ["1"]
    assert (cache / "models--acme--big--tiny/refs/main").read_text() == "1"
