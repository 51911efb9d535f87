"""A sweep finds the best settings with the queue's jobs, and none is submitted twice."""

from __future__ import annotations

import math
import re
import shlex
import shutil
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest
from pydantic import ValidationError

from paceline.cli import cli
from paceline.config import PriceSettings, Profile, load_profile, save_runtime
from paceline.errors import AccessDenied, Conflict, InvalidInput, NotFound, RunElsewhere
from paceline.jobs import (
    Sweep,
    page_of,
    read_space,
    report_sweep,
    run_sweep,
    stored_run_id,
    studies_of,
)
from paceline.jobs.sweeps import HELD_S, held, opened
from paceline.schemas import JobState, Resources, SweepShown, TrainingJob, new_run_id
from tests.api.conftest import make_runtime
from tests.support.command import paceline
from tests.support.job_queue import SPACE, STEPS, Queue, final_loss
from tests.support.postgres import PostgresServer

PAGE = Path(__file__).parents[2] / "docs/how-to/sweep-hyper-parameters.md"
STORAGE = "studies.sqlite"
TRIALS = 5


@pytest.fixture
def sweep(tmp_path: Path) -> Sweep:
    (tmp_path / "space.toml").write_text(SPACE)
    return Sweep(
        name="lr", model_id="org/m", version="1", snapshot_url="s3://b/d", seed=7, parallel=4,
        trials=TRIALS, space=read_space(tmp_path / "space.toml"),
        settings={"training.steps": STEPS},
    )  # fmt: skip


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Optuna's tables: making them costs as much as three trials."""
    from optuna.storages import RDBStorage

    path = tmp_path_factory.mktemp("studies") / STORAGE
    RDBStorage(f"sqlite:///{path}").engine.dispose()
    return path


