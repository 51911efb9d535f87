"""A flow run on Prefect's server: its form, its log, its graph, its artifacts, its transactions."""

from __future__ import annotations

import json
import logging
import signal
import threading
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast
from uuid import UUID

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import (
    ArtifactFilter,
    ArtifactFilterFlowRunId,
    FlowRunFilter,
    FlowRunFilterId,
    LogFilter,
    LogFilterFlowRunId,
)
from prefect.client.schemas.sorting import LogSort
from prefect.exceptions import PrefectHTTPStatusError
from prefect.flow_engine import run_flow
from prefect.logging.loggers import flow_run_logger
from prefect.runtime import flow_run
from prefect.transactions import Transaction, get_transaction, transaction
from prefect.utilities.callables import parameter_schema
from pydantic import BaseModel

from paceline.errors import AwaitingApproval, Cancelled, Conflict, InvalidInput, ServiceUnavailable
from paceline.flows.train import train_model
from paceline.schemas import INTERRUPTED
from paceline.tasks import promote
from paceline.tasks._support import artifacts
from paceline.tasks._support.declaring import declared
from paceline.tasks._support.lineage import recorded, tag_model
from paceline.tasks._support.run import (
    Run,
    StageResult,
    StageUpdate,
    _listeners,
    listening,
    log_stages_to,
)
from paceline.tasks._support.stages import stage
from tests.registry.bundles import make_evidence
from tests.support.prefect_server import eventually

pytestmark = [
    pytest.mark.usefixtures("prefect_server"),
    pytest.mark.xdist_group("prefect"),  # one server
    pytest.mark.timeout(180),
]


class Made(BaseModel):
    """What one stage returns to the next."""

    model_id: str
    nodes: tuple[str, ...] = ()


def task_runs_of(flow_run_id: UUID, wanted: int) -> dict[str, Any]:
    def ask() -> dict[str, Any] | None:
        with get_client(sync_client=True) as client:
            found = client.read_task_runs(
                flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[flow_run_id]))
            )
        done = [each for each in found if each.state and each.state.is_final()]
        # of a sub-flow Prefect names the task run, with a number behind
        known = {each.name.removesuffix("-0"): each for each in done}
        return known if len(done) >= wanted else None

    found = eventually(ask)
    assert found, f"no {wanted} task runs"
    return found


@pytest.fixture(scope="module")
def train_deployment(prefect_server: None) -> UUID:
    with get_client(sync_client=True) as client:
        flow_id = client.create_flow(train_model)
        return client.create_deployment(
            flow_id,
            "form",
            enforce_parameter_schema=True,
            parameter_openapi_schema=parameter_schema(train_model).model_dump_for_openapi(),
        )


GIVEN = {"model_id": "acme/tiny", "version": "1", "snapshot_url": "s3://b/data/snapshots/0"}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("learning_rate", 0),
        ("ranks", 0),
        ("steps", -1),
        ("labels", "neither"),
        ("mesh", {"shard": 0}),
        ("mesh", {"shards": 2}),
        ("priority", 101),
        ("budget", -1),
        ("seed", -1),
        ("name", "n" * 101),
        ("resources", {"rank": 2}),
        ("checkpoint_policy", {"keep": 0}),
        ("model_id", "../etc"),
        ("version", ""),
    ],
)
def test_the_server_refuses_a_bad_value_by_its_fields_name(
    train_deployment: UUID, field: str, value: object
) -> None:
    with (
        get_client(sync_client=True) as client,
        pytest.raises(PrefectHTTPStatusError, match="409 Conflict") as refused,
    ):
        client.create_flow_run_from_deployment(train_deployment, parameters=GIVEN | {field: value})
    assert field in refused.value.response.text
    shown = next(iter(value)) if isinstance(value, dict) else str(value)
    assert shown in refused.value.response.text


def test_the_server_takes_what_a_person_chooses(train_deployment: UUID) -> None:
    chosen = {"learning_rate": 3e-4, "ranks": 4, "mesh": {"shard": 2, "tp": 2}, "steps": 10}
    with get_client(sync_client=True) as client:
        made = client.create_flow_run_from_deployment(train_deployment, parameters=GIVEN | chosen)
    assert made.parameters["mesh"] == {"shard": 2, "tp": 2}


