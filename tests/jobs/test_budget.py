"""What jobs hold is counted per attempt, survives a failover, and ends at the job's budget."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.config import PriceSettings, Profile, load_profile
from paceline.jobs import cost_of, recorded, used
from paceline.schemas import (
    KEPT_USAGES,
    JobCheckpoint,
    JobState,
    JobUsage,
    SubmitJob,
    TrainingUsage,
)
from tests.jobs.test_cost import result
from tests.jobs.test_scheduler import SNAPSHOT, Queue, worker

S = JobState
PRICES = {"prices.per_hour": "{cpu = 3600}"}  # 1 EUR a second


def priced(**more: str) -> Profile:
    return load_profile("ci", PRICES | more)


@pytest.fixture
def queue() -> Queue:
    return Queue(*(worker(f"node-{each}") for each in range(4)), profile=priced())


def cost(queue: Queue, job_id: str) -> float:
    _, _, found = used(queue.job(job_id), queue.profile.prices, queue.now)
    assert found is not None
    return found


def run(queue: Queue, job_id: str, for_s: int, **more: Any) -> None:
    """The job's flow reports for so many seconds."""
    for second in range(for_s):
        queue.report(job_id, step=second + 1, steps=10**6, **more)
        queue.run_once()


def test_a_budget_warns_once_and_then_pauses_the_job(queue: Queue) -> None:
    job_id = queue.start(2, budget=100)
    run(queue, job_id, 39)
    assert not queue.job(job_id).budget_warned
    run(queue, job_id, 5)
    job = queue.job(job_id)
    assert job.reason == "80% of the budget is spent: 80.00 of 100.00 EUR"
    warnings = [each for each in queue.store.events if "budget" in str(each["reason"])]
    assert [each["state"] for each in warnings] == [S.RUNNING], "one event"
    assert sum("80%" in each.reason for each in job.history) == 1
    run(queue, job_id, 7)
    job = queue.job(job_id)
    assert (job.state, job.wanted) == (S.PAUSING, "pause")
    assert "the budget is spent: 100.00 of 100.00 EUR" in job.reason
    queue.ends(job_id, "CANCELLED")
    queue.run_once()
    job = queue.job(job_id)
    assert job.state is S.PAUSED
    assert "100.00 of 100.00 EUR" in job.reason
    queue.run_once(50)
    assert cost(queue, job_id) == pytest.approx(2 * (job.updated_at - job.usage[0].since))


def test_a_budget_counts_egress_and_storage() -> None:
    more = {"prices.per_gb_egress": "0.5", "prices.per_gb_month": "2629.8"}  # 1 EUR in 1000 s
    queue = Queue(worker("node-0"), profile=priced(**more))
    job_id = queue.start(1, budget=200)
    saved = JobCheckpoint(step=4, object_ref="s3://b/c", created_at=1.0, bytes=10**9)
    run(queue, job_id, 100, read_bytes=120 * 10**9, checkpoints=(saved,))
    assert queue.state(job_id) is S.RUNNING
    assert cost(queue, job_id) == pytest.approx(100 + 60 + 0.1)
    run(queue, job_id, 45, read_bytes=120 * 10**9, checkpoints=(saved,))
    assert queue.state(job_id) is S.PAUSING
    queue.ends(job_id, "CANCELLED")
    queue.run_once(100)
    assert cost(queue, job_id) == pytest.approx(200, abs=10), "no more while it is paused"


def test_checkpoints_are_paid_for_over_all_attempts(queue: Queue) -> None:
    saved = JobCheckpoint(step=4, object_ref="s3://b/c", created_at=1.0, bytes=10**9)
    job_id = queue.start(1)
    run(queue, job_id, 99, checkpoints=(saved,))
    queue.ends(job_id, "CRASHED")
    queue.run_once()
    run(queue, job_id, 100, checkpoints=(saved,))
    prices = queue.profile.prices.model_copy(update={"per_gb_month": 2_629_800.0})
    rows = [cost_of(each, prices) for each in recorded(queue.table.jobs(), [], queue.now)]
    assert [each.storage for each in rows] == [pytest.approx(200), None]


def test_a_new_leader_counts_the_same_seconds(queue: Queue) -> None:
    job_id = queue.start(2, budget=1000)
    run(queue, job_id, 100)
    before = cost(queue, job_id)
    queue.lead()
    assert cost(queue, job_id) == before == pytest.approx(200)
    run(queue, job_id, 399)
    assert queue.state(job_id) is S.RUNNING
    run(queue, job_id, 2)
    assert queue.state(job_id) is S.PAUSING


