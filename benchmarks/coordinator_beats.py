"""How long a heartbeat takes when N agents beat through REST; prints one JSON object.

    python benchmarks/coordinator_beats.py --agents 1000 --seconds 30
    python benchmarks/coordinator_beats.py --agents 10000 --seconds 40

One real coordinator process on one core, a keep-alive connection an agent from one client process on
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
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from paceline.client import CoordinatorClient
from paceline.manifest import build_manifest, write_manifest
from paceline.profile import Endpoints, Profile, Runtime, Secrets, save_runtime
from paceline.wire.calls import (
    CreateDeployment,
    DeploymentBeat,
    EdgeTally,
    Heartbeat,
    RegisterWorker,
)
from paceline.wire.records import WorkerStatus

PROCESS = """
import sys
from pathlib import Path
from paceline.profile import load_runtime
from paceline.service.app import serve
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
    with tempfile.TemporaryDirectory() as temporary:
        state_dir = Path(temporary)
        token = secrets.token_hex(16)
        profile = Profile.model_validate({"relay": {"beat_s": beat_s, "deadline_s": 3600}})
        runtime = Runtime(
            profile=profile,
            state_dir=state_dir,
            endpoints=Endpoints(),
            secrets=Secrets(coordinator_token=token),
        )
        save_runtime(runtime)
        source = _model(state_dir, chunks)
        reader, writer = os.pipe()
        argv = [sys.executable, "-c", PROCESS, str(state_dir), str(writer)]
        if cores is not None:
            argv = ["taskset", "-c", str(cores[0]), *argv]
            os.sched_setaffinity(0, {cores[1]})
        with subprocess.Popen(argv, pass_fds=[writer]) as server:
            try:
                os.close(writer)
                with os.fdopen(reader) as ready:
                    url = json.loads(ready.readline())["url"]
                load = Load(url, token, agents, beat_s, chunks)
                asyncio.run(load.register())
                targets = tuple(load.names)
                call = CreateDeployment(
                    model_id="m", version="v1", source_url=source, target_workers=targets
                )
                client = CoordinatorClient(url, token, 120.0)
                load.deployment_id = client.create(call, "benchmark").deployment_id
                began_s, used_s = time.monotonic(), _cpu_s(server.pid)
                asyncio.run(load.beat_on(seconds))
                wall_s, used_s = time.monotonic() - began_s, _cpu_s(server.pid) - used_s
                counted = _counted(url, token)
                status = client.deployment(load.deployment_id).status.value
                alive = sum(each.alive for each in client.workers())
                resident = _resident_mib(server.pid)
            finally:
                server.send_signal(signal.SIGTERM)
    ordered = sorted(load.due)
    waited = sorted(load.taken)
    return {
        "agents": agents,
        "beat_s": beat_s,
        "next_beat_s": load.interval_s,
        "seconds": seconds,
        "beats": len(ordered),
        "beats_per_second": round(len(ordered) / seconds, 1),
        "counted_by_coordinator": counted,
        "lost": load.sent - len(ordered),
        "refused": load.refused,
        "alive_in_the_end": alive,
        "deployment": status,
        "p50_ms": _share(ordered, 0.5),
        "p99_ms": _share(ordered, 0.99),
        "max_ms": _share(ordered, 1.0),
        "p99_from_write_ms": _share(waited, 0.99),
        "coordinator_cores": round(used_s / wall_s, 3),
        "cpu_us_per_beat": round(used_s / max(1, len(ordered)) * 1e6),
        "coordinator_mib": resident,
        "pinned": cores is not None,
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
    }


