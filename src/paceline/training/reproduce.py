"""Training again what was trained before: what differs now, and whether the same bits come out.

``differences_of`` asks the installation what is not as it was (code, libraries, processor, data,
base model); ``again`` runs the same job under a new id; ``compare`` says where the losses part.
Knows no MLflow: what was recorded is handed in.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from paceline.data import load_snapshot
from paceline.errors import NotFound, PacelineError
from paceline.manifest import MANIFEST_FILE, parse_manifest
from paceline.objects import ObjectStore
from paceline.profile import Runtime
from paceline.training.driver import run_job
from paceline.training.environment import current, differences
from paceline.training.gang import Launcher
from paceline.training.identity import code_version, config_digest
from paceline.wire.reproducing import Differs, Reproduction
from paceline.wire.training import RankEvent, TrainJob, TrainResult


@dataclass(frozen=True)
class Recorded:
    """A training as its run recorded it."""

    run_id: str
    job: TrainJob
    result: TrainResult
    losses: Mapping[int, float]  # by step


def holders_of(job: TrainJob, runtime: Runtime) -> list[str]:
    """Return the nodes on this machine's disk that hold the job's base model, as it was."""
    held = []
    for node in sorted((runtime.state_dir / "nodes").glob("*")):
        path = node / "store" / "models" / job.model_id / job.version / MANIFEST_FILE
        try:
            manifest = parse_manifest(path.read_bytes())
        except (OSError, PacelineError):
            continue  # it holds none, or a damaged one: no place to start from
        if manifest.digest == job.manifest_digest:
            held.append(node.name)
    return held


def differences_of(recorded: Recorded, runtime: Runtime, store: ObjectStore) -> list[Differs]:
    """Return everything that is not as it was when ``recorded`` was made."""
    job, result = recorded.job, recorded.result
    now = current(job.settings.threads_per_rank).model_dump(mode="json")
    found = differences(result.environment, now) if result.environment else []
    if result.code_version != code_version():
        found.append(_differs("code version", result.code_version, code_version()))
    if result.config_digest != config_digest(job):
        found.append(_differs("configuration digest", result.config_digest, config_digest(job)))
    try:
        digest = load_snapshot(job.snapshot_url, store).digest
    except PacelineError as error:
        found.append(_differs("data snapshot", job.snapshot_digest, error.one_line()))
    else:
        if digest != job.snapshot_digest:
            found.append(_differs("data snapshot", job.snapshot_digest, digest))
    if not job.settings.code_ref and not holders_of(job, runtime):
        wanted = f"{job.model_id} {job.version} {job.manifest_digest[:16]}"
        found.append(_differs("base model", wanted, "on no node of this machine"))
    if result.skipped_batches or job.skip_batches:
        found.append(_differs("batches passed over", str(result.skipped_batches), "none"))
    if not job.deterministic:
        found.append(_differs("deterministic mode", "off", "on"))
    return found


def require_possible(found: Sequence[Differs]) -> None:
    """Raise NotFound where what the training started from is not there any more."""
    for each in found:
        if each.what in ("data snapshot", "base model"):
            raise NotFound(
                f"{each.what} of the run is not there as it was",
                got=each.now,
                wanted=each.then,
                do="Prepare the same snapshot, or distribute the same version, then try again.",
            )


def again(
    recorded: Recorded,
    runtime: Runtime,
    store: ObjectStore,
    launcher: Launcher,
    *,
    on_event: Callable[[RankEvent], None] | None = None,
) -> Reproduction:
    """Train ``recorded``'s job once more, deterministically, and compare it.

    Raises NotFound where data or base model are not there as they were, and what ``run_job`` does.
    """
    found = differences_of(recorded, runtime, store)
    require_possible(found)
    started = time.monotonic()
    job = recorded.job.model_copy(
        update={
            "job_id": f"{recorded.job.job_id[:100]}-again-{secrets.token_hex(3)}",
            "state_dir": str(runtime.state_dir),
            "deterministic": True,
            "skip_batches": recorded.result.skipped_batches or recorded.job.skip_batches,
        }
    )
    losses: dict[int, float] = {}

    def keep(event: RankEvent) -> None:
        loss = event.data.get("loss")
        if event.event == "step" and event.rank == 0 and isinstance(loss, int | float):
            losses[event.step] = float(loss)
        if on_event is not None:
            on_event(event)

    nodes = holders_of(job, runtime) or ["node-0"]
    result = run_job(job, nodes[: job.settings.ranks], launcher, on_event=keep, store=store)
    return compare(recorded, result, losses, found, time.monotonic() - started)


def compare(
    recorded: Recorded,
    result: TrainResult,
    losses: Mapping[int, float],
    found: Sequence[Differs],
    seconds: float,
) -> Reproduction:
    """Return how the second training relates to the first: the same bits, or where they part."""
    steps = sorted(set(recorded.losses) | set(losses))
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


def _same(then: float | None, now: float | None) -> bool:
    if then is None or now is None:
        return False
    return then == now or (math.isnan(then) and math.isnan(now))


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _differs(what: str, then: str, now: str) -> Differs:
    return Differs(what=what, then=then, now=now, decisive=True)
