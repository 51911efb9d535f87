"""Where a rank that ended starts again, and where the gang's store is: pure decisions."""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from paceline.config import TrainingSettings
from paceline.training.launcher import (
    Deadlines,
    GangMember,
    GangSupervisor,
    IndependentAttempt,
    NodePool,
    RankExit,
    RankState,
    RestartPlacement,
)


def placement(nodes: str, most: int = 9) -> tuple[RestartPlacement, list[RankExit]]:
    exits: list[RankExit] = []
    pool = NodePool(list(nodes), TrainingSettings(ranks=6))
    return RestartPlacement(pool, lambda node: {"ON": node}, most, exits.append), exits


def ended(node: str, rank: int, kind: str = "failed") -> RankExit:
    return RankExit(member=GangMember(node, rank), kind=kind, reason="")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("rank", "node", "ready", "living", "spares", "wanted"),
    [
        (4, "a", "ab", {0: "a", 1: "b", 2: "a"}, {}, ("a", "")),
        (4, "c", "ab", {0: "a", 1: "b", 2: "a"}, {}, ("b", "")),
        (4, "c", "ab", {0: "a"}, {"s": "a"}, ("a", "s")),
        (1, "b", "ab", {0: "a"}, {"s": "a"}, ("b", "")),
        (0, "a", "ab", {1: "a"}, {}, ("b", "")),
        (0, "a", "a", {1: "a"}, {}, ("a", "")),
    ],
)
def test_a_rank_restarts_at_home_or_on_a_free_node_with_servers_apart(
    rank: int,
    node: str,
    ready: str,
    living: dict[int, str],
    spares: dict[str, str],
    wanted: tuple[str, str],
) -> None:
    found, _ = placement("abc")
    again = found.replace(ended(node, rank), living, set(ready), spares)
    assert again is not None and (again.worker_id, again.spare) == wanted


def test_a_node_is_lost_once_and_a_rank_restarts_only_so_often() -> None:
    found, exits = placement("abc", most=2)
    living, ready = {0: "a", 1: "b", 3: "a", 4: "b"}, {"a", "b"}
    for rank in (2, 5):
        again = found.replace(ended("c", rank, "lost"), living, ready, {})
        assert again is not None and again.env == {"ON": again.worker_id}
    assert found.pool.failures == {"c": 1} and not found.pool.left_out
    for _ in range(3):
        assert found.replace(ended("a", 3, "preempted"), living, ready, {}), "not its failure"
    failures = [found.replace(ended("b", 4), living, ready, {}) for _ in range(3)]
    assert [each is None for each in failures] == [False, False, True]
    assert [each.kind for each in exits] == ["lost"] * 2 + ["preempted"] * 3 + ["failed"] * 2


@pytest.mark.parametrize(
    ("nodes", "store"),
    [("abcd", "c"), ("abcab", "c"), ("abab", "b"), ("aaa", "a"), ("aab", "b")],
)
def test_the_gangs_store_avoids_server_nodes_or_lies_on_the_standbys(
    nodes: str, store: str
) -> None:
    gangs = GangSupervisor(Mock(), Deadlines())
    ranks = {rank: RankState(GangMember(node, rank)) for rank, node in enumerate(nodes)}
    attempt = IndependentAttempt(gangs, ranks, 1, None, SimpleNamespace())  # type: ignore[arg-type]
    assert attempt._workers[0] == store
    assert sorted(attempt._workers) == sorted(set(nodes))
    attempt._take("store", "elsewhere", {"error": "the store ended"})
    assert not attempt._store_lost
    attempt._take("store", store, {"error": "the store ended"})
    assert attempt._store_lost
