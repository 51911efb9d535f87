"""Start, stop and inspect an embedded installation, from any process.

The supervisor process (supervisor.py) does the work; this module controls it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from paceline.cluster.embedded import remove_runtime, require_ours, require_protected
from paceline.cluster.processes import clean_environment, last_line, resident_bytes
from paceline.cluster.service import Launch, ServiceSpec, StopReport
from paceline.cluster.subreaper import descendants
from paceline.cluster.supervisor import LOCK_FILE, SERVICES_LOCK_FILE, STATUS_FILE, locked_error
from paceline.config import Profile, Runtime
from paceline.errors import InvalidProfile, NotReady, from_record
from paceline.extras import require_extras
from paceline.schemas import InstallationStatus, ServiceStatus
from paceline.system import ensure_own_directory, ensure_private, is_readable, process_holding

STOP_DEADLINE_S = 40.0
# On top of the profile's readiness deadline: imports, stopping after a failure.
STOP_MARGIN_S = 60.0
COMMANDS = "commands"  # directory of the commands that run a flow here: a file each, held open
# How long a command has to end by Ctrl-C, and by SIGTERM (a script's background ignores Ctrl-C).
COMMAND_ENDS_S = ((signal.SIGINT, 20.0), (signal.SIGTERM, 10.0))

_liveness: list[int] = []  # writing ends of liveness pipes: open as long as this process lives


def start(
    profile: Profile,
    state_dir: Path | str,
    *,
    detach: bool,
    extra_services: Sequence[ServiceSpec] = (),
    only: Sequence[str] | None = None,
) -> Runtime:
    """Start an installation in ``state_dir`` and return it once all its blocking services are
    ready.

    ``detach`` leaves it running after this process; otherwise it stops when this process dies,
    however that happens. ``only`` names the embedded servers to run, all by default.

    Raises StateLocked, PortInUse, NotReady, MissingTool, MissingExtra, InvalidProfile (servers
    would listen unprotected), Conflict (the directory does not belong to an embedded installation),
    AccessDenied (it belongs to another user); nothing is left running then.
    """
    if only is None:
        require_extras("flows")  # its servers are programs: no import here would fail
    state = Path(state_dir).absolute()
    if profile.cluster.kind != "local":
        raise InvalidProfile(
            "`paceline up` starts one machine's nodes",
            got=f'[cluster] kind = "{profile.cluster.kind}"',
            wanted='kind = "local"',
            where=f"profile {profile.name}",
            do="For a fleet see `paceline init --scheduler` and `paceline worker`.",
        )
    require_protected(profile, only)
    require_ours(state)
    ensure_own_directory(state)
    logs = state / "logs"
    ensure_own_directory(logs)
    if _is_locked(state / LOCK_FILE):
        raise locked_error(state)
    launch = Launch(
        profile=json.loads(profile.model_dump_json()),
        only=None if only is None else tuple(only),
        extra_services=tuple(extra_services),
    )
    log_path = logs / "supervisor.log"
    ensure_private(log_path)
    process, report_read = _start_supervisor(state, log_path, detach=detach)
    with os.fdopen(report_read, "rb"):
        try:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError), process.stdin:
                process.stdin.write(launch.model_dump_json().encode())
            deadline = time.monotonic() + profile.services.ready_timeout_s * 2 + STOP_MARGIN_S
            runtime = _await_ready(report_read, deadline, log_path)
        except BaseException:
            _end(process)
            raise
    process.returncode = 0  # no process waits for it: the supervisor outlives this object
    return runtime


def _start_supervisor(
    state: Path, log_path: Path, *, detach: bool
) -> tuple[subprocess.Popen[bytes], int]:
    """Return the supervisor, which reads its launch from its input, and the pipe of its reports."""
    report_read, report_write = os.pipe()
    lent = [report_write]
    argv = [sys.executable, "-m", "paceline.cluster.supervisor", "--state", str(state)]
    argv += ["--report-fd", str(report_write)]
    if not detach:
        reading, writing = os.pipe()
        _liveness.append(writing)
        lent.append(reading)
        argv += ["--liveness-fd", str(reading)]
    try:
        with log_path.open("ab") as output:
            process = subprocess.Popen(
                argv,
                env=clean_environment(),
                cwd=state,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                pass_fds=lent,
                start_new_session=True,
            )
    finally:
        for fd in lent:
            os.close(fd)
    return process, report_read


@contextlib.contextmanager
def ended_by_stop(state_dir: Path, run_id: str) -> Iterator[None]:
    """Have ``stop`` interrupt this process, which runs ``run_id``, while the servers still run."""
    path = state_dir / COMMANDS / f"{run_id}.{os.getpid()}"
    path.parent.mkdir(exist_ok=True)
    with path.open("w"):
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def stop(state_dir: Path | str, *, timeout_s: float = STOP_DEADLINE_S) -> StopReport:
    """Stop the installation in ``state_dir`` in order, and return once nothing of it runs.

    Commands that run a flow on it are interrupted first, as by Ctrl-C. Past ``timeout_s`` the
    supervisor and everything below it is killed. An installation that does not run is no error.
    Raises Conflict where the directory does not belong to an embedded installation, NotReady where
    processes are left.
    """
    state = Path(state_dir).absolute()
    began = time.monotonic()
    require_ours(state)
    pid = _owner(state)
    if pid is None:
        _wait_unlocked(state / SERVICES_LOCK_FILE, 10.0)
        remove_runtime(state)
        return StopReport(was_running=False)
    runs = _end_commands(state)
    with process_holding(state / LOCK_FILE, pid) as supervisor:
        if supervisor is not None:
            supervisor.send(signal.SIGTERM)
        forced = not _wait_unlocked(state / LOCK_FILE, timeout_s)
        if forced and supervisor is not None:
            supervisor.send(signal.SIGKILL)
    if not _wait_unlocked(state / SERVICES_LOCK_FILE, 15.0):
        raise NotReady(
            "processes of the installation still run", where=state, do="Look for subreaper.py."
        )
    _reap(pid)
    remove_runtime(state)
    took_s = time.monotonic() - began
    return StopReport(was_running=True, pid=pid, seconds=took_s, forced=forced, runs=runs)


def status(state_dir: Path | str) -> InstallationStatus:
    """Return the state of the installation in ``state_dir`` and each service's memory."""
    state = Path(state_dir).absolute()
    pid = _owner(state)
    try:
        last = InstallationStatus.model_validate_json((state / STATUS_FILE).read_bytes())
    except (OSError, ValueError):
        last = InstallationStatus(running=False)
    if pid is None:
        stopped = [
            each.model_copy(update={"state": "stopped", "pid": 0, "session": 0})
            for each in last.services
        ]
        return InstallationStatus(running=False, services=tuple(stopped))
    if last.pid != pid:  # the supervisor has just taken the lock
        return InstallationStatus(running=True, pid=pid)
    services = tuple(_measured(each) for each in last.services)
    total = sum(each.rss_bytes for each in services) + resident_bytes([pid])
    problems = [f"{each.name}: {each.problem}" for each in services if each.state == "failed"]
    return last.model_copy(
        update={"services": services, "rss_bytes": total, "problem": "; ".join(problems)}
    )


