"""Hosts in network namespaces: they are as fast as asked, and nothing of them stays behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.testbed import Testbed, reap_stale, start
from benchmarks.testbed.watcher import NETNS, SCRATCH, namespaces, processes_in
from paceline.errors import InvalidInput

pytestmark = pytest.mark.netns

ROOT = Path(__file__).parents[2]
PROBE = ROOT / "benchmarks/testbed/probe.py"
PORT = 5000


def until(what: Callable[[], object], why: str, timeout_s: float = 20.0) -> None:
    end = time.monotonic() + timeout_s
    while not what():
        assert time.monotonic() < end, f"never came: {why}"
        time.sleep(0.02)


class Stream:
    """A TCP stream between two hosts."""

    def __init__(self, bed: Testbed, sender: int, receiver: int, count: int, port: int = PORT):
        argv = [sys.executable, str(PROBE), "receive", str(port)]
        self.receiver = bed.popen(receiver, argv, stdout=subprocess.PIPE, text=True)
        assert self.receiver.stdout is not None
        assert self.receiver.stdout.readline() == "ready\n"
        argv = [sys.executable, str(PROBE), "send", bed.hosts[receiver].address, str(port)]
        self.sender = bed.popen(sender, [*argv, str(count)], stderr=subprocess.DEVNULL)

    def result(self) -> dict[str, float]:
        assert self.receiver.stdout is not None
        said: dict[str, float] = json.loads(self.receiver.stdout.readline())
        self.stop()
        return said

    def stop(self) -> None:
        for process in (self.receiver, self.sender):
            process.kill()
            process.wait()
        assert self.receiver.stdout is not None
        self.receiver.stdout.close()


def share(bed: Testbed, result: dict[str, float]) -> float:
    """Return a stream's rate as a share of the link's goodput."""
    return result["bytes_s"] / (bed.goodput_mbit * 1e6 / 8)


def test_a_stream_gets_the_goodput_of_its_link() -> None:
    with start(hosts=2, rate_mbit=20) as bed:
        assert share(bed, Stream(bed, 0, 1, 4_000_000).result()) == pytest.approx(1.0, abs=0.1)
        bed.set_rate(1, 4.0)  # a straggler receives and sends slowly
        assert share(bed, Stream(bed, 0, 1, 800_000).result()) == pytest.approx(0.2, abs=0.06)
        assert share(bed, Stream(bed, 1, 0, 800_000).result()) == pytest.approx(0.2, abs=0.06)


def test_streams_of_one_host_share_its_link_fairly() -> None:
    with start(hosts=4, rate_mbit=40) as bed:
        streams = [Stream(bed, 0, host, 8_000_000) for host in (1, 2, 3)]

        def received() -> list[int]:
            counters = bed.counters()
            return [counters[f"node-{host}_in"] for host in (1, 2, 3)]

        until(lambda: min(received()) > 200_000, "all three stream")
        before = received()
        until(lambda: sum(received()) - sum(before) > 4_000_000, "bytes to compare")
        moved = [now - then for now, then in zip(received(), before, strict=True)]
        assert min(moved) > 0.5 * max(moved)  # one queue for all would give 97 to 5
        assert all(each.sender.poll() is None for each in streams)  # nobody had finished yet
        for each in streams:
            each.stop()


def test_a_rack_has_its_uplink_and_the_origin_its_link() -> None:
    with start(hosts=4, rate_mbit=20, racks=2, oversubscription=4, origin_mbit=10) as bed:
        assert [host.rack_name for host in bed.hosts] == ["rack-0", "rack-0", "rack-1", "rack-1"]
        assert bed.uplink_mbit(0) == 10.0
        before = bed.counters()
        crossing = Stream(bed, 0, 2, 2_000_000)
        inside = Stream(bed, 1, 0, 4_000_000)
        assert share(bed, inside.result()) == pytest.approx(1.0, abs=0.15)
        assert share(bed, crossing.result()) == pytest.approx(0.5, abs=0.1)
        moved = {key: count - before[key] for key, count in bed.counters().items()}
        assert moved["cross_rack"] == pytest.approx(2_000_000, rel=0.1)
        assert moved["node-0_in"] == pytest.approx(4_000_000, rel=0.1)


def test_a_cut_link_swallows_what_is_sent_and_says_nothing() -> None:
    with start(hosts=2, rate_mbit=8) as bed:
        stream = Stream(bed, 0, 1, 4_000_000)
        until(lambda: bed.counters()["node-1_in"] > 200_000, "bytes")
        bed.cut(1, "in")
        held = bed.counters()["node-1_in"]
        threading.Event().wait(0.3)
        assert bed.counters()["node-1_in"] <= held + 100_000
        assert stream.sender.poll() is None  # it was told nothing
        bed.mend(1)
        assert stream.result()["bytes"] == 4_000_000  # TCP sent again what was lost


def test_every_host_has_its_own_loopback_and_runs_what_it_is_given() -> None:
    script = "import socket; socket.create_server(('127.0.0.1', 4000)); print('ok')"
    with start(hosts=2, rate_mbit=8) as bed:
        for place in (0, 1, "origin", "core"):
            process = bed.popen(place, [sys.executable, "-c", script], stdout=subprocess.PIPE)
            assert process.communicate()[0] == b"ok\n"
        sleeper = bed.popen(0, ["sleep", "60"])
        until(lambda: sleeper.pid in processes_in([bed.hosts[0].namespace]), "the sleeper")
    assert sleeper.wait(10) == -signal.SIGKILL


def test_nothing_is_left_after_close() -> None:
    with start(hosts=3, rate_mbit=8) as bed:
        scratch = bed.scratch()
        (scratch / "file").write_text("x")
        assert len(namespaces(bed.prefix)) == 5
    assert namespaces(bed.prefix) == []
    assert not scratch.exists()
    bed.close()  # again: nothing happens


OWNER = """
import sys
from benchmarks.testbed import start
bed = start(hosts=3, rate_mbit=8)
bed.scratch()
bed.popen(1, ["sleep", "60"])
print(bed.prefix, bed._watcher.pid, flush=True)
sys.stdin.read()
"""


def owner() -> tuple[subprocess.Popen[str], str, int]:
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    prefix, watcher = process.stdout.readline().split()
    assert len(namespaces(prefix)) == 5
    return process, prefix, int(watcher)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_is_left_after_its_owner_is_killed(number: signal.Signals) -> None:
    process, prefix, _ = owner()
    with process:
        process.send_signal(number)
    until(lambda: not namespaces(prefix), "the namespaces are gone")
    until(lambda: not (SCRATCH[0] / prefix).exists(), "the scratch directory is gone")


def test_the_next_bed_removes_what_a_killed_watcher_left() -> None:
    process, prefix, watcher = owner()
    with process:
        os.kill(watcher, signal.SIGKILL)
        process.kill()
    assert len(namespaces(prefix)) == 5
    assert prefix in reap_stale()
    assert namespaces(prefix) == []
    assert not (SCRATCH[0] / prefix).exists()
    assert not any(prefix in each.name for each in NETNS.iterdir())


def test_an_impossible_bed_is_refused() -> None:
    with pytest.raises(InvalidInput, match="5 racks"):
        start(hosts=3, racks=5)
