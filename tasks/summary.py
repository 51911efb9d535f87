"""The end of a run as one JSON object, the same for the CLI, Prefect's pages and MLflow."""

from __future__ import annotations

from typing import Any

from paceline.wire.training import EvaluationReport
from tasks import artifacts
from tasks.lineage import links, stages_frame
from tasks.run import Run


def summarise(
    run: Run,
    inputs: dict[str, Any],
    distribution: dict[str, Any],
    training: dict[str, Any],
    report: dict[str, Any],
    promotion: dict[str, Any],
    rollout: dict[str, Any],
) -> dict[str, Any]:
    """Return the whole run: status, seconds per stage, figures of each part, links, notes.

    Schema: docs/schemas/demo.json.
    """
    scores = EvaluationReport.model_validate(report)
    summary = {
        "status": "complete",
        "run_id": run.run_id,
        "already_done": all(each.reused is not False for each in run.summary.stages),
        "stages": stages_frame(run).to_dict(orient="records"),
        "model": {
            "model_id": inputs["base"]["model_id"],
            "parameters": inputs["base"]["parameters"],
            "base_version": inputs["base"]["version"],
            "version": promotion["published"]["version"],
            "manifest_digest": promotion["published"]["manifest_digest"],
        },
        "data": {
            "documents": inputs["snapshot"]["documents"],
            "bytes": inputs["snapshot"]["bytes"],
            "digest": inputs["snapshot"]["digest"],
        },
        "distribution": _movement(distribution),
        "rollout": _movement(rollout),
        "training": {
            key: training[key]
            for key in (
                "job_id", "steps", "resumed_from_step", "first_loss", "final_loss",
                "tokens_per_second", "data_wait_share", "checkpoint_stall_share", "seconds",
            )
        } | {"restarts": len(training["restarts"])},
        "evaluation": {
            "bytes": scores.bytes,
            "documents": scores.documents,
            "bits_per_byte": {
                each.name: each.bits_per_byte.model_dump() for each in scores.scores
            },
            "gain_over": {
                name: interval.model_dump()
                for each in scores.scores
                if each.name == "candidate"
                for name, interval in each.gain_over.items()
            },
        },
        "gate": promotion["gate"],
        "registry": {
            "model_id": promotion["registry"]["model_id"],
            "version": promotion["registry"]["registry_version"],
            "alias": promotion["registry"]["alias"],
            "previous": promotion["registry"]["previous"],
            "evidence_digest": promotion["registry"]["evidence_digest"],
        },
        "links": links(run) | {"model": promotion["registry"]["url"]},
        "notes": list(run.summary.notes),
    }  # fmt: skip
    artifacts.markdown("summary", as_markdown(summary), "The run on one screen")
    return summary


def as_markdown(summary: dict[str, Any]) -> str:
    """Return the summary as a page."""
    stages = "\n".join(
        f"| {each['stage']} | {each['seconds']:.1f} | "
        f"{'already done' if each['already_done'] else 'done'} |"
        for each in summary["stages"]
    )
    bits = "\n".join(
        f"| {name} | {each['value']:.3f} | {each['low']:.3f} to {each['high']:.3f} |"
        for name, each in summary["evaluation"]["bits_per_byte"].items()
    )
    return (
        f"# {summary['model']['model_id']} v{summary['model']['version']} is "
        f"{summary['registry']['alias']}\n\nRun `{summary['run_id']}`\n\n"
        f"| stage | seconds | |\n|---|---|---|\n{stages}\n\n"
        f"| model | bits per byte | interval |\n|---|---|---|\n{bits}\n\n"
        + "\n".join(f"- {note}" for note in summary["notes"])
    )


def _movement(result: dict[str, Any]) -> dict[str, Any]:
    relay = result["relay"]
    names = (
        "deployment_id", "topology", "workers", "seconds", "predicted_seconds", "bound_seconds",
        "total_bytes", "origin_bytes", "received_bytes", "refetched_bytes", "pieces_reused",
        "bytes_reused", "cross_rack_bytes", "epoch",
    )  # fmt: skip
    return {name: relay[name] for name in names} | {
        "already_done": relay["reused_result"],
        "verified": result["verify"]["verified"],
    }
