"""The parameter server: real processes, killed and frozen servers, callers that misbehave."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch._C._distributed_c10d import TCPStore

from paceline.config import TrainingSettings
from paceline.errors import AccessDenied, InvalidFrame, InvalidInput, PeerLost
from paceline.models import config_for
from paceline.training.loop.workload import TransformerWorkload
from paceline.training.strategies import frames, require_ranks
from paceline.training.strategies.frames import Frame, FrameKind
from paceline.training.strategies.learner import Learner
from paceline.training.strategies.protocol import BatchReport, ServerTerms
from paceline.training.strategies.rendezvous import FileClaims, StoreClaims
from paceline.training.strategies.server import ParameterServer, listen
from paceline.training.strategies.worker import Worker

ROOT = Path(__file__).parents[3]
STEPS, WORKERS = 40, 2
NOTE = BatchReport(loss=1.0).to_head()
SETTINGS = {
    "ranks": 2 + WORKERS,
    "steps": STEPS,
    "learning_rate": 0.01,
    "warmup_steps": 0,
    "synchrony": {"kind": "parameter-server", "max_staleness": 2},
}


class Forker:
    """The process that holds torch and forks ranks."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.training.strategies.asynchronous"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )

    def ask(self, what: Any) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        self._process.kill()
        self._process.communicate(timeout=10)


@pytest.fixture(scope="module")
def forker() -> Iterator[Forker]:
    found = Forker()
    yield found
    found.close()


class Gang:
    """Server, standby and two workers as processes; what each said, in files."""

    def __init__(self, forker: Forker, directory: Path) -> None:
        held = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
        addresses = [each.getsockname()[:2] for each in held]
        for each in held:
            each.close()
        self._files = [directory / f"rank-{rank}" for rank in range(2 + WORKERS)]
        self._forker = forker
        self._codes: dict[int, int] = {}
        self.pids: list[int] = forker.ask(
            [
                {"rank": rank, "ranks": 2 + WORKERS, "addresses": addresses, "settings": SETTINGS,
                 "claims": str(directory / "claims"), "said": str(file)}
                for rank, file in enumerate(self._files)
            ]
        )  # fmt: skip

    def said(self, rank: int) -> list[dict[str, Any]]:
        """Whole lines only: a killed rank's last one may be torn."""
        text = self._files[rank].read_text() if self._files[rank].exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line[-1] == "\n"]

    def until(self, rank: int, version: int) -> None:
        end = time.monotonic() + 60
        while not any(each.get("version", 0) >= version for each in self.said(rank)):
            assert time.monotonic() < end, self.errors()
            time.sleep(0.002)

    def code(self, rank: int, deadline_s: float = 80.0) -> int:
        end = time.monotonic() + deadline_s
        while rank not in self._codes:
            found = self._forker.ask(self.pids[rank])
            if found is not None:
                self._codes[rank] = found
            assert time.monotonic() < end, self.errors()
            time.sleep(0.01)
        return self._codes[rank]

    def finish(self, ranks: list[int]) -> None:
        for rank in ranks:
            assert self.code(rank) == 0, self.errors()

    def errors(self) -> str:
        found = [Path(f"{file}.error") for file in self._files]
        return "\n".join(each.read_text()[-1500:] for each in found if each.exists())

    def close(self) -> None:
        for rank, pid in enumerate(self.pids):
            if rank not in self._codes:
                os.kill(pid, signal.SIGKILL)
                self.code(rank, 10.0)


@pytest.fixture
def gang(forker: Forker, tmp_path: Path) -> Iterator[Gang]:
    found = Gang(forker, tmp_path)
    yield found
    found.close()


