"""`paceline train` without a server: what is refused leaves nothing; a stop says what is saved."""

from __future__ import annotations

import fcntl
import os
import signal
import threading
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from paceline.cli.training import Lines, _stopping_gently, train
from paceline.errors import InvalidInput, PacelineError, StateLocked
from paceline.models import config_for, new_model, save_model
from paceline.profile import TrainingSettings
from paceline.training import LocalLauncher, single
from paceline.training.room import MIB, free_memory, require_room
from paceline.wire.training import RankEvent
from tests.training.test_recovery_driver import job_in

SMALL = ["--set", "model.parameters=20000", "--set", "model.context=32"]
OTHER_TOKENIZER = "f" * 64


@pytest.fixture(autouse=True)
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("no rank is to start")

    monkeypatch.setattr(LocalLauncher, "open_nodes", refuse)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    directory = tmp_path / "text"
    directory.mkdir()
    for number in range(8):
        (directory / f"{number}.txt").write_text(f"file {number} says {number * number}\n" * 40)
    return directory


def ask(*arguments: str) -> None:
    """Run the command, its errors raised."""
    CliRunner().invoke(train, [*arguments, *SMALL], standalone_mode=False, catch_exceptions=False)


def refused(output: Path, *arguments: str) -> PacelineError:
    """Return the error that refused the command; nothing of ``output`` is left."""
    with pytest.raises(PacelineError) as caught:
        CliRunner().invoke(
            train,
            [*arguments, "--output", str(output), *SMALL],
            standalone_mode=False,
            catch_exceptions=False,
        )
    assert not output.exists(), "what is refused leaves nothing behind"
    error = caught.value
    assert error.got or error.where, "what was got is named, or where nothing was"
    assert "\n" not in error.one_line()
    return error


def test_a_mesh_that_does_not_divide_the_ranks_is_refused_at_once(
    tmp_path: Path, text: Path
) -> None:
    mesh = ["--set", "training.mesh.tp=2"]
    error = refused(tmp_path / "out", "--text", str(text), "--ranks", "3", *mesh)
    assert error.exit_code == 2
    assert error.wanted


def test_fewer_sequences_than_ranks_are_refused(tmp_path: Path, text: Path) -> None:
    few = ["--set", "training.batch_sequences=2"]
    error = refused(tmp_path / "out", "--text", str(text), "--ranks", "4", *few)
    assert "batch is smaller" in error.one_line()


def test_more_ranks_than_memory_holds_are_refused(tmp_path: Path, text: Path) -> None:
    many = ["--set", "training.batch_sequences=9000000"]
    error = refused(tmp_path / "out", "--text", str(text), "--ranks", "9000000", *many)
    assert "memory" in error.one_line()
    assert "--ranks" in str(error.do)


def test_memory_is_counted_as_the_mesh_shares_it() -> None:
    settings = TrainingSettings(ranks=2)
    halved = TrainingSettings.model_validate({"ranks": 2, "mesh": {"shard": 2}})
    require_room(halved, 500 * MIB, 2500 * MIB)
    with pytest.raises(InvalidInput, match=r"at least 4,252 MiB .* wanted at most 2,500 MiB"):
        require_room(settings, 500 * MIB, 2500 * MIB)
    require_room(settings, 500 * MIB, None)
    found = free_memory()
    assert found is None or found > 0


def test_a_place_without_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    error = refused(tmp_path / "out", "--text", str(tmp_path / "empty"))
    assert error.where or error.got


def test_files_without_a_letter_are_refused(tmp_path: Path) -> None:
    (tmp_path / "hollow").mkdir()
    for number in range(4):
        (tmp_path / "hollow" / f"{number}.txt").write_text("")
    refused(tmp_path / "out", "--text", str(tmp_path / "hollow"))


def test_a_snapshot_of_another_purpose_is_refused(tmp_path: Path, text: Path) -> None:
    built = tmp_path / "built"
    profile = ["--set", "data.purpose=advertising"]
    with pytest.raises(AssertionError, match="no rank"):
        ask("--text", str(text), "--output", str(built), *profile)
    (snapshot,) = (built / "data" / "snapshots").iterdir()
    error = refused(tmp_path / "out", "--snapshot", str(snapshot))
    assert "another purpose" in error.one_line()
    assert error.exit_code == 2
    with pytest.raises(AssertionError, match="no rank"):  # who says so may
        ask("--snapshot", str(snapshot), "--output", str(tmp_path / "out"), *profile)


