"""A sweep finds the best settings with the queue's jobs, and none is submitted twice."""

from __future__ import annotations

import math
import re
import shlex
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest

from paceline.cli import cli
from paceline.config import load_profile
from paceline.errors import Conflict, InvalidInput, InvalidProfile, NotFound
from paceline.jobs import Sweep, page_of, read_space, report_sweep, run_sweep
from paceline.schemas import JobReport, JobState, SubmitJob, SweepShown, TrainingJob, new_run_id
from tests.support.command import paceline

PAGE = Path(__file__).parents[2] / "docs/how-to/sweep-hyper-parameters.md"
STEPS, A_LOOK = 320, 20
STORAGE = "sweeps.sqlite"
SPACE = """
[space."training.learning_rate"]
kind = "float"
low = 1e-5
high = 1e-1
log = true
[space."training.weight_decay"]
kind = "float"
low = 0.0
high = 0.5
"""


def final_loss(given: dict[str, Any]) -> float:
    """The known function: its lowest is 1.0, at a learning rate of 1e-3 without decay."""
    rate, decay = given["training.learning_rate"], given["training.weight_decay"]
    return 1.0 + 0.5 * (math.log10(rate) + 3) ** 2 + 0.1 * decay


class Queue:
    """A client whose jobs make steps whenever they are looked at."""

    def __init__(self) -> None:
        self.coordinator, self.jobs = self, dict[str, TrainingJob]()
        self.keys: list[str] = []
        self.failing: set[str] = set()
        self.refused: set[str] = set()
        self.looks_left = math.inf
        self.most_open = 0

    def __enter__(self) -> Queue:
        return self

    def __exit__(self, *_: object) -> None: ...

    def runtime(self) -> Any:
        return SimpleNamespace(profile=load_profile("embedded"), is_login=True)

    def submit(self, model: str, version: str, url: str, *, key: str, **more: Any) -> TrainingJob:
        if key in self.refused:
            raise InvalidProfile("these settings do not go together")
        self.keys.append(key)
        job_id = f"tj-{abs(hash(key)) % 16**12:012x}"
        spec = SubmitJob.model_validate(
            {"model_id": model, "version": version, "data_snapshot": url, **more}
        )
        if job_id not in self.jobs:
            self.jobs[job_id] = TrainingJob(
                job_id=job_id, submission_id="0" * 64, spec=spec, run_id=new_run_id(),
                state=JobState.QUEUED, created_at=0.0, updated_at=0.0,
            )  # fmt: skip
        if self.jobs[job_id].spec != spec:
            raise Conflict("the idempotency key belongs to another submission")
        self.most_open = max(self.most_open, sum(not e.state.is_final for e in self.jobs.values()))
        return self.jobs[job_id]

    def job(self, job_id: str) -> TrainingJob:
        self.looks_left -= 1
        if self.looks_left < 0:
            raise KeyboardInterrupt
        job = self.jobs[job_id]
        if job.state.is_final:
            return job
        step = min(STEPS, (job.report.step if job.report else 0) + A_LOOK)
        final, left = final_loss(job.spec.parameters), 1 - step / STEPS
        loss = final + 3 * left**3 + 0.2 * left * math.sin(7 * final)  # the curves cross
        report = JobReport(at=0.0, step=step, steps=STEPS, metrics={"loss": loss, "score": -loss})
        state, reason = JobState.SUCCEEDED if step == STEPS else JobState.RUNNING, ""
        if job.spec.name in self.failing and step > STEPS / 2:
            state, reason = JobState.FAILED, "a rank was killed"
        new = {"state": state, "report": report, "reason": reason}
        self.jobs[job_id] = job.model_copy(update=new)
        return self.jobs[job_id]

    def change_job(self, job_id: str, what: str) -> None:
        assert what == "cancel"
        if self.jobs[job_id].state.is_final:
            raise Conflict("it has ended")
        self.jobs[job_id] = self.jobs[job_id].model_copy(update={"state": JobState.CANCELLED})

    @property
    def steps_made(self) -> int:
        return sum(each.report.step for each in self.jobs.values() if each.report)


