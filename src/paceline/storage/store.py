"""``ObjectStore``: the S3 operations that Paceline needs, with Paceline's errors.

Safe for many threads at once; one or two boto3 clients a store. Deliberately no caching, no digests
(the manifest's business) and no dependence on what is stored.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any

from paceline.config import ObjectAccess, Runtime
from paceline.errors import (
    CorruptData,
    InvalidInput,
    PacelineError,
    PermanentError,
    ServiceUnavailable,
    SourceChanged,
    SourceMissing,
)
from paceline.storage.client import (
    RetryBudget,
    head_object,
    import_boto3,
    make_client,
    translate_s3_errors,
)
from paceline.storage.ranges import AttemptFailed, PinnedObject, stream_range
from paceline.storage.signing import Sign
from paceline.storage.uploads import (
    DIGEST_KEY,
    PartsUpload,
    UploadGoneError,
    abort_upload,
    send_file,
    unfinished_uploads,
)
from paceline.storage.url import ObjectInfo, parse_url
from paceline.system import sync_directory

MIB = 1024 * 1024
PART_BYTES = 16 * MIB
PARALLEL = 4  # parts of one transfer at once
_NO_CONDITION = ("NotImplemented", "InvalidArgument", "InvalidRequest", "HTTP 501", "HTTP 400")
MAX_UPLOADS = 3  # of one file that another process ends before they are complete
SILENT_ATTEMPTS = 3  # of a server that does not answer before anything moves


class ObjectStore:
    """One S3 endpoint with one set of credentials."""

    read_bytes = 0  # of objects, that arrived here

    def __init__(
        self,
        access: ObjectAccess | None = None,
        *,
        endpoint_url: str = "",
        access_key: str = "",
        secret_key: str = "",
        sign: Sign | None = None,
    ) -> None:
        """Take ``access``, or an endpoint with keys. ``sign`` signs each read in their place: then
        the store cannot write.
        """
        access = access or ObjectAccess(
            endpoint_url=endpoint_url, access_key=access_key, secret_key=secret_key
        )
        endpoint_url = access.endpoint_url
        if endpoint_url and not endpoint_url.startswith(("http://", "https://")):
            raise InvalidInput(
                "bad S3 endpoint",
                got=repr(endpoint_url),
                wanted="http://host:port or https://host:port",
                do="Start the installation, or set the endpoint in its profile.",
            )
        self.endpoint_url = endpoint_url or "the endpoint of AWS's settings"
        self.access, self._sign = access, sign
        self._lock = threading.Lock()
        self.has_conditional_writes: bool | None = None  # None: not probed yet
        self.uploaded_files = 0
        self.reused_bytes = 0  # of uploads that resumed an earlier attempt

    @classmethod
    def from_runtime(cls, runtime: Runtime, sign: Sign | None = None) -> ObjectStore:
        """Return the store of a running installation."""
        return cls(runtime.object_access, sign=sign)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.endpoint_url!r})"

    @cached_property
    def _client(self) -> Any:
        return make_client(self.access, sign=self._sign)

    @cached_property
    def _hasty(self) -> Any:
        return make_client(self.access, hasty=True, sign=self._sign)

    def warm_up(self) -> None:
        """Create the clients now (0.4 s and 25 MB) instead of at the first request."""
        _ = self._client, self._hasty

    def signed(self, method: str, url: str, version_id: str, valid_s: int) -> str:
        """Return a URL with which anyone may GET or HEAD the object for ``valid_s`` seconds."""
        bucket, key = _object(url)
        params = {"Bucket": bucket, "Key": key} | ({"VersionId": version_id} if version_id else {})
        with translate_s3_errors(self.endpoint_url, url):
            made: str = self._client.generate_presigned_url(
                f"{method.lower()}_object", Params=params, ExpiresIn=valid_s
            )
        return made

    def ensure_bucket(self, bucket: str) -> None:
        """Make ``bucket`` unless it exists."""
        url = f"s3://{bucket}/"
        parse_url(url)
        try:
            with translate_s3_errors(self.endpoint_url, url):
                self._client.create_bucket(Bucket=bucket)
        except PermanentError as error:
            if not str(error.got).startswith(("BucketAlreadyOwnedByYou", "BucketAlreadyExists")):
                raise

    def head(self, url: str, on_failed: AttemptFailed | None = None) -> ObjectInfo:
        """Return size and ETag of the object; raises SourceMissing where there is none.

        With ``on_failed`` a server that does not answer is tried again sooner; see
        ``stream_range``.
        """
        bucket, key = _object(url)
        if on_failed is not None:
            began_s = time.monotonic()
            try:
                with translate_s3_errors(self.endpoint_url, url):
                    answer = self._head(self._hasty, bucket, key)
                return _info(url, answer, "ContentLength")
            except ServiceUnavailable as error:
                on_failed(error, time.monotonic() - began_s)
        with translate_s3_errors(self.endpoint_url, url):
            return _info(url, self._head(self._client, bucket, key), "ContentLength")

    def _head(self, client: Any, bucket: str, key: str) -> dict[str, Any]:
        # The coordinator signs reads of objects only, no listing.
        return head_object(client, bucket, key, may_list=self._sign is None)

    def require_answer(self, url: str, on_failed: AttemptFailed) -> None:
        """Raise ServiceUnavailable where the server sends no answer at all about the object,
        several times in a row; ``on_failed`` receives each. Other errors are left to the next
        request.
        """
        import_boto3()
        from botocore.exceptions import ConnectTimeoutError, ReadTimeoutError

        bucket, key = _object(url)
        began_s = time.monotonic()
        for left in reversed(range(SILENT_ATTEMPTS)):
            try:
                with translate_s3_errors(self.endpoint_url, url):
                    self._hasty.head_object(Bucket=bucket, Key=key)
            except ServiceUnavailable as error:
                if not isinstance(error.__cause__, ConnectTimeoutError | ReadTimeoutError):
                    return
                silent_s = time.monotonic() - began_s
                if not left:
                    got = f"nothing, {SILENT_ATTEMPTS} times in {silent_s:.0f} s"
                    raise error.as_kind(ServiceUnavailable, got=got) from error
                on_failed(error, silent_s)
            except PacelineError:
                return
            else:
                return

    def exists(self, url: str) -> bool:
        try:
            self.head(url)
        except SourceMissing:
            return False
        return True

    def get_bytes(self, url: str, max_bytes: int = 64 * MIB) -> bytes:
        """Return the whole object; raises InvalidInput where it is larger than ``max_bytes``, and
        SourceMissing, which names the object or its bucket as missing.
        """
        try:
            info = self.head(url)
        except SourceMissing as error:
            self._require_bucket(url, error)
            raise
        if info.size > max_bytes:
            raise InvalidInput(
                "object is too large to read at once",
                got=f"{info.size} bytes",
                wanted=f"at most {max_bytes} bytes",
                where=url,
            )
        data = bytearray(info.size)
        self.read_range_into(url, 0, memoryview(data), etag=info.etag, size=info.size)
        return bytes(data)

    def put_bytes(self, url: str, data: bytes) -> ObjectInfo:
        """Write ``data`` as one object and return its info."""
        bucket, key = _object(url)
        with translate_s3_errors(self.endpoint_url, url):
            self._client.put_object(Bucket=bucket, Key=key, Body=data)
        return self._written(url, len(data))

    def put_if_absent(self, url: str, data: bytes) -> bool | None:
        """Write ``data`` unless an object is there, and return whether it was written; of several
        concurrent writers one succeeds. False may be our own write, whose answer was lost.

        None where the server has no conditional writes (it refuses them, or accepts a second one as
        well): the content is then unknown.
        """
        bucket, key = _object(url)

        def put() -> bool:
            try:
                with translate_s3_errors(self.endpoint_url, url):
                    self._client.put_object(Bucket=bucket, Key=key, Body=data, IfNoneMatch="*")
            except SourceChanged:  # 412
                return False
            return True

        repeat = RetryBudget().repeat
        try:
            written = self.has_conditional_writes is not False and repeat(put)
            # Many servers ignore a condition that they do not support.
            if self.has_conditional_writes is None:
                self.has_conditional_writes = not (written and repeat(put))
        except PermanentError as error:
            if not str(error.got).startswith(_NO_CONDITION):
                raise
            self.has_conditional_writes = False
        return written if self.has_conditional_writes else None

    def read_range_into(
        self,
        url: str,
        offset: int,
        view: memoryview,
        *,
        etag: str,
        size: int | None = None,
        version_id: str | None = None,
    ) -> None:
        """Fill ``view`` with the object's bytes from ``offset`` on, pinned to ``etag``.

        Raises SourceChanged where the object has another ETag (or total size) by now.
        """
        for _ in self.stream_range(url, offset, view, etag=etag, size=size, version_id=version_id):
            pass

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

        With ``on_failed``, which receives each failed attempt, a server that does not answer is
        left after ``QUICK_TIMEOUT_S`` for a new connection with longer timeouts.
        """
        _object(url)
        pinned = PinnedObject(url, etag, size, version_id)
        clients = self._client if on_failed is None else self._hasty, self._client
        return self._counted(
            stream_range(clients, self.endpoint_url, pinned, offset, view, on_socket, on_failed)
        )

    def _counted(self, reading: Iterator[int]) -> Iterator[int]:
        """Yield what ``reading`` does, and count the bytes once it ends, however it does."""
        done = 0
        try:
            for done in reading:
                yield done
        finally:
            with self._lock:
                self.read_bytes += done

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
        """Write the file as one object, in parallel parts where it is large, resuming with the
        parts that an interrupted attempt left there. ``sha256`` is stored in its metadata (see
        ``holds``).

        Once ``stopping`` is set it ends soon, by Cancelled, and its parts stay. ``on_bytes`` is
        called for each part that S3 has received, from the thread that sent it. ``check`` is called
        once all is read; where it raises, no object appears.
        """
        _object(url)
        source = regular_file(path)
        size = source.stat().st_size
        for attempt in range(MAX_UPLOADS):
            try:
                reused = send_file(
                    self._client,
                    self.endpoint_url,
                    source,
                    url,
                    sha256,
                    resume=not attempt,
                    stopping=stopping,
                    on_bytes=on_bytes,
                    check=check,
                )
            except UploadGoneError:
                # Two processes that upload the same file share one upload: it ends with the first.
                if not (sha256 and self.holds(url, size, sha256)):
                    continue
                on_bytes(size)
                reused = size
            with self._lock:
                self.uploaded_files += 1
                self.reused_bytes += reused
            return self._written(url, size)
        raise ServiceUnavailable(
            "another process ends the uploads of this object",
            got=f"{MAX_UPLOADS} uploads that ended before they were complete",
            where=f"{url} on {self.endpoint_url}",
            do="Find the other writer, and publish again.",
        )

    def upload_parts(self, url: str, size: int, part_bytes: int) -> PartsUpload:
        """Return the upload of one object in parts, resumed where an earlier attempt left it."""
        _object(url)
        return PartsUpload(self._client, self.endpoint_url, url, size, part_bytes)

    def holds(self, url: str, size: int, sha256: str) -> bool:
        """Return whether the object is there, complete, uploaded with this digest."""
        bucket, key = _object(url)
        try:
            with translate_s3_errors(self.endpoint_url, url):
                answer = self._head(self._client, bucket, key)
        except SourceMissing:
            return False
        known = {name.lower(): value for name, value in answer.get("Metadata", {}).items()}
        return int(answer["ContentLength"]) == size and known.get(DIGEST_KEY) == sha256

    def abort_uploads(self, prefix_url: str, older_than_s: float = 0.0) -> int:
        """Abort unfinished uploads below ``prefix_url`` of that age, and return how many."""
        bucket, prefix = _object(prefix_url)
        prefix = f"{prefix.rstrip('/')}/"
        before = time.time() - older_than_s
        found = [
            {"Bucket": bucket, "Key": each["Key"], "UploadId": each["UploadId"]}
            for each in unfinished_uploads(self._client, self.endpoint_url, bucket, prefix)
            if each["Initiated"].timestamp() <= before
        ]
        for each in found:
            abort_upload(self._client, self.endpoint_url, each)
        return len(found)

    def download_file(self, url: str, path: Path | str) -> ObjectInfo:
        """Write the object to ``path`` (replaced atomically, when complete) by parallel ranges."""
        target = Path(path)
        info = self.head(url)
        temporary = target.with_name(f".{target.name}.{os.getpid()}.{threading.get_ident()}.part")
        try:
            with temporary.open("wb") as file:
                file.truncate(info.size)
                self._fetch(info, file.fileno())
                os.fsync(file.fileno())
            temporary.replace(target)
            sync_directory(target.parent)
        finally:
            temporary.unlink(missing_ok=True)
        return info

    def list(self, prefix_url: str) -> list[ObjectInfo]:
        """Return the objects below ``prefix_url`` by key; a prefix is a directory, so that
        ``…/v1`` never matches ``…/v10/…``. Nothing there is an empty list.
        """
        bucket, _ = parse_url(prefix_url)
        found = [
            _info(f"s3://{bucket}/{each['Key']}", each, "Size")
            for page in self._pages(prefix_url)
            for each in page.get("Contents", ())
        ]
        return sorted(found, key=lambda info: info.url)

    def directories(self, prefix_url: str) -> tuple[str, ...]:
        """Return the names of the directories right below ``prefix_url``, sorted."""
        pages = self._pages(prefix_url, Delimiter="/")
        found = (each["Prefix"] for page in pages for each in page.get("CommonPrefixes", ()))
        return tuple(sorted(each[:-1].rpartition("/")[2] for each in found))

    def _pages(self, prefix_url: str, **options: str) -> Iterator[dict[str, Any]]:
        bucket, prefix = parse_url(prefix_url)
        prefix = f"{prefix.rstrip('/')}/" if prefix else ""
        with translate_s3_errors(self.endpoint_url, prefix_url):
            listing = self._client.get_paginator("list_objects_v2")
            yield from listing.paginate(Bucket=bucket, Prefix=prefix, **options)

    def delete(self, url: str) -> None:
        """Delete the object; one that does not exist is no error."""
        bucket, key = _object(url)
        try:
            with translate_s3_errors(self.endpoint_url, url):
                self._client.delete_object(Bucket=bucket, Key=key)
        except SourceMissing:
            return

    def delete_prefix(self, url: str) -> int:
        """Delete every object below ``url`` (as ``list`` returns them) and return how many."""
        _object(url)  # a whole bucket is never a prefix
        found = self.list(url)
        with ThreadPoolExecutor(PARALLEL) as pool:
            list(pool.map(self.delete, [info.url for info in found]))
        return len(found)

    def _require_bucket(self, url: str, missing: SourceMissing) -> None:
        """Raise SourceMissing naming the bucket where that is what is ``missing``."""
        bucket, _ = parse_url(url)
        try:
            with translate_s3_errors(self.endpoint_url, url):
                self._client.head_bucket(Bucket=bucket)
        except SourceMissing:
            raise SourceMissing(
                "bucket does not exist", got=bucket, where=missing.where, do=missing.do
            ) from missing
        except PacelineError:
            return  # permission to read objects does not include head_bucket everywhere

    def _written(self, url: str, size: int) -> ObjectInfo:
        info = self.head(url)
        if info.size != size:
            raise CorruptData(
                "S3 holds another size than was written",
                got=f"{info.size} bytes",
                wanted=f"{size} bytes",
                where=f"{url} on {self.endpoint_url}",
                do="Write it again; somebody else may write to the same key.",
            )
        return info

    def _fetch(self, info: ObjectInfo, descriptor: int) -> None:
        def part(offset: int) -> None:
            data = memoryview(bytearray(min(PART_BYTES, info.size - offset)))
            self.read_range_into(info.url, offset, data, etag=info.etag, size=info.size)
            while data:
                written = os.pwrite(descriptor, data, offset)
                data, offset = data[written:], offset + written

        with ThreadPoolExecutor(PARALLEL) as pool:
            list(pool.map(part, range(0, info.size, PART_BYTES)))


def _object(url: str) -> tuple[str, str]:
    bucket, key = parse_url(url)
    if not key:
        raise InvalidInput("URL names no object", got=url, wanted="s3://bucket/key")
    return bucket, key


def regular_file(path: Path | str) -> Path:
    """Return ``path``; raises SourceMissing where it is no regular file."""
    if not Path(path).is_file():
        raise SourceMissing("file to upload does not exist", got=path, wanted="a regular file")
    return Path(path)


def _info(url: str, answer: dict[str, Any], size_field: str) -> ObjectInfo:
    return ObjectInfo(
        url=url,
        size=int(answer[size_field]),
        etag=str(answer.get("ETag", "")).strip('"'),
        version_id=answer.get("VersionId"),
    )
