"""The parameter server: real processes, killed and frozen servers, callers that misbehave."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch._C._distributed_c10d import PrefixStore, TCPStore

from paceline.config import TrainingSettings
from paceline.errors import AccessDenied, CorruptData, InvalidFrame, PeerLost
from paceline.models import config_for
from paceline.training.loop import TransformerWorkload
from paceline.training.strategies import (
    BatchReport,
    Frame,
    FrameKind,
    Learner,
    ParameterServer,
    Rendezvous,
    Terms,
    Worker,
    frames,
    norm_of,
)
from paceline.training.strategies.server import NoLeader
from tests.training.strategies.asynchronous import WORKERS, Logging

ROOT = Path(__file__).parents[3]
STEPS = 40
REPORT = BatchReport(loss=1.0).model_dump()
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


@pytest.fixture(scope="module")
def store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=20), wait_for_workers=False)


class Gang:
    """Server, standby and two workers as processes; what each logged, in files."""

    def __init__(self, forker: Forker, directory: Path, port: int) -> None:
        self._files = [directory / f"rank-{rank}" for rank in range(2 + WORKERS)]
        self._forker = forker
        self._codes: dict[int, int] = {}
        self.pids: list[int] = forker.ask(
            [
                {"rank": rank, "settings": SETTINGS, "port": port, "gang": str(directory),
                 "log": str(file)}
                for rank, file in enumerate(self._files)
            ]
        )  # fmt: skip

    def log(self, rank: int) -> list[dict[str, Any]]:
        """Whole lines only: a killed rank's last one may be torn."""
        text = self._files[rank].read_text() if self._files[rank].exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line[-1] == "\n"]

    def updates(self, rank: int) -> list[dict[str, Any]]:
        return [each for each in self.log(rank) if "version" in each]

    def until(self, rank: int, version: int) -> None:
        end = time.monotonic() + 60
        while not any(each["version"] >= version for each in self.updates(rank)):
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

    def finish(self, *ranks: int) -> None:
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
def gang(forker: Forker, tmp_path: Path, store: TCPStore) -> Iterator[Gang]:
    found = Gang(forker, tmp_path, store.port)
    yield found
    found.close()


def require_whole(log: list[dict[str, Any]]) -> None:
    """Every gradient of every worker once, none staler than the bound."""
    assert [each["version"] for each in log] == list(range(1, STEPS * WORKERS + 1))
    for worker in range(WORKERS):
        mine = [each["sequence"] for each in log if each["worker"] == worker]
        assert mine == list(range(1, STEPS + 1))
    assert all(0 <= each["version"] - 1 - each["base"] <= 2 for each in log)
    assert np.mean([each["loss"] for each in log[-10:]]) < log[0]["loss"] - 1, "it learned"


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.nightly)]
)
def test_the_standby_takes_over_from_a_lost_server_with_every_update(
    gang: Gang, number: signal.Signals
) -> None:
    gang.until(1, 1)  # a standby without a state cannot take over
    gang.until(0, 25)
    os.kill(gang.pids[0], number)
    gang.finish(1, 2, 3)
    of_leader, of_standby = gang.updates(0), gang.updates(1)
    whole = [e for e in of_leader if e["version"] < of_standby[0]["version"]] + of_standby
    require_whole(whole)
    assert gang.log(1)[-1] == {"ended": "leader", "at": STEPS * WORKERS}
    assert whole[: len(of_leader)] == of_leader, "what the server acknowledged"
    for rank in (2, 3):
        assert STEPS <= gang.log(rank)[-1]["computed"] <= STEPS + 2, "at most one anew a server"
    if number is signal.SIGSTOP:
        os.kill(gang.pids[0], signal.SIGCONT)
        assert gang.code(0, 30.0) != 0, "it wakes, finds that another leads, and ends"
        assert not any("ended" in each for each in gang.log(0))


def test_a_server_without_its_standby_goes_on(gang: Gang) -> None:
    gang.until(0, 10)
    os.kill(gang.pids[1], signal.SIGKILL)
    gang.finish(0, 2, 3)
    require_whole(gang.updates(0))


# ------------------------------------------------------------------------ in this process


def learner() -> Learner:
    settings = TrainingSettings.model_validate(SETTINGS)
    return Learner(TransformerWorkload(config_for(10_000, 16)).build(), settings, 1)


class Served:
    """A leading server in threads of this process."""

    def __init__(self, store: TCPStore, name: str) -> None:
        terms = Terms("key", workers=1, pushes=3, max_staleness=2, silence_s=1.0)
        meeting = Rendezvous(PrefixStore(name, store))
        self.server = ParameterServer(learner(), terms, meeting, Logging(lambda **_: None))

    @contextmanager
    def leading(self) -> Iterator[Served]:
        with self.server.listening("127.0.0.1") as self.address:
            self.server.lead()
            self.server.open()
            yield self
            self.server.end(PeerLost("the test is over"))

    def greet(self, **hello: Any) -> socket.socket:
        return frames.connect(self.address, 10.0, {"role": "worker", "worker": 0} | hello)

    def pull(self, **hello: Any) -> socket.socket:
        connection = self.greet(key="key", **hello)
        self.welcome = frames.receive(connection).head
        frames.send(connection, Frame(FrameKind.PULL))
        assert frames.receive(connection).kind is FrameKind.WEIGHTS
        return connection


@pytest.fixture
def served(store: TCPStore, tmp_path: Path) -> Iterator[Served]:
    with Served(store, str(tmp_path)).leading() as found:
        yield found


