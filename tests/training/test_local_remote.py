"""A training on this machine that keeps its checkpoints in S3 and logs to MLflow, both real."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.training import Lines, TrainingLog, location
from paceline.config import Profile, load_profile
from paceline.errors import (
    AccessDenied,
    Cancelled,
    InvalidInput,
    PacelineError,
    ServiceUnavailable,
    SourceMissing,
)
from paceline.registry import Registry
from paceline.schemas import RankEvent, TrainJob, TrainResult
from paceline.storage import DiskStore, ObjectStore
from paceline.training import checkpoints_url, single
from paceline.training.checkpoint import Generations, generation_at
from paceline.training.loop import RankIdentity, StopFlag, run_rank
from tests.support.rclone import RcloneS3
from tests.training.conftest import Listener

BUCKET = "local-training"
STEPS = 8


@pytest.fixture
def credentials(s3: RcloneS3, monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3.endpoint_url)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3.secret_key)
    s3.store().ensure_bucket(BUCKET)
    return s3.store()


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("text")
    for number in range(8):
        (directory / f"{number}.txt").write_text(f"file {number} says {number * number}\n" * 40)
    return directory


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A real MLflow's database; its tables take seconds to make."""
    return f"sqlite:///{tmp_path_factory.mktemp('mlflow') / 'ml.db'}"


def profile() -> Profile:
    dials = {
        "model.parameters": "20000",
        "model.context": "32",
        "training.ranks": "1",
        "training.steps": str(STEPS),
        "training.batch_sequences": "4",
        "training.checkpoints.every_steps": "2",
        "training.checkpoints.max_stall_share": "0.99",
    }
    return load_profile("local", dials)


def ask(output: Path, text: Path, checkpoints: str | None) -> single.TrainingRequest:
    return single.TrainingRequest(
        output=output, profile=profile(), source=str(text), checkpoints=checkpoints
    )


class Following(Listener):
    """Gives each event to another."""

    def __init__(self, follow: Callable[[RankEvent], None]) -> None:
        super().__init__()
        self._follow = follow

    def emit(self, event, step=0, **data):
        super().emit(event, step, **data)
        self._follow(self.events[-1])


class StoppedAfter(StopFlag):
    """As if SIGTERM came after a step."""

    def __init__(self, listener: Listener, step: int) -> None:
        super().__init__()
        self._listener, self._step = listener, step

    def __call__(self) -> bool:
        return len(self._listener.of("step")) >= self._step > 0


def rank_here(
    job: TrainJob, follow: Callable[[RankEvent], None] = lambda _: None, after: int = 0
) -> Listener:
    """Run the job's one rank in this process: no launch, so cheap."""
    listener = Following(follow)
    place = RankIdentity(0, 1, "127.0.0.1", 0, 1, single.WORKER)
    run_rank(job, place, listener, StoppedAfter(listener, after))
    return listener


def result_of(job: TrainJob, listener: Listener) -> TrainResult:
    (said,) = listener.of("result")
    fields = {name: each for name, each in said.data.items() if name in TrainResult.model_fields}
    return TrainResult.model_validate(
        {"job_id": job.job_id, "restarts": (), "seconds": 1.0} | fields
    )


def test_another_machine_goes_on_from_s3_in_the_same_mlflow_run(
    credentials: ObjectStore, text: Path, tmp_path: Path, uri: str
) -> None:
    place = f"s3://{BUCKET}/one"
    told: list[str] = []

    def logged(job: TrainJob) -> TrainingLog:
        return TrainingLog(
            uri, job, experiment="tests", record=single.local_record_dir(job), tell=told.append
        )

    first = single.prepare(ask(tmp_path / "first", text, place))
    lines = Lines(first, single.local_record_dir(first))
    with pytest.raises(Cancelled), single.recorded(first, credentials, tmp_path):
        with logged(first) as log:

            def follow(event: RankEvent) -> None:
                lines(event)
                log(event)

            made = len(rank_here(first, follow, after=4).losses)
            raise Cancelled("stopped")
    generations = Generations(credentials, checkpoints_url(first))
    assert generations.steps()[0] == made < STEPS
    assert not list(tmp_path.glob("first/checkpoints/*/step-*")), "nothing of it is here"
    assert generation_at(tmp_path / "first")[0].url == checkpoints_url(first)

    second = single.prepare(ask(tmp_path / "second", text, place))
    assert (second.job_id, second.run_id) == (first.job_id, first.run_id)
    with (
        logged(second) as log,
        single.recorded(second, credentials, tmp_path / "r") as keep,
    ):
        heard = rank_here(second, log)
        result = result_of(second, heard)
        keep(result)
        log.done(result)
    assert [each.step for each in heard.of("step")] == list(range(made + 1, STEPS + 1))
    assert result.resumed_from_step == made
    assert TrainResult.model_validate_json((tmp_path / "r" / "result.json").read_bytes()) == result

    registry = Registry(uri)
    run = registry.find_run(first.run_id)
    assert {log.run_id} == {run}
    losses = registry.history(run, "train/loss")
    assert sorted(losses) == list(range(1, STEPS + 1))
    assert losses[STEPS] == heard.losses[-1]
    found = registry.call("get_run", run)
    assert found.info.status == "FINISHED"
    assert found.data.params["training.batch_sequences"] == "4"
    assert found.data.tags["paceline.job_id"] == first.job_id
    assert TrainJob.model_validate_json(registry.read_artifact(run, "training/job.json")) == second
    assert not [each for each in told if each.startswith("!")]
    # Not a word of the secret anywhere here.
    secret = credentials.access.secret_key.encode()
    files = [each for each in tmp_path.rglob("*") if each.is_file()]
    assert files
    assert not [each for each in files if secret in each.read_bytes()]