def updates(said: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [each for each in said if "version" in each]


def require_whole(log: list[dict[str, Any]]) -> None:
    """Every gradient of every worker once, none staler than the bound."""
    assert [each["version"] for each in log] == list(range(1, STEPS * WORKERS + 1))
    for worker in range(WORKERS):
        mine = [each["sequence"] for each in log if each["worker"] == worker]
        assert mine == list(range(1, STEPS + 1))
    assert all(0 <= each["version"] - 1 - each["base"] <= 2 for each in log)
    assert np.mean([each["loss"] for each in log[-10:]]) < log[0]["loss"] - 1, "it learned"


def of_standby(gang: Gang) -> list[dict[str, Any]]:
    """What the standby applied, after what the server had applied before the standby came."""
    its = updates(gang.said(1))
    return [each for each in updates(gang.said(0)) if each["version"] < its[0]["version"]] + its


def test_the_standby_takes_over_from_a_killed_server_and_loses_nothing(gang: Gang) -> None:
    gang.until(1, 1)  # one that never met a leader cannot take over from it
    gang.until(0, 25)
    os.kill(gang.pids[0], signal.SIGKILL)
    gang.finish([1, 2, 3])
    require_whole(of_standby(gang))
    ended = gang.said(1)[-1]
    assert (ended["ended"], ended["led"], ended["at"]) == ("standby", True, STEPS * WORKERS)
    acknowledged = updates(gang.said(0))
    assert of_standby(gang)[: len(acknowledged)] == acknowledged
    for rank in (2, 3):
        assert gang.said(rank)[-1]["told"]["pushed"] == STEPS


def test_a_frozen_server_is_replaced_and_ends_when_it_wakes(gang: Gang) -> None:
    gang.until(1, 1)  # one that never met a leader cannot take over from it
    gang.until(0, 25)
    os.kill(gang.pids[0], signal.SIGSTOP)
    try:
        gang.finish([1, 2, 3])
    finally:
        os.kill(gang.pids[0], signal.SIGCONT)
    require_whole(of_standby(gang))
    assert gang.code(0, 30.0) != 0, "another leads: it has nothing to say"
    assert not any("ended" in each for each in gang.said(0))


def test_a_killed_standby_leaves_the_server_going(gang: Gang) -> None:
    gang.until(0, 10)
    os.kill(gang.pids[1], signal.SIGKILL)
    gang.finish([0, 2, 3])
    require_whole(updates(gang.said(0)))
    assert gang.said(0)[-1]["led"] is True


# ------------------------------------------------------------------------ in this process


def learner() -> Learner:
    settings = TrainingSettings.model_validate(SETTINGS)
    return Learner(TransformerWorkload(config_for(10_000, 16)).build(), settings, 1)


class Served:
    """A leading server in a thread of this process."""

    def __init__(self, directory: Path, **changes: Any) -> None:
        terms = {"key": "key", "workers": 1, "pushes": 3, "max_staleness": 2, "silence_s": 1.0}
        self.terms = ServerTerms(**(terms | changes))
        self.server = ParameterServer(learner(), self.terms, FileClaims(directory), "here")
        self.listener = listen("127.0.0.1")
        self.address = self.listener.getsockname()[:2]
        self.server.lead()
        self.thread = threading.Thread(target=self._serve, daemon=True)
        self.thread.start()

    def _serve(self) -> None:
        with contextlib.suppress(PeerLost):  # how close() ends it
            self.server.serve(self.listener, 30.0)

    def close(self) -> None:
        self.server.end(PeerLost("the test is over"))
        self.thread.join(10)
        self.listener.close()

    def greet(self, **hello: Any) -> socket.socket:
        connection = socket.create_connection(self.address, timeout=10)
        frames.send(
            connection, Frame(FrameKind.HELLO, {"role": "worker", "rank": 2, "worker": 0} | hello)
        )
        return connection


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Served]]:
    started: list[Served] = []

    def start(**changes: Any) -> Served:
        started.append(Served(tmp_path, **changes))
        return started[-1]

    yield start
    for each in started:
        each.close()


def test_a_lost_answer_is_confirmed_and_not_applied_twice(serve: Callable[..., Served]) -> None:
    served = serve(pushes=1)
    gradient = np.ones(served.server.learner.count, np.float32)
    push = frames.of_numbers(FrameKind.PUSH, gradient, sequence=1, base=0, note=NOTE)
    with served.greet(key="key") as connection:
        assert frames.receive(connection).kind is FrameKind.WELCOME
        frames.send(connection, push)
        assert frames.receive(connection).head["verdict"] == "apply"  # as if it never came
        frames.send(connection, push)
        assert frames.receive(connection).head["verdict"] == "known"
        frames.send(connection, Frame(FrameKind.RELEASED))
        assert frames.receive(connection).kind is FrameKind.RELEASED, "all is done"
    assert served.server.done.is_set()
    served.server.release()
    served.thread.join(20)
    assert not served.thread.is_alive()
    assert served.server.ledger.version == 1


