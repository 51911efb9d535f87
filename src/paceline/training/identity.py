"""Identity of a training: digests of the job's configuration and of the code that runs it.

Only settings that change the result count: ranks, deadlines and restarts may differ between the
attempts of one job. Does not import torch.
"""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path
from typing import Any

import paceline
from paceline.config import EXPORT_FILE_BYTES, DataSettings, Profile, TrainingSettings
from paceline.schemas import SubmitJob, TaskSize, TrainJob, digest_of

EXPORT = "export"
# Settings that change speed, placement or how weights are cut into files, not the result.
_RESULT_NEUTRAL_SETTINGS = {
    "ranks",
    "threads_per_rank",
    "mesh",
    "accumulation",
    "compile",
    "deterministic",
    "activation_checkpointing",
    "profile_steps",
    "evaluate_every_steps",
    "evaluate_sequences",
    "checkpoints",
    "guard",
    "ranks_per_node",
    "export_file_bytes",
}
# of the settings of checkpoints, by their interval
WHEN_SAVED = {"steps": ["every_steps"], "seconds": ["every_s"], "auto": ["failures_per_day"]}
_LATER_DEFAULTS = {
    "betas": [0.9, 0.95],
    "export_dtype": "base",
    "export_program": False,
    "lora": None,
    "dpo": None,
    "early_stopping": None,
    "no_decay": [],
    "groups": [],
    "ema": None,
    "optimizer_ref": "",
}
# Of the mesh, only the settings that change how gradients are rounded in transit.
_RESULT_MESH_SETTINGS = {"hook", "powersgd_rank"}

# Of the data settings, how samples become batches; the snapshot's digest covers the rest.
_RESULT_DATA_SETTINGS = {"batching", "columns", "token_features", "missing_features", "transform"}


def result_data_settings(data: DataSettings) -> dict[str, Any]:
    """Return the data settings that affect the result of training on a given snapshot."""
    return data.model_dump(mode="json", include=_RESULT_DATA_SETTINGS)


def config_digest(job: TrainJob) -> str:
    """Return the digest of everything in ``job`` that affects the result."""
    own = {"task": job.task.model_dump(mode="json")} if job.task is not None else {}
    if job.continues is not None:
        own["continues"] = job.continues.model_dump(mode="json")
    return digest_of(
        {
            **own,
            "model_id": job.model_id,
            "manifest_digest": job.manifest_digest,
            "snapshot_digest": job.snapshot_digest,
            "purpose": job.purpose,
            "labels": job.labels,
            "data": result_data_settings(job.data),
            "settings": _result_settings(job.settings),
        }
    )


def training_key(spec: SubmitJob, profile: Profile) -> str:
    """Return a digest that is equal for jobs of the queue that write the same checkpoints.

    ``profile`` has the job's own settings. Nothing is read: of two jobs with different keys only
    these may still train the same: versions or snapshots with equal content, an earlier training
    whose own settings are given again, and a context that the base says itself.
    """
    named = {"code_ref": spec.code_ref, "optimizer_ref": spec.optimizer_ref}
    own = {name: value for name, value in named.items() if value}
    settings = _result_settings(profile.training.model_copy(update=own))
    # The model's policy may choose these, by what the base is.
    for name in ("export_dtype", "export_program"):
        settings.pop(name, None)
    return digest_of(
        {
            "model": [spec.model_id, spec.version],
            "context": profile.model.context,
            "snapshot": spec.data_snapshot.rstrip("/"),
            "continues": spec.continue_from,
            "purpose": spec.purpose or profile.data.purpose,
            "labels": spec.labels,
            "data": result_data_settings(profile.data),
            "settings": settings,
        }
    )


def _result_settings(settings: TrainingSettings) -> dict[str, Any]:
    """Return the settings that change the result."""
    given = settings.model_dump(mode="json", exclude=_result_neutral(settings))
    if kept := given.get("checkpoints"):  # the best one that is kept is exported
        names = ("interval", "keep", "keep_best", *WHEN_SAVED[settings.checkpoints.interval])
        given["checkpoints"] = {name: kept[name] for name in names}
    mesh = settings.mesh.model_dump(mode="json", include=_RESULT_MESH_SETTINGS)
    return _without_later_defaults(given) | {"mesh": mesh}


def _result_neutral(settings: TrainingSettings) -> set[str]:
    """Return the settings that do not change the result. Where evaluations end it they do, and so
    does which checkpoints are kept: the best one is exported."""
    deciding = {"evaluate_every_steps", "evaluate_sequences", "checkpoints"}
    return _RESULT_NEUTRAL_SETTINGS - (deciding if settings.early_stopping else set())


def _without_later_defaults(settings: dict[str, Any]) -> dict[str, Any]:
    """Return ``settings`` without those that earlier releases did not have, at their defaults: jobs
    of these releases keep their digest."""
    return {
        name: value
        for name, value in settings.items()
        if name not in _LATER_DEFAULTS or value != _LATER_DEFAULTS[name]
    }


def export_directory(settings: TrainingSettings) -> str:
    """Return the name of the export's directory beside the checkpoints: a training whose weights
    are exported again in files of another size keeps the export that others may refer to."""
    size = settings.export_file_bytes
    return EXPORT if size == EXPORT_FILE_BYTES else f"{EXPORT}-{size}"


def training_inputs(job: TrainJob) -> dict[str, str | None]:
    """Return the fields of ``job``'s result that say what it learned from, and for what;
    ``config_digest`` covers them except the URL."""
    return {
        "snapshot_url": job.snapshot_url,
        "snapshot_digest": job.snapshot_digest,
        "base_manifest_digest": job.manifest_digest,
        "purpose": job.purpose,
        "continues": None if job.continues is None else job.continues.job_id,
    }


def code_ref_task_size(profile: Profile) -> TaskSize | None:
    """Return the model size that a job with a codeRef records; None without a codeRef."""
    if not profile.training.code_ref:
        return None
    return TaskSize(context=profile.model.context, parameters=profile.model.parameters)


def task_size_of(job: TrainJob, profile: Profile) -> TaskSize:
    """Return the model size for the job's codeRef: the job's own, else the profile's."""
    return job.task or TaskSize(context=profile.model.context, parameters=profile.model.parameters)


def with_derived_id(job: TrainJob) -> TrainJob:
    """Return ``job`` with an id derived from its ``config_digest``.

    Settings that change only speed or placement (mesh, ranks, checkpoints, caches) do not change
    the id, so the job resumes where it stopped. With early stopping, which checkpoints are kept
    changes it: the best one is exported.
    """
    return job.model_copy(update={"job_id": f"job-{config_digest(job)[:12]}"})


@functools.cache
def code_version() -> str:
    """Return the package version and a digest of the sources that affect the result."""
    root = Path(paceline.__file__).parent
    sources = {
        path.relative_to(root).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for package in ("models", "data", "training")
        for path in sorted((root / package).rglob("*.py"))
    }
    return f"{paceline.__version__}+src.{digest_of(sources)[:16]}"


def stream_seed(purpose: str, seed: int) -> int:
    """Return a distinct seed per purpose, so base training and fine-tuning use different orders."""
    return int.from_bytes(hashlib.sha256(f"{purpose}:{seed}".encode()).digest()[:7])
