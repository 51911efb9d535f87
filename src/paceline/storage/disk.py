# ruff: noqa: ARG002 - unused arguments belong to the interface of ObjectStore
"""``DiskStore``: the interface of ``ObjectStore`` in directories of a local or shared disk.

URLs are ``file:///absolute/path``. An object appears under its name complete and durable, or not at
all: written beside it under a hidden name, synced, renamed, its directory synced. Hidden names are
never listed. There are no versions and no digests; an object's ``etag`` is its size and
modification time.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import quote, unquote

from paceline.config import Runtime
from paceline.errors import (
    AccessDenied,
    Cancelled,
    InvalidInput,
    ServiceUnavailable,
    SourceChanged,
    SourceMissing,
    StorageFailed,
    StorageFull,
)
from paceline.storage.ranges import AttemptFailed
from paceline.storage.store import ObjectStore, regular_file
from paceline.storage.url import MAX_URL, ObjectInfo
from paceline.system import make_directories, sync_directory

MIB = 1024 * 1024
BLOCK = 4 * MIB
SCHEME = "file://"

_CREATE = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
_FULL = {errno.ENOSPC, errno.EDQUOT}
_AWAY = {errno.ESTALE, errno.ETIMEDOUT, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENOTCONN}
_REFUSED = {errno.EACCES, errno.EPERM, errno.EROFS}


class DiskStore(ObjectStore):
    """Objects as files; safe for many threads and processes at once."""

    def __init__(self) -> None:
        self.endpoint_url = SCHEME
        self.uploaded_files = 0
        self.reused_bytes = 0
        self.has_conditional_writes = True
        self._lock = threading.Lock()

    @staticmethod
    def path_of(url: str) -> Path:
        """Return the file that ``url`` names; raises InvalidInput for anything but file:///…"""

        def bad(what: str, got: object) -> InvalidInput:
            return InvalidInput(what, got=got, wanted="file:///absolute/path", where=url[:200])

        if not url.startswith(f"{SCHEME}/"):
            raise bad("not a file's URL", repr(url[:200]))
        if len(url) > MAX_URL:
            raise bad("URL is too long", f"{len(url)} characters")
        path = unquote(url.removeprefix(SCHEME))
        if any(part in (".", "..") for part in path.split("/")):
            raise bad("path has a relative component", repr(path))
        if any(ord(letter) < 0x20 or letter == "\x7f" for letter in path):
            raise bad("path has a control character", repr(path))
        return Path(path)

    @staticmethod
    def url_of(path: Path | str) -> str:
        return SCHEME + quote(str(Path(path).absolute()))

    def warm_up(self) -> None:
        """Do nothing: there is no client to create."""

    def ensure_bucket(self, bucket: str) -> None:
        """Do nothing: directories are created when needed."""

    def head(self, url: str, on_failed: AttemptFailed | None = None) -> ObjectInfo:
        """Return size and tag of the object; raises SourceMissing where there is none."""
        path = self.path_of(url)
        with _translated(url):
            if path.is_dir():
                raise IsADirectoryError(errno.ENOENT, "is a directory", str(path))
            return _info(url, path.stat())

    def require_answer(self, url: str, on_failed: AttemptFailed) -> None:
        """Do nothing: a disk answers or raises."""

    def holds(self, url: str, size: int, sha256: str) -> bool:
        """Return False: no digest is stored beside a file, so its content cannot be checked."""
        self.path_of(url)
        return False

    def get_bytes(self, url: str, max_bytes: int = 64 * MIB) -> bytes:
        """Return the whole object; raises InvalidInput where it is larger than ``max_bytes``."""
        path = self.path_of(url)
        with _translated(url), path.open("rb") as file:
            data = file.read(max_bytes + 1)
        if len(data) > max_bytes:
            raise InvalidInput(
                "object is too large to read at once",
                got=f"more than {max_bytes} bytes",
                wanted=f"at most {max_bytes} bytes",
                where=url,
            )
        return data

    def put_bytes(self, url: str, data: bytes) -> ObjectInfo:
        """Write ``data`` as one object and return its info."""
        return self._put(url, lambda descriptor: _write(descriptor, memoryview(data)))

    def put_if_absent(self, url: str, data: bytes) -> bool:
        """Write ``data`` unless a file is there, and return whether it was written."""
        with contextlib.suppress(FileExistsError):
            self._put(url, lambda descriptor: _write(descriptor, memoryview(data)), new=True)
            return True
        return False

    def upload_file(
        self,
        path: Path | str,
        url: str,
        sha256: str = "",
        *,
        stopping: threading.Event | None = None,
        on_bytes: Callable[[int], None] = lambda _count: None,
        check: Callable[[], None] = lambda: None,
    ) -> ObjectInfo:
        """Write the file as one object. ``sha256`` is not stored; no object appears once it is
        stopped, or where ``check``, called when all of it was read, raises.
        """
        source = regular_file(path)

        def copy(descriptor: int) -> None:
            with source.open("rb", buffering=0) as file:
                at = 0
                while sent := os.sendfile(descriptor, file.fileno(), at, BLOCK):
                    at += sent
                    on_bytes(sent)
                    if stopping is not None and stopping.is_set():
                        raise Cancelled("the upload was stopped", where=source)
            check()

        info = self._put(url, copy)
        with self._lock:
            self.uploaded_files += 1
        return info

    def download_file(self, url: str, path: Path | str) -> ObjectInfo:
        """Write the object to ``path``, which is replaced atomically when complete."""
        self.head(url)
        self.upload_file(self.path_of(url), self.url_of(path))
        return self.head(url)

    def stream_range(
        self,
        url: str,
        offset: int,
        view: memoryview,
        *,
        etag: str | None,
        size: int | None = None,
        version_id: str | None = None,
        on_socket: Callable[[socket.socket], None] | None = None,
        on_failed: AttemptFailed | None = None,
    ) -> Iterator[int]:
        """As ``read_range_into``, and yield how much of ``view`` is filled after each step.

        Raises SourceChanged where the object was replaced, or is shorter.
        """
        path = self.path_of(url)
        target = view.cast("B")
        done = 0
        with _translated(url), path.open("rb", buffering=0) as file:
            found = _info(url, os.fstat(file.fileno()))
            if (etag and found.etag != etag) or size not in (None, found.size):
                raise SourceChanged(
                    "object was replaced while it was read", got=found.etag, wanted=etag, where=url
                )
            while done < len(target):
                got = os.preadv(file.fileno(), [target[done : done + BLOCK]], offset + done)
                if not got:
                    raise SourceChanged(
                        "object is shorter than the range",
                        got=f"{offset + done} bytes",
                        wanted=f"{offset + len(target)} bytes",
                        where=url,
                    )
                done += got
                yield done

    def list(self, prefix_url: str) -> list[ObjectInfo]:
        """Return the objects below ``prefix_url`` by name; nothing there is an empty list."""
        top = self.path_of(prefix_url.rstrip("/"))
        found: list[ObjectInfo] = []
        with _translated(prefix_url):
            for directory, names, files in os.walk(top, onerror=_unless_gone):
                names[:] = [name for name in names if not name.startswith(".")]
                for name in files:
                    path = Path(directory) / name
                    # A file that is deleted during the walk is left out.
                    with contextlib.suppress(FileNotFoundError):
                        if not name.startswith("."):
                            found.append(_info(self.url_of(path), path.stat()))
        return sorted(found, key=lambda info: info.url)

    def directories(self, prefix_url: str) -> tuple[str, ...]:
        """Return the names of the directories right below ``prefix_url``, sorted."""
        top = self.path_of(prefix_url.rstrip("/"))
        with _translated(prefix_url):
            if not top.is_dir():
                return ()
            return tuple(
                sorted(each.name for each in top.iterdir() if each.is_dir() and each.name[0] != ".")
            )

    def delete(self, url: str) -> None:
        """Delete the object for good; one that does not exist is no error."""
        path = self.path_of(url)
        with _translated(url):
            try:
                path.unlink()
            except FileNotFoundError:
                return
            sync_directory(path.parent)

    def delete_prefix(self, url: str) -> int:
        """Delete every object below ``url``, and the directory, and return how many."""
        found = self.list(url)
        top = self.path_of(url.rstrip("/"))
        with _translated(url):
            if top.is_dir():
                shutil.rmtree(top)
        return len(found)

    def abort_uploads(self, prefix_url: str, older_than_s: float = 0.0) -> int:
        """Remove what interrupted writes left below ``prefix_url``, and return how many."""
        top = self.path_of(prefix_url.rstrip("/"))
        before = time.time() - older_than_s
        removed = 0
        with _translated(prefix_url):
            for path in top.rglob(".*.part"):
                with contextlib.suppress(FileNotFoundError):
                    if path.stat().st_mtime <= before:
                        path.unlink()
                        removed += 1
        return removed

    def _put(self, url: str, fill: Callable[[int], None], *, new: bool = False) -> ObjectInfo:
        path = self.path_of(url)
        part = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.part")
        with _translated(url):
            make_directories(path.parent)
            try:
                descriptor = os.open(part, _CREATE, 0o666)
                try:
                    fill(descriptor)
                    os.fsync(descriptor)  # an error here discards the file: it is never renamed
                    info = _info(url, os.fstat(descriptor))
                finally:
                    os.close(descriptor)
                if new:
                    os.link(part, path)  # never replaces
                else:
                    part.replace(path)
            finally:
                part.unlink(missing_ok=True)
            sync_directory(path.parent)
        return info


