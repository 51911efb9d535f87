"""What a model is read from: a local directory, or an S3 prefix by ranged GETs.

Every object is pinned to the version and ETag of its first look-up in this process, so that
versions never mix. Pieces, digests and pacing are the reader's business.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from paceline.config import Runtime
from paceline.errors import (
    AccessDenied,
    InvalidInput,
    ServiceUnavailable,
    SourceChanged,
    SourceMissing,
)
from paceline.manifest import FileEntry, Manifest, TrustPolicy, fetch_manifest
from paceline.storage import MAX_URL, is_remote, is_within, remote_name

if TYPE_CHECKING:
    from paceline.storage import ObjectInfo, ObjectStore, Sign

log = logging.getLogger(__name__)

STEP = 1024 * 1024  # bytes of a local file per read

OnSocket = Callable[[socket.socket], None]


class RangeReader(Protocol):
    """Fills memory with part of a file of the model."""

    def pin(self, file: FileEntry) -> None:
        """Look up which content ``file`` has; ``stream`` does it where it was not done before."""

    def stream(
        self, file: FileEntry, offset: int, view: memoryview, on_socket: OnSocket
    ) -> Iterator[int]:
        """Fill ``view`` from ``offset`` of ``file`` and yield how many bytes are there after each
        step (the same number again where nothing arrived); raises SourceChanged, SourceMissing, …

        ``on_socket`` receives each connection, where there is one, before it is read.
        """


class DirectoryReader:
    """A model in a local directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def pin(self, file: FileEntry) -> None:
        """Do nothing: the size is compared with each range, the bytes with their digests."""

    def stream(
        self,
        file: FileEntry,
        offset: int,
        view: memoryview,
        on_socket: OnSocket,  # noqa: ARG002 (there is none)
    ) -> Iterator[int]:
        path, done = self._directory / file.path, 0
        try:
            with path.open("rb", buffering=0) as source:
                size = os.fstat(source.fileno()).st_size
                if size != file.size:
                    raise _changed(path, size, file.size)
                while done < len(view):
                    got = os.preadv(source.fileno(), [view[done : done + STEP]], offset + done)
                    if not got:
                        raise _changed(path, offset + done, file.size)
                    done += got
                    yield done
        except OSError as error:
            raise SourceMissing("cannot read the source", got=error.strerror, where=path) from error


class S3Reader:
    """A model below an S3 prefix; ``store`` is an ObjectStore. ``tell`` receives a message when the
    server stops answering, with the reaction, and when it answers again.
    """

    def __init__(
        self, url: str, store: ObjectStore, tell: Callable[[str], None] = log.warning
    ) -> None:
        self._tell = tell
        self._away_s: float | None = None  # since when the server sends nothing
        self._url = url
        self._store = store
        self._lock = threading.Lock()
        self._pinned: dict[str, ObjectInfo] = {}
        self._pinning: dict[str, threading.Lock] = {}

    def pin(self, file: FileEntry) -> None:
        self._head(file)

    def stream(
        self, file: FileEntry, offset: int, view: memoryview, on_socket: OnSocket
    ) -> Iterator[int]:
        pinned = self._head(file)
        before = 0
        for done in self._store.stream_range(
            self._object(file),
            offset,
            view,
            etag=pinned.etag,
            size=file.size,
            version_id=pinned.version_id,
            on_socket=on_socket,
            on_failed=self._failed,
        ):
            if done > before and self._away_s is not None:
                self._is_back()
            before = done
            yield done

    def _failed(self, error: ServiceUnavailable, silent_s: float) -> None:
        now_s = time.monotonic()
        with self._lock:
            first, self._away_s = self._away_s is None, self._away_s or now_s - silent_s
        if first:
            said = f"gave nothing for {silent_s:.0f} s" if silent_s >= 1 else "broke off"
            self._tell(
                f"{error.where} {said}: asked again on a new connection; "
                "the workers go on with what they have"
            )

    def _is_back(self) -> None:
        with self._lock:
            since_s, self._away_s = self._away_s, None
        if since_s is not None:
            self._tell(f"{self._url} answers again after {time.monotonic() - since_s:.0f} s")

    def _head(self, file: FileEntry) -> ObjectInfo:
        url = self._object(file)
        with self._lock:
            one_by_one = self._pinning.setdefault(url, threading.Lock())
        with one_by_one:
            if (known := self._pinned.get(url)) is None:
                known = self._store.head(url, self._failed)
                self._is_back()
                if known.size != file.size:
                    raise _changed(url, known.size, file.size)
                self._pinned[url] = known
            return known

    def _object(self, file: FileEntry) -> str:
        return f"{self._url.rstrip('/')}/{file.path}"


