"""The end of a run as one record, the same for the CLI, Prefect's pages and MLflow."""

from __future__ import annotations

from typing import Any

from paceline.schemas.command_results import (
    DataFigures,
    DistributionSummary,
    EvaluationFigures,
    ModelFigures,
    RegistryFigures,
    RunSummary,
    StageLine,
    TrainingFigures,
)
from paceline.schemas.training import (
    Evaluated,
    EvaluationReport,
    GateDecision,
    Trained,
    TrainResult,
)
from paceline.tasks import artifacts
from paceline.tasks.lineage import links
from paceline.tasks.run import Run


def summarise(
    run: Run,
    inputs: dict[str, Any],
    distribution: dict[str, Any],
    training: dict[str, Any],
    report: dict[str, Any],
    promotion: dict[str, Any],
    rollout: dict[str, Any],
) -> dict[str, Any]:
    """Return the whole run as a RunSummary in JSON, and show it on Prefect's page."""
    base, registry = inputs["base"], promotion["registry"]
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
            model_id=base["model_id"],
            parameters=base["parameters"],
            base_version=base["version"],
            version=promotion["published"]["version"],
            manifest_digest=promotion["published"]["manifest_digest"],
        ),
        data=_pick(DataFigures, inputs["snapshot"]),
        distribution=_movement(distribution),
        rollout=_movement(rollout),
        training=_training(Trained.model_validate(training)),
        evaluation=_evaluation(Evaluated.model_validate(report)),
        gate=GateDecision.model_validate(promotion["gate"]),
        registry=_pick(RegistryFigures, registry | {"version": registry["registry_version"]}),
        links=links(run) | {"model": registry["url"]},
        notes=tuple(run.summary.notes),
    )
    artifacts.markdown("summary", as_markdown(summary), "The run on one screen")
    return summary.model_dump(mode="json")


def as_markdown(summary: RunSummary) -> str:
    """Return the summary as a page."""
    stages = "\n".join(
        f"| {each.stage} | {each.seconds:.1f} | {'already done' if each.already_done else 'done'} |"
        for each in summary.stages
    )
    bits = "\n".join(
        f"| {name} | {each.value:.3f} | {each.low:.3f} to {each.high:.3f} |"
        for name, each in summary.evaluation.bits_per_byte.items()
    )
    notes = "\n".join(f"- {note}" for note in summary.notes)
    return (
        f"# {summary.model.model_id} v{summary.model.version} is {summary.registry.alias}\n\n"
        f"Run `{summary.run_id}`\n\n| stage | seconds | |\n|---|---|---|\n{stages}\n\n"
        f"| model | bits per byte | interval |\n|---|---|---|\n{bits}\n\n{notes}\n"
    )


def _pick(record: Any, values: dict[str, Any]) -> Any:
    """Return ``record`` made of those of ``values`` that it has."""
    return record.model_validate(
        {name: values[name] for name in record.model_fields if name in values}
    )


def _movement(result: dict[str, Any]) -> DistributionSummary:
    relay = result["relay"]
    more = {"already_done": relay["reused_result"], "verified": result["verify"]["verified"]}
    movement: DistributionSummary = _pick(DistributionSummary, relay | more)
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
        gain_over=dict(candidate.gain_over) if candidate else {},
    )
