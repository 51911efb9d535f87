"""What makes two trainings the same: the job's configuration and the code that ran it.

Only what changes the numbers counts: ranks, deadlines and restarts may differ between the attempts
of one job. Knows no torch.
"""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path
from typing import Any

import paceline
from paceline.config import DataSettings, Profile
from paceline.schemas.base import digest_of
from paceline.schemas.training import TaskSize, TrainJob

# They change how fast or where something is learned, not what.
_NUMBERLESS = {
    "ranks",
    "threads_per_rank",
    "mesh",
    "accumulation",
    "compile",
    "activation_checkpointing",
    "profile_steps",
    "evaluate_every_steps",
    "evaluate_sequences",
    "checkpoints",
    "guard",
}
# Of the mesh only how gradients are rounded on their way counts.
_NUMBERS_OF_MESH = {"hook", "powersgd_rank"}

# Of the data settings, how samples of a snapshot become batches; the snapshot's digest is the rest.
_NUMBERS_OF_DATA = {"batching", "columns", "token_features", "missing_features", "transform"}


def data_numbers(data: DataSettings) -> dict[str, Any]:
    """Return what of ``data`` decides what is learned from a given snapshot."""
    return data.model_dump(mode="json", include=_NUMBERS_OF_DATA)


def config_digest(job: TrainJob) -> str:
    """Return the digest of everything in ``job`` that decides what is learned."""
    own = {"task": job.task.model_dump(mode="json")} if job.task is not None else {}
    return digest_of(
        {
            **own,
            "model_id": job.model_id,
            "manifest_digest": job.manifest_digest,
            "snapshot_digest": job.snapshot_digest,
            "purpose": job.purpose,
            "labels": job.labels,
            "data": data_numbers(job.data),
            "settings": job.settings.model_dump(mode="json", exclude=_NUMBERLESS)
            | {"mesh": job.settings.mesh.model_dump(mode="json", include=_NUMBERS_OF_MESH)},
        }
    )


def learned_from(job: TrainJob) -> dict[str, str]:
    """Return what a result says of the data and the base that ``job`` learned from; all of it
    counts in ``config_digest``."""
    return {
        "snapshot_url": job.snapshot_url,
        "snapshot_digest": job.snapshot_digest,
        "base_manifest_digest": job.manifest_digest,
    }


def own_task(profile: Profile) -> TaskSize | None:
    """Return what a job with a codeRef keeps of the profile's model; None where it has none."""
    if not profile.training.code_ref:
        return None
    return TaskSize(context=profile.model.context, parameters=profile.model.parameters)


def size_of(job: TrainJob, profile: Profile) -> TaskSize:
    """Return what the job's codeRef is built for: what ``profile`` says where the job does not."""
    return job.task or TaskSize(context=profile.model.context, parameters=profile.model.parameters)


def with_own_id(job: TrainJob) -> TrainJob:
    """Return ``job`` under the id that follows from what it learns.

    Whatever changes only how or where (mesh, ranks, checkpoints, caches) leaves the id as it is, so
    that the job goes on where it stopped.
    """
    return job.model_copy(update={"job_id": f"job-{config_digest(job)[:12]}"})


@functools.cache
def code_version() -> str:
    """Return the package's version and a digest of the sources that decide what is learned."""
    root = Path(paceline.__file__).parent
    sources = {
        path.relative_to(root).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for package in ("models", "data", "training")
        for path in sorted((root / package).rglob("*.py"))
    }
    return f"{paceline.__version__}+src.{digest_of(sources)[:16]}"


def stream_seed(purpose: str, seed: int) -> int:
    """Return a seed of its own for each use, so that base and fine-tuning see other orders."""
    return int.from_bytes(hashlib.sha256(f"{purpose}:{seed}".encode()).digest()[:7])
