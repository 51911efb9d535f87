"""Prefect and MLflow on servers of others; a laptop runs the lifecycle; the control host is lost.

Types docs/how-to/run-the-control-plane.md and back-up-and-restore.md. The tests follow each other
on one fleet, whose hosts share nothing: a coordinator, a host with the Prefect worker, nodes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.journeys.control_plane import (
    MLFLOW_HEALTH,
    PREFECT_HEALTH,
    SECRETS,
    ControlPlane,
    control_plane,
    start_stores,
)
from tests.journeys.hosts import Ended, Host, until
from tests.journeys.stores import PASSWORD
from tests.journeys.trainers import SMALL, name_of

pytestmark = [pytest.mark.netns, pytest.mark.nightly, pytest.mark.timeout(600)]

TINY = [*SMALL, "--set", "model.parameters=100000", "--set", "model.context=64"]


@pytest.fixture(scope="module")
def fleet(
    plane_software: Path, software: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ControlPlane]:
    logs = tmp_path_factory.mktemp("logs")
    with control_plane(plane_software, software, logs, *TINY) as made:
        texts = logs / "s3/models/texts"  # as any S3 tool puts them there
        texts.mkdir()
        for number in range(40):
            lines = "".join(f"line {n} of text {number} says {n * number}\n" for n in range(400))
            (texts / f"{number}.txt").write_text(lines)
        yield made


def active(fleet: ControlPlane, model: str) -> list[str]:
    """Return the version that each node serves."""
    script = 'basename "$(readlink "$1")"'
    places = [f"state/nodes/{name_of(each)}/store/models/{model}/active" for each in fleet.nodes]
    return [
        each.run("sh", "-c", script, "sh", place).out.strip()
        for each, place in zip(fleet.nodes, places, strict=True)
    ]


def flow_state(fleet: ControlPlane, host: Host, flow_run: str) -> str:
    """Return a flow run's state as Prefect's server on ``host`` has it."""
    url = f"http://127.0.0.1:4200/api/flow_runs/{flow_run}"
    user = f"paceline:{SECRETS['API_PASSWORD']}"
    return str(json.loads(host.run("curl", "-sf", "-u", user, url).ok().out)["state_type"])


def champion(host: Host, model: str) -> str:
    """Return the champion's version as MLflow on ``host`` has it."""
    url = "http://127.0.0.1:5000/api/2.0/mlflow/registered-models/alias"
    found = host.run("curl", "-sf", "-G", url, "-d", f"name={model}", "-d", "alias=champion")
    return str(json.loads(found.ok().out)["model_version"]["version"])


def one_line(done: Ended, code: int, *words: str) -> None:
    last = done.err.splitlines()[-1]
    assert done.code == code, done
    assert last.startswith("paceline: ") and all(each in last for each in words), done.err


def lifecycle_done(fleet: ControlPlane) -> dict[str, str]:
    """Return what the lifecycle printed on the laptop: model, version and flow run."""
    text = fleet.laptop.run("cat", "lifecycle.json").ok().out
    answer = json.loads(text)
    return {
        "model": answer["model_id"],
        "version": answer["version"],
        "run": answer["run_id"],
    }


def test_a_laptop_runs_the_whole_lifecycle_in_one_call(fleet: ControlPlane) -> None:
    done = fleet.on_laptop(fleet.typed["lifecycle"]).ok()
    for stage in ("snapshot", "base", "train", "evaluate", "publish", "promote"):
        assert f"stage {stage} done" in done.err, done.err
    made = lifecycle_done(fleet)
    assert active(fleet, made["model"]) == [made["version"]] * len(fleet.nodes)
    flow_run = done.err.split("/flow-run/")[1].split()[0]
    for host in (fleet.control, fleet.flows):  # made at one replica, run from the other
        assert flow_state(fleet, host, flow_run) == "COMPLETED"
        assert champion(host, made["model"]) == "1"
        heard = host.run("ss", "-Hltn").ok().out
        assert "127.0.0.1:4200" in heard and "127.0.0.1:5000" in heard
        assert not [each for each in heard.split() if each.endswith((":4200", ":5000"))
                    and not each.startswith("127.0.0.1:")]  # fmt: skip
        shown = host.run("sh", "-c", "cat /proc/[0-9]*/cmdline", root=True).out
        assert not [each for each in SECRETS.values() if each in shown]
        assert host.run("grep", "-rlE", "|".join(SECRETS.values()), ".paceline").code == 1
    assert list((fleet.logs / "s3/models/mlflow").rglob("*evidence*")), "artefacts lie in S3"
