"""Who works on which share, and where a rank that fell starts again: pure decisions."""

from __future__ import annotations

from typing import ClassVar
from unittest.mock import Mock

import pytest

from paceline.config import TrainingSettings
from paceline.errors import CorruptData
from paceline.training.launcher.attempt import RankState
from paceline.training.launcher.driver import PlacementRestartPolicy, place
from paceline.training.launcher.gang import GangSupervisor
from paceline.training.launcher.independent_restart import IndependentAttempt, RankExit
from paceline.training.launcher.placement import NodePool
from paceline.training.launcher.ports import Deadlines, GangMember
from paceline.training.strategies.protocol import ShareAssignment
from paceline.training.strategies.update_ledger import Update, UpdateLedger


def test_a_rank_keeps_its_share_and_its_newest_line_counts() -> None:
    seats = ShareAssignment(2, vacant_s=10, now=0.0)
    assert seats.take(2, 0, "old", {0, 1}, 1.0) == (0, None)
    assert seats.take(2, 0, "new", {0, 1}, 2.0) == (0, "old"), "the old line is to be cut"
    seats.leave(0, "old", 3.0)
    assert seats.take(3, 0, "other", {0}, 99.0) == (None, None), "it is still held"


def test_a_share_nobody_works_on_goes_to_who_has_finished() -> None:
    seats = ShareAssignment(3, vacant_s=10, now=0.0)
    for rank, share in ((2, 0), (3, 1), (4, 2)):
        assert seats.take(rank, share, rank, {0, 1, 2}, 0.0)[0] == share
    seats.leave(1, 3, 20.0)  # rank 3 falls
    seats.leave(0, 2, 21.0)  # rank 2 has finished
    assert seats.take(2, 0, 2, {1, 2}, 25.0) == (None, None), "it may come back"
    assert seats.take(2, 0, 2, {1, 2}, 30.0) == (1, None)
    assert seats.take(3, 1, 5, {1, 2}, 31.0) == (None, None), "too late"


def test_shares_are_cut_anew_for_another_number_of_workers() -> None:
    ledger = UpdateLedger(2)
    for version, (worker, sequence) in enumerate([(0, 1), (1, 1), (0, 2), (2, 1)], start=1):
        at = {"batch": sequence}
        ledger.follow(Update(worker, sequence, version - 1, version), at)
    again = UpdateLedger.from_json(ledger.to_json(), 2)
    assert again == ledger
    assert again.of_workers(3, 3) is again
    fewer = again.of_workers(3, 2)
    assert (fewer.version, fewer.applied) == (2, {0: 1, 1: 1})
    assert fewer.positions == {0: {"batch": 1}, 1: {"batch": 1}}, "where the slowest stood"
    assert UpdateLedger(2).of_workers(2, 5) == UpdateLedger(2, 0, dict.fromkeys(range(5), 0))
    with pytest.raises(CorruptData):
        UpdateLedger.from_json({"version": 1}, 2)


@pytest.mark.parametrize(
    ("rank", "node", "ready", "living", "spares", "wanted"),
    [
        (4, "a", ["a", "b"], {0: "a", 1: "b", 2: "a"}, {}, ("a", "")),
        (4, "c", ["a", "b"], {0: "a", 1: "b", 2: "a"}, {}, ("b", "")),
        (4, "c", ["a", "b"], {0: "a"}, {"s": "a"}, ("a", "s")),
        (1, "b", ["a", "b"], {0: "a"}, {"s": "a"}, ("b", "")),
        (0, "a", ["a", "b"], {1: "a"}, {}, ("b", "")),
        (0, "a", ["a"], {1: "a"}, {}, ("a", "")),
    ],
)
def test_a_rank_starts_again_at_home_else_where_there_is_room_and_servers_apart(
    rank: int,
    node: str,
    ready: list[str],
    living: dict[int, str],
    spares: dict[str, str],
    wanted: tuple[str, str],
) -> None:
    assert place(GangMember(node, rank), ready, living, spares) == wanted


def test_a_node_is_lost_once_with_all_its_ranks_and_a_rank_that_falls_too_often_is_left_out() -> (
    None
):
    settings = TrainingSettings(ranks=6)
    roster = NodePool(["a", "b", "c"], settings)
    told: list[tuple[int, str]] = []

    class Accounting:
        def fell(self, rank: int, _worker: str, kind: str, _reason: str, _now: float) -> None:
            told.append((rank, kind))

    class Nodes:
        ready: ClassVar = {"a", "b"}
        spares: ClassVar = {}

    replacing = PlacementRestartPolicy(
        roster, Accounting(), Nodes(), lambda worker: {"ON": worker}, most=2
    )
    living = {0: "a", 1: "b", 3: "a", 4: "b"}
    for rank in (2, 5):
        fell = RankExit(member=GangMember("c", rank), kind="lost", reason="gone")
        again = replacing.replace(fell, living)
        assert again is not None and again.env == {"ON": again.worker_id}
    assert roster.failures == {"c": 1} and not roster.left_out
    for _ in range(2):
        fell = RankExit(member=GangMember("a", 3), kind="preempted", reason="taken")
        assert replacing.replace(fell, living) is not None, "no fault of the rank's"
    falls = [RankExit(member=GangMember("b", 4), kind="failed", reason="") for _ in range(3)]
    assert [replacing.replace(each, living) is None for each in falls] == [False, False, True]
    assert [each for each in told if each[0] == 4] == [(4, "failed")] * 3


@pytest.mark.parametrize(
    ("nodes", "store"),
    [("abcd", "c"), ("abcab", "c"), ("abab", "b"), ("aaa", "a"), ("aab", "b")],
)
def test_the_gangs_store_is_on_neither_servers_node_or_else_on_the_standbys(
    nodes: str, store: str
) -> None:
    class Keeping:
        keepers = 2

    gangs = GangSupervisor(Mock(), Deadlines())
    ranks = {rank: RankState(GangMember(node, rank)) for rank, node in enumerate(nodes)}
    attempt = IndependentAttempt(gangs, ranks, 1, None, Keeping())
    assert attempt._workers[0] == store
    assert sorted(attempt._workers) == sorted(set(nodes))
    assert not attempt._storeless
    attempt._take("store", "elsewhere", {"error": "the store ended"})
    assert not attempt._storeless
    attempt._take("store", store, {"error": "the store ended"})
    assert attempt._storeless
