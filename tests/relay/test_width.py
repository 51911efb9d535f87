"""How many ranges the origin is asked for at once: as many as bring more, and no more."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from paceline.relay.origin import FEWEST, HOLD_S, LOOK_S, MOST, RangeConcurrency


def run(
    width: RangeConcurrency, rate: Callable[[int], float], seconds: float, start_s: float = 0.0
) -> float:
    """Feed ``width`` with what ``rate`` of its ranges brings, 20 times a second."""
    now_s = start_s
    while now_s < start_s + seconds:
        now_s += 0.05
        width.arrived(int(rate(width.now) * 0.05), now_s)
    return now_s


def test_one_connection_with_a_fraction_of_the_link_gets_company() -> None:
    width = RangeConcurrency(most=10_000)
    run(width, lambda ranges: min(ranges * 80e6, 1250e6), 6 * LOOK_S)
    assert width.now == MOST
    assert width.rate == pytest.approx(1250e6, rel=0.05)


def test_a_link_that_two_can_fill_stays_with_two_after_one_try() -> None:
    width = RangeConcurrency(most=10_000)
    seen: list[int] = []

    def rate(ranges: int) -> float:
        seen.append(ranges)
        return 6e6

    end_s = run(width, rate, HOLD_S)
    assert width.now == FEWEST
    assert seen.count(2 * FEWEST) <= LOOK_S / 0.05 + 1
    seen.clear()
    end_s = run(width, rate, 1.5 * HOLD_S, end_s)  # the second try, and a longer rest
    tries = seen.count(2 * FEWEST)
    assert 0 < tries <= LOOK_S / 0.05 + 1
    assert width.now == FEWEST


def test_it_grows_when_each_connection_becomes_slower() -> None:
    width = RangeConcurrency(most=10_000)
    end_s = run(width, lambda _: 100e6, 5 * LOOK_S)
    assert width.now == FEWEST
    run(width, lambda ranges: ranges * 10e6, 2 * HOLD_S, end_s)
    assert width.now == MOST


@pytest.mark.parametrize("pieces", [0, 1, 2, 3])
def test_a_small_model_never_has_more_ranges_than_pieces(pieces: int) -> None:
    width = RangeConcurrency(most=pieces)
    run(width, lambda ranges: ranges * 1e6, 10 * LOOK_S)
    assert 1 <= width.now <= max(1, pieces)


def test_who_has_the_planned_rate_takes_nothing_from_others() -> None:
    width, now_s = RangeConcurrency(most=10_000), 0.0
    for _ in range(400):
        now_s += 0.05
        width.arrived(int(width.now * 1e6 * 0.05), now_s, expected_rate=2.1e6)
        assert width.now == FEWEST
    for _ in range(400):  # the plan counts on more: now it is worth a try
        now_s += 0.05
        width.arrived(int(width.now * 1e6 * 0.05), now_s, expected_rate=8e6)
    assert width.now == 4 * FEWEST
