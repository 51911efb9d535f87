"""What the run's notes say of a job's steps."""

from __future__ import annotations

from paceline.schemas import RankEvent
from paceline.tasks.figures import Figures
from paceline.tasks.train import _follow, alerts_of, checkpoint_alerts_of, stragglers_of


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


def test_a_save_that_failed_is_told_once_for_the_whole_gang() -> None:
    told = {"checkpoint_alerts": ["checkpoint was not saved: disk is full"]}
    first = RankEvent(event="step", rank=0, attempt=1, step=40, data=dict(told))
    assert checkpoint_alerts_of(first) == ["step 40: checkpoint was not saved: disk is full"]
    assert checkpoint_alerts_of(step(**told)) == []


def test_a_step_without_them_says_nothing() -> None:
    assert alerts_of(step(loss=2.0)) == checkpoint_alerts_of(step(loss=2.0)) == []
    assert stragglers_of(step(loss=2.0)) == {}


class Notes:
    """A run that keeps what it is told."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, line: str) -> None:
        self.notes.append(line)

    def tell(self, *_: object) -> None:
        """Hear how far it is."""


def test_a_failed_ranks_note_says_why_and_a_stopped_one_is_no_failure() -> None:
    run = Notes()
    on_event = _follow(run, 10, Figures(lambda _: None, lambda _: None))  # type: ignore[arg-type]
    for code, message in (("Stopped", "stopped, state saved"), ("PeerLost", "a peer is gone")):
        data = {"code": code, "message": message}
        on_event(RankEvent(event="failed", rank=1, attempt=1, step=4, data=data))
    assert run.notes == ["rank 1 failed at step 4: a peer is gone"]