def test_edges_follow_what_flows_and_stages_return() -> None:
    ran: dict[str, UUID] = {}

    @stage("first")
    def first() -> Made:
        return Made(model_id="".join(["m", "1"]), nodes=("a", "b"))

    @stage("second")
    def second(nodes: tuple[str, ...]) -> list[str]:
        return [*nodes]

    @declared("prepares")
    def prepares() -> Made:
        return first()

    @declared("uses")
    def uses(model_id: str, nodes: list[str]) -> str:
        return model_id

    @declared("whole")
    def whole() -> None:
        ran["whole"] = UUID(str(flow_run.get_id()))
        beside = first.submit()
        inputs = prepares()
        nodes = second(beside.result().nodes)
        uses(inputs.model_id, nodes)

    whole()
    runs = task_runs_of(ran["whole"], 4)
    above = {
        name: {str(each.id) for given in run.task_inputs.values() for each in given}
        for name, run in runs.items()
    }
    assert str(runs["first"].id) in above["second"]
    assert str(runs["second"].id) in above["uses"]
    # of a sub-flow the edge is to the flow run, or to the task run that stands for it
    ends = {str(runs["prepares"].id), str(runs["prepares"].state.state_details.child_flow_run_id)}
    assert ends & above["uses"], above


def test_runs_of_stages_are_named_by_their_model_and_version() -> None:
    ran: list[UUID] = []

    @stage("relay")
    def relay(of: Made, stage: str = "relay") -> None: ...

    @stage("publish-directory")
    def publishes(directory: str, model_id: str, version: str) -> None: ...

    @stage("fetch-manifest")
    def fetches(url: str) -> None: ...

    @declared("naming")
    def naming() -> None:
        ran.append(UUID(str(flow_run.get_id())))
        relay(Made(model_id="acme/tiny"), stage="rollout-relay")
        publishes("/models", "acme/tiny", "2")
        fetches("hf://acme/tiny")

    naming()
    assert task_runs_of(ran[0], 3).keys() == {
        "rollout-relay acme/tiny",
        "publish-directory acme/tiny 2",
        "fetch-manifest hf://acme/tiny",
    }


def test_a_flow_run_is_tagged_with_its_run_its_model_and_version() -> None:
    ran: list[UUID] = []

    class Opened:
        run_id, depth = "run-20261120-153600-9f3a1c", 1  # below another flow: MLflow has its run

    @declared("tagging")
    def tagging(base_version: str = "") -> None:
        ran.append(UUID(str(flow_run.get_id())))
        with recorded(cast("Run", Opened()), "tagging"):
            if not base_version:
                tag_model("acme/tiny", "7")

    tagging()
    tagging(base_version="6")
    with get_client(sync_client=True) as client:
        found, other = (set(client.read_flow_run(each).tags) for each in ran)
    assert found == {f"run:{Opened.run_id}", "model:acme/tiny", "version:7"}
    assert other == {f"run:{Opened.run_id}", "version:6"}


def test_a_stage_is_tried_again_only_where_that_may_help() -> None:
    tried: list[str] = []

    @stage("away", retries=1)
    def away(kind: str) -> str:
        tried.append(kind)
        if kind == "refused":
            raise InvalidInput("no")
        if tried.count(kind) == 1:
            raise ServiceUnavailable("away")
        return kind

    @declared("trying")
    def trying(kind: str) -> str:
        return away(kind)

    assert trying("away") == "away"
    with pytest.raises(InvalidInput):
        trying("refused")
    assert tried == ["away", "away", "refused"]


def test_a_page_that_hangs_holds_up_no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    hangs, sent = threading.Event(), list[float]()

    def update(*, progress: float, **_: object) -> None:
        hangs.wait(60)
        sent.append(progress)

    @stage("hangs")
    def hang() -> None:
        with artifacts.Progress("hung", "training") as page:
            for each in range(3):
                page.show(0.1 * each)

    monkeypatch.setattr(artifacts, "update_progress_artifact", update)
    monkeypatch.setattr(artifacts, "REFRESH_S", 0.0)
    monkeypatch.setattr(artifacts, "END_S", 0.1)
    declared("hanging")(hang)()
    assert not sent, "the work ended before the page answered"
    hangs.set()
    assert eventually(lambda: sent) == [0.0], "and lets none pile up"


