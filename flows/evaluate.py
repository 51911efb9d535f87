"""Judge a trained candidate against the base, the champion and simple baselines."""

from __future__ import annotations

from typing import Any

from prefect import flow

from tasks import distribute
from tasks.cancelling import cancellable
from tasks.evaluate import evaluate
from tasks.lineage import recorded
from tasks.prepare import published_url, snapshot_reference
from tasks.promote import champion_reference, node_copy
from tasks.run import Run


@flow(name="evaluate-model")
@cancellable
def evaluate_model(
    model_id: str,
    base_version: str,
    candidate_url: str,
    candidate_digest: str,
    snapshot_url: str,
    state_dir: str | None = None,
    run_id: str | None = None,
) -> dict[str, Any]:
    """Score the candidate's weights at ``candidate_url`` on the snapshot's held-out split."""
    run = Run.open(state_dir, run_id)
    with recorded(run, "evaluate-model"):
        base = distribute.fetch_model_manifest(run, published_url(run, model_id, base_version))
        node = distribute.start_agents(run)[-1]
        models = {
            "candidate": {"url": candidate_url, "digest": candidate_digest},
            "base": node_copy(run, node, base),
        } | champion_reference(run, base, candidate_digest)
        return evaluate(run, models, snapshot_reference(run, snapshot_url), node).output
