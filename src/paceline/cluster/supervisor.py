"""The supervisor: the parent process of every server of an embedded installation.

Run by `start` (see installation.py) as ``python -m paceline.cluster.supervisor --state DIR …``, one
process per state directory. It locks the state directory, reserves the ports, starts the services,
restarts those that crash, and stops everything on a signal, when its liveness pipe closes, or when
starting fails. Its services run under guards that die with it. It handles services only as data.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import logging
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from paceline.cluster.addresses import reserve_port
from paceline.cluster.embedded import (
    embedded_services,
    ensure_secrets,
    remove_runtime,
    require_ours,
)
from paceline.cluster.processes import resident_bytes
from paceline.cluster.service import Launch, Service
from paceline.cluster.subreaper import become_subreaper, descendants, kill_descendants
from paceline.config import DEFAULT_S3, Endpoints, Profile, Runtime, save_runtime
from paceline.errors import (
    Cancelled,
    Conflict,
    NotReady,
    PacelineError,
    PortInUse,
    StateLocked,
    to_record,
)
from paceline.schemas import InstallationStatus
from paceline.system import write_private
from paceline.text import log_to_stderr

log = logging.getLogger(__name__)

LOCK_FILE = "supervisor.lock"
SERVICES_LOCK_FILE = "services.lock"  # held by the guards: free once their last process has ended
STATUS_FILE = "supervisor.json"
PORTS_FILE = "ports.json"  # of the last start, by server
USUAL_PORTS = {"Prefect": 7400, "the coordinator": 7410, "MLflow": 7420, "S3": 7430, "Dask": 7440}
TICK_S = 0.05
IDLE_TICK_S = 0.5
HOUSEKEEPING_S = 10.0
LEFTOVERS_DEADLINE_S = 20.0


class Supervisor:
    """Runs one installation's services until it is stopped."""

    def __init__(self, state_dir: Path, report_fd: int, liveness_fd: int | None) -> None:
        self.state_dir = state_dir
        self.report_fd = report_fd
        self.liveness_fd = liveness_fd
        self.services: list[Service] = []
        self.ports: dict[int, socket.socket] = {}
        self._claims: list[socket.socket] = []
        self.started = time.monotonic()
        self.started_at = time.time()
        self.ready_s: float | None = None
        self.stop_reason = ""
        self._poller = select.poll()
        self._wake_read = -1
        self._services_lock_fd = -1
        self._next_housekeeping = 0.0
        self._ready_timeout_s = 0.0  # the profile's

    def run(self, launch: Launch) -> None:
        """Start everything, report, keep it running, stop it. A failed start raises its error."""
        self._watch_signals()
        self._lock()
        require_ours(self.state_dir)  # before anything may remove its runtime.json
        become_subreaper()
        try:
            self._start(launch)
            self._keep()
        finally:
            self._stop()

    # -- starting

    def _watch_signals(self) -> None:
        self._wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda *_: None)
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)
        self._poller.register(self._wake_read, select.POLLIN)
        self._poller.register(self.report_fd, 0)  # hang-up only: the starting process has ended
        if self.liveness_fd is not None:
            self._poller.register(self.liveness_fd, select.POLLIN)

    def _lock(self) -> None:
        # Another process may test the lock for a moment.
        lock_fd = _acquired(self.state_dir / LOCK_FILE, 0.2)
        if lock_fd is None:
            raise locked_error(self.state_dir)
        os.ftruncate(lock_fd, 0)
        os.pwrite(lock_fd, f"{os.getpid()}\n".encode(), 0)
        # Guards of a killed supervisor may still be cleaning up: two servers on one database are
        # worse than a short wait.
        services_lock_fd = _acquired(self.state_dir / SERVICES_LOCK_FILE, LEFTOVERS_DEADLINE_S)
        if services_lock_fd is None:
            raise Conflict(
                "processes of an earlier start still run",
                wanted="none left",
                where=self.state_dir,
                do="Look for subreaper.py in the list of processes and end them.",
            )
        self._services_lock_fd = services_lock_fd

    def _start(self, launch: Launch) -> None:
        profile = Profile.model_validate(launch.profile)
        endpoints = self._reserve(profile)
        secrets = ensure_secrets(self.state_dir)
        if profile.objects.is_named:  # another's S3 server: boto3 finds the credentials
            secrets = secrets.model_copy(update={"s3_access_key": "", "s3_secret_key": ""})
        runtime = Runtime(
            profile=profile, state_dir=self.state_dir, endpoints=endpoints, secrets=secrets
        )
        specs = [
            each
            for each in embedded_services(runtime)
            if launch.only is None or each.name in launch.only
        ]
        if launch.only is not None and "coordinator" not in launch.only:  # then there is none
            without = endpoints.model_copy(update={"coordinator_url": "", "coordinator_urls": ()})
            runtime = runtime.model_copy(update={"endpoints": without})
        logs = self.state_dir / "logs"
        checks = ThreadPoolExecutor(max_workers=8, thread_name_prefix="check")
        for spec in (*specs, *launch.extra_services):
            self.services.append(
                Service(spec, logs / f"{spec.name}.log", checks, self._services_lock_fd)
            )
        known = {each.spec.name for each in self.services}
        for each in self.services:
            if unknown := set(each.spec.after) - known:
                raise NotReady("service waits for one that does not exist", got=sorted(unknown))
        save_runtime(runtime)  # complete: every port is already reserved
        self._save_status()
        self._ready_timeout_s = profile.services.ready_timeout_s
        while not all(each.settled for each in self.services if each.spec.blocking):
            self._wait(TICK_S)
            if self.stop_reason:
                raise Cancelled(f"start was given up: {self.stop_reason}", where=self.state_dir)
            self._step()
        self.ready_s = round(time.monotonic() - self.started, 2)
        self._save_status()
        used = resident_bytes([os.getpid(), *descendants(os.getpid())])
        log.info("installation ready seconds=%.2f resident_bytes=%d", self.ready_s, used)
        self._poller.unregister(self.report_fd)
        self._report(json.loads(runtime.model_dump_json()))
        os.close(self.report_fd)
        self.report_fd = -1

    def _reserve(self, profile: Profile) -> Endpoints:
        host, services = profile.services.host, profile.services
        last, now = self._last_ports(), dict[str, int]()
        named = {
            services.prefect_port,
            services.mlflow_port,
            services.s3_port,
            services.scheduler_port,
            *range(services.coordinator_port, services.coordinator_port + profile.control.replicas),
        }

        def port(server: str, wanted: int, number: int = 0) -> int:
            if wanted in self.ports:
                raise PortInUse(
                    "port is asked for twice",
                    got=f"{wanted} for {server} as well",
                    where="services of the profile",
                    do="Give each server its own, or 0 for its usual one or any that is free.",
                )
            name = f"{server} {number}" if number else server
            if wanted:
                reservation = reserve_port(host, wanted, purpose=server)
            else:
                usual = (last.get(name, 0), USUAL_PORTS[server] + number)
                free = [each for each in usual if each and each not in named | {*self.ports}]
                reservation = self._reserve_usual(host, free)
            now[name] = int(reservation.getsockname()[1])
            self.ports[now[name]] = reservation
            return now[name]

        prefect = port("Prefect", services.prefect_port)
        security, first = profile.security, services.coordinator_port
        encrypted = security.rest_tls in ("installation", "files")
        scheme = "https" if encrypted else "http"
        authority = f"{security.authority}/ca.pem" if security.rest_tls == "installation" else ""
        ports = [
            port("the coordinator", first and first + number, number)
            for number in range(profile.control.replicas)
        ]
        s3_url = profile.objects.endpoint_url or DEFAULT_S3
        if not profile.objects.is_named:
            s3_url = f"http://{host}:{port('S3', services.s3_port)}"
        replicas = tuple(f"{scheme}://{host}:{each}" for each in ports)
        endpoints = Endpoints(
            prefect_api_url=f"http://{host}:{prefect}/api",
            prefect_ui_url=f"http://{host}:{prefect}",
            mlflow_url=f"http://{host}:{port('MLflow', services.mlflow_port)}",
            s3_url=s3_url,
            coordinator_url=replicas[0],
            coordinator_urls=replicas,
            coordinator_ca=security.rest_ca or authority if encrypted else "",
            scheduler_address=f"tls://{host}:{port('Dask', services.scheduler_port)}",
        )
        write_private(self.state_dir / PORTS_FILE, json.dumps(now).encode())
        return endpoints

    def _last_ports(self) -> dict[str, int]:
        """Return the ports of the last start here, so that links to its pages go on to work."""
        try:
            last = json.loads((self.state_dir / PORTS_FILE).read_bytes())
            return {str(name): int(port) for name, port in last.items() if 0 < int(port) < 65536}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, TypeError, AttributeError) as error:
            log.warning("%s cannot be read, usual ports are taken error=%s", PORTS_FILE, error)
            return {}

    def _reserve_usual(self, host: str, usual: Sequence[int]) -> socket.socket:
        """Reserve the first of ``usual`` that no other server or installation has, else any."""
        for number in usual:
            # Two reservations of one port are possible, two sockets of one abstract name are not.
            claim = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                claim.bind(f"\0paceline-port-{host}-{number}")
                reservation = reserve_port(host, number)
            except (OSError, PortInUse, OverflowError):  # in use, or no port
                claim.close()
            else:
                self._claims.append(claim)
                return reservation
        return reserve_port(host)

    # -- running

    def _keep(self) -> None:
        while not self.stop_reason:
            moving = any(
                each.state in ("waiting", "starting", "restarting") for each in self.services
            )
            self._wait(TICK_S if moving else IDLE_TICK_S)
            self._step()
            if time.monotonic() >= self._next_housekeeping:
                self._next_housekeeping = time.monotonic() + HOUSEKEEPING_S
                for each in self.services:
                    each.keep_log_small()
                self._kill_strays()

    def _step(self) -> None:
        now = time.monotonic()
        settled = {each.spec.name for each in self.services if each.settled}
        changed = False
        for each in self.services:
            if each.step(now, settled, self._ready_timeout_s):
                changed = True
        if changed:
            self._save_status()

    def _wait(self, seconds: float) -> None:
        for fd, _ in self._poller.poll(seconds * 1000):
            if fd == self._wake_read:
                numbers = os.read(fd, 4096)
                self.stop_reason = self.stop_reason or signal.Signals(numbers[0]).name
            elif fd == self.report_fd:
                self.stop_reason = "the process that started it has gone"
            elif not os.read(fd, 4096):
                self._poller.unregister(fd)
                self.stop_reason = "the process that held the liveness pipe has gone"

    def _kill_strays(self) -> None:
        # When a guard was killed its orphans become children here: kill what is under no guard.
        guards = {each.process.guard_pid for each in self.services if each.process}
        below = set(descendants(os.getpid()))
        guarded = set(guards)
        for guard in guards:
            guarded |= set(descendants(guard))
        if below - guarded:
            log.warning("killing strays pids=%s", sorted(below - guarded))
            kill_descendants(keep=frozenset(guarded))

    # -- stopping

    def _stop(self) -> None:
        log.info("stopping reason=%s", self.stop_reason or "start failed")
        for phase in sorted({each.spec.stop_phase for each in self.services}):
            members = [each for each in self.services if each.spec.stop_phase == phase]
            for each in members:
                each.ask_to_stop(time.monotonic())
            while sum(not each.stopped(time.monotonic()) for each in members):
                self._poller.poll(20)
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wake_read, 4096)
        if not kill_descendants():
            log.error("processes outlived SIGKILL")
        for held in (*self.ports.values(), *self._claims):
            held.close()
        self._save_status()
        remove_runtime(self.state_dir)
        log.info("stopped")

    # -- reporting

    def _save_status(self) -> None:
        status = InstallationStatus(
            running=True,
            ready=self.ready_s is not None,
            pid=os.getpid(),
            started_at=self.started_at,
            ready_s=self.ready_s,
            services=tuple(each.status() for each in self.services),
        )
        try:
            write_private(self.state_dir / STATUS_FILE, status.model_dump_json(indent=1).encode())
        except OSError as error:  # a full disk is no reason to stop what runs
            log.warning("status cannot be written error=%s", error)

    def _report(self, content: Mapping[str, object]) -> None:
        """Write one JSON line to the process that started this one, if it still runs."""
        if self.report_fd >= 0:
            with contextlib.suppress(OSError):
                os.write(self.report_fd, json.dumps(content).encode() + b"\n")


