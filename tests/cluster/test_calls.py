"""Calls on nodes: pinned, bounded, and never silently pending."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from paceline.cluster import Fleet, pinned_calls
from paceline.cluster.client import HANDSHAKES
from paceline.cluster.pinned_calls import Calls
from paceline.config import Endpoints, Runtime, Secrets, load_profile
from paceline.errors import InvalidInput, ServiceUnavailable, WorkerLost
from tests.cluster.conftest import eventually, run_on

pytestmark = pytest.mark.xdist_group("dask")


def test_nodes_stand_in_contiguous_racks(connected: Fleet) -> None:
    nodes = connected.nodes()
    assert [each.worker_id for each in nodes] == ["node-0", "node-1", "node-2"]
    assert [each.labels.rack for each in nodes] == ["rack-0", "rack-0", "rack-1"]
    assert all(each.address.startswith("tls://127.0.0.1:") for each in nodes)


def test_each_call_runs_on_its_own_node_and_is_told_which(connected: Fleet) -> None:
    def where(extra: int, *, worker_id: str) -> tuple[str, int, int]:
        return worker_id, extra, os.getpid()

    answers = connected.map_nodes(where, ["node-0", "node-1", "node-2"], 7, timeout_s=20)
    assert {each: answers[each][:2] for each in answers} == {
        f"node-{index}": (f"node-{index}", 7) for index in range(3)
    }
    assert len({answer[2] for answer in answers.values()}) == 3


def test_no_node_is_missing_while_dasks_timer_asks_the_scheduler_too(connected: Fleet) -> None:
    """The timer's answer has no workers: a node that lives was taken for dead."""
    client, over = connected._client, threading.Event()

    async def as_the_timer_does() -> None:
        while not over.is_set():
            await client._update_scheduler_info()

    timer = asyncio.run_coroutine_threadsafe(as_the_timer_does(), client.loop.asyncio_loop)
    try:
        found = [len(connected.nodes()) for _ in range(100)]
    finally:
        over.set()
        timer.result(20)
    assert set(found) == {3}


def test_an_error_on_a_node_arrives_as_itself(connected: Fleet) -> None:
    def refuse() -> None:
        raise InvalidInput("no", got=1, wanted=2, where="there", do="Stop.")

    with pytest.raises(InvalidInput, match=r"no: got 1, wanted 2, at there\. Stop\."):
        run_on(connected, "node-1", refuse, timeout_s=20)


def test_a_call_past_its_deadline_is_given_up(connected: Fleet) -> None:
    with pytest.raises(ServiceUnavailable, match="did not answer in time"):
        run_on(connected, "node-2", time.sleep, 3, timeout_s=0.5)


def test_a_node_without_a_worker_is_named_with_those_that_have_one(connected: Fleet) -> None:
    with pytest.raises(WorkerLost, match=r"got workers node-0, node-1, node-2.*at node-9"):
        run_on(connected, "node-9", os.getpid, timeout_s=2)


def test_a_dead_worker_ends_its_call_and_its_node_comes_back(connected: Fleet) -> None:
    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    before = run_on(connected, "node-0", os.getpid, timeout_s=20)
    with pytest.raises(WorkerLost, match="node-0"):
        run_on(connected, "node-0", die, timeout_s=30)
    eventually(lambda: len(connected.nodes()) == 3)
    assert run_on(connected, "node-0", os.getpid, timeout_s=30) != before


def test_an_answer_that_is_lost_with_its_worker_is_a_dead_worker(connected: Fleet) -> None:
    """Dask would wait for a worker at the address that computes it again."""
    pid = run_on(connected, "node-0", os.getpid, timeout_s=20)
    calls = connected._calls(slot=False)
    calls.submit("node-0", connected._addresses()["node-0"], os.getpid)
    (future,) = calls._pending
    eventually(lambda: future.status == "finished")
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: len(connected.nodes()) == 2)
    answer = calls.gather(pinned_calls.RESULT_TIMEOUT_S)["node-0"]
    assert isinstance(answer, WorkerLost), answer
    eventually(lambda: len(connected.nodes()) == 3)


def test_a_scheduler_that_is_not_there_is_unavailable(cluster: Runtime) -> None:
    nowhere = cluster.model_copy(
        update={"endpoints": Endpoints(scheduler_address="tls://127.0.0.1:1")}
    )
    with pytest.raises(ServiceUnavailable, match="scheduler does not answer"):
        Fleet.connect(nowhere, timeout_s=1)


@pytest.mark.parametrize("status", ["finished", "error", "lost"])
def test_an_answer_that_a_busy_scheduler_does_not_bring_may_come_later(
    status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Future:
        def __init__(self) -> None:
            self.status = status

        def add_done_callback(self, _: object) -> None:
            pass

        def result(self, timeout: float) -> None:
            raise TimeoutError(f"{timeout} s")

    class Client:
        def submit(self, *_: object, **__: object) -> Future:
            return Future()

    monkeypatch.setattr(pinned_calls, "RESULT_TIMEOUT_S", 0.1)
    address = "tls://127.0.0.1:1"
    calls = Calls(Client(), lambda: {} if status == "lost" else {"node-0": address}, slot=False)
    calls.submit("node-0", address, os.getpid)
    found = calls.some(0)["node-0"]
    if status == "finished":
        assert isinstance(found, ServiceUnavailable)
        assert "the answer does not come" in found.one_line() and "node-0" in found.one_line()
    elif status == "error":
        assert type(found) is TimeoutError, "the call's own"
    else:
        assert isinstance(found, WorkerLost)


def test_a_slow_answer_comes_in_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fetch that is given up begins anew: of shorter ones none would ever end."""
    monkeypatch.setattr(pinned_calls, "RESULT_TRY_S", 0.05)
    address, took_s = "tls://127.0.0.1:1", 0.5

    class Future:
        status = "finished"

        def add_done_callback(self, _: object) -> None:
            pass

        def result(self, timeout: float) -> str:
            time.sleep(min(timeout, took_s))
            if timeout < took_s:
                raise TimeoutError
            return "the answer"

    client = SimpleNamespace(submit=lambda *_, **__: Future())
    calls = Calls(client, lambda: {"node-0": address}, slot=False)
    calls.submit("node-0", address, os.getpid)
    assert calls.some(0) == {"node-0": "the answer"}


@pytest.mark.parametrize("failures", [HANDSHAKES - 1, HANDSHAKES])
def test_a_welcome_that_comes_with_other_messages_is_asked_for_again(
    failures: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoints = Endpoints(scheduler_address="tls://127.0.0.1:1")
    runtime = Runtime(
        profile=load_profile("ci"), state_dir=tmp_path, endpoints=endpoints, secrets=Secrets()
    )
    tried = []

    def client(address: str, **_: object) -> str:
        tried.append(address)
        if len(tried) <= failures:
            raise AssertionError  # as Dask's client does
        return "a client"

    monkeypatch.setattr("distributed.Client", client)
    monkeypatch.setattr("paceline.cluster.dask_service.security_of", lambda _runtime: None)
    if failures < HANDSHAKES:
        assert Fleet.connect(runtime)._client == "a client"
        return
    with pytest.raises(ServiceUnavailable, match="more than its welcome"):
        Fleet.connect(runtime)
    assert len(tried) == HANDSHAKES
