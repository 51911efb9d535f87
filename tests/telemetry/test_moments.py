"""What watchers get: rates, ETA, and only what changed."""

from __future__ import annotations

import random

import pytest

from paceline.schemas import (
    Deployment,
    DeploymentStatus,
    Failure,
    Labels,
    LeaderView,
    Moment,
    Topology,
    Worker,
    WorkerStatus,
    chunk_runs,
)
from paceline.telemetry import DeploymentSnapshot, MomentBuilder, PartSnapshot, StateSnapshot

MB = 1_000_000


def deployment(name: str = "dep-1", status: str = "distributing", **more: object) -> Deployment:
    fields: dict[str, object] = {
        "deployment_id": name, "model_id": "m", "version": "v1", "status": status,
        "source_url": "s3://b/m", "manifest_digest": "0" * 64, "total_bytes": 100 * MB,
        "total_chunks": 10, "total_pieces": 100, "target_workers": ("node-0", "node-1"),
        "topology": Topology.CHAIN, "epoch": 1, "max_failed": 0.05, "started_at": 0,
    }  # fmt: skip
    return Deployment.model_validate(fields | more)


def part(held: int = 0, **more: object) -> PartSnapshot:
    fields: dict[str, object] = {
        "status": WorkerStatus.RECEIVING, "alive": True, "chunks": tuple(range(held // (10 * MB))),
        "bytes_held": held, "upstream": None, "standing": "line", "verified": False,
        "activated": False, "failure": None,
    }  # fmt: skip
    return PartSnapshot(**(fields | more))  # type: ignore[arg-type]


def worker(name: str, **more: object) -> Worker:
    fields: dict[str, object] = {
        "worker_id": name, "hostname": "h", "labels": Labels(rack="r"), "address": "a",
        "available_storage": 5, "link_mbit": 1, "incarnation": 1,
    }  # fmt: skip
    return Worker.model_validate(fields | more)


def look(
    now_s: float, *deployments: DeploymentSnapshot, workers: tuple[Worker, ...] = ()
) -> StateSnapshot:
    return StateSnapshot(
        at=1000 + now_s, now_s=now_s, leader=LeaderView(epoch=1), deployments=deployments,
        workers=workers,
    )  # fmt: skip


def test_a_look_that_finds_nothing_new_is_empty() -> None:
    moments = MomentBuilder()
    seen = DeploymentSnapshot(deployment(), {"node-0": part(5)})
    first = moments.take(look(0, seen, workers=(worker("node-0"),)))
    assert len(first.deployments) == 1
    assert len(first.workers) == 1
    again = DeploymentSnapshot(deployment(), {"node-0": part(5)})
    second = moments.take(look(1, again, workers=(worker("node-0"),)))
    assert second.deployments == ()
    assert second.workers == ()


def test_only_the_parts_that_changed_are_sent() -> None:
    moments = MomentBuilder()
    moments.take(look(0, DeploymentSnapshot(deployment(), {"node-0": part(0), "node-1": part(0)})))
    news = moments.take(
        look(1, DeploymentSnapshot(deployment(), {"node-0": part(0), "node-1": part(20 * MB)}))
    )
    (told,) = news.deployments
    assert [each.worker_id for each in told.parts] == ["node-1"]
    assert told.parts[0].chunks == ((0, 1),)


def test_rate_and_eta_follow_the_slowest_that_moves() -> None:
    moments = MomentBuilder()
    for second in range(5):
        parts = {"node-0": part(second * 10 * MB), "node-1": part(second * 5 * MB)}
        moment = moments.take(look(second, DeploymentSnapshot(deployment(), parts)))
    (told,) = moment.deployments
    assert told.rate_bytes_s == 15 * MB
    assert told.progress == pytest.approx(0.3)
    assert told.eta_s == pytest.approx((100 - 20) / 5)


def test_a_standstill_has_no_eta_and_a_loss_no_rate() -> None:
    moments = MomentBuilder()
    moments.take(look(0, DeploymentSnapshot(deployment(), {"node-0": part(50 * MB)})))
    moment = moments.take(look(1, DeploymentSnapshot(deployment(), {"node-0": part(10 * MB)})))
    assert moment.deployments[0].eta_s is None
    assert moment.deployments[0].rate_bytes_s == 0


def test_the_dead_are_named_and_count_no_more() -> None:
    gone = part(
        5, alive=False, status=WorkerStatus.FAILED, failure=Failure(code="WorkerLost", message="x")
    )
    done = part(100 * MB, verified=True, status=WorkerStatus.COMPLETE)
    moment = MomentBuilder().take(
        look(0, DeploymentSnapshot(deployment(), {"node-0": done, "node-1": gone}))
    )
    (told,) = moment.deployments
    assert told.workers_failed == ("node-1",)
    assert told.workers_complete == 1
    assert told.progress == 1.0


def test_a_worker_that_is_short_of_the_origin_has_not_failed() -> None:
    short = part(5, failure=Failure(code="OriginBudgetExceeded", message="x"))
    moment = MomentBuilder().take(look(0, DeploymentSnapshot(deployment(), {"node-0": short})))
    assert moment.deployments[0].workers_failed == ()


def test_a_removed_deployment_is_sent_as_gone_once() -> None:
    moments = MomentBuilder()
    seen = DeploymentSnapshot(deployment(), {})
    moments.take(look(0, seen))
    assert moments.take(look(1)).gone == ("dep-1",)
    assert moments.take(look(2)).gone == ()


def test_an_ended_deployment_that_is_not_read_again_is_not_sent_again() -> None:
    moments = MomentBuilder()
    seen = DeploymentSnapshot(
        deployment(status="complete"), {"node-0": part(100 * MB, verified=True)}
    )
    assert len(moments.take(look(0, seen)).deployments) == 1
    assert moments.take(look(1, seen)).deployments == ()
    assert len(moments.whole().deployments[0].parts) == 1


def laid_over(base: dict[str, object], moment: Moment) -> dict[str, object]:
    """What a reader does with a Moment."""
    if moment.full:
        base.clear()
    for each in moment.deployments:
        for item in each.parts:
            base[f"{each.deployment_id}/{item.worker_id}"] = item
        base[each.deployment_id] = each.model_copy(update={"parts": ()})
    for item in moment.workers:
        base[item.worker_id] = item
    for name in moment.gone:
        for key in [key for key in base if key.partition("/")[0] == name]:
            del base[key]
    return base


@pytest.mark.parametrize("seed", range(5))
def test_what_a_reader_lays_together_is_the_whole(seed: int) -> None:
    random_ = random.Random(seed)
    moments, reader = MomentBuilder(), {}
    held = {(f"dep-{d}", f"node-{w}"): 0 for d in range(3) for w in range(4)}
    for second in range(30):
        shown = []
        for d in range(3):
            if random_.random() < 0.2:
                continue
            parts = {}
            for w in range(4):
                key = (f"dep-{d}", f"node-{w}")
                held[key] = min(100 * MB, max(0, held[key] + random_.choice((-1, 0, 0, 5)) * MB))
                parts[f"node-{w}"] = part(held[key], alive=random_.random() < 0.9)
            status = random_.choice(list(DeploymentStatus))
            shown.append(DeploymentSnapshot(deployment(f"dep-{d}", status.value), parts))
        workers = tuple(worker(f"node-{w}", alive=random_.random() < 0.8) for w in range(4))
        laid_over(reader, moments.take(look(second, *shown, workers=workers)))
    assert reader == laid_over({}, moments.whole())


def test_chunks_are_sent_as_runs() -> None:
    assert chunk_runs(()) == ()
    assert chunk_runs((0, 1, 2, 5, 7, 8)) == ((0, 2), (5, 5), (7, 8))
