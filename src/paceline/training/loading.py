"""What a rank has before it meets the others: base model, data and store, each checked.

Everything is checked against what the job names, byte by byte where it came over a network. Knows
no ranks and no process groups.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.errors import InvalidInput
from paceline.objects import ObjectStore, join_url, open_store
from paceline.profile import Runtime, load_runtime
from paceline.profile.allowed import scrub
from paceline.training.checkpoint import Generations
from paceline.training.environment import CUBLAS
from paceline.training.identity import config_digest, size_of
from paceline.training.memory import keep_memory
from paceline.wire.training import TrainJob

if TYPE_CHECKING:
    from torch import nn

    from paceline.data import ShardCache, Snapshot
    from paceline.models import ModelConfig, Transformer
    from paceline.training.workload import Workload


@dataclass
class Loaded:
    """A job's parts on one node."""

    job: TrainJob
    runtime: Runtime
    node: Path
    work_dir: Path
    store: ObjectStore
    snapshot: Snapshot
    cache: ShardCache
    model: nn.Module
    config: ModelConfig | None  # None: a model of one's own
    workload: Workload
    generations: Generations
    config_digest: str

    @property
    def context(self) -> int:
        """Return the tokens of a row."""
        if self.config is None:
            return size_of(self.job, self.runtime.profile).context
        return self.config.context


def load(job: TrainJob, worker_id: str, rank: int) -> Loaded:
    """Return base model, snapshot and workload, each checked against what the job names.

    Also makes this process one that trains: its threads, its memory, determinism.
    """
    import torch

    from paceline.data import ShardCache, load_snapshot, require_purpose
    from paceline.data.apart import open_transforms

    keep_memory()
    torch.set_num_threads(job.settings.threads_per_rank)
    torch.use_deterministic_algorithms(job.deterministic)
    if job.deterministic and torch.cuda.is_available():
        os.environ.setdefault(*CUBLAS)  # without it torch refuses every product on a GPU
    runtime = load_runtime(job.state_dir)
    node = runtime.node_dir(worker_id)
    work_dir = node / "work" / job.job_id / f"rank-{rank}"
    work_dir.mkdir(parents=True, exist_ok=True)
    store = open_store(runtime)
    snapshot = load_snapshot(job.snapshot_url, store)
    if snapshot.digest != job.snapshot_digest:
        raise InvalidInput(
            "another snapshot than the job's",
            got=snapshot.digest,
            wanted=job.snapshot_digest,
            where=job.snapshot_url,
        )
    require_purpose(snapshot, job.purpose, job.data.project)
    model, config, workload = _task(job, runtime, node, snapshot)
    if job.data.transform:
        scrub(os.environ, secrets_only=True)  # it is imported here, too
    cache = ShardCache(
        snapshot,
        store,
        node / "cache",
        limit_bytes=job.data.cache_bytes,
        ahead=job.data.prefetch_shards,
        transforms=open_transforms(
            job.data.transform,
            runtime.profile.security.code_sources,
            processes=job.data.transform_processes,
            deadline_s=job.data.transform_deadline_s,
        ),
        max_bad_share=job.data.max_bad_share,
        purpose=job.purpose,
        project=job.data.project,
    )
    return Loaded(
        job=job,
        runtime=runtime,
        node=node,
        work_dir=work_dir,
        store=store,
        snapshot=snapshot,
        cache=cache,
        model=model,
        config=config,
        workload=workload,
        generations=Generations(store, join_url(job.checkpoint_url, job.job_id)),
        config_digest=config_digest(job),
    )


def _task(
    job: TrainJob, runtime: Runtime, node: Path, snapshot: Snapshot
) -> tuple[nn.Module, ModelConfig | None, Workload]:
    from paceline.models import require_tokenizer
    from paceline.training.workload import ShuffledLabels, TransformerWorkload

    vocabulary = snapshot.vocabulary
    config: ModelConfig | None = None
    workload: Workload
    if job.settings.code_ref:
        from paceline.training import code_ref

        profile = runtime.profile
        size = size_of(job, profile)
        task = code_ref.Task(
            seed=job.settings.seed,
            context=size.context,
            vocabulary=vocabulary.vocab_size,
            parameters=size.parameters,
        )
        sources = profile.security.code_sources
        workload = code_ref.load(job.settings.code_ref, sources, node / "code", task)
        model = workload.build()
    else:
        model, config = load_base(node, job)
        require_tokenizer(config, vocabulary.sha256 or "", vocabulary.vocab_size)
        workload = TransformerWorkload(config, job.settings.seed)
    if job.labels == "shuffled":
        workload = ShuffledLabels(workload, job.settings.seed)
    return model, config, workload


def load_base(node: Path, job: TrainJob) -> tuple[Transformer, ModelConfig]:
    """Return the base model from this node's own store, after checking every byte of it."""
    from paceline.manifest import MANIFEST_FILE, parse_manifest, verify_directory
    from paceline.models import load_model

    directory = node / "store" / "models" / job.model_id / job.version
    try:
        manifest = parse_manifest((directory / MANIFEST_FILE).read_bytes())
    except OSError as error:
        raise InvalidInput(
            "base model is not on this node",
            got=error.strerror,
            wanted=f"{job.model_id} {job.version}",
            where=directory,
            do="Distribute it first: `paceline distribute`.",
        ) from error
    if manifest.digest != job.manifest_digest:
        raise InvalidInput(
            "another model than the job's is on this node",
            got=manifest.digest,
            wanted=job.manifest_digest,
            where=directory,
        )
    verify_directory(directory, manifest)
    return load_model(directory)
