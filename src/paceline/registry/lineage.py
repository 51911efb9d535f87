"""Names of all MLflow tags, params and metrics, and their values from Paceline's records.

Pure functions, without MLflow or network. Lineage from the bytes on a worker backwards: receipt →
manifest digest → version (tag) → evidence → evaluation, training job, code, data; forwards: run id
(tag) → run → versions.
"""

from __future__ import annotations

import json
import platform
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, NamedTuple

from paceline.schemas import (
    Approval,
    EvaluationReport,
    Evidence,
    GateDecision,
    TrainingCost,
    TrainingUsage,
    TrainJob,
    TrainResult,
    digest_of,
    seconds_by_class,
)

CHAMPION, CANDIDATE, PREVIOUS = "champion", "candidate", "previous"

TAG_RUN_ID = "paceline.run_id"  # on runs and versions
TAG_VERSION = "paceline.version"  # as published; MLflow numbers its versions by itself
TAG_MANIFEST = "paceline.manifest_digest"
TAG_WEIGHTS = "paceline.weights_digest"
TAG_SNAPSHOT = "paceline.snapshot_digest"
TAG_BASE_VERSION = "paceline.base_version"
TAG_BASE_MANIFEST = "paceline.base_manifest_digest"
TAG_JOB = "paceline.job_id"
TAG_CODE = "paceline.code_version"
TAG_CONFIG = "paceline.training_config_digest"
TAG_ENVIRONMENT = "paceline.environment_digest"
TAG_ACCELERATORS = "paceline.accelerators"  # of a training's nodes: kind → count, as JSON
TAG_GATE = "paceline.gate"  # "passed" | "refused"
TAG_POLICY = "paceline.policy_digest"  # of the artifact policy/<digest>.json
TAG_APPROVER = "paceline.approver"
TAG_APPROVER_ID = "paceline.approver_token_id"
TAG_APPROVED_AT = "paceline.approved_at"
TAG_SWEEP = "paceline.sweep"  # of a sweep's run: its name
TAG_PARENT = "mlflow.parentRunId"  # of a trial's run: MLflow's page shows it below the sweep's
TAG_APPROVAL = "paceline.approval"  # of a run: that it waits, or how it was decided
TAG_EVIDENCE = "paceline.evidence_digest"  # SHA-256 of the artifact evidence/<digest>.json
TAG_CLAIM = "paceline.claim_digest"  # the evidence without its approver; identifies a version
TAG_PROMOTED_OVER = "paceline.promoted_over"  # the previous champion; "" for the first one
TAG_ROLLED_BACK = "paceline.rolled_back"

NOTE = (
    "Lower is better: `…/loss`, `…/bits_per_byte` and `…/difference_to/OTHER`, the paired "
    "difference of this model's bits per byte to another's (negative: this model is better). "
    "Higher is better: tasks (`eval/MODEL/TASK/METRIC`) and `…/tokens_per_second`."
)
LOADER = "paceline.evaluation.generation"  # has MLflow's _load_pyfunc
# of its ``predict``: MLflow passes on only what a signature names
GENERATION_PARAMS = [
    {"name": name, "type": kind, "default": default, "shape": None}
    for name, kind, default in (
        ("max_tokens", "long", 64),
        ("temperature", "double", 0.0),
        ("seed", "long", 0),
        ("chat", "boolean", False),
    )
]
MLMODEL_FILE = "MLmodel"
EXPERIMENT_TAGS = {
    "mlflow.note.content": "Runs of Paceline: one for each lifecycle, training, evaluation or "
    "distribution of this model. `paceline where RUN` prints the other pages of a run.",
    "mlflow.experimentKind": "custom_model_development",
}

EVIDENCE_DIRECTORY = "evidence"
JOB_FILE = "training/job.json"  # the whole job, for `paceline reproduce`
RESULT_FILE = "training/result.json"
LOSS = "train/loss"  # of each step
LOSS_BEFORE = "train.loss"  # its name in runs of older versions


