"""What a lifecycle starts from: models and data snapshots in the object store.

The demo makes its own (real text, and a base model that was briefly trained on it); a team with a
model of its own publishes its directory.
"""

from __future__ import annotations

import contextvars
import logging
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE
from pydantic import ValidationError

from paceline.config import DataSettings
from paceline.data import (
    STDLIB,
    Snapshot,
    build_snapshot,
    load_snapshot,
    require_valid,
    validate_snapshot,
)
from paceline.errors import InvalidInput, TrainingFailed
from paceline.manifest import (
    IMPORT,
    UPLOAD,
    Manifest,
    ProgressFormatter,
    PublishProgress,
    fetch_manifest,
    format_bytes,
    import_model,
    publish_model,
)
from paceline.plan import origin_cap_bytes
from paceline.registry import import_place
from paceline.relay import allowed_source
from paceline.schemas import canonical_json, digest_of
from paceline.storage import ObjectStore, remote_model
from paceline.system import PYTHON
from paceline.tasks import artifacts
from paceline.tasks.cancelling import noticed, stop_if_cancelled
from paceline.tasks.run import Run, StageResult
from paceline.training import BaseResult, BaseSpec

logger = logging.getLogger(__name__)

BASE_DEADLINE_S = 1800.0
SKIPPED_NAMED = 5  # samples left out, in the summary; the record lists a hundred

LOOK_S = 1.0
LOG_S = 10.0
STAGES = 2  # digest, upload

# Of the training settings, those that decide which base comes out; its steps are the model's own.
BASE_RECIPE = {"learning_rate", "batch_sequences", "warmup_steps", "weight_decay", "clip_norm"}


@task(name="build-data-snapshot", cache_policy=NO_CACHE)
def build_data_snapshot(
    run: Run, source: str | None = None, reading: dict[str, Any] | None = None
) -> StageResult:
    """Tokenise, shard and digest the samples at ``source`` (default: the profile's) into a snapshot
    in S3; ``reading`` changes the profile's data settings (format, text_field, features, …).

    Raises InvalidInput for a setting that is unknown or out of range.
    """
    settings = data_settings(run.runtime.profile.data, reading)
    source = source or settings.source

    def work() -> dict[str, Any]:
        snapshot = build_snapshot(
            source, run.runtime.data_url, settings, run.store, work_dir=run.work_dir
        )
        return _reference(snapshot)

    result = run.stage(
        "snapshot",
        {
            "source": source,
            "settings": settings.model_dump(mode="json"),
            "fingerprint": fingerprint(source, settings, run.store),
        },
        work,
        still_true=lambda output: run.store.exists(f"{output['url']}/snapshot.json"),
        describe=lambda o: (
            f"{o['documents']} samples, {o['tokens']:,} tokens, {o['bytes'] / 1e6:.1f} MB of text"
            + (f", {o['skipped']} left out" if o["skipped"] else "")
            + (f", cut at data.max_bytes = {o['cut_at_bytes']:,}" if o["cut_at_bytes"] else "")
        ),
    )
    if result.output["skipped"] and source != STDLIB:
        named = "; ".join(result.output.get("skipped_examples", ()))  # an older ledger has none
        run.note(f"{result.output['skipped']} samples are left out of the snapshot: {named}")
    return result


