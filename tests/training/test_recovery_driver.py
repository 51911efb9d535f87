"""The driver on scripted gangs: what it remembers, what it forgives, and where it gives up."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import StorageFull, TrainingFailed
from paceline.schemas import RankEvent, TrainJob, TrainResult
from paceline.storage import DiskStore
from paceline.training import config_digest
from paceline.training.checkpoint import Commit, Generation, Generations, Index
from paceline.training.launcher import (
    GangResult,
    driver,
    read_history,
    require_checkpoint,
    run_on_nodes,
    stored_result,
)

NODES = ("a", "b")
DIGEST = "0" * 64
STEPPED = RankEvent(event="step", rank=0, attempt=1, step=3, data={"step_seconds": 0.1})


class Script:
    """Ends each attempt as told, saying what it was told to say."""

    def __init__(self, *attempts: tuple[GangResult, list[RankEvent]]) -> None:
        self.attempts = list(attempts)
        self.numbers: list[int] = []
        self.workers: list[list[str]] = []
        self.jobs: list[TrainJob] = []
        self.spares: dict[str, str] = {}
        self.asked_for_spares = 0
        self.returns = True

    def run_gang(self, members, text, attempt, on_event, *, served):
        assert not served
        self.numbers.append(attempt)
        self.workers.append([each.worker_id for each in members])
        self.jobs.append(TrainJob.model_validate_json(text))
        outcome, events = self.attempts.pop(0)
        for event in events:
            on_event(event.model_copy(update={"attempt": attempt}).model_dump())
        return outcome

    def start_spare(self, name, worker_id, env, text):
        self.asked_for_spares += 1

    def restart_node(self, worker_id):
        return self.returns

    def request_stop(self, why):
        pass


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver.time, "sleep", lambda _: None)


def job_in(root: Path, ranks: int = 2, **guard: Any) -> TrainJob:
    return TrainJob.model_validate(
        {
            "job_id": "job-1",
            "run_id": "run-20260101-000000-abcdef",
            "state_dir": str(root),
            "model_id": "m",
            "version": "v1",
            "manifest_digest": DIGEST,
            "snapshot_url": DiskStore.url_of(root / "data"),
            "snapshot_digest": DIGEST,
            "purpose": "tests",
            "checkpoint_url": DiskStore.url_of(root / "checkpoints"),
            "settings": {"ranks": ranks, "guard": guard},
        }
    )


def failed(worker: str = "b", rank: int = 1, code: int | None = -9, **more: Any) -> GangResult:
    return GangResult(
        **{
            "ok": False,
            "exit_codes": {rank: code},
            "failed_rank": rank,
            "failed_worker": worker,
            "reason": f"rank {rank} on {worker} failed",
            **more,
        }
    )


def finished(job: TrainJob) -> tuple[GangResult, list[RankEvent]]:
    data: dict[str, Any] = {
        "steps": 3,
        "first_loss": 2.0,
        "final_loss": 1.0,
        "tokens_per_second": 1.0,
        "data_wait_share": 0.0,
        "checkpoint_stall_share": 0.0,
        "export_url": f"{job.checkpoint_url}/{job.job_id}/export",
        "weights_digest": DIGEST,
        "checkpoints": [],
        "config_digest": config_digest(job),
    }
    DiskStore().put_bytes(f"{data['export_url']}/config.json", b"{}")
    result = RankEvent(event="result", rank=0, attempt=1, step=3, data=data)
    return GangResult(ok=True, exit_codes={0: 0, 1: 0}), [STEPPED, result]


def bad_step(batch: int) -> tuple[GangResult, list[RankEvent]]:
    data = {"code": "BadStep", "message": "nan", "bad_step": 2, "bad_batch": batch}
    said = RankEvent(event="failed", rank=0, attempt=1, step=2, data=data)
    return failed("a", 0, 1), [STEPPED, said]


def test_each_early_end_is_an_event_that_names_the_node(tmp_path: Path) -> None:
    job, seen = job_in(tmp_path), list[RankEvent]()
    script = Script((failed(), [STEPPED]), bad_step(7), finished(job))
    run_on_nodes(job, NODES, script, DiskStore(), on_event=seen.append)
    lost = [
        (e.attempt, e.rank, e.data["kind"], e.data["worker_id"]) for e in seen if e.event == "lost"
    ]
    assert lost == [(1, 1, "failed", "b"), (2, 0, "bad-step", "a")]


def test_a_driver_that_is_run_again_keeps_its_earlier_failures(tmp_path: Path) -> None:
    job = job_in(tmp_path, max_restarts=1)
    first = Script(bad_step(7), (failed(), [STEPPED]), (failed(), [STEPPED]))
    with pytest.raises(TrainingFailed, match="used up its restarts"):
        run_on_nodes(job, NODES, first, DiskStore())
    again = Script((failed(), [STEPPED]), finished(job))
    result = run_on_nodes(job, NODES, again, DiskStore(), accelerators={"H100": 2})
    assert result.accelerators == {"H100": 2}
    assert stored_result(job, DiskStore()) == result
    assert again.numbers == [4, 5], "no attempt's number, and so nothing kept of it, is used twice"
    assert again.jobs[0].skip_batches == (7,)
    assert again.jobs[0].failures == 2
    assert again.jobs[0].running_s > 0
    assert result.skipped_batches == (7,), "listed, though another driver passed it over"
    assert result.failures.job == 3
    assert result.failures.hosts == {"b": 3}


def test_restarts_are_bounded_and_a_bad_node_is_left_out(tmp_path: Path) -> None:
    script = Script((failed("b", 1, None), []), (failed("a", 0), []), (failed("a", 1), []))
    with pytest.raises(TrainingFailed, match="used up its restarts"):
        run_on_nodes(job_in(tmp_path, max_restarts=2), NODES, script, DiskStore())
    assert script.workers == [["a", "b"], ["a", "a"], ["a", "a"]]
    many = Script(*[(failed(), [STEPPED])] * 51)
    with pytest.raises(TrainingFailed, match="used up its restarts") as caught:
        run_on_nodes(job_in(tmp_path / "many", max_restarts=50), NODES, many, DiskStore())
    assert "(46 before)" in caught.value.one_line()
    assert len(caught.value.one_line()) < 1000


@pytest.mark.parametrize(
    ("code", "attempts", "why"),
    [("InvalidInput", 1, "InvalidInput it is"), ("TrainingFailed", 2, "cannot succeed")],
)
def test_a_permanent_error_is_not_tried_again_and_divergence_once(
    tmp_path: Path, code: str, attempts: int, why: str
) -> None:
    data = {"code": code, "message": f"{code} it is"}
    said = RankEvent(event="failed", rank=0, attempt=1, data=data)
    script = Script(*[(failed("a", 0, 1), [said])] * 3)
    with pytest.raises(TrainingFailed, match=why):
        run_on_nodes(job_in(tmp_path), NODES, script, DiskStore())
    assert len(script.numbers) == attempts


def unsaved(**told: Any) -> tuple[GangResult, list[RankEvent]]:
    data = {"code": "NotSaved", "message": "checkpoint was not saved: disk is full", **told}
    said = RankEvent(event="failed", rank=1, attempt=1, step=9, data=data)
    return failed(code=1), [STEPPED, said]


def test_unwritable_checkpoints_end_a_job_unless_it_was_preempted(
    tmp_path: Path,
) -> None:
    job = job_in(tmp_path, max_restarts=0)
    script = Script(unsaved(stopped=True), finished(job))
    result = run_on_nodes(job, NODES, script, DiskStore())
    assert [each.kind for each in result.restarts] == ["preempted"]
    assert result.failures.job == 0, "it was asked for"
    other = job_in(tmp_path / "other", max_restarts=3)
    alone = Script(unsaved())
    with pytest.raises(TrainingFailed, match="disk is full"):
        run_on_nodes(other, NODES, alone, DiskStore())
    assert len(alone.numbers) == 1, "another attempt would lose as many steps again"


def test_a_history_that_cannot_be_read_or_kept_costs_only_the_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, store = job_in(tmp_path), DiskStore()
    store.put_bytes(f"{job.checkpoint_url}/{job.job_id}/history.json", b"{ torn")
    kept = DiskStore.put_bytes

    def full(self: DiskStore, url: str, data: bytes) -> Any:
        if "/stacks/" in url or url.endswith("history.json"):
            raise StorageFull("no room", where=url)
        return kept(self, url, data)

    monkeypatch.setattr(DiskStore, "put_bytes", full)
    hung = failed(hung=True, stderr={0: "Thread 0x1"})
    result = run_on_nodes(job, NODES, Script((hung, [STEPPED]), finished(job)), store)
    assert [each.kind for each in result.restarts] == ["hung"]


def test_failures_of_more_than_a_day_ago_count_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr(driver.time, "monotonic", lambda: now[0])
    job = job_in(tmp_path, max_restarts=1, failures_per_host=2)
    attempts = [(failed(), [STEPPED]) for _ in range(5)]
    script = Script(*attempts, finished(job))
    run_gang = script.run_gang

    def a_day_each(*given: Any, **more: Any) -> Any:
        now[0] += 86_401.0
        return run_gang(*given, **more)

    script.run_gang = a_day_each  # type: ignore[method-assign]
    result = run_on_nodes(job, NODES, script, DiskStore())
    assert result.failures.job == 5
    assert script.workers == [["a", "b"]] * 6, "a month has more failures than one, on any machine"


def test_too_few_ranks_wait_for_nodes_that_are_away_for_a_moment(tmp_path: Path) -> None:
    job = job_in(tmp_path, min_ranks=2)
    gone = failed("b", 1, None, lost=frozenset({"b"}))
    script = Script((gone, [STEPPED]), finished(job))
    assert run_on_nodes(job, NODES, script, DiskStore()).ranks == 2
    assert script.workers == [["a", "b"]] * 2


def test_a_node_that_was_announced_to_go_has_not_failed(tmp_path: Path) -> None:
    job = job_in(tmp_path, failures_per_host=1, max_restarts=0)
    gone = failed("b", 1, None, lost=frozenset({"b"}), preempted=frozenset({"b"}))
    result = run_on_nodes(job, NODES, Script((gone, [STEPPED]), finished(job)), DiskStore())
    assert [each.kind for each in result.restarts] == ["preempted"]
    assert result.failures.hosts == {}


def test_notices_without_end_are_not_obeyed_for_ever(tmp_path: Path) -> None:
    told = failed(code=143, preempted=frozenset({"b"}))
    script = Script(*[(told, []) for _ in range(driver.MAX_IDLE_ATTEMPTS + 1)])
    with pytest.raises(TrainingFailed, match="ended before its first step"):
        run_on_nodes(job_in(tmp_path), NODES, script, DiskStore())


def test_too_slow_to_save_for_returned_nodes_is_nobodys_failure(tmp_path: Path) -> None:
    job = job_in(tmp_path, max_restarts=1, min_ranks=1, failures_per_host=5)
    saved = RankEvent(event="checkpoint", rank=0, attempt=1, step=3)
    gone = failed("b", 1, None, lost=frozenset({"b"}))
    slow = failed("a", 0, -9, overdue=True)
    script = Script((gone, [STEPPED]), (slow, [STEPPED, saved]), finished(job))
    result = run_on_nodes(job, NODES, script, DiskStore())
    assert [each.kind for each in result.restarts] == ["lost", "returned"]
    assert result.restarts[1].reason == "b returned"
    assert result.failures.hosts == {"b": 1}


def test_lost_steps_are_counted_once(tmp_path: Path) -> None:
    def at(step: int, event: str = "step") -> RankEvent:
        return RankEvent(event=event, rank=0, attempt=1, step=step)  # type: ignore[arg-type]

    job = job_in(tmp_path)
    attempts = [(failed(), [at(100)]), (failed(), [at(90, "resumed"), at(92)])]
    result, events = finished(job)
    last = (result, [at(90, "resumed"), *events])
    found = run_on_nodes(job, NODES, Script(*attempts, last), DiskStore())
    assert [each.lost_steps for each in found.restarts] == [10, 2]


def test_an_attempt_that_ends_before_it_resumes_changes_no_lost_steps(
    tmp_path: Path,
) -> None:
    def at(step: int, event: str = "step") -> RankEvent:
        return RankEvent(event=event, rank=0, attempt=1, step=step)  # type: ignore[arg-type]

    job = job_in(tmp_path)
    first, second = [at(40)], [at(40, "resumed"), at(133)]
    result, events = finished(job)
    last = (result, [at(120, "resumed"), *events])
    script = Script((failed(), first), (failed(), second), (failed(), []), last)
    found = run_on_nodes(job, NODES, script, DiskStore())
    assert [each.lost_steps for each in found.restarts] == [0, 0, 13]
    assert [each.resumed_step for each in found.restarts] == [40, 133, 120]


def test_spares_that_die_are_not_made_again_at_every_step(tmp_path: Path) -> None:
    job = job_in(tmp_path, spares=1)
    result, events = finished(job)
    script = Script((result, [STEPPED] * 500 + events))
    run_on_nodes(job, NODES, script, DiskStore())
    assert script.asked_for_spares == 1
    away = Script((result, [STEPPED] * 500 + events))
    away.returns = False
    run_on_nodes(job, NODES, away, DiskStore())
    assert away.asked_for_spares == 0


def test_a_result_whose_model_is_gone_is_made_again(tmp_path: Path) -> None:
    job = job_in(tmp_path)
    result = run_on_nodes(job, NODES, Script(finished(job)), DiskStore())
    assert stored_result(job, DiskStore()) == result
    (DiskStore.path_of(result.export_url) / "config.json").unlink()
    assert stored_result(job, DiskStore()) is None


def test_who_waited_for_another_drivers_nodes_takes_its_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = job_in(tmp_path)
    monkeypatch.setattr(driver, "admit", lambda *_: None)

    class Busy:
        """Nodes that become free once the other driver has finished the same job."""

        @contextlib.contextmanager
        def open_nodes(self, workers, argv, **_):
            self.other: TrainResult = run_on_nodes(job, NODES, Script(finished(job)), DiskStore())
            yield None  # and nobody says a word to them

    busy = Busy()
    assert driver.run_job(job, NODES, busy, store=DiskStore()) == busy.other


def test_checkpoints_of_another_configuration_are_refused_before_any_rank(tmp_path: Path) -> None:
    job, store = job_in(tmp_path), DiskStore()
    require_checkpoint(job, store)
    generations = Generations(store, f"{job.checkpoint_url}/{job.job_id}")
    commit = Commit(
        job_id=job.job_id,
        step=4,
        position={},
        config_digest="1" * 64,
        code_version="",
        world_size=1,
        layout={},
        metrics={},
        environment={},
        extra={},
        files={},
    )
    generation = Generation(4, 1)
    generations.commit(generation, commit, Index(tensors={}))
    with pytest.raises(TrainingFailed, match="another configuration: got configuration 1111"):
        require_checkpoint(job, store)
    store.put_bytes(f"{generations.url_of(generation)}/commit.json", b"{ rotten")
    require_checkpoint(job, store)  # the ranks set it aside, with every byte looked at


def test_a_store_that_hangs_keeps_no_driver_from_its_gang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes = threading.Event()
    kept = DiskStore.put_bytes

    def slow(self: DiskStore, url: str, data: bytes) -> Any:
        if url.endswith("history.json"):
            assert goes.wait(20)
        return kept(self, url, data)

    job = job_in(tmp_path)
    script = Script((failed(), [STEPPED]), finished(job))
    run_gang = script.run_gang

    def again(*given: Any, **more: Any) -> Any:
        if script.numbers:
            goes.set()  # the second attempt starts while the note of the first still waits
        return run_gang(*given, **more)

    script.run_gang = again  # type: ignore[method-assign]
    monkeypatch.setattr(DiskStore, "put_bytes", slow)
    assert run_on_nodes(job, NODES, script, DiskStore()).failures.job == 1
    assert read_history(job, DiskStore()).failures == 1