def test_the_page_has_the_librarys_log_a_full_bar_and_a_readable_table() -> None:
    ran: list[UUID] = []

    @stage("shows")
    def shows() -> None:
        logging.getLogger("paceline.tasks.train").info("train 50 %%: step 20/40, loss 2.345")
        with artifacts.Progress("bar", "training") as page:
            page.show(0.5)
        row = {"sha256": "a" * 64, "total_bytes": 3_000_000, "seconds": 1.23456, "share": 0.123456}
        artifacts.table("figures", [row], "figures")

    @declared("showing")
    def showing() -> None:
        ran.append(UUID(str(flow_run.get_id())))
        shows()

    showing()
    logs = LogFilter(flow_run_id=LogFilterFlowRunId(any_=ran))
    with get_client(sync_client=True) as client:
        found = eventually(
            lambda: [each for each in client.read_logs(logs) if "loss 2.345" in each.message]
        )
        assert found, "the line is on the run's page"
        kept = client.read_artifacts(
            artifact_filter=ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=ran))
        )
    by_key = {each.key: each.data for each in kept}
    assert by_key["bar"] == 100
    (row,) = json.loads(str(by_key["figures"]))
    assert row == {"sha256": "a" * 12, "total": "3.0 MB", "seconds": "1.23 s", "share": "0.1235"}


def test_the_page_of_the_lifecycle_has_a_line_for_each_stage_of_its_flows() -> None:
    ran: list[UUID] = []

    @declared("inner-stages")
    def inner() -> None:
        ran.append(UUID(str(flow_run.get_id())))
        for update in (
            StageUpdate(stage="train", fraction=0.5, message="step 20/40"),
            StageUpdate(stage="train", fraction=1.0, message="40 steps", done=True, seconds=2.04),
            StageUpdate(stage="base", fraction=1.0, message="m v1", done=True, reused=True),
        ):
            for each in _listeners:
                each(update)

    @declared("outer-stages")
    def outer() -> None:
        ran.append(UUID(str(flow_run.get_id())))
        with listening(log_stages_to(artifacts.own_log())):
            inner()

    outer()
    logs = LogFilter(flow_run_id=LogFilterFlowRunId(any_=ran[:1]))
    with get_client(sync_client=True) as client:
        lines = eventually(
            lambda: [
                each.message
                for each in client.read_logs(logs)
                if each.message.startswith(("train ", "base "))
            ]
        )
    assert lines == ["train done in 2.0 s: 40 steps", "base already done: m v1"]


def state_of(flow_run_id: UUID) -> str:
    with get_client(sync_client=True) as client:
        state = client.read_flow_run(flow_run_id).state
    assert state is not None
    return f"{state.type.value}: {state.message}"


def test_ctrl_c_leaves_flow_and_sub_flow_cancelled_and_reaches_the_caller() -> None:
    ran: list[UUID] = []

    @stage("trains")
    def trains() -> None:
        signal.raise_signal(signal.SIGINT)

    @declared("inner")
    def inner(run_id: str) -> None:
        ran.append(UUID(str(flow_run.get_id())))
        trains()

    @declared("outer")
    def outer(run_id: str) -> None:
        ran.append(UUID(str(flow_run.get_id())))
        inner(run_id)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            outer("run-20261120-153600-9f3a1c")
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(ran) == 2
    trained = task_runs_of(ran[1], 1)["trains"]
    assert (trained.state.type.value, trained.state.name) == ("CANCELLED", INTERRUPTED)
    for each in ran:
        assert state_of(each).startswith("CANCELLED: interrupted by Ctrl-C"), state_of(each)
        assert "with --run-id run-20261120-153600-9f3a1c" in state_of(each)


