"""Starting state of a rank: load and verify base model, snapshot and workload.

Each part is verified against the digests in the job. Does not depend on process groups.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from paceline.config import Runtime, TrainingSettings, load_runtime
from paceline.errors import InvalidInput, SourceMissing
from paceline.extras import require_extras
from paceline.models import CONFIG_FILE, ModelConfig, require_whole, weight_files
from paceline.schemas import TrainJob
from paceline.storage import ObjectStore, join_url, open_store
from paceline.training.checkpoint import Generations
from paceline.training.identity import config_digest, stream_seed, task_size_of
from paceline.training.loop.rank_process import retain_freed_memory
from paceline.training.reproducibility import CUBLAS_DETERMINISTIC

if TYPE_CHECKING:
    from torch import nn

    from paceline.data import PlannedStream, ShardCache, Snapshot
    from paceline.manifest import Manifest
    from paceline.models import Adapters, ModelConfig, Pretrained, SavedTransformer
    from paceline.training.loop.optimizer import MakeOptimizer
    from paceline.training.loop.workload import Workload


Split = Literal["train", "held-out"]
VERIFIED = "base-verified.json"  # which files a rank of this node has verified, in which start
START = ("MASTER_PORT", "PACELINE_ATTEMPT")  # of a launcher's ranks, in their environment


@dataclass
class RankContext:
    """The loaded parts of a job on one rank."""

    job: TrainJob
    runtime: Runtime
    node: Path
    work_dir: Path
    store: ObjectStore
    snapshot: Snapshot
    cache: ShardCache
    model: nn.Module
    config: ModelConfig | None  # of our transformer; None: a user's own model, or ``pretrained``
    workload: Workload
    generations: Generations
    config_digest: str
    saved: Pretrained | SavedTransformer | None = None  # has the values, once it is parallelised
    adapters: Adapters | None = None  # None: all weights are trained
    make_optimizer: MakeOptimizer | None = None  # None: one of ours

    @property
    def pretrained(self) -> Pretrained | None:
        """Return the base where it is a model of transformers."""
        return None if self.config is not None else cast("Pretrained | None", self.saved)

    @property
    def context(self) -> int:
        """Return the context length: tokens per row."""
        if self.config is None:
            return task_size_of(self.job, self.runtime.profile).context
        return self.config.context

    @cached_property
    def begin(self) -> int | None:
        """Return the token that the model's own tokenizer puts before a text (BOS), as
        ``tokenizer(text)`` and the judge do; None where it puts none, and for models of ours."""
        from paceline.data import open_tokenizer
        from paceline.models import TOKENIZER_FILE

        if self.pretrained is None or self.snapshot.vocabulary.kind == "bytes":
            return None
        return open_tokenizer(str(self.pretrained.directory / TOKENIZER_FILE)).first

    def stream(
        self, rank: int, world_size: int, position: dict[str, Any] | None = None
    ) -> PlannedStream:
        """Return share ``rank`` of the training split, starting at ``position``."""
        job = self.job
        seed, skip = stream_seed("job", job.settings.seed), frozenset(job.skip_batches)
        return self._open(
            "train", rank, world_size, seed, position=position, skip=skip, readers=job.data_readers
        )

    def held_out_stream(self, rank: int, world_size: int) -> PlannedStream:
        """Return share ``rank`` of the held-out split, from its start."""
        return self._open("held-out", rank, world_size, 0)

    def _open(
        self,
        split: Literal["train", "held-out"],
        rank: int,
        world_size: int,
        seed: int,
        **rest: Any,
    ) -> PlannedStream:
        from paceline.data import open_stream

        return open_stream(
            self.snapshot,
            split,
            self.cache,
            self.job.data,
            context=self.context,
            global_batch=self.job.settings.batch_sequences,
            seed=seed,
            rank=rank,
            world_size=world_size,
            begin=self.begin,
            **rest,
        )


def load(job: TrainJob, worker_id: str, rank: int) -> RankContext:
    """Return base model, snapshot and workload, each verified against the job.

    Also configures this process: torch threads, malloc, determinism. Raises InvalidInput where
    snapshot or base model are not the job's.
    """
    from paceline.data import load_snapshot, require_purpose
    from paceline.models import add_adapters
    from paceline.training.loop.optimizer import require_groups

    _configure_process(job)
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
    require_purpose(snapshot, job.data_label or job.purpose, job.data.project)
    model, config, workload, saved = _load_task(job, runtime, node, snapshot)
    adapters: Adapters | None = None
    if (lora := job.settings.lora) is not None:
        require_extras("lora")
        adapters = add_adapters(model, lora, job.settings.seed)
    require_groups(model, job.settings)
    make_optimizer: MakeOptimizer | None = None
    if job.settings.optimizer_ref:
        from paceline.training.user_code import load_optimizer

        sources = runtime.profile.security.code_sources
        make_optimizer = load_optimizer(job.settings, sources, node / "code")
    return RankContext(
        job=job,
        runtime=runtime,
        node=node,
        work_dir=work_dir,
        store=store,
        snapshot=snapshot,
        cache=_shard_cache(job, snapshot, store, runtime, node / "cache"),
        model=model,
        config=config,
        workload=workload,
        generations=Generations(store, join_url(job.checkpoint_url, job.job_id)),
        config_digest=config_digest(job),
        saved=saved,
        adapters=adapters,
        make_optimizer=make_optimizer,
    )


def _configure_process(job: TrainJob) -> None:
    """Set this process's malloc, torch threads and determinism as ``job`` says."""
    import torch

    retain_freed_memory()
    torch.set_num_threads(job.settings.threads_per_rank)
    on_gpu, deterministic = torch.cuda.is_available(), job.settings.deterministic
    if deterministic is None:
        deterministic = job.deterministic and not on_gpu
    torch.use_deterministic_algorithms(deterministic)
    if deterministic and on_gpu:
        # without it torch refuses matrix products on a GPU
        os.environ.setdefault(*CUBLAS_DETERMINISTIC)


