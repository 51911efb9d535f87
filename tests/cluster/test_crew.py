"""Questions and answers of a crew, played: late answers and our own pauses lose nobody."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.cluster import (
    Crew,
    HeldNodes,
    Member,
    Order,
    ProcessReport,
    pinned_calls as crews,
    worker_processes as remote,
)
from paceline.cluster.worker_processes import Share
from tests.cluster.conftest import eventually


class Played:
    """A fleet whose nodes answer when they are told to."""

    def __init__(self) -> None:
        self.questions: list[dict[str, int]] = []
        self.answers: list[Any] = []
        self.ended: list[str] = []
        self.waited_s = 0.0

    def _calls(self, *, slot: bool) -> Played:
        return self

    def submit(self, key: str, address: str, fn: Any, *given: Any) -> None:
        if fn is remote.poll:
            self.questions.append(given[0])
        elif fn is remote.end:
            self.ended += given[0]

    def some(self, timeout_s: float) -> dict[str, Any]:
        return {"tcp://a": self.answers.pop(0)} if self.answers else {}

    def gather(self, timeout_s: float) -> dict[str, Any]:
        self.waited_s += timeout_s
        return {}

    def give_up(self) -> list[str]:
        return []


def member(process_id: str) -> Member:
    argv = (sys.executable, "-S", "-c", "import time; time.sleep(600)")
    order = Order(process_id=process_id, argv=argv, env={}, input_json="", directory="/tmp")
    return Member("a", order, "tcp://a")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(crews.time, "monotonic", lambda: now[0])
    return now


@pytest.mark.parametrize(
    "answer", [{"old": ProcessReport(exit_code=0)}, LookupError("no such process")]
)
def test_an_answer_about_an_ended_process_leaves_its_successor_alone(
    clock: list[float], answer: Any
) -> None:
    fleet = Played()
    crew = Crew(fleet, [member("old")])
    crew.follow(0.0)
    crew.members[:] = [member("new")]  # dropped and started again while the question was out
    fleet.answers.append(answer)
    assert crew.follow(0.0) == []
    assert not crew.members[0].over
    crew.follow(0.0)
    assert [list(each) for each in fleet.questions] == [["old"], ["new"]]


def test_who_did_not_listen_does_not_take_silence_for_death(clock: list[float]) -> None:
    fleet = Played()
    crew = Crew(fleet, [member("one")])
    crew.follow(0.0)
    clock[0] += 60.0  # SIGSTOP, SIGCONT
    crew.follow(0.0)
    assert not crew.members[0].over
    for _ in range(80):
        clock[0] += 0.25
        crew.follow(0.0)
    assert "not answered" in crew.members[0].lost, "and a node that is silent is found all the same"


@pytest.mark.usefixtures("clock")
def test_nodes_that_are_cut_off_together_are_dropped_without_waiting() -> None:
    fleet = Played()
    nodes = HeldNodes(fleet, "gang-1", ["true"], {})
    cut_off = [member(f"process-{number}") for number in range(20)]
    for number, each in enumerate(cut_off):
        each.worker_id = f"node-{number}"
        nodes._members[each.worker_id] = each
        nodes._following.members.append(each)
        each.lost = "the node has not answered for 15 s"
    received = nodes.receive(0.0)
    assert len([each for each in received if each.lost]) == 20
    assert len(fleet.ended) == 20, "each is told to end what runs there, if it hears"
    assert fleet.waited_s == 0, "meanwhile the others' leases would lapse"


@pytest.fixture
def own_node(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process as a node: its gate and its processes, and nothing of it left."""
    monkeypatch.setattr(remote, "_claims", {})
    yield
    remote.end(list(remote._processes), 0.0)


@pytest.mark.usefixtures("own_node")
def test_a_lapsed_gangs_processes_end_before_the_next_gang_gets_the_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = Order(
        process_id="left",
        argv=(sys.executable, "-S", "-c", "import time; time.sleep(600)"),
        env={},
        input_json="",
        directory=str(tmp_path),
        gang_id="first",
    )
    assert remote.claim("first") is None
    pid = remote.launch(order)
    assert remote.claim("second") == "first"
    lapsed = replace(remote._claims["first"], until=time.monotonic() - 1.0)
    monkeypatch.setitem(remote._claims, "first", lapsed)
    assert remote.claim("second") == "first", "what it started still runs: it may still write"
    eventually(lambda: remote.claim("second") is None)
    assert not Path(f"/proc/{pid}").exists()


@pytest.mark.usefixtures("own_node")
def test_gangs_share_a_node_by_its_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    def takes(gang: str, slots: int, work: str) -> str | None:
        return remote.claim(gang, Share(slots, 8, work))

    def devices(gang: str, visible: str | None = None) -> str | None:
        return remote._devices(remote._claims[gang], visible).get("CUDA_VISIBLE_DEVICES")

    assert takes("a", 3, "job-a") is None
    assert takes("b", 4, "job-b") is None
    assert takes("c", 2, "job-c") == "a", "one is free"
    assert takes("c", 1, "job-a") == "a", "both would write the same files"
    assert takes("c", 1, "job-c") is None
    assert remote.claim("whole") == "a"
    assert [devices(each) for each in "abc"] == ["0,1,2", "3,4,5,6", "7"]
    assert devices("b", "GPU-0,GPU-1,GPU-2,GPU-3,GPU-4") == "GPU-3,GPU-4", "of those of the node"
    remote.release("a")
    assert takes("d", 2, "job-d") is None
    assert devices("d") == "0,1"
    for each in "bcd":
        remote.release(each)
    assert takes("all", 8, "job-all") is None
    assert devices("all") is None, "what the node shows is its own"
    assert takes("e", 1, "job-e") == "all"
    remote.release("all")
    assert remote.claim("whole") is None
    assert takes("e", 1, "job-e") == "whole"


@pytest.mark.usefixtures("own_node")
@pytest.mark.parametrize(("slots", "shown"), [(1, "4"), (2, "4,6"), (3, "1,4,6")])
def test_on_a_node_of_two_kinds_a_slot_is_a_card_number_of_one_kind(
    tmp_path: Path, slots: int, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cards = {"CUDA_VISIBLE_DEVICES": "1,4,6", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    monkeypatch.setattr(remote, "_like_cards", lambda: cards)
    if slots < 3:
        remote.claim("other", Share(1, 3, "job-other"))
    assert remote.claim("gang", Share(slots, 3, "job")) is None
    names = "[os.environ[each] for each in ('CUDA_VISIBLE_DEVICES', 'CUDA_DEVICE_ORDER')]"
    order = Order(
        process_id="shows",
        argv=(sys.executable, "-c", f"import os; print(*{names})"),
        env={},
        input_json="",
        directory=str(tmp_path),
        gang_id="gang",
    )
    remote.launch(order)
    assert remote.poll({"shows": 0}, 20.0)["shows"].lines == (f"{shown} PCI_BUS_ID",)


@pytest.mark.usefixtures("own_node")
def test_a_process_sees_the_accelerators_that_its_gang_claimed(tmp_path: Path) -> None:
    remote.claim("other", Share(2, 4, "job-other"))
    remote.claim("gang", Share(1, 4, "job"))
    order = Order(
        process_id="shows",
        argv=(sys.executable, "-c", "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])"),
        env={},
        input_json="",
        directory=str(tmp_path),
        gang_id="gang",
    )
    remote.launch(order)
    report = remote.poll({"shows": 0}, 20.0)["shows"]
    assert report.lines == ("2",)
