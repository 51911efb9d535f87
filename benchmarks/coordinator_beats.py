"""How long a heartbeat takes when N agents beat through REST; prints one JSON object.

    python benchmarks/coordinator_beats.py --agents 64 --seconds 10

A real coordinator process, N connections from one client process, all agents taking part in one
deployment that stays in flight. Latency is the client's: request written to answer read. The client
shares the machine with the server, so figures are pessimistic on few cores.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from paceline.client import CoordinatorClient
from paceline.manifest import build_manifest, write_manifest
from paceline.profile import Endpoints, Profile, Runtime, Secrets, save_runtime
from paceline.wire.calls import CreateDeployment, DeploymentBeat, Heartbeat, RegisterWorker
from paceline.wire.records import WorkerStatus

PROCESS = """
import sys
from pathlib import Path
from paceline.profile import load_runtime
from paceline.service.app import serve
sys.exit(serve(load_runtime(Path(sys.argv[1])), "127.0.0.1", 0, int(sys.argv[2])))
"""


def run(agents: int, seconds: float, beat_s: float) -> dict[str, object]:
    """Return the latencies of ``agents`` that beat each ``beat_s`` for ``seconds``."""
    with tempfile.TemporaryDirectory() as temporary:
        state_dir = Path(temporary)
        token = secrets.token_hex(16)
        profile = Profile.model_validate({"relay": {"beat_s": beat_s, "lost_after_beats": 40}})
        runtime = Runtime(
            profile=profile,
            state_dir=state_dir,
            endpoints=Endpoints(),
            secrets=Secrets(coordinator_token=token),
        )
        save_runtime(runtime)
        source = _model(state_dir)
        reader, writer = os.pipe()
        argv = [sys.executable, "-c", PROCESS, str(state_dir), str(writer)]
        with subprocess.Popen(argv, pass_fds=[writer]) as server:
            try:
                os.close(writer)
                with os.fdopen(reader) as ready:
                    url = json.loads(ready.readline())["url"]
                return _measure(url, token, source, agents, seconds, beat_s)
            finally:
                server.send_signal(signal.SIGTERM)


def _measure(
    url: str, token: str, source: str, agents: int, seconds: float, beat_s: float
) -> dict[str, object]:
    client = CoordinatorClient(url, token)
    names = [f"node-{index}" for index in range(agents)]
    for name in names:
        client.register(
            RegisterWorker(
                worker_id=name,
                hostname="h",
                rack="r",
                available_storage=1,
                address="127.0.0.1:9",
                link_mbit=80,
            )
        )
    call = CreateDeployment(
        model_id="m", version="v1", source_url=source, target_workers=tuple(names)
    )
    deployment_id = client.create(call, "benchmark").deployment_id
    taken: list[float] = []
    refused: list[str] = []
    end_s = time.monotonic() + seconds

    def beat_on(name: str, offset_s: float) -> None:
        mine = CoordinatorClient(url, token)
        epoch = mine.lanes(deployment_id, name).epoch
        entry = DeploymentBeat(
            deployment_id=deployment_id,
            epoch=epoch,
            status=WorkerStatus.RECEIVING,
            pieces_held=1,
            bytes_held=1,
            chunks_received=(0,),
        )
        beat = Heartbeat(worker_id=name, status=WorkerStatus.RECEIVING, deployments=(entry,))
        next_s = time.monotonic() + offset_s
        while next_s < end_s:
            time.sleep(max(0.0, next_s - time.monotonic()))
            start = time.perf_counter()
            answer = mine.heartbeat(beat)
            taken.append(time.perf_counter() - start)
            if not answer.go_on:
                refused.append(name)
                break
            next_s = max(next_s + beat_s, time.monotonic())
        mine.close()

    threads = [
        threading.Thread(target=beat_on, args=(name, beat_s * index / agents))
        for index, name in enumerate(names)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    client.close()
    ordered = sorted(taken)
    return {
        "agents": agents,
        "beat_s": beat_s,
        "seconds": seconds,
        "beats": len(ordered),
        "beats_per_second": round(len(ordered) / seconds, 1),
        "refused": len(refused),
        "p50_ms": round(statistics.median(ordered) * 1e3, 3),
        "p99_ms": round(ordered[int(len(ordered) * 0.99)] * 1e3, 3),
        "max_ms": round(ordered[-1] * 1e3, 3),
        "cores": os.cpu_count(),
    }


def _model(state_dir: Path) -> str:
    directory = state_dir / "source"
    directory.mkdir()
    (directory / "model.bin").write_bytes(bytes(1024 * 1024))
    write_manifest(directory, build_manifest(directory, model_id="m", version="v1", link_mbit=80))
    return str(directory)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--agents", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--beat-s", type=float, default=0.5)
    chosen = parser.parse_args()
    print(json.dumps(run(chosen.agents, chosen.seconds, chosen.beat_s)))


if __name__ == "__main__":
    main()
