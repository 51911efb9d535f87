"""A publish through the flow tells bytes and rate while it works, and a cancel ends it midway."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from paceline.config import DataSettings, ModelSettings, Profile
from paceline.data import build_snapshot
from paceline.errors import Cancelled
from paceline.evaluation import download_model
from paceline.manifest import MANIFEST_FILE, progress as account
from paceline.models import load_model, new_model
from paceline.storage import DiskStore, ObjectStore, join_url, uploads
from paceline.tasks import publish
from paceline.tasks._support import artifacts
from paceline.tasks.prepare import publish_base_model
from paceline.tasks.publish import publish_directory
from tests.support.hugging_face import write_tokenizer
from tests.support.rclone import RcloneS3

MODELS = "s3://told/models"


class Page:
    def __init__(self, *_: str) -> None:
        shown.clear()

    def show(self, fraction: float, description: str | None = None) -> None:
        shown.append((fraction, description or ""))
        if description and description.startswith("upload"):
            seen.set()


shown: list[tuple[float, str]] = []
seen = threading.Event()


class FakeRun:
    """What a stage needs of its run: a store, and somebody who listens."""

    def __init__(self, store: ObjectStore) -> None:
        self.store = store
        self.runtime = SimpleNamespace(profile=Profile(), models_url=MODELS)
        self.told: list[tuple[str, str, bool]] = []

    def report(self, stage: str, _fraction: float, message: str, *, done: bool = False) -> None:
        self.told.append((stage, message, done))

    def finish(self, stage: str, _began: float, message: str) -> float:
        self.told.append((stage, message, True))
        return 0.0


@pytest.fixture
def run(s3: RcloneS3, monkeypatch: pytest.MonkeyPatch) -> FakeRun:
    seen.clear()
    store = s3.store()
    store.ensure_bucket("told")
    store.delete_prefix(f"{MODELS}/m")
    monkeypatch.setattr(artifacts, "Progress", Page)
    monkeypatch.setattr(publish, "LOOK_S", 0.01)
    monkeypatch.setattr(account, "REPORT_INTERVAL_S", 0.0)
    return FakeRun(store)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    for name, size in (("a", 3_000_000), ("b", 5000)):
        (tmp_path / "model" / name).write_bytes(bytes(size))
    return tmp_path / "model"


def slowly(monkeypatch: pytest.MonkeyPatch, then: Any = lambda: None) -> None:
    """Have the large file wait until the page has told of the upload."""
    upload = uploads.send_file

    def waiting(client: Any, endpoint: str, path: Path, *given: Any, **more: Any) -> int:
        if path.name == "a":
            assert seen.wait(30), "nobody told how far the upload is"
            then()
        return upload(client, endpoint, path, *given, **more)

    monkeypatch.setattr("paceline.storage.store.send_file", waiting)


def test_bytes_and_rate_are_told_on_the_page_and_to_who_listens(
    run: FakeRun, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slowly(monkeypatch)
    publish_directory.fn(run, str(model), "m", "1")  # type: ignore[arg-type]
    assert ("digest", True) in {(stage, done) for stage, _, done in run.told}
    on_the_way = [said for stage, said, done in run.told if stage == "upload" and not done]
    assert any(" of 3.0 MB" in said and "/s, " in said for said in on_the_way)
    assert run.told[-2][0] == "upload"
    assert run.told[-2][2]
    assert run.told[-1] == ("publish", f"3.0 MB in 2 files at {MODELS}/m/1", True)
    assert shown[-1][0] == 1.0
    ends = [stage for stage, _, done in run.told if done]
    assert ends == ["digest", "upload", "publish"], "each is said to be over once"
    assert [fraction for fraction, _ in shown] == sorted(fraction for fraction, _ in shown)
    assert run.store.exists(join_url(MODELS, "m", "1", MANIFEST_FILE))


def test_a_cancel_ends_it_and_shows_no_version(
    run: FakeRun, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cancelled = threading.Event()

    class Noticed:
        def __enter__(self) -> threading.Event:
            return cancelled

        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr(publish, "noticed", Noticed)
    slowly(monkeypatch, then=cancelled.set)
    with pytest.raises(Cancelled):
        publish_directory.fn(run, str(model), "m", "1")  # type: ignore[arg-type]
    assert not run.store.exists(join_url(MODELS, "m", "1", MANIFEST_FILE))


def test_a_new_base_is_untrained_and_of_the_snapshots_tokens(run: FakeRun, tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    for number in range(9):
        (tmp_path / "texts" / f"{number}.txt").write_text(f"line {number} of {number * 7}")
    tokenizer = write_tokenizer(tmp_path, ["line 1 of 7"], 280) / "tokenizer.json"
    settings = DataSettings(tokenizer=str(tokenizer), held_out_share=0.3, purpose="tests")
    url = DiskStore.url_of(tmp_path / "data")
    snapshot = build_snapshot(str(tmp_path / "texts"), url, settings, DiskStore())
    run.work_dir = tmp_path
    run.stage = lambda _stage, inputs, work, **_: inputs | work()  # type: ignore[attr-defined]
    run.runtime.profile = Profile(model=ModelSettings(parameters=20_000, context=32, seed=3))
    given = {"url": snapshot.url, "digest": snapshot.digest}
    found: Any = publish_base_model.fn(run, given)  # type: ignore[call-overload]
    model, config = load_model(download_model(found["url"], tmp_path / "model", run.store))
    assert config.tokenizer_digest == snapshot.vocabulary.sha256
    assert config.vocab_size == snapshot.vocabulary.vocab_size
    assert found["parameters"] == sum(each.numel() for each in model.parameters())
    new = new_model(config, 3).state_dict()
    assert all(torch.equal(each, new[name]) for name, each in model.state_dict().items())
    assert publish_base_model.fn(run, given)["url"] == found["url"]  # type: ignore[call-overload]
