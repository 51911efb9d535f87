"""Runs are found again, and each way a server can fail is one clear error."""

from __future__ import annotations

import http.server
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.config import Endpoints, Profile, Runtime, Secrets
from paceline.errors import AccessDenied, InvalidInput, NotFound, ServiceUnavailable
from paceline.registry import MetricPoint, Registry, evaluation_metrics, gate_metrics
from paceline.registry.lineage import training_params
from paceline.schemas import EvaluationReport, digest_of
from tests.registry.bundles import digest, make_evidence
from tests.registry.test_finding import JOB
from tests.support.stack import CLOSED_PROXY

pytestmark = pytest.mark.xdist_group("prefect")  # one server
QUICK = {"timeout_s": 2, "retries": 0}


def test_one_run_belongs_to_one_run_id(registry: Registry) -> None:
    first = registry.ensure_run("run-a", experiment="runs", name="lifecycle", tags={"flow": "x"})
    assert registry.ensure_run("run-a", experiment="runs") == first
    assert registry.ensure_run("run-b", experiment="runs") != first
    assert first in registry.run_url(first)
    assert registry.model_url("bytelm", "3").endswith("/#/models/bytelm/versions/3")


def test_a_doubled_run_settles_on_the_older_one(registry: Registry) -> None:
    first = registry.ensure_run("run-doubled", experiment="runs")
    experiment = registry.call("get_run", first).info.experiment_id
    registry.call("create_run", experiment, tags={"paceline.run_id": "run-doubled"})
    assert registry.ensure_run("run-doubled", experiment="runs") == first


def test_what_is_logged_can_be_read_back(registry: Registry, tmp_path: Path) -> None:
    run = registry.ensure_run("run-logged", experiment="runs")
    params = {f"training.p{number}": number for number in range(150)}  # more than one batch
    registry.log_params(run, params)
    registry.log_params(run, {"training.p1": 1})
    registry.log_params(run, {"training.p1": 2})  # resumed with another setting
    registry.log_metrics(run, [MetricPoint("loss", 1 / (step + 1), step) for step in range(1500)])
    evidence = make_evidence("bytelm", "x")
    registry.log_metrics(run, evaluation_metrics(evidence.evaluation) + gate_metrics(evidence.gate))
    registry.log_dataset(run, name="stdlib", url="s3://paceline/data/x", digest=digest("snapshot"))
    registry.log_artifact_text(run, "# report", "evaluation/report.md")
    (tmp_path / "report.png").write_bytes(b"png")
    registry.log_artifact_file(run, tmp_path / "report.png", "evaluation")
    registry.log_tags(run, {"paceline.code_version": "0.1"})
    registry.finish_run(run)
    read = registry.call("get_run", run)
    assert len(read.data.params) == 150
    assert (read.data.params["training.p1"], read.data.tags["now.training.p1"]) == ("1", "2")
    assert read.data.metrics["loss"] == pytest.approx(1 / 1500)
    assert read.data.metrics["eval/candidate/bits_per_byte"] == 2.5
    assert read.data.metrics["gate/passed"] == 1.0
    assert read.info.status == "FINISHED"
    assert read.data.tags["paceline.code_version"] == "0.1"
    dataset = read.inputs.dataset_inputs[0]
    assert {tag.key: tag.value for tag in dataset.tags}["paceline.digest"] == digest("snapshot")
    assert registry.read_artifact(run, "evaluation/report.png") == b"png"


def test_an_older_versions_report_keeps_its_digest_and_differences() -> None:
    better = {"value": -0.87, "low": -0.9, "high": -0.8}
    fields = make_evidence("bytelm", "x").evaluation.model_dump(mode="json")
    fields["scores"][0]["gain_over"] = {"base": better}
    older = EvaluationReport.model_validate(fields)
    assert digest_of(older) == digest_of(fields)
    metrics = {each.key: each.value for each in evaluation_metrics(older)}
    assert metrics["eval/candidate/difference_to/base"] == -0.87
    fields["scores"][0]["difference_to"] = fields["scores"][0].pop("gain_over")
    assert evaluation_metrics(EvaluationReport.model_validate(fields)) == evaluation_metrics(older)


def test_each_setting_of_a_training_is_a_param_of_its_own() -> None:
    params = training_params(JOB)
    assert params["training.mesh.shard"] == "1"
    assert params["training.guard.spares"] == "0"
    assert not [each for each in params.values() if each.startswith("{")]


def test_unknown_things_are_not_found(registry: Registry) -> None:
    for look in (
        lambda: registry.version("no-such-model", "1"),
        lambda: registry.evidence("no-such-model", "1"),
        lambda: registry.rollback("no-such-model"),
        lambda: registry.run_url("0" * 32),
    ):
        with pytest.raises(NotFound):
            look()
    assert registry.champion("no-such-model") is None


def test_a_missing_artifact_is_not_found(registry: Registry) -> None:
    run = registry.ensure_run("run-empty", experiment="runs")
    with pytest.raises(NotFound):
        registry.read_artifact(run, "evidence/none.json")


def test_a_server_that_is_away_is_unavailable() -> None:
    away = Registry("http://127.0.0.1:9", **QUICK)  # the discard port: nobody listens
    with pytest.raises(ServiceUnavailable, match=r"127\.0\.0\.1:9") as caught:
        away.champion("bytelm")
    assert "\n" not in str(caught.value)
    assert "paceline status" in str(caught.value)


def test_a_server_on_loopback_is_asked_without_the_machines_proxy(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "http_proxy"):
        monkeypatch.setenv(name, CLOSED_PROXY)
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "internal.example")
    with pytest.raises(NotFound):
        Registry(registry.tracking_uri, **QUICK).find_run("run-none")
    assert os.environ["NO_PROXY"].endswith(",internal.example")


class _Refusing(http.server.BaseHTTPRequestHandler):
    status = 401

    def do_GET(self) -> None:
        self.send_response(self.status)
        self.end_headers()
        self.wfile.write(b"You are not authenticated.")

    do_POST = do_GET

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def refusing_url() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Refusing) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("status", "error"), [(401, AccessDenied), (403, AccessDenied), (503, ServiceUnavailable)]
)
def test_refusals_and_outages_are_told_apart(
    refusing_url: str, monkeypatch: pytest.MonkeyPatch, status: int, error: type[Exception]
) -> None:
    monkeypatch.setattr(_Refusing, "status", status)
    for variable in ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD"):
        monkeypatch.setenv(variable, "")  # restored afterwards: the adapter sets them
    denied = Registry(refusing_url, "admin:wrong-secret", **QUICK)
    with pytest.raises(error) as caught:
        denied.champion("bytelm")
    assert "wrong-secret" not in str(caught.value)


def test_a_runtime_names_its_registry(tmp_path: Path) -> None:
    runtime = Runtime(
        profile=Profile(),
        state_dir=tmp_path,
        secrets=Secrets(),
        endpoints=Endpoints(mlflow_url="http://127.0.0.1:5000/"),
    )
    assert Registry.from_runtime(runtime).tracking_uri == "http://127.0.0.1:5000"
    with pytest.raises(InvalidInput, match="no MLflow server"):
        Registry("")
