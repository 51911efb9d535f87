"""Who runs the next attempt, where the time went, and what may be tried again: pure decisions."""

from __future__ import annotations

import pytest

from paceline.config import GuardSettings, MeshSettings, TrainingSettings
from paceline.errors import TrainingFailed
from paceline.training.launcher import NodePool, TimeAccounts, with_fewer_ranks

NODES = ("a", "b", "c", "d")


def roster(ranks: int = 4, nodes: tuple[str, ...] = NODES, **guard: int) -> NodePool:
    settings = TrainingSettings(ranks=ranks, guard=GuardSettings.model_validate(guard))
    return NodePool(nodes, settings)


def places(found: NodePool, **spares: str) -> list[str]:
    return [each.worker_id for each in found.assignment(spares).members]


def test_ranks_go_round_the_nodes() -> None:
    assert places(roster(6)) == ["a", "b", "c", "d", "a", "b"]
    assert not roster(6).assignment({}).reduced


def test_consecutive_ranks_share_a_node_where_the_settings_say_so() -> None:
    settings = TrainingSettings(ranks=6, ranks_per_node=2)
    assert places(NodePool(NODES, settings)) == ["a", "a", "b", "b", "c", "c"]
    two = NodePool(NODES[:2], settings)
    assert places(two) == ["a", "a", "b", "b", "a", "a"]
    two.record_failure("b", lost=True)
    assert places(two) == ["a"] * 6


def test_a_lost_nodes_ranks_go_to_others_and_back_when_it_returns() -> None:
    found = roster()
    found.record_failure("b", lost=True)
    assert places(found) == ["a", "a", "c", "d"]
    assert found.assignment({}).reduced
    assert found.missing == ["b"]
    found.mark_reachable("b")
    assert places(found) == list(NODES)


def test_fewer_ranks_go_on_where_the_policy_allows() -> None:
    found = roster(min_ranks=2)
    found.record_failure("b", lost=True)
    assert places(found) == ["a", "c", "d"]
    found.record_failure("c", lost=True)
    assert places(found) == ["a", "d"]
    found.record_failure("d", lost=True)
    with pytest.raises(TrainingFailed, match=r"too few ranks are left: got 1 .* wanted at least 2"):
        found.assignment({})


def test_fewer_ranks_are_whole_replicas() -> None:
    settings = TrainingSettings(
        ranks=4, mesh=MeshSettings(tp=2), guard=GuardSettings(min_ranks=2), accumulation=2
    )
    found = NodePool(NODES, settings)
    found.record_failure("d", lost=True)
    assert found.assignment({}).ranks == 2
    fewer = with_fewer_ranks(settings, 2)
    assert (fewer.ranks, fewer.accumulation, fewer.batch_sequences) == (2, 4, 16)
    assert with_fewer_ranks(settings, 4) is settings


def test_a_spare_takes_a_lost_nodes_rank_before_the_gang_shrinks() -> None:
    found = roster(2, ("a", "b", "c"), min_ranks=1, spares=1)
    assert found.spare_nodes(1) == ["c"], "where no rank runs"
    found.record_failure("a", lost=True)
    members = found.assignment({"spare-1": "c"}).members
    assert [(each.worker_id, each.spare) for each in members] == [("c", "spare-1"), ("b", "")]
    assert not found.assignment({"spare-1": "c"}).reduced


def test_a_killed_rank_is_replaced_by_its_nodes_own_spare() -> None:
    found = roster(2, ("a", "b"))
    found.record_failure("b", lost=False)
    members = found.assignment({"spare-1": "b"}).members
    assert [(each.worker_id, each.spare) for each in members] == [("a", ""), ("b", "spare-1")]


def test_a_node_that_fails_too_often_is_left_out_where_others_remain() -> None:
    found = roster(2, ("a", "b"), failures_per_host=2)
    found.record_failure("b", lost=False)
    assert places(found) == ["a", "b"]
    found.record_failure("b", lost=False)
    assert places(found) == ["a", "a"]
    assert found.excluded == {"b"}
    assert found.missing == [], "it is not waited for"
    found.record_failure("a", lost=True)
    assert places(found) == ["a", "b"], "a bad node is better than none"