@task(name="validate-data", cache_policy=NO_CACHE)
def validate_data(run: Run, snapshot: dict[str, Any]) -> StageResult:
    """Run the Great Expectations suite over the snapshot; refuse it where it fails.

    Raises DataRejected naming the failed expectations, InvalidSnapshot for another purpose.
    """

    def work() -> dict[str, Any]:
        report = validate_snapshot(
            load_snapshot(snapshot["url"], run.store),
            run.store,
            run.work_dir / "cache",
            purpose=run.runtime.profile.data.purpose,
            project=run.runtime.profile.data.project,
        )
        (run.work_dir / "validation.json").write_bytes(canonical_json(report.to_dict()))
        artifacts.table("data validation", report.checks, "Great Expectations on the snapshot")
        artifacts.table("data columns", report.columns, "What the snapshot's samples hold")
        if report.quarantined:
            artifacts.table("data quarantine", report.quarantined, "Shards that are passed over")
        require_valid(report)
        if report.needs_review:
            reasons = sorted({each["reason"] for each in report.quarantined})
            run.note(
                f"{len(report.quarantined)} data shards are in quarantine: needs review "
                f"({'; '.join(reasons)[:200]})"
            )
        return {
            "documents": report.documents,
            "checks": len(report.checks),
            "quarantined": report.quarantined,
            "needs_review": report.needs_review,
            "columns": report.columns,
            "report": str(run.work_dir / "validation.json"),
        }

    return run.stage(
        "validate-data",
        {"snapshot": snapshot["digest"]},
        work,
        describe=lambda o: (
            f"{o['checks']} expectations on {o['documents']} samples, "
            f"{len(o['quarantined'])} shards quarantined"
        ),
    )


@task(name="publish-base-model", cache_policy=NO_CACHE)
def publish_base_model(run: Run, snapshot: dict[str, Any]) -> StageResult:
    """Train the base model up to its recorded budget and publish it as version 1.

    The version's URL carries the digest of what it was made from, so that another base (another
    size, other data) is another prefix and never a conflict.
    """
    profile = run.runtime.profile
    inputs = {
        "model": profile.model.model_dump(mode="json"),
        "snapshot": snapshot["digest"],
        "recipe": profile.training.model_dump(mode="json", include=BASE_RECIPE),
    }
    model_id = f"{profile.model.model_id}-{digest_of(inputs)[:8]}"

    def work() -> dict[str, Any]:
        url = published_url(run, model_id, "1")
        trained = _train_base(run, snapshot, url)
        manifest = run.manifest(url)
        return {
            "model_id": model_id,
            "version": "1",
            "url": url,
            "manifest_digest": manifest.digest,
            "parameters": trained.parameters,
            "steps": trained.steps,
            "loss": trained.final_loss,
        }

    return run.stage(
        "base",
        inputs,
        work,
        still_true=lambda o: (
            run.store.exists(f"{o['url']}/manifest.json")
            and fetch_manifest(o["url"], run.store).digest == o["manifest_digest"]
        ),
        describe=lambda o: f"{o['model_id']} v{o['version']}, {o['parameters']:,} parameters",
    )


@task(name="publish-directory", cache_policy=NO_CACHE)
def publish_directory(run: Run, directory: str, model_id: str, version: str) -> StageResult:
    """Digest the model in ``directory`` and upload it with its manifest; the same bytes twice are
    uploaded once. Raises Conflict where the version already has other bytes, and Cancelled where
    the run is cancelled before the version is there."""
    url = published_url(run, model_id, version)
    began = time.monotonic()
    with publish_progress(run, f"{model_id} {version}") as progress:
        manifest = _publish(run, Path(directory), model_id, version, **progress)
    output = _published(manifest, url)
    said = f"{format_bytes(manifest.total_size)} in {len(manifest.files)} files at {url}"
    seconds = run.did("publish", began, said)
    return StageResult(stage="publish", output=output, seconds=seconds, reused=None)


