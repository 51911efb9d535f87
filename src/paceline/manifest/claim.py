"""The claim of a publish in progress: which content a version is going to have.

An object beside the model's files, written before the first of them by a conditional write
(``If-None-Match: *``), so that of several publishers one wins, and deleted once the manifest is
there. It names content and not a process: several processes may publish the same files, or one
again after a crash. Where the server has no conditional writes there is no claim.
"""

from __future__ import annotations

import logging
import os
import socket
from datetime import UTC, datetime

from pydantic import Field, ValidationError

from paceline.errors import Conflict, InvalidInput, ServiceUnavailable, SourceMissing
from paceline.manifest.model import MANIFEST_FILE, Manifest
from paceline.manifest.sizes import LEAST_PIECE, MAX_PIECE
from paceline.schemas.base import Count, Record, Sha256
from paceline.storage import ObjectStore, join_url

CLAIM_FILE = f"{MANIFEST_FILE}.claim"
MAX_CLAIM_BYTES = 4096
ATTEMPTS = 5  # claims that are released while they are read

log = logging.getLogger(__name__)


class Claim(Record):
    """The claim as stored: the content, the piece and chunk sizes, and the publisher."""

    digest: Sha256  # of the manifest
    piece_bytes: int = Field(ge=LEAST_PIECE, le=MAX_PIECE)
    chunk_bytes: Count
    by: str = Field(max_length=300)
    at: str = Field(max_length=40)


def read_claim(url: str, store: ObjectStore) -> Claim | None:
    """Return the claim of the version below ``url``; None without one. Raises InvalidInput."""
    where = join_url(url, CLAIM_FILE)
    try:
        return Claim.model_validate_json(store.get_bytes(where, MAX_CLAIM_BYTES))
    except SourceMissing:
        return None
    except ValidationError as error:
        raise InvalidInput(
            "claim of a publish cannot be read",
            got=str(error).splitlines()[0],
            where=where,
            do="Delete that object if nothing is being published there.",
        ) from error


def claim(url: str, store: ObjectStore, manifest: Manifest) -> bool:
    """Claim the version below ``url`` for the content of ``manifest``; an existing claim of the
    same content counts as ours. Returns False where the server has no conditional writes.

    Raises Conflict where it is claimed for other content.
    """
    where = join_url(url, CLAIM_FILE)
    mine = Claim(
        digest=manifest.digest,
        piece_bytes=manifest.piece_bytes,
        chunk_bytes=manifest.chunk_bytes,
        by=f"{socket.gethostname()[:200]} pid {os.getpid()}",
        at=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    for _ in range(ATTEMPTS):
        written = store.put_if_absent(where, mine.model_dump_json().encode())
        if written is None:
            store.delete(where)
            log.info("no conditional writes at %s: there is no claim", store.endpoint_url)
            return False
        other = mine if written else read_claim(url, store)
        if other is None:
            continue
        if other.digest != manifest.digest:
            raise Conflict(
                "other files are being published as this version",
                got=f"{manifest.model_id}/{manifest.version} {manifest.digest}",
                wanted=f"{other.digest}, claimed by {other.by} at {other.at}",
                where=where,
                do="Publish under a new version. If that publish is over for good, publish with "
                "--discard-unfinished, or delete that object.",
            )
        return True
    raise ServiceUnavailable(
        "a claim comes and goes", got=f"{ATTEMPTS} attempts", where=where, do="Publish again."
    )


def discard_unfinished(url: str, store: ObjectStore) -> None:
    """Delete what ended publishes left below ``url``: parts of files, and a claim."""
    store.abort_uploads(url)
    store.delete(join_url(url, CLAIM_FILE))
