"""Gangs and processes on nodes: together or not at all, and nothing is left of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from paceline.errors import Cancelled, Conflict, WorkerLost
from paceline.fleet import Fleet, GangMember, GangResult
from paceline.profile import Runtime
from tests.fleet.conftest import eventually

RANK = Path(__file__).with_name("stand_in_rank.py")
ARGV = (sys.executable, "-S", str(RANK))


class Heard:
    """Collects events; knows the pids that the ranks named."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.times: list[float] = []

    def __call__(self, event: dict[str, Any]) -> None:
        self.events.append(event)
        self.times.append(time.monotonic())

    def started(self) -> dict[int, dict[str, Any]]:
        return {each["rank"]: each["data"] for each in self.events if each["event"] == "started"}

    def pids(self) -> list[int]:
        named = self.started().values()
        return [pid for each in named for pid in (each["pid"], each["child"]) if pid]


def gang(
    fleet: Fleet,
    orders: dict[str, dict[str, Any]],
    heard: Heard,
    *,
    nodes: tuple[str, ...] = ("node-0", "node-1", "node-2"),
    start_deadline_s: float = 20.0,
    silence_deadline_s: float = 20.0,
    **more: Any,
) -> GangResult:
    members = [
        GangMember(node, rank, ARGV, {}, json.dumps(orders)) for rank, node in enumerate(nodes)
    ]
    return fleet.run_gang(
        members,
        on_event=heard,
        start_deadline_s=start_deadline_s,
        silence_deadline_s=silence_deadline_s,
        attempt=3,
        **more,
    )


def gone(heard: Heard) -> bool:
    return not any(psutil.pid_exists(pid) for pid in heard.pids())


def test_ranks_learn_their_place_and_end_together(connected: Fleet) -> None:
    heard = Heard()
    result = gang(connected, {"0": {"listen": True}, "all": {"lines": 50}}, heard)
    assert result == GangResult(ok=True, exit_codes={0: 0, 1: 0, 2: 0})
    told = heard.started()
    assert {each["WORLD_SIZE"] for each in told.values()} == {"3"}
    assert {each["LOCAL_RANK"] for each in told.values()} == {"0"}
    assert {each["PACELINE_ATTEMPT"] for each in told.values()} == {"3"}
    assert len({(each["MASTER_ADDR"], each["MASTER_PORT"]) for each in told.values()}) == 1
    steps = [each["data"]["number"] for each in heard.events if each["event"] == "step"]
    assert sorted(steps) == sorted([*range(50)] * 2)


def test_one_failed_rank_ends_all_and_is_named(connected: Fleet) -> None:
    heard = Heard()
    orders = {
        "1": {"sleep": 0.5, "fail": "RuntimeError: no loss"},
        "all": {"child": True, "ignore_term": True, "beat_s": 600},
    }
    result = gang(connected, orders, heard)
    assert (result.ok, result.failed_rank, result.failed_worker) == (False, 1, "node-1")
    assert result.reason == "rank 1 on node-1 exited with 1: RuntimeError: no loss"
    assert result.exit_codes[1] == 1
    assert len(heard.pids()) == 5  # three ranks, and the children of two
    assert gone(heard)


def test_a_killed_rank_is_blamed_before_those_it_took_down(connected: Fleet) -> None:
    heard = Heard()
    orders = {"2": {"sleep": 0.3, "kill": True}, "all": {"sleep": 0.3, "fail": "peer reset"}}
    result = gang(connected, orders, heard)
    assert result.failed_rank == 2
    assert "killed by signal 9" in result.reason
    assert gone(heard)


def test_a_hanging_rank_is_found_and_shows_where_it_hangs(connected: Fleet) -> None:
    heard = Heard()
    orders = {"1": {"hang": True}, "all": {"beat_s": 600}}
    result = gang(connected, orders, heard, silence_deadline_s=1.0)
    assert (result.ok, result.failed_rank) == (False, 1)
    assert "hung: no line for" in result.reason
    assert "stand_in_rank.py" in result.stderr_tail  # faulthandler's stacks
    assert gone(heard)


def test_a_stopped_rank_is_blamed_for_the_silence_of_all(connected: Fleet) -> None:
    heard = Heard()
    orders = {"0": {"sleep": 0.4, "stop": True}, "all": {"hang": True}}
    result = gang(connected, orders, heard, silence_deadline_s=1.0)
    assert result.failed_rank == 0
    assert "it is stopped" in result.reason
    assert gone(heard)


def test_a_rank_that_never_speaks_ends_the_gang(connected: Fleet) -> None:
    heard = Heard()
    orders = {"2": {"mute": True}, "all": {"beat_s": 600}}
    result = gang(connected, orders, heard, start_deadline_s=1.5)
    assert result.failed_rank == 2
    assert "said nothing" in result.reason
    assert gone(heard)


def test_a_rank_that_cannot_start_lets_none_start(connected: Fleet) -> None:
    heard = Heard()
    members = [
        GangMember("node-0", 0, ARGV, {}, json.dumps({"all": {"beat_s": 600}})),
        GangMember("node-1", 1, ("/no/such/program",), {}, "{}"),
    ]
    result = connected.run_gang(
        members, on_event=heard, start_deadline_s=20, silence_deadline_s=20, attempt=1
    )
    assert result.failed_rank == 1
    assert "cannot start /no/such/program" in result.reason
    assert gone(heard)


def test_a_lost_node_ends_the_gang_and_its_own_rank(connected: Fleet) -> None:
    heard = Heard()
    worker = connected.run_on("node-2", os.getpid, timeout_s=20)
    killer = threading.Thread(
        target=lambda: (
            eventually(lambda: len(heard.started()) == 3),
            psutil.Process(worker).kill(),
        )
    )
    killer.start()
    result = gang(connected, {"all": {"beat_s": 600, "child": True}}, heard)
    killer.join()
    assert (result.ok, result.failed_rank, result.failed_worker) == (False, 2, "node-2")
    assert "was lost with its node" in result.reason
    eventually(lambda: gone(heard))  # the lost node's own rank dies by its guard
    eventually(lambda: len(connected.nodes()) == 3)