def test_a_model_of_another_tokenizer_is_refused(tmp_path: Path, text: Path) -> None:
    config = config_for(20_000, 32, tokenizer_digest=OTHER_TOKENIZER)
    save_model(new_model(config, 0), config, tmp_path / "model")
    with pytest.raises(PacelineError, match="tokenizer"):
        ask(
            "--text", str(text), "--model", str(tmp_path / "model"),
            "--output", str(tmp_path / "out"),
        )  # fmt: skip


@pytest.mark.parametrize(
    "arguments",
    [
        ["--model", "nowhere"],
        ["--snapshot", "nowhere/snapshots/" + "0" * 64],
        ["--text", ".", "--snapshot", "nowhere"],
        ["--set", "training.stpes=3"],
        ["--set", "training.ranks=0"],
        ["--set", "training.code_ref=no.such.module:task"],
        ["--set", "training.guard.preemption=no.such:watcher"],
        ["MODEL"],
    ],
)
def test_wrong_arguments_are_one_line_and_leave_nothing(
    tmp_path: Path, text: Path, arguments: list[str]
) -> None:
    more = [] if "--text" in arguments or "--snapshot" in arguments else ["--text", str(text)]
    error = refused(tmp_path / "out", *arguments, *more)
    assert error.exit_code in (1, 2, 77)


def test_arguments_that_click_knows_to_be_wrong_are_usage_errors(tmp_path: Path) -> None:
    for wrong in (["--ranks", "0"], ["--text", str(tmp_path / "nowhere")], ["--rank", "2"]):
        with pytest.raises(click.UsageError):
            ask(*wrong)


def test_a_directory_where_training_is_under_way_is_refused_and_untouched(
    tmp_path: Path, text: Path
) -> None:
    output = tmp_path / "out"
    with single.held(output):
        kept = sorted(output.rglob("*"))
        with pytest.raises(StateLocked, match=f"process {os.getpid()}"):
            ask("--text", str(text), "--output", str(output))
        assert sorted(output.rglob("*")) == kept
    with (output / "state" / single.LOCK_FILE).open() as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # free again, whatever is written there


def test_a_refused_second_try_keeps_what_the_first_made(tmp_path: Path, text: Path) -> None:
    output = tmp_path / "out"
    with pytest.raises(AssertionError, match="no rank"):
        ask("--text", str(text), "--output", str(output))
    with pytest.raises(InvalidInput):
        ask("--text", str(text), "--output", str(output), "--ranks", "3", "--set",
            "training.mesh.tp=2")  # fmt: skip
    assert (output / "data").is_dir()


def event(kind: str, step: int) -> RankEvent:
    return RankEvent.model_validate({"event": kind, "rank": 0, "attempt": 1, "step": step})


def test_a_stop_says_what_is_saved_and_what_is_not(tmp_path: Path) -> None:
    lines = Lines(job_in(tmp_path))
    assert "before anything was saved" in lines.stopped(tmp_path).one_line()
    lines(event("step", 7))
    assert "before anything was saved" in lines.stopped(tmp_path).one_line()
    lines(event("checkpoint", 5))
    assert "got step 7 of 120, saved 5, " in lines.stopped(tmp_path).one_line()
    assert "The same command goes on from step 5" in lines.stopped(tmp_path).one_line()
    lines(event("checkpoint", 7))
    assert "its state is saved" in lines.stopped(tmp_path).one_line()


def test_the_first_signal_asks_and_the_second_ends() -> None:
    cancel, before = threading.Event(), signal.getsignal(signal.SIGHUP)
    with _stopping_gently(cancel) as signals:
        with pytest.raises(KeyboardInterrupt):  # nothing runs yet that could save
            signal.raise_signal(signal.SIGTERM)
        signals.running = True
        signal.raise_signal(signal.SIGHUP)
        assert cancel.is_set()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGHUP) is before
