"""One process a host that says when it is ready, begins when told, and says when it has finished.

What all peers of the race share: the clock runs from the word "go" with every process ready to the
last one's word that it has everything; copies are then verified by SHA-256, outside the clock.
"""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import time
from pathlib import Path
from typing import Any

from benchmarks.race.case import Case, Outcome, verify_copies
from benchmarks.race.usage import Machine, Usage, anonymous_mb, cpu_s
from benchmarks.testbed.bed import Place
from paceline.errors import DeploymentFailed

READY_S = 60.0


class Nodes:
    """The processes of one race; ``origin`` ones count apart."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.began_s = time.monotonic()
        self.hosts: dict[int, subprocess.Popen[bytes]] = {}
        self.others: list[subprocess.Popen[bytes]] = []

    def start(self, place: Place, argv: list[object], order: dict[str, Any]) -> None:
        """Start a node and hand it its order as one line of JSON."""
        name = place if isinstance(place, str) else self._name(place)
        environment = {
            key: value for key, value in os.environ.items() if not key.lower().endswith("_proxy")
        }
        with (self.case.scratch / f"{name}-{len(self.others)}.log").open("wb") as log:
            process = self.case.bed.popen(
                place,
                [str(each) for each in argv],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment,
            )
        _write(process, json.dumps(order))
        if isinstance(place, int):
            self.hosts[place] = process
        else:
            self.others.append(process)

    def race(self, details: dict[str, Any]) -> Outcome:
        """Wait until all are ready, let them go, and return how it went."""
        everyone = [*self.hosts.values(), *self.others]
        for process in everyone:
            self._hear(process, READY_S)
        startup_s = time.monotonic() - self.began_s
        machine, before = Machine(), self.case.bed.counters()
        cpu_before = {pid: cpu_s(pid) for pid in (each.pid for each in everyone)}
        go_at = time.time()
        for process in self.hosts.values():
            _write(process, "go")
        finished = self._finishes(go_at)
        busy = machine.busy()
        after = self.case.bed.counters()
        load_after = os.getloadavg()[0]
        peak_mb = max(anonymous_mb(each.pid) for each in self.hosts.values())
        for process in self.hosts.values():  # what one of them still wants to write is not timed
            _write(process, "end")
        for process in self.hosts.values():
            self._hear(process, READY_S)
        usage = Usage(
            nodes_cpu_s=sum(cpu_s(p.pid) - cpu_before[p.pid] for p in self.hosts.values()),
            origin_cpu_s=sum(cpu_s(p.pid) - cpu_before[p.pid] for p in self.others),
            nodes_peak_mb=peak_mb,
            cpu_busy=busy,
            load_before=machine.load,
            load_after=load_after,
        )
        for process in everyone:
            process.kill()
            process.wait()
        verify_copies(self.case.model, {self._name(host): self.copy(host) for host in self.hosts})
        return Outcome(
            finished_s=finished,
            startup_s=startup_s,
            usage=usage,
            origin_bytes=after["origin_out"] - before["origin_out"],
            cross_rack_bytes=after["cross_rack"] - before["cross_rack"],
            details=details,
        )

    def copy(self, host: int) -> Path:
        """Return the directory that holds a host's copy of the model's files."""
        return self.case.scratch / "nodes" / self._name(host) / self.case.model.directory.name

    def _name(self, host: int) -> str:
        return self.case.bed.hosts[host].name

    def _finishes(self, go_at: float) -> dict[str, float]:
        finished: dict[str, float] = {}
        end_s = time.monotonic() + self.case.timeout_s
        with selectors.DefaultSelector() as selector:
            for host, process in self.hosts.items():
                assert process.stdout is not None
                selector.register(process.stdout, selectors.EVENT_READ, (host, process))
            while len(finished) < len(self.hosts):
                ready = selector.select(max(0.0, end_s - time.monotonic()))
                if not ready:
                    names = [self._name(host) for host in self.hosts]
                    missing = [name for name in names if name not in finished]
                    raise DeploymentFailed("not in time", got=", ".join(missing))
                for key, _ in ready:
                    host, process = key.data
                    said = self._hear(process, 1.0)
                    finished[self._name(host)] = round(said["finished_at"] - go_at, 3)
                    selector.unregister(key.fileobj)
        return finished

    def _hear(self, process: subprocess.Popen[bytes], timeout_s: float) -> dict[str, Any]:
        assert process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            line = process.stdout.readline() if selector.select(timeout_s) else b""
        if not line:
            raise DeploymentFailed(
                "a contestant's node said nothing",
                got=f"exit status {process.poll()}",
                where=" ".join(process.args[3:5]),
                do=f"See the logs in {self.case.scratch} while it exists.",
            )
        said: dict[str, Any] = json.loads(line)
        return said


def _write(process: subprocess.Popen[bytes], line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(line.encode() + b"\n")
    process.stdin.flush()
