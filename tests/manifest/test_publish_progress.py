"""The progress of a publish is reported while it works, without a word on standard output."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from paceline.cli import PublishBars, RelayBars
from paceline.errors import SourceChanged
from paceline.manifest import ProgressCounter, PublishProgress, progress as account, publish_model
from paceline.storage import ObjectStore, uploads
from tests.support.rclone import RcloneS3

SIZES = {"big": 11_000_000, "sub/small": 70_000, "empty": 0}
TOTAL = sum(SIZES.values())
AT = "s3://account/m/1"
NAMES: dict[str, Any] = {"model_id": "m", "version": "1", "link_mbit": 100.0}


@pytest.fixture
def store(s3: RcloneS3, monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    monkeypatch.setattr(uploads, "PART_BYTES", 5 * 1024 * 1024)
    made = s3.store()
    made.ensure_bucket("account")
    made.delete_prefix(AT)
    return made


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "model/sub").mkdir(parents=True)
    for name, size in SIZES.items():
        (tmp_path / "model" / name).write_bytes(bytes(size))
    return tmp_path / "model"


def test_bytes_and_files_of_both_stages_are_reported_up_to_the_last(
    model: Path, store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(account, "REPORT_INTERVAL_S", 0.0)
    told: list[PublishProgress] = []
    publish_model(model, AT, store=store, on_progress=told.append, **NAMES)
    stages = list(dict.fromkeys(each.stage for each in told))
    assert stages == ["digest", "upload"]
    for stage in stages:
        mine = [each for each in told if each.stage == stage]
        assert [each.done_bytes for each in mine] == sorted(each.done_bytes for each in mine)
        assert any(0 < each.done_bytes < TOTAL for each in mine), "told on the way, not at the end"
        assert mine[-1] == PublishProgress(stage, TOTAL, TOTAL, 3, 3)
        assert [each.is_over for each in mine] == [False] * (len(mine) - 1) + [True]
    told.clear()
    publish_model(model, AT, store=store, on_progress=told.append, **NAMES)
    assert {each.stage for each in told} == {"digest"}, "nothing was left to upload"


def test_progress_is_reported_at_intervals_and_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(account, "REPORT_INTERVAL_S", 1e9)
    told: list[PublishProgress] = []
    mine = ProgressCounter("upload", 100, 1, told.append)
    for _ in range(20):
        mine.moved(10)  # some of it a second time
    mine.ended_file()
    assert [each.done_bytes for each in told] == [10, 100]


def test_a_failed_file_raises_its_reason_before_the_others_finish(
    model: Path, store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload, small_failed = uploads.send_file, threading.Event()

    def planted(client: Any, endpoint: str, path: Path, *given: Any, **more: Any) -> int:
        if path.name == "small":
            small_failed.set()
            raise SourceChanged("planted: it was written to", where=path)
        assert small_failed.wait(30)
        assert more["stopping"].wait(30), "who goes on hears that the publish is over"
        return upload(client, endpoint, path, *given, **more)

    monkeypatch.setattr("paceline.storage.store.send_file", planted)
    with pytest.raises(SourceChanged, match="written to"):
        publish_model(model, AT, store=store, **NAMES)


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


def test_without_a_terminal_stderr_gets_a_line_every_few_seconds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = Clock()
    monkeypatch.setattr("paceline.cli.progress.time", clock)
    with PublishBars() as bars:
        for second in range(21):
            clock.now_s = 100.0 + second + 10 * (second == 20)  # what is last is slow
            bars.show(
                PublishProgress("upload", second * 50_000_000, 1_000_000_000, second // 10, 2)
            )
    out, err = capsys.readouterr()
    assert out == ""
    assert [line.split()[1] for line in err.splitlines()] == ["25%", "50%", "75%", "done"]
    assert "250 MB of 1.0 GB, 50 MB/s, 0 of 2 files" in err
    assert "1.0 GB of 1.0 GB, 33 MB/s, 2 of 2 files" in err, "of the whole stage"


def test_a_relay_without_a_terminal_reports_the_time_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = Clock()
    monkeypatch.setattr("paceline.cli.progress.time", clock)
    with RelayBars() as bars:
        bars.show(0, 0)  # nobody has opened anything yet
        for second in range(21):
            clock.now_s = 100.0 + second
            bars.show(100 * second, 2000)
    out, err = capsys.readouterr()
    assert out == ""
    assert [line.split()[1] for line in err.splitlines()] == ["25%", "50%", "75%", "done"]
    assert "500 of 2,000 pieces on all workers, 15 s left" in err


def test_what_is_done_at_once_needs_no_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with PublishBars() as bars:
        bars.show(PublishProgress("digest", 5, 10, 0, 1))
        bars.show(PublishProgress("digest", 10, 10, 1, 1))
    assert capsys.readouterr() == ("", "")
