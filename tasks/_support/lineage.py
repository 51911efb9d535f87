"""One MLflow run for each run of ours: opened at the first flow, closed by the outermost one."""

from __future__ import annotations

import hashlib
import logging
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from uuid import UUID

import pandas as pd
from prefect import tags
from prefect.client.orchestration import get_client
from prefect.runtime import flow_run

import paceline
from paceline.errors import AwaitingApproval, Cancelled, PacelineError, RunElsewhere
from paceline.registry import TAG_PARENT, MetricPoint, page_tags
from paceline.tasks._support import artifacts, cancelling
from paceline.tasks._support.run import Run, explain

logger = logging.getLogger(__name__)

# Parameters of a flow by which its run is tagged.
TAGS = {"model_id": "model", "version": "version", "base_version": "version"}


@contextmanager
def recorded(run: Run, flow_name: str) -> Iterator[None]:
    """Keep ``run`` in MLflow while the body runs; its end and its failure are recorded there.

    Flows nest: only the outermost opens and closes the record.
    """
    run.depth += 1
    try:
        if run.depth == 1:
            _open(run, flow_name)
        with _tagged(run):
            yield
    except BaseException as error:
        if run.depth == 1 and not isinstance(error, RunElsewhere):  # the other one closes it
            ends = isinstance(error, Cancelled)
            stopped = ends or not isinstance(error, Exception)
            try:
                with cancelling.held_back(ends=lambda: ends):
                    if isinstance(error, AwaitingApproval):
                        _close(run, "FINISHED", None)  # the tag paceline.approval says so
                    else:
                        _close(run, "KILLED" if stopped else "FAILED", explain(error))
            except PacelineError as also:  # what went wrong first is what people must read
                logger.warning("the failure could not be recorded in MLflow: %s", also)
        raise
    else:
        if run.depth == 1:
            _close(run, "FINISHED", None)
    finally:
        run.depth -= 1
        if run.depth == 0:
            run.close()


def nest(run: Run, parent: str) -> None:
    """Show ``run`` in MLflow below the run with the id ``parent``; does nothing for ""."""
    if parent:
        experiment = run.runtime.profile.model.model_id
        above = run.registry.ensure_run(parent, experiment=experiment)
        run.registry.log_tags(run.mlflow_run, {TAG_PARENT: above})


def log_relay(run: Run, stage: str, output: dict[str, Any]) -> None:
    """Log one relay's figures under ``stage``'s name."""
    names = (
        "seconds", "bound_seconds", "predicted_seconds", "workers", "origin_bytes",
        "received_bytes", "refetched_bytes", "pieces_reused", "bytes_reused", "cross_rack_bytes",
    )  # fmt: skip
    points = [MetricPoint(f"{stage}/{each}", float(output[each])) for each in names]
    run.registry.log_metrics(run.mlflow_run, points)


def log_page(run: Run, name: str, text: str, path: str) -> str:
    """Keep ``text`` with the run in MLflow as ``path``, and link it with the run's job as ``name``;
    return its page."""
    run.registry.log_artifact_text(run.mlflow_run, text, path)
    page = run.registry.run_url(run.mlflow_run, path)
    if run.job is not None:
        run.job.shown(name, page)
    return page


def stages_frame(run: Run) -> pd.DataFrame:
    """Return one row a stage: its name, seconds, and whether the ledger already had it."""
    rows = [
        {
            "stage": each.stage,
            "seconds": round(each.seconds, 3),
            "already_done": bool(each.reused),
        }
        for each in run.summary.stages
    ]
    return pd.DataFrame(rows, columns=["stage", "seconds", "already_done"])


def links(run: Run) -> dict[str, str]:
    """Return every page and file where this run can be looked at."""
    endpoints = run.runtime.endpoints
    found = {
        "prefect": endpoints.prefect_ui_url,
        "mlflow": run.registry.run_url(run.mlflow_run),
        "fleet": f"{endpoints.coordinator_url}/fleet",
        "state": run.state_dir,
    }
    if flow_run_id := flow_run.get_id():
        found["prefect"] = f"{endpoints.prefect_ui_url}/runs/flow-run/{flow_run_id}"
    return found


def _open(run: Run, flow_name: str) -> None:
    named = {"mlflow.runName": flow_run.get_name() or f"{flow_name} {run.run_id}"}
    tags = page_tags(f"paceline {flow_name}", code_version())
    run.registry.log_tags(run.mlflow_run, tags | named)
    run.registry.log_params(
        run.mlflow_run,
        {
            "flow": flow_name,
            "profile": run.runtime.profile.name,
            "code_version": code_version(),
        },
    )
    artifacts.link("mlflow run", run.registry.run_url(run.mlflow_run), "This run in MLflow")


@contextmanager
def _tagged(run: Run) -> Iterator[None]:
    """Tag this flow run, and what it starts, with its run and its model: Prefect's page filters by
    them."""
    given = flow_run.get_parameters()
    names = {f"run:{run.run_id}"}
    names |= {f"{tag}:{given[name]}" for name, tag in TAGS.items() if given.get(name)}
    _tag(names)
    with tags(*names):
        yield


def tag_model(model_id: str, version: str) -> None:
    """Tag this flow run with the model and version that its source turned out to be."""
    _tag({f"model:{model_id}", f"version:{version}"})


def _tag(names: set[str]) -> None:
    if (flow_run_id := flow_run.get_id()) is not None:
        with get_client(sync_client=True) as client:
            known = client.read_flow_run(UUID(str(flow_run_id))).tags
            client.update_flow_run(UUID(str(flow_run_id)), tags={*known, *names})


def _close(run: Run, status: Any, reason: str | None) -> None:
    if reason is not None:
        run.registry.log_artifact_text(run.mlflow_run, reason, "failure.txt")
    frame = stages_frame(run)
    run.registry.log_artifact_text(run.mlflow_run, frame.to_csv(index=False), "stages.csv")
    run.registry.finish_run(run.mlflow_run, status)


@cache
def code_version() -> str:
    """Return e.g. ``paceline 0.1.0, sources 3fa4…, commit 1a2b… (modified)``."""
    return sources_version() + _commit()


def sources_version() -> str:
    """Return e.g. ``paceline 0.1.0, sources 3fa4…``: in a wheel too, where no repository is."""
    digest = hashlib.sha256()
    root = Path(str(paceline.__file__)).parent
    # In a source tree `paceline/flows` and `paceline/tasks` are links, which rglob does not follow.
    for folder in (root, root / "flows", root / "tasks"):
        for path in sorted(folder.glob("**/*.py")):
            digest.update(str(path.relative_to(root)).encode())
            digest.update(path.read_bytes())
    return f"paceline {paceline.__version__}, sources {digest.hexdigest()[:16]}"


def _commit() -> str:
    root = Path(str(paceline.__file__)).parents[2]
    if not (root / ".git").exists():
        return ""
    try:
        commit = _git(root, "rev-parse", "HEAD")
        changed = _git(root, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return ""  # git is not installed: the source digest says enough
    return f", commit {commit[:12]}{' (modified)' if changed else ''}"


def _git(root: Path, *words: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(root), *words], capture_output=True, text=True, timeout=10, check=True
    )
    return done.stdout.strip()
