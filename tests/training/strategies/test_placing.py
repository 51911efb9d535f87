"""Where the gang's store is, and which losses a parameter server survives: pure decisions."""

from __future__ import annotations

from unittest.mock import Mock

import pytest

from paceline.training import Deadlines
from paceline.training.launcher import (
    GangMember,
    GangSupervisor,
    RankState,
    ServedAttempt,
)


@pytest.mark.parametrize(
    ("nodes", "store"),
    [("abcd", "c"), ("abcab", "c"), ("abab", "b"), ("aaa", "a"), ("aab", "b")],
)
def test_the_gangs_store_avoids_server_nodes_or_lies_on_the_standbys(
    nodes: str, store: str
) -> None:
    gangs = GangSupervisor(Mock(), Deadlines())
    ranks = {rank: RankState(GangMember(node, rank)) for rank, node in enumerate(nodes)}
    attempt = ServedAttempt(gangs, ranks, 1, None)
    assert attempt._workers[0] == store
    assert sorted(attempt._workers) == sorted(set(nodes))
    attempt._handle_message("store", "elsewhere", {"error": "the store ended"})
    assert not attempt._store_lost
    attempt._handle_message("store", store, {"error": "the store ended"})
    assert attempt._store_lost


@pytest.mark.parametrize(
    ("codes", "reason"),
    [
        ({0: -9}, ""),
        ({1: None}, ""),
        ({0: 75}, ""),
        ({2: 143}, ""),
        ({0: 1}, "exited with 1"),
        ({1: 76}, "exited with 76"),
        ({0: -9, 1: -9}, "no rank is left that holds the state"),
        ({3: -9}, "killed by signal 9"),
        ({2: 75}, "exited with 75"),
    ],
)
def test_one_server_may_be_lost_and_no_other_rank(
    codes: dict[int, int | None], reason: str
) -> None:
    ranks = {rank: RankState(GangMember("abcd"[rank], rank)) for rank in range(4)}
    for rank, code in codes.items():
        ranks[rank].has_ended, ranks[rank].code = True, code
    fault = ServedAttempt(GangSupervisor(Mock(), Deadlines()), ranks, 1, None)._loss()
    assert (fault is not None) == bool(reason)
    assert fault is None or reason in fault.what
