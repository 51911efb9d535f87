"""From a bucket to a promoted model on every node, on real servers, through the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.client import CoordinatorClient
from paceline.config import Runtime
from paceline.manifest import parse_manifest, verify_directory
from paceline.registry import Registry
from paceline.schemas import DeploymentStatus, RunSummary
from tests.support.stack import Ended, in_mlflow, paceline, prefect

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("installation"),  # one at a time: two cores
    pytest.mark.timeout(600),
]


def summary_of(ended: Ended) -> RunSummary:
    return RunSummary.model_validate(ended.answer)


def test_the_summary_is_the_record_in_the_schema(lifecycle: Ended) -> None:
    summary = summary_of(lifecycle)
    assert summary.status == "complete"
    assert not summary.already_done
    names = [each.stage for each in summary.stages]
    assert names == [
        "snapshot", "base", "relay", "verify", "activate", "validate-data", "train",
        "evaluate", "package", "gate", "publish", "promote",
        "rollout-relay", "rollout-verify", "rollout-activate",
    ]  # fmt: skip


def test_every_node_holds_every_byte_and_switched(lifecycle: Ended, stack: Runtime) -> None:
    model = summary_of(lifecycle).model
    for index in range(stack.profile.cluster.nodes):
        home = stack.node_dir(f"node-{index}") / "store" / "models" / model.model_id
        assert (home / "active").readlink().name == model.version == "2"
        for version in (model.base_version, model.version):
            manifest = parse_manifest((home / version / "manifest.json").read_bytes())
            verify_directory(home / version, manifest)
        assert manifest.digest == model.manifest_digest


def test_s3_was_read_once_however_many_nodes(lifecycle: Ended) -> None:
    for movement in (summary_of(lifecycle).distribution, summary_of(lifecycle).rollout):
        assert movement.workers == movement.verified == 4
        assert 0 < movement.origin_bytes <= 1.02 * movement.total_bytes
        # one copy from S3, the other three from neighbours
        moved = movement.origin_bytes + movement.received_bytes + movement.bytes_reused
        assert moved >= 4 * movement.total_bytes
        # Late pieces are asked of a second source: of so small a model, all may be late at each.
        assert movement.refetched_bytes <= 3 * movement.total_bytes
        assert movement.epoch == 1
        assert movement.bound_seconds <= movement.predicted_seconds
        assert movement.cross_rack_bytes == movement.total_bytes  # two racks, one crossing


def test_the_new_version_reuses_what_did_not_change(lifecycle: Ended) -> None:
    rollout = summary_of(lifecycle).rollout
    assert rollout.pieces_reused >= rollout.workers  # config.json, at least, on every node


def test_the_candidate_is_better_and_the_gate_says_why(lifecycle: Ended) -> None:
    summary = summary_of(lifecycle)
    assert {"candidate", "base", "gzip", "xz"} <= set(summary.evaluation.bits_per_byte)
    assert any("gram" in each for each in summary.evaluation.bits_per_byte)
    assert summary.evaluation.difference_to["base"].high < 0
    assert summary.gate.passed
    assert summary.training.final_loss is not None
    assert summary.training.first_loss is not None
    assert summary.training.final_loss < summary.training.first_loss


def test_the_registry_names_the_champion_with_its_evidence(
    lifecycle: Ended, stack: Runtime
) -> None:
    summary = summary_of(lifecycle)
    registry = Registry.from_runtime(stack)
    champion = registry.champion(summary.model.model_id)
    assert champion is not None
    assert champion.version == summary.registry.registry_version
    assert summary.registry.version == summary.model.version
    assert champion.manifest_digest == summary.model.manifest_digest
    assert champion.evidence is not None
    assert champion.evidence.run_id == summary.run_id
    assert champion.evidence.snapshot_digest == summary.data.digest
    assert champion.evidence.gate.passed
    assert champion.evidence_digest == summary.registry.evidence_digest


def test_one_run_id_is_found_everywhere(lifecycle: Ended, stack: Runtime) -> None:
    run_id = summary_of(lifecycle).run_id
    ended = paceline("where", run_id, "--json", state=stack.state_dir)
    tags = in_mlflow(stack, ended.answer["mlflow"])
    assert tags["paceline.run_id"] == run_id
    model = summary_of(lifecycle).model
    assert tags["mlflow.runName"] == f"lifecycle {model.model_id} {model.version}"
    assert tags["mlflow.source.name"] == "paceline lifecycle"
    assert "lower is better" in tags["mlflow.note.content"].lower()
    page, _, flow_run_id = ended.answer["prefect"].rpartition("/")
    assert page == f"{stack.endpoints.prefect_ui_url}/runs/flow-run"
    flow_run = prefect(stack, "GET", f"/flow_runs/{flow_run_id}")
    assert flow_run["parent_task_run_id"] is None, "the lifecycle's own, no sub-flow"
    assert f"run:{run_id}" in flow_run["tags"]
    coordinator = CoordinatorClient(
        stack.endpoints.coordinator_url, stack.secrets.coordinator_token
    )
    ours = [each for each in coordinator.deployments() if each.run_id == run_id]
    assert len(ours) == 2
    assert all(each.status == DeploymentStatus.COMPLETE for each in ours)


def test_prefect_shows_progress_tables_markdown_and_links(lifecycle: Ended, stack: Runtime) -> None:
    artifacts = prefect(stack, "POST", "/artifacts/filter", {"limit": 200})
    found = {(each["type"], each["key"]) for each in artifacts}
    kinds = {kind for kind, _ in found}
    assert {"progress", "table", "markdown"} <= kinds  # Prefect keeps a link as markdown
    keys = {key for _, key in found}
    page = next(each["data"] for each in artifacts if each["key"] == "summary")
    for shown in ("| relay |", "| rollout | 4 |", "| xz |", "is champion", "gate.except_baselines"):
        assert shown in page  # as on the demo's last screen
    assert {
        "summary",
        "gate",
        "evaluation",
        "data-validation",
        "mlflow-run",
        "registered-model",
    } <= keys


def test_prefect_names_runs_by_what_they_do_and_tags_them(lifecycle: Ended, stack: Runtime) -> None:
    summary = summary_of(lifecycle)
    model, run = summary.model.model_id, f"run:{summary.run_id}"
    asked = {"flow_runs": {"tags": {"all_": [run]}}}
    found = {each["name"]: each for each in prefect(stack, "POST", "/flow_runs/filter", asked)}
    assert {"lifecycle", f"distribute {model} 1", f"train {model} 1"} <= found.keys()
    filtered = {"flow_runs": {"tags": {"all_": [run, f"model:{model}"]}}}
    names = {each["name"] for each in prefect(stack, "POST", "/flow_runs/filter", filtered)}
    assert f"train {model} 1" in names


def test_run_again_it_finds_everything_done_and_says_so(lifecycle: Ended, stack: Runtime) -> None:
    again = paceline("lifecycle", "--json", state=stack.state_dir)
    assert again.code == 0, again.err
    summary = summary_of(again)
    assert summary.already_done
    assert summary.run_id != summary_of(lifecycle).run_id
    assert summary.model == summary_of(lifecycle).model
    assert summary.registry == summary_of(lifecycle).registry
    assert "already done" in again.err


def test_secrets_are_not_in_logs_nor_in_flow_parameters(lifecycle: Ended, stack: Runtime) -> None:
    secrets = [
        each
        for each in (
            stack.secrets.coordinator_token,
            stack.secrets.s3_secret_key,
            stack.secrets.prefect_auth.partition(":")[2],
        )
        if each
    ]
    logs: list[Path] = [*stack.state_dir.glob("logs/*.log"), *stack.state_dir.glob("nodes/*/*.log")]
    assert logs
    for log in logs:
        text = log.read_text(errors="replace")
        assert not any(secret in text for secret in secrets), log
    assert not any(secret in lifecycle.out + lifecycle.err for secret in secrets)