def test_a_node_taken_back_by_its_owner_has_not_failed() -> None:
    found = roster(2, ("a", "b"), failures_per_host=1)
    found.record_preemption("a")
    assert places(found) == ["b", "b"]
    assert not found.failures
    assert found.missing == ["a"]


def steps(ledger: TimeAccounts, now: float, first: int, last: int, seconds: float = 1.0) -> float:
    for step in range(first, last + 1):
        now += seconds
        ledger.record_step(now, step, seconds=seconds, data_wait_s=0.1, stall_s=0.05)
    return now


def test_each_second_is_in_one_account_and_lost_work_is_no_progress() -> None:
    ledger = TimeAccounts(100.0)
    ledger.record_resume(0)
    now = steps(ledger, 105.0, 1, 10)  # 5 s to get going
    ledger.record_failure(now + 2.0)  # dead for 2 s
    ledger.record_resume(6)  # four steps are lost
    now = steps(ledger, now + 2.0 + 3.0, 7, 20)
    kept = ledger.finished(now + 1.0)
    accounts = {name: getattr(kept, name) for name in type(kept).model_fields}
    wall, goodput = accounts.pop("wall_s"), accounts.pop("goodput")
    assert sum(accounts.values()) == pytest.approx(wall)
    assert wall == pytest.approx(now + 1.0 - 100.0)
    assert accounts["start_s"] == pytest.approx(5.0)
    assert accounts["detection_s"] == pytest.approx(2.0)
    assert accounts["restart_s"] == pytest.approx(3.0)
    assert accounts["finish_s"] == pytest.approx(1.0)
    assert accounts["lost_work_s"] == pytest.approx(4 * 0.85)
    assert accounts["productive_s"] == pytest.approx(20 * 0.85)
    assert accounts["data_wait_s"] == pytest.approx(24 * 0.1)
    assert goodput == pytest.approx(17.0 / (24 + 5))


def test_a_step_that_ends_after_its_gang_was_found_hung_is_no_lost_work() -> None:
    ledger = TimeAccounts(0.0)
    now = steps(ledger, 0.0, 1, 10)
    ledger.record_step(now + 2.4, 11, seconds=2.4, data_wait_s=0.1, stall_s=0.05)  # once thawed
    steps(ledger, now + 2.4, 12, 13, seconds=0.1)
    ledger.record_failure(now + 2.8, found_at=now + 2.2)
    ledger.record_failure(now + 3.0)  # nor did the next attempt get so far as to resume
    ledger.record_resume(8)
    again = steps(ledger, now + 4.0, 9, 11)
    kept = ledger.finished(again)
    assert kept.detection_s == pytest.approx(2.2)
    assert kept.restart_s == pytest.approx(0.6 + 0.2 + 1.0)
    assert kept.lost_work_s == pytest.approx(2 * 0.85), "steps 9 and 10"
    assert kept.productive_s == pytest.approx(11 * 0.85)
    assert kept.data_wait_s == pytest.approx(13 * 0.1)
    accounts = kept.model_dump(exclude={"wall_s", "goodput"})
    assert sum(accounts.values()) == pytest.approx(kept.wall_s)


def test_a_failure_before_the_first_step_was_start_all_along() -> None:
    ledger = TimeAccounts(0.0)
    ledger.record_failure(4.0)
    now = steps(ledger, 6.0, 1, 2)
    kept = ledger.finished(now)
    assert kept.start_s == pytest.approx(4.0)
    assert kept.restart_s == pytest.approx(2.0)
    assert kept.wall_s == pytest.approx(8.0)


def test_a_gang_that_ended_as_asked_had_nothing_to_detect() -> None:
    ledger = TimeAccounts(0.0)
    now = steps(ledger, 0.0, 1, 3)
    ledger.record_stop(now + 0.5)
    kept = ledger.finished(steps(ledger, now + 1.5, 4, 5))
    assert kept.detection_s == 0
    assert kept.restart_s == pytest.approx(1.5)
    assert kept.lost_work_s == 0
