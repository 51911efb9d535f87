"""Single-machine training without servers, from a directory of text to an output directory.

Snapshot, base model, checkpoints and result lie below the output directory; running the same
command again resumes. It runs the same driver and the same ranks as a fleet. Does not write to
the terminal.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from paceline.config import Profile, Runtime, Secrets, load_runtime, save_runtime
from paceline.data import Snapshot, build_snapshot, load_snapshot, require_purpose
from paceline.data.loading import transform
from paceline.data.snapshot import require_columns
from paceline.errors import AccessDenied, Cancelled, InvalidInput, PermanentError, StateLocked
from paceline.models import ModelConfig, read_config
from paceline.schemas import digest_of, new_run_id
from paceline.schemas.training import RankEvent, TrainJob, TrainResult
from paceline.storage import DiskStore, ObjectStore, join_url, open_store
from paceline.system.files import sync_directory, sync_tree
from paceline.training import local_storage as remote
from paceline.training import user_code as code_ref
from paceline.training.identity import own_task, with_own_id
from paceline.training.launcher.admission import free_memory, require_room
from paceline.training.launcher.driver import run_job
from paceline.training.launcher.local import LocalLauncher
from paceline.training.loop import starting_state as starting
from paceline.training.loop.preemption import require_allowed_watcher
from paceline.training.parallel import require_layout
from paceline.training.parallel.mesh import MeshSpec
from paceline.training.strategies import replicas_of

log = logging.getLogger(__name__)

WORKER = "local"
MODEL, VERSION = "model", "v1"
LOCK_FILE = "training.lock"


@dataclass(frozen=True, kw_only=True)
class TrainingRequest:
    """A training request: data, model, profile and output directory."""

    output: Path
    profile: Profile
    source: str | None = None  # a directory of text; None: the profile's
    snapshot_url: str | None = None  # a snapshot that already exists, instead of ``source``
    model: Path | None = None  # initial model (see ``loop.starting_state``); None: a new one
    labels: Literal["true", "shuffled"] = "true"  # "shuffled": the control run, a separate job
    checkpoints: str | None = None  # s3://bucket/prefix or a directory; None: below ``output``


@contextlib.contextmanager
def held(output: Path) -> Iterator[None]:
    """Hold an exclusive lock on ``output``; raises StateLocked where another training holds it.

    The kernel releases the lock when this process ends. A directory created here is removed where
    the request is refused (PermanentError) before checkpoints exist.
    """
    output = output.absolute()
    new = _create(output / "state")
    try:
        with (output / "state" / LOCK_FILE).open("a+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                file.seek(0)
                raise StateLocked(
                    "another training is under way in this directory",
                    got=f"process {file.read(20).strip() or '?'}",
                    where=output,
                    do="Wait for its end or stop it, or give --output another directory.",
                ) from error
            file.truncate(0)
            file.write(f"{os.getpid()}\n")
            file.flush()
            yield
    except (Cancelled, StateLocked):
        raise
    except PermanentError:
        if new and not (output / "checkpoints").exists():
            shutil.rmtree(output, ignore_errors=True)
        raise


def _create(directory: Path) -> bool:
    """Create ``<output>/state``; return whether ``output`` is new."""
    new = not directory.parent.exists()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / LOCK_FILE).touch()
    except OSError as error:
        raise AccessDenied(
            "cannot write into the output directory",
            got=error.strerror,
            wanted="a directory that can be written, or a place to make one",
            where=error.filename or directory.parent,
            do="Give --output another directory.",
        ) from error
    return new


def prepare(
    asked: TrainingRequest, run_id: str | None = None, tell: Callable[[str], None] = log.info
) -> TrainJob:
    """Build or find snapshot and base model below ``asked.output``; return the job.

    Idempotent; call it inside ``held(asked.output)``. Raises InvalidInput where mesh, model, ranks
    and data do not fit each other or this machine, SourceMissing for a missing text or model.
    """
    _require_possible(asked.profile)
    if asked.model is not None:
        starting.require_model(asked.model, asked.profile.training.code_ref)
    if not remote.is_remote(asked.checkpoints):
        _require_here(asked.snapshot_url or "", "--snapshot")
    _require_here(asked.source or asked.profile.data.source, "data.source")
    output = asked.output.absolute()
    output.mkdir(parents=True, exist_ok=True)
    checkpoint_url, endpoints = remote.place_of(asked.checkpoints, output, asked.profile)
    runtime = Runtime(
        profile=asked.profile, state_dir=output / "state", endpoints=endpoints, secrets=Secrets()
    )
    store = open_store(runtime)
    remote.require_writable(checkpoint_url, store)
    runtime.state_dir.mkdir(exist_ok=True)
    save_runtime(runtime)
    snapshot = _snapshot(asked, output, store)
    manifest_digest, start = _base(asked, runtime, snapshot)
    if asked.model is not None and starting.is_checkpoint(asked.model):
        tell(f"weights are those of the DCP checkpoint in {asked.model}")
    settings = asked.profile.training
    require_room(settings, _weights_bytes(runtime), free_memory())
    job = TrainJob(
        job_id="job",
        run_id=run_id or new_run_id(),
        state_dir=str(runtime.state_dir),
        model_id=MODEL,
        version=VERSION,
        manifest_digest=manifest_digest,
        snapshot_url=snapshot.url,
        snapshot_digest=snapshot.digest,
        purpose=asked.profile.data.purpose,
        checkpoint_url=checkpoint_url,
        settings=settings,
        data=asked.profile.data,
        task=own_task(asked.profile),
    )
    job = with_own_id(job)
    if asked.labels == "shuffled":
        job = job.model_copy(update={"labels": "shuffled", "job_id": f"{job.job_id}-shuffled"})
    if run_id is None and (earlier := remote.earlier_run(job, store)):
        job = job.model_copy(update={"run_id": earlier})  # the same training resumes
    if start is not None and start.seed(job, store):
        tell(f"optimizer state of {start.trained} of {start.of} parameters is taken over")
    return job


def _require_possible(profile: Profile) -> None:
    """Check the settings alone, before any data are read; raises InvalidInput or AccessDenied."""
    settings, sources = profile.training, profile.security.code_sources
    require_layout(MeshSpec.of(settings.mesh, replicas_of(settings)), settings, None, profile.data)
    require_columns(profile.data.columns, settings.batch_sequences)
    transform.require_allowed(profile.data.transform, sources)
    if settings.code_ref:
        code_ref.require_allowed(code_ref.parse(settings.code_ref), sources)
    if settings.guard.preemption:
        require_allowed_watcher(settings.guard.preemption, sources)
    require_room(settings, 0, free_memory())


def _require_here(url: str, where: str) -> None:
    if "://" in url and not url.startswith("file://"):
        raise InvalidInput(
            "training without a server reads this machine's disks only",
            got=url,
            wanted="a directory",
            where=where,
            do="Copy it here, or keep --checkpoints on S3 too (then --snapshot may be there), or "
            "train on an installation, which has an object store.",
        )


def run(
    job: TrainJob,
    *,
    on_event: Callable[[RankEvent], None] | None = None,
    cancel: threading.Event | None = None,
) -> TrainResult:
    """Run ``job`` on this machine; see ``run_job``."""
    store = open_store(load_runtime(job.state_dir))
    with remote.recorded(job, store, record_of(job)) as keep:
        result = run_job(
            job, [WORKER], LocalLauncher(), on_event=on_event, store=store, cancel=cancel
        )
        keep(result)
    return result


def parts_of(job: TrainJob) -> tuple[Snapshot, ModelConfig | None]:
    """Return the job's snapshot and its base model's config (None for a user's own model)."""
    snapshot = load_snapshot(job.snapshot_url, open_store(load_runtime(job.state_dir)))
    if job.settings.code_ref:
        return snapshot, None
    node = Path(job.state_dir) / "nodes" / WORKER
    return snapshot, read_config(node / "store" / "models" / job.model_id / job.version)


def shown(url: str) -> str:
    """Return a job's URL for display: a directory path, or an object store's URL."""
    return str(DiskStore.path_of(url)) if url.startswith("file://") else url


def _snapshot(asked: TrainingRequest, output: Path, store: ObjectStore) -> Snapshot:
    if asked.snapshot_url is not None:
        url = asked.snapshot_url
        found = load_snapshot(url if "://" in url else DiskStore.url_of(url), store)
        # The snapshot's label lists the allowed purposes; the profile states this job's purpose.
        require_purpose(found, asked.profile.data.purpose, asked.profile.data.project)
        return found
    source = asked.source or asked.profile.data.source
    return build_snapshot(
        source if "://" in source or source == "stdlib" else str(Path(source).absolute()),
        DiskStore.url_of(output / "data"),
        asked.profile.data,
        store,
        work_dir=output / "state" / "work",
    )


def _base(
    asked: TrainingRequest, runtime: Runtime, snapshot: Snapshot
) -> tuple[str, starting.ImportedState | None]:
    """Write the base model into the node's store; return its manifest digest and, for a DCP
    checkpoint, the initial optimiser state."""
    from paceline.manifest import build_manifest, write_manifest

    if asked.profile.training.code_ref:
        return digest_of({"code_ref": asked.profile.training.code_ref}), None
    directory = runtime.node_dir(WORKER) / "store" / "models" / MODEL / VERSION
    making = directory.with_name(f".{VERSION}.{os.getpid()}")
    shutil.rmtree(making, ignore_errors=True)
    making.mkdir(parents=True)
    start: starting.ImportedState | None = None
    try:
        if asked.model is None:
            _new_model(asked, snapshot, making)
        elif starting.is_checkpoint(asked.model):
            start = _checkpointed(asked, asked.model, snapshot, making)
        else:
            _copy_model(asked.model, making)
        link_mbit = asked.profile.cluster.link_mbit
        manifest = build_manifest(making, model_id=MODEL, version=VERSION, link_mbit=link_mbit)
        write_manifest(making, manifest)
        shutil.rmtree(directory, ignore_errors=True)
        sync_tree(making)
        making.rename(directory)
        sync_directory(directory.parent)
    finally:
        shutil.rmtree(making, ignore_errors=True)
    return manifest.digest, start


def _checkpointed(
    asked: TrainingRequest, source: Path, snapshot: Snapshot, directory: Path
) -> starting.ImportedState | None:
    """Write a DCP checkpoint's weights as the base model; return its optimiser state, if any."""
    from paceline.models import save_model

    training = asked.profile.training
    model, config, found = starting.model_of_dcp(
        source,
        asked.profile.model,
        **_shape(asked, snapshot),
        weights_only=training.optimizer != "adamw" or training.synchrony.kind != "every-step",
    )
    save_model(model, config, directory)
    start = starting.ImportedState.of_import(source, model, found)
    if start is not None:
        (directory / starting.START_FILE).write_text(json.dumps({"state": start.digest()}) + "\n")
    return start


def _weights_bytes(runtime: Runtime) -> int:
    directory = runtime.node_dir(WORKER) / "store" / "models" / MODEL / VERSION
    return sum(each.stat().st_size for each in directory.glob("*.safetensors"))


def _new_model(asked: TrainingRequest, snapshot: Snapshot, directory: Path) -> None:
    from paceline.models import config_for, new_model, save_model

    wanted, shape = asked.profile.model, _shape(asked, snapshot)
    config = config_for(
        wanted.parameters,
        wanted.context,
        shape["vocabulary"],
        separator=shape["separator"],
        tokenizer_digest=shape["tokenizer_digest"],
        **shape["cuts"],
    )
    save_model(new_model(config, wanted.seed), config, directory)


def _shape(asked: TrainingRequest, snapshot: Snapshot) -> dict[str, Any]:
    """Return the model dimensions that data and mesh determine (the profile sets the others)."""
    from paceline.training.parallel import cuts_of

    return {
        "vocabulary": snapshot.vocabulary.vocab_size,
        "separator": snapshot.vocabulary.separator,
        "tokenizer_digest": snapshot.vocabulary.sha256 or "",
        "cuts": cuts_of(asked.profile.training.mesh),
    }


def _copy_model(source: Path, directory: Path) -> None:
    for each in source.iterdir():
        if each.suffix in (".safetensors", ".json") and each.name != "manifest.json":
            shutil.copyfile(each, directory / each.name)


def checkpoints_of(job: TrainJob) -> str:
    """Return the URL prefix of the job's checkpoint generations."""
    return join_url(job.checkpoint_url, job.job_id)


def record_of(job: TrainJob) -> Path:
    """Return the local directory of the job's record: the job, each step, the result.

    It is also the checkpoint directory where checkpoints lie below the output directory.
    """
    return Path(job.state_dir).parent / "checkpoints" / job.job_id
