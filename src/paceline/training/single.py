"""Single-machine training without servers, from a directory of text to an output directory.

Snapshot, base model, checkpoints and result lie below the output directory; running the same
command again resumes. Checkpoints may lie in an S3 bucket instead: endpoint and credentials come
from the profile ([objects]) and the environment and are never written to disk. It runs the same
driver and the same ranks as a fleet. Does not write to the terminal.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import secrets
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import ValidationError

from paceline.config import (
    DEFAULT_S3,
    Endpoints,
    Profile,
    Runtime,
    Secrets,
    load_runtime,
    save_runtime,
)
from paceline.data import Snapshot, build_snapshot, load_snapshot, require_columns, require_purpose
from paceline.data.loading import transform
from paceline.errors import (
    AccessDenied,
    Cancelled,
    InvalidInput,
    PacelineError,
    PermanentError,
    SourceMissing,
    StateLocked,
)
from paceline.extras import require_extras
from paceline.models import (
    TOKENIZER_FILE,
    ModelConfig,
    is_pretrained,
    read_config,
    stored_tensors,
)
from paceline.schemas import (
    RankEvent,
    TaskSize,
    TrainJob,
    TrainResult,
    canonical_json,
    digest_of,
    new_run_id,
)
from paceline.storage import DiskStore, ObjectStore, join_url, open_store, parse_url
from paceline.system import free_memory_bytes, sync_directory, sync_tree
from paceline.training import user_code as code_ref
from paceline.training.base_check import require_targets
from paceline.training.continuing import (
    JOB_FILE,
    checkpoints_url,
    continuation,
    store_job,
    stored_job,
    stored_training_id,
)
from paceline.training.identity import code_ref_task_size, with_derived_id
from paceline.training.launcher import (
    LocalLauncher,
    MetadataWatcher,
    require_memory,
    run_job,
)
from paceline.training.loop import BASE_CARD, require_model, require_pretrained
from paceline.training.parallel import MeshSpec, replicas_of, require_layout, require_planned

if TYPE_CHECKING:
    from paceline.models import Pretrained

log = logging.getLogger(__name__)

WORKER = "local"
MODEL, VERSION = "model", "v1"
LOCK_FILE = "training.lock"
RESULT_FILE = "result.json"


@dataclass(frozen=True, kw_only=True)
class TrainingRequest:
    """A training request: data, model, profile and output directory."""

    output: Path
    profile: Profile
    source: str | None = None  # a directory of text; None: the profile's
    snapshot_url: str | None = None  # a snapshot that already exists, instead of ``source``
    model: Path | None = None  # initial model (see ``require_model``); None: a new one
    labels: Literal["true", "shuffled"] = "true"  # "shuffled": the control run, a separate job
    checkpoints: str | None = None  # s3://bucket/prefix or a directory; None: below ``output``
    continue_from: str = ""  # id of a finished job of the same place; "": from the base


@contextlib.contextmanager
def locked_output(output: Path) -> Iterator[None]:
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


def prepare(asked: TrainingRequest, run_id: str | None = None) -> TrainJob:
    """Build or find snapshot and base model below ``asked.output``; return the job.

    Idempotent; call it inside ``locked_output(asked.output)``. Raises InvalidInput where mesh,
    model, ranks and data do not fit each other or this machine, SourceMissing for a missing text or
    model.
    """
    _require_possible(asked.profile)
    if asked.model is not None:
        require_model(asked.model, asked.profile.training.code_ref)
    if not _is_remote(asked.checkpoints):
        _require_local(asked.snapshot_url or "", "--snapshot")
    _require_local(asked.source or asked.profile.data.source, "data.source")
    asked, pretrained = _pretrained(asked)
    output = asked.output.absolute()
    output.mkdir(parents=True, exist_ok=True)
    checkpoint_url, endpoints = _checkpoint_location(asked.checkpoints, output, asked.profile)
    runtime = Runtime(
        profile=asked.profile, state_dir=output / "state", endpoints=endpoints, secrets=Secrets()
    )
    store = open_store(runtime)
    _require_writable(checkpoint_url, store)
    runtime.state_dir.mkdir(exist_ok=True)
    save_runtime(runtime)
    snapshot = _snapshot(asked, output, store)
    manifest_digest = _base(asked, runtime, snapshot, pretrained)
    settings = asked.profile.training
    weights_bytes, parameters = _base_size(runtime)
    require_memory(settings, parameters, free_memory_bytes())
    job = TrainJob(
        job_id="job",
        run_id=run_id or new_run_id(),
        state_dir=str(runtime.state_dir),
        model_id=MODEL,
        version=VERSION,
        manifest_digest=manifest_digest,
        base_bytes=weights_bytes,
        base_parameters=parameters,
        snapshot_url=snapshot.url,
        snapshot_digest=snapshot.digest,
        purpose=asked.profile.data.purpose,
        checkpoint_url=checkpoint_url,
        settings=settings,
        data=asked.profile.data,
        task=code_ref_task_size(asked.profile),
    )
    if pretrained is not None:
        size = TaskSize(context=asked.profile.model.context, parameters=pretrained.parameters)
        job = job.model_copy(update={"task": size})
        require_pretrained(pretrained, settings, size.context, snapshot)
    job = with_derived_id(job)
    if asked.labels == "shuffled":
        job = job.model_copy(update={"labels": "shuffled", "job_id": f"{job.job_id}-shuffled"})
    if asked.continue_from:
        earlier_id = stored_training_id(asked.continue_from, checkpoint_url, store)
        job = continuation(job, earlier_id, store)
    if run_id is None and (earlier := _previous_run_id(job, store)):
        job = job.model_copy(update={"run_id": earlier})  # the same training resumes
    return job


def _pretrained(asked: TrainingRequest) -> tuple[TrainingRequest, Pretrained | None]:
    """Return the request with the tokenizer of the model that it names, and that model where it is
    in transformers' layout, every weight checked; else None.
    """
    source, profile = asked.model, asked.profile
    if source is None:
        return asked, None
    tokenizer = source.absolute() / TOKENIZER_FILE
    if asked.snapshot_url is None and profile.data.tokenizer == "bytes" and tokenizer.is_file():
        data = profile.data.model_copy(update={"tokenizer": str(tokenizer)})
        asked = replace(asked, profile=profile.model_copy(update={"data": data}))
    if not is_pretrained(source):
        return asked, None
    require_extras("hf")
    from paceline.models import Pretrained

    found, settings = Pretrained.open(source), asked.profile.training
    require_planned(found, MeshSpec.of(settings.mesh, replicas_of(settings)))
    require_targets(found, settings)
    found.require_sound()
    return asked, found


def _require_possible(profile: Profile) -> None:
    """Check the settings alone, before any data are read; raises InvalidInput or AccessDenied."""
    settings, sources = profile.training, profile.security.code_sources
    require_layout(MeshSpec.of(settings.mesh, replicas_of(settings)), settings, None, profile.data)
    require_columns(profile.data.columns, settings.batch_sequences)
    transform.require_allowed(profile.data.transform, sources)
    if settings.lora is not None:
        require_extras("lora")
    if settings.code_ref:
        code_ref.require_allowed(code_ref.parse(settings.code_ref), sources)
    if settings.optimizer_ref:
        named = code_ref.parse(settings.optimizer_ref, code_ref.OPTIMIZER)
        code_ref.require_allowed(named, sources)
    if settings.guard.preemption:
        MetadataWatcher(settings.guard.preemption)
    require_memory(settings, 0, free_memory_bytes())


def _require_local(url: str, where: str) -> None:
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
    with recorded(job, store, local_record_dir(job)) as keep:
        result = run_job(
            job, [WORKER], LocalLauncher(), on_event=on_event, store=store, cancel=cancel
        )
        keep(result)
    return result


@contextlib.contextmanager
def recorded(
    job: TrainJob, store: ObjectStore, here: Path
) -> Iterator[Callable[[TrainResult], None]]:
    """Store the job beside its checkpoints; yield a function that copies its result to ``here``.

    Does nothing where both are the same directory.
    """
    if checkpoints_url(job) == DiskStore.url_of(here):  # the consumer of events stores the job
        yield lambda _: None
        return
    store_job(job, store)

    def keep(result: TrainResult) -> None:
        try:
            here.mkdir(parents=True, exist_ok=True)
            (here / RESULT_FILE).write_bytes(canonical_json(result))
            if not (here / JOB_FILE).exists():  # trained on another machine
                (here / JOB_FILE).write_bytes(canonical_json(job))
        except OSError as error:
            log.warning("result is not kept here path=%s why=%s", here, error.strerror)

    yield keep


def _is_remote(checkpoints: str | None) -> bool:
    return checkpoints is not None and checkpoints.startswith("s3://")


def _checkpoint_location(
    checkpoints: str | None, output: Path, profile: Profile
) -> tuple[str, Endpoints]:
    """Return the URL prefix of the checkpoints and the server endpoints it needs.

    Raises InvalidInput for a malformed URL, AccessDenied without credentials.
    """
    where = checkpoints or str(output / "checkpoints")
    if _is_remote(where):
        parse_url(where)
        return where.rstrip("/"), Endpoints(s3_url=profile.objects.endpoint_url or DEFAULT_S3)
    return DiskStore.url_of(DiskStore.path_of(where) if "://" in where else where), Endpoints()


def _require_writable(url: str, store: ObjectStore) -> None:
    """Check that an object below ``url`` can be written, read and deleted.

    Raises AccessDenied for bad credentials, SourceMissing for a missing bucket, ServiceUnavailable
    where the server does not answer.
    """
    if isinstance(store, DiskStore):
        return  # creating the directories reports it
    probe = join_url(url, f".writable-{secrets.token_hex(8)}")
    try:
        store.put_bytes(probe, b"paceline")
    except SourceMissing as error:
        raise SourceMissing(
            "no such bucket to keep checkpoints in",
            got=error.got,
            where=url,
            do="Make it, or name another one with --checkpoints.",
        ) from error
    store.get_bytes(probe)
    store.delete(probe)


def run_ids(output: Path) -> set[str]:
    """Return the ids of the runs that trained below ``output``, as far as records can be read."""
    found = set()
    for path in (output / "checkpoints").glob(f"*/{JOB_FILE}"):
        with contextlib.suppress(ValidationError, OSError):
            found.add(TrainJob.model_validate_json(path.read_bytes()).run_id)
    return found


def _previous_run_id(job: TrainJob, store: ObjectStore) -> str | None:
    """Return the run id of an earlier training of the same job; None without one."""
    where = checkpoints_url(job)
    try:
        return stored_job(where, store).run_id
    except SourceMissing:
        return None
    except (PacelineError, ValidationError) as error:
        log.warning("the job's record cannot be read: a new run begins url=%s why=%s", where, error)
        return None


def snapshot_and_config(job: TrainJob) -> tuple[Snapshot, ModelConfig | Pretrained | None]:
    """Return the job's snapshot and its base model's config (None for a user's own model)."""
    snapshot = load_snapshot(job.snapshot_url, open_store(load_runtime(job.state_dir)))
    if job.settings.code_ref:
        return snapshot, None
    node = Path(job.state_dir) / "nodes" / WORKER
    directory = node / "store" / "models" / job.model_id / job.version
    if is_pretrained(directory):
        from paceline.models import Pretrained

        return snapshot, Pretrained.open(directory)
    return snapshot, read_config(directory)


def display_url(url: str) -> str:
    """Return a job's URL for display: a directory path, or an object store's URL."""
    return str(DiskStore.path_of(url)) if url.startswith("file://") else url


def _snapshot(asked: TrainingRequest, output: Path, store: ObjectStore) -> Snapshot:
    if asked.snapshot_url is not None:
        url = asked.snapshot_url
        found = load_snapshot(url if "://" in url else DiskStore.url_of(url), store)
        # The snapshot's label lists the allowed purposes; the profile states this job's purpose.
        require_purpose(found, asked.profile.data.purpose, asked.profile.data.project)
        return found
    source, data = asked.source or asked.profile.data.source, asked.profile.data
    if not data.max_tokens:  # with the separator after it, a conversation fills a row at most
        data = data.model_copy(update={"max_tokens": asked.profile.model.context - 1})
    return build_snapshot(
        source if "://" in source or source == "stdlib" else str(Path(source).absolute()),
        DiskStore.url_of(output / "data"),
        data,
        store,
        work_dir=output / "state" / "work",
    )


def _base(
    asked: TrainingRequest, runtime: Runtime, snapshot: Snapshot, pretrained: Pretrained | None
) -> str:
    """Write the base model into the node's store; return its manifest digest."""
    from paceline.manifest import build_manifest, write_manifest
    from paceline.models import CARD_FILE, read_card

    # not beside the weights: the job's id follows from the manifest of these
    card = read_card(asked.model / CARD_FILE) if asked.model else ""
    (runtime.state_dir / BASE_CARD).write_text(card)
    if asked.profile.training.code_ref:
        return digest_of({"code_ref": asked.profile.training.code_ref})
    directory = runtime.node_dir(WORKER) / "store" / "models" / MODEL / VERSION
    making = directory.with_name(f".{VERSION}.{os.getpid()}")
    shutil.rmtree(making, ignore_errors=True)
    making.mkdir(parents=True)
    try:
        if asked.model is None:
            write_new_model(asked.profile, snapshot, making)
        elif pretrained is not None:
            pretrained.copy(making)
        else:
            _copy_model(asked.model, making)
        if pretrained is None:
            require_targets(read_config(making), asked.profile.training)
        link_mbit = asked.profile.cluster.link_mbit
        manifest = build_manifest(
            making,
            model_id=MODEL,
            version=VERSION,
            link_mbit=link_mbit,
            piece_hash=asked.profile.security.piece_hash,
        )
        write_manifest(making, manifest)
        shutil.rmtree(directory, ignore_errors=True)
        sync_tree(making)
        making.rename(directory)
        sync_directory(directory.parent)
    finally:
        shutil.rmtree(making, ignore_errors=True)
    return manifest.digest


def _base_size(runtime: Runtime) -> tuple[int, int]:
    """Return bytes and parameters of the base's files; (0, 0) for a model of user code."""
    directory = runtime.node_dir(WORKER) / "store" / "models" / MODEL / VERSION
    if runtime.profile.training.code_ref:
        return 0, 0
    parameters = sum(prod(each.shape) for each in stored_tensors(directory).values())
    return sum(each.stat().st_size for each in directory.glob("*.safetensors")), parameters


def write_new_model(profile: Profile, snapshot: Snapshot, directory: Path) -> None:
    """Write an untrained model into ``directory``; the same arguments give the same bytes.

    ``profile.model``, the snapshot's vocabulary and the mesh determine its shape.
    """
    from paceline.models import config_for, new_model, save_model
    from paceline.training.parallel import cuts_of

    wanted, vocabulary = profile.model, snapshot.vocabulary
    config = config_for(
        wanted.parameters,
        wanted.context,
        vocabulary=vocabulary.vocab_size,
        separator=vocabulary.separator,
        tokenizer_digest=vocabulary.sha256 or "",
        **cuts_of(profile.training.mesh),
    )
    save_model(new_model(config, wanted.seed), config, directory)


def _copy_model(source: Path, directory: Path) -> None:
    for each in source.iterdir():
        if each.suffix in (".safetensors", ".json", ".jinja") and each.name != "manifest.json":
            shutil.copyfile(each, directory / each.name)


def local_record_dir(job: TrainJob) -> Path:
    """Return the local directory of the job's record: the job, each step, the result.

    It is also the checkpoint directory where checkpoints lie below the output directory.
    """
    return Path(job.state_dir).parent / "checkpoints" / job.job_id
