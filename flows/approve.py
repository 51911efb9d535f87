"""Wait for a person's approval of a promotion, suspended; then promote."""

from __future__ import annotations

from typing import Any

from paceline.flows.lifecycle import run_lifecycle
from paceline.flows.promote import promote_model
from paceline.schemas import Promoted, RunSummary
from paceline.tasks._support import approval
from paceline.tasks._support.declaring import declared
from paceline.tasks._support.run import Run


@declared("approve-promotion", "wait for the approval of {run_id}")
def approve_promotion(
    flow: str,
    parameters: dict[str, Any],
    request: dict[str, Any],
    state_dir: str | None = None,
    run_id: str | None = None,
) -> Promoted | RunSummary:
    """Wait until a token's owner has decided on ``request``; then go on with ``flow``
    (promote-model or lifecycle) and its ``parameters``, which looks the decision up itself.

    A promotion starts it; started by hand it promotes nothing that was not approved.
    """
    run = Run.open(state_dir, run_id)
    approval.wait(run, request)
    flows: dict[str, Any] = {"promote-model": promote_model, "lifecycle": run_lifecycle}
    ended: Promoted | RunSummary = flows[flow](
        **parameters, state_dir=run.state_dir, run_id=run.run_id
    )
    return ended