def test_a_cancel_leaves_flow_and_stage_cancelled_and_is_not_tried_again() -> None:
    ran: list[UUID] = []
    tried: list[str] = []

    @stage("relays", retries=2)
    def relays() -> None:
        tried.append("once")
        raise Cancelled("the run was cancelled", got="a cancelled flow run")

    @declared("moving")
    def moving() -> None:
        ran.append(UUID(str(flow_run.get_id())))
        relays()

    with pytest.raises(Cancelled, match="the run was cancelled"):
        moving()
    assert task_runs_of(ran[0], 1)["relays"].state.type.value == "CANCELLED"
    assert state_of(ran[0]).startswith("CANCELLED: the run was cancelled")
    assert tried == ["once"]
    with pytest.raises(Cancelled):
        relays.fn()


def test_the_log_of_a_promotion_that_waits_ends_with_one_line() -> None:
    """As Prefect's worker runs it: with the engine's own logger for errors."""
    waits = AwaitingApproval(
        "the promotion waits", wanted="approval until 2026-12-01 10:00 UTC", do="paceline approve R"
    )

    @declared("promotes")
    def promotes() -> None:
        raise waits

    with get_client(sync_client=True) as client:
        made = client.create_flow_run(promotes)
        with pytest.raises(AwaitingApproval):
            run_flow(promotes, made, error_logger=flow_run_logger(made))
        logs = LogFilter(flow_run_id=LogFilterFlowRunId(any_=[made.id]))
        last = "waiting for approval until 2026-12-01 10:00 UTC: paceline approve R"
        found = eventually(lambda: [e for e in client.read_logs(logs) if e.message == last])
        assert found, [each.message for each in client.read_logs(logs)]
        assert found[0].level == logging.INFO
        every = client.read_logs(logs, sort=LogSort.TIMESTAMP_ASC)
    assert every[-1].message == last
    assert not any("Traceback" in e.message or e.level >= logging.ERROR for e in every)
    assert state_of(made.id).startswith("CANCELLED: AwaitingApproval")


@pytest.mark.parametrize("fails", [True, False])
def test_a_transaction_that_fails_undoes_what_a_stage_in_it_did(fails: bool) -> None:
    undone: list[str] = []

    @stage("moves")
    def moves() -> str:
        active = get_transaction()
        assert active is not None
        active.set("moved", "alias")
        return "moved"

    @moves.on_rollback
    def back(active: Transaction) -> None:
        undone.append(active.get("moved"))

    @declared("moving")
    def moving() -> None:
        with transaction():
            moves()
            if fails:
                raise InvalidInput("the check after it")

    if fails:
        with pytest.raises(InvalidInput):
            moving()
    else:
        moving()
    assert undone == (["alias"] if fails else [])


def test_a_promotion_whose_champion_leads_elsewhere_is_undone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """I10: the champion is the one before, and the same promotion may be run again."""
    undone: list[tuple[str, str, bool]] = []
    evidence = make_evidence("m", "1")
    output = {
        "model_id": "m", "version": "2", "registry_version": "1", "alias": "champion", "url": "u"
    }  # fmt: skip
    run = SimpleNamespace(
        state_dir="/state",
        run_id="run-20261120-153600-9f3a1c",
        runtime=None,
        store=None,
        stage=lambda *_, **__: StageResult(
            stage="promote", output=output, seconds=0.0, reused=False
        ),
        retry=lambda call: call(),
        lock=lambda _what: nullcontext(),
        warn=lambda _line: None,
        registry=SimpleNamespace(
            retract=lambda model, version, *, by_person: undone.append((model, version, by_person))
        ),
    )
    elsewhere = SimpleNamespace(digest="0" * 64)
    monkeypatch.setattr(promote.Run, "open", lambda *_: run)
    monkeypatch.setattr(promote, "resolve_source", lambda *_: ("s3://b/m/2", elsewhere))

    @declared("promoting")
    def promoting() -> None:
        with transaction():
            done = promote.promote(run, evidence, "s3://b/m/2").output  # type: ignore[arg-type]
            promote.require_champion(run, evidence, done)  # type: ignore[arg-type]

    with pytest.raises(Conflict, match="other bytes than the gate judged"):
        promoting()
    assert undone == [("m", "1", False)]
