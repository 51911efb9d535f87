"""Forty lines' worth of coordinator: registers, plans once all targets are there, gives commands.

It never plans again by itself, so that what survives a death is the agents' own doing.
"""

from __future__ import annotations

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from paceline.manifest import Manifest
from paceline.schemas import (
    Command,
    DeploymentBeat,
    Heartbeat,
    HeartbeatAnswer,
    Plan,
    Registered,
    RegisterWorker,
)
from tests.relay.kit import DEPLOYMENT, plan

TOKEN = "t0ken"


class _Server(ThreadingHTTPServer):
    """Agents that are killed while they ask are what these tests are about: no traceback."""

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class FakeCoordinator:
    """Serves one deployment of ``manifest`` to ``targets``; use it as a context manager."""

    def __init__(self, manifest: Manifest, source_url: str, targets: list[str], link_mbit: float):
        self.manifest, self.source_url, self.targets = manifest, source_url, targets
        self.link_mbit = link_mbit
        self.interval_s = 0.1  # between beats
        self.registered: dict[str, RegisterWorker] = {}
        self.beats: dict[str, DeploymentBeat] = {}
        self.said: dict[str, int] = {}  # how many beats came from each
        self.plan: Plan | None = None
        self.commands: list[Command] = []
        self.lost: set[str] = set()  # whose next beat is answered with continue = false
        self.unconfirmed: set[str] = set()  # whose beats are taken note of and answered with 503
        self.lock = threading.Lock()
        coordinator = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None:
                pass

            def do_GET(self) -> None:
                parts = urlsplit(self.path)
                if parts.path.endswith("/manifest"):
                    self._answer(coordinator.manifest.to_bytes())
                    return
                name = parse_qs(parts.query)["worker_id"][0]
                lanes = coordinator.plan and coordinator.plan.lanes_of(name)
                self._answer(lanes.model_dump_json().encode() if lanes else b"{}")

            def do_POST(self) -> None:
                if self.headers["Authorization"] != f"Bearer {TOKEN}":
                    self._answer(b"{}", 401)
                    return
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with coordinator.lock:
                    if urlsplit(self.path).path == "/workers/register":
                        answer = coordinator.register(RegisterWorker.model_validate(body))
                    else:
                        answer = coordinator.beat(Heartbeat.model_validate(body))
                    unconfirmed = body["worker_id"] in coordinator.unconfirmed
                self._answer(answer, 503 if unconfirmed else 200)

            def _answer(self, raw: bytes, status: int = 200) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(raw)))
                self.end_headers()
                self.wfile.write(raw)

        self.server = _Server(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def __enter__(self) -> FakeCoordinator:
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()

    def register(self, call: RegisterWorker) -> bytes:
        self.registered[call.worker_id] = call
        if self.plan is None and set(self.targets) <= set(self.registered):
            self.replan(1)
        answer = Registered(worker_id=call.worker_id, incarnation=call.incarnation)
        return answer.model_dump_json().encode()

    def replan(self, epoch: int) -> None:
        """Plan for everybody registered, at the addresses they have now."""
        self.plan = plan(
            self.manifest,
            {name: self.registered[name].address for name in self.targets},
            epoch=epoch,
            source_url=self.source_url,
            link_mbit=self.link_mbit,
        )

    def beat(self, beat: Heartbeat) -> bytes:
        name = beat.worker_id
        self.said[name] = self.said.get(name, 0) + 1
        if name in self.lost:
            self.lost.discard(name)
            answer = HeartbeatAnswer(go_on=False, epoch=1, next_beat_s=self.interval_s)
            return answer.model_dump_json(by_alias=True).encode()
        mine = {each.deployment_id: each for each in beat.deployments}
        commands = list(self.commands)
        if DEPLOYMENT in mine:
            self.beats[name] = mine[DEPLOYMENT]
        if self.plan and (DEPLOYMENT not in mine or mine[DEPLOYMENT].epoch < self.plan.epoch):
            commands.append(
                Command(kind="fetch_lanes", deployment_id=DEPLOYMENT, epoch=self.plan.epoch)
            )
        answer = HeartbeatAnswer(epoch=1, next_beat_s=self.interval_s, commands=tuple(commands))
        return answer.model_dump_json(by_alias=True).encode()