def _acquired(path: Path, wait_s: float) -> int | None:
    """Return a descriptor that holds the lock on ``path``, or None after ``wait_s``."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    deadline = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                os.close(descriptor)
                return None
            time.sleep(0.02)
        else:
            return descriptor


def locked_error(state_dir: Path) -> StateLocked:
    """Return the error that names who owns ``state_dir``."""
    try:
        owner = (state_dir / LOCK_FILE).read_text().strip() or "(unknown)"
    except OSError:
        owner = "(unknown)"
    return StateLocked(
        "the state directory belongs to a running installation",
        got=f"supervisor with pid {owner}",
        wanted="no other",
        where=state_dir,
        do="Use it as it is, stop it with `paceline down`, or name another directory with --state.",
    )


def main() -> int:
    """Run the supervisor named on the command line; its `Launch` comes on standard input."""
    parser = argparse.ArgumentParser(prog="paceline.cluster.supervisor")
    parser.add_argument("--state", required=True, type=Path)
    parser.add_argument("--report-fd", required=True, type=int)
    parser.add_argument("--liveness-fd", type=int)
    options = parser.parse_args()
    os.set_inheritable(options.report_fd, False)
    if options.liveness_fd is not None:
        os.set_inheritable(options.liveness_fd, False)
    os.umask(0o077)
    log_to_stderr(logging.INFO, "%(asctime)s %(levelname)s %(message)s")
    launch = Launch.model_validate_json(sys.stdin.buffer.read())
    supervisor = Supervisor(options.state, options.report_fd, options.liveness_fd)
    try:
        supervisor.run(launch)
    except PacelineError as error:
        log.exception("installation failed")
        supervisor._report(to_record(error))
        return error.exit_code
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