@pytest.fixture
def sweep(tmp_path: Path) -> Sweep:
    (tmp_path / "space.toml").write_text(SPACE)
    return Sweep(
        name="lr", model_id="org/m", version="1", snapshot_url="s3://b/d", seed=7, parallel=4,
        space=read_space(tmp_path / "space.toml"), settings={"training.steps": STEPS},
    )  # fmt: skip


@pytest.fixture(autouse=True)
def storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The file of the study, in the working directory of the test."""
    monkeypatch.chdir(tmp_path)
    return str(tmp_path / STORAGE)


def replace(sweep: Sweep, **changes: Any) -> Sweep:
    return sweep.model_copy(update=changes)


def run(sweep: Sweep, queue: Queue, storage: str = STORAGE, **more: Any) -> SweepShown:
    more = {"sleep": lambda _: None, **more}
    return run_sweep(sweep, queue, storage, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("sampler", ["tpe", "cmaes"])
def test_a_sweep_finds_the_best_settings(sweep: Sweep, sampler: Any) -> None:
    queue = Queue()
    found = run(replace(sweep, sampler=sampler, trials=24), queue)
    assert len(found.trials) == len(queue.jobs) == 24
    assert queue.most_open == 4
    assert found.best is not None and found.best.value is not None
    assert found.best.value < 1.1
    assert found.best.value == min(each.value or 9 for each in found.trials)
    assert found.best.value == pytest.approx(final_loss(found.best.parameters))
    assert found.importance["training.learning_rate"] > 0.5


def test_the_highest_is_the_best_where_that_is_asked_for(sweep: Sweep) -> None:
    found = run(replace(sweep, metric="score", maximize=True), Queue())
    assert found.best is not None
    assert found.best.value == max(each.value or -99 for each in found.trials)


def test_a_sweep_without_parallel_jobs_is_drawn_again_by_its_seed(sweep: Sweep) -> None:
    first = run(replace(sweep, parallel=1, name="a"), Queue())
    second = run(replace(sweep, parallel=1, name="b"), Queue())
    assert [each.parameters for each in first.trials] == [e.parameters for e in second.trials]


@pytest.mark.parametrize("pruner", ["asha", "hyperband", "median"])
def test_pruning_cancels_jobs_and_keeps_the_winner(sweep: Sweep, pruner: Any) -> None:
    sweep = replace(sweep, sampler="random")
    whole, pruned = Queue(), Queue()
    best = run(replace(sweep, name="whole"), whole).best
    found = run(replace(sweep, pruner=pruner), pruned)
    assert best is not None and found.best is not None
    assert found.best.parameters == best.parameters
    stopped = [each for each in found.trials if each.state == "pruned"]
    assert {pruned.jobs[each.job_id].state for each in stopped} == {JobState.CANCELLED}
    share = pruned.steps_made / whole.steps_made
    assert whole.steps_made == 16 * STEPS
    assert share <= (0.5 if pruner == "asha" else 0.8), share


@pytest.mark.parametrize("looks", [0, 30, 100])
def test_an_interrupted_sweep_goes_on_with_the_same_jobs(sweep: Sweep, looks: int) -> None:
    queue = Queue()
    queue.looks_left = looks
    with pytest.raises(KeyboardInterrupt):
        run(sweep, queue)
    before = report_sweep("lr", STORAGE)
    queue.looks_left = math.inf
    found = run(sweep, queue)
    assert len(queue.jobs) == len(found.trials) == 16
    assert len(queue.keys) == len(set(queue.keys)), "no job is submitted twice"
    assert {each.state for each in found.trials} == {"complete"}
    assert [e.parameters for e in before.trials] == [
        e.parameters for e in found.trials[: len(before.trials)]
    ]
    different = {tuple(each.parameters.values()) for each in found.trials}
    assert len(different) == 16, "the seed does not draw the first trials again"
    assert run(sweep, queue) == found, "nothing is left to do"


def test_a_job_that_was_submitted_as_the_sweep_died_is_found_by_its_key(
    sweep: Sweep, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = Queue()
    submit = queue.submit

    def dies(*words: Any, **more: Any) -> TrainingJob:
        submit(*words, **more)
        raise KeyboardInterrupt

    monkeypatch.setattr(queue, "submit", dies)
    with pytest.raises(KeyboardInterrupt):
        run(sweep, queue)
    monkeypatch.setattr(queue, "submit", submit)
    found = run(sweep, queue)
    assert queue.keys[:2] == ["sweep:lr:trial-0"] * 2
    assert len(queue.jobs) == len(found.trials) == 16


def test_a_pruned_job_is_pruned_where_the_sweep_died_right_after(sweep: Sweep) -> None:
    class Dying(Queue):
        def change_job(self, job_id: str, what: str) -> None:
            super().change_job(job_id, what)
            self.change_job = super().change_job  # type: ignore[method-assign]
            raise KeyboardInterrupt

    queue = Dying()
    sweep = replace(sweep, pruner="asha")
    with pytest.raises(KeyboardInterrupt):
        run(sweep, queue)
    found = run(sweep, queue)
    assert not [each for each in found.trials if each.state == "fail"]


def test_jobs_that_are_cancelled_with_the_sweep_are_replaced(sweep: Sweep) -> None:
    queue = Queue()
    queue.looks_left = 10
    with pytest.raises(KeyboardInterrupt):
        run(sweep, queue, cancels=lambda: True)
    assert {each.state for each in queue.jobs.values()} == {JobState.CANCELLED}
    queue.looks_left = math.inf
    found = run(sweep, queue)
    assert sum(each.state == "complete" for each in found.trials) == 16
    assert len(found.trials) == 20


def test_a_failed_or_refused_job_fails_its_trial_only(sweep: Sweep) -> None:
    queue = Queue()
    queue.failing, queue.refused = {"lr trial 2"}, {"sweep:lr:trial-5"}
    found = run(sweep, queue)
    failed = {each.number: each.reason for each in found.trials if each.state == "fail"}
    assert set(failed) == {2, 5}
    assert "a rank was killed" in failed[2] and "do not go together" in failed[5]
    assert sum(each.state == "complete" for each in found.trials) == 14


def test_a_metric_that_no_report_has_fails_the_trials(sweep: Sweep) -> None:
    found = run(replace(sweep, metric="nothing", trials=2), Queue())
    assert found.best is None
    assert all("no finite nothing" in each.reason for each in found.trials)


RATE = '[space."training.learning_rate"]\n'


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "space"),
        ("not toml", "cannot be read"),
        ("[spaces]", "spaces"),
        (RATE + 'kind = "log"', "learning_rate"),
        (RATE + 'kind = "float"\nlow = 1.0\nhigh = 1.0', "not below high"),
        (RATE + 'kind = "float"\nlow = 0.0\nhigh = 1.0\nlog = true', "above 0"),
        (RATE + 'kind = "float"\nlow = 1.0\nhigh = inf', "high"),
        (RATE + 'kind = "float"\nlow = 1.0', "high"),
        (RATE + 'kind = "int"\nlow = 1.5\nhigh = 3', "low"),
        (RATE + 'kind = "float"\nlow = 1.0\nhigh = 2.0\nstep = 1', "step"),
        (RATE + 'kind = "categorical"\nchoices = []', "choices"),
    ],
)
def test_a_bad_space_is_refused_with_its_key(tmp_path: Path, text: str, named: str) -> None:
    path = tmp_path / "space.toml"
    path.write_text(text)
    with pytest.raises(InvalidInput, match=re.escape(named)) as refused:
        read_space(path)
    error = refused.value
    assert error.got is not None and error.wanted and error.where and error.do


@pytest.mark.parametrize(
    ("key", "low", "high"),
    [
        ("training.lerning_rate", 1, 2),  # unknown
        ("cluster.nodes", 1, 2),  # the installation's
        ("training.learning_rate", -1, 2),  # below 0
        ("training.steps", 1, 9),  # fixed, too
    ],
)
def test_a_setting_that_no_training_has_is_refused_before_any_job(
    sweep: Sweep, tmp_path: Path, key: str, low: int, high: int
) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(f'[space."{key}"]\nkind = "int"\nlow = {low}\nhigh = {high}')
    queue = Queue()
    with pytest.raises(InvalidInput) as refused:
        run(replace(sweep, space=read_space(path)), queue)
    assert key in str(refused.value) and refused.value.where and refused.value.do
    assert not queue.jobs


def test_a_name_is_one_sweeps(sweep: Sweep) -> None:
    run(replace(sweep, trials=1), Queue())
    with pytest.raises(Conflict, match=r"another sweep's.*version 2"):
        run(replace(sweep, version="2"), Queue())
    with pytest.raises(NotFound, match="no such sweep"):
        report_sweep("rl", STORAGE)
    with pytest.raises(NotFound):
        report_sweep("lr", STORAGE + "-not")
    assert not Path(STORAGE + "-not").exists()
    with pytest.raises(InvalidInput, match="cannot be stored"):
        run(sweep, Queue(), "/nowhere/at/all")


def test_the_page_has_each_trial_and_loads_nothing(sweep: Sweep) -> None:
    queue = Queue()
    queue.failing = {"lr trial 2"}
    found = run(replace(sweep, pruner="asha", snapshot_url="s3://b/<d>"), queue)
    page = page_of(found)
    for each in found.trials:
        assert f"<td>{each.number}</td><td>{each.state}</td>" in page
        assert each.job_id in page
        assert (f"<title>trial {each.number}<" in page) == (each.value is not None)
    assert not re.search(r"http|<script|<link|@import|url\(|src=", page)
    assert "training.learning_rate" in page and "<d>" not in page
    assert page_of(found.model_copy(update={"trials": (), "best": None, "importance": {}}))


def test_the_command_shows_trials_and_how_to_train_the_best_again(
    sweep: Sweep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = Queue()
    monkeypatch.setattr("paceline.cli.training.sweep.Client", lambda **_: queue)
    monkeypatch.setattr("paceline.jobs.sweep.LOOK_S", 0)
    words = ["sweep", "lr", "org/m", "1", "--snapshot", "s3://b/d", "--space",
             str(tmp_path / "space.toml"), "--trials", "6", "--ranks", "2", "--steps", str(STEPS),
             "--storage", STORAGE, "--seed", "1"]  # fmt: skip
    queue.looks_left = 20
    stopped = paceline(*words)
    assert stopped.returncode == 130
    assert "its jobs go on" in stopped.stderr and "Go on with: paceline sweep lr" in stopped.stderr
    queue.looks_left = math.inf
    done = paceline(*words)
    assert done.returncode == 0, done.stderr
    assert all(each in done.stdout for each in queue.jobs)
    (line,) = re.findall(r"^reproduce: paceline (.*)$", done.stdout, re.MULTILINE)
    assert "--ranks 2" in line
    best = report_sweep("lr", STORAGE).best
    assert best is not None
    typed = parsed(shlex.split(line)).params["overrides"]
    given = tomllib.loads("\n".join(typed).replace("training.", "")) | {}
    assert given["learning_rate"] == best.parameters["training.learning_rate"]
    page = tmp_path / "lr.html"
    shown = paceline("sweep", "report", "lr", "--storage", STORAGE, "--html", page, "--json")
    assert SweepShown.model_validate_json(shown.stdout).best == best
    assert page.read_text().startswith("<!DOCTYPE html>")


def parsed(words: list[str]) -> click.Context:
    """Return the context of a command that is typed so; raises for an option that it has not."""
    command: click.Command = cli
    context: click.Context | None = None
    while isinstance(command, click.Group):
        context = click.Context(command, context)
        _, found, words = command.resolve_command(context, words)
        assert found is not None
        command = found
    return command.make_context(str(command.name), list(words), context)


def test_the_page_of_the_docs_is_what_the_code_takes(sweep: Sweep, tmp_path: Path) -> None:
    blocks = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    (space,) = [text for kind, text in blocks if kind == "toml"]
    (tmp_path / "docs.toml").write_text(space)
    replace(sweep, space=read_space(tmp_path / "docs.toml")).check(load_profile("embedded"))
    lines = [line for kind, text in blocks if kind == "sh" for line in text.splitlines()]
    assert len(lines) == 2
    for line in lines:
        parsed(shlex.split(line)[1:])
