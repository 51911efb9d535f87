"""Checkpoint location of a single-machine training: a local directory or an S3 bucket.

Endpoint and credentials come from the profile ([objects]) and the environment, as for `paceline
publish`; they are read when needed and never written to disk. An unusable location is refused
before any data are read. Does not depend on ranks.
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
HELD_FILE = "held.json"  # the process that trains this job now
TOLD_EVERY_S = 15.0  # renewal period of HELD_FILE
FRESH_S = 60.0  # an older HELD_FILE belongs to a dead process
MOST_BYTES = 4 * 1024 * 1024


def is_remote(checkpoints: str | None) -> bool:
    """Return whether checkpoints go to an object store."""
    return checkpoints is not None and checkpoints.startswith("s3://")


def place_of(checkpoints: str | None, output: Path, profile: Profile) -> tuple[str, Endpoints]:
    """Return the URL prefix of the checkpoints and the server endpoints it needs.

    Raises InvalidInput for a malformed URL, AccessDenied without credentials.
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


def earlier_run(job: TrainJob, store: ObjectStore) -> str | None:
    """Return the run id of an earlier training of the same job; None without one."""
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
    """Store the job beside its checkpoints; yield a function that copies its result to ``here``.

    Does nothing where both are the same directory. During the ``with`` it renews a claim beside
    the checkpoints that this machine trains the job, and warns where another machine has one.
    """
    top = join_url(job.checkpoint_url, job.job_id)
    if top == DiskStore.url_of(here):  # locked; the consumer of rank events stores the job there
        yield lambda _: None
        return
    store.put_bytes(join_url(top, JOB_FILE), canonical_json(job))

    def keep(result: TrainResult) -> None:
        try:
            here.mkdir(parents=True, exist_ok=True)
            (here / RESULT_FILE).write_bytes(canonical_json(result))
            if not (here / JOB_FILE).exists():  # trained on another machine
                (here / JOB_FILE).write_bytes(canonical_json(job))
        except OSError as error:
            log.warning("result is not kept here path=%s why=%s", here, error.strerror)

    with _TrainingClaim(join_url(top, HELD_FILE), store):
        yield keep


class _TrainingClaim:
    """Renews a claim object in the store while this process trains. Advisory: it locks nothing."""

    def __init__(self, url: str, store: ObjectStore) -> None:
        self._url, self._store = url, store
        self._me = f"{platform.node()}:{os.getpid()}:{secrets.token_hex(4)}"
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="holder", daemon=True)

    def __enter__(self) -> _TrainingClaim:
        try:
            record = json.loads(self._store.get_bytes(self._url, MOST_BYTES))
            age_s, who = time.time() - float(record["at"]), str(record["who"])
        except (SourceMissing, TemporaryError, ValueError, KeyError, TypeError):
            age_s, who = FRESH_S, ""
        node, _, pid = who.rpartition(":")[0].rpartition(":")
        if node == platform.node() and not Path("/proc", pid).exists():
            age_s = FRESH_S  # that process is gone
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
            with contextlib.suppress(PacelineError):  # an unreachable store gets the next renewal
                record = {"who": self._me, "at": time.time()}
                self._store.put_bytes(self._url, json.dumps(record).encode())
            if self._over.wait(TOLD_EVERY_S):
                break
        with contextlib.suppress(PacelineError):
            self._store.delete(self._url)
