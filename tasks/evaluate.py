"""Judge a candidate on held-out files, on a node, in a process of its own."""

from __future__ import annotations

import sys
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from paceline.errors import WorkerLost
from paceline.evaluation import as_markdown, plot_report
from paceline.registry import lineage
from paceline.wire.training import EvaluationReport, EvaluationSpec
from tasks import artifacts, cancelling
from tasks.run import Run, StageResult

DEADLINE_S = 900.0


@task(name="evaluate", cache_policy=NO_CACHE)
def evaluate(
    run: Run, models: dict[str, dict[str, str]], snapshot: dict[str, Any], node: str
) -> StageResult:
    """Score every one of ``models`` (name → {url, digest}), an n-gram model and compressors.

    Raises WorkerLost when the evaluating process dies, Cancelled once it is gone because the flow
    run was cancelled; the same call is safe to repeat.
    """
    profile = run.runtime.profile
    spec = EvaluationSpec(
        run_id=run.run_id,
        state_dir=run.state_dir,
        snapshot_url=snapshot["url"],
        snapshot_digest=snapshot["digest"],
        models={name: each["url"] for name, each in models.items()},
        settings=profile.evaluation,
    )

    def work() -> dict[str, Any]:
        page = artifacts.Progress("evaluation", "bits per byte on held-out files")
        answer: dict[str, Any] = {}

        def on_event(line: dict[str, Any]) -> None:
            if line.get("event") == "result":
                answer.update(line["data"])
            elif line.get("event") == "progress":
                data = line.get("data", {})
                run.tell("evaluate", float(data.get("fraction", 0)), str(data.get("message", "")))
                page.show(float(data.get("fraction", 0)))

        with run.fleet() as fleet, cancelling.noticed() as cancel:
            ended = fleet.run_process(
                node,
                argv=[sys.executable, "-m", "paceline.evaluation.run"],
                env={},
                input_json=spec.model_dump_json(),
                on_event=on_event,
                deadline_s=DEADLINE_S,
                cancel=cancel,
            )
        if ended.exit_code != 0 or not answer:
            raise WorkerLost(
                "the evaluation process failed",
                got=f"exit code {ended.exit_code}: {ended.stderr_tail.strip()[-400:]}",
                wanted="a report",
                where=node,
                do="Run the same command again; read the node's log if it fails the same way.",
            )
        report = EvaluationReport.model_validate(answer)
        run.registry.log_metrics(run.mlflow_run, lineage.evaluation_metrics(report))
        run.registry.log_artifact_text(run.mlflow_run, as_markdown(report), "evaluation.md")
        plot = plot_report(report, run.work_dir / "evaluation.png")
        run.registry.log_artifact_file(run.mlflow_run, plot)
        return report.model_dump(mode="json")

    result = run.stage(
        "evaluate",
        {
            "models": {name: each["digest"] for name, each in models.items()},
            "snapshot": snapshot["digest"],
            "settings": profile.evaluation.model_dump(mode="json"),
        },
        work,
        # a model that could not be scored (a node had lost its copy) is tried again
        still_true=lambda o: not o.get("failures"),
        describe=_one_line,
    )
    report = EvaluationReport.model_validate(result.output)
    artifacts.markdown("evaluation", as_markdown(report), "Scores on held-out files")
    return result


def _one_line(output: dict[str, Any]) -> str:
    report = EvaluationReport.model_validate(output)
    return (
        ", ".join(f"{each.name} {each.bits_per_byte.value:.3f}" for each in report.scores)
        + " bits/byte"
    )
