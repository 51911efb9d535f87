"""What the run's notes say of a job's steps."""

from __future__ import annotations

from paceline.wire.training import RankEvent
from tasks.train import alerts_of, stragglers_of


def step(**data: object) -> RankEvent:
    return RankEvent(event="step", rank=1, attempt=1, step=40, data=data)


def test_alerts_and_stragglers_become_lines() -> None:
    alert = {"name": "data-starvation", "raised": True, "message": "31.0% of the time"}
    event = step(alerts=[alert, alert | {"raised": False}], stragglers={"3": 2.04})
    assert alerts_of(event) == [
        "rank 1, step 40: data-starvation raised: 31.0% of the time",
        "rank 1, step 40: data-starvation cleared: 31.0% of the time",
    ]
    assert stragglers_of(event) == {
        "3": "rank 3 is a straggler: 2.0 times as long as the others a step"
    }


def test_a_step_without_them_says_nothing() -> None:
    assert alerts_of(step(loss=2.0)) == []
    assert stragglers_of(step(loss=2.0)) == {}
