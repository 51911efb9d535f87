"""Judge a data snapshot before anything is trained on it."""

from __future__ import annotations

from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from paceline.data import load_snapshot, require_valid, validate_snapshot
from tasks import artifacts
from tasks.run import Run, StageResult


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
        artifacts.table("data validation", report.checks, "Great Expectations on the snapshot")
        require_valid(report)
        if report.needs_review:
            run.note(f"{len(report.quarantined)} data shards are in quarantine: needs review")
        return {
            "documents": report.documents,
            "checks": len(report.checks),
            "quarantined": report.quarantined,
            "needs_review": report.needs_review,
        }

    return run.stage(
        "validate-data",
        {"snapshot": snapshot["digest"]},
        work,
        describe=lambda o: (
            f"{o['checks']} expectations on {o['documents']} documents, "
            f"{len(o['quarantined'])} shards quarantined"
        ),
    )