def test_cancel_ends_the_gang(connected: Fleet) -> None:
    heard, cancel = Heard(), threading.Event()

    def on_event(event: dict[str, Any]) -> None:
        heard(event)
        if len(heard.started()) == 3:
            cancel.set()

    members = [
        GangMember(f"node-{rank}", rank, ARGV, {}, json.dumps({"all": {"beat_s": 600}}))
        for rank in range(3)
    ]
    with pytest.raises(Cancelled):
        connected.run_gang(
            members,
            on_event=on_event,
            start_deadline_s=20,
            silence_deadline_s=20,
            attempt=1,
            cancel=cancel,
        )
    assert gone(heard)


def test_two_gangs_take_turns_on_shared_nodes(connected: Fleet) -> None:
    first, second = Heard(), Heard()
    results: list[GangResult] = []
    orders = {"all": {"beat_s": 1.0}}
    threads = [
        threading.Thread(
            target=lambda heard=heard, nodes=nodes: results.append(
                gang(connected, orders, heard, nodes=nodes)
            )
        )
        for heard, nodes in ((first, ("node-0", "node-1")), (second, ("node-1", "node-0")))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [each.ok for each in results] == [True, True]
    earlier, later = sorted((first.times, second.times))
    assert earlier[-1] < later[0]


def test_a_gang_that_cannot_have_its_nodes_in_time_says_who_has_them(connected: Fleet) -> None:
    heard, cancel, cancelled = Heard(), threading.Event(), threading.Event()

    def hold() -> None:
        try:
            gang(connected, {"all": {"beat_s": 600}}, heard, cancel=cancel)
        except Cancelled:
            cancelled.set()

    holder = threading.Thread(target=hold)
    holder.start()
    eventually(lambda: len(heard.started()) == 3)
    with pytest.raises(Conflict, match="taken by another gang: got gang-"):
        gang(connected, {}, Heard(), nodes=("node-1",), start_deadline_s=0.5)
    cancel.set()
    holder.join()
    assert cancelled.is_set()
    assert gone(heard)


def test_a_killed_caller_leaves_no_rank(cluster: Runtime, connected: Fleet) -> None:
    # Its questions stop; the node's lease ends what nobody asks for. Shortened here on the node.
    from paceline.fleet import remote

    def shorten(seconds: float) -> float:
        before, remote.LEASE_S = remote.LEASE_S, seconds
        return before

    before = connected.run_on("node-0", shorten, 2.0, timeout_s=20)
    try:
        code = (
            "import sys\n"
            "from paceline.fleet import Fleet\n"
            "from paceline.profile import load_runtime\n"
            "with Fleet.connect(load_runtime(sys.argv[1])) as fleet:\n"
            "    fleet.run_process('node-0', argv=sys.argv[2:],\n"
            '        input_json=\'{"all": {"child": true, "beat_s": 600}}\', deadline_s=600,\n'
            "        on_event=lambda e: print(e['data'].get('pid'), flush=True))\n"
        )
        caller = subprocess.Popen(
            [sys.executable, "-c", code, str(cluster.state_dir), *ARGV], stdout=subprocess.PIPE
        )
        with caller:
            assert caller.stdout is not None
            pid = int(caller.stdout.readline())
            assert psutil.pid_exists(pid)
            caller.kill()
        eventually(lambda: not psutil.pid_exists(pid))
    finally:
        connected.run_on("node-0", shorten, before, timeout_s=20)


def test_a_process_tells_live_and_returns_its_last_words(connected: Fleet) -> None:
    heard = Heard()
    ended = connected.run_process(
        "node-1",
        argv=ARGV,
        env={"RANK": "4"},
        input_json=json.dumps({"4": {"lines": 3000, "fail": "out of luck"}}),
        on_event=heard,
        deadline_s=30,
    )
    assert (ended.exit_code, ended.ended) == (1, "exited")
    assert ended.stderr_tail.strip() == "out of luck"
    numbers = [each["data"]["number"] for each in heard.events if each["event"] == "step"]
    assert numbers == list(range(3000))
    assert ended.last_line is not None
    assert json.loads(ended.last_line)["data"] == {"number": 2999}


def test_a_process_is_killed_at_its_deadline_with_all_it_started(connected: Fleet) -> None:
    heard = Heard()
    began = time.monotonic()
    ended = connected.run_process(
        "node-1",
        argv=ARGV,
        input_json=json.dumps({"all": {"child": True, "ignore_term": True, "hang": True}}),
        on_event=heard,
        deadline_s=1.0,
        grace_s=0.5,
    )
    assert (ended.exit_code, ended.ended) == (-9, "deadline")
    assert len(heard.pids()) == 2
    assert gone(heard)
    assert time.monotonic() - began < 60


def test_a_process_lost_with_its_node_says_so(connected: Fleet) -> None:
    worker = connected.run_on("node-1", os.getpid, timeout_s=20)
    heard = Heard()

    def on_event(event: dict[str, Any]) -> None:
        heard(event)
        if event["event"] == "started":
            psutil.Process(worker).kill()

    with pytest.raises(WorkerLost, match="node-1"):
        connected.run_process(
            "node-1",
            argv=ARGV,
            input_json=json.dumps({"all": {"beat_s": 600}}),
            on_event=on_event,
            deadline_s=60,
        )
    eventually(lambda: gone(heard))
    eventually(lambda: len(connected.nodes()) == 3)
