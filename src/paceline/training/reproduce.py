"""Reproduce a recorded training and compare it bit by bit.

``again`` runs the same job under a new id; ``compare`` returns the first step with a different
loss. ``reproducibility`` checks the preconditions. Does not import MLflow: the caller passes the
record.
"""

from __future__ import annotations

import logging
import math
import secrets
import shutil
import time
from collections.abc import Callable, Mapping, Sequence

from paceline.config import Runtime
from paceline.data import store_at
from paceline.errors import Cancelled, NotReproducible, PacelineError
from paceline.schemas import Difference, RankEvent, Reproduction, TrainJob, TrainResult
from paceline.storage import ObjectStore, join_url
from paceline.training.launcher import Launcher, run_job
from paceline.training.reproducibility import (
    SNAPSHOT,
    Recorded,
    differences_of,
    nodes_with_base_model,
    require_same,
)

log = logging.getLogger(__name__)


def train_again(
    recorded: Recorded,
    runtime: Runtime,
    store: ObjectStore,
    launcher: Launcher,
    *,
    anyway: bool = False,
    on_event: Callable[[RankEvent], None] | None = None,
) -> Reproduction:
    """Train ``recorded``'s job again deterministically; return the comparison.

    Its outputs are deleted where the bits are the same and kept for inspection where they differ.
    Raises NotReproducible where a precondition changed (with ``anyway``: only where data or base
    model are missing or damaged), and whatever ``run_job`` raises.
    """
    found = differences_of(recorded, runtime, store)
    require_same(found, anyway=anyway)
    started = time.monotonic()
    job = reproduction_job(recorded, runtime)
    losses: dict[int, float] = {}

    def keep(event: RankEvent) -> None:
        loss = event.data.get("loss")
        if event.event == "step" and event.rank == 0 and isinstance(loss, int | float):
            losses[event.step] = float(loss)
        if on_event is not None:
            on_event(event)

    nodes = (nodes_with_base_model(job, runtime) or ["node-0"])[: job.settings.ranks]
    try:
        result = run_job(job, nodes, launcher, on_event=keep, store=store)
        _require_same_shards(recorded, result)
    except (NotReproducible, Cancelled, KeyboardInterrupt):
        _delete_outputs(job, runtime, nodes, store)
        raise
    reproduction = compare(recorded, result, losses, found, time.monotonic() - started)
    if reproduction.identical:
        _delete_outputs(job, runtime, nodes, store)
    return reproduction


def reproduction_job(recorded: Recorded, runtime: Runtime) -> TrainJob:
    """Return ``recorded``'s job with a new id, for this machine, in deterministic mode."""
    settings = recorded.job.settings
    ours = {"preemption": runtime.profile.training.guard.preemption}  # an address of the machine's
    changes = {"deterministic": True, "guard": settings.guard.model_copy(update=ours)}
    return recorded.job.model_copy(
        update={
            "job_id": f"{recorded.job.job_id[:100]}-again-{secrets.token_hex(3)}",
            "state_dir": str(runtime.state_dir),
            "deterministic": True,
            "settings": settings.model_copy(update=changes),
            "skip_batches": recorded.result.skipped_batches or recorded.job.skip_batches,
        }
    )


def compare(
    recorded: Recorded,
    result: TrainResult,
    losses: Mapping[int, float],
    found: Sequence[Difference],
    seconds: float,
) -> Reproduction:
    """Return whether the second training has the same bits, or the first step that differs.

    Steps without a recorded loss (made by an earlier run, or while MLflow was unreachable) are
    compared by the final weights only.
    """
    steps = sorted(recorded.losses)
    parted = next((s for s in steps if not _same(recorded.losses.get(s), losses.get(s))), None)
    same = parted is None and result.weights_digest == recorded.result.weights_digest
    return Reproduction(
        run_id=recorded.run_id,
        job_id=recorded.job.job_id,
        again_job_id=result.job_id,
        status="identical" if same else "different",
        differences=tuple(found),
        steps=len(steps),
        first_different_step=parted,
        loss_then=None if parted is None else _finite(recorded.losses.get(parted)),
        loss_now=None if parted is None else _finite(losses.get(parted)),
        weights_then=recorded.result.weights_digest,
        weights_now=result.weights_digest,
        seconds=seconds,
    )


def _require_same_shards(recorded: Recorded, result: TrainResult) -> None:
    """Raise NotReproducible where a shard was good then and is damaged now."""
    before = set(recorded.result.quarantined_shards)
    bad = [each for each in result.quarantined_shards if each not in before]
    if bad:
        raise NotReproducible(
            f"{SNAPSHOT} is not as it was when the run trained",
            got=f"{len(bad)} shards or samples damaged: {', '.join(x[:12] for x in bad[:5])}",
            wanted=recorded.job.snapshot_digest,
            where=recorded.job.snapshot_url,
            do="Bring them back, or make the snapshot again with `paceline snapshot`.",
        )


def _delete_outputs(
    job: TrainJob, runtime: Runtime, nodes: Sequence[str], store: ObjectStore
) -> None:
    """Delete the outputs of ``job``; log what cannot be deleted."""
    for node in nodes:
        shutil.rmtree(runtime.node_dir(node) / "work" / job.job_id, ignore_errors=True)
    url = join_url(job.checkpoint_url, job.job_id)
    try:
        store_at(url, store).delete_prefix(url)
    except PacelineError as error:
        log.warning("left behind url=%s why=%s", url, error.one_line())


def _same(then: float | None, now: float | None) -> bool:
    if then is None or now is None:
        return False
    return then == now or (math.isnan(then) and math.isnan(now))


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
