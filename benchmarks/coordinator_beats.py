"""How long a heartbeat takes when N agents beat through REST; prints one JSON object.

    python benchmarks/coordinator_beats.py --agents 1000 --seconds 30
    python benchmarks/coordinator_beats.py --agents 10000 --seconds 40

One real coordinator process on one core, a connection an agent from one client process on
another, everybody in one deployment that stays in flight: beats name chunks and edges as an agent's
do. Each agent beats when the last answer told it to (``next_beat_s``). A latency runs from when the
beat was due to its whole answer, so a beat that waits for the one before it counts as late; the
client is one asyncio loop that writes prepared bytes, because 1,000 HTTP clients would measure
themselves. Nothing is lost when the coordinator counted as many beats as were answered.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from paceline.client import CoordinatorClient
from paceline.config import Endpoints, Profile, Runtime, Secrets, save_runtime
from paceline.manifest import build_manifest, write_manifest
from paceline.schemas import (
    CreateDeployment,
    DeploymentBeat,
    EdgeTally,
    Heartbeat,
    RegisterWorker,
    WorkerStatus,
)

PROCESS = """
import sys
from pathlib import Path
from paceline.config import load_runtime
from paceline.api.app import serve
sys.exit(serve(load_runtime(Path(sys.argv[1])), "127.0.0.1", 0, int(sys.argv[2])))
"""
CHUNK = 64 * 1024
AT_ONCE = 32  # registrations in flight
PATIENCE_S = 30.0  # for one answer
COUNT = re.compile(r'^paceline_coordinator_beats_total\{taken="yes"\} (\d+)', re.MULTILINE)
NEXT = re.compile(rb'"next_beat_s":([0-9.eE+-]+)')
LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)


def run(
    agents: int, seconds: float, beat_s: float, chunks: int, cores: tuple[int, int] | None
) -> dict[str, object]:
    """Return the latencies of ``agents`` that beat for ``seconds``."""
    if cores is not None:
        os.sched_setaffinity(0, {cores[1]})
    with served({"beat_s": beat_s}, chunks, core=None if cores is None else cores[0]) as made:
        load = Load(made.url, made.token, made.source, agents, beat_s, chunks)
        asyncio.run(load.run(seconds, lambda: _look(made.pid, made.url, made.token)))
        client = CoordinatorClient(made.url, made.token, 120.0)
        status = client.deployment(load.deployment_id).status.value
        alive = sum(each.alive for each in client.workers())
    used_s = load.after.cpu_s - load.before.cpu_s
    ordered = sorted(load.due)
    waited = sorted(load.taken)
    return {
        "agents": agents,
        "beat_s": beat_s,
        "next_beat_s": load.interval_s,
        "seconds": seconds,
        "beats": len(ordered),
        "beats_per_second": round(len(ordered) / seconds, 1),
        "answered_since_its_start": load.answered,
        "counted_by_coordinator": load.after.beats,
        "lost": load.sent - len(ordered),
        "refused": load.refused,
        "registered_again_before": load.again,
        "alive_in_the_end": alive,
        "deployment": status,
        "p50_ms": _share(ordered, 0.5),
        "p99_ms": _share(ordered, 0.99),
        "max_ms": _share(ordered, 1.0),
        "p99_from_write_ms": _share(waited, 0.99),
        "coordinator_cores": round(used_s / seconds, 3),
        "cpu_us_per_beat": round(used_s / max(1, len(ordered)) * 1e6),
        "coordinator_mib": round(load.after.resident_mib),
        "grown_mib": round(load.after.resident_mib - load.before.resident_mib, 1),
        "pinned": cores is not None,
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
    }


class Look(NamedTuple):
    """The coordinator's process at one moment."""

    cpu_s: float = 0.0
    beats: int = 0
    resident_mib: float = 0.0


NOTHING = Look()


