"""`paceline doctor --servers` checks the settings of Prefect's and MLflow's servers."""

from __future__ import annotations

import fcntl
import json
import os
import socket
from pathlib import Path

import pytest

from paceline.cli.doctor import checks
from paceline.cluster import LOCK_FILE
from paceline.config import Endpoints, Profile, Runtime, Secrets
from paceline.schemas import InstallationStatus, ServiceStatus
from tests.support.command import paceline


@pytest.fixture
def nowhere() -> str:
    """Return a port of loopback at which nothing listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def test_without_settings_the_files_are_named() -> None:
    done = paceline("doctor", "--servers")
    assert done.returncode == 1
    assert done.stdout.startswith("FAILED  servers")
    assert "Load prefect.env or mlflow.env first" in done.stdout


def test_each_server_that_is_away_is_one_finding(
    nowhere: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFECT_SERVER_DATABASE_HOST", "127.0.0.1")
    monkeypatch.setenv("PREFECT_SERVER_DATABASE_PORT", nowhere)
    monkeypatch.setenv("PREFECT_SERVER_DATABASE_PASSWORD", "hunter2")
    monkeypatch.setenv("PREFECT_REDIS_MESSAGING_URL", f"redis://:hunter2@127.0.0.1:{nowhere}/0")
    url = f"postgresql+psycopg://mlflow:hunter2@127.0.0.1:{nowhere}/mlflow"
    monkeypatch.setenv("MLFLOW_BACKEND_STORE_URI", url)
    done = paceline("doctor", "--servers", "--json")
    assert done.returncode == 1
    found = json.loads(done.stdout)["checks"]
    names = ["prefect-database", "prefect-redis", "mlflow-database"]
    assert [each["name"] for each in found] == names
    for each in found:
        assert each["status"] == "failed" and "refused" in each["found"].lower()
        assert "\n" not in each["found"] and each["do"]
    assert "hunter2" not in done.stdout


def test_mlflow_on_a_file_needs_no_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_BACKEND_STORE_URI", "sqlite:///mlflow.db")
    done = paceline("doctor", "--servers")
    assert done.returncode == 0, done.stdout


def test_a_service_that_ends_again_and_again_is_a_finding(tmp_path: Path) -> None:
    services = (
        ServiceStatus(name="prefect-worker", state="restarting", problem="exited", log="a.log"),
        ServiceStatus(name="dask", state="ready"),
    )
    made = InstallationStatus(running=True, pid=os.getpid(), services=services)
    (tmp_path / "supervisor.json").write_text(made.model_dump_json())
    none = Endpoints(prefect_api_url="", mlflow_url="", scheduler_address="")
    runtime = Runtime(profile=Profile(), state_dir=tmp_path, endpoints=none, secrets=Secrets())
    assert not list(checks.flows_and_cluster(runtime)), "what does not run does not restart"
    with (tmp_path / LOCK_FILE).open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        held.write(str(os.getpid()))
        held.flush()
        (found,) = checks.flows_and_cluster(runtime)
    assert (found.name, found.status, found.do) == ("prefect-worker", "failed", "Read a.log.")
    assert found.found == "restarting: exited"


@pytest.mark.parametrize(("kinds", "status"), [("A100 A100", "ok"), ("A100 H100 H100", "warning")])
def test_gpus_that_no_rank_uses_are_a_finding(
    kinds: str, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cards = tuple(f"NVIDIA {each}, 81559 MiB, 550.54.15" for each in kinds.split())
    monkeypatch.setattr(checks, "gpus", lambda: cards)
    (found,) = checks.accelerators()
    assert found.status == status
