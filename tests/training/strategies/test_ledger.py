"""The parameter server's rule: staleness is bounded, nothing twice, everybody has a turn."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import CorruptData, InvalidInput
from paceline.training.strategies.update_ledger import PushVerdict, Update, UpdateLedger


class Farm:
    """Workers that pull, compute for a while, push, lose answers, and obey."""

    def __init__(self, workers: int, max_staleness: int) -> None:
        self.ledger = UpdateLedger(max_staleness)
        self.log: list[Update] = []
        self.base: dict[int, int | None] = dict.fromkeys(range(workers))
        self.next = dict.fromkeys(range(workers), 1)

    def act(self, worker: int, lost: bool) -> PushVerdict | None:
        base = self.base[worker]
        if base is None:
            self.base[worker] = self.ledger.pull(worker)
            return None
        sequence = self.next[worker]
        verdict = self.ledger.judge(worker, sequence, base)
        if verdict is PushVerdict.APPLY:
            self.log.append(self.ledger.apply(worker, sequence, base))
        if verdict is PushVerdict.WAIT or lost:
            return verdict  # it will push the very same again
        if verdict is not PushVerdict.STALE:
            self.next[worker] += 1
        self.base[worker] = None
        return verdict


@settings(max_examples=200, deadline=None)
@given(
    workers=st.integers(1, 4),
    bound=st.integers(0, 4),
    acts=st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=200),
)
def test_no_gradient_is_staler_than_the_bound_and_none_is_applied_twice(
    workers: int, bound: int, acts: list[tuple[int, bool]]
) -> None:
    farm = Farm(workers, bound)
    for worker, lost in acts:
        farm.act(worker % workers, lost)
    assert [each.version for each in farm.log] == list(range(1, len(farm.log) + 1))
    for each in farm.log:
        assert 0 <= each.version - 1 - each.base <= bound
    for worker in range(workers):
        mine = [each.sequence for each in farm.log if each.worker == worker]
        assert mine == list(range(1, len(mine) + 1)), "each once, in order"
        assert farm.next[worker] - 1 <= len(mine), "what a worker counts as done was applied"


@settings(max_examples=60, deadline=None)
@given(
    workers=st.integers(2, 4),
    bound=st.integers(0, 3),
    slow=st.integers(2, 9),
    seed=st.randoms(use_true_random=False),
)
def test_a_slow_worker_comes_to_its_turn(workers: int, bound: int, slow: int, seed: object) -> None:
    """Worker 0 acts once while the others act ``slow`` times; it must get through all the same."""
    farm = Farm(workers, bound)
    for _ in range(80):
        for _ in range(slow):
            farm.act(seed.randrange(1, workers), False)  # type: ignore[attr-defined]
        farm.act(0, False)
    mine = [each for each in farm.log if each.worker == 0]
    # At most three workers stand before it, and its own base may be stale once more by then.
    assert len(mine) >= 3


@settings(max_examples=100, deadline=None)
@given(acts=st.lists(st.integers(0, 2), min_size=1, max_size=120), cut=st.integers(0, 120))
def test_a_standby_that_followed_the_log_goes_on_without_loss_or_repeat(
    acts: list[int], cut: int
) -> None:
    farm = Farm(3, 2)
    for worker in acts[:cut]:
        farm.act(worker, False)
    standby = UpdateLedger(2)
    for each in farm.log:
        standby.follow(each)
    half = UpdateLedger.from_json(json.loads(json.dumps(farm.ledger.to_json())), 2)
    assert standby.to_json() == half.to_json() == farm.ledger.to_json()
    pushed = [each for each in farm.log if each.worker == 0]
    if pushed:  # its answer was lost with the old server
        again = pushed[-1]
        assert standby.judge(0, again.sequence, again.base) is PushVerdict.KNOWN
    farm.ledger = standby
    for worker in acts[cut:]:
        farm.act(worker, False)
    assert [each.version for each in farm.log] == list(range(1, len(farm.log) + 1))


def test_nobody_waits_for_a_worker_that_is_gone() -> None:
    ledger = UpdateLedger(0)
    for worker in (0, 1):
        ledger.pull(worker)
    assert ledger.judge(0, 1, 0) is PushVerdict.APPLY
    ledger.apply(0, 1, 0)
    assert ledger.judge(1, 1, 0) is PushVerdict.STALE
    ledger.pull(1)
    ledger.pull(0)
    assert ledger.judge(0, 2, 1) is PushVerdict.WAIT
    ledger.release(1)
    assert ledger.judge(0, 2, 1) is PushVerdict.APPLY


def test_nonsense_is_refused() -> None:
    ledger = UpdateLedger(2)
    with pytest.raises(InvalidInput, match="out of order"):
        ledger.judge(0, 2, 0)
    with pytest.raises(InvalidInput, match="out of order"):
        ledger.judge(0, 0, 0)
    with pytest.raises(InvalidInput, match="unknown version"):
        ledger.judge(0, 1, 1)
    with pytest.raises(CorruptData, match="gap"):
        ledger.follow(Update(0, 1, 0, 2))
    with pytest.raises(CorruptData, match="gap"):
        ledger.follow(Update(0, 2, 0, 1))