def _write(descriptor: int, data: memoryview) -> None:
    while data:
        data = data[os.write(descriptor, data[:BLOCK]) :]


def _unless_gone(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error


def _info(url: str, stat: os.stat_result) -> ObjectInfo:
    return ObjectInfo(url=url, size=stat.st_size, etag=f"{stat.st_size:x}-{stat.st_mtime_ns:x}")


@contextlib.contextmanager
def _translated(url: str) -> Iterator[None]:
    try:
        yield
    except FileExistsError:
        raise
    except OSError as error:
        got = error.strerror or str(error)
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            raise SourceMissing("no such file", got=got, where=url) from error
        if error.errno in _FULL:
            do = "Free space, or keep fewer checkpoints."
            raise StorageFull("disk is full", got=got, where=url, do=do) from error
        if error.errno in _AWAY:
            raise ServiceUnavailable("disk does not answer", got=got, where=url) from error
        if error.errno in _REFUSED:
            raise AccessDenied("disk refuses", got=got, where=url) from error
        raise StorageFailed("disk failed", got=got, where=url) from error


def open_store(runtime: Runtime) -> ObjectStore:
    """Return the installation's S3 store, or this machine's disk where it has no S3 server."""
    if not runtime.endpoints.s3_url:
        return DiskStore()
    return ObjectStore.from_runtime(runtime)