@dataclass
class Load:
    """All agents of one run, and what they measured."""

    url: str
    token: str
    source: str
    agents: int
    interval_s: float
    chunks: int
    deployment_id: str = ""
    due: list[float] = field(default_factory=list)
    taken: list[float] = field(default_factory=list)
    sent: int = 0
    refused: int = 0
    again: int = 0  # lost while the others registered, and registered again
    begun: int = 0
    answered: int = 0
    before: Look = NOTHING  # as the measured beats begin,
    after: Look = NOTHING  # and when they are over
    from_s: float = math.inf  # what is due from here on is measured,
    until_s: float = math.inf  # and what is due from here on is not sent
    rate: Callable[[], float] = lambda: 1e6  # bytes/s that an agent reports, both ways

    def __post_init__(self) -> None:
        self.names = [f"node-{index}" for index in range(self.agents)]
        parts = urlsplit(self.url)
        self.host, self.port = parts.hostname or "", parts.port or 0
        self.registering = asyncio.Semaphore(AT_ONCE)

    def head(self, path: str) -> bytes:
        """Return a request's first lines; its length is still to be filled in."""
        return (
            f"POST {path} HTTP/1.1\r\nHost: {self.host}\r\nAuthorization: Bearer {self.token}\r\n"
            "Accept-Encoding: identity\r\nAccept: application/json\r\n"
            "Content-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        ).encode()

    async def run(self, seconds: float, look: Callable[[], Look]) -> None:
        """Have everybody register and beat, deploy to all, then measure for ``seconds``."""
        loop = asyncio.get_running_loop()
        beating = [asyncio.ensure_future(self._live(index)) for index in range(self.agents)]
        while self.begun < self.agents:
            await asyncio.sleep(0.1)
            _raise_first(beating)
        await asyncio.sleep(1.5 * self.interval_s)
        self.deployment_id = await asyncio.to_thread(self._deploy)
        await asyncio.sleep(max(2.0, self.interval_s))
        self.before = await asyncio.to_thread(look)
        self.from_s = loop.time() + 0.2
        self.until_s = self.from_s + seconds
        await asyncio.gather(*beating)
        self.after = await asyncio.to_thread(look)

    def _deploy(self) -> str:
        call = CreateDeployment(
            model_id="m",
            version="v1",
            source_url=self.source,
            target_workers=tuple(self.names),
        )
        client = CoordinatorClient(self.url, self.token, 120.0)
        return client.create(call, "benchmark").deployment_id

    async def _live(self, index: int) -> None:
        """Be one agent: register, then beat as often as told."""
        loop = asyncio.get_running_loop()
        head, written = self.head("/workers/heartbeat"), _beats(self, index)
        wire, incarnation = await self._begin(index, 1), 1
        next_s, count = loop.time() + self.interval_s * index / self.agents, 0
        while next_s < self.until_s:
            await asyncio.sleep(next_s - loop.time())
            measured = next_s >= self.from_s
            self.sent += measured
            start_s = loop.time()
            answer = await wire.ask(head, written(count, incarnation))
            now_s = loop.time()
            if measured:
                self.taken.append(now_s - start_s)
                self.due.append(now_s - next_s)
            told = NEXT.search(answer)
            assert told is not None
            self.interval_s = float(told.group(1))
            next_s += self.interval_s
            count += self.deployment_id != ""
            if b'"continue":true' in answer:
                self.answered += 1
            else:
                self.refused += measured
                self.again += not measured
                incarnation += 1
                wire = await self._begin(index, incarnation, wire)
                next_s = max(next_s, loop.time())
        wire.transport.close()

    async def _begin(self, index: int, incarnation: int, wire: Wire | None = None) -> Wire:
        """Return a connection over which this agent has registered."""
        async with self.registering:
            if wire is None:
                loop = asyncio.get_running_loop()
                _, wire = await loop.create_connection(Wire, self.host, self.port)
            body = _registration(self.names[index], incarnation)
            await wire.ask(self.head("/workers/register"), body)
        self.begun += incarnation == 1
        return wire


class Wire(asyncio.Protocol):
    """One kept-alive connection with at most one request on it."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport
        self._got = bytearray()
        self._answer: asyncio.Future[bytes] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    async def ask(self, head: bytes, body: bytes) -> bytes:
        """Return the answer's body; raises TimeoutError, and OSError for anything but a 2xx."""
        self._answer = asyncio.get_running_loop().create_future()
        self.transport.write(head % len(body) + body)
        overdue = asyncio.get_running_loop().call_later(PATIENCE_S, self._give_up, self._answer)
        try:
            return await self._answer
        finally:
            overdue.cancel()

    def _give_up(self, answer: asyncio.Future[bytes]) -> None:
        if not answer.done():
            answer.set_exception(TimeoutError(f"no answer within {PATIENCE_S:.0f} s"))

    def data_received(self, data: bytes) -> None:
        self._got += data
        end = self._got.find(b"\r\n\r\n")
        if end < 0 or self._answer is None:
            return
        found = LENGTH.search(self._got, 0, end)
        length = int(found.group(1)) if found else 0
        if len(self._got) < end + 4 + length:
            return
        status, body = bytes(self._got[9:12]), bytes(self._got[end + 4 : end + 4 + length])
        del self._got[: end + 4 + length]
        if self._answer.done():
            return
        if status.startswith(b"2"):
            self._answer.set_result(body)
        else:
            self._answer.set_exception(OSError(f"{status.decode()} {body[:500].decode()}"))

    def connection_lost(self, exc: Exception | None) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(exc or ConnectionResetError("the coordinator hung up"))


def _raise_first(tasks: list[asyncio.Future[None]]) -> None:
    for each in tasks:
        if each.done():
            each.result()


def _registration(name: str, incarnation: int) -> bytes:
    call = RegisterWorker(
        worker_id=name,
        hostname="h",
        rack=f"r{int(name.rsplit('-', 1)[1]) // 40}",
        available_storage=1,
        address="127.0.0.1:9",
        link_mbit=80,
        incarnation=incarnation,
    )
    return call.model_dump_json().encode()


def _beats(load: Load, index: int) -> Callable[[int, int], bytes]:
    """Return what makes an agent's beats: written once, numbers filled in as they grow."""
    name, source = load.names[index], load.names[index - 1]
    text: dict[str, bytes] = {}

    def template() -> bytes:
        entry = DeploymentBeat(
            deployment_id=load.deployment_id,
            epoch=1,
            status=WorkerStatus.RECEIVING,
            pieces_held=770_001,
            bytes_held=770_002,
            chunks_received=(770_003,),
            edges=(
                EdgeTally(source=source, reader=name, pieces=770_001),
                EdgeTally(source=name, reader=load.names[(index + 1) % load.agents], bytes=770_002),
            ),
        )
        beat = Heartbeat(
            worker_id=name,
            status=WorkerStatus.RECEIVING if load.deployment_id else WorkerStatus.IDLE,
            chunks_received=(770_003,) if load.deployment_id else (),
            bandwidth_in=770_005.0,
            bandwidth_out=770_005.0,
            incarnation=770_004,
            deployments=(entry,) if load.deployment_id else (),
        )
        return beat.model_dump_json(by_alias=True).encode()

    def written(count: int, incarnation: int) -> bytes:
        if load.deployment_id not in text:
            text[load.deployment_id] = template()
        held = min(load.chunks - 1, 1 + count * load.chunks // 40)
        chunks = b",".join(b"%d" % each for each in range(held))
        filled = text[load.deployment_id].replace(b"770004", b"%d" % incarnation)
        filled = filled.replace(b"770001", b"%d" % held).replace(b"770002", b"%d" % (held * CHUNK))
        filled = filled.replace(b"770005.0", b"%.1f" % load.rate())
        return filled.replace(b"770003", chunks)

    return written


def _look(pid: int, url: str, token: str) -> Look:
    return Look(_cpu_s(pid), _counted(url, token), _resident_mib(pid))


def _counted(url: str, token: str) -> int:
    """Return how many beats the coordinator says it took."""
    request = Request(f"{url}/metrics", headers={"Authorization": f"Bearer {token}"})
    with urlopen(request, timeout=30) as answer:
        found = COUNT.search(answer.read().decode())
    assert found is not None, "the coordinator does not count its beats"
    return int(found.group(1))


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _resident_mib(pid: int) -> float:
    found = re.search(r"VmRSS:\s*(\d+)", Path(f"/proc/{pid}/status").read_text())
    return int(found.group(1)) / 1024 if found else 0.0


def _share(ordered: list[float], share: float) -> float:
    place = min(len(ordered) - 1, int(len(ordered) * share))
    return round(ordered[place] * 1e3, 3)


@dataclass(frozen=True)
class Served:
    """A coordinator in a process of its own, and the directory of a model for its agents."""

    url: str
    token: str
    pid: int
    source: str


@contextmanager
def served(
    relay: Mapping[str, object],
    chunks: int,
    *,
    security: Mapping[str, object] | None = None,
    core: int | None = None,
) -> Iterator[Served]:
    """Yield a coordinator with these settings, on ``core`` alone where one is named."""
    with tempfile.TemporaryDirectory() as temporary:
        state_dir, token = Path(temporary), secrets.token_hex(16)
        profile = Profile.model_validate(
            {"relay": {"deadline_s": 3600, **relay}, "security": dict(security or {})}
        )
        secret = Secrets(coordinator_token=token)
        save_runtime(
            Runtime(profile=profile, state_dir=state_dir, endpoints=Endpoints(), secrets=secret)
        )
        source = _model(state_dir, chunks)
        reader, writer = os.pipe()
        argv = [sys.executable, "-c", PROCESS, str(state_dir), str(writer)]
        if core is not None:
            argv = ["taskset", "-c", str(core), *argv]
        with subprocess.Popen(argv, pass_fds=[writer]) as server:
            try:
                os.close(writer)
                with os.fdopen(reader) as ready:
                    url = str(json.loads(ready.readline())["url"])
                yield Served(url, token, server.pid, source)
            finally:
                server.send_signal(signal.SIGTERM)


def _model(state_dir: Path, chunks: int) -> str:
    directory = state_dir / "source"
    directory.mkdir()
    (directory / "model.bin").write_bytes(bytes(chunks * CHUNK))
    manifest = build_manifest(
        directory, model_id="m", version="v1", link_mbit=80, piece_bytes=CHUNK, chunk_bytes=CHUNK
    )
    write_manifest(directory, manifest)
    return str(directory)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--agents", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--beat-s", type=float, default=1.0)
    parser.add_argument("--chunks", type=int, default=500, help="of the model, all named in beats")
    parser.add_argument("--anywhere", action="store_true", help="do not pin to a core each")
    chosen = parser.parse_args()
    two = None if chosen.anywhere or (os.cpu_count() or 1) < 2 else (0, 1)
    report = run(chosen.agents, chosen.seconds, chosen.beat_s, chosen.chunks, two)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