def _end_commands(state_dir: Path) -> tuple[str, ...]:
    """Interrupt the commands that run a flow on this installation, and wait until they have ended;
    return their runs. One that does not end in time goes on without servers."""
    runs: list[str] = []
    for path in sorted((state_dir / COMMANDS).glob("*.*")):
        run_id, _, pid = path.name.partition(".")
        if int(pid) == os.getpid():
            continue
        with process_holding(path, int(pid)) as command:
            if command is not None:
                runs.append(run_id)
            for number, patience_s in COMMAND_ENDS_S:
                if command is None or not command.send(number) or command.ends_within(patience_s):
                    break
        path.unlink(missing_ok=True)  # of one that was killed
    return tuple(runs)


def _await_ready(reports: int, deadline: float, log_path: Path) -> Runtime:
    """Return what the supervisor reports once: its runtime; raises the error that ended it."""
    line = b""
    while not line.endswith(b"\n"):
        readable = is_readable(reports, deadline - time.monotonic())
        chunk = os.read(reports, 65536) if readable else b""
        if not chunk:
            ended = f"it ended: {last_line(log_path) or '(no output)'}"
            raise NotReady(
                "the supervisor did not get ready",
                got=ended if readable else "no report in time",
                where=log_path,
                do="Read that log, then try again.",
            )
        line += chunk
    report = json.loads(line)
    if "code" in report:
        raise from_record(report)
    return Runtime.model_validate(report)


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
    try:
        process.wait(STOP_DEADLINE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _is_locked(path: Path) -> bool:
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def _wait_unlocked(path: Path, timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while _is_locked(path):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def _owner(state: Path) -> int | None:
    path = state / LOCK_FILE
    if not _is_locked(path):
        return None
    text = path.read_text().strip()
    return int(text) if text.isdecimal() else None


def _reap(pid: int) -> None:
    with contextlib.suppress(ChildProcessError):  # fails unless this same process started it
        os.waitpid(pid, os.WNOHANG)


def _measured(service: ServiceStatus) -> ServiceStatus:
    if not service.session:
        return service
    pids = [service.session, *descendants(service.session)]
    return service.model_copy(
        update={"rss_bytes": resident_bytes(pids), "processes": len(pids) - 1}
    )
