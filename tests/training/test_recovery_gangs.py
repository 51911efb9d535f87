"""Gangs on played nodes and a played clock: who is at fault, and what is done about it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.config import GuardSettings
from paceline.errors import Cancelled, ServiceUnavailable
from paceline.training import Deadlines, GangMember, GangResult, GangSupervisor
from paceline.training.launcher import (
    CANCEL_GRACE_S,
    NodeMessage,
    attempt as attempts,
    gang as gangs_module,
    served_attempt,
)

STOPPED = 143
PREFECT_KILLS_S = 30.0  # after its SIGTERM


class Nodes:
    """Two nodes with a rank each, that do as they are told; what they do not is set from outside.

    ``at`` are things that happen once so many seconds have passed.
    """

    def __init__(self) -> None:
        self.now = 1000.0
        self.words: deque[NodeMessage] = deque()
        self.told: list[tuple[str, dict[str, Any]]] = []
        self.dropped: list[str] = []
        self.away: set[str] = set()
        self.deaf: dict[str, str] = {}  # worker → the order it does not take
        self.mute: set[str] = set()  # takes orders, does nothing
        self.stubborn: set[str] = set()  # its ranks are killed at their grace's end
        self.at: list[tuple[float, Callable[[], None]]] = []
        self.running: dict[str, list[int]] = {}
        self.stderr: dict[str, str] = {}  # worker → what its ranks leave
        self.attempt = 0

    def say(self, worker: str, **line: Any) -> None:
        self.words.append(NodeMessage(worker, line))

    def ends(self, worker: str, code: int, *, killed: bool = False) -> None:
        for rank in self.running.pop(worker, []):
            self.say(
                worker, launcher="ended", attempt=self.attempt, rank=rank, code=code, killed=killed,
                stderr=self.stderr.get(worker, ""),
            )  # fmt: skip
        self.say(worker, launcher="over", attempt=self.attempt)

    def later(self, seconds: float, do: Callable[[], None]) -> None:
        self.at.append((self.now + seconds, do))

    # -- the port

    def send_all(self, orders: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
        unreported = {}
        for worker, order in orders.items():
            self.told.append((worker, dict(order)))
            if self.deaf.get(worker) == order["do"]:
                unreported[worker] = "it does not read"
            elif worker not in self.mute:
                self._execute_order(worker, order)
        return unreported

    def _execute_order(self, worker: str, order: Mapping[str, Any]) -> None:
        if order["do"] == "store":
            self.say(worker, launcher="store", host="h", port=1)
        elif order["do"] == "start":
            self.attempt = order["attempt"]
            self.running[worker] = [each["rank"] for each in order["ranks"]]
            self.say(worker, launcher="started", attempt=self.attempt, pids={})
        elif order["do"] == "stop" and worker in self.running:
            if worker in self.stubborn:
                self.later(order["grace_s"], lambda: self.ends(worker, -9, killed=True))
            elif order["grace_s"]:
                self.ends(worker, STOPPED)
            else:
                self.ends(worker, -9, killed=True)

    def receive(self, timeout_s: float) -> Sequence[NodeMessage]:
        self.now += timeout_s
        for due, do in [each for each in self.at if each[0] <= self.now]:
            self.at.remove((due, do))
            do()
        for worker in self.running:
            if worker not in self.mute:
                self.say(worker, launcher="beat", attempt=self.attempt, ranks={})
        found = list(self.words)
        self.words.clear()
        return found

    def host(self, worker_id: str) -> str:
        return worker_id

    def start(self, worker_id: str) -> bool:
        if worker_id in self.away:
            return False
        self.say(worker_id, launcher="ready")
        return True

    def drop(self, worker_id: str) -> None:
        self.dropped.append(worker_id)
        self.running.pop(worker_id, None)


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Nodes:
    played = Nodes()
    clock = SimpleNamespace(monotonic=lambda: played.now)
    monkeypatch.setattr(attempts, "time", clock)
    monkeypatch.setattr(gangs_module, "time", clock)
    monkeypatch.setattr(served_attempt, "time", clock)
    return played


def run(gangs: GangSupervisor, attempt: int = 1, on_event: Any = None) -> GangResult:
    members = [GangMember("a", 0), GangMember("b", 1)]
    return gangs.run_gang(members, "{}", attempt, on_event)


def test_a_gang_without_nodes_waits_for_one_and_then_for_the_rest(nodes: Nodes) -> None:
    nodes.away = {"a", "b"}
    gangs = GangSupervisor(nodes, Deadlines(), node_wait_s=600.0)
    nodes.later(300.0, lambda: nodes.away.discard("a"))
    nodes.later(310.0, lambda: nodes.away.discard("b"))
    assert gangs.prepare(["a", "b"]) == {"a", "b"}
    assert 1310 <= nodes.now < 1312


def test_a_gang_without_any_node_gives_up_after_its_wait(nodes: Nodes) -> None:
    nodes.away = {"a", "b"}
    gangs = GangSupervisor(nodes, Deadlines(), node_wait_s=600.0)
    assert gangs.prepare(["a", "b"]) == set()
    assert 1600 < nodes.now < 1640


def stops(nodes: Nodes) -> list[tuple[str, float]]:
    return [(at, order["grace_s"]) for at, order in nodes.told if order["do"] == "stop"]


def both_end(nodes: Nodes, code: int = 0) -> Callable[[], None]:
    return lambda: [nodes.ends(each, code) for each in ("a", "b")] and None


def test_a_driver_that_was_stopped_blames_no_node_for_its_own_silence(nodes: Nodes) -> None:
    def stopped() -> None:  # SIGSTOP, SIGCONT: the clock went on, and nothing was read
        nodes.now += 60.0
        nodes.words.clear()

    nodes.later(2.0, stopped)
    nodes.later(65.0, both_end(nodes))
    assert run(GangSupervisor(nodes, Deadlines())).ok
    assert nodes.dropped == []


def test_a_node_that_falls_silent_is_lost_and_ended(nodes: Nodes) -> None:
    nodes.later(2.0, lambda: nodes.mute.add("b"))
    found = run(GangSupervisor(nodes, Deadlines()))
    assert (found.failed_worker, found.lost) == ("b", {"b"})
    assert "silent" in found.reason
    assert nodes.dropped == ["b"]


@pytest.mark.parametrize("order", ["start", "store"])
def test_a_node_that_takes_no_order_is_the_one_that_is_lost(nodes: Nodes, order: str) -> None:
    guilty = "b" if order == "start" else "a"
    nodes.deaf[guilty] = order
    gangs = GangSupervisor(nodes, Deadlines())
    found = run(gangs)
    assert (found.failed_worker, found.lost) == (guilty, {guilty})
    assert "does not read" in found.reason
    assert nodes.dropped == [guilty], "nothing goes on there unseen"
    assert nodes.running == {}, "the whole gang or none of it"
    nodes.deaf.clear()
    nodes.later(2.0, both_end(nodes))
    assert run(gangs, attempt=2).ok, "and it can be used again"


def test_a_launcher_that_starts_no_ranks_is_blamed_and_not_the_first_node(nodes: Nodes) -> None:
    gangs = GangSupervisor(nodes, Deadlines())
    gangs.prepare(["a", "b"])
    nodes.mute.add("b")
    found = run(gangs)
    assert (found.failed_worker, found.lost) == ("b", {"b"})
    assert "did not start its ranks within 30 s" in found.reason
    assert nodes.running == {}


def test_all_nodes_that_are_away_are_known_after_one_attempt(nodes: Nodes) -> None:
    nodes.away = {"a", "b"}
    found = run(GangSupervisor(nodes, Deadlines()))
    assert found.lost == {"a", "b"}
    assert "node is away" in found.reason


def test_a_launchers_end_is_reported_with_its_reason(nodes: Nodes) -> None:
    nodes.start = lambda at: (
        nodes.words.append(NodeMessage(at, lost="ImportError: no torch")) or True
    )
    assert "no torch" in run(GangSupervisor(nodes, Deadlines())).reason


def test_a_rank_that_stops_before_the_first_save_stops_the_others(
    nodes: Nodes,
) -> None:
    gangs = GangSupervisor(nodes, Deadlines(), grace_s=5.0)
    gangs.watch_for_preemption("", 12.0)
    nodes.later(2.0, lambda: nodes.ends("b", STOPPED))  # SIGTERM while it loaded; a waits to join
    found = run(gangs)
    assert found.stopped, "and not found hanging a minute later"
    assert ("a", 12.0) in stops(nodes)


def test_a_notice_to_one_node_stops_all_within_the_grace(nodes: Nodes) -> None:
    gangs = GangSupervisor(nodes, Deadlines())
    gangs.watch_for_preemption("http://x", 12.0)
    nodes.later(2.0, lambda: nodes.say("b", launcher="preempted", reason="taken back"))
    found = run(gangs)
    assert found.stopped
    assert found.preempted == {"b"}
    assert dict(stops(nodes)) == {"a": 12.0, "b": 12.0}


def test_who_does_not_stop_in_time_is_overdue_and_no_failure(nodes: Nodes) -> None:
    gangs = GangSupervisor(nodes, Deadlines(checkpoint_s=40.0))
    nodes.stubborn = {"a", "b"}
    nodes.later(2.0, lambda: gangs.request_stop("nodes returned"))
    found = run(gangs)
    assert found.overdue
    assert not found.ok
    assert "grace of 40 s" in found.reason, "a save may take its time: nobody is in a hurry"


def test_a_cancel_shortens_the_grace_and_names_the_unsaved_ranks(nodes: Nodes) -> None:
    cancel = threading.Event()
    gangs = GangSupervisor(nodes, Deadlines(), cancel=cancel, grace_s=5.0)
    nodes.stubborn = {"b"}
    nodes.later(2.0, lambda: gangs.request_stop("nodes returned"))
    nodes.later(4.0, cancel.set)
    with pytest.raises(Cancelled, match=r"ranks \[1\] had not saved within 5 s"):
        run(gangs)
    assert nodes.running == {}
    assert ("b", 5.0) in stops(nodes)


MAIN = 'File "/x/paceline/training/loop/rank.py", line 9 in run_rank'
REDUCING = 'File "/x/torch/distributed/distributed_c10d.py", line 3 in all_reduce'
READING = 'File "/home/user/task.py", line 7 in inputs'


@pytest.mark.parametrize(
    ("first", "second", "guilty"),
    [(REDUCING, READING, 1), (READING, REDUCING, 0), (REDUCING, REDUCING, 0)],
)
def test_of_ranks_that_look_alike_the_one_outside_a_collective_hung(
    nodes: Nodes, first: str, second: str, guilty: int
) -> None:
    def stacks(top: str) -> str:
        others = (
            'Thread 0x00aa (most recent call first):\n  File "/x/writer.py", line 1 in _pulse\n'
        )
        return f"{others}\nCurrent thread 0x00bb (most recent call first):\n  {top}\n  {MAIN}\n"

    nodes.stderr = {"a": stacks(first), "b": stacks(second)}
    state = {"phase": "evaluating", "step": 4, "stopped": False, "silent_s": 0.1}
    since = {"a": 20.1, "b": 20.0}  # rank 0 came first, by nothing
    nodes.later(
        1.0,
        lambda: [
            nodes.say(
                each,
                launcher="beat",
                attempt=1,
                ranks={str(rank): state | {"since_s": since[each]}},
            )
            for rank, each in enumerate("ab")
        ],
    )
    found = run(GangSupervisor(nodes, Deadlines(checkpoint_s=20.0)))
    assert found.hung
    assert found.failed_rank == guilty
    assert f"rank {guilty}" in found.reason and "phase 'evaluating' at step 4" in found.reason


def test_a_cancel_is_over_long_before_its_caller_kills_us(nodes: Nodes) -> None:
    cancel = threading.Event()
    grace_s = min(GuardSettings().grace_s, CANCEL_GRACE_S)
    gangs = GangSupervisor(nodes, Deadlines(), cancel=cancel, grace_s=grace_s)
    nodes.stubborn = {"b"}  # saves for its whole grace
    nodes.later(2.5, lambda: nodes.mute.add("a"))  # a node that freezes
    nodes.later(3.0, cancel.set)
    began = nodes.now
    with pytest.raises(Cancelled, match="had not saved"):
        run(gangs)
    took = nodes.now - began - 3.0
    assert took <= PREFECT_KILLS_S - 10.0, "the rest is for nodes and the record"
    assert nodes.dropped == ["a"]


def test_a_listener_that_fails_leaves_no_rank(nodes: Nodes) -> None:
    def listener(line: dict[str, Any]) -> None:
        nodes.say("a", event="step")  # there is always more to receive
        raise RuntimeError("disk full")

    nodes.later(2.0, lambda: nodes.say("a", event="step"))
    with pytest.raises(RuntimeError, match="disk full"):
        run(GangSupervisor(nodes, Deadlines()), on_event=listener)
    assert nodes.running == {}


def test_nodes_that_do_not_answer_are_given_up(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unconfirmed(timeout_s: float) -> Sequence[NodeMessage]:
        raise ServiceUnavailable("the scheduler is away")

    nodes.later(2.0, lambda: monkeypatch.setattr(nodes, "receive", unconfirmed))
    with pytest.raises(ServiceUnavailable):
        run(GangSupervisor(nodes, Deadlines()))
    assert set(nodes.dropped) == {"a", "b"}


def test_a_late_word_about_the_store_of_another_head_is_not_taken(nodes: Nodes) -> None:
    nodes.later(0.0, lambda: nodes.say("b", launcher="store", host="elsewhere", port=99))
    nodes.later(2.0, both_end(nodes))
    assert run(GangSupervisor(nodes, Deadlines())).ok
    started = [order for _, order in nodes.told if order["do"] == "start"]
    env = [each["env"] for order in started for each in order["ranks"]]
    assert {(each["MASTER_ADDR"], each["MASTER_PORT"]) for each in env} == {("h", "1")}


# A parameter server: ranks 0 and 1 on nodes a and b serve, the store is on c.


def serve(nodes: Nodes) -> GangResult:
    members = [GangMember(node, rank) for rank, node in enumerate("abcd")]
    gangs = GangSupervisor(nodes, Deadlines(checkpoint_s=40.0))
    return gangs.run_gang(members, "{}", 1, None, served=True)


@pytest.mark.parametrize("server", ["a", "b"])
def test_a_gang_goes_on_without_one_of_its_servers(nodes: Nodes, server: str) -> None:
    nodes.later(2.0, lambda: nodes.ends(server, -9))
    nodes.later(60.0, lambda: [nodes.ends(each, 0) for each in "abcd"] and None)
    assert serve(nodes).ok
    assert stops(nodes) == []


def test_a_server_that_hangs_is_killed_for_the_other_one(nodes: Nodes) -> None:
    frozen = {
        "phase": "step", "step": 3, "since_s": 9.0, "running_s": 9.0, "silent_s": 9.0,
        "stopped": True,
    }  # fmt: skip
    nodes.later(2.0, lambda: nodes.say("a", launcher="beat", attempt=1, ranks={"0": frozen}))
    nodes.later(3.0, lambda: nodes.ends("a", -9))
    nodes.later(60.0, lambda: [nodes.ends(each, 0) for each in "bcd"] and None)
    assert serve(nodes).ok
    killed = [(at, each["rank"]) for at, each in nodes.told if each["do"] == "signal"]
    assert set(killed) == {("a", 0)}


def test_for_a_lost_worker_the_leader_saves_and_the_attempt_ends(nodes: Nodes) -> None:
    nodes.later(2.0, lambda: nodes.ends("d", -9))
    found = serve(nodes)
    assert (found.ok, found.failed_rank, found.hung) == (False, 3, False)
    assert "killed by signal 9" in found.reason
    assert {at: grace for at, grace in stops(nodes) if grace}.items() >= {("a", 40.0), ("b", 40.0)}
    assert found.exit_codes == {0: STOPPED, 1: STOPPED, 2: STOPPED, 3: -9}


def test_for_the_lost_store_the_leader_saves_and_the_attempt_ends(nodes: Nodes) -> None:
    nodes.later(2.0, lambda: nodes.words.append(NodeMessage("c", lost="killed")))
    found = serve(nodes)
    assert (found.ok, found.failed_rank, found.lost) == (False, 2, {"c"})
    assert "the gang's store lay there" in found.reason
    assert found.exit_codes[0] == found.exit_codes[1] == STOPPED


def test_without_both_servers_the_attempt_ends_at_once(nodes: Nodes) -> None:
    nodes.later(2.0, lambda: nodes.ends("a", -9))
    nodes.later(3.0, lambda: nodes.ends("b", -9))
    found = serve(nodes)
    assert (found.ok, found.failed_rank) == (False, 1)
    assert "no rank is left that holds the state" in found.reason


def test_a_notice_stops_a_gang_that_lost_a_server(nodes: Nodes) -> None:
    nodes.later(2.0, lambda: nodes.ends("b", -9))
    nodes.later(5.0, lambda: nodes.say("d", launcher="preempted", reason="taken back"))
    found = serve(nodes)
    assert found.stopped and found.preempted == {"d"}
