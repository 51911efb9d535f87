"""Max-min rates against a slow, plain reference."""

from __future__ import annotations

from math import inf

import numpy as np
from hypothesis import given, settings, strategies as st

from paceline.simulation import max_min_rates

STEP = 1e-9


def filled(
    capacity: list[float], uses: list[list[int]], leader: list[int], stopped: list[bool]
) -> list[float]:
    """Raise all rates together; a full resource, or the leader's rate, is where a flow stays."""
    flows = range(len(leader))
    rate = [0.0 for _ in flows]
    frozen = list(stopped)
    while not all(frozen):
        level = inf
        for number, most in enumerate(capacity):
            mine = [f for f in flows for each in uses if each[f] == number]
            rising = [f for f in mine if not frozen[f]]
            if rising and most < inf:
                settled = sum(rate[f] for f in mine if frozen[f])
                level = min(level, (most - settled) / len(rising))
        for f in flows:
            if not frozen[f] and leader[f] >= 0 and frozen[leader[f]]:
                level = min(level, rate[leader[f]])
        for f in flows:
            if not frozen[f]:
                rate[f] = level
        for f in flows:
            if frozen[f]:
                continue
            for each in uses:
                most = capacity[each[f]]
                total = sum(rate[g] for g in flows for row in uses if row[g] == each[f])
                if most < inf and total >= most - STEP:
                    frozen[f] = True
            if leader[f] >= 0 and frozen[leader[f]] and rate[leader[f]] <= rate[f] + STEP:
                frozen[f] = True
    return rate


@st.composite
def networks(draw: st.DrawFn) -> tuple[list[float], list[list[int]], list[int], list[bool]]:
    resources = draw(st.integers(1, 5))
    flows = draw(st.integers(1, 8))
    number = st.integers(1, resources)
    capacity = [inf, *draw(st.lists(st.integers(1, 20), min_size=resources, max_size=resources))]
    first = draw(st.lists(number, min_size=flows, max_size=flows))
    second = draw(st.lists(st.integers(0, resources), min_size=flows, max_size=flows))
    second = [0 if b == a else b for a, b in zip(first, second, strict=True)]
    leader = [draw(st.integers(-1, f - 1)) for f in range(flows)]  # no cycles
    stopped = draw(st.lists(st.booleans(), min_size=flows, max_size=flows))
    return [float(each) for each in capacity], [first, second], leader, stopped


@settings(max_examples=40, deadline=None)
@given(networks())
def test_rates_are_those_of_progressive_filling(
    network: tuple[list[float], list[list[int]], list[int], list[bool]],
) -> None:
    capacity, uses, leader, stopped = network
    rates = max_min_rates(np.array(capacity), np.array(uses), np.array(leader), np.array(stopped))
    assert np.allclose(rates, filled(capacity, uses, leader, stopped), atol=1e-6)


def test_a_slow_head_slows_everybody_behind_it_and_nobody_else() -> None:
    capacity = np.array([inf, 1.0, 10.0, 10.0, 10.0, 10.0])
    uses = np.array([[1, 2, 3, 4], [0, 0, 0, 5]])  # three in a line, and one for itself
    rates = max_min_rates(capacity, uses, np.array([-1, 0, 1, -1]), np.zeros(4, np.bool_))
    assert rates.tolist() == [1.0, 1.0, 1.0, 10.0]
