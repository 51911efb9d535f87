"""Paceline in a race: a real coordinator, real `paceline agent` processes, the real origin.

The coordinator stands in the core of the bed and is reached over a management network of its own
(``testbed/management.py``), so that the links carry nothing but the model. The clock runs from the
accepted plan (the coordinator's own event) with all agents registered to the last rename of a
verified version at its final path (the kernel's change time of that directory).
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.race.case import BUCKET, MODEL_ID, VERSION, Case, Outcome, verify_copies
from benchmarks.race.faults import Injector
from benchmarks.race.usage import Machine, Usage, anonymous_mb, cpu_s
from benchmarks.testbed import S3Origin
from benchmarks.testbed.origin import wait_for_listener
from benchmarks.testbed.watcher import NETNS
from paceline.client import CoordinatorClient
from paceline.config import Endpoints, Profile, Runtime, Secrets, save_runtime
from paceline.errors import DeploymentFailed, NotReady, PacelineError
from paceline.relay.transport import issue_identity, make_authority
from paceline.schemas import CreateDeployment, EventName, Topology

PEER_PORT = 7000
COORDINATOR_PORT = 8080
READY_S = 120.0
LOOK_S = 0.05
STILL_S, STILL_SHARE = 1.0, 0.03  # of a core: an idle agent takes less
MANAGEMENT = Path(__file__).parents[1] / "testbed/management.py"


def run_relay(case: Case) -> Outcome:
    """Return how one deployment went; raises DeploymentFailed where somebody did not finish."""
    race = _Race(case)
    try:
        return race.run()
    except PacelineError as error:
        raise DeploymentFailed(
            "the race was not finished", got=error.one_line(), where=race.last_words()
        ) from error


class _Race:
    def __init__(self, case: Case) -> None:
        self.case, self.bed = case, case.bed
        self.state = case.scratch / "state"
        self.state.mkdir(parents=True)
        self.agents: dict[int, subprocess.Popen[bytes]] = {}
        self.spent: dict[int, float] = {}  # CPU-seconds of agents that were killed
        self.origin = S3Origin(case.bed, case.model.root)
        self.environment = {
            key: value for key, value in os.environ.items() if not key.lower().endswith("_proxy")
        }

    def run(self) -> Outcome:
        began_s = time.monotonic()
        client = self._control_plane()
        self._start_agents()
        names = [host.name for host in self.bed.hosts]
        self._until(lambda: {each.worker_id for each in client.workers()} >= set(names))
        self._until(self._are_still)
        startup_s = time.monotonic() - began_s
        machine, before = Machine(), self.bed.counters()
        cpu_before = {host: cpu_s(each.pid) for host, each in self.agents.items()}
        killed = sum(fault.kind == "kill" for fault in self.case.faults)
        settings = self.case.settings
        made = client.create(
            CreateDeployment(
                model_id=MODEL_ID,
                version=VERSION,
                source_url=self.case.model.url,
                target_workers=tuple(names),
                topology=Topology(settings.get("topology", "auto")),
                max_failed=max(0.05, killed / len(names)),
                seed=settings.get("seed", 0),
            ),
            "race",
        )
        planned_at = self._planned_at(client, made.deployment_id)
        start_s = time.monotonic() - (time.time() - planned_at)
        plan = client.plan(made.deployment_id)
        injector = Injector(
            self.bed, self.case.faults, start_s, kill=self._kill, freeze=self._freeze
        )
        try:
            finished = self._wait(client, made.deployment_id, planned_at)
        finally:
            injector.stop()
        busy = machine.busy()
        after = self.bed.counters()
        newest = client.plan(made.deployment_id)
        usage = Usage(
            nodes_cpu_s=sum(self._cpu(host) - cpu_before[host] for host in self.agents),
            origin_cpu_s=cpu_s(self.origin.process.pid),
            control_cpu_s=cpu_s(self.coordinator.pid),
            nodes_peak_mb=max(anonymous_mb(each.pid) for each in self.agents.values()),
            cpu_busy=busy,
            load_before=machine.load,
            load_after=os.getloadavg()[0],
        )
        details: dict[str, Any] = {
            "topology": plan.topology.value,
            "predicted_s": round(plan.predicted_seconds, 3),
            "plan_bound_s": round(plan.bound_seconds, 3),
            "epochs": newest.epoch,
            "piece_bytes": self.case.model.manifest.piece_bytes,
            "chunk_bytes": self.case.model.manifest.chunk_bytes,
            "line": [each.worker_id for each in plan.workers],
            "drops": self.bed.drops(),
            "events": self._told(client, made.deployment_id, planned_at),
            "warnings": self._warnings(),
        }
        self._stop()
        copies = {self.bed.hosts[host].name: self._final(host) for host in self.case.expected()}
        verify_copies(self.case.model, copies)
        return Outcome(
            finished_s=finished,
            startup_s=startup_s,
            usage=usage,
            faults=injector.observed,
            origin_bytes=after["origin_out"] - before["origin_out"],
            cross_rack_bytes=after["cross_rack"] - before["cross_rack"],
            details=details,
        )

    # ── starting ─────────────────────────────────────────────────────────────────────────────────

    def _control_plane(self) -> CoordinatorClient:
        token = secrets.token_hex(16)
        settings = self.case.settings
        profile = Profile.model_validate(
            {
                "name": "link-bound",
                "cluster": {"link_mbit": self.link_mbit},
                "relay": {"deadline_s": 3600.0, **settings.get("relay", {})},
                "security": {**self._security(), "source_buckets": [BUCKET]},
            }
        )
        runtime = Runtime(
            profile=profile,
            state_dir=self.state,
            endpoints=Endpoints(
                coordinator_url=f"http://127.0.0.1:{COORDINATOR_PORT}",
                s3_url=self.origin.endpoint_url,
            ),
            secrets=Secrets(
                coordinator_token=token,
                s3_access_key=self.origin.access_key,
                s3_secret_key=self.origin.secret_key,
            ),
        )
        save_runtime(runtime)
        argv = [sys.executable, "-m", "paceline.cli.main", "coordinator", "--state", self.state]
        self.coordinator = self._popen("core", [*argv, "--port", COORDINATOR_PORT], "coordinator")
        wait_for_listener(self.coordinator, self.bed.core, COORDINATOR_PORT, READY_S)
        spaces = [f"/proc/{os.getpid()}/ns/net"]
        spaces += [str(NETNS / host.namespace) for host in self.bed.hosts]
        argv = [sys.executable, MANAGEMENT, COORDINATOR_PORT, *spaces]
        with (self.state / "management.log").open("wb") as log:
            self.management = self.bed.popen(
                "core", [str(each) for each in argv], stdout=subprocess.PIPE, stderr=log
            )
        assert self.management.stdout is not None
        port = self.management.stdout.readline().decode().strip()
        if not port:
            raise NotReady("the management network does not work", where=self.state)
        return CoordinatorClient(f"http://127.0.0.1:{port}", token, 10.0)

    def _security(self) -> dict[str, str]:
        """Return the peer port's protection: plain said aloud, or an identity for each host."""
        if not self.case.settings.get("mtls"):
            return {"peer_tls": "plaintext-anywhere"}
        tls = self.state / "tls"
        authority = make_authority(tls)
        for host in self.bed.hosts:
            issue_identity(authority, host.name, tls)  # <worker id>.pem and <worker id>-key.pem
        own = {"peer_cert": "tls/{worker_id}.pem", "peer_key": "tls/{worker_id}-key.pem"}
        return {"peer_tls": "mtls", "peer_ca": f"tls/{authority.cert.name}", **own}

    @property
    def link_mbit(self) -> float:
        """Return what agents are told of their link."""
        return float(self.case.settings.get("link_mbit") or self.bed.goodput_mbit)

    def _start_agents(self) -> None:
        for host in self.bed.hosts:
            argv = [sys.executable, "-m", "paceline.cli.main", "agent", "--state", self.state]
            argv += ["--worker-id", host.name, "--host", host.name, "--rack", host.rack_name]
            argv += ["--link-mbit", self.link_mbit, "--listen", f"{host.address}:{PEER_PORT}"]
            # The link itself is the limit: a second one in user space would add its hiccups.
            argv += ["--limit-mbit", 0, "--warm", *self.case.settings.get("agent_options", [])]
            self.agents[host.index] = self._popen(host.index, argv, host.name)

    def _popen(self, place: Any, argv: list[Any], name: str) -> subprocess.Popen[bytes]:
        with (self.state / f"{name}.log").open("wb") as log:
            return self.bed.popen(
                place,
                [str(each) for each in argv],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self.environment,
            )

    # ── waiting ──────────────────────────────────────────────────────────────────────────────────

    def _until(self, condition: Any) -> None:
        end_s = time.monotonic() + READY_S
        while not condition():
            self._check_agents()
            if time.monotonic() > end_s:
                raise NotReady("the agents did not register in time", wanted=len(self.agents))
            time.sleep(LOOK_S)

    def _are_still(self) -> bool:
        """Return whether the agents have started: what they import at first is not the relay's."""
        before_s = sum(cpu_s(each.pid) for each in self.agents.values())
        time.sleep(STILL_S)
        grown_s = sum(cpu_s(each.pid) for each in self.agents.values()) - before_s
        return grown_s < STILL_SHARE * STILL_S * len(self.agents)

    def _check_agents(self) -> None:
        for host, process in self.agents.items():
            if process.poll() is not None and host not in self.spent:
                raise DeploymentFailed(
                    "an agent ended by itself",
                    got=f"exit status {process.returncode}",
                    where=self.state / f"{self.bed.hosts[host].name}.log",
                )

    def _planned_at(self, client: CoordinatorClient, deployment_id: str) -> float:
        end_s = time.monotonic() + READY_S
        while time.monotonic() < end_s:
            for event in client.events().events:
                planned = event.name is EventName.DEPLOYMENT_PLANNED
                if planned and event.deployment_id == deployment_id:
                    return event.at
            time.sleep(LOOK_S)
        raise NotReady("the deployment was not planned")

    def _wait(
        self, client: CoordinatorClient, deployment_id: str, planned_at: float
    ) -> dict[str, float]:
        waiting, finished = set(self.case.expected()), {}
        end_s = time.monotonic() + self.case.timeout_s
        looks = 0
        while waiting:
            for host in sorted(waiting):
                final = self._final(host)
                if final.exists():
                    name = self.bed.hosts[host].name
                    finished[name] = round(final.stat().st_ctime - planned_at, 3)
                    waiting.discard(host)
            self._check_agents()
            looks += 1
            if looks % 40 == 0:  # every two seconds
                seen = client.deployment(deployment_id).deployment
                if seen.status.value in ("failed", "cancelled"):
                    raise DeploymentFailed("the deployment failed", got=seen.failure)
            if time.monotonic() > end_s:
                names = ", ".join(self.bed.hosts[host].name for host in sorted(waiting))
                raise DeploymentFailed(
                    "not in time", got=names, wanted=f"within {self.case.timeout_s:.0f} s"
                )
            time.sleep(LOOK_S)
        return finished

    def _final(self, host: int) -> Path:
        name = self.bed.hosts[host].name
        return self.state / "nodes" / name / "store/models" / MODEL_ID / VERSION

    # ── faults and the end ───────────────────────────────────────────────────────────────────────

    def _cpu(self, host: int) -> float:
        return self.spent[host] if host in self.spent else cpu_s(self.agents[host].pid)

    def _kill(self, host: int) -> None:
        self.spent[host] = cpu_s(self.agents[host].pid)
        self.agents[host].kill()
        self.agents[host].wait()

    def _freeze(self, host: int) -> None:
        self.agents[host].send_signal(signal.SIGSTOP)

    def _stop(self) -> None:
        for process in [*self.agents.values(), self.coordinator, self.management]:
            process.kill()
        for process in [*self.agents.values(), self.coordinator, self.management]:
            process.wait()
        self.origin.stop()

    def _told(
        self, client: CoordinatorClient, deployment_id: str, planned_at: float
    ) -> list[dict[str, Any]]:
        """Return what the coordinator said about the deployment, but for who completed."""
        said, after = [], 0
        while (page := client.events(after)).events:
            after = page.last
            said += [
                {
                    "at_s": round(each.at - planned_at, 3),
                    "name": each.name.value,
                    "worker": each.worker_id,
                }
                for each in page.events
                if each.at >= planned_at
                and each.name is not EventName.WORKER_COMPLETED
                and each.deployment_id in (deployment_id, None)
            ]
        return said[:200]

    def _warnings(self) -> list[str]:
        """Return what the agents' logs say, at most ten lines of each: a stall names its cause."""
        logs = [self.state / f"{host.name}.log" for host in self.bed.hosts]
        return [
            f"{log.stem}: {line[:300]}"
            for log in logs
            for line in log.read_text(errors="replace").splitlines()[:10]
        ]

    def last_words(self) -> str:
        """Return the last line of every log that ends in a warning or an error."""
        said = []
        for path in sorted(self.state.glob("*.log")):
            lines = path.read_text(errors="replace").splitlines()
            if lines and any(word in lines[-1] for word in ("WARN", "ERROR", "Error", "error")):
                said.append(f"{path.stem}: {lines[-1][-200:]}")
        return " | ".join(said[:5])
