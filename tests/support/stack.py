"""The embedded installation as a test drives it: through `paceline`, like a person or a CI job."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from paceline.config import Runtime, load_runtime

PACELINE = (sys.executable, "-m", "paceline.cli.main")


@dataclass
class Ended:
    """How a command ended; ``answer`` is its last line of standard output as JSON."""

    code: int
    out: str
    err: str
    answer: dict[str, Any] = field(default_factory=dict)

    @property
    def problem(self) -> str:
        """Return the one line that explains a failure."""
        lines = [each for each in self.err.splitlines() if each.startswith("paceline: ")]
        assert len(lines) == 1, self.err
        return lines[0]


CLOSED_PROXY = "http://127.0.0.1:9"  # of every command that the tests start


def environment() -> dict[str, str]:
    """Return this environment without what a test runner or an outer installation put there."""
    left_out = ("PREFECT_", "MLFLOW_", "PACELINE_STATE", "PYTEST_", "PYTHONWARNINGS")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(left_out)}
    # what commands keep for their user is not for whoever runs the tests
    kept = {"XDG_CONFIG_HOME": str(Path(tempfile.gettempdir(), "paceline-tests"))} | kept
    # as on many a company's machine: no call to loopback may go there
    return dict.fromkeys(("HTTP_PROXY", "http_proxy", "HTTPS_PROXY"), CLOSED_PROXY) | kept


def start(*words: str, state: Path, **popen: Any) -> subprocess.Popen[str]:
    """Start `paceline WORDS --state STATE` and return its process."""
    return subprocess.Popen(
        [*PACELINE, *words, "--state", str(state)],
        stdout=subprocess.PIPE,
        text=True,
        env=environment(),
        # Whoever runs the tests in the background may have Ctrl-C ignored, and children inherit it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509 - no more
        **{"stderr": subprocess.PIPE, **popen},
    )


def finish(process: subprocess.Popen[str], timeout_s: float) -> Ended:
    """Wait for a command and return how it ended; one that does not end is killed."""
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise
    lines = [each for each in out.splitlines() if each.startswith("{")]
    answer = json.loads(lines[-1]) if lines else {}
    return Ended(code=process.returncode, out=out, err=err, answer=answer)


def paceline(*words: str, state: Path, timeout_s: float = 600) -> Ended:
    """Run `paceline WORDS --state STATE` to its end."""
    return finish(start(*words, state=state), timeout_s)


def processes_of(state: Path) -> list[psutil.Process]:
    """Return every process whose command line or environment names ``state``."""
    found = []
    for each in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if each.pid == os.getpid() or each.status() == psutil.STATUS_ZOMBIE:
                continue
            named = any(str(state) in word for word in each.cmdline())
            if named or each.environ().get("PACELINE_STATE") == str(state):
                found.append(each)
    return found


def wait_until(is_true: Callable[[], Any], timeout_s: float, what: str) -> Any:
    """Return the first true answer of ``is_true``; fail naming ``what`` after ``timeout_s``."""
    deadline = time.monotonic() + timeout_s
    while True:
        answer = is_true()
        if answer:
            return answer
        assert time.monotonic() < deadline, f"not in time: {what}"
        time.sleep(0.05)


def _ask(url: str, auth: str, method: str = "GET", body: Any = None) -> Any:
    secret = base64.b64encode(auth.encode()).decode()
    request = urllib.request.Request(
        url,
        method=method,
        data=None if body is None else json.dumps(body).encode(),
        headers={"Content-Type": "application/json", "Authorization": f"Basic {secret}"},
    )
    with urllib.request.urlopen(request, timeout=20) as answer:
        text = answer.read()
    return json.loads(text) if text else None


def prefect(stack: Runtime, method: str, path: str, body: Any = None) -> Any:
    """Call the installation's Prefect server; again while its database is busy."""
    url, auth = stack.endpoints.prefect_api_url + path, stack.secrets.prefect_auth
    for pause_s in (0.5, 1, 2, 4, 8):
        try:
            return _ask(url, auth, method, body)
        except urllib.error.HTTPError as error:
            if error.code != 503:
                raise
        time.sleep(pause_s)
    return _ask(url, auth, method, body)


def state_of(stack: Runtime, flow_run_id: str) -> str:
    """Return the type of a flow run's state."""
    return str(prefect(stack, "GET", f"/flow_runs/{flow_run_id}")["state"]["type"])


def in_mlflow(stack: Runtime, link: str) -> dict[str, str]:
    """Return the tags of the finished MLflow run that ``link`` opens."""
    run_id = link.rsplit("/", 1)[-1]
    url = f"{stack.endpoints.mlflow_url}/api/2.0/mlflow/runs/get?run_id={run_id}"
    run = _ask(url, stack.secrets.mlflow_auth)["run"]
    assert run["info"]["status"] == "FINISHED"
    return {each["key"]: each["value"] for each in run["data"]["tags"]}


def await_registered(stack: Runtime) -> None:
    """Wait until the installation has registered prefect.yaml."""

    def registered() -> bool:
        services = paceline("status", "--json", state=stack.state_dir).answer["services"]
        return any(
            each["name"] == "prefect-deployments" and each["state"] == "done" for each in services
        )

    wait_until(registered, 120, "prefect.yaml is registered")


@contextlib.contextmanager
def installation(state: Path, *overrides: str, profile: str = "ci") -> Iterator[Runtime]:
    """Yield a running installation in ``state``; at the end nothing of it is left."""
    words = [word for each in overrides for word in ("--set", each)]
    ended = paceline("up", "--profile", profile, "--json", *words, state=state)
    assert ended.code == 0, ended.err
    try:
        yield load_runtime(state)
    finally:
        stopped = paceline("down", "--json", state=state)
        assert stopped.code == 0, stopped.err
        wait_until(lambda: not processes_of(state), 10, "every process gone")