def test_a_job_over_its_budget_is_not_admitted_again(queue: Queue) -> None:
    job_id = queue.start(4, budget=90)
    run(queue, job_id, 20)
    high = queue.start(4, priority=50)
    assert queue.state(job_id) is S.PAUSING
    queue.run_once(10)  # its ranks take long to save
    queue.ends(job_id, "CANCELLED")
    queue.run_once()
    assert [each.state for each in queue.job(job_id).history[-2:]] == [S.PREEMPTED, S.PAUSED]
    assert "of 90.00 EUR" in queue.job(job_id).reason
    assert queue.state(high) is S.STARTING


def test_a_budget_that_cannot_be_counted_is_noted_and_stops_nothing() -> None:
    queue = Queue(worker("a-0", 8), profile=priced())
    job_id = queue.start(8, budget=1, parameters={"training.ranks_per_node": 0})
    run(queue, job_id, 20)
    assert queue.state(job_id) is S.RUNNING
    assert "no price in [prices] per_hour for NVIDIA A100" in queue.job(job_id).reason


def test_gangs_that_share_a_node_without_accelerators_pay_it_once() -> None:
    profile = priced(**{"training.ranks_per_node": "4", "prices.watts": "{cpu = 1000}"})
    queue = Queue(worker("node-0"), profile=profile)
    jobs = [queue.submit(1, resources={"ranks_per_node": 1}) for _ in range(4)]
    queue.run_once()
    assert {queue.state(each) for each in jobs} == {S.STARTING}
    queue.run_once(100)
    assert sum(cost(queue, each) for each in jobs) == pytest.approx(100)
    rows = [cost_of(each, profile.prices) for each in recorded(queue.table.jobs(), [], queue.now)]
    assert sum(each.accelerator_hours or 0 for each in rows) == pytest.approx(100 / 3600)
    assert sum(each.energy_kwh or 0 for each in rows) == pytest.approx(100 / 3600)


def test_the_factor_of_spot_nodes_counts_for_the_spot_nodes_alone() -> None:
    nodes = [worker(f"spot-{n}", capacity="spot") for n in range(2)] + [worker("node-0")]
    queue = Queue(*nodes, profile=priced(**{"prices.spot_factor": "0.25"}))
    spot = queue.submit(2, resources={"capacity": "spot"})
    other = queue.start(1, resources={"capacity": "on-demand"})
    queue.run_once(100)
    assert (cost(queue, spot), cost(queue, other)) == (pytest.approx(50), pytest.approx(100))
    for each in (spot, other):
        queue.ends(each, "COMPLETED")
    queue.run_once()
    queue.submit(3)
    queue.run_once()
    assert queue.table.jobs()[-1].usage[0].spot_share == pytest.approx(2 / 3)


def test_a_record_of_an_older_version_has_the_factor_on_all_its_nodes(queue: Queue) -> None:
    old = JobUsage.model_validate_json(
        '{"attempt": 1, "accelerators": {"cpu": 2}, "since": 900.0, "held_s": 100.0}'
    )
    assert {"spot_share", "node_share", "ranks"}.isdisjoint(old.model_dump())
    job = queue.job(queue.submit(2)).model_copy(update={"usage": (old,)})
    prices = queue.profile.prices.model_copy(update={"spot_factor": 0.25})
    assert used(job, prices, queue.now)[2] == pytest.approx(50)


