"""Judge a data snapshot before anything is trained on it."""

from __future__ import annotations

from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from paceline.data import load_snapshot, require_purpose, validate_snapshot
from paceline.errors import DataRejected
from tasks import artifacts
from tasks.run import Run, StageResult


@task(name="validate-data", cache_policy=NO_CACHE)
def validate_data(run: Run, snapshot: dict[str, Any]) -> StageResult:
    """Run the Great Expectations suite over the snapshot; refuse it where it fails.

    Raises DataRejected naming the failed expectations, InvalidSnapshot for another purpose.
    """

    def work() -> dict[str, Any]:
        loaded = load_snapshot(snapshot["url"], run.store)
        require_purpose(loaded, run.runtime.profile.data.purpose)
        report = validate_snapshot(loaded, run.store, run.work_dir / "cache")
        artifacts.table("data validation", report.checks, "Great Expectations on the snapshot")
        if not report.passed:
            failed = [str(each["expectation"]) for each in report.checks if not each["success"]]
            raise DataRejected(
                "the data snapshot failed its validation",
                got=", ".join(failed),
                wanted="every expectation met",
                where=snapshot["url"],
                do="Mend the source files, then build the snapshot again.",
            )
        return {
            "documents": report.documents,
            "checks": len(report.checks),
            "quarantined": list(report.quarantined),
            "needs_review": bool(report.quarantined),
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