class LazyReader:
    """Opens its source at the first read, on the reading thread: importing boto3 takes a while."""

    def __init__(self, open_source: Callable[[str], RangeReader], url: str) -> None:
        self._open_source = open_source
        self._url = url
        self._lock = threading.Lock()
        self._reader: RangeReader | None = None

    def pin(self, file: FileEntry) -> None:
        self._opened().pin(file)

    def stream(
        self, file: FileEntry, offset: int, view: memoryview, on_socket: OnSocket
    ) -> Iterator[int]:
        return self._opened().stream(file, offset, view, on_socket)

    def _opened(self) -> RangeReader:
        with self._lock:
            if self._reader is None:
                self._reader = self._open_source(self._url)
            return self._reader


def below_roots(directory: Path, roots: Sequence[str | Path]) -> Path:
    """Return ``directory``, with its links followed, where one of ``roots`` holds it.

    Raises AccessDenied: a caller that names a source must not choose what an agent reads.
    """
    try:
        real = directory.resolve()
    except (OSError, ValueError, RuntimeError) as error:  # not a valid path, or a loop of links
        wanted = "a path that leads to a directory"
        raise InvalidInput(
            "not a source URL", got=repr(str(directory))[:200], wanted=wanted
        ) from error
    if any(real.is_relative_to(Path(root).resolve()) for root in roots):
        return real
    raise AccessDenied(
        "this directory is not a source",
        got=directory,
        wanted=f"one below {', '.join(str(root) for root in roots) or '(none allowed)'}, or s3://…",
        do="Add its root to security.source_roots in the profile.",
    )


def fetch_allowed_manifest(
    url: str, runtime: Runtime, store: ObjectStore | None = None
) -> Manifest:
    """Return the manifest at ``url``: an S3 URL, or a directory that the profile allows.

    There are no redirects and no other schemes, so that a caller cannot make the coordinator
    connect to a host of the caller's choice. Raises AccessDenied if the profile does not allow the
    source, UntrustedManifest if the profile requires a signature that the manifest lacks.
    """
    source = allowed_source(url, runtime)
    trust = TrustPolicy.of(runtime.profile.security)
    if store is None and source.startswith("s3://"):
        from paceline.storage import ObjectStore

        store = ObjectStore.from_runtime(runtime)
    return fetch_manifest(source, store, trust)


def allowed_source(url: str, runtime: Runtime) -> str:
    """Return ``url``, for a directory its path with links followed, where the profile allows that
    bucket or directory as a source. The one rule for callers, flows and agents.

    Raises InvalidInput for an invalid source URL, AccessDenied for one that is not allowed.
    """
    if len(url) > MAX_URL:  # each component of a path is looked up: quadratic time without a limit
        got, wanted = f"{len(url)} characters", f"at most {MAX_URL}"
        raise InvalidInput("source URL is too long", got=got, wanted=wanted, where=url[:200])
    security, own = runtime.profile.security, runtime.profile.storage.bucket
    if url.startswith("s3://"):
        if not is_within(url, places := (own, *security.source_buckets)):
            raise AccessDenied(
                "this bucket is not a source",
                got=url[:200],
                wanted=f"a URL in {', '.join(f's3://{place}' for place in places)}",
                where="security.source_buckets",
                do="Add the bucket, or bucket/prefix, to security.source_buckets in the profile.",
            )
        return url
    if is_remote(url):
        name, places = remote_name(url), security.source_repositories
        if not any(f"{name}/".startswith(f"{place.rstrip('/')}/") for place in places):
            raise AccessDenied(
                "this repository is not a source",
                got=name,
                wanted=f"one of {', '.join(places) or '(none allowed)'}",
                where="security.source_repositories",
                do="Add it, or what it begins with (hf://org/), to that setting of the profile.",
            )
        return url
    if "\0" in url or "://" in url or not Path(url).is_absolute():
        wanted = "s3://…, hf://…, oci://…, models:/name@alias, or an absolute path"
        raise InvalidInput("not a source URL", got=repr(url)[:200], wanted=wanted)
    return str(below_roots(Path(url), (runtime.state_dir, *security.source_roots)))


class Sources:
    """Opens sources by URL; S3 (and boto3) only on request, with one client for all."""

    def __init__(self, runtime: Runtime, sign: Sign) -> None:
        """``sign`` signs reads where the profile says that this node has no credentials."""
        self._runtime, self._sign = runtime, sign
        self._lock = threading.Lock()
        self._objects: ObjectStore | None = None

    def open(self, url: str) -> RangeReader:
        """Return a reader of ``url``; raises as ``allowed_source`` does."""
        source = allowed_source(url.removeprefix("file://"), self._runtime)
        if source.startswith("s3://"):
            return S3Reader(source, self.objects())
        return DirectoryReader(Path(source))

    def objects(self) -> ObjectStore:
        from paceline.storage import ObjectStore

        with self._lock:
            if self._objects is None:
                asks = self._runtime.profile.objects.presigned_s > 0
                self._objects = ObjectStore.from_runtime(
                    self._runtime, self._sign if asks else None
                )
            return self._objects


def _changed(where: object, got: int, wanted: int) -> SourceChanged:
    return SourceChanged(
        "the source is not what the manifest describes",
        got=f"{got} bytes",
        wanted=f"{wanted} bytes",
        where=where,
        do="Publish under a new version; a published version never changes.",
    )
