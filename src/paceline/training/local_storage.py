"""Where a training on this machine keeps its checkpoints: on its disk, or in somebody's S3.

Endpoint and credentials are the profile's ([objects]) and the environment's, as for `paceline
publish`; they are read where they are needed, and never written down. What is refused is refused
before any data are read. Knows no ranks.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import platform
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from pydantic import ValidationError

from paceline.config import Endpoints, Profile, object_access
from paceline.errors import PacelineError, SourceMissing, TemporaryError
from paceline.schemas.base import canonical_json
from paceline.schemas.training import TrainJob, TrainResult
from paceline.storage import DiskStore, ObjectStore, join_url, parse_url

log = logging.getLogger(__name__)

JOB_FILE, RESULT_FILE = "job.json", "result.json"
HELD_FILE = "held.json"  # who trains this job now
TOLD_EVERY_S = 15.0  # by who trains
FRESH_S = 60.0  # a word that is older is of one that died
MOST_BYTES = 4 * 1024 * 1024


def is_remote(checkpoints: str | None) -> bool:
    """Return whether checkpoints go to an object store."""
    return checkpoints is not None and checkpoints.startswith("s3://")


def place_of(checkpoints: str | None, output: Path, profile: Profile) -> tuple[str, Endpoints]:
    """Return the URL that checkpoints go below, and the servers that it takes.

    Raises InvalidInput for a URL that is none, AccessDenied where there are no credentials.
    """
    if checkpoints is None:
        return DiskStore.url_of(output / "checkpoints"), Endpoints()
    if "://" not in checkpoints:
        return DiskStore.url_of(checkpoints), Endpoints()
    if not is_remote(checkpoints):
        return DiskStore.url_of(DiskStore.path_of(checkpoints)), Endpoints()
    parse_url(checkpoints)
    return checkpoints.rstrip("/"), Endpoints(s3_url=object_access(profile).endpoint_url)


def require_writable(url: str, store: ObjectStore) -> None:
    """Raise what keeps an object below ``url`` from being written, read and deleted.

    AccessDenied for credentials, SourceMissing for a bucket, ServiceUnavailable for a server.
    """
    if isinstance(store, DiskStore):
        return  # whoever makes the directories says so
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


def earlier_run(job: TrainJob, store: ObjectStore) -> str | None:
    """Return the run under which this very job was trained before; None where it was not."""
    where = join_url(job.checkpoint_url, job.job_id, JOB_FILE)
    try:
        return TrainJob.model_validate_json(store.get_bytes(where, MOST_BYTES)).run_id
    except SourceMissing:
        return None
    except (PacelineError, ValidationError) as error:
        log.warning("the job's record cannot be read: a new run begins url=%s why=%s", where, error)
        return None


@contextlib.contextmanager
def recorded(
    job: TrainJob, store: ObjectStore, here: Path
) -> Iterator[Callable[[TrainResult], None]]:
    """Keep the job beside its checkpoints, and its result in ``here`` too, where these are two.

    Meanwhile says every few seconds beside them that this machine trains the job, and warns where
    another one seems to.
    """
    top = join_url(job.checkpoint_url, job.job_id)
    if top == DiskStore.url_of(here):  # locked, and whoever follows the ranks keeps the job there
        yield lambda _: None
        return
    store.put_bytes(join_url(top, JOB_FILE), canonical_json(job))

    def keep(result: TrainResult) -> None:
        try:
            here.mkdir(parents=True, exist_ok=True)
            (here / RESULT_FILE).write_bytes(canonical_json(result))
            if not (here / JOB_FILE).exists():  # it was trained elsewhere
                (here / JOB_FILE).write_bytes(canonical_json(job))
        except OSError as error:
            log.warning("result is not kept here path=%s why=%s", here, error.strerror)

    with _Holder(join_url(top, HELD_FILE), store):
        yield keep


class _Holder:
    """Says in the store who trains a job, while it does. Advice only: nothing is locked by it."""

    def __init__(self, url: str, store: ObjectStore) -> None:
        self._url, self._store = url, store
        self._me = f"{platform.node()}:{os.getpid()}:{secrets.token_hex(4)}"
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="holder", daemon=True)

    def __enter__(self) -> _Holder:
        try:
            record = json.loads(self._store.get_bytes(self._url, MOST_BYTES))
            age_s, who = time.time() - float(record["at"]), str(record["who"])
        except (SourceMissing, TemporaryError, ValueError, KeyError, TypeError):
            age_s, who = FRESH_S, ""
        node, _, pid = who.rpartition(":")[0].rpartition(":")
        if node == platform.node() and not Path("/proc", pid).exists():
            age_s = FRESH_S  # it was killed
        if abs(age_s) < FRESH_S:
            log.warning(
                "another machine seems to train this job: %s said so %.0f s ago; two at once waste "
                "each other's checkpoints url=%s", node, age_s, self._url,
            )  # fmt: skip
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(TOLD_EVERY_S)

    def _run(self) -> None:
        while True:
            with contextlib.suppress(PacelineError):  # a store that is away hears it later
                record = {"who": self._me, "at": time.time()}
                self._store.put_bytes(self._url, json.dumps(record).encode())
            if self._over.wait(TOLD_EVERY_S):
                break
        with contextlib.suppress(PacelineError):
            self._store.delete(self._url)