def test_a_worker_whose_answer_was_lost_learns_what_is_applied(served: Served) -> None:
    gradient = np.ones(served.server.learner.count, np.float32)
    push = frames.array_frame(FrameKind.PUSH, gradient, sequence=1, base=0, report=REPORT)
    with served.pull() as connection:
        frames.send(connection, push)
        frames.receive(connection)  # as if it never came
    with served.pull() as connection:
        assert served.welcome["applied"] == 1
        frames.send(connection, push)
        assert frames.receive(connection).kind is FrameKind.REFUSED, "not applied twice"
    assert served.server.ledger.version == 1


def test_the_newest_connection_of_a_worker_counts(served: Served) -> None:
    with served.pull() as older, served.pull() as newer:
        with pytest.raises(PeerLost):
            frames.receive(older)
        frames.send(newer, Frame(FrameKind.PULL))
        assert frames.receive(newer).kind is FrameKind.WEIGHTS


def test_callers_without_the_key_or_with_other_numbers_are_refused(served: Served) -> None:
    before = served.server.learner.weights()
    for hello in ({"key": "wrong"}, {"key": "key", "worker": 7}):
        with served.greet(**hello) as connection, pytest.raises(PeerLost):
            frames.receive(connection)
    whole, at = np.ones(len(before), np.float32), {"sequence": 1, "base": 0}
    for body, head in (
        (np.ones(3, np.float32), at),
        (whole * np.nan, at),
        (whole, at | {"sequence": 2}),
        (whole, at | {"base": 9}),
        (whole, at | {"sequence": -1}),
        (whole, at | {"sequence": "1"}),
        (whole, at | {"report": {"los": 1}}),
    ):
        with served.pull() as connection:
            frame = frames.array_frame(FrameKind.PUSH, body, **({"report": REPORT} | head))
            frames.send(connection, frame)
            assert frames.receive(connection).kind is FrameKind.REFUSED
    with socket.create_connection(served.address, timeout=10) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n" + b"x" * 64)
        with pytest.raises((PeerLost, InvalidFrame)):
            frames.receive(connection)
    assert served.server.ledger.version == 0
    assert np.array_equal(served.server.learner.weights(), before), "nothing of it was applied"


def test_a_frame_is_refused_by_its_lengths_before_it_is_read() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(5)
        theirs.sendall(frames.HEADER.pack(frames.MAGIC, FrameKind.PUSH, 2, 1 << 40) + b"{}")
        with pytest.raises(InvalidFrame, match="too large"):
            frames.receive(ours, 1024)
        frames.send(theirs, Frame(FrameKind.PULL))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        frames.send(theirs, Frame(FrameKind.PULL, {"key": "key"}))
        with pytest.raises(AccessDenied):
            frames.receive_hello(ours, "key", 5)


def test_state_travels_bit_for_bit_and_not_into_another_model() -> None:
    one, other = learner(), learner()
    rng = np.random.default_rng(0)
    gradients = [rng.normal(size=one.count).astype(np.float32) for _ in range(4)]
    for version, each in enumerate(gradients, start=1):
        if version == 3:
            other.from_bytes(one.to_bytes())
        if version >= 3:
            other.apply(each, version, norm_of(each))
        one.apply(each, version, norm_of(each))
    assert np.array_equal(one.weights(), other.weights())
    settings = TrainingSettings.model_validate(SETTINGS)
    larger = Learner(TransformerWorkload(config_for(30_000, 16)).build(), settings, 1)
    with pytest.raises(CorruptData, match="another model"):
        larger.from_bytes(one.to_bytes())


def test_one_epoch_is_claimed_once(store: TCPStore, tmp_path: Path) -> None:
    meeting = Rendezvous(PrefixStore(str(tmp_path), store))
    assert meeting.claim(2, "standby")
    assert not meeting.claim(2, "server")
    assert meeting.claim(2, "standby"), "repeating the call is fine"
    assert Rendezvous(PrefixStore("another-job", store)).claim(2, "server")
    with pytest.raises(PeerLost, match="another parameter server leads"):
        Served(store, str(tmp_path)).server.lead(2)


def test_workers_give_up_where_no_server_leads() -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        address = held.getsockname()[:2]
    terms = Terms("", 1, 1, 0, 0.2)
    worker = Worker(0, lambda: [address, address], terms, learner(), away_s=0.3)  # type: ignore[arg-type]
    with pytest.raises(PeerLost, match="no parameter server leads"):
        worker.run(lambda _task, weights: (weights, BatchReport()))


def follower(served: Served) -> ParameterServer:
    meeting, policy = served.server._rendezvous, Logging(lambda **_: None)
    return ParameterServer(learner(), served.server.terms, meeting, policy)


def test_a_standby_that_starts_after_the_end_is_released(store: TCPStore, tmp_path: Path) -> None:
    served = Served(store, str(tmp_path))
    late = follower(served)
    with served.leading():
        served.server.done.set()
        served.server.until_done()
    assert late.follow(lambda: [served.address], 10.0) == "released"


def test_a_standby_the_leader_does_not_wait_for_takes_nothing_over(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It loads the state for longer than the leader waits, which goes on alone."""
    slow, joins = follower(served), []

    def load(frame: Frame) -> None:
        joins.append(frame)
        time.sleep(1.5)

    monkeypatch.setattr(slow, "_take_state", load)
    with pytest.raises(NoLeader, match="no parameter server to follow"):
        slow.follow(lambda: [served.address] if len(joins) < 2 else [], 1.0)
    assert len(joins) == 2
    assert served.server._rendezvous.claim(2, "another"), "the standby did not claim the epoch"
