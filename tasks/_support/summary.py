"""The end of a run as one record, the same for the CLI, Prefect's pages and MLflow."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from paceline.schemas import (
    DataFigures,
    Distributed,
    DistributionSummary,
    Evaluated,
    EvaluationFigures,
    EvaluationReport,
    Inputs,
    ModelFigures,
    Promoted,
    RegistryFigures,
    RunSummary,
    StageLine,
    TrainingFigures,
    TrainResult,
)
from paceline.tasks._support import artifacts
from paceline.tasks._support.lineage import links
from paceline.tasks._support.run import Run


def summarise(
    run: Run,
    inputs: Inputs,
    distribution: Distributed,
    training: TrainResult,
    report: Evaluated,
    promotion: Promoted,
    rollout: Distributed,
) -> RunSummary:
    """Return the whole run as one record, and show it on Prefect's page."""
    base, registry = inputs.base, promotion.registry
    summary = RunSummary(
        status="complete",
        run_id=run.run_id,
        already_done=all(each.reused is not False for each in run.summary.stages),
        stages=tuple(
            StageLine(
                stage=each.stage, seconds=round(each.seconds, 3), already_done=bool(each.reused)
            )
            for each in run.summary.stages
        ),
        model=ModelFigures(
            model_id=base.model_id,
            parameters=base.parameters,
            base_version=base.version,
            version=promotion.version,
            manifest_digest=promotion.published.manifest_digest,
        ),
        data=_pick(DataFigures, inputs.snapshot.model_dump()),
        distribution=_movement(distribution),
        rollout=_movement(rollout),
        training=_training(training),
        evaluation=_evaluation(report),
        gate=promotion.gate,
        registry=_pick(RegistryFigures, registry.model_dump() | {"version": promotion.version}),
        links=links(run) | {"model": registry.url},
        notes=tuple(run.summary.notes),
    )
    named = f"lifecycle {summary.model.model_id} {summary.model.version}"
    run.registry.log_tags(run.mlflow_run, {"mlflow.runName": named})
    artifacts.markdown("summary", as_markdown(summary), "The run on one screen")
    return summary


def as_markdown(summary: RunSummary) -> str:
    """Return the summary as a page: stages, distribution, scores, champion, notes."""
    stages = [
        (each.stage, f"{each.seconds:.1f}", "already done" if each.already_done else "done")
        for each in summary.stages
    ]
    moved = [
        (
            name,
            str(each.workers),
            *(f"{s:.2f} s" for s in (each.bound_seconds, each.predicted_seconds, each.seconds)),
            f"{each.origin_bytes / 1e6:.1f} MB",
            f"{each.pieces_reused} pieces",
        )
        for name, each in (("distribution", summary.distribution), ("rollout", summary.rollout))
    ]
    scores = [
        (name, f"{each.value:.3f}", f"{each.low:.3f} to {each.high:.3f}")
        for name, each in sorted(
            summary.evaluation.bits_per_byte.items(), key=lambda item: item[1].value
        )
    ]
    model, registry = summary.model, summary.registry
    return "\n\n".join(
        (
            f"# {model.model_id} v{model.version} is {registry.alias}",
            f"Run `{summary.run_id}`"
            + (": everything was already done" if summary.already_done else ""),
            _table("stage | seconds | ", stages),
            f"Distribution ({summary.distribution.topology})",
            _table(" | nodes | bound | predicted | measured | from S3 | reused", moved),
            f"Held-out files: {summary.evaluation.documents}, {summary.evaluation.bytes} bytes",
            _table("model | bits per byte | 95 % interval", scores),
            f"**{registry.alias}**: {registry.model_id} v{model.version}, in MLflow's numbering "
            f"version {registry.registry_version} (before it: {registry.previous or 'none'}), "
            f"evidence {registry.evidence_digest[:12]}…",
            "\n".join(f"- {note}" for note in summary.notes),
        )
    )


def _table(head: str, rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {head} |", "|" + "---|" * (head.count("|") + 1)]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def _pick(record: Any, values: dict[str, Any]) -> Any:
    """Return ``record`` made of those of ``values`` that it has."""
    return record.model_validate(
        {name: values[name] for name in record.model_fields if name in values}
    )


def _movement(result: Distributed) -> DistributionSummary:
    more = {"already_done": result.relay.reused_result, "verified": result.verify.verified}
    movement: DistributionSummary = _pick(DistributionSummary, result.relay.model_dump() | more)
    return movement


def _training(result: TrainResult) -> TrainingFigures:
    figures: TrainingFigures = _pick(
        TrainingFigures, result.model_dump() | {"restarts": len(result.restarts)}
    )
    return figures


def _evaluation(report: EvaluationReport) -> EvaluationFigures:
    candidate = report.score("candidate")
    return EvaluationFigures(
        documents=report.documents,
        bytes=report.bytes,
        bits_per_byte={each.name: each.bits_per_byte for each in report.scores},
        difference_to=dict(candidate.differences) if candidate else {},
    )