@task(name="import-model", cache_policy=NO_CACHE)
def import_remote(run: Run, url: str) -> StageResult:
    """Bring the model of a hub or a registry (``hf://…``, ``oci://…``) into the object store, at
    the revision that ``url`` names now; one that is there is not read again.

    Raises AccessDenied for a repository that ``security.source_repositories`` does not have, and
    what ``import_model`` does."""
    runtime, profile = run.runtime, run.runtime.profile
    began = time.monotonic()
    remote = remote_model(allowed_source(url, runtime), profile)
    place = import_place(remote, runtime)
    with publish_progress(run, f"{remote.model_id} {remote.version}") as progress:
        manifest = import_model(
            remote,
            place,
            store=run.store,
            cap_bytes=origin_cap_bytes(remote.total_size),
            link_mbit=profile.cluster.link_mbit,
            piece_bytes=profile.relay.piece_bytes,
            chunk_bytes=profile.relay.chunk_bytes,
            piece_hash=profile.security.piece_hash,
            **progress,
        )
    output = _published(manifest, place) | {"source": remote.url}
    said = f"{format_bytes(manifest.total_size)} of {remote.url} at {place}"
    seconds = run.did("import", began, said)
    return StageResult(stage="import", output=output, seconds=seconds, reused=None)


def _publish(run: Run, directory: Path, model_id: str, version: str, **more: Any) -> Manifest:
    profile = run.runtime.profile
    return publish_model(
        directory,
        published_url(run, model_id, version),
        model_id=model_id,
        version=version,
        store=run.store,
        link_mbit=profile.cluster.link_mbit,
        piece_bytes=profile.relay.piece_bytes,
        chunk_bytes=profile.relay.chunk_bytes,
        piece_hash=profile.security.piece_hash,
        **more,
    )


def _published(manifest: Manifest, url: str) -> dict[str, Any]:
    return {
        "model_id": manifest.model_id,
        "version": manifest.version,
        "url": url,
        "manifest_digest": manifest.digest,
        "bytes": manifest.total_size,
        "chunks": len(manifest.chunks),
        "pieces": manifest.piece_count,
    }


def published_url(run: Run, model_id: str, version: str) -> str:
    """Return where ``version`` of ``model_id`` is published in this installation's bucket."""
    return f"{run.runtime.models_url}/{model_id}/{version}"


def snapshot_reference(run: Run, url: str) -> dict[str, Any]:
    """Return what stages need to know of the snapshot at ``url``: its url, digest and sizes."""
    return _reference(load_snapshot(url, run.store))


def data_settings(settings: DataSettings, changes: dict[str, Any] | None) -> DataSettings:
    """Return ``settings`` with ``changes``; raises InvalidInput naming the one that cannot be."""
    try:
        return DataSettings.model_validate(settings.model_dump() | (changes or {}))
    except ValidationError as error:
        first = error.errors()[0]
        raise InvalidInput(
            "data setting is not acceptable",
            got=f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']}",
            wanted=f"one of {', '.join(sorted(DataSettings.model_fields))}",
        ) from error


def fingerprint(source: str, settings: DataSettings, store: ObjectStore) -> str:
    """Return what tells cheaply whether ``source``, or a file its samples are read with, has
    changed since: names, sizes and times, or ETags.

    The snapshot itself is named by its content; this only decides whether to read it all again.
    """
    beside = [*settings.features, *([] if settings.tokenizer == "bytes" else [settings.tokenizer])]
    return digest_of([_state(each, store) for each in (source, *beside)])


def _state(source: str, store: ObjectStore) -> list[Any]:
    if source == "stdlib":
        return [sys.version, sys.prefix]
    if source.startswith("s3://"):
        found = store.list(source) or ([store.head(source)] if store.exists(source) else [])
        return [[each.url, each.size, each.etag] for each in found]
    root = Path(source)
    files = [root] if root.is_file() else sorted(each for each in root.rglob("*") if each.is_file())
    stats = [(str(each.relative_to(root)), each.stat()) for each in files]
    return [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats]