@dataclass(frozen=True, kw_only=True)
class RegisteredVersion:
    """One version in the registry: the URL of its bytes and the digests bound to it."""

    model_id: str
    version: str  # MLflow's number, as text
    source_url: str  # s3://… of the published model
    manifest_digest: str
    evidence_digest: str
    run_id: str
    mlflow_run_id: str
    evidence: Evidence | None = None

    @property
    def published_version(self) -> str:
        """Return the version under which the bytes were published."""
        return published_version(self.source_url)


@dataclass(frozen=True, kw_only=True)
class Promotion:
    """The version of an alias, read back from the registry, and its previous version."""

    model_id: str
    version: str
    alias: str
    previous_version: str | None
    evidence_digest: str


class MetricPoint(NamedTuple):
    """One value of one metric; an ``at_ms`` of 0 is replaced by the current time."""

    key: str
    value: float
    step: int = 0
    at_ms: int = 0


def registered_name(model_id: str) -> str:
    """Return the name of a model in MLflow, whose names have no ``/``; no two ids share one."""
    return model_id.replace("--", "~~").replace("/", "--")  # ids have no "~"


def published_version(source_url: str) -> str:
    """Return the version under which the bytes at ``source_url`` were published."""
    return source_url.rstrip("/").rsplit("/", 1)[-1]


def claim_digest(evidence: Evidence) -> str:
    """Return the digest of ``evidence`` without the approver, who may sign later."""
    return digest_of(evidence.model_copy(update={"approver": None, "approval": None}))


def evidence_path(digest: str) -> str:
    """Return the artifact path of the evidence with ``digest`` below its run."""
    return f"{EVIDENCE_DIRECTORY}/{digest}.json"


def version_tags(evidence: Evidence, source_url: str) -> dict[str, str]:
    """Return the tags that bind a registered version to its evidence."""
    return {
        TAG_RUN_ID: evidence.run_id,
        TAG_VERSION: published_version(source_url),
        TAG_MANIFEST: evidence.manifest_digest,
        TAG_WEIGHTS: evidence.weights_digest,
        TAG_SNAPSHOT: evidence.snapshot_digest,
        TAG_BASE_VERSION: evidence.base_version,
        TAG_BASE_MANIFEST: evidence.base_manifest_digest,
        TAG_JOB: evidence.job_id,
        TAG_CODE: evidence.code_version,
        TAG_CONFIG: evidence.training_config_digest,
        TAG_GATE: "passed" if evidence.gate.passed else "refused",
        TAG_POLICY: evidence.gate.policy_digest or "",
        TAG_APPROVER: evidence.approver or "",
        TAG_EVIDENCE: digest_of(evidence),
        TAG_CLAIM: claim_digest(evidence),
    } | approval_tags(evidence.approval)


def approval_tags(approval: Approval | None) -> dict[str, str]:
    """Return the tags of a version that a person approved by a token."""
    if approval is None:
        return {}
    at = datetime.fromtimestamp(approval.at, UTC).isoformat(timespec="seconds")
    return {TAG_APPROVER_ID: approval.token_id, TAG_APPROVED_AT: at}


def training_params(job: TrainJob) -> dict[str, str]:
    """Return the params of a run that are logged when training starts."""
    identity = {
        "job_id": job.job_id,
        "model_id": job.model_id,
        "base_version": job.version,
        "base_manifest_digest": job.manifest_digest,
        "snapshot_url": job.snapshot_url,
        "snapshot_digest": job.snapshot_digest,
        "purpose": job.purpose,
        "labels": job.labels,
        "deterministic": job.deterministic,
    }
    settings = _flat("training", job.settings.model_dump())
    return {key: str(value) for key, value in (identity | settings).items()}


def _flat(prefix: str, settings: Mapping[str, object]) -> dict[str, object]:
    """Return ``settings`` by their dotted keys, as a profile names them."""
    found: dict[str, object] = {}
    for key, value in settings.items():
        inner = value if isinstance(value, Mapping) and value else None
        found |= {f"{prefix}.{key}": value} if inner is None else _flat(f"{prefix}.{key}", inner)
    return found


