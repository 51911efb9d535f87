"""Judge a data snapshot before anything is trained on it."""

from __future__ import annotations

from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from paceline.data import load_snapshot, require_valid, validate_snapshot
from paceline.schemas.base import canonical_json
from paceline.tasks import artifacts
from paceline.tasks.run import Run, StageResult


@task(name="validate-data", cache_policy=NO_CACHE)
def validate_data(run: Run, snapshot: dict[str, Any]) -> StageResult:
    """Run the Great Expectations suite over the snapshot; refuse it where it fails.

    Raises DataRejected naming the failed expectations, InvalidSnapshot for another purpose.
    """

    def work() -> dict[str, Any]:
        report = validate_snapshot(
            load_snapshot(snapshot["url"], run.store),
            run.store,
            run.work_dir / "cache",
            purpose=run.runtime.profile.data.purpose,
            project=run.runtime.profile.data.project,
        )
        (run.work_dir / "validation.json").write_bytes(canonical_json(report.to_dict()))
        artifacts.table("data validation", report.checks, "Great Expectations on the snapshot")
        artifacts.table("data columns", report.columns, "What the snapshot's samples hold")
        if report.quarantined:
            artifacts.table("data quarantine", report.quarantined, "Shards that are passed over")
        require_valid(report)
        if report.needs_review:
            reasons = sorted({each["reason"] for each in report.quarantined})
            run.note(
                f"{len(report.quarantined)} data shards are in quarantine: needs review "
                f"({'; '.join(reasons)[:200]})"
            )
        return {
            "documents": report.documents,
            "checks": len(report.checks),
            "quarantined": report.quarantined,
            "needs_review": report.needs_review,
            "columns": report.columns,
            "report": str(run.work_dir / "validation.json"),
        }

    return run.stage(
        "validate-data",
        {"snapshot": snapshot["digest"]},
        work,
        describe=lambda o: (
            f"{o['checks']} expectations on {o['documents']} samples, "
            f"{len(o['quarantined'])} shards quarantined"
        ),
    )
