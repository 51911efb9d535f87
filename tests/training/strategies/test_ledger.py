"""The parameter server's rule: staleness is bounded, nothing twice, every worker continues."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings, strategies as st

from paceline.errors import CorruptData, InvalidInput
from paceline.training.strategies import BatchReport, Update, UpdateLedger


class Farm:
    """Workers that pull, compute for a while, push, and lose their connections."""

    def __init__(self, workers: int, max_staleness: int) -> None:
        self.ledger = UpdateLedger(max_staleness)
        self.log: list[Update] = []
        self.base: dict[int, int | None] = dict.fromkeys(range(workers))

    def act(self, worker: int, lost: bool = False) -> bool:
        """Return whether the worker could do its next thing."""
        if lost:
            self.ledger.release(worker)
            self.base[worker] = None
        base = self.base[worker]
        if base is None:
            self.base[worker] = self.ledger.pull(worker)
            return self.base[worker] is not None
        sequence = self.ledger.applied.get(worker, 0) + 1
        if not self.ledger.may_push(worker, sequence, base):
            return False
        self.log.append(Update(worker, sequence, base, self.ledger.version + 1))
        self.ledger.apply(self.log[-1])
        self.base[worker] = None
        return True


@settings(max_examples=200, deadline=None)
@given(
    workers=st.integers(1, 5),
    bound=st.integers(0, 4),
    acts=st.lists(st.tuples(st.integers(0, 4), st.booleans()), max_size=200),
)
def test_no_update_exceeds_the_staleness_bound_and_a_worker_can_continue(
    workers: int, bound: int, acts: list[tuple[int, bool]]
) -> None:
    farm = Farm(workers, bound)
    for worker, lost in acts:
        farm.act(worker % workers, lost)
    assert [each.version for each in farm.log] == list(range(1, len(farm.log) + 1))
    assert all(0 <= each.staleness <= bound for each in farm.log)
    for worker in range(workers):
        mine = [each.sequence for each in farm.log if each.worker == worker]
        assert mine == list(range(1, len(mine) + 1)), "each once, in order"
    could = [farm.act(worker) for worker in range(workers)]
    assert any(could)


@pytest.mark.parametrize("bound", range(4))
@pytest.mark.parametrize("workers", range(2, 7))
def test_a_slow_worker_computes_nothing_in_vain(workers: int, bound: int) -> None:
    """Worker 0 computes while the others act nine times; a worker that waits tries at each act."""
    farm, waits = Farm(workers, bound), False
    for act in range(720):
        farm.act(1 + act % (workers - 1))
        if waits or act % 9 == 8:
            waits = not farm.act(0)
    mine = [each for each in farm.log if each.worker == 0]
    assert len(mine) >= 15, "of 40 that nine acts each would allow"


@settings(max_examples=100, deadline=None)
@given(acts=st.lists(st.integers(0, 2), min_size=1, max_size=120), cut=st.integers(0, 120))
def test_a_standby_that_followed_the_log_goes_on_without_loss_or_repeat(
    acts: list[int], cut: int
) -> None:
    farm = Farm(3, 2)
    for worker in acts[:cut]:
        farm.act(worker)
    standby = UpdateLedger(2)
    for each in farm.log:
        standby.apply(each)
    copied = UpdateLedger.from_json(json.loads(json.dumps(farm.ledger.to_json())), 2)
    assert standby == copied == farm.ledger
    farm.ledger, farm.base = standby, dict.fromkeys(range(3))  # workers pull from the new leader
    for worker in acts[cut:]:
        farm.act(worker)
    assert [each.version for each in farm.log] == list(range(1, len(farm.log) + 1))


def test_workers_wait_for_a_gradient_under_way_but_not_for_a_lost_worker() -> None:
    ledger = UpdateLedger(1)
    assert (ledger.pull(0), ledger.pull(1)) == (0, 0)
    assert ledger.pull(2) is None, "the third would be two versions late"
    assert ledger.may_push(1, 1, 0)
    ledger.apply(Update(1, 1, 0, 1))
    assert ledger.pull(1) is None, "worker 2 has fewer updates"
    assert ledger.pull(2) == 1
    assert not ledger.may_push(2, 1, 1), "worker 0 would become two versions late"
    ledger.release(0)
    assert ledger.may_push(2, 1, 1)


def test_a_gradient_out_of_order_is_refused() -> None:
    ledger = UpdateLedger(2)
    ledger.pull(0)
    for sequence, base in ((2, 0), (0, 0), (1, 1)):
        with pytest.raises(InvalidInput, match="out of order"):
            ledger.may_push(0, sequence, base)
    for update in (Update(0, 1, 0, 2), Update(0, 2, 0, 1)):
        with pytest.raises(CorruptData, match="gap"):
            ledger.apply(update)


def test_shares_are_cut_anew_for_another_number_of_workers() -> None:
    ledger = UpdateLedger(2)
    for version, (worker, sequence) in enumerate([(0, 1), (1, 1), (0, 2), (2, 1)], start=1):
        report = BatchReport(position={"batch": sequence})
        ledger.apply(Update(worker, sequence, version - 1, version, report))
    assert ledger.of_workers(3, 3) is ledger
    fewer = ledger.of_workers(3, 2)
    assert (fewer.version, fewer.applied) == (2, {0: 1, 1: 1})
    assert fewer.positions == {0: {"batch": 1}, 1: {"batch": 1}}, "where the slowest stood"
    assert UpdateLedger(2).of_workers(2, 5) == UpdateLedger(2, 0, dict.fromkeys(range(5), 0))
    with pytest.raises(CorruptData):
        UpdateLedger.from_json({"version": 1}, 2)