def _shard_cache(
    job: TrainJob, snapshot: Snapshot, store: ObjectStore, runtime: Runtime, directory: Path
) -> ShardCache:
    from paceline.data import ShardCache
    from paceline.data.loading import open_transforms

    transforms = open_transforms(
        job.data.transform,
        runtime.profile.security.code_sources,
        processes=job.data.transform_processes,
        deadline_s=job.data.transform_deadline_s,
    )
    return ShardCache(
        snapshot,
        store,
        directory,
        limit_bytes=job.data.cache_bytes,
        transforms=transforms,
        max_bad_share=job.data.max_bad_share,
        purpose=job.data_label or job.purpose,
        project=job.data.project,
    )


def _load_task(
    job: TrainJob, runtime: Runtime, node: Path, snapshot: Snapshot
) -> tuple[nn.Module, ModelConfig | None, Workload, Pretrained | SavedTransformer | None]:
    from paceline.models import (
        Pretrained,
        SavedTransformer,
        is_pretrained,
        load_model,
        require_tokenizer,
    )
    from paceline.training.loop.preferences import Preferences
    from paceline.training.loop.workload import ShuffledLabels, TransformerWorkload

    vocabulary = snapshot.vocabulary
    config: ModelConfig | None = None
    saved: Pretrained | SavedTransformer | None = None
    workload: Workload
    if job.settings.code_ref:
        from paceline.training import user_code as code_ref

        task = code_ref.task_of(job, runtime.profile, vocabulary.vocab_size)
        sources = runtime.profile.security.code_sources
        workload = code_ref.load(job.settings.code_ref, sources, node / "code", task)
        model = workload.build()
    elif is_pretrained(directory := verified_base(node, job)):
        saved = Pretrained.open(directory)
        saved.require_tied()  # a rank reads one of them: the other would be lost without a word
        context = task_size_of(job, runtime.profile).context
        require_pretrained(saved, job.settings, context, snapshot)
        workload = TransformerWorkload(saved, job.settings.seed)
        model = workload.build()
    else:
        saved = SavedTransformer.open(directory)
        model, config = saved.build(), saved.config
        if job.settings.synchrony.kind != "every-step":  # each rank trains the whole model
            model, _ = load_model(directory)
        require_tokenizer(config, vocabulary.sha256 or "", vocabulary.vocab_size)
        workload = TransformerWorkload(config, job.settings.seed)
    if job.settings.dpo is not None:
        workload = Preferences(workload, job.settings.dpo.beta)
    if job.labels == "shuffled":
        workload = ShuffledLabels(workload, job.settings.seed)
    return model, config, workload, saved


