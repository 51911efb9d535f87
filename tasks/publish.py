"""Models brought into the installation's bucket: from a directory, a hub or a registry."""

from __future__ import annotations

import contextvars
import logging
import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from paceline.manifest import (
    IMPORT,
    UPLOAD,
    Manifest,
    ProgressFormatter,
    PublishProgress,
    fetch_manifest,
    import_model,
    publish_model,
)
from paceline.models import weight_files, weights_digest
from paceline.plan import origin_cap_bytes
from paceline.registry import allowed_remote_model, import_place, published_reference
from paceline.storage import is_remote
from paceline.tasks._support import artifacts, stages
from paceline.tasks._support.cancelling import noticed, stop_if_cancelled
from paceline.tasks._support.run import Run, StageResult
from paceline.units import counted, size

logger = logging.getLogger(__name__)

LOOK_S = 1.0
LOG_S = 10.0
STAGES = 2  # digest, upload


@stages.stage("publish-given-base", retries=2)
def publish_given_base(run: Run, model: str) -> StageResult:
    """Return the base that ``model`` names, once it is in the object store.

    A directory is published as version 1 of an id with the digest of its weights, hf://… and
    oci://… are imported, MODEL_ID/VERSION is there already. Raises InvalidInput for pickled
    weights and for what is none of these, SourceMissing where there is no such model, and what
    ``import_remote`` does.
    """
    if is_remote(model):
        return import_remote(run, model)
    directory = Path(model)
    if not directory.is_absolute():
        began = time.monotonic()
        model_id, version = published_reference(model)
        url = published_url(run, model_id, version)
        output = _published(run.manifest(url), url)
        seconds = run.finish("base", began, f"{model_id} {version} at {url}")
        return StageResult(stage="base", output=output, seconds=seconds, reused=None)
    weights = weights_digest(directory)
    model_id = f"{run.runtime.profile.model.model_id}-{weights[:8]}"

    def work() -> dict[str, Any]:
        return publish_base(run, directory, model_id)

    return run.stage(
        "base",
        {"model": model, "weights": weights},
        work,
        still_true=lambda o: is_published(run, o),
        describe=lambda o: f"{o['model_id']} v{o['version']}, {o['parameters']:,} parameters",
    )


def publish_base(run: Run, directory: Path, model_id: str) -> dict[str, Any]:
    """Publish the model in ``directory`` as version 1; return the output of a stage ``base``."""
    with publish_progress(run, f"{model_id} 1") as progress:
        manifest = _publish(run, directory, model_id, "1", **progress)
    found = _published(manifest, published_url(run, model_id, "1"))
    return found | {"parameters": _parameter_count(directory)}


@stages.stage("publish-directory", retries=2)
def publish_directory(run: Run, directory: str, model_id: str, version: str) -> StageResult:
    """Digest the model in ``directory`` and upload it with its manifest; the same bytes twice are
    uploaded once. Raises Conflict where the version already has other bytes, and Cancelled where
    the run is cancelled before the version is there."""
    url = published_url(run, model_id, version)
    began = time.monotonic()
    with publish_progress(run, f"{model_id} {version}") as progress:
        manifest = _publish(run, Path(directory), model_id, version, **progress)
    output = _published(manifest, url)
    said = f"{size(manifest.total_size)} in {counted(len(manifest.files), 'file')} at {url}"
    seconds = run.finish("publish", began, said)
    return StageResult(stage="publish", output=output, seconds=seconds, reused=None)


@stages.stage("import-model")
def import_remote(run: Run, url: str) -> StageResult:
    """Bring the model of a hub or a registry (``hf://…``, ``oci://…``) into the object store, at
    the revision that ``url`` names now; one that is there is not read again.

    Raises AccessDenied for a repository that ``security.source_repositories`` does not have, and
    what ``import_model`` does."""
    runtime, profile = run.runtime, run.runtime.profile
    began = time.monotonic()
    remote = allowed_remote_model(url, runtime)
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
    said = f"{size(manifest.total_size)} of {remote.url} at {place}"
    seconds = run.finish("import", began, said)
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


def is_published(run: Run, output: dict[str, Any]) -> bool:
    """Return whether the version that a stage's ``output`` tells of is in the bucket."""
    return (
        run.store.exists(f"{output['url']}/manifest.json")
        and fetch_manifest(output["url"], run.store).digest == output["manifest_digest"]
    )


def published_url(run: Run, model_id: str, version: str) -> str:
    """Return where ``version`` of ``model_id`` is published in this installation's bucket."""
    return f"{run.runtime.models_url}/{model_id}/{version}"


def _parameter_count(directory: Path) -> int:
    """Return how many weights the safetensors files in ``directory`` hold."""
    from safetensors import safe_open

    count = 0
    for file in weight_files(directory):
        with safe_open(file, framework="numpy") as opened:
            shapes = (opened.get_slice(name).get_shape() for name in opened.keys())  # noqa: SIM118
            count += sum(map(math.prod, shapes))
    return count


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
        begun = list(self._newest.items())
        for number, (stage, moved) in enumerate(begun):
            if stage in self._done:
                continue
            is_done = is_over or moved.is_over or number + 1 < len(begun)
            text, share = self._format.said(moved, time.monotonic()), moved.share
            self._run.report(stage, 1.0 if is_done else share, text, done=is_done)
            whole = share if stage == IMPORT else ((stage == UPLOAD) + share) / STAGES
            self._page.show(1.0 if is_over else whole, f"{stage}: {text}")
            if is_done:
                self._done.add(stage)
            elif time.monotonic() - self._logged_s >= LOG_S:
                self._logged_s = time.monotonic()
                logger.info("%s: %s", stage, text)
