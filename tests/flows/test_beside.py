"""The base travels while the snapshot is built; what fails first ends the other and is reported."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
from prefect.runtime import flow_run

from paceline.errors import Cancelled, DataRejected, DeploymentFailed, InvalidInput
from paceline.flows import lifecycle
from paceline.schemas import INTERRUPTED, DeploymentStatus, PublishedModel
from paceline.tasks import distribute, prepare
from paceline.tasks._support import artifacts, deployment
from paceline.tasks._support.declaring import declared
from paceline.tasks._support.run import Run, StageResult
from paceline.tasks._support.stages import stage
from tests.api.conftest import make_runtime
from tests.support.prefect_server import eventually

pytestmark = [
    pytest.mark.usefixtures("prefect_server"),
    pytest.mark.xdist_group("prefect"),  # one server
    pytest.mark.timeout(300),
]
WAIT_S = 120.0
BASE = {"model_id": "m", "version": "1", "url": "s3://b/m/1", "manifest_digest": "a" * 64}
SNAPSHOT = {
    "url": "s3://b/s", "digest": "b" * 64, "documents": 2, "bytes": 2, "tokens": 2,
    "format": "text", "label": "research", "project": "", "skipped": 0,
}  # fmt: skip


class Lifecycle:
    """A lifecycle whose relay and snapshot do what a test says, up to its training."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.relays = self.builds = lambda: None
        self.relaying, self.building = threading.Event(), threading.Event()
        self.ids: dict[str, str] = {}
        self.cancelled: list[str] = []

    def deployment(self, _id: str) -> Any:
        """Return a deployment that does not end by itself."""
        record = SimpleNamespace(
            target_workers=("a",), run_id=self.run.run_id, flow_run_id=None, predicted_seconds=1e6
        )
        return SimpleNamespace(
            status=DeploymentStatus.INIT, workers_complete=(), progress=0.5, deployment=record
        )

    def events(self, _seen: int, _wait_s: float) -> Any:
        return SimpleNamespace(events=(), last=0)

    def cancel(self, deployment_id: str) -> None:
        self.cancelled.append(deployment_id)

    def watch(self) -> None:
        """Follow the deployment as the real relay does."""
        with artifacts.Progress("relay", "relay") as page:
            deployment.watch(self.run, "d-1", "relay", page, 0)

    def states(self) -> dict[str, str]:
        """Return how Prefect shows each stage and sub-flow, once all have ended."""
        ids = FlowRunFilterId(any_=[*self.ids.values()])

        def ended() -> dict[str, str] | None:
            with get_client(sync_client=True) as client:
                found = client.read_task_runs(flow_run_filter=FlowRunFilter(id=ids))
            shown = {
                each.name.rsplit("-", 1)[0]: f"{each.state_type.value} {each.state_name}"
                for each in found
                if each.state and each.state.is_final() and each.state_type
            }
            return shown if {"snapshot", "relay"} <= shown.keys() else None

        return eventually(ended) or {}


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lifecycle:
    run = Run(make_runtime(tmp_path), "run-20261120-153600-9f3a1c")
    made = Lifecycle(run)
    monkeypatch.setattr(Run, "coordinator", made)
    monkeypatch.setattr(Run, "open", lambda *_: run)

    @stage("base")
    def base(_run: Run, _model: str | None) -> PublishedModel:
        return PublishedModel(**BASE)

    @stage("snapshot")
    def snapshot(_run: Run, _data: str | None, _reading: object) -> StageResult:
        made.building.set()
        made.builds()
        return StageResult(stage="snapshot", output=SNAPSHOT, seconds=0.0, reused=False)

    @stage("relay")
    def relay() -> str:
        made.relaying.set()
        made.relays()
        return "relayed"

    @declared("moves")
    def moves(model_id: str, version: str, activate: bool) -> Any:
        made.ids["moves"] = str(flow_run.get_id())
        relay()
        return SimpleNamespace(model_id=model_id, version=version)

    @declared("trains")
    def trains(model_id: str, version: str, snapshot_url: str) -> Any:
        raise InvalidInput("it is trained")

    @stage("check-inputs")
    def checks(_run: Run, _profile: object, _inputs: object) -> None:
        return None

    def named(log: object) -> Callable[..., None]:
        made.ids["lifecycle"] = str(flow_run.get_id())
        return lambda _update: None

    def distribute_model(model_id: str, version: str, *, activate: bool, **_: object) -> Any:
        return moves(model_id, version, activate)

    def train_model(model_id: str, version: str, url: str, **_: object) -> Any:
        return trains(model_id, version, url)

    given: dict[str, Any] = {
        "recorded": lambda *_: nullcontext(), "log_stages_to": named, "given_base": base,
        "build_data_snapshot": snapshot, "distribute_model": distribute_model,
        "train_model": train_model, "require_trainable": checks,
        "exporting": lambda _run, profile, *_, **__: profile,
        "export_changes": lambda *_: {}, "has_champion": lambda *_: False,
    }  # fmt: skip
    ignored = ("published_tasks", "require_one_process", "require_scorable", "reading_for")
    for name in ignored:
        given[name] = lambda *_: None
    for name, value in given.items():
        monkeypatch.setattr(lifecycle, name, value)
    monkeypatch.setattr(run, "manifest", lambda _url: None)
    monkeypatch.setattr(prepare, "permitted_snapshot", lambda *_, **__: {})
    return made


