"""Continue a finished training with more steps, another learning rate or another schedule.

The continuation is a job of its own. Its first attempt restores weights, optimiser, data position
and step from the earlier job's newest checkpoint; after that it has checkpoints of its own.
"""

from __future__ import annotations

import re

from pydantic import ValidationError

from paceline.errors import CorruptData, InvalidInput, SourceMissing
from paceline.schemas import (
    JOB_ID,
    NAME,
    TRAINING_ID,
    Continued,
    TrainJob,
    canonical_json,
    one_of,
)
from paceline.storage import ObjectStore, join_url
from paceline.training.checkpoint import Generations
from paceline.training.identity import config_digest, with_derived_id

JOB_FILE = "job.json"  # beside a job's checkpoints
MAX_RECORD_BYTES = 4 * 1024 * 1024
# What may differ from the earlier job. Everything else must be equal: the data position and the
# optimiser's state mean something only for the same data, batches and model.
CHANGEABLE = (
    "steps",
    "learning_rate",
    "schedule",
    "warmup_steps",
    "decay_share",
    "final_share",
    "weight_decay",
    "clip_norm",
    "export_dtype",
    "export_program",
    "early_stopping",
    "evaluate_every_steps",
    "evaluate_sequences",
    "checkpoints",
)


def checkpoints_url(job: TrainJob) -> str:
    """Return the URL prefix of the job's checkpoint generations."""
    return join_url(job.checkpoint_url, job.job_id)


def store_job(job: TrainJob, store: ObjectStore) -> None:
    """Store the job's record beside its checkpoints."""
    store.put_bytes(join_url(checkpoints_url(job), JOB_FILE), canonical_json(job))


def stored_job(url: str, store: ObjectStore) -> TrainJob:
    """Return the record beside the checkpoints at ``url``; raises ValidationError for another
    content, and as ``ObjectStore.get_bytes`` does."""
    return TrainJob.model_validate_json(store.get_bytes(join_url(url, JOB_FILE), MAX_RECORD_BYTES))


def require_job_name(job_id: str) -> None:
    """Raise InvalidInput for what is no job's id; a path would lead elsewhere."""
    if not re.fullmatch(NAME, job_id):
        raise InvalidInput("not a job's id", got=job_id, wanted="such as job-0123456789ab")


def stored_training_id(given: str, checkpoint_url: str, store: ObjectStore) -> str:
    """Return the id of the training below ``checkpoint_url`` that ``given`` is or begins.

    Raises NotFound where there is none, InvalidInput where several begin so or ``given`` is no id.
    """
    require_job_name(given)
    if re.fullmatch(TRAINING_ID, given):
        return given
    jobs = [each for each in store.directories(checkpoint_url) if re.fullmatch(JOB_ID, each)]
    return one_of("job", given, jobs)


def earlier_job(checkpoint_url: str, job_id: str, store: ObjectStore) -> TrainJob:
    """Return the record of a job whose checkpoints lie below ``checkpoint_url``.

    Raises SourceMissing where there is none, InvalidInput for what is no id, CorruptData.
    """
    require_job_name(job_id)
    where = join_url(checkpoint_url, job_id)
    try:
        return stored_job(where, store)
    except ValidationError as error:
        raise CorruptData("a job's record cannot be read", where=where) from error


def continuation(job: TrainJob, earlier_id: str, store: ObjectStore) -> TrainJob:
    """Return ``job`` as the continuation of the job ``earlier_id`` of the same checkpoints' place.

    Raises as ``earlier_job``; SourceMissing where it has no checkpoint, InvalidInput where more
    differs than ``CHANGEABLE``, or where no step is left.
    """
    earlier = earlier_job(job.checkpoint_url, earlier_id, store)
    where = join_url(job.checkpoint_url, earlier_id)
    generations = Generations(store, where)
    if not (found := generations.find().committed):
        raise SourceMissing("the job has no checkpoint", got=earlier_id, where=where)
    commit = generations.commit_of(found[0])
    same = {name: getattr(earlier.settings, name) for name in CHANGEABLE}
    alike = job.model_copy(
        update={
            "settings": job.settings.model_copy(update=same),
            "continues": earlier.continues,
        }
    )
    if config_digest(alike) != config_digest(earlier):
        raise InvalidInput(
            "a continuation differs in more than its steps and learning rate",
            got=_difference(alike, earlier),
            wanted=f"as {earlier_id} had it; {', '.join(CHANGEABLE)} may differ",
            where=where,
        )
    if commit.step >= job.settings.steps:
        raise InvalidInput(
            "nothing is left to train",
            got=f"{job.settings.steps} steps in all",
            wanted=f"more than the {commit.step} that {earlier_id} made",
            do="Raise --steps.",
        )
    continued = Continued(job_id=earlier_id, step=commit.step, config_digest=commit.config_digest)
    return with_derived_id(job.model_copy(update={"continues": continued}))


def _difference(job: TrainJob, earlier: TrainJob) -> str:
    """Return the first field that differs, with both values."""
    ours, theirs = (each.model_dump(mode="json") for each in (job, earlier))
    for section in ("settings", "data"):
        for name, value in ours[section].items():
            if value != theirs[section].get(name):
                return f"{section}.{name} {value!r}, then {theirs[section].get(name)!r}"
    fields = ("manifest_digest", "snapshot_digest", "purpose", "labels", "task", "model_id")
    for name in fields:
        if ours[name] != theirs[name]:
            return f"{name} {ours[name]}, then {theirs[name]}"
    return "another version of Paceline's settings"