@pytest.fixture(autouse=True)
def storage(tables: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file of the study, in the working directory of the test."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(tables, STORAGE)


def replace(sweep: Sweep, **changes: Any) -> Sweep:
    return sweep.model_copy(update=changes)


def run(sweep: Sweep, queue: Queue, storage: str = STORAGE, **more: Any) -> SweepShown:
    more = {"sleep": lambda _: None, **more}
    return run_sweep(sweep, queue, storage, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("sampler", ["tpe", pytest.param("cmaes", marks=pytest.mark.nightly)])
def test_a_sweep_finds_the_best_settings(sweep: Sweep, sampler: Any) -> None:
    queue = Queue()
    found = run(replace(sweep, sampler=sampler, trials=14), queue)
    assert len(found.trials) == len(queue.jobs) == 14
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
    alone, queue = replace(sweep, parallel=1, trials=12), Queue()  # ten before the sampler learns
    queue.a_look = STEPS
    first, second = (run(replace(alone, name=name), queue) for name in "ab")
    assert [each.parameters for each in first.trials] == [e.parameters for e in second.trials]


@pytest.mark.parametrize(
    "pruner",
    ["asha", *(pytest.param(x, marks=pytest.mark.nightly) for x in ("hyperband", "median"))],
)
def test_pruning_cancels_jobs_and_keeps_the_winner(sweep: Sweep, pruner: Any) -> None:
    trials = 9 if pruner == "asha" else 16
    sweep = replace(sweep, sampler="random", trials=trials)
    whole, pruned = Queue(), Queue()
    whole.a_look, pruned.a_look = STEPS, 40 if pruner == "asha" else 20
    best = run(replace(sweep, name="whole"), whole).best
    found = run(replace(sweep, pruner=pruner), pruned)
    assert best is not None and found.best is not None
    assert found.best.parameters == best.parameters
    stopped = [each for each in found.trials if each.state == "pruned"]
    assert {pruned.jobs[each.job_id].state for each in stopped} == {JobState.CANCELLED}
    share = pruned.steps_made / whole.steps_made
    assert whole.steps_made == trials * STEPS
    assert share <= (0.5 if pruner == "asha" else 0.8), share


@pytest.mark.parametrize("looks", [0, 3, 7])
def test_an_interrupted_sweep_goes_on_with_the_same_jobs(sweep: Sweep, looks: int) -> None:
    queue = Queue()
    queue.looks_left = looks
    with pytest.raises(KeyboardInterrupt):
        run(sweep, queue)
    before = report_sweep("lr", STORAGE)
    queue.looks_left = math.inf
    found = run(sweep, queue)
    assert len(queue.jobs) == len(found.trials) == TRIALS
    assert len(queue.keys) == len(set(queue.keys)), "no job is submitted twice"
    assert {each.state for each in found.trials} == {"complete"}
    assert [e.parameters for e in before.trials] == [
        e.parameters for e in found.trials[: len(before.trials)]
    ]
    different = {tuple(each.parameters.values()) for each in found.trials}
    assert len(different) == TRIALS, "the seed does not draw the first trials again"
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
    assert len(queue.jobs) == len(found.trials) == TRIALS


def test_a_pruned_job_is_pruned_where_the_sweep_died_right_after(sweep: Sweep) -> None:
    class Dying(Queue):
        def change_job(self, job_id: str, what: str) -> None:
            super().change_job(job_id, what)
            self.change_job = super().change_job  # type: ignore[method-assign]
            raise KeyboardInterrupt

    queue = Dying()
    sweep = replace(sweep, pruner="asha", trials=9)
    with pytest.raises(KeyboardInterrupt):
        run(sweep, queue)
    found = run(sweep, queue)
    assert not [each for each in found.trials if each.state == "fail"]


def test_jobs_that_are_cancelled_with_the_sweep_are_replaced(sweep: Sweep) -> None:
    queue = Queue()
    queue.looks_left = 3
    with pytest.raises(KeyboardInterrupt):
        run(sweep, queue, cancels=lambda: True)
    assert {each.state for each in queue.jobs.values()} == {JobState.CANCELLED}
    queue.looks_left = math.inf
    found = run(sweep, queue)
    assert sum(each.state == "complete" for each in found.trials) == TRIALS
    assert len(found.trials) == TRIALS + 4


def test_a_failed_or_refused_job_fails_its_trial_only(sweep: Sweep) -> None:
    queue = Queue()
    queue.failing, queue.refused = {"lr trial 2"}, {"sweep:lr:trial-5"}
    found = run(replace(sweep, trials=6), queue)
    failed = {each.number: each.reason for each in found.trials if each.state == "fail"}
    assert set(failed) == {2, 5}
    assert "a rank was killed" in failed[2] and "do not go together" in failed[5]
    assert sum(each.state == "complete" for each in found.trials) == 4


def test_a_metric_that_no_report_has_fails_the_trials(sweep: Sweep) -> None:
    found = run(replace(sweep, metric="nothing", trials=2), Queue())
    assert found.best is None
    assert all("no finite nothing" in each.reason for each in found.trials)


@pytest.fixture
def priced() -> Queue:
    """Jobs of 10 EUR each."""
    queue = Queue()
    queue.prices, queue.trial_price = PriceSettings(per_hour={"h100": 2.5}), 10.0
    return queue


def test_no_trial_starts_once_the_budget_is_spent(sweep: Sweep, priced: Queue) -> None:
    sweep = replace(sweep, trials=8, parallel=2, budget=35)
    lines: list[str] = []
    found = run(sweep, priced, on_line=lines.append)
    assert [each.state for each in found.trials] == ["complete"] * 4
    assert found.stopped == "the budget is spent: 40.00 of 35.00 EUR"
    assert found.stopped in page_of(found) and found.stopped in lines[-1]
    assert report_sweep("lr", STORAGE).stopped == found.stopped
    assert run(sweep, priced) == found, "what earlier runs spent counts"
    whole = run(replace(sweep, budget=100), priced)
    assert (len(whole.trials), whole.stopped) == (8, "")
    free = run(replace(sweep, trials=9, budget=0), priced)
    assert (len(free.trials), free.stopped) == (9, "")


def test_a_pruned_trial_counts_with_what_it_cost(sweep: Sweep, priced: Queue) -> None:
    priced.a_look = 40
    found = run(
        replace(sweep, sampler="random", pruner="asha", trials=16, parallel=1, budget=40), priced
    )
    assert {"pruned"} < {each.state for each in found.trials}
    assert 4 < len(found.trials) < 16
    assert 40 <= 10 * priced.steps_made / STEPS < 50


def test_a_cost_without_a_price_starts_no_other_trial(sweep: Sweep, priced: Queue) -> None:
    priced.trial_price = None
    found = run(replace(sweep, parallel=2, budget=35), priced)
    assert len(found.trials) == 2
    assert "cannot be counted: no price in [prices] per_hour for h100" in found.stopped


@pytest.mark.parametrize("accepted", [True, False])
def test_a_spent_budget_ends_no_trial_that_has_a_job(
    sweep: Sweep, priced: Queue, monkeypatch: pytest.MonkeyPatch, accepted: bool
) -> None:
    """The sweep died as it submitted its second job, which was not noted."""
    sweep, submit = replace(sweep, parallel=1), priced.submit

    def dies(*words: Any, **more: Any) -> TrainingJob:
        if len(priced.jobs) == 1:
            if accepted:
                submit(*words, **more)
            raise KeyboardInterrupt
        return submit(*words, **more)

    monkeypatch.setattr(priced, "submit", dies)
    with pytest.raises(KeyboardInterrupt):
        run(replace(sweep, budget=1000), priced)
    monkeypatch.setattr(priced, "submit", submit)
    names = ("training_costs", "change_job")
    priced.coordinator = SimpleNamespace(  # type: ignore[assignment]
        jobs=lambda **_: SimpleNamespace(jobs=list(priced.jobs.values())),
        **{name: getattr(priced, name) for name in names},
    )
    found = run(replace(sweep, budget=5), priced)
    assert [each.state for each in found.trials] == ["complete", "complete" if accepted else "fail"]
    assert found.stopped.startswith("the budget is spent")


def test_a_budget_without_prices_is_refused_before_any_job(sweep: Sweep) -> None:
    queue = Queue()
    with pytest.raises(InvalidInput, match="a budget needs prices"):
        run(replace(sweep, budget=35), queue)
    assert not queue.jobs


def test_each_trial_has_the_sweeps_own_code(sweep: Sweep) -> None:
    queue, code = Queue(), "git+https://host/r.git@" + "a" * 40 + "#task:make"
    found = run(replace(sweep, code_ref=code, trials=2), queue)
    assert [each.spec.code_ref for each in queue.jobs.values()] == [code] * 2
    typed = parsed(shlex.split(found.reproduce)[1:]).params
    assert typed["code_ref"] == code
    with pytest.raises(Conflict, match="another sweep's: got code_ref None"):
        run(sweep, queue)


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


def test_a_sweep_that_was_refused_does_not_keep_its_name(
    sweep: Sweep, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Queue, "submit", refused_purpose)
        with pytest.raises(AccessDenied):
            run(replace(sweep, purpose="speach"), Queue(), run_id=new_run_id())
    sweep, queue = replace(sweep, purpose="speech", trials=2), Queue()
    assert stored_run_id(STORAGE, "lr", sweep.identity) == "", "a run of its own"
    run(sweep, queue)
    assert len(queue.jobs) == 2


def test_a_sweep_of_the_release_before_goes_on(sweep: Sweep) -> None:
    queue = Queue()
    run(replace(sweep, trials=2, resources=Resources(ranks=2)), queue)
    kept = {
        "model_id": "org/m", "version": "1", "snapshot": "s3://b/d", "metric": "loss",
        "maximize": False, "resources": {"ranks": 2}, "settings": {"training.steps": STEPS},
        "team": "", "priority": 0, "space": {k: v.model_dump() for k, v in sweep.space.items()},
    }  # fmt: skip
    with opened(STORAGE, "lr", None) as study:
        study.set_user_attr("sweep", kept)
    assert "--snapshot s3://b/d" in report_sweep("lr", STORAGE).reproduce
    with pytest.raises(Conflict, match=r"another sweep's.*version 2"):
        run(replace(sweep, version="2", resources=Resources(ranks=2)), queue)
    found = run(replace(sweep, trials=4, resources=Resources(ranks=2)), queue)
    assert len(found.trials) == len(queue.jobs) == 4


def refused_purpose(*_: Any, **__: Any) -> None:
    raise AccessDenied("the table of purposes does not allow this use of the data")


def test_a_name_is_one_sweeps(sweep: Sweep) -> None:
    run(replace(sweep, trials=1), Queue())
    with pytest.raises(Conflict, match=r"another sweep's.*version 2"):
        run(replace(sweep, version="2"), Queue())
    with pytest.raises(Conflict, match=r"got purpose speech, wanted purpose None"):
        run(replace(sweep, purpose="speech"), Queue())
    run(replace(sweep, name="for-speech", purpose="speech", trials=1), Queue())
    with pytest.raises(Conflict, match=r"got purpose None, wanted purpose speech"):
        run(replace(sweep, name="for-speech"), Queue())
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
    monkeypatch.setattr("paceline.jobs.sweeps.sweep.LOOK_S", 0)
    gang = ["--ranks", "2", "--memory", "80GB", "--capacity", "spot", "--within", "rack"]
    gang += ["--label", "pool=a", "--label", "rack=r1"]
    words = ["sweep", "lr", "org/m", "1", "--snapshot", "s3://b/d", "--space",
             str(tmp_path / "space.toml"), "--trials", "6", *gang, "--steps", str(STEPS),
             "--storage", STORAGE, "--seed", "1", "--project", "study",
             "--purpose", "speech"]  # fmt: skip
    queue.looks_left = 5
    stopped = paceline(*words)
    assert stopped.returncode == 130
    assert "its jobs go on" in stopped.stderr and "Go on with: paceline sweep lr" in stopped.stderr
    queue.looks_left = math.inf
    done = paceline(*words)
    assert done.returncode == 0, done.stderr
    assert all(each in done.stdout for each in queue.jobs)
    (line,) = re.findall(r"^reproduce: paceline (.*)$", done.stdout, re.MULTILINE)
    typed = parsed(shlex.split(line)).params
    asked = {"ranks": 2, "memory_bytes": 80 * 10**9, "capacity": "spot", "within": "rack",
             "node_labels": {"pool": "a", "rack": "r1"}}  # fmt: skip
    asked |= {"purpose": "speech", "project": "study"}
    assert asked.items() <= typed.items()
    (spec, *_) = [each.spec for each in queue.jobs.values()]
    assert (spec.purpose, spec.project) == (asked.pop("purpose"), asked.pop("project"))
    assert spec.resources == Resources.model_validate(asked)
    best = report_sweep("lr", STORAGE).best
    assert best is not None
    given = tomllib.loads("\n".join(typed["overrides"]).replace("training.", ""))
    assert given["learning_rate"] == best.parameters["training.learning_rate"]
    page = tmp_path / "lr.html"
    shown = paceline("sweep", "report", "lr", "--storage", STORAGE, "--html", page, "--json")
    assert SweepShown.model_validate_json(shown.stdout).best == best
    assert page.read_text().startswith("<!DOCTYPE html>")


def test_one_process_runs_a_sweep(sweep: Sweep) -> None:
    with opened(STORAGE, "lr", sweep.identity) as mine, opened(STORAGE, "lr", None) as other:
        with held(mine, sleep=lambda _: None) as renew:
            renew()
            with (
                pytest.raises(RunElsewhere, match="another process runs this sweep"),
                held(other, sleep=lambda _: renew()),
            ):
                raise AssertionError
            waited = []
            with held(other, sleep=waited.append):  # the holder changed nothing for so long
                assert sum(waited) >= HELD_S
                with pytest.raises(RunElsewhere, match="another process"):
                    renew()
        with held(mine, sleep=lambda _: pytest.fail("nobody holds it")):
            pass


def test_trials_of_a_sweep_carry_the_run_that_it_began_with(sweep: Sweep) -> None:
    first, queue, changes = new_run_id(), Queue(), list[SweepShown]()
    assert stored_run_id(STORAGE, "lr", sweep.identity) == ""
    run(replace(sweep, trials=2), queue, run_id=first, on_change=changes.append)
    assert {each.state for each in changes[-1].trials} == {"complete"}
    found = run(replace(sweep, trials=4), queue, run_id="run-20261120-153600-9f3a1c")
    assert found.run_id == stored_run_id(STORAGE, "lr", sweep.identity) == first
    assert [each.spec.sweep for each in queue.jobs.values()] == [first] * 4


def test_a_study_in_postgresql_goes_on_from_another_host(
    sweep: Sweep, postgres: PostgresServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = postgres.url(postgres.schema())
    profile = Profile.model_validate({"sweeps": {"storage": url}})
    monkeypatch.setenv("PACELINE_SWEEPS_PASSWORD", postgres.password)
    hosts = [
        studies_of(make_runtime(tmp_path / name).model_copy(update={"profile": profile}))
        for name in ("one", "other")
    ]
    queue = Queue()
    queue.looks_left = 6
    with pytest.raises(KeyboardInterrupt):
        run(replace(sweep, trials=4), queue, hosts[0])
    queue.looks_left = math.inf
    found = run(replace(sweep, trials=4), queue, hosts[1])
    assert [each.state for each in found.trials] == ["complete"] * 4
    assert len(queue.keys) == 4
    monkeypatch.setenv("PACELINE_SWEEPS_PASSWORD", "another one")
    with pytest.raises(InvalidInput, match="cannot be stored") as refused:
        report_sweep(
            "lr", studies_of(make_runtime(tmp_path).model_copy(update={"profile": profile}))
        )
    assert "another one" not in refused.value.one_line()


@pytest.mark.parametrize(
    "storage", ["postgresql://ann:secret@host/db", "mysql://host/db", "studies.sqlite"]
)
def test_a_profile_names_postgresql_without_a_password(storage: str) -> None:
    with pytest.raises(ValidationError, match="storage"):
        Profile.model_validate({"sweeps": {"storage": storage}})


def test_the_study_of_an_installation_is_in_its_state_directory(
    sweep: Sweep, tmp_path: Path
) -> None:
    runtime = make_runtime(tmp_path / "state")
    runtime.state_dir.mkdir()
    save_runtime(runtime)
    missing = paceline("sweep", "report", "lr", "--state", runtime.state_dir)
    assert missing.returncode == 1 and "no such sweep" in missing.stderr
    assert not (runtime.state_dir / "studies.sqlite").exists()
    run(replace(sweep, trials=1), Queue(), studies_of(runtime))
    assert (runtime.state_dir / "studies.sqlite").stat().st_mode & 0o077 == 0
    shown = paceline("sweep", "report", "lr", "--state", runtime.state_dir)
    assert "reproduce: paceline jobs submit" in shown.stdout


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
    blocks = re.findall(
        r"^```(\w+)(?: \w+)?\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL
    )
    space, profile = (text for kind, text in blocks if kind == "toml")
    assert Profile.model_validate(tomllib.loads(profile)).sweeps.storage
    (tmp_path / "docs.toml").write_text(space)
    replace(sweep, space=read_space(tmp_path / "docs.toml")).check(load_profile("embedded"))
    lines = [line for kind, text in blocks if kind == "sh" for line in text.splitlines()]
    assert len(lines) == 3
    for line in lines:
        parsed(shlex.split(line)[1:])