def test_callers_without_the_key_or_with_other_numbers_are_turned_away(
    serve: Callable[..., Served],
) -> None:
    served = serve()
    before = served.server.learner.weights()
    with served.greet(key="wrong") as connection, pytest.raises(PeerLost):
        frames.receive(connection)
    with served.greet(key="key", worker=7) as connection, pytest.raises(PeerLost):
        frames.receive(connection)
    for body, head in (
        (np.ones(3, np.float32), {"sequence": 1, "base": 0}),
        (np.full(len(before), np.nan, np.float32), {"sequence": 1, "base": 0}),
        (np.ones(len(before), np.float32), {"sequence": 2, "base": 0}),
        (np.ones(len(before), np.float32), {"sequence": 1, "base": 9}),
        (np.ones(len(before), np.float32), {"sequence": -1, "base": 0}),
        (np.ones(len(before), np.float32), {"sequence": "1", "base": 0}),
    ):
        with served.greet(key="key") as connection:
            assert frames.receive(connection).kind is FrameKind.WELCOME
            frames.send(connection, frames.of_numbers(FrameKind.PUSH, body, note=NOTE, **head))
            assert frames.receive(connection).kind is FrameKind.REFUSED
    assert np.array_equal(served.server.learner.weights(), before), "nothing of it was applied"
    with socket.create_connection(served.address, timeout=10) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n" + b"x" * 64)
        with pytest.raises((PeerLost, InvalidFrame)):
            frames.receive(connection)
    assert served.server.ledger.version == 0


def test_a_frame_is_refused_by_its_lengths_before_it_is_read() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(5)
        theirs.sendall(frames.HEADER.pack(frames.MAGIC, FrameKind.PUSH, 2, 1 << 40) + b"{}")
        with pytest.raises(InvalidFrame, match="too large"):
            frames.receive(ours, 1024)
        with pytest.raises(AccessDenied):
            frames.require_key(Frame(FrameKind.PULL), "key")


def test_state_travels_bit_for_bit_and_not_into_another_model() -> None:
    one, other = learner(), learner()
    rng = np.random.default_rng(0)
    gradients = [rng.normal(size=one.count).astype(np.float32) for _ in range(4)]
    for version, each in enumerate(gradients[:2], start=1):
        one.apply(each, version)
    assert other.from_bytes(one.to_bytes({"version": 2})) == {"version": 2}
    for version, each in enumerate(gradients[2:], start=3):
        one.apply(each, version)
        other.apply(each, version)
    assert np.array_equal(one.weights(), other.weights())
    settings = TrainingSettings.model_validate(SETTINGS)
    larger = Learner(TransformerWorkload(config_for(30_000, 16)).build(), settings, 1)
    with pytest.raises(Exception, match="another model"):
        larger.from_bytes(one.to_bytes({}))


def test_one_epoch_is_claimed_once(tmp_path: Path) -> None:
    claims = FileClaims(tmp_path)
    assert claims.claim(2, "standby")
    assert not claims.claim(2, "server")
    assert claims.claim(2, "standby"), "asking again is fine"
    served = ParameterServer(learner(), ServerTerms("", 1, 1, 0), claims, "server")
    with pytest.raises(PeerLost, match="another parameter server leads"):
        served.lead(2)


def test_one_epoch_is_claimed_once_in_the_gangs_store() -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
    store = TCPStore("127.0.0.1", port, None, True, timedelta(seconds=20), wait_for_workers=False)
    other = TCPStore("127.0.0.1", port, None, False, timedelta(seconds=20), wait_for_workers=False)
    assert StoreClaims(other).claim(2, "standby")
    assert not StoreClaims(store).claim(2, "server")
    assert StoreClaims(other).claim(2, "standby"), "asking again is fine"
    assert StoreClaims(store, "another-job").claim(2, "server")


def test_workers_give_up_where_nobody_leads() -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        address = held.getsockname()[:2]
    terms = ServerTerms("", 1, 1, 0, 0.2)
    worker = Worker(0, lambda: [address, address], terms, 1, "float32", away_s=0.3)
    with pytest.raises(PeerLost, match="no parameter server leads"):
        worker.run(lambda _task, weights: (weights, BatchReport()))


def test_layouts_without_a_server_are_refused() -> None:
    settings = TrainingSettings.model_validate(SETTINGS)
    assert require_ranks(settings, 4) == 2
    with pytest.raises(InvalidInput, match="too few ranks"):
        require_ranks(settings, 2)
    with pytest.raises(InvalidInput, match="whole replicas"):
        require_ranks(TrainingSettings.model_validate(SETTINGS | {"mesh": {"tp": 2}}), 4)