def _train_base(run: Run, snapshot: dict[str, Any], url: str) -> BaseResult:
    """Train the base in a process on a node, which publishes it at ``url``."""
    profile = run.runtime.profile
    spec = BaseSpec(
        publish_url=url,
        snapshot_url=snapshot["url"],
        snapshot_digest=snapshot["digest"],
        purpose=profile.data.purpose,
        model=profile.model,
        training=profile.training,
    )

    def on_event(line: dict[str, Any]) -> None:
        if line.get("event") == "step":
            step, total = int(line["step"]), max(profile.model.base_steps, 1)
            run.tell("base", step / total, f"step {step}/{total}, loss {line['data']['loss']:.3f}")

    node = run.trainers(run.nodes())[0].worker_id
    with run.fleet() as fleet:
        ended = fleet.run_process(
            node,
            argv=[PYTHON, "-m", "paceline.training.base"],
            input_json=spec.model_dump_json(),
            on_event=on_event,
            deadline_s=BASE_DEADLINE_S,
        )
    if ended.exit_code != 0 or not ended.last_line:
        raise TrainingFailed(
            "the base model could not be trained",
            got=f"exit code {ended.exit_code}: {ended.stderr_tail.strip()[-400:]}",
            wanted="a model",
            where=node,
            do="Run the same command again; read the log of its worker if it fails the same way.",
        )
    return BaseResult.model_validate_json(ended.last_line)


def _reference(snapshot: Snapshot) -> dict[str, Any]:
    return {
        "url": snapshot.url,
        "digest": snapshot.digest,
        "documents": snapshot.record.documents,
        "bytes": snapshot.record.total_bytes,
        "tokens": snapshot.tokens,
        "format": snapshot.record.format or "text",
        "skipped": snapshot.record.skipped,
        "skipped_examples": list(snapshot.record.skipped_examples[:SKIPPED_NAMED]),
        "cut_at_bytes": snapshot.record.cut_at_bytes,
    }


# How far a publish is, for a terminal, Prefect's page and its log: worker threads store their
# progress, and a thread of ours shows it once a second. So a page that is slow to answer delays no
# upload, and a cancel in Prefect ends a publish in its middle.


@contextmanager
def publish_progress(run: Run, name: str) -> Iterator[dict[str, Any]]:
    """Yield the keywords of ``publish_model`` that show its progress and stop it.

    Raises Cancelled where the flow run was cancelled in Prefect, before or meanwhile.
    """
    stop_if_cancelled()
    shown = _ShownProgress(run, name)
    over = threading.Event()
    context = contextvars.copy_context()  # Prefect's: the page and the log are the task's

    def look() -> None:
        while not over.wait(LOOK_S):
            shown.look()

    thread = threading.Thread(
        target=context.run, args=(look,), name="publish-progress", daemon=True
    )
    thread.start()
    try:
        with noticed() as stopping:
            yield {"on_progress": shown, "stopping": stopping}
    finally:
        over.set()
        thread.join(10.0)
    shown.look(is_over=True)


class _ShownProgress:
    """Stores each step of the worker threads; ``look`` shows each stage's newest."""

    def __init__(self, run: Run, name: str) -> None:
        self._run = run
        self._page = artifacts.Progress(f"publish {name}", f"publish {name}")
        self._format = ProgressFormatter()
        self._newest: dict[str, PublishProgress] = {}  # by stage, in their order
        self._done: set[str] = set()
        self._logged_s = time.monotonic()

    def __call__(self, moved: PublishProgress) -> None:
        self._newest[moved.stage] = moved

    def look(self, *, is_over: bool = False) -> None:
        """Show how far it is by now."""
        stages = list(self._newest.items())
        for number, (stage, moved) in enumerate(stages):
            if stage in self._done:
                continue
            is_done = is_over or moved.is_over or number + 1 < len(stages)
            text, share = self._format.said(moved, time.monotonic()), moved.share
            self._run.tell(stage, 1.0 if is_done else share, text, done=is_done)
            whole = share if stage == IMPORT else ((stage == UPLOAD) + share) / STAGES
            self._page.show(1.0 if is_over else whole, f"{stage}: {text}")
            if is_done:
                self._done.add(stage)
            elif time.monotonic() - self._logged_s >= LOG_S:
                self._logged_s = time.monotonic()
                logger.info("%s: %s", stage, text)
