"""A real MLflow server for tests: one process group on a free loopback port, SQLite, a directory.

It is a fixture of every test; those that use it are of the group "prefect", so that one starts.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.servers import free_port

CREATES_TABLES = "/api/2.0/mlflow/experiments/search?max_results=1"  # a first request alone
READY_S = 240.0  # on a machine that many share; 6 s on a quiet one
_SWITCHES = {
    "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",  # else 10 processes and 2 GB
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
    "_MLFLOW_SERVER_ARTIFACT_ROOT": "mlflow-artifacts:/",
    "_MLFLOW_SERVER_SERVE_ARTIFACTS": "true",
    "_MLFLOW_SGI_NAME": "uvicorn",
}


@pytest.fixture(scope="session")
def mlflow_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return where the server keeps its database, mlflow.db, and artifacts."""
    return tmp_path_factory.mktemp("mlflow")


@pytest.fixture(scope="session")
def mlflow_url(mlflow_directory: Path) -> Iterator[str]:
    """Yield the URL of this session's MLflow server.

    As an installation does, it leaves out the command ``mlflow server``, whose imports cost 5 s.
    """
    directory = mlflow_directory
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    log = directory / "mlflow.log"
    argv = [sys.executable, "-m", "uvicorn", "--host", "127.0.0.1", "--port", str(port)]
    argv += ["--log-level", "warning", "mlflow.server.fastapi_app:app"]
    where = {
        "_MLFLOW_SERVER_FILE_STORE": f"sqlite:///{directory / 'mlflow.db'}",
        "_MLFLOW_SERVER_ARTIFACT_DESTINATION": str(directory / "artifacts"),
    }
    with log.open("wb") as output:
        server = subprocess.Popen(
            argv,
            env={**os.environ, **_SWITCHES, **where, "PYTHONWARNINGS": "ignore"},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # the server and its worker go together
        )
    try:
        _wait(url, server, log)
        yield url
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGTERM)
        try:
            server.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait(10)


def _wait(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline:
        if server.poll() is not None:
            break
        try:
            with urllib.request.urlopen(f"{url}{CREATES_TABLES}", timeout=60):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    raise RuntimeError(f"MLflow did not start: {log.read_text(errors='replace')[-2000:]}")
