"""Publishes a model to object storage, ``manifest.json`` last, and fetches manifests.

A version with a manifest is complete; one without is not published yet. A repeated publish uploads
nothing, a publish after a crash resumes, and a version never changes its content; of two that
publish different files as one version, one wins (``Claim``). A version older than the newest one
beside it (``…/MODEL/VERSION``) is refused.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from pydantic import Field, ValidationError

from paceline.errors import (
    AccessDenied,
    Cancelled,
    Conflict,
    InvalidInput,
    InvalidManifest,
    ServiceUnavailable,
    SourceMissing,
)
from paceline.manifest.build import ScannedFile, check_name, content_path, digest, scan_model
from paceline.manifest.finite import WeightsScan, ties_embeddings, unequal_ends
from paceline.manifest.model import MANIFEST_FILE, Manifest, is_older, version_key
from paceline.manifest.parse import MAX_MANIFEST_BYTES, parse_manifest
from paceline.manifest.progress import (
    UPLOAD,
    ProgressCallback,
    ProgressCounter,
    ignore_progress,
    results,
)
from paceline.manifest.signing import TRUST_ANY, TrustPolicy, sign_manifest
from paceline.manifest.sizes import MAX_PIECE, MIN_ALLOWED_PIECE, Sizes, choose_sizes
from paceline.schemas import Count, PieceHash, Published, Record, Sha256, parse_json
from paceline.storage import ObjectStore, join_url, parse_url
from paceline.system import write_durably

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

FILES_AT_ONCE = 4
CLAIM_FILE = f"{MANIFEST_FILE}.claim"
NOT_FINITE_FILE, UNTIED_FILE = f"{MANIFEST_FILE}.not-finite", f"{MANIFEST_FILE}.tied-differ"
CONFIG_FILE = "config.json"  # says which weights are tied
MAX_CONFIG_BYTES = 16 * 1024 * 1024
MAX_RECORD_BYTES = 4096
MAX_TENSOR_NAME = 500  # at most 3,000 bytes of JSON
ATTEMPTS = 5  # claims that are released while they are read

log = logging.getLogger(__name__)
Stored = TypeVar("Stored", bound=Record)


def published_record(manifest: Manifest, url: str, store: ObjectStore, seconds: float) -> Published:
    """Return what was published below ``url`` with ``store``, in ``seconds``."""
    return Published(
        model_id=manifest.model_id,
        version=manifest.version,
        url=url.rstrip("/"),
        manifest_digest=manifest.digest,
        bytes=manifest.total_size,
        files=len(manifest.files),
        chunks=len(manifest.chunks),
        pieces=manifest.piece_count,
        chunk_size=manifest.chunk_bytes,
        piece_size=manifest.piece_bytes,
        piece_hash=manifest.piece_hash,
        uploaded_files=store.uploaded_files,
        resumed_bytes=store.reused_bytes,
        signed_by=manifest.signature.public_key if manifest.signature else None,
        seconds=seconds,
    )


def publish_model(
    directory: Path | str,
    url: str,
    *,
    model_id: str,
    version: str,
    store: ObjectStore,
    link_mbit: float,
    piece_bytes: int = 0,
    chunk_bytes: int = 0,
    piece_hash: PieceHash | None = None,
    key: Ed25519PrivateKey | None = None,
    allow_older: bool = False,
    on_progress: ProgressCallback = ignore_progress,
    stopping: threading.Event | None = None,
) -> Manifest:
    """Upload the model in ``directory`` below ``url`` and return its manifest, signed by ``key``.

    If the same content is already there, nothing is uploaded (a lost file is restored); other
    content at that place raises Conflict and changes nothing, and so does other content that is
    being published there, where the server has conditional writes. Sizes of 0 follow from model and
    link, and ``piece_hash`` is "blake3" unless it is "sha256"; where a version is published or
    claimed there, those left open are as it has them, so that a faster link does not turn the same
    bytes into another manifest. A version older than the newest one beside it raises Conflict,
    unless ``allow_older``. ``on_progress`` receives the progress of digesting and then of
    uploading, from threads of their own. Soon after ``stopping`` is set the call raises Cancelled,
    and no manifest is published; a file that fails sets ``stopping`` too.
    """
    stopping = stopping or threading.Event()
    check_name("model_id", model_id)
    check_name("version", version)
    root = Path(directory)
    found = scan_model(root)
    _refuse_foreign(root, found)
    published = _published(url, store)
    if published is None and not allow_older:
        _refuse_older(url, version, store)
    begun = published or read_record(Claim, join_url(url, CLAIM_FILE), store)
    sizes = _sizes(found, begun, link_mbit, piece_bytes, chunk_bytes)
    scans: dict[str, WeightsScan] = {}
    manifest = digest(
        root,
        found,
        sizes,
        model_id=model_id,
        version=version,
        piece_hash=piece_hash or (begun.piece_hash if begun else "blake3"),
        on_progress=on_progress,
        stopping=stopping,
        scans=scans,
    )
    if published and published.digest != manifest.digest:
        raise _conflict(url, published, manifest)
    claimed = published is None and claim_version(url, store, manifest)
    if claimed and (published := _published(url, store)) is not None:  # the claim is over
        store.delete(join_url(url, CLAIM_FILE))
        if published.digest != manifest.digest:
            raise _conflict(url, published, manifest)
    if key is not None:
        manifest = sign_manifest(manifest, key)
    elif published:
        manifest = published  # its signature stays valid
    uploaded = _upload(root, found, url, store, manifest, on_progress, stopping)
    record_unsound(url, store, manifest, scans)
    if manifest != published:
        if stopping.is_set():
            raise Cancelled("the publish was stopped", where=url, do="Run it again.")
        _put_manifest(url, store, manifest, published, claimed)
    if claimed:
        store.delete(join_url(url, CLAIM_FILE))
    log.info("published %s/%s digest=%s files=%d", model_id, version, manifest.digest, uploaded)
    return manifest


def _put_manifest(
    url: str, store: ObjectStore, manifest: Manifest, published: Manifest | None, claimed: bool
) -> None:
    """Store the manifest of uploaded files; raises Conflict where another publisher was faster."""
    now = _published(url, store) if published is None else published
    if now is not None and now.digest != manifest.digest:
        raise _conflict(url, now, manifest)
    where, raw = join_url(url, MANIFEST_FILE), manifest.to_bytes()
    if claimed and now is None:
        claim_version(url, store, manifest)  # it is still ours
        store.put_if_absent(where, raw)
    else:
        store.put_bytes(where, raw)
    now = fetch_manifest(url, store)  # of two concurrent publishers one manifest remains
    if now.digest != manifest.digest:
        raise _conflict(url, now, manifest)


def fetch_manifest(
    url: str, store: ObjectStore | None, policy: TrustPolicy = TRUST_ANY
) -> Manifest:
    """Return the manifest of the version below ``url``: ``s3://bucket/prefix`` or a directory.

    Raises SourceMissing where no complete version is published there, InvalidManifest,
    UntrustedManifest where ``policy`` does not accept its signature, and the store's errors.
    """
    if url.startswith("s3://"):
        if store is None:
            raise InvalidInput("no object store for this URL", got=url, wanted="a store")
        raw = store.get_bytes(join_url(url, MANIFEST_FILE), MAX_MANIFEST_BYTES)
    else:
        raw = _read_local(Path(url))
    try:
        manifest = parse_manifest(raw)
    except InvalidManifest as error:
        where = f"{error.where} in {url}" if error.where else url
        do = error.do or "Delete that manifest.json and publish again: files that are there stay."
        raise error.as_kind(InvalidManifest, where=where, do=do) from error
    policy.check(manifest, where=url)
    return manifest


class Unsound(Record):
    """What is stored beside a version whose weights are not finite, or are tied and differ; one
    without it is sound, or was published without numpy, or by a release before."""

    digest: Sha256  # of its manifest
    tensor: str  # the first that is not finite, and its file; or which tied ones differ


def record_unsound(
    url: str, store: ObjectStore, manifest: Manifest, scans: Mapping[str, WeightsScan]
) -> None:
    """Store beside the version below ``url``, whose config is there, what ``scans`` of its weights
    files found: which tensor is not finite, or which tied ones differ."""
    odd = [f"{scan.found} in {path}" for path, scan in scans.items() if scan.found]
    unequal = "" if odd else unequal_ends(scans.values())
    if unequal and not _ties_embeddings(url, store, manifest):
        unequal = ""
    for name, found in ((NOT_FINITE_FILE, min(odd, default="")), (UNTIED_FILE, unequal)):
        if found:
            fact = Unsound(digest=manifest.digest, tensor=found[:MAX_TENSOR_NAME])
            store.put_bytes(join_url(url, name), fact.model_dump_json().encode())
            what = name.removeprefix(f"{MANIFEST_FILE}.")
            version = f"{manifest.model_id}/{manifest.version}"
            log.warning("%s cannot be trained (%s): %s", version, what, fact.tensor)


def _ties_embeddings(url: str, store: ObjectStore, manifest: Manifest) -> bool:
    if not any(f.path == CONFIG_FILE and f.size <= MAX_CONFIG_BYTES for f in manifest.files):
        return False
    try:
        found = parse_json(store.get_bytes(join_url(url, CONFIG_FILE), MAX_CONFIG_BYTES))
    except ValueError:  # no config: nothing trains it
        return False
    return isinstance(found, dict) and ties_embeddings(found)


def require_sound_weights(url: str, store: ObjectStore) -> None:
    """Raise InvalidInput where its publish found NaN, infinity or tied weights that differ in the
    version below ``url``."""
    for name in (NOT_FINITE_FILE, UNTIED_FILE):
        fact = read_record(Unsound, join_url(url, name), store)
        if fact is None:
            continue
        raw = store.get_bytes(join_url(url, MANIFEST_FILE), MAX_MANIFEST_BYTES)
        if fact.digest != parse_manifest(raw).digest:
            continue
        if name == UNTIED_FILE:
            raise InvalidInput(
                "tied weights differ",
                got=fact.tensor,
                wanted="the same values, or tie_word_embeddings false",
                where=url,
            )
        raise InvalidInput(
            "weights are not finite",
            got=f"NaN or infinity in {fact.tensor}",
            where=url,
            do="Take another checkpoint of this model.",
        )


def write_manifest(directory: Path | str, manifest: Manifest) -> Path:
    """Write ``manifest.json`` into ``directory`` atomically and durably, and return its path."""
    path = Path(directory) / MANIFEST_FILE
    write_durably(path, manifest.to_bytes(), 0o666)
    return path


def _refuse_foreign(root: Path, found: list[ScannedFile]) -> None:
    """Raise InvalidManifest where the model has a ``manifest.json`` of its own: ours would replace
    it, and the model would arrive without it. The same holds for the file name of the claim.
    """
    if any(file.path == CLAIM_FILE for file in found):
        raise InvalidManifest(
            f"the model has a file {CLAIM_FILE}",
            wanted="none: a publish that is under way keeps its claim there",
            where=root / CLAIM_FILE,
            do="Remove it, or rename it if the model needs it.",
        )
    try:
        parse_manifest(_read_local(root))
    except SourceMissing:
        return
    except InvalidManifest as error:
        raise InvalidManifest(
            f"the model has a {MANIFEST_FILE} that is not Paceline's",
            got=error.what,
            wanted="none, or the one of an earlier publish",
            where=root / MANIFEST_FILE,
            do="Rename it, or remove it if the model does not need it.",
        ) from error


def _published(url: str, store: ObjectStore) -> Manifest | None:
    try:
        return fetch_manifest(url, store)
    except SourceMissing:
        return None


def _sizes(
    found: list[ScannedFile],
    begun: Manifest | Claim | None,
    link_mbit: float,
    piece_bytes: int,
    chunk_bytes: int,
) -> Sizes:
    if begun and not piece_bytes and not chunk_bytes:
        return Sizes(begun.piece_bytes, begun.chunk_bytes)
    total = sum(file.size for file in found)
    return choose_sizes(total, link_mbit, piece_bytes=piece_bytes, chunk_bytes=chunk_bytes)


def _refuse_older(url: str, version: str, store: ObjectStore) -> None:
    """Raise Conflict where a newer version than ``version`` is published beside it."""
    parent, _, name = url.rstrip("/").rpartition("/")
    if name != version or not parse_url(f"{parent}/")[1]:
        return  # not a directory of versions: there is nothing to compare with
    for other in sorted(store.directories(parent), key=version_key, reverse=True):
        if is_older(version, other) and store.exists(join_url(parent, other, MANIFEST_FILE)):
            raise Conflict(
                "a newer version is published",
                got=version,
                wanted=f"later than {other}",
                where=parent,
                do="Choose a later version, or publish with --allow-older.",
            )


def _upload(
    root: Path,
    found: list[ScannedFile],
    url: str,
    store: ObjectStore,
    manifest: Manifest,
    on_progress: ProgressCallback,
    stopping: threading.Event,
) -> int:
    """Upload what is missing, largest files first, and return how many files that was.

    Size alone decides only for a version whose manifest was just compared; before that a file
    counts as uploaded when the object has the SHA-256 of the local file.
    """
    there = {info.url: info.size for info in store.list(url)}
    whole = join_url(url, MANIFEST_FILE) in there
    digests = {file.path: file.sha256 for file in manifest.files}
    missing = [
        file
        for file in sorted(found, key=lambda file: -file.size)
        if not (whole and there.get(join_url(url, file.path)) == file.size)
    ]
    account = ProgressCounter(UPLOAD, sum(file.size for file in missing), len(missing), on_progress)

    def upload(file: ScannedFile) -> None:
        path, target = content_path(root, file.path), join_url(url, file.path)
        sha256 = digests[file.path]
        if there.get(target) == file.size and store.holds(target, file.size, sha256):
            account.ended_file(file.size)
            return
        store.upload_file(
            path,
            target,
            sha256,
            stopping=stopping,
            on_bytes=account.moved,
            check=lambda: _require_unchanged(path, file),
        )
        account.ended_file()

    with ThreadPoolExecutor(FILES_AT_ONCE, thread_name_prefix="publish") as pool:
        running = [pool.submit(upload, file) for file in missing]
        results(pool, running, stopping)
    return len(missing)


def _require_unchanged(path: Path, file: ScannedFile) -> None:
    """Raise SourceChanged where the file differs from the one that was digested."""
    try:
        status = path.stat(follow_symlinks=False)
    except OSError as error:
        raise file.changed(error.strerror, path) from error
    file.require_unchanged(status, path)


def _read_local(directory: Path) -> bytes:
    path = directory / MANIFEST_FILE
    try:
        with path.open("rb") as file:
            return file.read(MAX_MANIFEST_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
        raise SourceMissing(
            "no manifest there", got=path, do="Publish the version there first."
        ) from error
    except PermissionError as error:
        raise AccessDenied(
            "manifest cannot be read", got=error.strerror, where=path, do="Check its mode."
        ) from error


def _conflict(url: str, published: Manifest, manifest: Manifest) -> Conflict:
    return Conflict(
        "another model is published at this version",
        got=f"{manifest.model_id}/{manifest.version} {manifest.digest}",
        wanted=f"{published.model_id}/{published.version} {published.digest}",
        where=url,
        do="Publish under a new version; a published version never changes.",
    )


# The claim of a publish in progress: which content a version is going to have.
#
# An object beside the model's files, written before the first of them by a conditional write
# (``If-None-Match: *``), so that of several publishers one wins, and deleted once the manifest is
# there. It names content and not a process: several processes may publish the same files, or one
# again after a crash. Where the server has no conditional writes there is no claim.


class Claim(Record):
    """The claim as stored: the content, the piece and chunk sizes, and the publisher."""

    digest: Sha256  # of the manifest
    piece_bytes: int = Field(ge=MIN_ALLOWED_PIECE, le=MAX_PIECE)
    chunk_bytes: Count
    piece_hash: PieceHash = "sha256"  # what a claim without it means
    by: str = Field(max_length=300)
    at: str = Field(max_length=40)


def read_record(kind: type[Stored], where: str, store: ObjectStore) -> Stored | None:
    """Return the record of work in progress at ``where``, or None; raises InvalidInput."""
    try:
        return kind.model_validate_json(store.get_bytes(where, MAX_RECORD_BYTES))
    except SourceMissing:
        return None
    except ValidationError as error:
        raise InvalidInput(
            f"the {kind.__name__} of a version cannot be read",
            got=str(error).splitlines()[0],
            where=where,
            do="Delete that object if nothing is being published or imported there.",
        ) from error


def claim_version(url: str, store: ObjectStore, manifest: Manifest) -> bool:
    """Claim the version below ``url`` for the content of ``manifest``; an existing claim of the
    same content counts as ours. Returns False where the server has no conditional writes.

    Raises Conflict where it is claimed for other content.
    """
    where = join_url(url, CLAIM_FILE)
    mine = Claim(
        digest=manifest.digest,
        piece_bytes=manifest.piece_bytes,
        chunk_bytes=manifest.chunk_bytes,
        piece_hash=manifest.piece_hash,
        by=f"{socket.gethostname()[:200]} pid {os.getpid()}",
        at=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    for _ in range(ATTEMPTS):
        written = store.put_if_absent(where, mine.model_dump_json().encode())
        if written is None:
            store.delete(where)
            log.info("no conditional writes at %s: there is no claim", store.endpoint_url)
            return False
        other = mine if written else read_record(Claim, where, store)
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
