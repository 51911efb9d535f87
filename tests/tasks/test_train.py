"""What the run's notes say of a job's steps."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.config import LoraSettings, TrainingSettings
from paceline.errors import InvalidInput, MissingExtra, WorkerLost
from paceline.schemas import JobPlacement, RankEvent
from paceline.tasks._support.figures import Figures
from paceline.tasks.train import (
    _follow,
    accelerators_of,
    alerts_of,
    checkpoint_alerts_of,
    place_ranks,
    slots_of,
    stragglers_of,
)
from paceline.training.launcher import NodePool
from tests.tasks.test_judging_gang import node


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


@pytest.mark.parametrize(
    ("asked", "nodes", "placed"),
    [
        ({"ranks": 2}, "a b c", (1, "a b")),
        ({"ranks": 4, "ranks_per_node": 2}, "a b c", (2, "a b")),
        ({"ranks": 4, "ranks_per_node": 2, "guard": {"spares": 1}}, "a b c", (2, "a b c")),
        ({"ranks": 4}, "a b8 c8", (8, "b8")),  # one for each accelerator, and none on a CPU
        ({"ranks": 5}, "a4 b1 c", (1, "")),
        ({"ranks": 5}, "a4 b4 c", (4, "a4 b4")),
        ({"ranks": 4}, "a b c", (1, "")),
    ],
)
def test_ranks_go_to_the_nodes_with_the_most_accelerators(
    asked: dict[str, Any], nodes: str, placed: tuple[int, str]
) -> None:
    settings = TrainingSettings.model_validate(asked)
    fleet = [node(each, int(each[1:] or 0)) for each in nodes.split()]
    if not placed[1]:
        with pytest.raises(InvalidInput, match=r"not enough nodes.*wanted [45] ranks"):
            place_ranks(settings, fleet)
        return
    decided, held = place_ranks(settings, fleet)
    assert (decided.ranks_per_node, " ".join(held)) == placed


def test_a_job_is_charged_for_accelerators_and_for_nodes_without() -> None:
    fleet = [node("a", 8), node("b", 8), node("c"), node("d", 8)]
    assert accelerators_of(fleet, ["a", "b", "c"], None) == {"H100": 16, "cpu": 1}
    part = JobPlacement(hosts={"a": 8, "b": 3}, slots={"a": 8, "b": 8}, level="rack")
    assert accelerators_of(fleet, ["a", "b"], part) == {"H100": 11}, "those that it held"
    whole = part.model_copy(update={"slots": {}})
    assert accelerators_of(fleet, ["a", "b"], whole) == {"H100": 16}, "Slurm gives whole nodes"


def test_ranks_go_where_the_queue_has_placed_them() -> None:
    placement = JobPlacement(
        hosts={"b": 1, "a": 8, "c": 4}, slots={"a": 8, "b": 8, "c": 8}, level="rack"
    )
    fleet = [node(each, 8) for each in "abcd"]
    settings = TrainingSettings.model_validate({"ranks": 13})
    decided, held = place_ranks(settings, fleet, placement)
    assert (decided.ranks_per_node, held) == (8, ["a", "c", "b"])
    assert slots_of(placement) == {"a": (8, 8), "b": (1, 8), "c": (4, 8)}
    assert slots_of(placement.model_copy(update={"slots": {}})) == {}, "of an earlier release"
    pool = NodePool(held, decided, placement.hosts)
    assert [each.worker_id for each in pool.assignment({}).members] == [*"aaaaaaaa", *"cccc", "b"]
    with pytest.raises(WorkerLost, match=r"no worker.*c"):
        place_ranks(settings, fleet[:2], placement)


class Notes:
    """A run that keeps what it is told."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.job = None

    def warn(self, line: str) -> None:
        self.notes.append(line)

    def report(self, *_: object) -> None:
        """Hear how far it is."""


def test_a_failed_ranks_note_says_why_and_a_stopped_one_is_no_failure() -> None:
    run = Notes()
    on_event = _follow(run, 10, Figures(lambda _: None, lambda _: None))  # type: ignore[arg-type]
    for code, message in (("Stopped", "stopped, state saved"), ("PeerLost", "a peer is gone")):
        data = {"code": code, "message": message}
        on_event(RankEvent(event="failed", rank=1, attempt=1, step=4, data=data))
    assert run.notes == ["rank 1 failed at step 4: a peer is gone"]


def test_a_node_that_lacks_the_extra_is_named_before_a_rank_starts() -> None:
    bare = node("b")
    bare = bare.model_copy(update={"machine": bare.machine.model_copy(update={"extras": ()})})
    settings = TrainingSettings.model_validate({"ranks": 2})
    with pytest.raises(MissingExtra, match=r"paceline\[train\].*b") as refused:
        place_ranks(settings, [node("a"), bare])
    assert "\n" not in refused.value.one_line()
    assert place_ranks(settings, [node("a"), node("c"), bare])[1] == ["a", "c"]
    adapted = settings.model_copy(update={"lora": LoraSettings()})
    with pytest.raises(MissingExtra, match=r"no extra lora.*paceline\[lora\].*a, c"):
        place_ranks(adapted, [node("a"), node("c")])