def test_what_is_refused_is_refused_before_data_are_read(
    credentials: ObjectStore, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(kind: type[PacelineError], place: str) -> PacelineError:
        output = tmp_path / "out"
        with pytest.raises(kind) as caught, single.locked_output(output):
            single.prepare(ask(output, text, place))
        assert not (output / "data").exists()
        return caught.value

    assert "no such bucket" in refused(SourceMissing, "s3://no-such-bucket/one").one_line()
    assert refused(InvalidInput, "s3://UPPER/one").wanted
    with monkeypatch.context() as patch:
        patch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
        assert "403" in refused(AccessDenied, f"s3://{BUCKET}/one").one_line()
        patch.delenv("AWS_SECRET_ACCESS_KEY")
        assert "AWS_SECRET_ACCESS_KEY" in refused(AccessDenied, f"s3://{BUCKET}/one").one_line()
    assert not credentials.list(f"s3://{BUCKET}/refused"), "no probe is left"


def test_a_run_id_that_is_given_is_a_run_of_its_own(text: Path, tmp_path: Path) -> None:
    asked = ask(tmp_path / "out", text, str(tmp_path / "elsewhere"))
    job = single.prepare(asked)
    assert job.checkpoint_url == DiskStore.url_of(tmp_path / "elsewhere")
    store = DiskStore()
    store.put_bytes(f"{checkpoints_url(job)}/job.json", job.model_dump_json().encode())
    assert single.prepare(asked).run_id == job.run_id
    assert single.prepare(asked, "run-20260101-000000-abcdef").run_id.endswith("abcdef")
    store.put_bytes(f"{checkpoints_url(job)}/job.json", b"{")
    assert single.prepare(asked).run_id != job.run_id


class AwayFor(Registry):
    """A registry whose server does not answer its first calls."""

    def __init__(self, uri: str, calls: int) -> None:
        super().__init__(uri)
        self.left = calls

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        if self.left > 0:
            self.left -= 1
            raise ServiceUnavailable("MLflow does not answer")
        return super().call(method, *args, **kwargs)


@pytest.fixture
def job(text: Path, tmp_path: Path) -> Iterator[TrainJob]:
    yield single.prepare(ask(tmp_path / "out", text, None))


def step(number: int) -> RankEvent:
    data = {"loss": 1.0 / number, "lr": 0.1, "stragglers": {}}
    return RankEvent(event="step", rank=0, attempt=1, step=number, data=data)


def test_an_mlflow_that_is_away_is_told_and_catches_up(job: TrainJob, uri: str) -> None:
    told: list[str] = []
    record = single.local_record_dir(job)
    lines = Lines(job, record)
    away = AwayFor(uri, 10_000)

    def logged(registry: Registry) -> TrainingLog:
        return TrainingLog(
            uri, job, experiment="t", record=record, tell=told.append, registry=registry
        )

    with logged(away) as log:
        for number in (1, 2, 3):
            lines(step(number))
            log(step(number))
        lines(step(5))  # of an attempt whose figures nobody sent
    assert sum("training goes on" in each for each in told) == 1
    assert sum("does not have all" in each for each in told) == 1
    assert log.run_id == ""
    away.left = 0
    told.clear()
    with pytest.raises(KeyboardInterrupt), logged(away) as log:
        log(step(4))
        raise KeyboardInterrupt
    assert told[0].endswith("was sent 4 steps it had missed")
    losses = away.history(log.run_id, "train/loss")
    assert losses == {1: 1.0, 2: 0.5, 3: 1 / 3, 4: 0.25, 5: 0.2}
    assert away.call("get_run", log.run_id).info.status == "KILLED"


def test_an_mlflow_that_refuses_is_told_before_any_rank(job: TrainJob, tmp_path: Path) -> None:
    class Refusing(Registry):
        def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
            raise AccessDenied("MLflow refused", got="HTTP 401", do="Check the password.")

    log = TrainingLog(
        "http://127.0.0.1:9", job, experiment="t", record=tmp_path, tell=print,
        registry=Refusing("http://127.0.0.1:9"),
    )  # fmt: skip
    with pytest.raises(AccessDenied), log:
        raise AssertionError("no rank is to start")


def test_a_password_in_the_uri_is_shown_to_nobody() -> None:
    assert location("http://me:secret@host:5000/x") == ("http://host:5000/x", "me:secret")
    assert location("sqlite:///ml.db") == ("sqlite:///ml.db", "")
    assert location("./mlruns") == ("./mlruns", "")
    with pytest.raises(InvalidInput, match="http://host:port") as caught:
        location("ftp://me:secret@host/x")
    assert "secret" not in caught.value.one_line()
