"""`paceline train` without a server: what is refused leaves nothing; a stop says what is saved."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import signal
import threading
from pathlib import Path
from typing import Any

import click
import pytest
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner

from paceline.cli.training import Lines, beside, facts, output as training_facts, train
from paceline.cli.training.checkpoints import checkpoints
from paceline.cli.training.command import _stopping_gently
from paceline.config import CheckpointSettings, Profile, TrainingSettings, load_profile
from paceline.errors import InvalidInput, PacelineError, StateLocked
from paceline.models import (
    ModelConfig,
    config_for,
    new_model,
    read_config,
    save_model,
)
from paceline.schemas import Continued, RankEvent, TrainJob
from paceline.storage import DiskStore
from paceline.system import free_memory_bytes
from paceline.training import LocalLauncher, single
from paceline.training.checkpoint import (
    Checkpointer,
    Generations,
    TrainState,
)
from paceline.training.launcher import MIB, require_memory
from paceline.training.loop import Group, new_optimizer
from tests.support.carried_state import BYTE_GRU
from tests.training.test_recovery_driver import job_in

SMALL = ["--set", "model.parameters=20000", "--set", "model.context=32"]
OTHER_TOKENIZER = "f" * 64
PYLM = Path(__file__).parents[2] / "profiles/models/pylm"

pytestmark = pytest.mark.usefixtures("nothing_starts")


@pytest.fixture
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
            ["--output", str(output), *arguments, *SMALL],
            standalone_mode=False,
            catch_exceptions=False,
        )
    assert not output.exists(), "what is refused leaves nothing behind"
    error = caught.value
    assert error.got or error.where, "what was got is named, or where nothing was"
    assert "\n" not in error.one_line()
    return error


@pytest.mark.parametrize(
    ("arguments", "words", "code"),
    [
        (["--ranks", "3", "--set", "training.mesh.tp=2"], "", 2),
        (["--ranks", "4", "--set", "training.batch_sequences=2"], "batch is smaller", 2),
        (
            ["--ranks", "9000000", "--set", "training.batch_sequences=9000000"],
            "Lower --ranks (training.ranks)",
            2,
        ),
        (["--text", "{root}/empty"], "no file to learn from", 2),
        (["--text", "{root}/hollow"], "", 2),
        (["--output", "{root}/file/out"], "cannot write into the output directory", 77),
        (["acme/tiny", "1"], "paceline training start MODEL_ID VERSION", 2),
        (["--model", "{root}/hollow"], "no model of ours in the model directory: got 0.txt", 2),
    ],
)
def test_what_cannot_be_trained_is_refused_and_leaves_nothing(
    tmp_path: Path, text: Path, arguments: list[str], words: str, code: int
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "hollow").mkdir()
    (tmp_path / "hollow" / "0.txt").write_text("")
    (tmp_path / "file").write_text("")
    given = [each.format(root=tmp_path) for each in arguments]
    error = refused(tmp_path / "out", "--text", str(text), *given)
    assert words in error.one_line() + str(error.do)
    assert error.exit_code == code


def test_memory_is_counted_as_the_mesh_shares_it() -> None:
    settings = TrainingSettings(ranks=2)
    halved = TrainingSettings.model_validate({"ranks": 2, "mesh": {"shard": 2}})
    weights = 125 * MIB  # in float32 500 MiB, whatever the files have
    require_memory(halved, weights, 2500 * MIB)
    adapted = TrainingSettings.model_validate({"ranks": 2, "lora": {}})
    require_memory(adapted, weights, 1500 * MIB)  # no gradients or moments of frozen weights
    with pytest.raises(InvalidInput):
        require_memory(adapted, weights, 1200 * MIB)
    with pytest.raises(InvalidInput, match=r"at least 4,252 MiB .* wanted at most 2,500 MiB"):
        require_memory(settings, weights, 2500 * MIB)
    require_memory(settings, weights, None)
    found = free_memory_bytes()
    assert found is None or found > 0


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
        ["--model", ".", "--set", f"training.code_ref={BYTE_GRU}"],
        ["--snapshot", "nowhere/snapshots/" + "0" * 64],
        ["--text", ".", "--snapshot", "nowhere"],
        ["--snapshot", "s3://bucket/data/snapshots/" + "0" * 64],
        ["--set", "data.source=s3://bucket/texts", "--snapshot", ""],
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


def test_arguments_that_click_knows_to_be_wrong_are_usage_errors() -> None:
    for wrong in (["--ranks", "0"], ["--rank", "2"]):
        with pytest.raises(click.UsageError):
            ask(*wrong)


def test_a_directory_that_is_in_use_is_refused_and_untouched(tmp_path: Path, text: Path) -> None:
    output = tmp_path / "out"
    with pytest.raises(AssertionError, match="no rank"):
        ask("--text", str(text), "--output", str(output))
    with pytest.raises(InvalidInput):
        ask("--text", str(text), "--output", str(output), "--set", "training.mesh.tp=3")
    assert (output / "data").is_dir(), "a refused second try keeps what the first made"
    with single.locked_output(output):
        kept = sorted(output.rglob("*"))
        with pytest.raises(StateLocked, match=f"process {os.getpid()}"):
            ask("--text", str(text), "--output", str(output))
        assert sorted(output.rglob("*")) == kept
    with (output / "state" / single.LOCK_FILE).open() as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # free again, whatever is written there


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


def test_the_first_signal_asks_and_the_second_ends(request: pytest.FixtureRequest) -> None:
    # What starts tests in the background has them ignore SIGINT or SIGHUP, which then stay ignored.
    for number in (signal.SIGINT, signal.SIGHUP):
        ours = signal.signal(number, signal.default_int_handler)
        request.addfinalizer(lambda number=number, ours=ours: signal.signal(number, ours))
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


def test_settings_that_cannot_work_are_refused_before_any_data_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a text")
    for wrong in (
        "training.steps=0",
        "training.learning_rate=inf",
        "training.learning_rate=-1",
        "training.checkpoints.every_steps=0",
        "training.schedule=cosin",
        "training.mesh=2",
        "training.code_ref=own:make",
        "data.transform=own:clean",
        "data.columns=3",
        "training.synchrony.kind=parameter-server",
    ):
        error = refused(tmp_path / "out", "--set", wrong, "--text", str(tmp_path))
        assert error.exit_code in (2, 77), wrong
        assert wrong.split("=")[0] in error.one_line() or error.do, wrong
    typo = refused(tmp_path / "out", "--set", "training.mesh.hook=bf-16")
    assert "wanted 'none', 'fp16', 'bf16' or 'powersgd', at --set training.mesh.hook" in (
        typo.one_line()
    )


def test_numbers_beside_the_text_need_a_batching_that_keeps_samples_apart(tmp_path: Path) -> None:
    lines = "".join(f'{{"key": "{n}", "text": "line {n} of it", "stars": {n}}}\n' for n in range(9))
    (tmp_path / "a.jsonl").write_text(lines)
    jsonl = ["--text", str(tmp_path / "a.jsonl"), "--set", "data.format=jsonl"]
    error = refused(tmp_path / "out", *jsonl)
    assert "windows have no features" in error.one_line()
    assert "samples with stars" in error.one_line() and "data.batching=packed" in str(error.do)
    typo = refused(tmp_path / "out", *jsonl, "--set", "data.text_field=txet")
    assert "no tokens" in typo.one_line() and "data.text_field is 'txet'" in str(typo.do)
    with pytest.raises(AssertionError, match="no rank"):
        ask(*jsonl, "--output", str(tmp_path / "out"), "--set", "data.batching=packed")


def prepared(output: Path, text: Path, *overrides: str) -> TrainJob:
    pairs = dict(each.split("=") for each in (*overrides, *SMALL[1::2]))
    asked = single.TrainingRequest(
        output=output, profile=load_profile("local", pairs), source=str(text)
    )
    return single.prepare(asked)


def test_what_changes_only_how_it_is_learned_goes_on_with_the_same_job(
    tmp_path: Path, text: Path
) -> None:
    output = tmp_path / "out"
    job = prepared(output, text)
    same = "training.mesh.shard=2", "training.ranks=4", "data.cache_bytes=9999999"
    same += ("training.export_file_bytes=4096",)
    assert 0 < job.base_bytes - 4 * job.base_parameters < 20_000, "weights and a header"
    assert prepared(output, text, *same).job_id == job.job_id
    assert prepared(output, text, "training.steps=7").job_id != job.job_id


def test_a_start_says_what_is_learned_from_what(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training_facts, "usable_cores", lambda: 1)
    job = prepared(tmp_path / "out", text, "data.max_bytes=2000")
    said = "\n".join(facts(job, *single.snapshot_and_config(job)))
    assert "samples, " in said and "held out" in said and "parameters: " in said
    assert "! data are cut at 2,000 bytes" in said
    assert "! 2 ranks of 1 threads take turns on 1 cores" in said
    checkpoints = single.local_record_dir(job)
    assert beside(job, checkpoints) is None
    (checkpoints.with_name("job-before") / "step-00000007-abcd").mkdir(parents=True)
    assert "job-before (step 7)" in str(beside(job, checkpoints))
    begun = Continued(job_id="job-before", step=7, config_digest="0" * 64)
    assert beside(job.model_copy(update={"continues": begun}), checkpoints) is None
    checkpoints.mkdir()
    assert beside(job, checkpoints) is None, "it goes on with its own"


def test_a_model_of_ours_with_a_tokenizer_is_trained_in_its_own_tokens(
    tmp_path: Path, text: Path
) -> None:
    asked = single.TrainingRequest(
        output=tmp_path / "out", profile=Profile(), source=str(text), model=PYLM
    )
    snapshot, config = single.snapshot_and_config(single.prepare(asked))
    assert isinstance(config, ModelConfig)
    assert snapshot.vocabulary.sha256 == config.tokenizer_digest != ""


def test_progress_is_never_silent_for_long_and_says_what_is_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [0.0]
    job = job_in(tmp_path)
    settings = job.settings.model_copy(update={"steps": 100_000})
    lines = Lines(job.model_copy(update={"settings": settings}), clock=lambda: now[0])
    for step in range(1, 41):
        now[0] += 1.0
        lines(event("step", step))
        if step % 2 == 0:
            lines(event("checkpoint", step - 1))
    said = capsys.readouterr().err.splitlines()
    assert [int(line.split()[1].split("/")[0]) for line in said if "step " in line[:8]] == [
        1, 11, 21, 31
    ]  # fmt: skip
    assert "27:46 h left" in said[-2] + said[-1]
    assert sum("checkpoint of step" in line for line in said) == 4, "not one a save"


def test_silence_is_told_ever_more_seldom_until_a_word_is_heard(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [100.0]
    lines = Lines(job_in(tmp_path), clock=lambda: now[0])
    for _ in range(45):
        now[0] += 1.0
        lines.look()
    said = capsys.readouterr().err.splitlines()
    assert [line.split(" without")[0] for line in said] == ["  10 s", "  20 s", "  40 s"]
    assert "no step was made yet" in said[0]
    lines(event("step", 3))
    now[0] += 9.0
    lines.look()
    now[0] += 2.0
    lines.look()
    assert "11 s without a word: step 3 was the last" in capsys.readouterr().err


def test_a_failure_is_told_once_whoever_shares_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = Lines(job_in(tmp_path))
    gang = logging.LogRecord("paceline", logging.WARNING, "", 0, "gang ended attempt=1", (), None)
    assert lines.is_news(gang), "a rank that was killed told nothing"
    for attempt in (1, 2):
        for rank in (0, 1):
            failed = {"rank": rank, "attempt": attempt, "data": {"message": "disk is full"}}
            lines(RankEvent.model_validate({"event": "failed", **failed}))
        assert not lines.is_news(gang)
    lines(RankEvent.model_validate({"event": "started", "rank": 0, "attempt": 3}))
    assert lines.is_news(gang)
    for step in (1, 2):
        alert = {"checkpoint_alerts": ["put off"]}
        lines(RankEvent(event="step", rank=0, attempt=3, step=step, data=alert))
    said = capsys.readouterr().err
    assert said.count("disk is full") == 2, "once an attempt"
    assert said.count("put off") == 1


def test_a_figures_file_that_cannot_be_written_does_not_end_training(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    lines = Lines(job_in(tmp_path), tmp_path / "file" / "kept")
    lines(event("step", 1))
    lines(event("step", 2))
    assert lines.step == 2
    assert len([each for each in lines.notes if "is not written any more" in each]) == 1


def test_checkpoints_are_listed_and_exported(tmp_path: Path, text: Path) -> None:
    def run(*arguments: str) -> dict[str, Any]:
        result = CliRunner().invoke(checkpoints, [*arguments, "--json"], catch_exceptions=False)
        return {**json.loads(result.stdout), "code": result.exit_code}

    config = config_for(20_000, 32)
    model = new_model(config, 3)
    tensors = {f"model.{name}": each for name, each in model.state_dict().items()}
    job = tmp_path / "job"
    generations = Generations(DiskStore(), DiskStore.url_of(job))
    state = TrainState([model], new_optimizer(model, TrainingSettings()), Group())
    saver = Checkpointer(
        generations,
        state,
        CheckpointSettings(),
        job_id="job-1",
        config_digest="c" * 64,
        code_version="t",
    )
    for step in range(2):
        saver.save_last(step, {}, {})
    shown = run("list", str(job), "--verify")
    assert [each["status"] for each in shown["checkpoints"]] == ["verified"] * 2
    assert (shown["job_id"], shown["code"]) == ("job-1", 0)
    first = generations.find().committed[0]
    (file,) = (job / str(first)).glob("rank-*")
    file.write_bytes(file.read_bytes()[:-1] + b"!")
    shown = run("list", str(job), "--verify")
    assert [each["status"] for each in shown["checkpoints"]] == ["damaged", "verified"]
    assert file.name in shown["checkpoints"][0]["why"]
    (job / "export").mkdir()
    (job / "export" / "config.json").write_bytes(config.model_dump_json().encode())
    done = run("export", str(job / str(generations.find().committed[1])), str(tmp_path / "out"))
    assert done["tensors"] == len(tensors)
    found = {"model": {n: torch.zeros_like(t) for n, t in model.state_dict().items()}}
    with pytest.warns(UserWarning, match="single process"):
        dcp.load(found, checkpoint_id=tmp_path / "out")
    assert read_config(tmp_path / "out") == config
    assert all(torch.equal(found["model"][n], t) for n, t in model.state_dict().items())
