"""Before a caller of the parameter server proves the gang's key it gets 4 KB and one deadline; what
a gang listens on is its fleet's network alone."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import psutil
import pytest
from torch.distributed import HashStore

from paceline.config import TrainingSettings
from paceline.errors import InvalidFrame, PeerLost
from paceline.models import config_for
from paceline.training.loop import TransformerWorkload, interface_of
from paceline.training.strategies import (
    FrameKind,
    Learner,
    ParameterServer,
    Rendezvous,
    Terms,
    frames,
    server,
)
from tests.training.strategies.asynchronous import Logging

GREET_S = 0.5
HELLO = {"role": "worker", "worker": 0, "key": "key"}


def hello(**more: object) -> bytes:
    head = json.dumps(HELLO | more).encode()
    return frames.HEADER.pack(frames.MAGIC, FrameKind.HELLO, len(head), 0) + head


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, int]]:
    """A parameter server that leads, with a short deadline for greetings."""
    monkeypatch.setattr(server, "GREET_S", GREET_S)
    settings = TrainingSettings.model_validate(
        {"ranks": 3, "steps": 3, "synchrony": {"kind": "parameter-server"}}
    )
    learner = Learner(TransformerWorkload(config_for(10_000, 16)).build(), settings, 1)
    meeting = Rendezvous(HashStore())
    served = ParameterServer(learner, Terms("key", 1, 3, 2), meeting, Logging(lambda **_: None))
    with served.listening("127.0.0.1") as found:
        served.lead()
        served.open()
        yield found
        served.end(PeerLost("the test is over"))


def drip(connection: socket.socket, raw: bytes) -> int:
    """Send a byte now and then, each well within the deadline of a read; return how many went."""
    for sent, byte in enumerate(raw):
        try:
            connection.sendall(bytes([byte]))
            connection.settimeout(GREET_S / 5)
            if connection.recv(1, socket.MSG_PEEK) == b"":
                return sent
        except TimeoutError:
            continue
        except OSError:
            return sent
    return len(raw)


def test_a_greeting_that_comes_byte_by_byte_is_cut_off(address: tuple[str, int]) -> None:
    raw = hello()
    with socket.create_connection(address, timeout=10) as connection:
        assert drip(connection, raw) < len(raw)


def test_slow_callers_do_not_keep_the_places_of_ranks(address: tuple[str, int]) -> None:
    long = hello(more="x" * 3500)
    with contextlib.ExitStack() as stack:
        for _ in range(2 * 1 + 8):  # as many as the server serves at once
            slow = stack.enter_context(socket.create_connection(address, timeout=10))
            threading.Thread(target=drip, args=(slow, long), daemon=True).start()
        until = time.monotonic() + 30
        while time.monotonic() < until:
            with socket.create_connection(address, timeout=10) as connection:
                connection.sendall(hello())
                with contextlib.suppress(PeerLost):
                    assert frames.receive(connection, 0).kind is FrameKind.WELCOME
                    return
            time.sleep(0.05)
    pytest.fail("no rank gets a place")


def test_a_greeting_of_more_than_4_kb_is_refused_by_its_lengths(
    address: tuple[str, int],
) -> None:
    with socket.create_connection(address, timeout=10) as connection:
        with contextlib.suppress(OSError):
            connection.sendall(hello(more="x" * 5000))
        with pytest.raises(PeerLost):
            frames.receive(connection, 0)
    with socket.create_connection(address, timeout=10) as connection:
        connection.sendall(hello(more="x" * 3500))
        assert frames.receive(connection, 0).kind is FrameKind.WELCOME


def test_lengths_and_deadline_are_of_the_whole_frame() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(frames.HEADER.pack(frames.MAGIC, FrameKind.HELLO, 4097, 0))
        with pytest.raises(InvalidFrame, match="too large"):
            frames.receive_hello(ours, "key", 10.0)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        thread = threading.Thread(target=drip, args=(theirs, hello()), daemon=True)
        thread.start()
        ours.settimeout(60)
        with pytest.raises(PeerLost):
            frames.receive(ours, 0, within_s=GREET_S)
    thread.join(30)


# ── where a gang listens ─────────────────────────────────────────────────────────────────────────

OWN = sorted(
    {
        each.address
        for name, addresses in psutil.net_if_addrs().items()
        for each in addresses
        if each.family is socket.AF_INET and psutil.net_if_stats()[name].isup
    }
)

# One import of torch for the three: a store and two ranks, forked.
GANG = """
import json, os, sys
from paceline.training.launcher.forkserver import keep_store
from paceline.training.loop.group import join_group

host = sys.argv[1]

def forked(act, *given):
    ours, theirs = os.pipe()
    if (pid := os.fork()):
        os.close(theirs)
        return pid, os.fdopen(ours)
    os.dup2(theirs, 1)
    os.close(theirs)
    act(*given)
    os._exit(0)

def rank(number, port):
    with join_group(number, 2, host, port, 1, 60.0, serve=False, own=host) as group:
        print(group.sums([1.0]), flush=True)
        sys.stdin.read()

store, said = forked(keep_store, host, 1)
port = int(said.read())
ranks = [forked(rank, number, port) for number in range(2)]
print(json.dumps([[store, *(pid for pid, _ in ranks)], [said.readline() for _, said in ranks]]))
sys.stdout.flush()
sys.stdin.read()
"""


def listening(pid: int) -> set[str]:
    found = psutil.Process(pid).net_connections(kind="inet")
    return {each.laddr.ip for each in found if each.status == psutil.CONN_LISTEN}


def test_store_and_ranks_listen_on_the_fleets_address_alone() -> None:
    host = OWN[-1]  # not loopback, where there is another
    environment = {k: v for k, v in os.environ.items() if not k.startswith("GLOO_")}
    with contextlib.ExitStack() as stack:
        gang = stack.enter_context(
            subprocess.Popen(
                [sys.executable, "-c", GANG, host],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=environment | {"OMP_NUM_THREADS": "1"},
            )
        )
        stack.callback(gang.kill)
        assert gang.stdout is not None
        pids, sums = json.loads(gang.stdout.readline())
        stack.callback(lambda: [psutil.Process(each).kill() for each in pids])
        assert sums == ["[2.0]\n"] * 2
        assert [listening(each) for each in pids] == [{host}] * 3


def test_an_interface_is_found_by_its_address() -> None:
    assert {interface_of(each) for each in OWN} <= set(psutil.net_if_addrs())
    assert interface_of("127.0.0.1") == interface_of("localhost") == "lo"
    assert interface_of("203.0.113.77") is None