def require_pretrained(
    pretrained: Pretrained, settings: TrainingSettings, context: int, snapshot: Snapshot
) -> None:
    """Raise InvalidInput unless ``settings`` can train ``pretrained`` on rows of ``snapshot``."""
    from paceline.data import ChatTemplate, require_whole
    from paceline.training.parallel import MeshSpec, replicas_of, require_planned, require_rows

    spec = MeshSpec.of(settings.mesh, replicas_of(settings))
    require_planned(pretrained, spec)
    require_rows(spec, settings, context)
    if settings.synchrony.kind != "every-step":
        raise InvalidInput(
            "models in transformers' layout are trained in step only",
            got=settings.synchrony.kind,
            wanted="every-step",
            where="training.synchrony.kind",
        )
    vocabulary = snapshot.vocabulary
    pretrained.require_trainable(context, vocabulary.sha256 or "", vocabulary.vocab_size)
    require_whole(snapshot, context)
    if (wanted := snapshot.record.template_sha256) is not None:
        template = ChatTemplate(str(pretrained.directory / "tokenizer.json"))
        if template.digest != wanted:
            raise InvalidInput(
                "data and model have different chat templates",
                got=f"data of template {wanted[:16]}",
                wanted=template.digest[:16],
                where=pretrained.directory,
                do="Build the snapshot with --tokenizer of this model's directory.",
            )


def verified_base(node: Path, job: TrainJob) -> Path:
    """Return the base model's directory in this node's store, after one rank of this node verified
    every byte.

    Raises InvalidInput where it is missing or another model than the job's.
    """
    from paceline.manifest import MANIFEST_FILE, directory_name, parse_manifest

    directory = node / "store/models" / directory_name(job.model_id) / job.version
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
    _verify_once(directory, manifest, node / "work" / job.job_id / VERIFIED)
    return directory


def _verify_once(directory: Path, manifest: Manifest, record: Path) -> None:
    """Verify ``directory``, unless another rank of this start of the gang has since its files last
    changed; one that is about to is waited for, as long as the launcher lets a start take."""
    from paceline.manifest import verify_directory

    start = [str(os.getppid()), *(os.environ.get(name, "") for name in START)]
    stats = [each.lstat() for each in sorted(directory.rglob("*"))]
    files = [(each.st_ino, each.st_size, each.st_mtime_ns) for each in stats]
    verified = json.dumps([manifest.digest, start, files])
    record.parent.mkdir(parents=True, exist_ok=True)
    with record.open("a+") as file:
        with contextlib.suppress(OSError):  # without locks each rank verifies
            fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        if file.read() != verified:
            verify_directory(directory, manifest)
            with contextlib.suppress(OSError):  # a full disk: the next rank verifies, too
                file.truncate(0)
                file.write(verified)
                file.flush()


def require_model(source: Path, code_ref: str) -> None:
    """Check that training can start from ``source``; raises InvalidInput or SourceMissing."""
    if code_ref:
        raise InvalidInput(
            "a model of your own starts from what its build() returns",
            got=f"--model {source}, training.code_ref {code_ref}",
            wanted="one of them",
            do="Load the weights in build(), or leave out --model.",
        )
    if not source.is_dir():
        raise SourceMissing("no such model directory", got=source, wanted="safetensors and config")
    require_whole(source)
    if (source / CONFIG_FILE).is_file():
        weight_files(source)  # names pickled weights
    if not any(source.glob("*.safetensors")) or not (source / CONFIG_FILE).is_file():
        raise InvalidInput(
            "no model of ours in the model directory",
            got=", ".join(sorted(each.name for each in source.iterdir())[:5]) or "nothing",
            wanted=f"*.safetensors and {CONFIG_FILE}",
            where=source,
            do="Name the export of a training, or a directory that transformers wrote.",
        )
