"""Launchers and gangs in real processes: together or not at all, and nothing is left of them."""

from __future__ import annotations

import http.server
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import pytest

from paceline.errors import Cancelled, InvalidInput
from paceline.training import (
    Deadlines,
    GangMember,
    GangResult,
    GangSupervisor,
    LocalLauncher,
    deadlines,
)
from paceline.training.launcher import MetadataWatcher, launcher_argv, local

pytestmark = pytest.mark.xdist_group("gangs")

ARGV = launcher_argv("tests.training.stand_in_ranks:main")
FOREVER = {"wait_s": 600}


@pytest.fixture(scope="module")
def kept() -> Iterator[LocalLauncher]:
    with LocalLauncher() as launcher:
        yield launcher


class Story:
    """A gang's result and what its ranks said."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.result: GangResult | None = None

    def started(self) -> dict[int, dict[str, Any]]:
        return {e["rank"]: e["data"] for e in self.events if e["event"] == "started"}

    def under_way(self) -> bool:
        """Both ranks are past their last step: their launchers' own words came long before."""
        return {e["rank"] for e in self.events if e["event"] == "step" and e["step"] == 3} == {0, 1}

    def pids(self) -> list[int]:
        return [pid for each in self.started().values() for pid in (each["pid"], each["child"])]


@contextmanager
def opened(kept: LocalLauncher, workers: tuple[str, ...] = ("a", "b"), **more: Any) -> Iterator:
    deadlines = more.pop("deadlines", Deadlines(start_s=30, step_s=20))
    with kept.open_nodes(workers, ARGV, wait_s=0, cancel=None, on_wait=None) as nodes:
        yield GangSupervisor(nodes, deadlines, **more)


def run(
    gangs: GangSupervisor, orders: dict[str, Any], *, attempt: int = 1, hook: Any = None
) -> Story:
    story = Story()

    def on_event(event: dict[str, Any]) -> None:
        story.events.append(event)
        if hook is not None:
            hook(story)

    members = [GangMember("a", 0), GangMember("b", 1)]
    story.result = gangs.run_gang(members, json.dumps(orders), attempt, on_event)
    return story


def gone(pids: list[int], within_s: float = 5.0) -> bool:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if not any(_lives(pid) for pid in pids if pid):
            return True
        time.sleep(0.02)
    return False


def _lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_ranks_run_together_and_a_killed_one_ends_all(kept: LocalLauncher) -> None:
    with opened(kept) as gangs:
        well = run(gangs, {"all": {"steps": 5}})
        assert well.result.ok
        assert {each["world"] for each in well.started().values()} == {"2"}
        threads = [len(psutil.Process(pid).threads()) for pid in kept.launcher_pids.values()]
        assert threads == [1, 1], "forking a process with threads deadlocks sooner or later"
        ill = run(gangs, {"1": {"kill": True}, "all": {"child": True, **FOREVER}}, attempt=2)
    assert (ill.result.ok, ill.result.failed_rank, ill.result.failed_worker) == (False, 1, "b")
    assert "killed by signal 9" in ill.result.reason
    assert gone(ill.pids()), "what a rank started in another session is gone, too"


def test_the_first_to_fail_is_named_with_its_last_words(kept: LocalLauncher) -> None:
    orders = {
        # A moment after the other, also where that one is forked late.
        "0": {"fail": "peer reset", "code": 75, "steps": 8, "pace_s": 0.02},
        "1": {"fail": "RuntimeError: no loss"},
    }
    with opened(kept) as gangs:
        story = run(gangs, orders)
    assert story.result.failed_rank == 1, "one that only lost its peer is not to blame"
    assert story.result.reason == "rank 1 on b exited with 1: RuntimeError: no loss"


def test_a_step_much_longer_than_those_before_it_hangs(
    kept: LocalLauncher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deadlines, "STEP_AT_LEAST_S", 2.0)
    with opened(kept, deadlines=Deadlines(start_s=30, step_s=None)) as gangs:
        story = run(gangs, {"all": {"wait_s": 30}})
    assert story.result.hung
    assert "hung in phase 'step'" in story.result.reason and "of 2" in story.result.reason


def test_cancel_lets_ranks_save_and_kills_and_names_one_that_does_not(kept: LocalLauncher) -> None:
    cancel, story = threading.Event(), Story()
    with opened(kept, cancel=cancel, grace_s=0.5) as gangs:

        def hook(now: Story) -> None:
            story.events = now.events
            if now.under_way():
                cancel.set()

        slowly = FOREVER | {"pace_s": 0.1}
        with pytest.raises(Cancelled, match=r"ranks \[1\] had not saved"):
            run(gangs, {"0": slowly, "1": slowly | {"deaf": True}}, hook=hook)
    assert {e["rank"] for e in story.events if e["event"] == "failed"} == {0}
    assert gone(story.pids())