def test_each_attempt_has_its_time_by_class(queue: Queue) -> None:
    job_id = queue.start(2, team="nlp", project="q3")
    saved = JobCheckpoint(step=4, object_ref="s3://b/c", created_at=queue.now + 25)
    seconds = {"useful": 20.0, "data_wait": 2.0, "checkpoint": 1.0, "recovery": 0.0}
    run(queue, job_id, 30, seconds=seconds, made_steps=9, began_step=0, checkpoints=(saved,))
    queue.ends(job_id, "CRASHED")
    queue.store.workers, nodes = [], queue.store.workers  # all are away
    queue.run_once(10)
    queue.store.workers = nodes
    queue.run_once()
    run(queue, job_id, 5)
    lost, runs = queue.job(job_id).usage
    assert (lost.accelerators, lost.steps, lost.ended) == ({"cpu": 2}, 9, S.RECOVERING)
    assert lost.held_s == pytest.approx(31)
    # The flow's last report was 4 s after its checkpoint.
    assert lost.by_class == pytest.approx(
        {"useful": 16, "data_wait": 2, "checkpoint": 1, "recovery": 4, "idle": 8}
    )
    assert runs.queued_s == pytest.approx(10)
    newest, oldest = recorded(queue.table.jobs(), [], queue.now)
    assert (newest.state, newest.attempt, newest.seconds) == (S.RUNNING, 2, pytest.approx(5))
    assert (oldest.state, oldest.team, oldest.project) == (S.RECOVERING, "nlp", "q3")
    assert sum(newest.by_class.values()) == pytest.approx(newest.seconds)
    # Its ranks had saved step 12 after their flow was killed: the next attempt goes on there.
    run(queue, job_id, 5, made_steps=7, began_step=12)
    queue.ends(job_id, "COMPLETED")
    queue.run_once()
    assert [each.steps for each in queue.job(job_id).usage] == [12, 7]


def test_the_ledger_has_bytes_of_the_object_store_while_a_job_runs(queue: Queue) -> None:
    prices = PriceSettings(per_gb_egress=0.5, per_gb_month=0.25)
    saved = JobCheckpoint(step=4, object_ref="s3://b/c", created_at=1.0, bytes=2 * 10**9)
    job_id = queue.start(2)
    run(queue, job_id, 5, read_bytes=10**9, written_bytes=6 * 10**9, checkpoints=(saved,))
    (row,) = recorded(queue.table.jobs(), [], queue.now)
    found = cost_of(row, prices)
    assert (found.egress, found.storage_a_month, found.written_bytes) == (0.5, 0.5, 6 * 10**9)
    queue.ends(job_id, "CRASHED")
    queue.run_once(2)
    run(queue, job_id, 5)  # of a flow of an older version
    newest, lost = recorded(queue.table.jobs(), [], queue.now)
    assert (lost.egress_bytes, lost.written_bytes) == (10**9, 6 * 10**9)
    assert (newest.egress_bytes, newest.written_bytes) == (None, None)
    kept = (newest.checkpoint_bytes, lost.checkpoint_bytes)
    assert kept == (2 * 10**9, None), "once in all rows of the job"


def test_a_finished_attempt_has_the_results_figures_and_the_jobs_time(queue: Queue) -> None:
    job_id = queue.start(2, team="nlp")
    run(queue, job_id, 4000)
    queue.ends(job_id, "COMPLETED")
    queue.run_once()
    job = queue.job(job_id)
    own = {"run_id": job.run_id, "model_id": "acme/tiny"}
    mine = TrainingUsage.of(result()).model_copy(update=own)
    other = mine.model_copy(update={"run_id": "run-20260101-000000-abcdef", "started_at": 1.0})
    found = recorded(queue.table.jobs(), [mine, other], queue.now)
    assert len(found) == 2
    (row,) = (each for each in found if each.run_id == job.run_id)
    assert (row.tokens, row.team, row.queued_job_id) == (mine.tokens, "nlp", job_id)
    assert row.accelerators == {"cpu": 2}
    assert row.seconds == pytest.approx(job.usage[0].held_s or 0)
    assert row.by_class["idle"] == pytest.approx(300 + row.seconds - 3600)


def test_usages_stay_few_and_their_sum_stays_right() -> None:
    queue = Queue(worker("node-0"), profile=priced())
    spec = SubmitJob(model_id="m", version="1", data_snapshot=SNAPSHOT, resources={"ranks": 1})
    job_id = queue.add(spec).job_id
    total = 0.0
    for _ in range(KEPT_USAGES + 20):
        queue.run_once()
        run(queue, job_id, 3)
        queue.ask(job_id, "yield", S.PAUSING)
        queue.ends(job_id, "CANCELLED")
        queue.run_once()
        ended = queue.job(job_id).usage[-2]  # it is admitted again in the same round
        assert ended.held_s
        total += ended.held_s
    usage = queue.job(job_id).usage
    assert len(usage) == KEPT_USAGES
    assert sum(each.held_s or 0.0 for each in usage) == pytest.approx(total)
    assert usage[-1].attempt == KEPT_USAGES + 21


def test_a_budget_below_zero_is_refused() -> None:
    for wrong in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="budget"):
            SubmitJob(model_id="m", version="1", data_snapshot=SNAPSHOT, budget=wrong)
