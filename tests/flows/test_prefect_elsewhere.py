"""A Prefect server that asks for an API key, as Prefect Cloud and many proxies do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.api import PrefectStarter
from paceline.cli.doctor import checks
from paceline.config import Endpoints, Profile, Runtime, Secrets, save_runtime
from paceline.errors import AccessDenied
from tests.support.web import asking_for

KEY = "pnu_of-a-test"
NOBODY = "0192f0c1-0000-7000-8000-000000000001"


@pytest.mark.nightly
@pytest.mark.usefixtures("prefect_server")
def test_flows_are_registered_and_started_with_an_api_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from prefect.settings import PREFECT_API_URL

    monkeypatch.delenv("PREFECT_API_AUTH_STRING", raising=False)
    with asking_for(f"Bearer {KEY}", PREFECT_API_URL.value().removesuffix("/api")) as guarded:
        runtime = Runtime(
            profile=Profile(), state_dir=tmp_path, secrets=Secrets(),
            endpoints=Endpoints(prefect_api_url=f"{guarded.url}/api"),
        )  # fmt: skip
        save_runtime(runtime)
        (finding,) = checks.flows_and_cluster(runtime)
        assert (finding.status, finding.do) == (
            "failed",
            "Check the user and password, or the key.",
        )
        with pytest.raises(AccessDenied):
            PrefectStarter.of(runtime).states([NOBODY])

        monkeypatch.setenv("PREFECT_API_KEY", KEY)
        env = {name: value for name, value in os.environ.items() if name != "PREFECT_API_URL"}
        argv = [sys.executable, "-m", "paceline.flows.register", "--state", str(tmp_path)]
        done = subprocess.run(argv, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        (finding,) = checks.flows_and_cluster(runtime)
        assert finding.status == "ok"
        starter = PrefectStarter.of(runtime)
        asked = {"model_id": "m", "version": "1"}
        started = starter.run("verify-model", "run-20261128-120000-abcdef", asked)
        assert starter.states([started.flow_run_id]) == {started.flow_run_id: "SCHEDULED"}
        starter.cancel(started.flow_run_id)
