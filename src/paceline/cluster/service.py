"""One service under the supervisor: a small state machine stepped by the supervisor's only thread.

waiting → starting → ready (or done, for a one-shot) → restarting → starting …, or failed.
``ServiceSpec`` and ``Ready`` describe a service as data: how to start it, how to check that it is
ready, how to stop it. This module does not import the servers or flows that it runs.
"""

from __future__ import annotations

import logging
from collections import deque
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Literal

from pydantic import Field

from paceline.cluster.addresses import accepts, listens
from paceline.cluster.processes import Guarded, clean_environment, last_line, start_guarded
from paceline.cluster.subreaper import descendants
from paceline.errors import NotReady, PacelineError, ServiceUnavailable
from paceline.schemas import Name, Record, ServiceStatus
from paceline.system import basic_authorization, fetch


class Ready(Record):
    """The readiness check of a service.

    ``http``: a GET of ``url`` answers 2xx. ``port``: it listens on ``port``. ``file``: ``path``
    exists. ``exit``: it ended with 0 (a one-shot). ``alive``: it runs. Where ``port`` is set, the
    listener must also be the service's own process.
    """

    kind: Literal["http", "port", "file", "exit", "alive"] = "alive"
    url: str = ""
    authorization: str = ""  # "user:password" of the request
    port: int = 0
    host: str = "127.0.0.1"  # at which ``port`` is checked
    path: str = ""


class ServiceSpec(Record):
    """One process of an installation."""

    name: Name
    argv: tuple[str, ...] = Field(min_length=1)
    env: dict[str, str] = Field(default_factory=dict)
    cwd: str | None = None
    ready: Ready = Ready()
    after: tuple[Name, ...] = ()  # start only once these are ready
    blocking: bool = True  # `start` waits for it, and fails when it does not get ready
    stop_phase: int = 0  # lower stops earlier
    stop_grace_s: float = Field(default=5.0, ge=0)
    max_restarts: int = Field(default=5, ge=0)  # within RESTART_WINDOW_S; with more it has failed


class Launch(Record):
    """What `start` sends to the supervisor process on its standard input."""

    profile: dict[str, object]
    only: tuple[Name, ...] | None = None  # of the embedded servers; None: all
    extra_services: tuple[ServiceSpec, ...] = ()


class StopReport(Record):
    """What `stop` found and did."""

    was_running: bool
    pid: int = 0
    seconds: float = 0.0
    forced: bool = False  # the supervisor did not end by itself in time
    runs: tuple[str, ...] = ()  # that commands ran here, which were interrupted


log = logging.getLogger(__name__)

CHECK_EVERY_S = 0.1
CHECK_TIMEOUT_S = 10.0
ALIVE_AFTER_S = 0.5  # a service without a check counts as ready once it has run this long
BACKOFF_S = (0.5, 1.0, 2.0, 4.0, 8.0, 15.0)
RESTART_WINDOW_S = 300.0
LOG_LIMIT_BYTES = 32 * 1024 * 1024
GUARD_PATIENCE_S = 3.0  # beyond a service's own grace, before its guard is killed


