"""Nodes that a job holds: messages to and from them, loss and return, and waiting in order."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from paceline.cluster import Fleet, HeldNodes, NodeOutput
from paceline.errors import Cancelled, Conflict
from tests.cluster.conftest import eventually, run_on

pytestmark = pytest.mark.xdist_group("dask")

ARGV = (sys.executable, "-S", str(Path(__file__).with_name("stand_in_listener.py")))
NODES = ("node-0", "node-1")


def test_a_process_sees_an_accelerator_that_no_gang_holds(connected: Fleet) -> None:
    seen: list[dict[str, Any]] = []
    code = "import json, os; print(json.dumps({'gpus': os.environ.get('CUDA_VISIBLE_DEVICES')}))"

    def look() -> None:
        argv = [sys.executable, "-c", code]
        connected.run_process(
            "node-0", argv=argv, on_event=seen.append, deadline_s=30, accelerators=2
        )

    for held in (1, 2):
        with connected.open_nodes(["node-0"], ARGV, wait_s=20, slots={"node-0": (held, 2)}):
            look()
    with connected.open_nodes(["node-0"], ARGV, wait_s=20):  # the whole node
        look()
    look()
    look()
    assert [each["gpus"] for each in seen] == ["1", "", "", "0", "0"]


def receive(nodes: HeldNodes, enough: Callable[[list[NodeOutput]], bool]) -> list[NodeOutput]:
    """Return what was heard once it is enough."""
    received: list[NodeOutput] = []
    deadline = time.monotonic() + 30
    while not enough(received):
        assert time.monotonic() < deadline, received
        received += nodes.receive(0.25)
    return received


def pids_of(received: list[NodeOutput]) -> dict[str, int]:
    return {each.worker_id: each.line["pid"] for each in received if "pid" in each.line}


def test_orders_reach_their_node_and_are_answered(connected: Fleet) -> None:
    with connected.open_nodes(NODES, ARGV, wait_s=20) as nodes:
        for number in range(20):
            for worker in NODES:
                order = {"do": "say", "number": number, "to": worker}
                assert nodes.send_all({worker: order}) == {}
        received = receive(nodes, lambda received: len(received) >= 42)
        assert {nodes.host(each) for each in NODES} == {"127.0.0.1"}
        pids = pids_of(received)
        for worker in NODES:
            echoed = [e.line for e in received if e.worker_id == worker and "number" in e.line]
            assert [each["number"] for each in echoed] == list(range(20))
            assert {each["to"] for each in echoed} == {worker}
    assert set(pids) == set(NODES)
    eventually(lambda: not any(psutil.pid_exists(pid) for pid in pids.values()))


def test_a_node_whose_process_ends_says_so_once_and_can_start_again(connected: Fleet) -> None:
    with connected.open_nodes(NODES, ARGV, wait_s=20) as nodes:
        receive(nodes, lambda received: len(pids_of(received)) == 2)
        assert nodes.send_all({"node-1": {"do": "exit"}}) == {}
        received = receive(nodes, lambda received: any(each.lost for each in received))
        (lost,) = [each for each in received if each.lost]
        assert lost.worker_id == "node-1"
        assert "ended with 3: as told" in lost.lost
        assert not [each for each in nodes.receive(0.5) if each.lost]
        assert set(nodes.send_all({"node-1": {"do": "say"}})) == {"node-1"}
        assert nodes.start("node-1")
        assert "node-1" in pids_of(receive(nodes, lambda received: bool(pids_of(received))))


def test_a_dropped_process_is_followed_by_another_that_is_heard(connected: Fleet) -> None:
    with connected.open_nodes(NODES, ARGV, wait_s=20) as nodes:
        first = pids_of(receive(nodes, lambda received: len(pids_of(received)) == 2))
        nodes.receive(0.0)  # a question about it is on its way
        nodes.drop("node-1")
        assert nodes.send_all({"node-0": {"do": "say"}, "node-1": {"do": "say"}}) == {
            "node-1": "no process runs there"
        }
        assert nodes.start("node-1")
        received = receive(nodes, lambda received: "node-1" in pids_of(received))
        assert pids_of(received)["node-1"] != first["node-1"]
        assert not [each for each in received if each.lost]
        eventually(lambda: not psutil.pid_exists(first["node-1"]))


def test_a_lost_dask_worker_is_a_lost_node_until_it_is_back(connected: Fleet) -> None:
    worker = run_on(connected, "node-1", os.getpid, timeout_s=20)
    with connected.open_nodes(NODES, ARGV, wait_s=20) as nodes:
        pids = pids_of(receive(nodes, lambda received: len(pids_of(received)) == 2))
        psutil.Process(worker).kill()
        (lost,) = [
            e for e in receive(nodes, lambda received: any(e.lost for e in received)) if e.lost
        ]
        assert lost.worker_id == "node-1"
        eventually(lambda: not psutil.pid_exists(pids["node-1"]))
        eventually(lambda: nodes.start("node-1"))
        again = pids_of(receive(nodes, lambda received: bool(pids_of(received))))
        assert again["node-1"] != pids["node-1"]


def test_a_second_job_waits_its_turn_and_is_told_who_has_the_nodes(connected: Fleet) -> None:
    told: list[str] = []
    turns: list[str] = []
    with connected.open_nodes(NODES, ARGV, wait_s=20):

        def second() -> None:
            with connected.open_nodes(NODES[::-1], ARGV, wait_s=60, on_wait=told.append):
                turns.append("second")

        thread = threading.Thread(target=second)
        thread.start()
        eventually(lambda: told)
        turns.append("first")
    thread.join(30)
    assert turns == ["first", "second"]
    assert len(told) == 1
    assert "held by gang-" in told[0]


def test_waiting_is_bounded_and_can_be_cancelled(connected: Fleet) -> None:
    cancel = threading.Event()

    def open_them(**more: Any) -> None:
        with connected.open_nodes(NODES, ARGV, **more):
            raise AssertionError("they are held")

    with connected.open_nodes(NODES[:1], ARGV, wait_s=20):
        with pytest.raises(Conflict, match="taken by another gang: got gang-"):
            open_them(wait_s=0.5)
        with pytest.raises(Cancelled):
            open_them(wait_s=60, cancel=cancel, on_wait=lambda _: cancel.set())


def test_orders_to_a_frozen_process_fail_within_their_deadline(connected: Fleet) -> None:
    with connected.open_nodes(NODES[:1], ARGV, wait_s=20) as nodes:
        receive(nodes, lambda received: bool(pids_of(received)))
        assert nodes.send_all({"node-0": {"do": "sleep"}}) == {}
        more = {"node-0": {"do": "say", "padding": "x" * 40_000}}
        failed = next(filter(None, (nodes.send_all(more) for _ in range(4))))
        assert "does not read" in failed["node-0"]