@dataclass
class Load:
    """All agents of one run, and what they measured."""

    url: str
    token: str
    agents: int
    interval_s: float
    chunks: int
    deployment_id: str = ""
    due: list[float] = field(default_factory=list)
    taken: list[float] = field(default_factory=list)
    sent: int = 0
    refused: int = 0

    def __post_init__(self) -> None:
        self.names = [f"node-{index}" for index in range(self.agents)]
        parts = urlsplit(self.url)
        self.host, self.port = parts.hostname or "", parts.port or 0

    def head(self, path: str) -> bytes:
        """Return a request's first lines; its length is still to be filled in."""
        return (
            f"POST {path} HTTP/1.1\r\nHost: {self.host}\r\nAuthorization: Bearer {self.token}\r\n"
            "Accept-Encoding: identity\r\nAccept: application/json\r\n"
            "Content-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        ).encode()

    async def register(self) -> None:
        """Make everybody known."""
        waiting = list(reversed(self.names))

        async def some() -> None:
            wire = await self.connect()
            while waiting:
                await wire.ask(self.head("/workers/register"), _registration(waiting.pop()))
            wire.transport.close()

        await asyncio.gather(*(some() for _ in range(min(AT_ONCE, self.agents))))

    async def beat_on(self, seconds: float) -> None:
        """Have everybody beat, evenly spread, for ``seconds``."""
        wires = []
        for start in range(0, self.agents, 200):
            group = range(start, min(start + 200, self.agents))
            wires += await asyncio.gather(*(self.connect() for _ in group))
        loop = asyncio.get_running_loop()
        begin_s = loop.time() + 0.5
        # A second or two in which everybody is told the interval for this many is not measured.
        until_s = begin_s + seconds
        await asyncio.gather(
            *(self._one(wire, index, begin_s, until_s) for index, wire in enumerate(wires))
        )
        for wire in wires:
            wire.transport.close()

    async def connect(self) -> Wire:
        loop = asyncio.get_running_loop()
        _, wire = await loop.create_connection(Wire, self.host, self.port)
        return wire

    async def _one(self, wire: Wire, index: int, begin_s: float, until_s: float) -> None:
        loop = asyncio.get_running_loop()
        head, beats = self.head("/workers/heartbeat"), _beats(self, index)
        interval_s = self.interval_s if self.agents <= 1000 else self.agents / 1000
        next_s = begin_s + interval_s * index / self.agents
        count = 0
        while next_s < until_s:
            await asyncio.sleep(next_s - loop.time())
            self.sent += 1
            start_s = loop.time()
            answer = await wire.ask(head, beats(count))
            now_s = loop.time()
            self.taken.append(now_s - start_s)
            self.due.append(now_s - next_s)
            told = NEXT.search(answer)
            if told is None or b'"continue":true' not in answer:
                self.refused += 1
                return
            self.interval_s = float(told.group(1))
            next_s += self.interval_s
            count += 1


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
        async with asyncio.timeout(PATIENCE_S):
            return await self._answer

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


def _registration(name: str) -> bytes:
    call = RegisterWorker(
        worker_id=name,
        hostname="h",
        rack=f"r{int(name.rsplit('-', 1)[1]) // 40}",
        available_storage=1,
        address="127.0.0.1:9",
        link_mbit=80,
    )
    return call.model_dump_json().encode()


def _beats(load: Load, index: int):
    """Return what makes an agent's beats: written once, numbers filled in as they grow."""
    name, source = load.names[index], load.names[index - 1]
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
        status=WorkerStatus.RECEIVING,
        chunks_received=(770_003,),
        bandwidth_in=1e6,
        bandwidth_out=1e6,
        deployments=(entry,),
    )
    text = beat.model_dump_json(by_alias=True).encode()

    def written(count: int) -> bytes:
        held = min(load.chunks - 1, 1 + count * load.chunks // 40)
        chunks = b",".join(b"%d" % each for each in range(held))
        filled = text.replace(b"770001", b"%d" % held).replace(b"770002", b"%d" % (held * CHUNK))
        return filled.replace(b"770003", chunks)

    return written


def _counted(url: str, token: str) -> int | None:
    """Return how many beats the coordinator says it took."""
    request = Request(f"{url}/metrics", headers={"Authorization": f"Bearer {token}"})
    with urlopen(request, timeout=30) as answer:
        found = COUNT.search(answer.read().decode())
    return None if found is None else int(found.group(1))


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _resident_mib(pid: int) -> int:
    found = re.search(r"VmRSS:\s*(\d+)", Path(f"/proc/{pid}/status").read_text())
    return int(found.group(1)) // 1024 if found else 0


def _share(ordered: list[float], share: float) -> float:
    place = min(len(ordered) - 1, int(len(ordered) * share))
    return round(ordered[place] * 1e3, 3)


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