class Service:
    """A service, its process and its state."""

    def __init__(self, spec: ServiceSpec, log_path: Path, checks: Executor, lock_fd: int) -> None:
        self.spec = spec
        self.log_path = log_path
        self.state = "waiting"
        self.problem = ""
        self.restarts = 0
        self.ready_s: float | None = None
        self.process: Guarded | None = None
        self.was_ready = False
        self._checks = checks
        self._check: Future[bool] | None = None
        self._next_check = 0.0
        self._started = 0.0
        self._resume_at = 0.0
        self._crashes: deque[float] = deque(maxlen=100)
        self._log_offset = 0
        self._lock_fd = lock_fd
        self._stop_by: float | None = None

    @property
    def settled(self) -> bool:
        """Return whether services that depend on it may start."""
        return self.state in ("ready", "done")

    def step(self, now: float, settled: set[str], ready_timeout_s: float) -> bool:
        """Take the steps due at ``now``; return whether the state changed.

        Raises NotReady when a blocking service ends, or misses its deadline, before it was ever
        ready.
        """
        before = self.state
        if (self.state == "waiting" and settled.issuperset(self.spec.after)) or (
            self.state == "restarting" and now >= self._resume_at
        ):
            self._start(now)
        elif self.state in ("starting", "ready"):
            self._watch(now, ready_timeout_s)
        return self.state != before

    def _start(self, now: float) -> None:
        self.log_path.touch(mode=0o600)
        self._trim_log()
        self._log_offset = self.log_path.stat().st_size
        try:
            with self.log_path.open("ab") as output:
                self.process = start_guarded(
                    self.spec.argv,
                    env=clean_environment(self.spec.env),
                    cwd=self.spec.cwd,
                    grace_s=self.spec.stop_grace_s,
                    stdout=output,
                    stderr=output,
                    keep_fds=(self._lock_fd,),
                )
        except PacelineError as error:
            self._crashed(now, error.one_line())
            return
        self._started = now
        self._check = None
        self._next_check = now
        self.state = "starting"

    def _watch(self, now: float, ready_timeout_s: float) -> None:
        assert self.process is not None
        code = self.process.exit_code()
        if code is not None:
            if code == 0 and self.spec.ready.kind == "exit":
                self.state = "done"
                self._became_ready(now)
            else:
                self._crashed(
                    now, f"ended by signal {-code}" if code < 0 else f"exited with {code}"
                )
            return
        if self.state != "starting":
            return
        if self._is_ready(now):
            self.state = "ready"
            self._became_ready(now)
        elif now - self._started > ready_timeout_s:
            reason = f"not ready after {ready_timeout_s:.0f} s"
            if self.spec.blocking and not self.was_ready:
                raise self._not_ready(reason)
            self.process.kill()
            self.process.wait(GUARD_PATIENCE_S)
            self._crashed(now, reason)

    def _became_ready(self, now: float) -> None:
        self.was_ready = True
        self.problem = ""
        self.ready_s = round(now - self._started, 2)
        log.info("service ready name=%s seconds=%.2f", self.spec.name, self.ready_s)

    def _crashed(self, now: float, reason: str) -> None:
        self.problem = f"{reason}: {last_line(self.log_path, self._log_offset)}"
        log.warning("service ended name=%s reason=%s", self.spec.name, self.problem)
        if self.spec.blocking and not self.was_ready:
            raise self._not_ready(reason)
        self._crashes.append(now)
        recent = sum(1 for each in self._crashes if now - each < RESTART_WINDOW_S)
        if recent > self.spec.max_restarts:
            self.state = "failed"
            log.error("service given up name=%s restarts=%d", self.spec.name, self.restarts)
            return
        self.restarts += 1
        self._resume_at = now + BACKOFF_S[min(recent, len(BACKOFF_S)) - 1]
        self.state = "restarting"

    def _not_ready(self, reason: str) -> NotReady:
        last = last_line(self.log_path, self._log_offset) or "(none)"
        return NotReady(
            f"{self.spec.name} did not get ready",
            got=f"{reason}; its last line: {last}",
            wanted=_wanted(self.spec.ready),
            where=self.log_path,
            do="Read that log, then try again; everything was stopped.",
        )

    def _is_ready(self, now: float) -> bool:
        if self.spec.ready.kind == "exit":
            return False
        if self.spec.ready.kind == "alive":
            return now - self._started > ALIVE_AFTER_S
        if self._check is not None:
            if not self._check.done():
                return False
            answer = self._check.result()
            self._check = None
            self._next_check = now + CHECK_EVERY_S
            return answer
        if now >= self._next_check:
            assert self.process is not None
            self._check = self._checks.submit(check, self.spec.ready, self.process.guard_pid)
        return False

    def ask_to_stop(self, now: float) -> None:
        """Begin to stop; poll ``stopped`` for the end."""
        if self.process is not None:
            self.process.ask_to_stop()
            self._stop_by = now + self.spec.stop_grace_s + GUARD_PATIENCE_S

    def stopped(self, now: float) -> bool:
        """Return whether all its processes ended; past its deadline, kill its guard."""
        if self.process is None or self.process.exit_code() is not None:
            self.state = "stopped" if self.state not in ("failed", "done") else self.state
            return True
        if self._stop_by is not None and now > self._stop_by:
            log.error("service outlived its grace, killed name=%s", self.spec.name)
            self.process.kill_guard()
        return False

    def keep_log_small(self) -> None:
        """Truncate a log above LOG_LIMIT_BYTES; safe because its process opened it to append."""
        if self.log_path.exists() and self.log_path.stat().st_size > LOG_LIMIT_BYTES:
            self._trim_log()

    def _trim_log(self) -> None:
        if self.log_path.stat().st_size > LOG_LIMIT_BYTES // 2:
            with self.log_path.open("rb") as file:
                file.seek(-min(LOG_LIMIT_BYTES // 4, self.log_path.stat().st_size), 2)
                self.log_path.with_suffix(".log.1").write_bytes(file.read())
            with self.log_path.open("r+b") as file:
                file.truncate(0)

    def status(self) -> ServiceStatus:
        """Return its status without memory use, which the caller measures."""
        running = self.process is not None and self.process.exit_code() is None
        return ServiceStatus.model_validate(
            {
                "name": self.spec.name,
                "state": self.state,
                "pid": self.process.pid if running and self.process else 0,
                "session": self.process.guard_pid if running and self.process else 0,
                "restarts": self.restarts,
                "ready_s": self.ready_s,
                "log": str(self.log_path),
                "problem": self.problem,
            }
        )


def check(ready: Ready, guard_pid: int) -> bool:
    """Return whether ``ready`` holds now; a port must be held by a descendant of the guard."""
    if ready.kind == "http" and not _answers(ready.url, ready.authorization):
        return False
    if ready.kind == "port" and not accepts(ready.host, ready.port, CHECK_TIMEOUT_S):
        return False
    if ready.kind == "file" and not Path(ready.path).exists():
        return False
    return not ready.port or listens(descendants(guard_pid), ready.port)


def _answers(url: str, authorization: str) -> bool:
    try:
        # Without verification: the check only needs an answer. ``listens`` checks that the port
        # belongs to the service's own process.
        answer = fetch(
            url,
            name="the service",
            headers=basic_authorization(authorization),
            timeout_s=CHECK_TIMEOUT_S,
            verify=False,
        )
    except ServiceUnavailable:
        return False
    return 200 <= answer.status < 300


def _wanted(ready: Ready) -> str:
    return {
        "http": f"an answer from {ready.url}",
        "port": f"a listener on port {ready.port}",
        "file": f"the file {ready.path}",
        "exit": "an end with code 0",
        "alive": "a running process",
    }[ready.kind]