def page_tags(source: str, code_version: str) -> dict[str, str]:
    """Return what MLflow's page of a run shows: where it came from, and how to read its metrics."""
    tags = {"mlflow.source.name": source, "mlflow.source.type": "JOB", "mlflow.note.content": NOTE}
    commit = re.search(r"commit ([0-9a-f]+)", code_version)
    return tags | ({"mlflow.source.git.commit": commit[1]} if commit else {})


def mlmodel(model_id: str, source_url: str, manifest_digest: str) -> bytes:
    """Return the MLmodel file with which MLflow loads the bytes at ``source_url`` itself. It lies
    beside the manifest: nodes do not receive it, and the version's digest does not change."""
    flavor = {"loader_module": LOADER, "python_version": platform.python_version()}
    fields = {
        "flavors": {"python_function": flavor},
        "signature": {"params": json.dumps(GENERATION_PARAMS)},
        "metadata": {
            "model_id": model_id,
            "version": published_version(source_url),
            "manifest_digest": manifest_digest,
        },
    }
    return json.dumps(fields, indent=2).encode()  # which is YAML, too


def version_description(model_id: str, source_url: str) -> str:
    """Return the description of a registered version: its number in MLflow is not Paceline's."""
    return (
        f"{model_id} v{published_version(source_url)}, published at {source_url} (tag "
        f"{TAG_VERSION}; MLflow's number of this version is its own). Unless it is a model of user "
        "code, `mlflow.pyfunc.load_model` loads it from there, with AWS's credentials and "
        "MLFLOW_S3_ENDPOINT_URL."
    )


def training_tags(
    job: TrainJob, *, config_digest: str, code_version: str, environment_digest: str
) -> dict[str, str]:
    """Return the tags with the inputs of a run's training."""
    return {
        TAG_JOB: job.job_id,
        TAG_SNAPSHOT: job.snapshot_digest,
        TAG_BASE_VERSION: job.version,
        TAG_BASE_MANIFEST: job.manifest_digest,
        TAG_CONFIG: config_digest,
        TAG_CODE: code_version,
        TAG_ENVIRONMENT: environment_digest,
    }


def training_metrics(result: TrainResult) -> list[MetricPoint]:
    """Return the metrics that are logged when training ends, at its last step."""
    values: dict[str, float | None] = {
        "train/first_loss": result.first_loss,
        "train/final_loss": result.final_loss,
        "train/tokens_per_second": result.tokens_per_second,
        "train/data_wait_share": result.data_wait_share,
        "train/checkpoint_stall_share": result.checkpoint_stall_share,
        "train/restarts": len(result.restarts),
        "train/lost_steps": sum(each.lost_steps for each in result.restarts),
        "train/seconds": result.seconds,
        "train/resumed_from_step": result.resumed_from_step,
        "train/tokens_per_step": result.tokens_per_step,
        "train/epoch_tokens": result.epoch_tokens,
        "train/epoch_bytes": result.epoch_bytes,
        "train/epoch_documents": result.epoch_documents,
        "train/read_bytes": result.read_bytes,
        "train/checkpoint_bytes": sum(each.bytes for each in result.checkpoints),
    }
    if result.ledger is not None:
        accounts = result.ledger.model_dump()
        values["train/goodput"] = accounts.pop("goodput")
        values |= {f"train/time.{name}": seconds for name, seconds in accounts.items()}
    return _points(values, step=result.steps)


def cost_metrics(cost: TrainingCost) -> list[MetricPoint]:
    """Return a training's cost, at its last step; [] without a price."""
    if cost.total is None:
        return []
    values: dict[str, float | None] = {
        "cost/total": cost.total,
        "cost/energy_kwh": cost.energy_kwh,
        "cost/per_step": cost.per_step,
        "cost/per_1k_tokens": cost.per_1k_tokens,
        "cost/per_epoch": cost.per_epoch,
    }
    values |= {f"cost/{name}": price for name, price in cost.price_by_class.items()}
    return _points(values, step=cost.began_at_step + cost.steps)


