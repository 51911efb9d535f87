"""Put the previous champion back, in the registry and on every node, without a transfer."""

from __future__ import annotations

from paceline.flows.distribute import distribute_model
from paceline.schemas import RolledBack
from paceline.tasks._support.declaring import ModelId, declared
from paceline.tasks._support.lineage import recorded
from paceline.tasks._support.run import Run
from paceline.tasks.promote import restore_previous


@declared("rollback-model", "roll back {model_id}")
def rollback_model(
    model_id: ModelId, state_dir: str | None = None, run_id: str | None = None
) -> RolledBack:
    """Swap ``champion`` and ``previous`` in the registry, then activate that version everywhere.

    The nodes still hold it, so nothing travels; a node that lost it fetches it again.
    """
    run = Run.open(state_dir, run_id)
    with recorded(run, "rollback-model"):
        restored = restore_previous(run, model_id)
        active = distribute_model(
            model_id,
            restored.version,
            source_url=restored.url,
            stage_prefix="rollback-",
            allow_older=True,
            state_dir=run.state_dir,
            run_id=run.run_id,
        )
        return RolledBack(registry=restored, distribution=active)
