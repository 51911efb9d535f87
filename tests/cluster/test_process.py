"""Processes on nodes: followed live, and nothing is left of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from paceline.cluster import Fleet
from paceline.cluster.processes import clean_environment
from paceline.config import Runtime
from paceline.errors import Cancelled, CorruptData, WorkerLost
from tests.cluster.conftest import eventually, run_on

pytestmark = pytest.mark.xdist_group("dask")

RANK = Path(__file__).with_name("stand_in_rank.py")
ARGV = (sys.executable, "-S", str(RANK))


class NodeOutput:
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


def gone(received: NodeOutput) -> bool:
    return not any(psutil.pid_exists(pid) for pid in received.pids())


def beat(connected: Fleet, on_event: Callable[[dict[str, Any]], None]) -> None:
    """Run a process on node-1 that ends by itself after its deadline."""
    connected.run_process(
        "node-1",
        argv=ARGV,
        input_json=json.dumps({"all": {"beat_s": 600}}),
        on_event=on_event,
        deadline_s=60,
    )


@contextmanager
def short_lease(connected: Fleet, node: str) -> Iterator[None]:
    """Have ``node`` end what nobody asks for after 2 s, for the time of the ``with``."""
    from paceline.cluster import worker_processes as remote

    def shorten(seconds: float) -> float:
        before, remote.LEASE_S = remote.LEASE_S, seconds
        return before

    before = run_on(connected, node, shorten, 2.0, timeout_s=20)
    try:
        yield
    finally:
        run_on(connected, node, shorten, before, timeout_s=20)


def test_a_killed_caller_leaves_no_rank(cluster: Runtime, connected: Fleet) -> None:
    # Its questions stop; the node's lease ends what nobody asks for.
    with short_lease(connected, "node-0"):
        code = (
            "import sys\n"
            "from paceline.cluster import Fleet\n"
            "from paceline.config import load_runtime\n"
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


def test_a_server_that_hangs_as_events_are_taken_ends_no_process(connected: Fleet) -> None:
    received = NodeOutput()

    def on_event(event: dict[str, Any]) -> None:
        if event["event"] == "started":
            time.sleep(8.0)  # longer than the lease, and than what an ended process is kept
        received(event)

    with short_lease(connected, "node-1"):
        ended = connected.run_process(
            "node-1",
            argv=ARGV,
            input_json=json.dumps({"all": {"lines": 20}}),
            on_event=on_event,
            deadline_s=60,
        )
    assert (ended.exit_code, ended.ended) == (0, "exited"), ended
    numbers = [each["data"]["number"] for each in received.events if each["event"] == "step"]
    assert numbers == list(range(20)), "each was taken, in order"


def test_what_taking_an_event_raises_ends_the_process(connected: Fleet) -> None:
    received = NodeOutput()

    def on_event(event: dict[str, Any]) -> None:
        received(event)
        raise CorruptData("no record of this", got="x")

    with pytest.raises(CorruptData, match="no record of this"):
        beat(connected, on_event)
    assert received.pids()
    assert gone(received)


def test_a_process_tells_live_and_returns_its_last_words(connected: Fleet) -> None:
    received = NodeOutput()
    ended = connected.run_process(
        "node-1",
        argv=ARGV,
        env={"RANK": "4"},
        input_json=json.dumps({"4": {"lines": 3000, "fail": "out of luck"}}),
        on_event=received,
        deadline_s=30,
    )
    assert (ended.exit_code, ended.ended) == (1, "exited")
    assert ended.stderr_tail.strip() == "out of luck"
    numbers = [each["data"]["number"] for each in received.events if each["event"] == "step"]
    assert numbers == list(range(3000))
    assert ended.last_line is not None
    assert json.loads(ended.last_line)["data"] == {"number": 2999}


def test_a_process_is_killed_at_its_deadline_with_all_it_started(connected: Fleet) -> None:
    received = NodeOutput()
    began = time.monotonic()
    ended = connected.run_process(
        "node-1",
        argv=ARGV,
        input_json=json.dumps({"all": {"child": True, "ignore_term": True, "hang": True}}),
        on_event=received,
        deadline_s=1.0,
        grace_s=0.5,
    )
    assert (ended.exit_code, ended.ended) == (-9, "deadline")
    assert len(received.pids()) == 2
    assert gone(received)
    assert time.monotonic() - began < 60


def test_a_cancelled_process_is_gone_when_the_caller_hears_of_it(connected: Fleet) -> None:
    received, cancel = NodeOutput(), threading.Event()

    def on_event(event: dict[str, Any]) -> None:
        received(event)
        cancel.set()

    with pytest.raises(Cancelled):
        connected.run_process(
            "node-1",
            argv=ARGV,
            input_json=json.dumps({"all": {"child": True, "beat_s": 600}}),
            on_event=on_event,
            deadline_s=60,
            cancel=cancel,
        )
    assert len(received.pids()) == 2
    assert gone(received)


def test_a_process_lost_with_its_node_says_so(connected: Fleet) -> None:
    worker = run_on(connected, "node-1", os.getpid, timeout_s=20)
    received = NodeOutput()

    def on_event(event: dict[str, Any]) -> None:
        received(event)
        if event["event"] == "started":
            psutil.Process(worker).kill()

    with pytest.raises(WorkerLost, match="node-1"):
        beat(connected, on_event)
    eventually(lambda: gone(received))
    eventually(lambda: len(connected.nodes()) == 3)


@pytest.mark.parametrize(
    ("named", "wanted"),
    [
        ("", "127.0.0.1,localhost,::1"),
        ("s3.corp, .intra", "127.0.0.1,localhost,::1,s3.corp,.intra"),
        ("[::1],fd00::/8,10.0.0.0/8", "127.0.0.1,localhost,::1,10.0.0.0/8"),
        ("*", "*"),
    ],
)
def test_no_proxy_of_the_machine_catches_loopback(
    named: str, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.setenv("NO_PROXY", named)
    env = clean_environment()
    assert env["NO_PROXY"] == env["no_proxy"] == wanted