def test_the_relay_begins_before_the_snapshot_is_built_and_training_after_both(
    made: Lifecycle,
) -> None:
    def builds() -> None:
        assert made.relaying.wait(WAIT_S), "the relay waits for the snapshot"

    made.builds = builds
    with pytest.raises(InvalidInput, match="it is trained"):
        lifecycle.run_lifecycle()
    with get_client(sync_client=True) as client:
        ids = FlowRunFilterId(any_=[made.ids["lifecycle"]])
        found = eventually(
            lambda: (
                len(runs := client.read_task_runs(flow_run_filter=FlowRunFilter(id=ids))) >= 6
                and {each.name.rsplit("-", 1)[0]: each for each in runs}
            )
        )
    assert found
    above = {
        name: {str(each.id) for given in run.task_inputs.values() for each in given}
        for name, run in found.items()
    }
    assert str(found["base"].id) in above["moves"] & above["prepare-inputs"]
    assert str(found["snapshot"].id) in above["prepare-inputs"] - above["moves"]
    assert str(found["prepare-inputs"].id) in above["trains"] & above["check-inputs"]


def test_a_snapshot_that_fails_ends_the_relay_and_its_deployment(made: Lifecycle) -> None:
    def builds() -> None:
        assert made.relaying.wait(WAIT_S)
        raise DataRejected("two samples of one key")

    made.builds, made.relays = builds, made.watch
    with pytest.raises(DataRejected, match="two samples of one key"):
        lifecycle.run_lifecycle()
    assert made.cancelled == ["d-1"]
    assert not made.run.driving
    states = made.states()
    assert states["relay"] == "CANCELLED Cancelled"
    assert states["snapshot"] == "FAILED Failed"


def test_a_relay_that_fails_ends_the_build_of_the_snapshot(made: Lifecycle) -> None:
    def relays() -> None:
        assert made.building.wait(WAIT_S)
        raise DeploymentFailed("2 of 4 workers failed")

    made.builds, made.relays = until_ended(made), relays
    with pytest.raises(DeploymentFailed, match="2 of 4 workers failed"):
        lifecycle.run_lifecycle()
    states = made.states()
    assert (states["relay"], states["snapshot"]) == ("FAILED Failed", "CANCELLED Cancelled")


def test_ctrl_c_ends_both_and_the_deployment_goes_on(made: Lifecycle) -> None:
    def relays() -> None:
        assert made.building.wait(WAIT_S)
        threading.Timer(0.5, signal.raise_signal, [signal.SIGINT]).start()
        made.watch()

    made.builds, made.relays = until_ended(made), relays
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            lifecycle.run_lifecycle()
    finally:
        signal.signal(signal.SIGINT, before)
    assert not made.cancelled
    assert made.run.driving == ["d-1"], "the command names it"
    states = made.states()
    assert states["relay"] == states["snapshot"] == f"CANCELLED {INTERRUPTED}"


def test_nodes_switch_after_what_runs_beside_has_ended_well(made: Lifecycle) -> None:
    run = made.run
    run.beside = SimpleNamespace(wait_for_end=lambda: run.end(DataRejected("no")))  # type: ignore[assignment]
    with pytest.raises(Cancelled, match="a stage beside this one failed"):
        distribute.activate.fn(run, "d-1", SimpleNamespace(version="1"), ["a"])  # type: ignore[arg-type]


def until_ended(made: Lifecycle) -> Callable[[], None]:
    """Return a build that shows its progress for ever, and so learns that it is to end."""

    def builds() -> None:
        while True:
            threading.Event().wait(0.05)
            made.run.stop_if_ended()

    return builds