def test_a_spare_takes_the_place_of_a_dead_rank(kept: LocalLauncher) -> None:
    with opened(kept) as gangs:
        orders = {"0": {"1": {"wait_s": 600}, "2": {}}, "1": {"1": {"wait_s": 600}, "2": {}}}
        asked: list[int] = []

        def hook(story: Story) -> None:
            if len(story.started()) == 2 and not asked:
                gangs.start_spare("spare-1", "b", {"PACELINE_SPARE": "1"}, json.dumps(orders))
                asked.append(story.started()[1]["pid"])
                os.kill(asked[0], signal.SIGKILL)

        assert run(gangs, orders, hook=hook).result.failed_rank == 1
        members = [GangMember("a", 0), GangMember("b", 1, spare="spare-1")]
        events: list[dict[str, Any]] = []
        assert gangs.run_gang(members, json.dumps(orders), 2, events.append).ok
        assert {e["rank"]: e["data"]["spare"] for e in events if e["event"] == "started"} == {
            0: False,
            1: True,
        }
        assert gangs.spares == {}


def test_a_killed_or_frozen_launcher_is_a_lost_node_and_started_again(
    kept: LocalLauncher, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(kept) as gangs:
        killed: list[int] = []

        def hook(story: Story) -> None:
            if len(story.started()) == 2 and not killed:
                killed.append(kept.launcher_pids["b"])
                os.kill(killed[0], signal.SIGKILL)

        story = run(gangs, {"all": FOREVER}, hook=hook)
        assert story.result.lost == {"b"}
        assert story.result.failed_worker == "b"
        assert gone([each["pid"] for each in story.started().values()])
        assert run(gangs, {"all": {}}, attempt=2).result.ok, "the node is started again"

        monkeypatch.setattr(local, "SEND_DEADLINE_S", 0.3)
        frozen = kept.launcher_pids["b"]
        os.kill(frozen, signal.SIGSTOP)
        padding = {"do": "signal", "rank": -1, "number": 0, "padding": "x" * 40_000}
        told = [kept.send_all({"b": padding}) for _ in range(4)]
        assert told[-1] == {"b": "its launcher does not read its orders"}
        gangs.drop_node("b", "frozen")
        assert gone([frozen])
        assert gangs.lost == {"b"}


def test_a_killed_driver_leaves_nothing(tmp_path) -> None:
    code = (
        "import json, sys\n"
        "from paceline.training import Deadlines, GangMember, GangSupervisor, LocalLauncher\n"
        "argv = json.loads(sys.argv[1])\n"
        "orders = json.dumps({'all': {'child': True, 'wait_s': 600, 'steps': 0}})\n"
        "with LocalLauncher().open_nodes(['a'], argv, wait_s=0, cancel=None, on_wait=None) as n:\n"
        "    members = [GangMember('a', 0), GangMember('a', 1)]\n"
        "    GangSupervisor(n, Deadlines()).run_gang(members, orders, 1,\n"
        "        lambda e: print(json.dumps([e['data'].get('pid'), *n.launcher_pids.values()]),\n"
        "                        flush=True))\n"
    )
    driver = subprocess.Popen(
        [sys.executable, "-c", code, json.dumps(ARGV)], stdout=subprocess.PIPE
    )
    with driver:
        assert driver.stdout is not None
        pids = {pid for _ in range(2) for pid in json.loads(driver.stdout.readline())}
        assert len(pids - {None}) == 3
        os.kill(max(pids - {None}), signal.SIGSTOP)  # not even one that cannot run any more
        driver.kill()
    assert gone([pid for pid in pids if pid])


class Metadata(http.server.BaseHTTPRequestHandler):
    """A cloud's metadata service."""

    goes = threading.Event()

    def do_GET(self) -> None:
        found = self.goes.is_set()
        body = b'{"action": "terminate"}' if found else b"no"
        self.send_response(200 if found else 404)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Be quiet."""


def test_a_preemption_notice_stops_the_gang_gently_and_names_the_node(
    kept: LocalLauncher,
) -> None:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Metadata)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}/spot/instance-action"
    try:
        Metadata.goes.clear()
        watcher = MetadataWatcher(url)
        assert not watcher.noticed()
        with opened(kept) as gangs:
            gangs.watch_for_preemption(url, 10.0)
            gangs.prepare(["a", "b"])

            def hook(story: Story) -> None:
                if len(story.started()) == 2:
                    Metadata.goes.set()

            story = run(gangs, {"all": FOREVER}, hook=hook)
        assert watcher.noticed()
    finally:
        server.shutdown()
        server.server_close()
    assert story.result.stopped
    assert story.result.preempted <= {"a", "b"}
    assert story.result.preempted
    assert set(story.result.exit_codes.values()) <= {143}


@pytest.mark.parametrize("url", ["ftp://x", "nowhere", "no.such:thing"])
def test_a_watcher_that_does_not_exist_is_refused(url: str) -> None:
    with pytest.raises(InvalidInput, match=r"bad metadata URL.*training\.guard\.preemption"):
        MetadataWatcher(url)
