"""The queue's metrics: what is counted, with which labels, whatever comes and goes."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from paceline.jobs import hosts_of
from paceline.schemas import JobCheckpoint, JobState
from paceline.telemetry import FleetMetrics, Snapshot
from tests.jobs.test_scheduler import Queue, worker

S = JobState


def metrics_of(queue: Queue) -> dict[str, float]:
    """Return each series of the queue's jobs as Prometheus gets them."""
    hosts = hosts_of(queue.store.workers, queue.profile.training)
    values = queue.table.metrics(hosts)
    shot = Snapshot(
        deployments=[], progress={}, workers=[], beats=0, beats_refused=0, leader_epoch=1,
        jobs=values,
    )  # fmt: skip
    return {
        each.name.removeprefix("paceline_") + "".join(f" {v}" for v in each.labels.values()): (
            each.value
        )
        for family in text_string_to_metric_families(FleetMetrics(lambda: shot).text().decode())
        for each in family.samples
        if each.name.startswith(("paceline_job", "paceline_pool"))
    }


@pytest.fixture
def queue() -> Queue:
    return Queue(*(worker(f"node-{each}") for each in range(4)))


def test_open_jobs_that_failed_have_series_and_not_too_many(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.jobs.service_levels.MOST_JOBS", 1)
    once, twice, bad, _fine = (queue.submit(1) for _ in range(4))
    queue.run_once()
    for each in (once, twice, twice):
        queue.ends(each, "CRASHED")
        queue.run_once(2)
    queue.report(bad, step=9, steps=9, outcome="succeeded", review="2 shards", quarantined=2)
    queue.run_once()
    found = metrics_of(queue)
    assert found[f"job_open_losses {twice}"] == 2
    assert found[f"job_quarantined_shards {bad}"] == 2, "it waits for a review"
    assert sum(each.startswith(("job_open_losses", "job_quarantined")) for each in found) == 2
    queue.ends(twice, "COMPLETED")
    queue.run_once()
    assert metrics_of(queue)[f"job_open_losses {once}"] == 1, "of the open ones"


def test_slots_of_spot_nodes_are_counted_apart() -> None:
    queue = Queue(worker("a-0", 8, capacity="spot"), worker("a-1", 4), worker("a-2", 2))
    per_node = {"training.ranks_per_node": 0}
    queue.submit(6, resources={"capacity": "spot"}, parameters=per_node)
    queue.run_once()
    found = metrics_of(queue)
    pools = [f"{name} NVIDIA A100 {each}" for name in ("pool_slots", "pool_held_slots")
             for each in ("spot", "on-demand")]  # fmt: skip
    assert [found[each] for each in pools] == [8, 6, 6, 0]


def test_waits_starts_and_what_is_held(queue: Queue) -> None:
    first = queue.start(3, team="nlp")
    second = queue.submit(4, team="vision", priority=-5)
    for _ in range(59):
        queue.report(first)
        queue.run_once()
    queue.report(first, step=1, steps=9)
    queue.run_once()
    found = metrics_of(queue)
    assert found["jobs running nlp"] == found["jobs queued vision"] == 1
    assert found["jobs failed nlp"] == 0
    assert found["job_queue_oldest_seconds low vision"] == pytest.approx(60, abs=0.1)
    assert found["job_first_step_seconds_sum nlp"] == pytest.approx(60, abs=0.1)
    assert found["job_first_step_seconds_bucket 120.0 nlp"] == 1
    pool = "cpu on-demand"
    assert (found[f"pool_slots {pool}"], found[f"pool_held_slots {pool}"]) == (4, 3)
    assert found["job_held_slot_seconds_total normal nlp"] == pytest.approx(180, abs=0.1)
    queue.ends(first, "COMPLETED")
    queue.run_once()
    found = metrics_of(queue)
    assert found["job_queue_wait_seconds_count low vision"] == 1
    assert found["job_useful_slot_seconds_total low vision"] == 0, "from the beginning"
    assert found["job_queue_wait_seconds_sum low vision"] == pytest.approx(61, abs=0.1)
    assert found["job_held_slot_seconds_total normal nlp"] == pytest.approx(183, abs=0.1)
    assert found["jobs_ended_total succeeded nlp"] == 1
    assert queue.state(second) is S.STARTING


def test_losses_by_cause_and_the_work_that_went_with_them(queue: Queue) -> None:
    job_id = queue.start(2, team="nlp")
    saved = JobCheckpoint(step=1, object_ref="s3://b/c", created_at=queue.now)
    for useful in (10.0, 40.0):
        queue.now += 30
        queue.report(job_id, step=5, seconds={"useful": useful}, checkpoints=(saved,))
    queue.ends(job_id, "FAILED", "Flow run encountered an exception: WorkerLost: node-1 is gone")
    queue.run_once()
    queue.ends(job_id, "CRASHED")
    queue.run_once()
    queue.ends(job_id, "FAILED", "exception: ServiceUnavailable: the store does not answer")
    queue.run_once()
    high = queue.start(4, team="vision", priority=9)
    queue.ends(job_id, "CANCELLED")
    queue.run_once()
    found = metrics_of(queue)
    causes = ("node", "lost-flow", "passing-failure", "preempted")
    assert [found[f"job_losses_total {each} nlp"] for each in causes] == [1, 1, 1, 1]
    assert [found[f"job_losses_total {each} vision"] for each in causes] == [0, 0, 0, 0]
    assert found["job_useful_slot_seconds_total normal nlp"] == 60, "from one report to the next"
    assert found["job_lost_slot_seconds_total normal nlp"] == 80
    assert [each.cause for each in queue.job(job_id).history if each.cause] == [*causes]
    assert queue.state(high) is S.STARTING


def test_the_age_of_checkpoints_is_that_of_the_worst_job_of_a_team(queue: Queue) -> None:
    jobs = [queue.submit(1, team="nlp") for _ in range(3)]
    queue.run_once()
    for number, job_id in enumerate(jobs):
        queue.report(job_id, step=1)
        queue.run_once()
        saved = JobCheckpoint(step=1, object_ref="s3://b/c", created_at=queue.now + number)
        queue.report(job_id, step=2, checkpoints=(saved,))
    queue.now += 500
    assert metrics_of(queue)["job_checkpoint_age_seconds nlp"] == pytest.approx(502)


def test_series_stay_few_and_counts_stay_when_jobs_are_deleted(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.jobs.service_levels.MOST_TEAMS", 3)
    monkeypatch.setattr("paceline.jobs.table.MOST_ENDED", 2)
    for number in range(9):
        job_id = queue.submit(1, team=f"team-{number}", priority=number)
        queue.run_once()
        queue.ends(job_id, "COMPLETED")
        queue.run_once()
    found = metrics_of(queue)
    assert len(queue.table.jobs()) == 2
    teams = {each.split()[2] for each in found if each.startswith("jobs_ended")}
    assert teams == {"team-0", "team-1", "team-2", "other"}
    ended = [found[f"jobs_ended_total succeeded {each}"] for each in ("team-0", "other")]
    assert ended == [1, 6]
    waits = sum(value for each, value in found.items() if "queue_wait_seconds_count" in each)
    assert waits == 9


def test_a_new_leader_counts_from_its_own_beginning(queue: Queue) -> None:
    job_id = queue.start(4, team="nlp")
    queue.now += 1000
    queue.lead()
    queue.now += 10
    found = metrics_of(queue)
    assert found["job_held_slot_seconds_total normal nlp"] == pytest.approx(40)
    assert "job_queue_wait_seconds_count normal nlp" not in found
    assert queue.state(job_id) is S.STARTING


def test_failures_of_gangs_by_host(queue: Queue) -> None:
    job_id = queue.start(2)
    for times in (1, 3):  # each report has all of its flow run
        queue.report(job_id, failures={"node-1": {"lost": times, "hung": 1}})
    found = metrics_of(queue)
    assert found["job_host_failures_total node-1 lost"] == 3
    assert found["job_host_failures_total node-1 hung"] == 1
