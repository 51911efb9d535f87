"""Admission checks of a job before any rank starts: data, mesh, checkpoints, code, memory.

A job that does not match the base model, the snapshot's label or the checkpoints under its id is
refused with the reason; nothing is changed. Checks that need another node's disk are left to each
rank (``loop.starting_state``). Does not import torch; starts only the process that checks user
code.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from paceline.config import DataSettings, TrainingSettings, load_runtime
from paceline.data import Snapshot, Split, load_snapshot, require_purpose, require_readable
from paceline.data.loading import require_allowed, require_runnable
from paceline.errors import CorruptData, InvalidInput, InvalidSnapshot
from paceline.manifest import directory_name
from paceline.models import (
    CONFIG_FILE,
    ModelConfig,
    is_pretrained,
    read_config,
    read_json,
    require_tokenizer,
)
from paceline.schemas import TrainJob
from paceline.storage import ObjectStore, join_url
from paceline.training.checkpoint import Generations
from paceline.training.identity import config_digest, task_size_of
from paceline.training.launcher.preemption import MetadataWatcher
from paceline.training.parallel import (
    MeshSpec,
    replicas_of,
    require_cuttable,
    require_layout,
    require_rows,
)
from paceline.training.user_code import require_code


def admit(job: TrainJob, worker_id: str, store: ObjectStore) -> None:
    """Check that ``job`` can run; ``worker_id`` is the node of its first rank.

    Raises InvalidInput for mesh, settings or code, InvalidSnapshot for data, TrainingFailed where
    the job id has checkpoints of another configuration.
    """
    snapshot = load_snapshot(job.snapshot_url, store)
    require_data(job, worker_id, snapshot)
    require_mesh(job, worker_id)
    runtime = load_runtime(job.state_dir)
    if url := job.settings.guard.preemption:
        MetadataWatcher(url)
    require_checkpoint(job, store)
    require_code(job, runtime, snapshot.vocabulary.vocab_size)


def require_mesh(job: TrainJob, worker_id: str) -> None:
    """Raise InvalidInput where the job's mesh cannot work.

    The base model's shape is included where its node's disk is on this machine.
    """
    settings = job.settings
    mesh = MeshSpec.of(settings.mesh, replicas_of(settings))
    require_layout(mesh, settings, _base_config(job, worker_id), job.data)
    directory = _base_directory(job, worker_id)
    if directory is not None and is_pretrained(directory):
        require_cuttable(mesh, read_json(directory / CONFIG_FILE))
        context = task_size_of(job, load_runtime(job.state_dir).profile).context
        require_rows(mesh, settings, context, job.data)


def require_checkpoint(job: TrainJob, store: ObjectStore) -> None:
    """Raise TrainingFailed where the job id's newest checkpoint is of another configuration."""
    generations = Generations(store, join_url(job.checkpoint_url, job.job_id))
    for newest in generations.find().committed[:1]:
        with contextlib.suppress(CorruptData):  # ranks skip it and use the previous one
            generations.commit_of(newest, config_digest(job))


def require_data(job: TrainJob, worker_id: str, snapshot: Snapshot) -> None:
    """Raise InvalidSnapshot or InvalidInput where the job must not or cannot train on ``snapshot``.

    Reasons: a label for another purpose, another tokenizer than the base model's, or no tokens.
    """
    require_purpose(snapshot, job.data_label or job.purpose, job.data.project)
    if job.settings.dpo is not None and job.labels == "shuffled":
        raise InvalidInput("the control run shuffles tokens, not answers", got="training.dpo")
    require_allowed(job.data.transform, load_runtime(job.state_dir).profile.security.code_sources)
    require_runnable(job.data.transform)
    config = _base_config(job, worker_id)
    # None: on another machine's disk, or a user's own model; each rank checks.
    if config is not None:
        require_tokens(snapshot, job.data)
        vocabulary = snapshot.vocabulary
        require_tokenizer(config, vocabulary.sha256 or "", vocabulary.vocab_size)
    directory = _base_directory(job, worker_id)
    context = 0  # unknown: the model is on another machine's disk; each rank checks
    if config is not None:
        context = config.context
    elif job.settings.code_ref or (directory is not None and is_pretrained(directory)):
        context = task_size_of(job, load_runtime(job.state_dir).profile).context
    require_batches(snapshot, job.data, job.settings, context)


def require_tokens(snapshot: Snapshot, data: DataSettings) -> None:
    """Raise InvalidSnapshot where a transformer has nothing to learn in ``snapshot``."""
    if not snapshot.tokens:
        raise InvalidSnapshot(
            "snapshot has no tokens for a transformer",
            got=f"columns {', '.join(each.name for each in snapshot.columns)}",
            wanted="text or tokens",
            where=snapshot.url,
            do=f"Name the text's field when it is built (data.text_field is {data.text_field!r}), "
            "or train a model of your own (code_ref).",
        )


def require_batches(
    snapshot: Snapshot, data: DataSettings, settings: TrainingSettings, context: int
) -> None:
    """Raise InvalidInput or InvalidSnapshot where the data cannot fill one batch of rows of
    ``context`` tokens (0: unknown, which passes)."""
    splits: list[Split] = ["train", "held-out"] if settings.evaluate_every_steps else ["train"]
    rows, pairs = settings.batch_sequences, settings.dpo is not None
    require_readable(snapshot, data, context=context, global_batch=rows, splits=splits, pairs=pairs)


def _base_directory(job: TrainJob, worker_id: str) -> Path | None:
    """Return the base model's directory; None on another machine's disk, or for user code."""
    base = load_runtime(job.state_dir).node_dir(worker_id) / "store" / "models"
    directory = base / directory_name(job.model_id) / job.version
    known = not job.settings.code_ref and (directory / CONFIG_FILE).exists()
    return directory if known else None


def _base_config(job: TrainJob, worker_id: str) -> ModelConfig | None:
    directory = _base_directory(job, worker_id)
    # A model in transformers' layout is compared with the job by each rank, which has torch.
    return None if directory is None or is_pretrained(directory) else read_config(directory)


# The memory estimate is a lower bound: it never refuses a job that fits.
MIB = 1024 * 1024
RANK_BYTES = 26 * MIB  # private memory of a rank forked from a launcher with torch imported
LAUNCHER_BYTES = 200 * MIB


def require_memory(settings: TrainingSettings, parameters: int, free_bytes: int | None) -> None:
    """Raise InvalidInput where ``settings.ranks`` ranks on one machine need over ``free_bytes``.

    None means unknown and passes; ``parameters`` are the whole model's, 0 if unknown.
    """
    weights = parameters * settings.weight_bytes
    whole = weights  # that adapters are beside
    if settings.lora is None:  # and gradients, and the reference of pairs
        whole = settings.state_bytes(parameters, own_moments=0)
        whole += weights * (1 + (settings.dpo is not None))
    share = whole // settings.mesh.ranks_per_replica
    needed = LAUNCHER_BYTES + settings.ranks * (share + RANK_BYTES)
    if free_bytes is None or needed <= free_bytes:
        return
    raise InvalidInput(
        "more ranks than this machine's memory holds",
        got=f"{settings.ranks} ranks, at least {needed // MIB:,} MiB together",
        wanted=f"at most {free_bytes // MIB:,} MiB, which is free now",
        do="Lower --ranks (training.ranks), or cut the model: training.mesh.shard.",
    )