def training_usage(run: Mapping[str, Any]) -> TrainingUsage | None:
    """Return what the training of one run used, from its JSON in MLflow's REST API; None where it
    has no result."""
    data, info = run["data"], run["info"]
    tags = {each["key"]: each["value"] for each in data.get("tags", ())}
    params = {each["key"]: each["value"] for each in data.get("params", ())}
    metrics = {each["key"]: float(each["value"]) for each in data.get("metrics", ())}
    figures = {key.removeprefix("train/"): value for key, value in metrics.items()}
    if "train/seconds" not in metrics:
        return None
    (last,) = (int(each["step"]) for each in data["metrics"] if each["key"] == "train/seconds")
    began = figures.get("resumed_from_step")
    accounts = {key[5:]: value for key, value in figures.items() if key.startswith("time.")}
    read = ("/origin_bytes", "train/read_bytes")  # by relays of the run, by ranks
    origin = [value for key, value in metrics.items() if key.endswith(read)]
    whole: dict[str, Any] = {
        name: None if (value := figures.get(name)) is None else round(value)
        for name in ("epoch_tokens", "checkpoint_bytes")
    }
    return TrainingUsage(
        run_id=tags.get(TAG_RUN_ID, ""),
        job_id=tags.get(TAG_JOB, ""),
        model_id=params.get("model_id", ""),
        started_at=int(info["start_time"]) / 1000,
        steps=last - round(began or 0),
        began_at_step=round(began or 0),
        seconds=metrics["train/seconds"],
        by_class=seconds_by_class(accounts),
        restarts=round(figures.get("restarts", 0)),
        accelerators=json.loads(tags.get(TAG_ACCELERATORS, "{}")),
        tokens_per_step=figures.get("tokens_per_step"),
        tokens_per_second=figures.get("tokens_per_second"),
        egress_bytes=round(sum(origin)) if origin else None,
        **whole,
    )


def evaluation_metrics(report: EvaluationReport) -> list[MetricPoint]:
    """Return each model's metrics, with the ends of their confidence intervals."""
    values: dict[str, float | None] = {
        "eval/documents": report.documents,
        "eval/bytes": report.bytes,
        "eval/seconds": report.seconds,
    }
    for score in report.scores:
        prefix = f"eval/{score.name}"
        values[f"{prefix}/bits_per_byte"] = score.bits_per_byte.value
        values[f"{prefix}/bits_per_byte_low"] = score.bits_per_byte.low
        values[f"{prefix}/bits_per_byte_high"] = score.bits_per_byte.high
        values[f"{prefix}/latency_ms"] = score.latency_ms
        values[f"{prefix}/model_bytes"] = score.model_bytes
        for name in ("perplexity", "token_accuracy", "calibration_error"):
            values[f"{prefix}/{name}"] = getattr(score, name)
        if score.serving is not None:
            values[f"{prefix}/decode_ms_per_token"] = score.serving.decode_ms_per_token
            values[f"{prefix}/peak_memory_bytes"] = score.serving.peak_memory_bytes
            values[f"{prefix}/tokens_per_second"] = score.serving.tokens_per_second
        for other, found in score.differences.items():
            values[f"{prefix}/difference_to/{other}"] = found.value
    for task in report.tasks:
        for name, figure in task.scores.items():
            metric = task.metric.replace(",", "_")  # not a character of MLflow's names
            values[f"eval/{name}/{task.task}/{metric}"] = figure.value
    for each in report.metrics:
        for name, figure in each.scores.items():
            values[f"eval/{name}/metric/{each.metric}"] = figure.value
    return _points(values, step=0)


def gate_metrics(decision: GateDecision) -> list[MetricPoint]:
    """Return the gate's outcome: 1 passed, 0 refused, and the number of failed checks."""
    failed = sum(1 for check in decision.checks if not check.passed)
    return _points({"gate/passed": float(decision.passed), "gate/failed_checks": failed}, step=0)


def _points(values: Mapping[str, float | None], *, step: int) -> list[MetricPoint]:
    present: Iterable[tuple[str, float]] = (
        (key, float(value)) for key, value in values.items() if value is not None
    )
    return [MetricPoint(key, value, step) for key, value in present]
